"""AMD GPUs through the package ``amdsmi``: the same signals as NVML's where AMD has them.

Units and keys: ``amdsmi_interface.py`` of amdsmi 7.0.2. There are no hardware counters here: those need rocprofiler.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from infprof.probes import ProbeContext, Task, Unavailable
from infprof.probes.gpu_processes import ProcessTree
from infprof.probes.gpu_signals import SIGNALS, Asker, Failure, GpuLost
from infprof.probes.recorder import Recorder
from infprof.probes.visible_gpus import Gpu, Visible, visible_gpus

FAST_PERIOD_S, SLOW_PERIOD_S = 0.1, 1.0
_MIB = 2**20

# AMD SMI's status codes by what to do; others may pass.
_NEVER = {1: "refused", 2: "not supported on this GPU", 3: "not implemented for this GPU", 10: "no permission"}
_LATER = (8, 9, 11, 30, 40)

# GT/s of a lane → PCIe generation.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}

# Share of the last period, in %, in which a limit held the clocks down, by the reason that infprof calls it.
_LIMITS = {
    "per_ppt_pwr": "sw-power-cap",
    "per_socket_thrm": "sw-thermal",
    "per_prochot_thrm": "hw-thermal",
    "per_vr_thrm": "vr-thermal",
    "per_hbm_thrm": "memory-thermal",
}

_VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

# What AMD has no counterpart of, said once per device.
_WITHOUT = {
    "gpm": "AMD GPUs have no GPM: hardware counters need rocprofiler",
    "xid": "AMD GPUs have no XID errors",
    "clock_event_reasons": "amdsmi gives shares of time by reason instead",
    "pcie_tx_bytes": "amdsmi gives both directions together",
    "pcie_rx_bytes": "amdsmi gives both directions together",
}


class _NoValue(Exception):
    """amdsmi answers "N/A"."""


class AmdProbe:
    """Samples every AMD GPU that the target may use."""

    name = "amd"
    signals = SIGNALS

    def __init__(self) -> None:
        self._smi: Any = None
        self._devices: list[tuple[Any, Asker]] = []
        # Of the tasks: held while one is inside a call.
        self._locks: list[threading.Lock] = []
        self._tree: ProcessTree
        self._held_before: dict[str, bool] = {}

    def start(self, context: ProbeContext, out: Recorder) -> Sequence[Task]:
        """Open AMD SMI, record what does not change, and give the tasks. Raises Unavailable."""
        if not any(context.path(path).exists() for path in ("/dev/kfd", "/sys/module/amdgpu")):
            raise Unavailable("No AMD GPU driver on this machine: there is nothing for this probe to read.")
        self._smi = _load()
        try:
            self._smi.amdsmi_init()
        except self._smi.AmdSmiException as error:
            self._smi = None
            raise Unavailable(f"AMD SMI does not start: {_one_line(error)}.") from None
        try:
            self._devices = self._choose(context, self._enumerate(out), out)
        except Unavailable:
            self.stop(out)
            raise
        self._tree = ProcessTree(context)
        self._each(self._record_facts)(out)
        return [
            Task("amd-gpu", FAST_PERIOD_S, self._each(self._sample_state)),
            Task("amd-gpu-slow", SLOW_PERIOD_S, self._each(self._sample_counters)),
        ]

    def stop(self, out: Recorder) -> None:
        """Let AMD SMI go, unless a task is stuck in a call."""
        if self._smi is None or not all(lock.acquire(blocking=False) for lock in self._locks):
            return
        with contextlib.suppress(self._smi.AmdSmiException):
            self._smi.amdsmi_shut_down()
        self._devices, self._locks = [], []

    def _each(self, work: Callable[[Any, Asker, Recorder], None]) -> Callable[[Recorder], None]:
        """The work for every device that is not lost; two runs of it never overlap."""
        lock = threading.Lock()
        self._locks.append(lock)

        def run(out: Recorder) -> None:
            if lock.acquire(blocking=False):
                try:
                    for handle, asker in self._devices:
                        with contextlib.suppress(GpuLost):
                            work(handle, asker, out)
                finally:
                    lock.release()

        return run

    def _failure(self, error: Exception) -> Failure | None:
        if isinstance(error, _NoValue):
            return Failure(None, "amdsmi gives no value (N/A)", "maybe")
        if isinstance(error, (AttributeError, KeyError)):
            return Failure(None, "not known to the installed amdsmi", "no")
        if not isinstance(error, self._smi.AmdSmiException):
            return None
        code = getattr(error, "err_code", None)
        if code in _NEVER:
            return Failure(code, f"{_NEVER[code]} (AMD SMI {code})", "no")
        return Failure(code, f"{_one_line(error)} (AMD SMI {code})", "later" if code in _LATER else "maybe")

    # --- which, and what does not change -----------------------------------------------------------------------------

    def _enumerate(self, out: Recorder) -> list[tuple[Any, str]]:
        try:
            handles = self._smi.amdsmi_get_processor_handles()
            found = [(handle, str(self._smi.amdsmi_get_gpu_device_uuid(handle))) for handle in handles]
        except self._smi.AmdSmiException as error:
            raise Unavailable(f"AMD SMI cannot list the GPUs: {_one_line(error)}.") from None
        if not found:
            raise Unavailable("AMD SMI works, but knows no GPU here.")
        for index, (_, uuid) in enumerate(found):
            out.fact("gpu_index", index, f"gpu/{uuid}")
        return found

    def _choose(self, context: ProbeContext, found: list[tuple[Any, str]], out: Recorder) -> list[tuple[Any, Asker]]:
        askers = [(handle, Asker(f"gpu/{uuid}", self._failure)) for handle, uuid in found]
        names = [asker.ask(out, "gpu_name", partial(self._name, h)) or "" for h, asker in askers]
        visible = _visible(context.environ, [Gpu(uuid, name) for (_, uuid), name in zip(found, names, strict=True)])
        if visible.none:
            raise Unavailable("The target sees no GPU: its environment hides every one.")
        out.fact("gpu_selection", visible.basis)
        chosen = []
        for (handle, asker), (_, uuid), name in zip(askers, found, names, strict=True):
            out.fact("gpu_of_target", visible.target[uuid], asker.scope)
            if visible.target[uuid] != "no":
                chosen.append((handle, asker))
                if name:
                    out.fact("gpu_name", name, asker.scope)
                out.fact("gpu_uuid", uuid, asker.scope)
        return chosen

    def _name(self, handle: Any) -> str:
        return str(_given(self._smi.amdsmi_get_gpu_asic_info(handle)["market_name"]))

    def _record_facts(self, handle: Any, asker: Asker, out: Recorder) -> None:
        for name, ask in self._fact_calls(handle):
            value = asker.ask(out, name, ask)
            if value is not None:
                out.fact(name, value, asker.scope)
        for signal, reason in _WITHOUT.items():
            asker.give_up(out, signal, reason)

    def _fact_calls(self, h: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
        smi = self._smi
        yield "gpu_bus_id", lambda: str(smi.amdsmi_get_gpu_device_bdf(h)).lower()
        yield "gpu_architecture", lambda: str(_given(smi.amdsmi_get_gpu_asic_info(h)["target_graphics_version"]))
        yield "gpu_sm_count", lambda: int(_given(smi.amdsmi_get_gpu_asic_info(h)["num_compute_units"]))
        yield "gpu_memory_total_bytes", lambda: int(smi.amdsmi_get_gpu_vram_usage(h)["vram_total"]) * _MIB
        yield "gpu_sm_clock_max_mhz", lambda: int(_given(self._clock(h, "GFX")["max_clk"]))
        yield "gpu_memory_clock_max_mhz", lambda: int(_given(self._clock(h, "MEM")["max_clk"]))
        yield "gpu_power_limit_watts", lambda: _watts(smi.amdsmi_get_power_cap_info(h)["power_cap"])
        yield "gpu_power_limit_max_watts", lambda: _watts(smi.amdsmi_get_power_cap_info(h)["max_power_cap"])
        yield "gpu_pcie_generation_max", lambda: _generation(self._pcie(h, "pcie_static")["max_pcie_speed"])
        yield "gpu_pcie_width_max", lambda: int(_given(self._pcie(h, "pcie_static")["max_pcie_width"]))
        yield "gpu_compute_partition", lambda: str(_given(smi.amdsmi_get_gpu_compute_partition(h)))
        yield "gpu_memory_partition", lambda: str(_given(smi.amdsmi_get_gpu_memory_partition(h)))

    # --- samples -----------------------------------------------------------------------------------------------------

    def _sample_state(self, handle: Any, asker: Asker, out: Recorder) -> None:
        smi = self._smi
        activity = asker.ask(out, "gpu_activity", lambda: smi.amdsmi_get_gpu_activity(handle))
        if activity is not None:
            # AMD's memory activity is that of the memory controller: nearer to bandwidth than NVML's.
            self._sample(out, asker, "utilization_ratio", lambda: float(_given(activity["gfx_activity"])) / 100)
            self._sample(out, asker, "memory_utilization_ratio", lambda: float(_given(activity["umc_activity"])) / 100)
        for signal, ask in self._state_calls(handle):
            self._sample(out, asker, signal, ask)

    def _state_calls(self, h: Any) -> Iterator[tuple[str, Callable[[], float]]]:
        smi = self._smi
        yield "memory_used_bytes", lambda: float(smi.amdsmi_get_gpu_vram_usage(h)["vram_used"]) * _MIB
        yield "sm_clock_mhz", lambda: float(_given(self._clock(h, "GFX")["clk"]))
        yield "memory_clock_mhz", lambda: float(_given(self._clock(h, "MEM")["clk"]))
        yield "power_watts", lambda: _power(smi.amdsmi_get_power_info(h))
        yield "temperature_celsius", lambda: self._temperature(h, "HOTSPOT")

    def _sample_counters(self, handle: Any, asker: Asker, out: Recorder) -> None:
        for signal, ask in self._counter_calls(handle):
            self._sample(out, asker, signal, ask)
        self._sample_limits(handle, asker, out)
        self._sample_links(handle, asker, out)
        self._sample_processes(handle, asker, out)

    def _sample_limits(self, handle: Any, asker: Asker, out: Recorder) -> None:
        limits = asker.ask(out, "limited_ratio", lambda: self._smi.amdsmi_get_violation_status(handle))
        if limits is None:
            return
        for key, reason in _LIMITS.items():
            share = asker.ask(out, f"limited_ratio:{reason}", partial(_share, limits, key))
            if share is not None:
                out.sample("limited_ratio", share, asker.scope, {"reason": reason})

    def _counter_calls(self, h: Any) -> Iterator[tuple[str, Callable[[], float]]]:
        smi = self._smi
        yield "memory_temperature_celsius", lambda: self._temperature(h, "VRAM")
        yield "energy_joules", lambda: _joules(smi.amdsmi_get_energy_count(h))
        yield "pcie_link_generation", lambda: _generation(self._pcie(h, "pcie_metric")["pcie_speed"])
        yield "pcie_link_width", lambda: float(_given(self._pcie(h, "pcie_metric")["pcie_width"]))
        yield "pcie_bytes_per_s", lambda: float(_given(self._pcie(h, "pcie_metric")["pcie_bandwidth"])) * 1e6 / 8
        yield "pcie_replay_count", lambda: float(_given(self._pcie(h, "pcie_metric")["pcie_replay_count"]))
        yield "ecc_corrected_count", lambda: float(smi.amdsmi_get_gpu_total_ecc_count(h)["correctable_count"])
        yield "ecc_uncorrected_count", lambda: float(smi.amdsmi_get_gpu_total_ecc_count(h)["uncorrectable_count"])

    def _sample(self, out: Recorder, asker: Asker, signal: str, ask: Callable[[], float]) -> None:
        value = asker.ask(out, signal, ask)
        if value is not None:
            out.sample(signal, value, asker.scope)

    def _sample_links(self, handle: Any, asker: Asker, out: Recorder) -> None:
        """Infinity Fabric: all links together, in KiB by AMD's count."""
        metrics = asker.ask(out, "nvlink_tx_bytes", lambda: self._smi.amdsmi_get_link_metrics(handle))
        if metrics is not None:
            links = metrics["links"][: int(metrics["num_links"])]
            for signal, key in (("nvlink_rx_bytes", "read"), ("nvlink_tx_bytes", "write")):
                out.sample(signal, sum(float(link[key]) for link in links) * 1024, asker.scope)

    def _sample_processes(self, handle: Any, asker: Asker, out: Recorder) -> None:
        found = asker.ask(out, "process_memory_bytes", lambda: self._smi.amdsmi_get_gpu_process_list(handle))
        if found is not None:
            held = self._held_before.setdefault(asker.scope, bool(found))
            memory = {int(p["pid"]): int(p["memory_usage"]["vram_mem"]) for p in found}
            self._tree.record(out, asker.scope, memory, alone_since_start=not held)

    def _clock(self, handle: Any, kind: str) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self._smi.amdsmi_get_clock_info(handle, getattr(self._smi.AmdSmiClkType, kind))
        return answer

    def _pcie(self, handle: Any, part: str) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self._smi.amdsmi_get_pcie_info(handle)[part]
        return answer

    def _temperature(self, handle: Any, sensor: str) -> float:
        kind = getattr(self._smi.AmdSmiTemperatureType, sensor)
        return float(self._smi.amdsmi_get_temp_metric(handle, kind, self._smi.AmdSmiTemperatureMetric.CURRENT))


def _load() -> Any:
    """The package amdsmi. Raises Unavailable with what to install.

    Without AMD's library its import prints to stdout and raises whatever comes up (KeyError in 7.0.2).
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module("amdsmi")
    except ModuleNotFoundError:
        raise Unavailable("AMD GPUs need the package amdsmi: pip install 'infprof[amd]'.") from None
    except Exception as error:
        raise Unavailable(
            f"The package amdsmi does not load ({type(error).__name__}): it needs libamd_smi.so of ROCm, best its own copy "
            "(pip install /opt/rocm/share/amd_smi)."
        ) from None


def _visible(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> Visible:
    """ROCm takes three variables; where two are set, the numbers of one count what the other left."""
    given = [name for name in _VISIBLE if name in environ]
    variable = given[0] if given else "ROCR_VISIBLE_DEVICES"
    if len(given) < 2:
        return visible_gpus({name: environ[name] for name in given}, gpus, variable)
    answers = [visible_gpus({name: environ[name]}, gpus, name) for name in given]
    if any(answer.none for answer in answers):
        return next(answer for answer in answers if answer.none)
    return Visible(dict.fromkeys((gpu.uuid for gpu in gpus), "unknown"), f"{' and '.join(given)} are both set")


def _given(value: Any) -> Any:
    if value is None or value == "N/A":
        raise _NoValue
    return value


def _power(info: Mapping[str, Any]) -> float:
    """Which of the two a GPU has depends on its generation."""
    for key in ("current_socket_power", "average_socket_power"):
        if info.get(key) not in (None, "N/A", 0):
            return float(info[key])
    raise _NoValue


def _watts(value: Any) -> float:
    """The cap is in microwatts on Linux, in watts in some versions: no GPU has 100 kW."""
    number = float(_given(value))
    return number / 1e6 if number > 1e5 else number


def _joules(energy: Mapping[str, Any]) -> float:
    """The accumulator counts in units of ``counter_resolution`` microjoules."""
    return float(energy["energy_accumulator"]) * float(energy["counter_resolution"]) / 1e6


def _share(limits: Mapping[str, Any], key: str) -> float:
    return float(_given(limits[key])) / 100


def _generation(speed: Any) -> int:
    """From MT/s, or GT/s in some versions."""
    number = float(_given(speed))
    generation = _GENERATIONS.get(number / 1000 if number >= 1000 else number)
    if generation is None:
        raise _NoValue
    return generation


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
