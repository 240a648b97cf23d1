"""A trace as it would have been: the recorded tables with the times of a replay, for the analysis to judge.

Operations and CUDA calls get their new times. Whatever else a thread did moves with the calls around it, and what belongs
to no such thread (counters, memory) with the operations of the GPU.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from infprof.measures import operations as op
from infprof.measures.operations import Prepared
from infprof.replay.engine import Replayed
from infprof.replay.recording import Recording
from infprof.trace import SCHEMA, BoolArray, FloatArray, IntArray, Table, Trace

_TABLES = {op.KERNEL: "kernels", op.GRAPH: "graphs", op.COPY: "copies", op.MEMSET: "memsets"}
_OF_THREADS = ("api_calls", "ranges", "os_calls", "off_cpu", "overheads")


def retimed(recording: Recording, replayed: Replayed, rows: IntArray | None = None) -> Trace:
    """The trace with the times of a replay; ``rows`` (of Prepared.operations): only these operations, and what their
    threads did meanwhile. Telemetry stays out: it is of the run as it was."""
    trace, origin, ops = recording.prepared.trace, recording.origin_ns, recording.prepared.operations
    rows = np.arange(len(ops)) if rows is None else rows
    changed: dict[str, Table | None] = {}
    starts, ends = replayed.start[rows] + origin, replayed.end[rows] + origin
    for kind, name in _TABLES.items():
        table = getattr(trace, name)
        if table is not None:
            mine = np.flatnonzero(ops.kind[rows] == kind)
            changed[name] = _timed(table.take(ops.row[rows[mine]]), start=starts[mine], end=ends[mine])
    everywhere = _Map(np.concatenate([ops.start[rows], ops.end[rows]]), np.concatenate([starts, ends]))
    kernels = np.flatnonzero(ops.kind[rows] == op.KERNEL)
    recorded = int((ops.end - ops.start)[rows[kernels]].sum())
    speed = int((ends - starts)[kernels].sum()) / max(recorded, 1)
    low, high = _host_times(recording.prepared, rows)
    threads = _thread_maps(recording, replayed, low, high)
    for name in _OF_THREADS:
        table = getattr(trace, name)
        if table is not None and len(table):
            changed[name] = _moved_with_threads(_between(table, low, high), threads, everywhere)
    for name in ("syncs", "collectives", "named_launches", "counters", "memory_events"):
        table = getattr(trace, name)
        if table is not None and len(table):
            times = [c for c in ("start", "end", "time") if c in table.columns]
            part = _between(table, low, high)
            if name == "counters":
                part = part.take(_still_true(part["time"], everywhere, speed))
            changed[name] = _timed(part, **{c: everywhere(part[c]) for c in times})
    # Calls that take no time any more all lie at once: which operator each was made in cannot be told then.
    gone = {"operators": None, "telemetry": None, "telemetry_window": None, "load": None}
    return replace(trace, problems=[], **gone, **changed)  # type: ignore[arg-type]


def excerpt(prepared: Prepared, rows: IntArray) -> Trace:
    """The trace of these operations (rows of ``operations``) alone, with what their threads did meanwhile."""
    trace, ops = prepared.trace, prepared.operations
    changed: dict[str, Table | None] = {}
    for kind, name in _TABLES.items():
        table = getattr(trace, name)
        if table is not None:
            changed[name] = table.take(ops.row[rows[ops.kind[rows] == kind]]).sorted_by("start")
    low, high = _host_times(prepared, rows)
    for name in SCHEMA:
        table = getattr(trace, name)
        if name not in changed and table is not None and len(table):
            changed[name] = _between(table, low, high)
    return replace(trace, problems=[], telemetry=None, telemetry_window=None, load=None, **changed)  # type: ignore[arg-type]


def _still_true(times: IntArray, move: _Map, speed: float) -> BoolArray:
    """Which samples of counters are of time that is there as before; ``speed``: new time of kernels per old time.

    A sample is a mean over the time since the one before it: where part of that is gone, it is diluted by what was idle.
    """
    moments = np.unique(times)
    if len(moments) < 2:
        return np.zeros(len(times), dtype=np.bool_)
    period = int(np.median(np.diff(moments)))
    left = (move(times) - move(times - period)) / max(period, 1)
    return np.asarray(left >= 0.9 * speed)


def _between(table: Table, low: int, high: int) -> Table:
    times = [c for c in ("start", "end", "time") if c in table.columns]
    return table.take((table[times[-1]] >= low) & (table[times[0]] <= high))


def _host_times(prepared: Prepared, rows: IntArray) -> tuple[int, int]:
    """From the first launch of these operations, or their first start, to their last end."""
    ops, table = prepared.operations, prepared.trace.api_calls
    if not len(rows):
        return 0, 0
    low, high = int(ops.start[rows].min()), int(ops.end[rows].max())
    launch = np.asarray(ops.launch)[rows]
    launch = launch[launch >= 0]
    if table is not None and len(launch):
        low = min(low, int(table["start"][launch].min()))
    return low, high


def _timed(table: Table, **columns: IntArray) -> Table:
    """The table with other times, in the order of the first of them."""
    return table.replaced(**columns).sorted_by(next(iter(columns)))


class _Map:
    """Old times to new ones: along lines between points that are known, and at their distance beyond the outermost."""

    def __init__(self, old: IntArray, new: IntArray) -> None:
        order = np.argsort(old, kind="stable")
        old, new = old[order], np.maximum.accumulate(new[order])
        keep = np.append(old[1:] != old[:-1], True) if len(old) else np.empty(0, dtype=np.bool_)
        self._old, self._new = old[keep], new[keep]
        span = np.maximum(np.diff(self._old), 1)
        self._slope: FloatArray = np.diff(self._new) / span

    def __call__(self, times: IntArray) -> IntArray:
        if not len(self._old):
            return times
        at = np.searchsorted(self._old, times, side="right") - 1
        inner = np.clip(at, 0, max(len(self._old) - 2, 0))
        behind = times - self._old[np.clip(at, 0, len(self._old) - 1)]
        base = self._new[np.clip(at, 0, len(self._old) - 1)]
        between = (at >= 0) & (at < len(self._old) - 1)
        slope = self._slope[inner] if len(self._slope) else np.ones(len(times))
        moved = np.where(between, np.rint(behind * slope).astype(np.int64), behind)
        return np.asarray(base + moved)


def _thread_maps(recording: Recording, replayed: Replayed, low_ns: int, high_ns: int) -> dict[int, _Map]:
    calls, origin = recording.calls, recording.origin_ns
    bounds = [*np.flatnonzero(calls.first).tolist(), len(calls)]
    maps = {}
    for low, high in itertools.pairwise(bounds):
        first = low + int(np.searchsorted(calls.end[low:high], low_ns))
        last = low + int(np.searchsorted(calls.start[low:high], high_ns, side="right"))
        if last > first:
            mine = slice(first, last)
            maps[int(calls.thread[low])] = _Map(
                np.concatenate([calls.start[mine], calls.end[mine]]),
                np.concatenate([replayed.call_start[mine], replayed.call_end[mine]]) + origin,
            )
    return maps


def _moved_with_threads(table: Table, threads: dict[int, _Map], everywhere: _Map) -> Table:
    thread = table["thread"]
    start, end = everywhere(table["start"]), everywhere(table["end"])
    for number, move in threads.items():
        mine = np.flatnonzero(thread == number)
        start[mine], end[mine] = move(table["start"][mine]), move(table["end"][mine])
    return _timed(table, start=start, end=np.maximum(end, start))
