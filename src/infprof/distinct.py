"""Distinct values of long columns that hold few: by tables and runs, where sorting would cost most of an analysis."""

from __future__ import annotations

import numpy as np

from infprof.trace import BoolArray, IntArray, constant, is_constant

# A table over all possible values may be this much longer than the column (and this many values longer).
TABLE_FACTOR, TABLE_SPARE = 4, 1_000_000


def distinct(values: IntArray) -> tuple[IntArray, IntArray]:
    """The distinct values, sorted, and where among them each value stands."""
    if not len(values):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    low, high = _bounds(values)
    if low == high:
        return np.array([low], dtype=np.int64), constant(0, len(values))
    if _dense(low, high, len(values)):
        seen, offset = _table(values, low, high)
        place = np.cumsum(seen) - 1
        return np.flatnonzero(seen) + low, place[offset]
    # Wide ids come in runs: thread after thread, or in turns.
    starts = _run_starts(values)
    unique, which = np.unique(values[starts], return_inverse=True)
    return unique, np.repeat(which, np.diff(starts, append=len(values)))


def distinct_values(values: IntArray) -> IntArray:
    """The distinct values, sorted."""
    if not len(values):
        return np.empty(0, dtype=np.int64)
    low, high = _bounds(values)
    if low == high:
        return np.array([low], dtype=np.int64)
    if _dense(low, high, len(values)):
        seen, _ = _table(values, low, high)
        return np.flatnonzero(seen) + low
    return np.unique(values[_run_starts(values)])


def distinct_rows(*columns: IntArray) -> tuple[list[tuple[int, ...]], IntArray]:
    """The distinct rows of several columns, in ascending order, and where among them each row stands."""
    unique, which = distinct(columns[0])
    rows: list[tuple[int, ...]] = [(v,) for v in unique.tolist()]
    for column in columns[1:]:
        more, place = distinct(column)
        if len(more) == 1:
            rows = [(*row, int(more[0])) for row in rows]
            continue
        codes, which = distinct(which * len(more) + place)
        rows = [(*rows[c // len(more)], int(more[c % len(more)])) for c in codes.tolist()]
    return rows, which


def first_of_each(values: IntArray) -> tuple[IntArray, IntArray]:
    """The distinct values, sorted, and the first position of each."""
    unique, which = distinct(values)
    first = np.empty(len(unique), dtype=np.int64)
    # Written backwards, so that the first one stays.
    first[which[::-1]] = np.arange(len(values) - 1, -1, -1)
    return unique, first


def groups(values: IntArray) -> list[tuple[int, IntArray]]:
    """Each distinct value with the positions that hold it, both ascending."""
    unique, which = distinct(values)
    if len(unique) == 1:
        return [(int(unique[0]), np.arange(len(values), dtype=np.int64))]
    # Two-byte keys are sorted by counting.
    order = np.argsort(which.astype(np.int16) if len(unique) < 2**15 else which, kind="stable")
    counts = np.bincount(which, minlength=len(unique))
    ends = np.cumsum(counts)
    return [(v, order[e - n : e]) for v, e, n in zip(unique.tolist(), ends.tolist(), counts.tolist(), strict=True)]


def _bounds(values: IntArray) -> tuple[int, int]:
    if is_constant(values):
        return int(values[0]), int(values[0])
    return int(values.min()), int(values.max())


def _dense(low: int, high: int, count: int) -> bool:
    return high - low <= TABLE_FACTOR * count + TABLE_SPARE


def _table(values: IntArray, low: int, high: int) -> tuple[BoolArray, IntArray]:
    """Which numbers from ``low`` to ``high`` occur, and the place of each value among all of them."""
    seen = np.zeros(high - low + 1, dtype=np.bool_)
    offset = values - low
    seen[offset] = True
    return seen, offset


def _run_starts(values: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.flatnonzero(values[1:] != values[:-1]) + 1])
