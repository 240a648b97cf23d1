"""Which interval of a thread encloses a moment most closely: operators nest, as calls of a program do."""

from __future__ import annotations

import numpy as np

from infprof.distinct import groups
from infprof.trace import IntArray


class Nest:
    """Intervals [start, end) of one thread that nest. Rows are positions in the arrays given; empty ones hold nothing.

    The depth of an interval is how many others are open at its start. Of those open at a moment the innermost is the
    last one to have started at the depth that their number says: three searches for all moments together.
    """

    def __init__(self, start: IntArray, end: IntArray) -> None:
        rows = np.flatnonzero(end > start)
        self._rows = rows[np.lexsort((-end[rows], start[rows]))]
        self._start, self._end = start[self._rows], end[self._rows]
        self._ends = np.sort(end[rows])
        count = np.arange(len(rows), dtype=np.int64)
        self._depth = count - np.searchsorted(self._ends, self._start, side="right")
        self._keys = np.sort(self._depth * len(rows) + count)

    def innermost(self, times: IntArray) -> IntArray:
        """The row of the innermost interval around each time, -1 where there is none."""
        if not len(self._rows):
            return np.full(len(times), -1, dtype=np.int64)
        started = np.searchsorted(self._start, times, side="right") - 1
        open_now = started + 1 - np.searchsorted(self._ends, times, side="right")
        found = self._last_at(open_now - 1, started)
        # Where rounded clocks make neighbours overlap, the last to start is right if it encloses the time.
        last = np.maximum(started, 0)
        found = np.where((started >= 0) & (self._end[last] > times), started, found)
        place = np.maximum(found, 0)
        inside = (found >= 0) & (self._start[place] <= times) & (times < self._end[place])
        return np.where(inside, self._rows[place], -1)

    def parents(self) -> IntArray:
        """For each row given to the constructor the row directly around it, -1 where there is none."""
        total = int(self._rows.max()) + 1 if len(self._rows) else 0
        out = np.full(total, -1, dtype=np.int64)
        if not total:
            return out
        own = np.arange(len(self._rows), dtype=np.int64)
        found = self._last_at(self._depth - 1, own)
        place = np.maximum(found, 0)
        around = (found >= 0) & (self._end[place] > self._start)
        out[self._rows] = np.where(around, self._rows[place], -1)
        return out

    def _last_at(self, depth: IntArray, until: IntArray) -> IntArray:
        """The last interval of each depth among the first ``until`` + 1, -1 where there is none."""
        count = len(self._rows)
        at = np.searchsorted(self._keys, depth * count + until, side="right") - 1
        key = self._keys[np.maximum(at, 0)]
        return np.where((depth >= 0) & (at >= 0) & (key // count == depth), key % count, -1)


def innermost_rows(
    start: IntArray, end: IntArray, thread: IntArray, times: IntArray, time_threads: IntArray
) -> tuple[IntArray, IntArray]:
    """For each time the row of the innermost interval of the same thread around it; and the parent of each interval."""
    found = np.full(len(times), -1, dtype=np.int64)
    parent = np.full(len(start), -1, dtype=np.int64)
    moments = dict(groups(time_threads)) if len(times) else {}
    for number, rows in groups(thread) if len(thread) else []:
        nest = Nest(start[rows], end[rows])
        above = nest.parents()
        parent[rows[: len(above)]] = np.where(above >= 0, rows[np.maximum(above, 0)], -1)
        asked = moments.get(number)
        if asked is not None:
            inner = nest.innermost(times[asked])
            found[asked] = np.where(inner >= 0, rows[np.maximum(inner, 0)], -1)
    return found, parent
