"""Activity records of CUPTI made by hand, and the file that a process would have left of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from infprof.probes.cupti_backend import layout
from infprof.probes.cupti_backend.inside.buffers import ChunkFile
from infprof.probes.cupti_backend.layout import record_dtype

# How long records are in CUDA 13.0 (GetNextRecord of its libcupti says so), and of a version that adds to all of them.
CUDA_13_0 = {
    layout.MEMCPY: 96,
    layout.MEMSET: 88,
    layout.DRIVER: 40,
    layout.RUNTIME: 40,
    layout.CONTEXT: 32,
    layout.CONCURRENT_KERNEL: 216,
    layout.MARKER: 56,
    layout.OVERHEAD: 56,
    layout.MEMCPY_P2P: 96,
    layout.CUDA_EVENT: 56,
    layout.STREAM: 24,
    layout.SYNCHRONIZATION: 56,
    layout.INTERNAL_LAUNCH: 40,
    layout.MEMORY: 128,
    layout.GRAPH_TRACE: 56,
}
LATER = {kind: stride + 32 for kind, stride in CUDA_13_0.items()}
PID = 4321
START_NS = 1_790_000_000_000_000_000
RUNTIME_CALLS = {"211": "cudaLaunchKernel_v7000", "41": "cudaMemcpyAsync_v3020", "131": "cudaStreamSynchronize_v3020"}
DRIVER_CALLS = {"307": "cuLaunchKernel", "514": "cuGraphLaunch"}


class Records:
    """Rows of records in the order of writing; texts are given as such and become addresses."""

    def __init__(self, strides: dict[int, int] | None = None) -> None:
        self.strides = strides or CUDA_13_0
        self.rows: list[bytes] = []
        self.addresses: dict[str, int] = {}

    def add(self, kind: int, **fields: Any) -> None:
        """One record; what is between its fields is junk, as it may be in a buffer."""
        dtype = record_dtype(kind, self.strides[kind])
        record = np.frombuffer(bytearray(b"\xee" * dtype.itemsize), dtype=dtype)
        for name in dtype.names or ():
            record[name] = 0
        for name, value in (fields | {"kind": kind}).items():
            record[name] = self._address(value) if isinstance(value, str) else value
        self.rows.append(record.tobytes())

    def _address(self, text: str) -> int:
        return self.addresses.setdefault(text, 0x7F00_0000_0000 + 64 * len(self.addresses))

    def kernel(self, start: int, end: int, name: str, correlation: int, **fields: Any) -> None:
        geometry = {"grid_x": 132, "grid_y": 1, "grid_z": 1, "block_x": 256, "block_y": 1, "block_z": 1}
        place = {"context": 1, "stream": 7, "start": start, "end": end, "name": name, "correlation": correlation}
        self.add(layout.CONCURRENT_KERNEL, **geometry | place | fields)

    def call(
        self, start: int, end: int, correlation: int, cbid: int = 211, kind: int = layout.RUNTIME, **f: Any
    ) -> None:
        where = {"process": PID, "thread": PID, "start": start, "end": end}
        self.add(kind, **where | {"correlation": correlation, "cbid": cbid} | f)

    def write(self, path: Path, per_buffer: int = 1000, ended: bool = True, **about: Any) -> Path:
        """The file of a process that had these records in buffers of ``per_buffer`` each."""
        file = ChunkFile(str(path))
        clocks = {"cupti_ns": START_NS, "realtime_ns": START_NS, "monotonic_ns": 1}
        said = {
            "pid": PID,
            "command": "python",
            "cupti_version": 130001,
            "start": clocks,
            "runtime_calls": RUNTIME_CALLS,
            "driver_calls": DRIVER_CALLS,
            "graphs": "node",
            "devices": [{"cuDevice": 0, "name": "NVIDIA Made 80GB", "smCount": 132, "uuid": "ab" * 16}],
        }
        file.say(**said | about)
        file.say(threads={PID: "python", PID + 1: "worker"})
        for first in range(0, len(self.rows), per_buffer):
            file.say(texts={pointer: text for text, pointer in self.addresses.items()}, strides=self.strides)
            file.write(b"RECS", b"".join(self.rows[first : first + per_buffer]))
        if ended:
            file.say(end=clocks, dropped=0, refused_buffers=0, lost_bytes=0)
        file.close()
        return path
