"""Trace events out of JSON text of any size: in pieces, at the speed of the decoder, and past what is no JSON.

The text is cut into pieces where an event seems to end; a piece that decodes was cut in the right place, since no part
of a broken-up value is JSON. One that does not decode is repaired where the defect is a known one (see ``_repaired``),
else read up to the event at fault; this one is dropped and counted with its place.
"""

from __future__ import annotations

import json
import re
import zlib
from bisect import bisect_left, bisect_right
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
# What is larger and no JSON is no event with a slip in it, but damage, and searching it for slips would take minutes.
_MAX_REPAIRED_BYTES = 1 << 18

# An event may hold so many places that look like the end of one.
_JOINED = 64
# So many events are tried at once behind one that is no JSON, and so many times more after each success.
_NEXT, _MORE = 16, 4

_KEYS = rb"ph|name|cat|ts|pid|tid|dur|args|bp|s|id"
# Two values without a comma between them are no JSON: where that was forgotten, an event ends all the same.
_BOUNDARY = re.compile(rb'\}[\s\0]*,?[\s\0]*(?=\{\s*"(?:' + _KEYS + rb')"\s*:)')
# Events of tools that begin them in some other way.
_ANY_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
# A string that does not end reaches to the end of the text.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*("?)|[\[\]{}]', re.DOTALL)
_SPACE = re.compile(rb"[\s,\0]*")
_KEY = re.compile(rb'[\s,]*"((?:[^"\\]|\\.)*)"\s*:\s*')
_SCALAR = re.compile(rb"[^,\]}\s]+")
# Strings are matched to be stepped over: what looks like a number inside one is text.
_NO_NUMBER = re.compile(
    rb'"(?:[^"\\]|\\.)*"|,(?=\s*[}\]])|(?<![\w"])[-+]?(?:inf(?:inity)?|nan(?:\([^)]*\))?|n/a)(?![\w"])', re.IGNORECASE
)
_COMMA_NUMBER = re.compile(rb'("(?:blocks|warps) per SM"\s*:\s*-?\d+),(\d+)')
_CONTROL = re.compile(rb"[\x00-\x1f]")
_CONTROL_BYTES = frozenset(range(32))
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
# What may follow a backslash; group 1 is half of a pair of surrogates without the other. Else it is one of a path.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|u(?![dD][89a-fA-F])[\da-fA-F]{4}|[\"\\/bfnrt]"
    rb"|(u[\da-fA-F]{4})|)"
)
_EVENT_PADDING = b", \t\r\n\0"
# Nesting that the decoder does not follow is as good as no JSON.
_NO_JSON = (msgspec.DecodeError, RecursionError)
_AT_BYTE = re.compile(r"\(byte (\d+)\)")

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
    # Where something follows the end of the whole.
    after_end: int | None = None
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
            self._note_rest()
        elif self._buffer[:1] == b"{":
            self._drop(1)
            yield from self._object()
        self.report.bytes_read = self._offset + len(self._buffer)

    # --- the top level ---------------------------------------------------------------------------------------------

    def _object(self) -> Iterator[list[Event]]:
        while True:
            self._skip_space()
            if self._buffer[:1] == b"}" or not self._buffer:
                if self._buffer:
                    self._drop(1)
                    self._note_rest()
                else:
                    self._note_cut()
                return
            key = self._match_growing(_KEY)
            if key is None:
                if self._found_further():
                    continue
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
                if self._found_further():
                    continue
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
            if self._at_end or len(self._buffer) > MAX_EVENT_BYTES:
                return None
            self._fill(2 * len(self._buffer) + self._piece_bytes)

    def _found_further(self) -> bool:
        """Go on at the events where what stands before them is broken."""
        match = None if self.found_events else _EVENTS_KEY.search(self._buffer)
        if match is not None:
            self.report.dropped.append(self._offset)
            self._drop(match.start())
        return match is not None

    def _note_rest(self) -> None:
        """Say where something follows the last bracket; zeros are padding."""
        if self.report.cut_at is not None:
            return
        while self._buffer or not self._at_end:
            rest = self._buffer.lstrip(_EVENT_PADDING + b"\f\v")
            self._drop(len(self._buffer) - len(rest))
            if rest:
                self.report.after_end = self._offset
                return
            self._fill(self._piece_bytes)

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
        events, bad = self._decoded(text)
        if events is not None:
            return events, len(text), False
        edges = [0, *(m.end() for m in _boundaries(text)), len(text)]
        out: list[Event] = []
        # So many events from ``low`` on are tried, and so many repaired at once where one after another wants it.
        low, tried, mended = 0, len(edges), 1
        while low < len(edges) - 1:
            high = min(low + tried, len(edges) - 1)
            events, bad = self._decoded(text[edges[low] : edges[high]])
            if events is not None:
                out += events
                low, tried, mended = high, tried * _MORE, 1
                continue
            place = bisect_right(edges, edges[low] + bad) - 1 if bad is not None else (low + high) // 2
            place = min(place, high - 1)
            if place > low:
                tried = place - low
                continue
            tried = _NEXT
            limit = _MAX_REPAIRED_BYTES if mended == 1 else len(text)
            events = self._repaired_events(text[edges[low] : edges[min(low + mended, len(edges) - 1)]], limit)
            if events is not None:
                out += events
                low, mended = min(low + mended, len(edges) - 1), mended * _MORE
            elif mended > 1:
                mended = 1
            else:
                end, closed = self._mend(text, edges, low, last, out)
                if end is None or closed:
                    return out, edges[low] if end is None else end, closed
                low = bisect_left(edges, end)
                if edges[low] != end:
                    edges.insert(low, end)
        return out, len(text), False

    def _mend(self, text: bytes, edges: list[int], low: int, last: bool, out: list[Event]) -> tuple[int | None, bool]:
        """A fragment that is no JSON: part of an event that was cut in two, the last event, or a defect.

        Returns where to go on (None: more text is needed) and whether the array ended there.
        """
        begin, limit = _skip(text, edges[low]), edges[min(low + _JOINED, len(edges) - 1)]
        if text[begin : begin + 1] == b"]":
            return begin + 1, True
        end = _value_end(text, begin, limit)
        events = self._sound(text[begin:end]) if end is not None else None
        if events is not None and end is not None:
            out += events
            end = _skip(text, end)
            if text[end : end + 1] == b"]":
                return end + 1, True
            if end == len(text) or text[end : end + 1] == b"{" or edges[bisect_left(edges, end)] == end:
                return end, False
            begin, low = end, bisect_right(edges, end) - 1
            limit = len(text) if low == len(edges) - 2 else begin
        if limit == len(text) and _is_begun(text[begin:]) and not (last and self._goes_on(text, edges, low)):
            if not last:
                return None, False
            # The last event, not whole: where the file was cut, which is said once and is no defect of its own. What looks
            # like further events is part of this one.
            self.report.cut_at = self._offset + begin
            return len(text), False
        if begin < len(text):
            self.report.dropped.append(self._offset + begin)
        return edges[low + 1], False

    def _goes_on(self, text: bytes, edges: list[int], low: int) -> bool:
        """Whether sound events with a time follow a fragment, so that the text does not end within that one."""
        following = (text[edges[i] : edges[i + 1]] for i in range(low + 1, min(low + _JOINED, len(edges) - 1)))
        return any(b'"ts"' in part and bool(self._sound(part)) for part in following)

    def _decoded(self, text: bytes) -> tuple[list[Event] | None, int | None]:
        """The events between commas; None where they are no JSON, and about where that shows, if that is known."""
        array = _array(text)
        try:
            return self._decoder.decode(array), None
        except msgspec.ValidationError:
            return self._loosely(array), None
        except _NO_JSON as error:
            at_byte = _AT_BYTE.search(str(error))
            if at_byte is not None:
                return None, max(int(at_byte[1]) - 2, 0)
        try:
            text.decode()
        except UnicodeDecodeError as error:
            return None, error.start
        return None, None

    def _repaired_events(self, text: bytes, limit: int = _MAX_REPAIRED_BYTES) -> list[Event] | None:
        """The events between commas where they are JSON after repair, else None; ``limit``: larger texts are not tried."""
        for strings_too in (False, True):
            repaired = _repaired(_array(text), strings_too) if len(text) <= limit else None
            if repaired is None:
                continue
            try:
                events: list[Event] | None = self._decoder.decode(repaired[0])
            except msgspec.ValidationError:
                events = self._loosely(repaired[0])
            except _NO_JSON:
                continue
            if events is not None:
                non_finite, decimal_commas, repaired_text = repaired[1]
                self.report.non_finite += non_finite
                self.report.decimal_commas += decimal_commas
                self.report.repaired_text += repaired_text
                return events
        return None

    def _sound(self, text: bytes) -> list[Event] | None:
        events = self._decoded(text)[0]
        return self._repaired_events(text) if events is None else events

    def _loosely(self, array: bytes) -> list[Event] | None:
        try:
            values = msgspec.json.decode(array)
        except _NO_JSON:
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
    return _is_truncated(text) or (
        len(text) <= _MAX_REPAIRED_BYTES
        and (repaired := _repaired(text, True)) is not None
        and _is_truncated(repaired[0])
    )


def _is_truncated(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except _NO_JSON as error:
        return "truncated" in str(error)
    return False


def _array(text: bytes) -> bytes:
    return b"[" + text.rstrip(_EVENT_PADDING) + b"]"


def _boundaries(text: bytes) -> Iterator[re.Match[bytes]]:
    pattern = _BOUNDARY if _BOUNDARY.search(text) else _ANY_BOUNDARY
    return pattern.finditer(text)


def _skip(text: bytes, begin: int) -> int:
    match = _SPACE.match(text, begin)
    return match.end() if match is not None else begin


def _last_boundary(text: bytes) -> int | None:
    """Behind the comma after the last event that is surely followed by another one; None without any."""
    return _last_match(_BOUNDARY, text) or _last_match(_ANY_BOUNDARY, text)


def _last_match(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    # Looked for from the end, in windows that grow.
    size = 1 << 14
    while True:
        begin = max(len(text) - size, 0)
        last = None
        for last in pattern.finditer(text, begin):  # noqa: B007
            pass
        if last is not None:
            return last.end()
        if begin == 0:
            return None
        size *= 8


def _value_end(text: bytes, begin: int, limit: int | None = None) -> int | None:
    """Where the JSON value that begins here ends; None if it does not end (before ``limit``)."""
    first, limit = text[begin : begin + 1], len(text) if limit is None else limit
    if first not in (b"{", b"[", b'"'):
        scalar = _SCALAR.match(text, begin, limit)
        return scalar.end() if scalar is not None else None
    depth = 0
    for token in _TOKEN.finditer(text, begin, limit):
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


def _repaired(text: bytes, strings_too: bool) -> tuple[bytes, tuple[int, int, int]] | None:
    """The text without what torch and others have written that is no JSON; None if there is nothing of the kind.

    Commas before a closing bracket go. Counted: numbers that are none (inf, nan, N/A → null), decimal commas, and with
    ``strings_too`` strings with control characters, wrong escapes or bytes that are no UTF-8 (replaced).
    """
    counts = [0, 0, 0]
    commas = 0

    def replaced(match: re.Match[bytes]) -> bytes:
        nonlocal commas
        if match[0].startswith(b'"'):
            return match[0]
        if match[0] == b",":
            commas += 1
            return b""
        counts[0] += 1
        return b"null"

    def clean(match: re.Match[bytes]) -> bytes:
        string = match[0]
        out = _escaped(string) if b"\\" in string else string
        if _CONTROL.search(out):
            for byte in sorted(set(out) & _CONTROL_BYTES):
                out = out.replace(bytes([byte]), b"\\u%04x" % byte)
        if not _is_utf8(out):
            out = out.decode("utf-8", "replace").encode()
        counts[2] += out != string
        return out

    out, counts[1] = _COMMA_NUMBER.subn(rb"\1.\2", text)
    out = _NO_NUMBER.sub(replaced, out)
    if strings_too:
        out = _STRING.sub(clean, out)
    return (out, (counts[0], counts[1], counts[2])) if any(counts) or commas else None


def _escaped(string: bytes) -> bytes:
    """A string whose backslashes all begin an escape: half a surrogate pair is replaced, a lone backslash doubled."""

    def mended(match: re.Match[bytes]) -> bytes:
        return b"\\ufffd" if match[1] else b"\\\\" if match[0] == b"\\" else match[0]

    return _ESCAPE.sub(mended, string)


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
    except _NO_JSON:
        try:
            return json.loads(text.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError):
            return None
