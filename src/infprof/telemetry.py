"""Telemetry: what the probes recorded in one run, as columns; read from a bundle's telemetry.sqlite."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infprof.trace import FloatArray, IntArray


class Series(NamedTuple):
    """One signal of one scope: ``time`` (ns, ascending) and ``value``, equally long."""

    probe: str
    signal: str
    unit: str
    kind: str
    scope: str
    labels: dict[str, str]
    time: IntArray
    value: FloatArray

    def between(self, low_ns: int, high_ns: int) -> Series:
        """The samples of low <= time < high."""
        first, last = np.searchsorted(self.time, [low_ns, high_ns])
        return self._replace(time=self.time[first:last], value=self.value[first:last])

    def increase(self, low_ns: int | None = None, high_ns: int | None = None) -> float | None:
        """How much a counter grew between the samples of low <= time <= high; None with fewer than two of them.

        A fall is a restart: what was counted since then is the new value itself.
        """
        value = self.value
        if low_ns is not None and high_ns is not None:
            first, last = np.searchsorted(self.time, low_ns), np.searchsorted(self.time, high_ns, side="right")
            value = value[first:last]
        if len(value) < 2:
            return None
        steps = np.diff(value)
        return float(np.where(steps < 0, value[1:], steps).sum())


class Fact(NamedTuple):
    probe: str
    name: str
    scope: str
    value: Any


class Event(NamedTuple):
    probe: str
    time_ns: int
    kind: str
    scope: str
    text: str
    value: float | None


class Missing(NamedTuple):
    """A signal that could not be had, and why; ``code`` is the source's own error number."""

    probe: str
    signal: str
    scope: str
    code: int | None
    reason: str


@dataclass(frozen=True)
class Telemetry:
    """Everything the probes recorded. Times are Unix nanoseconds until ``shifted`` moves them to a trace's clock."""

    all_series: list[Series] = field(default_factory=list)
    all_facts: list[Fact] = field(default_factory=list)
    all_events: list[Event] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    def series(self, signal: str, scope: str | None = None) -> list[Series]:
        """The series of a signal: of all scopes, or of those that are ``scope`` or begin with ``scope/``."""
        return [
            s
            for s in self.all_series
            if s.signal == signal and (scope is None or s.scope == scope or s.scope.startswith(scope + "/"))
        ]

    def scopes(self, signal: str) -> list[str]:
        """The scopes that have a signal, in the order in which they were first seen."""
        return list(dict.fromkeys(s.scope for s in self.all_series if s.signal == signal))

    def facts(self, name: str) -> dict[str, Any]:
        """Scope → value of a fact; of several the last."""
        return {f.scope: f.value for f in self.all_facts if f.name == name}

    def events(self, kind: str) -> Iterator[Event]:
        """The events of a kind, in time."""
        return iter(sorted((e for e in self.all_events if e.kind == kind), key=lambda e: e.time_ns))

    def why_missing(self, signal: str, scope: str | None = None) -> str | None:
        """Why a signal is absent (for the source of a measure without a value); None where nothing is known."""
        for row in self.missing:
            if row.signal == signal and (scope is None or row.scope == scope):
                return row.reason
        return None

    def span_ns(self) -> tuple[int, int] | None:
        """The first and the last sample's time; None without samples."""
        times = [s.time for s in self.all_series if len(s.time)]
        return (min(int(t[0]) for t in times), max(int(t[-1]) for t in times)) if times else None

    def shifted(self, by_ns: int) -> Telemetry:
        """The same with all times moved."""
        return replace(
            self,
            all_series=[s._replace(time=s.time + by_ns) for s in self.all_series],
            all_events=[e._replace(time_ns=e.time_ns + by_ns) for e in self.all_events],
        )


def read_telemetry(path: Path) -> Telemetry:
    """Read a telemetry.sqlite. Raises sqlite3.Error where it is none, or is damaged."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        rows = np.array(
            db.execute("SELECT series, time_ns, value FROM samples").fetchall(),
            dtype=[("series", np.int64), ("time", np.int64), ("value", np.float64)],
        )
        rows = rows[np.lexsort((rows["time"], rows["series"]))]
        series = []
        for number, probe, signal, unit, kind, scope, labels in db.execute(
            "SELECT id, probe, signal, unit, kind, scope, labels FROM series ORDER BY id"
        ):
            first, last = np.searchsorted(rows["series"], [number, number + 1])
            mine = rows[first:last]
            series.append(
                Series(probe, signal, unit, kind, scope, json.loads(labels), mine["time"].copy(), mine["value"].copy())
            )
        return Telemetry(
            series,
            [Fact(p, n, s, json.loads(v)) for p, n, s, v in db.execute("SELECT probe, name, scope, value FROM facts")],
            [Event(*row) for row in db.execute("SELECT probe, time_ns, kind, scope, text, value FROM events")],
            [Missing(*row) for row in db.execute("SELECT probe, signal, scope, code, reason FROM missing")],
        )
