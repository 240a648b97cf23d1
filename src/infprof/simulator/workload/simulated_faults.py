"""Bottlenecks that only a simulated workload can have: they lie in the machines, in the demand, or beside the engine.

Those of the real workload (``infprof.workload.faults``) hold here as well; ``find`` knows both.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace

from infprof.errors import UsageError
from infprof.simulator.workload.description import Workload
from infprof.workload.faults import FAULTS, Expectation, Fault

_DETOKENISE_NS = 400_000
_PEERS_WITHOUT_LINK = 0.35  # of PCIe: through the host's memory, and every rank at once
_SLOW = 0.5
_FEW_PER_S = 4.0


@dataclass(frozen=True)
class SimulatedFault:
    """``change`` puts it into a workload."""

    summary: str
    expected: Expectation
    change: Callable[[Workload], Workload]


def _ranks(workload: Workload) -> Workload:
    return workload if workload.tensor_parallel > 1 else replace(workload, tensor_parallel=2)


SIMULATED_FAULTS: dict[str, SimulatedFault] = {
    "slow-rank": SimulatedFault(
        "The GPU of the last rank runs at half the speed of the others, which wait for it in every collective.",
        Expectation(("communication-bound",), ("straggler",), ("straggler-rank",), "on the other ranks"),
        lambda w: replace(_ranks(w), slow_rank=_SLOW),
    ),
    "slow-link": SimulatedFault(
        "Ranks reach each other over PCIe through the host, not over NVLink.",
        Expectation(("communication-bound",), ("volume", "unknown"), ("exposed-communication",)),
        lambda w: replace(_ranks(w), peers=w.gpu.device.pcie * _PEERS_WITHOUT_LINK),
    ),
    "detokenise": SimulatedFault(
        "The engine's thread turns every token into text before it starts the next step.",
        Expectation(("scheduling-bubble",), ("host-work", "sync"), ("host-work-between-steps", "sync-per-step")),
        lambda w: replace(w, host=replace(w.host, detokenise_token_ns=_DETOKENISE_NS)),
    ),
    "low-demand": SimulatedFault(
        "Few requests arrive, and the engine waits for the next one.",
        Expectation(
            ("no-demand",), findings=("waiting-for-requests",), note="where operating-system calls are recorded"
        ),
        lambda w: replace(w, rate_per_s=_FEW_PER_S),
    ),
}


def find(name: str) -> Fault | SimulatedFault:
    """The fault of this name, the simulator's own or one of the real workload. Raises UsageError for any other."""
    fault = SIMULATED_FAULTS.get(name) or FAULTS.get(name)
    if fault is None:
        known = [*FAULTS, *SIMULATED_FAULTS]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}."
        raise UsageError(f"There is no fault called {name}. {hint}")
    return fault
