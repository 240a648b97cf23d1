"""Formulas of counted work: FLOP and bytes of operators from the shapes they were called with."""

from __future__ import annotations

from typing import Any

import pytest

from infprof.measures.work.attention import PAGED, StepSums
from infprof.measures.work.call import Work
from infprof.measures.work.formulas import FORMULAS, operator_work
from infprof.measures.work.steps import step_sums
from infprof.trace import OperatorInputs

BF16, HALF, FLOAT, INT, LONG = "c10::BFloat16", "c10::Half", "float", "int", "long int"


def inputs(*given: tuple[tuple[Any, ...], str] | str, strides: tuple[Any, ...] = ()) -> OperatorInputs:
    """Tensors as (shape, type), everything else as the text of a scalar."""
    shapes = tuple(() if isinstance(g, str) else g[0] for g in given)
    types = tuple("Scalar" if isinstance(g, str) else g[1] for g in given)
    return OperatorInputs(shapes, types, tuple(g if isinstance(g, str) else "" for g in given), strides)


def work(name: str, *given: tuple[tuple[Any, ...], str] | str, strides: tuple[Any, ...] = ()) -> Work:
    found = operator_work(name, inputs(*given, strides=strides))
    assert found is not None, name
    return found


def test_matrix_products_count_two_flop_per_multiply_add_and_each_operand_once() -> None:
    mm = work("aten::mm", ((8, 16), BF16), ((16, 32), BF16))
    assert (mm.flop, mm.bytes, mm.precision) == (2 * 8 * 16 * 32, 2 * (8 * 16 + 16 * 32 + 8 * 32), "bf16")
    addmm = work("aten::addmm", ((32,), BF16), ((8, 16), BF16), ((16, 32), BF16), "1", "1")
    assert (addmm.flop, addmm.bytes) == (mm.flop, (mm.bytes or 0) + 2 * 32)
    bmm = work("aten::bmm", ((4, 8, 16), HALF), ((4, 16, 32), HALF))
    assert (bmm.flop, bmm.bytes) == (4 * (mm.flop or 0), 4 * (mm.bytes or 0))
    linear = work("aten::linear", ((2, 4, 16), BF16), ((32, 16), BF16), ((32,), BF16))
    assert (linear.flop, linear.bytes) == (mm.flop, addmm.bytes)


def test_quantised_products_run_at_the_precision_of_their_arithmetic() -> None:
    fp8 = work("aten::_scaled_mm", ((8, 16), "c10::Float8_e4m3fn"), ((16, 32), "c10::Float8_e4m3fn"), ((), FLOAT))
    assert (fp8.flop, fp8.bytes, fp8.precision) == (2 * 8 * 16 * 32, 8 * 16 + 16 * 32 + 2 * 8 * 32, "fp8")
    int8 = work("aten::_int_mm", ((8, 16), "signed char"), ((16, 32), "signed char"))
    assert (int8.precision, int8.bytes) == ("int8", 8 * 16 + 16 * 32 + 4 * 8 * 32)
    # 4-bit weights in ints: [K/8, N·…] says nothing of N, the scales [K/group, N] do; the arithmetic is FP16.
    awq = work("_C::awq_gemm", ((8, 128), HALF), ((128, 8), INT), ((1, 64), HALF), ((1, 8), INT), "8")
    assert (awq.flop, awq.precision) == (2 * 8 * 128 * 64, "fp16")
    assert awq.bytes == 2 * 8 * 128 + 4 * 128 * 8 + 2 * 64 + 2 * 8 * 64


def test_shapes_that_do_not_fit_give_no_work() -> None:
    misfits: dict[str, list[Any]] = {
        "aten::mm": [((8, 16), BF16), ((15, 32), BF16)],
        "aten::bmm": [((3, 8, 16), BF16), ((4, 16, 32), BF16)],
        "aten::linear": [((8, 16), BF16), ((32, 15), BF16)],
        "aten::add": [((8, 3), BF16), ((8, 2), BF16)],
        "aten::convolution": [((1, 3, 8, 8), BF16), ((4, 3, 3, 3), BF16)],
    }
    for name, given in misfits.items():
        assert operator_work(name, inputs(*given)) is None, name


def test_a_type_of_unknown_size_leaves_the_bytes_unknown() -> None:
    odd = work("aten::mm", ((8, 16), "c10::Novel"), ((16, 32), "c10::Novel"))
    assert (odd.flop, odd.bytes, odd.precision) == (2 * 8 * 16 * 32, None, None)


def test_convolutions_forward_grouped_strided_and_transposed() -> None:
    x, w = ((2, 8, 10, 10), FLOAT), ((16, 8, 3, 3), FLOAT)
    settings = ("[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")
    dense = work("aten::convolution", x, w, "", *settings)
    out = 2 * 16 * 10 * 10
    assert dense.flop == 2 * out * 8 * 9
    assert dense.bytes == 4 * (2 * 8 * 100 + 16 * 8 * 9 + out)
    strided = work("aten::convolution", x, w, "", "[2, 2]", *settings[1:])
    assert strided.flop == dense.flop / 4
    grouped = work("aten::convolution", x, ((16, 2, 3, 3), FLOAT), "", *settings[:5], "4")
    assert grouped.flop == dense.flop / 4
    turned = work(
        "aten::convolution", x, ((8, 16, 2, 2), FLOAT), "", "[2, 2]", "[0, 0]", "[1, 1]", "True", "[0, 0]", "1"
    )
    assert turned.flop == 2 * (2 * 8 * 100) * 16 * 4
    back = work("aten::convolution_backward", ((2, 16, 10, 10), FLOAT), x, w, "[0]", *settings, "[True, True, False]")
    assert back.flop == 2 * dense.flop


def test_attention_halves_a_causal_mask_and_knows_both_orders_of_dimensions() -> None:
    heads_first = [((2, 4, 100, 64), BF16)] * 3
    full = work("aten::scaled_dot_product_attention", *heads_first, "", "0.0", "False")
    assert full.flop == 4 * 2 * 4 * 100 * 100 * 64
    assert full.bytes == 2 * 4 * (2 * 4 * 100 * 64)
    causal = work("aten::scaled_dot_product_attention", *heads_first, "", "0.0", "True")
    assert causal.flop == pytest.approx(full.flop * 0.5 * (1 + 1 / 100)) and not causal.flop_is_bound
    rows_first = [((2, 100, 4, 64), BF16)] * 3
    scalars = ("", "", "100", "100", "0.", "True", "False")
    assert work("aten::_flash_attention_forward", *rows_first, *scalars).flop == causal.flop
    # Queries of the last 10 positions of a sequence of 100.
    cached = work(
        "aten::_scaled_dot_product_flash_attention",
        ((1, 1, 10, 64), BF16),
        *[((1, 1, 100, 64), BF16)] * 2,
        "0.",
        "True",
    )
    assert cached.flop == 4 * 64 * (10 * 100 - 45)


def test_grouped_queries_count_query_heads_for_flop_and_key_heads_for_bytes() -> None:
    given = [((1, 32, 1, 128), BF16), ((1, 8, 4096, 128), BF16), ((1, 8, 4096, 128), BF16)]
    decode = work("aten::scaled_dot_product_attention", *given, "", "0.0", "False")
    assert decode.flop == 4 * 32 * 4096 * 128
    assert decode.bytes == 2 * (2 * 32 * 128 + 2 * 8 * 4096 * 128)


def test_attention_whose_lengths_are_not_in_the_trace_is_said_not_assumed() -> None:
    ragged = work("aten::_flash_attention_forward", *[((500, 4, 64), BF16)] * 3, ((9,), INT), ((9,), INT), "64", "64")
    assert ragged.flop is None and ragged.reason is not None and "lengths" in ragged.reason
    assert ragged.bytes == 4 * 2 * 500 * 4 * 64
    paged = work("vllm::unified_attention_with_output", *[((500, 4, 64), BF16)] * 4)
    assert (paged.flop, paged.bytes, paged.reason) == (None, None, PAGED)


def test_a_mask_or_unrecorded_scalars_make_attention_an_upper_bound() -> None:
    qkv = [((1, 4, 100, 64), BF16)] * 3
    assert work("aten::scaled_dot_product_attention", *qkv, ((1, 1, 100, 100), BF16), "0.0", "False").flop_is_bound
    assert work("aten::scaled_dot_product_attention", *qkv).flop_is_bound


def test_step_ranges_of_serving_engines_give_the_work_of_paged_attention() -> None:
    decode = step_sums("execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)")
    assert decode == StepSums(32, 55086, 32, 55086) and decode.pairs == 55086
    mixed = step_sums(
        "execute_8192_context_9(sq8155sk8430sqsq7475785sqsk7671310)_generation_37(sq37sk34489sqsq37sqsk34489)"
    )
    assert mixed == StepSums(8192, 42919, 7475822, 7705799)
    sglang = step_sums(
        "step[EXTEND bs=2 toks=30 c_sq=30 c_sk=30 c_sqsq=500 c_sqsk=500 g_sq=2 g_sk=40 g_sqsq=2 g_sqsk=40]"
    )
    assert sglang == StepSums(32, 70, 502, 540)
    # One prompt of 10 tokens: 55 pairs under a causal mask.
    assert StepSums(10, 10, 100, 100).pairs == 55
    for text in (
        "execute_context_1(888_788544)_generation_0(0)",
        "step[DECODE bs=32]",
        "execute_new_1_cached_2",
        "decode",
    ):
        assert step_sums(text) is None, text


def test_experts_count_the_tokens_that_pass_them_and_leave_the_weights_unknown() -> None:
    given = [((10, 64), BF16), ((8, 256, 64), BF16), ((8, 64, 128), BF16), ((10, 2), FLOAT), ((10, 2), INT)]
    moe = work("vllm::outplace_fused_experts", *given)
    assert moe.flop == 2 * 10 * 2 * 3 * 64 * 128 and moe.bytes is None
    grouped = work("aten::_grouped_mm", ((10, 64), BF16), ((8, 64, 256), BF16), ((8,), INT))
    assert grouped.flop == 2 * 10 * 64 * 256 and grouped.bytes is None


@pytest.mark.parametrize(
    ("name", "given", "moved"),
    [
        ("aten::add", [((4, 1, 8), BF16), ((4, 6, 8), BF16), "1"], 2 * (32 + 192 + 192)),
        ("aten::mul", [((4, 8), BF16), ((), "double")], 2 * (32 + 32)),
        ("aten::add_", [((4, 8), FLOAT), ((4, 8), BF16), "1"], 4 * 32 + 2 * 32 + 4 * 32),
        ("aten::gt", [((4, 8), FLOAT), "0"], 4 * 32 + 32),
        ("aten::silu", [((4, 8), BF16)], 2 * 64),
        ("aten::copy_", [((4, 8), FLOAT), ((4, 8), BF16), "False"], 32 * 4 + 32 * 2),
        ("aten::fill_", [((4, 8), FLOAT), "0"], 32 * 4),
        ("aten::mean", [((4, 8), FLOAT), "[-1]"], 32 * 4),
        ("aten::_softmax", [((4, 8), BF16), "-1", "True"], 32 * 2 + 32 * 4),
        ("aten::native_layer_norm", [((4, 8), BF16), "[8]", ((8,), BF16), ((8,), BF16), "1e-5"], 4 * 32 + 2 * 16),
        ("_C::rms_norm", [((4, 8), BF16), ((4, 8), BF16), ((8,), BF16), "1e-5"], 4 * 32 + 16),
        ("_C::fused_add_rms_norm", [((4, 8), BF16), ((4, 8), BF16), ((8,), BF16), "1e-5"], 8 * 32 + 16),
        ("_C::silu_and_mul", [((4, 8), BF16), ((4, 16), BF16)], 3 * 2 * 32),
        ("aten::embedding", [((50_000, 8), BF16), ((4,), LONG)], 2 * 2 * 4 * 8 + 4 * 8),
        ("aten::index_select", [((50_000, 8), BF16), "0", ((4,), LONG)], 2 * 2 * 4 * 8 + 4 * 8),
        (
            "_C_cache_ops::reshape_and_cache_flash",
            [((4, 2, 8), BF16), ((4, 2, 8), BF16), ((9000, 16, 2, 8), "unsigned char")],
            2 * 64 * 2 + 2 * 64,
        ),
        (
            "_C::rotary_embedding",
            [((4,), LONG), ((4, 32), BF16), ((4, 8), BF16), "8", ((9000, 8), BF16), "True"],
            4 * 8 + 2 * 2 * (4 * 32 + 4 * 8) + 4 * 8 * 2,
        ),
        # A compiled look-up visits 32 elements of a table of many more.
        ("triton_poi_fused_embedding_0", [((4,), LONG), ((50_000, 8), BF16), ((4, 8), BF16), "32"], 32 + 2 * 64),
        ("triton_red_fused_mean_1", [((4, 8), BF16), ((4,), FLOAT), "4", "8"], 64 + 16),
    ],
)
def test_bytes_of_what_moves_memory(name: str, given: list[Any], moved: float) -> None:
    assert work(name, *given).bytes == moved


def test_an_expanded_tensor_is_read_once() -> None:
    strides = ((512, 64, 0, 1), (512, 64, 8, 1))
    assert work("aten::copy_", ((1, 8, 8, 8), BF16), ((1, 8, 8, 8), BF16), strides=strides[::-1]).bytes == 1024 + 128


def test_what_is_not_recorded_is_unknown_with_a_reason() -> None:
    listed = operator_work("aten::cat", OperatorInputs((((2, 3), (2, 3)), ()), ("TensorList", "Scalar"), ("", "1")))
    assert listed is not None and listed.bytes is None and listed.reason
    gathered = work("aten::index", ((8, 4), BF16), "")
    assert gathered.bytes is None and gathered.reason
    for view in ("aten::view", "aten::transpose", "aten::expand", "aten::t", "aten::as_strided", "aten::matmul"):
        assert view not in FORMULAS
