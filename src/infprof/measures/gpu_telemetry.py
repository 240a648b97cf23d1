"""Measures from the samples of one GPU: clocks and what held them down, power, memory, links, errors, GPM counters.

Ranks: A for GPM (hardware counters), E for the driver's utilisation, C for the rest. What cannot be said is None, with
the reason as its source. "Under load" means: by utilisation of at least one half; where a driver gives none, by
the absence of its idle reason, else by GPM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from infprof.hardware import pcie_bytes_per_s
from infprof.measures.names import MEASURES
from infprof.measures.telemetry import TelemetryScope
from infprof.probes.gpu_signals import CLOCK_EVENT_REASONS
from infprof.results import Measures
from infprof.telemetry import Event, Series, Telemetry
from infprof.trace import BoolArray, FloatArray, IntArray

NOT_JOINED = "not joined to a GPU of NVML"
NOT_WATCHED = "no GPU was watched"
# From here a sample counts as load.
LOAD_SHARE = 0.5
_IDLE_BIT, _HW_SLOWDOWN_BIT = 0x1, 0x8
# Reasons by what the verdict calls them. A setting, a display or the top of the voltage range limit nothing unexpected.
REASON_GROUPS = {
    "power": ("sw-power-cap", "board-limit", "hw-power-brake"),
    "thermal": ("thermal", "sw-thermal", "hw-thermal", "vr-thermal", "memory-thermal"),
    "other": ("sync-boost", "hw-slowdown"),
    "setting": ("clock-setting",),
}
# What a program leaves behind when it is stopped.
_XIDS_OF_A_STOP = (43, 45)
# The share of samples at each end that memory growth compares.
_END_SHARE = 0.1

_GPM_PIPES = {
    "gpm_tensor_active_ratio": "tensor",
    "gpm_fp32_active_ratio": "FP32",
    "gpm_fp16_active_ratio": "FP16",
    "gpm_fp64_active_ratio": "FP64",
    "gpm_integer_active_ratio": "integer",
}
_GPM_OTHERS = ("gpm_sm_active_ratio", "gpm_sm_occupancy_ratio", "gpm_dram_ratio")


class Said(NamedTuple):
    """A value with where it comes from; without a value, why there is none."""

    value: float | int | None
    source: str


def add_gpu_telemetry(measures: Measures, telemetry: Telemetry, scope: TelemetryScope) -> None:
    """Add the measures of ``scope.gpu``; all are None where the device was not joined to a GPU."""
    if scope.gpu is None:
        watched = bool(telemetry.scopes("memory_used_bytes") or telemetry.scopes("utilization_ratio"))
        for name in _NAMES:
            _add(measures, name, Said(None, NOT_JOINED if watched else NOT_WATCHED))
        return
    gpu = _Gpu(telemetry, scope.gpu, scope.low_ns, scope.high_ns)
    for area in _AREAS:
        for name, said in area(gpu).items():
            _add(measures, name, said)


def _add(measures: Measures, name: str, said: Said) -> None:
    value = said.value
    if value is not None and MEASURES[name].unit in ("ns", "bytes", "count"):
        value = round(value)
    rank = "A" if name.startswith("gpm_") else "E" if "_utilization_" in name else "C"
    measures.add(name, value, MEASURES[name].unit, rank, said.source)


class _Gpu:
    """The samples of one GPU within a time range."""

    def __init__(self, telemetry: Telemetry, scope: str, low_ns: int, high_ns: int) -> None:
        self.telemetry, self.scope, self.low, self.high = telemetry, scope, low_ns, high_ns
        self._load: tuple[IntArray, BoolArray] | None = self._find_load()

    def all(self, signal: str) -> list[Series]:
        """The series of a signal that have samples in the range."""
        mine = (s for s in self.telemetry.series(signal, self.scope) if s.scope == self.scope)
        return [s for s in (s.between(self.low, self.high) for s in mine) if len(s.time)]

    def one(self, signal: str, **labels: str) -> Series | None:
        return next((s for s in self.all(signal) if s.labels == labels), None)

    def events(self, kind: str) -> list[Event]:
        """The GPU's events of a kind in the range."""
        mine = (e for e in self.telemetry.events(kind) if e.scope == self.scope)
        return [e for e in mine if self.low <= e.time_ns < self.high]

    def fact(self, name: str) -> Any:
        return self.telemetry.facts(name).get(self.scope)

    def why_no(self, signal: str) -> str:
        return self.telemetry.why_missing(signal, self.scope) or f"no samples of {signal} in the window"

    def loaded(self, times: IntArray) -> BoolArray | None:
        """Which of the times lie under load, by the last sample before each; None where load is not known."""
        if self._load is None:
            return None
        known, mask = self._load
        places = np.clip(np.searchsorted(known, times, side="right") - 1, 0, len(known) - 1)
        found: BoolArray = mask[places]
        return found

    def load_ratio(self) -> Said:
        if self._load is None:
            return Said(None, "load is not known: neither utilisation nor clock reasons nor GPM")
        return Said(float(self._load[1].mean()), "samples under load, of all")

    def sampled_ns(self) -> int:
        """How much of the range was sampled."""
        if self._load is None or len(self._load[0]) < 2:
            return 0
        return int(self._load[0][-1] - self._load[0][0])

    def _find_load(self) -> tuple[IntArray, BoolArray] | None:
        if (busy := self.one("utilization_ratio")) is not None:
            return busy.time, busy.value >= LOAD_SHARE
        if (reasons := self.one("clock_event_reasons")) is not None:
            return reasons.time, (reasons.value.astype(np.int64) & _IDLE_BIT) == 0
        if (active := self.one("gpm_graphics_active_ratio")) is not None:
            return active.time, active.value >= LOAD_SHARE
        return None


def _statistic(gpu: _Gpu, signal: str, of: Callable[[FloatArray], Any], **labels: str) -> Said:
    series = gpu.one(signal, **labels)
    if series is None:
        return Said(None, gpu.why_no(signal))
    return Said(float(of(series.value)), f"{len(series.value)} samples of {series.probe}")


def _fact(gpu: _Gpu, name: str) -> Said:
    value = gpu.fact(name)
    return Said(value, "the driver" if value is not None else gpu.telemetry.why_missing(name, gpu.scope) or "not given")


def _over(part: Said, whole: Said) -> Said:
    if part.value is None or not whole.value:
        return Said(None, part.source if part.value is None else whole.source)
    return Said(part.value / whole.value, part.source)


# --- load, memory, power ---------------------------------------------------------------------------------------------


def _usage(gpu: _Gpu) -> dict[str, Said]:
    return {
        "gpu_utilization_mean_ratio": _statistic(gpu, "utilization_ratio", np.mean),
        "gpu_utilization_peak_ratio": _statistic(gpu, "utilization_ratio", np.max),
        "memory_utilization_mean_ratio": _statistic(gpu, "memory_utilization_ratio", np.mean),
        "gpu_load_ratio": gpu.load_ratio(),
    }


def _memory(gpu: _Gpu) -> dict[str, Said]:
    peak, total = _statistic(gpu, "memory_used_bytes", np.max), _fact(gpu, "gpu_memory_total_bytes")
    return {
        "gpu_memory_used_mean_bytes": _statistic(gpu, "memory_used_bytes", np.mean),
        "gpu_memory_used_peak_bytes": peak,
        "gpu_memory_total_bytes": total,
        "gpu_memory_used_peak_ratio": _over(peak, total),
        "gpu_memory_growth_bytes": _statistic(gpu, "memory_used_bytes", _growth),
        "target_memory_peak_bytes": _target_memory(gpu),
        "other_process_memory_peak_bytes": _statistic(gpu, "other_process_memory_bytes", np.max),
    }


def _growth(values: FloatArray) -> float:
    """From the median of the first tenth to that of the last."""
    end = max(int(len(values) * _END_SHARE), 1)
    return float(np.median(values[-end:]) - np.median(values[:end]))


def _target_memory(gpu: _Gpu) -> Said:
    series = gpu.all("process_memory_bytes")
    if not series:
        return Said(None, gpu.why_no("process_memory_bytes"))
    # All processes of a tick carry its time.
    times, places = np.unique(np.concatenate([s.time for s in series]), return_inverse=True)
    sums = np.bincount(places, np.concatenate([s.value for s in series]), len(times))
    return Said(float(sums.max()), f"{len(series)} processes of the target")


def _power(gpu: _Gpu) -> dict[str, Said]:
    mean, limit = _mean_power(gpu), _fact(gpu, "gpu_power_limit_watts")
    return {
        "gpu_power_mean_watts": mean,
        "gpu_power_limit_watts": limit,
        "gpu_power_limit_max_watts": _fact(gpu, "gpu_power_limit_max_watts"),
        "gpu_power_of_limit_ratio": _over(mean, limit),
        "gpu_temperature_peak_celsius": _statistic(gpu, "temperature_celsius", np.max),
        "gpu_memory_temperature_peak_celsius": _statistic(gpu, "memory_temperature_celsius", np.max),
    }


def _mean_power(gpu: _Gpu) -> Said:
    """The energy counter misses no burst between two samples."""
    rate = _counter_rate(gpu.one("energy_joules"))
    return _statistic(gpu, "power_watts", np.mean) if rate is None else Said(rate, "energy counter")


def _counter_rate(series: Series | None) -> float | None:
    """Increase per second, between the first and the last sample; None without two of them."""
    grown = None if series is None else series.increase()
    if series is None or grown is None or series.time[-1] == series.time[0]:
        return None
    return grown / (int(series.time[-1] - series.time[0]) / 1e9)


# --- clocks ----------------------------------------------------------------------------------------------------------


def _clocks(gpu: _Gpu) -> dict[str, Said]:
    mean, most = _loaded_clock(gpu), _fact(gpu, "gpu_sm_clock_max_mhz")
    lost = _over(mean, most)
    if lost.value is not None:
        lost = Said(max(1 - lost.value, 0.0), lost.source)
    load = gpu.load_ratio().value
    lost_ns = None if lost.value is None or load is None else lost.value * load * gpu.sampled_ns()
    return {
        "sm_clock_load_mhz": mean,
        "sm_clock_max_mhz": most,
        "sm_clock_idle_ratio": _over(_idle_clock(gpu), most),
        "sm_clock_lost_ratio": lost,
        "sm_clock_lost_ns": Said(lost_ns, lost.source),
        "hw_slowdown_ratio": _hw_slowdown(gpu),
        **{f"clock_limited_{group}_ratio": _limited(gpu, group) for group in REASON_GROUPS},
    }


def _idle_clock(gpu: _Gpu) -> Said:
    series = gpu.one("sm_clock_mhz")
    if series is None:
        return Said(None, gpu.why_no("sm_clock_mhz"))
    under_load = gpu.loaded(series.time)
    if under_load is None:
        return Said(None, gpu.load_ratio().source)
    if under_load.all():
        return Said(None, "the GPU was under load in all samples")
    return Said(float(series.value[~under_load].min()), f"{int((~under_load).sum())} samples while idle")


def _loaded_clock(gpu: _Gpu) -> Said:
    series = gpu.one("sm_clock_mhz")
    if series is None:
        return Said(None, gpu.why_no("sm_clock_mhz"))
    under_load = gpu.loaded(series.time)
    if under_load is None:
        return Said(None, gpu.load_ratio().source)
    if not under_load.any():
        return Said(None, "the GPU was never under load")
    return Said(float(series.value[under_load].mean()), f"{int(under_load.sum())} samples under load")


def _limited(gpu: _Gpu, group: str) -> Said:
    """The share of time in which a reason of the group held: counted by the driver, else from samples."""
    counted = _counted_shares(gpu, REASON_GROUPS[group])
    shares = list(counted.values())
    rest = sum(bit for bit, name in CLOCK_EVENT_REASONS.items() if name in REASON_GROUPS[group] and name not in counted)
    held = _held(gpu, rest) if rest else None
    if held is not None:
        shares.append(float(held.mean()))
    if not shares:
        return Said(None, gpu.why_no("clock_event_reasons"))
    # Reasons of a group overlap, so the largest is what can be said for sure.
    source = (
        "the driver's own counters" if counted else f"{0 if held is None else len(held)} samples of the reason bits"
    )
    return Said(min(max(shares), 1.0), source)


def _counted_shares(gpu: _Gpu, reasons: Sequence[str]) -> dict[str, float]:
    """Reason → share of time, for those that the driver counts itself."""
    shares: dict[str, float] = {}
    for series in gpu.all("limited_ns"):
        rate = _counter_rate(series)
        if rate is not None and series.labels.get("reason") in reasons:
            shares[series.labels["reason"]] = rate / 1e9
    for series in gpu.all("limited_ratio"):
        if series.labels.get("reason") in reasons:
            shares[series.labels["reason"]] = float(series.value.mean())
    return shares


def _hw_slowdown(gpu: _Gpu) -> Said:
    held = _held(gpu, _HW_SLOWDOWN_BIT | 0x40 | 0x80)
    if held is None:
        return Said(None, gpu.why_no("clock_event_reasons"))
    return Said(float(held.mean()), f"{len(held)} samples of the reason bits")


def _held(gpu: _Gpu, mask: int) -> BoolArray | None:
    """In which samples one of the bits held. A hardware slowdown of a single sample is a change of state."""
    series = gpu.one("clock_event_reasons")
    if series is None:
        return None
    bits = series.value.astype(np.int64)
    held: BoolArray = (bits & mask & ~_HW_SLOWDOWN_BIT) != 0
    if mask & _HW_SLOWDOWN_BIT:
        slow = (bits & _HW_SLOWDOWN_BIT) != 0
        before, after = np.append(False, slow[:-1]), np.append(slow[1:], False)
        held |= slow & (before | after)
    return held


# --- links -----------------------------------------------------------------------------------------------------------


def _links(gpu: _Gpu) -> dict[str, Said]:
    generation, width = _loaded_link(gpu, "pcie_link_generation"), _loaded_link(gpu, "pcie_link_width")
    most = _fact(gpu, "gpu_pcie_generation_max"), _fact(gpu, "gpu_pcie_width_max")
    peak, possible = _link_peak(generation, width), _link_peak(*most)
    kept = _over(peak, possible)
    sent, received = _rate(gpu, "pcie_tx"), _rate(gpu, "pcie_rx")
    return {
        "pcie_link_load_generation": generation,
        "pcie_link_load_width": width,
        "pcie_link_max_generation": most[0],
        "pcie_link_max_width": most[1],
        "pcie_link_peak_bytes_per_s": peak,
        "pcie_link_lost_ratio": Said(None if kept.value is None else max(1 - kept.value, 0.0), kept.source),
        "pcie_tx_bytes_per_s": sent,
        "pcie_rx_bytes_per_s": received,
        "pcie_tx_link_ratio": _over(sent, peak),
        "pcie_rx_link_ratio": _over(received, peak),
        "pcie_replay_count": _increase(gpu, "pcie_replay_count"),
        "nvlink_tx_bytes_per_s": _rate(gpu, "nvlink_tx"),
        "nvlink_rx_bytes_per_s": _rate(gpu, "nvlink_rx"),
    }


def _loaded_link(gpu: _Gpu, signal: str) -> Said:
    """The best that the link showed under load: an idle GPU trains its link down, and up again when needed."""
    series = gpu.one(signal)
    if series is None:
        return Said(None, gpu.why_no(signal))
    under_load = gpu.loaded(series.time)
    if under_load is None or not under_load.any():
        return Said(None, "judged only under load, of which there was none")
    return Said(float(series.value[under_load].max()), f"{int(under_load.sum())} samples under load")


def _link_peak(generation: Said, width: Said) -> Said:
    if generation.value is None or width.value is None:
        return Said(None, generation.source if generation.value is None else width.source)
    return Said(pcie_bytes_per_s(int(generation.value), int(width.value)), generation.source)


def _rate(gpu: _Gpu, link: str) -> Said:
    """Bytes per second: from the byte counter unless it proved useless, else the mean of the driver's rates."""
    counter, rate = f"{link}_bytes", f"{link}_bytes_per_s"
    if gpu.telemetry.why_missing(counter, gpu.scope) is None:
        counted = _counter_rate(gpu.one(counter))
        if counted is not None:
            return Said(counted, "byte counter")
    for labels in ({"source": "gpm"}, {"source": "20 ms window"}, {}):
        series = gpu.one(rate, **labels)
        if series is not None:
            return Said(float(series.value.mean()), labels.get("source", f"{len(series.value)} samples"))
    return Said(None, gpu.telemetry.why_missing(rate, gpu.scope) or gpu.why_no(counter))


def _increase(gpu: _Gpu, signal: str) -> Said:
    series = gpu.one(signal)
    grown = None if series is None else series.increase()
    return Said(grown, gpu.why_no(signal) if grown is None else "counter")


# --- errors ----------------------------------------------------------------------------------------------------------


def _errors(gpu: _Gpu) -> dict[str, Said]:
    xids = [e for e in gpu.events("xid") if e.value not in _XIDS_OF_A_STOP]
    lost = gpu.events("gpu-lost")
    unheard = gpu.telemetry.why_missing("xid", gpu.scope) or gpu.telemetry.why_missing("xid", "")
    seen = any(s.scope == gpu.scope for s in gpu.telemetry.all_series)
    quiet = Said(None, unheard or "this GPU was not sampled") if unheard or not seen else Said(0, "error events")
    first = xids[0].value if xids else None
    return {
        "xid_count": Said(len(xids), "error events") if xids else quiet,
        "xid_first_number": Said(first, "error events" if xids else "no XID"),
        "gpu_lost_count": Said(len(lost), "the driver's answers") if seen or lost else quiet,
        "ecc_corrected_count": _increase(gpu, "ecc_corrected_count"),
        "ecc_uncorrected_count": _increase(gpu, "ecc_uncorrected_count"),
        "remapped_row_count": _increase(gpu, "remapped_rows_uncorrected_count"),
        "remap_failed_count": _statistic(gpu, "remap_failed_flag", np.max),
    }


# --- GPM -------------------------------------------------------------------------------------------------------------


def _gpm(gpu: _Gpu) -> dict[str, Said]:
    active = gpu.one("gpm_graphics_active_ratio")
    found = {name: _gpm_mean(gpu, name, active) for name in (*_GPM_PIPES, *_GPM_OTHERS)}
    pipes = {name: said.value for name, said in found.items() if name in _GPM_PIPES and said.value is not None}
    largest = max(pipes, key=lambda name: pipes[name], default=None)
    none = Said(None, _why_no_gpm(gpu, "gpm_tensor_active_ratio"))
    return {
        **found,
        "gpm_graphics_active_ratio": Said(None, _why_no_gpm(gpu, "gpm_graphics_active_ratio"))
        if active is None
        else Said(float(active.value.mean()), f"{len(active.value)} GPM samples"),
        "gpm_compute_ratio": none if largest is None else Said(pipes[largest], f"largest pipe: {_GPM_PIPES[largest]}"),
    }


def _why_no_gpm(gpu: _Gpu, signal: str) -> str:
    return gpu.telemetry.why_missing("gpm", gpu.scope) or gpu.why_no(signal)


def _gpm_mean(gpu: _Gpu, signal: str, active: Series | None) -> Said:
    """Over the samples in which the GPU was active for at least half of the time, where that is known."""
    series = gpu.one(signal)
    if series is None:
        return Said(None, _why_no_gpm(gpu, signal))
    if active is None:
        return Said(float(series.value.mean()), f"{len(series.value)} GPM samples")
    busy = np.isin(series.time, active.time[active.value >= LOAD_SHARE])
    if not busy.any():
        return Said(None, "the GPU was never active for half of a GPM sample")
    return Said(float(series.value[busy].mean()), f"{int(busy.sum())} GPM samples while active")


# --- one GPU beside the others ---------------------------------------------------------------------------------------


class Pace(NamedTuple):
    """How one GPU ran under load: SM clock over its maximum, mean temperature, and share of time limited, by group."""

    gpu: str
    clock_ratio: float
    temperature_celsius: float | None
    limited: dict[str, float | None]


def gpu_paces(telemetry: Telemetry, low_ns: int, high_ns: int) -> list[Pace]:
    """All GPUs that were under load and may be the target's, the slowest first. Slices of a GPU share its clock."""
    target = telemetry.facts("gpu_of_target")
    slices = telemetry.facts("gpu_parent")
    gpus = [s for s in telemetry.scopes("sm_clock_mhz") if target.get(s) != "no" and s not in slices]
    paces = (_pace(_Gpu(telemetry, gpu, low_ns, high_ns)) for gpu in gpus)
    return sorted((p for p in paces if p is not None), key=lambda p: p.clock_ratio)


def _pace(gpu: _Gpu) -> Pace | None:
    ratio = _over(_loaded_clock(gpu), _fact(gpu, "gpu_sm_clock_max_mhz")).value
    if ratio is None:
        return None
    temperature = _statistic(gpu, "temperature_celsius", np.mean).value
    return Pace(gpu.scope, ratio, temperature, {group: _limited(gpu, group).value for group in REASON_GROUPS})


def _spread(gpu: _Gpu) -> dict[str, Said]:
    paces = gpu_paces(gpu.telemetry, gpu.low, gpu.high)
    if len(paces) < 2:
        return dict.fromkeys(_SPREAD, Said(None, "fewer than two GPUs were under load with known clocks"))
    slowest, fastest = paces[0], paces[-1]
    warm = [p.temperature_celsius for p in paces if p.temperature_celsius is not None]
    source = f"{len(paces)} GPUs; the slowest is {slowest.gpu.removeprefix('gpu/')}"
    mine = next((p.clock_ratio for p in paces if p.gpu == gpu.scope), None)
    return {
        "gpu_clock_spread_ratio": Said(1 - slowest.clock_ratio / fastest.clock_ratio, source),
        "gpu_temperature_spread_celsius": Said(max(warm) - min(warm) if len(warm) == len(paces) else None, source),
        "sm_clock_behind_peers_ratio": Said(None if mine is None else 1 - mine / fastest.clock_ratio, source),
        "slowest_gpu_clock_ratio": Said(slowest.clock_ratio, source),
        "slowest_gpu_thermal_ratio": Said(slowest.limited["thermal"], source),
        "slowest_gpu_power_ratio": Said(slowest.limited["power"], source),
    }


_SPREAD = (
    "gpu_clock_spread_ratio",
    "gpu_temperature_spread_celsius",
    "sm_clock_behind_peers_ratio",
    "slowest_gpu_clock_ratio",
    "slowest_gpu_thermal_ratio",
    "slowest_gpu_power_ratio",
)
_AREAS: tuple[Callable[[_Gpu], dict[str, Said]], ...] = (
    _usage,
    _memory,
    _power,
    _clocks,
    _links,
    _errors,
    _gpm,
    _spread,
)
# What a device without samples gets: the same names, found by asking an empty recording.
_NAMES = tuple(name for area in _AREAS for name in area(_Gpu(Telemetry(), "gpu/none", 0, 0)))


# --- which GPU a device of a trace is --------------------------------------------------------------------------------


def join_gpu(
    telemetry: Telemetry, name: str | None, uuid: str | None, bus_id: str | None, all_names: Iterable[str | None]
) -> str | None:
    """The telemetry scope of a device of a trace, or None.

    By UUID, else by PCI address, else by a name that is unique on both sides; never by number: CUDA and NVML count
    differently. A UUID or address that is known on both sides and fits nothing settles it: another machine's GPU.
    ``all_names`` are the names of all devices of the trace.
    """
    for given, known, plain in ((uuid, "gpu_uuid", _plain_uuid), (bus_id, "gpu_bus_id", _plain_bus_id)):
        wanted = plain(given)
        scopes = {scope: plain(value) for scope, value in telemetry.facts(known).items()}
        if wanted is not None and any(scopes.values()):
            return _only([scope for scope, value in scopes.items() if value == wanted])
    return _by_name(telemetry, name, list(all_names))


def target_gpus(telemetry: Telemetry) -> list[str]:
    """The telemetry scopes of the GPUs that the target may use, the busiest first."""
    may = telemetry.facts("gpu_of_target")
    scopes = [s for s in telemetry.scopes("memory_used_bytes") if may.get(s) != "no"]

    def load(scope: str) -> float:
        values = [s.value for s in telemetry.series("utilization_ratio", scope) if len(s.value)]
        return float(values[0].mean()) if values else 0.0

    # Where the target's own memory is seen, that is its GPU, whoever else keeps another one busy.
    own = {s.scope for s in telemetry.series("process_memory_bytes") if len(s.value) and s.value.max() > 0}
    return sorted(scopes, key=lambda s: (not any(o == s or o.startswith(s + "/") for o in own), -load(s), s))


def _by_name(telemetry: Telemetry, name: str | None, all_names: Sequence[str | None]) -> str | None:
    if name is None or [_plain_name(n) for n in all_names].count(_plain_name(name)) > 1:
        return None
    names = telemetry.facts("gpu_name").items()
    return _only([scope for scope, value in names if _plain_name(value) == _plain_name(name)])


def _only(found: list[str]) -> str | None:
    return found[0] if len(found) == 1 else None


def _plain_uuid(text: str | None) -> str | None:
    """32 hexadecimal digits, or None: other forms cannot be compared."""
    digits = re.sub(r"^(gpu|mig)-|-|\s|^0x", "", (text or "").strip().lower())
    return digits if re.fullmatch(r"[0-9a-f]{32}", digits) and set(digits) != {"0"} else None


def _plain_bus_id(text: str | None) -> str | None:
    match = re.fullmatch(
        r"(?:([0-9a-f]+):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", (text or "").strip().lower()
    )
    if match is None:
        return None
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return f"{domain:x}:{bus:02x}:{device:02x}.{function}"


def _plain_name(text: str | None) -> str:
    return re.sub(r"[\s_-]+", " ", (text or "").strip().casefold()).removeprefix("nvidia ")
