"""What the host, network and serving probes cost, on real targets of 200 threads: one serves metrics, one does not.

    python benchmarks/probe_overhead.py [--seconds 30] [--limit-ratio 0.01]

Starts a program with mostly sleeping and some working threads, runs the probes at their default rates, and prints the CPU
time of each as a share of one core: from each probe thread's own clock, and of the whole process from getrusage. The target
without metrics has a socket, so that the serving probe goes on looking for a server. Exit status 1 above the limit.
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

# 200 threads as in a server: most wait for ever, some wake 20 times a second, two work in short bursts. It serves metrics
# under vLLM's names, about as many and as long as vLLM's own (50 KB), of which the counters move at each read.
TARGET = """
import http.server, json, threading, time
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
HISTOGRAMS = ["time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
              "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
              "iteration_tokens_total", "request_prompt_tokens", "request_generation_tokens", "request_params_n"]
def metrics(n):
    label = 'engine="0",model_name="a-model-with-a-usual-name"'
    lines = []
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        lines += [f"# HELP vllm:{name} A gauge.", f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{label}}} {n % 7}"]
    for name in ("prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits"):
        lines += [f"# HELP vllm:{name}_total A counter.", f"# TYPE vllm:{name}_total counter",
                  f"vllm:{name}_total{{{label}}} {n * 100}"]
    for name in HISTOGRAMS:
        lines += [f"# HELP vllm:{name} A histogram.", f"# TYPE vllm:{name} histogram"]
        lines += [f'vllm:{name}_bucket{{{label},le="{bound}"}} {n * (bound + 1)}' for bound in range(22)]
        lines += [f'vllm:{name}_bucket{{{label},le="+Inf"}} {n * 30}', f"vllm:{name}_count{{{label}}} {n * 30}",
                  f"vllm:{name}_sum{{{label}}} {n * 3.5}"]
    for number in range(300):
        lines.append(f'http_requests_total{{handler="/v1/completions",method="POST",status="2xx",shard="{number}"}} {n}')
    return "\\n".join(lines) + "\\n"
class Server(http.server.BaseHTTPRequestHandler):
    reads = 0
    def do_GET(self):
        if self.path == "/metrics":
            Server.reads += 1
            body, kind = metrics(Server.reads), "text/plain"
        elif self.path == "/v1/models":
            body, kind = json.dumps({"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]}), "application/json"
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())
    def log_message(self, *words):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("ready", flush=True)
time.sleep(3600)
"""


_SERVING = TARGET.index("HISTOGRAMS = ")
TARGETS = {
    "serves metrics": TARGET,
    "has a socket and serves nothing": TARGET[:_SERVING]
    + 'import socket; unused = socket.socket()\nprint("ready", flush=True)\ntime.sleep(3600)\n',
}


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


def cost_on(source: str, seconds: float) -> float:
    """The share of one core on a target of this source, printed by task."""
    with (
        subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as target,
        tempfile.TemporaryDirectory() as folder,
    ):
        try:
            assert target.stdout is not None and target.stdout.readline() == "ready\n"
            return show(*measure(seconds, Path(folder), target.pid))
        finally:
            target.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--limit-ratio", type=float, default=0.01, help="of one core")
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}, Python {platform.python_version()}"
    )
    print(f"python benchmarks/probe_overhead.py --seconds {options.seconds:g}")
    ratio = 0.0
    for words, source in TARGETS.items():
        print(f"target: 200 threads, 20 of them active; it {words}")
        ratio = max(ratio, cost_on(source, options.seconds))
    print(f"{'ok' if ratio <= options.limit_ratio else 'TOO DEAR'}: limit {100 * options.limit_ratio:g} % of one core")
    return 0 if ratio <= options.limit_ratio else 1


if __name__ == "__main__":
    sys.exit(main())
