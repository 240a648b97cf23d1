"""Trace events out of JSON text of any size: in pieces, at the speed of the decoder, and past what is no JSON.

The text is cut into pieces where an event seems to end; a piece that decodes was cut in the right place, since no part
of a broken-up value is JSON. One that does not decode is repaired where the defect is a known one (see ``_repaired``),
else halved until the events at fault stand alone; these are dropped and counted with their place.
"""

from __future__ import annotations

import json
import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from infprof.errors import InfprofError
from infprof.progress import report_read
from infprof.readers.gzipped import GZIP_MAGIC

PIECE_BYTES = 4 << 20
# One event larger than this is taken for a cut inside a string.
MAX_EVENT_BYTES = 64 << 20

# An event may hold so many places that look like the end of one.
_JOINED = 64

_KEYS = rb"ph|name|cat|ts|pid|tid|dur|args|bp|s"
_BOUNDARY = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:' + _KEYS + rb')"\s*:)')
# A string that does not end reaches to the end of the text.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*("?)|[\[\]{}]', re.DOTALL)
_SPACE = re.compile(rb"[\s,]*")
_KEY = re.compile(rb'[\s,]*"((?:[^"\\]|\\.)*)"\s*:\s*')
_SCALAR = re.compile(rb"[^,\]}\s]+")
# Strings are matched to be stepped over: what looks like a number inside one is text.
_NO_NUMBER = re.compile(
    rb'"(?:[^"\\]|\\.)*"|(?<![\w"])[-+]?(?:inf(?:inity)?|nan(?:\([^)]*\))?|n/a)(?![\w"])', re.IGNORECASE
)
_COMMA_NUMBER = re.compile(rb'("(?:blocks|warps) per SM"\s*:\s*-?\d+),(\d+)')
_CONTROL = re.compile(rb"[\x00-\x1f]")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)

Event = TypeVar("Event")


@dataclass
class TextReport:
    """What was met while reading: for the problems of a trace. Offsets are bytes of the (decompressed) text."""

    bytes_read: int = 0
    compressed: bool = False
    # Where the text ends too early, None if it is whole; for gzip the bytes of the file that were there.
    cut_at: int | None = None
    cut_file_bytes: int | None = None
    gzip_damaged: bool = False
    dropped: list[int] = field(default_factory=list)
    non_finite: int = 0
    repaired_text: int = 0
    decimal_commas: int = 0
    odd_types: int = 0


class _Text:
    """The bytes of a file, decompressed where they are gzip (told by the first bytes, not by the name)."""

    def __init__(self, path: Path, report: TextReport) -> None:
        self._path = path
        self._report = report

    def pieces(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                head = file.read(2)
                file.seek(0)
                self._report.compressed = head == GZIP_MAGIC
                size = self._path.stat().st_size
                whole = iter(lambda: file.read(PIECE_BYTES), b"")
                for piece in self._inflated(file) if self._report.compressed else whole:
                    yield piece
                    report_read(self._path.name, file.tell(), size)
        except OSError as error:
            raise InfprofError(f"{self._path} cannot be read: {error.strerror or error}.") from None

    def _inflated(self, file: Any) -> Iterator[bytes]:
        engine, data, ended = zlib.decompressobj(31), b"", False
        while True:
            data = data or file.read(1 << 16)
            if not data:
                break
            before = engine.copy()
            try:
                text = engine.decompress(data, PIECE_BYTES)
            except zlib.error:
                # What follows the last member may be padding; anything else is damage.
                if not ended:
                    self._report.gzip_damaged = True
                    yield _before_damage(before, data)
                break
            data, ended = engine.unconsumed_tail, engine.eof
            if ended:
                data, engine = engine.unused_data.lstrip(b"\0"), zlib.decompressobj(31)
            if text:
                yield text
        if not ended:
            self._report.cut_file_bytes = self._path.stat().st_size


def _before_damage(engine: Any, data: bytes) -> bytes:
    """What can be decompressed of data before the byte at which they are damaged."""
    out = []
    try:
        for i in range(len(data)):
            out.append(engine.decompress(data[i : i + 1]))
    except zlib.error:
        pass
    return b"".join(out)


class EventStream(Generic[Event]):
    """The events of one file in lists of a few thousand; the other keys of the top level in ``top`` when done.

    ``events_type`` is a msgspec type for a list of events; ``lenient`` turns one plain dict into an event, for pieces
    whose types are not the declared ones, and may return None for what is no event.
    """

    def __init__(
        self,
        path: Path,
        events_type: Any,
        lenient: Callable[[dict[str, Any]], Event | None],
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.top: dict[str, Any] = {}
        self.report = TextReport()
        self.found_events = False
        self._path = path
        self._source = _Text(path, self.report).pieces()
        self._decoder: msgspec.json.Decoder[list[Event]] = msgspec.json.Decoder(events_type)
        self._lenient = lenient
        self._piece_bytes = piece_bytes
        self._buffer = b""
        self._offset = 0
        self._at_end = False

    def use(self, events_type: Any) -> None:
        """Decode what follows as another type."""
        self._decoder = msgspec.json.Decoder(events_type)

    def __iter__(self) -> Iterator[list[Event]]:
        self._fill(self._piece_bytes)
        if self._buffer.startswith(b"\xef\xbb\xbf"):
            self._drop(3)
        self._skip_space()
        if self._buffer[:1] == b"[":
            self._drop(1)
            self.found_events = True
            yield from self._events()
        elif self._buffer[:1] == b"{":
            self._drop(1)
            yield from self._object()
        self.report.bytes_read = self._offset + len(self._buffer)

    # --- the top level ---------------------------------------------------------------------------------------------

    def _object(self) -> Iterator[list[Event]]:
        while True:
            self._skip_space()
            if self._buffer[:1] == b"}" or not self._buffer:
                if not self._buffer:
                    self._note_cut()
                return
            key = self._match_growing(_KEY)
            if key is None:
                self._note_cut()
                return
            self._drop(key.end())
            name = key[1].decode("utf-8", "replace")
            if name == "traceEvents" and self._buffer[:1] == b"[":
                self._drop(1)
                self.found_events = True
                yield from self._events()
                continue
            end = self._value_end_growing()
            if end is None:
                self._note_cut()
                return
            self.top[name] = _plain_value(self._buffer[:end])
            self._drop(end)

    def _match_growing(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        while True:
            match = pattern.match(self._buffer)
            if match is not None and (match.end() < len(self._buffer) or self._at_end):
                return match
            if self._at_end or len(self._buffer) > MAX_EVENT_BYTES:
                return None
            self._fill(2 * len(self._buffer) + self._piece_bytes)

    def _value_end_growing(self) -> int | None:
        while True:
            end = _value_end(self._buffer, 0)
            if end is not None and (end < len(self._buffer) or self._at_end):
                return end
            if self._at_end:
                return None
            self._fill(2 * len(self._buffer) + self._piece_bytes)

    def _note_cut(self) -> None:
        if self.report.cut_at is None:
            self.report.cut_at = self._offset + len(self._buffer)

    # --- the array of events ---------------------------------------------------------------------------------------

    def _events(self) -> Iterator[list[Event]]:
        """All events up to the end of the array; the buffer then begins behind it."""
        wanted = self._piece_bytes
        while True:
            self._fill(wanted)
            last = self._at_end or len(self._buffer) > MAX_EVENT_BYTES
            cut = len(self._buffer) if last else _last_boundary(self._buffer)
            events, used, closed = self._decode(self._buffer[:cut], last) if cut else ([], 0, False)
            if events:
                yield events
            self._drop(used)
            if closed:
                return
            if last and not self._buffer:
                self._note_cut()
                return
            # An event that is longer than the piece, or that a cut inside it went through, needs more text.
            wanted = self._piece_bytes if used else 2 * max(len(self._buffer), self._piece_bytes)

    def _decode(self, text: bytes, last: bool) -> tuple[list[Event], int, bool]:
        """The events of a piece, how much of it they took, and whether the array ended there."""
        events = self._decoded(text)
        if events is not None:
            return events, len(text), False
        edges = [0, *(m.end() for m in _BOUNDARY.finditer(text)), len(text)]
        out: list[Event] = []
        # Halves of what does not decode, down to what may be single events.
        stack, done = [(0, len(edges) - 1)], 0
        while stack:
            low, high = stack.pop()
            low = max(low, done)
            if low >= high:
                continue
            events = self._decoded(text[edges[low] : edges[high]])
            if events is not None:
                out += events
                done = high
            elif high - low > 1:
                middle = (low + high) // 2
                stack += [(middle, high), (low, middle)]
            else:
                end, closed = self._mend(text, edges, low, last, out)
                if end is None or closed:
                    return out, edges[low] if end is None else end, closed
                done = bisect_left(edges, end)
        return out, len(text), False

    def _mend(self, text: bytes, edges: list[int], low: int, last: bool, out: list[Event]) -> tuple[int | None, bool]:
        """A fragment that is no JSON: part of an event that was cut in two, the last event, or a defect.

        Returns where to go on (None: more text is needed) and whether the array ended there.
        """
        begin, limit = _skip(text, edges[low]), edges[min(low + _JOINED, len(edges) - 1)]
        if text[begin : begin + 1] == b"]":
            return begin + 1, True
        end = _value_end(text[begin:limit], 0)
        events = self._decoded(text[begin : begin + end]) if end is not None else None
        if events is not None and end is not None:
            out += events
            end = _skip(text, begin + end)
            return (end + 1, True) if text[end : end + 1] == b"]" else (end, False)
        if limit == len(text) and _is_begun(text[begin:]):
            if not last:
                return None, False
            # The last event, not whole: where the file was cut, which is said once and is no defect of its own.
            self.report.cut_at = self._offset + begin
        elif begin < len(text):
            self.report.dropped.append(self._offset + begin)
        return edges[low + 1], False

    def _decoded(self, text: bytes) -> list[Event] | None:
        """The events between commas; None where they are no JSON even after repair."""
        array = b"[" + text.rstrip(b", \t\r\n") + b"]"
        try:
            return self._decoder.decode(array)
        except msgspec.ValidationError:
            return self._loosely(array)
        except msgspec.DecodeError as error:
            if "trailing characters" in str(error):
                # The array of events ends within this text: all before that was understood, and nothing is to repair.
                return None
        repaired = _repaired(array)
        if repaired is None:
            return None
        text, counts = repaired
        try:
            events: list[Event] | None = self._decoder.decode(text)
        except msgspec.ValidationError:
            events = self._loosely(text)
        except msgspec.DecodeError:
            return None
        if events is not None:
            self.report.non_finite += counts[0]
            self.report.decimal_commas += counts[1]
            self.report.repaired_text += counts[2]
        return events

    def _loosely(self, array: bytes) -> list[Event] | None:
        try:
            values = msgspec.json.decode(array)
        except msgspec.DecodeError:
            return None
        self.report.odd_types += 1
        events = (self._lenient(value) for value in values if isinstance(value, dict))
        return [event for event in events if event is not None]

    # --- the buffer ------------------------------------------------------------------------------------------------

    def _fill(self, size: int) -> None:
        parts, held = [self._buffer], len(self._buffer)
        while held < size and not self._at_end:
            piece = next(self._source, b"")
            self._at_end = not piece
            parts.append(piece)
            held += len(piece)
        self._buffer = b"".join(parts) if len(parts) > 1 else self._buffer

    def _drop(self, count: int) -> None:
        self._buffer = self._buffer[count:]
        self._offset += count

    def _skip_space(self) -> None:
        while True:
            self._drop(_skip(self._buffer, 0))
            if self._buffer or self._at_end:
                return
            self._fill(self._piece_bytes)


def _is_begun(text: bytes) -> bool:
    """Whether the text is the beginning of a value and no more."""
    # Half a number or word at the end is no defect either.
    text = text.rstrip(b"+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\\")
    repaired = _repaired(text)
    try:
        msgspec.json.decode(text if repaired is None else repaired[0])
    except msgspec.DecodeError as error:
        return "truncated" in str(error)
    return False


def _skip(text: bytes, begin: int) -> int:
    match = _SPACE.match(text, begin)
    return match.end() if match is not None else begin


def _last_boundary(text: bytes) -> int | None:
    """Behind the comma after the last event that is surely followed by another one; None without any."""
    # Looked for from the end, in windows that grow.
    size = 1 << 14
    while True:
        begin = max(len(text) - size, 0)
        last = None
        for last in _BOUNDARY.finditer(text, begin):  # noqa: B007
            pass
        if last is not None:
            return last.end()
        if begin == 0:
            return None
        size *= 8


def _value_end(text: bytes, begin: int) -> int | None:
    """Where the JSON value that begins here ends; None if it does not end."""
    first = text[begin : begin + 1]
    if first not in (b"{", b"[", b'"'):
        scalar = _SCALAR.match(text, begin)
        return scalar.end() if scalar is not None else None
    depth = 0
    for token in _TOKEN.finditer(text, begin):
        mark = token[0]
        if mark.startswith(b'"') and not token[1]:
            return None
        if mark in (b"{", b"["):
            depth += 1
        elif mark in (b"}", b"]"):
            depth -= 1
        if depth <= 0:
            return token.end()
    return None


def _repaired(text: bytes) -> tuple[bytes, tuple[int, int, int]] | None:
    """The text without what torch and others have written that is no JSON; None if there is nothing of the kind.

    Counted: numbers that are none (inf, nan, N/A → null), decimal commas, strings with control characters or bytes that
    are no UTF-8 (replaced).
    """
    counts = [0, 0, 0]

    def null(match: re.Match[bytes]) -> bytes:
        if match[0].startswith(b'"'):
            return match[0]
        counts[0] += 1
        return b"null"

    def clean(match: re.Match[bytes]) -> bytes:
        string = match[0]
        if not _CONTROL.search(string) and _is_utf8(string):
            return string
        counts[2] += 1
        string = string.decode("utf-8", "replace").encode()
        return _CONTROL.sub(lambda c: b"\\u%04x" % c[0][0], string)

    out = _COMMA_NUMBER.sub(rb"\1.\2", text)
    counts[1] = len(_COMMA_NUMBER.findall(text))
    out = _NO_NUMBER.sub(null, out)
    if _CONTROL.search(out.translate(None, b"\n\r\t")) or not _is_utf8(out) or not any(counts):
        out = _STRING.sub(clean, out)
    return (out, (counts[0], counts[1], counts[2])) if any(counts) else None


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _plain_value(text: bytes) -> Any:
    """A value of the top level; None where it is no JSON."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        try:
            return json.loads(text.decode("utf-8", "replace"), strict=False)
        except ValueError:
            return None
