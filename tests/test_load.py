"""The closed-loop load: what a stream says when it is read rightly, and real requests to real sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infprof.errors import InfprofError, UsageError
from infprof.load import Answer, LoadResult, LoadSpec, SseEvents, parse_load, run_load
from infprof.measures.serving_telemetry import add_client_latencies, add_serving_telemetry
from infprof.measures.telemetry import TelemetryScope
from infprof.probes import ProbeContext
from infprof.probes.serving import ServingProbe
from infprof.results import Measures
from serving_bench import JSON, SECOND, SSE, Reply, Server, models, recording

MS = 1_000_000


def played(path: Path) -> Answer:
    """A request whose stream is ``path``: lines "@<ms since the request> <data>"."""
    answer, events = Answer(0), SseEvents()
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("@"):
            ms, _, text = line[1:].partition(" ")
            for event in events.feed(f"data: {text}\n\n".encode()):
                answer.event(event, int(ms) * MS)
    answer.end()
    return answer


def chunk(text: str = "t", finish: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def answered(*events: tuple[int, str]) -> Answer:
    """A request whose events come at the given milliseconds."""
    answer = Answer(0)
    for ms, text in events:
        answer.event(text, ms * MS)
    answer.end()
    return answer


def summary(answers: list[Answer]) -> dict[str, Any]:
    return LoadResult(LoadSpec(), "m", "/v1/completions", answers).to_dict()


# Cases


def test_b01_several_tokens_in_one_chunk(data: Path) -> None:
    answer = played(data / "sse-multi-token.txt")
    assert answer.error is None
    assert (answer.tokens, answer.events, answer.counted_as_events) == (100, 25, False)
    assert answer.tpot_ns == pytest.approx(24 * 80 * MS / 99)
    found = summary([answer])
    assert found["output_tokens"] == 100
    assert found["tokens_per_event_mean"] == 4
    assert found["event_gap_ns"]["p50"] == 80 * MS


def test_b02_a_role_is_no_token(data: Path) -> None:
    answer = played(data / "sse-role-first.txt")
    assert (answer.ttft_ns, answer.tokens, answer.events) == (2200 * MS, 50, 50)
    assert max(answer.gaps_ns) == 20 * MS


def test_b04_an_error_inside_the_stream_is_a_failure(data: Path) -> None:
    in_band = played(data / "sse-inband-error.txt")
    at_once = answered((100, '{"error":{"message":"engine stopped","code":500}}'), (101, "[DONE]"))
    assert [a.error for a in (in_band, at_once)] == ["stream_error"] * 2
    assert in_band.message == "engine stopped"
    found = summary([in_band, at_once])
    assert (found["success_count"], found["failed_count"], found["output_tokens"]) == (0, 2, 0)
    assert found["errors"] == {"stream_error": 2}
    assert found["e2e_latency_ns"]["p50"] is None and found["output_tokens_per_s"] is None


def test_b05_a_stream_that_ends_early_is_a_failure_and_one_with_a_finish_reason_is_none() -> None:
    tokens = [(100 + 20 * n, chunk()) for n in range(5)]
    cut = answered(*tokens)
    assert (cut.error, cut.events) == ("stream_cut", 5)
    assert answered(*tokens, (200, chunk("", "stop"))).error is None


def test_b06_comments_other_fields_and_joined_lines(data: Path) -> None:
    raw = (data / "sse-keepalive.txt").read_bytes()
    answer, events = Answer(0), SseEvents()
    for at in range(len(raw)):
        for event in events.feed(raw[at : at + 1]):
            answer.event(event, at)
    answer.end()
    assert (answer.error, answer.tokens, answer.events) == (None, 4, 4)
    # The first token stands well after the first comment.
    assert answer.first_ns is not None and answer.first_ns > raw.index(b'"a"')


def test_b07_usage_without_choices(data: Path) -> None:
    answer = played(data / "sse-usage-only.txt")
    assert (answer.error, answer.tokens, answer.prompt_tokens) == (None, 5, 12)
    assert answered((1, '{"choices": null, "usage": null}'), (2, chunk()), (3, "[DONE]")).error is None


def test_b08_reasoning_counts_and_the_answer_is_told_apart(data: Path) -> None:
    answer = played(data / "sse-reasoning.txt")
    assert (answer.ttft_ns, answer.first_answer_ns, answer.tokens) == (300 * MS, 1100 * MS, 50)
    assert answer.tpot_ns == 20 * MS
    twice = '{"choices":[{"delta":{"reasoning":"r","reasoning_content":"r"}}]}'
    assert answered((5, twice), (6, chunk("", "stop"))).events == 1


def test_b09_the_first_token_is_no_gap() -> None:
    answer = answered(*((2000 + 20 * n, chunk()) for n in range(10)), (2181, "[DONE]"))
    assert (answer.gaps_ns, answer.ttft_ns) == ([20 * MS] * 9, 2000 * MS)


def test_b11_refusals_are_no_fast_answers() -> None:
    answers = []
    for n in range(1000):
        answer = Answer(n * 20 * MS)
        if n % 5 < 3:
            answer.fail("http_429", "slow down")
        else:
            answer.event(chunk(), answer.sent_ns + 1000 * MS)
            answer.event(chunk("t", "stop"), answer.sent_ns + 1200 * MS)
            answer.end()
        answers.append(answer)
    found = summary(answers)
    assert found["e2e_latency_ns"]["p50"] == 1200 * MS
    assert found["errors"] == {"http_429": 600}
    assert (found["request_count"], found["success_count"]) == (1000, 400)
    assert found["requests_per_s"] == pytest.approx(20, rel=0.07)
    assert found["tried_requests_per_s"] == pytest.approx(50, rel=0.07)


# Streams


def test_usage_with_every_event_tells_how_many_tokens_the_first_one_had() -> None:
    def with_usage(tokens: int, finish: str | None = None) -> str:
        usage = {"prompt_tokens": 9, "completion_tokens": tokens}
        return json.dumps({"choices": [{"text": "t", "finish_reason": finish}], "usage": usage})

    answer = answered((100, with_usage(3)), (150, with_usage(5)), (200, with_usage(8, "length")))
    assert (answer.tokens, answer.tpot_ns) == (8, 100 * MS / 5)


def test_without_usage_events_are_counted_and_that_is_said() -> None:
    answer = answered((100, chunk()), (120, chunk("t", "stop")))
    assert (answer.tokens, answer.tpot_ns) == (2, 20 * MS)
    assert summary([answer])["tokens_counted_as_events"] is True


def test_one_token_has_no_time_per_token() -> None:
    assert answered((100, chunk("t", "stop"))).tpot_ns is None
    assert answered((100, chunk("", "stop"))).error == "no_output"
    assert answered((100, "no json")).error == "bad_json"


@given(st.lists(st.text(alphabet="ab é\u2028\u0085", min_size=1, max_size=8), max_size=5), st.data())
def test_events_do_not_depend_on_how_the_bytes_come(texts: list[str], data: st.DataObject) -> None:
    raw = "".join(f": ping\n\ndata: {text}\r\n\r\n" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    events = SseEvents()
    found = [e for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True) for e in events.feed(raw[a:b])]
    assert found + list(events.close()) == texts


def test_percentiles_of_few_requests_are_marked() -> None:
    found = summary([answered((100, chunk()), (120, chunk("t", "stop")))])["ttft_ns"]
    assert (found["count"], found["p99"], found["p99_is_maximum"]) == (1, 100 * MS, True)


# The text of --load


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("users=8,prompt=512,output=64,time=30s", LoadSpec(8, 512, 64, 30.0)),
        ("users=2", LoadSpec(2)),
        (" time = 2m , users = 3 ", LoadSpec(3, time_s=120.0)),
        ("time=500ms", LoadSpec(time_s=0.5)),
        ("time=45", LoadSpec(time_s=45.0)),
    ],
)
def test_loads_that_make_sense(text: str, spec: LoadSpec) -> None:
    assert parse_load(text) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user=8", "no key `user`. Did you mean `users`?. The keys are users, prompt, output, time"),
        ("users=0", "users must be a whole number of at least 1, not `0`"),
        ("users=-3", "not `-3`"),
        ("users=8.5", "not `8.5`"),
        ("users", "not ``"),
        ("users=1,users=2", "`users` is given twice"),
        ("time=soon", "time must be like 30s, 2m or 500ms, not `soon`"),
        ("time=0s", "not `0s`"),
        ("", "needs at least one of"),
    ],
)
def test_loads_that_make_none(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_load(text)


# Real requests


def stream(tokens: int, prompt: int = 20, *, done: bool = True) -> Reply:
    """A completions stream with usage."""
    events = [json.dumps({"choices": [{"index": 0, "text": "t", "finish_reason": None}]}) for _ in range(tokens)]
    if done:
        events.append(json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
        events += [json.dumps({"choices": [], "usage": usage}), "[DONE]"]
    return 200, SSE, "".join(f"data: {event}\n\n" for event in events)


def completions(body: dict[str, Any]) -> Reply:
    return stream(body["max_tokens"], len(body["prompt"].split()))


class StopAfter:
    """Sets an event once so many requests have ended."""

    def __init__(self, requests: int) -> None:
        self.event = threading.Event()
        self.seen: list[tuple[int, int]] = []
        self._requests = requests

    def __call__(self, ended: int, failed: int) -> None:
        self.seen.append((ended, failed))
        if ended >= self._requests:
            self.event.set()


def load(server: Server, requests: int = 12, **spec: Any) -> LoadResult:
    stop = StopAfter(requests)
    return run_load(LoadSpec(**{"users": 3, "time_s": 60, **spec}), server.url, stop.event, on_progress=stop)


def test_a_closed_loop_of_completions() -> None:
    with Server({"/v1/models": models("vllm", "tiny"), "/v1/completions": completions}) as server:
        result = load(server, prompt=50, output=4)
    found = result.to_dict()
    assert (found["model"], found["path"], found["errors"]) == ("tiny", "/v1/completions", {})
    assert found["success_count"] >= 12
    assert found["output_tokens"] == 4 * found["success_count"]
    assert found["prompt_tokens_mean"] == pytest.approx(50, abs=5)
    assert 0 < found["ttft_ns"]["p50"] <= found["e2e_latency_ns"]["p50"]
    assert json.loads(json.dumps(found)) == found
    first, *others = server.bodies
    assert (first["max_tokens"], {body["max_tokens"] for body in others}) == (1, {4})
    assert all(body["stream_options"]["include_usage"] and body["ignore_eos"] for body in server.bodies)
    assert len({body["prompt"].split()[0] for body in server.bodies}) == len(server.bodies)


def test_chat_where_completions_are_absent_and_no_extensions_for_unknown_servers() -> None:
    def chat(body: dict[str, Any]) -> Reply:
        assert body["messages"][0]["role"] == "user"
        return 200, SSE, f"data: {chunk()}\n\ndata: {chunk('t', 'stop')}\n\ndata: [DONE]\n\n"

    with Server({"/v1/models": models("someone"), "/v1/chat/completions": chat}) as server:
        result = load(server)
    assert result.path == "/v1/chat/completions"
    assert result.to_dict()["errors"] == {}
    assert not any("ignore_eos" in body or "continuous_usage_stats" in str(body) for body in server.bodies)


def after_the_first(reply: Reply) -> Callable[[dict[str, Any]], Reply]:
    """The probing request is answered, all others get ``reply``."""
    return lambda body: stream(1) if body["max_tokens"] == 1 else reply


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        ((429, JSON, '{"error":{"message":"slow down"}}'), "http_429", "slow down"),
        ((503, JSON, '{"object":"error","message":"queue is full"}'), "http_503", "queue is full"),
        ((500, "text/plain", "Internal Server Error"), "http_500", "Internal Server Error"),
        (
            (200, SSE, 'data: {"error":{"message":"engine stopped"}}\n\ndata: [DONE]\n\n'),
            "stream_error",
            "engine stopped",
        ),
        ((200, JSON, '{"error":{"message":"engine stopped"}}'), "stream_error", "engine stopped"),
        ((200, JSON, '{"choices":[{"text":"all at once"}]}'), "no_stream", "the server answered at once"),
        (stream(3, done=False), "stream_cut", "the stream ended early"),
    ],
)
def test_failures_have_a_class_and_the_servers_words(reply: Reply, error: str, message: str) -> None:
    with Server({"/v1/models": models("vllm"), "/v1/completions": after_the_first(reply)}) as server:
        found = load(server, requests=3).to_dict()
    assert set(found["errors"]) == {error}
    assert message in found["error_messages"][error]
    assert (found["success_count"], found["output_tokens"], found["ttft_ns"]["p50"]) == (0, 0, None)


def test_a_stream_that_breaks_off_is_cut_and_not_done() -> None:
    """A length that is promised and not kept, as when the server's process dies."""
    text = f"data: {chunk()}\n\n".encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 9999\r\n\r\n"

    def serve(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(head + text)

    async def request(port: int) -> Answer:
        from infprof.load import _Load

        load = _Load(LoadSpec(), f"http://127.0.0.1:{port}", threading.Event(), "m", None)
        async with httpx.AsyncClient(trust_env=False) as client:
            return await load._request(client, "a", 4)

    import asyncio

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        answer = asyncio.run(request(listener.getsockname()[1]))
        thread.join()
    assert (answer.error, answer.events) == ("stream_cut", 1)


def test_a_server_that_is_not_there_or_has_no_model() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(InfprofError, match="names no model"):
        run_load(LoadSpec(), url, threading.Event())
    with pytest.raises(InfprofError, match="does not generate text"):
        run_load(LoadSpec(), url, threading.Event(), model="m")


def test_a_server_that_refuses_to_generate_says_why() -> None:
    routes = {"/v1/models": models("vllm"), "/v1/completions": (400, JSON, '{"error":{"message":"no such LoRA"}}')}
    with Server(routes) as server, pytest.raises(InfprofError, match=r"http_400: no such LoRA"):
        run_load(LoadSpec(), server.url, threading.Event())


@pytest.mark.parametrize(("hangs_from", "unfinished"), [(2, 1), (1, 0)])
def test_stopping_cuts_off_what_runs_and_says_so(hangs_from: int, unfinished: int) -> None:
    stop, begun, free = threading.Event(), threading.Event(), threading.Event()

    def slow(body: dict[str, Any]) -> Reply:
        if body["max_tokens"] >= hangs_from:
            begun.set()
            free.wait(30)
        return stream(1)

    def stop_when_begun() -> None:
        begun.wait(30)
        stop.set()

    with Server({"/v1/models": models("vllm"), "/v1/completions": slow}) as server:
        threading.Thread(target=stop_when_begun, daemon=True).start()
        result = run_load(LoadSpec(users=1, time_s=None), server.url, stop)
        free.set()
    assert (result.answers, result.unfinished) == ([], unfinished)
    assert result.to_dict()["unfinished_count"] == unfinished


# A real vLLM


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A vLLM server on the CPU; INFPROF_TEST_VLLM names a folder with ``venv`` (vLLM installed) and ``tiny`` (a model)."""
    folder = os.environ.get("INFPROF_TEST_VLLM")
    if not folder:
        pytest.skip("needs INFPROF_TEST_VLLM: a folder with a vLLM that runs on the CPU")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    command = [f"{folder}/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", f"{folder}/tiny"]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    command += ["--enforce-eager", "--max-num-seqs", "4", "--enable-mfu-metrics"]
    log = tmp_path_factory.mktemp("vllm") / "log"
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}", server)
        yield server, command, port, log
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def _wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    pause = threading.Event()
    for _ in range(600):
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            assert server.poll() is None, "the server ended"
        pause.wait(0.5)
    raise AssertionError("the server does not get ready")


def test_a_real_vllm_under_load(vllm: Any, tmp_path: Path) -> None:
    server, command, port, log = vllm
    probe, measures = ServingProbe(), Measures()
    context = ProbeContext(server.pid, command, log_lines=lambda: log.read_text().splitlines())
    with recording(tmp_path) as made:
        tasks = {task.name: task for task in probe.start(context, made.out)}
        tasks["scrape"].run(made.out)
        made.clock.at_ns += SECOND
        stop = StopAfter(40)
        result = run_load(LoadSpec(8, 100, 32, 60.0), f"http://127.0.0.1:{port}", stop.event, on_progress=stop)
        for task in tasks.values():
            task.run(made.out)
        probe.stop(made.out)
        telemetry = made.read()
    low, high = telemetry.span_ns() or (0, 0)
    add_serving_telemetry(measures, telemetry, TelemetryScope(low, high, None))
    found = result.to_dict()
    add_client_latencies(measures, found)
    assert telemetry.facts("engine") == {"": "vllm"}
    assert telemetry.facts("model") == {"": "tiny"}
    assert telemetry.facts("engine_arguments")[""]["max_num_seqs"] == 4
    assert telemetry.facts("log_kv_cache_tokens")[""] > 0
    assert found["errors"] == {} and found["success_count"] >= 40
    assert found["output_tokens"] == 32 * found["success_count"]
    # The small first request and those that were cut off count in the engine as well.
    done = (measures.value("finished_request_count") or 0) - 1
    assert found["success_count"] <= done <= found["success_count"] + found["unfinished_count"]
    assert (measures.value("ttft_mean_ns") or 0) < found["ttft_ns"]["mean"]
    assert (measures.value("queue_time_mean_ns") or 0) > 0
    assert measures.value("running_limit_count") == 4
    assert (measures.value("engine_flop_per_s") or 0) > 0
    assert measures.value("failed_request_count") == 0
