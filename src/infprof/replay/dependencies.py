"""Which operation waited for which, across streams: by events, by copy engines, and by what the times show."""

from __future__ import annotations

import numpy as np

from infprof.distinct import distinct_values
from infprof.measures import operations as op
from infprof.replay.layout import Layout
from infprof.replay.recording import NEVER, SKEW_NS, TURN_AROUND_NS, UNEXPLAINED_NS
from infprof.trace import STREAM_WAIT_EVENT, IntArray


def event_waits(layout: Layout) -> list[tuple[IntArray, IntArray]]:
    """(source, target): the first operation behind a stream's wait, and the last one before the event's record."""
    syncs = layout.prepared.trace.syncs
    if syncs is None or not len(syncs) or not len(layout.calls):
        return []
    mine = np.flatnonzero((syncs["kind"] == STREAM_WAIT_EVENT) & (syncs["record"] >= 0) & (syncs["record_stream"] >= 0))
    mine = mine[syncs["stream"][mine] >= 0]
    if not len(mine):
        return []
    process = syncs["process"][mine]
    wait = layout.call_times(process, syncs["correlation"][mine])
    record = layout.call_times(process, syncs["record"][mine])
    known = (wait >= 0) & (record >= 0)
    mine, wait, record = mine[known], wait[known], record[known]
    target = layout.next_on(syncs["stream"][mine], wait)
    source = layout.last_on(syncs["record_stream"][mine], record)
    good = (source >= 0) & (target >= 0)
    good[good] &= layout.end[source[good]] <= layout.start[target[good]] + SKEW_NS
    return [(source[good], target[good])]


def engines(layout: Layout) -> list[tuple[IntArray, IntArray]]:
    """Copies of one direction of a device run one after the other, whatever their streams."""
    copies = layout.prepared.trace.copies
    if copies is None or not len(copies):
        return []
    mine = np.flatnonzero(layout.kind == op.COPY)
    rows = layout.order[mine]
    kind = copies["kind"][layout.ops.row[rows]]
    device = np.asarray(layout.ops.device)[rows]
    order = np.lexsort((layout.start[mine], kind, device))
    source, target = mine[order[:-1]], mine[order[1:]]
    same = (kind[order[1:]] == kind[order[:-1]]) & (device[order[1:]] == device[order[:-1]])
    same &= (layout.stream[source] != layout.stream[target]) & (layout.end[source] <= layout.start[target])
    return [(source[same], target[same])]


def inferred(layout: Layout, known: list[tuple[IntArray, IntArray]]) -> list[tuple[IntArray, IntArray]]:
    """Operations that started long after their launch and stream allowed, beside work on other streams of the device.

    What held them up is not recorded: the operation of another stream that ended just before, or else the one that
    ran or had run last: then they keep their place beside it.
    """
    if len(layout.bounds) <= 2:
        return []
    limit = np.maximum(np.minimum(layout.call_end, layout.start), layout.reach)
    for source, target in known:
        np.maximum.at(limit, target, layout.end[source])
    late = np.flatnonzero((layout.start - limit > UNEXPLAINED_NS) & (limit > NEVER))
    if not len(late):
        return []
    out = []
    device = np.asarray(layout.ops.device)[layout.order]
    for number in distinct_values(device[late]).tolist():
        mine = np.flatnonzero(device == number)
        target = late[device[late] == number]
        for times, near in ((layout.end, True), (layout.start, False)):
            by_time = mine[np.argsort(times[mine], kind="stable")]
            found = np.searchsorted(times[by_time], layout.start[target], side="right") - 1
            source = _of_other_stream(layout, by_time, found, target)
            good = (source >= 0) & (layout.start[source] < layout.start[target])
            if near:
                good &= layout.start[target] - layout.end[source] <= TURN_AROUND_NS
            # No further back than what is known to have been over.
            good &= np.minimum(layout.end[source], layout.start[target]) > limit[target]
            out.append((source[good], target[good]))
            target = target[~good]
    return out


def _of_other_stream(layout: Layout, by_time: IntArray, found: IntArray, target: IntArray) -> IntArray:
    """The last of some operations, at ``found`` or before, that is of another stream than the target; -1 if none is
    near."""
    source = np.where(found >= 0, by_time[np.maximum(found, 0)], -1)
    for back in range(1, 9):
        same = (source >= 0) & (layout.stream[source] == layout.stream[target])
        if not same.any():
            break
        earlier = found - back
        source = np.where(same, np.where(earlier >= 0, by_time[np.maximum(earlier, 0)], -1), source)
    return np.where((source >= 0) & (layout.stream[source] != layout.stream[target]), source, -1)
