"""Which blocks of the paged KV cache belong to whom (as in vLLM's PagedAttention, arXiv 2309.06180)."""

from __future__ import annotations

from collections.abc import Iterable

from infprof.workload.requests import Request

# Never handed out: rows that only fill a batch up write here.
NULL_BLOCK = 0


class BlockManager:
    """Hands out blocks of ``block_size`` tokens, numbered 1 … ``block_count`` - 1."""

    def __init__(self, block_count: int, block_size: int) -> None:
        if block_count < 2:
            raise ValueError("a KV cache needs the null block and at least one more")
        self.block_size = block_size
        self.usable = block_count - 1
        # The last one freed is the first one used again: it is the likeliest to be in a cache.
        self._free = list(range(block_count - 1, NULL_BLOCK, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def usage_ratio(self) -> float:
        return 1 - self.free / self.usable

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def reserve(self, request: Request, tokens: int) -> bool:
        """Give the request room for this many tokens in all; False, and nothing changes, where there are too few."""
        missing = self.blocks_for(tokens) - len(request.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            request.blocks.append(self._free.pop())
        return True

    def release(self, request: Request) -> None:
        """Take all blocks of the request back."""
        self._free.extend(reversed(request.blocks))
        request.blocks.clear()

    def check(self, requests: Iterable[Request]) -> None:
        """Every block is free or belongs to one of the requests, once. Raises AssertionError with what is wrong."""
        held = [block for request in requests for block in request.blocks]
        everything = sorted([*held, *self._free])
        if everything != list(range(1, self.usable + 1)):
            raise AssertionError(
                f"{len(held)} blocks held and {len(self._free)} free are not the {self.usable} there are"
            )
