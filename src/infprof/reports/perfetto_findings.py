"""What infprof says of the trace, as tracks of a process of its own: window, time by slice, one row for each finding."""

from __future__ import annotations

from typing import Any

import numpy as np

from infprof.measures.slices import DeviceTime
from infprof.reports import format as fmt
from infprof.reports import labels
from infprof.reports.perfetto_text import EventWriter, TextSource, member, quoted, texts
from infprof.results import IDLE_CAUSES, Diagnosis, Finding, Where
from infprof.trace import IntArray, Trace

# Of the causes in one gap only the lengths are known, and that the queued part comes last: waits, then work, then queue.
_ORDER = (
    "no-demand",
    "profiler",
    "unknown",
    "cpu-contention",
    "io",
    "lock",
    "sync",
    "allocator",
    "module-load",
    "host-work",
    "launch",
    "kernel-gap",
    "dependency",
)
_WHOLE_WINDOW = "the whole window: the finding has no single place"


def draw_findings(writer: EventWriter, diagnosis: Diagnosis, times: list[DeviceTime], trace: Trace) -> None:
    """The process "infprof": the window with the verdict, where each device's time went, and every finding."""
    pid = writer.process("infprof", 0)
    _window(writer, pid, diagnosis, times)
    for number, time in enumerate(times):
        device = trace.devices[time.device]
        _accounting(writer, pid, f"GPU {device.id}: where the time went", 1 + number, time)
    for number, finding in enumerate(diagnosis.findings):
        _finding(writer, pid, finding, diagnosis, 1 + len(times) + number)


def verdict_facts(diagnosis: Diagnosis) -> dict[str, Any]:
    """The answer in a few words, for the file's metadata and for the window's slice."""
    verdict, window = diagnosis.verdict, diagnosis.window
    return {
        "verdict": labels.diagnosis_title(diagnosis),
        "class": verdict.cls,
        "cause": verdict.cause,
        "code": verdict.code,
        "sentence": fmt.plain_prose(verdict.sentence),
        "evidence": labels.rank_words(verdict.rank, labels.without_timeline(diagnosis)),
        "confidence": verdict.confidence,
        "window": fmt.window_text(window),
        "window_start_ns": window.start_ns,
        "window_end_ns": window.end_ns,
        "window_ns": window.duration_ns,
        "left_out": [f"{fmt.clean(part.what)}: {fmt.duration(part.ns)}" for part in window.left_out],
    }


def _described(start: IntArray, end: IntArray, which: IntArray, heads: list[str], args: list[str]) -> TextSource:
    """Events of few kinds, all that is said of an event being the same for its kind."""
    held = texts(args)
    return TextSource(start, end, which, texts(heads), lambda rows: list(held[which[rows]]))


def _draw(writer: EventWriter, pid: int, name: str, order: int, source: TextSource) -> None:
    writer.slices(pid, name, order, [(source, np.arange(len(source.start)))])


def _members(facts: dict[str, Any]) -> str:
    return ",".join(member(key, value) for key, value in facts.items())


def _window(writer: EventWriter, pid: int, diagnosis: Diagnosis, times: list[DeviceTime]) -> None:
    if times:
        start, end = times[0].scope
    else:
        start, end = np.array([diagnosis.window.start_ns]), np.array([diagnosis.window.end_ns])
    facts = verdict_facts(diagnosis)
    head = f'"cat":"window","name":{quoted(facts["verdict"])}'
    source = _described(start, end, np.zeros(len(start), dtype=np.int64), [head], [_members(facts)])
    _draw(writer, pid, "window and verdict", 0, source)


# --- time accounting -------------------------------------------------------------------------------------------------


def accounting(time: DeviceTime) -> tuple[list[tuple[str, str | None]], IntArray, IntArray, IntArray]:
    """All slices of a device in time: (kind, cause) by number, starts, ends, and the number of each.

    Their lengths by kind and cause are those of ``DeviceTime.slices``, to the nanosecond. Inside one idle gap the order
    of causes is ``_ORDER``: what comes before the launch call is known by its length only.
    """
    kinds: list[tuple[str, str | None]] = [("compute", None), ("exposed_communication", None)]
    sets = [time.compute, time.exposed_comm]
    for cause, inside in time.exposed_copy.items():
        kinds.append(("exposed_copy", cause))
        sets.append(inside)
    starts, ends = [inside.starts for inside in sets], [inside.ends for inside in sets]
    which = [np.full(len(inside.starts), number) for number, inside in enumerate(sets)]
    begin = time.gaps.starts
    for cause in _ORDER:
        finish = begin + time.gaps.causes[IDLE_CAUSES.index(cause)]
        some = finish > begin
        starts.append(begin[some])
        ends.append(finish[some])
        which.append(np.full(int(some.sum()), len(kinds)))
        kinds.append(("idle", cause))
        begin = finish
    return kinds, np.concatenate(starts), np.concatenate(ends), np.concatenate(which)


def _accounting(writer: EventWriter, pid: int, name: str, order: int, time: DeviceTime) -> None:
    kinds, starts, ends, which = accounting(time)
    styles = [labels.slice_style(kind, cause) for kind, cause in kinds]
    heads = [f'"cat":"slice","name":{quoted(style.label)}' for style in styles]
    args = [
        _members({"kind": kind, "cause": cause, "meaning": style.meaning})
        for (kind, cause), style in zip(kinds, styles, strict=True)
    ]
    _draw(writer, pid, name, order, _described(starts, ends, which, heads, args))


# --- findings --------------------------------------------------------------------------------------------------------


def _finding(writer: EventWriter, pid: int, finding: Finding, diagnosis: Diagnosis, order: int) -> None:
    window = diagnosis.window
    places = finding.where or [Where(window.start_ns, window.end_ns)]
    facts = _facts(finding, diagnosis)
    args = [_members({**_place_facts(place, bool(finding.where)), **facts}) for place in places]
    starts = np.array([place.start_ns for place in places], dtype=np.int64)
    ends = np.array([place.end_ns for place in places], dtype=np.int64)
    head = f'"cat":"finding","name":{quoted(finding.title)}'
    source = _described(starts, ends, np.arange(len(places)), [head] * len(places), args)
    _draw(writer, pid, f"{finding.severity}: {finding.title}", order, source)


def _place_facts(place: Where, is_single: bool) -> dict[str, Any]:
    return {
        "where": fmt.where_place(place, 200) if is_single else _WHOLE_WINDOW,
        "look closer": f"--window {fmt.window_argument(place.start_ns, place.end_ns)}",
    }


def _facts(finding: Finding, diagnosis: Diagnosis) -> dict[str, Any]:
    """What a finding says, in the words of the other reports."""
    return {
        "rule": finding.rule,
        "title": fmt.clean(finding.title),
        "severity": finding.severity,
        "cost": fmt.cost_text(finding.cost, diagnosis.window.duration_ns),
        "gain": fmt.gain_text(finding.gain),
        "why": fmt.plain_prose(finding.why),
        "evidence": [
            f"{fmt.measure_label(e.measure)} {fmt.value_with_unit(e.value, e.unit)}" for e in finding.evidence
        ],
        "rank": labels.rank_words(finding.rank, labels.without_timeline(diagnosis)),
        "confidence": finding.confidence,
        "remedies": [
            f"{labels.STACKS.get(remedy.stack, remedy.stack)}: {fmt.plain_prose(remedy.change)}"
            for remedy in finding.remedies
        ],
        "notes": [fmt.plain_prose(note) for note in finding.notes],
    }
