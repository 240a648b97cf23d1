"""How attention grows with the context: its time per step against the tokens in context, or against the step's number."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from infprof.distinct import distinct_values
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.measures.work.nesting import innermost_rows
from infprof.measures.work.steps import step_sums
from infprof.results import Measures
from infprof.steps.finding import LaneSteps
from infprof.steps.names import DECODE, MIXED, PREFILL
from infprof.steps.phases import PHASES, label
from infprof.trace import BoolArray, FloatArray, IntArray

# Fewer steps show no trend.
LEAST_STEPS = 12
# Where a line explains less of the variance, none is continued.
CLEAR_FIT = 0.5
FURTHER = 4
_CONTEXT = re.compile(
    r"(?<![a-z])(?<!max[ _-])(?:context|ctx|(?:seq(?:uence)?|kv|cache)[ _-]?len(?:s|gth)?)(?:[ _-]?(?:len|tokens?|length))?"
    r"\s*[=: ]\s*(\d+)|(\d+)\s+(?:tokens?\s+)?(?:in|of)\s+context",
    re.IGNORECASE,
)
_UNITS = {
    "attention_phase_ratio": "ratio",
    "attention_step_first_ns": "ns",
    "attention_step_last_ns": "ns",
    "attention_step_growth_ratio": "ratio",
    "attention_step_fit_ratio": "ratio",
    "attention_step_share_last_ratio": "ratio",
    "attention_context_tokens": "count",
    "attention_context_token_ns": "ns",
    "attention_share_further_ratio": "ratio",
}


class _Steps(NamedTuple):
    """One value per step: ``spent`` in kernels and in those of attention, ns, and ``first``, its first operation."""

    spent: FloatArray
    attention: FloatArray
    first: IntArray


def context_of(text: str) -> int:
    """The tokens in context, over all requests, that the range of a step names (``ctx=512``, vLLM's and SGLang's detailed
    annotations); 0 where it names none."""
    sums = step_sums(text)
    if sums is not None:
        return sums.keys
    found = _CONTEXT.search(text)
    return int(found[1] or found[2]) if found is not None else 0


def add_attention_growth(measures: Measures, prepared: Prepared, lanes: list[LaneSteps], scope: Intervals) -> None:
    """Attention's share where it is largest, and its growth over the decode steps of the window (rank D: by names).

    ``lanes`` are those of one device. Of steps whose phase is not known all are taken together. First and last are
    medians over the quarter of the steps with the least and the most context; where no range names the context, over the
    earliest and the latest.
    """
    lane = max(lanes, key=lambda one: int(one.is_step.sum()), default=None)
    if lane is None or prepared.trace.kernels is None or not lane.is_step.any():
        _add(
            measures, {}, "no steps were found" if prepared.trace.kernels is not None else "kernels were not collected"
        )
        return
    steps, phase = _measured(prepared, lane, scope), _phases(prepared, lane, scope)
    if not len(steps.spent) or not steps.attention.any():
        _add(measures, {}, "no attention kernel ran in a step")
        return
    prefill, decode = (phase == PHASES.index(name) for name in (PREFILL, DECODE))
    known = prefill | decode | (phase == PHASES.index(MIXED))
    values: dict[str, float] = {}
    shares = [_share(steps, prefill)]
    grown = decode if known.any() else np.ones(len(phase), dtype=np.bool_)
    if int(grown.sum()) >= LEAST_STEPS:
        values = _growth(steps.spent[grown], steps.attention[grown], _context(prepared, steps.first[grown]))
        shares.append(values.get("attention_step_share_last_ratio"))
    else:
        shares.append(_share(steps, grown))
    present = [share for share in shares if share is not None]
    if present:
        values["attention_phase_ratio"] = max(present)
    _add(measures, values, f"fewer than {LEAST_STEPS} decode steps")


def _growth(spent: FloatArray, attention: FloatArray, context: IntArray) -> dict[str, float]:
    """The figures over steps; ``context`` in tokens, 0 where no range names it."""
    named = bool((context > 0).all()) and len(np.unique(context)) > 1
    order = np.argsort(context, kind="stable") if named else np.arange(len(spent))
    spent, attention = spent[order], attention[order]
    x = context[order].astype(np.float64) if named else np.arange(len(order), dtype=np.float64)
    quarter = max(len(order) // 4, 3)
    first, last = float(np.median(attention[:quarter])), float(np.median(attention[-quarter:]))
    rest = float(np.median((spent - attention)[-quarter:]))
    slope, base = np.polyfit(x, attention, 1)
    variance = float(attention.var())
    fit = 1 - float((attention - slope * x - base).var()) / variance if variance > 0 else 0.0
    values = {
        "attention_step_first_ns": round(first),
        "attention_step_last_ns": round(last),
        "attention_step_fit_ratio": max(fit, 0.0),
    }
    if last > 0:
        values["attention_step_growth_ratio"] = max(1 - first / last, 0.0)
    if last + rest > 0:
        values["attention_step_share_last_ratio"] = last / (last + rest)
    if named:
        values["attention_context_tokens"] = int(x[-1])
        if fit >= CLEAR_FIT and slope > 0:
            further = slope * FURTHER * x[-1] + base
            values["attention_context_token_ns"] = float(slope)
            values["attention_share_further_ratio"] = float(further / (further + rest))
    return values


def _share(steps: _Steps, mine: BoolArray) -> float | None:
    spent = float(steps.spent[mine].sum())
    return float(steps.attention[mine].sum()) / spent if spent else None


def _inside(lane: LaneSteps, scope: Intervals) -> BoolArray:
    return np.asarray(lane.is_step & iv.overlaps(scope, lane.work_start, lane.work_end), dtype=np.bool_)


def _phases(prepared: Prepared, lane: LaneSteps, scope: Intervals) -> IntArray:
    return np.asarray(label(prepared, lane).phase[_inside(lane, scope)], dtype=np.int64)


def _measured(prepared: Prepared, lane: LaneSteps, scope: Intervals) -> _Steps:
    ops, table, strings = prepared.operations, prepared.trace.kernels, prepared.trace.strings
    assert table is not None, "steps are measured by their kernels"
    by_name = np.zeros(len(strings), dtype=np.bool_)
    by_name[[i for i, c in prepared.kernel_classes.items() if c.kind == "attention"]] = True
    rows = lane.lane.rows
    kernel = (ops.kind[rows] == op.KERNEL) & ~ops.is_comm[rows]
    spent = np.where(kernel, ops.end[rows] - ops.start[rows], 0)
    attention = np.where(by_name[np.where(kernel, table["name"][np.where(kernel, ops.row[rows], 0)], 0)], spent, 0)
    mine = np.flatnonzero(_inside(lane, scope))

    def sums(column: IntArray) -> FloatArray:
        total = np.concatenate([[0], np.cumsum(column)])
        return np.asarray(total[lane.last[mine]] - total[lane.first[mine]], dtype=np.float64)

    return _Steps(sums(spent), sums(attention), rows[lane.first[mine]])


def _context(prepared: Prepared, rows: IntArray) -> IntArray:
    """The tokens in context that the innermost range around the launch of each operation names, 0 where none does."""
    ranges, called = prepared.trace.ranges, prepared.trace.api_calls
    launch = prepared.operations.launch[rows]
    out = np.zeros(len(rows), dtype=np.int64)
    if ranges is None or called is None or not len(rows) or (launch < 0).any():
        return out
    texts = [text for text in distinct_values(ranges["text"]).tolist() if text >= 0]
    tokens = np.zeros(len(prepared.trace.strings), dtype=np.int64)
    tokens[texts] = [context_of(prepared.trace.strings[text]) for text in texts]
    telling = ranges.take((ranges["text"] >= 0) & (tokens[ranges["text"]] > 0) & (ranges["thread"] >= 0))
    if len(telling):
        times, threads = called["start"][launch], called["thread"][launch]
        around, _ = innermost_rows(telling["start"], telling["end"], telling["thread"], times, threads)
        out = np.where(around >= 0, tokens[telling["text"][np.maximum(around, 0)]], 0)
    return out


def _add(measures: Measures, values: dict[str, float], why_not: str) -> None:
    for name, unit in _UNITS.items():
        value = values.get(name)
        source = "kernel names, by step" if value is not None else why_not
        if value is None and name.startswith(("attention_context", "attention_share")) and values:
            source = "no range names the tokens in context, or no line fits"
        measures.add(name, value, unit, "D", source)
