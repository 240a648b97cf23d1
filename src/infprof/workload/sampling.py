"""The next token from logits: the largest, or a draw that depends on the request's seed and position alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Draw(NamedTuple):
    """How one row's token is chosen; ``position`` counts the tokens before it."""

    temperature: float
    seed: int
    position: int


def choose(logits: Tensor, draws: Sequence[Draw], on_host: bool = False) -> list[int]:
    """One token per row of logits [rows, vocabulary]; waits for the device. ``on_host`` looks for it in Python."""
    scores = logits if all(draw.temperature == 0 for draw in draws) else _perturbed(logits, draws)
    if not on_host:
        tokens: list[int] = scores.argmax(dim=-1).tolist()
        return tokens
    rows = (row.cpu().tolist() for row in scores)
    return [max(range(len(row)), key=row.__getitem__) for row in rows]


def _perturbed(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Scores whose maximum is a draw from softmax(logits / temperature): the Gumbel-max trick. Greedy rows stay."""
    temperatures = torch.tensor([draw.temperature for draw in draws], dtype=torch.float32, device=logits.device)
    starts = [_signed(_mixed(draw.seed * _GOLDEN + draw.position)) for draw in draws]
    noise = _gumbel(torch.tensor(starts, device=logits.device), logits.shape[1])
    wide = logits.float()
    drawn = wide / temperatures.clamp(min=1e-6)[:, None] + noise
    return torch.where(temperatures[:, None] > 0, drawn, wide)


def _gumbel(starts: Tensor, count: int) -> Tensor:
    """Noise [rows, count] by SplitMix64 (Steele et al., OOPSLA 2014) from a state per row, counted, so that no row depends
    on another."""
    x = starts[:, None] + torch.arange(1, count + 1, device=starts.device) * _signed(_GOLDEN)
    x = (x ^ _shifted(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX_2)
    uniform = (_shifted(x ^ _shifted(x, 31), 40).float() + 0.5) / (1 << 24)
    # Half a step below 1 is 1 in float32.
    return -torch.log(-torch.log(uniform.clamp(max=1 - 2**-24)))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits as of unsigned numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(x: int) -> int:
    """SplitMix64's last step on a Python integer."""
    x &= (1 << 64) - 1
    x = (x ^ (x >> 30)) * _MIX_1 & (1 << 64) - 1
    x = (x ^ (x >> 27)) * _MIX_2 & (1 << 64) - 1
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return x - (1 << 64) if x >> 63 else x
