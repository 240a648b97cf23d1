"""Keys and values of all requests in blocks, and attention over them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infprof.workload.presets import ModelShape


class KvCache:
    """Two tensors [layers, blocks, block size, KV heads, head size]; a slot is block · block size + offset."""

    def __init__(
        self, shape: ModelShape, block_count: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (shape.layers, block_count, block_size, shape.kv_heads, shape.head_size)
        # Zeros: what a masked place holds is multiplied by 0, and must be finite.
        self._keys = torch.zeros(size, dtype=dtype, device=device)
        self._values = torch.zeros(size, dtype=dtype, device=device)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values [tokens, KV heads, head size] in slots [tokens]."""
        self._keys[layer].flatten(0, 1).index_copy_(0, slots, k)
        self._values[layer].flatten(0, 1).index_copy_(0, slots, v)

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., KV heads, tokens, head size] of block numbers [..., count]."""
        keys, values = self._keys[layer][blocks], self._values[layer][blocks]
        return keys.flatten(-4, -3).transpose(-3, -2), values.flatten(-4, -3).transpose(-3, -2)


def decode_attention(cache: KvCache, layer: int, q: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
    """One query per request: q [requests, heads, head size], tables [requests, blocks], lengths [requests] in tokens, the
    query's own included, at least 1. Returns [requests, heads · head size]."""
    k, v = cache.read(layer, tables)
    grouped = q.unflatten(1, (k.shape[1], -1))
    mask = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask[:, None, None, :]).flatten(1)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, before: int) -> Tensor:
    """Causal attention of one request: q [tokens, heads, head size] stand ``before`` tokens in; k and v [KV heads,
    at least before + tokens, head size]. Returns [tokens, heads · head size]."""
    tokens, groups = len(q), q.shape[1] // len(k)
    end = before + tokens
    k, v = (x[:, :end].repeat_interleave(groups, dim=0).unsqueeze(0) for x in (k, v))
    queries = q.transpose(0, 1).unsqueeze(0)
    if before:
        place = torch.arange(end, device=q.device)
        mask = place <= place[before:, None]
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask)
    else:
        out = F.scaled_dot_product_attention(queries, k, v, is_causal=True)
    return out[0].transpose(0, 1).flatten(1)
