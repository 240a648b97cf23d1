"""The nsys backend: with the real nsys where it is installed, and with a fake one that fails in each known way."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest

import fake_nsys
from infprof.doctor import Machine
from infprof.errors import InfprofError, UsageError
from infprof.probes import Unavailable, nsys_messages
from infprof.probes.nsys import CapturePlan, NsysBackend

MIB = 1 << 20
REAL = {"2023.4": Path("/opt/nsys23/bin/nsys"), "2022.4": Path("/opt/nsys/bin/nsys")}

# Waits for a line, answers it, until its input ends: lives exactly as long as the test wants.
ECHO = "import sys\nfor line in sys.stdin: print('got', line, end='', flush=True)\n"


@pytest.fixture(params=REAL)
def nsys(request: pytest.FixtureRequest) -> Path:
    path = REAL[request.param]
    if not path.exists():
        pytest.skip(f"nsys {request.param} is not installed (scripts/install-nsys.sh)")
    return path


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with reports/ and spool/; short, because nsys puts sockets below TMPDIR."""
    with tempfile.TemporaryDirectory(prefix="nsb") as name:
        folder = Path(name)
        (folder / "reports").mkdir()
        (folder / "spool").mkdir()
        yield folder


def environ_of(place: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(place / "spool"), **more}


def processes_of(place: Path) -> list[psutil.Process]:
    """Whatever was started with the spool folder of this test: target, nsys, launcher, agent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(place / "spool") and process.pid != os.getpid():
                found.append(process)
    return found


@pytest.fixture
def backends(place: Path) -> Iterator[Callable[..., NsysBackend]]:
    """Makes backends; whatever the test does, none of their processes and spool files is left."""
    made: list[NsysBackend] = []

    def make(nsys: Path, machine: Machine | None = None, **plan: Any) -> NsysBackend:
        made.append(NsysBackend(CapturePlan(place / "reports", **plan), environ_of(place), machine, nsys))
        return made[-1]

    yield make
    for backend in made:
        kill(backend.target_pid())
        backend.close()
        backend.close()
    _, alive = psutil.wait_procs(processes_of(place), timeout=5)
    assert alive == []
    assert list((place / "spool").rglob("*.qdstrm")) == []


def kill(pid: int | None) -> None:
    if pid is None:
        return
    with contextlib.suppress(psutil.Error):
        target = psutil.Process(pid)
        target.kill()
        target.wait(5)


def python(backend: NsysBackend, place: Path, code: str, **streams: Any) -> subprocess.Popen[bytes]:
    return backend.launch([sys.executable, "-S", "-c", code], environ_of(place), **streams)


def conversation(backend: NsysBackend, place: Path, code: str = ECHO) -> subprocess.Popen[bytes]:
    return python(backend, place, code, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def answers(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"you?\n")
    process.stdin.flush()
    return process.stdout.readline() == b"got you?\n"


def end_input(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(30)


def long_sleeps(export: Path, pid: int) -> list[int]:
    """Tens of milliseconds of each sleep of a process that nsys has recorded, in order."""
    with contextlib.closing(sqlite3.connect(export)) as database:
        query = (
            "SELECT (end - start + 5000000) / 10000000 FROM OSRT_API JOIN StringIds ON id = nameId "
            "WHERE value LIKE '%nanosleep' AND globalTid / 0x1000000 % 0x1000000 = ? ORDER BY start"
        )
        return [ms for (ms,) in database.execute(query, (pid,))]


def codes(backend: NsysBackend) -> list[str]:
    return [note.code for note in backend.notes]


# --- the real nsys ---------------------------------------------------------------------------------------------------


def test_whole_capture_has_the_first_call_and_passes_the_exit_code_on(nsys, backends, place) -> None:
    backend = backends(nsys)
    process = python(backend, place, "import time; time.sleep(0.03); raise SystemExit(3)")
    pid = backend.target_pid()
    reports = backend.finish(60)
    assert (process.wait(0), backend.target_exit_code()) == (3, 3)
    assert [path.name for path in reports] == ["capture.nsys-rep"]
    export = backend.export(reports[0])
    assert export == place / "reports" / "capture.sqlite"
    assert pid is not None and long_sleeps(export, pid) == [3]
    assert sorted(os.listdir(place / "reports")) == ["capture.nsys-rep", "capture.sqlite"]


def test_late_captures_leave_the_target_alive_and_see_only_their_time(nsys, backends, place) -> None:
    code = "import sys, time\nfor line in sys.stdin: time.sleep(float(line)); print('slept', flush=True)"
    backend = backends(nsys, whole=False)
    process = conversation(backend, place, code)
    assert process.stdin is not None and process.stdout is not None

    def sleep(seconds: str) -> None:
        process.stdin.write(seconds.encode() + b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"slept\n"

    reports = []
    for before, during in (("0.02", "0.05"), ("0.03", "0.07")):
        sleep(before)
        backend.start()
        sleep(during)
        reports += backend.stop()
        assert backend.stop() == reports[-1:]
    assert end_input(process) == 0
    pid = backend.target_pid()
    assert pid is not None
    assert [path.name for path in reports] == ["capture.nsys-rep", "capture-2.nsys-rep"]
    assert [long_sleeps(backend.export(path), pid) for path in reports] == [[5], [7]]
    assert backend.finish(30) == reports


STARTS_ONE = "import subprocess, sys\nfor line in sys.stdin: subprocess.run(['/bin/echo', 'got', line.strip()])\n"


@pytest.mark.parametrize("stopped", [True, False])
def test_the_server_goes_on_and_can_start_programs_after_the_capture(nsys, backends, place, stopped) -> None:  # C-08
    backend = backends(nsys)
    process = conversation(backend, place, STARTS_ONE)
    assert answers(process)
    if stopped:
        assert [path.name for path in backend.stop()] == ["capture.nsys-rep"]
        assert answers(process)
    backend.close()
    assert answers(process)
    assert end_input(process) == 0
    assert backend.target_exit_code() == 0
    assert codes(backend) == ["gpu-metrics-no-gpu", "agent-stays"]
    assert [path.name for path in (place / "reports").iterdir()] == ["capture.nsys-rep"]


def test_target_killed_by_a_signal(nsys, backends, place) -> None:
    backend = backends(nsys)
    # A program that has not begun yet leaves nothing to report.
    assert answers(conversation(backend, place))
    os.kill(backend.target_pid(), signal.SIGKILL)
    assert len(backend.finish(60)) == 1
    assert backend.target_exit_code() == 128 + 9
    assert "target-killed" in codes(backend)


def test_forked_child_and_daemon_are_no_obstacle(nsys, backends, place) -> None:  # C-01
    """The child sleeps 40 ms; the daemon outlives the program, and neither it nor an agent is waited for."""
    code = (
        "import os, sys, time\n"
        "if os.fork() == 0: time.sleep(0.04); sys.exit()\n"
        "os.wait()\n"
        "if os.fork() == 0: os.setsid(); sys.stdin.read(); os._exit(0)\n"
        "sys.exit(5)"
    )
    backend = backends(nsys)
    process = conversation(backend, place, code)
    (report,) = backend.finish(60)
    assert backend.target_exit_code() == 5
    with contextlib.closing(sqlite3.connect(backend.export(report))) as database:
        rows = database.execute("SELECT DISTINCT globalTid / 0x1000000 % 0x1000000 FROM OSRT_API").fetchall()
    assert len(rows) >= 2
    backend.close()
    assert process.stdin is not None
    daemons = processes_of(place)
    process.stdin.close()
    _, alive = psutil.wait_procs(daemons, timeout=5)
    assert alive == []


def test_a_report_of_that_name_is_left_alone(nsys, backends, place) -> None:
    (place / "reports" / "capture.nsys-rep").write_bytes(b"old")
    backend = backends(nsys)
    python(backend, place, "pass")
    assert [path.name for path in backend.finish(60)] == ["capture-2.nsys-rep"]
    assert (place / "reports" / "capture.nsys-rep").read_bytes() == b"old"


def test_lost_agent_is_told_and_the_target_lives_on(nsys, backends, place) -> None:
    backend = backends(nsys)
    process = conversation(backend, place)
    assert answers(process)
    agents = [p for p in processes_of(place) if any(a.startswith("--session-name=") for a in p.cmdline())]
    for agent in agents:
        agent.kill()
    process.wait(30)
    assert answers(process)
    assert agents and backend.stop(10) == []
    assert "no-report" in codes(backend)
    assert backend.target_exit_code() is None


def test_the_target_has_the_callers_streams_and_nothing_else(nsys, backends, place) -> None:
    code = "import os, sys; print(sys.stdin.read(), os.environ['TMPDIR'] + '/'); print('err', file=sys.stderr)"
    backend = backends(nsys)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = python(backend, place, code, stdin=subprocess.PIPE, stdout=out, stderr=err)
        end_input(process)
        out.seek(0)
        err.seek(0)
        assert (out.read().decode(), err.read().decode()) == (f" {place / 'spool'}/\n", "err\n")
    assert backend.finish(30)


def test_export_of_what_is_no_report(nsys, backends, place) -> None:
    report = place / "reports" / "x.nsys-rep"
    report.write_bytes(b"NVIDIA Tegra Profiler Report 1." + bytes(2000))
    with pytest.raises(InfprofError, match="could not be exported") as error:
        backends(nsys).export(report)
    assert error.value.exit_code == 4
    assert os.listdir(place / "reports") == ["x.nsys-rep"]


# --- refused before the start ----------------------------------------------------------------------------------------


def machine(
    root: Path, files: Mapping[str, str], gpu: bool = True, free: Mapping[Path, int] | None = None, environ: Any = None
) -> Machine:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return Machine(
        root,
        environ or {},
        load_nvml=lambda: FakeNvml(1 if gpu else 0),
        disk_space=lambda path: (1 << 40, (free or {}).get(path, 1 << 39)),
    )


class FakeNvml:
    NVMLError = pynvml.NVMLError

    def __init__(self, count: int) -> None:
        self.count = count

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54"


ADMIN_ONLY = {
    "proc/driver/nvidia/params": "RmProfilingAdminOnly: 1\n",
    "proc/self/status": "CapEff:\t00000000a80425fb\n",
}
ANYONE = {"proc/driver/nvidia/params": "RmProfilingAdminOnly: 0\n", "proc/self/status": "CapEff:\t0\n"}


def start_arguments(program: Path) -> list[list[str]]:
    return [arguments for arguments in fake_nsys.calls(program) if arguments[0] == "start"]


def test_counters_for_administrators_only_are_left_out_before_the_start(backends, place) -> None:  # C-06
    program = fake_nsys.install(place / "fake", refuse={"--gpu-metrics": "ERR_NVGPUCTRPERM"})
    backend = backends(program, machine(place / "root", ADMIN_ONLY))
    python(backend, place, "pass")
    assert len(backend.finish(30)) == 1
    (arguments,) = start_arguments(program)
    assert not any("gpu-metrics" in argument for argument in arguments)
    (note,) = backend.notes
    assert note.code == "gpu-metrics-not-permitted"
    assert note.remedy is not None
    assert "NVreg_RestrictProfilingToAdminUsers=0" in note.remedy and "--cap-add=SYS_ADMIN" in note.remedy
    assert "GPM" in note.remedy


@pytest.mark.parametrize("holder", ["nv-hostengine", "dcgm-exporter"])
def test_counters_held_by_a_monitor(backends, place, holder) -> None:  # C-14
    program = fake_nsys.install(
        place / "fake", refuse={"--gpu-metrics-devices=all": "GPU Metrics [0]: already in use by another tool"}
    )
    backend = backends(program, machine(place / "root", {**ANYONE, "proc/77/comm": holder + "\n"}))
    python(backend, place, "pass")
    assert len(backend.finish(30)) == 1
    first, second = start_arguments(program)
    assert "--gpu-metrics-devices=all" in first and "--gpu-metrics-devices=all" not in second
    (note,) = backend.notes
    assert note.code == "gpu-metrics-in-use" and holder in note.sentence
    assert note.remedy is not None and "dcgmi profmon --pause" in note.remedy and "--resume" in note.remedy


def test_counters_refused_although_they_looked_permitted(backends, place) -> None:
    program = fake_nsys.install(place / "fake", refuse={"--gpu-metrics": "x: ERR_NVGPUCTRPERM"})
    backend = backends(program, machine(place / "root", ANYONE), whole=False)
    process = conversation(backend, place)
    backend.start()
    assert answers(process) and len(backend.stop()) == 1
    assert codes(backend) == ["gpu-metrics-not-permitted"]


def test_permitted_counters_are_asked_for_in_the_spelling_of_this_nsys(backends, place) -> None:
    help_texts = {**fake_nsys.HELP, "start": fake_nsys.HELP["start"].replace("metrics-devices", "metrics-device")}
    program = fake_nsys.install(place / "fake", help=help_texts)
    backend = backends(program, machine(place / "root", ANYONE))
    python(backend, place, "pass")
    backend.finish(30)
    assert "--gpu-metrics-device=all" in start_arguments(program)[0]
    assert backend.notes == []


def test_no_gpu_no_counters(backends, place) -> None:
    backend = backends(fake_nsys.install(place / "fake"), machine(place / "root", ANYONE, gpu=False))
    assert codes(backend) == ["gpu-metrics-no-gpu"]


@pytest.mark.parametrize(("level", "asked"), [(-1, True), (2, True), (3, False), (4, False)])
def test_cpu_samples_by_what_the_kernel_allows(backends, place, level, asked) -> None:  # C-16
    program = fake_nsys.install(place / "fake", refuse={} if asked else {"=process-tree": "perf_event_open failed"})
    files = {**ANYONE, "proc/sys/kernel/perf_event_paranoid": f"{level}\n"}
    backend = backends(program, machine(place / "root", files), sampling=True)
    python(backend, place, "pass")
    assert len(backend.finish(30)) == 1
    (arguments,) = start_arguments(program)
    value = "process-tree" if asked else "none"
    assert f"--sample={value}" in arguments and f"--cpuctxsw={value}" in arguments
    if not asked:
        (note,) = backend.notes
        assert f"perf_event_paranoid is {level}" in note.sentence
        assert note.remedy is not None and "sysctl -w kernel.perf_event_paranoid=2" in note.remedy


def test_2022_4_is_never_asked_for_context_switches(backends, place) -> None:
    program = fake_nsys.install(place / "fake", version="2022.4.2.1-df9881f")
    files = {**ANYONE, "proc/sys/kernel/perf_event_paranoid": "-1\n"}
    backend = backends(program, machine(place / "root", files), sampling=True)
    python(backend, place, "pass")
    backend.finish(30)
    assert {"--sample=none", "--cpuctxsw=none"} <= set(start_arguments(program)[0])
    assert codes(backend) == ["sampling-hangs"]


def test_no_nsys_at_all(place) -> None:
    empty = machine(place / "root", {"etc/os-release": "ID=debian\n"}, environ={"PATH": "/nowhere"})
    with pytest.raises(Unavailable, match="apt-get install -y nsight-systems-cli"):
        NsysBackend(CapturePlan(place), {}, empty)


def test_nsys_without_sessions_is_too_old(backends, place) -> None:
    program = fake_nsys.install(place / "fake", version="2019.1.1", help={"start": "--output", "launch": "--trace"})
    with pytest.raises(Unavailable, match="too old"):
        backends(program)


def test_nsys_that_does_not_run(place) -> None:
    program = place / "nsys"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(Unavailable, match="no nsys that runs"):
        NsysBackend(CapturePlan(place), {}, nsys=program)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_folder_that_may_not_be_written_to(backends, place) -> None:
    program = fake_nsys.install(place / "fake")
    for folder in (place, place / "fake"):
        folder.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(Unavailable, match=r"cannot write to .*reports: Permission denied"):
            backends(program)
    finally:
        os.seteuid(0)


def test_what_extra_arguments_may_say(backends, place) -> None:
    program = fake_nsys.install(place / "fake")
    extra = ("--trace=cuda", "--sample", "system-wide", "--unheard-of=1")
    backend = backends(program, machine(place / "root", ANYONE), extra_args=extra)
    python(backend, place, "pass")
    backend.finish(30)
    (start,) = start_arguments(program)
    launch = next(arguments for arguments in fake_nsys.calls(program) if arguments[0] == "launch")
    assert start[-3:] == ["--sample", "system-wide", "--unheard-of=1"] and "--sample=none" not in start
    assert "--trace=cuda" in launch and "--trace=cuda,nvtx,osrt" not in launch
    with pytest.raises(UsageError, match="--output"):
        backends(program, extra_args=("--output=x",))
    with pytest.raises(UsageError, match="no option"):
        backends(program, extra_args=("x",))


def test_an_option_that_this_nsys_lacks_is_left_out_and_named(backends, place) -> None:
    launch = fake_nsys.HELP["launch"].replace("--trace-fork-before-exec", "")
    program = fake_nsys.install(place / "fake", help={**fake_nsys.HELP, "launch": launch})
    backend = backends(program, machine(place / "root", ANYONE))
    python(backend, place, "pass")
    assert len(backend.finish(30)) == 1
    (note,) = backend.notes
    assert "--trace-fork-before-exec" in note.sentence and "fork" in note.sentence


@pytest.mark.parametrize(
    ("command", "environ", "hinted"),
    [
        (["vllm", "serve", "m"], {}, True),
        (["python", "-m", "vllm.entrypoints.openai.api_server"], {}, True),
        (["vllm", "serve"], {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, False),
        (["python", "serve.py", "--name=vllm"], {}, False),
    ],
)
def test_vllm_is_told_about_spawn_but_not_changed(backends, place, command, environ, hinted) -> None:  # C-01
    programs = place / "programs"
    programs.mkdir()
    for name in ("vllm", "python"):
        (programs / name).write_text('#!/bin/sh\nprintf %s "$VLLM_WORKER_MULTIPROC_METHOD"\n')
        (programs / name).chmod(0o755)
    backend = backends(fake_nsys.install(place / "fake"), machine(place / "root", ANYONE))
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    with tempfile.TemporaryFile() as out:
        backend.launch(command, environ_of(place, **path, **environ), stdout=out).wait(30)
        out.seek(0)
        assert out.read().decode() == environ.get("VLLM_WORKER_MULTIPROC_METHOD", "")
    remedies = [note.remedy or "" for note in backend.notes]
    assert any("VLLM_WORKER_MULTIPROC_METHOD=spawn" in remedy for remedy in remedies) == hinted


def test_a_program_that_does_not_exist_or_may_not_be_executed(backends, place) -> None:
    backend = backends(fake_nsys.install(place / "fake"), machine(place / "root", ANYONE))
    (place / "script").write_text("x")
    with pytest.raises(FileNotFoundError):
        backend.launch([str(place / "absent")], environ_of(place))
    with pytest.raises(PermissionError):
        backend.launch([str(place / "script")], environ_of(place))


def test_an_agent_that_is_not_found_at_first_is_tried_again(backends, place) -> None:
    backend = backends(fake_nsys.install(place / "fake", flaky=True), machine(place / "root", ANYONE))
    assert answers(conversation(backend, place))
    assert len(backend.stop()) == 1
    assert codes(backend) == ["nsys-tried-twice"]


def test_nsys_that_cannot_start_says_why_and_the_program_has_not_run(backends, place) -> None:
    refuse = {"--session": "unrecognised option '--frobnicate'\n\nusage: nsys start [<args>]"}
    backend = backends(fake_nsys.install(place / "fake", refuse=refuse), machine(place / "root", ANYONE))
    with pytest.raises(InfprofError, match=r"no option --frobnicate") as error:
        python(backend, place, f"open({str(place / 'ran')!r}, 'w')")
    assert error.value.exit_code == 4
    assert not (place / "ran").exists()


# --- during and after ------------------------------------------------------------------------------------------------


def test_repeated_ranges_are_all_found_and_the_stray_stream_is_named(backends, place) -> None:  # C-10
    program = fake_nsys.install(place / "fake", ranges=11, stray=True)
    backend = backends(program, machine(place / "root", ANYONE), trigger="cuda-profiler-api")
    python(backend, place, "pass")
    reports = backend.finish(30)
    assert [path.name for path in reports] == [f"capture.{i}.nsys-rep" for i in range(1, 12)]
    (arguments,) = start_arguments(program)
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=repeat"} <= set(arguments)
    (note,) = backend.notes
    assert note.code == "stray-stream" and "qdstrm" in note.sentence
    assert len(list((place / "reports").glob("*.qdstrm"))) == 1


def test_range_that_never_began(backends, place) -> None:
    program = fake_nsys.install(place / "fake", silent=True)
    backend = backends(program, machine(place / "root", ANYONE), trigger="nvtx", nvtx_range="step@*")
    python(backend, place, "import os; raise SystemExit(os.environ['NSYS_NVTX_PROFILER_REGISTER_ONLY'] != '0')")
    assert backend.finish(30) == []
    assert backend.target_exit_code() == 0
    assert codes(backend) == ["nvtx-strings", "range-never-entered"]
    assert [a for call in fake_nsys.calls(program) for a in call if "nvtx-capture" in a] == ["--nvtx-capture=step@*"]


def test_a_report_that_landed_in_the_spool_folder_is_brought_home(backends, place) -> None:
    backend = backends(fake_nsys.install(place / "fake", elsewhere=True), machine(place / "root", ANYONE))
    python(backend, place, "pass")
    (report,) = backend.finish(30)
    assert report.parent == place / "reports" and nsys_messages.is_whole_report(report)
    assert codes(backend) == ["report-elsewhere"]


def test_disk_full_leaves_no_part_that_poses_as_a_report(backends, place) -> None:  # C-18
    backend = backends(fake_nsys.install(place / "fake", full=True), machine(place / "root", ANYONE))
    process = conversation(backend, place)
    assert backend.stop() == []
    assert answers(process)
    assert codes(backend) == ["report-partial", "no-report"]
    assert "disk was full" in backend.notes[-1].sentence
    assert os.listdir(place / "reports") == ["capture.nsys-rep.partial"]


def test_disk_full_at_the_export(backends, place) -> None:  # C-18
    free = {place / "reports": 150 * MIB}
    backend = backends(fake_nsys.install(place / "fake", full=True), machine(place / "root", ANYONE, free=free))
    report = place / "reports" / "capture.nsys-rep"
    report.write_bytes(bytes(2 * MIB))
    with pytest.raises(InfprofError, match=r"2\.0 MiB.*disk is full.*reports has 150\.0 MiB free") as error:
        backend.export(report)
    assert error.value.exit_code == 4
    assert os.listdir(place / "reports") == ["capture.nsys-rep"]


def test_too_little_space_is_refused_and_little_is_told(backends, place) -> None:  # C-18
    program = fake_nsys.install(place / "fake")
    free = {place / "spool": 20 * MIB}
    with pytest.raises(Unavailable, match=r"spool has 20\.0 MiB free.*128\.0 MiB.*TMPDIR"):
        backends(program, machine(place / "root", ANYONE, free=free))
    free[place / "spool"] = 1024 * MIB
    assert codes(backends(program, machine(place / "root", ANYONE, free=free))) == ["space-low"]


def test_space_is_watched_while_recording(backends, place) -> None:  # C-18
    free = {place / "spool": 4096 * MIB}
    backend = backends(fake_nsys.install(place / "fake"), machine(place / "root", ANYONE, free=free))
    assert backend.watch_space() is None
    process = conversation(backend, place)
    assert backend.watch_space() is None
    free[place / "spool"] = 60 * MIB
    note = backend.watch_space()
    assert note is not None and "60.0 MiB" in note.sentence and str(place / "spool") in note.sentence
    assert len(backend.stop()) == 1
    assert backend.watch_space() is None
    assert answers(process)


def test_stop_that_hangs_is_given_up_and_the_target_goes_on(backends, place) -> None:
    program = fake_nsys.install(place / "fake", hang="stop", stubborn=True)
    backend = backends(program, machine(place / "root", ANYONE))
    process = conversation(backend, place)
    assert backend.stop(0.3) == []
    assert answers(process)
    assert codes(backend) == ["nsys-hung", "no-report"]


def test_nsys_that_spins_after_the_target_is_killed(backends, place) -> None:
    """As 2022.4 does with context switches on; its agent ignores SIGTERM."""
    backend = backends(fake_nsys.install(place / "fake", stubborn=True, delay_s=600), machine(place / "root", ANYONE))
    process = conversation(backend, place)
    assert process.stdin is not None
    process.stdin.close()
    assert backend.finish(0.3) == []
    assert codes(backend) == ["nsys-hung", "no-report"]


def test_streams_that_nsys_does_not_hand_on_end_the_attempt_before_the_program_runs(backends, place) -> None:
    program = fake_nsys.install(place / "fake", closes_streams=True)
    backend = backends(program, machine(place / "root", ANYONE, gpu=False))
    with pytest.raises(InfprofError, match="could not start the program"):
        python(backend, place, f"open({str(place / 'ran')!r}, 'w')")
    assert not (place / "ran").exists()


# Not one long sleep or pause: a signal just before it would be seen only at its end.
DRIVER = """
import os, signal, sys, time
from pathlib import Path
TARGET = "import time; print('up', flush=True)\\nwhile True: time.sleep(0.05)"
from infprof.probes.nsys import CapturePlan, NsysBackend
backend = NsysBackend(CapturePlan(Path(sys.argv[1])), nsys=Path(sys.argv[2]))
backend.launch([sys.executable, "-S", "-c", TARGET], os.environ)
received = []
signal.signal(signal.SIGINT, lambda *_: received.append(1))
print('up', flush=True)
while not received: time.sleep(0.05)
os.kill(backend.target_pid(), signal.SIGINT)
print(len(backend.finish(30)), backend.target_exit_code(), flush=True)
backend.close()
"""


def test_ctrl_c_does_not_reach_nsys(place) -> None:  # C-07
    program = fake_nsys.install(place / "fake", deaf=True, delay_s=0.3)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(place / "reports"), str(program)],
        env=environ_of(place),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert driver.stdout is not None
    assert [driver.stdout.readline(), driver.stdout.readline()] == [b"up\n", b"up\n"]
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.stdout.read() == b"1 130\n"
    driver.stdout.close()
    assert driver.wait(30) == 0
    assert [path.name for path in (place / "reports").iterdir()] == ["capture.nsys-rep"]


# --- what nsys says --------------------------------------------------------------------------------------------------


def test_unknown_failure_shows_the_last_lines_without_paths() -> None:
    note = nsys_messages.explain("one\n[1/1] [==5%  ]\rtwo\n/home/ann/x: three\nfour '/opt/n y'\n\nusage: nsys")
    assert note.code == "nsys-failed"
    assert note.sentence == "nsys failed: two; <path> three; four '<path> y'"


def test_reports_are_read_from_the_list_alone() -> None:
    text = "Generated: by me\n/tmp/no\n[1/1] [100%] a.nsys-rep\rGenerated:\n    /a b/c.1.nsys-rep\n    /a b/c.2.nsys-rep\nx\n    /y"
    assert nsys_messages.generated_paths(text) == [Path("/a b/c.1.nsys-rep"), Path("/a b/c.2.nsys-rep")]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Failed to create '/x/y.nsys-rep': File exists.", "report-exists"),
        ("FATAL ERROR: boost::filesystem::status: Permission denied", "folder-not-permitted"),
        ("Executable not found in current directory or standard search paths", "program-not-found"),
        ("Illegal --trace argument", "option-value"),
        ("Illegal --gpu-metrics-device arguments.\nNone of the installed GPUs are supported.", "gpu-metrics-no-gpu"),
        ("Section Table Reference magic number mismatch.", "report-broken"),
        ("There are no active sessions.", "session-gone"),
        ("The request is not applicable in this state: StopRequest.", "session-state"),
        ("Connection to Agent lost. This is most likely a bug.", "agent-lost"),
        ("", "nsys-failed"),
    ],
)
def test_known_texts(text, code) -> None:
    assert nsys_messages.explain(text).code == code
