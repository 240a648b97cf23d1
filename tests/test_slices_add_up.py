"""The accounting of a device's time on random small traces, against a count of single nanoseconds."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infprof import trace as t
from infprof.diagnosis import Options, analyze
from infprof.errors import UsageError
from infprof.measures import host, idle
from infprof.measures import intervals as iv
from infprof.measures.host import HostLimits, HostTimelines
from infprof.measures.idle import CAUSE, IdleLimits, IdleModel
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.measures.slices import device_time
from infprof.resources import rules_dir
from infprof.results import COPY_CAUSES, IDLE_CAUSES
from infprof.rules import load

LENGTH = 120
DEVICES, PROCESSES = 2, 2
# Threads 0 and 1 belong to process 0, thread 2 to process 1.
PROCESS_OF_THREAD = (0, 0, 1)
COMPUTE, COMM = "gemm_kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
CALLS = (
    "cudaLaunchKernel",
    "cudaMemcpyAsync",
    "cudaStreamSynchronize",
    "cudaMalloc",
    "cudaFree",
    "cuModuleLoadData",
    "cudaGetDevice",
    "cudaGraphLaunch",
)
OS_CALLS = ("poll", "pthread_cond_wait", "read", "fgetc", "clock_nanosleep")
STRINGS = [COMPUTE, COMM, *CALLS, *OS_CALLS, "step", "Triton compile"]
# Which kind of copy counts first where several run at once; host to host uses the link, an unknown kind the device.
COPY_SLICES = {t.H2D: "h2d", t.H2H: "h2d", t.D2H: "d2h", t.UVM: "uvm", t.P2P: "p2p", t.D2D: "d2d", t.OTHER_COPY: "d2d"}
PRIORITY = ("h2d", "d2h", "uvm", "p2p", "d2d", "memset")
LIMITS = IdleLimits(kernel_gap_ns=2, host=HostLimits(first_launch_factor=3.0, startup_stall_ns=15, stdin_read_ns=5))
RULES = load([rules_dir()])

TIME = st.integers(0, LENGTH)
# Zero-length and negative rows too: the reader drops those of GPU tables, but nothing else may rest on that.
STRETCH = st.tuples(TIME, st.integers(-3, 25)).map(lambda p: (p[0], p[0] + p[1]))
FORWARD = st.tuples(TIME, st.integers(0, 25)).map(lambda p: (p[0], p[0] + p[1]))
# What a reader lets through.
POSITIVE = st.tuples(TIME, st.integers(1, 25)).map(lambda p: (p[0], p[0] + p[1]))
PLACE = st.tuples(st.integers(0, DEVICES - 1), st.integers(0, PROCESSES - 1), st.integers(0, 1))
# Few ids, so that both processes use the same ones, several operations share a launch and others have none.
CORRELATION = st.integers(-1, 7)
THREAD = st.integers(-1, len(PROCESS_OF_THREAD) - 1)
STREAMS = [t.Stream(d, p, 1, s) for d in range(DEVICES) for p in range(PROCESSES) for s in range(2)]


def table(name: str, rows: list[dict[str, Any]]) -> t.Table:
    columns = {c: np.array([row.get(c, -1) for row in rows], dtype=np.int64) for c in t.SCHEMA[name]}
    return t.Table(name, columns).sorted_by("start")


@st.composite
def gpu_rows(
    draw: st.DrawFn, most: int, stretch: st.SearchStrategy[tuple[int, int]], **extra: Any
) -> list[dict[str, Any]]:
    rows = []
    for _ in range(draw(st.integers(0, most))):
        (start, end), (device, process, stream) = draw(stretch), draw(PLACE)
        place = STREAMS.index(t.Stream(device, process, 1, stream))
        row = {"start": start, "end": end, "device": device, "process": process, "stream": place}
        rows.append(row | {"correlation": draw(CORRELATION)} | {key: draw(value) for key, value in extra.items()})
    return rows


@st.composite
def host_rows(draw: st.DrawFn, most: int, **extra: Any) -> list[dict[str, Any]]:
    rows = []
    for _ in range(draw(st.integers(0, most))):
        (start, end), thread = draw(FORWARD), draw(THREAD)
        process = PROCESS_OF_THREAD[thread] if thread >= 0 else -1
        rows.append({"start": start, "end": end, "thread": thread, "process": process})
        rows[-1] |= {key: draw(value) for key, value in extra.items()}
    return rows


def names(of: tuple[str, ...]) -> st.SearchStrategy[int]:
    return st.sampled_from([STRINGS.index(name) for name in of])


@st.composite
def traces(draw: st.DrawFn, stretch: st.SearchStrategy[tuple[int, int]] = STRETCH) -> t.Trace:
    kernels = draw(gpu_rows(8, stretch, name=names((COMPUTE, COMM))))
    for row in kernels:
        row |= {"grid_blocks": 64, "block_threads": 128}
    copy_kind = st.integers(0, len(t.COPY_KIND_NAMES) - 1)
    memory = st.integers(0, t.UNKNOWN_MEMORY)
    optional = {
        "graphs": gpu_rows(2, stretch, graph=st.just(1)),
        "copies": gpu_rows(6, stretch, kind=copy_kind, src=memory, dst=memory, bytes=st.integers(0, 10**9)),
        "memsets": gpu_rows(3, stretch, bytes=st.integers(0, 10**6)),
        "syncs": gpu_rows(3, FORWARD, kind=st.integers(1, 4), record=st.just(-1), record_stream=st.just(-1)),
        "api_calls": host_rows(
            12, correlation=CORRELATION, name=names(CALLS), return_value=st.sampled_from([0, 0, 0, 2])
        ),
        "os_calls": host_rows(6, name=names(OS_CALLS)),
        "off_cpu": host_rows(3),
        "overheads": host_rows(3, kind=st.integers(0, 2)),
        "ranges": host_rows(4, text=names(("step", "Triton compile")), kind=st.integers(0, 1)),
    }
    tables: dict[str, t.Table | None] = {"kernels": table("kernels", kernels)}
    for name, strategy in optional.items():
        # None = not collected; an empty table = collected, and nothing happened.
        rows = draw(st.none() | strategy)
        tables[name] = (
            None if rows is None else table(name, [{k: r[k] for k in r if k in t.SCHEMA[name]} for r in rows])
        )
    lost = draw(st.none() | st.lists(st.tuples(st.integers(0, 1), st.integers(0, 7)), min_size=1, max_size=3))
    dropped = None if lost is None else (np.array([p for p, _ in lost]), np.array([c for _, c in lost]))
    return t.Trace(
        strings=list(STRINGS),
        devices=[t.Device(i, "NVIDIA H100 80GB HBM3", 132, 80 << 30, (9, 0)) for i in range(DEVICES)],
        processes=[t.Process(100 + p, "python") for p in range(PROCESSES)],
        threads=[t.Thread(p, 100 + i) for i, p in enumerate(PROCESS_OF_THREAD)],
        streams=list(STREAMS),
        provenance=t.TraceProvenance("nsys", "2023.4", ["random.sqlite"]),
        dropped_launches=dropped,
        dropped_operations=0 if lost is None else len(lost),
        **tables,  # type: ignore[arg-type]
    )


# One window, or several stretches as of a range's occurrences; also before and after everything that ran.
BOUNDS = st.integers(-20, LENGTH + 60)
SCOPES = (
    st.lists(st.tuples(BOUNDS, st.integers(1, 60)), min_size=1, max_size=5)
    .map(lambda pairs: np.array(pairs, dtype=np.int64))
    .map(lambda pairs: iv.union(pairs[:, 0], pairs[:, 0] + pairs[:, 1]))
)


def nanoseconds(rows: t.Table | None, device: int, chosen: Any = None) -> set[int]:
    if rows is None:
        return set()
    keep = (rows["device"] == device) & (True if chosen is None else chosen)
    return {
        ns for s, e in zip(rows["start"][keep].tolist(), rows["end"][keep].tolist(), strict=True) for ns in range(s, e)
    }


def reference(trace: t.Trace, device: int, scope: set[int]) -> dict[tuple[str, str | None], int]:
    """Slice → ns: each nanosecond of the scope goes to the first thing that runs in it."""
    kernels, copies = trace.kernels, trace.copies
    assert kernels is not None
    is_comm = kernels["name"] == STRINGS.index(COMM)
    layers: list[tuple[tuple[str, str | None], set[int]]] = [
        (("compute", None), nanoseconds(kernels, device, ~is_comm) | nanoseconds(trace.graphs, device)),
        (("exposed_communication", None), nanoseconds(kernels, device, is_comm)),
    ]
    for cause in PRIORITY:
        if cause == "memset":
            rows = nanoseconds(trace.memsets, device)
        else:
            kinds = [kind for kind, name in COPY_SLICES.items() if name == cause]
            rows = nanoseconds(copies, device, np.isin(copies["kind"], kinds)) if copies is not None else set()
        layers.append((("exposed_copy", cause), rows))
    out: dict[tuple[str, str | None], int] = {}
    left = set(scope)
    for key, running in layers:
        out[key] = len(left & running)
        left -= running
    out["idle", None] = len(left)
    return out


def members(inside: Intervals) -> set[int]:
    return {ns for s, e in zip(inside.starts.tolist(), inside.ends.tolist(), strict=True) for ns in range(s, e)}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(traces(), SCOPES, st.none() | st.integers(0, LENGTH))
def test_slices_are_a_count_of_nanoseconds(trace: t.Trace, scope: Intervals, steady_ns: int | None) -> None:
    prepared = Prepared(trace)
    model = IdleModel(prepared, LIMITS, steady_ns)
    for device in range(DEVICES):
        time = device_time(prepared, model, device, scope)
        slices = time.slices()
        assert all(s.ns > 0 for s in slices)
        assert sum(s.ns for s in slices) == scope.total() == time.window_ns
        expected = reference(trace, device, members(scope))
        found = {(s.kind, s.cause): s.ns for s in slices if s.kind != "idle"}
        found["idle", None] = sum(s.ns for s in slices if s.kind == "idle")
        assert {key: ns for key, ns in found.items() if ns} == {key: ns for key, ns in expected.items() if ns}
        assert {s.cause for s in slices if s.kind == "idle"} <= set(IDLE_CAUSES)
        assert {s.cause for s in slices if s.kind == "exposed_copy"} <= set(COPY_CAUSES)
        # Every gap by itself: no cause below zero, and together the gap, to the nanosecond.
        gaps = time.gaps
        assert (gaps.causes >= 0).all()
        assert gaps.causes.sum(axis=0).tolist() == gaps.lengths.tolist()
        assert members(Intervals(gaps.starts, gaps.ends)) == members(scope) - members(model.busy(device))
        assert (gaps.explained_ns >= 0).all() and (gaps.explained_ns <= gaps.causes[CAUSE["dependency"]]).all()


def test_a_device_whose_only_operation_was_lost_is_idle_for_an_unknown_reason() -> None:
    """Its launch is known, its operation had no usable times: there is no operation at all that could end a gap."""
    call = {"start": 10, "end": 20, "thread": 0, "process": 0, "correlation": 7}
    trace = t.Trace(
        strings=list(STRINGS),
        devices=[t.Device(0, "NVIDIA H100 80GB HBM3", 132, 80 << 30, (9, 0))],
        processes=[t.Process(100, "python")],
        threads=[t.Thread(0, 100)],
        streams=[],
        provenance=t.TraceProvenance("nsys", "2023.4", ["lost.sqlite"]),
        kernels=table("kernels", []),
        api_calls=table("api_calls", [call | {"name": STRINGS.index("cudaLaunchKernel"), "return_value": 0}]),
        dropped_launches=(np.array([0]), np.array([7])),
        dropped_operations=1,
    )
    prepared = Prepared(trace)
    time = device_time(prepared, IdleModel(prepared, LIMITS, None), 0, iv.union(np.array([0]), np.array([50])))
    assert [(s.kind, s.cause, s.ns) for s in time.slices()] == [("idle", "unknown", 50)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    traces(POSITIVE), st.sampled_from(["auto", "full", "20ns:80ns", "0ns:1us"]), st.sampled_from([None, None, "step"])
)
def test_any_trace_is_diagnosed(trace: t.Trace, window: str, range_name: str | None) -> None:
    """The whole way from the trace to the JSON; only options that do not fit the trace may end it."""
    try:
        diagnosis = analyze(trace, RULES, Options(window="auto" if range_name else window, range_name=range_name))
    except UsageError:
        return
    assert diagnosis.to_dict()["schema_version"] == "1.0"
    for device in diagnosis.devices:
        assert sum(s.ns for s in device.slices) == diagnosis.window.duration_ns


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(traces(), SCOPES, st.sampled_from([0, 1, 3]))
def test_long_intervals_are_added_up_as_short_ones_are(trace: t.Trace, scope: Intervals, long: int) -> None:
    """What one thread spent in any interval: cut in single nanoseconds, in short intervals, and in one look."""
    lines = HostTimelines(Prepared(trace), LIMITS.host)
    before = host.LONG
    for thread in range(len(trace.threads)):
        one_look = lines.spent(thread, scope.starts, scope.ends)
        each = np.array(sorted(members(scope)), dtype=np.int64)
        singly = lines.spent(thread, each, each + 1)
        host.LONG = long + 1
        try:
            shorter = lines.spent(thread, scope.starts, scope.ends)
        finally:
            host.LONG = before
        assert [s.tolist() for s in shorter] == [s.tolist() for s in one_look]
        assert [int(s.sum()) for s in singly] == [int(s.sum()) for s in one_look]
        assert sum(int(s.sum()) for s in one_look) == scope.total()
        assert all((s >= 0).all() for s in (*one_look, *singly))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(traces(), SCOPES, st.none() | st.integers(0, LENGTH), st.integers(1, 5))
def test_gaps_in_pieces_are_those_of_one_look(
    trace: t.Trace, scope: Intervals, steady_ns: int | None, piece: int
) -> None:
    prepared = Prepared(trace)
    before = idle.PIECE, host.PIECE
    for device in range(DEVICES):
        whole = IdleModel(prepared, LIMITS, steady_ns).gaps(device, scope)
        idle.PIECE = host.PIECE = piece
        try:
            pieces = IdleModel(prepared, LIMITS, steady_ns).gaps(device, scope)
        finally:
            idle.PIECE, host.PIECE = before
        for field in dataclasses.fields(whole):
            assert getattr(whole, field.name).tolist() == getattr(pieces, field.name).tolist()
