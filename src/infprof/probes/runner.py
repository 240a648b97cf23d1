"""Drives probes: each task in a thread of its own, on a fixed beat, with its cost and its failures on record."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infprof.probes import Probe, ProbeContext, Task, Unavailable
from infprof.probes.recorder import Recorder, TelemetryFile

# A task that fails this often in a row is not asked again.
GIVE_UP_AFTER = 3
_JOIN_S = 5.0


@dataclass
class ProbeReport:
    """What became of a probe: ``ok``, ``unavailable`` (with the reason) or ``failed``; for the manifest."""

    name: str
    state: str = "ok"
    reason: str | None = None
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)


class _Running(threading.Thread):
    def __init__(self, task: Task, out: Recorder, report: ProbeReport, target: Path) -> None:
        super().__init__(name=f"infprof-{report.name}-{task.name}", daemon=True)
        self._task, self._out, self._report, self._target = task, out, report, target
        self._given_up = False
        self._stop_asked = threading.Event()
        self._stats: dict[str, Any] = {
            "period_s": task.period_s,
            "ticks": 0,
            "errors": 0,
            "cpu_s": 0.0,
            "longest_s": 0.0,
        }
        report.tasks[task.name] = self._stats

    def ask_to_stop(self) -> None:
        self._stop_asked.set()

    def run(self) -> None:
        due, in_a_row = time.monotonic(), 0
        while True:
            in_a_row = 0 if self._tick() else in_a_row + 1
            if self._given_up or in_a_row >= GIVE_UP_AFTER:
                self._give_up(in_a_row)
                return
            # Missed beats are left out, not made up for.
            due = max(due + self._task.period_s, time.monotonic())
            if self._stop_asked.wait(max(due - time.monotonic(), 0)):
                # A program that has ended has nothing more to say.
                if self._task.at_end and self._target.exists():
                    self._tick()
                return

    def _tick(self) -> bool:
        began = time.monotonic()
        try:
            self._task.run(self._out)
        except Unavailable as error:
            self._given_up = True
            self._report.reason = str(error)
        except Exception as error:  # a probe must never end the run
            self._stats["errors"] += 1
            self._stats["last_error"] = f"{type(error).__name__}: {error}"
            return False
        finally:
            self._stats["ticks"] += 1
            self._stats["longest_s"] = round(max(self._stats["longest_s"], time.monotonic() - began), 6)
            self._stats["cpu_s"] = round(time.thread_time(), 6)
        return True

    def _give_up(self, failures: int) -> None:
        if failures:
            self._report.state = "failed"
            self._report.reason = f"{self._task.name} failed {failures} times: {self._stats['last_error']}"


class ProbeRunner:
    """Starts and stops probes. A probe that cannot work or fails is reported and disturbs nothing else."""

    def __init__(self, probes: Sequence[Probe], file: TelemetryFile, context: ProbeContext) -> None:
        self._file, self._context = file, context
        self._probes = list(probes)
        self._started: list[tuple[Probe, Recorder]] = []
        self._threads: list[_Running] = []
        self.reports: list[ProbeReport] = []

    def start(self) -> None:
        """Start every probe; the first sample of each follows at once."""
        for probe in self._probes:
            report = ProbeReport(probe.name)
            self.reports.append(report)
            out = self._file.recorder(probe.name, probe.signals)
            try:
                tasks = probe.start(self._context, out)
            except Unavailable as error:
                report.state, report.reason = "unavailable", str(error)
                continue
            except Exception as error:  # a defect of a probe is no reason to lose the run
                report.state, report.reason = "failed", f"{type(error).__name__}: {error}"
                continue
            self._started.append((probe, out))
            target = self._context.path(f"/proc/{self._context.pid}")
            self._threads += [_Running(task, out, report, target) for task in tasks]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop all tasks and probes; what is stuck in a call is left to end by itself."""
        for thread in self._threads:
            thread.ask_to_stop()
        for thread in self._threads:
            thread.join(_JOIN_S)
        for probe, out in self._started:
            try:
                probe.stop(out)
            except Exception as error:  # as above
                report = next(r for r in self.reports if r.name == probe.name)
                report.reason = report.reason or f"{type(error).__name__}: {error}"
        self._started, self._threads = [], []
