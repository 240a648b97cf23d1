"""Rules as plain text: one in full, or all in a table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from infprof.measures.names import MEASURES
from infprof.rules.loading import RuleSet
from infprof.rules.model import AREAS, Case, Rule

_INDENT = "  "


def describe(rule: Rule, width: int = 80) -> str:
    """All that the rule file says, in lines of at most ``width`` characters where words allow it."""
    blocks: list[tuple[str, list[str]]] = [
        ("Fires when", _wrap([rule.when.text], width)),
        ("Why it matters", _wrap([rule.why], width)),
        ("Keeps quiet", _wrap([rule.quiet_when], width)),
        ("What to change", _remedies(rule, width)),
        ("Evidence shown", _wrap((f"{name}: {MEASURES[name].meaning}" for name in rule.evidence), width, "- ")),
        ("Judged by", _wrap(judgement(rule), width, "- ")),
        ("References", _wrap(rule.references, width, "- ")),
        ("Cases", _wrap((_case(case) for case in rule.cases), width, "- ")),
    ]
    lines = textwrap.wrap(f"{rule.id}: {rule.title}", width)
    lines += _wrap([*facts(rule), f"file {rule.path}"], width)
    for heading, block in blocks:
        lines += ["", heading, *block]
    return "\n".join(lines) + "\n"


def list_rules(ruleset: RuleSet, width: int = 80) -> str:
    """All rules by area, one line each, then the broken files."""
    column = max((len(rule.id) for rule in ruleset.rules), default=0)
    lines = []
    for area in AREAS:
        rules = [rule for rule in ruleset.rules if rule.area == area]
        lines += [area] if rules else []
        for rule in rules:
            start = f"{_INDENT}{rule.id:<{column}}{_INDENT}"
            title = f"verdict: {rule.title}" if rule.states else rule.title
            room = max(width - len(start), 1)
            lines.append(start + (title if len(title) <= room else title[: room - 1] + "…"))
    lines += [f"broken: {broken}" for broken in ruleset.broken]
    return "\n".join(lines) + "\n"


def facts(rule: Rule) -> list[str]:
    """What a rule belongs to: its views, the verdict it explains, the tables it reads."""
    said = [
        f"area {rule.area}, layer {rule.layer}, scenarios {', '.join(rule.scenarios)}, a change of {rule.approach} "
        f"({rule.remedy_kind})"
    ]
    if rule.cls is not None:
        verdict = rule.cls if rule.cause is None else f"{rule.cls}, cause {rule.cause}"
        said.append(f"explains the verdict {verdict}" + ("; makes no finding" if rule.states else ""))
    said.append(f"reads the tables {', '.join(rule.needs)}")
    return said


def judgement(rule: Rule) -> list[str]:
    """Cost, gain, severity, confidence and rank of a rule's findings, a sentence each."""
    parts = []
    if not rule.states:
        parts.append("cost: " + ("no time is claimed" if rule.cost is None else f"{rule.cost.text} ({rule.cost_unit})"))
    if rule.pool is not None:
        parts.append(f"taken from {rule.pool}, which findings together never exceed")
    if rule.gain is not None:
        gain = rule.gain
        parts.append(f"gain: from {gain.low.text} to {gain.high.text} of the cost. {gain.basis} Source: {gain.source}")
    if not rule.states:
        parts.append(f"severity: {_severity(rule)}")
    parts.append(f"confidence: {rule.confidence:g}")
    parts += [f"confidence {d.confidence:g} when {d.when.text}: {d.because}" for d in rule.doubts]
    parts += [f"a note when {note.when.text}: {note.text}" for note in rule.notes]
    parts += [f"{name} counts as {value:g} when absent" for name, value in rule.defaults.items()]
    if rule.confirmed is not None:
        parts.append(f"confirmed, with the rank of that evidence, when {rule.confirmed.text}")
    parts.append(f"evidence rank: {rule.rank or 'the worst of the measures in condition and cost'}")
    if not rule.states:
        parts.append(f"places shown: {rule.where}")
    if rule.ncu is not None:
        parts.append(f"offers ncu commands for {rule.ncu}")
    return parts


def _severity(rule: Rule) -> str:
    if rule.fixed_severity is not None:
        return rule.fixed_severity
    if not rule.levels:
        return "by the cost's share of the window (thresholds severity_critical and severity_warning)"
    limits = [
        f"{level.severity} when {level.condition.text}"
        if level.condition is not None
        else f"{level.severity} from {level.share:g} of the window"
        for level in rule.levels
    ]
    return ", ".join([*limits, "else info"])


def _remedies(rule: Rule, width: int) -> list[str]:
    lines: list[str] = []
    stack = None
    for remedy in rule.remedies:
        if remedy.stack != stack:
            stack = remedy.stack
            lines.append(f"{_INDENT}{stack}")
        text = remedy.change if remedy.trade_off is None else f"{remedy.change} Trade-off: {remedy.trade_off}"
        lines += _wrap([text], width, "- ", _INDENT * 2)
    return lines


def _case(case: Case) -> str:
    given = ", ".join(f"{name} {'absent' if value is None else f'{value:,}'}" for name, value in case.measures.items())
    severity = "" if case.severity is None else f", {case.severity}"
    return f"{case.name}: {given or 'nothing measured'} -> {case.expect}{severity}"


def _wrap(items: Iterable[str], width: int, bullet: str = "", indent: str = _INDENT) -> list[str]:
    lines: list[str] = []
    for item in items:
        lines += textwrap.wrap(
            item,
            width,
            initial_indent=indent + bullet,
            subsequent_indent=indent + " " * len(bullet),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines
