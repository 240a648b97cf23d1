"""What `run` says while it works: on stderr, one line per step; on a terminal the current step with its clock as well."""

from __future__ import annotations

import sys
import time
from typing import TextIO

# Redrawn no faster than this, so that a program that writes to the same terminal stays readable.
_REDRAW_S = 1.0


class Progress:
    """Lines for people. ``say`` keeps a line; ``status`` shows what goes on now and is overwritten by the next."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._drawn = 0.0
        self._shown = ""

    def say(self, text: str) -> None:
        """A line that stays."""
        self._erase()
        self._write(f"infprof: {text}\n")

    def status(self, text: str) -> None:
        """What goes on now; nothing where the stream is no terminal."""
        if not self._live or time.monotonic() - self._drawn < _REDRAW_S:
            return
        self._erase()
        self._shown = f"infprof: {text}"
        self._drawn = time.monotonic()
        self._write(self._shown)

    def step(self, text: str) -> None:
        """What begins now: a line where the stream is no terminal, which shows it with its clock anyway."""
        if not self._live:
            self.say(text)

    def done(self) -> None:
        """Leave no half line behind."""
        self._erase()

    def _erase(self) -> None:
        if self._shown:
            self._write("\r\033[K")
            self._shown = ""

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._live = False  # the terminal is gone; the run goes on
