"""Work of what moves memory more than it computes: pointwise operators, norms, reductions, copies, look-ups, caches.

FLOP per element are counts of the definition, transcendental functions as 8: rough, and small beside the bytes.
"""

from __future__ import annotations

import math
import re

from infprof.measures.work.call import ELEMENT_BYTES, Call, Formula, Tensor, Work, total_bytes

TRANSCENDENTAL = 8
COMPILED_FLOP = "how much a compiled kernel computes per element is not in the trace"
LIST_TYPES_UNKNOWN = "the types of tensors in a list are not in the trace"
ROWS_UNKNOWN = "the shapes of the indexes are not in the trace"

_UNARY = (
    "abs neg sqrt rsqrt reciprocal relu clamp_min clamp_max clamp floor ceil round sign bitwise_not leaky_relu square"
)
_UNARY_SLOW = "exp log log2 sin cos tanh sigmoid silu gelu erf softplus mish elu hardswish hardsigmoid pow exp2 log1p"
_BINARY = (
    "add sub mul div rsub maximum minimum remainder fmod bitwise_and bitwise_or bitwise_xor logical_and logical_or"
    " threshold_backward masked_fill floor_divide atan2"
)
_COMPARE = "eq ne lt le gt ge isnan isinf logical_not isfinite"
_TERNARY = "addcmul addcdiv where lerp"
_REDUCE = "sum mean max min amax amin argmax argmin prod any all norm linalg_vector_norm var std var_mean logsumexp"
_POOL = "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool2d"


def _broadcast(tensors: list[Tensor]) -> int | None:
    """Elements of what tensors of these shapes give together, None where they do not fit."""
    shape: list[int] = []
    for t in tensors:
        dims = list(t.shape)
        width = max(len(shape), len(dims))
        left, right = [1] * (width - len(shape)) + shape, [1] * (width - len(dims)) + dims
        if any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
            return None
        shape = [a if b == 1 else b for a, b in zip(left, right, strict=True)]
    return math.prod(shape)


def _pointwise(operands: int, flop: int, out_bytes: float | None = None) -> Formula:
    """The first ``operands`` inputs together, each read once, and one output of the widest type among them."""

    def work(call: Call) -> Work | None:
        read = [t for i in range(operands) if (t := call.tensor(i)) is not None and t.shape]
        elements = _broadcast(read) if read else None
        if elements is None:
            return None
        each = [t.element_bytes for t in read]
        widest = None if None in each else max(e for e in each if e is not None)
        out = out_bytes if out_bytes is not None else widest
        moved = total_bytes(*read, None if out is None else out * elements)
        return Work("elementwise", float(flop * elements), moved)

    return work


def _reduce(kind: str, flop: int) -> Formula:
    """The first input is read once; what comes out is small."""

    def work(call: Call) -> Work | None:
        x = call.tensor(0)
        return None if x is None or not x.shape else Work(kind, float(flop * x.elements), x.bytes)

    return work


def _through(kind: str, flop: int, weights: tuple[int, ...] = ()) -> Formula:
    """The first input is read and something of its size and type written; ``weights`` are read once."""

    def work(call: Call) -> Work | None:
        x = call.tensor(0)
        if x is None or not x.shape:
            return None
        more = [t for i in weights if (t := call.tensor(i)) is not None]
        return Work(kind, float(flop * x.elements), total_bytes(x, x, *more))

    return work


def listed(kind: str, flop: int, twice: tuple[int, ...] = (), of: int = 0) -> Formula:
    """Custom operators that get what they write as an input: every tensor once, those in ``twice`` read and written.

    ``flop`` is per element of the input at ``of``.
    """

    def work(call: Call) -> Work | None:
        base = call.tensor(of)
        if base is None or not base.shape:
            return None
        again = [call.tensor(i) or 0.0 for i in twice]
        return Work(kind, float(flop * base.elements), total_bytes(*call.tensors, *again))

    return work


def _softmax(call: Call) -> Work | None:
    x = call.tensor(0)
    if x is None or not x.shape:
        return None
    out = 4.0 * x.elements if call.flag(2) else x
    return Work("softmax", float((TRANSCENDENTAL + 3) * x.elements), total_bytes(x, out))


def _copy(call: Call) -> Work | None:
    """dst, src: the source is read in its type, the destination written in its own."""
    to, source = call.tensor(0), call.tensor(1)
    if to is None or source is None or not to.shape:
        return None
    each = to.element_bytes
    return Work("copy", 0.0, total_bytes(source, None if each is None else each * to.elements))


def _fill(call: Call) -> Work | None:
    x = call.tensor(0)
    return None if x is None or not x.shape else Work("fill", 0.0, x.bytes)


def _cat(call: Call) -> Work | None:
    return Work("copy", 0.0, None, reason=LIST_TYPES_UNKNOWN) if call.list_shapes(0) else None


def _embedding(call: Call) -> Work | None:
    """weight [V, H], indexes: only the rows that are looked up are read."""
    table, index = call.tensor(0), call.tensor(1)
    if table is None or index is None or len(table.shape) != 2 or table.element_bytes is None:
        return None
    rows = index.elements * table.shape[1] * table.element_bytes
    return Work("embedding", 0.0, total_bytes(2.0 * rows, index))


def _index_select(call: Call) -> Work | None:
    x, axis, index = call.tensor(0), call.number(1), call.tensor(2)
    if x is None or axis is None or index is None or not x.shape or x.element_bytes is None:
        return None
    if not -len(x.shape) <= axis < len(x.shape) or not x.shape[axis]:
        return None
    chosen = x.elements // x.shape[axis] * index.elements * x.element_bytes
    return Work("index", 0.0, total_bytes(2.0 * chosen, index))


def _index(call: Call) -> Work | None:
    return Work("index", 0.0, None, reason=ROWS_UNKNOWN)


def _rotary(call: Call) -> Work | None:
    """positions [T], query [T, Hq·D], key, head size, cos_sin [positions, rotated]: both are rotated in place."""
    positions, q, k, head = call.tensor(0), call.tensor(1), call.tensor(2), call.number(3)
    table = call.tensor(4)
    if positions is None or q is None or k is None or table is None or not head or len(table.shape) != 2:
        return None
    heads = (q.elements + k.elements) // head
    rows = None if table.element_bytes is None else positions.elements * table.shape[1] * table.element_bytes
    return Work("rotary", 3.0 * table.shape[1] * heads, total_bytes(positions, q, q, k, k, rows))


def _cache_write(call: Call) -> Work | None:
    """key, value, key cache, value cache: as much is written as comes in; the size of a cache is no work."""
    k, v, cache = call.tensor(0), call.tensor(1), call.tensor(2)
    if k is None or v is None or cache is None or cache.element_bytes is None:
        return None
    return Work("kv-cache", 0.0, total_bytes(k, v, (k.elements + v.elements) * cache.element_bytes))


def compiled(name: str) -> Formula | None:
    """Kernels that torch.compile wrote in Triton: their tensors are listed, and how many elements the kernel visits.

    A tensor larger than that (the table of a look-up, a slice's whole) counts only as many elements as are visited.
    """
    match = re.match(r"triton_(poi|red|per)_", name)
    if match is None:
        return None
    loops = 1 if match[1] == "poi" else 2

    def work(call: Call) -> Work | None:
        visited = math.prod(call.whole_scalars()[-loops:] or [0])
        if visited <= 0:
            return None
        sizes = [ELEMENT_BYTES.get(t.type) for t in call.tensors]
        moved = [None if e is None else e * min(t.stored, visited) for t, e in zip(call.tensors, sizes, strict=True)]
        kind = "elementwise" if match[1] == "poi" else "reduce"
        return Work(kind, None, total_bytes(*moved), reason=COMPILED_FLOP)

    return work


def _named(names: str, formula: Formula) -> dict[str, Formula]:
    """ATen operators and their in-place forms."""
    return {f"aten::{name}{end}": formula for name in names.split() for end in ("", "_")}


def _engine(names: str, formula: Formula) -> dict[str, Formula]:
    """Operators of serving engines that spell one thing alike."""
    return dict.fromkeys(names.split(), formula)


FORMULAS: dict[str, Formula] = {
    **_named(_UNARY, _pointwise(1, 1)),
    **_named(_UNARY_SLOW, _pointwise(1, TRANSCENDENTAL)),
    **_named(_BINARY, _pointwise(2, 1)),
    **_named(_COMPARE, _pointwise(2, 1, 1)),
    **_named(_TERNARY, _pointwise(3, 2)),
    **_named(_REDUCE, _reduce("reduce", 1)),
    **_named("cumsum cumprod", _through("scan", 1)),
    **_named(_POOL, _reduce("pooling", 1)),
    "aten::_softmax": _softmax,
    "aten::_log_softmax": _softmax,
    "aten::copy_": _copy,
    "aten::fill_": _fill,
    "aten::zero_": _fill,
    "aten::cat": _cat,
    "aten::embedding": _embedding,
    "aten::index_select": _index_select,
    "aten::index": _index,
    "aten::native_layer_norm": _through("norm", 8, (2, 3)),
    "aten::_fused_rms_norm": _through("norm", 4, (2,)),
    "aten::native_group_norm": _through("norm", 8, (1, 2)),
    "aiter::_groupnorm_run": _through("norm", 8, (2, 3)),
    "aten::native_batch_norm": _through("norm", 5, (1, 2)),
    "aten::cudnn_batch_norm": _through("norm", 5, (1, 2)),
    "aten::miopen_batch_norm": _through("norm", 5, (1, 2)),
    **_engine("_C::rms_norm sgl_kernel::rmsnorm", listed("norm", 4, of=1)),
    **_engine("_C::fused_add_rms_norm sgl_kernel::fused_add_rmsnorm", listed("norm", 5, (0, 1))),
    **_engine(
        "_C::silu_and_mul sgl_kernel::silu_and_mul _C::gelu_and_mul _C::gelu_tanh_and_mul", listed("activation", 5)
    ),
    **_engine("_C::static_scaled_fp8_quant _C::dynamic_scaled_fp8_quant", listed("quantise", 2)),
    **_engine("_C::dynamic_per_token_scaled_fp8_quant _C::dynamic_scaled_int8_quant", listed("quantise", 2)),
    **_engine("_C::rotary_embedding sgl_kernel::rotary_embedding", _rotary),
    **_engine("_C_cache_ops::reshape_and_cache _C_cache_ops::reshape_and_cache_flash", _cache_write),
}
