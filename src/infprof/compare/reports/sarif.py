"""The comparison as SARIF 2.1.0 (OASIS), for the code-scanning views of CI systems.

Results are the gates that hold or could not be judged, phases and kernels that got slower, and a limiter that moved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from infprof import __version__
from infprof.compare.headline import ONE_RUN_EACH, arrow, signed_percent, stepped
from infprof.compare.model import HIGHER, MOVED, Comparison
from infprof.reports import format as fmt

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_KERNELS = 10
# Rule id → (level, what it says).
_RULES = {
    "gate": ("error", "A --fail-on condition holds."),
    "gate-not-judged": ("error", "A --fail-on condition could not be judged."),
    "not-comparable": ("error", "The runs cannot be compared."),
    "steps-slower": ("warning", "The steps of a phase take longer than in BASE, beyond their spread."),
    "kernel-slower": ("note", "A kernel takes longer in each call than in BASE."),
    "limiter-moved": ("note", "Something else than in BASE limits the run."),
}


def render(comparison: Comparison) -> str:
    """A log with one run, as JSON with a final newline."""
    driver = {
        "name": "infprof compare",
        "version": __version__,
        "rules": [
            {"id": rule, "shortDescription": {"text": text}, "defaultConfiguration": {"level": level}}
            for rule, (level, text) in _RULES.items()
        ],
    }
    location = {"physicalLocation": {"artifactLocation": {"uri": quote(comparison.head.name)}}}
    index = list(_RULES)
    results = [
        {
            "ruleId": rule,
            "ruleIndex": index.index(rule),
            "level": _RULES[rule][0],
            "message": {"text": fmt.clean(text)},
            "locations": [location],
        }
        for rule, text in _results(comparison)
    ]
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "results": results,
        "properties": {"headline": fmt.clean(comparison.headline)},
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _results(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """(rule, message) in the order of weight."""
    if comparison.not_comparable is not None:
        yield "not-comparable", comparison.not_comparable.sentence
    for gate in comparison.gates:
        if gate.holds is not False:
            yield "gate" if gate.holds else "gate-not-judged", f"{gate.text}: {gate.detail}"
    for phase in stepped(comparison):
        slower = [(n, c) for n, c in (("p50", phase.p50_ns), ("p95", phase.p95_ns)) if c.direction == HIGHER]
        for name, change in slower[:1]:
            more = "" if change.change_ratio is None else f", {signed_percent(change.change_ratio)}"
            remark = f"; {ONE_RUN_EACH}" if comparison.is_single else ""
            yield "steps-slower", f"{phase.name}: {name} {arrow(change.base, change.head)}{more}{remark}"
    if comparison.limiter.status == MOVED:
        yield "limiter-moved", comparison.limiter.sentence
    # Kernels of one run each may only show how runs differ.
    told = comparison.is_single or any(phase.p50_ns.direction == HIGHER for phase in stepped(comparison))
    for row in [row for row in comparison.kernels if row.what == "slower" and told][:_KERNELS]:
        where = f" in {row.phase}" if row.phase else ""
        yield (
            "kernel-slower",
            f"{fmt.short_kernel_name(row.name)}{where}: {arrow(row.base_call_ns, row.head_call_ns)} a call",
        )
