"""Collector cases as traces show them: workers that were not recorded, and records that were never fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from case_builders import MS, US, diagnose
from infprof.results import Diagnosis
from infprof.simulator.builder import Process, TraceBuilder

STEPS = 200


def work(trace: TraceBuilder, process: Process, recorded: bool = True) -> None:
    """A process that launches a kernel per millisecond; ``recorded``: what ran on the device is there."""
    thread = process.thread()
    for step in range(STEPS):
        at = step * MS
        if recorded:
            trace.launch(at, 10 * US, at + 20 * US, 900 * US, thread=thread)
        else:
            correlation = trace.correlation(process)
            trace.api(at, at + 10 * US, "cudaLaunchKernel_v7000", thread=thread, correlation=correlation)


def messages(diagnosis: Diagnosis) -> dict[str, str]:
    return {p.code: p.message for p in diagnosis.problems}


def test_forked_workers_without_a_trace_are_named_and_not_called_idle(tmp_path: Path) -> None:
    """C-01: four GPUs, rows from one worker; the launcher and the other three left nothing."""
    trace = TraceBuilder()
    for index in range(4):
        trace.gpu(index=index)
    for pid in (100, 201, 202, 203):
        trace.process(pid)
    work(trace, trace.process(200))
    found = diagnose(trace, tmp_path)
    said = messages(found)["workers-not-recorded"]
    assert said.startswith("GPU rows come from 1 of 4 GPUs.")
    assert "201, 202, 203" in said and "VLLM_WORKER_MULTIPROC_METHOD=spawn" in said
    assert [d.id for d in found.devices] == [0]
    assert found.verdict.cls == "gpu-busy"


@pytest.mark.parametrize("others", [[], [(300, "ptxas"), (301, "sh"), (302, "nvidia-smi")], [(300, "python")]])
def test_one_gpu_used_on_a_machine_with_more_is_no_problem(tmp_path: Path, others: list[tuple[int, str]]) -> None:
    trace = TraceBuilder()
    for index in range(4):
        trace.gpu(index=index)
    for pid, name in others:
        trace.process(pid, name)
    work(trace, trace.process(200))
    assert "workers-not-recorded" not in messages(diagnose(trace, tmp_path))


def test_launches_of_a_killed_process_are_not_called_cpu_work(tmp_path: Path) -> None:
    """C-09: one worker of two ended before the profiler had its records."""
    trace = TraceBuilder()
    trace.gpu()
    work(trace, trace.process(200))
    work(trace, trace.process(201), recorded=False)
    said = messages(diagnose(trace, tmp_path))["records-not-flushed"]
    assert said.startswith(f"{STEPS} launches have no record on the device, in process 201")
    assert "stop the capture first" in said


def test_launches_without_any_record_are_no_cpu_workload(tmp_path: Path) -> None:
    """C-09, and there was no other process."""
    trace = TraceBuilder()
    trace.gpu()
    work(trace, trace.process(200), recorded=False)
    found = diagnose(trace, tmp_path)
    assert (found.verdict.cls, found.verdict.code) == ("unusable", "gpu-not-recorded")
    assert "os._exit" in (found.verdict.why_not or "")


def test_a_process_whose_records_are_there_is_no_problem(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.gpu()
    work(trace, trace.process(200))
    work(trace, trace.process(201))
    assert not {"records-not-flushed", "workers-not-recorded"} & messages(diagnose(trace, tmp_path)).keys()
