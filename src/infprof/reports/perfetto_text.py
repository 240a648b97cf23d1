"""Columns of events as text of the Chrome trace-event format, in bounded pieces, without a loop over events.

The format: "Trace Event Format" (Google, 2016), object form. Times are microseconds with three decimals, so that every
nanosecond is kept. A piece of many events is one template repeated, filled in by a single ``%``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from infprof.reports import format as fmt
from infprof.reports.perfetto_layout import lanes, outer_first
from infprof.trace import IntArray

# So many events are turned into text at a time: some 30 MB of Python objects.
PIECE_EVENTS = 1 << 15

_SLICE = ',\n{"ph":"X",%s,%s,"ts":%d.%03d,"dur":%d.%03d,"args":{%s}}'
_COUNTER = ',\n{"ph":"C",%s,"ts":%d.%03d,"args":{"value":%.6g}}'
_FLOW = (
    ',\n{"ph":"s","cat":"launch","name":"launch","id":%d,%s,"ts":%d.%03d}'
    ',\n{"ph":"f","bp":"e","cat":"launch","name":"launch","id":%d,%s,"ts":%d.%03d}'
)


class Output(Protocol):
    """What text is written to: any open binary file."""

    def write(self, data: bytes, /) -> Any: ...


def quoted(text: object) -> str:
    """A JSON string without control characters, direction marks or broken surrogates."""
    return json.dumps(fmt.clean(text), ensure_ascii=False)


def member(key: str, value: object) -> str:
    """One ``"key":value`` of a JSON object."""
    return f"{json.dumps(key)}:{json.dumps(value, allow_nan=False, ensure_ascii=False)}"


def filled(template: str, *columns: Sequence[Any] | NDArray[Any]) -> list[str]:
    """The ``%`` template once for each row of equally long columns. No value may hold a NUL."""
    return (((template + "\0") * len(columns[0])) % _interleaved(columns)).split("\0")[:-1]


def known(column: IntArray) -> list[Any]:
    """Numbers as JSON has them: -1, not recorded, becomes null."""
    if not (column < 0).any():
        return list(column.tolist())
    out = column.astype(object)
    out[column < 0] = "null"
    return list(out)


def _interleaved(columns: Sequence[Sequence[Any] | NDArray[Any]]) -> tuple[Any, ...]:
    """The values row by row, as Python objects."""
    flat: list[Any] = [None] * (len(columns) * len(columns[0]))
    for number, column in enumerate(columns):
        flat[number :: len(columns)] = column.tolist() if isinstance(column, np.ndarray) else column
    return tuple(flat)


class Source(Protocol):
    """Events of one kind, as columns, and how each of them is described."""

    start: IntArray
    end: IntArray
    # Filled in as events are drawn: the row of the screen on which each stands, -1 = not drawn.
    row: NDArray[np.int32]

    def heads(self, rows: IntArray) -> list[str]:
        """``"cat":…,"name":…`` of the rows."""
        ...

    def args(self, rows: IntArray) -> list[str]:
        """What stands inside ``args`` of the rows; may be empty."""
        ...


@dataclass
class TextSource:
    """A source of few distinct texts: ``head_of`` indexes ``head_texts``; ``arguments`` describes rows."""

    start: IntArray
    end: IntArray
    head_of: IntArray
    head_texts: NDArray[np.object_]
    arguments: Callable[[IntArray], list[str]]

    def __post_init__(self) -> None:
        self.row = np.full(len(self.start), -1, dtype=np.int32)

    def heads(self, rows: IntArray) -> list[str]:
        return list(self.head_texts[self.head_of[rows]])

    def args(self, rows: IntArray) -> list[str]:
        return self.arguments(rows)


def texts(values: Iterable[str]) -> NDArray[np.object_]:
    """An array of strings that can be indexed by a column."""
    held = list(values)
    out = np.empty(len(held), dtype=np.object_)
    out[:] = held
    return out


class EventWriter:
    """Writes the events of one list and remembers the rows (process and thread of the format) on which they stand.

    ``shift_ns`` is added to every time: viewers drop what lies before 0.
    """

    def __init__(self, output: Output, shift_ns: int, first_free_id: int) -> None:
        self._output = output
        self._shift_ns = shift_ns
        self._next_id = first_free_id
        self._pids: set[int] = set()
        self._tids: set[int] = set()
        self._rows: list[str] = []
        self._is_first = True
        self.counts = {"slices": 0, "counters": 0, "flows": 0}

    # --- processes and rows ----------------------------------------------------------------------------------------

    def process(self, name: str, order: int, pid: int | None = None) -> int:
        """A process by name; ``order`` is its place on the screen. Gives its pid, a free number where it has none."""
        pid = self._free(pid, self._pids)
        self._metadata("process_name", pid, 0, {"name": fmt.clean(name)})
        self._metadata("process_sort_index", pid, 0, {"sort_index": order})
        return pid

    def row(self, pid: int, name: str, order: int, tid: int | None = None) -> int:
        """A row of a process. Gives its index; its tid is a free number where it has none that is its own."""
        tid = self._free(tid, self._tids)
        self._metadata("thread_name", pid, tid, {"name": fmt.clean(name)})
        self._metadata("thread_sort_index", pid, tid, {"sort_index": order})
        self._rows.append(f'"pid":{pid},"tid":{tid}')
        return len(self._rows) - 1

    def _free(self, wanted: int | None, taken: set[int]) -> int:
        # 0 is the idle process to a viewer.
        if wanted is not None and wanted > 0 and wanted not in taken:
            taken.add(wanted)
            return wanted
        self._next_id += 1
        return self._next_id - 1

    def _metadata(self, kind: str, pid: int, tid: int, args: dict[str, Any]) -> None:
        self._write(
            f',\n{{"ph":"M","name":"{kind}","pid":{pid},"tid":{tid},"args":{json.dumps(args, ensure_ascii=False)}}}'
        )

    # --- events ----------------------------------------------------------------------------------------------------

    def slices(
        self, pid: int, name: str, order: int, parts: Sequence[tuple[Source, IntArray]], tid: int | None = None
    ) -> None:
        """Events of several sources, the given rows of each, on one row of the screen and where they cross on more."""
        kind = np.repeat(np.arange(len(parts), dtype=np.int8), [len(rows) for _, rows in parts])
        if not len(kind):
            return
        rows = np.concatenate([rows for _, rows in parts])
        start = np.concatenate([source.start[chosen] for source, chosen in parts])
        end = np.maximum(np.concatenate([source.end[chosen] for source, chosen in parts]), start)
        if not _in_order(start):
            in_order = outer_first(start, end)
            kind, rows, start, end = kind[in_order], rows[in_order], start[in_order], end[in_order]
        lane = lanes(start, end)
        sources = [source for source, _ in parts]
        for number in range(int(lane.max()) + 1):
            here = np.flatnonzero(lane == number)
            if len(here):
                title = f"{name} (overlapping {number})" if number else name
                row = self.row(pid, title, order, None if number else tid)
                self._lane(row, sources, kind[here], rows[here], start[here], end[here])

    def _lane(
        self, row: int, sources: list[Source], kind: NDArray[np.int8], rows: IntArray, start: IntArray, end: IntArray
    ) -> None:
        """Events of one row, which nest and are in order, piece by piece."""
        for i in range(0, len(rows), PIECE_EVENTS):
            piece = slice(i, i + PIECE_EVENTS)
            self._slices(row, sources, kind[piece], rows[piece], start[piece], end[piece])

    def _slices(
        self, row: int, sources: list[Source], kind: NDArray[np.int8], rows: IntArray, start: IntArray, end: IntArray
    ) -> None:
        heads, args = np.empty(len(rows), dtype=np.object_), np.empty(len(rows), dtype=np.object_)
        for index, source in enumerate(sources):
            mine = np.flatnonzero(kind == index)
            if len(mine):
                heads[mine] = source.heads(rows[mine])
                args[mine] = source.args(rows[mine])
                source.row[rows[mine]] = row
        where = [self._rows[row]] * len(rows)
        self._write_all(_SLICE, heads, where, *self._time(start), *np.divmod(end - start, 1000), args)
        self.counts["slices"] += len(rows)

    def counter(self, pid: int, name: str, time: IntArray, value: NDArray[np.float64]) -> None:
        """Samples of one counter; those that are no numbers are left out."""
        finite = np.isfinite(value)
        if not finite.all():
            time, value = time[finite], value[finite]
        head = f'"pid":{pid},"tid":0,"name":{quoted(name)}'
        for i in range(0, len(time), PIECE_EVENTS):
            piece = slice(i, i + PIECE_EVENTS)
            heads = [head] * len(time[piece])
            self._write_all(_COUNTER, heads, *self._time(time[piece]), value[piece])
        self.counts["counters"] += len(time)

    def flows(self, from_row: NDArray[Any], from_time: IntArray, to_row: NDArray[Any], to_time: IntArray) -> None:
        """Arrows from one event to another, by the rows on which they stand and their starts. Ids count from 1."""
        row_texts = texts(self._rows)
        for i in range(0, len(from_row), PIECE_EVENTS):
            piece = slice(i, i + PIECE_EVENTS)
            ids = np.arange(self.counts["flows"] + 1, self.counts["flows"] + 1 + len(from_row[piece]))
            begin = (ids, row_texts[from_row[piece]], *self._time(from_time[piece]))
            finish = (ids, row_texts[to_row[piece]], *self._time(to_time[piece]))
            self._write_all(_FLOW, *begin, *finish)
            self.counts["flows"] += len(ids)

    def _time(self, times: IntArray) -> tuple[IntArray, IntArray]:
        """Microseconds and the nanoseconds beyond them."""
        return np.divmod(times + self._shift_ns, 1000)

    def _write_all(self, template: str, *columns: Sequence[Any] | NDArray[Any]) -> None:
        self._write((template * len(columns[0])) % _interleaved(columns))

    def _write(self, text: str) -> None:
        # Every event begins with the comma that parts it from the one before. UTF-8 as it is: Perfetto does not decode
        # \u escapes in the names of rows.
        self._output.write(text[self._is_first :].encode("utf-8", "replace"))
        self._is_first = False


def _in_order(start: IntArray) -> bool:
    """Whether the starts ascend and no two are equal: then there is nothing to sort."""
    return bool((start[1:] > start[:-1]).all())
