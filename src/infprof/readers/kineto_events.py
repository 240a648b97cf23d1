"""Events of a PyTorch (Kineto) trace as columns: what each category is, and how its times and arguments are written.

Categories and keys by version: torch 1.8 to 1.12 write ``Kernel``, ``Memcpy``, ``Operator``, ``Runtime``; later ones
``kernel``, ``gpu_memcpy``, ``cpu_op``, ``cuda_runtime``. Times are microseconds: whole and absolute up to torch 2.3, with
three decimals and relative to ``baseTimeNanoseconds`` from 2.4 on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from infprof.trace import BoolArray, FloatArray, IntArray, OperatorInputs, StringTable, constant

KERNEL, COPY, MEMSET, SYNC, CALL, OPERATOR, RANGE, OVERHEAD, MEMORY, IGNORED, ACCELERATOR = (
    "kernel", "copy", "memset", "sync", "call", "operator", "range", "overhead", "memory", "ignored", "accelerator",
)  # fmt: skip

CATEGORIES = {
    "kernel": KERNEL,
    "gpu_memcpy": COPY,
    "memcpy": COPY,
    "gpu_memset": MEMSET,
    "memset": MEMSET,
    "cuda_sync": SYNC,
    "xpu_sync": SYNC,
    "cuda_runtime": CALL,
    "cuda_driver": CALL,
    "runtime": CALL,
    "xpu_runtime": CALL,
    "xpu_driver": CALL,
    "cpu_op": OPERATOR,
    "operator": OPERATOR,
    "user_annotation": RANGE,
    "overhead": OVERHEAD,
    # Frames, flows, and what is derived from other events: most of the text of many traces, and not needed.
    "python_function": IGNORED,
    "gpu_user_annotation": IGNORED,
    "trace": IGNORED,
    "ac2g": IGNORED,
    "fwdbwd": IGNORED,
    "cpu_to_cuda": IGNORED,
    "cpu_instant_event": IGNORED,
    "cuda_event": IGNORED,
    "cuda_profiler_range": IGNORED,
    "collective_comm": IGNORED,
    "external_correlation": IGNORED,
    # Other makers' devices: their work is not written as kernels.
    "mtia_runtime": ACCELERATOR,
    "mtia_ccp_events": ACCELERATOR,
    "mtia_insight": ACCELERATOR,
    "mtia_counters": ACCELERATOR,
    "hpu_op": ACCELERATOR,
    "glow_runtime": ACCELERATOR,
    "privateuse1_runtime": ACCELERATOR,
    "privateuse1_driver": ACCELERATOR,
}

ON_GPU = (KERNEL, COPY, MEMSET, SYNC)
# The autograd exporter before Kineto has no categories: the process is the side.
_SIDES = {"CPU functions": OPERATOR, "CUDA functions": KERNEL}

# A double holds whole nanoseconds only below this many microseconds: beyond, fractions must be read as decimals.
EXACT_BELOW_US = 2.0**43
_LARGEST_US = 9.0e15

_NO_TEXT = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False):
    """The arguments that are read, of all categories."""

    correlation: int = -1
    device: int = -1
    stream: int = -1
    context: int = -1
    bytes: int = -1
    size: int = -1
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    graph_node: int = msgspec.field(default=-1, name="graph node id")
    record: int = msgspec.field(default=-1, name="wait_on_cuda_event_record_corr_id")
    record_stream: int = msgspec.field(default=-1, name="wait_on_stream")
    dims: msgspec.Raw = msgspec.field(default=_NO_TEXT, name="Input Dims")
    old_dims: msgspec.Raw = msgspec.field(default=_NO_TEXT, name="Input dims")
    types: msgspec.Raw = msgspec.field(default=_NO_TEXT, name="Input type")
    concrete: msgspec.Raw = msgspec.field(default=_NO_TEXT, name="Concrete Inputs")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    in_elements: int = msgspec.field(default=-1, name="In msg nelems")
    out_elements: int = msgspec.field(default=-1, name="Out msg nelems")
    group_size: int = msgspec.field(default=-1, name="Group size")
    dtype: str | None = None
    group: str | None = msgspec.field(default=None, name="Process Group Name")
    group_ranks: str | None = msgspec.field(default=None, name="Process Group Ranks")
    sequence: int = msgspec.field(default=-1, name="Seq")
    # What a launch call of ROCm launches.
    kernel: str | None = None
    allocated: int = msgspec.field(default=0, name="Bytes")
    device_type: int = msgspec.field(default=-1, name="Device Type")
    device_id: int = msgspec.field(default=-1, name="Device Id")
    # Names of processes and threads.
    name: str | None = None


class Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float | None = None
    dur: int | float | None = None
    args: Args | None = None


class ExactEvent(msgspec.Struct, gc=False):
    """The same with times as decimals: several times slower, for absolute times with a fraction."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: Decimal | None = None
    dur: Decimal | None = None
    args: Args | None = None


_NO_ARGS = Args()
_INT_FIELDS = {f.encode_name: f.name for f in msgspec.structs.fields(Args) if f.type is int}
_TEXT_FIELDS = {f.encode_name: f.name for f in msgspec.structs.fields(Args) if f.type == (str | None)}
_RAW_FIELDS = {f.encode_name: f.name for f in msgspec.structs.fields(Args) if f.type is msgspec.Raw}


class Lenient:
    """Makes an event of a JSON object whose types are not the usual ones; counts what it met."""

    def __init__(self) -> None:
        self.text_times = 0

    def __call__(self, value: dict[str, Any]) -> ExactEvent:
        args = value.get("args")
        event = ExactEvent(
            ph=_text(value.get("ph")) or "",
            cat=_text(value.get("cat")),
            name=_text(value.get("name")),
            pid=_int_or_text(value.get("pid")),
            tid=_int_or_text(value.get("tid")),
            ts=_decimal(value.get("ts")),
            dur=_decimal(value.get("dur")),
            args=_args(args) if isinstance(args, dict) else None,
        )
        self.text_times += isinstance(value.get("ts"), str) or isinstance(value.get("dur"), str)
        return event


def _args(value: dict[str, Any]) -> Args:
    out = Args()
    for key, name in _INT_FIELDS.items():
        if (number := _int(value.get(key))) is not None:
            setattr(out, name, number)
    for key, name in _TEXT_FIELDS.items():
        setattr(out, name, _text(value.get(key)))
    for key, name in _RAW_FIELDS.items():
        if key in value:
            setattr(out, name, msgspec.Raw(msgspec.json.encode(value[key])))
    for name in ("grid", "block"):
        axes = value.get(name)
        numbers = [_int(axis) for axis in axes] if isinstance(axes, list) else []
        if numbers and all(n is not None for n in numbers):
            setattr(out, name, tuple(numbers))
    return out


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None if value is None else str(value)


def _int(value: Any) -> int | None:
    number = _decimal(value)
    return int(number) if number is not None else None


def _int_or_text(value: Any) -> int | str | None:
    if isinstance(value, (int, str)) or value is None:
        return int(value) if isinstance(value, bool) else value
    return _int(value)


def _decimal(value: Any) -> Decimal | None:
    """A finite number; None for what is none. Text is taken as it was written: a double would lose nanoseconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = Decimal(repr(value) if isinstance(value, float) else value)
    except ArithmeticError:
        return None
    return number if number.is_finite() else None


def kind_of(event: Event | ExactEvent) -> str | None:
    """What a complete event is; None for a category that is not known."""
    if event.cat is None:
        return _SIDES.get(event.pid, IGNORED) if isinstance(event.pid, str) else IGNORED
    return CATEGORIES.get(event.cat) or CATEGORIES.get(event.cat.lower())


# --- columns -----------------------------------------------------------------------------------------------------------


class Times:
    """Nanoseconds of microseconds, and what the times of the file look like."""

    def __init__(self) -> None:
        self.inexact = False
        self.fractions = False

    def ns(self, values: Sequence[float | Decimal | None]) -> tuple[IntArray, BoolArray]:
        """(ns, usable) of times or lengths in µs: 0 and False for what is missing or out of range."""
        if Decimal in set(map(type, values)):
            return self._exact(values)
        micro = _floats(values)
        usable = np.abs(micro) < _LARGEST_US
        if not usable.all():
            micro = np.where(usable, micro, 0.0)
        whole = np.floor(micro)
        part = micro - whole
        if part.any():
            self.fractions = True
            self.inexact = self.inexact or bool((np.abs(micro[part != 0]) >= EXACT_BELOW_US).any())
        return whole.astype(np.int64) * 1000 + np.rint(part * 1000).astype(np.int64), usable

    def _exact(self, values: Sequence[float | Decimal | None]) -> tuple[IntArray, BoolArray]:
        numbers = [v if isinstance(v, Decimal) else _decimal(v) for v in values]
        usable = np.array([n is not None and abs(n) < _LARGEST_US for n in numbers], dtype=np.bool_)
        self.fractions = self.fractions or any(n is not None and n % 1 != 0 for n in numbers)
        # Whatever is finer than a nanosecond is cut off.
        whole = [
            int(n * 1000) if n is not None and fine else 0 for n, fine in zip(numbers, usable.tolist(), strict=True)
        ]
        return np.array(whole, dtype=np.int64), usable


def _floats(values: Sequence[float | Decimal | None]) -> FloatArray:
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError:
        return np.array([math.inf if isinstance(v, int) and abs(v) > 2**1000 else v for v in values], dtype=np.float64)


def ints(values: Sequence[int]) -> IntArray:
    """As int64; unsigned 64-bit numbers keep their bits."""
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        return np.array([((v + 2**63) & (2**64 - 1)) - 2**63 for v in values], dtype=np.int64)


class Codes:
    """Dense numbers for hashable values, in the order of their first appearance."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._index: dict[Any, int] = {}

    def of(self, values: Sequence[Any]) -> IntArray:
        index = self._index
        for value in dict.fromkeys(values):
            if value not in index:
                index[value] = len(self.values)
                self.values.append(value)
        return np.fromiter((index[v] for v in values), dtype=np.int64, count=len(values))


def text_codes(strings: StringTable, values: Sequence[str]) -> IntArray:
    index = {value: strings.add(value) for value in dict.fromkeys(values)}
    return np.fromiter((index[v] for v in values), dtype=np.int64, count=len(values))


class Columns:
    """The rows of one kind, gathered piece by piece."""

    def __init__(self) -> None:
        self._parts: dict[str, list[NDArray[Any]]] = {}
        self.count = 0

    def add(self, count: int, columns: dict[str, NDArray[Any]]) -> None:
        self.count += count
        for name, column in columns.items():
            self._parts.setdefault(name, []).append(column)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The whole column; its parts are joined once."""
        parts = self._parts.get(name, [])
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        return parts[0] if parts else np.empty(0, dtype=np.bool_ if name == "usable" else np.int64)


# Per kind the further columns of its rows, from the arguments of the events.
_Extra = Callable[[Sequence[Args]], dict[str, NDArray[Any]]]


def _product(axes: Sequence[tuple[int, ...]]) -> IntArray:
    return ints([math.prod(a) if a else -1 for a in axes])


def _kernel_extra(args: Sequence[Args]) -> dict[str, NDArray[Any]]:
    return {
        "grid": _product([a.grid for a in args]),
        "block": _product([a.block for a in args]),
        "graph_node": ints([a.graph_node for a in args]),
    }


def _size_extra(args: Sequence[Args]) -> dict[str, NDArray[Any]]:
    return {"bytes": ints([a.bytes if a.bytes >= 0 else a.size for a in args])}


def _sync_extra(args: Sequence[Args]) -> dict[str, NDArray[Any]]:
    return {"record": ints([a.record for a in args]), "record_stream": ints([a.record_stream for a in args])}


_EXTRA: dict[str, _Extra] = {KERNEL: _kernel_extra, COPY: _size_extra, MEMSET: _size_extra, SYNC: _sync_extra}

# What other makers' profilers call the process that stands for their device.
_ACCELERATOR = re.compile(r"\b(?:ascend|npu|tpu|hpu|mlu|ipu|neuron)\b", re.IGNORECASE)
_LABELLED_PID = re.compile(r"^\[(.+?)\]\s*(-?\d+)?")


class EventColumns:
    """All rows of a file that are read, by kind. ``places`` numbers rank labels, ``threads`` (label, thread) pairs."""

    def __init__(self) -> None:
        self.strings = StringTable()
        self.times = Times()
        self.rows: dict[str, Columns] = {kind: Columns() for kind in (*ON_GPU, CALL, OPERATOR, RANGE, OVERHEAD, MEMORY)}
        self.collectives = Columns()
        self.labels = Codes()
        self.host_places = Codes()  # (label, pid, tid)
        self.inputs = Codes()  # raw text of an operator's arguments
        self.accelerator_events = 0
        # Events that say neither what they are nor, by their process, whose: how many of each process.
        self.uncategorised: dict[int | str | None, int] = {}
        self.unknown: dict[str, int] = {}
        self.process_names: dict[int | str | None, str] = {}
        self.thread_names: dict[tuple[int | str | None, int | str | None], str] = {}
        self.categories: set[str] = set()
        self.total = 0
        self.phased = False

    def add(self, events: Iterable[Event] | Iterable[ExactEvent]) -> None:
        """Sort a piece into its kinds and append their columns."""
        buckets: dict[str | None, list[Any]] = {}
        by_category: dict[str | None, list[Any] | None] = {}
        memory: list[Any] = []
        for event in events:
            self.total += 1
            if event.ph == "X":
                category = event.cat
                if category in by_category and category is not None:
                    bucket = by_category[category]
                    if bucket is not None:
                        bucket.append(event)
                    continue
                kind = kind_of(event)
                self._note(event, kind)
                kept = kind in self.rows
                chosen = buckets.setdefault(kind, []) if kept else None
                # Without a category each event speaks for itself; unknown ones are counted one by one.
                if category is not None and kind is not None and kind != ACCELERATOR:
                    by_category[category] = chosen
                if chosen is not None:
                    chosen.append(event)
            elif event.ph == "i" and event.name == "[memory]":
                memory.append(event)
            elif event.ph == "M":
                self._name(event)
            elif event.ph:
                self.phased = True
        self.categories.update(category for category in by_category if category is not None)
        for kind, bucket in buckets.items():
            assert kind is not None
            self._append(kind, bucket)
        if memory:
            self._append_memory(memory)

    def _note(self, event: Any, kind: str | None) -> None:
        self.phased = True
        if event.cat is None:
            self.uncategorised[event.pid] = self.uncategorised.get(event.pid, 0) + 1
        on_device = False
        if kind is None:
            self.unknown[event.cat] = self.unknown.get(event.cat, 0) + 1
            args = event.args or _NO_ARGS
            on_device = args.device >= 0 or args.stream >= 0
        self.accelerator_events += kind == ACCELERATOR or on_device

    def any_known(self) -> bool:
        """Whether any event is one that PyTorch's profiler writes."""
        return bool(self.categories or self.accelerator_events or any(rows.count for rows in self.rows.values()))

    def on_accelerators(self) -> int:
        """How many events ran on a device that is no GPU, by their category or the name of their process."""
        named = (n for pid, n in self.uncategorised.items() if _ACCELERATOR.search(self.process_names.get(pid, "")))
        return self.accelerator_events + sum(named)

    def _name(self, event: Any) -> None:
        self.phased = True
        text = event.args.name if event.args is not None else None
        if text and event.name == "process_name":
            self.process_names[event.pid] = text
        elif text and event.name == "thread_name":
            self.thread_names[event.pid, event.tid] = text

    def _append(self, kind: str, events: list[Any]) -> None:
        args = [event.args or _NO_ARGS for event in events]
        start, usable = self.times.ns([event.ts for event in events])
        length, measured = self.times.ns([event.dur for event in events])
        columns: dict[str, NDArray[Any]] = {
            "start": start,
            "length": length,
            "usable": usable & measured,
            "name": text_codes(self.strings, [event.name or "[unnamed]" for event in events]),
        }
        if kind in ON_GPU or kind == CALL:
            correlation = ints([a.correlation for a in args])
            # Ids of 32 bits that were written as signed ones.
            columns["correlation"] = np.where(correlation < -1, correlation & 0xFFFFFFFF, correlation)
        if kind in ON_GPU:
            columns.update(self._on_gpu(events, args))
        else:
            columns.update(self._on_host(events))
        if kind in _EXTRA:
            columns.update(_EXTRA[kind](args))
        if kind == OPERATOR:
            columns["inputs"] = self._inputs(args)
        if kind == CALL:
            columns["kernel"] = self._launched(args)
        if kind == KERNEL:
            self._append_collectives(args)
        self.rows[kind].add(len(events), columns)

    def _on_gpu(self, events: list[Any], args: list[Args]) -> dict[str, NDArray[Any]]:
        pids = [event.pid for event in events]
        # A device and stream not among the arguments stand in pid and tid.
        device = [a.device if a.device >= 0 else _number(pid) for a, pid in zip(args, pids, strict=True)]
        stream = [a.stream if a.stream >= 0 else _number(e.tid) for a, e in zip(args, events, strict=True)]
        return {
            "label": self.labels.of([_label(pid) for pid in pids]),
            "device": ints(device),
            "stream": ints(stream),
            "context": ints([a.context for a in args]),
        }

    def _on_host(self, events: list[Any]) -> dict[str, NDArray[Any]]:
        pairs = [(event.pid, event.tid) for event in events]
        for pid in dict.fromkeys(pid for pid, _ in pairs):
            self.labels.of([_label(pid)])
        return {"place": self.host_places.of(pairs)}

    def _inputs(self, args: list[Args]) -> IntArray:
        keys = [
            (bytes(a.dims) or bytes(a.old_dims), bytes(a.types), bytes(a.concrete)) if a.dims or a.old_dims else None
            for a in args
        ]
        return self.inputs.of(keys)

    def _launched(self, args: list[Args]) -> IntArray:
        """The kernel that each call says it launches, -1 where it says none."""
        named = [i for i, a in enumerate(args) if a.kernel]
        out = constant(-1, len(args))
        if named:
            out = out.copy()
            out[named] = text_codes(self.strings, [args[i].kernel or "" for i in named])
        return out

    def _append_collectives(self, args: list[Args]) -> None:
        first = self.rows[KERNEL].count
        rows = [i for i, a in enumerate(args) if a.collective is not None]
        if not rows:
            return
        named = [args[i] for i in rows]
        # The payload is the larger side: what a gather gives, what a scatter takes.
        elements = [max(a.in_elements, a.out_elements) for a in named]
        sizes = [_ELEMENT_BYTES.get(a.dtype or "", -1) for a in named]
        self.collectives.add(
            len(rows),
            {
                "kernel": ints(rows) + first,
                "name": text_codes(self.strings, [a.collective or "" for a in named]),
                "group": text_codes(self.strings, [f"{a.group or ''} {a.group_ranks or ''}".strip() for a in named]),
                "group_size": ints([a.group_size for a in named]),
                "bytes": ints([n * s if n >= 0 and s > 0 else -1 for n, s in zip(elements, sizes, strict=True)]),
                "sequence": ints([a.sequence for a in named]),
            },
        )

    def _append_memory(self, events: list[Any]) -> None:
        start, usable = self.times.ns([event.ts for event in events])
        args = [event.args or _NO_ARGS for event in events]
        # 1 = CUDA, 6 = HIP: memory of the host is not the device's.
        on_gpu = np.array([a.device_type in (1, 6) for a in args], dtype=np.bool_)
        self.rows[MEMORY].add(
            len(events),
            {
                "start": start,
                "usable": usable & on_gpu,
                "label": self.labels.of([_label(event.pid) for event in events]),
                "device": ints([a.device_id for a in args]),
                "delta": ints([a.allocated for a in args]),
            },
        )


_ELEMENT_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Int": 4, "Long": 8, "Half": 2, "BFloat16": 2, "Float": 4, "Double": 8,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip


def _label(pid: int | str | None) -> str | None:
    """The rank label of a merged trace (``[TP00-DP01] 1234``), None elsewhere."""
    match = _LABELLED_PID.match(pid) if isinstance(pid, str) else None
    return match[1] if match is not None else None


def label_and_pid(pid: int | str | None) -> tuple[str | None, int | None]:
    """Rank label and process id of an event's pid."""
    if isinstance(pid, str):
        match = _LABELLED_PID.match(pid)
        if match is not None:
            return match[1], int(match[2]) if match[2] else None
        return None, int(pid) if pid.isdigit() else None
    return None, pid


def _number(value: int | str | None) -> int:
    """The last number of what may be text (``stream 7``); 0 where there is none."""
    if isinstance(value, int):
        return value
    found = re.findall(r"\d+", value.rpartition("]")[2]) if isinstance(value, str) else []
    return int(found[-1]) if found else 0


def thread_number(tid: int | str | None) -> int | None:
    if isinstance(tid, str):
        return int(tid) if re.fullmatch(r"-?\d+", tid) else None
    return tid


def parsed_inputs(key: tuple[bytes, bytes, bytes]) -> OperatorInputs | None:
    """An operator's arguments of their JSON text; None where it is not what it should be."""
    try:
        dims, types, concrete = (msgspec.json.decode(text) if text else [] for text in key)
        if not all(isinstance(part, list) for part in (dims, types, concrete)):
            return None
        return OperatorInputs(
            tuple(_shape(d) for d in dims),
            tuple(str(x) for x in types),
            tuple("" if c is None else str(c) for c in concrete),
        )
    except (msgspec.DecodeError, RecursionError):
        return None


def _shape(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(_shape(v) if isinstance(v, list) else v if isinstance(v, int) else 0 for v in value)
