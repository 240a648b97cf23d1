"""What a formula reads: the inputs of an operator by position, and what a formula gives back."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from infprof.trace import OperatorInputs

# Bytes of an element, by the recorder's type names (old and new spellings).
ELEMENT_BYTES: Mapping[str, float] = {
    "float": 4,
    "double": 8,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "int": 4,
    "long": 8,
    "long int": 8,
    "short": 2,
    "short int": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
    "c10::qint8": 1,
    "c10::quint8": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2fnuz": 1,
    "c10::Float8_e8m0fnu": 1,
    "c10::Float4_e2m1fn_x2": 1,
}

_PRECISIONS: Mapping[str, str] = {
    "float": "fp32",
    "double": "fp64",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "signed char": "int8",
    "c10::qint8": "int8",
    "c10::Float4_e2m1fn_x2": "fp4",
}

# What the recorder writes where no tensor was passed.
_NO_TENSOR = frozenset({"", "Scalar", "ScalarList", "Int", "Double", "Bool", "GenericList", "TensorList"})


class Work(NamedTuple):
    """The counted work of one call of an operator.

    ``flop`` counts 2 for a multiply-add; ``bytes`` is the compulsory device-memory traffic, each operand once: a lower
    bound, except for what caches hold. None = the inputs do not tell, ``reason`` says why. ``precision`` is that of the
    arithmetic (None: ordinary FP32 pipe). ``flop_is_bound``: the real FLOP may be fewer (masked or skipped work).
    """

    kind: str
    flop: float | None
    bytes: float | None
    precision: str | None = None
    flop_is_bound: bool = False
    reason: str | None = None


class Tensor(NamedTuple):
    """``elements`` as the shape says; ``stored`` only those that memory holds (an expanded dimension is stored once)."""

    shape: tuple[int, ...]
    type: str
    elements: int
    stored: int

    @property
    def element_bytes(self) -> float | None:
        return ELEMENT_BYTES.get(self.type)

    @property
    def bytes(self) -> float | None:
        """Bytes to read or write it once, None where the type is not known."""
        each = self.element_bytes
        return None if each is None else self.stored * each

    @property
    def precision(self) -> str | None:
        return "fp8" if "Float8" in self.type else _PRECISIONS.get(self.type)


class Call:
    """An operator's inputs by position. A position that holds no tensor gives None."""

    def __init__(self, inputs: OperatorInputs) -> None:
        self._inputs = inputs

    def tensor(self, index: int) -> Tensor | None:
        return self._tensors[index] if index < len(self._tensors) else None

    @cached_property
    def _tensors(self) -> list[Tensor | None]:
        given = self._inputs
        strides = given.strides if len(given.strides) == len(given.shapes) else ((),) * len(given.shapes)
        return [
            None if kind in _NO_TENSOR else tensor(shape, kind, stride)
            for shape, kind, stride in zip(given.shapes, given.types, strides, strict=False)
        ]

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All inputs that are tensors of at least one dimension, in order."""
        return [t for t in self._tensors if t is not None and t.shape]

    def list_shapes(self, index: int) -> list[tuple[int, ...]]:
        """The shapes of a list of tensors."""
        shapes = self._inputs.shapes[index] if index < len(self._inputs.shapes) else ()
        return [s for s in shapes if isinstance(s, tuple)]

    def scalar(self, index: int) -> str:
        """The text of an input that is no tensor, empty where not recorded."""
        return self._inputs.scalars[index] if index < len(self._inputs.scalars) else ""

    def flag(self, index: int) -> bool | None:
        return {"True": True, "False": False}.get(self.scalar(index))

    def number(self, index: int) -> int | None:
        text = self.scalar(index)
        return int(text) if re.fullmatch(r"-?\d+", text) else None

    def numbers(self, index: int) -> list[int] | None:
        """A list of whole numbers, None where it was not recorded."""
        text = self.scalar(index)
        if not re.fullmatch(r"\[[-\d, ]*\]", text):
            return None
        return [int(part) for part in text[1:-1].split(",") if part.strip()]

    def whole_scalars(self) -> list[int]:
        """All inputs that are whole numbers, in order."""
        found = (self.number(i) for i, kind in enumerate(self._inputs.types) if kind in ("Scalar", "Int"))
        return [n for n in found if n is not None]


def tensor(shape: tuple[Any, ...], kind: str, stride: tuple[Any, ...] = ()) -> Tensor | None:
    """A tensor, None where the shape holds anything but whole numbers of at least 0."""
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        return None
    elements = math.prod(shape)
    stored = elements
    if elements and len(stride) == len(shape) and all(isinstance(n, int) for n in stride):
        expanded = math.prod(n for n, s in zip(shape, stride, strict=True) if s != 0)
        reach = 1 + sum((n - 1) * abs(s) for n, s in zip(shape, stride, strict=True))
        stored = min(expanded, reach)
    return Tensor(tuple(shape), kind, elements, stored)


def total_bytes(*parts: Tensor | float | None) -> float | None:
    """The sum, None as soon as one part is not known."""
    total = 0.0
    for part in parts:
        size = part.bytes if isinstance(part, Tensor) else part
        if size is None:
            return None
        total += size
    return total


# Where a work itself gives no reason for what is missing.
NO_REASON = "part of it was counted with inner operators, or a type is of unknown size"

# A formula returns None where the inputs are not of the form that it knows.
Formula = Callable[[Call], Work | None]
