"""The workload with PyTorch, on the CPU: paging, batching and faults give the tokens that plain generation gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from infprof import readers  # noqa: E402
from infprof.errors import EXIT_UNUSABLE, UsageError  # noqa: E402
from infprof.workload.engine import Engine  # noqa: E402
from infprof.workload.faults import FAULTS  # noqa: E402
from infprof.workload.model import Model  # noqa: E402
from infprof.workload.presets import ModelShape  # noqa: E402
from infprof.workload.requests import Request, Sampling  # noqa: E402
from infprof.workload.runner import RunOptions, run_workload  # noqa: E402
from infprof.workload.sampling import Draw, choose  # noqa: E402
from infprof.workload.settings import EngineSettings, RequestsSettings  # noqa: E402

SHAPE = ModelShape(vocabulary=97, hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, context=128)
EXACT = EngineSettings(dtype="float64", block_size=4, context=128, step_tokens=24, max_batch=4)
# Rounding in float64 moves these logits by less than 1e-12: two orders of summation cannot swap the first two tokens.
CLEAR_LEAD = 1e-9

ON_CPU = [name for name, fault in FAULTS.items() if fault.gpu_only is None]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors; more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def naive_attention(_: int, q: Any, k: Any, v: Any) -> Any:
    """The textbook's causal attention of one whole sequence, head by head."""
    groups, count = q.shape[1] // k.shape[1], len(q)
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // groups].T / q.shape[2] ** 0.5
        visible = torch.tril(torch.ones(count, count, dtype=torch.bool))
        heads.append(scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v[:, head // groups])
    return torch.cat(heads, dim=1)


def plain_generation(prompt: Sequence[int], count: int, seed: int = 0) -> tuple[list[int], float]:
    """Greedy tokens with no cache and nothing else in the batch, and the smallest lead of a chosen token."""
    tokens, lead = list(prompt), float("inf")
    with torch.inference_mode():
        model = Model(SHAPE, replace(EXACT, seed=seed), torch.float64)
        for _ in range(count):
            hidden = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), naive_attention)
            best = model.logits(hidden[-1:])[0].topk(2)
            lead = min(lead, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], lead


def serve(engine: Engine) -> None:
    while engine.has_work():
        engine.step()
        engine.check_blocks()


lengths = st.tuples(st.integers(1, 40), st.integers(1, 14))


@settings(deadline=None, max_examples=40)
@given(
    requests=st.lists(lengths, min_size=1, max_size=8),
    events=st.lists(st.sampled_from(["add", "add", "step", "step", "cancel"]), max_size=30),
    spare_blocks=st.integers(0, 16),
    step_tokens=st.integers(8, 48),
    batch=st.integers(1, 8),
    block_size=st.sampled_from([1, 3, 4, 16]),
    static=st.booleans(),
    seed=st.integers(0, 5),
)
def test_greedy_output_is_that_of_plain_generation(
    requests: list[tuple[int, int]],
    events: list[str],
    spare_blocks: int,
    step_tokens: int,
    batch: int,
    block_size: int,
    static: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(97, (length,), generator=generator).tolist() for length, _ in requests]
    least = max(-(-(prompt + output) // block_size) for prompt, output in requests)
    engine = Engine(
        SHAPE,
        replace(
            EXACT,
            seed=seed,
            block_size=block_size,
            kv_blocks=1 + least + spare_blocks,
            step_tokens=step_tokens,
            max_batch=batch,
            static_decode=static,
        ),
    )
    waiting = list(zip(prompts, (output for _, output in requests), strict=True))
    served: list[Request] = []
    for event in events:
        if event == "add" and waiting:
            prompt, output = waiting.pop()
            served.append(engine.add_request(prompt, Sampling(max_tokens=output)))
        elif event == "cancel" and served:
            engine.cancel(served[len(served) // 2].id)
        else:
            engine.step()
        engine.check_blocks()
    served += [engine.add_request(prompt, Sampling(max_tokens=output)) for prompt, output in waiting]
    serve(engine)
    assert engine.stats().free_kv_blocks == engine.stats().kv_blocks
    for request in served:
        expected, lead = plain_generation(request.prompt, request.sampling.max_tokens, seed)
        assume(lead > CLEAR_LEAD)
        assert request.output == expected[: len(request.output)]
        assert request.finish_reason == "cancelled" or len(request.output) == len(expected)


def test_a_request_that_was_thrown_out_goes_on_where_it_was() -> None:
    engine = Engine(SHAPE, replace(EXACT, kv_blocks=9))
    requests = [engine.add_request([3 * i, 5, 7 * i + 1], Sampling(max_tokens=20)) for i in range(4)]
    serve(engine)
    stats = engine.stats()
    assert stats.preemption_count >= 2
    assert stats.prompt_tokens == 12 < stats.computed_prompt_tokens
    assert stats.kv_cache_usage_peak_ratio == 1.0
    for request in requests:
        assert request.output == plain_generation(request.prompt, 20)[0]


@pytest.mark.parametrize("count", [1, 3, 5, 6, 7])
def test_rows_that_only_fill_a_fixed_shape_up_change_nothing(count: int) -> None:
    engine = Engine(SHAPE, replace(EXACT, max_batch=8, static_decode=True))
    requests = [engine.add_request([11 * i + 1, 5, i], Sampling(max_tokens=6)) for i in range(count)]
    serve(engine)
    assert engine.stats().steps == {"prefill": 1, "decode": 5}
    for request in requests:
        assert request.output == plain_generation(request.prompt, 6)[0]


def test_long_prompts_go_in_pieces_beside_the_decodes() -> None:
    engine = Engine(SHAPE, replace(EXACT, step_tokens=8))
    short = engine.add_request([1, 2], Sampling(max_tokens=12))
    engine.step()
    long = engine.add_request(list(range(30)), Sampling(max_tokens=3))
    serve(engine)
    assert engine.stats().steps == {"prefill": 1, "mixed": 5, "decode": 6}
    assert long.output == plain_generation(long.prompt, 3)[0]
    assert short.output == plain_generation(short.prompt, 12)[0]


def test_a_stop_token_ends_a_request() -> None:
    expected, _ = plain_generation([1, 2, 3], 10)
    engine = Engine(SHAPE, EXACT)
    request = engine.add_request([1, 2, 3], Sampling(10, stop_token_ids=frozenset({expected[4]})))
    serve(engine)
    assert (request.output, request.finish_reason) == (expected[: expected.index(expected[4]) + 1], "stop")


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], Sampling(), "the prompt is empty"),
        ([1, 97], Sampling(), "tokens go from 0 to 96"),
        ([1] * 100, Sampling(29), "100 prompt tokens and 29 of output are more than the context of 128 tokens"),
        ([1] * 60, Sampling(10), "needs 18 blocks of the KV cache, which has 10"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(prompt: list[int], sampling: Sampling, message: str) -> None:
    engine = Engine(SHAPE, replace(EXACT, kv_blocks=11))
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, sampling)
    assert not engine.has_work()


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = Engine(SHAPE, EXACT)
    engine.add_request([1], Sampling(1), request_id="a")
    with pytest.raises(ValueError, match="called a already"):
        engine.add_request([1], Sampling(1), request_id="a")
    serve(engine)
    assert engine.add_request([1], Sampling(1), request_id="a").id == "a"


def test_what_is_cancelled_during_a_step_gets_no_token_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(SHAPE, EXACT)
    gone, stays = (engine.add_request([i, 2, 3], Sampling(4)) for i in range(2))
    execute = engine._runner.execute

    def cancel_meanwhile(prepared: Any) -> list[int]:
        # From another thread, as a server does: it must not wait for the step.
        thread = threading.Thread(target=engine.cancel, args=(gone.id,))
        thread.start()
        thread.join(timeout=10)
        assert not thread.is_alive()
        return execute(prepared)

    monkeypatch.setattr(engine._runner, "execute", cancel_meanwhile)
    outputs = engine.step()
    monkeypatch.undo()
    serve(engine)
    assert [output.request_id for output in outputs] == [stays.id]
    assert (gone.output, gone.finish_reason) == ([], "cancelled")
    assert stays.output == plain_generation(stays.prompt, 4)[0]
    assert engine.stats().finished == {"cancelled": 1, "length": 1}


def test_many_threads_add_and_cancel_while_it_serves() -> None:
    engine = Engine(SHAPE, replace(EXACT, kv_blocks=30))
    added: list[Request] = []

    def client(number: int) -> None:
        for i in range(8):
            request = engine.add_request([number, i, 1], Sampling(max_tokens=6))
            added.append(request)
            if i % 3 == 2:
                engine.cancel(request.id)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or engine.has_work():
        if engine.wait_for_work(0.01):
            engine.step()
            engine.check_blocks()
    assert len(added) == 40
    assert all(request.finish_reason in ("length", "cancelled") for request in added)
    assert sum(engine.stats().finished.values()) == 40
    assert engine.stats().free_kv_blocks == 29


def test_requests_of_a_step_that_runs_out_of_memory_end_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(SHAPE, EXACT)
    lost = engine.add_request([1, 2], Sampling(4))

    def fail(_: Any) -> list[int]:
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(engine._runner, "execute", fail)
    assert [(o.request_id, o.finish_reason, o.error) for o in engine.step()] == [(lost.id, "error", "no room")]
    monkeypatch.undo()
    engine.check_blocks()
    after = engine.add_request([1, 2], Sampling(4))
    serve(engine)
    assert after.output == plain_generation([1, 2], 4)[0]


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    drawn = Sampling(8, temperature=1.0, seed=5)
    alone = Engine(SHAPE, EXACT)
    first = alone.add_request([4, 5, 6], drawn)
    serve(alone)
    crowd = Engine(SHAPE, replace(EXACT, kv_blocks=9))
    greedy = crowd.add_request([9, 9], Sampling(8))
    again = crowd.add_request([4, 5, 6], drawn)
    other = crowd.add_request([4, 5, 6], replace(drawn, seed=6))
    serve(crowd)
    assert again.output == first.output != other.output
    assert greedy.output == plain_generation([9, 9], 8)[0]


def test_draws_follow_the_softmax_at_their_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20_000, 4)
    tokens = choose(logits, [Draw(2.0, seed, 7) for seed in range(20_000)])
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / 20_000
    # Four standard deviations of a share of 20 000.
    assert torch.allclose(shares, (logits[0] / 2).softmax(-1), atol=4 * 0.5 / 20_000**0.5)


def test_warming_up_leaves_no_trace_in_the_figures() -> None:
    engine = Engine(SHAPE, EXACT)
    engine.warm_up()
    stats = engine.stats()
    assert (stats.output_tokens, stats.steps, stats.finished, stats.free_kv_blocks) == (0, {}, {}, stats.kv_blocks)


def run(fault: str = "none", **options: Any) -> dict[str, Any]:
    sent = RequestsSettings(count=8, prompt_tokens=24, output_tokens=8)
    return run_workload(RunOptions(fault=fault, requests=sent, device="cpu", dtype="float64", **options)).to_dict()


@pytest.fixture(scope="module")
def healthy() -> dict[str, Any]:
    return run()


@pytest.mark.parametrize("fault", [name for name in ON_CPU if name != "none"])
def test_faults_cost_time_and_leave_the_answers_alone(fault: str, healthy: dict[str, Any]) -> None:
    figures = run(fault)
    assert figures["success_count"] == 8
    assert (figures["output_sha256"] == healthy["output_sha256"]) == FAULTS[fault].same_tokens
    if fault == "kv-pressure":
        assert figures["preemption_count"] > 0
        assert figures["computed_prompt_tokens"] > healthy["computed_prompt_tokens"]
    if fault == "small-batch":
        assert figures["step_count"] == figures["output_tokens"]
    if fault == "long-context":
        assert figures["prompt_tokens"] > 10 * healthy["prompt_tokens"]


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in ON_CPU])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_faults_of_a_gpu_say_so_on_the_cpu(fault: str) -> None:
    with pytest.raises(UsageError, match=f"--fault {fault} needs a GPU: ") as caught:
        run_workload(RunOptions(fault=fault))
    assert caught.value.exit_code == 2


def kernels_of(fault: str) -> dict[str, int]:
    """Operators of one decode step under a fault, counted by name."""
    engine_settings, _ = FAULTS[fault].apply(EXACT, RequestsSettings())
    engine = Engine(SHAPE, engine_settings)
    engine.add_request([1, 2], Sampling(4))
    engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.step()
    return {event.key: event.count for event in profile.key_averages()}


def test_faults_do_on_the_device_what_they_say() -> None:
    none = kernels_of("none")
    # One product per layer for QKV, output, MLP in and out, and one for the logits.
    assert none["aten::linear"] == 4 * 2 + 1
    assert kernels_of("launch")["aten::linear"] == 16 * none["aten::linear"]
    # The only answer that a healthy step waits for is its tokens.
    assert none.get("aten::item", 0) == 0
    assert kernels_of("sync")["aten::item"] == 2
    assert kernels_of("offload")["aten::copy_"] == none.get("aten::copy_", 0) + 1
    assert "aten::argmax" in none
    assert "aten::argmax" not in kernels_of("host-sampling")


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from infprof.cli import main; main()", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def test_the_command_prints_figures_and_its_trace_is_read(tmp_path: Path) -> None:
    trace = tmp_path / "run.json.gz"
    small = ("--preset", "tiny", "--requests", "8", "--prompt", "24", "--output", "6", "--device", "cpu")
    done = cli("workload", "run", *small, "--json", "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["success_count"] == figures["request_count"] == 8
    assert figures["output_tokens_per_s"] > 0
    assert figures["ttft_ns"]["count"] == 8
    assert 0 < figures["ttft_ns"]["p50"] <= figures["e2e_latency_ns"]["max"]
    assert figures["tpot_ns"]["p50"] > 0
    assert figures["step_count"] == sum(figures["steps"].values()) == figures["traced_steps"]

    read = readers.read(trace)
    assert read.ranges is not None and read.operators is not None
    names = [read.strings[i] for i in read.ranges["text"]]
    steps = [name for name in names if name.startswith("execute_context_")]
    assert len(steps) == figures["step_count"]
    assert sum(name.startswith("execute_context_0(0)") for name in steps) == figures["steps"]["decode"]
    assert {"workload: schedule", "workload: decode", "workload: sample"} <= set(names)
    assert any(inputs.shapes for inputs in read.inputs)

    analysed = cli("analyze", str(trace), "--json")
    verdict = json.loads(analysed.stdout)["verdict"]
    assert (analysed.returncode, verdict["class"], verdict["code"]) == (EXIT_UNUSABLE, "unusable", "no-gpu-work")

    again = cli("workload", "run", *small, "--trace", str(trace))
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


def test_a_trace_holds_no_more_steps_than_asked_for(tmp_path: Path) -> None:
    trace = tmp_path / "run.json"
    figures = run(trace=trace, trace_steps=3)
    assert figures["traced_steps"] == 3 < figures["step_count"]
    read = readers.read(trace)
    assert read.ranges is not None
    assert sum(read.strings[i].startswith("execute_context_") for i in read.ranges["text"]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_requests_longer_than_the_presets_context_are_refused() -> None:
    sent = RequestsSettings(count=1, prompt_tokens=4000, output_tokens=10)
    with pytest.raises(UsageError, match="up to 6015 tokens exceed the 4096 of preset tiny"):
        run_workload(RunOptions(requests=sent, device="cpu"))
