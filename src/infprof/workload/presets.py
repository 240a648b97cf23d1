"""Sizes of the model, named after published models of the same shape. Weights are random: only speed is meant."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer in the manner of Llama: RMSNorm, rotary positions, grouped queries, SwiGLU.

    ``context`` is the largest number of tokens of a request, prompt and output together.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    context: int
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.heads % self.kv_heads or self.head_size % 2:
            raise ValueError(f"{self}: heads must divide hidden evenly, kv_heads heads, and a head's size be even")

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_parameters(self) -> int:
        """Of one layer: projections of attention and of the MLP, and two norms."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """All weights; embedding and output projection are separate."""
        return self.layers * self.layer_parameters + 2 * self.vocabulary * self.hidden + self.hidden

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """What one token takes in the KV cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * element_bytes


@dataclass(frozen=True)
class Preset:
    shape: ModelShape
    summary: str


PRESETS: dict[str, Preset] = {
    "tiny": Preset(ModelShape(512, 64, 2, 4, 2, 176, 4096), "for tests; a second on any CPU"),
    "small": Preset(ModelShape(32_000, 768, 12, 12, 12, 2048, 8192), "of GPT-2's size"),
    "1b": Preset(ModelShape(32_000, 2048, 22, 32, 4, 5632, 16_384), "shaped like TinyLlama-1.1B"),
    "3b": Preset(ModelShape(128_256, 3072, 28, 24, 8, 8192, 32_768, 500_000.0), "shaped like Llama-3.2-3B"),
    "7b": Preset(ModelShape(32_000, 4096, 32, 32, 32, 11_008, 32_768), "shaped like Llama-2-7B"),
}


def describe_presets() -> list[dict[str, Any]]:
    """Every preset as plain data: name, summary, parameters, shape."""
    return [
        {
            "name": name,
            "summary": preset.summary,
            "parameters": preset.shape.parameters,
            "shape": asdict(preset.shape),
        }
        for name, preset in PRESETS.items()
    ]
