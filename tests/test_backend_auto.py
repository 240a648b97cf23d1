"""`infprof run --backend auto`: nsys, else PyTorch's profiler, else telemetry alone; which and why is said everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_torch import write_fake_torch
from infprof.errors import InfprofError
from infprof.probes import Unavailable, backends
from infprof.probes.nsys_command import CapturePlan
from run_bench import PATIENCE_S, manifest, nothing_left

# The command on a machine without nsys.
_WITHOUT_NSYS = (
    "from infprof import doctor; doctor.find_nsys = lambda machine: []; from infprof.cli import main; main()"
)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


class FakeNsys:
    name = "nsys"
    why = "nsys is installed"
    version = (2025, 1)


def no_nsys(*_: Any) -> Any:
    raise Unavailable("There is no nsys.")


def chosen(name: str, command: list[str], tmp_path: Path, trigger: Any = "session") -> backends.Choice:
    return backends.choose(name, CapturePlan(tmp_path, trigger=trigger), command, os.environ, None)


def test_nsys_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_nsys", lambda *_: FakeNsys())
    auto, asked = (chosen(name, [sys.executable, "x.py"], tmp_path) for name in ("auto", "nsys"))
    assert (auto.why, auto.said) == ("nsys is installed", "recording with nsys 2025.1 (nsys is installed)")
    assert (asked.why, asked.said) == ("--backend nsys", "recording with nsys 2025.1 (--backend nsys)")
    assert not auto.is_fallback and not asked.is_fallback


def test_a_python_without_nsys_gets_the_profiler_of_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_nsys", no_nsys)
    choice = chosen("auto", [sys.executable, "x.py"], tmp_path)
    assert choice.backend is not None and choice.backend.name == "torch" and choice.is_fallback
    assert choice.why == "There is no nsys. The program is Python, and PyTorch brings a profiler of its own."
    assert str(choice.said).splitlines() == [
        "recording with the profiler of PyTorch: the program is Python, and PyTorch brings a profiler of its own.",
        "not with nsys: there is no nsys.",
    ]


@pytest.mark.parametrize(
    ("command", "words"),
    [(["sleep", "1"], "--backend torch"), ([sys.executable, "-I", "x.py"], "-I keeps out")],
)
def test_what_nothing_can_record_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], words: str
) -> None:
    monkeypatch.setattr(backends, "_nsys", no_nsys)
    choice = chosen("auto", command, tmp_path)
    assert choice.backend is None and choice.is_fallback
    assert choice.why.startswith("There is no nsys.") and words in choice.why
    assert str(choice.said).startswith("no timeline is recorded, only telemetry:\nThere is no nsys.")


def test_a_range_is_for_nsys_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_nsys", no_nsys)
    assert chosen("auto", [sys.executable], tmp_path, "cuda-profiler-api").backend is None


def test_what_was_asked_for_by_name_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_nsys", no_nsys)
    with pytest.raises(InfprofError, match="There is no nsys"):
        chosen("nsys", [sys.executable, "x.py"], tmp_path)


@pytest.mark.parametrize(
    ("python", "name", "took"), [(True, "torch", "the profiler of PyTorch"), (False, "none", "telemetry alone")]
)
def test_terminal_bundle_and_diagnosis_say_which_and_why(tmp_path: Path, python: bool, name: str, took: str) -> None:
    packages = write_fake_torch(tmp_path / "packages")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])}
    program = [sys.executable, "-c", "import torch; torch.work()"] if python else ["true"]
    words = [sys.executable, "-c", _WITHOUT_NSYS, "run", "--probes", "", "-o", str(tmp_path / "b"), "--", *program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, env=environ)
    assert done.returncode == 0, done.stderr
    assert "here is no nsys on PATH" in done.stderr and "infprof: infprof:" not in done.stderr
    backend = manifest(tmp_path / "b")["backend"]
    assert backend["name"] == name and backend["why"].startswith("There is no nsys on PATH")
    diagnosis = json.loads((tmp_path / "b/diagnosis.json").read_text())
    assert diagnosis["provenance"]["capture"]["backend"] == name
    assert diagnosis["provenance"]["capture"]["backend_why"] == backend["why"]
    (said,) = [row["message"] for row in diagnosis["problems"] if row["code"] == "not-with-nsys"]
    assert said.startswith(f"--backend auto took {took}. There is no nsys on PATH")
    assert f"--backend auto took {took}" in " ".join(done.stdout.split())
