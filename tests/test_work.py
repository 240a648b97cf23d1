"""Counted work: which operator a kernel belongs to, and what may be said of a limiter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conftest import SHARED
from infprof.diagnosis import Options, analyze
from infprof.hardware import Match, Peaks, find
from infprof.measures import intervals as iv
from infprof.measures.operations import Prepared
from infprof.measures.work import RoofLimits, ScopeWork, add_engine_work, add_work, count_work, scope_work, work_table
from infprof.measures.work.nesting import innermost_rows
from infprof.readers import read
from infprof.resources import rules_dir
from infprof.results import Diagnosis, Measures, Verdict
from infprof.rules import load
from infprof.rules.thresholds import load_thresholds
from infprof.trace import (
    SCHEMA,
    Device,
    OperatorInputs,
    Process,
    Stream,
    StringTable,
    Table,
    Thread,
    Trace,
    TraceProvenance,
)
from infprof.verdict import counted_limiter
from test_work_formulas import BF16, FLOAT, inputs

H100 = "NVIDIA H100 80GB HBM3"
GEMM_KERNEL = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas"
LIMITS = RoofLimits(0.6, 0.4, 5_000)
US = 1_000


# Which operator a kernel belongs to


def test_innermost_interval_around_a_moment_in_nested_ones_of_two_threads() -> None:
    #            0: 0-100          1: 10-50    2: 20-30   3: 60-90   4: other thread
    start, end = np.array([0, 10, 20, 60, 0]), np.array([100, 50, 30, 90, 100])
    thread = np.array([0, 0, 0, 0, 1])
    times = np.array([5, 10, 25, 30, 40, 55, 60, 90, 100, 25])
    asked = np.array([0, 0, 0, 0, 0, 0, 0, 0, 0, 1])
    found, parent = innermost_rows(start, end, thread, times, asked)
    assert found.tolist() == [0, 1, 2, 1, 1, 0, 3, 0, -1, 4]
    assert parent.tolist() == [-1, 0, 1, 0, -1]


def test_innermost_interval_against_a_search_of_all() -> None:
    random = np.random.default_rng(3)
    spans = [(0, 10_000)]
    for _ in range(300):
        low, high = spans[random.integers(len(spans))]
        a, b = sorted(random.integers(low, high + 1, 2).tolist())
        # Nested or apart from each that is there.
        if a < b and all(b <= s or a >= e or (s <= a and b <= e) or (a <= s and e <= b) for s, e in spans):
            spans.append((a, b))
    start, end = (np.array(column) for column in zip(*spans, strict=True))
    times = random.integers(-10, 10_010, 500)
    zeros = np.zeros(len(spans), dtype=np.int64)
    found, _ = innermost_rows(start, end, zeros, times, np.zeros(len(times), dtype=np.int64))
    for time, row in zip(times.tolist(), found.tolist(), strict=True):
        around = [e - s for s, e in spans if s <= time < e]
        assert (min(around) if around else None) == (end[row] - start[row] if row >= 0 else None)


class Builder:
    """A trace of one thread: operators, and kernels launched inside or outside them, one after the other."""

    def __init__(self, device: str | None = H100) -> None:
        self.strings = StringTable()
        self.device = Device(0, device)
        self.rows: dict[str, list[tuple[int, ...]]] = {"kernels": [], "api_calls": [], "operators": [], "ranges": []}
        self.inputs: list[OperatorInputs] = []
        self.host, self.gpu, self.correlation = 0, 0, 0

    def operator(
        self, name: str, *given: Any, kernels: int | tuple[int, ...] = (), kernel: str = GEMM_KERNEL
    ) -> Builder:
        """An operator of 100 µs that launches kernels of these lengths, ns; ``given`` may end with an inner operator."""
        start = self.host
        row = len(self.rows["operators"])
        self.rows["operators"].append(())
        self.inputs.append(inputs(*given))
        number = len(self.inputs) - 1
        self.host += US
        for length in (kernels,) if isinstance(kernels, int) else kernels:
            self.launch(length, kernel)
        self.rows["operators"][row] = (start, self.host, 0, self.strings.add(name), number)
        self.host += US
        return self

    def launch(self, length: int, kernel: str = GEMM_KERNEL, call: str = "cudaLaunchKernel", count: int = 1) -> Builder:
        self.correlation += 1
        self.rows["api_calls"].append((self.host, self.host + 500, 0, 0, self.correlation, self.strings.add(call), 0))
        self.host += US
        for _ in range(count):
            start = max(self.gpu, self.host)
            self.gpu = start + length
            name = self.strings.add(kernel)
            self.rows["kernels"].append((start, self.gpu, 0, 0, 0, self.correlation, name, 264, 128, -1))
        return self

    def capture(self) -> Builder:
        """A launch that is recorded into a graph: no kernel."""
        self.correlation += 1
        self.rows["api_calls"].append(
            (self.host, self.host + 500, 0, 0, self.correlation, self.strings.add("cudaLaunchKernel"), 0)
        )
        self.host += US
        return self

    def trace(self) -> Trace:
        trace = Trace(
            self.strings.values,
            [self.device],
            [Process(1)],
            [Thread(0, 1)],
            [Stream(0, 0, 0, 7)],
            TraceProvenance("kineto", None, ["built"]),
            inputs=self.inputs,
        )
        for name, rows in self.rows.items():
            columns = np.array(rows, dtype=np.int64).reshape(-1, len(SCHEMA[name]))
            setattr(trace, name, Table(name, {c: columns[:, i].copy() for i, c in enumerate(SCHEMA[name])}))
        return trace

    def work(self) -> ScopeWork:
        prepared = Prepared(self.trace())
        counted = count_work(prepared)
        assert counted is not None
        ops = prepared.operations
        window = iv.single(int(ops.start.min()), int(ops.end.max()))
        return scope_work(prepared, counted, ops.device == 0, window, find(self.device.name).peaks)

    def measures(self) -> Measures:
        measures = Measures()
        match = find(self.device.name)
        add_work(measures, self.work(), match, LIMITS)
        return measures

    def diagnose(self) -> Diagnosis:
        return analyze(self.trace(), load([rules_dir()]), Options(window="full"))


def gemm(m: int, k: int, n: int, kind: str = BF16) -> list[tuple[tuple[int, int], str]]:
    return [((m, k), kind), ((k, n), kind)]


MM_FLOP = 2 * 4096**3


def test_work_counts_once_however_many_kernels_a_call_launches() -> None:
    built = Builder().operator("aten::mm", *gemm(4096, 4096, 4096), kernels=(150 * US, 50 * US))
    measures = built.measures()
    assert measures.value("work_flop") == pytest.approx(MM_FLOP)
    assert measures.value("work_flop_per_s") == pytest.approx(MM_FLOP / 200e-6)
    assert measures.value("work_covered_ratio") == 1
    found = measures.get("work_flop")
    assert found is not None and found.rank == "B"


def test_a_wrapper_with_a_formula_does_not_count_the_inner_product_again() -> None:
    built = Builder()
    built.operator("aten::linear", ((4096, 4096), BF16), ((4096, 4096), BF16), kernels=100 * US)
    # The inner product begins after the wrapper's own kernel and ends inside it.
    outer = built.rows["operators"].pop()
    built.host = outer[1]
    built.operator("aten::mm", *gemm(4096, 4096, 4096), kernels=100 * US)
    built.rows["operators"].append((outer[0], built.host, *outer[2:]))
    assert built.measures().value("work_flop") == pytest.approx(MM_FLOP)
    assert built.measures().value("work_covered_ratio") == 1


def test_attention_made_of_products_does_not_count_them_again() -> None:
    built = Builder()
    qkv = [((1, 8, 1024, 64), BF16)] * 3
    built.operator("aten::scaled_dot_product_attention", *qkv, "", "0.0", "False", kernels=5 * US, kernel="tril_kernel")
    outer = built.rows["operators"].pop()
    built.host = outer[1]
    built.operator("aten::bmm", ((8, 1024, 64), BF16), ((8, 64, 1024), BF16), kernels=95 * US)
    built.rows["operators"].append((outer[0], built.host, *outer[2:]))
    measures = built.measures()
    assert measures.value("work_flop") == 2 * 8 * 1024 * 64 * 1024
    assert measures.value("work_covered_ratio") == pytest.approx(0.95)


def test_only_what_lies_in_the_scope_counts() -> None:
    built = Builder().operator("aten::mm", *gemm(4096, 4096, 4096), kernels=200 * US)
    prepared = Prepared(built.trace())
    counted = count_work(prepared)
    assert counted is not None
    ops = prepared.operations
    half = iv.single(int(ops.start[0]), int(ops.start[0]) + 100 * US)
    found = scope_work(prepared, counted, ops.device == 0, half, find(H100).peaks)
    assert found.flop.sum() == pytest.approx(MM_FLOP / 2)


def test_graph_replays_and_captures_have_no_counted_work() -> None:
    built = Builder().operator("aten::mm", *gemm(4096, 4096, 4096), kernels=10 * US)
    start = built.host
    built.capture()
    built.rows["operators"].append((start, built.host, 0, built.strings.add("aten::mm"), 0))
    replay = built.host
    built.launch(90 * US, call="cudaGraphLaunch")
    built.rows["operators"].append((replay, built.host, 0, built.strings.add("aten::mm"), 0))
    measures = built.measures()
    assert measures.value("work_flop") == pytest.approx(MM_FLOP)
    assert measures.value("work_covered_ratio") == pytest.approx(0.1)
    covered = measures.get("work_covered_ratio")
    assert covered is not None and "90 % of kernel time: it ran inside a replayed graph" in covered.source


def test_paged_attention_takes_its_work_from_the_step_around_it() -> None:
    built = Builder()
    built.operator("vllm::unified_attention_with_output", *[((32, 64, 128), BF16)] * 4, kernels=100 * US)
    assert built.measures().value("work_flop") is None
    text = "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)"
    built.rows["ranges"].append((0, built.host, 0, built.strings.add(text), 0, -1))
    assert built.measures().value("work_flop") == 4 * 64 * 128 * 55086
    # Layers with a sliding window do less, so it proves no limit.
    assert built.measures().value("work_compute_min_ratio") == 0


def test_fp32_products_may_be_tf32_unless_the_kernel_says() -> None:
    def table(kernel: str) -> Any:
        built = Builder().operator("aten::mm", *gemm(4096, 4096, 4096, FLOAT), kernels=3000 * US, kernel=kernel)
        return work_table(built.work(), 0, 0.6)[-1]

    assert table("ampere_sgemm_128x64_nn").precision == "fp32"
    assert table("cutlass_80_tensorop_s1688gemm_128x128").precision == "tf32"
    assert table("gemm_of_someone").precision == "fp32 or tf32"


def test_winograd_proves_no_limit() -> None:
    given = [
        ((32, 64, 56, 56), FLOAT),
        ((64, 64, 3, 3), FLOAT),
        "",
        "[1, 1]",
        "[1, 1]",
        "[1, 1]",
        "False",
        "[0, 0]",
        "1",
    ]
    built = Builder().operator("aten::convolution", *given, kernels=60 * US, kernel="winograd_fwd_conv")
    assert work_table(built.work(), 0, 0.6)[0].flop_is_bound
    assert built.measures().value("work_compute_min_ratio") == 0


# What may be said of a limiter


def busy(*operators: tuple[str, list[Any], int], device: str | None = H100, times: int = 60) -> Verdict:
    """The verdict of a busy GPU whose operators come over and over."""
    built = Builder(device)
    for _ in range(times):
        for name, given, length in operators:
            if name == "graph":
                built.launch(length, call="cudaGraphLaunch")
            else:
                built.operator(name, *given, kernels=length)
    return built.diagnose().verdict


# At 85 % of the H100's 989.4 TFLOP/s this product takes 163 µs; this addition moves 805 MB in 280 µs: 86 % of 3.35 TB/s.
PRODUCT = ("aten::mm", gemm(4096, 4096, 4096), 163 * US)
ADDITION = ("aten::add", [((16384, 8192), BF16), ((16384, 8192), BF16), "1"], 280 * US)
# Weights of 134 MB for one row, in 48 µs: 83 %.
DECODE = ("aten::mm", gemm(8, 8192, 8192), 48 * US)


def test_products_near_the_peak_are_compute_bound() -> None:
    verdict = busy(PRODUCT)
    assert (verdict.cls, verdict.rank) == ("compute-bound", "B")
    assert "85." in verdict.sentence


@pytest.mark.parametrize("operator", [ADDITION, DECODE])
def test_what_moves_memory_near_its_peak_is_bandwidth_bound(operator: Any) -> None:
    verdict = busy(operator)
    assert (verdict.cls, verdict.rank) == ("bandwidth-bound", "B")


def test_both_by_turns_are_balanced() -> None:
    verdict = busy(PRODUCT, PRODUCT, ADDITION, times=40)
    assert (verdict.cls, verdict.rank) == ("balanced", "B")


def test_small_activations_may_come_from_the_cache_and_prove_nothing() -> None:
    # 25 MB in 9 µs: 83 % of DRAM's peak, or a walk through a cache of 50 MB.
    verdict = busy(("aten::add", [((4096, 1024), BF16), ((4096, 1024), BF16), "1"], 9 * US), times=400)
    assert (verdict.cls, verdict.rank) == ("gpu-busy", "C")


def test_too_little_counted_names_no_limiter_and_says_what_is_missing() -> None:
    verdict = busy(PRODUCT, ("graph", [], 250 * US))
    assert verdict.cls == "gpu-busy"
    assert verdict.why_not is not None and "it ran inside a replayed graph" in verdict.why_not


def test_what_was_not_counted_could_turn_the_answer() -> None:
    # 70 % of the time is counted and near the arithmetic peak; the rest may be anything, but not more than itself.
    assert busy(PRODUCT, ("graph", [], 20 * US)).cls == "compute-bound"
    assert busy(PRODUCT, ("graph", [], 90 * US)).cls == "gpu-busy"
    # Of the time beside the addition 39 % could be arithmetic at its peak.
    assert busy(ADDITION, ("graph", [], 100 * US)).cls == "bandwidth-bound"
    assert busy(ADDITION, ("graph", [], 180 * US)).cls == "gpu-busy"


def test_the_share_that_must_be_counted_is_a_threshold() -> None:
    thresholds = load_thresholds([rules_dir()])
    measures = Measures()
    for name, value in {
        "work_covered_ratio": thresholds.work_covered,
        "work_compute_min_ratio": 0.55,
        "work_compute_max_ratio": 0.9,
        "work_compute_covered_ratio": 0.92,
        "work_dram_min_ratio": 0.05,
        "work_dram_max_ratio": 0.39,
        "work_dram_covered_ratio": 0.08,
    }.items():
        measures.add(name, value, "ratio", "B")
    verdict = counted_limiter(measures, thresholds)
    assert verdict is not None and verdict.cls == "compute-bound"
    measures.add("work_covered_ratio", thresholds.work_covered - 0.01, "ratio", "B")
    assert counted_limiter(measures, thresholds) is None


def test_far_from_both_roofs_is_not_called_latency_bound() -> None:
    verdict = busy(("aten::mm", gemm(512, 512, 512), 100 * US), times=100)
    assert verdict.cls == "gpu-busy"
    assert verdict.why_not is not None and "no clear limit" in verdict.why_not


def test_more_than_the_device_can_do_claims_nothing() -> None:
    verdict = busy(("aten::mm", gemm(4096, 4096, 4096), 100 * US))
    assert verdict.cls == "gpu-busy"
    assert verdict.why_not is not None and "exceeds what this device can compute" in verdict.why_not


def test_an_unknown_device_claims_nothing() -> None:
    verdict = busy(PRODUCT, device="NVIDIA Z9")
    assert verdict.cls == "gpu-busy"
    assert verdict.why_not is not None and "peak unknown" in verdict.why_not
    assert counted_limiter(Measures(), load_thresholds([rules_dir()])) is None


def test_slow_products_are_a_finding_and_fast_ones_are_not() -> None:
    def rules_of(length: int) -> set[str]:
        built = Builder()
        for _ in range(100):
            built.operator("aten::mm", *gemm(4096, 4096, 4096), kernels=length)
        return {f.rule for f in built.diagnose().findings}

    assert "gemm-far-from-roof" in rules_of(600 * US)
    assert "gemm-far-from-roof" not in rules_of(163 * US)


def test_no_operators_and_no_shapes_are_told_apart() -> None:
    built = Builder().operator("aten::mm", *gemm(4096, 4096, 4096), kernels=100 * US)
    for _ in range(100):
        built.launch(100 * US)
    trace = built.trace()
    trace.inputs = []
    shapeless = analyze(trace, load([rules_dir()]), Options(window="full"))
    assert "record_shapes=True" in (shapeless.verdict.why_not or "")
    trace.operators = None
    source = {m.name: m.source for m in analyze(trace, load([rules_dir()]), Options(window="full")).measures}
    assert "no operators" in source["work_flop"]


def test_the_work_table_adds_up_to_the_kernel_time() -> None:
    built = Builder()
    for name, given, length in (PRODUCT, ADDITION, DECODE):
        built.operator(name, *given, kernels=length)
    built.launch(50 * US)
    rows = built.diagnose().work_table
    classes = [r for r in rows if r.operator is None]
    assert sum(r.share for r in classes) == pytest.approx(1)
    assert {r.kind for r in classes} == {"gemm", "elementwise", "not counted"}
    missing = next(r for r in classes if r.kind == "not counted")
    assert (missing.flop, missing.bytes, missing.reason) == (None, None, "no operator with a formula")
    by_operator = {r.operator: r for r in rows if r.operator}
    assert by_operator["aten::add"].limiter == "bandwidth" and by_operator["aten::mm"].calls == 2


def test_mfu_and_mbu_are_of_the_whole_window() -> None:
    built = Builder().operator("aten::mm", *gemm(4096, 4096, 4096), kernels=100 * US)
    built.host = built.gpu + 100 * US
    built.launch(0).launch(100 * US)
    measures = built.measures()
    peaks = find(H100).peaks
    assert isinstance(peaks, Peaks)
    window = built.work().scope.total() / 1e9
    assert measures.value("mfu_ratio") == pytest.approx(MM_FLOP / (peaks.flop_per_s["bf16"] * window))
    assert measures.value("mbu_ratio") == pytest.approx(3 * 2 * 4096**2 / (peaks.dram_bytes_per_s * window))
    unknown = Measures()
    add_work(unknown, built.work(), Match(None, "no such device"), LIMITS)
    assert unknown.value("work_flop") is not None


def test_an_engines_own_counters_stand_in_where_there_are_no_shapes() -> None:
    measures = Measures()
    measures.add("engine_dram_bytes_per_s", 1.676e12, "bytes_per_s", "B")
    measures.add("engine_flop_per_s", 98.94e12, "per_s", "B")
    add_engine_work(measures, find(H100).peaks)
    assert measures.value("mbu_ratio") == pytest.approx(0.5)
    assert measures.value("mfu_ratio") == pytest.approx(0.1)
    mfu = measures.get("mfu_ratio")
    assert mfu is not None and mfu.rank == "B" and "if it multiplies in 16 bits" in mfu.source
    counted = Builder().operator("aten::mm", *gemm(4096, 4096, 4096), kernels=100 * US).measures()
    before = counted.value("mbu_ratio")
    counted.add("engine_dram_bytes_per_s", 1.676e12, "bytes_per_s", "B")
    add_engine_work(counted, find(H100).peaks)
    assert counted.value("mbu_ratio") == before


# Real traces

KINETO = SHARED / "traces" / "kineto"
with_real = pytest.mark.skipif(not KINETO.is_dir(), reason="needs the shared traces, which a clone does not have")


def real_rows(file: str) -> dict[str, Any]:
    trace = read(KINETO / file)
    diagnosis = analyze(trace, load([rules_dir()]), Options(window="full"))
    return {r.operator: r for r in diagnosis.work_table if r.operator}


@with_real
def test_an_h100_reaches_the_rates_that_were_counted_by_hand() -> None:
    rows = real_rows("h100_qwen1.5-0.5b.json.gz")
    assert rows["aten::mm"].flop_per_s == pytest.approx(632e12, rel=0.01)
    assert rows["aten::addmm"].flop_per_s == pytest.approx(596e12, rel=0.01)
    assert rows["aten::_flash_attention_forward"].flop_per_s == pytest.approx(90e12, rel=0.01)


@with_real
@pytest.mark.parametrize("file", sorted(p.name for p in KINETO.glob("*.json.gz")) if KINETO.is_dir() else [])
def test_no_real_trace_computes_faster_than_its_device_can(file: str) -> None:
    for operator, row in real_rows(file).items():
        assert row.compute_ratio is None or row.flop_is_bound or row.compute_ratio <= 1, operator
