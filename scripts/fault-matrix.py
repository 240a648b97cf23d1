#!/usr/bin/env python3
"""Runs the reference workload with each fault under each recorder that works here, and checks every diagnosis.

    fault-matrix.py OUT [--limit SECONDS] [--preset NAME] [--cpu] [--faults A,B] [--backends A,B] [--nsys FILE]

Writes OUT/fault-matrix.txt (the table), OUT/fault-matrix.json, and per run OUT/BACKEND-FAULT/ with what infprof said, the
diagnosis, the manifest, and the trace where it is small. The most informative runs come first; what the time does not
suffice for is named at the end. ``--cpu`` is a dry run: every diagnosis must be unusable, code no-gpu-work.

Ends with 0 when all that was tried is right, with 1 when something is not, or nothing could be tried.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from infprof.errors import EXIT_COLLECTOR
from infprof.probes.backends import BACKENDS
from infprof.workload.checking import Check, check, expectation_without_gpu, table_text

INFPROF = [sys.executable, "-c", "import sys; from infprof.cli import main; sys.exit(main())"]
# In the order of what they tell; faults that are not here come after these.
MOST_INFORMATIVE = ("none", "sync", "launch", "pageable", "no-graphs", "host-sampling", "offload", "allocator", "fp32")
# Where a step takes a tenth of a second and more, few of them are enough.
OUTPUT_TOKENS = {"pageable": 12, "offload": 16, "allocator": 16, "long-context": 16}
RUN_LIMIT_S = 100.0
# A run is not begun with less time than it would need.
LEAST_S = 20.0
KEPT_BYTES = 4 << 20
UNTIL_DONE_S = 15.0


class Plan(NamedTuple):
    """What is run, and how long all of it may take. ``on_cpu``: a dry run."""

    out: Path
    preset: str
    on_cpu: bool
    end: float
    nsys: Path | None


def main() -> int:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(options.out, options.preset, options.cpu, time.monotonic() + options.limit, options.nsys)
    faults = chosen_faults(options.cpu, options.faults)
    backends = [name for name in BACKENDS if name not in ("auto", "none")]
    if options.backends:
        backends = [name for name in options.backends.split(",") if name]
    checks: list[Check] = []
    for row in results(plan, faults, backends):
        checks.append(row)
        # Written each time: what is there stays when the machine goes away.
        write(plan.out, checks)
        if row.outcome != "left out":
            print(f"{row.fault} under {row.backend}: {row.outcome}, {row.said} ({row.seconds:.0f} s)", flush=True)
    print(f"\n{table_text(checks)}", flush=True)
    tried = [row for row in checks if row.outcome != "left out"]
    return 0 if tried and all(row.outcome == "right" for row in tried) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for all of it")
    parser.add_argument("--preset", default="3b")
    parser.add_argument("--cpu", action="store_true", help="a dry run on the CPU")
    parser.add_argument("--nsys", type=Path, help="the nsys to record with")
    parser.add_argument("--faults", default="", help="these alone, by comma")
    parser.add_argument("--backends", default="", help="these alone, by comma")
    return parser.parse_args()


def chosen_faults(on_cpu: bool, wanted: str) -> dict[str, Mapping[str, Any]]:
    """Expectations by the name of the fault, in the order in which they are run."""
    done = subprocess.run([*INFPROF, "workload", "list", "--json"], stdout=subprocess.PIPE, check=True)
    rows = {row["name"]: row for row in json.loads(done.stdout)["faults"]}
    order = [*(name for name in MOST_INFORMATIVE if name in rows), *(n for n in rows if n not in MOST_INFORMATIVE)]
    if wanted:
        order = [name for name in order if name in wanted.split(",")]
    if on_cpu:
        return {name: expectation_without_gpu() for name in order if "cpu" in rows[name]["devices"]}
    return {name: rows[name]["expected"] for name in order}


def results(plan: Plan, faults: Mapping[str, Mapping[str, Any]], backends: Sequence[str]) -> Iterator[Check]:
    """Fault by fault under all recorders; one that cannot work here is tried once."""
    unusable: dict[str, str] = {}
    for fault, expected in faults.items():
        for backend in backends:
            left_s = plan.end - time.monotonic()
            if backend in unusable:
                yield Check(fault, backend, "left out", why=unusable[backend])
            elif left_s < LEAST_S:
                yield Check(fault, backend, "left out", why="the time was over")
            else:
                row = run(plan, fault, backend, expected, min(RUN_LIMIT_S, left_s))
                if row.outcome == "left out":
                    unusable[backend] = str(row.why)
                yield row


def run(plan: Plan, fault: str, backend: str, expected: Mapping[str, Any], limit_s: float) -> Check:
    """One run of the workload under one recorder, and what became of it."""
    folder = plan.out / f"{backend}-{fault}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    bundle = folder / "bundle"
    began = time.monotonic()
    with (folder / "out.txt").open("wb") as out, (folder / "err.txt").open("wb") as err:
        process = subprocess.Popen(
            command(plan, fault, backend, bundle), stdout=out, stderr=err, start_new_session=True
        )
        code = ended(process, limit_s)
    seconds = time.monotonic() - began
    diagnosis = read(bundle / "diagnosis.json")
    manifest = read(bundle / "manifest.json") or {}
    keep_small(bundle, folder)
    said = (folder / "err.txt").read_text(errors="replace").strip().splitlines()
    lost = [note["sentence"] for note in manifest.get("notes", [])] if code == EXIT_COLLECTOR else []
    if (not manifest and code not in (None, 0)) or (lost and plan.on_cpu):
        # Nothing was run, or it was run where there is nothing for this recorder: it cannot work here.
        return Check(fault, backend, "left out", why=(lost or said or [f"infprof ended with {code}"])[-1])
    row = check(fault, backend, diagnosis, expected)
    why = row.why
    if code is None:
        why = f"it was stopped after {limit_s:.0f} s"
    elif diagnosis is None:
        why = said[-1] if said else f"infprof ended with {code}"
    elif why is not None and lost:
        why = f"{why}; {' '.join(lost)}"
    elif code:
        row, why = replace(row, outcome="missed"), f"infprof ended with {code}"
    details = {"exit_code": code, "notes": manifest.get("notes", []), "backend": manifest.get("backend")}
    return replace(row, why=why, seconds=round(seconds, 1), details=details)


def command(plan: Plan, fault: str, backend: str, bundle: Path) -> list[str]:
    words = [*INFPROF, "run", "--backend", backend, "--probes", "nvml", "-o", str(bundle)]
    if backend == "nsys" and plan.nsys is not None:
        words += ["--nsys", str(plan.nsys)]
    if backend == "nsys" and not plan.on_cpu:
        # The workload marks the part after its warm-up; the others record it whole, from the first use of the GPU on.
        words += ["--capture", "cuda-profiler-api"]
    words += ["--", *INFPROF, "workload", "run", "--fault", fault, "--json"]
    if plan.on_cpu:
        return [*words, "--device", "cpu", "--preset", "tiny", "--requests", "4", "--prompt", "32", "--output", "8"]
    output = str(OUTPUT_TOKENS.get(fault, 32))
    return [*words, "--device", "cuda", "--preset", plan.preset, "--requests", "16", "--output", output]


def ended(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit code; None for one that had to be stopped: first so that it keeps what it has, then for good."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    family = psutil.Process(process.pid).children(recursive=True)
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        try:
            process.send_signal(number)
            process.wait(UNTIL_DONE_S)
            break
        except subprocess.TimeoutExpired:
            continue
    # What infprof was killed over would go on, and keep the GPU.
    for left in family:
        with contextlib.suppress(psutil.Error):
            left.kill()
    return None


def read(path: Path) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data


def keep_small(bundle: Path, folder: Path) -> None:
    """Of a bundle keep what is small; large traces are named with their sizes."""
    for path in sorted(bundle.rglob("*")):
        if path.is_file() and path.stat().st_size <= KEPT_BYTES:
            shutil.copyfile(path, folder / path.name)
        elif path.is_file():
            with (folder / "not-kept.txt").open("a") as file:
                file.write(f"{path.name}: {path.stat().st_size} bytes\n")
    shutil.rmtree(bundle, ignore_errors=True)


def write(out: Path, checks: Sequence[Check]) -> None:
    for name, text in (
        ("fault-matrix.json", json.dumps([row.to_dict() for row in checks], indent=2) + "\n"),
        ("fault-matrix.txt", table_text(checks)),
    ):
        partial = out / f".{name}.partial"
        partial.write_text(text)
        partial.replace(out / name)


if __name__ == "__main__":
    sys.exit(main())
