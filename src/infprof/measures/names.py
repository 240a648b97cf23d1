"""Every measure that infprof computes: its name, unit, and formula in words.

Rules may only use names that stand here, so a misspelt one is caught when a rule is loaded. Names follow the habit
quantity, statistic, unit: ``_ns``, ``_bytes``, ``_bytes_per_s``, ``_ratio`` (0–1), ``_count``, ``_per_s``.
Shares called "of D" are shares of the window without no-demand, profiler and unexplained time (see docs/verdicts.md).
"""

from __future__ import annotations

from typing import NamedTuple

from infprof.results import COPY_CAUSES, IDLE_CAUSES


class MeasureInfo(NamedTuple):
    unit: str
    meaning: str


MEASURES: dict[str, MeasureInfo] = {
    # Time accounting (measures/slices.py)
    "window_ns": MeasureInfo("ns", "length of the analysed window"),
    "demand_ns": MeasureInfo("ns", "D: window less no-demand, profiler and large unexplained time"),
    "compute_ns": MeasureInfo("ns", "at least one non-communication kernel (or graph) runs"),
    "compute_ratio": MeasureInfo("ratio", "compute_ns over D"),
    "exposed_comm_ns": MeasureInfo("ns", "a communication kernel runs and no compute kernel does"),
    "exposed_comm_ratio": MeasureInfo("ratio", "exposed_comm_ns over D"),
    "exposed_copy_ns": MeasureInfo("ns", "a copy or memset runs and no kernel does"),
    "exposed_host_copy_ns": MeasureInfo("ns", "exposed copies between host and device: h2d, d2h and UVM"),
    "exposed_host_copy_ratio": MeasureInfo("ratio", "exposed_host_copy_ns over D"),
    "busy_ns": MeasureInfo("ns", "window less idle: the union of everything that ran"),
    "busy_ratio": MeasureInfo("ratio", "busy_ns over the window"),
    "idle_ns": MeasureInfo("ns", "nothing runs"),
    "idle_ratio": MeasureInfo("ratio", "idle_ns over the window"),
    "recoverable_idle_ns": MeasureInfo(
        "ns", "idle without kernel-gap, no-demand, profiler and excluded unexplained time"
    ),
    "recoverable_idle_ratio": MeasureInfo("ratio", "recoverable_idle_ns over D"),
    "no_demand_ratio": MeasureInfo("ratio", "idle_no_demand_ns over the window"),
    "profiler_ratio": MeasureInfo("ratio", "idle_profiler_ns over the window"),
    "unexplained_ratio": MeasureInfo("ratio", "unexplained device dependency plus unknown, over the window"),
    # Loop shape (measures/idle.py)
    "idle_gap_count": MeasureInfo("count", "idle gaps"),
    "sync_gap_count": MeasureInfo(
        "count", "idle gaps that begin while the launching thread is held in a synchronising call"
    ),
    "host_time_ns": MeasureInfo("ns", "window less blocking calls and no-demand, of the thread that launches most"),
    "host_to_gpu_ratio": MeasureInfo(
        "ratio", "host_time_ns over busy_ns: at least 1 means the host part is the longer one"
    ),
    "idle_host_loop_ns": MeasureInfo(
        "ns", "idle that belongs to the host part of the loop: host-work, plus sync where the host part is longer"
    ),
    "idle_host_loop_ratio": MeasureInfo("ratio", "idle_host_loop_ns over D"),
    "idle_sync_loss_ns": MeasureInfo(
        "ns", "idle after a sync that running ahead would hide: sync where the GPU part is longer, else 0"
    ),
    "idle_sync_loss_ratio": MeasureInfo("ratio", "idle_sync_loss_ns over D"),
    # Launches (measures/launches.py)
    "launch_count": MeasureInfo("count", "launch calls that started at least one kernel or graph in the window"),
    "graph_launch_count": MeasureInfo("count", "of those, CUDA-graph launches"),
    "graph_kernel_ratio": MeasureInfo("ratio", "share of kernel time that ran inside CUDA graphs"),
    "launch_call_p50_ns": MeasureInfo("ns", "median length of a launch call"),
    "launch_call_total_ns": MeasureInfo("ns", "summed length of launch calls"),
    "queue_delay_p50_ns": MeasureInfo(
        "ns", "median of kernel start less end of its launch call, first kernel of each launch, negatives as 0"
    ),
    "queue_delay_p95_ns": MeasureInfo("ns", "95th percentile of the same"),
    "negative_delay_count": MeasureInfo(
        "count", "launches whose kernel starts before the launch call began: clock skew"
    ),
    "clock_skew_ns": MeasureInfo("ns", "95th percentile of how far before the call began those kernels start"),
    "unlaunched_kernel_ratio": MeasureInfo("ratio", "share of kernels without a launch record"),
    "kernels_per_launch": MeasureInfo("count", "kernels over launches"),
    # Kernels (measures/kernels.py)
    "kernel_count": MeasureInfo("count", "kernels in the window"),
    "kernel_total_ns": MeasureInfo("ns", "summed kernel durations (concurrent kernels count each)"),
    "kernel_mean_ns": MeasureInfo("ns", "mean kernel duration"),
    "kernel_p50_ns": MeasureInfo("ns", "median kernel duration"),
    "kernel_concurrency": MeasureInfo("ratio", "kernel_total_ns over the union of kernel intervals"),
    "small_kernel_count": MeasureInfo("count", "kernels under 5 µs"),
    "small_kernel_ratio": MeasureInfo("ratio", "share of kernels under 5 µs, by count"),
    "small_kernel_time_ratio": MeasureInfo("ratio", "share of summed kernel time in kernels under 5 µs"),
    "small_kernel_per_s": MeasureInfo("per_s", "kernels under 5 µs per second of window"),
    "top_kernel_ratio": MeasureInfo("ratio", "largest kernel name's share of summed kernel time"),
    "gemm_ns": MeasureInfo("ns", "summed time of GEMM kernels by name"),
    "attention_ns": MeasureInfo("ns", "summed time of attention kernels by name"),
    "fp32_gemm_ns": MeasureInfo("ns", "compute time of GEMM kernels whose name says FP32 without tensor cores"),
    "fp32_gemm_ratio": MeasureInfo("ratio", "fp32_gemm_ns over compute_ns"),
    "few_sm_kernel_ns": MeasureInfo("ns", "compute time of kernels whose grid has fewer blocks than half of the SMs"),
    "few_sm_kernel_ratio": MeasureInfo("ratio", "few_sm_kernel_ns over compute_ns"),
    "few_sm_active_ratio": MeasureInfo("ratio", "SMs with at least one warp resident while such kernels run"),
    "single_block_kernel_ns": MeasureInfo("ns", "compute time of kernels with a grid of one block"),
    "kernel_class_unknown_ratio": MeasureInfo(
        "ratio", "share of summed kernel time whose class the name does not tell"
    ),
    "sm_count": MeasureInfo("count", "multiprocessors of the device"),
    # Copies (measures/copies.py)
    "h2d_count": MeasureInfo("count", "host-to-device copies"),
    "h2d_bytes": MeasureInfo("bytes", "bytes of host-to-device copies"),
    "h2d_bytes_per_s": MeasureInfo("bytes_per_s", "their bytes over their summed time"),
    "d2h_count": MeasureInfo("count", "device-to-host copies"),
    "d2h_bytes": MeasureInfo("bytes", "bytes of device-to-host copies"),
    "d2h_bytes_per_s": MeasureInfo("bytes_per_s", "their bytes over their summed time"),
    "d2d_bytes": MeasureInfo("bytes", "bytes of copies within the device"),
    "pageable_bytes": MeasureInfo("bytes", "bytes of host copies from or to pageable memory"),
    "pageable_count": MeasureInfo("count", "host copies from or to pageable memory"),
    "pageable_ratio": MeasureInfo("ratio", "pageable_bytes over the bytes of all host copies"),
    "exposed_pageable_copy_ns": MeasureInfo("ns", "exposed time of pageable host copies"),
    "exposed_pageable_copy_ratio": MeasureInfo("ratio", "exposed_pageable_copy_ns over D"),
    "exposed_other_copy_ns": MeasureInfo("ns", "exposed time of host copies that are not known to be pageable"),
    "exposed_other_copy_ratio": MeasureInfo("ratio", "exposed_other_copy_ns over D"),
    "host_copy_p50_bytes": MeasureInfo("bytes", "median size of a host copy"),
    "host_copy_exposed_p50_bytes": MeasureInfo(
        "bytes", "median size of an exposed host copy, weighted by exposed time"
    ),
    "small_copy_count": MeasureInfo("count", "host copies under 64 KiB"),
    "small_copy_exposed_ns": MeasureInfo("ns", "exposed time of host copies under 64 KiB"),
    "tiny_d2h_count": MeasureInfo("count", "device-to-host copies of at most 64 bytes: what .item() leaves"),
    "round_trip_count": MeasureInfo(
        "count",
        "device-to-host copies whose size comes back as the next host-to-device copy of the process within the window",
    ),
    "round_trip_exposed_ns": MeasureInfo("ns", "exposed time of those pairs"),
    "round_trip_exposed_ratio": MeasureInfo("ratio", "round_trip_exposed_ns over D"),
    "exposed_d2d_ratio": MeasureInfo("ratio", "exposed d2d copies over D"),
    "blocked_async_copy_count": MeasureInfo(
        "count", "asynchronous copy calls of pinned memory that lasted over 10 times their copy and over 100 µs"
    ),
    "blocked_async_copy_ns": MeasureInfo("ns", "summed length of those calls"),
    "link_peak_bytes_per_s": MeasureInfo(
        "bytes_per_s", "the device's PCIe peak per direction, from the hardware table"
    ),
    # Communication (measures/comm.py)
    "comm_count": MeasureInfo("count", "communication kernels"),
    "comm_total_ns": MeasureInfo("ns", "union of communication kernels"),
    "comm_hidden_ratio": MeasureInfo("ratio", "share of comm_total_ns that compute covers"),
    "comm_bytes": MeasureInfo("bytes", "message bytes of NCCL ranges that carry them"),
    "comm_bytes_per_s": MeasureInfo("bytes_per_s", "message bytes over the time of the kernels they launched"),
    "nvlink_peak_bytes_per_s": MeasureInfo(
        "bytes_per_s", "the device's NVLink peak per direction, from the hardware table"
    ),
    "comm_spread_ns": MeasureInfo("ns", "summed wait for the last device to arrive at each matched collective"),
    "comm_spread_ratio": MeasureInfo("ratio", "comm_spread_ns over comm_total_ns"),
    # Host calls (measures/calls.py)
    "sync_call_count": MeasureInfo("count", "synchronising CUDA calls"),
    "sync_call_ns": MeasureInfo("ns", "time inside them (waiting for the GPU is not a loss by itself)"),
    "sync_call_per_s": MeasureInfo("per_s", "synchronising calls per second of window"),
    "allocator_call_count": MeasureInfo("count", "cudaMalloc, cudaFree, cuMem*, cudaHostAlloc and the like"),
    "allocator_call_ns": MeasureInfo("ns", "time inside them"),
    "allocator_failed_count": MeasureInfo("count", "allocation calls that returned an error"),
    "allocator_retry_count": MeasureInfo(
        "count", "failed allocations that were followed by frees and a successful allocation on the same thread"
    ),
    "pinned_alloc_count": MeasureInfo(
        "count", "cudaHostAlloc, cudaMallocHost, cudaHostRegister and their driver forms"
    ),
    "module_load_count": MeasureInfo("count", "module, library and link calls"),
    "module_load_call_ns": MeasureInfo("ns", "time inside them"),
    "new_kernel_stall_count": MeasureInfo(
        "count", "idle gaps that loading or compiling made before the first launch of a kernel"
    ),
    "device_memory_peak_bytes": MeasureInfo(
        "bytes", "largest sum of live device allocations seen in the memory-usage events"
    ),
    # Profiler (measures/idle.py)
    "profiler_overhead_count": MeasureInfo("count", "profiler overhead intervals in the window"),
    "profiler_overhead_ns": MeasureInfo("ns", "their union"),
    # Hardware counters (measures/counters.py), rank A, averaged over samples that lie in compute slices
    "counter_sample_count": MeasureInfo("count", "counter samples used"),
    "sm_active_ratio": MeasureInfo("ratio", "SMs with at least one warp resident: never the compute limiter"),
    "sm_issue_ratio": MeasureInfo("ratio", "issue slots used"),
    "tensor_active_ratio": MeasureInfo("ratio", "tensor pipe active"),
    "sm_throughput_ratio": MeasureInfo("ratio", "C: the larger of SM issue and tensor pipe"),
    "dram_read_ratio": MeasureInfo("ratio", "DRAM read bandwidth of peak"),
    "dram_write_ratio": MeasureInfo("ratio", "DRAM write bandwidth of peak"),
    "dram_ratio": MeasureInfo("ratio", "M: DRAM read plus write, of peak"),
    "pcie_rx_ratio": MeasureInfo("ratio", "PCIe receive throughput of peak, over the whole window"),
    "pcie_tx_ratio": MeasureInfo("ratio", "PCIe transmit throughput of peak, over the whole window"),
    "pcie_ratio": MeasureInfo("ratio", "P: the larger of PCIe receive and transmit"),
    "nvlink_rx_ratio": MeasureInfo("ratio", "NVLink receive, of peak"),
    "nvlink_tx_ratio": MeasureInfo("ratio", "NVLink transmit, of peak"),
    "nvlink_ratio": MeasureInfo("ratio", "N: the larger of NVLink receive and transmit"),
    "gr_active_ratio": MeasureInfo("ratio", "graphics/compute engine active, over the whole window"),
}

for _cause in IDLE_CAUSES:
    _name = _cause.replace("-", "_")
    MEASURES[f"idle_{_name}_ns"] = MeasureInfo("ns", f"idle time with cause {_cause}")
    MEASURES[f"idle_{_name}_ratio"] = MeasureInfo("ratio", f"idle_{_name}_ns over D")
for _cause in COPY_CAUSES:
    MEASURES[f"exposed_copy_{_cause}_ns"] = MeasureInfo("ns", f"exposed copy time of kind {_cause}")
