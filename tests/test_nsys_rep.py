"""Binary nsys reports: exported once, never believed when the export is not whole; and what to do without an nsys."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

import fake_nsys
from case_builders import infprof
from infprof.doctor import Machine
from infprof.errors import EXIT_UNUSABLE, InfprofError
from infprof.probes.nsys import CapturePlan, NsysBackend
from infprof.readers import read
from infprof.readers.export_cache import ExportCache, cache_folder
from infprof.readers.nsys_rep import NsysReportReader
from infprof.readers.report_export import read_report
from infprof.resources import sample_traces_dir
from infprof.trace import Trace
from nsys_reports import REAL, assert_same_trace, content, export, real_nsys, record

SAMPLE = sample_traces_dir() / "healthy" / "trace.sqlite"
OLD = fake_nsys.HEAD + b"\0 what an old report holds" + fake_nsys.TAIL
NEW = b"NVIDIA Tegra Profiler Report 2024@6@1@90-246160830190v0.\0 more" + fake_nsys.TAIL


class Bench:
    """A machine whose only nsys is a fake one, a cache, and a folder with reports."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.environ = {"PATH": "/bin", "INFPROF_CACHE_DIR": str(folder / "cache")}
        self.reports = folder / "reports"
        self.reports.mkdir()
        self.program: Path | None = None

    def nsys(self, version: str = "2023.4.4.54-234433681190v0", **settings: Any) -> None:
        settings.setdefault("export", str(SAMPLE))
        self.program = fake_nsys.install(self.root / "bin", version=version, **settings)

    def wrap(self, real: Path) -> None:
        """A real nsys as the machine's only one."""
        (self.root / "bin").mkdir()
        (self.root / "bin" / "nsys").write_text(f'#!/bin/sh\nexec "{real}" "$@"\n')
        (self.root / "bin" / "nsys").chmod(0o755)

    def report(self, name: str = "run.nsys-rep", data: bytes = OLD) -> Path:
        path = self.reports / name
        path.write_bytes(data)
        return path

    def read(self, path: Path, limit_s: float | None = None) -> Trace:
        return read_report(path, Machine(self.root, self.environ), self.environ, limit_s)

    def refused(self, path: Path, limit_s: float | None = None) -> str:
        """The one sentence of a refusal, after which nothing is in the cache and the folder is as before."""
        before = content(self.reports)
        with pytest.raises(InfprofError) as caught:
            self.read(path, limit_s)
        assert caught.value.exit_code == EXIT_UNUSABLE
        assert self.kept() == [] and content(self.reports) == before
        return str(caught.value)

    def exports(self) -> int:
        assert self.program is not None
        return sum(call[0] == "export" for call in fake_nsys.calls(self.program))

    def kept(self) -> list[Path]:
        """Everything in the cache, workspaces too."""
        folder = cache_folder(self.environ)
        return sorted(folder.iterdir()) if folder.is_dir() else []


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def processes_of(bench: Bench) -> list[psutil.Process]:
    """The fake nsys that still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(bench.root / "bin") in process.cmdline():
                found.append(process)
    return found


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", REAL)
def test_a_report_is_what_its_export_is(version: str, bench: Bench, tmp_path: Path) -> None:
    nsys = real_nsys(version)
    report = record(nsys, bench.reports)
    bench.wrap(nsys)
    whole = content(bench.reports)
    trace = bench.read(report)
    assert content(bench.reports) == whole
    assert_same_trace(read(export(nsys, report, "sqlite", tmp_path / "x.sqlite")), trace)
    assert trace.provenance.inputs == ["recorded.nsys-rep"]
    assert str(trace.provenance.capture["exported_by"]).startswith(f"nsys {version}")
    assert len(bench.kept()) == 1
    assert_same_trace(trace, bench.read(report))


@pytest.mark.parametrize("name", ["a.qdrep", "a.nsys-rep", "a.nsys-rep.qdrep", "-o.nsys-rep", "two words.rep", "a.bin"])
def test_every_name_that_nsys_gave_a_report(name: str, bench: Bench) -> None:
    """R-21, analyze."""
    bench.nsys()
    path = bench.report(name)
    assert NsysReportReader().sniff(path, OLD)
    trace = bench.read(path)
    assert trace.provenance.inputs == [name]
    assert_same_trace(read(SAMPLE), trace)


def test_the_name_counts_only_where_the_content_does_not_tell() -> None:
    reader = NsysReportReader()
    assert reader.sniff(Path("future.nsys-rep"), b"\x89NSYS3\0\0")
    assert not reader.sniff(Path("notes.nsys-rep"), b"Generated: x.nsys-rep")
    assert not reader.sniff(Path("video.mp4"), b"\0\0\0 ftyp")


def test_the_command_line_opens_a_report(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.nsys("2999.1.1.1")
    monkeypatch.setenv("PATH", f"{bench.root / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("INFPROF_CACHE_DIR", bench.environ["INFPROF_CACHE_DIR"])
    done = infprof("analyze", str(bench.report()))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("infprof: exporting run.nsys-rep")
    assert done.stdout.splitlines()[1:] == infprof("analyze", str(SAMPLE)).stdout.splitlines()[1:]


@pytest.mark.parametrize(
    ("version", "extension"), [("2021.3.3.2-b99c4d6", ".qdrep"), ("2024.6.1.90-246160830190v0", None)]
)
def test_run_finds_the_report_whatever_its_extension(
    version: str, extension: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """R-21, run."""
    (tmp_path / "reports").mkdir()
    (tmp_path / "spool").mkdir()
    settings = {} if extension is None else {"extension": extension}
    nsys = fake_nsys.install(tmp_path / "bin", version=version, **settings)
    environ = {**os.environ, "TMPDIR": str(tmp_path / "spool")}
    backend = NsysBackend(CapturePlan(tmp_path / "reports"), environ, None, nsys)
    try:
        backend.launch(["true"], environ)
        reports = backend.finish(60)
    finally:
        backend.close()
    assert [path.name for path in reports] == [f"capture{extension or '.nsys-rep'}"]
    assert "no-report" not in [note.code for note in backend.notes]


# --- R-27: a report of a newer nsys ------------------------------------------------------------------------------------

VERSION_ERROR = "Exportation error: Version number is invalid: 2024@6@1@90-246160830190v0"
IMPORT_ERROR = "Importation failed.\nUnexpected exception while reading events of an unknown kind"


@pytest.fixture(params=["says the version", "says import error", "writes nothing", "writes 0 bytes", "writes no table"])
def older_nsys(request: pytest.FixtureRequest, bench: Bench) -> Bench:
    variant, made = request.param, bench.root / "made.sqlite"
    if variant == "writes 0 bytes":
        made.touch()
    elif variant == "writes no table":
        with closing(sqlite3.connect(made)) as database:
            database.executescript("CREATE TABLE a (b); DROP TABLE a;")
    if variant.startswith("says"):
        bench.nsys("2022.4.2.1-df9881f", refuse={"export": VERSION_ERROR if "version" in variant else IMPORT_ERROR})
    else:
        bench.nsys("2022.4.2.1-df9881f", export="" if variant == "writes nothing" else str(made))
    return bench


def test_a_newer_report_is_said_to_be_one(older_nsys: Bench) -> None:
    """R-27. A later run with the right nsys must not find what this one left."""
    path = older_nsys.report(data=NEW)
    sentence = older_nsys.refused(path)
    assert sentence == (
        f"{path} is from nsys 2024.6.1, newer than the 2022.4.2.1 installed here: export it where it was made "
        "(`nsys export --type sqlite --output=./run.sqlite ./run.nsys-rep`), or install a newer nsys."
    )
    older_nsys.nsys("2024.6.1.90")
    assert_same_trace(read(SAMPLE), older_nsys.read(path))


def test_a_report_that_does_not_say_what_made_it_is_probably_newer(older_nsys: Bench) -> None:
    """R-27, where only the failure tells."""
    sentence = older_nsys.refused(older_nsys.report(data=OLD))
    assert "from a newer nsys than the 2022.4.2.1 installed here" in sentence
    assert "where it was made" in sentence and "\n" not in sentence


def test_the_real_old_nsys_on_a_newer_report(bench: Bench) -> None:
    """R-27, as nsys 2022.4 and 2023.4 do it."""
    bench.wrap(real_nsys("2022.4"))
    sentence = bench.refused(record(real_nsys("2023.4"), bench.reports))
    assert "is from nsys 2023.4.4, newer than the 2022.4.2.1 installed here" in sentence


# --- why there is no trace ---------------------------------------------------------------------------------------------


def test_without_nsys_the_sentence_says_what_to_run_and_where(bench: Bench) -> None:
    sentence = bench.refused(bench.report("two words.nsys-rep", NEW))
    assert "`nsys export --type sqlite '--output=./two words.sqlite' './two words.nsys-rep'`" in sentence
    assert "on the machine that recorded it, or on one with nsys 2024.6.1 or newer" in sentence


def test_an_nsys_that_does_not_run_is_none(bench: Bench) -> None:
    bench.nsys("unknown")
    assert "does not run" in bench.refused(bench.report())


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_a_report_that_is_cut_short(share: float, bench: Bench) -> None:
    nsys = real_nsys("2023.4")
    report = record(nsys, bench.reports)
    bench.wrap(nsys)
    data = report.read_bytes()
    report.write_bytes(data[: max(int(len(data) * share), 100)])
    assert "is cut short or no report of Nsight Systems" in bench.refused(report)


def test_a_cut_report_ends_the_command_line_with_3(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFPROF_CACHE_DIR", bench.environ["INFPROF_CACHE_DIR"])
    bench.nsys("2999.1.1.1", refuse={"export": "Exportation error: Section Table Reference magic number mismatch."})
    monkeypatch.setenv("PATH", f"{bench.root / 'bin'}{os.pathsep}{os.environ['PATH']}")
    done = infprof("analyze", str(bench.report(data=OLD[:-20])))
    assert (done.returncode, done.stdout) == (3, "")
    assert "cut short" in done.stderr and "Traceback" not in done.stderr


def test_a_full_disk_is_named(bench: Bench) -> None:
    bench.nsys(full=True)
    sentence = bench.refused(bench.report())
    assert "disk of the cache is full" in sentence and "INFPROF_CACHE_DIR" in sentence


def test_an_export_that_never_ends_is_ended(bench: Bench) -> None:
    bench.nsys(hang="export")
    before = time.monotonic()
    assert "was not exported by nsys 2023.4.4.54 within 1 s" in bench.refused(bench.report(), limit_s=1)
    assert time.monotonic() - before < 30
    assert processes_of(bench) == []


def test_an_interrupt_leaves_nothing_behind(bench: Bench) -> None:
    bench.nsys("2999.1.1.1", hang="export")
    path = f"{bench.root / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "infprof.cli", "analyze", str(bench.report())]
    process = subprocess.Popen(command, env={**os.environ, **bench.environ, "PATH": path}, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not bench.exports() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in error
    assert processes_of(bench) == [] and bench.kept() == []


# --- the cache ---------------------------------------------------------------------------------------------------------


def test_a_report_is_exported_once_wherever_it_lies(bench: Bench) -> None:
    bench.nsys()
    path = bench.report()
    bench.read(path)
    moved = path.rename(bench.reports / "moved.nsys-rep")
    os.utime(moved, (1, 1))
    assert bench.read(moved).provenance.inputs == ["moved.nsys-rep"]
    assert bench.exports() == 1


def test_another_report_under_the_same_name_is_exported(bench: Bench) -> None:
    """Same length, same time stamp: only the content differs."""
    bench.nsys()
    path = bench.report()
    os.utime(path, (1, 1))
    bench.read(path)
    path.write_bytes(OLD.replace(b"holds", b"HOLDS"))
    os.utime(path, (1, 1))
    bench.read(path)
    assert bench.exports() == 2


def test_another_nsys_exports_again(bench: Bench) -> None:
    bench.nsys("2023.4.4.54")
    path = bench.report()
    bench.read(path)
    bench.nsys("2024.6.1.90")
    assert bench.read(path).provenance.capture["exported_by"] == "nsys 2024.6.1.90"
    assert bench.exports() == 2


def test_a_kept_export_serves_without_nsys(bench: Bench) -> None:
    bench.nsys()
    path = bench.report()
    trace = bench.read(path)
    (bench.root / "bin" / "nsys").unlink()
    assert_same_trace(trace, bench.read(path))


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def overwritten(path: Path) -> None:
    """All pages but the first are noise."""
    data = path.read_bytes()
    path.write_bytes(data[:4096] + bytes(range(256)) * ((len(data) - 4096) // 256))


@pytest.mark.parametrize("damage", [halved, emptied, overwritten])
def test_a_kept_export_that_was_damaged_is_made_again(damage: Any, bench: Bench) -> None:
    bench.nsys()
    path = bench.report()
    bench.read(path)
    (kept,) = bench.kept()
    damage(kept)
    assert_same_trace(read(SAMPLE), bench.read(path))
    assert bench.exports() == 2
    assert kept.read_bytes() == SAMPLE.read_bytes()


def test_an_export_that_was_not_written_to_its_end_is_not_kept(bench: Bench) -> None:
    partial = bench.root / "partial.sqlite"
    partial.write_bytes(SAMPLE.read_bytes()[:-100])
    bench.nsys(export=str(partial))
    path = bench.report()
    for _ in range(2):
        assert {p.code for p in bench.read(path).problems} & {"cut-short", "damaged-table"}
    assert bench.kept() == [] and bench.exports() == 2


def test_only_the_owner_may_enter_the_cache(bench: Bench) -> None:
    """An export holds the environment of the recorded program."""
    bench.nsys()
    bench.read(bench.report())
    assert cache_folder(bench.environ).stat().st_mode & 0o077 == 0


def test_where_nothing_can_be_kept_it_is_read_all_the_same(bench: Bench) -> None:
    (bench.root / "cache").write_text("a file where the folder should be")
    bench.nsys()
    assert_same_trace(read(SAMPLE), bench.read(bench.report()))


def test_where_the_cache_is() -> None:
    assert cache_folder({"INFPROF_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c/nsys-exports")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/infprof/nsys-exports")
    at_home = Path.home() / ".cache" / "infprof" / "nsys-exports"
    assert cache_folder({}) == cache_folder({"XDG_CACHE_HOME": "relative"}) == at_home


def keep(cache: ExportCache, key: str, size: int, age_s: float) -> None:
    with cache.workspace() as folder:
        (folder / "x.sqlite").write_bytes(bytes(size))
        os.utime(folder / "x.sqlite", (time.time() - age_s,) * 2)
        cache.keep(folder / "x.sqlite", key, "1")


def names(cache: ExportCache) -> set[str]:
    return {path.name for path in cache.folder.iterdir()}


def test_the_export_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = ExportCache(tmp_path / "exports", max_exports=3)
    for key, age_s in (("a", 400), ("b", 300), ("c", 200)):
        keep(cache, key, 10, age_s)
    assert cache.find("a", "1") is not None  # used now
    keep(cache, "d", 10, 100)
    assert names(cache) == {"a-1.sqlite", "c-1.sqlite", "d-1.sqlite"}


def test_the_cache_takes_no_more_than_its_bytes(tmp_path: Path) -> None:
    cache = ExportCache(tmp_path / "exports", max_bytes=100)
    keep(cache, "a", 60, 300)
    keep(cache, "b", 30, 200)
    keep(cache, "c", 50, 100)
    assert names(cache) == {"b-1.sqlite", "c-1.sqlite"}
    keep(cache, "large", 500, 0)
    assert names(cache) == {"large-1.sqlite"}


def test_what_a_killed_program_left_is_removed(tmp_path: Path) -> None:
    cache = ExportCache(tmp_path / "exports")
    left = cache.folder / ".export-old"
    left.mkdir(parents=True)
    (left / "report.sqlite").touch()
    os.utime(left, (1, 1))
    with cache.workspace() as busy:
        keep(cache, "a", 10, 0)
        assert busy.is_dir() and not left.exists()
    assert names(cache) == {"a-1.sqlite"}
