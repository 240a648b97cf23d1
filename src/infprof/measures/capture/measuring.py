"""Measures of how many kernels of replayed graphs have an operator, and what must be said of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from infprof.measures.capture.claims import GraphOperators
from infprof.measures.capture.matching import BY_NAME, BY_ORDER, BY_POSITION, UNMATCHED, CaptureLimits, GraphMatch
from infprof.measures.operations import Prepared
from infprof.results import Measures, Problem
from infprof.trace import BoolArray

NO_CAPTURE = "no capture of the graphs in this trace, and none given with --capture"
NO_REPLAY = "no kernel ran in a replayed graph"

_NAMES = (
    "capture_matched_ratio",
    "capture_matched_count_ratio",
    "capture_by_position_ratio",
    "capture_shapes_ratio",
)


def add_capture(measures: Measures, prepared: Prepared, rows: BoolArray, operators: GraphOperators | None) -> None:
    """The shares of the kernels of replayed graphs among ``rows`` of the operations; None with the reason without any."""
    how = None if operators is None else operators.how[rows]
    if operators is None or how is None or not (how >= 0).any():
        for name in _NAMES:
            measures.add(name, None, "ratio", "C", NO_CAPTURE if operators is None else NO_REPLAY)
        return
    ops = prepared.operations
    spent = (ops.end - ops.start)[rows]
    inside = how >= 0
    total = max(int(spent[inside].sum()), 1)
    source = f"kernels compared with {_files(operators)}"

    def share(chosen: Any) -> float:
        return int(spent[chosen].sum()) / total

    measures.add(_NAMES[0], share(how > UNMATCHED), "ratio", "C", source)
    measures.add(_NAMES[1], int((how > UNMATCHED).sum()) / int(inside.sum()), "ratio", "C", source)
    measures.add(_NAMES[2], share(how == BY_POSITION), "ratio", "C", source)
    measures.add(_NAMES[3], share(inside & operators.has_inputs[rows]), "ratio", "C", source)


def _files(operators: GraphOperators) -> str:
    """Where the operators come from."""
    claimed = [m.source for m in operators.matches if m.claimed]
    names = dict.fromkeys("the capture in this trace" if s.own else s.file for s in claimed)
    return " and ".join(names) or operators.given or "the capture in this trace"


def work_source(operators: GraphOperators | None) -> str:
    """What counted work of graphs is based on, empty where nothing of it was counted."""
    if operators is None or not operators.has_inputs.any():
        return ""
    return f"those of replayed graphs from {_files(operators)}"


def capture_problems(
    operators: GraphOperators | None, capture_file: str | None, limits: CaptureLimits
) -> list[Problem]:
    """What was matched, what was not claimed, and why."""
    if operators is None:
        if capture_file is None:
            return []
        text = f"--capture {capture_file} was not used: {NO_REPLAY} whose launch was recorded."
        return [Problem("capture-not-used", text)]
    total = max(sum(m.graph.total_ns for m in operators.matches), 1)
    claimed = [m for m in operators.matches if m.claimed]
    out = [_matched(operators, claimed, total)] if claimed else []
    refused = [m for m in operators.matches if not m.claimed]
    if refused and (claimed or operators.given is not None):
        spent = sum(m.graph.total_ns for m in refused)
        best = max(m.share(m.matched) for m in refused)
        least = f"{100 * limits.matched:.0f} %"
        text = (
            f"{len(refused)} of {len(operators.matches)} replayed graphs ({_percent(spent / total)} of their kernel time) match "
            f"{_files(operators)} too little to name operators: at best {_percent(best)} of a graph's time; {least} of it "
            f"is needed, and {100 * limits.same_names:.0f} % of its kernels by name. Is it of the same model and version?"
        )
        out.append(Problem("capture-not-matched", text, len(refused)))
    doubts: dict[str, float] = {}
    for match in claimed:
        if match.doubt:
            doubts[match.doubt] = doubts.get(match.doubt, 0.0) + match.share(match.matched & ~match.inputs) * (
                match.graph.total_ns / total
            )
    out += [
        Problem(
            "capture-shapes-unknown",
            f"Shapes are not known for {_percent(share)} of the time in replayed graphs: {why}.",
        )
        for why, share in doubts.items()
        if share > 0
    ]
    return out


def _matched(operators: GraphOperators, claimed: list[GraphMatch], total: int) -> Problem:
    def share(*how: int) -> float:
        return sum(m.share(np.isin(m.how, how)) * m.graph.total_ns for m in claimed) / total

    by = [
        f"{_percent(part)} {words}"
        for part, words in (
            (share(BY_NAME), "by kernel names"),
            (share(BY_POSITION), "by position, with another kernel for the same product"),
            (share(BY_ORDER), "by order alone, where the capture has no names"),
        )
        if part > 0
    ]
    replays = sum(len(m.graph.launch) for m in claimed)
    text = (
        f"Operators of kernels in replayed graphs are those of {_files(operators)}, for "
        f"{_percent(share(BY_NAME, BY_POSITION, BY_ORDER))} of their time ({', '.join(by)})."
    )
    return Problem("graph-operators", text, replays)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
