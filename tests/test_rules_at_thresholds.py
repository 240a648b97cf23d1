"""Every rule fires a tenth over each of its limits and keeps quiet a tenth under it, the rest held as it was.

First on measures, for every comparison of every rule; then on traces with the rule's own fault in them, its size set so
that the true share, counted from what the simulated threads and streams did, is a tenth over or under the level.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.accuracy import injected
from benchmarks.accuracy.sweep import written

from case_builders import US, S, rules
from infprof import rules as rule_engine
from infprof.diagnosis import Options, analyze_file
from infprof.ranks import analyze_inputs
from infprof.resources import rules_dir
from infprof.rules.evaluating import judge
from infprof.rules.expression import parse
from infprof.rules.model import Rule
from infprof.simulator.builder import TraceBuilder

SHIPPED = rule_engine.load([rules_dir()])
THRESHOLDS = asdict(SHIPPED.thresholds)
Values = dict[str, float]


def comparisons(rule: Rule) -> list[ast.Compare]:
    """The comparisons in a rule's condition, in order."""
    tree = ast.parse(rule.when.text, mode="eval")
    return sorted(
        (node for node in ast.walk(tree) if isinstance(node, ast.Compare)), key=lambda n: (n.lineno, n.col_offset)
    )


EACH_COMPARISON = [(rule.id, number) for rule in SHIPPED.rules for number in range(len(comparisons(rule)))]


class Limit:
    """One comparison of a rule: its two sides, and the way in which it is met."""

    def __init__(self, rule: Rule, node: ast.Compare) -> None:
        assert len(node.ops) == 1
        self.text = ast.unparse(node)
        known = rule.when.names
        self.left, self.right = parse(ast.unparse(node.left), known), parse(ast.unparse(node.comparators[0]), known)
        self.upwards = isinstance(node.ops[0], (ast.GtE, ast.Gt))
        self.holds_at_zero = isinstance(node.ops[0], (ast.GtE, ast.LtE, ast.Eq))
        self.measures = [name for name in dict.fromkeys(self.left.names + self.right.names) if name not in THRESHOLDS]

    def moved(self, values: Values, measure: str, met: bool, by: float = 0.1) -> Values | None:
        """The values with one measure changed so that the left side is ``by`` of the limit over or under it, on the side
        where the comparison is met or is not; None where the measure cannot bring that about.

        A limit of zero is a guard: zero is on one side of it, one on the other.
        """
        if self.right.text == "0":
            changed = {**values, measure: 0.0 if met == self.holds_at_zero else 1.0}
            return changed if self.measures == [measure] else None
        sign = 1 if met == self.upwards else -1

        def over(value: float) -> float:
            changed = {**values, measure: value}
            right = self.right.value(changed)
            return self.left.value(changed) - right * (1 + sign * by)

        low, high = 0.0, 1e-9
        while over(low) * over(high) > 0:
            high *= 2
            if high > 1e18:
                return None
        rises = over(high) > over(low)
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (low, middle) if (over(middle) > 0) == rises else (middle, high)
        # On the far side of the place: on it, rounding decides.
        return {**values, measure: high if (sign > 0) == rises else low}


def bases(rule: Rule) -> Iterator[Values]:
    """Values with which the rule fires: those of its own cases."""
    for case in rule.cases:
        given = {name: value for name, value in case.measures.items() if value is not None}
        # What a case leaves out is nothing: in it, and in what only stands beside another comparison.
        values = {**dict.fromkeys(rule.when.names, 0.0), **THRESHOLDS, **rule.defaults, **given}
        if case.expect == "fires" and judge(rule, values).state == "fires":
            yield values


def around(rule: Rule, limit: Limit, others: list[Limit]) -> tuple[Values, Values] | None:
    """Values a tenth over and under a limit with which the rule fires and is quiet; of the other comparisons as few are
    switched on or off as it takes for this one to decide. None where it never does."""
    switches = list(itertools.product(others, (True, False), (0.1, 0.9)))
    for count in range(min(len(others), 3) + 1):
        for values, chosen in itertools.product(bases(rule), itertools.combinations(switches, count)):
            held = switched(values, chosen, limit)
            if held is None:
                continue
            for measure in limit.measures:
                met, missed = limit.moved(held, measure, True), limit.moved(held, measure, False)
                if met is None or missed is None:
                    continue
                if (judge(rule, met).state, judge(rule, missed).state) == ("fires", "quiet"):
                    return met, missed
    return None


def switched(values: Values, chosen: tuple[tuple[Limit, bool, float], ...], keep: Limit) -> Values | None:
    """The values with comparisons met or not, each by a tenth or by far, through measures that ``keep`` is not about."""
    for limit, met, by in chosen:
        free = [name for name in limit.measures if name not in keep.measures] or limit.measures[-1:]
        # Upwards there is no end to far.
        far = 10 * by if met == limit.upwards and by > 0.1 else by
        changed = limit.moved(values, free[0], met, far)
        if changed is None:
            return None
        values = changed
    return values


@pytest.mark.parametrize(("rule_id", "number"), EACH_COMPARISON)
def test_each_limit_of_each_rule_decides_within_a_tenth(rule_id: str, number: int) -> None:
    rule = SHIPPED.get(rule_id)
    limits = [Limit(rule, node) for node in comparisons(rule)]
    limit = limits.pop(number)
    assert around(rule, limit, limits) is not None, f"{limit.text} never decides, or not at its limit"


def test_a_limit_that_is_not_where_the_condition_says_is_noticed() -> None:
    """The check itself: a rule whose comparison is twice as strict as another that decides before it."""
    rule = SHIPPED.get("io-wait")
    node = ast.parse("idle_io_ratio >= 0.10", mode="eval").body
    assert isinstance(node, ast.Compare)
    assert around(rule, Limit(rule, node), []) is None


# --- in traces ------------------------------------------------------------------------------------------------------

INJECTED = [(rule, form) for rule, injection in injected.INJECTIONS.items() for form in injection.formats]


@pytest.mark.parametrize(("rule", "form"), INJECTED)
@pytest.mark.parametrize("factor", [1.1, 0.9])
def test_a_fault_in_a_trace_is_found_a_tenth_over_its_level_and_not_a_tenth_under(
    rule: str, form: str, factor: float, tmp_path: Path
) -> None:
    _, trace = injected.knob_at(rule, factor, injected.FORMATS[form])
    paths = written(trace, injected.FORMATS[form], tmp_path)
    options = Options(whatif=False, steps=False)
    diagnosis = analyze_file(paths[0], options) if len(paths) == 1 else analyze_inputs(paths, options, jobs=1)
    assert (rule in rules(diagnosis)) == (factor > 1), diagnosis.verdict.sentence


def queued(share: float) -> TraceBuilder:
    """Kernels of 1 ms, launched long before, each of which starts late by a share of the whole that nothing explains."""
    builder, at = TraceBuilder(), S
    wait = round(1_000_000 * share / (1 - share))
    for _ in range(200):
        builder.launch(at - 5_000 * US, 5 * US, at, 1_000 * US, "kernel")
        # The first 20 µs of such a wait are the hardware's own.
        at += 1_000 * US + wait + 20 * US
    return builder


def without_calls(share: float) -> TraceBuilder:
    """Kernels of 1 ms, whose launches were not recorded, with gaps of a share of the whole."""
    builder, at = TraceBuilder(), S
    for _ in range(200):
        builder.kernel(at, at + 1_000 * US, "kernel")
        at += 1_000 * US + round(1_000 * US * share / (1 - share))
    return builder


@pytest.mark.parametrize(("rule", "build"), [("device-dependency", queued), ("unexplained-idle", without_calls)])
@pytest.mark.parametrize("factor", [1.1, 0.9])
def test_waits_that_no_simulated_thread_can_have(rule: str, build: object, factor: float, tmp_path: Path) -> None:
    assert callable(build)
    path = build(0.05 * factor).write(tmp_path / "trace.sqlite")
    assert (rule in rules(analyze_file(path, Options(whatif=False, steps=False)))) == (factor > 1)
