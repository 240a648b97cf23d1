"""Attention made of separate kernels: a softmax between two matrix products, which writes the scores to memory."""

from __future__ import annotations

import numpy as np

from infprof.measures import operations as op
from infprof.measures.kernels import graphs_hide_kernels
from infprof.measures.operations import Prepared
from infprof.results import Measures
from infprof.trace import BoolArray, IntArray

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


class Chains:
    """The kernels of unfused attention as rows of ``Prepared.operations``: ``products``, and ``scores`` between them."""

    def __init__(self, count: int, products: IntArray, scores: IntArray) -> None:
        self.count = count
        self.products = products
        self.scores = scores


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
        return Chains(0, none, none)
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
    before, after = before[found], after[found]
    # Chains never share a softmax, and what lies between belongs to the chain around it.
    edge = np.zeros(len(ordered) + 1, dtype=np.int64)
    np.add.at(edge, before + 1, 1)
    np.add.at(edge, after, -1)
    inside = np.cumsum(edge[:-1]) > 0
    ends = np.zeros(len(ordered), dtype=np.bool_)
    ends[before] = ends[after] = True
    return Chains(len(before), ordered[ends], ordered[inside & ~ends])


def _names(prepared: Prepared, kinds: frozenset[str]) -> BoolArray:
    """Which strings are names of kernels of these kinds."""
    out = np.zeros(len(prepared.trace.strings), dtype=np.bool_)
    out[[i for i, c in prepared.kernel_classes.items() if c.kind in kinds]] = True
    return out
