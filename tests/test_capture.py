"""Kernels of replayed CUDA graphs get the operators of their capture or of an eager run, or none where it is not sure."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from typer.testing import CliRunner

from conftest import SHARED
from infprof.cli import app
from infprof.diagnosis import Options, analyze_file
from infprof.errors import UsageError
from infprof.measures.capture import CaptureLimits, GraphOperators, graph_operators
from infprof.measures.capture.aligning import Text, common_subsequence, exact_places
from infprof.measures.capture.matching import BY_NAME, BY_ORDER, BY_POSITION
from infprof.measures.capture.tokens import captured_size, captured_tokens, step_tokens
from infprof.measures.operations import Prepared
from infprof.readers import read
from infprof.results import Diagnosis
from infprof.simulator import parse_spec, simulate, write_kineto, write_nsys_sqlite
from infprof.trace import (
    Device,
    OperatorInputs,
    Process,
    Stream,
    StringTable,
    Table,
    Thread,
    Trace,
    TraceProvenance,
    constant,
)
from kineto_builder import KinetoBuilder

LIMITS = CaptureLimits(0.8, 0.4)
BF16 = "c10::BFloat16"
GEMM = "nvjet_tst_64x{}_64x12_4x1_v_bz_TNT"


class Kernel(NamedTuple):
    """A kernel of a model, with the operator that launches it; tokens are the first dimension of its input."""

    name: str
    operator: str
    width: int
    us: float = 5.0


def model(layers: int = 4, head: bool = True) -> list[Kernel]:
    """Layers of equal kernels, each product with a width of its own, between an embedding and a head."""
    layer = [
        Kernel("rms_norm_kernel", "_C::rms_norm", 64),
        Kernel(GEMM.format(16), "aten::mm", 65, 20),
        Kernel("rotary_embedding_kernel", "_C::rotary_embedding", 66),
        Kernel(GEMM.format(32), "aten::mm", 67, 20),
        Kernel("act_and_mul_kernel", "_C::silu_and_mul", 68),
    ]
    ends = [Kernel("embedding_kernel", "aten::embedding", 60)], [Kernel(GEMM.format(128), "aten::mm", 61, 40)]
    return [*ends[0], *layer * layers, *ends[1]] if head else layer * layers


class Run(KinetoBuilder):
    """A process that launches models eagerly, captures them, and replays graphs of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.host = self.gpu = 0.0

    def _operator(self, kernel: Kernel, tokens: int, call: str, named: bool = False) -> None:
        dims = {"Input Dims": [[tokens, kernel.width], [kernel.width, 32]], "Input type": [BF16, BF16]}
        self.add("cpu_op", kernel.operator, self.host, 8, **dims, **{"Concrete Inputs": ["", ""]})
        self.correlation += 1
        launch = self.call(self.host + 2, 3, call, self.correlation)
        if named:
            launch["args"]["kernel"] = kernel.name
        self.host += 10

    def _kernel(self, kernel: Kernel, tokens: int, grids: bool = True) -> None:
        self.gpu = max(self.gpu, self.host)
        size: dict[str, Any] = {"grid": [tokens, kernel.width, 1], "block": [128, 1, 1]} if grids else {}
        self.kernel(self.gpu, kernel.us, kernel.name, self.correlation, **size)
        self.gpu += kernel.us + 1

    def eager(self, kernels: list[Kernel], tokens: int = 8, step: str | None = None, grids: bool = True) -> Run:
        begin = self.host
        self.host += 1
        for kernel in kernels:
            self._operator(kernel, tokens, "cudaLaunchKernel")
            self._kernel(kernel, tokens, grids)
        return self._range(step, begin)

    def capture(self, kernels: list[Kernel], tokens: int = 8, step: str | None = None, rocm: bool = False) -> Run:
        """Launches without kernels between the two calls of a capture; those of ROCm name their kernel."""
        begin, api = self.host, "hip" if rocm else "cuda"
        self.host += 1
        self.call(self.host, 2, f"{api}StreamBeginCapture", 90_000 + len(self.events))
        self.host += 5
        for kernel in kernels:
            self._operator(kernel, tokens, f"{api}LaunchKernel", named=rocm)
        self.call(self.host, 2, f"{api}StreamEndCapture", 90_000 + len(self.events))
        self.host += 5
        return self._range(step, begin)

    def replay(self, kernels: list[Kernel], tokens: int = 8, step: str | None = None, grids: bool = True) -> Run:
        begin = self.host
        self.correlation += 1
        self.call(self.host + 1, 10, "cudaGraphLaunch", self.correlation)
        self.host += 15
        for kernel in kernels:
            self._kernel(kernel, tokens, grids)
        return self._range(step, begin)

    def _range(self, step: str | None, begin: float) -> Run:
        if step is not None:
            self.add("user_annotation", step, begin, self.host - begin)
        self.host += 10
        return self


@pytest.fixture
def matched(tmp_path: Path) -> Callable[..., GraphOperators | None]:
    def run(replays: Run, source: Run | None = None) -> GraphOperators | None:
        prepared = Prepared(read(replays.write(tmp_path / "replays.json")))
        capture = None if source is None else Prepared(read(source.write(tmp_path / "eager.json")))
        return graph_operators(prepared, capture, LIMITS)

    return run


Match = Callable[..., GraphOperators]


def operators(found: GraphOperators) -> list[tuple[str, int | None] | None]:
    """Operator and rows of the first input (its tokens, None = shapes not known) of each kernel that ran in a graph."""
    out: list[tuple[str, int | None] | None] = []
    for row in np.flatnonzero(found.how >= 0).tolist():
        operator = found.operator_of(row)
        inputs = None if operator is None else operator[1]
        out.append(None if operator is None else (operator[0], None if inputs is None else inputs.shapes[0][0]))
    return out


def truth(kernels: list[Kernel], tokens: int | None) -> list[tuple[str, int | None]]:
    return [(k.operator, tokens) for k in kernels]


# What is matched


def test_each_kernel_of_a_replay_gets_the_operator_and_shapes_of_the_eager_run(matched: Match) -> None:
    found = matched(Run().replay(model()).replay(model()), Run().eager(model()))
    assert operators(found) == truth(model(), 8) * 2
    widths = [found.operator_of(i)[1].shapes[0][1] for i in range(len(model()))]
    assert widths == [k.width for k in model()]


def test_a_graph_is_found_in_the_middle_of_a_longer_run(matched: Match) -> None:
    others = [Kernel(f"sampling_{i}", "aten::topk", 3) for i in range(40)]
    source = Run().eager(others).eager(model()).eager(others)
    assert operators(matched(Run().replay(model()), source)) == truth(model(), 8)


def test_three_replays_of_two_graphs(matched: Match) -> None:
    small, large = model(2), model(5)
    source = Run().eager(small, 8).eager(large, 16)
    replays = Run().replay(small, 8).replay(large, 16).replay(small, 8)
    found = matched(replays, source)
    assert sorted(len(m.graph.launch) for m in found.matches) == [1, 2]
    assert operators(found) == truth(small, 8) + truth(large, 16) + truth(small, 8)


def test_a_few_kernels_of_other_names_stay_without_operator(matched: Match) -> None:
    replayed = model(6)
    replayed[8] = replayed[8]._replace(name="another_kernel")
    replayed.insert(15, Kernel("inserted_kernel", "?", 1))
    found = operators(matched(Run().replay(replayed), Run().eager(model(6))))
    expected: list[tuple[str, int | None] | None] = [*truth(replayed, 8)]
    expected[8] = expected[15] = None
    assert found == expected


def test_autotuned_products_are_paired_by_their_neighbours_and_counted_apart(matched: Match) -> None:
    tuned = [k._replace(name=k.name.replace("64x16", "192x16")) for k in model()]
    found = matched(Run().replay(tuned), Run().eager(model()))
    assert operators(found) == truth(model(), 8)
    other = [k.name != t.name for k, t in zip(model(), tuned, strict=True)]
    assert (found.how[found.how >= 0] == BY_POSITION).tolist() == other
    assert any(other)


def test_a_product_is_not_paired_with_a_kernel_of_another_class(matched: Match) -> None:
    replayed = [k._replace(name="mystery_kernel") if k.name == GEMM.format(16) else k for k in model()]
    replayed = [k._replace(us=1.0) if k.name == "mystery_kernel" else k for k in replayed]
    found = operators(matched(Run().replay(replayed), Run().eager(model())))
    assert [f is None for f in found] == [k.name == "mystery_kernel" for k in replayed]


def test_parallel_branches_in_another_order_keep_their_operators(matched: Match) -> None:
    replayed = model(6)
    for at in range(1, 26, 5):
        # The rotary kernel runs beside the second product, and starts after it.
        replayed[at + 2], replayed[at + 3] = replayed[at + 3], replayed[at + 2]
    assert operators(matched(Run().replay(replayed), Run().eager(model(6)))) == truth(replayed, 8)


def test_kernels_of_a_graph_are_compared_by_node_where_replays_start_them_in_turns(matched: Match) -> None:
    run, kernels = Run(), model(2)
    for turn in range(2):
        run.replay(kernels)
        nodes = run.events[-len(kernels) :]
        for i, event in enumerate(nodes):
            event["args"]["graph node id"] = i
        if turn:
            nodes[3]["ts"], nodes[4]["ts"] = nodes[4]["ts"], nodes[3]["ts"]
    found = matched(run, Run().eager(kernels))
    assert [len(m.graph.launch) for m in found.matches] == [2]
    swapped = kernels.copy()
    swapped[3], swapped[4] = kernels[4], kernels[3]
    assert operators(found) == truth(kernels, 8) + truth(swapped, 8)


def test_launches_of_a_graph_whose_branches_take_turns_are_one_graph(matched: Match) -> None:
    kernels = model(3)
    turned = kernels.copy()
    turned[3], turned[4] = kernels[4], kernels[3]
    found = matched(Run().replay(kernels).replay(turned).replay(kernels), Run().eager(kernels))
    assert [len(m.graph.launch) for m in found.matches] == [3]
    assert operators(found) == truth(kernels, 8) + truth(turned, 8) + truth(kernels, 8)


# Which batch size


def test_of_several_captured_sizes_the_one_of_the_step_gives_the_shapes(matched: Match) -> None:
    source = Run()
    for tokens in (16, 8, 4):
        source.capture(model(), tokens, f"capture_{tokens}_FULL", rocm=True)
    for tokens, size in ((8, 8), (7, 8), (4, 4), (13, 16)):
        step = f"execute_context_0(0)_generation_{tokens}({tokens})"
        found = matched(Run().replay(model(), size, step, grids=False), source)
        assert operators(found) == truth(model(), size), tokens


def test_of_several_eager_batches_the_one_with_equal_grids_gives_the_shapes(matched: Match) -> None:
    source = Run().eager(model(), 16).eager(model(), 8).eager(model(), 4)
    assert operators(matched(Run().replay(model(), 8), source)) == truth(model(), 8)


def test_several_batches_that_nothing_tells_apart_give_operators_and_no_shapes(matched: Match) -> None:
    source = Run().eager(model(), 16, grids=False).eager(model(), 8, grids=False)
    found = matched(Run().replay(model(), 8, grids=False), source)
    assert operators(found) == truth(model(), None)
    assert "batch had the same size" in found.matches[0].doubt


def test_another_batch_size_gives_operators_and_no_shapes(matched: Match) -> None:
    by_grid = matched(Run().replay(model(), 8), Run().eager(model(), 16))
    assert operators(by_grid) == truth(model(), None)
    assert "grids" in by_grid.matches[0].doubt
    replay = Run().replay(model(), 8, "step[DECODE bs=8]", grids=False)
    by_step = matched(replay, Run().eager(model(), 16, "step[DECODE bs=16]", grids=False))
    assert operators(by_step) == truth(model(), None)
    assert "8 tokens" in by_step.matches[0].doubt


def test_a_kernel_with_another_grid_keeps_its_operator_and_loses_its_shapes(matched: Match) -> None:
    replays = Run().replay(model(8))
    replays.events[-3]["args"]["grid"] = [1, 1, 1]
    found = operators(matched(replays, Run().eager(model(8))))
    assert [f for f in found if f is not None and f[1] is None] == [truth(model(8), None)[-3]]


def test_equal_layers_of_different_shapes_give_no_shapes_where_a_graph_holds_one_of_them(matched: Match) -> None:
    layer = model(1, head=False)
    wide = [k._replace(width=k.width + 100) for k in layer]
    source = Run().eager([*layer, *wide], step="step[DECODE bs=8]", grids=False)
    found = matched(Run().replay(layer, 8, "step[DECODE bs=8]", grids=False), source)
    assert operators(found) == truth(layer, None)
    same = Run().eager([*layer, *layer], step="step[DECODE bs=8]", grids=False)
    assert operators(matched(Run().replay(layer, 8, "step[DECODE bs=8]", grids=False), same)) == truth(layer, 8)


# What the trace itself captured


def test_a_capture_in_the_trace_is_matched_by_order_where_it_has_no_names(matched: Match) -> None:
    found = matched(Run().capture(model(), 8).replay(model(), 8).replay(model(), 8))
    assert operators(found) == truth(model(), 8) * 2
    assert set(found.how[found.how >= 0].tolist()) == {BY_ORDER}


def test_a_capture_in_the_trace_is_matched_by_name_where_it_has_them(matched: Match) -> None:
    found = matched(Run().capture(model(3), 8, rocm=True).capture(model(4), 8, rocm=True).replay(model(4), 8))
    assert operators(found) == truth(model(4), 8)
    assert set(found.how[found.how >= 0].tolist()) == {BY_NAME}


def test_a_capture_of_as_many_launches_of_something_else_is_no_match(matched: Match) -> None:
    backwards = list(reversed(model()))
    found = matched(Run().capture(backwards).replay(model()))
    assert operators(found) == [None] * len(model())


def test_a_graph_replayed_before_the_capture_may_be_of_another_size(matched: Match) -> None:
    found = matched(Run().replay(model(), 4).capture(model(), 8).replay(model(), 8))
    assert operators(found) == [None] * len(model()) + truth(model(), None)


def test_a_capture_after_the_replay_gives_no_shapes(matched: Match) -> None:
    found = matched(Run().replay(model(), 8, grids=False).capture(model(), 8, rocm=True))
    assert operators(found) == truth(model(), None)


def test_a_capture_of_just_these_kernels_goes_before_a_part_of_a_longer_one(matched: Match) -> None:
    layer = model(1, head=False)
    run = Run().capture(model(1), 16, rocm=True).capture(layer, 8, rocm=True).replay(layer, 8)
    assert operators(matched(run)) == truth(layer, 8)


def test_a_kernel_that_ran_during_the_capture_is_no_part_of_the_graph(matched: Match) -> None:
    run = Run().capture([*model(), Kernel("fill_kernel", "aten::fill_", 1)], 8)
    run.kernel(run.host, 2, "fill_kernel", run.correlation)
    assert operators(matched(run.replay(model(), 8))) == truth(model(), 8)


def test_a_trace_without_capture_claims_nothing(matched: Match) -> None:
    assert matched(Run().eager(model()).replay(model())) is None


# What must not be claimed


def test_another_model_gives_nothing(matched: Match) -> None:
    other = [k._replace(name=k.name.replace("_kernel", "_v2").replace("nvjet", "cutlass_80")) for k in model()]
    found = matched(Run().replay(model()), Run().eager(other))
    assert operators(found) == [None] * len(model())
    assert not any(m.claimed for m in found.matches)


def test_a_graph_of_which_too_little_is_found_gives_nothing(matched: Match) -> None:
    strange = [Kernel(f"strange_{i}", "?", 1, 40.0) for i in range(6)]
    found = matched(Run().replay([*model(2), *strange]), Run().eager(model(2)))
    assert operators(found) == [None] * (len(model(2)) + len(strange))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_exchanged_or_inserted_the_rest_is_matched_and_only_with_equal_names(
    matched: Match, seed: int
) -> None:
    random = np.random.default_rng(seed)
    kernels = model(int(random.integers(3, 12)))
    replayed: list[Kernel] = []
    changes = int(random.integers(1, max(len(kernels) // 10, 1) + 1))
    at = dict.fromkeys(random.choice(np.arange(1, len(kernels)), changes, replace=False).tolist())
    for i, kernel in enumerate(kernels):
        if i in at and random.random() < 0.5:
            replayed.append(Kernel(f"inserted_{i}", "?", 1))
        elif i in at:
            kernel = kernel._replace(name=f"exchanged_{i}")
        replayed.append(kernel)
    found = matched(Run().replay(replayed), Run().eager(kernels))
    names = {k.name for k in kernels}
    original = [k.name in names for k in replayed]
    got = operators(found)
    assert sum(g is not None for g in got) >= sum(original)
    operator_of = {k.name: k.operator for k in kernels}
    for kernel, operator in zip(replayed, got, strict=True):
        assert operator is None or operator[0] == operator_of.get(kernel.name), kernel


def test_the_common_subsequence_is_a_longest_one() -> None:
    random = np.random.default_rng(5)
    for _ in range(200):
        left, right = (random.integers(-1, 4, random.integers(0, 24)) for _ in range(2))
        longest = np.zeros((len(left) + 1, len(right) + 1), dtype=np.int64)
        for i, j in np.ndindex(len(left), len(right)):
            equal = left[i] == right[j] and left[i] >= 0
            longest[i + 1, j + 1] = max(longest[i, j + 1], longest[i + 1, j], longest[i, j] + equal)
        pairs = common_subsequence(left, right)
        joined = np.flatnonzero(pairs >= 0)
        assert len(joined) == longest[-1, -1]
        assert (np.diff(pairs[joined]) > 0).all()
        assert (left[joined] == right[pairs[joined]]).all()


def test_exact_places_against_a_search_of_all() -> None:
    random = np.random.default_rng(6)
    for _ in range(100):
        text, segment = random.integers(0, 3, 60), np.sort(random.integers(0, 3, 60))
        pattern = text[(low := int(random.integers(0, 50))) : low + int(random.integers(1, 10))]
        n = len(pattern)
        every = [
            i for i in range(61 - n) if (text[i : i + n] == pattern).all() and segment[i] == segment[min(i + n, 60) - 1]
        ]
        assert exact_places(pattern, Text(text, segment)).tolist() == every


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("execute_context_1(888)_generation_7(7)", 895),
        ("execute_context_1(888_788544)_generation_0(0)", 888),
        ("execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk32785sqsq32sqsk32785)", 32),
        ("step[DECODE bs=32]", 32),
        ("step[EXTEND bs=15 toks=15360]", 15360),
        ("step[IDLE]", None),
        ("scheduler.run_batch", None),
    ],
)
def test_tokens_of_step_ranges(text: str, tokens: int | None) -> None:
    assert step_tokens(text) == tokens


def test_sizes_of_capture_ranges() -> None:
    assert [captured_tokens(t) for t in ("capture_8_FULL", "capture_32_DECODE", "capture_x")] == [8, 32, None]
    assert [captured_size(n, [1, 2, 4, 8, 16]) for n in (1, 3, 5, 16, 17)] == [1, 4, 8, 16, None]
    # A batch of 5 is not padded to 16: the size that it ran with is not among these.
    assert captured_size(5, [1, 2, 4, 16]) is None


# The whole way


def spec(graph: bool) -> dict[str, Any]:
    """Decode of 32 sequences that reads large weights, by one graph a step, or launched one by one."""
    weights = "bf16[8192, 28672]"
    kernels = {
        "norm": {
            "name": "void vllm::rms_norm_kernel<c10::BFloat16>(T1 *, const T1 *, float, int, int)",
            "time": "3us",
            "grid": [32, 1, 1],
            "op": "_C::rms_norm(bf16[32, 8192], bf16[32, 8192], bf16[8192], 1e-05)",
        },
        "up": {"name": "nvjet_tst_64x32_64x16_4x1_v_bz_TNT", "op": f"aten::mm(bf16[32, 8192], {weights})"},
    }
    layer = ["norm", "up"] * 8
    step: list[dict[str, Any]] = [{"graph": "decode"}] if graph else [{"launch": key} for key in layer]
    turn = {"repeat": 8, "range": "execute_context_0(0)_generation_32(32)", "do": [*step, {"sync": "stream"}]}
    return {
        "name": "graph" if graph else "eager",
        "kernels": kernels,
        **({"graphs": {"decode": {"kernels": layer}}} if graph else {}),
        "processes": [{"pid": 900, "name": "VLLM::Worker", "threads": [{"run": [turn]}]}],
    }


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("capture")
    graph, eager = (simulate(parse_spec(spec(graph))) for graph in (True, False))
    write_kineto(graph, folder / "graph.json")
    write_kineto(eager, folder / "eager.json")
    write_nsys_sqlite(graph, folder / "graph.sqlite")
    return folder


def measure(diagnosis: Diagnosis, name: str) -> float | None:
    return next(m.value for m in diagnosis.measures if m.name == name)


@pytest.mark.parametrize("file", ["graph.json", "graph.sqlite"])
def test_a_decode_in_graphs_is_found_bandwidth_bound_with_an_eager_trace(simulated: Path, file: str) -> None:
    alone = analyze_file(simulated / file, Options(window="full"))
    assert (alone.verdict.cls, alone.verdict.rank) == ("gpu-busy", "C")
    assert measure(alone, "capture_matched_ratio") is None
    diagnosis = analyze_file(simulated / file, Options(window="full", capture=simulated / "eager.json"))
    assert (diagnosis.verdict.cls, diagnosis.verdict.rank) == ("bandwidth-bound", "B")
    assert measure(diagnosis, "capture_matched_ratio") == measure(diagnosis, "capture_shapes_ratio") == 1.0
    eager = analyze_file(simulated / "eager.json", Options(window="full"))
    for name in ("work_flop", "work_bytes"):
        assert measure(diagnosis, name) == pytest.approx(measure(eager, name)), name
    assert "eager.json" in next(m.source for m in diagnosis.measures if m.name == "work_flop")
    said = [p.message for p in diagnosis.problems if p.code == "graph-operators"]
    assert len(said) == 1
    assert "eager.json" in said[0]
    assert "100 %" in said[0]


def cli(*words: str | Path) -> Any:
    return CliRunner().invoke(app, [str(w) for w in words])


def test_capture_on_the_command_line(simulated: Path, tmp_path: Path) -> None:
    words = ("analyze", simulated / "graph.sqlite", "--window", "full", "--json")
    result = cli(*words, "--capture", simulated / "eager.json")
    assert json.loads(result.stdout)["verdict"]["class"] == "bandwidth-bound"
    page = tmp_path / "page.md"
    result = cli("report", simulated / "graph.json", "--capture", simulated / "eager.json", "--markdown", page)
    assert result.exit_code == 0
    assert "eager.json" in page.read_text()


def test_a_capture_that_cannot_tell_operators_is_refused_in_one_sentence(simulated: Path) -> None:
    for name, words in (("graph.sqlite", "holds no operators"), ("graph.json", "holds no operators")):
        with pytest.raises(UsageError, match=f"--capture {re.escape(name)}: it {words}"):
            analyze_file(simulated / "graph.json", Options(capture=simulated / name))
    result = cli("analyze", simulated / "graph.json", simulated / "eager.json", "--capture", simulated / "eager.json")
    assert isinstance(result.exception, UsageError)
    assert "single input" in str(result.exception)


def test_a_capture_that_is_not_needed_or_of_another_model_is_said(simulated: Path, tmp_path: Path) -> None:
    unused = analyze_file(simulated / "eager.json", Options(capture=simulated / "eager.json"))
    assert [p.code for p in unused.problems if "capture" in p.code] == ["capture-not-used"]
    other = Run().eager([k._replace(name=f"other_{k.name[:5]}") for k in model()]).write(tmp_path / "other.json")
    wrong = analyze_file(simulated / "graph.json", Options(window="full", capture=other))
    assert (wrong.verdict.cls, wrong.verdict.rank) == ("gpu-busy", "C")
    assert measure(wrong, "capture_matched_ratio") == 0.0
    said = next(p.message for p in wrong.problems if p.code == "capture-not-matched")
    assert "1 of 1 replayed graphs" in said


# Real traces

TRACES = SHARED / "traces" / "kineto"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the shared traces are not here")


@needs_traces
def test_a_real_decode_step_of_sglang_matches_its_capture_in_every_kernel() -> None:
    prepared = Prepared(read(TRACES / "mi300x_sglang_decode_slice.json.gz"))
    capture = Prepared(read(TRACES / "mi300x_sglang_capture.json.gz"))
    found = graph_operators(prepared, capture, LIMITS)
    assert found is not None
    (match,) = found.matches
    assert (match.how == BY_NAME).sum() == len(match.graph) == 544
    assert match.inputs.all()
    got = [found.operator_of(row) for row in match.graph.rows[0].tolist()]
    names = [g[0] for g in got if g is not None]
    # 36 layers of four products, and the head.
    assert names.count("aten::mm") == 4 * 36 + 1
    assert names.count("sgl_kernel::silu_and_mul") == 36
    products = [g[1].shapes[0] for g in got if g is not None and g[0] == "aten::mm" and g[1] is not None]
    assert {shape[0] for shape in products} == {32}


@needs_traces
@pytest.mark.parametrize("file", ["mi300_vllm_decode_graph", "mi300_vllm_prefill_piecewise", "a100_vit_int8_graph"])
@pytest.mark.parametrize("capture", ["mi300x_sglang_capture", "mi300_vllm_prefill_piecewise", "h100_vit_small"])
def test_real_traces_of_other_models_explain_nothing(file: str, capture: str) -> None:
    prepared, source = (Prepared(read(TRACES / f"{name}.json.gz")) for name in (file, capture))
    found = graph_operators(prepared, source, LIMITS)
    assert found is not None
    assert not any(m.claimed for m in found.matches)


@needs_traces
def test_launches_of_rocm_name_their_kernels() -> None:
    trace = read(TRACES / "mi300x_sglang_capture.json.gz")
    assert trace.named_launches is not None
    # 401 hipLaunchKernel and 145 hipExtModuleLaunchKernel.
    assert len(trace.named_launches) == 546
    names = [trace.strings[i] for i in trace.named_launches["name"].tolist()]
    assert sum(name.startswith("Cijk_") for name in names) == 145
    assert read(TRACES / "a100_vit_int8_graph.json.gz").named_launches is None


# Speed


def long_trace(kernels: list[Kernel], replays: int, exchanged: int, order: Any = slice(None)) -> Prepared:
    """The kernels launched eagerly inside operators, or so many replays of them with some exchanged for others."""
    strings = StringTable()
    n, launches = len(kernels), replays or len(kernels)
    names = strings.add_all(k.name for k in kernels)
    names[np.linspace(1, n - 2, exchanged, dtype=np.int64)] = strings.add("exchanged_kernel")
    count = n * max(replays, 1)
    start = np.arange(count, dtype=np.int64) * 6000
    zero, none = constant(0, count), constant(-1, count)
    correlation = np.repeat(np.arange(replays), n) if replays else np.arange(n)
    trace = Trace(
        strings.values,
        [Device(0)],
        [Process(1)],
        [Thread(0, 1)],
        [Stream(0, 0, 0, 7)],
        TraceProvenance("t", None, ["t"]),
    )
    place = {"process": zero, "device": zero, "stream": zero, "correlation": correlation}
    what = {
        "name": np.tile(names, max(replays, 1))[order],
        "grid_blocks": np.tile(np.arange(n), max(replays, 1))[order],
    }
    times = {"start": start, "end": start + 5000}
    trace.kernels = Table(
        "kernels", {**times, **place, **what, "block_threads": constant(128, count), "graph_node": none}
    )
    api = strings.add("cudaGraphLaunch" if replays else "cudaLaunchKernel")
    called, zeros = np.arange(launches, dtype=np.int64) * 1000, constant(0, launches)
    columns = {"start": called + 100, "end": called + 200, "process": zeros, "thread": zeros, "return_value": zeros}
    trace.api_calls = Table(
        "api_calls", {**columns, "correlation": np.arange(launches), "name": constant(api, launches)}
    )
    trace.inputs = [OperatorInputs(((8, 8), (8, 8)), (BF16, BF16))]
    operator = strings.add_all(k.operator for k in kernels)[:launches]
    spans = {"start": called, "end": called + 900, "thread": zeros, "inputs": zeros}
    trace.operators = None if replays else Table("operators", {**spans, "name": operator})
    return Prepared(trace)


@pytest.mark.parametrize(("exchanged", "reordered"), [(0, False), (500, False), (500, True)])
def test_a_hundred_replays_of_ten_thousand_kernels_take_less_than_two_seconds(exchanged: int, reordered: bool) -> None:
    kernels = model(2000)[:10_000]
    random = np.random.default_rng(1)
    order = np.arange(100 * len(kernels))
    for begin in range(0, len(order), len(kernels)) if reordered else ():
        first = begin + 2 * random.choice(np.arange(1, 4999), 400, replace=False)
        order[first], order[first + 1] = first + 1, first
    replays, source = long_trace(kernels, 100, exchanged, order), long_trace(kernels, 0, 0)
    began = time.perf_counter()
    found = graph_operators(replays, source, LIMITS)
    spent = time.perf_counter() - began
    assert found is not None
    assert [len(m.graph.launch) for m in found.matches] == [100]
    assert (found.how > 0).sum() >= 100 * (10_000 - exchanged)
    assert spent < 2
