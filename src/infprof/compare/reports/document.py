"""What a comparison says, in sections of sentences and tables that the text and the Markdown report both show."""

from __future__ import annotations

from dataclasses import dataclass, field

from infprof.compare.headline import signed_percent, stepped
from infprof.compare.model import (
    HIGHER,
    LOWER,
    Change,
    Comparison,
    KernelChange,
    MeasureChange,
    PhaseChange,
    RunSummary,
)
from infprof.reports import format as fmt
from infprof.reports import labels

_KERNELS, _SLICES, _MEASURES = 10, 5, 8
# A slice whose change is less than this share of the step is left to the JSON.
_SMALL = 0.005
_MOVED_RATIO, _MOVED_SHARE = 0.05, 0.1
_STATISTICS = ("_p50_", "_p95_", "_p99_", "_mean_", "_max_", "_per_")
# Units of measures that do not grow with the window.
_RATES = ("ratio", "per_s", "bytes_per_s", "watts", "celsius", "mhz")
# What the tables of phases show already.
_SHOWN = (
    "step_",
    "idle_",
    "exposed_",
    "compute_",
    "busy_",
    "recoverable_",
    "window_",
    "sync_call_per_s",
    "small_kernel_per_s",
)
_WORDS = {
    "faster": "faster",
    "slower": "slower",
    "more-calls": "more calls",
    "fewer-calls": "fewer calls",
    "came": "came",
    "went": "went",
    "unknown": "unclear",
}


@dataclass
class Table:
    """The first ``names`` columns are text, the others figures; column ``gives`` gives way where a line is too long."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    names: int = 1
    gives: int = 0


@dataclass
class Section:
    title: str
    lines: list[str] = field(default_factory=list)
    table: Table | None = None


def sections(result: Comparison) -> list[Section]:
    """All sections that have something to say."""
    found = [_runs(result), *(_phase(phase, result) for phase in stepped(result)), *_other_phases(result)]
    found += [_kernels(result), _foretold(result), _measures(result), _gates(result), _notes(result)]
    return [section for section in found if section.lines or (section.table and section.table.rows)]


def _runs(result: Comparison) -> Section:
    def line(side: str, run: RunSummary) -> str:
        steps = "no steps" if run.steps is None else f"{fmt.count(run.steps)} step{'s' * (run.steps != 1)}"
        gpus = f" on {fmt.clean(', '.join(dict.fromkeys(run.gpus)))}" if run.gpus else ""
        stored = ", stored diagnosis" if run.stored else ""
        return (
            f"{side}: {fmt.clean(run.name)} ({fmt.clean(run.tool)}{stored}{gpus}): {steps} in "
            f"{fmt.duration(run.window_ns)}, limited by {run.verdict}"
        )

    return Section("Runs", [line("BASE", result.base), line("HEAD", result.head)])


def _phase(phase: PhaseChange, result: Comparison) -> Section:
    title = f"Steps: {fmt.clean(phase.name)}" if not phase.name.startswith("steps") else "Steps"
    rows: list[tuple[str, ...]] = [_length(name, change) for name, change in _lengths(phase)]
    rows.append(("number of steps", _count(phase.count.base), _count(phase.count.head), "", ""))
    for name, change in (
        ("kernels per step", phase.kernels_per_step),
        ("launches per step", phase.launches_per_step),
        ("syncs per step", phase.syncs_per_step),
    ):
        if change.delta and abs(change.delta) >= _SMALL * max(abs(change.base or 0), abs(change.head or 0)):
            rows.append((name, _count(change.base), _count(change.head), _ratio(change), ""))
    rows += _slice_rows(phase)
    table = Table(("", "BASE", "HEAD", "change", "99 % interval"), rows)
    lines = []
    if phase.limiter is not None and len(stepped(result)) > 1:
        lines.append(phase.limiter.sentence[0].upper() + phase.limiter.sentence[1:] + ".")
    return Section(title, lines, table)


def _lengths(phase: PhaseChange) -> list[tuple[str, Change]]:
    return [("p50", phase.p50_ns), ("p95", phase.p95_ns), ("p99", phase.p99_ns), ("mean", phase.mean_ns)]


def _length(name: str, change: Change) -> tuple[str, ...]:
    interval = "too few steps" if (change.reason or "").startswith("too few whole steps") else ""
    if change.low is not None and change.high is not None and change.base:
        interval = f"{signed_percent(change.low / change.base)} to {signed_percent(change.high / change.base)}"
        if change.direction not in (LOWER, HIGHER):
            interval += " (same)"
    return name, fmt.duration(change.base), fmt.duration(change.head), _ratio(change), interval


def _slice_rows(phase: PhaseChange) -> list[tuple[str, ...]]:
    step = max(phase.mean_ns.base or 0.0, phase.mean_ns.head or 0.0)
    rows: list[tuple[str, ...]] = []
    for item in phase.slices[:_SLICES]:
        if abs(item.delta_ns) >= _SMALL * step:
            label = labels.slice_style(item.kind, item.cause).label
            was, now = fmt.duration(item.base_ns), fmt.duration(item.head_ns)
            rows.append((label, was, now, signed(item.delta_ns), ""))
    return rows


def _other_phases(result: Comparison) -> list[Section]:
    """Phases that are in one run only, and what is outside of steps."""
    rows: list[tuple[str, ...]] = []
    for phase in result.phases:
        if (phase.in_base and phase.in_head and phase.steps) or phase.kind == "load":
            continue
        window = min(result.window_ns.base or 0, result.window_ns.head or 0)
        most = max(phase.total_ns.base or 0, phase.total_ns.head or 0)
        if most >= _SMALL * window:
            absent = "–"
            was = fmt.duration(phase.total_ns.base) if phase.in_base else absent
            now = fmt.duration(phase.total_ns.head) if phase.in_head else absent
            rows.append((fmt.clean(phase.name), was, now, _ratio(phase.total_ns)))
    return [Section("Other parts of the window", table=Table(("", "BASE", "HEAD", "change"), rows))]


def _kernels(result: Comparison) -> Section:
    several = len({row.phase for row in result.kernels}) > 1
    changed = [row for row in result.kernels if row.what != "same"]
    rows = [_kernel(row, several) for row in changed[:_KERNELS]]
    per = "step" if stepped(result) else "window"
    lines = [] if result.kernels_off is None else [f"Not compared: {result.kernels_off}"]
    lines += _replaced(changed)
    if len(changed) > len(rows):
        lines.append(f"{len(changed) - len(rows)} more differ; --json lists them.")
    return Section(
        f"Kernels that changed, per {per}",
        lines,
        Table(("", "kernel", *["phase"] * several, "BASE", "HEAD", "change", "calls"), rows, 2 + several, gives=1),
    )


def _replaced(changed: list[KernelChange]) -> list[str]:
    """A line for each class of which kernels both came and went: the ones may do the work of the others."""
    lines = []
    for kind in dict.fromkeys((row.kernel_class, row.phase) for row in changed if row.what == "went"):
        mine = [row for row in changed if (row.kernel_class, row.phase) == kind]
        came = [row.head_ns or 0.0 for row in mine if row.what == "came"]
        went = [row.base_ns or 0.0 for row in mine if row.what == "went"]
        if came:
            lines.append(
                f"{kind[0]}: what went took {fmt.duration(sum(went))}, what came takes {fmt.duration(sum(came))} "
                f"({signed(sum(came) - sum(went))})"
            )
    return lines


def _kernel(row: KernelChange, several: bool) -> tuple[str, ...]:
    name = fmt.short_kernel_name(row.name)
    phase = [fmt.clean(row.phase or "")] if several else []
    was, now = ("–" if ns is None else fmt.duration(ns) for ns in (row.base_ns, row.head_ns))
    calls = [_calls(value) for value in (row.base_calls, row.head_calls)]
    said = calls[0] if calls[0] == calls[1] else " → ".join(calls)
    return _WORDS.get(row.what, row.what), name, *phase, was, now, signed(row.delta_ns), said


def _foretold(result: Comparison) -> Section:
    return Section("Did the what-if of BASE foretell it?", [result.foretold.sentence])


def _measures(result: Comparison) -> Section:
    moved = sorted((row for row in result.measures if _has_moved(row)), key=lambda row: -_size(row))[:_MEASURES]
    rows: list[tuple[str, ...]] = []
    for row in moved:
        was, now = fmt.value_with_unit(row.base, row.unit), fmt.value_with_unit(row.head, row.unit)
        change = "" if row.change_ratio is None or row.unit == "ratio" else signed_percent(row.change_ratio)
        rows.append((row.name, was, now, change))
    return Section("Measures that moved", table=Table(("", "BASE", "HEAD", "change"), rows))


def _has_moved(row: MeasureChange) -> bool:
    if row.scope != "window" or row.delta is None or row.name.startswith(_SHOWN):
        return False
    if row.unit not in _RATES and not any(word in row.name for word in _STATISTICS):
        return False
    if row.unit == "ratio":
        return abs(row.delta) >= _MOVED_RATIO
    return row.change_ratio is not None and abs(row.change_ratio) >= _MOVED_SHARE


def _size(row: MeasureChange) -> float:
    return abs(row.delta or 0.0) if row.unit == "ratio" else min(abs(row.change_ratio or 0.0), 1.0)


def _gates(result: Comparison) -> Section:
    words = {True: "FAILS", False: "passes", None: "NOT JUDGED"}
    return Section("Gates", [f"{words[gate.holds]}: {gate.text} ({gate.detail})" for gate in result.gates])


def _notes(result: Comparison) -> Section:
    return Section("Notes", [fmt.clean(note) for note in result.notes])


def _ratio(change: Change) -> str:
    return "" if change.change_ratio is None else signed_percent(change.change_ratio)


def signed(ns: float) -> str:
    """A difference in time with its sign."""
    return "0" if round(ns) == 0 else f"{'+' if ns > 0 else '−'}{fmt.duration(abs(ns))}"


def _count(value: float | None) -> str:
    return fmt.NOT_KNOWN if value is None else fmt.count(value)


def _calls(value: float | None) -> str:
    return "0" if value is None else fmt.count(round(value, 1))
