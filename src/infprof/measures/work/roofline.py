"""Counted work against what the device can do at most: shares of its peaks, and how sure they are.

Roofline model: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52 (2009).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infprof.hardware import Peaks
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.measures.work.counting import FP32_OR_TF32, MATRIX_KINDS, PRECISIONS, CountedWork
from infprof.trace import BoolArray, FloatArray, IntArray


class Rates(NamedTuple):
    """Peaks of the arithmetic of each call, FLOP/s: the lowest and the highest that may apply; NaN = not in the table."""

    low: FloatArray
    high: FloatArray


@dataclass
class ScopeWork:
    """The kernels of one device in a scope, without communication: one value for each kernel.

    ``ns`` is the part of the kernel inside the scope; ``flop`` and ``bytes`` its share of the call's work by time, NaN
    where not known. ``call`` is -1 where nothing was counted, then ``why`` says why.
    """

    counted: CountedWork
    peaks: Peaks | None
    start: IntArray
    end: IntArray
    ns: FloatArray
    call: IntArray
    why: IntArray
    scope: Intervals
    flop: FloatArray = field(init=False)
    bytes: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        each = np.maximum(self.call, 0)
        known = self.call >= 0
        if len(self.counted.kernel_ns):
            share = self.ns / np.maximum(self.counted.kernel_ns[each], 1)
            self.flop = np.where(known, self.counted.flop[each] * share, np.nan)
            self.bytes = np.where(known, self.counted.bytes[each] * share, np.nan)
        else:
            self.flop = self.bytes = np.full(len(self.ns), np.nan)

    @property
    def total_ns(self) -> float:
        return float(self.ns.sum())

    @cached_property
    def flop_known(self) -> BoolArray:
        return ~np.isnan(self.flop)

    @cached_property
    def bytes_known(self) -> BoolArray:
        return ~np.isnan(self.bytes)

    def covered(self, chosen: BoolArray) -> float | None:
        """Share of the kernel time in the chosen kernels, None without any time."""
        return float(self.ns[chosen].sum()) / self.total_ns if self.total_ns > 0 else None

    def union_ns(self, chosen: BoolArray) -> int:
        """Time in the scope in which at least one of the chosen kernels runs."""
        return iv.intersect(iv.union(self.start[chosen], self.end[chosen]), self.scope).total()

    def of_calls(self, column: NDArray[Any]) -> NDArray[Any]:
        """A column of the calls, at each kernel; where nothing was counted, the first call's (callers mask those)."""
        return column[np.maximum(self.call, 0)] if len(column) else np.zeros(len(self.call), dtype=column.dtype)

    @cached_property
    def group(self) -> IntArray:
        """Which of ``counted.works`` each kernel has, -1 where none."""
        return np.where(self.call >= 0, self.of_calls(self.counted.group), -1)

    @cached_property
    def is_matrix(self) -> BoolArray:
        matrix = np.array([w.kind in MATRIX_KINDS for w in self.counted.works] + [False], dtype=np.bool_)
        return np.asarray(matrix[self.group], dtype=np.bool_)

    @cached_property
    def rates(self) -> Rates | None:
        """The peaks that apply to each kernel; None where those of the device are not known."""
        if self.peaks is None:
            return None
        known = self.peaks.flop_per_s
        vector = known.get("fp32", np.nan)
        low = [known.get(p or "", np.nan) if p != FP32_OR_TF32 else vector for p in PRECISIONS]
        high = [*low[:-1], max(vector, known.get("tf32", vector))]
        precision = self.of_calls(self.counted.precision)
        # What is no matrix work runs on the ordinary pipe, whatever its types.
        return Rates(*(np.where(self.is_matrix, np.array(peaks)[precision], vector) for peaks in (low, high)))

    @cached_property
    def surely_from_dram(self) -> BoolArray:
        """Kernels whose counted bytes no cache can have served.

        Activations that fit the last cache may come from it. Weights are read anew by each layer, so matrix work counts
        whatever its size; but what moves faster than DRAM can was in a cache.
        """
        if self.peaks is None or not len(self.counted.kernel_ns):
            return np.zeros(len(self.ns), dtype=np.bool_)
        moved, spent = self.of_calls(self.counted.bytes), self.of_calls(self.counted.kernel_ns)
        cache = np.inf if self.peaks.cache_bytes is None else self.peaks.cache_bytes
        with np.errstate(invalid="ignore"):
            large = self.is_matrix | (moved > cache)
            slow = moved * 1e9 <= self.peaks.dram_bytes_per_s * spent
        return np.asarray(self.bytes_known & large & slow, dtype=np.bool_)

    @cached_property
    def flop_is_bound(self) -> BoolArray:
        return np.asarray(self.of_calls(self.counted.bounded) & (self.call >= 0), dtype=np.bool_)


class Shares(NamedTuple):
    """Shares of the peaks over the time in which kernels run: at least and at most, as far as counted work can tell.

    ``compute_low`` leaves out FLOP that may have been skipped and takes the higher of two possible peaks;
    ``compute_high`` counts the time of what is not known as at its peak. ``dram_low`` leaves out what a cache may have
    served. ``*_of_covered`` refer to the time of the kernels with counted FLOP and bytes instead of all.
    """

    compute_low: float
    compute_high: float
    dram_low: float
    dram_high: float
    compute_of_covered: float
    dram_of_covered: float


def shares(work: ScopeWork) -> Shares | None:
    """None where the device's peaks are not known or no kernel ran."""
    rates, every = work.rates, np.ones(len(work.ns), dtype=np.bool_)
    total = work.union_ns(every)
    if rates is None or work.peaks is None or total <= 0:
        return None
    counted = work.flop_known & ~((work.flop > 0) & np.isnan(rates.low))
    covered = max(work.union_ns(counted & work.bytes_known), 1)
    seconds_high = _sum(work.flop / rates.low, counted & (work.flop > 0))
    seconds_low = _sum(work.flop / rates.high, counted & (work.flop > 0) & ~work.flop_is_bound)
    moved_low = _sum(work.bytes, work.surely_from_dram) / work.peaks.dram_bytes_per_s
    moved_high = _sum(work.bytes, work.bytes_known) / work.peaks.dram_bytes_per_s
    return Shares(
        compute_low=1e9 * seconds_low / total,
        compute_high=min((1e9 * seconds_high + float(work.ns[~counted].sum())) / total, 1.0),
        dram_low=1e9 * moved_low / total,
        dram_high=min((1e9 * moved_high + float(work.ns[~work.bytes_known].sum())) / total, 1.0),
        compute_of_covered=1e9 * seconds_low / covered,
        dram_of_covered=1e9 * moved_low / covered,
    )


def _sum(values: FloatArray, chosen: BoolArray) -> float:
    return float(values[chosen].sum())


def scope_work(
    prepared: Prepared, counted: CountedWork, rows: BoolArray, scope: Intervals, peaks: Peaks | None
) -> ScopeWork:
    """The counted work of the kernels among ``rows`` (a mask over operations) inside a scope."""
    ops = prepared.operations
    chosen = np.flatnonzero(rows & (ops.kind == op.KERNEL) & ~ops.is_comm)
    start, end = ops.start[chosen], ops.end[chosen]
    inside = iv.covered(scope, start, end).astype(np.float64)
    return ScopeWork(counted, peaks, start, end, inside, counted.call[chosen], counted.why[chosen], scope)
