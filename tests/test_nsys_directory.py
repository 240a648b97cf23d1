"""nsys's Parquet and Arrow exports give the Trace and the diagnosis of the SQLite export of the same report."""

from __future__ import annotations

import gzip
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from case_builders import infprof, problem, problem_codes
from conftest import SHARED
from infprof.diagnosis import Options, analyze_file
from infprof.errors import InfprofError
from infprof.readers import read
from infprof.readers.nsys_directory import is_nsys_directory
from infprof.resources import sample_traces_dir
from infprof.results import Diagnosis
from infprof.simulator.builder import TraceBuilder
from nsys_reports import assert_same_trace, columnar, content, export, real_nsys, record

pytest.importorskip("pyarrow", reason="needs the extra arrow")

KINDS = ("parquetdir", "arrowdir", "arrow")
SAMPLES = sorted(sample_traces_dir().glob("*/trace.sqlite"))
PUBLIC = sorted((SHARED / "traces" / "nsys-sqlite").glob("*.sqlite.gz"))


def said(diagnosis: Diagnosis) -> dict[str, Any]:
    """All of a diagnosis but what names the input or comes from META_DATA_CAPTURE."""
    data = diagnosis.to_dict()
    data["provenance"] = {k: v for k, v in data["provenance"].items() if k not in ("inputs", "capture")}
    data["problems"] = [p for p in data["problems"] if p["code"] != "api-calls-skipped"]
    return data


def unpacked(path: Path, folder: Path) -> Path:
    if path.suffix != ".gz":
        return path
    target = folder / path.stem
    with gzip.open(path) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file)
    return target


@pytest.fixture
def export_file(tmp_path: Path) -> Path:
    """100 kernels of 10 µs, launched one by one by a thread with a name."""
    builder = TraceBuilder("2023.4")
    builder.gpu("NVIDIA H100 80GB HBM3")
    process = builder.process(4711, "python")
    thread = process.thread(4711, "worker")
    for i in range(100):
        at = 1_000_000 + 20_000 * i
        builder.api(at, at + 4_000, "cudaLaunchKernel", thread=thread, correlation=i + 1)
        builder.kernel(at + 5_000, at + 15_000, f"gemm_{i % 3}", process=process, correlation=i + 1)
    return builder.write(tmp_path / "trace.sqlite")


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.parent.name)
@pytest.mark.parametrize("kind", KINDS)
def test_a_simulated_run_gets_the_same_diagnosis(path: Path, kind: str, tmp_path: Path) -> None:
    other = columnar(path, tmp_path / "other", kind)
    assert_same_trace(read(path), read(other))
    assert said(analyze_file(other, Options())) == said(analyze_file(path, Options()))


@pytest.mark.parametrize("path", PUBLIC, ids=lambda p: p.name.split(".")[0])
def test_a_recorded_run_gives_the_same_trace_in_each_form(path: Path, tmp_path: Path) -> None:
    whole = unpacked(path, tmp_path)
    trace = read(whole)
    for kind in KINDS:
        assert_same_trace(trace, read(columnar(whole, tmp_path / kind, kind, batch_rows=1000)))


def test_what_nsys_itself_exports(tmp_path: Path) -> None:
    nsys = real_nsys("2023.4")
    report = record(nsys, tmp_path)
    trace = read(export(nsys, report, "sqlite", tmp_path / "x.sqlite"))
    assert trace.os_calls is not None and len(trace.os_calls) > 20
    for kind in KINDS:
        other = export(nsys, report, kind, tmp_path / kind)
        before = content(other) if other.is_dir() else other.read_bytes()
        assert_same_trace(trace, read(other))
        assert before == (content(other) if other.is_dir() else other.read_bytes())
    # This is why META_DATA_CAPTURE is left out of what these tests build.
    assert not list((tmp_path / "parquetdir").glob("META_DATA_CAPTURE*"))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_names_as_nsys_stores_them(kind: str, export_file: Path, tmp_path: Path) -> None:
    """Global ids may use all 64 bits, which SQLite shows as a negative number; names need not be UTF-8."""
    with closing(sqlite3.connect(export_file)) as database:
        # The part of the id that says which machine it is.
        machine = -(1 << 63)
        for table, column in (
            ("CUPTI_ACTIVITY_KIND_KERNEL", "globalPid"),
            ("CUPTI_ACTIVITY_KIND_RUNTIME", "globalTid"),
            ("ThreadNames", "globalTid"),
            ("PROCESSES", "globalPid"),
        ):
            database.execute(f"UPDATE {table} SET {column} = {column} | ?", (machine,))
        database.execute("UPDATE StringIds SET value = CAST(x'67656dff' AS TEXT) WHERE value = 'gemm_1'")
        database.commit()
    trace = read(columnar(export_file, tmp_path / kind, kind))
    assert_same_trace(read(export_file), trace)
    assert [p.pid for p in trace.processes] == [4711] and trace.processes[0].name == "python"
    assert trace.threads[0].name == "worker"
    assert "gem\N{REPLACEMENT CHARACTER}" in trace.strings


def test_a_table_in_many_pieces_is_one(export_file: Path, tmp_path: Path) -> None:
    for kind in KINDS:
        assert_same_trace(read(export_file), read(columnar(export_file, tmp_path / kind, kind, batch_rows=7)))


# --- which folder is what --------------------------------------------------------------------------------------------


def test_a_folder_is_told_by_its_tables(export_file: Path, tmp_path: Path) -> None:
    assert is_nsys_directory(columnar(export_file, tmp_path / "p", "parquetdir"))
    assert is_nsys_directory(columnar(export_file, tmp_path / "a", "arrowdir"))
    assert not is_nsys_directory(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "prices.parquet").write_bytes(b"PAR1")
    assert not is_nsys_directory(tmp_path / "mine")


def test_the_trace_is_named_after_the_folder(
    export_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = columnar(export_file, tmp_path / "run_pqtdir", "parquetdir")
    assert read(folder).provenance.inputs == ["run_pqtdir"]
    monkeypatch.chdir(folder)
    assert read(Path(".")).provenance.inputs == ["run_pqtdir"]


def test_one_table_alone_is_no_export(export_file: Path, tmp_path: Path) -> None:
    """It would read as a trace in which nothing ran on a GPU."""
    folder = columnar(export_file, tmp_path / "a", "arrowdir")
    with pytest.raises(InfprofError, match="name the folder"):
        read(folder / "StringIds.arrow")


def test_without_pyarrow_one_sentence_says_what_to_install(
    export_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [columnar(export_file, tmp_path / kind, kind) for kind in KINDS]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for path in inputs:
        with pytest.raises(InfprofError) as caught:
            read(path)
        assert str(caught.value).endswith("pip install 'infprof[arrow]'.")
        assert caught.value.exit_code == 3


# --- damage ----------------------------------------------------------------------------------------------------------


def cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_kernel_table_that_is_cut_off_is_no_idle_gpu(share: float, export_file: Path, tmp_path: Path) -> None:
    folder = columnar(export_file, tmp_path / "p", "parquetdir")
    cut(folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet", share)
    done = infprof("analyze", str(folder))
    assert done.returncode == 3 and done.stdout == ""
    assert "CUPTI_ACTIVITY_KIND_KERNEL" in done.stderr and "Export the report again" in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_comes_before_the_cut_of_an_arrow_table_is_read(export_file: Path, tmp_path: Path) -> None:
    folder = columnar(export_file, tmp_path / "a", "arrowdir", batch_rows=10)
    cut(folder / "CUPTI_ACTIVITY_KIND_KERNEL.arrow", 0.6)
    diagnosis = analyze_file(folder, Options())
    count = sum(d.kernels.count for d in diagnosis.devices)
    assert 30 <= count < 70 and count % 10 == 0
    assert (
        f"CUPTI_ACTIVITY_KIND_KERNEL could be read only up to row {count}"
        in problem(diagnosis, "damaged-table").message
    )


def test_a_cut_between_two_batches_is_seen(export_file: Path, tmp_path: Path) -> None:
    """The bytes that are there are all valid: only the mark of the end is missing."""
    folder = columnar(export_file, tmp_path / "a", "arrowdir")
    path = folder / "CUPTI_ACTIVITY_KIND_RUNTIME.arrow"
    path.write_bytes(path.read_bytes()[:-8])
    trace = read(folder)
    assert trace.api_calls is not None and len(trace.api_calls) == 100
    assert "damaged-table" in {p.code for p in trace.problems}


def test_a_table_that_nothing_hangs_on_may_be_damaged(export_file: Path, tmp_path: Path) -> None:
    folder = columnar(export_file, tmp_path / "p", "parquetdir")
    cut(folder / "ThreadNames.parquet", 0.5)
    diagnosis = analyze_file(folder, Options())
    assert "ThreadNames" in problem(diagnosis, "damaged-table").message
    assert sum(d.kernels.count for d in diagnosis.devices) == 100


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_an_arrow_file_that_is_cut_off_says_so(share: float, export_file: Path, tmp_path: Path) -> None:
    path = columnar(export_file, tmp_path / "x.arrows", "arrow", batch_rows=10)
    cut(path, share)
    try:
        diagnosis = analyze_file(path, Options())
    except InfprofError as error:
        assert "damaged" in str(error)
    else:
        assert "cut-short" in problem_codes(diagnosis)


def test_a_folder_that_may_not_be_read(export_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not bind root, so the refusal is played."""
    folder = columnar(export_file, tmp_path / "a", "arrowdir")

    def refuse(self: Path, *rest: Any, **more: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InfprofError, match="permission denied"):
        read(folder)
