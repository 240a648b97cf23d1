"""Two runs compared: pairs of the simulator whose difference is known, and what a comparison may never claim."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fixed_specs import with_change
from infprof.compare.comparing import compare
from infprof.compare.model import HIGHER, LOWER, MOVED, SAME, UNKNOWN, Comparison, PhaseChange
from infprof.compare.runs import Run, load_run
from infprof.diagnosis import Options
from infprof.errors import InfprofError, UsageError
from infprof.reports import render as render_diagnosis
from infprof.resources import sample_traces_dir
from infprof.simulator import Spec, load_spec, parse_spec, simulate, write_kineto, write_nsys_sqlite
from step_workloads import continuous_batching, decode_eager, decode_without_sync, prefill_mixed_in
from workload_runs import FAULTY_RUNS, described

SHARED = Path(__file__).parent.parent.parent / "shared" / "traces"
AUTO = Options()


def sample(name: str) -> Spec:
    return load_spec(sample_traces_dir() / name / "spec.yaml")


def run(spec: Spec, folder: Path, name: str = "run.sqlite") -> Run:
    path = folder / name
    write_nsys_sqlite(simulate(spec), path)
    return load_run(path, AUTO, with_whatif=True)


def stored(one: Run, folder: Path, name: str = "stored.json") -> Run:
    path = folder / name
    path.write_text(render_diagnosis("json", one.diagnosis), encoding="utf-8")
    return load_run(path, AUTO, with_whatif=True)


def phase(result: Comparison, name: str) -> PhaseChange:
    return next(p for p in result.phases if p.name == name)


def claims(result: Comparison) -> list[str]:
    """All that the comparison says is different."""
    found = [
        f"{p.name} {q}"
        for p in result.phases
        for q in ("p50_ns", "p95_ns", "p99_ns")
        if getattr(p, q).direction in (LOWER, HIGHER)
    ]
    found += [f"{row.what} {row.name}" for row in result.kernels if row.what not in ("same", "unknown")]
    return found + ["limiter"] * (result.limiter.status == MOVED)


# --- one cost changed --------------------------------------------------------------------------------------------------

# Sample, cost, factor, the fix that was made, and what limits afterwards (None: as before).
FIXED = [
    ("launch-bound-decode", "launch", 0.0, ["launch=0"], "gpu-busy"),
    ("launch-bound-decode", "launch", 0.25, ["launch=0"], "gpu-busy"),
    ("launch-bound-decode", "host", 0.0, ["host=0"], None),
    ("sync-per-token", "sync", 0.0, ["sync=0"], "gpu-busy"),
    ("sync-per-token", "host", 0.0, ["host=0"], "gpu-busy"),
    ("host-bound-scheduler", "host", 0.0, ["host=0"], "gpu-busy"),
    ("host-bound-scheduler", "host", 0.3, ["host=0"], "scheduling-bubble"),
    ("pcie-limited-offload", "copies", 0.1, ["copies=0"], "gpu-busy"),
    ("communication-bound-tp", "comm", 0.1, ["comm=0"], "gpu-busy"),
]


@pytest.mark.parametrize(("name", "cost", "factor", "made", "limit"), FIXED)
def test_a_fix_is_seen_and_was_foretold(
    name: str, cost: str, factor: float, made: list[str], limit: str | None, tmp_path: Path
) -> None:
    # Of a trace without counters: what limits kernels is then not known of either run.
    spec = replace(sample(name), counter_rate_hz=None)
    if len(spec.processes) > 1:
        # Threads draw their jitter in the order in which they act, which a change of costs changes.
        spec = replace(spec, jitter=0.0)
    base, head = run(spec, tmp_path, "base.sqlite"), run(with_change(spec, cost, factor), tmp_path, "head.sqlite")
    result = compare(base, head)
    told = result.foretold
    assert told.made == made, told.sentence
    assert told.status == "foretold", told.sentence
    assert told.predicted_ratio == pytest.approx(told.measured_ratio, abs=0.02)
    assert told.predicted_ratio < -0.02
    assert told.predicted_ratio >= told.bound_ratio - 1e-9
    if limit is None:
        assert (result.limiter.status, result.limiter.base_class) == (SAME, result.limiter.head_class), result.headline
    else:
        assert (result.limiter.status, result.limiter.head_class) == (MOVED, limit), result.headline
        assert told.limiter_foretold


@pytest.mark.parametrize("factor", (0.5, 2.0))
def test_kernels_that_take_another_time_are_named_and_foretold(factor: float, tmp_path: Path) -> None:
    spec = parse_spec(decode_without_sync())
    base, head = run(spec, tmp_path, "base.sqlite"), run(with_change(spec, "kernel", factor), tmp_path, "head.sqlite")
    result = compare(base, head)
    decode = phase(result, "decode")
    assert decode.p50_ns.direction == (LOWER if factor < 1 else HIGHER)
    assert decode.p50_ns.low <= decode.p50_ns.delta <= decode.p50_ns.high
    large = [row for row in result.kernels if row.base_ns > 0.01 * decode.mean_ns.base]
    assert {row.what for row in large} == {"faster" if factor < 1 else "slower"}
    told = result.foretold
    assert told.status == "nothing-made" and told.made == []
    assert told.kernel_factor == pytest.approx(factor, rel=0.02)
    assert told.with_kernels_ratio == pytest.approx(told.measured_ratio, abs=0.03)


def renamed(folder: str, kernel: str, name: str, time: str | None = None) -> Spec:
    """The sample with another kernel in the place of one."""
    data = yaml.safe_load((sample_traces_dir() / folder / "spec.yaml").read_text(encoding="utf-8"))
    entry = data["kernels"][kernel]
    entry.pop("op", None)
    entry["name"] = name
    if time is not None:
        entry["time"] = time
    return parse_spec(data)


def test_a_kernel_that_was_replaced_went_and_its_successor_came(tmp_path: Path) -> None:
    base = run(sample("launch-bound-decode"), tmp_path, "base.sqlite")
    head = run(renamed("launch-bound-decode", "attention", "my_attention_kernel", "9us"), tmp_path, "head.sqlite")
    result = compare(base, head)
    changed = {row.what: row for row in result.kernels if row.what in ("came", "went")}
    assert "flash_fwd_splitkv_kernel" in changed["went"].name and changed["went"].head_ns is None
    assert changed["came"].name == "my_attention_kernel" and changed["came"].base_calls is None
    assert changed["came"].head_calls == pytest.approx(24)
    assert changed["came"].head_ns == pytest.approx(24 * 9000, rel=0.05)


def test_a_kernel_with_other_template_arguments_is_the_same_kernel(tmp_path: Path) -> None:
    base = run(sample("launch-bound-decode"), tmp_path, "base.sqlite")
    name = "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<(int)128, (int)64>, (bool)1>(flash::Flash_fwd_params)"
    head = run(renamed("launch-bound-decode", "attention", name), tmp_path, "head.sqlite")
    result = compare(base, head)
    assert not [row for row in result.kernels if row.what in ("came", "went")]
    row = next(row for row in result.kernels if row.matched == "short-name")
    assert row.name == "flash_fwd_splitkv_kernel" and row.what == "same"


def test_calls_that_are_no_longer_made_are_told_from_faster_ones(tmp_path: Path) -> None:
    data = yaml.safe_load((sample_traces_dir() / "launch-bound-decode" / "spec.yaml").read_text(encoding="utf-8"))
    base = run(parse_spec(data), tmp_path, "base.sqlite")
    data["processes"][0]["threads"][0]["run"][0]["do"][0]["repeat"] = 18
    head = run(parse_spec(data), tmp_path, "head.sqlite")
    result = compare(base, head)
    rows = [row for row in result.kernels if row.what != "same"]
    assert rows and {row.what for row in rows} == {"fewer-calls"}
    assert phase(result, "decode").kernels_per_step.change_ratio == pytest.approx(-60 / 242)


# --- no difference -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("launch-bound-decode", "sync-per-token", "healthy", "bandwidth-bound-decode"))
def test_another_seed_is_no_difference(name: str, tmp_path: Path) -> None:
    spec = sample(name)
    base = run(spec, tmp_path, "base.sqlite")
    for seed in (101, 102, 103):
        result = compare(base, run(replace(spec, seed=seed), tmp_path, f"{seed}.sqlite"))
        assert not claims(result), result.headline
        assert re.match(r"no difference (beyond the spread of the steps|of 1 % or more) \(", result.headline)
        assert result.foretold.status == "nothing-made"


@pytest.mark.parametrize("workload", (decode_eager, prefill_mixed_in, continuous_batching), ids=lambda w: w.__name__)
def test_another_seed_is_no_difference_in_any_phase(workload: object, tmp_path: Path) -> None:
    base = run(parse_spec(workload()), tmp_path, "base.sqlite")  # type: ignore[operator]
    head = run(parse_spec({**workload(), "seed": 99}), tmp_path, "head.sqlite")  # type: ignore[operator]
    result = compare(base, head)
    assert not claims(result), result.headline
    assert all(p.in_base and p.in_head for p in result.phases)


@pytest.mark.parametrize("path", sorted(sample_traces_dir().glob("*/trace.sqlite")), ids=lambda p: p.parent.name)
def test_a_run_is_not_different_from_itself(path: Path, tmp_path: Path) -> None:
    one = load_run(path, AUTO, with_whatif=True)
    for other in (one, stored(one, tmp_path)):
        for result in (compare(one, other), compare(other, one)):
            assert not claims(result), result.headline
            assert all(row.delta in (0, None) for row in result.measures)
            assert result.foretold.made == []


@pytest.mark.parametrize(
    "name", ("launch-bound-decode", "sync-per-token", "host-bound-scheduler", "compute-bound-prefill")
)
def test_nsys_and_pytorch_of_one_run_are_the_same_run(name: str, tmp_path: Path) -> None:
    spec = replace(sample(name), counter_rate_hz=None)
    base = run(spec, tmp_path, "base.sqlite")
    (path,) = write_kineto(simulate(spec), tmp_path / "head.json")
    result = compare(base, load_run(path, AUTO))
    assert not claims(result), result.headline
    assert any("nsys in BASE and PyTorch profiler in HEAD" in note for note in result.notes)
    assert not [row for row in result.kernels if row.what != "same"]


def test_a_limiter_that_one_trace_does_not_tell_has_not_moved(tmp_path: Path) -> None:
    spec = sample("bandwidth-bound-decode")
    assert spec.counter_rate_hz is not None
    base, head = run(spec, tmp_path, "base.sqlite"), run(replace(spec, counter_rate_hz=None), tmp_path, "head.sqlite")
    assert (base.diagnosis.verdict.cls, head.diagnosis.verdict.cls) == ("bandwidth-bound", "gpu-busy")
    result = compare(base, head)
    assert result.limiter.status == UNKNOWN
    assert "whether the limiter moved is not known" in result.headline


@pytest.mark.skipif(not SHARED.exists(), reason="the shared traces are not there")
def test_real_traces_are_not_different_from_themselves(tmp_path: Path) -> None:
    compared = 0
    for path in sorted(p for p in SHARED.glob("*/*") if p.stat().st_size < 1_000_000):
        try:
            one = load_run(path, AUTO, with_whatif=True)
        except InfprofError as refused:
            assert re.search("cannot be compared|not comparable", str(refused))
            continue
        compared += 1
        assert not claims(compare(one, one)), path.name
        assert not claims(compare(stored(one, tmp_path), one)), path.name
    assert compared > 20


# --- other amounts of work -----------------------------------------------------------------------------------------------


def test_more_steps_are_no_slower_steps(tmp_path: Path) -> None:
    data = yaml.safe_load((sample_traces_dir() / "launch-bound-decode" / "spec.yaml").read_text(encoding="utf-8"))
    base = run(parse_spec(data), tmp_path, "base.sqlite")
    data["processes"][0]["threads"][0]["run"][0]["repeat"] = 25
    head = run(parse_spec(data), tmp_path, "head.sqlite")
    result = compare(base, head)
    assert not claims(result), result.headline
    assert result.window_ns.change_ratio == pytest.approx(1.5, abs=0.1)
    assert (phase(result, "decode").count.base, phase(result, "decode").count.head) == (10, 25)


def test_few_steps_are_shown_and_not_judged(tmp_path: Path) -> None:
    data = yaml.safe_load((sample_traces_dir() / "launch-bound-decode" / "spec.yaml").read_text(encoding="utf-8"))
    data["processes"][0]["threads"][0]["run"][0]["repeat"] = 4
    spec = parse_spec(data)
    base = run(spec, tmp_path, "base.sqlite")
    result = compare(base, run(with_change(spec, "launch", 0.0), tmp_path, "head.sqlite"))
    assert phase(result, "decode").p50_ns.direction == UNKNOWN
    assert re.search(
        r"decode p50 [\d.]+ → [\d.]+ ms \(−5\d\.\d %; too few whole steps \(3\) to tell from chance\)", result.headline
    )


def test_phases_of_the_workload_are_compared_each(tmp_path: Path) -> None:
    """A fault against the healthy run with the same requests: prefill and decode apart, and each kernel in its phase."""
    settings = FAULTY_RUNS["allocator"]
    base = run(parse_spec(described("allocator")), tmp_path, "base.sqlite")
    head = run(parse_spec(described("none", **settings)), tmp_path, "head.sqlite")
    result = compare(base, head)
    assert {p.name for p in result.phases if p.steps} >= {"prefill", "decode"}
    assert phase(result, "decode").p50_ns.direction == LOWER
    assert re.match(r"decode steps are [\d.]+ ms faster \(−7\d %; p50 ", result.headline)
    assert "moved from the allocator to" in result.headline
    assert "allocator=0" in result.foretold.made and result.foretold.status == "foretold"
    assert {row.phase for row in result.kernels} >= {"prefill", "decode"}


def test_without_steps_windows_of_the_same_work_are_compared(tmp_path: Path) -> None:
    def once(us: int) -> Spec:
        names = [f"kernel_{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(300)]
        kernels = {name: {"name": name, "time": f"{us}us"} for name in names}
        run: list[dict[str, object]] = [{"launch": name} for name in names]
        return parse_spec({"seed": 1, "kernels": kernels, "processes": [{"pid": 1, "threads": [{"run": run}]}]})

    base, head = run(once(40), tmp_path, "base.sqlite"), run(once(20), tmp_path, "head.sqlite")
    result = compare(base, head)
    assert result.steps is None and result.window_ns.direction == LOWER
    assert result.headline.startswith("the same number of kernels takes 4")


def test_other_programs_are_called_so(tmp_path: Path) -> None:
    base = run(sample("host-bound-scheduler"), tmp_path, "base.sqlite")
    other = run(sample("sync-per-token"), tmp_path, "head.sqlite")
    assert compare(base, other).headline.startswith("not comparable: kernels in common 0 % of all calls")
    result = compare(base, other, other_program=True)
    assert any("different programs" in note for note in result.notes)
    assert any("the GPU is" in note for note in result.notes)
    assert result.foretold.status == "no-prediction" and not result.foretold.made


# --- stored diagnoses ----------------------------------------------------------------------------------------------------


def test_stored_diagnoses_tell_the_same_story(tmp_path: Path) -> None:
    spec = sample("launch-bound-decode")
    base, head = run(spec, tmp_path, "base.sqlite"), run(with_change(spec, "launch", 0.0), tmp_path, "head.sqlite")
    whole = compare(base, head)
    result = compare(stored(base, tmp_path, "b.json"), stored(head, tmp_path, "h.json"))
    assert result.headline == whole.headline
    assert result.foretold.status == "foretold" and result.foretold.made == ["launch=0"]
    assert result.foretold.bound_ratio == pytest.approx(whole.foretold.bound_ratio, abs=0.005)
    assert result.foretold.predicted_ratio is None
    assert (result.base.stored, whole.base.stored) == (True, False)
    assert result.phases[0].p95_ns.reason == "the length of each step is not in a stored diagnosis"


def test_what_a_fix_outside_the_chain_promises_only_the_profile_tells(tmp_path: Path) -> None:
    spec = sample("launch-bound-decode")
    base, head = run(spec, tmp_path, "base.sqlite"), run(with_change(spec, "host", 0.0), tmp_path, "head.sqlite")
    result = compare(stored(base, tmp_path), head)
    assert result.foretold.made == [] and result.foretold.status == "nothing-made"
    assert compare(base, head).foretold.made == ["host=0"]


def test_phases_in_other_shares_leave_only_times_per_call(tmp_path: Path) -> None:
    base = run(parse_spec(prefill_mixed_in()), tmp_path, "base.sqlite")
    other = prefill_mixed_in()
    thread = other["processes"][0]["threads"][0]
    thread["run"] = [a for i, a in enumerate(thread["run"]) if (i // 2) % 9 != 0 or i % 36 == 0]
    head = run(parse_spec(other), tmp_path, "head.sqlite")
    whole = compare(base, head)
    assert not [row for row in whole.kernels if row.what not in ("same", "unknown")], whole.headline
    result = compare(stored(base, tmp_path, "b.json"), stored(head, tmp_path, "h.json"))
    assert not [row for row in result.kernels if row.what not in ("same", "unknown")]
    assert any("only the time of a call is compared" in note for note in result.notes)


# --- what cannot be compared ---------------------------------------------------------------------------------------------


def test_what_is_unusable_is_refused_in_one_sentence(tmp_path: Path) -> None:
    data = yaml.safe_load((sample_traces_dir() / "launch-bound-decode" / "spec.yaml").read_text(encoding="utf-8"))
    data["processes"][0]["threads"][0]["run"] = [{"launch": "norm"}]
    write_nsys_sqlite(simulate(parse_spec(data)), tmp_path / "short.sqlite")
    with pytest.raises(InfprofError, match=r"short\.sqlite cannot be compared, it is unusable: .*too short"):
        load_run(tmp_path / "short.sqlite", AUTO)


def test_several_profiles_on_one_side_are_refused(tmp_path: Path) -> None:
    trace = simulate(sample("launch-bound-decode"))
    for name in ("a.sqlite", "b.sqlite"):
        write_nsys_sqlite(trace, tmp_path / name)
    with pytest.raises(UsageError, match="holds 2 profiles: compare takes one run on each side"):
        load_run(tmp_path, AUTO)


def test_a_finished_diagnosis_takes_no_options(tmp_path: Path) -> None:
    one = run(sample("launch-bound-decode"), tmp_path)
    stored(one, tmp_path, "d.json")
    with pytest.raises(UsageError, match="--window needs the profile itself"):
        load_run(tmp_path / "d.json", Options(window="full"))


@pytest.mark.parametrize("fault", ("sync", "pageable", "low-demand", "kv-pressure"))
def test_other_requests_are_no_difference_in_any_step_or_kernel(fault: str, tmp_path: Path) -> None:
    """Prompts of other lengths make other batches: kernels take other times, some are only needed by the one or the other."""
    base = run(parse_spec(described(fault)), tmp_path, "base.sqlite")
    for seed in (21, 22):
        result = compare(base, run(parse_spec({**described(fault), "seed": seed}), tmp_path, f"{seed}.sqlite"))
        assert not claims(result), result.headline
        assert not result.foretold.made
