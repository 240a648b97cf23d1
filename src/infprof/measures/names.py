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
    "waiting_work_ns": MeasureInfo(
        "ns", "idle_dependency_ns, without what nothing explains where that is large enough to be taken out of D"
    ),
    "waiting_work_ratio": MeasureInfo("ratio", "waiting_work_ns over D"),
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
        "ns",
        "idle that belongs to the host part of the loop: host-work, plus sync (without blocked_copy_idle_ns) where the "
        "host part is longer",
    ),
    "idle_host_loop_ratio": MeasureInfo("ratio", "idle_host_loop_ns over D"),
    "idle_peer_work_ns": MeasureInfo(
        "ns", "part of host-work in which the launching thread waited for another thread or process that was working"
    ),
    "unproven_host_work_ns": MeasureInfo(
        "ns",
        "host-work and time after a sync in idle gaps of 10 ms and longer where system calls were not recorded: it may be waiting",
    ),
    "host_gap_short_ratio": MeasureInfo("ratio", "share of idle_host_loop_ns in gaps under 1 ms"),
    "launches_per_host_gap": MeasureInfo(
        "count", "launch calls with work on the GPU, for each gap in which the host worked: 1 or 2 in eager code"
    ),
    "unproven_host_work_ratio": MeasureInfo("ratio", "unproven_host_work_ns over idle_host_loop_ns"),
    "idle_sync_loss_ns": MeasureInfo(
        "ns",
        "idle after a sync that running ahead would hide: sync where the GPU part is longer, else blocked_copy_idle_ns",
    ),
    "idle_sync_loss_ratio": MeasureInfo("ratio", "idle_sync_loss_ns over D"),
    # What the host's part consists of (measures/host_parts.py)
    "idle_before_sampling_ns": MeasureInfo(
        "ns", "host-work and sync in idle gaps behind which the next kernel samples, by its name"
    ),
    "idle_before_sampling_ratio": MeasureInfo("ratio", "idle_before_sampling_ns over D"),
    "idle_sampling_loss_ns": MeasureInfo(
        "ns", "part of idle_before_sampling_ns that idle_sync_loss_ns holds, where it is a fifth of D and most of both"
    ),
    "idle_before_new_kernel_ns": MeasureInfo(
        "ns", "host-work and sync in idle gaps of 10 ms and longer that end with the first launch of a kernel"
    ),
    "host_pause_count": MeasureInfo(
        "count",
        "idle gaps with 50 ms of host work or more, ten times the usual part: two or more, few of all, and with at least "
        "three steps from one to the next",
    ),
    "host_pause_ns": MeasureInfo("ns", "host work in those gaps"),
    "host_pause_loop_ns": MeasureInfo("ns", "part of it that idle_host_loop_ns holds"),
    "host_pause_loss_ns": MeasureInfo("ns", "part of it that idle_sync_loss_ns holds"),
    "host_pause_period_ns": MeasureInfo("ns", "median time from one such gap to the next"),
    "host_pause_new_kernel_count": MeasureInfo("count", "those gaps that end with the first launch of a kernel"),
    "host_pause_gc_ns": MeasureInfo("ns", "part of those gaps in ranges that name garbage collection"),
    "peer_pause_count": MeasureInfo("count", "host_pause_count of the other GPU with the longest such gaps"),
    "peer_pause_ns": MeasureInfo("ns", "host_pause_ns of that GPU"),
    "peer_pause_period_ns": MeasureInfo("ns", "host_pause_period_ns of that GPU"),
    "peer_pause_gc_ns": MeasureInfo("ns", "host_pause_gc_ns of that GPU"),
    "lock_peer_working_ratio": MeasureInfo(
        "ratio", "share of the waiting for locks in which one other thread of the process was known to work"
    ),
    # Parts of the model on the host (steps/model_on_host.py)
    "model_on_host_count": MeasureInfo(
        "count",
        "times that a step copies data to the host, the device idles while the host works, and as many bytes come back, "
        "with kernels of the model before and after it",
    ),
    "model_on_host_step_ratio": MeasureInfo("ratio", "share of the steps with at least one of them"),
    "model_on_host_bytes": MeasureInfo("bytes", "median size of such a copy"),
    "model_on_host_idle_ns": MeasureInfo("ns", "idle between those copies while the host works"),
    "model_on_host_idle_ratio": MeasureInfo("ratio", "model_on_host_idle_ns over D"),
    "model_on_host_loop_ns": MeasureInfo("ns", "part of it that idle_host_loop_ns holds"),
    "model_on_host_loss_ns": MeasureInfo("ns", "part of it that idle_sync_loss_ns holds"),
    # Kernels after the device has rested (measures/after_pauses.py)
    "rest_count": MeasureInfo("count", "pauses of a second and longer in which nothing ran on the device"),
    "after_rest_slowdown_ratio": MeasureInfo(
        "ratio",
        "kernel time in the first half second after such a pause over what kernels of the same name and grid take "
        "elsewhere",
    ),
    "after_rest_lost_ns": MeasureInfo("ns", "that time less what it takes elsewhere"),
    # Engine before and during the capture (measures/recording_cost.py)
    "capture_slowdown_ratio": MeasureInfo(
        "ratio", "the engine's time per token in the capture over that before it (or after it), at the same load"
    ),
    # Timeline and serving engine together (measures/demand.py)
    "idle_while_waiting_ns": MeasureInfo("ns", "the GPU is idle while requests wait in the engine's queue"),
    "idle_while_waiting_ratio": MeasureInfo("ratio", "idle_while_waiting_ns over the time in which requests wait"),
    "ramp_ns": MeasureInfo("ns", "waves of requests begin or run out: few requests run and none waits"),
    "ramp_idle_ns": MeasureInfo("ns", "the GPU is idle then"),
    "steady_idle_ratio": MeasureInfo(
        "ratio", "idle time over time, without beginnings and ends of waves and without pauses between them"
    ),
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
    "kernel_concurrency": MeasureInfo("count", "kernel_total_ns over the union of kernel intervals"),
    "small_kernel_count": MeasureInfo("count", "kernels under 5 µs"),
    "small_kernel_ratio": MeasureInfo("ratio", "share of kernels under 5 µs, by count"),
    "small_kernel_time_ratio": MeasureInfo("ratio", "share of summed kernel time in kernels under 5 µs"),
    "small_kernel_per_s": MeasureInfo("per_s", "kernels under 5 µs per second of window"),
    "top_kernel_ratio": MeasureInfo("ratio", "largest kernel name's share of summed kernel time"),
    "gemm_ns": MeasureInfo("ns", "summed time of GEMM kernels by name"),
    "attention_ns": MeasureInfo("ns", "summed time of attention kernels by name"),
    "attention_ratio": MeasureInfo("ratio", "attention_ns over kernel_total_ns"),
    # Attention made of separate kernels (measures/attention.py)
    "unfused_attention_count": MeasureInfo(
        "count", "times that a product, a softmax and a product follow each other on a stream"
    ),
    "unfused_attention_ns": MeasureInfo("ns", "summed time of those products, softmaxes and what lies between"),
    "unfused_attention_ratio": MeasureInfo("ratio", "unfused_attention_ns over kernel time without communication"),
    "unfused_scores_ns": MeasureInfo("ns", "what of it lies between the products: passes that a fused kernel has not"),
    "unfused_score_bytes": MeasureInfo(
        "bytes", "size of the matrix of scores that such a softmax reads and writes, median"
    ),
    "unfused_score_bound_bytes": MeasureInfo(
        "bytes", "what that size is at most: half of what memory can move in the time of such a softmax, median"
    ),
    # Attention per step (steps/attention.py): first and last are medians over the quarter of the decode steps with the
    # least and the most context, or the earliest and the latest where no range names the context
    "attention_phase_ratio": MeasureInfo(
        "ratio", "attention's share of kernel time where it is largest: in prefill steps, or in the last decode steps"
    ),
    "attention_step_first_ns": MeasureInfo("ns", "attention time of a step, first"),
    "attention_step_last_ns": MeasureInfo("ns", "attention time of a step, last"),
    "attention_step_growth_ratio": MeasureInfo(
        "ratio", "share of the last that came on top of the first: 0.5 is twice as much, 0 no growth"
    ),
    "attention_step_fit_ratio": MeasureInfo(
        "ratio", "share of its variance that a line over context (or the step's number) explains (R²)"
    ),
    "attention_step_share_last_ratio": MeasureInfo("ratio", "attention's share of a step's kernel time, last"),
    "attention_context_tokens": MeasureInfo("count", "tokens in context of the step with the most, as its range says"),
    "attention_context_token_ns": MeasureInfo("ns", "attention time that a token of context adds to a step"),
    "attention_share_further_ratio": MeasureInfo(
        "ratio", "attention's share at four times that context if the line goes on: an extrapolation"
    ),
    "fp32_gemm_ns": MeasureInfo(
        "ns", "compute time of matrix products, also with a vector, whose names say FP32 without tensor cores"
    ),
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
    "host_copy_ns": MeasureInfo("ns", "time in which a host-to-device or device-to-host copy runs"),
    "host_copy_overlap_gain_ns": MeasureInfo(
        "ns",
        "time in which a kernel or a host copy runs, less the longest of kernels, copies up and copies down: what overlap of "
        "all of them could win",
    ),
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
    "blocked_copy_idle_ns": MeasureInfo(
        "ns", "idle in and after such calls, in each gap at most as long as they lasted: the host could have gone on"
    ),
    "blocked_copy_idle_ratio": MeasureInfo("ratio", "blocked_copy_idle_ns over D"),
    "link_peak_bytes_per_s": MeasureInfo(
        "bytes_per_s", "the device's PCIe peak per direction, from the hardware table"
    ),
    # Communication (measures/comm.py)
    "comm_count": MeasureInfo("count", "communication kernels"),
    "comm_p50_ns": MeasureInfo("ns", "median length of a communication kernel, waiting for others included"),
    "comm_total_ns": MeasureInfo("ns", "union of communication kernels"),
    "comm_hidden_ratio": MeasureInfo("ratio", "share of comm_total_ns that compute covers"),
    "comm_outlier_count": MeasureInfo(
        "count",
        "single collectives of 20 ms and more, ten times as long as the same kernel usually is: they wait for another rank",
    ),
    "comm_outlier_ns": MeasureInfo("ns", "their time beyond the usual length"),
    "comm_bytes": MeasureInfo("bytes", "message bytes of NCCL ranges, or of collectives whose kernels state them"),
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
        "count",
        "failed allocations that were followed by frees and a successful allocation on the same thread; where return values were "
        "not recorded, allocations followed by nothing but waits and several frees up to the next one",
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
    "sm_throughput_ratio": MeasureInfo("ratio", "C: the larger of SM issue and tensor pipe, sample by sample"),
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
    # Operators of kernels in replayed graphs (measures/capture): shares of the time (or number) of those kernels
    "capture_matched_ratio": MeasureInfo("ratio", "share of the time of kernels in replayed graphs with an operator"),
    "capture_matched_count_ratio": MeasureInfo("ratio", "the same share by number of kernels"),
    "capture_by_position_ratio": MeasureInfo(
        "ratio", "share of their time with an operator by position only: another kernel for the same product"
    ),
    "capture_shapes_ratio": MeasureInfo("ratio", "share of their time with an operator whose inputs are known"),
    # Counted work (measures/work), rank B: of kernels without communication
    "work_flop": MeasureInfo("count", "FLOP counted from shapes, 2 for a multiply-add"),
    "work_bytes": MeasureInfo("bytes", "device-memory traffic counted from shapes, each operand once: a lower bound"),
    "work_flop_covered_ratio": MeasureInfo("ratio", "share of kernel time whose FLOP are counted"),
    "work_bytes_covered_ratio": MeasureInfo("ratio", "share of kernel time whose bytes are counted"),
    "work_covered_ratio": MeasureInfo("ratio", "share of kernel time whose FLOP and bytes are counted"),
    "work_flop_per_s": MeasureInfo("per_s", "counted FLOP over the time in which those kernels run"),
    "work_bytes_per_s": MeasureInfo("bytes_per_s", "counted bytes over the time in which those kernels run"),
    "work_flop_per_byte": MeasureInfo("count", "arithmetic intensity: counted FLOP over counted bytes"),
    "work_compute_min_ratio": MeasureInfo(
        "ratio",
        "least share of peak arithmetic while kernels run: no FLOP that may be skipped, none of what is unknown",
    ),
    "work_compute_max_ratio": MeasureInfo("ratio", "most of the same: what is unknown counts as at its peak"),
    "work_dram_min_ratio": MeasureInfo(
        "ratio", "least share of peak DRAM bandwidth while kernels run: without what a cache may have served"
    ),
    "work_dram_max_ratio": MeasureInfo("ratio", "the same with that, and what is unknown as at its peak"),
    "work_compute_covered_ratio": MeasureInfo("ratio", "work_compute_min_ratio over the time of counted kernels only"),
    "work_dram_covered_ratio": MeasureInfo("ratio", "work_dram_min_ratio over the time of counted kernels only"),
    "attention_bytes": MeasureInfo("bytes", "counted bytes of attention: queries, keys, values and output, each once"),
    "attention_dram_ratio": MeasureInfo("ratio", "those over the time of these kernels, of peak DRAM bandwidth"),
    "attention_compute_ratio": MeasureInfo("ratio", "counted FLOP of attention over its time, of peak arithmetic"),
    "gemm_16bit_ns": MeasureInfo("ns", "time of matrix products in BF16 or FP16 with counted work"),
    "fp8_gain_ns": MeasureInfo(
        "ns", "the most that FP8 could win of it: of products near a roof, what that roof gives way"
    ),
    "fp8_gain_ratio": MeasureInfo("ratio", "fp8_gain_ns over the window"),
    "fp32_counted_ns": MeasureInfo("ns", "time of matrix products in FP32 with counted work"),
    "fp32_to_16bit_gain_ns": MeasureInfo("ns", "the most that 16 bits could win of it: what the roof gives way"),
    "fp32_to_tf32_gain_ns": MeasureInfo("ns", "the most that TF32 could win of it, which saves no bytes"),
    "slow_gemm_ns": MeasureInfo(
        "ns", "summed time of matrix products of 5 µs and more that reach under 40 % of both roofs"
    ),
    "slow_gemm_loss_ns": MeasureInfo("ns", "what of it is beyond the time that 60 % of the nearer roof would take"),
    "slow_gemm_loss_ratio": MeasureInfo("ratio", "slow_gemm_loss_ns over kernel time without communication"),
    "mfu_ratio": MeasureInfo("ratio", "FLOP of matrix work over the peak of each precision, of the whole window"),
    "mbu_ratio": MeasureInfo("ratio", "counted bytes over peak DRAM bandwidth, of the whole window"),
    # GPU telemetry (measures/gpu_telemetry.py). "Under load": utilisation of at least one half
    "gpu_utilization_mean_ratio": MeasureInfo(
        "ratio", "time in which a kernel was resident, as the driver samples it: no proof of work"
    ),
    "gpu_utilization_peak_ratio": MeasureInfo("ratio", "largest sample of the same"),
    "memory_utilization_mean_ratio": MeasureInfo(
        "ratio", "time in which device memory was read or written, as the driver samples it"
    ),
    "gpu_load_ratio": MeasureInfo("ratio", "share of the samples that lie under load"),
    "gpu_memory_used_mean_bytes": MeasureInfo("bytes", "device memory in use by all processes, mean"),
    "gpu_memory_used_peak_bytes": MeasureInfo("bytes", "largest sample of the same"),
    "gpu_memory_total_bytes": MeasureInfo("bytes", "device memory of the GPU"),
    "gpu_memory_used_peak_ratio": MeasureInfo("ratio", "gpu_memory_used_peak_bytes over the GPU's memory"),
    "gpu_memory_growth_bytes": MeasureInfo(
        "bytes", "memory in use in the last tenth of the samples less that in the first tenth, medians"
    ),
    "target_memory_peak_bytes": MeasureInfo("bytes", "device memory of the target's processes, largest sum"),
    "other_process_memory_peak_bytes": MeasureInfo("bytes", "device memory of processes that are not the target's"),
    "gpu_power_mean_watts": MeasureInfo("watts", "mean power, from the energy counter where there is one"),
    "gpu_power_limit_watts": MeasureInfo("watts", "power limit in force"),
    "gpu_power_limit_max_watts": MeasureInfo("watts", "highest power limit that may be set"),
    "gpu_power_of_limit_ratio": MeasureInfo("ratio", "gpu_power_mean_watts over gpu_power_limit_watts"),
    "gpu_temperature_peak_celsius": MeasureInfo("celsius", "largest temperature of the GPU"),
    "gpu_memory_temperature_peak_celsius": MeasureInfo("celsius", "largest temperature of the device memory"),
    "sm_clock_load_mhz": MeasureInfo("mhz", "mean SM clock under load"),
    "sm_clock_max_mhz": MeasureInfo("mhz", "highest SM clock of the device"),
    "sm_clock_lost_ratio": MeasureInfo("ratio", "1 less sm_clock_load_mhz over sm_clock_max_mhz"),
    "sm_clock_idle_ratio": MeasureInfo(
        "ratio", "lowest SM clock of the samples in which the GPU was idle, over its highest clock"
    ),
    "sm_clock_lost_ns": MeasureInfo(
        "ns", "sm_clock_lost_ratio of the time under load: an upper bound on what slow clocks cost"
    ),
    "hw_slowdown_ratio": MeasureInfo(
        "ratio", "share of samples with a slowdown by the hardware (heat, power brake), single samples left out"
    ),
    "clock_limited_power_ratio": MeasureInfo("ratio", "share of time in which power held the clocks down"),
    "clock_limited_thermal_ratio": MeasureInfo("ratio", "share of time in which temperature held the clocks down"),
    "clock_limited_other_ratio": MeasureInfo(
        "ratio", "share of time in which sync boost or an unnamed hardware slowdown held the clocks down"
    ),
    "clock_limited_setting_ratio": MeasureInfo("ratio", "share of time in which a clock setting held the clocks down"),
    "pcie_link_load_generation": MeasureInfo("count", "PCIe generation under load, the highest seen"),
    "pcie_link_load_width": MeasureInfo("count", "PCIe lanes under load, the most seen"),
    "pcie_link_max_generation": MeasureInfo("count", "PCIe generation that device and system support"),
    "pcie_link_max_width": MeasureInfo("count", "PCIe lanes that device and system support"),
    "pcie_link_peak_bytes_per_s": MeasureInfo("bytes_per_s", "PCIe peak per direction, as linked under load"),
    "pcie_link_lost_ratio": MeasureInfo("ratio", "1 less that peak over the peak that device and system support"),
    "pcie_tx_bytes_per_s": MeasureInfo("bytes_per_s", "bytes per second that the GPU sent over PCIe"),
    "pcie_rx_bytes_per_s": MeasureInfo("bytes_per_s", "bytes per second that the GPU received over PCIe"),
    "pcie_tx_link_ratio": MeasureInfo("ratio", "pcie_tx_bytes_per_s over pcie_link_peak_bytes_per_s"),
    "pcie_rx_link_ratio": MeasureInfo("ratio", "pcie_rx_bytes_per_s over pcie_link_peak_bytes_per_s"),
    "pcie_replay_count": MeasureInfo("count", "PCIe packets that were sent again"),
    "nvlink_tx_bytes_per_s": MeasureInfo("bytes_per_s", "bytes per second sent over all NVLink links"),
    "nvlink_rx_bytes_per_s": MeasureInfo("bytes_per_s", "bytes per second received over all NVLink links"),
    "xid_count": MeasureInfo("count", "XID errors that the driver reported, without those of a stopped program"),
    "xid_first_number": MeasureInfo("count", "number of the first of them"),
    "gpu_lost_count": MeasureInfo("count", "times that the GPU stopped answering"),
    "ecc_corrected_count": MeasureInfo("count", "device memory errors that ECC corrected"),
    "ecc_uncorrected_count": MeasureInfo("count", "device memory errors that ECC could not correct"),
    "remapped_row_count": MeasureInfo("count", "device memory rows replaced after uncorrected errors"),
    "remap_failed_count": MeasureInfo("count", "1 when replacing a memory row has failed"),
    # The GPM counters of Hopper and newer, rank A, over the samples in which the GPU was active
    "gpm_graphics_active_ratio": MeasureInfo("ratio", "share of all time in which compute or graphics work was active"),
    "gpm_sm_active_ratio": MeasureInfo("ratio", "SMs with at least one warp resident: never the compute limiter"),
    "gpm_sm_occupancy_ratio": MeasureInfo("ratio", "warps resident, of the most that fit"),
    "gpm_tensor_active_ratio": MeasureInfo("ratio", "any tensor pipe active"),
    "gpm_fp64_active_ratio": MeasureInfo("ratio", "FP64 pipe active, without tensor cores"),
    "gpm_fp32_active_ratio": MeasureInfo("ratio", "FP32 pipe active, without tensor cores"),
    "gpm_fp16_active_ratio": MeasureInfo("ratio", "FP16 pipe active, without tensor cores"),
    "gpm_integer_active_ratio": MeasureInfo("ratio", "integer pipe active"),
    "gpm_compute_ratio": MeasureInfo("ratio", "C where issue slots are not counted: the largest of these pipes"),
    "gpm_dram_ratio": MeasureInfo("ratio", "M: DRAM bandwidth of peak"),
    # One GPU beside the others of the program
    "gpu_clock_spread_ratio": MeasureInfo(
        "ratio", "1 less the slowest GPU's share of its maximum SM clock under load over the fastest's"
    ),
    "gpu_temperature_spread_celsius": MeasureInfo("celsius", "warmest less coolest GPU, of mean temperatures"),
    "sm_clock_behind_peers_ratio": MeasureInfo("ratio", "the same as the spread, of this GPU instead of the slowest"),
    "slowest_gpu_clock_ratio": MeasureInfo("ratio", "SM clock of the slowest GPU under load, of its maximum"),
    "slowest_gpu_thermal_ratio": MeasureInfo("ratio", "share of time in which temperature held its clocks down"),
    "slowest_gpu_power_ratio": MeasureInfo("ratio", "share of time in which power held its clocks down"),
    # Serving engine (measures/serving_telemetry.py): its own metrics, all parallel engines together
    "running_requests_mean": MeasureInfo("count", "requests in the running batch, over time"),
    "running_requests_max": MeasureInfo("count", "most of them at a sample"),
    "waiting_requests_mean": MeasureInfo("count", "requests waiting to be scheduled, over time"),
    "waiting_requests_max": MeasureInfo("count", "most of them at a sample"),
    "engine_known_ratio": MeasureInfo(
        "ratio", "share of the window that the samples of running requests cover: nobody knows the rest"
    ),
    "zero_running_ratio": MeasureInfo(
        "ratio", "share of the sampled time without a running or waiting request or a token"
    ),
    "in_flight_requests_mean": MeasureInfo("count", "finished requests per second times their mean latency"),
    "waiting_ratio": MeasureInfo("ratio", "share of the sampled time with a waiting request"),
    "running_limit_count": MeasureInfo("count", "most requests that the engine runs at once"),
    "batch_efficiency_ratio": MeasureInfo("ratio", "running requests, while there are any, over that limit"),
    "engine_steps_per_s": MeasureInfo("per_s", "forward passes per second, as the engine counts them"),
    "tokens_per_step_mean": MeasureInfo("count", "tokens of a step, computed prompt and generated"),
    "token_budget_ratio": MeasureInfo("ratio", "tokens per step over the most that a step may take"),
    "graph_step_ratio": MeasureInfo("ratio", "share of forward passes that ran as CUDA graphs, as the engine counts"),
    "decode_interval_mean_ns": MeasureInfo("ns", "inter-token latency where steps hold no prefill"),
    "queue_time_mean_ns": MeasureInfo("ns", "arrival at the scheduler to first scheduled, mean of finished requests"),
    "queue_time_p95_ns": MeasureInfo("ns", "95th percentile of the same, from buckets"),
    **{
        f"{stem}_{statistic}_ns": MeasureInfo("ns", f"{meaning}: {statistic}")
        for stem, meaning in (
            ("ttft", "time to first token, as the engine's front end sees it"),
            ("itl", "gap between two outputs of a request"),
            ("tpot", "time per output token of a request, without the first"),
            ("e2e_latency", "arrival to finish, as the engine sees it"),
            ("client_ttft", "time to first token, as the load's clients saw it"),
            ("client_tpot", "time per output token, as the load's clients saw it"),
            ("client_e2e_latency", "request sent to last token, as the load's clients saw it"),
        )
        for statistic in ("mean", "p50", "p95", "p99")
    },
    "client_error_ratio": MeasureInfo("ratio", "failed over tried requests of the load"),
    "prefill_time_mean_ns": MeasureInfo("ns", "first scheduled to first token, mean of finished requests"),
    "decode_time_mean_ns": MeasureInfo("ns", "first to last token, mean of finished requests"),
    "front_end_time_mean_ns": MeasureInfo("ns", "time to first token less queue and prefill time, of the means"),
    "prompt_tokens_per_s": MeasureInfo("per_s", "prompt tokens, cached ones included"),
    "computed_prompt_tokens_per_s": MeasureInfo("per_s", "prompt tokens that no cache held"),
    "output_tokens_per_s": MeasureInfo("per_s", "generated tokens"),
    "kv_cache_usage_mean_ratio": MeasureInfo("ratio", "share of the KV cache in use, of the fullest engine, over time"),
    "kv_cache_usage_max_ratio": MeasureInfo("ratio", "the largest sample of the same"),
    "prefix_cache_hit_ratio": MeasureInfo("ratio", "tokens (or blocks) found in the prefix cache over those looked up"),
    "prefix_cache_query_count": MeasureInfo("count", "tokens (or blocks) looked up in the prefix cache"),
    "preemption_count": MeasureInfo("count", "running requests put back for want of KV cache"),
    "preemption_per_s": MeasureInfo("per_s", "the same per second"),
    "recomputed_prompt_ratio": MeasureInfo(
        "ratio", "prompt tokens beyond those of finished and running requests, over all: work done again"
    ),
    "finished_request_count": MeasureInfo("count", "finished requests, without aborted and failed ones"),
    "finished_requests_per_s": MeasureInfo("per_s", "the same per second"),
    "failed_request_count": MeasureInfo("count", "requests that failed in the engine"),
    "failed_request_ratio": MeasureInfo("ratio", "failed over finished, failed and aborted requests"),
    "aborted_request_count": MeasureInfo("count", "requests aborted, mostly by clients that went away"),
    "aborted_request_ratio": MeasureInfo("ratio", "aborted over finished, failed and aborted requests"),
    "rejected_request_count": MeasureInfo("count", "requests refused at admission"),
    "length_finish_ratio": MeasureInfo("ratio", "finished requests that were cut off at their token limit"),
    "http_4xx_count": MeasureInfo("count", "answers of the generating endpoints with a 4xx status"),
    "http_5xx_count": MeasureInfo("count", "answers of the generating endpoints with a 5xx status"),
    "corrupted_request_count": MeasureInfo("count", "requests with NaN logits"),
    "spec_acceptance_ratio": MeasureInfo("ratio", "accepted over drafted tokens of speculative decoding"),
    "spec_tokens_per_step_mean": MeasureInfo("count", "tokens that a verified step yields: 1 + accepted"),
    "spec_draft_tokens_mean": MeasureInfo("count", "drafted tokens of a verified step"),
    "spec_first_acceptance_ratio": MeasureInfo("ratio", "verified steps whose first drafted token was accepted"),
    "spec_step_mean_ns": MeasureInfo("ns", "time of a verified step: summed inter-token latency over drafts"),
    "engine_flop_per_s": MeasureInfo("per_s", "FLOP per second and GPU by the engine's own count: a lower bound"),
    "engine_dram_bytes_per_s": MeasureInfo("bytes_per_s", "bytes read and written, by the engine's own count"),
    "server_cpu_cores_mean": MeasureInfo("count", "CPUs that the serving process kept busy"),
}

# Host telemetry (measures/host_telemetry.py and host_memory.py): of the part of the window in which samples were taken
# Of all steps, and per phase (scope phase): steps/summary.py
STEP_MEASURES: dict[str, MeasureInfo] = {
    "step_count": MeasureInfo("count", "steps in the window, or of a phase"),
    "step_p50_ns": MeasureInfo("ns", "length of a step with the gap before it, median"),
    "step_p95_ns": MeasureInfo("ns", "length of a step with the gap before it, 95th percentile"),
    "step_p99_ns": MeasureInfo("ns", "length of a step with the gap before it, 99th percentile"),
    "step_max_ns": MeasureInfo("ns", "length of the slowest step"),
    "step_busy_mean_ns": MeasureInfo("ns", "time of a step in which the device ran anything, mean"),
    "step_idle_mean_ns": MeasureInfo("ns", "idle time of a step with the gap before it, mean"),
    "step_kernels_mean_count": MeasureInfo("count", "kernels of a step, those of replayed graphs included, mean"),
    "step_launches_mean_count": MeasureInfo("count", "launches of kernels and graphs of a step, mean"),
    "step_syncs_mean_count": MeasureInfo("count", "synchronising calls of a step, mean"),
    "step_tokens_mean_count": MeasureInfo("count", "tokens of a step as its ranges name them, mean"),
}

HOST_MEASURES: dict[str, MeasureInfo] = {
    "target_cpus_used_count": MeasureInfo("count", "CPUs that the target's processes kept busy, on average"),
    "target_system_ratio": MeasureInfo("ratio", "share of the target's CPU time in the kernel"),
    "target_runnable_count": MeasureInfo(
        "count", "threads of the target that ran or waited for a CPU, on average: run plus wait time over the window"
    ),
    "target_involuntary_per_s": MeasureInfo("per_s", "times per second that a thread was taken off its CPU"),
    "target_voluntary_per_s": MeasureInfo("per_s", "times per second that a thread went to sleep: normal in a server"),
    "busiest_thread_cpu_ratio": MeasureInfo(
        "ratio", "the busiest thread's time on a CPU over the window: 1 is normal for a thread that polls"
    ),
    "busiest_thread_wait_ratio": MeasureInfo(
        "ratio", "of the time in which the busiest thread could run, the share that it waited for a CPU"
    ),
    "busiest_thread_wait_ns": MeasureInfo("ns", "time that the busiest thread was ready and had no CPU"),
    "busiest_thread_involuntary_per_s": MeasureInfo("per_s", "times per second that it was taken off its CPU"),
    "busiest_thread_voluntary_per_s": MeasureInfo("per_s", "times per second that it went to sleep"),
    "major_faults_per_s": MeasureInfo("per_s", "page faults of the target that read from a disk"),
    "cpu_busy_ratio": MeasureInfo("ratio", "share of all CPU time of the machine that was neither idle nor I/O wait"),
    "cpu_softirq_ratio": MeasureInfo("ratio", "share of all CPU time in soft interrupts"),
    "cpu_softirq_max_ratio": MeasureInfo("ratio", "the same of the CPU with the most"),
    "thread_cpu_softirq_max_ratio": MeasureInfo(
        "ratio", "the same of the CPUs that busy threads of the target run on: the one with the most"
    ),
    "cpu_steal_ratio": MeasureInfo("ratio", "share of all CPU time that the hypervisor gave to others"),
    "cpu_iowait_ratio": MeasureInfo("ratio", "share of all CPU time that was idle while something waited for I/O"),
    "cpu_online_count": MeasureInfo("count", "CPUs of the machine"),
    "load_mean_count": MeasureInfo("count", "mean of the load average of one minute"),
    "memory_available_min_ratio": MeasureInfo("ratio", "least available memory over all memory of the machine"),
    "swap_in_bytes_per_s": MeasureInfo("bytes_per_s", "read back from swap"),
    "swap_out_bytes_per_s": MeasureInfo("bytes_per_s", "written to swap"),
    "psi_cpu_some_ratio": MeasureInfo(
        "ratio", "share of time in which a task waited for a CPU (PSI; the cgroup's where it has its own)"
    ),
    "psi_memory_some_ratio": MeasureInfo("ratio", "share of time in which a task was stalled for memory"),
    "psi_memory_full_ratio": MeasureInfo("ratio", "share of time in which all tasks were stalled for memory"),
    "psi_io_some_ratio": MeasureInfo("ratio", "share of time in which a task was stalled for I/O"),
    "psi_io_full_ratio": MeasureInfo("ratio", "share of time in which all tasks were stalled for I/O"),
    "cgroup_quota_cpus_count": MeasureInfo("count", "CPUs that the tightest quota above the target allows"),
    "cgroup_throttled_ratio": MeasureInfo("ratio", "share of the quota's periods in which it was used up"),
    "cgroup_throttled_ns": MeasureInfo("ns", "time throttled, summed over CPUs: can exceed the window"),
    "cgroup_memory_max_ratio": MeasureInfo("ratio", "most memory of the cgroup, page cache included, over its limit"),
    "cgroup_memory_hit_count": MeasureInfo("count", "times the cgroup reached its memory limit"),
    "cgroup_oom_kill_count": MeasureInfo("count", "processes of the cgroup killed for lack of memory"),
    "busiest_thread_off_node_ratio": MeasureInfo(
        "ratio", "share of the busiest thread's CPU time on other NUMA nodes than the GPU's"
    ),
    "target_memory_off_node_ratio": MeasureInfo("ratio", "share of the target's memory on other NUMA nodes"),
    "numa_off_node_ratio": MeasureInfo("ratio", "the larger of the two"),
    "host_memory_observed_ns": MeasureInfo("ns", "how long the target's memory was watched"),
    "host_memory_growth_bytes_per_s": MeasureInfo(
        "bytes_per_s", "growth of memory without files behind it, over the time in which requests were finished"
    ),
    "host_memory_growth_bytes": MeasureInfo("bytes", "that growth over all of the time"),
    "host_memory_growth_fit_ratio": MeasureInfo("ratio", "share of its variance that a straight line explains (R²)"),
    "host_memory_growth_late_ratio": MeasureInfo(
        "ratio", "slope of the later half over that of the whole: 0 filled up once, 1 goes on"
    ),
    "host_memory_growth_request_bytes": MeasureInfo("bytes", "growth per finished request"),
    "host_memory_growth_request_error_bytes": MeasureInfo("bytes", "its standard error"),
    "host_memory_growth_paused_bytes_per_s": MeasureInfo(
        "bytes_per_s", "growth in the longest pause without finished requests"
    ),
    "host_memory_time_to_limit_ns": MeasureInfo("ns", "time until that growth reaches the limit, at the rate seen"),
}
# Network telemetry (measures/network_telemetry.py): of the fullest or worst link, loopback apart
NETWORK_MEASURES: dict[str, MeasureInfo] = {
    "network_rx_bytes_per_s": MeasureInfo("bytes_per_s", "received by the interface with the most"),
    "network_tx_bytes_per_s": MeasureInfo("bytes_per_s", "sent by the interface with the most"),
    "network_rx_max_ratio": MeasureInfo("ratio", "received over the link's speed, of the fullest interface"),
    "network_tx_max_ratio": MeasureInfo("ratio", "sent over the link's speed, of the fullest interface"),
    "network_link_p95_ratio": MeasureInfo(
        "ratio", "95th percentile over seconds of the fuller direction, of the fullest interface"
    ),
    "loopback_bytes_per_s": MeasureInfo("bytes_per_s", "sent to itself by the machine or container"),
    "network_drop_count": MeasureInfo("count", "packets dropped by interfaces"),
    "network_drop_max_ratio": MeasureInfo("ratio", "share of packets dropped, of the worst interface and direction"),
    "network_error_count": MeasureInfo("count", "packets with errors"),
    "network_error_max_ratio": MeasureInfo("ratio", "share of packets with errors, of the worst interface"),
    "tcp_retransmit_count": MeasureInfo("count", "TCP segments sent again"),
    "tcp_retransmit_ratio": MeasureInfo("ratio", "TCP segments sent again over those sent"),
    "tcp_listen_overflow_count": MeasureInfo("count", "connections refused because a listen queue was full"),
    "rdma_rx_max_ratio": MeasureInfo("ratio", "received over the port's live rate, of the fullest RDMA port"),
    "rdma_tx_max_ratio": MeasureInfo("ratio", "sent over the port's live rate, of the fullest RDMA port"),
    "rdma_link_p95_ratio": MeasureInfo(
        "ratio", "95th percentile over seconds of the fuller direction, of the fullest RDMA port"
    ),
    "fullest_link_p95_ratio": MeasureInfo("ratio", "the larger of network_link_p95_ratio and rdma_link_p95_ratio"),
    "rdma_max_bytes_per_s": MeasureInfo("bytes_per_s", "the fuller direction of the fullest RDMA port"),
    "rdma_congestion_max_ratio": MeasureInfo(
        "ratio", "congestion notifications sent or handled per packet, of the worst RDMA port"
    ),
    "rdma_retransmit_max_ratio": MeasureInfo(
        "ratio", "signs of loss or of a receiver that is not ready, per packet, of the worst RDMA port"
    ),
    "rdma_retransmit_count": MeasureInfo("count", "signs of loss: out of sequence, NAK, timeouts, sent again"),
    "rdma_receiver_not_ready_count": MeasureInfo("count", "times a receiver had posted no buffer"),
    "rdma_ecn_marked_count": MeasureInfo("count", "packets that arrived marked as having met congestion"),
    "rdma_discard_count": MeasureInfo("count", "outbound packets that a port discarded"),
    "rdma_link_error_count": MeasureInfo("count", "link down, link recovery, damaged symbols and packets"),
    "rdma_transmit_wait_count": MeasureInfo(
        "count", "ticks with data to send and no credit; how long a tick is depends on the device"
    ),
    "rdma_slow_port_count": MeasureInfo("count", "RDMA ports whose rate is under that of the fastest one here"),
}
MEASURES.update(HOST_MEASURES)
MEASURES.update(STEP_MEASURES)
MEASURES.update(NETWORK_MEASURES)

for _cause in IDLE_CAUSES:
    _name = _cause.replace("-", "_")
    MEASURES[f"idle_{_name}_ns"] = MeasureInfo("ns", f"idle time with cause {_cause}")
    MEASURES[f"idle_{_name}_ratio"] = MeasureInfo("ratio", f"idle_{_name}_ns over D")
for _cause in COPY_CAUSES:
    MEASURES[f"exposed_copy_{_cause}_ns"] = MeasureInfo("ns", f"exposed copy time of kind {_cause}")
