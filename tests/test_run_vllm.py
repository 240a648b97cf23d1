"""`infprof run` on a real vLLM, on the CPU. Runs where INFPROF_TEST_VLLM names a folder with it (see docs/run.md)."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from infprof.telemetry import read_telemetry

FOLDER = os.environ.get("INFPROF_TEST_VLLM")
pytestmark = pytest.mark.skipif(not FOLDER, reason="needs INFPROF_TEST_VLLM: a folder with a vLLM that runs on the CPU")


def server(port: int) -> list[str]:
    words = [f"{FOLDER}/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", f"{FOLDER}/tiny"]
    words += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    return [*words, "--enforce-eager", "--max-num-seqs", "4"]


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port: int = unused.getsockname()[1]
    return port


def run(words: list[str], log: Path) -> int:
    """`infprof run` with these words; what it and its target say goes to the file."""
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-c", "from infprof.cli import main; main()", "run", *words]
    with log.open("w") as file:
        return subprocess.run(command, stdout=file, stderr=file, env=environ, timeout=600).returncode


def test_the_serving_figures_are_those_of_a_scrape_by_hand(tmp_path: Path) -> None:
    port, bundle = unused_port(), tmp_path / "bundle"
    words = ["-o", str(bundle), "--backend", "none", "--keep", "--load", "users=6,prompt=64,output=16,time=8s"]
    code = run([*words, "--warmup", "2s", "--", *server(port)], tmp_path / "log")
    manifest = json.loads((bundle / "manifest.json").read_text())
    engine = psutil.Process(manifest["target"]["pid"])
    try:
        scrape = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    finally:
        family = [engine, *engine.children(recursive=True)]
        engine.terminate()
        _, alive = psutil.wait_procs(family, timeout=30)
        for process in alive:
            process.kill()
    assert code == 0, (tmp_path / "log").read_text()[-3000:]
    assert [p["name"] for p in manifest["phases"]] == ["start-up", "warm-up", "capture"]

    telemetry = read_telemetry(bundle / "telemetry.sqlite")
    last = {s.signal: float(s.value[-1]) for s in telemetry.all_series if not s.labels and len(s.time)}
    for signal, family_name in (
        ("output_tokens", "vllm:generation_tokens_total"),
        ("prompt_tokens", "vllm:prompt_tokens_total"),
        ("ttft_seconds_count", "vllm:time_to_first_token_seconds_count"),
        ("ttft_seconds_sum", "vllm:time_to_first_token_seconds_sum"),
    ):
        assert last[signal] == pytest.approx(_sum(scrape, family_name)), signal

    load = json.loads((bundle / "load.json").read_text())
    assert load["success_count"] > 10 and load["failed_count"] == 0
    diagnosis = json.loads((bundle / "diagnosis.json").read_text())
    measures = {m["name"]: m["value"] for m in diagnosis["measures"]}
    # Six clients and four places: what the engine ran is what its own limit allows, and the others wait.
    assert measures["running_limit_count"] == 4 and measures["running_requests_max"] <= 4
    assert measures["waiting_requests_max"] >= 1
    assert measures["ttft_p50_ns"] > 0 and measures["client_ttft_p50_ns"] > 0
    assert measures["output_tokens_per_s"] == pytest.approx(load["output_tokens_per_s"], rel=0.5)


def test_the_profiler_of_pytorch_records_each_process_of_the_engine(tmp_path: Path) -> None:
    port, bundle = unused_port(), tmp_path / "bundle"
    words = ["-o", str(bundle), "--backend", "torch", "--load", "users=4,prompt=64,output=16,time=6s", "--warmup", "3s"]
    code = run([*words, "--", *server(port)], tmp_path / "log")
    log = (tmp_path / "log").read_text()
    assert code == 0, log[-3000:]
    assert "Application startup complete" in log and "Traceback" not in log
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["target"]["ended"] == "by infprof (SIGTERM)" and manifest["state"] == "complete"
    load = json.loads((bundle / "load.json").read_text())
    assert load["success_count"] > 4 and load["failed_count"] == 0

    rows = manifest["backend"]["processes"]
    assert len(rows) >= 2 and all(row["trace"] or row["reason"] for row in rows)
    products = {row["pid"]: _products(bundle, row["trace"]) for row in rows if row["trace"]}
    # The model runs in a process of its own; the other one serves the requests.
    assert max(products.values()) > 1000
    diagnosis = json.loads((bundle / "diagnosis.json").read_text())
    assert diagnosis["verdict"]["code"] == "no-gpu-work", diagnosis["verdict"]
    assert diagnosis["provenance"]["capture"]["backend"] == "torch"
    chosen = manifest["files"]["traces"][-1]
    assert products[next(row["pid"] for row in rows if row["trace"] and row["trace"] in chosen)] > 1000
    for path in manifest["files"]["traces"]:
        words = [sys.executable, "-c", "from infprof.cli import main; main()", "analyze", str(bundle / path), "--json"]
        done = subprocess.run(words, capture_output=True, text=True)
        assert json.loads(done.stdout)["verdict"]["code"] == "no-gpu-work", done.stderr


def _products(bundle: Path, trace: str) -> int:
    events = json.loads(gzip.decompress((bundle / "trace" / trace).read_bytes()))["traceEvents"]
    return sum(event.get("name") in ("aten::mm", "aten::addmm", "aten::linear") for event in events)


def _sum(scrape: str, name: str) -> float:
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", scrape, re.M)
    assert values, name
    return sum(map(float, values))
