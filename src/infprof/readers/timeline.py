"""Timelines that infprof drew for Perfetto: known by their beginning, and refused.

They are trace-event files, and hold the part of a profile that was drawn, under names of their own: a diagnosis of one
would be of something else than the profile.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from infprof.errors import InfprofError
from infprof.readers.gzipped import unpacked

# How reports/perfetto.py begins every file.
BEGINNING = b'{"infprof":'


class TimelineReader:
    name = "infprof-timeline"

    def sniff(self, path: Path, head: bytes) -> bool:
        """Whether the file begins as a timeline does, plain or compressed."""
        return unpacked(head, len(BEGINNING)).startswith(BEGINNING)

    def read(self, path: Path) -> NoReturn:
        """Raises InfprofError: it is no profile."""
        raise InfprofError(
            f"{path} is a timeline that infprof drew for Perfetto, not a profile: analyze the profile it was made of."
        )
