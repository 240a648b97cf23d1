"""Why a device was idle: every gap split by what the thread that ended it was doing (docs/verdicts.md, "idle causes").

A gap ends with an operation; its launch call L (same process, same correlation) names the thread. Up to the end of L
each stretch belongs to what that thread was doing; after it the operation was queued: the first ``kernel_gap_ns`` are
the hardware's turn-around, the rest a dependency. The parts of a gap add up to it exactly.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from infprof.distinct import PIECE, distinct_values
from infprof.measures import host
from infprof.measures import intervals as iv
from infprof.measures.host import HostLimits, HostTimelines
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.measures.peers import Peers
from infprof.quantiles import median
from infprof.results import IDLE_CAUSES
from infprof.trace import BoolArray, IntArray, picked

CAUSE = {name: i for i, name in enumerate(IDLE_CAUSES)}

# A *Synchronize call that ended this long before the gap began still ended because the device had drained: the two
# clocks are matched to a few µs only.
SYNC_TOLERANCE_NS = 5_000
# A queued part is explained by another device that is busy for this share of it.
EXPLAINED_SHARE = 0.8
# An operation that starts this soon after its launch, in usual delays of launches to an idle device, was not queued.
USUAL_DELAYS = 1.25


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
    held: BoolArray  # the gap began while the thread of its launch call was held in a synchronising call
    new_kernel: BoolArray  # loading or compiling a kernel made the gap
    explained_ns: IntArray  # part of the dependency during which another device was busy
    peer_ns: IntArray  # part of the host work in which the thread waited for another one that worked
    causes: IntArray

    @classmethod
    def unknown(cls, gaps: Intervals) -> IdleGaps:
        """Gaps of which nothing is known yet, to be filled in. What stays zero takes no memory."""
        count = gaps.count
        return cls(
            gaps.starts,
            gaps.ends,
            np.full(count, -1, dtype=np.int64),
            np.zeros(count, dtype=np.bool_),
            np.zeros(count, dtype=np.bool_),
            np.zeros(count, dtype=np.int64),
            np.zeros(count, dtype=np.int64),
            np.zeros((len(IDLE_CAUSES), count), dtype=np.int64),
        )

    def part(self, piece: slice) -> IdleGaps:
        """Some of the gaps; what is written there is written here."""
        return IdleGaps(
            self.starts[piece],
            self.ends[piece],
            self.operation[piece],
            self.held[piece],
            self.new_kernel[piece],
            self.explained_ns[piece],
            self.peer_ns[piece],
            self.causes[:, piece],
        )

    @property
    def lengths(self) -> IntArray:
        return self.ends - self.starts

    def cause_ns(self, cause: str) -> int:
        return self._totals[CAUSE[cause]]

    @cached_property
    def _totals(self) -> list[int]:
        return [int(spent.sum()) for spent in self.causes]


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
        self._peers = Peers(prepared, self.timelines)
        self._waits: dict[int, Intervals] = {}
        self._pure_waits: dict[int, Intervals] = {}
        self._edges: dict[int, list[IntArray]] = {}
        self._operations: dict[int, tuple[IntArray | None, IntArray]] = {}
        self._delays: dict[int, float] = {}
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
            self._busy[device] = iv.union(picked(ops.start, mine), picked(ops.end, mine))
        return self._busy[device]

    def gaps(self, device: int, scope: Intervals, shortest_ns: int = 0) -> IdleGaps:
        """The idle gaps of a device inside the scope, with the time of each by cause.

        A gap that the scope cuts keeps its ending operation and its history; only its time is cut.
        """
        busy = self.busy(device)
        low, high = int(scope.starts[0]), int(scope.ends[-1])
        whole = iv.complement(busy, min(low, _first(busy, low)), max(high, _last(busy, high)))
        inside = iv.intersect(whole, scope)
        if shortest_ns:
            keep = inside.ends - inside.starts >= shortest_ns
            inside = Intervals(inside.starts[keep], inside.ends[keep])
        gaps = IdleGaps.unknown(inside)
        # In pieces: what is looked up for each then stays in the processor's cache.
        for i in range(0, inside.count, PIECE):
            self._attribute(device, whole, gaps.part(slice(i, i + PIECE)))
        self._move_to_no_demand(gaps.starts, gaps.ends, gaps.causes)
        return gaps

    # --- attribution -----------------------------------------------------------------------------------------------

    def _rows(self, device: int) -> tuple[IntArray | None, IntArray]:
        """The operations of a device, None where that is all of them, and their starts."""
        if device not in self._operations:
            ops = self._prepared.operations
            mine = ops.device == device
            if mine.all():
                self._operations[device] = None, ops.start
            else:
                rows = np.flatnonzero(mine)
                self._operations[device] = rows, ops.start[rows]
        return self._operations[device]

    def _ending(self, device: int, finish: IntArray) -> IntArray:
        """The operation of the device that starts at each of these times, the ends of gaps; -1 where none does.

        Of several operations that start in the same nanosecond, one whose launch is known.
        """
        ops = self._prepared.operations
        mine, starts = self._rows(device)
        if not len(starts):
            return np.full(len(finish), -1, dtype=np.int64)
        position = iv.count_before(starts, finish)
        found = np.minimum(position, len(starts) - 1)
        twin = np.minimum(position + 1, len(starts) - 1)
        if mine is not None:
            found, twin = mine[found], mine[twin]
        found[position == len(starts)] = -1
        unknown = np.flatnonzero((found >= 0) & (ops.launch[found] < 0))
        twin = twin[unknown]
        same = (ops.start[twin] == ops.start[found[unknown]]) & (ops.launch[twin] >= 0)
        found[unknown[same]] = twin[same]
        return found

    def _attribute(self, device: int, whole: Intervals, gaps: IdleGaps) -> None:
        """Fill in what is known of a device's gaps; ``whole``: all of its gaps, uncut, in which these ones lie."""
        prepared = self._prepared
        ops, table, calls = prepared.operations, prepared.trace.api_calls, prepared.thread_calls
        starts, ends = gaps.starts, gaps.ends
        index = iv.count_before(whole.starts, starts + 1) - 1
        origin = whole.starts[index]
        gaps.operation[:] = operation = self._ending(device, whole.ends[index])
        launch = np.where(operation >= 0, ops.launch[operation], -1) if len(ops) else operation
        known = launch >= 0
        known &= ~self._lost_between(device, operation, launch)
        all_known = bool(known.all())
        if not all_known:
            gaps.causes[CAUSE["unknown"]][~known] = (ends - starts)[~known]
        if table is None or calls is None or not known.any():
            return
        rows = calls.outer[picked(launch, known)]
        begun, ended = picked(starts, known), picked(ends, known)
        # Up to its end the launch call was being made, or what the thread did before.
        launched = table["end"][rows]
        split = np.clip(launched, begun, ended)
        queued = ended - split
        late = self._just_in_time(device, launched, begun, ended)
        turn_around = np.where(late, 0, np.minimum(queued, self._limits.kernel_gap_ns))
        queued = np.where(late, 0, queued)
        everywhere: BoolArray | slice = slice(None) if all_known else known
        _put(gaps.causes[CAUSE["kernel-gap"]], everywhere, turn_around)
        _put(gaps.causes[CAUSE["dependency"]], everywhere, queued - turn_around)
        _put(gaps.explained_ns, everywhere, self._explained(device, split + turn_around, ended))
        thread = table["thread"][rows]
        places = np.flatnonzero(known)
        for number in distinct_values(thread).tolist():
            mine = thread == number
            chosen = picked(places, mine)
            gaps.held[chosen] = held = self.held(number, origin[chosen])
            # Where the launch call had ended before the gap began, the host has no part in it.
            until = picked(np.where(late, launched, split), mine)
            since = picked(np.where(late, launched - (ended - begun), begun), mine)
            waited = until > since
            if waited.any():
                chosen, since, until = chosen[waited], since[waited], until[waited]
                self._split_host(number, chosen, since, until, launch[chosen], held[waited], gaps)

    def _move_to_no_demand(self, starts: IntArray, ends: IntArray, causes: IntArray) -> None:
        """Idle time while the engine reports no request, running or waiting, or the last few of a wave: no demand, in place.

        Time in launch, allocator and module calls stays what it is: something was being done.
        """
        if self._prepared.trace.telemetry is None or not len(starts):
            return
        if self._no_requests is None:
            from infprof.measures.serving_telemetry import demand_intervals, ramp_intervals

            low, high = int(starts[0]), int(ends[-1])
            operations = self._prepared.operations
            if len(operations):
                low, high = min(low, int(operations.start.min())), max(high, int(operations.end.max()))
            silent, _ = demand_intervals(self._prepared.trace.telemetry, low, high)
            ramps = ramp_intervals(self._prepared.trace.telemetry, low, high)
            self._no_requests = iv.merge(iv.union(*silent), iv.union(*ramps))
        left = iv.covered(self._no_requests, starts, ends)
        for cause in ("unknown", "host-work", "io", "lock", "sync"):
            moved = np.minimum(left, causes[CAUSE[cause]])
            causes[CAUSE[cause]] -= moved
            causes[CAUSE["no-demand"]] += moved
            left = left - moved

    def _just_in_time(self, device: int, launched: IntArray, starts: IntArray, ends: IntArray) -> BoolArray:
        """Gaps that lie behind the launch call of what ends them, all but a tenth, and end as soon as a launch takes effect.

        A launch takes some microseconds to reach an idle device. An operation that starts no later than that was not
        queued behind the one before it: it came late, and the gap is the host's time just before the launch ended.
        """
        delay = ends - launched
        return (delay >= 0) & (delay <= USUAL_DELAYS * self._usual_delay(device)) & (10 * (launched - starts) <= delay)

    def _usual_delay(self, device: int) -> float:
        """Median time from the end of a launch call to its operation, ns, where the device was idle before; else 0."""
        if device not in self._delays:
            table, calls = self._prepared.trace.api_calls, self._prepared.thread_calls
            assert table is not None and calls is not None
            ops, busy = self._prepared.operations, self.busy(device)
            operation = self._ending(device, busy.starts[1:])
            launch = np.where(operation >= 0, ops.launch[operation], -1)
            known = launch >= 0
            # Beside a lost operation nobody knows whether the device was idle.
            known &= ~self._lost_between(device, operation, launch)
            called = table["end"][calls.outer[launch[known]]]
            delay = busy.starts[1:][known] - called
            late = (called > busy.ends[:-1][known]) & (delay >= 0) & (delay <= self._limits.kernel_gap_ns)
            self._delays[device] = float(median(delay[late])) if late.any() else 0.0
        return self._delays[device]

    def _split_host(
        self,
        thread: int,
        chosen: IntArray,
        starts: IntArray,
        ends: IntArray,
        launch: IntArray,
        is_held: BoolArray,
        gaps: IdleGaps,
    ) -> None:
        """The host part of the chosen gaps, which one thread ended: what it did from ``starts`` to ``ends``, as causes."""
        spent = self.timelines.spent(thread, starts, ends)
        poll_demand, poll_work = self._peers.split_polls(thread, starts, ends, spent[host.POLL])
        lock, lock_demand, lock_work = self._peers.split_locks(thread, starts, ends, spent[host.LOCK])
        paused, pause_demand, pause_work = self._peers.split_pauses(thread, starts, ends, spent[host.PAUSE])
        outside = spent[host.OUTSIDE] + paused
        peer_work = poll_work + lock_work + pause_work
        if self._steady_ns is None:
            loading = spent[host.LONG_CUDA]
        else:
            loading = np.where(starts < self._steady_ns, spent[host.LONG_CUDA], 0)
        module = spent[host.MODULE] + loading
        to_module = np.zeros(len(chosen), dtype=np.int64)
        loaded = np.flatnonzero(module)
        loaded = loaded[np.isin(launch[loaded], self._prepared.first_launches)]
        if len(loaded):
            gaps.new_kernel[chosen[loaded]] = True
            compiled = loaded[self._is_silent(thread, starts[loaded], ends[loaded])]
            to_module[compiled] = outside[compiled]
        rest = outside - to_module
        to_sync = np.where(is_held, rest, 0)
        add = {
            "launch": spent[host.LAUNCH],
            "sync": spent[host.SYNC] + to_sync,
            "allocator": spent[host.ALLOCATOR],
            "module-load": module + to_module,
            "host-work": spent[host.OTHER_CUDA] + spent[host.LONG_CUDA] - loading + rest - to_sync + peer_work,
            "lock": lock,
            "cpu-contention": spent[host.CONTENTION],
            "io": spent[host.IO],
            "no-demand": spent[host.TERMINAL] + poll_demand + lock_demand + pause_demand,
            "profiler": spent[host.PROFILER_TIME],
        }
        _put(gaps.peer_ns, chosen, peer_work)
        for cause, amount in add.items():
            _put(gaps.causes[CAUSE[cause]], chosen, amount)

    def held(self, thread: int, times: IntArray) -> BoolArray:
        """Whether the thread was held at each time: in a *Synchronize call, or in a copy call whose copy had begun."""
        if thread not in self._waits:
            self._waits[thread] = self.timelines.stretches(thread, host.SYNC)
            # Only true waits are stretched: an asynchronous copy call returns about when its copy starts anyway.
            pure = self.timelines.synchronize_calls(thread)
            self._pure_waits[thread] = pure
        low, high = int(times.min()) - SYNC_TOLERANCE_NS, int(times.max())
        waits, pure = (iv.near(found[thread], low, high) for found in (self._waits, self._pure_waits))
        return iv.contains(waits, times) | iv.overlaps(pure, times - SYNC_TOLERANCE_NS, times)

    def _is_silent(self, thread: int, starts: IntArray, ends: IntArray) -> BoolArray:
        """Where nothing says what the thread did beside CUDA: no NVTX range or system call began or ended there.

        A run-time compiler works outside CUDA and hands its result to a module load; in a gap that ends in a kernel's
        first launch the time before the load is then the compiler's.
        """
        if thread not in self._edges:
            self._edges[thread] = []
            for table in (self._prepared.trace.ranges, self._prepared.trace.os_calls):
                if table is not None:
                    mine = table["thread"] == thread
                    self._edges[thread].append(np.sort(np.concatenate([table["start"][mine], table["end"][mine]])))
        silent = np.ones(len(starts), dtype=np.bool_)
        for edges in self._edges[thread]:
            silent &= np.searchsorted(edges, ends, side="left") <= np.searchsorted(edges, starts, side="left")
        return silent

    def workers(self, thread: int) -> Iterator[tuple[int, Intervals]]:
        """Other threads with when they were known to work."""
        return self._peers.workers(thread)

    def locks(self, thread: int) -> Intervals:
        """When the thread waited for a lock or for another thread."""
        return self.timelines.stretches(thread, host.LOCK)

    def _explained(self, device: int, starts: IntArray, ends: IntArray) -> IntArray:
        """The dependency part where another device was busy for most of it; 0 where nothing explains it."""
        out = np.zeros(len(starts), dtype=np.int64)
        length = np.maximum(ends - starts, 0)
        if not (length > 0).any():
            return out
        for other in range(len(self._prepared.trace.devices)):
            if other == device:
                continue
            covered = iv.covered(iv.near(self.busy(other), int(starts.min()), int(ends.max())), starts, ends)
            out = np.where(covered >= EXPLAINED_SHARE * length, length, out)
        return out

    # --- records lost while recording ------------------------------------------------------------------------------

    def _dropped_launch_times(self) -> dict[int, IntArray]:
        """Per process the start times of launches whose operation was recorded without usable times, sorted."""
        trace = self._prepared.trace
        if trace.dropped_launches is None or trace.api_calls is None:
            return {}
        process, correlation = trace.dropped_launches
        rows = self._prepared.launches.find(process, correlation)
        rows = rows[rows >= 0]
        times, owner = trace.api_calls["start"][rows], trace.api_calls["process"][rows]
        return {int(p): np.sort(times[owner == p]) for p in np.unique(owner)}

    def _lost_between(self, device: int, operation: IntArray, launch: IntArray) -> BoolArray:
        """Gaps in which a lost operation may have run: its launch lies between those of the gap's two neighbours."""
        out = np.zeros(len(operation), dtype=np.bool_)
        table = self._prepared.trace.api_calls
        ops = self._prepared.operations
        # Every operation may be among the lost ones: then there is none to end a gap.
        if not self._dropped or table is None or not len(ops):
            return out
        previous = self._previous_launch(device, operation)
        for process, times in self._dropped.items():
            mine = (operation >= 0) & (launch >= 0) & (ops.process[operation] == process)
            here = np.flatnonzero(mine)
            until = table["start"][launch[here]]
            since = np.where(previous[here] >= 0, table["start"][np.maximum(previous[here], 0)], until)
            out[here] = np.searchsorted(times, until, "left") > np.searchsorted(times, since, "right")
        return out

    def _previous_launch(self, device: int, operation: IntArray) -> IntArray:
        """The launch of the operation before, on the same device; -1 if unknown."""
        ops = self._prepared.operations
        mine, starts = self._rows(device)
        if not len(starts):
            return np.full(len(operation), -1, dtype=np.int64)
        position = (operation if mine is None else np.searchsorted(mine, operation)) - 1
        before = np.maximum(position, 0)
        found = ops.launch[before if mine is None else mine[before]]
        return np.where((operation >= 0) & (position >= 0), found, -1)


def _put(column: IntArray, at: IntArray | BoolArray | slice, values: IntArray) -> None:
    """Write the values into a column of zeros; what stays untouched takes no memory."""
    if values.any():
        column[at] = values


def _first(busy: Intervals, default: int) -> int:
    return int(busy.starts[0]) if len(busy.starts) else default


def _last(busy: Intervals, default: int) -> int:
    return int(busy.ends[-1]) if len(busy.ends) else default
