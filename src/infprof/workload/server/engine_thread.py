"""The thread that drives the engine: it admits who waits, steps, and hands out what comes of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from infprof.workload.requests import Output, Sampling
from infprof.workload.server.admission import BatchWindow, KvAdmission
from infprof.workload.server.errors import ApiError, memory_short, shutting_down
from infprof.workload.server.generation import Event, Events, Failure, Generation, Piece
from infprof.workload.server.metrics import ServerMetrics, Snapshot
from infprof.workload.server.waiting_line import Aging, WaitingLine

if TYPE_CHECKING:
    from infprof.workload.engine import Engine

T = TypeVar("T")

# The pace at which requests end is known from the last so many.
_PACE_REQUESTS = 64
_LONGEST_RETRY_S = 60.0


@dataclass(frozen=True)
class Policies:
    """By what rules requests wait, start and are refused. ``queue_timeout_ns`` None waits for ever."""

    admission: KvAdmission
    window: BatchWindow
    aging: Aging = field(default_factory=Aging)
    memory_short: str = "wait"
    most_waiting: int = 256
    queue_timeout_ns: int | None = 60_000_000_000


class EngineThread:
    """Any thread may ``submit`` and ``cancel``; events go to ``deliver``, called in this thread with those of a step.

    ``after_step`` is called in this thread after each step, ``at_end`` when there will be no more, ``on_death`` when the
    engine fails beyond repair: all requests have got their failure then. ``clock`` must be the engine's.
    """

    def __init__(
        self,
        engine: Engine,
        policies: Policies,
        metrics: ServerMetrics,
        deliver: Callable[[Events], None],
        clock: Callable[[], int],
        after_step: Callable[[], None] = lambda: None,
        at_end: Callable[[], None] = lambda: None,
        on_death: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self._engine, self._policies, self._metrics = engine, policies, metrics
        self._deliver, self._clock = deliver, clock
        self._after_step, self._at_end, self._on_death = after_step, at_end, on_death
        # Guards all below; the engine's own lock is only ever taken under it, never around it.
        self._changed = threading.Condition()
        self._line: WaitingLine[Generation] = WaitingLine()
        self._active: dict[str, Generation] = {}
        self._unscheduled: list[Generation] = []
        self._calls: list[Callable[[], None]] = []
        self._ended_ns: deque[int] = deque(maxlen=_PACE_REQUESTS)
        self._computed_prompt_tokens = 0
        self._drains_until_ns: int | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- what other threads call ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    @property
    def accepts(self) -> bool:
        """Whether new requests are taken."""
        with self._changed:
            return self._drains_until_ns is None and not self._over

    def submit(self, generation: Generation) -> None:
        """Queue a request. Raises ApiError where it is refused."""
        with self._changed:
            generation.arrived_ns = now = self._clock()
            refusal = self._refusal(generation)
            if refusal is not None:
                self._metrics.reject(refusal.code)
                raise refusal
            self._line.add(generation, self._policies.aging.place(generation.priority, now))
            self._changed.notify_all()

    def _refusal(self, generation: Generation) -> ApiError | None:
        if self._over or self._drains_until_ns is not None:
            return shutting_down()
        policies = self._policies
        if len(self._line) >= policies.most_waiting:
            message = f"{len(self._line)} requests are waiting already."
            return ApiError(429, "queue_full", message, retry_after_s=self._retry_after_s())
        if policies.memory_short == "refuse":
            before = sum(self._blocks(waiting) for waiting in self._line.items)
            if not policies.admission.fits(self._blocks(generation), before):
                return memory_short("The KV cache has no room for this request now.", self._retry_after_s())
        return None

    def _blocks(self, generation: Generation) -> int:
        return self._policies.admission.blocks_for(len(generation.prompt), generation.max_tokens)

    def _retry_after_s(self) -> float:
        """When those before are likely to be through, from the pace of the last ones; a second where none is known."""
        ended = self._ended_ns
        if len(ended) < 2 or ended[-1] == ended[0]:
            return 1.0
        per_request_s = (ended[-1] - ended[0]) / 1e9 / (len(ended) - 1)
        return min(_LONGEST_RETRY_S, per_request_s * max(1, len(self._line)))

    def cancel(self, generation: Generation) -> None:
        """End a request at once and free its blocks; nothing where it has ended."""
        with self._changed:
            if self._active.get(generation.id) is generation:
                self._engine.cancel(generation.id)
                self._end(generation, "abort", self._clock())
            elif self._line.remove_if(lambda waiting: waiting is generation):
                self._metrics.finish(generation, "abort", self._clock())
            self._changed.notify_all()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run something in this thread, between two steps. Raises ApiError where the thread has ended."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._changed:
            if self._over:
                raise shutting_down()
            self._calls.append(work)
            self._changed.notify_all()
        return future

    def drain(self, limit_s: float) -> None:
        """Take no more requests, turn away who waits, and end the others after this time; the thread ends then."""
        with self._changed:
            self._drains_until_ns = self._clock() + int(limit_s * 1e9)
            self._changed.notify_all()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end, after ``drain``. Returns whether it did."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def snapshot(self) -> Snapshot:
        """What /metrics shows of now."""
        with self._changed:
            return Snapshot(self._engine.stats(), len(self._line))

    # --- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self._die(error)
        with self._changed:
            self._over = True
            calls = self._take_calls()
        for call in calls:
            call()
        self._at_end()

    def _turn(self) -> bool:
        """Wait until there is something to do, and do it once. Returns whether there may be more."""
        with self._changed:
            while (pause_s := self._pause_s(self._clock())) != 0:
                self._changed.wait(pause_s)
            now = self._clock()
            calls = self._take_calls()
            events = self._turned_away(now)
            self._admit(now)
            works, over = bool(self._active), self._drains_until_ns is not None and not self._active
        for call in calls:
            call()
        self._deliver(events)
        if works:
            self._step()
        return not over

    def _take_calls(self) -> list[Callable[[], None]]:
        calls, self._calls = self._calls, []
        return calls

    def _pause_s(self, now: int) -> float | None:
        """How long there is nothing to do, 0 for not at all; None until something changes."""
        if self._calls or self._active or self._drains_until_ns is not None:
            return 0
        if not self._line:
            return None
        return max(0, self._opens_ns(now) - now) / 1e9

    def _opens_ns(self, now: int) -> int:
        items = self._line.items
        return self._policies.window.opens_ns(len(items), min(item.arrived_ns for item in items), now)

    def _turned_away(self, now: int) -> Events:
        """Requests that will not be served (any longer), with their failures."""
        limit, end = self._policies.queue_timeout_ns, self._drains_until_ns
        turned: list[tuple[Generation, ApiError]] = []
        if end is not None:
            turned += [(waiting, shutting_down()) for waiting in self._line.remove_if(lambda _: True)]
        elif limit is not None:
            late = self._line.remove_if(lambda waiting: now - waiting.arrived_ns > limit)
            turned += [(waiting, self._timeout(limit)) for waiting in late]
        for _, error in turned:
            self._metrics.reject(error.code)
        if end is not None and now >= end:
            cut = list(self._active.values())
            for generation in cut:
                self._engine.cancel(generation.id)
                self._end(generation, "abort", now)
            turned += [(generation, shutting_down()) for generation in cut]
        return [(generation, Failure(error)) for generation, error in turned]

    def _timeout(self, limit: int) -> ApiError:
        message = f"The request waited {limit / 1e9:g} s and could not start."
        return ApiError(503, "queue_timeout", message, retry_after_s=self._retry_after_s())

    def _admit(self, now: int) -> None:
        """Hand requests to the engine, in order, as far as batch and memory go. Nobody passes one who waits for memory:
        else a stream of small requests would keep a large one out."""
        if not self._line or (not self._active and self._opens_ns(now) > now):
            return
        while self._line and len(self._active) < self._policies.window.size:
            generation = self._line.first
            output = self._allowed_output(generation)
            if output is None:
                return
            generation.max_tokens = output
            self._start_one(self._line.pop())

    def _allowed_output(self, generation: Generation) -> int | None:
        admission = self._policies.admission
        if self._policies.memory_short == "shorten":
            return admission.shortened(len(generation.prompt), generation.max_tokens)
        return generation.max_tokens if admission.fits(self._blocks(generation)) else None

    def _start_one(self, generation: Generation) -> None:
        generation.promised_blocks = self._blocks(generation)
        self._policies.admission.promise(generation.promised_blocks)
        sampling = Sampling(generation.max_tokens, generation.temperature, generation.seed, generation.stop_token_ids)
        # The engine throws out the last in the same order when blocks run out.
        place = self._policies.aging.place(generation.priority, generation.arrived_ns)
        generation.request = self._engine.add_request(generation.prompt, sampling, generation.id, place)
        self._active[generation.id] = generation
        self._unscheduled.append(generation)

    def _step(self) -> None:
        started = self._clock()
        outputs = self._engine.step()
        stats = self._engine.stats()
        with self._changed:
            now = self._clock()
            self._note_scheduled(started)
            events = [event for output in outputs if (event := self._take(output, now)) is not None]
        computed = stats.computed_prompt_tokens - self._computed_prompt_tokens
        self._computed_prompt_tokens = stats.computed_prompt_tokens
        tokens = sum(output.token is not None for output in outputs)
        if computed + tokens:
            self._metrics.step(computed + tokens)
        self._deliver(events)
        self._after_step()

    def _note_scheduled(self, started: int) -> None:
        left = []
        for generation in self._unscheduled:
            if generation.request is not None and (generation.request.computed or generation.request.output):
                generation.scheduled_ns = started
            elif generation.id in self._active:
                left.append(generation)
        self._unscheduled = left

    def _take(self, output: Output, now: int) -> tuple[Generation, Event] | None:
        """What a client hears of a token; None where the request has ended meanwhile."""
        generation = self._active.get(output.request_id)
        if generation is None:
            return None
        if output.token is None:
            self._end(generation, "error", now)
            return generation, Failure(memory_short("The device has no memory for it now.", self._retry_after_s()))
        self._metrics.token(generation, now)
        generation.first_ns = generation.first_ns if generation.first_ns is not None else now
        generation.last_ns = now
        generation.output_tokens += 1
        text, finish = self._text(generation, output)
        if finish is not None:
            self._end(generation, finish, now)
        return generation, Piece((output.token,), text, finish, generation.output_tokens)

    def _text(self, generation: Generation, output: Output) -> tuple[str, str | None]:
        """The text that a token completes, and why the answer ends with it."""
        assert output.token is not None
        text, stopped = generation.text.add(output.token)
        finish = output.finish_reason
        if finish is None and stopped:
            self._engine.cancel(generation.id)
        elif finish is not None and not stopped:
            rest, stopped = generation.text.end()
            text += rest
        return text, "stop" if stopped else finish

    def _end(self, generation: Generation, reason: str, now: int) -> None:
        del self._active[generation.id]
        self._policies.admission.release(generation.promised_blocks)
        self._ended_ns.append(now)
        self._metrics.finish(generation, reason, now)

    def _die(self, error: BaseException) -> None:
        """The engine cannot go on: everybody is told."""
        with self._changed:
            self._over = True
            now = self._clock()
            lost = [*self._active.values(), *self._line.remove_if(lambda _: True)]
            for generation in list(self._active.values()):
                self._end(generation, "error", now)
        failure = ApiError(500, "engine_failed", f"The engine failed: {first_line(error)}")
        self._deliver([(generation, Failure(failure)) for generation in lost])
        self._on_death(error)


def first_line(error: BaseException) -> str:
    """What an error says, without the pages that CUDA adds."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
