"""Named ranges that both kinds of profiler see: ``record_function`` for PyTorch's, NVTX for nsys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function


@contextmanager
def span(name: str) -> Iterator[None]:
    """A range of this name around the block."""
    nvtx = torch.cuda.is_available()
    with record_function(name):
        if nvtx:
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if nvtx:
                torch.cuda.nvtx.range_pop()
