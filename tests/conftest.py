"""Paths to data that tests may read and a user's clone does not have: those tests skip."""

from __future__ import annotations

import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

# A shell starts background jobs with SIGINT ignored, and so would be every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def data() -> Path:
    """The files that belong to the shared cases."""
    folder = SHARED / "cases" / "data"
    if not folder.is_dir():
        pytest.skip("needs the shared cases, which a clone does not have")
    return folder


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], list[str]]:
    """A Python program from its text, as a command."""

    def make(text: str) -> list[str]:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(text))
        return [sys.executable, str(path)]

    return make


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """The folder of public traces with their true figures."""
    folder = SHARED / "traces"
    if not folder.is_dir():
        pytest.skip("needs the shared traces, which a clone does not have")
    return folder
