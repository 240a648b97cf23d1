"""Pairs of kernels beyond equal names in equal order: reordered branches, products of another kernel, unnamed captures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from infprof.measures.work.counting import MATRIX_KINDS
from infprof.trace import BoolArray, IntArray

KindArray = NDArray[np.str_]

# Autotuning picks another kernel for the same product: those may stand for each other.
_PRODUCTS = ("gemm", "conv")
# Kernels on each side of a stretch without pairs in which products are paired, and how far branches may shift.
_LONGEST_GAP = 8
_LARGEST_SHIFT = 64
# Share of the products of a capture whose kernel may be of a class that does not fit.
_CONTRADICTIONS = 0.05


def reordered(pairs: IntArray, pattern: IntArray, text: IntArray, signature: IntArray) -> IntArray:
    """``pairs`` with those of equal code added that parallel branches had put into another order.

    Only between the first and the last pair, near to where the kernel would stand in order, and only where it does not
    matter which is which: all of the code that are left in the text have one signature.
    """
    joined = np.flatnonzero(pairs >= 0)
    if len(joined) < 2:
        return pairs
    inside = np.arange(joined[0], joined[-1])
    left = inside[(pairs[inside] < 0) & (pattern[inside] >= 0)]
    between = np.arange(pairs[joined[0]], pairs[joined[-1]])
    right = between[~np.isin(between, pairs[joined]) & np.isin(text[between], pattern[left])]
    if not len(left) or not len(right):
        return pairs
    right = right[np.lexsort((right, text[right]))]
    codes, first, which = np.unique(text[right], return_index=True, return_inverse=True)
    mixed = np.bincount(which, signature[right] != signature[right[first[which]]], len(codes)) > 0
    right = right[~mixed[which]]
    before = joined[np.searchsorted(joined, left) - 1]
    found = _nearest(pattern[left], pairs[before] + left - before, text[right], right)
    out: IntArray = pairs.copy()
    out[left[found >= 0]] = found[found >= 0]
    return out


def _nearest(code: IntArray, expected: IntArray, other_code: IntArray, position: IntArray) -> IntArray:
    """For each code the nearest position of the same code, sorted by (code, position), each taken once; -1 = none near."""
    if not len(position):
        return np.full(len(code), -1, dtype=np.int64)
    step = int(max(expected.max(), position.max())) + 1
    at = np.searchsorted(other_code * step + position, code * step + expected)
    tried = np.stack([np.maximum(at - 1, 0), np.minimum(at, len(position) - 1)])
    far = np.where(other_code[tried] == code, np.abs(position[tried] - expected), np.iinfo(np.int64).max)
    best = np.argmin(far, axis=0)
    chosen, distance = (a[best, np.arange(len(code))] for a in (tried, far))
    order = np.argsort(distance, kind="stable")
    _, first = np.unique(chosen[order], return_index=True)
    winners = order[first]
    winners = winners[distance[winners] <= _LARGEST_SHIFT]
    out = np.full(len(code), -1, dtype=np.int64)
    out[winners] = position[chosen[winners]]
    return out


def products_between(pairs: IntArray, kinds: KindArray, other: KindArray) -> IntArray:
    """``pairs`` with the matrix products added that have other names but stand between the same neighbours.

    A short stretch between two pairs must hold equally many products of a kind on both sides.
    """
    in_order = _ascending(pairs)
    joined = np.flatnonzero(in_order)
    if len(joined) < 2:
        return pairs
    out: IntArray = pairs.copy()
    taken = np.zeros(len(other), dtype=np.bool_)
    taken[pairs[pairs >= 0]] = True
    borders = pairs[joined]
    short = (np.diff(joined) <= _LONGEST_GAP + 1) & (np.diff(borders) <= _LONGEST_GAP + 1)
    for kind in _PRODUCTS:
        left = np.flatnonzero((pairs < 0) & (kinds == kind))
        right = np.flatnonzero(~taken & (other == kind))
        gap_left, gap_right = np.searchsorted(joined, left) - 1, np.searchsorted(borders, right) - 1
        left, gap_left = _inside(left, gap_left, short)
        right, gap_right = _inside(right, gap_right, short)
        count = len(short)
        same = np.bincount(gap_left, minlength=count) == np.bincount(gap_right, minlength=count)
        out[left[same[gap_left]]] = right[same[gap_right]]
    return out


def _inside(positions: IntArray, gap: IntArray, short: BoolArray) -> tuple[IntArray, IntArray]:
    usable = (gap >= 0) & (gap < len(short))
    usable[usable] = short[gap[usable]]
    return positions[usable], gap[usable]


def _ascending(pairs: IntArray) -> BoolArray:
    """The pairs that lie behind all before them and before all behind them: borders between the others."""
    there = pairs >= 0
    highest = np.maximum.accumulate(np.where(there, pairs, -1))
    largest = np.iinfo(np.int64).max
    lowest = np.minimum.accumulate(np.where(there, pairs, largest)[::-1])[::-1]
    return np.asarray(there & (pairs == highest) & (pairs == lowest), dtype=np.bool_)


def plausible(kinds: KindArray, works: NDArray[Any]) -> BoolArray:
    """Which lines of ``works`` (kind of the operator at each kernel, empty = not known) fit the classes of the kernels.

    Matrix kernels must stand in operators that multiply: half of them surely, with few exceptions.
    """
    matrix = np.isin(kinds, sorted(MATRIX_KINDS))
    multiplies = np.isin(works, sorted(MATRIX_KINDS))
    agreeing = (matrix & multiplies).sum(axis=1)
    against = (matrix & ~multiplies & (works != "")).sum(axis=1)
    # An operator that multiplies has its product in some kernel: not in one of another known class alone.
    alone = multiplies & ~matrix & np.isin(kinds, ["norm", "rotary", "kv-cache", "embedding", "softmax", "activation"])
    against = against + (alone & ~_beside(works, multiplies & matrix)).sum(axis=1)
    enough = (agreeing > 0) & (2 * agreeing >= matrix.sum())
    return np.asarray(enough & (against <= _CONTRADICTIONS * (agreeing + against)), dtype=np.bool_)


def _beside(works: NDArray[Any], product: BoolArray) -> BoolArray:
    """Where a neighbour holds a product."""
    out = np.zeros(works.shape, dtype=np.bool_)
    out[:, 1:] |= product[:, :-1]
    out[:, :-1] |= product[:, 1:]
    return out
