"""Measures from GPU samples, on recordings that are written sample by sample, and cases that people met."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from gpu_bench import H100, Bench, build
from infprof import rules
from infprof.measures.gpu_telemetry import add_gpu_telemetry, gpu_paces, join_gpu
from infprof.measures.names import MEASURES
from infprof.measures.telemetry import TelemetryScope
from infprof.probes.gpu_signals import SIGNALS
from infprof.resources import rules_dir
from infprof.results import KernelRow, Measures, Where
from infprof.telemetry import Event, Fact, Missing, Series, Telemetry

SECOND = 1_000_000_000
GPU, PEER = "gpu/GPU-a", "gpu/GPU-b"


def series(
    signal: str, values: Sequence[float], scope: str = GPU, period_ns: int = SECOND, start_ns: int = 0, **labels: str
) -> Series:
    times = start_ns + period_ns * np.arange(len(values), dtype=np.int64)
    about = SIGNALS[signal]
    return Series("nvml", signal, about.unit, about.kind, scope, labels, times, np.array(values, dtype=np.float64))


def recording(
    *rows: Series,
    facts: Mapping[str, object] | None = None,
    missing: Mapping[str, str] | None = None,
    events: Sequence[Event] = (),
    scope: str = GPU,
) -> Telemetry:
    return Telemetry(
        list(rows),
        [Fact("nvml", name, scope, value) for name, value in (facts or {}).items()],
        list(events),
        [Missing("nvml", signal, scope, 3, reason) for signal, reason in (missing or {}).items()],
    )


def measured(telemetry: Telemetry, gpu: str | None = GPU, low_ns: int = 0, high_ns: int = 10**15) -> Measures:
    measures = Measures()
    add_gpu_telemetry(measures, telemetry, TelemetryScope(low_ns, high_ns, gpu))
    return measures


def value(measures: Measures, name: str) -> float | None:
    found = measures.value(name)
    return None if found is None else round(float(found), 6)


def source(measures: Measures, name: str) -> str:
    measure = measures.get(name)
    assert measure is not None
    return measure.source


GPU_MEASURES = {m.name for m in measured(Telemetry())}


# What is not there


@pytest.mark.parametrize("gpu", [None, GPU])
def test_without_samples_every_measure_says_why_it_has_no_value(gpu: str | None) -> None:
    measures = measured(Telemetry(), gpu)
    assert len(GPU_MEASURES) > 50 and {m.name for m in measures} == GPU_MEASURES
    assert all(m.value is None and m.source and m.unit == MEASURES[m.name].unit for m in measures)
    if gpu is None:
        assert {m.source for m in measures} == {"no GPU was watched"}


def test_the_source_of_an_absent_value_is_the_probes_reason() -> None:
    telemetry = recording(
        series("memory_used_bytes", [5, 5]), missing={"utilization_ratio": "not supported on a MIG slice (NVML 3)"}
    )
    measures = measured(telemetry)
    assert value(measures, "gpu_utilization_mean_ratio") is None
    assert source(measures, "gpu_utilization_mean_ratio") == "not supported on a MIG slice (NVML 3)"
    assert value(measures, "gpu_load_ratio") is None
    assert value(measures, "gpu_memory_used_peak_bytes") == 5


def test_ranks() -> None:
    ranks = {m.name: m.rank for m in measured(Telemetry())}
    assert ranks["gpu_utilization_mean_ratio"] == "E"
    assert ranks["gpm_tensor_active_ratio"] == "A"
    assert ranks["sm_clock_lost_ratio"] == ranks["clock_limited_thermal_ratio"] == "C"


def test_samples_outside_the_scope_do_not_count() -> None:
    telemetry = recording(series("temperature_celsius", [90, 50, 60, 95]))
    assert value(measured(telemetry, low_ns=SECOND, high_ns=3 * SECOND), "gpu_temperature_peak_celsius") == 60
    other = recording(series("temperature_celsius", [90], PEER))
    assert value(measured(other), "gpu_temperature_peak_celsius") is None


# Usage, memory, power


def test_usage_and_memory() -> None:
    telemetry = recording(
        series("utilization_ratio", [0.0, 1.0, 0.8, 0.2]),
        series("memory_used_bytes", [10, 10, 30, 40]),
        series("process_memory_bytes", [5, 6, 7], pid="1"),
        series("process_memory_bytes", [20, 1], pid="2"),
        series("other_process_memory_bytes", [3, 4]),
        facts={"gpu_memory_total_bytes": 80},
    )
    measures = measured(telemetry)
    assert value(measures, "gpu_utilization_mean_ratio") == 0.5
    assert value(measures, "gpu_utilization_peak_ratio") == 1.0
    assert value(measures, "gpu_load_ratio") == 0.5
    assert value(measures, "gpu_memory_used_mean_bytes") == 22
    assert value(measures, "gpu_memory_used_peak_ratio") == 0.5
    assert value(measures, "gpu_memory_growth_bytes") == 30
    assert value(measures, "target_memory_peak_bytes") == 25
    assert value(measures, "other_process_memory_peak_bytes") == 4


def test_the_energy_counter_goes_before_samples_of_power() -> None:
    rows = [series("power_watts", [100, 300])]
    assert value(measured(recording(*rows)), "gpu_power_mean_watts") == 200
    rows.append(series("energy_joules", [1000, 1600, 2300]))
    measures = measured(recording(*rows, facts={"gpu_power_limit_watts": 700}))
    assert value(measures, "gpu_power_mean_watts") == 650
    assert source(measures, "gpu_power_mean_watts") == "energy counter"
    assert value(measures, "gpu_power_of_limit_ratio") == round(650 / 700, 6)


# Clocks


def clocks(reasons: Sequence[int], clock: Sequence[float], load: Sequence[float], *more: Series) -> Measures:
    rows = (
        series("clock_event_reasons", reasons),
        series("sm_clock_mhz", clock),
        series("utilization_ratio", load),
        *more,
    )
    return measured(recording(*rows, facts={"gpu_sm_clock_max_mhz": 2000}))


def test_clocks_are_judged_under_load_only() -> None:
    measures = clocks([1, 4, 4, 4], [200, 1600, 1400, 1500], [0, 1, 1, 1])
    assert value(measures, "sm_clock_load_mhz") == 1500
    assert value(measures, "sm_clock_lost_ratio") == 0.25
    # A quarter of the three quarters under load, of the 3 s that were sampled.
    assert value(measures, "sm_clock_lost_ns") == round(0.25 * 0.75 * 3 * SECOND)
    assert value(measures, "clock_limited_power_ratio") == 0.75


def test_idle_clocks_are_no_loss() -> None:
    measures = clocks([1, 1], [200, 200], [0, 0])
    assert value(measures, "sm_clock_lost_ratio") is None
    assert source(measures, "sm_clock_lost_ratio") == "the GPU was never under load"
    assert value(measures, "clock_limited_power_ratio") == 0


@pytest.mark.parametrize(
    ("bits", "group"),
    [
        (0x4, "power"),
        (0x80, "power"),
        (0x200, "power"),
        (0x20, "thermal"),
        (0x40, "thermal"),
        (0x10, "other"),
        (0x8, "other"),
        (0x2, "setting"),
        (0x400, None),
        (0x100, None),
        (0x1, None),
        (0x0, None),
    ],
)
def test_reason_bits_by_group(bits: int, group: str | None) -> None:
    measures = clocks([bits] * 4, [1500] * 4, [1] * 4)
    shares = {g: value(measures, f"clock_limited_{g}_ratio") for g in ("power", "thermal", "other", "setting")}
    assert shares == {g: float(g == group) for g in shares}


def test_a_blink_of_the_hardware_slowdown_is_a_change_of_state() -> None:
    measures = clocks([0, 8, 0, 0, 8, 8, 0, 0], [1500] * 8, [1] * 8)
    assert value(measures, "clock_limited_other_ratio") == 0.25
    assert value(measures, "hw_slowdown_ratio") == 0.25


def test_the_drivers_counters_go_before_sampled_bits() -> None:
    counted = [
        series("limited_ns", [0, 2e8, 4e8], reason="sw-thermal"),
        series("limited_ns", [0, 0, 1e9], reason="hw-thermal"),
    ]
    measures = clocks([0, 0, 0], [1500] * 3, [1] * 3, *counted)
    # 0.4 s and 1 s of 2 s, which may be the same time: the larger is sure.
    assert value(measures, "clock_limited_thermal_ratio") == 0.5
    assert source(measures, "clock_limited_thermal_ratio") == "the driver's own counters"
    assert value(measures, "clock_limited_power_ratio") == 0


def test_a_reason_that_the_driver_does_not_count_is_taken_from_the_bits() -> None:
    boost = series("limited_ns", [0, 0, 0], reason="sync-boost")
    measures = clocks([8, 8, 8], [1500] * 3, [1] * 3, boost)
    assert value(measures, "clock_limited_other_ratio") == 1.0


def test_the_shares_that_amd_gives_count_too() -> None:
    shares = series("limited_ratio", [0.2, 0.4], reason="memory-thermal")
    assert value(measured(recording(shares)), "clock_limited_thermal_ratio") == 0.3


def test_without_utilisation_load_comes_from_the_idle_reason() -> None:
    rows = series("clock_event_reasons", [1, 4, 0]), series("sm_clock_mhz", [200, 1000, 2000])
    measures = measured(recording(*rows, facts={"gpu_sm_clock_max_mhz": 2000}))
    assert value(measures, "gpu_load_ratio") == round(2 / 3, 6)
    assert value(measures, "sm_clock_load_mhz") == 1500


# Links


def link(generations: Sequence[float], widths: Sequence[float], load: Sequence[float], *more: Series) -> Measures:
    rows = (
        series("pcie_link_generation", generations),
        series("pcie_link_width", widths),
        series("utilization_ratio", load),
        *more,
    )
    return measured(recording(*rows, facts={"gpu_pcie_generation_max": 4, "gpu_pcie_width_max": 16}))


def test_a_link_that_rests_while_idle_is_not_downgraded() -> None:
    # D-13, first series: gen 1 in five idle samples, gen 4 in fifty under load.
    measures = link([1] * 5 + [4] * 50, [16] * 55, [0] * 5 + [1] * 50)
    assert value(measures, "pcie_link_load_generation") == 4
    assert value(measures, "pcie_link_lost_ratio") == 0


def test_a_narrow_link_under_load_is_downgraded() -> None:
    # D-13, second series: x4 of x16.
    measures = link([1] * 5 + [4] * 50, [4] * 55, [0] * 5 + [1] * 50)
    assert value(measures, "pcie_link_load_width") == 4
    assert value(measures, "pcie_link_peak_bytes_per_s") == pytest.approx(7.9e9, rel=0.01)
    assert value(measures, "pcie_link_lost_ratio") == 0.75


def test_an_idle_gpu_says_nothing_about_its_link() -> None:
    measures = link([1] * 5, [16] * 5, [0] * 5)
    assert value(measures, "pcie_link_lost_ratio") is None
    assert source(measures, "pcie_link_lost_ratio") == "judged only under load, of which there was none"


def test_rates_come_from_the_best_source() -> None:
    window = series("pcie_tx_bytes_per_s", [1e9], source="20 ms window")
    by_gpm = series("pcie_tx_bytes_per_s", [2e9, 4e9], source="gpm")
    counter = series("pcie_tx_bytes", [0, 8e9, 16e9])
    for rows, rate in (([window], 1e9), ([window, by_gpm], 3e9), ([window, by_gpm, counter], 8e9)):
        assert value(measured(recording(*rows)), "pcie_tx_bytes_per_s") == rate
    wraps = recording(window, by_gpm, counter, missing={"pcie_tx_bytes": "the byte counter wraps"})
    assert value(measured(wraps), "pcie_tx_bytes_per_s") == 3e9
    assert source(measured(wraps), "pcie_tx_bytes_per_s") == "gpm"


def test_rates_over_the_link_as_it_is_linked() -> None:
    measures = link([4] * 3, [4] * 3, [1] * 3, series("pcie_rx_bytes", [0, 4e9, 8e9]))
    assert value(measures, "pcie_rx_link_ratio") == pytest.approx(4 / 7.877, rel=0.001)
    assert value(measures, "pcie_tx_link_ratio") is None


def test_nvlink_rates() -> None:
    measures = measured(recording(series("nvlink_tx_bytes", [0, 10, 20]), series("nvlink_rx_bytes", [5, 5])))
    assert value(measures, "nvlink_tx_bytes_per_s") == 10 and value(measures, "nvlink_rx_bytes_per_s") == 0


# Errors


def test_errors_are_counted_in_the_window() -> None:
    events = [Event("nvml", t * SECOND, "xid", GPU, f"XID {x}", x) for t, x in ((0, 13), (1, 45), (2, 79), (3, 48))]
    events.append(Event("nvml", 2 * SECOND, "xid", PEER, "XID 31", 31))
    rows = series("ecc_corrected_count", [7, 7, 9, 9]), series("ecc_uncorrected_count", [1, 1, 1, 2])
    measures = measured(recording(*rows, events=events), low_ns=SECOND, high_ns=4 * SECOND)
    assert value(measures, "xid_count") == 2 and value(measures, "xid_first_number") == 79
    assert value(measures, "ecc_corrected_count") == 2 and value(measures, "ecc_uncorrected_count") == 1
    assert value(measures, "gpu_lost_count") == 0


def test_no_error_event_is_zero_only_where_somebody_listened() -> None:
    sampled = series("temperature_celsius", [50])
    assert value(measured(recording(sampled)), "xid_count") == 0
    deaf = measured(recording(sampled, missing={"xid": "this GPU gives no error events"}))
    assert value(deaf, "xid_count") is None
    assert source(deaf, "xid_count") == "this GPU gives no error events"


# GPM


def test_gpm_means_are_those_of_active_samples() -> None:
    rows = (
        series("gpm_graphics_active_ratio", [0.0, 1.0, 0.8]),
        series("gpm_tensor_active_ratio", [0.0, 0.7, 0.5]),
        series("gpm_fp32_active_ratio", [0.0, 0.1, 0.1]),
        series("gpm_dram_ratio", [0.0, 0.2, 0.4]),
    )
    measures = measured(recording(*rows))
    assert value(measures, "gpm_graphics_active_ratio") == 0.6
    assert value(measures, "gpm_tensor_active_ratio") == 0.6
    assert value(measures, "gpm_dram_ratio") == 0.3
    assert value(measures, "gpm_compute_ratio") == 0.6
    assert source(measures, "gpm_compute_ratio") == "largest pipe: tensor"
    assert value(measures, "gpm_fp64_active_ratio") is None


def test_resident_warps_are_no_computing() -> None:
    measures = measured(recording(series("gpm_sm_active_ratio", [0.99]), series("gpm_fp16_active_ratio", [0.05])))
    assert value(measures, "gpm_compute_ratio") == 0.05


def test_a_gpu_without_gpm_says_so() -> None:
    measures = measured(recording(series("temperature_celsius", [50]), missing={"gpm": "no GPM before Hopper"}))
    assert {source(measures, n) for n in GPU_MEASURES if n.startswith("gpm_")} == {"no GPM before Hopper"}


# Several GPUs


@pytest.fixture
def hot_pair(shared_traces: Path) -> Telemetry:
    """D-12: 200 samples of two GPUs, of which number 1 is hot."""
    path = shared_traces.parent / "cases" / "data" / "nvml-thermal.csv"
    if not path.is_file():
        pytest.skip("needs the shared cases, which a clone does not have")
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found: list[Series] = []
    for gpu, scope in (("0", GPU), ("1", PEER)):
        mine = [row for row in rows if row["gpu"] == gpu]
        found += [
            series("sm_clock_mhz", [float(r["sm_clock_mhz"]) for r in mine], scope),
            series("temperature_celsius", [float(r["temp_c"]) for r in mine], scope),
            series("clock_event_reasons", [int(r["reasons_hex"], 16) for r in mine], scope),
            series("utilization_ratio", [float(r["util_gpu_pct"]) / 100 for r in mine], scope),
        ]
    facts = [Fact("nvml", "gpu_sm_clock_max_mhz", scope, 1980) for scope in (GPU, PEER)]
    return Telemetry(found, facts)


def test_one_hot_gpu_beside_its_peer(hot_pair: Telemetry) -> None:
    fast, slow = measured(hot_pair), measured(hot_pair, PEER)
    assert value(slow, "clock_limited_thermal_ratio") == 1.0
    assert 1 - (value(slow, "sm_clock_lost_ratio") or 0) == pytest.approx(0.24, abs=0.01)
    assert (value(fast, "sm_clock_lost_ratio") or 0) < 0.005 and value(fast, "clock_limited_thermal_ratio") == 0
    assert value(fast, "clock_limited_power_ratio") == pytest.approx(0.2, abs=0.05)
    # The fast one knows who holds it up.
    for measures in (fast, slow):
        assert value(measures, "gpu_clock_spread_ratio") == pytest.approx(0.76, abs=0.01)
        assert value(measures, "slowest_gpu_thermal_ratio") == 1.0
        assert source(measures, "slowest_gpu_clock_ratio") == "2 GPUs; the slowest is GPU-b"
    assert value(fast, "sm_clock_behind_peers_ratio") == 0
    assert value(slow, "sm_clock_behind_peers_ratio") == pytest.approx(0.76, abs=0.01)
    assert value(fast, "gpu_temperature_spread_celsius") == pytest.approx(24.5, abs=1)


def paces(**target: str) -> Iterator[str]:
    rows = [
        series(signal, [v, v], f"gpu/{gpu}")
        for gpu, clock, load in (("x", 2000, 1.0), ("y", 1000, 1.0), ("z", 500, 0.0))
        for signal, v in (("sm_clock_mhz", clock), ("utilization_ratio", load))
    ]
    facts = [Fact("nvml", "gpu_sm_clock_max_mhz", f"gpu/{gpu}", 2000) for gpu in "xyz"]
    facts += [Fact("nvml", "gpu_of_target", f"gpu/{gpu}", answer) for gpu, answer in target.items()]
    return (pace.gpu for pace in gpu_paces(Telemetry(rows, facts), 0, 10 * SECOND))


def test_only_gpus_under_load_that_may_be_the_targets_are_compared() -> None:
    assert list(paces()) == ["gpu/y", "gpu/x"]
    assert list(paces(x="yes", y="no")) == ["gpu/x"]


def test_one_gpu_has_no_peers() -> None:
    rows = series("sm_clock_mhz", [1000]), series("utilization_ratio", [1])
    measures = measured(recording(*rows, facts={"gpu_sm_clock_max_mhz": 2000}))
    assert value(measures, "gpu_clock_spread_ratio") is None
    assert "fewer than two GPUs" in source(measures, "gpu_clock_spread_ratio")


# Joining with a trace: C-13

CARDS = {
    "gpu/GPU-t": ("NVIDIA T400", "GPU-00000000-0000-0000-0000-0000000000aa", "0000:01:00.0"),
    "gpu/GPU-r": ("NVIDIA GeForce RTX 4090", "GPU-00000000-0000-0000-0000-0000000000bb", "0000:41:00.0"),
}
RTX = "NVIDIA GeForce RTX 4090"


def cards(known: Mapping[str, tuple[str, str, str]] = CARDS, *without: str) -> Telemetry:
    names = ("gpu_name", "gpu_uuid", "gpu_bus_id")
    return Telemetry(
        all_facts=[
            Fact("nvml", name, scope, fact)
            for scope, card in known.items()
            for name, fact in zip(names, card, strict=True)
            if name not in without
        ]
    )


@pytest.mark.parametrize(
    ("name", "uuid", "bus", "names", "joined"),
    [
        (RTX, "00000000-0000-0000-0000-0000000000bb", None, [RTX], "gpu/GPU-r"),
        (RTX, "GPU-000000000000000000000000000000BB", "0000:01:00.0", [RTX], "gpu/GPU-r"),
        (RTX, None, "00000000:41:00.0", [RTX], "gpu/GPU-r"),
        (RTX, None, "41:00.0", [RTX], "gpu/GPU-r"),
        (RTX, None, None, [RTX], "gpu/GPU-r"),
        ("GeForce RTX 4090", None, None, ["GeForce RTX 4090"], "gpu/GPU-r"),
        ("NVIDIA T400", "", "", [RTX, "NVIDIA T400"], "gpu/GPU-t"),
        (RTX, None, None, [RTX, RTX], None),
        (RTX, "00000000-0000-0000-0000-0000000000cc", None, [RTX], None),
        (RTX, None, "0000:42:00.0", [RTX], None),
        ("NVIDIA H200", None, None, ["NVIDIA H200"], None),
        (None, None, None, [None], None),
        (RTX, "00000000-0000-0000-0000-000000000000", None, [RTX], "gpu/GPU-r"),
    ],
)
def test_join(name: str | None, uuid: str | None, bus: str | None, names: list[str | None], joined: str | None) -> None:
    assert join_gpu(cards(), name, uuid, bus, names) == joined


def test_equal_cards_are_not_joined_by_name() -> None:
    twins = {scope: (RTX, uuid, bus) for scope, (_, uuid, bus) in CARDS.items()}
    assert join_gpu(cards(twins), RTX, None, None, [RTX]) is None
    assert (
        join_gpu(cards(twins, "gpu_uuid"), RTX, "00000000-0000-0000-0000-0000000000bb", "41:0.0", [RTX]) == "gpu/GPU-r"
    )


# From the driver's answers to findings


@dataclass
class Context:
    """What rules see: measures alone, no trace."""

    measures: Measures
    window_ns: int = 100 * SECOND

    def where(self, selector: str, limit: int) -> list[Where]:
        return []

    def kernels(self, selector: str, limit: int) -> list[KernelRow]:
        return []


def judged(measures: Measures) -> tuple[dict[str, str], set[str]]:
    """Findings about hardware by rule with their severity, and the rules that could not be evaluated."""
    evaluation = rules.evaluate(rules.load([rules_dir()]), Context(measures))
    found = [f for f in evaluation.findings if f.area in ("hardware", "pcie")]
    return {f.rule: f.severity for f in found}, {n.rule for n in evaluation.not_evaluated}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path, monkeypatch, build(tmp_path))
    yield made
    made.probe.stop(made.out)
    made.file.close()


H100_SCOPE = f"gpu/{H100['uuid']}"
CLOCK_RULES = {"throttled", "throttled-power", "throttled-thermal", "slow-gpu"}


def recorded(bench: Bench) -> Measures:
    return measured(bench.telemetry(), H100_SCOPE, high_ns=2**62)


def test_mig_leads_to_no_claim_of_idleness(bench: Bench) -> None:
    part = "MIG-aaaaaaaa-0000-0000-0000-000000000000"
    bench.gpus[0] |= {"mig": 1, "slices": 7, "nvmlDeviceGetUtilizationRates": 3, "mig1.uuid": part}
    bench.gpus[0] |= {"mig1.memory_total": 2**34, "mig1.memory_used": 2**34}
    bench.start().tick(times=3)
    measures = measured(bench.telemetry(), f"gpu/{part}", high_ns=2**62)
    assert value(measures, "gpu_utilization_mean_ratio") is None and value(measures, "gpu_load_ratio") is None
    assert value(measures, "gpu_memory_used_peak_ratio") == 1.0
    found, open_rules = judged(measures)
    assert found == {} and CLOCK_RULES | {"link-downgrade"} <= open_rules


def test_a_jetson_has_no_link_to_judge(bench: Bench) -> None:
    bench.gpus[0] = {"name": "Thor", "uuid": H100["uuid"], "temperature": 48}
    bench.start().tick(times=3)
    measures = recorded(bench)
    assert value(measures, "gpu_temperature_peak_celsius") == 48
    assert value(measures, "gpu_memory_used_peak_ratio") is None
    assert source(measures, "pcie_link_lost_ratio") == "not supported on this GPU (NVML 3)"
    found, open_rules = judged(measures)
    assert found == {} and "link-downgrade" in open_rules


def test_a_usual_power_cap_is_no_finding(bench: Bench) -> None:
    bench.gpus[0] |= {"event_types": 8, "clock1": 1965}
    bench.start().tick(times=3)
    found, open_rules = judged(recorded(bench))
    assert found == {} and not (CLOCK_RULES - {"slow-gpu"}) & open_rules


def test_heat_under_load_is_a_finding(bench: Bench) -> None:
    bench.gpus[0] |= {"clock1": 480, "reasons": 0x20, "temperature": 87}
    bench.start().tick(times=3)
    measures = recorded(bench)
    assert value(measures, "sm_clock_lost_ratio") == round(1 - 480 / 1980, 6)
    assert judged(measures)[0] == {"throttled-thermal": "critical"}


def test_a_narrow_link_is_a_finding_under_load_only(bench: Bench) -> None:
    bench.gpus[0] |= {"util": 0, "gen": 1, "width": 4, "reasons": 1}
    bench.start().tick(times=5)
    assert "link-downgrade" in judged(recorded(bench))[1]
    bench.gpus[0] |= {"util": 97, "gen": 5, "reasons": 0, "clock1": 1980}
    bench.tick(times=5)
    measures = recorded(bench)
    assert value(measures, "pcie_link_lost_ratio") == 0.75
    # Without a trace nothing is known to wait for it.
    assert judged(measures)[0] == {"link-downgrade": "info"}
    measures.add("exposed_host_copy_ns", 10 * SECOND, "ns")
    assert judged(measures)[0] == {"link-downgrade": "warning"}


def test_an_xid_is_a_finding_and_a_kill_is_none(bench: Bench) -> None:
    bench.gpus[0] |= {"event_types": 8, "reasons": 0, "clock1": 1980}
    bench.start().tick(times=2)
    for serial, number, expected in ((1, 45, {}), (2, 79, {"gpu-errors": "critical"})):
        bench.more = {"event__serial": serial, "event__data": number}
        bench.tick("gpu-events")
        assert judged(recorded(bench))[0] == expected


def test_gpm_is_rank_a_evidence(bench: Bench) -> None:
    bench.gpus[0] |= {"gpm": 1, "gpm.1": 100, "gpm.5": 75, "gpm.10": 30, "gpm.12": 5}
    bench.start().tick(times=4)
    measures = recorded(bench)
    assert value(measures, "gpm_compute_ratio") == 0.75 and value(measures, "gpm_dram_ratio") == 0.3
    measure = measures.get("gpm_compute_ratio")
    assert measure is not None and measure.rank == "A"
