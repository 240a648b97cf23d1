"""Real cases of a host that holds the GPU up: blocked copies, locks, pauses, sampling, launches, the profiler itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from case_builders import (
    MS,
    US,
    S,
    claimed_ns,
    diagnose,
    everything_said,
    evidence,
    finding,
    idle,
    measure,
    problem,
    problem_codes,
    remedy_text,
    rules,
    slices,
)
from infprof.diagnosis import Options, analyze_file
from infprof.results import Diagnosis
from infprof.simulator.builder import TraceBuilder
from test_bundle import EPOCH, Run

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, ulong, ncclWork*)"
SYNC = "cudaStreamSynchronize_v3020"

# --- D-02: asynchronous copies that hold their caller ---------------------------------------------------------------


def encrypted_copies(extra: int, memory: str = "pinned", call_ns: int = 6_400 * US, kind: str = "h2d") -> TraceBuilder:
    """50 decode steps of 17 ms with 6.5 ms on the GPU; a copy of 4 KiB takes 4 µs, and its call until the GPU is done.

    ``extra``: so many more such copies behind it, each of which holds the thread for 3 ms. ``memory``: at the host's end.
    """
    copy: dict[str, Any] = {"bytes": 4096, "kind": kind, "src" if kind == "h2d" else "dst": memory}
    b = TraceBuilder()
    b.gpu("NVIDIA H100 NVL")
    for step in range(50):
        t0 = S + step * 17 * MS
        start = t0 + 20 * US
        b.graph_launch(t0, 10 * US, [(start + k * 130 * US, start + (k + 1) * 130 * US, GEMM) for k in range(50)])
        b.copy(t0 + 130 * US, call_ns, start + 6_502 * US, 4 * US, **copy)
        at = t0 + 6_530 * US
        for _ in range(extra):
            b.copy(at + 20 * US, 3 * MS, at + 3 * MS, 4 * US, **copy)
            at += 3_020 * US
    return b


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_asynchronous_copies_that_hold_their_caller_are_named(tmp_path: Path, extra: int) -> None:
    """D-02."""
    d = diagnose(encrypted_copies(extra), tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "sync")
    assert "held back by asynchronous copy calls" in d.verdict.sentence
    found = d.findings[0]
    assert found.rule == "blocking-async-copies"
    assert evidence(found)["blocked_async_copy_count"] == 50 * (1 + extra)
    assert evidence(found)["pageable_count"] == 0
    # no more than the calls lasted, and no more than the GPU was idle
    assert 49 * 6 * MS < (found.cost.value or 0) <= 50 * min(6_400 * US + extra * 3 * MS, 10_600 * US)
    assert found.notes[0].startswith("A call that should return at once waits for the stream: confidential computing")
    assert "conf-compute" in remedy_text(found)
    assert not {"pageable-copies", "exposed-copies", "small-copies", "launch-bound"} & set(rules(d))
    assert d.verdict.cls != "pcie-limited"
    assert claimed_ns(d) <= idle(d)


def test_copies_that_return_at_once_hold_nobody(tmp_path: Path) -> None:
    """D-02, the bare-metal machine: the same steps, where the call takes 5 µs."""
    d = diagnose(encrypted_copies(0, call_ns=5 * US), tmp_path)
    assert measure(d, "blocked_async_copy_count") == 0
    assert "blocking-async-copies" not in rules(d)


# --- D-14: the interpreter's lock -----------------------------------------------------------------------------------


def engine_behind_a_lock(other_works: bool = True) -> TraceBuilder:
    """Steps of 14 ms: 9 ms on the GPU, then 5 ms in which the engine's thread waits while the thread of HTTP runs."""
    b = TraceBuilder()
    b.gpu()
    engine, http = b.thread(), b.thread(300, "http")
    for step in range(100):
        t0 = S + step * 14 * MS
        for k in range(30):
            b.launch(t0 + k * 8 * US, 5 * US, t0 + 10 * US + k * 300 * US, 300 * US, GEMM, thread=engine)
        b.api(t0 + 240 * US, t0 + 9_020 * US, SYNC, thread=engine)
        at = t0 + 9_050 * US
        for wait in (MS, 2 * MS, 1_800 * US):
            b.osrt(at, at + wait, "pthread_cond_timedwait", thread=engine)
            at += wait + 20 * US
        # a short system call every millisecond, working between them; or asleep all the time
        for k in range(14 if other_works else 1):
            asleep = 20 * US if other_works else 13_900 * US
            b.osrt(t0 + k * MS, t0 + k * MS + asleep, "epoll_wait", thread=http)
    return b


def test_waiting_for_the_interpreters_lock_names_who_has_it(tmp_path: Path) -> None:
    """D-14."""
    d = diagnose(engine_behind_a_lock(), tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "lock")
    found = d.findings[0]
    assert found.rule == "lock-contention"
    assert found.cost.value == 99 * 4_800 * US
    assert evidence(found)["lock_peer_working_ratio"] > 0.8
    assert [m.source for m in d.measures if m.name == "lock_peer_working_ratio"] == ["thread 300 (http)"]
    assert any("interpreter's lock" in note for note in found.notes)
    text = remedy_text(found)
    assert "--api-server-count" in text and "--async-scheduling" in text
    assert not {"launch-bound", "host-work-between-steps", "waiting-for-requests"} & set(rules(d))
    assert measure(d, "no_demand_ratio") == 0


def test_a_thread_that_sleeps_has_no_lock(tmp_path: Path) -> None:
    d = diagnose(engine_behind_a_lock(other_works=False), tmp_path)
    assert (measure(d, "lock_peer_working_ratio") or 0) < 0.1
    assert not any("interpreter's lock" in note for note in finding(d, "lock-contention").notes)


# --- D-03, D-40: no CPU ---------------------------------------------------------------------------------------------


def starved(steps: int = 200, asleep_in: str | None = None) -> TraceBuilder:
    """Kernels of 2.0–3.8 ms every 6 ms; the launching thread is taken off its CPU as soon as they are done.

    ``asleep_in``: the system call in which it sleeps instead.
    """
    b = TraceBuilder()
    b.gpu()
    at = S
    for step in range(steps):
        kernel = (2_000, 2_880, 3_760)[step % 3] * US
        b.launch(at, 10 * US, at + 20 * US, kernel, GEMM)
        b.api(at + 15 * US, at + 25 * US + kernel, SYNC)
        away, back = at + 60 * US + kernel, at + 5_980 * US
        b.sched(away, cpu=3, switched_in=False)
        b.sched(back, cpu=3, switched_in=True)
        if asleep_in:
            b.osrt(away - 5 * US, back + 5 * US, asleep_in)
        b.osrt(back + 10 * US, back + 15 * US, "getpid")
        at += 6 * MS
    return b


def test_a_thread_without_a_cpu_is_no_full_gpu(tmp_path: Path) -> None:
    """D-40."""
    d = diagnose(starved(), tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "cpu-contention")
    assert measure(d, "busy_ratio") == pytest.approx(0.48, abs=0.01)
    assert d.findings[0].rule == "cpu-contention"
    assert d.findings[0].cost.value == pytest.approx(0.51 * d.window.duration_ns, rel=0.02)
    assert "launch-bound" not in rules(d)


@pytest.mark.parametrize(
    ("call", "cause"), [("futex", "lock"), ("read", "io"), ("epoll_wait", "no-demand"), ("nanosleep", "host-work")]
)
def test_a_thread_that_sleeps_is_not_starved(tmp_path: Path, call: str, cause: str) -> None:
    """Off its CPU by its own will: the system call says why."""
    d = diagnose(starved(60, call), tmp_path)
    assert idle(d, "cpu-contention") == 0
    assert idle(d, cause, "sync") > 0.9 * idle(d)


def test_utilisation_does_not_speak_for_a_starved_gpu(tmp_path: Path) -> None:
    """D-40: the driver's 97 % stands beside the idle half, as evidence of the lowest rank."""
    run = Run(tmp_path / "bundle")
    uuid = "GPU-00000000-0000-4000-8000-000000000000"
    run.gpu.fact("gpu_uuid", uuid, f"gpu/{uuid}")
    run.gauge(run.gpu, "utilization_ratio", lambda s: 0.97, f"gpu/{uuid}", 3)
    trace = starved(300)
    trace.gpu(uuid=uuid[4:], index=0)
    trace.session(S, 3 * S, utc_epoch_ns=EPOCH - S)
    d = analyze_file(run.finish(trace, 3), Options(window="full"))
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "cpu-contention")
    assert all(m.rank == "E" for m in d.measures if m.name.startswith("gpu_utilization"))


def throttled_pod() -> TraceBuilder:
    """Every 100 ms the quota is used up after 24 ms: no thread of the process runs until the next period."""
    b = TraceBuilder()
    b.gpu()
    threads = [b.thread(), b.thread(501), b.thread(502)]
    for period in range(40):
        t0 = S + period * 100 * MS
        for k in range(12):
            b.launch(t0 + k * 2 * MS, 10 * US, t0 + k * 2 * MS + 15 * US, 1_950 * US, GEMM)
        b.osrt(t0 + MS, t0 + MS + 5 * US, "write")
        for thread in threads:
            b.sched(t0 + 24_050 * US, cpu=0, switched_in=False, thread=thread)
            b.sched(t0 + 99_980 * US, cpu=0, switched_in=True, thread=thread)
    return b


def test_a_used_up_quota_is_seen_in_the_timeline(tmp_path: Path) -> None:
    """D-03; what the cgroup itself counts is tested with the host's telemetry."""
    d = diagnose(throttled_pod(), tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "cpu-contention")
    found = finding(d, "cpu-contention")
    assert found.cost.value == pytest.approx(39 * 75_930 * US, rel=0.01)
    assert "cpu.max" in remedy_text(found)
    assert not {"launch-bound", "lock-contention"} & set(rules(d))


# --- D-31: pauses of one host ---------------------------------------------------------------------------------------


def collecting_worker(ranks: int, marked: bool = False, pauses: tuple[int, ...] = (150, 300)) -> TraceBuilder:
    """Ranks in step, 10 ms a step; in two of 450 steps rank 2 works for 240 ms outside CUDA before it launches."""
    b = TraceBuilder()
    for rank in range(ranks):
        b.gpu(index=rank)
    for rank in range(ranks):
        thread = b.process(200 + rank).thread()
        at = S
        for step in range(450):
            late = 240 * MS if step in pauses else 0
            if late and marked and rank == 2:
                b.nvtx(at - 900 * US, at + late, "gc: generation 2", thread=thread)
            begin = at + (late if rank == 2 else 0)
            for k in range(8):
                b.launch(begin + k * 8 * US, 5 * US, begin + 10 * US + k * MS, MS, GEMM, thread=thread, device=rank)
            arrived, done = begin + 8_010 * US, at + 9_010 * US + late
            b.launch(begin + 70 * US, 5 * US, arrived, done - arrived, ALL_REDUCE, thread=thread, device=rank)
            b.api(begin + 80 * US, done + 5 * US, SYNC, thread=thread)
            at = done + 990 * US
    return b


@pytest.mark.parametrize("ranks", [8, 3])
def test_one_host_that_pauses_makes_the_others_wait(tmp_path: Path, ranks: int) -> None:
    """D-31."""
    d = diagnose(collecting_worker(ranks), tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("communication-bound", "straggler")
    found = finding(d, "peer-pauses")
    assert evidence(found)["peer_pause_count"] == 2
    assert evidence(found)["peer_pause_ns"] == pytest.approx(2 * 240 * MS, rel=0.02)
    assert evidence(found)["peer_pause_period_ns"] == pytest.approx(150 * 10 * MS + 240 * MS, rel=0.01)
    assert "garbage collection is a candidate" in " ".join(found.notes)
    assert "gc.freeze" in remedy_text(found)
    said = problem(d, "one-gpu-pauses").message
    assert "GPU 2" in said and "waiting" in said
    # the wait of the others is not time of slow links
    assert "exposed-communication" not in rules(d)
    assert finding(d, "straggler-rank").cost.value == pytest.approx(2 * 240 * MS, rel=0.01)


def test_a_marked_collection_is_called_by_its_name(tmp_path: Path) -> None:
    """D-31."""
    d = diagnose(collecting_worker(3, marked=True), tmp_path)
    notes = " ".join(finding(d, "peer-pauses").notes)
    assert "garbage was being collected" in notes
    assert "candidate" not in notes


def test_the_paused_host_itself_has_host_work_and_not_slow_steps(tmp_path: Path) -> None:
    """D-31, one GPU."""
    b = TraceBuilder()
    b.gpu()
    at = S
    for step in range(400):
        if step in (150, 300):
            at += 240 * MS
        for k in range(9):
            b.launch(at + k * 8 * US, 5 * US, at + 10 * US + k * MS, MS, GEMM)
        b.api(at + 80 * US, at + 9_015 * US, SYNC)
        at += 9_100 * US
    d = diagnose(b, tmp_path)
    found = finding(d, "host-pauses")
    assert found.cost.value == pytest.approx(2 * 240 * MS, rel=0.01)
    assert evidence(found)["host_pause_count"] == 2
    assert d.verdict.cls == "gpu-busy"


def test_a_long_pause_at_every_step_is_the_loop_and_no_exception(tmp_path: Path) -> None:
    """As with a data loader that works in the launching thread: the host works 120 ms between any two batches."""
    b = TraceBuilder()
    b.gpu()
    at = S
    for _ in range(8):
        b.copy(at, 20 * US, at + 5 * US, 15 * US, bytes=150_000)
        for k in range(60):
            # The host is a little late for each kernel, too.
            begin = at + 90 * US + k * 90 * US
            b.launch(begin, 5 * US, begin + 10 * US, 60 * US, "embedding_kernel" if not k else GEMM)
        done = at + 61 * 90 * US
        b.copy(done, 30 * US, done + 10 * US, 10 * US, kind="d2h", bytes=40_000)
        at = done + 120 * MS
    d = diagnose(b, tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "host-work")
    assert d.steps is not None and d.steps["count"] >= 7
    assert "host-pauses" not in rules(d)
    found = finding(d, "host-work-between-steps")
    assert found is d.findings[0]
    assert found.cost.value >= 7 * 119 * MS
    assert "num_workers" in remedy_text(found) and "gc.freeze" not in remedy_text(found)


def test_even_steps_have_no_pauses(tmp_path: Path) -> None:
    d = diagnose(collecting_worker(3, pauses=()), tmp_path)
    assert not {"host-pauses", "peer-pauses"} & set(rules(d))
    assert "one-gpu-pauses" not in problem_codes(d)


# --- D-35: sampling on the host -------------------------------------------------------------------------------------


def penalties(work_ns: int) -> TraceBuilder:
    """A forward pass of 10 ms, ``work_ns`` of Python, 1.6 MB from pageable memory, and 0.4 ms of sampling kernels."""
    b = TraceBuilder()
    b.gpu()
    at = S
    for _ in range(60):
        b.launch(at, 5 * US, at + 10 * US, 10 * US, "embedding_kernel")
        for k in range(20):
            name = GEMM if k % 2 else "flash_fwd_splitkv_kernel"
            b.launch(at + 10 * US + k * 8 * US, 5 * US, at + 20 * US + k * 500 * US, 500 * US, name)
        done = at + 10_020 * US
        b.api(at + 180 * US, done + 3 * US, SYNC)
        ready = done + 3 * US + work_ns
        b.copy(ready, 150 * US, ready + 10 * US, 130 * US, bytes=1_600_000, src="pageable")
        start = ready + 170 * US
        for name, ns in (
            ("void at::native::cunn_SoftMaxForward<4, float>", 200 * US),
            ("void vllm::apply_repetition_penalties_kernel<float>", 100 * US),
            ("void at::native::reduce_kernel<512, ArgMaxOps>", 100 * US),
        ):
            b.launch(ready + 155 * US, 5 * US, start, ns, name)
            start += ns
        b.copy(ready + 190 * US, 400 * US, start, 3 * US, kind="d2h", bytes=160, dst="pageable")
        at = start + 100 * US
    return b


def test_host_work_before_sampling_is_named_by_its_place(tmp_path: Path) -> None:
    """D-35."""
    d = diagnose(penalties(38 * MS), tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "host-work")
    found = d.findings[0]
    assert found.rule == "host-sampling"
    assert found.cost.value == pytest.approx(60 * 38 * MS, rel=0.01)
    assert found.rank == "D" and found.confidence <= 0.6
    assert "repetition_penalty" in remedy_text(found)
    # claimed once, and not by the copy or by the kernels
    waits = [f.cost.value or 0 for f in d.findings if f.area in ("scheduling", "host", "pcie")]
    assert sum(waits) <= idle(d) + slices(d)["exposed_copy", "h2d"]
    assert not {"pageable-copies", "host-work-between-steps"} & set(rules(d))


def test_the_same_work_at_a_small_batch_is_no_limit(tmp_path: Path) -> None:
    """D-35: 8 requests instead of 40 need 1.1 ms instead of 38."""
    d = diagnose(penalties(1_100 * US), tmp_path)
    assert d.verdict.cls == "gpu-busy"
    assert measure(d, "idle_before_sampling_ns") < 60 * 1_200 * US


def test_work_after_sampling_is_not_before_it(tmp_path: Path) -> None:
    """The gap in front of the next step's embedding is no sampling."""
    b = TraceBuilder()
    b.gpu()
    at = S
    for _ in range(60):
        for k, name in enumerate(
            ("embedding_kernel", GEMM, "flash_fwd_kernel", "void at::native::reduce_kernel<ArgMaxOps>")
        ):
            b.launch(at + k * 8 * US, 5 * US, at + 10 * US + k * MS, MS, name)
        b.api(at + 40 * US, at + 4_013 * US, SYNC)
        at += 12 * MS
    d = diagnose(b, tmp_path)
    assert measure(d, "idle_before_sampling_ns") == 0
    assert d.findings[0].rule == "host-work-between-steps"


def test_a_graph_between_the_work_and_sampling_is_the_model(tmp_path: Path) -> None:
    """D-35, the counter-trace: work between steps, of which each is one graph, traced whole, and then sampling."""
    b = TraceBuilder()
    b.gpu()
    at = S
    for _ in range(60):
        b.copy(at, 5 * US, at + 7 * US, 2 * US, bytes=4_096, src="pinned")
        b.graph_launch(at + 10 * US, 8 * US, span=(at + 20 * US, at + 1_020 * US))
        b.launch(at + 20 * US, 5 * US, at + 1_021 * US, 5 * US, "void at::native::reduce_kernel<512, ArgMaxOps>")
        b.api(at + 30 * US, at + 1_030 * US, SYNC)
        at += 3_030 * US
    d = diagnose(b, tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "host-work")
    assert "host-sampling" not in rules(d) and "host-work-between-steps" in rules(d)


# --- D-39: launches without graphs ----------------------------------------------------------------------------------


def eager_decode(
    steps: int, latency_ns: int = 4 * US, kernel_ns: Callable[[int], int] = lambda k: 2_000 + k % 3 * 683
) -> TraceBuilder:
    """Steps of 410 launches of 6 µs, one right after the other; kernels of 2–4 µs begin 4 µs after their call."""
    b = TraceBuilder()
    b.gpu()
    for n, word in enumerate(("serve", "m", "--api-key", "sk-test-123", "--enforce-eager")):
        b.metadata(f"PROCESS_0:ARGUMENT_{n}", word)
    at = S
    for _ in range(steps):
        for k in range(410):
            b.launch(at, 6 * US, at + 6 * US + latency_ns, kernel_ns(k), f"void layer_kernel<{k % 41}>(float*)")
            at += 6_100
        b.api(at, at + 20 * US, SYNC)
        at += 25 * US
    return b


@pytest.mark.parametrize(("steps", "latency_ns"), [(120, 4 * US), (120, 8 * US)])
def test_launches_that_follow_each_other_are_the_limit_whatever_their_latency(
    tmp_path: Path, steps: int, latency_ns: int
) -> None:
    """D-39: each kernel's launch has returned before the gap in front of it begins, and still it came too late."""
    d = diagnose(eager_decode(steps, latency_ns), tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "launch")
    assert measure(d, "idle_ratio") == pytest.approx(0.56, abs=0.02)
    assert measure(d, "idle_launch_ratio") > 0.5
    assert measure(d, "queue_delay_p50_ns") == latency_ns
    found = d.findings[0]
    assert found.rule == "launch-bound"
    assert evidence(found)["small_kernel_ratio"] > 0.98
    assert d.steps is not None and d.steps["launches_per_step"] == pytest.approx(410)
    assert measure(d, "no_demand_ratio") == 0


def test_the_flag_that_made_it_is_quoted_and_nothing_else_of_the_command_line(tmp_path: Path) -> None:
    """D-39."""
    d = diagnose(eager_decode(60), tmp_path)
    found = finding(d, "launch-bound")
    assert found.notes[0].startswith("The command line has --enforce-eager")
    assert found.remedies[0].change == "Remove --enforce-eager."
    assert d.provenance.capture["flags"] == ["--enforce-eager"]
    assert "sk-test-123" not in everything_said(d)


def test_without_launch_costs_a_step_takes_what_its_kernels_take(tmp_path: Path) -> None:
    """D-39: 1.1 to 1.2 ms instead of 2.5."""
    steps = 60  # 24 600 operations: all of them are replayed in a report
    d = diagnose(eager_decode(steps), tmp_path)
    assert d.whatif is not None
    first = d.whatif["chain"][0]
    assert first["fix"] == "launch=0"
    assert 1.05 * MS < first["predicted_span_ns"] / steps < 1.25 * MS
    assert first["next_verdict"] == "gpu-busy"


def graph_decode(steps: int) -> TraceBuilder:
    """The same with graphs: 67 of them are captured in 4 s, then each step is one launch."""
    b = TraceBuilder()
    b.gpu()
    at = S
    for _ in range(67):
        b.api(at, at + 10 * US, "cudaStreamBeginCapture_v10000")
        b.launch(at + 20 * US, 6 * US, at + 100 * US, 3 * US, "void layer_kernel<0>(float*)")
        b.api(at + 59 * MS, at + 59 * MS + 10 * US, "cudaStreamEndCapture_v10000")
        b.api(at + 59 * MS + 20 * US, at + 60 * MS, "cudaGraphInstantiate_v12000")
        at += 60 * MS
    for _ in range(steps):
        nodes = [at + 15 * US + k * 2_700 for k in range(410)]
        b.graph_launch(
            at, 10 * US, [(n, n + 2_683, f"void layer_kernel<{k % 41}>(float*)") for k, n in enumerate(nodes)]
        )
        done = at + 15 * US + 410 * 2_700
        b.api(at + 12 * US, done + 5 * US, SYNC)
        at = done + 10 * US
    return b


def test_captured_graphs_leave_no_launch_to_wait_for(tmp_path: Path) -> None:
    """D-39, the counter-trace."""
    d = diagnose(graph_decode(300), tmp_path)
    assert d.verdict.cls == "gpu-busy"
    assert not {"launch-bound", "host-work-between-steps", "host-work-per-launch"} & set(rules(d))
    assert sum(part.ns for part in d.window.left_out) == pytest.approx(67 * 60 * MS, rel=0.02)


# --- D-30, C-17: the profiler itself --------------------------------------------------------------------------------


def flushed(steps: int = 60) -> TraceBuilder:
    """Eager steps with gaps at every launch; fourteen flushes of 2 ms of the profiler's own buffers between them."""
    b = TraceBuilder()
    b.gpu()
    at = S
    for step in range(steps):
        if step % 4 == 3 and step // 4 < 14:
            b.overhead(at, at + 2 * MS, "CUPTI buffer flush")
            at += 2 * MS
        for k in range(200):
            b.launch(at, 9 * US, at + 10 * US, 4 * US, f"void layer_kernel<{k % 41}>(float*)")
            at += 10 * US
        at += 20 * US
    return b


def test_what_the_profiler_did_is_no_gap_of_the_program(tmp_path: Path) -> None:
    """D-30, without the engine's metrics."""
    d = diagnose(flushed(), tmp_path)
    assert idle(d, "profiler") == 14 * 2 * MS
    found = finding(d, "profiler-overhead")
    assert any("not known" in note for note in found.notes)
    assert "--cpuctxsw=none" in remedy_text(found) and "shorter --duration" in remedy_text(found)
    # launch-bound stays, with the doubt said and a lower confidence
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "launch")
    assert "may be made by the profiler" in d.verdict.sentence and d.verdict.confidence <= 0.6
    assert finding(d, "launch-bound").confidence <= 0.6


def watched_capture(
    folder: Path, tokens_per_s: Callable[[int], float], itl_s: Callable[[int], float] | None
) -> Diagnosis:
    """A bundle whose engine is watched from 10 s before a capture of 10 s to 10 s after it."""
    run = Run(folder)
    seconds = range(-10, 21)
    tokens = spent = 0.0
    for second in seconds:
        now = EPOCH + second * S
        run.engine.sample("running_requests", 8, "engine/0", time_ns=now)
        run.engine.sample("output_tokens", tokens, "engine/0", time_ns=now)
        if itl_s is not None:
            run.engine.sample("inter_token_latency_seconds_sum", spent, "engine/0", time_ns=now)
            run.engine.sample("inter_token_latency_seconds_count", tokens, "engine/0", time_ns=now)
            spent += tokens_per_s(second) * itl_s(second)
        tokens += tokens_per_s(second)
    trace = flushed(400)
    trace.session(S, 11 * S, utc_epoch_ns=EPOCH - S)
    return analyze_file(run.finish(trace, 10), Options(window="full"))


def test_a_capture_that_slows_the_engine_doubts_what_it_shows_of_the_host(tmp_path: Path) -> None:
    """D-30: 7.1 ms per token before the capture, 11.9 ms in it."""
    d = watched_capture(tmp_path / "bundle", lambda s: 100.0, lambda s: 0.0119 if 0 <= s < 10 else 0.0071)
    assert measure(d, "capture_slowdown_ratio") == pytest.approx(1.68, abs=0.01)
    found = finding(d, "capture-slows")
    assert found.severity == "warning"
    assert "--cuda-graph-trace=graph" in remedy_text(found) and "--cpuctxsw=none" in remedy_text(found)
    assert "1.68 times slower" in d.verdict.sentence
    assert d.verdict.confidence <= 0.4 and finding(d, "launch-bound").confidence <= 0.4


def test_fewer_tokens_while_recording_show_the_cost_too(tmp_path: Path) -> None:
    """C-17: 100 tokens per second, 36 in the capture, 99 after it."""
    d = watched_capture(tmp_path / "bundle", lambda s: 36.0 if 0 <= s < 10 else 100.0 if s < 0 else 99.0, None)
    assert measure(d, "capture_slowdown_ratio") == pytest.approx(2.78, abs=0.03)
    found = finding(d, "capture-slows")
    assert any("distorted" in note for note in found.notes)
    assert "shorter" in remedy_text(found)


def test_a_capture_that_costs_nothing_is_not_doubted(tmp_path: Path) -> None:
    d = watched_capture(tmp_path / "bundle", lambda s: 100.0, lambda s: 0.0071)
    assert measure(d, "capture_slowdown_ratio") == pytest.approx(1.0)
    assert "capture-slows" not in rules(d)
