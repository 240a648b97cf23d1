"""The sections on the runs themselves: which they are, what differs in how they were started, and what likely made it."""

from __future__ import annotations

from infprof.compare.causes import flag_words
from infprof.compare.headline import arrow
from infprof.compare.model import Comparison, Modes, RunFigures, RunSummary
from infprof.compare.reports.sections import Section, Table
from infprof.reports import format as fmt

# Phases of which the table of runs has a column, those that take most time first.
_PHASES = 3


def runs_section(result: Comparison, phases: list[str]) -> Section:
    """Both runs in a line each; of several runs a table with the median step of each of the ``phases``."""
    several = not result.is_single
    lines = [_line("BASE", result.base, several), _line("HEAD", result.head, several)]
    table = None
    if several:
        table = _table(result.runs, phases[:_PHASES])
        lines += [_modes(modes) for modes in result.modes]
    if result.flags:
        lines.append(f"flags that differ: {fmt.clean('; '.join(map(flag_words, result.flags)))}")
    return Section("Runs", lines, table)


def causes_section(result: Comparison) -> Section:
    lines = []
    for cause in result.causes:
        remedies = f" Remedy: {'; '.join(cause.remedies)}." if cause.remedies else ""
        lines.append(fmt.clean(f"{cause.title}: {cause.sentence}.{remedies}"))
    return Section("Likely cause" + "s" * (len(lines) > 1), lines)


def _line(side: str, run: RunSummary, several: bool) -> str:
    steps = "no steps" if run.steps is None else f"{fmt.count(run.steps)} step{'s' * (run.steps != 1)}"
    gpus = f" on {fmt.clean(', '.join(dict.fromkeys(run.gpus)))}" if run.gpus else ""
    stored = ", stored diagnosis" if run.stored else ""
    return (
        f"{side}{', the median run' * several}: {fmt.clean(run.name)} ({fmt.clean(run.tool)}{stored}{gpus}): {steps} in "
        f"{fmt.duration(run.window_ns)}, limited by {run.verdict}"
    )


def _table(runs: list[RunFigures], phases: list[str]) -> Table:
    rows = []
    for run in runs:
        lengths = {phase.name: phase.p50_ns for phase in run.phases}
        figures = [fmt.duration(lengths.get(name)) for name in phases] or [fmt.duration(run.window_ns)]
        rows.append((run.side, fmt.clean(run.name), *figures, "median run" if run.chosen else ""))
    columns = [f"{fmt.clean(name)} p50" for name in phases] or ["window"]
    return Table(("", "run", *columns, ""), rows, names=2, gives=1)


def _modes(modes: Modes) -> str:
    """``decode: two modes, 30.3 and 38.5 ms; 3 and 2 runs of BASE, 3 and 2 of HEAD``."""
    lengths = arrow(modes.low_ns, modes.high_ns).replace(" → ", " and ")
    return (
        f"{fmt.clean(modes.phase)}: two modes, {lengths}; {modes.base[0]} and {modes.base[1]} runs of BASE, {modes.head[0]} and "
        f"{modes.head[1]} of HEAD. What is fixed when a process starts (placement, clocks) may differ between them"
    )
