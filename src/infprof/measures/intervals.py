"""Arithmetic on sets of half-open intervals [start, end), as pairs of int64 arrays.

A *set* here is sorted by start and disjoint (touching intervals merged); ``union`` makes one from any intervals.
Everything is exact in integer nanoseconds and vectorised: no loop over intervals.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from infprof.trace import BoolArray, IntArray


class Intervals(NamedTuple):
    """A set of disjoint, sorted, half-open intervals."""

    starts: IntArray
    ends: IntArray

    def total(self) -> int:
        """Summed length, ns."""
        return int((self.ends - self.starts).sum())

    def __bool__(self) -> bool:
        return len(self.starts) > 0

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of intervals (of the set, not tuple.count)."""
        return len(self.starts)


def empty() -> Intervals:
    return Intervals(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def single(start: int, end: int) -> Intervals:
    """The set [start, end); empty where end <= start."""
    if end <= start:
        return empty()
    return Intervals(np.array([start], dtype=np.int64), np.array([end], dtype=np.int64))


def union(starts: IntArray, ends: IntArray) -> Intervals:
    """The set covered by any intervals, in any order, overlapping or not; empty and negative ones are ignored."""
    positive = ends > starts
    if not positive.all():
        starts, ends = starts[positive], ends[positive]
    if not len(starts):
        return empty()
    if not np.all(starts[1:] >= starts[:-1]):
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    # A new interval begins where a start lies beyond everything before it (touching ones merge).
    first = np.empty(len(starts), dtype=np.bool_)
    first[0] = True
    first[1:] = starts[1:] > reach[:-1]
    last = np.empty(len(starts), dtype=np.bool_)
    last[-1] = True
    last[:-1] = first[1:]
    return Intervals(starts[first], reach[last])


def merge(*sets: Intervals) -> Intervals:
    """The union of several sets."""
    present = [s for s in sets if len(s.starts)]
    if not present:
        return empty()
    if len(present) == 1:
        return present[0]
    return union(np.concatenate([s.starts for s in present]), np.concatenate([s.ends for s in present]))


def complement(inside: Intervals, start: int, end: int) -> Intervals:
    """What of [start, end) the set leaves free."""
    if end <= start:
        return empty()
    starts, ends = clip(inside, start, end)
    if not len(starts):
        return single(start, end)
    # Between two intervals of a set there is always something free; before and behind them there may be.
    before, behind = starts[0] > start, ends[-1] < end
    free_starts = ends if behind else ends[:-1]
    free_ends = starts if before else starts[1:]
    if before:
        free_starts = np.concatenate([np.array([start], dtype=np.int64), free_starts])
    if behind:
        free_ends = np.concatenate([free_ends, np.array([end], dtype=np.int64)])
    return Intervals(free_starts, free_ends)


def clip(inside: Intervals, start: int, end: int) -> Intervals:
    """The part of the set in [start, end)."""
    if end <= start:
        return empty()
    first = int(inside.ends.searchsorted(start, side="right"))
    stop = int(inside.starts.searchsorted(end, side="left"))
    starts, ends = inside.starts[first:stop], inside.ends[first:stop]
    # Only the outer two can reach beyond.
    if len(starts) and starts[0] < start:
        starts = starts.copy()
        starts[0] = start
    if len(ends) and ends[-1] > end:
        ends = ends.copy()
        ends[-1] = end
    return Intervals(starts, ends)


def near(inside: Intervals, low: int, high: int) -> Intervals:
    """The intervals of the set that hold or follow ``low`` and begin by ``high``: all that say anything in between."""
    first = int(inside.ends.searchsorted(low, side="right"))
    stop = int(inside.starts.searchsorted(high, side="right"))
    return Intervals(inside.starts[first:stop], inside.ends[first:stop])


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """What both sets cover."""
    if not len(a.starts) or not len(b.starts):
        return empty()
    if len(b.starts) == 1:
        return clip(a, int(b.starts[0]), int(b.ends[0]))
    if len(a.starts) > len(b.starts):
        a, b = b, a
    if len(a.starts) == 1:
        return clip(b, int(a.starts[0]), int(a.ends[0]))
    # Each interval of the smaller set meets a run of the other's: one piece for each pair that meets.
    low = np.searchsorted(b.ends, a.starts, side="right")
    high = np.searchsorted(b.starts, a.ends, side="left")
    mine, other = expand(low, high)
    return union(np.maximum(a.starts[mine], b.starts[other]), np.minimum(a.ends[mine], b.ends[other]))


def expand(low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs (i, j) with low[i] <= j < high[i], in order."""
    counts = np.maximum(high - low, 0)
    mine = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    return mine, np.arange(len(mine), dtype=np.int64) - (first - low)[mine]


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """What the first set covers and the second does not."""
    if not len(a.starts) or not len(b.starts):
        return a
    return intersect(a, complement(b, int(a.starts[0]), int(a.ends[-1])))


def covered(inside: Intervals, starts: IntArray, ends: IntArray) -> IntArray:
    """How many ns of each query interval [start, end) the set covers; queries may overlap, in any order.

    Queries with end <= start give 0.
    """
    if not len(inside.starts) or not len(starts):
        return np.zeros(len(starts), dtype=np.int64)
    if len(inside.starts) == 1:
        low, high = inside.starts[0], inside.ends[0]
        return np.asarray(np.maximum(np.minimum(ends, high) - np.maximum(starts, low), 0), dtype=np.int64)
    reached = np.cumsum(inside.ends - inside.starts)
    spent = _measure_before(inside, reached, ends) - _measure_before(inside, reached, np.minimum(starts, ends))
    return np.asarray(np.maximum(spent, 0), dtype=np.int64)


def overlaps(inside: Intervals, starts: IntArray, ends: IntArray) -> BoolArray:
    """Which query intervals [start, end) share at least 1 ns with the set; one of length zero counts as its first ns."""
    if len(inside.starts) == 1:
        found = (starts < inside.ends[0]) & (ends > inside.starts[0])
        return np.asarray(found | ((starts == ends) & (starts == inside.starts[0])), dtype=np.bool_)
    if not len(inside.starts):
        return np.zeros(len(starts), dtype=np.bool_)
    # Of the intervals that begin before a query's end the last one reaches furthest.
    before = np.searchsorted(inside.starts, np.maximum(ends, starts + 1), side="left")
    return np.asarray((before > 0) & (inside.ends[np.maximum(before - 1, 0)] > starts), dtype=np.bool_)


def measure_before(inside: Intervals, times: IntArray) -> IntArray:
    """How many ns of the set lie before each time."""
    if not len(inside.starts):
        return np.zeros(len(times), dtype=np.int64)
    return _measure_before(inside, np.cumsum(inside.ends - inside.starts), times)


def _measure_before(inside: Intervals, reached: IntArray, times: IntArray) -> IntArray:
    """``measure_before``, with the length of the set up to the end of each interval."""
    index = count_until(inside.starts, times)
    previous = np.maximum(index - 1, 0)
    spent = reached[previous]
    # Less what of the last interval lies behind the time.
    spent -= np.maximum(inside.ends[previous] - times, 0)
    spent[index == 0] = 0
    return spent


def count_before(points: IntArray, times: IntArray) -> IntArray:
    """How many of the sorted points lie before each time; ``points`` may be long, ``times`` should lie close together."""
    if not len(times):
        return np.zeros(0, dtype=np.int64)
    first = int(points.searchsorted(times.min(), side="left"))
    stop = int(points.searchsorted(times.max(), side="left"))
    return np.asarray(points[first:stop].searchsorted(times, side="left") + first, dtype=np.int64)


def count_until(points: IntArray, times: IntArray) -> IntArray:
    """How many of the sorted points lie at or before each time."""
    if 8 * len(points) > len(times) or not np.all(times[1:] >= times[:-1]):
        return np.searchsorted(points, times, side="right")
    # Few points among many sorted times: the points are looked up instead.
    found = np.bincount(np.searchsorted(times, points, side="left"), minlength=len(times) + 1)
    return np.cumsum(found[: len(times)])


def contains(inside: Intervals, times: IntArray) -> BoolArray:
    """Whether each time lies in the set."""
    if not len(inside.starts):
        return np.zeros(len(times), dtype=np.bool_)
    if len(inside.starts) == 1:
        return np.asarray((times >= inside.starts[0]) & (times < inside.ends[0]), dtype=np.bool_)
    index = count_until(inside.starts, times) - 1
    return np.asarray((index >= 0) & (times < inside.ends[np.maximum(index, 0)]), dtype=np.bool_)


def outermost(starts: IntArray, ends: IntArray) -> BoolArray:
    """Which of intervals sorted by (start, -end) lie inside no earlier one; nested or equal ones are not outermost.

    For calls of one thread: a runtime call and the driver call inside it are one stretch of time.
    """
    if not len(starts):
        return np.zeros(0, dtype=np.bool_)
    reach = np.maximum.accumulate(ends)
    mask = np.empty(len(starts), dtype=np.bool_)
    mask[0] = True
    mask[1:] = ends[1:] > reach[:-1]
    return mask
