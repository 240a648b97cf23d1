"""What a rule is once its file has been read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infprof.replay.setting import Setting
from infprof.results import IDLE_CAUSES, Remedy
from infprof.rules.expression import Expression

AREAS = (
    "compute",
    "bandwidth",
    "latency",
    "scheduling",
    "pcie",
    "communication",
    "memory",
    "serving",
    "host",
    "hardware",
    "trace",
)
LAYERS = ("application", "framework", "runtime", "hardware")
SCENARIOS = ("online", "batch", "mixed")
# What kind of change it takes: how model and deployment are built, how the same is computed, the software and settings
# around it, or other devices.
APPROACHES = ("architecture", "algorithm", "system", "hardware")
REMEDY_KINDS = ("configuration", "code", "hardware", "capture")
STACKS = ("vllm", "sglang", "tensorrt-llm", "pytorch", "cuda", "rocm")
TABLES = (
    "kernels",
    "copies",
    "memsets",
    "syncs",
    "api_calls",
    "ranges",
    "counters",
    "memory_events",
    "os_calls",
    "samples",
    "requests",
)
RANKS = "ABCDE"
EXPECTATIONS = ("fires", "quiet", "not evaluated")

_WHERE_PARTS: Mapping[str, tuple[str, ...]] = {
    "idle": IDLE_CAUSES,
    "exposed_copy": ("h2d", "d2h", "uvm", "p2p", "d2d", "memset", "pageable", "small", "host", "round_trip"),
    "exposed_comm": (),
    "kernels": ("top", "small", "fp32_gemm", "few_sm", "attention", "gemm", "unfused"),
    "calls": ("sync", "allocator", "module_load"),
    "profiler": (),
    "none": (),
}


@dataclass(frozen=True)
class Level:
    """When a finding has this severity: from a share of the window on, or while a condition holds."""

    severity: str
    share: float | None
    condition: Expression | None


@dataclass(frozen=True)
class Doubt:
    """A condition that lowers the confidence of a finding, and what to say then."""

    when: Expression
    confidence: float
    because: str


@dataclass(frozen=True)
class Note:
    """A sentence that goes with the finding while a condition holds."""

    when: Expression
    text: str


@dataclass(frozen=True)
class GainBounds:
    """Bounds on the gain as factors (0-1) of the cost, and where they come from."""

    low: Expression
    high: Expression
    basis: str
    source: str


@dataclass(frozen=True)
class Case:
    """Measures in, expectation out. A measure given as None is absent."""

    name: str
    measures: Mapping[str, float | None]
    expect: str
    severity: str | None


@dataclass(frozen=True)
class Rule:
    """One rule. ``confirmed`` is a condition over better evidence, whose rank the finding then has. ``states`` rules explain a verdict class and make no finding; the others make one when they fire."""

    id: str
    title: str
    area: str
    layer: str
    scenarios: tuple[str, ...]
    remedy_kind: str
    approach: str
    states: bool
    cls: str | None
    cause: str | None
    needs: tuple[str, ...]
    when: Expression
    defaults: Mapping[str, float]
    cost: Expression | None
    cost_unit: str
    pool: str | None
    levels: tuple[Level, ...]
    fixed_severity: str | None
    confidence: float
    doubts: tuple[Doubt, ...]
    notes: tuple[Note, ...]
    rank: str | None
    confirmed: Expression | None
    why: str
    evidence: tuple[str, ...]
    where: str
    ncu: str | None
    replay: Setting | None
    remedies: tuple[Remedy, ...]
    gain: GainBounds | None
    quiet_when: str
    references: tuple[str, ...]
    cases: tuple[Case, ...]
    path: Path


def selector_problem(selector: str) -> str | None:
    """Why ``selector`` names no place in a trace, or None when it does (``idle:launch,sync``, ``kernels:top``)."""
    family, colon, rest = selector.partition(":")
    if family not in _WHERE_PARTS:
        return f"no place `{family}`: one of {', '.join(_WHERE_PARTS)}"
    choices = _WHERE_PARTS[family]
    if not choices:
        return f"`{family}` takes nothing after a colon" if colon else None
    parts = rest.split(",") if family == "idle" else [rest]
    wrong = [part for part in parts if part not in choices]
    return f"`{family}` has no `{wrong[0]}`: {', '.join(choices)}" if wrong else None
