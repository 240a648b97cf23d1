"""Which call launched an operation, and what ranges launched, against looking at every pair."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from infprof import trace as t
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Launches
from infprof.measures.ranges import _counted_before, _of_each_run

# Ids in a row, as CUPTI gives them, and some too far apart for a table; -1 = not recorded.
IDS = st.one_of(st.integers(-1, 12), st.sampled_from([-1, 5, 2**31, 2**32 - 1]))
CALLS = st.lists(st.tuples(st.integers(-1, 1), IDS), max_size=30)
SORTED = st.lists(st.integers(-20, 20), max_size=20).map(sorted)


def launches_of(calls: list[tuple[int, int]]) -> Launches:
    count = len(calls)
    columns = {name: np.arange(count, dtype=np.int64) for name in t.SCHEMA["api_calls"]}
    columns["process"] = np.array([p for p, _ in calls], dtype=np.int64)
    columns["correlation"] = np.array([c for _, c in calls], dtype=np.int64)
    provenance = t.TraceProvenance("nsys", None, [])
    processes = [t.Process(1), t.Process(2)]
    return Launches(t.Trace([], [], processes, [], [], provenance, api_calls=t.Table("api_calls", columns)))


@given(CALLS, CALLS)
def test_the_first_call_of_the_same_process_and_id(calls: list[tuple[int, int]], wanted: list[tuple[int, int]]) -> None:
    process = np.array([p for p, _ in wanted], dtype=np.int64)
    ids = np.array([c for _, c in wanted], dtype=np.int64)
    expected = [calls.index(w) if w in calls and w[1] >= 0 else -1 for w in wanted]
    assert launches_of(calls).find(process, ids).tolist() == expected


@given(SORTED, st.lists(st.integers(-25, 25), max_size=20))
def test_counted_before(points: list[int], times: list[int]) -> None:
    found = _counted_before(np.array(points, dtype=np.int64), np.array(times, dtype=np.int64))
    assert found.tolist() == [sum(p < time for p in points) for time in times]


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=20), st.booleans(), st.data())
def test_extremes_of_runs(values: list[int], in_order: bool, data: st.DataObject) -> None:
    values = sorted(values) if in_order else values
    pairs = data.draw(st.lists(st.tuples(st.integers(0, len(values) - 1), st.integers(1, len(values))), max_size=9))
    pairs = [(low, high) for low, high in pairs if low < high]
    runs = Intervals(*(np.array([p[i] for p in pairs], dtype=np.int64) for i in (0, 1)))
    array = np.array(values, dtype=np.int64)
    assert _of_each_run(np.minimum, array, *runs).tolist() == [min(values[a:b]) for a, b in pairs]
    assert _of_each_run(np.maximum, array, *runs).tolist() == [max(values[a:b]) for a, b in pairs]
