"""What an engine says about its own configuration: facts, and only those whose names stand here.

Everything else an engine tells (keys, paths, whole argument lists) may be private and is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# Numbers and plain words of cache_config_info, /server_info, /info and /props.
_CONFIG_KEYS = frozenset(
    {
        "block_size",
        "cache_dtype",
        "enable_prefix_caching",
        "gpu_memory_utilization",
        "kv_cache_max_concurrency",
        "kv_cache_memory_bytes",
        "kv_cache_size_tokens",
        "num_gpu_blocks",
        "prefix_caching_hash_algo",
        "sliding_window",
        # SGLang
        "attention_backend",
        "chunked_prefill_size",
        "context_length",
        "cuda_graph_max_bs",
        "disable_cuda_graph",
        "disable_overlap_schedule",
        "disable_radix_cache",
        "dp_size",
        "dtype",
        "enable_metrics",
        "enable_mixed_chunk",
        "ep_size",
        "kv_cache_dtype",
        "max_prefill_tokens",
        "max_running_requests",
        "max_total_num_tokens",
        "max_total_tokens",
        "mem_fraction_static",
        "page_size",
        "pp_size",
        "quantization",
        "schedule_conservativeness",
        "schedule_policy",
        "speculative_algorithm",
        "speculative_num_draft_tokens",
        "speculative_num_steps",
        "tp_size",
        # TGI and llama.cpp
        "max_batch_total_tokens",
        "max_concurrent_requests",
        "max_input_tokens",
        "max_waiting_tokens",
        "total_slots",
        "waiting_served_ratio",
    }
)
# Flags of command lines, without dashes, that set how many requests and tokens a step may take, and other speed matters.
_FLAGS = frozenset(
    {
        "api_server_count",
        "async_scheduling",
        "block_size",
        "chunked_prefill_size",
        "context_length",
        "cuda_graph_max_bs",
        "data_parallel_size",
        "disable_cuda_graph",
        "disable_log_stats",
        "disable_overlap_schedule",
        "disable_radix_cache",
        "dp_size",
        "dtype",
        "enable_chunked_prefill",
        "enable_metrics",
        "enable_mfu_metrics",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "max_batch_size",
        "max_concurrent_requests",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_num_tokens",
        "max_prefill_tokens",
        "max_running_requests",
        "mem_fraction_static",
        "no_enable_prefix_caching",
        "parallel",
        "pipeline_parallel_size",
        "quantization",
        "schedule_conservativeness",
        "scheduling_policy",
        "stream_interval",
        "tensor_parallel_size",
        "tp_size",
    }
)
_PLAIN = re.compile(r"[\w.+-]{1,60}")

Value = str | int | float | bool


def known_settings(found: Mapping[str, Any]) -> dict[str, Value]:
    """The settings whose names are known, at the top of ``found`` or one level down, numbers as numbers."""
    nested = [v for v in found.values() if isinstance(v, dict)]
    nested += [v[0] for v in found.values() if isinstance(v, list) and v and isinstance(v[0], dict)]
    result: dict[str, Value] = {}
    for level in (*nested, found):
        for key, value in level.items():
            plain = _plain(value) if key in _CONFIG_KEYS else None
            if plain is not None:
                result[key] = plain
    return result


def settings_of_command(command: Sequence[str]) -> dict[str, Value]:
    """The known flags of a command line; a flag without a value is true."""
    result: dict[str, Value] = {}
    for word, following in zip(command, [*command[1:], "--"], strict=False):
        if not word.startswith("--"):
            continue
        flag, equals, value = word[2:].partition("=")
        name = flag.replace("-", "_")
        if name in _FLAGS:
            plain = _plain(value if equals else "True" if following.startswith("-") else following)
            if plain is not None:
                result[name] = plain
    return result


def _plain(value: Any) -> Value | None:
    """Numbers, truth values and single words; nothing else is safe to keep."""
    if isinstance(value, (bool, int, float)):
        return value
    if not isinstance(value, str) or not _PLAIN.fullmatch(value) or value == "None":
        return None
    if value in ("True", "False"):
        return value == "True"
    for number in (int, float):
        try:
            return number(value)
        except ValueError:
            continue
    return value


class _Line(NamedTuple):
    """A log line worth reading: ``name`` of the fact, or of the event where ``is_event``."""

    pattern: re.Pattern[str]
    name: str
    read: Callable[[str], Value] = str
    is_event: bool = False


def _count(text: str) -> int:
    return int(text.replace(",", ""))


_LINES = (
    _Line(re.compile(r"KV cache size: ([\d,]+) tokens"), "kv_cache_tokens", _count),
    _Line(re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x"), "kv_cache_concurrency", float),
    _Line(re.compile(r"Available KV cache memory: ([\d.]+) GiB"), "kv_cache_gib", float),
    _Line(re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)"), "max_num_batched_tokens", int),
    _Line(re.compile(r"[ {,(']max_num_seqs'?[=:] ?(\d+)"), "max_num_seqs", int),
    _Line(re.compile(r"max_total_num_tokens=(\d+)"), "max_total_num_tokens", int),
    _Line(re.compile(r"[ ,(]max_running_requests=(\d+)"), "max_running_requests", int),
    _Line(re.compile(r"[ ,(]chunked_prefill_size=(\d+)"), "chunked_prefill_size", int),
    _Line(re.compile(r"available_gpu_mem=([\d.]+) GB"), "available_gpu_memory_gb", float),
    _Line(re.compile(r"Model loading took ([\d.]+) Gi?B"), "weights_gib", float),
    _Line(re.compile(r"Graph capturing finished in (\d+) secs"), "graph_capture_s", int),
    _Line(re.compile(r"init engine \(.*\) took ([\d.]+) s"), "engine_start_s", float),
    _Line(re.compile(r"(Cudagraph is disabled) under eager mode"), "cuda_graphs_off", bool),
    _Line(re.compile(r"(Custom allreduce is disabled) because"), "custom_allreduce_off", bool),
    _Line(re.compile(r"Using (\w+) attention backend"), "attention_backend", str),
    _Line(re.compile(r"attention_backend='(\w+)'"), "attention_backend", str),
    _Line(re.compile(r"(Using default MoE config)"), "moe_config_default", bool),
    _Line(re.compile(r"(Application startup complete|The server is fired up and ready to roll)"), "ready", str, True),
    _Line(re.compile(r"(is preempted by PreemptionMode|KV cache pool is full\. Retract)"), "preemption", str, True),
    _Line(re.compile(r"(CUDA out of memory|Prefill out of memory|Decode out of memory)"), "out_of_memory", str, True),
    _Line(
        re.compile(r"(EngineCore encountered a fatal error|EngineDeadError|Scheduler hit an exception)"),
        "died",
        str,
        True,
    ),
)


class Found(NamedTuple):
    """What a log line says: a fact, or something that happened."""

    name: str
    value: Value
    is_event: bool


def read_log(lines: Sequence[str]) -> Iterator[Found]:
    """The known statements of an engine's log, in order; of a line only the known part."""
    for line in lines:
        for known in _LINES:
            match = known.pattern.search(line)
            if match:
                yield Found(known.name, known.read(match.group(1)), known.is_event)


_PATH = re.compile(r"(?<==\")[^\"]*/[^\"]*(?=\")")
_SECRET = re.compile(r"(?<==\")(?:hf_|sk-|ghp_|xox|Bearer )?[A-Za-z0-9+=_-]{40,}(?=\")")
# "organisation/model" names a model, not a place on a disk.
_MODEL_ID = re.compile(r"[\w.-]*\w/[\w.-]+")
_HOST = re.compile(r"\b(Hostname|instance|host|node|pod|ip)=\"[^\"]*\"", re.IGNORECASE)
# Routes begin with a slash and are no paths of a disk.
_ROUTE = re.compile(r"(?:handler|endpoint|path)=$")


def without_private(text: str) -> str:
    """A scrape without hosts, and without label values that look like a path (its last part stays) or a secret."""
    text = _HOST.sub(lambda m: f'{m.group(1)}="removed"', text)
    text = _SECRET.sub("removed", text)
    return _PATH.sub(_last_part, text)


def _last_part(match: re.Match[str]) -> str:
    before = match.string[max(0, match.start() - 12) : match.start() - 1]
    if _ROUTE.search(before) or _MODEL_ID.fullmatch(match.group()):
        return match.group()
    return ".../" + match.group().rstrip("/").rpartition("/")[2]


def plain_model(name: str | None) -> str | None:
    """A model's name; of a path its last part only."""
    if name is None or not name.startswith(("/", "./", "../", "~")):
        return name
    return name.rstrip("/").rpartition("/")[2] or None
