"""How many tokens a step had, or a graph was captured for, by the range that a serving engine writes around it.

Ranges: vLLM ``execute_context_1(888)_generation_7(7)``, with detailed annotations ``execute_32_context_0(sq0…)…``, when
it captures ``capture_8_FULL``; SGLang ``step[DECODE bs=32]``, ``step[EXTEND bs=15 toks=15360]``, ``capture_32_DECODE``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from infprof.distinct import distinct
from infprof.measures.work.nesting import innermost_rows
from infprof.trace import IntArray, Trace

_CAPTURE = re.compile(r"^capture_(\d+)_[A-Z]")
_PADDED_STEP = re.compile(r"^execute_(\d+)_context_")
_STEP = re.compile(r"^execute_context_\d+\((\d+)(?:_\d+)*\)_generation_\d+\((\d+)(?:_\d+)*\)")
_SGLANG_TOKENS = re.compile(r"^step\[[A-Z_0-9]+ .*?\btoks=(\d+)")
_SGLANG_DECODE = re.compile(r"^step\[DECODE bs=(\d+)")


def captured_tokens(text: str) -> int | None:
    """The size that a graph is captured for, None where the range does not say it."""
    match = _CAPTURE.match(text)
    return int(match[1]) if match else None


def step_tokens(text: str) -> int | None:
    """The tokens of a step, context and generation together, None where the range does not say it."""
    for pattern in (_PADDED_STEP, _STEP, _SGLANG_TOKENS, _SGLANG_DECODE):
        match = pattern.match(text)
        if match:
            return sum(int(n) for n in match.groups())
    return None


def tokens_around(trace: Trace, times: IntArray, threads: IntArray) -> tuple[IntArray, IntArray]:
    """(tokens of the step, size of the capture) in whose range of the same thread each time lies; -1 = not known."""
    unknown = np.full(len(times), -1, dtype=np.int64)
    if trace.ranges is None or not len(trace.ranges) or not len(times):
        return unknown, unknown
    found = []
    for tokens_of in (step_tokens, captured_tokens):
        texts = [t for t in distinct(trace.ranges["text"])[0].tolist() if t >= 0]
        sizes = {t: n for t in texts if (n := tokens_of(trace.strings[t])) is not None}
        ranges = trace.ranges.take(np.isin(trace.ranges["text"], list(sizes)))
        if not len(ranges):
            found.append(unknown)
            continue
        inside, _ = innermost_rows(ranges["start"], ranges["end"], ranges["thread"], times, threads)
        table = np.full(len(trace.strings), -1, dtype=np.int64)
        table[list(sizes)] = list(sizes.values())
        found.append(np.where(inside >= 0, table[ranges["text"][np.maximum(inside, 0)]], -1))
    return found[0], found[1]


def captured_size(tokens: int, sizes: Sequence[int]) -> int | None:
    """The size whose graph a step of so many tokens replays: the smallest that holds them, padded by less than twice."""
    fitting = [size for size in sizes if tokens <= size < 2 * tokens]
    return min(fitting, default=None)
