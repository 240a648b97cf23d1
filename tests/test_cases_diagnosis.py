"""Real cases of naming a bottleneck: what limits the run, what it costs, and what only looks like the reason."""

from __future__ import annotations

from pathlib import Path

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
    infprof,
    measure,
    no_ratio_above_one,
    problem,
    problem_codes,
    remedy_text,
    rules,
    slices,
)
from infprof.simulator.builder import TraceBuilder

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32"
HOST_RULES = {
    "host-work-between-steps",
    "sync-per-step",
    "launch-bound",
    "cpu-contention",
    "lock-contention",
    "io-wait",
}

# --- D-01, D-06: where the host waits is not where the time goes ----------------------------------------------------


def sampler_loop(steps: int, held_in: str, origin: int = S) -> TraceBuilder:
    """Steps of 5.1 ms: 1.2 ms of launches, held for 1.9 ms by the copy of the sampled tokens, 2.0 ms outside CUDA.

    ``held_in``: the call that waits is the synchronisation, or the pageable copy itself.
    """
    b = TraceBuilder()
    b.gpu()
    for step in range(steps):
        t0 = origin + step * 5_100 * US
        start = t0 + 20 * US
        for k in range(80):
            b.launch(t0 + k * 15 * US, 15 * US, start + k * 38_400, 38_400, GEMM)
        copied = start + 80 * 38_400
        call, returned = t0 + 1_200 * US, t0 + 3_100 * US
        waits = returned - 10 * US if held_in == "copy" else call + 20 * US
        b.copy(call, waits - call, copied, 2 * US, kind="d2h", bytes=32, dst="pageable")
        b.api(waits, returned, "cudaStreamSynchronize_v3020")
    return b


@pytest.mark.parametrize("steps", [100, 30])
@pytest.mark.parametrize("held_in", ["sync", "copy"])
def test_the_host_part_of_the_loop_costs_and_the_wait_does_not(tmp_path: Path, held_in: str, steps: int) -> None:
    """D-01."""
    d = diagnose(sampler_loop(steps, held_in), tmp_path)
    gaps = steps - 1
    assert slices(d)["compute", None] == steps * 3_072 * US
    # 6 µs until the wait returns and 2.0 ms outside CUDA
    assert idle(d, "sync") == gaps * 2_006 * US
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "host-work")
    assert d.findings[0].rule == "host-work-between-steps"
    assert d.findings[0].cost.value == pytest.approx(gaps * 2 * MS, rel=0.01)
    assert claimed_ns(d) <= gaps * 2_030 * US


def test_the_copy_of_a_few_bytes_is_the_sync_point_and_not_the_bottleneck(tmp_path: Path) -> None:
    """D-01."""
    d = diagnose(sampler_loop(100, "copy"), tmp_path)
    found = finding(d, "host-work-between-steps")
    assert evidence(found)["tiny_d2h_count"] == 100
    assert any("Synchronising calls mark where the host waits" in note for note in found.notes)
    assert not {"pageable-copies", "exposed-copies", "small-copies", "needless-copies"} & set(rules(d))
    assert d.verdict.cls != "pcie-limited"
    assert "pinned" not in d.verdict.sentence


def spinning_in_sync(other_threads: int) -> TraceBuilder:
    """The GPU is busy for 97 % of the time; the one launching thread spins in cudaStreamSynchronize all the while."""
    b = TraceBuilder()
    for step in range(100):
        t0 = S + step * 10 * MS
        for k in range(10):
            b.launch(t0 + k * 10 * US, 5 * US, t0 + 10 * US + k * 970 * US, 970 * US, GEMM)
        b.api(t0 + 110 * US, t0 + 9_720 * US, "cudaStreamSynchronize_v3020")
        for other in range(other_threads):
            b.osrt(t0, t0 + 9 * MS, "pthread_cond_wait", thread=b.thread(200 + other))
    return b


@pytest.mark.parametrize("other_threads", [0, 3])
def test_a_thread_that_spins_beside_a_busy_gpu_is_no_limit(tmp_path: Path, other_threads: int) -> None:
    """D-06 (a)."""
    d = diagnose(spinning_in_sync(other_threads), tmp_path)
    assert d.verdict.cls == "gpu-busy"
    assert measure(d, "busy_ratio") == pytest.approx(0.97, abs=0.002)
    assert not HOST_RULES & set(rules(d))
    assert "CPU" not in d.verdict.sentence
    assert "--gpu-metrics-device" in (d.verdict.why_not or "")


def polling_without_requests(call: str, poll_ns: int, between_ns: int) -> TraceBuilder:
    """A burst of work, two seconds in which the engine polls for requests in a loop, and another burst."""
    b = TraceBuilder()
    for burst in (S, S + 2_100 * MS):
        for k in range(100):
            b.launch(burst + k * 500 * US, 5 * US, burst + 10 * US + k * 500 * US, 499 * US, GEMM)
    at = S + 51 * MS
    arrival = S + 2_100 * MS - 50 * US
    while at < arrival:
        b.osrt(at, min(at + poll_ns, arrival), call)
        at += poll_ns + between_ns
    return b


@pytest.mark.parametrize(
    ("call", "poll_ns", "between_ns"),
    [
        ("poll", 100 * US, 5 * US),
        ("epoll_wait", 100 * US, 5 * US),
        ("poll", 60 * US, 20 * US),
        ("poll", 10 * MS, 5 * US),
    ],
)
def test_polling_for_requests_is_no_host_limit(tmp_path: Path, call: str, poll_ns: int, between_ns: int) -> None:
    """D-06 (b)."""
    d = diagnose(polling_without_requests(call, poll_ns, between_ns), tmp_path)
    assert d.verdict.cls == "no-demand"
    assert "CPU" not in d.verdict.sentence
    assert not HOST_RULES & set(rules(d))
    assert "host-work" not in f"{d.verdict.second} {d.verdict.sentence}"
    assert measure(d, "no_demand_ratio") > 0.9


# --- D-09 to D-11: time that exists is counted once -----------------------------------------------------------------


def overlapping_streams(units: int = 100) -> TraceBuilder:
    """Compute 1 626.1 ms and NCCL 627.5 ms on two streams, 1 978.3 ms together, in a span of 2 008.6 ms."""
    compute, comm, overlap = 1_626_100_000 // units, 627_500_000 // units, 275_300_000 // units
    gap = 30_300_000 // (units - 1)
    b = TraceBuilder()
    at = S + 30_300_000 - gap * (units - 1)
    for unit in range(units):
        begin = S if unit == 0 else at
        b.launch(at - 2 * MS, 5 * US, begin, compute, GEMM)
        reduce = begin + compute - overlap
        b.launch(
            at - 2 * MS + 10 * US, 5 * US, reduce, comm, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(Args)", stream=20
        )
        at += compute + comm - overlap + gap
    return b


@pytest.mark.parametrize("units", [100, 50])
def test_overlapping_streams_do_not_make_more_than_all_of_the_time(tmp_path: Path, units: int) -> None:
    """D-09."""
    d = diagnose(overlapping_streams(units), tmp_path)
    assert d.window.duration_ns == 2_008_600_000
    assert slices(d)["compute", None] == 1_626_100_000
    assert slices(d)["exposed_communication", None] == 352_200_000
    assert idle(d) == 30_300_000
    assert measure(d, "busy_ns") == 1_978_300_000
    assert measure(d, "busy_ratio") == pytest.approx(0.985, abs=0.0005)
    assert d.devices[0].kernels.total_ns == measure(d, "kernel_total_ns") == 2_253_600_000
    assert no_ratio_above_one(d)
    assert "112" not in d.verdict.sentence


def copies_between_kernels(rounds: int, origin: int = S) -> TraceBuilder:
    """1 760 ms: kernels 1 400 ms, pinned copies to the device 253.7 ms (3.2 GB), nothing for 106.3 ms."""
    b = TraceBuilder()
    b.gpu()
    kernel, copy, gap = 1_400 * MS // rounds, 253_700 * US // rounds, 106_300 * US // rounds
    at = origin
    for _ in range(rounds):
        b.copy(at - 8 * US, 5 * US, at, copy, bytes=3_200_000_000 // rounds)
        b.launch(at - 2 * US, 2 * US, at + copy, kernel, GEMM)
        at += copy + kernel + gap
    # the last gap ends with the end of the trace
    b.launch(at - 8 * US, 5 * US, at, US, "end")
    return b


@pytest.mark.parametrize(("rounds", "origin"), [(100, S), (20, 500 * S)])
def test_copies_without_kernels_are_not_idle(tmp_path: Path, rounds: int, origin: int) -> None:
    """D-10."""
    d = diagnose(copies_between_kernels(rounds, origin), tmp_path)
    assert d.window.duration_ns == 1_760 * MS + US
    found = slices(d)
    assert found["compute", None] == 1_400 * MS + US
    assert found["exposed_copy", "h2d"] == 253_700 * US
    assert idle(d) == 106_300 * US
    copies = finding(d, "exposed-copies")
    assert copies.cost.value == 253_700 * US
    assert evidence(copies)["h2d_bytes_per_s"] == pytest.approx(12.6e9, rel=0.01)
    assert evidence(copies)["link_peak_bytes_per_s"] > 12.6e9
    assert d.findings[0] is copies
    assert "20.5 %" not in everything_said(d)


def collectives(hidden_share: float, spread: tuple[float, ...]) -> TraceBuilder:
    """NCCL 1 149.7 ms in 100 calls whose lengths vary as ``spread`` says, and as much computing."""
    b = TraceBuilder()
    b.gpu()
    scale = 1_149_700_000 / sum(spread[k % len(spread)] for k in range(100))
    at = S
    for k in range(100):
        comm = round(scale * spread[k % len(spread)])
        compute = 11_497_000
        hidden = round(comm * hidden_share)
        b.launch(at - MS, 5 * US, at, compute, GEMM)
        reduce = at + compute - hidden
        name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(Args)"
        b.launch(at - MS + 10 * US, 5 * US, reduce, comm, name, stream=20, grid=(24, 1, 1))
        at += compute + comm - hidden
    return b


@pytest.mark.parametrize("spread", [(1.0, 5.3), (1.0,), (2.0, 1.0, 4.0, 5.3)])
@pytest.mark.parametrize("hidden_share", [0.0, 0.4])
def test_exposed_communication_is_claimed_once(tmp_path: Path, hidden_share: float, spread: tuple[float, ...]) -> None:
    """D-11."""
    d = diagnose(collectives(hidden_share, spread), tmp_path)
    exposed = slices(d)["exposed_communication", None]
    assert exposed == pytest.approx((1 - hidden_share) * 1_149_700_000, abs=1000)
    communication = [f for f in d.findings if f.area == "communication"]
    assert [f.cost.value for f in communication] == [exposed]
    assert claimed_ns(d) <= d.window.duration_ns
    assert sum(f.gain.high or 0 for f in communication) * d.window.duration_ns <= exposed
    assert d.verdict.cls == "communication-bound"


# --- D-18, D-26: the allocator --------------------------------------------------------------------------------------

RETRY_STEPS = (20, 50, 90, 120, 150, 190)


def allocation_retries(wait: str, origin: int = S) -> TraceBuilder:
    """40 failed allocations during start-up; then 200 steps, six of which begin with a retry of about 15 ms."""
    b = TraceBuilder()
    at = origin
    for k in range(40):
        # the library tries larger and larger pools and takes what it gets
        b.api(at, at + 2 * MS, "cudaMalloc_v3020", return_value=2)
        b.api(at + 2 * MS, at + 3 * MS, "cudaMalloc_v3020")
        b.copy(at + 3 * MS, 10 * US, at + 3 * MS + 15 * US, MS, bytes=10_000_000)
        at += 4 * MS + 20 * US * (k % 2)
    at += 5 * MS
    for step in range(200):
        if step in RETRY_STEPS:
            b.api(at, at + 100 * US, "cudaMalloc_v3020", return_value=2)
            b.api(at + 100 * US, at + 4_100 * US, wait)
            at += 4_100 * US
            for _ in range(35):
                b.api(at, at + 300 * US, "cudaFree_v3020")
                at += 300 * US
            b.api(at, at + 200 * US, "cudaMalloc_v3020")
            at += 200 * US
        for k in range(20):
            b.launch(at + k * 10 * US, 5 * US, at + 10 * US + k * 490 * US, 490 * US, GEMM)
        b.api(at + 300 * US, at + 9_820 * US, "cudaStreamSynchronize_v3020")
        at += 9_850 * US
    return b


def retry_times(origin: int = S) -> list[tuple[int, int]]:
    steady = origin + 40 * 4 * MS + 20 * 20 * US + 5 * MS
    return [
        (steady + step * 9_850 * US + n * 14_800 * US, steady + step * 9_850 * US + (n + 1) * 14_800 * US)
        for n, step in enumerate(RETRY_STEPS)
    ]


@pytest.mark.parametrize("wait", ["cudaStreamSynchronize_v3020", "cudaEventSynchronize_v3020"])
def test_allocator_retries_of_the_steady_part_are_found(tmp_path: Path, wait: str) -> None:
    """D-18."""
    d = diagnose(allocation_retries(wait), tmp_path)
    found = finding(d, "allocator-churn")
    assert evidence(found)["allocator_retry_count"] == 6
    assert found.cost.value == pytest.approx(6 * 14_800 * US, rel=0.02)
    assert d.findings[0] is found
    text = remedy_text(found)
    assert "gpu-memory-utilization" in text
    assert "expandable_segments" in text
    assert "sync-per-step" not in rules(d)
    assert "out of memory" not in everything_said(d).lower()


def test_the_steps_with_retries_are_named(tmp_path: Path) -> None:
    """D-18."""
    found = finding(diagnose(allocation_retries("cudaStreamSynchronize_v3020"), tmp_path), "allocator-churn")
    for start, end in retry_times():
        assert any(w.start_ns < end and w.end_ns > start for w in found.where)


def test_failed_allocations_of_start_up_are_left_out_and_said(tmp_path: Path) -> None:
    """D-18."""
    d = diagnose(allocation_retries("cudaStreamSynchronize_v3020"), tmp_path)
    assert d.window.start_ns > S + 160 * MS
    assert measure(d, "allocator_failed_count") == 6
    assert any("start-up" in part.what for part in d.window.left_out)


def pinned_per_step(steps: int, held: bool) -> TraceBuilder:
    """Steps of 9 ms: cudaHostAlloc 0.9, outside CUDA 0.5, copy of 33.5 MB 1.4, cudaFreeHost 0.4, kernels 5.8 ms.

    ``held``: a synchronisation ends each step; else the launch calls take as long as the kernels.
    """
    b = TraceBuilder()
    b.gpu()
    for step in range(steps):
        t0 = S + step * 9 * MS
        b.api(t0, t0 + 900 * US, "cudaHostAlloc_v3020")
        b.copy(t0 + 1_400 * US, 5 * US, t0 + 1_405 * US, 1_395 * US, bytes=33_500_000)
        b.api(t0 + 1_410 * US, t0 + 2_800 * US, "cudaStreamSynchronize_v3020")
        b.api(t0 + 2_800 * US, t0 + 3_200 * US, "cudaFreeHost_v3020")
        for k in range(40):
            start = t0 + 3_210 * US + k * 144_750
            call = t0 + 3_200 * US + k * (10 if held else 144) * US
            b.launch(call, 5 * US if held or not k else 140 * US, start, 144_750, GEMM)
        if held:
            b.api(t0 + 3_700 * US, t0 + 9 * MS, "cudaStreamSynchronize_v3020")
    return b


@pytest.mark.parametrize(("steps", "held"), [(100, False), (100, True), (40, False)])
def test_pinned_memory_allocated_in_each_step_is_allocator_time(tmp_path: Path, steps: int, held: bool) -> None:
    """D-26. The window begins with the first step's copy, so its cudaHostAlloc lies before."""
    d = diagnose(pinned_per_step(steps, held), tmp_path)
    assert idle(d, "allocator") == pytest.approx(steps * 1_300 * US - 900 * US, rel=0.01)
    # after a synchronisation, work outside CUDA counts with it
    assert idle(d, "host-work", "sync") == pytest.approx((steps - 1) * 500 * US, rel=0.03)
    assert slices(d)["exposed_copy", "h2d"] == steps * 1_395 * US
    churn = finding(d, "allocator-churn")
    assert churn.cost.value == idle(d, "allocator")
    assert evidence(churn)["pinned_alloc_count"] >= steps - 1
    assert any("allocate it once, and copy only what is live" in note for note in churn.notes)


@pytest.mark.parametrize(("steps", "held"), [(100, False), (100, True), (40, False)])
def test_the_copy_of_the_pinned_buffer_is_a_finding_and_not_the_class(tmp_path: Path, steps: int, held: bool) -> None:
    """D-26."""
    d = diagnose(pinned_per_step(steps, held), tmp_path)
    copies = finding(d, "exposed-copies")
    assert copies.cost.value == steps * 1_395 * US
    assert evidence(copies)["host_copy_exposed_p50_bytes"] == 33_500_000
    # the same size each step: one class of sizes, a mean that is the median
    row = next(row for row in d.devices[0].copies if row.kind == "h2d")
    assert [(c["count"], c["bytes"]) for c in row.size_classes] == [(steps, steps * 33_500_000)]
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "allocator")


# --- D-20: compiling in the first request ---------------------------------------------------------------------------

COMPILE_GAPS = [0.8, 1.4, 1.1, 1.2, 1.3, 1.2, 1.0, 1.4, 1.2, 1.1, 1.3, 1.0]


def first_request_compiles(load: str, origin: int = S) -> TraceBuilder:
    """Request 1 meets twelve kernels for the first time, 14 s of compiling; request 2 is the same without."""
    b = TraceBuilder()
    at = origin

    def run(kernels: list[str], steps: int) -> None:
        nonlocal at
        for _ in range(steps):
            for name in kernels:
                b.launch(at, 5 * US, at + 8 * US, 992 * US, name)
                at += MS

    known = [GEMM, "flash_fwd_kernel"]
    run(known, 50)
    for n, seconds in enumerate(COMPILE_GAPS):
        name = f"_triton_path_{n}_kernel"
        ready = at + round(seconds * S)
        b.api(ready - 6 * MS, ready, load)
        at = ready
        run([name], 1)
        known.append(name)
        run(known, 30)
    run(known, 1000)
    return b


@pytest.mark.parametrize("load", ["cuModuleLoadData", "cuModuleLoadDataEx", "cuLibraryLoadData"])
def test_compiling_in_the_first_request_is_start_up(tmp_path: Path, load: str) -> None:
    """D-20."""
    d = diagnose(first_request_compiles(load), tmp_path)
    left = [part for part in d.window.left_out if "start-up" in part.what]
    assert len(left) == 1
    assert "compil" in left[0].what
    assert left[0].ns >= 14 * S
    assert idle(d, "module-load") == 0
    assert d.verdict.cls == "gpu-busy"
    assert not HOST_RULES & set(rules(d))


def test_left_out_compiling_is_described_with_its_remedy(tmp_path: Path) -> None:
    """D-20. Who looks at the steady part still learns what the first request spent its time on."""
    said = everything_said(diagnose(first_request_compiles("cuModuleLoadData"), tmp_path))
    assert "12 kernels" in said
    assert "warm-up" in said.lower()


@pytest.mark.parametrize(("load", "origin"), [("cuModuleLoadData", S), ("cuLibraryLoadData", 3_000 * S)])
def test_the_whole_window_names_every_kernel_that_was_compiled(tmp_path: Path, load: str, origin: int) -> None:
    """D-20."""
    d = diagnose(first_request_compiles(load, origin), tmp_path, window="full")
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "module-load")
    assert idle(d, "module-load") == pytest.approx(14 * S, rel=0.01)
    assert idle(d, "host-work") < 100 * MS
    found = finding(d, "module-load-in-window")
    assert evidence(found)["new_kernel_stall_count"] == 12
    assert {w.name for w in found.where} == {f"_triton_path_{n}_kernel" for n in range(12)}
    text = remedy_text(found)
    assert "warm-up" in text
    assert "cache" in text.lower()
    assert "prefill" not in d.verdict.sentence


# --- D-22, D-33, D-10: what copies cost -----------------------------------------------------------------------------


def pageable_copies(exposed: bool, helper_thread: bool) -> TraceBuilder:
    """1.8 s in 100 steps; the GPU is idle for 31 % while the host works; 14 pageable copies of 0.8–1.6 MB.

    They run beside kernels of another stream, or (``exposed``) before the step's kernels, which wait for them.
    """
    b = TraceBuilder()
    b.gpu()
    copier = b.thread(555) if helper_thread else b.thread()
    for step in range(100):
        t0 = S + step * 18 * MS
        nth = step // 7
        copied = step % 7 == 3 and nth < 14
        ns, size = 70 * US + nth * 5_384, 800_000 + nth * 61_538
        first = t0 + 20 * US
        if copied and exposed:
            b.copy(t0, ns + 10 * US, t0 + 8 * US, ns, bytes=size, src="pageable", stream=13, thread=copier)
            first = t0 + ns + 30 * US
        for k in range(20):
            b.launch(first - 10 * US + k * 10 * US, 5 * US, first + k * 620 * US, 620 * US, GEMM)
        if copied and not exposed:
            at = t0 + 3 * MS
            b.copy(at, ns + 10 * US, at + 8 * US, ns, bytes=size, src="pageable", stream=13, thread=copier)
    return b


def copied_ns() -> int:
    return sum(70 * US + nth * 5_384 for nth in range(14))


@pytest.mark.parametrize("helper_thread", [False, True])
def test_pageable_copies_beside_kernels_are_no_finding(tmp_path: Path, helper_thread: bool) -> None:
    """D-22."""
    d = diagnose(pageable_copies(exposed=False, helper_thread=helper_thread), tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "host-work")
    assert d.findings[0].rule == "host-work-between-steps"
    assert d.findings[0].cost.value == pytest.approx(0.31 * 1.8 * S, rel=0.02)
    assert measure(d, "pageable_count") == 14
    assert measure(d, "exposed_pageable_copy_ns") == 0
    assert "pageable-copies" not in rules(d)
    assert "pinned" not in remedy_text(d.findings[0]).lower()


def test_pageable_copies_that_kernels_wait_for_cost_their_time(tmp_path: Path) -> None:
    """D-22, the counter-case: 14 copies that take 1.4 ms or so."""
    d = diagnose(pageable_copies(exposed=True, helper_thread=False), tmp_path)
    row = next(row for row in d.devices[0].copies if row.kind == "h2d")
    assert row.exposed_ns == row.total_ns == copied_ns() == measure(d, "exposed_pageable_copy_ns")
    assert slices(d)["exposed_copy", "h2d"] == copied_ns()
    assert d.findings[0].rule == "host-work-between-steps"
    assert all((f.cost.value or 0) <= copied_ns() for f in d.findings if f.area == "pcie")


def host_resident_kv(tokens: int, gpu: str, stores: bool = True) -> TraceBuilder:
    """Per token a pinned copy of 47.1 ms at 25.5 GB/s, then 30.6 ms of kernels, all on one stream and queued ahead."""
    b = TraceBuilder()
    b.gpu(gpu, sm_count=108, memory_bytes=85_198_045_184, compute=(8, 0))
    at = S
    for token in range(tokens):
        call = S - 10 * MS if token == 0 else at - 60 * MS
        b.copy(call, 10 * US, at, 47_100 * US, bytes=1_201_050_000)
        at += 47_100 * US
        for k in range(30):
            b.launch(call + 20 * US + k * 10 * US, 5 * US, at, 1_020 * US, GEMM)
            at += 1_020 * US
            if stores and k == 10:
                b.copy(call + 500 * US, 5 * US, at - 500 * US, 3 * US, kind="d2h", bytes=35_000, stream=13)
    return b


@pytest.mark.parametrize(("tokens", "stores"), [(32, True), (32, False), (12, True)])
def test_copies_in_series_with_compute_are_a_question_of_order(tmp_path: Path, tokens: int, stores: bool) -> None:
    """D-33. The what-if part (overlap, faster link) belongs to replay; the finding's own bound must already hold."""
    d = diagnose(host_resident_kv(tokens, "NVIDIA A100-SXM4-80GB", stores), tmp_path)
    assert slices(d) == {
        ("compute", None): tokens * 30_600 * US,
        ("exposed_copy", "h2d"): tokens * 47_100 * US,
    }
    assert (d.verdict.cls, d.verdict.cause) == ("pcie-limited", "volume")
    assert "in series" in d.verdict.sentence
    found = d.findings[0]
    assert found.rule == "exposed-copies"
    assert found.cost.value == tokens * 47_100 * US
    assert evidence(found)["exposed_other_copy_ratio"] == pytest.approx(0.606, abs=0.001)
    assert evidence(found)["h2d_bytes_per_s"] == pytest.approx(25.5e9, rel=0.001)
    assert any("near the link's peak" in note for note in found.notes)
    # 47.1 instead of 77.7 ms per token
    assert found.gain.high == pytest.approx(0.394, abs=0.002)
    assert not {"pageable-copies", "small-copies", "needless-copies"} & set(rules(d))


def test_copies_that_run_beside_the_kernels_already_win_nothing_by_overlap(tmp_path: Path) -> None:
    """The copy of the next layer runs on its own stream while this layer computes, and takes four times as long."""
    b = TraceBuilder()
    b.gpu("NVIDIA A100-SXM4-80GB", sm_count=108, memory_bytes=85_198_045_184, compute=(8, 0))
    copied = S
    for layer in range(100):
        call = S - 10 * MS + layer * 60 * US
        b.copy(call, 5 * US, copied, 2 * MS, bytes=50_000_000, stream=13)
        copied += 2 * MS
        b.launch(call + 6 * US, US, copied, 500 * US, GEMM)
        for k in range(40):
            b.launch(call + (8 + k) * US, US, copied + (500 + k * 3) * US, 3 * US, "elementwise_kernel")
    d = diagnose(b, tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("pcie-limited", "volume")
    assert "beside the kernels" in d.verdict.sentence and "in series" not in d.verdict.sentence
    found = d.findings[0]
    assert found.rule == "exposed-copies" and found.severity == "critical"
    # 200 ms of copies in 200.62 ms
    assert found.gain.high == pytest.approx(0.62 / 200.62, abs=0.001)
    # which must not put what is hardly worth a word before it
    assert "many-small-kernels" in rules(d)


def test_copies_up_and_down_overlap_with_each_other(tmp_path: Path) -> None:
    """5 ms up, 1 ms of kernels, 4 ms down, in series: the copies up remain."""
    b = TraceBuilder()
    b.gpu("NVIDIA A100-SXM4-80GB", sm_count=108, memory_bytes=85_198_045_184, compute=(8, 0))
    at = S
    for batch in range(20):
        call = S - 10 * MS + batch * 60 * US
        b.copy(call, 5 * US, at, 5 * MS, bytes=125_000_000)
        b.launch(call + 10 * US, 5 * US, at + 5 * MS, MS, GEMM)
        b.copy(call + 20 * US, 5 * US, at + 6 * MS, 4 * MS, kind="d2h", bytes=100_000_000)
        at += 10 * MS
    d = diagnose(b, tmp_path)
    assert d.findings[0].rule == "exposed-copies"
    assert d.findings[0].gain.high == pytest.approx(0.5, abs=0.01)
    # and no less than what the replay wins
    assert d.whatif is not None
    assert d.findings[0].gain.high >= d.whatif["chain"][0]["gain_ratio"] - 0.01


# --- D-23: one wait per prefill step --------------------------------------------------------------------------------


def waits_in_mixed_steps(decode_ns: int, api: str) -> TraceBuilder:
    """200 decode steps without a wait, and 32 mixed steps.

    A mixed step begins with a copy of 8 bytes to the host, waits for 9.8 ms until the previous step's kernels end, and
    takes 2.1 ms until its first kernel.
    """
    b = TraceBuilder()
    b.gpu()
    gpu_free = S + 10 * US
    host = S
    for step in range(232):
        if step and step % 7 == 0 and step // 7 <= 32:
            ask = gpu_free - 9_800 * US
            b.copy(ask - 20 * US, 10 * US, gpu_free, 2 * US, kind="d2h", bytes=8, dst="pageable")
            gpu_free += 2 * US
            b.api(ask, gpu_free + 3 * US, api)
            host = gpu_free - 2 * US + 2_100 * US
            gpu_free = host + 10 * US
        kernels, total = 20, 11 * MS if step % 7 == 6 else decode_ns
        for _ in range(kernels):
            b.launch(host, 5 * US, gpu_free, total // kernels, GEMM)
            host += 6 * US
            gpu_free += total // kernels
    return b


@pytest.mark.parametrize(
    ("decode_ns", "api"),
    [
        (2 * MS, "cudaStreamSynchronize_v3020"),
        (MS, "cudaEventSynchronize_v3020"),
        (10 * MS, "cudaStreamSynchronize_v3020"),
    ],
)
def test_a_wait_per_mixed_step_costs_its_gap_and_not_its_length(tmp_path: Path, decode_ns: int, api: str) -> None:
    """D-23. Which steps are mixed belongs to the step analysis; the places of the finding are those steps already."""
    d = diagnose(waits_in_mixed_steps(decode_ns, api), tmp_path)
    found = d.findings[0]
    assert found.rule == "sync-per-step"
    assert found.cost.value == pytest.approx(32 * 2_100 * US, rel=0.02)
    assert evidence(found)["tiny_d2h_count"] == 32
    assert evidence(found)["sync_gap_count"] == 32
    assert any(".item()" in note for note in found.notes)
    assert all(2_000 * US < w.end_ns - w.start_ns < 2_200 * US for w in found.where)
    assert claimed_ns(d) < 32 * 3 * MS
    assert "small-copies" not in rules(d)


# --- D-27: graphs traced whole --------------------------------------------------------------------------------------


def whole_graphs(version: str) -> TraceBuilder:
    """128 graphs of 25 ms as one row each; 807 kernels of 3 µs outside of them; 3.3 s."""
    b = TraceBuilder(version)
    b.gpu()
    at, kernels = S, 0
    for step in range(128):
        b.graph_launch(at - 10 * US, 8 * US, span=(at, at + 25 * MS))
        at += 25 * MS + 100 * US
        for _ in range(7 if step < 39 else 6):
            b.launch(at - 8 * US, 5 * US, at, 3 * US, "void at::native::vectorized_copy_kernel<4>(float*)")
            kernels += 1
            at += 100 * US
        at += 40 * US
    assert kernels == 807
    return b


@pytest.mark.parametrize("version", ["2023.4", "2026"])
def test_graphs_traced_whole_are_busy_time(tmp_path: Path, version: str) -> None:
    """D-27."""
    d = diagnose(whole_graphs(version), tmp_path)
    assert d.window.duration_ns == pytest.approx(3.3 * S, rel=0.01)
    assert slices(d)["compute", None] == 128 * 25 * MS + 807 * 3 * US
    assert measure(d, "busy_ratio") == pytest.approx(0.97, abs=0.005)
    assert d.verdict.cls == "gpu-busy"
    assert not {"many-small-kernels", "few-sm-kernels", "launch-bound"} & set(rules(d))


def test_kernel_figures_are_not_available_where_graphs_were_traced_whole(tmp_path: Path) -> None:
    """D-27."""
    b = whole_graphs("2023.4")
    d = diagnose(b, tmp_path)
    message = problem(d, "graphs-traced-whole").message
    assert "not available" in message
    assert "--cuda-graph-trace=node" in message
    assert "overhead" in message
    for name in ("small_kernel_ratio", "top_kernel_ratio", "kernel_p50_ns"):
        assert measure(d, name) is None
    # the kernels outside of graphs must not stand there as if they were all
    assert sum(row.share for row in d.kernel_table) < 0.01
    shown = " ".join(infprof("analyze", b.write(tmp_path / "again.sqlite")).stdout.split())
    assert "--cuda-graph-trace=node" in shown
    assert "99.3" not in shown


# --- D-41: a full row and an empty GPU ------------------------------------------------------------------------------

SINGLE = "void topk_single_block<float>(float const*, int*)"


def one_block_kernels(counters: bool, steps: int = 100) -> TraceBuilder:
    """Kernels back to back: 40 % of the time in one with a single block of 1 024 threads, 60 % in a full grid."""
    b = TraceBuilder()
    b.gpu()
    levels = {
        "SMs Active [Throughput %]": (1, 98),
        "SM Issue [Throughput %]": (0, 60),
        "Tensor Active [Throughput %]": (0, 75),
        "DRAM Read Bandwidth [Throughput %]": (1, 40),
        "DRAM Write Bandwidth [Throughput %]": (0, 5),
    }
    for step in range(steps):
        t0 = S + step * 10 * MS
        b.launch(t0 - 5 * MS, 5 * US, t0, 4 * MS, SINGLE, grid=(1, 1, 1), block=(1024, 1, 1))
        b.launch(t0 - 5 * MS + 10 * US, 5 * US, t0 + 4 * MS, 6 * MS, GEMM, grid=(132, 1, 1))
        if counters:
            for tick in range(1, 101):
                for name, (first, second) in levels.items():
                    b.gpu_metric(t0 + tick * 100 * US, 0, name, first if tick <= 40 else second)
    return b


@pytest.mark.parametrize("counters", [False, True])
def test_a_kernel_of_one_block_is_a_finding_in_a_busy_gpu(tmp_path: Path, counters: bool) -> None:
    """D-41."""
    d = diagnose(one_block_kernels(counters, steps=50), tmp_path)
    assert measure(d, "busy_ratio") == 1.0
    found = finding(d, "few-sm-kernels")
    assert found.cost.value == 50 * 4 * MS
    assert found.rank == ("A" if counters else "D")
    assert found.severity != "info"
    assert evidence(found)["sm_count"] == 132
    assert evidence(found)["single_block_kernel_ns"] == 50 * 4 * MS
    assert {w.name for w in found.where} == {SINGLE}
    row = next(row for row in d.kernel_table if row.name == SINGLE)
    assert (row.grid_blocks, row.block_threads, row.total_ns) == (1, 1024, 50 * 4 * MS)


def test_a_full_row_is_not_called_a_fully_used_gpu(tmp_path: Path) -> None:
    """D-41."""
    d = diagnose(one_block_kernels(counters=False), tmp_path)
    assert (d.verdict.cls, d.verdict.rank) == ("gpu-busy", "C")
    assert "cannot be told" in d.verdict.sentence
    assert "fully" not in d.verdict.sentence
    assert "graphs-traced-whole" not in problem_codes(d)


def test_counters_show_how_few_multiprocessors_work(tmp_path: Path) -> None:
    """D-41. On average 59 % of the multiprocessors have a warp, 1 % while the single block runs."""
    d = diagnose(one_block_kernels(counters=True, steps=50), tmp_path)
    assert d.verdict.rank == "A"
    assert evidence(finding(d, "few-sm-kernels"))["sm_active_ratio"] == pytest.approx(0.592, abs=0.01)
