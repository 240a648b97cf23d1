"""Where a process that may use CUDA is looked after: it gets a collector, which waits until the process does."""

from __future__ import annotations

# ruff: noqa: SIM105 - nothing is imported here that the program may not have.
import importlib
import os

from .collector import Collector
from .library import CuptiError, find_cupti

if False:  # for type checkers alone
    from typing import Any

_NVTX = "NVTX_INJECTION64_PATH"


def look_after(folder: str) -> None:
    """Start the collector of this process, and see to it that it is asked whenever it has to be."""
    _have_ranges_recorded()
    # The hooks of the torch backend, which lie here under this name.
    following: Any = importlib.import_module(f"{__package__}.following")
    following.follow(Collector(folder))


def _have_ranges_recorded() -> None:
    """NVTX loads the library that it is told of at the first range of the process; that is long before CUPTI starts."""
    if _NVTX in os.environ:
        return
    try:
        # Not in os.environ: that is the program's.
        os.putenv(_NVTX, find_cupti())
    except CuptiError:
        pass
