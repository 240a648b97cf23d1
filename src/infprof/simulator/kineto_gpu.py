"""Calls, GPU work, waits and GPU-side annotations of one process in a Kineto trace."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from infprof.simulator.engine import Call, GpuOp

if TYPE_CHECKING:
    from infprof.simulator.kineto_process import HostEvent, ProcessEvents

# Numbers of the calls in CUPTI's tables.
_CBIDS = {
    "cudaMalloc": 20,
    "cudaFree": 22,
    "cudaMemcpy": 31,
    "cudaMemcpyAsync": 41,
    "cudaMemsetAsync": 51,
    "cudaStreamSynchronize": 131,
    "cudaEventRecord": 135,
    "cudaEventSynchronize": 137,
    "cudaStreamWaitEvent": 147,
    "cudaDeviceSynchronize": 165,
    "cudaLaunchKernel": 211,
    "cudaGraphLaunch": 311,
    "cudaLaunchKernelExC": 430,
    "cuLaunchKernel": 307,
    "cuLaunchKernelEx": 652,
}
_REGISTERS, _SHARED_BYTES = 64, 32_768  # of every kernel, as in the nsys export

_SYNC_NAMES = {
    "stream": "Stream Sync",
    "event": "Event Sync",
    "context": "Context Sync",
    "stream-wait-event": "Stream Wait Event",
}


class GpuEvents:
    """The part of ``run`` that CUPTI records."""

    def __init__(self, run: ProcessEvents) -> None:
        self.run = run

    def activities(self) -> list[str]:
        """Calls, GPU work and their flows by the time of their end, which is when CUPTI hands them over."""
        rows: list[tuple[int, list[str]]] = [(op.span[1], self._gpu_text(op)) for op in self.run.ops]
        rows += [(call.end_ns, self._call_text(call)) for call in self.run.calls if not is_module_load(call)]
        if self.run.options.sync_events:
            rows += [(call.end_ns, [self._sync_text(call)]) for call in self.run.calls if call.sync]
        return [text for _, texts in sorted(rows, key=lambda row: row[0]) for text in texts]

    def _external_id(self, correlation: int) -> dict[str, int]:
        if not self.run.writer.dialect.external_id_is_operator:
            return {"External id": correlation}
        operator = self.run.external_ids.get(correlation)
        return {} if operator is None else {"External id": operator}

    def _call_text(self, call: Call) -> list[str]:
        name = call.name.partition("_v")[0]
        category = "cuda_driver" if name.startswith("cu") and name[2:3].isupper() else "cuda_runtime"
        pid, tid = self.run.process.pid, self.run.process.pid + call.thread
        args = {**self._external_id(call.correlation), "cbid": _CBIDS.get(name, 0), "correlation": call.correlation}
        launches = call.correlation in self.run.launched
        return [
            self.run.writer.complete(category, name, pid, tid, (call.start_ns, call.end_ns), args),
            self.run.writer.flow(launches, call.correlation, pid, tid, call.start_ns),
        ]

    def _gpu_text(self, op: GpuOp) -> list[str]:
        if op.kind == "copy":
            category, name, args = "gpu_memcpy", _copy_name(op), self._transfer(op)
        elif op.kind == "memset":
            category, name, args = "gpu_memset", "Memset (Device)", self._transfer(op)
        else:
            category, name, args = "kernel", op.name, self._kernel_args(op)
        return [
            self.run.writer.complete(category, name, op.device, op.stream, op.span, args),
            self.run.writer.flow(False, op.correlation, op.device, op.stream, op.span[0]),
        ]

    def _place(self, op: GpuOp) -> dict[str, int]:
        return {"device": op.device, "context": 1, "stream": op.stream, "correlation": op.correlation}

    def _transfer(self, op: GpuOp) -> dict[str, Any]:
        args = {**self._external_id(op.correlation), **self._place(op), "bytes": op.bytes}
        ns = op.span[1] - op.span[0]
        return {**args, "memory bandwidth (GB/s)": op.bytes / ns} if ns else args

    def _kernel_args(self, op: GpuOp) -> dict[str, Any]:
        grid, block = (op.kernel.grid, op.kernel.block) if op.kernel else ((24, 1, 1), (544, 1, 1))
        threads = block[0] * block[1] * block[2]
        blocks = grid[0] * grid[1] * grid[2] / self.run.trace.spec.devices[op.device].sm_count
        args: dict[str, Any] = {
            **self._external_id(op.correlation),
            "queued": 0,
            **self._place(op),
            "registers per thread": _REGISTERS,
            "shared memory": _SHARED_BYTES,
            "blocks per SM": round(blocks, 6),
            "warps per SM": round(blocks * threads / 32, 6),
            "grid": list(grid),
            "block": list(block),
            "est. achieved occupancy %": _occupancy(blocks, threads),
        }
        if op.graph_node is not None and op.graph_id is not None and self.run.writer.dialect.node_ids:
            args |= {"graph id": op.graph_id, "graph node id": op.graph_id << 32 | op.graph_node}
        # What moves is known to the operator that launches a collective; a graph's replay calls none.
        if op.kind == "comm" and op.graph_node is None:
            args |= self.run.message(self.run.calls_by_id[op.correlation])
        return args

    def _sync_text(self, call: Call) -> str:
        kind = _SYNC_NAMES[call.sync or ""]
        stream = call.stream or 7 if call.sync in ("stream", "stream-wait-event") else -1
        args: dict[str, Any] = {**self._external_id(call.correlation), "cuda_sync_kind": kind}
        if call.sync in ("event", "stream-wait-event"):
            record, on = call.record or (-1, -1)
            args |= {"wait_on_stream": on, "wait_on_cuda_event_record_corr_id": record}
            args["wait_on_cuda_event_id"] = call.event or 0
        args |= {"stream": stream, "correlation": call.correlation, "device": self.run.process.device, "context": 1}
        return self.run.writer.complete(
            "cuda_sync", kind, self.run.process.device, stream, (call.start_ns, call.end_ns), args
        )

    def annotations(self, host: list[HostEvent]) -> list[str]:
        """Each annotation on each stream it launched work on: 1 ns early and 2 ns longer, as Kineto writes them."""
        starts: dict[int, list[int]] = defaultdict(list)
        calls: dict[int, list[Call]] = defaultdict(list)
        for call in sorted(self.run.calls, key=lambda c: c.start_ns):
            starts[call.thread].append(call.start_ns)
            calls[call.thread].append(call)
        texts = []
        for event in (e for e in host if e.category == "user_annotation"):
            begun = starts[event.thread]
            inside = calls[event.thread][bisect_left(begun, event.span[0]) : bisect_left(begun, event.span[1])]
            spans: dict[int, list[int]] = defaultdict(list)
            for call in inside:
                for op in self.run.launched.get(call.correlation, ()):
                    spans[op.stream] += op.span
            texts += [
                self.run.writer.complete(
                    "gpu_user_annotation",
                    event.name,
                    self.run.process.device,
                    stream,
                    (min(times) - 1, max(times) + 1),
                    {"External id": event.id},
                )
                for stream, times in sorted(spans.items())
            ]
        return texts


def _copy_name(op: GpuOp) -> str:
    short = {"h2d": "HtoD", "d2h": "DtoH", "d2d": "DtoD", "p2p": "PtoP"}[op.copy_kind]
    host = op.memory.capitalize()
    source, target = (host if op.copy_kind == "h2d" else "Device"), (host if op.copy_kind == "d2h" else "Device")
    return f"Memcpy {short} ({source} -> {target})"


def _occupancy(blocks_per_sm: float, threads: int) -> int:
    """Kineto's estimate in %: as many blocks as an SM gets or holds, by threads, registers and shared memory."""
    most = min(32, 2048 // threads, 65_536 // (_REGISTERS * threads), 233_472 // (_SHARED_BYTES + 1024))
    return round(100 * min(blocks_per_sm, most) * threads / 2048)


def is_module_load(call: Call) -> bool:
    """Of the driver's calls Kineto records the launches alone; a module load shows as overhead."""
    return call.name == "cuModuleLoadData"
