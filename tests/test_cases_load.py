"""Real cases of load, phases and the machine: waves of requests, rests, late compiles, collectives over PCIe, full memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from case_builders import (
    MS,
    US,
    S,
    diagnose,
    evidence,
    finding,
    idle,
    measure,
    problem,
    problem_codes,
    queued,
    remedy_text,
    rules,
)
from infprof.diagnosis import Options, analyze_file
from infprof.results import Diagnosis
from infprof.simulator.builder import TraceBuilder
from test_bundle import EPOCH, Run

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, ulong, ncclWork*)"
SYNC = "cudaStreamSynchronize_v3020"
UUID = "00000000-0000-4000-8000-000000000000"
GPU = f"gpu/GPU-{UUID}"


def by_phase(diagnosis: Diagnosis) -> dict[str, dict[str, object]]:
    return {phase["name"]: phase for phase in diagnosis.phases}


def of_phase(diagnosis: Diagnosis, phase: str, name: str) -> float:
    values = [m.value for m in diagnosis.measures if m.scope.kind == "phase" and m.scope.id == phase and m.name == name]
    assert len(values) == 1 and values[0] is not None, (phase, name, values)
    return float(values[0])


# --- D-07: small collectives over PCIe ------------------------------------------------------------------------------


def tensor_parallel(collective_ns: int, per_layer: int, ranks: int = 4) -> TraceBuilder:
    """Ten steps of 64 layers on ranks that arrive within 3 µs: 6 ms of computing, and collectives behind each part."""
    b = TraceBuilder()
    for rank in range(ranks):
        b.gpu("NVIDIA A40", index=rank, sm_count=84, memory_bytes=48_305_799_168)
    parts = 64 * per_layer
    compute = 6 * MS // parts
    length = 6 * MS + parts * collective_ns + 200 * US
    for rank in range(ranks):
        thread = b.process(200 + rank, f"VLLM::Worker_TP{rank}").thread()
        for step in range(10):
            at = S + step * length
            nodes = []
            for _ in range(parts):
                nodes.append((at, at + compute, GEMM))
                at += compute
                nodes.append((at + rank * 700, at + collective_ns, ALL_REDUCE))
                at += collective_ns
            b.graph_launch(S + step * length - 300 * US, 200 * US, nodes, thread=thread, device=rank)
    return b


def test_many_small_collectives_are_a_matter_of_their_number(tmp_path: Path) -> None:
    """D-07."""
    d = diagnose(tensor_parallel(45 * US, per_layer=2), tmp_path)
    assert d.verdict.cls == "communication-bound"
    assert d.verdict.cause != "straggler"
    assert measure(d, "exposed_comm_ratio", device=0) == pytest.approx(0.49, abs=0.01)
    found = finding(d, "exposed-communication")
    assert evidence(found)["comm_p50_ns"] == pytest.approx(45 * US, rel=0.1)
    assert any("fixed cost of each call" in note and "faster link hardly" in note for note in found.notes)
    text = remedy_text(found)
    assert "--tensor-parallel-size" in text and "--pipeline-parallel-size" in text
    assert "one-shot all-reduce over PCIe" in text
    assert "straggler-rank" not in rules(d)


def test_large_collectives_are_no_matter_of_their_number(tmp_path: Path) -> None:
    d = diagnose(tensor_parallel(4 * MS, per_layer=1, ranks=2), tmp_path)
    assert not any("fixed cost" in note for note in finding(d, "exposed-communication").notes)


# --- D-19: slow after a rest ----------------------------------------------------------------------------------------


def rested(slow: float, rests: int = 10) -> TraceBuilder:
    """Requests 12 s apart, then 50 back to back; behind a rest kernels take ``slow`` times as long, for 400 ms less so."""
    b = TraceBuilder()
    b.gpu(uuid=UUID)
    at = S

    def request(behind_a_rest: bool) -> None:
        nonlocal at
        begin = gpu = at
        for step in range(30):
            left = max(0.0, 1 - (gpu - begin) / (400 * MS))
            factor = 1 + (slow - 1) * left if behind_a_rest else 1.0
            for k in range(20):
                length = round(400 * US * factor)
                b.launch(begin + step * 200 * US + k * 8 * US, 5 * US, gpu + 10 * US, length, GEMM)
                gpu += length + 2 * US
        b.api(begin + 6 * MS, gpu + 20 * US, SYNC)
        at = gpu + 30 * US

    for n in range(rests):
        request(behind_a_rest=n > 0)
        b.osrt(at, at + 11 * S, "epoll_wait")
        at += 11 * S + 20 * US
    for n in range(50):
        request(behind_a_rest=n == 0)
    b.session(S, at, utc_epoch_ns=EPOCH - S)
    return b


def test_kernels_behind_a_rest_are_compared_with_the_same_elsewhere(tmp_path: Path) -> None:
    """D-19, without samples of the clocks."""
    d = diagnose(rested(3.0), tmp_path)
    found = finding(d, "clock-ramp")
    assert evidence(found)["rest_count"] == 10
    assert evidence(found)["after_rest_slowdown_ratio"] > 1.4
    assert found.confidence <= 0.6
    text = remedy_text(found)
    assert "nvidia-smi -lgc" in text and "nvidia-smi -pm 1" in text and "never rests" in text
    assert not {"throttled-thermal", "throttled-power", "module-load-in-window"} & set(rules(d))
    assert d.verdict.cls == "no-demand"


@pytest.mark.parametrize(("idle_mhz", "confirmed"), [(345, True), (1_950, False)])
def test_clocks_that_fall_while_idle_are_the_reason(tmp_path: Path, idle_mhz: int, confirmed: bool) -> None:
    """D-19, with the clocks: 345 MHz while idle."""
    run = Run(tmp_path / "bundle")
    run.gpu.fact("gpu_uuid", f"GPU-{UUID}", GPU)
    run.gpu.fact("gpu_sm_clock_max_mhz", 1_980, GPU)

    def works(second: float) -> bool:
        return second >= 112 or second % 11.25 < 1

    run.gauge(run.gpu, "sm_clock_mhz", lambda s: 1_980 if works(s) else idle_mhz, GPU, 125)
    run.gauge(run.gpu, "utilization_ratio", lambda s: 1.0 if works(s) else 0.0, GPU, 125)
    run.gauge(run.gpu, "clock_event_reasons", lambda s: 0 if works(s) else 1, GPU, 125)
    d = analyze_file(run.finish(rested(3.0), 125), Options(window="full"))
    found = finding(d, "clock-ramp")
    assert evidence(found)["sm_clock_idle_ratio"] == pytest.approx(idle_mhz / 1_980)
    assert any("no throttling" in note for note in found.notes) == confirmed
    assert (found.confidence >= 0.6) == confirmed
    assert d.verdict.cls != "throttled"


def test_a_server_that_rests_and_is_as_fast_as_ever_has_no_ramp(tmp_path: Path) -> None:
    d = diagnose(rested(1.0, rests=4), tmp_path)
    assert measure(d, "after_rest_slowdown_ratio") == pytest.approx(1.0, abs=0.01)
    assert "clock-ramp" not in rules(d)


# --- D-21: a compile in the middle ----------------------------------------------------------------------------------


def late_compiles(steps: int = 2_000, at_steps: tuple[int, ...] = (811, 1_530)) -> TraceBuilder:
    """Decode steps of 12 ms; in two of them a variant of a known kernel is compiled for 628 ms before its first launch."""
    b = TraceBuilder()
    b.gpu()
    at = S
    for step in range(steps):
        host, gpu = at, at + 15 * US
        for k in range(12):
            name = "flash_fwd_splitkv_kernel" if k == 7 else "_fused_moe_kernel_0d1d2de" if k == 3 else GEMM
            if step in at_steps and k == 3:
                name = f"_fused_moe_kernel_0d1d2de3c{at_steps.index(step)}"
                b.api(host + 623 * MS, host + 628 * MS, "cuModuleLoadDataEx")
                host += 628 * MS
                gpu = host + 15 * US
            b.launch(host, 5 * US, gpu, 985 * US, name)
            host, gpu = host + 10 * US, gpu + 985 * US
        b.api(host, gpu + 5 * US, SYNC)
        at = gpu + 165 * US
    return b


def test_late_compiles_are_found_by_the_slowest_steps(tmp_path: Path) -> None:
    """D-21."""
    d = diagnose(late_compiles(), tmp_path)
    found = finding(d, "module-load-in-window")
    assert found.cost.value == pytest.approx(2 * 625 * MS, rel=0.01)
    assert evidence(found)["new_kernel_stall_count"] == 2
    assert {w.name for w in found.where if w.end_ns - w.start_ns > 100 * MS} == {
        "_fused_moe_kernel_0d1d2de3c0",
        "_fused_moe_kernel_0d1d2de3c1",
    }
    # what a replay without loading wins is that time, too
    assert found.gain.high == pytest.approx(2 * 625 * MS / d.window.duration_ns, rel=0.02)
    assert d.steps is not None
    assert d.steps["p50_ns"] == pytest.approx(12 * MS, rel=0.01)
    slow = d.steps["slowest"][:2]
    assert all(step["duration_ns"] > 600 * MS for step in slow)
    assert all(step["gaps"][0]["cause"] == "module-load" for step in slow)
    assert all("0d1d2de3c" in str(step["gaps"][0]["before"]) for step in slow)
    assert not {"host-pauses", "host-work-between-steps", "preemption"} & set(rules(d))
    assert d.verdict.cls == "gpu-busy"


def test_rare_compiles_are_a_finding_however_long_the_run(tmp_path: Path) -> None:
    """D-21: the share of the window is small, and each costs every request of its batch half a second."""
    d = diagnose(late_compiles(1_200, (811,)), tmp_path)
    assert measure(d, "idle_module_load_ratio") < 0.05
    assert finding(d, "module-load-in-window").severity == "info"
    quiet = diagnose(late_compiles(300, ()), tmp_path)
    assert "module-load-in-window" not in rules(quiet)


# --- D-28, D-37: prefill and decode apart ---------------------------------------------------------------------------


def chunks_and_steps(ranges: bool = False) -> TraceBuilder:
    """Four chunks of a prompt, 820 ms each, and 128 decode steps of 25 ms, queued ahead, without a range."""
    b, run = queued()
    for _ in range(4):
        run(50 * US, "embedding_kernel")
        for _ in range(64):
            run(8_970 * US, "void cutlass_gemm_kernel<128, 256>")
            run(3_203 * US, "attn_prompt_kernel")
            run(640 * US, "rms_norm_kernel")
        run(20 * US, "argmax_kernel")
        for _ in range(32):
            run(5 * US, "embedding_kernel")
            for _ in range(64):
                run(312 * US, "gemv_q4_kernel")
                run(60 * US, "attn_decode_splitkv_kernel")
                run(15 * US, "rms_norm_kernel")
            run(20 * US, "argmax_kernel")
    return b


def test_a_prompt_does_not_drown_decode(tmp_path: Path) -> None:
    """D-28."""
    d = diagnose(chunks_and_steps(), tmp_path)
    phases = by_phase(d)
    assert phases["prefill"]["count"] == 4 and phases["decode"]["count"] == 128
    assert phases["prefill"]["total_ns"] == pytest.approx(3.28 * S, rel=0.01)
    assert phases["decode"]["total_ns"] == pytest.approx(3.20 * S, rel=0.01)
    prefill, decode = (of_phase(d, name, "gemm_ns") for name in ("prefill", "decode"))
    assert prefill / (3.28 * S) == pytest.approx(0.70, abs=0.01)
    # weights stream through matrix-vector kernels in decode, which are no matrix products
    assert decode == 0
    assert of_phase(d, "prefill", "attention_ns") / (3.28 * S) == pytest.approx(0.25, abs=0.01)
    assert all(phases[name]["verdict"] is not None for name in ("prefill", "decode"))


def with_adapters(adapters: bool) -> TraceBuilder:
    """Prefill steps, eager; decode steps, one graph each. With adapters 1 900 of 2 700 prefill kernels are tiny ones."""
    b = TraceBuilder()
    b.gpu()
    at = S
    for step in range(48):
        begin = at
        if step % 6 == 0:
            if adapters:
                for k in range(2_700):
                    tiny = k % 27 >= 8
                    name = ("lora_shrink_kernel", "lora_expand_kernel")[k % 2] if tiny else GEMM
                    call, lead, ns = (28 * US, 30 * US, 4_500) if tiny else (6 * US, 8 * US, 30_500)
                    b.launch(at, call, at + lead, ns, "flash_fwd_kernel" if k % 27 == 3 else name)
                    at += lead + ns + 2 * US
            else:
                for k in range(420):
                    name = "flash_fwd_kernel" if k % 14 == 3 else GEMM
                    b.launch(at + k * 8 * US, 5 * US, at + 900 * US + k * 57_200, 57_100, name)
                at += 25 * MS
            name = "execute_context_1(2048)_generation_0(0)"
        else:
            each = 100 * US if adapters else 90 * US
            names = ["flash_fwd_splitkv_kernel" if k % 10 == 3 else GEMM for k in range(100)]
            start = at + 15 * US
            b.graph_launch(at, 10 * US, [(start + k * each, start + (k + 1) * each, n) for k, n in enumerate(names)])
            at = start + 100 * each
            name = "execute_context_0(0)_generation_16(16)"
        b.api(at - 20 * US, at + 5 * US, SYNC)
        b.nvtx(begin, at, name)
        at += 100 * US
    return b


def test_adapters_make_prefill_launch_bound_and_leave_decode_alone(tmp_path: Path) -> None:
    """D-37; what differs from the run without adapters is a comparison's."""
    d = diagnose(with_adapters(True), tmp_path)
    phases = by_phase(d)
    verdict = phases["prefill"]["verdict"]
    assert isinstance(verdict, dict)
    assert (verdict.get("class", verdict.get("cls")), verdict["cause"]) == ("scheduling-bubble", "launch")
    assert of_phase(d, "prefill", "idle_ratio") == pytest.approx(0.65, abs=0.05)
    assert of_phase(d, "prefill", "small_kernel_ratio") > 0.65
    assert of_phase(d, "decode", "idle_ratio") < 0.03
    assert "--enforce-eager" in remedy_text(finding(d, "launch-bound"))
    tiny = sum(row.total_ns for row in d.kernel_table if row.name.startswith("lora_"))
    assert tiny / 8 == pytest.approx(1_900 * 4_500, rel=0.01)
    base = diagnose(with_adapters(False), tmp_path)
    verdict = by_phase(base)["prefill"]["verdict"]
    assert isinstance(verdict, dict) and verdict.get("class", verdict.get("cls")) == "gpu-busy"


# --- D-29: waves of requests ----------------------------------------------------------------------------------------


def waves(drain: bool = True) -> TraceBuilder:
    """Three waves of 6 s. Steps of 12 ms with 0.5 ms between them; at a wave's end, for 0.6 s, small ones far apart."""
    b = TraceBuilder()
    b.gpu()
    at = S
    for _ in range(3):
        end = at + 6 * S
        while at < end:
            last = drain and end - at < 600 * MS
            busy, between = (4 * MS, 8 * MS) if last else (12 * MS, 500 * US)
            for k in range(12):
                b.launch(at + k * 8 * US, 5 * US, at + 10 * US + k * (busy // 12), busy // 12, GEMM)
            b.api(at + 100 * US, at + 15 * US + busy, SYNC)
            at += 10 * US + busy + between
        b.osrt(at, at + 250 * MS, "epoll_wait")
        at = end + 250 * MS
    b.session(S, at, utc_epoch_ns=EPOCH - S)
    return b


def served_waves(folder: Path, running: bool = True) -> Diagnosis:
    run = Run(folder)
    for tick in range(750):
        now, within = EPOCH + tick * 25 * MS, tick % 250 * 0.025
        at_end = within - 5.4
        # 32 requests run, then fewer and fewer down to 3, then none
        count = 32 if at_end < 0 else 3 + 12 * max(0.0, 0.6 - at_end) / 0.6 if within < 6.0 else 0
        if running:
            run.engine.sample("running_requests", round(count), "engine/0", time_ns=now)
            run.engine.sample("waiting_requests", 0, "engine/0", time_ns=now)
    return analyze_file(run.finish(waves(), 19), Options(window="full"))


def test_idle_at_the_ends_of_waves_is_no_cost_of_the_host(tmp_path: Path) -> None:
    """D-29."""
    d = served_waves(tmp_path / "bundle")
    assert measure(d, "idle_ratio") > 0.08
    assert measure(d, "steady_idle_ratio") == pytest.approx(0.04, abs=0.006)
    assert measure(d, "ramp_ns") == pytest.approx(3 * 600 * MS, rel=0.15)
    # drains and pauses are no demand; what is left is the gap between steps
    assert idle(d, "no-demand") > 2 * 250 * MS + 3 * 0.5 * 600 * MS
    assert idle(d, "host-work", "sync") / d.window.duration_ns < 0.045
    said = problem(d, "waves").message
    assert "5.40-6.00 s" in said and "idle for 4." in said
    assert d.verdict.cls == "gpu-busy"
    assert not {"host-work-between-steps", "idle-while-waiting"} & set(rules(d))


def test_without_the_engines_gauges_nobody_knows_of_waves(tmp_path: Path) -> None:
    d = served_waves(tmp_path / "bundle", running=False)
    assert measure(d, "steady_idle_ratio") is None
    assert "waves" not in problem_codes(d)


def test_a_server_that_always_runs_few_requests_is_no_wave(tmp_path: Path) -> None:
    run = Run(tmp_path / "bundle")
    run.gauge(run.engine, "running_requests", lambda s: 3, "engine/0", 19)
    run.gauge(run.engine, "waiting_requests", lambda s: 0, "engine/0", 19)
    d = analyze_file(run.finish(waves(drain=False), 19), Options(window="full"))
    assert measure(d, "ramp_ns") == 0


# --- D-32: memory that spilt to the host ----------------------------------------------------------------------------


def spilt(folder: Path, used: float, rx_bytes_per_s: float, copies: bool) -> Diagnosis:
    """A GPU that is always busy, with all of its memory used and the link to the host full."""
    run = Run(folder)
    run.gpu.fact("gpu_uuid", f"GPU-{UUID}", GPU)
    for name, value in (
        ("gpu_memory_total_bytes", 12 << 30),
        ("gpu_sm_clock_max_mhz", 2_505),
        ("gpu_power_limit_watts", 200),
        ("pcie_link_max_generation", 3),
        ("pcie_link_max_width", 16),
    ):
        run.gpu.fact(name, value, GPU)
    for signal, value in (
        ("utilization_ratio", 1.0),
        ("memory_utilization_ratio", 0.02),
        ("memory_used_bytes", used * (12 << 30)),
        ("sm_clock_mhz", 2_505),
        ("power_watts", 56),
        ("pcie_rx_bytes_per_s", rx_bytes_per_s),
        ("pcie_tx_bytes_per_s", 2e8),
        ("pcie_link_generation", 3),
        ("pcie_link_width", 16),
    ):
        run.gauge(run.gpu, signal, lambda s, value=value: value, GPU, 10)  # type: ignore[misc]
    trace = TraceBuilder()
    trace.gpu("NVIDIA GeForce RTX 4070", uuid=UUID, sm_count=46, memory_bytes=12 << 30)
    for step in range(200):
        at = S + step * 50 * MS
        trace.launch(at - 20 * MS, 5 * US, at, 49_990 * US, "mul_mat_q4_K")
        if copies:
            trace.copy(at - 19 * MS, 5 * US, at, 45 * MS, bytes=575_000_000, stream=13)
    trace.session(S, 11 * S, utc_epoch_ns=EPOCH - S)
    return analyze_file(run.finish(trace, 10), Options(window="full"))


def test_a_full_memory_and_a_full_link_without_copies_are_a_spill(tmp_path: Path) -> None:
    """D-32."""
    d = spilt(tmp_path / "bundle", 11.9 / 12, 11.5e9, copies=False)
    found = finding(d, "memory-spill")
    assert found.severity == "warning"
    shown = evidence(found)
    assert shown["gpu_memory_used_peak_ratio"] == pytest.approx(0.992, abs=0.001)
    assert shown["pcie_rx_bytes_per_s"] == pytest.approx(11.5e9)
    assert shown["memory_utilization_mean_ratio"] == pytest.approx(0.02)
    assert any("no sign of work" in note for note in found.notes)
    assert "--n-gpu-layers" in remedy_text(found)
    # a utilisation of 100 % proves nothing
    assert d.verdict.cls == "gpu-busy"
    assert "compute-bound" not in d.verdict.cls


@pytest.mark.parametrize(("used", "rx", "copies"), [(0.99, 1e8, False), (0.99, 11.5e9, True), (0.6, 11.5e9, False)])
def test_full_memory_or_a_busy_link_alone_are_none(tmp_path: Path, used: float, rx: float, copies: bool) -> None:
    assert "memory-spill" not in rules(spilt(tmp_path / "bundle", used, rx, copies))


# --- D-23, D-33: what replays say of the cases ----------------------------------------------------------------------


def test_copies_that_overlap_leave_the_link_as_the_limit(tmp_path: Path) -> None:
    """D-33: 47.1 instead of 77.7 ms per token, and the link is what limits then."""
    b = TraceBuilder()
    b.gpu("NVIDIA A100-SXM4-80GB", sm_count=108, memory_bytes=85_198_045_184, compute=(8, 0))
    gpu, host = S, S - 10 * MS
    for _ in range(32):
        # everything is queued far ahead, on one stream
        b.copy(host, 10 * US, gpu, 47_100 * US, bytes=1_201_050_000)
        gpu, host = gpu + 47_100 * US, host + 20 * US
        for _ in range(30):
            b.launch(host, 5 * US, gpu, 1_020 * US, GEMM)
            gpu, host = gpu + 1_020 * US, host + 10 * US
    d = diagnose(b, tmp_path)
    assert d.whatif is not None
    first = d.whatif["chain"][0]
    assert first["fix"] == "copies=overlapped"
    assert first["gain_ratio"] == pytest.approx(30.6 / 77.7, abs=0.02)
    assert first["next_verdict"] == "pcie-limited"


def test_without_the_wait_a_mixed_step_is_shorter_by_its_gap(tmp_path: Path) -> None:
    """D-23: 2.1 ms for each of 32 mixed steps, and not the 9.8 ms of the wait."""
    from test_cases_diagnosis import waits_in_mixed_steps

    d = diagnose(waits_in_mixed_steps(2 * MS, SYNC), tmp_path)
    assert d.whatif is not None
    first = d.whatif["chain"][0]
    assert first["fix"] in ("sync=0", "host=0")
    won = first["gain_ratio"] * d.whatif["recorded_span_ns"]
    assert won == pytest.approx(32 * 2_100 * US, rel=0.05)
