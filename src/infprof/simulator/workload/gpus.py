"""The described GPU of a simulated workload: a row of the table of device peaks, or numbers given instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infprof import hardware
from infprof.errors import UsageError
from infprof.simulator.fields import mapping, rate, text_of
from infprof.simulator.spec import Device, parse_device

DEFAULT = "NVIDIA H100 80GB HBM3"
_CHIPS = {
    "volta": "GV100",
    "turing": "TU104",
    "ampere": "GA100",
    "ada": "AD102",
    "hopper": "GH100",
    "blackwell": "GB100",
}
# What large copies reach of a PCIe link, and peers of a link without NVLink.
_PCIE_REACHED, _PEERS_OVER_PCIE = 0.87, 0.7
# The driver keeps some of the memory that the name promises.
_USABLE_MEMORY = 0.985


@dataclass(frozen=True)
class Gpu:
    """A device, what it can do in each type (FLOP/s), and the architecture whose kernels it runs."""

    device: Device
    arch: str
    flops: dict[str, float]


def gpu(name: str, where: str = "--gpu") -> Gpu:
    """The GPU of this name, as the driver spells it, from the table. Raises UsageError for one that is not in it."""
    found = hardware.find(name)
    peaks = found.peaks
    if peaks is None:
        hint = f"Give the name as the driver spells it, such as {DEFAULT}, or its numbers in a description."
        reason = (found.reason or "").removesuffix(", and the trace does not tell which")
        raise UsageError(f"{where}: {reason}. {hint}")
    if peaks.arch not in _CHIPS:
        raise UsageError(f"{where}: {name} is not NVIDIA's, and only their traces are simulated.")
    pcie = peaks.pcie_bytes_per_s
    if pcie is None:
        raise UsageError(f"{where}: {name} has no PCIe link of its own, so copies to it cannot be simulated.")
    d = Device()
    capability = tuple(int(part) for part in (peaks.compute_capability or "9.0").split("."))
    flops = {"float16": peaks.flop_per_s.get("fp16"), "bfloat16": peaks.flop_per_s.get("bf16")}
    flops["float32"] = peaks.flop_per_s.get("fp32")
    known = {dtype: value for dtype, value in flops.items() if value}
    device = Device(
        name=name,
        chip=_CHIPS[peaks.arch],
        compute=(capability[0], capability[1]),
        sm_count=peaks.sm_count or d.sm_count,
        memory_bytes=round((peaks.memory_bytes or d.memory_bytes) * _USABLE_MEMORY),
        clock_hz=(peaks.boost_mhz or 1_500) * 1_000_000,
        flops=known.get("bfloat16") or known["float16"],
        bandwidth=peaks.dram_bytes_per_s,
        pcie=pcie * _PCIE_REACHED,
        pcie_peak=pcie,
        pageable=min(d.pageable, pcie / 3),
        nvlink=peaks.nvlink_bytes_per_s or pcie * _PEERS_OVER_PCIE,
    )
    return Gpu(device, peaks.arch, known)


def parse_gpu(data: Any, where: str) -> Gpu:
    """A name, or the keys of a spec's device, which overrule those of the ``name`` they come with; ``fp32_flops`` beside
    them is the rate of float32 without tensor cores."""
    if isinstance(data, str):
        return gpu(data, where)
    data = dict(mapping(data, where))
    fp32 = {"float32": rate(data.pop("fp32_flops"), f"{where}: fp32_flops")} if "fp32_flops" in data else {}
    name = text_of(data.get("name", DEFAULT), f"{where}: name")
    if hardware.find(name).peaks is not None:
        base = gpu(name, where)
        device = parse_device(data, where, base.device)
        scale = device.flops / base.device.flops
        return Gpu(device, base.arch, {dtype: value * scale for dtype, value in base.flops.items()} | fp32)
    for key in ("flops", "bandwidth"):
        if key not in data:
            raise UsageError(f"{where}: {name} is not in the table of device peaks, so {key} must be given.")
    device = parse_device(data, where)
    return Gpu(device, _arch(device.compute), {"bfloat16": device.flops, "float16": device.flops} | fp32)


def _arch(compute: tuple[int, int]) -> str:
    """The architecture of a compute capability."""
    first, second = compute
    if first == 7:
        return "turing" if second >= 5 else "volta"
    return {8: "ampere", 9: "hopper"}.get(first, "blackwell")
