"""Work of attention: two products, queries × keys and weights × values, over the pairs that the mask leaves.

Each pair of a query and a key costs 2·(D + Dv) FLOP per query head. Grouped queries count query heads for FLOP and
key/value heads for bytes. The keys and values of a paged cache are not among the inputs that are recorded.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from infprof.measures.work.call import Call, Formula, Tensor, Work, total_bytes

ATTENTION = "attention"
RAGGED = "sequence lengths are values of a tensor, which a trace does not hold"
PAGED = "lengths in the paged KV cache are not in the trace; a step range with their sums would tell"


def _pairs(queries: int, keys: int) -> float:
    """Pairs under a causal mask that ends with the last query and the last key."""
    if queries > keys:
        return keys * (keys + 1) / 2
    return queries * keys - queries * (queries - 1) / 2


def _dense(heads_first: bool, causal_at: int, bias_at: int | None, lengths_at: int | None) -> Formula:
    """q, k, v of [B, H, S, D] or [B, S, H, D]; whether causal, an additive mask, and ragged lengths at these positions."""

    def work(call: Call) -> Work | None:
        q, k, v = (call.tensor(i) for i in range(3))
        if q is None or k is None or v is None or not len(q.shape) == len(k.shape) == len(v.shape):
            return None
        bias = None if bias_at is None else call.tensor(bias_at)
        out = None if q.element_bytes is None else math.prod(q.shape[:-1]) * v.shape[-1] * q.element_bytes
        moved = total_bytes(q, k, v, out, bias or 0.0)
        lengths = None if lengths_at is None else call.tensor(lengths_at)
        if len(q.shape) == 3 or (lengths is not None and lengths.elements):
            return Work(ATTENTION, None, moved, q.precision, reason=RAGGED)
        if len(q.shape) != 4:
            return None
        rows, heads = (2, 1) if heads_first else (1, 2)
        queries, keys = q.shape[rows], k.shape[rows]
        text = call.scalar(causal_at)
        causal = text in ("True", "1", "2")
        pairs = _pairs(queries, keys) if causal else float(queries * keys)
        flop = 2.0 * q.shape[0] * q.shape[heads] * pairs * (q.shape[3] + v.shape[3])
        # Not recorded whether causal: all pairs are the most it can be. A mask may rule out whole blocks too.
        doubtful = not text or bias is not None or (causal and queries != keys)
        return Work(ATTENTION, flop, moved, q.precision, flop_is_bound=doubtful)

    return work


class StepSums(NamedTuple):
    """Over the requests of a step: query tokens, total lengths, query tokens squared, query tokens × total length."""

    queries: int
    keys: int
    queries_squared: int
    queries_by_keys: int

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key under a causal mask, over all requests."""
        return self.queries_by_keys - (self.queries_squared - self.queries) / 2


def paged_tensors(call: Call) -> tuple[Tensor, Tensor] | None:
    """q [T, Hq, D] and k [T, Hkv, D] of an attention over a paged cache."""
    q, k = call.tensor(0), call.tensor(1)
    if q is None or k is None or len(q.shape) != 3 or len(k.shape) != 3 or q.shape[2] != k.shape[2]:
        return None
    return q, k


def paged_work(call: Call, sums: StepSums | None) -> Work | None:
    """Work of one attention over a paged cache in a step of known sums; both unknown without them.

    Each is the most it can be: layers with a sliding window read and multiply less.
    """
    tensors = paged_tensors(call)
    if tensors is None:
        return None
    q, k = tensors
    if sums is None or k.element_bytes is None or q.element_bytes is None:
        return Work(ATTENTION, None, None, q.precision, reason=PAGED)
    heads, size = q.shape[1], q.shape[2]
    # Padding of a graph: q may have more rows than the step has tokens. The cache may be of a smaller type than k.
    moved = 2 * sums.queries * heads * size * q.element_bytes + 2 * sums.keys * k.shape[1] * size * k.element_bytes
    return Work(ATTENTION, 4.0 * heads * size * sums.pairs, float(moved), q.precision, flop_is_bound=True)


def _paged(call: Call) -> Work | None:
    return paged_work(call, None)


PAGED_NAMES = frozenset(
    f"{space}::{name}"
    for space in ("vllm", "sglang")
    for name in ("unified_attention", "unified_attention_with_output")
)

FORMULAS: dict[str, Formula] = {
    "aten::scaled_dot_product_attention": _dense(True, 5, 3, None),
    "aten::_scaled_dot_product_flash_attention": _dense(True, 4, None, None),
    "aten::_scaled_dot_product_efficient_attention": _dense(True, 6, 3, None),
    "aten::_scaled_dot_product_cudnn_attention": _dense(True, 6, 3, None),
    "aten::_scaled_dot_product_fused_attention_overrideable": _dense(True, 5, 3, None),
    "aten::_flash_attention_forward": _dense(False, 8, None, 3),
    "aten::_efficient_attention_forward": _dense(False, 9, 3, 4),
    "flash_attn::_flash_attn_forward": _dense(False, 5, None, None),
    **dict.fromkeys(PAGED_NAMES, _paged),
}
