"""Whole columns straight from the pages of an SQLite database: NumPy gathers in place of one step per row.

SQLite hands out rows one value at a time, which costs more than everything that is done with them here. The file format
is stable and documented (https://www.sqlite.org/fileformat2.html), and a table without an index is simple to read: the
tree's leaf pages in order, in each the cells in order, in each cell the types and then the values of all columns.

Only what is plain is read here. Rows with anything else (a value on overflow pages, a type that the column should not
have) are named for SQLite itself to read, and pages that are not as they should be raise ``Unreadable``: what damage
means is SQLite's to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infprof.trace import BoolArray, FloatArray, IntArray, compact, constant

HEADER_BYTES = 100
LEAF, INTERIOR = 0x0D, 0x05
# Few enough that one chunk's columns stay in the processor's cache.
CHUNK_BYTES = 2 << 20
# A tree of this depth would hold more rows than any disk.
MAX_DEPTH = 20

Bytes = NDArray[np.uint8]
# The types of a column's values: one for each row, or one for all.
Kind = NDArray[np.uint8] | IntArray | np.uint8

# By type code: how many bytes the value takes, and how far its eight bytes are shifted to leave the value alone.
# 10 and 11 are reserved; 12 and above are blobs (even) and texts (odd).
_WIDTH = np.array([0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0, *((t - 12) // 2 for t in range(12, 128))], dtype=np.int64)
_SHIFT = np.array([63, 56, 48, 40, 32, 16, 0, 0, 63, 63, *([63] * 118)], dtype=np.int64)
_NULL, _FLOAT, _ZERO, _ONE, _RESERVED = 0, 7, 8, 9, 10


class Unreadable(Exception):
    """The table is not as plain as this reader wants it: SQLite reads it, or says what is wrong with it."""


class Cells(NamedTuple):
    """The wanted values of one chunk. ``odd`` are positions that SQLite must read, with their rowids beside."""

    rows: int
    ints: list[tuple[IntArray, BoolArray | None]]
    floats: list[FloatArray]
    texts: list[Texts]
    odd: IntArray
    rowids: list[int]


@dataclass
class Texts:
    """Texts of one chunk: each row's index into ``values``, -1 where NULL."""

    codes: IntArray
    hashes: list[int]
    values: list[bytes]


class _Records(NamedTuple):
    """Per wanted column the types of the values and where they begin: places, and a distance for all from there.

    ``odd`` marks the rows that SQLite must read.
    """

    kinds: dict[int, Kind]
    places: dict[int, tuple[IntArray, int]]
    odd: BoolArray


class Pages:
    """The pages of one database file that nobody writes. Raises Unreadable where the file's header is unusual."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
        if len(head) < HEADER_BYTES or head[56:60] != b"\0\0\0\x01":
            raise Unreadable("no header, or texts in UTF-16")
        page = int.from_bytes(head[16:18], "big")
        self.page_bytes = 65536 if page == 1 else page
        self._usable = self.page_bytes - head[20]
        if self.page_bytes < 512 or self._usable < 480:
            raise Unreadable("page size")
        self.count = path.stat().st_size // self.page_bytes
        self._file: BufferedReader = path.open("rb")

    def close(self) -> None:
        self._file.close()

    def cells(
        self, root: int, columns: int, ints: Sequence[int], floats: Sequence[int], texts: Sequence[int]
    ) -> Iterator[tuple[Cells, float]]:
        """The wanted columns, given by position, of the table of ``columns`` columns whose tree begins at page ``root``.

        In chunks, each with how many more ones of its size follow.

        Raises Unreadable, also half-way, where a page, a cell or a record is not as it should be.
        """
        leaves = self._leaves(root)
        step = max(CHUNK_BYTES // self.page_bytes, 1)
        for i in range(0, len(leaves), step):
            pages = leaves[i : i + step]
            yield self._chunk(pages, columns, ints, floats, texts), (len(leaves) - i) / len(pages) - 1

    # --- pages -----------------------------------------------------------------------------------------------------

    def _load(self, pages: IntArray, zeros: int = 0) -> Bytes:
        """These pages one after the other, then some zeros."""
        size = self.page_bytes
        buffer = np.empty(len(pages) * size + zeros, dtype=np.uint8)
        buffer[len(pages) * size :] = 0
        view = memoryview(buffer)  # type: ignore[arg-type]
        # Neighbours are read at once: exporters write a table in one go.
        cuts = np.flatnonzero(np.diff(pages) != 1) + 1
        for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), len(pages)], strict=True):
            self._file.seek((int(pages[first]) - 1) * size)
            if self._file.readinto(view[first * size : last * size]) != (last - first) * size:
                raise Unreadable("file ends inside a page")
        return buffer

    def _leaves(self, root: int) -> IntArray:
        """The numbers of a tree's leaf pages in order."""
        level = np.array([root], dtype=np.int64)
        seen = 0
        for _ in range(MAX_DEPTH):
            seen += len(level)
            # Page 1 begins with the file's header; a tree with more pages than the file runs in a circle.
            if not len(level) or level.min() < 2 or level.max() > self.count or seen > self.count:
                break
            # All pages of a level are of one kind; the others are looked at when they are read.
            kind = self._load(level[:1])[0]
            if kind == LEAF:
                return level
            if kind != INTERIOR:
                break
            level = self._children(level)
        raise Unreadable("tree")

    def _children(self, pages: IntArray) -> IntArray:
        """The children of interior pages in order: those of the cells of each page, then its right-most one."""
        buffer = self._load(pages)
        base = np.arange(len(pages), dtype=np.int64) * self.page_bytes
        if (buffer[base] != INTERIOR).any():
            raise Unreadable("page kind")
        counts = _be16(buffer, base + 3)
        page, pointers = self._pointers(buffer, base, counts, 12)
        if len(pointers) and int(pointers.max()) > self._usable - 5:
            raise Unreadable("cell pointer")
        below = _be32(buffer, page + pointers)
        ends = np.cumsum(counts)
        return np.insert(below, ends, _be32(buffer, base + 8))

    def _pointers(self, buffer: Bytes, base: IntArray, counts: IntArray, header: int) -> tuple[IntArray, IntArray]:
        """Per cell: where its page begins and where on it the cell begins."""
        if len(counts) and header + 2 * int(counts.max()) > self._usable:
            raise Unreadable("cell count")
        first = np.cumsum(counts) - counts
        # The array of pointers begins at an even byte.
        places = np.repeat((base + header >> 1) - first, counts)
        places += np.arange(len(places), dtype=np.int64)
        pointers = buffer[: len(buffer) & ~1].view(">u2").take(places).astype(np.int64)
        if (pointers < np.repeat(header + 2 * counts, counts)).any():
            raise Unreadable("cell pointer")
        return np.repeat(base, counts), pointers

    # --- cells -----------------------------------------------------------------------------------------------------

    def _chunk(
        self, pages: IntArray, columns: int, ints: Sequence[int], floats: Sequence[int], texts: Sequence[int]
    ) -> Cells:
        # What lies behind the pages: a damaged record may point there, and a row that is left to SQLite reads as NULLs.
        zeros = 8 * columns + 64
        buffer = self._load(pages, zeros)
        words = np.ndarray((len(buffer) - 7,), dtype="<i8", buffer=buffer, strides=(1,))
        base = np.arange(len(pages), dtype=np.int64) * self.page_bytes
        if (buffer[base] != LEAF).any():
            raise Unreadable("page kind")
        page, pointers = self._pointers(buffer, base, _be16(buffer, base + 3), 8)
        if len(pointers) and int(pointers.max()) + 4 > self._usable:
            raise Unreadable("cell pointer")
        start = page + pointers
        # A cell: size of the record, rowid, record. A record: size of its header, a type for each column, the values.
        wanted = {*ints, *floats, *texts}
        records = self._uniform_records(buffer, words, start, pointers, columns, wanted)
        if records is None:
            records = self._any_records(buffer, start, page + self._usable, columns, wanted, len(buffer) - zeros)
        kinds, places, odd = records
        int_columns = []
        for column in ints:
            kind = kinds[column]
            _mark(odd, (kind == _FLOAT) | (kind >= _RESERVED))
            int_columns.append(_integers(buffer, words, kind, *places[column]))
        float_columns = []
        for column in floats:
            kind = kinds[column]
            _mark(odd, kind >= _RESERVED)
            value, offset = places[column]
            values, valid = _integers(buffer, words, kind, value, offset)
            reals = values.astype(np.float64)
            if np.any(is_float := kind == _FLOAT):
                rows = np.flatnonzero(np.broadcast_to(is_float, len(start)))
                reals[rows] = words[offset:][value[rows]].byteswap().view(np.float64)
            if valid is not None:
                reals[~valid] = np.nan
            float_columns.append(reals)
        for column in texts:
            kind = kinds[column]
            _mark(odd, (kind != _NULL) & ((kind < 13) | (kind % 2 == 0)))
        text_columns = [_texts(buffer, words, kinds[c], *places[c], odd) for c in texts]
        rows = np.flatnonzero(odd)
        rowids = [_rowid(buffer, p) for p in start[rows].tolist()]
        return Cells(len(start), int_columns, float_columns, text_columns, rows, rowids)

    def _any_records(
        self, buffer: Bytes, start: IntArray, limit: IntArray, columns: int, wanted: set[int], zeros_at: int
    ) -> _Records:
        """The records of cells of any kind. What cannot be read here is odd and reads as NULLs, from ``zeros_at`` on."""
        at = start.copy()
        payload = _varint(buffer, at)
        _skip_varint(buffer, at)
        record = at.copy()
        overflows = payload > self._usable - 35
        if (record + np.where(overflows, 4, payload) > limit).any():
            raise Unreadable("cell size")
        header = _varint(buffer, at)
        if ((header > payload) | (at > record + header)).any():
            raise Unreadable("record header")
        # Fewer types than columns: the row is older than its table's last columns.
        odd = overflows | (header < columns + 1)
        value = record + header
        at[odd] = value[odd] = zeros_at
        types_end, record_end = value.copy(), np.where(odd, len(buffer), record + payload)
        kinds: dict[int, Kind] = {}
        places: dict[int, tuple[IntArray, int]] = {}
        for column in range(max(wanted, default=-1) + 1):
            kind: Bytes | IntArray = buffer.take(at)
            low, high = (int(kind.min()), int(kind.max())) if len(kind) else (_NULL, _NULL)
            width: IntArray | np.int64
            if high < 128:
                at += 1
                width = _WIDTH[low] if low == high else _WIDTH.take(kind)
            else:  # long texts and blobs
                kind = _varint(buffer, at)
                width = np.where(kind < 128, _WIDTH[np.minimum(kind, 127)], (kind - 12) >> 1)
            if column in wanted:
                kinds[column], places[column] = kind, (value.copy(), 0)
            value += width
        if ((value > record_end) | (at > types_end) & ~odd).any():
            raise Unreadable("record")
        return _Records(kinds, places, odd)

    def _uniform_records(
        self, buffer: Bytes, words: IntArray, start: IntArray, pointers: IntArray, columns: int, wanted: set[int]
    ) -> _Records | None:
        """The records of cells whose headers are alike: of equal lengths, every length and type a number of one byte.

        Most chunks of long tables are: then few words per row say all that ``_any_records`` looks up byte by byte. None
        where a chunk is not, or where anything in it needs a closer look.
        """
        if not len(start):
            return None
        # Of the first eight bytes of a cell the first is the record's size, the next ones are the rowid.
        first = buffer[int(start[0]) :]
        record = 1
        while first[record] >= 128:
            record += 1
            if record > 6:
                return None
        record += 1
        header = int(first[record])
        if first[0] >= 128 or header != columns + 1:
            return None
        cell = words[start]
        alike = (0x8080808080808080 & (1 << 8 * record) - 1) | 0xFF << 8 * record
        if int(np.bitwise_or.reduce(cell ^ cell[0])) & alike:
            return None
        cell &= 0x7F
        size = cell
        if int((pointers + size).max()) + record > self._usable:
            return None
        types = record + 1
        last = max(wanted, default=-1)
        # The bits in which the types of any two rows differ.
        varies = b""
        for i in range(types, types + last + 1, 8):
            word = words[i:][start]
            varies += int(np.bitwise_or.reduce(word ^ word[0])).to_bytes(8, "little", signed=True)
        kinds: dict[int, Kind] = {}
        places: dict[int, tuple[IntArray, int]] = {}
        # The next value begins ``offset`` behind ``value``: equal widths are added up once for all rows.
        value, offset = start, record + header
        for column in range(last + 1):
            kind: Kind = first[types + column]
            if kind >= 128 or varies[column] >= 128:
                return None
            if varies[column]:
                kind = buffer[types + column :].take(start)
            if column in wanted:
                kinds[column], places[column] = kind, (value, offset)
            if varies[column]:
                value = value + _WIDTH.take(kind)
            else:
                offset += int(_WIDTH[kind])
        if int((value - start - size).max()) + offset > record:
            return None
        return _Records(kinds, places, np.zeros(len(start), dtype=np.bool_))


def _mark(odd: BoolArray, more: BoolArray | np.bool_) -> None:
    """Add to the odd rows; one answer may stand for all."""
    if np.any(more):
        odd |= more


def _be16(buffer: Bytes, at: IntArray) -> IntArray:
    return buffer[at].astype(np.int64) << 8 | buffer[at + 1]


def _be32(buffer: Bytes, at: IntArray) -> IntArray:
    return _be16(buffer, at) << 16 | _be16(buffer, at + 2)


def _varint(buffer: Bytes, at: IntArray) -> IntArray:
    """The numbers that begin at ``at``, seven bits a byte, high ones first; moves ``at`` behind them."""
    byte = buffer.take(at)
    value = (byte & 0x7F).astype(np.int64)
    at += 1
    going = np.flatnonzero(byte >= 128)
    for _ in range(4):
        if not len(going):
            return value
        byte = buffer.take(at[going], mode="clip")
        value[going] = value[going] << 7 | (byte & 0x7F)
        at[going] += 1
        going = going[byte >= 128]
    if len(going):
        raise Unreadable("a size beyond 32 bits")
    return value


def _skip_varint(buffer: Bytes, at: IntArray) -> None:
    """Move ``at`` behind the number that begins there; it may take nine bytes."""
    going = buffer.take(at) >= 128
    at += 1
    for _ in range(8):
        if not going.any():
            return
        at += going
        going &= buffer.take(at - 1, mode="clip") >= 128


def _rowid(buffer: Bytes, at: int) -> int:
    while buffer[at] >= 128:
        at += 1
    at += 1
    value = 0
    for i in range(9):
        byte = int(buffer[at + i])
        value = value << 8 | byte if i == 8 else value << 7 | byte & 0x7F
        if byte < 128:
            break
    return value - 2**64 if value >= 2**63 else value


def _integers(
    buffer: Bytes, words: IntArray, kind: Kind, at: IntArray, offset: int
) -> tuple[IntArray, BoolArray | None]:
    """The values of a column of integers, 0 where NULL, and which ones are valid; None where all are.

    Columns of one value are constants (see trace.py), as most ids are.
    """
    low, high = (int(kind.min()), int(kind.max())) if np.size(kind) else (_ONE, _ONE)
    if low == high and low in (_NULL, _ZERO, _ONE):
        valid = np.broadcast_to(np.bool_(False), len(at)) if low == _NULL else None
        return constant(int(low == _ONE), len(at)), valid
    if low == high == 1:
        values = buffer[offset:].take(at).view(np.int8).astype(np.int64)
    else:
        values = words[offset:][at].byteswap(inplace=True)
        values >>= _SHIFT[low] if low == high else _SHIFT.take(kind, mode="clip")
        if low == _NULL or high >= _ZERO:
            values[(kind == _NULL) | (kind >= _ZERO)] = 0
            values[kind == _ONE] = 1
    return compact(values), np.asarray(kind != _NULL) if low == _NULL else None


def _texts(buffer: Bytes, words: IntArray, kind: Kind, at: IntArray, offset: int, odd: BoolArray) -> Texts:
    """Equal texts are found by a hash of 64 bits over their length and bytes."""
    kind = np.broadcast_to(kind, len(at))
    codes = np.full(len(kind), -1, dtype=np.int64)
    rows = np.flatnonzero(~odd & (kind != _NULL))
    if not len(rows):
        return Texts(codes, [], [])
    at = at[rows] + offset
    length = (kind[rows].astype(np.int64) - 13) >> 1
    mixed = length.astype(np.uint64)
    for i in range(0, int(length.max()), 8):
        # The texts that go on here; all but the last word of a text are whole.
        on: IntArray | slice = slice(None) if i < int(length.min()) else np.flatnonzero(length > i)
        left = np.minimum(length[on] - i, 8)
        word = words[at[on] + i].view(np.uint64) << (8 * (8 - left)).astype(np.uint64)
        mixed[on] = _mix(mixed[on] ^ word)
    hashes, first, which = np.unique(mixed, return_index=True, return_inverse=True)
    codes[rows] = which
    starts, lengths = at[first].tolist(), length[first].tolist()
    return Texts(codes, hashes.tolist(), [buffer[s : s + n].tobytes() for s, n in zip(starts, lengths, strict=True)])


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread each bit over all 64 (the finaliser of MurmurHash3, public domain); one to one."""
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        values = values ^ (values >> np.uint64(33))
        values = values * np.uint64(multiplier)
    return np.asarray(values ^ (values >> np.uint64(33)))
