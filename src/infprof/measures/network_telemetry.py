"""How full the links were, and what was lost: interfaces of the target's network namespace, TCP, and RDMA ports.

A link counts by its fuller direction, and of several the fullest counts: traffic over a bond, a bridge and a container's
own interface is the same traffic, so nothing is added up. Loopback is kept apart.
"""

from __future__ import annotations

import numpy as np

from infprof.measures.names import NETWORK_MEASURES
from infprof.measures.telemetry import TelemetryScope
from infprof.measures.totals import Adder, Observed, at, observe, ratio
from infprof.results import Measures
from infprof.telemetry import Series, Telemetry
from infprof.trace import FloatArray

_SECOND_NS = 1_000_000_000
_LOOPBACK = "interface/lo"

_NO_SPEED = "no link whose speed is known here"
_P95 = ("network_link_p95_ratio", "rdma_link_p95_ratio")
_NO_PACKETS = "no packets in the window"


def add_network_telemetry(measures: Measures, telemetry: Telemetry, scope: TelemetryScope) -> None:
    """Add the measures of ``NETWORK_MEASURES``. Sources: proc(5), sysfs; utilisation = bytes over time over link speed."""
    adder = Adder(measures, telemetry, "network", {name: info.unit for name, info in NETWORK_MEASURES.items()})
    seen = observe(telemetry, scope, "network")
    if seen is not None:
        _add_interfaces(adder, seen)
        _add_tcp(adder, seen)
        _add_rdma(adder, seen)
        known = [p95 for name in _P95 if (p95 := measures.value(name)) is not None]
        adder.add("fullest_link_p95_ratio", max(known, default=None), "net_rx_bytes", _NO_SPEED)
    adder.add_missing()


def _add_interfaces(adder: Adder, seen: Observed) -> None:
    for way in ("rx", "tx"):
        signal = f"net_{way}_bytes"
        grown = seen.by_scope(signal, "interface")
        others = [size for scope, size in grown.items() if scope != _LOOPBACK]
        adder.add(f"network_{way}_bytes_per_s", _rate(seen, max(others, default=None)), signal)
        used = _utilisation(seen, signal, "net_link_bytes_per_s")
        adder.add(f"network_{way}_max_ratio", max((u.mean for u in used), default=None), signal, _NO_SPEED)
    looped = seen.total("net_tx_bytes", _LOOPBACK)
    adder.add("loopback_bytes_per_s", _rate(seen, looped), "net_tx_bytes", "no loopback interface was seen")
    links = [u.p95 for way in ("rx", "tx") for u in _utilisation(seen, f"net_{way}_bytes", "net_link_bytes_per_s")]
    adder.add("network_link_p95_ratio", max(links, default=None), "net_rx_bytes", _NO_SPEED)
    for name, kind in (("drop", "drops"), ("error", "errors")):
        adder.add(f"network_{name}_count", _outside(seen, kind), "net_rx_bytes")
        adder.add(f"network_{name}_max_ratio", _worst_share(seen, kind), "net_rx_bytes", _NO_PACKETS)


def _rate(seen: Observed, size: float | None) -> float | None:
    return None if size is None else size * _SECOND_NS / seen.span_ns


def _outside(seen: Observed, kind: str) -> float | None:
    """What all interfaces but loopback counted, both ways."""
    found = [
        size
        for way in ("rx", "tx")
        for scope, size in seen.by_scope(f"net_{way}_{kind}", "interface").items()
        if scope != _LOOPBACK
    ]
    return sum(found) if found else None


def _worst_share(seen: Observed, kind: str) -> float | None:
    """The largest share of packets, over interfaces and directions; a dropped packet is not among those counted."""
    shares = []
    for way in ("rx", "tx"):
        packets = seen.by_scope(f"net_{way}_packets", "interface")
        for scope, lost in seen.by_scope(f"net_{way}_{kind}", "interface").items():
            if scope != _LOOPBACK and packets.get(scope, 0) + lost > 0:
                shares.append(lost / (packets[scope] + lost))
    return max(shares, default=None)


class _Use:
    """How full one link was in one direction: on average, and the 95th percentile over its one-second steps."""

    def __init__(self, seen: Observed, series: Series, bytes_per_s: float) -> None:
        self.mean = seen.grown(series) / seen.span_ns * _SECOND_NS / bytes_per_s
        steps = _second_steps(seen, series) / bytes_per_s
        self.p95 = float(np.percentile(steps, 95)) if len(steps) else self.mean


def _second_steps(seen: Observed, series: Series) -> FloatArray:
    """Bytes in each whole second of the window."""
    edges = np.arange(seen.low_ns, seen.high_ns + 1, _SECOND_NS)
    return np.diff(at(series, edges))


def _utilisation(seen: Observed, signal: str, speed: str) -> list[_Use]:
    speeds = seen.telemetry.facts(speed)
    return [_Use(seen, s, speeds[s.scope]) for s in seen.all(signal) if speeds.get(s.scope) and len(s.time)]


def _add_tcp(adder: Adder, seen: Observed) -> None:
    sent, again = seen.total("tcp_out_segments"), seen.total("tcp_retransmits")
    idle = "no TCP segments were sent in the window" if sent == 0 else None
    adder.add("tcp_retransmit_ratio", ratio(again, sent), "tcp_retransmits", idle)
    adder.add("tcp_retransmit_count", again, "tcp_retransmits")
    adder.add("tcp_listen_overflow_count", seen.total("tcp_listen_overflows"), "tcp_listen_overflows")


def _add_rdma(adder: Adder, seen: Observed) -> None:
    uses = {way: _utilisation(seen, f"rdma_{way}_bytes", "rdma_link_bytes_per_s") for way in ("rx", "tx")}
    for way, used in uses.items():
        adder.add(f"rdma_{way}_max_ratio", max((u.mean for u in used), default=None), "rdma_rx_bytes", _no_rate(seen))
    both = [u.p95 for used in uses.values() for u in used]
    adder.add("rdma_link_p95_ratio", max(both, default=None), "rdma_rx_bytes", _no_rate(seen))
    sizes = [size for way in uses for size in seen.by_scope(f"rdma_{way}_bytes", "rdma").values()]
    adder.add("rdma_max_bytes_per_s", _rate(seen, max(sizes, default=None)), "rdma_rx_bytes")
    for name, signals in _RDMA_SHARES.items():
        share = _per_packet(seen, signals)
        adder.add(name, share, "rdma_rx_bytes", _NO_PACKETS if seen.all("rdma_rx_packets") else None)
    for name, signal in _RDMA_COUNTS.items():
        why = "the RDMA devices have no counter for it" if seen.all("rdma_rx_bytes") else None
        adder.add(name, seen.total(signal), "rdma_rx_bytes", why if seen.total(signal) is None else None)
    rates = [rate for rate in seen.telemetry.facts("rdma_link_bytes_per_s").values() if rate]
    slow = sum(rate < max(rates) for rate in rates) if rates else None
    adder.add("rdma_slow_port_count", slow, "rdma_rx_bytes", _no_rate(seen))


_RDMA_SHARES = {
    "rdma_congestion_max_ratio": ("rdma_cnp_sent", "rdma_cnp_handled"),
    "rdma_retransmit_max_ratio": ("rdma_retransmits", "rdma_receiver_not_ready"),
}
_RDMA_COUNTS = {
    "rdma_retransmit_count": "rdma_retransmits",
    "rdma_receiver_not_ready_count": "rdma_receiver_not_ready",
    "rdma_ecn_marked_count": "rdma_ecn_marked",
    "rdma_discard_count": "rdma_discards",
    "rdma_link_error_count": "rdma_link_errors",
    "rdma_transmit_wait_count": "rdma_xmit_wait",
}


def _no_rate(seen: Observed) -> str | None:
    return _NO_SPEED if seen.all("rdma_rx_bytes") else None


def _per_packet(seen: Observed, signals: tuple[str, ...]) -> float | None:
    """The larger of the counters over the packets of their port, of the worst port."""
    shares = []
    for scope, received in seen.by_scope("rdma_rx_packets", "rdma").items():
        packets = received + (seen.total("rdma_tx_packets", scope) or 0.0)
        counts = [count for signal in signals if (count := seen.total(signal, scope)) is not None]
        if packets > 0 and counts:
            shares.append(max(counts) / packets)
    return max(shares, default=None)
