"""GPU time of NVTX ranges, projected by correlation: what was launched inside a range belongs to it."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from infprof.distinct import PIECE, distinct_values
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.results import NcclRow, RangeRow
from infprof.trace import IntArray, Table, constant, is_constant, picked


class Projection(NamedTuple):
    """Per range: the operations launched inside it by its thread. gpu_start > gpu_end where there are none."""

    gpu_start: IntArray
    gpu_end: IntArray
    gpu_sum_ns: IntArray
    kernels: IntArray


def project(prepared: Prepared, rows: IntArray | None = None, device: int | None = None) -> Projection:
    """Project ranges to the GPU: from the first start to the last end of what their thread launched inside them.

    ``rows`` chooses among the rows of their table, ``device`` among the operations; None = all.

    An operation belongs to a range when its launch call begins inside it: queue delays, which move the operation out of
    the range's own time, do not matter.
    """
    table, calls = prepared.trace.ranges, prepared.trace.api_calls
    count = len(rows) if rows is not None else 0 if table is None else len(table)
    first = np.full(count, np.iinfo(np.int64).max, dtype=np.int64)
    last = np.full(count, np.iinfo(np.int64).min, dtype=np.int64)
    total, kernels = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    ops = prepared.operations
    if table is None or calls is None or not count:
        return Projection(first, last, total, kernels)
    launched = np.flatnonzero(ops.launch >= 0 if device is None else (ops.launch >= 0) & (ops.device == device))
    thread_of = _at(calls["thread"], ops.launch[launched])
    starts, ends, range_thread = (
        table[column] if rows is None else table[column][rows] for column in ("start", "end", "thread")
    )
    for thread in distinct_values(range_thread).tolist():
        mine = picked(launched, thread_of == thread)
        if not len(mine):
            continue
        called = calls["start"][ops.launch[mine]]
        if not _in_order(called):
            order = np.argsort(called, kind="stable")
            mine, called = mine[order], called[order]
        here = np.flatnonzero(range_thread == thread)
        low, high = (_counted_before(called, edge if len(here) == count else edge[here]) for edge in (starts, ends))
        started, ended = ops.start[mine], ops.end[mine]
        sums = np.zeros(len(mine) + 1, dtype=np.int64)
        np.cumsum(ended - started, out=sums[1:])
        total[here] = sums[high] - sums[low]
        kernels[here] = high - low
        some = high > low
        here, low, high = picked(here, some), picked(low, some), picked(high, some)
        first[here] = _of_each_run(np.minimum, started, low, high)
        last[here] = _of_each_run(np.maximum, ended, low, high)
    return Projection(first, last, total, kernels)


def _at(column: IntArray, rows: IntArray) -> IntArray:
    """The column at these rows; a constant stays one."""
    return constant(int(column[0]), len(rows)) if is_constant(column) else column[rows]


def _in_order(values: IntArray) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def _counted_before(points: IntArray, times: IntArray) -> IntArray:
    """How many of the sorted points lie before each time. Neighbouring times look at the same few points."""
    out = np.empty(len(times), dtype=np.int64)
    for i in range(0, len(times), PIECE):
        out[i : i + PIECE] = iv.count_before(points, times[i : i + PIECE])
    return out


def _of_each_run(extreme: np.ufunc, values: IntArray, low: IntArray, high: IntArray) -> IntArray:
    """The smallest (np.minimum) or largest (np.maximum) of values[low:high] for each pair; no pair may be empty."""
    if not len(low):
        return low
    if _in_order(values):
        # As on a single stream.
        return values[low] if extreme is np.minimum else values[high - 1]
    bounds = np.empty(2 * len(low), dtype=np.int64)
    bounds[0::2], bounds[1::2] = low, high
    # reduceat needs indexes inside the array: one element more, ignored by taking every other result.
    return np.asarray(extreme.reduceat(np.append(values, values[-1]), bounds)[0::2], dtype=np.int64)


def range_table(prepared: Prepared, scope: Intervals, limit: int = 50) -> list[RangeRow]:
    """The range names with the most GPU time in the scope: ranges whose projection begins in it.

    ``gpu_busy_ns`` sums the durations of what a range launched; nested ranges each count their own.
    """
    table = prepared.trace.ranges
    if table is None or not len(table):
        return []
    projected = project(prepared)
    low, high = int(scope.starts[0]), int(scope.ends[-1])
    chosen = (
        (projected.kernels > 0) & (projected.gpu_start >= low) & (projected.gpu_start < high) & (table["text"] >= 0)
    )
    text = picked(table["text"], chosen)
    if not len(text):
        return []
    first, last, total, launched = (picked(column, chosen) for column in projected)
    started, ended = picked(table["start"], chosen), picked(table["end"], chosen)
    by_text = np.zeros((5, len(prepared.trace.strings)), dtype=np.int64)
    for i in range(0, len(text), PIECE):
        here = slice(i, i + PIECE)
        by_text[0] += np.bincount(text[here], minlength=by_text.shape[1])
        values = (ended[here] - started[here], last[here] - first[here], total[here], launched[here])
        for sums, value in zip(by_text[1:], values, strict=True):
            # bincount adds in float64: exact below 2**53 ns, which is 104 days.
            sums += np.bincount(text[here], value.astype(np.float64), len(sums)).astype(np.int64)
    names = np.flatnonzero(by_text[0])
    counts, host, spans, busy, kernels = by_text[:, names]
    strings = prepared.trace.strings
    # Nested ranges often launched the same: the outer one first.
    rank = zip((-busy).tolist(), (-host).tolist(), (strings[n] for n in names), range(len(names)), strict=True)
    order = [i for *_, i in heapq.nsmallest(limit, rank)]
    return [
        RangeRow(strings[names[i]], int(counts[i]), int(host[i]), int(spans[i]), int(busy[i]), int(kernels[i]))
        for i in order
    ]


def nccl_table(
    prepared: Prepared, scope: Intervals, limit: int | None = 50, device: int | None = None
) -> list[NcclRow]:
    """Collectives by name and message size, with bytes over the time of their kernels; of one device, or of all.

    From NCCL's ranges, else from what the kernels themselves say; without either communication kernels by their name,
    without sizes.
    """
    table = prepared.trace.ranges
    strings = prepared.trace.strings
    rows: dict[tuple[str, int], list[int]] = {}
    low, high = int(scope.starts[0]), int(scope.ends[-1])
    if table is not None and len(table) and (table["message_bytes"] >= 0).any():
        chosen = np.flatnonzero(table["message_bytes"] >= 0)
        projected = project(prepared, chosen, device)
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
    if prepared.trace.collectives is not None and len(prepared.trace.collectives):
        return _stated_collectives(prepared.trace.collectives, strings, low, high, device)[:limit]
    ops, kernels = prepared.operations, prepared.trace.kernels
    if kernels is None:
        return []
    mine = (ops.kind == op.KERNEL) & ops.is_comm & (ops.start < high) & (ops.end > low)
    mine = mine if device is None else mine & (ops.device == device)
    names = kernels["name"][ops.row[mine]]
    length = (ops.end - ops.start)[mine]
    unnamed = [
        NcclRow(strings[n], int((names == n).sum()), None, int(length[names == n].sum()), None)
        for n in distinct_values(names).tolist()
    ]
    return sorted(unnamed, key=lambda r: (-r.total_ns, r.name))[:limit]


def _stated_collectives(table: Table, strings: list[str], low: int, high: int, device: int | None) -> list[NcclRow]:
    """Collectives that begin between ``low`` and ``high``, whose kernels say what they move."""
    inside = (table["start"] >= low) & (table["start"] < high)
    inside = inside if device is None else inside & (table["device"] == device)
    named = np.column_stack([table["name"][inside], table["bytes"][inside]])
    kinds, which = np.unique(named, axis=0, return_inverse=True)
    spent = np.zeros(len(kinds), dtype=np.int64)
    np.add.at(spent, which.ravel(), (table["end"] - table["start"])[inside])
    rows = []
    for (name, size), count, total in zip(
        kinds.tolist(), np.bincount(which.ravel(), minlength=len(kinds)).tolist(), spent.tolist(), strict=True
    ):
        rate = size * count / total * 1e9 if size >= 0 and total else None
        rows.append(NcclRow(strings[name], count, size if size >= 0 else None, total, rate))
    return sorted(rows, key=lambda r: (-r.total_ns, r.name, r.bytes or 0))
