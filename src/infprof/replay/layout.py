"""The operations of a trace as chains, stream after stream, tied to the calls that launched them."""

from __future__ import annotations

import numpy as np

from infprof.distinct import distinct_values
from infprof.measures import calls as call_kinds
from infprof.measures import operations as op
from infprof.measures.operations import Prepared
from infprof.replay.recording import NEVER, SKEW_NS, Calls
from infprof.trace import IntArray


class Layout:
    """Columns over the operations in chain order: stream after stream, each by start.

    ``order``: the row of Prepared.operations; ``place``: the way back; ``stream``, ``start``, ``end``, ``kind``, and
    ``first`` of its stream, which begin at ``bounds``; ``reach``: the latest end before each on its stream. ``call``: the
    position in ``calls`` of the launch, -1 where not recorded, with ``call_start`` and ``call_end``; ``launched``: when each
    was launched, as far as its stream shows. ``held``: copies that their call (of ``blocking``) returned with;
    ``in_graph``: nodes of CUDA graphs. ``call_of_row``: the position in ``calls`` of each row of the trace's calls.
    """

    def __init__(self, prepared: Prepared, calls: Calls, call_of_row: IntArray) -> None:
        self.prepared = prepared
        self.ops = prepared.operations
        self.calls = calls
        self.call_of_row = call_of_row
        self._order_operations()
        self._tie_launches()

    def _order_operations(self) -> None:
        ops = self.ops
        stream = np.asarray(ops.stream, dtype=np.int64)
        if (stream[1:] >= stream[:-1]).all():
            # One stream after the other as they are: nothing to copy.
            self.order = order = self.place = np.arange(len(stream))
            self.stream, self.start, self.end, self.kind = stream, ops.start, ops.end, ops.kind
        else:
            self.order = order = np.argsort(stream, kind="stable")
            self.stream = stream[order]
            self.place = np.empty(len(order), dtype=np.int64)
            self.place[order] = np.arange(len(order))
            self.start, self.end, self.kind = ops.start[order], ops.end[order], ops.kind[order]
        self.first = np.ones(len(order), dtype=np.bool_)
        self.first[1:] = self.stream[1:] != self.stream[:-1]
        self.bounds = np.append(np.flatnonzero(self.first), len(order))
        # The latest end before each operation on its stream.
        self.reach = np.full(len(order), NEVER, dtype=np.int64)
        for low, high in self.stretches():
            self.reach[low + 1 : high] = np.maximum.accumulate(self.end[low:high])[:-1]

    def stretches(self) -> list[tuple[int, int]]:
        return list(zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True))

    def _tie_launches(self) -> None:
        launch = np.asarray(self.ops.launch, dtype=np.int64)[self.order]
        known = launch >= 0
        self.call = np.full(len(launch), -1, dtype=np.int64)
        if len(self.call_of_row):
            self.call[known] = self.call_of_row[launch[known]]
        calls = self.calls
        safe = np.maximum(self.call, 0)
        has = self.call >= 0
        nothing = np.full(len(launch), NEVER, dtype=np.int64)
        self.call_start = np.where(has, calls.start[safe], nothing) if len(calls) else nothing
        self.call_end = np.where(has, calls.end[safe], nothing) if len(calls) else nothing
        # When each was launched, as far as its stream shows: for "the last one before this call".
        self.launched = np.where(has, self.call_start, self.start)
        for low, high in self.stretches():
            self.launched[low:high] = np.maximum.accumulate(self.launched[low:high])
        # Copy calls that return with their copy.
        self.blocking = np.zeros(len(calls), dtype=np.bool_)
        if len(calls):
            table = self.prepared.trace.api_calls
            assert table is not None
            is_copy = self.prepared.api_kinds[table["name"][calls.row]] == call_kinds.COPY
            held = has & is_copy[safe] & (self.end <= self.call_end + SKEW_NS) & (self.end > self.call_start)
            self.blocking[self.call[held]] = True
        self.held = has & self.blocking[safe] if len(calls) else has
        self.in_graph = np.zeros(len(launch), dtype=np.bool_)
        kernels = self.prepared.trace.kernels
        if kernels is not None:
            mine = np.flatnonzero(self.kind == op.KERNEL)
            self.in_graph[mine] = kernels["graph_node"][self.ops.row[self.order[mine]]] >= 0

    def call_times(self, process: IntArray, correlation: IntArray) -> IntArray:
        """When the calls of these ids began; -1 where there is none."""
        table = self.prepared.trace.api_calls
        assert table is not None
        rows = self.prepared.launches.find(np.asarray(process), np.asarray(correlation))
        return np.where(rows >= 0, table["start"][np.maximum(rows, 0)], -1)

    def last_on(self, stream: IntArray, before: IntArray) -> IntArray:
        """The last operation of each stream that was launched before a time; -1 if none."""
        return self._on_streams(stream, before, -1)

    def next_on(self, stream: IntArray, since: IntArray) -> IntArray:
        """The first operation of each stream that was launched at or after a time; -1 if none."""
        return self._on_streams(stream, since, 0)

    def _on_streams(self, stream: IntArray, time: IntArray, step: int) -> IntArray:
        out = np.full(len(stream), -1, dtype=np.int64)
        where = {int(self.stream[low]): (low, high) for low, high in self.stretches()}
        for number in distinct_values(stream).tolist():
            if number not in where:
                continue
            low, high = where[number]
            mine = np.flatnonzero(stream == number)
            found = low + np.searchsorted(self.launched[low:high], time[mine], side="left") + step
            out[mine] = np.where((found >= low) & (found < high), found, -1)
        return out
