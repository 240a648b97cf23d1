"""Which families of kernels gave way to which: of each class of which some kernels came and some went."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from infprof.compare.model import FamilyTime, KernelChange, Replaced
from infprof.measures.kernel_class import classify, short_name

# Formats of quantised weights have kernels of their own within a library; the first that fits names the family.
_FORMATS = (
    ("marlin", re.compile("marlin", re.IGNORECASE)),
    ("machete", re.compile("machete", re.IGNORECASE)),
    ("awq", re.compile(r"(?<![a-z])awq(?![a-z])|gemm_forward_4bit", re.IGNORECASE)),
    ("exllama", re.compile("exllama|reconstruct_gptq", re.IGNORECASE)),
    ("gptq", re.compile("gptq", re.IGNORECASE)),
    ("bitsandbytes", re.compile(r"bitsandbytes|(?<![a-z])kgemm_4bit|kDequantizeBlockwise", re.IGNORECASE)),
)
# What (de)quantises belongs to the products that it serves.
_SERVES = {"quantise": ("gemm", "moe")}
_WIDTH = 40


def family_of(name: str) -> str:
    """The family of a kernel by its name: a weight format, else whose code it is, else its short name."""
    found = next((family for family, pattern in _FORMATS if pattern.search(name)), None)
    return found or classify([name])[0].library or short_name(name, _WIDTH)


def replaced_families(kernels: Iterable[KernelChange]) -> list[Replaced]:
    """A row for each class and phase in which kernels both came and went, the largest change first."""
    groups: dict[tuple[str | None, str], list[KernelChange]] = {}
    for row in kernels:
        if row.what in ("came", "went"):
            groups.setdefault((row.phase, row.kernel_class), []).append(row)
    for phase, kind in list(groups):
        served = next((k for k in _SERVES.get(kind, ()) if _both(groups.get((phase, k), ()))), None)
        if served is not None and not _both(groups[phase, kind]):
            groups[phase, served] += groups.pop((phase, kind))
    found = [_row(kind, phase, rows) for (phase, kind), rows in groups.items() if _both(rows)]
    return sorted(found, key=lambda row: (-abs(row.delta_ns), row.kernel_class, row.phase or ""))


def _both(rows: Sequence[KernelChange]) -> bool:
    return {row.what for row in rows} == {"came", "went"}


def _row(kind: str, phase: str | None, rows: Sequence[KernelChange]) -> Replaced:
    base = _families((row.name, row.base_ns) for row in rows if row.what == "went")
    head = _families((row.name, row.head_ns) for row in rows if row.what == "came")
    was, now = (sum(item.ns for item in side) for side in (base, head))
    return Replaced(kind, phase, base, head, was, now, now - was)


def _families(kernels: Iterable[tuple[str, float | None]]) -> list[FamilyTime]:
    spent: dict[str, float] = {}
    for name, ns in kernels:
        family = family_of(name)
        spent[family] = spent.get(family, 0.0) + (ns or 0.0)
    return [FamilyTime(family, ns) for family, ns in sorted(spent.items(), key=lambda item: (-item[1], item[0]))]
