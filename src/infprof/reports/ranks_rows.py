"""The ranks of a job as rows of text, the same for every report: ranks, arrivals, traffic, and what is said of them."""

from __future__ import annotations

from typing import NamedTuple

from infprof.reports import format as fmt
from infprof.reports import labels
from infprof.results import Job, RankRow, Verdict

NOT_COMPARED = "–"
RANK_COLUMNS = ("rank", "busy", "exposed comm.", "waits", "late", "last", "class")
ARRIVAL_COLUMNS = ("collective", "group", "count", "spread p50", "p95", "max", "waits")
TRAFFIC_COLUMNS = ("group", "collective", "ranks here", "count", "payload", "each sends")
MATRIX_COLUMNS = ("from", "to", "bytes")
RANK_NOTE = "waits: for the last rank to arrive; late: behind the first, median; last: in so many collectives."


class Value(NamedTuple):
    """A cell: its text, and what it is sorted by (None = as text)."""

    text: str
    sort: float | None = None


def rank_rows(job: Job) -> list[list[Value]]:
    """A row per rank (or device of one), in order."""
    return [_rank(row) for row in job.ranks]


def shown_ranks(job: Job, limit: int) -> list[list[Value]]:
    """At most ``limit`` rows, in order: those that are late and those that wait most, where there are more ranks."""
    late = set(job.stragglers.labels[: limit // 2])

    def weight(index: int) -> tuple[bool, bool, int]:
        row = job.ranks[index]
        return row.label not in late, row.label != job.focus, -(row.waited_ns or row.exposed_comm_ns or 0)

    chosen = sorted(sorted(range(len(job.ranks)), key=weight)[:limit])
    return [_rank(job.ranks[index]) for index in chosen]


def _rank(row: RankRow) -> list[Value]:
    def time(ns: int | None) -> Value:
        return Value(NOT_COMPARED if ns is None else fmt.duration(ns), ns)

    last = f"{row.last_count}/{row.compared_collectives}" if row.last_count is not None else NOT_COMPARED
    return [
        Value(fmt.clean(row.label)),
        Value(NOT_COMPARED if row.busy_ratio is None else fmt.percent(row.busy_ratio), row.busy_ratio),
        time(row.exposed_comm_ns),
        time(row.waited_ns),
        time(row.lateness_p50_ns),
        Value(last, row.last_count),
        Value(labels.verdict_title(Verdict(row.cls, row.cause, None, "C", 0.0, ""))),
    ]


def arrival_values(job: Job) -> list[list[Value]]:
    """A row per group and kind of collective, most wait first."""
    return [
        [
            Value(fmt.clean(row.name)),
            Value(fmt.clean(row.group) if row.group is not None else NOT_COMPARED),
            Value(fmt.count(row.count), row.count),
            *(Value(fmt.duration(ns), ns) for ns in (row.spread_p50_ns, row.spread_p95_ns, row.spread_max_ns)),
            Value(fmt.duration(row.waited_ns), row.waited_ns),
        ]
        for row in job.arrivals
    ]


def traffic_values(job: Job) -> list[list[Value]]:
    """A row per process group and kind of collective, most bytes first."""
    return [
        [
            Value(fmt.clean(row.group)),
            Value(fmt.clean(row.name)),
            Value(fmt.clean(", ".join(row.ranks[:4]) + (f" and {len(row.ranks) - 4} more" if row.ranks[4:] else ""))),
            Value(fmt.count(row.count), row.count),
            Value(fmt.size(row.bytes), row.bytes),
            Value(fmt.size(row.bus_bytes), row.bus_bytes),
        ]
        for row in job.traffic
    ]


def matrix_values(job: Job) -> list[list[Value]]:
    """A row per pair of ranks whose traffic is certain."""
    return [
        [Value(fmt.clean(row["from"])), Value(fmt.clean(row["to"])), Value(fmt.size(row["bytes"]), row["bytes"])]
        for row in job.matrix
    ]


def job_lines(job: Job) -> list[str]:
    """What is said of the job as a whole: what lateness costs, and how clocks were matched."""
    # Who is late stands in the verdict.
    lines = [] if job.stragglers.labels else [job.stragglers.sentence]
    if job.stragglers.lost_ns is not None:
        count = job.stragglers.collectives
        lines.append(
            f"Waiting for the last rank: {fmt.duration(job.stragglers.waited_ns)} over all ranks in {fmt.count(count)} "
            f"{'collective' if count == 1 else 'collectives'}; the first to arrive waits {fmt.duration(job.stragglers.lost_ns)}."
        )
    error = f" Error up to {fmt.duration(job.error_ns)}." if job.error_ns is not None else ""
    if len(job.ranks) > 1:
        lines.append(f"{job.alignment}{error}")
    return lines


def job_note(job: Job) -> str:
    """How many ranks are here, of how many."""
    count = len(job.ranks)
    of = f" of {job.world_size}" if job.world_size is not None and job.world_size != count else ""
    return f"{count}{of}; all other figures are those of {fmt.clean(job.focus)}"
