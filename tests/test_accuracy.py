"""The accuracy bench: a small part of its corpus stays over the recorded floor, and its own counting is right."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.accuracy import floor, sweep
from benchmarks.accuracy.__main__ import main
from benchmarks.accuracy.corpus import corpus
from benchmarks.accuracy.judging import Answer, judge
from benchmarks.accuracy.labels import ANY, Case, Label, either
from benchmarks.accuracy.scoring import Score, score
from benchmarks.accuracy.truth import Format, label_of

from workload_runs import played

CI = list(corpus("ci"))
# Enough tests for the cores to share, each with cases of every kind.
SHARES = 4
NSYS, WITH_COUNTERS, KINETO = Format(True, False, False), Format(True, True, False), Format(False, False, True)


def answered(label: Label, cls: str = "gpu-busy", cause: str | None = None, **more: Any) -> Answer:
    given: dict[str, Any] = {"code": None, "confidence": 0.9, "findings": {}, **more}
    return Answer("one", "test", label, cls, cause, **given)


@pytest.mark.parametrize("share", range(SHARES))
def test_the_small_part_of_the_corpus_is_over_the_recorded_floor(share: int) -> None:
    result = score([judge(case) for case in CI[share::SHARES]])
    assert floor.under_floor(result, floor.recorded()) == [], "\n".join(result.mistakes)


def test_the_small_part_has_every_kind_of_case() -> None:
    assert {case.source for case in CI} == {"sweep", "injected", "samples", "cases"}
    assert {case.name.rsplit("-", 1)[1] for case in CI if case.source == "sweep"} == {"nsys", "kineto"}


def test_the_floor_is_what_is_promised() -> None:
    recorded = floor.recorded()
    assert recorded["class_accuracy"] >= 0.95 and recorded["cause_accuracy"] >= 0.95
    assert recorded["precision"] >= 0.9 and recorded["healthy_with_serious"] == 0


def test_draws_are_the_same_each_time_and_the_held_out_ones_are_others() -> None:
    def names(part: str) -> list[str]:
        return [case.name for case in corpus(part, 4)]

    assert names("whole") == names("whole")
    assert not set(names("whole")) & set(names("held-out"))
    assert not set(sweep.TUNED.gpus) & set(sweep.HELD_OUT.gpus)


class TestScoring:
    right = Label(
        {"scheduling-bubble": frozenset({"launch"})}, (frozenset({"launch-bound"}),), frozenset({"few-sm-kernels"})
    )

    def label(self, **changes: Any) -> Label:
        return replace(self.right, judged=frozenset({"launch-bound", "few-sm-kernels", "io-wait"}), **changes)

    def test_a_right_class_with_a_wrong_cause_counts_as_class_alone(self) -> None:
        result = score([answered(self.label(), "scheduling-bubble", "sync")])
        assert (result.class_right, result.cause_right) == (1, 0)

    def test_precision_counts_what_fired_and_recall_what_was_demanded(self) -> None:
        both = {"launch-bound": "warning", "few-sm-kernels": "info"}
        result = score(
            [
                answered(self.label(), findings=both),
                answered(self.label(), findings={"io-wait": "warning", "queueing": "warning"}),
            ]
        )
        rules = {name: (s.precision, s.recall) for name, s in result.rules.items()}
        assert rules == {"launch-bound": (1.0, 0.5), "few-sm-kernels": (1.0, None), "io-wait": (0.0, None)}
        # A rule that no label speaks of is neither right nor wrong, and is shown.
        assert result.not_judged == {"queueing": 1}

    def test_one_of_a_group_is_enough(self) -> None:
        group = frozenset({"host-work-between-steps", "host-work-per-launch"})
        label = Label({}, (group,), judged=group)
        result = score([answered(label, findings={"host-work-per-launch": "warning"})])
        assert result.rules["host-work-per-launch"].recall == 1.0
        assert "host-work-between-steps" not in result.rules
        assert score([answered(label)]).rules["host-work-between-steps"].recall == 0.0

    def test_what_cannot_be_proven_must_be_said_with_doubt(self) -> None:
        label = Label({"no-demand": ANY}, doubtful={"scheduling-bubble": frozenset({"host-work"})})
        assert not answered(label, "scheduling-bubble", "host-work").class_is_right
        assert answered(label, "scheduling-bubble", "host-work", confidence=0.6).cause_is_right

    def test_the_code_of_an_unusable_trace_counts_as_its_cause(self) -> None:
        label = Label({"unusable": frozenset({"too-short"})})
        assert answered(label, "unusable", code="too-short").cause_is_right
        assert not answered(label, "unusable", code="damaged").cause_is_right

    def test_a_serious_finding_on_a_healthy_run_is_under_the_floor(self) -> None:
        healthy = Label({"gpu-busy": ANY}, may=frozenset({"few-sm-kernels"}), healthy=True)
        fine = score([answered(healthy, findings={"few-sm-kernels": "info"})])
        alarmed = score([answered(healthy, findings={"few-sm-kernels": "warning"})])
        assert floor.under_floor(fine, floor.recorded()) == []
        assert floor.under_floor(alarmed, floor.recorded()) == ["1 healthy runs have a finding above info"]

    def test_a_rule_that_cries_wolf_is_under_the_floor(self) -> None:
        good = [answered(self.label(), "scheduling-bubble", "launch", findings={"launch-bound": "info"})] * 8
        wrong = answered(self.label(must=()), "scheduling-bubble", "launch", findings={"launch-bound": "info"})
        found = floor.under_floor(score([*good, wrong]), floor.recorded())
        assert found == ["precision of launch-bound is 88.9%, under 90.0%"]

    def test_confusions_say_what_was_taken_for_what(self) -> None:
        result = score([answered(self.label(), "gpu-busy"), answered(self.label(), "scheduling-bubble", "launch")])
        assert result.confusions == {"scheduling-bubble": {"gpu-busy": 1, "scheduling-bubble": 1}}


class TestLabels:
    def test_either_demands_what_all_demand_and_allows_what_any_allows(self) -> None:
        one = Label({"gpu-busy": ANY}, (frozenset({"a"}), frozenset({"b"})), frozenset({"c"}), frozenset("abcd"))
        two = Label({"pcie-limited": frozenset({"volume"})}, (frozenset({"a"}),), frozenset(), frozenset("abd"))
        both = either([one, two])
        assert dict(both.verdicts) == {"gpu-busy": ANY, "pcie-limited": frozenset({"volume"})}
        assert both.must == (frozenset({"a"}),)
        assert both.may == frozenset("abc")
        assert both.judged == frozenset("abd")

    def test_host_work_too_short_to_matter_is_not_demanded(self) -> None:
        def demanded(each: str) -> set[str]:
            return set().union(*label_of(played("none", layers=32, host={"detokenise_token": each}), NSYS).must)

        assert "host-work-between-steps" in demanded("400us")
        assert "host-work-between-steps" not in demanded("1us")

    def test_what_limits_a_busy_gpu_is_demanded_only_where_it_can_be_seen(self) -> None:
        trace = played("small-batch")
        assert set(label_of(trace, NSYS).verdicts) == {"gpu-busy"}
        assert set(label_of(trace, WITH_COUNTERS).verdicts) == {"bandwidth-bound"}
        assert set(label_of(trace, KINETO).verdicts) == {"bandwidth-bound", "gpu-busy"}

    def test_waiting_for_requests_cannot_be_seen_without_system_calls(self) -> None:
        trace = played("low-demand")
        assert set(label_of(trace, NSYS).verdicts) == {"no-demand"}
        seen = label_of(trace, KINETO)
        assert set(seen.verdicts) == {"no-demand"} and set(seen.doubtful) == {"scheduling-bubble"}

    def test_only_a_run_without_fault_can_be_healthy(self) -> None:
        host = {"schedule": "10us", "prepare": "5us", "process": "5us", "schedule_request": 0, "process_token": 0}
        trace = played("none", layers=32, host=host)
        assert label_of(trace, NSYS, without_fault=True).healthy
        assert not label_of(trace, NSYS).healthy
        assert not label_of(played("sync"), NSYS, without_fault=True).healthy


def test_the_command_prints_writes_and_fails_under_the_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(case: Case) -> Answer:
        return answered(Label({"no-demand": ANY}), "gpu-busy")

    monkeypatch.setattr("benchmarks.accuracy.__main__.judge", wrong)
    out = tmp_path / "figures.json"
    code = main(["--part", "ci", "--workloads", "1", "--jobs", "1", "--json", str(out)])
    printed = capsys.readouterr().out
    assert code == 1
    assert "class right in 0.0%" in printed and "class_accuracy is 0.0%, under 95.0%" in printed
    figures = json.loads(out.read_text(encoding="utf-8"))
    assert figures["class_accuracy"] == 0 and figures["confusions"] == {"no-demand": {"gpu-busy": figures["cases"]}}
    assert isinstance(score([wrong(CI[0])]), Score)
