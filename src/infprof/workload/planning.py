"""What a run is made of before anything is computed: settings, requests, and the shapes that decode steps are padded to."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from infprof.errors import UsageError
from infprof.workload.faults import Fault
from infprof.workload.presets import ModelShape
from infprof.workload.requests import Sampling
from infprof.workload.settings import EngineSettings, RequestsSettings, longest_of, shortest_of

# The context of a run that needs less: engines are seldom cut to one run.
_LEAST_CONTEXT = 256


def plan_settings(
    shape: ModelShape, preset: str, fault: Fault, sent: RequestsSettings, engine: dict[str, Any]
) -> tuple[EngineSettings, RequestsSettings]:
    """The settings of a run with the fault in them, as far as the model goes; ``engine`` are fields that are not left at
    what suits the requests. Raises UsageError for requests that exceed the model's context."""
    most = engine.get("max_batch", EngineSettings.max_batch)
    usual = {"step_tokens": max(EngineSettings.step_tokens, most), "context": max(sent.longest, _LEAST_CONTEXT)}
    settings, sent = fault.apply(EngineSettings(**{**usual, **engine}), sent)
    if sent.longest > shape.context:
        raise UsageError(
            f"Requests of up to {sent.longest} tokens exceed the {shape.context} of preset {preset}: lower "
            "--prompt or --output, or choose a larger preset."
        )
    return replace(settings, context=min(settings.context, shape.context)), sent


def plan_requests(sent: RequestsSettings, vocabulary: int) -> list[tuple[list[int], Sampling]]:
    """Prompts and what is asked of them, with lengths around the means and random tokens, both from the seed."""
    rng = random.Random(sent.seed)
    plans = []
    for _ in range(sent.count):
        length, output = (
            rng.randint(shortest_of(mean), longest_of(mean)) for mean in (sent.prompt_tokens, sent.output_tokens)
        )
        plans.append(([rng.randrange(vocabulary) for _ in range(length)], Sampling(max_tokens=output)))
    return plans


def padded(count: int, most: int) -> int:
    """The next power of two, or ``most`` where that is less."""
    return min(1 << (count - 1).bit_length(), most)


def padded_sizes(most: int) -> list[int]:
    """What ``padded`` can give for 1 … most."""
    return sorted({padded(count, most) for count in range(1, most + 1)})
