"""`infprof run --backend torch`: the profiler of PyTorch in programs that know nothing of it.

Each story is told twice: with a stand-in for PyTorch that keeps the real one's rules, and with the real one where
INFPROF_TEST_VLLM names a folder with it or it is installed here (see docs/run.md).
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

from fake_torch import write_fake_torch
from infprof.probes.nsys_command import CapturePlan
from infprof.probes.torch_backend import TorchBackend, gathering
from infprof.probes.torch_backend.interpreter import interpreter_of
from run_bench import INFPROF, PATIENCE_S, codes, manifest, nothing_left, until

TORCH = ["--backend", "torch", "--probes", ""]
# The first start of the real profiler imports for a second or two; a stand-in starts at once.
_WORK = """
    import os, sys, threading, time
    import torch

    def work(seconds=float(os.environ["WORK_S"])):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if hasattr(torch, "work"):
                torch.work()
            else:
                torch.mm(torch.ones(16, 16), torch.ones(16, 16))
            time.sleep(0.005)
"""


class Engine(NamedTuple):
    """A Python with a torch: its interpreter, and the environment to run it in."""

    python: str
    environ: dict[str, str]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture(params=["stand-in", "real"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    if request.param == "stand-in":
        folder = write_fake_torch(tmp_path / "packages")
        return Engine(sys.executable, {**os.environ, "PYTHONPATH": before(str(folder)), "WORK_S": "0.5"})
    environ = {**os.environ, "WORK_S": "4"}
    vllm = os.environ.get("INFPROF_TEST_VLLM")
    if vllm:
        return Engine(f"{vllm}/venv/bin/python", environ)
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs PyTorch, or INFPROF_TEST_VLLM: a folder with a vLLM that runs on the CPU")
    return Engine(sys.executable, environ)


def before(folder: str) -> str:
    """A folder and, behind it, what PYTHONPATH holds already."""
    return os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))


def story(tmp_path: Path, text: str) -> list[str]:
    """A program: the work that can be called, and what it does."""
    path = tmp_path / "program.py"
    path.write_text(dedent(_WORK) + dedent(text))
    return [str(path)]


def profile(engine: Engine, tmp_path: Path, command: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    words = [*INFPROF, "run", *TORCH, *options, "-o", str(tmp_path / "b"), "--", engine.python, *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, env=engine.environ)


def processes(tmp_path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = manifest(tmp_path / "b")["backend"]["processes"]
    return rows


def operators(tmp_path: Path, row: dict[str, Any]) -> int:
    """How many matrix products the trace of a process holds."""
    events = json.loads(gzip.decompress((tmp_path / "b/trace" / row["trace"]).read_bytes()))["traceEvents"]
    return sum(event.get("name") == "aten::mm" for event in events)


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "b/trace").iterdir())


def test_a_program_is_profiled_with_all_its_threads_and_stays_what_it_is(engine: Engine, tmp_path: Path) -> None:
    text = """
        other = threading.Thread(target=work)
        other.start(); work(); other.join()
        print(sys.argv[1:], sys.path)
        sys.exit(3)
    """
    done = profile(engine, tmp_path, [*story(tmp_path, text), "--its", "own"])
    assert done.returncode == 3, done.stderr
    plain = subprocess.run(
        [engine.python, str(tmp_path / "program.py"), "--its", "own"],
        capture_output=True,
        text=True,
        env=engine.environ,
    )
    assert done.stdout.startswith(plain.stdout)
    (row,) = processes(tmp_path)
    assert operators(tmp_path, row) > 20 and files(tmp_path) == [row["trace"]]
    assert manifest(tmp_path / "b")["target"]["exit_code_of"] == "target"
    diagnosis = json.loads((tmp_path / "b/diagnosis.json").read_text())
    assert (diagnosis["verdict"]["class"], diagnosis["verdict"]["code"]) == ("unusable", "no-gpu-work")
    again = subprocess.run([*INFPROF, "analyze", str(tmp_path / "b"), "--json"], capture_output=True, text=True)
    assert json.loads(again.stdout)["verdict"] == diagnosis["verdict"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_from_elsewhere_costs_no_trace(engine: Engine, tmp_path: Path, number: int) -> None:
    text = f"""
        threading.Timer(float(os.environ["WORK_S"]), os.kill, (os.getpid(), {int(number)})).start()
        work(60)
    """
    done = profile(engine, tmp_path, story(tmp_path, text))
    assert done.returncode == 128 + number, done.stderr
    (row,) = processes(tmp_path)
    assert operators(tmp_path, row) > 20 and row["reason"] is None


def test_a_killed_program_leaves_what_was_written_by_then(engine: Engine, tmp_path: Path) -> None:
    done = profile(engine, tmp_path, story(tmp_path, "work(); os.kill(os.getpid(), 9)"))
    assert done.returncode == 137
    assert processes(tmp_path)[0]["trace"] is None and "no-report" in codes(tmp_path / "b")
    assert files(tmp_path) == []


def test_parts_bound_the_memory_and_survive_a_kill(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, process = launched(engine, tmp_path, story(tmp_path, "work(60)"), monkeypatch, part_s=2.0)
    try:
        until(lambda: any(a.parts >= 2 for a in gathering.answers(tmp_path / ".control")))
        process.kill()
        process.wait()
        (raw,) = backend.stop(5)
        trace = backend.export(raw)
        assert backend.details()["processes"][0]["recorded_s"] <= 2.5
        assert [note.code for note in backend.notes] == ["recorded-in-parts", "trace-partial"]
        assert trace.name == f"process-{process.pid}.trace.json.gz"
    finally:
        process.kill()
        backend.close()


def launched(
    engine: Engine, tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, part_s: float
) -> tuple[TorchBackend, subprocess.Popen[bytes]]:
    monkeypatch.setattr("infprof.probes.torch_backend.backend.PART_S", part_s)
    words = [engine.python, *command]
    backend = TorchBackend(CapturePlan(tmp_path), words, engine.environ)
    return backend, backend.launch(words, engine.environ)


def test_the_profiler_ends_when_infprof_is_gone(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, process = launched(engine, tmp_path, story(tmp_path, "work(60)"), monkeypatch, part_s=30.0)
    try:
        until(lambda: any(a.state == "recording" for a in gathering.answers(tmp_path / ".control")))
        long_ago = time.time() - 1000
        os.utime(tmp_path / ".control/start", (long_ago, long_ago))
        until(lambda: gathering.answers(tmp_path / ".control")[0].state == "done")
        assert gathering.answers(tmp_path / ".control")[0].reason == "infprof had ended"
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        backend.close()


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver", "os.fork"])
def test_children_are_profiled_where_the_capture_opens_after_them(engine: Engine, tmp_path: Path, how: str) -> None:
    ready = "print('READY', flush=True)"
    if how == "os.fork":
        body = f"child = os.fork()\nif child == 0:\n    work(); sys.exit(0)\n{ready}; work(); os.waitpid(child, 0)"
    else:
        body = (
            f"import multiprocessing\nif __name__ == '__main__':\n    c = multiprocessing.get_context('{how}')\n"
            f"    p = c.Process(target=work); p.start(); {ready}; work(); p.join()\n"
        )
    engine.environ["WORK_S"] = str(2 * float(engine.environ["WORK_S"]))
    done = profile(engine, tmp_path, story(tmp_path, "\n" + body), "--ready-log", "READY")
    assert done.returncode == 0, done.stderr
    rows = [row for row in processes(tmp_path) if row["trace"]]
    assert len(rows) == 2 and all(operators(tmp_path, row) > 20 for row in rows)
    notes = json.loads((tmp_path / "b/diagnosis.json").read_text())["problems"]
    (said,) = [n["message"] for n in notes if n["code"] == "several-processes"]
    assert "most events" in said and "infprof analyze b/trace" in said


def test_a_fork_during_the_capture_hangs_nobody(engine: Engine, tmp_path: Path) -> None:
    text = """
        work()
        child = os.fork()
        if child == 0:
            work(0.2); sys.exit(5)
        work()
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = profile(engine, tmp_path, story(tmp_path, text))
    assert done.returncode == 5, done.stderr
    parent, child = sorted(processes(tmp_path), key=lambda row: row["trace"] is None)
    assert operators(tmp_path, parent) > 20 and parent["parts"] == 2
    assert child["reason"] == "it was forked from a process that had been profiled"
    assert "process-not-recorded" in codes(tmp_path / "b")


def test_the_programs_own_profiler_goes_first(engine: Engine, tmp_path: Path) -> None:
    text = """
        from torch.profiler import profile, ProfilerActivity
        work()
        p = profile(activities=[ProfilerActivity.CPU]); p.start(); work(0.5); p.stop()
        p.export_chrome_trace(os.environ["OWN"])
        work()
    """
    engine.environ["OWN"] = str(tmp_path / "own.json")
    done = profile(engine, tmp_path, story(tmp_path, text))
    assert done.returncode == 0, done.stderr
    own = json.loads((tmp_path / "own.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in own) > 20
    assert operators(tmp_path, processes(tmp_path)[0]) > 20


def test_its_own_sitecustomize_runs_as_ever(engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys; sys.from_sitecustomize = __file__\n")
    engine.environ["PYTHONPATH"] = os.pathsep.join([str(folder), engine.environ.get("PYTHONPATH", "")])
    text = "work(); print(sys.from_sitecustomize, sys.modules['sitecustomize'].__file__)"
    done = profile(engine, tmp_path, story(tmp_path, text))
    own = str(folder / "sitecustomize.py")
    assert done.stdout.startswith(f"{own} {own}\n"), done.stderr
    assert operators(tmp_path, processes(tmp_path)[0]) > 20


def test_ctrl_c_keeps_the_trace(engine: Engine, tmp_path: Path) -> None:
    words = [*INFPROF, "run", *TORCH, "-o", str(tmp_path / "b"), "--", engine.python, *story(tmp_path, "work(60)")]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=engine.environ)
    control = tmp_path / "b/trace/.control"
    until(lambda: any(answer.state == "recording" for answer in gathering.answers(control)))
    time.sleep(1)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 130, said
    assert operators(tmp_path, processes(tmp_path)[0]) > 20
    assert not control.exists()


def test_a_capture_that_is_over_ends_the_program(engine: Engine, tmp_path: Path) -> None:
    done = profile(engine, tmp_path, story(tmp_path, "work(60)"), "--warmup", "3s", "--duration", "3s")
    assert done.returncode == 0, done.stderr
    assert manifest(tmp_path / "b")["target"]["ended"] == "by infprof (SIGTERM)"
    (row,) = processes(tmp_path)
    assert operators(tmp_path, row) > 20 and row["recorded_s"] < 4


# --- without torch ----------------------------------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path) -> Engine:
    return Engine(sys.executable, {**os.environ})


def test_a_program_without_torch_is_left_in_peace(plain: Engine, tmp_path: Path) -> None:
    text = "import sys, threading; print(threading.active_count(), len(sys.meta_path) > 0); sys.exit(0)"
    done = profile(plain, tmp_path, ["-c", text])
    assert done.stdout.startswith("1 True\n")
    # What was asked for could not be had, and the program has nothing to say of that.
    assert done.returncode == 4 and codes(tmp_path / "b") == ["no-torch"]
    assert files(tmp_path) == []


@pytest.mark.parametrize("option", ["-I", "-S", "-E", "-sE"])
def test_an_isolated_python_is_refused_before_it_runs(plain: Engine, tmp_path: Path, option: str) -> None:
    done = profile(plain, tmp_path, [option, "-c", "print('ran')"])
    assert done.returncode == 4 and "ran" not in done.stdout
    assert "keeps out PyTorch's profiler" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "b").exists()


def test_what_is_no_python_may_start_one(engine: Engine, tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(f"#!/bin/sh\n{engine.python} {' '.join(story(tmp_path, 'work()'))}\n")
    script.chmod(0o755)
    words = [*INFPROF, "run", *TORCH, "-o", str(tmp_path / "b"), "--", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, env=engine.environ)
    assert done.returncode == 0, done.stderr
    assert operators(tmp_path, processes(tmp_path)[0]) > 20


@pytest.mark.parametrize(
    "words",
    [["--capture", "nvtx:step"], ["--nsys-arg=--verbose"]],
)
def test_options_of_nsys_are_refused(plain: Engine, tmp_path: Path, words: list[str]) -> None:
    done = profile(plain, tmp_path, ["-c", "pass"], *words)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "isolating"),
    [
        (["/usr/bin/python3.11", "-X", "dev", "-W", "error", "x.py", "-I"], None),
        (["env", "A=1", "python3", "-Ic", "pass"], "-I"),
        (["numactl", "-N", "0", "python", "-um", "vllm", "-E"], None),
        (["python3", "-Wignore", "-E", "x.py"], "-E"),
        (["python3", "-WE", "x.py"], None),
    ],
)
def test_the_options_of_the_interpreter_are_told_from_those_of_the_program(
    command: list[str], isolating: str | None
) -> None:
    found = interpreter_of(command, os.environ)
    assert found is not None and found.isolating == isolating


@pytest.mark.parametrize(
    ("head", "isolating"),
    [
        ("#!/opt/venv/bin/python3\n", None),
        ("#!/usr/bin/env -S python3 -I\n", "-I"),
        ("#!/bin/sh\n'''exec' \"/a/long/path/python3.12\" \"$0\" \"$@\"\n' '''\n", None),
    ],
)
def test_console_scripts_are_python(tmp_path: Path, head: str, isolating: str | None) -> None:
    script = tmp_path / "vllm"
    script.write_text(head + "import vllm\n")
    script.chmod(0o755)
    found = interpreter_of([str(script), "serve"], os.environ)
    assert found is not None and found.isolating == isolating
    script.write_text("#!/bin/bash\npython x.py\n")
    assert interpreter_of([str(script)], os.environ) is None


def test_the_process_with_most_gpu_work_is_diagnosed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Smaller than a match: each is cut in two somewhere.
    monkeypatch.setattr(gathering, "_PIECE_BYTES", 7)
    backend = TorchBackend(CapturePlan(tmp_path), ["python"], {})
    for name, kernels in (("process-1", 3), ("process-2", 40), ("process-10", 0)):
        row = '{"ph": "X", "cat": "kernel", "name": "k"},\n'
        (tmp_path / f"{name}.trace.json").write_text(row * kernels + '{"cat": "cpu_op"}' * 500)
    exported = [backend.export(path) for path in gathering.traces(tmp_path)]
    ranked = [path.name.partition(".")[0] for path in backend.ranked(exported)]
    assert ranked == ["process-10", "process-1", "process-2"]
    assert backend._found["process-2"]["gpu_work"] == 40 and backend._found["process-1"]["gpu_work"] == 3


def test_an_unfinished_trace_is_taken_up_where_there_is_no_whole_one(tmp_path: Path) -> None:
    (tmp_path / ".process-1.1.json.tmp").write_text('{"traceEvents": [')
    (tmp_path / ".process-2.2.json").write_text('{"traceEvents": [')
    (tmp_path / "process-2.trace.json").write_text("{}")
    assert [path.name for path in gathering.rescue_unfinished(tmp_path)] == ["process-1.trace.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["process-1.trace.json", "process-2.trace.json"]
