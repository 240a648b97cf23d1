"""Counted work per phase, where the engine's step ranges name prefill and decode (vLLM, SGLang, TensorRT-LLM)."""

from __future__ import annotations

import re

import numpy as np

from infprof.measures import intervals as iv
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.measures.ranges import project
from infprof.trace import BoolArray

PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"

# What is measured per phase.
PHASE_MEASURES = (
    "mfu_ratio",
    "mbu_ratio",
    "work_flop_per_s",
    "work_bytes_per_s",
    "work_flop_per_byte",
    "work_covered_ratio",
)

# Requests that are prefilled, then requests that generate. The older names of vLLM (execute_new_1_cached_3) do not tell
# a prefill that goes on from a decode, and are left out.
_COUNTS = (
    re.compile(r"^execute_(?:\d+_)?context_(\d+)\(.*\)_generation_(\d+)\("),
    re.compile(r"_forward_step\b.*?: (\d+) ctx reqs.*?, (\d+) gen reqs"),
)
_SGLANG = re.compile(r"^step\[([A-Z_0-9]+)\b")
_SGLANG_PHASES = {"DECODE": DECODE, "EXTEND": PREFILL, "SPLIT_PREFILL": PREFILL, "MIXED": MIXED}


def phase_of(text: str) -> str | None:
    """The phase of a step by the name of its range; None where the name does not tell."""
    for pattern in _COUNTS:
        match = pattern.search(text)
        if match is not None:
            context, generation = int(match[1]), int(match[2])
            return MIXED if context and generation else PREFILL if context else DECODE if generation else None
    step = _SGLANG.match(text)
    return _SGLANG_PHASES.get(step[1]) if step is not None else None


def phase_scopes(prepared: Prepared, rows: BoolArray, scope: Intervals) -> dict[str, tuple[BoolArray, Intervals]]:
    """Per phase the operations among ``rows`` and the time of its steps on the GPU, inside the scope.

    A step lasts from the first to the last operation that was launched inside its range.
    """
    table = prepared.trace.ranges
    if table is None or not len(table):
        return {}
    names = [phase_of(text) for text in prepared.trace.strings]
    ops, out = prepared.operations, {}
    for phase in (PREFILL, DECODE, MIXED):
        of_phase = np.array([name == phase for name in names], dtype=np.bool_)
        if not of_phase.any():
            continue
        steps = project(prepared, np.flatnonzero((table["text"] >= 0) & of_phase[table["text"]]))
        there = steps.kernels > 0
        spans = iv.intersect(iv.union(steps.gpu_start[there], steps.gpu_end[there]), scope)
        if spans:
            out[phase] = (rows & iv.overlaps(spans, ops.start, ops.end), spans)
    return out
