"""What a host thread did at any time: one label per stretch, from its CUDA calls, system calls and overhead rows."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infprof.distinct import distinct_values
from infprof.measures import calls
from infprof.measures import intervals as iv
from infprof.measures.host_calls import retry_windows
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.quantiles import median
from infprof.trace import MODULE_LOAD, PROFILER, IntArray, constant, picked

# Labels of a stretch of a thread's time. OUTSIDE = in no recorded call: the program's own code. LONG_CUDA = another CUDA
# call long enough to be loading, if it is part of start-up. CONTENTION = in the program's own code and on no CPU.
(
    OUTSIDE,
    LAUNCH,
    SYNC,
    ALLOCATOR,
    MODULE,
    OTHER_CUDA,
    LOCK,
    IO,
    POLL,
    TERMINAL,
    PROFILER_TIME,
    LONG_CUDA,
    CONTENTION,
    PAUSE,
) = range(14)
LABELS = 14

_OF_CUDA = {
    calls.LAUNCH: LAUNCH,
    calls.SYNC: SYNC,
    calls.COPY: LAUNCH,
    calls.ALLOCATOR: ALLOCATOR,
    calls.MODULE: MODULE,
    calls.OTHER_CUDA: OTHER_CUDA,
}
_OF_OS = {
    calls.LOCK: LOCK,
    calls.IO: IO,
    calls.POLL: POLL,
    calls.TERMINAL: TERMINAL,
    calls.PAUSE: PAUSE,
    calls.OTHER_OS: OUTSIDE,
}

# Ranges whose names say that something is being compiled or tuned ("Torch-Compiled Region" runs compiled code).
COMPILE_RANGE = re.compile(r"nvrtc|compil(?!ed)|autotun|auto_tun|\bjit\b", re.IGNORECASE)

Labels = NDArray[np.int8]

# A loop that polls returns to its next poll within this time when there was nothing to do, or within the shorter one
# where it also tries to read.
POLL_LOOP_NS, READ_LOOP_NS = 1_000_000, 250_000


# Intervals that meet more stretches of a timeline than this are added up one by one.
LONG = 16_384
# So many stretches are worked on at once: they stay in the processor's cache.
PIECE = 4 * LONG


# Starts, ends and labels of stretches from one source.
_Layer = tuple[IntArray, IntArray, Labels]


class HostLimits(NamedTuple):
    """Thresholds of the labels (from rules/thresholds.yaml), ns."""

    first_launch_factor: float
    startup_stall_ns: int
    stdin_read_ns: int


class _Timeline(NamedTuple):
    """The stretches in which the thread was not OUTSIDE, in order; they do not overlap."""

    starts: IntArray
    ends: IntArray
    labels: Labels
    present: list[int]  # the labels that occur


class HostTimelines:
    """Timelines of threads, built when first asked for."""

    def __init__(self, prepared: Prepared, limits: HostLimits) -> None:
        self._prepared = prepared
        self._limits = limits
        self._timelines: dict[int, _Timeline] = {}
        self._retry_windows: Intervals | None = None
        self._compile_names: IntArray | None = None
        self._stalls = self._first_launch_stalls()
        os_table = prepared.trace.os_calls
        self._os_kinds = calls.os_kinds(prepared.trace.strings) if os_table is not None else np.empty(0, dtype=np.int64)
        self._reads = calls.matching(prepared.trace.strings if os_table is not None else (), r"^(p?readv?2?|recv\w*)$")
        self._os_calls = calls.ThreadCalls(os_table) if os_table is not None else None

    def spent(self, thread: int, starts: IntArray, ends: IntArray) -> list[IntArray]:
        """Time per label in each interval of a thread, ns: one array per label, which add up to the lengths."""
        line = self._timeline(thread)
        nothing = constant(0, len(starts))
        present = line.present
        if not present or not len(starts):
            return [ends - starts if label == OUTSIDE else nothing for label in range(LABELS)]
        # Only what lies near the intervals is looked at.
        first = int(line.ends.searchsorted(starts.min(), side="right"))
        stop = max(int(line.starts.searchsorted(ends.max(), side="left")), first)
        line_starts, line_ends, labels = (column[first:stop] for column in line[:3])
        place = np.zeros(LABELS, dtype=np.int64)
        place[present] = np.arange(len(present))
        out = np.zeros((len(present), len(starts)), dtype=np.int64)
        # The stretches that each interval meets: all but the first and the last one lie inside it.
        low = line_ends.searchsorted(starts, side="right")
        high = np.maximum(line_starts.searchsorted(ends, side="left"), low)
        counts = high - low
        # Sums of float64 are exact below 2**53 ns, which is 104 days.
        for i in np.flatnonzero(counts > LONG).tolist():
            for j in range(int(low[i]), int(high[i]), PIECE):
                met = slice(j, min(j + PIECE, int(high[i])))
                inside = np.minimum(line_ends[met], ends[i]) - np.maximum(line_starts[met], starts[i])
                out[:, i] += np.bincount(labels[met], inside.astype(np.float64), LABELS)[present].astype(np.int64)
        short = np.flatnonzero((counts > 0) & (counts <= LONG))
        piece = np.cumsum(counts[short]) // PIECE
        for chosen in np.split(short, np.flatnonzero(np.diff(piece)) + 1):
            if not len(chosen):
                continue
            # Neighbours are sliced, which does not copy.
            neighbours = int(chosen[-1]) - int(chosen[0]) + 1 == len(chosen)
            at = slice(int(chosen[0]), int(chosen[-1]) + 1) if neighbours else chosen
            mine, stretch = iv.expand(low[at], high[at])
            spent = np.minimum(ends[at][mine], line_ends[stretch])
            spent -= np.maximum(starts[at][mine], line_starts[stretch])
            mine += place[labels[stretch]] * len(chosen)
            sums = np.bincount(mine, np.maximum(spent, 0).astype(np.float64), len(present) * len(chosen))
            out[:, at] = sums.reshape(len(present), len(chosen))
        outside = ends - starts
        for row in out:
            outside -= row
        by_label = {OUTSIDE: outside, **dict(zip(present, out, strict=True))}
        return [by_label.get(label, nothing) for label in range(LABELS)]

    def stretches(self, thread: int, *labels: int) -> Intervals:
        """The thread's stretches with one of the labels, which OUTSIDE is not."""
        line = self._timeline(thread)
        wanted = np.zeros(LABELS, dtype=np.bool_)
        wanted[list(labels)] = True
        mine = np.flatnonzero(wanted.take(line.labels))
        return iv.union(line.starts[mine], line.ends[mine])

    def synchronize_calls(self, thread: int) -> Intervals:
        """The thread's calls that only wait (cudaStreamSynchronize and the like)."""
        prepared = self._prepared
        table = prepared.trace.api_calls
        if table is None or prepared.thread_calls is None or thread not in prepared.thread_calls.rows:
            return iv.empty()
        is_sync = prepared.api_kinds == calls.SYNC
        rows = prepared.thread_calls.rows[thread]
        rows = rows[np.flatnonzero(is_sync.take(prepared.thread_calls.column(thread, "name")))]
        return iv.union(table["start"][rows], table["end"][rows])

    # --- building --------------------------------------------------------------------------------------------------

    def _first_launch_stalls(self) -> IntArray:
        """First launch of a kernel name that lasted over ``first_launch_factor`` times the median launch."""
        table, first = self._prepared.trace.api_calls, self._prepared.first_launches
        if table is None or not len(first):
            return first
        ops = self._prepared.operations
        launch = picked(ops.launch, (ops.kind == 0) & (ops.launch >= 0))
        usual = median(table["end"][launch] - table["start"][launch])
        length = table["end"][first] - table["start"][first]
        slow: IntArray = first[length > max(self._limits.first_launch_factor * usual, 1)]
        return slow

    def _timeline(self, thread: int) -> _Timeline:
        line = self._timelines.get(thread)
        if line is None:
            line = self._timelines[thread] = self._build(thread)
        return line

    def _build(self, thread: int) -> _Timeline:
        layers = [
            layer
            for layer in (
                self._overhead_layer(thread),
                self._capture_layer(thread),
                self._api_layer(thread),
                self._os_layer(thread),
                self._compile_layer(thread),
                self._off_cpu_layer(thread),
            )
            if len(layer[0])
        ]
        if not layers:
            return _Timeline(*_nothing(), [])
        if len(layers) == 1:
            starts, ends, out = layers[0]
        else:
            # A stable sort merges runs that are in order; np.unique would hash millions of different times.
            edges = np.concatenate([edge for starts, ends, _ in layers for edge in (starts, ends)])
            edges.sort(kind="stable")
            bounds = edges[np.append(True, edges[1:] != edges[:-1])]
            out = np.full(len(bounds), OUTSIDE, dtype=np.int8)
            # Lowest priority first: each layer paints over what lies below it.
            for starts, ends, labels in reversed(layers):
                index = np.searchsorted(starts, bounds, side="right") - 1
                inside = (index >= 0) & (bounds < ends[np.maximum(index, 0)])
                painted = labels[np.maximum(index, 0)]
                # A plain system call (OUTSIDE) hides nothing that is already named.
                inside &= painted != OUTSIDE
                out[inside] = painted[inside]
            # Nothing begins at the last bound.
            starts, ends, out = bounds[:-1], bounds[1:], out[:-1]
        named = out != OUTSIDE
        starts, ends, out = (picked(column, named) for column in (starts, ends, out))
        counts = np.bincount(out, minlength=LABELS)
        return _Timeline(starts, ends, out, np.flatnonzero(counts).tolist())

    def _overhead_layer(self, thread: int) -> _Layer:
        """Overhead of this thread or of none. Module loading and JIT are the program's cost, not the profiler's."""
        table = self._prepared.trace.overheads
        if table is None:
            return _nothing()
        mine = (table["thread"] == thread) | (table["thread"] < 0)
        profiler = mine & (table["kind"] == PROFILER)
        loading = mine & (table["kind"] == MODULE_LOAD)
        own = iv.union(table["start"][profiler], table["end"][profiler])
        modules = iv.subtract(iv.union(table["start"][loading], table["end"][loading]), own)
        starts = np.concatenate([own.starts, modules.starts])
        ends = np.concatenate([own.ends, modules.ends])
        labels = np.repeat(np.array([PROFILER_TIME, MODULE], dtype=np.int8), (own.count, modules.count))
        order = np.argsort(starts, kind="stable")
        return starts[order], ends[order], labels[order]

    def _capture_layer(self, thread: int) -> _Layer:
        """Captures of graphs, from begin to end: what is launched there does not run, so it is preparation."""
        table, strings = self._prepared.trace.api_calls, self._prepared.trace.strings
        if table is None:
            return _nothing()
        edges = []
        for edge, column in (("Begin", "start"), ("End", "end")):
            named = calls.matching(strings, f"Stream{edge}Capture")
            mine = named[table["name"]] & (table["thread"] == thread) if named.any() else np.empty(0, dtype=np.int64)
            edges.append(np.sort(table[column][mine]))
        count = min(map(len, edges))
        found = iv.union(edges[0][:count], edges[1][:count]) if count else iv.empty()
        long = found.ends - found.starts > self._limits.startup_stall_ns
        return found.starts[long], found.ends[long], np.full(int(long.sum()), LONG_CUDA, dtype=np.int8)

    def _retries(self) -> Intervals:
        if self._retry_windows is None:
            self._retry_windows = iv.union(*retry_windows(self._prepared))
        return self._retry_windows

    def _api_layer(self, thread: int) -> _Layer:
        prepared = self._prepared
        table = prepared.trace.api_calls
        if table is None or prepared.thread_calls is None or thread not in prepared.thread_calls.rows:
            return _nothing()
        nested = prepared.thread_calls
        starts, ends = nested.times(thread)
        kinds = prepared.api_kinds.astype(np.int8).take(nested.column(thread, "name"))
        labels = np.array([_OF_CUDA[k] for k in range(6)], dtype=np.int8).take(kinds)
        if len(self._stalls):
            stalled = np.zeros(len(table), dtype=np.bool_)
            stalled[self._stalls] = True
            labels[nested.of_rows(thread, stalled)] = MODULE
        if prepared.blocked_copies.any():
            labels[nested.of_rows(thread, prepared.blocked_copies)] = SYNC
        others = np.flatnonzero(kinds == calls.OTHER_CUDA)
        labels[others[ends[others] - starts[others] > self._limits.startup_stall_ns]] = LONG_CUDA
        # Waiting for the device and freeing inside an allocation retry is the allocator's doing.
        retries = self._retries()
        if retries.count:
            labels[(kinds != calls.LAUNCH) & (kinds != calls.COPY) & iv.contains(retries, starts)] = ALLOCATOR
        # A copy call waits from the moment its own copy starts.
        copies = np.flatnonzero(kinds == calls.COPY)
        own = self._first_operation_starts(nested.rows[thread][copies])
        labels[copies[(own < ends[copies]) & (own <= starts[copies])]] = SYNC
        inside = (own < ends[copies]) & (own > starts[copies])
        if inside.any():
            cut, own = copies[inside], own[inside]
            behind = cut + 1
            starts, labels = np.insert(starts, behind, own), np.insert(labels, behind, SYNC)
            cut_ends = ends[cut]
            ends = ends.copy()
            ends[cut] = own
            ends = np.insert(ends, behind, cut_ends)
        return _without_empty(starts, ends, labels)

    def _first_operation_starts(self, rows: IntArray) -> IntArray:
        """The start of the first operation that each of these API rows launched; the largest int64 if it has none."""
        first = self._prepared.first_operations[rows]
        starts = self._prepared.operations.start
        if not len(starts):
            return np.full(len(rows), np.iinfo(np.int64).max, dtype=np.int64)
        return np.asarray(np.where(first >= 0, starts[first], np.iinfo(np.int64).max), dtype=np.int64)

    def _os_layer(self, thread: int) -> _Layer:
        table = self._prepared.trace.os_calls
        if table is None or self._os_calls is None or thread not in self._os_calls.rows:
            return _nothing()
        rows = self._os_calls.rows[thread]
        starts, ends = (np.array(edge) for edge in self._os_calls.times(thread))
        kinds = self._os_kinds[table["name"][rows]]
        labels = np.array([_OF_OS[k] for k in range(len(_OF_OS))], dtype=np.int8)[kinds]
        self._bridge_polls(thread, starts, ends, labels)
        # Without a descriptor a short stdio read is a file, a long one is a person.
        labels[(kinds == calls.TERMINAL) & (ends - starts <= self._limits.stdin_read_ns)] = IO
        return _without_empty(starts, ends, labels)

    def _off_cpu_layer(self, thread: int) -> _Layer:
        """When the thread was on no CPU and in no system call: ready to run, and not run.

        Without system calls it may as well have been asleep in one.
        """
        away, called = self._prepared.trace.off_cpu, self._prepared.trace.os_calls
        if away is None or called is None or not len(away):
            return _nothing()
        mine, asleep = away["thread"] == thread, called["thread"] == thread
        ready = iv.subtract(
            iv.union(away["start"][mine], away["end"][mine]), iv.union(called["start"][asleep], called["end"][asleep])
        )
        return ready.starts, ready.ends, np.full(ready.count, CONTENTION, dtype=np.int8)

    def _bridge_polls(self, thread: int, starts: IntArray, ends: IntArray, labels: Labels) -> None:
        """Let a poll (or pause) last to the next one, in place: the loop's own bookkeeping is waiting, too.

        Only across short stretches without any other call but reads that found nothing: a CUDA call in between means
        that there was work, and so does a write.
        """
        table = self._prepared.trace.os_calls
        waits = np.flatnonzero((labels == POLL) | (labels == PAUSE))
        if len(waits) < 2 or table is None or self._os_calls is None:
            return
        before, after = waits[:-1], waits[1:]
        reads = self._reads[table["name"][self._os_calls.rows[thread]]]
        read_until = np.concatenate([[0], np.cumsum(reads)])
        between = after - before - 1
        near = (labels[before] == labels[after]) & (read_until[after] - read_until[before + 1] == between)
        near &= starts[after] - ends[before] <= np.where(between == 0, POLL_LOOP_NS, READ_LOOP_NS)
        api, nested = self._prepared.trace.api_calls, self._prepared.thread_calls
        if api is not None and nested is not None and thread in nested.rows:
            called = api["start"][nested.rows[thread]]
            near &= np.searchsorted(called, starts[after]) == np.searchsorted(called, ends[before])
        low, high = before[near], after[near]
        owner, bridged = iv.expand(low, high)
        labels[bridged] = labels[low][owner]
        ends[bridged] = starts[bridged + 1]

    def _compile_layer(self, thread: int) -> _Layer:
        table = self._prepared.trace.ranges
        if table is None:
            return _nothing()
        if self._compile_names is None:
            strings = self._prepared.trace.strings
            used = distinct_values(table["text"])
            self._compile_names = np.array(
                [i for i in used.tolist() if i >= 0 and COMPILE_RANGE.search(strings[i])], dtype=np.int64
            )
        if not len(self._compile_names):
            return _nothing()
        mine = (table["thread"] == thread) & np.isin(table["text"], self._compile_names)
        ranges = iv.union(table["start"][mine], table["end"][mine])
        return ranges.starts, ranges.ends, np.full(ranges.count, MODULE, dtype=np.int8)


def _without_empty(starts: IntArray, ends: IntArray, labels: Labels) -> _Layer:
    keep = ends > starts
    return picked(starts, keep), picked(ends, keep), picked(labels, keep)


def _nothing() -> _Layer:
    none = np.empty(0, dtype=np.int64)
    return none, none, np.empty(0, dtype=np.int8)
