"""The bottlenecks that the workload creates on purpose, and what a right diagnosis of each must say.

A fault is one entry of ``FAULTS``: changes to the settings, and the expectation. Expectations hold for runs on a GPU, in
the steady part of the trace; several classes or causes stand where the model's size or the evidence at hand decides.
On the CPU the same code runs, and the diagnosis of its trace is ``unusable``, code ``no-gpu-work``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from infprof.errors import UsageError
from infprof.workload.settings import EngineSettings, RequestsSettings

_BUSY = ("bandwidth-bound", "compute-bound", "balanced", "latency-bound", "gpu-busy")


@dataclass(frozen=True)
class Expectation:
    """What a diagnosis must say: one of the classes, with one of the causes where a cause is named, and at least one of
    the findings (rule ids) where any is. ``note`` says what else decides."""

    classes: tuple[str, ...]
    causes: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Fault:
    """``engine`` and ``requests`` change fields of the settings; ``adapt`` what depends on the other settings.

    ``gpu_only`` says why a fault needs a GPU; None = it runs on the CPU as well. ``same_tokens``: whether the requests and
    their greedy output are those of the healthy run.
    """

    summary: str
    expected: Expectation
    engine: Mapping[str, Any] = field(default_factory=dict)
    adapt: Callable[[EngineSettings, RequestsSettings], tuple[EngineSettings, RequestsSettings]] | None = None
    gpu_only: str | None = None
    same_tokens: bool = True

    def apply(self, engine: EngineSettings, requests: RequestsSettings) -> tuple[EngineSettings, RequestsSettings]:
        """The settings with the fault in them."""
        engine = replace(engine, **self.engine)
        return self.adapt(engine, requests) if self.adapt else (engine, requests)


def _long_context(engine: EngineSettings, requests: RequestsSettings) -> tuple[EngineSettings, RequestsSettings]:
    requests = replace(requests, prompt_tokens=16 * requests.prompt_tokens)
    return replace(engine, context=max(engine.context, requests.longest)), requests


def _kv_pressure(engine: EngineSettings, requests: RequestsSettings) -> tuple[EngineSettings, RequestsSettings]:
    together = min(engine.max_batch, requests.count)
    size = engine.block_size
    mean = requests.prompt_tokens + requests.output_tokens
    # All prompts of a batch about fit, their outputs do not: requests are admitted and thrown out again as they grow.
    wanted = together * -(-requests.prompt_tokens // size)
    least = -(-requests.longest // size) + 1
    most = max(least, together * -(-mean // size) * 3 // 4)
    return replace(engine, kv_blocks=min(max(wanted, least), most)), requests


FAULTS: dict[str, Fault] = {
    "none": Fault(
        "A healthy run: graphs for decode, one copy each way per step, sampling on the device.",
        Expectation(
            _BUSY,
            note="from preset 3b on; smaller ones leave a GPU waiting for the host's scheduling (scheduling-bubble)",
        ),
    ),
    "launch": Fault(
        "Each matrix product in 16 slices, without graphs: many short kernels per step.",
        Expectation(
            ("scheduling-bubble",),
            ("launch", "host-work"),
            ("launch-bound", "host-work-per-launch", "many-small-kernels"),
            "host-work where PyTorch's own time between two launches exceeds the launch calls",
        ),
        {"pieces": 16, "cuda_graphs": False},
    ),
    "no-graphs": Fault(
        "Decode launches its kernels one by one instead of replaying a CUDA graph.",
        Expectation(
            ("scheduling-bubble",),
            ("launch", "host-work"),
            ("launch-bound", "host-work-per-launch", "many-small-kernels"),
            "on presets up to 3b; with 7b and a large batch the GPU may stay busy",
        ),
        {"cuda_graphs": False},
        gpu_only="CUDA graphs exist only there",
    ),
    "sync": Fault(
        "Asks after every layer whether its values are finite, and waits for the answer.",
        Expectation(
            ("scheduling-bubble",),
            ("sync", "host-work"),
            ("sync-per-step", "host-work-per-launch", "host-work-between-steps"),
            "sync where the GPU's time per layer exceeds the host's: presets from 3b on, long prompts",
        ),
        {"check_layers": True, "cuda_graphs": False},
    ),
    "pageable": Fault(
        "Every fourth layer's weights come from pageable host memory for each use.",
        Expectation(("pcie-limited",), ("pageable",), ("pageable-copies",)),
        {"offload_every": 4, "offload_pinned": False, "cuda_graphs": False},
    ),
    "offload": Fault(
        "Every second layer's weights come from pinned host memory for each use, with nothing to hide the copies.",
        Expectation(("pcie-limited",), ("volume",), ("exposed-copies",)),
        {"offload_every": 2, "offload_pinned": True, "cuda_graphs": False},
    ),
    "fp32": Fault(
        "Weights, KV cache and arithmetic in float32, TF32 off.",
        Expectation(_BUSY, findings=("fp32-gemm",), note="from preset 1b on"),
        {"dtype": "float32"},
        gpu_only="on the CPU float32 is what runs anyway",
    ),
    "small-batch": Fault(
        "One request at a time, while the others wait.",
        Expectation(
            ("bandwidth-bound", "gpu-busy", "scheduling-bubble"),
            note="all weights are read for a single token per step; below 3b the host is the limit",
        ),
        {"max_batch": 1},
    ),
    "host-sampling": Fault(
        "Logits are copied to the host, and Python looks for the largest.",
        Expectation(("scheduling-bubble",), ("host-work", "sync"), ("host-work-between-steps", "sync-per-step")),
        {"host_sampling": True},
    ),
    "allocator": Fault(
        "Memory goes back to the driver after every layer, and is asked for again in the next.",
        Expectation(("scheduling-bubble",), ("allocator",), ("allocator-churn",)),
        {"empty_cache": True, "cuda_graphs": False},
        gpu_only="the caching allocator is the GPU's",
    ),
    "long-context": Fault(
        "Prompts sixteen times as long: attention takes most of the time.",
        Expectation(
            ("bandwidth-bound", "compute-bound", "balanced", "gpu-busy"),
            note="attention and the gathering of the KV cache lead the kernel table",
        ),
        adapt=_long_context,
        same_tokens=False,
    ),
    "kv-pressure": Fault(
        "A KV cache too small for the batch: requests are thrown out and computed again.",
        Expectation(
            (*_BUSY, "scheduling-bubble"),
            note="the finding is preemption or kv-cache-pressure, from a server's metrics; "
            "here preemption_count says it",
        ),
        adapt=_kv_pressure,
    ),
}


def find_fault(name: str) -> Fault:
    """The fault of this name. Raises UsageError for any other."""
    if name not in FAULTS:
        near = difflib.get_close_matches(name, FAULTS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(FAULTS)}."
        raise UsageError(f"There is no fault called {name}. {hint}")
    return FAULTS[name]


def describe_faults() -> list[dict[str, Any]]:
    """Every fault as plain data: name, summary, devices, what must be found."""
    return [
        {
            "name": name,
            "summary": fault.summary,
            "devices": ["gpu"] if fault.gpu_only else ["cpu", "gpu"],
            "gpu_only_because": fault.gpu_only,
            "expected": {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(fault.expected).items()},
        }
        for name, fault in FAULTS.items()
    ]
