"""The host: CPU time, switches and waits of the target's threads, its memory, and what the machine and the cgroup allow.

Sources, fields and formulas: proc(5), the kernel's documentation of PSI, cgroup v1 and v2, and sysfs. Everything is read at
1 Hz or slower; with 200 threads that takes under 1 % of one core (benchmarks/probe_overhead.py measures it).
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from infprof.probes import ProbeContext, Signal, Task, Unavailable, procfs
from infprof.probes.host_tasks import PROCESSES_PER_BEAT, ProcessTree, Steps, Threads
from infprof.probes.recorder import Recorder

_MACHINE_PERIOD_S = 2.0
_NODES_PERIOD_S = 30.0

# Walking the page tables of a larger process for numa_maps would hold up its page faults.
_NUMA_MAPS_MAX_BYTES = 4 << 30

_Value = TypeVar("_Value")

_CPU_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_SOFTIRQ = _CPU_FIELDS.index("softirq")
_RESOURCES = ("cpu", "memory", "io")

SIGNALS: dict[str, Signal] = {
    "thread_run_ns": Signal("ns", "counter", "time on a CPU (schedstat)"),
    "thread_wait_ns": Signal("ns", "counter", "time ready to run, waiting for a CPU (schedstat)"),
    "thread_user_ns": Signal("ns", "counter", "CPU time in the program"),
    "thread_system_ns": Signal("ns", "counter", "CPU time in the kernel"),
    "thread_voluntary_switches": Signal("count", "counter", "times the thread went to sleep"),
    "thread_involuntary_switches": Signal("count", "counter", "times the thread was taken off its CPU"),
    "thread_cpu": Signal("cpu", "gauge", "the CPU that the thread ran on last"),
    "process_user_ns": Signal("ns", "counter", "CPU time of all threads in the program, ended ones too"),
    "process_system_ns": Signal("ns", "counter", "CPU time of all threads in the kernel, ended ones too"),
    "process_major_faults": Signal("count", "counter", "page faults that had to read from a disk"),
    "process_threads": Signal("count", "gauge", "threads of the process"),
    "process_rss_bytes": Signal("bytes", "gauge", "resident memory"),
    "process_anon_bytes": Signal("bytes", "gauge", "resident memory that is not backed by files or shared"),
    "process_node_bytes": Signal("bytes", "gauge", "resident memory on a NUMA node (label node)"),
    "cpu_busy_ns": Signal("ns", "counter", "CPU time that was neither idle nor waiting for I/O"),
    "cpu_softirq_ns": Signal("ns", "counter", "CPU time in soft interrupts: network packets, timers"),
    "cpu_steal_ns": Signal("ns", "counter", "CPU time that the hypervisor gave to others"),
    "cpu_iowait_ns": Signal("ns", "counter", "idle time while something waited for I/O"),
    "cpu_total_ns": Signal("ns", "counter", "all CPU time, idle included"),
    "load1": Signal("count", "gauge", "tasks running, ready, or in uninterruptible sleep, mean of a minute"),
    "memory_available_bytes": Signal("bytes", "gauge", "memory that programs can still get without swapping"),
    "swap_in_bytes": Signal("bytes", "counter", "read back from swap"),
    "swap_out_bytes": Signal("bytes", "counter", "written to swap"),
    "psi_some_ns": Signal("ns", "counter", "time in which a task was stalled (label resource: cpu, memory, io)"),
    "psi_full_ns": Signal("ns", "counter", "time in which all tasks were stalled (label resource)"),
    "cgroup_periods": Signal("count", "counter", "quota periods in which the group ran"),
    "cgroup_throttled_periods": Signal("count", "counter", "of those, periods in which the quota was used up"),
    "cgroup_throttled_ns": Signal("ns", "counter", "time throttled, summed over CPUs"),
    "cgroup_memory_bytes": Signal("bytes", "gauge", "memory of the group, page cache included"),
    "cgroup_memory_limit_hits": Signal("count", "counter", "times the group reached its memory limit"),
    "cgroup_oom_kills": Signal("count", "counter", "processes of the group killed for lack of memory"),
    "cgroup_node_bytes": Signal("bytes", "gauge", "anonymous memory of the group on a NUMA node (label node)"),
}


class HostProbe:
    """Host telemetry of one run; ``cgroup/0`` is the target's own group, ``cgroup/1`` the one above it, and so on."""

    name = "host"
    signals: Mapping[str, Signal] = SIGNALS

    def start(self, context: ProbeContext, out: Recorder) -> Sequence[Task]:
        """Record what does not change and give the tasks. Raises Unavailable without a Linux /proc."""
        try:
            os.listdir(context.path("/proc"))
            uptime_s = float(procfs.read(context.path("/proc/uptime")).split()[0])
        except (OSError, ValueError, IndexError):
            raise Unavailable("There is no Linux /proc here: host telemetry needs one.") from None
        self._target = _Target(context, round(uptime_s * os.sysconf("SC_CLK_TCK")))
        self._limits = _Limits(context, out)
        self._machine = _Machine(context)
        nodes = procfs.numa_nodes(context.root)
        out.fact("numa_nodes", {str(node): cpus for node, cpus in nodes.items()})
        out.fact("gpu_numa_nodes", procfs.gpu_nodes(context.root))
        tasks = [
            Task("threads", 1.0, self._target.beat),
            Task("limits", 1.0, self._limits.beat),
            Task("machine", _MACHINE_PERIOD_S, self._machine.beat),
        ]
        if len(nodes) > 1:
            tasks.append(Task("nodes", _NODES_PERIOD_S, self._nodes))
        return tasks

    def stop(self, out: Recorder) -> None:
        """A last full reading, and where every total stood."""
        self._target.close(out)
        self._limits.close(out)
        self._machine.close(out)

    def _nodes(self, out: Recorder) -> None:
        self._target.nodes(out)
        self._limits.nodes(out)


class _Target:
    """Processes and threads of the target."""

    def __init__(self, context: ProbeContext, start_ticks: int) -> None:
        self._proc = context.path("/proc")
        self._started_ticks = start_ticks
        self._tree = ProcessTree(self._proc, context.pid)
        self._threads = Threads(self._proc)
        self._processes: dict[int, Steps] = {}
        self._rss: dict[int, int] = {}
        self._tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._next = 0

    def beat(self, out: Recorder, everything: bool = False) -> None:
        pids = self._tree.update()
        for pid in [pid for pid in self._processes if pid not in pids]:
            self._gone(out, pid)
        due = self._in_turn(out, sorted(pids))
        new = {pid: born for pid in due if (born := self._process(out, pid)) is not None}
        self._threads.beat(out, new, set(due), everything)

    def close(self, out: Recorder) -> None:
        with contextlib.suppress(OSError):  # what was read before stands
            self.beat(out, everything=True)
        self._threads.close(out)
        for steps in self._processes.values():
            steps.close(out)

    def nodes(self, out: Recorder) -> None:
        """Where the memory of the processes lies, on machines with several NUMA nodes."""
        for pid, rss in list(self._rss.items()):
            if rss > _NUMA_MAPS_MAX_BYTES:
                out.missing(
                    "process_node_bytes", "not read above 4 GiB: it would hold up the process", f"process/{pid}"
                )
                continue
            try:
                pages = procfs.numa_pages(procfs.read(self._proc / f"{pid}/numa_maps"))
            except OSError as error:
                if pid in self._tree.pids and not isinstance(error, ProcessLookupError):
                    out.missing("process_node_bytes", procfs.why(error, "numa_maps"), f"process/{pid}")
                continue
            for node, size in pages.items():
                out.sample("process_node_bytes", size, f"process/{pid}", {"node": str(node)})

    def _in_turn(self, out: Recorder, pids: list[int]) -> list[int]:
        if len(pids) <= PROCESSES_PER_BEAT:
            return pids
        if self._next == 0:
            out.fact("processes_in_turn", {"processes": len(pids), "per_beat": PROCESSES_PER_BEAT})
        first, self._next = self._next % len(pids), self._next + PROCESSES_PER_BEAT
        return (pids + pids)[first : first + PROCESSES_PER_BEAT]

    def _process(self, out: Recorder, pid: int) -> bool | None:
        """Read a process; whether it began after the probe. None where it ended meanwhile."""
        folder = f"{self._proc}/{pid}"
        try:
            stat = procfs.task_stat(procfs.read(f"{folder}/stat"))
            pages = procfs.read(f"{folder}/statm").split()
            rss, shared = int(pages[1]) * self._page, int(pages[2]) * self._page
        except PermissionError as error:
            out.missing("process_user_ns", procfs.why(error, "a process of the target"))
            return None
        except (OSError, ValueError, IndexError):
            return None
        now_ns, scope = out.now_ns(), f"process/{pid}"
        born = stat.start_ticks > self._started_ticks
        steps = self._processes.get(pid)
        if steps is None:
            steps = self._processes[pid] = self._new(out, pid, folder, stat, born, now_ns)
        steps.see(out, "process_user_ns", stat.user_ticks * self._tick_ns, now_ns)
        steps.see(out, "process_system_ns", stat.system_ticks * self._tick_ns, now_ns)
        steps.see(out, "process_major_faults", stat.major_faults, now_ns)
        steps.see(out, "process_threads", stat.threads, now_ns)
        self._rss[pid] = rss
        if rss:  # one that ended and was not waited for has none
            out.sample("process_rss_bytes", rss, scope, time_ns=now_ns)
            out.sample("process_anon_bytes", max(rss - shared, 0), scope, time_ns=now_ns)
        return born

    def _new(self, out: Recorder, pid: int, folder: str, stat: procfs.TaskStat, born: bool, now_ns: int) -> Steps:
        """A process not seen before. One that began after the probe counts from 0."""
        steps = Steps(f"process/{pid}")
        if born:
            for signal in ("process_user_ns", "process_system_ns", "process_major_faults"):
                steps.hold(signal, 0, now_ns - 1_000_000_000)
        out.fact("process_name", stat.name, steps.scope)
        status = procfs.read_or_none(f"{folder}/status") or b""
        for name, field in (("cpus_allowed", b"Cpus_allowed_list"), ("mems_allowed", b"Mems_allowed_list")):
            value = procfs.field_after(status, field)
            if value is not None:
                out.fact(name, value.decode(), steps.scope)
        return steps

    def _gone(self, out: Recorder, pid: int) -> None:
        self._processes.pop(pid).close(out)
        self._rss.pop(pid, None)
        self._threads.drop(out, pid)


class _Limits:
    """The target's cgroup, from its own group upwards, and the pressure that its tasks feel."""

    def __init__(self, context: ProbeContext, out: Recorder) -> None:
        groups = procfs.cgroups(context.root, context.pid)
        own = [group for chain in groups.values() for group in chain if group.unified and group.level == 0]
        self._pressure = [self._pressure_file(context, own, resource) for resource in _RESOURCES]
        self._cpu = [group for group in groups.get("cpu", []) if self._quota(out, group)]
        self._memory = groups.get("memory", [])[:1]
        limits = [limit for group in groups.get("memory", []) if (limit := _or_none(procfs.memory_limit_bytes, group))]
        if limits:
            out.fact("cgroup_memory_limit_bytes", min(limits))
        if not self._cpu:
            out.missing("cgroup_throttled_periods", _NO_QUOTA if groups.get("cpu") else _NO_CGROUP)
        if not self._memory:
            out.missing("cgroup_memory_bytes", _NO_CGROUP)
        self._steps: dict[str, Steps] = {}

    def beat(self, out: Recorder) -> None:
        for group in self._cpu:
            self._take(out, group, "cgroup_periods", _throttling)
        for group in self._memory:
            self._take(out, group, "cgroup_memory_limit_hits", _hits)
            used = _or_none(procfs.memory_used_bytes, group)
            if used is not None:
                out.sample("cgroup_memory_bytes", used, f"cgroup/{group.level}")
        for resource, (path, scope) in zip(_RESOURCES, self._pressure, strict=True):
            self._stalls(out, resource, path, scope)

    def nodes(self, out: Recorder) -> None:
        for group in self._memory:
            for node, size in (_or_none(procfs.memory_nodes, group) or {}).items():
                out.sample("cgroup_node_bytes", size, f"cgroup/{group.level}", {"node": str(node)})

    def close(self, out: Recorder) -> None:
        for steps in self._steps.values():
            steps.close(out)

    def _quota(self, out: Recorder, group: procfs.Cgroup) -> bool:
        cpus = _or_none(procfs.quota_cpus, group)
        if cpus is not None:
            out.fact("cgroup_quota_cpus", cpus, f"cgroup/{group.level}")
        return cpus is not None

    def _take(
        self, out: Recorder, group: procfs.Cgroup, signal: str, totals: Callable[[procfs.Cgroup], dict[str, int]]
    ) -> None:
        scope, now_ns = f"cgroup/{group.level}", out.now_ns()
        try:
            found = totals(group)
        except (OSError, ValueError) as error:
            out.missing(signal, procfs.why(error, "it") if isinstance(error, OSError) else str(error), scope)
            return
        steps = self._steps.setdefault(scope, Steps(scope))
        for name, value in found.items():
            steps.see(out, name, value, now_ns)

    def _pressure_file(self, context: ProbeContext, own: list[procfs.Cgroup], resource: str) -> tuple[Path, str]:
        """The group's file where it has one that can be read, else the machine's."""
        for group in own:
            path = group.folder / f"{resource}.pressure"
            if procfs.read_or_none(path):
                return path, "cgroup/0"
        return context.path(f"/proc/pressure/{resource}"), ""

    def _stalls(self, out: Recorder, resource: str, path: Path, scope: str) -> None:
        try:
            totals, now_ns = procfs.pressure(procfs.read(path)), out.now_ns()
        except OSError as error:
            out.missing(
                "psi_some_ns", f"{procfs.why(error, resource + ' pressure')} (needs a kernel with psi=1)", scope
            )
            return
        for kind in ("some", "full"):
            if kind in totals:
                out.sample(f"psi_{kind}_ns", totals[kind], scope, {"resource": resource}, time_ns=now_ns)


_NO_QUOTA = "the target's cgroup has no CPU quota"
_NO_CGROUP = "no cgroup of the target can be seen here"


def _or_none(function: Callable[[procfs.Cgroup], _Value | None], group: procfs.Cgroup) -> _Value | None:
    """A value of a group's file, None where there is no such file or no number in it."""
    try:
        return function(group)
    except (OSError, ValueError):
        return None


def _throttling(group: procfs.Cgroup) -> dict[str, int]:
    found = procfs.throttled(group, procfs.key_values(procfs.read(group.folder / "cpu.stat")))
    names = {"periods": "cgroup_periods", "throttled": "cgroup_throttled_periods", "ns": "cgroup_throttled_ns"}
    return {names[key]: value for key, value in found.items()}


def _hits(group: procfs.Cgroup) -> dict[str, int]:
    names = {"max": "cgroup_memory_limit_hits", "oom_kill": "cgroup_oom_kills"}
    return {names[key]: value for key, value in procfs.memory_events(group).items()}


def _number(data: bytes, name: bytes) -> int:
    """Raises KeyError where there is no such line."""
    value = procfs.field_after(data, name)
    if value is None:
        raise KeyError(name.decode())
    return int(value.split()[0])


def _kilobytes(data: bytes, name: bytes) -> int:
    return _number(data, name) * 1024


class _Machine:
    """CPU time by kind, load, and memory of the whole machine (in a container: of the host)."""

    def __init__(self, context: ProbeContext) -> None:
        self._proc = context.path("/proc")
        self._tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._steps: dict[str, Steps] = {}
        self._total_said = False
        self._cpu_count = 0

    def beat(self, out: Recorder) -> None:
        for signal, read in (
            ("cpu_softirq_ns", self._cpus),
            ("memory_available_bytes", self._memory),
            ("swap_in_bytes", self._swap),
            ("load1", self._load),
        ):
            try:
                read(out)
            except (OSError, ValueError, KeyError, IndexError) as error:
                text = (
                    procfs.why(error, "/proc")
                    if isinstance(error, OSError)
                    else f"not in this machine's /proc: {error}"
                )
                out.missing(signal, text)

    def close(self, out: Recorder) -> None:
        for steps in self._steps.values():
            steps.close(out)

    def _cpus(self, out: Recorder) -> None:
        lines, now_ns = procfs.read(self._proc / "stat").split(b"\n"), out.now_ns()
        cpus = [line.split() for line in itertools.takewhile(lambda line: line.startswith(b"cpu"), lines)]
        ticks = dict(zip(_CPU_FIELDS, map(int, cpus[0][1:]), strict=False))
        self._all_cpus(out, ticks, now_ns)
        if self._cpu_count != len(cpus) - 1:
            self._cpu_count = len(cpus) - 1
            out.fact("cpu_count", self._cpu_count)
        for name, *words in cpus[1:]:
            scope = f"cpu/{name[3:].decode()}"
            steps = self._steps.setdefault(scope, Steps(scope))
            steps.see(out, "cpu_softirq_ns", int(words[_SOFTIRQ]) * self._tick_ns, now_ns)

    def _all_cpus(self, out: Recorder, ticks: dict[str, int], now_ns: int) -> None:
        total = sum(ticks.values())
        values = {
            "cpu_busy_ns": total - ticks["idle"] - ticks.get("iowait", 0),
            "cpu_softirq_ns": ticks.get("softirq", 0),
            "cpu_iowait_ns": ticks.get("iowait", 0),
            "cpu_steal_ns": ticks.get("steal", 0),
            "cpu_total_ns": total,
        }
        steps = self._steps.setdefault("", Steps(""))
        for signal, value in values.items():
            steps.see(out, signal, value * self._tick_ns, now_ns)

    def _memory(self, out: Recorder) -> None:
        found = procfs.read(self._proc / "meminfo")
        if not self._total_said:
            self._total_said = True
            out.fact("memory_total_bytes", _kilobytes(found, b"MemTotal"))
        out.sample("memory_available_bytes", _kilobytes(found, b"MemAvailable"))

    def _swap(self, out: Recorder) -> None:
        found, now_ns = procfs.read(self._proc / "vmstat"), out.now_ns()
        steps = self._steps.setdefault("swap", Steps(""))
        steps.see(out, "swap_in_bytes", _number(found, b"pswpin") * self._page, now_ns)
        steps.see(out, "swap_out_bytes", _number(found, b"pswpout") * self._page, now_ns)

    def _load(self, out: Recorder) -> None:
        out.sample("load1", float(procfs.read(self._proc / "loadavg").split()[0]))
