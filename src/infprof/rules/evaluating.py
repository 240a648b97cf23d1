"""Measures in, findings out: which rules fire, what each costs, and in which order to show them."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Protocol

from infprof.durations import in_words
from infprof.measures.kernel_class import base_name, inner_name
from infprof.results import SEVERITIES, Cost, Evidence, Finding, Gain, KernelRow, Measures, NotEvaluated, Where
from infprof.rules.expression import Expression
from infprof.rules.loading import RuleSet
from infprof.rules.model import RANKS, Rule
from infprof.rules.thresholds import Thresholds

_WHERE_LIMIT = 20
_COMMAND_LIMIT = 3


class Context(Protocol):
    """What rules see of one scope of a trace."""

    @property
    def measures(self) -> Measures: ...

    @property
    def window_ns(self) -> int: ...

    def where(self, selector: str, limit: int) -> list[Where]:
        """The longest places of the kind ``selector`` names (``idle:launch,sync``, ``exposed_copy:pageable``, …)."""
        ...

    def kernels(self, selector: str, limit: int) -> list[KernelRow]:
        """The kernels ``selector`` names (``kernels:top``, ``kernels:fp32_gemm``, …), most time first."""
        ...


class Outcome(NamedTuple):
    """``state`` is one of fires, quiet, not evaluated; ``needs`` says what is missing for the last."""

    state: str
    needs: str | None = None


@dataclass
class Evaluation:
    """Findings in order of recoverable time; ``stated`` holds the rules whose verdict class applies, by class."""

    findings: list[Finding] = field(default_factory=list)
    not_evaluated: list[NotEvaluated] = field(default_factory=list)
    stated: dict[str, Rule] = field(default_factory=dict)


@dataclass
class _Fired:
    rule: Rule
    cost: int | None
    notes: list[str]


def evaluate(ruleset: RuleSet, context: Context, scenario: str | None = None) -> Evaluation:
    """Judge every rule. ``scenario`` (online, batch, mixed) weighs the order of the findings, and nothing else."""
    evaluation = Evaluation()
    fired: list[_Fired] = []
    for rule in ruleset.rules:
        values = known_values(rule, ruleset, context.measures)
        outcome = judge(rule, values)
        if rule.states:
            if outcome.state == "fires" and rule.cls is not None:
                evaluation.stated.setdefault(rule.cls, rule)
        elif outcome.state == "not evaluated":
            evaluation.not_evaluated.append(NotEvaluated(rule.id, outcome.needs or ""))
        elif outcome.state == "fires":
            notes = [note.text for note in rule.notes if _holds(note.when, values)]
            fired.append(_Fired(rule, cost_of(rule, values), notes))
    _cap(fired, context)
    found = [_finding(item, ruleset, context) for item in fired]
    evaluation.findings = sorted(found, key=lambda finding: place(finding, ruleset, scenario))
    return evaluation


def place(finding: Finding, ruleset: RuleSet, scenario: str | None = None) -> tuple[bool, bool, int, float, str]:
    """Where a finding stands among others, the first first: time, most of it first; then bytes; then what claims
    nothing, the severest of it first. The scenario's weight counts among those of a kind; ids keep the order stable.
    """
    weight = ruleset.scenarios.weight(scenario, finding.area, finding.scenarios)
    cost, claims = finding.cost.value, claims_time(finding) or finding.cost.unit == "bytes"
    grade = 0 if claims else len(SEVERITIES) - _grade(finding)
    return (not claims, finding.cost.unit != "ns", grade, -weight * (1 if cost is None else cost), finding.rule)


def claims_time(finding: Finding) -> bool:
    """Whether a finding's time can be set against that of others: not a remark on where time goes, of which nobody knows
    how much could be won."""
    remark = finding.severity == "info" and finding.gain.high is None
    return finding.cost.value is not None and finding.cost.unit == "ns" and not remark


def _grade(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity)


def known_values(rule: Rule, ruleset: RuleSet, measures: Measures) -> dict[str, float]:
    """Every name with a value: thresholds, the measures that are there, and the rule's defaults for the others."""
    values: dict[str, float] = {**asdict(ruleset.thresholds), **rule.defaults}
    for measure in measures:
        if measure.value is not None and math.isfinite(measure.value):
            values[measure.name] = measure.value
    return values


def judge(rule: Rule, values: Mapping[str, float]) -> Outcome:
    """Whether the rule fires on these values."""
    missing = _missing(rule.when, values)
    if missing:
        return _not_evaluated(rule, missing)
    try:
        if not rule.when.value(values):
            return Outcome("quiet")
        missing = [] if rule.cost is None else _missing(rule.cost, values)
        if missing:
            return _not_evaluated(rule, missing)
        cost_of(rule, values)
    except ZeroDivisionError:
        return Outcome("not evaluated", f"values other than zero: `{rule.when.text}` divides by one")
    return Outcome("fires")


def cost_of(rule: Rule, values: Mapping[str, float]) -> int | None:
    """The rule's cost before it is capped, None when the rule claims no time."""
    return None if rule.cost is None else max(0, round(rule.cost.value(values)))


def severity_of(rule: Rule, cost: int | None, window_ns: int | None, values: Mapping[str, float]) -> str:
    """Info, warning or critical, by the rule's own levels or else by the cost's share of the window."""
    if rule.fixed_severity is not None:
        return rule.fixed_severity
    share = cost / window_ns if cost and window_ns and rule.cost_unit == "ns" else 0.0
    if not rule.levels:
        limits = (("critical", values["severity_critical"]), ("warning", values["severity_warning"]))
        return next((severity for severity, limit in limits if share >= limit), "info")
    for level in rule.levels:
        if level.share is not None and share >= level.share:
            return level.severity
        # A finding whose time another one already claims must not shout.
        if level.condition is not None and cost != 0 and _holds(level.condition, values):
            return level.severity
    return "info"


def severity_of_share(rule: Rule, share: float, thresholds: Thresholds) -> str:
    """The severity that a share of the window alone gives; the highest where the rule says it otherwise."""
    if rule.fixed_severity is not None or any(level.condition is not None for level in rule.levels):
        return SEVERITIES[-1]
    return severity_of(rule, round(share * 1e9), 10**9, asdict(thresholds))


def _missing(expression: Expression, values: Mapping[str, float]) -> list[str]:
    return [name for name in expression.names if name not in values]


def _not_evaluated(rule: Rule, missing: list[str]) -> Outcome:
    return Outcome("not evaluated", f"{', '.join(missing)} (from {', '.join(rule.needs)})")


def _holds(condition: Expression, values: Mapping[str, float]) -> bool:
    """Whether an extra condition is met; what cannot be known is not."""
    if _missing(condition, values):
        return False
    try:
        return bool(condition.value(values))
    except ZeroDivisionError:
        return False


def _order(item: _Fired) -> tuple[bool, bool, int, str]:
    """Time first, most of it first; then bytes; then what claims nothing; ids keep the order stable."""
    return (item.cost is None, item.rule.cost_unit != "ns", -(item.cost or 0), item.rule.id)


def _cap(fired: list[_Fired], context: Context) -> None:
    """Let no time be claimed twice: neither beyond the pool it is taken from, nor beyond the window."""
    left: dict[str, int] = {"": context.window_ns}
    for item in sorted(fired, key=_order):
        if item.cost is None or item.rule.cost_unit != "ns":
            continue
        pools = [""]
        size = None if item.rule.pool is None else context.measures.value(item.rule.pool)
        if item.rule.pool is not None and size is not None:
            left.setdefault(item.rule.pool, int(size))
            pools.append(item.rule.pool)
        granted = max(0, min(item.cost, *(left[pool] for pool in pools)))
        if granted < item.cost:
            item.notes.append(_capped_note(item, fired, granted))
        item.cost = granted
        for pool in pools:
            left[pool] -= granted


def _capped_note(item: _Fired, fired: list[_Fired], granted: int) -> str:
    rivals = [f.rule.id for f in fired if f is not item and item.rule.pool and f.rule.pool == item.rule.pool]
    claimed = f"{', '.join(rivals)} already claims" if len(rivals) == 1 else "other findings already claim"
    return f"cost reduced from {in_words(item.cost or 0)} to {in_words(granted)}: {claimed} the rest of that time"


def _finding(item: _Fired, ruleset: RuleSet, context: Context) -> Finding:
    rule, cost = item.rule, item.cost
    values = known_values(rule, ruleset, context.measures)
    doubts = [doubt for doubt in rule.doubts if _holds(doubt.when, values)]
    reasons = [doubt.because for doubt in doubts]
    return Finding(
        rule=rule.id,
        title=rule.title,
        area=rule.area,
        layer=rule.layer,
        scenarios=list(rule.scenarios),
        remedy_kind=rule.remedy_kind,
        approach=rule.approach,
        severity=severity_of(rule, cost, context.window_ns, values),
        rank=_rank(rule, context.measures, values),
        confidence=min([rule.confidence, *(doubt.confidence for doubt in doubts)]),
        cost=Cost(cost, rule.cost_unit),
        gain=_gain(rule, cost, context.window_ns, values),
        evidence=_evidence(rule, context.measures),
        where=[] if rule.where == "none" else context.where(rule.where, _WHERE_LIMIT),
        remedies=list(rule.remedies),
        why=rule.why,
        commands=[] if rule.ncu is None else ncu_commands(context.kernels(rule.ncu, _COMMAND_LIMIT)),
        notes=item.notes + reasons,
        doubts=reasons,
    )


def _gain(rule: Rule, cost: int | None, window_ns: int, values: Mapping[str, float]) -> Gain:
    bounds = rule.gain
    if bounds is None or cost is None or rule.cost_unit != "ns" or window_ns <= 0:
        return Gain(None, None, "no time is claimed" if bounds is None else bounds.basis)
    low, high = (_factor(bound, values) for bound in (bounds.low, bounds.high))
    if low is not None and high is not None:
        low = min(low, high)
    share = cost / window_ns
    return Gain(
        None if low is None else low * share,
        None if high is None else high * share,
        f"{bounds.basis} Source: {bounds.source}",
    )


def _factor(bound: Expression, values: Mapping[str, float]) -> float | None:
    """A bound between 0 and 1, None when what it needs was not measured."""
    if _missing(bound, values):
        return None
    try:
        return min(1.0, max(0.0, bound.value(values)))
    except ZeroDivisionError:
        return None


def _evidence(rule: Rule, measures: Measures) -> list[Evidence]:
    present = [measure for measure in map(measures.get, rule.evidence) if measure is not None]
    return [Evidence(measure.name, measure.value, measure.unit) for measure in present if measure.value is not None]


def _rank(rule: Rule, measures: Measures, values: Mapping[str, float]) -> str:
    """The conclusion is as good as the worst measure that it rests on; other evidence is shown beside it.

    Where better evidence confirms it, it rests on that.
    """
    if rule.rank is not None:
        return rule.rank
    names = [*rule.when.names, *(() if rule.cost is None else rule.cost.names)]
    if rule.confirmed is not None and _holds(rule.confirmed, values):
        names = list(rule.confirmed.names)
    used = [measure for measure in map(measures.get, names) if measure is not None and measure.value is not None]
    return max((measure.rank for measure in used if measure.rank in RANKS), default="C")


def ncu_commands(kernels: list[KernelRow]) -> list[str]:
    """Command lines that have Nsight Compute look at one launch of each kernel.

    Nsight Compute matches the bare function name by default. Wrappers such as cutlass::Kernel2 all share theirs, so
    they are found by what they wrap, in the demangled name. The launch is one from the middle of those seen:
    the first ones are warm-up.
    """
    commands: dict[str, None] = {}
    for kernel in kernels:
        inner = inner_name(kernel.name)
        pattern = f"regex:^{re.escape(base_name(kernel.name))}$" if inner is None else f"regex:{re.escape(inner)}"
        words = ["ncu", "--set", "full"]
        words += [] if inner is None else ["--kernel-name-base", "demangled"]
        words += ["--kernel-name", pattern, "--launch-skip", str(kernel.calls // 2), "--launch-count", "1"]
        label = re.sub(r"\W+", "-", inner or base_name(kernel.name))[:40].strip("-")
        commands.setdefault(shlex.join([*words, "-o", f"ncu-{label}", "YOUR_COMMAND"]))
    return list(commands)
