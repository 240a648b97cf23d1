"""The target as ``nsys launch`` starts it: with the caller's own streams, under its own name, and with a known pid."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias

from infprof.probes.nsys_command import kill_group
from infprof.probes.nsys_messages import Note

Stream: TypeAlias = "int | IO[bytes] | None"

_LIMIT_S = 60.0
_POLL_S = 0.02

# The outer shell keeps the caller's streams as 3, 4 and 5 and gives nsys a file; the inner one is what nsys launches:
# it says its pid, takes the streams back and becomes the target. Without the streams it ends before the target runs.
_OUTER = 'exec 3<&0 4>&1 5>&2 </dev/null >>"$0" 2>&1; exec "$@"'
_INNER = 'true <&3 >&4 2>&5 || exit 125; echo $$ >"$0"; exec "$@" <&3 >&4 2>&5 3<&- 4>&- 5>&-'


class Launched(NamedTuple):
    """``nsys launch`` as a process, what it says, and the pid of the target; None = the target has not run."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]
    pid: int | None


def launch(
    nsys: Sequence[str], command: Sequence[str], environ: Mapping[str, str], streams: Sequence[Stream]
) -> Launched:
    """Run ``nsys`` (``nsys launch`` with its options) with the target's command; returns once the target runs, or not.

    ``streams`` are the target's stdin, stdout and stderr, as for Popen.
    """
    with tempfile.TemporaryDirectory(prefix="infprof-nsys-") as name:
        private = Path(name)
        says, pid_file = private / "launch.log", private / "target.pid"
        # Read for as long as the run takes, though its name is soon gone.
        log = says.open("w+b")
        inner = (_shell_named_as(command[0], private), "-c", _INNER, str(pid_file))
        process = subprocess.Popen(
            ("/bin/sh", "-c", _OUTER, str(says), *nsys, *inner, *command),
            env=dict(environ),
            start_new_session=True,
            stdin=_usable(streams[0], 0),
            stdout=_usable(streams[1], 1),
            stderr=_usable(streams[2], 2),
        )
        pid = _await_pid(pid_file, process)
        if pid is None and process.poll() is None:
            kill_group(process)
    return Launched(process, log, pid)


def _shell_named_as(program: str, private: Path) -> str:
    """A shell under the program's name: nsys calls a process what it was launched as, though it becomes another."""
    # busybox does what its name says, so it must keep that of the shell.
    if Path("/bin/sh").resolve().name.startswith("busybox"):
        return "/bin/sh"
    link = private / "as" / (Path(program).name or "sh")
    link.parent.mkdir()
    link.symlink_to("/bin/sh")
    return str(link)


def _usable(given: Stream, number: int) -> Stream:
    """The stream as given; nothing instead of a standard stream that is closed, which the shell could not copy."""
    if given is not None:
        return given
    try:
        os.fstat(number)
    except OSError:
        return subprocess.DEVNULL
    return None


def _await_pid(file: Path, process: subprocess.Popen[bytes]) -> int | None:
    """The pid that the target has written; None when ``process`` ends, or the time limit comes, without one."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        ended = process.poll() is not None or time.monotonic() >= deadline
        text = file.read_text() if file.exists() else ""
        if text.endswith("\n"):
            return int(text)
        if ended:
            return None
        time.sleep(_POLL_S)


def require_program(name: str, environ: Mapping[str, str]) -> None:
    """Raises FileNotFoundError or PermissionError where a command is no program, as Popen would."""
    path = environ.get("PATH", os.defpath)
    if shutil.which(name, path=path) is not None:
        return
    if shutil.which(name, mode=os.F_OK, path=path) is not None:
        raise PermissionError(13, "Permission denied", name)
    raise FileNotFoundError(2, "No such file or directory", name)


def spawn_hint(command: Sequence[str], environ: Mapping[str, str]) -> Note | None:
    """The note for a vLLM that may fork its workers; the program's environment is left as it is."""
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    words = [Path(word).name for word in command]
    if name in environ or not any(word == "vllm" or word.startswith("vllm.") for word in words):
        return None
    return Note(
        "spawn-advised",
        "vLLM may fork its workers, and CUDA is not recorded in a process that is forked without exec.",
        f"If GPUs are missing in the timeline, set {name}=spawn for the program.",
    )
