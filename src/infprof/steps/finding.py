"""The steps of a trace: for each process and device, from when to when each one lasts, and how they were found.

Best evidence first: the user's range, the ranges of known engines, graph launches and repetition in the sequence of
kernel names. A step lasts from the end of the step before it to the end of its own last operation on the stream that
does most of the work: the gap in front of a step is part of it, for its own launch ends the gap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from infprof.measures import operations as op
from infprof.measures.operations import Prepared
from infprof.steps.by_ranges import check_step_range, find_ranges
from infprof.steps.lanes import Lane, lanes
from infprof.steps.repetition import find_repetition
from infprof.trace import BoolArray, IntArray

# Names of ranges are no guess, but a range may have been put around anything.
RANGE_CONFIDENCE = 0.95


@dataclass
class LaneSteps:
    """The stretches of one lane in order, of which ``is_step`` are steps; the others are start-up or anything else.

    ``first`` and ``last`` are places in ``lane.rows`` (last exclusive). ``start`` to ``end`` is a stretch with the gap
    before it, ``work_start`` to ``work_end`` without; neighbours never overlap. ``text`` is the string id of its range,
    -1 where there is none. Without steps all are empty and ``why_none`` says why.
    """

    lane: Lane
    first: IntArray
    last: IntArray
    start: IntArray
    end: IntArray
    work_start: IntArray
    work_end: IntArray
    is_step: BoolArray
    text: IntArray
    how: str
    confidence: float
    why_none: str | None = None

    def __len__(self) -> int:
        return len(self.first)

    @property
    def device(self) -> int:
        return self.lane.device

    @property
    def process(self) -> int:
        return self.lane.process

    def taken(self, rows: BoolArray) -> LaneSteps:
        """Some of the stretches."""
        columns = ("first", "last", "start", "end", "work_start", "work_end", "is_step", "text")
        return replace(self, **{column: getattr(self, column)[rows] for column in columns})


def find_steps(prepared: Prepared, step_range: str | None = None) -> list[LaneSteps]:
    """The steps of every process on every device, by device, the busiest process of each first.

    ``step_range``: a range's name or a pattern with ``*``, which then says what a step is. Raises UsageError where the
    trace has no such range.
    """
    if step_range is not None:
        check_step_range(prepared, step_range)
    return [_steps(prepared, lane, step_range) for lane in lanes(prepared)]


def _steps(prepared: Prepared, lane: Lane, step_range: str | None) -> LaneSteps:
    by_range = find_ranges(prepared, lane, step_range)
    if by_range is not None:
        return _timed(prepared, lane, by_range.starts, by_range.is_step, by_range.text, by_range.how, RANGE_CONFIDENCE)
    if step_range is not None:
        return _none(lane, f"nothing ran here inside ranges named {step_range}")
    found = find_repetition(lane)
    if found.why_none is not None:
        return _none(lane, found.why_none)
    text = np.full(len(found.starts), -1, dtype=np.int64)
    return _timed(prepared, lane, found.starts, found.is_step, text, found.how, found.confidence)


def _none(lane: Lane, why: str) -> LaneSteps:
    nothing = np.empty(0, dtype=np.int64)
    return LaneSteps(lane, *(nothing,) * 6, nothing.astype(np.bool_), nothing, "", 0.0, why)


def _timed(
    prepared: Prepared, lane: Lane, starts: IntArray, is_step: BoolArray, text: IntArray, how: str, confidence: float
) -> LaneSteps:
    ops = prepared.operations
    first = lane.first[starts]
    last = np.append(first[1:], len(lane.rows))
    begun, ended = ops.start[lane.rows], ops.end[lane.rows]
    main = _main_stream(prepared, lane)
    work_start = np.minimum.reduceat(np.where(main, begun, np.iinfo(np.int64).max), first)
    work_end = np.maximum.reduceat(np.where(main, ended, np.iinfo(np.int64).min), first)
    without = work_end < work_start
    if without.any():
        # Nothing of it ran on the main stream: whatever ran then.
        work_start[without] = np.minimum.reduceat(begun, first)[without]
        work_end[without] = np.maximum.reduceat(ended, first)[without]
    cut = np.minimum(work_end[:-1], work_start[1:])
    cut = np.maximum.accumulate(np.concatenate([work_start[:1], cut]))
    end = np.append(cut[1:], max(int(work_end[-1]), int(cut[-1])))
    work_start = np.clip(work_start, cut, end)
    work_end = np.clip(work_end, work_start, end)
    return LaneSteps(lane, first, last, cut, end, work_start, work_end, is_step, text, how, confidence)


def _main_stream(prepared: Prepared, lane: Lane) -> BoolArray:
    """Which operations of the lane are on the stream with most kernel time."""
    ops = prepared.operations
    stream = ops.stream[lane.rows]
    ran = (ops.kind[lane.rows] == op.KERNEL) | (ops.kind[lane.rows] == op.GRAPH)
    spent = (ops.end[lane.rows] - ops.start[lane.rows])[ran].astype(np.float64)
    numbers = stream[ran]
    low = int(numbers.min())
    return np.asarray(stream == low + int(np.bincount(numbers - low, spent).argmax()), dtype=np.bool_)
