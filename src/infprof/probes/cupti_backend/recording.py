"""What one process has left of its records (``inside/buffers.py`` writes it), put together by kind."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infprof.probes.cupti_backend.decoding import decode
from infprof.probes.cupti_backend.inside.buffers import HEAD
from infprof.trace import IntArray

_TEXTS = {"name", "domain"}


@dataclass
class Recording:
    """The records of one process.

    ``records``: activity kind → structured array (see ``layout``), in the order of writing; a text in them is an index
    into ``texts`` (-1: none), in ``text_columns`` by kind and field. ``about`` is what the process said of itself, ``threads`` system
    thread id → name, ``ended`` whether it came to the end of its recording, ``lost_bytes`` what could not be understood.
    """

    about: dict[str, Any] = field(default_factory=dict)
    records: dict[int, NDArray[Any]] = field(default_factory=dict)
    text_columns: dict[tuple[int, str], IntArray] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    threads: dict[int, str] = field(default_factory=dict)
    lost_bytes: int = 0
    ended: bool = False

    def of(self, kind: int) -> NDArray[Any] | None:
        """The records of a kind; None where there are none."""
        return self.records.get(kind)


def read_recording(path: Path) -> Recording:
    """Read the file of a process; what a crash has cut off at its end is left out.

    Raises OSError where the file cannot be read.
    """
    return _Reader().read(path)


class _Reader:
    def __init__(self) -> None:
        self.recording = Recording()
        self._strides: dict[int, int] = {}
        self._text_of: dict[int, int] = {}
        self._index: dict[str, int] = {}
        self._parts: dict[int, list[NDArray[Any]]] = {}
        self._text_parts: dict[tuple[int, str], list[IntArray]] = {}

    def read(self, path: Path) -> Recording:
        for tag, data in _chunks(path):
            if tag == b"JSON":
                self._take(json.loads(bytes(data)))
            elif tag == b"RECS":
                self._add(data)
        recording = self.recording
        recording.records = {kind: np.concatenate(parts) for kind, parts in self._parts.items()}
        recording.text_columns = {key: np.concatenate(parts) for key, parts in self._text_parts.items()}
        recording.texts = list(self._index)
        recording.lost_bytes += int(recording.about.get("lost_bytes", 0))
        recording.ended = "end" in recording.about
        return recording

    def _take(self, said: dict[str, Any]) -> None:
        for pointer, text in said.pop("texts", {}).items():
            self._text_of[int(pointer)] = self._index.setdefault(text, len(self._index))
        self._strides |= {int(kind): stride for kind, stride in said.pop("strides", {}).items()}
        self.recording.threads |= {int(tid): name for tid, name in said.pop("threads", {}).items()}
        self.recording.about |= said

    def _add(self, data: memoryview) -> None:
        decoded = decode(data, self._strides)
        self.recording.lost_bytes += decoded.lost_bytes
        for kind, records in decoded.records.items():
            # The bytes belong to a file that is closed when this is read.
            self._parts.setdefault(kind, []).append(records.copy())
            for name in _TEXTS & set(records.dtype.names or ()):
                self._text_parts.setdefault((kind, name), []).append(self._texts(records[name]))

    def _texts(self, pointers: NDArray[Any]) -> IntArray:
        distinct, which = np.unique(pointers, return_inverse=True)
        indexes = [self._text_of.get(pointer, -1) for pointer in distinct.tolist()]
        return np.array(indexes, dtype=np.int64)[which]


def _chunks(path: Path) -> Iterator[tuple[bytes, memoryview]]:
    """The whole chunks of a file; each is of use until the next one is asked for."""
    size = path.stat().st_size
    if size < HEAD.size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        place = 0
        while place + HEAD.size <= size:
            tag, _, length = HEAD.unpack_from(data, place)
            place += HEAD.size
            if place + length > size:
                return
            # Copied, so that no array holds on to the file.
            yield tag, memoryview(data[place : place + length])
            place += length
