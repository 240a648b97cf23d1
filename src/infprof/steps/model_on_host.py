"""Parts of the model that run on the host: in the middle of a step data goes to the host, is worked on there, and comes back.

A trip is a copy to the host, a gap in which the device is idle and the host is not, and a copy of as many bytes back on the
same stream, with no kernel between. What tells it from sampling on the host and from the preparation of inputs is its
place: kernels of the model come before it and after it in the same step. Where ranges mark the steps they tell that; else
what only a step's edge has (an embedding lookup, sampling, other copies) must lie between the trips of two steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from infprof import trace as t
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.copies import TINY_BYTES
from infprof.measures.idle import CAUSE
from infprof.measures.operations import Prepared
from infprof.measures.slices import DeviceTime
from infprof.results import Measures
from infprof.steps.finding import LaneSteps
from infprof.trace import BoolArray, IntArray

# Classes of kernels that only the model itself has.
_MODEL = (
    "gemm", "gemv", "attention", "linear-attention", "moe", "norm", "rotary", "kv-cache", "activation", "communication",
)  # fmt: skip
_EDGE = ("embedding", "sampling")
# What a host does that works for the model, however its threads share that; anything else has another reason.
_WORKING = ("host-work", "sync", "lock", "cpu-contention", "unknown")
# Of a trip's gap, the share in which the device must be idle for it.
IDLE_SHARE = 0.5
# So many steps must show it where no range marks them.
LEAST_STEPS = 3
_UNITS = {
    "model_on_host_count": "count",
    "model_on_host_step_ratio": "ratio",
    "model_on_host_bytes": "bytes",
    "model_on_host_idle_ns": "ns",
    "model_on_host_idle_ratio": "ratio",
    "model_on_host_loop_ns": "ns",
    "model_on_host_loss_ns": "ns",
}


class _Lane(NamedTuple):
    """The kernels and host copies of a lane by start: operations, and what each is. ``stretch``: of ``LaneSteps``."""

    rows: IntArray
    stretch: IntArray
    model: BoolArray
    edge: BoolArray
    copy: IntArray  # kind of the copy, -1 for a kernel
    size: IntArray
    stream: IntArray
    start: IntArray
    end: IntArray


class _Trips(NamedTuple):
    """One value per trip: ``idle`` for the host's work, ``sync`` the part of it behind a wait, ``size`` in bytes."""

    idle: IntArray
    work: IntArray
    sync: IntArray
    size: IntArray
    stretch: IntArray


def add_model_on_host(measures: Measures, prepared: Prepared, lanes: list[LaneSteps], time: DeviceTime) -> None:
    """Trips of the lane of most steps, ``lanes`` being those of the device of ``time`` (rank C, the place by names)."""
    lane = max(lanes, key=lambda one: (int(one.is_step.sum()), one.lane.kernels.sum()), default=None)
    if lane is None or prepared.trace.copies is None:
        why = (
            "copies were not collected"
            if prepared.trace.copies is None
            else "no kernel ran, or steps are not looked for"
        )
        for name, unit in _UNITS.items():
            measures.add(name, None, unit, source=why)
        return
    trips = _trips(prepared, lane, time)
    steps = np.flatnonzero(lane.is_step & iv.overlaps(time.scope, lane.work_start, lane.work_end))
    demand = measures.value("demand_ns") or 0
    ahead = (measures.value("host_to_gpu_ratio") or 0) < 1
    idle, work, sync = (int(column.sum()) for column in (trips.idle, trips.work, trips.sync))
    shares = None if not len(steps) else float(np.isin(steps, trips.stretch).mean())
    values: dict[str, float | int | None] = {
        "model_on_host_count": len(trips.idle),
        "model_on_host_step_ratio": shares,
        "model_on_host_bytes": int(np.median(trips.size)) if len(trips.size) else None,
        "model_on_host_idle_ns": idle,
        "model_on_host_idle_ratio": idle / demand if demand else None,
        # Where the host could run ahead, time behind a wait counts as the wait's.
        "model_on_host_loop_ns": work + (0 if ahead else sync),
        "model_on_host_loss_ns": sync if ahead else 0,
    }
    absent = {"model_on_host_step_ratio": "no steps were found", "model_on_host_bytes": "there is no such copy"}
    for name, unit in _UNITS.items():
        value = values[name]
        measures.add(name, value, unit, source="timeline" if value is not None else absent.get(name, "no demand"))


def _trips(prepared: Prepared, steps: LaneSteps, time: DeviceTime) -> _Trips:
    if not _may_return(prepared):
        return _Trips(*(np.empty(0, dtype=np.int64),) * len(_Trips._fields))
    lane = _lane(prepared, steps)
    there = np.flatnonzero(
        (lane.copy[:-1] == t.D2H)
        & (lane.copy[1:] == t.H2D)
        & (lane.size[:-1] == lane.size[1:])
        & (lane.size[:-1] > TINY_BYTES)
        & (lane.stream[:-1] == lane.stream[1:])
        & (lane.start[1:] > lane.end[:-1])
    )
    low, high = lane.end[there], lane.start[there + 1]
    idle = _spent(time, _WORKING, low, high)
    kept = (idle >= IDLE_SHARE * (high - low)) & iv.overlaps(time.scope, low, high)
    there, low, high, idle = there[kept], low[kept], high[kept], idle[kept]
    mid = _within_marked_steps(lane, steps, there) | _between_edges(lane, steps, there)
    work, sync = (_spent(time, (cause,), low, high)[mid] for cause in ("host-work", "sync"))
    return _Trips(idle[mid], work, sync, lane.size[there[mid]], lane.stretch[there[mid]])


def _may_return(prepared: Prepared) -> bool:
    """Whether any size goes to the host and comes back at all, told from the copies alone."""
    copies = prepared.trace.copies
    assert copies is not None
    large = copies["bytes"] > TINY_BYTES
    there, back = (copies["bytes"][large & (copies["kind"] == kind)] for kind in (t.D2H, t.H2D))
    return bool(np.isin(np.unique(there), np.unique(back)).any())


def _lane(prepared: Prepared, steps: LaneSteps) -> _Lane:
    """Kernels, graphs and copies between host and device; what moves within the device changes nothing here."""
    ops, trace = prepared.operations, prepared.trace
    assert trace.copies is not None
    rows = steps.lane.rows
    stretch = np.full(len(rows), -1, dtype=np.int64)
    inside = np.repeat(np.arange(len(steps)), steps.last - steps.first)
    if len(steps):
        stretch[steps.first[0] : steps.last[-1]] = inside
    order = np.argsort(rows, kind="stable")
    rows, stretch = rows[order], stretch[order]
    kind = ops.kind[rows]
    copied = kind == op.COPY
    copy = _where(copied, trace.copies["kind"], ops.row[rows], -1)
    kept = (kind == op.KERNEL) | (kind == op.GRAPH) | np.isin(copy, (t.H2D, t.D2H))
    rows, stretch, kind, copy, copied = rows[kept], stretch[kept], kind[kept], copy[kept], copied[kept]
    size = _where(copied, trace.copies["bytes"], ops.row[rows], -1)
    classes = np.zeros(len(trace.strings) + 1, dtype=np.int64)
    for index, named in prepared.kernel_classes.items():
        classes[index] = 1 if named.kind in _MODEL else 2 if named.kind in _EDGE else 0
    told = np.zeros(len(rows), dtype=np.int64)
    if trace.kernels is not None:
        told = _where(kind == op.KERNEL, classes[trace.kernels["name"]], ops.row[rows], 0)
    model = (told == 1) | (kind == op.GRAPH)
    return _Lane(rows, stretch, model, told == 2, copy, size, ops.stream[rows], ops.start[rows], ops.end[rows])


def _where(mine: BoolArray, column: IntArray, rows: IntArray, otherwise: int) -> IntArray:
    """The column's value in each row that is ``mine``, another number elsewhere."""
    out = np.full(len(rows), otherwise, dtype=np.int64)
    out[mine] = column[rows[mine]]
    return out


def _spent(time: DeviceTime, causes: tuple[str, ...], low: IntArray, high: IntArray) -> IntArray:
    """Idle time of these causes in the gaps that lie between each ``low`` and ``high``."""
    gaps = time.gaps
    spent = np.concatenate([[0], np.cumsum(sum(gaps.causes[CAUSE[cause]] for cause in causes))])
    first = np.searchsorted(gaps.starts, low)
    last = np.maximum(np.searchsorted(gaps.ends, high, side="right"), first)
    return np.asarray(spent[last] - spent[first], dtype=np.int64)


def _within_marked_steps(lane: _Lane, steps: LaneSteps, there: IntArray) -> BoolArray:
    """Which trips lie between model kernels of one step that a range marks."""
    if not len(steps) or not len(there):
        return np.zeros(len(there), dtype=np.bool_)
    known = np.flatnonzero(lane.model & (lane.stretch >= 0))
    first = np.full(len(steps), len(lane.rows), dtype=np.int64)
    last = np.full(len(steps), -1, dtype=np.int64)
    np.minimum.at(first, lane.stretch[known], known)
    np.maximum.at(last, lane.stretch[known], known)
    own = lane.stretch[there]
    marked = (own >= 0) & (own == lane.stretch[there + 1])
    marked &= steps.is_step[own] & (steps.text[own] >= 0)
    return np.asarray(marked & (first[own] < there) & (last[own] > there + 1), dtype=np.bool_)


def _between_edges(lane: _Lane, steps: LaneSteps, there: IntArray) -> BoolArray:
    """Which trips have the edge of their step behind more kernels of the model, where no range marks the steps.

    Trips of one step have no edge between them: the last one's place tells that of all.
    """
    if not len(there) or (len(steps) and (steps.text[steps.is_step] >= 0).any()):
        return np.zeros(len(there), dtype=np.bool_)
    copies = lane.copy >= 0
    copies[there] = copies[there + 1] = False
    edges, model = np.flatnonzero(lane.edge | copies), np.flatnonzero(lane.model)
    count = len(lane.rows)

    def following(places: IntArray, after: IntArray) -> IntArray:
        return np.append(places, count)[np.searchsorted(places, after, side="right")]

    edge = following(edges, there + 1)
    behind = np.append(there[1:], count)
    last = edge < behind
    mid = last & (following(model, there + 1) < edge) & (following(model, edge) < behind)
    # Each trip has the answer of the next one that is the last of its step.
    owner = np.searchsorted(np.flatnonzero(last), np.arange(len(there)))
    answers = np.append(mid[last], False)
    if answers.sum() < LEAST_STEPS:
        return np.zeros(len(there), dtype=np.bool_)
    return np.asarray(answers[owner], dtype=np.bool_)
