"""What the trace holds, as tracks: GPU work per device and stream, host threads, launches as arrows, counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infprof.bundle import redact_command
from infprof.diagnosis import redact
from infprof.distinct import groups
from infprof.measures.operations import Prepared
from infprof.reports import format as fmt
from infprof.reports.perfetto_text import EventWriter, TextSource, filled, known, member, quoted, texts
from infprof.telemetry import Series, Telemetry
from infprof.trace import COPY_KIND_NAMES, PUSH_POP, BoolArray, IntArray, OperatorInputs, Table, Trace

_MEMORY_KINDS = ("pageable", "pinned", "device", "array", "managed", "unknown")
_COPY_NAMES = {
    "h2d": "HtoD",
    "d2h": "DtoH",
    "d2d": "DtoD",
    "p2p": "PtoP",
    "uvm": "UVM",
    "h2h": "HtoH",
    "other": "other",
}
# Where on the screen: findings first, then GPUs, processes, telemetry.
GPU_ORDER, HOST_ORDER, TELEMETRY_ORDER = 1_000, 10_000, 100_000


def private(text: str | None) -> str:
    """A name of a process or thread without paths and secrets, which may stand in it as a command line."""
    return redact(" ".join(redact_command((text or "").split())))


def overlapping(table: Table, low: int, high: int) -> BoolArray:
    """The rows of a table that reach into [low, high); one without length counts at its start."""
    return np.asarray((table["start"] < high) & (np.maximum(table["end"], table["start"] + 1) > low), dtype=np.bool_)


def _heads(category: str, names: list[str]) -> NDArray[np.object_]:
    """Heads for all names; the last one is for -1, no name."""
    return texts([f'"cat":"{category}","name":{quoted(name) if name else quoted(category)}' for name in [*names, ""]])


def _numbers(table: Table, columns: dict[str, str], before: str = "") -> Callable[[IntArray], list[str]]:
    """Arguments from number columns (column → label), those in which the table knows any number; ``before`` them."""
    held = [(column, label) for column, label in columns.items() if len(table) and (table[column] >= 0).any()]
    if not held:
        return lambda rows: [""] * len(rows)
    template = before + ",".join(f'"{label}":%s' for _, label in held)
    return lambda rows: filled(template, *(known(table[column][rows]) for column, _ in held))


class TraceTracks:
    """Draws a trace inside [low, high): what reaches in is drawn whole."""

    def __init__(self, prepared: Prepared, low: int, high: int, writer: EventWriter) -> None:
        self._prepared, self._trace = prepared, prepared.trace
        self._low, self._high, self._writer = low, high, writer
        self._device_pids: dict[int, int] = {}
        self._sources: dict[str, TextSource] = {}

    def draw(self) -> None:
        self._gpus()
        self._hosts()
        self._flows()
        self._counters()

    # --- GPUs ------------------------------------------------------------------------------------------------------

    def _gpus(self) -> None:
        trace = self._trace
        chosen = {
            name: np.flatnonzero(overlapping(table, self._low, self._high))
            for name in ("kernels", "graphs", "copies", "memsets")
            if (table := getattr(trace, name)) is not None
        }
        self._sources.update({name: self._gpu_source(name) for name in chosen})
        titles = self._stream_titles()
        # By device and stream, either of which may not be recorded.
        streams = len(trace.streams) + 1
        by_place: dict[int, dict[str, IntArray]] = {}
        for name, rows in chosen.items():
            device_of, stream_of = (getattr(trace, name)[column][rows] for column in ("device", "stream"))
            for place, found in groups((device_of + 1) * streams + stream_of + 1):
                by_place.setdefault(place, {})[name] = rows[found]
        for place in sorted(by_place):
            device, stream = place // streams - 1, place % streams - 1
            parts = [(self._sources[name], rows) for name, rows in by_place[place].items()]
            self._writer.slices(self._device_pid(device), titles[stream], stream, parts)

    def _device_pid(self, device: int) -> int:
        if device not in self._device_pids:
            known_device = self._trace.devices[device] if device >= 0 else None
            name = "GPU not recorded"
            if known_device is not None:
                name = f"GPU {known_device.id}" + (f" ({known_device.name})" if known_device.name else "")
            self._device_pids[device] = self._writer.process(name, GPU_ORDER + device)
        return self._device_pids[device]

    def _stream_titles(self) -> dict[int, str]:
        """A stream's number, and its process and context where the number alone does not tell it from others."""
        streams = self._trace.streams
        same = Counter((s.device, s.number) for s in streams)
        titles = {-1: "stream not recorded"}
        for index, stream in enumerate(streams):
            title = f"stream {stream.number}"
            if same[stream.device, stream.number] > 1:
                pid = self._trace.processes[stream.process].pid if stream.process >= 0 else None
                title += f" (process {pid}, context {stream.context})" if pid is not None else f" ({stream.context})"
            titles[index] = title
        return titles

    def _gpu_source(self, name: str) -> TextSource:
        table: Table = getattr(self._trace, name)
        if name == "kernels":
            return self._kernel_source(table)
        labels = {"correlation": "correlation", **({"graph": "graph"} if name == "graphs" else {"bytes": "bytes"})}
        arguments = _numbers(table, labels)
        if name == "copies":
            kinds = len(_MEMORY_KINDS)
            head_of = (table["kind"] * kinds + np.clip(table["src"], 0, kinds - 1)) * kinds
            head_of = head_of + np.clip(table["dst"], 0, kinds - 1)
            head_texts = texts(
                f'"cat":"copy","name":{quoted(_copy_name(kind, src, dst))}'
                for kind in COPY_KIND_NAMES
                for src in _MEMORY_KINDS
                for dst in _MEMORY_KINDS
            )
            return TextSource(table["start"], table["end"], head_of, head_texts, arguments)
        head = texts(['"cat":"memset","name":"Memset"' if name == "memsets" else '"cat":"graph","name":"CUDA graph"'])
        return TextSource(table["start"], table["end"], np.zeros(len(table), dtype=np.int64), head, arguments)

    def _kernel_source(self, table: Table) -> TextSource:
        trace, classes = self._trace, self._prepared.kernel_classes
        class_texts = texts(
            member("class", classes[i].kind) if i in classes else member("class", None)
            for i in range(len(trace.strings) + 1)
        )
        labels = {"correlation": "correlation", "grid_blocks": "grid blocks", "block_threads": "block threads"}
        numbers = _numbers(table, labels | {"graph_node": "graph node"}, ",")

        def arguments(rows: IntArray) -> list[str]:
            return filled("%s%s", class_texts[table["name"][rows]], numbers(rows))

        heads = _heads("kernel", trace.strings)
        return TextSource(table["start"], table["end"], table["name"], heads, arguments)

    # --- host threads ----------------------------------------------------------------------------------------------

    def _hosts(self) -> None:
        pids: dict[int, int] = {}
        chosen = self._host_rows()
        by_thread: dict[int, dict[str, IntArray]] = {}
        for name, rows in chosen.items():
            for thread, places in groups(self._host_table(name)["thread"][rows]):
                by_thread.setdefault(thread, {})[name] = rows[places]
        self._sources.update({name: self._host_source(name) for name in chosen})
        for thread in sorted(by_thread):
            mine = by_thread[thread]
            process, tid, title = self._thread(thread)
            if process not in pids:
                pids[process] = self._host_process(process)
            pid = pids[process]
            # Ranges with a start and an end of their own need not nest with anything.
            free = {name: mine.pop(name) for name in ("free ranges",) if name in mine}
            for rows_of, suffix, number in ((mine, "", tid), (free, ": start/end ranges", None)):
                if rows_of:
                    parts = [(self._sources[name], rows) for name, rows in rows_of.items()]
                    self._writer.slices(pid, title + suffix, thread, parts, number)

    def _host_table(self, name: str) -> Table:
        table: Table = getattr(self._trace, "ranges" if name == "free ranges" else name)
        return table

    def _host_rows(self) -> dict[str, IntArray]:
        """The rows of each host table to draw, outermost kinds first; of calls also those that launched what is drawn."""
        trace = self._trace
        out: dict[str, IntArray] = {}
        if trace.ranges is not None and len(trace.ranges):
            inside, nests = overlapping(trace.ranges, self._low, self._high), trace.ranges["kind"] == PUSH_POP
            out["ranges"], out["free ranges"] = np.flatnonzero(inside & nests), np.flatnonzero(inside & ~nests)
        if trace.operators is not None:
            out["operators"] = np.flatnonzero(overlapping(trace.operators, self._low, self._high))
        if trace.api_calls is not None:
            inside = overlapping(trace.api_calls, self._low, self._high)
            operations = self._prepared.operations
            launch = operations.launch[self._drawn_operations()]
            inside[launch[launch >= 0]] = True
            out["api_calls"] = np.flatnonzero(inside)
        if trace.os_calls is not None:
            out["os_calls"] = np.flatnonzero(overlapping(trace.os_calls, self._low, self._high))
        return {name: rows for name, rows in out.items() if len(rows)}

    def _thread(self, thread: int) -> tuple[int, int | None, str]:
        """Process, tid and title of a thread."""
        if thread < 0:
            return -1, None, "thread not recorded"
        row = self._trace.threads[thread]
        number = "" if row.tid is None else str(row.tid)
        title = f"{private(row.name)} {number}".strip() or "thread"
        return row.process, row.tid, title if row.name else f"thread {number}".strip()

    def _host_process(self, process: int) -> int:
        row = self._trace.processes[process] if process >= 0 else None
        name = (private(row.name) if row is not None and row.name else "") or "process"
        return self._writer.process(name, HOST_ORDER + process, None if row is None else row.pid)

    def _host_source(self, name: str) -> TextSource:
        trace, table = self._trace, self._host_table(name)
        head_of = table["text" if "ranges" in name else "name"]
        category = {"api_calls": "cuda", "os_calls": "os", "operators": "operator"}.get(name, "range")
        arguments: Callable[[IntArray], list[str]]
        if name == "api_calls":
            # 0 is success, which goes without saying.
            failed = {"return_value": "return value"} if (table["return_value"] > 0).any() else {}
            arguments = _numbers(table, {"correlation": "correlation", **failed})
        elif name == "operators":
            arguments = _input_arguments(trace, table)
        else:
            arguments = _numbers(table, {"message_bytes": "bytes"} if "ranges" in name else {})
        return TextSource(table["start"], table["end"], head_of, _heads(category, trace.strings), arguments)

    # --- launches --------------------------------------------------------------------------------------------------

    def _drawn_operations(self) -> IntArray:
        ops = self._prepared.operations
        inside = (ops.start < self._high) & (np.maximum(ops.end, ops.start + 1) > self._low)
        return np.flatnonzero(inside)

    def _flows(self) -> None:
        """An arrow for every drawn operation whose launch call is known.

        What has no length cannot be pointed at, and arrows do not go back in time, where the clocks of host and GPU
        are apart: viewers drop those.
        """
        ops, calls, source = self._prepared.operations, self._trace.api_calls, self._sources.get("api_calls")
        if calls is None or source is None:
            return
        rows = self._drawn_operations()
        rows = rows[(ops.launch[rows] >= 0) & (ops.end[rows] > ops.start[rows])]
        launch = ops.launch[rows]
        fit = (calls["end"][launch] > calls["start"][launch]) & (ops.start[rows] >= calls["start"][launch])
        rows, launch = rows[fit], launch[fit]
        to_row = np.full(len(rows), -1, dtype=np.int32)
        for kind, name in enumerate(("kernels", "graphs", "copies", "memsets")):
            mine = np.flatnonzero(ops.kind[rows] == kind)
            if len(mine):
                to_row[mine] = self._sources[name].row[ops.row[rows[mine]]]
        self._writer.flows(source.row[launch], calls["start"][launch], to_row, ops.start[rows])

    # --- counters --------------------------------------------------------------------------------------------------

    def _counters(self) -> None:
        table, trace = self._trace.counters, self._trace
        if table is not None and len(table):
            inside = np.flatnonzero((table["time"] >= self._low) & (table["time"] <= self._high))
            key = table["device"][inside] * (len(trace.strings) + 1) + table["metric"][inside]
            for _, places in groups(key):
                rows = inside[places]
                device, metric = int(table["device"][rows[0]]), int(table["metric"][rows[0]])
                name = trace.strings[metric] if metric >= 0 else "counter"
                self._writer.counter(self._device_pid(device), name, table["time"][rows], table["value"][rows])


def _copy_name(kind: str, src: str, dst: str) -> str:
    ends = "" if "unknown" in (src, dst) else f" ({src} to {dst})"
    return f"Memcpy {_COPY_NAMES[kind]}{ends}"


def _input_arguments(trace: Trace, table: Table) -> Callable[[IntArray], list[str]]:
    """Shapes and types of an operator's inputs. Their values are left out: they may be anything."""
    described = texts([*(_described_inputs(inputs) for inputs in trace.inputs), ""])
    return lambda rows: list(described[table["inputs"][rows]])


def _described_inputs(inputs: OperatorInputs) -> str:
    return f"{member('Input Dims', inputs.shapes)},{member('Input type', inputs.types)}"


def draw_telemetry(writer: EventWriter, telemetry: Telemetry, low: int, high: int) -> None:
    """Every series of the probes inside [low, high] as a counter, one process for each probe."""
    gpus = telemetry.facts("gpu_index")
    pids: dict[str, int] = {}
    for series in telemetry.all_series:
        part = series.between(low, high + 1)
        if len(part.time):
            if series.probe not in pids:
                pids[series.probe] = writer.process(f"telemetry: {series.probe}", TELEMETRY_ORDER + len(pids))
            writer.counter(pids[series.probe], _series_name(series, gpus), part.time, part.value)


def _series_name(series: Series, gpus: dict[str, Any]) -> str:
    """Signal, what it is of, and its unit. A GPU goes by its index: its UUID names the very card."""
    parts = series.scope.split("/")
    gpu = "/".join(parts[:2])
    scope = "/".join([f"GPU {gpus[gpu]}", *parts[2:]]) if gpu in gpus else series.scope
    if scope.startswith("gpu/"):
        scope = "GPU"
    labels = ",".join(f"{key}={redact(str(value))}" for key, value in sorted(series.labels.items()))
    name = " ".join(part for part in (series.signal, redact(scope), f"{{{labels}}}" if labels else "") if part)
    return fmt.clean(f"{name} ({series.unit})" if series.unit else name)
