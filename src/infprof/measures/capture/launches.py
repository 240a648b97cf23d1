"""The launches of a trace in the order of the program, with their operators: what a replayed graph is compared with.

Two kinds of launch say what they are for: those of kernels that ran at once (eager), whose kernel is recorded, and those
recorded into a graph, between ``StreamBeginCapture`` and ``StreamEndCapture`` of a thread, which have no kernel. ROCm
writes the kernel's name beside the latter, CUDA does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from infprof.distinct import distinct_rows, groups
from infprof.measures import calls
from infprof.measures import operations as op
from infprof.measures.capture.tokens import tokens_around
from infprof.measures.kernel_class import classify
from infprof.measures.operations import Prepared
from infprof.measures.work.counting import OperatorCalls, calls_around, in_graphs, operator_calls
from infprof.measures.work.nesting import innermost_rows
from infprof.trace import BoolArray, IntArray

_BEGIN, _END = r"StreamBeginCapture", r"StreamEndCapture"
_NO_KERNEL = r"HostFunc"


@dataclass
class LaunchSequence:
    """One value for each launch, ordered by thread and time; -1 = not known.

    ``call`` is its row in ``api_calls``, ``name`` the kernel's in the trace's strings, ``grid`` and ``block`` the kernel's
    sizes. ``segment`` numbers the stretches that belong together: a capture, or what one thread launched between two.
    """

    prepared: Prepared
    own: bool
    call: IntArray
    name: IntArray
    grid: IntArray
    block: IntArray
    segment: IntArray
    captured: BoolArray

    def __len__(self) -> int:
        return len(self.call)

    @property
    def file(self) -> str:
        return ", ".join(self.prepared.trace.provenance.inputs)

    @cached_property
    def start(self) -> IntArray:
        return self._of_calls("start")

    @cached_property
    def thread(self) -> IntArray:
        return self._of_calls("thread")

    def _of_calls(self, column: str) -> IntArray:
        table = self.prepared.trace.api_calls
        assert table is not None, "launches are calls"
        return np.asarray(table[column][self.call], dtype=np.int64)

    @cached_property
    def segment_bounds(self) -> tuple[IntArray, IntArray]:
        """First launch of each segment, and the one after its last."""
        borders = np.flatnonzero(self.segment[1:] != self.segment[:-1]) + 1
        return np.concatenate([[0], borders]), np.concatenate([borders, [len(self)]])

    @cached_property
    def operator(self) -> IntArray:
        """Row of the innermost operator around each launch."""
        table = self.prepared.trace.operators
        if table is None or not len(table):
            return np.full(len(self), -1, dtype=np.int64)
        found, _ = innermost_rows(table["start"], table["end"], table["thread"], self.start, self.thread)
        return found

    @cached_property
    def operator_name(self) -> IntArray:
        """Name of that operator, in the trace's strings."""
        table = self.prepared.trace.operators
        if table is None or not len(table):
            return self.operator
        return np.where(self.operator >= 0, table["name"][np.maximum(self.operator, 0)], -1)

    @cached_property
    def found(self) -> OperatorCalls | None:
        """The operators of the trace whose work can be counted."""
        return operator_calls(self.prepared)

    @cached_property
    def counted_and_parents(self) -> tuple[IntArray, IntArray]:
        """The innermost of ``found`` around each launch, and the parent of each of ``found``."""
        if self.found is None or not len(self.found.rows):
            return np.full(len(self), -1, dtype=np.int64), np.empty(0, dtype=np.int64)
        return calls_around(self.prepared, self.found, self.start, self.thread)

    @cached_property
    def signature(self) -> IntArray:
        """Equal numbers for launches of the same operators with the same inputs."""
        table = self.prepared.trace.operators
        if table is None or not len(table) or not len(self):
            return np.zeros(len(self), dtype=np.int64)
        same = {given: i for i, given in enumerate(dict.fromkeys(self.prepared.trace.inputs))}
        inputs = np.array([same[given] for given in self.prepared.trace.inputs] + [-1], dtype=np.int64)
        counted = self.counted_and_parents[0]
        outer = np.full(len(self), -1, dtype=np.int64)
        if self.found is not None and len(self.found.rows):
            outer = np.where(counted >= 0, self.found.rows[np.maximum(counted, 0)], -1)
        columns = [self.operator_name]
        for row in (self.operator, outer):
            columns.append(np.where(row >= 0, inputs[table["inputs"][np.maximum(row, 0)]], -1))
        columns.append(np.where(outer >= 0, table["name"][np.maximum(outer, 0)], -1))
        return distinct_rows(*columns)[1]

    @cached_property
    def tokens(self) -> tuple[IntArray, IntArray]:
        """(tokens of the step, size of the capture) around each launch."""
        return tokens_around(self.prepared.trace, self.start, self.thread)

    @cached_property
    def kind(self) -> list[str]:
        """Kernel class of each of the trace's strings that names a kernel here, empty for the others."""
        kinds = [""] * len(self.prepared.trace.strings)
        used = [i for i in np.unique(self.name).tolist() if i >= 0]
        for i, found in zip(used, classify([self.prepared.trace.strings[i] for i in used]), strict=True):
            kinds[i] = found.kind
        return kinds


def launch_sequence(prepared: Prepared, own: bool) -> LaunchSequence | None:
    """The launches that can tell operators of graphs; None where there are none.

    Of the trace that holds the replays themselves (``own``) only what was captured, of another one all launches.
    """
    trace, nested = prepared.trace, prepared.thread_calls
    api = trace.api_calls
    if api is None or nested is None or trace.operators is None or not len(api) or not len(trace.operators):
        return None
    region = _regions(prepared)
    if own and not (region >= 0).any():
        return None
    ops, kernels = prepared.operations, trace.kernels
    eager = np.flatnonzero((ops.kind == op.KERNEL) & (ops.launch >= 0))
    eager = eager[~in_graphs(prepared, eager)]
    launchers = calls.kernel_launchers(trace.strings) & ~calls.graph_launchers(trace.strings)
    launchers &= ~calls.matching(trace.strings, _NO_KERNEL)
    captured = launchers[api["name"]] & (region >= 0) & (nested.outer == np.arange(len(api)))
    captured[ops.launch[eager]] = False
    recorded = np.flatnonzero(captured)
    if own:
        eager = eager[:0]
    call = np.concatenate([ops.launch[eager], recorded])
    if not len(call):
        return None
    nothing = np.full(len(recorded), -1, dtype=np.int64)
    of = ops.row[eager]
    names, grids, blocks = (
        np.concatenate([kernels[c][of] if kernels is not None and len(of) else nothing[:0], rest])
        for c, rest in (("name", _names(prepared)[recorded]), ("grid_blocks", nothing), ("block_threads", nothing))
    )
    thread = api["thread"][call]
    order = np.lexsort((api["start"][call], thread))
    order = order[thread[order] >= 0]
    call, is_captured = call[order], np.repeat([False, True], [len(eager), len(recorded)])[order]
    border = np.diff(thread[order], prepend=-1) != 0
    border |= np.diff(np.where(is_captured, region[call], -1), prepend=-2) != 0
    return LaunchSequence(
        prepared, own, call, names[order], grids[order], blocks[order], np.cumsum(border), is_captured
    )


def _names(prepared: Prepared) -> IntArray:
    """The kernel that each call says it launches, in the trace's strings."""
    trace = prepared.trace
    out = np.full(0 if trace.api_calls is None else len(trace.api_calls), -1, dtype=np.int64)
    named = trace.named_launches
    if named is not None:
        row = prepared.launches.find(named["process"], named["correlation"])
        out[row[row >= 0]] = named["name"][row >= 0]
    return out


def _regions(prepared: Prepared) -> IntArray:
    """For each call the number of the stream capture of its thread in which it lies, -1 outside."""
    api, nested = prepared.trace.api_calls, prepared.thread_calls
    assert api is not None and nested is not None
    out = np.full(len(api), -1, dtype=np.int64)
    tops = nested.outer == np.arange(len(api))
    begin, end = (
        np.flatnonzero(calls.matching(prepared.trace.strings, words)[api["name"]] & tops) for words in (_BEGIN, _END)
    )
    ends_of = dict(groups(api["thread"][end])) if len(end) else {}
    low, high, of = [], [], []
    for thread, rows in groups(api["thread"][begin]) if len(begin) else []:
        ends = np.sort(api["start"][end[ends_of.get(thread, np.empty(0, dtype=np.int64))]])
        starts = np.sort(api["end"][begin[rows]])
        at = np.searchsorted(ends, starts)
        starts, at = starts[at < len(ends)], at[at < len(ends)]
        low.append(starts)
        high.append(ends[at])
        of.append(np.full(len(starts), thread, dtype=np.int64))
    if low:
        inside = np.concatenate(low), np.concatenate(high), np.concatenate(of)
        out, _ = innermost_rows(*inside, api["start"], api["thread"])
    return out
