"""One request on its way through the server, and what its client gets to hear."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from infprof.workload.requests import Request
from infprof.workload.server.errors import ApiError
from infprof.workload.server.tokenizer import TextStream


@dataclass(frozen=True)
class Piece:
    """Tokens of the answer and the text that they complete, which may be none. ``finish`` ends the answer.

    ``output_tokens`` counts those so far.
    """

    tokens: tuple[int, ...]
    text: str
    finish: str | None
    output_tokens: int

    def __add__(self, later: Piece) -> Piece:
        return Piece(self.tokens + later.tokens, self.text + later.text, later.finish, later.output_tokens)


@dataclass(frozen=True)
class Failure:
    """The end of a request that gets no (further) answer."""

    error: ApiError


Event = Piece | Failure


@dataclass(eq=False)
class Generation:
    """``inbox`` is where the client's side waits for events; the engine's side never looks into it.

    Times are ns of the engine's clock. ``promised_blocks`` counts those of the KV cache while it is admitted.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: frozenset[int]
    priority: int
    text: TextStream
    inbox: Any
    arrived_ns: int = 0
    promised_blocks: int = 0
    request: Request | None = None
    scheduled_ns: int | None = None
    output_tokens: int = 0
    first_ns: int | None = None
    last_ns: int = field(default=0)


Events = list[tuple[Generation, Event]]


def by_inbox(events: Events) -> None:
    """Put each event into its request's inbox; to be called in the thread that the inboxes belong to."""
    for generation, event in events:
        generation.inbox.put_nowait(event)
