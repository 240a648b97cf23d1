"""What a comparison says, in sections of sentences and tables that the text and the Markdown report both show."""

from __future__ import annotations

from infprof.compare.headline import ONE_RUN_EACH, arrow, family_words, signed, signed_percent, stepped
from infprof.compare.model import (
    HIGHER,
    LOWER,
    SAME,
    UNKNOWN,
    Change,
    Comparison,
    KernelChange,
    MeasureChange,
    PhaseChange,
    Replaced,
)
from infprof.compare.rank_test import p_words
from infprof.compare.reports.run_sections import causes_section, runs_section
from infprof.compare.reports.sections import Section, Table
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


_COPIES = {
    "h2d": "to the GPU",
    "d2h": "to the host",
    "d2d": "in the GPU",
    "p2p": "to a GPU",
    "uvm": "of managed memory",
}


def sections(result: Comparison) -> list[Section]:
    """All sections that have something to say."""
    names = [phase.name for phase in stepped(result)]
    found = [
        runs_section(result, names),
        causes_section(result),
        *(_phase(phase, result) for phase in stepped(result)),
        *_other_phases(result),
    ]
    found += [_kernels(result), _foretold(result), _measures(result), _gates(result), _notes(result)]
    return [section for section in found if section.lines or (section.table and section.table.rows)]


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
    rows += _copy_rows(phase)
    rows += _slice_rows(phase)
    table = Table(("", "BASE", "HEAD", "change", "99 % interval" if result.is_single else "rank test"), rows)
    lines = []
    if phase.limiter is not None and len(stepped(result)) > 1:
        lines.append(phase.limiter.sentence[0].upper() + phase.limiter.sentence[1:] + ".")
    return Section(title, lines, table)


def _lengths(phase: PhaseChange) -> list[tuple[str, Change]]:
    return [("p50", phase.p50_ns), ("p95", phase.p95_ns), ("p99", phase.p99_ns), ("mean", phase.mean_ns)]


def _length(name: str, change: Change) -> tuple[str, ...]:
    if change.p_value is not None:
        few = "too few runs" if change.direction == UNKNOWN else p_words(change.p_value)
        same = " (same)" if change.direction == SAME else ""
        return name, fmt.duration(change.base), fmt.duration(change.head), _ratio(change), few + same
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


def _copy_rows(phase: PhaseChange) -> list[tuple[str, ...]]:
    """Number and bytes of copies per step, where they differ."""
    rows: list[tuple[str, ...]] = []
    for item in phase.copies or ():
        where = _COPIES.get(item.kind, item.kind)
        pairs = ((f"copies {where} per step", item.base_count, item.head_count, _count),
                 (f"bytes {where} per step", item.base_bytes, item.head_bytes, fmt.size))  # fmt: skip
        for name, was, now, words in pairs:
            if was is not None and now is not None and abs(now - was) > _SMALL * max(was, now):
                change = "new" if not was else "gone" if not now else signed_percent(now / was - 1)
                rows.append((name, words(was), words(now), change, ""))
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
    said = result.kernels_off is None or result.not_comparable is not None
    lines = [] if said else [f"Not compared: {result.kernels_off}"]
    lines += [_replaced(row, several) for row in result.replaced]
    if len(changed) > len(rows):
        lines.append(f"{len(changed) - len(rows)} more differ; --json lists them.")
    return Section(
        f"Kernels that changed, per {per}",
        lines,
        Table(("", "kernel", *["phase"] * several, "BASE", "HEAD", "change", "calls"), rows, 2 + several, gives=1),
    )


def _replaced(row: Replaced, several: bool) -> str:
    """``gemm: marlin → awq, 5.10 → 31.0 ms (+25.9 ms)``."""
    where = f" in {fmt.clean(row.phase or '')}" if several else ""
    return (
        f"{row.kernel_class}{where}: {fmt.clean(family_words(row))}, {arrow(row.base_ns, row.head_ns)} "
        f"({signed(row.delta_ns)})"
    )


def _kernel(row: KernelChange, several: bool) -> tuple[str, ...]:
    name = fmt.short_kernel_name(row.name)
    phase = [fmt.clean(row.phase or "")] if several else []
    was, now = ("–" if ns is None else fmt.duration(ns) for ns in (row.base_ns, row.head_ns))
    calls = [_calls(value) for value in (row.base_calls, row.head_calls)]
    said = calls[0] if calls[0] == calls[1] else " → ".join(calls)
    return _WORDS.get(row.what, row.what), name, *phase, was, now, signed(row.delta_ns), said


def _foretold(result: Comparison) -> Section:
    lines = [result.foretold.sentence] if result.not_comparable is None else []
    return Section("Did the what-if of BASE foretell it?", lines)


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


def gate_lines(result: Comparison) -> list[str]:
    """A line for each condition: whether it holds, and why."""
    words = {True: "FAILS", False: "passes", None: "NOT JUDGED"}
    return [f"{words[gate.holds]}: {gate.text} ({gate.detail})" for gate in result.gates]


def _gates(result: Comparison) -> Section:
    return Section("Gates", gate_lines(result))


def _notes(result: Comparison) -> Section:
    alone = [f"{ONE_RUN_EACH[0].upper()}{ONE_RUN_EACH[1:]} (--base-run, --head-run)."]
    alone = alone if result.is_single and result.not_comparable is None else []
    return Section("Notes", [fmt.clean(note) for note in [*result.notes, *alone]])


def _ratio(change: Change) -> str:
    return "" if change.change_ratio is None else signed_percent(change.change_ratio)


def _count(value: float | None) -> str:
    return fmt.NOT_KNOWN if value is None else fmt.count(value)


def _calls(value: float | None) -> str:
    return "0" if value is None else fmt.count(round(value, 1))
