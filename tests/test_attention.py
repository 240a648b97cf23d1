"""Long contexts, attention in parts, and what fewer bits could win: what is measured, what is advised, and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from case_builders import (
    MS,
    US,
    diagnose,
    evidence,
    finding,
    measure,
    no_ratio_above_one,
    problem_codes,
    remedy_text,
    rules,
)
from infprof.diagnosis import Options, analyze_file
from infprof.hardware.gpu_spec import parse_gpu_spec
from infprof.simulator.builder import TraceBuilder
from infprof.steps.attention import context_of
from kineto_builder import H100, KinetoBuilder

FUSED = "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<(int)128, (int)64>>(Flash_fwd_params)"
CACHE = "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>(const T1 *, const T1 *, T2 *)"
GEMM = "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"
SOFTMAX = "void at::native::softmax_warp_forward<float, float, float, (int)10>(T2 *, const T1 *, int, int, int)"
SCALE = "void at::native::vectorized_elementwise_kernel<(int)4, at::native::MulFunctor<float>>(int, T2, T3)"
CAST = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(T)>(int)"
TOPK = "void at::native::sbtopk::gatherTopK<float, unsigned int, (int)2, (bool)0>(P)"
DRAW = "void at::native::distribution_elementwise_grid_stride_kernel<float, (int)4>(long, P)"


class Stream:
    """Kernels back to back on one stream, launched well ahead; ranges around those of a step."""

    def __init__(self) -> None:
        self.builder = TraceBuilder()
        self.host, self.gpu = 1 * MS, 2 * MS

    def run(self, *kernels: tuple[str, int]) -> Stream:
        for name, length in kernels:
            self.builder.launch(self.host, 3 * US, max(self.gpu, self.host + 10 * US), length, name)
            self.gpu = max(self.gpu, self.host + 10 * US) + length
            self.host += 4 * US
        return self

    def step(self, text: str | None, *kernels: tuple[str, int]) -> Stream:
        start = self.host
        self.run(*kernels)
        if text is not None:
            self.builder.nvtx(start - US, self.host, text)
        # The host waits for the step, as one that needs its tokens does.
        self.builder.api(self.host, self.gpu + 5 * US, "cudaStreamSynchronize")
        self.host = self.gpu + 20 * US
        return self


LAYERS = 4


def decode(attention_ns: int, other_ns: int) -> list[tuple[str, int]]:
    return [(GEMM, other_ns // 2), (CACHE, 2 * US), (FUSED, attention_ns), (GEMM, other_ns // 2)] * LAYERS


def growing_context(steps: int = 40, named: bool = True) -> Stream:
    """From 128 to 4096 tokens in context attention goes from 39 to 558 µs per layer; the rest stays at 1.12 ms."""
    stream = Stream()
    for i in range(steps):
        context = 128 + i * (4096 - 128) // (steps - 1)
        attention = int((39 + (558 - 39) * (context - 128) / (4096 - 128)) * US)
        stream.step(f"decode ctx={context}" if named else f"decode {i}", *decode(attention, 1120 * US))
    return stream


@pytest.mark.parametrize("named", [True, False], ids=["context named", "step numbers only"])
def test_attention_that_grows_with_the_context_is_the_trend_that_is_named(tmp_path: Path, named: bool) -> None:
    """D-36."""
    d = diagnose(growing_context(named=named).builder, tmp_path, window="full")
    found = finding(d, "long-context-attention")
    assert found.severity == "warning"
    assert measure(d, "attention_step_fit_ratio") > 0.99
    assert measure(d, "attention_phase_ratio") == pytest.approx(0.31, abs=0.02)
    assert measure(d, "attention_step_growth_ratio") == pytest.approx(0.8, abs=0.05)
    assert no_ratio_above_one(d)
    assert any("not a leak, throttling or a regression" in note for note in found.notes)
    text = remedy_text(found)
    assert "--kv-cache-dtype fp8" in text and "GQA" in text and "Accuracy" in text
    assert not {"host-memory-growth", "throttled", "slow-gpu"} & set(rules(d))
    if named:
        # 558 - 39 µs over 3968 tokens, in four layers.
        assert measure(d, "attention_context_token_ns") == pytest.approx(LAYERS * 519 * US / 3968, rel=0.01)
        assert measure(d, "attention_context_tokens") == 4096
        # 39 µs at 128 tokens and 130.8 ns a token give 2.165 ms of 3.285 ms at 16 k.
        assert measure(d, "attention_share_further_ratio") == pytest.approx(0.66, abs=0.01)
        assert any("extrapolation" in note for note in found.notes)
    else:
        assert measure(d, "attention_share_further_ratio") is None


def test_a_larger_batch_grows_the_whole_step_and_short_contexts_are_no_finding(tmp_path: Path) -> None:
    stream = Stream()
    for i in range(40):
        stream.step(f"decode {i}", *decode((30 + i) * US, (300 + 10 * i) * US))
    d = diagnose(stream.builder, tmp_path, window="full")
    assert measure(d, "attention_phase_ratio") < 0.15
    assert "long-context-attention" not in rules(d)


def test_the_gain_of_a_smaller_cache_is_not_claimed_where_its_traffic_was_not_counted(tmp_path: Path) -> None:
    d = diagnose(growing_context().builder, tmp_path, window="full")
    gain = finding(d, "long-context-attention").gain
    assert (gain.low, gain.high) == (0.0, None)
    assert "vLLM's authors report" in gain.basis


def test_a_remark_whose_gain_nobody_knows_stands_behind_what_can_be_won(tmp_path: Path) -> None:
    """Attention takes 60 % of the time and the host a fifth: the host's part is what is known to be won."""
    stream = Stream()
    for i in range(40):
        stream.step(f"decode {i}", *decode(560 * US, 200 * US))
        stream.host += 700 * US
    d = diagnose(stream.builder, tmp_path, window="full")
    remark = finding(d, "long-context-attention")
    assert remark.severity == "info" and remark.gain.high is None
    assert d.findings[0].severity == "warning" and d.findings[0].gain.high is not None
    assert (remark.cost.value or 0) > (d.findings[0].cost.value or 0)


def test_few_steps_show_no_trend(tmp_path: Path) -> None:
    d = diagnose(growing_context(steps=8).builder, tmp_path, window="full")
    assert measure(d, "attention_step_growth_ratio") is None
    source = next(m.source for m in d.measures if m.name == "attention_step_growth_ratio")
    assert source == "fewer than 12 decode steps"


@pytest.mark.parametrize(
    ("text", "context"),
    [
        ("decode ctx=512", 512),
        ("step 3 context: 4096", 4096),
        ("seq_len=77 batch=2", 77),
        ("kv_lens 900", 900),
        ("execute_0_context_0(sq0sk0sqsq0sqsk0)_generation_2(sq2sk300sqsq2sqsk300)", 300),
        ("decode 17", 0),
        ("execute_context_1(512)_generation_0(0)", 0),
        ("preseq_len=5", 0),
    ],
)
def test_what_ranges_say_of_the_context(text: str, context: int) -> None:
    assert context_of(text) == context


PARTS = [(GEMM, 900 * US), (SCALE, 400 * US), (SOFTMAX, 1400 * US), (CAST, 400 * US), (GEMM, 900 * US)]


def test_attention_in_parts_is_named_with_what_lies_between_its_products(tmp_path: Path) -> None:
    """D-38."""
    stream = Stream()
    stream.builder.gpu(name=H100_NAME)
    for i in range(6):
        stream.step(f"forward {i}", *[(GEMM, 500 * US), *PARTS, (GEMM, 500 * US)] * 3)
    d = diagnose(stream.builder, tmp_path, window="full")
    found = finding(d, "attention-not-fused")
    assert measure(d, "unfused_attention_count") == 18
    assert measure(d, "unfused_attention_ns") == 18 * 4000 * US
    assert measure(d, "unfused_scores_ns") == 18 * 2200 * US
    assert evidence(found)["unfused_attention_ratio"] == pytest.approx(0.8, abs=0.01)
    # A pass of 1.4 ms reads and writes the scores at 3.35 TB/s at most.
    assert evidence(found)["unfused_score_bound_bytes"] == pytest.approx(1.4e-3 * 3.35e12 / 2, rel=0.01)
    assert measure(d, "unfused_score_bytes") is None
    assert found.severity == "warning" and "square" in found.why
    text = remedy_text(found)
    assert "scaled_dot_product_attention" in text and "compute capability 8.0" in text and "EFFICIENT_ATTENTION" in text
    assert found.gain.high == pytest.approx(0.8 * (0.5 + 0.5 * 0.55), abs=0.02)
    assert {where.name for where in found.where} <= {name for name, _ in PARTS}


@pytest.mark.parametrize("length", [8192, 4096])
def test_the_size_of_the_scores_is_named_where_shapes_were_recorded(tmp_path: Path, length: int) -> None:
    """D-38: it grows with the square of the length."""
    builder = KinetoBuilder(devices=[{**H100, "name": H100_NAME}])
    at, unit = 0.0, (length / 8192) ** 2
    scores = {"Input Dims": [[1, 32, length, length], [], []], "Input type": ["c10::Half", "Scalar", "Scalar"]}
    for _ in range(12):
        for op, kernel, time_us, args in (
            ("aten::bmm", GEMM, 900, {}),
            ("aten::mul", SCALE, 400, {}),
            ("aten::_softmax", SOFTMAX, 1400, scores),
            ("aten::to", CAST, 400, {}),
            ("aten::bmm", GEMM, 900, {}),
        ):
            builder.add("cpu_op", op, at, 6, **args, **{"External id": builder.correlation + 1})
            builder.launch(at + 1, 3, at + 9, time_us * unit, name=kernel)
            at += time_us * unit
    d = analyze_file(builder.write(tmp_path / "t.json"), Options(window="full"))
    found = finding(d, "attention-not-fused")
    assert evidence(found)["unfused_score_bytes"] == 2 * 32 * length**2
    assert measure(d, "unfused_score_bound_bytes") is None
    assert measure(d, "unfused_attention_ns") == pytest.approx(12 * 4 * MS * unit, rel=1e-6)


@pytest.mark.parametrize(
    "kernels",
    [
        [(GEMM, 500 * US), (SOFTMAX, 100 * US), (TOPK, 50 * US), (GEMM, 500 * US)],
        [(GEMM, 500 * US), (SOFTMAX, 100 * US), (DRAW, 50 * US), (TOPK, 20 * US), (GEMM, 500 * US)],
        [(GEMM, 500 * US), (SCALE, 10 * US), (SOFTMAX, 100 * US), *[(SCALE, 10 * US)] * 8, (GEMM, 500 * US)],
        [(GEMM, 500 * US), (FUSED, 100 * US), (GEMM, 500 * US)],
    ],
    ids=["router", "sampler", "far apart", "fused"],
)
def test_other_softmaxes_are_no_attention(tmp_path: Path, kernels: list[tuple[str, int]]) -> None:
    stream = Stream()
    for i in range(20):
        stream.step(f"forward {i}", *kernels)
    d = diagnose(stream.builder, tmp_path, window="full")
    assert measure(d, "unfused_attention_count") == 0
    assert "attention-not-fused" not in rules(d)


def test_kernels_of_other_streams_do_not_complete_a_chain(tmp_path: Path) -> None:
    stream = Stream()
    for _ in range(20):
        at = stream.gpu
        for offset, (name, number) in enumerate(((GEMM, 7), (SOFTMAX, 8), (GEMM, 7))):
            stream.builder.launch(stream.host, 3 * US, at + offset * 100 * US, 90 * US, name, stream=number)
            stream.host += 4 * US
        stream.gpu = at + 400 * US
    d = diagnose(stream.builder, tmp_path, window="full")
    assert measure(d, "unfused_attention_count") == 0


def products(path: Path, kernel: str, kind: str, shape: list[list[int]], time_us: float, device: str) -> Path:
    builder = KinetoBuilder(devices=[{**H100, "name": device}])
    for i in range(200):
        at = time_us * i
        builder.add(
            "cpu_op", "aten::mm", at, 6, **{"Input Dims": shape, "Input type": [kind] * 2, "External id": i + 1}
        )
        builder.launch(at + 1, 3, at + 9, time_us, name=kernel)
    return builder.write(path)


SQUARE, ROW = [[4096, 4096], [4096, 4096]], [[8, 8192], [8192, 8192]]
BF16_KERNEL, FP32_KERNEL = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "ampere_sgemm_128x64_tn"
H100_NAME = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("shape", "time_us", "won"),
    [(SQUARE, 163.0, 0.5), (ROW, 48.0, 0.5), (SQUARE, 800.0, 0.0)],
    ids=["arithmetic limits", "memory limits", "neither does"],
)
def test_fp8_wins_what_the_limiting_roof_gives_way(
    tmp_path: Path, shape: list[list[int]], time_us: float, won: float
) -> None:
    path = products(tmp_path / "t.json", BF16_KERNEL, "c10::BFloat16", shape, time_us, H100_NAME)
    d = analyze_file(path, Options(window="full"))
    assert measure(d, "fp8_gain_ns") / measure(d, "gemm_16bit_ns") == pytest.approx(won, abs=0.01)
    advised = [f for f in d.findings if f.rule == "fp8-products"]
    assert bool(advised) is (won > 0)
    for f in advised:
        assert f.severity == "info" and f.cost.value is None and "Accuracy" in remedy_text(f)


def test_a_gpu_without_fp8_is_not_told_to_use_it(tmp_path: Path) -> None:
    path = products(tmp_path / "t.json", BF16_KERNEL, "c10::BFloat16", SQUARE, 520.0, "NVIDIA A100-SXM4-80GB")
    a100: dict[str, Any] = {"gpu_spec": parse_gpu_spec("like=A100-SXM4-80GB")}
    d = analyze_file(path, Options(window="full", **a100))
    assert measure(d, "mfu_ratio") > 0.8
    assert measure(d, "fp8_gain_ratio") is None and "fp8-products" not in rules(d)


@pytest.mark.parametrize(
    ("shape", "time_us", "tf32", "half"),
    # 66.9 TFLOP/s in FP32, 494.7 in TF32, 989.4 in 16 bits; the row's product moves 268 MB in 80 µs, half of it in 16 bits.
    [(SQUARE, 2200.0, 1 - 66.9 / 494.7, 1 - 66.9 / 989.4), (ROW, 90.0, 0.0, 0.5)],
    ids=["arithmetic limits", "memory limits"],
)
def test_fp32_gains_by_the_roof_and_not_by_the_ratio_of_rates(
    tmp_path: Path, shape: list[list[int]], time_us: float, tf32: float, half: float
) -> None:
    path = products(tmp_path / "t.json", FP32_KERNEL, "float", shape, time_us, H100_NAME)
    d = analyze_file(path, Options(window="full"))
    spent = measure(d, "fp32_counted_ns")
    assert measure(d, "fp32_to_tf32_gain_ns") / spent == pytest.approx(tf32, abs=0.01)
    assert measure(d, "fp32_to_16bit_gain_ns") / spent == pytest.approx(half, abs=0.01)
    gain = finding(d, "fp32-gemm").gain
    assert gain.low is not None and gain.high is not None
    assert gain.low == pytest.approx(tf32, abs=0.02) and gain.high == pytest.approx(half, abs=0.02)


def test_without_shapes_no_gain_of_precision_is_promised(tmp_path: Path) -> None:
    stream = Stream().run(*[(FP32_KERNEL, 500 * US)] * 60)
    d = diagnose(stream.builder, tmp_path, window="full")
    gain = finding(d, "fp32-gemm").gain
    assert (gain.low, gain.high) == (None, None) and "unknown where no shapes were recorded" in gain.basis
    assert "practitioners report" in gain.basis
    assert "unknown-kernels" not in problem_codes(d)
