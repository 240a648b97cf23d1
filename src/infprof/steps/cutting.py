"""Where in the sequence a step begins, once it is known which anchors occur once per step."""

from __future__ import annotations

import numpy as np

from infprof.quantiles import median
from infprof.steps.anchors import EMBEDDING, H2D, Cue
from infprof.steps.lanes import Lane
from infprof.trace import IntArray

# Host gaps decide where in a segment a step begins when so many agree on the place.
AGREED = 0.5
# A cue that is there once in so many segments tells where steps open or close.
ONCE = 0.8


def cut(lane: Lane, anchor: IntArray, cues: list[Cue], until: IntArray | None) -> IntArray:
    """The unit with which each step begins: between what closes a step and what opens the next one.

    There all are cut alike: behind the one or before the other by the distance at which most have their largest host
    gap. ``until``: where each anchor's own segment ends, in which a step begins, if that is known.
    """
    at = anchor if anchor[0] == 0 or until is not None else np.concatenate([[0], anchor])
    bounds = np.append(at, len(lane))
    closing, opening = _edges(bounds, cues)
    low = np.where(closing >= 0, closing, at)
    high = np.where(opening >= 0, opening, np.minimum(bounds[1:], len(lane) - 1))
    if until is not None:
        high = np.where(opening >= 0, opening, np.minimum(until, len(lane) - 1))
    known = (closing >= 0) | (opening >= 0)
    known[-1] &= high[-1] > low[-1]
    sane = high > low
    place = _largest_gaps(lane.host_gap_ns, np.where(sane, low + 1, high), high)
    used = known & sane
    if not used.any():
        used = sane
    if not used.any():
        return anchor
    ahead, ahead_share = mode((place - low)[used])
    back, back_share = mode((high - place)[used])
    moved = np.where(sane, np.minimum(low + ahead, high), high) if ahead_share > back_share else high - back
    if max(ahead_share, back_share) < AGREED:
        moved = high
    if not known.any():
        # The last stretch ends with the recording, not with a step.
        moved = moved if until is not None else moved[:-1]
    else:
        # Where neither edge is there, the place that is usual before the next anchor.
        usual, _ = mode((bounds[1:] - moved)[used])
        moved = np.where(known, moved, bounds[1:] - usual)
        if len(at) > len(anchor) and not known[0]:
            moved[0] = _first_start(int(anchor[0]), int(moved[0]), cues)
        moved = moved[:-1] if not known[-1] else moved
    # What comes before the first cut is a stretch of its own.
    return np.unique(np.concatenate([[0], moved[(moved >= 0) & (moved < len(lane))]]))


def _first_start(anchor: int, otherwise: int, cues: list[Cue]) -> int:
    """The start of the step around the first anchor: what opens it is the last of its kind, if it waited for none."""
    before = [cue.at[cue.at <= anchor] for cue in cues if cue.name in (H2D, EMBEDDING)]
    last = [int(at[-1]) for at in before if len(at)]
    return min(last, default=otherwise)


def _edges(bounds: IntArray, cues: list[Cue]) -> tuple[IntArray, IntArray]:
    """For each segment the unit that closes a step and the one that opens the next, -1 where there is none."""
    none_at = np.full(len(bounds) - 1, -1, dtype=np.int64)
    events: list[tuple[float, Cue, IntArray]] = []
    for cue in cues:
        before = np.searchsorted(cue.at, bounds)
        once = np.diff(before) == 1
        if once[:-1].mean() < ONCE:
            continue
        where = np.where(once, cue.at[np.minimum(before[:-1], len(cue.at) - 1)], -1)
        length = bounds[1:] - bounds[:-1]
        events.append((median(((where - bounds[:-1]) / length)[once]), cue, where))
    if not events:
        return none_at, none_at
    events.sort(key=lambda event: event[0])
    begin = max(range(len(events)), key=lambda i: _order_score([e[1] for e in events[i:] + events[:i]]))
    first, last = events[begin], events[begin - 1]
    opening = first[2] if first[1].opens else none_at
    closing = last[2] if not last[1].opens else none_at
    if begin == 0:
        # The step that opens here is the next one: its first event lies behind the segment's end.
        opening = np.append(opening[1:], -1) if first[1].opens else none_at
    return closing, opening


def _largest_gaps(gap: IntArray, low: IntArray, high: IntArray) -> IntArray:
    """The unit with the largest host gap between low and high, inclusive, for each pair."""
    bounds = np.empty(2 * len(low), dtype=np.int64)
    bounds[0::2], bounds[1::2] = low, high + 1
    most = np.maximum.reduceat(np.append(gap, -1), bounds)[0::2]
    place = low.copy()
    lengths = high + 1 - low
    owner = np.repeat(np.arange(len(low)), lengths)
    units = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths) + low[owner]
    hit = gap[units] == most[owner]
    place[owner[hit][::-1]] = units[hit][::-1]
    return np.asarray(place, dtype=np.int64)


def _order_score(cues: list[Cue]) -> float:
    """How well the order fits a step: what opens it first, what closes it last."""
    count = len(cues)
    return sum(cue.weight * ((count - rank) if cue.opens else rank) for rank, cue in enumerate(cues))


def mode(values: IntArray) -> tuple[int, float]:
    """The most frequent value and its share."""
    found, many = np.unique(values, return_counts=True)
    best = int(many.argmax())
    return int(found[best]), float(many[best] / len(values))
