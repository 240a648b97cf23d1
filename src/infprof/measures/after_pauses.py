"""Whether kernels run slower just after the device has rested than they do otherwise: clocks that had fallen."""

from __future__ import annotations

import numpy as np

from infprof.distinct import groups
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.idle import IdleModel
from infprof.measures.operations import Prepared
from infprof.measures.slices import DeviceTime
from infprof.quantiles import median
from infprof.results import Measures

# A rest is this long, and clocks are up again so long after it.
REST_NS, RAMP_NS = 1_000_000_000, 500_000_000
# Of a kernel by name and grid so many runs must lie elsewhere, for its usual length to be known.
LEAST_RUNS = 5


def add_after_pauses(measures: Measures, prepared: Prepared, model: IdleModel, time: DeviceTime) -> None:
    """Kernels of the first half second after each rest of a second or more, against the same kernels elsewhere."""
    ops, kernels = prepared.operations, prepared.trace.kernels
    busy = model.busy(time.device)
    low, high = int(time.scope.starts[0]), int(time.scope.ends[-1])
    rested = np.flatnonzero(busy.starts[1:] - busy.ends[:-1] >= REST_NS) + 1 if busy.count else np.empty(0, np.int64)
    begins = busy.starts[rested]
    begins = begins[(begins >= low) & (begins < high)]
    measures.add("rest_count", len(begins), "count")
    if kernels is None or not len(begins):
        _none(measures, "the device never rested for a second")
        return
    mine = np.flatnonzero((ops.kind == op.KERNEL) & (ops.device == time.device) & ~ops.is_comm)
    mine = mine[(ops.start[mine] >= low) & (ops.end[mine] <= high)]
    soon = iv.contains(iv.union(begins, begins + RAMP_NS), ops.start[mine])
    length, row = (ops.end - ops.start)[mine], ops.row[mine]
    # Alike: the same name and grid.
    alike = kernels["name"][row] * (1 << 32) + np.clip(kernels["grid_blocks"][row], -1, (1 << 31) - 1) + 1
    usual = np.zeros(len(mine), dtype=np.float64)
    for _, same in groups(alike):
        elsewhere = length[same][~soon[same]]
        if len(elsewhere) >= LEAST_RUNS:
            usual[same] = float(median(elsewhere))
    told = soon & (usual > 0)
    spent, expected = float(length[told].sum()), float(usual[told].sum())
    if not expected:
        _none(measures, "no kernel ran both after a rest and otherwise")
        return
    source = f"{int(told.sum())} kernels within {RAMP_NS // 1_000_000} ms after a rest"
    measures.add("after_rest_slowdown_ratio", spent / expected, "ratio", source=source)
    measures.add("after_rest_lost_ns", max(round(spent - expected), 0), "ns", source=source)


def _none(measures: Measures, why: str) -> None:
    measures.add("after_rest_slowdown_ratio", None, "ratio", source=why)
    measures.add("after_rest_lost_ns", None, "ns", source=why)
