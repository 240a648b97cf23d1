"""What the host, network and serving probes cost, on a real target of 200 threads.

    python benchmarks/probe_overhead.py [--seconds 30] [--limit-ratio 0.01]

Starts a program with mostly sleeping and some working threads, runs the probes at their default rates, and prints the CPU
time of each as a share of one core: from each probe thread's own clock, and of the whole process from getrusage. Exit
status 1 above the limit.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from infprof.probes import Probe, ProbeContext, make_probe
from infprof.probes.recorder import Clock, TelemetryFile
from infprof.probes.runner import ProbeReport, ProbeRunner

PROBES = ("host", "network", "serving")
FLUSH_S = 1.0

# 200 threads as in a server: most wait for ever, some wake 20 times a second, two work in short bursts.
TARGET = """
import threading, time
def wake(period_s, loops):
    while True:
        time.sleep(period_s)
        sum(range(loops))
for _ in range(179):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
for _ in range(18):
    threading.Thread(target=wake, args=(0.05, 100), daemon=True).start()
for _ in range(2):
    threading.Thread(target=wake, args=(0.005, 20_000), daemon=True).start()
print("ready", flush=True)
time.sleep(3600)
"""


def made(names: tuple[str, ...]) -> list[Probe]:
    """The probes that this build has."""
    probes = []
    for name in names:
        try:
            probes.append(make_probe(name))
        except (ImportError, AttributeError) as error:
            print(f"{name}: left out ({error})")
    return probes


def cpu_seconds() -> float:
    """CPU time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(seconds: float, folder: Path, pid: int) -> tuple[list[ProbeReport], float, float]:
    """Run the probes for a time: their reports, the CPU seconds of this process, and the wall seconds."""
    file = TelemetryFile(folder / "telemetry.sqlite", Clock())
    runner = ProbeRunner(made(PROBES), file, ProbeContext(pid, command=[sys.executable]))
    cpu, wall, over = cpu_seconds(), time.monotonic(), threading.Event()
    runner.start()
    while time.monotonic() - wall < seconds:
        over.wait(FLUSH_S)
        file.flush()
    used = cpu_seconds() - cpu, time.monotonic() - wall
    runner.stop()
    file.close()
    return runner.reports, *used


def show(reports: list[ProbeReport], used_s: float, wall_s: float) -> float:
    """Print a line per task; returns the process's share of one core."""
    print(f"{'probe':<10} {'task':<12} {'beats':>5} {'CPU s':>8} {'% of a core':>12} {'longest ms':>11}")
    for report in reports:
        if report.state != "ok":
            print(f"{report.name:<10} {report.state}: {report.reason}")
        for task, stats in report.tasks.items():
            share, longest = 100 * stats["cpu_s"] / wall_s, 1e3 * stats["longest_s"]
            print(
                f"{report.name:<10} {task:<12} {stats['ticks']:>5} {stats['cpu_s']:>8.3f} {share:>12.3f} {longest:>11.2f}"
            )
    print(f"{'process':<10} {'(getrusage, with writing the file)':<18} {used_s:.3f} s = {100 * used_s / wall_s:.3f} %")
    return used_s / wall_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--limit-ratio", type=float, default=0.01, help="of one core")
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}, Python {platform.python_version()}"
    )
    print(f"python benchmarks/probe_overhead.py --seconds {options.seconds:g}; target: 200 threads, 20 of them active")
    with (
        subprocess.Popen([sys.executable, "-c", TARGET], stdout=subprocess.PIPE, text=True) as target,
        tempfile.TemporaryDirectory() as folder,
    ):
        try:
            assert target.stdout is not None and target.stdout.readline() == "ready\n"
            ratio = show(*measure(options.seconds, Path(folder), target.pid))
        finally:
            target.kill()
    print(f"{'ok' if ratio <= options.limit_ratio else 'TOO DEAR'}: limit {100 * options.limit_ratio:g} % of one core")
    return 0 if ratio <= options.limit_ratio else 1


if __name__ == "__main__":
    sys.exit(main())
