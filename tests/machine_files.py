"""A small machine as files: /proc, /sys and cgroup trees that probes read, with a clock that moves when told to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infprof.measures.telemetry import TelemetryScope
from infprof.probes import Probe, ProbeContext, Task
from infprof.probes.recorder import Clock, TelemetryFile
from infprof.telemetry import Telemetry, read_telemetry

SECOND = 1_000_000_000
START = 1_000 * SECOND


class HandClock(Clock):
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.time_ns = START

    def now_ns(self) -> int:
        return self.time_ns


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@dataclass
class Machine:
    """Files under ``root``; processes and threads are written with the numbers that matter, the rest is filler."""

    root: Path
    cpu_lines: list[str] = field(default_factory=lambda: ["cpu  0 0 0 0 0 0 0 0 0 0", "cpu0 0 0 0 0 0 0 0 0 0 0"])

    def __post_init__(self) -> None:
        self.file("proc/uptime", "500.00 900.00\n")
        self.file("proc/loadavg", "3.50 1.0 1.0 2/300 4000\n")
        self.file("proc/meminfo", "MemTotal:       16000 kB\nMemFree:        1000 kB\nMemAvailable:   4000 kB\n")
        self.file("proc/vmstat", "nr_free_pages 9\npswpin 10\npswpout 20\n")
        self.file("proc/stat", "\n".join([*self.cpu_lines, "intr 1 2 3", ""]))

    def file(self, path: str, text: str) -> None:
        write(self.root / path, text)

    def process(
        self,
        pid: int,
        parent: int = 1,
        session: int = 1,
        ticks: tuple[int, int] = (0, 0),
        faults: int = 0,
        pages: tuple[int, int] = (100, 40),
        start: int = 100,
        name: str = "server",
    ) -> None:
        """``ticks`` user and system; ``pages`` resident and shared; ``start`` in ticks since boot."""
        self.file(f"proc/{pid}/stat", stat_line(pid, name, parent, session, ticks, faults, start, 0))
        self.file(f"proc/{pid}/statm", f"900 {pages[0]} {pages[1]} 1 0 9 0\n")
        self.file(f"proc/{pid}/status", "Name:\tserver\nCpus_allowed_list:\t0-3\nMems_allowed_list:\t0-1\n")

    def thread(
        self,
        pid: int,
        tid: int,
        run: int = 0,
        wait: int = 0,
        turns: int = 1,
        ticks: tuple[int, int] = (0, 0),
        switches: tuple[int, int] = (0, 0),
        cpu: int = 0,
        name: str = "engine",
    ) -> None:
        """``run`` and ``wait`` in ns as schedstat has them; ``switches`` voluntary and involuntary."""
        folder = f"proc/{pid}/task/{tid}"
        self.file(f"{folder}/schedstat", f"{run} {wait} {turns}\n")
        self.file(f"{folder}/stat", stat_line(tid, name, 1, 1, ticks, 0, 100, cpu))
        voluntary, involuntary = switches
        self.file(
            f"{folder}/status",
            f"Name:\t{name}\nvoluntary_ctxt_switches:\t{voluntary}\nnonvoluntary_ctxt_switches:\t{involuntary}\n",
        )

    def cgroup2(self, pid: int = 10, path: str = "/pod/app", mount_root: str = "/") -> str:
        """Mount version 2 and put the process there; the group's folder, from the root."""
        self.file(f"proc/{pid}/cgroup", f"0::{path}\n")
        self.file("proc/self/mountinfo", f"30 23 0:26 {mount_root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
        below = path.removeprefix(mount_root) if mount_root != "/" else path
        return "sys/fs/cgroup" + below


def stat_line(
    number: int, name: str, parent: int, session: int, ticks: tuple[int, int], faults: int, start: int, cpu: int
) -> str:
    """A stat file by the field numbers of proc(5)."""
    fields = ["0"] * 52
    for index, value in {
        3: "S",
        4: parent,
        5: session,
        6: session,
        12: faults,
        14: ticks[0],
        15: ticks[1],
        20: 2,
        22: start,
        39: cpu,
    }.items():
        fields[index - 1] = str(value)
    return f"{number} ({name}) {' '.join(fields[2:])}\n"


class Run:
    """A probe on a machine's files: ``beat`` moves the clock by a second and calls all tasks; ``end`` reads it back."""

    def __init__(self, probe: Probe, machine_root: Path, folder: Path, pid: int = 10) -> None:
        self.clock = HandClock()
        self._path = folder / "telemetry.sqlite"
        self.file = TelemetryFile(self._path, self.clock)
        self.probe = probe
        self.out = self.file.recorder(probe.name, probe.signals)
        self.tasks: Sequence[Task] = probe.start(ProbeContext(pid, root=machine_root), self.out)
        self._first = True

    def beat(self, seconds: float = 1.0) -> None:
        """All tasks once; the first beat is at the start of the clock."""
        if not self._first:
            self.clock.time_ns += round(seconds * SECOND)
        self._first = False
        for task in self.tasks:
            task.run(self.out)

    def end(self) -> Telemetry:
        """Stop the probe and read what it recorded."""
        self.probe.stop(self.out)
        self.file.close()
        return read_telemetry(self._path)

    def scope(self, gpu: str | None = None) -> TelemetryScope:
        """The whole run as a window."""
        return TelemetryScope(START, self.clock.time_ns + 1, gpu)
