"""CUPTI's buffers: lent out, taken back, and written to a file with what only this process can say of them.

The file is a row of chunks, each written as a whole: a head (tag, 0, bytes that follow), and the bytes. ``JSON`` chunks
tell what is needed to understand the records behind them, ``RECS`` chunks are the bytes of one buffer.
"""

from __future__ import annotations

import collections
import ctypes
import json
import mmap
import os
import struct

if False:  # for type checkers alone: Python 3.8 has another notion of these
    from typing import Any

    from infprof.probes.cupti_backend.inside.library import Cupti

HEAD = struct.Struct("<4sIQ")
_SIZE_BYTES = 2 << 20
# Each thread of the program fills one of its own. What is not filled takes no memory.
_MOST_BUFFERS = 512
_LAST_RECORD = 12
_PAGE_BYTES = 512
_LONGEST_TEXT = 64 << 10

Requested = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
Completed = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)


class ChunkFile:
    """An append-only file: what is written survives the process."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, tag: bytes, data: Any) -> None:
        rest = memoryview(HEAD.pack(tag, 0, len(data))), memoryview(data).cast("B")
        for part in rest:
            while len(part):
                part = part[os.write(self._file, part) :]

    def say(self, **what: Any) -> None:
        self.write(b"JSON", json.dumps(what).encode())

    def close(self) -> None:
        os.close(self._file)


class Buffers:
    """The buffers of one process. The callbacks only hand over: CUPTI may call them in any thread of the program."""

    def __init__(self, cupti: Cupti, file: ChunkFile, pointers: dict[int, tuple[int, ...]]) -> None:
        self._cupti = cupti
        self._file = file
        self._pointers = pointers
        self._memory: dict[int, mmap.mmap] = {}
        self._free: collections.deque[int] = collections.deque()
        self._full: collections.deque[tuple[int, int]] = collections.deque()
        self._strides: dict[int, int] = {}
        self._texts: dict[int, str] = {}
        self.refused = 0
        self.lost_bytes = 0
        # They have to live as long as CUPTI may call them: to the end of the process.
        self.callbacks = (Requested(self._requested), Completed(self._completed))
        self._own_memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)

    def _requested(self, buffer: Any, size: Any, most_records: Any) -> None:
        address: int | None = None
        try:
            address = self._free.popleft()
        except IndexError:
            if len(self._memory) < _MOST_BUFFERS:
                memory = mmap.mmap(-1, _SIZE_BYTES)
                address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                self._memory[address] = memory
            else:
                self.refused += 1
        buffer[0] = address
        size[0] = _SIZE_BYTES if address else 0
        most_records[0] = 0

    def _completed(self, context: Any, stream: int, buffer: int, size: int, valid: int) -> None:
        self._full.append((buffer, valid))

    def drain(self) -> None:
        """Write what has come back, in order, and lend the buffers out again."""
        while self._full:
            address, valid = self._full.popleft()
            memory = self._memory.get(address)
            if memory is None:
                continue
            if valid:
                with memoryview(memory) as view, view[: valid // 8 * 8] as records:
                    self._explain(address, valid, records)
                    self._file.write(b"RECS", records)
            self._free.append(address)

    def _explain(self, address: int, valid: int, records: memoryview) -> None:
        """Say how long the records of a buffer are, and what the texts are that they point to, where that is new."""
        strides = dict(self._strides)
        with records.cast("I") as numbers, records.cast("Q") as words:
            pointers = self._walk(address, valid, numbers, words)
        # A module that has gone may have left its place to another: what is known is read again, once per buffer.
        texts = {pointer: self._text_at(pointer) for pointer in pointers if pointer}
        new = {pointer: text for pointer, text in texts.items() if self._texts.get(pointer) != text}
        self._texts.update(new)
        if new or strides != self._strides:
            self._file.say(texts=new, strides=self._strides)

    def _walk(self, address: int, valid: int, numbers: Any, words: Any) -> set[int]:
        """The addresses in the records of a buffer. It holds up the program for about 0.1 µs per record."""
        place, end = 0, len(words)
        found: set[int] = set()
        steps = {kind: stride // 8 for kind, stride in self._strides.items()}
        offsets = {kind: tuple(offset // 8 for offset in places) for kind, places in self._pointers.items()}
        while place < end:
            kind = numbers[2 * place]
            step = steps.get(kind)
            if step is None:
                stride = self._stride(address, valid, place * 8)
                if not stride:
                    self.lost_bytes += (end - place) * 8
                    break
                self._strides[kind] = stride
                step = steps[kind] = stride // 8
            if kind in offsets and place + step <= end:
                for offset in offsets[kind]:
                    found.add(words[place + offset])
            place += step
        return found

    def _stride(self, address: int, valid: int, offset: int) -> int:
        """How long a record is, bytes, as the library that wrote it says; 0 where it does not know it either."""
        record = ctypes.c_void_p(address + offset)
        result = self._cupti.result(
            "cuptiActivityGetNextRecord", ctypes.c_void_p(address), ctypes.c_size_t(valid), ctypes.byref(record)
        )
        behind = address + valid if result == _LAST_RECORD else record.value or 0
        length = behind - address - offset if result in (0, _LAST_RECORD) else 0
        return length if length > 0 and length % 8 == 0 else 0

    def _text_at(self, pointer: int) -> str:
        """The text at an address of this process; read as a file, so that an address that is none does no harm."""
        text = b""
        while b"\0" not in text and len(text) < _LONGEST_TEXT:
            try:
                piece = os.pread(self._own_memory, _PAGE_BYTES, pointer + len(text))
            except (OSError, OverflowError):
                break
            if not piece:
                break
            text += piece
        return text.partition(b"\0")[0].decode("utf-8", "replace")
