"""How PyTorch's profiler (Kineto) spells a trace: the events, times and arguments of its JSON, by version of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_QUARTER_S = 7_889_238  # Kineto's base time is a whole number of these since 1970, so that all ranks share it


@dataclass(frozen=True)
class Dialect:
    """What differs between versions of torch. The defaults are those of 2.13."""

    old_categories: Mapping[str, str] = field(default_factory=dict)
    absolute_us: bool = False  # whole microseconds since 1970 instead of nanoseconds since a base
    event_index: str = "Ev Idx"
    concrete_inputs: bool = True
    input_strides: bool = True
    annotations_on_gpu: bool = True
    external_id_is_operator: bool = True  # else the External id of calls and GPU work repeats the correlation
    metadata_first: bool = True
    trace_id: bool = True
    node_ids: bool = True


_OLDER: dict[str, Any] = {"metadata_first": False, "trace_id": False, "node_ids": False}
_MICROSECONDS: dict[str, Any] = {
    **_OLDER,
    "absolute_us": True,
    "input_strides": False,
    "annotations_on_gpu": False,
    "external_id_is_operator": False,
}
DIALECTS = {
    "1.12": Dialect(
        **_MICROSECONDS,
        concrete_inputs=False,
        event_index="Profiler Event Index",
        old_categories={
            "cpu_op": "Operator",
            "kernel": "Kernel",
            "gpu_memcpy": "Memcpy",
            "gpu_memset": "Memset",
            "cuda_runtime": "Runtime",
        },
    ),
    "2.2": Dialect(**_MICROSECONDS),
    "2.4": Dialect(**_OLDER),
    "2.13": Dialect(),
}


class Writer:
    """Writes events as Kineto does, one block of lines each; times are ns of the simulation's clock.

    ``epoch_ns``: the Unix time of the simulation's time 0. With ``absolute_us`` starts and durations are cut to whole
    microseconds, as Kineto cut them.
    """

    def __init__(self, dialect: Dialect, epoch_ns: int) -> None:
        self.dialect = dialect
        self.base_ns = epoch_ns // (_QUARTER_S * 10**9) * _QUARTER_S * 10**9
        self._shift_ns = epoch_ns - (0 if dialect.absolute_us else self.base_ns)

    def time(self, ns: int) -> str:
        return self._microseconds(ns + self._shift_ns)

    def _microseconds(self, ns: int) -> str:
        return str(ns // 1000) if self.dialect.absolute_us else f"{ns // 1000}.{ns % 1000:03}"

    def complete(
        self, cat: str, name: str, pid: int, tid: int, span: tuple[int, int], args: Mapping[str, Any] | None = None
    ) -> str:
        start, end = span
        cat = self.dialect.old_categories.get(cat, cat)
        return (
            f'  {{\n    "ph": "X", "cat": "{cat}", "name": {json.dumps(name)}, "pid": {pid}, "tid": {tid},\n'
            f'    "ts": {self.time(start)}, "dur": {self._microseconds(end - start)}{_args(args)}\n  }}'
        )

    def flow(self, start: bool, flow_id: int, pid: int, tid: int, at: int) -> str:
        ph, more = ("s", "") if start else ("f", ', "bp": "e"')
        return (
            f'  {{\n    "ph": "{ph}", "id": {flow_id}, "pid": {pid}, "tid": {tid}, "ts": {self.time(at)},\n'
            f'    "cat": "ac2g", "name": "ac2g"{more}\n  }}'
        )

    def instant(self, name: str, pid: int, tid: int, at: int, args: Mapping[str, Any]) -> str:
        return (
            f'  {{\n    "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "{name}",\n'
            f'    "pid": {pid}, "tid": {tid},\n    "ts": {self.time(at)}{_args(args)}\n  }}'
        )

    def metadata(self, name: str, pid: int, tid: int, at: int, args: Mapping[str, Any]) -> str:
        return f'  {{\n    "name": "{name}", "ph": "M", "ts": {self.time(at)}, "pid": {pid}, "tid": {tid}{_args(args)}\n  }}'

    def closing(self, span: tuple[int, int]) -> list[str]:
        """What Kineto writes last: the span of the recording, its start, and the end of its window."""
        start, end = span
        return [
            f'  {{\n    "ph": "X", "cat": "Trace", "ts": {self.time(start)}, "dur": {self._microseconds(end - start)},\n'
            '    "pid": "Spans", "tid": "PyTorch Profiler",\n    "name": "PyTorch Profiler (0)",\n'
            '    "args": {\n      "Op count": 0\n    }\n  }',
            f'  {{\n    "name": "process_sort_index", "ph": "M", "ts": {self.time(start)},\n'
            '    "pid": "Spans", "tid": 0,\n    "args": {\n      "sort_index": 536870912\n    }\n  }',
            '  {\n    "name": "Iteration Start: PyTorch Profiler", "ph": "i", "s": "g",\n'
            f'    "pid": "Traces", "tid": "Trace PyTorch Profiler", "ts": {self.time(start)}\n  }}',
            '  {\n    "name": "Record Window End", "ph": "i", "s": "g",\n'
            f'    "pid": "", "tid": "", "ts": {self.time(end + 300_000)}\n  }}',
        ]

    def document(self, head: Mapping[str, Any], events: list[str], trace_name: str) -> str:
        """The whole file; ``head`` are the top-level keys that come before the events."""
        keys = {**head, "displayTimeUnit": "ms", "baseTimeNanoseconds": self.base_ns}
        if self.dialect.absolute_us:
            keys = dict(head)
        lines = [f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in keys.items()]
        body = ",\n".join(events)
        return f'{{\n{"".join(lines)}  "traceEvents": [\n{body}\n  ],\n  "traceName": {json.dumps(trace_name)}\n}}\n'


def _args(args: Mapping[str, Any] | None) -> str:
    if not args:
        return ""
    text = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in args.items())
    return f',\n    "args": {{\n      {text}\n    }}'
