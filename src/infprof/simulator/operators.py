"""Framework operators behind kernels: what they were called with, and the least work that these shapes ask for.

Written in a spec as a call, ``aten::addmm(bf16[640], bf16[888, 2880], bf16[2880, 640].t, 1, 1)``: a tensor is its type
and shape (``.t``: the transpose of a contiguous one), ``_`` is no value, anything else a scalar or a list of scalars.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from infprof.errors import UsageError

# spec's name of a type → (name that PyTorch's profiler writes, bytes per element)
TYPES = {
    "bf16": ("c10::BFloat16", 2),
    "f16": ("c10::Half", 2),
    "f32": ("float", 4),
    "f64": ("double", 8),
    "fp8": ("c10::Float8_e4m3fn", 1),
    "i64": ("long int", 8),
    "i32": ("int", 4),
    "i8": ("signed char", 1),
    "u8": ("unsigned char", 1),
    "bool": ("bool", 1),
}
_SIZES = dict(TYPES.values())
_SCALAR = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|True|False|inf|nan")


@dataclass(frozen=True)
class Tensor:
    """``type`` as PyTorch's profiler writes it; strides in elements."""

    type: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * _SIZES[self.type]


@dataclass(frozen=True)
class Operator:
    """An operator call; an input is a tensor, or the text of a scalar, of a list of scalars, or of nothing ("")."""

    name: str
    inputs: tuple[Tensor | str, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        return [value for value in self.inputs if isinstance(value, Tensor)]


def tensor(type: str, *shape: int) -> Tensor:
    """A contiguous tensor; ``type`` of ``TYPES``."""
    return Tensor(TYPES[type][0], shape, _contiguous(shape))


def parse_operator(text: Any, where: str) -> Operator:
    """The operator that ``text`` describes. Raises UsageError."""
    match = re.fullmatch(r"\s*([\w:.]+)\s*\((.*)\)\s*", text, re.DOTALL) if isinstance(text, str) else None
    if not match:
        raise UsageError(f"{where}: expected an operator such as aten::mm(bf16[8, 64], bf16[64, 32]), found {text!r}.")
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", match[2])] if match[2].strip() else []
    return Operator(match[1], tuple(_input(part, where) for part in parts))


def _input(text: str, where: str) -> Tensor | str:
    if match := re.fullmatch(r"(\w+)\[([\d,\s]*)\](\.t)?", text):
        if match[1] not in TYPES:
            raise UsageError(f"{where}: no tensor type {match[1]!r}. There are: {', '.join(TYPES)}.")
        shape = tuple(int(size) for size in match[2].split(",") if size.strip())
        strides = _contiguous(shape)
        if match[3]:
            strides = (*strides[:-2], 1, *shape[-2:-1])
        return Tensor(TYPES[match[1]][0], shape, strides)
    if text in ("_", "None"):
        return ""
    if _SCALAR.fullmatch(text) or re.fullmatch(r"\[[^\[\]]*\]", text):
        return text
    raise UsageError(f"{where}: expected a tensor such as bf16[8, 64], a number, True, False or _, found {text!r}.")


def input_type(value: Tensor | str) -> str:
    """What PyTorch's profiler writes as the type of an input."""
    if isinstance(value, Tensor):
        return value.type
    return "ScalarList" if value.startswith("[") else "Scalar" if value else ""


@cache
def work(operator: Operator) -> tuple[int, int]:
    """FLOP (2 per multiply-add) and least bytes of memory traffic of an operator, by its shapes.

    Matrix products, convolutions and attention have their textbook counts (``torch.utils.flop_counter``; causal
    attention counts half of the square plus its diagonal). Any other operator counts no FLOP; its bytes are each tensor
    read once and one as large as the largest written. Raises ValueError where the shapes do not fit the operator.
    """
    name = operator.name.rpartition("::")[2].rstrip("_")
    tensors = operator.tensors
    try:
        if name in ("mm", "bmm", "addmm", "baddbmm", "_scaled_mm"):
            left, right = tensors[1:3] if "add" in name else tensors[:2]
            return _product(left, right.shape[-2], right.shape[-1], sum(t.bytes for t in tensors))
        if name == "linear":
            return _product(tensors[0], tensors[1].shape[1], tensors[1].shape[0], sum(t.bytes for t in tensors))
        if name in ("convolution", "conv2d", "cudnn_convolution"):
            return _convolution(operator)
        if name in ("scaled_dot_product_attention", "_flash_attention_forward") or name.startswith("_scaled_dot_prod"):
            return _attention(operator, name)
    except (IndexError, ValueError):
        raise ValueError(f"the shapes of {operator.name} do not fit it") from None
    return 0, sum(t.bytes for t in tensors) + max((t.bytes for t in tensors), default=0)


def _product(left: Tensor, inner: int, columns: int, read: int) -> tuple[int, int]:
    if left.shape[-1] != inner:
        raise ValueError
    rows = left.elements // inner
    return 2 * rows * inner * columns, read + rows * columns * max(2, _SIZES[left.type])


def _convolution(operator: Operator) -> tuple[int, int]:
    """Stride, padding and dilation are the lists after (input, weight, bias), as ``aten::convolution`` has them."""
    image, weight = operator.tensors[:2]
    lists = [[int(n) for n in i[1:-1].split(",")] for i in operator.inputs if isinstance(i, str) and i.startswith("[")]
    stride, padding, dilation = lists[:3]
    places = [
        (size + 2 * pad - d * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, d in zip(image.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    ]
    output = image.shape[0] * weight.shape[0] * math.prod(places)
    written = output * _SIZES[image.type]
    return 2 * output * math.prod(weight.shape[1:]), sum(t.bytes for t in operator.tensors) + written


def _attention(operator: Operator, name: str) -> tuple[int, int]:
    query, key, value = operator.tensors[:3]
    # _flash_attention_forward has [batch, sequence, heads, size], the others [batch, heads, sequence, size]
    heads, sequence = (2, 1) if name == "_flash_attention_forward" else (1, 2)
    causal = "True" in operator.inputs
    queries, keys = query.shape[sequence], key.shape[sequence]
    pairs = queries * keys - queries * (queries - 1) // 2 if causal else queries * keys
    flop = 2 * query.shape[0] * query.shape[heads] * pairs * (query.shape[3] + value.shape[3])
    return flop, sum(t.bytes for t in (query, key, value)) + query.bytes


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
