"""What the workers of the tests' dask cluster run: the per-file function, with a way to be killed in the middle of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from infprof.diagnosis import Options
from infprof.ranks.workers import FileResult, analyze_one


def killed_once(path: Path, options: Options) -> FileResult:
    """At rank 1, the first time: tell the test which process this is, and wait to be killed."""
    calls = path.parent / "calls"
    if path.name == "rank1.sqlite" and calls.exists():
        with calls.open("w") as pipe:
            pipe.write(str(os.getpid()))
        threading.Event().wait()
    return analyze_one(path, options)


def kills_its_worker(path: Path, options: Options) -> FileResult:
    """Rank 1 ends every process that touches it."""
    if path.name == "rank1.sqlite":
        os._exit(9)
    return analyze_one(path, options)
