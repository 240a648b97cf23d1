"""Whether the runs of two sides differ: the exact rank test of Mann and Whitney, and the two modes that runs may fall into.

The unit is a run: what is fixed when a process starts (placement, clocks) is the same for all its steps, so many steps of
one run are still one observation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# A difference between runs is claimed below this probability, two-sided, and from so many runs of each side on: of 4 against
# 4 the smallest possible one is 0.029, of 3 against 3 it is 0.1.
LEVEL = 0.05
FEWEST_RUNS = 4
# Two modes: so many runs of both sides together, a gap this many times the range within either mode and of this share of
# the lower one, and in one side at least so many runs in each. Of runs of one mode (normal, uniform, exponential,
# log-normal, Cauchy) fewer than 1 in 200 sets look like that.
MODE_RUNS, MODE_GAP, MODE_APART, IN_EACH = 8, 4.0, 0.05, 2


def rank_sum_p(one: Sequence[float], other: Sequence[float]) -> float:
    """The two-sided probability of rank sums as uneven as these, if all runs are of one distribution (1 of no runs).

    Exact also with equal values, by the distribution of the sum of mid-ranks over all ways to choose the first side
    (Mann & Whitney, Annals of Mathematical Statistics 18, 1947; Lehmann, Nonparametrics, 1.5).
    """
    count, every = len(one), len(one) + len(other)
    if not count or not len(other):
        return 1.0
    values = np.array([*one, *other], dtype=np.float64)
    ordered = np.sort(values)
    # Twice the mid-rank, a whole number.
    ranks = (np.searchsorted(ordered, values) + np.searchsorted(ordered, values, side="right") + 1).astype(np.int64)
    ways = np.zeros((count + 1, int(ranks.sum()) + 1))
    ways[0, 0] = 1.0
    for rank in ranks.tolist():
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
    sums, mean = np.arange(ways.shape[1]), count * (every + 1)
    uneven = np.abs(sums - mean) >= abs(int(ranks[:count].sum()) - mean)
    return float(min(ways[count, uneven].sum() / math.comb(every, count), 1.0))


class TwoModes(NamedTuple):
    """The medians of the lower and the upper mode, and how many runs of each side are in them."""

    low: float
    high: float
    base: tuple[int, int]
    head: tuple[int, int]


def two_modes(base: Sequence[float], head: Sequence[float]) -> TwoModes | None:
    """The modes into which the runs of at least one side fall; None where they show one, or are too few.

    Sides that differ are no modes: each mode must have several runs of one and the same side.
    """
    pooled = np.sort(np.array([*base, *head], dtype=np.float64))
    if len(pooled) < MODE_RUNS:
        return None
    gaps = np.diff(pooled)
    place = int(np.argmax(gaps))
    low, high = pooled[: place + 1], pooled[place + 1 :]
    within = max(float(np.ptp(low)), float(np.ptp(high)))
    if gaps[place] < MODE_GAP * within or gaps[place] < MODE_APART * low[-1] or gaps[place] <= 0:
        return None
    edge = float(low[-1])
    sides = [(sum(value <= edge for value in side), sum(value > edge for value in side)) for side in (base, head)]
    if not any(min(side) >= IN_EACH for side in sides):
        return None
    return TwoModes(float(np.median(low)), float(np.median(high)), *sides)


def too_few(base: int, head: int) -> str:
    """Why nothing is claimed of so few runs."""
    return (
        f"{base} + {head} runs are too few to tell a change from run-to-run spread, {FEWEST_RUNS} + {FEWEST_RUNS} can"
    )


def p_words(p: float) -> str:
    """``p = 0.03``."""
    return f"p = {p:.2g}" if p >= 0.0001 else "p < 0.0001"
