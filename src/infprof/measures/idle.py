"""Why a device was idle: every gap split by what the thread that ended it was doing (docs/verdicts.md, "idle causes").

A gap ends with an operation; its launch call L (same process, same correlation) names the thread. Up to the end of L
each stretch belongs to what that thread was doing; after it the operation was queued: the first ``kernel_gap_ns`` are
the hardware's turn-around, the rest a dependency. The parts of a gap add up to it exactly.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np

from infprof.distinct import distinct_values, first_of_each
from infprof.measures import host
from infprof.measures import intervals as iv
from infprof.measures.host import HostLimits, HostTimelines
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.results import IDLE_CAUSES
from infprof.trace import BoolArray, IntArray

CAUSE = {name: i for i, name in enumerate(IDLE_CAUSES)}

# A *Synchronize call that ended this long before the gap began still ended because the device had drained: the two
# clocks are matched to a few µs only.
SYNC_TOLERANCE_NS = 5_000
# A wait counts as a poll for requests only while no other thread of the program is known to work.
PEER_WORKING_SHARE = 0.5
# A queued part is explained by another device that is busy for this share of it.
EXPLAINED_SHARE = 0.8


@dataclass(frozen=True)
class IdleLimits:
    kernel_gap_ns: int
    host: HostLimits


@dataclass
class IdleGaps:
    """The gaps of one device inside a scope. ``causes`` has shape (len(IDLE_CAUSES), gaps), ns."""

    starts: IntArray
    ends: IntArray
    operation: IntArray  # the operation that ends the gap, -1 for the tail
    thread: IntArray  # thread of its launch call, -1 unknown
    held: BoolArray  # the gap began while that thread was held in a synchronising call
    new_kernel: BoolArray  # loading or compiling a kernel made the gap
    explained_ns: IntArray  # part of the dependency during which another device was busy
    causes: IntArray

    @property
    def lengths(self) -> IntArray:
        return self.ends - self.starts

    def cause_ns(self, cause: str) -> int:
        return int(self.causes[CAUSE[cause]].sum())


class IdleModel:
    """Attributes gaps; those of any scope and device can be asked for.

    ``steady_ns``: where start-up ends, None while that is not known: until then long context and capture calls count as
    loading, later ones as host work.
    """

    def __init__(self, prepared: Prepared, limits: IdleLimits, steady_ns: int | None) -> None:
        self._prepared = prepared
        self._limits = limits
        self._steady_ns = steady_ns
        self.timelines = HostTimelines(prepared, limits.host)
        self._busy: dict[int, Intervals] = {}
        self._peers: dict[int, Intervals] = {}
        self._waits: dict[int, Intervals] = {}
        self._pure_waits: dict[int, Intervals] = {}
        self._new_kernel_launches: IntArray | None = None
        self._dropped = self._dropped_launch_times()
        self._no_requests: Intervals | None = None

    def after_startup(self, steady_ns: int) -> IdleModel:
        """The same model, timelines included, once it is known where start-up ends."""
        model = copy.copy(self)
        model._steady_ns = steady_ns
        return model

    def busy(self, device: int) -> Intervals:
        """When the device ran anything."""
        if device not in self._busy:
            ops = self._prepared.operations
            mine = ops.device == device
            self._busy[device] = iv.union(ops.start[mine], ops.end[mine])
        return self._busy[device]

    def gaps(self, device: int, scope: Intervals, shortest_ns: int = 0) -> IdleGaps:
        """The idle gaps of a device inside the scope, with the time of each by cause.

        A gap that the scope cuts keeps its ending operation and its history; only its time is cut.
        """
        ops = self._prepared.operations
        busy = self.busy(device)
        low, high = int(scope.starts[0]), int(scope.ends[-1])
        whole = iv.complement(busy, min(low, _first(busy, low)), max(high, _last(busy, high)))
        inside = iv.intersect(whole, scope)
        if shortest_ns:
            keep = inside.ends - inside.starts >= shortest_ns
            inside = Intervals(inside.starts[keep], inside.ends[keep])
        index = np.searchsorted(whole.starts, inside.starts, side="right") - 1
        origin, finish = whole.starts[index], whole.ends[index]
        mine = np.flatnonzero(ops.device == device)
        if not len(mine):
            return self._attribute(device, inside, origin, np.full(len(inside.starts), -1, dtype=np.int64))
        position = np.searchsorted(ops.start[mine], finish, side="left")
        ends_here = position < len(mine)
        operation = np.where(ends_here, mine[np.minimum(position, len(mine) - 1)], -1)
        if ends_here.any():
            operation = self._prefer_launched(mine, position, operation)
        return self._attribute(device, inside, origin, operation)

    # --- attribution -----------------------------------------------------------------------------------------------

    def _prefer_launched(self, mine: IntArray, position: IntArray, operation: IntArray) -> IntArray:
        """Of several operations that start in the same nanosecond, one whose launch is known."""
        ops = self._prepared.operations
        unknown = (operation >= 0) & (ops.launch[operation] < 0)
        following = np.minimum(position + 1, len(mine) - 1)
        twin = mine[following]
        same = unknown & (ops.start[twin] == ops.start[operation]) & (ops.launch[twin] >= 0)
        return np.where(same, twin, operation)

    def _attribute(self, device: int, gaps: Intervals, origin: IntArray, operation: IntArray) -> IdleGaps:
        prepared = self._prepared
        ops, table = prepared.operations, prepared.trace.api_calls
        starts, ends = gaps
        count = len(starts)
        causes = np.zeros((len(IDLE_CAUSES), count), dtype=np.int64)
        thread = np.full(count, -1, dtype=np.int64)
        held = np.zeros(count, dtype=np.bool_)
        new_kernel = np.zeros(count, dtype=np.bool_)
        explained = np.zeros(count, dtype=np.int64)
        launch = np.where(operation >= 0, ops.launch[operation], -1) if len(ops) else np.full(count, -1)
        known = launch >= 0
        lost = known & self._lost_between(operation, launch)
        known &= ~lost
        causes[CAUSE["unknown"]][~known] = (ends - starts)[~known]
        if table is not None and known.any():
            outer = prepared.thread_calls.outer if prepared.thread_calls is not None else np.arange(len(table))
            rows = outer[launch[known]]
            thread[known] = table["thread"][rows]
            split = np.clip(table["end"][rows], starts[known], ends[known])
            queued_start, queued_end = split, ends[known]
            queued = queued_end - queued_start
            turn_around = np.minimum(queued, self._limits.kernel_gap_ns)
            causes[CAUSE["kernel-gap"]][known] = turn_around
            causes[CAUSE["dependency"]][known] = queued - turn_around
            explained[known] = self._explained(device, queued_start + turn_around, queued_end)
            threads = distinct_values(thread[known]).tolist()
            # Where one thread ended all gaps nothing needs to be picked out.
            alone = len(threads) == 1 and bool(known.all())
            for number in threads:
                chosen = slice(None) if alone else np.flatnonzero(known & (thread == number))
                before = np.clip(table["end"][outer[launch[chosen]]], starts[chosen], ends[chosen])
                self._split_host(
                    number,
                    chosen,
                    starts[chosen],
                    before,
                    origin[chosen],
                    launch[chosen],
                    causes,
                    held,
                    new_kernel,
                )
        self._move_to_no_demand(starts, ends, causes)
        return IdleGaps(starts, ends, operation, thread, held, new_kernel, explained, causes)

    def _move_to_no_demand(self, starts: IntArray, ends: IntArray, causes: IntArray) -> None:
        """Idle time while the engine itself reports no request, running or waiting: no demand, in place.

        Time in launch, allocator and module calls stays what it is: something was being done.
        """
        if self._prepared.trace.telemetry is None or not len(starts):
            return
        if self._no_requests is None:
            from infprof.measures.serving_telemetry import demand_intervals

            low, high = int(starts[0]), int(ends[-1])
            operations = self._prepared.operations
            if len(operations):
                low, high = min(low, int(operations.start.min())), max(high, int(operations.end.max()))
            silent, _ = demand_intervals(self._prepared.trace.telemetry, low, high)
            self._no_requests = iv.union(*silent)
        left = iv.covered(self._no_requests, starts, ends)
        for cause in ("unknown", "host-work", "io", "lock", "sync"):
            moved = np.minimum(left, causes[CAUSE[cause]])
            causes[CAUSE[cause]] -= moved
            causes[CAUSE["no-demand"]] += moved
            left = left - moved

    def _split_host(
        self,
        thread: int,
        chosen: IntArray | slice,
        starts: IntArray,
        ends: IntArray,
        origin: IntArray,
        launch: IntArray,
        causes: IntArray,
        held: BoolArray,
        new_kernel: BoolArray,
    ) -> None:
        """The host part of gaps that one thread ended: its time by label, translated into causes, in place."""
        lines = self.timelines
        is_held = self.held(thread, origin)
        held[chosen] = is_held
        spent = lines.spent(thread, starts, ends)
        outside = spent[host.OUTSIDE]
        poll_demand, poll_work = self._split_polls(thread, starts, ends, spent[host.POLL])
        if self._steady_ns is None:
            loading = spent[host.LONG_CUDA]
        else:
            loading = np.where(starts < self._steady_ns, spent[host.LONG_CUDA], 0)
        module = spent[host.MODULE] + loading
        compiled = self._compiles_new_kernel(thread, starts, ends, launch, module)
        new_kernel[chosen] = compiled | ((module > 0) & np.isin(launch, self._first_launches()))
        to_module = np.where(compiled, outside, 0)
        rest = outside - to_module
        to_sync = np.where(is_held, rest, 0)
        add = {
            "launch": spent[host.LAUNCH],
            "sync": spent[host.SYNC] + to_sync,
            "allocator": spent[host.ALLOCATOR],
            "module-load": module + to_module,
            "host-work": spent[host.OTHER_CUDA] + spent[host.LONG_CUDA] - loading + rest - to_sync + poll_work,
            "lock": spent[host.LOCK],
            "io": spent[host.IO],
            "no-demand": spent[host.TERMINAL] + poll_demand,
            "profiler": spent[host.PROFILER_TIME],
        }
        for cause, amount in add.items():
            # Untouched rows of the zeroed array take no memory.
            if amount.any():
                causes[CAUSE[cause]][chosen] += amount

    def held(self, thread: int, times: IntArray) -> BoolArray:
        """Whether the thread was held at each time: in a *Synchronize call, or in a copy call whose copy had begun."""
        if thread not in self._waits:
            self._waits[thread] = self.timelines.stretches(thread, host.SYNC)
            # Only true waits are stretched: an asynchronous copy call returns about when its copy starts anyway.
            pure = self.timelines.synchronize_calls(thread)
            self._pure_waits[thread] = pure
        pure = self._pure_waits[thread]
        return iv.contains(self._waits[thread], times) | (iv.covered(pure, times - SYNC_TOLERANCE_NS, times) > 0)

    def _compiles_new_kernel(
        self, thread: int, starts: IntArray, ends: IntArray, launch: IntArray, module_ns: IntArray
    ) -> BoolArray:
        """Gaps with a module load that end in a kernel's first launch, where nothing says what else the thread did.

        A run-time compiler works outside CUDA and hands its result to a module load; without NVTX or system calls of
        that thread in the gap the time before the load is the compiler's.
        """
        candidates = (module_ns > 0) & np.isin(launch, self._first_launches())
        if not candidates.any():
            return candidates
        for table in (self._prepared.trace.ranges, self._prepared.trace.os_calls):
            if table is not None:
                mine = table["thread"] == thread
                edges = np.sort(np.concatenate([table["start"][mine], table["end"][mine]]))
                seen = np.searchsorted(edges, ends, side="left") > np.searchsorted(edges, starts, side="left")
                candidates &= ~seen
        return candidates

    def _first_launches(self) -> IntArray:
        """API rows of the first launch of each kernel name, sorted."""
        if self._new_kernel_launches is None:
            ops, trace = self._prepared.operations, self._prepared.trace
            if trace.kernels is None or trace.api_calls is None:
                self._new_kernel_launches = np.empty(0, dtype=np.int64)
            else:
                mine = (ops.kind == 0) & (ops.launch >= 0)
                launch, name = ops.launch[mine], trace.kernels["name"][ops.row[mine]]
                order = np.argsort(trace.api_calls["start"][launch], kind="stable")
                _, first = first_of_each(name[order])
                self._new_kernel_launches = np.unique(launch[order][first])
        return self._new_kernel_launches

    def _split_polls(
        self, thread: int, starts: IntArray, ends: IntArray, poll_ns: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Polling as (no demand, waiting for a peer that worked): a peer known to work for half of the polling decides."""
        demand = poll_ns.copy()
        work = np.zeros(len(starts), dtype=np.int64)
        polling = np.flatnonzero(poll_ns > 0)
        if len(polling):
            peers = self._working_peers(thread)
            both = iv.intersect(peers, self.timelines.stretches(thread, host.POLL))
            busy = iv.covered(both, starts[polling], ends[polling])
            waited = busy >= PEER_WORKING_SHARE * poll_ns[polling]
            work[polling] = np.where(waited, poll_ns[polling], 0)
            demand[polling] -= work[polling]
        return demand, work

    def _working_peers(self, thread: int) -> Intervals:
        """When any other thread was known to work: between two of its recorded system calls, or in a CUDA call.

        A thread that is silent before its first or after its last recorded call may be blocked in a call that never
        returned, so it says nothing there.
        """
        if thread not in self._peers:
            prepared = self._prepared
            table = prepared.trace.os_calls
            sets: list[Intervals] = []
            if table is not None:
                for other in distinct_values(table["thread"]).tolist():
                    if other in (thread, -1):
                        continue
                    mine = table["thread"] == other
                    blocked = iv.union(table["start"][mine], table["end"][mine])
                    if blocked.count > 1:
                        sets.append(iv.complement(blocked, int(blocked.starts[0]), int(blocked.ends[-1])))
            calls = prepared.thread_calls
            api = prepared.trace.api_calls
            if calls is not None and api is not None:
                for other, rows in calls.rows.items():
                    if other not in (thread, -1):
                        sets.append(iv.union(api["start"][rows], api["end"][rows]))
            self._peers[thread] = iv.merge(*sets) if sets else iv.empty()
        return self._peers[thread]

    def _explained(self, device: int, starts: IntArray, ends: IntArray) -> IntArray:
        """The dependency part where another device was busy for most of it; 0 where nothing explains it."""
        out = np.zeros(len(starts), dtype=np.int64)
        length = np.maximum(ends - starts, 0)
        if not (length > 0).any():
            return out
        for other in range(len(self._prepared.trace.devices)):
            if other == device:
                continue
            covered = iv.covered(self.busy(other), starts, ends)
            out = np.where(covered >= EXPLAINED_SHARE * length, length, out)
        return out

    # --- records lost while recording ------------------------------------------------------------------------------

    def _dropped_launch_times(self) -> dict[int, IntArray]:
        """Per process the start times of launches whose operation was recorded without usable times, sorted."""
        trace = self._prepared.trace
        if trace.dropped_launches is None or trace.api_calls is None:
            return {}
        from infprof.measures.operations import join_launches

        process, correlation = trace.dropped_launches
        rows = join_launches(trace, process, correlation)
        rows = rows[rows >= 0]
        times, owner = trace.api_calls["start"][rows], trace.api_calls["process"][rows]
        return {int(p): np.sort(times[owner == p]) for p in np.unique(owner)}

    def _lost_between(self, operation: IntArray, launch: IntArray) -> BoolArray:
        """Gaps in which a lost operation may have run: its launch lies between those of the gap's two neighbours."""
        out = np.zeros(len(operation), dtype=np.bool_)
        table = self._prepared.trace.api_calls
        ops = self._prepared.operations
        # Every operation may be among the lost ones: then there is none to end a gap.
        if not self._dropped or table is None or not len(ops):
            return out
        previous = self._previous_launch(operation)
        for process, times in self._dropped.items():
            mine = (operation >= 0) & (launch >= 0) & (ops.process[operation] == process)
            here = np.flatnonzero(mine)
            until = table["start"][launch[here]]
            since = np.where(previous[here] >= 0, table["start"][np.maximum(previous[here], 0)], until)
            out[here] = np.searchsorted(times, until, "left") > np.searchsorted(times, since, "right")
        return out

    def _previous_launch(self, operation: IntArray) -> IntArray:
        """The launch of the operation before, on the same device; -1 if unknown."""
        ops = self._prepared.operations
        out = np.full(len(operation), -1, dtype=np.int64)
        for device in distinct_values(ops.device).tolist():
            mine = np.flatnonzero(ops.device == device)
            here = np.flatnonzero((operation >= 0) & (ops.device[operation] == device))
            position = np.searchsorted(mine, operation[here]) - 1
            out[here] = np.where(position >= 0, ops.launch[mine[np.maximum(position, 0)]], -1)
        return out


def _first(busy: Intervals, default: int) -> int:
    return int(busy.starts[0]) if len(busy.starts) else default


def _last(busy: Intervals, default: int) -> int:
    return int(busy.ends[-1]) if len(busy.ends) else default
