"""What a GPU can do at most: peak rates by device name, from ``peaks.tsv``.

Peaks are dense (no sparsity) and per device; the file says where each row comes from and how far to trust it.
A name that fits no row, or several that differ, gives no peaks: a wrong peak would turn into a wrong verdict.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

# Precision → its column in peaks.tsv, in units of 1e12 per second.
PRECISION_COLUMNS = {
    "fp64": "fp64_tflops",
    "fp32": "fp32_tflops",
    "tf32": "tf32_tflops",
    "fp16": "fp16_tflops",
    "bf16": "bf16_tflops",
    "fp8": "fp8_tflops",
    "fp4": "fp4_tflops",
    "int8": "int8_tops",
}

# Bytes per second and lane, per direction, after line coding (8b/10b, 128b/130b, and 242 of 256 bytes per flit in
# generation 6) and before protocol overhead: large copies reach about 85-90 % of it.
_PCIE_LANE_BYTES_PER_S = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}

# The memory a device reports, over the size in its name: below 1 because of ECC and reservations, never above.
_MEMORY_FIT = (0.90, 1.005)


@dataclass(frozen=True)
class Peaks:
    """The ceilings of one device. Rates are per second; links count one direction; None = not known or not there."""

    sku: str
    arch: str
    compute_capability: str | None
    sm_count: int | None
    boost_mhz: int | None
    flop_per_s: Mapping[str, float]
    memory_bytes: int | None
    dram_bytes_per_s: float
    # The last cache before DRAM: what fits may have been read from it.
    cache_bytes: int | None
    nvlink_bytes_per_s: float | None
    pcie_gen: int | None
    pcie_width: int | None
    source: str
    confidence: str
    note: str

    @property
    def pcie_bytes_per_s(self) -> float | None:
        """PCIe peak per direction as the device is specified; the link in use may be slower."""
        if self.pcie_gen is None or self.pcie_width is None:
            return None
        return pcie_bytes_per_s(self.pcie_gen, self.pcie_width)

    def ridge_flop_per_byte(self, precision: str) -> float | None:
        """The arithmetic intensity above which ``precision`` is limited by arithmetic instead of DRAM."""
        rate = self.flop_per_s.get(precision)
        return None if rate is None else rate / self.dram_bytes_per_s


class Match(NamedTuple):
    """The peaks of a device, or None and the reason why there are none."""

    peaks: Peaks | None
    reason: str | None


class _Row(NamedTuple):
    names: re.Pattern[str]
    family: str
    peaks: Peaks


def lookup(
    name: str | None,
    *,
    sm_count: int | None = None,
    memory_bytes: int | None = None,
    compute_capability: str | None = None,
) -> Peaks | None:
    """The peaks of the device called ``name`` as the driver spells it, or None; ``find`` says why None."""
    return find(name, sm_count=sm_count, memory_bytes=memory_bytes, compute_capability=compute_capability).peaks


def find(
    name: str | None,
    *,
    sm_count: int | None = None,
    memory_bytes: int | None = None,
    compute_capability: str | None = None,
) -> Match:
    """Like ``lookup``, with the reason when nothing fits.

    ``sm_count``, ``memory_bytes`` and ``compute_capability`` ("9.0") choose between variants of one name, and
    reveal a slice of a device (MIG, virtual GPU) that goes under the name of the whole one.
    """
    if not name or not name.strip():
        return _by_properties(sm_count, memory_bytes, compute_capability)
    normalised = _normalise(name)
    if re.search(r"\bmig\b|\b\d+g\.\d+gb\b", normalised):
        return Match(None, f"{name} is a MIG slice: its peaks depend on the profile and are not in the table")
    if re.search(r"-\d+[qcab]$", name.strip().casefold()):
        return Match(None, f"{name} is a virtual GPU: how much of the device it gets is not in its name")
    named = [row.peaks for row in _rows() if row.names.fullmatch(normalised)]
    named = named or [row.peaks for row in _rows() if row.family and row.family == normalised]
    if not named:
        return Match(None, f"{name} is not in the table of device peaks")
    fitting = [p for p in named if _fits(p, sm_count, memory_bytes, compute_capability)]
    if not fitting:
        seen = _describe(sm_count, memory_bytes, compute_capability)
        return Match(None, f"{name} with {seen} is none of {_list(named)}: a slice of the device or another variant")
    if any(_rates(p) != _rates(fitting[0]) for p in fitting):
        return Match(None, f"{name} may be {_list(fitting)}, which differ, and the trace does not tell which")
    return Match(fitting[0], None)


def by_sku(sku: str) -> Peaks | None:
    """The row of the table called ``sku`` (case does not count), or None."""
    return next((row.peaks for row in _rows() if row.peaks.sku.casefold() == sku.strip().casefold()), None)


def known_skus() -> tuple[str, ...]:
    """The names of the table's rows, in its order."""
    return tuple(row.peaks.sku for row in _rows())


def _by_properties(sm_count: int | None, memory_bytes: int | None, compute_capability: str | None) -> Match:
    """The peaks of a device without a name: only where all its properties are known and fit one kind of device."""
    unnamed = "the trace does not name the device"
    if not (sm_count and memory_bytes and compute_capability):
        return Match(None, unnamed)
    fitting = [
        p
        for p in (row.peaks for row in _rows())
        if p.sm_count
        and p.memory_bytes
        and p.compute_capability
        and _fits(p, sm_count, memory_bytes, compute_capability)
    ]
    seen = _describe(sm_count, memory_bytes, compute_capability)
    if not fitting:
        return Match(None, f"{unnamed}, and nothing in the table has {seen}")
    if any(_rates(p) != _rates(fitting[0]) for p in fitting):
        return Match(None, f"{unnamed}, and with {seen} it may be {_list(fitting)}, which differ")
    return Match(fitting[0], None)


def pcie_bytes_per_s(gen: int, width: int) -> float | None:
    """PCIe peak of a link in bytes per second and direction (generation 1-6, ``width`` lanes); None if unknown."""
    lane = _PCIE_LANE_BYTES_PER_S.get(gen)
    return None if lane is None or width <= 0 else lane * width


def _normalise(name: str) -> str:
    words = re.sub(r"[\s_-]+", " ", name.strip().casefold())
    return words.removeprefix("nvidia ")


def _fits(peaks: Peaks, sm_count: int | None, memory_bytes: int | None, compute_capability: str | None) -> bool:
    if sm_count and peaks.sm_count and sm_count != peaks.sm_count:
        return False
    if memory_bytes and peaks.memory_bytes:
        low, high = _MEMORY_FIT
        if not low <= memory_bytes / peaks.memory_bytes <= high:
            return False
    return not (compute_capability and peaks.compute_capability and compute_capability != peaks.compute_capability)


def _rates(peaks: Peaks) -> tuple[object, ...]:
    links = (peaks.nvlink_bytes_per_s, peaks.pcie_gen, peaks.pcie_width)
    return (peaks.sm_count, dict(peaks.flop_per_s), peaks.dram_bytes_per_s, *links)


def _describe(sm_count: int | None, memory_bytes: int | None, compute_capability: str | None) -> str:
    parts = []
    if sm_count:
        parts.append(f"{sm_count} SMs")
    if memory_bytes:
        parts.append(f"{memory_bytes / 2**30:.1f} GiB")
    if compute_capability:
        parts.append(f"compute capability {compute_capability}")
    return ", ".join(parts)


def _list(peaks: Sequence[Peaks]) -> str:
    return " or ".join(p.sku for p in peaks)


@lru_cache(maxsize=1)
def _rows() -> tuple[_Row, ...]:
    text = (resources.files(__package__) / "peaks.tsv").read_text(encoding="utf-8")
    return tuple(_row(record) for record in csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))


def _row(record: Mapping[str, str]) -> _Row:
    memory_gb = _number(record["memory_gb"])
    cache_mb = _number(record["cache_mb"])
    nvlink = _number(record["nvlink_gb_per_s"])
    rates = {precision: _number(record[column]) for precision, column in PRECISION_COLUMNS.items()}
    peaks = Peaks(
        sku=record["sku"],
        arch=record["arch"],
        compute_capability=record["compute_capability"] or None,
        sm_count=_whole(record["sm_count"]),
        boost_mhz=_whole(record["boost_mhz"]),
        flop_per_s={precision: rate * 1e12 for precision, rate in rates.items() if rate is not None},
        # Sizes in device names are GiB, whatever they say.
        memory_bytes=None if memory_gb is None else int(memory_gb * 2**30),
        dram_bytes_per_s=float(record["dram_gb_per_s"]) * 1e9,
        cache_bytes=None if cache_mb is None else int(cache_mb * 2**20),
        nvlink_bytes_per_s=None if nvlink is None else nvlink * 1e9,
        pcie_gen=_whole(record["pcie_gen"]),
        pcie_width=_whole(record["pcie_width"]),
        source=record["source"],
        confidence=record["confidence"],
        note=record["note"],
    )
    return _Row(re.compile(record["names"]), record["family"], peaks)


def _number(text: str) -> float | None:
    return float(text) if text else None


def _whole(text: str) -> int | None:
    return int(text) if text else None
