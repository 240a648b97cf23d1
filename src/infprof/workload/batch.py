"""A step as tensors: all numbers the device needs in one buffer, which goes over in one copy."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from infprof.workload.blocks import NULL_BLOCK
from infprof.workload.kv_cache import KvCache, decode_attention, prefill_attention
from infprof.workload.sampling import Draw
from infprof.workload.scheduler import Chunk, Step


@dataclass
class PackedStep:
    """A step in plain numbers, complete: requests may change or end once it is made.

    Rows are tokens, those of prompts first. ``prefills`` are (first row, tokens, tokens before, blocks' place in
    ``numbers``); the last ``decode_count`` rows are one request each, ``padding`` of them nobody's. ``width`` is the
    number of blocks in their tables.
    """

    numbers: list[int] = field(default_factory=list)
    row_count: int = 0
    decode_count: int = 0
    padding: int = 0
    width: int = 0
    prefills: list[tuple[int, int, int, slice]] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    slots: slice = field(default_factory=lambda: slice(0, 0))
    sampled: slice = field(default_factory=lambda: slice(0, 0))
    lengths: slice = field(default_factory=lambda: slice(0, 0))
    tables: slice = field(default_factory=lambda: slice(0, 0))

    def add(self, values: list[int]) -> slice:
        """Append numbers, and say where they are."""
        start = len(self.numbers)
        self.numbers.extend(values)
        return slice(start, len(self.numbers))


def pack(step: Step, block_size: int, rows: int | None = None, width: int | None = None) -> PackedStep:
    """The numbers of a step: ids, positions and slots of all rows, rows to sample, and where decodes find their cache.

    ``rows`` and ``width`` pad a decode step to a fixed shape, whose numbers then always lie in the same places.
    """
    decodes = step.decodes
    padding = rows - len(decodes) if rows is not None else 0
    packed = PackedStep(padding=padding, decode_count=len(decodes) + padding)
    ids, positions, slots = _rows(step.chunks, block_size)
    packed.row_count = len(ids) + padding
    # The places follow from the order: ids, positions, slots, each of ``row_count``.
    for values in (ids, positions):
        packed.add(values + [0] * padding)
    packed.slots = packed.add(slots + [NULL_BLOCK * block_size] * padding)
    packed.lengths = packed.add([chunk.end for chunk in decodes] + [1] * padding)
    packed.width = width or max((len(chunk.request.blocks) for chunk in decodes), default=0)
    tables = [chunk.request.blocks + [NULL_BLOCK] * (packed.width - len(chunk.request.blocks)) for chunk in decodes]
    tables += [[NULL_BLOCK] * packed.width] * padding
    packed.tables = packed.add([block for table in tables for block in table])
    row = 0
    for chunk in step.chunks:
        if not chunk.is_decode:
            blocks = packed.add(chunk.request.blocks)
            packed.prefills.append((row, chunk.count, chunk.start, blocks))
        row += chunk.count
        if chunk.samples:
            packed.samples.append(row - 1)
            sampling = chunk.request.sampling
            packed.draws.append(Draw(sampling.temperature, sampling.seed, chunk.end))
    packed.sampled = packed.add(packed.samples)
    return packed


def _rows(chunks: tuple[Chunk, ...], block_size: int) -> tuple[list[int], list[int], list[int]]:
    """Token ids, positions and slots of all tokens of the chunks."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for chunk in chunks:
        blocks = chunk.request.blocks
        places = range(chunk.start, chunk.end)
        ids += chunk.request.tokens(chunk.start, chunk.end)
        positions += places
        slots += [blocks[place // block_size] * block_size + place % block_size for place in places]
    return ids, positions, slots


class Batch:
    """A packed step whose numbers are on the device, as views of ``buffer``."""

    def __init__(self, packed: PackedStep, buffer: Tensor, cache: KvCache) -> None:
        count = packed.row_count
        self.ids, self.positions = buffer[:count], buffer[count : 2 * count]
        self.sampled = buffer[packed.sampled]
        self._slots = buffer[packed.slots]
        self._lengths = buffer[packed.lengths]
        self._tables = buffer[packed.tables].view(packed.decode_count, packed.width)
        self._prefills = [(row, rows, before, buffer[blocks]) for row, rows, before, blocks in packed.prefills]
        self._decode_row = count - packed.decode_count
        self._cache = cache

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store keys and values, and attend each row to its own request; see ``model.Attend``."""
        self._cache.write(layer, self._slots, k, v)
        parts = []
        for row, rows, before, blocks in self._prefills:
            here = slice(row, row + rows)
            # From a prompt's start on, all it attends to is at hand.
            keys, values = (
                self._cache.read(layer, blocks) if before else (k[here].transpose(0, 1), v[here].transpose(0, 1))
            )
            parts.append(prefill_attention(q[here], keys, values, before))
        if self._decode_row < len(q):
            parts.append(decode_attention(self._cache, layer, q[self._decode_row :], self._tables, self._lengths))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def to_device(numbers: list[int], device: torch.device, into: Tensor | None = None) -> Tensor:
    """int64 [count] on the device, in one copy; ``into`` a buffer of that length, or a new one. Pinned memory of PyTorch's
    own pool is not used again before the copy has ended."""
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    if into is not None:
        return into.copy_(host, non_blocking=True)
    return host.to(device, non_blocking=True)
