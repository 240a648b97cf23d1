"""Real cases of reading a trace: odd tables, shared ids, lost stamps, copies in mid-write, and sizes at both ends."""

from __future__ import annotations

import hashlib
import re
import shutil
import sqlite3
import subprocess
import time
import tracemalloc
from pathlib import Path

import pytest

from case_builders import (
    MS,
    US,
    S,
    diagnose,
    idle,
    infprof,
    measure,
    no_ratio_above_one,
    problem,
    problem_codes,
    rules,
    slices,
)
from infprof.diagnosis import analyze_file
from infprof.results import Diagnosis
from infprof.simulator.builder import TraceBuilder

# --- annotations are optional ---------------------------------------------------------------------------------


def annotated_steps(style: str, origin: int = 0) -> TraceBuilder:
    """100 kernels in ten steps; ``style`` says where the names of the ranges stand, or that there are none."""
    b = TraceBuilder()
    for step in range(10):
        t0 = origin + step * 700 * US
        if style != "none":
            b.nvtx(t0, t0 + 200 * US, f"step {step % 2}", registered=style == "textId")
        for k in range(10):
            b.launch(t0 + k * 10 * US, 5 * US, t0 + 20 * US + k * 60 * US, 50 * US)
    if style == "text":
        b.drop_column("NVTX_EVENTS", "textId")
    return b


@pytest.mark.parametrize("origin", [0, 7_000 * S])
def test_a_trace_without_annotations_gives_the_same_slices(tmp_path: Path, origin: int) -> None:
    """R-07. Finding steps by repetition belongs to the step analysis and is not asked for here."""
    bare, text, ids = (diagnose(annotated_steps(s, origin), tmp_path) for s in ("none", "text", "textId"))
    assert slices(bare) == slices(text) == slices(ids)
    assert slices(bare)["compute", None] == 100 * 50 * US
    assert "not collected" in problem(bare, "no-ranges").message
    assert bare.range_table == []


def test_range_names_are_found_in_the_row_and_in_the_string_table(tmp_path: Path) -> None:
    """R-07."""
    text, ids = (diagnose(annotated_steps(s), tmp_path) for s in ("text", "textId"))
    assert text.range_table == ids.range_table
    assert {(r.name, r.count, r.kernels) for r in ids.range_table} == {("step 0", 5, 50), ("step 1", 5, 50)}
    assert "no-ranges" not in problem_codes(text) | problem_codes(ids)


def test_the_command_line_accepts_a_trace_without_annotations(tmp_path: Path) -> None:
    """R-07."""
    done = infprof("analyze", annotated_steps("none").write(tmp_path / "trace.sqlite"))
    assert done.returncode == 0, done.stderr
    assert "no such" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


# --- CUDA graphs ----------------------------------------------------------------------------------------

GRAPH_KERNELS = [("flash_fwd_kernel", 20 * US)] * 10 + [("sm90_xmma_gemm_bf16bf16_bf16f32", 10 * US)] * 15


def graph_replays(version: str, node_ids: bool, driver_call_inside: bool) -> TraceBuilder:
    """4 graph launches (correlation 11–14); their 25 kernels each share the launch's correlation id."""
    b = TraceBuilder(version)
    at = 100 * US
    for replay in range(4):
        corr = 11 + replay
        call = at - 20 * US
        b.api(call, call + 10 * US, "cudaGraphLaunch_v10000", correlation=corr)
        if driver_call_inside:
            b.api(call + US, call + 9 * US, "cuGraphLaunch", correlation=1000 + corr)
        for node, (name, ns) in enumerate(GRAPH_KERNELS, 1):
            b.kernel(at, at + ns, name, correlation=corr, graph_node=node if node_ids else None)
            at += ns
    if not node_ids:
        b.drop_column("CUPTI_ACTIVITY_KIND_KERNEL", "graphNodeId")
    return b


@pytest.mark.parametrize(
    ("version", "node_ids", "driver_call_inside"),
    [("2023.4", True, False), ("2026", True, True), ("2022.4", False, False)],
)
def test_kernels_that_share_a_graph_launch_are_all_counted(
    tmp_path: Path, version: str, node_ids: bool, driver_call_inside: bool
) -> None:
    """R-09."""
    d = diagnose(graph_replays(version, node_ids, driver_call_inside), tmp_path)
    assert measure(d, "kernel_count") == 100
    assert measure(d, "attention_ns") == 800 * US
    assert measure(d, "gemm_ns") == 600 * US
    assert {(r.name, r.calls, r.total_ns) for r in d.kernel_table} == {
        ("flash_fwd_kernel", 40, 800 * US),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", 60, 600 * US),
    }
    assert slices(d) == {("compute", None): 1400 * US}


def test_launch_health_of_graphs_is_counted_per_launch(tmp_path: Path) -> None:
    """R-09."""
    d = diagnose(graph_replays("2023.4", True, False), tmp_path)
    assert measure(d, "launch_count") == measure(d, "graph_launch_count") == 4
    assert measure(d, "graph_kernel_ratio") == 1.0
    assert measure(d, "unlaunched_kernel_ratio") == 0.0
    assert measure(d, "kernels_per_launch") == 25
    # each replay's first kernel starts 10 µs after its call returned; the last of its 25 would say 350 µs
    assert measure(d, "queue_delay_p50_ns") == measure(d, "queue_delay_p95_ns") == 10 * US
    assert "correlation" not in " ".join(p.message for p in d.problems)


def replays_without_kernels(traced_whole: bool, sync_rows: bool = False, copies: bool = False) -> TraceBuilder:
    """32 graph launches with a synchronisation each; the graphs' kernels are not recorded."""
    b = TraceBuilder()
    for step in range(32):
        t0 = step * 9_050 * US
        b.graph_launch(t0, 10 * US, span=(t0 + 15 * US, t0 + 9_015 * US) if traced_whole else None)
        b.api(t0 + 12 * US, t0 + 9_020 * US, "cudaStreamSynchronize_v3020")
        if copies:
            b.copy(t0 - 30 * US, 5 * US, t0 - 20 * US, 2 * US, bytes=4096)
            b.copy(t0 + 10 * US, 2 * US, t0 + 9_016 * US, 2 * US, kind="d2h", bytes=64)
        if sync_rows:
            b.sync(t0 + 12 * US, t0 + 9_020 * US)
    return b


@pytest.mark.parametrize("sync_rows", [False, True])
def test_graph_launches_without_gpu_records_are_no_idle_gpu(tmp_path: Path, sync_rows: bool) -> None:
    """R-10 (a)."""
    path = replays_without_kernels(traced_whole=False, sync_rows=sync_rows).write(tmp_path / "trace.sqlite")
    d = analyze_file(path)
    assert (d.verdict.cls, d.verdict.code) == ("unusable", "gpu-not-recorded")
    assert "cannot tell" in d.verdict.sentence
    assert "--cuda-graph-trace=node" in (d.verdict.why_not or "")
    assert not d.findings
    assert not any(s.kind == "idle" for device in d.devices for s in device.slices)
    done = infprof("analyze", path)
    assert done.returncode == 3
    assert "100 %" not in done.stdout
    assert "100.0 %" not in done.stdout


def test_copies_around_unrecorded_graphs_do_not_make_it_start_up(tmp_path: Path) -> None:
    """R-10 (a), with the inputs and sampled tokens of each step."""
    d = diagnose(replays_without_kernels(traced_whole=False, copies=True), tmp_path)
    assert (d.verdict.cls, d.verdict.code) == ("unusable", "gpu-not-recorded")
    assert not d.findings


def test_graphs_that_were_traced_whole_count_as_compute(tmp_path: Path) -> None:
    """R-10 (b)."""
    path = replays_without_kernels(traced_whole=True).write(tmp_path / "trace.sqlite")
    d = analyze_file(path)
    assert d.verdict.cls == "gpu-busy"
    assert slices(d)["compute", None] == 32 * 9 * MS
    assert measure(d, "graph_launch_count") == 32
    assert d.kernel_table == []
    message = problem(d, "graphs-traced-whole").message
    assert "not available" in message
    assert "--cuda-graph-trace=node" in message
    done = infprof("analyze", path)
    assert done.returncode == 0
    assert "not available" in " ".join(done.stdout.split())
    assert "no kernel" not in done.stdout.lower()


# --- wrong stamps ---------------------------------------------------------------------------------------

ZEROED, REVERSED = set(range(5, 1000, 10)), {101, 502, 903}


def starved_buffers(launches: bool, origin: int = 5 * S) -> TraceBuilder:
    """1 000 kernels of 10 µs, 5 µs apart; one in ten came without stamps, three end before they start."""
    b = TraceBuilder()
    for k in range(1000):
        start = origin + k * 15 * US
        end = start + 10 * US
        corr = b.api(start - 8 * US, start - 5 * US) if launches else None
        if k in ZEROED:
            start = end = 0
        elif k in REVERSED:
            end = start - 5
        b.kernel(start, end, correlation=corr)
    return b


@pytest.mark.parametrize("origin", [5 * S, 60 * S])
@pytest.mark.parametrize("launches", [True, False])
def test_records_without_stamps_do_not_move_the_window(tmp_path: Path, launches: bool, origin: int) -> None:
    """R-12."""
    d = diagnose(starved_buffers(launches, origin), tmp_path)
    assert (d.window.start_ns, d.window.end_ns) == (origin, origin + 999 * 15 * US + 10 * US)
    assert slices(d)["compute", None] == 897 * 10 * US
    assert measure(d, "kernel_count") == 897


@pytest.mark.parametrize("launches", [True, False])
def test_records_without_stamps_are_counted_by_kind(tmp_path: Path, launches: bool) -> None:
    """R-12."""
    d = diagnose(starved_buffers(launches), tmp_path)
    counts = {p.count: p.message for p in d.problems}
    assert "zero" in counts[100].lower()
    assert re.search("negative|before", counts[3].lower())
    assert "89.7 %" in counts[103]


@pytest.mark.parametrize("launches", [True, False])
def test_gaps_of_lost_records_are_not_blamed_on_the_host(tmp_path: Path, launches: bool) -> None:
    """R-12."""
    d = diagnose(starved_buffers(launches), tmp_path)
    assert idle(d, "host-work", "launch", "sync") == 0
    assert d.verdict.cause not in ("host-work", "launch", "sync")
    assert not {"host-work-between-steps", "launch-bound", "sync-per-step"} & set(rules(d))


def skewed_clocks(early_ns: int = 2 * US, annotated: bool = False, origin: int = 0) -> TraceBuilder:
    """1 000 launches of 3 µs; 400 kernels seem to start ``early_ns`` before theirs, the rest 4 µs after."""
    b = TraceBuilder()
    for k in range(1000):
        at = origin + S + k * 20 * US
        b.launch(at, 3 * US, at - early_ns if k % 5 in (0, 4) else at + 4 * US, 9 * US)
    if annotated:
        b.nvtx(origin + S - US, origin + S + 1000 * 20 * US, "collective")
    return b


@pytest.mark.parametrize(("early_ns", "origin"), [(2 * US, 0), (2 * US, 900 * S), (5 * US, 0)])
def test_clock_skew_is_counted_and_drops_nothing(tmp_path: Path, early_ns: int, origin: int) -> None:
    """R-18."""
    d = diagnose(skewed_clocks(early_ns, origin=origin), tmp_path)
    assert measure(d, "kernel_count") == measure(d, "launch_count") == 1000
    assert measure(d, "unlaunched_kernel_ratio") == 0.0
    assert measure(d, "negative_delay_count") == 400
    assert measure(d, "clock_skew_ns") == early_ns
    # 400 delays clamped to 0, 600 of 1 µs after the call's end
    assert measure(d, "queue_delay_p50_ns") == US
    skew = problem(d, "clock-skew")
    assert skew.count == 400
    assert f"{early_ns / 1000:.1f} µs" in skew.message
    assert "precise" in skew.message
    assert not any("left out" in p.message or "dropped" in p.message for p in d.problems)


@pytest.mark.parametrize("outer_first", [True, False])
def test_of_nested_ranges_the_outer_one_is_listed_first(tmp_path: Path, outer_first: bool) -> None:
    """Both launched the same; which one the file holds first does not decide."""
    b = annotated_steps("none")
    spans = [(0, 7_000 * US, "z outer"), (0, 6_900 * US, "a inner")]
    for start, end, name in spans if outer_first else spans[::-1]:
        b.nvtx(start, end, name)
    d = diagnose(b, tmp_path)
    assert [(r.name, r.kernels) for r in d.range_table] == [("z outer", 100), ("a inner", 100)]


def test_many_long_range_names_are_no_burden(tmp_path: Path) -> None:
    """Names with arguments in them are all different, and one of 200 kB must not make room for 500 like it."""
    b = TraceBuilder()
    for k in range(500):
        t0 = k * 20 * US
        b.nvtx(t0, t0 + 10 * US, f"op {k}" if k else "x" * 200_000)
        b.launch(t0 + US, 2 * US, t0 + 5 * US, 8 * US)
    path = b.write(tmp_path / "names.sqlite")
    tracemalloc.start()
    try:
        assert len(analyze_file(path).range_table) == 50
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_kernels_before_their_range_still_belong_to_it(tmp_path: Path) -> None:
    """R-18. The first and the last kernel of the range lie outside its own time."""
    b = skewed_clocks(annotated=True)
    d = diagnose(b, tmp_path)
    assert [(r.name, r.kernels) for r in d.range_table] == [("collective", 1000)]
    assert measure(diagnose(b, tmp_path, range_name="collective"), "kernel_count") == 1000


# --- who launched what ----------------------------------------------------------------------------


def busy_streams(one_process: bool, kernel_ns: int = 8_600 * US, period_ns: int = 10 * MS) -> TraceBuilder:
    """10 s; stream 17 of devices 1, 2 and 3 and stream 7 of device 0, each busy for 86 % of the time."""
    b = TraceBuilder()
    for device in range(4):
        b.gpu()
        worker = b.process(100 if one_process else 100 + device).thread(1000 + device)
        for k in range(10 * S // period_ns):
            start = S + k * period_ns
            stream = 17 if device else 7
            b.launch(start - 8 * US, 3 * US, start, kernel_ns, device=device, stream=stream, thread=worker)
    return b


@pytest.mark.parametrize("one_process", [True, False])
def test_equal_stream_numbers_on_several_devices_are_kept_apart(tmp_path: Path, one_process: bool) -> None:
    """R-20."""
    d = diagnose(busy_streams(one_process), tmp_path)
    assert [device.id for device in d.devices] == [0, 1, 2, 3]
    for device in d.devices:
        assert slices(device)["compute", None] == 1000 * 8_600 * US
        assert measure(d, "busy_ratio", device.id) == pytest.approx(0.86, abs=0.001)
        assert device.kernels.count == 1000
        assert len(device.process_ids) == 1
    assert no_ratio_above_one(d)
    assert not re.search(r"(258|344|2\.58|3\.44)", d.verdict.sentence)


def test_two_processes_with_the_same_stream_on_one_device_do_not_add_up(tmp_path: Path) -> None:
    """R-20."""
    b = TraceBuilder()
    b.gpu()
    for pid in (100, 200):
        worker = b.process(pid).thread()
        for k in range(100):
            start = S + k * 10 * MS
            b.launch(start - 8 * US, 3 * US, start, 8_600 * US, stream=17, thread=worker)
    d = diagnose(b, tmp_path)
    assert slices(d)["compute", None] == 100 * 8_600 * US
    assert d.devices[0].process_ids == [100, 200]
    assert no_ratio_above_one(d)


LAUNCHERS = (
    "cudaLaunchKernel_v7000",
    "cudaLaunchKernelExC_v11060",
    "cuLaunchKernelEx",
    "cuLaunchKernel",
    "cudaLaunchCooperativeKernel_v9000",
)


@pytest.mark.parametrize(
    "names",
    [
        LAUNCHERS,
        ("cudaLaunchKernelXYZ_v14000", *LAUNCHERS[1:]),
        tuple(f"{n}_ptsz" if "_v" not in n else n.replace("_v", "_ptsz_v") for n in LAUNCHERS),
    ],
    ids=["known", "a future name", "per-thread stream forms"],
)
def test_kernels_find_their_launch_whatever_the_call_is_called(tmp_path: Path, names: tuple[str, ...]) -> None:
    """R-22."""
    b = TraceBuilder()
    for k in range(50):
        start = S + k * 100 * US
        b.launch(start - 8 * US, 3 * US, start, 98 * US, api=names[k % 5])
    start = S + 50 * 100 * US
    b.graph_launch(
        start - 8 * US, 3 * US, [(start + k * 98 * US, start + (k + 1) * 98 * US, "gemm") for k in range(10)]
    )
    d = diagnose(b, tmp_path)
    assert measure(d, "kernel_count") == 60
    assert measure(d, "launch_count") == 51
    assert measure(d, "graph_launch_count") == 1
    assert measure(d, "unlaunched_kernel_ratio") == 0.0
    assert measure(d, "queue_delay_p50_ns") == measure(d, "queue_delay_p95_ns") == 5 * US
    assert measure(d, "launch_call_total_ns") == 51 * 3 * US
    assert idle(d, "unknown") == 0


def two_workers(devices: tuple[int, int]) -> TraceBuilder:
    """Two processes whose launches carry the same ids 1–500; the second starts 3 s later."""
    b = TraceBuilder()
    for device in sorted(set(devices)):
        b.gpu(index=device)
    for (pid, device), begin in zip(((4000, devices[0]), (4001, devices[1])), (S, 4 * S), strict=True):
        process = b.process(pid)
        for corr in range(1, 501):
            at = begin + corr * 100 * US
            b.api(at, at + 3 * US, thread=process.thread(), correlation=corr)
            b.kernel(at + 8 * US, at + 58 * US, process=process, device=device, correlation=corr)
    return b


def test_equal_correlation_ids_of_two_processes_are_not_mixed(tmp_path: Path) -> None:
    """R-24."""
    d = diagnose(two_workers((0, 1)), tmp_path)
    assert [device.process_ids for device in d.devices] == [[4000], [4001]]
    for device in (0, 1):
        assert measure(d, "launch_count", device) == 500
        assert measure(d, "unlaunched_kernel_ratio", device) == 0.0
        assert measure(d, "negative_delay_count", device) == 0
        assert measure(d, "queue_delay_p50_ns", device) == measure(d, "queue_delay_p95_ns", device) == 5 * US


def test_two_workers_on_one_device_keep_their_own_launches(tmp_path: Path) -> None:
    """R-24."""
    d = diagnose(two_workers((0, 0)), tmp_path)
    assert measure(d, "launch_count") == measure(d, "kernel_count") == 1000
    assert measure(d, "queue_delay_p95_ns") == 5 * US
    assert measure(d, "negative_delay_count") == 0


@pytest.mark.parametrize(("window", "busy"), [("1s:1050ms", 0), ("4s:4050ms", 1)])
def test_idle_causes_come_from_the_process_that_launched(tmp_path: Path, window: str, busy: int) -> None:
    """R-24. Each gap: 42 µs outside CUDA, 3 µs in the launch call, 5 µs in the queue."""
    d = diagnose(two_workers((0, 1)), tmp_path, window=window)
    found = slices(next(device for device in d.devices if device.id == busy))
    # the cut at the window's end leaves 499 kernels whole and none of the last
    assert found["compute", None] == 499 * 50 * US
    assert found["idle", "launch"] == 500 * 3 * US - 3 * US
    assert found["idle", "kernel-gap"] == 499 * 5 * US


# --- a file that is being written -----------------------------------------------------------------------------

TABLES = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME")


def thousand_kernels(path: Path) -> Path:
    b = TraceBuilder()
    for k in range(1000):
        start = S + k * 100 * US
        b.launch(start - 8 * US, 3 * US, start, 95 * US)
    return b.write(path)


def copied_while_written(folder: Path, suffixes: tuple[str, ...]) -> Path:
    """500 kernels in the database, 500 more in its write-ahead log, copied while the writer still has both open."""
    source = thousand_kernels(folder / "writing.sqlite")
    db = sqlite3.connect(source, isolation_level=None)
    try:
        later = {}
        for table in TABLES:
            later[table] = db.execute(f"SELECT * FROM {table} ORDER BY start").fetchall()[500:]
            db.execute(f"DELETE FROM {table} WHERE start >= ?", (later[table][0][0],))
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")
        for table, rows in later.items():
            db.execute("BEGIN")
            db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
            db.execute("COMMIT")
        target = folder / "input" / "x.sqlite"
        target.parent.mkdir()
        for suffix in ("", *suffixes):
            shutil.copyfile(f"{source}{suffix}", f"{target}{suffix}")
    finally:
        db.close()
    return target


def contents(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def read_and_check_untouched(path: Path) -> Diagnosis:
    before = contents(path.parent)
    d = analyze_file(path)
    assert contents(path.parent) == before
    return d


@pytest.mark.parametrize("suffixes", [("-wal", "-shm"), ("-wal",)], ids=["all three files", "without the -shm"])
@pytest.mark.parametrize("read_only", [False, True])
def test_rows_in_a_write_ahead_log_are_read_and_nothing_is_touched(
    tmp_path: Path, read_only: bool, suffixes: tuple[str, ...]
) -> None:
    """R-25 (a), (b). Permissions do not bind root, so what lies in the folder is compared, too."""
    path = copied_while_written(tmp_path, suffixes)
    if read_only:
        for file in path.parent.iterdir():
            file.chmod(0o444)
        path.parent.chmod(0o555)
    try:
        d = read_and_check_untouched(path)
    finally:
        path.parent.chmod(0o755)
    assert measure(d, "kernel_count") == 1000
    assert measure(d, "unlaunched_kernel_ratio") == 0.0
    assert "wal-mode" not in problem_codes(d)


@pytest.mark.parametrize("empty_log", [False, True])
def test_a_missing_write_ahead_log_is_remarked(tmp_path: Path, empty_log: bool) -> None:
    """R-25 (c)."""
    path = copied_while_written(tmp_path, ())
    if empty_log:
        path.with_name("x.sqlite-wal").touch()
    d = read_and_check_untouched(path)
    assert measure(d, "kernel_count") == 500
    message = problem(d, "wal-mode").message
    assert "WAL mode" in message
    assert "may be missing" in message


def test_an_ordinary_export_gets_no_remark_on_logs(tmp_path: Path) -> None:
    """R-25."""
    (tmp_path / "input").mkdir()
    d = read_and_check_untouched(thousand_kernels(tmp_path / "input" / "x.sqlite"))
    assert measure(d, "kernel_count") == 1000
    assert not {"wal-mode", "write-ahead-log", "journal-beside"} & problem_codes(d)


@pytest.mark.parametrize("with_log", [False, True])
def test_a_journal_beside_the_file_is_named_and_not_rolled_back(tmp_path: Path, with_log: bool) -> None:
    """R-25 (d). The journal was left by a writer that died in the middle of a transaction."""
    if with_log:
        path = copied_while_written(tmp_path, ("-wal", "-shm"))
        path.with_name("x.sqlite-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(504))
    else:
        source = thousand_kernels(tmp_path / "writing.sqlite")
        path = tmp_path / "input" / "x.sqlite"
        path.parent.mkdir()
        db = sqlite3.connect(source, isolation_level=None)
        try:
            db.execute("BEGIN IMMEDIATE")
            db.execute("INSERT INTO StringIds VALUES (999, 'late')")
            for suffix in ("", "-journal"):
                shutil.copyfile(f"{source}{suffix}", f"{path}{suffix}")
        finally:
            db.close()
    d = read_and_check_untouched(path)
    assert measure(d, "kernel_count") == 1000
    assert "x.sqlite-journal" in problem(d, "journal-beside").message


# --- names of communication kernels ---------------------------------------------------------------------------

COMMUNICATION = (
    "ncclKernel_AllReduce_RING_LL_Sum_half(ncclDevComm*, unsigned long, ncclWork*)",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*, vllm::RankSignals, vllm::Signal*, "
    "__nv_bfloat16*, int, int)",
    "ncclSymDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymDevArgs)",
)
TRAPS = (
    "myncclike_gemm",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>, "
    "unsigned int, float, 4, 4> >(at::native::ReduceOp<float>)",
)


@pytest.mark.parametrize("rounds", [1, 20])
def test_communication_is_told_by_all_names_of_its_kernels(tmp_path: Path, rounds: int) -> None:
    """R-26."""
    b = TraceBuilder()
    names = (*COMMUNICATION, *TRAPS)
    for k, name in enumerate(names * rounds):
        start = S + k * 100 * US
        b.launch(start - 80 * US, 3 * US, start, 100 * US, name)
    d = diagnose(b, tmp_path)
    assert slices(d) == {
        ("compute", None): rounds * 2 * 100 * US,
        ("exposed_communication", None): rounds * 5 * 100 * US,
    }
    assert {r.name for r in d.nccl_table} == set(COMMUNICATION)
    assert sum(r.total_ns for r in d.nccl_table) == rounds * 500 * US
    if rounds > 1:
        assert d.verdict.cls == "communication-bound"


@pytest.mark.parametrize("hidden", [False, True])
def test_communication_figures_exist_without_computing_and_without_communication(tmp_path: Path, hidden: bool) -> None:
    """R-26. No division by zero where one of the two is absent."""
    b = TraceBuilder()
    for k in range(100):
        start = S + k * 100 * US
        b.launch(start - 80 * US, 3 * US, start, 100 * US, TRAPS[0] if hidden else COMMUNICATION[2])
    d = diagnose(b, tmp_path)
    expected = "compute" if hidden else "exposed_communication"
    assert slices(d) == {(expected, None): 100 * 100 * US}
    assert measure(d, "comm_hidden_ratio") == (None if hidden else 0.0)


# --- S-07, S-08: very short and very long ---------------------------------------------------------------------------


def one_step(kernels: int = 300, span_ns: int = 4_400 * US) -> TraceBuilder:
    """One step of ``span_ns`` and nothing else."""
    b = TraceBuilder()
    period = span_ns // kernels
    for k in range(kernels):
        start = S + k * period
        end = start + period - 4 * US if k < kernels - 1 else S + span_ns
        b.launch(start - 8 * US, 3 * US, start, end - start, f"kernel_{k}")
    return b


@pytest.mark.parametrize("kernels", [300, 60])
def test_a_capture_of_one_step_is_not_judged(tmp_path: Path, kernels: int) -> None:
    """S-07."""
    path = one_step(kernels).write(tmp_path / "trace.sqlite")
    d = analyze_file(path)
    said = " ".join([d.verdict.sentence, *(p.message for p in d.problems)])
    assert "too short" in said
    assert "4.4 ms" in said
    assert d.verdict.cls == "unusable" or d.verdict.confidence <= 0.4
    assert d.findings == []
    assert sum(slices(d).values()) == 4_400 * US
    done = infprof("analyze", path)
    assert "4.4" in done.stdout
    assert not re.search(r"\b0(\.0+)? s\b", done.stdout)


def long_trace(path: Path, kernels: int) -> Path:
    """A small export whose kernel and call tables are filled up to ``kernels`` rows each."""
    b = TraceBuilder()
    b.gpu()
    names = [f"void layer{i}::gemm_kernel<{i}>(Params)" for i in range(300)]
    for k, name in enumerate(names):
        start = S + k * 15 * US
        b.launch(start - 8 * US, 3 * US, start, 10 * US, name)
    b.write(path)
    db = sqlite3.connect(path)
    try:
        for table in TABLES:
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            shift = {"start": 300 * 15 * US, "end": 300 * 15 * US, "correlationId": 300}
            copied = ", ".join(f"{c} + i * {shift[c]}" if c in shift else c for c in columns)
            numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
            db.execute(f"{numbers} INSERT INTO {table} SELECT {copied} FROM {table}, n", (kernels // 300 - 1,))
        db.commit()
    finally:
        db.close()
    return path


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The reports of a small trace and of a large one."""
    folder = tmp_path_factory.mktemp("pages")
    out = []
    for name, kernels in (("small", 3_000), ("large", 201_000)):
        page = folder / f"{name}.html"
        done = infprof("report", long_trace(folder / f"{name}.sqlite", kernels), "--html", page)
        assert done.returncode == 0, done.stderr
        out.append(page)
    return out[0], out[1]


def test_a_report_does_not_grow_with_the_trace(pages: tuple[Path, Path]) -> None:
    """S-08, with 201 000 kernels instead of 20 million."""
    small, large = (page.stat().st_size for page in pages)
    assert large < 3_000_000
    assert large < 1.2 * small


def test_a_report_says_what_was_thinned(pages: tuple[Path, Path]) -> None:
    """S-08. 300 kernel names are more than the tables hold, and the timeline has columns, not kernels."""
    text = re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", pages[1].read_text(encoding="utf-8"), flags=re.DOTALL)
    assert "of 300" in text
    assert re.search(r"\d+ (columns|moments|bins)|thinned", text)


def test_a_report_loads_nothing_from_elsewhere(pages: tuple[Path, Path]) -> None:
    """S-08."""
    for page in pages:
        html = page.read_text(encoding="utf-8")
        assert not re.search(r"""\b(?:src|srcset|poster|data|action)\s*=\s*["']?\s*(?:https?:)?//""", html)
        assert not re.search(r"""<link\b[^>]*href\s*=\s*["']?\s*(?:https?:)?//""", html)
        assert not re.search(r"""(?:@import|url\()\s*["'(]*\s*(?:https?:)?//""", html)
        assert not re.search(r"\b(?:fetch|XMLHttpRequest|importScripts|WebSocket|EventSource|sendBeacon)\b", html)


def test_a_browser_opens_the_report_of_a_long_trace(pages: tuple[Path, Path], tmp_path: Path) -> None:
    """S-08."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--user-data-dir={tmp_path}"]
    elapsed = {}
    for page in (None, pages[1]):
        began = time.monotonic()
        url = "about:blank" if page is None else page.as_uri()
        shown = subprocess.run([browser, *options, url], capture_output=True, text=True, timeout=60, check=False)
        elapsed[page] = time.monotonic() - began
    assert "</html>" in shown.stdout
    # The first start fills the browser's own profile folder and is not the page's doing.
    assert elapsed[pages[1]] < 5
