"""Who was recorded and who was not: processes whose GPU work is missing from the trace, as far as the trace shows it."""

from __future__ import annotations

import numpy as np

from infprof.distinct import distinct_values
from infprof.measures import calls
from infprof.measures.operations import Prepared
from infprof.results import Problem
from infprof.trace import Process

# Fewer launches than these may all have failed or still be on their way when the capture ended.
_ENOUGH_LAUNCHES = 10
_NAMED = 6


def coverage_problems(prepared: Prepared) -> list[Problem]:
    """Forked workers that left no CUDA trace, and processes whose launches have no records on the device."""
    return [p for p in (_silent_workers(prepared), _lost_records(prepared)) if p is not None]


def _silent_workers(prepared: Prepared) -> Problem | None:
    """GPUs without a row, and processes of the same program as the one with rows that made no CUDA call.

    CUPTI does not work in a child that was forked after it was set up and never exec'd: such a worker runs on its GPU
    and leaves nothing. Whether the program meant to use those GPUs the trace cannot know.
    """
    trace, ops = prepared.trace, prepared.operations
    gpus = trace.machine_gpus or 0
    used = len(distinct_values(ops.device)) if len(ops) else 0
    if not used or used >= gpus:
        return None
    with_rows = {int(p) for p in distinct_values(ops.process) if p >= 0}
    if trace.api_calls is not None:
        with_rows |= {int(p) for p in distinct_values(trace.api_calls["process"]) if p >= 0}
    names = {trace.processes[p].name for p in with_rows} - {None}
    others = [*(p for i, p in enumerate(trace.processes) if i not in with_rows), *trace.other_processes]
    # Compilers, shells and the rest of the machine are no workers; an engine has one for each GPU.
    silent = [p for p in others if p.name in names]
    if len(silent) < gpus - used:
        return None
    return Problem(
        "workers-not-recorded",
        f"GPU rows come from {used} of {gpus} GPUs. If the program uses the others, its workers left no CUDA trace "
        f"({_pids(silent)}), as workers that are forked do: set VLLM_WORKER_MULTIPROC_METHOD=spawn (or the engine's own "
        "start method) and record with --trace-fork-before-exec=true. The other GPUs are not called idle.",
        len(silent),
    )


def _lost_records(prepared: Prepared) -> Problem | None:
    """Processes that launched kernels of which none was recorded, beside others whose kernels were."""
    trace, ops = prepared.trace, prepared.operations
    table = trace.api_calls
    if table is None or not len(table):
        return None
    seen = {int(p) for p in distinct_values(ops.process)} if len(ops) else set()
    callers = [int(p) for p in distinct_values(table["process"]) if p >= 0 and int(p) not in seen]
    if not callers:
        return None
    launch = calls.kernel_launchers(trace.strings)[table["name"]] & (table["return_value"] <= 0)
    counts = np.bincount(table["process"][launch & (table["process"] >= 0)], minlength=len(trace.processes))
    lost = [p for p in callers if counts[p] >= _ENOUGH_LAUNCHES]
    if not lost:
        return None
    total = int(counts[lost].sum())
    return Problem(
        "records-not-flushed",
        f"{total} launches have no record on the device, in {_pids([trace.processes[p] for p in lost])}: a process that "
        "is killed, or ends by os._exit, takes the records with it that the profiler has not fetched yet. Keep it alive "
        "until the capture has stopped, or stop the capture first.",
        total,
    )


def _pids(processes: list[Process]) -> str:
    known = sorted(p.pid for p in processes if p.pid is not None)
    shown = ", ".join(map(str, known[:_NAMED]))
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    return f"{'processes' if len(known) > 1 else 'process'} {shown}{more}"
