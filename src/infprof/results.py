"""What a diagnosis is made of: measures, findings, verdicts, slices, and the Diagnosis that holds them.

These classes are the JSON contract (``schema_version`` 1.x): every field here is a key there. Additive changes only.
All times are integer nanoseconds from the trace's own origin; ratios are 0–1; unknown numbers are None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from infprof.restoring import StructureError, restored

SCHEMA_VERSION = "1.0"

VERDICT_CLASSES = (
    "compute-bound",
    "bandwidth-bound",
    "latency-bound",
    "balanced",
    "gpu-busy",
    "scheduling-bubble",
    "pcie-limited",
    "communication-bound",
    "throttled",
    "no-demand",
    "unusable",
)

IDLE_CAUSES = (
    "kernel-gap",
    "dependency",
    "launch",
    "host-work",
    "sync",
    "lock",
    "allocator",
    "module-load",
    "io",
    "cpu-contention",
    "no-demand",
    "profiler",
    "unknown",
)

COPY_CAUSES = ("h2d", "d2h", "uvm", "p2p", "d2d", "memset")

SLICE_KINDS = ("compute", "exposed_communication", "exposed_copy", "idle")

UNUSABLE_CODES = ("no-gpu-work", "gpu-not-recorded", "too-short", "only-startup", "damaged", "unsupported-device")

SEVERITIES = ("info", "warning", "critical")

# Ranks of evidence, the strongest first.
RANKS = ("A", "B", "C", "D", "E")


@dataclass(frozen=True)
class Scope:
    """What a measure is about: ``kind`` is window, device, process, rank, phase or step; ``id`` names which one."""

    kind: str = "window"
    id: str | None = None


@dataclass(frozen=True)
class Measure:
    """A named number with its unit, evidence rank (A–E), and where it came from; value None = not available."""

    name: str
    value: float | int | None
    unit: str
    rank: str
    source: str
    scope: Scope = Scope()


class Measures:
    """The measures of one scope, by name: the namespace that rules see."""

    def __init__(self, items: list[Measure] | None = None) -> None:
        self._items: dict[str, Measure] = {m.name: m for m in items or []}

    def add(
        self,
        name: str,
        value: float | int | None,
        unit: str,
        rank: str = "C",
        source: str = "timeline",
        scope: Scope | None = None,
    ) -> None:
        """Record a measure; ``value=None`` says that it could not be computed (rules that need it are not evaluated)."""
        self._items[name] = Measure(name, value, unit, rank, source, scope or Scope())

    def value(self, name: str) -> float | int | None:
        """The value by name, None when absent."""
        measure = self._items.get(name)
        return None if measure is None else measure.value

    def get(self, name: str) -> Measure | None:
        return self._items.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[Measure]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)


@dataclass
class Slice:
    """A share of the window: kind is one of SLICE_KINDS; cause one of COPY_CAUSES or IDLE_CAUSES, or None."""

    kind: str
    cause: str | None
    ns: int


@dataclass
class Remedy:
    """One change: which stack, the exact flag or call, and what it costs."""

    stack: str
    change: str
    trade_off: str | None = None


@dataclass
class Where:
    """A time range to jump to; ``device`` and ``stream`` are the ids used in ``devices``, None = all.

    ``name`` is what is found there (kernel, range or call name)."""

    start_ns: int
    end_ns: int
    device: int | None = None
    stream: int | None = None
    name: str | None = None


@dataclass
class Evidence:
    measure: str
    value: float | int | str | None
    unit: str


@dataclass
class Cost:
    """What the finding costs; unit "ns" (of the window) or "bytes"."""

    value: int | None
    unit: str = "ns"


@dataclass
class Gain:
    """Bounds on the gain as a share of the window (0–1), and where the bounds come from."""

    low: float | None
    high: float | None
    basis: str


@dataclass
class Finding:
    rule: str
    title: str
    area: str
    layer: str
    scenarios: list[str]
    remedy_kind: str
    severity: str
    rank: str
    confidence: float
    cost: Cost
    gain: Gain
    evidence: list[Evidence]
    where: list[Where]
    remedies: list[Remedy]
    why: str = ""
    commands: list[str] = field(default_factory=list)  # ready command lines that look closer (ncu …)
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)  # those of the notes that lower the confidence
    # What kind of change it takes: architecture, algorithm, system or hardware; None in files older than this key.
    approach: str | None = None


@dataclass
class Verdict:
    """The answer. ``code`` only for unusable; ``why_not`` = what is missing for gpu-busy or unusable.

    ``second`` is the class of the rest when the class is no-demand. ``rule`` names the rule file that explains the
    class and ``remedies`` are that rule's."""

    cls: str
    cause: str | None
    code: str | None
    rank: str
    confidence: float
    sentence: str
    why_not: str | None = None
    second: str | None = None
    rule: str | None = None
    remedies: list[Remedy] = field(default_factory=list)


@dataclass
class LeftOut:
    what: str
    ns: int


@dataclass
class Window:
    """From the first to the last analysed ns. ``covered_ns`` only where the window has holes (a range's occurrences)."""

    start_ns: int
    end_ns: int
    how: str
    left_out: list[LeftOut] = field(default_factory=list)
    covered_ns: int | None = None

    @property
    def duration_ns(self) -> int:
        """The analysed time: what the slices of every device add up to."""
        return self.end_ns - self.start_ns if self.covered_ns is None else self.covered_ns


@dataclass
class KernelTotals:
    count: int
    total_ns: int
    distinct: int


@dataclass
class CopyRow:
    """Copies of one kind (h2d, d2h, d2d, p2p, uvm, memset, …). ``pageable_bytes`` None = memory kind not recorded.

    ``bytes`` of those whose size was recorded, None if none's was; ``bytes_per_s`` over their time."""

    kind: str
    count: int
    bytes: int | None
    total_ns: int
    pageable_bytes: int | None
    exposed_ns: int = 0
    bytes_per_s: float | None = None
    size_classes: list[dict[str, int | str]] = field(default_factory=list)


@dataclass
class KernelRow:
    """One line of the kernel table. ``device`` as in ``devices``; ``share`` of the summed kernel time."""

    name: str
    device: int
    calls: int
    total_ns: int
    mean_ns: float
    p50_ns: int
    p95_ns: int
    share: float
    kernel_class: str
    precision: str | None
    grid_blocks: int | None
    block_threads: int | None
    # Whose code it is by its name (cublas, cutlass, aten, …), None where that does not tell.
    library: str | None = None


@dataclass
class WorkRow:
    """Counted work of a kernel class (``operator`` None) or of one operator and precision; docs/verdicts.md.

    Sums and rates are of the kernels of which the figure is known; ``reason`` says what is missing of the others.
    ``share`` is of the kernel time without communication, ``compute_ratio`` and ``dram_ratio`` of the peaks,
    ``limiter`` the roof that was nearly reached: compute, bandwidth, cache (faster than DRAM), or None.
    ``flop_is_bound``: some of the FLOP may have been skipped. ``bytes`` is each operand once.
    """

    device: int
    kind: str
    operator: str | None
    precision: str | None
    calls: int
    kernels: int
    total_ns: int
    share: float
    flop: float | None
    bytes: float | None
    flop_per_s: float | None
    bytes_per_s: float | None
    flop_per_byte: float | None
    ridge_flop_per_byte: float | None
    compute_ratio: float | None
    dram_ratio: float | None
    limiter: str | None
    flop_is_bound: bool
    reason: str | None


@dataclass
class RangeRow:
    """GPU time of an NVTX/annotation range name, projected by correlation."""

    name: str
    count: int
    host_ns: int
    gpu_span_ns: int
    gpu_busy_ns: int
    kernels: int


@dataclass
class NcclRow:
    """Collectives of one name and message size. bytes None = the ranges carry no size."""

    name: str
    count: int
    bytes: int | None
    total_ns: int
    bytes_per_s: float | None


@dataclass
class ApiRow:
    name: str
    calls: int
    total_ns: int
    failed: int


@dataclass
class DeviceResult:
    id: int
    name: str | None
    process_ids: list[int]
    verdict: Verdict
    kernels: KernelTotals
    copies: list[CopyRow]
    slices: list[Slice]


@dataclass
class NotEvaluated:
    rule: str
    needs: str


@dataclass
class Problem:
    """Something about the data that a reader of the diagnosis must know: dropped, guessed, missing, odd."""

    code: str
    message: str
    count: int | None = None


@dataclass
class Provenance:
    tool: str
    tool_version: str | None
    inputs: list[str]
    capture: dict[str, Any]
    gpus: list[dict[str, Any]]
    infprof_version: str


@dataclass
class RankRow:
    """One device of one file among the ranks of a job.

    ``rank`` None = neither the trace nor its name says it, then ``label`` counts the files. ``node`` numbers the machines
    as far as names tell them apart. ``waited_ns``: how long its collectives ran before the last rank arrived;
    ``lateness_*``: how long after the first rank it arrived; ``last_count``: how often it was the last one. These are
    None where its clock could not be aligned. ``offset_ns`` is what is added to its times, ``drift_ppm`` what its clock
    gains, ``error_ns`` how far the ends of common collectives are apart afterwards (95th percentile).
    """

    label: str
    rank: int | None
    node: int | None
    file: str
    device: int | None
    cls: str
    cause: str | None
    window_ns: int
    busy_ratio: float | None
    exposed_comm_ns: int | None
    comm_total_ns: int | None
    aligned: str
    offset_ns: int | None = None
    drift_ppm: float | None = None
    error_ns: int | None = None
    common_collectives: int = 0
    compared_collectives: int = 0
    waited_ns: int | None = None
    lateness_p50_ns: int | None = None
    lateness_p95_ns: int | None = None
    last_count: int | None = None


@dataclass
class ArrivalRow:
    """How far apart the ranks arrive at the collectives of one group and name; ``group`` None = not recorded."""

    group: str | None
    name: str
    count: int
    spread_p50_ns: int
    spread_p95_ns: int
    spread_max_ns: int
    waited_ns: int


@dataclass
class Stragglers:
    """Who is late. ``kind``: none, persistent (one rank last in most), rotating, one-off (few collectives hold most of
    the wait), unknown. ``waited_ns`` is summed over ranks, ``lost_ns`` is what the first rank to arrive waited, summed
    over the collectives. ``reason`` says what the late ranks do meanwhile: compute, host, unknown, or None."""

    kind: str
    labels: list[str]
    collectives: int
    waited_ns: int | None
    waited_ratio: float | None
    lost_ns: int | None
    reason: str | None
    sentence: str


@dataclass
class GroupTraffic:
    """What a process group moves: payload bytes of one rank, and what each rank must send at least (``bus_bytes``)."""

    group: str
    ranks: list[str]
    name: str
    count: int
    bytes: int | None
    bus_bytes: int | None


@dataclass
class FileFailure:
    """A file that could not be used, and why."""

    file: str
    reason: str


@dataclass
class Job:
    """Several ranks beside each other. ``focus`` is the label of the rank whose figures the joint diagnosis shows.

    ``matrix`` holds the bytes between two ranks, only where they are certain (groups of two)."""

    focus: str
    world_size: int | None
    missing_ranks: list[int]
    alignment: str
    error_ns: int | None
    ranks: list[RankRow]
    arrivals: list[ArrivalRow]
    stragglers: Stragglers
    traffic: list[GroupTraffic]
    matrix: list[dict[str, Any]]
    failures: list[FileFailure]


@dataclass
class Diagnosis:
    """The whole answer. ``timeline`` is thinned to a fixed number of columns whatever the input size."""

    verdict: Verdict
    window: Window
    devices: list[DeviceResult]
    findings: list[Finding]
    measures: list[Measure]
    not_evaluated: list[NotEvaluated]
    problems: list[Problem]
    provenance: Provenance
    phases: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[str, Any] | None = None
    whatif: dict[str, Any] | None = None
    kernel_table: list[KernelRow] = field(default_factory=list)
    work_table: list[WorkRow] = field(default_factory=list)
    range_table: list[RangeRow] = field(default_factory=list)
    nccl_table: list[NcclRow] = field(default_factory=list)
    api_table: list[ApiRow] = field(default_factory=list)
    timeline: dict[str, Any] | None = None
    # Whether probes recorded anything in the same run: then even an unusable timeline leaves something to say.
    has_telemetry: bool = False
    # Of several files: the diagnosis of each, and how they compare. All else is then that of the rank in ``job.focus``.
    ranks: list[Diagnosis] = field(default_factory=list)
    job: Job | None = None
    # What the findings are ordered for: online, batch or mixed; None = by time alone.
    scenario: str | None = None
    schema_version: str = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract as plain dicts and lists, keys in a stable order."""
        window = {
            "start_ns": self.window.start_ns,
            "end_ns": self.window.end_ns,
            "duration_ns": self.window.duration_ns,
            "how": self.window.how,
            "left_out": plain(self.window.left_out),
        }
        return {
            "schema_version": self.schema_version,
            "verdict": plain(self.verdict),
            "window": window,
            "devices": plain(self.devices),
            "phases": plain(self.phases),
            "steps": plain(self.steps),
            "findings": plain(self.findings),
            "measures": plain(self.measures),
            "whatif": plain(self.whatif),
            "not_evaluated": plain(self.not_evaluated),
            "problems": plain(self.problems),
            "provenance": plain(self.provenance),
            "kernel_table": plain(self.kernel_table),
            "work_table": plain(self.work_table),
            "range_table": plain(self.range_table),
            "nccl_table": plain(self.nccl_table),
            "api_table": plain(self.api_table),
            "timeline": plain(self.timeline),
            "has_telemetry": self.has_telemetry,
            "ranks": [rank.to_dict() for rank in self.ranks],
            "job": plain(self.job),
            "scenario": self.scenario,
        }

    @classmethod
    def from_dict(cls, data: Any) -> Diagnosis:
        """The diagnosis that ``to_dict`` made this of; keys of a newer 1.x are ignored.

        Raises StructureError where the data is no diagnosis of schema 1.x: a key that is missing, a value of another
        type, a word that is not on its closed list.
        """
        diagnosis = restored(cls, data)
        # The contract has the length of the window; that it is shorter than its span says that it has holes.
        length = restored(_StoredWindow, data["window"], "window").duration_ns
        if length != diagnosis.window.duration_ns:
            diagnosis.window.covered_ns = length
        if "has_telemetry" not in data:
            # The key came later than the first diagnoses with telemetry: its measures say where they come from.
            known = (m.source for m in diagnosis.measures if m.value is not None)
            diagnosis.has_telemetry = any(source.endswith(" telemetry") for source in known)
        _check_words(diagnosis)
        # The windows of these are shorter in the contract, too.
        diagnosis.ranks = [cls.from_dict(rank) for rank in data.get("ranks") or []]
        return diagnosis


@dataclass
class _StoredWindow:
    """What the contract's window holds beside the fields of Window."""

    duration_ns: int


def _check_words(diagnosis: Diagnosis) -> None:
    """Raises StructureError for a word that is not on the closed list it belongs to."""
    verdicts = {"verdict": diagnosis.verdict}
    verdicts.update({f"devices[{i}].verdict": device.verdict for i, device in enumerate(diagnosis.devices)})
    for place, verdict in verdicts.items():
        _one_of(f"{place}.class", verdict.cls, VERDICT_CLASSES)
        _one_of(f"{place}.rank", verdict.rank, RANKS)
    for i, finding in enumerate(diagnosis.findings):
        _one_of(f"findings[{i}].severity", finding.severity, SEVERITIES)
        _one_of(f"findings[{i}].rank", finding.rank, RANKS)
    for i, device in enumerate(diagnosis.devices):
        for j, part in enumerate(device.slices):
            _one_of(f"devices[{i}].slices[{j}].kind", part.kind, SLICE_KINDS)


def _one_of(place: str, word: str, allowed: tuple[str, ...]) -> None:
    if word not in allowed:
        raise StructureError(f"{place} is {word!r}, not one of {', '.join(allowed)}")


def plain(value: Any) -> Any:
    """The value as the contract has it: dataclasses to dicts, NumPy scalars to Python numbers, NaN and infinity to None."""
    if is_dataclass(value) and not isinstance(value, type):
        # "class" is a Python keyword, so the field is called cls here and class in the contract.
        return {("class" if f.name == "cls" else f.name): plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
