"""What PyTorch's profiler inside a program must not do to it, and what it says where it could not do everything.

With a stand-in for PyTorch (``fake_torch``), which fails where the real one would.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

from fake_torch import write_fake_torch
from infprof.probes.nsys_command import CapturePlan
from infprof.probes.torch_backend import TorchBackend, gathering, recorder
from infprof.probes.torch_backend import backend as backend_module
from run_bench import INFPROF, PATIENCE_S, codes, manifest, nothing_left, until

_WORK = """
    import os, sys, threading, time, signal
    import torch

    def work(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            torch.work()
            time.sleep(0.002)
"""


class Run(NamedTuple):
    """A program under the backend alone, without the rest of `infprof run`."""

    backend: TorchBackend
    process: subprocess.Popen[bytes]
    control: Path

    def answers(self) -> list[gathering.Answer]:
        return gathering.answers(self.control)

    def export(self) -> list[Path]:
        return [self.backend.export(path) for path in self.backend.finish(PATIENCE_S)]

    def notes(self) -> dict[str, str]:
        self.backend.details()
        return {note.code: note.sentence for note in self.backend.notes}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    folder = write_fake_torch(tmp_path / "packages")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def program(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "program.py"
    path.write_text(dedent(_WORK) + dedent(text))
    return path


@pytest.fixture
def start(tmp_path: Path, environ: dict[str, str]) -> Iterator[object]:
    started: list[Run] = []

    def begin(text: str, python: str = sys.executable, whole: bool = True) -> Run:
        folder = tmp_path / "trace"
        folder.mkdir()
        words = [python, str(program(tmp_path, text))]
        backend = TorchBackend(CapturePlan(folder, whole=whole), words, environ)
        started.append(Run(backend, backend.launch(words, environ), folder / ".control"))
        return started[-1]

    yield begin
    for run in started:
        run.process.kill()
        run.process.wait()
        run.backend.close()


def infprof_run(tmp_path: Path, environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [*INFPROF, "run", "--backend", "torch", "--probes", "", "-o", str(tmp_path / "b"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environ)


def traces(tmp_path: Path) -> list[str]:
    return [row["trace"] for row in manifest(tmp_path / "b")["backend"]["processes"] if row["trace"]]


def test_the_profiler_waits_while_a_graph_is_captured(start, monkeypatch: pytest.MonkeyPatch) -> None:
    # The parts end in the middle of captures, and the capture that fails must not hold the profiler for ever.
    monkeypatch.setattr(backend_module, "PART_S", 0.1)
    run = start("""
        class Broken(torch.cuda.CUDAGraph):
            def capture_begin(self):
                super().capture_begin(pool=1, other=2)
        try:
            Broken().capture_begin()
        except TypeError:
            pass
        for _ in range(8):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=1)
            work(0.25)
            graph.capture_end()
            work(0.05)
        work(60)
    """)
    until(lambda: any(answer.parts >= 6 for answer in run.answers()))
    assert [answer.state for answer in run.answers()] == ["recording"]


def test_the_end_of_the_run_waits_for_a_graph(start, environ: dict[str, str], tmp_path: Path) -> None:
    environ["CAPTURING"] = str(tmp_path / "capturing")
    run = start("""
        while torch.autograd.profiler.active == []:
            work(0.05)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(); open(os.environ["CAPTURING"], "w").close(); work(1.0); graph.capture_end()
        work(60)
    """)
    until((tmp_path / "capturing").exists)
    (raw,) = run.backend.stop(PATIENCE_S)
    assert raw.exists() and run.answers()[0].state == "done"


def test_a_process_that_becomes_another_program_is_not_waited_for(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infprof.probes.torch_backend.injection._IDLE_PATIENCE_S", 0.5)
    run = start("work(0.5); os.execv('/bin/sleep', ['sleep', '60'])")
    until(lambda: any(answer.state == "recording" for answer in run.answers()))
    until(lambda: Path(f"/proc/{run.process.pid}/comm").read_text() == "sleep\n")
    began = time.monotonic()
    assert run.backend.stop(PATIENCE_S) == []
    assert time.monotonic() - began < 20
    assert "ended without notice" in run.backend.why_no_trace().sentence


def test_a_process_whose_memory_grows_is_not_recorded_on(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "GROWTH_BYTES", 32 << 20)
    run = start("work(0.5); kept = bytearray(os.urandom(1 << 20)) * 128; work(1)")
    run.process.wait()
    assert len(run.export()) == 1
    assert "its memory grew too fast" in run.notes()["recording-limited"]


def test_an_old_pytorch_is_recorded_and_what_lacks_is_said(start, environ: dict[str, str]) -> None:
    environ["FAKE_TORCH_IS_OLD"] = "1"
    run = start("work(0.5)")
    run.process.wait()
    assert len(run.export()) == 1
    assert "before 2.4" in run.notes()["recording-limited"]


def test_a_disk_that_is_full_later_costs_only_the_rest(
    start, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "PART_S", 0.3)
    environ["FAKE_DISK_IS_FULL"] = str(tmp_path / "full")
    run = start("work(60)")
    until(lambda: any(answer.parts >= 1 for answer in run.answers()))
    (tmp_path / "full").touch()
    until(lambda: any(answer.state == "failed" for answer in run.answers()))
    assert run.process.poll() is None, "the program has nothing to do with that"
    run.process.kill()
    run.process.wait()
    assert len(run.export()) == 1
    assert "No space left" in run.notes()["trace-partial"]


def test_a_torch_that_is_there_before_everything_else_is_seen(start, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "early.pth").write_text("import torch\n")
    run = start("work(0.5)", str(tmp_path / "venv/bin/python"))
    run.process.wait()
    assert len(run.export()) == 1


@pytest.mark.parametrize(
    ("devices", "there"),
    [
        (["null", "nvidiactl", "nvidia-uvm", "nvidia-caps"], False),
        (["nvidiactl", "nvidia0"], True),
        (["nvidia15"], True),
        (["kfd"], True),
        (["dxg"], True),
        (["nvmap"], True),
    ],
)
def test_a_driver_without_a_device_is_no_gpu(monkeypatch: pytest.MonkeyPatch, devices: list[str], there: bool) -> None:
    monkeypatch.setattr(recorder.os, "listdir", lambda path: devices)
    assert recorder._gpu_is_there() is there


def test_a_profiler_of_the_program_that_runs_already_is_left_to_end(
    start, tmp_path: Path, environ: dict[str, str]
) -> None:
    environ["OWN"] = str(tmp_path / "own.json")
    run = start(
        """
        own = torch.profiler.profile(); own.start()
        open(os.environ["OWN"] + ".began", "w").close()
        while not os.path.exists(os.environ["OWN"] + ".end"):
            work(0.05)
        own.stop(); own.export_chrome_trace(os.environ["OWN"])
        work(60)
        """,
        whole=False,
    )
    until((tmp_path / "own.json.began").exists)
    run.backend.start()
    until(lambda: [answer.reason for answer in run.answers()] == ["the program used the profiler of PyTorch itself"])
    (tmp_path / "own.json.end").touch()
    until(lambda: [answer.state for answer in run.answers()] == ["recording"])
    run.backend.stop(PATIENCE_S)
    assert "aten::mm" in (tmp_path / "own.json").read_text() and len(run.export()) == 1


# --- ways to be started, and to be ended ------------------------------------------------------------------------------


def test_a_handler_of_its_own_keeps_its_say(tmp_path: Path, environ: dict[str, str]) -> None:
    text = """
        def end(number, frame):
            print("ended by", number, flush=True)
            sys.exit(7)
        signal.signal(signal.SIGTERM, end)
        threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGTERM)).start()
        work(60)
    """
    done = infprof_run(tmp_path, environ, "--", sys.executable, str(program(tmp_path, text)))
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith(f"ended by {int(signal.SIGTERM)}\n")
    assert len(traces(tmp_path)) == 1


def test_a_module_and_a_console_script_are_recorded(tmp_path: Path, environ: dict[str, str]) -> None:
    path = program(tmp_path, "work(0.5); print(__name__, sys.argv[1:]); sys.exit(4)")
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environ["PYTHONPATH"]])
    script = tmp_path / "serve"
    script.write_text(f"#!{sys.executable}\n{path.read_text()}")
    script.chmod(0o755)
    for command in ([sys.executable, "-m", "program"], [str(script)]):
        done = infprof_run(tmp_path, environ, "--force", "--", *command, "--port", "0")
        assert (done.returncode, done.stdout.splitlines()[0]) == (4, "__main__ ['--port', '0']"), done.stderr
        assert len(traces(tmp_path)) == 1


def test_many_helpers_are_all_recorded_and_all_let_go(tmp_path: Path, environ: dict[str, str]) -> None:
    text = """
        import multiprocessing

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            with context.Pool(6) as pool:
                # Each has one piece of work: what waits for it has been started.
                pool.map(work, [1.5] * 6, chunksize=1)
                print("READY", flush=True)
                pool.map(work, [1.5] * 6, chunksize=1)
                pool.close()
                pool.join()
    """
    words = ["--ready-log", "READY", "--", sys.executable, str(program(tmp_path, text))]
    done = infprof_run(tmp_path, environ, *words)
    assert done.returncode == 0, done.stderr
    assert len(traces(tmp_path)) >= 6 and "trace-late" not in codes(tmp_path / "b")


def test_the_window_is_that_between_a_line_and_its_duration(tmp_path: Path, environ: dict[str, str]) -> None:
    text = "work(0.5); print('listening', flush=True); work(60)"
    words = ["--ready-log", "listening", "--duration", "1s", "--", sys.executable, str(program(tmp_path, text))]
    done = infprof_run(tmp_path, environ, *words)
    assert done.returncode == 0, done.stderr
    (row,) = manifest(tmp_path / "b")["backend"]["processes"]
    assert 0.3 < row["recorded_s"] < 3
