"""What the processes of a target left: their answers, and their traces, counted and compressed outside of the target."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infprof.bundle import redact_command

TRACE = ".trace.json"
# The categories of work on a GPU, as Kineto writes them.
_GPU_WORK = re.compile(rb'"cat"\s*:\s*"(?:kernel|gpu_memcpy|gpu_memset)"')
_PIECE_BYTES = 4 << 20
# Longer than what the pattern matches: a match across two pieces is found in the second.
_OVERLAP_BYTES = 64


class Answer(NamedTuple):
    """What a process said of itself last. ``state``: waiting, recording, done or failed; ``thread``: who said it."""

    pid: int
    name: str
    state: str
    reason: str | None
    command: list[str]
    python: str
    torch: str
    parts: int
    kept_s: float
    thread: int | None = None
    remarks: Sequence[str] = ()


def answers(control: Path) -> list[Answer]:
    """The answers in a control folder, by the number of the process. What cannot be read is left out."""
    found = []
    for path in control.glob("process-*.json"):
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            row["command"] = redact_command(row["command"])
            found.append(Answer(**{name: row[name] for name in Answer._fields if name in row}))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda answer: (answer.pid, answer.name))


def traces(folder: Path) -> list[Path]:
    """The traces that processes have written, not yet compressed."""
    return sorted(folder.glob(f"process-*{TRACE}"))


def rescue_unfinished(folder: Path) -> list[Path]:
    """Take up what a process that ended in the middle of writing has left, where it left nothing whole; the rest goes."""
    rescued = []
    for path in sorted(folder.glob(".process-*.json*"), key=lambda path: path.stat().st_size, reverse=True):
        name = re.sub(r"\.\d+\.json.*$", "", path.name[1:])
        whole = folder / f"{name}{TRACE}"
        if whole.exists() or whole.with_name(f"{whole.name}.gz").exists() or not path.stat().st_size:
            path.unlink()
        else:
            rescued.append(path.rename(whole))
    return rescued


def compress(trace: Path) -> tuple[Path, int]:
    """The trace with gzip, whole or not at all, in its place; and how many operations of a GPU are in it.

    Raises OSError, on a full disk for example; the trace is left as it was then.
    """
    target = trace.with_name(f"{trace.name}.gz")
    partial = trace.with_name(f".{trace.name}.gz.partial")
    count, tail = 0, b""
    try:
        with trace.open("rb") as source, gzip.open(partial, "wb", compresslevel=1) as packed:
            while piece := source.read(_PIECE_BYTES):
                packed.write(piece)
                text = tail + piece
                # Matches that lie in the overlap as a whole were counted with the piece before.
                count += sum(match.end() > len(tail) for match in _GPU_WORK.finditer(text))
                tail = text[-_OVERLAP_BYTES:]
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    trace.unlink()
    return target, count


def described(answer: Answer, trace: str | None, gpu_work: int) -> dict[str, Any]:
    """One process as the manifest holds it; ``trace`` is the name of its trace there, None where it left none."""
    return {
        "pid": answer.pid,
        "command": answer.command,
        "python": answer.python,
        "torch": answer.torch,
        "trace": trace,
        "gpu_operations": gpu_work,
        "recorded_s": answer.kept_s,
        "parts": answer.parts,
        "reason": answer.reason,
        "remarks": list(answer.remarks),
    }
