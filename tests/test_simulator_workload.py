"""The workload on described GPUs: the same batching as the real engine, and a truth that says where its steps are."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from infprof.diagnosis import analyze_file
from infprof.errors import UsageError
from infprof.simulator import answer, parse_spec, write_kineto, write_nsys_sqlite
from infprof.simulator.spec import Step
from infprof.simulator.workload import SIMULATED_FAULTS, compile_workload, parse_workload
from infprof.workload.planning import plan_requests
from infprof.workload.settings import RequestsSettings
from workload_runs import described, played, run_of

TINY = {"preset": "tiny", "requests": {"count": 6, "prompt": 40, "output": 8}, "engine": {"max_batch": 4}}


def steps_of(data: dict[str, Any]) -> list[Step]:
    """The steps of the first rank, in order."""
    actions = parse_spec(data).processes[0].threads[0].run
    return [action.step for action in actions if getattr(action, "step", None)]


def ranges(path: Path) -> list[tuple[int, int, str]]:
    with closing(sqlite3.connect(path)) as db:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'NVTX_EVENTS'").fetchall():
            return []
        return db.execute("SELECT start, end, text FROM NVTX_EVENTS WHERE text IS NOT NULL ORDER BY start").fetchall()


class TestBatching:
    @settings(max_examples=25, deadline=None)
    @given(
        count=st.integers(1, 9),
        prompt=st.integers(1, 90),
        output=st.integers(1, 12),
        batch=st.integers(1, 5),
        chunk=st.integers(5, 64),
        rate=st.none() | st.floats(1, 1e6),
        seed=st.integers(0, 3),
    )
    def test_every_request_joins_and_leaves_and_no_token_is_lost(
        self, count: int, prompt: int, output: int, batch: int, chunk: int, rate: float | None, seed: int
    ) -> None:
        requests: dict[str, Any] = {"count": count, "prompt": prompt, "output": output}
        requests |= {"rate": rate} if rate else {}
        engine = {"max_batch": batch, "step_tokens": chunk}
        workload = {"preset": "tiny", "requests": requests, "engine": engine, "steps": 10_000}
        steps = steps_of({"seed": seed, "workload": workload})
        plans = plan_requests(RequestsSettings(count, prompt, output, seed), 512)
        prompts, outputs = sum(len(p) for p, _ in plans), sum(s.max_tokens for _, s in plans)
        assert sum(s.prefill_tokens for s in steps) == prompts
        assert sum(s.decode_requests for s in steps) == outputs - count
        assert sum(s.joined for s in steps) == sum(s.finished for s in steps) == count
        assert max(s.prefill_tokens + s.decode_requests for s in steps) <= chunk
        assert max(s.prefill_requests + s.decode_requests for s in steps) <= batch

    def test_long_prompts_go_in_pieces_beside_the_decodes(self) -> None:
        workload = {**TINY, "engine": {"max_batch": 4, "step_tokens": 16}}
        steps = steps_of({"workload": workload})
        assert {s.kind for s in steps} == {"prefill", "decode", "mixed"}

    def test_requests_that_arrive_later_join_later(self) -> None:
        at_once = steps_of({"workload": TINY})
        spread = steps_of({"workload": {**TINY, "requests": {**TINY["requests"], "rate": 2000}}})
        assert at_once[0].joined == 4
        assert spread[0].joined == 1 and max(s.joined for s in spread[1:]) >= 1

    def test_a_full_cache_throws_requests_out(self) -> None:
        steps = run_of("kv-pressure")[1]["steps"]
        assert sum(s["preempted"] for s in steps) > 0
        assert sum(s["finished"] for s in steps) == 6

    def test_the_steps_are_those_of_the_real_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("torch")
        from infprof.workload.runner import RunOptions, run_workload
        from infprof.workload.scheduler import Scheduler

        names: list[str] = []
        schedule = Scheduler.schedule

        def noted(self: Scheduler) -> Any:
            step = schedule(self)
            names.extend([step.name] if step else [])
            return step

        monkeypatch.setattr(Scheduler, "schedule", noted)
        sent = RequestsSettings(6, 40, 8, 5)
        run_workload(RunOptions(preset="tiny", requests=sent, max_batch=4, device="cpu"))
        # The real engine warms up first: two requests of two tokens.
        served = names[2:]
        names.clear()
        assert [s.name for s in steps_of({"seed": 5, "workload": TINY})] == served


class TestTruth:
    def test_steps_follow_each_other_on_host_and_gpu(self) -> None:
        for fault in ("none", "sync", "slow-link"):
            trace, truth = run_of(fault)
            for rank in range(len(trace.spec.processes)):
                steps = [s for s in truth["steps"] if s["rank"] == rank]
                assert [s["number"] for s in steps] == list(range(len(steps)))
                assert all(a["end_ns"] <= b["start_ns"] for a, b in pairwise(steps))
                assert all(a["gpu_end_ns"] <= b["gpu_start_ns"] for a, b in pairwise(steps))
                mine = [op for op in trace.ops if op.process == rank]
                assert sum(s["kernel_count"] for s in steps) == sum(op.kind in ("kernel", "comm") for op in mine)

    def test_the_ranges_of_an_annotated_export_are_the_steps(self, tmp_path: Path) -> None:
        trace, truth = run_of("none")
        found = [r for r in ranges(write_nsys_sqlite(trace, tmp_path / "a.sqlite")) if r[2].startswith("execute_")]
        assert found == [(s["start_ns"], s["end_ns"], s["name"]) for s in truth["steps"]]

    def test_without_annotations_the_run_and_its_truth_are_the_same(self, tmp_path: Path) -> None:
        bare = played("none", annotate=False)
        truth, annotated = answer(bare), run_of("none")[1]
        assert truth.pop("workload") != annotated["workload"]
        assert truth == {key: value for key, value in annotated.items() if key != "workload"}
        assert ranges(write_nsys_sqlite(bare, tmp_path / "bare.sqlite")) == []
        (path,) = write_kineto(bare, tmp_path / "bare.json")
        names = {e["name"] for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "user_annotation"}
        assert names == set()

    def test_the_same_seed_gives_the_same_bytes_and_another_one_another_run(self, tmp_path: Path) -> None:
        def written(name: str, **top: Any) -> bytes:
            trace = played("sync", top, preset="tiny", layers=2)
            return write_nsys_sqlite(trace, tmp_path / name).read_bytes()

        assert written("a.sqlite") == written("b.sqlite") != written("c.sqlite", seed=4)

    @pytest.mark.parametrize(
        ("change", "longer"),
        [
            ({"workload": {"kernels": {"gemm": 2.0}}}, "compute_ns"),
            ({"workload": {"host": {"schedule": "3ms"}}}, "idle_ns"),
            ({"costs": {"launch": "30us"}}, "idle_ns"),
        ],
    )
    def test_costs_can_be_changed(self, change: dict[str, Any], longer: str) -> None:
        top = {key: value for key, value in change.items() if key != "workload"}
        usual = answer(played("no-graphs", layers=4))["figures"]["devices"][0]
        changed = answer(played("no-graphs", top, layers=4, **change.get("workload", {})))["figures"]["devices"][0]
        assert changed[longer] > 1.2 * usual[longer]


class TestShapes:
    def test_graphs_are_replayed_for_decode_alone_one_per_shape(self) -> None:
        trace = run_of("none")[0]
        launches = [call for call in trace.calls if call.name.startswith("cudaGraphLaunch")]
        decodes = [step for step in trace.steps if step.step.kind == "decode"]
        assert len(launches) == len(decodes)
        ids = {op.graph_id for op in trace.ops if op.graph_id}
        assert 1 < len(ids) < len(decodes)
        assert not any(call.name.startswith("cudaGraphLaunch") for call in run_of("no-graphs")[0].calls)

    def test_attention_takes_longer_as_contexts_grow(self) -> None:
        trace = run_of("small-batch")[0]
        times: dict[int, list[int]] = {}
        for op in trace.ops:
            if "splitkv" in op.name and op.kernel:
                times.setdefault(int(op.kernel.bytes), []).append(op.kernel.time_ns or 0)
        ordered = [max(times[size]) for size in sorted(times)]
        assert len(ordered) > 5 and ordered == sorted(ordered)

    def test_ranks_add_up_in_every_layer_and_in_graphs_too(self) -> None:
        trace, truth = run_of("slow-link")
        layers = truth["workload"]["layers"]
        sums = [op for op in trace.ops if op.kind == "comm" and "AllReduce" in op.name and op.process == 0]
        assert len(sums) == 2 * layers * len([s for s in truth["steps"] if s["rank"] == 0])
        assert any(op.graph_node for op in sums)

    def test_prefetched_weights_come_on_a_stream_of_their_own_and_hide_behind_kernels(self) -> None:
        usual, ahead = run_of("offload")[0], played("offload", prefetch=True)
        assert {op.stream for op in ahead.ops if op.copy_kind == "h2d" and op.bytes > 1 << 20} == {13}
        copied = [answer(trace)["figures"]["devices"][0]["exposed_copy_ns"] for trace in (usual, ahead)]
        assert copied[1] < copied[0]

    def test_replicas_share_a_gpu_and_the_requests(self, tmp_path: Path) -> None:
        trace = played("none", replicas=2, layers=4)
        assert {op.process for op in trace.ops} == {0, 1} and {op.device for op in trace.ops} == {0}
        assert sum(run.step.finished for run in trace.steps) == 8
        diagnosis = analyze_file(write_nsys_sqlite(trace, tmp_path / "two.sqlite"))
        assert len(diagnosis.devices[0].process_ids) == 2

    def test_graphs_as_a_whole_are_rows_of_their_own(self, tmp_path: Path) -> None:
        trace = played("none", graph_trace="graph", layers=4)
        assert answer(trace)["figures"]["devices"][0]["graph_launch_rows"] > 0
        with pytest.raises(UsageError, match="node by node"):
            write_kineto(trace, tmp_path / "x.json")

    def test_counters_show_the_kernels_of_a_graph_that_is_one_row(self, tmp_path: Path) -> None:
        counters = {"counters": {"rate": 20_000}}
        limiters, verdicts = [], []
        for form in ("node", "graph"):
            trace = played("small-batch", counters, graph_trace=form)
            limiters.append(answer(trace)["devices"][0]["limiter"])
            verdicts.append(analyze_file(write_nsys_sqlite(trace, tmp_path / f"{form}.sqlite")).verdict.cls)
        assert verdicts == [limiter["class"] for limiter in limiters] == ["bandwidth-bound"] * 2
        # In between two nodes nothing runs, which counts as part of a graph that is one row.
        assert limiters[1]["dram_ratio"] == pytest.approx(limiters[0]["dram_ratio"], rel=0.1)

    @pytest.mark.parametrize("version", ["2022.4", "2026"])
    def test_exports_of_other_versions_get_the_same_verdict(self, version: str, tmp_path: Path) -> None:
        trace = played("slow-rank", {"nsys": version})
        verdict = analyze_file(write_nsys_sqlite(trace, tmp_path / "x.sqlite")).verdict
        assert (verdict.cls, verdict.cause) == ("communication-bound", "straggler")

    @pytest.mark.parametrize(
        ("gpu", "dtype", "kernel"),
        [
            ("Tesla T4", "float16", "turing_fp16_s1688gemm"),
            ("NVIDIA L40S", "bfloat16", "ampere_bf16_s16816gemm"),
            ("NVIDIA H200", "bfloat16", "nvjet_tst"),
            ("NVIDIA B200", "bfloat16", "nvjet_sm100_tst"),
        ],
    )
    def test_a_gpu_runs_the_kernels_of_its_kind(self, gpu: str, dtype: str, kernel: str) -> None:
        trace = played("none", gpu=gpu, preset="1b", layers=2)
        truth = answer(trace)
        assert (truth["workload"]["gpu"], truth["workload"]["dtype"]) == (gpu, dtype)
        assert any(op.name.startswith(kernel) for op in trace.ops)

    def test_a_gpu_can_be_given_in_numbers(self) -> None:
        slow = {"name": "NVIDIA H100 80GB HBM3", "bandwidth": 335.2e9}
        usual, slowed = played("none", layers=4), played("none", layers=4, gpu=slow)
        times = [answer(trace)["figures"]["devices"][0]["compute_ns"] for trace in (usual, slowed)]
        assert times[1] > 3 * times[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"preset": "8b"}, "there is no 8b"),
        ({"fault": "synk"}, "Did you mean sync"),
        ({"gpu": "NVIDIA H1000"}, "is not in the table"),
        ({"gpu": "H100"}, "may be H100-SXM-80GB or"),
        ({"gpu": {"name": "Mine", "flops": 1e15}}, "bandwidth must be given"),
        ({"engine": {"max_batchs": 3}}, "Did you mean 'max_batch'"),
        ({"engine": {"max_batch": 64, "step_tokens": 8}}, "step_tokens must leave"),
        ({"requests": {"count": 3, "promt": 5}}, "Did you mean 'prompt'"),
        ({"requests": {"count": 3, "prompt": 90_000}}, "exceed"),
        ({"tensor_parallel": 3}, "do not divide"),
        ({"tensor_parallel": 2, "replicas": 2}, "not both"),
        ({"tensor_parallel": 2, "graph_trace": "graph"}, "node"),
        ({"replicas": 99}, "some get none"),
        ({"preset": "7b", "gpu": "NVIDIA L4", "dtype": "float32"}, "does not hold preset 7b"),
        ({"kernels": {"gem": 2}}, "Did you mean 'gemm'"),
        ({"host": {"shedule": "1us"}}, "Did you mean 'schedule'"),
        ({"slow_rank": 0}, "speed over 0"),
        ({"presets": "7b"}, "Did you mean 'preset'"),
        ({"engine": {"kv_blocks": 2}}, "does not fit"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        compile_workload(parse_workload({"workload": {"preset": "3b", **changes}}))
    assert "\n" not in str(caught.value)


def test_the_documented_description_is_a_workload() -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "simulate.md"
    (example,) = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    spec = parse_spec(yaml.safe_load(example))
    assert (len(spec.devices), spec.counter_rate_hz, spec.costs.between_ns) == (2, 10_000, 3_000)


@pytest.mark.parametrize("fault", SIMULATED_FAULTS)
def test_the_simulators_own_faults_are_documented(fault: str) -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "simulate.md"
    assert f"| `{fault}` |" in page.read_text(encoding="utf-8")


class TestCommand:
    def infprof(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        code = "import sys; from infprof.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "simulate", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_a_workload_needs_no_description(self, tmp_path: Path) -> None:
        trace, truth = tmp_path / "a.sqlite", tmp_path / "a.truth.json"
        chosen = ("--workload", "small", "--fault", "sync", "--gpu", "NVIDIA L4")
        done = self.infprof(*chosen, "-o", trace, "--truth", truth)
        assert done.returncode == 0, done.stderr
        said = json.loads(truth.read_text())
        assert (said["workload"]["gpu"], said["fault"]["name"]) == ("NVIDIA L4", "sync")
        assert said["steps"] and trace.exists()

    def test_a_description_of_a_workload_is_a_spec_like_any_other(self, tmp_path: Path) -> None:
        spec = tmp_path / "run.yaml"
        spec.write_text(json.dumps(described("slow-rank", preset="tiny", layers=2)), encoding="utf-8")
        done = self.infprof(spec, "-o", tmp_path / "run.json.gz")
        assert done.returncode == 0, done.stderr
        assert len(list(tmp_path.glob("run_*rank*.pt.trace.json.gz"))) == 2

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("-o", "x.sqlite"), "Give a SPEC"),
            (("spec.yaml", "--fault", "sync", "-o", "x.sqlite"), "leave --fault away"),
            (("--workload", "tiny", "-o", "x.sqlite", "--stack"), "go with .json"),
            (("--workload", "tiny", "-o", "x.json", "--truth", "x.json"), "name two files"),
        ],
    )
    def test_options_that_do_not_go_together(self, arguments: tuple[str, ...], said: str) -> None:
        done = self.infprof(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in " ".join(done.stderr.split()) and "Traceback" not in done.stderr
