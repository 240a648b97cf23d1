"""Bundles of `infprof run`: the trace, if one was recorded, with the telemetry of the same run on the trace's clock."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from infprof.bundle import LOAD, MANIFEST, TRACE_DIR, Bundle
from infprof.errors import InfprofError
from infprof.flags import speed_flags
from infprof.results import Problem
from infprof.telemetry import Telemetry, read_telemetry
from infprof.trace import Trace, TraceProvenance

# Less than this is what a clock that is kept by the network drifts.
_CLOCK_STEP_NS = 50_000_000


def is_bundle(path: Path) -> bool:
    """Whether the folder is a bundle."""
    return (path / MANIFEST).is_file()


def read_bundle(folder: Path) -> Trace:
    """The bundle as a Trace with ``telemetry``; without a recorded trace its tables are all "not collected".

    Raises InfprofError where the manifest is damaged, or where there is neither a trace nor telemetry.
    """
    from infprof.readers import read

    bundle = Bundle.open(folder)
    problems = [Problem(n["code"], _sentence(n)) for n in bundle.manifest.notes]
    problems += _left_out_probes(bundle)
    telemetry = _telemetry(bundle, problems)
    traces = [path for path in bundle.traces() if path.is_file()]
    trace = None
    while traces and trace is None:
        # Of several captures the last one is the warmest, and of several processes that with the most work on the GPU.
        try:
            trace = read(traces[-1])
        except InfprofError as error:
            if len(traces) == 1 and telemetry is None:
                raise
            # A process that was killed may have left nothing but a beginning.
            problems.append(Problem("unreadable-trace", f"{traces.pop().name} was left out: {error}"))
    if trace is not None:
        if len(traces) > 1:
            problems.append(_other_traces(bundle, traces))
    elif telemetry is None:
        raise InfprofError(f"{folder} holds neither a trace nor telemetry: the run recorded nothing.")
    else:
        trace = _without_trace(bundle)
    trace.problems += problems
    trace.provenance.inputs = [folder.name]
    trace.provenance.capture |= _recorder(bundle)
    if bundle.manifest.command:
        trace.provenance.capture["flags"] = speed_flags(bundle.manifest.command)
    if telemetry is not None:
        _note_clock_step(bundle, trace)
        trace.telemetry = _on_clock_of(trace, telemetry)
        trace.telemetry_window = _window(bundle, telemetry, trace)
        trace.load = _load(bundle, trace.problems)
    return trace


def _other_traces(bundle: Bundle, traces: list[Path]) -> Problem:
    """What the traces are that are not diagnosed, and how to diagnose them."""
    folder = f"{bundle.folder.name}/{TRACE_DIR}"
    first, *more = [p.name for p in traces[:-1]]
    rest = f" (and {', '.join(more)})" if more else ""
    name = f"`infprof analyze {folder}/{first}`{rest}"
    if "processes" not in bundle.manifest.backend:
        sentence = f"{len(traces)} captures were made; this is the last one. For the others name their files: {name}."
        return Problem("several-captures", sentence, len(traces))
    processes: list[dict[str, Any]] = bundle.manifest.backend["processes"]
    about = next((p for p in processes if p.get("trace") == traces[-1].name), dict[str, Any]())
    most = "the most work on the GPU" if about.get("gpu_operations") else "the most events, as none worked on a GPU"
    return Problem(
        "several-processes",
        f"{len(traces)} processes were recorded; this is {about.get('pid', traces[-1].name)}, the one with {most}. "
        f"For the others name their files: {name}; `infprof analyze {folder}` compares all of them.",
        len(traces),
    )


def _sentence(note: dict[str, str | None]) -> str:
    return " ".join(str(note[part]) for part in ("sentence", "remedy") if note.get(part))


def _left_out_probes(bundle: Bundle) -> list[Problem]:
    return [
        Problem("probe-failed", f"The probe {p['name']} failed: {p['reason']}.")
        for p in bundle.manifest.probes
        if p.get("state") == "failed"
    ]


def _telemetry(bundle: Bundle, problems: list[Problem]) -> Telemetry | None:
    if not bundle.telemetry.is_file():
        return None
    try:
        return read_telemetry(bundle.telemetry)
    except sqlite3.Error as error:
        problems.append(Problem("damaged-telemetry", f"{bundle.telemetry.name} cannot be read: {error}."))
        return None


def _load(bundle: Bundle, problems: list[Problem]) -> dict[str, Any] | None:
    path = bundle.folder / LOAD
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(Problem("damaged-load", f"{path.name} cannot be read: {error}."))
        return None
    return data if isinstance(data, dict) else None


def _recorder(bundle: Bundle) -> dict[str, Any]:
    """What recorded the timeline, and why it was that."""
    found = {"backend": bundle.manifest.backend.get("name"), "backend_why": bundle.manifest.backend.get("why")}
    return {name: value for name, value in found.items() if value is not None}


def _without_trace(bundle: Bundle) -> Trace:
    provenance = TraceProvenance("infprof", bundle.manifest.infprof_version, [], {})
    trace = Trace(strings=[], devices=[], processes=[], threads=[], streams=[], provenance=provenance)
    # A bundle without a trace has only one clock: the run's own, from the start of its capture.
    trace.clock_start_unix_ns = _capture(bundle)[0]
    return trace


def _note_clock_step(bundle: Bundle, trace: Trace) -> None:
    """The trace goes by the wall clock of its own start, the telemetry by one that never jumps."""
    step = abs(int(bundle.manifest.clocks.get("wall_clock_step_ns", 0)))
    if step >= _CLOCK_STEP_NS and trace.clock_start_unix_ns is not None and trace.provenance.tool != "infprof":
        trace.problems.append(
            Problem(
                "clock-step",
                f"The machine's clock was set by {step / 1e6:.0f} ms during the run: telemetry and timeline may be that far "
                "apart.",
            )
        )


def _on_clock_of(trace: Trace, telemetry: Telemetry) -> Telemetry:
    if trace.clock_start_unix_ns is None:
        trace.problems.append(
            Problem(
                "clocks-not-aligned",
                "The trace does not say when it began, so telemetry and timeline are not matched in time: figures of "
                "the telemetry are those of the whole capture.",
            )
        )
        return telemetry
    return telemetry.shifted(-trace.clock_start_unix_ns)


def _window(bundle: Bundle, telemetry: Telemetry, trace: Trace) -> tuple[int, int]:
    low, high = _capture(bundle)
    span = telemetry.span_ns()
    if bundle.manifest.ended_unix_ns is None and span is not None:
        # infprof itself was killed: what it had written by then is all there is.
        high = max(high, span[1])
    start = trace.clock_start_unix_ns or 0
    return low - start, high - start


def _capture(bundle: Bundle) -> tuple[int, int]:
    """When the capture was, in Unix ns; the whole run where it was never reached."""
    manifest = bundle.manifest
    phase = manifest.phase("capture")
    end = manifest.ended_unix_ns
    if phase is not None:
        start, end = phase["start_unix_ns"], phase["end_unix_ns"] or end
    else:
        start = manifest.started_unix_ns
    return int(start), int(end if end is not None else start)
