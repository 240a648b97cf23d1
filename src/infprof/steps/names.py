"""What the names of ranges say of steps: which names are steps at all, and the phase of one.

The one place for it: measures per phase, checks of a trace and the step finder agree on what stands here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

PREFILL, DECODE, MIXED, OTHER = "prefill", "decode", "mixed", "other"

# Ranges of this kind are looked for whether or not they are numbered: steps that launched nothing are a sign of loss.
_STEP = re.compile(r"^(ProfilerStep#\d+|(step|iteration|iter|execute)\b.*|step\[.*)$", re.IGNORECASE)


class Family(NamedTuple):
    """Ranges that are steps. ``fewest``: so many must have run something, for a name that may mean anything else."""

    name: str
    pattern: re.Pattern[str]
    fewest: int


# The first family with steps in it wins: an engine's own ranges lie inside ProfilerStep, or around a user's.
FAMILIES = (
    Family("vLLM's step ranges", re.compile(r"^execute_(?:\d+_)?(?:context_\d+|new_\d+_cached_\d+)"), 1),
    Family("SGLang's step ranges", re.compile(r"^step\[[A-Z_0-9]+\b"), 1),
    Family("TensorRT-LLM's step ranges", re.compile(r"_forward_step\b.*?\d+ gen reqs"), 1),
    Family("ranges of executions", re.compile(r"^execute_[a-z]\w*$"), 1),
    Family(
        "numbered step ranges",
        re.compile(
            r"^(?:.*[^a-z])?(?:step|iteration|iter|decode|prefill|execute|forward|batch|token|pass)[ _:#-]*\d+$",
            re.IGNORECASE,
        ),
        2,
    ),
    Family("ranges named for their phase", re.compile(r"^(?:prefill|decode|extend)(?:[ _]step)?$", re.IGNORECASE), 2),
)
PROFILER_STEPS = Family("the profiler's steps", re.compile(r"^ProfilerStep#\d+$"), 2)

# Requests that are prefilled, then requests that generate. The older names of vLLM (execute_new_1_cached_3) do not tell
# a prefill that goes on from a decode, and are left out.
_COUNTS = (
    re.compile(r"^execute_(?:\d+_)?context_(\d+)\(.*\)_generation_(\d+)\("),
    re.compile(r"_forward_step\b.*?: (\d+) ctx reqs.*?, (\d+) gen reqs"),
)
_TOKENS = re.compile(r"^execute_context_\d+\((\d+)[^)]*\)_generation_\d+\((\d+)\)")
_DETAILED_TOKENS = re.compile(r"^execute_(\d+)_context_")
_SGLANG_TOKENS = re.compile(r"\btoks=(\d+)")
_SGLANG_BATCH = re.compile(r"^step\[DECODE bs=(\d+)")
_SGLANG = re.compile(r"^step\[([A-Z_0-9]+)\b")
_SGLANG_PHASES = {
    "DECODE": DECODE,
    "VERIFY": DECODE,
    "TARGET_VERIFY": DECODE,
    "EXTEND": PREFILL,
    "SPLIT_PREFILL": PREFILL,
    "MIXED": MIXED,
}
_WORDS = re.compile(r"(?<![a-z])(prefill|decode|mixed)(?![a-z])", re.IGNORECASE)


def is_step_name(text: str) -> bool:
    """Whether a range of this name is likely to be a step, by itself."""
    return _STEP.match(text) is not None


def phase_of(text: str) -> str | None:
    """The phase of a step by the name of its engine's range; None where the name does not tell."""
    for pattern in _COUNTS:
        match = pattern.search(text)
        if match is not None:
            context, generation = int(match[1]), int(match[2])
            return MIXED if context and generation else PREFILL if context else DECODE if generation else None
    step = _SGLANG.match(text)
    return _SGLANG_PHASES.get(step[1]) if step is not None else None


def phase_by_word(text: str) -> str | None:
    """The phase that a user's range names in plain words (``decode_step_3``); None where it names none, or several."""
    words = {word.lower() for word in _WORDS.findall(text)}
    return words.pop() if len(words) == 1 else None


def tokens_of(text: str) -> int | None:
    """The tokens that the engine says its step computes; None where the name does not tell."""
    both = _TOKENS.match(text)
    if both is not None:
        return int(both[1]) + int(both[2])
    for pattern in (_DETAILED_TOKENS, _SGLANG_BATCH, _SGLANG_TOKENS):
        match = pattern.search(text)
        if match is not None:
            return int(match[1])
    return None
