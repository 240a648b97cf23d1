"""The network: bytes, drops and errors per interface, TCP retransmissions, and the counters of RDMA ports.

Sources: proc(5) (net/dev, net/snmp, net/netstat), sysfs class net, and the kernel's documentation of infiniband ports and
hw_counters. RDMA traffic does not show up in net/dev. A container's interfaces are those of its own network namespace, so
the target's /proc/PID/net is read; sysfs shows this process's namespace, so a link's speed may be unknown.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from infprof.probes import ProbeContext, Signal, Task, Unavailable, procfs
from infprof.probes.host_tasks import Steps
from infprof.probes.recorder import Recorder

SIGNALS: dict[str, Signal] = {
    "net_rx_bytes": Signal("bytes", "counter", "received by the interface"),
    "net_tx_bytes": Signal("bytes", "counter", "sent by the interface"),
    "net_rx_packets": Signal("count", "counter", "packets received"),
    "net_tx_packets": Signal("count", "counter", "packets sent"),
    "net_rx_errors": Signal("count", "counter", "damaged packets received"),
    "net_tx_errors": Signal("count", "counter", "packets that could not be sent for an error"),
    "net_rx_drops": Signal("count", "counter", "packets received and dropped: no buffer, no taker"),
    "net_tx_drops": Signal("count", "counter", "packets dropped before sending"),
    "tcp_out_segments": Signal("count", "counter", "TCP segments sent, retransmitted ones not counted"),
    "tcp_retransmits": Signal("count", "counter", "TCP segments sent again"),
    "tcp_timeouts": Signal("count", "counter", "retransmission timers that ran out"),
    "tcp_listen_overflows": Signal("count", "counter", "connections refused because the listen queue was full"),
    "rdma_rx_bytes": Signal("bytes", "counter", "received by the RDMA port"),
    "rdma_tx_bytes": Signal("bytes", "counter", "sent by the RDMA port"),
    "rdma_rx_packets": Signal("count", "counter", "packets received by the RDMA port"),
    "rdma_tx_packets": Signal("count", "counter", "packets sent by the RDMA port"),
    "rdma_xmit_wait": Signal(
        "ticks", "counter", "time with data to send and no credit; the tick depends on the device"
    ),
    "rdma_discards": Signal("count", "counter", "packets not sent: port down or congested"),
    "rdma_link_errors": Signal("count", "counter", "link went down, recovered, or saw damaged symbols and packets"),
    "rdma_retransmits": Signal("count", "counter", "signs of loss: out of sequence, NAK, timeouts, sent again"),
    "rdma_receiver_not_ready": Signal("count", "counter", "no receive buffer was posted: a slow receiving host"),
    "rdma_ecn_marked": Signal("count", "counter", "packets that arrived marked: the fabric is congested towards here"),
    "rdma_cnp_sent": Signal("count", "counter", "congestion notifications sent by this receiver"),
    "rdma_cnp_handled": Signal("count", "counter", "congestion notifications that slowed this sender"),
}

# Position in a line of net/dev (8 received, then 8 sent).
_DEV_COLUMNS = {
    "net_rx_bytes": 0,
    "net_rx_packets": 1,
    "net_rx_errors": 2,
    "net_rx_drops": 3,
    "net_tx_bytes": 8,
    "net_tx_packets": 9,
    "net_tx_errors": 10,
    "net_tx_drops": 11,
}

_TCP = {
    ("snmp", "Tcp"): {"RetransSegs": "tcp_retransmits", "OutSegs": "tcp_out_segments"},
    ("netstat", "TcpExt"): {"ListenOverflows": "tcp_listen_overflows", "TCPTimeouts": "tcp_timeouts"},
}

# Port data is counted in words of four bytes, whatever the width of the link.
_WORD_BYTES = 4

# signal → (names of its counters in the order of preference or to be added up, factor). Names differ between vendors.
_RDMA_FIRST: dict[str, tuple[tuple[str, ...], int]] = {
    "rdma_rx_bytes": (("port_rcv_data",), _WORD_BYTES),
    "rdma_tx_bytes": (("port_xmit_data",), _WORD_BYTES),
    "rdma_rx_packets": (("port_rcv_packets", "rx_pkts"), 1),
    "rdma_tx_packets": (("port_xmit_packets", "tx_pkts"), 1),
    "rdma_xmit_wait": (("port_xmit_wait",), 1),
    "rdma_discards": (("port_xmit_discards",), 1),
    "rdma_ecn_marked": (("np_ecn_marked_roce_packets", "rx_ecn_marked", "rx_ecn_marked_pkts"), 1),
    "rdma_cnp_sent": (("np_cnp_sent", "tx_cnp", "tx_cnp_pkts"), 1),
    "rdma_cnp_handled": (("rp_cnp_handled", "rx_cnp", "received_cnps", "rx_cnp_pkts"), 1),
}
_RDMA_SUMS: dict[str, tuple[str, ...]] = {
    "rdma_link_errors": (
        "link_downed",
        "link_error_recovery",
        "symbol_error",
        "port_rcv_errors",
        "local_link_integrity_errors",
        "excessive_buffer_overrun_errors",
    ),
    "rdma_retransmits": (
        "out_of_sequence",
        "packet_seq_err",
        "local_ack_timeout_err",
        "implied_nak_seq_err",
        "duplicate_request",
        "roce_adp_retrans",
        "req_transport_retries_exceeded",
        "retrans_pkts",  # EFA
        "to_retransmits",  # bnxt_re
        "seq_err_naks_rcvd",
        "requester_oos_nak",  # MANA
    ),
    "rdma_receiver_not_ready": ("rnr_nak_retry_err", "out_of_buffer", "rnr_naks_rcvd", "requester_rnr_nak"),
}
# EFA counts in bytes and has no port_*_data.
_RDMA_BYTES = {"rdma_rx_bytes": "rx_bytes", "rdma_tx_bytes": "tx_bytes"}


class NetworkProbe:
    """Network telemetry of one run: scopes ``interface/NAME``, ``rdma/DEVICE/PORT`` and, for TCP, the namespace."""

    name = "network"
    signals: Mapping[str, Signal] = SIGNALS

    def start(self, context: ProbeContext, out: Recorder) -> Sequence[Task]:
        """Record the links' speeds and give the tasks. Raises Unavailable where neither /proc/net nor RDMA can be read."""
        self._net = context.path(f"/proc/{context.pid}/net")
        if procfs.read_or_none(self._net / "dev") is None:
            self._net = context.path("/proc/net")
        self._classes = context.path("/sys/class/net")
        self._steps: dict[str, Steps] = {}
        self._last: dict[str, list[int]] = {}
        self._seen: set[str] = set()
        self._ports = [_Port(folder, out) for folder in _port_folders(context.root)]
        if procfs.read_or_none(self._net / "dev") is None and not self._ports:
            raise Unavailable("Neither /proc/net/dev nor RDMA ports can be read here: there is no network telemetry.")
        if not self._ports:
            out.missing("rdma_rx_bytes", "no RDMA device can be seen here")
        return [Task("interfaces", 1.0, self._interfaces), Task("ports", 1.0, self._rdma), Task("tcp", 2.0, self._tcp)]

    def stop(self, out: Recorder) -> None:
        """A last reading, and where every total stood."""
        with contextlib.suppress(OSError, ValueError):
            for read in (self._rdma, self._interfaces, self._tcp):
                read(out)
        for steps in (*self._steps.values(), *(port.steps for port in self._ports)):
            steps.close(out)

    def _rdma(self, out: Recorder) -> None:
        for port in self._ports:
            port.beat(out)

    def _file(self, out: Recorder, name: str, signal: str) -> bytes | None:
        try:
            return procfs.read(self._net / name)
        except OSError as error:
            # The target's own file goes away with the target, which is no news.
            if signal not in self._seen:
                out.missing(signal, procfs.why(error, f"/proc/net/{name}"))
            return None

    def _interfaces(self, out: Recorder) -> None:
        data, now_ns = self._file(out, "dev", "net_rx_bytes"), out.now_ns()
        if data is None:
            return
        self._seen.add("net_rx_bytes")
        for name, numbers in procfs.interfaces(data).items():
            if len(numbers) >= 16:
                self._interface(out, name, numbers, now_ns)

    def _interface(self, out: Recorder, name: str, numbers: list[int], now_ns: int) -> None:
        scope = f"interface/{name}"
        if scope not in self._steps:
            self._steps[scope] = Steps(scope)
            self._about(out, name, scope)
        if self._last.get(name) == numbers:
            self._steps[scope].unmoved_ns = now_ns
            return
        self._last[name] = numbers
        for signal, column in _DEV_COLUMNS.items():
            self._steps[scope].see(out, signal, numbers[column], now_ns)

    def _about(self, out: Recorder, name: str, scope: str) -> None:
        """The link's speed (the kernel gives Mbit/s, −1 when down or virtual) and whether hardware is behind it."""
        if name == "lo":
            return
        device = self._classes / name
        text = (procfs.read_or_none(device / "speed") or b"").strip()
        megabits = int(text) if re.fullmatch(rb"-?\d+", text) else 0
        out.fact("net_link_bytes_per_s", megabits * 125_000 if megabits > 0 else None, scope)
        out.fact("net_physical", (device / "device").exists() if device.exists() else None, scope)

    def _tcp(self, out: Recorder) -> None:
        steps = self._steps.setdefault("tcp", Steps(""))
        for (file, protocol), columns in _TCP.items():
            first = next(iter(columns.values()))
            data, now_ns = self._file(out, file, first), out.now_ns()
            if data is None:
                continue
            self._seen.add(first)
            table = procfs.named_columns(data, protocol)
            for column, signal in columns.items():
                if column in table:
                    steps.see(out, signal, table[column], now_ns)
                else:
                    out.missing(signal, f"{column} is not in this machine's /proc/net/{file}")


def _port_folders(root: Path) -> list[Path]:
    return sorted((root / "sys/class/infiniband").glob("*/ports/*"))


class _Port:
    """One port of an RDMA device: its facts, the counters that it has, and their files, kept open."""

    def __init__(self, folder: Path, out: Recorder) -> None:
        self.steps = Steps(f"rdma/{folder.parent.parent.name}/{folder.name}")
        self._folder = folder
        self._sources = self._find()
        for name in ("state", "link_layer", "rate"):
            text = (procfs.read_or_none(folder / name) or b"").decode(errors="replace").strip()
            out.fact(f"rdma_{name}", text or None, self.steps.scope)
        rate = re.match(r"([\d.]+) Gb/sec", (procfs.read_or_none(folder / "rate") or b"").decode(errors="replace"))
        out.fact("rdma_link_bytes_per_s", None if rate is None else float(rate[1]) * 125e6, self.steps.scope)
        for signal in SIGNALS:
            if signal.startswith("rdma_") and signal not in self._sources:
                out.missing(signal, "this RDMA device has no counter for it", self.steps.scope)

    def beat(self, out: Recorder) -> None:
        """Read and record all counters of the port."""
        now_ns = out.now_ns()
        for signal, (paths, factor) in self._sources.items():
            try:
                value = sum(int(procfs.read(path)) for path in paths)
            except (OSError, ValueError) as error:
                reason = procfs.why(error, "its counter") if isinstance(error, OSError) else "its counter is no number"
                out.missing(signal, reason, self.steps.scope)
                continue
            self.steps.see(out, signal, value * factor, now_ns)

    def _find(self) -> dict[str, tuple[list[str], int]]:
        there = {
            name: f"{self._folder}/{part}/{name}" for part in ("hw_counters", "counters") for name in self._list(part)
        }
        found: dict[str, tuple[list[str], int]] = {}
        for signal, (names, factor) in _RDMA_FIRST.items():
            if name := next((name for name in names if name in there), None):
                found[signal] = ([there[name]], factor)
        for signal, names in _RDMA_SUMS.items():
            if paths := [there[name] for name in names if name in there]:
                found[signal] = (paths, 1)
        for signal, name in _RDMA_BYTES.items():
            if signal not in found and name in there:
                found[signal] = ([there[name]], 1)
        return found

    def _list(self, part: str) -> list[str]:
        try:
            return os.listdir(self._folder / part)
        except OSError:
            return []
