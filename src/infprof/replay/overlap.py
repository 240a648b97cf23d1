"""Copies between host and device as they would be with pinned memory and a stream of their own: behind everybody's back.

A copy then holds up neither its stream nor the call that asked for it, only what needs its data: a copy to the host
begins after the work before it on its stream, and whoever waits for it waits on. Copies to the device are taken to be
prefetched: what uses them does not wait. Copies of one direction still run one after the other. It is a bound: how far
ahead a program can ask for its data is not in a trace.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infprof.measures import operations as op
from infprof.replay.recording import USUAL_GAP_NS, Calls, Chains, Edges, Recording
from infprof.trace import D2H, H2D, BoolArray, IntArray


def with_overlapped_copies(recording: Recording) -> Recording:
    """The recording with host copies on chains of their own, one for each direction of a device."""
    chains, ops = recording.chains, recording.prepared.operations
    copies = recording.prepared.trace.copies
    if copies is None or not len(copies):
        return recording
    mine = np.flatnonzero(ops.kind[chains.row] == op.COPY)
    kind = copies["kind"][ops.row[chains.row[mine]]]
    mine, kind = mine[(kind == H2D) | (kind == D2H)], kind[(kind == H2D) | (kind == D2H)]
    if not len(mine):
        return recording
    device = np.asarray(ops.device)[chains.row[mine]]
    order = np.lexsort((chains.start[mine], kind, device))
    moved, kind, device = mine[order], kind[order], device[order]
    place = np.full(len(chains), -1, dtype=np.int64)
    place[moved] = len(chains) + np.arange(len(moved))
    upward = np.zeros(len(chains), dtype=np.bool_)
    upward[moved[kind == H2D]] = True
    calls = _without_blocking(recording, moved[kind == H2D])
    return Recording(
        recording.prepared,
        calls,
        _chains(chains, moved, device * 2 + (kind == D2H)),
        # Whose launch is not known comes when its stream asks for it.
        _into_operations(recording, moved[(kind == D2H) | (chains.call[moved] < 0)], place),
        _into_calls(recording, upward, place),
        recording.origin_ns,
        recording.begin_ns,
        recording.without_launch,
    )


def _chains(chains: Chains, moved: IntArray, engine: IntArray) -> Chains:
    """The chains with empty places where the copies were, and the copies behind them, engine after engine."""
    first = np.append(True, engine[1:] != engine[:-1])
    end, part, gap = chains.end.copy(), chains.part.copy(), chains.gap.copy()
    end[moved] = chains.start[moved]
    gap[moved] = 0
    behind = moved + 1
    behind = behind[behind < len(chains)]
    behind = behind[~chains.first[behind]]
    part[behind] = 0
    length = chains.end[moved] - chains.start[moved]
    previous = np.concatenate([[0], length[:-1]])
    apart = np.minimum(
        chains.start[moved] - np.concatenate([chains.start[moved][:1], chains.end[moved][:-1]]), USUAL_GAP_NS
    )
    none = np.full(len(moved), -1, dtype=np.int64)

    def joined(old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([old, new])

    return Chains(
        joined(chains.row, chains.row[moved]),
        joined(chains.stream, int(chains.stream.max()) + 1 + engine),
        joined(chains.start, chains.start[moved]),
        joined(end, chains.end[moved]),
        joined(chains.call, chains.call[moved]),
        joined(chains.inside, chains.inside[moved]),
        joined(chains.after, chains.after[moved]),
        joined(part, np.where(first, 0, previous)),
        joined(gap, np.where(first, 0, np.maximum(apart, 0))),
        joined(chains.pinned, chains.pinned[moved]),
        joined(chains.first, first),
        joined(chains.group, none),
        joined(chains.transfer, length),
    )


def _into_operations(recording: Recording, down: IntArray, place: IntArray) -> Edges:
    """What the copies waited for they still wait for; nothing on the GPU waits for them."""
    edges = recording.into_operations
    kept = place[edges.source] < 0
    target = np.where(place[edges.target] >= 0, place[edges.target], edges.target)
    nothing = np.zeros(len(down), dtype=np.int64)
    return Edges(
        np.concatenate([edges.source[kept], down]),
        np.concatenate([target[kept], place[down]]),
        np.concatenate([edges.part[kept], nothing]),
        np.concatenate([edges.lag[kept], nothing]),
    )


def _into_calls(recording: Recording, upward: BoolArray, place: IntArray) -> Edges:
    """Who waited for a copy to the host waits on; behind a copy to the device it is its stream that is waited for."""
    edges, chains = recording.into_calls, recording.chains
    own = chains.call[edges.source] == edges.target
    kept = ~(upward[edges.source] & own)
    source, part = edges.source[kept], edges.part[kept]
    up, down = upward[source], (place[source] >= 0) & ~upward[source]
    return Edges(np.where(down, place[source], source), edges.target[kept], np.where(up, 0, part), edges.lag[kept])


def _without_blocking(recording: Recording, upward: IntArray) -> Calls:
    """Calls that staged pageable memory take no longer than other launches of copies."""
    calls, chains = recording.calls, recording.chains
    own = calls.own.copy()
    call = chains.call[upward]
    call = call[call >= 0]
    usual = int(np.median(own[chains.call[chains.call >= 0]])) if (chains.call >= 0).any() else 0
    own[call] = np.minimum(own[call], max(usual, 0))
    return replace(calls, own=own, lead_own=np.minimum(calls.lead_own, own))
