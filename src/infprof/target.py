"""The program under observation: started in a session of its own, watched with all its descendants, ended cleanly."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO

import psutil

from infprof.errors import InfprofError

_PR_SET_CHILD_SUBREAPER = 36
_LOG_LINES = 20_000
# Listing all processes costs; what loses its parent in between is adopted and found at the end.
_LOOK_EVERY_S = 30.0


def adopt_orphans() -> bool:
    """Make this process the parent of descendants that lose theirs, so that a daemon is not lost sight of (Linux)."""
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class OutputTee:
    """Passes a program's output on, byte for byte, and keeps its last lines. Only used where a line is waited for."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._threads: list[threading.Thread] = []

    def lines(self) -> list[str]:
        """The lines so far, oldest first."""
        return list(self._lines)

    def pump(self, source: IO[bytes] | None, fd: int) -> None:
        """Copy ``source``, one of a Popen's pipes, to the file descriptor until it ends, in a thread."""
        assert source is not None, "the program was started without this pipe"
        thread = threading.Thread(target=self._copy, args=(source, fd), name="infprof-output", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for what is still in the pipes."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _copy(self, source: IO[bytes], fd: int) -> None:
        rest = b""
        while data := os.read(source.fileno(), 1 << 16):
            # Where nobody reads any more the program must not notice.
            with contextlib.suppress(OSError):
                rest_of_it = memoryview(data)
                while rest_of_it:
                    rest_of_it = rest_of_it[os.write(fd, rest_of_it) :]
            *lines, rest = (rest + data).split(b"\n")
            self._lines.extend(line.decode("utf-8", "replace") for line in lines)
        if rest:
            self._lines.append(rest.decode("utf-8", "replace"))


class Target:
    """A running program and everything it started.

    ``root_pid`` is the program itself, which is not always the process that infprof started (nsys stands between).
    """

    def __init__(self, root_pid: int, process: subprocess.Popen[bytes] | None, exit_code: Callable[[], int | None]):
        self.root_pid = root_pid
        self.process = process
        self._exit_code = exit_code
        self._root = _process(root_pid)
        self._seen: dict[int, psutil.Process] = {}
        self._looked = time.monotonic()

    @classmethod
    def attach(cls, pid: int) -> Target:
        """A program that runs already. Raises InfprofError where there is none."""
        if _process(pid) is None:
            raise InfprofError(f"--pid {pid}: there is no such process.", 2)
        return cls(pid, None, lambda: None)

    def alive(self) -> bool:
        """Whether the program, or the process that stands for it, still runs."""
        if time.monotonic() - self._looked >= _LOOK_EVERY_S:
            self._look()
        if self.process is not None and self.process.poll() is not None:
            return False
        if self.process is not None and self.process.pid == self.root_pid:
            return True
        if self.process is None:
            return self._root is not None and _lives(self._root)
        # What stands for the program may go on long after it: nsys writes its report then.
        return any(_lives(p) for p in (self._root, *self._seen.values()) if p is not None)

    def exit_code(self) -> int | None:
        """What the program ended with, 128 + signal for a signal; None while it runs or where nobody can know."""
        return self._exit_code()

    def wait(self, timeout_s: float) -> bool:
        """Whether the program has ended within the time."""
        end = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)
        return True

    def signal(self, number: int) -> None:
        """Send a signal to the program, as its terminal or its supervisor would."""
        # psutil makes sure that the number still means the same process.
        with contextlib.suppress(psutil.Error):
            if self._root is not None:
                self._root.send_signal(number)

    def end(self, first: int, patience_s: float) -> str:
        """End the program: ``first``, then SIGTERM, then SIGKILL for all; gives the name of what it took."""
        for number in dict.fromkeys((first, signal.SIGTERM)):
            self.signal(number)
            if self.wait(patience_s):
                return signal_name(number)
        self.kill_all()
        self.wait(5)
        return "SIGKILL"

    def kill_all(self) -> None:
        """SIGKILL for the program and all that it started."""
        self._look()
        for process in [p for p in (self._root, *self._seen.values()) if p is not None]:
            _kill(process)

    def leftovers(self) -> list[psutil.Process]:
        """Processes that the program started and that outlived it."""
        self._look()
        return [p for p in self._seen.values() if p.pid != self.root_pid and _lives(p)]

    def _look(self) -> None:
        """Remember every descendant that was ever seen: some change their parent, so they cannot be found later."""
        self._looked = time.monotonic()
        if self._root is None:
            return
        try:
            for child in self._root.children(recursive=True):
                self._seen.setdefault(child.pid, child)
        except psutil.Error:
            pass
        for process in list(self._seen.values()):
            try:
                for child in process.children(recursive=True):
                    self._seen.setdefault(child.pid, child)
            except psutil.Error:
                continue


def launch(
    command: Sequence[str],
    environ: Mapping[str, str],
    start: Callable[[Sequence[str], Mapping[str, str]], subprocess.Popen[bytes]],
) -> subprocess.Popen[bytes]:
    """Start a program with ``start``. Raises InfprofError where it cannot be started."""
    try:
        return start(command, environ)
    except FileNotFoundError:
        raise InfprofError(missing_program(command[0]), 2) from None
    except PermissionError:
        raise InfprofError(f"{command[0]} may not be executed: permission denied.", 2) from None
    except OSError as error:
        raise InfprofError(f"{command[0]} cannot be started: {error.strerror or error}.", 2) from None


def missing_program(name: str) -> str:
    """The sentence for a command that does not exist."""
    if "=" in name and "/" not in name.partition("=")[0]:
        return f"there is no program called {name}: to set a variable, write `env {name}` before the program."
    return f"there is no program called {name}: give its path, or check PATH."


def end_processes(processes: Iterable[psutil.Process], patience_s: float) -> int:
    """SIGTERM, then SIGKILL; gives how many there were."""
    mine = [p for p in processes if _lives(p)]
    for process in mine:
        try:
            process.terminate()
        except psutil.Error:
            continue
    _, alive = psutil.wait_procs(mine, timeout=patience_s)
    for process in alive:
        _kill(process)
    psutil.wait_procs(alive, timeout=patience_s)
    return len(mine)


def own_leftovers(before: Iterable[int]) -> list[psutil.Process]:
    """Children and adopted orphans of this process that were not there before."""
    known = set(before)
    try:
        return [p for p in psutil.Process().children(recursive=True) if p.pid not in known and _lives(p)]
    except psutil.Error:
        return []


def reap_orphans(known: Container[int]) -> None:
    """Take the exit codes of adopted processes that have ended: their programs may wait for them to be gone.

    ``known`` are waited for elsewhere.
    """
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if found.si_pid in known:
                return
            os.waitpid(found.si_pid, os.WNOHANG)


def exit_code_of(process: subprocess.Popen[bytes]) -> int | None:
    """A child's exit code as a shell gives it: 128 + signal where a signal ended it."""
    code = process.poll()
    return None if code is None else code if code >= 0 else 128 - code


def program_name(command: Sequence[str]) -> str:
    """A short name for a command: the script of an interpreter, else the program."""
    words = [Path(word).name for word in command[:1]]
    for before, word in pairwise(command):
        if before == "-m" or word.endswith((".py", ".sh")):
            words.append(Path(word).stem)
            break
    return words[-1]


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        if process.is_running():
            process.kill()
    except psutil.Error:
        pass
