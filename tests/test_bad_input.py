"""Files that are no export, half an export, or a wrong one: one sentence or a diagnosis that says what is wrong."""

from __future__ import annotations

import ctypes
import gzip
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from case_builders import MS, US, infprof, problem_codes
from infprof.diagnosis import Options, analyze
from infprof.errors import EXIT_UNUSABLE, InfprofError
from infprof.readers import read
from infprof.resources import rules_dir, sample_traces_dir
from infprof.results import Diagnosis
from infprof.rules import load
from infprof.simulator.builder import TraceBuilder

RULES = load([rules_dir()])
SAMPLE = sample_traces_dir() / "launch-bound-decode" / "trace.sqlite"
# linux/prctl.h and linux/capability.h.
_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 24, 1, 2
_LIBC = ctypes.CDLL(None)
KERNELS, CALLS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"


def everything(version: str = "2023.4", steps: int = 120) -> TraceBuilder:
    """A small trace with a row in about every table that is read."""
    builder = TraceBuilder(version)
    thread = builder.thread()
    builder.gpu()
    for i in range(steps):
        at = i * 200 * US
        builder.launch(at, 5 * US, at + 10 * US, 100 * US, f"kernel_{i % 3}", thread=thread)
        builder.nvtx(at, at + 150 * US, "step")
    end = steps * 200 * US
    copy = builder.api(end, end + 5 * US, "cudaMemcpyAsync")
    builder.memcpy(end + 10 * US, end + 20 * US, kind="h2d", src="pageable", correlation=copy)
    builder.memset(end + 30 * US, end + 31 * US)
    builder.graph_trace(end + 40 * US, end + 60 * US)
    builder.osrt(0, 8 * US, "poll")
    builder.overhead(end, end + US)
    builder.memory_event(5, bytes=1 << 20)
    builder.gpu_metric(5 * US, 0, "SM Issue [Throughput %]", 50)
    builder.diagnostic("Some CUDA events were lost")
    return builder


def edited(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()
    return path


def untyped(table: str) -> tuple[str, str, str]:
    """Statements that remake a table without types and constraints, so that anything can stand anywhere."""
    return f"CREATE TABLE loose AS SELECT * FROM {table}", f"DROP TABLE {table}", f"ALTER TABLE loose RENAME TO {table}"


def beside(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder, with its bytes."""
    return {p.name: p.read_bytes() if p.is_file() and os.access(p, os.R_OK) else None for p in folder.iterdir()}


def one_sentence(text: str) -> bool:
    return re.fullmatch(r"infprof: (?!a defect of infprof)[^\n]+\.\n", text) is not None


def refused(path: Path) -> str:
    """What is said of a file in which nothing can be analysed."""
    before = beside(path.parent)
    with pytest.raises(InfprofError) as error:
        read(path)
    assert beside(path.parent) == before
    assert error.value.exit_code == EXIT_UNUSABLE
    assert str(path) in str(error.value)
    assert one_sentence(f"infprof: {error.value}\n") and str(error.value).isprintable()
    return str(error.value)


def diagnosed(path: Path, window: str = "auto") -> Diagnosis:
    """The diagnosis of a file that holds something; the file and its folder stay as they were."""
    before = beside(path.parent)
    diagnosis = analyze(read(path), RULES, Options(window=window))
    diagnosis.to_dict()
    for device in diagnosis.devices:
        assert sum(s.ns for s in device.slices) == diagnosis.window.duration_ns
    assert beside(path.parent) == before
    return diagnosis


# --- files in which nothing can be analysed ---------------------------------------------------------------------------

RAW = SAMPLE.read_bytes()
ZIPPED = gzip.compress(RAW, 1, mtime=0)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


NOT_AN_EXPORT = {
    "empty": (b"", "is empty"),
    "text": (b"start,end,name\n1,2,gemm\n", "is a text file"),
    "text that starts like SQLite": (b"SQLite format 3", "damaged SQLite"),
    "random bytes": (random.Random(1).randbytes(20_000), "unknown kind"),
    "only the header": (RAW[:100], "damaged SQLite"),
    "cut after the first page": (RAW[:4096], "damaged SQLite"),
    "cut in a table": (RAW[: len(RAW) // 2 + 123], "damaged SQLite"),
    "without the last page": (RAW[:-4096], "damaged SQLite"),
    "a gzip header": (ZIPPED[:10], "gzip"),
    "a cut gzip": (ZIPPED[: len(ZIPPED) // 2], "damaged gzip"),
    "a gzip without its checksum": (ZIPPED[:-8], "damaged gzip"),
    "a gzip with a wrong checksum": (flipped(ZIPPED, len(ZIPPED) - 6), "damaged gzip"),
    "a gzip that does not unpack": (flipped(ZIPPED, 12), "gzip"),
    "a gzip of text": (gzip.compress(b"hello\n"), "not a profile"),
    "a gzip of nothing": (gzip.compress(b""), "not a profile"),
    "a gzip of half an export": (gzip.compress(RAW[: len(RAW) // 2], 1), "damaged SQLite"),
}


@pytest.mark.parametrize("kind", NOT_AN_EXPORT)
def test_what_is_no_export_ends_in_one_sentence(kind: str, tmp_path: Path) -> None:
    data, words = NOT_AN_EXPORT[kind]
    path = tmp_path / "trace.sqlite"
    path.write_bytes(data)
    assert words in refused(path)


@pytest.mark.parametrize("missing", [1, 37, 4095])
def test_a_file_cut_inside_its_last_page_is_read_and_said(tmp_path: Path, missing: int) -> None:
    """SQLite itself reads such a page as if zeros followed."""
    path = tmp_path / "trace.sqlite"
    path.write_bytes(RAW[:-missing])
    (said,) = [p.message for p in diagnosed(path).problems if p.code == "cut-short"]
    assert f"last {missing:,} bytes are missing" in said
    assert "cut-short" not in {p.code for p in read(SAMPLE).problems}


@pytest.mark.parametrize("kind", ["empty", "random bytes", "cut in a table", "a gzip that does not unpack", None])
def test_the_command_line_ends_with_that_sentence(kind: str | None, tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite"
    if kind is not None:
        path.write_bytes(NOT_AN_EXPORT[kind][0])
    before = beside(tmp_path)
    done = infprof("analyze", path)
    assert (done.returncode, done.stdout) == (3, "")
    assert one_sentence(done.stderr) and str(path) in done.stderr, done.stderr
    assert beside(tmp_path) == before


def test_an_sqlite_file_of_another_program(tmp_path: Path) -> None:
    path = edited(tmp_path / "notes.sqlite", "CREATE TABLE notes (text TEXT)", "INSERT INTO notes VALUES ('milk')")
    assert "without any table of an Nsight Systems export" in refused(path)


def test_an_sqlite_file_without_any_table(tmp_path: Path) -> None:
    assert "without any table" in refused(edited(tmp_path / "none.sqlite", "CREATE TABLE a (b)", "DROP TABLE a"))


def test_a_table_of_an_export_without_the_others(tmp_path: Path) -> None:
    path = tmp_path / "StringIds.parquet"
    path.write_bytes(b"PAR1" + bytes(1000))
    assert "name the folder" in refused(path)


def test_a_text_that_is_named_like_a_report(tmp_path: Path) -> None:
    path = tmp_path / "report.nsys-rep"
    path.write_bytes(b"Generated: report.nsys-rep")
    assert "is a text file" in refused(path)


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    assert "is a folder" in refused(tmp_path)
    assert "does not exist" in refused(tmp_path / "missing.sqlite")
    (tmp_path / "dangling.sqlite").symlink_to(tmp_path / "missing.sqlite")
    assert "does not exist" in refused(tmp_path / "dangling.sqlite")
    (tmp_path / "loop.sqlite").symlink_to(tmp_path / "loop.sqlite")
    refused(tmp_path / "loop.sqlite")
    (tmp_path / "file").write_bytes(RAW)
    with pytest.raises(InfprofError, match=r"cannot be read|does not exist"):
        read(tmp_path / "file" / "trace.sqlite")


def unprivileged(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command line as a user whom permissions bind: as root, without the capabilities that pass over them."""

    def drop() -> None:
        for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
            if _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
                raise OSError("this root may not drop its capabilities")

    command = [sys.executable, "-m", "infprof.cli", *map(str, arguments)]
    bound: Callable[[], None] | None = drop if os.geteuid() == 0 else None
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, preexec_fn=bound)
    except subprocess.SubprocessError as error:
        pytest.skip(f"cannot become a user without rights: {error}")


def test_a_file_or_folder_without_permission(tmp_path: Path) -> None:
    folder = tmp_path
    path = folder / "secret.sqlite"
    shutil.copyfile(SAMPLE, path)
    path.chmod(0)
    closed = folder / "closed"
    closed.mkdir()
    shutil.copyfile(SAMPLE, closed / "trace.sqlite")
    closed.chmod(0)
    try:
        for target in (path, closed / "trace.sqlite"):
            done = unprivileged("analyze", target)
            assert (done.returncode, done.stdout) == (3, "")
            assert one_sentence(done.stderr) and "permission denied" in done.stderr, done.stderr
    finally:
        closed.chmod(0o700)


def test_a_folder_that_cannot_be_written_to_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    shutil.copyfile(SAMPLE, folder / "trace.sqlite")
    (folder / "trace.sqlite.gz").write_bytes(ZIPPED)
    folder.chmod(0o555)
    before = beside(folder)
    try:
        for name in before:
            done = unprivileged("analyze", folder / name)
            assert done.returncode == 0, done.stderr
        assert beside(folder) == before
    finally:
        folder.chmod(0o755)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.sqlite")
    command = [sys.executable, "-m", "infprof.cli", "analyze", str(tmp_path / "pipe.sqlite")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    assert done.returncode == 3 and one_sentence(done.stderr), done.stderr


# --- odd names and places -------------------------------------------------------------------------------------------

NAMES = (
    "a b.sqlite",
    "100%.sqlite",
    "a#1.sqlite",
    "why?.sqlite",
    "%41.sqlite",
    "näme-测试-🙂.sqlite",
    "a&b=c;d.sqlite",
    "-x.sqlite",
)


@pytest.mark.parametrize("name", NAMES)
def test_names_that_mean_something_in_a_url(name: str, tmp_path: Path) -> None:
    shutil.copyfile(SAMPLE, tmp_path / name)
    # The name that it would be after decoding must not be opened instead.
    (tmp_path / "A.sqlite").write_bytes(b"no export")
    assert diagnosed(tmp_path / name).verdict.cls == "scheduling-bubble"
    (tmp_path / f"{name}.gz").write_bytes(ZIPPED)
    assert diagnosed(tmp_path / f"{name}.gz").provenance.inputs == [f"{name}.gz"]


def test_the_command_line_takes_odd_names(tmp_path: Path) -> None:
    shutil.copyfile(SAMPLE, tmp_path / "50% näme #1?.sqlite")
    done = infprof("analyze", tmp_path / "50% näme #1?.sqlite", "--json")
    assert done.returncode == 0, done.stderr
    assert '"50% näme #1?.sqlite"' in done.stdout or '"50% n\\u00e4me #1?.sqlite"' in done.stdout


def test_a_name_that_is_no_unicode(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/tr\xff\xfece.sqlite"
    shutil.copyfile(SAMPLE, path)
    command = [sys.executable, "-m", "infprof.cli", "analyze", path, "--json"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr


def test_a_link_is_followed(tmp_path: Path) -> None:
    link = tmp_path / "link.sqlite"
    link.symlink_to(SAMPLE)
    assert diagnosed(link).verdict.cls == "scheduling-bubble"
    assert link.is_symlink()


def test_a_file_that_is_still_being_written(tmp_path: Path) -> None:
    """A writer holds the file open, with committed rows in its log: they are read, and the writer is not disturbed."""
    path = everything().write(tmp_path / "live.sqlite")
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute(f"UPDATE {KERNELS} SET end = end + 1000")
        writer.commit()
        writer.execute(f"DELETE FROM {KERNELS}")
        before = beside(tmp_path)
        done = infprof("analyze", path)
        assert done.returncode == 0, done.stderr
        assert "write-ahead log" in done.stdout
        kernels = read(path).kernels
        assert kernels is not None and len(kernels) == 120
        assert (kernels["end"] - kernels["start"]).min() == 101 * US
        assert beside(tmp_path) == before
        writer.commit()


# --- wrong rows and missing columns ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("SET end = start - 5", "negative-kernels"),
        ("SET start = NULL", "null-kernels"),
        ("SET end = NULL", "null-kernels"),
        ("SET start = NULL, end = NULL", "null-kernels"),
        ("SET end = start", "zero-kernels"),
        ("SET start = 0, end = 0", "zero-kernels"),
        ("SET end = 4611686018427387904", "absurd-kernels"),
        ("SET start = 4611686018427387904, end = 4611686018427387999", "absurd-kernels"),
        ("SET start = -9223372036854775808", "absurd-kernels"),
        ("SET start = 9223372036854775807, end = -9223372036854775808", "negative-kernels"),
        ("SET start = 'soon'", "null-kernels"),
        ("SET end = x'00ff'", "null-kernels"),
        ("SET end = 9e999", "null-kernels"),
    ],
)
def test_kernels_with_unusable_times_are_counted(statement: str, problem: str, tmp_path: Path) -> None:
    source = everything().write(tmp_path / "trace.sqlite")
    some = edited(source, *untyped(KERNELS), f"UPDATE {KERNELS} {statement} WHERE rowid % 3 = 1")
    diagnosis = diagnosed(some)
    found = next(p for p in diagnosis.problems if p.code == problem)
    assert found.count == 40
    assert diagnosis.devices[0].kernels.count == 80
    assert "coverage" in problem_codes(diagnosis)
    # 40 of 120 kernels are lost, beside a copy, a memset and a graph that are not.
    assert "67.5 %" in next(p.message for p in diagnosis.problems if p.code == "coverage")
    # Where no kernel is left, the trace must not be judged by the copies that remain.
    every = edited(some, f"UPDATE {KERNELS} {statement}")
    diagnosis = diagnosed(every)
    assert diagnosis.verdict.cls == "unusable"
    assert not any(d.kernels.count for d in diagnosis.devices)


def test_a_device_whose_operations_all_lack_times(tmp_path: Path) -> None:
    builder = everything()
    for i in range(50):
        builder.kernel(i * MS, i * MS - 1, device=1)
    path = builder.write(tmp_path / "trace.sqlite")
    diagnosis = diagnosed(path)
    assert next(p for p in diagnosis.problems if p.code == "negative-kernels").count == 50
    # It is not the one that the trace is judged by, and the time it shows has no cause.
    assert diagnosis.verdict.cls != "unusable"
    assert diagnosis.devices[0].kernels.count == 120
    for device in diagnosis.devices[1:]:
        assert device.kernels.count == 0
        assert [(s.kind, s.cause) for s in device.slices] == [("idle", "unknown")]


@pytest.mark.parametrize("table", [CALLS, "OSRT_API", "NVTX_EVENTS", "PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_MEMCPY"])
@pytest.mark.parametrize("statement", ["SET start = NULL", "SET end = start - 5", "SET start = 'x', end = 'y'"])
def test_unusable_rows_of_other_tables_do_not_stop_it(table: str, statement: str, tmp_path: Path) -> None:
    path = everything().write(tmp_path / "trace.sqlite")
    diagnosis = diagnosed(edited(path, *untyped(table), f"UPDATE {table} {statement}"))
    assert diagnosis.devices[0].kernels.count == 120
    assert {c.split("-")[0] for c in problem_codes(diagnosis)} & {"null", "negative", "zero"}


@pytest.mark.parametrize("table", [KERNELS, CALLS, "NVTX_EVENTS", "OSRT_API", "CUPTI_ACTIVITY_KIND_MEMCPY"])
def test_tables_without_rows(table: str, tmp_path: Path) -> None:
    """nsys writes them with --lazy=false."""
    path = everything().write(tmp_path / "trace.sqlite")
    diagnosis = diagnosed(edited(path, f"DELETE FROM {table}"))
    assert (diagnosis.verdict.cls == "unusable") == (table == KERNELS)


def test_an_export_of_empty_tables(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for table in (KERNELS, CALLS, "NVTX_EVENTS", "OSRT_API", "CUPTI_ACTIVITY_KIND_MEMCPY", "PROFILER_OVERHEAD"):
        builder.empty_table(table)
    path = builder.write(tmp_path / "trace.sqlite")
    done = infprof("analyze", path)
    assert done.returncode == 3
    assert done.stdout.startswith("Unusable trace: no GPU work")
    assert one_sentence(done.stderr)
    assert "missing" in done.stdout


def test_a_recording_of_the_cpu_only(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for i in range(100):
        builder.osrt(i * MS, i * MS + 500 * US, "poll")
        builder.nvtx(i * MS, i * MS + 900 * US, "step")
    path = builder.write(tmp_path / "cpu.sqlite")
    before = beside(tmp_path)
    done = infprof("analyze", path)
    assert done.returncode == 3
    assert done.stdout.startswith("Unusable trace: no GPU work")
    assert one_sentence(done.stderr)
    assert beside(tmp_path) == before
    assert diagnosed(path).verdict.code == "no-gpu-work"


def test_names_that_are_missing_are_shown_by_number(tmp_path: Path) -> None:
    path = everything().write(tmp_path / "trace.sqlite")
    with closing(sqlite3.connect(path)) as database:
        (lost,) = database.execute("SELECT id FROM StringIds WHERE value = 'kernel_1'").fetchone()
    diagnosis = diagnosed(edited(path, f"DELETE FROM StringIds WHERE id = {lost}"))
    assert "missing-strings" in problem_codes(diagnosis)
    assert f"[kernel {lost}]" in {row.name for row in diagnosis.kernel_table}
    # Without any string the figures stay, and nothing has a name.
    diagnosis = diagnosed(edited(path, "DROP TABLE StringIds"))
    assert "missing-strings" in problem_codes(diagnosis)
    assert diagnosis.devices[0].kernels.count == 120
    assert all(row.name.startswith("[kernel ") for row in diagnosis.kernel_table)


STRANGE = ("NULL", "'word'", "''", "1.5", "x'00ff'", "9e999", "-9223372036854775808", "9223372036854775807")


@pytest.mark.parametrize(
    "column", ["demangledName", "shortName", "deviceId", "streamId", "contextId", "correlationId", "globalPid", "gridX"]
)
@pytest.mark.parametrize("value", STRANGE)
def test_strange_values_in_kernels_leave_the_time_alone(column: str, value: str, tmp_path: Path) -> None:
    path = everything().write(tmp_path / "trace.sqlite")
    diagnosis = diagnosed(edited(path, *untyped(KERNELS), f"UPDATE {KERNELS} SET {column} = {value}"), "full")
    assert sum(d.kernels.total_ns for d in diagnosis.devices) == 120 * 100 * US


@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize(
    ("table", "columns"),
    [
        ("TARGET_INFO_GPU", ("id", "cuDevice", "smCount", "totalMemory", "computeMajor", "computeMinor", "name")),
        ("TARGET_INFO_GPU_METRICS", ("typeId", "metricId", "metricName")),
        ("GPU_METRICS", ("timestamp", "typeId", "metricId", "value")),
        ("CUDA_GPU_MEMORY_USAGE_EVENTS", ("start", "bytes", "memKind", "memoryOperationType", "deviceId")),
        ("CUPTI_ACTIVITY_KIND_MEMCPY", ("bytes", "copyKind", "srcKind", "dstKind")),
        ("NVTX_EVENTS", ("text", "textId", "eventType", "globalTid", "end")),
        ("StringIds", ("id", "value")),
        ("PROCESSES", ("globalPid", "name")),
        ("ThreadNames", ("globalTid", "nameId")),
        ("DIAGNOSTIC_EVENT", ("severity", "text")),
        ("META_DATA_EXPORT", ("name", "value")),
        (CALLS, ("globalTid", "correlationId", "nameId", "returnValue")),
    ],
)
def test_strange_values_elsewhere_change_no_kernel(
    table: str, columns: tuple[str, ...], value: str, tmp_path: Path
) -> None:
    for column in columns:
        path = everything(steps=60).write(tmp_path / "trace.sqlite")
        diagnosis = diagnosed(edited(path, *untyped(table), f"UPDATE {table} SET {column} = {value}"), "full")
        assert diagnosis.devices[0].kernels.total_ns == 60 * 100 * US, column


READ_COLUMNS = {
    KERNELS: "start end deviceId contextId streamId correlationId globalPid demangledName shortName gridX graphNodeId",
    CALLS: "start end globalTid correlationId nameId returnValue",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start bytes copyKind srcKind",
    "NVTX_EVENTS": "start end eventType text textId globalTid",
    "OSRT_API": "end globalTid nameId",
    "TARGET_INFO_GPU": "id name smCount computeMajor cuDevice",
    "StringIds": "id value",
    "GPU_METRICS": "timestamp typeId value",
    "ThreadNames": "nameId globalTid",
}


@pytest.mark.parametrize("table", READ_COLUMNS)
def test_columns_that_a_schema_does_not_have(table: str, tmp_path: Path) -> None:
    """Each by itself: at worst something is not available."""
    for column in READ_COLUMNS[table].split():
        path = everything(steps=30).write(tmp_path / "trace.sqlite")
        diagnosis = diagnosed(edited(path, *untyped(table), f'ALTER TABLE {table} DROP COLUMN "{column}"'), "full")
        if (table, column) in ((KERNELS, "start"), (KERNELS, "end")):
            assert diagnosis.verdict.cls == "unusable"
        else:
            assert diagnosis.devices[0].kernels.total_ns == 30 * 100 * US, column


def test_the_smallest_schema_that_says_anything(tmp_path: Path) -> None:
    rows = ", ".join(f"({i * 200 * US}, {i * 200 * US + 100 * US})" for i in range(200))
    path = edited(
        tmp_path / "least.sqlite",
        f"CREATE TABLE {KERNELS} (start INT, end INT)",
        f"INSERT INTO {KERNELS} VALUES {rows}",
    )
    diagnosis = diagnosed(path)
    assert len(diagnosis.devices) == 1
    assert diagnosis.devices[0].kernels.total_ns == 200 * 100 * US
    # Nothing is known of the host, so no cause of the idle time may be named.
    assert {s.cause for s in diagnosis.devices[0].slices if s.kind == "idle"} <= {"unknown"}


def test_metric_samples_that_are_no_json(tmp_path: Path) -> None:
    """GENERIC_EVENTS holds one JSON object per sample; what is none must not shift the values of the others."""
    good = '{"SM Active [Throughput %]": "40"}'
    samples = ["''", "' '", "NULL", "'{'", "'[1]'", "x'ff00'", "7", "'{}{}'", "'null'"]
    statements = [
        "CREATE TABLE GENERIC_EVENT_TYPES (typeId INT, data TEXT)",
        "CREATE TABLE GENERIC_EVENTS (rawTimestamp INT, timestamp INT, typeId INT, data TEXT)",
        "INSERT INTO GENERIC_EVENT_TYPES VALUES (1, 'GPU Metrics [SM Active]')",
        *(f"INSERT INTO GENERIC_EVENTS VALUES ({i}, {i * 100 * US}, 1, '{good}')" for i in range(3)),
    ]
    clean = edited(TraceBuilder().write(tmp_path / "clean.sqlite"), *statements)
    for i, sample in enumerate(samples):
        path = tmp_path / f"{i}.sqlite"
        shutil.copyfile(clean, path)
        counters = read(edited(path, f"INSERT INTO GENERIC_EVENTS VALUES (9, {9 * MS}, 1, {sample})")).counters
        if counters is not None:
            assert set(counters["value"].tolist()) <= {40.0}
            assert counters["time"].max() < 9 * MS, sample


@pytest.mark.parametrize("rowid", [9223372036854775807, 4_000_000_000_000, 1_000_000, -5])
def test_row_numbers_say_nothing_about_the_number_of_rows(rowid: int, tmp_path: Path) -> None:
    path = everything().write(tmp_path / "trace.sqlite")
    diagnosis = diagnosed(edited(path, f"UPDATE {KERNELS} SET rowid = {rowid} WHERE rowid = 120"))
    assert diagnosis.devices[0].kernels.count == 120


@pytest.mark.parametrize(
    "statement",
    [
        # An old-fashioned view, an index on an expression, a table of another program, a trigger: none is in the way.
        f"CREATE VIEW kernels AS SELECT * FROM {KERNELS}",
        f"CREATE INDEX by_length ON {KERNELS} (end - start)",
        'CREATE TABLE "it\'s ""mine""" (globalPid TEXT, globalTid BLOB)',
        f"CREATE TRIGGER no_reading AFTER INSERT ON {KERNELS} BEGIN SELECT RAISE(ABORT, 'no'); END",
    ],
)
def test_what_others_add_to_an_export_is_not_in_the_way(statement: str, tmp_path: Path) -> None:
    path = everything().write(tmp_path / "trace.sqlite")
    assert diagnosed(edited(path, statement)).devices[0].kernels.count == 120


# --- damage --------------------------------------------------------------------------------------------------------

SMALL = everything(steps=40)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SMALL.write(tmp_path_factory.mktemp("damage") / "small.sqlite")


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=30), st.booleans()
)
@example([(0.0, 1)], False)
def test_flipped_bytes_end_in_a_sentence_or_a_diagnosis(
    small_file: Path, flips: list[tuple[float, int]], zipped: bool
) -> None:
    data = bytearray(small_file.read_bytes())
    if zipped:
        data = bytearray(gzip.compress(data, 1, mtime=0))
    for place, value in flips:
        data[int(place * len(data))] ^= value
    path = small_file.with_name("flipped.sqlite")
    path.write_bytes(data)
    try:
        diagnosed(path)
    except InfprofError as error:
        assert error.exit_code == EXIT_UNUSABLE
        assert str(error).endswith(".") and "\n" not in str(error)
    finally:
        path.unlink()


@pytest.mark.parametrize("byte", [b"`", b"\xac", b"\x00", b"\n", b"\x1b"])
def test_a_damaged_schema_ends_in_one_sentence(byte: bytes, small_file: Path, tmp_path: Path) -> None:
    """SQLite quotes the broken CREATE statement in its message, line breaks and all."""
    data = small_file.read_bytes()
    at = data.index(b"CREATE TABLE StringIds") + len(b"CREATE TABLE ")
    path = tmp_path / "trace.sqlite"
    path.write_bytes(data[:at] + byte + data[at + 1 :])
    try:
        diagnosed(path)
    except InfprofError:
        refused(path)


def test_a_damaged_table_is_read_up_to_the_damage(tmp_path: Path) -> None:
    path = everything(steps=3_000).write(tmp_path / "trace.sqlite")
    data = bytearray(path.read_bytes())
    with closing(sqlite3.connect(path)) as database:
        (page_size,) = database.execute("PRAGMA page_size").fetchone()
        (root,) = database.execute(f"SELECT rootpage FROM sqlite_master WHERE name = '{KERNELS}'").fetchone()
    # The table's root lists its leaves, four bytes of page number per cell; the middle one is overwritten.
    top = (root - 1) * page_size
    cells = int.from_bytes(data[top + 3 : top + 5], "big")
    assert data[top] == 5 and cells > 4
    cell = int.from_bytes(data[top + 12 + cells // 2 * 2 :][:2], "big")
    leaf = int.from_bytes(data[top + cell :][:4], "big")
    data[(leaf - 1) * page_size : leaf * page_size] = b"\xff" * page_size
    path.write_bytes(data)
    diagnosis = diagnosed(path)
    damage = next(p for p in diagnosis.problems if p.code == "damaged-table")
    assert KERNELS in damage.message
    assert damage.count and 1_000 < damage.count < 2_000
    assert sum(d.kernels.count for d in diagnosis.devices) == damage.count
