"""Where a device's time went: slices that add up to the scope, to the nanosecond.

compute = a non-communication kernel (or whole graph) runs; exposed communication = a communication kernel runs and no
compute kernel does; exposed copy = a copy or memset runs and no kernel does (of several kinds at once the first of
h2d, d2h, uvm, p2p, d2d, memset counts); idle = nothing runs, by cause (measures/idle.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infprof import trace as t
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.idle import IdleGaps, IdleModel
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.results import COPY_CAUSES, IDLE_CAUSES, Slice

# Copies of the host to itself use the link's host side; kinds unknown to the reader count as moves within the device.
_SLICE_OF_COPY = {
    t.H2D: "h2d",
    t.D2H: "d2h",
    t.UVM: "uvm",
    t.P2P: "p2p",
    t.D2D: "d2d",
    t.H2H: "h2d",
    t.OTHER_COPY: "d2d",
}
_PRIORITY = ("h2d", "d2h", "uvm", "p2p", "d2d", "memset")


@dataclass
class DeviceTime:
    """The sets of one device inside a scope; ``gaps`` holds its idle time by cause."""

    device: int
    scope: Intervals
    compute: Intervals
    exposed_comm: Intervals
    comm: Intervals
    exposed_copy: dict[str, Intervals]
    gaps: IdleGaps

    @property
    def window_ns(self) -> int:
        return self.scope.total()

    def slices(self) -> list[Slice]:
        """All slices that are not zero, in the contract's order; their sum is ``window_ns``."""
        out = [
            Slice("compute", None, self.compute.total()),
            Slice("exposed_communication", None, self.exposed_comm.total()),
        ]
        out += [Slice("exposed_copy", cause, self.exposed_copy[cause].total()) for cause in COPY_CAUSES]
        out += [Slice("idle", cause, self.gaps.cause_ns(cause)) for cause in IDLE_CAUSES]
        kept = [s for s in out if s.ns]
        total = sum(s.ns for s in kept)
        if total != self.window_ns:
            raise AssertionError(f"slices of device {self.device} add up to {total}, not to {self.window_ns} ns")
        return kept


def device_time(prepared: Prepared, model: IdleModel, device: int, scope: Intervals) -> DeviceTime:
    """The exact time accounting of one device inside a scope (a set of intervals)."""
    ops = prepared.operations
    mine = ops.device == device

    def covered(rows: t.BoolArray | t.IntArray) -> Intervals:
        return iv.intersect(iv.union(ops.start[rows], ops.end[rows]), scope)

    kernels = mine & ((ops.kind == op.KERNEL) | (ops.kind == op.GRAPH))
    compute = covered(kernels & ~ops.is_comm)
    comm = covered(kernels & ops.is_comm)
    table = prepared.trace.copies
    copies = np.flatnonzero(mine & (ops.kind == op.COPY))
    kind_of = table["kind"][ops.row[copies]] if table is not None else np.empty(0, dtype=np.int64)
    taken = [compute, comm]
    exposed: dict[str, Intervals] = {}
    for cause in _PRIORITY:
        if cause == "memset":
            rows = np.flatnonzero(mine & (ops.kind == op.MEMSET))
        else:
            rows = copies[np.isin(kind_of, [k for k, c in _SLICE_OF_COPY.items() if c == cause])]
        here = covered(rows)
        for earlier in taken:
            here = iv.subtract(here, earlier)
        exposed[cause] = here
        taken.append(here)
    return DeviceTime(
        device=device,
        scope=scope,
        compute=compute,
        exposed_comm=iv.subtract(comm, compute),
        comm=comm,
        exposed_copy=exposed,
        gaps=model.gaps(device, scope),
    )
