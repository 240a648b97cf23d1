"""What a host thread did at any time: one label per stretch, from its CUDA calls, system calls and overhead rows."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infprof.distinct import distinct_values, first_of_each
from infprof.measures import calls
from infprof.measures import intervals as iv
from infprof.measures.host_calls import retry_windows
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.trace import MODULE_LOAD, PROFILER, IntArray, constant

# Labels of a stretch of a thread's time. OUTSIDE = in no recorded call: the program's own code. LONG_CUDA = another CUDA
# call long enough to be loading, if it is part of start-up.
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
) = range(12)
LABELS = 12

_OF_CUDA = {
    calls.LAUNCH: LAUNCH,
    calls.SYNC: SYNC,
    calls.COPY: LAUNCH,
    calls.ALLOCATOR: ALLOCATOR,
    calls.MODULE: MODULE,
    calls.OTHER_CUDA: OTHER_CUDA,
}
_OF_OS = {calls.LOCK: LOCK, calls.IO: IO, calls.POLL: POLL, calls.TERMINAL: TERMINAL, calls.OTHER_OS: OUTSIDE}

# Ranges whose names say that something is being compiled or tuned ("Torch-Compiled Region" runs compiled code).
COMPILE_RANGE = re.compile(r"nvrtc|compil(?!ed)|autotun|auto_tun|\bjit\b", re.IGNORECASE)


# A loop that polls returns to its next poll within this time when there was nothing to do.
POLL_LOOP_NS = 1_000_000


# Intervals that meet more stretches of a timeline than this are added up one by one.
LONG = 16_384


class HostLimits(NamedTuple):
    """Thresholds of the labels (from rules/thresholds.yaml), ns."""

    first_launch_factor: float
    startup_stall_ns: int
    stdin_read_ns: int


class _Timeline(NamedTuple):
    """Labels between consecutive bounds; before the first and after the last bound the thread was OUTSIDE."""

    bounds: IntArray
    labels: NDArray[np.int8]  # one per bound: from this bound to the next


class HostTimelines:
    """Timelines of threads, built when first asked for."""

    def __init__(self, prepared: Prepared, limits: HostLimits) -> None:
        self._prepared = prepared
        self._limits = limits
        self._timelines: dict[int, _Timeline] = {}
        self._retry_windows: Intervals | None = None
        self._compile_names: IntArray | None = None
        self._first_start = self._first_operation_starts()
        self._stalls = self._first_launch_stalls()
        os_table = prepared.trace.os_calls
        self._os_kinds = calls.os_kinds(prepared.trace.strings) if os_table is not None else np.empty(0, dtype=np.int64)
        self._os_calls = calls.ThreadCalls(os_table) if os_table is not None else None

    def spent(self, thread: int, starts: IntArray, ends: IntArray) -> list[IntArray]:
        """Time per label in each interval of a thread, ns: one array per label, which add up to the lengths."""
        line = self._timeline(thread)
        nothing = constant(0, len(starts))
        present = [label for label in np.unique(line.labels).tolist() if label != OUTSIDE]
        if len(line.bounds) < 2 or not present:
            return [ends - starts if label == OUTSIDE else nothing for label in range(LABELS)]
        place = np.full(LABELS, len(present), dtype=np.int64)
        place[present] = np.arange(len(present))
        # One row more takes the time outside.
        rows = len(present) + 1
        out = np.zeros((rows, len(starts)), dtype=np.int64)
        # The stretches that each interval meets: all but the first and the last one lie inside it.
        last = len(line.bounds) - 1
        low = np.maximum(np.searchsorted(line.bounds, starts, side="right") - 1, 0)
        high = np.maximum(np.minimum(np.searchsorted(line.bounds, ends, side="left"), last), low)
        counts = high - low
        for i in np.flatnonzero(counts > LONG).tolist():
            edges = np.clip(line.bounds[low[i] : high[i] + 1], starts[i], ends[i])
            # Sums of float64 are exact below 2**53 ns, which is 104 days.
            by_label = np.bincount(line.labels[low[i] : high[i]], np.diff(edges).astype(np.float64), LABELS)
            out[:-1, i] = by_label[present]
        short = np.flatnonzero((counts > 0) & (counts <= LONG))
        # In pieces that stay in the processor's cache.
        piece = np.cumsum(counts[short]) // (4 * LONG)
        for chosen in np.split(short, np.flatnonzero(np.diff(piece)) + 1):
            if not len(chosen):
                continue
            # Neighbours are sliced, which does not copy.
            neighbours = int(chosen[-1]) - int(chosen[0]) + 1 == len(chosen)
            at = slice(int(chosen[0]), int(chosen[-1]) + 1) if neighbours else chosen
            mine, stretch = iv.expand(low[at], high[at])
            spent = np.minimum(ends[at][mine], line.bounds[stretch + 1])
            spent -= np.maximum(starts[at][mine], line.bounds[stretch])
            key = place[line.labels[stretch]] * len(chosen) + mine
            sums = np.bincount(key, np.maximum(spent, 0).astype(np.float64), rows * len(chosen))
            out[:, at] = sums.reshape(rows, len(chosen))
        outside = out[-1]
        np.subtract(ends, starts, out=outside)
        for row in out[:-1]:
            outside -= row
        by_place = dict(zip([*present, OUTSIDE], out, strict=True))
        return [by_place.get(label, nothing) for label in range(LABELS)]

    def stretches(self, thread: int, *labels: int) -> Intervals:
        """The thread's stretches with one of the labels."""
        line = self._timeline(thread)
        if len(line.bounds) < 2:
            return iv.empty()
        mine = np.isin(line.labels[:-1], labels)
        return iv.union(line.bounds[:-1][mine], line.bounds[1:][mine])

    def synchronize_calls(self, thread: int) -> Intervals:
        """The thread's calls that only wait (cudaStreamSynchronize and the like)."""
        prepared = self._prepared
        table = prepared.trace.api_calls
        if table is None or prepared.thread_calls is None or thread not in prepared.thread_calls.rows:
            return iv.empty()
        rows = prepared.thread_calls.rows[thread]
        rows = rows[prepared.api_kinds[table["name"][rows]] == calls.SYNC]
        return iv.union(table["start"][rows], table["end"][rows])

    # --- building --------------------------------------------------------------------------------------------------

    def _first_operation_starts(self) -> IntArray:
        """Per API row the start of the first operation it launched; the largest int64 where it launched none."""
        table = self._prepared.trace.api_calls
        first = np.full(0 if table is None else len(table), np.iinfo(np.int64).max, dtype=np.int64)
        ops = self._prepared.operations
        known = ops.launch >= 0
        # Operations are sorted by start: written backwards, the first one stays.
        rows, starts = ops.launch[known][::-1], ops.start[known][::-1]
        first[rows] = starts
        return first

    def _first_launch_stalls(self) -> IntArray:
        """First launch of a kernel name that lasted over ``first_launch_factor`` times the median launch."""
        prepared = self._prepared
        table, kernels = prepared.trace.api_calls, prepared.trace.kernels
        ops = prepared.operations
        if table is None or kernels is None:
            return np.empty(0, dtype=np.int64)
        mine = (ops.kind == 0) & (ops.launch >= 0)
        if not mine.any():
            return np.empty(0, dtype=np.int64)
        launch, name = ops.launch[mine], kernels["name"][ops.row[mine]]
        order = np.argsort(table["start"][launch], kind="stable")
        launch, name = launch[order], name[order]
        length = table["end"][launch] - table["start"][launch]
        median = float(np.median(length))
        _, first = first_of_each(name)
        slow = length[first] > max(self._limits.first_launch_factor * median, 1)
        return np.unique(launch[first[slow]])

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
                self._api_layer(thread),
                self._os_layer(thread),
                self._compile_layer(thread),
            )
            if len(layer[0])
        ]
        if not layers:
            return _Timeline(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int8))
        if len(layers) == 1:
            starts, ends, labels = layers[0]
            bounds = np.empty(2 * len(starts), dtype=np.int64)
            bounds[0::2], bounds[1::2] = starts, ends
            out = np.full(len(bounds), OUTSIDE, dtype=np.int8)
            out[0::2] = labels
            return _Timeline(bounds, out)
        bounds = np.unique(np.concatenate([edge for starts, ends, _ in layers for edge in (starts, ends)]))
        out = np.full(len(bounds), OUTSIDE, dtype=np.int8)
        # Lowest priority first: each layer paints over what lies below it.
        for starts, ends, labels in reversed(layers):
            index = np.searchsorted(starts, bounds, side="right") - 1
            inside = (index >= 0) & (bounds < ends[np.maximum(index, 0)])
            painted = labels[np.maximum(index, 0)]
            # A plain system call (OUTSIDE) hides nothing that is already named.
            inside &= painted != OUTSIDE
            out[inside] = painted[inside]
        return _Timeline(bounds, out)

    def _overhead_layer(self, thread: int) -> tuple[IntArray, IntArray, IntArray]:
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
        labels = np.concatenate([np.full(own.count, PROFILER_TIME), np.full(modules.count, MODULE)])
        order = np.argsort(starts, kind="stable")
        return starts[order], ends[order], labels[order]

    def _retries(self) -> Intervals:
        if self._retry_windows is None:
            self._retry_windows = iv.union(*retry_windows(self._prepared))
        return self._retry_windows

    def _api_layer(self, thread: int) -> tuple[IntArray, IntArray, IntArray]:
        prepared = self._prepared
        table = prepared.trace.api_calls
        if table is None or prepared.thread_calls is None or thread not in prepared.thread_calls.rows:
            return _nothing()
        rows = prepared.thread_calls.rows[thread]
        starts, ends = prepared.thread_calls.times(thread)
        kinds = prepared.api_kinds[table["name"][rows]]
        labels = np.array([_OF_CUDA[k] for k in range(6)], dtype=np.int64)[kinds]
        labels[np.isin(rows, self._stalls)] = MODULE
        labels[(kinds == calls.OTHER_CUDA) & (ends - starts > self._limits.startup_stall_ns)] = LONG_CUDA
        # Waiting for the device and freeing inside an allocation retry is the allocator's doing.
        retries = self._retries()
        labels[(kinds != calls.LAUNCH) & (kinds != calls.COPY) & iv.contains(retries, starts)] = ALLOCATOR
        # A copy call waits from the moment its own copy starts.
        own = self._first_start[rows]
        split = (kinds == calls.COPY) & (own < ends)
        labels[split & (own <= starts)] = SYNC
        inside = split & (own > starts)
        if inside.any():
            cut_starts, cut_ends = own[inside], ends[inside]
            ends = np.where(inside, own, ends)
            starts = np.concatenate([starts, cut_starts])
            ends = np.concatenate([ends, cut_ends])
            labels = np.concatenate([labels, np.full(len(cut_starts), SYNC)])
            order = np.argsort(starts, kind="stable")
            starts, ends, labels = starts[order], ends[order], labels[order]
        keep = ends > starts
        return (starts, ends, labels) if keep.all() else (starts[keep], ends[keep], labels[keep])

    def _os_layer(self, thread: int) -> tuple[IntArray, IntArray, IntArray]:
        table = self._prepared.trace.os_calls
        if table is None or self._os_calls is None or thread not in self._os_calls.rows:
            return _nothing()
        rows = self._os_calls.rows[thread]
        starts, ends = self._os_calls.times(thread)
        kinds = self._os_kinds[table["name"][rows]]
        labels = np.array([_OF_OS[k] for k in range(5)], dtype=np.int64)[kinds]
        ends = self._bridge_polls(thread, starts, ends, kinds)
        # Without a descriptor a short stdio read is a file, a long one is a person.
        labels[(kinds == calls.TERMINAL) & (ends - starts <= self._limits.stdin_read_ns)] = IO
        keep = ends > starts
        return starts[keep], ends[keep], labels[keep]

    def _bridge_polls(self, thread: int, starts: IntArray, ends: IntArray, kinds: IntArray) -> IntArray:
        """Ends of system calls, where a poll lasts to the next one: the loop's own bookkeeping is waiting, too.

        Only across short stretches without any other call: a CUDA call in between means that there was work.
        """
        if len(starts) < 2:
            return ends
        near = (kinds[:-1] == calls.POLL) & (kinds[1:] == calls.POLL) & (starts[1:] - ends[:-1] <= POLL_LOOP_NS)
        table, nested = self._prepared.trace.api_calls, self._prepared.thread_calls
        if table is not None and nested is not None and thread in nested.rows:
            called = table["start"][nested.rows[thread]]
            near &= np.searchsorted(called, starts[1:]) == np.searchsorted(called, ends[:-1])
        return np.append(np.where(near, starts[1:], ends[:-1]), ends[-1])

    def _compile_layer(self, thread: int) -> tuple[IntArray, IntArray, IntArray]:
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
        return ranges.starts, ranges.ends, np.full(ranges.count, MODULE, dtype=np.int64)


def _nothing() -> tuple[IntArray, IntArray, IntArray]:
    none = np.empty(0, dtype=np.int64)
    return none, none, none
