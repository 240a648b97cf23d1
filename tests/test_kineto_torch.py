"""Traces that a real PyTorch writes (CPU only): needs torch here, or in the environment that INFPROF_TEST_VLLM names."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from infprof.diagnosis import analyze_file
from infprof.readers import read
from infprof.trace import Trace

PROGRAM = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, record_function
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
options = dict(record_shapes=True, with_stack=True, profile_memory=True, with_flops=True, with_modules=True)
with profile(activities=[ProfilerActivity.CPU], **options) as recorded:
    for _ in range(5):
        with record_function("execute_context_0(0)_generation_8(8)"), torch.no_grad():
            model(torch.randn(8, 64)).sum().item()
recorded.export_chrome_trace(sys.argv[1])
"""


def torch_python() -> str | None:
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    folder = os.environ.get("INFPROF_TEST_VLLM")
    python = Path(folder) / "venv" / "bin" / "python" if folder else None
    return str(python) if python is not None and python.exists() else None


@pytest.fixture(scope="module", params=[".json", ".json.gz"])
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    python = torch_python()
    if python is None:
        pytest.skip("needs torch, or INFPROF_TEST_VLLM=DIR with a venv that has it")
    path = tmp_path_factory.mktemp("torch") / f"trace{request.param}"
    subprocess.run([python, "-c", PROGRAM, str(path)], check=True, capture_output=True, timeout=200)
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return path, json.loads(text)["traceEvents"]


@pytest.fixture(scope="module")
def trace(recorded: tuple[Path, list[dict[str, Any]]]) -> Trace:
    return read(recorded[0])


def test_every_operator_and_range_is_there(trace: Trace, recorded: Any) -> None:
    events = [e for e in recorded[1] if e.get("ph") == "X"]
    for table, column, category in ((trace.operators, "name", "cpu_op"), (trace.ranges, "text", "user_annotation")):
        true = Counter(e["name"] for e in events if e["cat"] == category)
        assert table is not None
        assert Counter(trace.strings[i] for i in table[column].tolist()) == true
        assert sum((table["end"] - table["start"]).tolist()) == sum(
            round(e["dur"] * 1000) for e in events if e["cat"] == category
        )
    assert trace.problems == []


def test_shapes_are_those_of_the_model(trace: Trace) -> None:
    assert trace.operators is not None
    rows = zip(trace.operators["name"].tolist(), trace.operators["inputs"].tolist(), strict=True)
    seen = Counter(trace.inputs[i].shapes[:3] for name, i in rows if trace.strings[name] == "aten::addmm")
    assert seen == {((32,), (8, 64), (64, 32)): 5, ((16,), (8, 32), (32, 16)): 5}


def test_the_clock_is_the_walls(trace: Trace, recorded: Any) -> None:
    assert trace.clock_start_unix_ns is not None
    assert abs(trace.clock_start_unix_ns / 1e9 - recorded[0].stat().st_mtime) < 120


def test_without_a_gpu_there_is_nothing_to_judge(recorded: Any) -> None:
    verdict = analyze_file(recorded[0]).verdict
    assert (verdict.cls, verdict.code) == ("unusable", "no-gpu-work")
