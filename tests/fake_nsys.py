"""A stand-in for nsys that fails as the test says: `fake_nsys.py SETTINGS.json COMMAND ...`.

It keeps the shape of the real one as far as the backend sees it: sessions, an agent that outlives its caller, `launch`
that runs the target in a session of its own, reports that come at stop or at the target's end. `install` writes the
program and its settings, `calls` gives the command lines that it got.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HEAD, TAIL = b"NVIDIA Tegra Profiler Report 1.", b"\0\0U3w[END]"
HELP = {
    "start": "--session --session-new --output --sample --cpuctxsw --gpu-metrics-devices --capture-range "
    "--capture-range-end --force-overwrite",
    "launch": "--session --session-new --trace --cuda-graph-trace --cuda-memory-usage --trace-fork-before-exec --wait "
    "--nvtx-capture",
}


def install(folder: Path, **settings: Any) -> Path:
    """Write a fake nsys into ``folder`` and give its path.

    Settings: version; help (options by command); refuse ({text in the command line: what is said before it fails});
    ranges (number of reports); stray (leave a .qdstrm); full (the disk is full when the report is written); hang (this
    command never ends); stubborn (the agent ignores SIGTERM); deaf (`launch` does not survive a SIGINT); delay_s (how
    long the report takes after the target's end); elsewhere (the report goes to TMPDIR); silent (no report at all); flaky (the first launch fails);
    closes_streams (the target inherits 0, 1 and 2 only); extension (of its reports, with the words of 2021); export
    (the file that an export is a copy of, "" = none is written, without a word).
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(settings))
    program = folder / "nsys"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{Path(__file__).resolve()}" "{folder}" "$@"\n')
    program.chmod(0o755)
    return program


def calls(program: Path) -> list[list[str]]:
    """The command lines that a fake nsys has got, without its name."""
    log = program.parent / "calls.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


class Fake:
    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.folder, self.arguments = folder, arguments
        self.settings = json.loads((folder / "settings.json").read_text())
        self.state_file = folder / "state.json"

    def option(self, name: str) -> str | None:
        return next((a.partition("=")[2] for a in self.arguments if a.startswith(name + "=")), None)

    def state(self) -> dict[str, Any]:
        return json.loads(self.state_file.read_text()) if self.state_file.exists() else {}

    def save(self, **state: Any) -> None:
        partial = self.state_file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(state))
        partial.replace(self.state_file)

    def run(self) -> int:
        command = self.arguments[0]
        if command == "--version":
            print(f"NVIDIA Nsight Systems version {self.settings.get('version', '2023.4.4.54-1')}")
            return 0
        if "--help" in self.arguments:
            options = self.settings.get("help", HELP).get(command, "")
            print("usage:\n" + "\n".join(f"\t{option}=\n\n\t   repeat, primary.\n" for option in options.split()))
            return 0
        with (self.folder / "calls.jsonl").open("a") as log:
            log.write(json.dumps(self.arguments) + "\n")
        for text, answer in self.settings.get("refuse", {}).items():
            if any(text in argument for argument in self.arguments):
                print(answer)
                return 1
        if self.settings.get("hang") == command:
            time.sleep(600)
        return int(getattr(self, command)())

    def start(self) -> int:
        session = self.option("--session-new") or self.option("--session")
        state = self.state()
        if self.option("--session-new"):
            state["agent"] = self.agent(session)
        self.save(**{**state, "output": self.option("--output")})
        return 0

    def agent(self, session: str | None) -> int:
        ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if self.settings.get("stubborn") else ""
        code = f"import signal, time; {ignore} print(1, flush=True); time.sleep(600)"
        agent = subprocess.Popen(
            [sys.executable, "-S", "-c", code, "--start-agent", f"--session-name={session}"],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert agent.stdout is not None
        agent.stdout.readline()
        return agent.pid

    def launch(self) -> int:
        if self.settings.get("flaky") and not (self.folder / "failed").exists():
            (self.folder / "failed").touch()
            print("Dynamic exception type: boost::wrapexcept<QuadDCommon::RuntimeException>")
            return 1
        if not self.settings.get("deaf"):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.option("--session-new"):
            self.save(agent=self.agent(self.option("--session-new")))
        program = next(i for i, a in enumerate(self.arguments[1:], 1) if not a.startswith("--"))
        close = bool(self.settings.get("closes_streams"))
        target = subprocess.Popen(self.arguments[program:], start_new_session=True, close_fds=close)
        code = target.wait()
        time.sleep(self.settings.get("delay_s", 0))
        failed = self.generate()
        self.end_agent()
        return failed or (128 - code if code < 0 else code)

    def stop(self) -> int:
        return self.generate()

    def generate(self) -> int:
        output = self.state().get("output")
        if output is None or self.settings.get("silent"):
            return 0
        self.save(**{**self.state(), "output": None})
        if self.settings.get("full"):
            Path(f"{output}.nsys-rep").write_bytes(HEAD)
            print("Failed to write: No space left on device")
            return 1
        if self.settings.get("elsewhere"):
            output = os.path.join(os.environ["TMPDIR"], "nsys-report-1234")
        ranges = self.settings.get("ranges", 1)
        extension = self.settings.get("extension", ".nsys-rep")
        names = [f"{output}{extension}"] if ranges == 1 else [f"{output}.{i + 1}{extension}" for i in range(ranges)]
        for name in names:
            Path(name).write_bytes(HEAD + TAIL)
        if self.settings.get("stray"):
            stream = os.path.join(os.environ["TMPDIR"], "nsys-report-abcd.qdstrm")
            Path(stream).write_bytes(b"x")
            print(f"Generating '{stream}'")
        if "extension" in self.settings:
            print("Processing [===100%]\n" + "\n".join(f'Report file moved to "{name}"' for name in names), flush=True)
            return 0
        print("[1/1] [===100%] x\rGenerated:\n" + "\n".join(f"    {name}" for name in names), flush=True)
        return 0

    def sessions(self) -> int:
        return 0

    def shutdown(self) -> int:
        self.end_agent()
        return 0

    def end_agent(self) -> None:
        try:
            os.kill(self.state()["agent"], signal.SIGTERM)
        except (KeyError, ProcessLookupError):
            return

    def export(self) -> int:
        output = self.option("--output")
        assert output is not None
        if self.settings.get("full"):
            Path(output).touch()
            print("Dynamic exception type: boost::wrapexcept<QuadDCommon::RuntimeException>")
            print("[QuadDCommon::tag_message*] = database or disk is full")
            return 0
        if self.settings.get("export") is not None:
            if self.settings["export"]:
                Path(output).write_bytes(Path(self.settings["export"]).read_bytes())
            return 0
        Path(output).write_bytes(b"part")
        return 0


if __name__ == "__main__":
    sys.exit(Fake(Path(sys.argv[1]), sys.argv[2:]).run())
