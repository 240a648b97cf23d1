"""The doctor on machines that exist only as a folder: what is found, and the command that helps."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from infprof import doctor
from infprof.doctor import Check, Machine

GIB = 1 << 30
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root)\n"
OLD_DRIVER = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version: 12.2.0\n"
)
NO_CAPABILITIES = "0000000000000000"
SYS_ADMIN = f"{1 << 21:016x}"
PERFMON = f"{1 << 38:016x}"


class DriverLibrary(SimpleNamespace):
    """A stand-in for libnvidia-ml.so.1 below the real pynvml: functions that fill the buffers they are given.

    A function left out is what an older driver lacks; ``init`` is the code that nvmlInit returns.
    """

    def __init__(self, names: tuple[str, ...] = (), init: int = 0, mig: bool | None = None) -> None:
        super().__init__()
        self.nvmlInitWithFlags = lambda flags: init
        self.nvmlShutdown = lambda: 0
        self.nvmlSystemGetDriverVersion = lambda buffer, length: _fill(buffer, b"580.95.05")
        self.nvmlDeviceGetCount_v2 = lambda count: _set(count, len(names))
        self.nvmlDeviceGetHandleByIndex_v2 = _set_handle
        self.nvmlDeviceGetName = lambda handle, buffer, length: _fill(buffer, names[_index(handle)].encode())
        self.nvmlDeviceGetCudaComputeCapability = lambda handle, major, minor: _set(major, 9) or _set(minor, 0)
        if mig is not None:
            self.nvmlDeviceGetMigMode = lambda handle, current, pending: _set(current, mig) or _set(pending, mig)


def _set_handle(index: Any, handle: Any) -> int:
    # A handle is an opaque pointer: here the index plus one, because zero would be no handle.
    ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = index.value + 1
    return 0


def _index(handle: Any) -> int:
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1


def _fill(buffer: Any, text: bytes) -> int:
    buffer.value = text
    return 0


def _set(reference: Any, value: int) -> int:
    reference._obj.value = value
    return 0


@pytest.fixture(autouse=True)
def _fresh_pynvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """pynvml keeps the library and its functions in module variables."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    yield


class Builder:
    """A machine below a folder. It starts as a healthy GPU server; each test breaks one thing."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.monkeypatch = monkeypatch
        self.environ = {"PATH": "/usr/bin:/opt/nvidia/nsight-systems/2025.1.1/bin"}
        self.packages = dict.fromkeys(("numpy", "pyyaml", "pyarrow"), "1.0")
        self.packages |= {"torch": "2.6.0", "nvidia-cuda-cupti-cu12": "12.4.127"}
        self.space = {"/dev/shm": (64 * GIB, 64 * GIB), "/tmp": (500 * GIB, 100 * GIB)}
        self.library = DriverLibrary(("NVIDIA H100 80GB HBM3",))
        self.nsys("/opt/nvidia/nsight-systems/2025.1.1/bin/nsys", "2025.1.1.103-251135427971v0")
        self.file("/proc/driver/nvidia/version", OPEN_DRIVER)
        self.file("/proc/driver/nvidia/params", "ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 0\n")
        self.file("/proc/sys/kernel/perf_event_paranoid", "2\n")
        self.file("/proc/sys/kernel/yama/ptrace_scope", "1\n")
        self.file("/proc/meminfo", "MemTotal:       264000000 kB\nMemAvailable:   132000000 kB\n")
        self.file("/proc/self/stat", "1 (python) S 0\n")
        self.file("/proc/pressure/cpu", "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
        self.file("/proc/net/dev", "Inter-|\n face |\n    lo: 1 1\n  eth0: 1 1\n")
        self.file("/etc/os-release", 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n')
        self.status()

    def file(self, path: str, text: str) -> Builder:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return self

    def remove(self, path: str) -> Builder:
        (self.root / path.lstrip("/")).unlink()
        return self

    def nsys(self, path: str, version: str | None) -> Builder:
        answer = "exit 1" if version is None else f"echo 'NVIDIA Nsight Systems version {version}'"
        self.file(path, f"#!/bin/sh\n{answer}\n")
        os.chmod(self.root / path.lstrip("/"), 0o755)
        return self

    def status(self, capabilities: str = NO_CAPABILITIES, seccomp: int = 0, cpus: str = "0-15") -> Builder:
        text = f"Name:\tpython\nCapEff:\t{capabilities}\nSeccomp:\t{seccomp}\nCpus_allowed_list:\t{cpus}\n"
        return self.file("/proc/self/status", text)

    def docker(self) -> Builder:
        return self.file("/.dockerenv", "")

    def without_driver(self) -> Builder:
        self.library = DriverLibrary(init=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        return self.remove("/proc/driver/nvidia/version").remove("/proc/driver/nvidia/params")

    def machine(self) -> Machine:
        self.monkeypatch.setattr(pynvml, "nvmlLib", self.library)
        return Machine(
            root=self.root,
            environ=self.environ,
            package_version=self.packages.get,
            disk_space=lambda path: self.space.get("/" + str(path.relative_to(self.root))),
        )

    def checks(self) -> list[Check]:
        return doctor.check_machine(self.machine())

    def check(self, key: str) -> Check:
        (found,) = [check for check in self.checks() if check.id == key]
        return found

    def ability(self, what: str) -> doctor.Ability:
        (found,) = [ability for ability in doctor.abilities(self.checks()) if ability.what == what]
        return found


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    return Builder(tmp_path / "machine", monkeypatch)


def test_a_healthy_server_can_do_everything(server: Builder) -> None:
    assert [check.id for check in server.checks() if check.status != "ok"] == []
    assert all(ability.works for ability in doctor.abilities(server.checks()))


def test_an_empty_machine_can_neither_record_nor_raise(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {}, package_version=lambda name: None, disk_space=lambda path: None)
    checks = doctor.check_machine(machine)
    assert {check.id: check.status for check in checks} == {
        "reading": "missing",
        "binary-reports": "missing",
        "columnar-exports": "missing",
        "nsys": "missing",
        "nvtx": "ok",
        "driver": "missing",
        "gpus": "missing",
        "visible-devices": "ok",
        "counters": "unknown",
        "counter-users": "ok",
        "cpu-sampling": "unknown",
        "ptrace": "ok",
        "torch": "missing",
        "cpus": "unknown",
        "memory": "unknown",
        "shm": "unknown",
        "temp-space": "unknown",
        "host-telemetry": "missing",
        "network-telemetry": "missing",
    }
    assert not any(ability.works for ability in doctor.abilities(checks))


# --- what can be opened ---


def test_reports_are_opened_by_the_newest_nsys_and_not_by_the_one_on_path(server: Builder) -> None:
    server.nsys("/usr/bin/nsys", "2022.4.2.1-df9881f")
    found = server.check("binary-reports").found
    assert found.startswith("opened through nsys 2025.1.1.103 at /opt/nvidia/nsight-systems/2025.1.1/bin/nsys")
    assert server.ability("open an .nsys-rep").works


def test_without_nsys_reports_are_not_opened_but_their_exports_are(server: Builder) -> None:
    server.nsys("/opt/nvidia/nsight-systems/2025.1.1/bin/nsys", None)
    check = server.check("binary-reports")
    assert check.status == "missing" and "export them where they were made" in str(check.remedy)
    assert not server.ability("open an .nsys-rep").works
    assert server.ability("analyze").works and server.ability("open Parquet and Arrow exports").works


def test_parquet_needs_pyarrow(server: Builder) -> None:
    del server.packages["pyarrow"]
    check = server.check("columnar-exports")
    assert (check.status, check.command) == ("missing", "pip install 'infprof[arrow]'")
    assert not server.ability("open Parquet and Arrow exports").works
    assert server.ability("analyze").works


# --- Nsight Systems ---


def test_nsys_is_named_with_its_version_and_path(server: Builder) -> None:
    assert server.check("nsys").found == "2025.1.1.103 at /opt/nvidia/nsight-systems/2025.1.1/bin/nsys"


def test_no_nsys(server: Builder) -> None:
    server.remove("/opt/nvidia/nsight-systems/2025.1.1/bin/nsys")
    check = server.check("nsys")
    assert (check.status, check.command) == ("missing", "sudo apt-get install -y nsight-systems-cli")
    assert server.ability("analyze").works
    recording = server.ability("record with nsys")
    assert not recording.works and "no nsys" in str(recording.because)
    server.file("/etc/os-release", 'ID="rocky"\nID_LIKE="rhel centos fedora"\n')
    assert server.check("nsys").command == "sudo dnf install -y nsight-systems-cli"


@pytest.mark.parametrize(
    "path",
    [
        "/opt/nvidia/nsight-systems/2024.5.1/bin/nsys",
        "/opt/nvidia/nsight-systems-cli/2024.5.1/target-linux-x64/nsys",
        "/usr/local/cuda-12.6/bin/nsys",
    ],
)
def test_an_nsys_outside_path_is_found(server: Builder, path: str) -> None:
    server.environ["PATH"] = "/usr/bin"
    server.remove("/opt/nvidia/nsight-systems/2025.1.1/bin/nsys").nsys(path, "2024.5.1.113-0v0")
    check = server.check("nsys")
    assert check.status == "warning"
    assert check.found == f"2024.5.1.113 at {path}, not on PATH"
    assert check.command == f'export PATH={Path(path).parent}:"$PATH"'
    assert server.ability("record with nsys").works


def test_of_several_the_one_on_path_is_used_and_the_others_are_named(server: Builder) -> None:
    server.nsys("/usr/local/cuda-12.2/bin/nsys", "2023.2.3.1001-0v0")
    assert server.check("nsys").found.endswith("(also 2023.2.3.1001 at /usr/local/cuda-12.2/bin/nsys)")


def test_links_to_one_nsys_are_one(server: Builder) -> None:
    (server.root / "usr/bin").mkdir(parents=True)
    (server.root / "usr/bin/nsys").symlink_to(server.root / "opt/nvidia/nsight-systems/2025.1.1/bin/nsys")
    assert len(doctor.find_nsys(server.machine())) == 1


def test_an_nsys_that_does_not_run_counts_as_none(server: Builder) -> None:
    server.nsys("/opt/nvidia/nsight-systems/2025.1.1/bin/nsys", None)
    check = server.check("nsys")
    assert check.status == "missing" and "does not run" in check.found
    server.nsys("/usr/local/cuda-12.2/bin/nsys", "2023.2.3.1001-0v0")
    assert doctor.find_nsys(server.machine())[0].version == (2023, 2, 3, 1001)


@pytest.mark.parametrize(("version", "word"), [("2021.3.2.4-027534f", "too old"), ("2022.4.2.1-df9881f", "hang")])
def test_a_faulty_version_is_replaced_or_another_put_first(server: Builder, version: str, word: str) -> None:
    server.nsys("/opt/nvidia/nsight-systems/2025.1.1/bin/nsys", version)
    check = server.check("nsys")
    assert check.status == "warning" and word in check.found
    assert check.command == "sudo apt-get install -y nsight-systems-cli"
    server.nsys("/usr/local/cuda-12.2/bin/nsys", "2023.2.3.1001-0v0")
    assert server.check("nsys").command == 'export PATH=/usr/local/cuda-12.2/bin:"$PATH"'


@pytest.mark.parametrize(
    ("nvtx", "nsys", "status"),
    [
        (None, "2023.4.4.54", "ok"),
        ("0.2.11", "2023.4.4.54", "ok"),
        ("0.2.12", "2023.4.4.54", "warning"),
        ("0.2.17", "2022.4.2.1", "warning"),
        ("0.2.17", "2024.1.1.59", "ok"),
    ],
)
def test_nvtx_packages_whose_ranges_old_nsys_loses(server: Builder, nvtx: str | None, nsys: str, status: str) -> None:
    if nvtx is not None:
        server.packages["nvtx"] = nvtx
    server.nsys("/opt/nvidia/nsight-systems/2025.1.1/bin/nsys", f"{nsys}-0v0")
    check = server.check("nvtx")
    assert check.status == status
    assert check.command == ("pip install 'nvtx<0.2.12'" if status == "warning" else None)


# --- driver and GPUs ---


@pytest.mark.parametrize(("text", "version"), [(OPEN_DRIVER, "580.95.05"), (OLD_DRIVER, "535.129.03")])
def test_driver_version(server: Builder, text: str, version: str) -> None:
    assert server.file("/proc/driver/nvidia/version", text).check("driver").found == version


def test_the_driver_is_known_from_nvml_where_proc_has_no_such_file(server: Builder) -> None:
    assert server.remove("/proc/driver/nvidia/version").check("driver").found == "580.95.05"


@pytest.mark.parametrize(
    ("system", "command"),
    [
        ("ID=ubuntu\n", "sudo ubuntu-drivers install"),
        ("ID=debian\n", "sudo apt-get install -y nvidia-driver"),
        ('ID="rhel"\n', "sudo dnf module install -y nvidia-driver"),
        ("ID=arch\n", "lspci -nn | grep -i nvidia"),
    ],
)
def test_no_driver(server: Builder, system: str, command: str) -> None:
    check = server.without_driver().file("/etc/os-release", system).check("driver")
    assert (check.status, check.command) == ("missing", command)


def test_no_driver_in_a_container(server: Builder) -> None:
    server.without_driver().docker()
    assert server.check("driver").command == "docker run --gpus all IMAGE"
    assert server.check("gpus").command == "docker run --gpus all IMAGE"
    server.environ["KUBERNETES_SERVICE_HOST"] = "10.0.0.1"
    assert server.check("driver").command == "kubectl set resources deployment NAME --limits=nvidia.com/gpu=1"


def test_an_amd_machine_is_told_so(server: Builder) -> None:
    assert "AMD" in server.without_driver().file("/dev/kfd", "").check("driver").found


def test_every_gpu_is_named(server: Builder) -> None:
    server.library = DriverLibrary(("NVIDIA H100 80GB HBM3", "NVIDIA L4"))
    found = server.check("gpus").found
    assert found == "NVIDIA H100 80GB HBM3 (compute capability 9.0); NVIDIA L4 (compute capability 9.0)"


@pytest.mark.parametrize(("mig", "status"), [(False, "ok"), (True, "warning")])
def test_mig(server: Builder, mig: bool, status: str) -> None:
    server.library = DriverLibrary(("NVIDIA H200",), mig=mig)
    assert server.check("gpus").status == status


def test_an_old_driver_that_lacks_calls_still_lists_its_gpus(server: Builder) -> None:
    library = DriverLibrary(("Tesla T4",))
    del library.nvmlDeviceGetCudaComputeCapability, library.nvmlSystemGetDriverVersion
    server.library = library
    assert (server.check("gpus").status, server.check("gpus").found) == ("ok", "Tesla T4")


@pytest.mark.parametrize(
    ("code", "command"),
    [
        (pynvml.NVML_ERROR_NO_PERMISSION, "ls -l /dev/nvidia*"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "sudo ubuntu-drivers install"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "sudo dmesg | grep -i xid"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "sudo reboot"),
        (pynvml.NVML_ERROR_UNKNOWN, "sudo ubuntu-drivers install"),
    ],
)
def test_nvml_errors_become_a_status_with_a_command(server: Builder, code: int, command: str) -> None:
    server.library = DriverLibrary(init=code)
    check = server.check("gpus")
    assert (check.status, check.command) == ("missing", command)
    assert not server.ability("record with nsys").works


def test_a_container_without_nvmls_library_but_with_cuda(server: Builder) -> None:
    server.docker().library = DriverLibrary(init=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    command = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility IMAGE"
    assert server.check("gpus").command == command


def test_no_gpu_behind_a_working_nvml(server: Builder) -> None:
    server.library = DriverLibrary(())
    assert server.check("gpus").status == "missing"


def test_without_the_nvml_package_the_gpus_are_unknown(server: Builder) -> None:
    def absent() -> Any:
        raise ImportError("No module named 'pynvml'")

    machine = Machine(server.root, server.environ, absent, server.packages.get, lambda path: (GIB, GIB))
    (check,) = [check for check in doctor.check_machine(machine) if check.id == "gpus"]
    assert (check.status, check.command) == ("unknown", "pip install nvidia-ml-py")


@pytest.mark.parametrize(
    ("value", "status", "command"),
    [
        ("0", "ok", None),
        ("1,0", "ok", None),
        ("GPU-5ebe9f43-ac33-420d-b628-0e0f3f0b8e2f", "ok", None),
        ("", "warning", "unset CUDA_VISIBLE_DEVICES"),
        ("-1", "warning", "unset CUDA_VISIBLE_DEVICES"),
        ("0,2", "warning", "nvidia-smi -L"),
        ("all", "warning", "unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_cuda_visible_devices(server: Builder, value: str, status: str, command: str | None) -> None:
    server.library = DriverLibrary(("NVIDIA L4", "NVIDIA L4"))
    server.environ["CUDA_VISIBLE_DEVICES"] = value
    check = server.check("visible-devices")
    assert (check.status, check.command) == (status, command)


# --- counters ---

ADMIN_ONLY = "RmProfilingAdminOnly: 1\n"


def test_counters_for_administrators_only(server: Builder) -> None:
    server.file("/proc/driver/nvidia/params", ADMIN_ONLY)
    check = server.check("counters")
    assert check.status == "warning" and "NVreg_RestrictProfilingToAdminUsers=0" in str(check.command)
    assert server.ability("record with nsys").works
    assert not server.ability("GPU counters").works
    assert server.docker().check("counters").command == "docker run --gpus all --cap-add=SYS_ADMIN IMAGE"


@pytest.mark.parametrize(
    ("capabilities", "driver", "status"),
    [
        (SYS_ADMIN, OLD_DRIVER, "ok"),
        (PERFMON, OLD_DRIVER, "warning"),
        (PERFMON, OPEN_DRIVER, "ok"),
    ],
)
def test_who_may_read_restricted_counters(server: Builder, capabilities: str, driver: str, status: str) -> None:
    server.file("/proc/driver/nvidia/params", ADMIN_ONLY).file("/proc/driver/nvidia/version", driver)
    assert server.status(capabilities).check("counters").status == status


def test_unknown_counter_permission_is_not_called_allowed(server: Builder) -> None:
    assert server.remove("/proc/driver/nvidia/params").check("counters").status == "unknown"
    assert not server.ability("GPU counters").works


@pytest.mark.parametrize("name", ["nv-hostengine", "dcgm-exporter"])
def test_dcgm_holds_the_counters(server: Builder, name: str) -> None:
    check = server.file("/proc/4711/comm", name + "\n").check("counter-users")
    assert check.status == "warning" and name in check.found
    assert check.command == "dcgmi profmon --pause"
    assert not server.ability("GPU counters").works


def test_other_processes_do_not_hold_the_counters(server: Builder) -> None:
    assert server.file("/proc/4711/comm", "python3\n").check("counter-users").status == "ok"


# --- CPU side ---


@pytest.mark.parametrize(
    ("level", "capabilities", "status", "word"),
    [
        ("-1", NO_CAPABILITIES, "ok", "whole system"),
        ("0", NO_CAPABILITIES, "ok", "whole system"),
        ("1", NO_CAPABILITIES, "ok", "own processes"),
        ("2", NO_CAPABILITIES, "ok", "own processes"),
        ("3", NO_CAPABILITIES, "warning", "is 3"),
        ("4", NO_CAPABILITIES, "warning", "is 4"),
        ("4", SYS_ADMIN, "ok", "whole system"),
        ("4", PERFMON, "ok", "whole system"),
    ],
)
def test_perf_event_paranoid(server: Builder, level: str, capabilities: str, status: str, word: str) -> None:
    check = server.status(capabilities).file("/proc/sys/kernel/perf_event_paranoid", level).check("cpu-sampling")
    assert check.status == status and word in check.found
    assert server.ability("CPU samples").works == (status == "ok")


def test_a_containers_filter_blocks_sampling(server: Builder) -> None:
    server.docker().status(seccomp=2)
    assert server.check("cpu-sampling").status == "warning"
    assert server.status(SYS_ADMIN, seccomp=2).check("cpu-sampling").status == "ok"


@pytest.mark.parametrize(("scope", "status"), [("0", "ok"), ("1", "ok"), ("2", "warning"), ("3", "warning")])
def test_ptrace_scope(server: Builder, scope: str, status: str) -> None:
    server.file("/proc/sys/kernel/yama/ptrace_scope", scope)
    assert server.check("ptrace").status == status
    assert server.status(f"{1 << 19:016x}").check("ptrace").status == "ok"


# --- packages ---


def test_a_missing_reader_package_stops_analyze(server: Builder) -> None:
    del server.packages["numpy"]
    assert server.check("reading").command == "pip install numpy"
    assert not server.ability("analyze").works


def test_torch(server: Builder) -> None:
    assert server.check("torch").found == "torch 2.6.0; CUPTI: nvidia-cuda-cupti-cu12 12.4.127"
    server.packages["torch"] = "2.6.0+cpu"
    assert server.check("torch").status == "warning"
    del server.packages["torch"], server.packages["nvidia-cuda-cupti-cu12"]
    server.file("/usr/local/cuda-12.4/extras/CUPTI/lib64/libcupti.so.12", "")
    check = server.check("torch")
    assert check.status == "missing" and "/usr/local/cuda-12.4/extras/CUPTI/lib64/libcupti.so.12" in check.found
    assert not server.ability("record with PyTorch").works


# --- limits ---


def test_cpus_without_a_limit(server: Builder) -> None:
    assert server.status(cpus="0-3,8,10-11").check("cpus").found == "7 CPUs"


@pytest.mark.parametrize(
    "files",
    [
        {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "150000 100000\n"},
        {
            "/proc/self/cgroup": "0::/kubepods/pod1/c1\n",
            "/sys/fs/cgroup/kubepods/cpu.max": "max 100000\n",
            "/sys/fs/cgroup/kubepods/pod1/cpu.max": "150000 100000\n",
            "/sys/fs/cgroup/kubepods/pod1/c1/cpu.max": "400000 100000\n",
        },
        {
            "/proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    ],
    ids=["v2 own namespace", "v2 ancestor", "v1 path outside the namespace"],
)
def test_the_smallest_cpu_quota_up_the_path_counts(server: Builder, files: dict[str, str]) -> None:
    for path, text in files.items():
        server.file(path, text)
    check = server.docker().check("cpus")
    assert (check.status, check.command) == ("warning", "docker update --cpus 8 CONTAINER")
    assert check.found == "16 CPUs, limited to 1.5 by the container or service"


@pytest.mark.parametrize(("throttled", "status"), [(4, "ok"), (6, "warning")])
def test_throttling_under_a_generous_quota(server: Builder, throttled: int, status: str) -> None:
    server.file("/proc/self/cgroup", "0::/\n").file("/sys/fs/cgroup/cpu.max", "800000 100000\n")
    server.file(
        "/sys/fs/cgroup/cpu.stat", f"usage_usec 9\nnr_periods 100\nnr_throttled {throttled}\nthrottled_usec 7\n"
    )
    assert server.check("cpus").status == status


def test_memory_under_a_limit_does_not_count_page_cache_as_used(server: Builder) -> None:
    server.file("/proc/self/cgroup", "0::/\n").file("/sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    server.file("/sys/fs/cgroup/memory.current", f"{7 * GIB}\n")
    check = server.check("memory")
    assert check.status == "warning" and check.found.startswith("1.0 GiB free under the container's")
    server.file("/sys/fs/cgroup/memory.stat", f"anon 1\ninactive_file {2 * GIB}\n")
    assert (server.check("memory").status, server.check("memory").found[:12]) == ("ok", "3.0 GiB free")


def test_no_memory_limit_is_not_a_number_near_two_to_the_63(server: Builder) -> None:
    server.file("/proc/self/cgroup", "4:memory:/\n").file(
        "/sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096)
    )
    server.file("/sys/fs/cgroup/memory/memory.usage_in_bytes", "12345\n")
    assert server.check("memory").found == "125.9 GiB free"


def test_little_memory_on_a_plain_machine(server: Builder) -> None:
    check = server.file("/proc/meminfo", "MemAvailable:   1048576 kB\n").check("memory")
    assert check.status == "warning" and check.found.startswith("1.0 GiB free:")


def test_dockers_default_shared_memory_is_too_small(server: Builder) -> None:
    server.docker().space["/dev/shm"] = (64 << 20, 64 << 20)
    check = server.check("shm")
    assert (check.status, check.command) == ("warning", "docker run --gpus all --shm-size=8g IMAGE")
    assert "64.0 MiB" in check.found


def test_full_temp_folder(server: Builder) -> None:
    server.space["/tmp"] = (500 * GIB, 1 * GIB)
    assert server.check("temp-space").status == "warning"


# --- what holds for all, and output ---


def _broken(server: Builder) -> Builder:
    """Everything wrong at once."""
    server.without_driver().nsys("/opt/nvidia/nsight-systems/2025.1.1/bin/nsys", None)
    server.file("/proc/sys/kernel/perf_event_paranoid", "4").file("/proc/sys/kernel/yama/ptrace_scope", "3")
    server.file("/proc/9/comm", "nv-hostengine").file("/proc/meminfo", "MemAvailable: 1000 kB\n")
    server.space = {"/dev/shm": (1, 1), "/tmp": (1, 1)}
    server.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    server.packages.clear()
    return server


@pytest.mark.parametrize("change", [lambda s: s, _broken, lambda s: _broken(s).docker()])
def test_whatever_is_wrong_comes_with_a_command(server: Builder, change: Callable[[Builder], Builder]) -> None:
    checks = change(server).checks()
    for check in checks:
        wrong = check.status in ("warning", "missing")
        assert (check.remedy is not None, check.command is not None) == (wrong, wrong), check
    assert len({check.id for check in checks}) == len(checks)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_text_keeps_to_its_width_except_commands(server: Builder, width: int) -> None:
    checks = _broken(server).docker().checks()
    commands = {check.command for check in checks}
    lines = doctor.render(checks, width).splitlines()
    assert commands - {None} <= {line.strip() for line in lines}
    assert [line for line in lines if len(line) > width and line.strip() not in commands] == []


def test_the_summary_says_what_works_and_why_the_rest_does_not(server: Builder) -> None:
    lines = doctor.summary(server.without_driver().checks())
    assert lines[0] == "analyze: yes"
    assert "record with nsys: no, because NVIDIA driver: none found" in lines
    assert doctor.render(server.checks(), 120).rstrip().endswith("\n".join(lines))


def test_color_changes_only_the_look(server: Builder) -> None:
    checks = server.checks()
    colored = doctor.render(checks, color=True)
    assert "\x1b[32mok" in colored
    assert "\x1b" not in doctor.render(checks)


def test_json_has_every_check_and_ability(server: Builder) -> None:
    checks = _broken(server).checks()
    data = json.loads(doctor.to_json(checks))
    assert data == doctor.to_dict(checks)
    assert [check["id"] for check in data["checks"]] == [check.id for check in checks]
    assert data["abilities"][0] == {"what": "analyze", "works": False, "because": data["abilities"][0]["because"]}
    assert data["abilities"][0]["because"].startswith("Reading traces: ")


def test_this_machine_can_be_checked() -> None:
    """Whatever machine the tests run on: no exception, and analyze works, as the other tests show."""
    checks = doctor.run()
    assert len(checks) == 19
    assert doctor.summary(checks)[0] == "analyze: yes"


def test_torch_is_not_imported() -> None:
    code = "import sys; from infprof import doctor; doctor.run(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


# --- Telemetry ---


def test_a_kernel_without_pressure_figures(server: Builder) -> None:
    check = server.remove("/proc/pressure/cpu").check("host-telemetry")
    assert (check.status, check.found.startswith("threads and memory, but no pressure")) == ("warning", True)
    assert server.ability("host telemetry").works


def test_rdma_devices_are_named(server: Builder) -> None:
    assert server.check("network-telemetry").found == "1 interface beside loopback, no RDMA device"
    server.file("/sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n")
    assert server.check("network-telemetry").found == "1 interface beside loopback, RDMA: mlx5_0"
