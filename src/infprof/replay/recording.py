"""What bound each event of a trace: the launch, the stream, another operation, or the thread's own calls before it.

Two kinds of chains, each in order: the outermost CUDA calls of a thread, and the operations of a stream. Beside them
stand *dependencies* across chains: an operation waits for one of another stream (events, copy engines, collectives), a
call returns after an operation (synchronising and blocking calls). For every limit of an event the recording shows how
long after it the event came, where that limit was the binding one; for the others the typical time of their kind stands,
but never more than what the recording leaves. So an unchanged replay gives the recording back (design: replay.md).

Times are int64 ns from the trace's origin. Operations are in chain order here: stream after stream, each by start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infprof.distinct import distinct, distinct_values
from infprof.measures import calls as call_kinds
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.comm import matched_collectives
from infprof.measures.operations import Prepared
from infprof.quantiles import median
from infprof.trace import (
    COMMAND_BUFFER_FULL,
    EVENT_SYNC,
    MODULE_LOAD,
    STREAM_SYNC,
    STREAM_WAIT_EVENT,
    BoolArray,
    IntArray,
    constant,
)

# What a call costs its thread.
LAUNCH, SYNC, ALLOCATOR, MODULE, OTHER = range(5)
CALL_COSTS = ("launch", "sync", "allocator", "module-load", "calls")
_OF_KIND = np.array([LAUNCH, SYNC, LAUNCH, ALLOCATOR, MODULE, OTHER], dtype=np.int8)

# Host and GPU clocks are matched to some microseconds.
SKEW_NS = 2_000
# An operation that starts this soon after the one before it was held up by its stream, not by its launch.
TURN_AROUND_NS = 5_000
# Where a trace shows none: usual times of current GPUs from the end of one kernel to the next, and from the end of a
# launch call to its kernel on a free stream.
USUAL_GAP_NS = 0
USUAL_LEAD_NS = 1_000
# From the begin of a call that waits for its copy to the copy.
USUAL_SETUP_NS = 6_000
# A launch reaches a free stream within this time; later starts have other reasons.
LONGEST_LEAD_NS = 100_000
# ... and one that starts within so many usual ones of its stream was not queued there.
USUAL_LEADS = 1.25
# A start this long after everything known that could hold it up had another reason: the operation that ended just before.
UNEXPLAINED_NS = 10_000
NEVER = -(1 << 61)


@dataclass
class Calls:
    """The outermost CUDA calls of all threads, thread after thread, each in order.

    ``work``: the thread's own time between the call before (or the trace's origin) and this one; ``waited``: its time there
    in system calls that wait and under the profiler. ``own``: what the call takes without waiting for the GPU. What lies
    before the first operation of the GPU is no part of the span and stays as it was: ``lead_in`` between the calls,
    ``lead_own`` (of ``own``) in this one.
    """

    row: IntArray
    thread: IntArray
    start: IntArray
    end: IntArray
    cost: NDArray[np.int8]
    lead_in: IntArray
    work: IntArray
    waited: IntArray
    lead_own: IntArray
    own: IntArray
    first: BoolArray  # of its thread

    def __len__(self) -> int:
        return len(self.row)


@dataclass
class Chains:
    """The operations, stream after stream. ``row`` indexes Prepared.operations.

    ``call``: the position in ``Calls`` of the launch, -1 where not recorded. The launch lets an operation start
    ``inside`` ns into its call and ``after`` ns behind its end. The stream lets it start ``gap`` ns after ``part`` ns of
    the operation before it. ``pinned``: without a launch, and its stream was idle: stays where it was.
    """

    row: IntArray
    stream: IntArray
    start: IntArray
    end: IntArray
    call: IntArray
    inside: IntArray
    after: IntArray
    part: IntArray
    gap: IntArray
    pinned: BoolArray
    first: BoolArray  # of its stream
    group: IntArray  # of collectives that end together; -1
    transfer: IntArray  # of a collective from its last rank's arrival to its end

    def __len__(self) -> int:
        return len(self.row)


@dataclass
class Edges:
    """Dependencies across chains: ``target`` comes at least ``lag`` ns after ``part`` ns of operation ``source``."""

    source: IntArray
    target: IntArray
    part: IntArray
    lag: IntArray

    @classmethod
    def of(cls, parts: list[tuple[IntArray, IntArray, IntArray, IntArray]]) -> Edges:
        if not parts:
            none = np.empty(0, dtype=np.int64)
            return cls(none, none, none, none)
        return cls(*(np.concatenate([p[i] for p in parts]).astype(np.int64) for i in range(4)))


@dataclass
class Recording:
    """Everything a replay needs. ``into_operations`` and ``into_calls`` are the dependencies, by what waits."""

    prepared: Prepared
    calls: Calls
    chains: Chains
    into_operations: Edges
    into_calls: Edges
    origin_ns: int
    # The start of the first operation: nothing on the GPU comes before it.
    begin_ns: int
    # What could not be tied to anything, for the report.
    without_launch: int = 0
    notes: list[str] = field(default_factory=list)


def record(prepared: Prepared) -> Recording:
    """What bound each event of a trace."""
    return _Builder(prepared).build()


class _Builder:
    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.ops = prepared.operations

    def build(self) -> Recording:
        self.origin = self._origin()
        self.begin = int(self.ops.start.min()) if len(self.ops) else self.origin
        self.calls = self._calls()
        self._order_operations()
        self._launches()
        self._compile()
        edges = [*self._event_waits(), *self._engines()]
        edges += self._inferred(edges)
        chains, into_operations = self._limits(edges)
        into_calls = self._call_waits(chains)
        return Recording(
            self.prepared,
            self.calls,
            chains,
            into_operations,
            into_calls,
            self.origin,
            self.begin,
            int((chains.call < 0).sum()),
        )

    def _origin(self) -> int:
        first = [int(self.ops.start.min())] if len(self.ops) else []
        table = self.prepared.trace.api_calls
        if table is not None and len(table):
            first.append(int(table["start"].min()))
        return min(first, default=0)

    # --- host --------------------------------------------------------------------------------------------------------

    def _calls(self) -> Calls:
        table, nested = self.prepared.trace.api_calls, self.prepared.thread_calls
        none = np.empty(0, dtype=np.int64)
        self.call_of_row = np.full(0 if table is None else len(table), -1, dtype=np.int64)
        if table is None or nested is None or not len(table):
            return Calls(
                none, none, none, none, none.astype(np.int8), none, none, none, none, none, none.astype(np.bool_)
            )
        rows, threads, starts, ends, gaps, waited, first = [], [], [], [], [], [], []
        begin = self.begin
        for number in sorted(nested.rows):
            mine = nested.rows[number]
            start, end = nested.times(number)
            before = np.concatenate([[self.origin], end[:-1]])
            rows.append(mine)
            threads.append(constant(number, len(mine)))
            starts.append(start)
            ends.append(end if (end >= start).all() else np.maximum(end, start))
            gaps.append(np.maximum(start - before, 0))
            waited.append(iv.covered(self._waits(number), np.minimum(np.maximum(before, begin), start), start))
            begins = np.zeros(len(mine), dtype=np.bool_)
            begins[0] = True
            first.append(begins)
        row, start, end, gap, wait = (_joined(parts) for parts in (rows, starts, ends, gaps, waited))
        self.call_of_row[row] = np.arange(len(row))
        # A call inside another one stands for it.
        self.call_of_row = self.call_of_row[nested.outer]
        cost = _OF_KIND[self.prepared.api_kinds.astype(np.int8)].take(table["name"][row])
        lead_in = gap - np.clip(start - begin, 0, gap)
        length = end - start
        return Calls(
            row,
            _joined(threads),
            start,
            end,
            self._loading(cost, length),
            narrow(lead_in),
            narrow(gap - lead_in - wait),
            narrow(wait),
            narrow(np.clip(begin - start, 0, length)),
            narrow(length),
            _joined(first),
        )

    def _loading(self, cost: NDArray[np.int8], length: IntArray) -> NDArray[np.int8]:
        """Launches that last far longer than others load or compile their kernel."""
        launches = np.flatnonzero(cost == LAUNCH)
        if len(launches):
            factor = 100
            usual = median(length[launches])
            cost[launches[length[launches] > max(factor * usual, 100_000)]] = MODULE
        return cost

    def _compile(self) -> None:
        """What a thread works before it loads a module and launches a new kernel from it is the compiler's: the load's."""
        calls = self.calls
        if not len(calls):
            return
        new = np.isin(calls.row, self.prepared.first_launches)
        loads = np.append((calls.cost[:-1] == MODULE) & new[1:] & ~calls.first[1:] & ~new[:-1], False)
        calls.own = np.where(loads, np.add(calls.own, calls.work, dtype=np.int64), calls.own)
        calls.work = np.where(loads, 0, calls.work)

    def _waits(self, thread: int) -> iv.Intervals:
        """When the thread was not working by its own will: waiting system calls, on no CPU, and the profiler."""
        trace = self.prepared.trace
        sets = []
        if trace.os_calls is not None and len(trace.os_calls):
            if not hasattr(self, "_os_waits"):
                kinds = call_kinds.os_kinds(trace.strings)
                self._os_waits = kinds[trace.os_calls["name"]] != call_kinds.OTHER_OS
            mine = self._os_waits & (trace.os_calls["thread"] == thread)
            sets.append(iv.union(trace.os_calls["start"][mine], trace.os_calls["end"][mine]))
        if trace.off_cpu is not None and len(trace.off_cpu):
            mine = trace.off_cpu["thread"] == thread
            sets.append(iv.union(trace.off_cpu["start"][mine], trace.off_cpu["end"][mine]))
        if trace.overheads is not None and len(trace.overheads):
            table = trace.overheads
            mine = (table["thread"] == thread) & (table["kind"] != MODULE_LOAD) & (table["kind"] != COMMAND_BUFFER_FULL)
            sets.append(iv.union(table["start"][mine], table["end"][mine]))
        return iv.merge(*sets) if sets else iv.empty()

    # --- operations ----------------------------------------------------------------------------------------------------

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
        for low, high in self._stretches():
            self.reach[low + 1 : high] = np.maximum.accumulate(self.end[low:high])[:-1]

    def _stretches(self) -> list[tuple[int, int]]:
        return list(zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True))

    def _launches(self) -> None:
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
        for low, high in self._stretches():
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

    # --- dependencies of operations ------------------------------------------------------------------------------------

    def _event_waits(self) -> list[tuple[IntArray, IntArray]]:
        """(source, target): the first operation behind a stream's wait, and the last one before the event's record."""
        syncs = self.prepared.trace.syncs
        if syncs is None or not len(syncs) or not len(self.calls):
            return []
        mine = np.flatnonzero(
            (syncs["kind"] == STREAM_WAIT_EVENT) & (syncs["record"] >= 0) & (syncs["record_stream"] >= 0)
        )
        mine = mine[syncs["stream"][mine] >= 0]
        if not len(mine):
            return []
        process = syncs["process"][mine]
        wait = self._call_times(process, syncs["correlation"][mine])
        record = self._call_times(process, syncs["record"][mine])
        known = (wait >= 0) & (record >= 0)
        mine, wait, record = mine[known], wait[known], record[known]
        target = self._next_on(syncs["stream"][mine], wait)
        source = self._last_on(syncs["record_stream"][mine], record)
        good = (source >= 0) & (target >= 0)
        good[good] &= self.end[source[good]] <= self.start[target[good]] + SKEW_NS
        return [(source[good], target[good])]

    def _call_times(self, process: IntArray, correlation: IntArray) -> IntArray:
        """When the calls of these ids began; -1 where there is none."""
        table = self.prepared.trace.api_calls
        assert table is not None
        rows = self.prepared.launches.find(np.asarray(process), np.asarray(correlation))
        return np.where(rows >= 0, table["start"][np.maximum(rows, 0)], -1)

    def _last_on(self, stream: IntArray, before: IntArray) -> IntArray:
        """The last operation of each stream that was launched before a time; -1 if none."""
        return self._on_streams(stream, before, -1)

    def _next_on(self, stream: IntArray, since: IntArray) -> IntArray:
        """The first operation of each stream that was launched at or after a time; -1 if none."""
        return self._on_streams(stream, since, 0)

    def _on_streams(self, stream: IntArray, time: IntArray, step: int) -> IntArray:
        out = np.full(len(stream), -1, dtype=np.int64)
        where = {int(self.stream[low]): (low, high) for low, high in self._stretches()}
        for number in distinct_values(stream).tolist():
            if number not in where:
                continue
            low, high = where[number]
            mine = np.flatnonzero(stream == number)
            found = low + np.searchsorted(self.launched[low:high], time[mine], side="left") + step
            out[mine] = np.where((found >= low) & (found < high), found, -1)
        return out

    def _engines(self) -> list[tuple[IntArray, IntArray]]:
        """Copies of one direction of a device run one after the other, whatever their streams."""
        copies = self.prepared.trace.copies
        if copies is None or not len(copies):
            return []
        mine = np.flatnonzero(self.kind == op.COPY)
        rows = self.order[mine]
        kind = copies["kind"][self.ops.row[rows]]
        device = np.asarray(self.ops.device)[rows]
        order = np.lexsort((self.start[mine], kind, device))
        source, target = mine[order[:-1]], mine[order[1:]]
        same = (kind[order[1:]] == kind[order[:-1]]) & (device[order[1:]] == device[order[:-1]])
        same &= (self.stream[source] != self.stream[target]) & (self.end[source] <= self.start[target])
        return [(source[same], target[same])]

    def _inferred(self, known: list[tuple[IntArray, IntArray]]) -> list[tuple[IntArray, IntArray]]:
        """Operations that started long after their launch and stream allowed, beside work on other streams of the device.

        What held them up is not recorded: the operation of another stream that ended just before, or else the one that
        ran or had run last: then they keep their place beside it.
        """
        if len(self.bounds) <= 2:
            return []
        limit = np.maximum(np.minimum(self.call_end, self.start), self.reach)
        for source, target in known:
            np.maximum.at(limit, target, self.end[source])
        late = np.flatnonzero((self.start - limit > UNEXPLAINED_NS) & (limit > NEVER))
        if not len(late):
            return []
        out = []
        device = np.asarray(self.ops.device)[self.order]
        for number in distinct_values(device[late]).tolist():
            mine = np.flatnonzero(device == number)
            target = late[device[late] == number]
            for times, near in ((self.end, True), (self.start, False)):
                by_time = mine[np.argsort(times[mine], kind="stable")]
                found = np.searchsorted(times[by_time], self.start[target], side="right") - 1
                source = self._of_other_stream(by_time, found, target)
                good = (source >= 0) & (self.start[source] < self.start[target])
                if near:
                    good &= self.start[target] - self.end[source] <= TURN_AROUND_NS
                # No further back than what is known to have been over.
                good &= np.minimum(self.end[source], self.start[target]) > limit[target]
                out.append((source[good], target[good]))
                target = target[~good]
        return out

    def _of_other_stream(self, by_time: IntArray, found: IntArray, target: IntArray) -> IntArray:
        """The last of some operations, at ``found`` or before, that is of another stream than the target; -1 if none is
        near."""
        source = np.where(found >= 0, by_time[np.maximum(found, 0)], -1)
        for back in range(1, 9):
            same = (source >= 0) & (self.stream[source] == self.stream[target])
            if not same.any():
                break
            earlier = found - back
            source = np.where(same, np.where(earlier >= 0, by_time[np.maximum(earlier, 0)], -1), source)
        return np.where((source >= 0) & (self.stream[source] != self.stream[target]), source, -1)

    # --- limits ----------------------------------------------------------------------------------------------------------

    def _limits(self, pairs: list[tuple[IntArray, IntArray]]) -> tuple[Chains, Edges]:
        """How long after each of its limits every operation came, or may come at most."""
        start, end, reach = self.start, self.end, self.reach
        has_call = self.call >= 0
        source = np.concatenate([p[0] for p in pairs]) if pairs else np.empty(0, dtype=np.int64)
        target = np.concatenate([p[1] for p in pairs]) if pairs else np.empty(0, dtype=np.int64)
        latest = np.full(len(start), NEVER, dtype=np.int64)
        # Of an operation that still ran it is the part before this start that was waited for.
        waited_part = np.minimum(end[source], start[target]) - start[source]
        np.maximum.at(latest, target, start[source] + waited_part)
        # Inside the call, or before it has returned: then the launch could have let it start at any time since.
        early = has_call & (self.held | (start < self.call_end))
        launched = np.where(early, self.call_start, self.call_end)
        by_stream = (reach > launched) & (reach >= latest) & (~early | (start - reach <= TURN_AROUND_NS))
        by_other = ~by_stream & (latest > launched) & (latest >= reach)
        by_launch = has_call & ~by_stream & ~by_other
        overlapping = start < reach
        group, _ = self._groups()
        count = int(group.max(initial=-1)) + 1
        gap = np.where(reach > NEVER, start - reach, 0)
        lead = np.where(has_call, start - self.call_end, 0)
        late = by_launch & ~self.held & self._first_of_call() & (lead <= LONGEST_LEAD_NS)
        usual_lead = _typical(lead, late, group, count, USUAL_LEAD_NS)
        # Where a launch takes as long as it took here, the operation was not queued: it came as soon as it could.
        soon = by_stream & has_call & ~early & (lead <= USUAL_LEADS * usual_lead) & late.any()
        by_stream, by_launch = by_stream & ~soon, by_launch | soon
        # What nothing explains says nothing about turn-arounds.
        usual_gap = _typical(gap, by_stream & ~overlapping & (gap <= UNEXPLAINED_NS), group, count, USUAL_GAP_NS)
        gap = np.where(by_stream | ~has_call & (reach > NEVER), gap, np.minimum(usual_gap, gap))
        lead = np.where(by_launch, lead, np.minimum(usual_lead, lead))
        setup = np.where(has_call, start - self.call_start, 0)
        usual_setup = _typical(setup, by_launch & self.held & (setup <= LONGEST_LEAD_NS), group, count, USUAL_SETUP_NS)
        setup = np.where(by_launch, setup, np.minimum(usual_setup, setup))
        length = np.where(has_call, self.call_end - self.call_start, 0)
        inside = np.where(self.held, np.maximum(setup, 0), np.clip(length + lead, 0, length))
        inside = np.minimum(inside, np.maximum(start - self.call_start, 0)) * has_call
        after = np.where(
            self.held,
            np.minimum(start - self.call_start - inside, 0),
            np.where(lead < -length, lead + length, np.maximum(lead, 0)),
        )
        after = after * has_call
        pinned = ~has_call & ((reach == NEVER) | (gap > UNEXPLAINED_NS)) & ~by_other
        part, gap, nested = self._stream_steps(gap)
        collective, transfer = self._collectives()
        edges = [self._edge(source, target, waited_part, by_other)]
        edges.append(self._nested_edges(nested))
        chains = Chains(
            self.order,
            self.stream,
            start,
            end,
            self.call,
            narrow(inside),
            narrow(after),
            narrow(part),
            narrow(gap),
            pinned,
            self.first,
            collective,
            transfer,
        )
        return chains, self._with_collectives(chains, Edges.of(edges))

    def _edge(
        self, source: IntArray, target: IntArray, part: IntArray, binding: BoolArray
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        lag = self.start[target] - self.start[source] - part
        return source, target, part, np.where(binding[target], lag, np.minimum(lag, USUAL_GAP_NS))

    def _groups(self) -> tuple[IntArray, int]:
        """Operations of a stream, kind and way of launch are alike."""
        code = (self.stream * 4 + self.kind) * 2 + self.in_graph
        values, which = distinct(code)
        return np.asarray(which), len(values)

    def _first_of_call(self) -> BoolArray:
        """A graph launch has many operations: the first one shows how long the launch takes."""
        first = np.ones(len(self.call), dtype=np.bool_)
        first[1:] = (self.call[1:] != self.call[:-1]) | self.first[1:]
        return first

    def _stream_steps(self, gap: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """(part, gap, nested): from one start to the next of a stream, the part that the operation before takes.

        Where operations of a stream overlap, the start of one follows the start of the other. ``nested``: those behind
        an operation that another, longer one outlasts; they wait for that one too.
        """
        part = np.zeros(len(gap), dtype=np.int64)
        before = np.arange(len(gap)) - 1
        inner = np.flatnonzero(~self.first)
        previous = before[inner]
        length = self.end[previous] - self.start[previous]
        distance = self.start[inner] - self.start[previous]
        apart = self.start[inner] >= self.end[previous]
        part[inner] = np.where(apart, length, distance)
        outlasted = self.reach[inner] > self.end[previous]
        gap = gap.copy()
        # Behind a shorter one: what the recording shows, since the longer one is the limit, or none.
        gap[inner] = np.where(apart, np.where(outlasted, np.minimum(distance - length, USUAL_GAP_NS), gap[inner]), 0)
        overlapped = self.start[inner] < self.reach[inner]
        gap[inner] = np.where(apart & outlasted & overlapped, distance - length, gap[inner])
        gap[self.first] = 0
        return part, np.maximum(gap, 0), inner[apart & outlasted & ~overlapped]

    def _nested_edges(self, nested: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """From the operation that lasted longest to the first one behind it."""
        longest = np.empty(len(nested), dtype=np.int64)
        # The position of the running maximum of the ends, stream by stream.
        for low, high in self._stretches():
            mine = (nested >= low) & (nested < high)
            if mine.any():
                top = np.maximum.accumulate(self.end[low:high])
                new = np.ones(high - low, dtype=np.bool_)
                new[1:] = top[1:] > top[:-1]
                place = low + np.maximum.accumulate(np.where(new, np.arange(high - low), 0))
                longest[mine] = place[nested[mine] - low - 1]
        lag = self.start[nested] - self.end[longest]
        launched = (self.call[nested] >= 0) & (self.call_end[nested] > self.end[longest])
        lag = np.where(launched, np.minimum(lag, USUAL_GAP_NS), lag)
        return longest, nested, self.end[longest] - self.start[longest], np.maximum(lag, 0)

    def _collectives(self) -> tuple[IntArray, IntArray]:
        chains = matched_collectives(self.prepared)
        if chains is None:
            return constant(-1, len(self.start)), constant(0, len(self.start))
        group = np.full(len(self.start), -1, dtype=np.int64)
        transfer = self.end - self.start
        members = self.place[np.stack(chains)]
        arrived, ended = self.start[members].max(axis=0), self.end[members].min(axis=0)
        together = np.flatnonzero(ended > arrived)
        for row in members[:, together]:
            group[row] = together
            transfer[row] = self.end[row] - arrived[together]
        return group, transfer

    def _with_collectives(self, chains: Chains, edges: Edges) -> Edges:
        """A collective ends when its last rank has arrived and the data are there: whatever waits for one, for all."""
        mine = np.flatnonzero(chains.group >= 0)
        if not len(mine):
            return edges
        following = mine[mine + 1 < len(chains)] + 1
        following = following[~chains.first[following]]
        apart = chains.start[following] >= chains.end[following - 1]
        following = following[apart]
        # On its own stream the step is the transfer, counted from its own arrival at the earliest.
        chains.part = chains.part.astype(np.int64)
        chains.part[following] = np.minimum(chains.transfer[following - 1], chains.part[following])
        waits = (following - 1, following, chains.transfer[following - 1], chains.gap[following])
        all_edges = Edges.of([(edges.source, edges.target, edges.part, edges.lag), waits])
        return expanded(chains, all_edges)

    # --- dependencies of calls -------------------------------------------------------------------------------------------

    def _call_waits(self, chains: Chains) -> Edges:
        """What synchronising and blocking calls waited for, and what they cost without waiting."""
        calls = self.calls
        parts: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
        if not len(calls) or not len(chains):
            return Edges.of(parts)
        table = self.prepared.trace.api_calls
        assert table is not None
        names = table["name"][calls.row]
        process = np.array([t.process for t in self.prepared.trace.threads], dtype=np.int64)[calls.thread]
        sources, targets = self._awaited(names, process)
        # Blocking copies wait for their own.
        held = np.flatnonzero(self.held)
        last = held[np.append(self.call[held][1:] != self.call[held][:-1], True)] if len(held) else held
        sources, targets = np.concatenate([sources, last]), np.concatenate([targets, self.call[last]])
        tail = calls.end[targets] - self.end[sources]
        waited = self.end[sources] > calls.start[targets]
        latest = np.full(len(calls), NEVER, dtype=np.int64)
        np.maximum.at(latest, targets, self.end[sources])
        binding = latest > calls.start
        self._own_costs(names, binding, latest, chains)
        # The one that ended last held the call; the others would have let it go after as long.
        usual = np.where(binding, calls.end - latest, calls.own)
        lag = np.where(waited & (self.end[sources] == latest[targets]), tail, np.minimum(tail, usual[targets]))
        parts.append((sources, targets, self.end[sources] - self.start[sources], lag))
        return expanded(chains, Edges.of(parts))

    def _awaited(self, names: IntArray, process: IntArray) -> tuple[IntArray, IntArray]:
        """(operation, call) for all calls that synchronise, by name, by record, or by what they show."""
        calls, strings = self.calls, self.prepared.trace.strings
        waits = np.flatnonzero(calls.cost == SYNC)
        frees = self._long_ones(np.flatnonzero((calls.cost == ALLOCATOR) & call_kinds.matching(strings, "Free")[names]))
        none = np.empty(0, dtype=np.int64)
        if not len(waits) and not len(frees):
            return none, none
        whole = call_kinds.matching(strings, r"(Device|Ctx|Context)Synchronize")[names]
        stream, record = self._recorded_waits(process)
        known = stream[waits] >= 0
        parts = [self._on_known_stream(waits[known], stream, record)]
        rest = waits[~known]
        parts += self._by_evidence(rest[~whole[rest]], process, every_stream=False)
        parts += self._by_evidence(rest[whole[rest]], process, every_stream=True)
        parts += self._by_evidence(frees, process, every_stream=True, only_drained=True)
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _long_ones(self, frees: IntArray) -> IntArray:
        """Frees that lasted clearly longer than the quick ones: only these can have waited for the device."""
        length = self.calls.end[frees] - self.calls.start[frees]
        return frees[length > 1.5 * np.percentile(length, 10) + TURN_AROUND_NS] if len(frees) else frees

    def _recorded_waits(self, process: IntArray) -> tuple[IntArray, IntArray]:
        """Per call the stream that it waits for, and the time of the record, where the profiler wrote them down."""
        stream = np.full(len(self.calls), -1, dtype=np.int64)
        record = np.full(len(self.calls), -1, dtype=np.int64)
        syncs = self.prepared.trace.syncs
        if syncs is None or not len(syncs):
            return stream, record
        kind = syncs["kind"]
        mine = np.flatnonzero(
            ((kind == STREAM_SYNC) & (syncs["stream"] >= 0)) | ((kind == EVENT_SYNC) & (syncs["record_stream"] >= 0))
        )
        rows = self.prepared.launches.find(np.asarray(syncs["process"][mine]), np.asarray(syncs["correlation"][mine]))
        mine, rows = mine[rows >= 0], rows[rows >= 0]
        call = self.call_of_row[rows]
        is_event = kind[mine] == EVENT_SYNC
        stream[call] = np.where(is_event, syncs["record_stream"][mine], syncs["stream"][mine])
        times = self._call_times(syncs["process"][mine], syncs["record"][mine])
        record[call] = np.where(is_event, times, -1)
        return stream, record

    def _on_known_stream(self, waits: IntArray, stream: IntArray, record: IntArray) -> tuple[IntArray, IntArray]:
        until = np.where(record[waits] >= 0, record[waits], self.calls.start[waits])
        source = self._last_on(stream[waits], until)
        returned = self.calls.end[waits] + SKEW_NS
        good = source >= 0
        # An event that was recorded again meanwhile: the record before is meant, as far as the call shows it.
        ran_on = good.copy()
        ran_on[good] = self.end[source[good]] > returned[good]
        for _ in range(8):
            if not ran_on.any():
                break
            source[ran_on] -= 1
            good &= (source >= 0) & ~(ran_on & self.first[np.minimum(source + 1, len(self.first) - 1)])
            ran_on &= good
            ran_on[ran_on] = self.end[source[ran_on]] > returned[ran_on]
        good &= ~ran_on
        return source[good], waits[good]

    def _by_evidence(
        self, waits: IntArray, process: IntArray, every_stream: bool, only_drained: bool = False
    ) -> list[tuple[IntArray, IntArray]]:
        """Of the operations launched before each call those that had ended when it returned: the last of each stream,
        or of all streams. ``only_drained``: only where all had, and the last one within the call."""
        if not len(waits):
            return []
        found, of_call = [], []
        calls = self.calls
        drained = np.ones(len(waits), dtype=np.bool_)
        owner = np.asarray(self.ops.process)[self.order]
        for low, high in self._stretches():
            mine = np.flatnonzero(process[waits] == owner[low])
            if not len(mine):
                continue
            call = waits[mine]
            last = np.searchsorted(self.launched[low:high], calls.start[call], side="left") - 1
            ended = (
                np.searchsorted(np.maximum.accumulate(self.end[low:high]), calls.end[call] + SKEW_NS, side="right") - 1
            )
            drained[mine] &= last <= ended
            place = np.minimum(last, ended)
            good = place >= 0
            if every_stream:
                good &= last <= ended
            found.append(low + place[good])
            of_call.append(mine[good])
        if not found:
            return []
        source, which = np.concatenate(found), np.concatenate(of_call)
        latest = np.full(len(waits), NEVER, dtype=np.int64)
        np.maximum.at(latest, which, self.end[source])
        keep = np.ones(len(source), dtype=np.bool_)
        if only_drained:
            keep &= drained[which] & (latest[which] > calls.start[waits[which]])
        if not every_stream:
            # One stream is meant: the one whose operation ended last, if it ended while the call waited.
            keep &= (self.end[source] == latest[which]) & (latest[which] > calls.start[waits[which]])
        return [(source[keep], waits[which[keep]])]

    def _own_costs(self, names: IntArray, binding: BoolArray, latest: IntArray, chains: Chains) -> None:
        """What waiting calls take by themselves: as those of the name that did not wait, else as long as they took to
        return; copies what they took until their copy began."""
        calls = self.calls
        calls.own = calls.own.copy()
        length = calls.end - calls.start
        sync = (calls.cost == SYNC) | (binding & (calls.cost == ALLOCATOR))
        for name in distinct_values(names[sync]).tolist() if sync.any() else []:
            mine = sync & (names == name)
            free = length[mine & ~binding]
            behind = (calls.end - np.maximum(latest, calls.start))[mine & binding]
            usual = median(free) if len(free) else median(behind) if len(behind) else 0
            calls.own[mine & binding] = np.minimum(length[mine & binding], max(int(usual), 0))
        held = np.flatnonzero(self.held)
        calls.own[self.call[held]] = np.minimum(chains.inside[held], length[self.call[held]])
        calls.lead_own = np.minimum(calls.lead_own, calls.own)


def narrow(times: IntArray) -> IntArray:
    """Times that fit in half the memory so: sums over them count in int64 all the same."""
    low, high = (int(times.min()), int(times.max())) if len(times) else (0, 0)
    if low == high:
        return constant(low, len(times))
    return times.astype(np.int32) if low > -(2**31) and high < 2**31 else times


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _typical(values: IntArray, shown: BoolArray, group: IntArray, count: int, usual: int) -> IntArray:
    """For each row the median of its group's rows where it shows; of all groups', where its own shows none; else
    ``usual``."""
    everywhere = median(values[shown]) if shown.any() else usual
    table = np.full(count, int(everywhere), dtype=np.int64)
    rows = np.flatnonzero(shown)
    if len(rows) and count > 1:
        order = rows[np.argsort(group[rows], kind="stable")]
        numbers, first = np.unique(group[order], return_index=True)
        for number, part in zip(numbers.tolist(), np.split(values[order], first[1:]), strict=True):
            table[number] = int(median(part))
    return table[group]


def expanded(chains: Chains, edges: Edges) -> Edges:
    """Edges from collectives as edges from each of their ranks: the last one to arrive decides."""
    group = chains.group[edges.source]
    mine = np.flatnonzero(group >= 0)
    if not len(mine):
        return edges
    members = np.flatnonzero(chains.group >= 0)
    members = members[np.argsort(chains.group[members], kind="stable")]
    numbers = chains.group[members]
    low, high = np.searchsorted(numbers, group[mine], side="left"), np.searchsorted(numbers, group[mine], side="right")
    which, place = iv.expand(low, high)
    edge = mine[which]
    rest = group < 0
    return Edges(
        np.concatenate([edges.source[rest], members[place]]),
        np.concatenate([edges.target[rest], edges.target[edge]]),
        np.concatenate([edges.part[rest], chains.transfer[edges.source[edge]]]),
        np.concatenate([edges.lag[rest], edges.lag[edge]]),
    )
