"""The time of each phase's steps on a device, without the gaps between them: what rates of work are taken over."""

from __future__ import annotations

from infprof.measures import intervals as iv
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.steps.finding import LaneSteps
from infprof.steps.names import DECODE, MIXED, PREFILL
from infprof.steps.phases import PHASES, label
from infprof.trace import BoolArray


def phase_scopes(
    prepared: Prepared, lanes: list[LaneSteps], rows: BoolArray, scope: Intervals
) -> dict[str, tuple[BoolArray, Intervals]]:
    """Per phase (prefill, decode, mixed) the operations among ``rows`` and the time of its steps, inside the scope.

    ``lanes`` are those of one device. A step counts from its first to its last operation.
    """
    ops, out = prepared.operations, {}
    labels = [label(prepared, lane) for lane in lanes]
    for phase in (PREFILL, DECODE, MIXED):
        sets = []
        for lane, of_lane in zip(lanes, labels, strict=True):
            mine = lane.is_step & (of_lane.phase == PHASES.index(phase))
            sets.append(iv.union(lane.work_start[mine], lane.work_end[mine]))
        spans = iv.intersect(iv.merge(*sets), scope)
        if spans:
            out[phase] = (rows & iv.overlaps(spans, ops.start, ops.end), spans)
    return out
