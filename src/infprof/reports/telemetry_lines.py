"""The main figures of the probes, as short lines by area: the same words in every report."""

from __future__ import annotations

from collections.abc import Callable

from infprof.reports import format as fmt
from infprof.results import Diagnosis

# (label, measures): shown where the first is known; the label's {} are their values in order.
_Line = tuple[str, tuple[str, ...]]

_AREAS: dict[str, tuple[_Line, ...]] = {
    "serving": (
        ("running requests {}, at most {}", ("running_requests_mean", "running_requests_max")),
        ("waiting {}, at most {}", ("waiting_requests_mean", "waiting_requests_max")),
        ("output tokens {}, prompt tokens {}", ("output_tokens_per_s", "prompt_tokens_per_s")),
        ("time to first token p50 {}, p95 {}", ("ttft_p50_ns", "ttft_p95_ns")),
        ("per output token mean {}", ("tpot_mean_ns",)),
        ("between tokens mean {}", ("itl_mean_ns",)),
        ("in the queue mean {}", ("queue_time_mean_ns",)),
        ("KV cache {}, at most {}", ("kv_cache_usage_mean_ratio", "kv_cache_usage_max_ratio")),
        ("prefix cache hits {}", ("prefix_cache_hit_ratio",)),
        ("preemptions {}", ("preemption_count",)),
        ("finished {}, failed {}", ("finished_request_count", "failed_request_count")),
    ),
    "load": (
        ("time to first token p50 {}, p95 {}", ("client_ttft_p50_ns", "client_ttft_p95_ns")),
        ("per output token p50 {}", ("client_tpot_p50_ns",)),
        ("whole request p50 {}, p95 {}", ("client_e2e_latency_p50_ns", "client_e2e_latency_p95_ns")),
        ("failed {}", ("client_error_ratio",)),
    ),
    "GPU": (
        ("kernel resident {}", ("gpu_utilization_mean_ratio",)),
        ("tensor pipe {}, DRAM {} (GPM)", ("gpm_tensor_active_ratio", "gpm_dram_ratio")),
        ("memory {} of {}", ("gpu_memory_used_peak_bytes", "gpu_memory_total_bytes")),
        ("SM clock {} of {} under load", ("sm_clock_load_mhz", "sm_clock_max_mhz")),
        ("power {} of {}", ("gpu_power_mean_watts", "gpu_power_limit_watts")),
        ("at most {}", ("gpu_temperature_peak_celsius",)),
        ("PCIe to GPU {}, from GPU {}", ("pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s")),
    ),
    "host": (
        ("program on {} of {} CPUs", ("target_cpus_used_count", "cpu_online_count")),
        ("busiest thread {}", ("busiest_thread_cpu_ratio",)),
        ("it waits for a CPU {}", ("busiest_thread_wait_ratio",)),
        ("preempted {}", ("target_involuntary_per_s",)),
        ("throttled by its cgroup {}", ("cgroup_throttled_ratio",)),
    ),
    "network": (
        ("in {}, out {}", ("network_rx_bytes_per_s", "network_tx_bytes_per_s")),
        ("loopback {}", ("loopback_bytes_per_s",)),
        ("TCP sent again {}", ("tcp_retransmit_ratio",)),
    ),
}


def telemetry_lines(diagnosis: Diagnosis) -> dict[str, list[str]]:
    """Area → its figures; only areas of which something is known. Empty without telemetry."""
    if not diagnosis.has_telemetry:
        return {}
    # Of several devices the first stands for host, network and engine, which are the same for all.
    known = {m.name: fmt.value_with_unit(m.value, m.unit) for m in reversed(diagnosis.measures) if m.value is not None}
    out: dict[str, list[str]] = {}
    for area, lines in _AREAS.items():
        texts = [_filled(text, names, known.get) for text, names in lines if names[0] in known]
        if texts:
            out[area] = texts
    return out


def _filled(text: str, names: tuple[str, ...], value: Callable[[str], str | None]) -> str:
    return text.format(*(value(name) or fmt.NOT_KNOWN for name in names))
