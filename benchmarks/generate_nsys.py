"""Writes a large nsys SQLite export (schema of 2023.4) for measuring speed: any size, plausible content.

    python benchmarks/generate_nsys.py OUT.sqlite --kernels 1_000_000

Per million kernels: 2.5 million CUDA API calls, one million NVTX ranges, two million counter samples, and per step of
1,000 kernels four copies, one synchronisation and eight OS-runtime calls. One process decodes on one GPU: each step
launches its kernels, waits for them, and then schedules the next one. Same arguments, same content.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infprof.simulator import TraceBuilder, schema

Array = npt.NDArray[np.int64]

KERNELS_PER_STEP = 1_000
KERNELS_PER_LAYER = 20
STEPS_PER_CHUNK = 100
METRIC_PERIOD_NS = 50_000
START_NS = 2_000_000_000
DISPATCH_NS = 1_500
PID = 5000

# (demangled name, median duration in ns); the order is that of a layer
KERNELS = [
    (
        "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, (int)8>(T1 *, long, T1 *, const T1 *, float, int, int)",
        2_400,
    ),
    ("nvjet_tst_64x32_64x12_4x1_v_bz_TNT", 14_000),
    ("void vllm::rotary_embedding_kernel<c10::BFloat16, (bool)1>(const long *, T1 *, T1 *, const T1 *, int)", 2_100),
    (
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>(const T1 *, const T1 *, T2 *, T2 *)",
        2_200,
    ),
    (
        "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<(int)128, (int)64>>(flash::Flash_fwd_params)",
        11_000,
    ),
    ("nvjet_tst_64x32_64x16_2x1_v_bz_splitK_TNT", 9_000),
    ("void cublasLt::splitKreduce_kernel<(int)32, (int)16, int, float, __nv_bfloat16>(cublasSplitKParams<T4>)", 2_500),
    ("void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>>(T1 *, const T1 *, int)", 3_000),
    ("void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<c10::BFloat16>>(int)", 1_900),
    ("triton_poi_fused_add_mul_silu_7", 2_000),
]
METRICS = [
    "GR Active",
    "SMs Active",
    "SM Issue",
    "Tensor Active",
    "DRAM Read Bandwidth",
    "DRAM Write Bandwidth",
    "PCIe RX Throughput",
    "PCIe TX Throughput",
    "NVLink RX Responses User Data",
    "NVLink TX Responses User Data",
]
RANGES = ["aten::linear", "vllm::unified_attention", "aten::add", "vllm::silu_and_mul"]

BULK_TABLES = [
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
    "NVTX_EVENTS",
    "OSRT_API",
    "GPU_METRICS",
]


class Output:
    """The open export: small tables from the builder, the large ones filled column by column."""

    def __init__(self, path: Path) -> None:
        builder = TraceBuilder("2023.4")
        builder.gpu()
        process = builder.process(PID, "VLLM::EngineCore")
        self.pid = process.global_pid
        self.tid = process.thread().global_tid
        self.io_tid = process.thread(PID + 1, "io").global_tid
        names = [name for name, _ in KERNELS]
        self.kernel_ids = np.array([builder.string(name) for name in names])
        self.short_ids = np.array([builder.string(name.split("<")[0].split("::")[-1]) for name in names])
        self.range_ids = [builder.string(name) for name in RANGES]
        self.string = builder.string
        for name in (*_API_NAMES, "cudaMemcpyAsync_v3020", "cudaStreamSynchronize_v3020", "poll"):
            builder.string(name)
        self.metric_type = 2 << 56
        for number, name in enumerate(METRICS, 1):
            builder.row(
                "TARGET_INFO_GPU_METRICS",
                typeId=self.metric_type,
                sourceId=1,
                typeName="GPU Metrics [NVIDIA H100 80GB HBM3]",
                metricId=number,
                metricName=f"{name} [Throughput %]",
            )
        builder.write(path)
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.execute("PRAGMA journal_mode = OFF")
        self.db.execute("PRAGMA synchronous = OFF")
        self.db.execute("BEGIN")
        self.columns = schema.tables("2023.4")
        for table in BULK_TABLES:
            schema.create_table(self.db, table, self.columns[table])
        schema.write_enums(self.db, BULK_TABLES, "2023.4")

    def insert(self, table: str, **values: Any) -> None:
        """Rows of ``table``: arrays are columns, anything else is the same in every row, the rest is NULL or 0."""
        varying = {name: value.ravel().tolist() for name, value in values.items() if isinstance(value, np.ndarray)}
        places = []
        for column in self.columns[table]:
            constant = values.get(column.name, 0 if column.not_null else None)
            places.append("?" if column.name in varying else "NULL" if constant is None else repr(constant))
        order = [column.name for column in self.columns[table] if column.name in varying]
        sql = f"INSERT INTO {table} VALUES ({', '.join(places)})"
        self.db.executemany(sql, zip(*(varying[name] for name in order), strict=True))

    def close(self, end_ns: int) -> None:
        self.db.execute(
            "UPDATE ANALYSIS_DETAILS SET startTime = ?, stopTime = ?, duration = ?",
            (START_NS - 100_000_000, end_ns + 100_000_000, end_ns - START_NS + 200_000_000),
        )
        self.db.execute("COMMIT")
        self.db.close()


# Two kernels take five calls: launch, query, launch, query, record.
_API_NAMES = (
    "cudaLaunchKernel_v7000",
    "cudaStreamIsCapturing_v10000",
    "cudaLaunchKernel_v7000",
    "cudaStreamIsCapturing_v10000",
    "cudaEventRecordWithFlags_v11010",
)
_API_MEDIAN_NS = np.array([4_200, 350, 4_200, 350, 800])


def generate(path: Path, kernels: int, seed: int = 1) -> dict[str, int]:
    """Write the export to ``path`` and return its row counts; ``kernels`` is rounded up to whole steps of 1,000."""
    steps = -(-kernels // KERNELS_PER_STEP)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        out = Output(temporary)
        now, correlation = START_NS, 1
        for first in range(0, steps, STEPS_PER_CHUNK):
            rng = np.random.default_rng([seed, first])
            now, correlation = write_chunk(out, rng, min(STEPS_PER_CHUNK, steps - first), now, correlation)
        write_metrics(out, np.random.default_rng([seed, steps]), START_NS, now, 2 * steps * KERNELS_PER_STEP)
        rows = {table: out.db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in BULK_TABLES}
        out.close(now)
        os.replace(temporary, path)
        return rows
    finally:
        temporary.unlink(missing_ok=True)


def write_chunk(out: Output, rng: np.random.Generator, steps: int, now: int, correlation: int) -> tuple[int, int]:
    """Write ``steps`` steps from ``now`` on; returns the time and the correlation id after them."""
    pairs = KERNELS_PER_STEP // 2
    calls_per_step = 5 * pairs + 5  # four copies and one synchronisation
    call_ns = spread(rng, np.broadcast_to(_API_MEDIAN_NS, (steps, pairs, 5)))
    # the host needs some time between a query and the next launch
    between = np.broadcast_to(np.array([200, 900, 200, 900, 1_200]), call_ns.shape)
    ends = np.cumsum((call_ns + between).reshape(steps, -1), axis=1).reshape(call_ns.shape) - between + 30_000
    starts = ends - call_ns

    names = np.arange(KERNELS_PER_STEP) % len(KERNELS)
    kernel_ns = spread(rng, np.broadcast_to(np.array([ns for _, ns in KERNELS])[names], (steps, KERNELS_PER_STEP)))
    launch_end = ends[:, :, [0, 2]].reshape(steps, KERNELS_PER_STEP)
    launch_start = starts[:, :, [0, 2]].reshape(steps, KERNELS_PER_STEP)
    kernel_start = in_order(launch_end + DISPATCH_NS, kernel_ns + 500)
    kernel_end = kernel_start + kernel_ns

    launched = ends[:, -1, -1][:, None]
    copied_back = np.maximum(kernel_end[:, -1][:, None], launched + 20_000) + np.array([1_000, 4_000])
    sync_end = copied_back[:, -1] + 5_000
    step_ns = sync_end + spread(rng, np.full(steps, 900_000))
    offset = (now + np.concatenate([[0], np.cumsum(step_ns)[:-1]]))[:, None]
    first_id = (correlation + calls_per_step * np.arange(steps))[:, None]

    call_ids = first_id + np.arange(5 * pairs)
    launch_ids = call_ids.reshape(steps, pairs, 5)[:, :, [0, 2]].reshape(steps, KERNELS_PER_STEP)
    pid, tid = out.pid, out.tid
    out.insert(
        "CUPTI_ACTIVITY_KIND_KERNEL",
        start=kernel_start + offset,
        end=kernel_end + offset,
        contextId=1,
        streamId=7,
        correlationId=launch_ids,
        globalPid=pid,
        demangledName=np.tile(out.kernel_ids[names], steps),
        shortName=np.tile(out.short_ids[names], steps),
        launchType=1,
        registersPerThread=64,
        gridX=np.tile(32 + 4 * names, steps),
        gridY=1,
        gridZ=1,
        blockX=256,
        blockY=1,
        blockZ=1,
        gridId=launch_ids,
    )
    api_ids = np.array([out.string(name) for name in _API_NAMES])
    out.insert(
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        start=starts.reshape(steps, -1) + offset,
        end=ends.reshape(steps, -1) + offset,
        globalTid=tid,
        correlationId=call_ids,
        nameId=np.tile(api_ids, steps * pairs),
    )
    ranges = {"eventType": 59, "globalTid": tid, "domainId": 0}
    per_kernel = np.array(out.range_ids)[names % len(RANGES)]
    out.insert(
        "NVTX_EVENTS",
        start=launch_start - 400 + offset,
        end=launch_end + 150 + offset,
        textId=np.tile(per_kernel, steps),
        **ranges,
    )
    layers = launch_start[:, ::KERNELS_PER_LAYER] - 600 + offset
    layer_ends = launch_end[:, KERNELS_PER_LAYER - 1 :: KERNELS_PER_LAYER] + 200 + offset
    out.insert("NVTX_EVENTS", start=layers, end=layer_ends, text="decoder_layer", **ranges)
    step_end = offset[:, 0] + sync_end + 1_000
    out.insert("NVTX_EVENTS", start=offset[:, 0], end=step_end, text="execute_context_0(0)_generation_32(32)", **ranges)
    write_copies(out, first_id + 5 * pairs, offset, launched, copied_back, sync_end[:, None])
    poll_start = offset + np.arange(8) * 400_000
    out.insert(
        "OSRT_API",
        start=poll_start,
        end=poll_start + spread(rng, np.full(poll_start.shape, 300_000)),
        eventClass=27,
        globalTid=out.io_tid,
        nameId=out.string("poll"),
        nestingLevel=0,
    )
    return int(offset[-1, 0] + step_ns[-1]), correlation + calls_per_step * steps


def write_copies(out: Output, ids: Array, offset: Array, launched: Array, copied_back: Array, sync_end: Array) -> None:
    """Per step two copies to the device before its kernels and two back after them, then the synchronisation.

    ``launched``: end of the last launch call; ``copied_back``: start of the two copies to the host.
    """
    calls = np.array([2_000, 10_000])
    call_start = np.concatenate([calls + 0 * launched, launched + calls], axis=1) + offset
    copy_start = np.concatenate([calls + 6_000 + 0 * launched, copied_back], axis=1) + offset
    copy_ids = ids + np.arange(4)
    to_host = np.tile(np.array([0, 0, 1, 1]), len(offset))
    out.insert(
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        start=call_start,
        end=call_start + 5_000,
        globalTid=out.tid,
        correlationId=copy_ids,
        nameId=out.string("cudaMemcpyAsync_v3020"),
    )
    out.insert(
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        start=copy_start,
        end=copy_start + 1_500,
        contextId=1,
        streamId=7,
        correlationId=copy_ids,
        globalPid=out.pid,
        bytes=np.tile(np.array([4096, 8192, 256, 64]), len(offset)),
        copyKind=1 + to_host,
        srcKind=1 + to_host,
        dstKind=2 - to_host,
    )
    sync = {"start": launched + offset + 17_000, "end": sync_end + offset, "correlationId": ids + 4}
    name = out.string("cudaStreamSynchronize_v3020")
    out.insert("CUPTI_ACTIVITY_KIND_RUNTIME", globalTid=out.tid, nameId=name, **sync)
    out.insert(
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
        contextId=1,
        streamId=7,
        globalPid=out.pid,
        syncType=3,
        eventId=4294967295,
        **sync,
    )


def write_metrics(out: Output, rng: np.random.Generator, start: int, end: int, rows: int) -> None:
    """``rows`` counter samples, spread evenly over the run, in pieces that bound the memory."""
    samples = max(1, rows // len(METRICS))
    period = max(METRIC_PERIOD_NS // 10, (end - start) // samples)
    piece = 20_000
    level = np.array([97, 88, 24, 15, 78, 3, 0, 0, 0, 0])
    for first in range(0, samples, piece):
        times = start + period * np.arange(first, min(first + piece, samples))
        noise = rng.integers(-3, 4, (len(times), len(METRICS)))
        out.insert(
            "GPU_METRICS",
            timestamp=np.repeat(times, len(METRICS)),
            typeId=out.metric_type,
            metricId=np.tile(np.arange(1, len(METRICS) + 1), len(times)),
            value=np.clip(level + noise, 0, 100),
        )


def spread(rng: np.random.Generator, median_ns: Array) -> Array:
    """Times that scatter around their medians by about a tenth, with a long tail."""
    return np.asarray(median_ns * rng.lognormal(0.0, 0.12, median_ns.shape), dtype=np.int64)


def in_order(ready: Array, took: Array) -> Array:
    """Start times along the last axis where each item needs its ``ready`` time and the end of the item before it."""
    before = np.cumsum(took, axis=-1) - took
    return np.asarray(np.maximum.accumulate(ready - before, axis=-1) + before, dtype=np.int64)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a large nsys SQLite export for measuring speed.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kernels", type=lambda text: int(text.replace("_", "")), default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    rows = generate(options.out, options.kernels, options.seed)
    size = options.out.stat().st_size / 1e6
    print(f"{options.out}: {size:.0f} MB in {time.perf_counter() - began:.1f} s")
    for table, count in rows.items():
        print(f"  {table:36} {count:>10,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
