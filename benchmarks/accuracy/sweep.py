"""Simulated workloads over faults, devices, models, batch sizes and host speeds, drawn at random from a seed.

A draw is labelled by what happened in it, not by the fault it was meant to show: a fault too small to matter must stay
unnamed. The catalogue of faults is checked against these labels elsewhere (tests/test_simulator_faults.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.accuracy.labels import Case, Label
from benchmarks.accuracy.truth import Format, label_of

from infprof.errors import UsageError
from infprof.simulator import SimulatedTrace, parse_spec, simulate, write_kineto, write_nsys_sqlite
from infprof.simulator.workload import SIMULATED_FAULTS
from infprof.workload.faults import FAULTS

ALL_FAULTS = (*FAULTS, *SIMULATED_FAULTS)
# A run without fault is what false alarms show in.
_HEALTHY_SHARE = 0.25


@dataclass(frozen=True)
class Ranges:
    """What draws are made from. ``layers``: of the model's, so that traces stay small."""

    gpus: tuple[str, ...]
    presets: tuple[str, ...]
    layers: tuple[int, ...]
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    ranks: tuple[int, ...]


TUNED = Ranges(
    gpus=("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA GeForce RTX 4090", "NVIDIA L4"),
    presets=("1b", "3b", "7b"),
    layers=(4, 8, 12, 16),
    batches=(1, 2, 4, 8, 16),
    prompts=(32, 128, 256, 512),
    outputs=(4, 8, 12),
    ranks=(2,),
)
# Devices and sizes that nothing was ever mended with: what it says of them is what it will say of others.
HELD_OUT = Ranges(
    gpus=("NVIDIA H200", "NVIDIA B200", "NVIDIA A100 80GB PCIe", "NVIDIA RTX 6000 Ada Generation", "NVIDIA A10G"),
    presets=("small", "1b", "3b", "7b"),
    layers=(6, 10, 14, 20),
    batches=(1, 3, 6, 12, 24),
    prompts=(48, 96, 200, 700),
    outputs=(5, 10, 16),
    ranks=(2, 4),
)


def cases(ranges: Ranges, source: str, seed: int, count: int) -> Iterator[Case]:
    """So many workloads, each as an nsys export (every third with counters) and as traces of PyTorch's profiler."""
    for number in range(count):
        description = _drawn(ranges, random.Random(f"{source}-{seed}-{number}"), number)
        name = f"{source}-{seed}-{number}-{description['workload']['fault']}"
        if number % 3 == 0:
            description["counters"] = {"rate": 20_000}
        counters = "counters" in description
        yield Case(f"{name}-nsys", source, partial(_make, description, Format(True, counters, False)))
        if description["workload"].get("graph_trace") != "graph":
            plain = {key: value for key, value in description.items() if key != "counters"}
            yield Case(f"{name}-kineto", source, partial(_make, plain, Format(False, False, True)))


def _drawn(ranges: Ranges, dice: random.Random, number: int) -> dict[str, Any]:
    """A description that fits its GPU."""
    for _ in range(100):
        description = _draw(ranges, dice, number)
        try:
            parse_spec(description)
        except UsageError:
            continue
        return description
    raise AssertionError(f"no workload of {ranges} fits its GPU")


def _draw(ranges: Ranges, dice: random.Random, number: int) -> dict[str, Any]:
    # All faults in turn, so that each is there however small the part is.
    fault = "none" if dice.random() < _HEALTHY_SHARE else ALL_FAULTS[number % len(ALL_FAULTS)]
    workload: dict[str, Any] = {
        "preset": dice.choice(ranges.presets),
        "layers": dice.choice(ranges.layers),
        "fault": fault,
        "gpu": dice.choice(ranges.gpus),
        "requests": {
            "count": dice.randint(4, 12),
            "prompt": dice.choice(ranges.prompts),
            "output": dice.choice(ranges.outputs),
        },
        "engine": {"max_batch": dice.choice(ranges.batches)},
        "host": {"schedule": f"{dice.uniform(20, 150):.0f}us", "process": f"{dice.uniform(10, 80):.0f}us"},
        "steps": 40,
    }
    if fault in ("none", "slow-rank", "slow-link") and dice.random() < (0.15 if fault == "none" else 1.0):
        workload["tensor_parallel"] = dice.choice(ranges.ranks)
    if fault == "none":
        _make_healthier(workload, dice)
    if fault == "long-context":
        workload["requests"] |= {"prompt": min(workload["requests"]["prompt"], 256), "count": 4}
    return {
        "name": f"draw {number}",
        "seed": number,
        "jitter": round(dice.uniform(0.01, 0.1), 3),
        "costs": {"launch": f"{dice.uniform(3, 8):.1f}us", "between": f"{dice.uniform(0.5, 6):.1f}us"},
        "workload": workload,
    }


def _make_healthier(workload: dict[str, Any], dice: random.Random) -> None:
    """Half of the runs without fault have all of a model's layers and a full batch, so that steps outlast the host."""
    if "tensor_parallel" not in workload and dice.random() < 0.15:
        workload["graph_trace"] = "graph"
    if dice.random() < 0.5:
        del workload["layers"]
        workload["preset"] = dice.choice(("3b", "7b"))
        workload["engine"] = {"max_batch": 16}
        workload["requests"]["count"] = 16
        workload["host"] = {"schedule": f"{dice.uniform(20, 60):.0f}us", "process": f"{dice.uniform(10, 30):.0f}us"}


def _make(description: Mapping[str, Any], form: Format, folder: Path) -> tuple[list[Path], Label]:
    trace = simulate(parse_spec(dict(description)))
    return written(trace, form, folder), label_of(trace, form, description["workload"]["fault"] == "none")


def written(trace: SimulatedTrace, form: Format, folder: Path) -> list[Path]:
    """The run's files: an nsys export where there are system calls to record, else those of PyTorch's profiler."""
    if form.os_calls:
        return [write_nsys_sqlite(trace, folder / "run.sqlite")]
    return write_kineto(trace, folder / "run.json.gz")
