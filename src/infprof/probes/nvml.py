"""NVIDIA GPUs through NVML: clocks, power, memory, links, errors, and on Hopper and newer the GPM counters.

Nothing is assumed to be there: each call is asked until it answers "not supported", which is recorded once with NVML's
code. Source of names, units and windows: ``nvml.h`` and the documentation of nvidia-ml-py.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from infprof.probes import ProbeContext, Task, Unavailable
from infprof.probes.gpm import Gpm
from infprof.probes.gpu_processes import ProcessTree
from infprof.probes.gpu_signals import SIGNALS, Asker, Failure, GpuLost
from infprof.probes.recorder import Recorder
from infprof.probes.visible_gpus import Gpu, visible_gpus

FAST_PERIOD_S, SLOW_PERIOD_S, GPM_PERIOD_S, EVENT_WAIT_MS = 0.1, 1.0, 0.25, 1000

# NVML's codes by what to do: never again, again at the next tick, the device is gone. Others may pass.
_NEVER = {
    2: "refused by this driver (invalid argument)",
    3: "not supported on this GPU",
    4: "no permission",
    13: "not known to this driver",
    25: "not known to this driver (structure version)",
    26: "no longer supported by this driver",
}
_LATER = {6: "nothing found", 10: "timed out", 21: "no data", 27: "not ready"}
_LOST = {15: "the GPU is lost (it has fallen off the bus)", 16: "the GPU needs a reset"}
_OTHERWISE = {999: "unknown error"}

# XID numbers that have a plain meaning (NVIDIA, "XID errors").
XIDS = {
    13: "graphics engine exception: an illegal access in a kernel",
    31: "memory page fault: a bug of the program",
    43: "a channel stopped: often the victim of another error",
    45: "a channel was stopped: often the victim of a kill",
    48: "a memory error that ECC could not correct",
    63: "a memory row was marked for replacement",
    64: "replacing a memory row failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many memory errors that ECC corrected",
    94: "a contained memory error: one program ends",
    95: "an uncontained memory error: the GPU needs a reset",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
    121: "error of the link to the CPU",
}
_EVENT_BITS = {
    0x2: ("ecc-uncorrected", "a memory error that ECC could not correct"),
    0x8: ("xid", "XID"),
    0x1000: ("poison", "a poisoned memory access, not fatal"),
    0x2000: ("poison", "a poisoned memory access, fatal"),
    0x4000: ("gpu-unavailable", "the GPU is not available"),
}

_ALL_LINKS = 0xFFFFFFFF
_KIB = 1024


class Field(NamedTuple):
    """A field value: NVML's id and scope, the signal and label it fills, and the factor to the signal's unit."""

    id: int
    scope: int
    signal: str
    reason: str | None = None
    factor: float = 1.0

    @property
    def key(self) -> str:
        """The name under which the asker remembers it."""
        return self.signal if self.reason is None else f"{self.signal}:{self.reason}"


_FIELDS = (
    Field(3, 0, "ecc_corrected_count"),
    Field(4, 0, "ecc_uncorrected_count"),
    Field(74, 0, "limited_ns", "sw-power-cap"),
    Field(75, 0, "limited_ns", "thermal"),
    Field(76, 0, "limited_ns", "sync-boost"),
    Field(77, 0, "limited_ns", "board-limit"),
    Field(269, 0, "limited_ns", "sw-thermal"),
    Field(270, 0, "limited_ns", "hw-thermal"),
    Field(271, 0, "limited_ns", "hw-power-brake"),
    Field(82, 0, "memory_temperature_celsius"),
    Field(83, 0, "energy_joules", factor=1e-3),
    Field(94, 0, "pcie_replay_count"),
    Field(138, _ALL_LINKS, "nvlink_tx_bytes", factor=_KIB),
    Field(139, _ALL_LINKS, "nvlink_rx_bytes", factor=_KIB),
    Field(142, 0, "remapped_rows_corrected_count"),
    Field(143, 0, "remapped_rows_uncorrected_count"),
    Field(144, 0, "remap_pending_flag"),
    Field(145, 0, "remap_failed_flag"),
    Field(197, 0, "pcie_tx_bytes"),
    Field(198, 0, "pcie_rx_bytes"),
)
_PCIE = ("pcie_tx_bytes", "pcie_rx_bytes")
_UINT, _VALUE_NAMES = 1, ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class _Device:
    """One GPU or MIG slice: its handle, its asker, and what the tasks remember from tick to tick."""

    def __init__(self, handle: Any, uuid: str, parent: _Device | None, failure_of: Callable[[Exception], Any]) -> None:
        self.handle, self.uuid, self.parent = handle, uuid, parent
        self.asker = Asker(f"gpu/{uuid}", failure_of)
        self.memory_version: int | None = None
        self.reasons_call = "nvmlDeviceGetCurrentClocksEventReasons"
        self.temperature_call = "nvmlDeviceGetTemperatureV"
        self.last_pcie: dict[str, float] = {}
        self.processes_before: bool | None = None

    @property
    def scope(self) -> str:
        return self.asker.scope


class NvmlProbe:
    """Samples every NVIDIA GPU that the target may use. Needs no root and stops nothing."""

    name = "nvml"
    signals = SIGNALS

    def __init__(self) -> None:
        self._nvml: Any = None
        self._devices: list[_Device] = []
        self._gpm: Gpm | None = None
        self._events: Any = None
        # Of the tasks: held while one is inside a call.
        self._locks: list[threading.Lock] = []
        self._event_asker = Asker("", self._event_failure)
        self._tree: ProcessTree
        self._platform: str | None = None

    def start(self, context: ProbeContext, out: Recorder) -> Sequence[Task]:
        """Open NVML, record what does not change, and give the tasks. Raises Unavailable."""
        import pynvml

        self._nvml = pynvml
        self._platform = _platform(context)
        self._open(context)
        try:
            return self._prepare(context, out)
        except BaseException:
            self._nvml.nvmlShutdown()
            raise

    def _prepare(self, context: ProbeContext, out: Recorder) -> list[Task]:
        self._record_machine(out)
        self._devices = self._choose(context, self._enumerate(out), out)
        self._tree = ProcessTree(context)
        for device in self._devices:
            with suppress(GpuLost):
                self._record_facts(device, out)
        self._gpm = Gpm(self._nvml, [(d.handle, d.asker) for d in self._devices], out)
        self._events = self._listen(out)
        tasks = [
            Task("gpu", FAST_PERIOD_S, self._guarded(self._sample_fast)),
            Task("gpu-slow", SLOW_PERIOD_S, self._guarded(self._sample_slow)),
            Task("gpu-pcie", SLOW_PERIOD_S, self._guarded(self._sample_pcie)),
        ]
        if self._gpm.supported:
            tasks.append(Task("gpu-counters", GPM_PERIOD_S, self._guarded(self._gpm.sample)))
        if self._events is not None:
            tasks.append(Task("gpu-events", EVENT_WAIT_MS / 1000, self._guarded(self._wait_for_events)))
        return tasks

    def stop(self, out: Recorder) -> None:
        """Let NVML go, unless a task is stuck in a call: pulling the library from under it would end the process."""
        if self._nvml is None or not all(lock.acquire(blocking=False) for lock in self._locks):
            return
        if self._gpm is not None:
            self._gpm.close()
        if self._events is not None:
            self._try("nvmlEventSetFree", self._events)
        self._try("nvmlShutdown")
        self._devices = []

    def _guarded(self, run: Callable[[Recorder], None]) -> Callable[[Recorder], None]:
        lock = threading.Lock()
        self._locks.append(lock)

        def guarded(out: Recorder) -> None:
            if lock.acquire(blocking=False):
                try:
                    run(out)
                finally:
                    lock.release()

        return guarded

    # --- opening -----------------------------------------------------------------------------------------------------

    def _open(self, context: ProbeContext) -> None:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise Unavailable(_why_not(error.value, str(error), context)) from None

    def _try(self, call: str, *arguments: Any) -> Any:
        """The call's answer, or None where this driver or GPU has none; for what is asked once and may lack."""
        try:
            return getattr(self._nvml, call)(*arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def _failure(self, error: Exception) -> Failure | None:
        if isinstance(error, AttributeError):
            return Failure(None, "not known to the installed nvidia-ml-py", "no")
        if not isinstance(error, self._nvml.NVMLError):
            return None
        code = int(error.value)
        for texts, retry in ((_NEVER, "no"), (_LATER, "later"), (_LOST, "lost")):
            if code in texts:
                return Failure(code, f"{texts[code]} (NVML {code})", retry)
        where = " under WSL" if self._platform == "wsl" else ""
        return Failure(code, f"{_OTHERWISE.get(code, str(error))}{where} (NVML {code})", "maybe")

    def _failure_in_mig(self, where: str, error: Exception) -> Failure | None:
        """MIG, not the GPU's model, is why some answers are missing."""
        failure = self._failure(error)
        if failure is not None and failure.code == 3:
            return Failure(3, f"not supported {where} (NVML 3)", "no")
        return failure

    # --- what does not change ----------------------------------------------------------------------------------------

    def _record_machine(self, out: Recorder) -> None:
        for fact, call in (
            ("driver_version", "nvmlSystemGetDriverVersion"),
            ("nvml_version", "nvmlSystemGetNVMLVersion"),
        ):
            value = self._try(call)
            if value is not None:
                out.fact(fact, _text(value))
        if self._platform is not None:
            out.fact("gpu_platform", self._platform)

    def _enumerate(self, out: Recorder) -> list[_Device]:
        """All GPUs in NVML's order, each followed by its MIG slices."""
        devices: list[_Device] = []
        try:
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            raise Unavailable(f"NVML cannot count the GPUs: {error}.") from None
        for index in range(count):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            except self._nvml.NVMLError as error:
                out.event("gpu-lost", f"GPU {index} cannot be opened: {error}", value=error.value)
                continue
            devices += self._with_slices(handle, index, out)
        if not devices:
            raise Unavailable("NVML works, but knows no GPU that can be opened here.")
        return devices

    def _with_slices(self, handle: Any, index: int, out: Recorder) -> list[_Device]:
        mode = self._try("nvmlDeviceGetMigMode", handle)
        mig = bool(mode and mode[0])
        uuid = self._try("nvmlDeviceGetUUID", handle)
        failure_of = partial(self._failure_in_mig, "on this GPU in MIG mode") if mig else self._failure
        device = _Device(handle, _text(uuid) if uuid else f"index-{index}", None, failure_of)
        out.fact("gpu_index", index, device.scope)
        out.fact("gpu_mig_mode", mig, device.scope)
        return [device, *(self._slices(device, out) if mig else ())]

    def _slices(self, parent: _Device, out: Recorder) -> Iterator[_Device]:
        for index in range(self._try("nvmlDeviceGetMaxMigDeviceCount", parent.handle) or 0):
            handle = self._try("nvmlDeviceGetMigDeviceHandleByIndex", parent.handle, index)
            uuid = None if handle is None else self._try("nvmlDeviceGetUUID", handle)
            if uuid is not None:
                part = _Device(handle, _text(uuid), parent, partial(self._failure_in_mig, "on a MIG slice"))
                out.fact("gpu_parent", parent.uuid, part.scope)
                yield part

    def _choose(self, context: ProbeContext, devices: list[_Device], out: Recorder) -> list[_Device]:
        gpus = [
            Gpu(d.uuid, _text(self._try("nvmlDeviceGetName", d.handle) or ""), _slices_of(d, devices))
            for d in devices
            if d.parent is None
        ]
        visible = visible_gpus(context.environ, gpus)
        if visible.none:
            raise Unavailable("The target sees no GPU: its CUDA_VISIBLE_DEVICES hides every one.")
        out.fact("gpu_selection", visible.basis)
        for device in devices:
            out.fact("gpu_of_target", visible.target[device.uuid], device.scope)
        return [d for d in devices if visible.target[d.uuid] != "no"]

    def _record_facts(self, device: _Device, out: Recorder) -> None:
        for name, ask in self._fact_calls(device.handle, device.parent is not None):
            value = device.asker.ask(out, name, ask)
            if value is not None:
                out.fact(name, value, device.scope)
            elif device.asker.wants(name):
                device.asker.give_up(out, name, "the driver had no answer at the start")

    def _fact_calls(self, h: Any, is_slice: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
        n = self._nvml
        yield "gpu_name", lambda: _text(n.nvmlDeviceGetName(h))
        yield "gpu_uuid", lambda: _text(n.nvmlDeviceGetUUID(h))
        yield "gpu_memory_total_bytes", lambda: int(n.nvmlDeviceGetMemoryInfo(h).total)
        if is_slice:
            yield "gpu_sm_count", lambda: int(n.nvmlDeviceGetAttributes(h).multiprocessorCount)
            return
        yield "gpu_bus_id", lambda: sysfs_bus_id(_text(n.nvmlDeviceGetPciInfo(h).busId))
        yield "gpu_compute_capability", lambda: ".".join(map(str, n.nvmlDeviceGetCudaComputeCapability(h)))
        yield "gpu_sm_clock_max_mhz", lambda: n.nvmlDeviceGetMaxClockInfo(h, 1)
        yield "gpu_memory_clock_max_mhz", lambda: n.nvmlDeviceGetMaxClockInfo(h, 2)
        yield "gpu_power_limit_watts", lambda: n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000
        yield "gpu_power_limit_default_watts", lambda: n.nvmlDeviceGetPowerManagementDefaultLimit(h) / 1000
        yield "gpu_power_limit_max_watts", lambda: n.nvmlDeviceGetPowerManagementLimitConstraints(h)[1] / 1000
        yield "gpu_slowdown_celsius", lambda: n.nvmlDeviceGetTemperatureThreshold(h, 1)
        yield "gpu_pcie_generation_max", lambda: n.nvmlDeviceGetMaxPcieLinkGeneration(h)
        yield "gpu_pcie_generation_max_of_card", lambda: n.nvmlDeviceGetGpuMaxPcieLinkGeneration(h)
        yield "gpu_pcie_width_max", lambda: n.nvmlDeviceGetMaxPcieLinkWidth(h)

    # --- ten times a second ------------------------------------------------------------------------------------------

    def _sample_fast(self, out: Recorder) -> None:
        for device in self._devices:
            if not device.asker.lost:
                with suppress(GpuLost):
                    self._sample_state(device, out)

    def _sample_state(self, device: _Device, out: Recorder) -> None:
        n, h, asker = self._nvml, device.handle, device.asker
        rates = asker.ask(out, "utilization_ratio", lambda: n.nvmlDeviceGetUtilizationRates(h))
        if rates is not None:
            out.sample("utilization_ratio", rates.gpu / 100, device.scope)
            out.sample("memory_utilization_ratio", rates.memory / 100, device.scope)
        for signal, call in (
            ("memory_used_bytes", lambda: self._memory_used(device)),
            ("sm_clock_mhz", lambda: n.nvmlDeviceGetClockInfo(h, 1)),
            ("memory_clock_mhz", lambda: n.nvmlDeviceGetClockInfo(h, 2)),
            ("clock_event_reasons", lambda: self._reasons(device)),
            ("power_watts", lambda: n.nvmlDeviceGetPowerUsage(h) / 1000),
            ("temperature_celsius", lambda: self._temperature(device)),
        ):
            value = asker.ask(out, signal, call)
            if value is not None:
                out.sample(signal, float(value), device.scope)

    def _memory_used(self, device: _Device) -> int:
        """Without the driver's own reserve, where the driver tells it apart (structure version 2)."""
        n = self._nvml
        if device.memory_version is None:
            try:
                n.nvmlDeviceGetMemoryInfo(device.handle, version=n.nvmlMemory_v2)
                device.memory_version = n.nvmlMemory_v2
            except n.NVMLError as error:
                if error.value not in (13, 25):
                    raise
                device.memory_version = 0
        return int(n.nvmlDeviceGetMemoryInfo(device.handle, version=device.memory_version).used)

    def _reasons(self, device: _Device) -> int:
        try:
            return int(getattr(self._nvml, device.reasons_call)(device.handle))
        except (self._nvml.NVMLError_FunctionNotFound, AttributeError):
            if device.reasons_call.endswith("ThrottleReasons"):
                raise
            device.reasons_call = "nvmlDeviceGetCurrentClocksThrottleReasons"
            return self._reasons(device)

    def _temperature(self, device: _Device) -> int:
        # The newer call alone will stay in NVML; drivers before 570 have the older one alone.
        try:
            return int(getattr(self._nvml, device.temperature_call)(device.handle, 0))
        except (self._nvml.NVMLError, AttributeError) as error:
            if device.temperature_call == "nvmlDeviceGetTemperature" or getattr(error, "value", 13) not in (3, 13, 25):
                raise
            device.temperature_call = "nvmlDeviceGetTemperature"
            return self._temperature(device)

    # --- once a second -----------------------------------------------------------------------------------------------

    def _sample_slow(self, out: Recorder) -> None:
        for device in self._devices:
            if not device.asker.lost:
                with suppress(GpuLost):
                    self._sample_fields(device, out)
                    self._sample_link(device, out)
                    self._sample_processes(device, out)

    def _sample_fields(self, device: _Device, out: Recorder) -> None:
        """All counters in one call: the driver fetches together what it keeps together."""
        fields = [f for f in _FIELDS if device.asker.wants(f.key)]
        if not fields or not device.asker.wants("field_values"):
            return
        pairs = [(f.id, f.scope) for f in fields]
        answers = device.asker.ask(
            out, "field_values", lambda: self._nvml.nvmlDeviceGetFieldValues(device.handle, pairs)
        )
        for field, answer in zip(fields, answers or (), strict=False):
            self._take(device, field, answer, out)

    def _take(self, device: _Device, field: Field, answer: Any, out: Recorder) -> None:
        if answer.nvmlReturn != 0:
            device.asker.failed_with(out, field.key, self._nvml.NVMLError(answer.nvmlReturn))
            return
        value = float(getattr(answer.value, _VALUE_NAMES[answer.valueType])) * field.factor
        if field.signal in _PCIE and not self._counts(device, field.signal, answer.valueType, value, out):
            return
        labels = None if field.reason is None else {"reason": field.reason}
        out.sample(field.signal, value, device.scope, labels)

    def _counts(self, device: _Device, signal: str, value_type: int, value: float, out: Recorder) -> bool:
        """Whether a PCIe byte counter can be used: one of 32 bits wraps more often than it is read."""
        if value_type == _UINT or value < device.last_pcie.get(signal, 0.0):
            device.asker.give_up(out, signal, "the driver's byte counter wraps between two readings")
            return False
        device.last_pcie[signal] = value
        return True

    def _sample_link(self, device: _Device, out: Recorder) -> None:
        if device.parent is not None:
            return
        for signal, call in (
            ("pcie_link_generation", self._nvml.nvmlDeviceGetCurrPcieLinkGeneration),
            ("pcie_link_width", self._nvml.nvmlDeviceGetCurrPcieLinkWidth),
        ):
            value = device.asker.ask(out, signal, partial(call, device.handle))
            if value == 0:
                device.asker.give_up(out, signal, "the driver reports no PCIe link")
            elif value is not None:
                out.sample(signal, value, device.scope)

    def _sample_processes(self, device: _Device, out: Recorder) -> None:
        found = device.asker.ask(
            out, "process_memory_bytes", lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(device.handle)
        )
        if found is None:
            return
        if device.processes_before is None:
            device.processes_before = bool(found)
        memory = {int(p.pid): p.usedGpuMemory for p in found}
        self._tree.record(out, device.scope, memory, alone_since_start=not device.processes_before)

    # --- PCIe throughput where no counter has it ---------------------------------------------------------------------

    def _sample_pcie(self, out: Recorder) -> None:
        """NVML's own measurement: it blocks for 20 ms a direction, hence this thread, and only as the last resort."""
        for device in self._devices:
            if device.parent is None and not device.asker.lost and self._needs_pcie_call(device):
                with suppress(GpuLost):
                    self._measure_pcie(device, out)

    def _needs_pcie_call(self, device: _Device) -> bool:
        by_counter = any(device.asker.wants(signal) for signal in _PCIE) and device.asker.wants("field_values")
        return not by_counter and not (self._gpm is not None and self._gpm.has_pcie(device.scope))

    def _measure_pcie(self, device: _Device, out: Recorder) -> None:
        for signal, direction in (("pcie_tx_bytes_per_s", 0), ("pcie_rx_bytes_per_s", 1)):
            kb_per_s = device.asker.ask(
                out, signal, partial(self._nvml.nvmlDeviceGetPcieThroughput, device.handle, direction)
            )
            if kb_per_s is not None:
                out.sample(signal, kb_per_s * 1000, device.scope, {"source": "20 ms window"})

    # --- errors as they happen ---------------------------------------------------------------------------------------

    def _listen(self, out: Recorder) -> Any:
        """An event set with the errors of every device, or None where none can be had."""
        events = self._try("nvmlEventSetCreate")
        heard = False
        for device in self._devices if events is not None else ():
            bits = (self._try("nvmlDeviceGetSupportedEventTypes", device.handle) or 0) & sum(_EVENT_BITS)
            try:
                if bits and device.parent is None:
                    self._nvml.nvmlDeviceRegisterEvents(device.handle, bits, events)
                    heard = True
                    continue
            except self._nvml.NVMLError as error:
                out.missing("xid", f"no error events: {error} (NVML {error.value})", device.scope, error.value)
                continue
            if device.parent is None:
                out.missing("xid", "this GPU gives no error events", device.scope)
        if events is not None and not heard:
            self._try("nvmlEventSetFree", events)
        return events if heard else None

    def _wait_for_events(self, out: Recorder) -> None:
        """The first wait blocks; what has come meanwhile is taken at once."""
        n, wait_ms = self._nvml, EVENT_WAIT_MS
        while data := self._event_asker.ask(out, "xid", lambda: n.nvmlEventSetWait_v2(self._events, wait_ms)):  # noqa: B023
            wait_ms = 0
            self._note_event(data, out)

    def _event_failure(self, error: Exception) -> Failure | None:
        """The event set is that of all devices: it is not given up because one of them is lost."""
        failure = self._failure(error)
        return (
            failure if failure is None or failure.retry == "later" else Failure(failure.code, failure.reason, "maybe")
        )

    def _note_event(self, data: Any, out: Recorder) -> None:
        address = ctypes.cast(data.device, ctypes.c_void_p).value
        scope = next((d.scope for d in self._devices if ctypes.cast(d.handle, ctypes.c_void_p).value == address), "")
        kind, text = _EVENT_BITS.get(int(data.eventType), ("gpu-event", f"event type {int(data.eventType):#x}"))
        number = int(data.eventData)
        if kind == "xid":
            text = f"XID {number}: {XIDS.get(number, 'see the list of XID errors of NVIDIA')}"
        out.event(kind, text, scope, number if kind == "xid" else None)


def _text(value: str | bytes) -> str:
    # nvidia-ml-py gives text or bytes, by version and decorator.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _slices_of(device: _Device, devices: list[_Device]) -> tuple[str, ...]:
    return tuple(d.uuid for d in devices if d.parent is device)


def sysfs_bus_id(bus_id: str) -> str:
    """A PCI address as sysfs spells it: ``00000000:0F:00.0`` → ``0000:0f:00.0``."""
    domain, _, rest = bus_id.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if rest.count(":") == 1 else bus_id.strip().lower()


def _platform(context: ProbeContext) -> str | None:
    """ "wsl" and "jetson" answer fewer questions than a server's driver."""
    if "microsoft" in _read(context.path("/proc/version")).lower():
        return "wsl"
    model = _read(context.path("/proc/device-tree/model"))
    is_jetson = context.path("/etc/nv_tegra_release").exists() or "jetson" in model.lower()
    return "jetson" if is_jetson else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _why_not(code: int, text: str, context: ProbeContext) -> str:
    """One sentence on why NVML does not start, with the remedy."""
    if code == 18:
        return _mismatch(context)
    if code == 12 and context.path("/proc/driver/nvidia/version").exists():
        return (
            "The NVIDIA driver is loaded, but its library libnvidia-ml.so.1 is not found: in a container, give it the "
            "`utility` capability (NVIDIA_DRIVER_CAPABILITIES=compute,utility)."
        )
    if code in (9, 12, 28):
        return f"No NVIDIA driver on this machine (NVML {code}): there is nothing for this probe to read."
    if code == 4:
        return "NVML may not be used by this user (NVML 4): allow access to /dev/nvidia*."
    return f"NVML does not start: {text} (NVML {code})."


def _mismatch(context: ProbeContext) -> str:
    kernel = re.search(
        r"NVRM version:.*?\b(\d{3,4}\.\d+(?:\.\d+)?)\b", _read(context.path("/proc/driver/nvidia/version"))
    )
    # Our own memory map names the file behind libnvidia-ml.so.1, whose name ends in its version.
    library = re.search(r"libnvidia-ml\.so\.(\d{3,4}\.\d+(?:\.\d+)?)\b", _read(Path("/proc/self/maps")))
    versions = ""
    if kernel and library:
        versions = f": the kernel module is {kernel[1]}, the library {library[1]}"
    elif kernel or library:
        versions = f": the kernel module is {kernel[1]}" if kernel else f": the library is {library[1]}"  # type: ignore[index]
    return (
        f"The NVIDIA library and the kernel module differ{versions} (NVML 18): the driver was upgraded while loaded. "
        "Reload the module (stop all GPU programs first) or reboot, and hold the driver packages; in a container, use "
        "the host's library."
    )
