"""What a trace was made of, as it shows itself: whose GPU, which serving engine; and which remedies fit that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from infprof.distinct import distinct_values
from infprof.flags import to_be_removed
from infprof.results import Diagnosis, Remedy
from infprof.trace import PYTORCH_PROFILER, Trace

_AMD = re.compile(r"\bAMD\b|\bRadeon\b|\bInstinct\b|^gfx\d", re.IGNORECASE)
_NVIDIA_TOOLS = re.compile(r"\bnsys\b|\bncu\b|\bnvidia-smi\b|--trace=cuda", re.IGNORECASE)
# Ranges that an engine opens around its steps, and operators that it registers under its own name.
_ENGINES = (
    ("sglang", re.compile(r"^(?:step\[|scheduler\.|sglang|sgl_kernel::)", re.IGNORECASE)),
    ("vllm", re.compile(r"^(?:execute_(?:\d+_)?(?:context|new)_|gpu_model_runner: |vllm::)")),
    ("tensorrt-llm", re.compile(r"^(?:trtllm::|tensorrt_llm|\[Executor\] _forward_step)")),
)
_ENGINE_NAMES = tuple(name for name, _ in _ENGINES)
# Where the provenance of a diagnosis keeps the engine.
ENGINE_KEY = "engine"


class Stack(NamedTuple):
    """``amd``: AMD's GPUs and not NVIDIA's. ``engine`` as remedies name it, None where the trace shows none.

    ``torch``: the trace is one of PyTorch's profiler. ``shapes``: it was recorded with the shapes of operators.
    """

    amd: bool
    engine: str | None
    torch: bool
    shapes: bool

    @property
    def names(self) -> list[str]:
        """The stacks of remedies that are surely in use, nearest to the user first; empty where none is known."""
        named = [self.engine] if self.engine is not None else []
        if named or self.torch:
            return [*named, "pytorch", "rocm" if self.amd else "cuda"]
        return []


def is_amd(trace: Trace) -> bool:
    """Whether the GPUs are AMD's, by their names, or where they have none by the runtime that the trace names."""
    return _are_amd([device.name for device in trace.devices], trace.provenance.capture)


def stack_of(diagnosis: Diagnosis) -> Stack:
    """The stack as the provenance of a diagnosis says it (its engine: ``ENGINE_KEY`` among the capture's facts)."""
    known = diagnosis.provenance
    amd = _are_amd([gpu.get("name") for gpu in known.gpus], known.capture)
    shapes = bool(known.capture.get("record_shapes"))
    return Stack(amd, known.capture.get(ENGINE_KEY), known.tool == PYTORCH_PROFILER, shapes)


def fit_remedies(diagnosis: Diagnosis) -> None:
    """Keep in the whole diagnosis the remedies that can be followed, those of its stack first."""
    stack = stack_of(diagnosis)
    flags = diagnosis.provenance.capture.get("flags", [])
    for finding in diagnosis.findings:
        finding.remedies = fitting(finding.remedies, stack)
        blamed = {flag: None for r in finding.remedies if (flag := to_be_removed(r.change, flags))}
        if blamed:
            finding.notes.insert(0, f"The command line has {', '.join(blamed)}, which a remedy below removes.")
            # What is surely there to be changed comes first.
            finding.remedies.sort(key=lambda r: to_be_removed(r.change, flags) is None)
        finding.commands = [] if stack.amd and finding.commands else finding.commands
    for verdict in (diagnosis.verdict, *(device.verdict for device in diagnosis.devices)):
        # No other recording makes an accelerator known.
        verdict.remedies = [] if verdict.code == "unsupported-device" else fitting(verdict.remedies, stack)


def fitting(remedies: Iterable[Remedy], stack: Stack) -> list[Remedy]:
    """The remedies that can be followed, those of the stack in use first.

    Left out: another vendor's tools, other engines where one is known, and shapes of operators that were recorded.
    """
    order = {name: place for place, name in enumerate(stack.names)}
    kept = [remedy for remedy in remedies if _can_follow(remedy, stack)]
    return sorted(kept, key=lambda remedy: order.get(remedy.stack, len(order)))


def _are_amd(names: list[str | None], capture: Mapping[str, object]) -> bool:
    named = [name for name in names if name]
    if named:
        return any(_AMD.search(name) for name in named)
    return "hip_runtime_version" in capture or "roctracer_version" in capture


def _can_follow(remedy: Remedy, stack: Stack) -> bool:
    if stack.engine is not None and remedy.stack != stack.engine and remedy.stack in _ENGINE_NAMES:
        return False
    if stack.shapes and "record_shapes=True" in remedy.change:
        return False
    if stack.amd:
        return remedy.stack != "tensorrt-llm" and _NVIDIA_TOOLS.search(remedy.change) is None
    return remedy.stack != "rocm"


def engine_of(trace: Trace) -> str | None:
    """The serving engine, by its own ranges and operators; None where the trace shows none."""
    if "vllm_version" in trace.provenance.capture:
        return "vllm"
    # Kernels alone prove little: engines use each other's.
    for table, column in ((trace.ranges, "text"), (trace.operators, "name")):
        if table is None:
            continue
        names = [trace.strings[i] for i in distinct_values(table[column]).tolist() if i >= 0]
        for engine, pattern in _ENGINES:
            if any(pattern.match(name) for name in names):
                return engine
    return None
