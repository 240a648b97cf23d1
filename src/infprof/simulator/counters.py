"""Hardware counter samples of a simulated run, as nsys's GPU metrics would show them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from infprof.simulator.spec import Device, Kernel, Spec

if TYPE_CHECKING:
    from infprof.simulator.engine import GpuOp

METRICS = {
    "gr_active": "GR Active [Throughput %]",
    "sm_active": "SMs Active [Throughput %]",
    "sm_issue": "SM Issue [Throughput %]",
    "tensor": "Tensor Active [Throughput %]",
    "dram_read": "DRAM Read Bandwidth [Throughput %]",
    "dram_write": "DRAM Write Bandwidth [Throughput %]",
    "pcie_rx": "PCIe RX Throughput [Throughput %]",
    "pcie_tx": "PCIe TX Throughput [Throughput %]",
    "nvlink_rx": "NVLink RX Responses User Data [Throughput %]",
    "nvlink_tx": "NVLink TX Responses User Data [Throughput %]",
}


class Sample(NamedTuple):
    """``value`` in per cent of peak, a whole number, over the period that ends at ``time_ns``."""

    time_ns: int
    device: int
    metric: str
    value: int


def samples(spec: Spec, ops: list[tuple[int, int, int, GpuOp]]) -> list[Sample]:
    """Samples of every device at the spec's rate; ``ops`` are (device, start, end, operation)."""
    assert spec.counter_rate_hz is not None
    if not ops:
        return []
    period = 1_000_000_000 // spec.counter_rate_hz
    first = min(start for _, start, _, _ in ops) // period * period
    last = max(end for _, _, end, _ in ops) // period * period + period
    has_nvlink = any(op.kind == "comm" for *_, op in ops)
    names = [name for name in METRICS if has_nvlink or not name.startswith("nvlink")]
    busy: dict[tuple[int, int, str], float] = defaultdict(float)
    for device, start, end, op in ops:
        for name, percent in levels(op, spec.devices[device], end - start).items():
            for bin_start in range(start // period * period, end, period):
                covered = min(end, bin_start + period) - max(start, bin_start)
                busy[bin_start, device, name] += percent * covered / period
    devices = sorted({device for device, *_ in ops})
    return [
        Sample(at + period, device, METRICS[name], min(100, round(busy.get((at, device, name), 0.0))))
        for at in range(first, last, period)
        for device in devices
        for name in names
    ]


def levels(op: GpuOp, device: Device, ns: int) -> dict[str, float]:
    """Per cent of peak of each counter while ``op`` runs."""
    seconds = max(ns, 1) / 1e9
    if op.kind == "copy":
        # the GPU receives what the host sends
        name = {"h2d": "pcie_rx", "d2h": "pcie_tx"}.get(op.copy_kind)
        link = 100 * op.bytes / seconds / device.pcie_peak
        return {name: link} if name else {"dram_read": 45.0, "dram_write": 45.0}
    if op.kind == "memset":
        return {"dram_write": 80.0}
    if op.kind == "comm":
        link = 100 * op.bytes / seconds / device.nvlink
        return {"gr_active": 100.0, "sm_active": 20.0, "sm_issue": 5.0, "nvlink_rx": link, "nvlink_tx": link}
    return kernel_levels(op.kernel, device, ns)


def kernel_levels(kernel: Kernel | None, device: Device, ns: int) -> dict[str, float]:
    """Per cent of peak of each counter while a kernel runs that takes ``ns``."""
    seconds = max(ns, 1) / 1e9
    levels = {"gr_active": 100.0, "sm_active": 95.0}
    if kernel:
        if kernel.flops:
            levels["tensor"] = 100 * kernel.flops / seconds / device.flops
        if kernel.bytes:
            levels["dram_read"] = 100 * kernel.bytes / seconds / device.bandwidth
        levels |= kernel.counters
    return levels


def mean_levels(kernels: Sequence[tuple[Kernel, int]], device: Device, total_ns: int) -> dict[str, float]:
    """Per cent of peak over a stretch of ``total_ns`` in which each kernel runs for its time, and nothing in between."""
    sums: dict[str, float] = defaultdict(float)
    for kernel, ns in kernels:
        for name, percent in kernel_levels(kernel, device, ns).items():
            sums[name] += percent * ns / max(total_ns, 1)
    return dict(sums)
