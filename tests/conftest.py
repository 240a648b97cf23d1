"""Paths to data that tests may read and a user's clone does not have: those tests skip."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """The folder of public traces with their true figures."""
    folder = SHARED / "traces"
    if not folder.is_dir():
        pytest.skip("needs the shared traces, which a clone does not have")
    return folder
