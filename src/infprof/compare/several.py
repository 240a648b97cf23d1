"""Several runs of each side: the unit is the run, the figures are medians over runs, and runs must differ to claim anything.

What cannot be summed up over runs (slices, kernels, copies, the what-if) is that of each side's median run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from infprof.compare.causes import flag_changes
from infprof.compare.comparability import (
    different_programs,
    graphs_traced_whole,
    little_work,
    share_in_common,
    withhold,
)
from infprof.compare.comparing import compare, phase_label, same_work
from infprof.compare.figures import measure_changes, measures_of_all
from infprof.compare.headline import headline
from infprof.compare.kernels import matched_kernels
from infprof.compare.limiter import limit_words
from infprof.compare.model import (
    HIGHER,
    LOWER,
    SAME,
    Change,
    Comparison,
    Modes,
    NotComparable,
    PhaseChange,
    RunFigures,
    RunPhase,
)
from infprof.compare.rank_test import FEWEST_RUNS, LEVEL, p_words, rank_sum_p, too_few, two_modes
from infprof.compare.runs import PhaseRun, Run
from infprof.compare.spread import TOLERANCE, is_small, plain_change

_QUANTILES = ("p50", "p95", "p99")


class Sides(NamedTuple):
    """The runs of both sides, and the place of the median run of each."""

    base: list[Run]
    head: list[Run]
    chosen: tuple[int, int]

    @property
    def median_runs(self) -> tuple[Run, Run]:
        return self.base[self.chosen[0]], self.head[self.chosen[1]]


def sides_of(base: Sequence[Run], head: Sequence[Run]) -> Sides:
    """The runs with the median ones: by the median step of the phase that takes most time in all runs, else by the window.

    Of an even number it is the run below the middle.
    """
    key = _main_phase([*base, *head])

    def length(run: Run) -> float:
        phase = next((p for p in run.phases if p.key == key), None)
        value = None if phase is None else phase.quantile("p50").value
        return float(run.diagnosis.window.duration_ns if value is None else value)

    order = [sorted(range(len(side)), key=lambda i: (length(side[i]), i)) for side in (base, head)]
    return Sides(list(base), list(head), (order[0][(len(base) - 1) // 2], order[1][(len(head) - 1) // 2]))


def _main_phase(runs: Sequence[Run]) -> object:
    spent: dict[object, list[float]] = {}
    for run in runs:
        for phase in run.phases:
            if phase.steps and phase.steps.get("p50_ns") is not None:
                spent.setdefault(phase.key, []).append(float(phase.entry.get("total_ns") or 0))
    common = {key: sum(times) for key, times in spent.items() if len(times) == len(runs)}
    return max(common, key=lambda key: common[key], default=None)


def compare_sides(sides: Sides, tolerance: float = TOLERANCE, other_program: bool = False) -> Comparison:
    """What is different in HEAD, of one run or of several on each side."""
    before, after = sides.median_runs
    result = compare(before, after, tolerance, other_program)
    result.runs = [
        _figures(side, run, i == chosen)
        for side, runs, chosen in (("BASE", sides.base, sides.chosen[0]), ("HEAD", sides.head, sides.chosen[1]))
        for i, run in enumerate(runs)
    ]
    if len(result.runs) == 2:
        return result
    why = result.not_comparable or _odd_one(sides, other_program)
    if why is None:
        _over_runs(result, sides)
        result.headline = headline(result)
    else:
        withhold(result, why)
    return result


def _figures(side: str, run: Run, chosen: bool) -> RunFigures:
    verdict = run.diagnosis.verdict
    return RunFigures(
        side=side,
        name=run.name,
        chosen=chosen,
        window_ns=run.diagnosis.window.duration_ns,
        verdict=limit_words(verdict.cls, verdict.cause) or verdict.cls,
        phases=[
            RunPhase(
                phase_label(p.key),
                p.quantile("p50").value,
                p.quantile("p95").value,
                p.quantile("p99").value,
                p.mean_ns,
            )
            for p in run.phases
            if p.steps
        ],
    )


def _odd_one(sides: Sides, other_program: bool) -> NotComparable | None:
    """The first run that cannot be held against the median run of its side."""
    for side, runs, median in zip(("BASE", "HEAD"), (sides.base, sides.head), sides.median_runs, strict=True):
        for run in runs:
            if run is median:
                continue
            little = little_work(median, run, (f"{side}'s median run {median.name}", f"{side}'s run {run.name}"))
            if little is not None:
                return little
            different = None if other_program else _different(median, run)
            if different is not None:
                return NotComparable(
                    different.code, f"{run.name} against {median.name}, both {side}: {different.sentence}"
                )
    return None


def _different(one: Run, other: Run) -> NotComparable | None:
    if graphs_traced_whole(one) or graphs_traced_whole(other):
        return None
    pairs = matched_kernels(one.kernels, other.kernels)
    calls = [(sum(use.calls for use in uses if use is not None), how is not None) for _, how, *uses in pairs]
    return different_programs(share_in_common(calls))


# --- figures over runs -------------------------------------------------------------------------------------------------------


def _over_runs(result: Comparison, sides: Sides) -> None:
    """Put medians over the runs, and what the rank test says of them, in the place of the median runs' own figures."""
    for phase in result.phases:
        if phase.steps and phase.in_base and phase.in_head:
            base, head = (_phase_in(runs, phase.name) for runs in (sides.base, sides.head))
            _phase_over_runs(phase, base, head, result.tolerance_ratio)
            modes = _modes(phase.name, base, head)
            result.modes += [modes] if modes else []
    if result.steps is not None:
        every = [[run.steps for run in runs] for runs in (sides.base, sides.head)]
        _phase_over_runs(result.steps, every[0], every[1], result.tolerance_ratio)
    windows = [[float(run.diagnosis.window.duration_ns) for run in runs] for runs in (sides.base, sides.head)]
    first = sides.base[0]
    if result.steps is None and all(same_work(first, run) for run in [*sides.base, *sides.head]):
        result.window_ns = run_change(windows[0], windows[1], result.tolerance_ratio)
    result.measures = measure_changes(measures_of_all(sides.base), measures_of_all(sides.head))
    for side, runs, median in zip(("BASE", "HEAD"), (sides.base, sides.head), sides.median_runs, strict=True):
        odd = [run.name for run in runs if flag_changes(median, run)]
        if odd:
            result.notes.append(f"Not started alike: {', '.join(odd)} of {side} has other flags than {median.name}.")
    names = " and ".join(f"{run.name} ({side})" for side, run in zip(("BASE", "HEAD"), sides.median_runs, strict=True))
    result.notes.insert(
        0, f"Slices, kernels, copies, the limiter and the what-if are those of the median runs: {names}."
    )


def _phase_in(runs: Sequence[Run], name: str) -> list[PhaseRun | None]:
    return [next((p for p in run.phases if p.steps and phase_label(p.key) == name), None) for run in runs]


def _phase_over_runs(
    phase: PhaseChange, base: Sequence[PhaseRun | None], head: Sequence[PhaseRun | None], tolerance: float
) -> None:
    readers: dict[str, Callable[[PhaseRun], float | None]] = {
        f"{q}_ns": (lambda run, q=q: run.quantile(q).value)  # type: ignore[misc]
        for q in _QUANTILES
    }
    readers["mean_ns"] = lambda run: run.mean_ns
    for name, value_of in readers.items():
        values = [[None if run is None else value_of(run) for run in side] for side in (base, head)]
        setattr(phase, name, run_change(values[0], values[1], tolerance))


def _modes(name: str, base: Sequence[PhaseRun | None], head: Sequence[PhaseRun | None]) -> Modes | None:
    values = [[run.quantile("p50").value for run in side if run is not None] for side in (base, head)]
    found = two_modes(*([value for value in side if value is not None] for side in values))
    return None if found is None else Modes(name, found.low, found.high, list(found.base), list(found.head))


def run_change(base: Sequence[float | None], head: Sequence[float | None], tolerance: float) -> Change:
    """The medians over runs, and whether the runs of the sides differ; unknown where a run lacks the figure."""
    before, after = ([float(value) for value in side if value is not None] for side in (base, head))
    if len(before) < len(base) or len(after) < len(head):
        change = plain_change(None, None)
        change.reason = "not known of every run"
        return change
    change = plain_change(float(np.median(before)), float(np.median(after)))
    assert change.delta is not None and change.base is not None and change.head is not None
    small = is_small(change.delta, change.base, change.head, tolerance)
    change.p_value = rank_sum_p(before, after)
    if min(len(before), len(after)) < FEWEST_RUNS:
        change.reason = too_few(len(before), len(after))
    elif change.p_value >= LEVEL:
        change.direction, change.reason = SAME, f"within the spread of the runs, {p_words(change.p_value)}"
    elif small:
        change.direction, change.reason = SAME, f"less than {100 * tolerance:.3g} %"
    else:
        change.direction = LOWER if change.delta < 0 else HIGHER
    return change
