"""Which tokens the next step computes: continuous batching with chunked prefill and preemption by recomputing.

Running requests come first, in order of priority and arrival; what is left of the step's tokens goes to waiting ones.
When blocks run out, the request that is last in that order is thrown out, and will be computed again from its start. The
first in order is therefore never thrown out, and so every request ends (each fits the cache alone: ``add`` sees to it).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from infprof.workload.blocks import BlockManager
from infprof.workload.requests import FINISHED, RUNNING, WAITING, Request


@dataclass(frozen=True)
class Chunk:
    """The tokens ``start`` to ``end`` of a request, by position."""

    request: Request
    start: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def is_decode(self) -> bool:
        """One token, after the first: what a step of generation computes."""
        return self.count == 1 and bool(self.request.output)

    @property
    def samples(self) -> bool:
        """Whether the last token known is in it, so that the next one can be chosen."""
        return self.end == self.request.total


@dataclass(frozen=True)
class Step:
    """What one forward pass computes: prompts (or parts of them) first, then one token of each decoding request."""

    prefills: tuple[Chunk, ...]
    decodes: tuple[Chunk, ...]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.prefills + self.decodes

    @property
    def kind(self) -> str:
        return "mixed" if self.prefills and self.decodes else "prefill" if self.prefills else "decode"

    @property
    def name(self) -> str:
        """The range of the step, spelt as vLLM does (0.16 and later)."""
        tokens = sum(chunk.count for chunk in self.prefills)
        count = len(self.decodes)
        return f"execute_context_{len(self.prefills)}({tokens})_generation_{count}({count})"


class Scheduler:
    """Holds the queues. Not safe for several threads: the engine's lock guards it."""

    def __init__(self, blocks: BlockManager, max_batch: int, step_tokens: int) -> None:
        self.blocks = blocks
        self.max_batch = max_batch
        self.step_tokens = step_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemption_count = 0

    def add(self, request: Request) -> None:
        """Raises ValueError for a request that the cache could not hold even alone."""
        needed = self.blocks.blocks_for(request.most_cached)
        if needed > self.blocks.usable:
            raise ValueError(f"it needs {needed} blocks of the KV cache, which has {self.blocks.usable}")
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def finish(self, request: Request, reason: str) -> None:
        """End a request, whatever it is doing, and free its blocks."""
        (self.running if request.status == RUNNING else self.waiting).remove(request)
        self.blocks.release(request)
        request.status, request.finish_reason = FINISHED, reason

    def schedule(self) -> Step | None:
        """The next step, with the blocks it writes to reserved; None where there is nothing to do."""
        chunks = list(self._continue_running())
        # Who was just thrown out does not come back at once: less than it gave up is left.
        chunks += self._admit(self.step_tokens - sum(chunk.count for chunk in chunks))
        if not chunks:
            return None
        prefills = tuple(chunk for chunk in chunks if not chunk.is_decode)
        return Step(prefills, tuple(chunk for chunk in chunks if chunk.is_decode))

    def _continue_running(self) -> Iterator[Chunk]:
        budget = self.step_tokens
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            end = min(request.total, request.computed + budget)
            while not self.blocks.reserve(request, end):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    return
            budget -= end - request.computed
            yield Chunk(request, request.computed, end)
            index += 1

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.release(request)
        request.computed, request.status = 0, WAITING
        request.preemption_count += 1
        self.preemption_count += 1
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def _admit(self, budget: int) -> Iterator[Chunk]:
        while self.waiting and budget > 0 and len(self.running) < self.max_batch:
            request = self.waiting[0]
            # Room for all of it, though a first piece may be shorter: half a prompt helps nobody.
            if not self.blocks.reserve(request, request.total):
                return
            del self.waiting[0]
            request.status = RUNNING
            bisect.insort(self.running, request, key=lambda r: r.order)
            end = min(request.total, budget)
            budget -= end
            yield Chunk(request, 0, end)
