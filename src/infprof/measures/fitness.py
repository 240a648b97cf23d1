"""Is the trace fit to be believed? Records that are missing, impossible, or bent by the recording itself.

Each check gives a problem with its count, and the confidence that a verdict may have at most in its presence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from infprof.distinct import distinct_values, groups
from infprof.measures import calls
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.results import Problem
from infprof.steps.names import is_step_name
from infprof.trace import BoolArray, IntArray, picked, taken

# Kernels that start early because the one before let them (programmatic dependent launch) overlap by microseconds only.
OVERRUN_NS = 10_000
OVERRUN_SHARE = 0.01
# Host and GPU clocks are matched to some microseconds; a millisecond is a jump.
CLOCK_JUMP_NS = 1_000_000
# So many launches, and this share of all, before missing records are spoken of.
FEW_LAUNCHES = 10
LOST_SHARE = 0.01
LARGE_LOST_SHARE = 0.2
# A replay with less than this share of the kernels that its like have is not whole.
WHOLE_REPLAY_SHARE = 0.9


class Doubt(NamedTuple):
    problem: Problem
    at_most: float


def doubts(prepared: Prepared, lost: int, launches: int) -> list[Doubt]:
    """What makes the trace less than fit, by every check that finds something.

    ``lost`` and ``launches`` are those of ``launches_without_records``.
    """
    found = _lost_records(lost, launches)
    checks = (_partial_graphs, _overruns, _clock_jumps, _empty_steps, _host_costs)
    return [doubt for doubt in (found, *(check(prepared) for check in checks)) if doubt is not None]


def launches_without_records(prepared: Prepared) -> tuple[int, int]:
    """Kernel launch calls without anything on the GPU, and all that should have something.

    Not counted: launches into a graph that is being captured, those after the last one that was served (the recording
    ended first), failed ones, and graph launches, which have a check of their own.
    """
    table, nested = prepared.trace.api_calls, prepared.thread_calls
    if table is None or nested is None or not len(table):
        return 0, 0
    strings = prepared.trace.strings
    wanted = calls.kernel_launchers(strings) & ~calls.graph_launchers(strings) & ~calls.matching(strings, "HostFunc")
    if not wanted.any():
        return 0, 0
    name = table["name"]
    rows = np.flatnonzero(wanted[name])
    rows = rows[(nested.outer[rows] == rows) & (taken(table["return_value"], rows) <= 0)]
    rows = rows[taken(table["correlation"], rows) >= 0]
    served = prepared.first_operations >= 0
    if not served.any():
        return 0, 0
    outer = np.zeros(len(table), dtype=np.bool_)
    outer[nested.outer[np.flatnonzero(served)]] = True
    have = outer[rows]
    if not have.any():
        return 0, 0
    called = table["start"][rows]
    in_time = called <= called[have].max()
    missing = picked(rows, in_time & ~have)
    if len(missing):
        missing = missing[~_captured(prepared, missing)]
    return len(missing), len(missing) + int(have.sum())


def captured_launches(prepared: Prepared) -> int:
    """Kernel launch calls that went into a graph under capture: recorded there, not run."""
    table = prepared.trace.api_calls
    if table is None or not len(table):
        return 0
    rows = np.flatnonzero(calls.kernel_launchers(prepared.trace.strings)[table["name"]])
    return int(_captured(prepared, rows).sum())


def _captured(prepared: Prepared, rows: IntArray) -> BoolArray:
    """Which calls lie between the begin and the end of a stream capture of their process."""
    table, strings = prepared.trace.api_calls, prepared.trace.strings
    assert table is not None
    inside = np.zeros(len(rows), dtype=np.bool_)
    begins, ends = (calls.matching(strings, f"Stream{edge}Capture") for edge in ("Begin", "End"))
    if not (begins | ends).any():
        return inside
    process, start = taken(table["process"], rows), table["start"][rows]
    for number in distinct_values(process).tolist():
        mine = table["process"] == number
        opened = np.sort(table["start"][np.flatnonzero(begins[table["name"]] & mine)])
        closed = np.sort(table["end"][np.flatnonzero(ends[table["name"]] & mine)])
        here = process == number
        before, after = (np.searchsorted(edges, start[here], "right") for edges in (opened, closed))
        # Open at a time: more begins than ends before it. An end too many is of a capture that the recording began in.
        at_ends = np.arange(1, len(closed) + 1) - np.searchsorted(opened, closed, "right")
        inside[here] = before + max(int(at_ends.max(initial=0)), 0) > after
    return inside


def _lost_records(lost: int, total: int) -> Doubt | None:
    if lost < FEW_LAUNCHES or lost < LOST_SHARE * total:
        return None
    share = lost / total
    return Doubt(
        Problem(
            "gpu-records-lost",
            f"{lost} of {total} kernel launches ({100 * share:.1f} %) left no record on the GPU although later ones did: "
            "the profiler lost part of the GPU's work, so what looks idle may have been busy. Record a shorter window.",
            lost,
        ),
        0.4 if share >= LARGE_LOST_SHARE else 0.7,
    )


def _partial_graphs(prepared: Prepared) -> Doubt | None:
    """Replays of one graph that hold fewer kernels than the others: told by their first kernel."""
    ops, table, kernels = prepared.operations, prepared.trace.api_calls, prepared.trace.kernels
    if table is None or kernels is None:
        return None
    by_graph = calls.graph_launchers(prepared.trace.strings)
    if not by_graph.any():
        return None
    mine = np.flatnonzero((ops.kind == op.KERNEL) & (ops.launch >= 0))
    mine = mine[by_graph[table["name"][ops.launch[mine]]]]
    if not len(mine):
        return None
    launch, first, count = np.unique(ops.launch[mine], return_index=True, return_counts=True)
    named = kernels["name"][ops.row[mine[first]]]
    partial = 0
    # The recording may begin or end in the middle of a replay.
    edge = (launch == launch.min()) | (launch == launch.max())
    for _, rows in groups(named):
        usual = float(np.median(count[rows]))
        if len(rows) >= 4 and usual >= 4:
            partial += int(((count[rows] < WHOLE_REPLAY_SHARE * usual) & ~edge[rows]).sum())
    if not partial:
        return None
    return Doubt(
        Problem(
            "graphs-partly-recorded",
            f"{partial} of {len(launch)} graph launches have fewer kernels than other replays of the same graph: part of "
            "their work was not recorded, or the graph branches. Their gaps are not proven idle.",
            partial,
        ),
        0.7,
    )


def _overruns(prepared: Prepared) -> Doubt | None:
    """Kernels that end long after the next one on their stream began: late stamps, not concurrency."""
    ops = prepared.operations
    mine = np.flatnonzero(ops.kind == op.KERNEL)
    if len(mine) < 2:
        return None
    count, spent = 0, 0
    for _, rows in groups(taken(ops.stream, mine)):
        here = mine[rows]
        over = ops.end[here][:-1] - ops.start[here][1:]
        late = np.flatnonzero(over > OVERRUN_NS)
        if not len(late):
            continue
        # Branches of a graph share a stream number and do run side by side.
        late = late[~_in_graph(prepared, here[late])]
        count += len(late)
        spent += int(over[late].sum())
    kernel_ns = int((ops.end[mine] - ops.start[mine]).sum())
    if spent < OVERRUN_SHARE * kernel_ns:
        return None
    return Doubt(
        Problem(
            "stream-overrun",
            f"{count} kernels overlap the next one on an in-order stream ({count} events, {spent / 1000:.0f} µs): their end "
            "stamps came late. Slices count the time once; sums and shares of single kernels are too large.",
            count,
        ),
        0.7,
    )


def _in_graph(prepared: Prepared, rows: IntArray) -> BoolArray:
    ops, table, kernels = prepared.operations, prepared.trace.api_calls, prepared.trace.kernels
    assert kernels is not None
    inside: BoolArray = kernels["graph_node"][ops.row[rows]] >= 0
    if table is not None:
        launched = ops.launch[rows]
        by_graph = calls.graph_launchers(prepared.trace.strings)
        inside = inside | ((launched >= 0) & by_graph[table["name"][np.maximum(launched, 0)]])
    return inside


def _clock_jumps(prepared: Prepared) -> Doubt | None:
    ops, table = prepared.operations, prepared.trace.api_calls
    if table is None:
        return None
    rows = np.flatnonzero(ops.launch >= 0)
    early = table["start"][ops.launch[rows]] - ops.start[rows]
    jumped = early > CLOCK_JUMP_NS
    count = int(jumped.sum())
    if not count:
        return None
    return Doubt(
        Problem(
            "clock-jump",
            f"{count} GPU operations begin over 1 ms before the call that launched them, up to {early.max() / 1e6:.3g} ms: "
            "the host's and the GPU's clocks do not fit together in part of the trace, and neither do the causes of its "
            "idle time.",
            count,
        ),
        0.4,
    )


def _empty_steps(prepared: Prepared) -> Doubt | None:
    """Steps without GPU work beside steps that have some."""
    from infprof.measures.ranges import project

    table = prepared.trace.ranges
    if table is None or not len(table):
        return None
    is_step = np.array([is_step_name(text) for text in prepared.trace.strings], dtype=np.bool_)
    rows = (
        np.flatnonzero(is_step[table["text"]] & (table["text"] >= 0)) if is_step.any() else np.empty(0, dtype=np.int64)
    )
    if len(rows) < 2:
        return None
    launched = project(prepared, rows).kernels
    low, high = _recorded(prepared)
    inside = (table["start"][rows] >= low) & (table["end"][rows] <= high)
    empty = int(((launched == 0) & inside).sum())
    if not empty or not launched.any():
        return None
    return Doubt(
        Problem(
            "empty-steps",
            f"{empty} of {len(rows)} steps launched nothing on the GPU: figures per step hold for the others, and the "
            "profiler may have lost the GPU side of these.",
            empty,
        ),
        0.7,
    )


def _recorded(prepared: Prepared) -> tuple[int, int]:
    ops = prepared.operations
    return (int(ops.start.min()), int(ops.end.max())) if len(ops) else (0, 0)


def _host_costs(prepared: Prepared) -> Doubt | None:
    """Options of the PyTorch profiler that make the host slower than it is without them."""
    capture = prepared.trace.provenance.capture
    slow = [key for key in ("with_stack", "record_shapes", "profile_memory") if capture.get(key)]
    ops = prepared.operations
    if not slow or not len(ops):
        return None
    busy = iv.union(ops.start, ops.end)
    low, high = _recorded(prepared)
    if _idle_share(busy, low, high) < LARGE_LOST_SHARE:
        return None
    return Doubt(
        Problem(
            "profiler-slows-host",
            f"Recorded with {', '.join(slow)}: these cost host time at every operator, so part of what the GPU waits for is "
            "the profiler's. Record once without them before believing the size of host work.",
        ),
        0.7,
    )


def _idle_share(busy: Intervals, low: int, high: int) -> float:
    return 1 - busy.total() / (high - low) if high > low else 0.0
