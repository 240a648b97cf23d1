"""Phases of steps and what is said of them: labels, figures, slow steps, and the sections of the reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import step_workloads as w
from case_builders import MS, diagnose, infprof, measure
from infprof.diagnosis import Options, analyze_file
from infprof.measures.operations import Prepared
from infprof.readers import read
from infprof.reports import render
from infprof.reports.json_report import schema
from infprof.reports.terminal import TerminalOptions
from infprof.results import Diagnosis
from infprof.simulator import parse_spec, simulate, write_nsys_sqlite
from infprof.simulator.answer import answer
from infprof.simulator.builder import TraceBuilder
from infprof.steps.finding import find_steps
from infprof.steps.names import phase_by_word, phase_of, tokens_of
from infprof.steps.phases import PHASES, label


def diagnosed(spec: dict[str, Any], folder: Path, **options: Any) -> Diagnosis:
    path = write_nsys_sqlite(simulate(parse_spec(spec)), folder / "trace.sqlite")
    return analyze_file(path, Options(whatif=False, **options))


def phase(diagnosis: Diagnosis, name: str) -> dict[str, Any]:
    found = [p for p in diagnosis.phases if p["name"] == name]
    assert len(found) == 1, [p["name"] for p in diagnosis.phases]
    return found[0]


@pytest.mark.parametrize(
    ("text", "expected", "tokens"),
    [
        ("execute_context_2(900)_generation_0(0)", "prefill", 900),
        ("execute_context_0(0)_generation_16(16)", "decode", 16),
        ("execute_context_1(512)_generation_7(7)", "mixed", 519),
        ("execute_519_context_1(sq512sk512sqsq1sqsk1)_generation_7(sq7sk9sqsq1sqsk1)", "mixed", 519),
        ("execute_new_1_cached_3", None, None),
        ("step[EXTEND bs=1 toks=2048]", "prefill", 2048),
        ("step[DECODE bs=32]", "decode", 32),
        ("step[MIXED bs=3 toks=70]", "mixed", 70),
        ("step[IDLE bs=0]", None, None),
        ("[Executor] _forward_step 4: 2 ctx reqs, 100 ctx tokens, 3 gen reqs", "mixed", None),
        ("aten::linear", None, None),
    ],
)
def test_engines_name_the_phase_and_the_tokens_of_a_step(text: str, expected: str | None, tokens: int | None) -> None:
    assert phase_of(text) == expected
    assert tokens_of(text) == tokens


def test_a_users_word_names_a_phase_unless_it_names_two() -> None:
    assert phase_by_word("decode_step_3") == "decode"
    assert phase_by_word("Prefill of request 7") == "prefill"
    assert phase_by_word("prefill or decode") is None
    assert phase_by_word("decoder layer") is None


def test_kernels_tell_the_phase_where_no_range_does(tmp_path: Path) -> None:
    """Against what the engine's scheduler put into each step; what cannot be told is other, never the wrong phase."""
    from infprof.simulator.loading import load_spec

    requests = {"count": 40, "prompt": 300, "output": 20, "rate": 120}
    described = {"preset": "3b", "layers": 8, "steps": 80, "requests": requests, "engine": {"step_tokens": 256}}
    (tmp_path / "run.yaml").write_text(json.dumps({"name": "run", "workload": described}))
    played = simulate(load_spec(tmp_path / "run.yaml"))
    trace = read(write_nsys_sqlite(played, tmp_path / "run.sqlite"))
    trace.ranges = None
    prepared = Prepared(trace)
    (steps,) = find_steps(prepared)
    labels = label(prepared, steps)
    truth = [s["kind"] for s in answer(played)["steps"]]
    said = [PHASES[number] for number in labels.phase[steps.is_step]]
    assert len(said) == len(truth) and {"prefill", "decode", "mixed"} <= set(truth)
    assert sum(a == b for a, b in zip(said, truth, strict=True)) >= 0.9 * len(truth)
    assert all(a in (b, "other") for a, b in zip(said, truth, strict=True))
    assert labels.confidence.max() < 0.9, "kernels are no names of steps"


def test_shapes_tell_decode_where_all_phases_run_the_same_attention(tmp_path: Path) -> None:
    """PyTorch's trace of a model in float32: only the rows of its products differ."""
    from infprof.simulator import write_kineto
    from infprof.simulator.loading import load_spec

    requests = {"count": 12, "prompt": 1500, "output": 12, "rate": 40}
    described = {"preset": "3b", "layers": 4, "steps": 30, "dtype": "float32", "requests": requests}
    described["engine"] = {"cuda_graphs": False}
    (tmp_path / "run.yaml").write_text(json.dumps({"name": "run", "workload": described}))
    played = simulate(load_spec(tmp_path / "run.yaml"))
    trace = read(write_kineto(played, tmp_path / "run.json")[0])
    trace.ranges = None
    prepared = Prepared(trace)
    (steps,) = find_steps(prepared)
    labels = label(prepared, steps)
    truth = [s["kind"] for s in answer(played)["steps"]]
    said = [PHASES[number] for number in labels.phase[steps.is_step]]
    assert [a == "decode" for a in said] == [b == "decode" for b in truth]
    by = {labels.evidence[why] for why, kind in zip(labels.why[steps.is_step], truth, strict=True) if kind == "decode"}
    assert len(by) == 1 and "rows of matrix products" in by.pop()
    assert labels.confidence[steps.is_step].max() <= 0.6


def test_a_picture_has_no_prefill(shared_traces: Path) -> None:
    """The attention of an image model is spelt as that of a prompt."""
    prepared = Prepared(read(shared_traces / "kineto" / "mi300x_flux_diffusion.json.gz"))
    for steps in find_steps(prepared):
        assert {PHASES[p] for p in label(prepared, steps).phase[steps.is_step]} == {"other"}


@pytest.mark.parametrize("workload", w.WORKLOADS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("window", ["auto", "full"])
def test_phases_divide_the_window(workload: Any, window: str, tmp_path: Path) -> None:
    diagnosis = diagnosed(workload(), tmp_path, window=window)
    lanes: dict[str, list[dict[str, Any]]] = {}
    for entry in diagnosis.phases:
        assert sum(s["ns"] for s in entry["slices"]) == entry["total_ns"], entry["name"]
        if entry["in_window"]:
            lanes.setdefault(entry["name"].partition(", ")[2], []).append(entry)
    assert lanes
    for entries in lanes.values():
        assert sum(entry["total_ns"] for entry in entries) == diagnosis.window.duration_ns


def test_each_phase_has_its_own_class(tmp_path: Path) -> None:
    """Large prefills keep the GPU busy; decode waits for launches in the same trace."""
    spec = w.prefill_mixed_in()
    spec["costs"] = {"launch": "9us", "between": "1us"}
    diagnosis = diagnosed(spec, tmp_path)
    kinds = {p["name"]: p for p in diagnosis.phases if p["steps"]}
    assert set(kinds) == {"prefill", "decode"}
    assert kinds["decode"]["verdict"]["class"] == "scheduling-bubble"
    assert kinds["prefill"]["verdict"]["class"] == "gpu-busy"
    assert (kinds["prefill"]["count"], kinds["decode"]["count"]) == (6, 48)
    named = {m.scope.id for m in diagnosis.measures if m.scope.kind == "phase" and m.name == "step_p50_ns"}
    assert named == {"prefill", "decode"}


def test_figures_of_a_step_are_counted(tmp_path: Path) -> None:
    """12 layers of 10 kernels, an embedding before them and three kernels behind; one wait each."""
    diagnosis = diagnosed(w.spec([[*w.FEED, *w.forward(w.DECODE_LAYER, 12, ["argmax"]), *w.READ]] * 20), tmp_path)
    steps = diagnosis.steps
    assert steps is not None
    assert (steps["count"], steps["complete_count"]) == (20, 20)
    assert steps["kernels_per_step"] == steps["launches_per_step"] == 124
    assert steps["syncs_per_step"] == 1
    assert steps["p50_ns"] <= steps["p95_ns"] <= steps["p99_ns"] <= steps["max_ns"]
    whole = sum(p["total_ns"] for p in diagnosis.phases if p["steps"])
    assert steps["busy_per_step_ns"] + steps["idle_per_step_ns"] == pytest.approx(whole / 20)


def slow_spec(extra: list[w.Action], pause: str) -> dict[str, Any]:
    """Forty like steps; the 26th holds something else and comes after a pause."""
    usual = [*w.FEED, *w.forward(w.DECODE_LAYER, 12, ["argmax"]), *w.READ]
    spec = w.spec([[*usual[:-2], *extra, *usual[-2:]] if n == 25 else usual for n in range(40)])
    run = spec["processes"][0]["threads"][0]["run"]
    run[2 * 25 - 1] = {"host": pause}
    spec["jitter"] = 0
    return spec


def test_a_pause_before_a_step_is_what_made_it_slow(tmp_path: Path) -> None:
    diagnosis = diagnosed(slow_spec([], "6ms"), tmp_path)
    (found,) = [p for p in diagnosis.phases if p["steps"]]
    slow = found["steps"]["slowest"][0]
    assert slow["name"] == "step 25"
    assert slow["slices"][0]["kind"] == "idle" and slow["slices"][0]["cause"] in ("host-work", "sync")
    assert slow["slices"][0]["delta_ns"] == pytest.approx(6 * MS - 150_000, rel=0.05)
    assert slow["gaps"][0]["end_ns"] - slow["gaps"][0]["start_ns"] > 5.5 * MS
    assert sum(s["delta_ns"] for s in slow["slices"]) == slow["duration_ns"] - slow["median_ns"]


def test_kernels_that_only_one_step_runs_are_named(tmp_path: Path) -> None:
    diagnosis = diagnosed(slow_spec(w.launches(["experts"] * 20), "150us"), tmp_path)
    (found,) = [p for p in diagnosis.phases if p["steps"]]
    slow = found["steps"]["slowest"][0]
    assert slow["slices"][0]["kind"] == "compute"
    first = slow["kernels"][0]
    assert first["name"] == w.KERNELS["experts"] and (first["count"], first["median_count"]) == (20, 0)
    text = render("terminal", diagnosis)
    assert "slowest step of" in text and "(20 more)" in " ".join(text.split())


def test_waiting_for_requests_is_no_part_of_a_step(tmp_path: Path) -> None:
    step = [*w.FEED, *w.forward(w.DECODE_LAYER, 12, ["argmax"]), *w.READ]
    spec = w.spec([step] * 20, between={"block": "epoll_wait", "for": "4ms"})
    diagnosis = diagnosed(spec, tmp_path)
    idle = phase(diagnosis, "idle")
    assert idle["kind"] == "idle" and idle["total_ns"] > 19 * 3.9 * MS
    assert diagnosis.steps is not None and diagnosis.steps["max_ns"] < 2 * MS


def test_start_up_and_warm_up_stand_before_the_window(tmp_path: Path) -> None:
    diagnosis = diagnosed(w.with_start_up(), tmp_path)
    early = phase(diagnosis, "start-up")
    assert early["kind"] == "load" and not early["in_window"] and early["steps"] is None
    assert early["total_ns"] == sum(left.ns for left in diagnosis.window.left_out)


def test_steps_before_the_last_load_are_warm_up(tmp_path: Path) -> None:
    step = [*w.FEED, *w.forward(w.DECODE_LAYER, 12, ["argmax"]), *w.READ]
    run: list[w.Action] = []
    for number in range(43):
        run += [{"range": f"step {number}", "do": step}, {"load_module": "120ms"} if number < 3 else {"host": "150us"}]
    diagnosis = diagnosed(w.base([{"pid": 1, "threads": [{"run": run}]}]), tmp_path)
    assert (phase(diagnosis, "warm-up")["count"], phase(diagnosis, "decode")["count"]) == (3, 40)
    assert not phase(diagnosis, "warm-up")["in_window"]
    assert phase(diagnosis, "start-up")["total_ns"] > 350 * MS


def test_why_no_steps_were_found_is_one_line(tmp_path: Path) -> None:
    run = [{"launch": "gemm", "count": 3000}, {"sync": "device"}]
    diagnosis = diagnosed(w.base([{"pid": 1, "threads": [{"run": run}]}]), tmp_path)
    assert diagnosis.steps is None and diagnosis.phases == []
    (line,) = [p for p in diagnosis.problems if p.code == "no-steps"]
    assert "one operation repeated" in line.message and "--step-range" in line.message


# --- what a user sees ------------------------------------------------------------------------------------------------


def section(text: str, title: str) -> list[str]:
    """The lines of a section of the terminal report."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    rest = lines[start + 1 :]
    return rest[: rest.index("") if "" in rest else len(rest)]


def test_a_trace_of_one_phase_takes_a_sentence(tmp_path: Path) -> None:
    text = render("terminal", diagnosed(w.decode_eager(), tmp_path))
    lines = section(text, "Steps")
    assert len(lines) <= 3 and "30 decode steps" in lines[0] and "p50" in " ".join(lines)
    assert "Phases and steps" not in text


def test_phases_fit_a_narrow_terminal(tmp_path: Path) -> None:
    diagnosis = diagnosed(w.chunked_prefill(), tmp_path)
    for width in (60, 80, 110):
        text = render("terminal", diagnosis, TerminalOptions(width=width))
        lines = section(text, "Phases and steps")
        assert max(map(len, lines)) <= width
        assert [line.split()[0] for line in lines[1:5]] == ["prefill", "decode", "mixed", "all"]


def test_every_report_names_the_phases(tmp_path: Path) -> None:
    diagnosis = diagnosed(w.chunked_prefill(), tmp_path)
    assert "| mixed |" in render("markdown", diagnosis)
    page = render("html", diagnosis)
    assert "Phases and steps" in page and "Slowest steps" in page


def test_stored_and_fresh_reports_are_the_same(tmp_path: Path) -> None:
    from jsonschema import Draft202012Validator

    fresh = diagnosed(w.graphs_by_batch_size(), tmp_path)
    data = json.loads(render("json", fresh))
    Draft202012Validator(schema()).validate(data)
    stored = Diagnosis.from_dict(data)
    for name in ("terminal", "markdown", "json"):
        assert render(name, stored) == render(name, fresh)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    spec = w.continuous_batching()
    assert render("json", diagnosed(spec, tmp_path)) == render("json", diagnosed(spec, tmp_path))


def test_json_of_the_command_line_has_phases(tmp_path: Path) -> None:
    path = write_nsys_sqlite(simulate(parse_spec(w.two_devices())), tmp_path / "trace.sqlite")
    data = json.loads(infprof("analyze", "--json", path).stdout)
    names = {p["name"] for p in data["phases"]}
    assert {"prefill, GPU 0", "decode, GPU 0", "prefill, GPU 1", "decode, GPU 1"} <= names
    assert data["steps"]["count"] == 24
    assert np.isfinite([p["total_ns"] for p in data["phases"]]).all()


# Shares of peak while a step runs: SM issue, tensor pipe, DRAM read.
PREFILL_LEVELS, DECODE_LEVELS = (30, 90, 20), (40, 5, 88)


def served(prefill_ms: int, decode_ms: int, steps: int = 6) -> TraceBuilder:
    """A prefill and a decode step in turn, back to back, each limited by something else."""
    b = TraceBuilder()
    b.gpu()
    at = 1000 * MS
    for _ in range(steps):
        for name, length, levels in (("prefill", prefill_ms, PREFILL_LEVELS), ("decode", decode_ms, DECODE_LEVELS)):
            for part in range(10):
                b.launch(at - 20 * MS + part * 20_000, 5_000, at + part * length * MS // 10, length * MS // 10, "gemm")
            b.nvtx(at - 20 * MS - 1_000, at - 20 * MS + 210_000, name)
            for tick in range(1, 10 * length + 1):
                for metric, level in zip(("SM Issue", "Tensor Active", "DRAM Read Bandwidth"), levels, strict=True):
                    b.gpu_metric(at + tick * MS // 10, 0, f"{metric} [Throughput %]", level)
                b.gpu_metric(at + tick * MS // 10, 0, "DRAM Write Bandwidth [Throughput %]", 0)
            at += length * MS
    return b


def test_the_verdict_says_where_phases_are_limited_by_something_else(tmp_path: Path) -> None:
    d = diagnose(served(30, 30), tmp_path, window="full")
    assert d.verdict.cls == "balanced"
    assert (
        "It differs by phase: prefill (50 %) is compute-bound, decode (50 %) is bandwidth-bound." in d.verdict.sentence
    )
    assert d.verdict.confidence == 0.5
    # Neither pipe alone: the one in prefill, the other in decode.
    assert measure(d, "sm_issue_ratio") == pytest.approx(0.35, abs=0.01)
    assert measure(d, "tensor_active_ratio") == pytest.approx(0.475, abs=0.01)
    assert measure(d, "sm_throughput_ratio") == pytest.approx(0.65, abs=0.01)


def test_a_phase_that_takes_little_time_does_not_shake_the_verdict(tmp_path: Path) -> None:
    d = diagnose(served(90, 10), tmp_path, window="full")
    assert d.verdict.cls == "compute-bound" and "by phase" not in d.verdict.sentence
    assert d.verdict.confidence > 0.5
