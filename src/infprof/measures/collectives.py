"""The collectives of one device as compact columns: what comparing ranks needs of a trace, and no more."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.kernel_class import short_name
from infprof.measures.operations import Prepared
from infprof.measures.slices import DeviceTime
from infprof.trace import BoolArray, IntArray, StringTable

# What a collective's name says that it does, in the spellings of NCCL's kernels, of c10d and of custom kernels.
_OPERATIONS = tuple(
    (operation, re.compile(pattern, re.IGNORECASE))
    for operation, pattern in (
        ("reduce-scatter", r"reduce_?scatter"),
        ("all-reduce", r"all_?reduce|cross_device_reduce|quick_?reduce|(?:one|two)_?shot|barrier"),
        ("all-gather", r"all_?gather"),
        ("all-to-all", r"all_?to_?all"),
        ("send-recv", r"send_?recv|(?<![a-z])i?(?:send|recv)(?![a-z])|p2p"),
        ("broadcast", r"broadcast"),
        ("reduce", r"(?<![a-z])reduce(?![a-z])|_reduce_"),
        ("gather", r"(?<![a-z_])gather"),
        ("scatter", r"(?<![a-z_])scatter"),
    )
)
# Of these no rank is done before the last one has brought its part: all leave together.
LEFT_TOGETHER = frozenset({"all-reduce", "all-gather", "reduce-scatter"})


@dataclass(frozen=True)
class DeviceCollectives:
    """The collectives of one device in order of their start; all columns have one length.

    ``start`` and ``end`` are ns on the trace's own clock; ``operation`` and ``group`` index ``names`` (group -1: not
    known); ``sequence`` counts the collectives of the group, -1 where not recorded; ``bytes`` is the payload of this
    rank (the larger of what it gives and takes), -1 where not recorded. ``compute_before`` and ``idle_before`` say how long, since the collective before it,
    the device computed and how long nothing ran on it, ns. ``in_window`` marks those that begin in the window.
    """

    device: int
    names: list[str]
    start: IntArray
    end: IntArray
    operation: IntArray
    group: IntArray
    group_size: IntArray
    sequence: IntArray
    bytes: IntArray
    compute_before: IntArray
    idle_before: IntArray
    in_window: BoolArray

    def __len__(self) -> int:
        return len(self.start)

    @property
    def has_sequences(self) -> bool:
        """Whether every collective says which of which process group it is."""
        return len(self) > 0 and bool(((self.group >= 0) & (self.sequence >= 0)).all())


@lru_cache(maxsize=4096)
def operation_of(name: str) -> str:
    """What a collective's kernel or call does (``all-reduce``, …); its short name where that is not known."""
    for operation, pattern in _OPERATIONS:
        if pattern.search(name):
            return operation
    return short_name(name)


def device_collectives(prepared: Prepared, time: DeviceTime) -> DeviceCollectives:
    """The collectives of the device whose time this is, over the whole trace.

    From the kernels that say what they move where those are most of the device's communication, else from all of its
    communication kernels by name: custom all-reduce kernels never say it.
    """
    described, named = _described(prepared, time.device), _by_name(prepared, time.device)
    most = described is not None and 2 * len(described[0]) >= len(named[0])
    start, end, name, group, size, sequence, moved = described if described is not None and most else named
    order = np.lexsort((end, start))
    start, end = start[order], end[order]
    strings = StringTable()
    texts = prepared.trace.strings
    operation = _renamed(name[order], lambda index: strings.add(operation_of(texts[index])))
    group = _renamed(group[order], lambda index: strings.add(texts[index]))
    # Several may run at once: what lies before a collective begins where all before it have ended.
    ended = np.maximum.accumulate(end) if len(end) else end
    since = np.concatenate([[time.scope.starts[0]], ended[:-1]]) if len(end) else end
    since = np.minimum(np.maximum(since, time.scope.starts[0]), start)
    busy = iv.merge(time.compute, time.comm, *time.exposed_copy.values())
    idle = iv.covered(time.scope, since, start) - iv.covered(busy, since, start)
    return DeviceCollectives(
        device=prepared.trace.devices[time.device].id,
        names=strings.values,
        start=start,
        end=end,
        operation=operation,
        group=group,
        group_size=size[order],
        sequence=sequence[order],
        bytes=moved[order],
        compute_before=iv.covered(time.compute, since, start),
        idle_before=idle,
        in_window=iv.contains(time.scope, start),
    )


_Columns = tuple[IntArray, IntArray, IntArray, IntArray, IntArray, IntArray, IntArray]


def _described(prepared: Prepared, device: int) -> _Columns | None:
    table = prepared.trace.collectives
    if table is None:
        return None
    rows = np.flatnonzero((table["device"] == device) & (table["end"] > table["start"]))
    if not len(rows):
        return None
    start, end, name, group, size, sequence, moved = (
        np.asarray(table[column][rows], dtype=np.int64)
        for column in ("start", "end", "name", "group", "group_size", "sequence", "bytes")
    )
    return start, end, name, group, size, sequence, moved


def _by_name(prepared: Prepared, device: int) -> _Columns:
    ops, kernels = prepared.operations, prepared.trace.kernels
    rows = np.flatnonzero((ops.device == device) & (ops.kind == op.KERNEL) & ops.is_comm)
    rows = rows[ops.end[rows] > ops.start[rows]]
    name = np.asarray(kernels["name"][ops.row[rows]], dtype=np.int64) if kernels is not None else rows
    unknown = np.full(len(rows), -1, dtype=np.int64)
    start, end = (np.asarray(column[rows], dtype=np.int64) for column in (ops.start, ops.end))
    return start, end, name, unknown, unknown, unknown, unknown


def _renamed(values: IntArray, new: Callable[[int], int]) -> IntArray:
    """Each distinct value through ``new``; -1 stays."""
    distinct, where = np.unique(values, return_inverse=True)
    table = np.array([new(value) if value >= 0 else -1 for value in distinct.tolist()], dtype=np.int64)
    return table[where] if len(table) else values
