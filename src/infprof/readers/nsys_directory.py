"""Nsight Systems' columnar exports as a Trace: ``parquetdir`` and ``arrowdir`` folders, and ``arrow`` files.

A folder holds one file per table, named after it; the Arrow files are in the streaming format, and an ``arrow`` file is
one such stream after the other, each naming its table. Tables and columns are those of the SQLite export, except that
META_DATA_CAPTURE is in none of them (nsys 2023.4): which graph tracing was chosen, for one, is not known then. The same
code makes the Trace of all of them (nsys_sqlite.py); here is where the columns come from. They are read by pyarrow,
which is an extra: ``pip install 'infprof[arrow]'``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infprof.errors import InfprofError
from infprof.readers.nsys_sqlite import KNOWN_TABLES, trace_of
from infprof.readers.sqlite_columns import Columns, IntColumn, TextColumn, float_column, int_column, text_column
from infprof.results import Problem
from infprof.trace import FloatArray, IntArray, Trace, compact

PARQUET, ARROW = ".parquet", ".arrow"
# A message of Arrow's streaming format begins with this; one of no length ends the stream.
_CONTINUATION = b"\xff\xff\xff\xff"
_END_OF_STREAM = _CONTINUATION + bytes(4)
# What nsys writes into the schema of every table.
_TABLE_NAME = b"table_name"

INSTALL = "pip install 'infprof[arrow]'"


def is_nsys_directory(path: Path) -> bool:
    """Whether the folder is a parquetdir or arrowdir export of nsys, by the names of its files."""
    return any((path / f"{table}{suffix}").is_file() for table in KNOWN_TABLES for suffix in (PARQUET, ARROW))


def read_nsys_directory(folder: Path) -> Trace:
    """The tables in a folder as a Trace.

    Raises InfprofError where pyarrow is missing, or where a table without which nothing can be said is damaged.
    """
    _require_pyarrow(folder)
    # Written twice, once in each format: it is the same table.
    paths = {path.stem: path for suffix in (ARROW, PARQUET) for path in sorted(folder.glob(f"*{suffix}"))}
    return _trace(folder, {name: _opener(path) for name, path in paths.items()}, [])


class NsysArrowReader:
    """Reads the one file of ``nsys export --type arrow``."""

    name = "nsys-arrow"

    def sniff(self, path: Path, head: bytes) -> bool:
        return head.startswith(_CONTINUATION) and _TABLE_NAME in head

    def read(self, path: Path) -> Trace:
        """The file as a Trace.

        Raises InfprofError where pyarrow is missing, or where nothing in the file can be read.
        """
        pa = _require_pyarrow(path)
        tables: dict[str, Callable[[], _Stored]] = {}
        problems: list[Problem] = []
        try:
            with pa.memory_map(str(path)) as source:
                while source.tell() < source.size():
                    stored = _stream(pa, source)
                    tables[stored.name] = _given(stored)
                    if not stored.whole:
                        problems.append(_cut_short())
                        break
        except (pa.ArrowException, OSError) as error:
            if not tables:
                raise InfprofError(_damaged(path, path.name, error)) from None
            problems.append(_cut_short())
        if len(tables) == 1 and not problems:
            raise InfprofError(f"{path} is one table of an export: name the folder that holds it with the others.")
        return _trace(path, tables, problems)


def _cut_short() -> Problem:
    return Problem(
        "cut-short",
        "The file is cut short, so tables may be missing: a copy or an export that did not finish. Figures cover what "
        "was read; export the report again.",
    )


def _require_pyarrow(path: Path) -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError:
        raise InfprofError(
            f"{path} is a columnar export of nsys, which is read with pyarrow, and that is not installed: {INSTALL}."
        ) from None


def _damaged(path: Path, file: str, error: Exception) -> str:
    reason = str(error).split("\n")[0].split(". ")[0].rstrip(".")
    return f"{path} is damaged ({file}: {reason}): the export or a copy of it was cut short. Export the report again."


def _trace(path: Path, openers: Mapping[str, Callable[[], _Stored]], problems: list[Problem]) -> Trace:
    # A folder named as "." or "x/.." has no name of its own.
    named = path if path.name.strip(".") else path.resolve()
    return trace_of(_ArrowSource(path, openers), named, problems)


# --- where the columns are -------------------------------------------------------------------------------------------


class _Stored(NamedTuple):
    """One table: ``read`` gives the columns of these names as a pyarrow table; ``whole``: nothing is cut off."""

    name: str
    columns: list[str]
    read: Callable[[Sequence[str]], Any]
    whole: bool = True


def _opener(path: Path) -> Callable[[], _Stored]:
    return lambda: _parquet_file(path) if path.suffix == PARQUET else _arrow_file(path)


def _given(stored: _Stored) -> Callable[[], _Stored]:
    return lambda: stored


def _parquet_file(path: Path) -> _Stored:
    parquet = importlib.import_module("pyarrow.parquet")

    def read(columns: Sequence[str]) -> Any:
        with parquet.ParquetFile(path) as file:
            return file.read(columns=list(columns))

    return _Stored(path.stem, list(parquet.read_schema(path).names), read)


def _arrow_file(path: Path) -> _Stored:
    pa = importlib.import_module("pyarrow")
    with path.open("rb") as file:
        file.seek(-min(len(_END_OF_STREAM), path.stat().st_size), 2)
        ended = file.read() == _END_OF_STREAM
    with pa.memory_map(str(path)) as source:
        stored = _stream(pa, source)
    return stored._replace(name=path.stem, whole=stored.whole and ended)


def _stream(pa: Any, source: Any) -> _Stored:
    """The table that begins where ``source`` stands, which is left behind it. Its columns are mapped, not in memory."""
    reader = pa.ipc.open_stream(source)
    batches, whole = [], True
    try:
        for batch in reader:
            batches.append(batch)
    except (pa.ArrowException, OSError):
        # The batches before the cut are good.
        whole = False
    table = pa.Table.from_batches(batches, reader.schema)
    name = (reader.schema.metadata or {}).get(_TABLE_NAME, b"").decode("utf-8", "replace")
    return _Stored(name, list(reader.schema.names), table.select, whole)


class _ArrowSource:
    """A TableSource over columnar files."""

    def __init__(self, path: Path, openers: Mapping[str, Callable[[], _Stored]]) -> None:
        self._pa = importlib.import_module("pyarrow")
        self._path = path
        self.damaged: dict[str, int] = {}
        self.missing_bytes = 0
        self._stored: dict[str, _Stored] = {}
        for name, opener in openers.items():
            self._open(name, opener)
        self.tables = {name: stored.columns for name, stored in self._stored.items()}

    def _open(self, name: str, opener: Callable[[], _Stored]) -> None:
        try:
            stored = opener()
            rows = None if stored.whole else stored.read(stored.columns).num_rows
        except PermissionError:
            raise InfprofError(f"{self._path} cannot be read: permission denied for its table {name}.") from None
        except (self._pa.ArrowException, OSError) as error:
            self._lost(name, error)
            return
        if rows == 0:
            self._lost(name, ValueError("cut off before its first rows"))
            return
        if rows is not None:
            self.damaged[name] = rows
        self._stored[name] = stored

    def _lost(self, name: str, error: Exception) -> None:
        """Nothing of a table can be read: of these, that must not look as if nothing had been recorded."""
        if name == "StringIds" or name.startswith(("CUPTI_", "NVTX_EVENTS", "OSRT_API", "GPU_METRICS")):
            raise InfprofError(_damaged(self._path, name, error)) from None
        self.damaged[name] = 0

    def has(self, table: str, *columns: str) -> bool:
        return table in self.tables and all(c in self.tables[table] for c in columns)

    def _read(self, table: str, columns: Sequence[str]) -> Any:
        try:
            return self._stored[table].read(columns)
        except (self._pa.ArrowException, OSError) as error:
            raise InfprofError(_damaged(self._path, table, error)) from None

    def rows(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """All rows of a small table, with the values that SQLite would give."""
        read = self._read(table, columns)
        return list(zip(*(self._values(read[column]) for column in columns), strict=True))

    def sample(self, table: str, column: str, limit: int) -> list[Any]:
        """Up to ``limit`` values of a column that are not NULL."""
        return self._values(self._read(table, [column])[column].drop_null()[:limit])

    def texts_of(self, ids: Sequence[int]) -> dict[int, str]:
        """The texts of these ids of StringIds, as far as they are there."""
        read = self._read("StringIds", ("id", "value"))
        keys = self._ints(read["id"])
        rows = np.flatnonzero(np.isin(keys.values, ids) & keys.is_valid())
        texts = self._values(read["value"].take(self._pa.array(rows)))
        return {key: str(v) for key, v in zip(keys.values[rows].tolist(), texts, strict=True) if v is not None}

    def ints(self, table: str, wanted: Sequence[str]) -> dict[str, IntColumn]:
        """Those of the wanted columns that the table has, as integers."""
        return self.columns(table, wanted).ints

    def columns(
        self, table: str, ints: Sequence[str] = (), texts: Sequence[str] = (), floats: Sequence[str] = ()
    ) -> Columns:
        """Those of the wanted columns that the table has."""
        present = self.tables[table]
        ints, texts, floats = ([c for c in names if c in present] for names in (ints, texts, floats))
        # One at a time: what pyarrow holds of a column is free again before the next one.
        return Columns(
            {name: self._ints(self._read(table, [name])[name]) for name in ints},
            {name: self._texts(self._read(table, [name])[name]) for name in texts},
            {name: self._floats(self._read(table, [name])[name]) for name in floats},
        )

    # --- columns of Arrow as those of SQLite --------------------------------------------------------------------------

    def _ints(self, column: Any) -> IntColumn:
        types = self._pa.types
        if types.is_boolean(column.type):
            column = column.cast(self._pa.int8())
        if not types.is_integer(column.type):
            return int_column(self._values(column))
        valid = None if column.null_count == 0 else compact(column.is_valid().to_numpy())
        values = column.fill_null(0).to_numpy()
        return IntColumn(compact(_signed(values)), valid)

    def _floats(self, column: Any) -> FloatArray:
        types = self._pa.types
        if not (types.is_floating(column.type) or types.is_integer(column.type)):
            return float_column(self._values(column))
        return np.array(column.cast(self._pa.float64(), safe=False).fill_null(np.nan).to_numpy())

    def _texts(self, column: Any) -> TextColumn:
        if not self._is_text(column.type):
            return text_column(self._values(column))
        encoded = column.dictionary_encode().unify_dictionaries().combine_chunks()
        if not isinstance(encoded, self._pa.DictionaryArray):  # a column without rows stays in pieces
            return TextColumn(np.empty(0, dtype=np.int64), [])
        codes = encoded.indices.cast(self._pa.int64()).fill_null(-1).to_numpy()
        return TextColumn(np.array(codes), self._decoded(encoded.dictionary))

    def _values(self, column: Any) -> list[Any]:
        """Plain values, integers as SQLite keeps them: signed, and flags as numbers."""
        if self._is_text(column.type):
            return self._decoded(column)
        if self._pa.types.is_boolean(column.type):
            return [None if value is None else int(value) for value in column.to_pylist()]
        if self._pa.types.is_uint64(column.type):
            return [None if v is None else v - (v >> 63 << 64) for v in column.to_pylist()]
        plain: list[Any] = column.to_pylist()
        return plain

    def _is_text(self, kind: Any) -> bool:
        types = self._pa.types
        return bool(types.is_string(kind) or types.is_large_string(kind))

    def _decoded(self, column: Any) -> list[Any]:
        # Programs put anything into a name; pyarrow itself decodes strictly.
        raw = column.cast(self._pa.large_binary()).to_pylist()
        return [None if value is None else value.decode("utf-8", "replace") for value in raw]


def _signed(values: np.ndarray[Any, Any]) -> IntArray:
    """A copy as int64, of ids above 2**63 the same bits: what the file holds may be mapped, and must not outlive it."""
    return np.array(values.view(np.int64) if values.dtype == np.uint64 else values, dtype=np.int64)
