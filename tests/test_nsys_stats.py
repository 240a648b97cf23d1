"""The figures of `nsys stats`, to the nanosecond and the byte: NVIDIA's own reports over the same exports.

Needs nsys 2023.4, named by INFPROF_NSYS, installed as /opt/nsys23/bin/nsys, or on the PATH; nsys only ever sees copies,
because it may write beside what it reads.
"""

from __future__ import annotations

import csv
import gzip
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from case_builders import infprof, problem_codes
from conftest import SHARED
from infprof.diagnosis import Options, analyze_file
from infprof.measures import intervals as iv
from infprof.measures.host_calls import api_table
from infprof.measures.kernels import kernel_table
from infprof.measures.operations import Prepared
from infprof.readers import read
from infprof.resources import sample_traces_dir

REPORTS = ("cuda_gpu_kern_sum", "cuda_api_sum", "cuda_gpu_mem_time_sum", "cuda_gpu_mem_size_sum")
OLD_REPORTS = ("gpukernsum", "cudaapisum", "gpumemtimesum", "gpumemsizesum")
OPERATIONS = {
    "[CUDA memcpy Host-to-Device]": "h2d",
    "[CUDA memcpy Device-to-Host]": "d2h",
    "[CUDA memcpy Device-to-Device]": "d2d",
    "[CUDA memcpy Peer-to-Peer]": "p2p",
    "[CUDA memset]": "memset",
}
# An export of 2020 names its copy kinds nowhere: nsys's own scripts report no copies of it.
NO_COPY_KINDS = "rtx6000_old_schema_gpudb.sqlite"

EXPORTS = [
    *sorted((SHARED / "traces" / "nsys-sqlite").glob("*.sqlite.gz")),
    *sorted(sample_traces_dir().glob("*/trace.sqlite")),
]


@cache
def nsys(version: str) -> str | None:
    """The nsys of this version, e.g. "2023.4"."""
    usual = {"2023.4": "/opt/nsys23/bin/nsys", "2022.4": "/opt/nsys/bin/nsys"}[version]
    for candidate in (os.environ.get("INFPROF_NSYS"), usual, shutil.which("nsys")):
        if candidate and shutil.which(candidate):
            said = subprocess.run(
                [candidate, "--version"], capture_output=True, text=True, timeout=30, check=False
            ).stdout
            if f"version {version}" in said:
                return candidate
    return None


def needed(version: str) -> str:
    found = nsys(version)
    if found is None:
        pytest.skip(f"needs nsys {version}: name it in INFPROF_NSYS")
    return found


def name_of(path: Path) -> str:
    return f"{path.parent.name}.sqlite" if path.suffix == ".sqlite" else path.name.removesuffix(".gz")


def copy_of(path: Path, folder: Path) -> Path:
    target = folder / name_of(path)
    data = path.read_bytes()
    target.write_bytes(gzip.decompress(data) if path.suffix == ".gz" else data)
    return target


def stats(program: str, path: Path, reports: tuple[str, ...]) -> tuple[dict[str, list[dict[str, str]]], str]:
    """The rows of each report, none where it was skipped, and what nsys said."""
    base = path.with_name("stats")
    command = [
        program,
        "stats",
        "--report",
        ",".join(reports),
        "--format",
        "csv:mem=B",
        "--output",
        str(base),
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: dict[str, list[dict[str, str]]] = {}
    for report in reports:
        with base.with_name(f"stats_{report}.csv").open(encoding="utf-8", newline="") as file:
            rows[report] = list(csv.DictReader(line for line in file if line.strip()))
    return rows, done.stdout + done.stderr


def summed(rows: list[dict[str, str]], name: str, *figures: str) -> dict[str, tuple[int, ...]]:
    """Figures by name; rows of one name (kernels of several grids, calls of several versions) together."""
    out: dict[str, tuple[int, ...]] = {}
    for row in rows:
        values = tuple(int(row[f]) for f in figures)
        out[row[name]] = tuple(map(sum, zip(out.get(row[name], (0,) * len(values)), values, strict=True)))
    return out


@pytest.mark.parametrize("export", EXPORTS, ids=name_of)
def test_figures_equal_those_of_nsys_stats(export: Path, tmp_path: Path) -> None:
    compare_with_nsys_stats(export, tmp_path)


def compare_with_nsys_stats(export: Path, tmp_path: Path) -> None:
    """Kernels, calls and copies of an export, as ``nsys stats`` and as infprof sum them up."""
    theirs, said = stats(needed("2023.4"), copy_of(export, tmp_path), REPORTS)
    trace = read(export)
    prepared = Prepared(trace)
    diagnosis = analyze_file(export, Options(window="full"))
    assert not {c for c in problem_codes(diagnosis) if c.startswith(("null-", "zero-", "negative-", "absurd-"))}

    # Kernels, over all devices.
    kernels: Counter[str] = Counter()
    instances: Counter[str] = Counter()
    every = np.ones(len(prepared.operations), dtype=np.bool_)
    for device in range(len(trace.devices)):
        for row in kernel_table(prepared, every & (prepared.operations.device == device), device):
            kernels[row.name] += row.total_ns
            instances[row.name] += row.calls
    expected = summed(theirs["cuda_gpu_kern_sum"], "Name", "Total Time (ns)", "Instances")
    assert {name: (ns, instances[name]) for name, ns in kernels.items()} == expected
    assert sum(d.kernels.total_ns for d in diagnosis.devices) == sum(ns for ns, _ in expected.values())
    assert sum(d.kernels.count for d in diagnosis.devices) == sum(count for _, count in expected.values())

    # CUDA calls of the whole recording, which is longer than the span of GPU work.
    calls = trace.api_calls
    ours = {}
    if calls is not None and len(calls):
        whole = iv.single(int(calls["start"].min()), int(calls["end"].max()) + 1)
        ours = {row.name: (row.total_ns, row.calls) for row in api_table(prepared, whole, limit=10**9)}
    plain = [{**row, "Name": re.sub(r"_v\d+$", "", row["Name"])} for row in theirs["cuda_api_sum"]]
    assert ours == summed(plain, "Name", "Total Time (ns)", "Num Calls")

    # Copies and memsets.
    if name_of(export) == NO_COPY_KINDS:
        assert said.count("does not contain ENUM_CUDA_MEMCPY_OPER table") == 2
        assert sum(row.count for device in diagnosis.devices for row in device.copies) == 188 + 16
        return
    copies: dict[str, tuple[int, ...]] = {}
    for device in diagnosis.devices:
        for copy in device.copies:
            figures = (copy.total_ns, copy.count, copy.bytes)
            copies[copy.kind] = tuple(map(sum, zip(copies.get(copy.kind, (0, 0, 0)), figures, strict=True)))
    times = summed(theirs["cuda_gpu_mem_time_sum"], "Operation", "Total Time (ns)", "Count")
    sizes = summed(theirs["cuda_gpu_mem_size_sum"], "Operation", "Total (B)", "Count")
    assert {OPERATIONS[name]: (*figures, sizes[name][0]) for name, figures in times.items()} == copies


def test_no_kind_of_operation_is_missing_from_the_exports() -> None:
    """The comparison above says nothing of a kind that no export holds."""
    if not (SHARED / "traces").is_dir():
        pytest.skip("needs the shared traces, which a clone does not have")
    kinds = {c.kind for e in EXPORTS for d in analyze_file(e, Options(window="full")).devices for c in d.copies}
    assert kinds >= {"h2d", "d2h", "d2d", "memset"}


@pytest.mark.parametrize("export", EXPORTS, ids=name_of)
def test_the_older_nsys_opens_what_the_newer_one_opens(export: Path, tmp_path: Path) -> None:
    """Also the simulator's files: both versions must take them for their own exports."""
    rows, said = stats(needed("2022.4"), copy_of(export, tmp_path), OLD_REPORTS)
    assert "ERROR" not in said
    assert bool(rows["gpukernsum"]) == bool(len(read(export).kernels or ()))


@pytest.mark.parametrize("version", ["2022.4", "2023.4"])
def test_a_fresh_export_without_gpu_work_is_said_to_be_one(version: str, tmp_path: Path) -> None:
    program, report, export = needed(version), tmp_path / "fresh.nsys-rep", tmp_path / "fresh.sqlite"
    record = [program, "profile", "--trace=nvtx,osrt", "--sample=none", "--cpuctxsw=none", "-o", str(report)]
    recorded = subprocess.run([*record, sys.executable, "-c", "pass"], capture_output=True, timeout=60, check=False)
    if recorded.returncode or not report.exists():
        pytest.skip(f"nsys {version} cannot record here: {recorded.stderr[-200:]!r}")
    subprocess.run(
        [program, "export", "--type", "sqlite", "-o", str(export), str(report)],
        capture_output=True,
        timeout=60,
        check=True,
    )
    before = sorted(tmp_path.iterdir()), export.read_bytes()
    done = infprof("analyze", export)
    assert done.returncode == 3
    assert done.stdout.startswith("Unusable trace: no GPU work")
    assert done.stderr == "infprof: Nothing to diagnose: no operation ran on a GPU in this trace.\n"
    diagnosis = analyze_file(export)
    assert (diagnosis.verdict.cls, diagnosis.verdict.code) == ("unusable", "no-gpu-work")
    assert (diagnosis.provenance.tool_version or "").startswith(version)
    assert (sorted(tmp_path.iterdir()), export.read_bytes()) == before
    # What was read of it is what nsys itself reports, which passes over its own two marks.
    trace, of_calls = read(export), "osrtsum" if version == "2022.4" else "osrt_sum"
    theirs, _ = stats(program, export, (of_calls,))
    calls = trace.os_calls
    assert calls is not None
    ours: dict[str, tuple[int, int]] = {}
    for index, ns in zip(calls["name"].tolist(), (calls["end"] - calls["start"]).tolist(), strict=True):
        name = trace.strings[index]
        if not name.startswith("OS runtime libraries profiling"):
            total, count = ours.get(name, (0, 0))
            ours[name] = (total + ns, count + 1)
    assert ours == summed(theirs[of_calls], "Name", "Total Time (ns)", "Num Calls")
