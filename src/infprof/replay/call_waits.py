"""What synchronising and blocking calls waited for, and what they cost their thread without waiting."""

from __future__ import annotations

import numpy as np

from infprof.distinct import distinct_values
from infprof.measures import calls as call_kinds
from infprof.quantiles import median
from infprof.replay.layout import Layout
from infprof.replay.recording import ALLOCATOR, NEVER, SKEW_NS, SYNC, TURN_AROUND_NS, Chains, Edges, expanded
from infprof.trace import EVENT_SYNC, STREAM_SYNC, BoolArray, IntArray


def call_waits(layout: Layout, chains: Chains) -> Edges:
    """What synchronising and blocking calls waited for, and what they cost without waiting."""
    calls = layout.calls
    parts: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    if not len(calls) or not len(chains):
        return Edges.of(parts)
    table = layout.prepared.trace.api_calls
    assert table is not None
    names = table["name"][calls.row]
    process = np.array([t.process for t in layout.prepared.trace.threads], dtype=np.int64)[calls.thread]
    sources, targets = _awaited(layout, names, process)
    # Blocking copies wait for their own.
    held = np.flatnonzero(layout.held)
    last = held[np.append(layout.call[held][1:] != layout.call[held][:-1], True)] if len(held) else held
    sources, targets = np.concatenate([sources, last]), np.concatenate([targets, layout.call[last]])
    tail = calls.end[targets] - layout.end[sources]
    waited = layout.end[sources] > calls.start[targets]
    latest = np.full(len(calls), NEVER, dtype=np.int64)
    np.maximum.at(latest, targets, layout.end[sources])
    binding = latest > calls.start
    _own_costs(layout, names, binding, latest, chains)
    # The one that ended last held the call; the others would have let it go after as long.
    usual = np.where(binding, calls.end - latest, calls.own)
    lag = np.where(waited & (layout.end[sources] == latest[targets]), tail, np.minimum(tail, usual[targets]))
    parts.append((sources, targets, layout.end[sources] - layout.start[sources], lag))
    return expanded(chains, Edges.of(parts))


def _awaited(layout: Layout, names: IntArray, process: IntArray) -> tuple[IntArray, IntArray]:
    """(operation, call) for all calls that synchronise, by name, by record, or by what they show."""
    calls, strings = layout.calls, layout.prepared.trace.strings
    waits = np.flatnonzero(calls.cost == SYNC)
    frees = _long_ones(layout, np.flatnonzero((calls.cost == ALLOCATOR) & call_kinds.matching(strings, "Free")[names]))
    none = np.empty(0, dtype=np.int64)
    if not len(waits) and not len(frees):
        return none, none
    whole = call_kinds.matching(strings, r"(Device|Ctx|Context)Synchronize")[names]
    stream, record = _recorded_waits(layout, process)
    known = stream[waits] >= 0
    parts = [_on_known_stream(layout, waits[known], stream, record)]
    rest = waits[~known]
    parts += _by_evidence(layout, rest[~whole[rest]], process, every_stream=False)
    parts += _by_evidence(layout, rest[whole[rest]], process, every_stream=True)
    parts += _by_evidence(layout, frees, process, every_stream=True, only_drained=True)
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def _long_ones(layout: Layout, frees: IntArray) -> IntArray:
    """Frees that lasted clearly longer than the quick ones: only these can have waited for the device."""
    length = layout.calls.end[frees] - layout.calls.start[frees]
    return frees[length > 1.5 * np.percentile(length, 10) + TURN_AROUND_NS] if len(frees) else frees


def _recorded_waits(layout: Layout, process: IntArray) -> tuple[IntArray, IntArray]:
    """Per call the stream that it waits for, and the time of the record, where the profiler wrote them down."""
    stream = np.full(len(layout.calls), -1, dtype=np.int64)
    record = np.full(len(layout.calls), -1, dtype=np.int64)
    syncs = layout.prepared.trace.syncs
    if syncs is None or not len(syncs):
        return stream, record
    kind = syncs["kind"]
    mine = np.flatnonzero(
        ((kind == STREAM_SYNC) & (syncs["stream"] >= 0)) | ((kind == EVENT_SYNC) & (syncs["record_stream"] >= 0))
    )
    rows = layout.prepared.launches.find(np.asarray(syncs["process"][mine]), np.asarray(syncs["correlation"][mine]))
    mine, rows = mine[rows >= 0], rows[rows >= 0]
    call = layout.call_of_row[rows]
    is_event = kind[mine] == EVENT_SYNC
    stream[call] = np.where(is_event, syncs["record_stream"][mine], syncs["stream"][mine])
    times = layout.call_times(syncs["process"][mine], syncs["record"][mine])
    record[call] = np.where(is_event, times, -1)
    return stream, record


def _on_known_stream(layout: Layout, waits: IntArray, stream: IntArray, record: IntArray) -> tuple[IntArray, IntArray]:
    until = np.where(record[waits] >= 0, record[waits], layout.calls.start[waits])
    source = layout.last_on(stream[waits], until)
    returned = layout.calls.end[waits] + SKEW_NS
    good = source >= 0
    # An event that was recorded again meanwhile: the record before is meant, as far as the call shows it.
    ran_on = good.copy()
    ran_on[good] = layout.end[source[good]] > returned[good]
    for _ in range(8):
        if not ran_on.any():
            break
        source[ran_on] -= 1
        good &= (source >= 0) & ~(ran_on & layout.first[np.minimum(source + 1, len(layout.first) - 1)])
        ran_on &= good
        ran_on[ran_on] = layout.end[source[ran_on]] > returned[ran_on]
    good &= ~ran_on
    return source[good], waits[good]


def _by_evidence(
    layout: Layout, waits: IntArray, process: IntArray, every_stream: bool, only_drained: bool = False
) -> list[tuple[IntArray, IntArray]]:
    """Of the operations launched before each call those that had ended when it returned: the last of each stream,
    or of all streams. ``only_drained``: only where all had, and the last one within the call."""
    if not len(waits):
        return []
    found, of_call = [], []
    calls = layout.calls
    drained = np.ones(len(waits), dtype=np.bool_)
    owner = np.asarray(layout.ops.process)[layout.order]
    for low, high in layout.stretches():
        mine = np.flatnonzero(process[waits] == owner[low])
        if not len(mine):
            continue
        call = waits[mine]
        last = np.searchsorted(layout.launched[low:high], calls.start[call], side="left") - 1
        ended = (
            np.searchsorted(np.maximum.accumulate(layout.end[low:high]), calls.end[call] + SKEW_NS, side="right") - 1
        )
        drained[mine] &= last <= ended
        place = np.minimum(last, ended)
        good = place >= 0
        if every_stream:
            good &= last <= ended
        found.append(low + place[good])
        of_call.append(mine[good])
    if not found:
        return []
    source, which = np.concatenate(found), np.concatenate(of_call)
    latest = np.full(len(waits), NEVER, dtype=np.int64)
    np.maximum.at(latest, which, layout.end[source])
    keep = np.ones(len(source), dtype=np.bool_)
    if only_drained:
        keep &= drained[which] & (latest[which] > calls.start[waits[which]])
    if not every_stream:
        # One stream is meant: the one whose operation ended last, if it ended while the call waited.
        keep &= (layout.end[source] == latest[which]) & (latest[which] > calls.start[waits[which]])
    return [(source[keep], waits[which[keep]])]


def _own_costs(layout: Layout, names: IntArray, binding: BoolArray, latest: IntArray, chains: Chains) -> None:
    """What waiting calls take by themselves: as those of the name that did not wait, else as long as they took to
    return; copies what they took until their copy began."""
    calls = layout.calls
    calls.own = calls.own.copy()
    length = calls.end - calls.start
    sync = (calls.cost == SYNC) | (binding & (calls.cost == ALLOCATOR))
    for name in distinct_values(names[sync]).tolist() if sync.any() else []:
        mine = sync & (names == name)
        free = length[mine & ~binding]
        behind = (calls.end - np.maximum(latest, calls.start))[mine & binding]
        usual = median(free) if len(free) else median(behind) if len(behind) else 0
        calls.own[mine & binding] = np.minimum(length[mine & binding], max(int(usual), 0))
    held = np.flatnonzero(layout.held)
    calls.own[layout.call[held]] = np.minimum(chains.inside[held], length[layout.call[held]])
    calls.lead_own = np.minimum(calls.lead_own, calls.own)
