"""The work table: per kernel class and per operator, what was counted and how near it came to a roof."""

from __future__ import annotations

import numpy as np

from infprof.distinct import distinct_rows, distinct_values
from infprof.measures.work.call import NO_REASON
from infprof.measures.work.counting import PRECISIONS
from infprof.measures.work.roofline import ScopeWork
from infprof.results import WorkRow
from infprof.trace import BoolArray, FloatArray, IntArray

MAX_ROWS = 200
NOT_COUNTED = "not counted"


def work_table(work: ScopeWork | None, device: int, clear: float) -> list[WorkRow]:
    """A row for each kernel class (``operator`` None), and one for each operator and precision, most time first.

    ``clear`` is the share of a roof from which it is called the limiter. Kernels without counted work have a row for
    each reason.
    """
    if work is None or work.total_ns <= 0:
        return []
    works = work.counted.works
    kinds, kind = _numbered([w.kind for w in works], work.group)
    rows = [_row(work, kind == code, device, name, None, clear) for code, name in enumerate(kinds)]
    rows += [
        _row(work, work.why == code, device, NOT_COUNTED, None, clear, why)
        for code, why in enumerate(work.counted.whys)
    ]
    names, name = _numbered(work.counted.names, work.group)
    pairs, which = distinct_rows(name, work.of_calls(work.counted.precision))
    for i, (code, _) in enumerate(pairs):
        if code >= 0:
            mine = which == i
            rows.append(_row(work, mine, device, works[int(work.group[mine][0])].kind, names[code], clear))
    rows = [r for r in rows if r.kernels]
    rows.sort(key=lambda r: (r.operator is not None, -r.total_ns, r.kind, r.operator or "", r.precision or ""))
    return rows[:MAX_ROWS]


def _numbered(texts: list[str], group: IntArray) -> tuple[list[str], IntArray]:
    """The distinct texts, one of each group, and for each kernel which of them its group has; -1 where it has none."""
    distinct = sorted(set(texts))
    place = {text: i for i, text in enumerate(distinct)}
    return distinct, np.array([place[t] for t in texts] + [-1], dtype=np.int64)[group]


def _row(
    work: ScopeWork, mine: BoolArray, device: int, kind: str, operator: str | None, clear: float, why: str | None = None
) -> WorkRow:
    flop_known, bytes_known = mine & work.flop_known, mine & work.bytes_known
    flop, flop_ns = _known_sum(work.flop, work.ns, flop_known)
    moved, bytes_ns = _known_sum(work.bytes, work.ns, bytes_known)
    precisions = distinct_values(work.of_calls(work.counted.precision)[mine & (work.call >= 0)])
    precision = PRECISIONS[int(precisions[0])] if len(precisions) == 1 else None
    compute = dram = ridge = None
    if work.rates is not None and work.peaks is not None:
        timed = flop_known & (work.flop > 0)
        seconds = float((work.flop / work.rates.high)[timed].sum())
        compute = 1e9 * seconds / flop_ns if flop_ns and timed.any() and seconds == seconds else None
        dram = 1e9 * moved / (work.peaks.dram_bytes_per_s * bytes_ns) if moved is not None and bytes_ns else None
        ridge = flop / seconds / work.peaks.dram_bytes_per_s if flop and compute else None
    return WorkRow(
        device=device,
        kind=kind,
        operator=operator,
        precision=precision,
        calls=len(distinct_values(work.call[mine & (work.call >= 0)])),
        kernels=int(mine.sum()),
        total_ns=int(work.ns[mine].sum()),
        share=float(work.ns[mine].sum()) / work.total_ns,
        flop=flop,
        bytes=moved,
        flop_per_s=1e9 * flop / flop_ns if flop is not None and flop_ns else None,
        bytes_per_s=1e9 * moved / bytes_ns if moved is not None and bytes_ns else None,
        flop_per_byte=_intensity(work, flop_known & bytes_known),
        ridge_flop_per_byte=ridge,
        compute_ratio=compute,
        dram_ratio=dram,
        limiter=_limiter(compute, dram, clear),
        flop_is_bound=bool((work.flop_is_bound & mine).any()),
        reason=why or _reason(work, mine),
    )


def _known_sum(values: FloatArray, ns: FloatArray, known: BoolArray) -> tuple[float | None, float]:
    if not known.any():
        return None, 0.0
    return float(values[known].sum()), float(ns[known].sum())


def _intensity(work: ScopeWork, both: BoolArray) -> float | None:
    """FLOP per byte of the kernels of which both are known."""
    moved = float(work.bytes[both].sum())
    return float(work.flop[both].sum()) / moved if moved else None


def _limiter(compute: float | None, dram: float | None, clear: float) -> str | None:
    """The roof that was nearly reached. Faster than DRAM means that a cache served it."""
    if dram is not None and dram > 1:
        return "cache"
    if max(compute or 0.0, dram or 0.0) < clear:
        return None
    return "compute" if (compute or 0.0) >= (dram or 0.0) else "bandwidth"


def _reason(work: ScopeWork, mine: BoolArray) -> str | None:
    """Why FLOP or bytes of some of these kernels are not known."""
    partly = mine & ~(work.flop_known & work.bytes_known)
    if not partly.any():
        return None
    groups = distinct_values(work.group[partly]).tolist()
    reasons = sorted({work.counted.works[g].reason or NO_REASON for g in groups})
    return "; ".join(reasons[:2])
