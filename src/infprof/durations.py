"""Times on the command line (a number with a unit, or plain seconds) and in sentences."""

from __future__ import annotations

import re

from infprof.errors import UsageError

UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "": 1.0}
_LONGEST_S = 7 * 86400.0


def parse_seconds(option: str, text: str | None) -> float | None:
    """``10s``, ``500ms``, ``2min``, ``1.5h`` or ``10`` as seconds; None for None. Raises UsageError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", text.strip())
    if match is None or match[2] not in UNIT_SECONDS:
        raise UsageError(f"{option} {text}: write a time such as 10s, 500ms or 2min.")
    seconds = float(match[1]) * UNIT_SECONDS[match[2]]
    if not 0 < seconds <= _LONGEST_S:
        raise UsageError(f"{option} {text}: choose a time above 0 and up to a week.")
    return seconds


def in_words(ns: int) -> str:
    """A duration in the largest unit in which it is at least 1, for sentences: ``6.63 ms``, ``20 ns``."""
    factor, unit = next((u for u in ((10**9, "s"), (10**6, "ms"), (10**3, "µs")) if ns >= u[0]), (1, "ns"))
    return f"{ns / factor:.3g} {unit}"
