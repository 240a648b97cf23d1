"""Plays a recording again with other costs: one pass over columns, and a short walk over what ties the chains together.

Along a chain, times are sums: with C the sum of steps up to an operation, start - C never falls along its stream, and rises
only where a launch or another dependency is later than the stream. The same holds for a thread. So a chain is cut only
where another chain acts on it (a call that waits for the GPU, an operation that waits for another stream's), the pieces in
between give one number each (the largest launch time less C), and the walk from piece to piece is all that is done one by
one. Max and plus only: no cost that falls can make anything later.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from infprof.errors import InfprofError
from infprof.replay.recording import NEVER, Edges, Recording
from infprof.trace import BoolArray, FloatArray, IntArray

_FAR = np.iinfo(np.int64).max


@dataclass
class Costs:
    """Factors of recorded times; 1 (and for columns None) leaves them as they were.

    ``operation``: per operation in chain order; ``call``: per call; ``host``: of the thread's own work between calls,
    ``waited`` of its waits there; ``lag``: of turn-arounds, dispatch and the return from waits. Without ``waits``,
    synchronising calls no longer wait for the GPU.
    """

    operation: FloatArray | None = None
    call: FloatArray | None = None
    host: float = 1.0
    waited: float = 1.0
    lag: float = 1.0
    waits: bool = True

    def scale_operations(self, chosen: BoolArray, factor: float) -> None:
        """One more factor on these operations, in chain order."""
        self.operation = _with_factor(self.operation, chosen, factor)

    def scale_calls(self, chosen: BoolArray, factor: float) -> None:
        """One more factor on these calls."""
        self.call = _with_factor(self.call, chosen, factor)


def _with_factor(factors: FloatArray | None, chosen: BoolArray, factor: float) -> FloatArray:
    factors = np.ones(len(chosen)) if factors is None else factors
    factors[chosen] *= factor
    return factors


@dataclass
class Replayed:
    """Times of a replay, ns from the trace's origin: of operations as in ``Prepared.operations``, and of calls."""

    start: IntArray
    end: IntArray
    call_start: IntArray
    call_end: IntArray

    @property
    def span_ns(self) -> int:
        """From the first operation's start to the last one's end."""
        return int(self.end.max() - self.start.min()) if len(self.start) else 0


class Replay:
    """Plays one recording any number of times. Raises InfprofError where its dependencies go round in a circle."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._cut()
        self._tie()

    # --- structure, once -------------------------------------------------------------------------------------------------

    def _cut(self) -> None:
        chains, calls = self.recording.chains, self.recording.calls
        into, back = self.recording.into_operations, self.recording.into_calls
        # Segments of threads: number 0 stands for fixed times, then one for the beginning of all threads.
        waits = np.zeros(len(calls), dtype=np.bool_)
        waits[back.target] = True
        threads = np.cumsum(calls.first)
        self.segment_after = np.cumsum(calls.first | waits) + np.cumsum(calls.first & waits)
        self.segment_before: IntArray = self.segment_after - waits
        self.thread_count = int(threads[-1]) if len(threads) else 0
        self.waiting_calls = np.flatnonzero(waits)
        self.segments = 1 + (int(self.segment_after[-1]) if len(calls) else 0)
        has_call = chains.call >= 0
        segment = np.where(has_call, self.segment_before[np.maximum(chains.call, 0)] if len(calls) else 0, -1)
        segment[chains.pinned] = 0
        self.segment = segment
        head = chains.first.copy()
        head[into.target] = True
        sources = np.concatenate([into.source, back.source])
        behind = sources + 1
        head[behind[behind < len(head)]] = True
        # Operations without a launch belong to whatever piece they follow.
        known = np.flatnonzero(segment >= 0)
        changed = known[1:][segment[known[1:]] != segment[known[:-1]]]
        head[changed] = True
        self.heads = np.flatnonzero(head)
        self.piece = np.cumsum(head) - 1
        self.last = np.append(self.heads[1:], len(head)) - 1
        of_piece = np.full(len(self.heads), -1, dtype=np.int64)
        of_piece[self.piece[known]] = segment[known]
        self.piece_segment = of_piece

    def _tie(self) -> None:
        """Edges between segments and pieces, and an order in which each comes after all it waits for."""
        chains = self.recording.chains
        into, back = self.recording.into_operations, self.recording.into_calls
        base = self.segments
        follows = np.flatnonzero(~chains.first[self.heads])
        # No stream begins before the first operation of all.
        begins = np.flatnonzero(chains.first[self.heads])
        launched = np.flatnonzero(self.piece_segment >= 0)
        waiting = self.segment_after[self.waiting_calls]
        # source item, target item; weights come in the same order in ``_weights``.
        self.source = np.concatenate(
            [
                waiting - 1,
                base + self.piece[back.source],
                base + follows - 1,
                self.piece_segment[launched],
                base + self.piece[into.source],
                np.zeros(len(begins), dtype=np.int64),
            ]
        )
        self.target = np.concatenate(
            [
                waiting,
                self.segment_after[back.target] if len(back.target) else back.target,
                base + follows,
                base + launched,
                base + self.piece[into.target],
                base + begins,
            ]
        )
        self.launched_pieces = launched
        self.kept = np.array(
            [len(waiting), len(back.source), len(follows), len(launched), len(into.source), len(begins)]
        )
        self.items = base + len(self.heads)
        order = self._order()
        rank = np.empty(self.items, dtype=np.int64)
        rank[order] = np.arange(self.items)
        self.by_target = np.argsort(rank[self.target], kind="stable")
        self.order = order
        counts = np.bincount(rank[self.target], minlength=self.items)
        self.reached = np.concatenate([[0], np.cumsum(counts)])
        self.rank = rank

    def _order(self) -> IntArray:
        """By recorded time, which nearly always does; else by what waits for what."""
        calls, chains = self.recording.calls, self.recording.chains
        time = np.full(self.items, NEVER, dtype=np.int64)
        time[self.segment_after[self.waiting_calls]] = calls.end[self.waiting_calls]
        time[self.segments :] = chains.start[self.heads]
        order = np.argsort(time, kind="stable")
        rank = np.empty(self.items, dtype=np.int64)
        rank[order] = np.arange(self.items)
        if (rank[self.source] < rank[self.target]).all():
            return order
        return self._sorted_by_edges(time)

    def _sorted_by_edges(self, time: IntArray) -> IntArray:
        left = np.bincount(self.target, minlength=self.items)
        by_source = np.argsort(self.source, kind="stable")
        targets = self.target[by_source].tolist()
        low = np.searchsorted(self.source[by_source], np.arange(self.items + 1)).tolist()
        times, remaining = time.tolist(), left.tolist()
        ready = [(times[i], i) for i in range(self.items) if not remaining[i]]
        heapq.heapify(ready)
        order = []
        while ready:
            _, item = heapq.heappop(ready)
            order.append(item)
            for target in targets[low[item] : low[item + 1]]:
                remaining[target] -= 1
                if not remaining[target]:
                    heapq.heappush(ready, (times[target], target))
        if len(order) < self.items:
            raise InfprofError(
                "what-if is off: calls and operations of this trace seem to wait for each other in a circle, so its clocks "
                "do not fit together."
            )
        return np.array(order, dtype=np.int64)

    # --- playing ---------------------------------------------------------------------------------------------------------

    def run(self, costs: Costs) -> Replayed:
        """All times with these costs."""
        chains, calls = self.recording.chains, self.recording.calls
        into, back = self.recording.into_operations, self.recording.into_calls
        factor = costs.operation
        length = _scaled(chains.end - chains.start, factor)
        step = np.zeros(len(chains), dtype=np.int64)
        step[1:] = _scaled(chains.part[1:], None if factor is None else factor[:-1])
        step += _lagging(chains.gap, costs.lag)
        step[chains.first] = 0
        sums = np.cumsum(step)
        own = calls.lead_own + _scaled(calls.own - calls.lead_own, costs.call)
        gap = np.add(calls.lead_in, _scaled(calls.work, costs.host), dtype=np.int64)
        gap += _scaled(calls.waited, costs.waited)
        reached = self._along_threads(gap + own)
        launch = self._launch_times(costs, reached - own)
        free = np.where(launch > NEVER, launch - sums, NEVER)
        tail = _scaled(back.part, _at(factor, back.source)) + _lagging(back.lag, costs.lag)
        lag = _scaled(into.part, _at(factor, into.source)) + _lagging(into.lag, costs.lag)
        weight = np.zeros(int(self.kept.sum()), dtype=np.int64)
        low = np.concatenate([[0], np.cumsum(self.kept)])
        held = sums[back.source] + tail - reached[back.target] if len(back.target) else tail
        weight[low[1] : low[2]] = held if costs.waits else NEVER
        if len(self.heads):
            weight[low[3] : low[4]] = np.maximum.reduceat(free, self.heads)[self.launched_pieces]
        weight[low[4] : low[5]] = sums[into.source] + lag - sums[into.target]
        begin = self.recording.begin_ns - self.recording.origin_ns
        weight[low[5] :] = begin - sums[chains.first]
        value = self._walk(weight)
        start = self._starts(value, free, sums, into, weight[low[4] : low[5]], begin)
        end = start + length
        self._end_together(start, end, factor)
        # A copy that has left its stream comes twice: its own place is the later one.
        count = len(self.recording.prepared.operations)
        starts, ends = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        starts[chains.row], ends[chains.row] = start, end
        before, after = (value[s] if len(calls) else s for s in (self.segment_before, self.segment_after))
        return Replayed(starts, ends, before + reached - own, after + reached)

    def _along_threads(self, spent: IntArray) -> IntArray:
        """Each thread's time up to the end of each call, without any wait; from the origin."""
        calls = self.recording.calls
        total = np.cumsum(spent)
        if not len(total):
            return total
        before = (total - spent)[calls.first]
        return np.asarray(total - before[np.cumsum(calls.first) - 1])

    def _launch_times(self, costs: Costs, begun: IntArray) -> IntArray:
        """When its launch lets each operation start, as far as its thread's segment is on time."""
        chains = self.recording.chains
        launch = np.full(len(chains), NEVER, dtype=np.int64)
        mine = np.flatnonzero((chains.call >= 0) & ~chains.pinned)
        call = chains.call[mine]
        lead = np.minimum(self.recording.calls.lead_own[call], chains.inside[mine])
        inside = lead + _scaled(chains.inside[mine] - lead, _at(costs.call, call))
        launch[mine] = begun[call] + inside + _lagging(chains.after[mine], costs.lag)
        launch[chains.pinned] = chains.start[chains.pinned] - self.recording.origin_ns
        return launch

    def _walk(self, weight: IntArray) -> IntArray:
        """The value of every item: the latest of what it waits for. What waits for nothing begins at 0."""
        sources = self.rank[self.source[self.by_target]].tolist()
        weights = weight[self.by_target].tolist()
        bounds = self.reached.tolist()
        is_piece = (self.order >= self.segments).tolist()
        value = [0] * self.items
        low = 0
        for item in range(self.items):
            high = bounds[item + 1]
            latest = NEVER if is_piece[item] or high > low else 0
            for edge in range(low, high):
                time = value[sources[edge]] + weights[edge]
                if time > latest:
                    latest = time
            value[item] = latest
            low = high
        return np.array(value, dtype=np.int64)[self.rank]

    def _starts(
        self, value: IntArray, free: IntArray, sums: IntArray, into: Edges, weight: IntArray, begin: int
    ) -> IntArray:
        """Starts of operations: along each stream the latest that was reached so far."""
        chains = self.recording.chains
        known = self.segment >= 0
        latest = np.where(known & (free > NEVER), value[np.maximum(self.segment, 0)] + free, NEVER)
        np.maximum.at(latest, into.target, value[self.segments + self.piece[into.source]] + weight)
        first = np.flatnonzero(chains.first)
        latest[first] = np.maximum(latest[first], begin - sums[first])
        bounds = [*first.tolist(), len(latest)]
        for low, high in itertools.pairwise(bounds):
            np.maximum.accumulate(latest[low:high], out=latest[low:high])
        return latest + sums

    def _end_together(self, start: IntArray, end: IntArray, factor: FloatArray | None) -> None:
        chains = self.recording.chains
        mine = self._grouped
        if not len(mine):
            return
        group = chains.group[mine]
        arrived = np.full(int(group.max()) + 1, NEVER, dtype=np.int64)
        np.maximum.at(arrived, group, start[mine])
        end[mine] = arrived[group] + _scaled(chains.transfer[mine], _at(factor, mine))

    @cached_property
    def _grouped(self) -> IntArray:
        return np.flatnonzero(self.recording.chains.group >= 0)


def _lagging(times: IntArray, factor: float) -> IntArray:
    """Delays with a factor. Negative ones are clocks that differ by microseconds: they stay."""
    return times if factor == 1.0 else np.where(times > 0, _scaled(times, factor), times)


def _at(factor: FloatArray | None, places: IntArray) -> FloatArray | None:
    return None if factor is None else factor[places]


def _scaled(times: IntArray, factor: FloatArray | float | None) -> IntArray:
    """Whole ns; unchanged ones exactly, as float64 would not hold them."""
    if factor is None or (isinstance(factor, float) and factor == 1.0):
        return times
    scaled: IntArray = np.rint(times * factor).astype(np.int64)
    return scaled if isinstance(factor, float) else np.where(factor == 1.0, times, scaled)
