"""The median without ``np.median``, which loads NumPy's masked arrays first: a tenth of what a short run takes."""

from __future__ import annotations

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
