"""Workloads with known steps, for the step finder: specs of the simulator whose ranges are the truth.

Each step stands in a range "step N": the first operation that is launched in it begins it.
"""

from __future__ import annotations

import random
from typing import Any

# Names as nsys writes them.
KERNELS = {
    "embed": "void at::native::vectorized_gather_kernel<(int)16, long>(char *, char *, T2 *, int, long, long)",
    "norm": "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, (int)8>(T1 *, long, T1 *, const T1 *, float, int)",
    "rope": "void vllm::rotary_embedding_kernel<c10::BFloat16, (bool)1>(const long *, T1 *, T1 *, const T1 *, int)",
    "cache": "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>(const T1 *, const T1 *, T2 *)",
    "gemm": "nvjet_tst_64x8_64x16_4x1_v_bz_TNT",
    "gemm2": "nvjet_tst_64x16_64x16_4x1_v_bz_splitK_TNT",
    "splitk": "void cublasLt::splitKreduce_kernel<(int)32, (int)16, int, float, __nv_bfloat16>(cublasSplitKParams<T4>)",
    "big": "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
    "attention": "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<(int)128, (int)64>>(Flash_fwd_params)",
    "combine": "void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<(int)128>>(Flash_fwd_params)",
    "prefill": "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<(int)128, (int)128>>(flash::Flash_fwd_params)",
    "act": "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>>(T1 *, const T1 *, int)",
    "softmax": "void at::native::softmax_warp_forward<float, float, float, (int)10>(T2 *, const T1 *, int, int, int)",
    "argmax": "void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>(T3)",
    "sort": "void at::native::radixSortKVInPlace<(int)-2, (int)-1, (int)32, (int)4, float, long, unsigned int>(T1)",
    "scatter": "void at::native::_scatter_gather_elementwise_kernel<(int)128, (int)4>(int, T3)",
    "fill": "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<int>>(int, T2, T3)",
    "add": "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<c10::BFloat16>>(int)",
    "route": "void vllm::moe::topkGatingSoftmax<(int)4, (int)128, (int)4, (int)16, int>(const float *, const bool *)",
    "experts": "fused_moe_kernel",
}
TIMES = {"big": "180us", "prefill": "90us", "argmax": "9us", "gemm": "11us", "gemm2": "12us", "experts": "30us"}

DECODE_LAYER = ["norm", "gemm", "rope", "cache", "attention", "gemm", "norm", "gemm", "act", "gemm"]
BATCH_LAYER = [
    "norm",
    "gemm2",
    "splitk",
    "rope",
    "cache",
    "attention",
    "combine",
    "gemm2",
    "splitk",
    "norm",
    "gemm2",
    "act",
    "gemm2",
]
PREFILL_LAYER = ["norm", "big", "rope", "cache", "prefill", "big", "norm", "big", "act", "big"]
MOE_LAYER = ["norm", "gemm", "rope", "cache", "attention", "gemm", "norm", "route", "experts", "experts"]

Action = dict[str, Any]
READ: list[Action] = [{"copy": "d2h", "size": 64}, {"sync": "stream"}]
FEED: list[Action] = [{"copy": "h2d", "size": 256}]
SCHEDULE: Action = {"host": "150us"}


def launches(names: list[str], stream: int = 7) -> list[Action]:
    return [{"launch": name, "stream": stream} for name in names]


def forward(layer: list[str], layers: int, tail: list[str]) -> list[Action]:
    """A forward pass, eager."""
    return [*launches(["embed"]), *launches(layer * layers), *launches(["norm", "gemm", *tail])]


def spec(steps: list[list[Action]], between: Action | None = SCHEDULE, **more: Any) -> dict[str, Any]:
    """A process that takes these steps, the host working ``between`` them."""
    run: list[Action] = list(more.pop("before", []))
    for number, actions in enumerate(steps):
        run.append({"range": f"step {number}", "do": actions})
        if between is not None:
            run.append(between)
    return base([{"pid": 4100, "name": "VLLM::EngineCore", "threads": [{"name": "main", "run": run}]}], **more)


def base(processes: list[Action], **more: Any) -> dict[str, Any]:
    kernels = {key: {"name": name, "time": TIMES.get(key, "3us")} for key, name in KERNELS.items()}
    return {"seed": 3, "jitter": 0.2, "kernels": kernels, "processes": processes, **more}


def graph(layer: list[str], layers: int) -> Action:
    return {"kernels": ["embed", *layer * layers, "norm", "gemm"]}


def decode_eager() -> dict[str, Any]:
    return spec([[*FEED, *forward(DECODE_LAYER, 24, ["argmax"]), *READ] for _ in range(30)])


def decode_without_sync() -> dict[str, Any]:
    """The host never waits and never reads: only the names repeat."""
    return spec([forward(DECODE_LAYER, 16, ["argmax"]) for _ in range(30)], between={"host": "40us"})


def decode_no_pause() -> dict[str, Any]:
    """No pause, no copy, nothing that the host does between steps."""
    return spec([forward(DECODE_LAYER, 12, ["softmax", "argmax"]) for _ in range(25)], between=None)


def sampling_varies() -> dict[str, Any]:
    """Some steps sort and scatter before they choose."""
    choice = random.Random(1)
    tails = [
        ["argmax"],
        ["softmax", "sort", "scatter", "argmax"],
        ["add", "softmax", "sort", "scatter", "fill", "argmax"],
    ]
    return spec([[*FEED, *forward(DECODE_LAYER, 20, choice.choice(tails)), *READ] for _ in range(60)])


def prefill_mixed_in() -> dict[str, Any]:
    """One prefill, then eight decode steps, again and again."""
    one = [*FEED, *forward(PREFILL_LAYER, 16, ["argmax"]), *READ]
    many = [*FEED, *forward(DECODE_LAYER, 16, ["argmax"]), *READ]
    return spec([one if i % 9 == 0 else many for i in range(54)])


def chunked_prefill() -> dict[str, Any]:
    """Chunks of a prompt do not sample; decodes ride along with some."""
    choice = random.Random(2)
    steps = []
    for _ in range(8):
        chunks = choice.randint(2, 5)
        steps += [
            [
                *FEED,
                *forward(PREFILL_LAYER, 16, [] if c + 1 < chunks else ["argmax"]),
                *(READ if c + 1 == chunks else []),
            ]
            for c in range(chunks)
        ]
        mixed = [*FEED, *forward([*PREFILL_LAYER, "attention", "combine"], 16, ["argmax"]), *READ]
        steps += [mixed] * choice.randint(0, 2)
        steps += [[*FEED, *forward(DECODE_LAYER, 16, ["argmax"]), *READ]] * choice.randint(2, 12)
    return spec(steps)


def continuous_batching() -> dict[str, Any]:
    """Requests join (prefill with them) and leave; the kernels follow the size of the batch."""
    choice = random.Random(4)
    steps, batch = [], 2
    for _ in range(80):
        batch = max(1, min(12, batch + choice.choice((-1, 0, 0, 1))))
        joins = choice.random() < 0.15
        layer = [*PREFILL_LAYER, "attention"] if joins else BATCH_LAYER if batch > 6 else DECODE_LAYER
        tail = (["softmax", "sort"] if choice.random() < 0.3 else []) + ["argmax"]
        extra = launches(["fill", "scatter"]) if choice.random() < 0.25 else []
        steps.append([*FEED, *extra, *forward(layer, 16, tail), *READ])
    return spec(steps)


def graphs_by_batch_size() -> dict[str, Any]:
    """Replays of three graphs, eager prefill now and then."""
    choice = random.Random(5)
    steps = []
    for _ in range(70):
        if choice.random() < 0.12:
            steps.append([*FEED, *forward(PREFILL_LAYER, 20, ["argmax"]), *READ])
        else:
            steps.append([*FEED, {"graph": choice.choice(("b1", "b8", "b16"))}, *launches(["argmax"]), *READ])
    graphs = {"b1": graph(DECODE_LAYER, 20), "b8": graph(BATCH_LAYER, 20), "b16": graph([*BATCH_LAYER, "add"], 20)}
    return spec(steps, graphs=graphs)


def graphs_traced_whole() -> dict[str, Any]:
    steps = [[*FEED, {"graph": "b1"}, *launches(["softmax", "argmax"]), *READ] for _ in range(50)]
    return spec(steps, graphs={"b1": {**graph(DECODE_LAYER, 20), "trace": "graph"}})


def piecewise_graphs() -> dict[str, Any]:
    """A graph, attention outside it, a graph, …: many launches of graphs in one step."""
    graphs = {
        "first": {"kernels": ["embed", "norm", "gemm", "rope"]},
        "middle": {"kernels": ["gemm", "norm", "gemm", "act", "gemm", "norm", "gemm", "rope"]},
        "final": {"kernels": ["gemm", "norm", "gemm", "act", "gemm", "norm"]},
    }
    attention = launches(["cache", "attention"])
    middle = [action for _ in range(14) for action in (*attention, {"graph": "middle"})]
    step = [*FEED, {"graph": "first"}, *middle, *attention, {"graph": "final"}, *launches(["gemm", "argmax"]), *READ]
    return spec([step] * 30, graphs=graphs)


def two_streams() -> dict[str, Any]:
    """Inputs on a stream of their own, results on another, and the host one step ahead."""
    step = [
        {"copy": "h2d", "size": 4096, "stream": 13},
        {"record": "inputs", "stream": 13},
        {"wait": "inputs"},
        *forward(DECODE_LAYER, 20, ["argmax"]),
        {"record": "computed"},
        {"wait": "computed", "stream": 17},
        {"copy": "d2h", "size": 64, "stream": 17},
        {"record": "tokens", "stream": 17},
        {"sync": "event", "event": "tokens", "ago": 1},
    ]
    return spec([step] * 40)


def two_kernel_streams() -> dict[str, Any]:
    """Half of each layer runs beside the other half."""
    layer: list[Action] = [
        *launches(["norm", "gemm"]), {"record": "a"}, {"wait": "a", "stream": 20}, *launches(["gemm2", "splitk", "add"], 20),
        *launches(["rope", "cache", "attention", "gemm"]), {"record": "b", "stream": 20}, {"wait": "b"}, *launches(["norm", "act"]),
    ]  # fmt: skip
    step = [*FEED, *launches(["embed"]), *layer * 14, *launches(["gemm", "argmax"]), *READ]
    return spec([step] * 30)


def two_processes() -> dict[str, Any]:
    """Two engines share one GPU, each with steps of its own."""
    return base([_engine(4200 + i, 12 + 6 * i, 30 - 8 * i, 0) for i in range(2)])


def two_devices() -> dict[str, Any]:
    return base([_engine(4200 + i, 16, 24, i) for i in range(2)], devices=[{}, {}])


def _engine(pid: int, layers: int, steps: int, device: int) -> dict[str, Any]:
    run: list[Action] = []
    for number in range(steps):
        layer = PREFILL_LAYER if number % 7 == 0 else DECODE_LAYER
        run += [{"range": f"step {number}", "do": [*FEED, *forward(layer, layers, ["argmax"]), *READ]}, SCHEDULE]
    return {"pid": pid, "name": "engine", "device": device, "threads": [{"name": "main", "run": run}]}


def mixture_of_experts() -> dict[str, Any]:
    """The router of each layer looks like sampling."""
    return spec([[*FEED, *forward(MOE_LAYER, 16, ["softmax", "argmax"]), *READ] for _ in range(30)])


def sync_in_each_layer() -> dict[str, Any]:
    layer: list[Action] = [
        *launches(DECODE_LAYER),
        {"copy": "d2h", "size": 4, "memory": "pageable"},
        {"sync": "stream"},
    ]
    step = [*FEED, *launches(["embed"]), *layer * 10, *launches(["norm", "gemm", "argmax"]), *READ]
    return spec([step] * 25)


def offloaded_weights() -> dict[str, Any]:
    """The weights of each layer come over the bus."""
    layer: list[Action] = [{"copy": "h2d", "size": "20MB"}, *launches(DECODE_LAYER)]
    step = [*launches(["embed"]), *layer * 10, *launches(["norm", "gemm", "argmax"]), *READ]
    return spec([step] * 20)


def with_start_up() -> dict[str, Any]:
    """Weights, fills and modules first, then warm-up, then steps."""
    before: list[Action] = [{"copy": "h2d", "size": "32MB"} for _ in range(40)]
    before += [*launches(["fill", "add", "fill"] * 100), {"load_module": "80ms"}, {"malloc": "1GB"}]
    return spec([[*FEED, *forward(DECODE_LAYER, 20, ["argmax"]), *READ] for _ in range(40)], before=before)


def no_layers() -> dict[str, Any]:
    """A pass in which no kernel comes twice in a row of its like, as a compiled vision model's."""
    names = ["embed", "gemm", "norm", "gemm2", "splitk", "act", "add", "big", "softmax", "scatter", "combine"]
    return spec([[*launches(names), {"sync": "device"}] for _ in range(60)])


WORKLOADS = (
    decode_eager, decode_without_sync, decode_no_pause, sampling_varies, prefill_mixed_in, chunked_prefill,
    continuous_batching, graphs_by_batch_size, graphs_traced_whole, piecewise_graphs, two_streams, two_kernel_streams,
    two_processes, two_devices, mixture_of_experts, sync_in_each_layer, offloaded_weights, with_start_up, no_layers,
)  # fmt: skip
