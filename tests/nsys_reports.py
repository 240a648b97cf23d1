"""Reports by a real nsys, and exports of other types built from SQLite ones: this is what nsys 2023.4 writes."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infprof.probes import nsys_processes
from infprof.trace import SCHEMA, Trace

REAL = {"2023.4": Path("/opt/nsys23/bin/nsys"), "2022.4": Path("/opt/nsys/bin/nsys")}
PROGRAM = """
import time
try:
    import nvtx
    annotate = nvtx.annotate
except ImportError:
    import contextlib
    annotate = lambda name: contextlib.nullcontext()
for step in range(20):
    with annotate(f"step {step % 2}"):
        time.sleep(0.002)
"""
# nsys leaves this table out of all other exports.
ONLY_IN_SQLITE = "META_DATA_CAPTURE"


def real_nsys(version: str) -> Path:
    """The nsys of a version; skips the test without it."""
    if not REAL[version].exists():
        pytest.skip(f"nsys {version} is not installed (scripts/install-nsys.sh)")
    return REAL[version]


def record(nsys: Path, folder: Path) -> Path:
    """A report of a short program on the CPU, by a real nsys."""
    options = ("--trace=nvtx,osrt", "--sample=none", "--cpuctxsw=none", f"--output={folder / 'recorded'}")
    command = [nsys, "profile", *options, "--force-overwrite=true", sys.executable, "-c", PROGRAM]
    # On a busy machine nsys does not always find the agent that it has just started.
    if all(profiled(command) for _ in range(4)):
        pytest.fail("nsys did not record")
    return folder / "recorded.nsys-rep"


def profiled(command: list[str | Path]) -> int:
    """The exit code of ``nsys profile``, whose agent outlives it where it fails: here it does not."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    finally:
        nsys_processes.end(nsys_processes.session_processes(f"profile-{process.pid}"))


def export(nsys: Path, report: Path, kind: str, output: Path) -> Path:
    call([nsys, "export", f"--type={kind}", f"--output={output}", report])
    return output


def call(command: list[str | Path]) -> None:
    # Not captured by a pipe: an agent that is left would hold it open.
    subprocess.run(command, check=True, timeout=120, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


# --- exports of other types ------------------------------------------------------------------------------------------


def columnar(export: Path, target: Path, kind: str, batch_rows: int = 1 << 20) -> Path:
    """The tables of an SQLite export as nsys writes them for ``--type`` parquetdir, arrowdir or arrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "arrow":
        with target.open("wb") as file:
            for name, table in tables_of(export, narrow=True):
                write_stream(pa, file, name, table, batch_rows)
        return target
    target.mkdir()
    for name, table in tables_of(export, narrow=kind == "arrowdir"):
        if kind == "parquetdir":
            pq.write_table(table, target / f"{name}.parquet", row_group_size=batch_rows)
        else:
            with (target / f"{name}.arrow").open("wb") as file:
                write_stream(pa, file, name, table, batch_rows)
    return target


def write_stream(pa: Any, file: Any, name: str, table: Any, batch_rows: int) -> None:
    table = table.replace_schema_metadata({b"table_name": name.encode()})
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)


def tables_of(export: Path, narrow: bool) -> Iterator[tuple[str, Any]]:
    """The tables, empty ones too (--lazy=false). Global ids are unsigned; ``narrow``: short integers as well, as in Arrow exports."""
    import pyarrow as pa

    with contextlib.closing(sqlite3.connect(export)) as database:
        # SQLite keeps whatever a program called itself.
        database.text_factory = bytes
        names = [n.decode() for (n,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for name in names:
            cursor = database.execute(f'SELECT * FROM "{name}"')
            rows, columns = cursor.fetchall(), [c[0] for c in cursor.description]
            if name != ONLY_IN_SQLITE:
                values = zip(*rows, strict=True) if rows else [()] * len(columns)
                yield (
                    name,
                    pa.table([column_of(pa, c, v, narrow) for c, v in zip(columns, values, strict=True)], columns),
                )


def column_of(pa: Any, name: str, values: tuple[Any, ...], narrow: bool) -> Any:
    kinds = {type(v) for v in values if v is not None}
    if bytes in kinds:
        raw = [v if v is None or isinstance(v, bytes) else str(v).encode() for v in values]
        # Not checked for UTF-8, like nsys.
        return pa.array(raw, pa.binary()).view(pa.string())
    if float in kinds:
        return pa.array([None if v is None else float(v) for v in values], pa.float64())
    if name.startswith("global"):
        return pa.array([None if v is None else v % (1 << 64) for v in values], pa.uint64())
    signed = pa.array(values, pa.int64())
    known = [v for v in values if v is not None]
    if narrow and known and min(known) >= 0 and max(known) < 1 << 32:
        return signed.cast(pa.uint32())
    return signed


# --- comparing -------------------------------------------------------------------------------------------------------


def assert_same_trace(one: Trace, other: Trace) -> None:
    """Everything but the provenance; strings by what they say, since their numbers are no one's business."""
    for name, columns in SCHEMA.items():
        table, same = getattr(one, name), getattr(other, name)
        assert (table is None) == (same is None), name
        for column, kind in columns.items() if table is not None else ():
            if kind == "strings":
                assert texts(one, table[column]) == texts(other, same[column]), (name, column)
            else:
                assert np.array_equal(table[column], same[column], equal_nan=kind == "value"), (name, column)
    facts = "devices processes threads streams problems diagnostics machine_gpus other_processes clock_start_unix_ns"
    for fact in (*facts.split(), "dropped_operations"):
        assert getattr(one, fact) == getattr(other, fact), fact


def texts(trace: Trace, column: Any) -> list[str | None]:
    return [trace.strings[i] if i >= 0 else None for i in column.tolist()]


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
