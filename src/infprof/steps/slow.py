"""The slowest steps, and what was different in them: against the median step of their phase, kernel by kernel, slice by
slice, and with the longest gaps."""

from __future__ import annotations

from typing import Any

import numpy as np

from infprof.measures import operations as op
from infprof.measures.operations import Prepared
from infprof.measures.slices import DeviceTime
from infprof.results import IDLE_CAUSES
from infprof.steps.figures import SLICES, StepFigures
from infprof.trace import IntArray

SLOWEST, LINES = 3, 5
_WHAT = {op.GRAPH: "a graph", op.COPY: "a copy", op.MEMSET: "a memset"}


def slowest(prepared: Prepared, figures: StepFigures, time: DeviceTime, rows: IntArray) -> list[dict[str, Any]]:
    """The slowest of these steps, the slowest first, each compared with the median one of them."""
    if len(rows) < 2:
        return []
    length = figures.duration[rows]
    order = np.argsort(length, kind="stable")
    usual = int(rows[order[(len(rows) - 1) // 2]])
    found = rows[order[::-1][:SLOWEST]].tolist()
    return [_compared(prepared, figures, time, step, usual) for step in found if step != usual]


def _compared(prepared: Prepared, figures: StepFigures, time: DeviceTime, step: int, usual: int) -> dict[str, Any]:
    text = int(figures.steps.text[step])
    length = figures.duration
    return {
        "start_ns": int(figures.start[step]),
        "end_ns": int(figures.end[step]),
        "duration_ns": int(length[step]),
        "name": prepared.trace.strings[text] if text >= 0 else None,
        "median_ns": int(length[usual]),
        "median_start_ns": int(figures.start[usual]),
        "slices": _slice_changes(figures, step, usual),
        "kernels": _kernel_changes(prepared, figures, step, usual),
        "gaps": _gaps(prepared, figures, time, step),
    }


def _slice_changes(figures: StepFigures, step: int, usual: int) -> list[dict[str, Any]]:
    """By how much each slice is longer (or shorter) than in the median step; all of them add up to the difference."""
    change = figures.slices[:, step] - figures.slices[:, usual]
    order = np.argsort(-np.abs(change), kind="stable")
    return [
        {"kind": SLICES[i][0], "cause": SLICES[i][1], "delta_ns": int(change[i])} for i in order.tolist() if change[i]
    ]


def _kernel_changes(prepared: Prepared, figures: StepFigures, step: int, usual: int) -> list[dict[str, Any]]:
    """The kernels whose time differs most, by name."""
    counts, spent = zip(*(_kernels(prepared, figures, which) for which in (step, usual)), strict=True)
    change = {name: spent[0].get(name, 0) - spent[1].get(name, 0) for name in {**spent[0], **spent[1]}}
    strings = prepared.trace.strings
    largest = sorted((n for n in change if change[n]), key=lambda n: (-abs(change[n]), strings[n]))[:LINES]
    return [
        {
            "name": strings[name],
            "count": counts[0].get(name, 0),
            "median_count": counts[1].get(name, 0),
            "delta_ns": change[name],
        }
        for name in largest
    ]


def _kernels(prepared: Prepared, figures: StepFigures, step: int) -> tuple[dict[int, int], dict[int, int]]:
    """Name → number and summed time of a step's kernels."""
    ops, kernels, steps = prepared.operations, prepared.trace.kernels, figures.steps
    if kernels is None:
        return {}, {}
    rows = steps.lane.rows[steps.first[step] : steps.last[step]]
    rows = rows[ops.kind[rows] == op.KERNEL]
    names, which = np.unique(kernels["name"][ops.row[rows]], return_inverse=True)
    spent = np.bincount(which, ops.end[rows] - ops.start[rows])
    many = np.bincount(which, minlength=len(names))
    keys = names.tolist()
    return dict(zip(keys, many.tolist(), strict=True)), dict(zip(keys, map(int, spent.tolist()), strict=True))


def _gaps(prepared: Prepared, figures: StepFigures, time: DeviceTime, step: int) -> list[dict[str, Any]]:
    """The longest idle gaps of a step: when, mostly why, and what ended them."""
    gaps = time.gaps
    low, high = np.searchsorted(gaps.starts, [figures.start[step], figures.end[step]])
    here = np.arange(low, high)
    here = here[np.argsort(-gaps.lengths[here], kind="stable")][:SLOWEST]
    ops, kernels = prepared.operations, prepared.trace.kernels
    found = []
    for gap in here.tolist():
        ending = int(gaps.operation[gap])
        name = None if ending < 0 else _WHAT.get(int(ops.kind[ending]))
        if ending >= 0 and kernels is not None and ops.kind[ending] == op.KERNEL:
            name = prepared.trace.strings[int(kernels["name"][ops.row[ending]])]
        found.append(
            {
                "start_ns": int(gaps.starts[gap]),
                "end_ns": int(gaps.ends[gap]),
                "cause": IDLE_CAUSES[int(gaps.causes[:, gap].argmax())],
                "before": name,
            }
        )
    return found
