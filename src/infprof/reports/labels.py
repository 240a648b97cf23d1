"""Words and colours for the closed lists of the contract: classes, causes, slices, severities, evidence ranks.

One table serves all reports, so a slice has the same name and the same colour in the terminal, in the bar of the HTML
report, in its legend and in its timeline.
"""

from __future__ import annotations

from typing import NamedTuple

from infprof.results import Diagnosis, Verdict


class SliceStyle(NamedTuple):
    """How one slice is shown: ``label`` is short enough for a narrow column, ``meaning`` explains it."""

    label: str
    meaning: str
    color: str


SLICES: dict[tuple[str, str | None], SliceStyle] = {
    ("compute", None): SliceStyle("compute", "at least one kernel that computes is running", "#2f9b74"),
    ("exposed_communication", None): SliceStyle(
        "exposed communication", "only communication kernels are running", "#8a63d2"
    ),
    ("exposed_copy", "h2d"): SliceStyle("exposed copy to GPU", "only a host-to-device copy is running", "#d98a1f"),
    ("exposed_copy", "d2h"): SliceStyle("exposed copy to host", "only a device-to-host copy is running", "#b5651d"),
    ("exposed_copy", "uvm"): SliceStyle("exposed UVM paging", "only managed-memory migration is running", "#8a4b1a"),
    ("exposed_copy", "p2p"): SliceStyle("exposed copy GPU to GPU", "only a peer-to-peer copy is running", "#e0ad54"),
    ("exposed_copy", "d2d"): SliceStyle("exposed copy in GPU", "only a copy within the device is running", "#a98c4f"),
    ("exposed_copy", "memset"): SliceStyle("exposed memset", "only a memset is running", "#c2a878"),
    ("idle", "launch"): SliceStyle("idle: launch calls", "the host is inside launch calls", "#d1434f"),
    ("idle", "host-work"): SliceStyle("idle: host work", "the host works outside CUDA", "#ec7a8d"),
    ("idle", "sync"): SliceStyle("idle: after a sync", "the host waited for the GPU, then worked", "#a8326b"),
    ("idle", "lock"): SliceStyle("idle: lock or GIL", "the host thread is blocked on a peer thread", "#6f2a55"),
    ("idle", "allocator"): SliceStyle("idle: allocator", "the host is inside memory allocation calls", "#f2a286"),
    ("idle", "module-load"): SliceStyle("idle: loading code", "modules are loaded, compiled or tuned", "#3f79b5"),
    ("idle", "io"): SliceStyle("idle: I/O", "the host is blocked on files or peers", "#38a3c4"),
    ("idle", "cpu-contention"): SliceStyle("idle: CPU contention", "the host thread is ready but not run", "#7c8fdb"),
    ("idle", "dependency"): SliceStyle("idle: GPU dependency", "the operation is queued behind another", "#55698f"),
    ("idle", "kernel-gap"): SliceStyle("idle: kernel turn-around", "the hardware changes kernels", "#8fa0bb"),
    ("idle", "no-demand"): SliceStyle("idle: no demand", "there is nothing to do", "#a9b0ba"),
    ("idle", "profiler"): SliceStyle("idle: profiler", "the profiler itself takes the time", "#7f8a6a"),
    ("idle", "unknown"): SliceStyle("idle: cause unknown", "the trace does not tell the cause", "#6b6f76"),
    ("other", None): SliceStyle("other", "small slices together", "#5d6673"),
}

CLASSES: dict[str, str] = {
    "compute-bound": "Compute-bound",
    "bandwidth-bound": "Memory-bandwidth-bound",
    "latency-bound": "Latency-bound kernels",
    "balanced": "Balanced GPU use",
    "gpu-busy": "GPU busy, limiter unknown",
    "scheduling-bubble": "Scheduling bubble",
    "pcie-limited": "PCIe-limited",
    "communication-bound": "Communication-bound",
    "throttled": "Clocks throttled",
    "no-demand": "No demand",
    "unusable": "Unusable trace",
}

CAUSES: dict[str, str] = {
    "launch": "launch calls",
    "host-work": "host work",
    "sync": "synchronisation",
    "lock": "lock or GIL",
    "allocator": "allocator",
    "module-load": "loading code",
    "io": "I/O",
    "cpu-contention": "CPU contention",
    "dependency": "GPU dependency",
    "kernel-gap": "kernel turn-around",
    "no-demand": "no demand",
    "profiler": "the profiler",
    "unknown": "cause unknown",
    "pageable": "pageable memory",
    "small-copies": "small copies",
    "volume": "volume",
    "link-downgrade": "link downgrade",
    "straggler": "a straggling rank",
    "power": "power limit",
    "thermal": "temperature",
    "other": "other reason",
}

CODES: dict[str, str] = {
    "no-gpu-work": "no GPU work",
    "gpu-not-recorded": "GPU work was not recorded",
    "too-short": "too short",
    "only-startup": "only start-up",
    "damaged": "damaged",
    "unsupported-device": "device not supported",
}

# Scenario → what it looks at.
SCENARIOS: dict[str, str] = {
    "online": "TTFT, TPOT and their tail",
    "batch": "throughput and MFU",
    "mixed": "isolation of one kind of request from another",
}

# Who must act, and what kind of change it takes: ``approach`` of a rule.
APPROACHES: dict[str, str] = {
    "architecture": "a change of architecture",
    "algorithm": "another algorithm",
    "system": "a change of system or settings",
    "hardware": "a change of hardware",
}

STACKS: dict[str, str] = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tensorrt-llm": "TensorRT-LLM",
    "pytorch": "PyTorch",
    "cuda": "CUDA",
    "rocm": "ROCm",
}

RANKS: dict[str, str] = {
    "A": "measured by hardware counters",
    "B": "counted work",
    "C": "the timeline",
    "D": "kernel names (a hint)",
    "E": "NVML utilisation (a weak hint)",
}

SEVERITY_COLORS = {"critical": "#d1434f", "warning": "#c27c0e", "info": "#3f79b5"}

# Measures whose names, taken for words, would say something else or nothing; the others are their names.
MEASURE_WORDS: dict[str, str] = {
    "exposed_other_copy_ns": "exposed copies, not pageable",
    "exposed_other_copy_ratio": "exposed copies, not pageable",
    "few_sm_kernel_ns": "kernels on few SMs",
    "few_sm_kernel_ratio": "compute time in kernels on few SMs",
    "host_to_gpu_ratio": "host time over GPU time",
    "kernel_concurrency": "kernels at a time",
    "small_kernel_count": "kernels under 5 µs",
    "small_kernel_per_s": "kernels under 5 µs",
    "small_kernel_ratio": "kernels under 5 µs, by count",
    "small_kernel_time_ratio": "kernels under 5 µs, by time",
}

COPY_KINDS: dict[str, str] = {
    "h2d": "host to GPU",
    "d2h": "GPU to host",
    "d2d": "within GPU",
    "p2p": "GPU to GPU",
    "uvm": "managed memory",
    "memset": "memset",
}


def slice_style(kind: str, cause: str | None) -> SliceStyle:
    """The style of a slice; one that a later version adds is shown under its own name."""
    known = SLICES.get((kind, cause))
    if known is not None:
        return known
    words = kind.replace("_", " ")
    return SliceStyle(f"{words}: {cause}" if cause else words, "", SLICES["other", None].color)


def verdict_title(verdict: Verdict) -> str:
    """Class and cause (or code) as one heading: ``Scheduling bubble: launch calls``."""
    title = CLASSES.get(verdict.cls, verdict.cls)
    detail = CODES.get(verdict.code, verdict.code) if verdict.code else None
    if detail is None and verdict.cause:
        detail = CAUSES.get(verdict.cause, verdict.cause)
    return f"{title}: {detail}" if detail else title


def diagnosis_title(diagnosis: Diagnosis) -> str:
    """The heading of a whole diagnosis: its verdict, or that there is telemetry and nothing else."""
    if without_timeline(diagnosis) and diagnosis.verdict.cls == "unusable":
        return "No GPU timeline: telemetry only"
    return verdict_title(diagnosis.verdict)


def without_timeline(diagnosis: Diagnosis) -> bool:
    """Whether everything that is known comes from telemetry."""
    return diagnosis.has_telemetry and not diagnosis.devices


def second_title(second: str) -> str:
    """The class of the rest (``scheduling-bubble`` or ``scheduling-bubble/launch``) as a heading is written."""
    cls, _, cause = second.partition("/")
    title = CLASSES.get(cls, cls)
    return f"{title}: {CAUSES.get(cause, cause)}" if cause else title


def confidence_words(confidence: float) -> str:
    """``high (0.90)``: the word for the eye, the number for the record."""
    word = "high" if confidence >= 0.8 else "medium" if confidence >= 0.5 else "low"
    return f"{word} ({confidence:.2f})"


def rank_words(rank: str, telemetry_only: bool = False) -> str:
    """The evidence rank in words, with its letter: ``measured by hardware counters (rank A)``."""
    words = "telemetry" if telemetry_only and rank == "C" else RANKS.get(rank)
    return f"{words} (rank {rank})" if words else f"rank {rank}"


def findings_order(diagnosis: Diagnosis) -> str:
    """What the findings are ordered by."""
    if diagnosis.scenario is None:
        return "most time to win back first"
    goal = SCENARIOS.get(diagnosis.scenario)
    return f"ordered for {diagnosis.scenario}{f': {goal}' if goal else ''}"
