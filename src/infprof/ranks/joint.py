"""The results of all files as one diagnosis: ranks named, clocks aligned, arrivals compared, one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from infprof.diagnosis import Options
from infprof.errors import EXIT_USAGE, InfprofError
from infprof.measures.device import recoverable_ns
from infprof.ranks import alignment
from infprof.ranks.alignment import Clock, Participant, align
from infprof.ranks.arrivals import Arrivals, arrival_rows, arrivals, stragglers
from infprof.ranks.judging import add_waits, device_measures
from infprof.ranks.naming import RankFile, missing_ranks, named
from infprof.ranks.traffic import group_traffic, matrix
from infprof.ranks.workers import FileResult
from infprof.results import Diagnosis, FileFailure, Job, Problem, Provenance, RankRow, Stragglers, Verdict
from infprof.rules import RuleSet

_MOST_NAMED = 4


def joint_diagnosis(
    paths: Sequence[Path], names: Sequence[str], results: Sequence[FileResult], rules: RuleSet, options: Options
) -> Diagnosis:
    """The joint diagnosis. Raises InfprofError where no file could be read, with the first reason."""
    problems: list[Problem] = []
    failures = [
        FileFailure(name, _sentence(result, path, name))
        for path, name, result in zip(paths, names, results, strict=True)
        if result.diagnosis is None
    ]
    usable = [
        (path, name, result)
        for path, name, result in zip(paths, names, results, strict=True)
        if result.diagnosis is not None
    ]
    if not usable:
        usage = all(result.exit_code == EXIT_USAGE for result in results)
        error = InfprofError(f"None of the {len(results)} inputs can be used. The first: {failures[0].reason}")
        error.exit_code = EXIT_USAGE if usage else error.exit_code
        raise error
    for failure in failures:
        problems.append(Problem("file-failed", f"{failure.file} is left out: {failure.reason}"))
    files = named(usable, problems)
    world_size, absent = missing_ranks(files, problems)
    seats = _seats(files)
    clocks = align([seat.participant for seat in seats])
    found = arrivals([seat.participant for seat in seats], clocks)
    late = stragglers(
        found,
        [seat.participant for seat in seats],
        [seat.label for seat in seats],
        sum(_comm_ns(seat) for i, seat in enumerate(seats) if (found.who == i).any()),
        rules.thresholds,
    )
    if len(found):
        _add_waits(seats, found, rules, options)
    _note_alignment(seats, clocks, problems)
    focus = _focus(files)
    participants, labels = [seat.participant for seat in seats], [seat.label for seat in seats]
    traffic = group_traffic(participants, labels)
    job = Job(
        focus=focus.label,
        world_size=world_size,
        missing_ranks=absent,
        alignment=_alignment_words(seats, clocks),
        error_ns=_error_ns(clocks),
        ranks=_rows(files, seats, clocks, found),
        arrivals=arrival_rows(found) if len(found) else [],
        stragglers=late,
        traffic=traffic,
        matrix=matrix(traffic, participants),
        failures=failures,
    )
    return _assembled(files, focus, job, problems)


@dataclass
class _Seat:
    """One device of one file in the comparison."""

    file: RankFile
    label: str
    device: int
    participant: Participant

    @property
    def diagnosis(self) -> Diagnosis:
        assert self.file.result.diagnosis is not None
        return self.file.result.diagnosis


def _sentence(result: FileResult, path: Path, name: str) -> str:
    """The reason without the folders that lead to the file."""
    text = result.failure or "it holds no diagnosis."
    return text.replace(str(path.absolute()), name).replace(str(path), name)


def _seats(files: Sequence[RankFile]) -> list[_Seat]:
    out = []
    for number, one in enumerate(files):
        columns = [] if one.twice else one.result.collectives
        for c in columns:
            label = one.label if len(columns) == 1 else f"{one.label} GPU {c.device}"
            participant = Participant(number, c, one.result.clock_start_unix_ns)
            out.append(_Seat(one, label, c.device, participant))
    return out


def _comm_ns(seat: _Seat) -> int:
    return int(device_measures(seat.diagnosis, seat.device).value("comm_total_ns") or 0)


def _add_waits(seats: Sequence[_Seat], found: Arrivals, rules: RuleSet, options: Options) -> None:
    waited = np.bincount(found.who, found.wait, minlength=len(seats)).astype(np.int64)
    compared = np.bincount(found.who, minlength=len(seats))
    for i, seat in enumerate(seats):
        if compared[i]:
            add_waits(seat.diagnosis, seat.device, int(waited[i]), rules, options.scenario)


# --- clocks in words ------------------------------------------------------------------------------------------------


_HOW = {
    alignment.SAME_FILE: "share the clock of one file",
    alignment.WALL_CLOCK: "by the wall clock, which the ends of common collectives confirm",
    alignment.COLLECTIVES: "by the ends of common collectives",
}


def _alignment_words(seats: Sequence[_Seat], clocks: Sequence[Clock]) -> str:
    parts = []
    for how, words in _HOW.items():
        count = sum(clock.how == how for clock in clocks)
        if count:
            parts.append(f"{count} {words}")
    if not parts:
        return "Clocks are not aligned: nothing is claimed about who arrives when."
    references = [seat.label for seat, clock in zip(seats, clocks, strict=True) if clock.how == alignment.REFERENCE]
    lone = sum(clock.how == alignment.NOT_ALIGNED for clock in clocks)
    more = f"; {lone} not aligned" if lone else ""
    return f"Clocks of ranks aligned to {', '.join(references[:_MOST_NAMED])}: {', '.join(parts)}{more}."


def _error_ns(clocks: Sequence[Clock]) -> int | None:
    errors = [c.error_ns for c in clocks if c.how not in (alignment.REFERENCE, alignment.NOT_ALIGNED)]
    return max(errors, default=None)


def _note_alignment(seats: Sequence[_Seat], clocks: Sequence[Clock], problems: list[Problem]) -> None:
    lone = [seat for seat, clock in zip(seats, clocks, strict=True) if clock.how == alignment.NOT_ALIGNED]
    if not lone:
        return
    silent = [seat for seat in lone if not len(seat.participant.collectives)]
    which = ", ".join(seat.label for seat in lone[:_MOST_NAMED])
    more = f" and {len(lone) - _MOST_NAMED} more" if len(lone) > _MOST_NAMED else ""
    why = (
        "no collective was recorded"
        if len(silent) == len(lone)
        else f"fewer than {alignment.MIN_COMMON} collectives are surely the same as another rank's, or their ends do not agree"
    )
    problems.append(
        Problem(
            "clocks-not-aligned",
            f"{which}{more}: not aligned with the other ranks, because {why}. Nothing is said of when they arrive.",
            len(lone),
        )
    )


# --- the joint result -----------------------------------------------------------------------------------------------


def _focus(files: Sequence[RankFile]) -> RankFile:
    """The file with the largest recoverable time on a device; those that can be judged come first."""

    def key(one: RankFile) -> tuple[bool, int]:
        diagnosis = one.result.diagnosis
        assert diagnosis is not None
        lost = [recoverable_ns(device_measures(diagnosis, d.id)) for d in diagnosis.devices]
        return diagnosis.verdict.cls != "unusable", max(lost, default=0)

    # Of equals the first.
    return max(files, key=key)


def _rows(files: Sequence[RankFile], seats: Sequence[_Seat], clocks: Sequence[Clock], found: Arrivals) -> list[RankRow]:
    rows = []
    for one in files:
        mine = [i for i, seat in enumerate(seats) if seat.file is one]
        rows += [_row(seats[i], clocks[i], found, i) for i in mine] or [_lone_row(one)]
    return rows


def _lone_row(one: RankFile) -> RankRow:
    diagnosis = one.result.diagnosis
    assert diagnosis is not None
    device = diagnosis.devices[0].id if len(diagnosis.devices) == 1 else None
    measures = device_measures(diagnosis, device)
    verdict = diagnosis.verdict
    return RankRow(
        label=one.label,
        rank=one.rank,
        node=one.node,
        file=one.file,
        device=device,
        cls=verdict.cls,
        cause=verdict.cause,
        window_ns=diagnosis.window.duration_ns,
        busy_ratio=measures.value("busy_ratio"),
        exposed_comm_ns=_whole(measures.value("exposed_comm_ns")),
        comm_total_ns=_whole(measures.value("comm_total_ns")),
        aligned=alignment.NOT_ALIGNED,
    )


def _row(seat: _Seat, clock: Clock, found: Arrivals, number: int) -> RankRow:
    row = _lone_row(seat.file)
    measures = device_measures(seat.diagnosis, seat.device)
    verdict = next((d.verdict for d in seat.diagnosis.devices if d.id == seat.device), seat.diagnosis.verdict)
    row = replace(
        row,
        label=seat.label,
        device=seat.device,
        cls=verdict.cls,
        cause=verdict.cause,
        busy_ratio=measures.value("busy_ratio"),
        exposed_comm_ns=_whole(measures.value("exposed_comm_ns")),
        comm_total_ns=_whole(measures.value("comm_total_ns")),
        aligned=clock.how,
    )
    if clock.how == alignment.NOT_ALIGNED:
        return row
    row.offset_ns, row.common_collectives = clock.offset_ns, clock.common
    row.drift_ppm = round(clock.drift * 1e6, 3) if clock.drift else None
    row.error_ns = clock.error_ns
    mine = found.who == number
    if mine.any():
        p50, p95 = np.quantile(found.late[mine], (0.5, 0.95))
        row.compared_collectives = int(mine.sum())
        row.waited_ns = int(found.wait[mine].sum())
        row.lateness_p50_ns, row.lateness_p95_ns = round(float(p50)), round(float(p95))
        row.last_count = int((found.last == number).sum())
    return row


def _whole(value: float | int | None) -> int | None:
    return None if value is None else int(value)


def _assembled(files: Sequence[RankFile], focus: RankFile, job: Job, problems: list[Problem]) -> Diagnosis:
    ranks = [one.result.diagnosis for one in files if one.result.diagnosis is not None]
    chosen = focus.result.diagnosis
    assert chosen is not None
    for one, diagnosis in zip(files, ranks, strict=True):
        diagnosis.provenance = replace(diagnosis.provenance, inputs=[one.file])
    verdict = replace(chosen.verdict, sentence=chosen.verdict.sentence + _of_others(files, focus, job.stragglers))
    return replace(
        chosen,
        verdict=verdict,
        problems=[*problems, *chosen.problems, *_problems_of_others(files, focus)],
        provenance=_provenance(chosen, ranks),
        ranks=ranks,
        job=job,
    )


def _of_others(files: Sequence[RankFile], focus: RankFile, late: Stragglers) -> str:
    """Whose figures these are, how the others differ, and who is late: behind the verdict's own sentence."""
    if len(files) == 1:
        return ""
    which = f"{focus.label} of" if focus.rank is not None else f"{focus.label}, one of"
    text = f" This is {which} {len(files)}"
    by_class: dict[tuple[str, str | None], list[str]] = {}
    for one in files:
        assert one.result.diagnosis is not None
        v: Verdict = one.result.diagnosis.verdict
        by_class.setdefault((v.cls, v.cause), []).append(one.label)
    assert focus.result.diagnosis is not None
    text += ", which loses most" if focus.result.diagnosis.verdict.cls != "unusable" else ""
    same = by_class.pop((focus.result.diagnosis.verdict.cls, focus.result.diagnosis.verdict.cause))
    if not by_class:
        text += "; the others have the same class." if len(same) > 1 else "."
    else:
        parts = [
            f"{_few(names)}: {cls}/{cause}" if cause else f"{_few(names)}: {cls}"
            for (cls, cause), names in by_class.items()
        ]
        text += f"; {', '.join(parts)}."
    return text + (f" {late.sentence}" if late.labels else "")


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _problems_of_others(files: Sequence[RankFile], focus: RankFile) -> list[Problem]:
    """What is said of other ranks and not of the one whose figures are shown: each code once, with its ranks."""
    assert focus.result.diagnosis is not None
    known = {p.code for p in focus.result.diagnosis.problems}
    held: dict[str, list[tuple[str, Problem]]] = {}
    for one in files:
        if one is focus or one.result.diagnosis is None:
            continue
        for problem in one.result.diagnosis.problems:
            if problem.code not in known:
                held.setdefault(problem.code, []).append((one.label, problem))
    out = []
    for code, said in held.items():
        names = list(dict.fromkeys(label for label, _ in said))
        out.append(Problem(code, f"{_few(names)}: {said[0][1].message}", said[0][1].count))
    return out


def _provenance(chosen: Diagnosis, ranks: Sequence[Diagnosis]) -> Provenance:
    inputs = [name for diagnosis in ranks for name in diagnosis.provenance.inputs]
    return replace(chosen.provenance, inputs=inputs)
