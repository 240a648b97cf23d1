"""What each step of a lane holds: its time by slice, its kernels, launches and waits. One value per stretch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infprof.measures import calls
from infprof.measures import intervals as iv
from infprof.measures.idle import CAUSE, IdleGaps
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.measures.slices import DeviceTime
from infprof.results import COPY_CAUSES, IDLE_CAUSES
from infprof.steps.finding import LaneSteps
from infprof.trace import BoolArray, IntArray

# A gap in front of a step in which nothing was asked of the program (or the profiler worked) for this share of it is
# not the step's: the step begins behind it.
NO_DEMAND_SHARE = 0.5

# The slices of a step in the order of the rows of ``StepFigures.slices``.
SLICES: tuple[tuple[str, str | None], ...] = (
    ("compute", None),
    ("exposed_communication", None),
    *(("exposed_copy", cause) for cause in COPY_CAUSES),
    *(("idle", cause) for cause in IDLE_CAUSES),
)


@dataclass
class StepFigures:
    """The stretches of a lane inside a scope and what they hold.

    ``start`` to ``end`` are clipped to the scope and come without a leading gap of no demand (those are ``waits``);
    ``complete``: all of the stretch's work lies in the scope. ``slices`` has shape (len(SLICES), stretches), ns, whose
    columns add up to the lengths; ``syncs`` and ``launches`` are None where calls were not collected.
    """

    steps: LaneSteps
    start: IntArray
    end: IntArray
    complete: BoolArray
    waits: Intervals
    slices: IntArray
    kernels: IntArray
    launches: IntArray | None
    syncs: IntArray | None

    @property
    def duration(self) -> IntArray:
        return self.end - self.start

    def idle_ns(self) -> IntArray:
        return np.asarray(self.slices[len(SLICES) - len(IDLE_CAUSES) :].sum(axis=0), dtype=np.int64)


def step_figures(prepared: Prepared, steps: LaneSteps, time: DeviceTime) -> StepFigures:
    """The figures of the stretches that have a part in the scope of ``time``, the device's time accounting."""
    scope = time.scope
    inside = iv.overlaps(scope, steps.start, steps.end)
    launches, syncs = _calls(prepared, steps)
    chosen = steps.taken(inside)
    start, end = _clipped(scope, chosen.start, chosen.end)
    starts, waits = _without_waits(time.gaps, start, chosen.work_start)
    complete = iv.covered(scope, chosen.work_start, chosen.work_end) == chosen.work_end - chosen.work_start
    kernels = np.add.reduceat(steps.lane.kernels, _units(steps)) if len(steps) else steps.first
    return StepFigures(
        chosen,
        starts,
        end,
        complete,
        waits,
        _slices(time, starts, end),
        kernels[inside],
        None if launches is None else launches[inside],
        None if syncs is None else syncs[inside],
    )


def _units(steps: LaneSteps) -> IntArray:
    """The unit with which each stretch begins."""
    return np.searchsorted(steps.lane.first, steps.first)


def _clipped(scope: Intervals, start: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """Each stretch from its first to its last moment inside the scope, in which it has a part."""
    first = np.searchsorted(scope.ends, start, side="right")
    last = np.searchsorted(scope.starts, end, side="left") - 1
    return np.maximum(start, scope.starts[first]), np.minimum(end, scope.ends[last])


def _without_waits(gaps: IdleGaps, start: IntArray, work: IntArray) -> tuple[IntArray, Intervals]:
    """Where each stretch begins without a leading gap of no demand, and those gaps."""
    if not len(gaps.starts) or not len(start):
        return start, iv.empty()
    at = np.searchsorted(gaps.starts, start)
    place = np.minimum(at, len(gaps.starts) - 1)
    asked_nothing = gaps.causes[CAUSE["no-demand"]] + gaps.causes[CAUSE["profiler"]]
    leading = (at < len(gaps.starts)) & (gaps.ends[place] <= work)
    leading &= asked_nothing[place] >= NO_DEMAND_SHARE * gaps.lengths[place]
    waits = iv.union(gaps.starts[place[leading]], gaps.ends[place[leading]])
    return np.where(leading, np.maximum(gaps.ends[place], start), start), waits


def _slices(time: DeviceTime, start: IntArray, end: IntArray) -> IntArray:
    out = np.zeros((len(SLICES), len(start)), dtype=np.int64)
    sets = [time.compute, time.exposed_comm, *(time.exposed_copy[cause] for cause in COPY_CAUSES)]
    for row, inside in enumerate(sets):
        out[row] = iv.covered(inside, start, end)
    gaps = time.gaps
    if not len(start) or not len(gaps.starts):
        return out
    owner = np.searchsorted(start, gaps.starts, side="right") - 1
    mine = (owner >= 0) & (gaps.starts < end[np.maximum(owner, 0)])
    for cause, spent in enumerate(gaps.causes):
        some = np.flatnonzero(mine & (spent > 0))
        # bincount adds in float64: exact below 2**53 ns.
        out[len(sets) + cause] = np.bincount(owner[some], spent[some].astype(np.float64), len(start)).astype(np.int64)
    return out


def _calls(prepared: Prepared, steps: LaneSteps) -> tuple[IntArray | None, IntArray | None]:
    """Launches of kernels and graphs, and synchronising calls of the process, of each stretch."""
    table, lane = prepared.trace.api_calls, steps.lane
    if table is None or lane.thread is None or not len(steps):
        return None, None
    units = _units(steps)
    launched = (lane.launch >= 0) & (lane.kernels > 0)
    launches = np.add.reduceat(launched.astype(np.int64), units)
    known = np.maximum.accumulate(np.where(lane.launch >= 0, table["start"][np.maximum(lane.launch, 0)], 0))
    is_sync = (prepared.api_kinds == calls.SYNC).take(table["name"]) & (table["process"] == lane.process)
    rows = np.flatnonzero(is_sync)
    if prepared.thread_calls is not None:
        rows = rows[prepared.thread_calls.outer[rows] == rows]
    # A wait belongs to the step whose launches came before it.
    edges = np.searchsorted(np.sort(table["start"][rows]), known[units])
    return launches, np.diff(np.append(edges, len(rows)))
