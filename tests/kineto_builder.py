"""Writes small PyTorch profiler traces with known truth, in the spellings of different versions."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

H100 = {
    "id": 0,
    "name": "NVIDIA H100 80GB HBM3",
    "totalGlobalMem": 85_017_493_504,
    "computeMajor": 9,
    "computeMinor": 0,
    "numSms": 132,
}
OLD_NAMES = {
    "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
    "gpu_memset": "Memset",
    "cuda_runtime": "Runtime",
    "cpu_op": "Operator",
}


class KinetoBuilder:
    """Times are µs; a launch makes the call and its kernel."""

    def __init__(self, pid: int = 4001, old_names: bool = False, devices: list[dict[str, Any]] | None = None) -> None:
        self.pid = pid
        self.old_names = old_names
        self.events: list[dict[str, Any]] = []
        self.top: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [H100] if devices is None else devices}
        self.correlation = 0

    def add(
        self, cat: str, name: str, ts: Any, dur: Any, pid: Any = None, tid: Any = None, **args: Any
    ) -> dict[str, Any]:
        event = {
            "ph": "X",
            "cat": OLD_NAMES.get(cat, cat) if self.old_names else cat,
            "name": name,
            "pid": self.pid if pid is None else pid,
            "tid": self.pid if tid is None else tid,
            "ts": ts,
            "dur": dur,
            "args": args,
        }
        self.events.append(event)
        return event

    def kernel(
        self, ts: Any, dur: Any, name: str = "gemm_bf16", corr: int = 0, device: Any = 0, stream: int = 7, **args: Any
    ) -> dict[str, Any]:
        place = {"device": device, "context": 1, "stream": stream, "correlation": corr}
        return self.add("kernel", name, ts, dur, pid=device, tid=stream, **place, **args)

    def call(self, ts: Any, dur: Any, name: str = "cudaLaunchKernel", corr: int = 0, tid: Any = None) -> dict[str, Any]:
        return self.add("cuda_runtime", name, ts, dur, tid=tid, correlation=corr)

    def launch(self, ts: float, dur: float, start: float, length: float, name: str = "gemm_bf16", **where: Any) -> int:
        self.correlation += 1
        self.call(ts, dur, where.pop("api", "cudaLaunchKernel"), self.correlation)
        self.kernel(start, length, name, self.correlation, **where)
        return self.correlation

    def text(self, indent: int | None = None, **keys: Any) -> str:
        whole = {**self.top, "traceEvents": self.events, **keys}
        return json.dumps(whole, indent=indent)

    def write(self, path: Path, indent: int | None = None, **keys: Any) -> Path:
        data = self.text(indent, **keys).encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
        return path


def steady(kernels: int = 1000, **options: Any) -> KinetoBuilder:
    """Launches of 3 µs every 20 µs, each with a kernel of 12 µs that begins 5 µs after its call."""
    builder = KinetoBuilder(**options)
    for i in range(kernels):
        at = 20.0 * i
        builder.add("cpu_op", "aten::mm", at, 6, **{"External id": i + 1})
        builder.launch(at + 1, 3, at + 9, 12)
    return builder
