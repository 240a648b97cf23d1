"""What a diagnosis of a simulated run must say, from what is known of the run itself: the answer beside the question.

Everything is counted event by event, in the plainest way, from what threads and streams did; the classes follow from the
rules in docs/verdicts.md. The analysis of a trace shares none of this code.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from infprof.simulator.counters import levels
from infprof.simulator.engine import Call, GpuOp, SimulatedTrace
from infprof.simulator.truth import truth

KERNEL_GAP_NS = 20_000
# A class wins from this share of the demand on; limiters of a busy GPU are of its peaks.
_LEAST_SHARE = {"communication-bound": 0.10, "pcie-limited": 0.10, "scheduling-bubble": 0.20}
_WINNER_MIN, _BUSY_FROM, _NO_DEMAND = 0.20, 0.80, 0.50
_CLEAR, _AHEAD, _LATENCY = 0.60, 0.15, 0.40
_OS_CAUSES = {
    "no-demand": ("epoll_wait", "poll", "select", "accept"),
    "lock": ("futex", "pthread_cond_wait", "pthread_cond_timedwait", "pthread_mutex_lock"),
}
_WAITING = ("wait", "no-demand", "lock", "io")

Stretch = tuple[int, int, str]


def answer(trace: SimulatedTrace) -> dict[str, Any]:
    """The truth of a run as plain data, times in ns of its nsys export's clock.

    ``figures`` are those of ``truth``; ``devices`` say why each was idle and what its class is, with the causes that a
    trace may name; ``steps`` where each rank's steps begin and end, on the host and on the GPU, and what they computed.
    ``gpu-busy`` is the class where a trace lacks what tells the ``limiter``.
    """
    figures = truth(trace)
    threads = _Threads(trace)
    return {
        "name": trace.spec.name,
        "description": trace.spec.description.strip(),
        **trace.spec.expect,
        "figures": figures,
        "devices": [_device(trace, threads, device, figures["window_ns"]) for device in figures["devices"]],
        "steps": _steps(trace),
    }


class _Threads:
    """What each thread did when: calls, waits in the operating system, stops by the profiler; the rest is host work."""

    def __init__(self, trace: SimulatedTrace) -> None:
        self.calls = {(call.process, call.correlation): call for call in trace.calls}
        self.ops: dict[tuple[int, int], GpuOp] = {}
        for op in trace.ops:
            self.ops.setdefault((op.process, op.correlation), op)
        self.lines: dict[tuple[int, int], list[Stretch]] = defaultdict(list)
        for call in trace.calls:
            self.lines[call.process, call.thread] += self._parts(call)
        for stretch in trace.os_calls:
            cause = next((c for c, names in _OS_CAUSES.items() if stretch.name in names), "io")
            self.lines[stretch.process, stretch.thread].append((stretch.start_ns, stretch.end_ns, cause))
        for stretch in trace.overheads:
            self.lines[stretch.process, stretch.thread].append((stretch.start_ns, stretch.end_ns, "profiler"))
        for line in self.lines.values():
            line.sort()

    def _parts(self, call: Call) -> list[Stretch]:
        """A call as stretches. ``wait``: it holds the thread until the GPU is done."""
        if call.sync:
            return [(call.start_ns, call.end_ns, "wait")]
        if call.name.startswith(("cudaMalloc", "cudaFree")):
            return [(call.start_ns, call.end_ns, "allocator")]
        if call.name == "cuModuleLoadData":
            return [(call.start_ns, call.end_ns, "module-load")]
        op = self.ops.get((call.process, call.correlation))
        if call.name.startswith("cudaMemcpy") and op is not None and call.start_ns < op.span[0] < call.end_ns:
            # Once its copy runs, a call that is not through yet waits for it.
            return [(call.start_ns, op.span[0], "launch"), (op.span[0], call.end_ns, "wait")]
        return [(call.start_ns, call.end_ns, "launch")]

    def spent(self, thread: tuple[int, int], start: int, end: int) -> Counter[str]:
        """A thread's time between two moments by what it did, ``host`` where it was in no call."""
        line, by_label = self.lines[thread], Counter[str]()
        at = max(bisect_right(line, (start,)) - 1, 0)
        while at < len(line) and line[at][0] < end:
            inside = min(end, line[at][1]) - max(start, line[at][0])
            if inside > 0:
                by_label[line[at][2]] += inside
            at += 1
        by_label["host"] = end - start - by_label.total()
        return by_label

    def held(self, thread: tuple[int, int], time: int) -> bool:
        """Whether the thread waited for the GPU at that moment."""
        line = self.lines[thread]
        at = bisect_right(line, (time, time + 1)) - 1
        return at >= 0 and line[at][2] == "wait" and line[at][0] <= time < line[at][1]


def _device(trace: SimulatedTrace, threads: _Threads, figures: dict[str, Any], window_ns: int) -> dict[str, Any]:
    ops = sorted((op for op in trace.ops if op.device == figures["id"]), key=lambda op: op.span)
    if not ops:
        return {"id": figures["id"], "verdict": None}
    idle = _idle(threads, ops, window_ns, min(op.span[0] for op in trace.ops))
    busy = window_ns - figures["idle_ns"]
    launching = Counter(_thread_of(threads, op) for op in ops).most_common(1)[0][0]
    start = min(op.span[0] for op in trace.ops)
    spent = threads.spent(launching, start, start + window_ns)
    host_ns = window_ns - sum(spent[label] for label in _WAITING)
    communication = _communication(trace, ops)
    limiter = _limiter(trace, ops)
    return {
        "id": figures["id"],
        "idle_ns": dict(sorted(idle.items())),
        "host_ns": host_ns,
        "busy_ns": busy,
        "communication": communication,
        "limiter": limiter,
        "verdict": _verdict(figures, idle, host_ns >= busy, communication, limiter, window_ns),
    }


def _thread_of(threads: _Threads, op: GpuOp) -> tuple[int, int]:
    call = threads.calls[op.process, op.correlation]
    return call.process, call.thread


def _idle(threads: _Threads, ops: list[GpuOp], window_ns: int, start: int) -> Counter[str]:
    """Idle time by cause: a gap is cut where the call that launched what ends it is through."""
    idle, free_at = Counter[str](), start
    for op in ops:
        first, last = op.span
        if first > free_at:
            call = threads.calls[op.process, op.correlation]
            thread = (call.process, call.thread)
            cut = min(max(call.end_ns, free_at), first)
            spent = threads.spent(thread, free_at, cut)
            host = "sync" if threads.held(thread, free_at) else "host-work"
            for label, ns in spent.items():
                idle[{"host": host, "wait": "sync"}.get(label, label)] += ns
            idle["kernel-gap"] += min(first - cut, KERNEL_GAP_NS)
            idle["dependency"] += max(first - cut - KERNEL_GAP_NS, 0)
        free_at = max(free_at, last)
    # Other devices were still at work.
    idle["unknown"] += start + window_ns - free_at
    return +idle


def _communication(trace: SimulatedTrace, ops: list[GpuOp]) -> dict[str, Any] | None:
    """Of a device's collectives: time, and how much of it waits for the last rank to arrive; None without any."""
    mine = [op for op in ops if op.kind == "comm"]
    if not mine:
        return None
    arrived: dict[int, int] = {}
    for op in trace.ops:
        if op.collective is not None:
            arrived[op.collective] = max(arrived.get(op.collective, 0), op.span[0])
    total = sum(op.span[1] - op.span[0] for op in mine)
    waited = sum(arrived[op.collective] - op.span[0] for op in mine if op.collective is not None)
    return {"count": len(mine), "total_ns": total, "waited_ns": waited, "bytes": sum(op.bytes for op in mine)}


def _limiter(trace: SimulatedTrace, ops: list[GpuOp]) -> dict[str, Any]:
    """What limits the kernels, by the levels that counters would show while they run, as shares of the peaks."""
    compute, dram, total = 0.0, 0.0, 0
    for op in ops:
        if op.kind not in ("kernel", "graph"):
            continue
        ns = op.span[1] - op.span[0]
        level = levels(op, trace.spec.devices[op.device], ns)
        compute += ns * max(level.get("sm_issue", 0.0), level.get("tensor", 0.0)) / 100
        dram += ns * (level.get("dram_read", 0.0) + level.get("dram_write", 0.0)) / 100
        total += ns
    if not total:
        return {"class": "gpu-busy", "compute_ratio": None, "dram_ratio": None}
    c, m = compute / total, dram / total
    if max(c, m) >= _CLEAR and abs(c - m) >= _AHEAD:
        cls = "compute-bound" if c > m else "bandwidth-bound"
    else:
        cls = "latency-bound" if max(c, m) < _LATENCY else "balanced"
    return {"class": cls, "compute_ratio": round(c, 4), "dram_ratio": round(m, 4)}


def _verdict(
    figures: dict[str, Any],
    idle: Counter[str],
    host_is_longer: bool,
    communication: dict[str, Any] | None,
    limiter: dict[str, Any],
    window_ns: int,
) -> dict[str, Any]:
    """Class, causes that a trace may name, and shares of the demand; ``without_evidence`` is the class of a trace that
    cannot tell the limiter."""
    demand = max(window_ns - idle["no-demand"] - idle["profiler"], 1)
    causes = _causes(idle, host_is_longer)
    parts = {
        "communication-bound": figures["exposed_communication_ns"],
        "pcie-limited": figures["exposed_copy_ns"] if {"h2d", "d2h"} & set(figures["copy_bytes"]) else 0,
        "scheduling-bubble": sum(causes.values()),
    }
    shares = {cls: ns / demand for cls, ns in parts.items()}
    if idle["no-demand"] >= _NO_DEMAND * window_ns:
        return _as_verdict("no-demand", [], shares, None)
    passing = [cls for cls, share in shares.items() if share >= _LEAST_SHARE[cls]]
    winner = max(passing, key=lambda cls: shares[cls], default=None)
    if winner is None or (shares[winner] < _WINNER_MIN and figures["compute_ns"] > _BUSY_FROM * demand):
        return _as_verdict(limiter["class"], [], shares, "gpu-busy")
    if winner == "communication-bound":
        assert communication is not None
        late = 2 * communication["waited_ns"] >= communication["total_ns"]
        return _as_verdict(winner, ["straggler"] if late else ["volume", "unknown"], shares, None)
    if winner == "pcie-limited":
        pageable = 2 * figures["pageable_bytes"] >= sum(figures["copy_bytes"].get(kind, 0) for kind in ("h2d", "d2h"))
        return _as_verdict(winner, ["pageable" if pageable else "volume"], shares, None)
    return _as_verdict(winner, [max(causes, key=lambda c: causes[c])], shares, None)


def _as_verdict(cls: str, causes: list[str], shares: dict[str, float], without: str | None) -> dict[str, Any]:
    rounded = {name: round(share, 4) for name, share in shares.items()}
    return {"class": cls, "causes": causes, "without_evidence": without, "shares": rounded}


def _causes(idle: Counter[str], host_is_longer: bool) -> dict[str, int]:
    """Recoverable idle time by cause. Where the host's part of the loop is the longer one, not waiting gains nothing: what
    comes after a wait is host work then."""
    causes = {cause: ns for cause, ns in idle.items() if cause not in ("kernel-gap", "no-demand", "profiler")}
    if host_is_longer and "sync" in causes:
        causes["host-work"] = causes.get("host-work", 0) + causes.pop("sync")
    return causes


def _steps(trace: SimulatedTrace) -> list[dict[str, Any]]:
    """Every step of every rank, by rank and start. What it launched gives its time on the GPU."""
    launched: dict[tuple[int, int], list[GpuOp]] = defaultdict(list)
    for op in trace.ops:
        launched[op.process, op.correlation].append(op)
    calls: dict[tuple[int, int], list[Call]] = defaultdict(list)
    for call in trace.calls:
        calls[call.process, call.thread].append(call)
    rows = []
    for run in sorted(trace.steps, key=lambda run: (run.process, run.start_ns)):
        mine = calls[run.process, run.thread]
        first = bisect_right(mine, run.start_ns - 1, key=lambda call: call.start_ns)
        inside: Iterable[Call] = mine[first : bisect_right(mine, run.end_ns - 1, key=lambda call: call.start_ns)]
        ops = [op for call in inside for op in launched[call.process, call.correlation]]
        rows.append(
            {
                "rank": run.process,
                "device": trace.spec.processes[run.process].device,
                **asdict(run.step),
                "start_ns": run.start_ns,
                "end_ns": run.end_ns,
                "gpu_start_ns": min((op.span[0] for op in ops), default=None),
                "gpu_end_ns": max((op.span[1] for op in ops), default=None),
                "kernel_count": sum(op.kind in ("kernel", "comm") for op in ops),
            }
        )
    return rows
