"""PyTorch profiler traces: every dialect and every defect that people have met, and what must be read of each."""

from __future__ import annotations

import gzip
import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from case_builders import (
    MS,
    US,
    diagnose,
    idle,
    infprof,
    measure,
    problem,
    problem_codes,
    rules,
    slices,
)
from infprof.diagnosis import Options, analyze_file
from infprof.errors import InfprofError
from infprof.readers import read
from infprof.results import Diagnosis
from infprof.simulator.builder import TraceBuilder
from infprof.trace import D2H, DEVICE, H2D, PAGEABLE, PINNED, Trace
from kineto_builder import H100, KinetoBuilder, steady


def full(path: Path) -> Diagnosis:
    return analyze_file(path, Options(window="full"))


def times(trace: Trace) -> list[tuple[str, int, int]]:
    assert trace.kernels is not None
    rows = zip(
        trace.kernels["name"].tolist(), trace.kernels["start"].tolist(), trace.kernels["end"].tolist(), strict=True
    )
    return [(trace.strings[name], start, end - start) for name, start, end in rows]


# --- JSON that is not JSON ------------------------------------------------------------------------------------------


def test_a_bare_list_with_one_broken_key(data: Path) -> None:
    """R-01."""
    trace = read(data / "kineto-list-broken-key.json")
    # The broken event is the last one but one: a flow, which nothing needs.
    assert [(name, length) for name, _, length in times(trace)] == [("mul", 134_175)]
    assert trace.operators is not None
    assert len(trace.operators) == 1
    lost = next(p for p in trace.problems if p.code == "unreadable-events")
    assert lost.count == 1
    text = (data / "kineto-list-broken-key.json").read_bytes()
    assert f"byte {text.rindex(b'{', 0, text.index(b'tid' + bytes([34]) + b': 0')):,}" in lost.message


def test_an_unescaped_name_costs_its_own_event_only(data: Path) -> None:
    """R-02."""
    trace = read(data / "kineto-unescaped.json")
    assert [name for name, _, _ in times(trace)] == ["gemm_bf16_128x128", "softmax_warp"]
    assert trace.operators is not None
    assert len(trace.operators) == 1
    lost = next(p for p in trace.problems if p.code == "unreadable-events")
    text = (data / "kineto-unescaped.json").read_bytes()
    assert lost.count == 1
    assert f"byte {text.rindex(b'{', 0, text.index(b'lib = make')):,}" in lost.message
    assert "cut-short" not in {p.code for p in trace.problems}


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_name_that_is_no_utf8_keeps_its_kernel(tmp_path: Path, suffix: str) -> None:
    """R-03."""
    builder = KinetoBuilder()
    for i, name in enumerate(["gemm_a", "@@", "gemm_b"]):
        builder.kernel(10 * i, 5, name)
    raw = builder.text().encode().replace(b"@@", b"\xff\xfe\x80a")
    path = tmp_path / f"trace{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    trace = read(path)
    assert [length for _, _, length in times(trace)] == [5 * US] * 3
    assert [name for name, _, _ in times(trace)][1] == "\ufffd\ufffd\ufffda"
    assert [p.count for p in trace.problems if p.code == "unprintable-names"] == [1]
    done = infprof("analyze", "--json", path)
    assert json.loads(done.stdout)["devices"][0]["kernels"]["count"] == 3


def test_control_characters_in_frame_names_lose_nothing(tmp_path: Path) -> None:
    """As torch 2.2 to 2.4 wrote them with stacks on."""
    builder = steady(20)
    builder.add("python_function", "torch/_inductor/__init__.py(0): @@", 0, 100)
    raw = builder.text().encode().replace(b"@@", b"\x01\x02\x00\xf0\x80")
    path = tmp_path / "trace.json"
    path.write_bytes(raw)
    trace = read(path)
    assert len(times(trace)) == 20
    assert "unreadable-events" not in {p.code for p in trace.problems}


def test_numbers_that_are_none_become_missing(data: Path) -> None:
    """R-14."""
    path = data / "kineto-inf.json"
    diagnosis = full(path)
    copies = diagnosis.devices[0].copies
    assert [(c.kind, c.count, c.bytes, c.pageable_bytes) for c in copies] == [("h2d", 4, 800, 800)]
    assert problem(diagnosis, "zero-copies").count == 1
    assert problem(diagnosis, "non-finite-numbers").count == 4
    assert diagnosis.devices[0].kernels.count == 2
    text = json.dumps(diagnosis.to_dict(), allow_nan=False)
    assert "Infinity" not in text


@pytest.mark.parametrize("spelling", ["inf", "-inf", "nan", "-nan", "NaN", "Infinity", "-Infinity", "N/A", "nan(ind)"])
def test_every_spelling_of_no_number(tmp_path: Path, spelling: str) -> None:
    builder = KinetoBuilder()
    builder.kernel(0, 5, "nan_to_num inf: N/A, x", **{"est. achieved occupancy %": "@@"})
    path = tmp_path / "trace.json"
    path.write_text(builder.text().replace('"@@"', spelling))
    trace = read(path)
    # Strings are left as they are.
    assert times(trace) == [("nan_to_num inf: N/A, x", 0, 5 * US)]


def test_decimal_commas_of_a_locale(tmp_path: Path) -> None:
    builder = KinetoBuilder()
    builder.kernel(0, 5, **{"blocks per SM": "@@", "warps per SM": "@@"})
    path = tmp_path / "trace.json"
    path.write_text(builder.text().replace('"@@"', "0,75"))
    trace = read(path)
    assert len(times(trace)) == 1
    assert {p.code for p in trace.problems} == {"decimal-commas"}


# --- times ----------------------------------------------------------------------------------------------------------


def test_an_event_of_centuries_is_left_out(tmp_path: Path) -> None:
    """R-04."""
    base = 1_780_000_000_000_000
    builder = KinetoBuilder()
    builder.kernel(base, 100)
    builder.kernel(base + 150, 100)
    builder.kernel(base + 200, 7_450_000_000_000_000)
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    assert (diagnosis.window.start_ns, diagnosis.window.end_ns) == (0, 250 * US)
    assert slices(diagnosis)["compute", None] == 200 * US
    assert idle(diagnosis) == 50 * US
    lost = problem(diagnosis, "absurd-kernels")
    assert lost.count == 1
    assert "impossible" in lost.message


def test_durations_under_a_microsecond_are_exact(data: Path) -> None:
    """R-05."""
    trace = read(data / "kineto-submicro.json")
    assert [length for _, _, length in times(trace)] == [200, 150, 999]
    assert trace.problems == []


@pytest.mark.parametrize("absolute", [True, False])
def test_nanoseconds_survive_large_numbers(data: Path, tmp_path: Path, absolute: bool) -> None:
    """R-15. Back to back: no gap and no overlap. Relative times as large as torch 2.4 writes them are doubles."""
    path = data / "kineto-abs-ns.json"
    if not absolute:
        path = tmp_path / "trace.json"
        path.write_text((data / "kineto-abs-ns.json").read_text().replace("17140000001", "78892379991"[:8]))
    trace = read(path)
    rows = times(trace)
    assert [length for _, _, length in rows] == [900, 311, 2222, 778]
    assert [start for _, start, _ in rows] == [0, 900, 1211, 3433]
    assert slices(full(path))["compute", None] == 4211


def test_the_base_time_may_stand_before_or_behind_the_events(data: Path, tmp_path: Path) -> None:
    """R-16, each file by itself."""
    first, second = (read(data / f"kineto-base-r{rank}.json") for rank in (0, 1))
    assert first.clock_start_unix_ns == 1_700_000_000_000_000_000 + 40 * US
    assert second.clock_start_unix_ns == 1_700_000_000_000_040_000 + 5 * US
    assert (first.rank, second.rank, first.world_size) == (0, 1, 2)


def test_times_as_text_are_numbers(data: Path) -> None:
    """R-17."""
    trace = read(data / "kineto-string-ts.json")
    assert times(trace) == [("k_first", 0, 500), ("k_mid", 750, 2250), ("k_late", 900_500, 5500)]
    assert [p.count for p in trace.problems if p.code == "times-as-text"] == [3]


@pytest.mark.parametrize("early", [2, 4])
def test_kernels_before_their_launch_call_are_kept(tmp_path: Path, early: int) -> None:
    """R-18."""
    builder = KinetoBuilder()
    for i in range(1000):
        at = 40.0 * i + 100
        builder.launch(at, 3, at - early if i % 5 < 2 else at + 4, 10)
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    assert diagnosis.devices[0].kernels.count == 1000
    assert measure(diagnosis, "negative_delay_count") == 400
    assert measure(diagnosis, "clock_skew_ns") == early * US
    assert measure(diagnosis, "queue_delay_p50_ns") == 1 * US
    assert problem(diagnosis, "clock-skew").count == 400


def test_negative_and_missing_durations_are_counted(tmp_path: Path) -> None:
    builder = steady(100)
    builder.kernel(500, -3)
    builder.kernel(500, None)
    builder.events.append({"ph": "X", "cat": "kernel", "name": "bare"})
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    assert diagnosis.devices[0].kernels.count == 100
    assert problem(diagnosis, "negative-kernels").count == 1
    assert problem(diagnosis, "untimed-kernels").count == 2


def test_order_and_repetition_of_events_do_not_matter(tmp_path: Path) -> None:
    builder = steady(300)
    plain = full(builder.write(tmp_path / "a.json"))
    builder.events = builder.events[::-1]
    reversed_ = full(builder.write(tmp_path / "a.json"))
    assert reversed_.to_dict() == plain.to_dict()
    builder.events += [e for e in builder.events if e["cat"] in ("kernel", "cuda_runtime")]
    twice = full(builder.write(tmp_path / "a.json"))
    assert slices(twice) == slices(plain)
    assert twice.devices[0].kernels == plain.devices[0].kernels
    assert problem(twice, "duplicate-kernels").count == 300
    assert problem(twice, "duplicate-CUDA-calls").count == 300


def test_equal_nodes_of_a_graph_are_no_repetition(tmp_path: Path) -> None:
    """In whole microseconds two branches of a graph can look alike: they share a stream and a correlation id."""
    builder = KinetoBuilder()
    builder.call(0, 5, "cudaGraphLaunch", 1)
    for ts in (10, 10, 12):
        builder.kernel(ts, 2, "node", 1)
    trace = read(builder.write(tmp_path / "trace.json"))
    assert len(times(trace)) == 3


# --- dialects -------------------------------------------------------------------------------------------------------


def test_old_and_new_category_names_mean_the_same(tmp_path: Path) -> None:
    new, old = (steady(100, old_names=names) for names in (False, True))
    for builder in (new, old):
        builder.add(
            "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 3000, 50, pid=0, tid=7, device=0, stream=7, bytes=4096
        )
    a, b = full(new.write(tmp_path / "a.json")), full(old.write(tmp_path / "a.json"))
    assert a.to_dict() == b.to_dict()
    assert a.devices[0].copies[0].bytes == 4096


def test_one_gpu_without_rank_and_without_memsets(tmp_path: Path) -> None:
    """R-06."""
    path = steady(100).write(tmp_path / "trace.json")
    assert (read(path).rank, read(path).world_size) == (None, None)
    diagnosis = full(path)
    assert [d.id for d in diagnosis.devices] == [0]
    assert diagnosis.devices[0].name == H100["name"]
    assert not any("memset" in p.message for p in diagnosis.problems)


def test_copies_say_direction_size_and_memory(tmp_path: Path) -> None:
    builder = steady(60)
    for i, (name, size) in enumerate(
        [
            ("Memcpy HtoD (Pageable -> Device)", {"bytes": 100}),
            ("Memcpy DtoH (Device -> Pinned)", {"bytes": 200}),
            ("Memcpy HtoD (Host -> Device)", {"size": 300}),
        ]
    ):
        builder.add("gpu_memcpy", name, 2000 + i * 10, 5, pid=0, tid=7, device=0, stream=7, correlation=900 + i, **size)
    table = read(builder.write(tmp_path / "trace.json")).copies
    assert table is not None
    rows = [tuple(table[c].tolist()[i] for c in ("kind", "src", "dst", "bytes")) for i in range(3)]
    assert rows[0] == (H2D, PAGEABLE, DEVICE, 100)
    assert rows[1] == (D2H, DEVICE, PINNED, 200)
    # ROCm does not say whether the host's memory is pinned, and older ones call the bytes size.
    assert rows[2][0] == H2D
    assert rows[2][1] not in (PAGEABLE, PINNED)
    assert rows[2][3] == 300


def test_grids_in_threads_become_blocks(tmp_path: Path) -> None:
    """hipExtModuleLaunchKernel records work-items, the others blocks."""
    builder = KinetoBuilder()
    builder.launch(0, 2, 10, 5, api="hipExtModuleLaunchKernel", grid=[65536, 1, 1], block=[256, 1, 1])
    builder.launch(20, 2, 30, 5, api="hipLaunchKernel", grid=[65536, 1, 1], block=[256, 1, 1])
    table = read(builder.write(tmp_path / "trace.json")).kernels
    assert table is not None
    assert table["grid_blocks"].tolist() == [256, 65536]


def test_a_device_number_of_the_node_gets_its_name(tmp_path: Path) -> None:
    """ROCm numbers GPUs behind the CPUs: device 2 is the only one there is."""
    builder = KinetoBuilder(devices=[{**H100, "name": "AMD Instinct MI300X", "numSms": 304}])
    for i in range(60):
        builder.launch(i * 20, 2, i * 20 + 5, 10, device=2)
    device = full(builder.write(tmp_path / "trace.json")).devices[0]
    assert (device.id, device.name) == (2, "AMD Instinct MI300X")


def test_a_small_process_id_is_no_device(tmp_path: Path) -> None:
    """In a container the process is number 1, and GPU 1 may be in use: categories decide."""
    builder = steady(60, pid=1, devices=[H100, {**H100, "id": 1}])
    builder.launch(5000, 2, 5010, 10, device=1)
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    assert [(d.id, d.kernels.count, d.process_ids) for d in diagnosis.devices] == [(0, 60, [1]), (1, 1, [1])]


def test_a_merged_file_keeps_its_ranks_apart(tmp_path: Path) -> None:
    """R-24, as SGLang merges: process ids carry a label, correlation ids collide."""
    builder = KinetoBuilder(devices=[H100, {**H100, "id": 0}])
    for rank in (0, 1):
        for i in range(200):
            at = 1000.0 * i + rank * 500
            builder.add("cuda_runtime", "cudaLaunchKernel", at, 3, pid=f"[TP0{rank}] 77", tid=77, correlation=i)
            place = {"device": 0, "stream": 7, "correlation": i}
            builder.add("kernel", "gemm", at + 11, 100, pid=f"[TP0{rank}] 0", tid=7, **place)
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    assert [d.kernels.count for d in diagnosis.devices] == [200, 200]
    for device in diagnosis.devices:
        assert measure(diagnosis, "queue_delay_p95_ns", device.id) == 8 * US


def test_the_same_stream_number_on_several_devices(tmp_path: Path) -> None:
    """R-20."""
    builder = KinetoBuilder(devices=[{**H100, "id": i} for i in range(4)])
    for device in range(4):
        for i in range(100):
            builder.kernel(i * 100, 86, device=device, stream=7 if device == 0 else 17, corr=device * 1000 + i + 1)
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    assert [slices(d)["compute", None] for d in diagnosis.devices] == [8600 * US] * 4
    trace = read(tmp_path / "trace.json")
    assert len(trace.streams) == 4


def test_launch_calls_under_any_name(tmp_path: Path) -> None:
    """R-22."""
    names = ["cudaLaunchKernel_v7000", "cudaLaunchKernelExC_v11060", "cuLaunchKernelEx", "cuLaunchKernel"]
    names += ["cudaLaunchCooperativeKernel_v9000", "cudaLaunchKernelXYZ_v14000"]
    builder = KinetoBuilder()
    for i in range(60):
        builder.launch(i * 20.0, 2, i * 20 + 5, 10, api=names[i % 6])
    builder.call(1300, 4, "cudaGraphLaunch_v10000", 500)
    for i in range(10):
        builder.kernel(1310 + i * 10, 10, corr=500)
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    assert measure(diagnosis, "launch_count") == 61
    assert measure(diagnosis, "unlaunched_kernel_ratio") == 0
    assert measure(diagnosis, "graph_launch_count") == 1


def test_what_a_collective_moves_is_read(tmp_path: Path) -> None:
    builder = steady(60)
    known = {
        "Collective name": "allreduce",
        "In msg nelems": 1000,
        "Out msg nelems": 1000,
        "Group size": 8,
        "dtype": "BFloat16",
        "Process Group Name": "tp",
        "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
        "Seq": 5,
    }
    builder.kernel(3000, 50, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", corr=900, **known)
    trace = read(builder.write(tmp_path / "trace.json"))
    table = trace.collectives
    assert table is not None
    row = {column: table[column].tolist()[0] for column in ("bytes", "group_size", "sequence", "correlation")}
    assert row == {"bytes": 2000, "group_size": 8, "sequence": 5, "correlation": 900}
    assert trace.strings[table["group"][0]].startswith("tp")


def test_what_operators_were_called_with_is_read(tmp_path: Path) -> None:
    builder = KinetoBuilder()
    inputs = {
        "Input Dims": [[4, 8], [8, 16], [], [[2, 2], [3]]],
        "Input type": ["float", "c10::Half", "Scalar", "TensorList"],
    }
    builder.add("cpu_op", "aten::mm", 0, 10, **inputs, **{"Concrete Inputs": ["", "", "1", ""]})
    builder.add("cpu_op", "aten::mm", 20, 10, **inputs, **{"Concrete Inputs": ["", "", "1", ""]})
    builder.add("cpu_op", "aten::view", 40, 10)
    builder.launch(1, 2, 5, 4)
    trace = read(builder.write(tmp_path / "trace.json"))
    assert trace.operators is not None
    first, second, none = trace.operators["inputs"].tolist()
    assert first == second
    assert none == -1
    called = trace.inputs[first]
    assert called.shapes == ((4, 8), (8, 16), (), ((2, 2), (3,)))
    assert called.types == ("float", "c10::Half", "Scalar", "TensorList")
    assert called.scalars[2] == "1"


# --- is it whole? ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95, 0.999])
def test_a_file_that_was_cut_gives_all_whole_events(
    tmp_path: Path, suffix: str, share: float, indent: int | None
) -> None:
    """R-19."""
    whole = steady(1000).text(indent).encode()
    raw = gzip.compress(whole) if suffix.endswith("gz") else whole
    part = raw[: int(len(raw) * share)]
    path = tmp_path / f"trace{suffix}"
    path.write_bytes(part)
    text = part
    if suffix.endswith("gz"):
        import zlib

        text = zlib.decompressobj(31).decompress(part)
    # An event counts when its closing brace is there: kernels are every third.
    true = (
        sum(text.count(b'"correlation": %d}' % i) + text.count(b'"correlation": %d\n' % i) for i in range(1, 1001)) // 2
    )
    diagnosis = full(path)
    assert abs(diagnosis.devices[0].kernels.count - true) <= 1
    said = problem(diagnosis, "cut-short")
    if suffix.endswith("gz"):
        assert f"compressed stream ends early at byte {len(part):,}" in said.message
    place = int(re.findall(r"byte ([\d,]+)", said.message)[-1].replace(",", ""))
    # Where the first event that is not whole begins, or where the text ends.
    assert text.rindex(b'"ph"') - 20 <= place <= len(text)
    assert diagnosis.window.end_ns <= 20 * US * 1000 + 21 * US


def test_a_killed_process_leaves_a_file_without_an_end(tmp_path: Path) -> None:
    text = steady(100).text()
    path = tmp_path / "trace.json.tmp"
    path.write_text(text[: text.rindex("}, {")] + "},\n")
    diagnosis = full(path)
    assert "cut-short" in problem_codes(diagnosis)
    assert "unreadable-events" not in problem_codes(diagnosis)


@pytest.mark.parametrize("keep", [30, 100])
def test_a_file_cut_before_its_events_ends_in_one_sentence(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "trace.json"
    path.write_text(steady(10).text()[:keep])
    with pytest.raises(InfprofError, match="ends in the middle"):
        read(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1}', "without traceEvents"),
        ('{"traceEvents": []}', "holds no trace events"),
        ("[]", "holds no trace events"),
        ('{"traceEvents": [], "deviceProperties": [{"ph": 1}, {"name": 2}]}', "holds no trace events"),
        ("[1, 2, 3]", ""),
        ("{]", ""),
        ('{"traceEvents": {"ph": "X"}}', "without traceEvents"),
        ("[" * 5000, ""),
    ],
)
def test_other_json_ends_in_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    done = infprof("analyze", path)
    assert done.returncode == 3, done.stdout
    assert len(done.stderr.strip().splitlines()) == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_large_head_with_lists_of_objects_is_no_event(tmp_path: Path) -> None:
    """Keys before and behind the events may hold anything, lists that look like events included."""
    builder = steady(50)
    odd = [{"name": "x", "ph": "X"}, {"name": "}, {", "ts": 1}]
    builder.top["metadata"] = {"packages": ["p" * 100] * 2000, "list": odd}
    path = builder.write(tmp_path / "trace.json", later=odd, more={"traceEvents": odd})
    assert len(times(read(path))) == 50


def test_launches_without_any_gpu_record(tmp_path: Path) -> None:
    """R-13."""
    builder = KinetoBuilder()
    for i in range(200):
        builder.add("cpu_op", "aten::mm", i * 20, 8)
        builder.call(i * 20 + 2, 3, corr=i + 1)
    path = builder.write(tmp_path / "trace.json")
    diagnosis = full(path)
    assert (diagnosis.verdict.cls, diagnosis.verdict.code) == ("unusable", "gpu-not-recorded")
    assert "200 launches" in diagnosis.verdict.sentence
    assert "warm-up" in str(diagnosis.verdict.why_not)
    assert "nsys profile" not in str(diagnosis.verdict.why_not)
    assert diagnosis.devices == []
    assert infprof("analyze", path).returncode == 3


@pytest.mark.parametrize(("lost", "expected"), [(3, None), (60, 0.7), (300, 0.4)])
def test_launches_that_lost_their_records_lower_the_confidence(
    tmp_path: Path, lost: int, expected: float | None
) -> None:
    builder = steady(1000)
    gone = set(range(400, 400 + lost))
    builder.events = [e for e in builder.events if e["cat"] != "kernel" or e["args"]["correlation"] not in gone]
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    if expected is None:
        assert "gpu-records-lost" not in problem_codes(diagnosis)
    else:
        assert problem(diagnosis, "gpu-records-lost").count == lost
        assert diagnosis.verdict.confidence <= expected


def test_more_lost_than_kept_is_damage(tmp_path: Path) -> None:
    builder = steady(1000)
    builder.events = [e for e in builder.events if e["cat"] != "kernel" or e["args"]["correlation"] % 3 == 0]
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    assert (diagnosis.verdict.cls, diagnosis.verdict.code) == ("unusable", "damaged")


@pytest.mark.parametrize("begun", [True, False], ids=["whole", "begun before the recording"])
def test_launches_into_a_graph_under_capture_are_not_lost(tmp_path: Path, begun: bool) -> None:
    builder = steady(200)
    if begun:
        builder.call(1001, 1, "cudaStreamBeginCapture")
    for i in range(100):
        builder.call(1003 + i * 0.1, 0.05, corr=5000 + i)
    builder.call(1014, 1, "cudaStreamEndCapture")
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    assert "gpu-records-lost" not in problem_codes(diagnosis)


def test_late_end_stamps_on_a_stream_are_named(data: Path) -> None:
    """R-08."""
    trace = read(data / "kineto-overrun.json")
    from infprof.measures.fitness import doubts, launches_without_records
    from infprof.measures.operations import Prepared

    prepared = Prepared(trace)
    found = [d.problem for d in doubts(prepared, *launches_without_records(prepared))]
    assert [(p.code, p.count) for p in found] == [("stream-overrun", 3)]
    diagnosis = full(data / "kineto-overrun.json")
    device = diagnosis.devices[0]
    assert sum(s.ns for s in device.slices) == diagnosis.window.duration_ns == 910 * US
    assert slices(device)["compute", None] == 908 * US


def test_late_stamps_are_named_in_a_trace_that_can_be_judged(tmp_path: Path) -> None:
    """R-08 among a thousand good kernels."""
    builder = steady(1000)
    builder.kernel(5_000, 3_000, "late", corr=9000)
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    assert problem(diagnosis, "stream-overrun").count == 1
    assert diagnosis.verdict.confidence <= 0.7


def test_kernels_that_start_early_on_purpose_are_no_late_stamps(tmp_path: Path) -> None:
    """Programmatic dependent launch overlaps neighbours by microseconds."""
    builder = KinetoBuilder()
    for i in range(1000):
        builder.launch(i * 20.0, 2, i * 20 + 9.0, 21.5)
    assert "stream-overrun" not in problem_codes(full(builder.write(tmp_path / "trace.json")))


def test_replays_with_missing_kernels_are_named(tmp_path: Path) -> None:
    builder = KinetoBuilder()
    for step in range(20):
        at = step * 1000.0
        builder.call(at, 10, "cudaGraphLaunch", step + 1)
        for node in range(20 if step % 5 else 8):
            builder.kernel(at + 20 + node * 40, 38, f"node_{node}", step + 1)
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    # Of the four short ones the first is at the edge of the recording.
    assert problem(diagnosis, "graphs-partly-recorded").count == 3
    assert diagnosis.verdict.confidence <= 0.7


def test_a_clock_that_jumps_is_named(tmp_path: Path) -> None:
    builder = KinetoBuilder()
    for i in range(1000):
        at = 20_000 + i * 20.0
        builder.launch(at, 2, at + 5 - (3000 if i >= 700 else 0), 10)
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    assert problem(diagnosis, "clock-jump").count == 300
    assert diagnosis.verdict.confidence <= 0.4


def test_steps_without_gpu_work_are_counted(tmp_path: Path) -> None:
    builder = steady(1000)
    for step in range(10):
        builder.add("user_annotation", f"ProfilerStep#{step}", step * 2000, 1990)
    gone = {e["args"]["correlation"] for e in builder.events if e["cat"] == "cuda_runtime" and 6000 <= e["ts"] < 10_000}
    builder.events = [e for e in builder.events if e["args"].get("correlation") not in gone]
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    assert problem(diagnosis, "empty-steps").count == 2


def test_kernels_belong_to_the_step_that_launched_them(tmp_path: Path) -> None:
    """R-11. The host runs ahead: all large kernels execute after the last marker."""
    builder = KinetoBuilder()
    at = 300_000.0
    for step in range(10):
        t0 = step * 30_000.0
        builder.add("user_annotation", "step", t0, 29_990)
        for i in range(17):
            builder.launch(t0 + 10 + i * 10, 2, t0 + 15 + i * 10, 100 / 17, "prepare")
        builder.call(t0 + 500, 10, "cudaGraphLaunch", 9000 + step)
        for _ in range(260):
            builder.kernel(round(at, 3), round(28_000 / 260, 3), "decode", 9000 + step)
            at += 28_000 / 260
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    row = next(r for r in diagnosis.range_table if r.name == "step")
    assert (row.count, row.kernels) == (10, 2770)
    assert row.gpu_busy_ns == pytest.approx(10 * 28.1 * MS, rel=0.001)
    assert "empty-steps" not in problem_codes(diagnosis)
    # The GPU lags the host by steps: it is the limit, and no finding blames the host.
    assert measure(diagnosis, "queue_delay_p95_ns") > 100 * MS
    assert "host-work" not in rules(diagnosis)


def test_other_makers_devices_are_said_to_be_unknown(tmp_path: Path) -> None:
    builder = KinetoBuilder(devices=[])
    for i in range(100):
        builder.add("cpu_op", "aten::mm", i * 10, 5)
        builder.add("mtia_ccp_events", "launch", i * 10, 5)
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    assert (diagnosis.verdict.cls, diagnosis.verdict.code) == ("unusable", "unsupported-device")


def test_cpu_only_is_no_gpu_work(tmp_path: Path) -> None:
    builder = KinetoBuilder(devices=[])
    builder.add("cpu_op", "aten::mm", 0, 5)
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    assert (diagnosis.verdict.cls, diagnosis.verdict.code) == ("unusable", "no-gpu-work")
    assert "ProfilerActivity.CUDA" in str(diagnosis.verdict.why_not)


def test_unknown_categories_are_counted(tmp_path: Path) -> None:
    builder = steady(60)
    builder.add("quantum_op", "x", 0, 1)
    builder.add("quantum_op", "y", 0, 1)
    assert problem(full(builder.write(tmp_path / "trace.json")), "unknown-categories").count == 2


# --- both formats, size, privacy ------------------------------------------------------------------------------------


def test_one_run_in_both_formats_gives_equal_slices(tmp_path: Path) -> None:
    nsys, torch = TraceBuilder(), KinetoBuilder()
    for i in range(500):
        at = i * 40
        nsys.launch(at * US, 4 * US, (at + 6) * US, 25 * US, name="gemm_bf16")
        torch.launch(at, 4, at + 6, 25)
    a, b = diagnose(nsys, tmp_path, "full"), full(torch.write(tmp_path / "trace.json"))
    assert slices(a) == slices(b)
    assert (a.verdict.cls, a.verdict.cause) == (b.verdict.cls, b.verdict.cause)
    for name in ("queue_delay_p50_ns", "launch_call_total_ns", "kernel_total_ns", "small_kernel_count"):
        assert measure(a, name) == measure(b, name)


def test_python_frames_change_nothing_and_cost_little(tmp_path: Path) -> None:
    """R-23, at a size for every test run: the text is many times the memory that reading it takes."""
    builder = steady(2000)
    bare = full(builder.write(tmp_path / "trace.json"))
    frame = {"cat": "python_function", "name": "n" * 300, "ph": "X", "pid": 1, "tid": 1, "ts": 1.5, "dur": 2.5}
    text = builder.text()
    frames = ", ".join([json.dumps({**frame, "args": {"Python id": 1}})] * 150_000)
    path = tmp_path / "trace.json"
    path.write_text(text.replace('"traceEvents": [', f'"traceEvents": [{frames}, '))
    size = path.stat().st_size
    assert size > 60 << 20
    program = (
        "import resource, sys; from pathlib import Path; from infprof.readers import read, _readers; _readers(); "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; read(Path(sys.argv[1])); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < size / 1.2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
    framed = full(path)
    assert slices(framed) == slices(bare)
    assert [p for p in framed.problems if p.code != "profiler-slows-host"] == bare.problems


def test_no_host_path_leaves_the_trace(tmp_path: Path) -> None:
    builder = steady(60)
    builder.add("python_function", "/home/someone/server.py(12): main", 0, 100)
    secret: dict[str, Any] = {"traceName": "/home/someone/t.json", "host_name": "box17", "username": "someone"}
    folder = tmp_path / "someone"
    folder.mkdir()
    done = infprof("analyze", "--json", builder.write(folder / "trace.json", **secret))
    assert "someone" not in done.stdout
    assert "box17" not in done.stdout


def test_what_calls_returned_is_unknown(tmp_path: Path) -> None:
    """The PyTorch profiler records no return value: no failure is claimed, and none is denied."""
    diagnosis = full(steady(60).write(tmp_path / "trace.json"))
    assert measure(diagnosis, "allocator_failed_count") is None
    assert measure(diagnosis, "allocator_retry_count") is None
    assert all(row.failed == 0 for row in diagnosis.api_table)


def test_long_waits_of_an_unseen_kind_are_not_called_work_with_confidence(tmp_path: Path) -> None:
    """A server without requests and one that is slow look alike where no system call was recorded."""
    waits, works = KinetoBuilder(), KinetoBuilder()
    for i in range(200):
        waits.launch(i * 50_000.0, 3, i * 50_000.0 + 10, 5_000)
        works.launch(i * 8_000.0, 3, i * 8_000.0 + 10, 4_000)
    doubtful, sure = (full(b.write(tmp_path / "trace.json")) for b in (waits, works))
    assert (doubtful.verdict.cls, sure.verdict.cls) == ("scheduling-bubble", "scheduling-bubble")
    assert doubtful.verdict.confidence <= 0.6 < sure.verdict.confidence
    assert "was not recorded" in doubtful.verdict.sentence
    assert next(f for f in doubtful.findings if f.rule == "host-work-between-steps").confidence <= 0.5


def test_idle_time_that_nothing_explains_is_no_finding(tmp_path: Path) -> None:
    """Queued work that starts half a second later: the trace was cut there, the GPU did not wait."""
    builder = steady(300)
    for i in range(300):
        builder.launch(6000.0 + i, 0.5, 500_000 + i * 12, 12)
    diagnosis = full(builder.write(tmp_path / "trace.json"))
    assert "operations-missing" in problem_codes(diagnosis)
    assert "device-dependency" not in rules(diagnosis)
    assert measure(diagnosis, "waiting_work_ns") == 0
