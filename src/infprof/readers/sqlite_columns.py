"""SQLite tables as NumPy columns: read-only, immutable, nothing left beside the file.

Tables are read from their pages (sqlite_pages.py); SQLite itself reads what is not plain there, and damaged tables: those
give the rows before the damage, and say so.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from infprof.readers.sqlite_pages import Pages, Texts, Unreadable
from infprof.trace import BoolArray, FloatArray, IntArray, constant, is_constant, taken

# What reading a damaged file raises; Python decodes SQLite's own messages strictly, and they may quote the damage.
DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)

# Up to this share of rows that only SQLite can read, asking it for each costs less than asking for all.
FEW_ODD_ROWS = 0.1


@dataclass
class IntColumn:
    """Integers with 0 where NULL or not a number; ``valid`` None = all valid."""

    values: IntArray
    valid: BoolArray | None

    def filled(self, value: int) -> IntArray:
        """The values with NULLs replaced."""
        if self.valid is None:
            return self.values
        if is_constant(self.valid) and not self.valid[0]:
            return constant(value, len(self.values))
        return np.where(self.valid, self.values, value)

    def take(self, rows: BoolArray) -> IntColumn:
        return IntColumn(taken(self.values, rows), None if self.valid is None else taken(self.valid, rows))

    def is_valid(self) -> BoolArray:
        return _all_true(len(self.values)) if self.valid is None else self.valid


@dataclass
class TextColumn:
    """Text as indexes into the distinct values; -1 where NULL."""

    codes: IntArray
    values: list[str]

    def take(self, rows: BoolArray) -> TextColumn:
        return TextColumn(self.codes[rows], self.values)


class Columns(NamedTuple):
    """The columns that were asked for, by name, all of the same length."""

    ints: dict[str, IntColumn]
    texts: dict[str, TextColumn]
    floats: dict[str, FloatArray]  # NaN where NULL


def _missing_bytes(path: Path) -> int:
    """How much shorter the file is than its pages, by its own header (sqlite.org/fileformat2.html, 1.3); 0 = whole.

    SQLite reads a last page that is cut as if zeros followed, so nothing else would tell.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(100)
    page = int.from_bytes(head[16:18], "big")
    page = 65536 if page == 1 else page
    if page < 512:
        return 0
    pages = -(-size // page)
    # The header's page count is valid only where it was written with the last change.
    if head[24:28] == head[92:96]:
        pages = int.from_bytes(head[28:32], "big") or pages
    # What lies behind the last page is none of the database.
    return max(pages * page - size, 0)


class TableSource(Protocol):
    """The tables of one export, whatever kind of file holds them.

    ``tables`` holds the columns of each table. ``damaged``: tables whose end could not be read, with the number of rows
    that could. ``missing_bytes``: how much of the end of the file is not there.
    """

    tables: dict[str, list[str]]
    damaged: dict[str, int]
    missing_bytes: int

    def has(self, table: str, *columns: str) -> bool:
        """Whether the table is there with all these columns."""
        ...

    def rows(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """All rows of a small table; [] where it is damaged."""
        ...

    def sample(self, table: str, column: str, limit: int) -> list[Any]:
        """Up to ``limit`` values of a column that are not NULL."""
        ...

    def texts_of(self, ids: Sequence[int]) -> dict[int, str]:
        """The texts of these ids of the table StringIds, as far as they are there."""
        ...

    def ints(self, table: str, wanted: Sequence[str]) -> dict[str, IntColumn]:
        """Those of the wanted columns that the table has, as integers."""
        ...

    def columns(
        self, table: str, ints: Sequence[str] = (), texts: Sequence[str] = (), floats: Sequence[str] = ()
    ) -> Columns:
        """Those of the wanted columns that the table has."""
        ...


class SqliteFile:
    """One database that nobody writes. ``missing_bytes``: how much of its end is not there."""

    def __init__(self, path: Path) -> None:
        # mode=ro alone would still want a lock and, for WAL files, a -shm beside the file.
        uri = f"file:{quote(os.fsencode(path.resolve()))}?mode=ro&immutable=1"
        self._connection = sqlite3.connect(uri, uri=True)
        self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        # Tables whose end could not be read, with the number of rows that could.
        self.damaged: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}
        self._roots: dict[str, int] = {}
        for name, root in self._connection.execute(
            "SELECT name, rootpage FROM sqlite_master WHERE type = 'table' ORDER BY name"
        ).fetchall():
            columns = self._connection.execute(f"PRAGMA table_xinfo({_quoted(name)})").fetchall()
            self.tables[name] = [c[1] for c in columns if not c[6]]
            # Generated columns are hidden, and a column of that type as key is the rowid: records do not hold them.
            if isinstance(root, int) and not any(c[6] or (c[5] and str(c[2]).upper() == "INTEGER") for c in columns):
                self._roots[name] = root
        self.missing_bytes = _missing_bytes(path)
        self._pages: Pages | None = None
        with suppress(Unreadable):
            self._pages = Pages(path)

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()
        self._connection.close()

    def has(self, table: str, *columns: str) -> bool:
        return table in self.tables and all(c in self.tables[table] for c in columns)

    def rows(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """All rows of a small table; [] where the file is damaged there."""
        return self._query(_select(columns, table))

    def sample(self, table: str, column: str, limit: int) -> list[Any]:
        """Up to ``limit`` values of a column that are not NULL."""
        sql = f"{_select([column], table)} WHERE {_quoted(column)} IS NOT NULL LIMIT ?"
        return [row[0] for row in self._query(sql, (limit,))]

    def texts_of(self, ids: Sequence[int]) -> dict[int, str]:
        """The texts of these ids of StringIds, as far as they are there: the table holds more than is ever needed."""
        found: dict[int, str] = {}
        for i in range(0, len(ids), 900):
            chunk = ids[i : i + 900]
            marks = ",".join("?" * len(chunk))
            rows = self._query(f"SELECT id, value FROM StringIds WHERE id IN ({marks})", chunk)
            found.update({key: str(value) for key, value in rows if value is not None})
        return found

    def _query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except DAMAGE:
            return []

    def ints(self, table: str, wanted: Sequence[str]) -> dict[str, IntColumn]:
        """The wanted columns that the table has, as integers."""
        return self.columns(table, wanted).ints

    def columns(
        self, table: str, ints: Sequence[str] = (), texts: Sequence[str] = (), floats: Sequence[str] = ()
    ) -> Columns:
        """Those of the wanted columns that the table has."""
        present = self.tables[table]
        ints, texts, floats = ([c for c in names if c in present] for names in (ints, texts, floats))
        try:
            return self._from_pages(table, ints, texts, floats)
        except (Unreadable, OSError, *DAMAGE):
            return self._from_rows(table, ints, texts, floats)

    def _from_pages(self, table: str, ints: Sequence[str], texts: Sequence[str], floats: Sequence[str]) -> Columns:
        """The columns from the table's pages, with the rows that are not plain from SQLite."""
        if self._pages is None or table not in self._roots:
            raise Unreadable("not a plain table")
        order = self.tables[table]
        wanted = ([order.index(c) for c in names] for names in (ints, floats, texts))
        int_columns = [_IntFiller() for _ in ints]
        text_columns = [_TextFiller() for _ in texts]
        float_columns = [_Filler() for _ in floats]
        odd_rows: list[IntArray] = []
        rowids: list[int] = []
        count = 0
        for cells, left in self._pages.cells(self._roots[table], len(order), *wanted):
            # About as many rows as the chunks to come will hold, if they are like this one.
            capacity = count + cells.rows + int(cells.rows * left * 1.02)
            for int_column, part in zip(int_columns, cells.ints, strict=True):
                int_column.add(*part, capacity)
            for text_column, text in zip(text_columns, cells.texts, strict=True):
                text_column.add(text, capacity)
            for float_column, values in zip(float_columns, cells.floats, strict=True):
                float_column.add(values, capacity)
            odd_rows.append(cells.odd + count)
            rowids += cells.rowids
            count += cells.rows
        read = Columns(
            {name: column.column() for name, column in zip(ints, int_columns, strict=True)},
            {name: column.column() for name, column in zip(texts, text_columns, strict=True)},
            {name: column.column() for name, column in zip(floats, float_columns, strict=True)},
        )
        odd = np.concatenate(odd_rows)
        if len(odd) > FEW_ODD_ROWS * count:
            raise Unreadable("few plain rows")
        if len(odd):
            sql = f"{_select([*ints, *texts, *floats], table)} WHERE rowid = ?"
            rows = [row for rowid in rowids for row in self._connection.execute(sql, (rowid,))]
            if len(rows) != len(odd):
                raise Unreadable("rowids")
            _put(read, odd, _as_columns(rows, ints, texts, floats))
        return read

    def _from_rows(self, table: str, ints: Sequence[str], texts: Sequence[str], floats: Sequence[str]) -> Columns:
        """The columns as SQLite reads them, up to where the table is damaged."""
        rows: list[tuple[Any, ...]] = []
        try:
            with closing(self._connection.execute(_select([*ints, *texts, *floats], table))) as cursor:
                # In pieces, so that the rows before a damaged page are kept.
                while piece := cursor.fetchmany(64):
                    rows.extend(piece)
        except DAMAGE:
            self.damaged[table] = len(rows)
        return _as_columns(rows, ints, texts, floats)


def _select(columns: Sequence[str], table: str) -> str:
    return f"SELECT {', '.join(_quoted(c) for c in columns)} FROM {_quoted(table)}"


def _as_columns(
    rows: Sequence[tuple[Any, ...]], ints: Sequence[str], texts: Sequence[str], floats: Sequence[str]
) -> Columns:
    columns = iter(zip(*rows, strict=True) if rows else [()] * (len(ints) + len(texts) + len(floats)))
    return Columns(
        {name: int_column(next(columns)) for name in ints},
        {name: text_column(next(columns)) for name in texts},
        {name: float_column(next(columns)) for name in floats},
    )


class _Filler:
    """A column that grows chunk by chunk in one array; one of equal values stays a constant (see trace.py)."""

    def __init__(self) -> None:
        self._count = 0
        self._equal: NDArray[Any] | None = None  # the value of all rows so far
        self._array: NDArray[Any] = np.empty(0)

    def add(self, values: NDArray[Any], capacity: int) -> None:
        """Append a chunk; ``capacity`` rows are expected in all, at least those until here."""
        before, self._count = self._count, self._count + len(values)
        if not len(values):
            return
        if is_constant(values) and (not before or (self._equal is not None and self._equal == values[0])):
            self._equal = values[:1]
            return
        if self._equal is not None or not before:
            self._array = np.empty(capacity, dtype=values.dtype)
            if self._equal is not None:
                self._array[:before] = self._equal
                self._equal = None
        elif self._count > len(self._array):
            grown = np.empty(max(capacity, 5 * self._count // 4), dtype=values.dtype)
            grown[:before] = self._array[:before]
            self._array = grown
        self._array[before : self._count] = values

    def column(self) -> NDArray[Any]:
        if self._equal is not None:
            return np.broadcast_to(self._equal[0], (self._count,))
        return self._array[: self._count]


class _IntFiller:
    """Integers and which of them are valid."""

    def __init__(self) -> None:
        self._values, self._valid = _Filler(), _Filler()
        self._count = 0
        self._some_invalid = False

    def add(self, values: IntArray, valid: BoolArray | None, capacity: int) -> None:
        self._values.add(values, capacity)
        if valid is not None and not self._some_invalid:
            self._some_invalid = True
            self._valid.add(_all_true(self._count), capacity)
        if self._some_invalid:
            self._valid.add(_all_true(len(values)) if valid is None else valid, capacity)
        self._count += len(values)

    def column(self) -> IntColumn:
        values = np.asarray(self._values.column(), dtype=np.int64)
        return IntColumn(values, self._valid.column() if self._some_invalid else None)


class _TextFiller:
    """One numbering of the texts of all chunks, by their hashes."""

    def __init__(self) -> None:
        self._codes = _Filler()
        self._index: dict[int, int] = {}
        self._values: list[str] = []

    def add(self, part: Texts, capacity: int) -> None:
        for key, value in zip(part.hashes, part.values, strict=True):
            if self._index.setdefault(key, len(self._values)) == len(self._values):
                self._values.append(value.decode("utf-8", "replace"))
        numbers = np.array([*(self._index[key] for key in part.hashes), -1], dtype=np.int64)
        self._codes.add(numbers[part.codes], capacity)

    def column(self) -> TextColumn:
        return TextColumn(np.asarray(self._codes.column(), dtype=np.int64), self._values)


def _all_true(count: int) -> BoolArray:
    return np.broadcast_to(np.bool_(True), (count,))


def _put(columns: Columns, at: IntArray, rows: Columns) -> None:
    """Write ``rows`` into the columns at these positions."""
    for name, ints in rows.ints.items():
        column = columns.ints[name]
        column.values = _writable(column.values)
        column.values[at] = ints.values
        valid = _writable(column.is_valid())
        valid[at] = ints.is_valid()
        column.valid = None if valid.all() else valid
    for name, texts in rows.texts.items():
        known = columns.texts[name]
        known.codes = _writable(known.codes)
        known.codes[at] = np.where(texts.codes >= 0, texts.codes + len(known.values), -1)
        known.values.extend(texts.values)
    for name, floats in rows.floats.items():
        column_values = columns.floats[name] = _writable(columns.floats[name])
        column_values[at] = floats


def _writable(column: NDArray[Any]) -> NDArray[Any]:
    return column if column.flags.writeable else column.copy()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def int_column(values: Sequence[Any]) -> IntColumn:
    try:
        return IntColumn(np.array(values, dtype=np.int64), None)
    except (TypeError, ValueError, OverflowError):
        pass
    clean = [as_int(v) for v in values]
    valid = np.array([v is not None for v in clean], dtype=np.bool_)
    return IntColumn(np.array([0 if v is None else v for v in clean], dtype=np.int64), valid)


def as_int(value: Any) -> int | None:
    """The value as an int64, None where it is no such number."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if -(2**63) <= number < 2**63 else None


def float_column(values: Sequence[Any]) -> FloatArray:
    def as_float(value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            return float("nan")

    return np.array([as_float(v) for v in values], dtype=np.float64)


def text_column(values: Sequence[Any]) -> TextColumn:
    index: dict[str, int] = {}
    codes = np.fromiter(
        (-1 if v is None else index.setdefault(v if isinstance(v, str) else str(v), len(index)) for v in values),
        dtype=np.int64,
        count=len(values),
    )
    return TextColumn(codes, list(index))
