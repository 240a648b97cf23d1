"""CUPTI's records as a trace: what was put into the records is what infprof, and the real nsys, read out of the file."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupti_records import CUDA_13_0, LATER, PID, START_NS, Records
from infprof import trace as t
from infprof.diagnosis import Options, analyze_file
from infprof.probes.cupti_backend import layout
from infprof.probes.cupti_backend.decoding import decode, record_offsets
from infprof.probes.cupti_backend.demangling import demangled
from infprof.probes.cupti_backend.recording import read_recording
from infprof.probes.cupti_backend.writing import gpu_row, write_sqlite
from infprof.readers import read
from test_nsys_stats import OPERATIONS, REPORTS, needed, stats, summed

US = 1000
KERNELS = ["_ZN3vec3addIfEEvPT_i", "_Z4gemmPKfS0_Pfi", "triton_poi_fused_0"]
PLAIN = ["void vec::add<float>(float*, int)", "gemm(float const*, float const*, float*, int)", "triton_poi_fused_0"]


def trace_of(records: Records, folder: Path, **options: Any) -> t.Trace:
    return read(export_of(records, folder, **options))


def export_of(records: Records, folder: Path, **options: Any) -> Path:
    raw = folder / f"raw-{time.monotonic_ns()}.cupti"
    records.write(raw, **options)
    write_sqlite(read_recording(raw), raw.with_suffix(".sqlite"))
    return raw.with_suffix(".sqlite")


def column(table: t.Table | None, name: str) -> list[int]:
    assert table is not None
    return list(table[name].tolist())


def texts(trace: t.Trace, table: t.Table | None, name: str) -> list[str]:
    return [trace.strings[i] for i in column(table, name)]


# --- layouts ----------------------------------------------------------------------------------------------------------

# What NVIDIA calls the fields whose name here says more.
THEIR_NAMES = {
    "bytes": ("bytes", "size"),
    "graph_node": ("graph_node_id",),
    "return_value": ("return_value",),
    "time": ("timestamp",),
    "name": ("name",),
    "value": ("value",),
    "registers": ("registers_per_thread",),
    "static_shared": ("static_shared_memory",),
    "dynamic_shared": ("dynamic_shared_memory",),
    "local_per_thread": ("local_memory_per_thread",),
    "local_total": ("local_memory_total_v2",),
    "shared_executed": ("shared_memory_executed",),
    "shared_limit": ("shmem_limit_config",),
    "operation": ("memory_operation_type",),
    "event": ("cuda_event_id", "event_id"),
    "flags": ("flags_",),
    "flag": ("flag",),
}
NVIDIA = {
    layout.MEMCPY: "memcpy7",
    layout.MEMCPY_P2P: "memcpy_pto_p4",
    layout.MEMSET: "memset5",
    layout.RUNTIME: "api",
    layout.CONTEXT: "context4",
    layout.CONCURRENT_KERNEL: "kernel13",
    layout.MARKER: "marker2",
    layout.OVERHEAD: "overhead3",
    layout.CUDA_EVENT: "cuda_event2",
    layout.STREAM: "stream",
    layout.SYNCHRONIZATION: "synchronization2",
    layout.MEMORY: "memory4",
    layout.GRAPH_TRACE: "graph_trace2",
}


@pytest.mark.parametrize("kind", NVIDIA, ids=NVIDIA.get)
def test_fields_lie_where_nvidia_has_them(kind: int) -> None:
    cupti = pytest.importorskip("cupti.cupti")
    theirs = getattr(cupti, f"activity_{NVIDIA[kind]}_dtype")
    ours = layout.record_dtype(kind, theirs.itemsize)
    compared = 0
    for name in ours.names or ():
        candidates = [*THEIR_NAMES.get(name, ()), name, f"{name}_id"]
        match = next((c for c in candidates if c in theirs.names), None)
        if match is None:
            # The process and the thread of an object stand in a union there.
            assert name in ("process", "thread") and "object_id" in theirs.names
            offset = theirs.fields["object_id"][1] + 4 * (name == "thread")
        else:
            offset = theirs.fields[match][1]
            sizes = ours.fields[name][0].itemsize, theirs.fields[match][0].itemsize
            assert sizes[0] == sizes[1], name
        assert ours.fields[name][1] == offset, name
        compared += 1
    assert compared == len(ours.names or ()) > 3


def test_the_real_library_says_how_long_its_records_are() -> None:
    """The collector asks it the same question; needs no driver."""
    if importlib.util.find_spec("nvidia") is None:
        pytest.skip("needs nvidia-cuda-cupti")
    paths = [
        p
        for root in importlib.util.find_spec("nvidia").submodule_search_locations
        for p in Path(root).glob("*/lib/libcupti.so.1*")
    ]
    if not paths:
        pytest.skip("needs nvidia-cuda-cupti")
    library = ctypes.CDLL(str(paths[0]))
    for kind in layout.KINDS:
        buffer = (ctypes.c_uint32 * 4096)(*[kind] * 4096)
        address = ctypes.addressof(buffer)
        record = ctypes.c_void_p(address)
        size = ctypes.c_size_t(ctypes.sizeof(buffer))
        assert library.cuptiActivityGetNextRecord(ctypes.c_void_p(address), size, ctypes.byref(record)) == 0
        layout.record_dtype(kind, (record.value or 0) - address)


def test_records_that_are_too_short_are_refused_not_misread() -> None:
    with pytest.raises(ValueError, match="CUDA before 12"):
        layout.record_dtype(layout.CONCURRENT_KERNEL, 160)


# --- walking buffers --------------------------------------------------------------------------------------------------


def buffer_of(kinds: list[int], strides: dict[int, int]) -> np.ndarray:
    data = np.full(sum(strides[k] for k in kinds), 10, dtype=np.uint8)
    place = 0
    for kind in kinds:
        data[place : place + 4].view("<u4")[0] = kind
        place += strides[kind]
    return data


@given(
    runs=st.lists(st.tuples(st.sampled_from(sorted(CUDA_13_0)), st.integers(1, 700)), max_size=12),
    cut=st.integers(0, 30),
    later=st.booleans(),
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_every_record_of_a_mixed_buffer_is_found(runs: list[tuple[int, int]], cut: int, later: bool) -> None:
    strides = LATER if later else CUDA_13_0
    kinds = [kind for kind, count in runs for _ in range(count)]
    data = buffer_of(kinds, strides)
    expected = np.cumsum([0, *(strides[k] for k in kinds)])[:-1] if kinds else np.empty(0)
    offsets, lost = record_offsets(data, strides)
    assert offsets.tolist() == expected.tolist() and lost == 0
    if kinds:
        # A buffer that ends in the middle of its last record loses that one, and says so.
        shorter = data[: len(data) - min(cut, strides[kinds[-1]] - 1)]
        offsets, lost = record_offsets(shorter, strides)
        whole = len(kinds) - (len(shorter) < len(data))
        assert len(offsets) == whole and lost == len(shorter) - int(sum(strides[k] for k in kinds[:whole]))


def test_what_follows_a_record_of_unknown_length_is_counted_as_lost() -> None:
    known = {layout.RUNTIME: 40}
    data = buffer_of([layout.RUNTIME, layout.RUNTIME, layout.MEMORY, layout.RUNTIME], CUDA_13_0)
    found = decode(data, known)
    assert len(found.records[layout.RUNTIME]) == 2 and found.lost_bytes == 128 + 40


# --- records to a trace -----------------------------------------------------------------------------------------------

OPERATION = st.tuples(
    st.sampled_from(["kernel", "copy", "p2p", "memset", "driver", "sync", "memory", "overhead", "graph", "event"]),
    st.integers(1, 40),  # how long it lasts, µs
    st.integers(0, 2),  # which kernel, device, or kind of memory
    st.integers(0, 5000),  # bytes, grid, node of a graph
)


@given(operations=st.lists(OPERATION, min_size=1, max_size=60), per_buffer=st.integers(1, 70), later=st.booleans())
@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_all_that_was_recorded_is_in_the_trace(
    operations: list[tuple[str, int, int, int]], per_buffer: int, later: bool, tmp_path: Path
) -> None:
    records, expected = played(operations, LATER if later else CUDA_13_0)
    trace = trace_of(records, tmp_path, per_buffer=per_buffer)
    origin = expected["origin"]
    assert trace.clock_start_unix_ns == origin
    kernels = expected["kernel"]
    if kernels:
        assert sorted(zip(column(trace.kernels, "start"), texts(trace, trace.kernels, "name"), strict=True)) == sorted(
            (start - origin, PLAIN[which]) for start, _, which, _ in kernels
        )
        assert column(trace.kernels, "grid_blocks") == [max(size, 1) for *_, size in kernels]
        assert column(trace.kernels, "graph_node") == [size or -1 for *_, size in kernels]
    else:
        assert trace.kernels is None
    copies = expected["copy"]
    if copies:
        assert trace.copies is not None
        ours = zip(*(column(trace.copies, name) for name in ("start", "end", "bytes", "src", "dst")), strict=True)
        assert list(ours) == [(a - origin, b - origin, size, src, dst) for a, b, size, src, dst in copies]
    for table, name in ((trace.memsets, "memset"), (trace.graphs, "graph"), (trace.syncs, "sync")):
        found = [] if table is None else list(zip(column(table, "start"), column(table, "end"), strict=True))
        assert sorted(found) == sorted((a - origin, b - origin) for a, b, *_ in expected[name])
    calls = Counter() if trace.api_calls is None else Counter(texts(trace, trace.api_calls, "name"))
    assert calls == Counter(expected["call"])
    deltas = [] if trace.memory_events is None else column(trace.memory_events, "delta")
    assert sum(deltas) == sum(expected["memory"]) and len(deltas) == len(expected["memory"])
    kinds = Counter() if trace.overheads is None else Counter(column(trace.overheads, "kind"))
    assert kinds == Counter(expected["overhead"])


def played(operations: list[tuple[str, int, int, int]], strides: dict[int, int]) -> tuple[Records, dict[str, Any]]:
    """The operations one after the other on one thread, and what a trace of them has to hold."""
    records = Records(strides)
    now = START_NS
    expected: dict[str, Any] = {
        name: [] for name in ("kernel", "copy", "memset", "graph", "sync", "call", "memory", "overhead")
    }
    times: list[int] = []
    for number, (what, lasts, which, size) in enumerate(operations, 1):
        start, end = now + 2 * US, now + 2 * US + lasts * US
        place = {"start": start, "end": end, "context": 1, "stream": 7, "correlation": number}
        times.append(start)
        if what in ("kernel", "copy", "p2p", "memset", "graph"):
            records.call(now, now + US, number, cbid=41 if what in ("copy", "p2p") else 211)
            # The runtime's call makes one of the driver in turn, which is the same call.
            records.call(now + 100, now + 900, number, cbid=307, kind=layout.DRIVER)
            expected["call"].append("cudaMemcpyAsync" if what in ("copy", "p2p") else "cudaLaunchKernel")
            times.append(now)
        if what == "kernel":
            geometry = {"grid_x": size, "grid_y": 1, "grid_z": 1, "graph_node": size}
            records.kernel(start, end, KERNELS[which], number, **geometry)
            expected["kernel"].append((start, end, which, size))
        elif what == "copy":
            # 1 pageable, 2 pinned, 3 device, as CUPTI has it.
            records.add(layout.MEMCPY, **place, copy_kind=1, src_kind=which + 1, dst_kind=3, bytes=size)
            kind = (t.PAGEABLE, t.PINNED, t.DEVICE)[which]
            expected["copy"].append((start, end, size, kind, t.DEVICE))
        elif what == "p2p":
            ends = {"src_device": 0, "dst_device": 1, "src_context": 1, "dst_context": 2}
            records.add(layout.MEMCPY_P2P, **place, **ends, copy_kind=10, src_kind=3, dst_kind=3, bytes=size)
            expected["copy"].append((start, end, size, t.DEVICE, t.DEVICE))
        elif what == "memset":
            records.add(layout.MEMSET, **place, bytes=size, value=which, memory_kind=3)
            expected["memset"].append((start, end))
        elif what == "graph":
            records.add(layout.GRAPH_TRACE, **place, graph=size)
            expected["graph"].append((start, end))
        elif what == "driver":
            records.call(start, end, number, cbid=514, kind=layout.DRIVER)
            expected["call"].append("cuGraphLaunch")
        elif what == "sync":
            records.add(layout.SYNCHRONIZATION, **place, type=3, event=2**32 - 1)
            expected["sync"].append((start, end))
        elif what == "memory":
            freed = which == 2
            records.add(
                layout.MEMORY, operation=1 + freed, memory_kind=3, bytes=size, time=start, process=PID, context=1
            )
            expected["memory"].append(-size if freed else size)
        elif what == "event":
            times.pop()
            records.add(layout.CUDA_EVENT, correlation=number, context=1, stream=7, event=which)
        else:
            kind, meaning = ((0x10000, t.PROFILER), (0x50000, t.MODULE_LOAD), (0x60000, t.COMMAND_BUFFER_FULL))[which]
            spent = {"object_kind": 2, "process": PID, "thread": PID, "start": start, "end": end}
            records.add(layout.OVERHEAD, overhead_kind=kind, **spent)
            expected["overhead"].append(meaning)
        now = end + 3 * US
    return records, expected | {"origin": min(times, default=START_NS)}


def test_ranges_are_put_together_from_their_begins_and_ends(tmp_path: Path) -> None:
    records = Records()
    records.kernel(START_NS, START_NS + US, KERNELS[0], 1)

    def mark(us: int, flags: int, number: int, name: str | int = 0, domain: str | int = 0, thread: int = PID) -> None:
        who = {"object_kind": 2, "process": PID, "thread": thread}
        records.add(layout.MARKER, flags=flags, time=START_NS + us * US, id=number, name=name, domain=domain, **who)

    mark(1, 2, 1, "step 0")
    mark(2, 2, 2, "attention", "vLLM")
    mark(3, 4, 2)
    mark(4, 2, 3, "request 7")
    mark(5, 4, 1)
    mark(6, 4, 3, thread=PID + 1)
    mark(7, 1, 4, "a moment")
    # An id that comes again, and a range that never ends.
    mark(8, 2, 1, "step 1")
    mark(9, 4, 1)
    mark(10, 2, 5, "open")
    mark(11, 2, 6, "last")
    mark(12, 4, 6)
    trace = trace_of(records, tmp_path, per_buffer=4)
    assert trace.ranges is not None
    rows = zip(
        texts(trace, trace.ranges, "text"),
        column(trace.ranges, "start"),
        column(trace.ranges, "end"),
        column(trace.ranges, "kind"),
        strict=True,
    )
    assert list(rows) == [
        ("step 0", 1000, 5000, t.PUSH_POP),
        ("attention", 2000, 3000, t.PUSH_POP),
        ("request 7", 4000, 6000, t.START_END),
        ("step 1", 8000, 9000, t.PUSH_POP),
        ("open", 10000, 12000, t.PUSH_POP),
        ("last", 11000, 12000, t.PUSH_POP),
    ]


def test_an_address_may_come_to_mean_another_text(tmp_path: Path) -> None:
    first, second = Records(), Records()
    for which, records in enumerate((first, second)):
        for number, name in enumerate(("same", ("first", "second")[which])):
            at = START_NS + (2 * which + number) * US
            records.kernel(at, at + 500, name, 2 * which + number)
    assert first.addresses["first"] == second.addresses["second"]
    both = tmp_path / "both.cupti"
    first.write(both, ended=False)
    second.write(tmp_path / "second.cupti")
    both.write_bytes(both.read_bytes() + (tmp_path / "second.cupti").read_bytes())
    write_sqlite(read_recording(both), tmp_path / "both.sqlite")
    trace = read(tmp_path / "both.sqlite")
    assert texts(trace, trace.kernels, "name") == ["same", "first", "same", "second"]


def test_names_are_those_that_people_read() -> None:
    assert demangled([*KERNELS, "i", "_Zbroken", ""]) == [*PLAIN, "i", "_Zbroken", ""]


# --- the file ---------------------------------------------------------------------------------------------------------


def steady(steps: int, strides: dict[int, int] | None = None) -> Records:
    """A loop of launches, copies and waits as a model has it; microseconds that can be added up in the head."""
    records = Records(strides)
    now, number = START_NS, 0
    records.add(layout.CONTEXT, context=1, device=0, null_stream=7)
    records.add(layout.STREAM, context=1, stream=13, priority=2**32 - 5, flag=2)
    for step in range(steps):
        for which in range(3):
            number += 1
            records.call(now, now + 3 * US, number)
            records.call(now + US, now + 2 * US, number, cbid=307, kind=layout.DRIVER)
            records.kernel(now + 4 * US, now + 9 * US + which * US, KERNELS[which], number)
            now += 12 * US
        number += 1
        records.call(now, now + 2 * US, number, cbid=41)
        place = {"context": 1, "stream": 7, "correlation": number, "start": now + 2 * US, "end": now + 5 * US}
        records.add(layout.MEMCPY, **place, copy_kind=2, src_kind=3, dst_kind=2, bytes=4096 + step)
        if step % 4 == 0:
            peers = {"copy_kind": 10, "src_kind": 3, "dst_kind": 3, "src_device": 0, "dst_device": 1, "bytes": 100}
            records.add(layout.MEMCPY_P2P, **place | {"start": now + 5 * US, "end": now + 6 * US}, **peers)
            records.add(layout.MEMSET, **place | {"start": now + 6 * US, "end": now + 8 * US}, bytes=64, memory_kind=3)
        records.call(now + 3 * US, now + 9 * US, number + 1, cbid=131)
        number += 1
        now += 10 * US
    return records


@pytest.mark.parametrize("strides", [CUDA_13_0, LATER], ids=["13.0", "later"])
def test_the_real_nsys_adds_up_to_what_was_recorded(strides: dict[int, int], tmp_path: Path) -> None:
    steps = 400
    export = export_of(steady(steps, strides), tmp_path)
    theirs, said = stats(needed("2023.4"), export, REPORTS)
    assert "ERROR" not in said
    kernels = summed(theirs["cuda_gpu_kern_sum"], "Name", "Total Time (ns)", "Instances")
    assert kernels == {PLAIN[which]: ((5 + which) * US * steps, steps) for which in range(3)}
    calls = summed(theirs["cuda_api_sum"], "Name", "Total Time (ns)", "Num Calls")
    assert {re.sub(r"_v\d+$", "", name): figures for name, figures in calls.items()} == {
        "cudaLaunchKernel": (9 * US * steps, 3 * steps),
        "cudaMemcpyAsync": (2 * US * steps, steps),
        "cudaStreamSynchronize": (6 * US * steps, steps),
    }
    times = summed(theirs["cuda_gpu_mem_time_sum"], "Operation", "Total Time (ns)", "Count")
    assert {OPERATIONS[name]: figures for name, figures in times.items()} == {
        "d2h": (3 * US * steps, steps),
        "p2p": (US * steps // 4, steps // 4),
        "memset": (2 * US * steps // 4, steps // 4),
    }
    sizes = summed(theirs["cuda_gpu_mem_size_sum"], "Operation", "Total (B)", "Count")
    assert sizes["[CUDA memcpy Device-to-Host]"] == (sum(4096 + step for step in range(steps)), steps)
    # And infprof's own figures are those of nsys.
    device = next(d for d in analyze_file(export, Options(window="full")).devices if d.id == 0)
    assert (device.kernels.total_ns, device.kernels.count) == (18 * US * steps, 3 * steps)
    assert {c.kind: (c.total_ns, c.count) for c in device.copies} == {
        OPERATIONS[name]: figures for name, figures in times.items()
    }


def test_numbers_are_those_of_nsys_where_the_two_differ(tmp_path: Path) -> None:
    records = Records()
    records.add(layout.CONTEXT, context=3, device=1, null_stream=7)
    records.add(layout.STREAM, context=3, stream=13, priority=2**32 - 5, flag=2)
    shape = {"registers": 48, "static_shared": 1024, "dynamic_shared": 2048, "local_total": 5_000_000_000, "graph": 9}
    more = {"launch_type": 1, "cache_config": 0x21, "graph_node": 2**40, "device": 1, "context": 3, "stream": 13}
    records.kernel(START_NS + US, START_NS + 3 * US, KERNELS[0], 8, **shape, **more)
    records.call(START_NS, START_NS + 2 * US, 8, thread=PID + 1, return_value=2)
    # No call of either API launched this one; the driver's call of the one before is the runtime's.
    records.call(START_NS + US, START_NS + 2 * US, 8, cbid=307, kind=layout.DRIVER)
    records.call(START_NS + 3 * US, START_NS + 4 * US, 9, cbid=0, kind=layout.INTERNAL_LAUNCH)
    wait = {"type": 4, "start": START_NS, "end": START_NS + US, "context": 3, "stream": 2**32 - 1, "event": 2**32 - 1}
    records.add(layout.SYNCHRONIZATION, **wait)
    place = {"context": 3, "device": 1, "stream": 13, "start": START_NS, "end": START_NS + US, "correlation": 8}
    for kind in range(9):
        records.add(layout.MEMCPY, **place, copy_kind=8, src_kind=kind, dst_kind=5, bytes=1)
    db = sqlite3.connect(export_of(records, tmp_path))
    db.row_factory = sqlite3.Row

    def rows(table: str) -> list[dict[str, Any]]:
        return [dict(row) for row in db.execute(f"SELECT * FROM {table}")]

    gpid = 1 << 48 | PID << 24
    (kernel,) = rows("CUPTI_ACTIVITY_KIND_KERNEL")
    expected = {
        "start": US,
        "end": 3 * US,
        "deviceId": 1,
        "contextId": 3,
        "streamId": 13,
        "correlationId": 8,
        "globalPid": gpid,
        "launchType": 2,  # cooperative
        "cacheConfig": 1,
        "registersPerThread": 48,
        "staticSharedMemory": 1024,
        "dynamicSharedMemory": 2048,
        "localMemoryTotal": 5_000_000_000,
        "graphNodeId": 2**40,
        "graphId": 9,
        "greenContextId": None,
    }
    assert {name: kernel[name] for name in expected} == expected
    names = {row["id"]: row["value"] for row in rows("StringIds")}
    assert [names[kernel[n]] for n in ("demangledName", "shortName", "mangledName")] == [PLAIN[0], "add", KERNELS[0]]
    calls = [
        (names[r["nameId"]], r["eventClass"], r["globalTid"], r["returnValue"])
        for r in rows("CUPTI_ACTIVITY_KIND_RUNTIME")
    ]
    assert calls == [
        ("cudaLaunchKernel_v7000", 0, gpid | (PID + 1), 2),
        ("[launch without a call]", 1, gpid | PID, 0),
    ]
    assert [r["srcKind"] for r in rows("CUPTI_ACTIVITY_KIND_MEMCPY")] == [7, 0, 1, 2, 3, 4, 5, 6, 7]
    (sync,) = rows("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION")
    assert (sync["syncType"], sync["deviceId"], sync["streamId"]) == (4, 1, 2**32 - 1)
    (stream,) = rows("TARGET_INFO_CUDA_STREAM")
    assert (stream["streamId"], stream["priority"], stream["flag"]) == (13, -5, 2)
    assert {r["name"] for r in rows("PROCESSES")} == {"python"}
    assert {names[r["nameId"]]: r["globalTid"] & 0xFFFFFF for r in rows("ThreadNames")} == {
        "python": PID,
        "worker": PID + 1,
    }
    (gpu,) = rows("TARGET_INFO_GPU")
    assert gpu["uuid"] == "abababab-abab-abab-abab-abababababab"
    # Figures in the units of nsys: Hz, bytes/s (two transfers per clock), and a bus as lspci writes it.
    facts = {
        "clockRate": 1_980_000,
        "memoryClock": 2_619_000,
        "busWidth": 5120,
        "pciDomain": 0,
        "pciBus": 27,
        "pciDevice": 0,
    }
    row = gpu_row(facts | {"cuDevice": 0})
    assert (row["clockRate"], row["memoryBandwidth"], row["busLocation"]) == (
        1_980_000_000,
        3_352_320_000_000,
        "0000:1b:00.0",
    )
    assert gpu_row({"cuDevice": 0})["memoryBandwidth"] is None
    db.close()


def test_every_diagnosis_of_such_a_file_says_that_it_is_experimental(tmp_path: Path) -> None:
    diagnosis = analyze_file(export_of(steady(400), tmp_path))
    (said,) = [p.message for p in diagnosis.problems if p.code == "experimental-recorder"]
    assert "experimental" in said and diagnosis.provenance.tool == t.CUPTI_BACKEND
    assert (diagnosis.devices[0].name, diagnosis.provenance.tool_version) == ("NVIDIA Made 80GB", "130001")


def test_losses_are_said(tmp_path: Path) -> None:
    raw = steady(400).write(tmp_path / "raw.cupti", ended=False, dropped=12)
    write_sqlite(read_recording(raw), tmp_path / "cut.sqlite")
    said = " ".join(p.message for p in analyze_file(tmp_path / "cut.sqlite").problems if p.code == "recorder")
    assert "12 records were dropped" in said and "ended without notice" in said


def test_a_file_that_a_crash_has_cut_gives_what_is_before_the_cut(tmp_path: Path) -> None:
    raw = steady(400).write(tmp_path / "raw.cupti", per_buffer=100)
    whole = len(read_recording(raw).records[layout.CONCURRENT_KERNEL])
    data = raw.read_bytes()
    before = whole
    for length in range(len(data) - 100, 0, -len(data) // 40):
        raw.write_bytes(data[:length])
        records = read_recording(raw).records.get(layout.CONCURRENT_KERNEL, ())
        assert len(records) <= before
        before = len(records)
    assert 0 <= before < whole


def test_operations_without_times_are_left_out_and_counted(tmp_path: Path) -> None:
    records = steady(400)
    records.kernel(0, 0, KERNELS[0], 999_999)
    diagnosis = analyze_file(export_of(records, tmp_path))
    assert {"zero-kernels", "coverage"} <= {p.code for p in diagnosis.problems}
    assert trace_of(records, tmp_path).clock_start_unix_ns == START_NS


def test_times_of_another_clock_are_put_on_the_systems(tmp_path: Path) -> None:
    moved = {"cupti_ns": START_NS, "realtime_ns": START_NS + 7_000_000_000, "monotonic_ns": 5}
    records = steady(10)
    raw = records.write(tmp_path / "raw.cupti", ended=False, start=moved)
    write_sqlite(read_recording(raw), tmp_path / "moved.sqlite")
    assert read(tmp_path / "moved.sqlite").clock_start_unix_ns == START_NS + 7_000_000_000
