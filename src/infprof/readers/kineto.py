"""PyTorch profiler (Kineto) traces: ``.json`` and ``.json.gz`` of torch 1.8 to 2.14, CUDA, ROCm and CPU only.

Told by content: a JSON object with ``traceEvents``, or a bare list of trace events as the autograd exporter wrote them.
Python frames are left out: they are most of the text of a trace with stacks, and no measure needs them.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infprof import trace as t
from infprof.distinct import distinct_rows, mapped
from infprof.errors import InfprofError
from infprof.readers import kineto_events as k
from infprof.readers.gzipped import unpacked_text
from infprof.readers.json_events import EventStream, TextReport
from infprof.readers.names import overhead_kinds, plain_call_name
from infprof.readers.plausible import DAY_NS
from infprof.results import Problem
from infprof.trace import BoolArray, IntArray

_NAMES = {k.KERNEL: "kernels", k.COPY: "copies", k.MEMSET: "memsets", k.SYNC: "waits on the GPU"}
_HOST_NAMES = {k.CALL: "CUDA calls", k.OPERATOR: "operators", k.RANGE: "ranges", k.OVERHEAD: "overhead records"}

_COPY_KINDS = {"HtoD": t.H2D, "DtoH": t.D2H, "DtoD": t.D2D, "PtoP": t.P2P, "HtoH": t.H2H}
_MEMORY_KINDS = {
    "Pageable": t.PAGEABLE,
    "Pinned": t.PINNED,
    "Device": t.DEVICE,
    "Array": t.ARRAY,
    "Managed": t.MANAGED,
}
_COPY_NAME = re.compile(r"Memcpy (\w+)(?: \((\w+) -> (\w+)\))?")
_SYNC_KINDS = (
    ("wait event", t.STREAM_WAIT_EVENT),
    ("event sync", t.EVENT_SYNC),
    ("stream sync", t.STREAM_SYNC),
    ("context sync", t.CONTEXT_SYNC),
    ("device sync", t.CONTEXT_SYNC),
)
# Launches whose grid is recorded in threads instead of blocks.
_GRID_IN_THREADS = re.compile(r"^hipExt")
# What PyTorch's profiler writes beside the events, and no other tool.
_PYTORCH_KEYS = ("schemaVersion", "deviceProperties", "distributedInfo", "baseTimeNanoseconds")
_CAPTURE_KEYS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
_VERSION_KEYS = (
    "cuda_runtime_version",
    "cuda_driver_version",
    "cupti_version",
    "hip_runtime_version",
    "hip_driver_version",
    "roctracer_version",
    "vllm_version",
)


class KinetoReader:
    """Reads a PyTorch profiler trace."""

    name = "PyTorch profiler trace"

    def sniff(self, path: Path, head: bytes) -> bool:
        return unpacked_text(head, 4096)[:1] in (b"{", b"[")

    def read(self, path: Path) -> t.Trace:
        for events_type in (list[k.Event], list[k.ExactEvent]):
            lenient = k.Lenient()
            stream: EventStream[Any] = EventStream(path, events_type, lenient)
            columns = k.EventColumns()
            for piece in stream:
                columns.add(piece)
                if columns.times.inexact and events_type == list[k.Event]:
                    # Absolute times with a fraction: once more, as decimals.
                    break
            else:
                break
        if not stream.found_events or not columns.total:
            raise InfprofError(_no_trace(path, stream))
        refusal = _refusal(path, columns, stream)
        if refusal is not None:
            raise InfprofError(refusal)
        return _Builder(path, columns, stream.top, stream.report, lenient.text_times).build()


def _no_trace(path: Path, stream: EventStream[Any]) -> str:
    if stream.report.dropped:
        return f"{path} is no PyTorch trace: its events cannot be read from byte {stream.report.dropped[0]} on."
    if stream.report.cut_at is not None:
        return f"{path} is JSON that ends in the middle (at byte {stream.report.cut_at}), before any trace event."
    if stream.found_events:
        return f"{path} holds no trace events: the profiler recorded nothing."
    return f"{path} is JSON without traceEvents: neither a PyTorch trace nor a diagnosis of infprof."


def _refusal(path: Path, columns: k.EventColumns, stream: EventStream[Any]) -> str | None:
    """Why what could be read of a file is not to be judged; None where it is a PyTorch trace."""
    lost = stream.report.dropped
    if len(lost) > columns.total:
        return (
            f"{path} is damaged: {len(lost):,} of its events are no JSON (the first at byte {lost[0]:,}) and only "
            f"{columns.total:,} can be read. Copy or export the trace again."
        )
    if columns.any_known() or any(key in stream.top for key in _PYTORCH_KEYS):
        return None
    if not columns.phased:
        return f"{path} is JSON, but holds no trace events: neither a PyTorch trace nor a diagnosis of infprof."
    return (
        f"{path} is a trace of another tool than PyTorch's profiler: none of its {columns.total:,} events has a category "
        "that this one writes, so nobody knows which of them ran on a GPU. Record with torch.profiler or nsys."
    )


class _Builder:
    """One trace under construction: numbers to dense indexes, times to one origin, defects to problems."""

    def __init__(
        self, path: Path, columns: k.EventColumns, top: dict[str, Any], report: TextReport, text_times: int
    ) -> None:
        self.path = path
        self.columns = columns
        self.top = top
        self.report = report
        self.strings = columns.strings
        self.problems: list[Problem] = []
        self.dropped: list[tuple[IntArray, IntArray]] = []
        self.dropped_count = 0
        self.device_index: dict[tuple[int, int], int] = {}
        self.devices: list[t.Device] = []
        self.streams: list[t.Stream] = []
        self.stream_index: dict[tuple[int, int, int, int], int] = {}
        self.text_times = text_times

    def build(self) -> t.Trace:
        self._note_text()
        self._host_threads()
        self.centre_ns = self._centre()
        tables = {
            "kernels": self._kernels(),
            "copies": self._copies(),
            "memsets": self._gpu_table(k.MEMSET, "memsets"),
            "syncs": self._syncs(),
            "api_calls": self._api_calls(),
            "named_launches": self._named_launches(),
            "ranges": self._ranges(),
            "operators": self._operators(),
            "overheads": self._overheads(),
            "memory_events": self._memory_events(),
        }
        tables["collectives"] = self._collectives()
        origin = self._shift(tables)
        self._note_devices()
        info = self.top.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        return t.Trace(
            strings=self.strings.values,
            devices=self.devices,
            processes=self.processes,
            threads=self.threads,
            streams=self.streams,
            provenance=self._provenance(),
            problems=self.problems,
            inputs=[inputs or t.OperatorInputs((), ()) for inputs in self._inputs],
            rank=_whole(info.get("rank")) if self.label_count == 1 else None,
            world_size=_whole(info.get("world_size")),
            accelerator_events=self.columns.on_accelerators(),
            dropped_launches=(
                (np.concatenate([p for p, _ in self.dropped]), np.concatenate([c for _, c in self.dropped]))
                if self.dropped
                else None
            ),
            dropped_operations=self.dropped_count,
            machine_gpus=len(self._properties()) or None,
            clock_start_unix_ns=self._unix(origin),
            **tables,  # type: ignore[arg-type]
        )

    # --- time ------------------------------------------------------------------------------------------------------

    def _centre(self) -> int:
        """About when the capture was, ns: the median of what ran on the GPU, else of the host's events."""
        for kinds in ((k.KERNEL, k.COPY, k.MEMSET), (k.CALL, k.OPERATOR, k.RANGE)):
            starts = [self.columns.rows[kind]["start"][self.columns.rows[kind]["usable"]] for kind in kinds]
            joined = np.concatenate(starts)
            if len(joined):
                return int(np.median(joined))
        return 0

    def _base(self) -> int | None:
        base = self.top.get("baseTimeNanoseconds")
        return _whole(base)

    def _unix(self, origin: int) -> int | None:
        """Unix time of the trace's time 0, where times are absolute or the file has their base."""
        base = self._base()
        if base is not None:
            return base + origin
        # Absolute microseconds of 2001 and later.
        return origin if origin > 10**18 else None

    def _shift(self, tables: dict[str, t.Table | None]) -> int:
        """Move all times so that the first one is 0; returns what was taken off."""
        timed = [
            (name, table, [c for c in ("start", "end", "time") if c in t.SCHEMA[name]])
            for name, table in tables.items()
            if table is not None and len(table)
        ]
        origin = min((int(table[columns[0]].min()) for _, table, columns in timed), default=0)
        for name, table, columns in timed:
            shifted = {c: table[c] - origin if c in columns else table[c] for c in t.SCHEMA[name]}
            tables[name] = t.Table(name, shifted)
        return origin

    def _usable(self, kind: str, words: str, labels: IntArray | None = None) -> BoolArray:
        """Rows with a usable interval; the others are counted by kind, reported, and for GPU work remembered.

        Events of zero length are kept: they are shorter than the clock's step.
        """
        rows = self.columns.rows[kind]
        start, length = rows["start"], rows["length"]
        timed = rows["usable"]
        negative = timed & (length < 0)
        absurd = timed & ~negative & ((np.abs(start - self.centre_ns) > DAY_NS) | (length > DAY_NS))
        usable: BoolArray = timed & ~negative & ~absurd
        kinds = (
            ("untimed", "without a usable start or duration", ~timed),
            ("negative", "that end before they start", negative),
            ("absurd", "with an impossible time or duration", absurd),
        )
        for code, what, bad in kinds:
            count = int(bad.sum())
            if count:
                text = f"{count} {words} {what} were left out."
                self.problems.append(Problem(f"{code}-{words.replace(' ', '-')}", text, count))
        if labels is not None and not usable.all():
            gone = ~usable
            self.dropped_count += int(gone.sum())
            known = gone & (rows["correlation"] >= 0)
            self.dropped.append((labels[known], rows["correlation"][known]))
        return usable

    # --- processes, threads, devices -------------------------------------------------------------------------------

    def _host_threads(self) -> None:
        """Processes and threads. A trace holds one process; a merged one holds one for each rank label."""
        labels = self.columns.labels.values or [None]
        self.label_count = len(labels)
        index = {label: i for i, label in enumerate(labels)}
        places = [(*k.label_and_pid(pid), pid, tid) for pid, tid in self.columns.host_places.values]
        weight: dict[tuple[int, int], int] = {}
        self.thread_of_place = np.full(max(len(places), 1), -1, dtype=np.int64)
        self.threads: list[t.Thread] = []
        known: dict[tuple[int, int | str | None], int] = {}
        calls = np.bincount(self.columns.rows[k.CALL]["place"], minlength=max(len(places), 1))
        for number, (label, pid, raw_pid, tid) in enumerate(places):
            process = index.get(label, 0)
            if pid is not None and pid >= 0:
                weight[process, pid] = weight.get((process, pid), 0) + 1 + int(calls[number])
            key = (process, tid)
            if key not in known:
                known[key] = len(self.threads)
                name = self.columns.thread_names.get((raw_pid, tid))
                self.threads.append(t.Thread(process, k.thread_number(tid), name))
            self.thread_of_place[number] = known[key]
        self.processes = []
        for process in range(len(labels)):
            pids = {pid: n for (p, pid), n in weight.items() if p == process}
            pid = max(pids, key=lambda p: (pids[p], -p)) if pids else None
            self.processes.append(t.Process(pid, self.columns.process_names.get(pid)))

    def _thread(self, kind: str, rows: BoolArray) -> IntArray:
        threads: IntArray = self.thread_of_place[self.columns.rows[kind]["place"][rows]]
        return threads

    def _properties(self) -> list[dict[str, Any]]:
        found = self.top.get("deviceProperties")
        return [p for p in found if isinstance(p, dict)] if isinstance(found, list) else []

    def _place(self, kind: str) -> tuple[IntArray, IntArray, IntArray]:
        """Dense (process, device, stream) of all rows of a kind on the GPU."""
        rows = self.columns.rows[kind]
        process = rows["label"]
        places, which = distinct_rows(process, rows["device"], rows["context"], rows["stream"])
        devices, streams = [], []
        for label, device, context, number in places:
            found = self.device_index.setdefault((label, device), len(self.device_index))
            key = (found, label, context, number)
            devices.append(found)
            streams.append(self.stream_index.setdefault(key, len(self.stream_index)))
        if not len(which):
            return process, which, which
        return process, np.array(devices, dtype=np.int64)[which], np.array(streams, dtype=np.int64)[which]

    def _note_devices(self) -> None:
        """Describe the devices that were used.

        Numbers are those of CUDA_VISIBLE_DEVICES; on ROCm they are HSA nodes, which count the CPUs first.
        """
        properties = self._properties()
        by_id = {_whole(p.get("id")): p for p in properties}
        used = sorted({number for _, number in self.device_index})
        if not set(used) <= set(by_id):
            alike = len({str(p.get("name")) + str(p.get("totalGlobalMem")) for p in properties}) == 1
            in_order = properties if len(properties) == len(used) else properties[:1] * len(used) if alike else []
            by_id = dict(zip(used, in_order, strict=False))
        several = len({label for label, _ in self.device_index}) > 1
        repeated = several and len(used) < len(self.device_index)
        for (_, number), index in self.device_index.items():
            facts = by_id.get(number, {})
            major, minor = _whole(facts.get("computeMajor")), _whole(facts.get("computeMinor"))
            self.devices.append(
                t.Device(
                    index if repeated else number,
                    str(facts.get("name") or "") or None,
                    _whole(facts.get("numSms")) or None,
                    _whole(facts.get("totalGlobalMem")) or None,
                    (major, minor or 0) if major is not None else None,
                )
            )
        self.streams += [t.Stream(*key) for key in self.stream_index]

    # --- GPU tables ------------------------------------------------------------------------------------------------

    def _any_gpu(self) -> bool:
        """Whether GPU activity was asked for: then a table without rows is empty, not missing."""
        return any(self.columns.rows[kind].count for kind in (k.KERNEL, k.COPY, k.MEMSET, k.CALL))

    def _on_gpu(self, kind: str) -> tuple[BoolArray, dict[str, NDArray[Any]]]:
        rows = self.columns.rows[kind]
        process, device, stream = self._place(kind)
        if kind == k.KERNEL:
            self.kernel_places = process, device, stream
        keep = self._usable(kind, _NAMES[kind], process if kind != k.SYNC else None)
        keep &= self._first_of_duplicates(kind, keep)
        columns = {
            "start": rows["start"][keep],
            "end": (rows["start"] + rows["length"])[keep],
            "process": process[keep],
            "device": device[keep],
            "stream": stream[keep],
            "correlation": rows["correlation"][keep],
        }
        none = int((columns["end"] == columns["start"]).sum())
        if none and kind != k.SYNC:
            words = f"{none} {_NAMES[kind]} have no length: they are shorter than the trace's clock can tell."
            self.problems.append(Problem(f"zero-{_NAMES[kind]}", words, none))
        return keep, columns

    def _first_of_duplicates(self, kind: str, keep: BoolArray) -> BoolArray:
        """Drop repeated records. Nodes of a graph share their correlation, so only ids of equal rows alone can repeat."""
        rows = self.columns.rows[kind]
        first = np.ones(len(keep), dtype=np.bool_)
        correlation = rows["correlation"]
        place = rows["label"] if "label" in rows else rows["place"]
        order = np.lexsort((rows["name"], rows["length"], rows["start"], correlation, place))
        if len(order) < 2:
            return first
        values = [column[order] for column in (place, correlation, rows["start"], rows["length"], rows["name"])]
        if "stream" in rows:
            values += [rows[c][order] for c in ("stream", "device")]
        same_id = (values[0][1:] == values[0][:-1]) & (values[1][1:] == values[1][:-1]) & (values[1][1:] > 0)
        equal = same_id & np.logical_and.reduce([v[1:] == v[:-1] for v in values[2:]])
        if not equal.any():
            return first
        groups = np.concatenate([[0], np.cumsum(~same_id)])
        mixed = np.zeros(int(groups[-1]) + 1, dtype=np.bool_)
        mixed[groups[1:][same_id & ~equal]] = True
        repeated = equal & ~mixed[groups[1:]]
        first[order[1:][repeated]] = False
        count = int((repeated & keep[order[1:]]).sum())
        if count:
            words = (_NAMES | _HOST_NAMES)[kind]
            text = f"{count} {words} are recorded twice; the copies were left out."
            self.problems.append(Problem(f"duplicate-{words.replace(' ', '-')}", text, count))
        return first

    def _gpu_table(self, kind: str, name: str) -> t.Table | None:
        if not self._any_gpu():
            return None
        keep, columns = self._on_gpu(kind)
        return t.Table(name, {**columns, "bytes": self.columns.rows[kind]["bytes"][keep]}).sorted_by("start")

    def _kernels(self) -> t.Table | None:
        if not self._any_gpu():
            return None
        rows = self.columns.rows[k.KERNEL]
        keep, columns = self._on_gpu(k.KERNEL)
        self.kept_kernels = keep
        block = rows["block"][keep]
        return t.Table(
            "kernels",
            {
                **columns,
                "name": rows["name"][keep],
                "grid_blocks": self._blocks(rows["grid"][keep], block, columns["process"], columns["correlation"]),
                "block_threads": block,
                "graph_node": rows["graph_node"][keep],
            },
        ).sorted_by("start")

    def _blocks(self, grid: IntArray, block: IntArray, process: IntArray, correlation: IntArray) -> IntArray:
        """Grid sizes in blocks: some launches of ROCm record theirs in threads."""
        calls = self.columns.rows[k.CALL]
        odd = np.array([bool(_GRID_IN_THREADS.match(name)) for name in self.strings.values], dtype=np.bool_)
        launches = np.flatnonzero(odd[calls["name"]]) if calls.count and odd.any() else np.empty(0, dtype=np.int64)
        if not len(launches):
            return grid
        # Ids repeat between the ranks of a merged trace.
        stride = int(max(correlation.max(initial=0), calls["correlation"].max(initial=0))) + 2
        of_process = np.array([th.process for th in self.threads], dtype=np.int64)
        owner = of_process[self.thread_of_place[calls["place"][launches]]]
        in_threads = np.isin(process * stride + correlation, owner * stride + calls["correlation"][launches])
        return np.where(in_threads & (block > 0) & (grid >= 0), grid // np.maximum(block, 1), grid)

    def _copies(self) -> t.Table | None:
        if not self._any_gpu():
            return None
        rows = self.columns.rows[k.COPY]
        keep, columns = self._on_gpu(k.COPY)
        name = rows["name"][keep]
        used = np.unique(name).tolist()
        facts = {index: _copy_facts(self.strings.values[index]) for index in used}
        table = np.array([facts[index] for index in used], dtype=np.int64).reshape(-1, 3)
        which = np.searchsorted(np.array(used, dtype=np.int64), name)
        kind, src, dst = (table[which, column] for column in range(3))
        return t.Table(
            "copies",
            {
                **columns,
                "bytes": rows["bytes"][keep],
                "kind": kind,
                "src": src,
                "dst": dst,
                "tool_kind": t.constant(-1, len(name)),
            },
        ).sorted_by("start")

    def _syncs(self) -> t.Table | None:
        rows = self.columns.rows[k.SYNC]
        if not rows.count:
            return None
        keep, columns = self._on_gpu(k.SYNC)
        kinds = [
            next((kind for words, kind in _SYNC_KINDS if words in name.lower()), 0) for name in self.strings.values
        ]
        record, number = rows["record"][keep], rows["record_stream"][keep]
        # Streams that ran something have a row above.
        numbers = {
            (s.device, s.process, s.number): i for i, s in enumerate(itertools.starmap(t.Stream, self.stream_index))
        }
        places, which = distinct_rows(columns["device"], columns["process"], number)
        streams = np.array([numbers.get((d, p, n), -1) for d, p, n in places], dtype=np.int64)[which]
        return t.Table(
            "syncs",
            {
                **columns,
                "kind": np.array(kinds, dtype=np.int64)[rows["name"][keep]],
                "record": np.maximum(record, -1),
                "record_stream": np.where(record >= 0, streams, -1),
            },
        ).sorted_by("start")

    def _collectives(self) -> t.Table | None:
        """What kernels say of the collective that they carry out; rows of kernels that were left out go with them."""
        rows = self.columns.collectives
        if not rows.count:
            return None
        kernels = self.columns.rows[k.KERNEL]
        process, device, stream = self.kernel_places
        keep = self.kept_kernels[rows["kernel"]]
        of = rows["kernel"][keep]
        return t.Table(
            "collectives",
            {
                "start": kernels["start"][of],
                "end": (kernels["start"] + kernels["length"])[of],
                "process": process[of],
                "device": device[of],
                "stream": stream[of],
                "correlation": kernels["correlation"][of],
                **{c: rows[c][keep] for c in ("name", "group", "group_size", "bytes", "sequence")},
            },
        ).sorted_by("start")

    def _memory_events(self) -> t.Table | None:
        rows = self.columns.rows[k.MEMORY]
        if not rows.count:
            return None
        keep = rows["usable"] & (np.abs(rows["start"] - self.centre_ns) <= DAY_NS)
        label, number, delta = (rows[c][keep] for c in ("label", "device", "delta"))
        pairs, which = distinct_rows(label, number)
        devices = np.array([self.device_index.get((pair[0], pair[1]), -1) for pair in pairs], dtype=np.int64)
        return t.Table(
            "memory_events",
            {
                "time": rows["start"][keep],
                "process": label,
                "device": devices[which] if len(pairs) else which,
                "bytes": np.abs(delta),
                "delta": delta,
            },
        ).sorted_by("time")

    # --- host tables -----------------------------------------------------------------------------------------------

    def _on_host(self, kind: str) -> tuple[BoolArray, dict[str, NDArray[Any]]]:
        rows = self.columns.rows[kind]
        keep = self._usable(kind, _HOST_NAMES[kind])
        if kind == k.CALL:
            keep &= self._first_of_duplicates(kind, keep)
        start = rows["start"][keep]
        return keep, {"start": start, "end": start + rows["length"][keep], "thread": self._thread(kind, keep)}

    def _any_host(self) -> bool:
        return any(self.columns.rows[kind].count for kind in (k.OPERATOR, k.RANGE))

    def _api_calls(self) -> t.Table | None:
        rows = self.columns.rows[k.CALL]
        if not rows.count:
            return None
        keep, columns = self._on_host(k.CALL)
        self.kept_calls = keep
        of_process = np.array([th.process for th in self.threads], dtype=np.int64)
        return t.Table(
            "api_calls",
            {
                **columns,
                "process": of_process[columns["thread"]],
                "correlation": rows["correlation"][keep],
                "name": mapped(rows["name"][keep], self._plain_names),
                "return_value": t.constant(-1, len(columns["start"])),
            },
        ).sorted_by("start")

    def _plain_names(self, names: list[int]) -> list[int]:
        return [self.strings.add(plain_call_name(self.strings.values[name])) for name in names]

    def _named_launches(self) -> t.Table | None:
        rows = self.columns.rows[k.CALL]
        if not rows.count or not (rows["kernel"] >= 0).any():
            return None
        named = self.kept_calls & (rows["kernel"] >= 0)
        of_process = np.array([th.process for th in self.threads], dtype=np.int64)
        return t.Table(
            "named_launches",
            {
                "start": rows["start"][named],
                "process": of_process[self._thread(k.CALL, named)],
                "correlation": rows["correlation"][named],
                "name": rows["kernel"][named],
            },
        ).sorted_by("start")

    def _ranges(self) -> t.Table | None:
        if not self._any_host():
            return None
        keep, columns = self._on_host(k.RANGE)
        count = len(columns["start"])
        return t.Table(
            "ranges",
            {
                **columns,
                "text": self.columns.rows[k.RANGE]["name"][keep],
                "kind": t.constant(t.PUSH_POP, count),
                "message_bytes": t.constant(-1, count),
            },
        ).sorted_by("start")

    def _operators(self) -> t.Table | None:
        self._inputs: list[t.OperatorInputs | None] = []
        if not self.columns.rows[k.OPERATOR].count:
            return None
        rows = self.columns.rows[k.OPERATOR]
        keep, columns = self._on_host(k.OPERATOR)
        self._inputs = [None if key is None else k.parsed_inputs(key) for key in self.columns.inputs.values]
        bad = np.array([inputs is None for inputs in self._inputs], dtype=np.bool_)
        inputs = rows["inputs"][keep]
        return t.Table(
            "operators",
            {**columns, "name": rows["name"][keep], "inputs": np.where(bad[inputs], -1, inputs)},
        ).sorted_by("start")

    def _overheads(self) -> t.Table | None:
        rows = self.columns.rows[k.OVERHEAD]
        if not rows.count:
            return None
        keep, columns = self._on_host(k.OVERHEAD)
        # Overhead is of a thread that has calls of its own, else of nobody in particular.
        own = np.bincount(
            self._thread(k.CALL, np.ones(self.columns.rows[k.CALL].count, dtype=np.bool_)), minlength=len(self.threads)
        )
        columns["thread"] = np.where(own[columns["thread"]] > 0, columns["thread"], -1)
        kind = overhead_kinds(self.strings.values)[rows["name"][keep]]
        return t.Table("overheads", {**columns, "kind": kind}).sorted_by("start")

    # --- what must be said -----------------------------------------------------------------------------------------

    def _note_text(self) -> None:
        report, say = self.report, self.problems.append
        if report.cut_at is not None or report.cut_file_bytes is not None or report.gzip_damaged:
            how = "the file ends"
            if report.gzip_damaged:
                how = "the compressed data are damaged from some byte on, the text ends"
            elif report.cut_file_bytes is not None:
                how = f"the compressed stream ends early at byte {report.cut_file_bytes:,} of the file, the text"
            at = report.cut_at if report.cut_at is not None else report.bytes_read
            say(
                Problem(
                    "cut-short",
                    f"The trace is cut short: {how} at byte {at:,}. The {self.columns.total:,} whole events before it were "
                    "read; kernels come last in these files, so GPU work may be missing.",
                )
            )
        if report.dropped:
            places = ", ".join(f"{place:,}" for place in report.dropped[:3])
            more = " …" if len(report.dropped) > 3 else ""
            count = len(report.dropped)
            say(
                Problem(
                    "unreadable-events", f"{count} events are no JSON and were left out, at byte {places}{more}.", count
                )
            )
        if report.after_end is not None:
            say(
                Problem(
                    "text-after-end",
                    f"Something follows the end of the trace, at byte {report.after_end:,}: it was not read. If several "
                    "traces were joined in one file, analyze each on its own.",
                )
            )
        if report.non_finite:
            text = f"{report.non_finite} arguments are no numbers (inf, nan): taken as missing."
            say(Problem("non-finite-numbers", text, report.non_finite))
        if report.decimal_commas:
            say(
                Problem(
                    "decimal-commas",
                    "Numbers with a decimal comma were read as they were meant.",
                    report.decimal_commas,
                )
            )
        if report.repaired_text:
            text = (
                f"{report.repaired_text} names hold bytes that are no text; they are shown with replacement characters."
            )
            say(Problem("unprintable-names", text, report.repaired_text))
        if self.text_times:
            text = f"{self.text_times} events have their times as text; they were read as numbers."
            say(Problem("times-as-text", text, self.text_times))
        if self.columns.unknown:
            names = ", ".join(sorted(self.columns.unknown)[:5])
            count = sum(self.columns.unknown.values())
            say(Problem("unknown-categories", f"{count} events of unknown categories were left out: {names}.", count))

    def _provenance(self) -> t.TraceProvenance:
        capture: dict[str, Any] = {key: True for key in _CAPTURE_KEYS if self.top.get(key)}
        # Older files do not say how they were recorded, but show it.
        shown = {
            "with_stack": "python_function" in self.columns.categories,
            "record_shapes": any(inputs is not None for inputs in self._inputs),
            "profile_memory": self.columns.rows[k.MEMORY].count > 0,
        }
        capture.update({key: True for key, there in shown.items() if there})
        capture.update({key: self.top[key] for key in _VERSION_KEYS if isinstance(self.top.get(key), (int, str))})
        return t.TraceProvenance(t.PYTORCH_PROFILER, None, [self.path.name], capture)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _copy_facts(name: str) -> tuple[int, int, int]:
    """Copy kind and memory kinds of both ends, of the name of a copy such as ``Memcpy HtoD (Pinned -> Device)``."""
    match = _COPY_NAME.match(name)
    if match is None:
        return t.OTHER_COPY, t.UNKNOWN_MEMORY, t.UNKNOWN_MEMORY
    kind = _COPY_KINDS.get(match[1], t.OTHER_COPY)
    src, dst = (_MEMORY_KINDS.get(end or "", t.UNKNOWN_MEMORY) for end in (match[2], match[3]))
    return kind, src, dst
