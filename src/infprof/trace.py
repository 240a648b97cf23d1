"""The Trace: what a reader fills and every measure reads. Typed columns, one time origin, one string table.

Times are int64 nanoseconds from the trace's own origin. Processes, threads, devices and streams are dense indexes into
``Trace.processes``, ``Trace.threads``, ``Trace.devices`` and ``Trace.streams``; -1 means "not recorded". Strings are
indexes into ``Trace.strings``; -1 means "none". A table that is None was not collected; an empty one was, and is empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from infprof.results import Problem

if TYPE_CHECKING:
    from infprof.telemetry import Telemetry

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

# Copy kinds of the Trace, whatever a tool's own numbering; "other" holds arrays and kinds the reader does not know.
COPY_KIND_NAMES = ("h2d", "d2h", "d2d", "p2p", "uvm", "h2h", "other")
H2D, D2H, D2D, P2P, UVM, H2H, OTHER_COPY = range(len(COPY_KIND_NAMES))

# Memory kinds of the two ends of a copy.
PAGEABLE, PINNED, DEVICE, ARRAY, MANAGED, UNKNOWN_MEMORY = range(6)

# What a row of ``overheads`` is.
PROFILER, MODULE_LOAD, COMMAND_BUFFER_FULL = range(3)

# What a row of ``syncs`` is (CUPTI's numbering, 0 = unknown).
EVENT_SYNC, STREAM_WAIT_EVENT, STREAM_SYNC, CONTEXT_SYNC = range(1, 5)

# What a row of ``ranges`` is.
PUSH_POP, START_END = range(2)

# What every operation on a GPU has.
_ON_GPU = {
    "start": "time",
    "end": "time",
    "process": "processes",
    "device": "devices",
    "stream": "streams",
    "correlation": "id",
}

# name → {column: what it holds}. "time" and "count" and "id" columns are int64, "value" is float64; every other word
# names the list that an index column points into.
SCHEMA: dict[str, dict[str, str]] = {
    "kernels": {
        **_ON_GPU,
        "name": "strings",
        "grid_blocks": "count",
        "block_threads": "count",
        "graph_node": "id",
    },
    # CUDA graphs traced whole: one row per launch, no kernels inside.
    "graphs": {
        **_ON_GPU,
        "graph": "id",
    },
    "copies": {
        **_ON_GPU,
        "bytes": "count",
        "kind": "COPY_KIND_NAMES",
        "src": "memory kind",
        "dst": "memory kind",
        "tool_kind": "id",
    },
    "memsets": {
        **_ON_GPU,
        "bytes": "count",
    },
    "syncs": {
        **_ON_GPU,
        "kind": "EVENT_SYNC, STREAM_WAIT_EVENT, STREAM_SYNC, CONTEXT_SYNC",
        # Of waits for an event: the call that recorded it last, and the stream it recorded there (-1 = not known).
        "record": "id",
        "record_stream": "streams",
    },
    "api_calls": {
        "start": "time",
        "end": "time",
        "process": "processes",
        "thread": "threads",
        "correlation": "id",
        "name": "strings",
        # CUDA error code, 0 = success, -1 = not recorded.
        "return_value": "count",
    },
    "ranges": {
        "start": "time",
        "end": "time",
        "thread": "threads",
        "text": "strings",
        "kind": "PUSH_POP or START_END",
        "message_bytes": "count",
    },
    # Operators of a framework (aten::mm, …) by host time; what they were called with is in Trace.inputs.
    "operators": {"start": "time", "end": "time", "thread": "threads", "name": "strings", "inputs": "inputs"},
    # Collectives whose kernel says what it moves: one row per kernel, ``bytes`` = payload of this rank (-1 = not known),
    # ``group`` names the process group with its ranks, ``sequence`` counts the group's collectives (-1 = not known).
    "collectives": {
        **_ON_GPU,
        "name": "strings",
        "group": "strings",
        "group_size": "count",
        "bytes": "count",
        "sequence": "id",
    },
    # Launch calls that say which kernel they launch, as ROCm's do: all that a launch recorded into a graph leaves.
    "named_launches": {"start": "time", "process": "processes", "correlation": "id", "name": "strings"},
    "os_calls": {"start": "time", "end": "time", "thread": "threads", "name": "strings"},
    # When a thread was on no CPU, from one context switch to the next: asleep or waiting for a CPU.
    "off_cpu": {"start": "time", "end": "time", "thread": "threads"},
    "overheads": {"start": "time", "end": "time", "thread": "threads", "kind": "PROFILER, MODULE_LOAD, …"},
    "memory_events": {"time": "time", "process": "processes", "device": "devices", "bytes": "count", "delta": "count"},
    "counters": {"time": "time", "device": "devices", "metric": "strings", "value": "value"},
}


def constant(value: int, count: int) -> IntArray:
    """A read-only column of one value that takes the memory of one value."""
    return np.broadcast_to(np.int64(value), (count,))


def is_constant(column: NDArray[Any]) -> bool:
    """Whether the column was made by ``constant`` or ``compact``."""
    return column.strides == (0,) and len(column) > 0


def compact(column: NDArray[Any]) -> NDArray[Any]:
    """The column, as a constant where all its values are equal: most traces have one process, thread and device."""
    if len(column) < 2 or is_constant(column) or column[0] != column[-1] or not bool((column == column[0]).all()):
        return column
    return np.broadcast_to(column[0].copy(), column.shape)


def taken(column: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
    """The rows of a column chosen by an index or boolean array. Of a constant only the length changes."""
    if is_constant(column):
        count = int(np.count_nonzero(rows)) if rows.dtype == np.bool_ else len(rows)
        return np.broadcast_to(column[0], (count,))
    chosen: NDArray[Any] = column[rows]
    return chosen


def picked(column: NDArray[Any], chosen: BoolArray) -> NDArray[Any]:
    """The chosen rows of a column; the column itself where all are chosen: do not write into it."""
    return column if chosen.all() else taken(column, chosen)


class Table:
    """Columns of equal length, as declared in SCHEMA; rows are in the reader's order until ``sorted_by`` is called."""

    def __init__(self, name: str, columns: dict[str, NDArray[Any]]) -> None:
        declared = SCHEMA[name]
        if set(columns) != set(declared):
            raise ValueError(f"{name}: columns {sorted(columns)} are not the declared {sorted(declared)}")
        lengths = {len(c) for c in columns.values()}
        if len(lengths) > 1:
            raise ValueError(f"{name}: columns of different lengths {sorted(lengths)}")
        self.name = name
        self._columns = {k: compact(c) for k, c in columns.items()}

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self._columns[column]

    @property
    def columns(self) -> list[str]:
        return list(self._columns)

    def replaced(self, **columns: NDArray[Any]) -> Table:
        """The table with these columns instead of its own."""
        return Table(self.name, self._columns | columns)

    def take(self, rows: NDArray[Any]) -> Table:
        """The rows chosen by an index or boolean array; unchanged (not copied) where a boolean one chooses all."""
        if rows.dtype == np.bool_ and rows.all():
            return self
        return Table(self.name, {k: taken(v, rows) for k, v in self._columns.items()})

    def sorted_by(self, *columns: str) -> Table:
        """Rows in ascending order of the columns, first one first; unchanged (not copied) when they already are."""
        if len(columns) == 1:
            key = self._columns[columns[0]]
            if len(key) < 2 or bool(np.all(key[1:] >= key[:-1])):
                return self
            return self.take(np.argsort(key, kind="stable"))
        return self.take(np.lexsort([self._columns[c] for c in reversed(columns)]))

    def sort_by(self, column: str) -> Table:
        """Sort the rows of this table itself by one column. A column's old memory is free for the next one."""
        key = self._columns[column]
        if (key[1:] < key[:-1]).any():
            rows = np.argsort(key, kind="stable")
            del key
            for name, values in self._columns.items():
                if not is_constant(values):
                    self._columns[name] = values[rows]
        return self


@dataclass(frozen=True)
class Device:
    """One GPU. ``id`` is the number shown to the user; unknown facts are None."""

    id: int
    name: str | None = None
    sm_count: int | None = None
    memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    # What ties it to a GPU of NVML: only there where the trace says surely which card it is.
    uuid: str | None = None
    bus_id: str | None = None


@dataclass(frozen=True)
class Process:
    pid: int | None
    name: str | None = None


@dataclass(frozen=True)
class Thread:
    """``process`` is an index into Trace.processes."""

    process: int
    tid: int | None
    name: str | None = None


@dataclass(frozen=True)
class Stream:
    """A stream is its device, process, context and number together: numbers repeat across all of them."""

    device: int
    process: int
    context: int
    number: int


@dataclass(frozen=True)
class OperatorInputs:
    """What an operator was called with, one entry per input.

    ``shapes`` holds the dimensions of a tensor (empty for a scalar or what is none), for a list of tensors a tuple of
    such tuples; ``types`` the recorder's type names (``c10::BFloat16``, ``Scalar``, ``TensorList``, …); ``scalars`` the
    text of those that are no tensors, empty where there is none; ``strides`` like shapes, empty where not recorded.
    """

    shapes: tuple[tuple[Any, ...], ...]
    types: tuple[str, ...]
    scalars: tuple[str, ...] = ()
    strides: tuple[tuple[Any, ...], ...] = ()


# The tool of Kineto traces, in TraceProvenance.
PYTORCH_PROFILER = "PyTorch profiler"
CUPTI_BACKEND = "infprof --backend cupti"


@dataclass
class TraceProvenance:
    tool: str
    tool_version: str | None
    inputs: list[str]
    capture: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trace:
    """All tables of one input. ``problems`` says what was dropped, guessed or odd while reading."""

    strings: list[str]
    devices: list[Device]
    processes: list[Process]
    threads: list[Thread]
    streams: list[Stream]
    provenance: TraceProvenance
    problems: list[Problem] = field(default_factory=list)
    kernels: Table | None = None
    graphs: Table | None = None
    copies: Table | None = None
    memsets: Table | None = None
    syncs: Table | None = None
    api_calls: Table | None = None
    ranges: Table | None = None
    operators: Table | None = None
    collectives: Table | None = None
    named_launches: Table | None = None
    os_calls: Table | None = None
    off_cpu: Table | None = None
    overheads: Table | None = None
    memory_events: Table | None = None
    counters: Table | None = None
    # Distinct argument lists of operators: column ``inputs`` of ``operators`` points here, -1 = not recorded.
    inputs: list[OperatorInputs] = field(default_factory=list)
    # Which process of a distributed job this trace is of, where the recorder wrote it down.
    rank: int | None = None
    world_size: int | None = None
    # Events of an accelerator whose work no reader understands yet.
    accelerator_events: int = 0
    # Launches (process, correlation) whose GPU operation was recorded without usable times: those left out above.
    dropped_launches: tuple[IntArray, IntArray] | None = None
    dropped_operations: int = 0
    # Diagnostics of the recording tool itself, as (severity, text).
    diagnostics: list[tuple[str, str]] = field(default_factory=list)
    # GPUs of the machine, whether used or not, and processes that the recording tool knew and that left no row.
    machine_gpus: int | None = None
    other_processes: list[Process] = field(default_factory=list)
    # Unix time of this trace's time 0, where the recording tool wrote it down.
    clock_start_unix_ns: int | None = None
    # What probes recorded in the same run, on this trace's clock, and when the capture was (start, end).
    telemetry: Telemetry | None = None
    telemetry_window: tuple[int, int] | None = None
    # What the clients of the run's own load saw, as infprof.load.LoadResult.to_dict() has it.
    load: dict[str, Any] | None = None

    def operations(self) -> Iterable[Table]:
        """The tables of things that run on a GPU, those that were collected."""
        return (t for t in (self.kernels, self.graphs, self.copies, self.memsets) if t is not None)


class StringTable:
    """Collects the strings that are in use and hands out dense indexes."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._index: dict[str, int] = {}

    def add(self, value: str) -> int:
        index = self._index.get(value)
        if index is None:
            index = self._index[value] = len(self.values)
            self.values.append(value)
        return index

    def add_all(self, values: Iterable[str]) -> IntArray:
        return np.fromiter((self.add(v) for v in values), dtype=np.int64)
