"""The AMD probe, against a module with the functions, keys and exceptions of amdsmi 7.0.2."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infprof.probes import ProbeContext, Task, Unavailable
from infprof.probes.amd import AmdProbe
from infprof.probes.recorder import Clock, TelemetryFile
from infprof.telemetry import Telemetry, read_telemetry

MIB = 2**20
UUID, OTHER = "2dff74a1-0000-1000-8026-0123456789ab", "2dff74a1-0000-1000-8026-ba9876543210"
GPU = f"gpu/{UUID}"


class AmdSmiException(Exception):
    pass


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, err_code: int) -> None:
        super().__init__(err_code)
        self.err_code = err_code

    def __str__(self) -> str:
        return f"Error code:\n\t{self.err_code} | AMDSMI_STATUS"


def mi300x() -> dict[str, Any]:
    """What each call answers; an int is a status code that is raised."""
    return {
        "amdsmi_get_gpu_device_uuid": UUID,
        "amdsmi_get_gpu_device_bdf": "0000:0C:00.0",
        "amdsmi_get_gpu_asic_info": {
            "market_name": "AMD Instinct MI300X",
            "target_graphics_version": "gfx942",
            "num_compute_units": 304,
        },
        "amdsmi_get_gpu_vram_usage": {"vram_total": 196_592, "vram_used": 100_000},
        "amdsmi_get_gpu_activity": {"gfx_activity": 96, "umc_activity": 55, "mm_activity": "N/A"},
        "amdsmi_get_clock_info": {"GFX": {"clk": 1800, "max_clk": 2100}, "MEM": {"clk": 1300, "max_clk": 1300}},
        "amdsmi_get_power_info": {"current_socket_power": 700, "average_socket_power": "N/A"},
        "amdsmi_get_power_cap_info": {"power_cap": 750_000_000, "max_power_cap": 750_000_000},
        "amdsmi_get_temp_metric": {"HOTSPOT": 71, "VRAM": 60},
        "amdsmi_get_violation_status": {
            "per_ppt_pwr": 40,
            "per_socket_thrm": 0,
            "per_prochot_thrm": 0,
            "per_vr_thrm": "N/A",
            "per_hbm_thrm": 5,
        },
        "amdsmi_get_pcie_info": {
            "pcie_static": {"max_pcie_width": 16, "max_pcie_speed": 32_000},
            "pcie_metric": {"pcie_width": 8, "pcie_speed": 32_000, "pcie_bandwidth": 8000, "pcie_replay_count": 2},
        },
        "amdsmi_get_energy_count": {"energy_accumulator": 2_000_000, "counter_resolution": 15.5},
        "amdsmi_get_gpu_total_ecc_count": {"correctable_count": 3, "uncorrectable_count": 0, "deferred_count": 0},
        "amdsmi_get_link_metrics": {
            "num_links": 2,
            "links": [{"read": 10, "write": 1}, {"read": 20, "write": 2}, {"read": 99, "write": 99}],
        },
        "amdsmi_get_gpu_process_list": [{"pid": 51, "memory_usage": {"vram_mem": 1000}}],
        "amdsmi_get_gpu_compute_partition": "SPX",
        "amdsmi_get_gpu_memory_partition": 2,
    }


class FakeSmi(types.ModuleType):
    """Devices are their numbers; ``calls`` counts what was asked."""

    AmdSmiException = AmdSmiException
    AmdSmiClkType = types.SimpleNamespace(GFX="GFX", MEM="MEM")
    AmdSmiTemperatureType = types.SimpleNamespace(HOTSPOT="HOTSPOT", VRAM="VRAM")
    AmdSmiTemperatureMetric = types.SimpleNamespace(CURRENT=0)

    def __init__(self) -> None:
        super().__init__("amdsmi")
        self.devices: list[dict[str, Any]] = [mi300x()]
        self.calls: list[str] = []
        self.init_code = 0

    def amdsmi_init(self) -> None:
        if self.init_code:
            raise AmdSmiLibraryException(self.init_code)

    def amdsmi_shut_down(self) -> None:
        self.calls.append("amdsmi_shut_down")

    def amdsmi_get_processor_handles(self) -> list[int]:
        return list(range(len(self.devices)))

    def __getattr__(self, name: str) -> Any:
        if not any(name in device for device in self.devices):
            raise AttributeError(name)

        def call(handle: int, kind: str | None = None, _: object = None) -> Any:
            self.calls.append(name)
            answer = self.devices[handle][name]
            if isinstance(answer, int):
                raise AmdSmiLibraryException(answer)
            return answer if kind is None else answer[kind]

        return call


class Run:
    """The probe on a fake machine."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        (self.root / "dev").mkdir(parents=True)
        (self.root / "dev/kfd").touch()
        for pid, parent in ((41, 1), (51, 41)):
            stat = self.root / f"proc/{pid}/stat"
            stat.parent.mkdir(parents=True)
            stat.write_text(f"{pid} (python) S {parent} {pid} {pid} 0", encoding="utf-8")
        self.file = TelemetryFile(folder / "telemetry.sqlite", Clock())
        self.probe = AmdProbe()
        self.out = self.file.recorder("amd", self.probe.signals)
        self.tasks: list[Task] = []

    def start(self, **environ: str) -> Run:
        self.tasks = list(self.probe.start(ProbeContext(41, environ=environ, root=self.root), self.out))
        return self

    def tick(self, times: int = 1) -> Telemetry:
        for _ in range(times):
            for task in self.tasks:
                task.run(self.out)
        self.file.flush()
        return read_telemetry(self.file.path)


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    module = FakeSmi()
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    return module


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.file.close()


def values(telemetry: Telemetry, signal: str, **labels: str) -> list[float]:
    found = [s for s in telemetry.series(signal, GPU) if s.labels == labels]
    return [round(float(v), 6) for v in found[0].value] if found else []


def missing(telemetry: Telemetry, signal: str) -> list[tuple[int | None, str]]:
    return [(m.code, m.reason) for m in telemetry.missing if (m.signal, m.scope) == (signal, GPU)]


def test_samples_have_the_units_of_the_signals(smi: FakeSmi, run: Run) -> None:
    telemetry = run.start().tick()
    expected: dict[str, float] = {
        "utilization_ratio": 0.96,
        "memory_utilization_ratio": 0.55,
        "memory_used_bytes": 100_000 * MIB,
        "sm_clock_mhz": 1800,
        "memory_clock_mhz": 1300,
        "power_watts": 700,
        "temperature_celsius": 71,
        "memory_temperature_celsius": 60,
        "energy_joules": 31,
        "pcie_link_generation": 5,
        "pcie_link_width": 8,
        "pcie_bytes_per_s": 1e9,
        "pcie_replay_count": 2,
        "ecc_corrected_count": 3,
        "ecc_uncorrected_count": 0,
        "nvlink_rx_bytes": 30 * 1024,
        "nvlink_tx_bytes": 3 * 1024,
    }
    assert {signal: values(telemetry, signal) for signal in expected} == {s: [v] for s, v in expected.items()}
    assert values(telemetry, "limited_ratio", reason="sw-power-cap") == [0.4]
    assert values(telemetry, "limited_ratio", reason="memory-thermal") == [0.05]
    assert values(telemetry, "process_memory_bytes", pid="51") == [1000]


def test_facts(smi: FakeSmi, run: Run) -> None:
    telemetry = run.start().tick()
    facts = {f.name: f.value for f in telemetry.all_facts if f.scope == GPU}
    assert facts == {
        "gpu_index": 0,
        "gpu_of_target": "yes",
        "gpu_name": "AMD Instinct MI300X",
        "gpu_uuid": UUID,
        "gpu_bus_id": "0000:0c:00.0",
        "gpu_architecture": "gfx942",
        "gpu_sm_count": 304,
        "gpu_memory_total_bytes": 196_592 * MIB,
        "gpu_sm_clock_max_mhz": 2100,
        "gpu_memory_clock_max_mhz": 1300,
        "gpu_power_limit_watts": 750,
        "gpu_power_limit_max_watts": 750,
        "gpu_pcie_generation_max": 5,
        "gpu_pcie_width_max": 16,
        "gpu_compute_partition": "SPX",
    }
    assert missing(telemetry, "gpu_memory_partition") == [(2, "not supported on this GPU (AMD SMI 2)")]
    assert missing(telemetry, "gpm") == [(None, "AMD GPUs have no GPM: hardware counters need rocprofiler")]


def test_what_is_not_supported_is_asked_once(smi: FakeSmi, run: Run) -> None:
    smi.devices[0]["amdsmi_get_gpu_activity"] = 2
    smi.devices[0]["amdsmi_get_power_info"] = {"current_socket_power": "N/A", "average_socket_power": "N/A"}
    smi.devices[0]["amdsmi_get_temp_metric"] = 7
    telemetry = run.start().tick(times=6)
    assert smi.calls.count("amdsmi_get_gpu_activity") == 1
    assert smi.calls.count("amdsmi_get_power_info") == 3
    assert telemetry.series("utilization_ratio") == [] == telemetry.series("power_watts")
    assert missing(telemetry, "gpu_activity") == [(2, "not supported on this GPU (AMD SMI 2)")]
    assert missing(telemetry, "power_watts") == [(None, "amdsmi gives no value (N/A), 3 times in a row")]
    ((code, reason),) = missing(telemetry, "temperature_celsius")
    assert code == 7 and "3 times in a row" in reason and "\n" not in reason
    assert values(telemetry, "sm_clock_mhz") == [1800] * 6


def test_a_busy_library_is_asked_again(smi: FakeSmi, run: Run) -> None:
    smi.devices[0]["amdsmi_get_power_info"] = 30
    run.start().tick(times=5)
    smi.devices[0]["amdsmi_get_power_info"] = {"current_socket_power": 500}
    telemetry = run.tick()
    assert values(telemetry, "power_watts") == [500] and missing(telemetry, "power_watts") == []


def test_an_older_package_lacks_functions_and_keys(smi: FakeSmi, run: Run) -> None:
    del smi.devices[0]["amdsmi_get_violation_status"]
    smi.devices[0]["amdsmi_get_pcie_info"] = {"pcie_static": {"max_pcie_speed": 32}, "pcie_metric": {"pcie_speed": 16}}
    telemetry = run.start().tick(times=2)
    assert missing(telemetry, "limited_ratio") == [(None, "not known to the installed amdsmi")]
    assert missing(telemetry, "pcie_link_width") == [(None, "not known to the installed amdsmi")]
    assert telemetry.facts("gpu_pcie_generation_max") == {GPU: 5}
    assert values(telemetry, "pcie_link_generation") == [4, 4]


@pytest.mark.parametrize(
    ("environ", "answers"),
    [
        ({}, ["yes", "yes"]),
        ({"ROCR_VISIBLE_DEVICES": "1"}, ["unknown", "likely"]),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, ["yes", "yes"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ["unknown", "unknown"]),
    ],
)
def test_which_gpus_are_the_targets(smi: FakeSmi, run: Run, environ: dict[str, str], answers: list[str]) -> None:
    smi.devices.append(mi300x() | {"amdsmi_get_gpu_device_uuid": OTHER})
    telemetry = run.start(**environ).tick()
    assert telemetry.facts("gpu_of_target") == dict(zip([GPU, f"gpu/{OTHER}"], answers, strict=True))


@pytest.mark.parametrize(
    "environ", [{"HIP_VISIBLE_DEVICES": ""}, {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "-1"}]
)
def test_a_target_that_sees_no_gpu_is_not_probed(smi: FakeSmi, run: Run, environ: dict[str, str]) -> None:
    with pytest.raises(Unavailable, match="hides every one"):
        run.start(**environ)
    assert smi.calls[-1] == "amdsmi_shut_down"


def test_stopping_shuts_the_library_down(smi: FakeSmi, run: Run) -> None:
    run.start().tick()
    run.probe.stop(run.out)
    assert smi.calls[-1] == "amdsmi_shut_down"


# AMD SMI that is not there


def test_a_machine_without_amd_is_told_from_one_without_the_package(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(Unavailable, match=r"pip install 'infprof\[amd\]'"):
        run.start()
    (run.root / "dev/kfd").unlink()
    with pytest.raises(Unavailable, match="No AMD GPU driver"):
        run.start()


def test_a_package_without_its_library_prints_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "amdsmi.py").write_text("print('Unable to find library')\nraise KeyError('libamd_smi.so')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    with pytest.raises(Unavailable, match=r"does not load \(KeyError\): it needs libamd_smi\.so"):
        run.start()
    assert capsys.readouterr().out == ""


def test_a_library_that_does_not_start(smi: FakeSmi, run: Run) -> None:
    smi.init_code = 34
    with pytest.raises(Unavailable, match=r"does not start: Error code: 34"):
        run.start()


def test_no_gpu_is_said_in_a_sentence(smi: FakeSmi, run: Run) -> None:
    smi.devices = []
    with pytest.raises(Unavailable, match="knows no GPU here"):
        run.start()
