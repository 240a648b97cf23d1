"""What the host did: the target's threads, the CPUs, the cgroup's limits, memory, and where on the machine it all was.

Counters become rates and shares of the observed part of the window. The busiest thread is the one that ran or wanted to run
the longest: in a serving engine that is the one that launches. A thread at 100 % is normal there, so that alone is never
evidence; waiting for a CPU is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from infprof.measures.host_memory import add_memory
from infprof.measures.names import HOST_MEASURES
from infprof.measures.telemetry import TelemetryScope
from infprof.measures.totals import Adder, Observed, at, observe, ratio
from infprof.results import Measures
from infprof.telemetry import Series, Telemetry

_SECOND_NS = 1_000_000_000

# A thread that wants a CPU for less than this share of the time says nothing about a lack of CPUs.
_BUSY_RATIO = 0.05


def add_host_telemetry(measures: Measures, telemetry: Telemetry, scope: TelemetryScope) -> None:
    """Add the measures of ``HOST_MEASURES``. Sources: proc(5), PSI, cgroup v1 and v2, sysfs."""
    adder = Adder(measures, telemetry, "host", {name: info.unit for name, info in HOST_MEASURES.items()})
    seen = observe(telemetry, scope, "host")
    if seen is not None:
        threads = _threads(seen)
        _add_target(adder, seen, threads)
        _add_busiest(adder, seen, threads)
        _add_machine(adder, seen)
        _add_softirq(adder, seen, threads)
        _add_cgroup(adder, seen)
        _add_pressure(adder, seen)
        _add_placement(adder, seen, threads, scope.gpu)
        add_memory(adder, seen)
    adder.add_missing()


class _Thread(NamedTuple):
    """A thread in the window; ``wait_ns`` None where the kernel does not count it."""

    scope: str
    run_ns: float
    wait_ns: float | None

    @property
    def wanted_ns(self) -> float:
        return self.run_ns + (self.wait_ns or 0.0)


def _threads(seen: Observed) -> list[_Thread]:
    """The target's threads, the busiest first."""
    runs = seen.by_scope("thread_run_ns", "thread")
    waits = seen.by_scope("thread_wait_ns", "thread")
    if not runs:
        system = seen.by_scope("thread_system_ns", "thread")
        users = seen.by_scope("thread_user_ns", "thread")
        runs = {name: users.get(name, 0.0) + system.get(name, 0.0) for name in {**users, **system}}
    threads = [_Thread(name, run, waits.get(name, 0.0) if waits else None) for name, run in runs.items()]
    return sorted(threads, key=lambda thread: -thread.wanted_ns)


def _add_target(adder: Adder, seen: Observed, threads: list[_Thread]) -> None:
    user, system = seen.total("process_user_ns"), seen.total("process_system_ns")
    cpu = None if user is None or system is None else user + system
    adder.add("target_cpus_used_count", ratio(cpu, seen.span_ns), "process_user_ns")
    adder.add(
        "target_system_ratio",
        ratio(system, cpu),
        "process_user_ns",
        "the target used no CPU time" if cpu == 0 else None,
    )
    waits = [thread.wanted_ns for thread in threads if thread.wait_ns is not None]
    adder.add("target_runnable_count", sum(waits) / seen.span_ns if waits else None, "thread_wait_ns")
    for name, signal in (
        ("target_involuntary_per_s", "thread_involuntary_switches"),
        ("target_voluntary_per_s", "thread_voluntary_switches"),
        ("major_faults_per_s", "process_major_faults"),
    ):
        adder.add(name, _per_s(seen, seen.total(signal)), signal)


def _add_busiest(adder: Adder, seen: Observed, threads: list[_Thread]) -> None:
    busiest = threads[0] if threads and threads[0].wanted_ns >= _BUSY_RATIO * seen.span_ns else None
    why = None if busiest else "no thread of the target wanted a CPU for 5 % of the time"
    scope = busiest.scope if busiest else None
    wait = busiest.wait_ns if busiest else None
    adder.add("busiest_thread_cpu_ratio", ratio(busiest.run_ns, seen.span_ns) if busiest else None, reason=why)
    adder.add("busiest_thread_wait_ratio", ratio(wait, busiest.wanted_ns) if busiest else None, "thread_wait_ns", why)
    adder.add("busiest_thread_wait_ns", wait, "thread_wait_ns", why)
    for name, signal in (
        ("busiest_thread_involuntary_per_s", "thread_involuntary_switches"),
        ("busiest_thread_voluntary_per_s", "thread_voluntary_switches"),
    ):
        adder.add(name, _per_s(seen, seen.total(signal, scope)) if scope else None, signal, why)


def _per_s(seen: Observed, count: float | None) -> float | None:
    return None if count is None else count * _SECOND_NS / seen.span_ns


def _add_machine(adder: Adder, seen: Observed) -> None:
    total = seen.total("cpu_total_ns", "")
    for name, signal in (
        ("cpu_busy_ratio", "cpu_busy_ns"),
        ("cpu_softirq_ratio", "cpu_softirq_ns"),
        ("cpu_steal_ratio", "cpu_steal_ns"),
        ("cpu_iowait_ratio", "cpu_iowait_ns"),
    ):
        adder.add(name, ratio(seen.total(signal, ""), total), "cpu_softirq_ns")
    adder.add("cpu_online_count", seen.telemetry.facts("cpu_count").get(""), "cpu_softirq_ns")
    load = seen.gauge("load1")
    adder.add("load_mean_count", float(load.mean()) if len(load) else None, "load1")
    for name, signal in (("swap_in_bytes_per_s", "swap_in_bytes"), ("swap_out_bytes_per_s", "swap_out_bytes")):
        adder.add(name, _per_s(seen, seen.total(signal)), "swap_in_bytes")
    available, whole = seen.gauge("memory_available_bytes"), seen.telemetry.facts("memory_total_bytes").get("")
    lowest = float(available.min()) if len(available) else None
    adder.add("memory_available_min_ratio", ratio(lowest, whole), "memory_available_bytes")


def _add_softirq(adder: Adder, seen: Observed, threads: list[_Thread]) -> None:
    """Soft interrupts of the worst CPU, and of the worst one that a busy thread of the target runs on."""
    by_cpu = {scope: ns / seen.span_ns for scope, ns in seen.by_scope("cpu_softirq_ns", "cpu").items()}
    adder.add("cpu_softirq_max_ratio", max(by_cpu.values(), default=None), "cpu_softirq_ns")
    busy = [thread.scope for thread in threads if thread.wanted_ns >= _BUSY_RATIO * seen.span_ns]
    used = {f"cpu/{cpu}" for scope in busy if (cpu := _usual_cpu(seen, scope)) is not None}
    here = [by_cpu[cpu] for cpu in used if cpu in by_cpu]
    why = "no busy thread of the target was seen on a CPU" if by_cpu and not here else None
    adder.add("thread_cpu_softirq_max_ratio", max(here, default=None), "cpu_softirq_ns", why)


def _usual_cpu(seen: Observed, scope: str) -> int | None:
    """The CPU that a thread was found on most often in the window."""
    cpus = seen.gauge("thread_cpu", scope).astype(np.int64)
    return int(np.bincount(cpus).argmax()) if len(cpus) else None


def _add_cgroup(adder: Adder, seen: Observed) -> None:
    """The group with the quota that was used up most often: the target's own, or one above it."""
    quotas = seen.telemetry.facts("cgroup_quota_cpus")
    adder.add("cgroup_quota_cpus_count", min(quotas.values(), default=None), "cgroup_throttled_periods")
    periods = seen.by_scope("cgroup_periods", "cgroup")
    throttled = seen.by_scope("cgroup_throttled_periods", "cgroup")
    shares = {scope: share for scope in periods if (share := ratio(throttled.get(scope), periods[scope])) is not None}
    worst = max(shares, key=lambda scope: shares[scope], default=None)
    idle = "the group did not run in the window" if periods and worst is None else None
    adder.add("cgroup_throttled_ratio", shares[worst] if worst else None, "cgroup_throttled_periods", idle)
    lost = seen.total("cgroup_throttled_ns", worst) if worst else None
    adder.add("cgroup_throttled_ns", lost, "cgroup_throttled_periods", idle)
    limit = seen.telemetry.facts("cgroup_memory_limit_bytes").get("")
    used = seen.gauge("cgroup_memory_bytes")
    why = "the target's cgroup has no memory limit" if len(used) and not limit else None
    share = ratio(float(used.max()), limit) if len(used) else None
    adder.add("cgroup_memory_max_ratio", share, "cgroup_memory_bytes", why)
    adder.add("cgroup_memory_hit_count", seen.total("cgroup_memory_limit_hits"), "cgroup_memory_limit_hits")
    adder.add("cgroup_oom_kill_count", seen.total("cgroup_oom_kills"), "cgroup_memory_limit_hits")


def _add_pressure(adder: Adder, seen: Observed) -> None:
    """Shares of the time in which tasks were stalled: PSI totals over the window, not the kernel's own averages."""
    for name, resource, kind in (
        ("psi_cpu_some_ratio", "cpu", "some"),
        ("psi_memory_some_ratio", "memory", "some"),
        ("psi_memory_full_ratio", "memory", "full"),
        ("psi_io_some_ratio", "io", "some"),
        ("psi_io_full_ratio", "io", "full"),
    ):
        stalled = seen.total(f"psi_{kind}_ns", None, resource=resource)
        adder.add(name, ratio(stalled, seen.span_ns), "psi_some_ns")


def _add_placement(adder: Adder, seen: Observed, threads: list[_Thread], gpu: str | None) -> None:
    nodes = {int(node): cpus for node, cpus in seen.telemetry.facts("numa_nodes").get("", {}).items()}
    node, why = _gpu_node(seen.telemetry, gpu)
    if len(nodes) == 1:
        node, why = None, "the machine has one NUMA node"
    thread = _thread_off_node(seen, threads, nodes.get(node, [])) if node is not None else None
    memory = _memory_off_node(seen, node) if node is not None else None
    adder.add("busiest_thread_off_node_ratio", thread, "thread_cpu", why)
    adder.add("target_memory_off_node_ratio", memory, "process_node_bytes", why)
    known = [share for share in (thread, memory) if share is not None]
    adder.add("numa_off_node_ratio", max(known, default=None), "thread_cpu", why)


def _gpu_node(telemetry: Telemetry, gpu: str | None) -> tuple[int | None, str | None]:
    """The NUMA node of the GPU in question, or why it is not known."""
    nodes = telemetry.facts("gpu_numa_nodes").get("", {})
    address = telemetry.facts("gpu_bus_id").get(gpu) if gpu is not None else None
    found = {nodes.get(str(address).lower())} if address else set(nodes.values())
    if len(found) > 1:
        return None, "the GPUs are on several NUMA nodes, and which of them this is about is not known"
    node = next(iter(found), None)
    return node, None if node is not None else "the NUMA node of the GPU is not known"


def _thread_off_node(seen: Observed, threads: list[_Thread], local: list[int]) -> float | None:
    """Share of the busiest thread's CPU time on CPUs of other nodes than ``local``'s."""
    if not threads or not local:
        return None
    cpus = seen.all("thread_cpu", threads[0].scope)
    runs = seen.all("thread_run_ns", threads[0].scope)
    return _weighted(seen, cpus[0], runs, local) if cpus else None


def _weighted(seen: Observed, cpus: Series, runs: list[Series], local: list[int]) -> float | None:
    cpus = cpus.between(seen.low_ns, seen.high_ns + 1)
    if not len(cpus.time):
        return None
    off = ~np.isin(cpus.value.astype(np.int64), local)
    weights = np.diff(at(runs[0], [seen.low_ns, *cpus.time])) if runs else np.ones(len(off))
    return float(weights[off].sum() / weights.sum()) if weights.sum() > 0 else float(off.mean())


def _memory_off_node(seen: Observed, node: int) -> float | None:
    """Share of the target's memory on other nodes: of its processes, else of its cgroup."""
    for signal in ("process_node_bytes", "cgroup_node_bytes"):
        last = [(s.labels["node"], s.value[-1]) for s in seen.all(signal) if len(s.value)]
        whole = sum(size for _, size in last)
        if whole > 0:
            return float(sum(size for name, size in last if name != str(node)) / whole)
    return None
