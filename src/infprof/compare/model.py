"""What a comparison holds: the JSON contract of ``infprof compare --json`` (``schema_version`` 1.x, additive changes only).

Differences are HEAD less BASE. Durations are ns; unknown numbers are None, never 0. A ``Change`` says "lower" or "higher"
only where the difference is larger than chance and than what two runs of one program differ by.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from infprof.results import plain

COMPARE_SCHEMA_VERSION = "1.0"

LOWER, HIGHER, SAME, UNKNOWN = "lower", "higher", "same", "unknown"
MOVED = "moved"


@dataclass
class Change:
    """A figure of both runs. ``low`` to ``high`` is the confidence interval of ``delta``, None where there is none.

    ``direction``: lower, higher, same (within the spread, or too small to matter) or unknown, and then ``reason`` says why.
    ``change_ratio`` is the delta over BASE.
    """

    base: float | None
    head: float | None
    delta: float | None = None
    change_ratio: float | None = None
    low: float | None = None
    high: float | None = None
    direction: str = UNKNOWN
    reason: str | None = None


@dataclass
class Limiter:
    """What limits each run. ``status``: same, moved, or unknown where a trace does not tell; ``sentence`` says it."""

    base: str | None
    head: str | None
    base_class: str | None
    base_cause: str | None
    head_class: str | None
    head_cause: str | None
    status: str
    sentence: str


@dataclass
class SliceChange:
    """A slice of time per step (of the window, where there are no steps), ns."""

    kind: str
    cause: str | None
    base_ns: float
    head_ns: float
    delta_ns: float


@dataclass
class PhaseChange:
    """A phase in both runs, or in one: then the figures of the other are None.

    ``name`` is that of BASE, or of HEAD where BASE lacks it. ``steps`` says whether the phase consists of steps; slices are
    per step then, and per window otherwise.
    """

    name: str
    kind: str
    in_base: bool
    in_head: bool
    steps: bool
    count: Change
    p50_ns: Change
    p95_ns: Change
    p99_ns: Change
    mean_ns: Change
    total_ns: Change
    kernels_per_step: Change
    launches_per_step: Change
    syncs_per_step: Change
    slices: list[SliceChange]
    limiter: Limiter | None


@dataclass
class KernelChange:
    """A kernel per step of ``phase`` (None = of all steps, or of the window without steps).

    ``what``: faster, slower, more-calls, fewer-calls, came, went, same, unknown. ``matched``: name, short-name (the template
    arguments differ), or None for what came or went.
    """

    name: str
    kernel_class: str
    phase: str | None
    matched: str | None
    what: str
    base_calls: float | None
    head_calls: float | None
    base_ns: float | None
    head_ns: float | None
    delta_ns: float
    base_call_ns: float | None
    head_call_ns: float | None
    # The change of all steps together, by which kernels are ranked.
    weight_ns: float = 0.0


@dataclass
class MeasureChange:
    name: str
    unit: str
    scope: str
    base: float | None
    head: float | None
    delta: float | None
    change_ratio: float | None


@dataclass
class FixCheck:
    """A cost that a fix takes away, per step (per window without steps): how much is left of it in HEAD.

    ``made``: more than half of it is gone, and the what-if promised a gain for that. ``place`` in BASE's chain from 1, None = not in it.
    """

    fix: str
    words: str
    unit: str
    base: float
    head: float
    left_ratio: float | None
    made: bool
    place: int | None


@dataclass
class Foretold:
    """Whether the what-if of BASE foretold HEAD.

    ``status``: foretold, less, more, nothing-made, no-prediction. Ratios are changes of the time per step (-0.3 = 30 % less):
    ``bound_ratio`` with the costs gone altogether, ``predicted_ratio`` with what is left of them in HEAD (None = only a
    stored diagnosis of BASE), ``measured_ratio`` what came of it. ``kernel_factor`` is HEAD's kernel time per step over
    BASE's, and ``with_kernels_ratio`` the prediction for the fixes and for that together.
    """

    status: str
    sentence: str
    fixes: list[FixCheck] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    bound_ratio: float | None = None
    predicted_ratio: float | None = None
    measured_ratio: float | None = None
    kernel_factor: float | None = None
    with_kernels_ratio: float | None = None
    next_verdict: str | None = None
    next_cause: str | None = None
    limiter_foretold: bool | None = None


@dataclass
class RunSummary:
    name: str
    tool: str
    gpus: list[str]
    window_ns: int
    window_how: str
    span_ns: int | None
    steps: int | None
    how_found: str | None
    verdict: str
    verdict_class: str
    verdict_cause: str | None
    sentence: str
    confidence: float
    stored: bool


@dataclass
class GateResult:
    """A ``--fail-on`` condition. ``holds`` None = could not be judged, and ``detail`` says why."""

    text: str
    holds: bool | None
    detail: str


@dataclass
class Comparison:
    """The whole answer. ``headline`` is the one sentence that says what happened."""

    headline: str
    base: RunSummary
    head: RunSummary
    limiter: Limiter
    window_ns: Change
    span_ns: Change
    phases: list[PhaseChange]
    steps: PhaseChange | None
    kernels: list[KernelChange]
    kernels_off: str | None
    measures: list[MeasureChange]
    foretold: Foretold
    tolerance_ratio: float
    notes: list[str] = field(default_factory=list)
    gates: list[GateResult] = field(default_factory=list)
    schema_version: str = COMPARE_SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, keys in a stable order, the version first."""
        data = plain(self)
        assert isinstance(data, dict)
        return {"schema_version": data.pop("schema_version"), **data}
