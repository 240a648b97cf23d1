"""The names under which serving engines expose their metrics, and the one signal that each stands for.

The table below is the only place that knows an engine's names. Names are written without the engine's prefix, which is
accepted with ``:`` and with ``_`` (gateways rewrite it). Of several names for one signal the first that is there counts,
so a metric that an engine exposes under its old and its new name is counted once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from infprof.probes import Signal

_HISTOGRAMS = {
    "ttft_seconds": "arrival to first output, as the front end sees it",
    "inter_token_latency_seconds": "gap between two outputs of one request",
    "time_per_output_token_seconds": "per finished request: (last - first token) / (tokens - 1)",
    "e2e_latency_seconds": "arrival to finish, seen when the request ends",
    "queue_time_seconds": "arrival at the scheduler to first scheduled, seen when the request ends",
    "prefill_time_seconds": "first scheduled to first token, seen when the request ends",
    "decode_time_seconds": "first to last token, seen when the request ends",
    "iteration_tokens": "tokens of one engine step, computed prompt and generated",
    "request_prompt_tokens": "prompt tokens of finished requests",
    "request_output_tokens": "output tokens of finished requests",
}

_GAUGES = {
    "running_requests": ("count", "requests in the running batch"),
    "waiting_requests": ("count", "requests waiting to be scheduled"),
    "running_requests_limit": ("count", "most requests that may run at once"),
    "requests_scheduled": ("count", "requests in the last step"),
    "kv_cache_usage_ratio": ("ratio", "share of the KV cache in use"),
    "kv_reserved_tokens": ("tokens", "tokens reserved in the KV cache"),
    "kv_capacity_tokens": ("tokens", "tokens that the KV cache can hold"),
    "last_prefix_cache_hit_ratio": ("ratio", "prefix-cache hit share as the engine computes it"),
    "spec_acceptance_ratio": ("ratio", "accepted share of draft tokens as the engine computes it"),
    "spec_tokens_per_step": ("tokens", "tokens per verified step, as the engine computes it"),
    "busy_slots_per_decode": ("count", "slots in use per decode call"),
}

_COUNTERS = {
    "prompt_tokens": ("tokens", "prompt tokens, cached ones included"),
    "prompt_tokens_by_source": ("tokens", "prompt tokens by where they came from"),
    "output_tokens": ("tokens", "generated tokens"),
    "prefix_cache_queries": ("tokens", "tokens or blocks looked up in the prefix cache"),
    "prefix_cache_hits": ("tokens", "tokens or blocks found in the prefix cache"),
    "prefix_cache_misses": ("tokens", "tokens or blocks not found in the prefix cache"),
    "external_cache_hits": ("tokens", "tokens found in a KV connector's cache"),
    "cached_tokens": ("tokens", "prompt tokens served from a cache"),
    "preemptions": ("count", "running requests put back for want of KV cache"),
    "requests_finished": ("count", "finished requests by reason, aborted and failed ones included"),
    "requests_failed": ("count", "failed requests by class"),
    "requests_aborted": ("count", "requests aborted by the client"),
    "requests_rejected": ("count", "requests refused at admission, by reason"),
    "http_responses": ("count", "answers of the generating endpoints by status"),
    "corrupted_requests": ("count", "requests with NaN logits"),
    "engine_steps": ("count", "forward passes, by mode"),
    "estimated_flops": ("FLOP", "the engine's own count per GPU, a lower bound"),
    "estimated_read_bytes": ("bytes", "the engine's own count per GPU, a lower bound"),
    "estimated_write_bytes": ("bytes", "the engine's own count per GPU, a lower bound"),
    "spec_drafts": ("count", "verified steps of speculative decoding"),
    "spec_draft_tokens": ("tokens", "proposed tokens"),
    "spec_accepted_tokens": ("tokens", "accepted tokens"),
    "spec_accepted_tokens_by_position": ("tokens", "accepted tokens by position in the draft"),
    "forward_seconds": ("s", "GPU time in forward passes, by mode"),
    "scheduler_idle_seconds": ("s", "time in which the scheduler had nothing to do"),
    "scheduler_stage_seconds": ("s", "time of the scheduler's loop by stage"),
    "server_cpu_seconds": ("s", "CPU time of the serving process"),
}

SIGNALS: dict[str, Signal] = {
    **{name: Signal(unit, "gauge", meaning) for name, (unit, meaning) in _GAUGES.items()},
    **{name: Signal(unit, "counter", meaning) for name, (unit, meaning) in _COUNTERS.items()},
}
for _name, _meaning in _HISTOGRAMS.items():
    _unit = "s" if _name.endswith("_seconds") else "tokens"
    SIGNALS[f"{_name}_sum"] = Signal(_unit, "counter", f"{_meaning}: sum")
    SIGNALS[f"{_name}_count"] = Signal("count", "counter", f"{_meaning}: how many")
    SIGNALS[f"{_name}_bucket"] = Signal("count", "counter", f"{_meaning}: how many up to the label le")


@dataclass(frozen=True)
class Source:
    """One exposed name and what it stands for.

    ``keep`` renames the labels that tell series of the signal apart; all others are merged. ``only`` gives the start
    that a label must have. Sources of different ``part`` are added, those of one part are alternatives, best first.
    """

    engine: str
    name: str
    signal: str
    keep: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    part: int = 0
    rank: int = 0

    @property
    def is_counter(self) -> bool:
        return SIGNALS[self.signal].kind == "counter"


_GENERATING = ("/v1/", "/generate", "/inference")
_REASON = {"finished_reason": "reason"}

# Signal, then per engine the names, best first. A signal that ends in "*" is a histogram; a counter's name stands
# without the _total that clients add to it. Names after "+" are added to the others instead of standing in for them.
_TABLE: dict[str, dict[str, str]] = {
    "running_requests": {
        "vllm": "num_requests_running",
        "sglang": "num_running_reqs",
        "trtllm": "num_requests_running",
        "tgi": "batch_current_size",
        "llamacpp": "requests_processing",
        "lmdeploy": "num_requests_running",
        "dynamo_frontend": "active_requests inflight_requests",
    },
    "waiting_requests": {
        "vllm": "num_requests_waiting",
        "sglang": "num_queue_reqs + num_grammar_queue_reqs",
        "trtllm": "num_requests_waiting",
        "tgi": "queue_size",
        "llamacpp": "requests_deferred",
        "lmdeploy": "num_requests_waiting + num_api_requests_waiting",
        "dynamo_frontend": "queued_requests",
    },
    "running_requests_limit": {"sglang": "max_running_requests", "trtllm": "max_batch_size_runtime"},
    "requests_scheduled": {"trtllm": "num_scheduled_requests"},
    "busy_slots_per_decode": {"llamacpp": "n_busy_slots_per_decode"},
    "kv_cache_usage_ratio": {
        "vllm": "kv_cache_usage_perc gpu_cache_usage_perc",
        "sglang": "token_usage",
        "trtllm": "kv_cache_utilization",
        "llamacpp": "kv_cache_usage_ratio",
        "lmdeploy": "gpu_cache_usage_perc",
        "dynamo_component": "gpu_cache_usage_percent",
    },
    "kv_reserved_tokens": {"tgi": "batch_current_max_tokens"},
    "kv_capacity_tokens": {"tgi": "batch_max_total_tokens", "sglang": "max_total_num_tokens"},
    "last_prefix_cache_hit_ratio": {
        "vllm": "gpu_prefix_cache_hit_rate",
        "sglang": "cache_hit_rate",
        "lmdeploy": "prefix_cache_hit_rate",
        "trtllm": "kv_cache_hit_rate",
    },
    "spec_acceptance_ratio": {
        "vllm": "spec_decode_draft_acceptance_rate",
        "sglang": "spec_accept_rate",
        "lmdeploy": "spec_decode_mean_accept_rate",
    },
    "spec_tokens_per_step": {
        "sglang": "spec_accept_length",
        "lmdeploy": "spec_decode_mean_accept_length",
        "trtllm": "spec_decode_acceptance_length",
    },
    "prompt_tokens": {
        "vllm": "prompt_tokens",
        "sglang": "prompt_tokens",
        "trtllm": "prompt_tokens",
        "tgi": "request_input_length_sum",
        "llamacpp": "prompt_tokens",
        "lmdeploy": "prompt_tokens",
    },
    "output_tokens": {
        "vllm": "generation_tokens",
        "sglang": "realtime_tokens{mode=decode} generation_tokens",
        "trtllm": "generation_tokens",
        "tgi": "request_generated_tokens_sum",
        "llamacpp": "tokens_predicted",
        "lmdeploy": "generation_tokens",
        "dynamo_frontend": "output_tokens",
    },
    "prompt_tokens_by_source": {
        "vllm": "prompt_tokens_by_source[source]",
        "sglang": "realtime_tokens{mode=prefill_}[mode:source]",
    },
    "prefix_cache_queries": {
        "vllm": "prefix_cache_queries gpu_prefix_cache_queries",
        "sglang": "prefill_effective_tokens prompt_tokens",
        "lmdeploy": "prompt_tokens",
    },
    "prefix_cache_hits": {
        "vllm": "prefix_cache_hits gpu_prefix_cache_hits",
        "sglang": "prefill_effective_tokens{mode=device_hit,host_hit,storage_hit} cached_tokens",
        "trtllm": "kv_cache_reused_blocks",
        "lmdeploy": "cached_tokens",
    },
    "prefix_cache_misses": {"trtllm": "kv_cache_missed_blocks"},
    "external_cache_hits": {"vllm": "external_prefix_cache_hits"},
    "cached_tokens": {
        "vllm": "prompt_tokens_cached",
        "sglang": "cached_tokens",
        "trtllm": "prompt_cached_tokens",
        "lmdeploy": "cached_tokens",
    },
    "preemptions": {"vllm": "num_preemptions", "sglang": "num_retracted_requests"},
    "requests_finished": {
        "vllm": "request_success[finished_reason:reason]",
        "sglang": "num_requests",
        "trtllm": "request_success[finished_reason:reason]",
        "tgi": "request_success",
        "lmdeploy": "request_success[finished_reason:reason]",
        "dynamo_frontend": "requests",
    },
    "requests_failed": {
        "trtllm": "request_error[http_code:class]",
        "tgi": "request_failure[err:class]",
        "lmdeploy": "num_requests_failed",
    },
    "requests_aborted": {"sglang": "num_aborted_requests"},
    "requests_rejected": {
        "vllm": "admission_rejections[reason:reason]",
        "dynamo_frontend": "admission_rejection model_rejection",
    },
    "http_responses": {"sglang": "http_responses{endpoint=/v1/,/generate}[status_code:status]"},
    "corrupted_requests": {"vllm": "corrupted_requests"},
    "engine_steps": {
        "sglang": "cuda_graph_passes[mode:mode]",
        "tgi": "batch_inference_count[method:mode]",
        "llamacpp": "n_decode",
    },
    "estimated_flops": {"vllm": "estimated_flops_per_gpu", "sglang": "estimated_flops_per_gpu"},
    "estimated_read_bytes": {"vllm": "estimated_read_bytes_per_gpu", "sglang": "estimated_read_bytes_per_gpu"},
    "estimated_write_bytes": {"vllm": "estimated_write_bytes_per_gpu", "sglang": "estimated_write_bytes_per_gpu"},
    "spec_drafts": {
        "vllm": "spec_decode_num_drafts",
        "llamacpp": "spec_decode_num_drafts",
        "lmdeploy": "spec_decode_num_drafts",
        "sglang": "spec_verify_calls",
    },
    "spec_draft_tokens": {
        "vllm": "spec_decode_num_draft_tokens",
        "llamacpp": "spec_decode_num_draft_tokens",
        "lmdeploy": "spec_decode_num_draft_tokens",
        "trtllm": "spec_decode_num_draft_tokens",
    },
    "spec_accepted_tokens": {
        "vllm": "spec_decode_num_accepted_tokens",
        "llamacpp": "spec_decode_num_accepted_tokens",
        "lmdeploy": "spec_decode_num_accepted_tokens",
        "trtllm": "spec_decode_num_accepted_tokens",
    },
    "spec_accepted_tokens_by_position": {
        "vllm": "spec_decode_num_accepted_tokens_per_pos[position:position]",
        "llamacpp": "spec_decode_num_accepted_tokens_per_pos[position:position]",
        "lmdeploy": "spec_decode_num_accepted_tokens_per_pos[position:position]",
        "trtllm": "spec_decode_accepted_tokens[token_position:position]",
    },
    "forward_seconds": {"sglang": "forward_execution_seconds[category:mode] gpu_execution_seconds[category:mode]"},
    "scheduler_idle_seconds": {"sglang": "scheduler_idle_seconds"},
    "scheduler_stage_seconds": {"sglang": "scheduler_stage_seconds[category:stage]"},
    "server_cpu_seconds": {"sglang": "process_cpu_seconds[component:component]"},
    "ttft_seconds*": {
        "vllm": "time_to_first_token_seconds",
        "sglang": "time_to_first_token_seconds",
        "trtllm": "time_to_first_token_seconds",
        "lmdeploy": "time_to_first_token_seconds",
        "dynamo_frontend": "time_to_first_token_seconds",
    },
    # vLLM's old "time per output token" always was a gap between two tokens.
    "inter_token_latency_seconds*": {
        "vllm": "inter_token_latency_seconds time_per_output_token_seconds",
        "sglang": "inter_token_latency_seconds",
        "lmdeploy": "iter_token_latency",
        "dynamo_frontend": "inter_token_latency_seconds",
    },
    "time_per_output_token_seconds*": {
        "vllm": "request_time_per_output_token_seconds",
        "sglang": "request_time_per_output_token_seconds time_per_output_token_seconds",
        "trtllm": "time_per_output_token_seconds",
        "tgi": "request_mean_time_per_token_duration",
        "lmdeploy": "time_per_output_token_seconds",
    },
    "e2e_latency_seconds*": {
        "vllm": "e2e_request_latency_seconds",
        "sglang": "e2e_request_latency_seconds",
        "trtllm": "e2e_request_latency_seconds",
        "tgi": "request_duration",
        "lmdeploy": "e2e_request_latency_seconds",
        "dynamo_frontend": "request_duration_seconds",
    },
    "queue_time_seconds*": {
        "vllm": "request_queue_time_seconds time_in_queue_requests",
        "sglang": "queue_time_seconds queue_time_s",
        "trtllm": "request_queue_time_seconds",
        "tgi": "request_queue_duration",
        "lmdeploy": "request_queue_time_seconds",
    },
    "prefill_time_seconds*": {
        "vllm": "request_prefill_time_seconds",
        "sglang": "per_stage_req_latency_seconds{stage=prefill_forward}",
        "trtllm": "request_prefill_time_seconds",
        "lmdeploy": "request_prefill_time_seconds",
    },
    "decode_time_seconds*": {
        "vllm": "request_decode_time_seconds",
        "sglang": "per_stage_req_latency_seconds{stage=decode_loop}",
        "trtllm": "request_decode_time_seconds",
        "lmdeploy": "request_decode_time_seconds",
    },
    "iteration_tokens*": {"vllm": "iteration_tokens_total", "lmdeploy": "iteration_tokens_total"},
    "request_prompt_tokens*": {
        "vllm": "request_prompt_tokens",
        "sglang": "prompt_tokens_histogram",
        "tgi": "request_input_length",
        "lmdeploy": "request_prompt_tokens",
    },
    "request_output_tokens*": {
        "vllm": "request_generation_tokens",
        "sglang": "generation_tokens_histogram",
        "tgi": "request_generated_tokens",
        "lmdeploy": "request_generation_tokens",
    },
}
# Histograms of which nothing but the mean is used: their many buckets are left out.
_MEAN_ONLY = ("iteration_tokens", "request_prompt_tokens", "request_output_tokens")

# What does not fit the table: exact names, engine by engine.
_EXACT = (
    Source("llamacpp", "tokens_predicted_seconds_total", "inter_token_latency_seconds_sum"),
    Source("llamacpp", "tokens_predicted_total", "inter_token_latency_seconds_count"),
    Source("nv_trt_llm", "request_metrics", "running_requests", only={"request_type": ("active",)}),
    Source("nv_trt_llm", "request_metrics", "waiting_requests", only={"request_type": ("waiting",)}),
    Source("nv_trt_llm", "kv_cache_block_metrics", "kv_cache_usage_ratio", only={"kv_cache_block_type": ("fraction",)}),
    Source("", "http_requests_total", "http_responses", {"status": "status"}, {"handler": _GENERATING}),
    Source("", "process_cpu_seconds_total", "server_cpu_seconds"),
    # TensorRT-LLM 1.1 had five metrics without a prefix.
    Source("", "request_success_total", "requests_finished", _REASON),
    *(
        Source("", f"{name}_{suffix}", f"{signal}_{suffix}", {"le": "le"} if suffix == "bucket" else {})
        for name, signal in (
            ("e2e_request_latency_seconds", "e2e_latency_seconds"),
            ("time_to_first_token_seconds", "ttft_seconds"),
            ("time_per_output_token_seconds", "time_per_output_token_seconds"),
            ("request_queue_time_seconds", "queue_time_seconds"),
        )
        for suffix in ("sum", "count", "bucket")
    ),
)

# Longest first, so that "dynamo_frontend" is not read as an engine called "dynamo".
PREFIXES = (
    "dynamo_component",
    "dynamo_frontend",
    "nv_trt_llm",
    "lmdeploy",
    "llamacpp",
    "sglang",
    "trtllm",
    "vllm",
    "tgi",
)
_PREFIX = re.compile(rf"({'|'.join(PREFIXES)})[:_]")
# The engine behind a prefix, as it is reported.
ENGINE_OF_PREFIX = {
    "vllm": "vllm",
    "sglang": "sglang",
    "trtllm": "tensorrt-llm",
    "nv_trt_llm": "tensorrt-llm",
    "tgi": "tgi",
    "llamacpp": "llama.cpp",
    "lmdeploy": "lmdeploy",
    "dynamo_frontend": "dynamo",
    "dynamo_component": "dynamo",
}
# Labels that number the parallel engines of one server.
ENGINE_LABELS = ("engine", "dp_rank")
# Processes and ranks of one engine repeat the same number: the largest counts, never the sum.
REPEATING_LABELS = frozenset({"pid", "tp_rank", "pp_rank", "moe_ep_rank"})
START_TIME = "process_start_time_seconds"

_ENTRY = re.compile(r"(?P<name>\w+)(?:\{(?P<label>\w+)=(?P<starts>[^}]+)\})?(?:\[(?P<keep>\w+)(?::(?P<to>\w+))?\])?")


def split_prefix(name: str) -> tuple[str, str]:
    """An exposed name as the engine's prefix ("" for none that is known) and the rest."""
    match = _PREFIX.match(name)
    return (match.group(1), name[match.end() :]) if match else ("", name)


def sources_of(name: str) -> tuple[Source, ...]:
    """What an exposed sample name stands for: none, one, or several signals."""
    return _by_name().get(split_prefix(name), ())


@cache
def _by_name() -> dict[tuple[str, str], tuple[Source, ...]]:
    found: dict[tuple[str, str], tuple[Source, ...]] = {}
    for source in (*_table_sources(), *_EXACT):
        key = (source.engine, source.name)
        found[key] = (*found.get(key, ()), source)
    return found


def _table_sources() -> Iterator[Source]:
    for signal, engines in _TABLE.items():
        for engine, names in engines.items():
            for part, alternatives in enumerate(names.split(" + ")):
                for rank, entry in enumerate(alternatives.split()):
                    yield from _entry_sources(engine, signal, entry, part, rank)


def _entry_sources(engine: str, signal: str, entry: str, part: int, rank: int) -> Iterator[Source]:
    match = _ENTRY.fullmatch(entry)
    assert match is not None, entry
    name, label, kept = match["name"], match["label"], match["keep"]
    only = {label: tuple(match["starts"].split(","))} if label else {}
    keep = {kept: match["to"] or kept} if kept else {}
    if signal.endswith("*"):
        base = signal[:-1]
        for suffix in ("sum", "count", *(() if base in _MEAN_ONLY else ("bucket",))):
            labels = {**keep, "le": "le"} if suffix == "bucket" else keep
            yield Source(engine, f"{name}_{suffix}", f"{base}_{suffix}", labels, only, part, rank)
        return
    yield Source(engine, name, signal, keep, only, part, rank)
    if SIGNALS[signal].kind == "counter":
        yield Source(engine, f"{name}_total", signal, keep, only, part, rank)
