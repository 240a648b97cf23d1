"""Which events can share a row of a timeline: those that nest; the others go to rows beside it.

A row of the trace-event format holds events that lie inside one another or apart. Two that merely overlap would be
drawn wrong or left out by a viewer.
"""

from __future__ import annotations

import numpy as np

from infprof.trace import BoolArray, IntArray


def outer_first(starts: IntArray, ends: IntArray) -> IntArray:
    """The order in which events of one row are written: by start, and of equal starts the longer one first."""
    return np.lexsort((-ends, starts))


def lanes(starts: IntArray, ends: IntArray) -> IntArray:
    """The lane of each event, 0 … n; in each lane events nest or lie apart. Sorted as by ``outer_first``.

    Lane 0 holds all that nests with everything; the rest is spread over as many lanes as it takes, without nesting.
    """
    lane = np.zeros(len(starts), dtype=np.int64)
    crossing = np.flatnonzero(_crossing(starts, ends))
    if len(crossing):
        lane[crossing] = 1 + _spread(starts[crossing], ends[crossing])
    return lane


def _crossing(starts: IntArray, ends: IntArray) -> BoolArray:
    """Which events overlap another one without lying inside it: leave them out and the rest nests.

    Each end closes the innermost open event, as a bracket does. Where that is not the event whose end it is, the two
    cross; of any two that cross, at least one is found so, since brackets never cross.
    """
    out = np.zeros(len(starts), dtype=np.bool_)
    # An event without length fits in anywhere.
    long = np.flatnonzero(ends > starts)
    start, end = starts[long], ends[long]
    count = len(start)
    if count < 2 or bool((start[1:] >= end[:-1]).all()):
        return out
    closing = np.lexsort((-np.arange(count), end))
    closed = end[closing]
    rank = np.arange(count)
    closed_before = np.searchsorted(closed, start, side="right")
    opened_before = np.searchsorted(start, closed, side="left")
    depth = np.concatenate([rank - closed_before, opened_before - rank - 1])
    place = np.concatenate([rank + closed_before, rank + opened_before])
    event = np.concatenate([rank, closing])
    # Within a depth openings and closings take turns.
    order = np.argsort(depth * (2 * count) + place, kind="stable")
    opened, closes = event[order[0::2]], event[order[1::2]]
    out[long[opened[opened != closes]]] = True
    return out


def _spread(starts: IntArray, ends: IntArray) -> IntArray:
    """Lanes without any overlap, as few as there can be; ``starts`` ascend.

    A freed lane waits in a queue: the n-th event takes the lane of the (n - lanes)-th that ended. Following these
    links back to one of the first events gives the lane.
    """
    ended = np.argsort(ends, kind="stable")
    rank = np.arange(len(starts))
    most = int((rank - np.searchsorted(ends[ended], starts, side="right")).max()) + 1
    link: IntArray = rank.copy()
    link[most:] = ended[: len(starts) - most]
    while True:
        further: IntArray = link[link]
        if np.array_equal(further, link):
            return link
        link = further
