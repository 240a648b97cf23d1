"""Runs the NVML probe against ``fake_nvml.c`` through the real nvidia-ml-py, tick by tick and without waiting."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pynvml
import pytest

from infprof.probes import ProbeContext, Task
from infprof.probes.nvml import NvmlProbe
from infprof.probes.recorder import Clock, Recorder, TelemetryFile
from infprof.telemetry import Telemetry, read_telemetry

SOURCE = Path(__file__).with_name("fake_nvml.c")
MIB = 2**20
HOST_NAMESPACE = "pid:[4026531836]"

H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "uuid": "GPU-11111111-2222-3333-4444-555555555555",
    "bus": "00000000:0F:00.0",
    "major": 9,
    "mig": 0,
    "memory_total": 80_000 * MIB,
    "memory_used": 60_000 * MIB,
    "memory_reserved": 500 * MIB,
    "util": 97,
    "memory_util": 40,
    "clock1": 1755,
    "clock2": 2619,
    "clock_max1": 1980,
    "clock_max2": 2619,
    "reasons": 0x4,
    "power_mw": 650_000,
    "power_limit_mw": 700_000,
    "temperature": 61,
    "slowdown": 87,
    "gen": 5,
    "width": 16,
    "gen_max": 5,
    "width_max": 16,
    "processes": "",
}


def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("needs a C compiler")
    return found


def build(folder: Path, name: str = "libnvidia-ml.so.1", old_driver: bool = False) -> Path:
    """The fake library as ``folder/name``."""
    path = folder / name
    # Without a soname: a library that has one is found again by that name by all later tests of the process.
    options = ["-shared", "-fPIC", "-O1", *(["-DOLD_DRIVER"] if old_driver else [])]
    subprocess.run([compiler(), *options, "-o", str(path), str(SOURCE)], check=True, capture_output=True)
    return path


def write_answers(path: Path, gpus: Mapping[int, Mapping[str, object]], **more: object) -> None:
    """The fake's answers: keys per GPU, and ``more`` for all (a dot in a key is written as two underscores)."""
    lines = [f"count {len(gpus)}", "driver 570.86.15", "nvml 12.570.86.15"]
    lines += [f"gpu{index}.{key} {value}" for index, keys in gpus.items() for key, value in keys.items()]
    lines += [f"{key.replace('__', '.')} {value}" for key, value in more.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


class ManualClock(Clock):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000_000_000

    def now_ns(self) -> int:
        return self.now


class Bench:
    """One run of the probe. ``gpus`` and ``more`` may be changed between ticks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
        self.folder = folder
        self.gpus: dict[int, dict[str, object]] = {0: dict(H100)}
        self.more: dict[str, object] = {}
        self.root = folder / "root"
        self.root.mkdir()
        self.clock = ManualClock()
        self.file = TelemetryFile(folder / "telemetry.sqlite", self.clock)
        self.probe = NvmlProbe()
        self.out: Recorder = self.file.recorder(self.probe.name, self.probe.signals)
        self.tasks: dict[str, Task] = {}
        monkeypatch.setenv("FAKE_NVML", str(folder / "answers"))
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(library)))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    def put(self, path: str, text: str) -> None:
        """A file of the fake machine, below the context's root."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def process(self, pid: int, parent: int = 1, session: int | None = None) -> None:
        self.put(f"/proc/{pid}/stat", f"{pid} (a (b) c) S {parent} {pid} {session or pid} 0 -1")

    def on_the_host(self) -> None:
        (self.root / "proc/self/ns").mkdir(parents=True)
        (self.root / "proc/self/ns/pid").symlink_to(HOST_NAMESPACE)

    def start(self, pid: int = 41, **environ: str) -> Bench:
        self._write()
        context = ProbeContext(pid, environ=environ, root=self.root)
        self.tasks = {task.name: task for task in self.probe.start(context, self.out)}
        return self

    def tick(self, *names: str, times: int = 1) -> None:
        """Run tasks (all but the waiting one without a name), each time a second later."""
        self._write()
        for _ in range(times):
            self.clock.now += 1_000_000_000
            for name in names or [n for n in self.tasks if n != "gpu-events"]:
                self.tasks[name].run(self.out)

    def telemetry(self) -> Telemetry:
        self.file.flush()
        return read_telemetry(self.file.path)

    def _write(self) -> None:
        write_answers(self.folder / "answers", self.gpus, **self.more)
