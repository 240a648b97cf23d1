"""The target with PyTorch's profiler in each of its processes that use torch, from ``launch`` to ``close``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infprof.errors import EXIT_COLLECTOR, InfprofError
from infprof.probes import Unavailable
from infprof.probes.nsys_command import CapturePlan
from infprof.probes.nsys_messages import Note
from infprof.probes.nsys_processes import lives
from infprof.probes.nsys_target import Stream
from infprof.probes.torch_backend import gathering
from infprof.probes.torch_backend.gathering import Answer
from infprof.probes.torch_backend.interpreter import interpreter_of
from infprof.reports.files import replace_file
from infprof.target import exit_code_of

_INJECTED = Path(__file__).with_name("injected.py")
_CONTROL = ".control"
# The longest part of a capture that is kept of a process; what is longer is the last one of these.
PART_S = 30.0
_POLL_S = 0.05
_IDLE_PATIENCE_S = 5.0
_LEAST_FREE_BYTES = 256 << 20


class TorchBackend:
    """One target under PyTorch's profiler. ``notes`` grows with what was left out or went wrong."""

    name = "torch"
    why = "the program is Python, and PyTorch brings a profiler of its own"
    waits_for_children = False

    def __init__(self, plan: CapturePlan, command: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
        """Look whether the target can be reached; nothing is started.

        Raises Unavailable where the profiler cannot get into it.
        """
        self.plan = plan
        self.notes: list[Note] = []
        self.version: tuple[int, ...] = ()
        self.is_python = _require_reachable(command, environ)
        if os.pathsep in str(plan.folder):
            raise Unavailable(
                f"{plan.folder} has a {os.pathsep} in its name, and so cannot be on PYTHONPATH, by which PyTorch's "
                "profiler gets into the program: name another folder with -o."
            )
        self._control = plan.folder / _CONTROL
        self._process: subprocess.Popen[bytes] | None = None
        self._started = False
        self._raw: list[Path] = []
        self._answers: list[Answer] = []
        self._found: dict[str, dict[str, Any]] = {}

    # --- the target ---------------------------------------------------------------------------------------------------

    def launch(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> subprocess.Popen[bytes]:
        """Start the target; the streams are its own, as for Popen. Raises OSError as Popen does."""
        self._control.mkdir()
        shutil.copyfile(_INJECTED, self._control / "sitecustomize.py")
        if self.plan.whole:
            self.start()
        paths = [str(self._control), *filter(None, [environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            list(command),
            env={**environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
        )
        return self._process

    def target_pid(self) -> int | None:
        """The pid of the target; None before ``launch``."""
        return None if self._process is None else self._process.pid

    def target_exit_code(self) -> int | None:
        """The target's exit code (128 + n: ended by signal n); None while it runs."""
        return None if self._process is None else exit_code_of(self._process)

    # --- collecting ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the capture in all processes of the target, those to come as well. Raises InfprofError (exit 4)."""
        settings = {"start_unix_s": time.time(), "part_s": PART_S}
        self._tell("start", json.dumps(settings))
        self._started = True

    def _tell(self, what: str, text: str = "") -> None:
        try:
            replace_file(self._control / what, text.encode())
        except OSError as error:
            raise InfprofError(
                f"the profiler could not be told to {what}: {error.strerror or error}.", EXIT_COLLECTOR
            ) from None

    def stop(self, timeout_s: float = 300) -> list[Path]:
        """Close the capture, and wait until the processes that live have written their traces, which are returned."""
        if not self._control.is_dir():
            return list(self._raw)
        if not (self._control / "stop").exists():
            self._tell("stop")
        deadline = time.monotonic() + timeout_s
        patience = time.monotonic() + _IDLE_PATIENCE_S
        while late := [answer for answer in gathering.answers(self._control) if _still_at_work(answer)]:
            now = time.monotonic()
            if now >= patience and all(answer.state == "waiting" for answer in late):
                # What has nothing to write answers at once, unless it has become another program by now.
                break
            if now >= deadline:
                names = ", ".join(str(answer.pid) for answer in late)
                self._note("trace-late", f"Process {names} had not written its trace after {timeout_s:.0f} s.")
                break
            time.sleep(_POLL_S)
        return self._gather()

    def finish(self, timeout_s: float) -> list[Path]:
        """All traces, once the target has ended; its children may live longer."""
        return self.stop(timeout_s) if self._process is not None else []

    def _gather(self) -> list[Path]:
        self._answers = gathering.answers(self._control)
        if not any(_still_at_work(answer) for answer in self._answers):
            for path in gathering.rescue_unfinished(self.plan.folder):
                self._note("trace-cut", f"{path.name} is cut short: its process ended while it wrote the trace.")
        self._raw = gathering.traces(self.plan.folder)
        return list(self._raw)

    def watch_space(self) -> Note | None:
        """A note when the disk runs short; to be asked about once a second: it also tells the target that we live."""
        if not self._started or not self._control.is_dir():
            return None
        os.utime(self._control / "start")
        free = shutil.disk_usage(self.plan.folder).free
        if free >= _LEAST_FREE_BYTES:
            return None
        sentence = f"{self.plan.folder} has {free >> 20} MB free: the capture has to end here."
        return Note("space-short", sentence, "Make room, or name another place with -o.")

    def export(self, report: Path) -> Path:
        """A process's trace as the bundle keeps it. Raises InfprofError (exit 4); the trace stays as it was then."""
        try:
            trace, gpu_work = gathering.compress(report)
        except OSError as error:
            raise InfprofError(
                f"{report.name} could not be compressed: {error.strerror or error}. It can be analysed as it is.",
                EXIT_COLLECTOR,
            ) from None
        name = report.name[: -len(gathering.TRACE)]
        self._found[name] = {"trace": trace.name, "gpu_work": gpu_work, "size": trace.stat().st_size}
        return trace

    def ranked(self, traces: Sequence[Path]) -> list[Path]:
        """The traces, the one to be diagnosed last: most work on the GPU, then most of all."""
        by_trace = {row["trace"]: row for row in self._found.values()}
        return sorted(traces, key=lambda path: (by_trace[path.name]["gpu_work"], by_trace[path.name]["size"]))

    def details(self) -> dict[str, Any]:
        """What the manifest keeps of the processes that use torch; notes which are not recorded, or not as a whole."""
        self._note_processes()
        rows = []
        for answer in self._answers:
            found = self._found.get(answer.name, {})
            rows.append(gathering.described(answer, found.get("trace"), found.get("gpu_work", 0)))
        return {"processes": rows}

    def why_no_trace(self) -> Note:
        """Why no process left a trace."""
        if not self._answers:
            return Note(
                "no-torch",
                "No process of the program imported torch where PyTorch's profiler could get in, so no timeline was recorded.",
                "Is it a PyTorch program? If not, record with nsys; `python -I`, -E and -S keep the profiler out.",
            )
        if not self._started:
            return Note("no-report", "The program ended before the capture began, so no timeline was recorded.", None)
        reasons = "; ".join(dict.fromkeys(_why_not(answer) for answer in self._answers))
        return Note("no-report", f"PyTorch's profiler recorded none of the processes: {reasons}.", None)

    def _note_processes(self) -> None:
        for answer in self._answers:
            recorded = answer.name in self._found
            what = f"Process {answer.pid} ({_short(answer.command)})"
            if not recorded and self._found:
                self._note("process-not-recorded", f"{what} was not recorded: {_why_not(answer)}.")
            elif recorded and answer.parts > 1:
                self._note(
                    "recorded-in-parts",
                    f"{what} was recorded in {answer.parts} parts, of which one of {answer.kept_s:.1f} s is kept.",
                    f"Capture {PART_S:.0f} s at most (--duration), from a moment at which all processes run.",
                )
            elif recorded and answer.state != "done":
                self._note("trace-partial", f"{what} ended without notice: its trace ends earlier than itself.")

    def _note(self, code: str, sentence: str, remedy: str | None = None) -> None:
        note = Note(code, sentence, remedy)
        if note not in self.notes:
            self.notes.append(note)

    # --- after --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave no control folder behind: what still runs ends its profiler by itself then. May be called again."""
        for _ in range(3):
            # A process that starts at this moment may be writing there.
            shutil.rmtree(self._control, ignore_errors=True)
            if not self._control.exists():
                return
            time.sleep(_POLL_S)


def _require_reachable(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the command is a Python program. Raises Unavailable for one that keeps the profiler out."""
    interpreter = interpreter_of(command, environ)
    if interpreter is not None and interpreter.isolating is not None:
        raise Unavailable(
            f"{Path(interpreter.words[0]).name} {interpreter.isolating} keeps out PyTorch's profiler, which gets into the "
            "program by PYTHONPATH and sitecustomize: leave that option out."
        )
    return interpreter is not None


def _still_at_work(answer: Answer) -> bool:
    return answer.state in ("waiting", "recording") and lives(answer.pid)


def _why_not(answer: Answer) -> str:
    if answer.state == "failed":
        return f"the profiler failed ({answer.reason})"
    if answer.state != "done":
        return "it ended without notice"
    return answer.reason or "it ended before the capture began"


def _short(command: Sequence[str]) -> str:
    text = " ".join([Path(command[0]).name, *command[1:]]) if command else "?"
    return text if len(text) <= 60 else text[:59] + "…"
