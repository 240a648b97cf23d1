"""Whether two quantiles differ by more than chance: intervals from order statistics, combined by MOVER.

Of each run the interval of a quantile is between two order statistics (binomial ranks; Conover, Practical Nonparametric
Statistics, 3.2). Steps that follow each other are alike, so the number of steps is reduced to that of independent ones,
n / tau with the autocorrelation time tau of "longer than the quantile" (Geyer, Statistical Science 7, 1992). The interval of the
difference is MOVER's (Zou & Donner, Statistics in Medicine 27, 2008): nothing is drawn at random, so the same input gives the
same bytes, and with BASE and HEAD exchanged the interval is the mirrored one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from infprof.compare.model import HIGHER, LOWER, SAME, UNKNOWN, Change
from infprof.trace import BoolArray, IntArray

# Of a two-sided interval of 99 %.
Z = 2.576
# With fewer steps on a side even ranges that do not touch may be chance: of 5 against 5 they are in 2 of 100 pairs.
FEWEST_STEPS = 6
# Differences below this are what two runs of one program differ by.
TOLERANCE = 0.01
_WITHIN = "within the spread of the steps"


class Quantile(NamedTuple):
    """A quantile and its interval; ``low`` and ``high`` None where there are too few steps, and ``reason`` says so."""

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str | None = None


def measured(lengths: IntArray, q: float) -> Quantile:
    """The quantile (linear, as in reports) of steps in the order in which they ran, with its 99 % interval."""
    count = len(lengths)
    if not count:
        return Quantile(None, reason="no whole step")
    value = float(np.percentile(lengths, 100 * q))
    if count < FEWEST_STEPS:
        return Quantile(value, reason=f"too few whole steps ({count}) to tell from chance")
    alike = _independent(lengths > value)
    half = Z * math.sqrt(q * (1 - q) * count * count / alike)
    low, high = round(count * q - half) - 1, round(count * q + half)
    # Beyond the longest step seen nothing is known of the tail; a median lies inside whatever was seen.
    if q > 0.5 and high > count - 1:
        return Quantile(value, reason=f"too few whole steps ({count}) to tell the tail from chance")
    ordered = np.sort(lengths)
    return Quantile(value, float(ordered[max(low, 0)]), float(ordered[min(high, count - 1)]))


def stored(p50: float | None, p95: float | None, p99: float | None, count: int) -> Quantile:
    """The median of steps of which only quantiles are known: its interval as that of a normal distribution."""
    if p50 is None:
        return Quantile(None, reason="not known")
    if count < FEWEST_STEPS or p95 is None:
        return Quantile(p50, reason=f"too few whole steps ({count}) to tell from chance")
    # Standard normal quantiles; the standard error of a median is 1.2533 that of the mean.
    spread = max((p95 - p50) / 1.645, ((p99 or p95) - p50) / 2.326)
    half = Z * 1.2533 * spread / math.sqrt(count)
    return Quantile(p50, p50 - half, p50 + half)


def _independent(longer: BoolArray) -> float:
    """As how many independent steps they count: autocorrelations are summed up to the first pair below 0 (Geyer 1992)."""
    count, share = len(longer), float(longer.mean())
    if not 0 < share < 1:
        return count
    spectrum = np.abs(np.fft.rfft(longer - share, 2 * count)) ** 2
    alike = np.fft.irfft(spectrum)[:count]
    pairs = alike[: count - count % 2].reshape(-1, 2).sum(axis=1) / alike[0]
    negative = np.flatnonzero(pairs <= 0)
    tau = 2 * float(pairs[: negative[0] if len(negative) else len(pairs)].sum()) - 1
    return count / max(tau, 1.0) if tau < count else 1.0


def difference(base: Quantile, head: Quantile, tolerance: float = TOLERANCE) -> Change:
    """HEAD less BASE, and whether that is more than chance and than ``tolerance`` of the smaller one."""
    change = plain_change(base.value, head.value)
    if change.delta is None or base.value is None or head.value is None:
        change.reason = base.reason or head.reason
        return change
    if base.low is None or base.high is None or head.low is None or head.high is None:
        change.reason = base.reason or head.reason
        if is_small(change.delta, base.value, head.value, tolerance):
            change.direction, change.reason = SAME, f"less than {100 * tolerance:.3g} %"
        return change
    change.low = change.delta - math.hypot(head.value - head.low, base.high - base.value)
    change.high = change.delta + math.hypot(head.high - head.value, base.value - base.low)
    if change.low <= 0 <= change.high:
        change.direction, change.reason = SAME, _WITHIN
    elif is_small(change.delta, base.value, head.value, tolerance):
        change.direction, change.reason = SAME, f"less than {100 * tolerance:.3g} %"
    else:
        change.direction = LOWER if change.delta < 0 else HIGHER
    return change


def is_small(delta: float, base: float, head: float, tolerance: float) -> bool:
    """Whether a difference is below the tolerance, which is a share of the smaller value."""
    # Clocks tell no less than a nanosecond.
    return abs(delta) < max(1.0, tolerance * min(base, head))


def plain_change(base: float | None, head: float | None) -> Change:
    """A figure of both runs, of which nothing says whether it differs by chance."""
    change = Change(base, head)
    if base is None or head is None:
        change.reason = "not known of both"
        return change
    change.delta = head - base
    change.change_ratio = change.delta / base if base else (0.0 if head == base else None)
    change.direction = UNKNOWN
    return change
