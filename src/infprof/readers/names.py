"""What the names in a trace say: of CUDA calls and of the profiler's overhead."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from infprof import trace as t
from infprof.trace import IntArray

_VERSION = re.compile(r"_v\d+$")
_MODULE_LOAD = re.compile("module|lazy|compil|jit")


def plain_call_name(name: str) -> str:
    """A call's name without its version (`cudaLaunchKernel_v7000`, `cudaGraphLaunch_v10000`)."""
    return _VERSION.sub("", name)


def overhead_kinds(names: Sequence[str]) -> IntArray:
    """The overhead kind (see trace.py) that each name says, in the same order."""
    kinds = [
        t.COMMAND_BUFFER_FULL
        if "command buffer" in name
        else t.MODULE_LOAD
        if _MODULE_LOAD.search(name)
        else t.PROFILER
        for name in map(str.lower, names)
    ]
    return np.array(kinds, dtype=np.int64)
