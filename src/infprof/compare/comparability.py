"""Whether two runs can be held against each other: both worked on the GPU, about as much, and have kernels in common."""

from __future__ import annotations

from collections.abc import Sequence

from infprof.compare.model import UNKNOWN, Change, Comparison, Foretold, NotComparable, PhaseChange
from infprof.compare.runs import Run
from infprof.reports import format as fmt

# A run with less than this share of the other's kernels (or steps) did not do the same work.
LITTLE = 0.1
# In runs of one program at least this share of the calls is of kernels that both have; below it a note says so.
COMMON = 0.2
# Below this share they are taken for different programs.
DIFFERENT = 0.05
LITTLE_WORK, DIFFERENT_PROGRAMS = "little-work", "different-programs"
_SIDES = ("BASE", "HEAD")
# What a kernel's change says of its own run alone.
_FACTS = ("came", "went", "same")


def graphs_traced_whole(run: Run) -> bool:
    """Whether CUDA graphs hide the kernels that ran in them."""
    return any(problem.code == "graphs-traced-whole" for problem in run.diagnosis.problems)


def little_work(base: Run, head: Run, sides: tuple[str, str] = _SIDES) -> NotComparable | None:
    """That one run has hardly any of the other's kernels in its window: what it did not do takes no time. ``sides``: what the
    sentence calls them.

    A program whose steps are found in both runs may well need fewer kernels for each, and whole graphs hide theirs.
    """
    runs = (base, head)
    counts = [sum(device.kernels.count for device in run.diagnosis.devices) for run in runs]
    if min(counts) >= LITTLE * max(counts) or any(map(graphs_traced_whole, runs)) or _as_many_steps(base, head):
        return None
    less = counts.index(min(counts))
    said = [
        f"{fmt.count(count)} GPU kernel{'s' * (count != 1)} in {fmt.duration(run.diagnosis.window.duration_ns)}"
        for count, run in zip(counts, runs, strict=True)
    ]
    return NotComparable(
        LITTLE_WORK,
        f"{sides[less]} has {said[less]}, {sides[1 - less]} {said[1 - less]}: compare equal stretches of both "
        f"(--window A:B), or record {sides[less]} again",
    )


def _as_many_steps(base: Run, head: Run) -> bool:
    """Whether phases of steps that both have hold a number of them of the same order."""
    counts: list[float] = [0.0, 0.0]
    steps = [{phase.key: float(phase.entry["count"]) for phase in run.phases if phase.steps} for run in (base, head)]
    for key in steps[0].keys() & steps[1].keys():
        counts = [counts[0] + steps[0][key], counts[1] + steps[1][key]]
    return min(counts) > 0 and min(counts) >= LITTLE * max(counts)


def share_in_common(calls: Sequence[tuple[float, bool]]) -> float | None:
    """The share of all calls that are of kernels in both runs, of (calls, in both) of each; None where there are none.

    By calls, not by time: another precision or library replaces the few kernels that take most of the time.
    """
    every = sum(count for count, _ in calls)
    return sum(count for count, in_both in calls if in_both) / every if every else None


def different_programs(share: float | None) -> NotComparable | None:
    """That the runs have hardly a kernel in common."""
    if share is None or share >= DIFFERENT:
        return None
    said = "<1 %" if 0 < share < 0.01 else f"{100 * share:.0f} %"
    return NotComparable(
        DIFFERENT_PROGRAMS,
        f"kernels in common {said} of all calls, which looks like different programs or models: if that is meant (another engine, "
        "compiler or vendor), add --different-programs",
    )


def nothing_foretold() -> Foretold:
    """What stands for the what-if of runs that are not comparable."""
    return Foretold("no-prediction", "Not comparable.")


def withhold(result: Comparison, why: NotComparable) -> None:
    """Take back, in place, what the comparison claims: figures of either run stay, nothing is called a difference."""
    result.not_comparable = why
    result.causes = []
    reason = f"not comparable: {why.sentence}"
    for phase in [*result.phases, *filter(None, [result.steps])]:
        for change in _changes(phase):
            _take_back(change)
        if phase.limiter is not None:
            phase.limiter.status, phase.limiter.sentence = UNKNOWN, "not comparable"
    _take_back(result.window_ns)
    for row in result.kernels:
        row.what = row.what if row.what in _FACTS else "unknown"
    result.limiter.status = UNKNOWN
    result.limiter.sentence = f"BASE is limited by {result.base.verdict}, HEAD by {result.head.verdict}"
    result.foretold = nothing_foretold()
    result.headline = f"{reason}."


def _changes(phase: PhaseChange) -> list[Change]:
    return [value for value in vars(phase).values() if isinstance(value, Change)]


def _take_back(change: Change) -> None:
    change.direction, change.reason = UNKNOWN, "not comparable"
    change.low = change.high = None
