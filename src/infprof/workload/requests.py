"""A request on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"

# Why a request ended: a stop token, its own limit, its owner, or a failure of the step it was in.
FINISH_REASONS = ("stop", "length", "cancelled", "error")


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy; above, ``seed`` alone decides the outcome, whatever else is
    in the batch."""

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError("temperature must be 0 or above")


@dataclass(eq=False)
class Request:
    """A prompt and what came of it so far.

    ``computed`` counts the tokens whose keys and values are in the cache, in ``blocks``. Times are ns of one clock.
    """

    id: str
    prompt: Sequence[int]
    sampling: Sampling
    # Lower goes first; of equal ones the earlier.
    priority: int = 0
    number: int = 0
    arrived_ns: int = 0
    output: list[int] = field(default_factory=list)
    token_times_ns: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    status: str = WAITING
    finish_reason: str | None = None
    preemption_count: int = 0

    @property
    def order(self) -> tuple[int, int]:
        return self.priority, self.number

    @property
    def total(self) -> int:
        """Tokens known so far."""
        return len(self.prompt) + len(self.output)

    @property
    def most_cached(self) -> int:
        """Tokens that will be in the cache at most: the last one of the output is never computed on."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens of prompt and output by position."""
        split = len(self.prompt)
        return [*self.prompt[start:end], *self.output[max(start - split, 0) : max(end - split, 0)]]


@dataclass(frozen=True)
class Output:
    """A new token of a request, or its end: ``token`` is None where it ended without one."""

    request_id: str
    token: int | None
    finish_reason: str | None = None
    error: str | None = None
