"""``--fail-on`` of compare: a condition on how a measure of HEAD differs from that of BASE.

::

    step_p50_ns[phase=decode] > +5%       HEAD's is more than 5 % above BASE's
    step_p50_ns[phase=decode] > 2ms       HEAD's is more than 2 ms above BASE's
    dram_read_ratio < -0.1                HEAD's is more than 0.1 below BASE's

Every condition is on the difference, HEAD less BASE: a per cent is of BASE's value, a number is in the measure's own unit or
in the one that is written. In brackets ``phase=NAME`` and ``device=N`` (by order, from 0); without them the window.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from infprof.compare.figures import Place, in_all, is_whole_window, phase_names, placed
from infprof.compare.headline import ONE_RUN_EACH, arrow, signed_percent
from infprof.compare.model import SAME, Comparison, GateResult
from infprof.compare.rank_test import FEWEST_RUNS, LEVEL, p_words, rank_sum_p, too_few
from infprof.compare.runs import Run
from infprof.errors import UsageError
from infprof.measures.names import MEASURES
from infprof.rules.expression import unknown

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_GATE = re.compile(
    r"\s*(?P<name>[A-Za-z_]\w*)\s*(?:\[(?P<place>[^\]]*)\])?\s*(?P<op>[<>]=?)\s*(?P<number>[+-]?(?:\d+\.?\d*|\.\d+))"
    r"\s*(?P<unit>[%µA-Za-z]*)\s*"
)
# Unit of a measure → what may be written behind the number, and what it is worth.
_UNITS: dict[str, dict[str, float]] = {
    "ns": {"ns": 1, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9},
    "bytes": {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
}
_EXAMPLE = 'write NAME > +5%, such as "step_p50_ns[phase=decode] > +5%"'


@dataclass(frozen=True)
class Gate:
    """A parsed condition. ``limit`` is a ratio where ``relative``, else in the unit of the measure."""

    text: str
    name: str
    phase: str | None
    device: int | None
    op: str
    limit: float
    relative: bool


def parse_gate(text: str) -> Gate:
    """Raises UsageError for anything but a condition on a known measure, with the nearest name."""
    match = _GATE.fullmatch(text)
    if match is None:
        raise UsageError(f"--fail-on {text}: {_EXAMPLE}.")
    name = match["name"]
    if name not in MEASURES:
        raise UsageError(f"--fail-on {text}: {unknown('measure', name, MEASURES)}")
    phase, device = _place(text, match["place"])
    unit, number = match["unit"], float(match["number"])
    if unit == "%":
        return Gate(text.strip(), name, phase, device, match["op"], number / 100, True)
    units = _UNITS.get(MEASURES[name].unit, {})
    if unit and unit not in units:
        known = ", ".join(["%", *units])
        raise UsageError(
            f"--fail-on {text}: {name} has no unit {unit}; write {known}, or a number in {MEASURES[name].unit}."
        )
    return Gate(text.strip(), name, phase, device, match["op"], number * units.get(unit, 1.0), False)


def _place(text: str, place: str | None) -> tuple[str | None, int | None]:
    phase: str | None = None
    device: int | None = None
    for part in filter(None, (part.strip() for part in (place or "").split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key == "phase" and value:
            phase = value.strip("'\"")
        elif key == "device" and value.isdecimal():
            device = int(value)
        else:
            raise UsageError(f"--fail-on {text}: in brackets write phase=NAME or device=N, not {part}.")
    return phase, device


def judge(gates: Sequence[Gate], result: Comparison, base: Sequence[Run], head: Sequence[Run]) -> list[GateResult]:
    """The outcome of each gate, by medians over the runs of each side; of runs that are not comparable none is judged.

    Raises UsageError for a phase that neither run has.
    """
    judged = [_judge(gate, result, base, head) for gate in gates]
    if result.not_comparable is not None:
        return [GateResult(gate.text, None, f"not comparable: {result.not_comparable.sentence}") for gate in judged]
    return judged


def _judge(gate: Gate, result: Comparison, base: Sequence[Run], head: Sequence[Run]) -> GateResult:
    known = list(dict.fromkeys(name for run in (*base, *head) for name in phase_names(run)))
    if gate.phase is not None and gate.phase not in known:
        hint = unknown("phase", gate.phase, known)
        raise UsageError(
            f"--fail-on {gate.text}: {hint if hint.endswith('?') else f'{hint}; there are: {_listed(known)}.'}"
        )
    before, after = _values(gate, base), _values(gate, head)
    places = [place for place in before if place in after]
    if not places:
        missing = [side for side, values in (("BASE", before), ("HEAD", after)) if not values]
        where = f" of {gate.phase}" if gate.phase else ""
        return GateResult(
            gate.text,
            None,
            f"{' and '.join(missing) or 'no GPU of both'} {'have' if len(missing) > 1 else 'has'} no {gate.name}{where}",
        )
    middle = [{place: float(np.median(values[place])) for place in places} for values in (before, after)]
    # The one that is furthest over the limit speaks.
    sign = 1 if gate.op.startswith(">") else -1
    worst = max(places, key=lambda place: sign * _difference(gate, middle[0][place], middle[1][place]))
    was, now = middle[0][worst], middle[1][worst]
    holds = _OPERATORS[gate.op](_difference(gate, was, now), gate.limit)
    detail = _detail(gate, worst, was, now, len(places) > 1)
    if result.is_single:
        detail += _chance(gate, result) + (f"; {ONE_RUN_EACH}" if holds else "")
    else:
        detail += _spread(before[worst], after[worst])
    return GateResult(gate.text, holds, detail)


def _values(gate: Gate, runs: Sequence[Run]) -> dict[Place, list[float]]:
    """Of each place the value of every run; places that a run lacks are left out."""
    return in_all([_values_of(gate, run) for run in runs])


def _values_of(gate: Gate, run: Run) -> dict[Place, float]:
    phase = gate.phase
    if phase is not None and not any(name == gate.name and place.phase == phase for name, place in placed(run)):
        # Of a phase that is the window no more is kept than of the window.
        phase = None if is_whole_window(run, phase) else phase
    found = {}
    for (name, place), measure in placed(run).items():
        mine = name == gate.name and place.phase == phase and gate.device in (None, place.device)
        if mine and measure.value is not None:
            found[place._replace(phase=gate.phase)] = float(measure.value)
    return found


def _spread(base: Sequence[float], head: Sequence[float]) -> str:
    """Whether the runs of the sides differ at all."""
    if min(len(base), len(head)) < FEWEST_RUNS:
        return f"; {too_few(len(base), len(head))}"
    p = rank_sum_p(base, head)
    return f"; medians of {len(base)} + {len(head)} runs, {'' if p < LEVEL else 'within their spread, '}{p_words(p)}"


def _difference(gate: Gate, before: float, after: float) -> float:
    if not gate.relative:
        return after - before
    if before:
        return (after - before) / abs(before)
    return 0.0 if after == before else math.copysign(math.inf, after)


def _detail(gate: Gate, place: Place, before: float, after: float, several: bool) -> str:
    from infprof.reports import format as fmt

    unit = MEASURES[gate.name].unit
    if unit == "ns":
        values = arrow(before, after)
    else:
        values = f"{fmt.value_with_unit(before, unit)} → {fmt.value_with_unit(after, unit)}"
    ratio = _difference(gate, before, after) if gate.relative else ((after - before) / abs(before) if before else None)
    change = "" if ratio is None or math.isinf(ratio) else f", {signed_percent(ratio)}"
    where = f" ({place.words})" if several else ""
    return f"{values}{change}{where}"


def _chance(gate: Gate, result: Comparison) -> str:
    """That a difference in the length of steps is within their spread."""
    quantile = {"step_p50_ns": "p50_ns", "step_p95_ns": "p95_ns", "step_p99_ns": "p99_ns"}.get(gate.name)
    phase = next((p for p in result.phases if p.name == gate.phase), result.steps if gate.phase is None else None)
    if quantile is None or phase is None:
        return ""
    change = getattr(phase, quantile)
    return f"; {change.reason}" if change.reason and (change.direction == SAME or change.low is None) else ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
