"""Host and network telemetry to measures and findings: made-up runs with round numbers, and cases that people met."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import SHARED
from infprof import rules
from infprof.measures.host_telemetry import add_host_telemetry
from infprof.measures.names import HOST_MEASURES, MEASURES, NETWORK_MEASURES
from infprof.measures.network_telemetry import add_network_telemetry
from infprof.measures.telemetry import TelemetryScope
from infprof.measures.totals import Observed
from infprof.probes.host import SIGNALS as HOST_SIGNALS
from infprof.probes.host import HostProbe
from infprof.probes.host_tasks import Steps
from infprof.probes.network import SIGNALS as NETWORK_SIGNALS
from infprof.resources import rules_dir
from infprof.results import Finding, Measures
from infprof.telemetry import Fact, Missing, Series, Telemetry
from machine_files import SECOND, START, Machine, Run

RULES = rules.load([rules_dir()])
MINE = {
    *("run-queue", "context-switches", "cgroup-throttled", "softirq", "cpu-steal", "numa-placement"),
    *("host-memory-growth", "host-memory-pressure", "network-saturated", "network-loss", "rdma-congestion"),
    "listen-overflow",
}
HOUR_S = 3600

Values = Sequence[float]


def series(signal: str, values: Values, scope: str = "", step_s: float = 1.0, **labels: str) -> Series:
    """A series from the start on, a value every ``step_s``."""
    signals = {**HOST_SIGNALS, **NETWORK_SIGNALS}
    probe = "host" if signal in HOST_SIGNALS else "network" if signal in NETWORK_SIGNALS else "serving"
    unit, kind = (signals[signal].unit, signals[signal].kind) if signal in signals else ("count", "counter")
    times = START + np.arange(len(values), dtype=np.int64) * round(step_s * SECOND)
    return Series(probe, signal, unit, kind, scope, labels, times, np.asarray(values, dtype=np.float64))


def telemetry(*all_series: Series, facts: Mapping[tuple[str, str], Any] | None = None) -> Telemetry:
    return Telemetry(list(all_series), [Fact("host", name, scope, v) for (name, scope), v in (facts or {}).items()])


def measured(data: Telemetry, low_s: float = 0, high_s: float = 1e6, gpu: str | None = None) -> Measures:
    measures = Measures()
    scope = TelemetryScope(START + round(low_s * SECOND), START + round(high_s * SECOND), gpu)
    add_host_telemetry(measures, data, scope)
    add_network_telemetry(measures, data, scope)
    return measures


def thread(
    tid: int, run: Values, wait: Values | None = None, cpu: Values = (), involuntary: Values = ()
) -> list[Series]:
    """A thread of process 10: ns on a CPU and waiting, the CPUs it was found on, its involuntary switches."""
    scope = f"thread/10/{tid}"
    found = [series("thread_run_ns", run, scope)]
    found += [] if wait is None else [series("thread_wait_ns", wait, scope)]
    found += [series("thread_cpu", cpu, scope)] if len(cpu) else []
    return found + ([series("thread_involuntary_switches", involuntary, scope)] if len(involuntary) else [])


class Seen:
    """Measures as rules see them."""

    window_ns = SECOND

    def __init__(self, measures: Measures) -> None:
        self.measures = measures

    def where(self, selector: str, limit: int) -> list[Any]:
        return []

    def kernels(self, selector: str, limit: int) -> list[Any]:
        return []


def found(measures: Measures, **others: float) -> dict[str, Finding]:
    """The findings of the host and network rules; ``others`` are measures of the trace."""
    for name, value in others.items():
        measures.add(name, value, MEASURES[name].unit)
    return {f.rule: f for f in rules.evaluate(RULES, Seen(measures)).findings if f.rule in MINE}


def not_evaluated(measures: Measures) -> set[str]:
    return {n.rule for n in rules.evaluate(RULES, Seen(measures)).not_evaluated} & MINE


# Running totals


@given(
    st.lists(st.integers(min_value=0, max_value=3), min_size=2, max_size=12),
    st.data(),
)
def test_totals_that_are_written_when_they_move_can_be_cut_anywhere(steps: list[int], data: st.DataObject) -> None:
    values = np.cumsum(steps)
    rows: list[tuple[int, float]] = []

    class Out:
        def sample(self, signal: str, value: float, scope: str, time_ns: int) -> None:
            rows.append((time_ns, value))

    total = Steps("x")
    for second, value in enumerate(values):
        total.see(Out(), "thread_run_ns", float(value), second * SECOND)  # type: ignore[arg-type]
    total.close(Out())  # type: ignore[arg-type]
    times, kept = (np.array(column) for column in zip(*rows, strict=True))
    assert list(times) == sorted(set(times))
    low = data.draw(st.integers(0, len(values) - 2))
    high = data.draw(st.integers(low + 1, len(values) - 1))
    written = Series("host", "x", "ns", "counter", "x", {}, times.astype(np.int64), kept.astype(float))
    seen = Observed(Telemetry(), low * SECOND, high * SECOND)
    assert seen.grown(written) == pytest.approx(values[high] - values[low])


def test_a_restart_counts_from_zero() -> None:
    seen = Observed(Telemetry(), START, START + 3 * SECOND)
    assert seen.grown(series("net_rx_bytes", [100, 150, 20, 30], "interface/eth0")) == 50 + 20 + 10


# Threads


def test_the_busiest_thread_is_the_one_that_wants_a_cpu_most() -> None:
    data = telemetry(
        *thread(11, [0, 0.4 * SECOND], [0, 0.5 * SECOND], involuntary=[0, 300]),
        *thread(12, [0, 0.6 * SECOND], [0, 0.0], involuntary=[0, 5]),
        series("process_user_ns", [0, 0.9 * SECOND], "process/10"),
        series("process_system_ns", [0, 0.1 * SECOND], "process/10"),
        series("process_major_faults", [0, 30], "process/10"),
    )
    values = measured(data)
    assert values.value("busiest_thread_cpu_ratio") == pytest.approx(0.4)
    assert values.value("busiest_thread_wait_ratio") == pytest.approx(5 / 9)
    assert values.value("busiest_thread_involuntary_per_s") == 300
    assert values.value("target_involuntary_per_s") == 305
    assert values.value("target_runnable_count") == pytest.approx(1.5)
    assert values.value("target_cpus_used_count") == pytest.approx(1.0)
    assert values.value("target_system_ratio") == pytest.approx(0.1)
    assert values.value("major_faults_per_s") == 30


def test_only_the_window_counts() -> None:
    data = telemetry(*thread(11, [0, 0, 5e8, 5e8, 5e8], [0] * 5))
    assert measured(data, 1, 3).value("busiest_thread_cpu_ratio") == pytest.approx(0.25)
    late = measured(data, 3, 4).get("busiest_thread_cpu_ratio")
    assert late is not None and (late.value, late.source) == (
        None,
        "no thread of the target wanted a CPU for 5 % of the time",
    )


def test_without_run_queue_times_the_wait_is_unknown_and_says_why() -> None:
    data = Telemetry(
        [
            series("thread_user_ns", [0, 0.7 * SECOND], "thread/10/10"),
            series("thread_system_ns", [0, 0.1 * SECOND], "thread/10/10"),
        ],
        missing=[Missing("host", "thread_wait_ns", "", None, "no schedstat here")],
    )
    values = measured(data)
    assert values.value("busiest_thread_cpu_ratio") == pytest.approx(0.8)
    wait = values.get("busiest_thread_wait_ratio")
    assert wait is not None and (wait.value, wait.source) == (None, "no schedstat here")
    assert "run-queue" in not_evaluated(values)


def test_no_telemetry_is_no_measure_and_no_finding() -> None:
    values = measured(Telemetry())
    assert {m.name for m in values} == {*HOST_MEASURES, *NETWORK_MEASURES}
    assert {(m.value, m.source) for m in values} == {(None, "this telemetry was not recorded")}
    assert found(values) == {}
    assert not_evaluated(values) == MINE


def test_a_single_moment_is_no_measure() -> None:
    values = measured(telemetry(*thread(11, [7], [7])))
    measure = values.get("busiest_thread_cpu_ratio")
    assert measure is not None and (measure.value, measure.source) == (None, "fewer than two samples in the window")


def test_units_are_the_last_word_of_a_name() -> None:
    for name, info in {**HOST_MEASURES, **NETWORK_MEASURES}.items():
        assert name.endswith("_" + info.unit), name


# The machine


def test_soft_interrupts_count_where_busy_threads_run() -> None:
    cpus = [
        series("cpu_softirq_ns", [0, 0.7 * SECOND], "cpu/0"),
        series("cpu_softirq_ns", [0, 0.1 * SECOND], "cpu/1"),
        series("cpu_softirq_ns", [0, 0.8 * SECOND]),
        series("cpu_total_ns", [0, 2.0 * SECOND]),
    ]
    elsewhere = measured(telemetry(*cpus, *thread(11, [0, 5e8], [0, 0], cpu=[1, 1])))
    same = measured(telemetry(*cpus, *thread(11, [0, 5e8], [0, 0], cpu=[0, 0])))
    assert elsewhere.value("cpu_softirq_max_ratio") == same.value("cpu_softirq_max_ratio") == pytest.approx(0.7)
    assert elsewhere.value("cpu_softirq_ratio") == pytest.approx(0.4)
    assert elsewhere.value("thread_cpu_softirq_max_ratio") == pytest.approx(0.1)
    assert same.value("thread_cpu_softirq_max_ratio") == pytest.approx(0.7)
    assert set(found(elsewhere)) == set()
    assert found(same)["softirq"].severity == "warning"


def test_steal_pressure_swap_and_memory() -> None:
    data = telemetry(
        series("cpu_total_ns", [0, 10 * SECOND]),
        series("cpu_steal_ns", [0, 2 * SECOND]),
        series("psi_full_ns", [0, 0.03 * SECOND], "cgroup/0", resource="memory"),
        series("psi_some_ns", [0, 0.25 * SECOND], "cgroup/0", resource="cpu"),
        series("swap_in_bytes", [0, 4096]),
        series("memory_available_bytes", [50, 20]),
        facts={("memory_total_bytes", ""): 100},
    )
    values = measured(data)
    assert values.value("cpu_steal_ratio") == pytest.approx(0.2)
    assert values.value("psi_memory_full_ratio") == pytest.approx(0.03)
    assert values.value("psi_cpu_some_ratio") == pytest.approx(0.25)
    assert values.value("psi_io_some_ratio") is None
    assert values.value("swap_in_bytes_per_s") == 4096
    assert values.value("memory_available_min_ratio") == pytest.approx(0.2)
    assert found(values)["cpu-steal"].severity == "warning"


# Cases that people met


def test_a_quota_that_is_used_up_is_named(tmp_path: Path) -> None:
    """D-03: a pool of 172 threads under a quota of six CPUs."""
    data = SHARED / "cases/data/cgroup-throttled"
    if not data.is_dir():
        pytest.skip("needs the shared cases, which a clone does not have")
    machine = Machine(tmp_path / "root")
    machine.process(10)
    own = machine.cgroup2()
    machine.file(f"{own}/cpu.max", (data / "cpu.max").read_text())
    machine.file(f"{own}/cpu.stat", (data / "cpu.stat.0").read_text())
    run = Run(HostProbe(), machine.root, tmp_path)
    threads = range(10, 182)
    for step, seconds in ((0, 0.0), (1, 10.0)):
        machine.file(f"{own}/cpu.stat", (data / f"cpu.stat.{step}").read_text())
        machine.process(10, ticks=(5200 * step, 680 * step))
        for tid in threads:
            machine.thread(10, tid, run=step * 340_000_000, wait=step * 3_000_000_000, turns=1 + step * 100)
        run.beat(seconds)
    values = Measures()
    add_host_telemetry(values, run.end(), run.scope())
    assert values.value("cgroup_throttled_ratio") == pytest.approx(0.71)
    assert values.value("cgroup_throttled_ns") == pytest.approx(21 * SECOND)
    assert values.value("cgroup_quota_cpus_count") == 6
    assert values.value("target_cpus_used_count") == pytest.approx(5.88)
    assert (values.value("target_runnable_count") or 0) > 50
    findings = found(values)
    assert findings["cgroup-throttled"].severity == "critical"
    assert any("than the quota allows" in note for note in findings["cgroup-throttled"].notes)
    changes = " ".join(r.change for r in findings["cgroup-throttled"].remedies)
    assert "OMP_NUM_THREADS" in changes and "limit" in changes and "graph" not in changes.lower()


def test_the_tightest_group_above_the_target_counts() -> None:
    groups = [
        series("cgroup_periods", [0, 100], "cgroup/0"),
        series("cgroup_throttled_periods", [0, 2], "cgroup/0"),
        series("cgroup_periods", [0, 50], "cgroup/2"),
        series("cgroup_throttled_periods", [0, 25], "cgroup/2"),
        series("cgroup_throttled_ns", [0, 3 * SECOND], "cgroup/2"),
    ]
    facts = {("cgroup_quota_cpus", "cgroup/0"): 8, ("cgroup_quota_cpus", "cgroup/2"): 4}
    values = measured(telemetry(*groups, facts=facts))
    assert values.value("cgroup_throttled_ratio") == pytest.approx(0.5)
    assert values.value("cgroup_throttled_ns") == 3 * SECOND
    assert values.value("cgroup_quota_cpus_count") == 4


def test_a_thread_at_full_speed_is_no_finding() -> None:
    """D-06: polling takes one core whatever the load."""
    values = measured(telemetry(*thread(11, np.arange(11) * SECOND, np.zeros(11), involuntary=np.arange(11) * 4)))
    assert values.value("busiest_thread_cpu_ratio") == pytest.approx(1.0)
    assert found(values, idle_ratio=1.0) == {}


def test_a_process_off_the_cpu_half_of_the_time_is_starved() -> None:
    """D-40: 16 loader processes on 8 cores; utilisation says 97 %."""
    seconds = np.arange(121)
    data = telemetry(*thread(11, seconds * 0.48 * SECOND, seconds * 0.52 * SECOND, involuntary=seconds * 400))
    values = measured(data)
    assert values.value("busiest_thread_wait_ratio") == pytest.approx(0.52)
    assert (values.value("busiest_thread_wait_ns") or 0) == pytest.approx(62.4 * SECOND)
    findings = found(values, idle_ratio=0.52)
    assert {rule: f.severity for rule, f in findings.items()} == {"run-queue": "warning", "context-switches": "info"}


def test_without_context_switch_data_nothing_is_guessed() -> None:
    """C-16: what was not collected is not evaluated, and is no proof of quiet."""
    values = measured(telemetry(series("memory_available_bytes", [1, 1])))
    assert found(values) == {}
    assert {"context-switches", "run-queue"} <= not_evaluated(values)
    measure = values.get("busiest_thread_involuntary_per_s")
    assert measure is not None and measure.value is None


NODES = {("numa_nodes", ""): {"0": [0, 1], "1": [2, 3]}, ("gpu_numa_nodes", ""): {"0000:17:00.0": 0, "0000:c1:00.0": 1}}


def placed(memory: tuple[float, float], cpu: Values, facts: Mapping[tuple[str, str], Any]) -> Telemetry:
    return telemetry(
        *thread(11, [0, 5e8, 10e8], [0, 0, 0], cpu=cpu),
        series("process_node_bytes", [memory[0]] * 3, "process/10", node="0"),
        series("process_node_bytes", [memory[1]] * 3, "process/10", node="1"),
        facts=facts,
    )


def test_the_wrong_node_matters_where_copies_are_on_the_path() -> None:
    """D-24: memory 95 % on node 1, GPU on node 0."""
    data = placed((5, 95), [2, 2, 3], {**NODES, ("gpu_bus_id", "gpu/GPU-a"): "0000:17:00.0"})
    copies = found(measured(data, gpu="gpu/GPU-a"), exposed_host_copy_ratio=0.47)
    none = found(measured(data, gpu="gpu/GPU-a"), exposed_host_copy_ratio=0.001)
    assert copies["numa-placement"].severity == "warning"
    assert any("memory lies on another NUMA node" in note for note in copies["numa-placement"].notes)
    assert none == {}


def test_off_node_shares_follow_the_gpu() -> None:
    facts = {**NODES, ("gpu_bus_id", "gpu/GPU-a"): "0000:17:00.0", ("gpu_bus_id", "gpu/GPU-b"): "0000:C1:00.0"}
    data = placed((25, 75), [2, 2, 0], facts)
    near, far = measured(data, gpu="gpu/GPU-b"), measured(data, gpu="gpu/GPU-a")
    assert near.value("target_memory_off_node_ratio") == pytest.approx(0.25)
    assert far.value("target_memory_off_node_ratio") == pytest.approx(0.75)
    # The sample at the start weighs nothing, the two others half of the CPU time each.
    assert far.value("busiest_thread_off_node_ratio") == pytest.approx(0.5)
    assert far.value("numa_off_node_ratio") == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (NODES, "the GPUs are on several NUMA nodes, and which of them this is about is not known"),
        ({**NODES, ("gpu_numa_nodes", ""): {}}, "the NUMA node of the GPU is not known"),
        ({**NODES, ("numa_nodes", ""): {"0": [0, 1]}}, "the machine has one NUMA node"),
    ],
)
def test_where_placement_cannot_be_judged_it_says_why(facts: Mapping[tuple[str, str], Any], reason: str) -> None:
    measure = measured(placed((5, 95), [2, 2, 3], facts)).get("numa_off_node_ratio")
    assert measure is not None and (measure.value, measure.source) == (None, reason)


# Memory that grows


def memory_of(
    sizes: Iterable[float], step_s: float, requests: Values | None = None, limit: int | None = None
) -> Telemetry:
    extra = [] if requests is None else [series("requests_finished", requests, "engine/0", step_s, reason="stop")]
    facts = {} if limit is None else {("cgroup_memory_limit_bytes", ""): limit}
    return telemetry(series("process_anon_bytes", list(sizes), "process/10", step_s), *extra, facts=facts)


def test_two_kilobytes_per_request() -> None:
    """D-16: 10 requests a second for 4 h with a pause of half an hour."""
    path = SHARED / "cases/data/rss-leak.csv"
    if not path.is_file():
        pytest.skip("needs the shared cases, which a clone does not have")
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    requests = [float(row["completed_requests"]) for row in rows]
    values = measured(memory_of((float(row["rss_anon_bytes"]) for row in rows), 60, requests, limit=12 << 30))
    slope, error = (values.value(f"host_memory_growth_request_{part}bytes") or 0 for part in ("", "error_"))
    assert abs(slope - 2000) < 3 * error and error < 60
    paused, moving = (values.value(f"host_memory_growth_{part}bytes_per_s") or 0 for part in ("paused_", ""))
    assert moving == pytest.approx(10 * 2000, rel=0.1)
    assert abs(paused) < 0.2 * moving
    left = values.value("host_memory_time_to_limit_ns") or 0
    assert left / SECOND / HOUR_S == pytest.approx((12 - 9.23) * 2**30 / 20_000 / HOUR_S, rel=0.15)
    finding = found(values)["host-memory-growth"]
    assert finding.severity == "warning"
    assert [note.split(":")[0] for note in finding.notes] == [
        "It grows with the finished requests",
        "In the pause without requests it did not grow",
    ]


def test_a_start_up_that_levels_off_is_no_growth() -> None:
    seconds = np.arange(600)
    ramp = 9e9 * (1 - np.exp(-seconds / 60.0))
    values = measured(memory_of(ramp, 1))
    assert (values.value("host_memory_growth_late_ratio") or 0) < 0.1
    assert "host-memory-growth" not in found(values)


def test_a_short_watch_is_no_growth() -> None:
    values = measured(memory_of(np.arange(100) * 1e6, 1))
    assert values.value("host_memory_growth_fit_ratio") == pytest.approx(1.0)
    assert values.value("host_memory_growth_bytes_per_s") == pytest.approx(1e6)
    assert "host-memory-growth" not in found(values)


def test_an_even_climb_is_growth_until_the_machine_is_full() -> None:
    data = memory_of(1e9 + np.arange(601) * 1e6, 1)
    data.all_series.append(series("memory_available_bytes", [3e9] * 601))
    values = measured(data)
    assert values.value("host_memory_growth_bytes") == pytest.approx(600e6)
    assert values.value("host_memory_time_to_limit_ns") == pytest.approx(3000 * SECOND)
    assert values.value("host_memory_growth_request_bytes") is None
    assert found(values)["host-memory-growth"].severity == "critical"


def test_flat_memory_does_not_grow() -> None:
    values = measured(memory_of([5e9] * 400, 1))
    assert values.value("host_memory_growth_bytes_per_s") == 0
    assert values.value("host_memory_growth_fit_ratio") == 0
    assert values.value("host_memory_time_to_limit_ns") is None
    assert found(values) == {}


def test_processes_that_come_and_go_are_no_growth() -> None:
    base = memory_of([5e9] * 400, 1)
    late = series("process_anon_bytes", [8e9] * 100, "process/11")
    base.all_series.append(late._replace(time=late.time + 300 * SECOND))
    assert measured(base).value("host_memory_growth_bytes_per_s") == 0


def test_few_samples_say_so() -> None:
    measure = measured(memory_of([1, 2, 3], 1)).get("host_memory_growth_bytes_per_s")
    assert measure is not None and measure.value is None
    assert measure.source == "fewer than 20 samples of the target's memory in the window"


# Network


def link(rx: Values, tx: Values, scope: str = "interface/eth0", speed: float | None = 1000.0) -> Telemetry:
    data = telemetry(series("net_rx_bytes", rx, scope), series("net_tx_bytes", tx, scope))
    data.all_facts.append(Fact("network", "net_link_bytes_per_s", scope, speed))
    return data


def test_the_fuller_direction_of_the_link_counts() -> None:
    values = measured(link(rx=np.arange(11) * 900, tx=np.arange(11) * 100))
    assert values.value("network_rx_max_ratio") == pytest.approx(0.9)
    assert values.value("network_tx_max_ratio") == pytest.approx(0.1)
    assert values.value("network_link_p95_ratio") == pytest.approx(0.9)
    assert values.value("network_rx_bytes_per_s") == pytest.approx(900)
    assert found(values)["network-saturated"].severity == "warning"


def test_a_link_that_is_full_for_moments_is_seen_by_its_seconds() -> None:
    rx = np.cumsum([0] + [1000, 0, 0, 0] * 10)
    values = measured(link(rx=rx, tx=np.zeros(41)))
    assert values.value("network_rx_max_ratio") == pytest.approx(0.25)
    assert found(values)["network-saturated"].severity == "info"


def test_loopback_and_unknown_speeds_are_not_judged() -> None:
    looped = measured(link([0, 5000], [0, 5000], "interface/lo", None))
    assert looped.value("loopback_bytes_per_s") == 5000
    assert looped.value("network_rx_bytes_per_s") is None
    virtual = measured(link([0, 5000], [0, 5000], speed=None))
    measure = virtual.get("network_link_p95_ratio")
    assert measure is not None and (measure.value, measure.source) == (None, "no link whose speed is known here")
    assert virtual.value("network_rx_bytes_per_s") == 5000
    assert "network-saturated" in not_evaluated(virtual)


def test_losses_are_shares_of_the_worst_way() -> None:
    data = telemetry(
        series("net_rx_packets", [0, 970], "interface/eth0"),
        series("net_rx_drops", [0, 30], "interface/eth0"),
        series("net_tx_packets", [0, 1000], "interface/eth0"),
        series("net_tx_drops", [0, 0], "interface/eth0"),
        series("net_rx_drops", [0, 9], "interface/lo"),
        series("tcp_out_segments", [0, 1000]),
        series("tcp_retransmits", [0, 60]),
        series("tcp_listen_overflows", [0, 12]),
    )
    values = measured(data)
    assert values.value("network_drop_max_ratio") == pytest.approx(0.03)
    assert values.value("network_drop_count") == 30
    assert values.value("tcp_retransmit_ratio") == pytest.approx(0.06)
    findings = found(values)
    assert {rule: f.severity for rule, f in findings.items()} == {
        "network-loss": "warning",
        "listen-overflow": "warning",
    }


def test_rdma_ports_are_judged_by_the_worst() -> None:
    data = telemetry()
    for name, rate, cnp in (("rdma/mlx5_0/1", 50e9, 40), ("rdma/mlx5_1/1", 25e9, 0)):
        data.all_series.extend(
            [
                series("rdma_rx_bytes", [0, 10e9], name),
                series("rdma_tx_bytes", [0, 22e9], name),
                series("rdma_rx_packets", [0, 500], name),
                series("rdma_tx_packets", [0, 500], name),
                series("rdma_cnp_handled", [0, cnp], name),
                series("rdma_retransmits", [0, 0], name),
                series("rdma_xmit_wait", [0, 70], name),
            ]
        )
        data.all_facts.append(Fact("network", "rdma_link_bytes_per_s", name, rate))
    values = measured(data)
    assert values.value("rdma_tx_max_ratio") == pytest.approx(0.88)
    assert values.value("rdma_congestion_max_ratio") == pytest.approx(0.04)
    assert values.value("rdma_retransmit_max_ratio") == 0
    assert values.value("rdma_slow_port_count") == 1
    discards = values.get("rdma_discard_count")
    assert discards is not None and (discards.value, discards.source) == (
        None,
        "the RDMA devices have no counter for it",
    )
    findings = found(values)
    assert set(findings) == {"rdma-congestion", "network-saturated"}
    assert any("lower rate than its siblings" in note for note in findings["network-saturated"].notes)
