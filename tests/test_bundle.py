"""A bundle with a trace and telemetry: both on one clock, and each says what the other cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from case_builders import MS, S, idle, measure, rules
from infprof.bundle import Bundle, Manifest
from infprof.diagnosis import Options, analyze_file
from infprof.errors import InfprofError
from infprof.probes.gpu_signals import SIGNALS as GPU_SIGNALS
from infprof.probes.host import SIGNALS as HOST_SIGNALS
from infprof.probes.recorder import Clock, Recorder, TelemetryFile
from infprof.probes.serving import SIGNALS as ENGINE_SIGNALS
from infprof.results import Diagnosis
from infprof.simulator.builder import TraceBuilder

EPOCH = 1_700_000_000 * S
BURST_NS, PERIOD_NS, BURSTS = 1 * S, 10 * S, 6
SECONDS = BURSTS * PERIOD_NS // S
# Whole seconds of a pause between two scrapes that both lie in it.
SILENT_NS = 7 * S
UUID = "GPU-11111111-2222-3333-4444-555555555555"


def bursts(gap: bool = True) -> TraceBuilder:
    """A server that works for a second in every ten (or all the time), launched by one thread that uses no CUDA else."""
    trace = TraceBuilder()
    trace.gpu(uuid=UUID)
    thread = trace.thread()
    period = PERIOD_NS if gap else BURST_NS
    for burst in range(BURSTS):
        for step in range(100):
            start = burst * period + step * 10 * MS
            trace.launch(start, 10_000, start + 20_000, 10 * MS - 20_000, thread=thread)
    trace.session(0, BURSTS * period, utc_epoch_ns=EPOCH)
    return trace


class Run:
    """A bundle made by hand: ``trace`` and what ``probe`` records, second by second."""

    def __init__(self, folder: Path) -> None:
        manifest = Manifest(["serve"], EPOCH)
        self.bundle = Bundle.create(folder, manifest)
        self.file = TelemetryFile(self.bundle.telemetry, Clock())
        self.engine = self.file.recorder("serving", ENGINE_SIGNALS)
        self.gpu = self.file.recorder("nvml", GPU_SIGNALS)

    def gauge(self, out: Recorder, signal: str, value: Callable[[float], float], scope: str, until_s: int) -> Run:
        for second in range(until_s + 1):
            out.sample(signal, value(second), scope, time_ns=EPOCH + second * S)
        return self

    def finish(self, trace: TraceBuilder | None, seconds: int) -> Path:
        manifest = self.bundle.manifest
        if trace is not None:
            trace.write(self.bundle.folder / "trace" / "capture.sqlite")
            manifest.files["traces"] = ["trace/capture.sqlite"]
        self.file.close()
        end = EPOCH + seconds * S
        manifest.phases = [{"name": "capture", "start_unix_ns": EPOCH, "end_unix_ns": end, "ended_by": "time"}]
        manifest.state, manifest.ended_unix_ns = "complete", end
        self.bundle.save()
        return self.bundle.folder


def working(second: float) -> bool:
    """Whether the server of ``bursts`` works in the second, as a scrape at its start may see it."""
    return second % 10 in (0, 1)


def diagnose(folder: Path) -> Diagnosis:
    return analyze_file(folder, Options(window="full"))


def served(folder: Path, waiting: Callable[[float], float], running: Callable[[float], float]) -> Diagnosis:
    run = Run(folder)
    run.gauge(run.engine, "running_requests", running, "engine/0", SECONDS)
    run.gauge(run.engine, "waiting_requests", waiting, "engine/0", SECONDS)
    return diagnose(run.finish(bursts(), SECONDS))


def test_without_telemetry_the_pauses_are_the_hosts(tmp_path: Path) -> None:
    found = analyze_file(bursts().write(tmp_path / "trace.sqlite"), Options(window="full"))
    assert (found.verdict.cls, found.verdict.cause) == ("scheduling-bubble", "host-work")
    assert {n.needs for n in found.not_evaluated if n.rule == "queueing"} == {
        "telemetry of the same run: record with `infprof run`"
    }


def test_idle_while_the_engine_has_no_request_is_no_demand(tmp_path: Path) -> None:
    found = served(tmp_path / "b", lambda s: 0, lambda s: 4 if working(s) else 0)
    assert found.verdict.cls == "no-demand"
    assert idle(found, "no-demand") == (BURSTS - 1) * SILENT_NS
    assert idle(found, "host-work") == pytest.approx((BURSTS - 1) * 2 * S, rel=0.01)


def test_idle_while_requests_wait_is_not_no_demand(tmp_path: Path) -> None:
    found = served(tmp_path / "b", lambda s: 0 if working(s) else 3, lambda s: 4 if working(s) else 0)
    assert (found.verdict.cls, found.verdict.cause) == ("scheduling-bubble", "host-work")
    assert measure(found, "idle_while_waiting_ns") == pytest.approx((BURSTS - 1) * 8 * S, rel=0.01)
    assert measure(found, "idle_while_waiting_ratio") == pytest.approx(1.0, rel=0.01)
    assert "idle-while-waiting" in rules(found)


def test_an_engine_that_works_all_the_time_changes_nothing(tmp_path: Path) -> None:
    found = served(tmp_path / "b", lambda s: 0, lambda s: 4)
    assert idle(found, "no-demand") == 0 and "idle-while-waiting" not in rules(found)


def test_clocks_that_cannot_be_matched_are_said(tmp_path: Path) -> None:
    trace = bursts()
    trace.drop_column("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
    run = Run(tmp_path / "b")
    run.gauge(run.engine, "running_requests", lambda s: 0, "engine/0", SECONDS)
    found = diagnose(run.finish(trace, SECONDS))
    assert "clocks-not-aligned" in {p.code for p in found.problems}
    assert idle(found, "no-demand") == 0


@pytest.mark.parametrize(("step_ms", "said"), [(5, False), (-900, True)])
def test_a_clock_that_was_set_meanwhile_is_said(tmp_path: Path, step_ms: int, said: bool) -> None:
    run = Run(tmp_path / "b")
    run.bundle.manifest.clocks = {"wall_clock_step_ns": step_ms * MS}
    found = diagnose(run.finish(bursts(), SECONDS))
    assert ("clock-step" in {p.code for p in found.problems}) == said


# --- the GPU's own figures --------------------------------------------------------------------------------------------


def watched(folder: Path, uuid: str = UUID, trace: bool = True, owner: str = "", **gauges: float) -> Diagnosis:
    """``owner``: whose memory is on the GPU, ``target`` or ``other``; empty = nobody can tell."""
    run = Run(folder)
    scope = f"gpu/{uuid}"
    facts: dict[str, Any] = {"gpu_uuid": uuid, "gpu_name": "NVIDIA H100 80GB HBM3", "gpu_of_target": "yes"}
    facts |= {"gpu_sm_clock_max_mhz": 1980, "gpu_index": 0}
    for name, value in facts.items():
        run.gpu.fact(name, value, scope)
    for signal, value in {"memory_used_bytes": 1e9, "utilization_ratio": 1.0, **gauges}.items():
        run.gauge(run.gpu, signal, lambda s, v=value: v, scope, BURSTS)  # type: ignore[misc]
    for second in range(BURSTS + 1):
        at = EPOCH + second * S
        if owner == "target":
            run.gpu.sample("process_memory_bytes", 1e9, scope, {"pid": "41"}, time_ns=at)
        elif owner == "other":
            run.gpu.sample("other_process_memory_bytes", 1e9, scope, time_ns=at)
    return diagnose(run.finish(bursts(gap=False) if trace else None, BURSTS))


POWER_CAP = 0x4


def test_a_busy_gpu_with_clocks_held_down_is_throttled(tmp_path: Path) -> None:
    found = watched(tmp_path / "b", sm_clock_mhz=1100, clock_event_reasons=POWER_CAP)
    assert (found.verdict.cls, found.verdict.cause, found.verdict.rule) == ("throttled", "power", "throttled-power")
    assert "1100 of 1980 MHz" in found.verdict.sentence


def test_the_power_cap_at_full_clock_is_no_throttling(tmp_path: Path) -> None:
    found = watched(tmp_path / "b", sm_clock_mhz=1930, clock_event_reasons=POWER_CAP)
    assert found.verdict.cls == "gpu-busy"


def test_another_machines_gpu_is_not_joined(tmp_path: Path) -> None:
    other = UUID.replace("1", "9")
    found = watched(tmp_path / "b", other, sm_clock_mhz=1100, clock_event_reasons=POWER_CAP)
    assert found.verdict.cls == "gpu-busy"
    assert measure(found, "sm_clock_lost_ratio") is None


GPM = {"gpm_graphics_active_ratio": 0.99, "gpm_fp32_active_ratio": 0.05, "gpm_fp16_active_ratio": 0.02}


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(
    ("tensor", "dram", "cls"),
    [(0.85, 0.3, "compute-bound"), (0.3, 0.9, "bandwidth-bound"), (0.1, 0.2, "latency-bound"), (0.6, 0.6, "balanced")],
)
def test_gpm_tells_what_limits_a_busy_gpu(tmp_path: Path, trace: bool, tensor: float, dram: float, cls: str) -> None:
    found = watched(
        tmp_path / "b", trace=trace, owner="target", **GPM, gpm_tensor_active_ratio=tensor, gpm_dram_ratio=dram,
        sm_clock_mhz=1900,
    )  # fmt: skip
    assert (found.verdict.cls, found.verdict.rank) == (cls, "A")
    assert "GPM (tensor" in found.verdict.sentence


@pytest.mark.parametrize("owner", ["other", ""])
def test_counters_of_a_gpu_that_others_may_use_prove_nothing_of_the_program(tmp_path: Path, owner: str) -> None:
    """Another tenant keeps the GPU busy, or in a container nobody can tell who does."""
    found = watched(
        tmp_path / "b", trace=False, owner=owner, **GPM, gpm_tensor_active_ratio=0.9, gpm_dram_ratio=0.2, sm_clock_mhz=900,
        clock_event_reasons=POWER_CAP,
    )  # fmt: skip
    assert (found.verdict.cls, found.verdict.code) == ("unusable", "no-gpu-work")


def test_utilisation_alone_never_names_a_limiter(tmp_path: Path) -> None:
    found = watched(tmp_path / "b", trace=False, sm_clock_mhz=1900)
    assert (found.verdict.cls, found.verdict.code) == ("unusable", "no-gpu-work")
    assert found.has_telemetry


# --- runs without a GPU, without a timeline -----------------------------------------------------------------------------


def alone(folder: Path, trace: TraceBuilder | None) -> Diagnosis:
    """A program whose busiest thread waits for a CPU half of the time: something to find without any timeline."""
    run = Run(folder)
    host = run.file.recorder("host", HOST_SIGNALS)
    host.fact("cpu_count", 2)
    for second in range(31):
        for signal, per_s in (
            ("thread_run_ns", S // 2),
            ("thread_wait_ns", S // 2),
            ("thread_user_ns", S // 2),
            ("thread_system_ns", 0),
            ("thread_voluntary_switches", 1),
            ("thread_involuntary_switches", 900),
        ):
            host.sample(signal, per_s * second, "thread/10/10", time_ns=EPOCH + second * S)
    return diagnose(run.finish(trace, 30))


@pytest.mark.parametrize("name", ["terminal", "markdown", "html"])
def test_what_is_known_comes_first_where_there_is_no_timeline(tmp_path: Path, name: str) -> None:
    from infprof.reports import render

    found = alone(tmp_path / "b", None)
    text = render(name, found)
    assert 0 < text.index("Telemetry") < text.index(found.findings[0].title)
    assert "of the same run" not in text and "in the same run" not in text
    assert "no-ranges" not in {p.code for p in found.problems}


def test_findings_that_claim_no_time_come_severest_first(tmp_path: Path) -> None:
    found = alone(tmp_path / "b", None).findings
    assert [f.rule for f in found if f.cost.value is None][:2] == ["run-queue", "context-switches"]
    assert [f.severity for f in found][:2] == ["warning", "info"]


def test_a_machine_without_a_gpu_is_not_told_to_record_again(tmp_path: Path) -> None:
    trace = TraceBuilder()
    thread = trace.thread()
    trace.nvtx(0, 30 * S, "work", thread=thread)
    trace.session(0, 30 * S, utc_epoch_ns=EPOCH)
    verdict = alone(tmp_path / "b", trace).verdict
    assert (verdict.cls, verdict.code, verdict.remedies) == ("unusable", "no-gpu-work", [])
    assert "neither the recorder nor a probe saw one" in verdict.sentence
    assert "nsys profile" not in (verdict.why_not or "")


def test_a_gpu_that_was_not_used_is_told_apart_from_none(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.gpu(uuid=UUID)
    trace.nvtx(0, 30 * S, "work", thread=trace.thread())
    trace.session(0, 30 * S, utc_epoch_ns=EPOCH)
    verdict = alone(tmp_path / "b", trace).verdict
    assert verdict.code == "no-gpu-work" and verdict.remedies
    assert "saw one" not in verdict.sentence


# --- bundles that are not whole ---------------------------------------------------------------------------------------


def test_notes_of_the_run_are_problems_of_the_diagnosis(tmp_path: Path) -> None:
    run = Run(tmp_path / "b")
    run.bundle.manifest.note("disk-full", "The disk was full.", "Make room.")
    run.bundle.manifest.probes = [{"name": "nvml", "state": "failed", "reason": "it broke"}]
    found = diagnose(run.finish(bursts(), SECONDS))
    said = {p.code: p.message for p in found.problems}
    assert said["disk-full"] == "The disk was full. Make room."
    assert said["probe-failed"] == "The probe nvml failed: it broke."


def test_of_several_captures_the_last_is_shown_and_the_others_are_named(tmp_path: Path) -> None:
    run = Run(tmp_path / "b")
    bursts().write(run.bundle.folder / "trace" / "capture.1.sqlite")
    folder = run.finish(bursts(gap=False), 6)
    run.bundle.manifest.files["traces"] = ["trace/capture.1.sqlite", "trace/capture.sqlite"]
    run.bundle.save()
    found = diagnose(folder)
    assert found.verdict.cls == "gpu-busy"
    said = next(p.message for p in found.problems if p.code == "several-captures")
    assert "`infprof analyze b/trace/capture.1.sqlite`" in said
    assert diagnose(folder / "trace" / "capture.1.sqlite").verdict.cls == "scheduling-bubble"


def test_damaged_telemetry_costs_only_the_telemetry(tmp_path: Path) -> None:
    folder = Run(tmp_path / "b").finish(bursts(), SECONDS)
    (folder / "telemetry.sqlite").write_bytes(b"not a database, and long enough to be looked at" * 100)
    found = diagnose(folder)
    assert found.verdict.cls == "scheduling-bubble"
    assert "damaged-telemetry" in {p.code for p in found.problems}


def test_a_trace_that_cannot_be_read_costs_only_itself(tmp_path: Path) -> None:
    run = Run(tmp_path / "b")
    folder = run.finish(bursts(), SECONDS)
    (folder / "trace/process-7.trace.json").write_text('{"schemaVersion": 1, "deviceProperties": [')
    run.bundle.manifest.files["traces"] = ["trace/capture.sqlite", "trace/process-7.trace.json"]
    run.bundle.save()
    found = diagnose(folder)
    assert found.verdict.cls == "scheduling-bubble"
    (said,) = [p.message for p in found.problems if p.code == "unreadable-trace"]
    assert said.startswith("process-7.trace.json was left out: ")
    (folder / "trace/capture.sqlite").unlink()
    assert diagnose(folder).verdict.cls == "unusable"
    (folder / "telemetry.sqlite").unlink()
    with pytest.raises(InfprofError, match=r"process-7\.trace\.json"):
        diagnose(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read"),
        ("[]", "not a manifest of infprof"),
        ('{"manifest_version": 99}', "manifest version 99"),
        ('{"manifest_version": 1}', "incomplete"),
    ],
)
def test_a_manifest_that_cannot_be_used(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(InfprofError, match=says):
        analyze_file(tmp_path)


def test_a_bundle_with_nothing_in_it(tmp_path: Path) -> None:
    folder = Run(tmp_path / "b").finish(None, 1)
    (folder / "telemetry.sqlite").unlink()
    with pytest.raises(InfprofError, match="neither a trace nor telemetry"):
        analyze_file(folder)


def test_the_manifest_keeps_its_version_and_order(tmp_path: Path) -> None:
    folder = Run(tmp_path / "b").finish(None, 1)
    data = json.loads((folder / "manifest.json").read_text())
    assert data["manifest_version"] == 1 and data["command"] == ["serve"] and data["state"] == "complete"


# --- reports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["terminal", "markdown", "html"])
def test_every_report_shows_the_main_figures_of_the_probes(tmp_path: Path, name: str) -> None:
    from infprof.reports import render

    run = Run(tmp_path / "b")
    run.gauge(run.engine, "running_requests", lambda s: 4, "engine/0", SECONDS)
    run.gauge(run.engine, "waiting_requests", lambda s: 2, "engine/0", SECONDS)
    found = diagnose(run.finish(bursts(), SECONDS))
    text = " ".join(render(name, found).split())
    assert "Telemetry" in text and "running requests 4, at most 4" in text and "waiting 2, at most 2" in text
    without = analyze_file(bursts().write(tmp_path / "trace.sqlite"), Options(window="full"))
    assert "Telemetry" not in render(name, without)


@pytest.mark.parametrize("name", ["terminal", "markdown", "html"])
def test_a_run_without_a_timeline_does_not_call_its_telemetry_unusable(tmp_path: Path, name: str) -> None:
    from infprof.reports import render

    run = Run(tmp_path / "b")
    run.gauge(run.engine, "running_requests", lambda s: 4, "engine/0", SECONDS)
    # More requests wait than run: something to find.
    run.gauge(run.engine, "waiting_requests", lambda s: 40, "engine/0", SECONDS)
    found = diagnose(run.finish(None, SECONDS))
    assert "queueing" in rules(found)
    text = render(name, found)
    assert "No GPU timeline: telemetry only" in text and "Unusable" not in text
    assert "telemetry (rank C)" in text and "the timeline (rank C)" not in text


def test_hours_without_an_answer_are_not_hours_without_requests(tmp_path: Path) -> None:
    """The engine answers for 60 % of the capture and idles for 40 %: too little to say so of the capture."""

    def verdict(name: str, answers_until_s: int, idle_until_s: int) -> str:
        run = Run(tmp_path / name)
        busy = lambda s: 0.0 if s <= idle_until_s else 4.0  # noqa: E731
        run.gauge(run.engine, "running_requests", busy, "engine/0", answers_until_s)
        run.gauge(run.engine, "waiting_requests", lambda s: 0, "engine/0", answers_until_s)
        return diagnose(run.finish(None, 100)).verdict.cls

    assert verdict("always", 100, 100) == "no-demand"
    assert verdict("mostly", 60, 60) == "no-demand"
    assert verdict("half-known", 60, 40) == "unusable"
    assert verdict("hardly", 10, 10) == "unusable"
