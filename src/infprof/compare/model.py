"""What a comparison holds: the JSON contract of ``infprof compare --json`` (``schema_version`` 1.x, additive changes only).

Differences are HEAD less BASE. Durations are ns; unknown numbers are None, never 0. A ``Change`` says "lower" or "higher"
only where the difference is larger than chance and than what two runs of one program differ by.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from infprof.results import plain

COMPARE_SCHEMA_VERSION = "1.1"

LOWER, HIGHER, SAME, UNKNOWN = "lower", "higher", "same", "unknown"
MOVED = "moved"


@dataclass
class Change:
    """A figure of both runs. ``low`` to ``high`` is the confidence interval of ``delta``, None where there is none.

    ``direction``: lower, higher, same (within the spread, or too small to matter) or unknown, and then ``reason`` says why.
    ``change_ratio`` is the delta over BASE. Of several runs, base and head are medians over the runs, and ``p_value`` is that
    of the rank test between them.
    """

    base: float | None
    head: float | None
    delta: float | None = None
    change_ratio: float | None = None
    low: float | None = None
    high: float | None = None
    direction: str = UNKNOWN
    reason: str | None = None
    p_value: float | None = None


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
class CopyChange:
    """Copies of one kind (h2d, d2h, d2d, p2p, uvm) per step: how many, and their bytes (None = not known)."""

    kind: str
    base_count: float
    head_count: float
    base_bytes: float | None
    head_bytes: float | None


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
    # None where a side is a stored diagnosis, which does not know the copies of a step.
    copies: list[CopyChange] | None = None


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
class FamilyTime:
    """Kernels of one family (a library, or a format such as marlin or awq), ns per step."""

    family: str
    ns: float


@dataclass
class Replaced:
    """Kernels of a class that came and others that went, per step of ``phase``: the ones may do the work of the others."""

    kernel_class: str
    phase: str | None
    base: list[FamilyTime]
    head: list[FamilyTime]
    base_ns: float
    head_ns: float
    delta_ns: float


@dataclass
class FlagChange:
    """An option of the command line that differs, as each run has it; None = that run has it not (or was not recorded,
    and then ``known`` is False)."""

    option: str
    base: str | None
    head: str | None
    known: bool = True


@dataclass
class Cause:
    """What probably made the difference: ``code`` (flag, model-on-host), its name, what points to it, what to change."""

    code: str
    title: str
    sentence: str
    remedies: list[str]


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
class RunPhase:
    name: str
    p50_ns: float | None
    p95_ns: float | None
    p99_ns: float | None
    mean_ns: float | None


@dataclass
class RunFigures:
    """One run of a side. ``chosen``: the median run, whose slices and kernels are compared."""

    side: str
    name: str
    chosen: bool
    window_ns: int
    verdict: str
    phases: list[RunPhase]


@dataclass
class Modes:
    """Two modes into which the runs fall, by the median step of a phase: their medians, and how many runs of each side
    are in the lower and in the upper one."""

    phase: str
    low_ns: float
    high_ns: float
    base: list[int]
    head: list[int]


@dataclass
class GateResult:
    """A ``--fail-on`` condition. ``holds`` None = could not be judged, and ``detail`` says why."""

    text: str
    holds: bool | None
    detail: str


@dataclass
class NotComparable:
    """Why the runs cannot be held against each other. ``code``: little-work or different-programs."""

    code: str
    sentence: str


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
    not_comparable: NotComparable | None = None
    replaced: list[Replaced] = field(default_factory=list)
    flags: list[FlagChange] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    runs: list[RunFigures] = field(default_factory=list)
    modes: list[Modes] = field(default_factory=list)
    schema_version: str = COMPARE_SCHEMA_VERSION

    @property
    def is_single(self) -> bool:
        """Whether there is one run on each side."""
        return len(self.runs) <= 2

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, keys in a stable order, the version first."""
        data = plain(self)
        assert isinstance(data, dict)
        return {"schema_version": data.pop("schema_version"), **data}
