"""Every fault that can be simulated: its trace, in both formats, gets the verdict that it was made for.

The truth comes from the simulator's own reckoning and from the catalogue of faults; neither knows the analysis.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infprof.diagnosis import Options, analyze_file
from infprof.ranks import analyze_inputs
from infprof.results import Diagnosis, Verdict
from infprof.simulator import write_kineto, write_nsys_sqlite
from infprof.simulator.workload import SIMULATED_FAULTS
from infprof.workload.faults import FAULTS
from test_nsys_stats import compare_with_nsys_stats
from workload_runs import FAULTY_RUNS, run_of

EXPECTED = {name: fault.expected for name, fault in {**FAULTS, **SIMULATED_FAULTS}.items()}
FULL = Options(window="full")
BUSY = ("none", "small-batch", "long-context", "kv-pressure", "fp32")

each_fault = pytest.mark.parametrize("fault", FAULTY_RUNS)


def sqlite_of(fault: str, folder: Path, counters: bool = False) -> Path:
    return write_nsys_sqlite(run_of(fault, counters)[0], folder / f"{fault}.sqlite")


def kineto_of(fault: str, folder: Path, **options: Any) -> list[Path]:
    return write_kineto(run_of(fault)[0], folder / f"{fault}.json.gz", **options)


def diagnosed(paths: list[Path], options: Options | None = None) -> tuple[Diagnosis, list[Verdict]]:
    """The joint diagnosis, and the verdict of each device."""
    if len(paths) > 1:
        joint = analyze_inputs(paths, options or Options(), jobs=2)
        return joint, [rank.verdict for rank in joint.ranks]
    one = analyze_file(paths[0], options or Options())
    return one, [device.verdict for device in one.devices]


def slices_of(diagnosis: Diagnosis) -> list[dict[str, int]]:
    """Time by kind of each device."""
    found = []
    for device in diagnosis.devices:
        sums: dict[str, int] = {}
        for piece in device.slices:
            sums[piece.kind] = sums.get(piece.kind, 0) + piece.ns
        found.append(sums)
    return found


def test_there_is_a_run_for_every_fault() -> None:
    assert set(FAULTY_RUNS) == set(EXPECTED)


@each_fault
def test_the_truth_is_what_the_catalogue_of_faults_promises(fault: str) -> None:
    verdict = run_of(fault)[1]["devices"][0]["verdict"]
    expected = EXPECTED[fault]
    assert verdict["class"] in expected.classes
    assert not expected.causes or set(verdict["causes"]) <= set(expected.causes)


@each_fault
def test_the_verdict_on_the_nsys_export_is_the_truth(fault: str, tmp_path: Path) -> None:
    diagnosis, verdicts = diagnosed([sqlite_of(fault, tmp_path)])
    check_verdicts(fault, diagnosis, verdicts)


@each_fault
def test_the_verdict_on_the_pytorch_trace_is_the_truth(fault: str, tmp_path: Path) -> None:
    diagnosis, verdicts = diagnosed(kineto_of(fault, tmp_path))
    if fault == "low-demand":
        # PyTorch's profiler records no system calls: that nobody asked for anything cannot be known.
        assert verdicts[0].confidence <= 0.6 and "whether the host worked in them or waited" in verdicts[0].sentence
    else:
        check_verdicts(fault, diagnosis, verdicts)


def check_verdicts(fault: str, diagnosis: Diagnosis, verdicts: list[Verdict]) -> None:
    expected, devices = EXPECTED[fault], run_of(fault)[1]["devices"]
    assert len(verdicts) == len(devices)
    for found, device in zip(verdicts, devices, strict=True):
        wanted = device["verdict"]
        # Without counters only shapes can tell what limits a busy GPU, and graphs have none.
        assert found.cls in {wanted["class"], wanted["without_evidence"]} - {None}
        assert found.cause in wanted["causes"] or not wanted["causes"]
    assert diagnosis.verdict.cls == verdicts[0].cls
    assert not expected.findings or {f.rule for f in diagnosis.findings} & set(expected.findings)


@pytest.mark.parametrize("fault", BUSY)
def test_with_counters_the_limiter_of_a_busy_gpu_is_the_truth(fault: str, tmp_path: Path) -> None:
    verdict = analyze_file(sqlite_of(fault, tmp_path, counters=True)).verdict
    wanted = run_of(fault, counters=True)[1]["devices"][0]["verdict"]
    assert (verdict.cls, verdict.rank) == (wanted["class"], "A")


def test_a_healthy_run_has_no_serious_finding(tmp_path: Path) -> None:
    findings = analyze_file(sqlite_of("none", tmp_path)).findings
    assert {f.severity for f in findings} <= {"info"}


@each_fault
def test_times_are_the_truth_to_the_nanosecond_in_both_formats(fault: str, tmp_path: Path) -> None:
    figures = run_of(fault)[1]["figures"]
    export = analyze_file(sqlite_of(fault, tmp_path), FULL)
    assert export.window is not None and export.window.duration_ns == figures["window_ns"]
    for found, device, wanted in zip(slices_of(export), export.devices, figures["devices"], strict=True):
        assert {f"{kind}_ns": ns for kind, ns in found.items()} == {
            kind: ns for kind, ns in wanted.items() if kind.endswith("_ns") and kind != "kernel_total_ns" and ns
        }
        assert (device.kernels.count, device.kernels.total_ns) == (wanted["kernel_count"], wanted["kernel_total_ns"])
        assert {c.kind: c.bytes for c in device.copies} == wanted["copy_bytes"]
    for path, wanted in zip(kineto_of(fault, tmp_path), figures["devices"], strict=True):
        # A rank's file ends with its own last operation.
        (found,) = slices_of(analyze_file(path, FULL))
        kinds = ("compute", "exposed_communication", "exposed_copy")
        assert {f"{kind}_ns": found.get(kind, 0) for kind in kinds} == {
            f"{kind}_ns": wanted[f"{kind}_ns"] for kind in kinds
        }


@each_fault
def test_idle_time_has_the_causes_of_the_truth(fault: str, tmp_path: Path) -> None:
    result = run_of(fault)[1]
    export = analyze_file(sqlite_of(fault, tmp_path), FULL)
    for device, wanted in zip(export.devices, result["devices"], strict=True):
        found = {piece.cause: piece.ns for piece in device.slices if piece.kind == "idle" and piece.ns}
        most = 0.005 * result["figures"]["window_ns"]
        for cause in {*found, *wanted["idle_ns"]}:
            assert abs(found.get(cause, 0) - wanted["idle_ns"].get(cause, 0)) <= most, cause


@each_fault
def test_nsys_stats_reads_the_export_and_has_the_same_sums(fault: str, tmp_path: Path) -> None:
    compare_with_nsys_stats(sqlite_of(fault, tmp_path), tmp_path)


@each_fault
def test_holistic_trace_analysis_reads_the_pytorch_trace_and_agrees(fault: str, tmp_path: Path) -> None:
    analysis = pytest.importorskip("hta.trace_analysis")
    # It cuts times to microseconds, so it gets a file whose times are whole ones.
    paths = kineto_of(fault, tmp_path, dialect="2.2")
    for path in paths:
        theirs = analysis.TraceAnalysis(trace_files={0: str(path)}, trace_dir="").get_temporal_breakdown(
            visualize=False
        )
        row = theirs.to_dict("records")[0]
        found = slices_of(analyze_file(path, FULL))[0]
        # What it calls non-compute is communication and copies that nothing hides.
        exposed = found.get("exposed_communication", 0) + found.get("exposed_copy", 0)
        assert row["compute_time(us)"] * 1000 == found["compute"]
        assert row["idle_time(us)"] * 1000 == found["idle"]
        assert row["non_compute_time(us)"] * 1000 == exposed
