"""What the tests of real cases share: short questions to a diagnosis, and the command line as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infprof.diagnosis import Options, analyze_file
from infprof.results import DeviceResult, Diagnosis, Finding, Problem
from infprof.simulator.builder import TraceBuilder

US, MS, S = 1_000, 1_000_000, 1_000_000_000


def diagnose(builder: TraceBuilder, folder: Path, window: str = "auto", range_name: str | None = None) -> Diagnosis:
    """Write the trace and diagnose it."""
    return analyze_file(builder.write(folder / "trace.sqlite"), Options(window=window, range_name=range_name))


def queued() -> tuple[TraceBuilder, Callable[[int, str], None]]:
    """A trace, and what adds a kernel (ns, name) to it behind the one before, launched well ahead."""
    b = TraceBuilder()
    b.gpu()
    gpu, host = S, S - 100 * MS

    def run(ns: int, name: str) -> None:
        nonlocal gpu, host
        b.launch(host, 4 * US, gpu, ns, name)
        host, gpu = host + 6 * US, gpu + ns + US

    return b, run


def slices(diagnosis: Diagnosis | DeviceResult) -> dict[tuple[str, str | None], int]:
    """Slice → ns, of a device or of the only device; what does not stand there took no time."""
    if isinstance(diagnosis, Diagnosis):
        assert len(diagnosis.devices) == 1
        device = diagnosis.devices[0]
        assert sum(s.ns for s in device.slices) == diagnosis.window.duration_ns
    else:
        device = diagnosis
    return {(s.kind, s.cause): s.ns for s in device.slices}


def idle(diagnosis: Diagnosis | DeviceResult, *causes: str) -> int:
    """Idle ns of these causes together, of all causes where none is named."""
    return sum(ns for (kind, c), ns in slices(diagnosis).items() if kind == "idle" and (not causes or c in causes))


def measure(diagnosis: Diagnosis, name: str, device: int | None = None) -> Any:
    """A measure's value; ``device`` where the trace has several."""
    scope = None if device is None else str(device)
    values = [m.value for m in diagnosis.measures if m.name == name and m.scope.id == scope]
    assert len(values) == 1, f"{name}: {values}"
    return values[0]


def rules(diagnosis: Diagnosis) -> list[str]:
    """The findings by rule, in the order of the report."""
    return [f.rule for f in diagnosis.findings]


def finding(diagnosis: Diagnosis, rule: str) -> Finding:
    found = [f for f in diagnosis.findings if f.rule == rule]
    assert len(found) == 1, f"no single finding {rule}: {rules(diagnosis)}"
    return found[0]


def evidence(found: Finding) -> dict[str, Any]:
    return {e.measure: e.value for e in found.evidence}


def claimed_ns(diagnosis: Diagnosis) -> int:
    """The time that all findings claim together."""
    return sum(f.cost.value or 0 for f in diagnosis.findings if f.cost.unit == "ns")


def problem(diagnosis: Diagnosis, code: str) -> Problem:
    found = [p for p in diagnosis.problems if p.code == code]
    assert len(found) == 1, f"no single problem {code}: {diagnosis.problems}"
    return found[0]


def problem_codes(diagnosis: Diagnosis) -> set[str]:
    return {p.code for p in diagnosis.problems}


def remedy_text(found: Finding) -> str:
    return " ".join(f"{r.change} {r.trade_off or ''}" for r in found.remedies)


def everything_said(diagnosis: Diagnosis) -> str:
    """All words of the diagnosis, for what must not be said anywhere."""
    return json.dumps(diagnosis.to_dict(), ensure_ascii=False)


def no_ratio_above_one(diagnosis: Diagnosis) -> bool:
    """Shares are shares; concurrency and the length of the host part relative to the GPU's are not."""
    free = ("kernel_concurrency", "host_to_gpu_ratio")
    shares = [m for m in diagnosis.measures if m.unit == "ratio" and m.name not in free and m.value is not None]
    return all(0 <= m.value <= 1 for m in shares if m.value is not None)


def infprof(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "infprof.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
