"""The network probe on files of a made-up machine, and on this machine's loopback."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from infprof.probes import ProbeContext, Unavailable, make_probe, procfs
from infprof.probes.network import SIGNALS, NetworkProbe
from infprof.probes.recorder import Clock, TelemetryFile
from infprof.telemetry import Telemetry, read_telemetry
from machine_files import SECOND, Machine, Run

PID = 10
HEADER = "Inter-|   Receive  |  Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes …\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path / "root")
    traffic(machine)
    machine.file("sys/class/net/eth0/speed", "10000\n")
    return machine


def traffic(machine: Machine, rx: int = 0, tx: int = 0, drops: int = 0, errors: int = 0, loopback: int = 0) -> None:
    net = f"proc/{PID}/net"
    machine.file(
        f"{net}/dev",
        f"{HEADER}    lo: {loopback} 9 0 0 0 0 0 0 {loopback} 9 0 0 0 0 0 0\n"
        f"  eth0:{rx} {rx // 1000} {errors} {drops} 0 0 0 0 {tx} {tx // 1000} 0 0 0 0 0 0\n",
    )
    machine.file(f"{net}/snmp", "Ip: A B\nIp: 1 2\nTcp: OutSegs RetransSegs\nTcp: 100 4\nUdp: X\nUdp: 1\n")
    machine.file(f"{net}/netstat", "TcpExt: SyncookiesSent ListenOverflows TCPTimeouts\nTcpExt: 0 7 2\n")


def port(machine: Machine, device: str = "mlx5_0", rate: str = "400 Gb/sec (4X NDR)", **counters: int) -> None:
    """An RDMA port; names that begin with port_, link_ or symbol_ are port counters, the rest hw_counters."""
    folder = f"sys/class/infiniband/{device}/ports/1"
    for name, text in (("rate", rate), ("link_layer", "Ethernet"), ("state", "4: ACTIVE")):
        machine.file(f"{folder}/{name}", text + "\n")
    for name, value in counters.items():
        part = "counters" if name.startswith(("port_", "link_", "symbol_")) else "hw_counters"
        machine.file(f"{folder}/{part}/{name}", f"{value}\n")


def started(machine: Machine, tmp_path: Path) -> Run:
    return Run(NetworkProbe(), machine.root, tmp_path)


def grown(telemetry: Telemetry, scope: str) -> dict[str, float | None]:
    """Signal → increase, of the signals of a scope that grew."""
    found = {s.signal: s.increase() for s in telemetry.all_series if s.scope == scope}
    return {name: value for name, value in found.items() if value}


def test_interfaces_count_both_ways(machine: Machine, tmp_path: Path) -> None:
    run = started(machine, tmp_path)
    run.beat()
    traffic(machine, rx=5_000_000, tx=2_000_000, drops=3, errors=2, loopback=77)
    run.beat()
    telemetry = run.end()
    assert grown(telemetry, "interface/eth0") == {
        "net_rx_bytes": 5_000_000,
        "net_rx_packets": 5000,
        "net_rx_errors": 2,
        "net_rx_drops": 3,
        "net_tx_bytes": 2_000_000,
        "net_tx_packets": 2000,
    }
    assert grown(telemetry, "interface/lo") == {"net_rx_bytes": 77, "net_tx_bytes": 77}
    assert telemetry.facts("net_link_bytes_per_s") == {"interface/eth0": 1_250_000_000}


@pytest.mark.parametrize("speed", ["-1\n", "", None])
def test_a_link_without_a_speed_has_none(machine: Machine, tmp_path: Path, speed: str | None) -> None:
    path = machine.root / "sys/class/net/eth0/speed"
    path.unlink() if speed is None else path.write_text(speed, encoding="utf-8")
    run = started(machine, tmp_path)
    run.beat()
    assert run.end().facts("net_link_bytes_per_s") == {"interface/eth0": None}


def test_the_targets_namespace_comes_first(machine: Machine, tmp_path: Path) -> None:
    machine.file("proc/net/dev", f"{HEADER}  host0: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n")
    run = started(machine, tmp_path)
    run.beat()
    assert run.end().scopes("net_rx_bytes") == ["interface/lo", "interface/eth0"]


def test_tcp_counters_by_name(machine: Machine, tmp_path: Path) -> None:
    run = started(machine, tmp_path)
    run.beat()
    traffic(machine)
    machine.file(f"proc/{PID}/net/snmp", "Tcp: RetransSegs OutSegs\nTcp: 9 300\n")
    machine.file(f"proc/{PID}/net/netstat", "TcpExt: ListenOverflows\nTcpExt: 8\n")
    run.beat()
    telemetry = run.end()
    assert grown(telemetry, "") == {"tcp_retransmits": 5, "tcp_out_segments": 200, "tcp_listen_overflows": 1}
    assert telemetry.why_missing("tcp_timeouts") == "TCPTimeouts is not in this machine's /proc/net/netstat"


def test_rdma_words_are_four_bytes(machine: Machine, tmp_path: Path) -> None:
    port(machine, port_rcv_data=0, port_xmit_data=0, port_rcv_packets=0, np_cnp_sent=0, out_of_sequence=0)
    run = started(machine, tmp_path)
    run.beat()
    port(machine, port_rcv_data=1000, port_xmit_data=500, port_rcv_packets=10, np_cnp_sent=2, out_of_sequence=1)
    run.beat()
    telemetry = run.end()
    assert grown(telemetry, "rdma/mlx5_0/1") == {
        "rdma_rx_bytes": 4000,
        "rdma_tx_bytes": 2000,
        "rdma_rx_packets": 10,
        "rdma_cnp_sent": 2,
        "rdma_retransmits": 1,
    }
    assert telemetry.facts("rdma_link_bytes_per_s") == {"rdma/mlx5_0/1": 50e9}
    assert telemetry.facts("rdma_link_layer") == {"rdma/mlx5_0/1": "Ethernet"}
    assert telemetry.why_missing("rdma_discards") == "this RDMA device has no counter for it"


def test_other_vendors_counters_go_by_the_table(machine: Machine, tmp_path: Path) -> None:
    for device, counters in (
        ("efa_0", {"rx_bytes": 3, "tx_bytes": 4, "rx_pkts": 5, "retrans_pkts": 6}),
        ("bnxt_re0", {"rx_pkts": 7, "rx_cnp_pkts": 8, "to_retransmits": 9, "seq_err_naks_rcvd": 1}),
    ):
        port(machine, device, "100 Gb/sec (2X HDR)", **counters)
    run = started(machine, tmp_path)
    run.beat()
    telemetry = run.end()

    def values(scope: str) -> dict[str, float]:
        return {s.signal: s.value[0] for s in telemetry.all_series if s.scope == scope}

    assert values("rdma/efa_0/1") == {
        "rdma_rx_bytes": 3,
        "rdma_tx_bytes": 4,
        "rdma_rx_packets": 5,
        "rdma_retransmits": 6,
    }
    assert values("rdma/bnxt_re0/1") == {"rdma_rx_packets": 7, "rdma_cnp_handled": 8, "rdma_retransmits": 10}


def test_an_idle_interface_leaves_two_rows(machine: Machine, tmp_path: Path) -> None:
    run = started(machine, tmp_path)
    for _ in range(9):
        run.beat()
    (series,) = run.end().series("net_rx_bytes", "interface/eth0")
    assert [int(t - series.time[0]) // SECOND for t in series.time] == [0, 8]


def test_a_target_that_ended_is_no_news(machine: Machine, tmp_path: Path) -> None:
    run = started(machine, tmp_path)
    run.beat()
    for name in ("dev", "snmp", "netstat"):
        (machine.root / f"proc/{PID}/net/{name}").unlink()
    run.beat()
    telemetry = run.end()
    assert [m.signal for m in telemetry.missing] == ["rdma_rx_bytes"]
    assert telemetry.why_missing("rdma_rx_bytes") == "no RDMA device can be seen here"


def test_no_network_files_at_all(tmp_path: Path) -> None:
    file = TelemetryFile(tmp_path / "t.sqlite", Clock())
    with pytest.raises(Unavailable, match="no network telemetry"):
        NetworkProbe().start(ProbeContext(PID, root=tmp_path), file.recorder("network", SIGNALS))


def test_this_machines_loopback(tmp_path: Path) -> None:
    if b"lo:" not in (procfs.read_or_none("/proc/self/net/dev") or b""):
        pytest.skip("needs a loopback interface")
    file = TelemetryFile(tmp_path / "t.sqlite", Clock())
    probe = make_probe("network")
    out = file.recorder(probe.name, probe.signals)
    tasks = probe.start(ProbeContext(os.getpid()), out)
    for task in tasks:
        task.run(out)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        taken, _ = server.accept()
        with taken:
            client.sendall(b"x" * 200_000)
            assert len(taken.recv(200_000, socket.MSG_WAITALL)) == 200_000
    probe.stop(out)
    file.close()
    telemetry = read_telemetry(tmp_path / "t.sqlite")
    assert grown(telemetry, "interface/lo").get("net_tx_bytes", 0) > 200_000
    assert {task.name for task in tasks} == {"interfaces", "ports", "tcp"}
