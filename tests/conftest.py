"""Paths to data that tests may read and a user's clone does not have: those tests skip."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

# A shell starts background jobs with SIGINT ignored, and so would be every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """The folder of public traces with their true figures."""
    folder = SHARED / "traces"
    if not folder.is_dir():
        pytest.skip("needs the shared traces, which a clone does not have")
    return folder
