"""The model: weights and the forward pass over a flat batch of tokens. Attention is the caller's: it owns the cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from infprof.workload.presets import ModelShape
from infprof.workload.settings import EngineSettings

# layer, queries [tokens, heads, head size], keys and values [tokens, KV heads, head size] → [tokens, heads · head size].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LayerWeights:
    """Views of one flat buffer, so that a whole layer moves in one copy. Matrices are [outputs, inputs]."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor

    @classmethod
    def of(cls, flat: Tensor, shape: ModelShape) -> LayerWeights:
        """The parts of a buffer of ``shape.layer_parameters`` elements."""
        heads, inner = shape.heads * shape.head_size, shape.intermediate
        sizes = (
            (heads + 2 * shape.kv_heads * shape.head_size, shape.hidden),
            (shape.hidden, heads),
            (2 * inner, shape.hidden),
            (shape.hidden, inner),
            (shape.hidden,),
            (shape.hidden,),
        )
        parts = flat.split([math.prod(size) for size in sizes])
        return cls(*(part.view(size) for part, size in zip(parts, sizes, strict=True)))


class LayerStore:
    """The weights of all layers: on the device, or, of every n-th layer, in host memory and copied over for each use."""

    def __init__(
        self, shape: ModelShape, settings: EngineSettings, dtype: torch.dtype, generator: torch.Generator
    ) -> None:
        self._shape = shape
        device = torch.device(settings.device)
        pinned = settings.offload_pinned and device.type == "cuda"
        self._flat: list[Tensor] = []
        self._offloaded: frozenset[int] = frozenset()
        if settings.offload_every:
            self._offloaded = frozenset(range(0, shape.layers, settings.offload_every))
            self._staging = torch.empty(shape.layer_parameters, dtype=dtype, device=device)
        for layer in range(shape.layers):
            flat = torch.empty(shape.layer_parameters, dtype=dtype, device=device)
            _fill(LayerWeights.of(flat, shape), generator)
            if layer in self._offloaded:
                host = torch.empty(shape.layer_parameters, dtype=dtype, pin_memory=pinned)
                flat = host.copy_(flat)
            self._flat.append(flat)

    def weights(self, layer: int) -> LayerWeights:
        """Of one layer, on the device; those of an offloaded layer hold until the next one is asked for."""
        flat = self._flat[layer]
        if layer in self._offloaded:
            flat = self._staging.copy_(flat, non_blocking=True)
        return LayerWeights.of(flat, self._shape)


def _fill(weights: LayerWeights, generator: torch.Generator) -> None:
    """Random matrices that keep the size of what goes through them; norms of 1."""
    for matrix in (weights.qkv, weights.out, weights.gate_up, weights.down):
        matrix.normal_(std=matrix.shape[1] ** -0.5, generator=generator)
    weights.attention_norm.fill_(1)
    weights.mlp_norm.fill_(1)


class Model:
    """Weights drawn from ``settings.seed`` and the forward pass. Call it inside ``torch.inference_mode``."""

    def __init__(self, shape: ModelShape, settings: EngineSettings, dtype: torch.dtype) -> None:
        self.shape = shape
        self.device = torch.device(settings.device)
        self._settings = settings
        generator = torch.Generator(device=self.device)
        generator.manual_seed(settings.seed)
        self._layers = LayerStore(shape, settings, dtype, generator)
        size = (shape.vocabulary, shape.hidden)
        self._embedding = torch.empty(size, dtype=dtype, device=self.device).normal_(generator=generator)
        self._head = torch.empty(size, dtype=dtype, device=self.device)
        self._head.normal_(std=shape.hidden**-0.5, generator=generator)
        self._cos, self._sin = _rotations(shape, dtype, self.device)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [tokens, hidden], normed, for token ids [tokens] at positions [tokens]."""
        x = F.embedding(ids, self._embedding)
        rotation = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        for layer in range(self.shape.layers):
            x = self._layer(layer, x, rotation, attend)
        return self._norm(x, None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of hidden states [rows, hidden]."""
        return self._linear(hidden, self._head)

    def _layer(self, layer: int, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        shape, w = self.shape, self._layers.weights(layer)
        qkv = self._linear(self._norm(x, w.attention_norm), w.qkv).view(len(x), -1, shape.head_size)
        q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        x = x + self._linear(attend(layer, _rotated(q, rotation), _rotated(k, rotation), v), w.out)
        gate, up = self._linear(self._norm(x, w.mlp_norm), w.gate_up).chunk(2, dim=-1)
        x = x + self._linear(F.silu(gate) * up, w.down)
        if self._settings.check_layers and not bool(torch.isfinite(x).all()):
            raise FloatingPointError(f"layer {layer} gives values that are not finite")
        if self._settings.empty_cache:
            torch.cuda.empty_cache()
        return x

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._settings.pieces == 1:
            return F.linear(x, weight)
        return torch.cat([F.linear(x, part) for part in weight.tensor_split(self._settings.pieces)], dim=-1)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.shape.norm_epsilon)
        return scaled.to(x.dtype) if weight is None else scaled.to(x.dtype) * weight


def _rotations(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [context, head size / 2] of rotary positions (RoFormer, arXiv 2104.09864)."""
    exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size
    angles = torch.arange(shape.context, dtype=torch.float64)[:, None] * shape.rope_base**-exponents
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x [tokens, heads, head size] turned by its position: halves are the two coordinates."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
