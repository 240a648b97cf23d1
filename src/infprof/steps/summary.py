"""Phases and steps as the contract has them: what each phase takes and is limited by, and how long its steps last.

The phases of a lane divide the window: prefill, decode, mixed and other steps, ``idle`` (no demand between steps) and
what lies outside steps. Start-up, graph capture and warm-up steps come before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from infprof.measures import calls
from infprof.measures import intervals as iv
from infprof.measures.idle import IdleGaps, IdleModel
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.measures.slices import DeviceTime, device_time
from infprof.quantiles import summary
from infprof.results import IDLE_CAUSES, Measure, Measures, Scope, Verdict, plain
from infprof.steps.figures import StepFigures, step_figures
from infprof.steps.finding import LaneSteps
from infprof.steps.names import OTHER, tokens_of
from infprof.steps.phases import PHASES, Labels, label
from infprof.steps.slow import slowest
from infprof.trace import BoolArray, IntArray

# A phase that takes this share of the window is the window: what holds for the one holds for the other.
WHOLE_WINDOW = 0.98
IDLE, OUTSIDE = "idle", "outside steps"
START_UP, WARM_UP, CAPTURE = "start-up", "warm-up", "graph capture"
# Shares of the window under which what is outside steps is not judged.
JUDGED_SHARE = 0.05


class Judged(NamedTuple):
    """What a phase was found to be limited by, and its measures."""

    verdict: Verdict
    measures: Measures


# The class of a device's time inside some scope; None where it is too little to be judged.
Judge = Callable[[DeviceTime], Judged | None]


@dataclass
class StepReport:
    """``phases`` and ``steps`` of the contract, and measures of scope phase and of all steps."""

    phases: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[str, Any] | None = None
    measures: list[Measure] = field(default_factory=list)


def describe_lane(
    prepared: Prepared, model: IdleModel, steps: LaneSteps, time: DeviceTime, whole: Verdict, judge: Judge, ending: str
) -> StepReport:
    """Phases and steps of one lane inside the window of ``time``, which its device's verdict ``whole`` is about.

    ``ending`` is added to the names of its phases where there are several lanes.
    """
    report = StepReport()
    labels = label(prepared, steps)
    inside = iv.overlaps(time.scope, steps.start, steps.end)
    figures = step_figures(prepared, steps, time)
    phase, is_step = labels.phase[inside], figures.steps.is_step
    lane = _Lane(prepared, model, figures, time, whole, judge)
    covered = iv.empty()
    for number, kind in enumerate(PHASES):
        mine = is_step & (phase == number)
        if not mine.any():
            continue
        scope = iv.intersect(iv.union(figures.start[mine], figures.end[mine]), time.scope)
        covered = iv.merge(covered, scope)
        entry, judged = lane.phase("steps" if kind == OTHER else kind, kind, scope, mine)
        entry.update(_certainty(labels, inside, mine))
        report.phases.append(entry)
        report.measures += _measures(entry, judged, ending)
    waits = iv.subtract(iv.intersect(figures.waits, time.scope), covered)
    rest = iv.subtract(iv.subtract(time.scope, covered), waits)
    for name, kind, scope in ((IDLE, IDLE, waits), (OUTSIDE, OTHER, rest)):
        if scope:
            report.phases.append(lane.phase(name, kind, scope, None)[0])
    for entry in report.phases:
        entry["name"] += ending
    report.steps = lane.steps(is_step)
    report.measures += [Measure(m.name, m.value, m.unit, m.rank, m.source) for m in _step_measures(report.steps)]
    return report


def startup_phases(
    prepared: Prepared, model: IdleModel, steps: LaneSteps, device: int, until_ns: int
) -> list[dict[str, Any]]:
    """What lies before ``until_ns``, where start-up ends: loading, graph capture, and steps that warmed up."""
    low = int(prepared.operations.start.min())
    before = iv.single(low, until_ns)
    if not before:
        return []
    capture = iv.intersect(_captures(prepared, steps.process), before)
    early = steps.is_step & (steps.end <= until_ns)
    warm = iv.subtract(iv.intersect(iv.union(steps.work_start[early], steps.work_end[early]), before), capture)
    rest = iv.subtract(iv.subtract(before, capture), warm)
    found = []
    for name, scope, count in (
        (START_UP, rest, 1),
        (CAPTURE, capture, capture.count),
        (WARM_UP, warm, int(early.sum())),
    ):
        if scope:
            spent = device_time(prepared, model, device, scope)
            found.append(_entry(prepared, name, "load", count, spent, None, None, in_window=False))
    return found


def _captures(prepared: Prepared, process: int) -> Intervals:
    """When a process captured graphs: from the begin of a stream capture to its end."""
    table, strings = prepared.trace.api_calls, prepared.trace.strings
    if table is None:
        return iv.empty()
    edges = []
    for edge, column in (("Begin", "start"), ("End", "end")):
        named = calls.matching(strings, f"Stream{edge}Capture")
        edges.append(np.sort(table[column][named[table["name"]] & (table["process"] == process)]))
    count = min(map(len, edges))
    return iv.union(edges[0][:count], edges[1][:count])


@dataclass
class _Lane:
    prepared: Prepared
    model: IdleModel
    figures: StepFigures
    time: DeviceTime
    whole: Verdict
    judge: Judge

    def phase(
        self, name: str, kind: str, scope: Intervals, mine: BoolArray | None
    ) -> tuple[dict[str, Any], Judged | None]:
        """The entry of a phase, ``mine`` its stretches, None for what is no step."""
        spent = part(self.model, self.time, scope)
        share = spent.window_ns / max(self.time.window_ns, 1)
        judged = None
        verdict: Verdict | None = None
        if share >= WHOLE_WINDOW:
            verdict = self.whole
        elif mine is not None or (kind != IDLE and share >= JUDGED_SHARE):
            judged = self.judge(spent)
            verdict = None if judged is None else judged.verdict
        steps = None if mine is None else self.steps(mine)
        count = scope.count if mine is None else int(mine.sum())
        return _entry(self.prepared, name, kind, count, spent, verdict, steps), judged

    def steps(self, mine: BoolArray) -> dict[str, Any]:
        """Count, how found and lengths of the steps; lengths are those of steps that the window does not cut."""
        figures = self.figures
        rows = np.flatnonzero(mine & figures.complete)
        lengths = summary(figures.duration[rows].tolist())
        launches, syncs = figures.launches, figures.syncs

        def per_step(column: IntArray | None) -> float | None:
            return None if column is None or not len(rows) else float(column[rows].mean())

        return {
            "count": int(mine.sum()),
            "how_found": figures.steps.how,
            "device": self.prepared.trace.devices[self.time.device].id,
            "confidence": figures.steps.confidence,
            "p50_ns": lengths["p50"],
            "p95_ns": lengths["p95"],
            "p99_ns": lengths["p99"],
            "max_ns": lengths["max"],
            "complete_count": len(rows),
            "kernels_per_step": per_step(figures.kernels),
            "launches_per_step": per_step(launches),
            "syncs_per_step": per_step(syncs),
            "tokens_per_step": self._tokens(rows),
            "idle_per_step_ns": per_step(figures.idle_ns()),
            "busy_per_step_ns": per_step(figures.duration - figures.idle_ns()),
            "slowest": slowest(self.prepared, figures, self.time, rows),
        }

    def _tokens(self, rows: IntArray) -> float | None:
        """The mean number of tokens that the engine says a step computes, where all its names say it."""
        texts, many = np.unique(self.figures.steps.text[rows], return_counts=True)
        if not len(texts) or texts[0] < 0:
            return None
        said = [tokens_of(self.prepared.trace.strings[text]) for text in texts.tolist()]
        known = [(tokens, count) for tokens, count in zip(said, many.tolist(), strict=True) if tokens is not None]
        if len(known) < len(said):
            return None
        return float(sum(tokens * count for tokens, count in known) / len(rows))


def part(model: IdleModel, time: DeviceTime, scope: Intervals) -> DeviceTime:
    """The accounting of a part of the scope of ``time``. Gaps that it does not cut keep what is known of them."""
    gaps = time.gaps
    inside = iv.covered(scope, gaps.starts, gaps.ends)
    whole = inside == gaps.lengths
    if whole.all():
        chosen = gaps
    elif (whole | (inside == 0)).all():
        chosen = _some(gaps, whole)
    else:
        chosen = model.gaps(time.device, scope)
    return DeviceTime(
        device=time.device,
        scope=scope,
        compute=iv.intersect(time.compute, scope),
        exposed_comm=iv.intersect(time.exposed_comm, scope),
        comm=iv.intersect(time.comm, scope),
        exposed_copy={cause: iv.intersect(sets, scope) for cause, sets in time.exposed_copy.items()},
        gaps=chosen,
    )


def _some(gaps: IdleGaps, rows: BoolArray) -> IdleGaps:
    """The chosen gaps. Causes that no gap has take no memory."""
    chosen = IdleGaps.unknown(Intervals(gaps.starts[rows], gaps.ends[rows]))
    for column in ("operation", "held", "new_kernel", "explained_ns"):
        getattr(chosen, column)[:] = getattr(gaps, column)[rows]
    for cause, spent in enumerate(gaps.causes):
        if gaps.cause_ns(IDLE_CAUSES[cause]):
            chosen.causes[cause] = spent[rows]
    return chosen


def _entry(
    prepared: Prepared,
    name: str,
    kind: str,
    count: int,
    spent: DeviceTime,
    verdict: Verdict | None,
    steps: dict[str, Any] | None,
    in_window: bool = True,
) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "count": count,
        "total_ns": spent.window_ns,
        "verdict": plain(verdict),
        "slices": plain(spent.slices()),
        "steps": steps,
        "device": prepared.trace.devices[spent.device].id,
        "in_window": in_window,
    }


def _certainty(labels: Labels, inside: BoolArray, mine: BoolArray) -> dict[str, Any]:
    """How sure the phase is and by what: of most of its steps."""
    why = labels.why[inside][mine]
    most = int(np.bincount(why).argmax())
    sure = float(labels.confidence[inside][mine][why == most].mean())
    return {"confidence": round(sure, 2), "evidence": labels.evidence[most]}


def _measures(entry: dict[str, Any], judged: Judged | None, ending: str) -> list[Measure]:
    """The measures of a phase; those that have no value say nothing that the window's do not say."""
    scope = Scope("phase", entry["name"] + ending)
    found = [*(judged.measures if judged is not None else ()), *_step_measures(entry["steps"])]
    return [Measure(m.name, m.value, m.unit, m.rank, m.source, scope) for m in found if m.value is not None]


# Measure → its key in the contract's ``steps``; units follow the names.
STEP_MEASURES = {
    "step_count": "count",
    "step_p50_ns": "p50_ns",
    "step_p95_ns": "p95_ns",
    "step_p99_ns": "p99_ns",
    "step_max_ns": "max_ns",
    "step_busy_mean_ns": "busy_per_step_ns",
    "step_idle_mean_ns": "idle_per_step_ns",
    "step_kernels_mean_count": "kernels_per_step",
    "step_launches_mean_count": "launches_per_step",
    "step_syncs_mean_count": "syncs_per_step",
    "step_tokens_mean_count": "tokens_per_step",
}


def _step_measures(steps: dict[str, Any]) -> list[Measure]:
    how = f"steps by {steps['how_found']}"
    return [
        Measure(name, steps[key], "ns" if name.endswith("_ns") else "count", "C", how)
        for name, key in STEP_MEASURES.items()
    ]


class Device(NamedTuple):
    """One device of the diagnosis: its accounting in the window, its verdict, and how to judge a part of it."""

    time: DeviceTime
    verdict: Verdict
    judge: Judge


def describe(
    prepared: Prepared,
    model: IdleModel,
    found: list[LaneSteps],
    devices: list[Device],
    focus: int,
    steady_ns: int | None,
) -> StepReport:
    """Phases of every device, and the steps of the one with index ``focus``.

    ``steady_ns``: where start-up ends, None where that is not known. Of a device that several processes share each
    process has its own phases, each dividing the window.
    """
    whole = StepReport()
    lanes = [lane for lane in found if lane.is_step.any()]
    for number, device in enumerate(devices):
        mine = [lane for lane in lanes if lane.device == device.time.device]
        for place, lane in enumerate(mine):
            ending = _ending(prepared, lane, len(devices) > 1, len(mine) > 1)
            report = describe_lane(prepared, model, lane, device.time, device.verdict, device.judge, ending)
            if place == 0 and steady_ns is not None:
                early = startup_phases(prepared, model, lane, device.time.device, steady_ns)
                whole.phases += [{**entry, "name": entry["name"] + ending} for entry in early]
            whole.phases += report.phases
            if number == focus and place == 0:
                whole.steps = report.steps
            else:
                report.measures = [m for m in report.measures if m.scope.kind == "phase"]
            whole.measures += report.measures
    return whole


def why_no_steps(found: list[LaneSteps]) -> str | None:
    """One sentence on why no step was found, None where some were."""
    if not found or any(lane.is_step.any() for lane in found):
        return None
    reason = found[0].why_none or "none was told apart"
    return f"No steps were found: {reason}. A range says what a step is: `--step-range NAME`."


def _ending(prepared: Prepared, lane: LaneSteps, several_devices: bool, several_lanes: bool) -> str:
    """What tells the phases of a lane from those of others."""
    device = f", GPU {prepared.trace.devices[lane.device].id}" if several_devices else ""
    if not several_lanes:
        return device
    pid = prepared.trace.processes[lane.process].pid if lane.process >= 0 else None
    return f"{device}, process {pid}"
