"""Copies between host and device: how much, how fast, pageable or pinned, and how much of it nothing hides."""

from __future__ import annotations

import numpy as np

from infprof import trace as t
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.operations import Prepared
from infprof.measures.slices import DeviceTime
from infprof.quantiles import median
from infprof.results import CopyRow, Measures
from infprof.trace import BoolArray, IntArray

SIZE_CLASSES = (("< 64 KiB", 0, 1 << 16), ("64 KiB – 1 MiB", 1 << 16, 1 << 20), ("1 – 16 MiB", 1 << 20, 1 << 24))
LARGEST = ("≥ 16 MiB", 1 << 24, 1 << 62)
MEMORY_NOT_RECORDED = "the memory kind of copies was not recorded"
# What .item() and its like read back.
TINY_BYTES = 64
# A pair of copies of equal size is a round trip only if it moves data, not a flag.
ROUND_TRIP_BYTES = 4096


class DeviceCopies:
    """The copies of one device inside a scope, as columns, and their exposed time."""

    def __init__(self, prepared: Prepared, time: DeviceTime, rows: BoolArray) -> None:
        ops, table = prepared.operations, prepared.trace.copies
        self.prepared, self.time = prepared, time
        chosen = np.flatnonzero(rows & (ops.kind == op.COPY))
        at = ops.row[chosen]
        empty = np.empty(0, dtype=np.int64)
        self.start, self.end = ops.start[chosen], ops.end[chosen]
        self.launch, self.process, self.stream = ops.launch[chosen], ops.process[chosen], ops.stream[chosen]
        self.bytes = table["bytes"][at] if table is not None else empty
        self.kind = table["kind"][at] if table is not None else empty
        self.src = table["src"][at] if table is not None else empty
        self.dst = table["dst"][at] if table is not None else empty
        self.exposed_host = iv.merge(*(time.exposed_copy[c] for c in ("h2d", "d2h", "uvm")))

    def host(self) -> BoolArray:
        """Copies between host and device, UVM migrations included."""
        return np.isin(self.kind, (t.H2D, t.D2H, t.UVM))

    def pageable(self) -> BoolArray:
        host_end = np.where(self.kind == t.H2D, self.src, self.dst)
        return np.asarray(np.isin(self.kind, (t.H2D, t.D2H)) & (host_end == t.PAGEABLE), dtype=np.bool_)

    def memory_known(self) -> bool:
        """Whether the trace says which memory the copies used."""
        host_end = np.where(self.kind == t.H2D, self.src, self.dst)
        directed = np.isin(self.kind, (t.H2D, t.D2H))
        return bool((host_end[directed] != t.UNKNOWN_MEMORY).any()) if directed.any() else True

    def round_trips(self) -> BoolArray:
        """Device-to-host copies that come back, and the copies back: the process's next host copy, of equal size."""
        out = np.zeros(len(self.kind), dtype=np.bool_)
        directed = np.flatnonzero(np.isin(self.kind, (t.H2D, t.D2H)))
        if len(directed) < 2:
            return out
        order = directed[np.lexsort((self.start[directed], self.process[directed]))]
        one, two = order[:-1], order[1:]
        pair = (
            (self.process[one] == self.process[two])
            & (self.kind[one] == t.D2H)
            & (self.kind[two] == t.H2D)
            & (self.bytes[one] == self.bytes[two])
            & (self.bytes[one] >= ROUND_TRIP_BYTES)
        )
        out[one[pair]] = True
        out[two[pair]] = True
        return out

    def exposed_ns(self, chosen: BoolArray) -> int:
        """Exposed time of the chosen host copies, as a union."""
        return iv.intersect(iv.union(self.start[chosen], self.end[chosen]), self.exposed_host).total()

    def exposed_each(self) -> IntArray:
        """Exposed time of every host copy by itself."""
        return np.where(self.host(), iv.covered(self.exposed_host, self.start, self.end), 0)


def copy_rows(copies: DeviceCopies, memset_rows: BoolArray) -> list[CopyRow]:
    """One line per kind of copy and one for memsets. ``bytes_per_s`` = bytes over summed copy time."""
    out = []
    known = copies.memory_known()
    pageable = copies.pageable()
    for kind, name in enumerate(t.COPY_KIND_NAMES):
        mine = copies.kind == kind
        if not mine.any():
            continue
        length, sizes = (copies.end - copies.start)[mine], copies.bytes[mine]
        exposed = copies.time.exposed_copy.get(name if name in copies.time.exposed_copy else "")
        directed = kind in (t.H2D, t.D2H)
        out.append(
            CopyRow(
                kind=name,
                count=int(mine.sum()),
                bytes=_moved(sizes),
                total_ns=int(length.sum()),
                pageable_bytes=_moved(copies.bytes[mine & pageable]) if known and directed else None,
                exposed_ns=exposed.total() if exposed is not None else 0,
                bytes_per_s=_rate(sizes, length),
                size_classes=_size_classes(copies, mine),
            )
        )
    if memset_rows.any():
        ops, table = copies.prepared.operations, copies.prepared.trace.memsets
        length = (ops.end - ops.start)[memset_rows]
        sizes = table["bytes"][ops.row[memset_rows]] if table is not None else np.full(len(length), -1)
        exposed_ns = copies.time.exposed_copy["memset"].total()
        rate = _rate(sizes, length)
        out.append(CopyRow("memset", len(length), _moved(sizes), int(length.sum()), None, exposed_ns, rate))
    return out


def _moved(sizes: IntArray) -> int | None:
    """The bytes of all together, of those whose size is known (-1 is not); None where there are some and none is."""
    known = sizes >= 0
    return int(sizes[known].sum()) if known.any() or not len(sizes) else None


def _rate(sizes: IntArray, length: IntArray) -> float | None:
    """Bytes per second over the time of those whose size is known."""
    known = sizes >= 0
    total = int(length[known].sum())
    return int(sizes[known].sum()) * 1e9 / total if total else None


def _size_classes(copies: DeviceCopies, mine: BoolArray) -> list[dict[str, int | str]]:
    out: list[dict[str, int | str]] = []
    for label, low, high in (*SIZE_CLASSES, LARGEST):
        here = mine & (copies.bytes >= low) & (copies.bytes < high)
        if here.any():
            out.append(
                {
                    "size": label,
                    "count": int(here.sum()),
                    "bytes": int(copies.bytes[here].sum()),
                    "total_ns": int((copies.end - copies.start)[here].sum()),
                }
            )
    return out


def add_copies(measures: Measures, copies: DeviceCopies, demand_ns: int, small_copy_bytes: int) -> None:
    """Copy measures of one device; a trace without a copy table gives zeros (nsys makes tables only for rows)."""
    length = copies.end - copies.start
    host, pageable = copies.host(), copies.pageable()
    for name, kind in (("h2d", t.H2D), ("d2h", t.D2H)):
        mine = copies.kind == kind
        measures.add(f"{name}_count", int(mine.sum()), "count")
        measures.add(f"{name}_bytes", _moved(copies.bytes[mine]), "bytes")
        rate = _rate(copies.bytes[mine], length[mine])
        measures.add(f"{name}_bytes_per_s", rate, "bytes_per_s", "B", "copy sizes")
    measures.add("d2d_bytes", _moved(copies.bytes[copies.kind == t.D2D]), "bytes")
    sized = host & (copies.bytes >= 0)
    host_bytes = _moved(copies.bytes[host])
    if copies.memory_known():
        exposed_pageable = copies.exposed_ns(pageable)
        moved = _moved(copies.bytes[pageable])
        measures.add("pageable_bytes", moved, "bytes")
        measures.add("pageable_count", int(pageable.sum()), "count")
        share = None if moved is None or host_bytes is None else moved / host_bytes if host_bytes else 0.0
        measures.add("pageable_ratio", share, "ratio")
    else:
        exposed_pageable = 0
        for name, unit in (("pageable_bytes", "bytes"), ("pageable_count", "count"), ("pageable_ratio", "ratio")):
            measures.add(name, None, unit, source=MEMORY_NOT_RECORDED)
    exposed_host = copies.exposed_host.total()
    known = copies.memory_known()
    source = "timeline" if known else MEMORY_NOT_RECORDED
    measures.add("exposed_pageable_copy_ns", exposed_pageable if known else None, "ns", source=source)
    share = _ratio(exposed_pageable, demand_ns) if known else None
    measures.add("exposed_pageable_copy_ratio", share, "ratio", source=source)
    measures.add("exposed_other_copy_ns", exposed_host - exposed_pageable, "ns")
    measures.add("exposed_other_copy_ratio", _ratio(exposed_host - exposed_pageable, demand_ns), "ratio")
    _add_overlap(measures, copies)
    measures.add("host_copy_p50_bytes", int(median(copies.bytes[sized])) if sized.any() else None, "bytes")
    exposed_each = np.where(sized, copies.exposed_each(), 0)
    measures.add("host_copy_exposed_p50_bytes", _weighted_median(copies.bytes, exposed_each), "bytes")
    small = sized & (copies.bytes < small_copy_bytes)
    measures.add("small_copy_count", int(small.sum()), "count")
    measures.add("small_copy_exposed_ns", copies.exposed_ns(small), "ns")
    tiny = sized & (copies.kind == t.D2H) & (copies.bytes <= TINY_BYTES)
    measures.add("tiny_d2h_count", int(tiny.sum()), "count")
    trips = copies.round_trips()
    trip_ns = copies.exposed_ns(trips)
    measures.add("round_trip_count", int((trips & (copies.kind == t.D2H)).sum()), "count")
    measures.add("round_trip_exposed_ns", trip_ns, "ns")
    measures.add("round_trip_exposed_ratio", _ratio(trip_ns, demand_ns), "ratio")
    measures.add("exposed_d2d_ratio", _ratio(copies.time.exposed_copy["d2d"].total(), demand_ns), "ratio")
    _add_blocked(measures, copies)
    peaks = copies.prepared.peaks_of(copies.time.device).peaks
    peak = peaks.pcie_bytes_per_s if peaks is not None else None
    measures.add("link_peak_bytes_per_s", peak, "bytes_per_s", "D", "device table: as specified, not as linked")


def _add_blocked(measures: Measures, copies: DeviceCopies) -> None:
    table = copies.prepared.trace.api_calls
    if table is None:
        measures.add("blocked_async_copy_count", None, "count", source="CUDA calls were not collected")
        measures.add("blocked_async_copy_ns", None, "ns", source="CUDA calls were not collected")
        return
    launch = copies.launch[copies.launch >= 0]
    rows = np.unique(launch[copies.prepared.blocked_copies[launch]])
    measures.add("blocked_async_copy_count", len(rows), "count")
    measures.add("blocked_async_copy_ns", int((table["end"] - table["start"])[rows].sum()), "ns")


def _add_overlap(measures: Measures, copies: DeviceCopies) -> None:
    """How long host copies run, and what they could hide more of each other and under kernels.

    A link carries both directions at once, so of kernels, copies up and copies down the longest is what must remain.
    """
    time = copies.time
    kernels = iv.merge(time.compute, time.exposed_comm).total()
    both = [
        iv.intersect(iv.union(copies.start[mine], copies.end[mine]), time.scope)
        for mine in (copies.kind == t.H2D, copies.kind == t.D2H)
    ]
    remains = max(kernels, *(each.total() for each in both))
    measures.add("host_copy_ns", iv.merge(*both).total(), "ns")
    measures.add("host_copy_overlap_gain_ns", max(kernels + copies.exposed_host.total() - remains, 0), "ns")


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None


def _weighted_median(values: IntArray, weights: IntArray) -> int | None:
    """The value at which half of the weight is reached; None without weight."""
    total = int(weights.sum())
    if not total:
        return None
    order = np.argsort(values, kind="stable")
    reached = np.searchsorted(np.cumsum(weights[order]), total / 2)
    return int(values[order][min(int(reached), len(values) - 1)])
