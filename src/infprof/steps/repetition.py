"""Steps without any annotation: what repeats in the sequence of a lane (one process on one device).

Anchors are units that occur once per step: the first one after the host waited for the GPU, a copy of inputs or results,
an embedding lookup, sampling, a graph launch, a name or a pair of names. Each anchor cuts the sequence into segments.
An anchor is good when its segments are of few types (the kinds of kernels in them, and their length in run-length
form: never by time) and when what is known to happen once per step happens once in each. That tells a step from a layer,
which repeats as well, and from a group of steps. Where nothing shows that what repeats is a step, there are none.
Everything is linear in the length of the sequence; anchors are judged on a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infprof.measures.kernel_class import short_name
from infprof.quantiles import median
from infprof.steps.anchors import (
    D2H,
    EMBEDDING,
    GRAPH,
    H2D,
    MIN_STEPS,
    SAMPLING,
    Cue,
    Judged,
    Sequence,
    set_bits,
)
from infprof.steps.cutting import ONCE, cut, mode
from infprof.steps.lanes import Lane
from infprof.trace import BoolArray, IntArray

# So much weight of cues, beside gaps, says that segments are steps.
ENOUGH = 0.8
# Anchors that a step may have where another has none, and how many more of them there may be.
OF_ALL_STEPS, MORE, NEARLY = (H2D, D2H, EMBEDDING), 1.5, 0.75
# Fewer kernels or kinds than this make no step.
FEWEST_KERNELS, FEWEST_KINDS = 3, 3
# Of a lane's kernels, what must lie in steps for there to be any.
COVERED = 0.5
# Confidence at most, and without evidence that only a whole step gives: a layer may look the same.
SURE, LIKELY = 0.9, 0.6
# A lone segment is a step where its kinds are mostly those of a known type. So many are compared.
ALIKE, COMPARED = 0.5, 1_000
# A layer holds each of its kinds about this often at most, and the segment between two steps is at most so much longer.
INNER_REPEATS, ODD_SIZE = 2.5, 4
# Layers are as many in (nearly) every step.
REGULAR = 0.8

NOTHING = "no repetition was found in the sequence of kernel names"
UNPROVEN = "something repeats in the sequence of kernel names"
A_LAYER = f"{UNPROVEN}: nothing shows that it is a step and not a layer"


@dataclass
class Repetition:
    """``starts``: the unit with which each stretch begins; ``is_step``: whether it is a step.

    ``why_none`` says why there are no steps; ``starts`` is empty then.
    """

    starts: IntArray
    is_step: BoolArray
    confidence: float
    how: str
    why_none: str | None = None


def find_repetition(lane: Lane) -> Repetition:
    """The steps of a lane by what repeats in it."""
    if len(lane.names) < 2:
        return _none(f"one operation repeated ({short_name(lane.names[0])}) has none")
    sequence = Sequence(lane)
    cues = sequence.cues()
    judged = [sequence.judge(name, at, cues) for name, at in sequence.candidates(cues)]
    able = [one for one in judged if one is not None]
    if not able:
        return _none(NOTHING)
    best = max(able, key=lambda one: one.score)
    # Some steps lack what most have (a chunk of a prompt samples nothing): then what all have is the better anchor.
    of_all = [
        one
        for one in able
        if one.name in OF_ALL_STEPS
        and len(best.at) < len(one.at) <= MORE * len(best.at)
        and one.score >= NEARLY * best.score
    ]
    return _steps(sequence, max(of_all, key=lambda one: (len(one.at), one.score), default=best), cues)


def _none(why: str) -> Repetition:
    return Repetition(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_), 0.0, "", why)


def _steps(sequence: Sequence, judged: Judged, cues: list[Cue]) -> Repetition:
    """The steps around the chosen anchors, or why they are none."""
    lane, at, until = sequence.lane, judged.at, None
    above = _level_above(sequence, judged, cues)
    if above is not None:
        at, until = above
    elif judged.evidence < ENOUGH:
        return _none(A_LAYER)
    starts = cut(lane, at, cues, until)
    bounds = np.append(starts, len(lane))
    kinds, which = sequence.types(bounds)
    complete = np.diff(np.searchsorted(at, bounds)) > 0
    is_step = _alike(kinds, which, complete) | (complete & _whole(bounds, judged, cues))
    if is_step.sum() < MIN_STEPS - 1:
        return _none(NOTHING)
    kernels = np.add.reduceat(lane.kernels, starts)
    # A replayed graph hides its kinds.
    fewest = 1 if sequence.whole_pass else FEWEST_KINDS
    if median(kernels[is_step]) < FEWEST_KERNELS or median(set_bits(kinds[is_step])) < fewest:
        return _none(f"{UNPROVEN}, and is too short for a step")
    like_a_layer = _like_a_layer(sequence, bounds, kinds)
    if like_a_layer and above is None and not (judged.whole_step or judged.read_back):
        return _none(A_LAYER)
    if kernels[is_step].sum() < COVERED * lane.kernels.sum():
        return _none("what repeats in the sequence of kernel names is less than half of it")
    unsure = above is not None or (not judged.once.get(GRAPH) and like_a_layer)
    how = "graph launches" if judged.once.get(GRAPH, 0) > 0.9 else "repetition"
    return Repetition(starts, is_step, _confidence(judged, cues, unsure), f"{how} (anchor: {judged.name})")


def _confidence(judged: Judged, cues: list[Cue], unsure: bool) -> float:
    share = sum(judged.once.values()) / max(sum(cue.weight for cue in cues if cue.name in judged.once), 1.0)
    confidence = min(SURE, 0.4 + 0.3 * judged.repeated + 0.3 * share)
    if unsure or not judged.whole_step:
        confidence = min(confidence, LIKELY)
    return round(confidence, 2)


def _whole(bounds: IntArray, judged: Judged, cues: list[Cue]) -> BoolArray:
    """Which stretches hold everything that (nearly) every step holds, as the only prefill of a trace does."""
    out = np.ones(len(bounds) - 1, dtype=np.bool_)
    # What comes first follows no wait and no gap, and need not be a replay.
    names = (H2D, D2H, EMBEDDING, SAMPLING)
    needed = [c for c in cues if c.name in names and judged.once.get(c.name, 0) >= ONCE * c.weight]
    for cue in needed:
        out &= np.diff(np.searchsorted(cue.at, bounds)) > 0
    return out if needed else ~out


def _alike(kinds: IntArray, which: IntArray, complete: BoolArray) -> BoolArray:
    """Which segments are steps: those of a type that comes again, and complete ones that are mostly like one."""
    again: BoolArray = np.bincount(which)[which] > 1
    alone = np.flatnonzero(~again & complete)[:COMPARED]
    if not len(alone) or not again.any():
        return again
    known = np.unique(kinds[again])[None, :COMPARED]
    mine = kinds[alone][:, None]
    again[alone] = (set_bits(known & mine) >= ALIKE * set_bits(known | mine)).any(axis=1)
    return again


def _level_above(sequence: Sequence, judged: Judged, cues: list[Cue]) -> tuple[IntArray, IntArray] | None:
    """The level above where the anchor's segments are layers: the rarer segments among them that come regularly.

    Returns where these begin and end. A segment looks like a layer when hardly any kind comes twice in it; that it is
    one shows a cue that happens once per step and not once per layer.
    """
    at = judged.at
    bounds = np.append(at, len(sequence.lane))
    kinds, which = sequence.types(bounds)
    size = np.diff(bounds)
    if judged.once.get(GRAPH, 0) >= 0.5 or not _like_a_layer(sequence, bounds, kinds):
        return None
    per_type = np.bincount(which)
    # No more than so many types can come often enough.
    able = np.flatnonzero((per_type >= MIN_STEPS) & (per_type * 2 <= per_type.max()))
    for kind in able[np.argsort(per_type[able], kind="stable")][:COMPARED].tolist():
        odd = np.flatnonzero(which == kind)
        apart, regular = mode(np.diff(odd))
        if apart < 2 or regular < REGULAR or median(size[odd]) > ODD_SIZE * median(size):
            continue
        above = at[odd]
        if any(_only_above(cue, at, above) for cue in cues):
            return above, bounds[odd + 1]
    return None


def _like_a_layer(sequence: Sequence, bounds: IntArray, kinds: IntArray) -> bool:
    """Whether hardly any kind comes again in the segments, as in a layer. What a graph holds does not show."""
    runs = sequence.runs[bounds[1:]] - sequence.runs[bounds[:-1]]
    return median(runs) <= INNER_REPEATS * median(set_bits(kinds))


def _only_above(cue: Cue, below: IntArray, above: IntArray) -> bool:
    """Whether a cue happens once between neighbours above, and therefore not between most of those below."""
    once = np.diff(np.searchsorted(cue.at, above)) == 1
    return bool(once.mean() >= ONCE and len(below) >= 2 * len(above))
