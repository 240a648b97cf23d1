"""Files on the workers of a real dask cluster of this machine: same answer, also when a worker is killed meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from case_builders import infprof
from infprof.diagnosis import Options
from infprof.errors import UsageError
from infprof.ranks import analyze_inputs, workers
from infprof.ranks.workers import over_dask, over_processes
from infprof.reports import render
from rank_traces import US, write_ranks

distributed = pytest.importorskip("distributed")

import dask_tasks  # noqa: E402

TESTS = Path(__file__).resolve().parent


@pytest.fixture
def job(tmp_path: Path) -> Path:
    write_ranks(tmp_path / "job", 4, lambda rank, step: 300 * US * (rank == 3), steps=40)
    return tmp_path / "job"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A scheduler and two worker processes without nannies: a killed one does not come back."""
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environ = {
        **os.environ,
        "PYTHONPATH": paths,
        "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1",
    }
    common = {"env": environ, "cwd": tmp_path, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    scheduler = subprocess.Popen(
        [sys.executable, "-m", "dask", "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"],
        **common,
    )
    running = [scheduler]
    try:
        address = _address(scheduler)
        for number in range(2):
            options = ["--no-nanny", "--nthreads", "1", "--no-dashboard", "--name", f"worker{number}"]
            local = ["--local-directory", str(tmp_path / f"worker{number}")]
            command = [sys.executable, "-m", "dask", "worker", address, *options, *local]
            running.append(subprocess.Popen(command, **common))
        with distributed.Client(address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
        yield address
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


def _address(scheduler: subprocess.Popen[str]) -> str:
    """Where the scheduler says that it listens; what it says later is read away, so that it never blocks."""
    assert scheduler.stderr is not None
    for line in scheduler.stderr:
        if "Scheduler at:" in line:
            threading.Thread(target=scheduler.stderr.read, daemon=True).start()
            return line.split()[-1]
    raise AssertionError("the scheduler ended")


def test_a_cluster_gives_the_same_bytes(job: Path, cluster: str) -> None:
    assert render("json", analyze_inputs([job], scheduler=cluster)) == render("json", analyze_inputs([job], jobs=1))
    done = infprof("analyze", job, "--scheduler", cluster)
    assert done.returncode == 0, done.stderr
    assert "rank 3 is last" in done.stdout


def test_the_files_of_a_killed_worker_are_done_by_the_other(job: Path, cluster: str) -> None:
    calls = job / "calls"
    os.mkfifo(calls)
    killed: list[int] = []

    def kill() -> None:
        with calls.open() as pipe:
            killed.append(int(pipe.read()))
        calls.unlink()
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    paths = sorted(job.glob("*.sqlite"))
    results = over_dask(paths, Options(), cluster, dask_tasks.killed_once)
    killer.join()
    assert len(killed) == 1
    assert [r.failure for r in results] == [None] * 4
    expected = over_processes(paths, Options(), 1)
    assert [r.diagnosis and r.diagnosis.to_dict() for r in results] == [
        r.diagnosis and r.diagnosis.to_dict() for r in expected
    ]


def test_a_file_that_kills_every_worker_is_reported(job: Path, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the second death it is given up: both workers are gone by then, and a third one does the rest."""
    monkeypatch.setattr(workers, "WORKER_WAIT_S", 3)
    third = [sys.executable, "-m", "dask", "worker", cluster, "--no-nanny", "--nthreads", "1", "--no-dashboard"]
    environ = {**os.environ, "PYTHONPATH": str(TESTS)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*third, "--local-directory", str(job)], env=environ, cwd=job, **quiet) as late:
        try:
            with distributed.Client(cluster, timeout=60, set_as_default=False) as client:
                client.wait_for_workers(3, timeout=60)
            results = over_dask(sorted(job.glob("*.sqlite")), Options(), cluster, dask_tasks.kills_its_worker)
        finally:
            late.kill()
    assert "ended each time" in str(results[1].failure)
    # What waited on both workers when they died is blamed as well, unless there is one more try.
    assert results[0].diagnosis is not None


def test_a_cluster_that_has_lost_all_workers_does_not_hang(
    job: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "WORKER_WAIT_S", 3)
    paths = [job / "rank1.sqlite", job / "rank1.sqlite", *sorted(job.glob("*.sqlite"))]
    results = over_dask(paths, Options(), cluster, dask_tasks.kills_its_worker)
    assert {r.failure is not None for r in results[:2]} == {True}


def test_without_a_scheduler_there_is_one_sentence(job: Path) -> None:
    with pytest.raises(UsageError, match="no dask scheduler answers"):
        analyze_inputs([job], scheduler="tcp://127.0.0.1:9")
