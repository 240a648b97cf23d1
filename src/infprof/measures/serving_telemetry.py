"""What a serving engine's own metrics say over a window: load, batch, latencies, cache, errors, speculation.

Counters count by their increase (a fall is a restart), gauges hold until the next sample, quantiles come from bucket
increases summed over all engines. Gauges that are 1-s samples say little about windows of a few seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from infprof.measures.names import MEASURES
from infprof.measures.telemetry import TelemetryScope
from infprof.measures.totals import ratio
from infprof.results import Measures
from infprof.telemetry import Series, Telemetry
from infprof.trace import FloatArray, IntArray

# A gauge's value is unknown where the next sample is later than this.
MAX_GAP_NS = 3_000_000_000
# What is known of less than this share of a window is not said of the window.
MIN_KNOWN_SHARE = 0.5
# A step with more than this many times the tokens that the running requests can yield holds prefill.
_MIXED_FACTOR = 2.0

_ENGINE = "engine"


class Quantile(NamedTuple):
    """A quantile from a histogram: ``value`` None when it lies beyond the last bound (``low``); the bucket around it."""

    value: float | None
    low: float
    high: float


def bucket_quantile(bounds: FloatArray, counts: FloatArray, quantile: float) -> Quantile | None:
    """The quantile (0-1) of a histogram, linear inside its bucket; None when nothing was counted.

    ``bounds`` are the upper bounds, ascending, the last one infinite; ``counts`` are cumulative, as Prometheus has them.
    """
    if not len(counts) or counts[-1] <= 0:
        return None
    wanted = quantile * counts[-1]
    # The first bucket that reaches the wanted count and holds something.
    at = int(np.argmax((counts >= wanted) & (np.diff(counts, prepend=0.0) > 0)))
    low = 0.0 if at == 0 else float(bounds[at - 1])
    before = 0.0 if at == 0 else float(counts[at - 1])
    high = float(bounds[at])
    if not np.isfinite(high):
        return Quantile(None, low, high)
    share = max(0.0, (wanted - before) / (float(counts[at]) - before))
    return Quantile(low + (high - low) * share, low, high)


class Held(NamedTuple):
    """A gauge as intervals in which its value is known: ``start`` and ``end`` (ns), and ``value``."""

    start: IntArray
    end: IntArray
    value: FloatArray

    def mean(self) -> float | None:
        """Mean over time, None without any known time."""
        length = self.end - self.start
        return float(np.average(self.value, weights=length)) if length.sum() > 0 else None

    def share(self, condition: Any) -> float | None:
        """The share of the known time in which ``condition`` (a column of truth values) holds."""
        length = self.end - self.start
        return float(length[condition].sum() / length.sum()) if length.sum() > 0 else None


def _held(series: list[Series], low: int, high: int) -> Held:
    """The sum of gauges between their samples. Gaps longer than MAX_GAP_NS are left out: nobody knows what was there.

    A gauge counts from its first sample on, and must be known from then on for the sum to be.
    """
    series = [s for s in series if len(s.time)]
    times = np.unique(np.concatenate([s.time for s in series])) if series else np.array([], dtype=np.int64)
    value, known = np.zeros(len(times)), np.ones(len(times), dtype=bool)
    for one in series:
        at = np.searchsorted(one.time, times, side="right") - 1
        begun = at >= 0
        known &= ~begun | (times - one.time[at] <= MAX_GAP_NS)
        value[begun] += one.value[at[begun]]
    start, end = np.clip(times[:-1], low, high), np.clip(times[1:], low, high)
    keep = (np.diff(times) <= MAX_GAP_NS) & (end > start) & known[:-1]
    return Held(start[keep], end[keep], value[:-1][keep])


Intervals = tuple[IntArray, IntArray]


def demand_intervals(telemetry: Telemetry, low_ns: int, high_ns: int) -> tuple[Intervals, Intervals]:
    """When the engine had nothing to do, and when requests waited: starts and ends in ns, for each.

    Without demand: no engine has a running or a waiting request at a sample or at the next, and no token was counted
    between them. Requests shorter than the second between two samples are missed by gauges, not by counters. A sample
    with waiting requests holds until the next. What lies between samples more than MAX_GAP_NS apart is neither.
    All empty where the engine reports no running requests.
    """
    waiting = _held(telemetry.series("waiting_requests", _ENGINE), low_ns, high_ns)
    idle, condition = _without_demand(telemetry, low_ns, high_ns)
    return _joined(idle, condition), _joined(waiting, waiting.value > 0)


# Less than this share of a wave's usual batch, with nothing waiting, is its beginning or its end.
RAMP_SHARE = 0.5


def ramp_intervals(telemetry: Telemetry, low_ns: int, high_ns: int) -> Intervals:
    """When waves of requests began or ran out: few requests ran, none waited, and before or after there were none.

    A wave is a time with running requests between two without. Its usual batch is the median over its samples. Starts and
    ends in ns; a server that always runs few requests has no such times.
    """
    # A wave that the window cuts is judged as a whole.
    first_ns, last_ns = telemetry.span_ns() or (low_ns, high_ns)
    running = _held(telemetry.series("running_requests", _ENGINE), first_ns, last_ns)
    waiting = _held(telemetry.series("waiting_requests", _ENGINE), first_ns, last_ns)
    value = running.value
    at = np.searchsorted(waiting.start, running.start, side="right") - 1
    queued = np.where(at >= 0, waiting.value[np.maximum(at, 0)], 0.0) if len(waiting.value) else np.zeros(len(value))
    ramp = np.zeros(len(value), dtype=bool)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], value > 0, [False]])))
    for first, last in edges.reshape(-1, 2).tolist():
        wave = value[first:last]
        full = np.flatnonzero((wave >= RAMP_SHARE * np.median(wave)) | (queued[first:last] > 0))
        # The recording may cut a wave: then it neither begins nor ends there.
        if first > 0 and len(full):
            ramp[first : first + int(full[0])] = True
        if last < len(value) and len(full):
            ramp[first + int(full[-1]) + 1 : last] = True
    starts, ends = (np.clip(edge, low_ns, high_ns) for edge in _joined(running, ramp))
    return starts[ends > starts], ends[ends > starts]


# Any of these growing means that the engine worked.
_PROGRESS = ("output_tokens", "prompt_tokens", "iteration_tokens_count", "requests_finished")


def _without_demand(telemetry: Telemetry, low: int, high: int) -> tuple[Held, Any]:
    """Running and waiting requests as intervals, and which of these are without demand."""
    running = telemetry.series("running_requests", _ENGINE)
    both = _held([*running, *telemetry.series("waiting_requests", _ENGINE)] if running else [], low, high)
    after = np.append(both.value[1:], 0.0)
    # Where the next interval does not follow at once, the next sample is unknown: the value itself must do.
    after[:-1] = np.where(both.start[1:] == both.end[:-1], after[:-1], 0.0)
    quiet = (both.value == 0) & (after == 0)
    for signal in _PROGRESS:
        for one in telemetry.series(signal, _ENGINE):
            quiet &= _held_value(one, both.start) == _held_value(one, both.end)
    return both, quiet


def _held_value(series: Series, times: IntArray) -> FloatArray:
    """A counter's value at its last sample before or at each time; 0 before the first."""
    at = np.searchsorted(series.time, times, side="right")
    return np.concatenate([[0.0], series.value])[at]


def _joined(held: Held, condition: Any) -> Intervals:
    """The intervals where the condition holds, neighbours joined."""
    start, end = held.start[condition], held.end[condition]
    if not len(start):
        return np.array([], dtype=np.int64), np.array([], dtype=np.int64)
    apart = start[1:] > end[:-1]
    return start[np.concatenate([[True], apart])], end[np.concatenate([apart, [True]])]


@dataclass(frozen=True)
class _Window:
    """The engine's series in the window, all parallel engines together."""

    telemetry: Telemetry
    low: int
    high: int

    def series(self, signal: str, **labels: str) -> list[Series]:
        found = self.telemetry.series(signal, _ENGINE)
        return [s for s in found if all(s.labels.get(k) == v for k, v in labels.items())]

    def increase(self, signal: str, **labels: str) -> float | None:
        """How much a counter grew, summed over its series; None where none has two samples."""
        grown = [s.increase(self.low, self.high) for s in self.series(signal, **labels)]
        known = [value for value in grown if value is not None]
        return float(sum(known)) if known else None

    def by_label(self, signal: str, label: str) -> dict[str, float]:
        """The increase for each value of a label."""
        result: dict[str, float] = {}
        for one in self.series(signal):
            grown = one.increase(self.low, self.high)
            if grown is not None:
                name = one.labels.get(label, "")
                result[name] = result.get(name, 0.0) + grown
        return result

    def seconds(self, signal: str) -> float | None:
        """The time between the first and the last sample of a signal in the window."""
        inside = [s.between(self.low, self.high + 1).time for s in self.series(signal)]
        spans = [(int(t[-1]) - int(t[0])) / 1e9 for t in inside if len(t) >= 2]
        return max(spans) if spans else None

    def rate(self, signal: str, **labels: str) -> float | None:
        return ratio(self.increase(signal, **labels), self.seconds(signal))

    def mean(self, histogram: str) -> float | None:
        """Mean of what a histogram observed in the window."""
        return ratio(self.increase(f"{histogram}_sum"), self.increase(f"{histogram}_count"))

    def buckets(self, histogram: str) -> tuple[FloatArray, FloatArray]:
        """Upper bounds and cumulative increases."""
        grown = self.by_label(f"{histogram}_bucket", "le")
        bounds = np.array([float(le) for le in grown], dtype=np.float64)
        order = np.argsort(bounds)
        counts = np.array(list(grown.values()), dtype=np.float64)[order]
        # After a restart buckets may have been read at different sides of it.
        return bounds[order], np.maximum.accumulate(counts) if len(counts) else counts

    def held(self, signal: str) -> Held:
        return _held(self.series(signal), self.low, self.high)

    def exposed(self, signal: str) -> str:
        """The engine's own name of a signal, for sources."""
        names = self.telemetry.facts("signal_sources")
        found = names.get("", {}).get(signal) if names else None
        return str(found or signal)

    def absent(self, what: str) -> str:
        """Why there is no value."""
        if not self.telemetry.series("running_requests", _ENGINE) and not self.telemetry.facts("engine"):
            return self.telemetry.why_missing("engine") or "no serving engine was observed"
        return f"the engine reported no {what} in the window"


class _Adder:
    """Adds measures with the unit that names.py gives them; a value of None needs a reason."""

    def __init__(self, measures: Measures, window: _Window) -> None:
        self._measures, self.window = measures, window

    def __call__(self, name: str, value: float | None, source: str, absent: str, rank: str = "C") -> None:
        unit = MEASURES[name].unit
        if value is not None and unit == "ns":
            value = round(value)
        elif value is not None and unit == "ratio":
            value = float(value)
        text = source if value is not None else absent
        self._measures.add(name, value, unit, rank, text)

    def counted(self, name: str, signal: str, what: str) -> None:
        """A measure that is the increase of one counter."""
        window = self.window
        self(name, window.increase(signal), f"increase of {window.exposed(signal)}", window.absent(what))

    def rate(self, name: str, signal: str, what: str, **labels: str) -> None:
        """A measure that is the rate of one counter."""
        window = self.window
        self(name, window.rate(signal, **labels), f"rate of {window.exposed(signal)}", window.absent(what))


def add_serving_telemetry(measures: Measures, telemetry: Telemetry, scope: TelemetryScope) -> None:
    """The engine's measures over the window; what it does not expose is None, with the reason as its source."""
    add = _Adder(measures, _Window(telemetry, scope.low_ns, scope.high_ns))
    for part in (_add_load, _add_batch, _add_latencies, _add_tokens, _add_cache, _add_requests, _add_spec, _add_work):
        part(add)


def _add_load(add: _Adder) -> None:
    window = add.window
    for name in ("running", "waiting"):
        held = window.held(f"{name}_requests")
        absent = window.absent(f"{name} requests")
        source = f"{window.exposed(f'{name}_requests')}, over time"
        add(f"{name}_requests_mean", held.mean(), source, absent)
        add(f"{name}_requests_max", float(held.value.max()) if len(held.value) else None, source, absent)
    both, quiet = _without_demand(window.telemetry, window.low, window.high)
    source = "share of the sampled time with no running and no waiting request and no token counted"
    known = ratio(float((both.end - both.start).sum()), window.high - window.low)
    add("engine_known_ratio", known or None, "samples of running requests", window.absent("running requests"))
    if known and known < MIN_KNOWN_SHARE:
        # Metrics stop answering under load first: silence is no sign of rest.
        absent = f"the engine's metrics answered for {100 * known:.0f} % of the window only"
        add("zero_running_ratio", None, source, absent)
    else:
        add("zero_running_ratio", both.share(quiet), source, window.absent("running requests"))
    held = window.held("waiting_requests")
    source = "share of the sampled time with a waiting request"
    add("waiting_ratio", held.share(held.value > 0), source, window.absent("waiting requests"))
    in_flight = _times(window.rate("requests_finished"), window.mean("e2e_latency_seconds"))
    source = "finished requests per second times their mean latency (Little's law)"
    add("in_flight_requests_mean", in_flight, source, window.absent("finished requests with their latency"))


# Where the most requests that may run at once stand, best first.
_LIMITS = (
    ("engine_arguments", "max_num_seqs"),
    ("engine_arguments", "max_running_requests"),
    ("engine_arguments", "max_batch_size"),
    ("engine_arguments", "parallel"),
    ("engine_settings", "max_running_requests"),
    ("engine_settings", "total_slots"),
)


def _running_limit(window: _Window) -> tuple[float | None, str]:
    """The most requests that may run at once, all parallel engines together, and where it stands."""
    engines = max(1, len(window.telemetry.scopes("running_requests")))
    for fact, key in _LIMITS:
        for settings in window.telemetry.facts(fact).values():
            if isinstance(settings.get(key), (int, float)):
                return float(settings[key]) * engines, key
    for fact in ("log_max_num_seqs", "log_max_running_requests"):
        for value in window.telemetry.facts(fact).values():
            return float(value) * engines, f"{fact.removeprefix('log_')} in the log"
    gauges = [s.value[-1] for s in window.series("running_requests_limit") if len(s.value)]
    return (float(sum(gauges)), window.exposed("running_requests_limit")) if gauges else (None, "")


def _add_batch(add: _Adder) -> None:
    window = add.window
    limit, where = _running_limit(window)
    no_limit = window.absent("limit of running requests") + ": --max-num-seqs or its like on the command line gives it"
    add("running_limit_count", limit, where, no_limit)
    held = window.held("running_requests")
    busy = held.value > 0
    sampled = Held(held.start[busy], held.end[busy], held.value[busy]).mean()
    running, how = _running(window, sampled)
    value, source = _at_most_one(ratio(running, limit)), f"{how}, over {where}"
    if value is None:
        reserved, capacity = window.held("kv_reserved_tokens").mean(), window.held("kv_capacity_tokens").mean()
        value, source = ratio(reserved, capacity), "tokens of the batch over the most it may hold"
    add("batch_efficiency_ratio", value, source, no_limit)
    _add_steps(add, running)


def _running(window: _Window, sampled: float | None) -> tuple[float | None, str]:
    """Mean running requests, and how it is known.

    Samples a second apart miss short requests, above all when a busy server answers the scrape between two batches:
    what finished requests spent in the engine is the lower bound then.
    """
    rate, latency = window.rate("requests_finished"), window.mean("e2e_latency_seconds")
    waited = window.mean("queue_time_seconds")
    served = None if rate is None or latency is None else rate * max(0.0, latency - (waited or 0.0))
    if served is not None and served > (sampled or 0.0):
        return served, "finished requests per second times their time without the queue (Little's law)"
    return sampled, "running requests while there are any"


def _add_steps(add: _Adder, running: float | None) -> None:
    """Steps, tokens per step, and the decode speed where steps hold nothing but decode."""
    window = add.window
    per_step = window.mean("iteration_tokens")
    steps = "iteration_tokens_count" if window.series("iteration_tokens_count") else "engine_steps"
    absent = window.absent("steps")
    add.rate("engine_steps_per_s", steps, "steps")
    add("tokens_per_step_mean", per_step, f"mean of {window.exposed('iteration_tokens_sum')}", absent)
    no_budget = window.absent("steps together with their token budget (max_num_batched_tokens)")
    budget = next((v for v in _known(window, "max_num_batched_tokens") if v), None)
    add("token_budget_ratio", ratio(per_step, budget), "tokens per step over max_num_batched_tokens", no_budget)
    no_graphs = window.absent("forward passes by graph mode")
    by_mode = window.by_label("engine_steps", "mode")
    graphs = sum(v for mode, v in by_mode.items() if "graph" in mode)
    shares = any("graph" in mode for mode in by_mode)
    total = sum(by_mode.values()) if shares else None
    add("graph_step_ratio", ratio(graphs, total), f"by mode of {window.exposed('engine_steps')}", no_graphs)
    interval, problem = _decode_interval(window, per_step, running)
    add("decode_interval_mean_ns", interval, "mean inter-token latency; steps hold nothing but decode", problem)


def _known(window: _Window, key: str) -> list[float]:
    facts = [f for name in ("engine_arguments", "engine_settings") for f in window.telemetry.facts(name).values()]
    values = [f[key] for f in facts if isinstance(f.get(key), (int, float))]
    return [float(v) for v in [*values, *window.telemetry.facts(f"log_{key}").values()]]


def _decode_interval(window: _Window, per_step: float | None, running: float | None) -> tuple[float | None, str]:
    """The time of a decode step (ns), where no prefill is mixed in; else why it cannot be told."""
    gap = window.mean("inter_token_latency_seconds")
    if gap is None or per_step is None or running is None:
        return None, window.absent("inter-token latency together with tokens per step and running requests")
    accepted = ratio(window.increase("spec_accepted_tokens"), window.increase("spec_drafts")) or 0.0
    if per_step > _MIXED_FACTOR * max(running, 1.0) * (1.0 + accepted):
        return None, (
            f"decode speed cannot be told: prefill is mixed in ({per_step:.1f} tokens per step "
            f"at {running:.1f} running requests)"
        )
    return gap * 1e9, ""


# Measure stem → histogram, and which quantiles.
_LATENCIES: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("queue_time", "queue_time_seconds", (95,)),
    ("ttft", "ttft_seconds", (50, 95, 99)),
    ("itl", "inter_token_latency_seconds", (50, 95, 99)),
    ("tpot", "time_per_output_token_seconds", (50, 95, 99)),
    ("e2e_latency", "e2e_latency_seconds", (50, 95, 99)),
    ("prefill_time", "prefill_time_seconds", ()),
    ("decode_time", "decode_time_seconds", ()),
)


def _add_latencies(add: _Adder) -> None:
    window = add.window
    for stem, histogram, quantiles in _LATENCIES:
        what = stem.replace("_", " ")
        mean, exposed = window.mean(histogram), window.exposed(f"{histogram}_sum").removesuffix("_sum")
        add(f"{stem}_mean_ns", _ns(mean), f"sum over count of {exposed}", window.absent(what))
        for quantile in quantiles:
            value, text = _quantile(window, histogram, quantile / 100, mean)
            add(f"{stem}_p{quantile}_ns", value, f"{exposed}: {text}", text or window.absent(what))
    parts = [window.mean(name) for name in ("ttft_seconds", "queue_time_seconds", "prefill_time_seconds")]
    ttft, queue, prefill = parts
    rest = None if ttft is None or queue is None or prefill is None else max(0.0, ttft - queue - prefill)
    source = "mean time to first token less queue and prefill time"
    add("front_end_time_mean_ns", _ns(rest), source, window.absent("time to first token, queue and prefill time"))


def _quantile(window: _Window, histogram: str, quantile: float, mean: float | None) -> tuple[float | None, str]:
    """The quantile in ns and how well it is known, or None and why ("" where there is no histogram)."""
    bounds, counts = window.buckets(histogram)
    found = bucket_quantile(bounds, counts, quantile)
    if found is None:
        return None, ""
    count = f"{counts[-1]:.0f} observations"
    if found.value is None:
        last = f"it lies above the last bound, {found.low:g} s" if len(bounds) > 1 else "the histogram has one bucket"
        return None, f"{last} ({count})"
    if found.low == 0 and mean is not None:
        # Nothing is known inside the first bucket but the mean, and by Markov's inequality that bounds the quantile.
        bound = mean / (1 - quantile)
        if bound < found.value:
            return bound * 1e9, f"an upper bound from the mean: below the first bound, {found.high:g} s ({count})"
    return found.value * 1e9, f"linear inside the bucket {found.low:g}-{found.high:g} s ({count})"


def _add_tokens(add: _Adder) -> None:
    window = add.window
    add.rate("prompt_tokens_per_s", "prompt_tokens", "prompt tokens")
    add.rate("output_tokens_per_s", "output_tokens", "output tokens")
    by_source = window.by_label("prompt_tokens_by_source", "source")
    computed = next((by_source[k] for k in ("local_compute", "prefill_compute") if k in by_source), None)
    source, seconds = "of them, computed here", window.seconds("prompt_tokens_by_source")
    cached = window.increase("cached_tokens")
    prompt = window.increase("prompt_tokens")
    if computed is None and cached is not None and prompt is not None:
        computed, source = max(0.0, prompt - cached), "prompt tokens less cached ones"
        seconds = window.seconds("prompt_tokens")
    add("computed_prompt_tokens_per_s", ratio(computed, seconds), source, window.absent("computed prompt tokens"))


def _add_cache(add: _Adder) -> None:
    window = add.window
    usage, source = _fullest(window)
    absent = window.absent("KV-cache usage")
    add("kv_cache_usage_mean_ratio", usage.mean(), source, absent)
    peak = float(usage.value.max()) if len(usage.value) else None
    add("kv_cache_usage_max_ratio", peak, source, absent)
    _add_prefix_cache(add)
    add.counted("preemption_count", "preemptions", "preemptions")
    add.rate("preemption_per_s", "preemptions", "preemptions")
    value, source = _recomputed(window)
    add("recomputed_prompt_ratio", value, source, window.absent("preemptions together with prompt lengths"))


def _fullest(window: _Window) -> tuple[Held, str]:
    """KV-cache usage of the engine where it is highest: engines do not share a cache."""
    engines = [_held([s], window.low, window.high) for s in window.series("kv_cache_usage_ratio")]
    engines = [held for held in engines if len(held.value)]
    source = window.exposed("kv_cache_usage_ratio")
    if window.telemetry.facts("merged_over_processes"):
        source += ", the largest of several processes"
    if len(engines) > 1:
        source += f", the fullest of {len(engines)} engines"
    if engines:
        return max(engines, key=lambda held: held.mean() or 0.0), source
    reserved, capacity = window.held("kv_reserved_tokens"), window.held("kv_capacity_tokens").mean()
    if capacity and len(reserved.value):
        return reserved._replace(value=reserved.value / capacity), "reserved tokens over capacity"
    return reserved._replace(start=reserved.start[:0], end=reserved.end[:0], value=reserved.value[:0]), ""


def _add_prefix_cache(add: _Adder) -> None:
    window = add.window
    hits, queries = window.increase("prefix_cache_hits"), window.increase("prefix_cache_queries")
    misses = window.increase("prefix_cache_misses")
    if queries is None and hits is not None and misses is not None:
        queries = hits + misses
    # A connector's hits belong to queries that the engine's own cache has counted already.
    found = None if hits is None else hits + (window.increase("external_cache_hits") or 0.0)
    absent = window.absent("prefix-cache look-ups")
    source = f"{window.exposed('prefix_cache_hits')} over {window.exposed('prefix_cache_queries')}"
    add("prefix_cache_hit_ratio", _at_most_one(ratio(found, queries)), source, absent)
    add("prefix_cache_query_count", queries, "tokens or blocks looked up", absent)


def _recomputed(window: _Window) -> tuple[float | None, str]:
    """The share of prompt tokens that neither finished nor running requests account for, where any was preempted."""
    preemptions, prompt = window.increase("preemptions"), window.increase("prompt_tokens")
    finished, mean = window.increase("request_prompt_tokens_sum"), window.mean("request_prompt_tokens")
    if preemptions is None or not prompt or finished is None:
        return None, ""
    if preemptions == 0:
        return 0.0, "nothing was preempted"
    running = window.held("running_requests")
    at_end = float(running.value[-1]) if len(running.value) else 0.0
    accounted = finished + at_end * (mean or 0.0)
    share = 1 - accounted / prompt
    # Engines that count every prompt once show none, although what was preempted is computed again.
    return (share, "prompt tokens beyond those of finished and running requests") if share > 0 else (None, "")


# Finish reasons and error classes that are not the engine's failures.
_ABORTED, _REFUSED = ("abort", "dropped"), ("overloaded",)


def _add_requests(add: _Adder) -> None:
    window = add.window
    reasons = window.by_label("requests_finished", "reason")
    classes = window.by_label("requests_failed", "class")
    absent = window.absent("finished requests")
    aborted = sum(v for d in (reasons, classes) for k, v in d.items() if k in _ABORTED)
    aborted += window.increase("requests_aborted") or 0.0
    failed = reasons.get("error", 0.0) + sum(v for k, v in classes.items() if k not in (*_ABORTED, *_REFUSED))
    done = sum(v for k, v in reasons.items() if k not in (*_ABORTED, "error"))
    known = bool(reasons)
    total = done + failed + aborted
    rows: Mapping[str, tuple[float | None, str]] = {
        "finished_request_count": (done, "finished, without aborted and failed ones"),
        "finished_requests_per_s": (ratio(done, window.seconds("requests_finished")), "finished, per second"),
        "failed_request_count": (failed, "finish reason error and the engine's failures by class"),
        "failed_request_ratio": (ratio(failed, total), "failed over finished, failed and aborted"),
        "aborted_request_count": (aborted, "aborted, mostly by clients that went away"),
        "aborted_request_ratio": (ratio(aborted, total), "aborted over finished, failed and aborted"),
        "length_finish_ratio": (ratio(reasons.get("length"), done), "cut off at their token limit, of the finished"),
    }
    for name, (value, source) in rows.items():
        add(name, value if known else None, source, absent)
    _add_refusals(add, classes)


def _add_refusals(add: _Adder, classes: Mapping[str, float]) -> None:
    window = add.window
    rejected = window.increase("requests_rejected")
    if rejected is None and classes:
        rejected = sum(v for k, v in classes.items() if k in _REFUSED)
    add("rejected_request_count", rejected, "refused at admission", window.absent("refused requests"))
    statuses = window.by_label("http_responses", "status")
    for digit in "45":
        count = sum(v for status, v in statuses.items() if status.startswith(digit)) if statuses else None
        source = f"{window.exposed('http_responses')} of the generating endpoints"
        add(f"http_{digit}xx_count", count, source, window.absent("HTTP answers by status"))
    add.counted("corrupted_request_count", "corrupted_requests", "corrupted requests (NaN logits)")


def _add_spec(add: _Adder) -> None:
    window = add.window
    drafts, drafted = window.increase("spec_drafts"), window.increase("spec_draft_tokens")
    accepted = window.increase("spec_accepted_tokens")
    absent = window.absent("speculative decoding")
    acceptance, source = ratio(accepted, drafted), "accepted over drafted tokens"
    if acceptance is None:
        acceptance, source = window.held("spec_acceptance_ratio").mean(), window.exposed("spec_acceptance_ratio")
    add("spec_acceptance_ratio", acceptance, source, absent)
    per_step = ratio(accepted, drafts)
    tokens, source = (None, "") if per_step is None else (1 + per_step, "1 + accepted tokens over drafts")
    if tokens is None:
        tokens, source = window.held("spec_tokens_per_step").mean(), window.exposed("spec_tokens_per_step")
    add("spec_tokens_per_step_mean", tokens, source, absent)
    add("spec_draft_tokens_mean", ratio(drafted, drafts), "drafted tokens over drafts", absent)
    first = window.by_label("spec_accepted_tokens_by_position", "position").get("0")
    add("spec_first_acceptance_ratio", ratio(first, drafts), "drafts whose first token was accepted", absent)
    step = ratio(window.increase("inter_token_latency_seconds_sum"), drafts)
    add("spec_step_mean_ns", _ns(step), "summed inter-token latency over drafts: one verified step", absent)


def _add_work(add: _Adder) -> None:
    window = add.window
    absent = window.absent("estimate of FLOPs and bytes; vLLM and SGLang have it with --enable-mfu-metrics")
    source = "the engine's own count per GPU: a lower bound, idle time included"
    add("engine_flop_per_s", window.rate("estimated_flops"), source, absent, "B")
    read, write = window.rate("estimated_read_bytes"), window.rate("estimated_write_bytes")
    moved = None if read is None or write is None else read + write
    add("engine_dram_bytes_per_s", moved, source, absent, "B")
    add.rate("server_cpu_cores_mean", "server_cpu_seconds", "CPU time")


def add_client_latencies(measures: Measures, result: Mapping[str, Any]) -> None:
    """What the clients of our own load saw (``LoadResult.to_dict()``), beside what the engine says of itself."""
    for stem in ("ttft", "tpot", "e2e_latency"):
        values = result.get(f"{stem}_ns") or {}
        for statistic in ("mean", "p50", "p95", "p99"):
            name, value = f"client_{stem}_{statistic}_ns", values.get(statistic)
            source = "the load's own clients" if value is not None else "no request of the load succeeded"
            measures.add(name, value, MEASURES[name].unit, "C", source)
    tried, failed = result.get("request_count"), result.get("failed_count")
    source = "failed over tried requests of the load"
    measures.add("client_error_ratio", ratio(failed, tried), MEASURES["client_error_ratio"].unit, "C", source)


def _ns(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e9


def _times(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one * other


def _at_most_one(value: float | None) -> float | None:
    return None if value is None else min(1.0, value)
