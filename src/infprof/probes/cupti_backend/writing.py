"""A recording as an SQLite file of nsys's own form, which nsys and everything that reads its exports understands."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infprof.probes.cupti_backend.columns import Columns, Source
from infprof.probes.cupti_backend.gpu_tables import GpuTables
from infprof.probes.cupti_backend.host_tables import HostTables
from infprof.probes.cupti_backend.recording import Recording
from infprof.simulator import schema
from infprof.trace import CUPTI_BACKEND

_FORM = "2023.4"
_LOCAL_VM = 1 << 48
_ROWS_AT_ONCE = 1 << 16
_WARNING = 2
_GPU_TABLES = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
)
# Columns in which -1 stands for "not known".
_NULLABLE = {
    "end",
    "graphNodeId",
    "graphId",
    "globalTid",
    "endGlobalTid",
    "textId",
    "srcDeviceId",
    "dstDeviceId",
    "srcContextId",
    "dstContextId",
}
# Behind the columns of that version: nsys has it from 2026 on.
_MORE_COLUMNS = {"CUPTI_ACTIVITY_KIND_KERNEL": (schema.Column("graphId", "INTEGER", False),)}


class Written(NamedTuple):
    """A file that was written: how many operations of a GPU are in it, and records in all; what was lost."""

    gpu_operations: int
    rows: int
    losses: list[str]


def write_sqlite(recording: Recording, path: Path) -> Written:
    """Write a recording to ``path``, whole or not at all.

    Raises OSError and sqlite3.Error, on a full disk for example.
    """
    strings: dict[str, int] = {}

    def string(text: str) -> int:
        return strings.setdefault(text, len(strings) + 1)

    source = Source(recording, string)
    found = GpuTables(source).all() | HostTables(source).all()
    columns = {name: table for name, table in found.items() if table is not None}
    losses = _losses(recording)
    columns |= _about(source, losses, "NVTX_EVENTS" in columns)
    columns |= _who(source, string)
    columns["StringIds"] = {"id": list(strings.values()), "value": list(strings)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(temporary, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = OFF")
            db.execute("PRAGMA synchronous = OFF")
            db.execute("BEGIN")
            _write_tables(db, columns)
            db.execute("COMMIT")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    events = [name for name in columns if "start" in columns[name]]
    return Written(
        sum(_rows(columns[name]) for name in _GPU_TABLES if name in columns),
        sum(_rows(columns[name]) for name in events),
        losses,
    )


def _losses(recording: Recording) -> list[str]:
    """What the file does not hold though it happened, a sentence each."""
    about, losses = recording.about, []
    if dropped := int(about.get("dropped", 0)):
        losses.append(f"{dropped} records were dropped by CUPTI: what they were of is missing here.")
    if refused := int(about.get("refused_buffers", 0)):
        losses.append(f"{refused} buffers were refused to CUPTI, which had too many already.")
    if recording.lost_bytes:
        losses.append(f"{recording.lost_bytes} bytes of records could not be understood and were left out.")
    if not recording.ended:
        losses.append("The process ended without notice: the last half second before that may be missing.")
    return losses


def _about(source: Source, losses: list[str], ranges: bool) -> dict[str, Columns]:
    """The tables on the file itself."""
    _, date, version, checksum = schema.PRODUCT[_FORM]
    major, minor, micro = version.split(".")
    export = {
        "EXPORT_PRODUCT_NAME": CUPTI_BACKEND,
        "EXPORT_PRODUCT_VERSION": str(source.recording.about.get("cupti_version", "")),
        "EXPORT_PRODUCT_DATE": date,
        "EXPORT_SCHEMA_VERSION": version,
        "EXPORT_SCHEMA_VERSION_MAJOR": major,
        "EXPORT_SCHEMA_VERSION_MINOR": minor,
        "EXPORT_SCHEMA_VERSION_MICRO": micro,
        "EXPORT_SCHEMA_VERSION_CKSUM": checksum,
        "EXPORT_PARAM_LAZY": "true",
    }
    mode = {"graph": "Graph", "node": "Node"}[source.recording.about.get("graphs", "node")]
    capture = [("CAPTURE_EVENT_TYPE", "Cuda"), ("CUDA_GRAPH_TRACE_OPTIONS:MODE", mode)]
    if ranges:
        capture.append(("CAPTURE_EVENT_TYPE", "NvtxEvents"))
    began_ns = source.origin_ns + source.shift_ns
    began = datetime.fromtimestamp(began_ns / 1e9, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    found: dict[str, Columns] = {
        "META_DATA_EXPORT": {"name": list(export), "value": list(export.values())},
        "META_DATA_CAPTURE": {"name": [name for name, _ in capture], "value": [value for _, value in capture]},
        "ANALYSIS_DETAILS": {
            "globalVid": [_LOCAL_VM],
            "duration": source.duration_ns(),
            "startTime": 0,
            "stopTime": source.duration_ns(),
        },
        "TARGET_INFO_SESSION_START_TIME": {"utcEpochNs": [began_ns], "utcTime": began, "localTime": began},
    }
    if losses:
        found["DIAGNOSTIC_EVENT"] = {
            "timestamp": 0,
            "timestampType": 1,
            "source": 1,
            "severity": _WARNING,
            "text": losses,
            "globalPid": source.global_pid,
        }
    return found


def _who(source: Source, string: Callable[[str], int]) -> dict[str, Columns]:
    """The tables on the process, its threads, and the GPUs that it could use."""
    threads = source.recording.threads
    found: dict[str, Columns] = {
        "PROCESSES": {
            "globalPid": source.global_pid,
            "pid": [source.pid],
            "name": str(source.recording.about.get("command") or f"process {source.pid}"),
        }
    }
    if threads:
        found["ThreadNames"] = {
            "nameId": [string(name) for name in threads.values()],
            "priority": 20,
            "globalTid": [source.global_pid | (tid & 0xFFFFFF) for tid in threads],
        }
    devices = [gpu_row(facts) for facts in source.recording.about.get("devices", ())]
    if devices:
        found["TARGET_INFO_GPU"] = {name: [gpu[name] for gpu in devices] for name in devices[0]}
    return found


def gpu_row(facts: dict[str, Any]) -> dict[str, Any]:
    """A row of TARGET_INFO_GPU (clocks in Hz, bytes, bytes/s) of what the driver says of a device (clocks in kHz)."""
    place = [facts[name] for name in ("pciDomain", "pciBus", "pciDevice") if name in facts]
    bus = "{:04x}:{:02x}:{:02x}.0".format(*place) if len(place) == 3 else None
    uuid = facts.get("uuid")
    clock, memory_clock, width = (facts.get(name) for name in ("clockRate", "memoryClock", "busWidth"))
    return {
        "vmId": _LOCAL_VM,
        "id": facts["cuDevice"],
        "name": facts.get("name"),
        "busLocation": bus,
        "isDiscrete": 1,
        "l2CacheSize": facts.get("l2CacheSize"),
        "totalMemory": facts.get("totalMemory"),
        # Two transfers per clock, bits to bytes.
        "memoryBandwidth": memory_clock * 1000 * 2 * width // 8 if memory_clock and width else None,
        "clockRate": clock * 1000 if clock else None,
        "smCount": facts.get("smCount"),
        "uuid": "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])) if uuid else None,
        "cuDevice": facts["cuDevice"],
        "computeMajor": facts.get("computeMajor"),
        "computeMinor": facts.get("computeMinor"),
        "smMajor": facts.get("computeMajor"),
        "smMinor": facts.get("computeMinor"),
    }


# --- SQLite -----------------------------------------------------------------------------------------------------------


def _write_tables(db: sqlite3.Connection, tables: dict[str, Columns]) -> None:
    known = schema.tables(_FORM)
    used = [name for name in known if name in tables and _rows(tables[name])]
    for name in used:
        columns = known[name] + _MORE_COLUMNS.get(name, ())
        schema.create_table(db, name, columns)
        marks = ", ".join("?" * len(columns))
        db.executemany(f"INSERT INTO {name} VALUES ({marks})", _table_rows(tables[name], columns))
    schema.write_enums(db, used, _FORM)


def _rows(columns: Columns) -> int:
    return next(len(values) for values in columns.values() if isinstance(values, (list, np.ndarray)))


def _table_rows(columns: Columns, wanted: tuple[schema.Column, ...]) -> Iterator[tuple[Any, ...]]:
    """The rows of a table, made a piece at a time."""
    count = _rows(columns)
    for first in range(0, count, _ROWS_AT_ONCE):
        size = min(_ROWS_AT_ONCE, count - first)
        yield from zip(*(_values(columns.get(column.name), column, first, size) for column in wanted), strict=True)


def _values(values: Any, column: schema.Column, first: int, size: int) -> list[Any]:
    if isinstance(values, np.ndarray):
        piece: list[Any] = values[first : first + size].tolist()
    elif isinstance(values, list):
        piece = values[first : first + size]
    else:
        piece = [values] * size
    if column.not_null:
        if isinstance(values, np.ndarray):
            return piece
        nothing: int | str = "" if column.type == "TEXT" else 0
        return [nothing if value is None else value for value in piece]
    if column.name in _NULLABLE:
        return [None if value == -1 else value for value in piece]
    return piece
