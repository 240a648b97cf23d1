"""Nsight Systems as the recorder of a run: the target under nsys, in an interactive session of its own.

A session (``nsys start``, ``launch``, ``stop``) and not ``nsys profile``: stopping it leaves the target alive, and an
interrupt does not lose the report. All calls of one run share one environment, because nsys keeps its session's files
below TMPDIR and finds no session of another one. The target's standard streams are the caller's own; nsys's words go to
a file beside them and are read for what became of the reports, since its exit code does not say.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from infprof import doctor
from infprof.doctor import Machine
from infprof.errors import EXIT_COLLECTOR, InfprofError
from infprof.probes import Unavailable, nsys_checks, nsys_messages, nsys_processes, nsys_target
from infprof.probes.nsys_command import Answer, CapturePlan, CommandLines, NsysHelp, call, export_sqlite
from infprof.probes.nsys_messages import Note
from infprof.probes.nsys_target import Stream

__all__ = ["CapturePlan", "Note", "NsysBackend", "usable_nsys"]

_START_LIMIT_S = 60.0
_SHORT_LIMIT_S = 15.0
_GRACE_S = 2.0
_STATE_POLL_S = 0.25


class NsysBackend:
    """One target under nsys, from ``launch`` to ``close``. Not safe for use from several threads.

    ``version`` is that of the nsys used; ``notes`` grows with what was left out, guessed, or went wrong.
    """

    name = "nsys"
    why = "nsys is installed"
    # It records nothing once its own children are taken from it.
    waits_for_children = True

    def __init__(
        self,
        plan: CapturePlan,
        environ: Mapping[str, str] = os.environ,
        machine: Machine | None = None,
        nsys: Path | None = None,
    ) -> None:
        """Find nsys and ask what may be recorded here; nothing is started.

        ``environ`` is the target's. Raises Unavailable where there is no nsys that can do this or no place for its
        data, UsageError for ``extra_args`` that cannot be.
        """
        self.plan = plan
        self.notes: list[Note] = []
        self._machine = machine or Machine(environ=dict(environ))
        self._environ = dict(environ)
        self._nsys, self.version = usable_nsys(self._machine, nsys)
        self._help = NsysHelp(self._nsys, self._environ)
        self._require_sessions()
        self._note(nsys_checks.require_room(self._machine, plan.folder, self._spool()))
        self._lines = CommandLines(self._help, plan, self._wish_gpu_metrics(), self._wish_sampling(), self.notes)
        self._session = ""
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._collecting = False
        self._hung = False
        self._agents: list[psutil.Process] = []
        self._streams: list[Path] = []
        self._output = plan.folder / "capture"
        self._words: list[str] = []
        self._reports: list[Path] = []
        self._latest: list[Path] = []

    # --- before ------------------------------------------------------------------------------------------------------

    def _require_sessions(self) -> None:
        if not (self._help.has("start", "--session-new") and self._help.has("launch", "--session")):
            raise Unavailable(f"{self._nsys} knows no sessions: it is too old or does not run. Install a newer nsys.")
        if self.version < doctor.OLDEST_NSYS:
            fault = doctor.nsys_fault(self.version)
            self._note(Note("nsys-version", f"The nsys found is {fault}.", "Install a newer nsys."))

    def _wish_gpu_metrics(self) -> bool:
        obstacle = nsys_checks.gpu_metrics_obstacle(self._machine) if self.plan.gpu_metrics else None
        self._note(obstacle)
        return self.plan.gpu_metrics and obstacle is None

    def _wish_sampling(self) -> bool:
        obstacle = nsys_checks.sampling_obstacle(self._machine, self.version) if self.plan.sampling else None
        self._note(obstacle)
        return self.plan.sampling and obstacle is None

    def _note(self, note: Note | None) -> None:
        if note is not None and note not in self.notes:
            self.notes.append(note)

    def _spool(self) -> Path:
        return Path(self._environ.get("TMPDIR") or "/tmp")

    # --- the target --------------------------------------------------------------------------------------------------

    def launch(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> subprocess.Popen[bytes]:
        """Start the target under nsys, out of reach of the terminal's Ctrl-C; returns once the target runs.

        The process returned is that of ``nsys launch``, which ends with the target. The streams are the target's, as
        for Popen. Raises FileNotFoundError or PermissionError where the command is no program, InfprofError (exit 4)
        where nsys cannot start it: the target has not run then.
        """
        nsys_target.require_program(command[0], environ)
        self._environ = self._with_nvtx_strings(environ)
        self._note(nsys_target.spawn_hint(command, environ))
        streams = (stdin, stdout, stderr)
        failure = self._try_launch(command, streams)
        if failure is not None and failure.code in ("nsys-failed", "agent-lost"):
            # Now and then nsys does not find the agent that it has just started; a second attempt does.
            self._note(Note("nsys-tried-twice", f"nsys started at the second attempt. {failure.sentence}", None))
            failure = self._try_launch(command, streams)
        if failure is not None and self._lines.gpu_metrics:
            self._without_gpu_metrics(failure)
            failure = self._try_launch(command, streams)
        if failure is not None or self._process is None:
            self.close()
            raise _collector_error("nsys could not start the program", failure or nsys_messages.explain(""))
        return self._process

    def _with_nvtx_strings(self, environ: Mapping[str, str]) -> dict[str, str]:
        name = "NSYS_NVTX_PROFILER_REGISTER_ONLY"
        if self.plan.trigger != "nvtx" or name in environ:
            return dict(environ)
        self._note(Note("nvtx-strings", f"{name}=0 is set for the program: else plain NVTX names open no range.", None))
        return {**environ, name: "0"}

    def _try_launch(self, command: Sequence[str], streams: Sequence[Stream]) -> Note | None:
        """One attempt in a fresh session; what went wrong, or None."""
        self._begin_session()
        if self.plan.whole:
            answer = self._call_start("--session-new")
            if answer.code != 0:
                return _failure(answer)
        option = "--session" if self.plan.whole else "--session-new"
        nsys = (str(self._nsys), "launch", f"{option}={self._session}", *self._lines.launch())
        self._process, self._log, self._pid = nsys_target.launch(nsys, command, self._environ, streams)
        self._remember_streams()
        return nsys_messages.explain(self._log_text()) if self._pid is None else None

    def _begin_session(self) -> None:
        self._end_session()
        self._session = f"infprof-{os.getpid()}-{secrets.token_hex(4)}"
        self._process, self._pid = None, None
        self._words.clear()

    def _log_text(self) -> str:
        """What ``nsys launch`` has said so far."""
        if self._log is None or self._log.closed:
            return ""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def target_pid(self) -> int | None:
        """The pid of the target itself, not of nsys; None before ``launch``."""
        return self._pid

    def target_exit_code(self) -> int | None:
        """The target's exit code (128 + n: ended by signal n); None while it runs, or where nsys lost sight of it."""
        code = self._process.poll() if self._process is not None else None
        lost = self._pid is None or nsys_messages.lost_agent(self._log_text())
        return None if code is None or code < 0 or lost else code

    # --- collecting --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin collecting in the target launched; again after ``stop``, into a further report.

        Raises InfprofError (exit 4) where nsys does not begin; the target goes on.
        """
        if self._collecting:
            return
        answer = self._call_start("--session")
        if answer.code not in (0, None) and self._lines.gpu_metrics:
            self._without_gpu_metrics(_failure(answer))
            answer = self._call_start("--session")
        if answer.code != 0:
            raise _collector_error("nsys did not begin to collect", _failure(answer))
        self._remember_streams()

    def _call_start(self, session: str) -> Answer:
        self._output = _free_name(self.plan.folder, "capture")
        answer = self._call(
            "start", f"{session}={self._session}", *self._lines.start(self._output), limit_s=_START_LIMIT_S
        )
        self._collecting = answer.code == 0
        self._latest = []
        return answer

    def _without_gpu_metrics(self, failure: Note) -> None:
        self._lines.gpu_metrics = False
        self._note(nsys_checks.gpu_metrics_refused(self._machine, failure))

    def _call(self, command: str, *arguments: str, limit_s: float) -> Answer:
        answer = call([self._nsys, command, *arguments], limit_s, self._environ)
        self._words.append(answer.text)
        return answer

    def stop(self, timeout_s: float = 300) -> list[Path]:
        """End collecting and wait for its reports, which are returned; the target goes on living.

        Called again, it returns the same. What goes wrong is in ``notes``.
        """
        if not self._collecting:
            return list(self._latest)
        lived = self._target_lives()
        deadline = time.monotonic() + timeout_s
        self._remember_streams()
        answer = self._call("stop", f"--session={self._session}", limit_s=timeout_s)
        if answer.code is None:
            self._give_up_waiting(timeout_s)
        elif answer.code != 0:
            # The target has ended meanwhile, and nsys is making the report already.
            self._await_generation(deadline)
        self._collecting = False
        if lived and not self._target_lives():
            self._note(Note("target-ended-at-stop", "The program ended while nsys was stopping.", None))
        return self._gather(expected=True)

    def _await_generation(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            state = self._state()
            if state is None or state == "Launched":
                break
            time.sleep(_STATE_POLL_S)
        else:
            self._give_up_waiting(0.0)
        if self._process is not None and not self._target_lives():
            self._wait_process(deadline)

    def _state(self) -> str | None:
        """The state of the session as nsys lists it; None when it is gone."""
        text = call([self._nsys, "sessions", "list"], _SHORT_LIMIT_S, self._environ).text
        match = re.search(rf"(\w+)\s+\d+\s+{self._session}\s*$", text, re.M)
        return match[1] if match else None

    def _give_up_waiting(self, waited_s: float) -> None:
        self._hung = True
        after = f" after {waited_s:.0f} s" if waited_s else ""
        sentence = f"nsys had not written its report{after}."
        self._note(Note("nsys-hung", sentence, "Give it more time, or record for a shorter time."))

    def finish(self, timeout_s: float) -> list[Path]:
        """All reports, once the target has ended and nsys has written them (at most ``timeout_s`` seconds later)."""
        if self._process is None:
            return []
        deadline = time.monotonic() + timeout_s
        self._remember_streams()
        collecting = self._collecting
        if not self._wait_process(deadline):
            self._give_up_waiting(timeout_s)
        elif collecting and not nsys_messages.generated_paths(self._log_text()):
            # "nsys launch" was killed, or left the report to the agent.
            self.stop(max(deadline - time.monotonic(), 1.0))
        self._collecting = False
        if self._hung and not self._target_lives():
            self._end_session()
        self._note(_ended_by_signal(self.target_exit_code()) if collecting else None)
        self._gather(expected=collecting)
        return list(self._reports)

    def _wait_process(self, deadline: float) -> bool:
        assert self._process is not None
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def watch_space(self) -> Note | None:
        """A note when the disk runs short and the capture should be stopped; to be asked about once a second."""
        if not self._collecting:
            return None
        streams = [path for path in self._streams if path.exists()]
        if not streams:
            # Asking an agent for its open files costs milliseconds.
            self._remember_streams()
            streams = [path for path in self._streams if path.exists()]
        recorded = sum(path.stat().st_size for path in streams)
        return nsys_checks.space_running_out(self._machine, self.plan.folder, self._spool(), recorded)

    def _remember_streams(self) -> None:
        """Note where the agent keeps its recording, as long as it can be asked."""
        if not any(agent.is_running() for agent in self._agents):
            self._agents = nsys_processes.session_processes(self._session) if self._session else []
        found = nsys_processes.open_streams(self._agents)
        self._streams += [path for path in found if path not in self._streams]

    # --- reports -----------------------------------------------------------------------------------------------------

    def _gather(self, expected: bool) -> list[Path]:
        """Take up what nsys has written since the last time: listed by it, or whole and of the expected name."""
        text = "\n".join([*self._words, self._log_text()])
        before = len(self._reports)
        for path in nsys_messages.generated_paths(text):
            # Without its importer nsys lists the raw recording here.
            if path.suffix != ".qdstrm":
                self._take(path)
        named = [p for end in ("nsys-rep", "qdrep") for p in self.plan.folder.glob(f"{self._output.name}.*{end}")]
        for path in sorted(named, key=_natural):
            self._take(path) if nsys_messages.is_whole_report(path) else self._set_aside(path)
        self._save_streams(text)
        for note in nsys_messages.warnings(text):
            self._note(note)
        self._reports.sort(key=_natural)
        if len(self._reports) > before:
            self._latest = [p for p in self._reports if p.name.startswith(self._output.name + ".")]
        elif expected and not self._latest:
            self._note(self._why_no_report(text))
        return list(self._latest)

    def _take(self, path: Path) -> None:
        if path in self._reports or not path.is_file() or path.stat().st_size == 0:
            return
        if path.parent != self.plan.folder:
            # nsys puts a report that it could not create under its name into the spool folder.
            path = _moved(path, self.plan.folder, self._output.name)
            self._note(
                Note("report-elsewhere", f"nsys could not write its report in place; it is now {path.name}.", None)
            )
        self._reports.append(path)

    def _set_aside(self, path: Path) -> None:
        if path in self._reports or self._still_writing():
            return
        partial = path.rename(path.with_name(path.name + ".partial"))
        sentence = f"{partial.name} is only a part of a report: nsys did not finish writing it."
        self._note(Note("report-partial", sentence, "Free space there, or record for a shorter time."))

    def _still_writing(self) -> bool:
        return self._hung and bool(nsys_processes.session_processes(self._session))

    def _save_streams(self, text: str) -> None:
        """Take recordings that nsys has not turned into a report out of the spool folder, and name them."""
        strays = dict.fromkeys([*nsys_messages.stream_paths(text), *self._streams, *self.plan.folder.glob("*.qdstrm")])
        for path in strays:
            if path.is_file() and path.stat().st_size > 0 and not self._still_writing():
                self._note_stream(path)

    def _note_stream(self, path: Path) -> None:
        if path.parent != self.plan.folder:
            path = _moved(path, self.plan.folder, self._output.name)
        sentence = f"nsys left {path.name}, a recording that it has not turned into a report."
        self._note(
            Note("stray-stream", sentence, f"QdstrmImporter --input-file {path.name}, from the host part of nsys.")
        )

    def _why_no_report(self, text: str) -> Note:
        if self._hung:
            return Note("no-report", "There is no report, because nsys had to be ended.", None)
        failure = nsys_messages.explain(text)
        if self.plan.trigger != "session" and failure.code in ("nsys-failed", "session-state"):
            what = (
                "cudaProfilerStart was never called" if self.plan.nvtx_range is None else "the NVTX range never began"
            )
            remedy = "Let the program open the range while it runs under nsys, or capture without a trigger."
            return Note("range-never-entered", f"There is no report, because {what} while nsys listened.", remedy)
        return Note("no-report", f"There is no report. {failure.sentence}", failure.remedy)

    def ranked(self, traces: Sequence[Path]) -> list[Path]:
        """The traces as they are: of several captures the last one is the warmest."""
        return list(traces)

    def details(self) -> dict[str, Any]:
        """What the manifest says of nsys beside its name and version: nothing."""
        return {}

    def why_no_trace(self) -> Note:
        """Why there is no report."""
        noted = next((note for note in self.notes if note.code == "no-report"), None)
        return noted or Note("no-report", "nsys left no report: no timeline can be analysed.", None)

    def export(self, report: Path, timeout_s: float = 600) -> Path:
        """The report as SQLite beside it, whole or not at all. Raises InfprofError (exit 4)."""
        target = report.with_suffix(".sqlite")
        partial = report.with_name(f".{report.stem}.partial.sqlite")
        try:
            answer = export_sqlite(self._nsys, report, partial, timeout_s, self._environ)
            if answer.code != 0 or not partial.is_file():
                raise self._export_error(report, answer, timeout_s)
            return partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def _export_error(self, report: Path, answer: Answer, timeout_s: float) -> InfprofError:
        if answer.code is None:
            sentence = f"{report.name} was not exported within {timeout_s:.0f} s."
            return InfprofError(f"{sentence} Export it by hand: nsys export --type sqlite FILE.", EXIT_COLLECTOR)
        failure = nsys_messages.explain(answer.text)
        free = nsys_checks.free_bytes(self._machine, report.parent)
        if failure.code == "disk-full" or (free is not None and free < 2 * report.stat().st_size):
            room = "" if free is None else f": {report.parent} has {doctor.binary_size(free)} free"
            sentence = f"{report.name} ({doctor.binary_size(report.stat().st_size)}) could not be exported, the disk is full{room}."
            return InfprofError(
                f"{sentence} An export is several times larger than its report: free space.", EXIT_COLLECTOR
            )
        return _collector_error(f"{report.name} could not be exported", failure)

    # --- after -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session: neither its agent nor its spool file is left. May be called again.

        While the target lives, its agent is left to end with it, idle: without the agent no program that the target
        starts would come up (nsys's library in it ends it with "Failed to connect to Agent").
        """
        if not self._target_lives():
            self._end_session()
            return
        # nsys has no way to drop a collection: "cancel" is not implemented.
        self.stop(_START_LIMIT_S)
        sentence = "nsys's agent stays, idle, until the program ends: without it the program could start no others."
        self._note(Note("agent-stays", sentence, None))

    def _target_lives(self) -> bool:
        return nsys_processes.lives(self._pid)

    def _end_session(self) -> None:
        if not self._session:
            return
        self._remember_streams()
        if nsys_processes.session_processes(self._session) and not self._hung:
            shutdown = (self._nsys, "shutdown", "--kill=none", f"--session={self._session}")
            call(shutdown, _SHORT_LIMIT_S, self._environ)
        nsys_processes.end(nsys_processes.session_processes(self._session))
        self._end_launch()
        for path in self._streams:
            if path.parent != self.plan.folder:
                path.unlink(missing_ok=True)
        self._session, self._collecting = "", False
        self._agents, self._streams = [], []

    def _end_launch(self) -> None:
        """Let ``nsys launch`` end: by itself, as it does without an agent, or by force."""
        if self._process is not None and not self._wait_process(time.monotonic() + _GRACE_S):
            self._process.kill()
            self._process.wait()


def usable_nsys(machine: Machine, chosen: Path | None) -> tuple[Path, tuple[int, ...]]:
    """The nsys to use, ``chosen`` or the newest that runs, and its version. Raises Unavailable where there is none."""
    if chosen is not None:
        version = doctor.nsys_version(chosen)
        if version is None:
            raise Unavailable(f"{chosen} is no nsys that runs: give the path of its nsys program.")
        return chosen, version
    found = doctor.find_nsys(machine)
    install = doctor.install_nsys(machine)
    if not found:
        raise Unavailable(f"There is no nsys on PATH or in its usual folders. Install it: {install}.")
    working = [(tool.version, tool.path) for tool in found if tool.version is not None]
    if not working:
        raise Unavailable(f"{machine.shown(found[0].path)} does not run. Install it again: {install}.")
    # Not the first on PATH: a distribution's own is years old, and old ones hang or lack their importer.
    version, path = max(working)
    return path, version


def _ended_by_signal(code: int | None) -> Note | None:
    if code is None or code <= 128:
        return None
    return Note(
        "target-killed",
        f"The program was ended by signal {code - 128}: what nsys had not yet fetched from it is not in the report.",
        "Stop the capture before the program ends.",
    )


def _failure(answer: Answer) -> Note:
    if answer.code is None:
        return Note("nsys-hung", "nsys gave no answer within its time limit.", "Install a newer nsys.")
    return nsys_messages.explain(answer.text)


def _collector_error(what: str, failure: Note) -> InfprofError:
    return InfprofError(" ".join(filter(None, (f"{what}: {failure.sentence}", failure.remedy))), EXIT_COLLECTOR)


def _free_name(folder: Path, stem: str) -> Path:
    """``stem`` or ``stem-2``, ``stem-3`` …: what no file of the folder begins with, as nsys appends to it."""
    taken = {path.name.partition(".")[0] for path in folder.iterdir()}
    number = 1
    while (name := stem if number == 1 else f"{stem}-{number}") in taken:
        number += 1
    return folder / name


def _moved(path: Path, folder: Path, stem: str) -> Path:
    """Move a file into a folder under a name that is free there."""
    number = 1
    while (target := folder / f"{stem}.moved-{number}{path.suffix}").exists():
        number += 1
    return Path(shutil.move(path, target))


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts capture.2 before capture.10, and capture.nsys-rep before capture-2.nsys-rep."""
    parts = re.split(r"(\d+)", path.name.replace(".", "\x01"))
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
