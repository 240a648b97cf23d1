"""Where one sequence of kernel names stands in another: every exact place, and the likely ones with some differences.

Sequences are int64 codes; a code below 0 equals nothing, itself neither. Exact places come from one polynomial hash of
all windows, likely places from the rarest runs of names that both hold, and the pairing inside one place from a longest
common subsequence (bit-parallel: Hyyrö, "Bit-parallel LCS-length computation revisited", AWOCA 2004).
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infprof.trace import IntArray

HashArray = NDArray[np.uint64]

# So many names in a row are looked for in both sequences, the longest first.
_RUN_LENGTHS = (8, 4, 2, 1)
# Pairs of equal runs that vote for a place, and places that are looked at.
_MAX_VOTES = 200_000
MAX_PLACES = 16
# Bits of one longest-common-subsequence table: 256 MiB.
_MAX_TABLE_BITS = 1 << 31

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Place(NamedTuple):
    """Text positions [start, end) that may hold the pattern."""

    start: int
    end: int


def mixed(values: IntArray) -> HashArray:
    """Well spread 64-bit values of codes (the finaliser of splitmix64)."""
    out = values.astype(np.uint64) + _FACTOR
    out = (out ^ (out >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    out = (out ^ (out >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(out ^ (out >> np.uint64(31)), dtype=np.uint64)


def powers(count: int) -> HashArray:
    """1, f, f², … modulo 2⁶⁴, for polynomial hashes."""
    factors = np.full(count, _FACTOR, dtype=np.uint64)
    factors[:1] = 1
    return np.asarray(np.multiply.accumulate(factors), dtype=np.uint64)


class Text:
    """A long sequence that patterns are looked for in: ``codes`` and the ascending number of each one's ``segment``."""

    def __init__(self, codes: IntArray, segment: IntArray) -> None:
        self.codes, self.segment = codes, segment
        self._runs: dict[int, HashArray] = {}

    def __len__(self) -> int:
        return len(self.codes)

    @cached_property
    def scale(self) -> HashArray:
        return powers(len(self))

    @cached_property
    def sums(self) -> HashArray:
        """The hash of what lies before each position."""
        terms = np.cumsum(mixed(self.codes) * self.scale, dtype=np.uint64)
        return np.concatenate([np.zeros(1, dtype=np.uint64), terms])

    def runs(self, length: int) -> HashArray:
        """A hash of the run of so many names that begins at each position."""
        if length not in self._runs:
            self._runs[length] = _runs(self.codes, length)
        return self._runs[length]


def exact_places(pattern: IntArray, text: Text) -> IntArray:
    """The starts of all occurrences of the pattern in the text, none of them across a border of segments."""
    n, count = len(pattern), len(text) - len(pattern) + 1
    if not n or count <= 0 or (pattern < 0).any():
        return np.empty(0, dtype=np.int64)
    wanted = np.sum(mixed(pattern) * powers(n), dtype=np.uint64)
    found = text.sums[n:] - text.sums[:-n] == wanted * text.scale[:count]
    found &= (text.segment[n - 1 :] == text.segment[:count]) & (text.codes[:count] == pattern[0])
    return np.flatnonzero(found)


def likely_places(pattern: IntArray, text: Text) -> list[Place]:
    """Places of the pattern's length, with some room at both ends, that share its rarest runs of names; best first."""
    votes = _votes(pattern, text)
    if not len(votes):
        return []
    width = max(len(pattern) // 8, 8)
    room = 2 * width
    _, which, counts = np.unique(votes // width, return_inverse=True, return_counts=True)
    chosen: list[int] = []
    for bucket in np.argsort(-counts, kind="stable").tolist():
        if 2 * counts[bucket] < counts.max():
            break
        start = int(np.median(votes[which == bucket]))
        # Nearer ones hold the same place, by the room around it.
        if all(abs(start - other) >= room for other in chosen):
            chosen.append(start)
        if len(chosen) == MAX_PLACES:
            break
    return [place for start in chosen if (place := _within(start, len(pattern), room, text.segment)) is not None]


def _within(start: int, length: int, room: int, segment: IntArray) -> Place | None:
    """The place with its room, cut to the segment of its middle."""
    middle = min(max(start + length // 2, 0), len(segment) - 1)
    low = int(np.searchsorted(segment, segment[middle], side="left"))
    high = int(np.searchsorted(segment, segment[middle], side="right"))
    low, high = max(low, start - room), min(high, start + length + room)
    return Place(low, high) if low < high else None


def _votes(pattern: IntArray, text: Text) -> IntArray:
    """Text position less pattern position, of equal runs of names: the rarest runs, as many as are worth it."""
    for length in _RUN_LENGTHS:
        if length > min(len(pattern), len(text)):
            continue
        runs, which = np.unique(_runs(pattern, length), return_inverse=True)
        at = np.searchsorted(runs, there := text.runs(length))
        at[at == len(runs)] = 0
        hits = np.flatnonzero((runs[at] == there) & (text.codes[: len(there)] >= 0))
        if not len(hits):
            continue
        in_pattern, in_text = np.bincount(which, minlength=len(runs)), np.bincount(at[hits], minlength=len(runs))
        order = np.argsort(np.where(in_text > 0, in_pattern * in_text, np.iinfo(np.int64).max), kind="stable")
        order = order[in_text[order] > 0]
        enough = int(np.searchsorted(np.cumsum((in_pattern * in_text)[order]), _MAX_VOTES, side="right"))
        wanted = np.zeros(len(runs), dtype=np.bool_)
        wanted[order[: max(enough, 1)]] = True
        return _differences(which, at, hits[wanted[at[hits]]])
    return np.empty(0, dtype=np.int64)


def _differences(which: IntArray, at: IntArray, hits: IntArray) -> IntArray:
    """All pairs of a text position among the hits and a pattern position with the same run, as differences."""
    order = np.argsort(which, kind="stable")
    first = np.searchsorted(which[order], np.arange(int(which.max()) + 2))
    counts = (first[1:] - first[:-1])[at[hits]]
    # A run that fills both sequences: its first place in the pattern has to do.
    counts = np.minimum(counts, max(_MAX_VOTES // max(len(hits), 1), 1))
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.asarray(
        np.repeat(hits, counts) - order[np.repeat(first[at[hits]], counts) + within],
        dtype=np.int64,
    )


def _runs(values: IntArray, length: int) -> HashArray:
    """A hash of the run of names that begins at each position."""
    spread, scale = mixed(values), powers(length)
    count = len(values) - length + 1
    out = np.zeros(count, dtype=np.uint64)
    for i in range(length):
        out += spread[i : i + count] * scale[i]
    return out


def common_subsequence(pattern: IntArray, text: IntArray) -> IntArray:
    """For each position of the pattern the text position it is paired with, -1 where none: as many pairs as possible,
    equal codes only, in order. All -1 where the two are too long to compare."""
    pairs = np.full(len(pattern), -1, dtype=np.int64)
    head = _agreeing(pattern, text)
    tail = _agreeing(pattern[head:][::-1], text[head:][::-1])
    pairs[:head] = np.arange(head)
    if tail:
        pairs[-tail:] = np.arange(len(text) - tail, len(text))
    inner, other = pattern[head : len(pattern) - tail], text[head : len(text) - tail]
    if not len(inner) or not len(other) or len(inner) * len(other) > _MAX_TABLE_BITS:
        return pairs
    found = _bit_parallel(inner, other)
    pairs[head : len(pattern) - tail] = np.where(found >= 0, found + head, -1)
    return pairs


def _agreeing(left: IntArray, right: IntArray) -> int:
    """How many codes are equal from the start on."""
    count = min(len(left), len(right))
    different = np.flatnonzero((left[:count] != right[:count]) | (left[:count] < 0))
    return int(different[0]) if len(different) else count


def _bit_parallel(pattern: IntArray, text: IntArray) -> IntArray:
    """The pairing by bit vectors as long as the text: one step for each kernel of a graph, some words at a time."""
    masks = _masks(pattern, text)
    every = (1 << len(text)) - 1
    size = (len(text) + 7) // 8
    state, rows = every, []
    for code in pattern.tolist():
        hit = state & masks.get(code, 0)
        state = ((state + hit) | (state - hit)) & every
        rows.append(state.to_bytes(size, "little"))
    pairs = np.full(len(pattern), -1, dtype=np.int64)
    row, column = len(pattern), len(text)
    while row and column:
        byte, bit = (column - 1) >> 3, (column - 1) & 7
        if rows[row - 1][byte] >> bit & 1:
            column -= 1
            continue
        row -= 1
        if not row or rows[row - 1][byte] >> bit & 1:
            column -= 1
            pairs[row] = column
    return pairs


def _masks(pattern: IntArray, text: IntArray) -> dict[int, int]:
    """For each code of the pattern its positions in the text, as the bits of one number."""
    known = np.intersect1d(pattern[pattern >= 0], text)
    return {
        code: int.from_bytes(np.packbits(text == code, bitorder="little").tobytes(), "little")
        for code in known.tolist()
    }
