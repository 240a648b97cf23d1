"""Measures ``infprof analyze`` beside ``nsys stats`` on the same export: CPU seconds and peak memory, alternating runs.

    python benchmarks/compare_with_nsys_stats.py FILE.sqlite
    python benchmarks/compare_with_nsys_stats.py --scale 1 2 4        # generated exports of 1, 2 and 4 million kernels

CPU seconds are user + system time of the command and of the processes it waited for, peak memory is the largest
resident set among them, both as the kernel reports them (wait4). Both commands read the export as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

COUNTED = [
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "NVTX_EVENTS",
    "GPU_METRICS",
]


class Run(NamedTuple):
    cpu_s: float
    wall_s: float
    peak_mb: float
    exit_code: int


def measure(command: list[str]) -> Run:
    """Run ``command`` with its output thrown away."""
    # Python keeps its bytecode, as it does for whoever installs a program.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    return Run(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss / 1024, process.returncode)


def compare(path: Path, commands: dict[str, list[str]], runs: int) -> dict[str, Any]:
    """Medians of each command on ``path`` over ``runs`` alternating runs, and their ratios to the first command."""
    result = compare_runs(path, commands, runs)
    result["input"]["rows"] = row_counts(path)
    return result


def compare_runs(path: Path, commands: dict[str, list[str]], runs: int) -> dict[str, Any]:
    """``compare`` for any kind of file."""
    read_once(path)
    taken: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            run = measure([*command, str(path)])
            if run.exit_code not in (0, 1):
                raise SystemExit(f"{name} ended with {run.exit_code} on {path}: {' '.join(command)} {path}")
            taken[name].append(run)
    medians = {
        name: {field: statistics.median(getattr(run, field) for run in taken[name]) for field in Run._fields[:3]}
        for name in commands
    }
    first = next(iter(medians.values()))
    return {
        "input": {"file": path.name, "mb": round(path.stat().st_size / 1e6, 1)},
        "runs": {name: [run._asdict() for run in all_runs] for name, all_runs in taken.items()},
        "median": medians,
        "ratio": {
            name: {field: values[field] / first[field] for field in ("cpu_s", "wall_s", "peak_mb")}
            for name, values in list(medians.items())[1:]
        },
    }


def read_once(path: Path) -> None:
    """Bring the file into the page cache, so that the first run pays no more than the others."""
    with path.open("rb") as file:
        while file.read(1 << 24):
            pass


def row_counts(path: Path) -> dict[str, int]:
    with sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True) as db:
        present = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        return {
            table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in COUNTED if table in present
        }


def machine() -> dict[str, Any]:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def infprof_command(*options: str) -> list[str]:
    """``infprof analyze`` of the interpreter that runs this script, whether or not its console script is on PATH."""
    return [sys.executable, "-c", "import sys; from infprof.cli import main; sys.exit(main())", "analyze", *options]


def show(result: dict[str, Any]) -> None:
    rows = ", ".join(f"{count:,} {table}" for table, count in result["input"]["rows"].items())
    print(f"{result['input']['file']}: {result['input']['mb']} MB, {rows}")
    print(f"  {'command':10} {'CPU s':>8} {'wall s':>8} {'peak MB':>9}")
    for name, values in result["median"].items():
        print(f"  {name:10} {values['cpu_s']:8.2f} {values['wall_s']:8.2f} {values['peak_mb']:9.0f}")
    for name, ratio in result["ratio"].items():
        print(f"  {name} / infprof: {ratio['cpu_s']:.2f} x CPU, {ratio['peak_mb']:.2f} x memory")


def generated(millions: float, folder: Path) -> Path:
    path = folder / f"generated-{millions:g}M.sqlite"
    script = Path(__file__).with_name("generate_nsys.py")
    subprocess.run([sys.executable, str(script), str(path), "--kernels", str(round(millions * 1e6))], check=True)
    return path


def scale(millions: list[float], commands: dict[str, list[str]], runs: int) -> list[dict[str, Any]]:
    """Compare on generated exports of each size; linear growth keeps the CPU seconds per million kernels level."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for size in millions:
            path = generated(size, Path(folder))
            result = compare(path, commands, runs)
            path.unlink()
            show(result)
            results.append(result | {"million_kernels": size})
    for name in commands:
        per_million = [result["median"][name]["cpu_s"] / result["million_kernels"] for result in results]
        growth = ", ".join(
            f"{s:.2f} s at {r['million_kernels']:g} M" for s, r in zip(per_million, results, strict=True)
        )
        print(f"{name}, CPU per million kernels: {growth}; last / first {per_million[-1] / per_million[0]:.2f}")
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare infprof analyze with nsys stats: CPU seconds, peak memory.")
    parser.add_argument("file", type=Path, nargs="?", help="an nsys .sqlite export")
    parser.add_argument("--scale", type=float, nargs="+", metavar="M", help="generate exports of M million kernels")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--nsys", default=shutil.which("nsys"), help="path of nsys; without one infprof runs alone")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything measured here")
    options = parser.parse_args(arguments)
    if (options.file is None) == (options.scale is None):
        parser.error("give a file, or --scale with sizes")
    commands = {"infprof": infprof_command("--window", "full", "--json")}
    if options.nsys:
        commands["nsys stats"] = [options.nsys, "stats"]
    if options.scale:
        results = scale(options.scale, commands, options.runs)
    else:
        results = [compare(options.file, commands, options.runs)]
        show(results[0])
    report = {"machine": machine(), "commands": commands, "results": results}
    print(f"machine: {report['machine']}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
