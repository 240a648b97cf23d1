"""Who arrives late at collectives: arrival spread, waits, and what kind of straggler there is, from aligned columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infprof.ranks.alignment import NOT_ALIGNED, Clock, Participant
from infprof.results import ArrivalRow, Stragglers
from infprof.rules import Thresholds
from infprof.trace import BoolArray, IntArray

PERSISTENT, ROTATING, ONE_OFF, NONE, UNKNOWN = "persistent", "rotating", "one-off", "none", "unknown"
_WAIT_HALF = 0.5
# Persistent among two ranks: one of them is always last in half of the collectives.
_PERSISTENT_OF_TWO = 0.75


@dataclass(frozen=True)
class Arrivals:
    """Arrivals at collectives that several participants share and that begin in the window of each of them.

    Rows (``who``, ``row``, ``which``, ``wait``, ``late``) are arrivals, sorted by collective: the participant, its row in
    its own columns, the collective (an index into the columns below), how long its kernel ran before the last one
    arrived, and how long after the first it arrived, ns. Collectives: ``spread`` is from the first arrival to the last,
    ``last`` the participant that came last (-1 where the clocks' error leaves that open), ``waited`` all waits, ns.
    """

    who: IntArray
    row: IntArray
    which: IntArray
    wait: IntArray
    late: IntArray
    spread: IntArray
    last: IntArray
    waited: IntArray
    name: IntArray
    names: list[str]
    group: IntArray

    def __len__(self) -> int:
        return len(self.spread)


def arrivals(participants: Sequence[Participant], clocks: Sequence[Clock]) -> Arrivals:
    """The arrivals of all participants whose clocks are aligned. Ids are those of ``Clock.ids``."""
    parts = [_of_participant(i, p, c) for i, (p, c) in enumerate(zip(participants, clocks, strict=True))]
    parts = parts or [(np.empty(0, dtype=np.int64),) * 6]
    ids, who, row, start, end, inside = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((who, start, ids))
    ids, who, row, start, end, inside = (column[order] for column in (ids, who, row, start, end, inside))
    begins, counts = _runs(ids)
    kept = (counts > 1) & (np.add.reduceat(inside, begins) == counts if len(begins) else counts > 1)
    rows = np.repeat(kept, counts)
    who, row, start, end = (column[rows] for column in (who, row, start, end))
    counts = counts[kept]
    begins = np.cumsum(counts) - counts
    which = np.repeat(np.arange(len(counts)), counts)
    first, latest = start[begins], start[begins + counts - 1]
    spread = latest - first
    wait = np.clip(latest[which] - start, 0, end - start)
    # Whoever came last must be behind the one before by more than both clocks may be wrong.
    error = np.array([clock.error_ns for clock in clocks], dtype=np.int64)
    before = start[begins + counts - 2]
    doubt = error[who[begins + counts - 1]] + error[who[begins + counts - 2]]
    last = np.where(latest - before > doubt, who[begins + counts - 1], -1)
    names: dict[str, int] = {}
    name, group = _named(participants, names, who[begins], row[begins])
    waited = np.bincount(which, wait, minlength=len(counts)).astype(np.int64)
    return Arrivals(who, row, which, wait, start - first[which], spread, last, waited, name, list(names), group)


def _of_participant(number: int, participant: Participant, clock: Clock) -> tuple[IntArray, ...]:
    c = participant.collectives
    rows = np.flatnonzero(clock.ids >= 0) if clock.how != NOT_ALIGNED else np.empty(0, dtype=np.int64)
    start, end = clock.on_reference(c.start[rows]), clock.on_reference(c.end[rows])
    who = np.full(len(rows), number, dtype=np.int64)
    return clock.ids[rows], who, rows, start, end, c.in_window[rows].astype(np.int64)


def _runs(ids: IntArray) -> tuple[IntArray, IntArray]:
    """Where each run of equal ids begins, and its length."""
    if not len(ids):
        return ids, ids
    begins = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    return begins, np.diff(begins, append=len(ids))


def _named(
    participants: Sequence[Participant], names: dict[str, int], who: IntArray, row: IntArray
) -> tuple[IntArray, IntArray]:
    """Operation and group (-1 where not known) of each collective, as indexes into ``names``."""
    operation = np.full(len(who), -1, dtype=np.int64)
    group = np.full(len(who), -1, dtype=np.int64)
    for number in np.unique(who).tolist():
        c = participants[number].collectives
        shared = np.array([names.setdefault(n, len(names)) for n in c.names] + [-1], dtype=np.int64)
        mine = who == number
        operation[mine] = shared[c.operation[row[mine]]]
        group[mine] = shared[c.group[row[mine]]]
    return operation, group


def arrival_rows(a: Arrivals) -> list[ArrivalRow]:
    """Arrival spread by group and operation, most wait first."""
    out = []
    pairs, where = np.unique(np.stack([a.group, a.name]), axis=1, return_inverse=True)
    where = where.reshape(-1)
    for number, (group, name) in enumerate(pairs.T.tolist()):
        mine = where == number
        p50, p95 = np.quantile(a.spread[mine], (0.5, 0.95))
        out.append(
            ArrivalRow(
                None if group < 0 else a.names[group],
                a.names[name],
                int(mine.sum()),
                round(float(p50)),
                round(float(p95)),
                int(a.spread[mine].max()),
                int(a.waited[mine].sum()),
            )
        )
    return sorted(out, key=lambda r: (-r.waited_ns, r.group or "", r.name))


def stragglers(
    a: Arrivals, participants: Sequence[Participant], labels: Sequence[str], comm_ns: int, thresholds: Thresholds
) -> Stragglers:
    """What kind of straggler there is. ``comm_ns`` is the communication time of all participants in their windows.

    persistent: one rank is last in most collectives and causes most of the wait; one-off: a few collectives hold most of
    the wait; rotating: neither.
    """
    count, waited = len(a), int(a.waited.sum())
    if not count:
        text = "No collective could be compared between ranks, so nobody is called late."
        return Stragglers(UNKNOWN, [], 0, None, None, None, None, text)
    ratio = waited / comm_ns if comm_ns else None
    lost = int(a.spread.sum())

    def found(kind: str, who: list[int], reason: str | None, sentence: str) -> Stragglers:
        return Stragglers(kind, [labels[i] for i in who], count, waited, ratio, lost, reason, sentence)

    if ratio is None or ratio < thresholds.straggler_min or (a.last < 0).all():
        return found(
            NONE, [], None, f"No straggler: {_of_communication(ratio)} is waiting for the last rank to arrive."
        )
    if count < thresholds.straggler_collectives:
        return found(
            UNKNOWN,
            [],
            None,
            f"{_of_communication(ratio)} is waiting for the last rank, but {count} collectives are too few to say "
            "whether it is always the same.",
        )
    few = _holding_half(a.waited)
    if len(few) <= max(1, thresholds.straggler_few * count):
        late = sorted({int(i) for i in a.last[few] if i >= 0})
        reason = _reason(a, participants, np.isin(np.arange(count), few), thresholds)
        return found(
            ONE_OFF,
            late,
            reason,
            f"One-off: {len(few)} of {count} collectives hold half of the wait for the last rank "
            f"({_names(labels, late)}){_REASONS[reason]}.",
        )
    decided = a.last >= 0
    lasts = np.bincount(a.last[decided], minlength=len(participants))
    causes = np.bincount(a.last[decided], a.waited[decided], minlength=len(participants))
    worst = int(np.lexsort((np.arange(len(causes)), -causes))[0])
    enough = max(thresholds.straggler_last, _PERSISTENT_OF_TWO if _ranks_per_collective(a) <= 2 else 0.0)
    if lasts[worst] >= enough * count and causes[worst] >= enough * waited:
        reason = _reason(a, participants, a.last == worst, thresholds)
        return found(
            PERSISTENT,
            [worst],
            reason,
            f"Persistent: {labels[worst]} is last in {lasts[worst]} of {count} collectives, and the others wait for it"
            f"{_REASONS[reason]}.",
        )
    reason = _reason(a, participants, decided, thresholds)
    late = [int(i) for i in np.argsort(-causes, kind="stable") if lasts[i]]
    return found(
        ROTATING,
        late,
        reason,
        f"Rotating: {len(late)} ranks take turns in being last ({labels[late[0]]} most often, {lasts[late[0]]} of {count})"
        f"{_REASONS[reason]}.",
    )


_REASONS = {
    "compute": "; it computes longer before it arrives",
    "host": "; its GPU is idle longer before it arrives: its host is late",
    "unknown": "; neither its kernels nor its idle time before explain it",
    None: "",
}


def _of_communication(ratio: float | None) -> str:
    return "an unknown share of communication" if ratio is None else f"{100 * ratio:.1f} % of communication"


def _names(labels: Sequence[str], who: list[int]) -> str:
    if not who:
        return "clocks are too far apart to say whom"
    more = f" and {len(who) - 3} more" if len(who) > 3 else ""
    return ", ".join(labels[i] for i in who[:3]) + more


def _ranks_per_collective(a: Arrivals) -> float:
    return len(a.who) / len(a)


def _holding_half(waited: IntArray) -> IntArray:
    """The fewest collectives that hold half of the wait."""
    order = np.argsort(-waited, kind="stable")
    reached = np.cumsum(waited[order])
    return order[: int(np.searchsorted(reached, _WAIT_HALF * waited.sum())) + 1]


def _reason(a: Arrivals, participants: Sequence[Participant], chosen: BoolArray, thresholds: Thresholds) -> str:
    """What the last one of the chosen collectives did more than the others since its collective before.

    Compared per collective with the median of the others, and summed: ``compute``, ``host`` (its GPU is idle), or
    ``unknown`` where neither makes up enough of the spread.
    """
    compute, idle = (
        _excess(a, np.concatenate([getattr(p.collectives, c) for p in participants]), participants)
        for c in ("compute_before", "idle_before")
    )
    decided = chosen & (a.last >= 0)
    spread = a.spread[decided].sum()
    for reason, excess in sorted((("compute", compute), ("host", idle)), key=lambda item: -item[1][decided].sum()):
        if spread and excess[decided].sum() >= thresholds.straggler_explained * spread:
            return reason
    return "unknown"


def _excess(a: Arrivals, column: IntArray, participants: Sequence[Participant]) -> IntArray:
    """Per collective: the last arrival's value less the lower median of the others'. ``column``: all participants'."""
    offsets = np.cumsum([0] + [len(p.collectives) for p in participants])[:-1]
    values = column[offsets[a.who] + a.row]
    begins, counts = _runs(a.which)
    ends = begins + counts - 1
    is_last = np.zeros(len(values), dtype=np.bool_)
    is_last[ends] = True
    others = ~is_last
    order = np.lexsort((values[others], a.which[others]))
    ordered = values[others][order]
    first = np.cumsum(counts - 1) - (counts - 1)
    return np.asarray(values[ends] - ordered[first + (counts - 2) // 2], dtype=np.int64)
