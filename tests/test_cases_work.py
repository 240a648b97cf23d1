"""Real cases of counted work: which peak, which unit, and what a name alone must not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from case_builders import everything_said, finding, infprof, measure, rules
from infprof.diagnosis import Options, analyze_file
from infprof.results import Diagnosis
from kineto_builder import H100, KinetoBuilder


def matmuls(folder: Path, device: dict[str, object], n: int, ms: float, kernel: str, count: int = 60) -> Diagnosis:
    """BF16 products of square matrices, back to back, each ``ms`` long."""
    builder = KinetoBuilder(devices=[device])
    dims = {"Input Dims": [[n, n], [n, n]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    for i in range(count):
        at = i * 20.0
        builder.add("cpu_op", "aten::mm", at, 10, **dims)
        builder.launch(at + 1, 3, 100 + i * ms * 1000, ms * 1000, kernel, grid=[132, 1, 1], block=[384, 1, 1])
    return analyze_file(builder.write(folder / "trace.json"), Options(window="full"))


@pytest.mark.parametrize("kernel", ["nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", "never_seen_before"])
def test_arithmetic_proves_tensor_cores_whatever_the_name_says(tmp_path: Path, kernel: str) -> None:
    """D-25. 2 · 32768³ FLOP in 117 ms: nine times what H100's FP32 pipes can do."""
    diagnosis = matmuls(tmp_path, H100, 32_768, 117, kernel, count=20)
    row = next(r for r in diagnosis.work_table if r.kind == "gemm" and r.operator is None)
    assert row.flop_per_s == pytest.approx(601e12, rel=0.01)
    assert measure(diagnosis, "mfu_ratio") == pytest.approx(601 / 989.4, rel=0.01)
    assert not any("fp32" in rule or "tensor-core" in rule for rule in rules(diagnosis))
    assert (diagnosis.verdict.cls, diagnosis.verdict.rank) == ("compute-bound", "B")


def test_the_peak_is_that_of_the_device(tmp_path: Path) -> None:
    """S-03. 250 TFLOP/s are 80 % of an A100, not 25 % of an H100."""
    a100 = {**H100, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108, "computeMajor": 8}
    diagnosis = matmuls(tmp_path, a100, 8192, 2 * 8192**3 / 250e12 * 1e3, "ampere_bf16_gemm")
    assert measure(diagnosis, "mfu_ratio") == pytest.approx(250 / 312, rel=0.01)


def test_an_unknown_device_has_no_share_of_a_peak(tmp_path: Path) -> None:
    """S-03."""
    diagnosis = matmuls(tmp_path, {**H100, "name": "Foo GPU 9000"}, 8192, 4.4, "gemm")
    assert measure(diagnosis, "mfu_ratio") is None
    assert diagnosis.verdict.cls == "gpu-busy"
    assert "Foo GPU 9000" in str(diagnosis.verdict.why_not)


def test_more_than_the_peak_is_no_evidence(tmp_path: Path) -> None:
    """S-03. 1,545 TFLOP/s on a device that can do 989."""
    diagnosis = matmuls(tmp_path, H100, 8192, 2 * 8192**3 / 1545e12 * 1e3, "gemm")
    assert diagnosis.verdict.cls == "gpu-busy"
    assert diagnosis.verdict.rank == "C"
    assert "1.56" in everything_said(diagnosis)
    assert measure(diagnosis, "mfu_ratio") is None


def test_no_remedy_for_matmuls_that_reach_the_roof(tmp_path: Path) -> None:
    diagnosis = matmuls(tmp_path, H100, 8192, 2 * 8192**3 / 700e12 * 1e3, "gemm")
    assert "gemm-far-from-roof" not in rules(diagnosis)
    slow = matmuls(tmp_path, H100, 8192, 2 * 8192**3 / 50e12 * 1e3, "gemm")
    assert finding(slow, "gemm-far-from-roof").rank == "B"


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("execute_context_1(2048)_generation_0(0)", "execute_context_0(0)_generation_16(16)"),
        ("step[EXTEND bs=1 toks=2048]", "step[DECODE bs=16]"),
        (
            "[Executor] _forward_step 7: 1 ctx reqs, 2048 ctx tokens, 0 gen reqs",
            "[Executor] _forward_step: 0 ctx reqs, 16 gen reqs",
        ),
    ],
)
def test_prefill_and_decode_of_one_trace_have_their_own_figures(tmp_path: Path, prefill: str, decode: str) -> None:
    """Large products at 600 TFLOP/s in one phase, thin ones at 2.7 TB/s in the other."""
    builder = KinetoBuilder()
    n, at, gpu = 8192, 0.0, 100.0
    for step in range(40):
        rows, name = (n, prefill) if step % 4 == 0 else (16, decode)
        length = 2 * rows * n * n / 600e12 * 1e6 if rows == n else 2 * n * n / 2.7e12 * 1e6
        builder.add("user_annotation", name, at, 30)
        dims = {"Input Dims": [[rows, n], [n, n]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
        builder.add("cpu_op", "aten::mm", at + 1, 20, **dims)
        builder.launch(at + 2, 3, round(gpu, 3), round(length, 3), "gemm")
        at, gpu = at + 40, gpu + length + 5
    diagnosis = analyze_file(builder.write(tmp_path / "trace.json"), Options(window="full"))
    figures = {(m.scope.id, m.name): m.value for m in diagnosis.measures if m.scope.kind == "phase"}
    assert figures["prefill", "mfu_ratio"] == pytest.approx(600 / 989.4, rel=0.02)
    assert figures["decode", "mbu_ratio"] == pytest.approx(2.7 / 3.35, rel=0.03)
    assert (figures["decode", "mfu_ratio"] or 0) < 0.1
    assert {phase for phase, _ in figures} == {"prefill", "decode"}
    # Neither stands for the whole.
    assert (figures["decode", "mfu_ratio"] or 0) < measure(diagnosis, "mfu_ratio") < figures["prefill", "mfu_ratio"]
    done = infprof("analyze", "--window", "full", tmp_path / "trace.json")
    assert "prefill: MFU 60" in done.stdout
