"""The small cases that every rule carries: measures in, what the rule must do out."""

from __future__ import annotations

from typing import NamedTuple

from infprof.measures.names import MEASURES
from infprof.results import Measures
from infprof.rules.evaluating import cost_of, judge, known_values, severity_of
from infprof.rules.loading import RuleSet
from infprof.rules.model import Case, Rule


class CaseResult(NamedTuple):
    """``expected`` and ``got`` read like "fires" or "fires, warning"."""

    rule: str
    case: str
    expected: str
    got: str

    @property
    def ok(self) -> bool:
        return self.expected == self.got


def test_rules(ruleset: RuleSet) -> list[CaseResult]:
    """Run the cases of every rule, in order."""
    return [_run(rule, case, ruleset) for rule in ruleset.rules for case in rule.cases]


# The name is what the command is called; a test runner that collects by name must leave it alone.
test_rules.__test__ = False  # type: ignore[attr-defined]


def _run(rule: Rule, case: Case, ruleset: RuleSet) -> CaseResult:
    measures = Measures()
    for name, value in case.measures.items():
        measures.add(name, value, MEASURES[name].unit)
    values = known_values(rule, ruleset, measures)
    got = judge(rule, values).state
    expected = case.expect
    if case.severity is not None:
        expected = f"{expected}, {case.severity}"
        if got == "fires":
            window = case.measures.get("window_ns")
            got = f"{got}, {severity_of(rule, cost_of(rule, values), None if window is None else int(window), values)}"
    return CaseResult(rule.id, case.name, expected, got)
