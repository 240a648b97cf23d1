"""From a profile: the length of every step of each phase, and the kernels in a step of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from infprof.compare.runs import CopyUse, KernelUse, Run
from infprof.compare.spread import FEWEST_STEPS
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.operations import Prepared
from infprof.measures.slices import DeviceTime
from infprof.steps.figures import StepFigures, step_figures
from infprof.steps.finding import LaneSteps, find_steps
from infprof.steps.phases import PHASES, label
from infprof.trace import COPY_KIND_NAMES, BoolArray, IntArray

# Blocks of steps from which the spread of a kernel's time is taken.
MOST_BLOCKS = 20
WHOLE_GRAPH = "a CUDA graph, traced whole"


class _Phase(NamedTuple):
    """Steps of one phase of a lane: ``mine`` all in the window, of the stretches of ``figures``."""

    figures: StepFigures
    mine: BoolArray
    time: DeviceTime

    def whole(self, mine: BoolArray) -> IntArray:
        """Those of which the window cuts neither the work nor, where there are others, the gap in front."""
        complete = np.flatnonzero(mine & self.figures.complete)
        uncut = complete[self.figures.start[complete] > self.time.scope.starts[0]]
        return uncut if len(uncut) else complete


def add_steps(run: Run, prepared: Prepared, times: Sequence[DeviceTime], step_range: str | None) -> None:
    """Fill in lengths and kernels of the run's phases and of all its steps, in place.

    Phases stand in the diagnosis in the order in which they are met here. Where the two disagree, the run keeps to what its
    diagnosis says.
    """
    lanes = [lane for lane in find_steps(prepared, step_range) if lane.is_step.any()]
    found = [phase for lane in _lanes_in_order(lanes, times) for phase in _phases(prepared, *lane)]
    entries = [phase for phase in run.phases if phase.steps]
    if [int(phase.mine.sum()) for phase in found] != [phase.entry["count"] for phase in entries]:
        return
    for entry, phase in zip(entries, found, strict=True):
        rows = phase.whole(phase.mine)
        entry.lengths = phase.figures.duration[rows]
        entry.kernels = _kernels(prepared, phase.figures.steps, rows)
        entry.copies = _copies(prepared, phase.figures.steps, rows)
    _add_all_steps(run, prepared, found)


def _lanes_in_order(lanes: Sequence[LaneSteps], times: Sequence[DeviceTime]) -> Iterator[tuple[LaneSteps, DeviceTime]]:
    for time in times:
        for lane in lanes:
            if lane.device == time.device:
                yield lane, time


def _phases(prepared: Prepared, lane: LaneSteps, time: DeviceTime) -> Iterator[_Phase]:
    inside = iv.overlaps(time.scope, lane.start, lane.end)
    figures, phase = step_figures(prepared, lane, time), label(prepared, lane).phase[inside]
    for number in range(len(PHASES)):
        mine = figures.steps.is_step & (phase == number)
        if mine.any():
            yield _Phase(figures, mine, time)


def _add_all_steps(run: Run, prepared: Prepared, found: Sequence[_Phase]) -> None:
    """All steps of the diagnosis are those of one lane: the one of their number and GPU."""
    if run.steps is None:
        return
    steps = run.steps.entry["steps"]
    for phase in found:
        figures = phase.figures
        device = prepared.trace.devices[figures.steps.device].id
        mine = figures.steps.is_step
        rows = phase.whole(mine)
        if device == steps.get("device") and int(mine.sum()) == steps["count"]:
            run.steps.lengths = figures.duration[rows]
            return


def _kernels(prepared: Prepared, steps: LaneSteps, rows: IntArray) -> dict[str, KernelUse]:
    """Name → calls and time per step over these whole steps."""
    ops, table = prepared.operations, prepared.trace.kernels
    if not len(rows):
        return {}
    first, last = steps.first[rows], steps.last[rows]
    mine, step = steps.lane.rows[_places(first, last)], np.repeat(np.arange(len(rows)), last - first)
    used: dict[str, KernelUse] = {}
    graphs = np.flatnonzero(ops.kind[mine] == op.GRAPH)
    if len(graphs):
        (used[WHOLE_GRAPH],) = _uses(ops, mine[graphs], step[graphs], np.zeros(len(graphs), dtype=np.int64), len(rows))
    if table is None:
        return used
    kernels = np.flatnonzero(ops.kind[mine] == op.KERNEL)
    names, which = np.unique(table["name"][ops.row[mine[kernels]]], return_inverse=True)
    found = _uses(ops, mine[kernels], step[kernels], which, len(rows))
    used.update(zip((prepared.trace.strings[name] for name in names.tolist()), found, strict=True))
    return used


def _copies(prepared: Prepared, steps: LaneSteps, rows: IntArray) -> dict[str, CopyUse] | None:
    """Kind → number and bytes of copies per step over these whole steps; None where copies were not collected."""
    ops, table = prepared.operations, prepared.trace.copies
    if table is None or not len(rows):
        return None if table is None else {}
    mine = steps.lane.rows[_places(steps.first[rows], steps.last[rows])]
    copied = ops.row[mine[ops.kind[mine] == op.COPY]]
    kind, size = table["kind"][copied], table["bytes"][copied]
    found = {}
    for number, name in enumerate(COPY_KIND_NAMES):
        of_kind = kind == number
        if of_kind.any():
            known = bool((size[of_kind] >= 0).all())
            found[name] = CopyUse(
                int(of_kind.sum()) / len(rows), int(size[of_kind].sum()) / len(rows) if known else None
            )
    return found


def _uses(ops: op.Operations, rows: IntArray, step: IntArray, which: IntArray, steps: int) -> list[KernelUse]:
    """The use of each kernel ``which`` by operations ``rows`` in ``steps`` steps.

    The standard error of the time per step is that of the means of blocks of neighbouring steps (batch means): steps that
    follow each other are alike, as long as a batch stays together.
    """
    count = int(which.max()) + 1 if len(which) else 0
    calls = np.bincount(which, minlength=count) / steps
    length = (ops.end - ops.start)[rows].astype(np.float64)
    spent = np.bincount(which, length, count) / steps
    present = np.bincount(np.unique(step * count + which) % max(count, 1), minlength=count) / steps
    blocks = 0 if steps < FEWEST_STEPS else min(max(FEWEST_STEPS, steps // 4), MOST_BLOCKS)
    error: list[float | None] = [None] * count
    if blocks:
        block = np.arange(steps) * blocks // steps
        sums = np.bincount(block[step] * count + which, length, blocks * count).reshape(blocks, count)
        means = sums / np.bincount(block, minlength=blocks)[:, None]
        error = (means.std(axis=0, ddof=1) / blocks**0.5).tolist()
    columns = (calls.tolist(), spent.tolist(), error, [blocks] * count, present.tolist())
    return [KernelUse(*values) for values in zip(*columns, strict=True)]


def _places(first: IntArray, last: IntArray) -> IntArray:
    """All places from each first up to its last (exclusive)."""
    count = last - first
    offset = np.repeat(first - np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(count)[:-1]]), count)
    return np.asarray(np.arange(int(count.sum())) + offset, dtype=np.int64)
