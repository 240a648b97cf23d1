"""Phases that something else limits than the window: one label for both would be a wrong answer to one of them."""

from __future__ import annotations

from typing import Any

from infprof.results import Verdict

# Of the window, under which a phase of another class is no matter.
WORTH_NAMING = 0.15
# No surer than this of a label that holds for less than half of the time in phases.
UNSURE = 0.5
# Classes of a busy GPU where nothing told what limits its kernels.
_VAGUE = "gpu-busy"
_NO_LIMITER = ("no-demand", "unusable")
_BUSY = frozenset({"compute-bound", "bandwidth-bound", "latency-bound", "balanced", _VAGUE})


def tell_differing_phases(verdict: Verdict, phases: list[dict[str, Any]], device: int | None, window_ns: int) -> None:
    """Add to the sentence of a device's verdict, in place, what limits its phases where that is something else.

    Lowers the confidence of a class that most of the time in judged phases does not have. ``phases`` as the contract has
    them; start-up is none of the window's.
    """
    if verdict.cls in _NO_LIMITER:
        return
    mine = [p for p in phases if p["device"] == device and p["in_window"] and p["steps"] and p["verdict"]]
    named = [p for p in mine if p["total_ns"] >= WORTH_NAMING * window_ns]
    if not any(_differ(p["verdict"]["class"], verdict.cls) for p in named):
        return
    parts = [f"{p['name']} ({100 * p['total_ns'] / window_ns:.0f} %) is {p['verdict']['class']}" for p in named]
    verdict.sentence += f" It differs by phase: {', '.join(parts)}."
    total = sum(p["total_ns"] for p in mine)
    alike = sum(p["total_ns"] for p in mine if not _differ(p["verdict"]["class"], verdict.cls))
    if 2 * alike < total:
        verdict.confidence = min(verdict.confidence, UNSURE)


def _differ(one: str, other: str) -> bool:
    """Whether two classes contradict each other: not where one of them only says that the GPU is busy."""
    return one != other and not (_VAGUE in (one, other) and {one, other} <= _BUSY)
