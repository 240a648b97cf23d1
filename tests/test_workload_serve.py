"""The workload's server as its clients see it: the real openai library, curl-like requests, and clients that vanish."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

torch = pytest.importorskip("torch")
openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from infprof.errors import InfprofError  # noqa: E402
from infprof.workload.model import Model  # noqa: E402
from infprof.workload.server.serving import PolicyOptions  # noqa: E402
from infprof.workload.server.tokenizer import decode  # noqa: E402
from infprof.workload.settings import EngineSettings  # noqa: E402
from serving_workload import DEADLINE_S, GREEDY, MODEL, SHAPE, Bench, held_open, one_thread, served  # noqa: E402
from test_workload_engine import naive_attention  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def few_threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with served() as running:
        yield running


def plain_generation(prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of one sequence, computed anew for each token, with no cache and no batch."""
    tokens = list(prompt)
    with torch.inference_mode():
        model = Model(SHAPE, EngineSettings(dtype="float64"), torch.float64)
        for _ in range(count):
            hidden = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), naive_attention)
            tokens.append(int(model.logits(hidden[-1:])[0].argmax()))
    return tokens[len(prompt) :]


# Answers


def test_models_are_listed(bench: Bench) -> None:
    models = bench.client.models.list().data
    assert [(model.id, model.owned_by) for model in models] == [(MODEL, "infprof")]
    assert bench.client.models.retrieve(MODEL).id == MODEL


def test_a_completion_in_one_piece_and_streamed_is_the_same(bench: Bench) -> None:
    whole = bench.client.completions.create(prompt="The river", max_tokens=20, **GREEDY)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (9, 20, 29)
    assert whole.choices[0].finish_reason == "length"
    chunks = list(
        bench.client.completions.create(
            prompt="The river", max_tokens=20, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    *pieces, last = chunks
    assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text != ""
    assert [chunk.choices[0].finish_reason for chunk in pieces][-2:] == [None, "length"]
    assert (last.choices, last.usage) == ([], whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat_in_one_piece_and_streamed_is_the_same(bench: Bench) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße?"}]
    whole = bench.client.chat.completions.create(messages=messages, max_completion_tokens=12, **GREEDY)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    first, *rest = bench.client.chat.completions.create(
        messages=messages, max_completion_tokens=12, stream=True, **GREEDY
    )
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == whole.choices[0].message.content
    assert rest[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in [first, *rest])


def test_usage_can_run_along(bench: Bench) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        bench.client.completions.create(prompt="x", max_tokens=9, stream=True, stream_options=options, **GREEDY)
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == sorted(counts) and counts[-1] == 9 and len(counts) == len(chunks)


def test_a_stop_string_ends_the_answer_and_is_not_in_it(bench: Bench) -> None:
    whole = bench.client.completions.create(prompt="The river", max_tokens=60, **GREEDY)
    text = whole.choices[0].text
    # Within the text, and rarely at the border of a token.
    stop = text[15:19]
    stopped = bench.client.completions.create(prompt="The river", max_tokens=60, stop=[stop, "never"], **GREEDY)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.usage is not None and stopped.usage.completion_tokens < 60
    bench.until(bench.is_empty)


def test_a_seed_decides_what_is_drawn(bench: Bench) -> None:
    def drawn(seed: int) -> str:
        answer = bench.client.completions.create(model=MODEL, prompt="x", max_tokens=20, temperature=1, seed=seed)
        return answer.choices[0].text

    assert drawn(1) == drawn(1) != drawn(2)


def test_greedy_output_is_that_of_plain_generation_token_for_token() -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in range(12)]
    expected = [plain_generation(prompt, 16) for prompt in prompts]
    extra = {"return_token_ids": True, "ignore_eos": True}

    async def all_at_once(url: str) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            return await asyncio.gather(
                *(client.completions.create(prompt=p, max_tokens=16, extra_body=extra, **GREEDY) for p in prompts)
            )

    # Promised to three times as many as fit: requests are thrown out and come back.
    with served(PolicyOptions(max_batch=8, overcommit=3.0), kv_blocks=40, step_tokens=24) as bench:
        answers = asyncio.run(all_at_once(bench.url))
        assert bench.engine.stats().preemption_count > 0
    assert [answer.choices[0].token_ids for answer in answers] == expected
    assert [answer.choices[0].text for answer in answers] == [decode(tokens) for tokens in expected]


# Refusals


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", {"model": MODEL}, 400, "missing_value"),
        ("/v1/completions", {"model": "other", "prompt": "x"}, 404, "model_not_found"),
        ("/v1/completions", {"model": MODEL, "prompt": "x" * 2048}, 400, "context_length_exceeded"),
        ("/v1/completions", {"model": MODEL, "prompt": "x" * 8_000_001}, 413, "body_too_large"),
        ("/v1/embeddings", {}, 404, "not_found"),
        ("/v1/models", {}, 405, "method_not_allowed"),
        ("/start_profile", None, 404, "not_found"),
    ],
)
def test_errors_have_openais_shape(bench: Bench, path: str, body: Any, status: int, code: str) -> None:
    answer = bench.post(path, body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["message"] and error["type"] == "invalid_request_error"


def test_the_client_library_knows_the_errors(bench: Bench) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        bench.client.completions.create(model="other", prompt="x")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="This model takes 2048 tokens in all"):
        bench.client.completions.create(prompt="x", max_tokens=4000, **GREEDY)


def test_profiling_must_be_switched_on_and_says_so(bench: Bench) -> None:
    assert "Start the server with --profiler" in bench.post("/stop_profile").json()["error"]["message"]


def test_a_client_beyond_its_rate_is_told_when_to_come_back() -> None:
    with served(PolicyOptions(rate_limit_per_s=0.001, rate_burst=2)) as bench:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        answers = [bench.post("/v1/completions", body, authorization="Bearer a") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert 500 < int(answers[2].headers["retry-after"]) <= 1000
        assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
        # Another key, and an address without one, have buckets of their own.
        assert bench.post("/v1/completions", body, authorization="Bearer b").status_code == 200
        assert bench.post("/v1/completions", body).status_code == 200
        with pytest.raises(openai.RateLimitError):
            for _ in range(3):
                bench.client.completions.create(prompt="x", max_tokens=1, **GREEDY)
        assert bench.metric("vllm:admission_rejections_total", reason="rate_limit_exceeded") == 2


def test_a_full_queue_and_a_wait_without_end_are_refused() -> None:
    with served(PolicyOptions(max_batch=1, max_queue=1, queue_timeout_s=0.3)) as bench:
        running = held_open(bench)
        errors: list[Any] = []

        def wait_in_line() -> None:
            with pytest.raises(openai.APIStatusError) as caught:
                bench.client.completions.create(prompt="x", stream=True, max_tokens=1, **GREEDY)
            errors.append(caught.value)

        waiting = threading.Thread(target=wait_in_line)
        waiting.start()
        bench.until(lambda: bench.server.service.engine.snapshot().waiting == 1)
        with pytest.raises(openai.RateLimitError) as full:
            bench.client.completions.create(prompt="x", max_tokens=1, **GREEDY)
        assert full.value.code == "queue_full"
        assert int(full.value.response.headers["retry-after"]) >= 1
        waiting.join(DEADLINE_S)
        assert [(error.status_code, error.code) for error in errors] == [(503, "queue_timeout")]
        assert int(errors[0].response.headers["retry-after"]) >= 1
        running.close()


# 2048 tokens of the cache; a request of 1501 leaves room for 547.
CACHE = {"kv_blocks": 512}


def test_who_does_not_fit_waits_until_there_is_room() -> None:
    with served(PolicyOptions(memory_short="wait"), **CACHE) as bench:
        running = held_open(bench)
        answers: list[Any] = []
        second = threading.Thread(
            target=lambda: answers.append(bench.client.completions.create(prompt="y", max_tokens=600, **GREEDY))
        )
        second.start()
        bench.until(lambda: bench.server.service.engine.snapshot().waiting == 1)
        assert bench.metric("vllm:num_requests_waiting") == 1
        assert bench.metric("vllm:num_requests_running") == 1
        running.close()
        second.join(DEADLINE_S)
        assert answers[0].usage.completion_tokens <= 600
        assert bench.engine.stats().preemption_count == 0


def test_memory_that_is_short_refuses_where_told_to() -> None:
    with served(PolicyOptions(memory_short="refuse"), **CACHE) as bench:
        running = held_open(bench)
        with pytest.raises(openai.InternalServerError) as refused:
            bench.client.completions.create(prompt="y", max_tokens=600, **GREEDY)
        assert (refused.value.status_code, refused.value.code) == (503, "memory_short")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert bench.client.completions.create(prompt="y", max_tokens=500, **GREEDY).choices
        running.close()


def test_memory_that_is_short_shortens_where_told_to() -> None:
    with served(PolicyOptions(memory_short="shorten"), **CACHE) as bench:
        running = held_open(bench)
        extra = {"ignore_eos": True}
        answer = bench.client.completions.create(prompt="y", max_tokens=600, extra_body=extra, **GREEDY)
        assert answer.choices[0].finish_reason == "length"
        # 512 blocks less the 375 of the other, times four, less the prompt; the last token needs no room.
        assert answer.usage is not None and answer.usage.completion_tokens == 137 * 4
        running.close()


def test_a_step_without_memory_ends_in_an_error_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as bench:
        running = held_open(bench)

        def fail(_: Any) -> list[int]:
            raise torch.cuda.OutOfMemoryError("no room")

        monkeypatch.setattr(bench.engine._runner, "execute", fail)
        with pytest.raises(openai.APIError, match="The device has no memory for it now"):
            list(running)
        with pytest.raises(openai.InternalServerError) as refused:
            bench.client.completions.create(prompt="x", **GREEDY)
        assert (refused.value.status_code, refused.value.code) == (503, "memory_short")
        monkeypatch.undo()
        assert bench.client.completions.create(prompt="x", **GREEDY).choices
        assert bench.metric("vllm:request_success_total", finished_reason="error") == 2


def test_an_engine_that_fails_tells_everybody_and_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(InfprofError, match="The engine failed, and the server ended: RuntimeError: broken"),
        served() as bench,
    ):
        running = held_open(bench)

        def fail(_: Any) -> list[int]:
            raise RuntimeError("broken")

        monkeypatch.setattr(bench.engine._runner, "execute", fail)
        with pytest.raises(openai.APIError, match="The engine failed: RuntimeError: broken"):
            list(running)


# Clients that leave


def test_a_stream_that_is_closed_frees_its_blocks(bench: Bench) -> None:
    before = bench.metric("vllm:request_success_total", finished_reason="abort")
    stream = held_open(bench)
    assert not bench.is_empty()
    stream.close()
    bench.until(bench.is_empty)
    assert bench.metric("vllm:request_success_total", finished_reason="abort") == before + 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_connection_that_breaks_frees_its_blocks(bench: Bench, stream: bool) -> None:
    body = json.dumps({**GREEDY, "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": stream}).encode()
    host, port = bench.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        bench.until(lambda: not bench.is_empty())
    bench.until(bench.is_empty)


def test_a_waiting_client_that_leaves_is_taken_out_of_the_line() -> None:
    with served(PolicyOptions(max_batch=1)) as bench:
        running = held_open(bench)
        with pytest.raises(openai.APITimeoutError):
            bench.client.with_options(timeout=0.3).completions.create(prompt="x", stream=True, **GREEDY)
        bench.until(lambda: bench.server.service.engine.snapshot().waiting == 0)
        running.close()
        bench.until(bench.is_empty)


CLIENT = """
import openai, sys
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="k")
streams = [client.completions.create(model=sys.argv[2], prompt="x", stream=True, max_tokens=1500,
           extra_body={"ignore_eos": True}) for _ in range(5)]
for stream in streams:
    next(iter(stream))
print("streaming", flush=True)
for chunk in streams[0]:
    pass
sys.stdin.read()
"""


def test_a_killed_client_leaks_nothing(bench: Bench) -> None:
    command = [sys.executable, "-c", CLIENT, bench.url, MODEL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "streaming\n"
            assert not bench.is_empty()
        finally:
            client.kill()
    bench.until(bench.is_empty)


# Many at once


def test_two_hundred_at_once_are_all_served_or_refused_with_a_code() -> None:
    policies = PolicyOptions(max_batch=16, max_queue=120, rate_limit_per_s=0.01, rate_burst=9, memory_short="wait")
    rng = random.Random(1)
    plans = [
        (f"client {number % 20}", rng.randrange(-5, 6), "x" * rng.randint(1, 60), rng.randint(1, 40))
        for number in range(200)
    ]

    async def one(client: Any, who: str, priority: int, prompt: str, tokens: int) -> tuple[str, Any]:
        extra = {"priority": priority, "ignore_eos": True}
        headers = {"authorization": f"Bearer {who}"}
        try:
            stream = await client.completions.create(
                prompt=prompt,
                max_tokens=tokens,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=extra,
                extra_headers=headers,
                **GREEDY,
            )
            chunks = [chunk async for chunk in stream]
        except openai.APIStatusError as error:
            assert int(error.response.headers["retry-after"]) >= 1
            return f"{error.status_code} {error.code}", None
        finish = [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1]
        assert chunks[-1].usage.completion_tokens == tokens
        return str(finish), None

    async def all_at_once(url: str) -> Counter[str]:
        async with (
            httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=DEADLINE_S) as client,
        ):
            requests = asyncio.gather(*(one(client, *plan) for plan in plans))
            # Somebody watches all the while.
            while not requests.done():
                assert (await http.get(f"{url}/metrics")).status_code == 200
            outcomes = await requests
        return Counter(outcome for outcome, _ in outcomes)

    with served(policies, kv_blocks=60) as bench:
        outcomes = asyncio.run(all_at_once(bench.url))
        # Ten came of each client, and nine may at once; of the 180 let in as many wait as the queue holds.
        assert outcomes["429 rate_limit_exceeded"] == 20
        assert outcomes["length"] + outcomes["429 queue_full"] == 180
        assert outcomes["length"] >= 120
        assert bench.metric("vllm:request_success_total", finished_reason="length") == outcomes["length"]
        assert bench.metric("vllm:admission_rejections_total", reason="queue_full") == outcomes["429 queue_full"]
        # Nobody was thrown out of the cache, and it was never more than full.
        assert bench.engine.stats().preemption_count == 0
        assert bench.engine.stats().kv_cache_usage_peak_ratio <= 1
        bench.until(bench.is_empty)


def test_a_patient_request_is_served_though_urgent_ones_keep_coming() -> None:
    async def story(url: str) -> int:
        counts = Counter[bool]()
        under_way, done = asyncio.Event(), asyncio.Event()

        async def urgent(client: Any) -> None:
            while not done.is_set():
                await client.completions.create(prompt="x", max_tokens=4, extra_body={"priority": -100}, **GREEDY)
                counts[under_way.is_set()] += 1
                if counts[False] >= 12:
                    under_way.set()

        async def patient(client: Any) -> None:
            await under_way.wait()
            extra = {"priority": 100}
            await client.completions.create(prompt="x", max_tokens=4, extra_body=extra, **GREEDY)
            done.set()

        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            await asyncio.wait_for(asyncio.gather(patient(client), *(urgent(client) for _ in range(6))), DEADLINE_S)
        return counts[True]

    # 200 levels of 2 ms: overtaken by all that come within 0.4 s, more than the line ever holds, and by no other.
    with served(PolicyOptions(max_batch=1, aging_s=0.002)) as bench:
        overtaken = asyncio.run(story(bench.url))
    assert overtaken > 6


def test_an_idle_engine_gathers_what_comes_within_the_batch_wait() -> None:
    async def three(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            await asyncio.gather(*(client.completions.create(prompt="x", max_tokens=2, **GREEDY) for _ in range(3)))

    # The batch is full with three: the wait itself, far longer than the test may take, never passes.
    with served(PolicyOptions(max_batch=3, batch_wait_s=10 * DEADLINE_S)) as bench:
        asyncio.run(three(bench.url))
        assert bench.engine.stats().steps == {"prefill": 1, "decode": 1}
