"""Where probes put what they see: samples, facts and events, kept in telemetry.sqlite while the program still runs."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infprof.probes import Signal

SCHEMA_VERSION = 1


class Clock:
    """Unix time that never jumps: read once, then carried on by the monotonic clock.

    nsys writes the wall-clock time of its own start into its export, so both are compared on the wall clock.
    """

    def __init__(self) -> None:
        self.unix_ns = time.time_ns()
        self.monotonic_ns = time.monotonic_ns()

    def now_ns(self) -> int:
        """Unix time in nanoseconds."""
        return self.unix_ns + time.monotonic_ns() - self.monotonic_ns

    def offsets(self) -> dict[str, int]:
        """How the clocks stood to each other at the start, and how far the wall clock has moved since (ns)."""
        return {
            "unix_ns": self.unix_ns,
            "monotonic_ns": self.monotonic_ns,
            "wall_clock_step_ns": time.time_ns() - self.now_ns(),
        }


class TelemetryFile:
    """telemetry.sqlite of one run. Rows are kept in memory and written by ``flush``, which the session calls.

    One transaction a second: a write of its own for each new series would cost more than reading the values.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self.clock = clock
        self._lock = threading.Lock()
        self._samples: list[tuple[int, int, float]] = []
        self._others: list[tuple[str, tuple[Any, ...]]] = [("about", ("schema_version", str(SCHEMA_VERSION)))]
        self._series: dict[tuple[str, str, str, tuple[tuple[str, str], ...]], int] = {}
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        # A crash of the machine may cost the last seconds; a crash of this process costs one.
        self._connection.execute("PRAGMA synchronous = OFF")
        for name, columns in _TABLES.items():
            self._connection.execute(f"CREATE TABLE {name} ({columns})")

    def recorder(self, probe: str, signals: Mapping[str, Signal]) -> Recorder:
        """The recorder of one probe."""
        return Recorder(self, probe, signals)

    def series(self, probe: str, signal: str, about: Signal, scope: str, labels: tuple[tuple[str, str], ...]) -> int:
        """The number of a series, new or known."""
        key = (probe, signal, scope, labels)
        with self._lock:
            number = self._series.get(key)
            if number is None:
                number = self._series[key] = len(self._series)
                row = (number, probe, signal, about.unit, about.kind, scope, json.dumps(dict(labels)))
                self._others.append(("series", row))
            return number

    def sample(self, series: int, time_ns: int, value: float) -> None:
        """Keep a sample until the next flush."""
        self._samples.append((series, time_ns, value))

    def samples(self, rows: Sequence[tuple[int, int, float]]) -> None:
        """Keep many: (series, time, value) each."""
        self._samples.extend(rows)

    def insert(self, table: str, *values: Any) -> None:
        """Keep a row of another table until the next flush."""
        self._others.append((table, values))

    def flush(self) -> None:
        """Write what was kept so far; what cannot be written is kept. Raises sqlite3.Error, on a full disk for example."""
        with self._lock:
            # Other threads append meanwhile: what came later stays for the next time.
            samples, others = self._samples[:], self._others[:]
            if not samples and not others:
                return
            self._connection.execute("BEGIN")
            try:
                for table, row in others:
                    self._connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
                self._connection.executemany("INSERT INTO samples VALUES (?, ?, ?)", samples)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            del self._samples[: len(samples)]
            del self._others[: len(others)]

    def close(self) -> None:
        """Write the rest and close. Raises sqlite3.Error where the rest cannot be written; the file is closed anyway."""
        try:
            self.flush()
        finally:
            self._connection.close()


_TABLES = {
    "about": "name TEXT, value TEXT",
    "series": "id INTEGER PRIMARY KEY, probe TEXT, signal TEXT, unit TEXT, kind TEXT, scope TEXT, labels TEXT",
    "samples": "series INTEGER, time_ns INTEGER, value REAL",
    "facts": "probe TEXT, name TEXT, scope TEXT, value TEXT",
    "events": "probe TEXT, time_ns INTEGER, kind TEXT, scope TEXT, text TEXT, value REAL",
    "missing": "probe TEXT, signal TEXT, scope TEXT, code INTEGER, reason TEXT",
}


class Recorder:
    """What one probe writes through; safe to use from several threads.

    ``scope`` says what a value belongs to, in words that tell the kind first: ``gpu/GPU-uuid``, ``thread/PID/TID``,
    ``process/PID``, ``interface/eth0``, ``rdma/mlx5_0/1``, ``engine/0``; empty means the machine. Values are in the
    unit of the probe's ``signals``.
    """

    def __init__(self, file: TelemetryFile, probe: str, signals: Mapping[str, Signal]) -> None:
        self._file = file
        self._signals = signals
        self._known: dict[tuple[str, str, tuple[tuple[str, str], ...]], int] = {}
        self._missing: set[tuple[str, str]] = set()
        self.probe = probe

    def now_ns(self) -> int:
        """Unix time in nanoseconds, of the clock that all samples share."""
        return self._file.clock.now_ns()

    def sample(
        self,
        signal: str,
        value: float,
        scope: str = "",
        labels: Mapping[str, str] | None = None,
        time_ns: int | None = None,
    ) -> None:
        """Record one value of a declared signal, now or at ``time_ns``."""
        number = self.series(signal, scope, labels)
        self._file.sample(number, self.now_ns() if time_ns is None else time_ns, float(value))

    def series(self, signal: str, scope: str = "", labels: Mapping[str, str] | None = None) -> int:
        """The number of a series of a declared signal, for ``samples``."""
        pairs = tuple(sorted(labels.items())) if labels else ()
        key = (signal, scope, pairs)
        number = self._known.get(key)
        if number is None:
            number = self._file.series(self.probe, signal, self._signals[signal], scope, pairs)
            self._known[key] = number
        return number

    def samples(self, values: Iterable[tuple[int, float]], time_ns: int) -> None:
        """Record values of many series at one time: (number of the series, value) each."""
        self._file.samples([(number, time_ns, float(value)) for number, value in values])

    def fact(self, name: str, value: Any, scope: str = "") -> None:
        """Record something that does not change during the run (any JSON value); the last one of a name counts."""
        self._file.insert("facts", self.probe, name, scope, json.dumps(value))

    def event(
        self, kind: str, text: str, scope: str = "", value: float | None = None, time_ns: int | None = None
    ) -> None:
        """Record something that happened."""
        self._file.insert("events", self.probe, self.now_ns() if time_ns is None else time_ns, kind, scope, text, value)

    def missing(self, signal: str, reason: str, scope: str = "", code: int | None = None) -> None:
        """Record, once, that a signal cannot be had here: never 0, and never silent."""
        if (signal, scope) not in self._missing:
            self._missing.add((signal, scope))
            self._file.insert("missing", self.probe, signal, scope, code, reason)
