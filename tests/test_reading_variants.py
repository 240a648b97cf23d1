"""Variants of what users hand over: damage of every kind, traces of other tools, and numbers that a sample does not have."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import sqlite3
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from case_builders import US, infprof, problem, problem_codes
from infprof.diagnosis import Options, analyze_file
from infprof.errors import InfprofError
from infprof.reports import render
from infprof.reports.json_report import schema
from infprof.results import Diagnosis
from infprof.simulator.builder import TraceBuilder
from kineto_builder import KinetoBuilder, steady

KERNELS = 300
WHOLE_NS = 5_992_000


def of(data: str | bytes, folder: Path) -> Diagnosis:
    path = folder / "trace.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return analyze_file(path)


def refused(data: str | bytes, folder: Path) -> str:
    with pytest.raises(InfprofError) as caught:
        of(data, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def is_whole(diagnosis: Diagnosis) -> bool:
    return diagnosis.devices[0].kernels.count == KERNELS and diagnosis.window.duration_ns == WHOLE_NS


# --- JSON with slips in it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("}}, {", "},}, {"),
        ("}}, {", ",}}, {"),
        ("}}, {", "}} {"),
        ("}}, {", "}}\0,\0 {"),
        ("}}]", "}}, {}]"),
        ("}}]", "}},]"),
        ("gemm_bf16", "gemm\\ud800_bf16"),
        ("gemm_bf16", r"C:\Users\x\gemm_bf16"),
        ("gemm_bf16", "\\ud83d\\ude00gemm_bf16"),
        ('{"schemaVersion"', '{"note": ' + "[" * 5000 + "]" * 5000 + ', "schemaVersion"'),
    ],
)
def test_slips_of_whoever_wrote_the_json_cost_no_event(old: str, new: str, tmp_path: Path) -> None:
    text = steady(KERNELS).text()
    assert old in text
    diagnosis = of(text.replace(old, new), tmp_path)
    assert is_whole(diagnosis)
    assert not {"cut-short", "unreadable-events"} & problem_codes(diagnosis)


def test_an_event_nested_beyond_reason_costs_itself_only(tmp_path: Path) -> None:
    deep = steady(KERNELS).text().replace('"args": {', '"args": {"x": ' + "[" * 5000 + "]" * 5000 + ", ", 1)
    diagnosis = of(deep, tmp_path)
    assert is_whole(diagnosis)
    assert problem(diagnosis, "unreadable-events").count == 1
    assert "cannot be read" in refused("[" * 100_000, tmp_path)


def test_a_broken_header_does_not_hide_the_events(tmp_path: Path) -> None:
    diagnosis = of(steady(KERNELS).text().replace('{"schemaVersion"', '{"schema"Version"'), tmp_path)
    assert is_whole(diagnosis)
    assert "unreadable-events" in problem_codes(diagnosis)


def test_keys_in_another_order_are_no_end_of_the_events(tmp_path: Path) -> None:
    builder = steady(KERNELS)
    builder.events = [{"x": i, **event} for i, event in enumerate(builder.events)]
    broken = builder.text().replace('"name": "gemm_bf16"', '"name": "gemm"bf16"', 1)
    diagnosis = of(broken, tmp_path)
    assert diagnosis.devices[0].kernels.count == KERNELS - 1
    assert problem(diagnosis, "unreadable-events").count == 1


def test_what_follows_the_end_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    text = steady(KERNELS).text()
    diagnosis = of(text + "\n" + text, tmp_path)
    assert is_whole(diagnosis)
    assert f"{len(text) + 1:,}" in problem(diagnosis, "text-after-end").message
    assert "text-after-end" not in problem_codes(of(text + "\n\0\0\n", tmp_path))


def test_many_defects_are_read_past_in_seconds(tmp_path: Path) -> None:
    """Each of 200 bad events in 6 MB once cost a search of megabytes; a hole of zeros did so for each byte."""
    text = steady(10_000).text().replace('"gemm_bf16"', '"gemm"bf16"', 200).encode()
    hole = text[: 2 << 20] + b"\0" * (1 << 20) + text[3 << 20 :]
    began = time.monotonic()
    assert problem(of(text, tmp_path), "unreadable-events").count == 200
    of(hole, tmp_path)
    assert time.monotonic() - began < 20


# --- what is missing outweighs what is there --------------------------------------------------------------------------


def host_first(kernels: int) -> str:
    """As torch writes it: what ran on the GPU behind all that ran on the host."""
    builder = steady(kernels)
    builder.events.sort(key=lambda event: event["cat"] == "kernel")
    return builder.text()


@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_cut_before_its_kernels_is_damaged(share: float, packed: bool, tmp_path: Path) -> None:
    data = host_first(KERNELS).encode()
    data = gzip.compress(data) if packed else data
    diagnosis = of(data[: int(len(data) * share)], tmp_path)
    assert (diagnosis.verdict.cls, diagnosis.verdict.code) == ("unusable", "damaged")
    assert "cut-short" in problem_codes(diagnosis)


def test_a_trace_cut_among_its_kernels_is_not_believed_as_a_whole_one_is(tmp_path: Path) -> None:
    data = host_first(1000)
    diagnosis = of(data[: int(len(data) * 0.9)], tmp_path)
    assert diagnosis.verdict.cls == "gpu-busy"
    assert diagnosis.verdict.confidence <= 0.5 < of(data, tmp_path).verdict.confidence


@pytest.mark.parametrize(("key", "value"), [("ts", 1.7e18), ("ts", None), ("dur", None), ("ts", [1]), ("dur", "long")])
def test_kernels_without_usable_times_are_damage_and_not_absence(key: str, value: Any, tmp_path: Path) -> None:
    builder = steady(KERNELS)
    for event in builder.events:
        event[key] = value
    diagnosis = of(builder.text(), tmp_path)
    assert (diagnosis.verdict.cls, diagnosis.verdict.code) == ("unusable", "damaged")
    assert str(KERNELS) in diagnosis.verdict.sentence


def test_a_file_whose_events_are_mostly_broken_is_refused(tmp_path: Path) -> None:
    said = refused(steady(KERNELS).text().replace('"ph": "X"', '"ph": "X', KERNELS * 3 - 5), tmp_path)
    assert "damaged" in said


# --- other tools ------------------------------------------------------------------------------------------------------

XLA = [
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
    *({"ph": "X", "pid": 1, "tid": 13, "ts": i * 20.0, "dur": 10.0, "name": "fusion", "args": {}} for i in range(99)),
    {},
]
BROWSER = [
    {"ph": "X", "cat": "devtools.timeline", "name": "Task", "pid": 1, "tid": 1, "ts": i, "dur": 1} for i in range(99)
]


@pytest.mark.parametrize("events", [XLA, BROWSER, [{"ph": "B", "pid": 1, "tid": 1, "ts": 1, "name": "f"}]])
@pytest.mark.parametrize("bare", [False, True])
def test_a_trace_of_another_tool_is_not_called_one_without_gpu_work(events: Any, bare: bool, tmp_path: Path) -> None:
    said = refused(json.dumps(events if bare else {"displayTimeUnit": "ns", "traceEvents": events}), tmp_path)
    assert "another tool" in said


@pytest.mark.parametrize("value", [[{"name": "layer1", "timeMs": 1.5}, {"name": "layer2", "timeMs": 2.5}], [{}]])
def test_a_json_list_of_anything_is_no_trace(value: Any, tmp_path: Path) -> None:
    assert "no trace events" in refused(json.dumps(value), tmp_path)


def test_a_trace_that_ends_at_once_is_not_called_empty(tmp_path: Path) -> None:
    assert "ends in the middle" in refused('{"traceEvents": [{"ph"', tmp_path)


@pytest.mark.parametrize(
    "device",
    [
        {"cat": "npu_kernel", "args": {"device": 0, "stream": 2}},
        {"args": {"Task Type": "AI_CORE"}, "pid": 9},
    ],
)
def test_work_of_an_unknown_accelerator_is_named_as_such(device: dict[str, Any], tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 9, "name": "process_name", "args": {"name": "Ascend Hardware"}}]
    for i in range(50):
        at = {"ph": "X", "pid": 1, "tid": 1, "ts": i * 20.0, "dur": 9.0, "name": "MatMul"}
        events += [{**at, "cat": "cpu_op"}, {**at, **device}]
    diagnosis = of(json.dumps({"traceEvents": events}), tmp_path)
    assert (diagnosis.verdict.cls, diagnosis.verdict.code) == ("unusable", "unsupported-device")


def tarred(data: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("trace.json")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def zipped(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("trace.json", data)
    return out.getvalue()


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (zipped, "ZIP"),
        (tarred, "tar archive"),
        (lambda data: gzip.compress(tarred(data)), "tar archive"),
        (bz2.compress, "bzip2"),
        (lzma.compress, "xz"),
        (lambda data: b"\x28\xb5\x2f\xfd" + data, "zstd"),
        (lambda data: gzip.compress(gzip.compress(data)), "twice"),
        (lambda data: data.decode().encode("utf-16"), "UTF-16"),
        (lambda data: data.decode().encode("utf-16-le"), "UTF-16"),
        (lambda data: gzip.compress(data.decode().encode("utf-16-be")), "UTF-16"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (lambda data: b"NVR\0" + data, "Nsight Compute"),
    ],
)
def test_what_wraps_a_trace_is_named(wrap: Callable[[bytes], bytes], said: str, tmp_path: Path) -> None:
    assert said in refused(wrap(steady(50).text().encode()), tmp_path)


# --- numbers that the samples do not have -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.top.update(deviceProperties=[{"id": [0]}, {"id": {}, "name": "A"}, {"id": True}]),
        lambda b: [event.update(pid=True) for event in b.events],
        lambda b: [event.update(dur=0) for event in b.events],
        lambda b: [event["args"].update(correlation=2**70, stream=-(2**63), device=2**32 + 5) for event in b.events],
    ],
)
def test_odd_values_give_reports_that_keep_the_contract(change: Callable[[KinetoBuilder], Any], tmp_path: Path) -> None:
    builder = steady(KERNELS)
    change(builder)
    diagnosis = of(builder.text(), tmp_path)
    jsonschema.Draft202012Validator(schema()).validate(json.loads(render("json", diagnosis)))
    for name in ("terminal", "markdown", "html"):
        assert render(name, diagnosis)


def test_correlation_ids_that_wrapped_to_negative_ones_still_pair(tmp_path: Path) -> None:
    builder = steady(KERNELS)
    for event in builder.events:
        if "correlation" in event["args"]:
            number = event["args"]["correlation"] + 2**31 - KERNELS // 2
            signed = event["cat"] == "kernel" and number >= 2**31
            event["args"]["correlation"] = number - 2**32 if signed else number
    diagnosis = of(builder.text(), tmp_path)
    assert "operations-missing" not in problem_codes(diagnosis)
    assert diagnosis.verdict.confidence == of(steady(KERNELS).text(), tmp_path).verdict.confidence


def nsys(origin: int = 0) -> TraceBuilder:
    builder = TraceBuilder()
    for i in range(400):
        at = origin + i * 20 * US
        builder.launch(at, 3 * US, at + 8 * US, 12 * US)
    return builder


def test_an_export_whose_times_lie_before_zero_is_diagnosed_alike(tmp_path: Path) -> None:
    found = [
        analyze_file(nsys(origin).write(tmp_path / f"{i}.sqlite"), Options())
        for i, origin in enumerate((10**12, -(10**12)))
    ]
    assert found[0].devices[0].slices == found[1].devices[0].slices
    assert found[1].whatif == found[0].whatif != {}


def test_signed_correlation_ids_of_an_export_still_pair(tmp_path: Path) -> None:
    path = nsys(10**9).write(tmp_path / "trace.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET correlationId = correlationId - 3000")
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET correlationId = correlationId - 3000 + 4294967296")
    assert "operations-missing" not in problem_codes(analyze_file(path))


def test_a_database_of_nvprof_is_named(tmp_path: Path) -> None:
    path = tmp_path / "old.nvvp"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE StringTable (_id_ INTEGER PRIMARY KEY, value TEXT)")
        connection.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL (_id_ INTEGER, start INT, end INT)")
        connection.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (_id_ INTEGER, cbid INT, start INT, end INT)")
    with pytest.raises(InfprofError, match="nvprof"):
        analyze_file(path)


def test_bytes_behind_an_export_are_not_called_missing_ones(tmp_path: Path) -> None:
    path = nsys(10**9).write(tmp_path / "trace.sqlite")
    path.write_bytes(path.read_bytes() + b"behind" * 100)
    assert "cut-short" not in problem_codes(analyze_file(path))


# --- what is no file --------------------------------------------------------------------------------------------------


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    steady(KERNELS).write(tmp_path / "rank0.json")
    os.mkfifo(tmp_path / "pipe")
    done = infprof("analyze", tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_link_to_itself_is_one_sentence(tmp_path: Path) -> None:
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    for arguments in (("analyze", loop), ("compare", loop, loop)):
        done = infprof(*arguments)
        assert done.returncode in (2, 3)
        assert "defect of infprof" not in done.stderr
