"""A recorder that runs inside the processes of a Python target: how it gets in, and how it is told to start and to stop.

A folder of the run stands first on the target's PYTHONPATH and holds a ``sitecustomize.py``; control is by files in it
(see ``injected.py``), and each process answers in a file of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

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

_CONTROL = ".control"
_POLL_S = 0.05
_IDLE_PATIENCE_S = 5.0
_LEAST_FREE_BYTES = 256 << 20


class InjectedBackend:
    """One target with a recorder in each of its processes that need one; what it records is the subclass's business.

    ``recorder``: what users know it as. ``injected``: the files of the control folder, by their name there. ``modules``:
    a process that imports one of these needs a recorder. ``notes`` grows with what was left out or went wrong.
    """

    name: str
    why: str
    recorder: str
    injected: ClassVar[Mapping[str, Path]]
    modules: ClassVar[Sequence[str]]
    waits_for_children = False

    def __init__(self, plan: CapturePlan, command: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
        """Look whether the target can be reached; nothing is started.

        Raises Unavailable where the recorder cannot get into it.
        """
        self.plan = plan
        self.notes: list[Note] = []
        self.version: tuple[int, ...] = ()
        self.is_python = _require_reachable(self.recorder, command, environ)
        if os.pathsep in str(plan.folder):
            raise Unavailable(
                f"{plan.folder} has a {os.pathsep} in its name, and so cannot be on PYTHONPATH, by which "
                f"{self.recorder} gets into the program: name another folder with -o."
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
        for name, path in self.injected.items():
            shutil.copyfile(path, self._control / name)
        (self._control / "modules").write_text(" ".join(self.modules))
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
        now = time.time()
        self._tell("start", json.dumps({"start_unix_s": now, **self._settings()}))
        self._started = True

    def _settings(self) -> dict[str, Any]:
        """What the recorder is told beside the moment of the start."""
        return {}

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
        while late := [answer for answer in gathering.answers(self._control) if still_at_work(answer)]:
            now = time.monotonic()
            if now >= patience and not any(answer.state == "recording" and has_recorder(answer) for answer in late):
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
        """What the processes have left, asked for when those that live have written it."""
        raise NotImplementedError

    def watch_space(self) -> Note | None:
        """A note when the disk runs short; to be asked about once a second: it also tells the target that we live."""
        if not self._started or not self._control.is_dir():
            return None
        now = time.time()
        try:
            # Our clock, not that of a file server, which may be another.
            os.utime(self._control / "start", (now, now))
            free = shutil.disk_usage(self.plan.folder).free
        except OSError:
            return None
        if free >= _LEAST_FREE_BYTES:
            return None
        sentence = f"{self.plan.folder} has {free >> 20} MB free: the capture has to end here."
        return Note("space-short", sentence, "Make room, or name another place with -o.")

    def ranked(self, traces: Sequence[Path]) -> list[Path]:
        """The traces, the one to be diagnosed last: most work on the GPU, then most of all."""
        by_trace = {row["trace"]: row for row in self._found.values()}
        return sorted(traces, key=lambda path: (by_trace[path.name]["gpu_work"], by_trace[path.name]["size"]))

    def details(self) -> dict[str, Any]:
        """What the manifest keeps of the processes that were reached; notes which are not recorded, or not as a whole."""
        self._note_processes()
        rows = []
        for answer in self._answers:
            found = self._found.get(answer.name, {})
            rows.append(gathering.described(answer, found.get("trace"), found.get("gpu_work", 0)))
        return {"processes": rows}

    def _no_report(self) -> Note:
        """Why none of the processes that were reached left a trace."""
        if not self._started:
            return Note("no-report", "The program ended before the capture began, so no timeline was recorded.", None)
        reasons = "; ".join(dict.fromkeys(why_not(answer) for answer in self._answers))
        recorder = self.recorder[0].upper() + self.recorder[1:]
        return Note("no-report", f"{recorder} recorded none of the processes: {reasons}.", None)

    def _note_processes(self) -> None:
        for answer in self._answers:
            recorded = answer.name in self._found
            what = f"Process {answer.pid} ({short(answer.command)})"
            if not recorded and self._found:
                self._note("process-not-recorded", f"{what} was not recorded: {why_not(answer)}.")
            elif recorded:
                self._note_recorded(what, answer)

    def _note_recorded(self, what: str, answer: Answer) -> None:
        if answer.remarks:
            self._note("recording-limited", f"{what}: {'; '.join(answer.remarks)}.")
        if answer.state == "failed":
            self._note("trace-partial", f"{what} was recorded in part: {why_not(answer)}.")
        elif answer.state != "done":
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


def _require_reachable(recorder: str, command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the command is a Python program. Raises Unavailable for one that keeps the recorder out."""
    interpreter = interpreter_of(command, environ)
    if interpreter is not None and interpreter.isolating is not None:
        raise Unavailable(
            f"{Path(interpreter.words[0]).name} {interpreter.isolating} keeps out {recorder}, which gets into the "
            "program by PYTHONPATH and sitecustomize: leave that option out."
        )
    return interpreter is not None


def still_at_work(answer: Answer) -> bool:
    """Whether a process may still write its trace."""
    return answer.state in ("waiting", "recording") and lives(answer.pid)


def has_recorder(answer: Answer) -> bool:
    """Whether the thread lives that records the process: it ends for each fork, and for good with an exec."""
    return answer.thread is None or Path(f"/proc/{answer.pid}/task/{answer.thread}").exists()


def why_not(answer: Answer) -> str:
    """Why a process left no trace; part of a sentence."""
    if answer.state == "failed":
        return f"the profiler failed ({answer.reason})"
    if answer.state != "done":
        return "it ended without notice"
    return answer.reason or "it ended before the capture began"


def short(command: Sequence[str]) -> str:
    """A command line for a sentence."""
    text = " ".join([Path(command[0]).name, *command[1:]]) if command else "?"
    return text if len(text) <= 60 else text[:59] + "…"
