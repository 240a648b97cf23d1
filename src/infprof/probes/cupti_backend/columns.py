"""What the tables of an nsys export are made of: one recording, its clock, its texts, and columns of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from infprof.probes.cupti_backend.recording import Recording
from infprof.trace import BoolArray, IntArray

Columns: TypeAlias = dict[str, "IntArray | list[Any] | int | str | None"]
"""Column name → a value per row, or one for all; where a column may be NULL, -1 in an array stands for that."""

_UNKNOWN_MEMORY = 7


class Source:
    """One recording, on the way into tables. ``string`` gives the id of a text in StringIds.

    ``origin_ns`` is the first time in it by CUPTI's clock, which the file counts from; ``shift_ns`` makes Unix time of that
    clock.
    """

    def __init__(self, recording: Recording, string: Callable[[str], int]) -> None:
        self.recording = recording
        self._string = string
        self.pid = int(recording.about["pid"])
        self.global_pid = (1 << 48) | (self.pid & 0xFFFFFF) << 24
        self.shift_ns = _clock_shift_ns(recording.about.get("start", {}))
        self.origin_ns = self._first_ns()

    def _first_ns(self) -> int:
        first = [int(times.min()) for times in self._all_times() if len(times)]
        return min(first, default=int(self.recording.about.get("start", {}).get("cupti_ns", 0)))

    def _all_times(self) -> list[NDArray[Any]]:
        times = []
        for records in self.recording.records.values():
            for name in {"start", "time"} & set(records.dtype.names or ()):
                times.append(records[name][records[name] > 0])
        return times

    def duration_ns(self) -> int:
        """From the first to the last time in any table."""
        ends = [
            int(records[name].max())
            for records in self.recording.records.values()
            for name in {"end", "time"} & set(records.dtype.names or ())
            if len(records)
        ]
        return max(max(ends, default=self.origin_ns) - self.origin_ns, 0)

    def times(self, times: NDArray[Any]) -> IntArray:
        """Times from the first one on, ns; CUPTI's 0, "not known", stays 0."""
        return np.where(times == 0, 0, times.astype(np.int64) - self.origin_ns)

    def global_tids(self, records: NDArray[Any]) -> IntArray:
        return self.global_pid | (records["thread"].astype(np.int64) & 0xFFFFFF)

    def distinct(self, indexes: IntArray, unnamed: str) -> tuple[list[str], IntArray]:
        """The texts in use, and which of them each row has."""
        distinct, which = np.unique(indexes, return_inverse=True)
        texts = [self.recording.texts[i] if i >= 0 else unnamed for i in distinct.tolist()]
        return texts, which

    def strings(self, texts: list[str], which: IntArray) -> IntArray:
        return np.array([self._string(text) for text in texts], dtype=np.int64)[which]


def _clock_shift_ns(clocks: Mapping[str, int]) -> int:
    """What has to be added to CUPTI's times to make Unix times of them: nothing, where its clock is the system's."""
    shift = int(clocks.get("realtime_ns", 0)) - int(clocks.get("cupti_ns", 0))
    return shift if abs(shift) > 100_000_000 else 0


def ints(values: NDArray[Any]) -> IntArray:
    """As SQLite holds them: 64 bits with a sign."""
    return values.astype(np.int64)


def or_null(values: NDArray[Any]) -> IntArray:
    """0 is no graph and no node of one."""
    return np.where(values == 0, -1, values.astype(np.int64))


def memory_kind(values: NDArray[Any]) -> IntArray:
    kinds = values.astype(np.int64)
    known: BoolArray = (kinds >= 1) & (kinds <= _UNKNOWN_MEMORY)
    return np.where(known, kinds - 1, _UNKNOWN_MEMORY)


def stacked(parts: list[Columns]) -> Columns | None:
    """Several parts of one table, one below the other."""
    if not parts:
        return None
    stacked: Columns = {}
    for name in parts[0]:
        columns = [part[name] for part in parts]
        rows = [len(part["start"]) for part in parts]  # type: ignore[arg-type]  # every table has a start per row
        if len(parts) == 1:
            stacked[name] = columns[0]
        elif any(isinstance(column, list) for column in columns):
            texts = (
                column if isinstance(column, list) else [column] * count
                for column, count in zip(columns, rows, strict=True)
            )
            stacked[name] = [value for part in texts for value in part]
        else:
            filled = [
                column if isinstance(column, np.ndarray) else np.full(count, -1 if column is None else column)
                for column, count in zip(columns, rows, strict=True)
            ]
            stacked[name] = np.concatenate(filled)
    return stacked
