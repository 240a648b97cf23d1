"""``infprof workload run``: a number of requests through the engine, measured, with or without a fault."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infprof.errors import UsageError
from infprof.workload.faults import find_fault
from infprof.workload.planning import plan_requests, plan_settings
from infprof.workload.presets import PRESETS, ModelShape, Preset
from infprof.workload.requests import Request
from infprof.workload.settings import EngineSettings, RequestsSettings

if TYPE_CHECKING:
    from infprof.workload.engine import Engine, EngineStats

DTYPES = ("bfloat16", "float16", "float32", "float64")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class RunOptions:
    """What the command line asks for. ``trace_steps``: how many steps the trace holds, from the first measured one."""

    preset: str = "tiny"
    fault: str = "none"
    device: str = "auto"
    dtype: str | None = None
    requests: RequestsSettings = field(default_factory=RequestsSettings)
    max_batch: int = 32
    trace: Path | None = None
    trace_steps: int = 200
    force: bool = False


@dataclass
class RunResult:
    """What came of a run. ``traced_steps`` is None without a trace."""

    options: RunOptions
    settings: EngineSettings
    sent: RequestsSettings
    dtype: str
    device_name: str | None
    requests: list[Request]
    stats: EngineStats
    duration_ns: int
    traced_steps: int | None

    def to_dict(self) -> dict[str, Any]:
        """Counts, rates per second and percentiles in ns, ready for JSON; unknown is None.

        TTFT is from the request's arrival to its first token, E2E to its last; TPOT = (last - first) / (tokens - 1) of
        each request with two tokens or more. The throughput counts from the first arrival to the last token.
        """
        from infprof.quantiles import summary

        seconds = self.duration_ns / 1e9
        done = [request for request in self.requests if request.finish_reason in ("stop", "length")]
        stats = self.stats
        return {
            "preset": self.options.preset,
            "fault": self.options.fault,
            "device": self.settings.device,
            "device_name": self.device_name,
            "dtype": self.dtype,
            "seed": self.settings.seed,
            "max_batch": self.settings.max_batch,
            "prompt_tokens_mean_wanted": self.sent.prompt_tokens,
            "output_tokens_mean_wanted": self.sent.output_tokens,
            "request_count": len(self.requests),
            "success_count": len(done),
            "duration_ns": self.duration_ns,
            "prompt_tokens": stats.prompt_tokens,
            "computed_prompt_tokens": stats.computed_prompt_tokens,
            "output_tokens": stats.output_tokens,
            "requests_per_s": len(done) / seconds,
            "output_tokens_per_s": stats.output_tokens / seconds,
            "total_tokens_per_s": (stats.prompt_tokens + stats.output_tokens) / seconds,
            "ttft_ns": summary([r.token_times_ns[0] - r.arrived_ns for r in done]),
            "tpot_ns": summary([_tpot_ns(r) for r in done]),
            "e2e_latency_ns": summary([r.token_times_ns[-1] - r.arrived_ns for r in done]),
            "steps": {kind: stats.steps.get(kind, 0) for kind in ("prefill", "decode", "mixed")},
            "step_count": sum(stats.steps.values()),
            "graph_replays": stats.graph_replays,
            "preemption_count": stats.preemption_count,
            "kv_blocks": stats.kv_blocks,
            "kv_cache_usage_peak_ratio": stats.kv_cache_usage_peak_ratio,
            "output_sha256": _digest(self.requests),
            "trace": str(self.options.trace) if self.options.trace else None,
            "traced_steps": self.traced_steps,
        }


def _tpot_ns(request: Request) -> float | None:
    times = request.token_times_ns
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def _digest(requests: Sequence[Request]) -> str:
    """The same for the same tokens: tells whether two runs gave equal answers."""
    return hashlib.sha256(json.dumps([request.output for request in requests]).encode()).hexdigest()


def run_workload(options: RunOptions, on_event: Callable[[str], None] = lambda _: None) -> RunResult:
    """Build the model, warm up, send all requests and serve them to the end. ``on_event`` gets what happens, in words.

    Raises UsageError for what cannot be asked and without PyTorch, InfprofError where the device's memory is too small.
    """
    preset = _check(options)
    device = choose_device(options.device, options.fault)
    settings, sent = _settings(options, preset.shape, device)
    from infprof.workload.engine import Engine

    on_event(f"building {options.preset} ({preset.shape.parameters / 1e6:,.1f} M parameters) on {device}")
    engine = Engine(preset.shape, settings)
    on_event("warming up")
    engine.warm_up()
    on_event(f"serving {sent.count} requests, fault {options.fault}")
    with _steps(engine, options) as advance:
        requests = _send(engine, sent)
        start = requests[0].arrived_ns
        while engine.has_work():
            advance()
        end = max((r.token_times_ns[-1] for r in requests if r.token_times_ns), default=time.perf_counter_ns())
    traced = min(options.trace_steps, sum(engine.stats().steps.values())) if options.trace else None
    return RunResult(
        options, settings, sent, engine.dtype, _device_name(device), requests, engine.stats(), end - start, traced
    )


def _check(options: RunOptions) -> Preset:
    """Raises UsageError, before PyTorch is loaded, for what cannot be."""
    from infprof.reports.files import check_target

    preset = check_model(options.preset, options.fault, options.dtype, options.device)
    if options.trace is not None:
        if not options.trace.name.endswith((".json", ".json.gz")):
            raise UsageError(f"--trace writes JSON: name {options.trace} .json or .json.gz.")
        check_target(options.trace, options.force)
    return preset


def check_model(preset: str, fault: str, dtype: str | None, device: str) -> Preset:
    """The preset of this name. Raises UsageError for names that do not exist or do not go together."""
    if preset not in PRESETS:
        raise UsageError(f"There is no preset called {preset}. There are: {', '.join(PRESETS)}.")
    find_fault(fault)
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: choose {', '.join(DTYPES[:-1])} or {DTYPES[-1]}.")
    if device not in DEVICES:
        raise UsageError(f"--device {device}: choose auto, cpu or cuda.")
    if fault == "fp32" and dtype not in (None, "float32"):
        raise UsageError("--fault fp32 computes in float32: leave --dtype away.")
    return PRESETS[preset]


def choose_device(wanted: str, fault: str) -> str:
    """``cpu`` or ``cuda``. Raises UsageError without PyTorch, and where device or fault need a GPU that is not there."""
    torch = _torch()
    available = bool(torch.cuda.is_available())
    if wanted == "cuda" and not available:
        raise UsageError("--device cuda: PyTorch sees no GPU here. Use --device cpu, or run it on a machine with one.")
    device = "cuda" if available and wanted != "cpu" else "cpu"
    reason = find_fault(fault).gpu_only
    if device == "cpu" and reason is not None:
        raise UsageError(f"--fault {fault} needs a GPU: {reason}. See `infprof workload list`.")
    return device


def _torch() -> Any:
    """PyTorch. Raises UsageError where it is not installed."""
    try:
        import torch
    except ImportError:
        raise UsageError("The workload needs PyTorch: pip install 'infprof[torch]'.") from None
    return torch


def _settings(options: RunOptions, shape: ModelShape, device: str) -> tuple[EngineSettings, RequestsSettings]:
    sent = options.requests
    engine = {"device": device, "dtype": options.dtype, "seed": sent.seed, "max_batch": options.max_batch}
    return plan_settings(shape, options.preset, find_fault(options.fault), sent, engine)


def _send(engine: Engine, sent: RequestsSettings) -> list[Request]:
    """All requests at once."""
    plans = plan_requests(sent, engine.shape.vocabulary)
    return [engine.add_request(prompt, sampling) for prompt, sampling in plans]


@contextmanager
def _steps(engine: Engine, options: RunOptions) -> Iterator[Callable[[], None]]:
    """How to advance the engine while it is measured; the trace, or nsys' capture range, covers the block."""
    import torch

    if options.trace is None:
        on_gpu = engine.settings.device == "cuda"
        # What `infprof run --capture cuda-profiler-api` waits for.
        if on_gpu:
            torch.cuda.profiler.start()
        yield lambda: _ignore(engine.step())
        if on_gpu:
            torch.cuda.profiler.stop()
        return
    from infprof.workload.recording import StepRecorder

    recorder = StepRecorder(engine.settings.device, options.trace_steps)

    def advance() -> None:
        engine.step()
        recorder.step()

    recorder.start()
    try:
        yield advance
    finally:
        recorder.stop()
    recorder.save(options.trace, options.force)


def _ignore(_: object) -> None:
    pass


def _device_name(device: str) -> str | None:
    """The GPU's name; None on the CPU."""
    return str(_torch().cuda.get_device_name()) if device == "cuda" else None
