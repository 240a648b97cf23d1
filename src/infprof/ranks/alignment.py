"""Which collectives of several ranks are the same one, and what the ranks' clocks differ by.

All ranks leave an all-reduce, all-gather or reduce-scatter within microseconds of each other, whenever they came: the
ends of common ones are marks that every clock has seen at the same moment. A rank's offset is the median difference of
such ends, its error the 95th percentile of what is left; where the differences grow steadily, a drift is taken out too.
A clock that is known to be shared (one file), or whose wall time puts the ends together already, is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infprof.measures.collectives import LEFT_TOGETHER, DeviceCollectives
from infprof.quantiles import median
from infprof.trace import BoolArray, IntArray

# So many common collectives are needed before a clock is moved by their ends.
MIN_COMMON = 8
# A wall clock is believed where the ends of common collectives lie this close together by it, and ends are believed to
# be those of the same collectives where they agree this well once the clock is moved.
WALL_AGREEMENT_NS = 50_000
END_AGREEMENT_NS = 200_000
# Traces may begin a few collectives apart: so many places are tried.
MAX_SHIFT = 64
SHIFT_SAMPLE = 1024
# Names must agree in this share of the places that are laid over each other.
NAMES_AGREE = 0.9
# Of two places for the same collectives, the better one must leave this much less.
CLEARLY_BETTER = 0.5
# Crystals of servers drift by tens of ppm; a drift needs this many marks, and must leave clearly less.
MAX_DRIFT_PPM = 500.0
MIN_FOR_DRIFT = 16

REFERENCE, SAME_FILE, WALL_CLOCK, COLLECTIVES, NOT_ALIGNED = "reference", "same-file", "wall-clock", "collectives", "no"


@dataclass(frozen=True)
class Participant:
    """One device of one file. ``clock_start_unix_ns`` is the Unix time of the file's time 0, None where not known."""

    file: int
    collectives: DeviceCollectives
    clock_start_unix_ns: int | None


@dataclass
class Clock:
    """How a participant's times become those of the reference of its ``component``.

    ``ids`` names the collectives: equal ids are the same one, -1 = not matched. Times: t + offset − drift · (t − origin).
    """

    how: str
    component: int
    ids: IntArray
    offset_ns: int = 0
    drift: float = 0.0
    origin_ns: int = 0
    error_ns: int = 0
    common: int = 0

    def on_reference(self, times: IntArray) -> IntArray:
        """Times of this participant on the clock of the reference, ns."""
        moved = times + self.offset_ns
        if self.drift:
            moved = moved - np.rint(self.drift * (times - self.origin_ns)).astype(np.int64)
        return np.asarray(moved, dtype=np.int64)


def align(participants: Sequence[Participant]) -> list[Clock]:
    """The clock of each participant, in order.

    The first one that has collectives is the reference of component 0. Those that share no collective with anyone
    aligned so far (stages of a pipeline) begin a component of their own, in which times can be compared.
    """
    keys = _keys(participants)
    clocks: list[Clock | None] = [None] * len(participants)
    component, next_id = 0, _next_id(keys)
    for first in range(len(participants)):
        if clocks[first] is not None:
            continue
        mine = participants[first].collectives
        ids = keys[first] if keys is not None else np.arange(next_id, next_id + len(mine), dtype=np.int64)
        next_id += len(mine)
        reference = clocks[first] = Clock(REFERENCE, component, ids)
        component += 1
        aligned: list[tuple[int, Clock]] = [(first, reference)]
        waiting = [i for i in range(first + 1, len(participants)) if clocks[i] is None]
        while waiting:
            found = {i: c for i in waiting if (c := _aligned(i, aligned, participants, keys)) is not None}
            for i, clock in found.items():
                clocks[i] = clock
            # Those found now may have collectives in common with others that the reference has not.
            aligned = list(found.items())
            waiting = [i for i in waiting if i not in found] if found else []
    done = [clock for clock in clocks if clock is not None]
    _name_the_lonely(done)
    return done


def _name_the_lonely(clocks: list[Clock]) -> None:
    sizes = np.bincount([clock.component for clock in clocks], minlength=1)
    for clock in clocks:
        if sizes[clock.component] == 1 and len(clocks) > 1:
            clock.how = NOT_ALIGNED


def _next_id(keys: list[IntArray] | None) -> int:
    return 0 if keys is None else 1 + max((int(k.max()) for k in keys if len(k)), default=-1)


def _keys(participants: Sequence[Participant]) -> list[IntArray] | None:
    """An id per (process group, sequence, how many times before), the same in all ranks; None where not all say it."""
    some = [p.collectives for p in participants if len(p.collectives)]
    if not some or not all(c.has_sequences for c in some):
        return None
    groups: dict[str, int] = {}
    rows = []
    for number, participant in enumerate(participants):
        c = participant.collectives
        of_name = np.array([groups.setdefault(name, len(groups)) for name in c.names], dtype=np.int64)
        rows.append(np.stack([of_name[c.group], c.sequence, np.full(len(c), number)], axis=1))
    table = np.concatenate(rows)
    # The order of starts within one (group, sequence, rank): coalesced collectives share their sequence.
    order = np.lexsort((np.arange(len(table)), table[:, 2], table[:, 1], table[:, 0]))
    ordered = table[order]
    new = np.ones(len(table), dtype=np.bool_)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    begins = np.flatnonzero(new)
    times_before = np.empty(len(table), dtype=np.int64)
    times_before[order] = np.arange(len(table)) - np.repeat(begins, np.diff(begins, append=len(table)))
    _, ids = np.unique(np.column_stack([table[:, :2], times_before]), axis=0, return_inverse=True)
    return np.split(np.asarray(ids, dtype=np.int64).reshape(-1), np.cumsum([len(r) for r in rows])[:-1])


def _aligned(
    number: int, aligned: list[tuple[int, Clock]], participants: Sequence[Participant], keys: list[IntArray] | None
) -> Clock | None:
    """The clock of a participant by the first aligned one with which it shares enough; None where there is none."""
    for other, clock in aligned:
        found = _against(
            participants[number], participants[other], clock, None if keys is None else (keys[number], keys[other])
        )
        if found is not None:
            return found
    return None


@dataclass(frozen=True)
class _Fit:
    """``mine`` and ``theirs`` are rows of the same collectives; ``error_ns`` is the 95th percentile of what is left."""

    mine: IntArray
    theirs: IntArray
    offset_ns: int
    drift: float
    origin_ns: int
    error_ns: int
    how: str
    marks: int


def _against(
    mine: Participant, other: Participant, clock: Clock, keys: tuple[IntArray, IntArray] | None
) -> Clock | None:
    """``mine`` on the reference's clock through one participant that is on it already."""
    known, how = _known_offset(mine, other)
    theirs_end = clock.on_reference(other.collectives.end)
    shift = None if known is None else known + clock.offset_ns
    if keys is not None:
        _, a, b = np.intersect1d(*keys, assume_unique=True, return_indices=True)
        fit = _fit(mine.collectives, a, b, theirs_end, shift, how)
    else:
        fit = _best_place(mine.collectives, other.collectives, theirs_end, shift, how)
    if fit is None:
        return None
    if keys is not None:
        ids = keys[0]
    else:
        ids = np.full(len(mine.collectives), -1, dtype=np.int64)
        ids[fit.mine] = clock.ids[fit.theirs]
    # An error adds to that of the one in between.
    error = fit.error_ns + (clock.error_ns if clock.how != REFERENCE else 0)
    return Clock(fit.how, clock.component, ids, fit.offset_ns, fit.drift, fit.origin_ns, error, fit.marks)


def _known_offset(mine: Participant, other: Participant) -> tuple[int | None, str]:
    if mine.file == other.file:
        return 0, SAME_FILE
    if mine.clock_start_unix_ns is None or other.clock_start_unix_ns is None:
        return None, COLLECTIVES
    return mine.clock_start_unix_ns - other.clock_start_unix_ns, WALL_CLOCK


def _fit(
    c: DeviceCollectives, a: IntArray, b: IntArray, theirs_end: IntArray, known: int | None, how: str
) -> _Fit | None:
    """The offset that puts the ends of these pairs together; None where there are too few, or they do not agree."""
    marks = _are_marks(c)[a]
    here = c.end[a][marks]
    if not len(here):
        return None
    apart = theirs_end[b][marks] - here
    if known is not None:
        left = np.abs(apart - known)
        if median(left) <= (END_AGREEMENT_NS if how == SAME_FILE else WALL_AGREEMENT_NS):
            return _Fit(a, b, known, 0.0, 0, _p95(left), how, len(here))
    # Within one file there is but one clock: ends that lie apart are those of other collectives.
    if how == SAME_FILE or len(here) < MIN_COMMON:
        return None
    origin = int(here[0])
    offset, drift = _line(here - origin, apart)
    left = np.abs(apart - offset + drift * (here - origin))
    if median(left) > END_AGREEMENT_NS:
        return None
    return _Fit(a, b, offset, drift, origin, _p95(left), COLLECTIVES, len(here))


def _line(times: IntArray, apart: IntArray) -> tuple[int, float]:
    """Offset at time 0 and drift (what the clock gains per ns) of robust differences; no drift unless it is plain.

    The slope is the median over pairs half the series apart (an incomplete Theil–Sen estimate, linear in time).
    """
    flat = round(median(apart))
    half = len(times) // 2
    if len(times) < MIN_FOR_DRIFT:
        return flat, 0.0
    base = times[half : 2 * half] - times[:half]
    usable = base > 0
    if not usable.any():
        return flat, 0.0
    slope = median(((apart[half : 2 * half] - apart[:half])[usable]) / base[usable])
    rest = apart - slope * times
    offset = round(median(rest))
    explained = _p95(np.abs(rest - offset)) <= CLEARLY_BETTER * _p95(np.abs(apart - flat))
    plain = abs(slope) * 1e6 <= MAX_DRIFT_PPM and explained
    return (offset, -slope) if plain else (flat, 0.0)


def _best_place(
    mine: DeviceCollectives, other: DeviceCollectives, theirs_end: IntArray, known: int | None, how: str
) -> _Fit | None:
    """The fit of two ranks whose collectives are the same by their order within each communicator."""
    pairs = _by_channel(mine, other)
    shift = _shift(mine, other, pairs, theirs_end, known, how)
    return None if shift is None else _fit(mine, *_laid_over(pairs, shift), theirs_end, known, how)


def _shift(
    mine: DeviceCollectives,
    other: DeviceCollectives,
    pairs: list[tuple[IntArray, IntArray]],
    theirs_end: IntArray,
    known: int | None,
    how: str,
) -> int | None:
    """How many collectives the other one has before the first of mine; negative where it began later.

    Where both have the same number they lie in place, unless another place leaves clearly less. If two places are as
    good as each other (collectives at equal distances), nothing is claimed unless the clocks are known.
    """
    fits = []
    # The beginning tells the place as well as the whole.
    short = [(a[:SHIFT_SAMPLE], b[:SHIFT_SAMPLE]) for a, b in pairs]
    for shift in range(-MAX_SHIFT, MAX_SHIFT + 1):
        a, b = _laid_over(short, shift)
        if len(a) and _names_agree(mine, other, a, b):
            fit = _fit(mine, a, b, theirs_end, known, how)
            if fit is not None:
                fits.append((fit.error_ns, abs(shift), shift, fit.how))
    if not fits:
        return None
    # By a clock that is known only one place can be right, whatever the distances are.
    by_clock = sorted(fit for fit in fits if fit[3] != COLLECTIVES)
    if by_clock:
        return by_clock[0][2]
    fits.sort()
    best = fits[0]
    in_place = [fit for fit in fits if fit[2] == 0]
    if in_place and all(len(a) == len(b) for a, b in pairs) and best[0] >= CLEARLY_BETTER * in_place[0][0]:
        return 0
    doubtful = len(fits) > 1 and best[0] >= CLEARLY_BETTER * fits[1][0]
    return None if doubtful else best[2]


def _by_channel(mine: DeviceCollectives, other: DeviceCollectives) -> list[tuple[IntArray, IntArray]]:
    """Rows of both, per process group where both name theirs, else all of them as one."""
    if not (mine.group >= 0).all() or not (other.group >= 0).all():
        return [(np.arange(len(mine)), np.arange(len(other)))]
    names = {mine.names[g] for g in np.unique(mine.group)} & {other.names[g] for g in np.unique(other.group)}
    return [
        (np.flatnonzero(mine.group == mine.names.index(n)), np.flatnonzero(other.group == other.names.index(n)))
        for n in sorted(names)
    ]


def _laid_over(pairs: list[tuple[IntArray, IntArray]], shift: int) -> tuple[IntArray, IntArray]:
    """Pairs of rows when the second of each is ``shift`` places further than the first."""
    left, right = [], []
    for a, b in pairs:
        a, b = (a, b[shift:]) if shift >= 0 else (a[-shift:], b)
        length = min(len(a), len(b))
        left.append(a[:length])
        right.append(b[:length])
    none = np.empty(0, dtype=np.int64)
    return np.concatenate([none, *left]), np.concatenate([none, *right])


def _names_agree(mine: DeviceCollectives, other: DeviceCollectives, a: IntArray, b: IntArray) -> bool:
    theirs = {name: i for i, name in enumerate(other.names)}
    translated = np.array([theirs.get(name, -1) for name in mine.names], dtype=np.int64)
    return bool(np.mean(translated[mine.operation[a]] == other.operation[b]) >= NAMES_AGREE)


def _are_marks(c: DeviceCollectives) -> BoolArray:
    known = np.array([name in LEFT_TOGETHER for name in c.names], dtype=np.bool_)
    return np.asarray(known[c.operation], dtype=np.bool_)


def _p95(values: IntArray) -> int:
    return round(float(np.quantile(values, 0.95)))
