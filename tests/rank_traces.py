"""Traces of the ranks of one job, with arrivals that the caller decides: nsys exports, and the columns themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from infprof.measures.collectives import DeviceCollectives
from infprof.simulator.builder import TraceBuilder
from infprof.trace import IntArray

US, MS, S = 1_000, 1_000_000, 1_000_000_000
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
EPOCH_NS = 1_700_000_000 * S
STEP_NS = 2 * MS
TRANSFER_NS = 100 * US

# How much later than the earliest the rank arrives at this step, ns.
Late = Callable[[int, int], int]
# The rank's own clock: what it shows at a true time.
ClockOf = Callable[[int, int], int]


def same_clock(rank: int, true_ns: int) -> int:
    return true_ns


def starts_and_end(step: int, ranks: int, late: Late) -> tuple[list[int], int]:
    """True arrival of each rank at a step's all-reduce, and when all leave it. Steps lie a little unevenly."""
    begin = step * STEP_NS + (step * 7919 % 97) * US + MS
    arrivals = [begin + late(rank, step) for rank in range(ranks)]
    return arrivals, max(arrivals) + TRANSFER_NS


def write_ranks(
    folder: Path,
    ranks: int,
    late: Late,
    *,
    steps: int = 60,
    computes: bool = True,
    clock: ClockOf = same_clock,
    wall_clock: bool = True,
    name: str = "rank{rank}.sqlite",
    only: Sequence[int] | None = None,
) -> list[Path]:
    """One nsys export per rank: a GEMM, then an all-reduce that all leave together.

    A late rank's GEMM is longer (``computes``), or its host launches the GEMM later. All GEMMs else end on arrival.
    """
    out = []
    for rank in range(ranks) if only is None else only:
        builder = TraceBuilder()
        builder.gpu("NVIDIA H100 80GB HBM3")
        thread = builder.thread()
        before = 0
        for step in range(steps):
            arrivals, end = starts_and_end(step, ranks, late)
            # The GEMM ends as the rank arrives, and is longer or later on the late one.
            gemm = min(arrivals) - 600 * US
            length = arrivals[rank] - gemm if computes else min(arrivals) - gemm
            start = arrivals[rank] - length
            for begin, stop, kernel in ((start, arrivals[rank], "gemm_kernel"), (arrivals[rank], end, ALL_REDUCE)):
                called = max(begin - 20 * US, before)
                at = clock(rank, called)
                builder.launch(
                    at, 5 * US, clock(rank, begin), clock(rank, stop) - clock(rank, begin), kernel, thread=thread
                )
                before = called + 6 * US
        builder.session(clock(rank, 0), clock(rank, (steps + 1) * STEP_NS), utc_epoch_ns=EPOCH_NS)
        if not wall_clock:
            builder.drop_column("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
        folder.mkdir(parents=True, exist_ok=True)
        out.append(builder.write(folder / name.format(rank=rank)))
    return out


def columns(
    start: Sequence[int] | IntArray,
    end: Sequence[int] | IntArray,
    *,
    operation: str = "all-reduce",
    group: str | None = None,
    sequence: Sequence[int] | None = None,
    size: int = -1,
    bytes: int = -1,
    compute_before: Sequence[int] | None = None,
    idle_before: Sequence[int] | None = None,
) -> DeviceCollectives:
    """The collectives of one device as alignment sees them."""
    count = len(start)
    names = [operation] if group is None else [operation, group]

    def column(values: Sequence[int] | IntArray | None, default: int) -> IntArray:
        return np.full(count, default, dtype=np.int64) if values is None else np.asarray(values, dtype=np.int64)

    return DeviceCollectives(
        device=0,
        names=names,
        start=column(start, 0),
        end=column(end, 0),
        operation=column(None, 0),
        group=column(None, -1 if group is None else 1),
        group_size=column(None, size),
        sequence=column(sequence, -1),
        bytes=column(None, bytes),
        compute_before=column(compute_before, 0),
        idle_before=column(idle_before, 0),
        in_window=np.ones(count, dtype=np.bool_),
    )
