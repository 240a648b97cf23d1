"""The host probe on files of a made-up machine, and on this machine with real programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infprof.probes import ProbeContext, Unavailable, host_tasks, make_probe, procfs
from infprof.probes.host import SIGNALS, HostProbe
from infprof.probes.recorder import Clock, TelemetryFile
from infprof.telemetry import Series, Telemetry, read_telemetry
from machine_files import SECOND, START, Machine, Run, stat_line, write

PID = 10
TICK_NS = SECOND // os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path / "root")
    machine.process(PID)
    machine.thread(PID, PID)
    return machine


def started(machine: Machine, tmp_path: Path) -> Run:
    return Run(HostProbe(), machine.root, tmp_path)


def points(telemetry: Telemetry, name: str, scope: str = "") -> list[tuple[float, float]]:
    """(seconds since the start, value) of one series."""
    (series,) = [s for s in telemetry.series(name) if s.scope == scope]
    return [((int(t) - START) / SECOND, float(v)) for t, v in zip(series.time, series.value, strict=True)]


def only(telemetry: Telemetry, name: str) -> Series:
    (series,) = telemetry.series(name)
    return series


# Reading


def test_a_name_with_brackets_and_blanks_moves_no_field() -> None:
    line = "7 (a) R (b) S) S 3 4 5 " + " ".join(str(n) for n in range(7, 53))
    stat = procfs.task_stat(line.encode())
    assert (stat.name, stat.parent, stat.group, stat.session) == ("a) R (b) S", 3, 4, 5)
    assert (stat.major_faults, stat.user_ticks, stat.system_ticks) == (12, 14, 15)
    assert (stat.threads, stat.start_ticks, stat.cpu) == (20, 22, 39)


@pytest.mark.parametrize("data", [b"", b"7 (short) S 1 2", b"no brackets"])
def test_what_is_no_stat_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="stat file"):
        procfs.task_stat(data)


@pytest.mark.parametrize(("text", "numbers"), [("0-3,8", [0, 1, 2, 3, 8]), ("5\n", [5]), ("\n", [])])
def test_cpu_lists(text: str, numbers: list[int]) -> None:
    assert procfs.cpu_list(text) == numbers


def test_a_field_is_found_by_its_whole_name() -> None:
    status = b"Name:\tx\nnonvoluntary_ctxt_switches:\t5\nvoluntary_ctxt_switches:\t7"
    assert procfs.field_after(status, b"voluntary_ctxt_switches") == b"7"
    assert procfs.field_after(status, b"Name") == b"x"
    assert procfs.field_after(status, b"voluntary_ctxt") is None
    assert procfs.field_after(b"a 1\npswpin 4\n", b"pswpin") == b"4"


def test_pressure_totals_are_microseconds() -> None:
    text = b"some avg10=64.20 avg60=58.11 avg300=40.02 total=9912\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=3\n"
    assert procfs.pressure(text) == {"some": 9_912_000, "full": 3_000}


def test_numa_maps_count_pages_of_each_size() -> None:
    text = b"7f0 default anon=2 dirty=2 N0=1 N1=1 kernelpagesize_kB=4\n7f8 bind:1 huge anon=1 N1=3 kernelpagesize_kB=2048\n"
    assert procfs.numa_pages(text) == {0: 4096, 1: 4096 + 3 * 2048 * 1024}


# Threads and processes


def test_a_thread_that_runs_is_read_in_full_and_named(machine: Machine, tmp_path: Path) -> None:
    run = started(machine, tmp_path)
    run.beat()
    machine.thread(PID, PID, run=600_000_000, wait=200_000_000, turns=50, ticks=(40, 20), switches=(30, 15), cpu=3)
    run.beat()
    telemetry, scope = run.end(), f"thread/{PID}/{PID}"
    assert points(telemetry, "thread_run_ns", scope) == [(0, 0), (1, 600_000_000)]
    assert points(telemetry, "thread_wait_ns", scope) == [(0, 0), (1, 200_000_000)]
    assert points(telemetry, "thread_user_ns", scope) == [(0, 0), (1, 40 * TICK_NS)]
    assert points(telemetry, "thread_system_ns", scope) == [(0, 0), (1, 20 * TICK_NS)]
    assert points(telemetry, "thread_voluntary_switches", scope) == [(0, 0), (1, 30)]
    assert points(telemetry, "thread_involuntary_switches", scope) == [(0, 0), (1, 15)]
    assert points(telemetry, "thread_cpu", scope) == [(1, 3)]
    assert telemetry.facts("thread_name") == {scope: "engine"}


def test_a_thread_that_sleeps_leaves_no_rows(machine: Machine, tmp_path: Path) -> None:
    machine.thread(PID, 11, run=5_000, turns=3)
    run = started(machine, tmp_path)
    for _ in range(5):
        run.beat()
    assert run.end().series("thread_run_ns") == []


def test_every_step_has_both_its_ends(machine: Machine, tmp_path: Path) -> None:
    run = started(machine, tmp_path)
    for _ in range(4):
        run.beat()
    machine.thread(PID, PID, run=900_000_000, turns=9)
    run.beat()
    for _ in range(3):
        run.beat()
    series = points(run.end(), "thread_run_ns", f"thread/{PID}/{PID}")
    assert series == [(3, 0), (4, 900_000_000), (7, 900_000_000)]


def test_a_thread_that_runs_little_is_read_in_full_now_and_then(machine: Machine, tmp_path: Path) -> None:
    run = started(machine, tmp_path)
    for second in range(12):
        machine.thread(PID, PID, run=second * 1_000_000, turns=1 + second, switches=(second, 0))
        run.beat()
    telemetry, scope = run.end(), f"thread/{PID}/{PID}"
    assert len(points(telemetry, "thread_run_ns", scope)) == 12
    assert points(telemetry, "thread_voluntary_switches", scope) == [(0, 0), (10, 10), (11, 11)]


def test_a_new_thread_counts_from_zero(machine: Machine, tmp_path: Path) -> None:
    run = started(machine, tmp_path)
    run.beat()
    machine.thread(PID, 12, run=700_000_000, turns=4)
    run.beat()
    assert points(run.end(), "thread_run_ns", f"thread/{PID}/12") == [(0, 0), (1, 700_000_000)]


def test_a_thread_that_ended_keeps_what_it_did(machine: Machine, tmp_path: Path) -> None:
    machine.thread(PID, 11, run=0)
    run = started(machine, tmp_path)
    run.beat()
    machine.thread(PID, 11, run=500_000_000, turns=9)
    run.beat()
    remove(machine.root / f"proc/{PID}/task/11")
    run.beat()
    assert points(run.end(), "thread_run_ns", f"thread/{PID}/11") == [(0, 0), (1, 500_000_000)]


def remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def test_a_thread_that_ends_between_listing_and_reading_is_no_error(machine: Machine, tmp_path: Path) -> None:
    run = started(machine, tmp_path)
    run.beat()
    (machine.root / f"proc/{PID}/task/13").mkdir()
    run.beat()
    telemetry = run.end()
    assert telemetry.series("thread_run_ns", f"thread/{PID}/13") == []
    assert [m.signal for m in telemetry.missing if m.signal.startswith("thread")] == []


def test_children_belong_and_strangers_do_not(machine: Machine, tmp_path: Path) -> None:
    for pid, parent, session in ((20, PID, 1), (15, 20, 1), (30, 1, PID), (40, 1, 1)):
        machine.process(pid, parent=parent, session=session)
        machine.thread(pid, pid)
    run = started(machine, tmp_path)
    run.beat()
    machine.process(20, parent=1, session=1)  # its parent ended: it belongs all the same
    run.beat()
    telemetry = run.end()
    assert {s.scope for s in telemetry.series("process_rss_bytes")} == {
        "process/10",
        "process/20",
        "process/15",
        "process/30",
    }
    assert len(telemetry.series("process_rss_bytes", "process/20")[0].value) == 3


def test_a_number_that_is_used_again_is_another_process(machine: Machine) -> None:
    machine.process(20, parent=PID)
    tree = host_tasks.ProcessTree(machine.root / "proc", PID)
    assert tree.update() == {PID, 20}
    remove(machine.root / "proc/20")
    assert tree.update() == {PID}
    machine.process(20, parent=1)
    machine.process(21, parent=20)
    assert tree.update() == {PID}


def test_a_process_gives_memory_faults_and_time(machine: Machine, tmp_path: Path) -> None:
    run = started(machine, tmp_path)
    run.beat()
    machine.process(PID, ticks=(50, 10), faults=7, pages=(300, 40))
    run.beat()
    telemetry, scope = run.end(), f"process/{PID}"
    assert points(telemetry, "process_user_ns", scope) == [(0, 0), (1, 50 * TICK_NS)]
    assert points(telemetry, "process_major_faults", scope) == [(0, 0), (1, 7)]
    assert points(telemetry, "process_rss_bytes", scope)[:2] == [(0, 100 * PAGE), (1, 300 * PAGE)]
    assert points(telemetry, "process_anon_bytes", scope)[:2] == [(0, 60 * PAGE), (1, 260 * PAGE)]
    assert telemetry.facts("cpus_allowed") == {scope: "0-3"}
    assert telemetry.facts("mems_allowed") == {scope: "0-1"}


def test_a_process_that_began_later_counts_from_zero(machine: Machine, tmp_path: Path) -> None:
    run = started(machine, tmp_path)
    run.beat()
    machine.process(20, parent=PID, ticks=(30, 0), start=500 * os.sysconf("SC_CLK_TCK") + 1)
    machine.thread(20, 20, run=300_000_000, turns=2)
    run.beat()
    telemetry = run.end()
    assert points(telemetry, "process_user_ns", "process/20") == [(0, 0), (1, 30 * TICK_NS)]
    assert points(telemetry, "thread_run_ns", "thread/20/20") == [(0, 0), (1, 300_000_000)]


def test_more_threads_than_a_beat_reads_are_read_in_turn(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tasks, "THREADS_PER_BEAT", 2)
    for tid in (11, 12, 13):
        machine.thread(PID, tid)
    run = started(machine, tmp_path)
    run.beat()
    run.beat()
    for tid in (PID, 11, 12, 13):
        machine.thread(PID, tid, run=800_000_000, turns=5)
    run.beat()
    run.beat()
    telemetry = run.end()
    assert telemetry.facts("threads_in_turn") == {"": {"threads": 4, "per_beat": 2}}
    assert sum(s.increase() or 0 for s in telemetry.series("thread_run_ns")) == 4 * 800_000_000


@pytest.mark.parametrize("text", [None, "0 0 0\n"])
def test_a_kernel_without_run_queue_times_is_said_once(machine: Machine, tmp_path: Path, text: str | None) -> None:
    path = machine.root / f"proc/{PID}/task/{PID}/schedstat"
    path.unlink() if text is None else path.write_text(text, encoding="utf-8")
    run = started(machine, tmp_path)
    run.beat()
    for ticks in (40, 80):
        write(machine.root / f"proc/{PID}/task/{PID}/stat", stat_of_thread(ticks))
        run.beat()
    telemetry = run.end()
    reasons = [m.reason for m in telemetry.missing if m.signal == "thread_wait_ns"]
    assert len(reasons) == 1 and "schedstat" in reasons[0]
    assert only(telemetry, "thread_user_ns").increase() == 80 * TICK_NS


def stat_of_thread(ticks: int) -> str:
    return stat_line(PID, "engine", 1, 1, (ticks, 0), 0, 100, 0)


def test_files_that_may_not_be_read_are_said_once(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = procfs.read

    def refuse(path: str | Path) -> bytes:
        if str(path).endswith("/stat") and f"/{PID}/" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    run = started(machine, tmp_path)
    monkeypatch.setattr(procfs, "read", refuse)
    run.beat()
    run.beat()
    telemetry = run.end()
    assert telemetry.why_missing("process_user_ns") == "a process of the target cannot be read here: Permission denied"
    assert telemetry.why_missing("thread_user_ns") == "a thread of the target cannot be read here: Permission denied"
    assert len({(m.signal, m.scope) for m in telemetry.missing}) == len(telemetry.missing)
    assert only(telemetry, "swap_in_bytes").value[0] == 10 * PAGE
    assert not any(str(tmp_path) in m.reason for m in telemetry.missing)


def test_no_proc_is_no_host_telemetry(tmp_path: Path) -> None:
    file = TelemetryFile(tmp_path / "t.sqlite", Clock())
    with pytest.raises(Unavailable, match="no Linux /proc"):
        HostProbe().start(ProbeContext(PID, root=tmp_path / "nothing"), file.recorder("host", SIGNALS))


# The machine


def test_cpu_time_by_kind_and_cpu(machine: Machine, tmp_path: Path) -> None:
    run = started(machine, tmp_path)
    run.beat()
    # user nice system idle iowait irq softirq steal
    machine.file("proc/stat", "cpu  10 0 10 60 4 0 12 4 0 0\ncpu0 10 0 10 60 4 0 12 4 0 0\nintr 5\ncpuidle 7\n")
    run.beat()
    telemetry = run.end()
    assert only(telemetry, "cpu_busy_ns").increase() == 36 * TICK_NS
    assert telemetry.facts("cpu_count") == {"": 1}
    assert only(telemetry, "cpu_total_ns").increase() == 100 * TICK_NS
    assert only(telemetry, "cpu_steal_ns").increase() == 4 * TICK_NS
    assert telemetry.series("cpu_softirq_ns", "cpu/0")[0].increase() == 12 * TICK_NS
    assert telemetry.scopes("cpu_softirq_ns") == ["", "cpu/0"]


def test_a_process_that_was_not_waited_for_has_no_memory(machine: Machine, tmp_path: Path) -> None:
    run = started(machine, tmp_path)
    run.beat()
    machine.process(PID, pages=(0, 0))
    run.beat()
    assert points(run.end(), "process_anon_bytes", f"process/{PID}") == [(0, 60 * PAGE)]


def test_memory_load_and_swap(machine: Machine, tmp_path: Path) -> None:
    run = started(machine, tmp_path)
    run.beat()
    machine.file("proc/vmstat", "pswpin 15\npswpout 20\n")
    run.beat()
    telemetry = run.end()
    assert telemetry.facts("memory_total_bytes") == {"": 16_384_000}
    assert list(only(telemetry, "memory_available_bytes").value) == [4_096_000, 4_096_000]
    assert only(telemetry, "swap_in_bytes").increase() == 5 * PAGE
    assert only(telemetry, "swap_out_bytes").increase() == 0
    assert only(telemetry, "load1").value[0] == 3.5


def test_what_a_machine_lacks_is_said_and_the_rest_goes_on(machine: Machine, tmp_path: Path) -> None:
    machine.file("proc/meminfo", "MemTotal: 5 kB\n")
    (machine.root / "proc/loadavg").unlink()
    run = started(machine, tmp_path)
    run.beat()
    run.beat()
    telemetry = run.end()
    assert telemetry.why_missing("memory_available_bytes") == "not in this machine's /proc: 'MemAvailable'"
    assert telemetry.why_missing("load1") == "/proc cannot be read here: No such file or directory"
    assert "No such file" in (telemetry.why_missing("psi_some_ns") or "")
    assert only(telemetry, "swap_in_bytes").value[0] == 10 * PAGE
    assert len({(m.signal, m.scope) for m in telemetry.missing}) == len(telemetry.missing)


# Limits


def test_version_2_limits_of_the_group_and_those_above(machine: Machine, tmp_path: Path) -> None:
    own = machine.cgroup2()
    machine.file(f"{own}/cpu.stat", "usage_usec 5\nnr_periods 100\nnr_throttled 10\nthrottled_usec 1000\n")
    machine.file(f"{own}/cpu.max", "max 100000\n")
    machine.file("sys/fs/cgroup/pod/cpu.stat", "nr_periods 50\nnr_throttled 5\nthrottled_usec 200\n")
    machine.file("sys/fs/cgroup/pod/cpu.max", "250000 100000\n")
    machine.file(f"{own}/memory.current", "7000\n")
    machine.file(f"{own}/memory.max", "max\n")
    machine.file("sys/fs/cgroup/pod/memory.max", "90000\n")
    machine.file(f"{own}/memory.events", "low 0\nhigh 0\nmax 2\noom 0\noom_kill 1\n")
    machine.file(f"{own}/cpu.pressure", "some avg10=0 avg60=0 avg300=0 total=100\n")
    machine.file("proc/pressure/cpu", "some avg10=0 avg60=0 avg300=0 total=999\n")
    run = started(machine, tmp_path)
    run.beat()
    machine.file("sys/fs/cgroup/pod/cpu.stat", "nr_periods 60\nnr_throttled 12\nthrottled_usec 700\n")
    run.beat()
    telemetry = run.end()
    assert telemetry.facts("cgroup_quota_cpus") == {"cgroup/1": 2.5}
    assert telemetry.facts("cgroup_memory_limit_bytes") == {"": 90_000}
    assert telemetry.scopes("cgroup_periods") == ["cgroup/1"]
    assert only(telemetry, "cgroup_throttled_periods").increase() == 7
    assert only(telemetry, "cgroup_throttled_ns").increase() == 500_000
    assert only(telemetry, "cgroup_memory_bytes").value[0] == 7_000
    assert only(telemetry, "cgroup_memory_limit_hits").value[0] == 2
    assert only(telemetry, "cgroup_oom_kills").value[0] == 1
    cpu = [s for s in telemetry.series("psi_some_ns") if s.labels == {"resource": "cpu"}]
    assert [(s.scope, s.value[0]) for s in cpu] == [("cgroup/0", 100_000)]


def test_version_1_limits(machine: Machine, tmp_path: Path) -> None:
    machine.file(f"proc/{PID}/cgroup", "4:memory:/app\n2:cpu,cpuacct:/app\n0::/\n")
    machine.file(
        "proc/self/mountinfo",
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    )
    cpu, memory = "sys/fs/cgroup/cpu/app", "sys/fs/cgroup/memory/app"
    machine.file("sys/fs/cgroup/unified/cgroup.procs", "")
    machine.file(f"{cpu}/cpu.stat", "nr_periods 10\nnr_throttled 4\nthrottled_time 900\n")
    machine.file(f"{cpu}/cpu.cfs_quota_us", "50000\n")
    machine.file(f"{cpu}/cpu.cfs_period_us", "100000\n")
    machine.file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    machine.file(f"{memory}/memory.usage_in_bytes", "4096\n")
    machine.file(f"{memory}/memory.limit_in_bytes", "9223372036854771712\n")
    machine.file(f"{memory}/memory.failcnt", "3\n")
    machine.file(f"{memory}/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    run = started(machine, tmp_path)
    run.beat()
    telemetry = run.end()
    assert telemetry.facts("cgroup_quota_cpus") == {"cgroup/0": 0.5}
    assert telemetry.facts("cgroup_memory_limit_bytes") == {}
    assert only(telemetry, "cgroup_throttled_ns").value[0] == 900
    assert only(telemetry, "cgroup_memory_limit_hits").value[0] == 3
    assert only(telemetry, "cgroup_oom_kills").value[0] == 2


@pytest.mark.parametrize(
    ("path", "mount_root"),
    [("/docker/0123abc", "/docker/0123abc"), ("/", "/"), ("/../elsewhere", "/")],
    ids=["host path below the mount", "private namespace", "outside the namespace"],
)
def test_containers_find_their_own_group(machine: Machine, path: str, mount_root: str) -> None:
    machine.cgroup2(path=path, mount_root=mount_root)
    machine.file("sys/fs/cgroup/cpu.stat", "nr_periods 1\n")
    (group,) = procfs.cgroups(machine.root, PID)["cpu"]
    assert group == procfs.Cgroup(machine.root / "sys/fs/cgroup", 0, True)


def test_no_cgroup_and_no_quota_are_told_apart(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    none = Run(HostProbe(), machine.root, tmp_path / "none").end()
    own = machine.cgroup2()
    machine.file(f"{own}/cpu.stat", "nr_periods 0\n")
    machine.file(f"{own}/cpu.max", "max 100000\n")
    unlimited = started(machine, tmp_path).end()
    assert none.why_missing("cgroup_throttled_periods") == "no cgroup of the target can be seen here"
    assert unlimited.why_missing("cgroup_throttled_periods") == "the target's cgroup has no CPU quota"


# NUMA


def test_nodes_of_machine_gpu_and_memory(machine: Machine, tmp_path: Path) -> None:
    for node, cpus in ((0, "0-1"), (1, "2-3")):
        machine.file(f"sys/devices/system/node/node{node}/cpulist", cpus + "\n")
    for address, vendor, kind, node in (
        ("0000:17:00.0", "0x10de", "0x030200", 0),
        ("0000:18:00.0", "0x10de", "0x040300", 0),
        ("0000:c1:00.0", "0x1002", "0x120000", -1),
    ):
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
            machine.file(f"sys/bus/pci/devices/{address}/{name}", text + "\n")
    machine.file(f"proc/{PID}/numa_maps", "7f0 default N0=1 N1=19 kernelpagesize_kB=4\n")
    run = started(machine, tmp_path)
    run.beat()
    telemetry = run.end()
    assert telemetry.facts("numa_nodes") == {"": {"0": [0, 1], "1": [2, 3]}}
    assert telemetry.facts("gpu_numa_nodes") == {"": {"0000:17:00.0": 0, "0000:c1:00.0": None}}
    nodes = {s.labels["node"]: s.value[0] for s in telemetry.series("process_node_bytes")}
    assert nodes == {"0": 4096, "1": 19 * 4096}


def test_numa_maps_of_large_processes_are_left_alone(machine: Machine, tmp_path: Path) -> None:
    for node in (0, 1):
        machine.file(f"sys/devices/system/node/node{node}/cpulist", f"{node}\n")
    machine.process(PID, pages=((5 << 30) // PAGE, 0))
    machine.file(f"proc/{PID}/numa_maps", "7f0 default N0=1 kernelpagesize_kB=4\n")
    own = machine.cgroup2()
    machine.file(f"{own}/memory.current", "1\n")
    machine.file(f"{own}/memory.numa_stat", "anon N0=100 N1=300\nfile N0=5 N1=5\n")
    run = started(machine, tmp_path)
    run.beat()
    telemetry = run.end()
    assert telemetry.series("process_node_bytes") == []
    assert "above 4 GiB" in (telemetry.why_missing("process_node_bytes") or "")
    assert {s.labels["node"]: s.value[0] for s in telemetry.series("cgroup_node_bytes")} == {"0": 100, "1": 300}


# This machine

WORKER = """
import sys, threading, time
def burn(cpu_s):
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass
def work():
    for line in sys.stdin:
        burn(float(line))
        print("done", flush=True)
for _ in range(5):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WORKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_a_real_program(worker: subprocess.Popen[str], tmp_path: Path) -> None:
    file = TelemetryFile(tmp_path / "t.sqlite", Clock())
    probe = make_probe("host")
    out = file.recorder(probe.name, probe.signals)
    tasks = probe.start(ProbeContext(worker.pid), out)
    for step in range(2):
        for task in tasks:
            task.run(out)
        assert step or ask(worker, "0.3") == "done"
    probe.stop(out)
    file.close()
    telemetry = read_telemetry(tmp_path / "t.sqlite")
    ran = {s.scope: s.increase() or 0 for s in telemetry.series("thread_run_ns", f"thread/{worker.pid}")}
    burnt = max(ran, key=lambda scope: ran[scope])
    # The last scheduler tick of a thread that still runs may not be counted yet.
    assert 0.29 * SECOND < ran[burnt] < 0.6 * SECOND
    assert burnt != f"thread/{worker.pid}/{worker.pid}"
    ticks = sum(telemetry.series(f"thread_{kind}_ns", burnt)[0].increase() or 0 for kind in ("user", "system"))
    assert 0.2 * SECOND <= ticks < 0.6 * SECOND
    assert telemetry.series("process_threads")[0].value[0] == 7
    assert telemetry.series("process_rss_bytes")[0].value[0] > 1 << 20
    assert 0 <= telemetry.series("thread_cpu", burnt)[0].value[0] < (os.cpu_count() or 1)
    assert telemetry.series("memory_available_bytes") and telemetry.series("cpu_softirq_ns", "cpu/0")


def test_what_a_real_program_left_behind_belongs_to_it() -> None:
    command = ["sh", "-c", "sleep 300 & echo $!; read line"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as shell:
        assert shell.stdout is not None and shell.stdin is not None
        orphan = int(shell.stdout.readline())
        tree = host_tasks.ProcessTree(Path("/proc"), shell.pid)
        try:
            assert tree.update() == {shell.pid, orphan}
            shell.stdin.close()
            shell.wait()
            assert tree.update() == {orphan}
            assert host_tasks.ProcessTree(Path("/proc"), shell.pid).update() == {orphan}
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_descriptors_are_given_back(worker: subprocess.Popen[str], tmp_path: Path) -> None:
    file = TelemetryFile(tmp_path / "t.sqlite", Clock())
    before = len(os.listdir("/proc/self/fd"))
    probe = make_probe("host")
    out = file.recorder(probe.name, probe.signals)
    for task in probe.start(ProbeContext(worker.pid), out):
        task.run(out)
    while_running = len(os.listdir("/proc/self/fd"))
    probe.stop(out)
    assert while_running - before >= 7
    assert len(os.listdir("/proc/self/fd")) == before
    file.close()


def test_the_overhead_benchmark_runs() -> None:
    script = Path(__file__).resolve().parent.parent / "benchmarks" / "probe_overhead.py"
    command = [sys.executable, str(script), "--seconds", "0.1", "--limit-ratio", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in ("host       threads", "network    interfaces", "process ", "ok: limit"):
        assert f"\n{line}" in done.stdout
