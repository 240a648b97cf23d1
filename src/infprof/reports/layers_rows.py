"""Findings by the layer that must act: who has how much to win back."""

from __future__ import annotations

from typing import NamedTuple

from infprof.reports import format as fmt
from infprof.results import Diagnosis, Finding

# From what is easiest to reach to what is hardest to change.
LAYERS = ("application", "framework", "runtime", "hardware")
COLUMNS = ("layer", "findings", "time", "of the window", "the largest")


class LayerGroup(NamedTuple):
    """The findings of one layer with their places in the list. ``ns`` is what they cost together, None where none claims
    time: costs share out the window and are never counted twice, so they may be added."""

    layer: str
    findings: list[tuple[int, Finding]]
    ns: int | None


def by_layer(diagnosis: Diagnosis) -> list[LayerGroup]:
    """The layers that have findings; of layers that are not on the list, last, in order of their names."""
    numbered = list(enumerate(diagnosis.findings, 1))
    others = sorted({f.layer for f in diagnosis.findings} - set(LAYERS))
    groups = []
    for layer in (*LAYERS, *others):
        mine = [(number, finding) for number, finding in numbered if finding.layer == layer]
        costs = [f.cost.value for _, f in mine if f.cost.unit == "ns" and f.cost.value is not None]
        if mine:
            groups.append(LayerGroup(layer, mine, sum(costs) if costs else None))
    return groups


def values(diagnosis: Diagnosis) -> list[list[str]]:
    """A row of ``COLUMNS`` for each layer."""
    window = diagnosis.window.duration_ns
    return [
        [
            group.layer,
            ", ".join(str(number) for number, _ in group.findings),
            fmt.NOT_KNOWN if group.ns is None else fmt.duration(group.ns),
            fmt.NOT_KNOWN if group.ns is None else fmt.share(group.ns, window),
            group.findings[0][1].title,
        ]
        for group in by_layer(diagnosis)
    ]


def heading(group: LayerGroup, window_ns: int) -> str:
    """``framework layer: 31 ms, 12 % of the window``."""
    cost = "" if group.ns is None else f": {fmt.duration(group.ns)}, {fmt.share(group.ns, window_ns)} of the window"
    return f"{group.layer} layer{cost}"
