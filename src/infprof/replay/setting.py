"""What ``--set`` says: which cost, and what becomes of it."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from infprof.errors import UsageError
from infprof.trace import COPY_KIND_NAMES

OVERLAPPED = "overlapped"

# Cost → what it is, in words that go on after "without".
COSTS: dict[str, str] = {
    "launch": "time in launch calls",
    "host": "the host's own work between CUDA calls",
    "sync": "waits of the host for the GPU",
    "allocator": "time in calls that allocate and free memory",
    "module-load": "loading and compiling of kernels",
    "calls": "time in other CUDA calls",
    "waits": "waits in system calls",
    "copies": "copies",
    "memsets": "memsets",
    "comm": "communication",
    "kernel": "kernels",
    "gaps": "turn-arounds of the hardware",
}
_SELECTORS = ("copies", "kernel")


@dataclass(frozen=True)
class Setting:
    """``factor`` on the time of ``cost``; None: copies are overlapped. ``which`` narrows copies and kernels down."""

    cost: str
    factor: float | None
    which: str | None = None

    @property
    def text(self) -> str:
        """As it is written after ``--set``."""
        name = self.cost if self.which is None else f"{self.cost}:{self.which}"
        return f"{name}={OVERLAPPED if self.factor is None else format(self.factor, 'g')}"


def parse_setting(text: str) -> Setting:
    """``launch=0``, ``copies=overlapped``, ``copies:d2h=0.5``, ``kernel:gemm=0.5``. Raises UsageError for anything else."""
    name, equals, value = text.rpartition("=")
    cost, colon, which = name.partition(":")
    cost, which, value = cost.strip().lower(), which.strip(), value.strip()
    if not equals or not cost:
        raise UsageError(f"--set {text}: write COST=FACTOR, such as launch=0. Costs: {', '.join(COSTS)}.")
    cost = {"kernels": "kernel", "copy": "copies", "communication": "comm", "memset": "memsets"}.get(cost, cost)
    if cost not in COSTS:
        near = difflib.get_close_matches(cost, COSTS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(COSTS)}."
        raise UsageError(f"--set {text}: there is no cost called {cost}. {hint}")
    if colon and (cost not in _SELECTORS or not which):
        raise UsageError(f"--set {text}: only copies:KIND and kernel:NAME can be narrowed down.")
    if cost == "copies" and colon and which.lower() not in COPY_KIND_NAMES:
        raise UsageError(f"--set {text}: copies are {', '.join(COPY_KIND_NAMES)}.")
    return Setting(cost, _factor(text, cost, colon, value), which or None)


def _factor(text: str, cost: str, colon: str, value: str) -> float | None:
    if value.lower() == OVERLAPPED:
        if cost != "copies" or colon:
            raise UsageError(f"--set {text}: only copies can be overlapped, all of them together: copies=overlapped.")
        return None
    try:
        factor = float(value)
    except ValueError:
        factor = math.nan
    if not 0 <= factor <= 1000:
        raise UsageError(f"--set {text}: the factor is a number from 0 to 1000; 0 takes the cost away, 0.5 halves it.")
    return factor
