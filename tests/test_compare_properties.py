"""What holds for any two runs: nothing differs from itself, exchanged runs are mirrored, chance is rarely called a change."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infprof.compare.comparing import compare
from infprof.compare.kernels import matched_kernels
from infprof.compare.limiter import same_limit
from infprof.compare.model import HIGHER, LOWER, MOVED, SAME, UNKNOWN, Change, Comparison
from infprof.compare.rank_test import rank_sum_p, two_modes
from infprof.compare.reports import COMPARE_REPORTS, render
from infprof.compare.runs import KernelUse, PhaseKey, PhaseRun, Run, of_diagnosis
from infprof.compare.several import run_change
from infprof.compare.spread import difference, measured, stored
from infprof.diagnosis import analyze_file
from infprof.resources import sample_traces_dir
from infprof.results import VERDICT_CLASSES

MIRRORED = {LOWER: HIGHER, HIGHER: LOWER, SAME: SAME, UNKNOWN: UNKNOWN, None: None}
OTHER_WAY = {
    "faster": "slower", "slower": "faster", "came": "went", "went": "came", "more-calls": "fewer-calls",
    "fewer-calls": "more-calls", "same": "same", "unknown": "unknown",
}  # fmt: skip
NAMES = (
    "void a::gemm_kernel<int>(int)",
    "void a::gemm_kernel<float>(int)",
    "flash_fwd_kernel",
    "ncclDevKernel_Sum",
    "k",
)
BASE = analyze_file(sample_traces_dir() / "launch-bound-decode" / "trace.sqlite")

lengths = st.lists(st.integers(1, 10**9), min_size=0, max_size=40).map(lambda x: np.array(x, dtype=np.int64))
uses = st.builds(
    lambda calls, call, error, blocks, share: KernelUse(
        calls, calls * call, error, blocks if error is not None else 0, share
    ),
    st.floats(0.01, 1e3),
    st.floats(1, 1e7),
    st.none() | st.floats(0, 1e6),
    st.integers(6, 20),
    st.none() | st.floats(0.01, 1),
)
kernels = st.dictionaries(st.sampled_from(NAMES), uses, max_size=5)
slices = st.lists(
    st.tuples(st.sampled_from([("compute", None), ("idle", "launch"), ("exposed_copy", "h2d")]), st.integers(0, 10**9)),
    max_size=3,
    unique_by=lambda item: item[0],
)


def entry(name: str, steps: np.ndarray[Any, np.dtype[np.int64]], parts: list[Any], cls: str) -> dict[str, Any]:
    """A phase as the diagnosis has it."""
    quantiles = [None if not len(steps) else round(float(np.percentile(steps, q))) for q in (50, 95, 99)]
    mean = float(steps.mean()) if len(steps) else None
    return {
        "name": name,
        "kind": name,
        "count": len(steps),
        "total_ns": sum(ns for _, ns in parts),
        "verdict": {"class": cls, "cause": None, "confidence": 0.7},
        "slices": [{"kind": key[0], "cause": key[1], "ns": ns} for key, ns in parts],
        "steps": {
            "count": len(steps),
            "complete_count": len(steps),
            "device": 0,
            "how_found": "ranges",
            "busy_per_step_ns": mean,
            "idle_per_step_ns": None if mean is None else 0.0,
            **dict(zip(("p50_ns", "p95_ns", "p99_ns"), quantiles, strict=True)),
        },
        "device": 0,
        "in_window": True,
    }


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A run with up to two phases, of a profile or stored."""
    diagnosis = replace(BASE, phases=[], steps=None, whatif=None)
    kept = draw(st.booleans())
    phases = []
    for name in draw(st.sampled_from([("decode",), ("prefill", "decode"), ("steps",), ()])):
        cls = draw(st.sampled_from(VERDICT_CLASSES[:-1]))
        steps = draw(lengths)
        phase = entry(name, steps, draw(slices), cls)
        phases.append(PhaseRun(PhaseKey(name, 0, 0), phase, *((steps, draw(kernels)) if kept else (None, None))))
    diagnosis.phases = [phase.entry for phase in phases]
    diagnosis.steps = phases[0].entry["steps"] if phases else None
    run = of_diagnosis("run", diagnosis)
    run.phases, run.stored = phases, not kept
    run.kernels = draw(kernels)
    return run


def changes(result: Comparison) -> dict[str, Change]:
    found = {"window": result.window_ns, "span": result.span_ns}
    for phase in result.phases:
        for name in ("count", "p50_ns", "p95_ns", "p99_ns", "mean_ns", "total_ns", "kernels_per_step"):
            found[f"{sorted((phase.name, phase.kind))} {name}"] = getattr(phase, name)
    return found


@given(runs())
@settings(deadline=None, max_examples=60)
def test_nothing_differs_from_itself(run: Run) -> None:
    result = compare(run, run)
    for name, change in changes(result).items():
        assert change.delta in (0, None), name
        assert change.direction not in (LOWER, HIGHER), name
    assert {row.what for row in result.kernels} <= {"same", "unknown"}
    assert all(item.delta_ns == 0 for phase in result.phases for item in phase.slices)
    assert result.limiter.status in (SAME, UNKNOWN)
    assert all(phase.limiter is None or phase.limiter.status != MOVED for phase in result.phases)
    assert not result.foretold.made


@given(runs(), runs())
@settings(deadline=None, max_examples=100)
def test_exchanged_runs_are_mirrored(base: Run, head: Run) -> None:
    there, back = compare(base, head), compare(head, base)
    assert there.limiter.status == back.limiter.status
    forth, reverse = changes(there), changes(back)
    if {p.name for p in there.phases} == {p.name for p in back.phases}:
        assert forth.keys() == reverse.keys()
    for name in forth.keys() & reverse.keys():
        one, other = forth[name], reverse[name]
        assert (one.base, one.head) == (other.head, other.base), name
        assert one.direction == MIRRORED[other.direction], name
        if one.low is not None:
            assert math.isclose(one.low, -other.high) and math.isclose(one.high, -other.low)
    rows = {(row.name, row.what): row for row in there.kernels if row.phase != "steps"}
    mirrored = {(row.name, OTHER_WAY[row.what]): row for row in back.kernels if row.phase != "steps"}
    if there.phases and {p.name for p in there.phases} == {p.name for p in back.phases}:
        assert rows.keys() == mirrored.keys()


@given(runs(), runs())
@settings(deadline=None, max_examples=40)
def test_every_report_can_show_any_comparison(base: Run, head: Run) -> None:
    result = compare(base, head)
    for report in COMPARE_REPORTS:
        text = render(report.name, result)
        assert text.endswith("\n")
        if report.name == "text":
            assert [line for line in text.splitlines() if len(line) > 80] == []


def test_absurd_factors_fit_the_line_too() -> None:
    one, other = np.full(6, 1), np.array([1, 1, 1, 1, 10**9, 10**9, 10**9])
    sides = []
    for steps in (one, other):
        run = of_diagnosis("run", replace(BASE, phases=[], steps=None, whatif=None))
        run.phases = [PhaseRun(PhaseKey("decode", 0, 0), entry("decode", steps, [], "gpu-busy"), steps, {})]
        sides.append(run)
    text = render("text", compare(*sides))
    assert "times" in text and max(map(len, text.splitlines())) <= 80


@given(kernels, kernels)
def test_every_kernel_is_in_one_pair_and_no_time_is_lost(
    base: dict[str, KernelUse], head: dict[str, KernelUse]
) -> None:
    pairs = matched_kernels(base, head)
    for side, place in ((base, 2), (head, 3)):
        total = sum(pair[place].ns for pair in pairs if pair[place] is not None)
        assert math.isclose(total, sum(use.ns for use in side.values()), rel_tol=1e-9, abs_tol=1e-6)
    assert {pair[0] for pair in pairs if pair[1] == "name"} == base.keys() & head.keys()


@given(lengths.filter(len), st.sampled_from((0.5, 0.95, 0.99)))
def test_an_interval_holds_its_quantile(steps: Any, q: float) -> None:
    found = measured(steps, q)
    if found.low is not None:
        assert found.low <= found.value <= found.high or len(set(steps.tolist())) > 1
        assert steps.min() <= found.low <= found.high <= steps.max()


@pytest.mark.parametrize("distribution", ("normal", "two batch sizes", "long tail"))
@pytest.mark.parametrize(("before", "after"), ((6, 6), (12, 20), (200, 150)))
def test_chance_is_rarely_called_a_change(distribution: str, before: int, after: int) -> None:
    """Of 99 % intervals about one in a hundred misses."""
    rng = np.random.default_rng(7)

    def steps(count: int) -> Any:
        if distribution == "normal":
            return (1e6 + 2e4 * rng.normal(size=count)).astype(np.int64)
        if distribution == "long tail":
            return (1e6 * np.exp(0.4 * rng.normal(size=count))).astype(np.int64)
        return np.where(rng.random(count) < 0.6, 1_000_000, 1_300_000) + rng.integers(0, 2000, count)

    found = [difference(measured(steps(before), 0.5), measured(steps(after), 0.5), 0.0) for _ in range(600)]
    assert sum(change.direction in (LOWER, HIGHER) for change in found) <= 15
    assert all(change.direction != UNKNOWN for change in found)


def test_steps_that_resemble_their_neighbours_are_fewer_than_they_seem() -> None:
    rng = np.random.default_rng(3)

    def steps() -> Any:
        drift = np.zeros(400)
        for i in range(1, 400):
            drift[i] = 0.9 * drift[i - 1] + rng.normal()
        return (1e6 + 2e4 * drift).astype(np.int64)

    found = [difference(measured(steps(), 0.5), measured(steps(), 0.5), 0.0) for _ in range(300)]
    assert sum(change.direction in (LOWER, HIGHER) for change in found) <= 12
    one = steps()
    assert difference(measured(one, 0.5), measured((one * 1.3).astype(np.int64), 0.5)).direction == HIGHER


def test_a_shift_larger_than_the_spread_is_found() -> None:
    rng = np.random.default_rng(5)
    for count in (6, 12, 100):
        one = (1e6 + 1e4 * rng.normal(size=count)).astype(np.int64)
        other = (0.9e6 + 1e4 * rng.normal(size=count)).astype(np.int64)
        change = difference(measured(one, 0.5), measured(other, 0.5))
        assert change.direction == LOWER and change.low < -1e5 < change.high < 0


def test_one_slow_step_among_many_hides_no_change() -> None:
    one, other = np.full(30, 1_000_000), np.full(30, 900_000)
    one[3], other[17] = 5_000_000, 4_000_000
    assert difference(measured(one, 0.5), measured(other, 0.5)).direction == LOWER


def test_tails_need_many_steps() -> None:
    rng = np.random.default_rng(5)
    few, many = (rng.integers(900_000, 1_100_000, n) for n in (60, 2000))
    assert "the tail" in difference(measured(few, 0.95), measured(2 * few, 0.95)).reason
    assert difference(measured(many, 0.95), measured(2 * many, 0.95)).direction == HIGHER
    assert difference(measured(many, 0.99), measured(2 * many, 0.99)).direction == HIGHER


def test_stored_quantiles_give_a_wider_or_similar_interval() -> None:
    rng = np.random.default_rng(11)
    steps = (1e6 + 2e4 * rng.normal(size=300)).astype(np.int64)
    whole = measured(steps, 0.5)
    kept = stored(*(float(np.percentile(steps, q)) for q in (50, 95, 99)), 300)
    assert 0.6 < (kept.high - kept.low) / (whole.high - whole.low) < 2
    assert stored(1.0, 2.0, 3.0, 2).reason == "too few whole steps (2) to tell from chance"


@pytest.mark.parametrize(
    ("base", "head", "status"),
    [
        (("scheduling-bubble", "launch"), ("scheduling-bubble", "launch"), SAME),
        (("scheduling-bubble", "launch"), ("scheduling-bubble", "host-work"), MOVED),
        (("scheduling-bubble", "launch"), ("gpu-busy", None), MOVED),
        (("scheduling-bubble", "unknown"), ("scheduling-bubble", "sync"), UNKNOWN),
        (("gpu-busy", None), ("bandwidth-bound", None), UNKNOWN),
        (("compute-bound", None), ("bandwidth-bound", None), MOVED),
        (("gpu-busy", None), ("gpu-busy", None), SAME),
        (("unusable", None), ("gpu-busy", None), UNKNOWN),
    ],
)
def test_a_limiter_moves_only_where_both_are_known(base: Any, head: Any, status: str) -> None:
    assert same_limit(*base, *head) == status
    assert same_limit(*head, *base) == status


# --- several runs ----------------------------------------------------------------------------------------------------------

run_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=6)


@given(run_lengths, run_lengths)
def test_the_rank_test_counts_every_way_to_choose_a_side(one: list[int], other: list[int]) -> None:
    both = sorted([*one, *other])
    ranks = [both.index(v) + 1 + len(both) - both[::-1].index(v) for v in [*one, *other]]
    mean = len(one) * (len(both) + 1)
    observed = abs(sum(ranks[: len(one)]) - mean)
    ways = list(itertools.combinations(ranks, len(one)))
    expected = sum(abs(sum(way) - mean) >= observed for way in ways) / len(ways)
    assert math.isclose(rank_sum_p(one, other), expected, rel_tol=1e-9)
    assert math.isclose(rank_sum_p(other, one), expected, rel_tol=1e-9)


def test_the_rank_test_has_its_known_values() -> None:
    assert rank_sum_p([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(2 / 70)
    assert rank_sum_p([1, 2, 3], [4, 5, 6]) == pytest.approx(0.1)
    assert rank_sum_p([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]) == 1.0
    assert 0 < rank_sum_p(list(range(60)), list(range(30, 90))) < 1e-10


@pytest.mark.parametrize("distribution", ("normal", "two modes", "long tail"))
@pytest.mark.parametrize(("before", "after"), ((4, 4), (5, 5), (8, 6)))
def test_chance_between_runs_is_rarely_called_a_change(distribution: str, before: int, after: int) -> None:
    """Of a test at 5 % at most one in twenty errs."""
    rng = np.random.default_rng(3)

    def some(count: int) -> list[float]:
        noise = rng.normal(size=count)
        if distribution == "two modes":
            return list(np.where(rng.random(count) < 0.5, 30e6, 38e6) + 1e5 * noise)
        return list(30e6 * np.exp((0.5 if distribution == "long tail" else 0.02) * noise))

    found = [run_change(some(before), some(after), 0.0).direction for _ in range(1000)]
    assert sum(direction in (LOWER, HIGHER) for direction in found) <= 65
    assert UNKNOWN not in found


@given(st.lists(st.floats(1e3, 1e9), min_size=1, max_size=8), st.lists(st.floats(1e3, 1e9), min_size=1, max_size=8))
def test_runs_exchanged_are_mirrored(base: list[float], head: list[float]) -> None:
    there, back = run_change(base, head, 0.01), run_change(head, base, 0.01)
    assert there.direction == MIRRORED[back.direction]
    if min(len(base), len(head)) < 4:
        assert there.direction == UNKNOWN
    modes, mirrored = two_modes(base, head), two_modes(head, base)
    assert (modes is None) == (mirrored is None)
    if modes is not None and mirrored is not None:
        assert (modes.low, modes.high, modes.base, modes.head) == (
            mirrored.low, mirrored.high, mirrored.head, mirrored.base,
        )  # fmt: skip
        assert sum(modes.base) == len(base) and sum(modes.head) == len(head) and modes.low < modes.high


@pytest.mark.parametrize("distribution", ("normal", "uniform", "exponential", "lognormal", "standard_cauchy"))
@pytest.mark.parametrize(("before", "after"), ((4, 4), (5, 5), (8, 6), (10, 10)))
def test_noise_has_no_modes(distribution: str, before: int, after: int) -> None:
    rng = np.random.default_rng(9)

    def some(count: int) -> Any:
        return 100 + getattr(rng, distribution)(size=count) * (10 if distribution != "standard_cauchy" else 1)

    found = [two_modes(some(before), some(after)) for _ in range(2000)]
    assert sum(modes is not None for modes in found) <= 10


@given(st.integers(2, 5), st.integers(2, 5), st.integers(0, 5), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_modes_far_apart_are_found(low: int, high: int, more_low: int, more_high: int, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def some(slow: int, fast: int) -> list[float]:
        return [*(30.0 + 0.4 * rng.random(fast)), *(38.0 + 0.4 * rng.random(slow))]

    base, head = some(high, low), some(more_high, more_low)
    found = two_modes(base, head)
    if len(base) + len(head) < 8:
        assert found is None
    else:
        assert found is not None and (found.base, found.head) == ((low, high), (more_low, more_high))
        assert 30 <= found.low <= 30.4 and 38 <= found.high <= 38.4


def test_sides_that_differ_are_no_modes() -> None:
    assert two_modes([30.1, 30.2, 30.3, 30.2, 30.1], [38.1, 38.2, 38.3, 38.2, 30.2]) is None
    assert two_modes([30.1] * 5, [30.1] * 5) is None
