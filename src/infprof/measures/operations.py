"""Everything that ran on a GPU in one sorted list, and which host call launched it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from infprof.distinct import distinct_values, first_of_each
from infprof.measures import calls
from infprof.measures.kernel_class import KernelClass, classify, is_communication
from infprof.trace import BoolArray, IntArray, Table, Trace, compact, picked

KERNEL, GRAPH, COPY, MEMSET = range(4)
_TABLES = ("kernels", "graphs", "copies", "memsets")


@dataclass
class Operations:
    """All GPU operations of a trace by start time. ``row`` indexes the table that ``kind`` names."""

    start: IntArray
    end: IntArray
    device: IntArray
    process: IntArray
    stream: IntArray
    kind: IntArray
    row: IntArray
    is_comm: BoolArray
    launch: IntArray  # row of the launching call in api_calls, -1 where not recorded

    def __len__(self) -> int:
        return len(self.start)


class Prepared:
    """A trace with what every measure needs: kernel classes, operations with their launches, calls by thread."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.kernel_classes = self._classes()
        comm = np.zeros(len(trace.strings) + 1, dtype=np.bool_)
        for index in self.kernel_classes:
            comm[index] = is_communication(trace.strings[index])
        self.comm_names = comm
        self.api_kinds = calls.cuda_kinds(trace.strings) if trace.api_calls is not None else np.empty(0, dtype=np.int64)
        self.thread_calls = calls.ThreadCalls(trace.api_calls) if trace.api_calls is not None else None
        self.operations = self._operations()

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
        columns: dict[str, list[IntArray]] = {k: [] for k in ("start", "end", "device", "process", "stream")}
        kinds, rows, comm, launches = [], [], [], []
        for kind, name in enumerate(_TABLES):
            table: Table | None = getattr(self.trace, name)
            if table is None or not len(table):
                continue
            for key, parts in columns.items():
                parts.append(table[key])
            kinds.append(np.full(len(table), kind, dtype=np.int64))
            rows.append(np.arange(len(table), dtype=np.int64))
            comm.append(self.comm_names[table["name"]] if kind == KERNEL else np.zeros(len(table), dtype=np.bool_))
            launches.append(join_launches(self.trace, table["process"], table["correlation"]))
        if not kinds:
            none = np.empty(0, dtype=np.int64)
            return Operations(none, none, none, none, none, none, none, np.empty(0, dtype=np.bool_), none)
        order = np.argsort(np.concatenate(columns["start"]), kind="stable")

        def arranged(parts: list[IntArray]) -> IntArray:
            return compact(np.concatenate(parts)[order])

        return Operations(
            start=arranged(columns["start"]),
            end=arranged(columns["end"]),
            device=arranged(columns["device"]),
            process=arranged(columns["process"]),
            stream=arranged(columns["stream"]),
            kind=arranged(kinds),
            row=arranged(rows),
            is_comm=np.concatenate(comm)[order],
            launch=arranged(launches),
        )


def join_launches(trace: Trace, process: IntArray, correlation: IntArray) -> IntArray:
    """The row in ``api_calls`` that launched each operation: same process and same correlation id; -1 if none.

    Ids are unique per process only and one graph launch owns many kernels. Where a runtime and a driver call share the
    id, the one that began first (the outer one) counts.
    """
    table = trace.api_calls
    if table is None or not len(table) or not len(process):
        return np.full(len(process), -1, dtype=np.int64)
    call_process, call_id = table["process"], table["correlation"]
    known = call_id >= 0
    low = int(min(call_id[known].min(), correlation.min())) if known.any() else 0
    span = int(max(call_id[known].max() if known.any() else 0, correlation.max())) - low + 1
    processes = len(trace.processes) + 1
    calls_key = (call_process + 1) * span + (call_id - low)
    wanted_key = (process + 1) * span + (correlation - low)
    rows = np.flatnonzero(known)
    if span * processes <= 16 * (len(table) + len(process)) + 1_000_000:
        # Dense ids: a direct table, fifteen times faster than a merge. Written backwards, so that the first call stays.
        direct = np.full(span * processes, -1, dtype=np.int64)
        direct[calls_key[rows[::-1]]] = rows[::-1]
        found = direct[wanted_key]
    else:
        order = rows[np.argsort(calls_key[rows], kind="stable")]
        keys = calls_key[order]
        index = (
            np.minimum(np.searchsorted(keys, wanted_key), len(keys) - 1) if len(keys) else np.zeros(0, dtype=np.int64)
        )
        found = np.where(keys[index] == wanted_key, order[index], -1) if len(keys) else np.full(len(process), -1)
    return np.where(correlation >= 0, found, -1)
