"""Real cases of comparisons: what is no comparison, what a difference is, and what made it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from case_builders import (
    MS,
    US,
    S,
    claimed_ns,
    diagnose,
    evidence,
    finding,
    idle,
    infprof,
    measure,
    remedy_text,
    rules,
)
from infprof.compare.comparing import compare
from infprof.compare.model import Comparison
from infprof.compare.runs import load_run
from infprof.diagnosis import Options
from infprof.simulator.builder import TraceBuilder

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32"
ATTENTION = "void flash_fwd_splitkv_kernel<Traits<128>>(Params)"
NORM = "void vllm::fused_add_rms_norm_kernel<bf16>(bf16*)"
# What the GPU does in a step: name, ns.
Kernels = Sequence[tuple[str, int]]
MODEL: Kernels = [(NORM, 20 * US), (GEMM, 200 * US), (ATTENTION, 60 * US)]


def stepping(kernels: Kernels, count: int = 40, pause_ns: int = 100 * US) -> TraceBuilder:
    """Decode steps in ranges: the kernels back to back, launched ahead, and ``pause_ns`` in which nothing runs."""
    b = TraceBuilder()
    b.gpu()
    length = sum(ns for _, ns in kernels) + pause_ns
    for step in range(count):
        begin = S + step * length
        b.nvtx(begin, begin + 6 * US * len(kernels), "decode")
        at = begin + 10 * US
        for k, (name, ns) in enumerate(kernels):
            b.launch(begin + k * 6 * US, 5 * US, at, ns, name)
            at += ns
    return b


def in_graphs(kernels: Kernels, count: int, period_ns: int) -> TraceBuilder:
    """The same as graphs, one for each step, traced by their kernels."""
    b = TraceBuilder()
    b.gpu()
    for step in range(count):
        begin = S + step * period_ns
        at, rows = begin + 20 * US, []
        for name, ns in kernels:
            rows.append((at, at + ns, name))
            at += ns
        b.nvtx(begin, begin + 10 * US, "decode")
        b.graph_launch(begin, 10 * US, rows)
    return b


def written(builder: TraceBuilder, folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    return builder.write(folder / name)


def compared(base: Path, head: Path, **options: bool) -> Comparison:
    plain = Options()
    return compare(load_run(base, plain, with_whatif=True), load_run(head, plain), **options)


def text_of(*arguments: str | Path, code: int = 0) -> str:
    """What the command prints, each run of white space one blank."""
    done = infprof("compare", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    return " ".join(done.stdout.split())


# --- S-05: an empty capture passes the gate ---------------------------------------------------------------------------


def nothing_recorded() -> TraceBuilder:
    """Ranges of the host; neither a launch nor anything on the GPU."""
    b = TraceBuilder()
    b.gpu()
    for step in range(40):
        b.nvtx(S + step * MS, S + step * MS + 500 * US, "decode")
    return b


@pytest.mark.parametrize("side", ("BASE", "HEAD"))
@pytest.mark.parametrize("gate", ((), ("--fail-on", "step_p50_ns > +5%")))
def test_a_capture_without_gpu_work_passes_no_gate(side: str, gate: tuple[str, ...], tmp_path: Path) -> None:
    """S-05."""
    good, empty = written(stepping(MODEL), tmp_path, "good.sqlite"), written(nothing_recorded(), tmp_path, "e.sqlite")
    both = (empty, good) if side == "BASE" else (good, empty)
    done = infprof("compare", *both, *gate)
    assert (done.returncode, done.stdout) == (3, "")
    assert re.fullmatch(rf"infprof: {side}, \S+e\.sqlite, has no GPU work: not comparable\. [^\n]+\n", done.stderr)
    assert "improve" not in done.stderr and "faster" not in done.stderr


@pytest.mark.parametrize("side", ("BASE", "HEAD"))
def test_a_capture_of_a_tenth_of_the_kernels_passes_no_gate(side: str, tmp_path: Path) -> None:
    """S-05: 3 of 80 steps, and nothing that finds steps in so few."""
    good = written(stepping(MODEL * 20, count=80), tmp_path, "good.sqlite")
    little = written(stepping(MODEL * 20, count=3), tmp_path, "little.sqlite")
    both = (little, good) if side == "BASE" else (good, little)
    junit = tmp_path / "out.xml"
    done = infprof("compare", *both, "--fail-on", "idle_ratio > +5%", "--junit", junit)
    assert done.returncode == 3
    said = rf"not comparable: {side} has 180 GPU kernels in [\d.]+ ms, \w+ has 4,800 GPU kernels in [\d.]+ ms: compare equal"
    assert re.search(said.replace("has 4,800", "4,800"), done.stderr)
    assert done.stdout.startswith("not comparable: ")
    words = " ".join(done.stdout.split())
    assert "NOT JUDGED: idle_ratio > +5%" in words
    assert not re.search(r"improve|faster|slower|\bwent\b|\bcame\b", words)
    suite = ElementTree.parse(junit).getroot()[0]
    assert (suite.get("failures"), suite.get("errors")) == ("0", "1")
    # not even where different programs are meant
    assert infprof("compare", *both, "--different-programs").returncode == 3


def test_a_fused_program_of_few_kernels_is_comparable(tmp_path: Path) -> None:
    """S-05: as many steps, each of one kernel where there were 60."""
    base = written(stepping(MODEL * 20), tmp_path, "base.sqlite")
    head = written(stepping([("void megakernel<bf16>(Args)", 5 * MS)]), tmp_path, "head.sqlite")
    result = compared(base, head, other_program=True)
    assert result.not_comparable is None
    assert result.phases[0].p50_ns.direction == "lower"


def test_graphs_traced_whole_hide_kernels_and_not_work(tmp_path: Path) -> None:
    """S-05: eager against whole graphs."""
    b = TraceBuilder()
    b.gpu()
    for step in range(60):
        at = S + step * 6 * MS
        b.graph_launch(at, 20 * US, span=(at + 30 * US, at + 5 * MS))
    base = written(stepping(MODEL * 20), tmp_path, "base.sqlite")
    result = compared(base, written(b, tmp_path, "head.sqlite"))
    assert result.not_comparable is None and result.kernels_off is not None


# --- S-06: sign and silence -------------------------------------------------------------------------------------------

BIG: Kernels = [(NORM, 20 * MS), (GEMM, 300 * MS), (ATTENTION, 66_370 * US)]
LESS: Kernels = [(NORM, 20 * MS), (GEMM, 253_630 * US), (ATTENTION, 66_370 * US)]
GATE = ("--fail-on", "step_p50_ns[phase=decode] > +5%")


def test_a_run_against_itself_is_no_change(tmp_path: Path) -> None:
    """S-06, X X."""
    x = written(stepping(BIG, 12), tmp_path, "x.sqlite")
    text = text_of(x, x, *GATE)
    assert text.startswith("no change: all figures of both runs are the same (decode p50 386 ms).")
    assert "passes: step_p50_ns[phase=decode] > +5% (386 → 386 ms, 0.0 %" in text
    assert "same file" in text
    assert not re.search(r"faster|slower|by 0|[−-]0\.0 %", text)


def test_the_sign_says_which_is_faster_once(tmp_path: Path) -> None:
    """S-06, X Y: 46.37 ms of 386.47 ms."""
    x, y = written(stepping(BIG, 12), tmp_path, "x.sqlite"), written(stepping(LESS, 12), tmp_path, "y.sqlite")
    text = text_of(x, y, *GATE)
    assert text.startswith("decode steps are 46.4 ms faster (−12 %; p50 386 → 340 ms)")
    assert "passes: step_p50_ns[phase=decode] > +5% (386 → 340 ms, −12.0 %)" in text
    assert not re.search(r"(?:faster|slower) by|faster \(\+|slower \(−|−−", text)
    back = text_of(y, x, *GATE, code=1)
    assert back.startswith("decode steps are 46.4 ms slower (+14 %; p50 340 → 386 ms)")
    assert "FAILS: step_p50_ns[phase=decode] > +5% (340 → 386 ms, +13.6 %; one run each" in back


def test_another_model_is_not_comparable_unless_that_is_meant(tmp_path: Path) -> None:
    """S-06, X Z: one of the 33 kernels of a step is in both."""
    models = ([(f"model_{name}_{k}_kernel", 6 * MS) for k in range(32)] + [(NORM, 6 * MS)] for name in "xz")
    x, z = (written(stepping(model, 12), tmp_path, f"{i}.sqlite") for i, model in enumerate(models))
    done = infprof("compare", x, z, *GATE, "--sarif", tmp_path / "out.sarif")
    text = " ".join(done.stdout.split())
    assert done.returncode == 3
    assert text.startswith("not comparable: kernels in common 3 % of all calls") and "Steps: decode" in text
    assert "add --different-programs" in done.stderr
    assert "NOT JUDGED: step_p50_ns[phase=decode] > +5%" in text and "moved" not in text
    log = json.loads((tmp_path / "out.sarif").read_text(encoding="utf-8"))
    assert [r["ruleId"] for r in log["runs"][0]["results"]] == ["not-comparable", "gate-not-judged"]
    meant = text_of(x, z, *GATE, "--different-programs")
    assert meant.startswith("no difference") and "passes: " in meant and "may be different programs" in meant


@pytest.mark.parametrize(
    "gemm", ("sm89_xmma_gemm_e4m3e4m3_f32", "void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm>")
)
def test_another_precision_or_library_is_the_same_program(gemm: str, tmp_path: Path) -> None:
    """S-06: only the products have other names, and take most of the time."""
    x = written(stepping(MODEL * 4), tmp_path, "x.sqlite")
    z = written(stepping([(NORM, 20 * US), (gemm, 120 * US), (ATTENTION, 60 * US)] * 4), tmp_path, "z.sqlite")
    assert compared(x, z).not_comparable is None


def test_graphs_of_the_same_kernels_are_the_same_program(tmp_path: Path) -> None:
    """S-06: eager against graphs that were traced by their kernels."""
    graphs = in_graphs(MODEL * 4, 40, 2 * MS)
    result = compared(written(stepping(MODEL * 4), tmp_path, "x.sqlite"), written(graphs, tmp_path, "z.sqlite"))
    assert result.not_comparable is None
    assert {row.what for row in result.kernels} == {"same"}


@pytest.mark.parametrize("how", ("--json", "--markdown", "-o"))
def test_a_gate_that_passes_is_never_silent(how: str, tmp_path: Path) -> None:
    """S-06."""
    x = written(stepping(MODEL), tmp_path, "x.sqlite")
    done = infprof("compare", x, x, *GATE, how, *([tmp_path / "out.json"] if how == "-o" else []))
    assert done.returncode == 0
    said = done.stderr if how == "--json" else done.stdout
    assert "passes: step" in said.replace("\\", "")
    if how == "--json":
        assert [gate["holds"] for gate in json.loads(done.stdout)["gates"]] == [False]


# --- D-34: a flag selects the slow kernel -----------------------------------------------------------------------------

MARLIN = "void marlin::Marlin<__nv_bfloat16, 1>(int4 const*)"
AWQ = "void vllm::awq::gemm_forward_4bit_cuda_m16nXk32<128>(int)"
LIST = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/home/ada/m", "--api-key", "s3cret"]


def with_command(builder: TraceBuilder, command: Sequence[str]) -> TraceBuilder:
    """The command line as nsys keeps it in its export."""
    for k, word in enumerate(command):
        builder.metadata(f"PROCESS_0:ARGUMENT_{k}", word)
    return builder


def slow_kernel(folder: Path, flags: Sequence[str] = ("--quantization", "awq")) -> tuple[Path, Path]:
    """BASE with Marlin's products, 5.1 ms of a step; HEAD with AWQ's, 31 ms."""
    rest = [(NORM, 100 * US), (ATTENTION, 900 * US)]
    base = with_command(stepping([(MARLIN, 2_550 * US)] * 2 + rest, 30), LIST)
    slow = [("awq_dequantize_kernel", 9 * MS), (AWQ, 11 * MS), (AWQ, 11 * MS)]
    head = with_command(stepping([*slow, *rest], 30), [*LIST, *flags])
    return written(base, folder, "base.sqlite"), written(head, folder, "head.sqlite")


def test_a_flag_that_selects_slow_kernels_is_the_likely_cause(tmp_path: Path) -> None:
    """D-34."""
    base, head = slow_kernel(tmp_path)
    text = text_of(base, head)
    assert text.startswith(
        "decode steps are 25.9 ms slower (5.2 times as long; p50 6.20 → 32.1 ms); gemm kernels changed"
    )
    assert "gemm: marlin → awq, 5.10 → 31.0 ms (+25.9 ms)" in text
    assert "flags that differ: --quantization awq (HEAD only)" in text
    assert "likely cause: --quantization awq (HEAD only); the limiter is the same" in text
    assert "Likely cause --quantization awq (HEAD only): selects the kernels of matrix products" in text
    assert "Remedy: drop --quantization awq" in text and "awq_marlin" in text
    assert "s3cret" not in text and "ada" not in text and "--model" not in text
    assert "memory bandwidth" not in text
    # the other way round the remedy has been taken
    back = text_of(head, base)
    assert "--quantization awq (BASE only)" in back and "Remedy" not in back


def test_families_and_flags_are_in_the_json(tmp_path: Path) -> None:
    """D-34."""
    done = infprof("compare", *slow_kernel(tmp_path), "--json")
    data = json.loads(done.stdout)
    (row,) = data["replaced"]
    assert (row["kernel_class"], [f["family"] for f in row["base"]], [f["family"] for f in row["head"]]) == (
        "gemm", ["marlin"], ["awq"],
    )  # fmt: skip
    assert row["delta_ns"] == pytest.approx(25.9 * MS)
    assert data["flags"] == [{"option": "--quantization", "base": None, "head": "--quantization awq", "known": True}]
    assert [cause["code"] for cause in data["causes"]] == ["flag"]


@pytest.mark.parametrize("flags", (("--kv-cache-dtype", "fp8"), ("--enforce-eager",), ("--served-model-name", "awq")))
def test_a_flag_that_decides_something_else_is_not_blamed(flags: Sequence[str], tmp_path: Path) -> None:
    """D-34: shown, where it is one that matters for speed at all, and no more."""
    result = compared(*slow_kernel(tmp_path, flags))
    assert [change.option for change in result.flags] == ([] if "name" in flags[0] else [flags[0]])
    assert result.causes == []


def test_no_flag_is_blamed_where_a_command_line_is_not_known(tmp_path: Path) -> None:
    """D-34: a profile without a command line may have had the same flag."""
    _, head = slow_kernel(tmp_path)
    base = written(stepping([(MARLIN, 5_100 * US), (NORM, 100 * US), (ATTENTION, 900 * US)], 30), tmp_path, "b.sqlite")
    result = compared(base, head)
    assert result.causes == [] and [change.known for change in result.flags] == [False]
    assert "--quantization awq (HEAD only; of BASE the command line is not known)" in text_of(base, head)


def test_a_stored_diagnosis_cannot_smuggle_a_command_line_in(tmp_path: Path) -> None:
    """D-34: of stored flags too only what is known to be harmless is shown."""
    base, head = slow_kernel(tmp_path)
    data = json.loads(infprof("analyze", head, "--json").stdout)
    data["provenance"]["capture"]["flags"] = ["--quantization awq --api-key s3cret", "--hf-token s3cret", 7]
    (tmp_path / "head.json").write_text(json.dumps(data), encoding="utf-8")
    text = text_of(base, tmp_path / "head.json")
    assert "--quantization awq (HEAD only)" in text and "s3cret" not in text


def test_eager_steps_are_laid_at_the_flags_door(tmp_path: Path) -> None:
    """D-34, another flag: launches per step."""
    base = written(with_command(in_graphs(MODEL * 10, 30, 3 * MS), LIST), tmp_path, "base.sqlite")
    head = written(with_command(stepping(MODEL * 10, 30, 3 * MS), [*LIST, "--enforce-eager"]), tmp_path, "head.sqlite")
    (cause,) = compared(base, head).causes
    assert cause.title == "--enforce-eager (HEAD only)"
    assert cause.sentence.startswith("switches CUDA graphs off")
    assert "1 → 30 launches a step" in cause.sentence
    assert cause.remedies == ["drop --enforce-eager, so that decode steps are launched as graphs"]


# --- D-04: one layer left on the host ---------------------------------------------------------------------------------

HIDDEN = 16 << 10
LAYER: Kernels = [("rms_norm_f32<1024>", 10 * US), ("void mul_mat_vec_q<(ggml_type)12>(void*)", 80 * US),
                  ("flash_attn_ext_vec<128>", 21 * US), ("unary_op_kernel<op_silu>", 41 * US)]  # fmt: skip
LAST: Kernels = [("rms_norm_f32<1024>", 10 * US), ("void mul_mat_vec_q<(ggml_type)14>(void*)", 70 * US)]
WAIT = "cudaStreamSynchronize_v3020"


class Loop:
    """A host loop that launches each part of a step, waits, and goes on; ``at`` is the host's clock."""

    def __init__(self) -> None:
        self.b = TraceBuilder()
        self.b.gpu("NVIDIA RTX 6000 Ada Generation")
        self.at = self.done = S

    def kernels(self, kernels: Kernels) -> None:
        begin = max(self.done, self.at + 10 * US)
        for name, ns in kernels:
            self.b.launch(self.at, 2 * US, begin, ns, name)
            self.at, begin = self.at + 2 * US, begin + ns
        self.done = begin

    def copy(self, kind: str, size: int) -> None:
        """A copy of 5 µs behind what was launched, and the wait for it."""
        start = max(self.done, self.at + 5 * US)
        self.b.copy(self.at, 2 * US, start, 5 * US, kind=kind, bytes=size)
        self.done = start + 5 * US
        self.at += 3 * US
        if kind == "d2h":
            self.b.api(self.at, self.done + US, WAIT)
            self.at = self.done + 2 * US

    def works(self, ns: int) -> None:
        """The host alone."""
        self.at, self.done = self.at + ns, self.at + ns


def host_layer(layers: int, on_host: bool, ranges: bool = True, count: int = 40, back: int = HIDDEN) -> TraceBuilder:
    """Decode of llama.cpp: inputs, layers of 152 µs, the last kernels, logits; the host samples for 60 µs.

    ``on_host``: one more layer, for which the host takes 2.3 ms between two copies of the hidden state.
    """
    loop = Loop()
    for _ in range(count):
        begin = loop.at
        loop.copy("h2d", 4)
        loop.kernels(LAYER * layers)
        if on_host:
            loop.copy("d2h", HIDDEN)
            loop.works(2_300 * US)
            loop.copy("h2d", back)
        loop.kernels(LAST)
        loop.copy("d2h", 512 << 10)
        if ranges:
            loop.b.nvtx(begin, loop.at, "decode")
        loop.works(60 * US)
    return loop.b


@pytest.mark.parametrize("ranges", (True, False), ids=("ranges", "no ranges"))
def test_a_layer_that_moved_to_the_host_is_named(ranges: bool, tmp_path: Path) -> None:
    """D-04."""
    base = written(host_layer(42, False, ranges), tmp_path, "base.sqlite")
    head = written(host_layer(41, True, ranges), tmp_path, "head.sqlite")
    result = compared(base, head)
    text = text_of(base, head)
    assert "part of the model runs on the host" in text
    (cause,) = result.causes
    assert cause.code == "model-on-host"
    assert re.search(
        r"copies 16\.4 kB to the host and back 1 time in its middle, and the GPU waits 2\.3\d ms", cause.sentence
    )
    assert (
        "n-gpu-layers" in str(cause.remedies) and "context" in str(cause.remedies) and "memory" in str(cause.remedies)
    )
    assert re.search(r"copies to the host per step 1 (?:2|1\.98) ", text) and re.search(
        r"bytes to the host per step", text
    )
    assert "PCIe" not in text and "bandwidth" not in text.replace("_bytes_per_s", "")


def on_host_findings(builder: TraceBuilder, folder: Path) -> tuple[list[str], int]:
    """The findings, and the trips that were counted."""
    folder.mkdir(exist_ok=True)
    d = diagnose(builder, folder)
    return rules(d), measure(d, "model_on_host_count")


@pytest.mark.parametrize("ranges", (True, False), ids=("ranges", "no ranges"))
def test_one_trace_tells_that_a_layer_runs_on_the_host(ranges: bool, tmp_path: Path) -> None:
    """D-04, HEAD alone: the wait is claimed once, and neither the copies nor the synchronisation are to blame."""
    d = diagnose(host_layer(41, True, ranges), tmp_path)
    found = finding(d, "model-on-host")
    assert rules(d)[0] == "model-on-host"
    assert not {"sync-per-step", "host-work-between-steps", "needless-copies", "exposed-copies"} & set(rules(d))
    assert found.cost.value == pytest.approx(40 * 2_302 * US, rel=0.03)
    assert evidence(found)["model_on_host_bytes"] == HIDDEN
    assert claimed_ns(d) <= idle(d)
    assert "n-gpu-layers" in remedy_text(found) and "context" in remedy_text(found)
    assert d.verdict.rule == "model-on-host"
    assert d.verdict.cls == "scheduling-bubble"


def test_every_layer_on_the_gpu_is_no_finding(tmp_path: Path) -> None:
    """D-04, BASE alone."""
    assert on_host_findings(host_layer(42, False), tmp_path) == ([], 0)


@pytest.mark.parametrize("ranges", (True, False), ids=("ranges", "no ranges"))
def test_two_layers_on_the_host_are_two_trips_of_a_step(ranges: bool, tmp_path: Path) -> None:
    """D-04: not next to each other."""
    loop = Loop()
    for _ in range(30):
        begin = loop.at
        loop.copy("h2d", 4)
        for part in (LAYER * 10, LAYER * 12, LAST):
            loop.kernels(part)
            if part is not LAST:
                loop.copy("d2h", HIDDEN)
                loop.works(900 * US)
                loop.copy("h2d", HIDDEN)
        loop.copy("d2h", 512 << 10)
        if ranges:
            loop.b.nvtx(begin, loop.at, "decode")
        loop.works(60 * US)
    found, count = on_host_findings(loop.b, tmp_path)
    assert found[0] == "model-on-host"
    assert 58 <= count <= 60


def at_the_edge(ranges: bool, kernels_first: Kernels = ()) -> TraceBuilder:
    """The host samples between two steps: 16 KiB come at the end of one and go out at the begin of the next."""
    loop = Loop()
    for _ in range(40):
        begin = loop.at
        loop.copy("h2d", HIDDEN)
        loop.kernels([*kernels_first, *LAYER * 30, *LAST])
        loop.copy("d2h", HIDDEN)
        if ranges:
            loop.b.nvtx(begin, loop.at, "decode")
        loop.works(2 * MS)
    return loop.b


@pytest.mark.parametrize("ranges", (True, False), ids=("ranges", "no ranges"))
def test_sampling_on_the_host_is_not_part_of_the_model(ranges: bool, tmp_path: Path) -> None:
    """D-04: even where as many bytes go as come."""
    assert on_host_findings(at_the_edge(ranges), tmp_path)[1] == 0
    lookup = [("void vllm::vocab_embedding_kernel<bf16>(int*)", 5 * US)]
    assert on_host_findings(at_the_edge(ranges, lookup), tmp_path / "lookup")[1] == 0


def test_an_edge_with_a_read_in_the_middle_of_the_step_stays_an_edge(tmp_path: Path) -> None:
    """D-04: 4 bytes are read in mid-step, as by .item(); the step begins with its lookup."""
    loop = Loop()
    lookup = [("void vllm::vocab_embedding_kernel<bf16>(int*)", 5 * US)]
    for _ in range(40):
        loop.copy("h2d", HIDDEN)
        loop.kernels([*lookup, *LAYER * 15])
        loop.copy("d2h", 4)
        loop.kernels([*LAYER * 15, *LAST])
        loop.copy("d2h", HIDDEN)
        loop.works(2 * MS)
    assert on_host_findings(loop.b, tmp_path)[1] == 0


def test_preparing_inputs_is_not_part_of_the_model(tmp_path: Path) -> None:
    """D-04: a block table comes back from the GPU and goes out again, before the first kernel of the model."""
    loop = Loop()
    for _ in range(40):
        begin = loop.at
        loop.kernels([("void compute_slot_mapping_kernel(int*)", 5 * US)])
        loop.copy("d2h", HIDDEN)
        loop.works(800 * US)
        loop.copy("h2d", HIDDEN)
        loop.kernels([*LAYER * 30, *LAST])
        loop.b.nvtx(begin, loop.at, "decode")
    assert on_host_findings(loop.b, tmp_path)[1] == 0


def test_a_cache_that_moves_beside_the_kernels_is_not_part_of_the_model(tmp_path: Path) -> None:
    """D-04: KV blocks go out and in on a stream of their own, while one long kernel after another runs."""
    kernels = [(NORM, 20 * US), (GEMM, 2 * MS), (ATTENTION, 800 * US), (GEMM, 2 * MS)]
    b = stepping(kernels, 40)
    length = sum(ns for _, ns in kernels) + 100 * US
    for step in range(40):
        begin = S + step * length
        for k, (kind, at) in enumerate((("d2h", 200 * US), ("h2d", 1_100 * US))):
            b.copy(begin + (14 + k) * US, US // 2, begin + at, 5 * US, kind=kind, bytes=HIDDEN, stream=20)
    assert on_host_findings(b, tmp_path)[1] == 0


def test_other_sizes_come_back_from_other_work(tmp_path: Path) -> None:
    """D-04: in mid-step, but not the same data."""
    assert on_host_findings(host_layer(41, True, back=64 << 10), tmp_path)[1] == 0


def test_a_layer_that_came_back_to_the_gpu_needs_no_remedy(tmp_path: Path) -> None:
    """D-04, exchanged."""
    result = compared(
        written(host_layer(41, True), tmp_path, "base.sqlite"), written(host_layer(42, False), tmp_path, "head.sqlite")
    )
    assert result.causes[0].title == "part of the model runs on the host in BASE"
    assert result.causes[0].remedies == []


# --- S-04: one run each is not a comparison -----------------------------------------------------------------------------

BIMODAL = ([30.3, 30.4, 38.4, 30.2, 38.6], [38.5, 30.3, 30.5, 38.4, 30.3])
SLOWER = ("--fail-on", "step_p50_ns[phase=decode] > +5%")


def token_runs(folder: Path, *sides: Sequence[float]) -> list[list[Path]]:
    """A profile for each time per token, ms: only the products take longer."""
    found = []
    for number, lengths in enumerate(sides):
        paths = []
        for run, ms in enumerate(lengths):
            step = [(NORM, MS), (GEMM, round(ms * MS) - 4 * MS), (ATTENTION, 2_900 * US)]
            paths.append(written(stepping(step, 12), folder, f"{'base' if number == 0 else 'head'}-{run}.sqlite"))
        found.append(paths)
    return found


def further(base: Sequence[Path], head: Sequence[Path]) -> list[str | Path]:
    """The command line for these runs."""
    more = [word for path in base[1:] for word in ("--base-run", path)]
    return [base[0], head[0], *more, *(word for path in head[1:] for word in ("--head-run", path))]


def test_one_run_each_cannot_tell_a_regression(tmp_path: Path) -> None:
    """S-04: shown, and said; a gate that holds ends with 1 and carries the remark everywhere."""
    base, head = token_runs(tmp_path, [30.3], [38.5])
    junit, sarif = tmp_path / "out.xml", tmp_path / "out.sarif"
    text = text_of(*further(base, head), *SLOWER, "--junit", junit, "--sarif", sarif, code=1)
    remark = "one run each: cannot tell a regression from run-to-run spread"
    first = text.partition(" Runs ")[0]
    assert first.startswith("decode steps are 8.20 ms slower (+27 %; p50 30.3 → 38.5 ms)") and first.endswith(
        f"{remark}."
    )
    assert re.search(rf"FAILS: step_p50_ns\[phase=decode\] > \+5% \(30\.3 → 38\.5 ms, \+27\.1 %.*?; {remark}\)", text)
    failure = ElementTree.parse(junit).getroot()[0].find("testcase/failure")
    assert failure is not None and remark in str(failure.get("message"))
    results = json.loads(sarif.read_text(encoding="utf-8"))["runs"][0]["results"]
    assert [r["ruleId"] for r in results][:2] == ["gate", "steps-slower"]
    assert all(remark in r["message"]["text"] for r in results[:2])


def test_runs_that_fall_into_two_modes_on_both_sides_are_no_change(tmp_path: Path) -> None:
    """S-04: five each."""
    base, head = token_runs(tmp_path, *BIMODAL)
    text = text_of(*further(base, head), *SLOWER)
    assert text.startswith("no significant change (decode p50 30.4 → 30.5 ms; within the spread of the runs, p = 0.9")
    assert "two modes, 30.3 and 38.5 ms, in both" in text.partition(" Runs ")[0]
    assert "3 and 2 runs of BASE, 3 and 2 of HEAD" in text
    assert "regression" not in text and "slower" not in text.partition(" Runs ")[0]
    assert re.search(
        r"passes: step_p50_ns.*\(30\.4 → 30\.5 ms, \+0\.3 %; medians of 5 \+ 5 runs, within their spread, p = 0", text
    )
    assert "BASE base-1.sqlite 30.4 ms median run" in text and "HEAD head-2.sqlite 30.5 ms median run" in text


def test_the_runs_are_in_the_json_and_the_markdown(tmp_path: Path) -> None:
    """S-04."""
    arguments = further(*token_runs(tmp_path, *BIMODAL))
    data = json.loads(infprof("compare", *arguments, "--json").stdout)
    assert [(r["side"], round(r["phases"][0]["p50_ns"] / MS, 1)) for r in data["runs"]] == [
        (side, ms) for side, lengths in zip(("BASE", "HEAD"), BIMODAL, strict=True) for ms in lengths
    ]
    assert [r["name"] for r in data["runs"] if r["chosen"]] == ["base-1.sqlite", "head-2.sqlite"]
    (modes,) = data["modes"]
    assert (modes["phase"], modes["base"], modes["head"]) == ("decode", [3, 2], [3, 2])
    change = data["phases"][0]["p50_ns"]
    assert (change["base"], change["head"]) == (30.4 * MS, 30.5 * MS)
    assert change["direction"] == "same" and change["p_value"] == pytest.approx(0.897, abs=0.001)
    markdown = infprof("compare", *arguments, "--markdown").stdout
    assert "| BASE | base-0.sqlite | 30.3 ms |" in markdown


def test_runs_that_all_differ_are_a_change(tmp_path: Path) -> None:
    """S-04: four each are enough, three are not."""
    lengths = [30.2, 30.4, 30.3, 30.6], [31.4, 31.3, 31.9, 31.5]
    base, head = token_runs(tmp_path, *lengths)
    text = text_of(*further(base, head), "--fail-on", "step_p50_ns[phase=decode] > +2%", code=1)
    assert text.startswith("decode steps are 1.10 ms slower (+3.6 %; p50 30.4 → 31.4 ms)")
    assert "one run each" not in text and "two modes" not in text
    assert "medians of 4 + 4 runs, p = 0.029" in text
    few = text_of(*further(base[:3], head[:3]))
    assert few.startswith("decode p50 30.3 → 31.4 ms: 3 + 3 runs are too few to tell a change from run-to-run spread")
    assert "one run each" not in few


def test_a_gate_without_significance_says_so(tmp_path: Path) -> None:
    """S-04: a condition counts as written."""
    base, head = token_runs(tmp_path, [30.3, 30.4, 38.4, 30.2, 38.6], [38.5, 38.3, 30.5, 38.4, 30.3])
    text = text_of(*further(base, head), *SLOWER, code=1)
    assert text.startswith("no significant change (decode p50 30.4 → 38.3 ms")
    assert re.search(
        r"FAILS: .*\(30\.4 → 38\.3 ms, \+26\.0 %; medians of 5 \+ 5 runs, within their spread, p = 0\.\d+\)", text
    )


def test_every_run_of_a_side_must_be_comparable(tmp_path: Path) -> None:
    """S-04 and S-05, S-06: one run of another model, one without GPU work."""
    base, head = token_runs(tmp_path, [30.3, 30.4], [30.5, 30.2])
    other = written(stepping([(f"other_{k}_kernel", MS) for k in range(30)], 12), tmp_path, "other.sqlite")
    done = infprof("compare", *further(base, [*head, other]), *SLOWER)
    assert done.returncode == 3
    assert re.search(
        r"not comparable: other\.sqlite against head-1\.sqlite, both HEAD: kernels in common 0 %", done.stderr
    )
    assert "NOT JUDGED" in done.stdout
    empty = written(nothing_recorded(), tmp_path, "empty.sqlite")
    done = infprof("compare", *further([*base, empty], head))
    assert done.returncode == 3 and re.search(r"BASE, \S+empty\.sqlite, has no GPU work", done.stderr)


def test_a_run_counts_once(tmp_path: Path) -> None:
    """S-04: and is never written to."""
    base, head = token_runs(tmp_path, [30.3, 30.4], [30.5, 30.2])
    done = infprof("compare", *further([*base, base[0]], head))
    assert done.returncode == 2 and "is given twice for BASE: each run counts once" in done.stderr
    done = infprof("compare", *further(base, head), "-o", head[1], "--force")
    assert done.returncode == 2


def test_runs_of_a_side_that_were_not_started_alike_are_named(tmp_path: Path) -> None:
    """S-04 and D-34."""
    paths = []
    for number, flags in enumerate(([], [], ["--enforce-eager"])):
        builder = with_command(stepping(MODEL), [*LIST, *flags])
        paths.append(written(builder, tmp_path, f"base-{number}.sqlite"))
    head = written(with_command(stepping(MODEL), LIST), tmp_path, "head.sqlite")
    assert "Not started alike: base-2.sqlite of BASE has other flags than base-1.sqlite." in text_of(
        *further(paths, [head])
    )
