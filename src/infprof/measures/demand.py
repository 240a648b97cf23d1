"""Timeline and engine together: what the GPU did while requests ran, waited, or were not there at all."""

from __future__ import annotations

from infprof.measures import intervals as iv
from infprof.measures.serving_telemetry import demand_intervals
from infprof.measures.slices import DeviceTime
from infprof.results import Measures
from infprof.telemetry import Telemetry


def add_demand(measures: Measures, telemetry: Telemetry, time: DeviceTime) -> None:
    """Idle time while requests waited in the engine's queue: the scheduler held them back, not the lack of work.

    The gauges come once a second, so this is about seconds, not about single steps; without an engine's metrics there
    is no value.
    """
    low, high = int(time.scope.starts[0]), int(time.scope.ends[-1])
    _, waits = demand_intervals(telemetry, low, high)
    waiting = iv.intersect(iv.union(*waits), time.scope)
    known = bool(telemetry.series("waiting_requests"))
    gaps = time.gaps
    idle = int(iv.covered(waiting, gaps.starts, gaps.ends).sum()) if known else None
    source = "timeline and engine" if known else "no metrics of a serving engine"
    measures.add("idle_while_waiting_ns", idle, "ns", source=source)
    share = idle / waiting.total() if idle is not None and waiting.total() else None
    measures.add("idle_while_waiting_ratio", share, "ratio", source=source)
