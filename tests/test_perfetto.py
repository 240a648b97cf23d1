"""The timeline for Perfetto: it holds the trace, shows what the diagnosis says where it says it, and viewers open it."""

from __future__ import annotations

import collections
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import test_slices_add_up as random_traces
from case_builders import MS, US, S, infprof
from infprof import trace as t
from infprof.diagnosis import Detailed, Options, analyze_file_in_detail, analyze_in_detail
from infprof.errors import UsageError
from infprof.reports import write_report
from infprof.reports.perfetto import write_perfetto
from infprof.reports.perfetto_layout import lanes, outer_first
from infprof.resources import rules_dir, sample_traces_dir
from infprof.results import Diagnosis
from infprof.rules import load
from infprof.simulator.builder import TraceBuilder
from infprof.telemetry import Fact, Series, Telemetry
from trace_events import Slice, Timeline, read_timeline

SAMPLES = sorted(sample_traces_dir().glob("*/trace.sqlite"))
LAUNCH_BOUND = sample_traces_dir() / "launch-bound-decode" / "trace.sqlite"
RULES = load([rules_dir()])


def drawn(detailed: Detailed, folder: Path) -> Timeline:
    """The timeline as a checked file; the figures that the writer gives are those of the file."""
    path = folder / "t.perfetto.json"
    counts = write_perfetto(path, detailed, force=True)
    timeline = read_timeline(path)
    samples = sum(map(len, timeline.counters.values()))
    assert counts == {"slices": len(timeline.slices), "counters": samples, "flows": len(timeline.flows)}
    return timeline


def built(builder: TraceBuilder, folder: Path, window: str = "full") -> Timeline:
    path = builder.write(folder / "trace.sqlite")
    return drawn(analyze_file_in_detail(path, Options(window)), folder)


def by_kind(slices: list[Slice]) -> dict[tuple[str, str | None], int]:
    total: dict[tuple[str, str | None], int] = collections.Counter()
    for found in slices:
        total[found.args["kind"], found.args["cause"]] += found.end_ns - found.start_ns
    return {key: ns for key, ns in total.items() if ns}


def hand_made(**tables: dict[str, list[Any]]) -> t.Trace:
    """A trace of one GPU, process and thread; columns that are not given hold -1."""
    made = {}
    for name, columns in tables.items():
        count = len(next(iter(columns.values())))
        zero = {"device": 0, "process": 0, "thread": 0, "stream": 0}
        every = {c: columns.get(c, [zero.get(c, -1)] * count) for c in t.SCHEMA[name]}
        made[name] = t.Table(name, {c: np.array(v) for c, v in every.items()})
    return t.Trace(
        strings=["gemm_kernel", "aten::mm", "cudaLaunchKernel"],
        devices=[t.Device(0, "NVIDIA H200")],
        processes=[t.Process(100, "python")],
        threads=[t.Thread(0, 100)],
        streams=[t.Stream(0, 0, 1, 7)],
        provenance=t.TraceProvenance("kineto", "2.9", ["rank0.json"]),
        **made,  # type: ignore[arg-type]
    )


# --- what is in it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.parent.name)
def test_the_timeline_holds_the_whole_trace(path: Path, tmp_path: Path) -> None:
    detailed = analyze_file_in_detail(path, Options("full"))
    timeline = drawn(detailed, tmp_path)
    assert detailed.prepared is not None
    trace = detailed.prepared.trace
    for category, table in (
        ("kernel", trace.kernels),
        ("graph", trace.graphs),
        ("copy", trace.copies),
        ("memset", trace.memsets),
        ("cuda", trace.api_calls),
        ("os", trace.os_calls),
        ("range", trace.ranges),
    ):
        found = timeline.of(category)
        assert len(found) == (0 if table is None else len(table)), category
        length = 0 if table is None else int((table["end"] - table["start"]).sum())
        assert sum(s.end_ns - s.start_ns for s in found) == length, category
    assert sum(map(len, timeline.counters.values())) == (0 if trace.counters is None else len(trace.counters))
    assert len(timeline.flows) == int((detailed.prepared.operations.launch >= 0).sum())


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.parent.name)
def test_findings_slices_and_verdict_are_those_of_the_diagnosis(path: Path, tmp_path: Path) -> None:
    detailed = analyze_file_in_detail(path)
    diagnosis, timeline = detailed.diagnosis, drawn(detailed, tmp_path)
    for finding in diagnosis.findings:
        here = [s for s in timeline.of("finding") if s.args["rule"] == finding.rule]
        assert {s.process for s in here} == {"infprof"}
        assert all(s.row.startswith(f"{finding.severity}: {finding.title}") for s in here)
        whole = [(diagnosis.window.start_ns, diagnosis.window.end_ns)]
        places = [(w.start_ns, w.end_ns) for w in finding.where] or whole
        assert sorted((s.start_ns, s.end_ns) for s in here) == sorted(places)
        for found in here:
            assert found.args["cost"] and found.args["evidence"] and found.args["remedies"]
    for device in diagnosis.devices:
        here = timeline.row(f"GPU {device.id}: where the time went")
        assert by_kind(here) == {(s.kind, s.cause): s.ns for s in device.slices}
        edges = sorted((s.start_ns, s.end_ns) for s in here if s.end_ns > s.start_ns)
        assert (edges[0][0], edges[-1][1]) == (diagnosis.window.start_ns, diagnosis.window.end_ns)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
    (window,) = timeline.row("window and verdict")
    assert (window.start_ns, window.end_ns) == (diagnosis.window.start_ns, diagnosis.window.end_ns)
    assert timeline.about["class"] == window.args["class"] == diagnosis.verdict.cls


@settings(max_examples=60, deadline=None)
@given(random_traces.traces(random_traces.POSITIVE), st.sampled_from(["auto", "full", "20ns:70ns"]))
def test_any_trace_makes_a_timeline_that_viewers_can_draw(
    tmp_path_factory: pytest.TempPathFactory, trace: t.Trace, window: str
) -> None:
    try:
        detailed = analyze_in_detail(trace, RULES, Options(window))
    except UsageError:
        return  # the window holds nothing
    timeline = drawn(detailed, tmp_path_factory.getbasetemp())
    for device in detailed.diagnosis.devices:
        here = [s for s in timeline.slices if s.row == f"GPU {device.id}: where the time went"]
        assert by_kind(here) == {(s.kind, s.cause): s.ns for s in device.slices}


def test_the_time_of_a_range_is_accounted_for_inside_its_occurrences(tmp_path: Path) -> None:
    detailed = analyze_file_in_detail(LAUNCH_BOUND, Options(range_name="decode_step_*"))
    timeline = drawn(detailed, tmp_path)
    (device,) = detailed.diagnosis.devices
    assert by_kind(timeline.row("GPU 0: where the time went")) == {(s.kind, s.cause): s.ns for s in device.slices}
    covered = sum(s.end_ns - s.start_ns for s in timeline.row("window and verdict"))
    assert covered == detailed.diagnosis.window.duration_ns


def test_a_window_leaves_out_what_lies_outside_and_keeps_the_launches_of_what_is_inside(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for i in range(10):
        # Queued for 15 ms: the kernel of turn i runs in the next one but one.
        builder.launch(i * 10 * MS, 5 * US, i * 10 * MS + 15 * MS, 9 * MS, f"kernel_{i}")
    timeline = built(builder, tmp_path, "50ms:70ms")
    # Kernel 3 runs until 54 ms: it is drawn whole.
    assert [(s.name, s.start_ns) for s in timeline.of("kernel")] == [
        (f"kernel_{i}", (i * 10 + 15) * MS) for i in (3, 4, 5)
    ]
    assert [begin.start_ns for begin, _ in timeline.flows] == [30 * MS, 40 * MS, 50 * MS]
    assert [end.name for _, end in timeline.flows] == ["kernel_3", "kernel_4", "kernel_5"]
    assert [s.start_ns for s in timeline.of("cuda")] == [30 * MS, 40 * MS, 50 * MS, 60 * MS]


def test_a_window_with_all_gpu_work_shows_what_the_host_did_before_and_after(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.nvtx(0, 2 * S, "load model")
    builder.launch(2 * S, 5 * US, 2 * S + 10 * US, 3 * MS)
    builder.osrt(3 * S, 4 * S, "poll")
    timeline = built(builder, tmp_path)
    assert [s.name for s in timeline.of("range") + timeline.of("os")] == ["load model", "poll"]


def test_a_trace_without_gpu_work_still_shows_the_host(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for i in range(20):
        builder.osrt(i * MS, i * MS + 100 * US, "poll")
    assert len(built(builder, tmp_path).of("os")) == 20


def test_names_are_exact_and_times_keep_every_nanosecond(tmp_path: Path) -> None:
    builder = TraceBuilder()
    name = 'void k<"µ", \\n>(%s, {"a": 1})'
    start = 3_600 * S + 123_456_789
    builder.launch(start, 1_001, start + 2_003, 999_999, name, grid=(2, 3, 4), block=(32, 2, 1))
    timeline = built(builder, tmp_path)
    (kernel,) = timeline.of("kernel")
    assert (kernel.name, kernel.start_ns, kernel.end_ns) == (name, start + 2_003, start + 1_002_002)
    assert (kernel.args["grid blocks"], kernel.args["block threads"]) == (24, 64)


def test_each_device_stream_and_thread_has_its_own_row(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.gpu()
    builder.gpu()
    one, other = builder.process(100, "engine"), builder.process(200, "worker")
    for device, process in ((0, one), (1, other)):
        for stream in (7, 13):
            thread = process.thread(process.pid + stream, f"t{stream}")
            builder.launch(MS, 5 * US, 2 * MS, MS, thread=thread, device=device, stream=stream)
    timeline = built(builder, tmp_path)
    gpus = "GPU 0 (NVIDIA H100 80GB HBM3)", "GPU 1 (NVIDIA H100 80GB HBM3)"
    assert sorted((s.process, s.row) for s in timeline.of("kernel")) == [
        (gpu, f"stream {stream}") for gpu in gpus for stream in (13, 7)
    ]
    assert sorted((s.process, s.row) for s in timeline.of("cuda")) == [
        ("engine", "t13 113"),
        ("engine", "t7 107"),
        ("worker", "t13 213"),
        ("worker", "t7 207"),
    ]


def test_what_crosses_on_one_row_goes_to_a_row_beside_it(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.launch(0, 5 * US, 10 * US, 100 * US, "first")
    builder.launch(6 * US, 5 * US, 50 * US, 100 * US, "second")
    builder.nvtx(0, 100 * US, "outer")
    builder.nvtx(20 * US, 90 * US, "inner")
    builder.nvtx_start_end(50 * US, 200 * US, "request 1")
    builder.nvtx_start_end(60 * US, 210 * US, "request 2", range_id=2)
    timeline = built(builder, tmp_path)
    assert {s.name: s.row for s in timeline.of("kernel")} == {
        "first": "stream 7 (overlapping 1)",
        "second": "stream 7 (overlapping 2)",
    }
    rows = {s.name: s.row for s in timeline.of("range")}
    assert rows["outer"] == rows["inner"] != rows["request 1"] != rows["request 2"]
    assert "start/end ranges" in rows["request 1"] and "start/end ranges" in rows["request 2"]


def test_operators_show_shapes_and_types_but_no_values(tmp_path: Path) -> None:
    trace = hand_made(
        kernels={"start": [60_000], "end": [90_000], "name": [0], "correlation": [5]},
        api_calls={"start": [40_000], "end": [45_000], "name": [2], "correlation": [5], "return_value": [0]},
        operators={"start": [30_000, 50_000], "end": [48_000, 55_000], "name": [1, 1], "inputs": [0, -1]},
    )
    trace.inputs = [t.OperatorInputs(((8, 4), (4, 2)), ("float", "float"), ("/home/zebedee/secret", ""))]
    timeline = drawn(analyze_in_detail(trace, RULES, Options("full")), tmp_path)
    shaped, plain = timeline.of("operator")
    assert shaped.args == {"Input Dims": [[8, 4], [4, 2]], "Input type": ["float", "float"]}
    assert plain.args == {}
    ((begin, end),) = timeline.flows
    assert (begin.name, end.name) == ("cudaLaunchKernel", "gemm_kernel")
    # What was not recorded is not said, or null: never -1.
    assert timeline.of("kernel")[0].args == {"class": "gemm", "correlation": 5}


def test_times_before_zero_are_moved_and_that_is_said(tmp_path: Path) -> None:
    trace = hand_made(
        kernels={"start": [-50, 5_000_000], "end": [2_000, 9_000_000], "name": [0, 0]},
        operators={"start": [-70], "end": [-20], "name": [1]},
    )
    timeline = drawn(analyze_in_detail(trace, RULES, Options("full")), tmp_path)
    assert [(s.start_ns, s.end_ns) for s in timeline.of("kernel")] == [(20, 2_070), (5_000_070, 9_000_070)]
    assert "70 ns later" in timeline.about["time"]


# --- counters and telemetry ---------------------------------------------------------------------------------------------


def test_hardware_counters_stand_with_their_gpu(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.gpu()
    builder.launch(0, 5 * US, 10 * US, 5 * MS)
    for i in range(5):
        builder.gpu_metric(i * MS + 10 * US, 0, "SM Issue [Throughput %]", 10 + i)
    timeline = built(builder, tmp_path)
    samples = timeline.counters["GPU 0 (NVIDIA H100 80GB HBM3)", "SM Issue [Throughput %]"]
    assert [value for _, value in samples] == [10, 11, 12, 13, 14]
    assert samples[1][0] - samples[0][0] == MS


def test_telemetry_is_drawn_without_naming_the_card_or_a_path(tmp_path: Path) -> None:
    trace = hand_made(kernels={"start": [10 * MS], "end": [50 * MS], "name": [0]})
    uuid = "gpu/GPU-8a7b6c5d-1111-2222-3333-444455556666"
    times = np.array([0, 20 * MS, 40 * MS, 900 * MS])
    trace.clock_start_unix_ns = 1
    trace.telemetry = Telemetry(
        [
            Series("nvml", "gpu_power", "watts", "gpu", uuid, {}, times, np.array([1.0, 2.5, np.nan, 4.0])),
            Series("serving", "running", "count", "engine", "", {"model": "/home/zebedee/m"}, times, np.arange(4.0)),
        ],
        [Fact("nvml", "gpu_index", uuid, 3)],
    )
    trace.telemetry_window = (0, 900 * MS)
    timeline = drawn(analyze_in_detail(trace, RULES, Options("full")), tmp_path)
    assert timeline.counters["telemetry: nvml", "gpu_power GPU 3 (watts)"] == [(20 * MS, 2.5)]
    assert timeline.counters["telemetry: serving", "running {model=<path>} (count)"] == [(20 * MS, 1), (40 * MS, 2)]
    trace.clock_start_unix_ns = None
    unaligned = drawn(analyze_in_detail(trace, RULES, Options("full")), tmp_path)
    assert unaligned.counters == {}, "telemetry of another clock must not stand below the timeline"


def test_names_of_processes_and_threads_carry_no_path_and_no_secret(tmp_path: Path) -> None:
    builder = TraceBuilder()
    process = builder.process(100, "/home/zebedee/venv/bin/python serve.py --api-key sk-12345")
    thread = process.thread(101, "/home/zebedee/worker")
    builder.launch(0, 5 * US, 10 * US, 5 * MS, thread=thread)
    path = builder.write(tmp_path / "trace.sqlite")
    write_perfetto(tmp_path / "t.json", analyze_file_in_detail(path, Options("full")))
    text = (tmp_path / "t.json").read_text(encoding="utf-8")
    assert "zebedee" not in text and "sk-12345" not in text and str(tmp_path) not in text
    assert "serve.py" in text


# --- rows ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=25))
def test_in_each_lane_events_nest_or_lie_apart(pairs: list[tuple[int, int]]) -> None:
    start = np.array([s for s, _ in pairs], dtype=np.int64)
    end = start + np.array([length for _, length in pairs], dtype=np.int64)
    order = outer_first(start, end)
    start, end = start[order], end[order]
    lane = lanes(start, end)
    for i in range(len(pairs)):
        for j in range(i + 1, len(pairs)):
            crosses = start[i] < start[j] < end[i] < end[j]
            assert not (crosses and lane[i] == lane[j])
    if not any(start[i] < start[j] < end[i] < end[j] for i in range(len(pairs)) for j in range(len(pairs))):
        assert not lane.any(), "what nests stays on one row"


def test_two_streams_in_one_take_no_more_rows_than_they_need() -> None:
    start = np.arange(100_000, dtype=np.int64) * 10
    assert set(lanes(start, start + 15).tolist()) == {1, 2}


# --- the file -----------------------------------------------------------------------------------------------------------


def test_the_same_input_gives_the_same_bytes_and_gzip_the_same_text(tmp_path: Path) -> None:
    detailed = analyze_file_in_detail(LAUNCH_BOUND)
    plain, packed = tmp_path / "a.json", tmp_path / "a.json.gz"
    write_perfetto(plain, detailed)
    write_perfetto(packed, detailed)
    assert read_timeline(plain) == read_timeline(packed)
    first = packed.read_bytes()
    write_perfetto(packed, analyze_file_in_detail(LAUNCH_BOUND), force=True)
    assert packed.read_bytes() == first
    assert len(first) < plain.stat().st_size / 5


def test_a_failure_leaves_nothing_and_what_was_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infprof.reports import perfetto

    detailed = analyze_file_in_detail(LAUNCH_BOUND)
    target = tmp_path / "a.json.gz"
    target.write_bytes(b"mine")
    with pytest.raises(UsageError, match="--force"):
        write_perfetto(target, detailed)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(perfetto, "draw_findings", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_perfetto(target, detailed, force=True)
    assert target.read_bytes() == b"mine"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json.gz"]


def test_a_stored_diagnosis_has_no_events_to_draw(tmp_path: Path) -> None:
    diagnosis: Diagnosis = analyze_file_in_detail(LAUNCH_BOUND).diagnosis
    with pytest.raises(UsageError, match="profile itself"):
        write_report("perfetto", Detailed(diagnosis, None, []), tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


# --- as a user ----------------------------------------------------------------------------------------------------------


def test_the_command_line_writes_a_timeline_beside_other_reports(tmp_path: Path) -> None:
    html, timeline, other = tmp_path / "r.html", tmp_path / "t.json.gz", tmp_path / "o.perfetto.json"
    done = infprof("report", LAUNCH_BOUND, "--html", html, "--perfetto", timeline, "-o", other)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "".join(f"infprof: wrote {p}\n" for p in (html, timeline, other))
    assert read_timeline(timeline) == read_timeline(other)
    done = infprof("analyze", LAUNCH_BOUND, "--perfetto", timeline, "--force", "--window", "full", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["window"]["how"] == "full"
    assert len(read_timeline(timeline).slices) >= len(read_timeline(other).slices)


def test_a_timeline_can_be_piped(tmp_path: Path) -> None:
    done = infprof("report", LAUNCH_BOUND, "--perfetto", "/dev/stdout")
    assert done.returncode == 0
    (tmp_path / "t.json").write_text(done.stdout, encoding="utf-8")
    assert read_timeline(tmp_path / "t.json").about["class"] == "scheduling-bubble"


@pytest.mark.parametrize("name", ["t.perfetto.json", "t.perfetto.json.gz"])
def test_a_timeline_is_not_taken_for_a_profile(name: str, tmp_path: Path) -> None:
    """It is a trace-event file, as those of PyTorch are: a diagnosis of it would be a wrong one."""
    target = tmp_path / name
    assert infprof("report", LAUNCH_BOUND, "-o", target).returncode == 0
    before = target.read_bytes()
    done = infprof("analyze", target)
    assert (done.returncode, done.stdout) == (3, "")
    assert "is a timeline that infprof drew for Perfetto, not a profile" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert target.read_bytes() == before


# --- viewers ------------------------------------------------------------------------------------------------------------


def test_real_traces_become_valid_timelines(shared_traces: Path, tmp_path: Path) -> None:
    for path in sorted((shared_traces / "nsys-sqlite").glob("*.sqlite.gz")):
        detailed = analyze_file_in_detail(path, Options("full"))
        timeline = drawn(detailed, tmp_path)
        assert detailed.prepared is not None
        for category, table in (("kernel", "kernels"), ("copy", "copies"), ("cuda", "api_calls")):
            rows = getattr(detailed.prepared.trace, table)
            assert len(timeline.of(category)) == (0 if rows is None else len(rows)), f"{path.name}: {category}"


def test_perfettos_own_trace_processor_loads_all_of_it(tmp_path: Path) -> None:
    """Runs where there is a trace_processor_shell, on the path or named by TRACE_PROCESSOR_SHELL."""
    processor = pytest.importorskip("perfetto.trace_processor", reason="needs the perfetto package")
    shell = os.environ.get("TRACE_PROCESSOR_SHELL") or shutil.which("trace_processor_shell")
    if shell is None:
        pytest.skip("needs trace_processor_shell")
    path = tmp_path / "t.perfetto.json.gz"
    counts = write_perfetto(path, analyze_file_in_detail(LAUNCH_BOUND))
    with processor.TraceProcessor(trace=str(path), config=processor.TraceProcessorConfig(bin_path=shell)) as loaded:

        def number(query: str) -> int:
            return int(next(iter(loaded.query(f"select ({query}) as n"))).n)

        assert number("select count(*) from slice") == counts["slices"]
        assert number("select count(*) from flow") == counts["flows"]
        assert number("select count(*) from slice where category = 'finding'") > 0
        assert number("select count(*) from stats where severity in ('error', 'data_loss') and value > 0") == 0
