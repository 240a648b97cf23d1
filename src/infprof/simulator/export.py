"""Writes a simulated run as an nsys SQLite export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infprof.simulator.builder import Thread, TraceBuilder
from infprof.simulator.engine import GpuOp, SimulatedTrace

_NCCL_DOMAIN = 1


def write_nsys_sqlite(trace: SimulatedTrace, path: str | Path) -> Path:
    """Write ``trace`` to ``path`` as an export of the spec's nsys version; the same trace gives the same bytes."""
    return _Export(trace).build().write(path)


class _Export:
    def __init__(self, trace: SimulatedTrace) -> None:
        self.trace = trace
        self.builder = TraceBuilder(trace.spec.nsys)
        self.processes = [self.builder.process(process.pid, process.name) for process in trace.spec.processes]

    def build(self) -> TraceBuilder:
        spec, out = self.trace.spec, self.builder
        for device in spec.devices:
            out.gpu(
                device.name,
                sm_count=device.sm_count,
                memory_bytes=device.memory_bytes,
                bandwidth=round(device.bandwidth),
                clock_hz=device.clock_hz,
                compute=device.compute,
                chip=device.chip,
            )
        for process, process_spec in zip(self.processes, spec.processes, strict=True):
            out.cuda_device(process_spec.device, process_spec.device, process)
        self._metadata()
        for op in sorted(self.trace.ops, key=lambda op: op.span):
            self._op(op)
        self._host()
        for sample in self.trace.samples:
            out.gpu_metric(sample.time_ns, sample.device, sample.metric, sample.value)
        return out

    def _metadata(self) -> None:
        trace, out = self.trace, self.builder
        kinds = ["NvtxEvents", "Cuda"] + ["OSRuntime"] * bool(trace.os_calls) + ["GpuMetrics"] * bool(trace.samples)
        for kind in kinds:
            out.metadata("CAPTURE_EVENT_TYPE", kind)
        graphs = any(op.kind == "graph" for op in trace.ops)
        out.metadata("CUDA_GRAPH_TRACE_OPTIONS:MODE", "Graph" if graphs else "Node")
        out.metadata("PROCESS_0:COMMAND", "infprof-simulator")

    def _op(self, op: GpuOp) -> None:
        start, end = op.span
        where: dict[str, Any] = {
            "device": op.device,
            "stream": op.stream,
            "process": self.processes[op.process],
            "correlation": op.correlation,
        }
        if op.kind == "copy":
            from_host, to_host = op.copy_kind == "h2d", op.copy_kind == "d2h"
            src, dst = op.memory if from_host else "device", op.memory if to_host else "device"
            self.builder.memcpy(start, end, kind=op.copy_kind, bytes=op.bytes, src=src, dst=dst, **where)
        elif op.kind == "memset":
            self.builder.memset(start, end, bytes=op.bytes, **where)
        elif op.kind == "graph":
            self.builder.graph_trace(start, end, graph=op.graph_id or 1, **where)
        else:
            shape = (op.kernel.grid, op.kernel.block) if op.kernel else ((24, 1, 1), (544, 1, 1))
            where |= {"grid": shape[0], "block": shape[1]}
            self.builder.kernel(start, end, op.name, graph_node=op.graph_node, graphId=op.graph_id, **where)

    def _host(self) -> None:
        trace, out = self.trace, self.builder
        devices = [process.device for process in trace.spec.processes]
        for call in trace.calls:
            thread = self._thread(call.process, call.thread)
            out.api(call.start_ns, call.end_ns, call.name, thread=thread, correlation=call.correlation)
            if call.sync:
                out.sync(
                    call.start_ns,
                    call.end_ns,
                    kind=call.sync,
                    device=devices[call.process],
                    stream=call.stream or 7,
                    process=thread.process,
                    correlation=call.correlation,
                    event=call.event,
                )
        for record in trace.events:
            process = self.processes[record.process]
            where = {"device": devices[record.process], "stream": record.stream}
            out.cuda_event(record.event, process=process, correlation=record.correlation, **where)
        nccl_processes = sorted({range_.process for range_ in trace.ranges if range_.nccl})
        for process_number in nccl_processes:
            out.nvtx_domain(trace.spec.start_ns, _NCCL_DOMAIN, "NCCL", thread=self._thread(process_number, 0))
        for range_ in sorted(trace.ranges, key=lambda r: (r.start_ns, -r.end_ns)):
            thread = self._thread(range_.process, range_.thread)
            more: dict[str, Any] = {"registered": range_.nccl, "domain": _NCCL_DOMAIN if range_.nccl else 0}
            out.nvtx(range_.start_ns, range_.end_ns, range_.text, thread=thread, payload=range_.bytes, **more)
        for stretch in trace.os_calls:
            thread = self._thread(stretch.process, stretch.thread)
            out.osrt(stretch.start_ns, stretch.end_ns, stretch.name, thread=thread)
        for stretch in trace.overheads:
            thread = self._thread(stretch.process, stretch.thread)
            out.overhead(stretch.start_ns, stretch.end_ns, stretch.name, thread=thread)
        for event in trace.memory:
            out.memory_event(
                event.time_ns,
                bytes=event.bytes,
                op="alloc" if event.op == "alloc" else "free",
                address=event.address,
                device=devices[event.process],
                process=self.processes[event.process],
                correlation=event.correlation,
            )

    def _thread(self, process: int, index: int) -> Thread:
        """Thread 0 is the process's main thread; the others get the ids that follow."""
        name = self.trace.spec.processes[process].threads[index].name
        return self.processes[process].thread(self.processes[process].pid + index, name)
