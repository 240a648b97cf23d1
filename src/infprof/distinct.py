"""Distinct values of long columns that hold few: by tables and runs, where sorting would cost most of an analysis."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from infprof.trace import BoolArray, IntArray, constant, is_constant

# A table over all possible values may be this much longer than the column (and this many values longer).
TABLE_FACTOR, TABLE_SPARE = 4, 1_000_000
# Long columns are worked on in pieces of this many values: what lies between two steps stays in the processor's cache.
PIECE = 1 << 14
# So many values may take turns.
MOST_TURNS = 256


def distinct(values: IntArray) -> tuple[IntArray, IntArray]:
    """The distinct values, sorted, and where among them each value stands."""
    if not len(values):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    low, high = _bounds(values)
    if low == high:
        return np.array([low], dtype=np.int64), constant(0, len(values))
    if _dense(low, high, len(values)):
        seen = _seen(values, low, high)
        return np.flatnonzero(seen) + low, _looked_up(np.cumsum(seen, dtype=np.int64) - 1, values, low)
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
        return np.flatnonzero(_seen(values, low, high)) + low
    return np.unique(values[_run_starts(values)])


def mapped(values: IntArray, new: Callable[[list[int]], list[int]]) -> IntArray:
    """The column with other values: ``new`` gives one for each of the distinct values, which come in ascending order."""
    if not len(values):
        return np.empty(0, dtype=np.int64)
    low, high = _bounds(values)
    if low == high:
        return constant(new([low])[0], len(values))
    if _dense(low, high, len(values)):
        seen = _seen(values, low, high)
        table = np.zeros(len(seen), dtype=np.int64)
        table[seen] = new((np.flatnonzero(seen) + low).tolist())
        return _looked_up(table, values, low)
    unique, which = distinct(values)
    return np.array(new(unique.tolist()), dtype=np.int64)[which]


def distinct_rows(*columns: IntArray) -> tuple[list[tuple[int, ...]], IntArray]:
    """The distinct rows of several columns, in ascending order, and where among them each row stands."""
    unique, which = distinct(columns[0])
    rows: list[tuple[int, ...]] = [(v,) for v in unique.tolist()]
    for column in columns[1:]:
        more, place = distinct(column)
        if len(more) == 1:
            rows = [(*row, int(more[0])) for row in rows]
            continue
        if len(rows) == 1:
            rows, which = [(*rows[0], int(v)) for v in more], place
            continue
        codes, which = distinct(which * len(more) + place)
        rows = [(*rows[c // len(more)], int(more[c % len(more)])) for c in codes.tolist()]
    return rows, which


def first_of_each(values: IntArray) -> tuple[IntArray, IntArray]:
    """The distinct values, sorted, and the first position of each."""
    if len(values) and (values[1:] >= values[:-1]).all():
        first = _run_starts(values)
        return values[first], first
    unique, which = distinct(values)
    first = np.empty(len(unique), dtype=np.int64)
    # Written backwards, so that the first one stays.
    for i in reversed(range(0, len(values), PIECE)):
        piece = which[i : i + PIECE]
        first[piece[::-1]] = np.arange(i + len(piece) - 1, i - 1, -1)
    return unique, first


def turns(values: IntArray) -> list[tuple[int, slice]]:
    """As ``groups``, by slices, where a few values come over and over in one order, as sampled metrics do; else []."""
    first: dict[int, int] = {}
    for i, value in enumerate(values[:MOST_TURNS].tolist()):
        if value in first:
            break
        first[value] = i
    count = len(first)
    if count < 2 or count >= len(values) or len(values) % count:
        return []
    if (values.reshape(-1, count) != values[:count]).any():
        return []
    return [(value, slice(i, None, count)) for value, i in sorted(first.items())]


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


def _pieces(count: int) -> Iterator[slice]:
    return (slice(i, i + PIECE) for i in range(0, count, PIECE))


def _seen(values: IntArray, low: int, high: int) -> BoolArray:
    """Which numbers from ``low`` to ``high`` occur."""
    seen = np.zeros(high - low + 1, dtype=np.bool_)
    for piece in _pieces(len(values)):
        seen[values[piece] - low] = True
    return seen


def _looked_up(table: IntArray, values: IntArray, low: int) -> IntArray:
    """``table`` at each value, its first element belongs to ``low``."""
    out = np.empty(len(values), dtype=np.int64)
    for piece in _pieces(len(values)):
        # All values lie in the table; asked to check that, take() would work on a copy.
        table.take(values[piece] - low, out=out[piece], mode="clip")
    return out


def _run_starts(values: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.flatnonzero(values[1:] != values[:-1]) + 1])
