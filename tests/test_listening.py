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


def test_the_kernels_tables_are_read_when_sockets_change_and_else_at_each_third_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[str] = []
    real = listening.procfs.read_or_none
    monkeypatch.setattr(listening.procfs, "read_or_none", lambda path: reads.append(str(path)) or real(path))

    def tables() -> int:
        found = sum(path.endswith(("/net/tcp", "/net/tcp6")) for path in reads)
        reads.clear()
        return found // 2

    with socket.create_server(("127.0.0.1", 0)) as mine, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        late = bound.getsockname()[1]
        ports = listening.ListeningPorts(os.getpid())
        assert mine.getsockname()[1] in ports.now() and tables() == 1
        bound.listen()
        answers = [ports.now() for _ in range(3)]
        assert tables() == 1 and late in answers[-1]
        with socket.create_server(("127.0.0.1", 0)) as new:
            assert new.getsockname()[1] in ports.now() and tables() == 1
        assert late in ports.now() and tables() == 1


def test_a_program_without_sockets_costs_no_walk_through_all_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    real = listening.procfs.read_or_none
    paths: list[str] = []
    monkeypatch.setattr(listening.procfs, "read_or_none", lambda path: paths.append(str(path)) or real(path))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as program:
        assert listening_ports(program.pid) == []
        assert program.stdin is not None
        program.stdin.close()
    assert not any("/net/" in path for path in paths)
