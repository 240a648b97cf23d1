"""`infprof run` with the real nsys: the program's own fate is passed on, the bundle is whole, nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from run_bench import INFPROF, PATIENCE_S, codes, manifest, nothing_left, run

REAL = {"2023.4": Path("/opt/nsys23/bin/nsys"), "2022.4": Path("/opt/nsys/bin/nsys")}


@pytest.fixture(params=REAL)
def nsys(request: pytest.FixtureRequest) -> str:
    path = REAL[request.param]
    if not path.exists():
        pytest.skip(f"nsys {request.param} is not installed (scripts/install-nsys.sh)")
    return str(path)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


def rows(folder: Path, query: str) -> list[Any]:
    """What the exported trace of a bundle holds."""
    (trace,) = manifest(folder)["files"]["traces"]
    with closing(sqlite3.connect(f"file:{folder / trace}?mode=ro", uri=True)) as db:
        return db.execute(query).fetchall()


def recorded_pids(folder: Path) -> set[int]:
    return {tid >> 24 & 0xFFFFFF for (tid,) in rows(folder, "SELECT DISTINCT globalTid FROM OSRT_API")}


@pytest.mark.skipif(find_spec("nvtx") is None, reason="needs the Python package nvtx")
def test_a_program_with_ranges_that_exits_with_3(
    nsys: str, program: Callable[[str], list[str]], tmp_path: Path
) -> None:
    text = """
        import nvtx, os, sys
        for step in range(5):
            with nvtx.annotate("step"):
                os.sync()
        print("done")
        sys.exit(3)
    """
    done = run("--nsys", nsys, "-o", str(tmp_path / "b"), "--", *program(text))
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("done\n")
    data = manifest(tmp_path / "b")
    assert (data["state"], data["backend"]["name"]) == ("complete", "nsys")
    assert (data["target"]["exit_code"], data["target"]["exit_code_of"]) == (3, "target")
    texts = "SELECT coalesce(n.text, s.value) FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId"
    assert [text for (text,) in rows(tmp_path / "b", texts)].count("step") == 5
    assert {p["name"]: p["state"] for p in data["probes"]}["host"] == "ok"
    # No GPU work: the timeline says nothing, the telemetry does, and that is no failure of the run.
    diagnosis = json.loads((tmp_path / "b" / "diagnosis.json").read_text())
    assert (diagnosis["verdict"]["class"], diagnosis["verdict"]["code"]) == ("unusable", "no-gpu-work")
    assert any(m["name"] == "target_cpus_used_count" for m in diagnosis["measures"])


def test_a_forked_child_is_recorded_too(nsys: str, program: Callable[[str], list[str]], tmp_path: Path) -> None:
    text = """
        import os
        child = os.fork()
        for _ in range(200):
            fd = os.open("/dev/null", os.O_RDONLY)
            os.close(fd)
        os.sync()
        if child:
            os.waitpid(child, 0)
            print(os.getpid(), child, flush=True)
    """
    done = run("--nsys", nsys, "-o", str(tmp_path / "b"), "--", *program(text))
    assert done.returncode == 0, done.stderr
    pids = {int(word) for word in done.stdout.splitlines()[0].split()}
    assert pids <= recorded_pids(tmp_path / "b")


def test_a_program_killed_by_sigkill(nsys: str, program: Callable[[str], list[str]], tmp_path: Path) -> None:
    done = run("--nsys", nsys, "-o", str(tmp_path / "b"), "--", *program("import os, signal; os.kill(os.getpid(), 9)"))
    assert done.returncode == 137, done.stderr
    data = manifest(tmp_path / "b")
    assert (data["target"]["exit_code"], data["target"]["exit_code_of"]) == (137, "target")
    assert "target-killed" in codes(tmp_path / "b")


def test_ctrl_c_keeps_the_report(nsys: str, program: Callable[[str], list[str]], tmp_path: Path) -> None:
    text = """
        import os, time
        steps = 0
        while True:
            os.sync()
            time.sleep(0.005)
            steps += 1
            if steps == 500:
                print("up", flush=True)
    """
    command = [*INFPROF, "run", "--nsys", nsys, "-o", str(tmp_path / "b"), "--", *program(text)]
    # As a shell in a terminal does it: a foreground group that gets the signal as a whole.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    data = manifest(tmp_path / "b")
    assert data["target"]["ended"] == "by infprof (SIGINT)"
    ((start, stop),) = rows(tmp_path / "b", "SELECT startTime, stopTime FROM ANALYSIS_DETAILS")
    assert stop > start


def test_a_duration_captures_a_part_of_a_server(nsys: str, program: Callable[[str], list[str]], tmp_path: Path) -> None:
    text = """
        import os, time
        print("ready to serve", flush=True)
        while True:
            os.sync()
            time.sleep(0.005)
    """
    done = run(
        "--nsys", nsys, "-o", str(tmp_path / "b"), "--ready-log", "ready to serve", "--warmup", "500ms",
        "--duration", "4s", "--", *program(text),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = manifest(tmp_path / "b")
    assert [p["name"] for p in data["phases"]] == ["start-up", "warm-up", "capture"]
    assert data["target"]["ended"] == "by infprof (SIGTERM)"
    ((start, stop),) = rows(tmp_path / "b", "SELECT startTime, stopTime FROM ANALYSIS_DETAILS")
    ((epoch,),) = rows(tmp_path / "b", "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")
    # The trace is of the capture, by its own clock and by infprof's.
    capture = data["phases"][-1]
    assert stop - start >= 3.9e9
    assert data["phases"][1]["start_unix_ns"] < epoch + start < capture["end_unix_ns"]
    assert epoch + stop > capture["start_unix_ns"]


def test_a_missing_program(nsys: str, tmp_path: Path) -> None:
    done = run("--nsys", nsys, "-o", str(tmp_path / "b"), "--", "no-such-program-here")
    assert done.returncode == 2 and "no program called" in done.stderr
    assert not (tmp_path / "b").exists()


def test_an_nsys_that_is_none(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    done = run("--nsys", str(tmp_path / "nsys"), "-o", str(tmp_path / "b"), "--", *program("print('ran')"))
    assert done.returncode == 4 and "ran" not in done.stdout
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "b").exists()


def test_an_nsys_that_is_too_old(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    nsys = tmp_path / "nsys"
    nsys.write_text("#!/bin/sh\necho 'NVIDIA Nsight Systems version 2019.1.0'\n")
    nsys.chmod(0o755)
    done = run("--nsys", str(nsys), "-o", str(tmp_path / "b"), "--", *program("print('ran')"))
    assert done.returncode == 4 and done.stdout == "" and "too old" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_bundle_named_by_a_relative_path_holds_its_report(
    nsys: str, program: Callable[[str], list[str]], tmp_path: Path
) -> None:
    done = run("--nsys", nsys, "-o", "here", "--", *program("import os; os.sync()"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = manifest(tmp_path / "here")["files"]
    assert files["reports"] == ["trace/capture.nsys-rep"] and files["traces"] == ["trace/capture.sqlite"]
    assert "report-elsewhere" not in codes(tmp_path / "here")


ENGINE = """
    import http.server, sys
    class Engine(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200)
        def do_POST(self):
            with open(sys.argv[2], "a") as log:
                print(self.path, file=log)
            self.answer(int(sys.argv[3]))
        def answer(self, status):
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
        def log_message(self, *words):
            pass
    server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Engine)
    server.serve_forever()
"""


@pytest.mark.parametrize("status", [200, 404])
def test_the_engines_own_profile_endpoint_opens_and_closes_the_capture(
    program: Callable[[str], list[str]], tmp_path: Path, status: int
) -> None:
    if not REAL["2023.4"].exists():
        pytest.skip("nsys 2023.4 is not installed (scripts/install-nsys.sh)")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = str(unused.getsockname()[1])
    log = tmp_path / "asked"
    done = run(
        "--nsys", str(REAL["2023.4"]), "-o", str(tmp_path / "b"), "--capture", "cuda-profiler-api", "--probes", "",
        "--ready-url", f"http://127.0.0.1:{port}/health", "--duration", "300ms", "--",
        *program(ENGINE), port, str(log), str(status),
    )  # fmt: skip
    assert log.read_text().split() == ["/start_profile", "/stop_profile"]
    assert ("profile-endpoint" in codes(tmp_path / "b")) == (status == 404)
    # Without CUDA no range is ever opened: that is said, and is no success.
    assert done.returncode == 4 and "no-report" in codes(tmp_path / "b")
