"""Anchors: units that may occur once per step, and how well each one cuts a lane's sequence into like segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from infprof.measures.kernel_class import short_name
from infprof.quantiles import median
from infprof.steps.lanes import D2H_KIND, GRAPH_KIND, H2D_KIND, Lane
from infprof.trace import FloatArray, IntArray

# Anchors are judged on at most so many units, from the middle of the sequence.
JUDGED_UNITS = 200_000
MIN_STEPS = 3
# Names and pairs of names tried as anchors: the rarest ones.
MOST_NAMES, MOST_PAIRS = 48, 48
# Of an anchor's segments, the share of units in types that come again (its first of each not counted), and the share of
# the sequence that they cover: below these there is no structure.
MIN_REPEATED, MIN_COVERED = 0.25, 0.25
# Two events this many kernels apart or less (so few where all are near) may belong to one step, where others are much
# farther apart.
BURST_KERNELS, FEW_KERNELS, BURST_JUMP = 32, 4, 4
# A graph of this many kernels is a whole forward pass, one of fewer may be a piece of one.
WHOLE_PASS_KERNELS = 64
# Segments whose run-length form differs in length by about this share are alike.
LENGTH_STEP = 0.12
# Bits that a segment's kinds are kept in.
LETTERS = 62
# A host gap is remarkable above this multiple of the median one.
LARGE_GAP, LARGE_GAP_NS = 5, 5_000

SYNC, H2D, D2H = "the host waits for the GPU", "copy to the GPU", "copy to the host"
EMBEDDING, SAMPLING, GRAPH, GAP = "embedding lookup", "sampling", "graph launch", "gap in the host's launches"
NOWHERE: IntArray = np.empty(0, dtype=np.int64)


class Cue(NamedTuple):
    """Something that happens once per step: where (units), its weight, and whether it opens or closes the step."""

    name: str
    at: IntArray
    weight: float
    opens: bool


@dataclass
class Judged:
    """An anchor and what speaks for it; ``repeated``: share of its segments' units in types that come again."""

    name: str
    at: IntArray
    repeated: float
    once: dict[str, float]  # cue → weight × share of segments in which it happens once; not of the anchor itself
    score: float

    @property
    def evidence(self) -> float:
        """What says that the segments are steps. A gap alone may have any reason."""
        own = 1.0 if self.name in (D2H, SYNC) else 0.0
        return own + sum(value for name, value in self.once.items() if name != GAP)

    @property
    def read_back(self) -> bool:
        """Whether the host waits for the segments or reads what they made."""
        return self.name in (D2H, SYNC) or max(self.once.get(D2H, 0), self.once.get(SYNC, 0)) >= 0.5

    @property
    def whole_step(self) -> bool:
        """Whether the segments hold what no layer has: a whole graph, or an embedding lookup and what ends a step."""
        closed = max(self.once.get(SAMPLING, 0) / 2, self.once.get(D2H, 0), self.once.get(SYNC, 0))
        return self.once.get(GRAPH, 0) >= 0.5 or (self.once.get(EMBEDDING, 0) >= 1 and closed >= 0.5)


class Sequence:
    """A lane with what every judgement of an anchor needs."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        count = len(lane)
        self.low, self.high = 0, count
        if count > JUDGED_UNITS:
            self.low = (count - JUDGED_UNITS) // 2
            self.high = self.low + JUDGED_UNITS
        letter = _letters(lane)
        self.bits = np.left_shift(np.int64(1), letter)
        # Neighbours of one kind are one run: a split-K reduction more or less changes nothing.
        run = np.ones(count, dtype=np.int64)
        run[1:] = letter[1:] != letter[:-1]
        self.runs = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(run)])
        graphs = lane.kernels[lane.of_kind(GRAPH_KIND)]
        self.whole_pass = bool(len(graphs) and median(graphs) >= WHOLE_PASS_KERNELS)
        # Kernels up to each unit; what is no kernel still takes a place.
        self.work = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.maximum(lane.kernels, 1))])

    # --- candidates ------------------------------------------------------------------------------------------------

    def cues(self) -> list[Cue]:
        lane = self.lane
        found = [
            Cue(SYNC, np.flatnonzero(lane.after_sync), 1.0, True),
            Cue(H2D, lane.of_kind(H2D_KIND), 1.0, True),
            Cue(D2H, lane.of_kind(D2H_KIND), 1.0, False),
            Cue(EMBEDDING, lane.of_kind("embedding"), 2.0, True),
            Cue(SAMPLING, lane.of_kind("sampling"), 2.0, False),
            Cue(GRAPH, lane.of_kind(GRAPH_KIND) if self.whole_pass else NOWHERE, 1.0, True),
            Cue(GAP, self._large_gaps(), 0.5, True),
        ]
        return [cue._replace(at=self.bursts(cue.at, cue.opens)) for cue in found if len(cue.at) >= MIN_STEPS]

    def _large_gaps(self) -> IntArray:
        gap = self.lane.host_gap_ns
        some = gap[gap > 0]
        if not len(some):
            return some
        return np.flatnonzero(gap > max(LARGE_GAP * median(some), LARGE_GAP_NS))

    def bursts(self, at: IntArray, opens: bool) -> IntArray:
        """One event for those that lie close together where others lie far apart: the first or the last of each group.

        Events of one step lie a few kernels apart; a graph launch between two of them counts as its kernels.
        """
        if len(at) < 3:
            return at
        apart = np.diff(self.work[at])
        levels = np.unique(apart)
        near = levels[:-1][levels[:-1] <= (BURST_KERNELS if levels[-1] > BURST_KERNELS else FEW_KERNELS)]
        if not len(near):
            return at
        ratio = levels[1:] / levels[:-1]
        place = int(np.argmax(ratio[: len(near)]))
        if ratio[place] < BURST_JUMP:
            return at
        close = apart <= levels[place]
        keep = np.ones(len(at), dtype=np.bool_)
        if opens:
            keep[1:] = ~close
        else:
            keep[:-1] = ~close
        return at[keep]

    def candidates(self, cues: list[Cue]) -> list[tuple[str, IntArray]]:
        """Names of anchors and where they are: cues, rare names, rare pairs of names."""
        lane = self.lane
        found = [(cue.name, cue.at) for cue in cues]
        count = len(lane.names)
        part = slice(self.low, self.high)
        often = np.bincount(lane.symbol[part], minlength=count)
        for symbol in _rarest(often, MOST_NAMES):
            at = np.flatnonzero(lane.symbol == symbol)
            found.append((short_name(lane.names[symbol]), self.bursts(at, True)))
        pairs = lane.symbol[part][:-1] * count + lane.symbol[part][1:]
        kinds, many = np.unique(pairs, return_counts=True)
        # A pair says more than its names only where it is rarer than both.
        rarer = many * 2 <= np.minimum(often[kinds // count], often[kinds % count])
        kinds, many = kinds[rarer], many[rarer]
        if len(kinds):
            every = lane.symbol[:-1] * count + lane.symbol[1:]
            for place in _rarest(many, MOST_PAIRS):
                first, second = divmod(int(kinds[place]), count)
                at = np.flatnonzero(every == kinds[place]) + 1
                found.append((f"{short_name(lane.names[first])}, then {short_name(lane.names[second])}", at))
        return found

    # --- judgement -------------------------------------------------------------------------------------------------

    def judge(self, name: str, at: IntArray, cues: list[Cue]) -> Judged | None:
        """How good an anchor is, None where it cannot be one."""
        inside = at[(at >= self.low) & (at < self.high)]
        if len(inside) < MIN_STEPS:
            return None
        lengths = np.diff(inside)
        covered = int(inside[-1] - inside[0])
        total = self.high - self.low
        if covered < MIN_COVERED * total:
            return None
        _, which = self.types(inside)
        per_type = np.bincount(which)
        again = per_type[which] > 1
        longest = np.zeros(len(per_type))
        np.maximum.at(longest, which, lengths)
        repeated = 1 - float(longest[per_type > 1].sum() + lengths[~again].sum()) / covered
        if repeated < MIN_REPEATED:
            return None
        once = {}
        for cue in cues:
            if cue.name == name and name != GRAPH:
                continue
            once[cue.name] = cue.weight * float((np.diff(np.searchsorted(cue.at, inside)) == 1).mean())
        others = sum(value for cue, value in once.items() if cue != name)
        score = repeated * (0.5 + others) * (covered + float(lengths.mean())) / total
        return Judged(name, at, repeated, once, score)

    def types(self, bounds: IntArray) -> tuple[IntArray, IntArray]:
        """The types of the segments between neighbouring bounds (kinds as bits), and the type of each segment."""
        kinds = np.bitwise_or.reduceat(self.bits[: bounds[-1]], bounds[:-1])
        runs = self.runs[bounds[1:]] - self.runs[bounds[:-1]]
        size = np.round(np.log(np.maximum(runs, 1)) / LENGTH_STEP).astype(np.int64)
        _, key = np.unique(kinds, return_inverse=True)
        _, which = np.unique(key * 1_000 + size, return_inverse=True)
        return kinds, which


def _letters(lane: Lane) -> IntArray:
    """Each unit as one of at most LETTERS: its kind; where names tell no kind, the most frequent names stand for one."""
    often = np.bincount(lane.symbol, minlength=len(lane.names))
    unknown = lane.kinds.index("other") if "other" in lane.kinds else -1
    kind_of = np.zeros(len(lane.names), dtype=np.int64)
    kind_of[lane.symbol] = lane.kind
    letter = np.minimum(kind_of, LETTERS - 1)
    nameless = np.flatnonzero(kind_of == unknown)
    own = nameless[np.argsort(-often[nameless], kind="stable")][: max(LETTERS - len(lane.kinds), 0)]
    letter[own] = len(lane.kinds) + np.arange(len(own))
    return np.asarray(np.minimum(letter, LETTERS - 1)[lane.symbol], dtype=np.int64)


def _rarest(often: IntArray, most: int) -> list[int]:
    """Those that occur often enough to be an anchor, the rarest first."""
    able = np.flatnonzero(often >= MIN_STEPS)
    return [int(place) for place in able[np.argsort(often[able], kind="stable")][:most]]


def set_bits(values: IntArray) -> FloatArray:
    """The number of set bits of each value, any shape."""
    flat = np.ascontiguousarray(values, dtype=np.int64)
    bits = np.unpackbits(flat.view(np.uint8).reshape(*flat.shape, 8), axis=-1)
    return np.asarray(bits.sum(axis=-1), dtype=np.float64)
