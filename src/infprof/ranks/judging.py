"""What one rank's trace could not tell and the others do: how long its collectives waited for the last rank."""

from __future__ import annotations

from dataclasses import replace

from infprof.results import Diagnosis, KernelRow, Measures, Verdict, Where
from infprof.rules import RuleSet, evaluate, place
from infprof.stack import fit_remedies
from infprof.verdict import SURE, communication_verdict

SOURCE = "arrival of all ranks, clocks aligned"
_NAMES = ("comm_spread_ns", "comm_spread_ratio")


def device_measures(diagnosis: Diagnosis, device: int | None) -> Measures:
    """The measures of one device of a diagnosis, by its id; of the only one where it has one."""
    several = len(diagnosis.devices) > 1
    scope = str(device) if several else None
    return Measures([m for m in diagnosis.measures if m.scope.id == scope])


def add_waits(diagnosis: Diagnosis, device: int, waited_ns: int, rules: RuleSet, scenario: str | None) -> None:
    """Put what the device waited for the last rank into its measures, and judge anew all that rests on it."""
    before = device_measures(diagnosis, device)
    total = before.value("comm_total_ns")
    values = {"comm_spread_ns": waited_ns, "comm_spread_ratio": waited_ns / total if total else None}
    scope = before.get(_NAMES[0])
    if scope is None:
        return
    diagnosis.measures = [
        replace(m, value=values[m.name], source=SOURCE) if m.name in _NAMES and m.scope == scope.scope else m
        for m in diagnosis.measures
    ]
    result = next((d for d in diagnosis.devices if d.id == device), None)
    after = device_measures(diagnosis, device)
    if result is not None:
        _state_cause(result.verdict, before, after, rules)
        if result.verdict is diagnosis.verdict or len(diagnosis.devices) == 1:
            _judge(diagnosis, after, rules, scenario)
    fit_remedies(diagnosis)


def _state_cause(verdict: Verdict, before: Measures, after: Measures, rules: RuleSet) -> None:
    if verdict.cls != "communication-bound":
        return
    share = float(before.value("exposed_comm_ratio") or 0)
    said, says = (communication_verdict(m, share, rules.thresholds) for m in (before, after))
    if says.cause == said.cause:
        return
    verdict.cause, verdict.sentence = says.cause, verdict.sentence.replace(said.sentence, says.sentence)
    if verdict.confidence == said.confidence:
        verdict.confidence = min(says.confidence, SURE)
    stating = rules.stating(verdict.cls, verdict.cause)
    if stating is not None:
        verdict.rule, verdict.remedies = stating.id, list(stating.remedies)


class _Context:
    """What the rules see: the measures, and the places that were found before."""

    def __init__(self, diagnosis: Diagnosis, measures: Measures, places: list[Where]) -> None:
        self.measures = measures
        self.window_ns = diagnosis.window.duration_ns
        self._places = places

    def where(self, selector: str, limit: int) -> list[Where]:
        return self._places[:limit]

    def kernels(self, selector: str, limit: int) -> list[KernelRow]:
        return []


def _judge(diagnosis: Diagnosis, measures: Measures, rules: RuleSet, scenario: str | None) -> None:
    """Evaluate the rules over waiting again. They claim time of one pool that no other rule claims from."""
    if diagnosis.verdict.cls == "unusable" or any(p.code == "too-short" for p in diagnosis.problems):
        return
    mine = tuple(rule for rule in rules.rules if not rule.states and set(rule.when.names) & set(_NAMES))
    names = {rule.id for rule in mine}
    places = next((f.where for f in diagnosis.findings if f.rule in names), [])
    evaluation = evaluate(replace(rules, rules=mine, broken=()), _Context(diagnosis, measures, places), scenario)
    kept = [f for f in diagnosis.findings if f.rule not in names]
    diagnosis.findings = sorted([*kept, *evaluation.findings], key=lambda finding: place(finding, rules, scenario))
    others = [row for row in diagnosis.not_evaluated if row.rule not in names]
    diagnosis.not_evaluated = [*others, *evaluation.not_evaluated]
