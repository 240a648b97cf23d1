"""What ``infprof workload`` prints for people."""

from __future__ import annotations

import textwrap
from typing import Any

from infprof.workload.faults import FAULTS, Expectation
from infprof.workload.presets import PRESETS


def list_text(width: int) -> str:
    """Presets and faults: what each does, where it works, what must be found."""
    lines = ["Presets"]
    for name, preset in PRESETS.items():
        size = _size(preset.shape.parameters)
        lines.append(f"  {name:<14}{size:>8} parameters, context {preset.shape.context}: {preset.summary}")
    lines += ["", "Faults, and what a right diagnosis of a run on a GPU says"]
    for name, fault in FAULTS.items():
        where = f"GPU only: {fault.gpu_only}" if fault.gpu_only else "CPU and GPU"
        lines += _wrapped(f"  {name:<14}", fault.summary, width)
        lines += _wrapped(" " * 16 + "→ ", _expectation(fault.expected), width)
        lines += _wrapped(" " * 18, where, width)
    notes = (
        "These are expectations from how each fault works; no run on a GPU has confirmed them yet.",
        "A trace of a run on the CPU is unusable, code no-gpu-work, whatever the fault.",
    )
    lines += ["", *(line for note in notes for line in _wrapped("", note, width))]
    return "\n".join(lines) + "\n"


def _expectation(expected: Expectation) -> str:
    parts = ["class " + " or ".join(expected.classes)]
    if expected.causes:
        parts.append("cause " + " or ".join(expected.causes))
    if expected.findings:
        parts.append("finding " + " or ".join(expected.findings))
    if expected.note:
        parts.append(expected.note)
    return "; ".join(parts)


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 60),
        initial_indent=head,
        subsequent_indent=" " * (max(16, len(head)) if head else 0),
        break_on_hyphens=False,
    )


def result_text(result: dict[str, Any]) -> str:
    """The figures of a run, from ``RunResult.to_dict``."""
    steps = result["steps"]
    device = result["device_name"] or result["device"]
    rows = [
        ("workload", f"{result['preset']}, fault {result['fault']}, {result['dtype']} on {device}"),
        ("requests", f"{result['success_count']} of {result['request_count']} in {result['duration_ns'] / 1e9:.2f} s"),
        (
            "tokens",
            f"{result['prompt_tokens']} prompt ({result['computed_prompt_tokens']} computed), {result['output_tokens']} output",
        ),
        (
            "throughput",
            f"{result['output_tokens_per_s']:,.1f} output tokens/s, {result['requests_per_s']:.2f} requests/s",
        ),
        ("TTFT", _latency(result["ttft_ns"])),
        ("TPOT", _latency(result["tpot_ns"])),
        ("E2E", _latency(result["e2e_latency_ns"])),
        ("steps", f"{steps['prefill']} prefill, {steps['decode']} decode, {steps['mixed']} mixed"),
        ("graphs", f"{result['graph_replays']} replays"),
        (
            "KV cache",
            f"{result['kv_blocks']} blocks, at most {100 * result['kv_cache_usage_peak_ratio']:.0f} % in use, "
            f"{result['preemption_count']} preemptions",
        ),
        ("answers", f"sha256 {result['output_sha256'][:16]}"),
    ]
    return "".join(f"{name:<12}{text}\n" for name, text in rows)


def _latency(figures: dict[str, Any]) -> str:
    if not figures["count"]:
        return "not known: no request had enough tokens"
    return f"p50 {figures['p50'] / 1e6:.2f} ms, p95 {figures['p95'] / 1e6:.2f} ms, max {figures['max'] / 1e6:.2f} ms"


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"
