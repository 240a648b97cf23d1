"""Readers: a file in, a Trace out. The registry is the tuple below; the first whose ``sniff`` says yes reads the file.

A reader is one module with an object that fits ``Reader`` and one line in ``READERS``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from infprof.errors import InfprofError
from infprof.trace import Trace


class Reader(Protocol):
    name: str

    def sniff(self, path: Path, head: bytes) -> bool:
        """Whether the file is one of this reader's, by its first bytes (never by its name); cheap, never raises."""
        ...

    def read(self, path: Path) -> Trace:
        """The whole file as a Trace.

        Raises InfprofError where nothing of it can be read.
        """
        ...


def _readers() -> tuple[Reader, ...]:
    # Imported on the first read, so that `infprof --help` does not load numpy.
    from infprof.readers.nsys_sqlite import NsysSqliteReader

    return (NsysSqliteReader(),)


HEAD_BYTES = 4096


def read(path: Path) -> Trace:
    """Read a profile, whatever its kind.

    Raises InfprofError with one sentence for a missing, empty, unreadable or unknown file.
    """
    try:
        if path.is_dir():
            return _read_folder(path)
        if not path.exists():
            raise InfprofError(f"{path} does not exist.")
        if not path.is_file():
            raise InfprofError(f"{path} is no regular file: name the .sqlite file itself.")
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except PermissionError:
        raise InfprofError(f"{path} cannot be read: permission denied.") from None
    except OSError as error:
        raise InfprofError(f"{path} cannot be read: {error.strerror or error}.") from None
    if not head:
        raise InfprofError(f"{path} is empty (0 bytes): the export did not finish. Export the report again.")
    for reader in _readers():
        if reader.sniff(path, head):
            return reader.read(path)
    raise InfprofError(_unknown(path, head))


def _read_folder(path: Path) -> Trace:
    from infprof.readers.bundle import is_bundle, read_bundle

    if not is_bundle(path):
        raise InfprofError(
            f"{path} is a folder, neither a profile nor a bundle of infprof run: name the .sqlite file itself."
        )
    return read_bundle(path)


def _unknown(path: Path, head: bytes) -> str:
    if path.suffix in (".nsys-rep", ".qdrep"):
        return (
            f"{path} is a binary Nsight Systems report: export it first with "
            f"`nsys export --type sqlite {path.name}` and analyze the .sqlite file."
        )
    looks_text = b"\0" not in head
    what = "a text file" if looks_text else "of an unknown kind"
    return f"{path} is {what}, not an Nsight Systems SQLite export (.sqlite or .sqlite.gz)."
