#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: what can infprof collect there? Installs into .venv, records a small GPU load with every
# probe and prints what was seen, what was missing and why, and the diagnosis.
# Usage: scripts/device-check.sh [FOLDER]    (results; default device-check-out)
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-device-check-out}
mkdir -p "$out"

step() { printf '\n== %s (after %d s)\n' "$*" "$SECONDS"; }

step "install"
[ -x .venv/bin/python ] || python3 -m venv .venv
.venv/bin/pip install -q -e '.[dev]'
PATH="$PWD/.venv/bin:$PATH"

step "machine"
nvidia-smi || echo "nvidia-smi does not run here"
infprof doctor | tee "$out/doctor.txt"

# A load that needs nothing but a compiler or PyTorch: matrix products and copies for half a minute.
step "load"
if command -v nvcc >/dev/null; then
    cat >"$out/load.cu" <<'CUDA'
#include <chrono>
#include <cstdio>
#include <vector>
__global__ void work(float *data, int n, int rounds) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = data[i];
    for (int r = 0; r < rounds; ++r) x = x * 1.000001f + 0.5f;
    data[i] = x;
}
int main() {
    const int n = 1 << 24;
    std::vector<float> host(n, 1.0f);
    float *device;
    if (cudaMalloc(&device, n * sizeof(float)) != cudaSuccess) { puts("no GPU memory"); return 1; }
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    puts("load is up"); fflush(stdout);
    while (std::chrono::steady_clock::now() < end) {
        cudaMemcpy(device, host.data(), n * sizeof(float), cudaMemcpyHostToDevice);
        for (int k = 0; k < 20; ++k) work<<<n / 256, 256>>>(device, n, 200);
        cudaDeviceSynchronize();
    }
    return 0;
}
CUDA
    nvcc -O2 -o "$out/load" "$out/load.cu"
    load=("$out/load")
elif python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    cat >"$out/load.py" <<'PY'
import time
import torch

a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
host = torch.randn(1 << 24)
print("load is up", flush=True)
end = time.monotonic() + 30
while time.monotonic() < end:
    host.cuda()
    for _ in range(50):
        a = torch.nn.functional.normalize(a @ a)
    torch.cuda.synchronize()
PY
    load=(python3 "$out/load.py")
else
    echo "Neither nvcc nor a PyTorch that sees a GPU: only the probes are tried, on an idle GPU."
    load=(sh -c 'echo load is up; sleep 30')
fi

for backend in none auto; do
    step "run --backend $backend"
    rm -rf "$out/run-$backend"
    code=0
    infprof run --backend "$backend" -o "$out/run-$backend" --ready-log "load is up" --warmup 3s --duration 10s \
        -- "${load[@]}" | tee "$out/run-$backend.txt" || code=$?
    echo "exit code $code"
done

step "what the probes recorded"
.venv/bin/python - "$out/run-none/telemetry.sqlite" <<'PY' | tee "$out/telemetry.txt"
import sys
from pathlib import Path

from infprof.telemetry import read_telemetry

telemetry = read_telemetry(Path(sys.argv[1]))
for series in telemetry.all_series:
    if series.scope.startswith("gpu") and len(series.value):
        labels = " ".join(f"{k}={v}" for k, v in series.labels.items())
        low, mean, high = series.value.min(), series.value.mean(), series.value.max()
        print(f"{series.signal:36s} {labels:24s} {len(series.value):5d} samples {low:14.6g} {mean:14.6g} {high:14.6g}")
for row in telemetry.missing:
    if row.probe in ("nvml", "amd"):
        print(f"missing {row.signal}: {row.reason} ({row.code})")
for event in telemetry.all_events:
    if event.probe == "nvml":
        print(f"event {event.kind}: {event.text}")
PY

step "what the probes cost"
.venv/bin/python - "$out/run-none/manifest.json" <<'PY'
import json
import sys

for probe in json.load(open(sys.argv[1]))["probes"]:
    print(probe["name"], probe["state"], probe["reason"] or "")
    for name, task in probe["tasks"].items():
        print(f"   {name:12s} {task['ticks']:5d} ticks {task['cpu_s']:8.3f} CPU s, longest {task['longest_s']:.3f} s, {task['errors']} errors")
PY
step "done"
