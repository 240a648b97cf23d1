"""The outermost CUDA calls of all threads as chains: what each costs, and what its thread did before it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from infprof.measures import calls as call_kinds
from infprof.measures import intervals as iv
from infprof.measures.operations import Prepared
from infprof.quantiles import median
from infprof.replay.recording import ALLOCATOR, LAUNCH, MODULE, OTHER, SYNC, Calls, narrow
from infprof.trace import COMMAND_BUFFER_FULL, MODULE_LOAD, BoolArray, IntArray, Trace, constant

_OF_KIND = np.array([LAUNCH, SYNC, LAUNCH, ALLOCATOR, MODULE, OTHER], dtype=np.int8)


def host_calls(prepared: Prepared, origin: int, begin: int) -> tuple[Calls, IntArray]:
    """The calls, and the position of each row of the trace's call table among them (-1 = none).

    ``origin``: the trace's first moment (ns); ``begin``: the start of the first operation of the GPU.
    """
    table, nested = prepared.trace.api_calls, prepared.thread_calls
    call_of_row = np.full(0 if table is None else len(table), -1, dtype=np.int64)
    if table is None or nested is None or not len(table):
        none = np.empty(0, dtype=np.int64)
        empty = Calls(none, none, none, none, none.astype(np.int8), none, none, none, none, none, none.astype(np.bool_))
        return empty, call_of_row
    rows, threads, starts, ends, gaps, waited, first = [], [], [], [], [], [], []
    waits = _Waits(prepared.trace)
    for number in sorted(nested.rows):
        mine = nested.rows[number]
        start, end = nested.times(number)
        before = np.concatenate([[origin], end[:-1]])
        rows.append(mine)
        threads.append(constant(number, len(mine)))
        starts.append(start)
        ends.append(end if (end >= start).all() else np.maximum(end, start))
        gaps.append(np.maximum(start - before, 0))
        waited.append(iv.covered(waits.of(number), np.minimum(np.maximum(before, begin), start), start))
        begins = np.zeros(len(mine), dtype=np.bool_)
        begins[0] = True
        first.append(begins)
    row, start, end, gap, wait = (_joined(parts) for parts in (rows, starts, ends, gaps, waited))
    call_of_row[row] = np.arange(len(row))
    # A call inside another one stands for it.
    call_of_row = call_of_row[nested.outer]
    cost = _OF_KIND[prepared.api_kinds.astype(np.int8)].take(table["name"][row])
    lead_in = gap - np.clip(start - begin, 0, gap)
    length = end - start
    calls = Calls(
        row,
        _joined(threads),
        start,
        end,
        _loading(cost, length),
        narrow(lead_in),
        narrow(gap - lead_in - wait),
        narrow(wait),
        narrow(np.clip(begin - start, 0, length)),
        narrow(length),
        _joined(first),
    )
    _count_compiling(prepared, calls)
    return calls, call_of_row


def _loading(cost: NDArray[np.int8], length: IntArray) -> NDArray[np.int8]:
    """Launches that last far longer than others load or compile their kernel."""
    launches = np.flatnonzero(cost == LAUNCH)
    if len(launches):
        factor = 100
        usual = median(length[launches])
        cost[launches[length[launches] > max(factor * usual, 100_000)]] = MODULE
    return cost


def _count_compiling(prepared: Prepared, calls: Calls) -> None:
    """What a thread works before it loads a module and launches a new kernel from it is the compiler's: the load's."""
    new = np.isin(calls.row, prepared.first_launches)
    loads = np.append((calls.cost[:-1] == MODULE) & new[1:] & ~calls.first[1:] & ~new[:-1], False)
    calls.own = np.where(loads, np.add(calls.own, calls.work, dtype=np.int64), calls.own)
    calls.work = np.where(loads, 0, calls.work)


class _Waits:
    """When a thread was not working by its own will: waiting system calls, on no CPU, and the profiler."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.waiting: BoolArray | None = None
        if trace.os_calls is not None and len(trace.os_calls):
            self.waiting = call_kinds.os_kinds(trace.strings)[trace.os_calls["name"]] != call_kinds.OTHER_OS

    def of(self, thread: int) -> iv.Intervals:
        trace, sets = self.trace, []
        if trace.os_calls is not None and self.waiting is not None:
            mine = self.waiting & (trace.os_calls["thread"] == thread)
            sets.append(iv.union(trace.os_calls["start"][mine], trace.os_calls["end"][mine]))
        if trace.off_cpu is not None and len(trace.off_cpu):
            mine = trace.off_cpu["thread"] == thread
            sets.append(iv.union(trace.off_cpu["start"][mine], trace.off_cpu["end"][mine]))
        if trace.overheads is not None and len(trace.overheads):
            table = trace.overheads
            mine = (table["thread"] == thread) & (table["kind"] != MODULE_LOAD) & (table["kind"] != COMMAND_BUFFER_FULL)
            sets.append(iv.union(table["start"][mine], table["end"][mine]))
        return iv.merge(*sets) if sets else iv.empty()


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
