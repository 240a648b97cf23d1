"""Readers: a file in, a Trace out. The registry is the tuple below; the first whose ``sniff`` says yes reads the file.

A reader is one module with an object that fits ``Reader`` and one line in ``READERS``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

from infprof.errors import InfprofError
from infprof.readers.gzipped import GZIP_MAGIC, unpacked, unpacked_text
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
    from infprof.readers.kineto import KinetoReader
    from infprof.readers.nsys_directory import NsysArrowReader
    from infprof.readers.nsys_rep import NsysReportReader
    from infprof.readers.nsys_sqlite import NsysSqliteReader
    from infprof.readers.timeline import TimelineReader

    return (NsysSqliteReader(), NsysReportReader(), NsysArrowReader(), TimelineReader(), KinetoReader())


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
            raise InfprofError(f"{path} is no regular file: name the profile itself.")
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except PermissionError:
        raise InfprofError(f"{path} cannot be read: permission denied.") from None
    except OSError as error:
        raise InfprofError(f"{path} cannot be read: {error.strerror or error}.") from None
    if not head:
        raise InfprofError(f"{path} is empty (0 bytes): the export or the recording did not finish. Make it again.")
    wrapped = _wrapped(unpacked(head, HEAD_BYTES), head.startswith(GZIP_MAGIC))
    if wrapped is not None:
        raise InfprofError(f"{path} is {wrapped}.")
    for reader in _readers():
        if reader.sniff(path, head):
            return reader.read(path)
    raise InfprofError(_unknown(path, head))


# First bytes of what people hand over instead of the profile: what it is, and what to do.
_UNPACK = "unpack it and name the profile in it"
_WRAPPERS = (
    (b"PK\x03\x04", f"a ZIP archive: {_UNPACK}"),
    (b"(\xb5/\xfd", f"compressed with zstd: {_UNPACK}"),
    (b"\xfd7zXZ\0", f"compressed with xz: {_UNPACK}"),
    (b"BZh", f"compressed with bzip2: {_UNPACK}"),
    (b"\x04\x22\x4d\x18", f"compressed with lz4: {_UNPACK}"),
    (b"7z\xbc\xaf\x27\x1c", f"a 7z archive: {_UNPACK}"),
    (b"\xff\xfe", "text in UTF-16, as PowerShell redirects it: save it as UTF-8"),
    (b"\xfe\xff", "text in UTF-16: save it as UTF-8"),
    (b"{\0", "text in UTF-16: save it as UTF-8"),
    (b"[\0", "text in UTF-16: save it as UTF-8"),
    (b"\0{\0", "text in UTF-16: save it as UTF-8"),
    (b"\0[\0", "text in UTF-16: save it as UTF-8"),
    (b"version https://git-lfs.", "a pointer of Git LFS, not the file itself: fetch it with `git lfs pull`"),
    (b"NVR\0", "a report of Nsight Compute, which has no timeline: record the program with nsys or torch.profiler"),
    (b"PERFILE2", "a recording of Linux perf, which knows nothing of GPUs: record with nsys or torch.profiler"),
)
_TAR_MAGIC = slice(257, 262)


def _wrapped(start: bytes, compressed: bool) -> str | None:
    """What holds the profile, or is mistaken for one, by the (unpacked) first bytes; None for what readers may know."""
    if start[_TAR_MAGIC] == b"ustar":
        return f"a tar archive: {_UNPACK}"
    if compressed and start.startswith(GZIP_MAGIC):
        return "compressed twice with gzip: unpack it once"
    return next((words for magic, words in _WRAPPERS if start.startswith(magic)), None)


# What tells a trace from other JSON, such as the configuration files that lie beside it.
_TRACE_KEYS = re.compile(rb'"(?:traceEvents|ph|schemaVersion|deviceProperties|distributedInfo|baseTimeNanoseconds)"')
# Other keys may come before the events; looked for this far, and by a name that no other kind of file has.
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_PREAMBLE_BYTES = 1 << 20


def is_profile(path: Path) -> bool:
    """Whether a file found in a folder is a profile, by its first bytes; False for what cannot be read.

    Stricter than ``sniff``, which judges files that someone named: JSON must begin like a trace.
    """
    try:
        # Asked before: to open a pipe would wait for its writer.
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return False
    if not head or not any(reader.sniff(path, head) for reader in _readers()):
        return False
    start = unpacked_text(head, HEAD_BYTES)
    return start[:1] not in (b"{", b"[") or _TRACE_KEYS.search(start) is not None or _has_events(path)


def _has_events(path: Path) -> bool:
    """Whether JSON has a list of events behind other keys, such as the settings of who recorded it."""
    try:
        with path.open("rb") as file:
            return _EVENTS.search(unpacked(file.read(_PREAMBLE_BYTES), _PREAMBLE_BYTES)) is not None
    except OSError:
        return False


def is_profile_folder(path: Path) -> bool:
    """Whether the folder as a whole is one input: a bundle, or a directory export of nsys."""
    from infprof.readers.bundle import is_bundle
    from infprof.readers.nsys_directory import is_nsys_directory

    return is_nsys_directory(path) or is_bundle(path)


def _read_folder(path: Path) -> Trace:
    from infprof.readers.bundle import is_bundle, read_bundle
    from infprof.readers.nsys_directory import is_nsys_directory, read_nsys_directory

    if is_nsys_directory(path):
        return read_nsys_directory(path)
    if not is_bundle(path):
        raise InfprofError(
            f"{path} is a folder without a profile in it, and no bundle of infprof run: name the file itself."
        )
    return read_bundle(path)


def _unknown(path: Path, head: bytes) -> str:
    if head.startswith(b"PAR1"):
        return f"{path} is one Parquet file, a table of an export at most: name the folder of `nsys export --type parquetdir`."
    looks_text = b"\0" not in head
    what = "a text file" if looks_text else "of an unknown kind"
    return (
        f"{path} is {what}, not a profile: an Nsight Systems report or export (.nsys-rep, .sqlite), or a trace of "
        "PyTorch's profiler (.json, .json.gz)."
    )
