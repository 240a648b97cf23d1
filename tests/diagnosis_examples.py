"""Hand-made diagnoses for the tests of the reports: small round numbers, one per kind of answer."""

from __future__ import annotations

import math
from typing import Any

from infprof.results import (
    ApiRow,
    CopyRow,
    Cost,
    DeviceResult,
    Diagnosis,
    Evidence,
    Finding,
    Gain,
    KernelRow,
    KernelTotals,
    LeftOut,
    Measure,
    NcclRow,
    NotEvaluated,
    Problem,
    Provenance,
    RangeRow,
    Remedy,
    Scope,
    Slice,
    Verdict,
    Where,
    Window,
    WorkRow,
)

MS = 1_000_000
HOSTILE = "<script>alert(1)</script> | `x` </script> \x1b[31mred [bold]"
ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::Half>, std::array<char*, 3ul>)"
)
FLASH = (
    "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false, false, cutlass::bfloat16_t>, "
    "false, (bool)0>(Flash_fwd_params)"
)
GEMM = "nvjet_tst_128x64_64x10_2x1_v_bz_coopA_bias_TNT"
CUTLASS = "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int>, float> >(Params)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def _provenance(gpus: int = 1) -> Provenance:
    return Provenance(
        tool="Nsight Systems",
        tool_version="2026.1.1",
        inputs=["decode.sqlite"],
        capture={"trace": "cuda,nvtx,osrt", "graph_trace": "node"},
        gpus=[{"id": i, "name": "NVIDIA H200", "memory_bytes": 150_000_000_000, "sm_count": 132} for i in range(gpus)],
        infprof_version="0.1.0",
    )


def _timeline(window: Window, devices: list[DeviceResult], columns: int = 200) -> dict[str, Any]:
    """A timeline whose columns each add up to 1 and whose slices keep their share of the window."""
    out = []
    for device in devices:
        series = []
        means = [item.ns / window.duration_ns for item in device.slices]
        for number, item in enumerate(device.slices):
            # Neighbours trade a wave: what one slice gains in a column, the next one loses.
            following, previous = (number + 1) % len(means), (number - 1) % len(means)
            share = [
                means[number]
                + 0.3 * math.sin(column / 9 + number) * min(means[number], means[following])
                - 0.3 * math.sin(column / 9 + previous) * min(means[number], means[previous])
                for column in range(columns)
            ]
            series.append({"kind": item.kind, "cause": item.cause, "share": [round(s, 5) for s in share]})
        out.append({"id": device.id, "series": series})
    values: list[float | None] = [round(0.4 + 0.2 * math.sin(column / 20), 3) for column in range(columns)]
    values[0] = None
    return {
        "start_ns": window.start_ns,
        "end_ns": window.end_ns,
        "columns": columns,
        "devices": out,
        "counters": [{"device": devices[0].id, "name": "sm_issue_ratio", "unit": "ratio", "values": values}],
    }


def _kernel(name: str, calls: int, total_ns: int, share: float, kernel_class: str, device: int = 0) -> KernelRow:
    mean = total_ns / calls
    return KernelRow(
        name, device, calls, total_ns, mean, int(mean * 0.9), int(mean * 1.8), share, kernel_class, "bf16", 264, 128
    )


def _work(
    kind: str,
    operator: str | None,
    total_ns: int,
    share: float,
    flop_per_s: float | None,
    bytes_per_s: float | None,
    compute: float | None,
    limiter: str | None,
) -> WorkRow:
    seconds = total_ns / 1e9
    calls = 0 if kind == "not counted" else 24_000
    dram = None if bytes_per_s is None else bytes_per_s / 3.352e12
    flop = None if flop_per_s is None else flop_per_s * seconds
    moved = None if bytes_per_s is None else bytes_per_s * seconds
    intensity = flop_per_s / bytes_per_s if flop_per_s and bytes_per_s else None
    reason = None if calls else "it ran inside a replayed graph"
    precision = "bf16" if kind == "gemm" else None
    return WorkRow(
        0,
        kind,
        operator,
        precision,
        calls,
        24_000,
        total_ns,
        share,
        flop,
        moved,
        flop_per_s,
        bytes_per_s,
        intensity,
        295.2 if intensity else None,
        compute,
        dram,
        limiter,
        False,
        reason,
    )


def launch_bound() -> Diagnosis:
    """Decode without CUDA graphs: a complete diagnosis, every table filled, with a hostile range name."""
    window = Window(
        350 * MS,
        1_350 * MS,
        "steady part",
        [LeftOut("start-up (module load, weight upload, warm-up)", 350 * MS), LeftOut("trace cut at the end", 12 * MS)],
    )
    graphs = [
        Remedy(
            "vllm", "drop --enforce-eager so that decode runs in CUDA graphs", "a few hundred MB and a slower start"
        ),
        Remedy("sglang", "drop --disable-cuda-graph; raise --cuda-graph-max-bs to the batch in use"),
        Remedy("pytorch", 'torch.compile(model, mode="reduce-overhead")', "shapes must be static"),
    ]
    verdict = Verdict(
        "scheduling-bubble",
        "launch",
        None,
        "C",
        0.92,
        "The GPU is idle 50.6 % of the time, mostly because the host launches kernels too slowly to keep it busy.",
        rule="scheduling-bubble",
    )
    device = DeviceResult(
        0,
        "NVIDIA H200",
        [4242],
        verdict,
        KernelTotals(96_000, 500 * MS, 38),
        [
            CopyRow(
                "h2d", 1_200, 9_600_000, 12 * MS, 9_600_000, 12 * MS, 800e6, [{"up_to_bytes": 65536, "count": 1_200}]
            ),
            CopyRow("d2h", 400, 3_200, 2 * MS, None, 2 * MS, 1.6e6),
        ],
        [
            Slice("compute", None, 480 * MS),
            Slice("exposed_copy", "h2d", 12 * MS),
            Slice("exposed_copy", "d2h", 2 * MS),
            Slice("exposed_communication", None, 0),
            Slice("idle", "launch", 310 * MS),
            Slice("idle", "host-work", 80 * MS),
            Slice("idle", "sync", 56 * MS),
            Slice("idle", "kernel-gap", 42 * MS),
            Slice("idle", "lock", 11 * MS),
            Slice("idle", "allocator", 4 * MS),
            Slice("idle", "no-demand", 3 * MS),
        ],
    )
    findings = [
        Finding(
            "launch-bound",
            "The GPU waits for kernel launches",
            "scheduling",
            "framework",
            ["online", "batch"],
            "configuration",
            "critical",
            "C",
            0.92,
            Cost(310 * MS),
            Gain(0.2, 0.31, "idle time inside launch calls"),
            [
                Evidence("idle_launch_ratio", 0.311, "ratio"),
                Evidence("queue_delay_p50_ns", 4_200, "ns"),
                Evidence("kernel_mean_ns", 5_208, "ns"),
                Evidence("small_kernel_per_s", 61_000, "per_s"),
            ],
            [
                Where(412 * MS, 455 * MS, 0, 7, ELEMENTWISE),
                Where(1_203_456_789, 1_247_600_123, 0, None, None),
                Where(900_000_100, 900_004_321, 0, 7, GEMM),
                Where(990 * MS, 995 * MS, None, None, None),
            ],
            graphs,
            "Each decode step launches hundreds of short kernels one by one; each ends before the next is queued.",
            ["ncu --kernel-name regex:elementwise --launch-count 5 --set full python serve.py"],
            ["graph launches: 0"],
        ),
        Finding(
            "sync-per-step",
            "The host waits for the GPU in every step",
            "host",
            "application",
            ["online"],
            "code",
            "warning",
            "C",
            0.7,
            Cost(56 * MS),
            Gain(None, 0.056, "idle time after synchronising calls"),
            [Evidence("sync_call_count", 400, "count"), Evidence("tiny_d2h_count", 400, "count")],
            [Where(500 * MS, 501 * MS, 0, None, "cudaStreamSynchronize")],
            [Remedy("pytorch", "keep sampled tokens on the GPU; replace .item() by a non_blocking copy")],
            "Reading one number from the GPU stops the host until all queued work is done.",
        ),
        Finding(
            "pageable-copies",
            "Copies use pageable memory",
            "pcie",
            "runtime",
            ["online", "batch", "mixed"],
            "code",
            "info",
            "C",
            0.6,
            Cost(9_600_000, "bytes"),
            Gain(None, None, "not known without the link's speed"),
            [Evidence("pageable_ratio", 1.0, "ratio"), Evidence("h2d_bytes_per_s", 800e6, "bytes_per_s")],
            [],
            [Remedy("pytorch", "pin_memory=True in the DataLoader, non_blocking=True in .to()")],
        ),
    ]
    return Diagnosis(
        verdict,
        window,
        [device],
        findings,
        [
            Measure("window_ns", 1_000 * MS, "ns", "C", "timeline"),
            Measure("idle_launch_ratio", 0.311, "ratio", "C", "timeline", Scope("device", "0")),
            Measure("small_kernel_per_s", 61_000.5, "per_s", "C", "timeline"),
            Measure("sm_issue_ratio", None, "ratio", "A", "no GPU metrics in the trace"),
            Measure("h2d_bytes", 9_600_000, "bytes", "C", "memcpy table"),
        ],
        [
            NotEvaluated("bandwidth-bound-decode", "hardware counters (sm_issue_ratio, dram_ratio)"),
            NotEvaluated("compute-bound-prefill", "hardware counters (sm_issue_ratio, dram_ratio)"),
            NotEvaluated("cpu-throttling", "scheduling events"),
        ],
        [
            Problem("zero-length-kernels", "3 kernels have no length and are left out", 3),
            Problem(
                "clock-skew",
                "Some kernels start up to 2.1 µs before their launch call; queue delays below that are noise",
            ),
        ],
        _provenance(),
        phases=[
            {
                "name": "prefill",
                "kind": "prefill",
                "count": 10,
                "total_ns": 150 * MS,
                "verdict": None,
                "slices": [],
                "steps": {"count": 10, "how_found": "NVTX", "p50_ns": 15 * MS, "p95_ns": 16 * MS, "p99_ns": None},
            },
            {
                "name": "decode | long",
                "kind": "decode",
                "count": 390,
                "total_ns": 850 * MS,
                "verdict": None,
                "slices": [],
                "steps": None,
            },
        ],
        steps={
            "count": 400,
            "how_found": "NVTX",
            "p50_ns": 2_100_000,
            "p95_ns": 3_400_000,
            "p99_ns": 9_100_000,
            "slowest": [],
        },
        whatif={
            "recorded_span_ns": 1_000 * MS,
            "replayed_span_ns": 1_001 * MS,
            "chain": [
                {
                    "fix": "launch time to 0",
                    "predicted_span_ns": 690 * MS,
                    "gain_ratio": 0.31,
                    "next_verdict": "gpu-busy",
                }
            ],
        },
        kernel_table=[
            _kernel(ELEMENTWISE, 52_000, 180 * MS, 0.36, "elementwise"),
            _kernel(GEMM, 24_000, 170 * MS, 0.34, "gemm"),
            _kernel(FLASH, 12_000, 90 * MS, 0.18, "attention"),
            _kernel(CUTLASS, 4_000, 40 * MS, 0.08, "gemm"),
            _kernel("triton_poi_fused_add_mul_silu_0", 3_000, 12 * MS, 0.024, "elementwise"),
            _kernel(HOSTILE, 1_000, 8 * MS, 0.016, "unknown"),
        ],
        work_table=[
            _work("gemm", None, 210 * MS, 0.42, 480e12, 1.9e12, 0.485, "compute"),
            _work("elementwise", None, 180 * MS, 0.36, None, 1.2e12, None, None),
            _work("not counted", None, 110 * MS, 0.22, None, None, None, None),
            _work("gemm", "aten::mm", 210 * MS, 0.42, 480e12, 1.9e12, 0.485, "compute"),
            _work("elementwise", HOSTILE, 180 * MS, 0.36, None, 1.2e12, None, None),
        ],
        range_table=[
            RangeRow("decode", 390, 850 * MS, 800 * MS, 430 * MS, 93_000),
            RangeRow(HOSTILE, 10, 150 * MS, 140 * MS, 120 * MS, 3_000),
        ],
        nccl_table=[],
        api_table=[ApiRow("cudaLaunchKernel", 96_000, 640 * MS, 0), ApiRow("cudaMalloc", 4, 1 * MS, 1)],
        timeline=_timeline(window, [device]),
    )


def gpu_busy() -> Diagnosis:
    """Busy, and nothing in the trace tells compute from bandwidth."""
    window = Window(0, 2_000 * MS, "full")
    verdict = Verdict(
        "gpu-busy",
        None,
        None,
        "C",
        0.95,
        "The GPU is busy 97.5 % of the time; the trace does not tell what limits it.",
        "Hardware counters are missing. Record with: nsys profile --gpu-metrics-devices=all --trace=cuda,nvtx CMD",
        remedies=[Remedy("vllm", "record with --gpu-metrics-devices=all, then read the limiter per phase")],
    )
    device = DeviceResult(
        0,
        None,
        [],
        verdict,
        KernelTotals(20_000, 1_950 * MS, 12),
        [],
        [Slice("compute", None, 1_950 * MS), Slice("idle", "kernel-gap", 50 * MS)],
    )
    return Diagnosis(
        verdict,
        window,
        [device],
        [],
        [Measure("window_ns", 2_000 * MS, "ns", "C", "timeline")],
        [NotEvaluated("bandwidth-bound-decode", "dram_ratio")],
        [],
        _provenance(),
        kernel_table=[_kernel(GEMM, 20_000, 1_950 * MS, 1.0, "gemm")],
    )


def unusable() -> Diagnosis:
    """Launches were recorded, GPU rows were not: no device, no window to speak of."""
    verdict = Verdict(
        "unusable",
        None,
        "gpu-not-recorded",
        "C",
        1.0,
        "The trace has 1,200 launch calls and no GPU operation, so nothing can be concluded.",
        "GPU activity was not recorded. Record again with --trace=cuda as the user who owns the GPU process.",
    )
    return Diagnosis(
        verdict,
        Window(0, 0, "full"),
        [],
        [],
        [],
        [NotEvaluated("launch-bound", "kernels")],
        [Problem("no-kernel-table", "CUPTI_ACTIVITY_KIND_KERNEL is missing")],
        Provenance("Nsight Systems", None, [], {}, [], "0.1.0"),
    )


def no_demand() -> Diagnosis:
    """An idle server: no demand first, the class of the rest as the second line."""
    window = Window(1_000 * MS, 11_000 * MS, "range serve")
    verdict = Verdict(
        "no-demand",
        None,
        None,
        "C",
        0.85,
        "The server had nothing to do 80.0 % of the time.",
        second="scheduling-bubble/host-work",
    )
    device = DeviceResult(
        0,
        "NVIDIA L4",
        [7],
        verdict,
        KernelTotals(4_000, 900 * MS, 20),
        [CopyRow("h2d", 100, 1_000_000, 5 * MS, 0)],
        [
            Slice("compute", None, 900 * MS),
            Slice("exposed_copy", "h2d", 5 * MS),
            Slice("idle", "no-demand", 8_000 * MS),
            Slice("idle", "host-work", 1_095 * MS),
        ],
    )
    return Diagnosis(verdict, window, [device], [], [], [], [], _provenance(), timeline=_timeline(window, [device], 40))


def two_devices() -> Diagnosis:
    """Two ranks that differ: one waits for the other in every all-reduce."""
    window = Window(0, 1_000 * MS, "steady part", [LeftOut("start-up", 2_500 * MS)])
    slow = Verdict("communication-bound", "straggler", None, "C", 0.75, "GPU 1 waits for GPU 0 in its collectives.")
    busy = Verdict("gpu-busy", None, None, "C", 0.9, "GPU 0 is busy.", "Hardware counters are missing.")
    devices = [
        DeviceResult(
            0,
            "NVIDIA H200",
            [10],
            busy,
            KernelTotals(5_000, 960 * MS, 30),
            [],
            [
                Slice("compute", None, 930 * MS),
                Slice("exposed_communication", None, 30 * MS),
                Slice("idle", "kernel-gap", 40 * MS),
            ],
        ),
        DeviceResult(
            1,
            "NVIDIA H200",
            [11],
            slow,
            KernelTotals(5_000, 950 * MS, 30),
            [CopyRow("p2p", 10, 50_000_000_000, 100 * MS, None, 0, 500e9)],
            [
                Slice("compute", None, 620 * MS),
                Slice("exposed_communication", None, 330 * MS),
                Slice("idle", "dependency", 50 * MS),
            ],
        ),
    ]
    finding = Finding(
        "straggler-rank",
        "One rank arrives late at every all-reduce",
        "communication",
        "hardware",
        ["mixed"],
        "investigation",
        "warning",
        "C",
        0.75,
        Cost(330 * MS),
        Gain(0.1, 0.3, "wait for the last device"),
        [Evidence("comm_spread_ratio", 0.82, "ratio"), Evidence("comm_spread_ns", None, "ns")],
        [Where(100 * MS, 110 * MS, 1, 3, ALL_REDUCE)],
        [Remedy("cuda", "compare clocks and CPU placement of the ranks: nvidia-smi topo -m")],
    )
    return Diagnosis(
        slow,
        window,
        devices,
        [finding],
        [Measure("comm_spread_ratio", 0.82, "ratio", "C", "timeline", Scope("rank", "1"))],
        [],
        [],
        _provenance(2),
        kernel_table=[
            _kernel(GEMM, 5_000, 930 * MS, 0.6, "gemm"),
            _kernel(ALL_REDUCE, 500, 330 * MS, 0.4, "communication", 1),
        ],
        nccl_table=[
            NcclRow("AllReduce", 500, 8_388_608, 330 * MS, 12.7e9),
            NcclRow("AllGather", 10, None, 2 * MS, None),
        ],
        timeline=_timeline(window, devices),
    )


def eight_devices() -> Diagnosis:
    """A full node of the second kind: what does not fit in columns."""
    base = two_devices()
    base.devices = [
        DeviceResult(
            number,
            "NVIDIA H200",
            [10 + number],
            (source := base.devices[0] if number else base.devices[1]).verdict,
            source.kernels,
            source.copies,
            source.slices,
        )
        for number in range(8)
    ]
    base.timeline = _timeline(base.window, base.devices)
    base.provenance = _provenance(8)
    return base


EXAMPLES = {
    "launch-bound": launch_bound,
    "gpu-busy": gpu_busy,
    "unusable": unusable,
    "no-demand": no_demand,
    "two-devices": two_devices,
    "eight-devices": eight_devices,
}
