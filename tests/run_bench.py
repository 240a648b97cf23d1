"""What the tests of `infprof run` share: the command as its user types it, and that nothing is left running."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

INFPROF = [sys.executable, "-c", "from infprof.cli import main; main()"]
PATIENCE_S = 120.0


def run(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*INFPROF, "run", *words], capture_output=True, text=True, timeout=PATIENCE_S, **more)


def manifest(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return data


def codes(folder: Path) -> list[str]:
    return [note["code"] for note in manifest(folder)["notes"]]


def until(condition: Callable[[], Any]) -> None:
    """Wait for another process; a test that waits too long fails."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def gone(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Whatever is started inside, directly or not, has ended when the block ends."""
    name, marker = "INFPROF_TEST_MARKER", f"{os.getpid()}-{time.monotonic_ns()}"
    os.environ[name] = marker
    try:
        yield
    finally:
        del os.environ[name]
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(name) == marker and not gone(process):
                left.append(process)
    # What was killed a moment ago may take another one to be gone.
    end = time.monotonic() + 5
    while not all(map(gone, left)) and time.monotonic() < end:
        time.sleep(0.02)
    left = [process for process in left if not gone(process)]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert left == []
