"""The chain of fixes as bars: what is left of the recorded time after each, and what that fix takes away."""

from __future__ import annotations

from dataclasses import dataclass

from infprof.reports import format as fmt
from infprof.reports import labels
from infprof.results import VERDICT_CLASSES, Diagnosis, Verdict


@dataclass(frozen=True)
class WaterfallRow:
    """One bar: ``left`` and ``won`` are percentages of the recorded time, ``then`` what limits after it."""

    fix: str
    words: str
    left: str
    won: str
    time: str
    gain: str
    then: str


@dataclass(frozen=True)
class Waterfall:
    """``off`` or ``note`` instead of rows, where there is no chain."""

    rows: list[WaterfallRow]
    note: str
    bound: str


def waterfall(diagnosis: Diagnosis) -> Waterfall | None:
    """The chain of the diagnosis; None where none was asked for."""
    whatif = diagnosis.whatif
    if not whatif:
        return None
    recorded, chain = whatif.get("recorded_span_ns"), whatif.get("chain") or []
    bound = " ".join(fmt.clean(note) for note in whatif.get("notes") or [])
    if not chain or not recorded:
        return Waterfall([], " ".join(fmt.whatif_lines(diagnosis)), bound)
    rows = [WaterfallRow("recorded", "", "100", "0", fmt.duration(recorded), "", _title(diagnosis.verdict))]
    before = recorded
    for step in chain:
        span = step.get("predicted_span_ns") or 0
        rows.append(
            WaterfallRow(
                fmt.clean(step.get("fix", "")),
                fmt.clean(step.get("words") or ""),
                f"{100 * span / recorded:.4f}",
                f"{100 * max(before - span, 0) / recorded:.4f}",
                fmt.duration(span),
                f"up to {fmt.percent(step.get('gain_ratio'))} less",
                _then(step.get("next_verdict"), step.get("next_cause")),
            )
        )
        before = span
    return Waterfall(rows, "", bound)


def _title(verdict: Verdict) -> str:
    return fmt.clean(labels.verdict_title(verdict))


def _then(cls: str | None, cause: str | None) -> str:
    """The limit after a fix in the words of a verdict's title."""
    if cls not in VERDICT_CLASSES:
        return fmt.clean(cls or "too little is left to tell")
    return _title(Verdict(cls, cause, None, "C", 1.0, ""))
