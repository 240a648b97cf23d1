"""Work of matrix products, convolutions and mixtures of experts.

Sources of the formulas: PyTorch's own FLOP counter (torch/utils/flop_counter.py) for what it covers; the rest counts the
multiply-adds of the definition. Bytes are each operand once.
"""

from __future__ import annotations

import math

from infprof.measures.work.call import Call, Formula, Tensor, Work, total_bytes

EXPERTS_UNKNOWN = "which experts the tokens went to is not in the trace"
GEMM, CONV, MOE = "gemm", "conv", "moe"


def _gemm(
    a: Tensor | None, b: Tensor | None, bias: Tensor | None = None, out_bytes: float | None = None
) -> Work | None:
    """[.., M, K] × [.., K, N]; leading dimensions are batches. ``out_bytes`` of an element, else as the first operand."""
    if a is None or b is None or len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
        return None
    batches, n = math.prod(a.shape[:-2]), b.shape[-1]
    if len(b.shape) > 2 and math.prod(b.shape[:-2]) != batches:
        return None
    return _product(a, b, n, a.shape[-1], bias, out_bytes)


def _product(a: Tensor, b: Tensor, n: int, k: int, bias: Tensor | None, out_bytes: float | None = None) -> Work:
    """Each row of ``a`` (all but its last dimension) gives ``n`` sums over ``k``."""
    rows = math.prod(a.shape[:-1])
    each = out_bytes if out_bytes is not None else a.element_bytes
    out = None if each is None else rows * n * each
    packed = 2 if a.precision == "fp4" else 1
    return Work(GEMM, 2.0 * rows * n * k * packed, total_bytes(a, b, out, bias or 0.0), a.precision)


def _mm(call: Call) -> Work | None:
    return _gemm(call.tensor(0), call.tensor(1))


def _addmm(call: Call) -> Work | None:
    return _gemm(call.tensor(1), call.tensor(2), call.tensor(0))


def _scaled_mm(call: Call) -> Work | None:
    # What comes out is BF16 or FP16 unless asked otherwise, which the trace shows as a number only.
    return _gemm(call.tensor(0), call.tensor(1), out_bytes=2)


def _cutlass_scaled_mm(call: Call) -> Work | None:
    """_C::cutlass_scaled_mm(out, a, b, scales …)."""
    out = call.tensor(0)
    return _gemm(call.tensor(1), call.tensor(2), out_bytes=None if out is None else out.element_bytes)


def _int_mm(call: Call) -> Work | None:
    return _gemm(call.tensor(0), call.tensor(1), out_bytes=4)


def _linear(call: Call) -> Work | None:
    """[.., K] × [N, K]ᵀ."""
    a, w = call.tensor(0), call.tensor(1)
    if a is None or w is None or len(w.shape) != 2 or not a.shape or a.shape[-1] != w.shape[1]:
        return None
    return _product(a, w, w.shape[0], w.shape[1], call.tensor(2))


def _mv(call: Call) -> Work | None:
    m, v = call.tensor(0), call.tensor(1)
    if m is None or v is None or len(m.shape) != 2 or v.shape != m.shape[1:]:
        return None
    out = None if m.element_bytes is None else m.shape[0] * m.element_bytes
    return Work(GEMM, 2.0 * m.elements, total_bytes(m, v, out), m.precision)


def _grouped_mm(call: Call) -> Work | None:
    """[T, K] × [E, K, N]: every token meets one expert."""
    a, b = call.tensor(0), call.tensor(1)
    if a is None or b is None or len(b.shape) != 3 or a.shape[-1] != b.shape[1]:
        return None
    if len(a.shape) == 3:
        return _gemm(a, b)
    return Work(GEMM, 2.0 * a.elements * b.shape[2], None, a.precision, reason=EXPERTS_UNKNOWN)


def _packed(call: Call) -> Work | None:
    """Weights of fewer bits, packed: N is the last dimension of what has the input's type beside it (scales, output)."""
    a = call.tensor(0)
    if a is None or len(a.shape) != 2:
        return None
    others = call.tensors[1:]
    weight = next((t for t in others if "int" in t.type or "char" in t.type), None)
    scales = next((t for t in others if t.type == a.type and len(t.shape) == 2), None)
    if weight is None or scales is None:
        return None
    # The arithmetic is that of the input: weights are unpacked on the way.
    return _product(a, weight, scales.shape[1], a.shape[1], scales)


def _int4pack(call: Call) -> Work | None:
    """aten::_weight_int4pack_mm: weights [N/8, K/(16·tiles), 32, tiles/2]."""
    a, w = call.tensor(0), call.tensor(1)
    if a is None or w is None or len(w.shape) != 4 or len(a.shape) != 2:
        return None
    return _product(a, w, w.shape[0] * 8, a.shape[-1], call.tensor(3))


def _output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _conv_work(x: Tensor, weight: Tensor, macs: float, out: float) -> Work:
    moved = None if x.element_bytes is None else total_bytes(x, weight, out * x.element_bytes)
    return Work(CONV, 2.0 * macs, moved, x.precision)


def convolution(stride: int, padding: int, dilation: int, transposed: int | None = None) -> Formula:
    """A convolution whose settings stand at these positions; ``transposed`` < 0: always, None: never.

    Forward: every output element sums over the weights of its channel, weight.shape[1:]. Transposed: every input
    element is multiplied with as many.
    """

    def work(call: Call) -> Work | None:
        x, weight = call.tensor(0), call.tensor(1)
        if x is None or weight is None or len(x.shape) != len(weight.shape) or len(x.shape) < 3:
            return None
        turned = transposed is not None and (transposed < 0 or call.flag(transposed))
        settings = [call.numbers(at) for at in (stride, padding, dilation)]
        if transposed is not None and transposed >= 0 and call.flag(transposed) is None:
            return None
        taps = math.prod(weight.shape[1:])
        if turned:
            # What comes out is at least as large as the stride makes of what goes in.
            steps = settings[0] or [1]
            factor = math.prod(steps) if len(steps) > 1 else steps[0] ** (len(x.shape) - 2)
            out = x.shape[0] * weight.shape[1] * math.prod(x.shape[2:]) * factor
            return _conv_work(x, weight, x.elements * taps, out)
        if any(s is None or len(s) not in (1, len(x.shape) - 2) for s in settings):
            return None
        dims = len(x.shape) - 2
        strides, paddings, dilations = ((s if len(s) == dims else s * dims) for s in settings if s is not None)
        space = map(_output_size, x.shape[2:], weight.shape[2:], strides, paddings, dilations)
        out = x.shape[0] * weight.shape[0] * math.prod(space)
        return _conv_work(x, weight, out * taps, out) if out > 0 else None

    return work


def _convolution_backward(call: Call) -> Work | None:
    """grad_output, input, weight, …, output_mask: the gradients of input and weight cost one forward pass each."""
    grad, x, weight, wanted = call.tensor(0), call.tensor(1), call.tensor(2), call.scalar(10)
    if grad is None or x is None or weight is None or not wanted or len(weight.shape) < 3:
        return None
    mask = [part.strip() == "True" for part in wanted.strip("[]").split(",")]
    passes = sum(mask[:2])
    base = x if call.flag(7) else grad
    moved = total_bytes(grad, *((x, weight) * passes), grad if passes == 2 else 0.0)
    return Work(CONV, 2.0 * passes * base.elements * math.prod(weight.shape[1:]), moved, x.precision)


def _fused_experts(call: Call) -> Work | None:
    """x [T, H], w1 [E, 2I, H], w2 [E, H, I], weights and ids [T, k]: each token passes k experts."""
    x, w1, w2, weights = (call.tensor(i) for i in range(4))
    if x is None or w1 is None or w2 is None or weights is None:
        return None
    if len(x.shape) != 2 or len(w1.shape) != 3 or len(w2.shape) != 3 or len(weights.shape) != 2:
        return None
    # Packed weights have other shapes than their values.
    if w1.shape[2] != x.shape[1] or w2.shape[1] != x.shape[1] or w2.shape[2] * 2 != w1.shape[1]:
        return None
    pairs = x.shape[0] * weights.shape[1]
    flop = 2.0 * pairs * (math.prod(w1.shape[1:]) + math.prod(w2.shape[1:]))
    # With FP8 weights the input is quantised on the way.
    return Work(MOE, flop, None, w1.precision or x.precision, reason=EXPERTS_UNKNOWN)


_CONVOLUTIONS: dict[str, Formula] = {
    "aten::convolution": convolution(3, 4, 5, 6),
    "aten::_convolution": convolution(3, 4, 5, 6),
    "aten::cudnn_convolution": convolution(3, 2, 4),
    "aten::miopen_convolution": convolution(4, 3, 5),
    "aten::miopen_depthwise_convolution": convolution(4, 3, 5),
    "aten::cudnn_convolution_relu": convolution(3, 4, 5),
    "aten::cudnn_convolution_add_relu": convolution(5, 6, 7),
    "aten::_conv_depthwise2d": convolution(4, 5, 6),
    "aten::cudnn_convolution_transpose": convolution(4, 2, 5, -1),
    "aten::miopen_convolution_transpose": convolution(5, 3, 6, -1),
    "aten::convolution_backward": _convolution_backward,
}

FORMULAS: dict[str, Formula] = {
    "aten::mm": _mm,
    "aten::bmm": _mm,
    "aten::addmm": _addmm,
    "aten::baddbmm": _addmm,
    "aten::_addmm_activation": _addmm,
    "aten::linear": _linear,
    "aten::mv": _mv,
    "aten::_scaled_mm": _scaled_mm,
    "aten::_int_mm": _int_mm,
    "_C::cutlass_scaled_mm": _cutlass_scaled_mm,
    "aten::_grouped_mm": _grouped_mm,
    "aten::_scaled_grouped_mm": _grouped_mm,
    "aten::_weight_int4pack_mm": _int4pack,
    "vllm::rocm_unquantized_gemm": _linear,
    "aiter::gemm_a16w16": _linear,
    "_C::gptq_marlin_gemm": _packed,
    "_C::awq_gemm": _packed,
    "sgl_kernel::fp8_scaled_mm": _scaled_mm,
    "sgl_kernel::int8_scaled_mm": _scaled_mm,
    **dict.fromkeys(("vllm::outplace_fused_experts", "vllm::inplace_fused_experts"), _fused_experts),
    **dict.fromkeys(("sglang::outplace_fused_experts", "sglang::inplace_fused_experts"), _fused_experts),
    **_CONVOLUTIONS,
}
