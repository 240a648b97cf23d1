"""The first line: what happened, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from infprof.compare.model import HIGHER, LOWER, MOVED, SAME, UNKNOWN, Change, Comparison, PhaseChange
from infprof.reports import format as fmt

_MOST = 3
_LARGE = 0.2
_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))


def headline(result: Comparison) -> str:
    """``decode steps are 31 % faster (p50 12.1 → 8.40 ms); the limiter moved from launch calls to memory bandwidth``."""
    phases = stepped(result)
    if not phases:
        return f"{_windows(result)}; {result.limiter.sentence}."
    alike = _without_repetition(phases)
    parts = [*filter(None, map(_phrase, alike)), *filter(None, map(_unclear, alike))][:_MOST]
    if not parts:
        parts = [_no_difference(alike)]
    main = phases[0]
    limiter = result.limiter
    if main.limiter is not None and (len(phases) > 1 or main.limiter.status == MOVED):
        limiter = main.limiter
    sentence = limiter.sentence
    if len(phases) > 1 and limiter is main.limiter:
        sentence = f"for {main.name}, {sentence}"
    return f"{', '.join(parts)}; {sentence}."


def stepped(result: Comparison) -> list[PhaseChange]:
    """The phases with whole steps in both runs, the one that takes most time first."""
    both = [phase for phase in result.phases if phase.steps and phase.p50_ns.delta is not None]
    return sorted(both, key=lambda phase: -((phase.total_ns.base or 0) + (phase.total_ns.head or 0)))


def _without_repetition(phases: Sequence[PhaseChange]) -> list[PhaseChange]:
    """Of several GPUs or processes in which a phase changed alike, the first."""
    first: dict[tuple[str, str], PhaseChange] = {}
    for phase in phases:
        first.setdefault((phase.name.partition(", ")[0], phase.p50_ns.direction), phase)
    return list(first.values())


def _phrase(phase: PhaseChange) -> str | None:
    """What changed in the length of a phase's steps; None where nothing did."""
    name = phase.name if phase.name.startswith("steps") else f"{phase.name} steps"
    for label, change in (("p50", phase.p50_ns), ("p95", phase.p95_ns), ("p99", phase.p99_ns)):
        if change.direction in (LOWER, HIGHER):
            how = f"{amount(change)} {'faster' if change.direction == LOWER else 'slower'}"
            if label == "p50":
                return f"{name} are {how} (p50 {arrow(change.base, change.head)})"
            return f"the slowest {name} are {how} ({label} {arrow(change.base, change.head)})"
    return None


def _unclear(phase: PhaseChange) -> str | None:
    """A large change of which there are too few steps to call it one."""
    change = phase.p50_ns
    if change.direction != UNKNOWN or abs(change.change_ratio or 0.0) < _LARGE:
        return None
    by = "" if change.change_ratio is None else f"{signed_percent(change.change_ratio)}; "
    return f"{phase.name} p50 {arrow(change.base, change.head)} ({by}{change.reason})"


def _no_difference(phases: Sequence[PhaseChange]) -> str:
    lengths = ", ".join(f"{p.name} p50 {arrow(p.p50_ns.base, p.p50_ns.head)}" for p in phases[:_MOST])
    if phases[0].p50_ns.direction == UNKNOWN:
        return f"{lengths}: {phases[0].p50_ns.reason}"
    reason = phases[0].p50_ns.reason or ""
    beyond = (
        "beyond the spread of the steps"
        if not reason.startswith("less than")
        else f"of {reason.removeprefix('less than ')} or more"
    )
    return f"no difference {beyond} ({lengths})"


def _windows(result: Comparison) -> str:
    change = result.window_ns
    lengths = f"windows of {arrow(change.base, change.head)}"
    if change.direction in (LOWER, HIGHER):
        return f"the same number of kernels takes {amount(change)} {'less' if change.direction == LOWER else 'more'} time ({lengths})"
    if change.direction == SAME:
        return f"no difference in the time for the same number of kernels ({lengths})"
    return f"no steps to compare ({lengths})"


def amount(change: Change) -> str:
    """By how much, without a sign: per cent, or as a factor from twice on."""
    ratio = change.change_ratio
    if ratio is None:
        return "much"
    if ratio >= 1:
        return f"{1 + ratio:.1f} times" if ratio < 9.95 else f"{1 + ratio:.0f} times"
    size = 100 * abs(ratio)
    return f"{size:.0f} %" if size >= 9.95 else f"{size:.1f} %"


def arrow(before: float | None, after: float | None) -> str:
    """``12.1 → 8.40 ms``: two durations in one unit where they have one."""
    if before is None or after is None:
        return f"{fmt.duration(before)} → {fmt.duration(after)}"
    factor, unit = next((u for u in _UNITS if max(before, after) >= u[0]), _UNITS[-1])
    if min(before, after) < factor / 100 and min(before, after) > 0:
        return f"{fmt.duration(before)} → {fmt.duration(after)}"
    return f"{fmt.three_digits(before / factor)} → {fmt.three_digits(after / factor)} {unit}"


def signed_percent(ratio: float) -> str:
    """``+5.0 %``, with a minus sign where it is one."""
    size = 100 * abs(ratio)
    if ratio >= 10:
        return f"{1 + ratio:,.0f} times"
    return f"{'−' if ratio < 0 else '+'}{size:.1f} %" if size >= 0.05 else "0.0 %"
