"""The simulator's Kineto JSON: the same run as in the nsys export, spelt as PyTorch's profiler spells it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from infprof.errors import UsageError
from infprof.simulator import (
    SimulatedTrace,
    load_spec,
    not_in_kineto,
    parse_spec,
    simulate,
    truth,
    write_kineto,
)
from infprof.simulator.kineto_text import DIALECTS
from infprof.simulator.operators import Operator, parse_operator, tensor, work
from infprof.simulator.samples import sample_dirs

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = sample_dirs()
EPOCH_NS = 1_700_000_000_000_000_000

MM = "aten::mm(bf16[8, 4096], bf16[4096, 4096].t)"
KERNELS: dict[str, Any] = {
    "gemm": {"name": "nvjet_tst_64x8_TNT", "op": ["aten::linear(bf16[8, 4096], bf16[4096, 4096])", MM]},
    "norm": {"name": 'odd "name" with \\ and é', "time": "3us", "grid": [264, 1, 1], "block": [512, 1, 1]},
}


def play(*actions: dict[str, Any], **top: Any) -> SimulatedTrace:
    return play_all([[*actions]], **top)


def play_all(runs: list[list[dict[str, Any]]], **top: Any) -> SimulatedTrace:
    processes = [{"pid": 500 + n, "device": n, "threads": [{"run": run}]} for n, run in enumerate(runs)]
    return simulate(parse_spec({"kernels": KERNELS, "devices": [{}] * len(runs), "processes": processes, **top}))


def written(trace: SimulatedTrace, folder: Path, name: str = "run.json", **options: Any) -> dict[str, Any]:
    (path,) = write_kineto(trace, folder / name, force=True, **options)
    return parsed(path)


def parsed(path: Path) -> dict[str, Any]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    document: dict[str, Any] = json.loads(text, parse_float=Decimal)
    return document


def events(document: dict[str, Any], *categories: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event.get("cat") in categories]


def span_ns(document: dict[str, Any], event: dict[str, Any]) -> tuple[int, int]:
    """Start and end of an event in ns of the simulation."""
    start = int(event["ts"] * 1000) + document["baseTimeNanoseconds"] - EPOCH_NS
    return start, start + int(event["dur"] * 1000)


def infprof(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from infprof.cli import main; sys.exit(main())", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class TestSameRun:
    @pytest.fixture(params=SAMPLES, ids=lambda folder: folder.name)
    def trace(self, request: pytest.FixtureRequest) -> SimulatedTrace:
        return simulate(load_spec(request.param / "spec.yaml"))

    def test_gpu_work_and_calls_have_the_times_of_the_simulation_to_the_nanosecond(
        self, trace: SimulatedTrace, tmp_path: Path
    ) -> None:
        rows: list[tuple[Any, ...]] = []
        calls: list[tuple[Any, ...]] = []
        for path in write_kineto(trace, tmp_path / "run.json.gz"):
            document = parsed(path)
            for event in events(document, "kernel", "gpu_memcpy", "gpu_memset"):
                args = event["args"]
                rows.append((args["device"], args["stream"], args["correlation"], *span_ns(document, event)))
            for event in events(document, "cuda_runtime", "cuda_driver"):
                calls.append((event["pid"], event["args"]["correlation"], *span_ns(document, event)))
        assert sorted(rows) == sorted((op.device, op.stream, op.correlation, *op.span) for op in trace.ops)
        pids = [process.pid for process in trace.spec.processes]
        assert sorted(calls) == sorted((pids[c.process], c.correlation, c.start_ns, c.end_ns) for c in trace.calls)

    def test_the_rows_give_the_figures_of_the_truth(self, trace: SimulatedTrace, tmp_path: Path) -> None:
        documents = [parsed(path) for path in write_kineto(trace, tmp_path / "run.json")]
        for device in truth(trace)["devices"]:
            kernels = [
                (document, event)
                for document in documents
                for event in events(document, "kernel")
                if event["args"]["device"] == device["id"]
            ]
            total = sum(end - start for start, end in (span_ns(*kernel) for kernel in kernels))
            assert (len(kernels), total) == (device["kernel_count"], device["kernel_total_ns"])

    def test_operators_and_annotations_nest_and_enclose_their_call(self, trace: SimulatedTrace, tmp_path: Path) -> None:
        for path in write_kineto(trace, tmp_path / "run.json", stack=True):
            document = parsed(path)
            by_thread = defaultdict(list)
            for event in events(document, "cpu_op", "user_annotation", "python_function", "cuda_runtime"):
                by_thread[event["tid"]].append(span_ns(document, event))
            for spans in by_thread.values():
                assert_nested(spans)
            operators = {e["args"]["External id"]: span_ns(document, e) for e in events(document, "cpu_op")}
            linked = [e for e in events(document, "cuda_runtime") if "External id" in e["args"]]
            assert len({e["args"]["External id"] for e in linked}) == len(linked)
            for call in linked:
                start, end = operators[call["args"]["External id"]]
                call_start, call_end = span_ns(document, call)
                assert start <= call_start and call_end <= end

    def test_every_kernel_of_an_eager_launch_with_an_operator_names_it(
        self, trace: SimulatedTrace, tmp_path: Path
    ) -> None:
        for path in write_kineto(trace, tmp_path / "run.json"):
            document = parsed(path)
            names = {e["args"]["External id"]: e["name"] for e in events(document, "cpu_op")}
            found = Counter(
                names[e["args"]["External id"]] for e in events(document, "kernel") if "External id" in e["args"]
            )
            rank = document.get("distributedInfo", {}).get("rank", 0)
            expected = Counter(
                op.kernel.operators[-1].name if op.kernel else "record_param_comms"
                for op in trace.ops
                if op.process == rank
                and (op.kind == "comm" or (op.kernel and op.kernel.operators and op.graph_node is None))
            )
            assert found == expected


def assert_nested(spans: list[tuple[int, int]]) -> None:
    open_ends: list[int] = []
    for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], (start, end)
        open_ends.append(end)


class TestSpelling:
    STEP = ({"range": "decode_{i}", "repeat": 2, "do": [{"launch": "gemm"}, {"launch": "norm"}, {"sync": "stream"}]},)

    def test_the_file_begins_and_ends_as_torch_writes_it(self, tmp_path: Path) -> None:
        document = written(play(*self.STEP), tmp_path)
        keys = list(document)
        assert (keys[0], keys[-1], document["traceName"]) == ("schemaVersion", "traceName", "run.json")
        assert document["baseTimeNanoseconds"] % (7_889_238 * 10**9) == 0
        assert document["traceEvents"][0]["ph"] == "M"
        assert document["traceEvents"][-1]["name"] == "Record Window End"
        assert (
            document["deviceProperties"][0] | {"name": "NVIDIA H100 80GB HBM3", "numSms": 132}
            == (document["deviceProperties"][0])
        )
        starts = [event["ts"] for event in document["traceEvents"] if event["ph"] == "X"]
        assert starts != sorted(starts)

    def test_a_launch_its_kernel_and_their_flow_share_the_correlation(self, tmp_path: Path) -> None:
        document = written(play({"launch": "norm"}), tmp_path)
        (kernel,), (call,) = events(document, "kernel"), events(document, "cuda_runtime")
        assert kernel["name"] == 'odd "name" with \\ and é'
        assert (call["name"], call["args"]["cbid"]) == ("cudaLaunchKernel", 211)
        assert kernel["args"]["correlation"] == call["args"]["correlation"]
        flows = {event["ph"]: (event["id"], event["pid"], event["tid"]) for event in events(document, "ac2g")}
        id_ = call["args"]["correlation"]
        assert flows == {"s": (id_, 500, 500), "f": (id_, 0, 7)}
        args = kernel["args"]
        assert (args["grid"], args["block"]) == ([264, 1, 1], [512, 1, 1])
        # two blocks of 512 threads per SM, of the 2 that its registers allow
        assert (args["blocks per SM"], args["est. achieved occupancy %"]) == (2, 50)

    def test_operators_carry_their_inputs(self, tmp_path: Path) -> None:
        document = written(play({"launch": "gemm"}), tmp_path)
        outer, inner = events(document, "cpu_op")
        assert (outer["name"], inner["name"]) == ("aten::linear", "aten::mm")
        assert inner["args"]["Input Dims"] == [[8, 4096], [4096, 4096]]
        assert inner["args"]["Input Strides"] == [[4096, 1], [1, 4096]]
        assert inner["args"]["Input type"] == ["c10::BFloat16", "c10::BFloat16"]
        assert inner["args"]["Concrete Inputs"] == ["", ""]
        (kernel,) = events(document, "kernel")
        assert kernel["args"]["External id"] == inner["args"]["External id"]

    def test_copies_name_the_memory_at_both_ends(self, tmp_path: Path) -> None:
        document = written(
            play(
                {"copy": "h2d", "size": "1MiB", "memory": "pageable"},
                {"copy": "d2h", "size": 12},
                {"copy": "d2d", "size": 64},
                {"memset": 256},
            ),
            tmp_path,
        )
        copies = events(document, "gpu_memcpy", "gpu_memset")
        assert [(e["name"], e["args"]["bytes"]) for e in sorted(copies, key=lambda e: e["ts"])] == [
            ("Memcpy HtoD (Pageable -> Device)", 1 << 20),
            ("Memcpy DtoH (Device -> Pinned)", 12),
            ("Memcpy DtoD (Device -> Device)", 64),
            ("Memset (Device)", 256),
        ]
        dims = [(e["name"], e["args"]["Input type"][0], e["args"]["Input Dims"][0]) for e in events(document, "cpu_op")]
        assert dims == [
            ("aten::copy_", "long int", [1 << 17]),
            ("aten::copy_", "unsigned char", [12]),
            ("aten::copy_", "long int", [8]),
            ("aten::zero_", "long int", [32]),
        ]

    def test_ranges_become_annotations_on_host_and_gpu(self, tmp_path: Path) -> None:
        document = written(play(*self.STEP), tmp_path)
        names = [e["name"] for e in events(document, "user_annotation")]
        assert names == ["ProfilerStep#0", "decode_0", "ProfilerStep#1", "decode_1"]
        shadow = next(e for e in events(document, "gpu_user_annotation") if e["name"] == "decode_0")
        kernels = [span_ns(document, e) for e in events(document, "kernel")][:2]
        assert span_ns(document, shadow) == (kernels[0][0] - 1, kernels[1][1] + 1)

    def test_a_serving_engine_has_its_own_steps_alone(self, tmp_path: Path) -> None:
        step = {"range": "execute_context_0(0)_generation_1(1)", "do": [{"launch": "norm"}]}
        assert [e["name"] for e in events(written(play(step), tmp_path), "user_annotation")] == [step["range"]]

    def test_nodes_of_a_graph_share_the_launch_and_have_no_operator(self, tmp_path: Path) -> None:
        trace = play({"graph": "g"}, {"graph": "g"}, graphs={"g": {"kernels": ["gemm", "norm", "gemm"]}})
        document = written(trace, tmp_path)
        assert [e["name"] for e in events(document, "cuda_runtime")] == ["cudaGraphLaunch"] * 2
        args = [e["args"] for e in events(document, "kernel")]
        assert [a["correlation"] for a in args] == [1] * 3 + [2] * 3
        assert not any("External id" in a for a in args) and not events(document, "cpu_op")
        assert [a["graph node id"] & 0xFFFF for a in args] == [1, 2, 3] * 2
        assert {a["graph node id"] >> 32 for a in args} == {1}

    def test_waits_are_rows_only_when_asked_for(self, tmp_path: Path) -> None:
        run = [{"launch": "norm"}, {"record": "e"}, {"launch": "norm"}, {"record": "e"}]
        trace = play(*run, {"sync": "event", "event": "e", "ago": 1}, {"sync": "stream"}, {"sync": "device"})
        assert not events(written(trace, tmp_path), "cuda_sync")
        rows = events(written(trace, tmp_path, sync_events=True), "cuda_sync")
        assert [(e["name"], e["tid"]) for e in rows] == [("Event Sync", -1), ("Stream Sync", 7), ("Context Sync", -1)]
        # the record before the last one is the second call
        assert rows[0]["args"]["wait_on_cuda_event_record_corr_id"] == 2

    def test_python_frames_are_there_when_asked_for(self, tmp_path: Path) -> None:
        trace = play({"range": "schedule", "do": [{"host": "2ms"}]}, {"block": "epoll_wait", "for": "1ms"}, *self.STEP)
        assert not events(written(trace, tmp_path), "python_function")
        frames = events(written(trace, tmp_path, stack=True), "python_function")
        names = {e["args"]["Python id"]: e["name"] for e in frames}
        parents = {e["name"]: names.get(e["args"]["Python parent id"]) for e in frames}
        assert parents["engine.py(1): <module>"] is None
        waiting = next(name for name in parents if "select.epoll" in name)
        assert parents[waiting] == "engine.py(1): <module>"
        assert any(name.endswith(": schedule") for name in parents)

    def test_module_loads_and_profiler_stops_are_overhead(self, tmp_path: Path) -> None:
        trace = play(
            {"load_module": "5ms"}, {"overhead": "CUDA profiling data flush", "for": "2ms"}, {"launch": "norm"}
        )
        document = written(trace, tmp_path)
        rows = [(e["name"], e["pid"], span_ns(document, e)) for e in events(document, "overhead")]
        load, stop = trace.calls[0], trace.overheads[0]
        assert rows == [
            ("Runtime Triggered Module Loading", -1, (load.start_ns, load.end_ns)),
            ("Buffer Flush", -1, (stop.start_ns, stop.end_ns)),
        ]
        assert [e["name"] for e in events(document, "cuda_runtime", "cuda_driver")] == ["cudaLaunchKernel"]

    def test_allocations_are_memory_events(self, tmp_path: Path) -> None:
        document = written(play({"malloc": "1GiB"}, {"malloc": "1MiB"}, {"free": "1MiB"}, {"launch": "norm"}), tmp_path)
        rows = [e["args"] for e in events(document, "cpu_instant_event")]
        assert [(a["Bytes"], a["Total Allocated"]) for a in rows] == [
            (1 << 30, 1 << 30),
            (1 << 20, (1 << 30) + (1 << 20)),
            (-(1 << 20), 1 << 30),
        ]
        assert rows[1]["Addr"] == rows[2]["Addr"] and {a["Device Type"] for a in rows} == {1}
        assert document["profile_memory"] == 1


class TestDialects:
    STEP = TestSpelling.STEP

    def test_old_versions_write_whole_microseconds_since_1970(self, tmp_path: Path) -> None:
        trace = play(*self.STEP)
        for dialect in ("1.12", "2.2"):
            document = written(trace, tmp_path, dialect=dialect)
            assert "baseTimeNanoseconds" not in document
            kernels = events(document, "kernel", "Kernel")
            assert [(e["ts"], e["dur"]) for e in kernels] == [
                ((EPOCH_NS + start) // 1000, (end - start) // 1000) for start, end in (op.span for op in trace.ops)
            ]
            # there the External id of GPU work repeats the correlation
            assert all(e["args"]["External id"] == e["args"]["correlation"] for e in kernels)
            assert not events(document, "gpu_user_annotation")

    def test_each_version_has_its_names_and_arguments(self, tmp_path: Path) -> None:
        trace = play(*self.STEP, {"copy": "h2d", "size": 8})
        oldest = written(trace, tmp_path, dialect="1.12")
        assert {"Operator", "Kernel", "Runtime", "Memcpy", "user_annotation"} <= {
            e.get("cat") for e in oldest["traceEvents"]
        }
        assert "Profiler Event Index" in events(oldest, "Operator")[0]["args"]
        expected = {
            "2.2": {"Concrete Inputs"},
            "2.4": {"Concrete Inputs", "Input Strides"},
            "2.13": {"Concrete Inputs", "Input Strides"},
        }
        for dialect, keys in expected.items():
            args = events(written(trace, tmp_path, dialect=dialect), "cpu_op")[0]["args"]
            assert {"Concrete Inputs", "Input Strides"} & set(args) == keys
        assert "trace_id" not in written(trace, tmp_path, dialect="2.4")
        assert written(trace, tmp_path, dialect="2.4")["traceEvents"][0]["ph"] == "X"

    def test_there_are_no_others(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"no dialect '3' of Kineto here; there are 1.12, 2.2, 2.4, 2.13"):
            write_kineto(play(*self.STEP), tmp_path / "run.json", dialect="3")


class TestRanks:
    RUN = ({"launch": "norm"}, {"allreduce": "32MiB"}, {"allgather": "8MiB"})

    def test_each_process_is_a_file_of_its_own(self, tmp_path: Path) -> None:
        paths = write_kineto(play_all([[*self.RUN], [*self.RUN]]), tmp_path / "run.json.gz")
        assert [path.name.split(".")[0] for path in paths] == [
            "run_dp0_pp0_tp0_dcp0_ep0_rank0",
            "run_dp0_pp0_tp1_dcp0_ep0_rank1",
        ]
        assert all(path.name.endswith(".pt.trace.json.gz") for path in paths)
        documents = [parsed(path) for path in paths]
        assert [d["distributedInfo"]["rank"] for d in documents] == [0, 1]
        assert {d["distributedInfo"]["world_size"] for d in documents} == {2}
        assert len({d["baseTimeNanoseconds"] for d in documents}) == 1
        assert [{e["pid"] for e in events(d, "kernel")} for d in documents] == [{0}, {1}]

    def test_collectives_say_what_they_move_the_same_on_all_ranks(self, tmp_path: Path) -> None:
        documents = [parsed(p) for p in write_kineto(play_all([[*self.RUN], [*self.RUN]]), tmp_path / "run.json")]
        keys = (
            "Collective name",
            "In msg nelems",
            "Out msg nelems",
            "dtype",
            "Group size",
            "Process Group Ranks",
            "Seq",
        )
        expected = [
            ("allreduce", 16 << 20, 16 << 20, "BFloat16", 2, "[0, 1]", 0),
            ("_allgather_base", 2 << 20, 4 << 20, "BFloat16", 2, "[0, 1]", 1),
        ]
        for document in documents:
            kernels = [e["args"] for e in events(document, "kernel") if "nccl" in e["name"]]
            assert [tuple(args[key] for key in keys) for args in kernels] == expected
            operators = [e for e in events(document, "cpu_op") if e["name"] == "record_param_comms"]
            assert [e["args"]["External id"] for e in operators] == [args["External id"] for args in kernels]
            assert [e["name"] for e in events(document, "user_annotation")] == [
                "nccl:all_reduce",
                "nccl:_all_gather_base",
            ]

    def test_processes_that_do_not_communicate_are_data_parallel(self, tmp_path: Path) -> None:
        paths = write_kineto(play_all([[{"launch": "norm"}], [{"launch": "norm"}]]), tmp_path / "run.json")
        assert ["dp1" in path.name for path in paths] == [False, True]
        assert "distributedInfo" not in parsed(paths[0])


class TestWriting:
    def test_the_same_trace_gives_the_same_bytes_and_no_file_is_replaced_unasked(self, tmp_path: Path) -> None:
        trace = play({"launch": "gemm"})
        (path,) = write_kineto(trace, tmp_path / "run.json.gz")
        first = path.read_bytes()
        with pytest.raises(UsageError, match="exists already"):
            write_kineto(trace, path)
        write_kineto(trace, path, force=True)
        assert path.read_bytes() == first
        assert [p.name for p in tmp_path.iterdir()] == ["run.json.gz"]

    def test_no_rank_is_written_when_one_is_in_the_way(self, tmp_path: Path) -> None:
        trace = play_all([[{"launch": "norm"}], [{"launch": "norm"}]])
        first, second = write_kineto(trace, tmp_path / "run.json")
        first.unlink()
        with pytest.raises(UsageError, match="exists already"):
            write_kineto(trace, tmp_path / "run.json")
        assert not first.exists() and second.exists()

    def test_what_the_profiler_cannot_record_is_refused(self, tmp_path: Path) -> None:
        whole = play({"graph": "g"}, graphs={"g": {"kernels": ["norm"], "trace": "graph"}})
        with pytest.raises(UsageError, match="set trace: node"):
            write_kineto(whole, tmp_path / "run.json")
        with pytest.raises(UsageError, match="no process uses CUDA"):
            write_kineto(play({"host": "1ms"}), tmp_path / "run.json")
        assert not list(tmp_path.iterdir())

    def test_what_is_lost_is_listed(self) -> None:
        assert not_in_kineto(play({"launch": "norm"})) == []
        trace = play_all(
            [[{"launch": "norm"}, {"block": "read", "for": "1ms"}], [{"host": "1ms"}]], counters={"rate": 1000}
        )
        assert not_in_kineto(trace) == [
            "operating-system calls",
            "GPU metrics",
            "processes without CUDA: python3",
        ]

    def test_the_command_takes_the_extension_and_says_what_it_wrote(self, tmp_path: Path) -> None:
        spec = ROOT / "sample_traces" / "communication-bound-tp" / "spec.yaml"
        done = infprof("simulate", spec, "-o", tmp_path / "tp.json.gz", "--dialect", "2.4", "--stack")
        files = sorted(tmp_path.iterdir())
        assert (done.returncode, len(files)) == (0, 2)
        assert done.stderr.splitlines() == [f"infprof: wrote {path}" for path in files]
        assert events(parsed(files[0]), "python_function")
        done = infprof("simulate", spec, "-o", tmp_path / "tp.sqlite", "--stack")
        assert done.returncode == 2 and "go with .json or .json.gz" in done.stderr


class TestOperators:
    def test_text_becomes_inputs(self) -> None:
        operator = parse_operator("aten::convolution(f16[2, 3, 8, 8], f16[4, 3, 3, 3], _, [1, 1], 0.5, True)", "here")
        assert operator.name == "aten::convolution"
        assert operator.inputs[0] == tensor("f16", 2, 3, 8, 8)
        assert operator.inputs[2:] == ("", "[1, 1]", "0.5", "True")

    @pytest.mark.parametrize("text", ["aten::mm", "aten::mm(bf17[2, 2])", "aten::mm(bf16[2, x])", "f(two)", 3])
    def test_a_mistake_is_named_with_its_place(self, text: Any) -> None:
        with pytest.raises(UsageError, match=r"^here: "):
            parse_operator(text, "here")

    @pytest.mark.parametrize(
        ("text", "flop", "size"),
        [
            ("aten::mm(bf16[2, 3], bf16[3, 5])", 2 * 2 * 3 * 5, 2 * (6 + 15 + 10)),
            ("aten::addmm(bf16[5], bf16[2, 3], bf16[3, 5], 1, 1)", 60, 2 * (5 + 6 + 15 + 10)),
            ("aten::bmm(f32[7, 2, 3], f32[7, 3, 5])", 7 * 60, 4 * 7 * 31),
            ("aten::linear(bf16[4, 2, 3], bf16[5, 3], _)", 4 * 60, 2 * (24 + 15 + 40)),
            # 2 images, 4 filters of 3x3x3 over 6x6 places
            (
                "aten::convolution(f16[2, 3, 8, 8], f16[4, 3, 3, 3], _, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)",
                2 * 2 * 4 * 36 * 27,
                2 * (384 + 108 + 288),
            ),
            # one head, 4 queries, 4 keys, size 8: all pairs, or 10 of the 16
            ("aten::scaled_dot_product_attention(bf16[1, 1, 4, 8], bf16[1, 1, 4, 8], bf16[1, 1, 4, 8])", 512, 256),
            (
                "aten::scaled_dot_product_attention(bf16[1, 1, 4, 8], bf16[1, 1, 4, 8], bf16[1, 1, 4, 8], _, 0.0, True)",
                320,
                256,
            ),
            ("aten::add(bf16[2, 8], bf16[8], 1)", 0, 2 * (16 + 8 + 16)),
        ],
    )
    def test_work_follows_from_shapes(self, text: str, flop: int, size: int) -> None:
        assert work(parse_operator(text, "here")) == (flop, size)

    def test_shapes_that_do_not_fit_are_refused(self) -> None:
        with pytest.raises(ValueError, match="do not fit"):
            work(Operator("aten::mm", (tensor("bf16", 2, 3), tensor("bf16", 4, 5))))
        with pytest.raises(UsageError, match="kernels: k: op: the shapes of aten::mm do not fit it"):
            play(kernels={"k": {"name": "k", "op": "aten::mm(bf16[2, 3], bf16[4, 5])"}})

    def test_a_kernel_lasts_as_long_as_its_shapes_ask_for(self) -> None:
        device = {"flops": 1e12, "flops_reached": 0.5, "bandwidth": 1e15, "kernel_floor": 0}
        kernels = {"k": {"name": "k", "op": "aten::mm(bf16[1000, 1000], bf16[1000, 500])"}}
        (op,) = play({"launch": "k"}, kernels=kernels, devices=[device]).ops
        assert op.span[1] - op.span[0] == 2_000_000

    def test_a_time_that_the_device_cannot_reach_is_refused(self) -> None:
        kernels = {"k": {"name": "k", "time": "1us", "op": "aten::mm(bf16[1000, 1000], bf16[1000, 1000])"}}
        with pytest.raises(UsageError, match=r"needs 2e\+15 FLOP/s, more than the 9.89e\+14 of NVIDIA H100"):
            play({"launch": "k"}, kernels=kernels)

    def test_flops_that_are_not_those_of_the_shapes_are_refused(self) -> None:
        kernels = {"k": {"name": "k", "flops": 5e9, "op": "aten::mm(bf16[1000, 1000], bf16[1000, 1000])"}}
        with pytest.raises(UsageError, match=r"flops is 5e\+09, but the shapes of aten::mm need 2e\+09"):
            play(kernels=kernels)

    @pytest.mark.parametrize("sample", SAMPLES, ids=lambda folder: folder.name)
    def test_no_sample_computes_faster_than_its_device(self, sample: Path) -> None:
        trace = simulate(load_spec(sample / "spec.yaml"))
        for op in trace.ops:
            if op.kernel and op.kernel.operators:
                flop = work(op.kernel.operators[-1])[0]
                assert flop <= trace.spec.devices[op.device].flops * (op.span[1] - op.span[0]) / 1e9, op.name


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_the_generated_trace_is_well_formed(share: float, tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "generate_kineto.py"
    path = tmp_path / "big.json"
    options = ["--events", "9_000", "--python-share", str(share)]
    done = subprocess.run(
        [sys.executable, str(script), str(path), *options], check=True, capture_output=True, text=True
    )
    document = parsed(path)
    assert f"{len(document['traceEvents']):,} events" in done.stdout
    assert len(document["traceEvents"]) >= 9_000
    counts = Counter(event.get("cat") for event in document["traceEvents"])
    assert counts["cpu_op"] == 2 * counts["kernel"]
    assert (counts["python_function"] / counts.total() > 0.85) == (share == 0.9)
    calls = {e["args"]["correlation"]: e for e in events(document, "cuda_runtime")}
    assert len(calls) == counts["cuda_runtime"]
    end = Decimal(0)
    for event in sorted(events(document, "kernel", "gpu_memcpy"), key=lambda e: e["ts"]):
        call = calls[event["args"]["correlation"]]
        assert event["ts"] >= max(end, call["ts"])
        end = event["ts"] + event["dur"]
    assert_nested(
        [span_ns(document, e) for e in events(document, "cpu_op", "user_annotation", "python_function", "cuda_runtime")]
    )


def test_every_dialect_is_strict_json(tmp_path: Path) -> None:
    trace = simulate(load_spec(SAMPLES[0] / "spec.yaml"))
    for dialect in DIALECTS:
        assert events(written(trace, tmp_path, dialect=dialect), "kernel", "Kernel")
