"""Running totals over a window: what a counter grew between two moments, whichever moments were written down.

A probe writes a total when it moves, with the value before it, so between two samples it grew evenly and outside them it
stood still.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from infprof.measures.telemetry import TelemetryScope
from infprof.results import Measures
from infprof.telemetry import Series, Telemetry
from infprof.trace import FloatArray, IntArray

NOT_RECORDED = "this telemetry was not recorded"
TOO_SHORT = "fewer than two samples in the window"


def running_total(series: Series) -> FloatArray:
    """The counter without its restarts: a fall means that it began again from 0."""
    steps = np.diff(series.value, prepend=series.value[:1])
    return np.cumsum(np.where(steps < 0, series.value, steps))


def at(series: Series, times: IntArray | list[int]) -> FloatArray:
    """What the counter had grown to at the given times, from its first sample on."""
    return np.interp(np.asarray(times, dtype=np.float64), series.time, running_total(series))


class Observed(NamedTuple):
    """The part of a window in which a probe sampled, and its series there."""

    telemetry: Telemetry
    low_ns: int
    high_ns: int

    @property
    def span_ns(self) -> int:
        return self.high_ns - self.low_ns

    def grown(self, series: Series) -> float:
        """What a counter grew in the window."""
        low, high = at(series, [self.low_ns, self.high_ns]) if len(series.time) else (0.0, 0.0)
        return float(high - low)

    def total(self, signal: str, scope: str | None = None, **labels: str) -> float | None:
        """What all counters of a signal grew together; None without any."""
        series = self.all(signal, scope, **labels)
        return sum(map(self.grown, series)) if series else None

    def by_scope(self, signal: str, kind: str) -> dict[str, float]:
        """Scope → growth of a counter, of the scopes of one kind (``thread``, ``cpu``, ``interface``)."""
        return {s.scope: self.grown(s) for s in self.telemetry.series(signal, kind)}

    def all(self, signal: str, scope: str | None = None, **labels: str) -> list[Series]:
        """The series of a signal and, where given, of exactly this scope and these labels."""
        return [
            s
            for s in self.telemetry.series(signal)
            if scope in (None, s.scope) and all(s.labels.get(key) == value for key, value in labels.items())
        ]

    def gauge(self, signal: str, scope: str | None = None) -> FloatArray:
        """The samples of a gauge in the window, of all its scopes together."""
        found = [s.between(self.low_ns, self.high_ns + 1).value for s in self.all(signal, scope)]
        return np.concatenate(found) if found else np.zeros(0)


def observe(telemetry: Telemetry, scope: TelemetryScope, probe: str) -> Observed | None:
    """What one probe saw of the window; None where that is no more than a moment."""
    times = [s.time for s in telemetry.all_series if s.probe == probe and len(s.time)]
    if not times:
        return None
    low = max(scope.low_ns, min(int(t[0]) for t in times))
    high = min(scope.high_ns, max(int(t[-1]) for t in times))
    return Observed(telemetry, low, high) if high > low else None


class Adder:
    """Adds measures of one area, each with its value or with the reason for having none."""

    def __init__(self, measures: Measures, telemetry: Telemetry, probe: str, units: dict[str, str]) -> None:
        self._measures, self._telemetry, self._units = measures, telemetry, units
        self._source = f"{probe} telemetry"
        self._absent = NOT_RECORDED if not any(s.probe == probe for s in telemetry.all_series) else TOO_SHORT

    def add(self, name: str, value: float | None, signal: str = "", reason: str | None = None) -> None:
        """Add a measure; without a value the source says why: the ``reason``, or what the probe said of its signal."""
        source = self._source
        if value is None:
            source = reason or self._telemetry.why_missing(signal) or self._absent
        self._measures.add(name, value, self._units[name], source=source)

    def add_missing(self) -> None:
        """Every measure of the area that was not added, as one that cannot be had."""
        for name in self._units:
            if name not in self._measures:
                self.add(name, None)


def ratio(part: float | None, whole: float | None) -> float | None:
    """part over whole, None where either is unknown or there is no whole."""
    return None if part is None or not whole else part / whole
