"""Which part of the trace is analysed: the whole, a stretch the user names, a range's occurrences, or the steady part.

A scope is a set of intervals; ``auto``, ``full`` and ``A:B`` give one interval, ``--range`` one per occurrence.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from dataclasses import dataclass, field

import numpy as np

from infprof.distinct import distinct_values
from infprof.errors import UsageError
from infprof.measures import calls
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.idle import CAUSE, IdleModel
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.measures.ranges import project
from infprof.results import LeftOut
from infprof.trace import H2D, IntArray

# So many ranges are named where none of them comes near what was asked for.
_NAMED_RANGES = 5
_UNITS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "min": 60 * 10**9}

# Start-up stalls follow each other: a stall belongs to start-up while the quiet time before it is at most this many
# times the stall itself. A single late stall in minutes of serving is a finding, not start-up. Long gaps of host work
# are not quiet: the program is still preparing itself.
LINK_FACTOR = 4
_PREPARING = ("host-work", "io", "lock", "allocator", "module-load")
# An allocation alone says start-up only while hardly anything has run; later it is churn.
EARLY_KERNELS = 50
# Operations before a cut hold less than this share of the busy time.
CUT_BUSY_SHARE = 0.01
# The host spent this share of a cut in a blocking call.
CUT_BLOCKED_SHARE = 0.8
# Weights are uploaded before the first kernel: this share of all host-to-device bytes, in under half of the trace.
UPLOAD_BYTES_SHARE = 0.8


@dataclass
class SteadyPart:
    """From when to when the program was past its start-up; ``left_out`` says what lies outside."""

    start_ns: int
    end_ns: int
    left_out: list[LeftOut] = field(default_factory=list)


@dataclass
class Scope:
    """What is analysed. ``how`` says how it was chosen."""

    intervals: Intervals
    how: str
    left_out: list[LeftOut]


def span(prepared: Prepared) -> tuple[int, int]:
    """First start to last end of any GPU operation on any device: what ``full`` means."""
    ops = prepared.operations
    return int(ops.start.min()), int(ops.end.max())


def steady_part(prepared: Prepared, model: IdleModel, startup_stall_ns: int) -> SteadyPart:
    """The trace without start-up and without the cuts at its ends.

    Start-up is a prefix of stalls: idle gaps with at least ``startup_stall_ns`` of module loading, compiling, graph
    capture or first allocations, chained while the quiet time between them stays small (LINK_FACTOR). The model must
    have been made without a steady part, so that long context and capture calls count as loading.
    """
    low, high = span(prepared)
    start, end = low, high
    stalls = _stalls(prepared, model, startup_stall_ns, iv.single(low, high))
    preparing = 0
    for gap_start, gap_end, stall, prepared_ns in stalls:
        if gap_end <= start:
            continue
        if stall:
            if gap_start - start - preparing > LINK_FACTOR * stall:
                break
            start, preparing = gap_end, 0
        else:
            preparing += prepared_ns
    left_out = []
    if start > low:
        left_out.append(LeftOut("start-up: module load, compilation, first allocations", start - low))
    upload_end = _upload_end(prepared, start, end)
    if upload_end > start:
        left_out.append(LeftOut("weight upload before the first kernel", upload_end - start))
        start = upload_end
    cut_start, cut_end = _without_cuts(prepared, model, start, end)
    if cut_start > start:
        left_out.append(LeftOut("cut at the start of the recording", cut_start - start))
    if cut_end < end:
        left_out.append(LeftOut("cut at the end of the recording", end - cut_end))
    return SteadyPart(cut_start, cut_end, left_out)


def _stalls(
    prepared: Prepared, model: IdleModel, startup_stall_ns: int, scope: Intervals
) -> list[tuple[int, int, int, int]]:
    """Long gaps in order: (start, end, stall by loading, compiling or first allocations or 0, time of preparing)."""
    ops = prepared.operations
    kernels = np.flatnonzero(ops.kind == op.KERNEL)
    # Until this kernel hardly anything has run.
    last_early = ops.start[kernels[EARLY_KERNELS - 1]] if len(kernels) >= EARLY_KERNELS else np.iinfo(np.int64).max
    found: list[tuple[int, int, int, int]] = []
    for device in range(len(prepared.trace.devices)):
        gaps = model.gaps(device, scope, shortest_ns=startup_stall_ns)
        loading = gaps.causes[CAUSE["module-load"]]
        allocating = gaps.causes[CAUSE["allocator"]]
        early = gaps.starts <= last_early
        stall = np.where((loading >= startup_stall_ns) | early, loading + allocating, 0)
        stall = np.where(stall >= startup_stall_ns, stall, 0)
        busy_host = np.sum([gaps.causes[CAUSE[c]] for c in _PREPARING], axis=0)
        found += zip(gaps.starts.tolist(), gaps.ends.tolist(), stall.tolist(), busy_host.tolist(), strict=True)
    return sorted(found)


def _upload_end(prepared: Prepared, start: int, end: int) -> int:
    """Where a weight upload ends: the first kernel after a stretch of copies that hold most host-to-device bytes."""
    ops, copies = prepared.operations, prepared.trace.copies
    kernels = (ops.kind == op.KERNEL) | (ops.kind == op.GRAPH)
    later = kernels & (ops.start >= start)
    if copies is None or not later.any():
        return start
    first = int(ops.start[later].min())
    h2d = copies["kind"] == H2D
    inside = h2d & (copies["start"] >= start)
    total = int(copies["bytes"][inside].sum())
    before = inside & (copies["end"] <= first)
    uploaded = int(copies["bytes"][before].sum())
    if not total or uploaded < UPLOAD_BYTES_SHARE * total or 2 * (first - start) > end - start:
        return start
    # Where copies stay the main work afterwards, the first ones are work too, not a preparation.
    after = iv.union(copies["start"][copies["start"] >= first], copies["end"][copies["start"] >= first])
    return start if after.total() > (first - start) // 2 else first


def _without_cuts(prepared: Prepared, model: IdleModel, start: int, end: int) -> tuple[int, int]:
    """The stretch without a leading or trailing queued gap that the host spent blocked, all devices idle."""
    busy = iv.clip(iv.merge(*(model.busy(device) for device in range(len(prepared.trace.devices)))), start, end)
    if busy.count < 2:
        return start, end
    gaps = iv.complement(busy, start, end)
    total = busy.total()
    # Only a gap that would change the picture is worth leaving out.
    large = gaps.ends - gaps.starts > total * CUT_BUSY_SHARE
    gap_starts, gap_ends = gaps.starts[large], gaps.ends[large]
    done = iv.measure_before(busy, gap_starts)
    leading = done < CUT_BUSY_SHARE * total
    trailing = total - done < CUT_BUSY_SHARE * total
    for i in np.flatnonzero(leading | trailing):
        gap_start, gap_end = int(gap_starts[i]), int(gap_ends[i])
        if not _is_queued_and_blocked(prepared, model, gap_start, gap_end):
            continue
        if leading[i]:
            start = max(start, gap_end)
        elif trailing[i]:
            end = min(end, gap_start)
            break
    return start, end


def _is_queued_and_blocked(prepared: Prepared, model: IdleModel, start: int, end: int) -> bool:
    ops, table = prepared.operations, prepared.trace.api_calls
    ending = np.flatnonzero(ops.start == end)
    ending = ending[ops.launch[ending] >= 0]
    if table is None or not len(ending):
        return False
    launch = ops.launch[ending[0]]
    queued = end - max(start, min(int(table["end"][launch]), end))
    if queued < CUT_BLOCKED_SHARE * (end - start):
        return False
    from infprof.measures import host

    thread, enough = int(table["thread"][launch]), CUT_BLOCKED_SHARE * (end - start)
    spent = model.timelines.spent(thread, np.array([start]), np.array([end]))
    if int(spent[host.SYNC][0] + spent[host.LOCK][0]) >= enough:
        return True
    # A copy behind the queued work: its call does not return before either.
    is_copy = (prepared.api_kinds == calls.COPY).take(table["name"])
    copies = np.flatnonzero(is_copy & (table["thread"] == thread))
    inside = np.minimum(table["end"][copies], end) - np.maximum(table["start"][copies], start)
    return bool((inside >= enough).any())


def named_scope(prepared: Prepared, spec: str, steady: SteadyPart) -> Scope:
    """The scope for ``--window``: ``auto``, ``full`` or ``A:B`` with units, from the start of the trace.

    Raises UsageError with one sentence for anything else.
    """
    low, high = span(prepared)
    if spec == "full":
        return Scope(iv.single(low, high), "full", [])
    if spec == "auto":
        return Scope(iv.single(steady.start_ns, steady.end_ns), "steady part", list(steady.left_out))
    start, end = parse_window(spec)
    first, last = low if start is None else start, high if end is None else end
    if first >= high or last <= low:
        raise UsageError(
            f"--window {spec} holds no GPU operation: they lie between {low / 1e9:.6f}s and {high / 1e9:.6f}s."
        )
    left_out = []
    if first > low:
        left_out.append(LeftOut("before the window", first - low))
    if last < high:
        left_out.append(LeftOut("after the window", high - last))
    return Scope(iv.single(first, last), f"--window {spec}", left_out)


def parse_window(spec: str) -> tuple[int | None, int | None]:
    """``A:B`` as ns; either side may be left out. Raises UsageError."""
    parts = spec.split(":")
    if len(parts) != 2 or not any(p.strip() for p in parts):
        raise UsageError(f"--window {spec}: write auto, full, or two times with a unit such as 1.5s:4s or 200ms:.")
    start, end = (_time(p.strip(), spec) for p in parts)
    if start is not None and end is not None and end <= start:
        raise UsageError(f"--window {spec} ends before it starts.")
    return start, end


def _time(text: str, spec: str) -> int | None:
    if not text:
        return None
    match = re.fullmatch(r"(-?(?:\d+(?:\.\d*)?|\.\d+))\s*([a-zµ]+)", text)
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"--window {spec}: {text!r} is no time with a unit (ns, us, ms, s, min).")
    time = round(float(match[1]) * _UNITS[match[2]])
    if time >= 2**62:
        raise UsageError(f"--window {spec}: {text!r} is beyond any trace.")
    return time


def no_ranges(option: str, prepared: Prepared) -> UsageError:
    """What to say where a range is asked for and there is none, in the words of whatever recorded the trace."""
    how = (
        "record with --trace=cuda,nvtx"
        if prepared.trace.provenance.tool == "nsys"
        else "torch.profiler.record_function() around a part of the program makes one"
    )
    return UsageError(f"{option}: this trace holds no NVTX ranges or annotations; {how}.")


def no_such_range(option: str, name: str, prepared: Prepared) -> UsageError:
    """What to say where no range has a name: those that come near, else those that take the most time."""
    table, strings = prepared.trace.ranges, prepared.trace.strings
    assert table is not None
    named = table["text"] >= 0
    text, length = table["text"][named], (table["end"] - table["start"])[named]
    spent = np.bincount(text, weights=np.maximum(length, 0), minlength=len(strings))
    there = [i for i in np.argsort(-spent, kind="stable").tolist() if spent[i] > 0] or distinct_values(text).tolist()
    near = difflib.get_close_matches(name, [strings[i] for i in there], n=3, cutoff=0.4)
    if near:
        hint = f"Did you mean {', '.join(repr(n) for n in near)}?"
    else:
        more = f" and {len(there) - _NAMED_RANGES} more" if len(there) > _NAMED_RANGES else ""
        hint = f"There are: {', '.join(repr(strings[i]) for i in there[:_NAMED_RANGES])}{more}."
    return UsageError(f"{option}: no range or annotation is named {name!r}. {hint}")


def range_scope(prepared: Prepared, name: str) -> Scope:
    """All occurrences of an NVTX range by name (or a pattern with ``*``), projected to the GPU by correlation.

    Raises UsageError where ranges were not collected, none has the name, or nothing ran for it.
    """
    trace = prepared.trace
    if trace.ranges is None or not len(trace.ranges):
        raise no_ranges("--range", prepared)
    used = [i for i in distinct_values(trace.ranges["text"]).tolist() if i >= 0]
    texts = {trace.strings[i]: i for i in used}
    chosen = [i for text, i in texts.items() if text == name or fnmatch.fnmatchcase(text, name)]
    if not chosen:
        raise no_such_range("--range", name, prepared)
    rows: IntArray = np.flatnonzero(np.isin(trace.ranges["text"], np.array(chosen)))
    projected = project(prepared, rows)
    ran = projected.kernels > 0
    if not ran.any():
        raise UsageError(f"--range: nothing ran on a GPU for {name!r}: no operation was launched inside it.")
    scope = iv.union(projected.gpu_start[ran], projected.gpu_end[ran])
    low, high = span(prepared)
    how = f"--range {name}: {int(ran.sum())} occurrences projected to the GPU"
    return Scope(scope, how, [LeftOut("outside the range", high - low - scope.total())])
