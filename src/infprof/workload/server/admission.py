"""Whether there is room for a request: free blocks of the KV cache, and a batch worth starting."""

from __future__ import annotations

from dataclasses import dataclass

# What to do with a request when the KV cache has no room for it.
MEMORY_POLICIES = ("wait", "shorten", "refuse")
# A shorter answer is no answer below this part of what was asked for.
_LEAST_SHARE = 4


class KvAdmission:
    """Promises blocks of the KV cache: each request is promised what its prompt and its whole output need.

    The promises never exceed ``blocks`` × ``overcommit``. With 1.0 nobody is ever thrown out of the cache; above, more
    requests run at once and some may be computed twice. ``overcommit`` None promises without limit.
    Not safe for several threads.
    """

    def __init__(self, blocks: int, block_size: int, overcommit: float | None = 1.0) -> None:
        if overcommit is not None and overcommit < 1:
            raise ValueError("below 1 a part of the cache would never be used")
        self.block_size = block_size
        self.capacity = None if overcommit is None else int(blocks * overcommit)
        self.promised = 0

    def blocks_for(self, prompt_tokens: int, output_tokens: int) -> int:
        """Blocks that hold a request at its end: the last token is never computed on, and needs no room."""
        return -(-(prompt_tokens + output_tokens - 1) // self.block_size)

    def fits(self, blocks: int, beside: int = 0) -> bool:
        """Whether these blocks can be promised, with ``beside`` more promised before."""
        return self.capacity is None or self.promised + beside + blocks <= self.capacity

    def promise(self, blocks: int) -> None:
        """Promise them; ask ``fits`` before."""
        self.promised += blocks

    def release(self, blocks: int) -> None:
        """Take a promise back."""
        self.promised -= blocks

    def shortened(self, prompt_tokens: int, output_tokens: int) -> int | None:
        """The longest output that fits now, where that is a quarter of ``output_tokens`` at least; else None."""
        if self.fits(self.blocks_for(prompt_tokens, output_tokens)):
            return output_tokens
        assert self.capacity is not None
        room = (self.capacity - self.promised) * self.block_size - prompt_tokens + 1
        return room if room >= max(1, output_tokens / _LEAST_SHARE) else None


@dataclass(frozen=True)
class BatchWindow:
    """When an idle engine starts: at once, or when ``size`` requests are there or the first has waited ``wait_ns``.

    An engine that is at work takes who comes at its next step, so that a window would only delay them.
    """

    wait_ns: int
    size: int

    def opens_ns(self, waiting: int, oldest_arrived_ns: int, now_ns: int) -> int:
        """The time at which an idle engine with these requests starts; ``now_ns`` or earlier means at once."""
        return now_ns if waiting >= self.size else oldest_arrived_ns + self.wait_ns
