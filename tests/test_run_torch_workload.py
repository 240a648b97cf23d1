"""`infprof run --backend torch` around the reference workload, with the real PyTorch, on the CPU."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from run_bench import INFPROF, PATIENCE_S, manifest, nothing_left

pytest.importorskip("torch")
TINY = ["workload", "run", "--preset", "tiny", "--device", "cpu", "--requests", "4", "--prompt", "32", "--output", "16"]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


def outside(command: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    words = [*INFPROF, "run", "--backend", "torch", "--probes", "", "-o", str(tmp_path / "b"), "--", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)


def names(trace: Path) -> set[str]:
    return {str(event.get("name")) for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}


def test_the_workload_is_recorded_and_answers_as_without(tmp_path: Path) -> None:
    plain = subprocess.run([*INFPROF, *TINY, "--json"], capture_output=True, text=True, timeout=PATIENCE_S)
    done = outside([*INFPROF, *TINY, "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    # Its JSON comes first, the diagnosis after it.
    own, _ = json.JSONDecoder().raw_decode(done.stdout)
    assert own["output_sha256"] == json.loads(plain.stdout)["output_sha256"]
    (row,) = manifest(tmp_path / "b")["backend"]["processes"]
    found = names(tmp_path / "b/trace" / row["trace"])
    assert {"workload: schedule", "workload: sample", "aten::scaled_dot_product_attention"} <= found
    again = subprocess.run([*INFPROF, "analyze", str(tmp_path / "b"), "--json"], capture_output=True, text=True)
    verdict = json.loads(again.stdout)["verdict"]
    assert (verdict["class"], verdict["code"]) == ("unusable", "no-gpu-work")
    assert "No operation ran on a GPU" in done.stdout


def test_the_workload_that_refuses_its_options_ends_as_ever(tmp_path: Path) -> None:
    done = outside([*INFPROF, "workload", "run", "--fault", "nosuch"], tmp_path)
    assert done.returncode == 2 and "There is no fault called nosuch" in done.stderr
    assert manifest(tmp_path / "b")["target"]["exit_code_of"] == "target"


def test_the_profiler_does_not_bring_the_compiler_along(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time, torch\n"
        "end = time.monotonic() + 3\n"
        "while time.monotonic() < end:\n    torch.mm(torch.ones(16, 16), torch.ones(16, 16))\n    time.sleep(0.01)\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules])\n"
        "print(torch.profiler.profiler.torch is torch)\n"
    )
    done = outside([sys.executable, str(program)], tmp_path)
    assert done.stdout.startswith("[]\nTrue\n"), done.stderr
    (row,) = manifest(tmp_path / "b")["backend"]["processes"]
    assert "aten::mm" in names(tmp_path / "b/trace" / row["trace"])
    assert os.listdir(tmp_path / "b/trace") == [row["trace"]]
