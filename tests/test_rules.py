"""The rule engine, and what must hold for every rule that is shipped."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from infprof import rules
from infprof.errors import EXIT_USAGE, UsageError
from infprof.measures.names import MEASURES
from infprof.resources import rules_dir
from infprof.results import IDLE_CAUSES, Finding, KernelRow, Measures, Where
from infprof.rules.evaluating import ncu_commands, severity_of_share
from infprof.rules.expression import ExpressionError, parse
from infprof.rules.model import STACKS
from infprof.rules.thresholds import THRESHOLD_NAMES

SHIPPED = rules.load([rules_dir()])
RULES = pytest.mark.parametrize("rule", SHIPPED.rules, ids=lambda rule: rule.id)
SECOND = 1_000_000_000


@dataclass
class FakeContext:
    """Measures by name; remembers which places rules asked for."""

    measures: Measures
    window_ns: int = SECOND
    asked: list[tuple[str, int]] = field(default_factory=list)

    def where(self, selector: str, limit: int) -> list[Where]:
        self.asked.append((selector, limit))
        return [Where(0, 10, device=0, name=selector)]

    def kernels(self, selector: str, limit: int) -> list[KernelRow]:
        self.asked.append((selector, limit))
        return [kernel_row("ampere_sgemm_128x64_tn", calls=40)]


def kernel_row(name: str, calls: int = 1) -> KernelRow:
    return KernelRow(name, 0, calls, 1000, 10.0, 10, 10, 0.5, "gemm", "fp32", 1, 128)


def measured(_rank: str = "C", **values: float | None) -> Measures:
    measures = Measures()
    for name, value in values.items():
        measures.add(name, value, MEASURES[name].unit, rank=_rank)
    return measures


def findings(ruleset: rules.RuleSet = SHIPPED, window_ns: int = SECOND, **values: float | None) -> list[Finding]:
    return rules.evaluate(ruleset, FakeContext(measured(window_ns=window_ns, **values), window_ns)).findings


GOOD = """\
id: slow-thing
title: A thing is slow
area: host
layer: application
scenarios: [online, batch]
remedy_kind: code
needs: [kernels, api_calls]
when: idle_ratio >= 0.1
cost: idle_ns
pool: idle_ns
why: It waits.
evidence: [idle_ratio, busy_ratio]
where: idle:launch,sync
remedies:
  pytorch:
    - change: Make it fast.
      trade_off: Work.
    - change: Leave it out.
gain: {low: 0.5, high: 1.0, basis: Half of it at least., source: a guess}
quiet_when: It is fast.
references: [a book]
cases:
  - {name: slow, idle_ratio: 0.5, idle_ns: 50, window_ns: 100, expect: fires, severity: critical}
  - {name: fast, idle_ratio: 0.01, expect: quiet}
  - {name: not seen, idle_ratio: null, expect: not evaluated}
"""


def write(folder: Path, name: str = "slow-thing", text: str = GOOD, **replace: str) -> Path:
    """A rule file: GOOD with lines replaced, ``key="text"`` for the line that starts with that key."""
    for key, line in replace.items():
        key = key.rstrip("_")
        text, count = re.subn(rf"(?m)^{key}:.*$", lambda _, line=line: line, text)
        assert count == 1, f"no line {key}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(text.replace("id: slow-thing", f"id: {name}"), encoding="utf-8")
    return path


def load(folder: Path) -> rules.RuleSet:
    """The rules of ``folder`` alone, with the shipped thresholds."""
    shutil.copy(rules_dir() / "thresholds.yaml", folder)
    return rules.load([folder])


# What holds for every shipped rule


def test_no_shipped_rule_is_broken() -> None:
    assert SHIPPED.broken == ()
    assert len(SHIPPED.rules) >= 25


@RULES
def test_every_section_says_something(rule: rules.Rule) -> None:
    assert len(rule.title) <= 70 and not rule.title.endswith(".")
    assert 100 <= len(rule.why) <= 700
    assert len(rule.quiet_when) >= 40
    assert rule.references and rule.evidence and rule.needs
    assert {remedy.stack for remedy in rule.remedies} & set(STACKS)
    assert rule.states or rule.cost is None or rule.gain is not None
    # Telemetry has no places on the timeline.
    assert rule.states or rule.where != "none" or "samples" in rule.needs


@RULES
def test_every_rule_has_a_case_for_each_outcome(rule: rules.Rule) -> None:
    assert {case.expect for case in rule.cases} == {"fires", "quiet", "not evaluated"}


@pytest.mark.parametrize("result", rules.test_rules(SHIPPED), ids=lambda result: f"{result.rule}: {result.case}")
def test_every_case_holds(result: rules.CaseResult) -> None:
    assert result.got == result.expected


@RULES
def test_evidence_shows_what_the_condition_reads(rule: rules.Rule) -> None:
    judged = [name for name in rule.when.names if name in MEASURES and name not in rule.defaults]
    derived = {"demand_ns", "window_ns", "exposed_comm_ratio", "exposed_host_copy_ratio", "recoverable_idle_ratio"}
    assert set(judged) - derived <= set(rule.evidence)


def test_a_cost_never_exceeds_its_pool_by_definition() -> None:
    pools = {rule.id: rule.pool for rule in SHIPPED.rules if rule.cost is not None}
    assert None not in pools.values()
    assert pools["pageable-copies"] == pools["small-copies"] == pools["exposed-copies"] == "exposed_host_copy_ns"


def test_thresholds_are_no_measures() -> None:
    assert not set(THRESHOLD_NAMES) & set(MEASURES)


@pytest.mark.parametrize("cause", sorted(set(IDLE_CAUSES) - {"kernel-gap", "no-demand", "profiler"}))
def test_every_cause_of_a_bubble_has_a_rule(cause: str) -> None:
    rule = SHIPPED.stating("scheduling-bubble", cause)
    assert rule is not None and rule.cause == cause and not rule.states


@pytest.mark.parametrize(
    ("cls", "cause", "rule_id"),
    [
        ("pcie-limited", "pageable", "pageable-copies"),
        ("pcie-limited", "small-copies", "small-copies"),
        ("pcie-limited", "volume", "exposed-copies"),
        ("pcie-limited", "link-downgrade", "link-downgrade"),
        ("throttled", "power", "throttled-power"),
        ("throttled", "thermal", "throttled-thermal"),
        ("throttled", "other", "throttled"),
        ("communication-bound", "straggler", "straggler-rank"),
        ("communication-bound", "unknown", "exposed-communication"),
        ("compute-bound", None, "compute-bound"),
        ("bandwidth-bound", None, "bandwidth-bound"),
        ("latency-bound", None, "latency-bound"),
        ("balanced", None, "balanced"),
        ("gpu-busy", None, "gpu-busy-unknown-limiter"),
        ("no-demand", None, "no-demand"),
        ("unusable", None, "unusable-trace"),
    ],
)
def test_verdicts_point_to_their_rule(cls: str, cause: str | None, rule_id: str) -> None:
    rule = SHIPPED.stating(cls, cause)
    assert rule is not None and rule.id == rule_id


def test_a_class_without_a_rule_has_none() -> None:
    assert SHIPPED.stating("never-heard-of", "power") is None


# Judgement: stories of whole traces


def healthy() -> dict[str, float | None]:
    values: dict[str, float | None] = {name: 0.0 for name, info in MEASURES.items() if info.unit in ("ratio", "ns")}
    del values["window_ns"]
    return values | {
        "demand_ns": SECOND,
        "compute_ns": 0.95 * SECOND,
        "compute_ratio": 0.95,
        "busy_ratio": 0.95,
        "idle_kernel_gap_ns": 0.03 * SECOND,
        "idle_kernel_gap_ratio": 0.03,
        "idle_launch_ns": 0.02 * SECOND,
        "idle_launch_ratio": 0.02,
        "recoverable_idle_ratio": 0.02,
        "kernel_count": 40_000,
        "small_kernel_count": 26_000,
        "small_kernel_ratio": 0.65,
        "small_kernel_time_ratio": 0.2,
        "few_sm_kernel_ratio": 0.15,
        "few_sm_kernel_ns": 0.14 * SECOND,
        "sync_call_ns": 0.9 * SECOND,
        "pageable_count": 14,
        "pageable_ratio": 1.0,
        "small_copy_count": 500,
    }


def test_a_healthy_trace_has_no_finding_above_info() -> None:
    found = findings(**healthy())
    assert {finding.severity for finding in found} <= {"info"}
    assert "many-small-kernels" in {finding.rule for finding in found}


def test_waiting_for_a_busy_gpu_is_no_loss() -> None:
    found = findings(idle_sync_loss_ratio=0.0, idle_sync_loss_ns=0, sync_call_ns=0.9 * SECOND, sync_call_count=1000)
    assert found == []


def test_the_wait_in_a_sync_is_not_the_cost() -> None:
    # 100 steps of 5.1 ms: 3 ms of GPU work under a 1.9 ms wait, then 2 ms of host work.
    (finding,) = findings(
        window_ns=510_000_000,
        idle_host_loop_ratio=0.39,
        idle_host_loop_ns=200_000_000,
        idle_sync_loss_ratio=0.0,
        idle_sync_loss_ns=0,
        sync_call_ns=190_000_000,
        sync_gap_count=100,
        tiny_d2h_count=100,
        exposed_pageable_copy_ratio=0.001,
        exposed_pageable_copy_ns=400_000,
        small_copy_exposed_ns=400_000,
        small_copy_count=100,
        demand_ns=510_000_000,
    )
    assert (finding.rule, finding.cost.value) == ("host-work-between-steps", 200_000_000)
    assert any("where the host waits" in note for note in finding.notes)


def test_pageable_copies_under_kernels_are_no_finding() -> None:
    found = findings(
        exposed_pageable_copy_ratio=0.0,
        exposed_pageable_copy_ns=0,
        pageable_count=14,
        pageable_ratio=1.0,
        idle_host_loop_ratio=0.31,
        idle_host_loop_ns=310_000_000,
    )
    assert [finding.rule for finding in found] == ["host-work-between-steps"]


def test_serial_copies_at_link_speed_need_overlap_and_not_pinning() -> None:
    # 32 tokens of 47.1 ms copy at 25.5 GB/s and 30.6 ms kernels: overlapped, 47.1 of 77.7 ms remain.
    window, copy, compute = 32 * 77_700_000, 32 * 47_100_000, 32 * 30_600_000
    (finding,) = findings(
        window_ns=window,
        exposed_other_copy_ratio=copy / window,
        exposed_other_copy_ns=copy,
        exposed_host_copy_ns=copy,
        exposed_copy_uvm_ns=0,
        compute_ns=compute,
        h2d_bytes_per_s=25.5e9,
        link_peak_bytes_per_s=31.5e9,
        host_copy_overlap_gain_ns=979_000_000,
        host_copy_exposed_p50_bytes=1_200_000_000,
    )
    assert finding.rule == "exposed-copies" and finding.severity == "critical"
    assert finding.gain.high == pytest.approx(0.394, abs=0.001)
    assert [note for note in finding.notes if "near the link's peak: pinning" in note]
    assert not [note for note in finding.notes if "far under" in note]


def test_communication_is_claimed_once_whoever_is_late() -> None:
    exposed = {"exposed_comm_ratio": 0.6, "exposed_comm_ns": 600_000_000, "comm_spread_ns": 500_000_000}
    in_step = findings(**exposed, comm_spread_ratio=0.1, comm_hidden_ratio=0.4, compute_ns=400_000_000)
    late = findings(**exposed, comm_spread_ratio=0.8)
    assert [(f.rule, f.cost.value) for f in in_step] == [("exposed-communication", 600_000_000)]
    assert [(f.rule, f.cost.value) for f in late] == [("straggler-rank", 500_000_000)]


def test_retries_are_named_even_when_they_cost_little() -> None:
    (finding,) = findings(idle_allocator_ratio=0.03, idle_allocator_ns=30_000_000, allocator_retry_count=6)
    assert (finding.rule, finding.severity, finding.cost.value) == ("allocator-churn", "info", 30_000_000)
    assert any("retry drains the GPU" in note for note in finding.notes)


def test_one_block_kernels_are_found_on_a_busy_gpu() -> None:
    found = findings(
        few_sm_kernel_ratio=0.4,
        few_sm_kernel_ns=400_000_000,
        single_block_kernel_ns=400_000_000,
        compute_ns=SECOND,
        idle_launch_ratio=0.0,
    )
    assert [(f.rule, f.severity) for f in found] == [("few-sm-kernels", "warning")]


def test_no_demand_and_profiler_claim_no_time() -> None:
    found = findings(no_demand_ratio=0.3, profiler_ratio=0.1, idle_launch_ratio=0.1, idle_launch_ns=50_000_000)
    assert [f.rule for f in found] == ["launch-bound", "profiler-overhead", "waiting-for-requests"]
    assert [f.cost.value for f in found] == [50_000_000, None, None]
    assert (found[2].gain.low, found[2].gain.high) == (None, None)


# The engine


def test_findings_are_ranked_by_cost_and_capped_by_their_pool() -> None:
    found = findings(
        exposed_host_copy_ns=500_000_000,
        exposed_pageable_copy_ratio=0.4,
        exposed_pageable_copy_ns=400_000_000,
        small_copy_exposed_ns=300_000_000,
        small_copy_count=1000,
        demand_ns=SECOND,
    )
    assert [(f.rule, f.cost.value) for f in found] == [("pageable-copies", 400_000_000), ("small-copies", 100_000_000)]
    assert found[0].notes == []
    assert "reduced from 300 ms to 100 ms: pageable-copies already claims" in found[1].notes[0]


def test_a_finding_whose_time_is_claimed_already_does_not_shout() -> None:
    found = findings(
        exposed_host_copy_ns=400_000_000,
        exposed_pageable_copy_ratio=0.4,
        exposed_pageable_copy_ns=400_000_000,
        small_copy_exposed_ns=400_000_000,
        small_copy_count=1000,
        demand_ns=SECOND,
    )
    assert [(f.rule, f.cost.value, f.severity) for f in found] == [
        ("pageable-copies", 400_000_000, "critical"),
        ("small-copies", 0, "info"),
    ]


def test_gains_never_add_up_to_more_than_the_window(tmp_path: Path) -> None:
    for name, measure in (("one", "idle_ns"), ("two", "exposed_copy_ns"), ("three", "busy_ns")):
        write(tmp_path, name, when="when: window_ns > 0", cost=f"cost: {measure}", pool=f"pool: {measure}")
    context = FakeContext(measured(idle_ns=70, exposed_copy_ns=60, busy_ns=50, window_ns=100), 100)
    found = rules.evaluate(load(tmp_path), context).findings
    assert [(f.rule, f.cost.value) for f in found] == [("one", 70), ("two", 30), ("three", 0)]
    assert sum(f.gain.high or 0 for f in found) == pytest.approx(1.0)


def test_severity_follows_the_share_of_the_window() -> None:
    shares = {0.30: "critical", 0.29: "warning", 0.05: "warning", 0.049: "info"}
    for share, severity in shares.items():
        (finding,) = findings(idle_launch_ratio=0.5, idle_launch_ns=share * SECOND)
        assert finding.severity == severity


def test_a_finding_carries_the_rule_and_its_evidence(tmp_path: Path) -> None:
    write(tmp_path)
    measures = measured(idle_ratio=0.4, idle_ns=400_000_000)
    measures.add("busy_ratio", None, "ratio")
    context = FakeContext(measures)
    (finding,) = rules.evaluate(load(tmp_path), context).findings
    assert (finding.rule, finding.title, finding.area, finding.layer) == (
        "slow-thing",
        "A thing is slow",
        "host",
        "application",
    )
    assert [(e.measure, e.value, e.unit) for e in finding.evidence] == [("idle_ratio", 0.4, "ratio")]
    assert [(r.stack, r.change, r.trade_off) for r in finding.remedies] == [
        ("pytorch", "Make it fast.", "Work."),
        ("pytorch", "Leave it out.", None),
    ]
    assert finding.gain.low == pytest.approx(0.2) and finding.gain.high == pytest.approx(0.4)
    assert finding.gain.basis == "Half of it at least. Source: a guess"
    assert [place.name for place in finding.where] == ["idle:launch,sync"]
    assert context.asked == [("idle:launch,sync", 20)]
    assert finding.commands == []


def test_rank_is_the_worst_that_the_conclusion_rests_on() -> None:
    context = FakeContext(measured("A", idle_launch_ratio=0.4))
    context.measures.add("idle_launch_ns", 400_000_000, "ns", rank="B")
    context.measures.add("small_kernel_ratio", 0.2, "ratio", rank="D")  # shown, but not decided upon
    (finding,) = rules.evaluate(SHIPPED, context).findings
    assert finding.rank == "B"
    context.measures.add("idle_launch_ratio", 0.4, "ratio", rank="C")
    (finding,) = rules.evaluate(SHIPPED, context).findings
    assert finding.rank == "C"


def test_a_share_of_the_window_alone_gives_a_severity_where_the_rule_has_no_other_condition() -> None:
    by_id = {rule.id: rule for rule in SHIPPED.rules}
    comm, small = by_id["exposed-communication"], by_id["kv-cache-pressure"]
    assert [severity_of_share(comm, share, SHIPPED.thresholds) for share in (0.001, 0.9)] == ["info", "critical"]
    # Its severity does not come from a share: no share may lower it.
    assert severity_of_share(small, 0.0, SHIPPED.thresholds) == "critical"


def test_a_verdict_without_a_rule_of_its_cause_is_explained_by_the_largest_finding_of_its_class() -> None:
    ours = ("host-pauses", "launch-bound")
    for fired in (ours, ours[::-1]):
        chosen = SHIPPED.stating("scheduling-bubble", "io", fired)
        assert chosen is not None and chosen.id == fired[0]
    chosen = SHIPPED.stating("scheduling-bubble", "launch", ours)
    assert chosen is not None and chosen.id == "launch-bound"


def test_doubt_lowers_confidence_and_says_why() -> None:
    sure = findings(idle_launch_ratio=0.3, idle_launch_ns=300_000_000, queue_delay_p50_ns=4_000)[0]
    unsure = findings(idle_launch_ratio=0.3, idle_launch_ns=300_000_000, queue_delay_p50_ns=2_000_000)[0]
    assert (sure.confidence, sure.notes, sure.doubts) == (0.9, [], [])
    assert unsure.confidence == 0.6 and "runs ahead" in unsure.notes[0]
    assert unsure.doubts == unsure.notes


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_what_is_not_known_makes_a_rule_not_evaluated(value: float | None, tmp_path: Path) -> None:
    write(tmp_path, when="when: idle_ratio >= 0.1 and queue_delay_p50_ns < 10_000")
    context = FakeContext(measured(idle_ratio=value, idle_ns=5))
    evaluation = rules.evaluate(load(tmp_path), context)
    assert evaluation.findings == []
    (left,) = evaluation.not_evaluated
    assert (left.rule, left.needs) == ("slow-thing", "idle_ratio, queue_delay_p50_ns (from kernels, api_calls)")


def test_a_missing_cost_matters_only_when_the_rule_fires(tmp_path: Path) -> None:
    write(tmp_path)
    quiet = rules.evaluate(load(tmp_path), FakeContext(measured(idle_ratio=0.01)))
    assert (quiet.findings, quiet.not_evaluated) == ([], [])
    fires = rules.evaluate(load(tmp_path), FakeContext(measured(idle_ratio=0.5)))
    assert [left.needs for left in fires.not_evaluated] == ["idle_ns (from kernels, api_calls)"]


def test_division_by_zero_is_not_evaluated(tmp_path: Path) -> None:
    write(tmp_path, when="when: idle_ns / busy_ns > 1")
    evaluation = rules.evaluate(load(tmp_path), FakeContext(measured(idle_ns=5, busy_ns=0)))
    assert evaluation.findings == []
    assert "other than zero" in evaluation.not_evaluated[0].needs


def test_defaults_stand_in_for_what_is_absent_only(tmp_path: Path) -> None:
    write(tmp_path, when="when: idle_ratio >= 0.1 and sync_gap_count < 5\ndefaults: {sync_gap_count: 0}")
    ruleset = load(tmp_path)
    assert len(findings(ruleset, idle_ratio=0.5, idle_ns=5)) == 1
    assert findings(ruleset, idle_ratio=0.5, idle_ns=5, sync_gap_count=9) == []


def test_a_finding_is_shown_in_scenarios_that_its_rule_does_not_name_too(tmp_path: Path) -> None:
    write(tmp_path)
    ruleset, context = load(tmp_path), FakeContext(measured(idle_ratio=0.5, idle_ns=5))
    for scenario in ("batch", "mixed"):
        evaluation = rules.evaluate(ruleset, context, scenario)
        assert len(evaluation.findings) == 1 and evaluation.not_evaluated == []


def test_the_kind_of_change_is_that_of_the_remedies_unless_the_rule_says_it(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, "new-device", remedy_kind="remedy_kind: hardware")
    write(tmp_path, "new-way", remedy_kind="remedy_kind: code\napproach: algorithm")
    write(tmp_path, "odd-way", remedy_kind="remedy_kind: code\napproach: algoritm")
    ruleset = load(tmp_path)
    kinds = {rule.id: rule.approach for rule in ruleset.rules}
    assert kinds == {"new-device": "hardware", "new-way": "algorithm", "slow-thing": "system"}
    assert "no approach `algoritm`. Did you mean `algorithm`?" in str(ruleset.broken[0])


def test_stating_rules_make_no_finding_and_are_not_missed() -> None:
    with_counters = rules.evaluate(SHIPPED, FakeContext(measured(sm_throughput_ratio=0.9, dram_ratio=0.3)))
    assert with_counters.findings == []
    assert {cls: rule.id for cls, rule in with_counters.stated.items()} == {"compute-bound": "compute-bound"}
    without = rules.evaluate(SHIPPED, FakeContext(measured()))
    assert without.stated == {}
    assert "compute-bound" not in {left.rule for left in without.not_evaluated}
    assert "launch-bound" in {left.rule for left in without.not_evaluated}


def test_severity_conditions_and_fixed_severities(tmp_path: Path) -> None:
    write(tmp_path, "a", where="where: none\nseverity: {warning: 0.2, critical: sync_gap_count >= 3}")
    write(tmp_path, "b", where="where: none\nseverity: critical")
    ruleset = load(tmp_path)
    severities = []
    for count, idle in ((5, 10), (None, 300_000_000), (None, 10)):
        found = findings(ruleset, idle_ratio=0.5, idle_ns=idle, sync_gap_count=count)
        severities.append(sorted((f.rule, f.severity) for f in found)[0][1])
        assert {f.severity for f in found if f.rule == "b"} == {"critical"}
    assert severities == ["critical", "warning", "info"]


def test_a_cost_in_bytes_ranks_after_time_and_has_no_gain(tmp_path: Path) -> None:
    write(tmp_path, "heavy", cost="cost: h2d_bytes", pool="")
    write(tmp_path, "slow")
    found = findings(load(tmp_path), idle_ratio=0.5, idle_ns=5, h2d_bytes=10**12)
    assert [(f.rule, f.cost.value, f.cost.unit) for f in found] == [("slow", 5, "ns"), ("heavy", 10**12, "bytes")]
    assert (found[1].gain.high, found[1].severity) == (None, "info")


# Commands for Nsight Compute


def test_ncu_commands_survive_a_shell() -> None:
    row = kernel_row("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)", 100)
    (command,) = ncu_commands([row])
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True)
    assert words.stdout.split("\n")[:-1] == [
        *("ncu", "--set", "full", "--kernel-name", "regex:^vectorized_elementwise_kernel$"),
        *("--launch-skip", "50", "--launch-count", "1", "-o", "ncu-vectorized_elementwise_kernel", "YOUR_COMMAND"),
    ]


def test_ncu_finds_wrappers_by_what_they_wrap() -> None:
    row = kernel_row("void cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_tn_align1>(P)")
    (command,) = ncu_commands([row, row])
    assert "--kernel-name-base demangled --kernel-name regex:cutlass_80_simt_sgemm_64x64_8x5_tn_align1 " in command
    assert "--launch-skip 0 " in command


def test_rules_that_look_at_kernels_offer_commands() -> None:
    context = FakeContext(measured(fp32_gemm_ratio=0.7, fp32_gemm_ns=700_000_000))
    (finding,) = rules.evaluate(SHIPPED, context).findings
    assert finding.rank == "D"
    assert len(finding.commands) == 1 and "regex:^ampere_sgemm_128x64_tn$" in finding.commands[0]
    assert ("kernels:fp32_gemm", 3) in context.asked


# Reading rule files


@pytest.mark.parametrize(
    ("replace", "line", "reason"),
    [
        ({"when": "when: idle_ration >= 0.1"}, 8, "no measure `idle_ration`. Did you mean `idle_ratio`?"),
        ({"when": "when: idle_ratio >="}, 8, "is not an expression"),
        ({"when": "when: open('x')"}, 8, "is not allowed"),
        ({"when": "when: idle_ratio if idle_ns else 0"}, 8, "is not allowed in an expression"),
        ({"when": "when: idle_ratio >= 'high'"}, 8, "is not a number"),
        ({"when": "when: 10"}, 8, "`when` must be text"),
        ({"why": "whyy: It waits."}, 11, "no key `whyy`. Did you mean `why`?"),
        ({"why": ""}, 1, "the section `why` is missing"),
        ({"gain": ""}, 1, "the section `gain` is missing"),
        ({"id": "id: other-thing"}, 1, "the id `other-thing` must be the file's name, `slow-thing`"),
        ({"area": "area: kitchen"}, 3, "no area `kitchen`. One of compute, bandwidth"),
        ({"scenarios": "scenarios: online"}, 5, "expected a list"),
        ({"needs": "needs: [kernels, apicalls]"}, 7, "no needs `apicalls`. Did you mean `api_calls`?"),
        ({"cost": "cost: idle_ratio"}, 9, "nanoseconds or in bytes"),
        ({"cost": "cost: h2d_bytes_per_s"}, 9, "nanoseconds or in bytes"),
        ({"pool": "pool: idle_ratio"}, 10, "a pool is a measure in nanoseconds"),
        ({"pool": "pool: idle_nss"}, 10, "no measure `idle_nss`. Did you mean"),
        ({"evidence": "evidence: [idle_ratio, busi_ratio]"}, 12, "no measure `busi_ratio`"),
        ({"where": "where: idle:lunch"}, 13, "`idle` has no `lunch`"),
        ({"where": "where: somewhere"}, 13, "no place `somewhere`"),
        ({"where": "where: profiler:x"}, 13, "takes nothing after a colon"),
        ({"where": "where: none\nncu: idle:launch"}, 14, "expected `kernels:…`"),
        ({"gain": "gain: {low: 50, high: 100, basis: x, source: y}"}, 19, "shares are 0-1, never per cent"),
        ({"gain": "gain: {low: 0, high: 1, basis: x}"}, 19, "`source` is missing"),
        ({"title": "title: A thing\nstates: gpu-busy"}, 10, "makes no finding: `cost` has no use"),
        ({"title": "title: A thing\ncause: launch"}, 3, "needs the `class`"),
        ({"title": "title: A thing\nclass: slow"}, 3, "no class `slow`"),
        ({"title": "title: A thing\ntitle: Again"}, 3, "`title` is given twice"),
        ({"title": "title: A thing\nseverity: fatal"}, 3, "no severity `fatal`"),
        ({"title": "title: A thing\nseverity: {warning: 5}"}, 3, "shares are 0-1"),
        (
            {"title": "title: A thing\nconfidence: {base: 0.9, lower: [{when: idle_ratio > 1, to: 0.5}]}"},
            3,
            "`because`",
        ),
        ({"title": "title: A thing\nrank: F"}, 3, "no rank `F`"),
        ({"title": "title: [A thing]"}, 2, "`title` must be text"),
        ({"title": "title: 'A"}, 2, "not YAML"),
    ],
)
def test_a_broken_file_is_named_with_line_and_reason(
    replace: dict[str, str], line: int, reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "host", **replace)
    write(tmp_path / "host", "good-thing")
    ruleset = load(tmp_path)
    assert [rule.id for rule in ruleset.rules] == ["good-thing"]
    (broken,) = ruleset.broken
    assert reason in broken.reason
    assert (broken.path, broken.line) == (path, line)
    assert str(broken).startswith(f"{path}, line {line}: ")


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        ("  pytorch:", "  pytorhc:", 15, "no stack `pytorhc`. Did you mean `pytorch`?"),
        ("    - change: Leave it out.", "    - changes: Leave it out.", 18, "no key `changes`"),
        ("expect: quiet", "expect: silent", 24, "not `silent`"),
        ("{name: fast, idle_ratio: 0.01", "{name: fast, idle_ration: 0.01", 24, "no measure `idle_ration`"),
        ("{name: fast, idle_ratio: 0.01", "{name: fast, idle_ratio: low", 24, "must be a number"),
        ("severity: critical", "severity: fatal", 23, "not `fatal`"),
        ("{name: not seen, idle_ratio: null, expect: not evaluated}", "{name: not seen}", 25, "what to `expect`"),
    ],
)
def test_errors_inside_lists_have_their_own_line(old: str, new: str, line: int, reason: str, tmp_path: Path) -> None:
    write(tmp_path, text=GOOD.replace(old, new))
    (broken,) = load(tmp_path).broken
    assert (broken.line, reason in broken.reason) == (line, True), str(broken)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just text\n"])
def test_a_file_that_is_no_rule(text: str, tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text(text, encoding="utf-8")
    assert [broken.reason for broken in load(tmp_path).broken] == ["expected a rule: lines of the form `key: value`"]


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00id")
    assert "cannot be read" in load(tmp_path).broken[0].reason


def test_the_first_file_keeps_an_id(tmp_path: Path) -> None:
    first = write(tmp_path / "a")
    write(tmp_path / "b")
    ruleset = load(tmp_path)
    assert [rule.path for rule in ruleset.rules] == [first]
    assert f"already that of {first}" in ruleset.broken[0].reason


def test_users_folders_add_to_the_shipped_rules(tmp_path: Path) -> None:
    write(tmp_path / "mine")
    ruleset = rules.load([rules_dir(), tmp_path])
    assert [rule.id for rule in ruleset.rules] == [*(rule.id for rule in SHIPPED.rules), "slow-thing"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder of rules"):
        rules.load([tmp_path / "nowhere"])


def test_an_unknown_rule_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"no rule `launch-bond`\. Did you mean `launch-bound`\?") as error:
        SHIPPED.get("launch-bond")
    assert error.value.exit_code == EXIT_USAGE


def test_asking_for_a_broken_rule_says_what_is_broken(tmp_path: Path) -> None:
    write(tmp_path, why="")
    with pytest.raises(UsageError, match=r"rule slow-thing is broken: .*the section `why` is missing"):
        load(tmp_path).get("slow-thing")


def test_cases_that_do_not_hold_are_reported(tmp_path: Path) -> None:
    write(tmp_path, text=GOOD.replace("expect: quiet", "expect: fires").replace("severity: critical", "severity: info"))
    results = rules.test_rules(load(tmp_path))
    assert [(result.case, result.ok) for result in results] == [("slow", False), ("fast", False), ("not seen", True)]
    assert (results[0].expected, results[0].got) == ("fires, info", "fires, critical")


# Thresholds


def test_a_users_threshold_replaces_one_number(tmp_path: Path) -> None:
    (tmp_path / "thresholds.yaml").write_text("no_demand: 0.7\ntoo_short_ops: 10\n", encoding="utf-8")
    shipped = rules.load_thresholds([rules_dir()])
    mine = rules.load_thresholds([rules_dir(), tmp_path])
    assert (shipped.no_demand, shipped.too_short_ops, shipped.close_call) == (0.5, 50, 0.05)
    assert (mine.no_demand, mine.too_short_ops, mine.close_call) == (0.7, 10, 0.05)
    ruleset = rules.load([rules_dir(), tmp_path])
    assert "no-demand" not in rules.evaluate(ruleset, FakeContext(measured(no_demand_ratio=0.6))).stated
    assert "no-demand" in rules.evaluate(SHIPPED, FakeContext(measured(no_demand_ratio=0.6))).stated


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_demant: 0.7", "no threshold `no_demant`. Did you mean `no_demand`?"),
        ("no_demand: high", "must be a number"),
        ("no_demand: true", "must be a number"),
        ("no_demand: -1", "at least 0"),
        ("too_short_ops: 1.5", "must be a whole number"),
        ("- no_demand", "name: number"),
        ("no_demand: [", "is not a YAML file"),
    ],
)
def test_wrong_thresholds_are_usage_errors(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "thresholds.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=re.escape(message)):
        rules.load_thresholds([rules_dir(), tmp_path])


def test_thresholds_without_the_shipped_ones_are_incomplete(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no thresholds\.yaml gives exposed_comm"):
        rules.load_thresholds([tmp_path])


# Expressions


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a + b * 2 > 7", 1),
        ("not a > b and (a == 2 or b != 3)", 1),
        ("max(a, b, 1) - min(a, b) / 2", 2),
        ("abs(-a) <= 1_000", 1),
    ],
)
def test_expressions(text: str, value: float) -> None:
    expression = parse(text, ["a", "b"])
    assert expression.value({"a": 2, "b": 3}) == value


def test_expressions_know_their_names_in_order() -> None:
    assert parse("max(b, 2) > a and\n  b < abs(c)", ["a", "b", "c"]).names == ("b", "a", "c")


@pytest.mark.parametrize(
    "text",
    [
        "a.real",
        "a[0]",
        "[a]",
        "a ** 999",
        "a % 2",
        "lambda: a",
        "abs(a, key=a)",
        "abs()",
        "__import__('os')",
        "a and True",
        "f'{a}'",
        "abs",
    ],
)
def test_expressions_hold_nothing_else(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse(text, ["a"])


# Showing rules


@RULES
def test_a_description_says_all_and_fits_the_width(rule: rules.Rule) -> None:
    text = rules.describe(rule)
    flat = " ".join(text.split())
    for part in (rule.title, rule.when.text, rule.why, rule.quiet_when, *rule.references, *rule.evidence):
        assert part in flat
    for remedy in rule.remedies:
        assert remedy.change in flat and (remedy.trade_off or "") in flat
    for case in rule.cases:
        assert case.name in flat
    long_words = [line for line in text.splitlines() if len(line) > 80 and " " in line.strip().removeprefix("- ")]
    assert [line for line in long_words if "file " not in line] == []


def test_the_list_has_a_line_for_each_rule() -> None:
    lines = rules.list_rules(SHIPPED, width=80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert sorted(line.split()[0] for line in lines if line.startswith("  ")) == sorted(r.id for r in SHIPPED.rules)
    assert "  launch-bound              The GPU waits for kernel launches" in lines
    assert "  no-demand                 verdict: The server had nothing to do" in lines


def test_the_list_names_broken_files(tmp_path: Path) -> None:
    path = write(tmp_path, why="")
    assert f"broken: {path}, line 1: the section `why` is missing" in rules.list_rules(load(tmp_path))


def test_an_alias_that_refers_to_itself_is_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").write_text("id: &a [*a]\n")
    (broken,) = rules.load([rules_dir(), tmp_path]).broken
    assert "refers to itself" in str(broken)
