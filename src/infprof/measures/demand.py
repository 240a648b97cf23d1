"""Timeline and engine together: what the GPU did while requests ran, waited, or were not there at all."""

from __future__ import annotations

from infprof.durations import in_words
from infprof.measures import intervals as iv
from infprof.measures.serving_telemetry import demand_intervals, ramp_intervals
from infprof.measures.slices import DeviceTime
from infprof.results import Measures, Problem
from infprof.telemetry import Telemetry

# From this share of the window on, idle time at the ends of waves is worth a sentence.
RAMP_WORTH_SAYING = 0.005


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
    _add_ramps(measures, telemetry, time)


def _ramps(telemetry: Telemetry, time: DeviceTime) -> iv.Intervals:
    low, high = int(time.scope.starts[0]), int(time.scope.ends[-1])
    return iv.intersect(iv.union(*ramp_intervals(telemetry, low, high)), time.scope)


def _add_ramps(measures: Measures, telemetry: Telemetry, time: DeviceTime) -> None:
    """What beginnings and ends of waves take, and how idle the device is without them and without pauses."""
    low, high = int(time.scope.starts[0]), int(time.scope.ends[-1])
    known = bool(telemetry.series("running_requests"))
    source = "timeline and engine" if known else "no metrics of a serving engine"
    if not known:
        for name, unit in (("ramp_ns", "ns"), ("ramp_idle_ns", "ns"), ("steady_idle_ratio", "ratio")):
            measures.add(name, None, unit, source=source)
        return
    gaps, ramps = time.gaps, _ramps(telemetry, time)
    silent, _ = demand_intervals(telemetry, low, high)
    rest = iv.subtract(time.scope, iv.merge(ramps, iv.union(*silent)))
    idle = [int(iv.covered(part, gaps.starts, gaps.ends).sum()) for part in (ramps, rest)]
    measures.add("ramp_ns", ramps.total(), "ns", source=source)
    measures.add("ramp_idle_ns", idle[0], "ns", source=source)
    measures.add("steady_idle_ratio", idle[1] / rest.total() if rest.total() else None, "ratio", source=source)


def ramp_problems(measures: Measures, telemetry: Telemetry, time: DeviceTime) -> list[Problem]:
    """When waves of requests began or ran out, where that was idle time: it is no cost of the host."""
    idle, steady = measures.value("ramp_idle_ns"), measures.value("steady_idle_ratio")
    if not idle or steady is None or idle < RAMP_WORTH_SAYING * time.window_ns:
        return []
    ramps, origin = _ramps(telemetry, time), int(time.scope.starts[0])
    spans = [
        f"{(start - origin) / 1e9:.2f}-{(end - origin) / 1e9:.2f} s"
        for start, end in zip(ramps.starts.tolist(), ramps.ends.tolist(), strict=True)
    ]
    shown = ", ".join(spans[:6]) + (f" and {len(spans) - 6} more" if len(spans) > 6 else "")
    return [
        Problem(
            "waves",
            f"The load came in waves: at {shown} of the window requests ran out or had only begun to come. {in_words(int(idle))} of "
            f"idle time there count as no demand; outside of that and of pauses the GPU is idle for {100 * float(steady):.1f} % of "
            "the time.",
            len(spans),
        )
    ]
