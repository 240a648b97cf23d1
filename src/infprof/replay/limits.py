"""How long after each of its limits (launch, stream, another operation) every operation came, or may come at most."""

from __future__ import annotations

import numpy as np

from infprof.distinct import distinct
from infprof.measures.comm import matched_collectives
from infprof.quantiles import median
from infprof.replay.layout import Layout
from infprof.replay.recording import (
    NEVER,
    TURN_AROUND_NS,
    UNEXPLAINED_NS,
    USUAL_GAP_NS,
    Chains,
    Edges,
    expanded,
    narrow,
)
from infprof.trace import BoolArray, IntArray, constant

# Where a trace shows none: the usual time of current GPUs from the end of a launch call to its kernel on a free stream.
USUAL_LEAD_NS = 1_000
# From the begin of a call that waits for its copy to the copy.
USUAL_SETUP_NS = 6_000
# A launch reaches a free stream within this time; later starts have other reasons.
LONGEST_LEAD_NS = 100_000
# ... and one that starts within so many usual ones of its stream was not queued there.
USUAL_LEADS = 1.25


def limits(layout: Layout, pairs: list[tuple[IntArray, IntArray]]) -> tuple[Chains, Edges]:
    """How long after each of its limits every operation came, or may come at most."""
    start, end, reach = layout.start, layout.end, layout.reach
    has_call = layout.call >= 0
    source = np.concatenate([p[0] for p in pairs]) if pairs else np.empty(0, dtype=np.int64)
    target = np.concatenate([p[1] for p in pairs]) if pairs else np.empty(0, dtype=np.int64)
    latest = np.full(len(start), NEVER, dtype=np.int64)
    # Of an operation that still ran it is the part before this start that was waited for.
    waited_part = np.minimum(end[source], start[target]) - start[source]
    np.maximum.at(latest, target, start[source] + waited_part)
    # Inside the call, or before it has returned: then the launch could have let it start at any time since.
    early = has_call & (layout.held | (start < layout.call_end))
    launched = np.where(early, layout.call_start, layout.call_end)
    by_stream = (reach > launched) & (reach >= latest) & (~early | (start - reach <= TURN_AROUND_NS))
    by_other = ~by_stream & (latest > launched) & (latest >= reach)
    by_launch = has_call & ~by_stream & ~by_other
    overlapping = start < reach
    group = _groups(layout)
    count = int(group.max(initial=-1)) + 1
    gap = np.where(reach > NEVER, start - reach, 0)
    lead = np.where(has_call, start - layout.call_end, 0)
    late = by_launch & ~layout.held & _first_of_call(layout) & (lead <= LONGEST_LEAD_NS)
    usual_lead = _typical(lead, late, group, count, USUAL_LEAD_NS)
    # Where a launch takes as long as it took here, the operation was not queued: it came as soon as it could.
    soon = by_stream & has_call & ~early & (lead <= USUAL_LEADS * usual_lead) & late.any()
    by_stream, by_launch = by_stream & ~soon, by_launch | soon
    # What nothing explains says nothing about turn-arounds.
    usual_gap = _typical(gap, by_stream & ~overlapping & (gap <= UNEXPLAINED_NS), group, count, USUAL_GAP_NS)
    gap = np.where(by_stream | ~has_call & (reach > NEVER), gap, np.minimum(usual_gap, gap))
    lead = np.where(by_launch, lead, np.minimum(usual_lead, lead))
    setup = np.where(has_call, start - layout.call_start, 0)
    usual_setup = _typical(setup, by_launch & layout.held & (setup <= LONGEST_LEAD_NS), group, count, USUAL_SETUP_NS)
    setup = np.where(by_launch, setup, np.minimum(usual_setup, setup))
    length = np.where(has_call, layout.call_end - layout.call_start, 0)
    inside = np.where(layout.held, np.maximum(setup, 0), np.clip(length + lead, 0, length))
    inside = np.minimum(inside, np.maximum(start - layout.call_start, 0)) * has_call
    after = np.where(
        layout.held,
        np.minimum(start - layout.call_start - inside, 0),
        np.where(lead < -length, lead + length, np.maximum(lead, 0)),
    )
    after = after * has_call
    pinned = ~has_call & ((reach == NEVER) | (gap > UNEXPLAINED_NS)) & ~by_other
    part, gap, nested = _stream_steps(layout, gap)
    collective, transfer = _collectives(layout)
    edges = [_edge(layout, source, target, waited_part, by_other)]
    edges.append(_nested_edges(layout, nested))
    chains = Chains(
        layout.order,
        layout.stream,
        start,
        end,
        layout.call,
        narrow(inside),
        narrow(after),
        narrow(part),
        narrow(gap),
        pinned,
        layout.first,
        collective,
        transfer,
    )
    return chains, _with_collectives(chains, Edges.of(edges))


def _edge(
    layout: Layout, source: IntArray, target: IntArray, part: IntArray, binding: BoolArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    lag = layout.start[target] - layout.start[source] - part
    return source, target, part, np.where(binding[target], lag, np.minimum(lag, USUAL_GAP_NS))


def _groups(layout: Layout) -> IntArray:
    """Operations of a stream, kind and way of launch are alike."""
    code = (layout.stream * 4 + layout.kind) * 2 + layout.in_graph
    return np.asarray(distinct(code)[1])


def _first_of_call(layout: Layout) -> BoolArray:
    """A graph launch has many operations: the first one shows how long the launch takes."""
    first = np.ones(len(layout.call), dtype=np.bool_)
    first[1:] = (layout.call[1:] != layout.call[:-1]) | layout.first[1:]
    return first


def _stream_steps(layout: Layout, gap: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """(part, gap, nested): from one start to the next of a stream, the part that the operation before takes.

    Where operations of a stream overlap, the start of one follows the start of the other. ``nested``: those behind
    an operation that another, longer one outlasts; they wait for that one too.
    """
    part = np.zeros(len(gap), dtype=np.int64)
    before = np.arange(len(gap)) - 1
    inner = np.flatnonzero(~layout.first)
    previous = before[inner]
    length = layout.end[previous] - layout.start[previous]
    distance = layout.start[inner] - layout.start[previous]
    apart = layout.start[inner] >= layout.end[previous]
    part[inner] = np.where(apart, length, distance)
    outlasted = layout.reach[inner] > layout.end[previous]
    gap = gap.copy()
    # Behind a shorter one: what the recording shows, since the longer one is the limit, or none.
    gap[inner] = np.where(apart, np.where(outlasted, np.minimum(distance - length, USUAL_GAP_NS), gap[inner]), 0)
    overlapped = layout.start[inner] < layout.reach[inner]
    gap[inner] = np.where(apart & outlasted & overlapped, distance - length, gap[inner])
    gap[layout.first] = 0
    return part, np.maximum(gap, 0), inner[apart & outlasted & ~overlapped]


def _nested_edges(layout: Layout, nested: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """From the operation that lasted longest to the first one behind it."""
    longest = np.empty(len(nested), dtype=np.int64)
    # The position of the running maximum of the ends, stream by stream.
    for low, high in layout.stretches():
        mine = (nested >= low) & (nested < high)
        if mine.any():
            top = np.maximum.accumulate(layout.end[low:high])
            new = np.ones(high - low, dtype=np.bool_)
            new[1:] = top[1:] > top[:-1]
            place = low + np.maximum.accumulate(np.where(new, np.arange(high - low), 0))
            longest[mine] = place[nested[mine] - low - 1]
    lag = layout.start[nested] - layout.end[longest]
    launched = (layout.call[nested] >= 0) & (layout.call_end[nested] > layout.end[longest])
    lag = np.where(launched, np.minimum(lag, USUAL_GAP_NS), lag)
    return longest, nested, layout.end[longest] - layout.start[longest], np.maximum(lag, 0)


def _collectives(layout: Layout) -> tuple[IntArray, IntArray]:
    chains = matched_collectives(layout.prepared)
    if chains is None:
        return constant(-1, len(layout.start)), constant(0, len(layout.start))
    group = np.full(len(layout.start), -1, dtype=np.int64)
    transfer = layout.end - layout.start
    members = layout.place[np.stack(chains)]
    arrived, ended = layout.start[members].max(axis=0), layout.end[members].min(axis=0)
    together = np.flatnonzero(ended > arrived)
    for row in members[:, together]:
        group[row] = together
        transfer[row] = layout.end[row] - arrived[together]
    return group, transfer


def _with_collectives(chains: Chains, edges: Edges) -> Edges:
    """A collective ends when its last rank has arrived and the data are there: whatever waits for one, for all."""
    mine = np.flatnonzero(chains.group >= 0)
    if not len(mine):
        return edges
    following = mine[mine + 1 < len(chains)] + 1
    following = following[~chains.first[following]]
    apart = chains.start[following] >= chains.end[following - 1]
    following = following[apart]
    # On its own stream the step is the transfer, counted from its own arrival at the earliest.
    chains.part = chains.part.astype(np.int64)
    chains.part[following] = np.minimum(chains.transfer[following - 1], chains.part[following])
    waits = (following - 1, following, chains.transfer[following - 1], chains.gap[following])
    all_edges = Edges.of([(edges.source, edges.target, edges.part, edges.lag), waits])
    return expanded(chains, all_edges)


def _typical(values: IntArray, shown: BoolArray, group: IntArray, count: int, usual: int) -> IntArray:
    """For each row the median of its group's rows where it shows; of all groups', where its own shows none; else
    ``usual``."""
    everywhere = median(values[shown]) if shown.any() else usual
    table = np.full(count, int(everywhere), dtype=np.int64)
    rows = np.flatnonzero(shown)
    if len(rows) and count > 1:
        order = rows[np.argsort(group[rows], kind="stable")]
        numbers, first = np.unique(group[order], return_index=True)
        for number, part in zip(numbers.tolist(), np.split(values[order], first[1:]), strict=True):
            table[number] = int(median(part))
    return table[group]
