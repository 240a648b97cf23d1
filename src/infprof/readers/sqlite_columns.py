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
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from infprof.readers.sqlite_pages import Pages, Texts, Unreadable
from infprof.trace import BoolArray, FloatArray, IntArray

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
        return self.values if self.valid is None else np.where(self.valid, self.values, value)

    def take(self, rows: BoolArray) -> IntColumn:
        return IntColumn(self.values[rows], None if self.valid is None else self.valid[rows])

    def is_valid(self) -> BoolArray:
        return np.ones(len(self.values), dtype=np.bool_) if self.valid is None else self.valid


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


class SqliteFile:
    """One database that nobody writes."""

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
        self._pages: Pages | None = None
        with suppress(Unreadable):
            self._pages = Pages(path)

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()
        self._connection.close()

    def has(self, table: str, *columns: str) -> bool:
        return table in self.tables and all(c in self.tables[table] for c in columns)

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query on a small table; [] where the file is damaged there."""
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
        chunks = list(self._pages.cells(self._roots[table], len(order), *wanted))
        read = Columns(
            {name: _joined_ints([c.ints[i] for c in chunks]) for i, name in enumerate(ints)},
            {name: _joined_texts([c.texts[i] for c in chunks]) for i, name in enumerate(texts)},
            {name: np.concatenate([c.floats[i] for c in chunks]) for i, name in enumerate(floats)},
        )
        first = np.cumsum([0, *(c.rows for c in chunks)]).tolist()
        odd = np.concatenate([c.odd + f for c, f in zip(chunks, first, strict=False)])
        if len(odd) > FEW_ODD_ROWS * first[-1]:
            raise Unreadable("few plain rows")
        if len(odd):
            sql = f"{_select([*ints, *texts, *floats], table)} WHERE rowid = ?"
            rowids = [rowid for c in chunks for rowid in c.rowids]
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
        {name: _int_column(next(columns)) for name in ints},
        {name: _text_column(next(columns)) for name in texts},
        {name: _float_column(next(columns)) for name in floats},
    )


def _joined_ints(parts: list[tuple[IntArray, BoolArray | None]]) -> IntColumn:
    values = np.concatenate([v for v, _ in parts])
    if all(valid is None for _, valid in parts):
        return IntColumn(values, None)
    return IntColumn(values, np.concatenate([IntColumn(v, valid).is_valid() for v, valid in parts]))


def _joined_texts(parts: list[Texts]) -> TextColumn:
    """One numbering of the texts of all chunks, by their hashes."""
    index: dict[int, int] = {}
    values: list[str] = []
    codes = []
    for part in parts:
        for key, value in zip(part.hashes, part.values, strict=True):
            if index.setdefault(key, len(values)) == len(values):
                values.append(value.decode("utf-8", "replace"))
        numbers = np.array([*(index[key] for key in part.hashes), -1], dtype=np.int64)
        codes.append(numbers[part.codes])
    return TextColumn(np.concatenate(codes), values)


def _put(columns: Columns, at: IntArray, rows: Columns) -> None:
    """Write ``rows`` into the columns at these positions."""
    for name, ints in rows.ints.items():
        column = columns.ints[name]
        column.values[at] = ints.values
        valid = column.is_valid()
        valid[at] = ints.is_valid()
        column.valid = None if valid.all() else valid
    for name, texts in rows.texts.items():
        known = columns.texts[name]
        known.codes[at] = np.where(texts.codes >= 0, texts.codes + len(known.values), -1)
        known.values.extend(texts.values)
    for name, floats in rows.floats.items():
        columns.floats[name][at] = floats


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _int_column(values: Sequence[Any]) -> IntColumn:
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


def _float_column(values: Sequence[Any]) -> FloatArray:
    def as_float(value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            return float("nan")

    return np.array([as_float(v) for v in values], dtype=np.float64)


def _text_column(values: Sequence[Any]) -> TextColumn:
    index: dict[str, int] = {}
    codes = np.fromiter(
        (-1 if v is None else index.setdefault(v if isinstance(v, str) else str(v), len(index)) for v in values),
        dtype=np.int64,
        count=len(values),
    )
    return TextColumn(codes, list(index))
