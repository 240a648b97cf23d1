"""What bound each event of a trace: the launch, the stream, another operation, or the thread's own calls before it.

Two kinds of chains, each in order: the outermost CUDA calls of a thread, and the operations of a stream. Beside them
stand *dependencies* across chains: an operation waits for one of another stream (events, copy engines, collectives), a
call returns after an operation (synchronising and blocking calls). For every limit of an event the recording shows how
long after it the event came, where that limit was the binding one; for the others the typical time of their kind stands,
but never more than what the recording leaves. So an unchanged replay gives the recording back (design: replay.md).

Times are int64 ns from the trace's origin. Operations are in chain order here: stream after stream, each by start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infprof.measures import intervals as iv
from infprof.measures.operations import Prepared
from infprof.trace import BoolArray, IntArray, constant

# What a call costs its thread.
LAUNCH, SYNC, ALLOCATOR, MODULE, OTHER = range(5)
CALL_COSTS = ("launch", "sync", "allocator", "module-load", "calls")

# Host and GPU clocks are matched to some microseconds.
SKEW_NS = 2_000
# An operation that starts this soon after the one before it was held up by its stream, not by its launch.
TURN_AROUND_NS = 5_000
# Where a trace shows none: the usual time of current GPUs from the end of one kernel to the next.
USUAL_GAP_NS = 0
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
    # Operations whose launch is not known.
    without_launch: int = 0


def narrow(times: IntArray) -> IntArray:
    """Times that fit in half the memory so: sums over them count in int64 all the same."""
    low, high = (int(times.min()), int(times.max())) if len(times) else (0, 0)
    if low == high:
        return constant(low, len(times))
    return times.astype(np.int32) if low > -(2**31) and high < 2**31 else times


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
