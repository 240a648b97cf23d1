"""Columns read from pages equal what SQLite says, whatever the table looks like."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infprof.readers import sqlite_pages
from infprof.readers.sqlite_columns import Columns, SqliteFile
from infprof.readers.sqlite_pages import Pages, Unreadable
from infprof.trace import is_constant

# Around every size at which SQLite takes another type for an integer.
EDGES = [s * (1 << b) + d for b in (0, 7, 15, 23, 31, 47, 62) for d in (-1, 0, 1) for s in (-1, 1)]
INTS = st.one_of(st.sampled_from([*EDGES, 2**63 - 1, -(2**63), 0, 1]), st.integers(-(2**63), 2**63 - 1))
TEXTS = st.one_of(
    st.sampled_from(["", "a", "cudaLaunchKernel", "x" * 57, "x" * 58, "x" * 3000, "é" * 700, "\U0001f600" * 5000]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=80),
)
FLOATS = st.one_of(st.floats(allow_nan=False), INTS.map(float))
ROWS = st.lists(
    st.tuples(st.none() | INTS, st.none() | TEXTS, st.none() | FLOATS, st.binary(max_size=200), INTS), max_size=120
)


def write(path: Path, rows: list[tuple[Any, ...]], page_size: int = 512, columns: str = "i, t, f, b, j") -> None:
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA page_size = {page_size}")
        # Without declared types SQLite stores what it is given.
        connection.execute(f"CREATE TABLE T ({columns})")
        connection.executemany(f"INSERT INTO T VALUES ({', '.join('?' * len(columns.split(',')))})", rows)
        connection.commit()


def read(path: Path) -> Columns:
    file = SqliteFile(path)
    try:
        return file.columns("T", ("j", "i"), ("t",), ("f",))
    finally:
        file.close()


def check(columns: Columns, rows: list[tuple[Any, ...]]) -> None:
    """``rows`` as (i, t, f, anything, j)."""
    for name, at in (("i", 0), ("j", 4)):
        column = columns.ints[name]
        got = [v if ok else None for v, ok in zip(column.values.tolist(), column.is_valid().tolist(), strict=True)]
        assert got == [r[at] for r in rows]
    texts = columns.texts["t"]
    assert [texts.values[c] if c >= 0 else None for c in texts.codes.tolist()] == [r[1] for r in rows]
    floats = columns.floats["f"].tolist()
    assert [None if v != v else v for v in floats] == [None if r[2] is None else float(r[2]) for r in rows]


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, page_size=st.sampled_from([512, 1024, 4096, 65536]), chunk=st.sampled_from([1, 2048, 1 << 20]))
def test_any_table(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, ...]], page_size: int, chunk: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.sqlite"
    write(path, rows, page_size)
    before = sqlite_pages.CHUNK_BYTES
    sqlite_pages.CHUNK_BYTES = chunk
    try:
        check(read(path), rows)
    finally:
        sqlite_pages.CHUNK_BYTES = before


def from_pages_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> Columns:
    """The columns, with SQLite forbidden to read the whole table."""

    def forbidden(*_: Any) -> Columns:
        raise AssertionError("read by rows")

    monkeypatch.setattr(SqliteFile, "_from_rows", forbidden)
    return read(path)


def test_a_large_table_comes_from_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three levels of pages, rowids of several bytes, and a few rows that go on on overflow pages."""
    rows = [
        (n * 1_000_003 % 2**40 - 2**39, f"name {n % 7}" if n % 1000 else "y" * 5000, n / 4 if n % 5 else None, b"", n)
        for n in range(30_000)
    ]
    write(tmp_path / "large.sqlite", rows)
    check(from_pages_alone(tmp_path / "large.sqlite", monkeypatch), rows)


def test_rows_that_are_alike_in_some_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long tables hold few shapes of rows: columns of one value, that change late, or NULL from some row on."""
    monkeypatch.setattr(sqlite_pages, "CHUNK_BYTES", 4096)
    rows: list[tuple[Any, ...]] = [
        (
            2**40 if n < 3000 else 2**40 + 1,
            "a" if n % 3 else None,
            1.0 if n < 2000 else 0.5,
            b"",
            9 if n != 4000 else None,
        )
        for n in range(6000)
    ]
    write(tmp_path / "alike.sqlite", rows)
    columns = from_pages_alone(tmp_path / "alike.sqlite", monkeypatch)
    check(columns, rows)
    write(tmp_path / "equal.sqlite", rows[1:3] * 500)
    columns = from_pages_alone(tmp_path / "equal.sqlite", monkeypatch)
    check(columns, rows[1:3] * 500)
    assert is_constant(columns.ints["i"].values)


def test_values_of_another_type_than_the_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real, a text or a blob among integers is read as SQLite's rows are: whole part, number in the text, or nothing."""
    rows: list[tuple[Any, ...]] = [(n, "a", 1.5, b"", n) for n in range(100)]
    rows[3:7] = [(3.7, "a", 1.5, b"", 3), ("12", "a", 1.5, b"", 4), (b"\1", 5, 1.5, b"", 5), ("?", "a", "2.5", b"", 6)]
    write(tmp_path / "mixed.sqlite", rows)
    columns = from_pages_alone(tmp_path / "mixed.sqlite", monkeypatch)
    ints, texts = columns.ints["i"], columns.texts["t"]
    assert ints.values[3:7].tolist() == [3, 12, 0, 0]
    assert ints.is_valid()[3:7].tolist() == [True, True, False, False]
    assert texts.values[texts.codes[5]] == "5"
    assert columns.floats["f"][6] == 2.5
    assert ints.values[7:].tolist() == list(range(7, 100))


def test_columns_added_later(tmp_path: Path) -> None:
    path = tmp_path / "altered.sqlite"
    write(path, [(1, "old", 0.5)] * 30, columns="i, t, f")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE T ADD COLUMN b")
        connection.execute("ALTER TABLE T ADD COLUMN j INTEGER DEFAULT 7")
        connection.executemany("INSERT INTO T VALUES (?, ?, ?, ?, ?)", [(2, "new", 1.5, None, 9)] * 300)
        connection.commit()
    check(read(path), [(1, "old", 0.5, None, 7)] * 30 + [(2, "new", 1.5, None, 9)] * 300)


@pytest.mark.parametrize(
    "columns",
    ["i, t, f, b, j INTEGER PRIMARY KEY", "i, t, f, b, j, v INT GENERATED ALWAYS AS (i + 1) STORED"],
    ids=["rowid", "generated"],
)
def test_columns_that_records_do_not_hold(tmp_path: Path, columns: str) -> None:
    path = tmp_path / "keyed.sqlite"
    rows = [(n, "a", 0.5, None, n + 10) for n in range(40)]
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"CREATE TABLE T ({columns})")
        connection.executemany("INSERT INTO T (i, t, f, b, j) VALUES (?, ?, ?, ?, ?)", rows)
        connection.commit()
    check(read(path), rows)


def test_without_rowid_and_utf16_are_left_to_sqlite(tmp_path: Path) -> None:
    rows = [(n, "é", 0.5, None, n) for n in range(40)]
    for name, pragma, suffix in (("a", "", "WITHOUT ROWID"), ("b", "PRAGMA encoding = 'UTF-16'", "")):
        path = tmp_path / f"{name}.sqlite"
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(pragma)
            connection.execute(f"CREATE TABLE T (i INT PRIMARY KEY, t, f, b, j) {suffix}")
            connection.executemany("INSERT INTO T VALUES (?, ?, ?, ?, ?)", rows)
            connection.commit()
        check(read(path), rows)


def test_a_row_that_sqlite_cannot_find_by_its_number(tmp_path: Path) -> None:
    """The damaged rowid of a row that goes on on overflow pages: the table is read as SQLite reads it from end to end."""
    path = tmp_path / "lost.sqlite"
    rows = [(n, "y" * 5000 if n == 20 else "a", 0.5, None, n) for n in range(40)]
    write(path, rows, page_size=4096)
    raw = bytearray(path.read_bytes())
    # Its rowid is 21; a header of seven bytes follows: an integer of one byte, and a text whose type takes two.
    raw[raw.index(b"\x15\x07\x01\xce\x1d")] = 0x7F
    path.write_bytes(bytes(raw))
    check(read(path), rows)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damage_never_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Bytes changed anywhere: the pages are refused or give columns of one length, and nothing else is raised."""
    path = tmp_path_factory.getbasetemp() / "damaged.sqlite"
    write(path, [(n * 77, f"t{n % 3}", n / 2, b"b" * (n % 90), n) for n in range(150)])
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 12))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(raw[: data.draw(st.integers(100, len(raw)))]))
    try:
        pages = Pages(path)
    except Unreadable:
        return
    try:
        for chunk, _ in pages.cells(2, 5, [4, 0], [2], [1]):
            lengths = {chunk.rows, *(len(v) for v, _ in chunk.ints), *(len(f) for f in chunk.floats)}
            assert lengths == {chunk.rows}
            assert len(chunk.texts[0].codes) == chunk.rows
            assert chunk.texts[0].codes.max(initial=-1) < len(chunk.texts[0].values)
            assert np.all(chunk.odd < chunk.rows)
            assert len(chunk.odd) == len(chunk.rowids)
    except Unreadable:
        pass
    finally:
        pages.close()
