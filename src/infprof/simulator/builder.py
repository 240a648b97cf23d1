"""Writes nsys SQLite exports row by row: the simulator's pen, and the one that tests use for hand-made traces.

All times are absolute nanoseconds of the export's own clock, given by the caller. A row may be as wrong as a test
needs: nothing here checks that a kernel ends after it starts or that its launch exists.
"""

from __future__ import annotations

import os
import re
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from infprof.simulator import schema

COPY_KINDS = {
    "unknown": 0,
    "h2d": 1,
    "d2h": 2,
    "d2d": 8,
    "h2h": 9,
    "p2p": 10,
    "uvm-h2d": 11,
    "uvm-d2h": 12,
    "uvm-d2d": 13,
}
MEMORY_KINDS = {"pageable": 0, "pinned": 1, "device": 2, "array": 3, "managed": 4, "device-static": 5, "unknown": 7}
SYNC_TYPES = {"event": 1, "stream-wait-event": 2, "stream": 3, "context": 4}
SEVERITIES = {"info": 1, "warning": 2, "error": 3, "verbose": 4}
OVERHEAD_TYPES = {
    "unknown": 1,
    "driver-compiler": 2,
    "buffer-flush": 3,
    "instrumentation": 4,
    "resource": 5,
    "module-loading": 6,
    "lazy-function-loading": 7,
    "command-buffer-full": 8,
}
_PAYLOAD_COLUMNS = ("uint64Value", "int64Value", "doubleValue", "uint32Value", "int32Value", "floatValue")

_NVTX_CATEGORY, _NVTX_MARK, _NVTX_PUSH_POP, _NVTX_START_END, _NVTX_DOMAIN = 33, 34, 59, 60, 75
_RUNTIME_API, _DRIVER_API, _OSRT, _CUPTI_OVERHEAD_CLASS = 0, 1, 27, 103
_NO_EVENT = 4294967295
_LOCAL_VM = 1 << 48
_METRIC_TYPE = 2 << 56  # typeId of a GPU-metrics source; the low byte is nsys's own GPU index
_METRIC_SOURCE = 1

Auto = Literal["auto"]


def short_name(name: str) -> str:
    """``shortName`` of a demangled kernel name: no return type, namespace, template arguments or parameters.

    >>> short_name("void flash::flash_fwd_kernel<Traits<(int)128>, (bool)1>(Params)")
    'flash_fwd_kernel'
    """
    plain = name.replace("(anonymous namespace)::", "")
    while (shorter := re.sub(r"<[^<>]*>", "", plain)) != plain:
        plain = shorter
    return plain.split("(")[0].strip().split(" ")[-1].split("::")[-1] or name


@dataclass(frozen=True)
class Thread:
    """A host thread of the trace; ``global_tid`` is nsys's serialised id."""

    process: Process
    tid: int
    name: str

    @property
    def global_tid(self) -> int:
        return self.process.global_pid | self.tid


@dataclass(frozen=True)
class Process:
    """A process of the trace; ``global_pid`` is nsys's serialised id."""

    builder: TraceBuilder = field(repr=False, compare=False)
    pid: int
    name: str

    @property
    def global_pid(self) -> int:
        return _LOCAL_VM | self.pid << 24

    def thread(self, tid: int | None = None, name: str | None = None) -> Thread:
        """A thread of this process; ``tid`` None is the main thread (tid = pid, named like the process)."""
        return self.builder._thread(self, self.pid if tid is None else tid, name or self.name)


class TraceBuilder:
    """Collects rows and writes them as one export of nsys ``version`` ("2022.4", "2023.4" or "2026").

    Every method that writes a row takes ``**columns`` that overrule what it would write, by the column's name in the
    export (``registersPerThread=64``, ``globalTid=-1``). Where no process or thread is given, a default one serves
    (pid 100, "python"). Tables exist only when they have rows, as with nsys's default ``--lazy=true``.
    """

    def __init__(self, version: str = "2023.4") -> None:
        if version not in schema.VERSIONS:
            raise ValueError(f"no nsys version {version!r} here; there are {', '.join(schema.VERSIONS)}")
        self.version = version
        self._schema = schema.tables(version)
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._strings: dict[str, int] = {}
        self._processes: dict[int, Process] = {}
        self._threads: dict[tuple[int, int], Thread] = {}
        self._correlation: dict[int, int] = {}
        self._contexts: dict[tuple[int, int], int] = {}
        self._streams: set[tuple[int, int, int]] = set()
        self._metrics: dict[tuple[int, str], int] = {}
        self._metadata: dict[str, list[tuple[str, str | None]]] = {"export": [], "capture": []}
        self._session: tuple[int, int] | None = None
        self._utc_epoch_ns = 1_700_000_000_000_000_000
        self._empty: set[str] = set()
        self._dropped: set[tuple[str, str]] = set()

    # Who

    def process(self, pid: int = 100, name: str = "python") -> Process:
        """The process with this pid; made on first use."""
        if pid not in self._processes:
            self._processes[pid] = Process(self, pid, name)
            self.row("PROCESSES", globalPid=self._processes[pid].global_pid, pid=pid, name=name)
        return self._processes[pid]

    def thread(self, tid: int | None = None, name: str | None = None) -> Thread:
        """A thread of the default process."""
        return self._default_process().thread(tid, name)

    def gpu(
        self,
        name: str = "NVIDIA H100 80GB HBM3",
        *,
        index: int | None = None,
        cuda_device: int | None = None,
        sm_count: int = 132,
        memory_bytes: int = 85_029_158_912,
        bandwidth: int = 3_352_000_000_000,
        clock_hz: int = 1_980_000_000,
        l2_bytes: int = 52_428_800,
        compute: tuple[int, int] = (9, 0),
        chip: str = "GH100",
        bus: str | None = None,
        uuid: str | None = None,
        **columns: Any,
    ) -> int:
        """A row of TARGET_INFO_GPU; returns nsys's index of the GPU. ``bandwidth`` in bytes/s."""
        index = len(self._rows.get("TARGET_INFO_GPU", [])) if index is None else index
        row: dict[str, Any] = {
            "vmId": _LOCAL_VM,
            "id": index,
            "name": name,
            "busLocation": bus or f"0000:{0x1B + 0x20 * index:02x}:00.0",
            "isDiscrete": 1,
            "l2CacheSize": l2_bytes,
            "totalMemory": memory_bytes,
            "memoryBandwidth": bandwidth,
            "clockRate": clock_hz,
            "smCount": sm_count,
            "pwGpuId": index,
            "uuid": uuid or f"00000000-0000-4000-8000-{index:012x}",
            "luid": 0,
            "chipName": chip,
            "cuDevice": index if cuda_device is None else cuda_device,
            "ctxswDevPath": "",
            "ctrlDevPath": "",
            "revision": 161,
            "nodeMask": 0,
            "constantMemory": 65536,
            "maxIPC": 4,
            "maxRegistersPerBlock": 65536,
            "maxShmemPerBlock": 49152,
            "maxShmemPerBlockOptin": 232448,
            "maxShmemPerSm": 233472,
            "maxRegistersPerSm": 65536,
            "threadsPerWarp": 32,
            "asyncEngines": 3,
            "maxWarpsPerSm": 64,
            "maxBlocksPerSm": 32,
            "maxThreadsPerBlock": 1024,
            "maxBlockDimX": 1024,
            "maxBlockDimY": 1024,
            "maxBlockDimZ": 64,
            "maxGridDimX": 2147483647,
            "maxGridDimY": 65535,
            "maxGridDimZ": 65535,
            "computeMajor": compute[0],
            "computeMinor": compute[1],
            "smMajor": compute[0],
            "smMinor": compute[1],
        }
        self.row("TARGET_INFO_GPU", **row | columns)
        return index

    def cuda_device(self, gpu: int, cuda_id: int, process: Process | None = None, **columns: Any) -> None:
        """Which GPU a process's CUDA ordinal means (TARGET_INFO_CUDA_DEVICE); only 2026 exports have this table."""
        pid = (process or self._default_process()).pid
        row = {"gpuId": gpu, "cudaId": cuda_id, "pid": pid, "numMultiprocessors": None}
        self.row("TARGET_INFO_CUDA_DEVICE", **row | columns)

    # What the GPU did

    def kernel(
        self,
        start: int,
        end: int,
        name: str = "gemm_kernel",
        *,
        device: int = 0,
        stream: int = 7,
        process: Process | None = None,
        correlation: int | None = None,
        short: str | None = None,
        grid: tuple[int, int, int] = (132, 1, 1),
        block: tuple[int, int, int] = (256, 1, 1),
        graph_node: int | None = None,
        **columns: Any,
    ) -> None:
        """A kernel; ``correlation`` None means that no launch is known, ``graph_node`` that it ran inside a graph."""
        row = self._gpu_row(start, end, device, stream, process, correlation) | {
            "demangledName": self.string(name),
            "shortName": self.string(short or short_name(name)),
            "launchType": 1,
            "cacheConfig": 0,
            "registersPerThread": 64,
            "gridX": grid[0],
            "gridY": grid[1],
            "gridZ": grid[2],
            "blockX": block[0],
            "blockY": block[1],
            "blockZ": block[2],
            "gridId": len(self._rows.get("CUPTI_ACTIVITY_KIND_KERNEL", [])) + 1,
            "sharedMemoryExecuted": 32768,
            "graphNodeId": graph_node,
            "sharedMemoryLimitConfig": 0,
            "tensorSizeMinusOneElements": "[]",
        }
        self.row("CUPTI_ACTIVITY_KIND_KERNEL", **row | columns)

    def memcpy(
        self,
        start: int,
        end: int,
        *,
        kind: str = "h2d",
        bytes: int = 1 << 20,
        src: str | None = None,
        dst: str | None = None,
        device: int = 0,
        stream: int = 7,
        process: Process | None = None,
        correlation: int | None = None,
        graph_node: int | None = None,
        **columns: Any,
    ) -> None:
        """A copy; ``kind`` of ``COPY_KINDS``, ``src``, ``dst`` of ``MEMORY_KINDS`` (host side pinned unless said)."""
        from_host, to_host = kind.endswith(("h2d", "h2h")), kind.endswith(("d2h", "h2h"))
        row = self._gpu_row(start, end, device, stream, process, correlation) | {
            "bytes": bytes,
            "copyKind": COPY_KINDS[kind],
            "srcKind": MEMORY_KINDS[src or ("pinned" if from_host else "device")],
            "dstKind": MEMORY_KINDS[dst or ("pinned" if to_host else "device")],
            "graphNodeId": graph_node,
            "copyCount": 1,
        }
        self.row("CUPTI_ACTIVITY_KIND_MEMCPY", **row | columns)

    def memset(
        self,
        start: int,
        end: int,
        *,
        bytes: int = 4096,
        value: int = 0,
        device: int = 0,
        stream: int = 7,
        process: Process | None = None,
        correlation: int | None = None,
        memory: str = "device",
        graph_node: int | None = None,
        **columns: Any,
    ) -> None:
        row = self._gpu_row(start, end, device, stream, process, correlation) | {
            "value": value,
            "bytes": bytes,
            "memKind": MEMORY_KINDS[memory],
            "graphNodeId": graph_node,
        }
        self.row("CUPTI_ACTIVITY_KIND_MEMSET", **row | columns)

    def graph_trace(
        self,
        start: int,
        end: int,
        *,
        graph: int = 1,
        graph_exec: int = 2,
        device: int = 0,
        stream: int = 7,
        process: Process | None = None,
        correlation: int | None = None,
        **columns: Any,
    ) -> None:
        """A whole graph launch as one row, as in graph-level tracing; its kernels are then not recorded."""
        row = self._gpu_row(start, end, device, stream, process, correlation)
        self.row("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", **row | {"graphId": graph, "graphExecId": graph_exec} | columns)

    def cuda_event(
        self,
        event: int,
        *,
        device: int = 0,
        stream: int = 7,
        process: Process | None = None,
        correlation: int | None = None,
        **columns: Any,
    ) -> None:
        """The record of an event in a stream; its time is that of the record call (no timestamp before 2026)."""
        row = self._gpu_row(0, 0, device, stream, process, correlation) | {"eventId": event}
        self.row(
            "CUPTI_ACTIVITY_KIND_CUDA_EVENT", **{k: v for k, v in row.items() if k not in ("start", "end")} | columns
        )

    def memory_event(
        self,
        time: int,
        *,
        bytes: int,
        op: Literal["alloc", "free"] = "alloc",
        address: int = 0x7F0000000000,
        memory: str = "device",
        device: int = 0,
        process: Process | None = None,
        correlation: int | None = None,
        name: str | None = None,
        **columns: Any,
    ) -> None:
        """A row of CUDA_GPU_MEMORY_USAGE_EVENTS."""
        process = process or self._default_process()
        row = {
            "start": time,
            "globalPid": process.global_pid,
            "deviceId": device,
            "contextId": self._context(process, device),
            "address": address,
            "pc": 0,
            "bytes": bytes,
            "memKind": MEMORY_KINDS[memory],
            "memoryOperationType": 0 if op == "alloc" else 1,
            "name": name,
            "correlationId": correlation,
        }
        self.row("CUDA_GPU_MEMORY_USAGE_EVENTS", **row | columns)

    def gpu_metric(self, time: int, device: int, name: str, value: int, **columns: Any) -> None:
        """A counter sample; ``name`` as nsys spells it ("SM Issue [Throughput %]"), ``device`` nsys's GPU index."""
        metric = self._metric(device, name)
        row = {"timestamp": time, "typeId": _METRIC_TYPE | device, "metricId": metric, "value": value}
        self.row("GPU_METRICS", **row | columns)

    # What the host did

    def api(
        self,
        start: int,
        end: int,
        name: str = "cudaLaunchKernel_v7000",
        *,
        thread: Thread | None = None,
        correlation: int | Auto | None = "auto",
        return_value: int = 0,
        driver: bool | None = None,
        **columns: Any,
    ) -> int | None:
        """A runtime or driver call; returns its correlation id, a fresh one of the process unless given.

        ``driver`` None takes cu[A-Z]… for driver calls. Names carry nsys's version suffix (``_v7000``).
        """
        thread = thread or self.thread()
        if correlation == "auto":
            correlation = self.correlation(thread.process)
        is_driver = bool(re.match(r"cu[A-Z]", name)) if driver is None else driver
        row = {
            "start": start,
            "end": end,
            "eventClass": _DRIVER_API if is_driver else _RUNTIME_API,
            "globalTid": thread.global_tid,
            "correlationId": correlation,
            "nameId": self.string(name),
            "returnValue": return_value,
        }
        self.row("CUPTI_ACTIVITY_KIND_RUNTIME", **row | columns)
        return correlation

    def launch(
        self,
        at: int,
        call_ns: int,
        kernel_start: int,
        kernel_ns: int,
        name: str = "gemm_kernel",
        *,
        thread: Thread | None = None,
        api: str = "cudaLaunchKernel_v7000",
        **kernel: Any,
    ) -> int:
        """A launch call at ``at`` and its kernel, joined by a fresh correlation id, which is returned."""
        thread = thread or self.thread()
        correlation = self.correlation(thread.process)
        self.api(at, at + call_ns, api, thread=thread, correlation=correlation)
        self.kernel(
            kernel_start, kernel_start + kernel_ns, name, process=thread.process, correlation=correlation, **kernel
        )
        return correlation

    def copy(
        self,
        at: int,
        call_ns: int,
        copy_start: int,
        copy_ns: int,
        *,
        thread: Thread | None = None,
        api: str = "cudaMemcpyAsync_v3020",
        **memcpy: Any,
    ) -> int:
        """A copy call and its copy, joined by a fresh correlation id, which is returned."""
        thread = thread or self.thread()
        correlation = self.correlation(thread.process)
        self.api(at, at + call_ns, api, thread=thread, correlation=correlation)
        self.memcpy(copy_start, copy_start + copy_ns, process=thread.process, correlation=correlation, **memcpy)
        return correlation

    def graph_launch(
        self,
        at: int,
        call_ns: int,
        kernels: list[tuple[int, int, str]] | None = None,
        *,
        span: tuple[int, int] | None = None,
        thread: Thread | None = None,
        device: int = 0,
        stream: int = 7,
        first_node: int = 1,
        graph: int = 1,
    ) -> int:
        """A cudaGraphLaunch; ``kernels`` (start, end, name) if traced per node, ``span`` (start, end) if per graph.

        All kernels share the launch's correlation id, which is returned.
        """
        thread = thread or self.thread()
        correlation = self.correlation(thread.process)
        self.api(at, at + call_ns, "cudaGraphLaunch_v10000", thread=thread, correlation=correlation)
        where: dict[str, Any] = {
            "device": device,
            "stream": stream,
            "process": thread.process,
            "correlation": correlation,
        }
        for node, (start, end, name) in enumerate(kernels or [], first_node):
            self.kernel(start, end, name, graph_node=node, graphId=graph, **where)
        if span:
            self.graph_trace(*span, graph=graph, **where)
        return correlation

    def sync(
        self,
        start: int,
        end: int,
        *,
        kind: str = "stream",
        device: int = 0,
        stream: int = 7,
        process: Process | None = None,
        correlation: int | None = None,
        event: int | None = None,
        **columns: Any,
    ) -> None:
        """A row of CUPTI_ACTIVITY_KIND_SYNCHRONIZATION; ``kind`` of ``SYNC_TYPES``. Its call is a row of ``api``."""
        row = self._gpu_row(start, end, device, stream, process, correlation) | {
            "syncType": SYNC_TYPES[kind],
            "eventId": _NO_EVENT if event is None else event,
        }
        self.row("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", **row | columns)

    def nvtx(
        self,
        start: int,
        end: int | None,
        text: str,
        *,
        thread: Thread | None = None,
        payload: int | float | None = None,
        payload_column: str | None = None,
        registered: bool = False,
        domain: int = 0,
        category: int | None = None,
        color: int | None = None,
        **columns: Any,
    ) -> None:
        """A push/pop range. ``registered``: the name stands in StringIds, as with registered strings, not in the row.

        ``payload`` goes to uint64Value (int) or doubleValue (float) unless ``payload_column`` names another.
        """
        where = {"domainId": domain, "category": category, "color": color}
        self._nvtx(_NVTX_PUSH_POP, start, end, text, thread, registered, payload, payload_column, where | columns)

    def nvtx_start_end(
        self,
        start: int,
        end: int | None,
        text: str,
        *,
        thread: Thread | None = None,
        end_thread: Thread | None = None,
        range_id: int = 1,
        registered: bool = False,
        payload: int | float | None = None,
        domain: int = 0,
        **columns: Any,
    ) -> None:
        """A start/end range, which may end on another thread."""
        thread = thread or self.thread()
        ids = {"rangeId": range_id, "endGlobalTid": (end_thread or thread).global_tid, "domainId": domain}
        self._nvtx(_NVTX_START_END, start, end, text, thread, registered, payload, None, ids | columns)

    def nvtx_mark(self, time: int, text: str, *, thread: Thread | None = None, **columns: Any) -> None:
        self._nvtx(_NVTX_MARK, time, None, text, thread, False, None, None, {"domainId": 0} | columns)

    def nvtx_domain(self, time: int, domain: int, name: str, *, thread: Thread | None = None) -> None:
        """Creation of a domain; without it, rows of the domain have no domain name."""
        self._nvtx(_NVTX_DOMAIN, time, None, name, thread, False, None, None, {"domainId": domain})

    def osrt(
        self, start: int, end: int, name: str, *, thread: Thread | None = None, return_value: int = 0, **columns: Any
    ) -> None:
        """An OS-runtime call such as epoll_wait, poll, read, futex, pthread_cond_wait."""
        row = {
            "start": start,
            "end": end,
            "eventClass": _OSRT,
            "globalTid": (thread or self.thread()).global_tid,
            "nameId": self.string(name),
            "returnValue": return_value,
            "nestingLevel": 0,
            "callchainId": 0,
        }
        self.row("OSRT_API", **row | columns)

    def sched(self, time: int, *, cpu: int, switched_in: bool, thread: Thread | None = None) -> None:
        """A context switch of a thread onto or off a CPU."""
        tid = (thread or self.thread()).global_tid
        self.row("SCHED_EVENTS", start=time, cpu=cpu, isSchedIn=int(switched_in), globalTid=tid)

    def overhead(
        self,
        start: int,
        end: int,
        name: str = "CUDA profiling data flush",
        *,
        thread: Thread | None = None,
        type: str = "unknown",
        **columns: Any,
    ) -> None:
        """A row of PROFILER_OVERHEAD; ``type`` of ``OVERHEAD_TYPES`` is written from 2026 on."""
        row = {
            "start": start,
            "end": end,
            "globalTid": thread.global_tid if thread else None,
            "nameId": self.string(name),
            "returnValue": 0,
            "overheadType": OVERHEAD_TYPES[type],
        }
        self.row("PROFILER_OVERHEAD", **row | columns)

    def cupti_overhead(
        self,
        start: int,
        end: int,
        name: str = "Runtime Triggered Module Loading",
        *,
        type: str = "module-loading",
        thread: Thread | None = None,
        correlation: int | None = None,
        **columns: Any,
    ) -> None:
        """A row of CUPTI_ACTIVITY_KIND_OVERHEAD, which only 2026 exports have."""
        row = {
            "start": start,
            "end": end,
            "eventClass": _CUPTI_OVERHEAD_CLASS,
            "globalTid": (thread or self.thread()).global_tid,
            "correlationId": correlation,
            "nameId": self.string(name),
            "overheadType": OVERHEAD_TYPES[type],
        }
        self.row("CUPTI_ACTIVITY_KIND_OVERHEAD", **row | columns)

    # The file itself

    def diagnostic(self, text: str, severity: str = "warning", *, time: int = 0, **columns: Any) -> None:
        """A message of the profiler; ``severity`` of ``SEVERITIES``."""
        row = {
            "timestamp": time,
            "timestampType": 1,
            "source": 1,
            "severity": SEVERITIES[severity],
            "text": text,
            "globalPid": None,
        }
        self.row("DIAGNOSTIC_EVENT", **row | columns)

    def metadata(self, name: str, value: str | None, *, where: Literal["capture", "export"] = "capture") -> None:
        """One more row of META_DATA_CAPTURE (or of the export's metadata); names may repeat."""
        self._metadata[where].append((name, value))

    def system_env(self, name: str, value: str, *, number: int = 0) -> None:
        """A row of TARGET_INFO_SYSTEM_ENV, such as NvDriverVersion or Hostname."""
        self.row(
            "TARGET_INFO_SYSTEM_ENV",
            globalVid=_LOCAL_VM,
            devStateName="Local (CLI)",
            name=name,
            nameEnum=number,
            value=value,
        )

    def session(self, start: int, stop: int, *, utc_epoch_ns: int | None = None) -> None:
        """ANALYSIS_DETAILS; without this call it spans the rows that were written."""
        self._session = (start, stop)
        self._utc_epoch_ns = self._utc_epoch_ns if utc_epoch_ns is None else utc_epoch_ns

    def string(self, value: str) -> int:
        """The id of ``value`` in StringIds."""
        return self._strings.setdefault(value, len(self._strings) + 1)

    def correlation(self, process: Process | None = None) -> int:
        """A fresh correlation id of the process: ids repeat across processes, as in real exports."""
        pid = (process or self._default_process()).pid
        self._correlation[pid] = self._correlation.get(pid, 0) + 1
        return self._correlation[pid]

    def row(self, table: str, **columns: Any) -> None:
        """One row of any table in ``schema``; columns not given are NULL, or 0 / '' where NULL is not allowed.

        Tables and columns that only other versions of nsys have are dropped, so that one test can write for all of
        them. Raises ValueError for names that no version has.
        """
        if table not in self._schema:
            if not any(table in schema.tables(version) for version in schema.VERSIONS):
                raise ValueError(f"nsys has no table {table!r} that the simulator can write")
            return
        known = {column.name for version in schema.VERSIONS for column in schema.tables(version).get(table, ())}
        if unknown := columns.keys() - known:
            raise ValueError(f"{table} has no column {', '.join(sorted(unknown))}")
        self._rows.setdefault(table, []).append(columns)

    def empty_table(self, table: str) -> None:
        """Make ``table`` exist even without rows, as nsys does with ``--lazy=false``."""
        self._empty.add(table)

    def drop_column(self, table: str, column: str) -> None:
        """Write ``table`` without ``column``, as an older or newer schema might."""
        self._dropped.add((table, column))

    def write(self, path: str | Path) -> Path:
        """Write the export to ``path``, under a temporary name first; the same rows give the same bytes."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)
        try:
            db = sqlite3.connect(temporary, isolation_level=None)
            try:
                db.execute("PRAGMA journal_mode = OFF")
                db.execute("PRAGMA synchronous = OFF")
                db.execute("BEGIN")
                self._write_tables(db)
                db.execute("COMMIT")
            finally:
                db.close()
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    def _write_tables(self, db: sqlite3.Connection) -> None:
        rows = self._rows | self._file_rows()
        rows["StringIds"] = [{"id": number, "value": value} for value, number in self._strings.items()]
        # strings are interned while rows are made, so StringIds is last to be filled and first to be written
        order = ["StringIds", *(table for table in self._schema if table != "StringIds")]
        used = [table for table in order if rows.get(table) or table in self._empty]
        for table in used:
            columns = tuple(c for c in self._schema[table] if (table, c.name) not in self._dropped)
            schema.create_table(db, table, columns)
            marks = ", ".join("?" * len(columns))
            db.executemany(
                f"INSERT INTO {table} VALUES ({marks})",
                ([_value(row, column) for column in columns] for row in rows.get(table, [])),
            )
        schema.write_enums(db, used, self.version)

    def _file_rows(self) -> dict[str, list[dict[str, Any]]]:
        """The tables about the export itself, which are known only when all rows are."""
        product, date, version, checksum = schema.PRODUCT[self.version]
        major, minor, micro = version.split(".")
        export = [
            ("EXPORT_PRODUCT_NAME", "NVIDIA Nsight Systems"),
            ("EXPORT_PRODUCT_VERSION", product),
            ("EXPORT_PRODUCT_DATE", date),
            ("EXPORT_SCHEMA_VERSION", version),
            ("EXPORT_SCHEMA_VERSION_MAJOR", major),
            ("EXPORT_SCHEMA_VERSION_MINOR", minor),
            ("EXPORT_SCHEMA_VERSION_MICRO", micro),
            ("EXPORT_SCHEMA_VERSION_CKSUM", checksum),
            ("EXPORT_PLATFORM", "linux-desktop"),
            ("EXPORT_ARCH", "x64"),
            ("EXPORT_LAZY" if self.version == "2022.4" else "EXPORT_PARAM_LAZY", "false" if self._empty else "true"),
            *self._metadata["export"],
        ]
        start, stop = self._session or self._time_span()
        return {
            schema.EXPORT_TABLE[self.version]: [{"name": name, "value": value} for name, value in export],
            "META_DATA_CAPTURE": [{"name": name, "value": value} for name, value in self._metadata["capture"]],
            "ANALYSIS_DETAILS": [
                {"globalVid": _LOCAL_VM, "duration": stop - start, "startTime": start, "stopTime": stop}
            ],
            "TARGET_INFO_SESSION_START_TIME": [
                {"utcEpochNs": self._utc_epoch_ns, "utcTime": "2023-11-14T22:13:20", "localTime": "2023-11-14T22:13:20"}
            ],
        }

    def _time_span(self) -> tuple[int, int]:
        """First start and last end over all rows, (0, 0) without any."""
        # PROCESSES and the like have no times; a metric sample is an instant
        times = [
            row[column]
            for rows in self._rows.values()
            for row in rows
            for column in ("start", "end", "timestamp")
            if isinstance(row.get(column), int)
        ]
        return (min(times), max(times)) if times else (0, 0)

    def _default_process(self) -> Process:
        return next(iter(self._processes.values()), None) or self.process()

    def _thread(self, process: Process, tid: int, name: str) -> Thread:
        key = (process.pid, tid)
        if key not in self._threads:
            thread = self._threads[key] = Thread(process, tid, name)
            self.row("ThreadNames", nameId=self.string(name), priority=20, globalTid=thread.global_tid)
        return self._threads[key]

    def _gpu_row(
        self, start: int, end: int, device: int, stream: int, process: Process | None, correlation: int | None
    ) -> dict[str, Any]:
        process = process or self._default_process()
        context = self._context(process, device)
        if (process.pid, context, stream) not in self._streams:
            self._streams.add((process.pid, context, stream))
            where = {"streamId": stream, "hwId": 0, "vmId": 1, "processId": process.pid, "contextId": context}
            self.row("TARGET_INFO_CUDA_STREAM", **where, priority=0, flag=3 if stream == 7 else 1)
        return {
            "start": start,
            "end": end,
            "deviceId": device,
            "contextId": context,
            "streamId": stream,
            "correlationId": correlation,
            "globalPid": process.global_pid,
        }

    def _context(self, process: Process, device: int) -> int:
        """The process's CUDA context on ``device``, 1 for the first one it uses."""
        key = (process.pid, device)
        if key not in self._contexts:
            self._contexts[key] = 1 + sum(pid == process.pid for pid, _ in self._contexts)
            where = {"hwId": 0, "vmId": 1, "processId": process.pid, "deviceId": device}
            self.row("TARGET_INFO_CUDA_CONTEXT_INFO", **where, nullStreamId=7, contextId=self._contexts[key])
            self.row("TARGET_INFO_CUDA_NULL_STREAM", **where, streamId=7, contextId=self._contexts[key])
        return self._contexts[key]

    def _metric(self, device: int, name: str) -> int:
        if (device, name) not in self._metrics:
            number = self._metrics[device, name] = 1 + sum(other == device for other, _ in self._metrics)
            gpus = {gpu["id"]: gpu["name"] for gpu in self._rows.get("TARGET_INFO_GPU", [])}
            self.row(
                "TARGET_INFO_GPU_METRICS",
                typeId=_METRIC_TYPE | device,
                sourceId=_METRIC_SOURCE,
                typeName=f"GPU Metrics [{gpus.get(device, device)}]",
                metricId=number,
                metricName=name,
            )
        return self._metrics[device, name]

    def _nvtx(
        self,
        event_type: int,
        start: int,
        end: int | None,
        text: str,
        thread: Thread | None,
        registered: bool,
        payload: int | float | None,
        payload_column: str | None,
        columns: dict[str, Any],
    ) -> None:
        row: dict[str, Any] = {
            "start": start,
            "end": end,
            "eventType": event_type,
            "text": None if registered else text,
            "textId": self.string(text) if registered else None,
            "globalTid": (thread or self.thread()).global_tid,
        }
        if payload is not None:
            column = payload_column or ("uint64Value" if isinstance(payload, int) else "doubleValue")
            if column not in _PAYLOAD_COLUMNS:
                raise ValueError(f"no payload column {column!r}; there are {', '.join(_PAYLOAD_COLUMNS)}")
            row[column] = payload
        self.row("NVTX_EVENTS", **row | columns)


def _value(row: dict[str, Any], column: schema.Column) -> Any:
    value = row.get(column.name)
    if value is None and column.not_null:
        return "" if column.type == "TEXT" else 0
    return value
