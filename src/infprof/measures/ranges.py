"""GPU time of NVTX ranges, projected by correlation: what was launched inside a range belongs to it."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from infprof.distinct import distinct, distinct_values
from infprof.measures import operations as op
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.results import NcclRow, RangeRow
from infprof.trace import IntArray


class Projection(NamedTuple):
    """Per range: the operations launched inside it by its thread. gpu_start > gpu_end where there are none."""

    gpu_start: IntArray
    gpu_end: IntArray
    gpu_sum_ns: IntArray
    kernels: IntArray


def project(prepared: Prepared, rows: IntArray) -> Projection:
    """Project ranges to the GPU: from the first start to the last end of what their thread launched inside them.

    An operation belongs to a range when its launch call begins inside it: queue delays, which move the operation out of
    the range's own time, do not matter.
    """
    table, calls = prepared.trace.ranges, prepared.trace.api_calls
    count = len(rows)
    first = np.full(count, np.iinfo(np.int64).max, dtype=np.int64)
    last = np.full(count, np.iinfo(np.int64).min, dtype=np.int64)
    total, kernels = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    ops = prepared.operations
    if table is None or calls is None or not count:
        return Projection(first, last, total, kernels)
    launched = np.flatnonzero(ops.launch >= 0)
    thread_of = calls["thread"][ops.launch[launched]]
    range_thread = table["thread"][rows]
    for thread in distinct_values(range_thread).tolist():
        mine = launched[thread_of == thread]
        if not len(mine):
            continue
        called = calls["start"][ops.launch[mine]]
        order = np.argsort(called, kind="stable")
        mine, called = mine[order], called[order]
        here = np.flatnonzero(range_thread == thread)
        low = np.searchsorted(called, table["start"][rows[here]], side="left")
        high = np.searchsorted(called, table["end"][rows[here]], side="left")
        sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(ops.end[mine] - ops.start[mine])])
        total[here] = sums[high] - sums[low]
        kernels[here] = high - low
        some = high > low
        if some.any():
            bounds = np.empty(2 * int(some.sum()), dtype=np.int64)
            bounds[0::2], bounds[1::2] = low[some], high[some]
            # reduceat needs indexes inside the array: one element more, ignored by taking every other result.
            starts = np.append(ops.start[mine], np.iinfo(np.int64).max)
            ends = np.append(ops.end[mine], np.iinfo(np.int64).min)
            first[here[some]] = np.minimum.reduceat(starts, bounds)[0::2]
            last[here[some]] = np.maximum.reduceat(ends, bounds)[0::2]
    return Projection(first, last, total, kernels)


def range_table(prepared: Prepared, scope: Intervals, limit: int = 50) -> list[RangeRow]:
    """The range names with the most GPU time in the scope: ranges whose projection begins in it.

    ``gpu_busy_ns`` sums the durations of what a range launched; nested ranges each count their own.
    """
    table = prepared.trace.ranges
    if table is None or not len(table):
        return []
    projected = project(prepared, np.arange(len(table), dtype=np.int64))
    low, high = int(scope.starts[0]), int(scope.ends[-1])
    chosen = (
        (projected.kernels > 0) & (projected.gpu_start >= low) & (projected.gpu_start < high) & (table["text"] >= 0)
    )
    text = table["text"][chosen]
    if not len(text):
        return []
    names, group = distinct(text)

    def summed(values: IntArray) -> IntArray:
        # bincount adds in float64: exact below 2**53 ns, which is 104 days.
        return np.bincount(group, weights=values.astype(np.float64), minlength=len(names)).astype(np.int64)

    counts = np.bincount(group, minlength=len(names))
    host = summed((table["end"] - table["start"])[chosen])
    spans = summed((projected.gpu_end - projected.gpu_start)[chosen])
    busy = summed(projected.gpu_sum_ns[chosen])
    kernels = summed(projected.kernels[chosen])
    strings = prepared.trace.strings
    # Nested ranges often launched the same: the outer one first.
    rank = zip((-busy).tolist(), (-host).tolist(), (strings[n] for n in names), range(len(names)), strict=True)
    order = [i for *_, i in heapq.nsmallest(limit, rank)]
    return [
        RangeRow(strings[names[i]], int(counts[i]), int(host[i]), int(spans[i]), int(busy[i]), int(kernels[i]))
        for i in order
    ]


def nccl_table(prepared: Prepared, scope: Intervals, limit: int = 50) -> list[NcclRow]:
    """Collectives by range name and message size, with bytes over the time of the kernels they launched.

    Without NCCL ranges: communication kernels by name, without sizes.
    """
    table = prepared.trace.ranges
    strings = prepared.trace.strings
    rows: dict[tuple[str, int], list[int]] = {}
    low, high = int(scope.starts[0]), int(scope.ends[-1])
    if table is not None and len(table) and (table["message_bytes"] >= 0).any():
        chosen = np.flatnonzero(table["message_bytes"] >= 0)
        projected = project(prepared, chosen)
        keep = (projected.kernels > 0) & (projected.gpu_start >= low) & (projected.gpu_start < high)
        for row, total in zip(chosen[keep].tolist(), projected.gpu_sum_ns[keep].tolist(), strict=True):
            entry = rows.setdefault((strings[table["text"][row]], int(table["message_bytes"][row])), [0, 0])
            entry[0] += 1
            entry[1] += total
        out = [
            NcclRow(name, count, size, total, size * count / total * 1e9 if total else None)
            for (name, size), (count, total) in rows.items()
        ]
        return sorted(out, key=lambda r: (-r.total_ns, r.name, r.bytes or 0))[:limit]
    ops, kernels = prepared.operations, prepared.trace.kernels
    if kernels is None:
        return []
    mine = (ops.kind == op.KERNEL) & ops.is_comm & (ops.start < high) & (ops.end > low)
    names = kernels["name"][ops.row[mine]]
    length = (ops.end - ops.start)[mine]
    unnamed = [
        NcclRow(strings[n], int((names == n).sum()), None, int(length[names == n].sum()), None)
        for n in distinct_values(names).tolist()
    ]
    return sorted(unnamed, key=lambda r: (-r.total_ns, r.name))[:limit]
