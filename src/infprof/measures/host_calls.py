"""What host calls cost: synchronising, allocating, loading modules; retries of failed allocations; profiler overhead."""

from __future__ import annotations

import numpy as np

from infprof.distinct import PIECE
from infprof.measures import calls
from infprof.measures import intervals as iv
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.results import ApiRow, Measures
from infprof.trace import MODULE_LOAD, PROFILER, BoolArray, IntArray, picked

_NAMES = (
    ("sync_call_count", "count"),
    ("sync_call_ns", "ns"),
    ("sync_call_per_s", "per_s"),
    ("allocator_call_count", "count"),
    ("allocator_call_ns", "ns"),
    ("allocator_failed_count", "count"),
    ("allocator_retry_count", "count"),
    ("pinned_alloc_count", "count"),
    ("module_load_count", "count"),
    ("module_load_call_ns", "ns"),
)


# Calls that ask for device memory.
_ASKS = r"^(cuda|hip|mc|musa)Malloc(Async|Managed|Pitch)?(_ptsz)?$|^cuMem(Alloc(Async|Pitch|Managed)?|Create)(_ptsz)?$"
# So many blocks given back between two allocations are no exchange of one buffer for another.
MANY_FREES = 4


def calls_in(prepared: Prepared, scope: Intervals, processes: IntArray | None = None) -> BoolArray:
    """Which CUDA calls, of these processes or of all, overlap the scope."""
    table = prepared.trace.api_calls
    if table is None:
        return np.empty(0, dtype=np.bool_)
    inside = iv.overlaps(scope, table["start"], table["end"])
    if processes is not None:
        wanted = np.zeros(len(prepared.trace.processes) + 1, dtype=np.bool_)  # the last one: not recorded
        wanted[processes] = True
        if not wanted[:-1].all() or (not wanted[-1] and table["process"].min(initial=0) < 0):
            inside &= wanted[table["process"]]
    return inside


def add_host_calls(measures: Measures, prepared: Prepared, scope: Intervals, processes: IntArray) -> None:
    """Call measures of the processes that use a device; times are clipped to the scope, nested calls count once."""
    table = prepared.trace.api_calls
    if table is None or prepared.thread_calls is None:
        for name, unit in _NAMES:
            measures.add(name, None, unit, source="CUDA calls were not collected")
        return
    # Of most calls, launches, nothing is said here.
    kind_of = prepared.api_kinds.astype(np.int8)
    pinned = calls.pinned_allocators(prepared.trace.strings)
    asked = np.isin(kind_of, (calls.SYNC, calls.ALLOCATOR, calls.MODULE)) | pinned
    rows = np.flatnonzero(asked.take(table["name"]) & calls_in(prepared, scope, processes))
    rows = rows[prepared.thread_calls.outer[rows] == rows]
    name = table["name"][rows]
    kind = kind_of[name]
    spent = iv.covered(scope, table["start"][rows], table["end"][rows])
    window = scope.total()
    sync, allocator, module = kind == calls.SYNC, kind == calls.ALLOCATOR, kind == calls.MODULE
    measures.add("sync_call_count", int(sync.sum()), "count")
    measures.add("sync_call_ns", int(spent[sync].sum()), "ns")
    measures.add("sync_call_per_s", int(sync.sum()) * 1e9 / window if window else None, "per_s")
    measures.add("allocator_call_count", int(allocator.sum()), "count")
    measures.add("allocator_call_ns", int(spent[allocator].sum()), "ns")
    returned = table["return_value"][rows]
    # A recorder that leaves them out leaves out all.
    told = not (table["return_value"][:1] < 0).any()
    why = "timeline" if told else "what calls returned was not recorded"
    failed = int((allocator & (returned > 0)).sum()) if told else None
    measures.add("allocator_failed_count", failed, "count", source=why)
    starts, _ = retry_windows(prepared)
    retries = starts[iv.contains(scope, starts)] if len(starts) else starts
    # The order of calls can show a retry, and not that there was none.
    count = len(retries) if told or len(retries) else None
    source = f"order of the calls; {why}" if count and not told else why
    measures.add("allocator_retry_count", count, "count", source=source)
    measures.add("pinned_alloc_count", int(pinned[name].sum()), "count")
    overheads = prepared.trace.overheads
    if not module.any() and overheads is not None and (overheads["kind"] == MODULE_LOAD).any():
        measures.add("module_load_count", None, "count", source="module loads stand as overhead, not as calls")
        measures.add("module_load_call_ns", None, "ns", source="module loads stand as overhead, not as calls")
        return
    measures.add("module_load_count", int(module.sum()), "count")
    measures.add("module_load_call_ns", int(spent[module].sum()), "ns")


def retry_windows(prepared: Prepared) -> tuple[IntArray, IntArray]:
    """Start and end of allocation retries of all threads: a failed allocation, frees, a successful one.

    Caching allocators answer a failed cudaMalloc by synchronising and freeing what they cached, then try again.
    """
    table, nested = prepared.trace.api_calls, prepared.thread_calls
    none = np.empty(0, dtype=np.int64)
    if table is None or nested is None or not len(table):
        return none, none
    frees = calls.matching(prepared.trace.strings, r"Free|Release|Unmap")
    if table["return_value"][0] < 0:
        return _retries_by_order(prepared, frees)
    if not (table["return_value"] > 0).any():
        return none, none
    starts, ends = [], []
    for rows in nested.rows.values():
        mine = rows[prepared.api_kinds[table["name"][rows]] == calls.ALLOCATOR]
        is_free = frees[table["name"][mine]]
        failed = ~is_free & (table["return_value"][mine] > 0)
        if not failed.any():
            continue
        done = np.flatnonzero(~is_free & (table["return_value"][mine] == 0))
        freed = np.concatenate([[0], np.cumsum(is_free)])
        at = np.flatnonzero(failed)
        following = np.searchsorted(done, at)
        at, following = at[following < len(done)], following[following < len(done)]
        success = done[following]
        freeing = freed[success] - freed[at] > 0
        at, success = at[freeing], success[freeing]
        # Several failures before one success are one retry, from the first of them on.
        success, first = np.unique(success, return_index=True)
        starts.append(table["start"][mine[at[first]]])
        ends.append(table["end"][mine[success]])
    return (np.concatenate(starts), np.concatenate(ends)) if starts else (none, none)


def _retries_by_order(prepared: Prepared, frees: BoolArray) -> tuple[IntArray, IntArray]:
    """Retries where nobody recorded what calls returned: two allocations with nothing but frees and waits between.

    Who asks for memory and at once gives back several blocks (or waits for the device first) did not get it.
    """
    table, nested = prepared.trace.api_calls, prepared.thread_calls
    assert table is not None and nested is not None
    asks = calls.matching(prepared.trace.strings, _ASKS) & ~frees
    starts, ends = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for rows in nested.rows.values():
        kind = prepared.api_kinds[table["name"][rows]]
        mine = rows[kind != calls.OTHER_CUDA]
        name = table["name"][mine]
        at = np.flatnonzero(asks[name])
        freed, waited = (
            np.concatenate([[0], np.cumsum(of)]) for of in (frees[name], prepared.api_kinds[name] == calls.SYNC)
        )
        first, second = at[:-1], at[1:]
        free, wait = freed[second] - freed[first], waited[second] - waited[first]
        retry = (free + wait == second - first - 1) & (free >= 2) & ((wait > 0) | (free >= MANY_FREES))
        starts.append(table["start"][mine[first[retry]]])
        ends.append(table["end"][mine[second[retry]]])
    return np.concatenate(starts), np.concatenate(ends)


def api_table(prepared: Prepared, scope: Intervals, limit: int = 50) -> list[ApiRow]:
    """CUDA calls by name, all processes, most time first; whole durations of the calls that overlap the scope.

    Runtime and driver calls are counted each, as ``nsys stats`` does: a runtime call includes the driver call inside it.
    """
    table = prepared.trace.api_calls
    if table is None:
        return []
    inside = calls_in(prepared, scope)
    strings = prepared.trace.strings
    # By name, in pieces that stay in the processor's cache: sums of float64 are exact below 2**53 ns.
    count, total, failed = (np.zeros(len(strings), dtype=np.int64) for _ in range(3))
    some_failed = (table["return_value"] > 0).any()
    for i in range(0, len(table), PIECE):
        piece = slice(i, i + PIECE)
        chosen = inside[piece]
        name = picked(table["name"][piece], chosen)
        length = picked(table["end"][piece] - table["start"][piece], chosen)
        count += np.bincount(name, minlength=len(strings))
        total += np.bincount(name, length.astype(np.float64), len(strings)).astype(np.int64)
        if some_failed:
            bad = name[table["return_value"][piece][chosen] > 0]
            failed += np.bincount(bad, minlength=len(strings))
    names = np.flatnonzero(count)
    order = names[np.lexsort((names, -total[names]))][:limit]
    return [ApiRow(strings[i], int(count[i]), int(total[i]), int(failed[i])) for i in order]


def add_profiler(measures: Measures, prepared: Prepared, scope: Intervals) -> None:
    """The profiler's own intervals in the scope, whether or not the GPU waited for them."""
    table = prepared.trace.overheads
    if table is None:
        measures.add("profiler_overhead_count", 0, "count")
        measures.add("profiler_overhead_ns", 0, "ns")
        return
    own = table["kind"] == PROFILER
    inside: BoolArray = own & (iv.covered(scope, table["start"], table["end"]) > 0)
    covered = iv.intersect(iv.union(table["start"][own], table["end"][own]), scope)
    measures.add("profiler_overhead_count", int(inside.sum()), "count")
    measures.add("profiler_overhead_ns", covered.total(), "ns")
