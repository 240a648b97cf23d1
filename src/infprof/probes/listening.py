"""Which TCP ports does a program listen on? Read from /proc, cheaply enough to be asked every second."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

_LISTEN = b" 0A "


def listening_ports(pid: int, root: Path = Path("/")) -> list[int]:
    """TCP ports on which the process or one of its descendants listens, ascending; empty where nothing can be read."""
    sockets: dict[str, int] = {}
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            sockets |= _listeners((root / f"proc/{pid}/net/{name}").read_bytes())
    if not sockets:
        return []
    found: set[int] = set()
    for process in _family(pid, root):
        found |= {sockets[link] for link in _socket_links(root / f"proc/{process}/fd") if link in sockets}
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


def _socket_links(folder: Path) -> list[str]:
    links: list[str] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                links.append(os.readlink(entry.path))
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
        with suppress(OSError), os.scandir(root / f"proc/{process}/task") as tasks:
            for task in tasks:
                with suppress(OSError):
                    waiting += map(int, Path(task.path, "children").read_bytes().split())
    return found
