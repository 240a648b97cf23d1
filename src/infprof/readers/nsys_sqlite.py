"""Nsight Systems' SQLite export, 2020 to 2026, as a Trace.

The schema moves between versions, so every decision looks at the tables and columns of the file itself. Tables exist
only when they have rows (lazy export): a missing table is "not collected". Layout of the ids (NVIDIA's documentation):
``globalTid = hw<<56 | vm<<48 | pid<<24 | tid`` and ``globalPid = globalTid`` with tid 0.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infprof import trace as t
from infprof.distinct import PIECE, distinct_rows, distinct_values, mapped
from infprof.errors import InfprofError
from infprof.flags import speed_flags
from infprof.quantiles import median
from infprof.readers.gzipped import GZIP_MAGIC
from infprof.readers.names import overhead_kinds, plain_call_name
from infprof.readers.plausible import DAY_NS, PLAUSIBLE_SPAN_NS
from infprof.readers.sqlite_columns import DAMAGE, IntColumn, SqliteFile, TableSource, as_int
from infprof.results import Problem
from infprof.trace import BoolArray, FloatArray, IntArray, constant, is_constant

SQLITE_MAGIC = b"SQLite format 3\0"
_ARGUMENT = re.compile(r"PROCESS_(\d+):ARGUMENT_(\d+)")
TID_MASK = 0xFFFFFF

# Everything by which an nsys export is told from any other SQLite file.
KNOWN_TABLES = (
    "StringIds",
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
    "NVTX_EVENTS",
    "OSRT_API",
    "META_DATA_EXPORT",
    "EXPORT_META_DATA",
    "TARGET_INFO_SYSTEM_ENV",
)

_COPY_KINDS = {
    1: t.H2D,
    2: t.D2H,
    3: t.H2D,
    4: t.D2H,
    5: t.D2D,
    6: t.D2D,
    7: t.D2D,
    8: t.D2D,
    9: t.H2H,
    10: t.P2P,
    11: t.UVM,
    12: t.UVM,
    13: t.UVM,
}
# nsys numbers memory kinds in its own way (0 = pageable), not in CUPTI's; static kinds count with their base kind.
_MEMORY_KINDS = {0: t.PAGEABLE, 1: t.PINNED, 2: t.DEVICE, 3: t.ARRAY, 4: t.MANAGED, 5: t.DEVICE, 6: t.MANAGED}
_MEMORY_LABELS = {
    "pageable": t.PAGEABLE,
    "pinned": t.PINNED,
    "device": t.DEVICE,
    "array": t.ARRAY,
    "managed": t.MANAGED,
    "device static": t.DEVICE,
    "managed static": t.MANAGED,
}
_COPY_LABELS = {
    "host-to-device": t.H2D,
    "device-to-host": t.D2H,
    "host-to-array": t.H2D,
    "array-to-host": t.D2H,
    "array-to-array": t.D2D,
    "array-to-device": t.D2D,
    "device-to-array": t.D2D,
    "device-to-device": t.D2D,
    "host-to-host": t.H2H,
    "peer-to-peer": t.P2P,
}
# CUPTI's overhead types. Driver JIT, module loading and lazy loading are the program's cost, not the profiler's.
_OVERHEAD_TYPES = {2: t.MODULE_LOAD, 6: t.MODULE_LOAD, 7: t.MODULE_LOAD, 8: t.COMMAND_BUFFER_FULL}

_NVTX_PUSH_POP = (59, 70)
_NVTX_START_END = (60, 71)
_NVTX_DOMAINS = (75, 76)
_NVTX_THREAD_NAME = 39
# What stands for no event.
_NO_EVENT = 2**32 - 1


class NsysSqliteReader:
    """Reads .sqlite and .sqlite.gz exports of any nsys version."""

    name = "nsys-sqlite"

    def sniff(self, path: Path, head: bytes) -> bool:
        if head.startswith(SQLITE_MAGIC[: len(head)]):
            return True
        if head.startswith(GZIP_MAGIC):
            try:
                with gzip.open(path) as file:
                    return file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
            except (OSError, EOFError, zlib.error):
                # Damaged: read() says so.
                return True
        return False

    def read(self, path: Path) -> t.Trace:
        """The export as a Trace.

        Raises InfprofError where the file is no nsys export or nothing in it can be read.
        """
        problems: list[Problem] = []
        try:
            with _readable(path, problems) as readable:
                file = SqliteFile(readable)
                try:
                    return trace_of(file, path, problems)
                finally:
                    file.close()
        except DAMAGE as error:
            raise InfprofError(
                f"{path} is a damaged SQLite file ({_damage_words(error)}): the export or a copy of it was cut short. Export the report again."
            ) from None
        except PermissionError:
            raise InfprofError(f"{path} cannot be read: permission denied.") from None
        except OSError as error:
            raise InfprofError(f"{path} cannot be read: {error.strerror or error}.") from None


def trace_of(source: TableSource, path: Path, problems: list[Problem]) -> t.Trace:
    """The tables of an export as a Trace. ``path`` is the input that the user named, ``problems`` those found so far.

    Raises InfprofError where there is no table of an nsys export.
    """
    return _Builder(source, path, problems).build()


@contextmanager
def _readable(path: Path, problems: list[Problem]) -> Iterator[Path]:
    """A path that can be opened as immutable.

    A compressed file is unpacked, and a file with a write-ahead log is copied and its log worked in, in a private folder
    that is removed at the end; any other file is opened where it lies.
    """
    with path.open("rb") as file:
        head = file.read(100)
    log = path.with_name(path.name + "-wal")
    journal = path.with_name(path.name + "-journal")
    if head.startswith(GZIP_MAGIC):
        with tempfile.TemporaryDirectory(prefix="infprof-") as folder:
            unpacked = Path(folder) / "unpacked.sqlite"
            try:
                with gzip.open(path) as source, unpacked.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise InfprofError(f"{path} is a damaged gzip file ({error}): copy it again.") from None
            yield unpacked
        return
    if journal.exists() and journal.stat().st_size > 0:
        problems.append(
            Problem(
                "journal-beside",
                f"{journal.name} lies beside the input: a writer was interrupted. The file was read as it is and the "
                "journal was not rolled back, so some rows may be half written.",
            )
        )
    if log.exists() and log.stat().st_size > 0:
        with tempfile.TemporaryDirectory(prefix="infprof-") as folder:
            copy = Path(folder) / "copy.sqlite"
            shutil.copyfile(path, copy)
            shutil.copyfile(log, copy.with_name(copy.name + "-wal"))
            with closing(sqlite3.connect(copy)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            problems.append(
                Problem(
                    "write-ahead-log",
                    "The file is still being written or was copied with its write-ahead log: read from a private copy "
                    "of both; rows written later are not in this diagnosis.",
                )
            )
            yield copy
        return
    if head[18:20] == b"\x02\x02":
        problems.append(
            Problem(
                "wal-mode",
                "The file is in WAL mode and no log lies beside it: rows written last may be missing.",
            )
        )
    yield path


class _Builder:
    """Turns the tables of one file into a Trace, collecting problems on the way."""

    def __init__(self, file: TableSource, path: Path, problems: list[Problem]) -> None:
        self.file = file
        self.path = path
        self.problems = problems
        self.strings = t.StringTable()
        # Global ids to dense indexes, in the order in which tables show them.
        self.process_index: dict[int, int] = {}
        self.thread_index: dict[int, int] = {}
        self.thread_process: list[int] = []
        self.thread_names: dict[int, str] = {}
        self.devices: list[t.Device] = []
        self.device_index: dict[int, int] = {}
        self.streams: list[t.Stream] = []
        self.stream_index: dict[t.Stream, int] = {}
        self.cuda_devices: dict[tuple[int, int], int] = {}
        self.dropped: list[tuple[IntArray, IntArray]] = []
        self.dropped_count = 0
        self.missing_strings = 0

    def build(self) -> t.Trace:
        if self.file.has("StringTable") and not self.file.has("StringIds"):
            raise InfprofError(
                f"{self.path} is a database of nvprof, whose tables are others than those of Nsight Systems: record with nsys."
            )
        if not any(self.file.has(table) for table in KNOWN_TABLES):
            raise InfprofError(
                f"{self.path} is an SQLite file without any table of an Nsight Systems export: "
                "export a report with `nsys export --type sqlite REPORT.nsys-rep`."
            )
        metadata = self._metadata()
        self._collect_devices()
        self.centre_ns = self._centre()
        # Calls first: they know their process where minimal exports leave it out of the GPU tables.
        tables = {
            "api_calls": self._api_calls(),
            "kernels": self._kernels(),
            "graphs": self._graphs(),
            "copies": self._copies(),
            "memsets": self._memsets(),
            "syncs": self._syncs(),
            "ranges": self._ranges(),
            "os_calls": self._os_calls(),
            "off_cpu": self._off_cpu(),
            "overheads": self._overheads(),
            "memory_events": self._memory_events(),
            "counters": self._counters(),
        }
        self._note_damage()
        if self.missing_strings:
            self.problems.append(
                Problem(
                    "missing-strings",
                    f"{self.missing_strings} names are missing from StringIds and shown by number.",
                    self.missing_strings,
                )
            )
        dropped = None
        if self.dropped:
            dropped = (np.concatenate([p for p, _ in self.dropped]), np.concatenate([c for _, c in self.dropped]))
        return t.Trace(
            strings=self.strings.values,
            devices=self.devices,
            processes=self._processes(),
            threads=self._threads(),
            streams=self.streams,
            provenance=self._provenance(metadata),
            problems=self.problems,
            dropped_launches=dropped,
            dropped_operations=self.dropped_count,
            diagnostics=self._diagnostics(),
            machine_gpus=len(self.gpu_facts) or None,
            other_processes=[
                t.Process(g >> 24 & TID_MASK, name)
                for g, name in self._process_names().items()
                if g not in self.process_index
            ],
            clock_start_unix_ns=self._clock_start(),
            **tables,  # type: ignore[arg-type]  # names of tables only
        )

    def _clock_start(self) -> int | None:
        """Unix time of time 0; None where the file does not say, or its times were moved by the export."""
        if not self.file.has("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
            return None
        rows = self.file.rows("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
        return as_int(rows[0][0]) if rows else None

    # --- who: processes, threads, devices, streams -----------------------------------------------------------------

    def _process(self, column: IntColumn | None, rows: int) -> IntArray:
        """Dense process indexes; without an id column it is the one process that made CUDA calls."""
        if column is None:
            only = 0 if len(self.process_index) == 1 else -1
            return np.full(rows, only, dtype=np.int64)
        return _indexed(self.process_index, column.values, column.valid, ~TID_MASK)

    def _thread(self, column: IntColumn | None, rows: int) -> IntArray:
        if column is None:
            return np.full(rows, -1, dtype=np.int64)
        known = len(self.thread_index)
        index = _indexed(self.thread_index, column.values, column.valid)
        for global_tid in list(self.thread_index)[known:]:
            self.thread_process.append(self.process_index.setdefault(global_tid & ~TID_MASK, len(self.process_index)))
        return index

    def _processes(self) -> list[t.Process]:
        names = self._process_names()
        return [t.Process(g >> 24 & TID_MASK, names.get(g)) for g in self.process_index]

    def _process_names(self) -> dict[int, str]:
        """globalPid → name of every process that nsys knew, also of those without a row."""
        names: dict[int, str] = {}
        if self.file.has("PROCESSES", "globalPid", "name"):
            for gpid, name in self.file.rows("PROCESSES", "globalPid", "name"):
                if isinstance(gpid, int) and name:
                    # The name may be a path; the last part names the program, the rest names its owner.
                    names[gpid] = str(name).rsplit("/", 1)[-1]
        return names

    def _threads(self) -> list[t.Thread]:
        if self.file.has("ThreadNames", "nameId", "globalTid"):
            rows = self.file.rows("ThreadNames", "globalTid", "nameId")
            rows = [r for r in rows if r[0] in self.thread_index and isinstance(r[1], int)]
            texts = self._fetch_strings(np.array([r[1] for r in rows], dtype=np.int64))
            for gtid, name_id in rows:
                self.thread_names.setdefault(gtid, texts.get(name_id, ""))
        return [
            t.Thread(process, g & TID_MASK, self.thread_names.get(g) or None)
            for g, process in zip(self.thread_index, self.thread_process, strict=True)
        ]

    def _collect_devices(self) -> None:
        if self.file.has("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid"):
            for gpu, cuda, pid in self.file.rows("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid"):
                numbers = (as_int(gpu), as_int(cuda), as_int(pid))
                if numbers[0] is not None and numbers[1] is not None and numbers[2] is not None:
                    self.cuda_devices[numbers[2], numbers[1]] = numbers[0]
        texts = ("name", "uuid", "busLocation")
        wanted = ("id", *texts, "totalMemory", "smCount", "computeMajor", "computeMinor", "cuDevice")
        self.gpu_facts: dict[int, dict[str, Any]] = {}
        # nsys's own number of each CUDA ordinal, where all processes agree on it.
        self.nsys_numbers: dict[int, int] = {}
        if self.file.has("TARGET_INFO_GPU", "id"):
            columns = [c for c in wanted if c in self.file.tables["TARGET_INFO_GPU"]]
            rows = self.file.rows("TARGET_INFO_GPU", *columns)
            for row in sorted(rows, key=lambda row: as_int(row[0]) or 0):
                facts: dict[str, Any] = {
                    key: (value if isinstance(value, str) else None) if key in texts else as_int(value)
                    for key, value in zip(columns, row, strict=True)
                }
                if facts["id"] is None:
                    continue
                number = int(facts["id"])
                self.gpu_facts[number] = facts
                if facts.get("cuDevice") is not None:
                    self.nsys_numbers[int(facts["cuDevice"])] = number
        meanings: dict[int, set[int]] = {}
        for (_, cuda), gpu in self.cuda_devices.items():
            meanings.setdefault(cuda, set()).add(gpu)
        self.renumbered = any(len(gpus) > 1 for gpus in meanings.values())
        if not self.renumbered:
            self.nsys_numbers.update({cuda: min(gpus) for cuda, gpus in meanings.items()})

    def _physical(self, process: int, cuda_id: int) -> int:
        """The number of a process's CUDA device in this trace.

        CUDA_VISIBLE_DEVICES renumbers devices per process: nsys's own GPU number is used where the file maps the two
        and the CUDA ordinals alone would mix devices up; else the ordinal, which is what users know.
        """
        pid = list(self.process_index)[process] >> 24 & TID_MASK if process >= 0 else -1
        mapped = self.cuda_devices.get((pid, cuda_id))
        return mapped if mapped is not None and self.renumbered else cuda_id

    def _device_of(self, gpu: int) -> int:
        index = self.device_index.get(gpu)
        if index is None:
            facts = self.gpu_facts.get(gpu if self.renumbered else self.nsys_numbers.get(gpu, gpu), {})
            major, minor = facts.get("computeMajor"), facts.get("computeMinor")
            # A CUDA ordinal alone is not the number of a card: CUDA sorts by speed, nsys by bus.
            sure = self.renumbered or gpu in self.nsys_numbers or len(self.gpu_facts) == 1
            index = self.device_index[gpu] = len(self.devices)
            self.devices.append(
                t.Device(
                    gpu,
                    facts.get("name"),
                    facts.get("smCount") or None,
                    facts.get("totalMemory") or None,
                    (int(major), int(minor or 0)) if major is not None else None,
                    facts.get("uuid") if sure else None,
                    facts.get("busLocation") if sure else None,
                )
            )
        return index

    def _place(self, columns: dict[str, IntColumn], rows: int) -> tuple[IntArray, IntArray, IntArray]:
        """Dense (process, device, stream) of GPU rows. Streams are told apart by process, device, context, number."""
        process = self._process(columns.get("globalPid"), rows)
        ordinal = columns["deviceId"].filled(-1) if "deviceId" in columns else np.zeros(rows, dtype=np.int64)
        pairs, which = distinct_rows(process, ordinal)
        device = _spread([self._device_of(self._physical(p, o)) for p, o in pairs], which)
        context = columns["contextId"].filled(-1) if "contextId" in columns else np.zeros(rows, dtype=np.int64)
        number = columns["streamId"].filled(-1) if "streamId" in columns else np.zeros(rows, dtype=np.int64)
        places, which = distinct_rows(device, process, context, number)
        for key in (t.Stream(*place) for place in places):
            if key not in self.stream_index:
                self.stream_index[key] = len(self.streams)
                self.streams.append(key)
        stream = _spread([self.stream_index[t.Stream(*place)] for place in places], which)
        return process, device, stream

    # --- strings ---------------------------------------------------------------------------------------------------

    def _fetch_strings(self, ids: IntArray) -> dict[int, str]:
        """Only the strings in use: the table also holds environments and whole outputs of the target."""
        if not self.file.has("StringIds", "id", "value"):
            return {}
        return self.file.texts_of(distinct_values(ids).tolist())

    def _names(self, column: IntColumn | None, rows: int, what: str = "string") -> IntArray:
        """Dense string indexes for a column of StringIds ids; -1 where NULL; a placeholder where the id is missing."""
        if column is None:
            return np.full(rows, -1, dtype=np.int64)
        if column.valid is None:
            return mapped(column.values, lambda ids: self._string_indexes(ids, what))
        names = np.full(rows, -1, dtype=np.int64)
        names[column.valid] = mapped(column.values[column.valid], lambda ids: self._string_indexes(ids, what))
        return names

    def _string_indexes(self, ids: list[int], what: str) -> list[int]:
        texts = self._fetch_strings(_of_each(ids))
        indexes = []
        for key in ids:
            text = texts.get(key)
            if text is None:
                self.missing_strings += 1
                text = f"[{what} {key}]"
            indexes.append(self.strings.add(text))
        return indexes

    # --- GPU tables ------------------------------------------------------------------------------------------------

    def _usable(
        self, columns: dict[str, IntColumn], what: str, process: IntArray | None = None, zero_is_fine: bool = False
    ) -> BoolArray:
        """Rows with a usable interval; the others are counted by kind, reported, and remembered as dropped."""
        start, end = columns["start"], columns["end"]
        s, e = start.values, end.values
        low, high = self.centre_ns - PLAUSIBLE_SPAN_NS, self.centre_ns + PLAUSIBLE_SPAN_NS
        if start.valid is None and end.valid is None and len(s):
            shortest, longest = _length_bounds(s, e)
            if (
                (low <= s.min() and s.max() <= high and e.max() <= high + DAY_NS)
                and shortest >= (0 if zero_is_fine else 1)
                and longest <= DAY_NS
            ):
                return start.is_valid()
        placed = start.is_valid() & end.is_valid() & (s >= low) & (s <= high) & (e <= high + DAY_NS)
        length = e - s
        usable = placed & (length >= (0 if zero_is_fine else 1)) & (length <= DAY_NS)
        if usable.all():
            return usable
        present = start.is_valid() & end.is_valid()
        # Unset records have start = end = 0 although the capture is elsewhere; both count as zero-length.
        zero = present & (e == s)
        negative = present & (e < s)
        absurd = present & ~usable & ~negative & (zero_is_fine | ~zero)
        kinds = [
            ("null", "without a start or end", ~present),
            ("negative", "that end before they start", negative),
            ("absurd", "with absurd times", absurd),
        ]
        if not zero_is_fine:
            kinds.insert(1, ("zero", "of zero length", zero))
        lost = 0
        for kind, words, rows in kinds:
            count = int(rows.sum())
            if count:
                lost += count
                self.problems.append(
                    Problem(f"{kind}-{what.replace(' ', '-')}", f"{count} {what} {words} were left out.", count)
                )
        if process is not None and lost:
            self.dropped_count += lost
            gone = ~usable
            if "correlationId" in columns:
                known = gone & columns["correlationId"].is_valid()
                self.dropped.append((process[known], columns["correlationId"].values[known]))
        return usable

    def _centre(self) -> int:
        """About when the capture was, ns: times far from it are no times. One value for all tables.

        Each table with times speaks once, by the median of some of its rows; the CUDA calls' word counts where there is
        no majority. One table whose stamps are all wrong must not look right to itself.
        """
        votes: list[float] = []
        for table in _TABLES_WITH_TIMES:
            if self.file.has(table, "start"):
                times = [n for v in self.file.sample(table, "start", 1000) if (n := as_int(v)) is not None]
                if times:
                    votes.append(median(np.array(times, dtype=np.float64)))
        support = [sum(abs(a - b) <= PLAUSIBLE_SPAN_NS for b in votes) for a in votes]
        # Within what leaves room for the span on both sides in int64.
        return int(np.clip(votes[support.index(max(support))], -(2.0**62), 2.0**62)) if votes else 0

    def _gpu_table(self, table: str, what: str, extra: Sequence[str]) -> tuple[Any, ...] | None:
        """Columns shared by everything that runs on a GPU, rows with usable times only: (columns, base columns)."""
        if not self.file.has(table, "start", "end"):
            return None
        wanted = ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", *extra)
        columns = self.file.ints(table, wanted)
        rows = len(columns["start"].values)
        process, device, stream = self._place(columns, rows)
        keep = self._usable(columns, what, process)
        all_kept = bool(keep.all())
        if not all_kept:
            columns = {k: c.take(keep) for k, c in columns.items()}
            process, device, stream = (t.taken(column, keep) for column in (process, device, stream))
        rows = len(process)
        correlation = _correlation(columns, rows)
        base = {
            "start": columns["start"].values,
            "end": columns["end"].values,
            "process": process,
            "device": device,
            "stream": stream,
            "correlation": correlation,
        }
        return columns, base

    def _kernels(self) -> t.Table | None:
        table = "CUPTI_ACTIVITY_KIND_KERNEL"
        # The best name that the table has; the short one only where that is NULL.
        best = "demangledName" if self.file.has(table, "demangledName") else "mangledName"
        extra = (
            best,
            "shortName",
            "gridX",
            "gridY",
            "gridZ",
            "blockX",
            "blockY",
            "blockZ",
            "graphNodeId",
        )
        read = self._gpu_table(table, "kernels", extra)
        if read is None:
            return None
        columns, base = read
        rows = len(base["start"])
        name = self._names(columns.get(best), rows, "kernel")
        if (name < 0).any():
            name = np.where(name < 0, self._names(columns.get("shortName"), rows, "kernel"), name)
        if (name < 0).any():
            name = np.where(name < 0, self.strings.add("[unnamed kernel]"), name)

        def product(axes: Sequence[str]) -> IntArray:
            if not all(a in columns for a in axes):
                return np.full(rows, -1, dtype=np.int64)
            sizes = (columns[a].filled(1) for a in axes)
            # Constants are multiplied once.
            x, y, z = (np.maximum(size[:1] if is_constant(size) else size, 1) for size in sizes)
            return np.broadcast_to(np.asarray(x * y * z, dtype=np.int64), (rows,))

        return t.Table(
            "kernels",
            {
                **base,
                "name": name,
                "grid_blocks": product(("gridX", "gridY", "gridZ")),
                "block_threads": product(("blockX", "blockY", "blockZ")),
                # 2020–21 exports declare absent values NOT NULL DEFAULT 0: node 0 is no node.
                "graph_node": _zero_as_none(columns.get("graphNodeId"), rows),
            },
        ).sorted_by("start")

    def _graphs(self) -> t.Table | None:
        read = self._gpu_table("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "graph launches", ("graphId",))
        if read is None:
            return None
        columns, base = read
        graph = columns["graphId"].filled(-1) if "graphId" in columns else np.full(len(base["start"]), -1)
        return t.Table("graphs", {**base, "graph": graph}).sorted_by("start")

    def _copies(self) -> t.Table | None:
        extra = ("bytes", "copyKind", "srcKind", "dstKind")
        read = self._gpu_table("CUPTI_ACTIVITY_KIND_MEMCPY", "copies", extra)
        if read is None:
            return None
        columns, base = read
        rows = len(base["start"])
        tool_kind = columns["copyKind"].filled(0) if "copyKind" in columns else np.zeros(rows, dtype=np.int64)
        kinds = self._enum("ENUM_CUDA_MEMCPY_OPER", _COPY_LABELS, _COPY_KINDS)
        memory = self._enum("ENUM_CUDA_MEM_KIND", _MEMORY_LABELS, _MEMORY_KINDS)

        def ends(column: str) -> IntArray:
            if column not in columns:
                return np.full(rows, t.UNKNOWN_MEMORY, dtype=np.int64)
            return _translate(columns[column].filled(-1), memory, t.UNKNOWN_MEMORY)

        return t.Table(
            "copies",
            {
                **base,
                "bytes": columns["bytes"].filled(0) if "bytes" in columns else np.zeros(rows, dtype=np.int64),
                "kind": _translate(tool_kind, kinds, t.OTHER_COPY),
                "src": ends("srcKind"),
                "dst": ends("dstKind"),
                "tool_kind": tool_kind,
            },
        ).sorted_by("start")

    def _enum(self, table: str, labels: dict[str, int], default: dict[int, int]) -> dict[int, int]:
        """The file's own numbering where it holds one (rows may be absent), else nsys's usual one."""
        mapping = dict(default)
        if self.file.has(table, "id", "label"):
            for number, label in self.file.rows(table, "id", "label"):
                known = labels.get(str(label).strip().lower())
                if known is not None and isinstance(number, int):
                    mapping[number] = known
        return mapping

    def _memsets(self) -> t.Table | None:
        read = self._gpu_table("CUPTI_ACTIVITY_KIND_MEMSET", "memsets", ("bytes",))
        if read is None:
            return None
        columns, base = read
        count = columns["bytes"].filled(0) if "bytes" in columns else np.zeros(len(base["start"]), dtype=np.int64)
        return t.Table("memsets", {**base, "bytes": count}).sorted_by("start")

    def _syncs(self) -> t.Table | None:
        table = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
        if not self.file.has(table, "start", "end"):
            return None
        wanted = (
            "start",
            "end",
            "deviceId",
            "contextId",
            "streamId",
            "correlationId",
            "globalPid",
            "syncType",
            "eventId",
        )
        columns = self.file.ints(table, wanted)
        rows = len(columns["start"].values)
        process = self._process(columns.get("globalPid"), rows)
        context = columns["contextId"].filled(-1) if "contextId" in columns else np.full(rows, -1)
        number = columns["streamId"].filled(-1) if "streamId" in columns else np.full(rows, -1)
        stream = self._stream_of(process, context, number)
        of_stream = np.array([s.device for s in self.streams], dtype=np.int64)
        device = np.where(stream >= 0, of_stream[stream], -1) if len(of_stream) else np.full(rows, -1)
        keep = self._usable(columns, "synchronisation records", zero_is_fine=True)
        correlation = columns["correlationId"].filled(-1) if "correlationId" in columns else np.full(rows, -1)
        kind = columns["syncType"].filled(0) if "syncType" in columns else np.zeros(rows, dtype=np.int64)
        return t.Table(
            "syncs",
            {
                "start": columns["start"].values,
                "end": columns["end"].values,
                "process": process,
                "device": device,
                "stream": stream,
                "correlation": correlation,
                "kind": kind,
                **self._records(process, correlation, columns.get("eventId"), kind),
            },
        ).take(keep)

    def _records(
        self, process: IntArray, correlation: IntArray, event: IntColumn | None, kind: IntArray
    ) -> dict[str, IntArray]:
        """For each wait for an event (process, id of the wait, event): the last record of the event before it.

        Correlation ids of a process ascend in the order of its calls; records have no time of their own.
        """
        none = {"record": constant(-1, len(process)), "record_stream": constant(-1, len(process))}
        table = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
        if event is None or not len(process) or not self.file.has(table, "eventId", "streamId", "correlationId"):
            return none
        columns = self.file.ints(table, ("eventId", "contextId", "streamId", "correlationId", "globalPid"))
        rows = len(columns["eventId"].values)
        if not rows:
            return none
        of_process = self._process(columns.get("globalPid"), rows)
        recorded = columns["correlationId"].filled(-1)
        context = columns["contextId"].filled(-1) if "contextId" in columns else np.full(rows, -1)
        streams = self._stream_of(of_process, context, columns["streamId"].filled(-1))
        # One number per event of a process, the same for waits and records.
        waited = event.filled(-1)
        _, which = distinct_rows(
            np.concatenate([of_process, process]), np.concatenate([columns["eventId"].filled(-2), waited])
        )
        # The last of the records and waits of an event that come before a wait, in one sorted row.
        ids = np.concatenate([recorded, correlation])
        order = np.lexsort((ids, which))
        is_record = order < rows
        last = np.maximum.accumulate(np.where(is_record, np.arange(len(order)), -1))
        before = np.empty(len(order), dtype=np.int64)
        before[order] = np.where(last >= 0, order[last], -1)
        row = before[rows:]
        found = (row >= 0) & (which[row] == which[rows:]) & (waited != _NO_EVENT) & (waited >= 0)
        # Other waits have a number there that is no event's.
        found &= (kind == t.EVENT_SYNC) | (kind == t.STREAM_WAIT_EVENT)
        return {"record": np.where(found, recorded[row], -1), "record_stream": np.where(found, streams[row], -1)}

    def _stream_of(self, process: IntArray, context: IntArray, number: IntArray) -> IntArray:
        """Indexes of streams; -1 for a context-wide wait and a stream that ran nothing."""
        numbers = {(s.process, s.context, s.number): i for i, s in enumerate(self.streams)}
        places, which = distinct_rows(process, context, number)
        return _of_each([numbers.get((p, c, n), -1) for p, c, n in places])[which]

    # --- host tables -----------------------------------------------------------------------------------------------

    def _api_calls(self) -> t.Table | None:
        # Older exporters kept driver calls apart; today's RUNTIME holds both.
        parts = [
            part
            for table in ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")
            if (part := self._api_part(table)) is not None
        ]
        if not parts:
            return None
        merged = {key: np.concatenate([p[key] for p in parts]) if len(parts) > 1 else parts[0][key] for key in parts[0]}
        calls = t.Table("api_calls", merged)
        # The largest table: its columns are given up one by one while it is sorted.
        del parts, merged
        return calls.sort_by("start")

    def _api_part(self, table: str) -> dict[str, NDArray[Any]] | None:
        if not self.file.has(table, "start", "end", "nameId"):
            return None
        wanted = ("start", "end", "globalTid", "correlationId", "nameId", "returnValue")
        columns = self.file.ints(table, wanted)
        keep = self._usable(columns, "CUDA calls", zero_is_fine=True)
        if not keep.all():
            columns = {k: c.take(keep) for k, c in columns.items()}
        rows = len(columns["start"].values)
        thread = self._thread(columns.get("globalTid"), rows)
        of_thread = [*self.thread_process, -1]  # -1, no thread, finds the last one
        process = mapped(thread, lambda threads: [of_thread[i] for i in threads])
        return {
            "start": columns["start"].values,
            "end": columns["end"].values,
            "process": process,
            "thread": thread,
            "correlation": _correlation(columns, rows),
            "name": self._api_names(columns["nameId"], rows),
            "return_value": columns["returnValue"].filled(0)
            if "returnValue" in columns
            else np.zeros(rows, dtype=np.int64),
        }

    def _api_names(self, column: IntColumn, rows: int) -> IntArray:
        """Names without their version."""
        strings = self.strings

        def plain(names: list[int]) -> list[int]:
            used = sorted(set(names))
            found = {i: strings.add(plain_call_name(strings.values[i]) if i >= 0 else "") for i in used}
            return [found[i] for i in names]

        if column.valid is None:
            return mapped(column.values, lambda ids: plain(self._string_indexes(ids, "call")))
        return mapped(self._names(column, rows, "call"), plain)

    def _os_calls(self) -> t.Table | None:
        if not self.file.has("OSRT_API", "start", "end", "nameId"):
            return None
        columns = self.file.ints("OSRT_API", ("start", "end", "globalTid", "nameId"))
        rows = len(columns["start"].values)
        keep = self._usable(columns, "operating-system calls", zero_is_fine=True)
        return (
            t.Table(
                "os_calls",
                {
                    "start": columns["start"].values,
                    "end": columns["end"].values,
                    "thread": self._thread(columns.get("globalTid"), rows),
                    "name": self._names(columns["nameId"], rows, "call"),
                },
            )
            .take(keep)
            .sorted_by("start")
        )

    def _off_cpu(self) -> t.Table | None:
        if not self.file.has("SCHED_EVENTS", "start", "isSchedIn", "globalTid"):
            return None
        columns = self.file.ints("SCHED_EVENTS", ("start", "isSchedIn", "globalTid"))
        time, comes = columns["start"].values, columns["isSchedIn"].values
        thread = self._thread(columns["globalTid"], len(time))
        order = np.lexsort((time, thread))
        time, comes, thread = time[order], comes[order], thread[order]
        # A switch that lacks its other half says nothing.
        left = (comes[:-1] == 0) & (comes[1:] == 1) & (thread[:-1] == thread[1:]) & (thread[:-1] >= 0)
        away = np.flatnonzero(left & (time[1:] > time[:-1]))
        return t.Table("off_cpu", {"start": time[away], "end": time[away + 1], "thread": thread[away]}).sorted_by(
            "start"
        )

    def _overheads(self) -> t.Table | None:
        parts: list[dict[str, NDArray[Any]]] = []
        for table in ("PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_OVERHEAD"):
            if not self.file.has(table, "start", "end"):
                continue
            columns = self.file.ints(table, ("start", "end", "globalTid", "nameId", "overheadType"))
            rows = len(columns["start"].values)
            keep = self._usable(columns, "overhead records")
            names = self._names(columns.get("nameId"), rows)
            # Files without a type say it in the name; the last entry is for rows without one.
            kind = overhead_kinds([*self.strings.values, ""])[names]
            if "overheadType" in columns:
                kind = _translate(columns["overheadType"].filled(-1), _OVERHEAD_TYPES, -1, keep=kind)
            parts.append(
                {
                    "start": columns["start"].values[keep],
                    "end": columns["end"].values[keep],
                    "thread": self._thread(columns.get("globalTid"), rows)[keep],
                    "kind": kind[keep],
                }
            )
        if not parts:
            return None
        merged = {key: np.concatenate([p[key] for p in parts]) for key in parts[0]}
        return t.Table("overheads", merged).sorted_by("start")

    def _ranges(self) -> t.Table | None:
        if not self.file.has("NVTX_EVENTS", "start", "eventType"):
            return None
        columns, text_columns, _ = self.file.columns(
            "NVTX_EVENTS", ("start", "end", "eventType", "globalTid", "textId"), ("text",)
        )
        types = set(distinct_values(columns["eventType"].values).tolist())
        if _NVTX_THREAD_NAME in types and "text" in text_columns and "globalTid" in columns:
            names = columns["eventType"].values == _NVTX_THREAD_NAME
            for gtid, code in zip(columns["globalTid"].values[names], text_columns["text"].codes[names], strict=True):
                if code >= 0:
                    self.thread_names[int(gtid)] = text_columns["text"].values[code]
        if types <= {*_NVTX_DOMAINS, 33, _NVTX_THREAD_NAME} and types & set(_NVTX_DOMAINS):
            self.problems.append(
                Problem(
                    "nvtx-domains-only",
                    "NVTX holds domains and no range: the program's nvtx package is probably newer than this nsys "
                    "(binary payload extension incompatible). Update nsys or install an older `nvtx` package.",
                )
            )
        is_range = _among(columns["eventType"].values, (*_NVTX_PUSH_POP, *_NVTX_START_END))
        if not is_range.all():
            columns = {k: c.take(is_range) for k, c in columns.items()}
            text_columns = {k: c.take(is_range) for k, c in text_columns.items()}
        rows = len(columns["start"].values)
        text = np.full(rows, -1, dtype=np.int64)
        if "text" in text_columns:
            column = text_columns["text"]
            # Only the texts of ranges: marks and names of categories are none of the Trace's.
            used = distinct_values(column.codes[column.codes >= 0])
            # -1, no text, finds the last one.
            dense = np.full(len(column.values) + 1, -1, dtype=np.int64)
            dense[used] = self.strings.add_all(column.values[i] for i in used.tolist())
            text = dense[column.codes]
        if "textId" in columns:
            registered = self._names(columns["textId"], rows, "range")
            np.copyto(text, registered, where=text < 0)
        if "end" in columns:
            # A range that was never closed: it lasts to the end of what was recorded.
            starts, ends = columns["start"].values, columns["end"]
            last = int(max(starts.max(initial=0), ends.values.max(initial=0)))
            columns["end"] = IntColumn(ends.filled(last), None)
        else:
            columns["end"] = columns["start"]
        keep = self._usable(columns, "ranges", zero_is_fine=True)
        kind = mapped(
            columns["eventType"].values,
            lambda types: [t.START_END if ty in _NVTX_START_END else t.PUSH_POP for ty in types],
        )
        message = self._message_bytes(text, is_range)
        return (
            t.Table(
                "ranges",
                {
                    "start": columns["start"].values,
                    "end": columns["end"].values,
                    "thread": self._thread(columns.get("globalTid"), rows),
                    "text": text,
                    "kind": kind,
                    "message_bytes": message,
                },
            )
            .take(keep)
            .sorted_by("start")
        )

    def _message_bytes(self, name: IntArray, is_range: BoolArray) -> IntArray:
        """The message size of communication ranges, from a plain payload or NCCL's extended one as JSON; -1 if none.

        ``is_range`` chooses the ranges among the rows of the table. Payloads are read only where such ranges exist.
        """
        size = np.full(len(name), -1, dtype=np.int64)
        is_nccl = np.array([bool(re.match(r"(?i)[nr]ccl", s)) for s in self.strings.values], dtype=np.bool_)
        if not is_nccl.any():
            return size
        mine = (name >= 0) & is_nccl[np.maximum(name, 0)]
        if not mine.any():
            return size
        payloads = ("uint64Value", "int64Value", "uint32Value", "int32Value")
        numbers, texts, _ = self.file.columns("NVTX_EVENTS", ("start", *payloads), ("jsonText",))
        for column in payloads:
            if column in numbers:
                payload = numbers[column].take(is_range)
                here = mine & payload.is_valid() & (size < 0)
                size[here] = payload.values[here]
        if "jsonText" in texts:
            codes = texts["jsonText"].codes[is_range]
            sizes = np.array([_json_message_size(v) for v in texts["jsonText"].values], dtype=np.int64)
            here = mine & (codes >= 0)
            size[here] = np.where(sizes[codes[here]] >= 0, sizes[codes[here]], size[here])
        return size

    def _memory_events(self) -> t.Table | None:
        table = "CUDA_GPU_MEMORY_USAGE_EVENTS"
        if not self.file.has(table, "start", "bytes", "memoryOperationType"):
            return None
        wanted = ("start", "globalPid", "deviceId", "bytes", "memKind", "memoryOperationType")
        columns = self.file.ints(table, wanted)
        rows = len(columns["start"].values)
        process = self._process(columns.get("globalPid"), rows)
        ordinal = columns["deviceId"].filled(-1) if "deviceId" in columns else np.full(rows, -1)
        pairs, which = distinct_rows(process, ordinal)
        device = _of_each([self.device_index.get(self._physical(p, o), -1) for p, o in pairs])[which]
        count = columns["bytes"].filled(0)
        # Only device memory adds up to the device's use: 2 device, 4 managed, 5 and 6 static.
        on_device = np.isin(columns["memKind"].filled(2), (2, 4, 5, 6)) if "memKind" in columns else np.full(rows, True)
        sign = np.where(columns["memoryOperationType"].filled(0) == 0, 1, -1)
        return t.Table(
            "memory_events",
            {
                "time": columns["start"].values,
                "process": process,
                "device": device,
                "bytes": count,
                "delta": np.where(on_device, sign * count, 0),
            },
        ).sorted_by("time")

    # --- hardware counters -----------------------------------------------------------------------------------------

    def _counters(self) -> t.Table | None:
        if self.file.has("GPU_METRICS", "timestamp", "typeId", "metricId", "value"):
            return self._gpu_metrics()
        described = self.file.has("GENERIC_EVENT_TYPES", "typeId", "data")
        if described and self.file.has("GENERIC_EVENTS", "timestamp", "typeId", "data"):
            return self._generic_events()
        return None

    def _metric_device(self, type_id: int) -> int:
        """nsys numbers the GPUs of its samples in the low byte of typeId (NVIDIA's gpu_metric_util_map recipe)."""
        gpu = type_id & 0xFF
        if not self.renumbered:
            gpu = next((cuda for cuda, number in self.nsys_numbers.items() if number == gpu), gpu)
        if gpu in self.device_index:
            return self.device_index[gpu]
        # Samples of a GPU on which nothing of this trace ran.
        return -1

    def _gpu_metrics(self) -> t.Table | None:
        names: dict[tuple[int, int], str] = {}
        if self.file.has("TARGET_INFO_GPU_METRICS", "typeId", "metricId", "metricName"):
            for type_id, metric, name in self.file.rows("TARGET_INFO_GPU_METRICS", "typeId", "metricId", "metricName"):
                ty, number = as_int(type_id), as_int(metric)
                if ty is not None and number is not None and name is not None:
                    names[ty, number] = str(name)
        columns, _, floats = self.file.columns("GPU_METRICS", ("timestamp", "typeId", "metricId"), floats=("value",))
        type_id, metric = columns["typeId"].values, columns["metricId"].values
        pairs, which = distinct_rows(type_id, metric)
        labels = [names.get((ty, m)) for ty, m in pairs]
        name = _spread([-1 if label is None else self.strings.add(label) for label in labels], which)
        device = _spread([self._metric_device(ty) for ty, _ in pairs], which)
        unnamed = int((name < 0).sum())
        if unnamed:
            self.problems.append(
                Problem("unnamed-counters", f"{unnamed} counter samples without a metric name were left out.", unnamed)
            )
        keep = columns["timestamp"].is_valid() & (name >= 0) & ~np.isnan(floats["value"])
        return (
            t.Table(
                "counters",
                {"time": columns["timestamp"].values, "device": device, "metric": name, "value": floats["value"]},
            )
            .take(keep)
            .sorted_by("time")
        )

    def _generic_events(self) -> t.Table | None:
        """GPU metrics of 2021–2023 exports: one JSON object per sample, values as strings, whole per cents."""
        described = self.file.rows("GENERIC_EVENT_TYPES", "typeId", "data")
        types = [
            ty for ty, data in described if isinstance(ty, int) and re.search(r"GPU|SM Active|SMs Active", str(data))
        ]
        if not types:
            return None
        columns, texts, _ = self.file.columns("GENERIC_EVENTS", ("timestamp", "typeId"), ("data",))
        data = texts["data"]
        of_gpu = columns["typeId"].is_valid() & np.isin(columns["typeId"].values, types)
        rows = np.flatnonzero(of_gpu & columns["timestamp"].is_valid() & (data.codes >= 0))
        # Per field: the samples (indexes into data.values) that have it, and its values there.
        fields: dict[str, tuple[list[int], list[float]]] = {}
        for code in distinct_values(data.codes[rows]).tolist():
            try:
                sample = json.loads(data.values[code]).items()
            except (ValueError, AttributeError, RecursionError):
                self.problems.append(
                    Problem("counters-unreadable", "GPU metrics could not be read: a sample is not one JSON object.")
                )
                return None
            for field, value in sample:
                codes, values = fields.setdefault(field, ([], []))
                codes.append(code)
                values.append(_number(value))
        times = columns["timestamp"].values[rows]
        devices = _translate(columns["typeId"].values[rows], {ty: self._metric_device(ty) for ty in types}, -1)
        parts: list[tuple[IntArray, IntArray, IntArray, FloatArray]] = []
        for field, (codes, values) in fields.items():
            by_code = np.full(len(data.values), np.nan)
            by_code[codes] = values
            value_of_row = by_code[data.codes[rows]]
            here = ~np.isnan(value_of_row)
            if here.any():
                metric = np.full(int(here.sum()), self.strings.add(field), dtype=np.int64)
                parts.append((times[here], devices[here], metric, value_of_row[here]))
        if not parts:
            return None
        time, device, metric, value = (np.concatenate(p) for p in zip(*parts, strict=True))
        return t.Table("counters", {"time": time, "device": device, "metric": metric, "value": value}).sorted_by("time")

    # --- about the capture -----------------------------------------------------------------------------------------

    def _metadata(self) -> list[tuple[str, str]]:
        pairs: list[tuple[str, str]] = []
        for table in ("EXPORT_META_DATA", "META_DATA_EXPORT", "META_DATA_CAPTURE"):
            if self.file.has(table, "name", "value"):
                pairs += [(str(n), str(v)) for n, v in self.file.rows(table, "name", "value")]
        return pairs

    def _provenance(self, metadata: list[tuple[str, str]]) -> t.TraceProvenance:
        """What recorded the file, without anything private: no environment, path or host; of the command line only
        options that are known to matter for speed."""
        version = next((v for n, v in metadata if n == "EXPORT_PRODUCT_VERSION"), None)
        capture: dict[str, Any] = {}
        schema = next((v for n, v in metadata if n == "EXPORT_SCHEMA_VERSION"), None)
        if schema:
            capture["schema_version"] = schema
        graph_mode = next((v for n, v in metadata if n.endswith("CUDA_GRAPH_TRACE_OPTIONS:MODE")), None)
        if graph_mode:
            capture["cuda_graph_trace"] = graph_mode
        if any(n.endswith("SKIP_SOME_API_CALLS") and v.lower() in ("true", "1") for n, v in metadata):
            capture["some_api_calls_skipped"] = True
        arguments = [(int(m[1]), int(m[2]), v) for n, v in metadata if (m := _ARGUMENT.fullmatch(n))]
        if arguments:
            capture["flags"] = speed_flags([value for _, _, value in sorted(arguments)])
        events = sorted({v for n, v in metadata if n == "CAPTURE_EVENT_TYPE"})
        if events:
            capture["event_types"] = events
        tool = "nsys"
        if ("EXPORT_PRODUCT_NAME", t.CUPTI_BACKEND) in metadata:
            tool = t.CUPTI_BACKEND
            self.problems.append(
                Problem(
                    "experimental-recorder",
                    f"Recorded by `{t.CUPTI_BACKEND}`, which is experimental: it has not been checked on a GPU against nsys. "
                    "Check what this diagnosis says with another recorder (`--backend nsys` or torch) before acting on it.",
                )
            )
        return t.TraceProvenance(tool, version, [self.path.name.encode("utf-8", "replace").decode()], capture)

    def _diagnostics(self) -> list[tuple[str, str]]:
        if not self.file.has("DIAGNOSTIC_EVENT", "severity", "text"):
            return []
        levels = {2: "warning", 3: "error"}
        rows = self.file.rows("DIAGNOSTIC_EVENT", "severity", "text")
        return [(levels[severity], str(text)) for severity, text in rows if severity in levels and text]

    def _note_damage(self) -> None:
        if self.file.missing_bytes:
            self.problems.append(
                Problem(
                    "cut-short",
                    f"The file is cut short: its last {self.file.missing_bytes:,} bytes are missing, a copy or an export "
                    "that did not finish. Figures cover what was read; export the report again.",
                )
            )
        for table, rows in self.file.damaged.items():
            self.problems.append(
                Problem(
                    "damaged-table",
                    f"The file is damaged: {table} could be read only up to row {rows}. Figures cover what was read.",
                    rows,
                )
            )
        ordinals: dict[int, set[int]] = {}
        for stream in self.streams:
            ordinals.setdefault(stream.device, set()).add(stream.process)
        shared = [self.devices[d].id for d, users in ordinals.items() if len(users) > 1]
        if shared and not self.cuda_devices and len(self.gpu_facts) > len(ordinals):
            self.problems.append(
                Problem(
                    "device-mapping",
                    f"Several processes used a device numbered {', '.join(map(str, shared))}, {len(self.gpu_facts)} GPUs "
                    "were present, and the file does not say which was which (CUDA_VISIBLE_DEVICES): they are shown as one.",
                )
            )


# Tables whose times belong together, CUDA calls first (see _Builder._centre).
_TABLES_WITH_TIMES = (
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
    "NVTX_EVENTS",
    "OSRT_API",
    "SCHED_EVENTS",
)


def _indexed(index: dict[int, int], values: IntArray, valid: BoolArray | None, mask: int = -1) -> IntArray:
    """Dense indexes of the ids' bits in ``mask`` (the high ones), -1 where not valid.

    Ids not seen before get the next ones, smallest id first.
    """

    def dense(ids: list[int]) -> list[int]:
        return [index.setdefault(i & mask, len(index)) for i in ids]

    if valid is None:
        return mapped(values, dense)
    found = np.full(len(values), -1, dtype=np.int64)
    found[valid] = mapped(values[valid], dense)
    return found


def _spread(values: list[int], which: IntArray) -> IntArray:
    """The value of each row's distinct row."""
    if len(which) and (is_constant(which) or len(set(values)) == 1):
        return constant(values[int(which[0])], len(which))
    return _of_each(values)[which]


def _of_each(values: list[int]) -> IntArray:
    """A value per distinct row, to be spread over all rows."""
    return np.array(values, dtype=np.int64)


def _among(values: IntArray, wanted: Sequence[int]) -> BoolArray:
    """Which values are among a few."""
    if is_constant(values):
        return np.broadcast_to(np.bool_(int(values[0]) in wanted), values.shape)
    return np.isin(values, wanted)


def _translate(values: IntArray, mapping: dict[int, int], default: int, keep: IntArray | None = None) -> IntArray:
    """Values through a small mapping; ``keep`` gives what stays where the mapping has nothing."""
    out = np.full(len(values), default, dtype=np.int64) if keep is None else keep.copy()
    for key, value in mapping.items():
        out[values == key] = value
    return out


def _damage_words(error: Exception) -> str:
    """SQLite's words for the damage, without the pieces of the file that it may quote after them."""
    words = re.match(r"[a-z ]*", str(error))
    return (words[0].strip() if words else "") or "malformed"


def _length_bounds(starts: IntArray, ends: IntArray) -> tuple[int, int]:
    """The shortest and the longest of one or more intervals."""
    least, most = [], []
    for i in range(0, len(starts), PIECE):
        length = ends[i : i + PIECE] - starts[i : i + PIECE]
        least.append(int(length.min()))
        most.append(int(length.max()))
    return min(least), max(most)


def _correlation(columns: dict[str, IntColumn], rows: int) -> IntArray:
    """Correlation ids; -1 where there is none or where it is none of CUPTI's (unsigned 32 bits)."""
    if "correlationId" not in columns:
        return np.full(rows, -1, dtype=np.int64)
    ids = columns["correlationId"].filled(-1)
    if ids.min(initial=-1) >= -1 and ids.max(initial=-1) < 2**32:
        return ids
    # Ids of 32 bits that were written as signed ones.
    ids = np.where((ids < -1) & (ids >= -(2**31)), ids & 0xFFFFFFFF, ids)
    return np.where((ids >= 0) & (ids < 2**32), ids, -1)


def _zero_as_none(column: IntColumn | None, rows: int) -> IntArray:
    if column is None:
        return np.full(rows, -1, dtype=np.int64)
    values = column.filled(-1)
    if is_constant(values):
        return constant(int(values[0]) or -1, rows)
    return np.where(values == 0, -1, values)


def _json_message_size(text: str) -> int:
    """The size in NCCL's payload, e.g. {"Message size [bytes]": 8388608}; -1 if there is none."""
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError):
        return -1
    stack = [payload]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            for key, value in item.items():
                if "size" in str(key).lower() and "byte" in str(key).lower():
                    number = _number(value)
                    return int(number) if number == number else -1
                stack.append(value)
        elif isinstance(item, list):
            stack.extend(item)
    return -1


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
