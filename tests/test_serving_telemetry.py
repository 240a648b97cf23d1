"""Measures over an engine's metrics: cases that people met, quantiles from buckets, and who had nothing to do."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import SHARED
from infprof import rules
from infprof.measures.names import MEASURES
from infprof.measures.serving_telemetry import (
    add_client_latencies,
    add_serving_telemetry,
    bucket_quantile,
    demand_intervals,
)
from infprof.measures.telemetry import TelemetryScope
from infprof.resources import rules_dir
from infprof.results import Measures
from infprof.rules.evaluating import judge, known_values
from infprof.telemetry import Missing, Series, Telemetry
from serving_bench import SECOND, held, recorded

SHIPPED = rules.load([rules_dir()])


def measured(telemetry: Telemetry) -> Measures:
    """All measures over the whole recording."""
    low, high = telemetry.span_ns() or (0, SECOND)
    measures = Measures()
    add_serving_telemetry(measures, telemetry, TelemetryScope(low, high, None))
    return measures


def pair(folder: Path, data: Path, name: str, seconds: float, facts: dict[str, Any] | None = None) -> Measures:
    """The measures between two scrapes of a case, ``seconds`` apart, the server read every second."""
    texts = [(data / f"{name}-{n}.prom").read_text(encoding="utf-8") for n in (0, 1)]
    return measured(recorded(folder, held(texts, seconds), facts))


def outcome(rule: str, measures: Measures) -> str:
    return judge(SHIPPED.get(rule), known_values(SHIPPED.get(rule), SHIPPED, measures)).state


def source(measures: Measures, name: str) -> str:
    found = measures.get(name)
    assert found is not None
    return found.source


# Cases


def test_d05_decode_speed_is_not_told_where_prefill_is_mixed_in(data: Path, tmp_path: Path) -> None:
    mixed = pair(tmp_path, data, "itl-mixed", 10)
    assert mixed.value("itl_mean_ns") == pytest.approx(91e6, rel=0.01)
    assert mixed.value("tokens_per_step_mean") == pytest.approx(18.1, rel=0.01)
    assert mixed.value("decode_interval_mean_ns") is None
    assert "prefill is mixed in (18.1 tokens per step at 1.0 running requests)" in source(
        mixed, "decode_interval_mean_ns"
    )
    clean = pair(tmp_path, data, "itl-clean", 10)
    assert clean.value("decode_interval_mean_ns") == pytest.approx(34.5e6, rel=0.01)
    assert clean.value("tokens_per_step_mean") == pytest.approx(1.3, rel=0.05)


def test_d08_preemption_without_a_queue(data: Path, tmp_path: Path) -> None:
    measures = pair(tmp_path, data, "kv-preempt", 60)
    assert measures.value("preemption_count") == 140
    assert measures.value("preemption_per_s") == pytest.approx(140 / 60)
    assert measures.value("waiting_requests_max") == 0
    # 1.2 million prompt tokens for four finished and eight running requests of 4000 each.
    assert measures.value("recomputed_prompt_ratio") == pytest.approx(1 - 48_000 / 1_200_000)
    fired = [rule for rule in ("preemption", "kv-cache-pressure") if outcome(rule, measures) == "fires"]
    assert fired == ["preemption", "kv-cache-pressure"]
    assert outcome("queueing", measures) == "quiet"


def counted_once(second: int) -> str:
    """Forty preemptions of an engine that counts the prompt of a request only when it first starts it."""
    return f"""\
vllm:num_requests_running 4
vllm:num_preemptions_total {second * 4}
vllm:prompt_tokens_total {second * 1000}
vllm:request_prompt_tokens_sum {second * 1000}
vllm:request_prompt_tokens_count {second * 10}
"""


def test_prompts_that_are_counted_once_do_not_say_that_nothing_was_computed_again(tmp_path: Path) -> None:
    measures = measured(recorded(tmp_path, [(s, counted_once(s)) for s in range(1, 12)]))
    assert measures.value("preemption_count") == 40
    assert measures.value("recomputed_prompt_ratio") is None
    assert outcome("preemption", measures) == "fires"


def test_d17_speculation_that_does_not_pay(data: Path, tmp_path: Path) -> None:
    measures = pair(tmp_path, data, "spec", 60)
    assert measures.value("spec_acceptance_ratio") == pytest.approx(0.11)
    assert measures.value("spec_tokens_per_step_mean") == pytest.approx(1.55)
    assert measures.value("spec_draft_tokens_mean") == 5
    assert measures.value("spec_first_acceptance_ratio") == pytest.approx(0.35)
    assert measures.value("spec_step_mean_ns") == pytest.approx(32e6)
    assert measures.value("itl_mean_ns") == pytest.approx(20.6e6, rel=0.01)
    assert outcome("spec-decode-acceptance", measures) == "fires"


def d15(second: int) -> str:
    """A server whose tokeniser is the bottleneck: 32 requests in 14 s, hardly a queue in the engine."""
    done = min(32, second * 32 // 14)
    return f"""\
vllm:num_requests_running {min(4, done)}
vllm:num_requests_waiting {second % 2}
vllm:request_success_total{{finished_reason="stop"}} {done}
vllm:request_queue_time_seconds_sum {0.1 * done / 32}
vllm:request_queue_time_seconds_count {done}
vllm:time_to_first_token_seconds_sum {1.9 * done}
vllm:time_to_first_token_seconds_count {done}
process_cpu_seconds_total {second}
"""


def test_d15_time_lost_before_the_engine(tmp_path: Path) -> None:
    measures = measured(recorded(tmp_path, [(s, d15(s)) for s in range(15)]))
    assert measures.value("ttft_mean_ns") == pytest.approx(1.9e9)
    assert measures.value("queue_time_mean_ns") == pytest.approx(0.1e9 / 32, rel=0.01)
    assert measures.value("server_cpu_cores_mean") == 1.0
    assert outcome("front-end-queue", measures) == "quiet"
    firsts = [round((2.0 + 0.4 * i) * 1e9) for i in range(32)]
    add_client_latencies(
        measures, {"ttft_ns": {"mean": float(np.mean(firsts))}, "request_count": 32, "failed_count": 0}
    )
    assert measures.value("client_ttft_mean_ns") == pytest.approx(8.2e9)
    assert outcome("front-end-queue", measures) == "fires"
    assert outcome("queueing", measures) == "quiet"
    assert measures.value("client_tpot_p50_ns") is None


def test_b13_the_largest_of_several_processes_and_the_fullest_engine(data: Path, tmp_path: Path) -> None:
    text = (data / "kv-multiproc.prom").read_text(encoding="utf-8")
    text += 'vllm:kv_cache_usage_perc{engine="1",model_name="m",pid="9"} 0.2\n'
    measures = measured(recorded(tmp_path, [(1, text), (2, text)]))
    assert measures.value("kv_cache_usage_mean_ratio") == pytest.approx(0.653)
    said = source(measures, "kv_cache_usage_mean_ratio")
    assert "vllm:kv_cache_usage_perc, the largest of several processes, the fullest of 2 engines" in said


def test_b14_the_name_that_was_found_is_said(data: Path, tmp_path: Path) -> None:
    text = (data / "metrics-old-names.prom").read_text(encoding="utf-8")
    measures = measured(recorded(tmp_path, [(1, text), (2, text)]))
    assert measures.value("kv_cache_usage_max_ratio") == pytest.approx(0.41)
    assert source(measures, "kv_cache_usage_max_ratio") == "vllm:gpu_cache_usage_perc"
    unknown = measured(recorded(tmp_path, [(1, "other:kv 0.41\n"), (2, "other:kv 0.41\n")]))
    assert unknown.value("kv_cache_usage_max_ratio") is None
    assert outcome("kv-cache-pressure", unknown) == "not evaluated"


def test_a_real_dump(tmp_path: Path) -> None:
    path = SHARED / "reference" / "samples" / "vllm-0.32.0-metrics-mfu.txt"
    if not path.is_file():
        pytest.skip("needs the shared dumps of a real server, which a clone does not have")
    text = path.read_text(encoding="utf-8")
    zero = "\n".join(
        line.rpartition(" ")[0] + " 0" if line.startswith("vllm:") and "_config_info" not in line else line
        for line in text.split("\n")
    )
    measures = measured(recorded(tmp_path, [(10, zero), (14, text)]))
    assert measures.value("ttft_mean_ns") == round(0.25151968002319336 / 4 * 1e9)
    assert measures.value("itl_mean_ns") == round(1.8312567000002673 / 252 * 1e9)
    assert measures.value("output_tokens_per_s") == 64
    assert measures.value("prompt_tokens_per_s") == measures.value("computed_prompt_tokens_per_s") == 5
    assert measures.value("finished_request_count") == 4
    assert measures.value("length_finish_ratio") == 1
    assert measures.value("tokens_per_step_mean") == pytest.approx(276 / 65)
    assert measures.value("engine_flop_per_s") == pytest.approx(2.21462528e08 / 4)
    assert measures.value("engine_dram_bytes_per_s") == pytest.approx((6.2930944e07 + 2.072576e06) / 4)
    flop = measures.get("engine_flop_per_s")
    assert flop is not None and flop.rank == "B"
    # All ITLs lie below the first bound: what is known is the mean.
    assert "10" not in source(measures, "queue_time_mean_ns")
    assert "below the first bound, 0.3 s (4 observations)" in source(measures, "queue_time_p95_ns")
    assert measures.value("queue_time_p95_ns") == pytest.approx(
        20 * (measures.value("queue_time_mean_ns") or 0), rel=0.01
    )


# Quantiles


def naive_bucket(values: list[float], bounds: list[float], quantile: float) -> tuple[float, float]:
    """The bucket in which a quantile lies, by sorting the values."""
    ordered = sorted(values)
    wanted = quantile * len(ordered)
    at = next(v for n, v in enumerate(ordered, 1) if n >= wanted)
    edges = [0.0, *bounds, float("inf")]
    return next((low, high) for low, high in itertools.pairwise(edges) if at <= high)


BOUNDS = [0.01, 0.05, 0.1, 0.5, 1.0]


@given(
    st.lists(st.floats(0.0001, 3.0), min_size=1, max_size=60),
    st.floats(0.01, 1.0),
)
def test_a_quantile_lies_in_the_bucket_of_the_sorted_values(values: list[float], quantile: float) -> None:
    counts = np.array([*(sum(v <= b for v in values) for b in BOUNDS), len(values)], dtype=float)
    found = bucket_quantile(np.array([*BOUNDS, np.inf]), counts, quantile)
    low, high = naive_bucket(values, BOUNDS, quantile)
    assert found is not None and (found.low, found.high) == (low, high)
    assert found.value is None if high == float("inf") else low <= (found.value or -1) <= high


@given(st.lists(st.floats(0.0001, 0.99), min_size=2, max_size=60))
def test_quantiles_grow(values: list[float]) -> None:
    counts = np.array([*(sum(v <= b for v in values) for b in BOUNDS), len(values)], dtype=float)
    found = [bucket_quantile(np.array([*BOUNDS, np.inf]), counts, q) for q in (0.1, 0.5, 0.9, 1.0)]
    numbers = [one.value for one in found if one is not None and one.value is not None]
    assert len(numbers) == 4 and numbers == sorted(numbers)


@pytest.mark.parametrize(
    ("counts", "quantile", "value"),
    [
        ([0, 0, 10, 10, 10, 10], 0.5, 0.075),
        ([10, 10, 10, 10, 10, 10], 0.5, 0.005),
        ([0, 0, 5, 5, 10, 10], 0.75, 0.75),
        ([0, 0, 0, 0, 0, 10], 0.5, None),
    ],
)
def test_quantiles_are_linear_inside_a_bucket(counts: list[float], quantile: float, value: float | None) -> None:
    found = bucket_quantile(np.array([*BOUNDS, np.inf]), np.array(counts, dtype=float), quantile)
    assert found is not None and found.value == (None if value is None else pytest.approx(value))


def test_nothing_counted_has_no_quantile() -> None:
    assert bucket_quantile(np.array([0.1, np.inf]), np.array([0.0, 0.0]), 0.5) is None
    assert bucket_quantile(np.array([]), np.array([]), 0.5) is None


def ttft(counts: list[int], engine: int = 0, total: float = 0.0) -> str:
    rows = zip([*BOUNDS, "+Inf"], counts, strict=True)
    lines = [f'vllm:time_to_first_token_seconds_bucket{{engine="{engine}",le="{le}"}} {n}' for le, n in rows]
    lines.append(f'vllm:time_to_first_token_seconds_count{{engine="{engine}"}} {counts[-1]}')
    lines.append(f'vllm:time_to_first_token_seconds_sum{{engine="{engine}"}} {total}')
    return "\n".join([*lines, "vllm:num_requests_running 1", ""])


def test_quantiles_come_from_the_window_and_from_all_engines(tmp_path: Path) -> None:
    before = ttft([50, 50, 50, 50, 50, 50]) + ttft([0, 0, 0, 0, 0, 0], 1)
    after = ttft([50, 50, 60, 60, 60, 60], total=0.8) + ttft([0, 0, 0, 30, 30, 30], 1, 9.0)
    measures = measured(recorded(tmp_path, [(1, before), (2, after)]))
    # Ten in 0.05-0.1 and thirty in 0.1-0.5.
    assert measures.value("ttft_p50_ns") == round((0.1 + 0.4 * (20 - 10) / 30) * 1e9)
    assert source(measures, "ttft_p50_ns").endswith("linear inside the bucket 0.1-0.5 s (40 observations)")
    assert measures.value("ttft_mean_ns") == round(9.8 / 40 * 1e9)


def test_beyond_the_last_bound_there_is_no_value_but_a_reason(tmp_path: Path) -> None:
    measures = measured(recorded(tmp_path, [(1, ttft([0] * 6)), (2, ttft([0, 0, 0, 0, 5, 10], total=60))]))
    assert measures.value("ttft_p95_ns") is None
    assert source(measures, "ttft_p95_ns") == "it lies above the last bound, 1 s (10 observations)"


def test_a_restart_inside_the_window(tmp_path: Path) -> None:
    texts = [ttft([0, 0, 0, n, n, n]) + f"vllm:generation_tokens_total {n}\n" for n in (100, 110, 4, 9)]
    measures = measured(recorded(tmp_path, list(enumerate(texts))))
    assert measures.value("output_tokens_per_s") == pytest.approx((10 + 4 + 5) / 3)
    assert source(measures, "ttft_p50_ns").endswith("(19 observations)")


# Load and demand


def gauge(signal: str, values: list[float], times: list[float], scope: str = "engine/0") -> Series:
    kind = "counter" if signal.endswith("tokens") else "gauge"
    seconds = np.array([round(t * SECOND) for t in times], dtype=np.int64)
    return Series("serving", signal, "count", kind, scope, {}, seconds, np.array(values, dtype=float))


def test_gauges_hold_until_the_next_sample_and_gaps_are_unknown() -> None:
    telemetry = Telemetry([gauge("running_requests", [4, 0, 8, 8], [0, 1, 2, 10])])
    measures = Measures()
    add_serving_telemetry(measures, telemetry, TelemetryScope(0, 20 * SECOND, None))
    assert measures.value("running_requests_mean") == 2
    assert measures.value("running_requests_max") == 4
    assert measures.value("waiting_requests_mean") is None


def intervals(telemetry: Telemetry, low: float, high: float) -> list[list[tuple[float, float]]]:
    both = demand_intervals(telemetry, round(low * SECOND), round(high * SECOND))
    return [[(a / SECOND, b / SECOND) for a, b in zip(s.tolist(), e.tolist(), strict=True)] for s, e in both]


def test_who_has_nothing_to_do_and_who_waits() -> None:
    times = [0.0, 1, 2, 3, 4, 5, 6]
    telemetry = Telemetry(
        [
            gauge("running_requests", [0, 0, 0, 2, 2, 0, 0], times),
            gauge("waiting_requests", [0, 0, 0, 0, 3, 0, 0], times),
        ]
    )
    assert intervals(telemetry, 0.5, 10) == [[(0.5, 2), (5, 6)], [(4, 5)]]
    assert intervals(telemetry, 4.25, 4.5) == [[], [(4.25, 4.5)]]


def test_requests_between_two_samples_are_demand() -> None:
    times = [0.0, 1, 2, 3]
    gauges = [gauge("running_requests", [0, 0, 0, 0], times), gauge("waiting_requests", [0, 0, 0, 0], times)]
    assert intervals(Telemetry(gauges), 0, 3) == [[(0, 3)], []]
    worked = [*gauges, gauge("output_tokens", [5, 5, 80, 80], times)]
    assert intervals(Telemetry(worked), 0, 3) == [[(0, 1), (2, 3)], []]
    measures = measured(Telemetry(worked))
    assert measures.value("zero_running_ratio") == pytest.approx(2 / 3)


def test_a_second_engine_that_works_is_demand_and_an_unknown_one_is_neither() -> None:
    times = [0.0, 1, 2, 3]
    first = gauge("running_requests", [0, 0, 0, 0], times)
    busy = gauge("running_requests", [0, 1, 0, 0], times, "engine/1")
    assert intervals(Telemetry([first, busy]), 0, 3) == [[(2, 3)], []]
    long_times = [float(t) for t in range(9)]
    silent = gauge("running_requests", [0], [0], "engine/1")
    known = intervals(Telemetry([gauge("running_requests", [0] * 9, long_times), silent]), 0, 9)
    assert known == [[(0, 4)], []]


def test_without_an_engine_nothing_is_claimed() -> None:
    assert intervals(Telemetry(), 0, 9) == [[], []]
    waiting_only = Telemetry([gauge("waiting_requests", [0, 0], [0, 1])])
    assert intervals(waiting_only, 0, 9) == [[], []]
    why = "sglang serves no metrics: start the server with --enable-metrics"
    measures = measured(Telemetry(missing=[Missing("serving", "engine", "", None, why)]))
    assert {m.value for m in measures} == {None}
    assert {m.source for m in measures} >= {why}


def served(second: int, rate: int, latency: float, running: int) -> str:
    done = second * rate
    return f"""\
vllm:num_requests_running {running}
vllm:num_requests_waiting 0
vllm:request_success_total{{finished_reason="stop"}} {done}
vllm:e2e_request_latency_seconds_sum {done * latency}
vllm:e2e_request_latency_seconds_count {done}
"""


def test_short_requests_that_no_sample_meets_count_all_the_same(tmp_path: Path) -> None:
    facts = {"engine_arguments": {"max_num_seqs": 16}}
    scrapes = [(float(s), served(s, 40, 0.2, 0)) for s in range(6)]
    measures = measured(recorded(tmp_path, scrapes, facts))
    assert measures.value("running_requests_mean") == 0
    assert measures.value("in_flight_requests_mean") == pytest.approx(8)
    assert measures.value("batch_efficiency_ratio") == pytest.approx(0.5)
    assert "Little's law" in source(measures, "batch_efficiency_ratio")
    assert measures.value("zero_running_ratio") == 0


def test_batch_efficiency_needs_a_limit(tmp_path: Path) -> None:
    scrapes = [(float(s), served(s, 1, 1.0, 6)) for s in range(4)]
    without = measured(recorded(tmp_path, scrapes))
    assert without.value("batch_efficiency_ratio") is None
    assert "--max-num-seqs" in source(without, "batch_efficiency_ratio")
    logged = measured(recorded(tmp_path, scrapes, {"log_max_running_requests": 12}))
    assert logged.value("batch_efficiency_ratio") == pytest.approx(0.5)
    assert logged.value("running_limit_count") == 12
    tgi = "tgi_batch_current_size 3\ntgi_batch_current_max_tokens 500\ntgi_batch_max_total_tokens 2000\n"
    tokens = measured(recorded(tmp_path, [(1, tgi), (2, tgi)]))
    assert tokens.value("batch_efficiency_ratio") == tokens.value("kv_cache_usage_mean_ratio") == 0.25


# Requests and cache


def finished(**reasons: int) -> str:
    lines = [f'vllm:request_success_total{{finished_reason="{k}"}} {v}' for k, v in reasons.items()]
    return "\n".join(["vllm:num_requests_running 1", *lines, ""])


def test_finished_failed_and_aborted_requests_are_told_apart(tmp_path: Path) -> None:
    before = finished(stop=100, length=0, abort=0, error=0)
    measures = measured(recorded(tmp_path, [(0, before), (4, finished(stop=120, length=20, abort=5, error=5))]))
    assert measures.value("finished_request_count") == 40
    assert measures.value("finished_requests_per_s") == 10
    assert measures.value("length_finish_ratio") == 0.5
    assert measures.value("failed_request_ratio") == measures.value("aborted_request_ratio") == 0.1
    assert outcome("engine-errors", measures) == "fires"


def test_errors_of_tgi_by_class(tmp_path: Path) -> None:
    text = "tgi_batch_current_size 1\ntgi_request_success %d\n" + "".join(
        f'tgi_request_failure{{err="{err}"}} %d\n' for err in ("overloaded", "generation", "dropped")
    )
    measures = measured(recorded(tmp_path, [(0, text % (0, 0, 0, 0)), (1, text % (10, 3, 2, 4))]))
    names = ("finished_request_count", "rejected_request_count", "failed_request_count", "aborted_request_count")
    assert [measures.value(name) for name in names] == [10, 3, 2, 4]


def test_statuses_of_answers(tmp_path: Path) -> None:
    text = finished(stop=1) + "".join(
        f'sglang:http_responses_total{{endpoint="/v1/completions",status_code="{code}"}} %d\n'
        for code in (200, 429, 503)
    )
    measures = measured(recorded(tmp_path, [(0, text % (0, 0, 0)), (1, text % (9, 4, 2))]))
    assert (measures.value("http_4xx_count"), measures.value("http_5xx_count")) == (4, 2)


def test_a_connectors_hits_count_but_not_its_queries(tmp_path: Path) -> None:
    text = """\
vllm:num_requests_running 1
vllm:prefix_cache_queries_total %d
vllm:prefix_cache_hits_total %d
vllm:external_prefix_cache_queries_total %d
vllm:external_prefix_cache_hits_total %d
"""
    measures = measured(recorded(tmp_path, [(0, text % (0, 0, 0, 0)), (1, text % (1000, 300, 700, 200))]))
    assert measures.value("prefix_cache_hit_ratio") == 0.5
    assert measures.value("prefix_cache_query_count") == 1000


def test_graph_share_of_sglang(tmp_path: Path) -> None:
    text = 'sglang:num_running_reqs 1\nsglang:cuda_graph_passes_total{mode="decode_cuda_graph"} %d\n'
    text += 'sglang:cuda_graph_passes_total{mode="decode_none"} %d\n'
    measures = measured(recorded(tmp_path, [(0, text % (0, 0)), (2, text % (30, 10))]))
    assert measures.value("graph_step_ratio") == 0.75
    assert measures.value("engine_steps_per_s") == 20


def test_every_measure_has_a_name_a_unit_and_a_reason_where_it_is_absent(tmp_path: Path) -> None:
    for scrapes in ([(1.0, finished(stop=1))], [(1.0, finished(stop=1)), (2.0, finished(stop=9))]):
        measures = measured(recorded(tmp_path, scrapes))
        assert {m.name: m.unit for m in measures} == {m.name: MEASURES[m.name].unit for m in measures}
        assert [m.name for m in measures if not m.source] == []
    assert json.dumps([m.value for m in measures])
