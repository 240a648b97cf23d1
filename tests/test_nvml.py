"""The NVML probe, through the real nvidia-ml-py and a library that speaks NVML's binary interface."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from gpu_bench import H100, MIB, Bench, build, write_answers
from infprof.probes import Unavailable
from infprof.probes.gpu_signals import SIGNALS
from infprof.probes.nvml import NvmlProbe, sysfs_bus_id
from infprof.probes.visible_gpus import Gpu, visible_gpus
from infprof.telemetry import Telemetry

GPU = f"gpu/{H100['uuid']}"
OTHER = "GPU-99999999-8888-7777-6666-555555555555"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, monkeypatch, library)
    yield made
    made.probe.stop(made.out)
    made.file.close()


def values(telemetry: Telemetry, signal: str, scope: str = GPU, **labels: str) -> list[float]:
    found = [s for s in telemetry.series(signal, scope) if s.labels == labels]
    assert len(found) <= 1
    return [round(float(v), 6) for v in found[0].value] if found else []


def missing(telemetry: Telemetry, signal: str, scope: str = GPU) -> list[tuple[int | None, str]]:
    return [(m.code, m.reason) for m in telemetry.missing if (m.signal, m.scope) == (signal, scope)]


# A GPU that answers


def test_state_is_sampled_in_the_units_of_the_signals(bench: Bench) -> None:
    bench.start().tick("gpu")
    telemetry = bench.telemetry()
    expected = {
        "utilization_ratio": 0.97,
        "memory_utilization_ratio": 0.4,
        "memory_used_bytes": 60_000 * MIB,
        "sm_clock_mhz": 1755,
        "memory_clock_mhz": 2619,
        "clock_event_reasons": 4,
        "power_watts": 650,
        "temperature_celsius": 61,
    }
    assert {signal: values(telemetry, signal) for signal in expected} == {s: [v] for s, v in expected.items()}


def test_what_does_not_change_is_recorded_once(bench: Bench) -> None:
    telemetry = bench.start().telemetry()
    facts = {f.name: f.value for f in telemetry.all_facts if f.scope == GPU}
    assert facts == {
        "gpu_index": 0,
        "gpu_mig_mode": False,
        "gpu_of_target": "yes",
        "gpu_name": "NVIDIA H100 80GB HBM3",
        "gpu_uuid": H100["uuid"],
        "gpu_memory_total_bytes": 80_000 * MIB,
        "gpu_bus_id": "0000:0f:00.0",
        "gpu_compute_capability": "9.0",
        "gpu_sm_clock_max_mhz": 1980,
        "gpu_memory_clock_max_mhz": 2619,
        "gpu_power_limit_watts": 700.0,
        "gpu_power_limit_default_watts": 700.0,
        "gpu_slowdown_celsius": 87,
        "gpu_pcie_generation_max": 5,
        "gpu_pcie_width_max": 16,
    }
    assert telemetry.facts("driver_version") == {"": "570.86.15"}
    assert telemetry.facts("nvml_version") == {"": "12.570.86.15"}


def test_a_fact_without_an_answer_is_on_record(bench: Bench) -> None:
    bench.gpus[0]["nvmlDeviceGetMaxClockInfo"] = 999
    telemetry = bench.start().telemetry()
    assert telemetry.facts("gpu_sm_clock_max_mhz") == {}
    assert missing(telemetry, "gpu_sm_clock_max_mhz") == [(None, "the driver had no answer at the start")]


def test_counters_come_in_one_call_with_their_units(bench: Bench) -> None:
    fields = {3: 2, 4: 1, 74: 5_000_000, 82: 70, 83: 12_500, 94: 3, 138: 10, 139: 20, 142: 4, 145: 0, 197: 9, 198: 8}
    bench.gpus[0] |= {f"field.{number}": value for number, value in fields.items()}
    bench.start().tick("gpu-slow")
    telemetry = bench.telemetry()
    assert values(telemetry, "ecc_corrected_count") == [2] and values(telemetry, "ecc_uncorrected_count") == [1]
    assert values(telemetry, "limited_ns", reason="sw-power-cap") == [5_000_000]
    assert values(telemetry, "memory_temperature_celsius") == [70] and values(telemetry, "energy_joules") == [12.5]
    assert values(telemetry, "nvlink_tx_bytes") == [10 * 1024] and values(telemetry, "nvlink_rx_bytes") == [20 * 1024]
    assert values(telemetry, "pcie_tx_bytes") == [9] and values(telemetry, "pcie_rx_bytes") == [8]
    assert values(telemetry, "pcie_link_generation") == [5] and values(telemetry, "pcie_link_width") == [16]
    assert values(telemetry, "remapped_rows_corrected_count") == [4] and values(telemetry, "remap_failed_flag") == [0]
    assert values(telemetry, "pcie_replay_count") == [3]
    # One of the reasons that this GPU does not count is said by its own name.
    assert missing(telemetry, "limited_ns:hw-thermal") == [(3, "not supported on this GPU (NVML 3)")]


def test_an_old_driver_is_asked_by_the_old_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, monkeypatch, build(tmp_path, "old.so", old_driver=True))
    bench.start().tick(times=2)
    telemetry = bench.telemetry()
    assert values(telemetry, "clock_event_reasons") == [4, 4]
    assert values(telemetry, "temperature_celsius") == [61, 61]
    # The old structure counts the driver's reserve as used.
    assert values(telemetry, "memory_used_bytes") == [60_500 * MIB] * 2
    assert missing(telemetry, "gpm") == [(13, "not known to this driver (NVML 13)")]
    assert "gpu-counters" not in bench.tasks
    bench.probe.stop(bench.out)


@pytest.mark.parametrize(
    ("text", "address"),
    [("00000000:0F:00.0", "0000:0f:00.0"), ("00010000:81:00.0", "10000:81:00.0"), ("0000:41:00.0", "0000:41:00.0")],
)
def test_bus_ids_are_spelled_as_in_sysfs(text: str, address: str) -> None:
    assert sysfs_bus_id(text) == address


# What is not there


def test_mig_has_no_utilisation_and_that_is_not_zero(bench: Bench) -> None:
    part = "MIG-aaaaaaaa-0000-0000-0000-000000000000"
    bench.gpus[0] |= {
        "mig": 1,
        "slices": 7,
        "nvmlDeviceGetUtilizationRates": 3,
        "mig1.uuid": part,
        "mig1.name": "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "mig1.sms": 42,
        "mig1.memory_total": 20_480 * MIB,
        "mig1.memory_used": 20_480 * MIB,
        "mig1.processes": f"777:{20_000 * MIB}",
    }
    bench.on_the_host()
    bench.process(777, parent=41)
    bench.start().tick(times=3)
    telemetry = bench.telemetry()
    assert telemetry.series("utilization_ratio") == []
    assert missing(telemetry, "utilization_ratio") == [(3, "not supported on this GPU in MIG mode (NVML 3)")]
    assert missing(telemetry, "utilization_ratio", f"gpu/{part}") == [(3, "not supported on a MIG slice (NVML 3)")]
    assert values(telemetry, "memory_used_bytes", f"gpu/{part}") == [20_480 * MIB] * 3
    assert values(telemetry, "process_memory_bytes", f"gpu/{part}", pid="777") == [20_000 * MIB] * 3
    assert telemetry.facts("gpu_parent") == {f"gpu/{part}": H100["uuid"]}
    assert telemetry.facts("gpu_sm_count") == {f"gpu/{part}": 42}
    assert telemetry.facts("gpu_mig_mode") == {GPU: True}


def test_wsl_answers_unknown_and_the_gpu_stays(bench: Bench) -> None:
    bench.put("/proc/version", "Linux version 5.15.167.4-microsoft-standard-WSL2")
    bench.gpus[0] |= {
        "nvmlDeviceGetUtilizationRates": 999,
        "nvmlDeviceGetClockInfo": 3,
        "nvmlDeviceGetComputeRunningProcesses": 3,
    }
    bench.start().tick(times=6)
    telemetry = bench.telemetry()
    reason = "unknown error under WSL (NVML 999), 3 times in a row"
    assert missing(telemetry, "utilization_ratio") == [(999, reason)]
    assert telemetry.series("utilization_ratio") == []
    assert missing(telemetry, "sm_clock_mhz") == [(3, "not supported on this GPU (NVML 3)")]
    assert missing(telemetry, "process_memory_bytes") == [(3, "not supported on this GPU (NVML 3)")]
    assert len(values(telemetry, "memory_used_bytes")) == 6
    assert telemetry.facts("gpu_platform") == {"": "wsl"}
    # Neither comes back: what was given up is not asked again.
    bench.gpus[0] |= {"nvmlDeviceGetUtilizationRates": 0, "nvmlDeviceGetClockInfo": 0}
    bench.tick("gpu")
    assert bench.telemetry().series("utilization_ratio") == [] == bench.telemetry().series("sm_clock_mhz")


def test_a_passing_error_costs_only_its_own_ticks(bench: Bench) -> None:
    bench.start()
    for code in (0, 999, 999, 0, 999, 21, 21, 21, 0):
        bench.gpus[0]["nvmlDeviceGetUtilizationRates"] = code
        bench.tick("gpu")
    telemetry = bench.telemetry()
    assert len(values(telemetry, "utilization_ratio")) == 3
    assert missing(telemetry, "utilization_ratio") == []


def test_jetson_has_a_temperature_and_little_else(bench: Bench) -> None:
    bench.put("/proc/device-tree/model", "NVIDIA Jetson AGX Thor Developer Kit\0")
    bench.gpus[0] = {"name": "Thor", "uuid": H100["uuid"], "temperature": 48}
    bench.start().tick(times=2)
    telemetry = bench.telemetry()
    assert values(telemetry, "temperature_celsius") == [48, 48]
    assert {s.signal for s in telemetry.all_series} == {"temperature_celsius"}
    for signal in ("utilization_ratio", "memory_used_bytes", "pcie_link_generation", "pcie_link_width", "power_watts"):
        assert missing(telemetry, signal) == [(3, "not supported on this GPU (NVML 3)")]
    assert "gpu_memory_total_bytes" not in {f.name for f in telemetry.all_facts}
    assert telemetry.facts("gpu_platform") == {"": "jetson"}


def test_a_link_of_generation_0_is_no_link(bench: Bench) -> None:
    bench.gpus[0] |= {"gen": 0, "width": 0}
    bench.start().tick("gpu-slow", times=2)
    telemetry = bench.telemetry()
    assert telemetry.series("pcie_link_generation") == []
    assert missing(telemetry, "pcie_link_width") == [(None, "the driver reports no PCIe link")]


def test_a_lost_gpu_is_left_alone_and_the_others_go_on(bench: Bench) -> None:
    bench.gpus[1] = dict(H100) | {"uuid": OTHER, "bus": "00000000:1F:00.0"}
    bench.start().tick("gpu", "gpu-slow")
    bench.gpus[0]["nvmlDeviceGetUtilizationRates"] = 15
    bench.tick("gpu", "gpu-slow", times=4)
    telemetry = bench.telemetry()
    assert len(values(telemetry, "temperature_celsius")) == 1
    assert len(values(telemetry, "temperature_celsius", f"gpu/{OTHER}")) == 5
    events = list(telemetry.events("gpu-lost"))
    assert [(e.scope, e.value) for e in events] == [(GPU, 15)]


# PCIe throughput, from the best source there is


def test_byte_counters_make_the_blocking_call_needless(bench: Bench) -> None:
    bench.gpus[0] |= {"field.197": 1e12, "field.198": 2e12, "pcie_tx_kb": 7, "pcie_rx_kb": 8}
    bench.start().tick(times=2)
    assert bench.telemetry().series("pcie_tx_bytes_per_s") == []


def test_without_counters_and_gpm_the_call_of_20_ms_is_used(bench: Bench) -> None:
    bench.gpus[0] |= {"pcie_tx_kb": 7, "pcie_rx_kb": 8}
    bench.start().tick(times=2)
    telemetry = bench.telemetry()
    assert values(telemetry, "pcie_tx_bytes_per_s", source="20 ms window") == [7000, 7000]
    assert values(telemetry, "pcie_rx_bytes_per_s", source="20 ms window") == [8000, 8000]


@pytest.mark.parametrize(("kind", "second"), [(1, 2e6), (3, 10.0)])
def test_a_counter_that_wraps_is_not_believed(bench: Bench, kind: int, second: float) -> None:
    bench.gpus[0] |= {"field.197": 1e6, "field.198": 1e6, "field_type.197": kind, "pcie_tx_kb": 7, "pcie_rx_kb": 8}
    bench.start().tick()
    bench.gpus[0] |= {"field.197": second, "field.198": 2e6}
    bench.tick()
    telemetry = bench.telemetry()
    assert missing(telemetry, "pcie_tx_bytes") == [(None, "the driver's byte counter wraps between two readings")]
    assert values(telemetry, "pcie_rx_bytes") == [1e6, 2e6]


# GPM


def gpm(bench: Bench) -> None:
    metrics = {1: 90, 2: 80, 3: 40, 4: 5, 5: 62.5, 7: 60, 10: 35, 12: 10, 20: 100, 21: 200, 60: 300, 61: 400}
    bench.gpus[0] |= {"gpm": 1, "pcie_tx_kb": 7} | {f"gpm.{number}": value for number, value in metrics.items()}


def test_gpm_gives_means_between_neighbouring_samples(bench: Bench) -> None:
    gpm(bench)
    bench.start().tick(times=3)
    telemetry = bench.telemetry()
    # The fake multiplies by the distance of the two samples: 1 for neighbours in the right order.
    assert values(telemetry, "gpm_graphics_active_ratio") == [0.9, 0.9]
    assert values(telemetry, "gpm_sm_active_ratio") == [0.8, 0.8]
    assert values(telemetry, "gpm_sm_occupancy_ratio") == [0.4, 0.4]
    assert values(telemetry, "gpm_tensor_active_ratio") == [0.625, 0.625]
    assert values(telemetry, "gpm_dram_ratio") == [0.35, 0.35]
    assert values(telemetry, "pcie_tx_bytes_per_s", source="gpm") == [100 * MIB] * 2
    assert values(telemetry, "pcie_rx_bytes_per_s", source="gpm") == [200 * MIB] * 2
    assert values(telemetry, "nvlink_rx_bytes_per_s", source="gpm") == [300 * MIB] * 2
    assert values(telemetry, "nvlink_tx_bytes_per_s", source="gpm") == [400 * MIB] * 2
    assert missing(telemetry, "gpm_fp64_active_ratio") == [(3, "not supported on this GPU (NVML 3)")]
    # GPM has the PCIe rates, so the blocking call is not made.
    assert values(telemetry, "pcie_tx_bytes_per_s", source="20 ms window") == []


def test_gpm_samples_are_never_closer_than_nvml_allows(bench: Bench) -> None:
    gpm(bench)
    bench.start().tick("gpu-counters")
    bench.clock.now += 100_000_000
    bench.tasks["gpu-counters"].run(bench.out)
    assert bench.telemetry().series("gpm_sm_active_ratio") == []
    bench.clock.now += 10_000_000
    bench.tasks["gpu-counters"].run(bench.out)
    assert values(bench.telemetry(), "gpm_sm_active_ratio") == [0.8]


def test_a_gap_in_gpm_is_not_averaged_over(bench: Bench) -> None:
    gpm(bench)
    bench.start().tick("gpu-counters", times=2)
    bench.gpus[0]["nvmlGpmSampleGet"] = 999
    bench.tick("gpu-counters")
    bench.gpus[0]["nvmlGpmSampleGet"] = 0
    bench.tick("gpu-counters", times=2)
    assert values(bench.telemetry(), "gpm_sm_active_ratio") == [0.8, 0.8]


def test_before_hopper_there_is_no_gpm_and_the_reason_is_on_record(bench: Bench) -> None:
    bench.gpus[0] |= {"gpm": 0, "pcie_tx_kb": 7, "pcie_rx_kb": 8}
    bench.start().tick()
    telemetry = bench.telemetry()
    assert "gpu-counters" not in bench.tasks
    reason = "this GPU has no GPM counters: they came with Hopper (compute capability 9.0)"
    assert missing(telemetry, "gpm") == [(None, reason)]


# Errors as they happen


def test_xids_are_events_of_their_gpu(bench: Bench) -> None:
    bench.gpus[0]["event_types"] = 0x1FF
    bench.gpus[1] = dict(H100) | {"uuid": OTHER, "event_types": 0x1FF}
    bench.start()
    bench.tick("gpu-events")
    bench.more = {"event__serial": 1, "event__gpu": 1, "event__data": 79}
    bench.tick("gpu-events")
    bench.more |= {"event__serial": 2, "event__gpu": 0, "event__data": 4711}
    bench.tick("gpu-events", "gpu-events")
    events = list(bench.telemetry().events("xid"))
    assert [(e.scope, e.value) for e in events] == [(f"gpu/{OTHER}", 79), (GPU, 4711)]
    assert events[0].text == "XID 79: the GPU has fallen off the bus"
    assert events[1].text == "XID 4711: see the list of XID errors of NVIDIA"


def test_a_gpu_without_error_events_says_so(bench: Bench) -> None:
    bench.start()
    assert "gpu-events" not in bench.tasks
    assert missing(bench.telemetry(), "xid") == [(None, "this GPU gives no error events")]


def test_an_event_wait_that_fails_is_given_up(bench: Bench) -> None:
    bench.gpus[0]["event_types"] = 0x8
    bench.start()
    bench.more = {"nvmlEventSetWait": 999}
    bench.tick("gpu-events", times=4)
    assert missing(bench.telemetry(), "xid", "") == [(999, "unknown error (NVML 999), 3 times in a row")]


# Whose memory it is


def test_memory_is_told_apart_on_the_host(bench: Bench) -> None:
    bench.on_the_host()
    bench.process(41)
    bench.process(50, parent=41)
    bench.process(51, parent=50)
    bench.process(60, parent=1, session=41)  # its parent has ended
    bench.process(900)
    bench.gpus[0]["processes"] = "51:1000,60:20,900:3,901:4"
    bench.start().tick("gpu-slow")
    telemetry = bench.telemetry()
    assert values(telemetry, "process_memory_bytes", pid="51") == [1000]
    assert values(telemetry, "process_memory_bytes", pid="60") == [20]
    assert values(telemetry, "other_process_memory_bytes") == [7]
    assert {s.labels["pid"] for s in telemetry.series("process_memory_bytes")} == {"51", "60"}


def test_in_a_container_memory_is_not_attributable(bench: Bench) -> None:
    bench.put("/proc/41/status", "Name:\tpython\nNSpid:\t41\n")
    bench.process(41)
    bench.start().tick("gpu-slow")
    bench.gpus[0]["processes"] = f"28290:{10_916 * MIB}"
    bench.tick("gpu-slow")
    telemetry = bench.telemetry()
    ((code, reason),) = missing(telemetry, "process_memory_bytes")
    assert code is None and "not attributable (pid namespace)" in reason
    assert telemetry.series("process_memory_bytes") == [] == telemetry.series("other_process_memory_bytes")
    assert values(telemetry, "unattributed_process_memory_bytes") == [10_916 * MIB]
    assert "most likely the target (a hint)" in telemetry.facts("gpu_process_hint")[GPU]


def test_no_hint_where_the_gpu_was_held_before(bench: Bench) -> None:
    bench.gpus[0]["processes"] = "28290:1000"
    bench.start().tick("gpu-slow", times=2)
    assert bench.telemetry().facts("gpu_process_hint") == {}


def test_memory_that_the_driver_does_not_tell_is_not_zero(bench: Bench) -> None:
    bench.on_the_host()
    bench.gpus[0]["processes"] = "900:?"
    bench.start().tick("gpu-slow")
    assert bench.telemetry().series("other_process_memory_bytes") == []


# Which GPUs

PAIR = (Gpu("GPU-t400", "NVIDIA T400"), Gpu("GPU-4090uuid", "NVIDIA GeForce RTX 4090"))
TWINS = (Gpu("GPU-a1", "H100"), Gpu("GPU-a2", "H100"), Gpu("GPU-b3", "H100"))
SLICED = (Gpu("GPU-a1", "A100", ("MIG-s1", "MIG-s2")), Gpu("GPU-b2", "A100"))


@pytest.mark.parametrize(
    ("gpus", "value", "order", "answers"),
    [
        (PAIR, None, None, "yes yes"),
        (PAIR, "1", None, "unknown unknown"),
        (PAIR, "1", "PCI_BUS_ID", "no yes"),
        (PAIR, "1", "FASTEST_FIRST", "unknown unknown"),
        (PAIR, "1,0", None, "yes yes"),
        (PAIR, "GPU-4090uuid", None, "no yes"),
        (PAIR, "GPU-409", None, "no yes"),
        (PAIR, "GPU-", None, "no no"),
        (PAIR, "-1,0", None, "no no"),
        (PAIR, "", None, "no no"),
        (PAIR, "0,-1,1", "PCI_BUS_ID", "yes no"),
        (PAIR, "7", "PCI_BUS_ID", "no no"),
        (PAIR, "GPU-none", None, "no no"),
        (TWINS, "0,2", None, "likely unknown likely"),
        (TWINS, "GPU-a,0", None, "no no no"),
        (SLICED, "MIG-s2", None, "yes no yes no"),
        (SLICED, "GPU-a1", None, "yes unknown unknown no"),
    ],
)
def test_which_gpus_are_the_targets(gpus: tuple[Gpu, ...], value: str | None, order: str | None, answers: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": order}
    visible = visible_gpus({k: v for k, v in environ.items() if v is not None}, gpus)
    everything = [uuid for gpu in gpus for uuid in (gpu.uuid, *gpu.slices)]
    assert visible.target == dict(zip(everything, answers.split(), strict=True))
    assert visible.none == (set(answers.split()) == {"no"})


def test_gpus_of_others_are_not_sampled(bench: Bench) -> None:
    bench.gpus[1] = dict(H100) | {"uuid": OTHER}
    bench.start(CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID").tick("gpu")
    telemetry = bench.telemetry()
    assert telemetry.scopes("sm_clock_mhz") == [f"gpu/{OTHER}"]
    assert telemetry.facts("gpu_of_target") == {GPU: "no", f"gpu/{OTHER}": "yes"}


def test_where_the_order_is_unknown_all_are_sampled(bench: Bench) -> None:
    bench.gpus[1] = dict(H100) | {"uuid": OTHER, "name": "NVIDIA T400"}
    bench.start(CUDA_VISIBLE_DEVICES="1").tick("gpu")
    telemetry = bench.telemetry()
    assert len(telemetry.scopes("sm_clock_mhz")) == 2
    assert set(telemetry.facts("gpu_of_target").values()) == {"unknown"}
    assert "cannot be told" in telemetry.facts("gpu_selection")[""]


def test_a_target_that_sees_no_gpu_is_not_probed(bench: Bench) -> None:
    with pytest.raises(Unavailable, match="sees no GPU"):
        bench.start(CUDA_VISIBLE_DEVICES="-1,0")


# NVML that does not start


@pytest.mark.parametrize(
    ("code", "files", "sentence"),
    [
        (9, (), "No NVIDIA driver on this machine (NVML 9)"),
        (12, (), "No NVIDIA driver on this machine (NVML 12)"),
        (12, ("/proc/driver/nvidia/version",), "`utility` capability"),
        (4, (), "allow access to /dev/nvidia*"),
        (999, (), "NVML does not start: Unknown Error (NVML 999)."),
    ],
)
def test_why_nvml_does_not_start(bench: Bench, code: int, files: tuple[str, ...], sentence: str) -> None:
    for path in files:
        bench.put(path, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  560.35.03  Fri Aug 16 21:39:15 UTC 2024\n")
    bench.more = {"nvmlInitWithFlags": code}
    with pytest.raises(Unavailable) as caught:
        bench.start()
    assert sentence in str(caught.value)


@pytest.mark.parametrize("more", [{"count": 0}, {"nvmlDeviceGetCount": 999}, {"nvmlDeviceGetHandleByIndex": 15}])
def test_no_gpu_is_said_in_a_sentence(bench: Bench, more: dict[str, object]) -> None:
    bench.more = more
    with pytest.raises(Unavailable, match="NVML"):
        bench.start()


START = """
import sys
from pathlib import Path
from infprof.probes import ProbeContext, Unavailable
from infprof.probes.nvml import NvmlProbe
try:
    NvmlProbe().start(ProbeContext(1, root=Path(sys.argv[1])), None)
except Unavailable as why:
    print(why)
"""


def run_with_library(folder: Path, answers: Path) -> str:
    environ = os.environ | {"LD_LIBRARY_PATH": str(folder), "FAKE_NVML": str(answers)}
    done = subprocess.run([sys.executable, "-c", START, str(folder)], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_library_that_differs_from_the_kernel_module_names_both(tmp_path: Path) -> None:
    # Found as any program finds it: by the loader, in another process.
    build(tmp_path, "libnvidia-ml.so.560.94")
    (tmp_path / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.560.94")
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build\n")
    write_answers(tmp_path / "answers", {}, nvmlInitWithFlags=18)
    said = run_with_library(tmp_path, tmp_path / "answers")
    assert "the kernel module is 560.35.03, the library 560.94 (NVML 18)" in said
    assert "or reboot" in said and len(said.splitlines()) == 1


def test_a_machine_without_the_library_has_no_driver(tmp_path: Path) -> None:
    # The loader is asked in another process: this one has the fake loaded under the library's name.
    found = subprocess.run(
        [sys.executable, "-c", "import ctypes; ctypes.CDLL('libnvidia-ml.so.1')"], capture_output=True
    )
    if found.returncode == 0:
        pytest.skip("this machine has the NVIDIA library")
    said = run_with_library(tmp_path, tmp_path / "answers")
    assert said == "No NVIDIA driver on this machine (NVML 12): there is nothing for this probe to read."


# Stopping


def test_stopping_gives_everything_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    gpm(bench)
    bench.gpus[0]["event_types"] = 0x8
    bench.start().tick()
    called: list[str] = []
    for name in ("nvmlGpmSampleFree", "nvmlEventSetFree", "nvmlShutdown"):
        original = getattr(pynvml, name)
        monkeypatch.setattr(pynvml, name, lambda *a, n=name, o=original: (called.append(n), o(*a)))
    bench.probe.stop(bench.out)
    assert called == ["nvmlGpmSampleFree", "nvmlGpmSampleFree", "nvmlEventSetFree", "nvmlShutdown"]


def test_a_library_that_a_task_is_stuck_in_is_left_loaded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.start()
    inside, go_on, closed = threading.Event(), threading.Event(), []
    original = pynvml.nvmlDeviceGetPowerUsage

    def stuck(handle: object) -> int:
        inside.set()
        assert go_on.wait(30)
        return int(original(handle))

    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", stuck)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: closed.append(True))
    thread = threading.Thread(target=bench.tick, args=("gpu",))
    thread.start()
    assert inside.wait(30)
    bench.probe.stop(bench.out)
    go_on.set()
    thread.join(30)
    assert closed == [] and not thread.is_alive()


def test_a_probe_that_could_not_start_can_be_stopped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: closed.append(True))
    bench.more = {"nvmlInitWithFlags": 9}
    with pytest.raises(Unavailable):
        bench.start()
    NvmlProbe().stop(bench.out)
    assert closed == []


def test_every_signal_says_what_it_is() -> None:
    assert all(signal.unit and signal.kind in ("gauge", "counter") and signal.meaning for signal in SIGNALS.values())
    with_unit = ("ratio", "bytes", "bytes_per_s", "ns", "mhz", "watts", "celsius", "joules")
    assert all(name.endswith("_" + s.unit) for name, s in SIGNALS.items() if s.unit in with_unit)
