"""What the step ranges of vLLM and SGLang say of their step: the sums that fix the work of attention over a paged cache."""

from __future__ import annotations

import re

from infprof.measures.work.attention import StepSums

_FIELDS = r"sq(\d+)_?sk(\d+)_?sqsq(\d+)_?sqsk(\d+)"
_VLLM = re.compile(rf"^execute_\d+_context_\d+\({_FIELDS}\)_generation_\d+\({_FIELDS}\)")
_SGLANG = re.compile(r"^step\[[A-Z_0-9]+ .*?\bc_sq=(\d+) c_sk=(\d+) c_sqsq=(\d+) c_sqsk=(\d+)")
_SGLANG_DECODE = re.compile(r"\bg_sq=(\d+) g_sk=(\d+) g_sqsq=(\d+) g_sqsk=(\d+)")


def step_sums(text: str) -> StepSums | None:
    """The sums over all requests of a step, context and generation together; None where the range does not name them."""
    found = [int(n) for pattern in (_VLLM, _SGLANG, _SGLANG_DECODE) for m in pattern.finditer(text) for n in m.groups()]
    if not found:
        return None
    return StepSums(*(sum(found[i::4]) for i in range(4)))
