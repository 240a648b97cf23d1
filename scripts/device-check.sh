#!/usr/bin/env bash
# Checks infprof on a machine with an NVIDIA GPU: what doctor says there; whether a program of known shape, recorded with
# nsys, gets the diagnosis it must get; and whether each fault of the reference workload is found under each recorder
# that works there. For a checkout; ten minutes at most, the most informative steps first.
#
#   scripts/device-check.sh            results go to $OUT, default ./device-check-out
#   scripts/device-check.sh --dry-run  what can be tried without a GPU: the workload on the CPU, where every diagnosis
#                                      must be unusable, code no-gpu-work
#
#   NSYS=/path/to/nsys PYTHON=/path/to/python    what to use instead of what is found
#   LIMIT_S=570       for all of it                  PRESET=3b             size of the workload; by default what fits
#   FAULTS=none,sync  these faults alone             BACKENDS=nsys,torch   these recorders alone
#   INSTALL=0         installs nothing, whatever is missing; VENV is where it would go, default .venv/device
#
# Nothing is downloaded where a Python has all that is needed. Every step is tried, whatever the others did. Ends with 0
# when all worked, 1 when one failed, 4 when there is no GPU.
set -uo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
dry=
case "${1:-}" in
    "") ;;
    --dry-run) dry=1 ;;
    *)
        echo "device-check: there is only --dry-run; the rest is set by variables, see the head of $0." >&2
        exit 2
        ;;
esac
out=${OUT:-./device-check-out}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
limit_s=${LIMIT_S:-570}
venv=${VENV:-$root/.venv/device}
done_steps=0
failed_steps=0
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH}

say() { echo "device-check: $*" | tee -a "$out/summary.txt"; }
ok() {
    done_steps=$((done_steps + 1))
    say "ok: $*"
}
bad() {
    failed_steps=$((failed_steps + 1))
    say "failed: $*"
}
# has_time SECONDS WHAT: whether a step still fits; what does not is said, and is no failure.
has_time() {
    [ $((limit_s - SECONDS)) -ge "$1" ] && return
    say "left out, the time was over: $2"
    return 1
}
: >"$out/summary.txt"

# With the driver's own library alone; what there is to install, and whether, depends on it.
timeout 120 "${PYTHON:-python3}" "$here/cuda-probe.py" 20 >"$out/probe.json" 2>"$out/probe.err"
probed=$?
[ "$probed" = 0 ] || INSTALL=0

# What infprof imports to record and to diagnose, and what the workload needs besides.
needs='httpx jinja2 msgspec numpy psutil pynvml rich simpleeval typer yaml'
missing_in() {
    "$1" - "$2" 2>/dev/null <<'PYTHON' || echo "a Python 3.10 or newer that runs"
import importlib, sys
assert sys.version_info >= (3, 10)
missing = []
for name in sys.argv[1].split():
    try:
        importlib.import_module(name)
    except Exception:
        missing.append(name)
print(*missing)
PYTHON
}
# Whether a Python has a PyTorch that can use this machine's GPU; in a dry run any will do.
has_torch() {
    timeout 120 "$1" -c "import sys, torch; sys.exit(not (${dry:-0} or torch.cuda.is_available()))" >/dev/null 2>&1
}
candidates() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} "$root/.venv/bin/python" "$venv/bin/python" python3 python; do
        command -v "$candidate" >/dev/null && echo "$candidate"
    done
}
# A venv over a Python, whose packages it sees, with what that one lacks. Prints its Python, or nothing and why not.
install_over() {
    local base=$1
    shift
    [ "${INSTALL:-1}" = 1 ] || return
    "$base" -m venv --system-site-packages "$venv" >"$out/install.log" 2>&1 &&
        timeout 200 "$venv/bin/python" -m pip install --disable-pip-version-check --retries 1 "$@" \
            >>"$out/install.log" 2>&1 && echo "$venv/bin/python"
}
# The first Python that has all; else one with PyTorch, completed; else one that can at least diagnose.
find_python() {
    local candidate with_torch='' complete=''
    while read -r candidate; do
        if [ -z "$(missing_in "$candidate" "$needs")" ]; then
            [ -n "$complete" ] || complete=$candidate
            if has_torch "$candidate"; then
                echo "$candidate"
                return
            fi
        elif [ -z "$with_torch" ] && has_torch "$candidate"; then
            with_torch=$candidate
        fi
    done < <(candidates)
    if [ -n "$with_torch" ]; then install_over "$with_torch" "$root" && return; fi
    if [ -z "$with_torch" ]; then install_over "${complete:-python3}" "${root}[torch]" && return; fi
    echo "$complete"
}
python=$(find_python)
plain_python=${python:-python3}
infprof() { timeout --kill-after=10 120 "$python" -c 'import sys; from infprof.cli import main; sys.exit(main())' "$@"; }
has_workload=
if [ -z "$python" ]; then
    bad "no Python here has what infprof needs, python3 lacks: $(missing_in python3 "$needs")" \
        "(tail of install.log: $(tail -n 1 "$out/install.log" 2>/dev/null))"
elif has_torch "$python"; then
    has_workload=1
    say "using $python with PyTorch $("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null)"
elif [ "$probed" = 0 ]; then
    bad "no Python here has a PyTorch that can use the GPU, so the workload is left out: pip install 'infprof[torch]'" \
        "(tail of install.log: $(tail -n 1 "$out/install.log" 2>/dev/null))"
fi

if [ -n "$python" ]; then
    # Always exits with 0: it reports, it does not judge.
    if infprof doctor --json >"$out/doctor.json" 2>"$out/doctor.err"; then ok "doctor, see doctor.json"; else
        bad "doctor ended with $?: $(tail -n 1 "$out/doctor.err")"
    fi
    infprof doctor >"$out/doctor.txt" 2>&1 || true
fi
(nvidia-smi || true) >"$out/nvidia-smi.txt" 2>&1

# The newest nsys that can be found; Nsight Compute brings one too, which cannot always make a report.
find_nsys() {
    local candidate
    for candidate in ${NSYS:+"$NSYS"} "$(command -v nsys || true)" \
        /opt/nvidia/nsight-systems*/bin/nsys /opt/nvidia/nsight-systems*/*/bin/nsys /usr/local/cuda*/bin/nsys \
        /opt/nsys*/bin/nsys /opt/nvidia/nsight-compute/*/host/target-linux-*/nsys; do
        if [ -n "$candidate" ] && timeout 30 "$candidate" --version >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
}

# matrix SECONDS: the workload with each fault under each recorder, and the table of it.
matrix() {
    [ -n "$has_workload" ] || return
    local options=(--limit "$1" --preset "$preset" --faults "${FAULTS:-}" --backends "${BACKENDS:-}")
    [ -z "$dry" ] || options+=(--cpu)
    # Otherwise infprof takes the newest that it finds.
    [ -z "${NSYS:-}" ] || options+=(--nsys "$NSYS")
    if "$python" "$here/fault-matrix.py" "$out" "${options[@]}" 2>&1 | tee "$out/fault-matrix.log"; then
        ok "the workload's faults: $(tail -n 1 "$out/fault-matrix.txt")"
    else
        bad "the workload's faults: $(tail -n 1 "$out/fault-matrix.txt" 2>/dev/null || tail -n 1 "$out/fault-matrix.log")"
    fi
}
# The largest preset whose weights in float32 leave half of the memory free.
fitting_preset() {
    local mib
    mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
    if [ "${mib:-0}" -ge 30000 ] 2>/dev/null; then echo 3b; elif [ "${mib:-0}" -ge 9000 ] 2>/dev/null; then echo 1b; else echo small; fi
}
finish() {
    say "$done_steps steps worked, $failed_steps failed; everything is in $out"
    [ "$failed_steps" = 0 ]
    exit
}

nsys=$(find_nsys)
preset=${PRESET:-$(fitting_preset)}
if [ -n "$dry" ]; then
    matrix $((limit_s - SECONDS))
    finish
fi

case $probed in
    0) ok "CUDA program without a profiler: $(cat "$out/probe.json")" ;;
    4)
        say "$(cat "$out/probe.err")"
        say "There is no usable NVIDIA GPU on this machine, so nothing was recorded. Run this where there is one."
        exit 4
        ;;
    *) bad "CUDA program without a profiler: $(tail -n 1 "$out/probe.err")" ;;
esac

# record NAME OPTIONS…: the probe under nsys, its export, and the diagnosis of both.
record() {
    local name=$1
    shift
    rm -f "$out/$name".*
    # The sampling options are off because nsys 2022.4 can hang with them.
    timeout --kill-after=10 150 "$nsys" profile --trace=cuda,nvtx,osrt --sample=none --cpuctxsw=none "$@" \
        --force-overwrite=true --output="$out/$name" "$plain_python" "$here/cuda-probe.py" 200 \
        >"$out/$name.log" 2>&1
    local code=$?
    if [ ! -s "$out/$name.nsys-rep" ]; then
        bad "$name: nsys ended with $code and left no report: $(grep -iE 'error|fail|illegal|perm' "$out/$name.log" | head -n 1)"
        return
    fi
    ok "$name: recorded ($(du -h "$out/$name.nsys-rep" | cut -f 1), exit code $code)"
    if ! timeout --kill-after=10 120 "$nsys" export --type=sqlite --force-overwrite=true \
        --output="$out/$name.sqlite" "$out/$name.nsys-rep" >"$out/$name.export.log" 2>&1; then
        bad "$name: export: $(tail -n 1 "$out/$name.export.log")"
        return
    fi
    [ -n "$python" ] || return
    infprof analyze "$out/$name.sqlite" >"$out/$name.txt" 2>"$out/$name.err"
    code=$?
    # 3 says that the trace is unusable, which is an answer, but not the one that this program must get.
    if [ $code = 0 ]; then ok "$name: analyze"; else bad "$name: analyze ended with $code: $(tail -n 1 "$out/$name.err")"; fi
    head -n 24 "$out/$name.txt"
    infprof analyze --window full --json "$out/$name.sqlite" >"$out/$name.json" 2>>"$out/$name.err"
    check_counts "$name"
}

# The diagnosis of the whole recording must count what the program says it did.
check_counts() {
    local answer
    if answer=$("$python" - "$out/$1.json" "$out/$1.log" <<'PYTHON'
import json, sys
diagnosis = json.load(open(sys.argv[1]))
with open(sys.argv[2], errors="replace") as log:
    facts = next(json.loads(line[line.index("{"):]) for line in log if '"copies_each_way"' in line)
devices = diagnosis["devices"]
kernels = sum(d["kernels"]["count"] for d in devices)
copies = {c["kind"]: c["count"] for d in devices for c in d["copies"]}
exact = [sum(s["ns"] for s in d["slices"]) == diagnosis["window"]["duration_ns"] for d in devices]
verdict = diagnosis["verdict"]
print(f"verdict {verdict['class']}/{verdict['cause']}, rank {verdict['rank']}; kernels {kernels} of {facts['kernels']}; "
      f"copies {copies} of {facts['copies_each_way']} each way; slices add up: {bool(exact) and all(exact)}")
right = kernels == facts["kernels"] and all(copies.get(k, 0) >= facts["copies_each_way"] for k in ("h2d", "d2h"))
sys.exit(0 if right and exact and all(exact) else 1)
PYTHON
    ); then ok "$1: $answer"; else bad "$1: the counts are not the program's: $answer"; fi
}

if [ -z "$nsys" ]; then
    bad "no nsys here: nothing was recorded (set NSYS=/path/to/nsys)"
else
    say "using $("$nsys" --version 2>/dev/null | head -n 1) at $nsys"
    record plain
fi
# What follows it takes a minute and a half.
if has_time 120 "the workload's faults"; then matrix $((limit_s - SECONDS - 90)); fi
if [ -n "$nsys" ] && has_time 45 "counters of nsys"; then
    # Later releases spell the option with an s.
    metrics=$("$nsys" profile --help 2>/dev/null | grep -oE -- '--gpu-metrics-devices?=' | head -n 1)
    if [ -n "$metrics" ]; then record counters "${metrics}all"; else say "this nsys has no GPU metrics option"; fi
fi

# watch BACKEND: the probe under `infprof run`, for long enough that every probe has samples under load.
watch() {
    local bundle=$out/run-$1
    rm -rf "$bundle"
    local tool=()
    [ "$1" = none ] || tool=(--nsys "$nsys")
    infprof run --backend "$1" "${tool[@]}" -o "$bundle" -- "$plain_python" "$here/cuda-probe.py" 4000 \
        >"$out/run-$1.txt" 2>"$out/run-$1.err"
    local code=$?
    if [ $code = 0 ]; then ok "run --backend $1"; else
        bad "run --backend $1 ended with $code: $(tail -n 1 "$out/run-$1.err")"
    fi
    [ -s "$bundle/telemetry.sqlite" ] || return
    local answer
    if answer=$("$python" - "$bundle" 2>&1 >"$out/run-$1.signals.txt" <<'PYTHON'
import json, sys
from pathlib import Path
from infprof.telemetry import read_telemetry
bundle = Path(sys.argv[1])
telemetry = read_telemetry(bundle / "telemetry.sqlite")
for series in telemetry.all_series:
    if series.scope.startswith("gpu") and len(series.value):
        labels = " ".join(f"{k}={v}" for k, v in series.labels.items())
        low, mean, high = series.value.min(), series.value.mean(), series.value.max()
        print(f"{series.signal:36s} {labels:20s} {len(series.value):5d} samples {low:14.6g} {mean:14.6g} {high:14.6g}")
for fact in telemetry.all_facts:
    if fact.probe == "nvml":
        print(f"fact {fact.name} {fact.scope}: {fact.value}")
for row in telemetry.missing:
    if row.probe == "nvml":
        print(f"missing {row.signal} {row.scope}: {row.reason} ({row.code})")
probes = {p["name"]: p for p in json.load(open(bundle / "manifest.json"))["probes"]}
for probe in probes.values():
    for name, task in probe["tasks"].items():
        print(f"cost {probe['name']} {name}: {task['ticks']} ticks, {task['cpu_s']:.3f} CPU s, longest "
              f"{task['longest_s']:.3f} s, {task['errors']} errors {task.get('last_error', '')}")
signals = {s.signal for s in telemetry.all_series if s.probe == "nvml" and len(s.value)}
wanted = {"memory_used_bytes", "sm_clock_mhz", "temperature_celsius"}
nvml = probes.get("nvml", {})
print(f"nvml {nvml.get('state')}, {len(signals)} signals, {sum(r.probe == 'nvml' for r in telemetry.missing)} missing; "
      f"GPM {'yes' if any(s.startswith('gpm_') for s in signals) else 'no'}", file=sys.stderr)
failed = [t for t in nvml.get("tasks", {}).values() if t["errors"]]
sys.exit(0 if nvml.get("state") == "ok" and wanted <= signals and not failed else 1)
PYTHON
    ); then ok "run --backend $1: $answer"; else bad "run --backend $1: $answer"; fi
}

if [ -n "$python" ] && has_time 30 "infprof run without a timeline"; then watch none; fi
if [ -n "$python" ] && [ -n "$nsys" ] && has_time 45 "infprof run with nsys"; then watch nsys; fi
finish
