"""The quick ways to distinct values agree with sorting, for dense, wide, constant and empty columns."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infprof.distinct import PIECE, distinct, distinct_rows, distinct_values, first_of_each, groups, mapped, turns
from infprof.measures.intervals import count_until
from infprof.trace import IntArray, Table, compact, is_constant, picked, taken

DENSE = st.lists(st.integers(-3, 9), max_size=60)
# Too far apart for a table, in runs and in turns, as thread ids are.
WIDE = st.lists(st.sampled_from([-(2**62), 5, 2**40, 2**62]), max_size=60)
COLUMNS = st.one_of(DENSE, WIDE, st.lists(st.just(7), max_size=20)).map(lambda v: np.array(v, dtype=np.int64))


@given(COLUMNS, st.booleans())
def test_distinct(values: IntArray, compacted: bool) -> None:
    column = compact(values) if compacted else values
    unique, which = distinct(column)
    assert unique.tolist() == np.unique(values).tolist() == distinct_values(column).tolist()
    assert unique[which].tolist() == values.tolist()
    again, first = first_of_each(column)
    assert again.tolist() == unique.tolist()
    assert first.tolist() == [values.tolist().index(v) for v in unique.tolist()]
    assert mapped(column, lambda found: [v // 2 for v in found]).tolist() == [v // 2 for v in values.tolist()]
    assert [(v, rows.tolist()) for v, rows in groups(column)] == [
        (v, np.flatnonzero(values == v).tolist()) for v in unique.tolist()
    ]


def test_columns_of_several_pieces() -> None:
    values = np.arange(3 * PIECE + 5, dtype=np.int64) % 1000 - 7
    unique, which = distinct(values)
    assert unique.tolist() == list(range(-7, 993))
    assert (unique[which] == values).all()
    assert (mapped(values, lambda found: [-v for v in found]) == -values).all()


@given(st.lists(st.integers(-3, 9), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 3))
def test_values_in_turns(turn: list[int], times: int, more: int) -> None:
    values = np.array(turn * times + turn[:more], dtype=np.int64)
    found = [(v, np.arange(len(values))[rows].tolist()) for v, rows in turns(values)]
    in_turns = times > 1 and 1 < len(turn) == len(set(turn)) and more in (0, len(turn))
    # What takes turns in another way may be found or not; what is found is right.
    if found or in_turns:
        assert found == [(v, rows.tolist()) for v, rows in groups(values)]


@given(st.integers(0, 40).flatmap(lambda n: st.tuples(*[st.lists(st.integers(-2, 2), min_size=n, max_size=n)] * 3)))
def test_distinct_rows(columns: tuple[list[int], ...]) -> None:
    rows, which = distinct_rows(*(np.array(c, dtype=np.int64) for c in columns))
    wanted = list(zip(*columns, strict=True))
    assert rows == sorted(set(wanted))
    assert [rows[i] for i in which.tolist()] == wanted


@given(COLUMNS)
def test_compact_keeps_the_values(values: IntArray) -> None:
    column = compact(values)
    assert column.tolist() == values.tolist()
    assert is_constant(column) == (len(values) > 1 and len(set(values.tolist())) == 1)


@given(COLUMNS, st.data())
def test_taken_and_picked(values: IntArray, data: st.DataObject) -> None:
    count = len(values)
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=np.bool_)
    for column in (values, compact(values)):
        for rows in (chosen, np.flatnonzero(chosen)):
            assert taken(column, rows).tolist() == values[rows].tolist()
        assert picked(column, chosen).tolist() == values[chosen].tolist()


@given(st.lists(st.integers(0, 50), max_size=6), st.lists(st.integers(-5, 60), max_size=100), st.booleans())
def test_count_until(points: list[int], times: list[int], in_order: bool) -> None:
    points, times = sorted(points), sorted(times) if in_order else times
    found = count_until(np.array(points, dtype=np.int64), np.array(times, dtype=np.int64))
    assert found.tolist() == [sum(p <= t for p in points) for t in times]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), max_size=20))
def test_a_table_sorted_in_its_own_memory(rows: list[tuple[int, int]]) -> None:
    def table() -> Table:
        starts, kinds = (np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 1))
        columns = {"start": starts, "end": np.arange(len(rows)), "thread": kinds, "kind": kinds}
        return Table("overheads", columns)

    one, other = table().sort_by("start"), table().sorted_by("start")
    for column in ("start", "end", "thread", "kind"):
        assert one[column].tolist() == other[column].tolist()
