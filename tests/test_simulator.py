"""The simulator: rules of its clockwork, the truth it states, the export it writes, and the sample traces it made."""

from __future__ import annotations

import copy
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from infprof.errors import UsageError
from infprof.results import VERDICT_CLASSES
from infprof.simulator import (
    SimulatedTrace,
    TraceBuilder,
    load_spec,
    parse_spec,
    schema,
    simulate,
    truth,
    write_nsys_sqlite,
)
from infprof.simulator.builder import short_name
from infprof.simulator.engine import GpuOp
from infprof.simulator.samples import build, sample_dirs

ROOT = Path(__file__).resolve().parent.parent

KERNELS: dict[str, Any] = {
    "short": {"name": "short_kernel", "time": "10us"},
    "long": {"name": "void long_kernel<int>(T1 *)", "time": "100us"},
}
COSTS = {"launch": "4us", "between": 0, "sync": "2us", "copy": "5us", "event": "1us", "collective": "6us"}
DEVICE: dict[str, Any] = {"dispatch": "1us", "kernel_gap": 0, "graph_gap": 0, "copy_latency": 0, "pcie": 10e9}


def play(*actions: dict[str, Any], **top: Any) -> SimulatedTrace:
    """One process, one thread, no jitter, round costs: time 0 is when the thread starts."""
    return play_all([[*actions]], **top)


def play_all(threads_of_processes: list[list[dict[str, Any]]], **top: Any) -> SimulatedTrace:
    processes = [{"pid": 500 + n, "device": n, "threads": [{"run": run}]} for n, run in enumerate(threads_of_processes)]
    base = {"kernels": KERNELS, "costs": COSTS, "start": 0, "devices": [DEVICE] * len(processes)}
    return simulate(parse_spec({**base, "processes": processes, **top}))


def spans(trace: SimulatedTrace) -> list[tuple[int, int]]:
    return [op.span for op in trace.ops]


def query(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(sql).fetchall()


def tables(path: Path) -> set[str]:
    return {name for (name,) in query(path, "SELECT name FROM sqlite_master WHERE type = 'table'")}


class TestClockwork:
    def test_a_kernel_starts_when_its_launch_is_through_and_dispatched(self) -> None:
        trace = play({"launch": "short"})
        assert [(c.start_ns, c.end_ns) for c in trace.calls] == [(0, 4_000)]
        assert spans(trace) == [(5_000, 15_000)]

    def test_kernels_of_one_stream_run_in_order_and_of_two_streams_overlap(self) -> None:
        assert spans(play({"launch": "long", "count": 2})) == [(5_000, 105_000), (105_000, 205_000)]
        assert spans(play({"launch": "long"}, {"launch": "long", "stream": 13})) == [(5_000, 105_000), (9_000, 109_000)]

    def test_a_stream_waits_for_the_event_of_another(self) -> None:
        trace = play(
            {"launch": "long"}, {"record": "done"}, {"wait": "done", "stream": 13}, {"launch": "short", "stream": 13}
        )
        assert spans(trace)[1] == (105_000, 115_000)

    def test_a_wait_for_an_event_that_was_never_recorded_holds_nothing(self) -> None:
        assert spans(play({"wait": "never"}, {"launch": "short"})) == [(6_000, 16_000)]

    def test_a_synchronisation_holds_the_thread_until_the_stream_is_empty(self) -> None:
        trace = play({"launch": "long"}, {"sync": "stream"}, {"host": "50us"}, {"launch": "short"})
        assert trace.calls[1].end_ns == 107_000
        assert spans(trace)[1] == (162_000, 172_000)

    def test_a_device_synchronisation_waits_for_all_streams(self) -> None:
        trace = play({"launch": "long"}, {"launch": "long", "stream": 13}, {"sync": "device"})
        assert (trace.calls[2].end_ns, trace.calls[2].sync) == (111_000, "context")

    def test_the_last_record_but_one_lets_the_host_run_a_step_ahead(self) -> None:
        step = [{"launch": "long"}, {"record": "step"}, {"sync": "event", "event": "step", "ago": 1}]
        trace = play({"repeat": 3, "do": step})
        ends = [call.end_ns for call in trace.calls if call.sync]
        assert ends == [7_000, 107_000, 207_000]

    def test_pinned_copies_run_behind_the_host_and_pageable_ones_hold_it(self) -> None:
        pinned = play({"copy": "h2d", "size": "1MB"}, {"host": "1us"})
        assert spans(pinned) == [(6_000, 106_000)]
        assert pinned.calls[0].end_ns == 5_000
        pageable = play({"copy": "h2d", "size": "1MB", "memory": "pageable"}, devices=[{**DEVICE, "pageable": 5e9}])
        assert spans(pageable) == [(6_000, 206_000)]
        assert pageable.calls[0].end_ns == 208_000

    def test_copies_of_one_direction_share_an_engine(self) -> None:
        trace = play({"copy": "h2d", "size": "1MB", "stream": 13}, {"copy": "h2d", "size": "1MB", "stream": 14})
        assert spans(trace) == [(6_000, 106_000), (106_000, 206_000)]

    def test_time_follows_from_flops_and_bytes(self) -> None:
        device = {**DEVICE, "flops": 1e12, "flops_reached": 0.5, "bandwidth": 1e12, "bandwidth_reached": 1.0}
        kernels = {
            "compute": {"name": "c", "flops": 1e9, "bytes": 1000},
            "memory": {"name": "m", "flops": 1.0, "bytes": "1MB"},
        }
        trace = play(
            {"launch": "compute"}, {"launch": "memory"}, kernels=kernels, devices=[{**device, "kernel_floor": 0}]
        )
        assert [end - start for start, end in spans(trace)] == [2_000_000, 1_000]

    def test_the_kernels_of_a_graph_share_the_launch(self) -> None:
        graphs = {"step": {"kernels": ["short", {"repeat": 2, "do": ["long"]}]}}
        trace = play({"graph": "step"}, graphs=graphs, costs={**COSTS, "graph_launch": "9us"})
        assert spans(trace) == [(10_000, 20_000), (20_000, 120_000), (120_000, 220_000)]
        assert {op.correlation for op in trace.ops} == {trace.calls[0].correlation}
        assert len({op.graph_node for op in trace.ops} - {None}) == 3

    def test_a_graph_traced_as_a_whole_has_no_kernels(self, tmp_path: Path) -> None:
        graphs = {"step": {"kernels": ["short", "long"], "trace": "graph"}}
        trace = play({"graph": "step"}, graphs=graphs)
        path = write_nsys_sqlite(trace, tmp_path / "t.sqlite")
        assert query(path, "SELECT end - start FROM CUPTI_ACTIVITY_KIND_GRAPH_TRACE") == [(110_000,)]
        assert "CUPTI_ACTIVITY_KIND_KERNEL" not in tables(path)
        assert truth(trace)["devices"][0]["compute_ns"] == 110_000

    def test_ranks_start_a_collective_when_they_arrive_and_end_it_together(self) -> None:
        device = {**DEVICE, "nvlink": 10e9, "collective_reached": 1.0, "collective_latency": "5us"}
        early: list[dict[str, Any]] = [{"allreduce": "100KB"}, {"launch": "short"}]
        late: list[dict[str, Any]] = [{"host": "30us"}, {"allreduce": "100KB"}]
        trace = play_all([early, late], devices=[device] * 2)
        by_rank = {(op.process, op.kind): op.span for op in trace.ops}
        assert by_rank[0, "comm"] == (7_000, 52_000)  # arrives at 7 µs; 37 µs + 5 µs latency + 10 µs for 100 kB
        assert by_rank[1, "comm"] == (37_000, 52_000)
        assert by_rank[0, "kernel"] == (52_000, 62_000)
        assert [(r.text, r.bytes) for r in trace.ranges] == [("ncclAllReduce", 100_000)] * 2

    def test_ranks_that_never_meet_are_an_error_and_not_a_hang(self) -> None:
        with pytest.raises(UsageError, match="same collectives in the same order"):
            play_all([[{"allreduce": "1KB"}, {"sync": "stream"}], [{"repeat": 2, "do": [{"allreduce": "1KB"}]}]])

    def test_a_blocked_thread_a_module_load_and_allocations_take_their_time(self) -> None:
        trace = play(
            {"block": "epoll_wait", "for": "1ms"},
            {"overhead": "CUPTI Buffer flush", "for": "2ms"},
            {"load_module": "3ms"},
            {"malloc": "1MB", "call": "4ms"},
            {"free": "1MB", "call": "5ms"},
        )
        assert [(s.name, s.start_ns, s.end_ns) for s in trace.os_calls] == [("epoll_wait", 0, 1_000_000)]
        assert [(s.start_ns, s.end_ns) for s in trace.overheads] == [(1_000_000, 3_000_000)]
        assert [(c.name, c.end_ns) for c in trace.calls] == [
            ("cuModuleLoadData", 6_000_000),
            ("cudaMalloc_v3020", 10_000_000),
            ("cudaFree_v3020", 15_000_000),
        ]
        assert [(m.op, m.bytes) for m in trace.memory] == [("alloc", 1_000_000), ("free", 1_000_000)]
        assert len({m.address for m in trace.memory}) == 1

    def test_threads_of_a_process_share_its_streams_in_order_of_time(self) -> None:
        threads = [{"run": [{"host": "10us"}, {"launch": "short"}]}, {"run": [{"launch": "long"}]}]
        trace = play(processes=[{"threads": threads}])
        assert [(op.name, op.span[0]) for op in trace.ops] == [
            ("void long_kernel<int>(T1 *)", 5_000),
            ("short_kernel", 105_000),
        ]

    def test_ranges_close_after_what_they_hold_and_count_their_turns(self) -> None:
        trace = play({"repeat": 2, "range": "step {i}", "do": [{"host": "5us", "range": "inner"}]})
        assert [(r.text, r.start_ns, r.end_ns) for r in trace.ranges] == [
            ("inner", 0, 5_000),
            ("step 0", 0, 5_000),
            ("inner", 5_000, 10_000),
            ("step 1", 5_000, 10_000),
        ]

    def test_the_seed_decides_the_jitter(self) -> None:
        def run(seed: int) -> list[tuple[int, int]]:
            return spans(play({"launch": "long", "count": 20}, jitter=0.1, seed=seed))

        assert run(1) == run(1) != run(2)
        lengths = [end - start for start, end in run(1)]
        assert min(lengths) >= 90_000 and max(lengths) <= 110_000 and len(set(lengths)) > 10


class TestTruth:
    def test_each_moment_counts_for_the_first_row_that_applies(self) -> None:
        trace = play()
        ops = [
            ("kernel", 0, 10),
            ("comm", 5, 20),
            ("copy", 15, 30),
            ("memset", 28, 32),
            ("kernel", 40, 50),
            ("kernel", 45, 50),
        ]
        trace.ops = [_op(kind, start, end) for kind, start, end in ops]
        device = truth(trace)["devices"][0]
        assert device["compute_ns"] == 20
        assert device["exposed_communication_ns"] == 10
        assert device["exposed_copy_ns"] == 12
        assert device["idle_ns"] == 8
        assert (device["kernel_count"], device["kernel_total_ns"]) == (4, 40)

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["kernel", "graph", "comm", "copy", "memset"]),
                st.integers(0, 60),
                st.integers(1, 30),
                st.integers(0, 1),
            ),
            min_size=1,
            max_size=25,
        )
    )
    def test_slices_equal_a_count_of_every_single_nanosecond(self, rows: list[tuple[str, int, int, int]]) -> None:
        trace = play_all([[], []])
        trace.ops = [_op(kind, start, start + length, device) for kind, start, length, device in rows]
        first, last = min(r[1] for r in rows), max(r[1] + r[2] for r in rows)
        result = truth(trace)
        assert result["window_ns"] == last - first
        for device in result["devices"]:
            counted = {"compute_ns": 0, "exposed_communication_ns": 0, "exposed_copy_ns": 0, "idle_ns": 0}
            for moment in range(first, last):
                running = {
                    kind for kind, start, length, on in rows if on == device["id"] and start <= moment < start + length
                }
                if running & {"kernel", "graph"}:
                    counted["compute_ns"] += 1
                elif "comm" in running:
                    counted["exposed_communication_ns"] += 1
                else:
                    counted["exposed_copy_ns" if running else "idle_ns"] += 1
            assert {key: device[key] for key in counted} == counted

    def test_nothing_on_the_gpu_is_an_empty_window(self) -> None:
        assert truth(play({"host": "1ms"})) == {"window_ns": 0, "devices": []}


def _op(kind: str, start: int, end: int, device: int = 0) -> GpuOp:
    return GpuOp(kind, kind, device, 0, 7, 1, start, end - start, start_ns=start, end_ns=end)


class TestCounters:
    def test_a_sample_holds_the_time_weighted_level_of_its_period(self, tmp_path: Path) -> None:
        kernels = {"k": {"name": "k", "time": "50us", "counters": {"sm_issue": 80, "dram_read": 40}}}
        trace = play({"launch": "k"}, {"sync": "stream"}, kernels=kernels, counters={"rate": 10_000})
        assert spans(trace) == [(5_000, 55_000)]
        assert {s.metric: s.value for s in trace.samples} == {
            "GR Active [Throughput %]": 50,
            "SMs Active [Throughput %]": 48,
            "SM Issue [Throughput %]": 40,
            "Tensor Active [Throughput %]": 0,
            "DRAM Read Bandwidth [Throughput %]": 20,
            "DRAM Write Bandwidth [Throughput %]": 0,
            "PCIe RX Throughput [Throughput %]": 0,
            "PCIe TX Throughput [Throughput %]": 0,
        }
        path = write_nsys_sqlite(trace, tmp_path / "t.sqlite")
        rows = query(
            path,
            "SELECT m.timestamp, m.typeId & 255, m.value FROM GPU_METRICS m JOIN TARGET_INFO_GPU_METRICS t"
            " USING (typeId, metricId) WHERE metricName LIKE 'SM Issue%'",
        )
        assert rows == [(100_000, 0, 40)]

    def test_copies_load_the_link_in_their_direction(self) -> None:
        device = {**DEVICE, "pcie_peak": 20e9}
        trace = play({"copy": "h2d", "size": "10MB"}, devices=[device], counters={"rate": 10_000})
        levels = {
            name: max(s.value for s in trace.samples if s.metric == name) for name in {s.metric for s in trace.samples}
        }
        assert levels["PCIe RX Throughput [Throughput %]"] == 50
        assert levels["PCIe TX Throughput [Throughput %]"] == 0


class TestSpec:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"kernals": {}}, r"spec: no key 'kernals' here\. Did you mean 'kernels'\?"),
            ({"processes": None}, r"spec: processes: expected a list, found nothing\."),
            ({"jitter": 2}, r"spec: jitter: expected a number from 0 to 1, found 2\."),
            ({"nsys": "2019"}, r"spec: nsys: expected one of 2022\.4, 2023\.4, 2026, found '2019'\."),
            ({"start": "12"}, r"spec: start: expected a duration with its unit, such as 12us or 1\.5ms, found '12'\."),
            ({"devices": [{"flops": "many"}]}, r"spec: devices\[0\]: flops: expected a number over 0, found 'many'\."),
            ({"kernels": {"k": {"name": "k"}}}, r"spec: kernels: k: give time, or flops and bytes"),
            ({"kernels": {"k": {"name": "k", "time": "1us", "counters": {"sm": 1}}}}, r"no counter 'sm'\."),
            ({"kernels": {7: KERNELS["short"]}, "graphs": {"g": {"kernels": [7]}}}, r"kernel 7\. Did you mean '7'\?"),
            ({"graphs": {"g": {"kernels": ["lung"]}}}, r"g: kernels\[0\]: no kernel 'lung'\. Did you mean 'long'\?"),
        ],
    )  # fmt: skip
    def test_a_mistake_ends_in_one_sentence(self, change: dict[str, Any], message: str) -> None:
        spec = {"kernels": KERNELS, "processes": [{"threads": [{"run": []}]}]}
        with pytest.raises(UsageError, match=message):
            parse_spec({**spec, **change})

    @pytest.mark.parametrize(
        ("action", "message"),
        [
            ({"lunch": "short"}, r"run\[0\]: no action 'lunch'\. Did you mean 'launch'\?"),
            ({"launch": "shirt"}, r"run\[0\]: launch: no kernel 'shirt'\. Did you mean 'short'\?"),
            ({"launch": "short", "steam": 7}, r"run\[0\]: no key 'steam' here\. Did you mean 'stream'\?"),
            ({"graph": "g"}, r"run\[0\]: no graph 'g'\. There are: none\."),
            ({"copy": "h2d"}, r"run\[0\]: size is missing\."),
            (
                {"copy": "h2d", "size": "9 parsecs"},
                r"size: expected a size, such as 4096, 64KiB or 32MB, found '9 parsecs'",
            ),
            ({"sync": "event"}, r"run\[0\]: event is missing\."),
            ({"repeat": 0, "do": []}, r"repeat: expected a whole number over 0, found 0\."),
            ({"use": "loop"}, r"the sequence 'loop' uses itself\."),
            ("launch", r"run\[0\]: expected keys with values, found 'launch'\."),
        ],
    )
    def test_a_wrong_action_is_named_with_its_place(self, action: Any, message: str) -> None:
        spec = {
            "kernels": KERNELS,
            "sequences": {"loop": [{"use": "loop"}]},
            "processes": [{"threads": [{"run": [action]}]}],
        }
        with pytest.raises(UsageError, match=message):
            parse_spec(spec)

    def test_a_process_on_a_device_that_is_not_there(self) -> None:
        with pytest.raises(UsageError, match=r"process 4200 runs on device 1, but there are 1 devices"):
            parse_spec({"processes": [{"device": 1, "threads": [{"run": []}]}]})

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"a: [1", r"spec\.yaml, line 1: not valid YAML"),
            (b"\xff\xfe\x00", r"spec\.yaml is not text|not valid YAML"),
            (b"", r"spec\.yaml: expected keys with values, found nothing\."),
        ],
    )
    def test_a_file_that_is_no_spec(self, tmp_path: Path, content: bytes, message: str) -> None:
        path = tmp_path / "spec.yaml"
        path.write_bytes(content)
        with pytest.raises(UsageError, match=message):
            load_spec(path)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"none\.yaml cannot be read: No such file"):
            load_spec(tmp_path / "none.yaml")


class TestBuilder:
    @pytest.fixture(params=schema.VERSIONS)
    def version(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    def everything(self, version: str) -> TraceBuilder:
        t = TraceBuilder(version)
        t.gpu()
        p = t.process(4242, "vllm")
        th = p.thread()
        t.cuda_device(0, 0, p)
        t.launch(1_000, 500, 2_000, 300, "void f<int>(T1 *)", thread=th, grid=(3, 2, 1))
        t.copy(1_600, 100, 2_400, 50, thread=th, kind="d2h", dst="pageable", bytes=8)
        t.memset(2_500, 2_510, process=p)
        t.graph_launch(3_000, 100, [(3_200, 3_300, "a"), (3_300, 3_400, "b")], thread=th)
        t.graph_launch(4_000, 100, span=(4_200, 4_300), thread=th)
        correlation = t.api(4_300, 4_400, "cudaStreamSynchronize_v3020", thread=th)
        t.sync(4_300, 4_400, process=p, correlation=correlation)
        t.cuda_event(1, process=p, correlation=correlation)
        t.nvtx(1_000, 5_000, "step", thread=th, payload=3)
        t.nvtx(1_000, 5_000, "registered", thread=th, registered=True, payload=0.5)
        t.nvtx_start_end(1_000, 6_000, "request", thread=th, end_thread=p.thread(4243, "io"))
        t.nvtx_mark(1_500, "mark", thread=th)
        t.nvtx_domain(1_000, 1, "NCCL", thread=th)
        t.osrt(5_000, 6_000, "poll", thread=th)
        t.sched(5_000, cpu=3, switched_in=True, thread=th)
        t.overhead(6_000, 6_100, thread=th)
        t.cupti_overhead(6_100, 6_200, thread=th)
        t.memory_event(6_300, bytes=100, process=p)
        t.gpu_metric(6_400, 0, "SM Issue [Throughput %]", 44)
        t.diagnostic("Not all NVTX events might have been collected.")
        t.metadata("CAPTURE_EVENT_TYPE", "Cuda")
        t.system_env("NvDriverVersion", "550.54")
        return t

    def test_columns_stand_as_in_the_schema_of_the_version(self, version: str, tmp_path: Path) -> None:
        path = self.everything(version).write(tmp_path / "t.sqlite")
        for table in tables(path) - set(schema.enum_rows()) - {"ENUM_CUDA_KRENEL_LAUNCH_TYPE"}:
            found = [(name, kind, bool(null)) for _, name, kind, null, *_ in query(path, f"PRAGMA table_info({table})")]
            assert found == [tuple(column) for column in schema.tables(version)[table]], table

    def test_versions_differ_where_nsys_does(self, tmp_path: Path) -> None:
        old, middle, new = (tables(self.everything(v).write(tmp_path / v)) for v in schema.VERSIONS)
        assert "EXPORT_META_DATA" in old and not old & {"META_DATA_EXPORT", "META_DATA_CAPTURE"}
        assert {"META_DATA_EXPORT", "META_DATA_CAPTURE"} <= middle & new
        assert "ENUM_CUDA_KRENEL_LAUNCH_TYPE" in old and "ENUM_CUDA_KERNEL_LAUNCH_TYPE" in middle
        assert "CUPTI_ACTIVITY_KIND_OVERHEAD" in new and "CUPTI_ACTIVITY_KIND_OVERHEAD" not in middle

    def test_one_launch_joins_call_and_kernel(self, tmp_path: Path) -> None:
        t = TraceBuilder()
        correlation = t.launch(1_000, 500, 2_000, 300, "void f<int>(T1 *)", grid=(3, 2, 1), registersPerThread=40)
        path = t.write(tmp_path / "t.sqlite")
        rows = query(
            path,
            "SELECT r.start, r.end, k.start, k.end, d.value, s.value, gridX, gridY, registersPerThread, r.correlationId"
            " FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN CUPTI_ACTIVITY_KIND_RUNTIME r USING (correlationId)"
            " JOIN StringIds d ON d.id = demangledName JOIN StringIds s ON s.id = shortName"
            " WHERE globalPid = globalTid & ~16777215",
        )
        assert rows == [(1_000, 1_500, 2_000, 2_300, "void f<int>(T1 *)", "f", 3, 2, 40, correlation)]
        assert query(path, "SELECT startTime, stopTime FROM ANALYSIS_DETAILS") == [(1_000, 2_300)]

    def test_processes_have_correlation_ids_of_their_own(self) -> None:
        t = TraceBuilder()
        one, two = t.process(1, "a"), t.process(2, "b")
        ids = [t.launch(0, 1, 2, 3, thread=p.thread()) for p in (one, one, two)]
        assert ids == [1, 2, 1]

    def test_a_table_exists_when_it_has_rows_or_is_asked_for(self, tmp_path: Path) -> None:
        t = TraceBuilder()
        t.launch(0, 1, 2, 3)
        t.empty_table("NVTX_EVENTS")
        path = t.write(tmp_path / "t.sqlite")
        assert "NVTX_EVENTS" in tables(path) and "OSRT_API" not in tables(path)
        assert query(path, "SELECT count(*) FROM NVTX_EVENTS") == [(0,)]
        assert query(path, "SELECT value FROM META_DATA_EXPORT WHERE name = 'EXPORT_PARAM_LAZY'") == [("false",)]

    def test_a_column_can_be_left_out(self, tmp_path: Path) -> None:
        t = TraceBuilder()
        t.launch(0, 1, 2, 3)
        t.drop_column("CUPTI_ACTIVITY_KIND_KERNEL", "graphNodeId")
        columns = [
            row[1] for row in query(t.write(tmp_path / "t.sqlite"), "PRAGMA table_info(CUPTI_ACTIVITY_KIND_KERNEL)")
        ]
        assert "graphNodeId" not in columns and "gridId" in columns

    def test_a_misspelt_column_or_table_is_refused(self) -> None:
        with pytest.raises(ValueError, match="has no column gridx"):
            TraceBuilder().kernel(0, 1, gridx=3)
        with pytest.raises(ValueError, match="no table 'KERNELS'"):
            TraceBuilder().row("KERNELS", start=1)

    def test_writing_replaces_the_file_and_leaves_nothing_beside_it(self, tmp_path: Path) -> None:
        t = TraceBuilder()
        t.launch(0, 1, 2, 3)
        first = t.write(tmp_path / "t.sqlite").read_bytes()
        assert t.write(tmp_path / "t.sqlite").read_bytes() == first
        assert [path.name for path in tmp_path.iterdir()] == ["t.sqlite"]

    @pytest.mark.parametrize(
        ("name", "short"),
        [
            ("void flash::flash_fwd_kernel<Traits<(int)128>, (bool)1>(flash::Params)", "flash_fwd_kernel"),
            ("fused_moe_kernel", "fused_moe_kernel"),
            ("void at::native::<unnamed>::cunn_SoftMaxForward<(int)4>(T1 *)", "cunn_SoftMaxForward"),
        ],
    )
    def test_short_names(self, name: str, short: str) -> None:
        assert short_name(name) == short


def test_equal_correlation_ids_of_two_ranks_are_kept_apart_by_process(tmp_path: Path) -> None:
    trace = play_all([[{"launch": "short", "count": 3}], [{"launch": "long", "count": 3}]])
    path = write_nsys_sqlite(trace, tmp_path / "t.sqlite")
    rows = query(path, "SELECT correlationId, count(DISTINCT globalPid) FROM CUPTI_ACTIVITY_KIND_KERNEL GROUP BY 1")
    assert rows == [(1, 2), (2, 2), (3, 2)]


SAMPLES = sample_dirs()


@pytest.fixture(params=SAMPLES, ids=lambda path: path.name)
def sample(request: pytest.FixtureRequest) -> Iterator[Path]:
    yield request.param


class TestSamples:
    def test_there_is_one_for_every_class_that_a_timeline_can_show(self) -> None:
        classes = {yaml.safe_load((folder / "truth.yaml").read_text())["verdict"]["class"] for folder in SAMPLES}
        shown = {
            "compute-bound",
            "bandwidth-bound",
            "balanced",
            "scheduling-bubble",
            "pcie-limited",
            "communication-bound",
            "no-demand",
        }
        assert shown <= classes <= set(VERDICT_CLASSES)

    def test_the_spec_still_makes_what_is_stored(self, sample: Path, tmp_path: Path) -> None:
        (tmp_path / "spec.yaml").write_bytes((sample / "spec.yaml").read_bytes())
        build(tmp_path)
        assert (tmp_path / "truth.yaml").read_text() == (sample / "truth.yaml").read_text()
        # content, not bytes: the file header names the SQLite that wrote it
        with (
            closing(sqlite3.connect(sample / "trace.sqlite")) as old,
            closing(sqlite3.connect(tmp_path / "trace.sqlite")) as new,
        ):
            assert list(new.iterdump()) == list(old.iterdump())

    def test_the_rows_of_the_trace_give_the_figures_of_the_truth(self, sample: Path) -> None:
        stored = yaml.safe_load((sample / "truth.yaml").read_text())["key_figures"]
        ops = [
            *query(
                sample / "trace.sqlite",
                "SELECT deviceId, CASE WHEN value LIKE 'nccl%' THEN 'comm' ELSE 'kernel' END, start, end"
                " FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds ON id = demangledName",
            ),
            *query(sample / "trace.sqlite", "SELECT deviceId, 'copy', start, end FROM CUPTI_ACTIVITY_KIND_MEMCPY"),
        ]
        first, last = min(op[2] for op in ops), max(op[3] for op in ops)
        assert stored["window_ns"] == last - first
        assert len(stored["devices"]) == len({op[0] for op in ops})
        for device in stored["devices"]:
            mine = [op[1:] for op in ops if op[0] == device["id"]]
            assert sum(kind != "copy" for kind, _, _ in mine) == device["kernel_count"]
            counted = {"kernel": 0, "comm": 0, "copy": 0, "idle": 0}
            for start, end in pairwise(sorted({first, last, *(t for _, *times in mine for t in times)})):
                running = {kind for kind, s, e in mine if s <= start and end <= e}
                best = next((kind for kind in ("kernel", "comm", "copy") if kind in running), "idle")
                counted[best] += end - start
            assert list(counted.values()) == [
                device["compute_ns"],
                device["exposed_communication_ns"],
                device["exposed_copy_ns"],
                device["idle_ns"],
            ]

    def test_it_is_small_but_long_enough_to_judge(self, sample: Path) -> None:
        figures = yaml.safe_load((sample / "truth.yaml").read_text())["key_figures"]
        assert (sample / "trace.sqlite").stat().st_size < 400_000
        assert figures["window_ns"] >= 20_000_000
        assert all(device["kernel_count"] >= 300 for device in figures["devices"])

    def test_it_carries_no_private_word(self, sample: Path) -> None:
        names = query(sample / "trace.sqlite", "SELECT name FROM META_DATA_CAPTURE")
        assert not [name for (name,) in names if "ENVIRONMENT" in name or "USER" in name]
        assert "TARGET_INFO_SYSTEM_ENV" not in tables(sample / "trace.sqlite")


def test_every_example_of_the_package_docstring_parses() -> None:
    import infprof.simulator

    text = (infprof.simulator.__doc__ or "").split("::\n", 1)[1].split("\nActions,")[0]
    spec = yaml.safe_load(text)
    trace = simulate(parse_spec(copy.deepcopy(spec)))
    assert trace.spec.name == "one decode step after another"
    assert len([op for op in trace.ops if op.kind == "kernel"]) == 20 * 10


def test_generated_export_has_the_promised_rows(tmp_path: Path) -> None:
    path = tmp_path / "big.sqlite"
    script = ROOT / "benchmarks" / "generate_nsys.py"
    subprocess.run([sys.executable, str(script), str(path), "--kernels", "4_000"], check=True, capture_output=True)
    counts = {
        table: query(path, f"SELECT count(*) FROM {table}")[0][0]
        for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "GPU_METRICS")
    }
    assert counts == {
        "CUPTI_ACTIVITY_KIND_KERNEL": 4_000,
        "CUPTI_ACTIVITY_KIND_RUNTIME": 4 * (2_500 + 5),
        "NVTX_EVENTS": 4 * (1_000 + 50 + 1),
        "GPU_METRICS": 8_000,
    }
    launched_late = query(
        path,
        "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN CUPTI_ACTIVITY_KIND_RUNTIME r USING (correlationId)"
        " WHERE k.start < r.end OR k.end <= k.start",
    )
    assert launched_late == [(0,)]
    for table, columns in schema.tables("2023.4").items():
        if table in tables(path):
            assert [row[1] for row in query(path, f"PRAGMA table_info({table})")] == [c.name for c in columns]
