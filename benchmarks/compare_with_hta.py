"""Measures ``infprof analyze`` beside HolisticTraceAnalysis on one large trace of PyTorch's profiler, alternating runs.

    python benchmarks/compare_with_hta.py FILE.json[.gz] --hta-python VENV/bin/python
    python benchmarks/compare_with_hta.py --generate 3_000_000 --python-share 0 0.9 --hta-python VENV/bin/python

VENV has HolisticTraceAnalysis installed, best apart from infprof. HTA answers its usual questions in one process: it
loads the trace and breaks down kernels, idle time and time as a whole; infprof makes its whole diagnosis as JSON. CPU
seconds are user + system time, peak memory is the largest resident set, both as the kernel reports them (wait4).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from compare_with_nsys_stats import compare_runs, infprof_command, machine

HTA_QUESTIONS = """
import sys
from hta.trace_analysis import TraceAnalysis
trace = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="")
trace.get_gpu_kernel_breakdown(visualize=False)
trace.get_idle_time_breakdown(ranks=[0], visualize=False)
trace.get_temporal_breakdown(visualize=False)
"""


def show(result: dict[str, Any]) -> None:
    print(f"{result['input']['file']}: {result['input']['mb']} MB")
    print(f"  {'command':10} {'CPU s':>8} {'wall s':>8} {'peak MB':>9}")
    for name, values in result["median"].items():
        print(f"  {name:10} {values['cpu_s']:8.2f} {values['wall_s']:8.2f} {values['peak_mb']:9.0f}")
    for name, ratio in result["ratio"].items():
        print(
            f"  {name} / infprof: {ratio['wall_s']:.1f} x wall, {ratio['cpu_s']:.1f} x CPU, "
            f"{ratio['peak_mb']:.1f} x memory"
        )


def generated(events: int, python_share: float, folder: Path) -> Path:
    path = folder / f"generated-{events}-python-{python_share:g}.json"
    script = Path(__file__).with_name("generate_kineto.py")
    options = ["--events", str(events), "--python-share", str(python_share)]
    subprocess.run([sys.executable, str(script), str(path), *options], check=True)
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare infprof analyze with HolisticTraceAnalysis: time, memory.")
    parser.add_argument("file", type=Path, nargs="?", help="a trace of PyTorch's profiler")
    parser.add_argument("--generate", type=lambda text: int(text.replace("_", "")), metavar="EVENTS")
    parser.add_argument("--python-share", type=float, nargs="+", default=[0.0], help="for --generate: one trace each")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--hta-python", metavar="PYTHON", help="a Python that has HTA; without one infprof runs alone")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything measured here")
    options = parser.parse_args(arguments)
    if (options.file is None) == (options.generate is None):
        parser.error("give a file, or --generate with a number of events")
    commands = {"infprof": infprof_command("--json")}
    if options.hta_python:
        commands["HTA"] = [options.hta_python, "-c", HTA_QUESTIONS]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for share in options.python_share if options.file is None else [0.0]:
            path = options.file or generated(options.generate, share, Path(folder))
            results.append(compare_runs(path, commands, options.runs))
            show(results[-1])
            if options.file is None:
                path.unlink()
    report = {"machine": machine(), "commands": commands, "results": results}
    print(f"machine: {report['machine']}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
