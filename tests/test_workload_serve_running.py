"""The workload's server in use: faults, metrics, profiles, the load generator, how it ends, and what the command line says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from infprof import readers  # noqa: E402
from infprof.load import LoadSpec, run_load  # noqa: E402
from infprof.probes.serving import EngineScraper  # noqa: E402
from infprof.probes.serving.endpoint import examine, new_client, ports_of_command  # noqa: E402
from infprof.workload.server.serving import PolicyOptions  # noqa: E402
from serving_bench import recording  # noqa: E402
from serving_workload import DEADLINE_S, GREEDY, MODEL, Bench, held_open, one_thread, served  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def few_threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with served() as running:
        yield running


# Faults, metrics, profiles


def test_a_fault_of_the_requests_lengthens_what_clients_send() -> None:
    with served(fault="long-context") as bench:
        answer = bench.client.completions.create(prompt="hello", max_tokens=1, **GREEDY)
        assert answer.usage is not None and answer.usage.prompt_tokens == 16 * 5


def test_kv_pressure_throws_requests_out() -> None:
    with served(PolicyOptions(max_batch=4), fault="kv-pressure") as bench:
        # Four of the usual requests take 32 blocks of 16 tokens with their prompts; these do not fit as they grow.
        threads = [
            threading.Thread(
                target=bench.client.completions.create,
                kwargs={"prompt": "x" * 30, "max_tokens": 60, "extra_body": {"ignore_eos": True}, **GREEDY},
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert bench.metric("vllm:num_preemptions_total") > 0
        assert bench.metric("vllm:request_success_total", finished_reason="length") == 4


def test_metrics_count_what_happened() -> None:
    with served() as bench:
        for _ in range(2):
            bench.client.completions.create(prompt="x" * 10, max_tokens=5, extra_body={"ignore_eos": True}, **GREEDY)
        assert bench.metric("vllm:prompt_tokens_total", model_name=MODEL, engine="0") == 20
        assert bench.metric("vllm:generation_tokens_total") == 10
        for name, count in [
            ("time_to_first_token_seconds", 2),
            ("inter_token_latency_seconds", 8),
            ("e2e_request_latency_seconds", 2),
            ("request_queue_time_seconds", 2),
            ("request_prefill_time_seconds", 2),
            ("request_decode_time_seconds", 2),
            ("request_time_per_output_token_seconds", 2),
            ("iteration_tokens_total", 10),
        ]:
            assert bench.metric(f"vllm:{name}_count") == count, name
        assert bench.metric("vllm:iteration_tokens_total_sum") == 30
        assert bench.metric("vllm:request_generation_tokens_sum") == 10
        parts = [bench.metric(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
        assert sum(parts) == pytest.approx(bench.metric("vllm:e2e_request_latency_seconds_sum"), rel=1e-6)
        first = bench.metric("vllm:time_to_first_token_seconds_sum")
        assert first == pytest.approx(parts[0] + parts[1], rel=1e-6)
        assert bench.metric("http_requests_total", handler="/v1/completions", status="2xx") == 2


def test_the_serving_probe_reads_it_as_an_engine(tmp_path: Path) -> None:
    with served() as bench, new_client() as client, recording(tmp_path) as made:
        stream = held_open(bench)
        endpoint = examine(client, bench.url)
        EngineScraper(client, endpoint).scrape(made.out)
        stream.close()
        read = made.read()
    assert (endpoint.engine, endpoint.model, endpoint.place.endswith("/metrics")) == ("infprof", MODEL, True)
    # All that vLLM has of what this engine does.
    for name in (
        *("running_requests", "waiting_requests", "kv_cache_usage_ratio", "prompt_tokens", "output_tokens"),
        *("preemptions", "requests_finished", "requests_rejected", "http_responses", "iteration_tokens_sum"),
        *("ttft_seconds_bucket", "inter_token_latency_seconds_bucket", "time_per_output_token_seconds_sum"),
        *("e2e_latency_seconds_bucket", "queue_time_seconds_bucket", "prefill_time_seconds_sum"),
    ):
        assert read.series(name), name
    (running,) = read.series("running_requests")
    assert running.value.tolist() == [1]
    (settings,) = read.facts("engine_settings").values()
    assert settings == {
        "block_size": 4,
        "cache_dtype": "float64",
        "enable_prefix_caching": False,
        "kv_cache_size_tokens": 65536,
        "max_running_requests": 32,
        "num_gpu_blocks": 16384,
    }


def test_a_port_that_is_any_is_not_asked_for_metrics() -> None:
    assert ports_of_command(["infprof", "workload", "serve", "--port", "0"]) == []


def test_the_load_generator_drives_it(bench: Bench) -> None:
    stop = threading.Event()
    figures = run_load(LoadSpec(users=4, prompt=50, output=6, time_s=0.5), bench.url, stop).to_dict()
    assert (figures["failed_count"], figures["tokens_counted_as_events"]) == (0, False)
    assert figures["output_tokens"] == 6 * figures["success_count"] > 0
    assert figures["prompt_tokens_mean"] == pytest.approx(50, rel=0.2)


def test_a_profile_is_recorded_between_start_and_stop(tmp_path: Path) -> None:
    with served(profiler="torch", profile_dir=tmp_path, profile_steps=100) as bench:
        assert bench.post("/stop_profile").status_code == 409
        assert bench.post("/start_profile").status_code == 200
        assert bench.post("/start_profile").json()["error"]["code"] == "profile_active"
        bench.client.completions.create(prompt="x", max_tokens=5, extra_body={"ignore_eos": True}, **GREEDY)
        assert bench.post("/stop_profile").status_code == 200
    (trace,) = tmp_path.iterdir()
    assert trace.name.endswith(".pt.trace.json.gz")
    read = readers.read(trace)
    assert read.ranges is not None and read.operators is not None
    steps = [read.strings[i] for i in read.ranges["text"] if read.strings[i].startswith("execute_context_")]
    assert sorted(steps) == ["execute_context_0(0)_generation_1(1)"] * 4 + ["execute_context_1(1)_generation_0(0)"]
    assert any("aten::" in read.strings[i] for i in read.operators["name"])


def test_a_profile_that_nobody_stopped_is_written_at_the_end(tmp_path: Path) -> None:
    with served(profiler="torch", profile_dir=tmp_path, profile_steps=3) as bench:
        bench.post("/start_profile")
        bench.client.completions.create(prompt="x", max_tokens=5, extra_body={"ignore_eos": True}, **GREEDY)
    (trace,) = tmp_path.iterdir()
    read = readers.read(trace)
    assert read.ranges is not None
    assert sum(read.strings[i].startswith("execute_context_") for i in read.ranges["text"]) == 3


# The end


def test_answers_may_end_once_it_is_told_to_stop() -> None:
    with served() as bench:
        stream = bench.client.completions.create(
            prompt="x", max_tokens=100, stream=True, extra_body={"ignore_eos": True}, **GREEDY
        )
        chunks = iter(stream)
        next(chunks)
        bench.stop()
        assert list(chunks)[-1].choices[0].finish_reason == "length"
    assert bench.said[-1] == "ended"


def test_answers_that_take_too_long_are_ended_and_told_so() -> None:
    with served(grace_s=0.05) as bench:
        stream = held_open(bench, max_tokens=2000)
        bench.stop()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from infprof.cli import main; main()", "workload", "serve", *arguments]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_and_ends_with_zero_on_a_signal(number: signal.Signals) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command("--port", "0", "--device", "cpu"), stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stderr is not None
            line = next(text for text in server.stderr if "serving infprof-tiny" in text)
            url = line.split(" on ")[1].strip()
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=DEADLINE_S)
            stream = iter(client.completions.create(prompt="x", max_tokens=50, stream=True, **GREEDY))
            next(stream)
            server.send_signal(number)
            assert [choice.finish_reason for chunk in stream for choice in chunk.choices][-1] in ("length", "stop")
            assert server.wait(DEADLINE_S) == 0
            assert server.stderr.read().splitlines()[-1] == "infprof: ended"
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "huge"), "There is no preset called huge"),
        (("--fault", "synch"), "Did you mean sync"),
        (("--scheduling-policy", "lifo"), "choose priority or fcfs"),
        (("--when-memory-short", "panic"), "choose wait, shorten, refuse"),
        (("--profiler", "torch"), "--profiler torch and --profile-dir DIR go together"),
        (("--profiler", "cuda", "--device", "cpu"), "needs a GPU"),
        (("--rate-limit", "0"), "choose a number above 0"),
        (("--rate-burst", "3"), "goes with --rate-limit"),
        (("--kv-overcommit", "nan"), "choose a number of 1 or more"),
        (("--max-model-len", "9000"), "preset tiny has a context of 4096"),
        (("--max-num-seqs", "4000"), "must leave each of --max-num-seqs 4000 a token"),
        (("--fault", "kv-pressure", "--num-gpu-blocks-override", "9"), "sets the KV cache's size"),
        (("--aging", "soon"), "--aging soon: write a time"),
        (("--host", "no.such.host.invalid"), "is no address of this machine"),
    ],
)
def test_what_cannot_be_asked_ends_in_a_sentence(arguments: tuple[str, ...], message: str) -> None:
    from typer.testing import CliRunner

    from infprof.cli import app

    done = CliRunner().invoke(app, ["workload", "serve", *arguments])
    assert message in f"{done.output} {done.exception}"


def test_a_port_in_use_is_named_before_the_model_is_built() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            command("--port", str(port), "--device", "cpu"), capture_output=True, text=True, timeout=60
        )
    assert (done.returncode, "building" in done.stderr) == (2, False)
    assert f"127.0.0.1 port {port} cannot be used: Address already in use" in done.stderr


@pytest.mark.parametrize("missing", ["uvicorn", "starlette"])
def test_without_its_extra_the_server_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from infprof.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "workload", "serve", "--port", "0"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "pip install 'infprof[serve]'" in done.stderr
    assert "Traceback" not in done.stderr
