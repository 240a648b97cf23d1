"""Writes a large trace of PyTorch's profiler (JSON of torch 2.13) for measuring speed: any size, plausible content.

    python benchmarks/generate_kineto.py OUT.json[.gz] --events 3_000_000 --python-share 0.9

One process decodes eagerly on one GPU: each step of 500 kernels is a ProfilerStep with, per kernel, two nested operators
with shapes, a launch call, the kernel and its two flow events; a copy in, a copy out and a synchronisation. With a
``--python-share`` that part of the events are Python frames with long names, nested around the operators. Same
arguments, same content. The memory taken does not grow with the size: pieces are made, written and made again for the
next kind of event, as Kineto writes one kind after the other.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np

from generate_nsys import Array, in_order, spread
from infprof.simulator.kineto import device_properties
from infprof.simulator.kineto_text import DIALECTS, Writer
from infprof.simulator.spec import Device

KERNELS_PER_STEP = 500
EVENTS_PER_KERNEL = 6  # two operators, call, kernel, two flows
STEPS_PER_CHUNK = 100
EPOCH_NS = 1_767_189_312_000_000_000 + 1_365_627_862_757_064_000
PID = 6583
FRAME_NS = 300  # what a Python frame costs on either side of what it calls

# (operator outside, operator inside, input dims, input types, kernel, median duration in ns); the order of a layer
LAYER = [
    (
        "vllm::rms_norm",
        "_C::fused_add_rms_norm",
        "[[32, 4096], [32, 4096], [4096], []]",
        '["c10::BFloat16", "c10::BFloat16", "c10::BFloat16", "Scalar"]',
        "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long, c10::BFloat16*, "
        "c10::BFloat16 const*, float, int, int)",
        2_400,
    ),
    (
        "aten::linear",
        "aten::mm",
        "[[32, 4096], [4096, 6144]]",
        '["c10::BFloat16", "c10::BFloat16"]',
        "nvjet_tst_64x32_64x12_4x1_v_bz_TNT",
        17_000,
    ),
    (
        "vllm::rotary_embedding",
        "_C::rotary_embedding",
        "[[32], [32, 4096], [32, 1024], [], [131072, 128], []]",
        '["long int", "c10::BFloat16", "c10::BFloat16", "Scalar", "c10::BFloat16", "Scalar"]',
        "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*, c10::BFloat16*, "
        "c10::BFloat16 const*, int, long, long, long, int, int, int)",
        2_100,
    ),
    (
        "vllm::unified_attention_with_output",
        "flash::varlen_fwd",
        "[[32, 32, 128], [32, 8, 128], [32, 8, 128], [32, 32, 128]]",
        '["c10::BFloat16", "c10::BFloat16", "c10::BFloat16", "c10::BFloat16"]',
        "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false, false, "
        "cutlass::bfloat16_t>, false, false, false, false, true, false, true, false>(flash::Flash_fwd_params)",
        11_000,
    ),
    (
        "aten::linear",
        "aten::mm",
        "[[32, 4096], [4096, 4096]]",
        '["c10::BFloat16", "c10::BFloat16"]',
        "nvjet_tst_64x32_64x16_2x1_v_bz_splitK_TNT",
        13_000,
    ),
    (
        "vllm::silu_and_mul",
        "_C::silu_and_mul",
        "[[32, 14336], [32, 28672]]",
        '["c10::BFloat16", "c10::BFloat16"]',
        "void vllm::act_and_mul_kernel<c10::BFloat16, &(c10::BFloat16 vllm::silu_kernel<c10::BFloat16>("
        "c10::BFloat16 const&)), true>(c10::BFloat16*, c10::BFloat16 const*, int)",
        3_000,
    ),
    (
        "aten::add",
        "aten::add_",
        "[[32, 4096], [32, 4096], []]",
        '["c10::BFloat16", "c10::BFloat16", "Scalar"]',
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
        "std::array<char*, 3ul>>(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)",
        1_900,
    ),
]


@dataclass
class Chunk:
    """The times of some steps, as arrays of (steps, kernels) or (steps, 1), in ns."""

    first_step: int
    operator_id: Array
    correlation: Array
    call: tuple[Array, Array]
    kernel: tuple[Array, Array]
    launched: Array  # when the last operator of the step is through
    copies: tuple[Array, Array]  # starts on the GPU of the copy in and the copy out
    sync_end: Array
    step: tuple[Array, Array]


def chunk(seed: int, first_step: int, steps: int, now: int, depth: int) -> Chunk:
    """Steps from ``now`` on; ``depth`` frames of Python stand around each operator."""
    rng = np.random.default_rng([seed, first_step])
    shape = (steps, KERNELS_PER_STEP)
    median = np.array([row[5] for row in LAYER])[np.arange(KERNELS_PER_STEP) % len(LAYER)]
    call_ns = spread(rng, np.full(shape, 4_200))
    around = 2_500 + 2 * FRAME_NS * depth
    call_end = np.cumsum(call_ns + around, axis=1) - around // 2 + 20_000
    kernel_ns = spread(rng, np.broadcast_to(median, shape))
    kernel_start = in_order(call_end + 1_500, kernel_ns + 600)
    launched = call_end[:, -1:] + around
    out = np.maximum(kernel_start[:, -1:] + kernel_ns[:, -1:] + 1_000, launched + 8_000)
    sync_end = out + 6_000
    step_ns = sync_end[:, 0] + spread(rng, np.full(steps, 700_000))
    at = (now + np.concatenate([[0], np.cumsum(step_ns)[:-1]]))[:, None]
    number = first_step + np.arange(steps)[:, None]
    return Chunk(
        first_step,
        1 + number * (2 * KERNELS_PER_STEP + 3) + 2 * np.arange(KERNELS_PER_STEP),
        1 + number * (KERNELS_PER_STEP + 3) + np.arange(KERNELS_PER_STEP),
        (call_end - call_ns + at, call_end + at),
        (kernel_start + at, kernel_start + kernel_ns + at),
        launched + at,
        (np.full((steps, 1), 9_000) + at, out + at),
        sync_end + at,
        (at, at + step_ns[:, None] - 50_000),
    )


def stamps(ns: Array) -> list[str]:
    return [f"{value // 1000}.{value % 1000:03}" for value in ns.ravel().tolist()]


def complete(cat: str, names: Iterable[str], place: str, start: Array, end: Array, args: Iterable[str]) -> list[str]:
    """Events of one category; ``names`` and ``args`` are JSON text."""
    return [
        f'  {{\n    "ph": "X", "cat": "{cat}", "name": {name}, {place},\n    "ts": {ts}, "dur": {dur},\n'
        f'    "args": {{\n      {arg}\n    }}\n  }}'
        for name, ts, dur, arg in zip(names, stamps(start), stamps(end - start), args, strict=True)
    ]


def flows(start: bool, ids: list[int], place: str, at: Array) -> list[str]:
    ph, more = ("s", "") if start else ("f", ', "bp": "e"')
    return [
        f'  {{\n    "ph": "{ph}", "id": {flow}, {place}, "ts": {ts},\n    "cat": "ac2g", "name": "ac2g"{more}\n  }}'
        for flow, ts in zip(ids, stamps(at), strict=True)
    ]


HOST = f'"pid": {PID}, "tid": {PID}'
GPU = '"pid": 0, "tid": 7'


def operators(part: Chunk, depth: int) -> list[str]:
    """A step's annotation and its operators, the outer one before the inner one."""
    layer = [LAYER[n % len(LAYER)] for n in range(KERNELS_PER_STEP)] * len(part.operator_id)
    ids = part.operator_id.ravel().tolist()
    call_start, call_end = part.call
    shapes = [f'"Input type": {types}, "Input Dims": {dims}' for _, _, dims, types, _, _ in layer]

    def row(add: int) -> Iterator[str]:
        return (
            f'"External id": {id_ + add}, "Record function id": 0, {shape}, "Ev Idx": {id_ + add - 1}'
            for id_, shape in zip(ids, shapes, strict=True)
        )

    outer = complete("cpu_op", (f'"{r[0]}"' for r in layer), HOST, call_start - 900, call_end + 300, row(0))
    inner = complete("cpu_op", (f'"{r[1]}"' for r in layer), HOST, call_start - 500, call_end + 200, row(1))
    pairs = [text for pair in zip(outer, inner, strict=True) for text in pair]
    numbers = range(part.first_step, part.first_step + len(part.step[0]))
    ids_of_steps = (part.operator_id[:, -1] + 2).tolist()
    steps = complete(
        "user_annotation",
        (f'"ProfilerStep#{n}"' for n in numbers),
        HOST,
        *part.step,
        (f'"External id": {n}, "Record function id": 0, "Ev Idx": {n - 1}' for n in ids_of_steps),
    )
    return steps + pairs


FRAME_NAMES = [
    f'"/usr/local/lib/python3.12/site-packages/vllm/model_executor/{module}/{name}.py({17 * n + 3}): {call}"'
    for n, (module, name, call) in enumerate(
        (module, name, call)
        for module in ("layers/quantization", "layers/fused_moe", "models", "layers", "parameter", "custom_op")
        for name in ("linear", "llama", "attention_backend_selector", "rotary_embedding_common", "vocab_parallel")
        for call in ("forward", "__call__", "apply_weights_with_bias", "forward_native_or_custom_dispatch")
    )
] + [f'"nn.Module: LlamaDecoderLayer_{n}"' for n in range(32)]


def frames(part: Chunk, depth: int) -> list[str]:
    """``depth`` nested frames around every operator, outermost first."""
    count = part.correlation.size
    level = np.arange(depth, 0, -1)  # the outermost is the widest
    start = part.call[0].reshape(-1, 1) - 1_000 - FRAME_NS * level
    end = part.call[1].reshape(-1, 1) + 400 + FRAME_NS * level
    first = (part.correlation.reshape(-1, 1) - 1) * depth
    ids = (first + np.arange(1, depth + 1)).ravel().tolist()
    parents = np.where(np.arange(depth) > 0, first + np.arange(depth), -1).ravel().tolist()
    names = [FRAME_NAMES[(7 * n + n // depth) % len(FRAME_NAMES)] for n in range(count * depth)]
    args = (
        f'"Python parent id": {"null" if parent < 0 else parent}, "Python id": {id_}, "Ev Idx": {id_ + 10**9}'
        for parent, id_ in zip(parents, ids, strict=True)
    )
    return complete("python_function", names, HOST, start, end, args)


def activities(part: Chunk, depth: int) -> list[str]:
    """Calls, kernels, copies and their flows, step after step."""
    layer = [LAYER[n % len(LAYER)] for n in range(KERNELS_PER_STEP)] * len(part.operator_id)
    correlations = part.correlation.ravel().tolist()
    linked = list(zip((part.operator_id + 1).ravel().tolist(), correlations, strict=True))
    kernels = complete(
        "kernel",
        (f'"{row[4]}"' for row in layer),
        GPU,
        *part.kernel,
        (
            f'"External id": {op}, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": {id_}, '
            '"registers per thread": 64, "shared memory": 32768, "blocks per SM": 0.969697, "warps per SM": 7.757576, '
            '"grid": [128, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 12'
            for op, id_ in linked
        ),
    )
    calls = complete(
        "cuda_runtime",
        ['"cudaLaunchKernel"'] * len(linked),
        HOST,
        *part.call,
        (f'"External id": {op}, "cbid": 211, "correlation": {id_}' for op, id_ in linked),
    )
    ends, starts = flows(False, correlations, GPU, part.kernel[0]), flows(True, correlations, HOST, part.call[0])
    launches = [text for four in zip(kernels, ends, calls, starts, strict=True) for text in four]
    return launches + copies(part)


def copies(part: Chunk) -> list[str]:
    """Per step the copy in, the copy out and the wait for it, and the annotation's shadow on the stream."""
    texts: list[str] = []
    last = part.correlation[:, -1:]
    gpu_in, gpu_out = part.copies
    for add, gpu, call, kind in [
        (1, gpu_in, gpu_in - 7_000, "HtoD (Pinned -> Device)"),
        (2, gpu_out, part.launched, "DtoH (Device -> Pinned)"),
    ]:
        ids = (last + add).ravel().tolist()
        args = (
            f'"device": 0, "context": 1, "stream": 7, "correlation": {id_}, "bytes": 4096, '
            '"memory bandwidth (GB/s)": 2.73'
            for id_ in ids
        )
        texts += complete("gpu_memcpy", [f'"Memcpy {kind}"'] * len(ids), GPU, gpu, gpu + 1_500, args)
        args = (f'"cbid": 41, "correlation": {id_}' for id_ in ids)
        texts += complete("cuda_runtime", ['"cudaMemcpyAsync"'] * len(ids), HOST, call, call + 4_500, args)
        texts += flows(True, ids, HOST, call) + flows(False, ids, GPU, gpu)
    ids = (last + 3).ravel().tolist()
    sync = part.launched + 5_000
    args = (f'"cbid": 131, "correlation": {id_}' for id_ in ids)
    texts += complete("cuda_runtime", ['"cudaStreamSynchronize"'] * len(ids), HOST, sync, part.sync_end, args)
    numbers = range(part.first_step, part.first_step + len(part.step[0]))
    shadow = gpu_in - 1, gpu_out + 1_501
    args = (f'"External id": {id_}' for id_ in (part.operator_id[:, -1] + 2).tolist())
    return texts + complete("gpu_user_annotation", (f'"ProfilerStep#{n}"' for n in numbers), GPU, *shadow, args)


def generate(path: Path, events: int, python_share: float = 0.0, seed: int = 1) -> int:
    """Write the trace to ``path`` and return how many events it has: ``events``, rounded up to whole steps."""
    depth = round(EVENTS_PER_KERNEL * python_share / (1 - python_share))
    steps = max(1, -(-events // (KERNELS_PER_STEP * (EVENTS_PER_KERNEL + depth))))
    pieces: list[tuple[int, int, int]] = []
    now = 1_000_000
    for first in range(0, steps, STEPS_PER_CHUNK):
        pieces.append((first, min(STEPS_PER_CHUNK, steps - first), now))
        now = int(chunk(seed, *pieces[-1], depth).step[1][-1, 0]) + 100_000
    writer = Writer(DIALECTS["2.13"], EPOCH_NS)
    shift = EPOCH_NS - writer.base_ns
    head = {
        "schemaVersion": 1,
        "deviceProperties": [device_properties(0, Device())],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
        "record_shapes": 1,
        "with_stack": int(depth > 0),
    }
    before, after = writer.document(head, ["EVENTS"], path.name).split("EVENTS")
    metadata = [
        writer.metadata("process_name", PID, 0, 0, {"name": "python3"}),
        writer.metadata("process_labels", PID, 0, 0, {"labels": "CPU"}),
        writer.metadata("process_labels", 0, 0, 0, {"labels": "GPU 0"}),
        writer.metadata("thread_name", PID, PID, 0, {"name": f"thread {PID} (python3)"}),
        writer.metadata("thread_name", 0, 7, 0, {"name": "stream 7 "}),
    ]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    written = len(metadata)
    try:
        with open_output(temporary, path.suffix == ".gz") as file:
            file.write((before + ",\n".join(metadata)).encode())
            for make in (operators, *([frames] if depth else []), activities):
                for first, count, at in pieces:
                    texts = make(chunk(seed, first, count, at + shift, depth), depth)
                    written += len(texts)
                    file.write((",\n" + ",\n".join(texts)).encode())
            closing = writer.closing((0, now))
            file.write((",\n" + ",\n".join(closing) + after).encode())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return written + len(closing)


def open_output(path: Path, compressed: bool) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "wb", compresslevel=1)) if compressed else path.open("wb")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a large trace of PyTorch's profiler for measuring speed.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--events", type=lambda text: int(text.replace("_", "")), default=3_000_000)
    parser.add_argument("--python-share", type=float, default=0.0, help="part of the events that are Python frames")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if not 0 <= options.python_share < 1:
        parser.error("--python-share is a number from 0 to under 1")
    began = time.perf_counter()
    count = generate(options.out, options.events, options.python_share, options.seed)
    size = options.out.stat().st_size / 1e6
    print(f"{options.out}: {count:,} events, {size:.0f} MB in {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
