"""All measures of one device inside a scope: time accounting first, then what explains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from infprof.distinct import distinct_values
from infprof.measures import calls, host
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.after_pauses import add_after_pauses
from infprof.measures.attention import add_attention
from infprof.measures.comm import add_comm
from infprof.measures.copies import DeviceCopies, add_copies
from infprof.measures.counters import Counters, add_counters, read_counters
from infprof.measures.host_calls import add_host_calls, add_profiler
from infprof.measures.host_parts import add_host_parts
from infprof.measures.idle import CAUSE, SYNC_TOLERANCE_NS, IdleModel
from infprof.measures.intervals import Intervals
from infprof.measures.kernels import add_kernels, few_sm_rows
from infprof.measures.launches import add_launches
from infprof.measures.names import MEASURES
from infprof.measures.operations import BLOCKED_NS, Prepared
from infprof.measures.peers import LONG_WAIT_NS
from infprof.measures.slices import DeviceTime, device_time
from infprof.quantiles import median
from infprof.results import COPY_CAUSES, IDLE_CAUSES, Measures
from infprof.trace import D2H, PINNED, BoolArray, IntArray, Trace, is_constant

# Between two launches of one step the host needs less than this; between steps there may be more to do.
SHORT_GAP_NS = 1_000_000

# A host whose launches wait this long in the queue, half of them, runs ahead of the device.
AHEAD_NS = 3_000_000

# A host thread is not using the CPU for the program while it is in one of these.
_BLOCKED = (host.SYNC, host.LOCK, host.IO, host.POLL, host.TERMINAL, host.PROFILER_TIME, host.CONTENTION)


class MeasureLimits(NamedTuple):
    """Thresholds that measures need (from rules/limits.yaml)."""

    unexplained_max: float
    small_kernel_ns: int
    small_copy_bytes: int


@dataclass
class DeviceAnalysis:
    """One device: its time, its measures, and the rows they were made of."""

    device: int
    time: DeviceTime
    measures: Measures
    rows: BoolArray
    copies: DeviceCopies
    counters: Counters | None
    processes: IntArray
    unexplained_excluded: bool

    @property
    def trace(self) -> Trace:
        return self.copies.prepared.trace


def recoverable_ns(measures: Measures) -> int:
    """Time that a change could win back: recoverable idle time and what communication and host copies expose."""
    names = ("recoverable_idle_ns", "exposed_comm_ns", "exposed_host_copy_ns")
    return sum(int(measures.value(name) or 0) for name in names)


def analyze_device(
    prepared: Prepared,
    model: IdleModel,
    device: int,
    scope: Intervals,
    limits: MeasureLimits,
    time: DeviceTime | None = None,
    step_starts: IntArray | None = None,
) -> DeviceAnalysis:
    """Time accounting and every measure of a device in a scope.

    ``time``: its accounting where that is there already; ``step_starts``: of its steps, sorted, where they are known.
    """
    ops = prepared.operations
    time = device_time(prepared, model, device, scope) if time is None else time
    # A kernel that the scope cuts still belongs to it.
    rows = (ops.device == device) & iv.overlaps(scope, ops.start, ops.end)
    processes = distinct_values(ops.process[ops.device == device])
    measures = Measures()
    excluded = _add_time(measures, time, limits)
    demand = int(measures.value("demand_ns") or 0)
    copies = DeviceCopies(prepared, time, rows)
    counters = read_counters(prepared, device, model.busy(device), scope)
    _add_loop(measures, prepared, model, time, demand)
    add_host_parts(measures, prepared, model, time, demand, step_starts)
    add_after_pauses(measures, prepared, model, time)
    add_launches(measures, prepared, rows)
    few = few_sm_rows(prepared, rows, prepared.trace.devices[device].sm_count)
    # Kernels that do not communicate: what of their time lies in the scope is compute time.
    few_sm = iv.intersect(iv.union(ops.start[few], ops.end[few]), scope)
    add_kernels(measures, prepared, rows, time.compute, few_sm, scope, device, limits.small_kernel_ns)
    add_attention(measures, prepared, rows)
    add_copies(measures, copies, demand, limits.small_copy_bytes)
    add_comm(measures, prepared, time, rows)
    add_host_calls(measures, prepared, scope, processes)
    add_profiler(measures, prepared, scope)
    _add_memory(measures, prepared, device, scope)
    why_none = "GPU metrics were not collected" if prepared.trace.counters is None else "no GPU metrics of this device"
    add_counters(measures, counters, time.compute, few_sm, why_none)
    unknown = [m.name for m in measures if m.name not in MEASURES]
    if unknown:
        raise AssertionError(f"measures without an entry in names.py: {unknown}")
    return DeviceAnalysis(device, time, measures, rows, copies, counters, processes, excluded)


def _add_time(measures: Measures, time: DeviceTime, limits: MeasureLimits) -> bool:
    """Slices and their shares of D; returns whether large unexplained idle time was taken out of D."""
    window = time.window_ns
    gaps = time.gaps
    by_cause = {cause: gaps.cause_ns(cause) for cause in IDLE_CAUSES}
    idle = sum(by_cause.values())
    comm = time.exposed_comm.total()
    copies = {cause: time.exposed_copy[cause].total() for cause in COPY_CAUSES}
    unexplained = by_cause["dependency"] - int(gaps.explained_ns.sum()) + by_cause["unknown"]
    excluded = unexplained > limits.unexplained_max * window
    demand = window - by_cause["no-demand"] - by_cause["profiler"] - (unexplained if excluded else 0)
    recoverable = idle - by_cause["kernel-gap"] - by_cause["no-demand"] - by_cause["profiler"]
    recoverable -= unexplained if excluded else 0

    def share(part: int, whole: int = demand) -> float | None:
        return part / whole if whole > 0 else None

    measures.add("window_ns", window, "ns")
    measures.add("demand_ns", demand, "ns")
    measures.add("compute_ns", time.compute.total(), "ns")
    measures.add("compute_ratio", share(time.compute.total()), "ratio")
    measures.add("exposed_comm_ns", comm, "ns")
    measures.add("exposed_comm_ratio", share(comm), "ratio")
    measures.add("exposed_copy_ns", sum(copies.values()), "ns")
    for cause, spent in copies.items():
        measures.add(f"exposed_copy_{cause}_ns", spent, "ns")
    host_copy = copies["h2d"] + copies["d2h"] + copies["uvm"]
    measures.add("exposed_host_copy_ns", host_copy, "ns")
    measures.add("exposed_host_copy_ratio", share(host_copy), "ratio")
    measures.add("busy_ns", window - idle, "ns")
    measures.add("busy_ratio", share(window - idle, window), "ratio")
    measures.add("idle_ns", idle, "ns")
    measures.add("idle_ratio", share(idle, window), "ratio")
    for cause, spent in by_cause.items():
        name = cause.replace("-", "_")
        measures.add(f"idle_{name}_ns", spent, "ns")
        measures.add(f"idle_{name}_ratio", share(spent), "ratio")
    waiting = int(gaps.explained_ns.sum()) if excluded else by_cause["dependency"]
    measures.add("waiting_work_ns", waiting, "ns")
    measures.add("waiting_work_ratio", share(waiting), "ratio")
    measures.add("recoverable_idle_ns", recoverable, "ns")
    measures.add("recoverable_idle_ratio", share(recoverable), "ratio")
    measures.add("no_demand_ratio", share(by_cause["no-demand"], window), "ratio")
    measures.add("profiler_ratio", share(by_cause["profiler"], window), "ratio")
    measures.add("unexplained_ratio", share(unexplained, window), "ratio")
    return excluded


def _add_loop(measures: Measures, prepared: Prepared, model: IdleModel, time: DeviceTime, demand: int) -> None:
    """The shape of the host's loop: whether its own part is longer than the GPU's, which decides what a sync costs.

    Where the host's part is the longer one, removing the wait gains nothing: the time after it is host work. Else the
    host could have run ahead, and the time is the sync's.
    """
    gaps = time.gaps
    measures.add("idle_gap_count", len(gaps.starts), "count")
    measures.add("sync_gap_count", int((gaps.causes[:, gaps.held].sum(axis=0) > 0).sum()), "count")
    measures.add("new_kernel_stall_count", int(gaps.new_kernel.sum()), "count")
    busy = time.window_ns - int(gaps.lengths.sum())
    thread = launching_thread(prepared, time)
    host_time = None
    if thread is not None:
        spent = model.timelines.spent(thread, time.scope.starts, time.scope.ends)
        blocked = int(sum(spent[label].sum() for label in _BLOCKED))
        blocked += _held_before_copies(prepared, model, time, thread)
        host_time = max(time.window_ns - blocked, 0)
    measures.add("host_time_ns", host_time, "ns")
    measures.add("host_to_gpu_ratio", host_time / busy if host_time is not None and busy else None, "ratio")
    host_is_longer = host_time is not None and host_time >= busy
    work, sync = gaps.cause_ns("host-work"), gaps.cause_ns("sync")
    # What a copy held back costs even where the host's part is the longer one: it could have worked meanwhile.
    blocked = _blocked_copy_idle(prepared, time) if sync else 0
    measures.add("blocked_copy_idle_ns", blocked, "ns")
    measures.add("blocked_copy_idle_ratio", blocked / demand if demand > 0 else None, "ratio")
    loop = work + (sync - blocked if host_is_longer else 0)
    # A host that works between steps does so for milliseconds; for longer it may as well wait for requests or a peer.
    unproven = 0
    if prepared.trace.os_calls is None:
        long = gaps.lengths >= LONG_WAIT_NS
        unproven = sum(int(gaps.causes[CAUSE[cause]][long].sum()) for cause in ("host-work", "sync"))
    measures.add("idle_peer_work_ns", int(gaps.peer_ns.sum()), "ns")
    measures.add("unproven_host_work_ns", unproven, "ns")
    measures.add("unproven_host_work_ratio", min(unproven / loop, 1.0) if loop else None, "ratio")
    _add_host_gaps(measures, prepared, time, host_is_longer)
    loss = blocked if host_is_longer else sync
    measures.add("idle_host_loop_ns", loop, "ns")
    measures.add("idle_host_loop_ratio", loop / demand if demand > 0 else None, "ratio")
    measures.add("idle_sync_loss_ns", loss, "ns")
    measures.add("idle_sync_loss_ratio", loss / demand if demand > 0 else None, "ratio")


def _held_before_copies(prepared: Prepared, model: IdleModel, time: DeviceTime, thread: int) -> int:
    """How long copy calls of the thread kept it waiting for the device's earlier work, before their own copy began, ns.

    Only of copies that wait: blocking ones, and those to the host, unless its memory is pinned. And only where the host
    is seen to run ahead otherwise: in a loop that waits in every turn it may need the time for itself.
    """
    table, copies, nested = prepared.trace.api_calls, prepared.trace.copies, prepared.thread_calls
    if table is None or copies is None or nested is None or thread not in nested.rows:
        return 0
    ops = prepared.operations
    launched = np.flatnonzero(_launched(ops, time) & (ops.kind == op.KERNEL))
    ahead = ops.start[launched] - table["end"][ops.launch[launched]]
    if not len(ahead) or median(ahead) < AHEAD_NS:
        return 0
    mine = np.flatnonzero((ops.kind == op.COPY) & (ops.launch >= 0) & (ops.device == time.device))
    call = nested.outer[ops.launch[mine]]
    row = ops.row[mine]
    returns = calls.matching(prepared.trace.strings, r"Async")[table["name"][call]]
    to_host = (copies["kind"][row] == D2H) & (copies["dst"][row] != PINNED)
    waits = (table["thread"][call] == thread) & (~returns | to_host) & (ops.start[mine] > table["start"][call])
    begun, until = table["start"][call[waits]], np.minimum(ops.start[mine[waits]], table["end"][call[waits]])
    held = until - begun > BLOCKED_NS
    inside = iv.intersect(iv.union(begun[held], until[held]), time.scope)
    return iv.intersect(inside, model.busy(time.device)).total()


def _blocked_copy_idle(prepared: Prepared, time: DeviceTime) -> int:
    """Idle time that copies cost which held back their callers although they should return at once, ns.

    In each gap at most as long as the calls lasted that were open when it began or that were made in it: without them
    the thread would have been there earlier by that much.
    """
    table, gaps = prepared.trace.api_calls, time.gaps
    rows = np.flatnonzero(prepared.blocked_copies)
    if table is None or not len(rows):
        return 0
    rows = rows[np.argsort(table["start"][rows], kind="stable")]
    start, end = table["start"][rows], table["end"][rows]
    spent = np.concatenate([[0], np.cumsum(end - start)])
    first = np.searchsorted(np.maximum.accumulate(end), gaps.starts - SYNC_TOLERANCE_NS)
    last = np.maximum(np.searchsorted(start, gaps.ends), first)
    return int(np.minimum(gaps.causes[CAUSE["sync"]], spent[last] - spent[first]).sum())


def _add_host_gaps(measures: Measures, prepared: Prepared, time: DeviceTime, with_sync: bool) -> None:
    """Whether the host's part lies between single launches (eager code) or between batches of them (steps)."""
    gaps, ops = time.gaps, prepared.operations
    part = gaps.causes[CAUSE["host-work"]] + (gaps.causes[CAUSE["sync"]] if with_sync else 0)
    here = part > 0
    mine = _launched(ops, time)
    per_gap = len(distinct_values(ops.launch[mine])) / int(here.sum()) if here.any() and mine.any() else None
    total = int(part.sum())
    short = int(part[gaps.lengths < SHORT_GAP_NS].sum())
    measures.add("host_gap_short_ratio", short / total if total else None, "ratio")
    measures.add("launches_per_host_gap", per_gap, "count")


def _launched(ops: op.Operations, time: DeviceTime) -> BoolArray:
    """The device's operations in the scope of which the launch is known."""
    low, high = int(time.scope.starts[0]), int(time.scope.ends[-1])
    mine: BoolArray = (ops.device == time.device) & (ops.launch >= 0) & (ops.end > low) & (ops.start < high)
    return mine


def launching_thread(prepared: Prepared, time: DeviceTime) -> int | None:
    """The thread that launches most of the device's operations in the scope."""
    ops, table = prepared.operations, prepared.trace.api_calls
    if table is None:
        return None
    mine = _launched(ops, time)
    kernels = mine & ((ops.kind == op.KERNEL) | (ops.kind == op.GRAPH))
    chosen = kernels if kernels.any() else mine
    if is_constant(table["thread"]) and chosen.any():
        return int(table["thread"][0]) if table["thread"][0] >= 0 else None
    threads = table["thread"][ops.launch[chosen]]
    threads = threads[threads >= 0]
    return int(np.bincount(threads).argmax()) if len(threads) else None


def _add_memory(measures: Measures, prepared: Prepared, device: int, scope: Intervals) -> None:
    table = prepared.trace.memory_events
    if table is None:
        measures.add("device_memory_peak_bytes", None, "bytes", source="memory usage was not collected")
        return
    # The sum runs from the start of the trace: what was allocated before the window is still there.
    mine = (table["device"] == device) & (table["time"] < int(scope.ends[-1]))
    live = np.cumsum(table["delta"][mine])
    inside = live[table["time"][mine] >= int(scope.starts[0])]
    before = live[len(live) - len(inside) - 1 : len(live) - len(inside)]
    peak = int(np.concatenate([before, inside]).max(initial=0))
    measures.add("device_memory_peak_bytes", peak, "bytes")
