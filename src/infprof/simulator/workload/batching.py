"""Which steps a run consists of: the scheduler of the real engine over requests that arrive, grow and leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infprof.errors import UsageError
from infprof.simulator.spec import Step
from infprof.simulator.workload.kernels import Batch
from infprof.workload.blocks import BlockManager
from infprof.workload.planning import padded
from infprof.workload.requests import Request, Sampling
from infprof.workload.scheduler import Scheduler
from infprof.workload.scheduler import Step as ScheduledStep
from infprof.workload.settings import EngineSettings


@dataclass(frozen=True)
class PlannedStep:
    """A step, its batch as kernels see it, and how long the engine waits for a request before it.

    ``shape``: rows and blocks per request of the graph that replays it, None where it runs as it is.
    """

    step: Step
    batch: Batch
    shape: tuple[int, int] | None
    wait_ns: int = 0


@dataclass(frozen=True)
class Arrival:
    at_ns: int
    prompt: list[int]
    sampling: Sampling


def plan_steps(
    arrivals: list[Arrival],
    engine: EngineSettings,
    kv_blocks: int,
    most: int,
    step_ns: Callable[[PlannedStep], int],
) -> list[PlannedStep]:
    """The steps that serve all requests, at most ``most`` of them; ``step_ns`` says about how long one takes, which
    decides whom the next one finds. Raises UsageError for a request that the KV cache cannot hold."""
    return _Planner(arrivals, engine, kv_blocks).run(most, step_ns)


class _Planner:
    def __init__(self, arrivals: list[Arrival], engine: EngineSettings, kv_blocks: int) -> None:
        self.engine, self.kv_blocks = engine, kv_blocks
        self.coming = sorted(arrivals, key=lambda a: a.at_ns)
        self.scheduler = Scheduler(BlockManager(kv_blocks, engine.block_size), engine.max_batch, engine.step_tokens)
        self.now = 0
        self.number = 0

    def run(self, most: int, step_ns: Callable[[PlannedStep], int]) -> list[PlannedStep]:
        steps: list[PlannedStep] = []
        while len(steps) < most:
            self._arrive()
            wait = 0
            if not self.scheduler.waiting and not self.scheduler.running:
                if not self.coming:
                    break
                wait, self.now = self.coming[0].at_ns - self.now, self.coming[0].at_ns
                self._arrive()
            steps.append(self._step(len(steps), wait))
            self.now += step_ns(steps[-1])
        return steps

    def _arrive(self) -> None:
        while self.coming and self.coming[0].at_ns <= self.now:
            arrival = self.coming.pop(0)
            name = f"request-{self.number}"
            request = Request(name, arrival.prompt, arrival.sampling, number=self.number, arrived_ns=arrival.at_ns)
            self.number += 1
            try:
                self.scheduler.add(request)
            except ValueError as error:
                raise UsageError(f"{name} of the workload does not fit: {error}.") from None

    def _step(self, number: int, wait_ns: int) -> PlannedStep:
        was_running, preempted = list(self.scheduler.running), self.scheduler.preemption_count
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            raise AssertionError("a scheduler with requests, each of which fits alone, has a step")
        batch, shape = self._batch(scheduled)
        finished = self._take(scheduled)
        step = Step(
            number=number,
            name=scheduled.name,
            kind=scheduled.kind,
            prefill_requests=len(scheduled.prefills),
            prefill_tokens=sum(chunk.count for chunk in scheduled.prefills),
            decode_requests=len(scheduled.decodes),
            joined=sum(chunk.request not in was_running for chunk in scheduled.chunks),
            finished=finished,
            preempted=self.scheduler.preemption_count - preempted,
        )
        return PlannedStep(step, batch, shape, wait_ns)

    def _batch(self, step: ScheduledStep) -> tuple[Batch, tuple[int, int] | None]:
        prefills = tuple((chunk.count, chunk.start) for chunk in step.prefills)
        contexts = tuple(chunk.end for chunk in step.decodes)
        sampled = sum(chunk.samples for chunk in step.chunks)
        if step.kind == "decode" and (self.engine.cuda_graphs or self.engine.static_decode):
            widest = max(len(chunk.request.blocks) for chunk in step.decodes)
            rows = padded(len(contexts), self.engine.max_batch)
            filled = contexts + (1,) * (rows - len(contexts))
            return Batch(rows, (), filled, sampled), (rows, padded(widest, self.kv_blocks))
        return Batch(sum(chunk.count for chunk in step.chunks), prefills, contexts, sampled), None

    def _take(self, step: ScheduledStep) -> int:
        """Give every request of the step its token, and end those that are complete; how many did."""
        finished = 0
        for chunk in step.chunks:
            request, samples = chunk.request, chunk.samples
            request.computed = chunk.end
            if not samples:
                continue
            request.output.append(0)
            if len(request.output) == request.sampling.max_tokens:
                self.scheduler.finish(request, "length")
                finished += 1
        return finished
