"""Remedies fit what ran: the engine's own first, no other vendor's tools, nothing that the recording already has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infprof.diagnosis import analyze_file
from infprof.reports import render
from infprof.results import Diagnosis, Remedy
from infprof.stack import Stack, fitting
from kineto_builder import H100, KinetoBuilder, steady

MI300 = {"id": 0, "name": "AMD Instinct MI300X", "numSms": 304, "totalGlobalMem": 206_000_000_000}
CHANGES = [Remedy(name, f"do {name}") for name in ("vllm", "sglang", "tensorrt-llm", "pytorch", "cuda", "rocm")]


def eager(kernels: int = 400, launch_us: float = 4, pause_us: float = 60, **options: Any) -> KinetoBuilder:
    """One launch after the other, and more host code between two than the kernel is long."""
    builder = KinetoBuilder(**options)
    for i in range(kernels):
        at = (launch_us + pause_us) * i
        builder.add("cpu_op", "aten::mm", at - 2, 8, **{"External id": i + 1})
        builder.launch(at, launch_us, at + launch_us + 2, 10)
    return builder


def diagnosed(builder: KinetoBuilder, folder: Path, **top: Any) -> Diagnosis:
    return analyze_file(builder.write(folder / "trace.json", **top))


def stacks(diagnosis: Diagnosis) -> list[str]:
    return list(dict.fromkeys(r.stack for f in diagnosis.findings for r in f.remedies))


@pytest.mark.parametrize(
    "engine, annotation",
    [
        ("vllm", "execute_context_0(0)_generation_32(32)"),
        ("vllm", "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk32785sqsq32sqsk32785)"),
        ("sglang", "step[DECODE bs=32]"),
        ("sglang", "scheduler.run_batch"),
        ("tensorrt-llm", "[Executor] _forward_step 7: 0 ctx reqs, 8 gen reqs"),
    ],
)
def test_an_engine_known_from_its_ranges_gets_its_own_changes_first(
    tmp_path: Path, engine: str, annotation: str
) -> None:
    builder = eager()
    builder.add("user_annotation", annotation, -1, 400 * 64)
    diagnosis = diagnosed(builder, tmp_path)
    assert diagnosis.provenance.capture["engine"] == engine
    assert stacks(diagnosis)[0] == engine
    assert not {"vllm", "sglang", "tensorrt-llm", "rocm"} - {engine} & set(stacks(diagnosis))


def test_an_operator_of_its_own_shows_the_engine_too(tmp_path: Path) -> None:
    builder = eager()
    builder.add("cpu_op", "vllm::unified_attention", 10, 5, **{"External id": 9_000})
    assert diagnosed(builder, tmp_path).provenance.capture["engine"] == "vllm"


def test_kernels_of_an_engine_do_not_show_it(tmp_path: Path) -> None:
    """Engines use each other's kernels."""
    builder = eager()
    builder.launch(30_000, 3, 30_005, 5, "void vllm::rms_norm_kernel<c10::Half>(c10::Half*)")
    diagnosis = diagnosed(builder, tmp_path)
    assert "engine" not in diagnosis.provenance.capture
    assert stacks(diagnosis)[0] == "pytorch"


def test_the_terminal_shows_what_the_user_runs_and_says_where_the_rest_is(tmp_path: Path) -> None:
    text = render("terminal", diagnosed(eager(), tmp_path))
    assert "PyTorch: torch.compile" in text and "vLLM:" not in text and "SGLang:" not in text
    assert "infprof rules show host-work-per-launch" in " ".join(text.split())


def busy(**options: Any) -> KinetoBuilder:
    """One kernel after the other, nearly without a gap."""
    builder = steady(1000, **options)
    for event in builder.events:
        event["dur"] = 19 if event["cat"] == "kernel" else event["dur"]
    return builder


def test_amd_gpus_are_not_sent_to_tools_of_nvidia(tmp_path: Path) -> None:
    diagnosis = diagnosed(busy(devices=[MI300]), tmp_path)
    assert diagnosis.verdict.cls == "gpu-busy"
    said = render("markdown", diagnosis)
    assert "rocprof-compute" in said and "rocprof-compute" in (diagnosis.verdict.why_not or "")
    for tool in ("nsys", "ncu ", "nvidia-smi"):
        assert tool not in said, tool


def test_nvidia_gpus_are(tmp_path: Path) -> None:
    said = render("markdown", diagnosed(busy(devices=[H100]), tmp_path))
    assert "nsys profile" in said and "rocprof" not in said


def test_gpus_without_a_name_are_amds_where_the_trace_names_their_runtime(tmp_path: Path) -> None:
    builder = busy(devices=[{"id": 0, "name": ""}])
    diagnosis = diagnosed(builder, tmp_path, hip_runtime_version=60_342_133)
    assert "rocprof-compute" in (diagnosis.verdict.why_not or "")
    assert [r.stack for r in diagnosis.verdict.remedies if "nsys" in r.change] == []


def test_shapes_that_were_recorded_are_not_asked_for() -> None:
    asked = [Remedy("pytorch", "Record with record_shapes=True."), Remedy("pytorch", "Something else.")]
    known = Stack(amd=False, engine=None, torch=True, shapes=True)
    assert [r.change for r in fitting(asked, known)] == ["Something else."]
    assert len(fitting(asked, known._replace(shapes=False))) == 2


@pytest.mark.parametrize(
    "stack, order",
    [
        (Stack(False, None, False, False), ["vllm", "sglang", "tensorrt-llm", "pytorch", "cuda"]),
        (Stack(False, None, True, False), ["pytorch", "cuda", "vllm", "sglang", "tensorrt-llm"]),
        (Stack(True, None, True, False), ["pytorch", "rocm", "vllm", "sglang", "cuda"]),
        (Stack(False, "sglang", True, False), ["sglang", "pytorch", "cuda"]),
    ],
)
def test_the_order_follows_what_is_known(stack: Stack, order: list[str]) -> None:
    assert [r.stack for r in fitting(CHANGES, stack)] == order


def test_an_unknown_accelerator_is_not_told_to_record_again(shared_traces: Path) -> None:
    diagnosis = analyze_file(shared_traces / "kineto" / "mtia_inference.json.gz")
    assert diagnosis.verdict.code == "unsupported-device"
    assert diagnosis.verdict.remedies == []
    assert "What to change" not in render("terminal", diagnosis)


def test_public_traces_show_their_engines(shared_traces: Path) -> None:
    expected = {
        "b200_vllm_eager_tp8.json.gz": "vllm",
        "mi300_vllm_decode_graph.json.gz": "vllm",
        "mi300x_sglang_decode_slice.json.gz": "sglang",
        "h100_vit_small.json.gz": None,
    }
    for name, engine in expected.items():
        diagnosis = analyze_file(shared_traces / "kineto" / name)
        assert diagnosis.provenance.capture.get("engine") == engine, name
