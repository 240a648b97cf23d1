"""What fewer bits could win at most, by what limits the kernels: arithmetic gains by the rate, memory by the bytes.

A kernel's time is taken to shrink as its roof does: t · max(F / rate', B' / bandwidth) / max(F / rate, B / bandwidth), with
F its FLOP and B its bytes. A bound and no promise: casts, scales, and kernels that are worse in the new type come on top.
"""

from __future__ import annotations

import numpy as np

from infprof.measures.work.attention import ATTENTION
from infprof.measures.work.counting import FP32_OR_TF32, PRECISIONS
from infprof.measures.work.measuring import HIGHEST_MFU, RoofLimits
from infprof.measures.work.roofline import ScopeWork
from infprof.results import Measures
from infprof.trace import BoolArray, FloatArray

_UNITS = {
    "attention_bytes": "bytes",
    "attention_dram_ratio": "ratio",
    "attention_compute_ratio": "ratio",
    "gemm_16bit_ns": "ns",
    "fp8_gain_ns": "ns",
    "fp8_gain_ratio": "ratio",
    "fp32_counted_ns": "ns",
    "fp32_to_16bit_gain_ns": "ns",
    "fp32_to_tf32_gain_ns": "ns",
}
_HALF = ("bf16", "fp16")


def add_advice(measures: Measures, work: ScopeWork | None, limits: RoofLimits, why_none: str) -> None:
    """How near attention comes to the roofs, and what lower precision could win of matrix products (rank B).

    Only products that reach ``limits.far`` of a roof count as limited by it; ``why_none`` says why there is no work.
    """
    if work is None or work.peaks is None or work.rates is None or not len(work.ns):
        for name, unit in _UNITS.items():
            measures.add(name, None, unit, "B", why_none)
        return
    source = f"operator shapes over the peaks of {work.peaks.sku}"
    values = {**_attention(work), **_products(work, limits)}
    for name, unit in _UNITS.items():
        measures.add(
            name, values.get(name), unit, "B", source if name in values else "no such kernels with counted work"
        )


def _attention(work: ScopeWork) -> dict[str, float]:
    """Sums over the kernels of attention with counted bytes, and with counted FLOP."""
    assert work.peaks is not None and work.rates is not None, "peaks are known"
    mine = _of_kind(work, ATTENTION)
    values: dict[str, float] = {}
    moving = mine & work.bytes_known & (work.ns > 0)
    if moving.any():
        moved, spent = float(work.bytes[moving].sum()), float(work.ns[moving].sum())
        share = 1e9 * moved / (work.peaks.dram_bytes_per_s * spent)
        values["attention_bytes"] = round(moved)
        # Faster than DRAM can be: a cache served it, and how much of it is not known.
        if share <= 1:
            values["attention_dram_ratio"] = share
    computing = mine & work.flop_known & ~np.isnan(work.rates.high) & (work.ns > 0)
    if computing.any():
        seconds = float((work.flop / work.rates.high)[computing].sum())
        share = 1e9 * seconds / float(work.ns[computing].sum())
        if share <= HIGHEST_MFU:
            values["attention_compute_ratio"] = share
    return values


def _products(work: ScopeWork, limits: RoofLimits) -> dict[str, float]:
    assert work.peaks is not None, "peaks are known"
    rates = work.peaks.flop_per_s
    products = _of_kind(work, "gemm") & work.flop_known & work.bytes_known & (work.ns > 0)
    values: dict[str, float] = {}
    half = products & _has_precision(work, *_HALF)
    rate = next((rates[p] for p in _HALF if p in rates), None)
    if half.any() and rate is not None and "fp8" in rates:
        gain = float(_won(work, rate, rates["fp8"], 0.5, limits.far)[half].sum())
        window = work.scope.total()
        values["gemm_16bit_ns"] = round(float(work.ns[half].sum()))
        values["fp8_gain_ns"] = round(gain)
        if window:
            values["fp8_gain_ratio"] = gain / window
    # What may be TF32 already has nothing to win for sure.
    single = products & _has_precision(work, "fp32")
    if single.any() and "fp32" in rates:
        values["fp32_counted_ns"] = round(float(work.ns[single].sum()))
        if rate is not None:
            values["fp32_to_16bit_gain_ns"] = round(float(_won(work, rates["fp32"], rate, 0.5, 0.0)[single].sum()))
        if "tf32" in rates:
            values["fp32_to_tf32_gain_ns"] = round(
                float(_won(work, rates["fp32"], rates["tf32"], 1.0, 0.0)[single].sum())
            )
    return values


def _won(work: ScopeWork, rate: float, new_rate: float, bytes_factor: float, far: float) -> FloatArray:
    """Of each kernel the time (ns) that the roof in the new type saves; 0 where it is under ``far`` of its own roof."""
    assert work.peaks is not None, "peaks are known"
    moving = work.bytes / work.peaks.dram_bytes_per_s
    before = np.fmax(work.flop / rate, moving)
    after = np.fmax(work.flop / new_rate, bytes_factor * moving)
    with np.errstate(invalid="ignore", divide="ignore"):
        near = 1e9 * before / work.ns >= far
        won = np.where(near & (before > 0), work.ns * (1 - after / before), 0.0)
    return np.asarray(np.maximum(np.nan_to_num(won), 0.0), dtype=np.float64)


def _of_kind(work: ScopeWork, kind: str) -> BoolArray:
    return np.array([w.kind == kind for w in work.counted.works] + [False], dtype=np.bool_)[work.group]


def _has_precision(work: ScopeWork, *precisions: str) -> BoolArray:
    assert FP32_OR_TF32 not in precisions, "either is no precision"
    wanted = [PRECISIONS.index(p) for p in precisions]
    return np.asarray(np.isin(work.of_calls(work.counted.precision), wanted) & (work.call >= 0), dtype=np.bool_)
