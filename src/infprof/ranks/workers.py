"""One file in, its diagnosis and its collectives out; over processes of this machine or over a dask cluster.

What comes out depends on the file alone, so neither the number of workers nor their order changes a result.
"""

from __future__ import annotations

import multiprocessing
import os
from asyncio import TimeoutError as AsyncTimeoutError  # another class before Python 3.11
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from infprof.diagnosis import Options, analyze_file_in_detail
from infprof.errors import EXIT_UNUSABLE, InfprofError, UsageError
from infprof.measures.collectives import DeviceCollectives, device_collectives
from infprof.results import Diagnosis

# A file whose worker dies is given to another one so often.
RETRIES = 2
# So long a cluster may be without any worker.
WORKER_WAIT_S = 30


@dataclass
class FileResult:
    """What became of one file: a diagnosis and what else comparing ranks needs, or the sentence that says why not."""

    diagnosis: Diagnosis | None = None
    collectives: list[DeviceCollectives] = field(default_factory=list)
    rank: int | None = None
    world_size: int | None = None
    clock_start_unix_ns: int | None = None
    failure: str | None = None
    exit_code: int = 0


PerFile = Callable[[Path, Options], FileResult]


def analyze_one(path: Path, options: Options) -> FileResult:
    """The per-file function: never raises, so that one file cannot stop the others."""
    try:
        detailed = analyze_file_in_detail(path, options)
    except InfprofError as error:
        return FileResult(failure=str(error), exit_code=error.exit_code)
    except MemoryError:
        return FileResult(failure=f"{path} needs more memory than there is.", exit_code=EXIT_UNUSABLE)
    except Exception as error:
        if os.environ.get("INFPROF_DEBUG"):
            raise
        return FileResult(
            failure=f"{path}: a defect of infprof, not of the input: {type(error).__name__}: {error}.",
            exit_code=EXIT_UNUSABLE,
        )
    prepared = detailed.prepared
    if prepared is None:
        return FileResult(detailed.diagnosis)
    trace = prepared.trace
    return FileResult(
        detailed.diagnosis,
        [device_collectives(prepared, time) for time in detailed.times],
        trace.rank,
        trace.world_size,
        trace.clock_start_unix_ns,
    )


def over_processes(
    paths: Sequence[Path], options: Options, jobs: int | None = None, per_file: PerFile = analyze_one
) -> list[FileResult]:
    """The result of each file, in the order of ``paths``, over ``jobs`` processes (default: one per file and core).

    A worker that dies (out of memory, most often) takes no other file with it: what was lost is done once more, alone.
    """
    count = min(len(paths), jobs or _cores())
    if count <= 1:
        return [per_file(path, options) for path in paths]
    with _pool(count) as pool:
        futures = [_submitted(pool, per_file, path, options) for path in paths]
        results = [_result(future) for future in futures]
    for i, result in enumerate(results):
        if result is None:
            with _pool(1) as pool:
                results[i] = _result(_submitted(pool, per_file, paths[i], options))
    return [_lost(path) if result is None else result for path, result in zip(paths, results, strict=True)]


def over_dask(
    paths: Sequence[Path], options: Options, address: str, per_file: PerFile = analyze_one
) -> list[FileResult]:
    """As ``over_processes``, on the workers of a dask cluster, which must be able to read the same paths.

    Files of a lost worker go to another one. Raises UsageError where dask is not installed or the scheduler at
    ``address`` does not answer.
    """
    try:
        from distributed import Client as DaskClient
    except ImportError:
        raise UsageError("--scheduler needs dask: install it with `pip install 'infprof[fleet]'`.") from None
    try:
        connect: Any = DaskClient
        client = connect(address, timeout=10, set_as_default=False)
    except (OSError, TimeoutError, AsyncTimeoutError, ValueError) as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise UsageError(f"--scheduler {address}: no dask scheduler answers there ({reason}).") from None
    with client:
        _wait_for_a_worker(client, address)
        submit = partial(client.submit, per_file, pure=False, retries=RETRIES)
        futures = [submit(path.absolute(), options) for path in paths]
        results = [_dask_result(client, future, path) for path, future in zip(paths, futures, strict=True)]
        lost = [i for i, result in enumerate(results) if result is None]
        if len(lost) > 1:
            # Whatever waited on a worker that died is blamed with what killed it: each once more, alone.
            for i in lost:
                results[i] = _dask_result(client, submit(paths[i].absolute(), options), paths[i])
        return [_lost(path) if result is None else result for path, result in zip(paths, results, strict=True)]


def _wait_for_a_worker(client: Any, address: str) -> None:
    try:
        client.wait_for_workers(1, timeout=WORKER_WAIT_S)
    except (TimeoutError, AsyncTimeoutError):
        raise UsageError(f"--scheduler {address}: the scheduler has no worker; start one with `dask worker`.") from None


def _dask_result(client: Any, future: Any, path: Path) -> FileResult | None:
    """The result of one file; None where its workers died each time, or no worker is left."""
    while True:
        try:
            error = future.exception(timeout=WORKER_WAIT_S)
            break
        except (TimeoutError, AsyncTimeoutError):
            if not client.scheduler_info()["workers"]:
                return None
    if error is None:
        result: FileResult = future.result()
        return result
    name = type(error).__name__
    if name == "KilledWorker":
        return None
    reason = str(error).split("\n")[0]
    return FileResult(failure=f"{path}: its worker failed: {name}: {reason}.", exit_code=EXIT_UNUSABLE)


def _pool(count: int) -> ProcessPoolExecutor:
    # Not forked: this process may have threads by now.
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def _submitted(pool: ProcessPoolExecutor, per_file: PerFile, path: Path, options: Options) -> Future[FileResult] | None:
    try:
        return pool.submit(per_file, path, options)
    except BrokenProcessPool:
        return None


def _result(future: Future[FileResult] | None) -> FileResult | None:
    try:
        return None if future is None else future.result()
    except BrokenProcessPool:
        return None


def _lost(path: Path) -> FileResult:
    return FileResult(
        failure=f"{path}: the process that analysed it ended each time, perhaps for lack of memory: try fewer at once.",
        exit_code=EXIT_UNUSABLE,
    )


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
