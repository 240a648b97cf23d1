"""Medians and percentiles. The median without ``np.median``, which loads NumPy's masked arrays first: a tenth of what a
short run takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def median(values: NDArray[Any]) -> float:
    """The middle value of a column of finite numbers, the mean of the two middle ones of an even count.

    Raises ValueError for an empty column.
    """
    count = len(values)
    if not count:
        raise ValueError("nothing has no median")
    high = count // 2
    sides = np.partition(values, high)
    if count % 2:
        return float(sides[high])
    # The other middle one is the largest of those before: cheaper than a second place to partition at.
    return float((float(sides[:high].max()) + float(sides[high])) / 2)


def summary(values: Sequence[float | None]) -> dict[str, Any]:
    """Count, mean, p50, p95, p99 and maximum (linear percentiles), rounded to whole numbers; None without a value.

    Of fewer than 100 values the 99th percentile is little else than the maximum, and ``p99_is_maximum`` says so.
    """
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not len(known):
        return dict.fromkeys(("mean", "p50", "p95", "p99", "max")) | {"count": 0, "p99_is_maximum": False}
    p50, p95, p99 = np.percentile(known, (50, 95, 99))
    figures = {"mean": known.mean(), "p50": p50, "p95": p95, "p99": p99, "max": known.max()}
    return {name: round(float(value)) for name, value in figures.items()} | {
        "count": len(known),
        "p99_is_maximum": len(known) < 100,
    }
