"""Options of a program that switch a fast path off or choose another one, as its command line shows them.

Only options of the list below are kept, so nothing private of a command line is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# Switches of vLLM, SGLang and llama.cpp that cost speed by themselves (their names: the engines' argument parsers).
SWITCHES = frozenset(
    (
        "--enforce-eager",
        "--disable-custom-all-reduce",
        "--no-async-scheduling",
        "--no-enable-prefix-caching",
        "--no-enable-chunked-prefill",
        "--disable-cuda-graph",
        "--disable-decode-cuda-graph",
        "--disable-prefill-cuda-graph",
        "--disable-cuda-graph-padding",
        "--disable-overlap-schedule",
        "--disable-radix-cache",
        "--enable-nan-detection",
        "--enable-lora",
    )
)
# Options whose value chooses a kernel or a place for weights.
CHOICES = frozenset(
    (
        "--quantization",
        "--dtype",
        "--kv-cache-dtype",
        "--attention-backend",
        "--cpu-offload-gb",
        "--tensor-parallel-size",
        "--tp-size",
        "--pipeline-parallel-size",
        "--n-gpu-layers",
        "--speculative-algorithm",
    )
)
_SHORT = {"-q": "--quantization", "-tp": "--tensor-parallel-size", "-ngl": "--n-gpu-layers"}
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9][\w.-]{0,31}")


def speed_flags(command: Sequence[str]) -> list[str]:
    """The known options of a command line, in order, with their values where these are plain words.

    >>> speed_flags(["serve", "m", "--enforce-eager", "-q", "awq", "--api-key", "k"])
    ['--enforce-eager', '--quantization awq']
    """
    found: dict[str, None] = {}
    for word, following in zip(command, [*command, ""][1:], strict=True):
        name, _, value = word.partition("=")
        name = _SHORT.get(name, name).replace("_", "-") if name.startswith("-") else name
        if name in SWITCHES:
            found[name] = None
        elif name in CHOICES and _PLAIN_VALUE.fullmatch(value or following):
            found[f"{name} {value or following}"] = None
    return list(found)


def to_be_removed(change: str, flags: Iterable[str]) -> str | None:
    """The first of the flags that a remedy says to remove, None where it names none of them."""
    advice = re.search(r"\bremove\b(.*)", change, re.IGNORECASE | re.DOTALL)
    if advice is None:
        return None
    return next(
        (f for f in flags if re.search(rf"(?<![\w-]){re.escape(f.split()[0])}(?![\w-])", advice.group(1))), None
    )
