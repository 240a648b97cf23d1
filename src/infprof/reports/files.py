"""Writing a report: whole or not at all, and never over a file by accident."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from infprof.errors import UsageError


def write_atomic(path: str | Path, text: str, force: bool = False) -> None:
    """Write ``text`` as UTF-8 to a temporary file beside ``path``, then rename it to ``path``.

    An existing file is replaced only with ``force``. A pipe or device (``/dev/stdout``) is written to directly.
    Raises UsageError when the file exists or cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{target} is a folder. Give the name of a file to write in it.")
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        if target.exists() and not force:
            raise UsageError(f"{target} exists already. Choose another name, or replace it with --force.")
        # Through a link, the file that it points to is replaced and the link stays.
        replace_file(target.resolve(), text.encode("utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{target} cannot be written: its folder does not exist. Create it first.") from None
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}. Choose another place.") from None


def replace_file(target: Path, data: bytes) -> None:
    """Put ``data`` at ``target`` in one step; what was there stays whole until then, and after any failure."""
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    # O_EXCL: nobody else's file is opened. Mode 0666 less the umask is what a file gets that is opened plainly.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
