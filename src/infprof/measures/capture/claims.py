"""What the matches of all graphs of a trace say: an operator for each kernel of a replay, and the work it had to do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from infprof.distinct import distinct
from infprof.errors import UsageError
from infprof.measures.capture.graphs import ReplayedGraph, replayed_graphs
from infprof.measures.capture.launches import LaunchSequence, launch_sequence
from infprof.measures.capture.matching import CaptureLimits, GraphMatch, Matcher
from infprof.measures.operations import Prepared
from infprof.measures.work.attention import PAGED_NAMES, paged_work
from infprof.measures.work.call import Call, Work
from infprof.measures.work.counting import Counted, repeats, steps_around
from infprof.trace import BoolArray, IntArray, OperatorInputs


@dataclass(frozen=True)
class GraphOperators:
    """The graphs that a trace replays, each with its best match.

    For each of ``Prepared.operations`` ``how`` has what tells its operator (BY_NAME, BY_POSITION, BY_ORDER), UNMATCHED
    for a kernel of a graph of which nothing is claimed, and -1 for what ran in no graph; ``inputs`` whether the inputs of
    that operator are known, too. ``given`` is the trace of ``--capture``, where there was one.
    """

    prepared: Prepared
    matches: list[GraphMatch]
    given: str | None

    @cached_property
    def how(self) -> IntArray:
        out = np.full(len(self.prepared.operations), -1, dtype=np.int64)
        for match in self.matches:
            out[match.graph.rows] = match.how if match.claimed else 0
        return out

    @cached_property
    def has_inputs(self) -> BoolArray:
        out = np.zeros(len(self.prepared.operations), dtype=np.bool_)
        for match in self.matches:
            out[match.graph.rows] = match.inputs
        return out

    def operator_of(self, operation: int) -> tuple[str, OperatorInputs | None] | None:
        """The operator of one operation, with its inputs where they are known; None where nothing is claimed."""
        for match in self.matches:
            line, column = np.nonzero(match.graph.rows == operation)
            if len(line):
                return _operator(match, int(column[0]))
        return None


def _operator(match: GraphMatch, kernel: int) -> tuple[str, OperatorInputs | None] | None:
    if not match.claimed or not match.how[kernel]:
        return None
    launch, trace = int(match.at[kernel]), match.source.prepared.trace
    assert trace.operators is not None
    given = int(trace.operators["inputs"][match.source.operator[launch]])
    inputs = trace.inputs[given] if match.inputs[kernel] and given >= 0 else None
    return trace.strings[int(match.source.operator_name[launch])], inputs


def graph_operators(prepared: Prepared, capture: Prepared | None, limits: CaptureLimits) -> GraphOperators | None:
    """Operators of the kernels of replayed graphs, from the trace itself and from ``capture``, a second trace.

    None where no graph was replayed, or nothing was captured here and no second trace is given. Raises UsageError where
    the second trace cannot tell any operator.
    """
    sources = [s for s in (launch_sequence(prepared, own=True),) if s is not None]
    if capture is not None:
        sources.insert(0, _given(capture))
    graphs = replayed_graphs(prepared) if sources else []
    if not graphs:
        return None
    matchers = [Matcher(prepared, source, graphs, limits) for source in sources]
    given = None if capture is None else sources[0].file
    return GraphOperators(prepared, [_best(graph, matchers) for graph in graphs], given)


def _best(graph: ReplayedGraph, matchers: list[Matcher]) -> GraphMatch:
    """The match with the most known inputs, then the most operators; of equals that of the first source."""
    found: list[GraphMatch] = []
    for matcher in matchers:
        found.append(matcher.match(graph))
        if found[-1].claimed and found[-1].inputs.all():
            break
    return max(found, key=lambda m: (m.claimed, m.share(m.inputs), m.share(m.matched)))


def _given(capture: Prepared) -> LaunchSequence:
    trace = capture.trace
    file = ", ".join(trace.provenance.inputs)
    how = "record some eager steps of the same model with PyTorch's profiler and record_shapes=True"
    if trace.operators is None or not len(trace.operators):
        raise UsageError(f"--capture {file}: it holds no operators of a framework, so it cannot tell any: {how}.")
    source = launch_sequence(capture, own=False)
    if source is None:
        raise UsageError(f"--capture {file}: no kernel in it was launched or captured one by one: {how}.")
    if not (source.operator >= 0).any():
        raise UsageError(f"--capture {file}: none of its kernels was launched inside an operator: {how}.")
    return source


def replayed_work(operators: GraphOperators) -> list[Counted]:
    """The counted work of the kernels whose inputs are known, one entry for each graph, for ``count_work``."""
    return [
        c for match in operators.matches if match.claimed and (c := _counted(operators.prepared, match)) is not None
    ]


def _counted(prepared: Prepared, match: GraphMatch) -> Counted | None:
    source, found = match.source, match.source.found
    known = np.flatnonzero(match.matched & match.inputs & ~prepared.operations.is_comm[match.graph.rows[0]])
    if found is None or not len(found.rows):
        return None
    counted, parent = source.counted_and_parents
    calls = counted[match.at[known]]
    plain = match.graph.rows[:, known[calls < 0]].ravel()
    known, calls = known[calls >= 0], calls[calls >= 0]
    used, at = distinct(calls)
    replays = len(match.graph.launch)
    call = at + len(used) * np.arange(replays)[:, None]
    repeated, partly = (np.tile(marks, replays) for marks in repeats(used, parent, found))
    names, works, which = _of_replays(prepared, match, found.which[used])
    rows = match.graph.rows[:, known].ravel()
    return Counted(rows, call.ravel(), which.ravel(), repeated, partly, names, works, plain)


def _of_replays(
    prepared: Prepared, match: GraphMatch, which: IntArray
) -> tuple[list[str], list[Work | None], IntArray]:
    """The works of the captured calls, and which of them each call of each replay (a line) has.

    Attention over a paged cache did not read at the capture what it reads in a replay: the step of the replay tells.
    """
    source, found = match.source, match.source.found
    table, trace = source.prepared.trace.operators, source.prepared.trace
    assert found is not None and table is not None
    names, works = list(found.names), list(found.works)
    lines = np.tile(which, (len(match.graph.launch), 1))
    api = prepared.trace.api_calls
    assert api is not None, "graphs are found through their launches"
    start, thread = (api[c][match.graph.launch] for c in ("start", "thread"))
    step, sums = steps_around(prepared.trace, start, thread)
    for number in np.unique(which).tolist():
        if names[number] not in PAGED_NAMES:
            continue
        row = int(found.rows[np.flatnonzero(found.which == number)[0]])
        call = Call(trace.inputs[int(table["inputs"][row])])
        for text in np.unique(step).tolist():
            names.append(names[number])
            works.append(paged_work(call, sums.get(text)))
            lines[np.ix_(step == text, which == number)] = len(works) - 1
    return names, works, lines
