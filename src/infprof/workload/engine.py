"""The engine: requests in, tokens out, one step at a time.

Any thread may add and cancel requests and ask for ``stats``, also while a step runs; ``step`` is for one thread at a time
(others wait their turn). A lock guards the queues and is not held while the device computes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from infprof.workload.blocks import BlockManager
from infprof.workload.model_runner import ModelRunner, Prepared
from infprof.workload.presets import ModelShape
from infprof.workload.requests import FINISHED, RUNNING, Output, Request, Sampling
from infprof.workload.scheduler import Chunk, Scheduler, Step
from infprof.workload.settings import EngineSettings
from infprof.workload.spans import span


@dataclass(frozen=True)
class EngineStats:
    """Where the engine stands; counts are since its start. ``finished`` counts by reason, ``steps`` by kind.

    ``computed_prompt_tokens`` counts what was computed again after a preemption once more, ``prompt_tokens`` does not.
    """

    running_requests: int
    waiting_requests: int
    kv_cache_usage_ratio: float
    kv_cache_usage_peak_ratio: float
    kv_blocks: int
    free_kv_blocks: int
    preemption_count: int
    prompt_tokens: int
    computed_prompt_tokens: int
    output_tokens: int
    graph_replays: int
    finished: dict[str, int]
    steps: dict[str, int]


@dataclass
class _Counts:
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    output_tokens: int = 0
    usage_peak: float = 0.0
    finished: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)


class Engine:
    """A model that serves. ``clock`` gives ns."""

    def __init__(
        self, shape: ModelShape, settings: EngineSettings, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        if settings.context > shape.context:
            raise ValueError(f"the model has a context of {shape.context} tokens, not of {settings.context}")
        self.shape = shape
        self.settings = settings
        self._clock = clock
        self._runner = ModelRunner(shape, settings)
        self._blocks = BlockManager(self._runner.block_count, settings.block_size)
        self._scheduler = Scheduler(self._blocks, settings.max_batch, settings.step_tokens)
        self._requests: dict[str, Request] = {}
        self._added = 0
        self._counts = _Counts()
        self._changed = threading.Condition()
        self._stepping = threading.Lock()

    @property
    def dtype(self) -> str:
        """What weights and arithmetic are in, such as ``bfloat16``."""
        return str(self._runner.dtype).removeprefix("torch.")

    def add_request(
        self, prompt: Sequence[int], sampling: Sampling, request_id: str | None = None, priority: int = 0
    ) -> Request:
        """Queue a request. A lower ``priority`` goes first.

        Raises ValueError for a prompt that is empty, too long for context or KV cache, or has unknown tokens, and for an
        id that is in use.
        """
        prompt = tuple(prompt)
        self._check(prompt, sampling)
        with self._changed:
            number = self._added
            name = request_id if request_id is not None else f"request-{number}"
            if name in self._requests:
                raise ValueError(f"there is a request called {name} already")
            request = Request(name, prompt, sampling, priority, number, self._clock())
            self._scheduler.add(request)
            self._added += 1
            self._requests[name] = request
            self._changed.notify_all()
        return request

    def _check(self, prompt: tuple[int, ...], sampling: Sampling) -> None:
        if not prompt:
            raise ValueError("the prompt is empty")
        if min(prompt) < 0 or max(prompt) >= self.shape.vocabulary:
            raise ValueError(f"tokens go from 0 to {self.shape.vocabulary - 1}")
        total = len(prompt) + sampling.max_tokens
        if total > self.settings.context:
            raise ValueError(
                f"{len(prompt)} prompt tokens and {sampling.max_tokens} of output are more than the context of "
                f"{self.settings.context} tokens"
            )

    def cancel(self, request_id: str) -> bool:
        """End a request at once and free its blocks; False where it has ended already or never was."""
        with self._changed:
            request = self._requests.get(request_id)
            if request is None:
                return False
            # A step that is running may still write to the blocks: only the next one can hand them out.
            self._end(request, "cancelled")
            return True

    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        with self._changed:
            return bool(self._requests)

    def wait_for_work(self, timeout_s: float | None = None) -> bool:
        """Block until there is a request, at most this long. Returns whether there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._requests), timeout_s)

    def step(self) -> list[Output]:
        """Compute one step: the new tokens of all requests in it, and which of them ended.

        When the device's memory does not suffice, the requests of the step end with the reason ``error``, and the engine
        goes on. Any other failure ends them alike and is raised.
        """
        with self._stepping:
            with self._changed:
                with span("workload: schedule"):
                    step = self._scheduler.schedule()
                if step is None:
                    return []
                self._counts.usage_peak = max(self._counts.usage_peak, self._blocks.usage_ratio)
                # Under the same lock: a request that is cancelled loses its blocks.
                prepared = self._runner.prepare(step)
            with span(step.name):
                return self._run(prepared)

    def _run(self, prepared: Prepared) -> list[Output]:
        try:
            tokens = self._runner.execute(prepared)
        except torch.cuda.OutOfMemoryError as error:
            return self._fail(prepared.step, str(error))
        except BaseException as error:
            self._fail(prepared.step, str(error))
            raise
        with self._changed, span("workload: process"):
            return self._take(prepared.step, tokens)

    def _take(self, step: Step, tokens: list[int]) -> list[Output]:
        """Give requests their tokens, and end those that are complete."""
        self._counts.steps[step.kind] += 1
        now = self._clock()
        outputs = []
        next_token = iter(tokens)
        for chunk in step.chunks:
            token = next(next_token) if chunk.samples else None
            request = chunk.request
            if request.status != RUNNING:
                continue  # cancelled meanwhile
            self._count(chunk)
            request.computed = chunk.end
            if token is not None:
                outputs.append(self._give(request, token, now))
        return outputs

    def _count(self, chunk: Chunk) -> None:
        if not chunk.is_decode:
            self._counts.computed_prompt_tokens += chunk.count
        if not chunk.request.output and chunk.samples:
            self._counts.prompt_tokens += len(chunk.request.prompt)

    def _give(self, request: Request, token: int, now: int) -> Output:
        request.output.append(token)
        request.token_times_ns.append(now)
        self._counts.output_tokens += 1
        sampling = request.sampling
        if token in sampling.stop_token_ids:
            self._end(request, "stop")
        elif len(request.output) == sampling.max_tokens:
            self._end(request, "length")
        return Output(request.id, token, request.finish_reason)

    def _end(self, request: Request, reason: str) -> None:
        self._scheduler.finish(request, reason)
        del self._requests[request.id]
        self._counts.finished[reason] += 1

    def _fail(self, step: Step, message: str) -> list[Output]:
        with self._changed:
            lost = [chunk.request for chunk in step.chunks if chunk.request.status != FINISHED]
            for request in lost:
                self._end(request, "error")
        return [Output(request.id, None, "error", message) for request in lost]

    def warm_up(self) -> None:
        """Do before the first request what would otherwise delay it: graphs are captured, kernels loaded, pools filled.

        Leaves no trace in ``stats``. Call it while there is no other request.
        """
        self._runner.warm_up()
        longest = min(64, self.settings.context - 2)
        for _ in range(min(2, self.settings.max_batch)):
            self.add_request([0] * max(1, longest), Sampling(max_tokens=2))
        while self.has_work():
            self.step()
        self._runner.synchronize()
        with self._changed:
            self._counts = _Counts()
            self._scheduler.preemption_count = 0
            self._runner.graph_replays = 0

    def stats(self) -> EngineStats:
        """A snapshot."""
        with self._changed:
            counts, blocks = self._counts, self._blocks
            return EngineStats(
                running_requests=len(self._scheduler.running),
                waiting_requests=len(self._scheduler.waiting),
                kv_cache_usage_ratio=blocks.usage_ratio,
                kv_cache_usage_peak_ratio=counts.usage_peak,
                kv_blocks=blocks.usable,
                free_kv_blocks=blocks.free,
                preemption_count=self._scheduler.preemption_count,
                prompt_tokens=counts.prompt_tokens,
                computed_prompt_tokens=counts.computed_prompt_tokens,
                output_tokens=counts.output_tokens,
                graph_replays=self._runner.graph_replays,
                finished=dict(counts.finished),
                steps=dict(counts.steps),
            )

    def check_blocks(self) -> None:
        """Raises AssertionError where a block of the KV cache is lost, or belongs to two."""
        with self._changed:
            self._blocks.check(self._requests.values())
