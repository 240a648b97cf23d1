"""Where in the trace something is: time ranges and kernels for the selectors that rules use."""

from __future__ import annotations

import numpy as np

from infprof.distinct import distinct_values
from infprof.measures import host_calls
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.attention import unfused_rows
from infprof.measures.calls import ALLOCATOR, MODULE, SYNC
from infprof.measures.device import DeviceAnalysis
from infprof.measures.idle import CAUSE
from infprof.measures.intervals import Intervals
from infprof.measures.kernels import class_rows, few_sm_rows, small_rows
from infprof.measures.operations import Prepared
from infprof.results import KernelRow, Where
from infprof.trace import PROFILER, BoolArray, IntArray

_CALL_KINDS = {"sync": SYNC, "allocator": ALLOCATOR, "module_load": MODULE}


class Places:
    """Answers ``where`` and ``kernels`` for one device. Selectors are listed in docs/rules.md."""

    def __init__(
        self,
        prepared: Prepared,
        analysis: DeviceAnalysis,
        table: list[KernelRow],
        small_kernel_ns: int,
        small_copy_bytes: int,
    ) -> None:
        self._prepared = prepared
        self._analysis = analysis
        self._table = table
        self._small_kernel_ns = small_kernel_ns
        self._small_copy_bytes = small_copy_bytes
        self._device = prepared.trace.devices[analysis.device].id

    def where(self, selector: str, limit: int) -> list[Where]:
        """The places of a selector that cost most, the longest first."""
        family, _, rest = selector.partition(":")
        if family == "idle":
            return self._idle(rest.split(","), limit)
        if family == "exposed_copy":
            return self._copies(rest, limit)
        if family == "exposed_comm":
            return self._sets(self._analysis.time.exposed_comm, limit)
        if family == "kernels":
            return self._operations(self._kernel_rows(rest), limit)
        if family == "calls":
            return self._calls(rest, limit)
        if family == "profiler":
            return self._profiler(limit)
        return []

    def kernels(self, selector: str, limit: int) -> list[KernelRow]:
        """Lines of the kernel table that the selector names, most time first."""
        rows = self._kernel_rows(selector.partition(":")[2])
        ops, table = self._prepared.operations, self._prepared.trace.kernels
        if table is None or not rows.any():
            return []
        strings = self._prepared.trace.strings
        names = {strings[i] for i in distinct_values(table["name"][ops.row[rows]]).tolist()}
        return [line for line in self._table if line.name in names][:limit]

    # --- by family -------------------------------------------------------------------------------------------------

    def _idle(self, causes: list[str], limit: int) -> list[Where]:
        gaps = self._analysis.time.gaps
        spent = np.sum([gaps.causes[CAUSE[c]] for c in causes if c in CAUSE], axis=0)
        ops, trace = self._prepared.operations, self._prepared.trace
        out = []
        for i in _largest(spent, limit):
            operation = int(gaps.operation[i])
            name, stream = None, None
            if operation >= 0:
                stream = trace.streams[ops.stream[operation]].number
                if ops.kind[operation] == op.KERNEL and trace.kernels is not None:
                    name = trace.strings[trace.kernels["name"][ops.row[operation]]]
            out.append(self._where(int(gaps.starts[i]), int(gaps.ends[i]), stream, name))
        return out

    def _copies(self, which: str, limit: int) -> list[Where]:
        copies = self._analysis.copies
        exposed = copies.exposed_each()
        if which == "memset" or which in ("d2d", "p2p"):
            return self._sets(self._analysis.time.exposed_copy[which], limit)
        chosen: BoolArray
        if which == "pageable":
            chosen = copies.pageable()
        elif which == "small":
            chosen = copies.host() & (copies.bytes < self._small_copy_bytes)
        elif which == "round_trip":
            chosen = copies.round_trips()
        elif which == "host":
            chosen = copies.host()
        else:
            return self._sets(self._analysis.time.exposed_copy[which], limit)
        weights = np.where(chosen, exposed, 0)
        streams = self._prepared.trace.streams
        return [
            self._where(
                int(copies.start[i]),
                int(copies.end[i]),
                streams[copies.stream[i]].number,
                f"{copies.bytes[i]} bytes",
            )
            for i in _largest(weights, limit)
        ]

    def _kernel_rows(self, which: str) -> BoolArray:
        prepared, rows = self._prepared, self._analysis.rows
        ops = prepared.operations
        if which == "small":
            return small_rows(prepared, rows, self._small_kernel_ns)
        if which == "few_sm":
            return few_sm_rows(prepared, rows, prepared.trace.devices[self._analysis.device].sm_count)
        if which == "unfused":
            return unfused_rows(prepared, rows)
        if which in ("fp32_gemm", "attention", "gemm"):
            return class_rows(prepared, rows, which)
        return np.asarray(rows & (ops.kind == op.KERNEL), dtype=np.bool_)

    def _operations(self, rows: BoolArray, limit: int) -> list[Where]:
        ops, trace = self._prepared.operations, self._prepared.trace
        weights = np.where(rows, ops.end - ops.start, 0)
        out = []
        for i in _largest(weights, limit):
            name = trace.strings[trace.kernels["name"][ops.row[i]]] if trace.kernels is not None else None
            out.append(self._where(int(ops.start[i]), int(ops.end[i]), trace.streams[ops.stream[i]].number, name))
        return out

    def _calls(self, which: str, limit: int) -> list[Where]:
        prepared, table = self._prepared, self._prepared.trace.api_calls
        if table is None:
            return []
        inside = host_calls.calls_in(prepared, self._analysis.time.scope, self._analysis.processes)
        mine = np.flatnonzero((prepared.api_kinds == _CALL_KINDS[which]).take(table["name"]) & inside)
        length = table["end"][mine] - table["start"][mine]
        strings = prepared.trace.strings
        return [
            self._where(int(table["start"][mine[i]]), int(table["end"][mine[i]]), None, strings[table["name"][mine[i]]])
            for i in _largest(length, limit)
        ]

    def _profiler(self, limit: int) -> list[Where]:
        table = self._prepared.trace.overheads
        if table is None:
            return []
        own = table["kind"] == PROFILER
        inside = iv.intersect(iv.union(table["start"][own], table["end"][own]), self._analysis.time.scope)
        return self._sets(inside, limit)

    def _sets(self, inside: Intervals, limit: int) -> list[Where]:
        length = inside.ends - inside.starts
        return [self._where(int(inside.starts[i]), int(inside.ends[i]), None, None) for i in _largest(length, limit)]

    def _where(self, start: int, end: int, stream: int | None, name: str | None) -> Where:
        return Where(start, end, self._device, stream, name)


def _largest(weights: IntArray, limit: int) -> list[int]:
    """Positions of the largest weights above zero; the earlier one first where they are equal."""
    if not len(weights):
        return []
    if len(weights) > 10_000:
        # Only the candidates are sorted in full: all above the smallest weight that gets in, and the first equal ones.
        least = np.partition(weights, -limit)[-limit]
        kept = np.sort(np.concatenate([np.flatnonzero(weights > least), np.flatnonzero(weights == least)[:limit]]))
    else:
        kept = np.arange(len(weights))
    order = kept[np.argsort(-weights[kept], kind="stable")][:limit]
    return [int(i) for i in order if weights[i] > 0]
