"""``infprof whatif`` as its user meets it, and the chain of fixes in the reports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from case_builders import infprof
from infprof.diagnosis import analyze_file
from infprof.reports import render
from infprof.reports.json_report import schema
from infprof.resources import sample_traces_dir
from infprof.results import Diagnosis
from infprof.simulator import TraceBuilder

LAUNCH_BOUND = sample_traces_dir() / "launch-bound-decode" / "trace.sqlite"
HEALTHY = sample_traces_dir() / "healthy" / "trace.sqlite"


def asked(*arguments: str | Path) -> dict[str, object]:
    done = infprof("whatif", *map(str, arguments), "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_one_cost_taken_away_is_answered_in_json() -> None:
    answer = asked(LAUNCH_BOUND, "--set", "launch=0")
    assert answer["recorded_span_ns"] == answer["replayed_span_ns"]
    predicted, recorded = answer["predicted_span_ns"], answer["recorded_span_ns"]
    assert isinstance(predicted, int) and isinstance(recorded, int)
    assert answer["gain_ratio"] == pytest.approx(1 - predicted / recorded)
    assert predicted < 0.5 * recorded
    assert answer["next_verdict"] == "gpu-busy"


def test_several_costs_apply_together() -> None:
    both = asked(LAUNCH_BOUND, "--set", "launch=0", "--set", "kernel:gemv=0.5")
    one = asked(LAUNCH_BOUND, "--set", "launch=0")
    assert both["predicted_span_ns"] < one["predicted_span_ns"]  # type: ignore[operator]
    assert both["settings"] == ["launch=0", "kernel:gemv=0.5"]


def test_without_a_cost_it_is_the_chain_of_the_report() -> None:
    answer = asked(LAUNCH_BOUND)
    diagnosis = analyze_file(LAUNCH_BOUND)
    assert diagnosis.whatif is not None
    assert answer["chain"] == diagnosis.whatif["chain"]
    assert [step["fix"] for step in diagnosis.whatif["chain"]] == ["launch=0"]


def test_the_terminal_says_gain_and_next_limit_in_80_columns() -> None:
    done = infprof("whatif", LAUNCH_BOUND, "--set", "launch=0")
    assert done.returncode == 0
    assert re.search(r"With launch=0: 1\d\.\d ms, up to 5\d\.\d % won", done.stdout)
    assert "then gpu-busy" in done.stdout
    assert "A gain is a bound" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_where_nothing_gains_that_is_said() -> None:
    done = infprof("whatif", str(HEALTHY))
    assert done.returncode == 0
    assert "gains more than 5 %: only less time in kernels and copies does" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--set", "lunch=0"], "Did you mean launch?"),
        (["--set", "launch=fast"], "from 0 to 1000"),
        (["--set", "kernel:nosuch=0"], "no kernel of the trace"),
        (["--set", "copies:p2p=0"], "no copies of this kind"),
    ],
)
def test_a_setting_that_does_not_fit_is_one_sentence_and_code_2(settings: list[str], words: str) -> None:
    done = infprof("whatif", str(LAUNCH_BOUND), *settings)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_stored_diagnosis_cannot_be_replayed(tmp_path: Path) -> None:
    stored = tmp_path / "d.json"
    stored.write_text(json.dumps(analyze_file(LAUNCH_BOUND).to_dict()), encoding="utf-8")
    done = infprof("whatif", str(stored))
    assert done.returncode == 2
    assert "the profile itself" in done.stderr


def test_a_trace_without_gpu_work_ends_with_3(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.nvtx(1_000, 2_000, "step")
    builder.write(tmp_path / "cpu.sqlite")
    done = infprof("whatif", str(tmp_path / "cpu.sqlite"), "--set", "launch=0")
    assert done.returncode == 3
    assert "no GPU operation was recorded" in done.stderr


def test_a_trace_whose_launches_are_unknown_says_that_what_if_is_off(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.gpu()
    for i in range(400):
        builder.kernel(i * 100_000, i * 100_000 + 60_000, "gemm", correlation=10_000 + i)
    builder.write(tmp_path / "no-launches.sqlite")
    done = infprof("whatif", str(tmp_path / "no-launches.sqlite"), "--json")
    assert done.returncode == 3
    assert "launch" in json.loads(done.stdout)["off"]
    assert "what-if is off" in done.stderr
    diagnosis = analyze_file(tmp_path / "no-launches.sqlite")
    assert "Off: " in render("terminal", diagnosis)


def test_every_report_shows_the_chain_and_keeps_it() -> None:
    diagnosis = analyze_file(LAUNCH_BOUND)
    data = json.loads(render("json", diagnosis))
    jsonschema.validate(data, schema())
    restored = Diagnosis.from_dict(data)
    assert restored.whatif == diagnosis.whatif
    for kind in ("terminal", "markdown", "html"):
        text = render(kind, restored)
        assert "launch=0" in text
        assert "56.0 %" in text
    page = render("html", restored)
    bars = [float(width) for width in re.findall(r'style="flex:0 0 ([\d.]+)%"', page)]
    # recorded: all and nothing won; then what is left and what is won of it
    assert bars[:2] == [100, 0]
    assert sum(bars[2:4]) == pytest.approx(100, abs=0.01)


def test_a_run_that_waits_for_requests_has_no_chain() -> None:
    diagnosis = analyze_file(sample_traces_dir() / "no-demand" / "trace.sqlite")
    assert diagnosis.whatif is None


def test_findings_come_in_the_order_of_what_can_be_won() -> None:
    for name in ("launch-bound-decode", "sync-per-token", "pcie-limited-pageable"):
        found = [
            f for f in analyze_file(sample_traces_dir() / name / "trace.sqlite").findings if f.gain.high is not None
        ]
        gains = [f.gain.high or 0.0 for f in found]
        assert gains == sorted(gains, reverse=True)


def test_a_replay_of_the_middle_bounds_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a finding costs may lie in the part of the window that was not replayed."""
    whole = analyze_file(LAUNCH_BOUND)
    # As if nothing were launched where it was replayed.
    monkeypatch.setattr("infprof.replay.whatif.REPORTED_OPERATIONS", 200)
    monkeypatch.setattr("infprof.replay.whatif.WhatIf.gain_in_window_ns", lambda *_: 0)
    part = analyze_file(LAUNCH_BOUND)
    assert part.whatif is not None
    assert any("in its middle" in note for note in part.whatif["notes"])
    gains = {finding.rule: finding.gain.high for finding in part.findings}
    assert gains["launch-bound"] == next(f.gain.high for f in whole.findings if f.rule == "launch-bound")
