"""The processes of one nsys session, found by its name alone: those of other sessions are never touched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from infprof.target import end_processes

_PATIENCE_S = 1.0


def session_processes(session: str) -> list[psutil.Process]:
    """The agent of a session: what was started with its very name. nsys starts agents that outlive their caller."""
    name = f"--session-name={session}"
    return [p for p in psutil.process_iter(["cmdline"]) if name in (p.info["cmdline"] or ())]


def open_streams(processes: Sequence[psutil.Process]) -> list[Path]:
    """The .qdstrm files that processes have open: where an agent keeps what it records until the report is made."""
    found: list[Path] = []
    for process in processes:
        try:
            found += [Path(file.path) for file in process.open_files() if file.path.endswith(".qdstrm")]
        except psutil.Error:
            continue
    return found


def end(processes: Sequence[psutil.Process]) -> None:
    """Ask processes to end, then kill them: a spinning agent of nsys 2022.4 ignores SIGTERM."""
    end_processes(processes, _PATIENCE_S)


def lives(pid: int | None) -> bool:
    """Whether a process is there and not merely waiting to be reaped."""
    if pid is None:
        return False
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
