"""Attention made of separate kernels: a softmax between two matrix products, which writes the scores to memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from infprof.measures import operations as op
from infprof.measures.kernels import graphs_hide_kernels
from infprof.measures.operations import Prepared
from infprof.results import Measures
from infprof.trace import BoolArray, IntArray

if TYPE_CHECKING:
    from infprof.hardware import Match
    from infprof.measures.work import CountedWork

# What may lie between a product and the softmax: scaling, masks, casts, dropout.
_BETWEEN = frozenset({"elementwise", "copy", "fill", "random"})
_PRODUCTS = frozenset({"gemm", "gemv"})
_MOST_BETWEEN = 6
# Each layer has one, and a model has several layers: fewer are a router's, a sampler's or a classifier's.
LEAST = 4
_UNITS = {
    "unfused_attention_count": "count",
    "unfused_attention_ns": "ns",
    "unfused_attention_ratio": "ratio",
    "unfused_scores_ns": "ns",
}


def add_attention(measures: Measures, prepared: Prepared, rows: BoolArray) -> None:
    """What attention without a fused kernel takes: the two products, the softmax, and what lies between (rank D).

    Needs the names of kernels and their order on each stream. In a product's neighbourhood nothing else may stand, so a
    router (softmax, then top-k) and a sampler (softmax, then a draw) are none.
    """
    if prepared.trace.kernels is None or graphs_hide_kernels(prepared, rows):
        why = "CUDA graphs were traced whole" if prepared.trace.graphs is not None else "kernels were not collected"
        for name, unit in _UNITS.items():
            measures.add(name, None, unit, "D", why)
        return
    ops = prepared.operations
    mine = np.flatnonzero(rows & (ops.kind == op.KERNEL) & ~ops.is_comm)
    total = int((ops.end - ops.start)[mine].sum())
    chains = unfused_chains(prepared, mine)
    spent = sum(int((ops.end - ops.start)[chain].sum()) for chain in (chains.products, chains.scores))
    source = "kernel names and their order"
    count = chains.count if chains.count >= LEAST else 0
    measures.add("unfused_attention_count", count, "count", "D", source)
    measures.add("unfused_attention_ns", spent if count else 0, "ns", "D", source)
    measures.add("unfused_attention_ratio", (spent if count else 0) / total if total else None, "ratio", "D", source)
    scores = int((ops.end - ops.start)[chains.scores].sum()) if count else 0
    measures.add("unfused_scores_ns", scores, "ns", "D", source)


def add_score_bytes(
    measures: Measures, prepared: Prepared, rows: BoolArray, counted: CountedWork | None, match: Match
) -> None:
    """How large the matrix of scores is that a softmax of unfused attention reads and writes: the median over them.

    From the shapes of the softmax's operator (rank B); without them only a bound: what memory can move in the time of the
    softmax, half of it read and half of it written (rank D).
    """
    size, bound = "unfused_score_bytes", "unfused_score_bound_bytes"
    if not measures.value("unfused_attention_count"):
        for name in (size, bound):
            measures.add(name, None, "bytes", "D", "no unfused attention was seen")
        return
    ops = prepared.operations
    mine = np.flatnonzero(rows & (ops.kind == op.KERNEL) & ~ops.is_comm)
    softmax = unfused_chains(prepared, mine).softmax
    known = np.empty(0)
    if counted is not None and len(counted.bytes):
        call = counted.call[softmax]
        moved = counted.bytes[np.unique(call[call >= 0])]
        known = moved[~np.isnan(moved)]
    if len(known):
        measures.add(size, round(float(np.median(known)) / 2), "bytes", "B", "the shape of the softmax")
        measures.add(bound, None, "bytes", "D", "the size is known")
        return
    measures.add(size, None, "bytes", "B", "the shape of the softmax was not recorded")
    if match.peaks is None:
        measures.add(bound, None, "bytes", "D", f"peak unknown: {match.reason}")
        return
    longest = float(np.median((ops.end - ops.start)[softmax]))
    source = f"the time of a softmax at the memory bandwidth of {match.peaks.sku}"
    measures.add(bound, round(longest * match.peaks.dram_bytes_per_s / 2e9), "bytes", "D", source)


class Chains:
    """The kernels of unfused attention as rows of ``Prepared.operations``: ``products``, and ``scores`` between them, of
    which ``softmax`` are one for each chain."""

    def __init__(self, products: IntArray, scores: IntArray, softmax: IntArray) -> None:
        self.count = len(softmax)
        self.products = products
        self.scores = scores
        self.softmax = softmax


def unfused_rows(prepared: Prepared, rows: BoolArray) -> BoolArray:
    """Which operations are kernels of unfused attention."""
    ops = prepared.operations
    chains = unfused_chains(prepared, np.flatnonzero(rows & (ops.kind == op.KERNEL) & ~ops.is_comm))
    out = np.zeros(len(ops), dtype=np.bool_)
    if chains.count >= LEAST:
        out[chains.products] = out[chains.scores] = True
    return out


def unfused_chains(prepared: Prepared, kernels: IntArray) -> Chains:
    """Where product, softmax and product follow each other on a stream among ``kernels`` (rows of the operations)."""
    ops, table = prepared.operations, prepared.trace.kernels
    none = np.empty(0, dtype=np.int64)
    softmax, product, between = (_names(prepared, kinds) for kinds in (frozenset({"softmax"}), _PRODUCTS, _BETWEEN))
    if table is None or not len(kernels) or not softmax.any() or not product.any():
        return Chains(none, none, none)
    # Operations are in order of their starts already; a stream belongs to one process.
    ordered = kernels[np.argsort(ops.stream[kernels], kind="stable")]
    name = table["name"][ops.row[ordered]]
    telling = np.flatnonzero(~between[name])
    at = np.flatnonzero(softmax[name[telling]])
    at = at[(at > 0) & (at < len(telling) - 1)]
    before, here, after = telling[at - 1], telling[at], telling[at + 1]
    near = (here - before <= _MOST_BETWEEN) & (after - here <= _MOST_BETWEEN)
    same = ops.stream[ordered[before]] == ops.stream[ordered[after]]
    found = near & same & product[name[before]] & product[name[after]]
    before, here, after = before[found], here[found], after[found]
    # Chains never share a softmax, and what lies between belongs to the chain around it.
    edge = np.zeros(len(ordered) + 1, dtype=np.int64)
    np.add.at(edge, before + 1, 1)
    np.add.at(edge, after, -1)
    inside = np.cumsum(edge[:-1]) > 0
    ends = np.zeros(len(ordered), dtype=np.bool_)
    ends[before] = ends[after] = True
    return Chains(ordered[ends], ordered[inside & ~ends], ordered[here])


def _names(prepared: Prepared, kinds: frozenset[str]) -> BoolArray:
    """Which strings are names of kernels of these kinds."""
    out = np.zeros(len(prepared.trace.strings), dtype=np.bool_)
    out[[i for i, c in prepared.kernel_classes.items() if c.kind in kinds]] = True
    return out
