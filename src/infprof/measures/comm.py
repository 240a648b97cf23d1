"""Communication between devices: how much of it compute hides, message sizes, and waiting for the last rank."""

from __future__ import annotations

import numpy as np

from infprof.distinct import distinct_values, groups
from infprof.measures import operations as op
from infprof.measures.operations import Prepared
from infprof.measures.ranges import nccl_table
from infprof.measures.slices import DeviceTime
from infprof.quantiles import median
from infprof.results import Measures
from infprof.trace import BoolArray, IntArray

# Ranks are compared only if this share of their collectives has the same name in the same place.
MATCHED_SHARE = 0.9
# A collective that waits for a rank that stands still is this many times as long as usual, and this long. It stands
# alone: a large prompt makes a row of long ones.
OUTLIER_FACTOR, OUTLIER_NS = 10, 20_000_000
# Fewer collectives say nothing of what is usual.
LEAST_COLLECTIVES = 20

_NEEDS_RANKS = "traces of all ranks with common collectives"


def add_comm(measures: Measures, prepared: Prepared, time: DeviceTime, rows: BoolArray) -> None:
    """Communication measures of one device. Spread = how long its collectives waited for the last device to arrive."""
    ops = prepared.operations
    mine = rows & (ops.kind == op.KERNEL) & ops.is_comm
    total = time.comm.total()
    hidden = total - time.exposed_comm.total()
    measures.add("comm_count", int(mine.sum()), "count")
    length = (ops.end - ops.start)[mine]
    measures.add("comm_p50_ns", int(median(length)) if len(length) else None, "ns")
    measures.add("comm_total_ns", total, "ns")
    _add_outliers(measures, prepared, mine, length)
    measures.add("comm_hidden_ratio", hidden / total if total else None, "ratio")
    sized = [row for row in nccl_table(prepared, time.scope, None, time.device) if row.bytes is not None]
    moved = sum((row.bytes or 0) * row.count for row in sized)
    spent = sum(row.total_ns for row in sized)
    source = "collectives of kernels" if prepared.trace.collectives is not None else "NCCL ranges"
    measures.add("comm_bytes", moved if sized else None, "bytes", "B", source)
    measures.add("comm_bytes_per_s", moved * 1e9 / spent if spent else None, "bytes_per_s", "B", source)
    peaks = prepared.peaks_of(time.device).peaks
    peak = peaks.nvlink_bytes_per_s if peaks is not None else None
    measures.add("nvlink_peak_bytes_per_s", peak, "bytes_per_s", "D", "device table")
    waited = arrival_wait(prepared, time, mine)
    ratio = waited / total if waited is not None and total else None
    measures.add("comm_spread_ns", waited, "ns", source="timeline" if waited is not None else _NEEDS_RANKS)
    measures.add("comm_spread_ratio", ratio, "ratio", source="timeline" if ratio is not None else _NEEDS_RANKS)


def _add_outliers(measures: Measures, prepared: Prepared, mine: BoolArray, length: IntArray) -> None:
    """Single collectives that take far longer than the same kernel usually does: they wait for another rank."""
    ops, kernels = prepared.operations, prepared.trace.kernels
    beyond = np.zeros(len(length), dtype=np.int64)
    if kernels is not None and len(length) >= LEAST_COLLECTIVES:
        for _, alike in groups(kernels["name"][ops.row[mine]]):
            usual = float(median(length[alike]))
            long = length[alike] >= max(OUTLIER_FACTOR * usual, OUTLIER_NS)
            beyond[alike] = np.where(long, length[alike] - round(usual), 0)
    beside = np.append(beyond[1:], 0) + np.append(0, beyond[:-1])
    alone = (beyond > 0) & (beside == 0)
    measures.add("comm_outlier_count", int(alone.sum()), "count")
    measures.add("comm_outlier_ns", int(beyond[alone].sum()), "ns")


def matched_collectives(prepared: Prepared, low: int | None = None, high: int | None = None) -> list[IntArray] | None:
    """The communication kernels of each device, as rows of ``operations``, between two times; None if they do not match.

    The k-th collective of each device is the same operation when names agree.
    """
    ops, table = prepared.operations, prepared.trace.kernels
    if table is None:
        return None
    inside = (ops.kind == op.KERNEL) & ops.is_comm
    if low is not None and high is not None:
        inside &= (ops.end > low) & (ops.start < high)
    devices = distinct_values(ops.device[inside]).tolist()
    if len(devices) < 2:
        return None
    chains: list[IntArray] = [np.flatnonzero(inside & (ops.device == device)) for device in devices]
    if len({len(chain) for chain in chains}) > 1:
        return None
    names = [table["name"][ops.row[chain]] for chain in chains]
    same = np.mean([np.mean(names[0] == other) for other in names[1:]])
    return chains if same >= MATCHED_SHARE else None


def arrival_wait(prepared: Prepared, time: DeviceTime, mine: BoolArray) -> int | None:
    """How long this device's collectives ran before the last device began the same one; None if they do not match.

    Kernels of a collective start as their rank arrives and end together.
    """
    ops = prepared.operations
    if not mine.any():
        return None
    chains = matched_collectives(prepared, int(time.scope.starts[0]), int(time.scope.ends[-1]))
    devices = [int(ops.device[chain[0]]) for chain in chains or ()]
    if chains is None or time.device not in devices:
        return None
    last = np.max(np.stack([ops.start[chain] for chain in chains]), axis=0)
    own = chains[devices.index(time.device)]
    waited = np.clip(last - ops.start[own], 0, ops.end[own] - ops.start[own])
    return int(waited.sum())
