"""Hardware counters (rank A): nsys GPU metrics averaged over the samples that lie in compute time."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from infprof.distinct import groups, turns
from infprof.measures import intervals as iv
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.quantiles import median
from infprof.results import Measures
from infprof.trace import BoolArray, FloatArray, IntArray, picked

# Measure → base names, case-folded, over the versions of nsys. A bracket says the unit; only shares of peak count.
_METRICS = {
    "sm_active_ratio": (r"sms? active",),
    "sm_issue_ratio": (r"sm issue",),
    "tensor_active_ratio": (r"tensor active( / fp16 active)?",),
    "dram_read_ratio": (r"dram read (bandwidth|throughput)",),
    "dram_write_ratio": (r"dram write (bandwidth|throughput)",),
    "pcie_rx_ratio": (r"pcie rx throughput",),
    "pcie_tx_ratio": (r"pcie tx throughput",),
    "nvlink_rx_ratio": (r"nvlink rx (requests|responses)( user| protocol) data", r"nvlink rx (bandwidth|throughput)"),
    "nvlink_tx_ratio": (r"nvlink tx (requests|responses)( user| protocol) data", r"nvlink tx (bandwidth|throughput)"),
    "gr_active_ratio": (r"gr active", r"gpu active"),
}
_PIPES = ("sm_issue_ratio", "tensor_active_ratio")
# Parts of one link's traffic add up; every other measure takes its one metric.
_ADDED = ("nvlink_rx_ratio", "nvlink_tx_ratio")
_WHOLE_WINDOW = ("pcie_rx_ratio", "pcie_tx_ratio", "nvlink_rx_ratio", "nvlink_tx_ratio", "gr_active_ratio")
# A sample speaks for compute when compute covers this share of its period.
COVERED_SHARE = 0.5
# Another process uses the GPU when the SMs are this busy in most samples in which this trace shows it idle.
SHARED_ACTIVE, SHARED_SHARE, SHARED_SAMPLES = 0.2, 0.5, 20


@dataclass
class Counters:
    """The usable samples of one device, by measure."""

    samples: dict[str, list[tuple[IntArray, FloatArray]]]
    shared_gpu: bool


def read_counters(prepared: Prepared, device: int, busy: Intervals, scope: Intervals) -> Counters | None:
    """The device's samples inside the scope and inside the stretch in which its counters live; None if none."""
    table, strings = prepared.trace.counters, prepared.trace.strings
    if table is None or not len(table):
        return None
    # Samples are sorted by time.
    near = slice(*table["time"].searchsorted([scope.starts[0], scope.ends[-1]]).tolist())
    mine = table["device"][near] == device
    if scope.count > 1:
        mine &= iv.contains(scope, table["time"][near])
    time, metric, value = (picked(table[column][near], mine) for column in ("time", "metric", "value"))
    if not len(time):
        return None
    found: dict[str, list[tuple[IntArray, FloatArray]]] = {}
    known: IntArray | None = None
    for index, rows in turns(metric) or groups(metric):
        name = _measure_of(strings[index])
        if name is not None:
            times = np.ascontiguousarray(time[rows])
            # The metrics of a device are sampled together: their times are kept once.
            known = times if known is None or not np.array_equal(known, times) else known
            found.setdefault(name, []).append((known, value[rows] / 100.0))
    live = _alive(found)
    if live is None:
        return None
    kept = {name: [_between(*live, *part) for part in parts] for name, parts in found.items()}
    return Counters(kept, _shared(kept, busy))


def _measure_of(metric: str) -> str | None:
    base = metric.strip().lower()
    bracket = re.search(r"\[(.*)\]$", base)
    if bracket is not None:
        # The same metric also comes as an average or a cycle count: only a share of peak is one.
        if "throughput %" not in bracket[1] and bracket[1].strip() != "%":
            return None
        base = base[: bracket.start()].strip()
    return next((name for name, patterns in _METRICS.items() if any(re.fullmatch(p, base) for p in patterns)), None)


def _alive(found: dict[str, list[tuple[IntArray, FloatArray]]]) -> tuple[int, int] | None:
    """From the first to the last sample that is not zero in any metric: outside, the counters did not run."""
    edges = []
    for times, values in (part for parts in found.values() for part in parts):
        positive = np.flatnonzero(values > 0)
        if len(positive):
            # Samples are sorted by time.
            edges.append((int(times[positive[0]]), int(times[positive[-1]])))
    return (min(a for a, _ in edges), max(b for _, b in edges)) if edges else None


def _between(first: int, last: int, times: IntArray, values: FloatArray) -> tuple[IntArray, FloatArray]:
    """The samples from the first to the last time, both included."""
    here = slice(*times.searchsorted([first, last + 1]).tolist())
    return times[here], values[here]


def _period(times: IntArray) -> int:
    return int(median(np.diff(times))) if len(times) > 1 else 100_000


def _share_covered(inside: Intervals, times: IntArray) -> FloatArray:
    """The share of each sample's period, which ends at its time, that the set covers."""
    period = max(_period(times), 1)
    return iv.covered(inside, times - period, times) / period


class _Chosen:
    """Averages over the samples that lie in a set. ``most`` is the largest number of samples that one metric had there."""

    def __init__(self, inside: Intervals) -> None:
        self._inside = inside
        self._times: IntArray | None = None
        self._rows: BoolArray = np.empty(0, dtype=np.bool_)
        self.most = 0

    def means(self, parts: list[tuple[IntArray, FloatArray]]) -> list[float]:
        out = []
        for times, values in parts:
            # What was found for one set of times holds for all metrics that share it.
            if self._times is None or not np.array_equal(self._times, times):
                self._times, self._rows = times, _share_covered(self._inside, times) >= COVERED_SHARE
            count = int(self._rows.sum())
            if count:
                out.append(float(values[self._rows].mean()))
                self.most = max(self.most, count)
        return out


def _larger(
    issue: list[tuple[IntArray, FloatArray]], tensor: list[tuple[IntArray, FloatArray]]
) -> list[tuple[IntArray, FloatArray]]:
    """The larger of two metrics sample by sample, where they were sampled together: one kernel is limited by the one pipe,
    the next by the other, and the average of each alone would show neither."""
    if len(issue) == len(tensor) == 1 and np.array_equal(issue[0][0], tensor[0][0]):
        return [(issue[0][0], np.maximum(issue[0][1], tensor[0][1]))]
    return [*issue, *tensor]


def _shared(kept: dict[str, list[tuple[IntArray, FloatArray]]], busy: Intervals) -> bool:
    for name in ("sm_active_ratio", "gr_active_ratio", "sm_issue_ratio"):
        for times, values in kept.get(name, []):
            idle = _share_covered(busy, times) == 0
            if idle.sum() >= SHARED_SAMPLES and (values[idle] >= SHARED_ACTIVE).mean() >= SHARED_SHARE:
                return True
        if name in kept:
            return False
    return False


def add_counters(
    measures: Measures, counters: Counters | None, compute: Intervals, few_sm: Intervals, why_none: str
) -> None:
    """Counter measures: limits of a busy GPU over samples in compute time, links and engine over the whole window.

    ``few_sm``: when kernels that leave most SMs empty run.
    """
    source = "GPU metrics"
    if counters is None:
        for name in (
            *_METRICS,
            "few_sm_active_ratio",
            "sm_throughput_ratio",
            "dram_ratio",
            "pcie_ratio",
            "nvlink_ratio",
        ):
            measures.add(name, None, "ratio", "A", why_none)
        measures.add("counter_sample_count", 0, "count", "A", why_none)
        return
    in_compute = _Chosen(compute)
    for name in _METRICS:
        parts = counters.samples.get(name, [])
        if name in _WHOLE_WINDOW:
            means = [float(values.mean()) for _, values in parts if len(values)]
        else:
            means = in_compute.means(parts)
        combine = sum if name in _ADDED else max
        measures.add(name, min(float(combine(means)), 1.0) if means else None, "ratio", "A", source)
    measures.add("counter_sample_count", in_compute.most, "count", "A", source)
    active = _Chosen(few_sm).means(counters.samples.get("sm_active_ratio", []))
    measures.add("few_sm_active_ratio", min(max(active), 1.0) if active else None, "ratio", "A", source)

    def value(name: str) -> float | None:
        return measures.value(name)

    either = in_compute.means(_larger(*(counters.samples.get(name, []) for name in _PIPES)))
    measures.add("sm_throughput_ratio", min(max(either), 1.0) if either else None, "ratio", "A", source)
    read, write = value("dram_read_ratio"), value("dram_write_ratio")
    # Reads and writes are each a share of the same peak: they add up.
    measures.add(
        "dram_ratio", min(read + write, 1.0) if read is not None and write is not None else None, "ratio", "A", source
    )
    for name, first, second in (
        ("pcie_ratio", "pcie_rx_ratio", "pcie_tx_ratio"),
        ("nvlink_ratio", "nvlink_rx_ratio", "nvlink_tx_ratio"),
    ):
        ends = [v for v in (value(first), value(second)) if v is not None]
        measures.add(name, max(ends) if ends else None, "ratio", "A", source)
