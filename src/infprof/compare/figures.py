"""Measures of a run by name and place, such that those of two runs can be told to be of the same thing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from infprof.compare.model import MeasureChange
from infprof.compare.runs import Run
from infprof.compare.spread import plain_change
from infprof.results import Measure
from infprof.steps.summary import WHOLE_WINDOW

Key = TypeVar("Key")
Value = TypeVar("Value")


class Place(NamedTuple):
    """Where a measure holds. GPUs and processes by their order: their numbers differ from run to run."""

    phase: str | None
    device: int
    process: int = 0

    @property
    def words(self) -> str:
        where = self.phase or "window"
        return (
            where
            + (f", GPU {self.device}" if self.device else "")
            + (f", process {self.process}" if self.process else "")
        )


_ENDING = re.compile(r"(?:, GPU (?P<gpu>\S+?))?(?:, process (?P<pid>\S+))?$")


def placed(run: Run) -> dict[tuple[str, Place], Measure]:
    """Measures of the window (or of each GPU) and of phases, by name and place."""
    devices = sorted(device.id for device in run.diagnosis.devices)
    processes: dict[tuple[str, str, int], list[str]] = {}
    found: dict[tuple[str, Place], Measure] = {}
    for measure in run.diagnosis.measures:
        place = _place(measure, devices, processes)
        if place is not None:
            found.setdefault((measure.name, place), measure)
    return found


def in_all(of_runs: Sequence[Mapping[Key, Value]]) -> dict[Key, list[Value]]:
    """What all of the runs have, with the value of each, in the order of the first run."""
    return {key: [one[key] for one in of_runs] for key in of_runs[0] if all(key in one for one in of_runs)}


def measures_of_all(runs: Sequence[Run]) -> dict[tuple[str, Place], list[Measure]]:
    """The measures that all of the runs have, by name and place."""
    return in_all([placed(run) for run in runs])


def median_of(measures: Sequence[Measure]) -> float | int | None:
    """The median over runs; None where one of them does not know the value."""
    values = [measure.value for measure in measures if measure.value is not None]
    if len(values) < len(measures):
        return None
    return values[0] if len(values) == 1 else float(np.median(values))


def measure_changes(
    base: Mapping[tuple[str, Place], list[Measure]], head: Mapping[tuple[str, Place], list[Measure]]
) -> list[MeasureChange]:
    """Every measure that both sides have, in BASE's order; of several runs the medians."""
    rows = []
    for (name, place), measures in base.items():
        if (name, place) not in head:
            continue
        was, now = median_of(measures), median_of(head[name, place])
        if was is None and now is None:
            continue
        change = plain_change(was, now)
        rows.append(MeasureChange(name, measures[0].unit, place.words, was, now, change.delta, change.change_ratio))
    return rows


def _place(measure: Measure, devices: list[int], processes: dict[tuple[str, str, int], list[str]]) -> Place | None:
    scope, text = measure.scope, measure.scope.id or ""
    if scope.kind == "window":
        return Place(None, 0)
    if scope.kind == "device":
        return Place(None, _order(text, devices))
    if scope.kind != "phase":
        return None
    ending = _ENDING.search(text)
    gpu, pid = (ending["gpu"], ending["pid"]) if ending else (None, None)
    name = text[: ending.start()] if ending else text
    device = _order(gpu, devices) if gpu else 0
    seen = processes.setdefault((measure.name, name, device), [])
    if pid is not None and pid not in seen:
        seen.append(pid)
    return Place(name, device, seen.index(pid) if pid is not None else 0)


def _order(text: str, devices: list[int]) -> int:
    return devices.index(int(text)) if text.isdecimal() and int(text) in devices else 0


def phase_names(run: Run) -> list[str]:
    """The names of phases, each once."""
    return list(dict.fromkeys(phase.key.name for phase in run.phases))


def is_whole_window(run: Run, phase: str) -> bool:
    """Whether the phase is the window: what was measured of the one holds for the other."""
    window = run.diagnosis.window.duration_ns
    return any(p.key.name == phase and (p.entry.get("total_ns") or 0) >= WHOLE_WINDOW * window for p in run.phases)


def focus_value(run: Run, name: str) -> float | None:
    """A measure of the window, of the GPU whose steps the diagnosis gives; None where it is not known."""
    device = (run.diagnosis.steps or {}).get("device")
    scopes = [("window", None), ("device", None if device is None else str(device))]
    for measure in run.diagnosis.measures:
        if measure.name == name and (measure.scope.kind, measure.scope.id) in scopes and measure.value is not None:
            return float(measure.value)
    return None
