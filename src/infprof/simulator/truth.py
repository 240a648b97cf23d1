"""The exact figures of a simulated run, counted in the plainest way there is: the yardstick for the real analysis."""

from __future__ import annotations

from collections import Counter
from typing import Any

from infprof.simulator.engine import GpuOp, SimulatedTrace


def truth(trace: SimulatedTrace) -> dict[str, Any]:
    """Window (first start to last end over all devices) and, per device, how its time divides, in ns.

    ``compute``: a non-communication kernel or graph runs; ``exposed_communication``: a communication kernel and no
    compute; ``exposed_copy``: a copy or memset and neither of the two; ``idle``: nothing. They add up to the window.
    """
    spans = [op.span for op in trace.ops]
    if not spans:
        return {"window_ns": 0, "devices": []}
    start, end = min(s for s, _ in spans), max(e for _, e in spans)
    return {
        "window_ns": end - start,
        "devices": [
            _device(number, device.name, [op for op in trace.ops if op.device == number], start, end)
            for number, device in enumerate(trace.spec.devices)
        ],
    }


def _device(number: int, name: str, ops: list[GpuOp], start: int, end: int) -> dict[str, Any]:
    copies = [op for op in ops if op.kind == "copy"]
    kernels = [op for op in ops if op.kind in ("kernel", "comm")]
    bytes_by_kind: Counter[str] = Counter()
    for op in copies:
        bytes_by_kind[op.copy_kind] += op.bytes
    return {
        "id": number,
        "name": name,
        **_slices(ops, start, end),
        "kernel_count": len(kernels),
        "kernel_total_ns": sum(op.span[1] - op.span[0] for op in kernels),
        "graph_launch_rows": sum(op.kind == "graph" for op in ops),
        "copy_bytes": dict(sorted(bytes_by_kind.items())),
        "pageable_bytes": sum(op.bytes for op in copies if op.memory == "pageable"),
    }


def _slices(ops: list[GpuOp], start: int, end: int) -> dict[str, int]:
    """Walk from one start or end to the next, knowing what runs in between."""
    edges = sorted([(op.span[0], 1, op.kind) for op in ops] + [(op.span[1], -1, op.kind) for op in ops])
    slices = {"compute_ns": 0, "exposed_communication_ns": 0, "exposed_copy_ns": 0, "idle_ns": 0}
    running: Counter[str] = Counter()
    previous = start
    for time, change, kind in [*edges, (end, 0, "kernel")]:
        if running["kernel"] or running["graph"]:
            slices["compute_ns"] += time - previous
        elif running["comm"]:
            slices["exposed_communication_ns"] += time - previous
        elif running["copy"] or running["memset"]:
            slices["exposed_copy_ns"] += time - previous
        else:
            slices["idle_ns"] += time - previous
        running[kind] += change
        previous = time
    return slices
