"""Phases and steps in words, for every report: a row per phase, a line for a trace of one phase, and the slow steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infprof.reports import format as fmt
from infprof.reports import labels

if TYPE_CHECKING:
    from infprof.results import Diagnosis

# A trace of which one phase takes this share needs no table.
_WHOLE = 0.98
# A step is worth a line when it takes this much longer than the median step of its phase.
_SLOW = 1.25
_CHANGES = 3
_SMALL = 0.005
_MANY = 100
SLOW_COLUMNS = ("phase", "where", "length", "median", "what is different", "longest gaps")


@dataclass(frozen=True)
class PhaseRow:
    """A phase, or all steps together: how many, how long in all, and the length of one. None = not known."""

    name: str
    count: int | None
    total_ns: int | None
    p50_ns: int | None
    p95_ns: int | None
    p99_ns: int | None
    limit: str = ""
    told_by: str = ""


def phase_rows(diagnosis: Diagnosis, all_devices: bool = True) -> list[PhaseRow]:
    """A row per phase, start-up first, and one for all steps where several phases have some."""
    rows = []
    phases = _shown(diagnosis, all_devices)
    for phase in phases:
        steps = phase.get("steps") or {}
        name = clean_name(phase)
        lengths = (steps.get("p50_ns"), steps.get("p95_ns"), steps.get("p99_ns"))
        told_by = fmt.clean(phase.get("evidence") or "")
        rows.append(PhaseRow(name, phase.get("count"), phase.get("total_ns"), *lengths, _limit(phase), told_by))
    counts = [phase.get("count") or 0 for phase in phases if phase.get("steps")]
    # Of several devices or processes only one has its steps there.
    if diagnosis.steps and len(counts) != 1 and sum(counts) in (0, diagnosis.steps.get("count")):
        steps = diagnosis.steps
        lengths = (steps.get("p50_ns"), steps.get("p95_ns"), steps.get("p99_ns"))
        rows.append(PhaseRow("all steps", steps.get("count"), None, *lengths))
    return rows


def clean_name(phase: dict[str, Any]) -> str:
    """The name of a phase; that start-up lies outside the window is said with it."""
    outside = " (before)" if phase.get("in_window") is False else ""
    return f"{fmt.clean(phase.get('name', ''))}{outside}"


def one_phase(diagnosis: Diagnosis) -> str | None:
    """One sentence on the steps where the window is one phase of one device; else None."""
    inside = [phase for phase in _shown(diagnosis, True) if phase.get("in_window") is not False]
    window_ns = diagnosis.window.duration_ns
    largest = max(inside, key=lambda phase: phase.get("total_ns") or 0, default=None)
    if largest is None or (largest.get("total_ns") or 0) < _WHOLE * window_ns or not largest.get("steps"):
        return None
    if len(diagnosis.devices) > 1 or sum(bool(phase.get("steps")) for phase in inside) > 1:
        return None
    steps = largest["steps"]
    count = steps.get("count") or 0
    kind = "" if largest.get("kind") == "other" else f"{fmt.clean(largest.get('kind', ''))} "
    text = f"{fmt.count(count)} {kind}step{'s' * (count != 1)}, found by {fmt.clean(how_found(steps))}"
    # Of fewer steps the high percentiles are little else than the slowest one.
    shown = ("p50", "p95", "p99") if count >= _MANY else ("p50", "max")
    lengths = [f"{name} {fmt.duration(steps.get(f'{name}_ns'))}" for name in shown]
    if count > 1 and steps.get("p50_ns") is not None:
        text += f": {', '.join(lengths)}"
    each = each_step(steps)
    return f"{text}; {each}." if each else f"{text}."


def how_found(steps: dict[str, Any]) -> str:
    """How the steps were found, without the anchor, and with a doubt where there is one."""
    how = str(steps.get("how_found") or "").partition(" (")[0]
    confidence = steps.get("confidence")
    doubt = confidence is not None and confidence < 0.8
    return f"{how} (confidence {labels.confidence_words(confidence)})" if doubt and confidence is not None else how


def each_step(steps: dict[str, Any]) -> str:
    """What a step holds: ``183 kernels, 1 launch and 1 sync each``."""
    figures = [("kernels_per_step", "kernel"), ("launches_per_step", "launch"), ("syncs_per_step", "sync")]
    known = [(steps[key], word) for key, word in figures if steps.get(key) is not None]
    parts = [f"{fmt.count(value)} {word}{_plural(word, value)}" for value, word in known]
    return f"{', '.join(parts)} each" if parts else ""


def slow_lines(diagnosis: Diagnosis, most: int = 2) -> list[str]:
    """A line for the slowest step of each phase, where it is much slower than its median step."""
    lines: list[tuple[float, str]] = []
    for phase in _shown(diagnosis, False):
        for slow in ((phase.get("steps") or {}).get("slowest") or [])[:1]:
            excess = slow["duration_ns"] - slow["median_ns"]
            if slow["duration_ns"] >= _SLOW * slow["median_ns"]:
                lines.append((-excess, _slow_line(clean_name(phase), slow)))
    return [line for _, line in sorted(lines)[:most]]


def slow_values(diagnosis: Diagnosis) -> list[list[str]]:
    """A row of SLOW_COLUMNS for each of the slowest steps of every phase."""
    rows = []
    for phase in _shown(diagnosis, True):
        for slow in (phase.get("steps") or {}).get("slowest") or []:
            rows.append(
                [
                    clean_name(phase),
                    f"--window {fmt.window_argument(slow['start_ns'], slow['end_ns'])}",
                    fmt.duration(slow["duration_ns"]),
                    fmt.duration(slow["median_ns"]),
                    "; ".join(_changes(slow)),
                    "; ".join(_gaps(slow)),
                ]
            )
    return rows


def _slow_line(name: str, slow: dict[str, Any]) -> str:
    argument = fmt.window_argument(slow["start_ns"], slow["end_ns"])
    lengths = f"{fmt.duration(slow['duration_ns'])} against {fmt.duration(slow['median_ns'])}"
    of_phase = f" of {name}" if name != "steps" else ""
    return f"slowest step{of_phase}: {lengths} (--window {argument}): {'; '.join(_changes(slow))}"


def _changes(slow: dict[str, Any]) -> list[str]:
    """The largest differences to the median step: slices, then kernels."""
    excess = abs(slow["duration_ns"] - slow["median_ns"])
    slices = [s for s in slow["slices"] if abs(s["delta_ns"]) >= 0.05 * excess][:_CHANGES]
    kernels = [k for k in slow["kernels"] if abs(k["delta_ns"]) >= 0.05 * excess][:_CHANGES]
    parts = [f"{labels.slice_style(s['kind'], s['cause']).label} {_signed(s['delta_ns'])}" for s in slices]
    for kernel in kernels:
        more = kernel["count"] - kernel["median_count"]
        number = f" ({abs(more)} {'more' if more > 0 else 'fewer'})" if more else ""
        parts.append(f"{fmt.short_kernel_name(kernel['name'])}{number} {_signed(kernel['delta_ns'])}")
    return parts


def _gaps(slow: dict[str, Any]) -> list[str]:
    found = []
    for gap in slow["gaps"]:
        before = f" before {fmt.short_kernel_name(gap['before'])}" if gap["before"] else ""
        cause = labels.CAUSES.get(gap["cause"], gap["cause"])
        found.append(f"{fmt.duration(gap['end_ns'] - gap['start_ns'])} {cause}{before}")
    return found


def _limit(phase: dict[str, Any]) -> str:
    """The class and cause of a phase's verdict; empty where it has none."""
    verdict = phase.get("verdict")
    if not verdict:
        return ""
    title = labels.CLASSES.get(verdict["class"], verdict["class"])
    cause = verdict.get("cause")
    return fmt.clean(f"{title}: {labels.CAUSES.get(cause, cause)}" if cause else title)


def _shown(diagnosis: Diagnosis, all_devices: bool) -> list[dict[str, Any]]:
    """The phases of all devices, or of the one whose steps stand in ``steps``."""
    device = (diagnosis.steps or {}).get("device")
    rows = [p for p in diagnosis.phases if all_devices or device is None or p.get("device") in (None, device)]
    # What lies between steps is worth a row only where it is some of the window.
    few = _SMALL * diagnosis.window.duration_ns
    return [
        p for p in rows if p.get("steps") or (p.get("total_ns") or 0) >= few or p.get("kind") not in ("idle", "other")
    ]


def _signed(ns: int) -> str:
    return f"{'+' if ns > 0 else '−'}{fmt.duration(abs(ns))}"


def _plural(word: str, value: float) -> str:
    return "" if value == 1 else "es" if word.endswith("ch") else "s"
