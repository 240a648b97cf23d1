"""Variants of the real cases: the same faults in other formats, under other call names, split among other threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from case_builders import (
    MS,
    US,
    S,
    diagnose,
    everything_said,
    evidence,
    finding,
    idle,
    measure,
    problem_codes,
    queued,
    remedy_text,
    rules,
)
from infprof.diagnosis import Options, analyze_file
from infprof.measures import calls
from infprof.measures.kernel_class import classify, is_communication
from infprof.results import Diagnosis
from infprof.simulator.builder import TraceBuilder
from infprof.steps.attention import context_of
from kineto_builder import H100, KinetoBuilder
from test_cases_host import encrypted_copies

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SYNC = "cudaStreamSynchronize_v3020"
MI300X = {**H100, "name": "AMD Instinct MI300X", "numSms": 304}


def of_kineto(builder: KinetoBuilder, folder: Path) -> Diagnosis:
    return analyze_file(builder.write(folder / "trace.json"), Options())


# --- Other spellings of the API --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("hipModuleLaunchKernel", calls.LAUNCH),
        ("hipExtModuleLaunchKernel", calls.LAUNCH),
        ("hipModuleLoadData", calls.MODULE),
        ("hiprtcCompileProgram", calls.MODULE),
        ("cuModuleGetFunction", calls.MODULE),
        ("cuLaunchKernelEx", calls.LAUNCH),
        ("hipMemcpyWithStream", calls.COPY),
    ],
)
def test_a_call_is_what_its_verb_says(name: str, kind: int) -> None:
    assert calls.cuda_kinds([name]).tolist() == [kind]


def test_pinned_memory_is_allocated_by_hip_too() -> None:
    assert calls.pinned_allocators(["hipHostMalloc", "cuMemHostAlloc", "hipMalloc"]).tolist() == [True, True, False]


@pytest.mark.parametrize("api", ["hipModuleLaunchKernel", "hipExtModuleLaunchKernel", "hipLaunchKernel"])
def test_launches_from_a_module_are_no_loading_of_modules(tmp_path: Path, api: str) -> None:
    """D-39 on AMD: launches of 6 µs one right after the other, kernels of 2.5 µs."""
    b = KinetoBuilder(devices=[MI300X])
    at = 0.0
    for step in range(20):
        for k in range(200):
            b.launch(at, 6, at + 10, 2.5, f"layer_kernel_{k % 41}", api=api)
            at += 6.1
        b.call(at, 20, "hipStreamSynchronize", corr=100_000 + step)
        at += 25
    d = of_kineto(b, tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "launch")
    assert d.findings[0].rule == "launch-bound"
    assert idle(d, "module-load") == 0


@pytest.mark.parametrize(
    ("text", "context"),
    [
        ("decode seq-len 77", 77),
        ("sequence length: 99", 99),
        ("cache_len=512", 512),
        ("decode (512 tokens in context)", 512),
        ("max_seq_len=9000", 0),
    ],
)
def test_a_context_is_named_in_many_ways(text: str, context: int) -> None:
    """D-36."""
    assert context_of(text) == context


def test_names_of_other_projects_have_a_class() -> None:
    softmax = "void soft_max_f32<true, 0, 0>(float const*)"
    names = [
        softmax,
        "void mul_mat_q<(ggml_type)12, 64, false>(char const*)",
        "void mul_mat_vec_q<(ggml_type)12, 1>(void const*)",
    ]
    assert [c.kind for c in classify(names)] == ["softmax", "gemm", "gemv"]
    assert is_communication("userbuffers_fp16_sum_inplace_gpu_rw_ag")


# --- D-06: an engine without requests --------------------------------------------------------------------------------


def without_requests(wait: Callable[[TraceBuilder, int, int], None], others: tuple[str, ...] = ()) -> TraceBuilder:
    """Two bursts of work and a second between them, in which the launching thread does ``wait``, others sleep in a call."""
    b = TraceBuilder()
    b.gpu()
    low, high = S + 31 * MS, S + 1_000 * MS
    for burst in (S, high + 50 * US):
        for k in range(60):
            b.launch(burst + k * 500 * US, 5 * US, burst + 10 * US + k * 500 * US, 499 * US, GEMM)
        b.osrt(burst + 2 * MS, burst + 2 * MS + 5 * US, "write")
    wait(b, low, high)
    for n, call in enumerate(others):
        b.osrt(low - 10 * MS, high + 10 * US, call, thread=b.thread(300 + n))
    return b


def every(apart: int, *does: tuple[int, int, str]) -> Callable[[TraceBuilder, int, int], None]:
    """A loop: every so many ns these system calls, each from one time of the turn to another."""

    def loop(b: TraceBuilder, low: int, high: int) -> None:
        for at in range(high - apart, low - apart, -apart):
            for start, end, call in does:
                b.osrt(at + start, at + end, call)

    return loop


@pytest.mark.parametrize(
    ("wait", "others"),
    [
        (lambda b, low, high: b.osrt(low, high, "pthread_cond_wait"), ("epoll_wait", "futex")),
        (lambda b, low, high: b.osrt(low, high, "sem_clockwait"), ("poll",)),
        (every(100 * MS, (0, 99 * MS, "pthread_cond_timedwait")), ("epoll_wait",)),
        (every(200 * US, (0, 3 * US, "poll"), (5 * US, 8 * US, "recv")), ()),
        (every(200 * US, (0, 2 * US, "sched_yield")), ()),
        (every(1_010 * US, (0, MS, "clock_nanosleep")), ()),
    ],
    ids=["condition", "semaphore", "timeouts", "poll and recv", "yield", "sleep"],
)
def test_an_engine_that_waits_for_requests_is_no_limit_however_it_waits(
    tmp_path: Path, wait: Callable[[TraceBuilder, int, int], None], others: tuple[str, ...]
) -> None:
    """D-06 (b)."""
    d = diagnose(without_requests(wait, others), tmp_path)
    assert d.verdict.cls == "no-demand"
    assert not [f.rule for f in d.findings if f.severity != "info"]
    assert measure(d, "no_demand_ratio") > 0.9


def test_a_loop_that_writes_between_its_polls_works(tmp_path: Path) -> None:
    loop = every(200 * US, (0, 3 * US, "poll"), (5 * US, 8 * US, "recv"), (150 * US, 153 * US, "send"))
    d = diagnose(without_requests(loop), tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "host-work")


def test_nobody_knows_whom_a_wait_without_others_was_for(tmp_path: Path) -> None:
    """Neither a lock that somebody holds nor the wait for requests is proven."""
    d = diagnose(without_requests(lambda b, low, high: b.osrt(low, high, "futex")), tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "lock")
    assert d.verdict.confidence <= 0.6
    assert "or for requests" in d.verdict.sentence


# --- D-01, D-14: who works while the launching thread waits ----------------------------------------------------------


def scheduled_from_elsewhere(wait: str, same_process: bool = False) -> TraceBuilder:
    """Steps of 3 ms; then the worker waits for 2 ms while the scheduler works, in another process or a thread."""
    b = TraceBuilder()
    b.gpu()
    worker = b.process(200, "VLLM::Worker").thread()
    scheduler = b.process(200).thread(333, "http") if same_process else b.process(300, "VLLM::EngineCore").thread()
    at = S
    for _ in range(50):
        for k in range(20):
            b.launch(at + k * 15 * US, 12 * US, at + 20 * US + k * 150 * US, 150 * US, GEMM, thread=worker)
        done = at + 3_020 * US
        b.api(at + 310 * US, done + 5 * US, SYNC, thread=worker)
        if wait == "sched_yield":
            for turn in range(60):
                b.osrt(done + (20 + turn * 32) * US, done + (22 + turn * 32) * US, wait, thread=worker)
        else:
            b.osrt(done + 20 * US, done + 2 * MS, wait, thread=worker)
        b.osrt(at, done + 10 * US, "epoll_wait", thread=scheduler)
        b.osrt(done + 1_900 * US, done + 1_910 * US, "write", thread=scheduler)
        at = done + 2_010 * US
    return b


@pytest.mark.parametrize("wait", ["sem_clockwait", "futex", "sched_yield", "poll"])
def test_a_worker_that_waits_for_its_scheduler_waits_for_host_work(tmp_path: Path, wait: str) -> None:
    """D-01: no lock, and no synchronisation to remove."""
    d = diagnose(scheduled_from_elsewhere(wait), tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "host-work")
    assert "waiting for another thread or process that works" in d.verdict.sentence
    found = d.findings[0]
    assert found.rule == "host-work-between-steps"
    assert any("a scheduler, most often" in note for note in found.notes)
    assert not {"lock-contention", "sync-per-step"} & set(rules(d))


@pytest.mark.parametrize("wait", ["sem_wait", "pthread_mutex_lock", "futex", "pthread_cond_clockwait"])
def test_a_thread_of_the_same_process_has_the_lock(tmp_path: Path, wait: str) -> None:
    """D-14."""
    d = diagnose(scheduled_from_elsewhere(wait, same_process=True), tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "lock")
    assert d.findings[0].rule == "lock-contention"


def test_without_system_calls_nobody_is_sure_that_the_host_worked(tmp_path: Path) -> None:
    """D-14 and D-40 in a PyTorch trace: a lock or a lack of CPUs look the same."""
    b = KinetoBuilder()
    for step in range(60):
        at = step * 6_000.0
        b.launch(at, 10, at + 20, 2_880, GEMM)
        b.call(at + 15, 2_890, "cudaStreamSynchronize", corr=90_000 + step)
    d = of_kineto(b, tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "host-work")
    assert d.verdict.confidence <= 0.7
    assert "System calls were not recorded" in d.verdict.sentence


# --- D-02, D-23, D-33: copies whose memory or whose wait is recorded otherwise ---------------------------------------


def test_a_copy_to_memory_of_unknown_kind_may_wait(tmp_path: Path) -> None:
    """D-02: on AMD every trace is without the kind, and each .item() would look like confidential computing."""
    d = diagnose(encrypted_copies(0, "unknown", kind="d2h"), tmp_path)
    assert "blocking-async-copies" not in rules(d)
    assert "confidential computing" not in everything_said(d)


def test_pageable_memory_is_ruled_out_only_where_the_kind_is_known(tmp_path: Path) -> None:
    """D-02."""
    known = finding(diagnose(encrypted_copies(0), tmp_path), "blocking-async-copies")
    assert any("ruled out" in note for note in known.notes)
    unknown = finding(diagnose(encrypted_copies(0, "unknown"), tmp_path), "blocking-async-copies")
    assert not any("ruled out" in note for note in unknown.notes)
    assert unknown.confidence <= 0.5 < known.confidence


@pytest.mark.parametrize("api", ["cudaMemcpyAsync_v3020", "cudaMemcpy_v3020", "cuMemcpyDtoH_v2"])
def test_the_wait_inside_the_copy_call_is_no_work_of_the_host(tmp_path: Path, api: str) -> None:
    """D-23: one call copies and waits; 2.1 ms behind it cost in each of 16 steps, and the 9.8 ms before do not."""
    b = TraceBuilder()
    b.gpu()
    gpu, host = S + 10 * US, S
    for step in range(120):
        if step and step % 7 == 0 and step // 7 <= 16:
            ask = gpu - 9_800 * US
            b.copy(ask, gpu + 5 * US - ask, gpu, 2 * US, kind="d2h", bytes=4, dst="pageable", api=api)
            host = gpu + 2_100 * US
            gpu = host + 10 * US
        length = (11 * MS if step % 7 == 6 else 2 * MS) // 20
        for _ in range(20):
            b.launch(host, 5 * US, gpu, length, GEMM)
            host, gpu = host + 6 * US, gpu + length
    d = diagnose(b, tmp_path)
    assert d.findings[0].rule == "sync-per-step"
    assert d.findings[0].cost.value == pytest.approx(16 * 2_100 * US, rel=0.02)
    assert evidence(d.findings[0])["tiny_d2h_count"] == 16


def test_copies_of_unknown_memory_leave_the_cause_in_doubt(tmp_path: Path) -> None:
    """D-33 on AMD: 6 GB/s may be the link, or memory that is not pinned."""
    b = KinetoBuilder(devices=[MI300X])
    at = 0.0
    for step in range(60):
        b.call(at, 10, "hipMemcpyAsync", corr=50_000 + step)
        place = {"device": 0, "stream": 7, "correlation": 50_000 + step, "bytes": 6_000_000}
        b.add("gpu_memcpy", "Memcpy HtoD (Host -> Device)", at + 20, 1_000, pid=0, tid=7, **place)
        b.launch(at + 12, 5, at + 1_020, 600, "Cijk_Alik_Bljk_BBS", api="hipLaunchKernel")
        at += 1_625
    d = of_kineto(b, tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("pcie-limited", "volume")
    assert d.verdict.confidence <= 0.7
    assert "pageable memory was not recorded" in d.verdict.sentence


# --- D-18: retries where nobody recorded what calls returned ---------------------------------------------------------


def allocating(frees: int, waits: bool) -> KinetoBuilder:
    """Steps of 10 ms; in six of 60 an allocation, a wait, frees, and an allocation again."""
    b = KinetoBuilder()
    at = 0.0
    for step in range(60):
        if step % 10 == 5:
            b.call(at, 100, "cudaMalloc", corr=70_000)
            at += 100
            if waits:
                b.call(at, 4_000, "cudaDeviceSynchronize", corr=70_001)
                at += 4_000
            for _ in range(frees):
                b.call(at, 300, "cudaFree", corr=70_002)
                at += 300
            b.call(at, 200, "cudaMalloc", corr=70_003)
            at += 200
        for k in range(10):
            b.launch(at + k * 10, 5, at + 10 + k * 980, 980, GEMM)
        b.call(at + 150, 9_670, "cudaStreamSynchronize", corr=80_000 + step)
        at += 9_850
    return b


@pytest.mark.parametrize(("frees", "waits"), [(35, True), (2, True), (8, False)])
def test_allocations_with_nothing_but_frees_between_are_retries(tmp_path: Path, frees: int, waits: bool) -> None:
    """D-18 in a PyTorch trace."""
    d = of_kineto(allocating(frees, waits), tmp_path)
    found = finding(d, "allocator-churn")
    assert evidence(found)["allocator_retry_count"] == 6
    assert found.cost.value == pytest.approx(6 * (300 + 4_000 * waits + 300 * frees) * US, rel=0.02)
    assert "expandable_segments" in remedy_text(found)
    assert "sync-per-step" not in rules(d)


def test_one_buffer_exchanged_for_another_is_no_retry(tmp_path: Path) -> None:
    d = of_kineto(allocating(1, False), tmp_path)
    # that there was none is not proven, either
    assert measure(d, "allocator_retry_count") is None


# --- D-21: compiling that the recording does not show -----------------------------------------------------------------


def test_pauses_before_a_new_kernel_are_no_garbage_collection(tmp_path: Path) -> None:
    """D-21 in a PyTorch trace: module loads are not there, the first use of the kernel is."""
    b = KinetoBuilder()
    at = 0.0
    for step in range(300):
        for k in range(6):
            name = "_fused_moe_kernel_0d1d2de" if k == 3 else GEMM
            if step in (120, 240) and k == 3:
                name += f"3c{step}"
                at += 628_000
            b.launch(at, 5, at + 15, 985, name)
            at += 1_000
        b.call(at, 20, "cudaStreamSynchronize", corr=90_000 + step)
        at += 165
    d = of_kineto(b, tmp_path)
    found = finding(d, "host-pauses")
    assert evidence(found)["host_pause_new_kernel_count"] == 2
    notes = " ".join(found.notes)
    assert "first launch of a kernel" in notes and "is a candidate. gc.callbacks" not in notes


# --- D-31: one rank's trace alone -------------------------------------------------------------------------------------


def one_rank(long_ones: tuple[int, ...], long_us: int) -> KinetoBuilder:
    b = KinetoBuilder()
    at = 0.0
    for step in range(300):
        b.launch(at, 5, at + 10, 8_000, GEMM)
        reduce = long_us if step in long_ones else 1_000
        b.launch(at + 10, 5, at + 8_010, reduce, ALL_REDUCE, stream=20)
        b.call(at + 20, 8_000 + reduce, "cudaStreamSynchronize", corr=90_000 + step)
        at += 8_060 + reduce
    return b


def test_single_collectives_of_a_quarter_second_wait_for_another_rank(tmp_path: Path) -> None:
    """D-31: the trace of a rank that waits says so by itself."""
    d = of_kineto(one_rank((100, 200), 241_000), tmp_path)
    assert measure(d, "comm_outlier_count") == 2
    assert measure(d, "comm_outlier_ns") == 2 * 240 * MS
    assert "waiting for another rank" in d.verdict.sentence
    found = finding(d, "exposed-communication")
    assert found.confidence <= 0.6
    assert any("no link does that" in note for note in found.notes)


def test_a_row_of_long_collectives_moves_more(tmp_path: Path) -> None:
    """A prompt's collectives are larger, one after the other."""
    d = of_kineto(one_rank(tuple(range(100, 110)), 25_000), tmp_path)
    assert measure(d, "comm_outlier_count") == 0


# --- D-28, D-35: steps and sampling under other names ------------------------------------------------------------------


def steps_of(attention: tuple[str, str], products: tuple[str, str], in_each: bool = False) -> TraceBuilder:
    """Two long steps and 32 short ones after each; ``in_each``: both kernels of attention run in every step."""
    b, run = queued()
    for turn in range(66):
        decode = turn % 33 > 0
        run(10 * US, "embedding_kernel")
        for layer in range(16):
            run(300 * US if decode else 9 * MS, products[decode])
            run(60 * US if decode else 3 * MS, attention[(decode + layer) % 2 if in_each else decode])
            run(15 * US if decode else 600 * US, "rms_norm_kernel")
        run(20 * US, "argmax_kernel")
    return b


@pytest.mark.parametrize(
    ("attention", "products"),
    [
        (("void flash::flash_fwd_kernel<T>(P)", "void flash::flash_fwd_splitkv_kernel<T>(P)"), (GEMM, GEMM)),
        (
            ("void flash_attn_ext_f16<128>(char const*)", "void flash_attn_vec_ext_f16<128>(char const*)"),
            ("void mul_mat_q<(ggml_type)12, 64>(char const*)", "void mul_mat_vec_q<(ggml_type)12, 1>(void const*)"),
        ),
        (("kernel_unified_attention_2d", "kernel_unified_attention_3d"), (GEMM, GEMM)),
    ],
    ids=["flash", "llama.cpp", "triton"],
)
def test_a_prompt_is_told_from_decode_by_which_attention_ran(
    tmp_path: Path, attention: tuple[str, str], products: tuple[str, str]
) -> None:
    """D-28."""
    d = diagnose(steps_of(attention, products), tmp_path)
    counts = {phase["name"]: phase["count"] for phase in d.phases}
    assert counts == {"prefill": 2, "decode": 64}


def test_a_model_of_pictures_has_no_prefill(tmp_path: Path) -> None:
    """Self and cross attention run in every step: neither is a phase."""
    names = ("void flash::flash_fwd_kernel<T>(P)", "void flash::flash_fwd_splitkv_kernel<T>(P)")
    d = diagnose(steps_of(names, (GEMM, GEMM), in_each=True), tmp_path)
    assert not {"prefill", "decode"} & {phase["name"] for phase in d.phases}


@pytest.mark.parametrize(
    "sampler", ["void flashinfer::sampling::TopKTopPSamplingFromProbKernel<T>(P)", "_topk_topp_kernel"]
)
def test_work_before_sampling_is_the_hosts_even_behind_a_wait(tmp_path: Path, sampler: str) -> None:
    """D-35: the host's part is the shorter one, and still no wait to remove."""
    b = TraceBuilder()
    b.gpu()
    at = S
    for _ in range(50):
        for k in range(20):
            b.launch(
                at + k * 8 * US, 5 * US, at + 20 * US + k * 500 * US, 500 * US, GEMM if k % 2 else "flash_fwd_kernel"
            )
        done = at + 10_020 * US
        b.api(at + 180 * US, done + 3 * US, SYNC)
        ready = done + 5_003 * US
        b.launch(ready, 2 * US, ready + 10 * US, 130 * US, sampler)
        b.copy(ready + 10 * US, 300 * US, ready + 140 * US, 3 * US, kind="d2h", bytes=160, dst="pageable")
        at = ready + 350 * US
    d = diagnose(b, tmp_path)
    assert (d.verdict.cls, d.verdict.cause) == ("scheduling-bubble", "host-work")
    assert d.findings[0].rule == "host-sampling"
    assert d.findings[0].cost.value == pytest.approx(50 * 5 * MS, rel=0.02)
    assert "sync-per-step" not in rules(d)


def test_a_launching_thread_beside_many_others_is_judged_by_itself(tmp_path: Path) -> None:
    """D-06 (a) among helpers that sleep, poll and query events: the GPU is busy, and nobody limits it."""
    b = TraceBuilder()
    b.gpu()
    launcher = b.process(200, "VLLM::Worker").thread()
    for step in range(40):
        t0 = S + step * 10 * MS
        for k in range(10):
            b.launch(t0 + k * 10 * US, 5 * US, t0 + 10 * US + k * 970 * US, 970 * US, GEMM, thread=launcher)
        for turn in range(90):
            b.api(t0 + (110 + turn * 100) * US, t0 + (112 + turn * 100) * US, "cudaEventQuery_v3020", thread=launcher)
        b.osrt(t0, t0 + 9 * MS, "pthread_cond_wait", thread=launcher.process.thread(777, "pt_autograd_0"))
        b.osrt(t0, t0 + 20 * US, "epoll_wait", thread=b.process(901, "tokenizer").thread())
    d = diagnose(b, tmp_path)
    assert d.verdict.cls == "gpu-busy"
    assert not [f.rule for f in d.findings if f.severity != "info"]
    assert "shared-gpu" not in problem_codes(d)
