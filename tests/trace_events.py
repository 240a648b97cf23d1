"""A strict reader of Chrome trace-event files for tests: everything that a viewer relies on must hold.

After "Trace Event Format" (Google) and what Perfetto's importer drops or miscounts: times before 0, slices of one row that
cross, arrows without both ends, rows without names.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]
_KEYS = {
    "X": {"ph", "cat", "name", "pid", "tid", "ts", "dur", "args"},
    "s": {"ph", "cat", "name", "id", "pid", "tid", "ts"},
    "f": {"ph", "bp", "cat", "name", "id", "pid", "tid", "ts"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
    "M": {"ph", "name", "pid", "tid", "args"},
}


class Slice(NamedTuple):
    """An event with a length, on the trace's clock in whole nanoseconds."""

    process: str
    row: str
    category: str
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


class Timeline(NamedTuple):
    about: dict[str, Any]
    slices: list[Slice]
    flows: list[tuple[Slice, Slice]]
    counters: dict[tuple[str, str], list[tuple[int, float]]]

    def of(self, category: str) -> list[Slice]:
        return [s for s in self.slices if s.category == category]

    def row(self, name: str) -> list[Slice]:
        return [s for s in self.slices if s.row == name]


def read_timeline(path: Path) -> Timeline:
    """The file, all of it checked."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    whole = json.loads(text, parse_float=Decimal, parse_constant=_refuse)
    assert set(whole) == {"infprof", "displayTimeUnit", "traceEvents"}
    events: list[Event] = whole["traceEvents"]
    for event in events:
        assert set(event) == _KEYS[event["ph"]], event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
    processes, rows = _names(events)
    by_start: dict[tuple[int, int], list[tuple[Event, Slice]]] = defaultdict(list)
    for event in (e for e in events if e["ph"] == "X"):
        key = (event["pid"], event["tid"])
        start, length = _ns(event["ts"]), _ns(event["dur"])
        assert start >= 0 and length >= 0
        found = Slice(processes[key[0]], rows[key], event["cat"], event["name"], start, start + length, event["args"])
        by_start[key].append((event, found))
    for on_row in by_start.values():
        _check_nesting([s for _, s in on_row])
    return Timeline(
        whole["infprof"],
        [s for on_row in by_start.values() for _, s in on_row],
        _flows(events, by_start),
        _counters(events, processes),
    )


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON number")


def _ns(value: Any) -> int:
    """Microseconds with exactly three decimals."""
    assert isinstance(value, Decimal) and re.fullmatch(r"\d+\.\d{3}", str(value)), value
    return int(value * 1000)


def _names(events: list[Event]) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
    processes: dict[int, str] = {}
    rows: dict[tuple[int, int], str] = {}
    for event in (e for e in events if e["ph"] == "M"):
        key = (event["pid"], event["tid"])
        if event["name"] == "process_name":
            assert event["pid"] not in processes, "two processes of one number"
            processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            assert key not in rows, "two rows of one number"
            rows[key] = event["args"]["name"]
    assert all(processes.values()) and all(rows.values())
    assert len({tid for _, tid in rows}) == len(rows), "viewers know threads by their number alone"
    return processes, rows


def _check_nesting(slices: list[Slice]) -> None:
    """In the order of the file, each slice lies inside the open ones or after them; starts ascend."""
    stack: list[int] = []
    last = 0
    for found in slices:
        assert found.start_ns >= last, f"{found} stands too late"
        last = found.start_ns
        while stack and stack[-1] <= found.start_ns:
            stack.pop()
        assert not stack or found.end_ns <= stack[-1], f"{found} crosses another slice of its row"
        stack.append(found.end_ns)


def _flows(
    events: list[Event], by_start: dict[tuple[int, int], list[tuple[Event, Slice]]]
) -> list[tuple[Slice, Slice]]:
    """Every arrow with both ends, each at the start of a slice of its row."""
    at = {(key, s.start_ns): s for key, on_row in by_start.items() for _, s in on_row if s.end_ns > s.start_ns}
    ends: dict[str, dict[int, Slice]] = {"s": {}, "f": {}}
    for event in (e for e in events if e["ph"] in "sf"):
        found = at[(event["pid"], event["tid"]), _ns(event["ts"])]
        assert event["id"] not in ends[event["ph"]], "an arrow with two ends of a kind"
        ends[event["ph"]][event["id"]] = found
    assert ends["s"].keys() == ends["f"].keys()
    flows = [(ends["s"][number], ends["f"][number]) for number in ends["s"]]
    assert all(begin.start_ns <= end.start_ns for begin, end in flows), "viewers drop arrows back in time"
    return flows


def _counters(events: list[Event], processes: dict[int, str]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    out: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for event in (e for e in events if e["ph"] == "C"):
        assert set(event["args"]) == {"value"}
        out[processes[event["pid"]], event["name"]].append((_ns(event["ts"]), float(event["args"]["value"])))
    return dict(out)
