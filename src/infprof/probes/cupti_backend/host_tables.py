"""What the host did, as rows of an nsys export: CUDA calls, the profiler's own time, NVTX ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infprof.probes.cupti_backend import layout
from infprof.probes.cupti_backend.columns import Columns, Source, ints, stacked
from infprof.trace import IntArray

_SYSTEM_THREAD = 2
_MARK, _PUSH_POP, _START_END, _DOMAIN = 34, 59, 60, 75
_INSTANTANEOUS, _START, _END = 1, 2, 4
_OVERHEADS = {
    0x1: "CUDA driver compiler (JIT)",
    0x10000: "Activity buffer flush",
    0x20000: "Instrumentation",
    0x30000: "Resource",
    0x40000: "Runtime-triggered module loading",
    0x50000: "Lazy function loading",
    0x60000: "Command buffer full",
    0x70000: "Activity buffer request",
    0x80000: "Unified memory initialization",
}


class HostTables:
    """The tables on the host of one recording."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def all(self) -> dict[str, Columns | None]:
        """Table name → its columns, None where there is nothing."""
        return {
            "CUPTI_ACTIVITY_KIND_RUNTIME": self._calls(),
            "PROFILER_OVERHEAD": self._overheads(),
            "NVTX_EVENTS": self._ranges(),
        }

    def _calls(self) -> Columns | None:
        """Calls of the runtime, and those of the driver that were made beside it.

        A call of the runtime makes calls of the driver in turn, recorded with its own correlation id: those are the same
        call once more, and nsys does not show them either.
        """
        parts: list[Columns] = []
        shown: list[IntArray] = []
        kinds = (
            (layout.RUNTIME, "runtime_calls", 0),
            (layout.DRIVER, "driver_calls", 1),
            (layout.INTERNAL_LAUNCH, "", 1),
        )
        for kind, names, event_class in kinds:
            records = self._source.recording.of(kind)
            if records is None:
                continue
            if shown:
                records = records[~np.isin(records["correlation"], np.concatenate(shown))]
            shown.append(ints(records["correlation"]))
            parts.append(
                {
                    "start": self._source.times(records["start"]),
                    "end": self._source.times(records["end"]),
                    "eventClass": np.full(len(records), event_class),
                    "globalTid": self._source.global_tids(records),
                    "correlationId": ints(records["correlation"]),
                    "nameId": self._call_names(records["cbid"], self._source.recording.about.get(names)),
                    "returnValue": ints(records["return_value"]),
                }
            )
        return stacked(parts)

    def _call_names(self, numbers: NDArray[Any], names: Mapping[str, str] | None) -> IntArray:
        distinct, which = np.unique(numbers, return_inverse=True)
        unnamed = "[launch without a call]" if names is None else "[call {}]"
        texts = [(names or {}).get(str(number), unnamed.format(number)) for number in distinct.tolist()]
        return self._source.strings(texts, which)

    def _overheads(self) -> Columns | None:
        records = self._source.recording.of(layout.OVERHEAD)
        if records is None:
            return None
        kinds, which = np.unique(records["overhead_kind"], return_inverse=True)
        names = [_OVERHEADS.get(kind, f"Overhead of kind {kind}") for kind in kinds.tolist()]
        of_thread = records["object_kind"] == _SYSTEM_THREAD
        return {
            "start": self._source.times(records["start"]),
            "end": self._source.times(records["end"]),
            "globalTid": np.where(of_thread, self._source.global_tids(records), -1),
            "nameId": self._source.strings(names, which),
            "returnValue": 0,
        }

    def _ranges(self) -> Columns | None:
        """NVTX ranges: a record for each begin and each end, with the same id.

        CUPTI does not tell nested ranges from others: one that ends in the thread in which it began counts as nested.
        """
        records = self._source.recording.of(layout.MARKER)
        if records is None:
            return None
        flags = records["flags"]
        begins = np.flatnonzero(flags & (_INSTANTANEOUS | _START))
        partner = np.full(len(records), -1, dtype=np.int64)
        begun, ended = _partners(records, np.flatnonzero(flags & _START), np.flatnonzero(flags & _END))
        partner[begun] = ended
        mine = partner[begins]
        threads = self._source.global_tids(records)
        end_thread = np.where(mine >= 0, threads[mine], threads[begins])
        kind = np.where(
            flags[begins] & _INSTANTANEOUS, _MARK, np.where(end_thread == threads[begins], _PUSH_POP, _START_END)
        )
        texts, which = self._source.distinct(self._source.recording.text_columns[layout.MARKER, "name"][begins], "")
        domains, domain = self._source.distinct(
            self._source.recording.text_columns[layout.MARKER, "domain"][begins], "default"
        )
        numbers = np.array([0 if name in ("", "default", "NULL") else i + 1 for i, name in enumerate(domains)])
        times = self._source.times(records["time"])
        ranges: Columns = {
            "start": times[begins],
            "end": np.where(mine >= 0, times[mine], -1),
            "eventType": kind,
            "text": None,
            "globalTid": threads[begins],
            "endGlobalTid": np.where(kind == _START_END, end_thread, -1),
            "textId": self._source.strings(texts, which),
            "domainId": numbers[domain],
        }
        named = [(number, name) for number, name in zip(numbers.tolist(), domains, strict=True) if number]
        return stacked([ranges, *(self._domain(number, name) for number, name in named)])

    def _domain(self, number: int, name: str) -> Columns:
        none = np.full(1, -1)
        return {
            "start": np.zeros(1, dtype=np.int64),
            "end": none,
            "eventType": np.full(1, _DOMAIN),
            "text": [name],
            "globalTid": np.full(1, self._source.global_pid | (self._source.pid & 0xFFFFFF)),
            "endGlobalTid": none,
            "textId": none,
            "domainId": np.full(1, number),
        }


def _partners(records: NDArray[Any], begins: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """Rows of begins of ranges, and the rows of their ends: the n-th begin of an id belongs to its n-th end."""

    def numbered(rows: IntArray) -> tuple[NDArray[Any], IntArray]:
        ids, times = records["id"][rows], records["time"][rows]
        order = np.lexsort((times, ids))
        ids = ids[order].astype(np.uint64)
        first = np.searchsorted(ids, ids)
        return ids << np.uint64(32) | (np.arange(len(ids)) - first).astype(np.uint64), rows[order]

    begin_keys, begin_rows = numbered(begins)
    end_keys, end_rows = numbered(ends)
    _, mine, theirs = np.intersect1d(begin_keys, end_keys, assume_unique=True, return_indices=True)
    return begin_rows[mine], end_rows[theirs]
