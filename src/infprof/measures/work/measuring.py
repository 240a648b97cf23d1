"""Measures of counted work (evidence rank B): FLOP and bytes, achieved rates, MFU and MBU, shares of the roofs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from infprof.hardware import Match, Peaks
from infprof.measures.work.call import NO_REASON
from infprof.measures.work.roofline import ScopeWork, shares
from infprof.results import Measures
from infprof.trace import BoolArray, FloatArray

SHAPES = "operator shapes"
NO_OPERATORS = "no operators of a framework were recorded"
NO_SHAPES = "operators were recorded without the shapes of their inputs: torch.profiler has record_shapes=True"
ENGINE = "the engine's own count"

# Boost clocks above the listed one and rounding leave no more room than this.
HIGHEST_MFU = 1.05

_UNITS = {
    "work_flop": "count",
    "work_bytes": "bytes",
    "work_flop_covered_ratio": "ratio",
    "work_bytes_covered_ratio": "ratio",
    "work_covered_ratio": "ratio",
    "work_flop_per_s": "per_s",
    "work_bytes_per_s": "bytes_per_s",
    "work_flop_per_byte": "count",
    "work_compute_min_ratio": "ratio",
    "work_compute_max_ratio": "ratio",
    "work_dram_min_ratio": "ratio",
    "work_dram_max_ratio": "ratio",
    "work_compute_covered_ratio": "ratio",
    "work_dram_covered_ratio": "ratio",
    "mfu_ratio": "ratio",
    "mbu_ratio": "ratio",
    "slow_gemm_ns": "ns",
    "slow_gemm_loss_ns": "ns",
    "slow_gemm_loss_ratio": "ratio",
}


# What is measured per phase.
PHASE_MEASURES = (
    "mfu_ratio",
    "mbu_ratio",
    "work_flop_per_s",
    "work_bytes_per_s",
    "work_flop_per_byte",
    "work_covered_ratio",
)


class RoofLimits(NamedTuple):
    """Shares of a roof: ``clear`` is near it, under ``far`` it is far away. ``small_kernel_ns`` as in the thresholds."""

    clear: float
    far: float
    small_kernel_ns: int


def add_work(
    measures: Measures,
    work: ScopeWork | None,
    match: Match,
    limits: RoofLimits,
    why_none: str = NO_OPERATORS,
    of_graphs: str = "",
) -> None:
    """Every measure of counted work; None with the reason where there is none or the device's peaks are not known.

    ``of_graphs`` says where the shapes of kernels in replayed graphs come from.
    """
    if work is None:
        _add_nothing(measures, _UNITS, why_none)
        return
    shapes = f"{SHAPES}, {of_graphs}" if of_graphs else SHAPES
    both = work.flop_known & work.bytes_known
    _add(measures, "work_flop_covered_ratio", work.covered(work.flop_known), shapes)
    _add(measures, "work_bytes_covered_ratio", work.covered(work.bytes_known), shapes)
    _add(measures, "work_covered_ratio", work.covered(both), missing(work) or shapes)
    _add_amount(measures, work, "flop", work.flop, work.flop_known, shapes)
    _add_amount(measures, work, "bytes", work.bytes, work.bytes_known, shapes)
    moved = float(work.bytes[both].sum())
    intensity = float(work.flop[both].sum()) / moved if moved else None
    _add(measures, "work_flop_per_byte", intensity, shapes if moved else "no kernel has counted FLOP and bytes")
    _add_shares(measures, work, match.reason or "no kernel time in the window", limits, shapes)


def _add_amount(
    measures: Measures, work: ScopeWork, what: str, values: FloatArray, known: BoolArray, shapes: str
) -> None:
    names = (f"work_{what}", f"work_{what}_per_s")
    spent = work.union_ns(known)
    if not spent:
        _add_nothing(measures, names, f"not counted: {missing(work)}")
        return
    total = float(values[known].sum())
    _add(measures, names[0], total, shapes)
    _add(measures, names[1], total * 1e9 / spent, f"{shapes}, while these kernels run")


def _add_shares(measures: Measures, work: ScopeWork, why_not: str, limits: RoofLimits, shapes: str) -> None:
    found = shares(work)
    names = [name for name in _UNITS if name.startswith(("work_compute_", "work_dram_", "mfu", "mbu", "slow_gemm"))]
    if found is None or work.rates is None or work.peaks is None:
        _add_nothing(
            measures, names, f"peak unknown: {why_not} (--gpu-spec supplies it)" if work.peaks is None else why_not
        )
        return
    source = f"{shapes} over the peaks of {work.peaks.sku}"
    _add(measures, "work_compute_min_ratio", found.compute_low, source)
    _add(measures, "work_compute_max_ratio", found.compute_high, source)
    _add(measures, "work_dram_min_ratio", found.dram_low, source)
    _add(measures, "work_dram_max_ratio", found.dram_high, source)
    _add(measures, "work_compute_covered_ratio", found.compute_of_covered, source)
    _add(measures, "work_dram_covered_ratio", found.dram_of_covered, source)
    _add_slow_gemms(measures, work, limits, source)
    window = work.scope.total()
    matrix = work.is_matrix & work.flop_known & ~np.isnan(work.rates.high)
    flop_s = float((work.flop / work.rates.high)[matrix].sum()) if matrix.any() else None
    mfu = None if flop_s is None or not window else 1e9 * flop_s / window
    why = f"{source}, each precision over its own" if matrix.any() else "no matrix work"
    if mfu is not None and mfu > HIGHEST_MFU:
        # Evidence that contradicts itself is withdrawn, not shown.
        mfu, why = (
            None,
            f"counted work exceeds the device's peak by {mfu:.2f} times: shapes or device are not the real ones",
        )
    _add(measures, "mfu_ratio", mfu, why)
    moved = float(work.bytes[work.bytes_known].sum()) if work.bytes_known.any() else None
    mbu = None if moved is None or not window else 1e9 * moved / (work.peaks.dram_bytes_per_s * window)
    _add(measures, "mbu_ratio", mbu, f"{source}; each operand once" if work.bytes_known.any() else "no counted bytes")


def _add_slow_gemms(measures: Measures, work: ScopeWork, limits: RoofLimits, source: str) -> None:
    """Matrix products far from both roofs, and what of their time is beyond what a good one would take.

    Of two possible peaks the lower one counts: then they are nearer to it. Kernels that are short anyway are left out,
    for there the fixed costs rule.
    """
    assert work.rates is not None and work.peaks is not None, "shares are known"
    gemm = np.array([w.kind == "gemm" for w in work.counted.works] + [False], dtype=np.bool_)[work.group]
    spent = np.maximum(work.of_calls(work.counted.kernel_ns), 1) / 1e9
    compute = work.of_calls(work.counted.flop) / (work.rates.low * spent)
    dram = work.of_calls(work.counted.bytes) / (work.peaks.dram_bytes_per_s * spent)
    roof = np.fmax(compute, dram)
    long = work.end - work.start >= limits.small_kernel_ns
    known = ~np.isnan(compute) & ~np.isnan(dram)
    slow = gemm & long & known & (roof > 0) & (roof < limits.far)
    loss = float((work.ns * (1 - roof / limits.clear))[slow].sum())
    _add(measures, "slow_gemm_ns", int(work.ns[slow].sum()), source)
    _add(measures, "slow_gemm_loss_ns", int(loss), source)
    _add(measures, "slow_gemm_loss_ratio", loss / work.total_ns if work.total_ns else None, source)


def add_engine_work(measures: Measures, peaks: Peaks | None) -> None:
    """MBU and, where one peak must apply, MFU from the serving engine's own counters, where shapes did not give them."""
    moved, flop = measures.value("engine_dram_bytes_per_s"), measures.value("engine_flop_per_s")
    if peaks is None:
        return
    source = f"{ENGINE} over the peak of {peaks.sku}: a lower bound"
    if measures.value("mbu_ratio") is None and moved is not None:
        _add(measures, "mbu_ratio", moved / peaks.dram_bytes_per_s, source)
    rate = peaks.flop_per_s.get("bf16", peaks.flop_per_s.get("fp16"))
    if measures.value("mfu_ratio") is None and flop is not None and rate is not None:
        # An engine does not say in which precision it multiplies; 16 bits is what runs where nothing was quantised.
        _add(measures, "mfu_ratio", flop / rate, f"{source}, if it multiplies in 16 bits")


def missing(work: ScopeWork, limit: int = 2) -> str:
    """Why kernels have no counted work, the largest reasons first, with their share of kernel time; empty: all have."""
    found: dict[str, float] = {}
    for code, why in enumerate(work.counted.whys):
        found[why] = float(work.ns[work.why == code].sum())
    groups = work.group
    partly = (work.call >= 0) & ~(work.flop_known & work.bytes_known)
    spent = np.bincount(groups[partly], work.ns[partly], len(work.counted.works)) if partly.any() else np.empty(0)
    for group in np.flatnonzero(spent).tolist():
        why = work.counted.works[group].reason or NO_REASON
        text = f"{work.counted.names[group]}: {why}" if not why.startswith("how much a compiled") else why
        found[text] = found.get(text, 0.0) + float(spent[group])
    ordered = sorted(
        (item for item in found.items() if item[1] >= 0.005 * work.total_ns), key=lambda item: (-item[1], item[0])
    )
    ordered = [item for item in ordered if item[1] > 0]
    return "; ".join(f"{100 * ns / work.total_ns:.0f} % of kernel time: {why}" for why, ns in ordered[:limit])


def _add(measures: Measures, name: str, value: float | None, source: str) -> None:
    measures.add(name, value, _UNITS[name], "B", source)


def _add_nothing(measures: Measures, names: Iterable[str], why: str) -> None:
    for name in names:
        _add(measures, name, None, why)
