"""One run as a comparison sees it: its phases with the length of every step and the kernels of a step.

A profile has all of that; of a stored diagnosis quantiles of the steps and the kernels of the window are known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from infprof.compare import spread
from infprof.compare.spread import Quantile
from infprof.errors import InfprofError, UsageError
from infprof.measures.kernel_class import classify
from infprof.results import Diagnosis

if TYPE_CHECKING:
    from infprof.diagnosis import Options
    from infprof.replay.whatif import WhatIf
    from infprof.trace import IntArray

_PROCESS = re.compile(r", process \S+$")
_DEVICE = re.compile(r", GPU \S+$")
# Codes of traces that show no work of a GPU.
_NO_WORK = ("no-gpu-work", "gpu-not-recorded")


class KernelUse(NamedTuple):
    """A kernel per step (per window without steps).

    ``error_ns`` is the standard error of ``ns``, from ``blocks`` blocks of steps, and ``share`` the share of the steps that have
    the kernel at all; None and 0 where that is not known.
    """

    calls: float
    ns: float
    error_ns: float | None = None
    blocks: int = 0
    share: float | None = None


class CopyUse(NamedTuple):
    """Copies of a kind per step; ``moved_bytes`` None where their size is not known."""

    calls: float
    moved_bytes: float | None


class PhaseKey(NamedTuple):
    """What makes phases of two runs the same: the name, and the places of its GPU and process among those of the run."""

    name: str
    device: int
    process: int


@dataclass
class PhaseRun:
    """A phase of a run, or all its steps. ``entry`` is that of the diagnosis; ``lengths`` (ns, in order) of whole steps and
    ``kernels`` (name → use per step) and ``copies`` (kind → use) are None where only a diagnosis is left."""

    key: PhaseKey
    entry: dict[str, Any]
    lengths: IntArray | None = None
    kernels: dict[str, KernelUse] | None = None
    copies: dict[str, CopyUse] | None = None

    @property
    def steps(self) -> dict[str, Any] | None:
        """What the diagnosis says of the steps; None for a phase that has none."""
        return self.entry.get("steps")

    @property
    def mean_ns(self) -> float | None:
        """The mean length of a whole step."""
        steps = self.steps or {}
        busy, idle = steps.get("busy_per_step_ns"), steps.get("idle_per_step_ns")
        return None if busy is None or idle is None else float(busy) + float(idle)

    def quantile(self, name: str) -> Quantile:
        """p50, p95 or p99 of the steps, with what is known of its spread."""
        steps = self.steps or {}
        value = steps.get(f"{name}_ns")
        if self.lengths is not None and len(self.lengths):
            return spread.measured(self.lengths, int(name[1:]) / 100)._replace(value=value)
        if name == "p50":
            return spread.stored(value, steps.get("p95_ns"), steps.get("p99_ns"), _whole(steps))
        return Quantile(value, reason="the length of each step is not in a stored diagnosis")


@dataclass
class Run:
    """``name`` is the file's; ``steps`` all steps of the first lane of the focus device, None where none were found."""

    name: str
    diagnosis: Diagnosis = field(repr=False)
    phases: list[PhaseRun]
    steps: PhaseRun | None
    kernels: dict[str, KernelUse]
    span_ns: int | None
    stored: bool
    whatif: WhatIf | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def step_count(self) -> float | None:
        """How many steps the window holds, the cut ones at its edges half; None without steps."""
        steps = None if self.steps is None else self.steps.steps
        if not steps or not steps.get("count"):
            return None
        return float(steps["count"] + _whole(steps)) / 2


def _whole(steps: dict[str, Any]) -> int:
    return int(steps.get("complete_count") or 0)


def load_run(path: Path, options: Options, with_whatif: bool = False, side: str = "") -> Run:
    """The run in a profile, a bundle or a stored diagnosis.

    ``with_whatif``: be ready to replay it. ``side``: BASE or HEAD, for messages. Raises InfprofError for what cannot be read or holds nothing to compare,
    UsageError where the input is several runs or ranks, or the options do not fit.
    """
    from infprof.ranks.inputs import expand
    from infprof.stored import is_stored_diagnosis, read_stored_diagnosis

    found = expand([path])
    if len(found) > 1:
        raise UsageError(f"{path} holds {len(found)} profiles: compare takes one run on each side, of one rank each.")
    path = found[0] if found else path
    if is_stored_diagnosis(path):
        _check_options(path, options)
        run = of_diagnosis(path.name, read_stored_diagnosis(path))
    else:
        run = _of_profile(path, options, with_whatif)
    _check(path, run.diagnosis, side)
    return run


def _check_options(path: Path, options: Options) -> None:
    given = {
        "--window": options.window != "auto",
        "--range": options.range_name,
        "--step-range": options.step_range,
        "--rules": options.rule_dirs,
    }
    for name, value in given.items():
        if value:
            raise UsageError(f"{name} needs the profile itself: {path} is a diagnosis that is finished.")


def _check(path: Path, diagnosis: Diagnosis, side: str) -> None:
    if diagnosis.ranks:
        raise UsageError(
            f"{path} is the diagnosis of {len(diagnosis.ranks)} ranks: compare takes one run on each side, of one rank each."
        )
    verdict = diagnosis.verdict
    named = f"{side}, {path}," if side else str(path)
    if not diagnosis.devices or verdict.code in _NO_WORK:
        raise InfprofError(f"{named} has no GPU work: not comparable. {verdict.sentence} Record it again.")
    if verdict.cls == "unusable":
        raise InfprofError(f"{named} cannot be compared, it is unusable: {verdict.sentence}")


def of_diagnosis(name: str, diagnosis: Diagnosis) -> Run:
    """The run of which only its diagnosis is left."""
    phases = [PhaseRun(key, entry) for key, entry in zip(_keys(diagnosis), diagnosis.phases, strict=True)]
    steps = None
    if diagnosis.steps and diagnosis.steps.get("count"):
        entry = {"name": "all steps", "kind": "steps", "count": diagnosis.steps["count"], "steps": diagnosis.steps}
        steps = PhaseRun(PhaseKey("all steps", 0, 0), entry)
    span = (diagnosis.whatif or {}).get("recorded_span_ns")
    run = Run(name, diagnosis, phases, steps, {}, span, stored=True)
    run.kernels = _table_kernels(diagnosis, run.step_count or 1.0)
    return run


def _of_profile(path: Path, options: Options, with_whatif: bool) -> Run:
    from infprof.compare.measuring import add_steps
    from infprof.diagnosis import analyze_in_detail, what_if
    from infprof.readers import read
    from infprof.resources import rules_dir
    from infprof.rules import load

    rules = load([rules_dir(), *options.rule_dirs])
    detailed = analyze_in_detail(read(path), rules, replace(options, whatif=with_whatif))
    run = of_diagnosis(path.name, detailed.diagnosis)
    run.stored = False
    prepared = detailed.prepared
    if prepared is not None and len(prepared.operations):
        ops = prepared.operations
        run.span_ns = int(ops.end.max() - ops.start.min())
        add_steps(run, prepared, detailed.times, options.step_range)
        if with_whatif:
            run.whatif = what_if(prepared, detailed.diagnosis, rules)
    return run


def _keys(diagnosis: Diagnosis) -> list[PhaseKey]:
    """The key of each phase: numbers of GPUs and processes differ from run to run, their order does not."""
    devices = sorted({phase.get("device") for phase in diagnosis.phases}, key=lambda d: (d is None, d))
    seen: dict[tuple[str, Any], int] = {}
    keys = []
    for phase in diagnosis.phases:
        name = _DEVICE.sub("", _PROCESS.sub("", str(phase.get("name", ""))))
        place = name, phase.get("device")
        seen[place] = seen.get(place, -1) + 1
        keys.append(PhaseKey(name, devices.index(phase.get("device")), seen[place]))
    return keys


def _table_kernels(diagnosis: Diagnosis, steps: float) -> dict[str, KernelUse]:
    """The kernels of the window's table, per step."""
    used: dict[str, KernelUse] = {}
    for row in diagnosis.kernel_table:
        before = used.get(row.name, KernelUse(0.0, 0.0))
        used[row.name] = KernelUse(before.calls + row.calls / steps, before.ns + row.total_ns / steps)
    return used


def kernel_kind(name: str) -> str:
    """The class of a kernel by its name."""
    return classify([name])[0].kind
