"""What the GPU probes record, whoever made the GPU. Scopes are ``gpu/UUID``; a MIG slice has a scope of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from infprof.probes import Signal
from infprof.probes.recorder import Recorder

# The bits of ``clock_event_reasons``, with NVML's values; the names are those of ``limited_ns`` and of the measures.
CLOCK_EVENT_REASONS = {
    0x1: "gpu-idle",
    0x2: "clock-setting",
    0x4: "sw-power-cap",
    0x8: "hw-slowdown",
    0x10: "sync-boost",
    0x20: "sw-thermal",
    0x40: "hw-thermal",
    0x80: "hw-power-brake",
    0x100: "display-clock",
    0x200: "board-limit",
    0x400: "reliability",
}

SIGNALS = {
    "utilization_ratio": Signal("ratio", "gauge", "share of the driver's sample period in which a kernel was resident"),
    "memory_utilization_ratio": Signal("ratio", "gauge", "share of that period in which device memory was accessed"),
    "memory_used_bytes": Signal("bytes", "gauge", "device memory in use, by all processes"),
    "sm_clock_mhz": Signal("mhz", "gauge", "clock of the multiprocessors"),
    "memory_clock_mhz": Signal("mhz", "gauge", "clock of the device memory"),
    "clock_event_reasons": Signal("bits", "gauge", "why clocks are not higher, as NVML's bits"),
    "power_watts": Signal("watts", "gauge", "power drawn, as the driver averages it"),
    "temperature_celsius": Signal("celsius", "gauge", "temperature of the GPU"),
    "memory_temperature_celsius": Signal("celsius", "gauge", "temperature of the device memory"),
    "energy_joules": Signal("joules", "counter", "energy drawn since the driver was loaded"),
    "limited_ns": Signal("ns", "counter", "time in which the label's reason held the clocks down"),
    "limited_ratio": Signal(
        "ratio", "gauge", "share of the driver's period in which the label's reason held them down"
    ),
    "pcie_tx_bytes": Signal("bytes", "counter", "bytes sent by the GPU over PCIe"),
    "pcie_rx_bytes": Signal("bytes", "counter", "bytes received by the GPU over PCIe"),
    "pcie_tx_bytes_per_s": Signal("bytes_per_s", "gauge", "PCIe send rate; the label says how it was measured"),
    "pcie_rx_bytes_per_s": Signal("bytes_per_s", "gauge", "PCIe receive rate; the label says how it was measured"),
    "pcie_bytes_per_s": Signal("bytes_per_s", "gauge", "PCIe rate of both directions together"),
    "pcie_link_generation": Signal("count", "gauge", "PCIe generation now: an idle GPU lowers it to save power"),
    "pcie_link_width": Signal("count", "gauge", "PCIe lanes now"),
    "pcie_replay_count": Signal("count", "counter", "PCIe packets that were sent again"),
    "nvlink_tx_bytes": Signal("bytes", "counter", "bytes sent over all NVLink or Infinity Fabric links"),
    "nvlink_rx_bytes": Signal("bytes", "counter", "bytes received over all NVLink or Infinity Fabric links"),
    "nvlink_tx_bytes_per_s": Signal("bytes_per_s", "gauge", "NVLink send rate"),
    "nvlink_rx_bytes_per_s": Signal("bytes_per_s", "gauge", "NVLink receive rate"),
    "ecc_corrected_count": Signal("count", "counter", "memory errors that ECC corrected, since the driver was loaded"),
    "ecc_uncorrected_count": Signal("count", "counter", "memory errors that ECC could not correct"),
    "remapped_rows_corrected_count": Signal("count", "counter", "memory rows replaced after corrected errors"),
    "remapped_rows_uncorrected_count": Signal("count", "counter", "memory rows replaced after uncorrected errors"),
    "remap_pending_flag": Signal("flag", "gauge", "1 while a row waits for the next reset to be replaced"),
    "remap_failed_flag": Signal("flag", "gauge", "1 when replacing a row has failed"),
    "process_memory_bytes": Signal(
        "bytes", "gauge", "device memory of a process of the target, whose pid is the label"
    ),
    "other_process_memory_bytes": Signal("bytes", "gauge", "device memory of processes that are not the target's"),
    "unattributed_process_memory_bytes": Signal(
        "bytes", "gauge", "device memory of processes that cannot be told apart"
    ),
    "gpm_graphics_active_ratio": Signal("ratio", "gauge", "share of time in which compute or graphics work was active"),
    "gpm_sm_active_ratio": Signal("ratio", "gauge", "multiprocessors with at least one warp resident"),
    "gpm_sm_occupancy_ratio": Signal("ratio", "gauge", "warps resident, of the most that fit"),
    "gpm_integer_active_ratio": Signal("ratio", "gauge", "integer pipe active"),
    "gpm_tensor_active_ratio": Signal("ratio", "gauge", "any tensor pipe active"),
    "gpm_hmma_active_ratio": Signal("ratio", "gauge", "tensor pipe active with 8- and 16-bit floats and TF32"),
    "gpm_imma_active_ratio": Signal("ratio", "gauge", "tensor pipe active with integers"),
    "gpm_fp64_active_ratio": Signal("ratio", "gauge", "FP64 pipe active, without tensor cores"),
    "gpm_fp32_active_ratio": Signal("ratio", "gauge", "FP32 pipe active, without tensor cores"),
    "gpm_fp16_active_ratio": Signal("ratio", "gauge", "FP16 pipe active, without tensor cores"),
    "gpm_dram_ratio": Signal("ratio", "gauge", "DRAM bandwidth, of peak"),
}

T = TypeVar("T")


class GpuLost(Exception):
    """The device answers nothing any more."""


class Failure(Exception):
    """A call failed: with the library's code, what it means, and whether asking again can help.

    ``retry`` is "no" (the device does not have it), "later" (nothing new yet), "maybe" (an error that may pass) or
    "lost" (the device is gone).
    """

    def __init__(self, code: int | None, reason: str, retry: str) -> None:
        super().__init__(reason)
        self.code, self.reason, self.retry = code, reason, retry


class Asker:
    """Asks one device for its signals, and remembers what not to ask again.

    What is not supported is recorded once and never asked again; what fails otherwise is given up after
    ``GIVE_UP_AFTER`` failures in a row. ``failure_of`` turns an exception of the library into a Failure (None: it is
    not one of the library's). A lost device gets one event and is not asked again.
    """

    GIVE_UP_AFTER = 3

    def __init__(self, scope: str, failure_of: Callable[[Exception], Failure | None]) -> None:
        self.scope = scope
        self.lost = False
        self._failure_of = failure_of
        self._failures: dict[str, int] = {}
        self._given_up: set[str] = set()
        # Several tasks ask the same device.
        self._lock = threading.Lock()

    def wants(self, *signals: str) -> bool:
        """Whether any of the signals is still worth asking for."""
        return not self.lost and any(signal not in self._given_up for signal in signals)

    def ask(self, out: Recorder, signal: str, call: Callable[[], T]) -> T | None:
        """The call's answer, or None where there is none (now or for good). Raises GpuLost."""
        if not self.wants(signal):
            return None
        try:
            answer = call()
        except Exception as error:
            failure = self._failure_of(error)
            if failure is None:
                raise
            self.failed(out, signal, failure)
            return None
        self._failures.pop(signal, None)
        return answer

    def failed_with(self, out: Recorder, signal: str, error: Exception) -> None:
        """As ``failed``, with the library's exception."""
        failure = self._failure_of(error)
        self.failed(out, signal, failure or Failure(None, str(error), "maybe"))

    def failed(self, out: Recorder, signal: str, failure: Failure) -> None:
        """Take note of a failure. Raises GpuLost where it means that."""
        if failure.retry == "lost":
            self._lose(out, failure)
        elif failure.retry == "no":
            self.give_up(out, signal, failure.reason, failure.code)
        elif failure.retry == "maybe":
            self._failures[signal] = self._failures.get(signal, 0) + 1
            if self._failures[signal] >= self.GIVE_UP_AFTER:
                reason = f"{failure.reason}, {self.GIVE_UP_AFTER} times in a row"
                self.give_up(out, signal, reason, failure.code)

    def give_up(self, out: Recorder, signal: str, reason: str, code: int | None = None) -> None:
        """Record that a signal cannot be had, and ask for it no more."""
        self._given_up.add(signal)
        out.missing(signal, reason, self.scope, code)

    def _lose(self, out: Recorder, failure: Failure) -> None:
        with self._lock:
            first, self.lost = not self.lost, True
        if first:
            out.event("gpu-lost", failure.reason, self.scope, failure.code)
        raise GpuLost(failure.reason)
