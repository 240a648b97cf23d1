"""What recording itself cost the program, as its own metrics show it: before the capture and during it."""

from __future__ import annotations

from infprof.measures.totals import ratio
from infprof.results import Measures
from infprof.telemetry import Telemetry

_ENGINE = "engine"
# Fewer tokens on either side say nothing, and neither does another load.
LEAST_TOKENS, SAME_LOAD = 50, 1.25
_LATENCIES = (
    ("inter_token_latency_seconds", "inter-token latency"),
    ("time_per_output_token_seconds", "time per output token"),
)


def add_recording_cost(measures: Measures, telemetry: Telemetry, capture: tuple[int, int]) -> None:
    """How much slower the engine was during the capture (start, end) than before it, or else than after it."""
    span = telemetry.span_ns() or capture
    low, high = capture
    value, source = None, "the engine's metrics do not reach beyond the capture"
    for when, other in (("before", (span[0], low)), ("after", (high, span[1]))):
        if other[1] <= other[0]:
            continue
        found = _by_latency(telemetry, capture, other, when) or _by_rate(telemetry, capture, other, when)
        if found is not None:
            value, source = found
            break
    measures.add("capture_slowdown_ratio", value, "ratio", source=source)


def _by_latency(
    telemetry: Telemetry, capture: tuple[int, int], other: tuple[int, int], when: str
) -> tuple[float, str] | None:
    for histogram, words in _LATENCIES:
        counts = [_grown(telemetry, f"{histogram}_count", *span) or 0.0 for span in (capture, other)]
        sums = [_grown(telemetry, f"{histogram}_sum", *span) or 0.0 for span in (capture, other)]
        if min(counts) >= LEAST_TOKENS and min(sums) > 0 and _same_load(telemetry, capture, other):
            during, outside = sums[0] / counts[0], sums[1] / counts[1]
            return (
                during / outside,
                f"mean {words} {during * 1e3:.1f} ms in the capture, {outside * 1e3:.1f} ms {when} it",
            )
    return None


def _by_rate(
    telemetry: Telemetry, capture: tuple[int, int], other: tuple[int, int], when: str
) -> tuple[float, str] | None:
    """By output tokens per second, where no latency is exposed and the load was the same."""
    tokens = [_grown(telemetry, "output_tokens", *span) or 0.0 for span in (capture, other)]
    seconds = [(span[1] - span[0]) / 1e9 for span in (capture, other)]
    if min(tokens) < LEAST_TOKENS or not _same_load(telemetry, capture, other):
        return None
    during, outside = tokens[0] / seconds[0], tokens[1] / seconds[1]
    return outside / during, f"{during:.0f} output tokens per second in the capture, {outside:.0f} {when} it"


def _grown(telemetry: Telemetry, signal: str, low: int, high: int) -> float | None:
    grown = [s.increase(low, high) for s in telemetry.series(signal, _ENGINE)]
    known = [value for value in grown if value is not None]
    return sum(known) if known else None


def _same_load(telemetry: Telemetry, capture: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether about as many requests ran; where that is not reported, nothing speaks against it."""
    means = []
    for low, high in (capture, other):
        values = [s.between(low, high).value for s in telemetry.series("running_requests", _ENGINE)]
        means.append(sum(float(v.mean()) for v in values if len(v)))
    if not telemetry.series("running_requests", _ENGINE):
        return True
    more = ratio(max(means), min(means))
    return more is not None and more <= SAME_LOAD
