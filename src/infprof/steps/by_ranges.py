"""Steps by ranges: what was launched from the start of one step's range to the start of the next."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

import numpy as np

from infprof.distinct import distinct_values
from infprof.measures import intervals as iv
from infprof.measures.operations import Prepared
from infprof.measures.window import no_ranges, no_such_range
from infprof.steps.lanes import Lane
from infprof.steps.names import FAMILIES, PROFILER_STEPS, Family
from infprof.trace import BoolArray, IntArray

# What is launched between two ranges (sampling, reading results) belongs to the step before it up to this share of the
# step's kernels, or this number; more is something else.
TAIL_SHARE, TAIL_KERNELS = 0.5, 64


@dataclass
class RangeSteps:
    """``starts``: the unit with which each stretch begins, ``is_step`` whether it is a step, ``text`` its range's name
    (string id, -1 for what is no step)."""

    starts: IntArray
    is_step: BoolArray
    text: IntArray
    how: str


def find_ranges(prepared: Prepared, lane: Lane, step_range: str | None = None) -> RangeSteps | None:
    """The steps of a lane by ranges, None where none says what a step is.

    ``step_range`` is a name or a pattern of the user's, which replaces the known families (see ``check_step_range``).
    """
    table = prepared.trace.ranges
    if table is None or not len(table) or lane.thread is None:
        return None
    strings = prepared.trace.strings
    used = [i for i in distinct_values(table["text"]).tolist() if i >= 0]
    if step_range is not None:
        chosen = np.array([i for i in used if _matches(strings[i], step_range)], dtype=np.int64)
        return _steps(prepared, lane, chosen, f"--step-range {step_range}", 1)
    for family in (*FAMILIES, PROFILER_STEPS):
        found = _of_family(prepared, lane, family, used)
        if found is not None:
            return found
    return None


def check_step_range(prepared: Prepared, step_range: str) -> None:
    """Raises UsageError where no range has this name or fits this pattern, with the nearest names."""
    table, strings = prepared.trace.ranges, prepared.trace.strings
    if table is None or not len(table):
        raise no_ranges("--step-range", prepared)
    texts = [strings[i] for i in distinct_values(table["text"]).tolist() if i >= 0]
    if not any(_matches(text, step_range) for text in texts):
        raise no_such_range("--step-range", step_range, prepared)


def _matches(text: str, pattern: str) -> bool:
    return text == pattern or fnmatch.fnmatchcase(text, pattern)


def _of_family(prepared: Prepared, lane: Lane, family: Family, used: list[int]) -> RangeSteps | None:
    strings = prepared.trace.strings
    chosen = np.array([i for i in used if family.pattern.search(strings[i])], dtype=np.int64)
    return _steps(prepared, lane, chosen, family.name, family.fewest) if len(chosen) else None


def _steps(prepared: Prepared, lane: Lane, texts: IntArray, how: str, fewest: int) -> RangeSteps | None:
    """Of the threads that have such ranges, the one in whose ranges most of the lane was launched.

    Another thread may carry ranges of the same name around something else, and one range may lie inside another.
    """
    table, calls = prepared.trace.ranges, prepared.trace.api_calls
    assert table is not None
    if calls is None:
        return None
    known = lane.launch >= 0
    called = np.maximum.accumulate(np.where(known, calls["start"][np.maximum(lane.launch, 0)], 0))
    wanted = np.zeros(len(prepared.trace.strings) + 1, dtype=np.bool_)
    wanted[texts] = True
    rows = np.flatnonzero(wanted[table["text"]])
    threads = prepared.trace.threads
    best: tuple[int, RangeSteps] | None = None
    for thread in distinct_values(table["thread"][rows]).tolist():
        if thread < 0 or threads[thread].process != lane.process:
            continue
        mine = rows[table["thread"][rows] == thread]
        mine = mine[np.lexsort((-table["end"][mine], table["start"][mine]))]
        mine = mine[iv.outermost(table["start"][mine], table["end"][mine])]
        low, high = (np.searchsorted(called, table[edge][mine], side="left") for edge in ("start", "end"))
        kernels = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lane.kernels)])
        ran = kernels[high] > kernels[low]
        if int(ran.sum()) < fewest:
            continue
        inside = int((kernels[high] - kernels[low])[ran].sum())
        # What a thread launched itself is surer than what was launched meanwhile.
        weight = inside * (2 if thread == lane.thread else 1)
        if best is None or weight > best[0]:
            best = weight, _stretches(lane, low[ran], high[ran], table["text"][mine[ran]], kernels, how)
    return None if best is None else best[1]


def _stretches(lane: Lane, low: IntArray, high: IntArray, text: IntArray, kernels: IntArray, how: str) -> RangeSteps:
    """Steps from the first unit of each range; a long tail behind a range is a stretch of its own, as is the head."""
    low, first = np.unique(low, return_index=True)
    high, text = np.minimum(high[first], np.append(low[1:], len(lane))), text[first]
    following = np.append(low[1:], len(lane))
    body, tail = kernels[high] - kernels[low], kernels[following] - kernels[high]
    long = (tail > np.maximum(TAIL_KERNELS, TAIL_SHARE * body)) & (high < following)
    starts = np.concatenate([low, high[long]])
    is_step = np.concatenate([np.ones(len(low), dtype=np.bool_), np.zeros(int(long.sum()), dtype=np.bool_)])
    texts = np.concatenate([text, np.full(int(long.sum()), -1, dtype=np.int64)])
    if not len(low) or low[0] > 0:
        starts, is_step, texts = np.append(starts, 0), np.append(is_step, False), np.append(texts, -1)
    order = np.argsort(starts, kind="stable")
    return RangeSteps(starts[order], is_step[order], texts[order], how)
