"""From settings to the factors of a replay: which calls and operations each of them is about."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import numpy as np

from infprof.errors import UsageError
from infprof.measures import operations as op
from infprof.measures.kernel_class import short_name
from infprof.replay.engine import Costs
from infprof.replay.recording import CALL_COSTS, SYNC, Recording
from infprof.replay.setting import Setting
from infprof.trace import COPY_KIND_NAMES, BoolArray


def apply(settings: Iterable[Setting], recording: Recording) -> Costs:
    """The costs of a replay with all settings; factors on the same time are multiplied.

    Raises UsageError for a kernel or a kind of copy that the trace does not have.
    """
    costs = Costs()
    for setting in settings:
        if setting.factor is not None:
            _APPLY[setting.cost](costs, recording, setting, setting.factor)
    return costs


def _call(number: int) -> Callable[[Costs, Recording, Setting, float], None]:
    def change(costs: Costs, recording: Recording, setting: Setting, factor: float) -> None:
        costs.scale_calls(recording.calls.cost == number, factor)
        if number == SYNC and factor == 0:
            costs.waits = False

    return change


def _of_host(name: str) -> Callable[[Costs, Recording, Setting, float], None]:
    def change(costs: Costs, recording: Recording, setting: Setting, factor: float) -> None:
        setattr(costs, name, getattr(costs, name) * factor)

    return change


def _operations(
    chosen: Callable[[Recording, Setting], BoolArray],
) -> Callable[[Costs, Recording, Setting, float], None]:
    def change(costs: Costs, recording: Recording, setting: Setting, factor: float) -> None:
        costs.scale_operations(chosen(recording, setting), factor)

    return change


def _copies(recording: Recording, setting: Setting) -> BoolArray:
    ops, table = recording.prepared.operations, recording.prepared.trace.copies
    row = recording.chains.row
    mine: BoolArray = ops.kind[row] == op.COPY
    if setting.which is not None:
        at = np.flatnonzero(mine)
        wanted = COPY_KIND_NAMES.index(setting.which.lower())
        mine[at] = table["kind"][ops.row[row[at]]] == wanted if table is not None else False
        if not mine.any():
            raise UsageError(f"--set {setting.text}: there are no copies of this kind in the trace.")
    return mine


def _memsets(recording: Recording, setting: Setting) -> BoolArray:
    return np.asarray(recording.prepared.operations.kind[recording.chains.row] == op.MEMSET)


def _comm(recording: Recording, setting: Setting) -> BoolArray:
    return np.asarray(recording.prepared.operations.is_comm[recording.chains.row])


def _kernels(recording: Recording, setting: Setting) -> BoolArray:
    """Kernels of a class, or by name: all that hold it or match it with * and ?. Communication counts by name only."""
    prepared, row = recording.prepared, recording.chains.row
    ops = prepared.operations
    kernel: BoolArray = ops.kind[row] == op.KERNEL
    if setting.which is None:
        return np.asarray((kernel & ~ops.is_comm[row]) | (ops.kind[row] == op.GRAPH))
    strings, names = prepared.trace.strings, _named(recording, setting.which)
    if not names:
        known = sorted(
            {c.kind for c in prepared.kernel_classes.values()}
            | {short_name(strings[i]) for i in prepared.kernel_classes}
        )
        near = difflib.get_close_matches(setting.which, known, n=1)
        classes = ", ".join(sorted({c.kind for c in prepared.kernel_classes.values()}))
        hint = f"Did you mean {near[0]}?" if near else f"Classes in it: {classes or 'none'}."
        raise UsageError(f"--set {setting.text}: no kernel of the trace has this class or name. {hint}")
    table = prepared.trace.kernels
    chosen = np.zeros(len(row), dtype=np.bool_)
    at = np.flatnonzero(kernel)
    if table is not None:
        chosen[at] = np.isin(table["name"][ops.row[row[at]]], names)
    return chosen


def _named(recording: Recording, which: str) -> list[int]:
    prepared = recording.prepared
    strings = prepared.trace.strings
    of_class = [i for i, c in prepared.kernel_classes.items() if c.kind == which.lower() and not prepared.comm_names[i]]
    if of_class:
        return of_class
    wanted = which.lower()
    pattern = wanted if any(c in wanted for c in "*?[") else f"*{wanted}*"
    return [i for i in prepared.kernel_classes if fnmatchcase(strings[i].lower(), pattern)]


_APPLY: dict[str, Callable[[Costs, Recording, Setting, float], None]] = {
    **{name: _call(number) for number, name in enumerate(CALL_COSTS)},
    "host": _of_host("host"),
    "waits": _of_host("waited"),
    "gaps": _of_host("lag"),
    "copies": _operations(_copies),
    "memsets": _operations(_memsets),
    "comm": _operations(_comm),
    "kernel": _operations(_kernels),
}
