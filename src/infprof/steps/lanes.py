"""What one process ran on one device, in the order of its launches, as a sequence of short symbols.

A *unit* is a kernel, a copy, a memset, or a whole graph launch. All graph launches share one symbol: a serving engine
keeps a graph per batch size, and which one is replayed says nothing of where a step begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infprof.distinct import distinct, distinct_rows, distinct_values
from infprof.measures import calls
from infprof.measures import operations as op
from infprof.measures.operations import Prepared
from infprof.trace import D2H, H2D, BoolArray, IntArray, is_constant

# A lane is put in the order of its launches when this share of its operations has a known launch.
KNOWN_LAUNCHES = 0.9
# The number of kernels that a graph stands for when it was traced whole.
WHOLE_GRAPH_KERNELS = 64
GRAPH_KIND, H2D_KIND, D2H_KIND, OTHER_COPY_KIND, MEMSET_KIND = "graph", "h2d", "d2h", "copy-engine", "memset"


@dataclass
class Lane:
    """The operations of one process on one device in launch order, and the units they make.

    ``rows`` (operations) indexes ``Prepared.operations``; all other columns have one value per unit. ``first`` is the
    place in ``rows`` where a unit begins. ``host_gap_ns``: how long the host took from the launch before, of the GPU's
    own gap where launches are not known.
    """

    process: int
    device: int
    rows: IntArray
    first: IntArray
    symbol: IntArray  # dense
    kind: IntArray  # index into kinds
    kinds: list[str]
    names: list[str]  # what a symbol stands for
    kernels: IntArray
    launch: IntArray  # row in api_calls, -1 where not known
    after_sync: BoolArray  # the host waited for the GPU before it launched this
    host_gap_ns: IntArray
    thread: int | None  # launches most of the lane

    def __len__(self) -> int:
        return len(self.first)

    @property
    def last(self) -> IntArray:
        """The place in ``rows`` behind the last operation of each unit."""
        return np.append(self.first[1:], len(self.rows))

    def of_kind(self, *kinds: str) -> IntArray:
        """The units of these kinds."""
        wanted = [i for i, kind in enumerate(self.kinds) if kind in kinds]
        return np.flatnonzero(np.isin(self.kind, wanted)) if wanted else np.empty(0, dtype=np.int64)


def lanes(prepared: Prepared) -> list[Lane]:
    """A lane for each process and device that ran kernels or graphs, by device, the busiest process first."""
    ops = prepared.operations
    if not len(ops):
        return []
    pairs, which = distinct_rows(ops.device, ops.process)
    found = []
    for number, (device, process) in enumerate(pairs):
        rows = np.arange(len(ops), dtype=np.int64) if len(pairs) == 1 else np.flatnonzero(which == number)
        ran = rows[(ops.kind[rows] == op.KERNEL) | (ops.kind[rows] == op.GRAPH)]
        if len(ran):
            found.append((device, -int((ops.end[ran] - ops.start[ran]).sum()), process, rows))
    found.sort(key=lambda item: item[:3])
    return [_lane(prepared, process, device, rows) for device, _, process, rows in found]


def _lane(prepared: Prepared, process: int, device: int, rows: IntArray) -> Lane:
    ops, table = prepared.operations, prepared.trace.api_calls
    launch = ops.launch[rows]
    known = launch >= 0
    called = None
    if table is not None and known.mean() >= KNOWN_LAUNCHES:
        rows, launch, called = _by_launch(table["start"], rows, launch, known)
    first = _unit_starts(prepared, rows, launch)
    units, unit_launch = rows[first], launch[first]
    kernels = np.diff(first, append=len(rows))
    graph = (kernels > 1) | (ops.kind[units] == op.GRAPH) | _graph_launch(prepared, unit_launch)
    symbol, names, kinds, kind = _symbols(prepared, units, graph)
    whole = ops.kind[units] == op.GRAPH
    kernels = np.where(whole, WHOLE_GRAPH_KERNELS, np.where(ops.kind[units] == op.KERNEL, kernels, 0))
    gap = _gpu_gaps(ops.start[rows], ops.end[rows], first)
    thread, waited = None, np.zeros(len(first), dtype=np.bool_)
    if called is not None and table is not None:
        thread = _main_thread(table["thread"], unit_launch)
        waited = _after_sync(prepared, units, unit_launch, thread)
        ended = np.where(unit_launch >= 0, table["end"][unit_launch], called[first])
        gap = np.maximum(called[first] - np.concatenate([called[:1], ended[:-1]]), 0)
    return Lane(process, device, rows, first, symbol, kind, kinds, names, kernels, unit_launch, waited, gap, thread)


def _by_launch(
    starts: IntArray, rows: IntArray, launch: IntArray, known: BoolArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Rows, launches and call times in the order of the calls; what has no known launch follows what ran before it."""
    if known.all():
        called = starts[launch]
    else:
        place = np.maximum.accumulate(np.where(known, np.arange(len(rows)), -1))
        place = np.where(place < 0, int(np.argmax(known)), place)
        called = starts[launch[place]]
    if (called[1:] < called[:-1]).any():
        order = np.argsort(called, kind="stable")
        return rows[order], launch[order], called[order]
    return rows, launch, called


def _unit_starts(prepared: Prepared, rows: IntArray, launch: IntArray) -> IntArray:
    """Where units begin: the operations of one launch, a graph's kernels, are one."""
    new = np.ones(len(rows), dtype=np.bool_)
    new[1:] = (launch[1:] != launch[:-1]) | (launch[1:] < 0)
    return np.flatnonzero(new)


def _graph_launch(prepared: Prepared, launch: IntArray) -> BoolArray:
    table = prepared.trace.api_calls
    if table is None or not len(table):
        return np.zeros(len(launch), dtype=np.bool_)
    by_graph = calls.graph_launchers(prepared.trace.strings)
    if not by_graph.any():
        return np.zeros(len(launch), dtype=np.bool_)
    return np.asarray((launch >= 0) & by_graph[table["name"][np.maximum(launch, 0)]], dtype=np.bool_)


def _symbols(prepared: Prepared, units: IntArray, graph: BoolArray) -> tuple[IntArray, list[str], list[str], IntArray]:
    """Dense symbols of the units, what each stands for, the list of kinds, and the kind of each unit."""
    ops, trace = prepared.operations, prepared.trace
    count = len(trace.strings)
    raw = np.full(len(units), count, dtype=np.int64)
    kind_of, row = ops.kind[units], ops.row[units]
    plain = (kind_of == op.KERNEL) & ~graph
    if trace.kernels is not None:
        raw[plain] = trace.kernels["name"][row[plain]]
    copied = kind_of == op.COPY
    if trace.copies is not None and copied.any():
        raw[copied] = count + 2 + trace.copies["kind"][row[copied]]
    raw[kind_of == op.MEMSET] = count + 1
    raw[graph] = count
    used, symbol = distinct(raw)
    names, kinds = [], []
    for value in used.tolist():
        names.append(_name(trace.strings, value))
        if value < count:
            kinds.append(prepared.kernel_classes[value].kind if value in prepared.kernel_classes else "other")
        else:
            copy = {count: GRAPH_KIND, count + 1: MEMSET_KIND, count + 2 + H2D: H2D_KIND, count + 2 + D2H: D2H_KIND}
            kinds.append(copy.get(value, OTHER_COPY_KIND))
    known = sorted(set(kinds))
    by_symbol = np.array([known.index(kind) for kind in kinds], dtype=np.int64)
    return symbol, names, known, by_symbol[symbol]


def _name(strings: list[str], value: int) -> str:
    if 0 <= value < len(strings):
        return strings[value]
    return {0: "graph launch", 1: "memset", 2 + H2D: "copy to the GPU", 2 + D2H: "copy to the host"}.get(
        value - len(strings), "copy"
    )


def _gpu_gaps(start: IntArray, end: IntArray, first: IntArray) -> IntArray:
    """How long the lane had been idle when a unit began."""
    reached = np.maximum.accumulate(end)
    before = np.concatenate([start[:1], reached[:-1]])
    return np.asarray(np.maximum(start[first] - before[first], 0), dtype=np.int64)


def _main_thread(threads: IntArray, launch: IntArray) -> int | None:
    known = launch[launch >= 0]
    if is_constant(threads):
        return int(threads[0])
    found = threads[known]
    found = found[found >= 0]
    return int(np.bincount(found).argmax()) if len(found) else None


def _after_sync(prepared: Prepared, units: IntArray, launch: IntArray, thread: int | None) -> BoolArray:
    """Before which units their thread waited for the GPU, in a synchronising call or in a copy that blocks."""
    table, ops = prepared.trace.api_calls, prepared.operations
    out = np.zeros(len(units), dtype=np.bool_)
    if table is None or thread is None:
        return out
    mine = np.flatnonzero((launch >= 0) & (table["thread"][np.maximum(launch, 0)] == thread))
    if len(mine) < 2:
        return out
    is_sync = (prepared.api_kinds == calls.SYNC).take(table["name"])
    syncs = np.sort(table["start"][is_sync & (table["thread"] == thread)])
    before = np.searchsorted(syncs, table["start"][launch[mine]])
    out[mine[1:]] = before[1:] > before[:-1]
    earlier = mine[:-1]
    out[mine[1:]] |= (ops.kind[units[earlier]] == op.COPY) & (table["end"][launch[earlier]] >= ops.end[units[earlier]])
    return out


def used_threads(prepared: Prepared, lane: Lane) -> IntArray:
    """The threads that launched anything in the lane."""
    table = prepared.trace.api_calls
    known = lane.launch[lane.launch >= 0]
    return distinct_values(table["thread"][known]) if table is not None and len(known) else np.empty(0, dtype=np.int64)
