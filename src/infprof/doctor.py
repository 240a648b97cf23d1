"""Can this machine record what a diagnosis needs, and if not, which one command helps?

``run()`` looks; ``render`` and ``to_json`` show. Every check reads small files, the environment and package metadata,
and asks nsys and NVML for their versions. Nothing is changed and torch is never imported. A check that cannot find out
says ``unknown``; it never raises. The machine is passed in as a ``Machine``, whose file-system root may be any folder.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

Status = Literal["ok", "warning", "missing", "unknown"]

# Bit numbers of Linux capabilities (capability.h).
_CAP_SYS_PTRACE = 19
_CAP_SYS_ADMIN = 21
_CAP_PERFMON = 38

OLDEST_NSYS = (2022, 1)
# NVIDIA's documents: from this driver on CAP_PERFMON is enough for the hardware counters.
_PERFMON_DRIVER = 565
# Found by recording with each: the ranges of these nvtx packages are not recorded by nsys up to 2023.4.
_NVTX_BREAKS_AT = (0, 2, 12)
_NSYS_WITHOUT_NEW_NVTX = (2023, 4)

_GIB = 1 << 30
_LOW_TEMP_BYTES = 5 * _GIB
_LOW_SHM_BYTES = _GIB
_LOW_MEMORY_BYTES = 2 * _GIB
_LOW_CPUS = 2.0
_THROTTLED_RATIO = 0.05
# cgroup v1 writes "no limit" as a number near 2**63.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True)
class Check:
    """One thing looked at: ``remedy`` says what to do, ``command`` is the one line that does it; None = all is well."""

    id: str
    title: str
    status: Status
    found: str
    remedy: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class Ability:
    """What can be done on this machine, and when not, ``because`` of what."""

    what: str
    works: bool
    because: str | None = None


class Nsys(NamedTuple):
    """An nsys found on the machine; version None = it does not run. ``on_path``: reached by its plain name."""

    path: Path
    version: tuple[int, ...] | None
    on_path: bool


class Gpu(NamedTuple):
    """A GPU as NVML lists it (in PCI order, whatever CUDA_VISIBLE_DEVICES says); None = NVML cannot say."""

    name: str
    compute_capability: tuple[int, int] | None
    mig: bool | None


@dataclass(frozen=True)
class Nvml:
    """What NVML answered: the devices, or the error's ``code`` (None when even the Python package is missing)."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    error: str | None = None
    code: int | None = None


def _load_pynvml() -> Any:
    return importlib.import_module("pynvml")


def _distribution_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _disk_space(path: Path) -> tuple[int, int] | None:
    """(total, free) bytes of the file system that holds ``path``; None when it cannot be asked."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.total, usage.free


@dataclass(frozen=True)
class Machine:
    """Where the checks look. The default is the machine infprof runs on; tests build others below a folder."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    load_nvml: Callable[[], Any] = _load_pynvml
    package_version: Callable[[str], str | None] = _distribution_version
    disk_space: Callable[[Path], tuple[int, int] | None] = _disk_space

    def path(self, absolute: str) -> Path:
        """An absolute path of the machine, below ``root``."""
        return self.root / absolute.lstrip("/")

    def read(self, absolute: str) -> str | None:
        """The text of a file; None when it is absent or may not be read."""
        try:
            return self.path(absolute).read_text(errors="replace")
        except OSError:
            return None

    def glob(self, pattern: str) -> list[Path]:
        """Paths of the machine that match an absolute pattern, sorted."""
        try:
            return sorted(self.root.glob(pattern.lstrip("/")))
        except OSError:
            return []

    def shown(self, path: Path) -> str:
        """A path as the machine's user would write it."""
        try:
            return "/" + str(path.relative_to(self.root))
        except ValueError:
            return str(path)


def run() -> list[Check]:
    """Check the machine that infprof runs on."""
    return check_machine(Machine())


def check_machine(machine: Machine) -> list[Check]:
    """All checks, in the order in which they are worth reading."""
    tools = find_nsys(machine)
    nvml = ask_nvml(machine)
    driver = driver_version(machine) or nvml.driver
    return [
        _check_reading(machine),
        _check_binary_reports(machine, tools),
        _check_columnar_exports(machine),
        _check_nsys(machine, tools),
        _check_nvtx(machine, tools),
        _check_driver(machine, driver),
        _check_gpus(machine, nvml, driver),
        _check_visible_devices(machine, nvml),
        check_counters(machine, driver),
        check_counter_users(machine),
        check_cpu_sampling(machine),
        _check_ptrace(machine),
        _check_torch(machine),
        _check_cpus(machine),
        _check_memory(machine),
        _check_shm(machine),
        _check_temp(machine),
        _check_host_telemetry(machine),
        _check_network_telemetry(machine),
    ]


# --- what the machine is ---------------------------------------------------------------------------------------------


def _capabilities(machine: Machine) -> int:
    """The effective capabilities of this process as a bit mask; 0 when unknown."""
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", machine.read("/proc/self/status") or "", re.M)
    return int(match.group(1), 16) if match else 0


def _has_capability(machine: Machine, *bits: int) -> bool:
    capabilities = _capabilities(machine)
    return any(capabilities >> bit & 1 for bit in bits)


def container_kind(machine: Machine) -> str | None:
    """ "docker", "podman", "kubernetes", "lxc", "a container", or None on a plain machine."""
    if "KUBERNETES_SERVICE_HOST" in machine.environ:
        return "kubernetes"
    if machine.path("/run/.containerenv").exists():
        return "podman"
    if machine.path("/.dockerenv").exists():
        return "docker"
    groups = machine.read("/proc/1/cgroup") or ""
    for word, kind in (("kubepods", "kubernetes"), ("docker", "docker"), ("lxc", "lxc"), ("containerd", "a container")):
        if word in groups:
            return kind
    return None


def _system_id(machine: Machine) -> str:
    """ "debian", "ubuntu", "rhel" or "" from os-release."""
    text = machine.read("/etc/os-release") or ""
    words = " ".join(re.findall(r"^ID(?:_LIKE)?=[\"']?([^\"'\n]*)", text, re.M)).split()
    for name, system in (("ubuntu", "ubuntu"), ("debian", "debian"), ("rhel", "rhel"), ("fedora", "rhel")):
        if name in words:
            return system
    return ""


def version_text(version: tuple[int, ...]) -> str:
    """A version as people write it: (2023, 4, 4) → "2023.4.4"."""
    return ".".join(str(part) for part in version)


def _numbers(text: str) -> tuple[int, ...]:
    """The leading dotted numbers of a version: "0.2.12rc1" → (0, 2, 12)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def binary_size(count: int) -> str:
    """Bytes as GiB or MiB."""
    for unit, divisor in (("GiB", _GIB), ("MiB", 1 << 20)):
        if count >= divisor:
            return f"{count / divisor:.1f} {unit}"
    return f"{count} bytes"


# --- Nsight Systems --------------------------------------------------------------------------------------------------

_NSYS_PLACES = (
    "/opt/nvidia/nsight-systems*/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
    "/usr/local/cuda*/bin/nsys",
    "/opt/nsys*/bin/nsys",
)


def find_nsys(machine: Machine) -> list[Nsys]:
    """Every nsys on PATH and in its usual folders, the one to use first: that on PATH, then the newest."""
    on_path = [machine.path(d) / "nsys" for d in machine.environ.get("PATH", "").split(os.pathsep) if d.startswith("/")]
    found: dict[Path, Nsys] = {}
    for path in [*on_path, *(p for place in _NSYS_PLACES for p in machine.glob(place))]:
        real = Path(os.path.realpath(path))
        if real not in found and path.is_file() and os.access(path, os.X_OK):
            found[real] = Nsys(path, nsys_version(path), path in on_path)
    return sorted(found.values(), key=lambda n: (n.version is not None, n.on_path, n.version or ()), reverse=True)


def nsys_version(path: Path) -> tuple[int, ...] | None:
    """The version that an nsys program gives; None where it is none, or does not run."""
    try:
        # nsys starts in well under a second; a hanging one must not hang the check.
        done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"version (\d{4}\.\d+(?:\.\d+)*)", done.stdout)
    return _numbers(match.group(1)) if match and done.returncode == 0 else None


def install_nsys(machine: Machine) -> str:
    """The command that installs nsys on such a system."""
    tool = "dnf" if _system_id(machine) == "rhel" else "apt-get"
    return f"sudo {tool} install -y nsight-systems-cli"


def _check_nsys(machine: Machine, tools: list[Nsys]) -> Check:
    title = "Nsight Systems"
    install = install_nsys(machine)
    if not tools:
        return Check(
            "nsys",
            title,
            "missing",
            "no nsys on PATH or in its usual folders",
            "Install it from NVIDIA's CUDA package repository.",
            install,
        )
    best = tools[0]
    if best.version is None:
        return Check("nsys", title, "missing", f"{machine.shown(best.path)} does not run", "Install it again.", install)
    found = f"{version_text(best.version)} at {machine.shown(best.path)}"
    others = [f"{version_text(t.version) if t.version else 'broken'} at {machine.shown(t.path)}" for t in tools[1:]]
    if others:
        found += f" (also {', '.join(others)})"
    newest = max(tools, key=lambda tool: tool.version or ())
    to_path = f'export PATH={shlex.quote(str(Path(machine.shown(newest.path)).parent))}:"$PATH"'
    if not best.on_path:
        return Check("nsys", title, "warning", f"{found}, not on PATH", "Put it on PATH.", to_path)
    fault = nsys_fault(best.version)
    if fault is None:
        return Check("nsys", title, "ok", found)
    if nsys_fault(newest.version or ()) is None:
        return Check("nsys", title, "warning", f"{found}: {fault}", "Put the newer one first on PATH.", to_path)
    remedy = "Install a newer one; until then record with --sample=none --cpuctxsw=none."
    return Check("nsys", title, "warning", f"{found}: {fault}", remedy, install)


def nsys_fault(version: tuple[int, ...]) -> str | None:
    """What is known to be wrong with a version."""
    if version < OLDEST_NSYS:
        return "too old to be sure of its reports"
    if version[:2] == (2022, 4):
        return "its context-switch tracing can hang on new kernels"
    return None


def _check_nvtx(machine: Machine, tools: list[Nsys]) -> Check:
    title = "NVTX package"
    version = machine.package_version("nvtx")
    if version is None:
        return Check("nvtx", title, "ok", "the Python package nvtx is not installed here (it is optional)")
    best = tools[0].version if tools else None
    if best is not None and best[:2] <= _NSYS_WITHOUT_NEW_NVTX and _numbers(version) >= _NVTX_BREAKS_AT:
        return Check(
            "nvtx",
            title,
            "warning",
            f"nvtx {version} with nsys {version_text(best)}: its ranges are not recorded",
            "Take an older nvtx, or a newer nsys.",
            "pip install 'nvtx<0.2.12'",
        )
    return Check("nvtx", title, "ok", f"nvtx {version}")


# --- driver and GPUs -------------------------------------------------------------------------------------------------


def driver_version(machine: Machine) -> str | None:
    """The version of the loaded NVIDIA kernel module; None without one."""
    match = re.search(
        r"NVRM version:.*?\b(\d{3,4}\.\d+(?:\.\d+)?)\b", machine.read("/proc/driver/nvidia/version") or ""
    )
    return match.group(1) if match else None


def ask_nvml(machine: Machine) -> Nvml:
    """The driver version and the GPUs by NVML; every failure becomes ``error``."""
    try:
        nvml = machine.load_nvml()
    except ImportError as error:
        return Nvml(error=f"the Python package nvidia-ml-py cannot be imported ({error})")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Nvml(error=str(error), code=getattr(error, "value", None))
    try:
        driver = _optional(nvml, "nvmlSystemGetDriverVersion")
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return Nvml(tuple(_gpu(nvml, handle) for handle in handles), None if driver is None else _text(driver))
    except nvml.NVMLError as error:
        return Nvml(error=str(error), code=getattr(error, "value", None))
    finally:
        _optional(nvml, "nvmlShutdown")


def _gpu(nvml: Any, handle: Any) -> Gpu:
    name = _optional(nvml, "nvmlDeviceGetName", handle)
    capability = _optional(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    mig = _optional(nvml, "nvmlDeviceGetMigMode", handle)
    return Gpu(
        "unnamed GPU" if name is None else _text(name),
        None if capability is None else (int(capability[0]), int(capability[1])),
        None if mig is None else bool(mig[0]),
    )


def _optional(nvml: Any, call: str, *arguments: Any) -> Any:
    """The call's answer, or None where this driver, GPU or package version has no answer."""
    try:
        return getattr(nvml, call)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _text(value: str | bytes) -> str:
    # nvidia-ml-py gave bytes until 2022.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _check_driver(machine: Machine, driver: str | None) -> Check:
    title = "NVIDIA driver"
    if driver is not None:
        return Check("driver", title, "ok", driver)
    if machine.path("/proc/driver/nvidia/version").exists():
        return Check("driver", title, "unknown", "/proc/driver/nvidia/version holds no version that can be read")
    found = "none found"
    if machine.path("/dev/kfd").exists():
        found = "none found; an AMD GPU driver is there, whose GPUs infprof cannot record yet"
    remedy, command = _get_driver(machine)
    return Check("driver", title, "missing", found, remedy, command)


def _get_driver(machine: Machine) -> tuple[str, str]:
    kind = container_kind(machine)
    if kind == "kubernetes":
        return (
            "Ask for a GPU in the pod's resources.",
            "kubectl set resources deployment NAME --limits=nvidia.com/gpu=1",
        )
    if kind is not None:
        return "Start the container with its host's GPUs.", "docker run --gpus all IMAGE"
    commands = {
        "ubuntu": "sudo ubuntu-drivers install",
        "debian": "sudo apt-get install -y nvidia-driver",
        "rhel": "sudo dnf module install -y nvidia-driver",
    }
    command = commands.get(_system_id(machine), "lspci -nn | grep -i nvidia")
    return "Install the driver, if there is an NVIDIA GPU. Reading traces needs none.", command


_NVML_REMEDIES = {
    4: ("Allow this user to open the devices.", "ls -l /dev/nvidia*"),
    15: ("A GPU has fallen off the bus; the kernel log says why. A reboot brings it back.", "sudo dmesg | grep -i xid"),
    16: ("A GPU needs a reset; look at the kernel log first.", "sudo dmesg | grep -i xid"),
    18: ("The driver's library and its kernel module differ, as after an update: load the new one.", "sudo reboot"),
}


def _check_gpus(machine: Machine, nvml: Nvml, driver: str | None) -> Check:
    title = "GPUs"
    if nvml.error is not None:
        return _gpus_missing(machine, nvml, driver)
    if not nvml.gpus:
        remedy, command = _get_driver(machine)
        return Check("gpus", title, "missing", "NVML works and lists no GPU", remedy, command)
    found = "; ".join(_gpu_text(gpu) for gpu in nvml.gpus)
    if any(gpu.mig for gpu in nvml.gpus):
        return Check(
            "gpus",
            title,
            "warning",
            f"{found}. With MIG, NVML gives no utilisation and each instance has only its share of the card's peaks",
            "To measure a whole card, switch MIG off on it when nothing runs there.",
            "sudo nvidia-smi -i 0 -mig 0",
        )
    return Check("gpus", title, "ok", found)


def _gpu_text(gpu: Gpu) -> str:
    text = gpu.name
    if gpu.compute_capability is not None:
        text += f" (compute capability {gpu.compute_capability[0]}.{gpu.compute_capability[1]})"
    return text + (", MIG on" if gpu.mig else "")


def _gpus_missing(machine: Machine, nvml: Nvml, driver: str | None) -> Check:
    title = "GPUs"
    if nvml.code is None:
        return Check("gpus", title, "unknown", str(nvml.error), "Install it.", "pip install nvidia-ml-py")
    found = f"NVML: {nvml.error}"
    if nvml.code in _NVML_REMEDIES:
        return Check("gpus", title, "missing", found, *_NVML_REMEDIES[nvml.code])
    if driver is not None and nvml.code == 12 and container_kind(machine) is not None:
        # The container runtime brings NVML's library only with the "utility" capability; CUDA works without it.
        return Check(
            "gpus",
            title,
            "missing",
            f"{found}. The driver is there, its library is not",
            "Start the container with the driver's utilities.",
            "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility IMAGE",
        )
    remedy, command = _get_driver(machine)
    return Check("gpus", title, "missing", found, remedy, command)


def _check_visible_devices(machine: Machine, nvml: Nvml) -> Check:
    title = "CUDA_VISIBLE_DEVICES"
    value = machine.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return Check("visible-devices", title, "ok", "not set: every GPU is visible")
    ids = [part.strip() for part in value.split(",")]
    # CUDA stops at the first id that it cannot use, so an empty value or -1 in front hides every GPU.
    first_bad = next((i for i, part in enumerate(ids) if not _is_device_id(part, len(nvml.gpus))), None)
    if first_bad == 0:
        return Check(
            "visible-devices", title, "warning", f'"{value}" hides every GPU', "Unset it.", "unset CUDA_VISIBLE_DEVICES"
        )
    if first_bad is not None:
        return Check(
            "visible-devices",
            title,
            "warning",
            f'"{value}": CUDA stops at "{ids[first_bad]}", which is no GPU here, and sees {first_bad}',
            "Name only GPUs that are there.",
            "nvidia-smi -L",
        )
    return Check("visible-devices", title, "ok", f'"{value}": {len(ids)} visible')


def _is_device_id(text: str, gpus: int) -> bool:
    """Whether CUDA can take ``text``; with no GPU known (0) any number may be one."""
    if re.match(r"(GPU|MIG)-", text):
        return True
    return text.isdigit() and (gpus == 0 or int(text) < gpus)


# --- hardware counters -----------------------------------------------------------------------------------------------


def check_counters(machine: Machine, driver: str | None) -> Check:
    """Whether the driver lets this user read the hardware counters."""
    title = "GPU counter permission"
    if driver is None:
        return Check("counters", title, "unknown", "no NVIDIA driver to ask")
    text = machine.read("/proc/driver/nvidia/params")
    match = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", text or "", re.M)
    if match and match.group(1) == "0":
        return Check("counters", title, "ok", "every user may read them")
    allowed = [_CAP_SYS_ADMIN]
    if (_numbers(driver) or (0,))[0] >= _PERFMON_DRIVER:
        allowed.append(_CAP_PERFMON)
    if _has_capability(machine, *allowed):
        return Check("counters", title, "ok", "this user may read them (CAP_SYS_ADMIN or CAP_PERFMON)")
    if match is None:
        return Check(
            "counters",
            title,
            "unknown",
            "/proc/driver/nvidia/params does not say who may read them, and this user has no special rights",
            "Try it: nsys says ERR_NVGPUCTRPERM where it is not allowed.",
            "nsys profile --gpu-metrics-device=all -o try -- sleep 1",
        )
    found = "only administrators may read them: compute- and bandwidth-bound cannot be told apart"
    if container_kind(machine) is not None:
        command = "docker run --gpus all --cap-add=SYS_ADMIN IMAGE"
        return Check("counters", title, "warning", found, "Give the container the right.", command)
    return Check(
        "counters",
        title,
        "warning",
        found,
        "Allow every user, then reboot (on Debian and Ubuntu run update-initramfs -u before); or record as root.",
        "echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvidia-profiling.conf",
    )


_COUNTER_USERS = ("nv-hostengine", "dcgm-exporter")


def check_counter_users(machine: Machine) -> Check:
    """Whether another program seems to hold the hardware counters."""
    title = "Others on the counters"
    names = {(machine.read(machine.shown(path)) or "").strip() for path in machine.glob("/proc/[0-9]*/comm")}
    found = sorted(names.intersection(_COUNTER_USERS))
    if not found:
        return Check(
            "counter-users", title, "ok", "no DCGM process is seen here (a container sees only its own processes)"
        )
    return Check(
        "counter-users",
        title,
        "warning",
        f"{', '.join(found)} runs: DCGM can hold the hardware counters, and nsys then gets none",
        "Pause DCGM's profiling while recording (dcgmi profmon --resume afterwards).",
        "dcgmi profmon --pause",
    )


# --- CPU side --------------------------------------------------------------------------------------------------------


def check_cpu_sampling(machine: Machine) -> Check:
    """Whether the kernel permits CPU samples and context switches to be recorded."""
    title = "CPU samples, switches"
    text = (machine.read("/proc/sys/kernel/perf_event_paranoid") or "").strip()
    privileged = _has_capability(machine, _CAP_SYS_ADMIN, _CAP_PERFMON)
    if not re.fullmatch(r"-?\d+", text):
        return Check("cpu-sampling", title, "unknown", "this kernel does not say (no perf_event_paranoid)")
    level = int(text)
    filtered = re.search(r"^Seccomp:\s*2", machine.read("/proc/self/status") or "", re.M) is not None
    if filtered and not privileged and container_kind(machine) is not None:
        return Check(
            "cpu-sampling",
            title,
            "warning",
            "the container's system-call filter usually blocks perf_event_open",
            "Allow it, or record without: --sample=none --cpuctxsw=none.",
            "docker run --gpus all --cap-add=SYS_ADMIN IMAGE",
        )
    if privileged or level <= 0:
        why = "this user has the right" if privileged else f"perf_event_paranoid is {level}"
        return Check("cpu-sampling", title, "ok", f"whole system ({why})")
    if level <= 2:
        return Check("cpu-sampling", title, "ok", f"own processes (perf_event_paranoid is {level})")
    return Check(
        "cpu-sampling",
        title,
        "warning",
        f"perf_event_paranoid is {level}: without CPU samples and switches a starved CPU cannot be told from work",
        "Allow them for own processes until the next reboot.",
        "sudo sysctl -w kernel.perf_event_paranoid=2",
    )


def _check_ptrace(machine: Machine) -> Check:
    title = "Looking into processes"
    text = (machine.read("/proc/sys/kernel/yama/ptrace_scope") or "").strip()
    if text in ("", "0", "1"):
        found = f"ptrace_scope is {text}" if text else "not restricted by Yama"
        return Check("ptrace", title, "ok", f"{found}: enough for a target that is started from here")
    if _has_capability(machine, _CAP_SYS_PTRACE):
        return Check("ptrace", title, "ok", f"ptrace_scope is {text}, and this user has CAP_SYS_PTRACE")
    return Check(
        "ptrace",
        title,
        "warning",
        f"ptrace_scope is {text}: the Python stacks of a running server cannot be read (py-spy); nsys does not mind",
        "Allow it for child processes." if text == "2" else "3 lasts until a reboot; set it lower at the next boot.",
        "sudo sysctl -w kernel.yama.ptrace_scope=1",
    )


# --- Python packages -------------------------------------------------------------------------------------------------

_READERS = ("numpy", "pyyaml")
_CUPTI_PACKAGES = ("nvidia-cuda-cupti", "nvidia-cuda-cupti-cu13", "nvidia-cuda-cupti-cu12", "nvidia-cuda-cupti-cu11")


def _check_reading(machine: Machine) -> Check:
    title = "Reading traces"
    absent = [name for name in _READERS if machine.package_version(name) is None]
    if absent:
        return Check(
            "reading",
            title,
            "missing",
            f"Python packages are missing: {', '.join(absent)}",
            "Install infprof with its dependencies.",
            f"pip install {' '.join(absent)}",
        )
    return Check("reading", title, "ok", "all Python packages are there")


def _check_binary_reports(machine: Machine, tools: list[Nsys]) -> Check:
    title = ".nsys-rep files"
    working = [(tool.version, tool.path) for tool in tools if tool.version is not None]
    if not working:
        remedy = "Install nsys; or export them where they were made, and open the .sqlite files."
        return Check("binary-reports", title, "missing", "no nsys that can read them", remedy, install_nsys(machine))
    version, path = max(working)
    found = f"opened through nsys {version_text(version)} at {machine.shown(path)}: reports of this version or older"
    return Check("binary-reports", title, "ok", found)


def _check_columnar_exports(machine: Machine) -> Check:
    title = "Parquet, Arrow exports"
    version = machine.package_version("pyarrow")
    if version is None:
        found = "pyarrow is not installed; SQLite exports need nothing"
        return Check("columnar-exports", title, "missing", found, "Install it.", "pip install 'infprof[arrow]'")
    return Check("columnar-exports", title, "ok", f"pyarrow {version}")


def _check_torch(machine: Machine) -> Check:
    title = "PyTorch, CUPTI"
    torch = machine.package_version("torch")
    cupti = next((f"{n} {v}" for n in _CUPTI_PACKAGES if (v := machine.package_version(n)) is not None), None)
    if cupti is None:
        libraries = machine.glob("/usr/local/cuda*/extras/CUPTI/lib64/libcupti.so*")
        cupti = machine.shown(libraries[0]) if libraries else None
    if torch is None:
        found = "torch is not installed in infprof's Python" + (f"; CUPTI: {cupti}" if cupti else "")
        remedy = "Only for profiles by PyTorch from here; a server in its own environment needs nothing."
        return Check("torch", title, "missing", found, remedy, "pip install torch")
    if torch.endswith("+cpu"):
        return Check(
            "torch",
            title,
            "warning",
            f"torch {torch} cannot use a GPU",
            "Install a CUDA build.",
            "pip install --force-reinstall torch",
        )
    return Check(
        "torch", title, "ok", f"torch {torch}; CUPTI: {cupti or 'not found as a package, torch may carry its own'}"
    )


# --- limits ----------------------------------------------------------------------------------------------------------


def _group_folders(machine: Machine, controller: str) -> list[Path]:
    """The cgroup folders that bind this process, innermost first: v1 of ``controller`` where mounted, else v2.

    In a container with its own cgroup namespace the path reads "/", and the folder is the mount itself.
    """
    groups = machine.read("/proc/self/cgroup") or ""
    roots: list[tuple[Path, str]] = []
    for line in groups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            roots.append((machine.path(f"/sys/fs/cgroup/{controllers}"), path))
            roots.append((machine.path(f"/sys/fs/cgroup/{controller}"), path))
        elif number == "0" and not controllers:
            roots.append((machine.path("/sys/fs/cgroup"), path))
    folders: list[Path] = []
    for mount, path in roots:
        inner = mount / path.strip("/")
        # Limits hold at every ancestor, so all of them are looked at; a path outside our view falls away.
        for folder in (inner, *inner.parents):
            if folder.is_dir() and folder not in folders:
                folders.append(folder)
            if folder == mount:
                break
    return folders


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").split()
    except OSError:
        return []


def _cpu_quota(folders: Iterable[Path]) -> float | None:
    """The smallest CPU quota in cores; None = none set."""
    quotas = []
    for folder in folders:
        pair = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        if len(pair) == 2 and all(part.isdigit() for part in pair) and int(pair[1]) > 0:
            quotas.append(int(pair[0]) / int(pair[1]))
    return min(quotas, default=None)


def _throttled_ratio(folders: Iterable[Path]) -> float:
    """The largest share of scheduling periods in which a group was held back."""
    worst = 0.0
    for folder in folders:
        words = _words(folder / "cpu.stat")
        values = {key: int(value) for key, value in zip(words[::2], words[1::2], strict=False) if value.isdigit()}
        if values.get("nr_periods"):
            worst = max(worst, values.get("nr_throttled", 0) / values["nr_periods"])
    return worst


def _cpu_count(machine: Machine) -> int | None:
    """CPUs that this process may run on."""
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)", machine.read("/proc/self/status") or "", re.M)
    if match is None:
        return None
    count = 0
    for part in match.group(1).split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            count += int(last or first) - int(first) + 1
    return count or None


def _check_cpus(machine: Machine) -> Check:
    title = "CPUs"
    count = _cpu_count(machine)
    folders = _group_folders(machine, "cpu")
    quota = _cpu_quota(folders)
    kind = container_kind(machine)
    found = "unknown number of CPUs" if count is None else f"{count} CPUs"
    if quota is not None:
        found += f", limited to {quota:.1f} by the container or service"
    elif kind is not None:
        found += f" in {kind}, no limit"
    throttled = _throttled_ratio(folders)
    command = (
        "kubectl set resources deployment NAME --limits=cpu=8"
        if kind == "kubernetes"
        else "docker update --cpus 8 CONTAINER"
    )
    if throttled > _THROTTLED_RATIO:
        found += f"; held back in {throttled:.0%} of its scheduling periods"
        return Check(
            "cpus", title, "warning", found, "Raise the limit: the launching thread is stopped meanwhile.", command
        )
    if quota is not None and quota < _LOW_CPUS:
        return Check("cpus", title, "warning", found, "Raise the limit: server and profiler need two or more.", command)
    return Check("cpus", title, "unknown" if count is None else "ok", found)


def _reclaimable_bytes(folder: Path) -> int:
    """Page cache that counts as used memory, although the kernel gives it back at need."""
    words = _words(folder / "memory.stat")
    values = dict(zip(words[::2], words[1::2], strict=False))
    text = values.get("total_inactive_file", values.get("inactive_file", "0"))
    return int(text) if text.isdigit() else 0


def _check_memory(machine: Machine) -> Check:
    title = "Memory"
    match = re.search(r"^MemAvailable:\s*(\d+) kB", machine.read("/proc/meminfo") or "", re.M)
    free = [int(match.group(1)) * 1024] if match else []
    limited = False
    for folder in _group_folders(machine, "memory"):
        limit = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        if limit and used and limit[0].isdigit() and used[0].isdigit() and int(limit[0]) < _NO_LIMIT_BYTES:
            free.append(max(0, int(limit[0]) - max(0, int(used[0]) - _reclaimable_bytes(folder))))
            limited = limited or free[-1] == min(free)
    if not free:
        return Check("memory", title, "unknown", "neither /proc/meminfo nor a cgroup says how much is free")
    found = f"{binary_size(min(free))} free" + (" under the container's or service's limit" if limited else "")
    if min(free) >= _LOW_MEMORY_BYTES:
        return Check("memory", title, "ok", found)
    if limited:
        command = "docker update --memory 16g --memory-swap 16g CONTAINER"
        return Check("memory", title, "warning", f"{found}: large reports may not fit", "Raise the limit.", command)
    command = "ps -eo pid,rss,comm --sort=-rss | head"
    return Check("memory", title, "warning", f"{found}: large reports may not fit", "See what uses it.", command)


def _check_shm(machine: Machine) -> Check:
    title = "Shared memory"
    space = machine.disk_space(machine.path("/dev/shm"))
    if space is None:
        return Check("shm", title, "unknown", "/dev/shm cannot be looked at")
    if space[0] >= _LOW_SHM_BYTES:
        return Check("shm", title, "ok", f"/dev/shm holds {binary_size(space[0])}")
    found = (
        f"/dev/shm holds only {binary_size(space[0])}: NCCL and multi-process servers fail or fall back to slower ways"
    )
    if container_kind(machine) is not None:
        return Check(
            "shm",
            title,
            "warning",
            found,
            "Start the container with more.",
            "docker run --gpus all --shm-size=8g IMAGE",
        )
    return Check("shm", title, "warning", found, "Enlarge it.", "sudo mount -o remount,size=8G /dev/shm")


def _check_temp(machine: Machine) -> Check:
    """nsys writes its intermediate file to /tmp whatever -o says, so that is the folder that matters."""
    title = "Space in /tmp"
    space = machine.disk_space(machine.path("/tmp"))
    if space is None:
        return Check("temp-space", title, "unknown", "/tmp cannot be looked at")
    if space[1] >= _LOW_TEMP_BYTES:
        return Check("temp-space", title, "ok", f"{binary_size(space[1])} free")
    return Check(
        "temp-space",
        title,
        "warning",
        f"{binary_size(space[1])} free, and nsys keeps its intermediate file there",
        "See what fills it.",
        "du -xh --max-depth=1 /tmp | sort -h | tail",
    )


def _check_host_telemetry(machine: Machine) -> Check:
    """The host probe of `infprof run` reads /proc; pressure figures need a kernel that keeps them (PSI)."""
    title = "Host telemetry"
    if machine.read("/proc/self/stat") is None:
        return Check(
            "host-telemetry", title, "missing", "/proc cannot be read", "Mount it.", "mount -t proc proc /proc"
        )
    if machine.read("/proc/pressure/cpu") is not None:
        return Check("host-telemetry", title, "ok", "threads, memory, pressure (PSI)")
    return Check(
        "host-telemetry",
        title,
        "warning",
        "threads and memory, but no pressure figures (PSI): this kernel does not keep them, or the container hides them",
        "Boot with psi=1, where the kernel has it built in but off.",
        "grep -s CONFIG_PSI /boot/config-$(uname -r)",
    )


def _check_network_telemetry(machine: Machine) -> Check:
    """The network probe reads /proc/net and, for InfiniBand and RoCE, whose traffic appears nowhere else, /sys."""
    title = "Network telemetry"
    text = machine.read("/proc/net/dev") or machine.read("/proc/self/net/dev")
    if text is None:
        return Check("network-telemetry", title, "missing", "/proc/net/dev cannot be read", "Mount /proc.")
    names = [line.split(":")[0].strip() for line in text.splitlines() if ":" in line]
    others = [name for name in names if name != "lo"]
    rdma = [path.name for path in machine.glob("/sys/class/infiniband/*")]
    found = f"{len(others)} interface{'' if len(others) == 1 else 's'} beside loopback"
    return Check(
        "network-telemetry", title, "ok", found + (f", RDMA: {', '.join(rdma)}" if rdma else ", no RDMA device")
    )


# --- what follows, and how it is shown -------------------------------------------------------------------------------


def abilities(checks: list[Check]) -> list[Ability]:
    """What the checks add up to: which uses of infprof work here."""
    by_id = {check.id: check for check in checks}

    def unless(what: str, *ids: str, also_warning: tuple[str, ...] = ()) -> Ability:
        for key in ids:
            check = by_id.get(key)
            if check is None:
                continue
            if check.status == "missing" or (key in also_warning and check.status != "ok"):
                return Ability(what, False, f"{check.title}: {check.found}")
        return Ability(what, True)

    return [
        unless("analyze", "reading"),
        unless("open an .nsys-rep", "reading", "binary-reports"),
        unless("open Parquet and Arrow exports", "reading", "columnar-exports"),
        unless("record with nsys", "nsys", "driver", "gpus"),
        unless(
            "GPU counters",
            "nsys",
            "driver",
            "gpus",
            "counters",
            "counter-users",
            also_warning=("counters", "counter-users"),
        ),
        unless("CPU samples", "nsys", "cpu-sampling", also_warning=("cpu-sampling",)),
        unless("GPU telemetry", "driver", "gpus"),
        unless("host telemetry", "host-telemetry"),
        unless("network telemetry", "network-telemetry"),
        unless("record with PyTorch", "driver", "gpus", "torch", also_warning=("torch",)),
    ]


def summary(checks: list[Check]) -> list[str]:
    """One line per use of infprof: "analyze: yes", "record with nsys: no, because NVIDIA driver: none found"."""
    return [f"{a.what}: yes" if a.works else f"{a.what}: no, because {a.because}" for a in abilities(checks)]


_COLORS: dict[str, str] = {"ok": "32", "warning": "33", "missing": "31", "unknown": "35"}


def render(checks: list[Check], width: int = 80, color: bool = False) -> str:
    """The checks as plain text of at most ``width`` columns. Commands stay on one line each, to be copied."""
    title_width = max((len(check.title) for check in checks), default=0)
    indent = " " * (9 + title_width + 2)
    lines = []
    for check in checks:
        mark = f"{check.status:<9}"
        lead = f"{check.title:<{title_width}}  "
        body = textwrap.wrap(check.found, max(20, width - len(indent)), break_long_words=False, break_on_hyphens=False)
        if color:
            mark = f"\x1b[{_COLORS[check.status]}m{mark}\x1b[0m"
        lines.append(mark + lead + (body[0] if body else ""))
        lines += [indent + line for line in body[1:]]
        if check.remedy:
            lines += textwrap.wrap(
                check.remedy,
                max(30, width),
                initial_indent=" " * 9 + "→ ",
                subsequent_indent=" " * 11,
                break_long_words=False,
                break_on_hyphens=False,
            )
        if check.command:
            lines.append(" " * 13 + check.command)
    lines.append("")
    for line in summary(checks):
        lines += textwrap.wrap(
            line, max(30, width), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines) + "\n"


def to_dict(checks: list[Check]) -> dict[str, Any]:
    """The checks and what they add up to, as plain dicts and lists."""
    return {
        "schema_version": "1.0",
        "checks": [asdict(check) for check in checks],
        "abilities": [asdict(ability) for ability in abilities(checks)],
    }


def to_json(checks: list[Check]) -> str:
    """``to_dict`` as JSON text."""
    return json.dumps(to_dict(checks), indent=2, ensure_ascii=False) + "\n"
