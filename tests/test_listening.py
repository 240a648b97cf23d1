"""Ports that a program listens on, its children's included; other programs' and other sockets are not its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infprof.probes import listening
from infprof.probes.listening import listening_ports

CHILD = """
import os, socket, sys
servers = [socket.create_server((host, 0), family=family) for family, host in
           ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))]
client = socket.create_connection(servers[0].getsockname()[:2])
print(*(s.getsockname()[1] for s in servers), client.getsockname()[1], flush=True)
sys.stdin.read()
"""
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}])\n"


@pytest.mark.parametrize("lists_of_children", [True, False])
def test_the_ports_of_a_child_are_found(monkeypatch: pytest.MonkeyPatch, lists_of_children: bool) -> None:
    if not lists_of_children:
        # A kernel without CONFIG_PROC_CHILDREN.
        real = Path.exists
        monkeypatch.setattr(Path, "exists", lambda self: self.name != "children" and real(self))
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        v4, v6, client = map(int, parent.stdout.readline().split())
        with socket.create_server(("127.0.0.1", 0)) as mine:
            found = listening_ports(parent.pid)
            assert found == sorted({v4, v6})
            assert client not in found and mine.getsockname()[1] not in found
            assert mine.getsockname()[1] in listening_ports(os.getpid())
        parent.stdin.close()


def test_a_process_that_is_gone_listens_nowhere() -> None:
    assert listening_ports(99_999_999) == []


def test_only_listening_sockets_of_a_table_count() -> None:
    table = (
        b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        b"   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4242 1 0\n"
        b"   1: 0100007F:1F41 0100007F:0A0A 01 00000000:00000000 00:00000000 00000000     0        0 4243 1 0\n"
        b"   2: 0100007F:1F42 0100007F:1F40 06 00000000:00000000 00:00000000 00000000     0        0 0 3 0\n"
        b"   3: short 0A \n"
    )
    assert listening._listeners(table) == {"socket:[4242]": 8000}
