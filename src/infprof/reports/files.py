"""Writing a report: whole or not at all, and never over a file by accident."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from infprof.errors import UsageError


def write_atomic(path: str | Path, text: str, force: bool = False) -> None:
    """Write ``text`` as UTF-8, as ``atomic_file`` does."""
    with atomic_file(path, force) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def atomic_file(path: str | Path, force: bool = False) -> Iterator[IO[bytes]]:
    """A file to write to in pieces, which stands at ``path`` only once all is written: until then it lies beside it.

    An existing file is replaced only with ``force``. A pipe or device (``/dev/stdout``) is written to directly.
    Raises UsageError when the file exists or cannot be written.
    """
    target = Path(path)
    check_target(target, force)
    try:
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                yield file
            return
        # Through a link, the file that it points to is replaced and the link stays.
        with _replacing(target.resolve()) as file:
            yield file
    except FileNotFoundError:
        raise UsageError(f"{target} cannot be written: its folder does not exist. Create it first.") from None
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}. Choose another place.") from None


def check_target(target: Path, force: bool = False) -> None:
    """Raises UsageError where no file can be written, or one is in the way: to be asked before long work."""
    try:
        if target.is_dir():
            raise UsageError(f"{target} is a folder. Give the name of a file to write in it.")
        if target.is_file() and not force:
            raise UsageError(f"{target} exists already. Choose another name, or replace it with --force.")
        if not target.resolve().parent.is_dir():
            raise UsageError(f"{target} cannot be written: its folder does not exist. Create it first.")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}. Choose another place.") from None


def replace_file(target: Path, data: bytes) -> None:
    """Put ``data`` at ``target`` in one step; what was there stays whole until then, and after any failure."""
    with _replacing(target) as file:
        file.write(data)


@contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    # O_EXCL: nobody else's file is opened. Mode 0666 less the umask is what a file gets that is opened plainly.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
