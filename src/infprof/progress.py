"""What goes on, on stderr: of `run` one line per step, and on a terminal its clock; of long files how far they are read.

A reader calls ``report_read``, whoever asked; only the command line, on a terminal, listens (``shown_reading``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

# Redrawn no faster than this, so that a program that writes to the same terminal stays readable.
_REDRAW_S = 1.0
# A file that is read sooner needs no line; nothing else writes meanwhile.
_QUIET_S, _READING_REDRAW_S = 1.0, 0.2
_NAME_WIDTH = 40

_listener: Callable[[str, int, int], None] | None = None


def report_read(name: str, done: int, total: int) -> None:
    """Say how many of a file's bytes have been read; nothing happens where nobody listens."""
    if _listener is not None:
        _listener(name, done, total)


@contextmanager
def shown_reading(stream: TextIO | None = None) -> Iterator[None]:
    """Show on a terminal how far a file is read that takes long, and what follows; leave no line behind."""
    global _listener
    progress, began = Progress(stream, _READING_REDRAW_S), time.monotonic()
    before = _listener

    def show(name: str, done: int, total: int) -> None:
        if time.monotonic() - began >= _QUIET_S and total > 0:
            # One line of a narrow terminal: a longer one cannot be erased.
            name = name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH // 2]}…{name[-_NAME_WIDTH // 2 + 1 :]}"
            share = min(100 * done // total, 100)
            progress.status(f"reading {name} … {share} %" if done < total else f"diagnosing {name} …")

    _listener = show
    try:
        yield
    finally:
        _listener = before
        progress.done()


class Progress:
    """Lines for people. ``say`` keeps a line; ``status`` shows what goes on now and is overwritten by the next."""

    def __init__(self, stream: TextIO | None = None, redraw_s: float = _REDRAW_S) -> None:
        self._redraw_s = redraw_s
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
        if not self._live or time.monotonic() - self._drawn < self._redraw_s:
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
