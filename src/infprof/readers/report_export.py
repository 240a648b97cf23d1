"""Exports a binary report through the newest nsys of the machine and reads the export; see nsys_rep.py."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from infprof import doctor
from infprof.doctor import Machine
from infprof.errors import InfprofError
from infprof.probes import Unavailable, nsys_messages
from infprof.probes.nsys import usable_nsys
from infprof.probes.nsys_command import Answer, export_sqlite
from infprof.progress import Progress
from infprof.readers.export_cache import ExportCache, cache_folder
from infprof.readers.nsys_rep import MAGIC, SUFFIXES
from infprof.readers.nsys_sqlite import NsysSqliteReader
from infprof.trace import Trace

# Reports of 2023 and later say what made them: "… Report 2023@4@4@54-234433681190v0".
_MADE_BY = re.compile(re.escape(MAGIC) + rb"(\d{4})@(\d+)@(\d+)")
_TOO_NEW = re.compile(
    r"(?i)version number is invalid|newer version|version[^\n]*(?:not supported|unsupported|mismatch)"
)
# An export takes this long at most: some minutes, and a second for this many bytes of report.
_LEAST_BYTES_PER_S = 1 << 20
_EXPORT_LIMIT_S = 600.0
# Problems of an export that was not written to its end.
_UNSOUND = frozenset({"cut-short", "damaged-table"})


def read_report(
    path: Path, machine: Machine | None = None, environ: Mapping[str, str] = os.environ, limit_s: float | None = None
) -> Trace:
    """A report as a Trace, from a kept export of it or from a fresh one, which is kept once it has been read whole.

    ``limit_s`` is the time that nsys may take, None = by the size of the report. Raises InfprofError where there is no
    nsys that can export it, or where it is damaged.
    """
    try:
        key = _digest(path)
    except OSError as error:
        raise InfprofError(f"{path} cannot be read: {error.strerror or error}.") from None
    cache = ExportCache(cache_folder(environ))
    try:
        nsys, version = usable_nsys(machine or Machine(environ=dict(environ)), None)
    except Unavailable as error:
        trace = _from_cache(cache, key, None)
        if trace is None:
            raise InfprofError(_without_nsys(path, error)) from None
        return _named(trace, path)
    number = doctor.version_text(version)
    trace = _from_cache(cache, key, number)
    if trace is None:
        limit_s = limit_s or _EXPORT_LIMIT_S + path.stat().st_size / _LEAST_BYTES_PER_S
        with cache.workspace() as folder:
            export = folder / "report.sqlite"
            trace = _exported(path, nsys, version, export, limit_s, environ)
            if _is_sound(trace):
                cache.keep(export, key, number)
    trace.provenance.capture["exported_by"] = f"nsys {number}"
    return _named(trace, path)


def _exported(
    path: Path, nsys: Path, version: tuple[int, ...], export: Path, limit_s: float, environ: Mapping[str, str]
) -> Trace:
    """The Trace of a fresh export. Raises InfprofError where there is none."""
    size = doctor.binary_size(path.stat().st_size)
    Progress().say(f"exporting {path.name} ({size}) with nsys {doctor.version_text(version)}")
    # Absolute: a name as "-o" would be an option of nsys.
    answer = export_sqlite(nsys, path.resolve(), export, limit_s, environ)
    trace = _of_export(export) if answer.code == 0 else None
    if trace is None:
        raise InfprofError(_why_not_exported(path, version, answer, export.parent, limit_s))
    return trace


def _digest(path: Path) -> str:
    """Names a report by its whole content: it may be moved or touched, and must not be taken for another one."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()[:32]


def _from_cache(cache: ExportCache, key: str, version: str | None) -> Trace | None:
    """The Trace of a kept export. One that is damaged, or goes away meanwhile, is none, and is removed."""
    export = cache.find(key, version)
    if export is None:
        return None
    trace = _of_export(export)
    if trace is not None and _is_sound(trace):
        return trace
    with suppress(OSError):
        export.unlink(missing_ok=True)
    return None


def _of_export(export: Path) -> Trace | None:
    """The Trace of an export; None where it is absent, empty, or nothing in it can be read."""
    with suppress(InfprofError):
        return NsysSqliteReader().read(export) if export.is_file() else None
    return None


def _is_sound(trace: Trace) -> bool:
    return not any(problem.code in _UNSOUND for problem in trace.problems)


def _named(trace: Trace, path: Path) -> Trace:
    """The user gave the report: the export is none of his files."""
    trace.provenance.inputs = [path.name.encode("utf-8", "replace").decode()]
    return trace


# --- why not ---------------------------------------------------------------------------------------------------------


def _made_by(path: Path) -> tuple[int, ...] | None:
    """The version of nsys that made a report, where it says so."""
    with path.open("rb") as file:
        match = _MADE_BY.match(file.read(128))
    return tuple(int(part) for part in match.groups()) if match else None


def _command(path: Path) -> str:
    """What exports a report, run beside it."""
    export = path.name
    while Path(export).suffix in SUFFIXES:
        export = Path(export).stem
    names = shlex.join([f"--output=./{export}.sqlite", f"./{path.name}"])
    return f"`nsys export --type sqlite {names}`"


def _without_nsys(path: Path, reason: Unavailable) -> str:
    made = _made_by(path)
    version = f" {doctor.version_text(made)}" if made else ""
    return (
        f"{path} is a binary report of Nsight Systems{version}, which only nsys can read, and here is none that can "
        f"({str(reason).rstrip('.')}): run {_command(path)} on the machine that recorded it, or on one with nsys"
        f"{version} or newer, and analyze the .sqlite file."
    )


def _why_not_exported(path: Path, version: tuple[int, ...], answer: Answer, folder: Path, limit_s: float) -> str:
    number = doctor.version_text(version)
    if answer.code is None:
        return f"{path} was not exported by nsys {number} within {limit_s:.0f} s: run {_command(path)} and analyze the .sqlite file."
    failure = nsys_messages.explain(answer.text)
    if failure.code == "disk-full":
        free = Machine().disk_space(folder)
        room = f" ({doctor.binary_size(free[1])} free)" if free else ""
        return (
            f"{path} could not be exported, the disk of the cache is full{room}: an export is several times larger than "
            "its report. Free space, or set INFPROF_CACHE_DIR to a folder on a larger disk."
        )
    words = failure.sentence.rstrip(".") if answer.code else "it wrote no export that can be read"
    made = _made_by(path)
    newer = made is not None and made > version[: len(made)]
    broken = failure.code == "report-broken" or not nsys_messages.is_whole_report(path)
    # An old report does not say what made it: nothing else is known to make nsys fail on a whole one.
    probably = made is None and not broken
    if newer or probably or _TOO_NEW.search(answer.text):
        which = f"nsys {doctor.version_text(made)}, newer than" if made and newer else "a newer nsys than"
        seems = (
            f"probably from {which} the {number} installed here ({words})"
            if probably
            else f"from {which} the {number} installed here"
        )
        return f"{path} is {seems}: export it where it was made ({_command(path)}), or install a newer nsys."
    if broken:
        return f"{path} is cut short or no report of Nsight Systems (nsys {number} cannot read it): copy it again, or record again."
    return f"{path} could not be exported by nsys {number} ({words}): run {_command(path)} where it was made, and analyze the .sqlite file."
