"""GPM: the hardware counters that NVML itself gives on Hopper and newer, beside CUDA work and without a profiler.

A figure is the mean between two samples, which must be more than 100 ms apart; the newer sample of a tick is the older
one of the next. No GPM figure says how many issue slots were used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from infprof.probes.gpu_signals import Asker, GpuLost
from infprof.probes.recorder import Recorder

# NVML asks for more than 100 ms between samples; a beat that comes early is left out.
MIN_DISTANCE_NS = 105_000_000
_MIB = 2**20


class Metric(NamedTuple):
    """A GPM metric: NVML's id, the signal, and the factor from NVML's unit (%, MiB/s) to the signal's."""

    id: int
    signal: str
    factor: float


METRICS = (
    Metric(1, "gpm_graphics_active_ratio", 0.01),
    Metric(2, "gpm_sm_active_ratio", 0.01),
    Metric(3, "gpm_sm_occupancy_ratio", 0.01),
    Metric(4, "gpm_integer_active_ratio", 0.01),
    Metric(5, "gpm_tensor_active_ratio", 0.01),
    Metric(7, "gpm_hmma_active_ratio", 0.01),
    Metric(9, "gpm_imma_active_ratio", 0.01),
    Metric(10, "gpm_dram_ratio", 0.01),
    Metric(11, "gpm_fp64_active_ratio", 0.01),
    Metric(12, "gpm_fp32_active_ratio", 0.01),
    Metric(13, "gpm_fp16_active_ratio", 0.01),
    Metric(20, "pcie_tx_bytes_per_s", _MIB),
    Metric(21, "pcie_rx_bytes_per_s", _MIB),
    # PCIe has TX first, NVLink RX.
    Metric(60, "nvlink_rx_bytes_per_s", _MIB),
    Metric(61, "nvlink_tx_bytes_per_s", _MIB),
)
# Signals that other sources fill too: what GPM says of them is labelled, and a refusal is no last word.
_SHARED = frozenset(m.signal for m in METRICS if not m.signal.startswith("gpm_"))


@dataclass
class _Watched:
    handle: Any
    asker: Asker
    samples: list[Any]
    last_ns: int | None = None

    def key(self, metric: Metric) -> str:
        return f"gpm {metric.signal}" if metric.signal in _SHARED else metric.signal


class Gpm:
    """The GPM counters of several devices. ``supported`` is False where none of them has any."""

    def __init__(self, nvml: Any, devices: Sequence[tuple[Any, Asker]], out: Recorder) -> None:
        self._nvml = nvml
        self._watched = [w for handle, asker in devices if (w := self._watch(handle, asker, out)) is not None]

    @property
    def supported(self) -> bool:
        return bool(self._watched)

    def has_pcie(self, scope: str) -> bool:
        """Whether GPM still gives the PCIe rates of this device."""
        return any(
            w.asker.scope == scope and w.asker.wants("gpm") and w.asker.wants("gpm pcie_tx_bytes_per_s")
            for w in self._watched
        )

    def sample(self, out: Recorder) -> None:
        """Take one sample per device, and record the means since the one before."""
        for watched in self._watched:
            if not watched.asker.wants("gpm"):
                continue
            try:
                self._step(watched, out)
            except GpuLost:
                continue

    def close(self) -> None:
        """Give the samples back."""
        for watched in self._watched:
            for sample in watched.samples:
                try:
                    self._nvml.nvmlGpmSampleFree(sample)
                except self._nvml.NVMLError:
                    continue
        self._watched = []

    def _watch(self, handle: Any, asker: Asker, out: Recorder) -> _Watched | None:
        n = self._nvml
        try:
            support = asker.ask(out, "gpm", lambda: n.nvmlGpmQueryDeviceSupport(handle))
            if support is not None and not support.isSupportedDevice:
                asker.give_up(
                    out, "gpm", "this GPU has no GPM counters: they came with Hopper (compute capability 9.0)"
                )
                return None
            samples = None if support is None else asker.ask(out, "gpm", self._allocate)
        except GpuLost:
            return None
        if samples is None:
            # Whatever kept it from starting, GPM is not asked again, and that is on record.
            asker.give_up(out, "gpm", "GPM could not be started")
            return None
        return _Watched(handle, asker, samples)

    def _allocate(self) -> list[Any]:
        return [self._nvml.nvmlGpmSampleAlloc(), self._nvml.nvmlGpmSampleAlloc()]

    def _step(self, watched: _Watched, out: Recorder) -> None:
        now = out.now_ns()
        if watched.last_ns is not None and now - watched.last_ns < MIN_DISTANCE_NS:
            return
        older, newer = watched.samples
        got = watched.asker.ask(out, "gpm", lambda: self._nvml.nvmlGpmSampleGet(watched.handle, newer))
        if got is None:
            # The pair would span the failure: begin anew.
            watched.last_ns = None
            return
        if watched.last_ns is not None:
            self._record(watched, older, newer, now, out)
        watched.samples, watched.last_ns = [newer, older], now

    def _record(self, watched: _Watched, older: Any, newer: Any, now: int, out: Recorder) -> None:
        wanted = [m for m in METRICS if watched.asker.wants(watched.key(m))]
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics, request.sample1, request.sample2 = len(wanted), older, newer
        for place, metric in enumerate(wanted):
            request.metrics[place].metricId = metric.id
        if not wanted or watched.asker.ask(out, "gpm", lambda: self._nvml.nvmlGpmMetricsGet(request)) is None:
            return
        for metric, answer in zip(wanted, request.metrics, strict=False):
            self._take(watched, metric, answer, now, out)

    def _take(self, watched: _Watched, metric: Metric, answer: Any, now: int, out: Recorder) -> None:
        if answer.nvmlReturn != 0:
            watched.asker.failed_with(out, watched.key(metric), self._nvml.NVMLError(answer.nvmlReturn))
        elif math.isfinite(answer.value):
            labels = {"source": "gpm"} if metric.signal in _SHARED else None
            out.sample(metric.signal, answer.value * metric.factor, watched.asker.scope, labels, now)
