"""Everything that ran on a GPU in one sorted list, and which host call launched it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from infprof.distinct import PIECE, distinct_values, first_of_each
from infprof.hardware import Match, find
from infprof.hardware.gpu_spec import GpuSpec
from infprof.measures import calls
from infprof.measures.kernel_class import KernelClass, classify, is_communication
from infprof.trace import (
    D2H,
    H2D,
    PAGEABLE,
    UNKNOWN_MEMORY,
    BoolArray,
    IntArray,
    Table,
    Trace,
    compact,
    constant,
    is_constant,
    picked,
)

KERNEL, GRAPH, COPY, MEMSET = range(4)
# An asynchronous copy of pinned memory returns at once; one whose call lasts this long was held back.
BLOCKED_FACTOR, BLOCKED_NS = 10, 100_000
_TABLES = ("kernels", "graphs", "copies", "memsets")


@dataclass
class Operations:
    """All GPU operations of a trace by start time. ``row`` indexes the table that ``kind`` names."""

    start: IntArray
    end: IntArray
    device: IntArray
    process: IntArray
    stream: IntArray
    kind: NDArray[np.int8]
    row: IntArray
    is_comm: BoolArray
    launch: IntArray  # row of the launching call in api_calls, -1 where not recorded

    def __len__(self) -> int:
        return len(self.start)


class Prepared:
    """A trace with what every measure needs: kernel classes, operations with their launches, calls by thread.

    ``gpu_spec``: peaks that the user gave for its devices.
    """

    def __init__(self, trace: Trace, gpu_spec: GpuSpec | None = None) -> None:
        self.trace = trace
        self.gpu_spec = gpu_spec
        self.kernel_classes = self._classes()
        comm = np.zeros(len(trace.strings) + 1, dtype=np.bool_)
        for index in self.kernel_classes:
            comm[index] = is_communication(trace.strings[index])
        self.comm_names = comm
        self.api_kinds = calls.cuda_kinds(trace.strings) if trace.api_calls is not None else np.empty(0, dtype=np.int64)
        self.thread_calls = calls.ThreadCalls(trace.api_calls) if trace.api_calls is not None else None
        self.launches = Launches(trace)
        self.operations = self._operations()

    def peaks_of(self, device: int) -> Match:
        """What a device (a place in ``trace.devices``) can do at most, or why that is not known."""
        described = self.trace.devices[device]
        capability = described.compute_capability
        found = find(
            described.name,
            sm_count=described.sm_count,
            memory_bytes=described.memory_bytes,
            compute_capability=".".join(map(str, capability)) if capability else None,
        )
        given = self.gpu_spec
        return found if given is None or not given.applies_to(described.name) else given.over(found)

    @cached_property
    def first_operations(self) -> NDArray[np.int32]:
        """Per row of ``api_calls`` the first operation that it launched, -1 where it launched none."""
        table = self.trace.api_calls
        first = np.full(0 if table is None else len(table), -1, dtype=np.int32)
        launch = self.operations.launch
        rows = np.flatnonzero(launch >= 0)[::-1]
        # Operations are sorted by start: written backwards, the first one stays.
        first[launch[rows]] = rows
        return first

    @cached_property
    def blocked_copies(self) -> BoolArray:
        """Per row of ``api_calls`` whether it is an asynchronous host copy that was held back although its memory allows more."""
        table, copies = self.trace.api_calls, self.trace.copies
        blocked = np.zeros(0 if table is None else len(table), dtype=np.bool_)
        if table is None or copies is None or not len(copies):
            return blocked
        ops = self.operations
        mine = np.flatnonzero((ops.kind == COPY) & (ops.launch >= 0))
        row, launch = ops.row[mine], ops.launch[mine]
        kind = copies["kind"][row]
        host_end = np.where(kind == H2D, copies["src"][row], copies["dst"][row])
        called = table["end"][launch] - table["start"][launch]
        # A copy to the host waits where its memory is pageable: without knowing the memory that is no sign of anything.
        to_unknown = (kind == D2H) & (host_end == UNKNOWN_MEMORY)
        held = np.isin(kind, (H2D, D2H)) & (host_end != PAGEABLE) & ~to_unknown
        held &= calls.matching(self.trace.strings, r"Memcpy\w*Async")[table["name"][launch]]
        held &= (called > BLOCKED_NS) & (called > BLOCKED_FACTOR * (ops.end - ops.start)[mine])
        blocked[launch[held]] = True
        if self.thread_calls is not None:
            blocked[self.thread_calls.outer[launch[held]]] = True
        return blocked

    @cached_property
    def first_launches(self) -> IntArray:
        """Rows of ``api_calls`` that launched a kernel name for the first time, sorted."""
        ops, kernels, table = self.operations, self.trace.kernels, self.trace.api_calls
        if kernels is None or table is None:
            return np.empty(0, dtype=np.int64)
        mine = (ops.kind == KERNEL) & (ops.launch >= 0)
        launch, name = picked(ops.launch, mine), kernels["name"][picked(ops.row, mine)]
        called = table["start"][launch]
        if (called[1:] < called[:-1]).any():
            order = np.argsort(called, kind="stable")
            launch, name = launch[order], name[order]
        return np.unique(launch[first_of_each(name)[1]])

    def _classes(self) -> dict[int, KernelClass]:
        kernels = self.trace.kernels
        if kernels is None:
            return {}
        used = distinct_values(kernels["name"]).tolist()
        return dict(zip(used, classify([self.trace.strings[i] for i in used]), strict=True))

    def _operations(self) -> Operations:
        tables: list[tuple[int, Table]] = [
            (kind, table) for kind, name in enumerate(_TABLES) if (table := getattr(self.trace, name)) is not None
        ]
        tables = [(kind, table) for kind, table in tables if len(table)]
        if not tables:
            none = np.empty(0, dtype=np.int64)
            return Operations(
                none, none, none, none, none, none.astype(np.int8), none, np.empty(0, dtype=np.bool_), none
            )
        starts = np.concatenate([table["start"] for _, table in tables])
        in_order = bool((starts[1:] >= starts[:-1]).all())
        order: IntArray | slice = slice(None) if in_order else np.argsort(starts, kind="stable")
        counts = [len(table) for _, table in tables]

        def column(name: str) -> IntArray:
            parts = [table[name] for _, table in tables]
            if all(is_constant(part) or len(part) == 1 for part in parts) and len({int(p[0]) for p in parts}) == 1:
                return constant(int(parts[0][0]), len(starts))
            return compact(np.concatenate(parts)[order])

        comm = np.zeros(len(starts), dtype=np.bool_)
        # Kernels come first.
        if tables[0][0] == KERNEL and self.comm_names.any():
            comm[: counts[0]] = self.comm_names[tables[0][1]["name"]]
            comm = comm[order]
        launch = np.concatenate([self.launches.find(table["process"], table["correlation"]) for _, table in tables])
        return Operations(
            start=starts[order],
            end=column("end"),
            device=column("device"),
            process=column("process"),
            stream=column("stream"),
            kind=np.repeat(np.array([kind for kind, _ in tables], dtype=np.int8), counts)[order],
            row=np.concatenate([np.arange(count, dtype=np.int64) for count in counts])[order],
            is_comm=comm,
            launch=launch[order],
        )


class Launches:
    """Finds the call that launched an operation: same process and same correlation id.

    Ids are unique per process only and one graph launch owns many kernels. Where a runtime and a driver call share the
    id, the one that began first (the outer one) counts.
    """

    def __init__(self, trace: Trace) -> None:
        self._processes = len(trace.processes) + 1
        self._low, self._span = 0, 0
        # By (process, id): the row of the call, -1 where there is none; None where ids are too far apart for a table.
        self._direct: NDArray[np.int32] | None = None
        self._keys, self._rows = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        table = trace.api_calls
        if table is None or not len(table):
            return
        process, ids = table["process"], table["correlation"]
        highest = int(ids.max())
        if highest < 0:
            return
        known = ids >= 0
        self._low = int(ids.min()) if known.all() else int(ids[known].min())
        self._span = highest - self._low + 1
        if self._span * self._processes <= 16 * len(table) + 1_000_000:
            # Dense ids: a direct table, fifteen times faster than a merge. Written backwards, so that the first call stays.
            self._direct = np.full(self._span * self._processes, -1, dtype=np.int32)
            for i in reversed(range(0, len(table), PIECE)):
                rows = np.flatnonzero(known[i : i + PIECE])[::-1] + i
                self._direct[self._key(process[rows], ids[rows])] = rows
        else:
            rows = np.flatnonzero(known)
            keys = self._key(process[rows], ids[rows])
            order = np.argsort(keys, kind="stable")
            self._keys, self._rows = keys[order], rows[order]

    def find(self, process: IntArray, correlation: IntArray) -> IntArray:
        """The row in ``api_calls`` that launched each operation, -1 if none. ``correlation`` -1 = not recorded."""
        out = np.empty(len(process), dtype=np.int64)
        for i in range(0, len(process), PIECE):
            out[i : i + PIECE] = self._find(process[i : i + PIECE], correlation[i : i + PIECE])
        return out

    def _find(self, process: IntArray, correlation: IntArray) -> IntArray:
        # Ids of no call may be anything.
        inside = (correlation >= self._low) & (correlation < self._low + self._span) & (correlation >= 0)
        if not inside.any():
            return np.full(len(process), -1, dtype=np.int64)
        key = self._key(process, np.where(inside, correlation, self._low))
        if self._direct is not None:
            return np.where(inside, self._direct[key], -1)
        index = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        return np.where(inside & (self._keys[index] == key), self._rows[index], -1)

    def _key(self, process: IntArray, ids: IntArray) -> IntArray:
        return np.asarray((process + 1) * self._span + (ids - self._low), dtype=np.int64)
