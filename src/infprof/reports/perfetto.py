"""The trace and the diagnosis as one timeline for Perfetto (ui.perfetto.dev, trace_processor) or chrome://tracing.

Chrome trace-event JSON, written in pieces: the file may be far larger than memory. It needs the profile itself, not
only its diagnosis. Everything that reaches into the analysed window is there, whole; a window with all GPU work
(``--window full``) is drawn with what came before and after it.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from infprof.diagnosis import Detailed
from infprof.errors import UsageError
from infprof.measures.operations import Prepared
from infprof.measures.slices import DeviceTime
from infprof.readers.timeline import BEGINNING
from infprof.reports.files import atomic_file
from infprof.reports.perfetto_findings import draw_findings, verdict_facts
from infprof.reports.perfetto_text import EventWriter
from infprof.reports.perfetto_tracks import TraceTracks, draw_telemetry
from infprof.results import Diagnosis
from infprof.trace import IntArray, Trace

# Traces are repetitive: more effort would save a tenth of the size for three times the time.
_GZIP_LEVEL = 2
_BUFFER_BYTES = 1 << 20


def write_perfetto(path: str | Path, detailed: Detailed, force: bool = False) -> dict[str, int]:
    """Write the timeline to ``path``, whole or not at all; compressed where the name ends in .gz.

    Gives the number of slices, counter samples and arrows (flows). Raises UsageError where the file exists already (and
    ``force`` is not given) or cannot be written, or where there is only a stored diagnosis.
    """
    if detailed.prepared is None:
        raise UsageError("A timeline needs the profile itself: a stored diagnosis does not hold its events.")
    with atomic_file(path, force) as file, _compressed(path, file) as output:
        return _write(output, detailed.diagnosis, detailed.prepared, detailed.times)


@contextmanager
def _compressed(path: str | Path, file: IO[bytes]) -> Iterator[IO[bytes]]:
    if not str(path).lower().endswith(".gz"):
        yield file
        return
    # No name and no time: the same input gives the same bytes.
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=file, mtime=0) as packed,
        io.BufferedWriter(packed, _BUFFER_BYTES) as buffered,
    ):
        yield buffered


def _write(output: IO[bytes], diagnosis: Diagnosis, prepared: Prepared, times: list[DeviceTime]) -> dict[str, int]:
    low, high = _drawn_range(diagnosis, prepared)
    # A launch call is drawn even where it lies before all else.
    shift = -min(low, _extent(prepared.trace)[0], 0)
    facts = {
        "exporter": f"infprof {diagnosis.provenance.infprof_version}",
        "time": "microseconds from the start of the trace" + (f", {shift} ns later than in reports" if shift else ""),
        "recorded_with": " ".join(filter(None, (diagnosis.provenance.tool, diagnosis.provenance.tool_version))),
        "inputs": diagnosis.provenance.inputs,
        **verdict_facts(diagnosis),
        "problems": [problem.message for problem in diagnosis.problems],
    }
    output.write(BEGINNING + f'{json.dumps(facts)},\n"displayTimeUnit":"ns",\n"traceEvents":['.encode("ascii"))
    writer = EventWriter(output, shift, _first_free_id(prepared.trace))
    draw_findings(writer, diagnosis, times, prepared.trace)
    TraceTracks(prepared, low, high, writer).draw()
    if prepared.trace.telemetry is not None and _on_one_clock(prepared.trace):
        draw_telemetry(writer, prepared.trace.telemetry, low, high)
    output.write(b"\n]}\n")
    return writer.counts


def _drawn_range(diagnosis: Diagnosis, prepared: Prepared) -> tuple[int, int]:
    """The window; where no GPU work lies outside it, from the first to the last event of any kind."""
    low, high = diagnosis.window.start_ns, diagnosis.window.end_ns
    operations = prepared.operations
    if len(operations) and (operations.start.min() < low or operations.end.max() > high):
        return low, high
    first, last = _extent(prepared.trace)
    return min(low, first), max(high, last)


def _extent(trace: Trace) -> tuple[int, int]:
    """The first and the last time of all that may be drawn, the end excluded; (0, 0) where there is nothing."""
    columns = _times(trace)
    if not columns:
        return 0, 0
    return min(int(times.min()) for times in columns), max(int(times.max()) for times in columns) + 1


def _times(trace: Trace) -> list[IntArray]:
    """The time columns of all that may be drawn, none of them empty."""
    hosts = (trace.ranges, trace.operators, trace.api_calls, trace.os_calls)
    tables = [table for table in (*trace.operations(), *hosts) if table is not None]
    columns = [table[edge] for table in tables for edge in ("start", "end")]
    if trace.counters is not None:
        columns.append(trace.counters["time"])
    return [column for column in columns if len(column)]


def _first_free_id(trace: Trace) -> int:
    """A number above all of the trace's processes and threads, for those that infprof makes up."""
    used = [0, *(p.pid or 0 for p in trace.processes), *(t.tid or 0 for t in trace.threads)]
    return (max(used) // 1_000_000 + 1) * 1_000_000


def _on_one_clock(trace: Trace) -> bool:
    """Whether telemetry and timeline share a clock; else nothing may stand below one another."""
    return trace.clock_start_unix_ns is not None or not any(len(table) for table in trace.operations())
