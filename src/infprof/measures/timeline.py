"""The device's time in a fixed number of columns: small whatever the trace's size, for charts."""

from __future__ import annotations

from typing import Any

import numpy as np

from infprof.measures import intervals as iv
from infprof.measures.counters import Counters
from infprof.measures.device import DeviceAnalysis
from infprof.measures.intervals import Intervals
from infprof.results import IDLE_CAUSES
from infprof.trace import FloatArray, IntArray, Trace

COLUMNS = 400
_COUNTER_NAMES = {
    "sm_issue_ratio": "SM issue",
    "tensor_active_ratio": "Tensor active",
    "dram_read_ratio": "DRAM read",
    "dram_write_ratio": "DRAM write",
    "pcie_rx_ratio": "PCIe receive",
    "pcie_tx_ratio": "PCIe transmit",
}


def timeline(trace: Trace, analyses: list[DeviceAnalysis]) -> dict[str, Any]:
    """Shares of each slice per column, and counter means; the format stands in reports/html.py."""
    start = min(int(a.time.scope.starts[0]) for a in analyses)
    end = max(int(a.time.scope.ends[-1]) for a in analyses)
    edges = np.linspace(start, end, COLUMNS + 1).astype(np.int64)
    devices, counters = [], []
    for analysis in analyses:
        devices.append({"id": trace.devices[analysis.device].id, "series": _series(analysis, edges)})
        if analysis.counters is not None:
            counters += _counter_columns(trace.devices[analysis.device].id, analysis.counters, edges)
    return {"start_ns": start, "end_ns": end, "columns": COLUMNS, "devices": devices, "counters": counters}


def _series(analysis: DeviceAnalysis, edges: IntArray) -> list[dict[str, Any]]:
    time = analysis.time
    width = np.maximum(np.diff(edges), 1)

    def shares(inside: Intervals) -> list[float]:
        return [round(float(v), 4) for v in iv.covered(inside, edges[:-1], edges[1:]) / width]

    series: list[tuple[str, str | None, list[float]]] = [
        ("compute", None, shares(time.compute)),
        ("exposed_communication", None, shares(time.exposed_comm)),
    ]
    series += [("exposed_copy", cause, shares(inside)) for cause, inside in time.exposed_copy.items()]
    for index, cause in enumerate(IDLE_CAUSES):
        spent = time.gaps.causes[index]
        if spent.any():
            series.append(("idle", cause, _spread(time.gaps.starts, time.gaps.ends, spent, edges, width)))
    return [{"kind": k, "cause": c, "share": s} for k, c, s in series if any(s)]


def _spread(starts: IntArray, ends: IntArray, spent: IntArray, edges: IntArray, width: IntArray) -> list[float]:
    """Time of one cause per column: each gap's share is spread evenly over it."""
    length = np.maximum(ends - starts, 1)
    before = np.cumsum(spent)
    index = np.searchsorted(starts, edges, side="right") - 1
    safe = np.maximum(index, 0)
    inside = np.clip(edges - starts[safe], 0, length[safe]) / length[safe]
    reached: FloatArray = np.where(index >= 0, before[safe] - spent[safe] + spent[safe] * inside, 0.0)
    return [round(float(v), 4) for v in np.diff(reached) / width]


def _counter_columns(device: int, counters: Counters, edges: IntArray) -> list[dict[str, Any]]:
    out = []
    known: IntArray | None = None
    for name, label in _COUNTER_NAMES.items():
        for times, values in counters.samples.get(name, []):
            # The metrics of a device are sampled together, in the order of time.
            if known is None or not np.array_equal(known, times):
                known, last = times, np.searchsorted(times, edges, side="left")
                # A column begins with its left edge; what lies on the last edge is in none.
                count = np.diff(last)
                column = np.repeat(np.arange(COLUMNS), count)
            total = np.bincount(column, weights=values[last[0] : last[-1]], minlength=COLUMNS)
            means = [round(float(t / c), 4) if c else None for t, c in zip(total, count, strict=True)]
            out.append({"device": device, "name": label, "unit": "ratio", "values": means})
    return out
