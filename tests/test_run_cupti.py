"""`infprof run --backend cupti` around programs that use CUDA, with a libcupti and a libcuda made for the tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from infprof.probes import Unavailable, backends
from infprof.probes.cupti_backend import CuptiBackend
from infprof.probes.cupti_backend.inside import library
from infprof.probes.nsys_command import CapturePlan
from infprof.readers import read
from run_bench import INFPROF, PATIENCE_S, codes, manifest, nothing_left

CUPTI = ["--backend", "cupti", "--probes", ""]
SOURCE = Path(__file__).with_name("fake_cupti.c")
# What every program here begins with. `work(n)` launches n kernels, and counts those that were recorded.
_BEGIN = """
    import ctypes, os, sys, threading, time
    cuda = ctypes.CDLL(os.environ["FAKE"] + "/libcuda.so.1")
    cupti = ctypes.CDLL(os.environ["FAKE"] + "/libcupti.so.13")

    def until(condition):
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    def work(count=2000):
        # The first launches find out when the recording has begun; the collector looks twenty times a second.
        cuda.cuInit(0)
        until(lambda: cupti.work(1))
        return cupti.work(count)

    def written():
        # The records of this process that are in its file, roughly.
        folder = os.environ["TRACES"]
        mine = [name for name in os.listdir(folder) if str(os.getpid()) in name and name.endswith(".cupti")]
        return sum(os.path.getsize(folder + "/" + name) for name in mine)
"""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both libraries."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("cuda")
    for name, more in (("libcupti.so.13", ["-lpthread"]), ("libcuda.so.1", ["-DDRIVER"])):
        words = [compiler, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{name}", "-o", str(folder / name), str(SOURCE)]
        subprocess.run([*words, *more], check=True, timeout=PATIENCE_S)
    return folder


@pytest.fixture
def environ(fake: Path, tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "FAKE": str(fake), "TRACES": str(tmp_path / "b" / "trace"), "PYTHONFAULTHANDLER": "1"}


def story(tmp_path: Path, text: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(dedent(_BEGIN) + dedent(text))
    return str(path)


def profile(
    tmp_path: Path, environ: dict[str, str], text: str, *options: str, **more: str
) -> subprocess.CompletedProcess[str]:
    words = [*INFPROF, "run", *CUPTI, *options, "-o", str(tmp_path / "b"), "--", sys.executable, story(tmp_path, text)]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, env={**environ, **more})


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = manifest(tmp_path / "b")["backend"]["processes"]
    return found


def kernels(tmp_path: Path, row: dict[str, Any]) -> int:
    return len(read(tmp_path / "b" / "trace" / row["trace"]).kernels or ())


def note(tmp_path: Path, code: str) -> str:
    return " ".join(n["sentence"] for n in manifest(tmp_path / "b")["notes"] if n["code"] == code)


def said(tmp_path: Path) -> dict[str, str]:
    diagnosis = json.loads((tmp_path / "b" / "diagnosis.json").read_text())
    return {problem["code"]: problem["message"] for problem in diagnosis["problems"]}


@pytest.mark.parametrize("length", ["216", "248"], ids=["CUDA 13.0", "CUDA 13.5"])
def test_a_program_is_recorded_and_stays_what_it_is(tmp_path: Path, environ: dict[str, str], length: str) -> None:
    text = """
        other = threading.Thread(target=work)
        other.start(); other.join()
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        assert os.path.exists(getenv(b"NVTX_INJECTION64_PATH"))
        print("recorded", work(), sys.argv[1:], sys.path, sorted(os.environ))
        print("an error of its own", file=sys.stderr)
        sys.exit(3)
    """
    done = profile(tmp_path, environ, text, FAKE_CUPTI_KERNEL_BYTES=length)
    assert done.returncode == 3, done.stderr
    first, _, _ = done.stdout.partition("\n")
    (row,) = rows(tmp_path)
    trace = read(tmp_path / "b" / "trace" / row["trace"])
    assert len(trace.kernels or ()) == int(first.split()[1]) > 4000
    assert trace.api_calls is not None and trace.copies is not None and trace.syncs is not None
    names = {trace.strings[i] for i in set(trace.kernels["name"].tolist())} if trace.kernels else set()
    assert names == {
        "gemm(float const*, float const*, float*, int)",
        "void vec::add<float>(float*, int)",
        "triton_poi_fused_0",
    }
    # Each kernel has its launch, by one of the two threads; one that lives for half a second has a name.
    launched = {trace.strings[i] for i in trace.api_calls["name"].tolist()}
    assert launched == {"cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize"}
    assert set(trace.kernels["correlation"].tolist()) <= set(trace.api_calls["correlation"].tolist())
    assert len(trace.threads) == 2 and any(thread.name for thread in trace.threads)
    (device,) = trace.devices
    assert (device.name, device.sm_count, device.compute_capability) == ("NVIDIA Fake 80GB", 132, (9, 0))
    # The program's output, environment and path are its own.
    assert first.endswith(str(sorted({*environ, "FAKE_CUPTI_KERNEL_BYTES", "PYTHONPATH"})))
    assert ".control" not in first and "an error of its own" in done.stderr and "Fatal" not in done.stderr
    again = subprocess.run(
        [*INFPROF, "analyze", str(tmp_path / "b")], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert "experimental" in again.stdout and "experimental-recorder" in said(tmp_path)
    assert sorted(path.name for path in (tmp_path / "b" / "trace").iterdir()) == [row["trace"]]


def test_a_signal_from_elsewhere_costs_no_record(tmp_path: Path, environ: dict[str, str]) -> None:
    text = """
        print(work(), flush=True)
        os.kill(os.getpid(), 15)
        until(lambda: False)
    """
    done = profile(tmp_path, environ, text, FAKE_CUDA_SYNC=str(tmp_path / "waited"))
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    # At its end the GPU may still be at work, whose record would be lost.
    assert (tmp_path / "waited").exists()
    (row,) = rows(tmp_path)
    assert kernels(tmp_path, row) == int(done.stdout.split()[0]) and "trace-partial" not in codes(tmp_path / "b")


@pytest.mark.parametrize("end", ["os._exit(5)", "os.kill(os.getpid(), 9)"], ids=["os._exit", "SIGKILL"])
def test_what_was_flushed_before_a_crash_is_kept(tmp_path: Path, environ: dict[str, str], end: str) -> None:
    text = f"""
        count = work()
        until(lambda: written() > 2000 * 216)
        print(count, flush=True)
        {end}
    """
    done = profile(tmp_path, environ, text)
    assert done.returncode in (5, 137), done.stderr
    (row,) = rows(tmp_path)
    assert kernels(tmp_path, row) == int(done.stdout.split()[0])
    assert "trace-partial" in codes(tmp_path / "b") and "ended without notice" in said(tmp_path)["recorder"]


def test_a_window_of_a_program_that_goes_on(tmp_path: Path, environ: dict[str, str]) -> None:
    text = """
        cuda.cuInit(0)
        print("ready", flush=True)
        while True:
            cupti.work(100)
            time.sleep(0.005)
    """
    window = ("--ready-log", "ready", "--warmup", "0.3s", "--duration", "1s")
    done = profile(tmp_path, environ, text, *window, FAKE_CUDA_SYNC=str(tmp_path / "waited"))
    assert done.returncode == 0, done.stderr
    # A program that goes on is not made to wait for its GPU.
    assert not (tmp_path / "waited").exists()
    (row,) = rows(tmp_path)
    trace = read(tmp_path / "b" / "trace" / row["trace"])
    phase = next(p for p in manifest(tmp_path / "b")["phases"] if p["name"] == "capture")
    assert trace.kernels is not None and len(trace.kernels) > 500
    assert trace.clock_start_unix_ns is not None and trace.clock_start_unix_ns < phase["end_unix_ns"]
    assert 0.3 < row["recorded_s"] < 5


def test_each_process_that_uses_cuda_has_a_trace_and_no_other(tmp_path: Path, environ: dict[str, str]) -> None:
    text = """
        import multiprocessing, subprocess

        def child():
            print(os.getpid(), work(3000), flush=True)

        if __name__ == "__main__":
            for method in ("spawn", "fork"):
                process = multiprocessing.get_context(method).Process(target=child)
                process.start(); process.join()
                assert process.exitcode == 0, process.exitcode
            subprocess.run([sys.executable, "-c", "import ctypes"], check=True)
            print(os.getpid(), work(4000), flush=True)
            if os.fork() == 0:
                # CUDA is of no use here, and so there is nothing to record; it must end as it would.
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    """
    done = profile(tmp_path, environ, text)
    assert done.returncode == 0, done.stderr
    expected = {int(pid): int(count) for pid, count in (line.split() for line in done.stdout.splitlines()[:3])}
    assert {row["pid"]: kernels(tmp_path, row) for row in rows(tmp_path) if row["trace"]} == expected
    # The trace with the most work on the GPU is the one that is diagnosed.
    assert manifest(tmp_path / "b")["files"]["traces"][-1].startswith(
        f"trace/process-{max(expected, key=expected.get)}"
    )


def test_a_program_without_cuda_is_left_alone(tmp_path: Path, environ: dict[str, str]) -> None:
    words = [
        *INFPROF,
        "run",
        *CUPTI,
        "-o",
        str(tmp_path / "b"),
        "--",
        sys.executable,
        "-c",
        "import ctypes; print('mine')",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, env=environ)
    assert done.returncode == 4 and done.stdout.startswith("mine\n")
    assert "has not used CUDA" in note(tmp_path, "no-report")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"FAKE_CUPTI_SUBSCRIBE": "39"}, "another profiler in this program"),
        (
            {"FAKE_CUPTI_SUBSCRIBE": "39", "NSYS_PROFILING_SESSION_ID": "1"},
            "nsys, under which this program runs, holds",
        ),
        ({"FAKE_CUPTI_SUBSCRIBE": "39", "CUDA_INJECTION64_PATH": "/opt/tool/libother.so"}, "libother.so (CUDA_INJ"),
        ({"FAKE_CUPTI_SUBSCRIBE": "35"}, "only administrators"),
        ({"FAKE_CUPTI_ENABLE": "999"}, "cuptiActivityEnable of libcupti.so.13 returned 999 CUPTI_ERROR_UNKNOWN"),
    ],
    ids=["taken", "nsys", "injection", "not permitted", "no driver"],
)
def test_a_refusal_is_one_sentence_and_none_of_the_programs_business(
    tmp_path: Path, environ: dict[str, str], more: dict[str, str], expected: str
) -> None:
    text = """
        cuda.cuInit(0)
        until(lambda: any("failed" in open(path).read() for path in answers()))
        print("mine", cupti.work(10))
    """
    text = 'import glob\nanswers = lambda: glob.glob(os.environ["TRACES"] + "/.control/process-*.json")\n' + dedent(
        text
    )
    done = profile(tmp_path, environ, text, **more)
    assert done.returncode == 4 and done.stdout.startswith("mine 0\n"), done.stderr
    assert "Traceback" not in done.stderr
    sentence = note(tmp_path, "no-report")
    assert expected in sentence and sentence.count(".") < 8 and "Error:" not in sentence
    assert list((tmp_path / "b" / "trace").iterdir()) == []


def test_dropped_records_are_reported_as_lost(tmp_path: Path, environ: dict[str, str]) -> None:
    done = profile(tmp_path, environ, "work()", FAKE_CUPTI_DROPPED="7")
    assert done.returncode == 0, done.stderr
    assert "7 records were dropped" in said(tmp_path)["recorder"]


def test_options_of_other_recorders_are_refused() -> None:
    done = subprocess.run(
        [*INFPROF, "run", "--backend", "cupti", "--capture", "cuda-profiler-api", "--", "true"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2 and "only nsys can do that, and --backend cupti leaves it out" in done.stderr
    with pytest.raises(Unavailable, match="-I keeps out the CUPTI collector"):
        CuptiBackend(CapturePlan(Path("/tmp")), ["python3", "-I", "x.py"], {"PATH": os.environ["PATH"]})


def test_it_is_taken_only_when_asked_for(tmp_path: Path) -> None:
    plan, command = CapturePlan(tmp_path), [sys.executable, "-c", "pass"]
    without_nsys = {"PATH": str(tmp_path)}
    auto = backends.choose("auto", plan, command, without_nsys, None)
    assert auto.backend is None or auto.backend.name != "cupti"
    asked = backends.choose("cupti", plan, command, without_nsys, None)
    assert asked.backend is not None and "experimental" in asked.why and "experimental" in str(asked.said)


def test_where_libcupti_is_looked_for(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", lambda: iter(()))
    monkeypatch.setattr(library, "_TOOLKIT", str(tmp_path / "toolkit"))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("CUDA_HOME", "CUDA_PATH", "INFPROF_LIBCUPTI"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(library.CuptiError, match="there is no libcupti in this program"):
        library.find_cupti()
    beside = tmp_path / "nvidia" / "cu13" / "lib"
    beside.mkdir(parents=True)
    shutil.copy(fake / "libcupti.so.13", beside)
    assert library.find_cupti() == str(beside / "libcupti.so.13")
    monkeypatch.setenv("INFPROF_LIBCUPTI", str(fake / "libcupti.so.13"))
    assert library.find_cupti() == str(fake / "libcupti.so.13")


def test_the_real_library_without_a_driver_is_one_sentence(tmp_path: Path, environ: dict[str, str]) -> None:
    """NVIDIA's own libcupti, where it is installed, says no in its own way."""
    paths = [p for root in sys.path for p in Path(root or ".").glob("nvidia/cu1*/lib/libcupti.so.1*")]
    if not paths:
        pytest.skip("needs nvidia-cuda-cupti")
    if Path("/dev/nvidia0").exists():
        pytest.skip("here is a GPU")
    answers = 'glob.glob(os.environ["TRACES"] + "/.control/process-*.json")'
    text = f"""
        import glob
        os.environ["INFPROF_LIBCUPTI"] = "{paths[0]}"
        del cupti
        cuda.cuInit(0)
        until(lambda: any("failed" in open(path).read() for path in {answers}))
        print("mine")
    """
    begin = dedent(_BEGIN).replace('cupti = ctypes.CDLL(os.environ["FAKE"] + "/libcupti.so.13")', "cupti = None")
    program = tmp_path / "program.py"
    program.write_text(begin + dedent(text))
    words = [*INFPROF, "run", *CUPTI, "-o", str(tmp_path / "b"), "--", sys.executable, str(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, env=environ)
    assert done.returncode == 4 and done.stdout.startswith("mine\n"), done.stderr
    assert "libcupti.so.13 returned" in note(tmp_path, "no-report")
