"""What the other threads of the program did while one of them waited: whom it waited for, or whether for requests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from infprof.distinct import distinct_values
from infprof.measures import calls, host
from infprof.measures import intervals as iv
from infprof.measures.host import HostTimelines
from infprof.measures.intervals import Intervals
from infprof.measures.operations import Prepared
from infprof.trace import IntArray

# Who is known to work for this share of a wait is whom it was for.
WORKING_SHARE = 0.5
# Nobody works where all together are known to for less than this share ...
QUIET_SHARE = 0.1
# ... and the program waits for requests where one of its threads polls for this share.
POLLING_SHARE = 0.8
# Between two steps a host hardly waits longer than this for a lock, and for requests it does.
LONG_WAIT_NS = 10_000_000


class Peers:
    """Threads beside the one that launches; what is found is kept per thread."""

    def __init__(self, prepared: Prepared, timelines: HostTimelines) -> None:
        self._prepared = prepared
        self._timelines = timelines
        self._found: dict[tuple[str, int, int], Intervals] = {}

    def split_polls(self, thread: int, starts: IntArray, ends: IntArray, spent: IntArray) -> tuple[IntArray, IntArray]:
        """Polling as (no demand, waiting for a peer that worked): a peer known to work for half of the polling decides."""
        demand = spent.copy()
        work = np.zeros(len(starts), dtype=np.int64)
        polling = np.flatnonzero(spent > 0)
        if len(polling):
            busy = self._during("any", thread, host.POLL, starts[polling], ends[polling])
            work[polling] = np.where(busy >= WORKING_SHARE * spent[polling], spent[polling], 0)
            demand[polling] -= work[polling]
        return demand, work

    def split_locks(
        self, thread: int, starts: IntArray, ends: IntArray, spent: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Waiting for locks and conditions as (lock, no demand, waiting for a peer that worked).

        Threads of the same process share its locks, the interpreter's among them; another process that works hands its
        work over. Nobody holds a lock where all threads sleep and one polls: then the program waits for requests.
        """
        lock, nothing = spent.copy(), np.zeros(len(starts), dtype=np.int64)
        waiting = np.flatnonzero(spent > 0)
        if not len(waiting) or self._prepared.trace.os_calls is None:
            return lock, nothing, nothing
        since, until, length = starts[waiting], ends[waiting], spent[waiting]
        own = self._during("own", thread, host.LOCK, since, until)
        handed = self._during("other", thread, host.LOCK, since, until)
        work, demand = nothing.copy(), nothing.copy()
        is_work = (handed >= WORKING_SHARE * length) & (own < WORKING_SHARE * length)
        work[waiting] = np.where(is_work, length, 0)
        long = np.flatnonzero((until - since >= LONG_WAIT_NS) & ~is_work)
        if len(long):
            quiet = self._during("any", thread, host.LOCK, since[long], until[long]) < QUIET_SHARE * length[long]
            polled = self._during("polls", thread, host.LOCK, since[long], until[long])
            quiet &= polled >= POLLING_SHARE * length[long]
            demand[waiting[long]] = np.where(quiet, length[long], 0)
        return lock - work - demand, demand, work

    def split_pauses(
        self, thread: int, starts: IntArray, ends: IntArray, spent: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Sleeping and yielding as (the program's own, no demand, waiting for a peer that worked): long ones poll."""
        own, nothing = spent.copy(), np.zeros(len(starts), dtype=np.int64)
        paused = np.flatnonzero(spent > 0)
        if not len(paused):
            return own, nothing, nothing
        work, demand = nothing.copy(), nothing.copy()
        since, until, length = starts[paused], ends[paused], spent[paused]
        is_work = self._during("any", thread, host.PAUSE, since, until) >= WORKING_SHARE * length
        work[paused] = np.where(is_work, length, 0)
        long = ~is_work & (until - since >= LONG_WAIT_NS) & (length >= POLLING_SHARE * (until - since))
        demand[paused] = np.where(long, length, 0)
        return own - work - demand, demand, work

    def workers(self, thread: int) -> Iterator[tuple[int, Intervals]]:
        """Other threads with when they were known to work: between two recorded system calls, or in a CUDA call.

        A thread that is silent before its first or after its last recorded call may be blocked in a call that never
        returned, so it says nothing there.
        """
        prepared = self._prepared
        table = prepared.trace.os_calls
        if table is not None:
            for other in distinct_values(table["thread"]).tolist():
                if other in (thread, -1):
                    continue
                mine = table["thread"] == other
                blocked = iv.union(table["start"][mine], table["end"][mine])
                if blocked.count > 1:
                    yield other, iv.complement(blocked, int(blocked.starts[0]), int(blocked.ends[-1]))
        nested = prepared.thread_calls
        api = prepared.trace.api_calls
        if nested is not None and api is not None:
            for other, rows in nested.rows.items():
                if other not in (thread, -1):
                    yield other, iv.union(api["start"][rows], api["end"][rows])

    def _during(self, who: str, thread: int, label: int, starts: IntArray, ends: IntArray) -> IntArray:
        """Of each interval the part in which the thread's time has this label and these others work (or poll), ns."""
        key = (who, thread, label)
        if key not in self._found:
            others = self._polling(thread) if who == "polls" else self._working(who, thread)
            self._found[key] = iv.intersect(others, self._timelines.stretches(thread, label))
        return iv.covered(iv.near(self._found[key], int(starts.min()), int(ends.max())), starts, ends)

    def _working(self, who: str, thread: int) -> Intervals:
        """When any other thread was known to work: of all, of the thread's own process, or of other processes."""
        if (who, thread, -1) not in self._found:
            threads = self._prepared.trace.threads
            sets: dict[str, list[Intervals]] = {"own": [], "other": []}
            for other, busy in self.workers(thread):
                sets["own" if threads[other].process == threads[thread].process else "other"].append(busy)
            for which, of in (*sets.items(), ("any", [*sets["own"], *sets["other"]])):
                self._found[which, thread, -1] = iv.merge(*of) if of else iv.empty()
        return self._found[who, thread, -1]

    def _polling(self, thread: int) -> Intervals:
        """When any other thread was polling."""
        table = self._prepared.trace.os_calls
        if table is None:
            return iv.empty()
        polls = calls.os_kinds(self._prepared.trace.strings) == calls.POLL
        mine = polls[table["name"]] & (table["thread"] != thread)
        return iv.union(table["start"][mine], table["end"][mine])
