"""Writes a simulated run as PyTorch's profiler (Kineto) would have recorded it: one JSON file per process.

The clock, the calls, the GPU work and the ranges are those of the nsys export, to the nanosecond (dialects up to 2.2
cut to microseconds). A process becomes a file when it has used CUDA, as engines profile their workers.

What Kineto has no rows for is left out, and ``not_in_kineto`` lists it for a given run: operating-system calls (with
``stack`` the Python call that makes them is a frame), GPU metrics, processes without CUDA, the time of a module load
outside of its overhead row, the thread that an overhead stopped, and CUDA graphs traced as a whole, which Kineto always
records node by node: a spec with ``trace: graph`` is refused.
"""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any

from infprof.errors import UsageError
from infprof.reports.files import atomic_file, check_target
from infprof.simulator.engine import SimulatedTrace
from infprof.simulator.kineto_process import Options, ProcessEvents
from infprof.simulator.kineto_text import DIALECTS, Writer
from infprof.simulator.spec import Device

_EPOCH_NS = 1_700_000_000_000_000_000  # Unix time of the simulation's time 0, as in the nsys export
_GPU_ROWS = 8  # Kineto names the rows of eight GPUs, present or not


def write_kineto(
    trace: SimulatedTrace,
    path: str | Path,
    *,
    dialect: str = "2.13",
    stack: bool = False,
    sync_events: bool = False,
    force: bool = False,
) -> list[Path]:
    """Write ``trace`` to ``path`` (gzip where it ends in .gz) and return the files written, by rank.

    A run of several processes that use CUDA becomes one file each, named after vLLM's: ``run.json.gz`` gives
    ``run_dp0_pp0_tp1_dcp0_ep0_rank1.<ns>.pt.trace.json.gz``. ``dialect`` is the version of torch ("1.12", "2.2",
    "2.4", "2.13"); ``stack`` adds Python frames, ``sync_events`` the rows of category cuda_sync, both off by default as
    in torch. Same trace, same bytes. Raises UsageError for a run that Kineto cannot record, or a file in the way.
    """
    if dialect not in DIALECTS:
        raise UsageError(f"There is no dialect {dialect!r} of Kineto here; there are {', '.join(DIALECTS)}.")
    if any(op.kind == "graph" for op in trace.ops):
        raise UsageError(
            f"{trace.spec.name}: PyTorch's profiler records CUDA graphs node by node: set trace: node in the spec's "
            "graphs, or write an nsys export."
        )
    ranks = _ranks(trace)
    if not ranks:
        raise UsageError(f"{trace.spec.name}: no process uses CUDA, so PyTorch's profiler has nothing to record.")
    targets = _targets(trace, Path(path), ranks)
    for target in targets:
        check_target(target, force)
    world = len(ranks) if any(op.kind == "comm" for op in trace.ops) else None
    for rank, (process, target) in enumerate(zip(ranks, targets, strict=True)):
        options = Options(process, rank, world, stack, sync_events)
        text = _document(trace, options, dialect, target).encode("utf-8")
        with atomic_file(target, force) as file:
            file.write(gzip.compress(text, 6, mtime=0) if target.suffix == ".gz" else text)
    return targets


def not_in_kineto(trace: SimulatedTrace) -> list[str]:
    """What of this run an nsys export holds and PyTorch's profiler does not, one phrase each."""
    ranks = set(_ranks(trace))
    others = [p.name for number, p in enumerate(trace.spec.processes) if number not in ranks]
    lost = {
        "operating-system calls": bool(trace.os_calls),
        "GPU metrics": bool(trace.samples),
        f"processes without CUDA: {', '.join(others)}": bool(others),
        "the threads that profiler overhead stopped": bool(trace.overheads),
        "module loads as calls: they are overhead rows": any(c.name == "cuModuleLoadData" for c in trace.calls),
        "graph launches as one row each: no Kineto file can be written": any(op.kind == "graph" for op in trace.ops),
        "all processes in one file": len(ranks) > 1,
    }
    return [text for text, is_lost in lost.items() if is_lost]


def _ranks(trace: SimulatedTrace) -> list[int]:
    """The processes that used CUDA, in the order of the spec: a file each."""
    return sorted({call.process for call in trace.calls})


def _targets(trace: SimulatedTrace, path: Path, ranks: list[int]) -> list[Path]:
    if len(ranks) == 1:
        return [path]
    compressed = path.suffix == ".gz"
    stem = Path(path.stem).stem if compressed else path.stem
    tensor_parallel = any(op.kind == "comm" for op in trace.ops)
    ns = _EPOCH_NS + max(call.end_ns for call in trace.calls)
    names = [
        f"{stem}_dp{0 if tensor_parallel else rank}_pp0_tp{rank if tensor_parallel else 0}_dcp0_ep0_rank{rank}"
        for rank in range(len(ranks))
    ]
    return [path.with_name(f"{name}.{ns}.pt.trace.json{'.gz' if compressed else ''}") for name in names]


def _document(trace: SimulatedTrace, options: Options, dialect: str, target: Path) -> str:
    writer = Writer(DIALECTS[dialect], _EPOCH_NS)
    process = ProcessEvents(trace, writer, options)
    events = process.events()
    span = process.span()
    names = _names(trace, writer, options, process, span[0])
    body = names + events if writer.dialect.metadata_first else events + names
    return writer.document(_head(trace, writer, options), body + writer.closing(span), target.name)


def _head(trace: SimulatedTrace, writer: Writer, options: Options) -> dict[str, Any]:
    spec = trace.spec
    head: dict[str, Any] = {
        "schemaVersion": 1,
        "deviceProperties": [device_properties(number, device) for number, device in enumerate(spec.devices)],
        "cuda_runtime_version": 12090,
        "cuda_driver_version": 13000,
        "cupti_version": 28,
        "record_shapes": 1,
    }
    if writer.dialect.absolute_us:
        head = {key: head[key] for key in ("schemaVersion", "deviceProperties")}
    if options.world_size:
        ranks = list(range(options.world_size))
        group = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl"}
        head["distributedInfo"] = {"backend": "nccl", "rank": options.rank, "world_size": options.world_size}
        if not writer.dialect.absolute_us:
            group_config = [{**group, "pg_size": len(ranks), "ranks": ranks}]
            head["distributedInfo"] |= {"pg_count": 1, "pg_config": group_config, "nccl_version": "2.27.5"}
    if trace.memory:
        head["profile_memory"] = 1
    if options.stack:
        head["with_stack"] = 1
    if writer.dialect.trace_id:
        head["trace_id"] = hashlib.md5(f"{spec.name} {spec.seed} {options.rank}".encode()).hexdigest().upper()
    return head


def device_properties(number: int, device: Device) -> dict[str, Any]:
    """An entry of the top-level ``deviceProperties``."""
    return {
        "id": number,
        "name": device.name,
        "totalGlobalMem": device.memory_bytes,
        "computeMajor": device.compute[0],
        "computeMinor": device.compute[1],
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerMultiprocessor": 2048,
        "regsPerBlock": 65536,
        "warpSize": 32,
        "sharedMemPerBlock": 49152,
        "numSms": device.sm_count,
        "regsPerMultiprocessor": 65536,
        "sharedMemPerBlockOptin": 232448,
        "sharedMemPerMultiprocessor": 233472,
    }


def _names(trace: SimulatedTrace, writer: Writer, options: Options, process: ProcessEvents, at: int) -> list[str]:
    """The metadata events: processes, then threads and streams."""
    spec = trace.spec.processes[options.process]
    rows: list[tuple[str, int, int, dict[str, Any]]] = []
    for pid, label, order in [
        (spec.pid, "CPU", spec.pid),
        *((gpu, f"GPU {gpu}", 5_000_000 + gpu) for gpu in range(max(_GPU_ROWS, len(trace.spec.devices)))),
    ]:
        rows += [
            ("process_name", pid, 0, {"name": spec.name}),
            ("process_labels", pid, 0, {"labels": label}),
            ("process_sort_index", pid, 0, {"sort_index": order}),
        ]
    threads = [(spec.pid, spec.pid + n, f"thread {spec.pid + n} ({t.name})") for n, t in enumerate(spec.threads)]
    for pid, tid, name in [*((spec.device, stream, f"stream {stream} ") for stream in process.streams()), *threads]:
        rows += [("thread_name", pid, tid, {"name": name}), ("thread_sort_index", pid, tid, {"sort_index": tid})]
    return [writer.metadata(name, pid, tid, at, args) for name, pid, tid, args in rows]
