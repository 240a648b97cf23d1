"""SQLite tables as NumPy columns: read-only, immutable, nothing left beside the file.

Small tables go through the standard library, large ones through ADBC (several times faster than sqlite3's rows); both give the same columns. A damaged table gives the rows before the damage, and says so.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from infprof.trace import BoolArray, FloatArray, IntArray

# Below this many rows importing pyarrow (0.2 s) costs more than it saves.
SMALL_TABLE_ROWS = 60_000

# What reading a damaged file raises; Python decodes SQLite's own messages strictly, and they may quote the damage.
DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)


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


class SqliteFile:
    """One database. ``immutable`` False only for a private copy with its write-ahead log."""

    def __init__(self, path: Path, immutable: bool = True) -> None:
        # mode=ro alone would still want a lock and, for WAL files, a -shm beside the file.
        options = "mode=ro&immutable=1" if immutable else "mode=rw"
        self.uri = f"file:{quote(os.fsencode(path.resolve()))}?{options}"
        # A row takes two bytes at least: in a damaged file a rowid may say anything.
        self._most_rows = path.stat().st_size // 2
        self._connection = sqlite3.connect(self.uri, uri=True)
        self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        self._adbc: Any = None
        # Tables whose end could not be read, with the number of rows that could.
        self.damaged: dict[str, int] = {}
        names = [
            row[0]
            for row in self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        ]
        self.tables: dict[str, list[str]] = {
            name: [row[1] for row in self._connection.execute(f"PRAGMA table_info({_quoted(name)})")] for name in names
        }

    def close(self) -> None:
        if self._adbc is not None:
            self._adbc.close()
        self._connection.close()

    def has(self, table: str, *columns: str) -> bool:
        return table in self.tables and all(c in self.tables[table] for c in columns)

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query on a small table; [] where the file is damaged there."""
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except DAMAGE:
            return []

    def ints(self, table: str, wanted: Sequence[str], where: str = "") -> dict[str, IntColumn]:
        """The wanted columns that the table has, as integers, all of the same length."""
        present = [c for c in wanted if c in self.tables[table]]
        columns, _, _ = self._read(table, present, [], [], where)
        return columns

    def ints_and_texts(
        self, table: str, wanted: Sequence[str], texts: Sequence[str], where: str = ""
    ) -> tuple[dict[str, IntColumn], dict[str, TextColumn]]:
        """As ``ints``, with text columns beside."""
        present = [c for c in wanted if c in self.tables[table]]
        present_texts = [c for c in texts if c in self.tables[table]]
        columns, text_columns, _ = self._read(table, present, present_texts, [], where)
        return columns, text_columns

    def ints_and_floats(
        self, table: str, wanted: Sequence[str], floats: Sequence[str]
    ) -> tuple[dict[str, IntColumn], dict[str, FloatArray]]:
        """As ``ints``, with float columns beside (NaN where NULL)."""
        columns, _, float_columns = self._read(table, wanted, [], floats, "")
        return columns, float_columns

    def _read(
        self, table: str, ints: Sequence[str], texts: Sequence[str], floats: Sequence[str], where: str
    ) -> tuple[dict[str, IntColumn], dict[str, TextColumn], dict[str, FloatArray]]:
        names = [*ints, *texts, *floats]
        sql = f"SELECT {', '.join(_quoted(c) for c in names)} FROM {_quoted(table)}" + (
            f" WHERE {where}" if where else ""
        )
        rows = self._row_bound(table)
        if rows > SMALL_TABLE_ROWS:
            arrow = self._read_arrow(sql, rows)
            if arrow is not None:
                try:
                    return _from_arrow(arrow, ints, texts, floats)
                except UnicodeDecodeError:
                    pass  # the plain way replaces the bytes that are no UTF-8
        return self._read_plain(table, sql, ints, texts, floats)

    def _row_bound(self, table: str) -> int:
        """At least the number of rows; the largest rowid costs one look, a count reads the whole table."""
        result = self.rows(f"SELECT max(rowid) FROM {_quoted(table)}")
        if not result:
            result = self.rows(f"SELECT count(*) FROM {_quoted(table)}")
        bound = as_int(result[0][0]) if result else None
        return min(bound or 0, self._most_rows)

    def _read_arrow(self, sql: str, rows: int) -> Any:
        """A pyarrow Table, or None where ADBC cannot (mixed types, damage): the plain way then says what is wrong."""
        from adbc_driver_sqlite import dbapi

        try:
            if self._adbc is None:
                self._adbc = dbapi.connect(self.uri)
            with self._adbc.cursor() as cursor:
                # ADBC takes a column's type from its first batch: one batch, so that leading NULLs do not decide.
                cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": rows + 1})
                cursor.execute(sql)
                return cursor.fetch_arrow_table()
        except (dbapi.Error, OSError, ValueError, OverflowError):
            return None

    def _read_plain(
        self, table: str, sql: str, ints: Sequence[str], texts: Sequence[str], floats: Sequence[str]
    ) -> tuple[dict[str, IntColumn], dict[str, TextColumn], dict[str, FloatArray]]:
        fetched: list[tuple[Any, ...]] = []
        try:
            with closing(self._connection.execute(sql)) as cursor:
                # In pieces, so that the rows before a damaged page are kept.
                while piece := cursor.fetchmany(64):
                    fetched.extend(piece)
        except DAMAGE:
            self.damaged[table] = len(fetched)
        columns = list(zip(*fetched, strict=True)) if fetched else [()] * (len(ints) + len(texts) + len(floats))
        n_ints, n_texts = len(ints), len(texts)
        return (
            {name: _int_column(columns[i]) for i, name in enumerate(ints)},
            {name: _text_column(columns[n_ints + i]) for i, name in enumerate(texts)},
            {name: _float_column(columns[n_ints + n_texts + i]) for i, name in enumerate(floats)},
        )


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


def _from_arrow(
    table: Any, ints: Sequence[str], texts: Sequence[str], floats: Sequence[str]
) -> tuple[dict[str, IntColumn], dict[str, TextColumn], dict[str, FloatArray]]:
    import pyarrow as pa

    def one(name: str) -> Any:
        column = table.column(name)
        return (
            column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], pa.int64())])
        )

    int_columns, text_columns, float_columns = {}, {}, {}
    for name in ints:
        array = one(name)
        if array.type == pa.int64():
            valid = None if array.null_count == 0 else array.is_valid().to_numpy(zero_copy_only=False)
            filled = array if valid is None else array.fill_null(0)
            int_columns[name] = IntColumn(filled.to_numpy(zero_copy_only=False), valid)
        else:
            int_columns[name] = _int_column(array.to_pylist())
    for name in texts:
        array = one(name)
        if array.type == pa.string():
            encoded = array.dictionary_encode()
            codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
            text_columns[name] = TextColumn(codes, encoded.dictionary.to_pylist())
        else:
            text_columns[name] = _text_column(array.to_pylist())
    for name in floats:
        array = one(name)
        if array.type in (pa.int64(), pa.float64()):
            float_columns[name] = array.cast(pa.float64()).to_numpy(zero_copy_only=False)
        else:
            float_columns[name] = _float_column(array.to_pylist())
    return int_columns, text_columns, float_columns
