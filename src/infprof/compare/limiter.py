"""Whether what limits a run is another thing than before, in words."""

from __future__ import annotations

from typing import Any

from infprof.compare.model import MOVED, SAME, UNKNOWN, Limiter

# Classes of a busy GPU: "gpu-busy" is any of them, where the trace does not tell which.
_BUSY = ("compute-bound", "bandwidth-bound", "latency-bound", "balanced", "throttled", "gpu-busy")
_LIMITS = {
    "compute-bound": "compute",
    "bandwidth-bound": "memory bandwidth",
    "latency-bound": "kernels too small for the GPU",
    "balanced": "compute and memory bandwidth alike",
    "gpu-busy": "the GPU's kernels",
    "pcie-limited": "copies over PCIe",
    "communication-bound": "communication",
    "throttled": "throttled clocks",
    "no-demand": "lack of requests",
}
_IDLE = {
    "sync": "waits of the host for the GPU",
    "allocator": "the allocator",
    "unknown": "idle time of unknown cause",
    None: "idle time",
}
_UNSURE = 0.5


def limit_words(cls: str | None, cause: str | None) -> str | None:
    """What limits, as a sentence goes on after "limited by"; None where the class is not known."""
    from infprof.reports.labels import CAUSES

    if cls is None or cls == "unusable":
        return None
    words = CAUSES.get(cause or "", cause)
    if cls == "scheduling-bubble":
        return _IDLE.get(cause, words)
    base = _LIMITS.get(cls, cls)
    return f"{base} ({words})" if cause and cause != "unknown" else base


def compare_limiters(base: dict[str, Any] | None, head: dict[str, Any] | None) -> Limiter:
    """Two verdicts as the contract has them (``class``, ``cause``, ``confidence``); None = not judged."""
    b, h = base or {}, head or {}
    b_class, h_class, b_cause, h_cause = b.get("class"), h.get("class"), b.get("cause"), h.get("cause")
    was, now = limit_words(b_class, b_cause), limit_words(h_class, h_cause)
    status = same_limit(b_class, b_cause, h_class, h_cause)
    if was is None or now is None:
        missing = " and ".join(side for side, words in (("BASE", was), ("HEAD", now)) if words is None)
        sentence = f"what limits {missing} is not known"
    elif status == SAME:
        sentence = f"the limiter is the same ({now})"
    elif status == MOVED:
        sentence = f"the limiter moved from {was} to {now}"
    else:
        sentence = (
            f"whether the limiter moved is not known ({was}; {now}): one trace does not tell what limits its kernels"
        )
    known = [c for c in (b.get("confidence"), h.get("confidence")) if c is not None]
    if status == MOVED and known and min(known) < _UNSURE:
        sentence += ", with low confidence"
    return Limiter(was, now, b_class, b_cause, h_class, h_cause, status, sentence)


def same_limit(b_class: str | None, b_cause: str | None, h_class: str | None, h_cause: str | None) -> str:
    """same, moved, or unknown where one of the traces does not tell."""
    classes = (b_class, h_class)
    if None in classes or "unusable" in classes:
        return UNKNOWN
    if b_class != h_class:
        return UNKNOWN if "gpu-busy" in classes and set(classes) <= set(_BUSY) else MOVED
    if b_cause == h_cause:
        return SAME
    vague = (None, "unknown")
    return UNKNOWN if b_cause in vague or h_cause in vague else MOVED
