"""/metrics with vLLM's names and buckets (as of vLLM 0.32), so that whatever reads vLLM reads this."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infprof.workload.server.generation import Generation

if TYPE_CHECKING:
    from infprof.workload.engine import EngineStats

FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("rate_limit_exceeded", "queue_full", "queue_timeout", "memory_short", "shutting_down")

_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


@dataclass(frozen=True)
class Snapshot:
    """Where the server stands: the engine's own figures, and who waits before it."""

    engine: EngineStats
    waiting: int


class ServerMetrics:
    """Counts what happens to requests; gauges are read when somebody asks.

    ``settings`` become labels of ``cache_config_info``, beside what the engine says of its cache.
    """

    def __init__(self, model: str, settings: Mapping[str, object], snapshot: Callable[[], Snapshot]) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        # What belongs to one token or one request shows up together or not at all.
        self._lock = threading.Lock()
        ProcessCollector(registry=self._registry)
        self._snapshot = snapshot
        self._figures = _EngineFigures(self._labels, settings)
        self._registry.register(self._figures)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self._itl = self._histogram("inter_token_latency_seconds", "Gap between two tokens of a request.", _ITL)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "(last - first token) / (tokens - 1) of a request.", _ITL
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to the end.", _LATENCY)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to the first step.", _LATENCY)
        self._prefill = self._histogram("request_prefill_time_seconds", "First step to first token.", _LATENCY)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token.", _LATENCY)
        self._inference = self._histogram("request_inference_time_seconds", "First step to last token.", _LATENCY)
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens of a step, of prompts and generated.", _STEP_TOKENS
        )
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output = self._histogram("request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self._wanted = self._histogram("request_params_max_tokens", "Output tokens that were allowed.", _TOKENS)
        self._preemptions = self._histogram("request_num_preemptions", "Preemptions of a request.", _PREEMPTIONS)
        self._finished = self._counter("request_success", "Requests that ended, by why.", "finished_reason")
        for reason in FINISH_REASONS:
            self._finished.labels(**self._labels, finished_reason=reason)
        self._rejected = Counter(
            "vllm:admission_rejections",
            "Requests that were turned away, by why.",
            ("model_name", "reason"),
            registry=self._registry,
        )
        for reason in REJECTIONS:
            self._rejected.labels(model, reason)
        self._http = Counter(
            "http_requests", "Answers by route and status.", ("handler", "method", "status"), registry=self._registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"vllm:{name}", text, tuple(self._labels), buckets=buckets, registry=self._registry)
        return family.labels(**self._labels)

    def _counter(self, name: str, text: str, *extra: str) -> Counter:
        return Counter(f"vllm:{name}", text, (*self._labels, *extra), registry=self._registry)

    def token(self, generation: Generation, now_ns: int) -> None:
        """A token came: the first after the arrival, or one after another."""
        if generation.first_ns is None:
            self._ttft.observe((now_ns - generation.arrived_ns) / 1e9)
        else:
            self._itl.observe((now_ns - generation.last_ns) / 1e9)

    def step(self, tokens: int) -> None:
        """A step of the engine computed this many tokens."""
        self._step_tokens.observe(tokens)

    def finish(self, generation: Generation, reason: str, now_ns: int) -> None:
        """An admitted request ended; times that it did not come to are not observed."""
        with self._lock:
            self._finished.labels(**self._labels, finished_reason=reason).inc()
            self._e2e.observe((now_ns - generation.arrived_ns) / 1e9)
            self._prompt.observe(len(generation.prompt))
            self._output.observe(generation.output_tokens)
            self._wanted.observe(generation.max_tokens)
            if generation.request is not None:
                self._preemptions.observe(generation.request.preemption_count)
            self._observe_phases(generation)

    def _observe_phases(self, generation: Generation) -> None:
        scheduled, first, last = generation.scheduled_ns, generation.first_ns, generation.last_ns
        if scheduled is None:
            return
        self._queue.observe((scheduled - generation.arrived_ns) / 1e9)
        if first is None:
            return
        self._prefill.observe((first - scheduled) / 1e9)
        self._decode.observe((last - first) / 1e9)
        self._inference.observe((last - scheduled) / 1e9)
        if generation.output_tokens > 1:
            self._tpot.observe((last - first) / 1e9 / (generation.output_tokens - 1))

    def reject(self, reason: str) -> None:
        """A request was turned away before the engine saw it."""
        self._rejected.labels(self._labels["model_name"], reason).inc()

    def answered(self, handler: str, method: str, status: int) -> None:
        """An HTTP answer was given."""
        self._http.labels(handler, method, f"{status // 100}xx").inc()

    def text(self) -> bytes:
        """All of it in the Prometheus text format."""
        # Taken outside: the engine's thread reports here while it holds the lock that a snapshot needs.
        now = self._snapshot()
        with self._lock:
            self._figures.now = now
            return generate_latest(self._registry)


class _EngineFigures(Collector):
    """What the engine counts itself, as of ``now``."""

    def __init__(self, labels: dict[str, str], settings: Mapping[str, object]) -> None:
        self._names, self._values = list(labels), list(labels.values())
        self._settings = settings
        self.now: Snapshot | None = None

    def collect(self) -> Iterator[Metric]:
        now = self.now
        if now is None:
            return
        engine = now.engine
        yield self._gauge("num_requests_running", "Requests in the running batch.", engine.running_requests)
        waiting = now.waiting + engine.waiting_requests
        yield self._gauge("num_requests_waiting", "Requests that wait.", waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", engine.kv_cache_usage_ratio)
        yield self._counter("prompt_tokens", "Prompt tokens of requests that started.", engine.prompt_tokens)
        yield self._counter("generation_tokens", "Output tokens.", engine.output_tokens)
        yield self._counter("num_preemptions", "Requests thrown out of the KV cache.", engine.preemption_count)
        yield self._cache_config(engine.kv_blocks)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _cache_config(self, blocks: int) -> Metric:
        facts = {**self._settings, "num_gpu_blocks": blocks}
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=[*self._names, *facts])
        family.add_metric([*self._values, *map(str, facts.values())], 1)
        return family
