"""All measures over telemetry. One module per area; the tuple below is the registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from infprof.results import Measures
from infprof.telemetry import Telemetry


class TelemetryScope(NamedTuple):
    """What to measure: samples of low <= time < high (the telemetry's clock), and the GPU, by its telemetry scope."""

    low_ns: int
    high_ns: int
    gpu: str | None


AddMeasures = Callable[[Measures, Telemetry, TelemetryScope], None]


def _areas() -> tuple[AddMeasures, ...]:
    # Imported on use: most traces have no telemetry.
    from infprof.measures.gpu_telemetry import add_gpu_telemetry
    from infprof.measures.host_telemetry import add_host_telemetry
    from infprof.measures.network_telemetry import add_network_telemetry
    from infprof.measures.serving_telemetry import add_serving_telemetry

    return (add_gpu_telemetry, add_host_telemetry, add_network_telemetry, add_serving_telemetry)


def add_telemetry(measures: Measures, telemetry: Telemetry, scope: TelemetryScope) -> None:
    """Every measure that the samples of one run allow; what cannot be said is None, with the reason as its source."""
    for add in _areas():
        add(measures, telemetry, scope)
