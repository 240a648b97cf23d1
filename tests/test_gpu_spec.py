"""Peaks that a user gives: what is taken, over what, and what is refused in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infprof.diagnosis import Options, analyze_file
from infprof.errors import UsageError
from infprof.hardware import Match, find
from infprof.hardware.gpu_spec import KEYS, GpuSpec, parse_gpu_spec
from infprof.results import Diagnosis
from kineto_builder import H100, KinetoBuilder


def test_pairs_and_files_say_the_same(tmp_path: Path) -> None:
    pairs = parse_gpu_spec("name=My GPU*,bf16_tflops=300,dram_gb_per_s=2000,sm_count=100")
    (tmp_path / "gpu.yaml").write_text("name: My GPU*\nbf16_tflops: 300\ndram_gb_per_s: 2000\nsm_count: 100\n")
    (tmp_path / "gpu.json").write_text(
        json.dumps({"name": "My GPU*", "bf16_tflops": 300, "dram_gb_per_s": 2e3, "sm_count": 100})
    )
    for name in ("gpu.yaml", "gpu.json"):
        given = parse_gpu_spec(str(tmp_path / name))
        assert (given.name, given.like, given.values) == (pairs.name, pairs.like, pairs.values)
        assert str(tmp_path) not in given.text


def peaks_of(spec: str, device: str | None) -> Match:
    return parse_gpu_spec(spec).over(find(device))


def test_an_unknown_gpu_gets_what_is_given_and_nothing_else() -> None:
    found = peaks_of("bf16_tflops=300,dram_gb_per_s=2000,nvlink_gb_per_s=100,pcie_gen=5,pcie_width=16", "New GPU")
    assert found.peaks is not None and found.peaks.sku == "--gpu-spec"
    assert found.peaks.flop_per_s == {"bf16": 300e12}
    assert found.peaks.dram_bytes_per_s == 2000e9
    assert found.peaks.nvlink_bytes_per_s == 100e9
    assert found.peaks.pcie_bytes_per_s == pytest.approx(63.0e9, rel=0.01)
    assert found.peaks.cache_bytes is None and found.peaks.memory_bytes is None


def test_a_known_gpu_keeps_what_is_not_given() -> None:
    found = peaks_of("bf16_tflops=900", "NVIDIA H100 80GB HBM3")
    assert found.peaks is not None and found.peaks.sku == "H100-SXM-80GB, changed by --gpu-spec"
    assert found.peaks.flop_per_s["bf16"] == 900e12
    assert found.peaks.flop_per_s["fp8"] == pytest.approx(1978.9e12)
    assert found.peaks.dram_bytes_per_s == pytest.approx(3.352e12)


def test_a_row_of_the_table_may_stand_in() -> None:
    found = peaks_of("like=h100-pcie", "NVIDIA H100")
    assert found.peaks is not None and found.peaks.sku == "H100-PCIe by --gpu-spec"
    assert found.peaks.flop_per_s["bf16"] == pytest.approx(756e12)


@pytest.mark.parametrize("spec", ["bf16_tflops=300", "dram_gb_per_s=2000"])
def test_half_of_the_peaks_of_an_unknown_gpu_are_none(spec: str) -> None:
    found = peaks_of(spec, "New GPU")
    assert found.peaks is None and found.reason is not None
    assert "New GPU is not in the table of device peaks, and --gpu-spec gives no" in found.reason


def test_a_name_limits_it_to_that_device() -> None:
    given = GpuSpec("", name="nvidia l4*", values={"bf16_tflops": 1.0})
    assert given.applies_to("NVIDIA L40S") and not given.applies_to("NVIDIA A10") and not given.applies_to(None)
    assert GpuSpec("").applies_to(None)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("bf16_tflop=300", "there is no key bf16_tflop. Did you mean bf16_tflops?"),
        ("zzz=1", "There are: name, like, fp64_tflops"),
        ("bf16_tflops=989e12", "bf16_tflops is a number above 0 and up to 200000, not 989e12."),
        ("bf16_tflops=fast", "not fast."),
        ("bf16_tflops=0", "not 0."),
        ("bf16_tflops=nan", "not nan."),
        ("pcie_gen=4.5", "pcie_gen is a whole number, not 4.5."),
        ("bf16_tflops=1,bf16_tflops=2", "bf16_tflops is given twice."),
        ("bf16_tflops=1,", "write KEY=VALUE pairs with commas between, not ``."),
        ("like=H100", "the table has no H100. Did you mean H100-SXM-80GB or H100-PCIe or H100-NVL?"),
        ("like=H100-SMX-80GB", "the table has no H100-SMX-80GB. Did you mean H100-SXM-80GB?"),
        ("name=NVIDIA L4", "a name alone gives no peak."),
        ("gpu.yml", "neither KEY=VALUE pairs nor a file that can be read"),
    ],
)
def test_what_cannot_be_meant_is_refused(spec: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_gpu_spec(spec)
    assert says in str(error.value) and str(error.value).startswith("--gpu-spec")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "nothing is given"),
        ("- 1\n", "expected lines of the form"),
        ("a: [", "it is not YAML or JSON"),
        ("bf16_tflops: true\n", "not True"),
        ("name: 5\n", "name is a name, not 5"),
        ("1: 2\n", "there is no key 1"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        parse_gpu_spec(str(path))


def test_the_keys_are_the_columns_of_the_table() -> None:
    from importlib import resources

    head = (resources.files("infprof.hardware") / "peaks.tsv").read_text(encoding="utf-8").splitlines()[0].split("\t")
    assert set(KEYS) - {"name", "like"} <= set(head)


def products_on(device: str, path: Path) -> Path:
    """A trace of matrix products at 85 % of what an H100 can do in BF16, on a device of this name."""
    builder = KinetoBuilder(devices=[{**H100, "name": device}])
    shape = [[4096, 4096], [4096, 4096]]
    types = ["c10::BFloat16", "c10::BFloat16"]
    for i in range(80):
        at = 163.0 * i
        builder.add("cpu_op", "aten::mm", at, 6, **{"Input Dims": shape, "Input type": types, "External id": i + 1})
        builder.launch(at + 1, 3, at + 9, 163, name="nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN")
    return builder.write(path)


PEAKS = "bf16_tflops=989.4,dram_gb_per_s=3352"


def test_given_peaks_turn_peak_unknown_into_a_limiter(tmp_path: Path) -> None:
    path = products_on("NVIDIA Z9", tmp_path / "z9.json")
    unknown = analyze_file(path)
    assert unknown.verdict.cls == "gpu-busy"
    assert unknown.verdict.why_not is not None and "--gpu-spec supplies it" in unknown.verdict.why_not
    assert unknown.provenance.gpus[0]["peaks"].startswith("unknown: NVIDIA Z9 is not in the table")
    given = analyze_file(path, Options(gpu_spec=parse_gpu_spec(PEAKS)))
    assert (given.verdict.cls, given.verdict.rank) == ("compute-bound", "B")
    assert given.provenance.gpus[0]["peaks"] == "--gpu-spec"
    assert given.provenance.capture["gpu_spec"] == "bf16_tflops=989.4 dram_gb_per_s=3352"
    mfu = next(m for m in given.measures if m.name == "mfu_ratio" and m.scope.kind == "window")
    assert mfu.value == pytest.approx(0.85, abs=0.02) and "--gpu-spec" in mfu.source


def test_a_spec_for_another_gpu_is_said_and_changes_nothing(tmp_path: Path) -> None:
    path = products_on("NVIDIA Z9", tmp_path / "z9.json")
    found = analyze_file(path, Options(gpu_spec=parse_gpu_spec(f"name=NVIDIA Y8,{PEAKS}")))
    assert found.verdict.cls == "gpu-busy"
    (problem,) = [p for p in found.problems if p.code == "gpu-spec-unused"]
    assert problem.message == "--gpu-spec is for NVIDIA Y8, and the GPUs here are: NVIDIA Z9."


def infprof(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infprof.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_option_of_each_command(tmp_path: Path) -> None:
    path = products_on("NVIDIA Z9", tmp_path / "z9.json")
    analyzed = infprof("analyze", path, "--json", "--gpu-spec", PEAKS)
    assert json.loads(analyzed.stdout)["verdict"]["class"] == "compute-bound"
    report = tmp_path / "report.json"
    assert infprof("report", path, "--json", report, "--gpu-spec", PEAKS).returncode == 0
    assert Diagnosis.from_dict(json.loads(report.read_text())).verdict.cls == "compute-bound"
    assert infprof("whatif", path, "--set", "kernel:gemm=1", "--gpu-spec", PEAKS).returncode == 0
    wrong = infprof("whatif", path, "--set", "kernel:gemm=1", "--gpu-spec", "dram=1")
    assert (wrong.returncode, wrong.stdout) == (2, "") and "Did you mean dram_gb_per_s?" in wrong.stderr


def test_mistakes_and_finished_diagnoses_end_in_one_sentence(tmp_path: Path) -> None:
    path = products_on("NVIDIA Z9", tmp_path / "z9.json")
    wrong = infprof("analyze", path, "--gpu-spec", "bf16=300")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "infprof: --gpu-spec: there is no key bf16. Did you mean bf16_tflops?\n"
    stored = tmp_path / "stored.json"
    assert infprof("report", path, "--json", stored).returncode == 0
    refused = infprof("analyze", stored, "--gpu-spec", PEAKS)
    assert refused.returncode == 2 and refused.stderr.startswith("infprof: --gpu-spec needs the profile itself")
