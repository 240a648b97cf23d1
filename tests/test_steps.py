"""Steps: found by ranges, by graph launches, and with no annotation at all, against runs whose steps are known."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import step_workloads as w
from case_builders import infprof
from infprof.errors import UsageError
from infprof.measures.operations import Prepared
from infprof.readers import read
from infprof.simulator import parse_spec, simulate, write_nsys_sqlite
from infprof.simulator.answer import answer
from infprof.steps.finding import LaneSteps, find_steps
from infprof.steps.lanes import lanes
from infprof.trace import SCHEMA, IntArray, Table, Trace

Workload = Callable[[], dict[str, Any]]


def simulated(spec: dict[str, Any], folder: Path) -> Path:
    return write_nsys_sqlite(simulate(parse_spec(spec)), folder / "trace.sqlite")


def true_steps(trace: Trace) -> dict[tuple[int, int], IntArray]:
    """(process, device) → for each true step the number of kernels that were launched before it."""
    prepared, found = Prepared(trace), {}
    table, calls = trace.ranges, trace.api_calls
    assert table is not None and calls is not None
    named = np.array([text.startswith("step ") for text in trace.strings])[table["text"]]
    for lane in lanes(prepared):
        begun = np.sort(table["start"][named & (table["thread"] == lane.thread)])
        units = np.searchsorted(calls["start"][lane.launch], begun)
        found[lane.process, lane.device] = kernels_before(lane.kernels)[units]
    return found


def kernels_before(kernels: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(kernels)])


def found_steps(steps: LaneSteps) -> IntArray:
    """For each found step the number of kernels before it."""
    units = np.searchsorted(steps.lane.first, steps.first[steps.is_step])
    return kernels_before(steps.lane.kernels)[units]


def agreement(true: IntArray, found: IntArray) -> tuple[float, float]:
    """The share of true steps found to within a kernel, and of found ones that are true."""
    if not len(found):
        return 0.0, 0.0
    near = np.abs(true[:, None] - found[None, :]) <= 1
    return float(near.any(axis=1).mean()), float(near.any(axis=0).mean())


def without_ranges(path: Path) -> Trace:
    trace = read(path)
    trace.ranges = None
    return trace


@pytest.mark.parametrize("workload", w.WORKLOADS, ids=lambda f: f.__name__)
def test_steps_are_found_without_any_annotation(workload: Workload, tmp_path: Path) -> None:
    path = simulated(workload(), tmp_path)
    true = true_steps(read(path))
    found = find_steps(Prepared(without_ranges(path)))
    assert {(s.process, s.device) for s in found} == set(true)
    for steps in found:
        recall, precision = agreement(true[steps.process, steps.device], found_steps(steps))
        assert recall >= 0.99 and precision >= 0.99, (steps.how, steps.why_none)


@pytest.mark.parametrize("workload", [f for f in w.WORKLOADS if f is not w.no_layers], ids=lambda f: f.__name__)
def test_the_kernels_of_a_language_model_are_enough(workload: Workload, tmp_path: Path) -> None:
    """No calls, no copies, no ranges: nothing but kernel names in the order in which they ran."""
    path = simulated(workload(), tmp_path)
    counts = {key: len(true) for key, true in true_steps(read(path)).items()}
    trace = without_ranges(path)
    trace.api_calls = trace.copies = trace.memsets = None
    for steps in find_steps(Prepared(trace)):
        assert int(steps.is_step.sum()) == counts[steps.process, steps.device], (steps.how, steps.why_none)


DESCRIBED = {
    "graphs": {},
    "eager": {"engine": {"cuda_graphs": False}},
    "sync in each layer": {"fault": "sync"},
    "offloaded": {"fault": "offload"},
    "offloaded beside the kernels": {"fault": "offload", "prefetch": True},
    "sampling on the host": {"fault": "host-sampling"},
    "chunked prefill": {
        "engine": {"step_tokens": 128},
        "requests": {"count": 24, "prompt": 500, "output": 24, "rate": 80},
    },
    "joins and leaves": {"requests": {"count": 64, "prompt": 60, "output": 20, "rate": 200}},
    "long prompts": {"requests": {"count": 20, "prompt": 3000, "output": 30, "rate": 30}},
    "requests thrown out": {"fault": "kv-pressure"},
    "two ranks": {"tensor_parallel": 2},
    "graphs traced whole": {"graph_trace": "graph"},
    "graphs in pieces": {"engine": {"pieces": 4}},
    "little demand": {"fault": "low-demand"},
}


@pytest.mark.parametrize("described", DESCRIBED.values(), ids=DESCRIBED)
def test_steps_of_the_serving_engine_are_found_without_annotation(described: dict[str, Any], tmp_path: Path) -> None:
    from infprof.simulator.loading import load_spec

    text = {
        "name": "run",
        "jitter": 0.1,
        "seed": 5,
        "workload": {"preset": "3b", "layers": 8, "steps": 60, **described},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(text))
    played = simulate(load_spec(tmp_path / "run.yaml"))
    path = write_nsys_sqlite(played, tmp_path / "run.sqlite")
    truth = answer(played)["steps"]
    prepared = Prepared(without_ranges(path))
    ops = prepared.operations
    for steps in find_steps(prepared):
        device = prepared.trace.devices[steps.device].id
        begun = np.array([s["gpu_start_ns"] for s in truth if s["device"] == device])
        ran = np.sort(ops.start[steps.lane.rows[np.isin(ops.kind[steps.lane.rows], (0, 1))]])
        first = ops.start[steps.lane.rows[steps.first[steps.is_step]]]
        recall, precision = agreement(np.searchsorted(ran, begun), np.searchsorted(ran, first))
        assert recall >= 0.99 and precision >= 0.99, (steps.how, steps.why_none)


def test_one_kernel_repeated_has_no_steps(tmp_path: Path) -> None:
    spec = w.base([{"pid": 1, "threads": [{"run": [{"launch": "gemm", "count": 300}]}]}])
    (steps,) = find_steps(Prepared(read(simulated(spec, tmp_path))))
    assert not len(steps)
    assert steps.why_none is not None and "one operation repeated" in steps.why_none


def test_layers_of_a_single_pass_are_not_taken_for_steps(tmp_path: Path) -> None:
    """One prefill: its layers repeat, and nothing in them says that each is a step."""
    spec = w.base([{"pid": 1, "threads": [{"run": w.forward(w.PREFILL_LAYER, 40, ["argmax"])}]}])
    (steps,) = find_steps(Prepared(read(simulated(spec, tmp_path))))
    assert not steps.is_step.any()
    assert steps.why_none is not None and "a step and not a layer" in steps.why_none


def test_unlike_kernels_have_no_steps(tmp_path: Path) -> None:
    run = w.launches(list(w.KERNELS))
    (steps,) = find_steps(Prepared(read(simulated(w.base([{"pid": 1, "threads": [{"run": run}]}]), tmp_path))))
    assert not len(steps) and steps.why_none


# --- by ranges -------------------------------------------------------------------------------------------------------


def with_ranges(names: list[str], **more: Any) -> dict[str, Any]:
    spec = w.spec([[*w.FEED, *w.forward(w.DECODE_LAYER, 4, ["argmax"]), *w.READ] for _ in names], **more)
    run = spec["processes"][0]["threads"][0]["run"]
    for name, action in zip(names, [a for a in run if "range" in a], strict=True):
        action["range"] = name
    return spec


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("execute_context_0(0)_generation_16(16)", "vLLM's step ranges"),
        ("execute_new_1_cached_15", "vLLM's step ranges"),
        ("step[DECODE bs=16]", "SGLang's step ranges"),
        ("[Executor] _forward_step 7: 0 ctx reqs, 16 gen reqs", "TensorRT-LLM's step ranges"),
        ("ProfilerStep#{n}", "the profiler's steps"),
        ("iteration {n}", "numbered step ranges"),
        ("decode", "ranges named for their phase"),
    ],
)
def test_ranges_of_engines_are_steps(name: str, how: str, tmp_path: Path) -> None:
    spec = with_ranges([name.replace("{n}", str(n)) for n in range(6)])
    (steps,) = find_steps(Prepared(read(simulated(spec, tmp_path))))
    assert steps.how == how
    assert int(steps.is_step.sum()) == 6


def test_the_profilers_steps_give_way_to_the_engines_inside_them(tmp_path: Path) -> None:
    spec = with_ranges([f"execute_context_0(0)_generation_{n}({n})" for n in range(1, 9)])
    run = spec["processes"][0]["threads"][0]["run"]
    spec["processes"][0]["threads"][0]["run"] = [
        {"range": "ProfilerStep#1", "do": run[: len(run) // 2]},
        {"range": "ProfilerStep#2", "do": run[len(run) // 2 :]},
    ]
    (steps,) = find_steps(Prepared(read(simulated(spec, tmp_path))))
    assert steps.how == "vLLM's step ranges" and int(steps.is_step.sum()) == 8


def test_ranges_of_a_thread_that_launches_nothing_do_not_count(tmp_path: Path) -> None:
    spec = with_ranges([f"step {n}" for n in range(10)])
    idle = [{"range": f"step {n}", "do": [{"host": "200us"}]} for n in range(40)]
    spec["processes"][0]["threads"].append({"name": "logger", "run": idle})
    (steps,) = find_steps(Prepared(read(simulated(spec, tmp_path))))
    assert int(steps.is_step.sum()) == 10


def test_a_range_that_occurs_once_is_no_step_by_its_number_alone(tmp_path: Path) -> None:
    spec = with_ranges([f"execute_context_0(0)_generation_{n}({n})" for n in range(1, 9)])
    spec["processes"][0]["threads"][0]["run"].insert(0, {"range": "batch 0", "do": w.launches(["fill"] * 5)})
    (steps,) = find_steps(Prepared(read(simulated(spec, tmp_path))))
    assert steps.how == "vLLM's step ranges" and int(steps.is_step.sum()) == 8


def test_what_is_read_back_behind_a_range_belongs_to_its_step(tmp_path: Path) -> None:
    """Sampling outside the range of the forward pass does not make a stretch of its own."""
    steps = [{"range": f"step {n}", "do": w.forward(w.DECODE_LAYER, 6, [])} for n in range(8)]
    run = [action for step in steps for action in (step, *w.launches(["softmax", "argmax"]), *w.READ)]
    spec = w.base([{"pid": 1, "threads": [{"run": run}]}])
    (found,) = find_steps(Prepared(read(simulated(spec, tmp_path))))
    assert found.is_step.all() and len(found) == 8


@pytest.mark.parametrize("pattern", ["turn 3", "turn*"])
def test_the_user_says_what_a_step_is(pattern: str, tmp_path: Path) -> None:
    path = simulated(with_ranges([f"turn {n}" for n in range(6)]), tmp_path)
    (steps,) = find_steps(Prepared(read(path)), pattern)
    assert int(steps.is_step.sum()) == (1 if pattern == "turn 3" else 6)
    assert steps.how == f"--step-range {pattern}"
    done = infprof("analyze", "--json", "--step-range", pattern, path)
    assert json.loads(done.stdout)["steps"]["how_found"] == f"--step-range {pattern}"


def test_a_step_range_that_is_not_there_ends_in_one_sentence(tmp_path: Path) -> None:
    path = simulated(with_ranges([f"turn {n}" for n in range(6)]), tmp_path)
    with pytest.raises(UsageError, match=r"no range or annotation is named 'trun 1'\. Did you mean 'turn 1'"):
        find_steps(Prepared(read(path)), "trun 1")
    done = infprof("analyze", "--step-range", "trun 1", path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "Did you mean" in done.stderr


@pytest.mark.parametrize("option", ["--step-range", "--range"])
def test_where_no_range_comes_near_those_that_are_there_are_named(option: str, tmp_path: Path) -> None:
    path = simulated(with_ranges([f"turn {n}" for n in range(8)]), tmp_path)
    done = infprof("analyze", option, "forward", path)
    assert done.returncode == 2
    assert re.search(
        r"no range or annotation is named 'forward'\. There are: ('turn \d', ){4}'turn \d' and 3 more", done.stderr
    )
    bare = without_ranges(path)
    with pytest.raises(UsageError, match="no NVTX ranges"):
        find_steps(Prepared(bare), "turn*")


# --- properties ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batching(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(w.continuous_batching(), tmp_path_factory.mktemp("batching"))


SHIFTED = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SHIFTED
@given(offset=st.integers(-(10**12), 10**15))
def test_the_time_origin_changes_nothing(offset: int, batching: Path) -> None:
    trace, moved = without_ranges(batching), without_ranges(batching)
    for name, columns in SCHEMA.items():
        table = getattr(moved, name)
        if table is not None:
            shifted = {c: table[c] + offset if what == "time" else table[c] for c, what in columns.items()}
            setattr(moved, name, Table(name, shifted))
    (before,), (after,) = find_steps(Prepared(trace)), find_steps(Prepared(moved))
    assert np.array_equal(found_steps(before), found_steps(after))
    assert np.array_equal(before.start + offset, after.start) and np.array_equal(before.end + offset, after.end)


@SHIFTED
@given(names=st.lists(st.text("abcxyz_<>:", min_size=1, max_size=12), min_size=40, max_size=40, unique=True))
def test_other_names_for_kernels_change_no_boundary(names: list[str], batching: Path) -> None:
    trace, renamed = without_ranges(batching), without_ranges(batching)
    assert renamed.kernels is not None
    for number, text in zip(np.unique(renamed.kernels["name"]).tolist(), names, strict=False):
        renamed.strings[number] = f"k{text}"
    (before,), (after,) = find_steps(Prepared(trace)), find_steps(Prepared(renamed))
    assert np.array_equal(found_steps(before), found_steps(after))


def lengths_of_steps(spec: dict[str, Any], folder: Path) -> list[int]:
    """How many kernels each step has."""
    (steps,) = find_steps(Prepared(without_ranges(simulated(spec, folder))))
    return np.diff(np.append(found_steps(steps), steps.lane.kernels.sum())).tolist()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    return lengths_of_steps(w.sampling_varies(), tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("dropped", [1, 2, 5, 11, 18, 26, 37, 38])
def test_one_step_less_is_one_step_less(dropped: int, whole: list[int], tmp_path: Path) -> None:
    spec = w.sampling_varies()
    del spec["processes"][0]["threads"][0]["run"][2 * dropped : 2 * dropped + 2]
    assert lengths_of_steps(spec, tmp_path) == whole[:dropped] + whole[dropped + 1 :]


# --- real traces -----------------------------------------------------------------------------------------------------

# File → how often a step is there by the program's own ranges, and those ranges.
REAL = {
    "kineto/a100_dlrm_rank3_of8.json.gz": (6, None),
    "kineto/dlrm_sampled_rank0_of128.json.gz": (2, None),
    "kineto/rtx2080ti_resnet.json.gz": (30, "Optimizer.step#SGD.step"),
}


@pytest.mark.parametrize("name", REAL)
def test_real_steps_are_found_with_and_without_ranges(name: str, shared_traces: Path) -> None:
    """By the ranges of the program, and by what repeats when they are taken away."""
    count, pattern = REAL[name]
    path = shared_traces / name
    by_range = find_steps(Prepared(read(path)), pattern)[0]
    alone = find_steps(Prepared(without_ranges(path)))[0]
    assert int(by_range.is_step.sum()) == count
    assert int(alone.is_step.sum()) == count, (alone.how, alone.why_none)
    assert "repetition" in alone.how


@pytest.mark.parametrize(
    "name",
    ["b200_vllm_eager_tp8", "h100_qwen1.5-0.5b", "h100_vit_small", "mi300x_bert_small", "mi300x_timesformer"],
)
def test_the_layers_of_one_real_pass_are_not_taken_for_steps(name: str, shared_traces: Path) -> None:
    for steps in find_steps(Prepared(without_ranges(shared_traces / "kineto" / f"{name}.json.gz"))):
        assert not steps.is_step.any(), steps.how
