"""Whether the target's memory keeps growing, how surely, and with what: time or requests.

The memory is what no file backs (anonymous), summed over the processes that were there all along: page cache comes and goes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from infprof.measures.names import HOST_MEASURES
from infprof.measures.totals import Adder, Observed, at
from infprof.telemetry import Series
from infprof.trace import FloatArray, IntArray

# Fewer samples say nothing about growth.
_SAMPLES = 20

# A process that was there for less of the time came or went, which is no growth.
_PRESENT_RATIO = 0.9

# A pause without requests counts as one from this many samples on.
_PAUSE_SAMPLES = 10

_SECOND_NS = 1_000_000_000


def add_memory(adder: Adder, seen: Observed) -> None:
    """The ``host_memory_*`` measures, from a least-squares line over the time in which requests were finished.

    Without an engine's metrics all of the time counts. The slope of the later half against that of the whole tells growth
    that goes on from filling up once.
    """
    times, size = _memory(seen)
    adder.add("host_memory_observed_ns", int(times[-1] - times[0]) if len(times) else None, "process_anon_bytes")
    if len(times) < _SAMPLES:
        for name in (name for name in HOST_MEASURES if name.startswith("host_memory_") and len(times)):
            if name != "host_memory_observed_ns":
                adder.add(name, None, reason=f"fewer than {_SAMPLES} samples of the target's memory in the window")
        return
    requests = _requests(seen, times)
    moving = np.ones(len(times) - 1, dtype=bool) if requests is None else np.diff(requests) > 0
    active = np.concatenate(([0.0], np.cumsum(np.diff(times) * moving / _SECOND_NS)))
    line = _line(active, size)
    if line is None:
        return
    half = len(active) // 2
    late = _line(active[half:], size[half:])
    adder.add("host_memory_growth_bytes_per_s", line.slope)
    adder.add("host_memory_growth_bytes", line.slope * active[-1])
    adder.add("host_memory_growth_fit_ratio", line.fit)
    adder.add("host_memory_growth_late_ratio", late.slope / line.slope if late and line.slope > 0 else 0.0)
    adder.add("host_memory_time_to_limit_ns", _time_left_ns(seen, float(size[-1]), line.slope), reason=_NO_LIMIT)
    _add_requests(adder, times, size, requests, moving)


_NO_LIMIT = "the memory does not grow, or what is left of it is not known"


def _add_requests(
    adder: Adder, times: IntArray, size: FloatArray, requests: FloatArray | None, moving: np.ndarray
) -> None:
    why = "no engine's count of finished requests"
    line = None if requests is None else _line(requests, size)
    adder.add("host_memory_growth_request_bytes", line.slope if line else None, reason=why)
    adder.add("host_memory_growth_request_error_bytes", line.error if line else None, reason=why)
    first, last = _longest_pause(moving)
    pause = (
        _line(times[first : last + 1] / _SECOND_NS, size[first : last + 1]) if last - first >= _PAUSE_SAMPLES else None
    )
    adder.add(
        "host_memory_growth_paused_bytes_per_s", pause.slope if pause else None, reason="no long pause without requests"
    )


def _memory(seen: Observed) -> tuple[IntArray, FloatArray]:
    """Sample times, and the sum over the processes that were there nearly all the time."""
    cut = [s.between(seen.low_ns, seen.high_ns + 1) for s in seen.all("process_anon_bytes")]
    there = [s for s in cut if len(s.time) > 1 and s.time[-1] - s.time[0] >= _PRESENT_RATIO * seen.span_ns]
    if not there:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    times = max((s.time for s in there), key=len)
    return times, sum((np.interp(times, s.time, s.value) for s in there), np.zeros(len(times)))


def _requests(seen: Observed, times: IntArray) -> FloatArray | None:
    """Finished requests at the sample times, over all engines and reasons."""
    series: list[Series] = [s for s in seen.all("requests_finished") if len(s.time) > 1]
    return sum((at(s, times) for s in series), np.zeros(len(times))) if series else None


class _Line(NamedTuple):
    """A fitted line: slope, its standard error, and the share of the variance that it explains."""

    slope: float
    error: float
    fit: float


def _line(x: FloatArray, y: FloatArray) -> _Line | None:
    """Least squares of y over x; None where x does not vary."""
    dx, dy = x - x.mean(), y - y.mean()
    spread = float(dx @ dx)
    if len(x) < 3 or spread == 0:
        return None
    slope = float(dx @ dy) / spread
    left, whole = float(((dy - slope * dx) ** 2).sum()), float(dy @ dy)
    return _Line(slope, float(np.sqrt(left / (len(x) - 2) / spread)), 1 - left / whole if whole else 0.0)


def _longest_pause(moving: np.ndarray) -> tuple[int, int]:
    """First and last sample of the longest stretch in which nothing moved."""
    edges = np.flatnonzero(np.diff(np.concatenate(([1], moving.astype(np.int8), [1]))))
    starts, ends = edges[0::2], edges[1::2]
    if not len(starts):
        return 0, 0
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest])


def _time_left_ns(seen: Observed, used: float, slope: float) -> int | None:
    """Until the cgroup's limit, or until the machine's memory is used up."""
    limit = seen.telemetry.facts("cgroup_memory_limit_bytes").get("")
    available = seen.gauge("memory_available_bytes")
    left = limit - used if limit else float(available[-1]) if len(available) else None
    return None if left is None or slope <= 0 else int(max(left, 0) / slope * _SECOND_NS)
