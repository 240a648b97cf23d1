"""Interval arithmetic against the plainest reference there is: sets of single nanoseconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infprof.measures import intervals as iv
from infprof.measures.intervals import Intervals

LOW, HIGH = -30, 30
TIME = st.integers(LOW, HIGH)
# Any intervals: overlapping, touching, equal, empty (end = start) and negative (end < start), in any order.
PAIRS = st.lists(st.tuples(TIME, TIME), max_size=12)
SETS = PAIRS.map(lambda pairs: iv.union(*arrays(pairs)))


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([a for a, _ in pairs], dtype=np.int64), np.array([b for _, b in pairs], dtype=np.int64)


def points(pairs: list[tuple[int, int]]) -> set[int]:
    """The nanoseconds that half-open intervals hold; range() is empty where end <= start."""
    return {ns for start, end in pairs for ns in range(start, end)}


def held(inside: Intervals) -> set[int]:
    """The nanoseconds of a set, which must be one: sorted, disjoint, nothing empty, nothing touching."""
    assert inside.starts.dtype == inside.ends.dtype == np.int64
    assert inside.count == len(inside.starts) == len(inside.ends)
    assert bool(inside) == (inside.count > 0)
    assert np.all(inside.ends > inside.starts)
    assert np.all(inside.starts[1:] > inside.ends[:-1])
    found = points(list(zip(inside.starts.tolist(), inside.ends.tolist(), strict=True)))
    assert inside.total() == len(found)
    return found


@given(PAIRS)
def test_union_holds_every_nanosecond_once(pairs: list[tuple[int, int]]) -> None:
    assert held(iv.union(*arrays(pairs))) == points(pairs)


@given(PAIRS)
def test_union_leaves_its_input_alone_and_repeats_itself(pairs: list[tuple[int, int]]) -> None:
    starts, ends = arrays(pairs)
    first = iv.union(starts, ends)
    again = iv.union(first.starts, first.ends)
    assert (starts.tolist(), ends.tolist()) == ([a for a, _ in pairs], [b for _, b in pairs])
    assert (again.starts.tolist(), again.ends.tolist()) == (first.starts.tolist(), first.ends.tolist())


@given(TIME, TIME)
def test_single(start: int, end: int) -> None:
    assert held(iv.single(start, end)) == set(range(start, end))


def test_empty() -> None:
    assert held(iv.empty()) == set()


@given(st.lists(SETS, max_size=4))
def test_merge_is_the_union_of_sets(sets: list[Intervals]) -> None:
    assert held(iv.merge(*sets)) == set().union(*(held(s) for s in sets))


@given(SETS, TIME, TIME)
def test_clip_and_complement_divide_the_stretch(inside: Intervals, start: int, end: int) -> None:
    stretch = set(range(start, end))
    assert held(iv.clip(inside, start, end)) == held(inside) & stretch
    assert held(iv.complement(inside, start, end)) == stretch - held(inside)


@given(SETS, SETS)
def test_intersect_and_subtract_divide_the_first_set(a: Intervals, b: Intervals) -> None:
    assert held(iv.intersect(a, b)) == held(a) & held(b) == held(iv.intersect(b, a))
    assert held(iv.subtract(a, b)) == held(a) - held(b)


@given(SETS, PAIRS)
def test_covered_counts_each_query_by_itself(inside: Intervals, queries: list[tuple[int, int]]) -> None:
    mine = held(inside)
    expected = [len(mine & set(range(start, end))) for start, end in queries]
    assert iv.covered(inside, *arrays(queries)).tolist() == expected


@given(SETS, st.lists(TIME, max_size=12))
def test_measure_before_and_contains(inside: Intervals, times: list[int]) -> None:
    mine, asked = held(inside), np.array(times, dtype=np.int64)
    assert iv.measure_before(inside, asked).tolist() == [sum(ns < time for ns in mine) for time in times]
    assert iv.contains(inside, asked).tolist() == [time in mine for time in times]


@given(SETS, PAIRS)
def test_overlaps_with_an_empty_query_as_its_first_nanosecond(
    inside: Intervals, queries: list[tuple[int, int]]
) -> None:
    mine = held(inside)
    queries = [(start, end) for start, end in queries if start <= end]
    expected = [bool(mine & set(range(start, max(end, start + 1)))) for start, end in queries]
    assert iv.overlaps(inside, *arrays(queries)).tolist() == expected


@given(SETS, st.lists(TIME, min_size=1, max_size=12))
def test_near_holds_all_that_matters_between_two_times(inside: Intervals, times: list[int]) -> None:
    asked = np.array(times, dtype=np.int64)
    some = iv.near(inside, min(times), max(times))
    assert iv.contains(some, asked).tolist() == iv.contains(inside, asked).tolist()
    later = np.full(len(times), max(times))
    assert iv.covered(some, asked, later).tolist() == iv.covered(inside, asked, later).tolist()
    assert held(some) <= held(inside)


@given(st.lists(TIME, max_size=12).map(sorted), st.lists(TIME, max_size=12))
def test_count_before(points: list[int], times: list[int]) -> None:
    found = iv.count_before(np.array(points, dtype=np.int64), np.array(times, dtype=np.int64))
    assert found.tolist() == [sum(point < time for point in points) for time in times]


@given(st.lists(st.tuples(TIME, st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])), max_size=12))
def test_outermost_calls_lie_inside_no_earlier_one(pairs: list[tuple[int, int]]) -> None:
    calls = sorted(pairs, key=lambda p: (p[0], -p[1]))
    expected = [all(end > other for _, other in calls[:i]) for i, (_, end) in enumerate(calls)]
    assert iv.outermost(*arrays(calls)).tolist() == expected


@pytest.mark.parametrize("far", [0, 1_700_000_000_000_000_000, -(2**60), 2**62])
def test_far_from_zero_nothing_is_rounded(far: int) -> None:
    """Wall-clock stamps are beyond what a float holds exactly: every sum must stay an integer."""
    a = iv.union(*arrays([(far + 1, far + 4), (far + 3, far + 5), (far + 9, far + 10)]))
    b = iv.union(*arrays([(far + 2, far + 3), (far + 4, far + 10)]))
    assert (a.starts - far).tolist() == [1, 9] and (a.ends - far).tolist() == [5, 10]
    assert iv.intersect(a, b).total() == 3
    assert iv.subtract(a, b).total() == 2
    assert iv.complement(a, far, far + 12).total() == 7
    assert iv.covered(a, *arrays([(far, far + 2), (far + 4, far + 10)])).tolist() == [1, 2]


def test_touching_intervals_are_one_stretch_and_do_not_meet() -> None:
    joined = iv.union(*arrays([(0, 5), (5, 9)]))
    assert (joined.starts.tolist(), joined.ends.tolist()) == ([0], [9])
    left, right = iv.single(0, 5), iv.union(*arrays([(5, 9), (11, 12)]))
    assert not iv.intersect(left, right)
    assert held(iv.subtract(left, right)) == set(range(5))
    assert iv.contains(left, np.array([-1, 0, 4, 5])).tolist() == [False, True, True, False]
