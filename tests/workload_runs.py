"""A small simulated run for every fault, the real workload's and the simulator's own."""

from __future__ import annotations

from functools import cache
from typing import Any

from infprof.simulator import SimulatedTrace, answer, parse_spec, simulate

REQUESTS = {"count": 8, "prompt": 128, "output": 12}
# Sizes at which a fault shows as the class that it is made for, far from the limits between classes.
FAULTY_RUNS: dict[str, dict[str, Any]] = {
    "none": {"preset": "7b", "layers": 16},
    "launch": {"preset": "3b", "layers": 6, "requests": {"count": 6, "prompt": 128, "output": 6}},
    "no-graphs": {"preset": "1b"},
    "sync": {"preset": "7b", "layers": 16},
    "pageable": {"preset": "3b", "layers": 8, "requests": {"count": 4, "prompt": 64, "output": 6}},
    "offload": {"preset": "3b", "layers": 8, "requests": {"count": 4, "prompt": 64, "output": 6}},
    "fp32": {"preset": "1b", "layers": 12},
    "small-batch": {"preset": "7b", "layers": 24, "requests": {"count": 2, "prompt": 128, "output": 12}},
    "host-sampling": {"preset": "7b", "layers": 8, "engine": {"max_batch": 4}},
    "allocator": {"preset": "3b", "layers": 8},
    "long-context": {"preset": "7b", "layers": 12},
    "kv-pressure": {"preset": "7b", "layers": 12, "requests": {"count": 6, "prompt": 48, "output": 24}},
    "slow-rank": {"preset": "7b", "layers": 12},
    "slow-link": {"preset": "7b", "layers": 12, "requests": {"count": 8, "prompt": 256, "output": 8}},
    "detokenise": {"preset": "7b", "layers": 8},
    "low-demand": {"preset": "7b", "layers": 8, "requests": {"count": 4, "prompt": 64, "output": 6}},
}


def described(fault: str = "none", top: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The description of a fault's run, with other keys below ``workload``, and beside it (``top``)."""
    usual = {"requests": REQUESTS, "engine": {"max_batch": 8}, **FAULTY_RUNS[fault], "fault": fault}
    return {"name": fault, "seed": 3, **(top or {}), "workload": {**usual, **changes}}


def played(fault: str = "none", top: dict[str, Any] | None = None, **changes: Any) -> SimulatedTrace:
    return simulate(parse_spec(described(fault, top, **changes)))


@cache
def run_of(fault: str, counters: bool = False) -> tuple[SimulatedTrace, dict[str, Any]]:
    """A fault's run and its truth."""
    trace = played(fault, {"counters": {"rate": 10_000}} if counters else None)
    return trace, answer(trace)
