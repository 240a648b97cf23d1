"""Real public exports of nsys 2020–2026: what must be said of each, and what would be a confident wrong answer."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from conftest import SHARED
from infprof.diagnosis import Options, analyze_file
from infprof.results import Diagnosis

TRACES = SHARED / "traces"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="needs the shared traces, which a clone does not have")


@cache
def diagnose(file: str, window: str) -> Diagnosis:
    return analyze_file(TRACES / file, Options(window=window))


def expectations() -> list[dict[str, str]]:
    if not TRACES.is_dir():
        return []
    with (TRACES / "expected.tsv").open(encoding="utf-8") as table:
        rows = list(csv.DictReader(table, delimiter="\t"))
    explicit = {row["file"] for row in rows if row["window"] == "auto"}
    # A file without a row for auto: the one for full holds, save that too short a start-up may say only-startup.
    for row in [row for row in rows if row["window"] == "full" and row["file"] not in explicit]:
        code = row["code"] + ("|only-startup" if row["code"] == "too-short" else "")
        rows.append({**row, "window": "auto", "code": code})
    return rows


@pytest.mark.parametrize(
    "row", expectations(), ids=lambda row: f"{Path(row['file']).name.split('.')[0]}-{row['window']}"
)
def test_class_cause_code_and_exit(row: dict[str, str]) -> None:
    verdict = diagnose(row["file"], row["window"]).verdict
    assert verdict.cls not in row["never"].split("|"), verdict.sentence
    assert verdict.cls in row["class"].split("|"), verdict.sentence
    if row["cause"] != "-" and verdict.cls not in ("unusable", "no-demand"):
        assert verdict.cause in row["cause"].split("|"), verdict.sentence
    if verdict.cls == "unusable":
        assert verdict.code in row["code"].split("|"), verdict.sentence


def index_lines() -> Iterator[tuple[str, str]]:
    """(file, line) of INDEX.md below the heading of each nsys export."""
    if not TRACES.is_dir():
        return
    file = ""
    for line in (TRACES / "INDEX.md").read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"### `(\S+)`", line):
            file = heading[1]
        if file:
            yield file, line


def true_slices() -> list[tuple[str, int, dict[str, int]]]:
    """(file, device, ns by column) from the tables of INDEX.md; each device over its own span."""
    found = []
    for file, line in index_lines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if len(cells) == 10 and cells[0].isdigit():
            numbers = [int(c.split()[0].replace(",", "")) for c in cells[1:6]]
            names = ("window", "compute", "comm", "copy", "idle")
            found.append((file, int(cells[0]), dict(zip(names, numbers, strict=True))))
    assert found or not TRACES.is_dir()
    return found


@pytest.mark.parametrize(
    ("file", "device", "true"),
    true_slices(),
    ids=lambda value: str(value)[:60] if isinstance(value, (str, int)) else "",
)
def test_slices_equal_the_index(file: str, device: int, true: dict[str, int]) -> None:
    diagnosis = diagnose(file, "full")
    result = next(d for d in diagnosis.devices if d.id == device)

    def total(kind: str) -> int:
        return sum(s.ns for s in result.slices if s.kind == kind)

    assert total("compute") == true["compute"]
    assert total("exposed_communication") == true["comm"]
    assert total("exposed_copy") == true["copy"]
    # The index takes each device's own span, --window full the span of all: only idle may differ, by just that.
    assert total("idle") == true["idle"] + diagnosis.window.duration_ns - true["window"]
    assert sum(s.ns for s in result.slices) == diagnosis.window.duration_ns


def true_totals() -> list[tuple[str, int, int]]:
    found = []
    for file, line in index_lines():
        if match := re.match(r"- kernels ([\d,]+), total ([\d,]+) ns", line):
            found.append((file, int(match[1].replace(",", "")), int(match[2].replace(",", ""))))
    assert found or not TRACES.is_dir()
    return found


@pytest.mark.parametrize(("file", "count", "total_ns"), true_totals())
def test_kernel_totals_equal_the_index(file: str, count: int, total_ns: int) -> None:
    devices = diagnose(file, "full").devices
    assert sum(d.kernels.count for d in devices) == count
    assert sum(d.kernels.total_ns for d in devices) == total_ns


@pytest.mark.parametrize("file", sorted({row["file"] for row in expectations()}))
def test_nothing_private_in_the_json(file: str) -> None:
    """No path, environment or account of the capture leaves in a report."""
    import json

    text = json.dumps(diagnose(file, "full").to_dict())
    assert not re.search(r"/home/|/root/|LD_LIBRARY_PATH|PATH=|@example", text)


def test_what_a_replay_wins_nothing_from_does_not_warn() -> None:
    """The host is so late that communication ends long before anybody wants its result."""
    found = {f.rule: f for f in diagnose("kineto/a100_ddp_nccl_meta.json.gz", "auto").findings}
    comm = found["exposed-communication"]
    assert comm.gain.high is not None and comm.gain.high < 0.001
    assert comm.severity == "info"
    assert found["host-work-per-launch"].severity == "critical"


def test_a_data_loader_is_host_work_between_steps_and_no_pause() -> None:
    for file in ("kineto/h100_owlv2.json.gz", "kineto/v100_resnet50_workers0.json.gz"):
        first = diagnose(file, "auto").findings[0]
        assert first.rule == "host-work-between-steps"


def test_rules_that_were_not_evaluated_say_what_is_missing() -> None:
    needs = {row.rule: row.needs for row in diagnose("kineto/a100_memcpy_bench.json", "auto").not_evaluated}
    assert "one GPU" in needs["peer-pauses"]
    assert "never rested" in needs["clock-ramp"]
    assert "None" not in needs["fp8-products"] and "no kernel time" in needs["gemm-far-from-roof"]
