"""The text forms of /proc, /sys and cgroup files: bytes in, numbers out.

Field numbers and units are those of proc(5) and of the kernel's documentation. psutil is not used here: it has no switches
and run-queue waits per thread, opens three files where one is enough, and its root folder is one for the whole process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_READ_BYTES = 4096


class TaskStat(NamedTuple):
    """The fields of a ``stat`` file that are used; times in clock ticks."""

    name: str
    parent: int
    group: int
    session: int
    major_faults: int
    user_ticks: int
    system_ticks: int
    threads: int
    start_ticks: int
    cpu: int


def read(path: str | Path) -> bytes:
    """A small file whole. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, _READ_BYTES)
        if len(data) < _READ_BYTES:
            return data
        parts = [data]
        while data := os.read(descriptor, 1 << 18):
            parts.append(data)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def read_or_none(path: str | Path) -> bytes | None:
    """The same, None where it cannot be read."""
    try:
        return read(path)
    except OSError:
        return None


def why(error: OSError, what: str) -> str:
    """Why a file could not be read, without its path: paths may hold names."""
    return f"{what} cannot be read here: {os.strerror(error.errno or 0)}"


def task_stat(data: bytes) -> TaskStat:
    """A ``stat`` file of a process or thread. Raises ValueError where it is none.

    The name may hold blanks and brackets, so the fields are counted from the last bracket (proc(5), fields 2 to 39).
    """
    first, last = data.find(b"("), data.rfind(b")")
    field = data[last + 1 :].split()
    if first < 0 or len(field) < 37:
        raise ValueError("not the stat file of a task")
    return TaskStat(
        name=data[first + 1 : last].decode(errors="replace"),
        parent=int(field[1]),
        group=int(field[2]),
        session=int(field[3]),
        major_faults=int(field[9]),
        user_ticks=int(field[11]),
        system_ticks=int(field[12]),
        threads=int(field[17]),
        start_ticks=int(field[19]),
        cpu=int(field[36]),
    )


def field_after(data: bytes, name: bytes) -> bytes | None:
    """The rest of the line ``name: …`` or ``name …`` of a file like ``status`` or ``vmstat``, None without one."""
    start = data.find(b"\n" + name) + 1
    after = data[start + len(name) : start + len(name) + 1]
    if (start == 0 and not data.startswith(name)) or after not in (b":", b" "):
        return None
    end = data.find(b"\n", start)
    return data[start + len(name) + 1 : end if end >= 0 else None].strip()


def key_values(data: bytes) -> dict[str, int]:
    """Lines of a name and a whole number (cpu.stat, memory.events); other lines are left out."""
    pairs = (line.split() for line in data.decode(errors="replace").splitlines())
    return {p[0]: int(p[1]) for p in pairs if len(p) == 2 and p[1].lstrip("-").isdigit()}


def cpu_list(text: str) -> list[int]:
    """``0-3,8`` as numbers. Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        numbers += range(int(low), int(high or low) + 1)
    return numbers


def pressure(data: bytes) -> dict[str, int]:
    """``some`` and ``full`` of a PSI file: the total stall time in nanoseconds (the file has microseconds)."""
    totals = {}
    for line in data.decode(errors="replace").splitlines():
        kind, _, rest = line.partition(" ")
        if "total=" in rest:
            totals[kind] = int(rest.rpartition("total=")[2]) * 1000
    return totals


def named_columns(data: bytes, protocol: str) -> dict[str, int]:
    """A line pair of net/snmp or net/netstat: names in one line, values in the next, both beginning ``protocol:``."""
    lines = [line.split() for line in data.decode(errors="replace").splitlines() if line.startswith(protocol + ":")]
    return {} if len(lines) < 2 else dict(zip(lines[0][1:], map(int, lines[1][1:]), strict=False))


def interfaces(data: bytes) -> dict[str, list[int]]:
    """net/dev: interface → its 16 numbers (8 received, 8 sent, in the order of the file's header)."""
    rows = (line.partition(":") for line in data.decode(errors="replace").splitlines()[2:])
    return {name.strip(): [int(word) for word in rest.split()] for name, colon, rest in rows if colon}


def numa_pages(data: bytes) -> dict[int, int]:
    """numa_maps: node → bytes of resident pages, from the ``N0=`` counts and each mapping's page size."""
    nodes: dict[int, int] = {}
    for line in data.decode(errors="replace").splitlines():
        words = [word.partition("=") for word in line.split()]
        size = next((int(value) for key, _, value in words if key == "kernelpagesize_kB"), 4) * 1024
        for key, _, value in words:
            if key[:1] == "N" and key[1:].isdigit() and value.isdigit():
                nodes[int(key[1:])] = nodes.get(int(key[1:]), 0) + int(value) * size
    return nodes


class Cgroup(NamedTuple):
    """A folder of the target's cgroup: its ``level`` above the target's own (0), and whether it is version 2."""

    folder: Path
    level: int
    unified: bool


def cgroups(root: Path, pid: int) -> dict[str, list[Cgroup]]:
    """Where ``cpu`` and ``memory`` of a process are accounted: its own group first, then what is above it.

    Hosts may have both versions with only one in use, so the files decide: version 1 where a controller is mounted there.
    In a container the path may be that of the host, of which only the part below the mount can be seen.
    """
    paths = _group_paths(read_or_none(root / f"proc/{pid}/cgroup") or b"")
    found: dict[str, list[Cgroup]] = {}
    for controllers, mount_root, mount_point in _mounts(read_or_none(root / "proc/self/mountinfo") or b""):
        unified = not controllers
        for controller in ("cpu", "memory"):
            path = paths.get("" if unified else controller)
            if path is None or not (unified or controller in controllers) or (unified and controller in found):
                continue
            chain = _chain(root, mount_point, mount_root, path, unified)
            if any(_accounts(group, controller) for group in chain):
                found[controller] = chain
    return found


def _group_paths(data: bytes) -> dict[str, str]:
    paths = {}
    for line in data.decode(errors="replace").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _mounts(data: bytes) -> list[tuple[frozenset[str], str, str]]:
    """(controllers, root within the hierarchy, mount point); no controllers for version 2, which comes last."""
    mounts = []
    for line in data.decode(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        words, kind = before.split(), after.split()
        if len(words) > 4 and kind and kind[0] in ("cgroup", "cgroup2"):
            options = frozenset(kind[2].split(",")) if kind[0] == "cgroup" and len(kind) > 2 else frozenset()
            mounts.append((options, words[3], words[4]))
    return sorted(mounts, key=lambda mount: not mount[0])


def _chain(root: Path, mount_point: str, mount_root: str, path: str, unified: bool) -> list[Cgroup]:
    top = root / mount_point.lstrip("/")
    below = path[len(mount_root) :] if mount_root != "/" and path.startswith(mount_root) else path
    folder = top / below.strip("/")
    if ".." in Path(below).parts or not folder.is_dir():
        folder = top
    chain = [folder]
    while chain[-1] != top:
        chain.append(chain[-1].parent)
    return [Cgroup(each, level, unified) for level, each in enumerate(chain)]


def _accounts(group: Cgroup, controller: str) -> bool:
    """Whether the group has the controller's files; version 2 counts CPU time everywhere, limited or not."""
    if controller == "cpu":
        return (group.folder / "cpu.stat").exists()
    return (group.folder / ("memory.current" if group.unified else "memory.usage_in_bytes")).exists()


def quota_cpus(group: Cgroup) -> float | None:
    """The CPUs that the group's quota allows, None without one. Raises OSError."""
    if group.unified:
        quota, period = [*read(group.folder / "cpu.max").split(), b"100000"][:2]
        return None if quota == b"max" else int(quota) / int(period)
    quota_us = int(read(group.folder / "cpu.cfs_quota_us"))
    return None if quota_us <= 0 else quota_us / int(read(group.folder / "cpu.cfs_period_us"))


def throttled(group: Cgroup, stat: Mapping[str, int]) -> dict[str, int]:
    """Periods, throttled periods and throttled nanoseconds of a ``cpu.stat``; version 1 counts ns, version 2 µs."""
    if "nr_periods" not in stat:
        return {}
    lost = stat.get("throttled_usec", 0) * 1000 if group.unified else stat.get("throttled_time", 0)
    return {"periods": stat["nr_periods"], "throttled": stat.get("nr_throttled", 0), "ns": lost}


# Version 1 writes "no limit" as the largest multiple of the page size under 2^63.
_NO_LIMIT_BYTES = 1 << 62


def memory_limit_bytes(group: Cgroup) -> int | None:
    """The group's memory limit in bytes, None without one. Raises OSError."""
    text = read(group.folder / ("memory.max" if group.unified else "memory.limit_in_bytes")).strip()
    limit = None if text == b"max" else int(text)
    return None if limit is None or limit >= _NO_LIMIT_BYTES else limit


def memory_used_bytes(group: Cgroup) -> int:
    """What the group uses, page cache included, in bytes. Raises OSError."""
    return int(read(group.folder / ("memory.current" if group.unified else "memory.usage_in_bytes")))


def memory_events(group: Cgroup) -> dict[str, int]:
    """How often the limit was hit (``max``) and a process was killed for it (``oom_kill``). Raises OSError."""
    if group.unified:
        events = key_values(read(group.folder / "memory.events"))
        return {name: events[name] for name in ("max", "oom_kill") if name in events}
    killed = key_values(read(group.folder / "memory.oom_control")).get("oom_kill")
    hit = {"max": int(read(group.folder / "memory.failcnt"))}
    return hit if killed is None else {**hit, "oom_kill": killed}


def memory_nodes(group: Cgroup) -> dict[int, int]:
    """Node → bytes of anonymous memory of the group, from memory.numa_stat. Raises OSError."""
    for line in read(group.folder / "memory.numa_stat").decode(errors="replace").splitlines():
        words = line.split()
        if words and words[0].partition("=")[0] == "anon":
            pairs = [word.partition("=") for word in words[1:]]
            scale = 1 if group.unified else os.sysconf("SC_PAGE_SIZE")
            return {int(key[1:]): int(value) * scale for key, _, value in pairs if key[:1] == "N" and value}
    return {}


def numa_nodes(root: Path) -> dict[int, list[int]]:
    """Node → its CPUs; empty where the kernel shows none."""
    nodes = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        text = read_or_none(folder / "cpulist")
        if text is not None and folder.name[4:].isdigit():
            nodes[int(folder.name[4:])] = cpu_list(text.decode())
    return nodes


_GPU_VENDORS = (b"0x10de", b"0x1002")
_DISPLAY_CLASSES = (b"0x03", b"0x12")


def gpu_nodes(root: Path) -> dict[str, int | None]:
    """PCI address → NUMA node of each GPU (NVIDIA, AMD; display or accelerator class); None where the kernel has none."""
    nodes: dict[str, int | None] = {}
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor = (read_or_none(device / "vendor") or b"").strip()
        kind = read_or_none(device / "class") or b""
        if vendor in _GPU_VENDORS and kind.startswith(_DISPLAY_CLASSES):
            node = int((read_or_none(device / "numa_node") or b"-1").strip() or b"-1")
            nodes[device.name.lower()] = None if node < 0 else node
    return nodes
