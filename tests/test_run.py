"""`infprof run` as its user meets it: real programs, real signals, real exit codes; nothing is left running."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from infprof.bundle import redact_command
from infprof.durations import parse_seconds
from infprof.errors import UsageError
from infprof.probes.runner import ProbeReport
from run_bench import INFPROF, PATIENCE_S, codes, gone, manifest, nothing_left, run, until

PLAIN = ["--backend", "none", "--probes", ""]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


# --- how programs end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 3, 77])
def test_the_programs_own_code_is_passed_on(program: Callable[[str], list[str]], tmp_path: Path, code: int) -> None:
    done = run(*PLAIN, "-o", str(tmp_path / "b"), "--", *program(f"import sys; sys.exit({code})"))
    assert done.returncode == code
    target = manifest(tmp_path / "b")["target"]
    assert (target["ended"], target["exit_code"], target["exit_code_of"]) == ("by itself", code, "target")


def test_a_program_killed_by_a_signal_ends_as_in_a_shell(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    done = run(*PLAIN, "-o", str(tmp_path / "b"), "--", *program("import os; os.kill(os.getpid(), 9)"))
    assert done.returncode == 137
    assert manifest(tmp_path / "b")["target"]["exit_code"] == 137


def test_its_output_stays_its_own(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    text = r"import sys; sys.stdout.buffer.write(b'\x00\xff out'); sys.stderr.write('err line\n')"
    done = subprocess.run(
        [*INFPROF, "run", *PLAIN, "-o", str(tmp_path / "b"), "--json", "--", *program(text)],
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.startswith(b"\x00\xff out")
    assert b"err line\n" in done.stderr
    assert json.loads(done.stdout[len(b"\x00\xff out") :])["schema_version"] == "1.0"


def test_a_missing_program_leaves_no_folder(tmp_path: Path) -> None:
    done = run(*PLAIN, "-o", str(tmp_path / "b"), "--", "no-such-program-here")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no program called no-such-program-here" in done.stderr
    assert not (tmp_path / "b").exists()


def test_a_file_that_is_no_program_is_said_in_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "broken"
    script.write_text("not a program\n")
    script.chmod(0o755)
    done = run(*PLAIN, "-o", str(tmp_path / "b"), "--", str(script))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "cannot be started" in done.stderr
    assert not (tmp_path / "b").exists()


def test_a_duration_ends_a_server_with_0(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    server = program("import time\nwhile True: time.sleep(60)")
    done = run(*PLAIN, "-o", str(tmp_path / "b"), "--duration", "300ms", "--", *server)
    assert done.returncode == 0, done.stderr
    data = manifest(tmp_path / "b")
    assert data["target"]["ended"] == "by infprof (SIGTERM)"
    assert data["target"]["exit_code_of"] == "infprof"
    assert data["phases"][-1]["ended_by"] == "time"


def test_a_program_that_ignores_sigterm_is_killed(
    program: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infprof import session
    from infprof.progress import Progress

    monkeypatch.setattr(session, "END_PATIENCE_S", 0.3)
    deaf = program("import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(600)")
    options = session.RunOptions(deaf, output=tmp_path / "b", backend="none", probes=(), duration_s=0.1, ready_log="1")
    result = session.Session(options, Progress()).run()
    assert result.exit_code == 0
    assert manifest(tmp_path / "b")["target"]["ended"] == "by infprof (SIGKILL)"


def test_children_that_outlive_the_program_are_ended_and_said(
    program: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """Forked, daemonised with a second fork, and in a session of its own."""
    text = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        if os.fork() == 0:
            time.sleep(600)
        time.sleep(0.2)
    """
    done = run(*PLAIN, "-o", str(tmp_path / "b"), "--", *program(text))
    assert done.returncode == 0
    note = next(n for n in manifest(tmp_path / "b")["notes"] if n["code"] == "left-running")
    assert note["sentence"].startswith("2 processes")


def test_keep_leaves_the_program_running(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    server = program("import time\nwhile True: time.sleep(60)")
    # Not through pipes: the program keeps them open.
    words = [*INFPROF, "run", *PLAIN, "-o", str(tmp_path / "b"), "--duration", "200ms", "--keep", "--", *server]
    done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=PATIENCE_S)
    assert done.returncode == 0
    target = manifest(tmp_path / "b")["target"]
    process = psutil.Process(target["pid"])
    assert target["ended"] == "still running" and process.is_running()
    process.kill()
    until(lambda: gone(process))


def test_a_running_process_is_observed_and_left_alone(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    with subprocess.Popen(program("import time; time.sleep(600)")) as server:
        done = run("--probes", "", "-o", str(tmp_path / "b"), "--duration", "200ms", "--pid", str(server.pid))
        assert done.returncode == 0, done.stderr
        assert server.poll() is None
        server.kill()
    assert manifest(tmp_path / "b")["target"]["ended"] == "still running"


def test_a_process_that_somebody_else_started_is_never_killed(
    program: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """Neither by Ctrl-C twice, nor what it leaves when it ends by itself."""
    text = """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
        sys.stdin.read()
    """
    command = program(text)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        child = psutil.Process(int(server.stdout.readline()))
        words = [*INFPROF, "run", "--probes", "host", "--pid", str(server.pid)]
        with subprocess.Popen([*words, "-o", str(tmp_path / "a")], stderr=subprocess.PIPE, text=True) as observer:
            until(lambda: (tmp_path / "a" / "telemetry.sqlite").exists())
            for _ in range(2):
                observer.send_signal(signal.SIGINT)
            observer.communicate(timeout=PATIENCE_S)
        assert server.poll() is None and child.is_running()
        with subprocess.Popen([*words, "-o", str(tmp_path / "b")], stderr=subprocess.PIPE, text=True) as observer:
            until(lambda: (tmp_path / "b" / "telemetry.sqlite").exists())
            server.stdin.close()
            observer.communicate(timeout=PATIENCE_S)
        assert observer.returncode == 0
        assert child.is_running()
        child.kill()
        until(lambda: gone(child))


def test_a_pid_that_does_not_exist(tmp_path: Path) -> None:
    done = run("--probes", "", "-o", str(tmp_path / "b"), "--pid", "99999999")
    assert done.returncode == 2 and "no such process" in done.stderr
    assert not (tmp_path / "b").exists()


# --- signals ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_the_capture_and_keeps_everything(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    text = """
        import signal, sys, time
        def end(*_):
            print("asked to end", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGINT, end)
        print("up", flush=True)
        # Not one long sleep: a signal just before it would be seen only at its end.
        while True: time.sleep(0.05)
    """
    command = [*INFPROF, "run", *PLAIN, "-o", str(tmp_path / "b"), "--", *program(text)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "asked to end" in out and "SIGINT: ending the capture" in err
    data = manifest(tmp_path / "b")
    assert (data["state"], data["target"]["ended"]) == ("partial", "by infprof (SIGINT)")
    assert (tmp_path / "b" / "telemetry.sqlite").is_file()


def test_a_second_ctrl_c_kills(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    text = """
        import signal, time
        for s in (signal.SIGINT, signal.SIGTERM):
            signal.signal(s, lambda *_: print("no", flush=True))
        print("up", flush=True)
        while True: time.sleep(0.05)
    """
    command = [*INFPROF, "run", *PLAIN, "-o", str(tmp_path / "b"), "--", *program(text)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "no\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    target = manifest(tmp_path / "b")["target"]
    assert (target["ended"], target["exit_code"]) == ("by infprof (SIGKILL)", 137)


def test_the_program_is_in_a_group_of_its_own(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to the whole foreground group: only infprof may get it."""
    done = run(*PLAIN, "-o", str(tmp_path / "b"), "--", *program("import os; print(os.getpid() == os.getpgrp())"))
    assert done.stdout.startswith("True\n")


# --- when it is ready -------------------------------------------------------------------------------------------------


def test_ready_when_a_line_matches(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    text = "import sys, time\nprint('loading', flush=True)\nsys.stderr.write('Application startup complete.\\n')\ntime.sleep(600)"
    done = run(
        *PLAIN,
        "-o",
        str(tmp_path / "b"),
        "--ready-log",
        "startup complete",
        "--duration",
        "100ms",
        "--",
        *program(text),
    )
    assert done.returncode == 0, done.stderr
    assert "loading\n" in done.stdout and "Application startup complete.\n" in done.stderr
    phases = manifest(tmp_path / "b")["phases"]
    assert [(p["name"], p["ended_by"]) for p in phases] == [("start-up", "condition"), ("capture", "time")]


SERVER = """
    import http.server, sys
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
        def log_message(self, *_): pass
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    open(sys.argv[1], "w").write(str(server.server_port))
    server.serve_forever()
"""


def test_ready_when_a_url_answers_then_warm_up_then_capture(
    program: Callable[[str], list[str]], tmp_path: Path
) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = SERVER.replace('("127.0.0.1", 0)', f'("127.0.0.1", {port})')
    done = run(
        *PLAIN, "-o", str(tmp_path / "b"), "--ready-url", f"http://127.0.0.1:{port}/health",
        "--warmup", "100ms", "--duration", "100ms", "--", *program(text), str(tmp_path / "port"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [p["name"] for p in manifest(tmp_path / "b")["phases"]] == ["start-up", "warm-up", "capture"]


def test_a_server_that_is_never_ready(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    done = run(
        *PLAIN, "-o", str(tmp_path / "b"), "--ready-log", "never", "--ready-timeout", "300ms",
        "--", *program("import time; time.sleep(600)"),
    )  # fmt: skip
    assert done.returncode == 4
    assert "waiting until the program is ready, at most 0.3 s" in done.stderr and "was not ready" in done.stderr
    assert "The capture never began" in done.stdout
    assert codes(tmp_path / "b") == ["never-ready"]


def test_a_program_that_ends_before_its_capture_began_is_no_success(
    program: Callable[[str], list[str]], tmp_path: Path
) -> None:
    done = run(*PLAIN, "-o", str(tmp_path / "b"), "--ready-log", "never", "--", *program("print('done')"))
    assert done.returncode == 4
    assert codes(tmp_path / "b") == ["no-capture"] and manifest(tmp_path / "b")["state"] == "partial"


def test_a_server_that_dies_while_it_starts(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    done = run(*PLAIN, "-o", str(tmp_path / "b"), "--ready-log", "never", "--", *program("import sys; sys.exit(9)"))
    assert done.returncode == 9
    assert manifest(tmp_path / "b")["phases"][-1]["ended_by"] == "the end of the program"


@pytest.mark.parametrize(
    ("asked", "states", "said"),
    [
        (None, {"nvml": "ok", "amd": "unavailable"}, []),
        (None, {"nvml": "unavailable", "amd": "unavailable"}, ["nvml", "amd"]),
        (None, {"nvml": "ok", "amd": "failed", "host": "unavailable"}, ["amd", "host"]),
        (("nvml", "amd"), {"nvml": "ok", "amd": "unavailable"}, ["amd"]),
    ],
)
def test_the_other_makers_gpu_probe_is_no_news(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    asked: tuple[str, ...] | None,
    states: dict[str, str],
    said: list[str],
) -> None:
    from infprof import session
    from infprof.progress import Progress

    monkeypatch.setattr(session.ProbeRunner, "start", lambda self: self.reports.extend(reports))
    reports = [ProbeReport(name, state, "why") for name, state in states.items()]
    options = session.RunOptions(("true",), output=tmp_path / "b", backend="none", probes=asked)
    lines = io.StringIO()
    session.Session(options, Progress(lines)).run()
    found = re.findall(r"probe (\w+) is left out", lines.getvalue())
    assert found == said
    assert [p["name"] for p in manifest(tmp_path / "b")["probes"]] == list(states)


# --- where it goes ----------------------------------------------------------------------------------------------------


def test_an_existing_folder_is_never_overwritten_by_accident(
    program: Callable[[str], list[str]], tmp_path: Path
) -> None:
    folder, command = tmp_path / "b", program("print('ran')")
    assert run(*PLAIN, "-o", str(folder), "--", *command).returncode == 0
    again = run(*PLAIN, "-o", str(folder), "--", *command)
    assert again.returncode == 2 and "exists already" in again.stderr and "ran" not in again.stdout
    assert run(*PLAIN, "-o", str(folder), "--force", "--", *command).returncode == 0
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    refused = run(*PLAIN, "-o", str(other), "--force", "--", *command)
    assert refused.returncode == 2 and (other / "thesis.txt").read_text() == "years of work"


def test_force_replaces_bundles_of_infprof_only_and_only_once_the_program_runs(
    program: Callable[[str], list[str]], tmp_path: Path
) -> None:
    extension = tmp_path / "extension"
    extension.mkdir()
    (extension / "manifest.json").write_text('{"manifest_version": 3, "name": "of a browser"}')
    refused = run(*PLAIN, "-o", str(extension), "--force", "--", *program(""))
    assert refused.returncode == 2 and "no bundle of infprof" in refused.stderr
    old = tmp_path / "old"
    assert run(*PLAIN, "-o", str(old), "--", *program("")).returncode == 0
    before = (old / "manifest.json").read_text()
    broken = tmp_path / "broken"
    broken.write_text("not a program")
    broken.chmod(0o755)
    assert run(*PLAIN, "-o", str(old), "--force", "--", str(broken)).returncode == 2
    assert (old / "manifest.json").read_text() == before
    assert run(*PLAIN, "-o", str(old), "--force", "--", *program("")).returncode == 0
    assert (old / "manifest.json").read_text() != before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken", "extension", "old", "program.py"]


def test_nobody_reading_our_lines_ends_nothing(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    server = program("import time; time.sleep(600)")
    command = [*INFPROF, "run", *PLAIN, "-o", str(tmp_path / "b"), "--duration", "300ms", "--", *server]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.close()
        process.wait(PATIENCE_S)
    assert manifest(tmp_path / "b")["target"]["ended"] == "by infprof (SIGTERM)"


def test_an_ended_grandchild_is_gone_for_who_waits_for_it(tmp_path: Path) -> None:
    """As scripts do that restart a daemon: without its parent a process belongs to infprof, which must take its code."""
    script = tmp_path / "restart.sh"
    script.write_text(
        "pid=$(sh -c 'sleep 0.2 >/dev/null 2>&1 & echo $!')\nwhile kill -0 $pid 2>/dev/null; do sleep 0.05; done\n"
    )
    done = run(*PLAIN, "-o", str(tmp_path / "b"), "--", "sh", str(script))
    assert done.returncode == 0, done.stderr


def test_a_page_that_cannot_be_written_is_said_before_the_run(
    program: Callable[[str], list[str]], tmp_path: Path
) -> None:
    done = run(
        *PLAIN, "-o", str(tmp_path / "b"), "--html", str(tmp_path / "no" / "x.html"), "--", *program("print('ran')")
    )
    assert done.returncode == 2 and "ran" not in done.stdout
    assert not (tmp_path / "b").exists()


def test_a_folder_without_permission(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    if os.geteuid() == 0:
        # Root may write anywhere but into /proc.
        place = "/proc/infprof-bundle"
    else:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        place = str(closed / "b")
    done = run(*PLAIN, "-o", place, "--", *program("print('ran')"))
    assert done.returncode == 2 and "ran" not in done.stdout
    assert re.fullmatch(r"infprof: \S+ cannot be written: .*\n", done.stderr)


def test_a_bundle_is_diagnosed_again_the_same(program: Callable[[str], list[str]], tmp_path: Path) -> None:
    first = run("--backend", "none", "-o", str(tmp_path / "b"), "--json", "--", *program("sum(range(10**7))"))
    again = subprocess.run(
        [*INFPROF, "analyze", "--json", str(tmp_path / "b")], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert again.returncode == first.returncode == 0, again.stderr
    assert again.stdout == first.stdout == (tmp_path / "b" / "diagnosis.json").read_text()


def test_a_run_that_cannot_be_diagnosed_says_where_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infprof import cli

    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(cli, "_diagnose", broken)
    words = ["run", *PLAIN, "-o", str(tmp_path / "b"), "--", "true"]
    done = CliRunner().invoke(cli.app, words)
    assert isinstance(done.exception, RuntimeError)
    assert f"what was collected is kept in {tmp_path / 'b'}" in done.stderr
    assert manifest(tmp_path / "b")["state"] == "complete"


# --- what it is asked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--", ""], "no program called"),
        ([], "either a command after --, or --pid"),
        (["--pid", "1", "--", "true"], "either a command after --, or --pid"),
        (["--duration", "soon", "--", "true"], "write a time such as 10s"),
        (["--duration", "0s", "--", "true"], "above 0"),
        (["--backend", "perf", "--", "true"], "choose auto, nsys, torch, cupti or none"),
        (["--probes", "gpu", "--", "true"], "no probe called gpu"),
        (["--capture", "always", "--", "true"], "choose session, cuda-profiler-api or nvtx:RANGE"),
        (["--capture", "nvtx:step", "--backend", "none", "--", "true"], "--backend none leaves it out"),
        (["--capture", "nvtx:step", "--pid", "1"], "--pid leaves it out"),
        (["--", "CUDA_VISIBLE_DEVICES=1", "true"], "`env CUDA_VISIBLE_DEVICES=1`"),
        (["--probes", "host, gpu", "--", "true"], "no probe called gpu:"),
        (["--ready-log", "(", "--", "true"], "not a regular expression"),
        (["--ready-url", "localhost", "--", "true"], "give a URL"),
        (["--ready-url", "http://a..b/", "--", "true"], "give a URL"),
        (["--url", "http://[::1", "--", "true"], "give a URL"),
        (["--keep", "--ready-log", "x", "--", "true"], "--keep and --ready-log"),
        (["--load", "user=8", "--", "true"], "users"),
    ],
)
def test_wrong_options_end_before_anything_is_started(tmp_path: Path, words: list[str], says: str) -> None:
    done = run("-o", str(tmp_path / "b"), *words)
    assert done.returncode == 2
    assert says in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("text", "seconds"), [("10s", 10.0), ("500ms", 0.5), ("2min", 120.0), ("1.5h", 5400.0), ("7", 7.0)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds("--duration", text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "10 parsecs", "1e400s", "inf"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_seconds("--duration", text)


def test_secrets_of_the_command_line_are_not_kept() -> None:
    command = [
        "serve",
        "--api-key",
        "sk-1",
        "--hf-token=hf_2",
        "--model",
        "m",
        "--url",
        "http://u:p@host/x?sig=3",
        "HF_TOKEN=4",
    ]
    kept = redact_command(command)
    assert kept[:2] == ["serve", "--api-key"] and kept[4:6] == ["--model", "m"]
    assert not any(secret in " ".join(kept) for secret in ("sk-1", "hf_2", "u:p", "sig", "=4"))


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--api-key", "s1", "s2"],
        ["curl", "-H", "Authorization: Bearer s1"],
        ["sh", "-c", "HF_TOKEN=s1 serve --api-key s2 --port 80"],
    ],
)
def test_secrets_inside_of_words_are_not_kept(command: list[str]) -> None:
    kept = " ".join(redact_command(command))
    assert "s1" not in kept and "s2" not in kept
    assert kept.startswith(command[0])


@pytest.mark.parametrize("command", [["python", "-m", "tokenizer_server", "--model", "m"], ["./monkey", "keyboard.py"]])
def test_ordinary_words_are_kept(command: list[str]) -> None:
    assert redact_command(command) == command


def test_a_signal_in_the_middle_of_a_line_of_ours_is_no_defect(tmp_path: Path) -> None:
    """Python refuses to write to a stream from a handler that interrupted a write to it."""
    from infprof import session
    from infprof.progress import Progress

    class Stream:
        """As a terminal is: refuses a second write inside of a first; the user presses Ctrl-C during the first."""

        def __init__(self) -> None:
            self.writing = self.pressed = False
            self.text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> None:
            if self.writing:
                raise RuntimeError("reentrant call")
            self.writing = True
            if not self.pressed and "capture" in text:
                self.pressed = True
                signal.raise_signal(signal.SIGINT)
            self.text += text
            self.writing = False

        def flush(self) -> None:
            pass

    stream = Stream()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    options = session.RunOptions(command, output=tmp_path / "b", backend="none", probes=())
    result = session.Session(options, Progress(stream)).run()  # type: ignore[arg-type]
    assert result.exit_code == 130 and "SIGINT: ending the capture" in stream.text
