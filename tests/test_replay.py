"""Replays: the recording again when nothing changes, and the run that the simulator plays when a cost does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixed_specs import holds_its_calls, with_change
from infprof import trace as t
from infprof.diagnosis import Options, analyze, analyze_in_detail, what_if
from infprof.errors import InfprofError
from infprof.measures.operations import Prepared
from infprof.readers import read
from infprof.replay.setting import COSTS, Setting, parse_setting
from infprof.replay.whatif import WhatIf
from infprof.resources import rules_dir, sample_traces_dir
from infprof.rules import load
from infprof.simulator import Spec, load_spec, parse_spec, simulate, write_kineto, write_nsys_sqlite
from test_slices_add_up import traces
from workload_runs import FAULTY_RUNS, described

SAMPLES = sorted(path.parent for path in sample_traces_dir().glob("*/spec.yaml"))
SHARED = Path(__file__).parent.parent.parent / "shared" / "traces"
EVERYTHING = [Setting(cost, 0.0) for cost in COSTS]
ALWAYS = (0, 1 << 62)


def whatif(path: Path) -> WhatIf:
    return WhatIf(Prepared(read(path)), ALWAYS)


def played(spec: Spec, path: Path) -> Path:
    write_nsys_sqlite(simulate(spec), path)
    return path


def recorded_span(path: Path) -> int:
    ops = Prepared(read(path)).operations
    return int(ops.end.max() - ops.start.min())


# --- nothing changed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", SAMPLES, ids=lambda p: p.name)
def test_nothing_changed_gives_the_recording_to_the_nanosecond(folder: Path) -> None:
    asked = whatif(folder / "trace.sqlite")
    replayed, ops = asked.predict([]), asked.prepared.operations
    origin = int(ops.start[0] - replayed.start[0])
    assert (replayed.start + origin == ops.start).all()
    assert (replayed.end + origin == ops.end).all()
    assert asked.off is None


@pytest.mark.parametrize("folder", SAMPLES[:4], ids=lambda p: p.name)
def test_the_same_run_as_a_pytorch_trace_is_given_back_too(folder: Path, tmp_path: Path) -> None:
    for path in write_kineto(simulate(load_spec(folder / "spec.yaml")), tmp_path / "trace.json"):
        asked = whatif(path)
        assert asked.predict([]).span_ns == asked.recorded_span_ns


def _real() -> list[Path]:
    return sorted(p for p in SHARED.glob("*/*") if p.name.endswith((".gz", ".json", ".sqlite")))


@pytest.mark.skipif(not SHARED.exists(), reason="the shared traces are not there")
@pytest.mark.parametrize("path", _real(), ids=lambda p: p.name)
def test_real_traces_are_given_back_and_no_fix_makes_them_longer(path: Path) -> None:
    try:
        asked = whatif(path)
    except InfprofError as error:
        assert "no GPU operation" in str(error) or "no CUDA" in str(error) or path.name in str(error)
        return
    assert abs(asked.replay_error_ratio) <= 0.005
    if asked.off is not None:
        return
    before = asked.recorded_span_ns
    for setting in (*EVERYTHING, Setting("copies", None)):
        assert asked.predict([setting]).span_ns <= before, setting.text


# --- one cost changed ------------------------------------------------------------------------------------------------

CHANGES = [
    (cost, factor)
    for cost in ("launch", "host", "allocator", "copies", "comm", "kernel")
    # Kernels without any length are left out by readers.
    for factor in ((0.0, 0.5) if cost != "kernel" else (0.1, 0.5))
]


@pytest.mark.parametrize("folder", SAMPLES, ids=lambda p: p.name)
def test_what_a_fix_gives_is_what_the_run_with_the_fix_takes(folder: Path, tmp_path: Path) -> None:
    spec = load_spec(folder / "spec.yaml")
    if len(spec.processes) > 1:
        # Threads draw their jitter in the order in which they act, which a change of costs changes.
        spec = replace(spec, jitter=0.0)
    asked = whatif(played(spec, tmp_path / "trace.sqlite"))
    before, errors = asked.recorded_span_ns, {}
    for number, (cost, factor) in enumerate(CHANGES):
        truth = recorded_span(played(with_change(spec, cost, factor), tmp_path / f"{number}.sqlite"))
        errors[cost, factor] = abs(asked.predict([Setting(cost, factor)]).span_ns - truth) / before
    assert max(errors.values()) <= 0.01, errors
    assert np.mean(list(errors.values())) <= 0.001, errors


@pytest.mark.parametrize("folder", SAMPLES, ids=lambda p: p.name)
def test_a_run_without_waits_is_foretold(folder: Path, tmp_path: Path) -> None:
    spec = load_spec(folder / "spec.yaml")
    if holds_its_calls(spec):
        pytest.skip("its copies wait in their own calls")
    truth = recorded_span(played(with_change(spec, "sync", 0), tmp_path / "fixed.sqlite"))
    asked = whatif(folder / "trace.sqlite")
    assert asked.predict([Setting("sync", 0.0)]).span_ns == pytest.approx(truth, rel=0.02)


def test_several_changes_at_once_are_foretold(tmp_path: Path) -> None:
    folder = sample_traces_dir() / "launch-bound-decode"
    spec = with_change(with_change(load_spec(folder / "spec.yaml"), "launch", 0.25), "host", 0.5)
    truth = recorded_span(played(spec, tmp_path / "fixed.sqlite"))
    predicted = whatif(folder / "trace.sqlite").predict([Setting("launch", 0.25), Setting("host", 0.5)]).span_ns
    assert predicted == pytest.approx(truth, rel=0.005)


STREAMED = """
name: weights come over a stream of their own
seed: 3
jitter: 0.04
kernels:
  layer: {name: ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn, time: 180us}
processes:
  - threads:
      - run:
          - repeat: 40
            do:
              - {copy: h2d, size: 12MB, stream: 13}
              - {record: here, stream: 13}
              - {wait: here}
              - {launch: layer, count: 3}
              - {record: done}
              - {wait: done, stream: 13}
"""


def test_streams_that_wait_for_each_other_are_foretold(tmp_path: Path) -> None:
    import yaml

    spec = parse_spec(yaml.safe_load(STREAMED), "streamed")
    asked = whatif(played(spec, tmp_path / "trace.sqlite"))
    assert asked.predict([]).span_ns == asked.recorded_span_ns
    for cost, factor in (("copies", 0.0), ("copies", 0.5), ("kernel", 0.25), ("launch", 0.0)):
        truth = recorded_span(played(with_change(spec, cost, factor), tmp_path / f"{cost}{factor}.sqlite"))
        error = abs(asked.predict([Setting(cost, factor)]).span_ns - truth) / asked.recorded_span_ns
        assert error <= 0.03, (cost, factor)


def test_overlapped_copies_leave_the_longer_of_copying_and_computing(tmp_path: Path) -> None:
    import yaml

    spec = parse_spec(yaml.safe_load(STREAMED), "streamed")
    asked = whatif(played(spec, tmp_path / "trace.sqlite"))
    ops = asked.prepared.operations
    copying = int((ops.end - ops.start)[ops.kind == 2].sum())
    computing = int((ops.end - ops.start)[ops.kind == 0].sum())
    span = asked.predict([Setting("copies", None)]).span_ns
    assert span == pytest.approx(max(copying, computing), rel=0.05)
    assert span < 0.8 * asked.recorded_span_ns


# --- whatever the trace ----------------------------------------------------------------------------------------------

FACTORS = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])
SETTINGS = st.lists(st.builds(Setting, st.sampled_from(sorted(COSTS)), FACTORS), max_size=4)


def asked_of(trace: t.Trace) -> WhatIf | None:
    prepared = Prepared(trace)
    ops = prepared.operations
    # Readers leave out what ends before it starts; some of these traces have it.
    if not len(ops) or int(ops.end.max()) <= int(ops.start.min()) or (ops.end < ops.start).any():
        return None
    return WhatIf(prepared, ALWAYS)


@given(traces(), SETTINGS, SETTINGS)
def test_less_cost_never_takes_longer(trace: t.Trace, settings: list[Setting], more: list[Setting]) -> None:
    asked = asked_of(trace)
    if asked is None:
        return
    try:
        unchanged = asked.predict([]).end.max()
    except InfprofError as error:
        assert "circle" in str(error)
        return
    first = asked.predict(settings).end.max()
    assert first <= unchanged
    assert asked.predict([*settings, *more]).end.max() <= first


@given(traces())
def test_ends_lie_behind_starts_and_calls_in_order(trace: t.Trace) -> None:
    asked = asked_of(trace)
    if asked is None:
        return
    try:
        replayed = asked.predict([Setting("launch", 0.0), Setting("host", 0.5)])
    except InfprofError:
        return
    assert (replayed.end >= replayed.start).all()
    calls = asked._recording.calls
    assert (replayed.call_end >= replayed.call_start).all()
    inside = ~calls.first[1:]
    assert (replayed.call_start[1:][inside] >= replayed.call_end[:-1][inside]).all()


@given(traces(), st.integers(-(10**12), 10**12))
def test_the_origin_of_time_means_nothing(trace: t.Trace, shift: int) -> None:
    asked = asked_of(trace)
    if asked is None:
        return
    moved = {}
    for name in t.SCHEMA:
        table = getattr(trace, name)
        if table is not None and len(table):
            times = {c: table[c] + shift for c in ("start", "end", "time") if c in table.columns}
            moved[name] = table.replaced(**times)
    other = asked_of(replace(trace, **moved))
    assert other is not None
    for settings in ([], [Setting("launch", 0.0)], [Setting("kernel", 0.5)]):
        try:
            expected = asked.predict(settings).span_ns
        except InfprofError:
            return
        assert other.predict(settings).span_ns == expected


@pytest.mark.parametrize("folder", SAMPLES[::3], ids=lambda p: p.name)
def test_the_order_of_rows_in_the_file_means_nothing(folder: Path) -> None:
    trace = read(folder / "trace.sqlite")
    rng = np.random.default_rng(5)
    shuffled = {}
    for name in ("kernels", "copies", "memsets", "api_calls", "syncs", "os_calls"):
        table = getattr(trace, name)
        if table is not None:
            shuffled[name] = table.take(rng.permutation(len(table)))
    asked, other = WhatIf(Prepared(trace), ALWAYS), WhatIf(Prepared(replace(trace, **shuffled)), ALWAYS)
    for settings in ([], [Setting("launch", 0.0)], [Setting("sync", 0.0), Setting("kernel", 0.5)]):
        assert other.predict(settings).span_ns == asked.predict(settings).span_ns


@pytest.mark.parametrize("folder", SAMPLES, ids=lambda p: p.name)
def test_without_any_cost_nothing_is_left(folder: Path) -> None:
    assert whatif(folder / "trace.sqlite").predict(EVERYTHING).span_ns == 0


@pytest.mark.parametrize("folder", SAMPLES, ids=lambda p: p.name)
def test_no_fix_gains_more_than_its_cost_and_the_chain_adds_up(folder: Path) -> None:
    asked = whatif(folder / "trace.sqlite")
    before = asked.recorded_span_ns
    for setting in EVERYTHING:
        if setting.cost in ("launch", "allocator", "module-load", "comm"):
            assert before - asked.predict([setting]).span_ns <= asked._bound(setting)
    chain = asked.chain()
    won = sum(step.gain_ratio for step in chain.chain)
    assert won == pytest.approx(chain.gain_ratio or 0.0, abs=1e-9)
    spans = [before, *(step.predicted_span_ns for step in chain.chain)]
    assert spans == sorted(spans, reverse=True)


def test_two_processes_that_know_nothing_of_each_other_are_as_one(tmp_path: Path) -> None:
    """The same process twice, on devices of their own, gains what it gains alone."""
    import yaml

    one = yaml.safe_load(STREAMED)
    twice = dict(one, devices=[{}, {}], jitter=0)
    twice["processes"] = [{"device": n, "pid": 100 + n, **one["processes"][0]} for n in range(2)]
    alone = whatif(played(parse_spec(dict(one, jitter=0), "one"), tmp_path / "one.sqlite"))
    both = whatif(played(parse_spec(twice, "two"), tmp_path / "two.sqlite"))
    for settings in ([], [Setting("copies", 0.0)], [Setting("kernel", 0.5), Setting("launch", 0.0)]):
        assert both.predict(settings).span_ns == alone.predict(settings).span_ns


# --- what is asked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("launch=0", Setting("launch", 0.0)),
        ("copies=overlapped", Setting("copies", None)),
        ("copies:d2h=0.5", Setting("copies", 0.5, "d2h")),
        ("kernel:gemm=0.5", Setting("kernel", 0.5, "gemm")),
        ("kernels=2", Setting("kernel", 2.0)),
        ("kernel:a=b*=0", Setting("kernel", 0.0, "a=b*")),
    ],
)
def test_settings_are_read(text: str, setting: Setting) -> None:
    assert parse_setting(text) == setting
    assert parse_setting(setting.text) == setting


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("launch", "COST=FACTOR"),
        ("lunch=0", "launch"),
        ("launch=fast", "factor"),
        ("launch=-1", "factor"),
        ("launch=nan", "factor"),
        ("launch=overlapped", "copies"),
        ("host:python=0", "narrowed"),
        ("copies:up=0", "h2d"),
    ],
)
def test_settings_that_mean_nothing_are_refused_with_what_would(text: str, hint: str) -> None:
    with pytest.raises(InfprofError, match="--set") as caught:
        parse_setting(text)
    assert hint in str(caught.value)
    assert caught.value.exit_code == 2


# --- the runs of every fault -------------------------------------------------------------------------------------------


def faulty(fault: str) -> Spec:
    spec = parse_spec(described(fault, {"jitter": 0.03}))
    return replace(spec, jitter=0.0) if len(spec.processes) > 1 else spec


@cache
def asked_of_fault(fault: str) -> WhatIf:
    with TemporaryDirectory() as folder:
        trace = read(played(faulty(fault), Path(folder) / "trace.sqlite"))
    rules = load([rules_dir()])
    detailed = analyze_in_detail(trace, rules, Options(whatif=False))
    assert detailed.prepared is not None
    return what_if(detailed.prepared, detailed.diagnosis, rules)


@pytest.mark.parametrize("fault", FAULTY_RUNS)
def test_every_fix_of_every_fault_is_foretold(fault: str, tmp_path: Path) -> None:
    spec, asked = faulty(fault), asked_of_fault(fault)
    assert asked.predict([]).span_ns == asked.recorded_span_ns
    errors = {}
    for cost, factor in (
        ("launch", 0.0),
        ("host", 0.5),
        ("copies", 0.5),
        ("comm", 0.0),
        ("kernel", 0.5),
        ("allocator", 0.0),
    ):
        setting = Setting(cost, factor)
        predicted = asked.predict([setting]).span_ns
        if predicted == asked.recorded_span_ns and asked._bound(setting) == 0:
            continue  # it has none of this cost
        truth = recorded_span(played(with_change(spec, cost, factor), tmp_path / f"{cost}.sqlite"))
        errors[setting.text] = abs(predicted - truth) / asked.recorded_span_ns
    assert max(errors.values()) <= 0.005, errors


@pytest.mark.parametrize(
    ("fault", "cost", "factor"),
    [
        ("no-graphs", "launch", 0.0),
        ("sync", "kernel", 0.1),
        ("offload", "copies", 0.0),
        ("pageable", "copies", 0.0),
        ("host-sampling", "host", 0.0),
        ("allocator", "allocator", 0.0),
        ("slow-link", "comm", 0.0),
        ("detokenise", "host", 0.0),
        ("long-context", "kernel", 0.1),
    ],
)
def test_what_limits_next_is_what_limits_the_run_with_the_fix(
    fault: str, cost: str, factor: float, tmp_path: Path
) -> None:
    result = asked_of_fault(fault).ask([Setting(cost, factor)])
    trace = read(played(with_change(faulty(fault), cost, factor), tmp_path / "fixed.sqlite"))
    truth = analyze(trace, load([rules_dir()]), Options(whatif=False)).verdict
    assert (result.next_verdict, result.next_cause) == (truth.cls, truth.cause)


@pytest.mark.parametrize("name", ["pcie-limited-offload", "bandwidth-bound-decode", "compute-bound-prefill", "healthy"])
def test_counters_of_time_that_is_gone_name_no_other_limiter(name: str, tmp_path: Path) -> None:
    folder = sample_traces_dir() / name
    rules = load([rules_dir()])
    detailed = analyze_in_detail(read(folder / "trace.sqlite"), rules, Options(whatif=False))
    assert detailed.prepared is not None
    asked = what_if(detailed.prepared, detailed.diagnosis, rules)
    for cost, factor in (("copies", 0.0), ("kernel", 0.5), ("kernel", 0.1)):
        result = asked.ask([Setting(cost, factor)])
        if (result.gain_ratio or 0.0) < 0.05:
            continue
        spec = with_change(load_spec(folder / "spec.yaml"), cost, factor)
        fixed = read(played(spec, tmp_path / f"{name}{cost}{factor}.sqlite"))
        truth = analyze(fixed, rules, Options(whatif=False)).verdict
        assert result.next_verdict in (truth.cls, "gpu-busy")


def test_weights_that_come_ahead_are_foretold(tmp_path: Path) -> None:
    """Copies on a stream of their own: the same workload with prefetch."""
    asked = asked_of_fault("offload")
    ahead = parse_spec(described("offload", {"jitter": 0.03}, prefetch=True))
    truth = recorded_span(played(ahead, tmp_path / "ahead.sqlite"))
    predicted = asked.predict([Setting("copies", None)]).span_ns
    # A bound: the program cannot ask for everything at once.
    assert predicted <= truth * 1.01
    assert predicted >= 0.9 * truth
