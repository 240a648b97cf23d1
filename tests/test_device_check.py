"""scripts/device-check.sh and the table of faults that it makes, as far as a machine without a GPU allows."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

from infprof.diagnosis import analyze_file
from infprof.resources import sample_traces_dir
from infprof.workload.checking import Check, check, expectation_without_gpu, table_text
from infprof.workload.faults import describe_faults

ROOT = Path(__file__).parents[1]
EXPECTED = {row["name"]: row["expected"] for row in describe_faults()}


def says(
    name: str, cause: str | None = None, code: str | None = None, findings: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A diagnosis with this verdict."""
    verdict = {"class": name, "cause": cause, "code": code, "rank": "C", "confidence": 0.8}
    return {"verdict": verdict, "findings": [{"rule": rule} for rule in findings]}


@pytest.mark.parametrize(
    ("fault", "diagnosis", "outcome", "why"),
    [
        ("offload", says("pcie-limited", "volume", findings=("exposed-copies",)), "right", None),
        ("offload", says("pcie-limited", "pageable", findings=("exposed-copies",)), "wrong", "the cause is pageable"),
        ("offload", says("pcie-limited", "volume"), "missed", "no finding exposed-copies"),
        ("offload", says("scheduling-bubble", "sync"), "wrong", "the class is scheduling-bubble"),
        # It claims nothing, so it is no mistake either.
        ("offload", says("gpu-busy"), "missed", "the class is gpu-busy"),
        ("offload", says("unusable", code="too-short"), "missed", "the class is unusable"),
        ("allocator", says("scheduling-bubble", "unknown"), "missed", "the cause is unknown"),
        ("small-batch", says("scheduling-bubble", "launch"), "right", None),
        ("none", None, "missed", "nothing was diagnosed"),
    ],
)
def test_a_diagnosis_is_right_wrong_or_missed(
    fault: str, diagnosis: dict[str, Any] | None, outcome: str, why: str | None
) -> None:
    row = check(fault, "nsys", diagnosis, EXPECTED[fault])
    assert (row.outcome, row.why) == (outcome, why)


def test_on_the_cpu_nothing_but_no_gpu_work_is_right() -> None:
    expected = expectation_without_gpu()
    assert check("sync", "torch", says("unusable", code="no-gpu-work"), expected).outcome == "right"
    assert check("sync", "torch", says("unusable", code="damaged"), expected).outcome == "wrong"
    assert check("sync", "torch", says("scheduling-bubble", "sync"), expected).outcome == "wrong"


def test_a_real_diagnosis_is_judged_by_what_it_says() -> None:
    diagnosis = analyze_file(sample_traces_dir() / "launch-bound-decode/trace.sqlite").to_dict()
    assert check("launch", "nsys", diagnosis, EXPECTED["launch"]).outcome == "right"
    row = check("pageable", "nsys", diagnosis, EXPECTED["pageable"])
    assert row.outcome == "wrong" and row.said.startswith("scheduling-bubble/") and row.findings


def test_the_table_shows_every_fault_under_every_recorder_and_what_is_missing() -> None:
    rows = [
        check("sync", "nsys", says("scheduling-bubble", "sync", findings=("sync-per-step",)), EXPECTED["sync"]),
        check("sync", "torch", says("compute-bound"), EXPECTED["sync"]),
        Check("fp32", "nsys", "left out", why="the time was over"),
        Check("fp32", "torch", "left out", why="the time was over"),
    ]
    text = table_text(rows)
    assert text.splitlines()[:2] == [
        "fault           nsys                           torch",
        "sync            right: scheduling-bubble/sync  wrong: compute-bound",
    ]
    assert "sync under torch, wrong: the class is compute-bound; expected scheduling-bubble; sync or host-work" in text
    assert "The recorders disagree\n  sync: scheduling-bubble/sync under nsys, compute-bound under torch" in text
    assert "Left out\n  nsys: fp32; torch: fp32 (the time was over)\n" in text
    assert text.endswith("1 right, 1 wrong, 0 missed, 2 left out\n")


# --- the runs ---------------------------------------------------------------------------------------------------------

# An infprof that knows three faults: its diagnosis of each is right, but that of fp32; cupti cannot work, and with torch
# the run of launch never ends.
_FAKE = """
    import json, os, sys, time
    from pathlib import Path
    from infprof.workload.faults import describe_faults
    words = sys.argv[1:]
    if words[:2] == ["workload", "list"]:
        print(json.dumps({"faults": [row for row in describe_faults() if row["name"] in ("fp32", "launch", "none")]}))
        sys.exit()
    fault, backend = words[words.index("--fault") + 1], words[words.index("--backend") + 1]
    if backend == "cupti":
        print("infprof: there is no CUPTI here.", file=sys.stderr)
        sys.exit(4)
    bundle = Path(words[words.index("-o") + 1])
    (bundle / "trace").mkdir(parents=True)
    (bundle / "manifest.json").write_text(json.dumps({"notes": [], "backend": {"name": backend}}))
    (bundle / "trace/large").write_bytes(bytes(5 << 20))
    (bundle / "trace/small").write_bytes(b"12")
    if (backend, fault) == ("torch", "launch"):
        time.sleep(600)
    verdict = {"launch": ("scheduling-bubble", "launch"), "none": ("gpu-busy", None), "fp32": ("pcie-limited", "volume")}
    name, cause = verdict[fault]
    text = {"verdict": {"class": name, "cause": cause, "code": None}, "findings": [{"rule": "launch-bound"}]}
    (bundle / "diagnosis.json").write_text(json.dumps(text))
"""


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fault_matrix", ROOT / "scripts/fault-matrix.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fake = tmp_path / "fake.py"
    fake.write_text(dedent(_FAKE))
    monkeypatch.setattr(module, "INFPROF", [sys.executable, str(fake)])
    return module


def run_matrix(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["fault-matrix", *words])
    code = matrix.main()
    rows = json.loads((Path(words[0]) / "fault-matrix.json").read_text())
    return code, {f"{row['fault']} {row['backend']}": row for row in rows}


def test_all_faults_run_under_all_recorders(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "RUN_LIMIT_S", 3.0)
    monkeypatch.setattr(matrix, "UNTIL_DONE_S", 1.0)
    code, rows = run_matrix(matrix, monkeypatch, str(tmp_path / "out"))
    assert code == 1
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "none nsys": "right",
        "none torch": "right",
        "none cupti": "left out",
        "launch nsys": "right",
        "launch torch": "missed",
        "launch cupti": "left out",
        "fp32 nsys": "wrong",
        "fp32 torch": "wrong",
        "fp32 cupti": "left out",
    }
    assert rows["launch torch"]["why"] == "it was stopped after 3 s"
    assert rows["fp32 cupti"]["why"] == "infprof: there is no CUPTI here."
    kept = sorted(path.name for path in (tmp_path / "out/nsys-none").iterdir())
    assert kept == ["diagnosis.json", "err.txt", "manifest.json", "not-kept.txt", "out.txt", "small"]
    said = capsys.readouterr().out
    assert "fp32 under nsys, wrong: the class is pcie-limited" in said and "4 right" not in said


def test_what_the_time_does_not_suffice_for_is_named(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, rows = run_matrix(matrix, monkeypatch, str(tmp_path / "out"), "--limit", "1", "--backends", "nsys")
    assert code == 1 and {row["why"] for row in rows.values()} == {"the time was over"}


def test_only_what_was_asked_for_is_run(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = [str(tmp_path / "out"), "--backends", "torch", "--faults", "none"]
    assert run_matrix(matrix, monkeypatch, *words)[0] == 0
    plan = matrix.Plan(tmp_path, "3b", False, 0.0, Path("/opt/nsys"))
    command = matrix.command(plan, "pageable", "nsys", tmp_path / "b")
    assert "cuda-profiler-api" in command and "/opt/nsys" in command and command[command.index("--output") + 1] == "12"
    assert "--capture" not in matrix.command(plan, "pageable", "torch", tmp_path / "b")


def test_the_dry_run_goes_through_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    environ = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable, "FAULTS": "none", "BACKENDS": "torch"}
    words = [str(ROOT / "scripts/device-check.sh"), "--dry-run"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "none            right: unusable/no-gpu-work" in done.stdout
    (row,) = json.loads((tmp_path / "fault-matrix.json").read_text())
    assert row["details"]["backend"]["processes"][0]["trace"], "the workload was not recorded"
    assert "2 steps worked, 0 failed" in (tmp_path / "summary.txt").read_text()


def test_an_unknown_option_is_refused() -> None:
    done = subprocess.run([ROOT / "scripts/device-check.sh", "--cpu"], capture_output=True, text=True)
    assert done.returncode == 2 and "--dry-run" in done.stderr


def test_a_row_is_plain_data() -> None:
    row = replace(check("none", "nsys", says("gpu-busy"), EXPECTED["none"]), seconds=1.5, details={"exit_code": 0})
    assert json.loads(json.dumps(row.to_dict()))["seconds"] == 1.5
