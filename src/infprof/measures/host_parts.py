"""What the host's part of the loop consists of: work before sampling, long pauses, and who had the lock meanwhile."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from infprof.durations import in_words
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.idle import CAUSE, IdleModel
from infprof.measures.operations import Prepared
from infprof.measures.peers import LONG_WAIT_NS
from infprof.measures.slices import DeviceTime
from infprof.quantiles import median
from infprof.results import Measures, Problem
from infprof.trace import BoolArray, IntArray

# A pause is this long, and this many times the usual host part; more of them than this share of all are no exception.
PAUSE_NS, PAUSE_FACTOR, PAUSE_SHARE = 50_000_000, 10, 0.05
# One alone may be anything.
LEAST_PAUSES = 2
# With fewer steps from one to the next they are how the loop goes (a data loader, say), not exceptions to it.
STEPS_BETWEEN_PAUSES = 3
# Sampling begins with other kernels, too (penalties, a softmax): its own is among so many, with none of these before.
SAMPLING_WITHIN = 4
# Below this share of D a wait before sampling may as well be hidden by running ahead.
SAMPLING_SHARE = 0.2
_MODEL = ("gemm", "gemv", "attention", "moe", "norm", "rotary", "embedding", "communication")
# From this part of D on it is worth looking who had the lock.
LOCK_SHARE = 0.01
GARBAGE_COLLECTION = re.compile(r"(?<![a-z])gc(?![a-z])|garbage", re.IGNORECASE)


def add_host_parts(
    measures: Measures,
    prepared: Prepared,
    model: IdleModel,
    time: DeviceTime,
    demand: int,
    step_starts: IntArray | None = None,
) -> None:
    """Measures of one device; ``demand``: D, ns; ``step_starts``: sorted, None where no steps are known."""
    gaps = time.gaps
    part = gaps.causes[CAUSE["host-work"]] + gaps.causes[CAUSE["sync"]]
    sampling = int(part[_before_sampling(prepared, time)].sum()) if part.any() else 0
    measures.add("idle_before_sampling_ns", sampling, "ns", "D", "kernel names")
    share = sampling / demand if demand > 0 else None
    measures.add("idle_before_sampling_ratio", share, "ratio", "D", "kernel names")
    # Of the loss behind a wait what lies before sampling: the host's work, whoever waited, where it is most of the loop.
    loop, loss = (int(measures.value(f"idle_{name}_ns") or 0) for name in ("host_loop", "sync_loss"))
    large = sampling >= SAMPLING_SHARE * max(demand, 1) and 2 * sampling > loop + loss
    behind = max(min(sampling - loop, loss), 0) if large else 0
    measures.add("idle_sampling_loss_ns", behind, "ns", "D", "kernel names")
    new = _before_new_kernel(prepared, time)
    measures.add("idle_before_new_kernel_ns", int(part[new].sum()), "ns")
    _add_pauses(measures, prepared, time, part, new, step_starts)
    _add_lock_peers(measures, prepared, model, time, demand)


def _before_sampling(prepared: Prepared, time: DeviceTime) -> BoolArray:
    """Gaps behind which the device samples: among the next kernels one of that class, before any of the model's."""
    gaps, ops, kernels = time.gaps, prepared.operations, prepared.trace.kernels
    found = np.zeros(len(gaps.starts), dtype=np.bool_)
    kinds = np.zeros(len(prepared.trace.strings), dtype=np.int8)
    for index, named in prepared.kernel_classes.items():
        kinds[index] = 1 if named.kind == "sampling" else 2 if named.kind in _MODEL else 0
    if kernels is None or not (kinds == 1).any():
        return found
    # A graph that was traced whole is the model's.
    mine = np.flatnonzero(((ops.kind == op.KERNEL) | (ops.kind == op.GRAPH)) & (ops.device == time.device))
    kind = np.full(len(mine) + SAMPLING_WITHIN, 2, dtype=np.int8)
    told = np.flatnonzero(ops.kind[mine] == op.KERNEL)
    kind[told] = kinds[kernels["name"][ops.row[mine[told]]]]
    begun = np.flatnonzero(gaps.operation >= 0)
    following = np.searchsorted(mine, gaps.operation[begun])
    before_model = np.ones(len(begun), dtype=np.bool_)
    for place in range(SAMPLING_WITHIN):
        here = kind[following + place]
        found[begun] |= before_model & (here == 1)
        before_model &= here != 2
    return found


def _before_new_kernel(prepared: Prepared, time: DeviceTime) -> BoolArray:
    """Long gaps that end with the first launch of a kernel: what recordings without module loads show of compiling."""
    gaps = time.gaps
    found = (gaps.operation >= 0) & (gaps.lengths >= LONG_WAIT_NS)
    long = np.flatnonzero(found)
    found[long] = np.isin(prepared.operations.launch[gaps.operation[long]], prepared.first_launches)
    return found


def _add_pauses(
    measures: Measures,
    prepared: Prepared,
    time: DeviceTime,
    part: IntArray,
    before_new_kernel: BoolArray,
    step_starts: IntArray | None,
) -> None:
    """Few, long stretches of host work, and how regularly they come."""
    gaps = time.gaps
    worked = part[part > 0]
    least = max(PAUSE_NS, PAUSE_FACTOR * float(median(worked))) if len(worked) else PAUSE_NS
    long = np.flatnonzero(part >= least)
    if len(long) < LEAST_PAUSES or len(long) > PAUSE_SHARE * len(worked) or _every_step(gaps.starts[long], step_starts):
        long = long[:0]
    spent = int(part[long].sum())
    measures.add("host_pause_count", len(long), "count")
    measures.add("host_pause_ns", spent, "ns")
    # Behind a wait they are part of what the wait costs, where that is not the host's.
    behind = int(gaps.causes[CAUSE["sync"]][long].sum())
    lost = behind if (measures.value("host_to_gpu_ratio") or 0) < 1 else 0
    measures.add("host_pause_loop_ns", spent - lost, "ns")
    measures.add("host_pause_loss_ns", lost, "ns")
    apart = np.diff(gaps.starts[long])
    period = int(median(apart)) if len(apart) else None
    source = "median distance of their begins" if len(apart) else "no pauses"
    measures.add("host_pause_period_ns", period, "ns", source=source)
    measures.add("host_pause_new_kernel_count", int(before_new_kernel[long].sum()), "count")
    marked = iv.covered(_collections(prepared), gaps.starts[long], gaps.ends[long])
    measures.add("host_pause_gc_ns", int(marked.sum()), "ns", source="ranges that name garbage collection")


def _every_step(pauses: IntArray, step_starts: IntArray | None) -> bool:
    """Whether hardly more than a step lies between one pause and the next."""
    if step_starts is None or not len(step_starts):
        return False
    first, last = np.searchsorted(step_starts, (pauses[0], pauses[-1]))
    return bool(last - first < STEPS_BETWEEN_PAUSES * (len(pauses) - 1))


def _collections(prepared: Prepared) -> iv.Intervals:
    """When a range said that garbage was being collected."""
    table, strings = prepared.trace.ranges, prepared.trace.strings
    if table is None or not len(table):
        return iv.empty()
    named = np.array([bool(GARBAGE_COLLECTION.search(text)) for text in strings], dtype=np.bool_)
    mine = (table["text"] >= 0) & named[table["text"]]
    return iv.union(table["start"][mine], table["end"][mine])


def _add_lock_peers(measures: Measures, prepared: Prepared, model: IdleModel, time: DeviceTime, demand: int) -> None:
    """Of the idle time behind locks the share in which another thread of the process was known to work, and which."""
    from infprof.measures.device import launching_thread

    gaps = time.gaps
    waited = gaps.cause_ns("lock")
    thread = launching_thread(prepared, time)
    if waited < max(LOCK_SHARE * demand, 1) or thread is None:
        measures.add("lock_peer_working_ratio", None, "ratio", source="hardly any idle time behind locks")
        return
    locks = iv.intersect(model.locks(thread), iv.union(gaps.starts, gaps.ends))
    threads = prepared.trace.threads
    worked: dict[int, int] = {}
    for other, busy in model.workers(thread):
        if threads[other].process == threads[thread].process:
            worked[other] = worked.get(other, 0) + iv.intersect(locks, busy).total()
    if not worked or locks.total() == 0:
        measures.add("lock_peer_working_ratio", None, "ratio", source="what other threads did was not recorded")
        return
    most = max(worked, key=lambda other: worked[other])
    named = threads[most].name or "thread"
    share = min(worked[most] / locks.total(), 1.0)
    measures.add("lock_peer_working_ratio", share, "ratio", source=f"thread {threads[most].tid} ({named})")


def add_peer_pauses(all_measures: Sequence[Measures], devices: Sequence[int]) -> list[Problem]:
    """The longest pauses of another device, beside those of each; which device paused, as a problem where others wait."""
    paused = [int(m.value("host_pause_ns") or 0) for m in all_measures]
    for number, measures in enumerate(all_measures):
        others = [n for n in range(len(paused)) if n != number and paused[n]]
        worst = max(others, key=lambda n: paused[n]) if others else None
        for name, unit in (("count", "count"), ("ns", "ns"), ("period_ns", "ns"), ("gc_ns", "ns")):
            value = all_measures[worst].value(f"host_pause_{name}") if worst is not None else None
            none = "no other GPU's host paused" if len(paused) > 1 else "the trace is of one GPU"
            source = none if worst is None else f"GPU {devices[worst]}"
            measures.add(f"peer_pause_{name}", value, unit, source=source)
    worst = int(np.argmax(paused)) if paused else 0
    if len(paused) < 2 or paused.count(0) != len(paused) - 1:
        return []
    count, period = all_measures[worst].value("host_pause_count"), all_measures[worst].value("host_pause_period_ns")
    every = f", every {in_words(int(period))}" if period else ""
    return [
        Problem(
            "one-gpu-pauses",
            f"The host of GPU {devices[worst]} alone worked for {in_words(paused[worst] // max(int(count or 1), 1))} at a time "
            f"without launching anything, {count} times{every}. What other GPUs did meanwhile in collectives was waiting.",
            int(count or 0),
        )
    ]
