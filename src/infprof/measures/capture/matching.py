"""Operators for the kernels of a replayed graph: where its sequence of kernels stands among launches with operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from infprof.measures.capture import pairing
from infprof.measures.capture.aligning import Place, Text, common_subsequence, exact_places, likely_places
from infprof.measures.capture.graphs import ReplayedGraph
from infprof.measures.capture.launches import LaunchSequence
from infprof.measures.capture.tokens import captured_size
from infprof.measures.kernel_class import short_name
from infprof.measures.operations import Prepared
from infprof.trace import BoolArray, IntArray

# How a kernel came to its launch.
UNMATCHED, BY_NAME, BY_POSITION, BY_ORDER = range(4)

# Of the kernels whose grids are known on both sides, the share that must have equal ones for shapes to be the same.
_SAME_GRIDS = 0.95
# Places that match less than the best by this share of its kernels are worse ones; the others are equally good.
_EQUALLY_GOOD = 0.02
# Kernels of all places of a graph that are compared with each other.
_MAX_COMPARED = 8_000_000


class CaptureLimits(NamedTuple):
    """Shares of a graph from which operators are claimed: of its time with one, of its kernels matched by name."""

    matched: float
    same_names: float


@dataclass(frozen=True)
class GraphMatch:
    """One value for each kernel of the graph. ``at`` is a launch of ``source`` (-1 = none), ``how`` BY_NAME, ….

    ``inputs`` says whether the operator's inputs are those of the replay. Nothing is claimed where ``claimed`` is False.
    ``doubt`` says why inputs are not known, empty where they are.
    """

    graph: ReplayedGraph
    source: LaunchSequence
    at: IntArray
    how: IntArray
    inputs: BoolArray
    claimed: bool
    doubt: str

    def share(self, chosen: BoolArray) -> float:
        """Share of the graph's kernel time in the chosen kernels."""
        return float(self.graph.ns[chosen].sum()) / max(self.graph.total_ns, 1)

    @property
    def matched(self) -> BoolArray:
        return np.asarray(self.how != UNMATCHED, dtype=np.bool_)


class _Places(NamedTuple):
    """Equally good places: a line for each, a column for each kernel of the graph."""

    at: IntArray
    how: IntArray


class Matcher:
    """Matches the graphs of one trace with the launches of one source."""

    def __init__(
        self, prepared: Prepared, source: LaunchSequence, graphs: list[ReplayedGraph], limits: CaptureLimits
    ) -> None:
        self._source = source
        self._limits = limits
        self._graphs = graphs
        self._kinds = {i: k.kind for i, k in prepared.kernel_classes.items()}
        self._own_codes, codes = _codes(prepared, source, graphs)
        self._text = Text(codes, source.segment)
        # Where graphs of the same kernels stand: branches may start them in another order in each replay.
        self._known_places: dict[bytes, list[Place]] = {}
        sizes = np.unique(source.tokens[1])
        self._sizes = sizes[sizes >= 0].tolist()

    def match(self, graph: ReplayedGraph) -> GraphMatch:
        """The best match of a graph; ``claimed`` is False where it is too little to say anything."""
        pattern = self._own_codes[graph.name]
        places = self._exact(pattern) or self._likely(graph, pattern)
        found = self._judged(graph, places) if places is not None else None
        if found is None or not found.claimed:
            by_order = self._by_order(graph)
            found = self._judged(graph, by_order) if by_order is not None else found
        if found is not None:
            return found
        nothing = np.zeros(len(graph), dtype=np.int64)
        return GraphMatch(graph, self._source, nothing - 1, nothing, nothing > 0, False, "")

    # --- places ------------------------------------------------------------------------------------------------------

    def _exact(self, pattern: IntArray) -> _Places | None:
        source, n = self._source, len(pattern)
        starts = exact_places(pattern, self._text)
        if not len(starts):
            return None
        # A capture of just these kernels is more than a stretch of something longer.
        first, end = source.segment_bounds
        segment = np.searchsorted(first, starts, side="right") - 1
        whole = source.captured[starts] & (starts == first[segment]) & (end[segment] - starts == n)
        starts = starts[whole] if whole.any() else starts
        kept = starts[: max(_MAX_COMPARED // n, 1)]
        at = kept[:, None] + np.arange(n)
        return _Places(at, np.full_like(at, BY_NAME))

    def _likely(self, graph: ReplayedGraph, pattern: IntArray) -> _Places | None:
        key = np.sort(pattern).tobytes()
        places = self._known_places.get(key)
        if places is None:
            places = likely_places(pattern, self._text)
        if not places:
            return None
        kinds = np.array([self._kinds[i] for i in graph.name.tolist()])
        lines = [self._paired(pattern, kinds, place) for place in places]
        score = np.array([np.count_nonzero(how) for _, how in lines])
        good = np.argsort(-score, kind="stable")
        good = good[score[good] >= score.max() - _EQUALLY_GOOD * len(pattern)]
        self._known_places[key] = [places[i] for i in good.tolist()]
        at, how = (np.array([lines[i][part] for i in good.tolist()]) for part in (0, 1))
        return _Places(at, how)

    def _paired(self, pattern: IntArray, kinds: pairing.KindArray, place: Place) -> tuple[IntArray, IntArray]:
        """The launch of each kernel in one place, and how they came together."""
        here = slice(place.start, place.end)
        text, source = self._text.codes[here], self._source
        at = common_subsequence(pattern, text)
        at = pairing.reordered(at, pattern, text, source.signature[here])
        how = np.where(at >= 0, BY_NAME, UNMATCHED)
        at = pairing.products_between(at, kinds, np.array([source.kind[i] for i in source.name[here].tolist()]))
        how[(at >= 0) & (how == UNMATCHED)] = BY_POSITION
        return np.where(at >= 0, at + place.start, -1), how

    def _by_order(self, graph: ReplayedGraph) -> _Places | None:
        """Captures of as many launches as the graph has kernels, without names: where the classes do not contradict."""
        source, n = self._source, len(graph)
        first, end = source.segment_bounds
        unnamed = np.add.reduceat((source.name >= 0).astype(np.int64), first) == 0
        fitting = source.captured[first] & (end - first == n) & unnamed
        if source.own:
            fitting &= source.start[end - 1] < graph.first_launch_ns
        if source.found is None or not fitting.any():
            return None
        kinds = np.array([self._kinds[i] for i in graph.name.tolist()])
        works = np.array(["" if w is None else w.kind for w in source.found.works] + [""])
        which = np.append(source.found.which, len(works) - 1)
        counted = source.counted_and_parents[0]
        at = first[fitting][: max(_MAX_COMPARED // n, 1), None] + np.arange(n)
        agreeing = pairing.plausible(kinds, works[which[counted[at]]])
        at = at[agreeing]
        return _Places(at, np.full_like(at, BY_ORDER)) if len(at) else None

    # --- what is claimed ---------------------------------------------------------------------------------------------

    def _judged(self, graph: ReplayedGraph, places: _Places) -> GraphMatch:
        """The first of the places that fit the replay's batch, without what the others contradict."""
        keep, doubt = self._of_this_batch(graph, places)
        at, how = places.at[keep], places.how[keep]
        there = np.maximum(at, 0)
        both = (at >= 0) & (at[0] >= 0)
        name, signature = self._source.operator_name[there], self._source.signature[there]
        same_operator = ((name == name[0]) | ~both).all(axis=0)
        line = np.where(same_operator & (name[0] >= 0), how[0], UNMATCHED)
        matched = line != UNMATCHED
        # A kernel with another grid worked on other shapes, wherever it stands.
        known, differs = self._grids(graph, at[:1], how[:1])
        inputs = matched & ((signature == signature[0]) | ~both).all(axis=0) & ~(known & differs)[0]
        if doubt:
            inputs[:] = False
        elif not inputs[matched].all():
            doubt = "kernels match in several places with different shapes, or have other grids there"
        found = GraphMatch(graph, self._source, np.where(matched, at[0], -1), line, inputs, True, doubt)
        named = np.count_nonzero((line == BY_NAME) | (line == BY_ORDER)) / len(graph)
        if found.share(matched) >= self._limits.matched and named >= self._limits.same_names:
            return found
        return GraphMatch(graph, self._source, found.at, line, inputs & False, False, "")

    def _of_this_batch(self, graph: ReplayedGraph, places: _Places) -> tuple[IntArray, str]:
        """The places that had the replay's batch, as far as grids and numbers of tokens tell; and why this is in doubt."""
        keep, confirmed = np.arange(len(places.at)), False
        known, differs = self._grids(graph, places.at, places.how)
        enough = known.sum(axis=1) >= np.maximum((places.how != UNMATCHED).sum(axis=1) / 2, 1)
        same = enough & ((known & ~differs).sum(axis=1) >= _SAME_GRIDS * known.sum(axis=1))
        if enough.any():
            if not same.any():
                return keep, "the grids of its kernels differ, so the batch had another size"
            keep, confirmed = np.flatnonzero(same), True
        if graph.tokens >= 0:
            fits, told = self._tokens_fit(graph.tokens, places.at[keep])
            if fits.any():
                return keep[fits], ""
            if told.all() and not confirmed:
                return keep, f"it holds no step or capture for the {graph.tokens} tokens of the replay"
        if confirmed or self._has_one_capture_each(graph):
            return keep, ""
        return keep, "neither grids nor ranges around the steps say that the batch had the same size"

    def _grids(self, graph: ReplayedGraph, at: IntArray, how: IntArray) -> tuple[BoolArray, BoolArray]:
        """Where both grids are known of a kernel matched by name, and where they differ."""
        there = np.maximum(at, 0)
        grid, block = self._source.grid[there], self._source.block[there]
        known = (how == BY_NAME) & (grid >= 0) & (graph.grid >= 0)
        differs = (grid != graph.grid) | ((block != graph.block) & (block >= 0) & (graph.block >= 0))
        return known, differs

    def _tokens_fit(self, tokens: int, at: IntArray) -> tuple[BoolArray, BoolArray]:
        """Which places lie in a step of so many tokens or a capture for them, and which say how many they have."""
        counts = np.cumsum(at >= 0, axis=1)
        middle = np.argmax(counts > counts[:, -1:] // 2, axis=1)
        probe = np.maximum(at[np.arange(len(at)), middle], 0)
        step, size = (column[probe] for column in self._source.tokens)
        wanted = captured_size(tokens, self._sizes)
        fits = np.where(size >= 0, size == (-2 if wanted is None else wanted), step == tokens)
        return fits, (size >= 0) | (step >= 0)

    def _has_one_capture_each(self, graph: ReplayedGraph) -> bool:
        """Whether the trace itself shows the capture of each graph of this length, before its first replay."""
        if not self._source.own:
            return False
        first, end = self._source.segment_bounds
        captures = np.sort(self._source.start[end - 1][end - first == len(graph)])
        alike = sorted(g.first_launch_ns for g in self._graphs if len(g) == len(graph))
        return len(alike) <= len(captures) and all(a > c for a, c in zip(alike, captures.tolist(), strict=False))


def _codes(prepared: Prepared, source: LaunchSequence, graphs: list[ReplayedGraph]) -> tuple[IntArray, IntArray]:
    """Codes of kernel names: for each string of the trace, and for each launch of the source (-1 = not known).

    Recorders spell template arguments and parameters differently: names of two of them are compared without.
    """
    own, other = prepared.trace, source.prepared.trace
    in_full = own.provenance.tool == other.provenance.tool
    numbers: dict[str, int] = {}

    def coded(strings: list[str], used: IntArray) -> IntArray:
        out = np.full(len(strings) + 1, -1, dtype=np.int64)
        for i in used.tolist():
            text = strings[i] if in_full else short_name(strings[i], 1000)
            out[i] = numbers.setdefault(text, len(numbers))
        return out

    mine = coded(own.strings, np.unique(np.concatenate([g.name for g in graphs])))
    names = np.unique(source.name)
    return mine, coded(other.strings, names[names >= 0])[source.name]
