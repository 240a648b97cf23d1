"""Peaks by device name: spellings that drivers use, variants of one name, and slices of a device."""

from __future__ import annotations

import csv
import re
from importlib import resources

import pytest

from conftest import SHARED
from infprof.hardware import by_sku, find, known_skus, lookup, pcie_bytes_per_s

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "sku"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("A100-SXM-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX-4060-Ti"),
        ("NVIDIA GeForce RTX 4060", "RTX-4060"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("Quadro RTX 6000", "Quadro-RTX-6000"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("AMD Instinct MI300X VF", "MI300X"),
    ],
)
def test_driver_spellings_are_known(name: str, sku: str) -> None:
    peaks = lookup(name)
    assert peaks is not None and peaks.sku == sku


def test_rates_are_in_base_units() -> None:
    h100 = lookup("NVIDIA H100 80GB HBM3")
    assert h100 is not None
    assert h100.sm_count == 132
    assert h100.flop_per_s["bf16"] == pytest.approx(989.4e12)
    assert "fp4" not in h100.flop_per_s
    assert h100.dram_bytes_per_s == pytest.approx(3.352e12)
    assert h100.nvlink_bytes_per_s == pytest.approx(450e9)
    assert h100.pcie_bytes_per_s == pytest.approx(63.0e9, rel=0.01)
    assert h100.ridge_flop_per_byte("bf16") == pytest.approx(295, rel=0.01)
    assert h100.ridge_flop_per_byte("fp4") is None


def test_a_bare_family_name_needs_more_to_be_told_apart() -> None:
    match = find("NVIDIA H100")
    assert match.peaks is None and match.reason is not None
    assert "H100-PCIe" in match.reason and "does not tell which" in match.reason
    by_sms = lookup("NVIDIA H100", sm_count=114)
    assert by_sms is not None and by_sms.sku == "H100-PCIe"
    by_memory = lookup("NVIDIA H100", sm_count=132, memory_bytes=85_018_279_936)
    assert by_memory is not None and by_memory.sku == "H100-SXM-80GB"


def test_memory_tells_engineering_names_apart() -> None:
    small, large = (
        lookup("NVIDIA A100-PG509-200", memory_bytes=42_297_524_224),
        lookup("PG509-210", memory_bytes=85 * 10**9),
    )
    assert small is not None and small.sku == "A100-SXM4-40GB"
    assert large is not None and large.sku == "A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("name", "sm_count", "memory_bytes", "because"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 14, 10 * GIB, "MIG"),
        ("NVIDIA A40-48Q", 84, 48 * GIB, "virtual GPU"),
        ("NVIDIA A100-SXM4-80GB", 42, 39 * GIB, "42 SMs"),
        ("NVIDIA H100", 132, 102_085_492_736, "95.1 GiB"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", 24, 8 * GIB, "not in the table"),
        ("NVIDIA GeForce RTX 3080", 70, 12 * GIB, "70 SMs"),
        ("", None, None, "does not name"),
        (None, None, None, "does not name"),
    ],
)
def test_no_peaks_rather_than_wrong_ones(
    name: str | None, sm_count: int | None, memory_bytes: int | None, because: str
) -> None:
    match = find(name, sm_count=sm_count, memory_bytes=memory_bytes)
    assert match.peaks is None
    assert match.reason is not None and because in match.reason


def test_compute_capability_must_agree() -> None:
    assert lookup("NVIDIA H200", compute_capability="9.0") is not None
    assert lookup("NVIDIA H200", compute_capability="10.0") is None


def test_pcie_peaks_per_direction() -> None:
    assert pcie_bytes_per_s(3, 16) == pytest.approx(15.75e9, rel=0.001)
    assert pcie_bytes_per_s(4, 8) == pytest.approx(pcie_bytes_per_s(3, 16) or 0)
    assert pcie_bytes_per_s(5, 16) == pytest.approx(63.0e9, rel=0.001)
    assert pcie_bytes_per_s(7, 16) is None
    assert pcie_bytes_per_s(4, 0) is None


def test_the_table_is_whole_and_plausible() -> None:
    text = (resources.files("infprof.hardware") / "peaks.tsv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    assert len({row["sku"] for row in rows}) == len(rows) >= 40
    for row in rows:
        assert None not in row.values(), row["sku"]
        assert re.compile(row["names"]) and row["source"] and row["confidence"] in {"low", "medium", "high"}
        rates = [float(row[column]) for column in ("fp32_tflops", "fp16_tflops", "fp8_tflops") if row[column]]
        assert rates == sorted(rates), f"{row['sku']}: a narrower type must not be slower"
        assert 100 <= float(row["dram_gb_per_s"]) <= 10_000


REFERENCE = SHARED / "reference" / "gpu-peaks.tsv"


def reference_rows() -> list[dict[str, str]]:
    if not REFERENCE.is_file():
        return []
    with REFERENCE.open(encoding="utf-8") as table:
        return list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.mark.parametrize("row", reference_rows(), ids=lambda row: row["sku"])
def test_every_gpu_of_the_reference_is_here_with_its_dense_peaks(row: dict[str, str]) -> None:
    peaks = by_sku(row["sku"])
    assert peaks is not None
    # One of the two devices that a MI250X appears as has half of everything.
    share = 0.5 if row["sku"] == "MI250X" else 1.0
    for precision in ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"):
        given = share * float(row[precision]) * 1e12 if row[precision] else None
        assert peaks.flop_per_s.get(precision) == (None if given is None else pytest.approx(given, rel=0.001)), (
            precision
        )
    assert peaks.dram_bytes_per_s == pytest.approx(share * float(row["mem_gbs"]) * 1e9, rel=0.001)
    assert (peaks.memory_bytes or 0) / 2**30 == pytest.approx(share * float(row["mem_gb"]))
    # The reference counts both directions of a link.
    both_ways = share * float(row["link_gbs"]) * 1e9 if row["link_gbs"] else None
    found = None if peaks.nvlink_bytes_per_s is None else 2 * peaks.nvlink_bytes_per_s
    assert found == (None if both_ways is None else pytest.approx(both_ways, rel=0.001))
    assert (peaks.pcie_gen, peaks.pcie_width) == tuple(
        int(row[k]) if row[k] else None for k in ("pcie_gen", "pcie_width")
    )
    assert peaks.sm_count == (int(share * int(row["sms"])) if row["sms"] else None)


def test_a_device_without_a_name_is_told_by_its_properties_only_where_these_are_its_own() -> None:
    t4 = find(None, sm_count=40, memory_bytes=15_655_829_504, compute_capability="7.5")
    assert t4.peaks is not None and t4.peaks.sku == "T4"
    # L40, L40S and RTX 6000 Ada have the same size and differ in speed.
    several = find(None, sm_count=142, memory_bytes=47_000_000_000, compute_capability="8.9")
    assert several.peaks is None and several.reason is not None and "L40S" in several.reason
    slice_of_one = find("", sm_count=14, memory_bytes=10 * GIB, compute_capability="8.0")
    assert slice_of_one.peaks is None and "nothing in the table" in str(slice_of_one.reason)
    assert find(None, sm_count=40, memory_bytes=15_655_829_504).peaks is None


def test_rows_are_found_by_their_own_name() -> None:
    assert {peaks.sku for sku in known_skus() if (peaks := by_sku(sku.lower())) is not None} == set(known_skus())
    assert by_sku("no such row") is None
