"""Which TCP ports does a program listen on? Read from /proc, cheaply enough to be asked every second."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

from infprof.probes import procfs

_LISTEN = b" 0A "


# The kernel walks through all its sockets to list them: some milliseconds, so not at every question.
_ASK_THE_KERNEL_EVERY = 3


class ListeningPorts:
    """The ports of one program, asked again and again."""

    def __init__(self, pid: int, root: Path = Path("/")) -> None:
        self._pid, self._root = pid, root
        self._links: set[str] | None = None
        self._asked = 0
        self._ports: list[int] = []

    def now(self) -> list[int]:
        """As ``listening_ports``; a socket that began to listen long after it was made is seen at the third question."""
        links = _sockets(self._pid, self._root)
        if links == self._links and self._asked < _ASK_THE_KERNEL_EVERY:
            self._asked += 1
        else:
            self._links, self._asked = links, 1
            self._ports = _listening(links, self._pid, self._root)
        return self._ports


def listening_ports(pid: int, root: Path = Path("/")) -> list[int]:
    """TCP ports on which the process or one of its descendants listens, ascending; empty where nothing can be read."""
    return _listening(_sockets(pid, root), pid, root)


def _sockets(pid: int, root: Path) -> set[str]:
    """``socket:[inode]`` of every socket that the program has."""
    links = (link for process in _family(pid, root) for link in _links(f"{root}/proc/{process}/fd"))
    return {link for link in links if link.startswith("socket:")}


def _listening(sockets: set[str], pid: int, root: Path) -> list[int]:
    found: set[int] = set()
    for name in ("tcp", "tcp6") if sockets else ():
        listeners = _listeners(procfs.read_or_none(f"{root}/proc/{pid}/net/{name}") or b"")
        found |= {port for link, port in listeners.items() if link in sockets}
    return sorted(found)


def _listeners(table: bytes) -> dict[str, int]:
    """``socket:[inode]`` → port of the listening sockets of a /proc/net/tcp."""
    found = {}
    for line in table.splitlines()[1:]:
        # A busy server has thousands of sockets in other states.
        if _LISTEN not in line:
            continue
        fields = line.split()
        if len(fields) > 9 and fields[3] == _LISTEN.strip():
            found[f"socket:[{fields[9].decode()}]"] = int(fields[1].rpartition(b":")[2], 16)
    return found


def _links(folder: str) -> list[str]:
    links: list[str] = []
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                links.append(os.readlink(f"{folder}/{name}"))
    return links


def _family(pid: int, root: Path) -> list[int]:
    """The process and all its descendants, by the kernel's own lists of children where it keeps them."""
    if not (root / f"proc/{pid}/task/{pid}/children").exists():
        with suppress(psutil.Error):
            return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        return [pid]
    found, waiting = [], [pid]
    while waiting:
        process = waiting.pop()
        found.append(process)
        tasks = f"{root}/proc/{process}/task"
        with suppress(OSError):
            for task in os.listdir(tasks):
                waiting += map(int, (procfs.read_or_none(f"{tasks}/{task}/children") or b"").split())
    return found
