"""The first line: what happened, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from infprof.compare.model import HIGHER, LOWER, MOVED, SAME, UNKNOWN, Change, Comparison, PhaseChange, Replaced
from infprof.reports import format as fmt

_MOST = 3
_LARGE = 0.2
# Families of a class that are named, and the share of a change from which kernels that gave way to others explain it.
_FAMILIES, _EXPLAINS = 2, 0.5
ONE_RUN_EACH = "one run each: cannot tell a regression from run-to-run spread"
_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))


def headline(result: Comparison) -> str:
    """``decode steps are 3.72 ms faster (−31 %; p50 12.1 → 8.40 ms); the limiter moved from launch calls to memory bandwidth``."""
    phases = stepped(result)
    if result.is_single and _is_identical(result):
        return f"no change: all figures of both runs are the same ({_same_lengths(result, phases)})."
    if not phases:
        return f"{_windows(result)}; {result.limiter.sentence}{_remark(result, result.window_ns)}."
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
    remark = _remark(result, *(change for p in alike for change in (p.p50_ns, p.p95_ns, p.p99_ns)))
    found = [", ".join(parts), _mode_words(result, main.name), _why(result, main), sentence]
    return f"{'; '.join(filter(None, found))}{remark}."


def _remark(result: Comparison, *changes: Change) -> str:
    """What one run of each side cannot tell, where it shows a difference."""
    differ = any(change.direction in (LOWER, HIGHER) for change in changes)
    return f"; {ONE_RUN_EACH}" if differ and result.is_single else ""


def _mode_words(result: Comparison, phase: str) -> str | None:
    """``two modes, 30.3 and 38.5 ms, in both``."""
    modes = next((modes for modes in result.modes if modes.phase == phase), None)
    if modes is None:
        return None
    sides = [side for side, counts in (("BASE", modes.base), ("HEAD", modes.head)) if min(counts)]
    where = "both" if len(sides) == 2 else sides[0]
    return f"two modes, {arrow(modes.low_ns, modes.high_ns).replace(' → ', ' and ')}, in {where}"


def _why(result: Comparison, main: PhaseChange) -> str | None:
    """Kernels of other families that make most of the change of the main phase, and the likely cause."""
    change = main.p50_ns
    if change.direction not in (LOWER, HIGHER) or not change.delta:
        return None
    likely = f"likely cause: {result.causes[0].title}" if result.causes else None
    return ", ".join(filter(None, [_families(result, main, change.delta), likely])) or None


def _families(result: Comparison, main: PhaseChange, delta: float) -> str | None:
    for row in result.replaced:
        same = [item.family for item in row.base] == [item.family for item in row.head]
        if row.phase in (main.name, None) and not same and row.delta_ns / delta >= _EXPLAINS:
            return f"{row.kernel_class} kernels changed ({family_words(row)}, {signed(row.delta_ns)} a step)"
    return None


def _is_identical(result: Comparison) -> bool:
    """Whether every figure that both runs have is the same: one run twice."""
    changes = [
        result.window_ns,
        *(c for p in result.phases for c in (p.p50_ns, p.p95_ns, p.p99_ns, p.mean_ns, p.count)),
    ]
    return (
        all(change.base == change.head for change in changes)
        and all(row.matched and row.delta_ns == 0 for row in result.kernels)
        and all(row.delta == 0 or row.base == row.head for row in result.measures)
        and result.limiter.status != MOVED
    )


def _same_lengths(result: Comparison, phases: Sequence[PhaseChange]) -> str:
    known = [f"{p.name} p50 {fmt.duration(p.p50_ns.base)}" for p in phases[:_MOST]]
    return ", ".join(known) or f"windows of {fmt.duration(result.window_ns.base)}"


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
            how = f"{fmt.duration(abs(change.delta or 0.0))} {'faster' if change.direction == LOWER else 'slower'}"
            said = f"{how} ({_relative(change)}; {label} {arrow(change.base, change.head)})"
            return f"{name} are {said}" if label == "p50" else f"the slowest {name} are {said}"
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
    reason = phases[0].p50_ns.reason or ""
    if phases[0].p50_ns.direction == UNKNOWN:
        return f"{lengths}: {reason}"
    if phases[0].p50_ns.p_value is not None:
        return f"no significant change ({lengths}; {reason})"
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


def _relative(change: Change) -> str:
    """``−12 %``, or from twice on ``4.7 times as long``."""
    ratio = change.change_ratio
    if ratio is None or ratio >= 1:
        return "much longer" if ratio is None else f"{amount(change)} as long"
    return f"{'−' if ratio < 0 else '+'}{amount(change)}"


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


def signed(ns: float) -> str:
    """A difference in time with its sign."""
    return "0" if round(ns) == 0 else f"{'+' if ns > 0 else '−'}{fmt.duration(abs(ns))}"


def family_words(row: Replaced) -> str:
    """``marlin → awq``, or that other kernels of the same families run."""
    sides = [" and ".join(item.family for item in side[:_FAMILIES]) for side in (row.base, row.head)]
    return f"other kernels of {sides[0]}" if sides[0] == sides[1] else " → ".join(sides)
