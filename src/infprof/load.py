"""A plain closed loop of OpenAI requests: enough load to profile a server under, with honest figures of its own.

Each of ``users`` sends a request, reads the stream to its end, and sends the next. A closed loop adapts to the server:
good for "what happens under load", wrong for "what latency at a given rate". Definitions:

- TTFT: request sent to the first event with text (reasoning text and tool calls count; a role or an empty text do not).
- E2E: request sent to the last such event. TPOT: (last - first) / (tokens - those of the first event, mostly 1), with
  the tokens of the server's ``usage``.
- Only requests that succeeded are in latencies and throughput; a refusal in 2 ms is no fast answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from infprof.durations import UNIT_SECONDS
from infprof.errors import EXIT_COLLECTOR, InfprofError, UsageError
from infprof.quantiles import summary
from infprof.rules.expression import unknown

_WORDS = (
    *("time", "river", "stone", "paper", "light", "north", "garden", "window", "yellow", "answer", "letter", "number"),
    *("winter", "summer", "bridge", "market", "engine", "silver", "planet", "forest", "island", "morning", "travel"),
    *("signal", "copper", "valley", "harbor", "meadow", "village", "castle"),
)
# Of English text; replaced by what the server's own count says.
_TOKENS_PER_WORD = 1.3
_PROBE_WORDS = 24
# Servers that know this extension; others may refuse a request that has it.
_KNOW_IGNORE_EOS = ("vllm", "sglang", "lmdeploy", "llamacpp", "infprof")
# Servers that give the usage so far with every event when asked: how many tokens the first event had is known then.
_KNOW_RUNNING_USAGE = ("vllm", "sglang", "infprof")
# After a refusal a user waits, or the refusals become the load.
_PAUSE_AFTER_ERROR_S = 0.25
# How long requests may take to end once the time is up.
_DRAIN_S = 30.0
_POLL_S = 0.05
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@dataclass(frozen=True)
class LoadSpec:
    """What to send: concurrent ``users``, tokens of a ``prompt`` and of its ``output``, and for how many seconds.

    ``time_s`` None means until stopped.
    """

    users: int = 8
    prompt: int = 512
    output: int = 64
    time_s: float | None = 30.0


_KEYS = ("users", "prompt", "output", "time")


def parse_load(text: str) -> LoadSpec:
    """``users=8,prompt=512,output=64,time=30s`` as a LoadSpec; keys left out keep their default.

    Raises UsageError for an unknown key, a key given twice, or a value that is no positive number.
    """
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in _KEYS:
            raise UsageError(f"In --load {text}: {unknown('key', key, _KEYS)}. The keys are {', '.join(_KEYS)}.")
        if key in values:
            raise UsageError(f"In --load {text}: `{key}` is given twice.")
        values[key] = _seconds(text, value) if key == "time" else _number(text, key, value)
    if not values:
        raise UsageError(
            "--load needs at least one of users, prompt, output, time: users=8,prompt=512,output=64,time=30s."
        )
    if "time" in values:
        values["time_s"] = values.pop("time")
    return LoadSpec(**values)


def _number(text: str, key: str, value: str) -> int:
    if not value.isdecimal() or int(value) == 0:
        raise UsageError(f"In --load {text}: {key} must be a whole number of at least 1, not `{value}`.")
    return int(value)


def _seconds(text: str, value: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value)
    if not match or match.group(2) not in UNIT_SECONDS or float(match.group(1)) == 0:
        raise UsageError(f"In --load {text}: time must be like 30s, 2m or 500ms, not `{value}`.")
    return float(match.group(1)) * UNIT_SECONDS[match.group(2)]


class SseEvents:
    """Server-sent events out of bytes as they come: comments are skipped, data lines of one event are joined."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[str]:
        """The events that these bytes complete. Lines end with LF or CRLF, and with nothing else."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield self._take()

    def close(self) -> Iterator[str]:
        """The event that the stream's end cut off from its blank line, if any."""
        yield from self.feed(b"\n\n")

    def _take(self) -> str:
        event = b"\n".join(self._data).decode("utf-8", "replace")
        self._data = []
        return event


@dataclass
class Answer:
    """One request as its client saw it. Times are ns of one monotonic clock; ``error`` is a class, None = success.

    ``tokens`` come from the server's usage; else they are the events with text, and ``counted_as_events`` is true.
    """

    sent_ns: int
    first_ns: int | None = None
    first_answer_ns: int | None = None
    last_ns: int | None = None
    events: int = 0
    gaps_ns: list[int] = field(default_factory=list)
    first_tokens: int = 1
    usage_tokens: int | None = None
    prompt_tokens: int | None = None
    finish: str | None = None
    done: bool = False
    error: str | None = None
    message: str | None = None

    @property
    def tokens(self) -> int:
        return self.events if self.usage_tokens is None else self.usage_tokens

    @property
    def counted_as_events(self) -> bool:
        return self.usage_tokens is None

    def event(self, text: str, now_ns: int) -> None:
        """Take in one event's data. After an error nothing counts any more."""
        if self.error is not None:
            return
        if text.strip() == "[DONE]":
            self.done = True
            return
        try:
            data = json.loads(text)
        except ValueError:
            self.fail("bad_json", text)
            return
        self._take(data if isinstance(data, dict) else {}, now_ns)

    def _take(self, data: dict[str, Any], now_ns: int) -> None:
        if data.get("error"):
            self.fail("stream_error", _message(data["error"]))
            return
        self._usage(data.get("usage"))
        for choice in data.get("choices") or ():
            self.finish = choice.get("finish_reason") or self.finish
            answer, reasoning = _texts(choice)
            if answer or reasoning:
                self._token(now_ns, bool(answer))

    def _usage(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self.usage_tokens = usage.get("completion_tokens", self.usage_tokens)
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)

    def _token(self, now_ns: int, is_answer: bool) -> None:
        if self.first_ns is None:
            self.first_ns, self.first_tokens = now_ns, self.usage_tokens or 1
        elif self.last_ns is not None:
            self.gaps_ns.append(now_ns - self.last_ns)
        if is_answer and self.first_answer_ns is None:
            self.first_answer_ns = now_ns
        self.last_ns = now_ns
        self.events += 1

    def fail(self, error: str, message: str | None = None) -> None:
        """Count the request as failed, once, with the first reason."""
        if self.error is None:
            self.error, self.message = error, None if message is None else " ".join(message.split())[:200]

    def end(self) -> None:
        """The stream is over: without [DONE] and without a finish reason it was cut."""
        if not self.done and self.finish is None:
            self.fail("stream_cut", "the stream ended early")
        elif self.finish == "error":
            self.fail("stream_error", "finish reason error")
        elif self.first_ns is None and not self.usage_tokens:
            self.fail("no_output", "the answer has no token")

    @property
    def ttft_ns(self) -> int | None:
        return None if self.first_ns is None else self.first_ns - self.sent_ns

    @property
    def e2e_ns(self) -> int | None:
        return None if self.last_ns is None else self.last_ns - self.sent_ns

    @property
    def tpot_ns(self) -> float | None:
        """(last - first token) / (tokens less those of the first event); None where none came after it."""
        if self.first_ns is None or self.last_ns is None or self.tokens <= self.first_tokens:
            return None
        return (self.last_ns - self.first_ns) / (self.tokens - self.first_tokens)


def _texts(choice: dict[str, Any]) -> tuple[bool, bool]:
    """Whether an event's choice carries answer text (or a tool call), and reasoning text."""
    delta = choice.get("delta") or {}
    answer = choice.get("text") or delta.get("content") or delta.get("tool_calls")
    # Engines call it one or the other, for some time both: one event all the same.
    return bool(answer), bool(delta.get("reasoning_content") or delta.get("reasoning"))


def _message(error: Any) -> str:
    return str(error.get("message") or error.get("type")) if isinstance(error, dict) else str(error)


@dataclass
class LoadResult:
    """What came of it. ``answers`` are all requests that ended; ``unfinished`` were still running when it stopped."""

    spec: LoadSpec
    model: str
    path: str
    answers: list[Answer] = field(default_factory=list)
    unfinished: int = 0

    def succeeded(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None]

    @property
    def duration_ns(self) -> int | None:
        """First request sent to the last token of a request that succeeded."""
        good = [a.last_ns for a in self.succeeded() if a.last_ns is not None]
        return max(good) - min(a.sent_ns for a in self.answers) if good else None

    def to_dict(self) -> dict[str, Any]:
        """Counts, rates per second, and percentiles in ns, ready for JSON; unknown is None."""
        good, duration = self.succeeded(), self.duration_ns
        errors = Counter(a.error for a in self.answers if a.error is not None)
        return {
            "users": self.spec.users,
            "prompt_tokens_wanted": self.spec.prompt,
            "output_tokens_wanted": self.spec.output,
            "model": self.model,
            "path": self.path,
            "duration_ns": duration,
            "request_count": len(self.answers),
            "success_count": len(good),
            "failed_count": len(self.answers) - len(good),
            "unfinished_count": self.unfinished,
            "errors": dict(errors),
            "error_messages": {str(e): self._example(str(e)) for e in errors},
            "prompt_tokens_mean": _mean([a.prompt_tokens for a in good if a.prompt_tokens is not None]),
            "output_tokens": sum(a.tokens for a in good),
            "tokens_counted_as_events": any(a.counted_as_events for a in good),
            "tokens_per_event_mean": _mean([a.tokens / a.events for a in good if a.events]),
            "requests_per_s": _per_s(len(good), duration),
            "tried_requests_per_s": _per_s(len(self.answers), duration),
            "output_tokens_per_s": _per_s(sum(a.tokens for a in good), duration),
            "ttft_ns": summary([a.ttft_ns for a in good]),
            "first_answer_ns": summary([a.first_answer_ns - a.sent_ns for a in good if a.first_answer_ns]),
            "e2e_latency_ns": summary([a.e2e_ns for a in good]),
            "tpot_ns": summary([a.tpot_ns for a in good]),
            "event_gap_ns": summary([gap for a in good for gap in a.gaps_ns]),
        }

    def _example(self, error: str) -> str | None:
        return next((a.message for a in self.answers if a.error == error and a.message), None)


def _per_s(count: int, duration_ns: int | None) -> float | None:
    return count / (duration_ns / 1e9) if duration_ns else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def run_load(
    spec: LoadSpec,
    base_url: str,
    stop: threading.Event,
    model: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadResult:
    """Send requests to ``base_url`` until the time is up or ``stop`` is set, and say what came of it.

    ``on_progress`` gets the number of requests that ended and of those that failed. When the time is up, running
    requests may end; on ``stop`` they are cut off and counted as unfinished.
    Raises InfprofError where the server has no model or no endpoint that generates.
    """
    return asyncio.run(_Load(spec, base_url.rstrip("/"), stop, model, on_progress).run())


class _Load:
    def __init__(
        self,
        spec: LoadSpec,
        base_url: str,
        stop: threading.Event,
        model: str | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._spec, self._base, self._stop = spec, base_url, stop
        self._on_progress = on_progress
        self._failed = 0
        self._result = LoadResult(spec, model or "", "/v1/completions")
        self._tokens_per_word = _TOKENS_PER_WORD
        self._ignore_eos = self._running_usage = False
        self._random = random.Random()

    async def run(self) -> LoadResult:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # Nothing of the environment: a proxy would be measured too.
        async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT, limits=limits) as client:
            if await self._unless_stopped(self._learn(client)):
                await self._run_users(client)
        return self._result

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do ``work`` to its end, or give it up when asked to stop: a server may take minutes to answer."""
        task = asyncio.create_task(work)
        while not task.done() and not self._stop.is_set():
            await asyncio.wait([task], timeout=_POLL_S)
        if task.done():
            await task
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False

    async def _learn(self, client: httpx.AsyncClient) -> None:
        await self._learn_model(client)
        await self._learn_path(client)

    async def _learn_model(self, client: httpx.AsyncClient) -> None:
        """The first model that the server lists, where none is given, and whether it knows ignore_eos."""
        try:
            found = (await client.get(f"{self._base}/v1/models")).json()["data"][0]
            owner = str(found.get("owned_by", ""))
            self._result.model = self._result.model or str(found["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            owner = ""
        if not self._result.model:
            raise InfprofError(f"{self._base}/v1/models names no model, so no load can be sent there.", EXIT_COLLECTOR)
        self._ignore_eos, self._running_usage = owner in _KNOW_IGNORE_EOS, owner in _KNOW_RUNNING_USAGE

    async def _learn_path(self, client: httpx.AsyncClient) -> None:
        """One small request for each way to ask: which one there is, and how many tokens a word has."""
        answer = Answer(0)
        for path in ("/v1/completions", "/v1/chat/completions"):
            self._result.path = path
            answer = await self._request(client, self._prompt(_PROBE_WORDS), 1)
            if answer.error is None:
                if answer.prompt_tokens:
                    self._tokens_per_word = answer.prompt_tokens / _PROBE_WORDS
                return
            if answer.error not in ("http_404", "http_405", "http_501"):
                break
        reason = f"{answer.error}: {answer.message}" if answer.message else str(answer.error)
        raise InfprofError(f"{self._base} does not generate text for the load ({reason}).", EXIT_COLLECTOR)

    async def _run_users(self, client: httpx.AsyncClient) -> None:
        loop = asyncio.get_running_loop()
        deadline = None if self._spec.time_s is None else loop.time() + self._spec.time_s
        users = [asyncio.create_task(self._user(client, deadline)) for _ in range(self._spec.users)]
        while any(not user.done() for user in users):
            if self._stop.is_set() or (deadline is not None and loop.time() > deadline + _DRAIN_S):
                break
            await asyncio.wait(users, timeout=_POLL_S)
        for user in users:
            user.cancel()
        for ended in await asyncio.gather(*users, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    async def _user(self, client: httpx.AsyncClient, deadline: float | None) -> None:
        loop = asyncio.get_running_loop()
        words = max(1, round(self._spec.prompt / self._tokens_per_word))
        while not self._stop.is_set() and (deadline is None or loop.time() < deadline):
            try:
                answer = await self._request(client, self._prompt(words), self._spec.output)
            except asyncio.CancelledError:
                self._result.unfinished += 1
                raise
            self._result.answers.append(answer)
            self._report(answer)
            if answer.error is not None:
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
            elif answer.prompt_tokens:
                words = max(1, round(words * self._spec.prompt / answer.prompt_tokens))

    def _report(self, answer: Answer) -> None:
        self._failed += answer.error is not None
        if self._on_progress is not None:
            self._on_progress(len(self._result.answers), self._failed)

    def _prompt(self, words: int) -> str:
        # The first words differ, so that no prefix cache helps: a number of 48 bits, then words.
        first = f"{self._random.getrandbits(48):x}"
        return " ".join([first, *self._random.choices(_WORDS, k=max(0, words - 4))])

    def _body(self, prompt: str, output: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._result.model, "stream": True, "max_tokens": output}
        body["stream_options"] = {"include_usage": True}
        if self._result.path.endswith("/chat/completions"):
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self._running_usage:
            body["stream_options"]["continuous_usage_stats"] = True
        if self._ignore_eos:
            body["ignore_eos"] = True
        return body

    async def _request(self, client: httpx.AsyncClient, prompt: str, output: int) -> Answer:
        body = self._body(prompt, output)
        answer = Answer(time.perf_counter_ns())
        try:
            async with client.stream("POST", self._base + self._result.path, json=body) as response:
                await _read(response, answer)
        except httpx.TimeoutException as error:
            answer.fail("timeout", type(error).__name__)
        except httpx.ConnectError:
            answer.fail("connect", "the connection was refused or lost before the answer")
        except httpx.HTTPError as error:
            # An answer that broke off in the middle, or a connection that was closed instead of answered.
            answer.fail("stream_cut" if answer.events else "connect", type(error).__name__)
        return answer


async def _read(response: httpx.Response, answer: Answer) -> None:
    if response.status_code != 200:
        text = (await response.aread()).decode("utf-8", "replace")
        answer.fail(f"http_{response.status_code}", _error_text(text))
        return
    if response.headers.get("content-type", "").startswith("application/json"):
        _read_whole(await response.aread(), answer)
        return
    events = SseEvents()
    async for data in response.aiter_raw():
        now = time.perf_counter_ns()
        for event in events.feed(data):
            answer.event(event, now)
    for event in events.close():
        answer.event(event, time.perf_counter_ns())
    answer.end()


def _read_whole(data: bytes, answer: Answer) -> None:
    """A 200 with one JSON object instead of a stream: an error, or an answer whose first token nobody saw."""
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict) and found.get("error"):
            answer.fail("stream_error", _message(found["error"]))
    answer.fail("no_stream", "the server answered at once instead of streaming")


def _error_text(text: str) -> str:
    try:
        found = json.loads(text)
    except ValueError:
        return text
    if not isinstance(found, dict):
        return text
    error = found.get("error")
    return str(found.get("message") or found.get("detail") or text) if error is None else _message(error)
