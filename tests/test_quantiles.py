from __future__ import annotations

import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infprof.quantiles import median


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1))
def test_the_median_is_the_middle(values: list[int]) -> None:
    assert median(np.array(values)) == statistics.median(values)


def test_nothing_has_no_median() -> None:
    with pytest.raises(ValueError, match="no median"):
        median(np.array([], dtype=np.int64))


def test_masked_arrays_are_not_loaded() -> None:
    code = "import sys, numpy as np; from infprof.quantiles import median; median(np.arange(4)); print('numpy.ma' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
