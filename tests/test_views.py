"""The three views of a finding (scenario, layer, kind of change): what they change in a report, and what they never do."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from diagnosis_examples import launch_bound
from infprof import rules
from infprof.diagnosis import Options, analyze_file
from infprof.errors import UsageError
from infprof.reports import layers_rows, render
from infprof.reports.markdown import MarkdownOptions
from infprof.reports.terminal import TerminalOptions
from infprof.resources import rules_dir, sample_traces_dir
from infprof.results import Cost, Diagnosis
from infprof.rules.model import APPROACHES, AREAS, LAYERS, SCENARIOS

SHIPPED = rules.load([rules_dir()])
SAMPLE = sample_traces_dir() / "launch-bound-decode" / "trace.sqlite"


def test_every_shipped_rule_has_all_three_views() -> None:
    for rule in SHIPPED.rules:
        assert rule.layer in LAYERS and rule.approach in APPROACHES and set(rule.scenarios) <= set(SCENARIOS)
    assert {rule.approach for rule in SHIPPED.rules} == set(APPROACHES)
    assert {rule.layer for rule in SHIPPED.rules} == set(LAYERS) == set(layers_rows.LAYERS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_orders_and_changes_nothing_else(scenario: str) -> None:
    plain, weighed = analyze_file(SAMPLE), analyze_file(SAMPLE, Options(scenario=scenario))
    by_rule = [sorted(d.findings, key=lambda f: f.rule) for d in (plain, weighed)]
    assert by_rule[0] == by_rule[1] and len(plain.findings) > 2
    assert weighed.not_evaluated == plain.not_evaluated and weighed.verdict == plain.verdict
    assert (plain.scenario, weighed.scenario) == (None, scenario)
    assert Diagnosis.from_dict(weighed.to_dict()).scenario == scenario
    others = [f for f in weighed.findings if f.cost.value is None]
    assert others == weighed.findings[len(weighed.findings) - len(others) :], "what claims no time comes last"


def order_for(scenario: str | None, ruleset: rules.RuleSet = SHIPPED) -> list[str]:
    """Two findings of almost the same cost: arithmetic, and a queue that only online and mixed serving care for."""
    finding = launch_bound().findings[0]
    compute = replace(finding, rule="a", area="compute", scenarios=list(SCENARIOS), cost=Cost(100))
    serving = replace(finding, rule="b", area="serving", scenarios=["online", "mixed"], cost=Cost(90))
    return [f.rule for f in sorted([serving, compute], key=lambda f: rules.place(f, ruleset, scenario))]


def test_what_a_scenario_looks_at_comes_first() -> None:
    assert [order_for(s) for s in (None, "online", "batch")] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_weights_never_turn_a_large_finding_into_the_last() -> None:
    for scenario, first, second in itertools.product(SCENARIOS, AREAS, AREAS):
        weights = [SHIPPED.scenarios.weight(scenario, area, SCENARIOS) for area in (first, second)]
        assert weights[0] / weights[1] < 3
        assert SHIPPED.scenarios.weight(None, first, ()) == 1


def test_a_folder_of_the_users_changes_single_factors(tmp_path: Path) -> None:
    (tmp_path / "scenarios.yaml").write_text("batch: {areas: {serving: 9}, elsewhere: 1}\n", encoding="utf-8")
    mine = rules.load([rules_dir(), tmp_path])
    assert mine.broken == () and order_for("batch", mine) == ["b", "a"]
    assert mine.scenarios.weight("batch", "compute", ["batch"]) == SHIPPED.scenarios.weight(
        "batch", "compute", ["batch"]
    )
    assert mine.scenarios.by_name["online"] == SHIPPED.scenarios.by_name["online"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("onlin: {elsewhere: 1}", "no scenario `onlin`. Did you mean `online`?"),
        ("online: {areas: {servin: 1}}", "no area `servin`. Did you mean `serving`?"),
        ("online: {weights: 1}", "no key `weights`"),
        ("online: {elsewhere: 0}", "online: elsewhere must be a factor from 0.1 to 10, not 0"),
        ("online: {areas: {host: much}}", "online: host must be a factor"),
        ("online: [1]", "expected lines of the form"),
        ("a: [", "is not a YAML file"),
    ],
)
def test_mistakes_in_the_weights_are_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "scenarios.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as error:
        rules.load([rules_dir(), tmp_path])
    assert says in str(error.value) and str(tmp_path) in str(error.value)


def two_layers() -> Diagnosis:
    diagnosis = copy.deepcopy(launch_bound())
    first = diagnosis.findings[0]
    diagnosis.findings = [
        replace(first, rule="one", title="First", layer="runtime", cost=Cost(30)),
        replace(first, rule="two", title="Second", layer="application", cost=Cost(20)),
        replace(first, rule="three", title="Third", layer="runtime", cost=Cost(None)),
        replace(first, rule="four", title="Fourth", layer="elsewhere", cost=Cost(4096, "bytes")),
    ]
    return diagnosis


def test_layers_share_out_the_findings_and_their_time() -> None:
    groups = layers_rows.by_layer(two_layers())
    assert [(g.layer, [n for n, _ in g.findings], g.ns) for g in groups] == [
        ("application", [2], 20),
        ("runtime", [1, 3], 30),
        ("elsewhere", [4], None),
    ]


def test_text_and_markdown_group_by_layer_when_asked() -> None:
    diagnosis = two_layers()
    for text in (
        render("terminal", diagnosis, TerminalOptions(by_layer=True)),
        render("markdown", diagnosis, MarkdownOptions(by_layer=True)),
    ):
        places = [text.index(word) for word in ("Application layer", "Second", "Runtime layer", "First", "Third")]
        assert places == sorted(places)
    plain, grouped = (render("terminal", diagnosis, TerminalOptions(by_layer=by)) for by in (False, True))
    assert "layer" not in plain and len(grouped.splitlines()) == len(plain.splitlines()) + 3


def test_html_has_a_table_by_layer_where_there_is_more_than_one() -> None:
    diagnosis = two_layers()
    assert "By layer: who must act" in render("html", diagnosis)
    diagnosis.findings = diagnosis.findings[:1]
    assert "By layer: who must act" not in render("html", diagnosis)


def test_reports_say_what_they_are_ordered_for_without_a_further_line() -> None:
    diagnosis = launch_bound()
    plain = render("terminal", diagnosis)
    diagnosis.scenario = "online"
    ordered = render("terminal", diagnosis)
    assert "most time to win back first" in plain and "ordered for online: TTFT, TPOT and their tail" in ordered
    assert len(ordered.splitlines()) == len(plain.splitlines())
    assert "ordered for online" in render("markdown", diagnosis) and "ordered for online" in render("html", diagnosis)
