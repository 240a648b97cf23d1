"""The workload without PyTorch: presets, faults, the block manager, the scheduler, and what the command line says."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from infprof import resources, results
from infprof.cli import app
from infprof.errors import UsageError
from infprof.workload.blocks import BlockManager
from infprof.workload.faults import FAULTS, describe_faults, find_fault
from infprof.workload.presets import PRESETS, ModelShape
from infprof.workload.requests import FINISHED, RUNNING, WAITING, Request, Sampling
from infprof.workload.runner import RunOptions, run_workload
from infprof.workload.scheduler import Scheduler
from infprof.workload.settings import EngineSettings, RequestsSettings

BLOCK = 4


def request(number: int, prompt: int, output: int, priority: int = 0) -> Request:
    return Request(f"r{number}", tuple(range(prompt)), Sampling(max_tokens=output), priority, number)


def scheduler(blocks: int = 101, batch: int = 8, tokens: int = 64) -> Scheduler:
    return Scheduler(BlockManager(blocks, BLOCK), batch, tokens)


def play(queue: Scheduler, requests: list[Request]) -> list[str]:
    """One step, with a token for each request that reaches its end. Returns its range name, or nothing."""
    step = queue.schedule()
    queue.blocks.check(requests)
    if step is None:
        return []
    for chunk, samples in [(chunk, chunk.samples) for chunk in step.chunks]:
        chunk.request.computed = chunk.end
        if samples:
            chunk.request.output.append(0)
            if len(chunk.request.output) == chunk.request.sampling.max_tokens:
                queue.finish(chunk.request, "length")
    queue.blocks.check(requests)
    return [step.name]


@pytest.mark.parametrize(("name", "billions"), [("small", 0.13), ("1b", 1.1), ("3b", 3.6), ("7b", 6.74)])
def test_presets_have_the_size_that_they_are_named_for(name: str, billions: float) -> None:
    assert PRESETS[name].shape.parameters / 1e9 == pytest.approx(billions, rel=0.05)


def test_parameters_and_cache_are_counted() -> None:
    shape = ModelShape(vocabulary=10, hidden=8, layers=3, heads=4, kv_heads=2, intermediate=6, context=32)
    attention, mlp, norms = 8 * 8 + 2 * 8 * 4 + 8 * 8, 3 * 8 * 6, 2 * 8
    assert shape.parameters == 3 * (attention + mlp + norms) + 2 * 10 * 8 + 8
    assert shape.kv_bytes_per_token(2) == 2 * 3 * 2 * 2 * 2


def test_a_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="heads must divide"):
        ModelShape(vocabulary=10, hidden=8, layers=1, heads=3, kv_heads=1, intermediate=6, context=32)


def rule_ids() -> set[str]:
    files = resources.rules_dir().rglob("*.yaml")
    return {str(yaml.safe_load(file.read_text(encoding="utf-8")).get("id")) for file in files}


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_fault_expects_is_something_that_a_diagnosis_can_say(name: str) -> None:
    expected = FAULTS[name].expected
    assert expected.classes
    assert set(expected.classes) <= set(results.VERDICT_CLASSES)
    assert set(expected.causes) <= {*results.IDLE_CAUSES, "pageable", "small-copies", "volume", "link-downgrade"}
    assert set(expected.findings) <= rule_ids()


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "none"])
def test_every_fault_changes_something(name: str) -> None:
    healthy = EngineSettings(), RequestsSettings()
    assert FAULTS[name].apply(*healthy) != healthy


def test_no_fault_changes_nothing() -> None:
    healthy = EngineSettings(), RequestsSettings()
    assert FAULTS["none"].apply(*healthy) == healthy


@given(st.integers(1, 600), st.integers(2, 300), st.integers(2, 40), st.integers(1, 40))
def test_a_cache_under_pressure_is_too_small_for_the_batch_and_large_enough_for_each_request(
    prompt: int, output: int, count: int, batch: int
) -> None:
    engine, sent = FAULTS["kv-pressure"].apply(EngineSettings(max_batch=batch), RequestsSettings(count, prompt, output))
    assert engine.kv_blocks is not None
    usable, size = engine.kv_blocks - 1, engine.block_size
    longest = -(-sent.longest // size)
    assert usable >= longest
    # More than one request's worth is given only as far as a batch of average requests does not fit.
    assert usable == longest or usable < min(batch, count) * -(-(prompt + output) // size)


def test_a_misspelt_fault_is_named_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match=r"no fault called of-load\. Did you mean offload"):
        find_fault("of-load")


def test_steps_are_named_as_vllm_does() -> None:
    queue = scheduler(tokens=10)
    requests = [request(0, 3, 4), request(1, 12, 2)]
    for one in requests:
        queue.add(one)
    names = [name for _ in range(4) for name in play(queue, requests)]
    assert names == [
        "execute_context_2(10)_generation_0(0)",  # 3 tokens, and 7 of 12
        "execute_context_1(5)_generation_1(1)",  # the other 5, beside the first one's second token
        "execute_context_0(0)_generation_2(2)",
        "execute_context_0(0)_generation_1(1)",
    ]
    assert [one.status for one in requests] == [FINISHED, FINISHED]


def test_requests_join_when_others_leave() -> None:
    queue = scheduler(batch=2)
    requests = [request(0, 4, 1), request(1, 4, 3), request(2, 4, 1)]
    for one in requests:
        queue.add(one)
    play(queue, requests)
    assert [one.status for one in requests] == [FINISHED, RUNNING, WAITING]
    assert play(queue, requests) == ["execute_context_1(4)_generation_1(1)"]


def test_urgent_requests_go_first_and_equal_ones_in_order() -> None:
    queue = scheduler(batch=1)
    requests = [request(0, 4, 1, priority=1), request(1, 4, 1), request(2, 4, 1)]
    for one in requests:
        queue.add(one)
    ended = []
    while queue.waiting or queue.running:
        play(queue, requests)
        ended += [one.number for one in requests if one.status == FINISHED and one.number not in ended]
    assert ended == [1, 2, 0]


def test_the_last_one_is_thrown_out_when_blocks_run_out() -> None:
    queue = scheduler(blocks=5)
    requests = [request(0, 8, 9), request(1, 8, 9)]
    for one in requests:
        queue.add(one)
    play(queue, requests)
    assert play(queue, requests) == ["execute_context_0(0)_generation_1(1)"]
    assert (requests[1].status, requests[1].preemption_count, requests[1].computed) == (WAITING, 1, 0)
    assert queue.preemption_count == 1


def test_a_request_that_never_fits_is_refused() -> None:
    queue = scheduler(blocks=3)
    queue.add(request(0, 7, 2))
    with pytest.raises(ValueError, match="needs 3 blocks of the KV cache, which has 2"):
        queue.add(request(1, 8, 2))


def test_lost_blocks_are_noticed() -> None:
    blocks = BlockManager(4, BLOCK)
    one = request(0, 8, 2)
    assert blocks.reserve(one, 8)
    one.blocks.pop()
    with pytest.raises(AssertionError, match="1 blocks held and 1 free are not the 3"):
        blocks.check([one])


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=12),
    st.integers(0, 20),
    st.integers(1, 6),
    st.integers(0, 30),
    st.lists(st.sampled_from(["add", "step", "step", "cancel"]), max_size=60),
)
def test_all_requests_end_and_no_block_is_lost(
    lengths: list[tuple[int, int, int]], spare: int, batch: int, tokens: int, events: list[str]
) -> None:
    requests = [request(i, prompt, output, priority) for i, (prompt, output, priority) in enumerate(lengths)]
    least = max(-(-one.most_cached // BLOCK) for one in requests)
    queue = scheduler(least + spare + 1, batch, batch + tokens)
    to_come, steps = list(requests), 0
    events = [*reversed(events)]
    while to_come or queue.waiting or queue.running:
        event = events.pop() if events else "add" if to_come else "step"
        if event == "add" and to_come:
            queue.add(to_come.pop())
        elif event == "cancel" and (queue.running or queue.waiting):
            # The one that matters most, and the one that matters least.
            queue.finish((queue.running + queue.waiting)[-(steps % 2)], "cancelled")
        names = play(queue, requests)
        assert names or not (queue.waiting or queue.running)
        assert len(queue.running) <= batch
        steps += 1
        assert steps < 5000
    assert queue.blocks.free == queue.blocks.usable
    assert all(len(one.output) == one.sampling.max_tokens or one.finish_reason == "cancelled" for one in requests)


def run_cli(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["workload", *arguments])


def test_the_list_names_every_preset_and_fault() -> None:
    text = run_cli("list").stdout
    for word in (*PRESETS, *FAULTS, "GPU only: CUDA graphs exist only there", "class pcie-limited; cause pageable"):
        assert word in text


def test_the_list_as_json_says_what_must_be_found() -> None:
    faults = {fault["name"]: fault for fault in json.loads(run_cli("list", "--json").stdout)["faults"]}
    assert faults == {fault["name"]: fault for fault in describe_faults()}
    assert faults["pageable"]["expected"]["classes"] == ["pcie-limited"]
    assert faults["pageable"]["devices"] == ["cpu", "gpu"]
    assert faults["no-graphs"]["devices"] == ["gpu"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RunOptions(preset="70b"), "There is no preset called 70b. There are: tiny, small"),
        (RunOptions(fault="lunch"), "There is no fault called lunch. Did you mean launch?"),
        (RunOptions(dtype="int8"), "--dtype int8: choose bfloat16, float16, float32 or float64."),
        (RunOptions(device="tpu"), "--device tpu: choose auto, cpu or cuda."),
        (RunOptions(fault="fp32", dtype="bfloat16"), "--fault fp32 computes in float32: leave --dtype away."),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_sentence(options: RunOptions, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        run_workload(options)
    assert message in str(caught.value)


def test_without_torch_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=r"needs PyTorch: pip install 'infprof\[torch\]'\.") as caught:
        run_workload(RunOptions())
    assert caught.value.exit_code == 2
