"""The diagnosis as text for a terminal: the verdict, where the time went and the first finding in the first 24 lines.

The same lines serve a terminal (colours) and a pipe (plain text): colour carries nothing that the words do not say.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal, TextIO

from infprof.reports import format as fmt
from infprof.reports import labels, layers_rows, ranks_rows, steps_rows
from infprof.reports.telemetry_lines import telemetry_lines
from infprof.stack import stack_of

if TYPE_CHECKING:
    from rich.console import Console

    from infprof.results import DeviceResult, Diagnosis, Finding, Remedy, Where

_BAR = "█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_SEVERITY_STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "bold blue"}
# Beyond this, numbers and their labels stand too far apart to be read as one row.
_MAX_WIDTH = 110
_MIN_WIDTH = 60
_LABEL = 10
# Findings of no more confidence say why; the reason is their last note.
_DOUBTFUL = 0.5
# Of many devices the ones that lose most are listed: the first finding must still fit on the first screen.
_DEVICE_LINES = 6
_RANK_LINES = 8
_SHORT_NAME = 12
# From so many columns on a table has room for every figure.
_WIDE = 100

# A column of a table: alignment, and width or None for what is left.
_Columns = tuple[tuple[Literal["left", "right"], "int | None"], ...]
# Classes with a smaller share of the kernel time are left to the other reports.
_SMALL_WORK = 0.005
_WORK_FIGURES: _Columns = (("right", 8), ("right", 14), ("right", 10), ("right", 18))
_FIGURES: _Columns = (("right", 7), ("right", 8))


@dataclass(frozen=True)
class TerminalOptions:
    """``color`` is a colour system of rich, None for plain text; the first ``full_findings`` are shown whole."""

    width: int = 80
    color: Literal["standard", "256", "truecolor"] | None = None
    full_findings: int = 3
    all_changes: bool = False
    by_layer: bool = False
    kernels: int = 5

    @classmethod
    def for_stream(cls, stream: TextIO, environ: Mapping[str, str] = os.environ) -> TerminalOptions:
        """Options that fit ``stream``: its width, and colours where it is a terminal that wants them (NO_COLOR)."""
        from rich.console import Console

        if not stream.isatty():
            return cls()
        console = Console(file=stream, _environ=environ)
        system = console.color_system
        if environ.get("NO_COLOR") or system not in ("standard", "256", "truecolor"):
            return cls(width=console.width)
        return cls(width=console.width, color=system)  # type: ignore[arg-type]  # narrowed by the test above


def render(diagnosis: Diagnosis, options: TerminalOptions | None = None) -> str:
    """The report as text with a final newline; no line is wider than ``options.width`` (from 60 to 110 columns)."""
    from rich.console import Console

    options = options or TerminalOptions()
    buffer = StringIO()
    console = Console(
        file=buffer,
        width=min(max(options.width, _MIN_WIDTH), _MAX_WIDTH),
        color_system=options.color,
        force_terminal=options.color is not None,
        legacy_windows=False,
        markup=False,
        highlight=False,
        emoji=False,
        _environ={},
    )
    for section in (
        _verdict,
        _time,
        _job,
        _verdict_change,
        *((_telemetry, _findings) if labels.without_timeline(diagnosis) else (_findings, _phases, _whatif, _telemetry)),
        _missing,
        _problems,
        _window,
        _kernels,
        _work,
        _copies,
    ):
        section(console, diagnosis, options)
    lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def _verdict(console: Console, diagnosis: Diagnosis, options: TerminalOptions) -> None:
    verdict = diagnosis.verdict
    console.print(_text(labels.diagnosis_title(diagnosis), "bold"))
    _line(console, fmt.plain_prose(verdict.sentence))
    if verdict.second:
        _line(console, f"The rest of the time: {fmt.clean(labels.second_title(verdict.second))}.")
    confidence = labels.confidence_words(verdict.confidence)
    rank = labels.rank_words(verdict.rank, labels.without_timeline(diagnosis))
    _line(console, f"Confidence {confidence}; evidence: {rank}.", style="dim")
    if verdict.why_not:
        _field(console, "missing", [fmt.plain_prose(verdict.why_not)], indent=2)


def _time(console: Console, diagnosis: Diagnosis, options: TerminalOptions) -> None:
    """Where the time went: one device or two with bars side by side; of more, the one that loses most, then all."""
    window_ns = diagnosis.window.duration_ns
    devices = [device for device in diagnosis.devices if device.slices]
    if not devices or window_ns <= 0:
        return
    note = f"window {fmt.duration(window_ns)}"
    if len(devices) == 1:
        _heading(console, "Where the time went", f"{note}, {fmt.device_label(devices[0])}")
        _one_device(console, devices[0], window_ns)
    elif len(devices) == 2:
        _heading(console, "Where the time went", note)
        _two_devices(console, devices, window_ns)
    else:
        worst = max(devices, key=fmt.lost_ns)
        _heading(console, "Where the time went", f"{note}, {fmt.device_label(worst)}, which loses most")
        _one_device(console, worst, window_ns, rows=5)
        _device_lines(console, devices, window_ns)
    _device_verdicts(console, diagnosis)


def _one_device(console: Console, device: DeviceResult, window_ns: int, rows: int = 7) -> None:
    table = _grid(("left", 27), ("right", 8), ("right", 9), ("left", None))
    width = console.width - 2 - 27 - 8 - 9 - 8
    for row in fmt.slice_shares(device.slices, window_ns, keep=rows):
        label, style = _slice_label(row)
        table.add_row(label, fmt.percent(row.ratio), fmt.duration(row.ns), _bar(row.ratio, width, style))
    _print_grid(console, table)


def _two_devices(console: Console, devices: list[DeviceResult], window_ns: int) -> None:
    """One row per slice that either device has, so that the two can be compared along the line."""
    shares = [{(r.kind, r.cause): r for r in fmt.slice_shares(d.slices, window_ns)} for d in devices]
    order = fmt.slice_order(devices)
    bar_width = (console.width - 2 - 24 - 2 * (7 + 8) - 2 * 6) // 2
    # In a narrow terminal the figures are worth more than stumps of bars.
    bars = bar_width >= 4
    table = _grid(("left", 24), *(*_FIGURES, ("left", bar_width)) * 2 if bars else _FIGURES * 2)
    table.add_row("", *(cell for d in devices for cell in (_text(f"GPU {d.id}", "bold"), *[""] * (1 + bars))))
    shown = [key for key in order[:8] if max(s[key].ratio for s in shares if key in s) >= fmt.SMALL_SLICE]
    for key in shown:
        style = labels.slice_style(*key)
        cells: list[Any] = []
        for share in shares:
            row = share.get(key)
            ratio, ns = (row.ratio, row.ns) if row else (0.0, 0)
            cells += [fmt.percent(ratio), fmt.duration(ns), *[_bar(ratio, bar_width, style.color)] * bars]
        table.add_row(_text(style.label), *cells)
    rest = [key for key in order if key not in shown]
    if rest:
        cells = []
        for share in shares:
            ns = sum(share[key].ns for key in rest if key in share)
            cells += [fmt.share(ns, window_ns), fmt.duration(ns), *[""] * bars]
        table.add_row(_text(f"other ({len(rest)} {'kind' if len(rest) == 1 else 'kinds'})"), *cells)
    _print_grid(console, table)


def _device_lines(console: Console, devices: list[DeviceResult], window_ns: int) -> None:
    table = _grid(("left", 7), ("right", 9), ("right", 9), ("right", 9), ("right", 9), ("left", None))
    table.add_row(*(_text(name, "dim") for name in ("", "compute", "comm.", "copy", "idle", "class")))
    shown = sorted(sorted(devices, key=fmt.lost_ns, reverse=True)[:_DEVICE_LINES], key=lambda device: device.id)
    for device in shown:
        parts = [
            fmt.share(sum(s.ns for s in device.slices if s.kind == kind), window_ns)
            for kind in ("compute", "exposed_communication", "exposed_copy", "idle")
        ]
        table.add_row(f"GPU {device.id}", *parts, _text(labels.verdict_title(device.verdict)))
    _print_grid(console, table)
    if len(devices) > len(shown):
        _line(console, f"{len(devices) - len(shown)} more devices lose less time than these.", style="dim")


def _device_verdicts(console: Console, diagnosis: Diagnosis) -> None:
    """A line per device where they differ; with more than two devices the table says it already."""
    if len(diagnosis.devices) != 2:
        return
    titles = [labels.verdict_title(device.verdict) for device in diagnosis.devices]
    if titles[0] != titles[1]:
        for device, title in zip(diagnosis.devices, titles, strict=True):
            _line(console, f"GPU {device.id}: {title}")


def _job(console: Console, diagnosis: Diagnosis, options: TerminalOptions) -> None:
    """The ranks of a job beside each other; of many, the late ones and those that wait most."""
    job = diagnosis.job
    if job is None:
        return
    _heading(console, "Ranks", ranks_rows.job_note(job))
    rows = ranks_rows.shown_ranks(job, _RANK_LINES)
    longest = max(len(row[0].text) for row in rows)
    # Names of files take the room of the last column.
    count = 5 if longest <= _SHORT_NAME else 4
    name = min(longest, 18)
    figures: _Columns = (("right", 6), ("right", 8), ("right", 8), ("right", 8), ("right", 7))
    figures = figures[:count]
    left = console.width - 2 - name - sum(width or 0 for _, width in figures) - 2 * (len(figures) + 1)
    table = _grid(("left", name), *figures, ("left", left))
    heads = ("", "busy", "comm.", "waits", "late", "last")[: count + 1]
    table.add_row(*(_text(label, "dim") for label in (*heads, "class")))
    for row in rows:
        label, *cells, title = (value.text for value in row)
        # Where class and cause do not fit, the class alone says more than half of both.
        title = title if len(title) <= left else re.split("[:,]", title)[0]
        table.add_row(*map(_text, (fmt.shorten(label, name), *cells[:count], title)))
    _print_grid(console, table)
    if len(job.ranks) > len(rows):
        _line(console, f"{len(job.ranks) - len(rows)} more ranks are in the HTML and JSON reports.", style="dim")
    for line in ranks_rows.job_lines(job):
        _line(console, fmt.plain_prose(line))
    _line(console, f"comm.: exposed communication; {ranks_rows.RANK_NOTE}", style="dim")


def _verdict_change(console: Console, diagnosis: Diagnosis, options: TerminalOptions) -> None:
    remedies = fmt.verdict_remedies(diagnosis)
    if remedies:
        _heading(console, "What to change")
        for line in _changes(remedies, diagnosis.verdict.rule, _stacks(diagnosis), options):
            _line(console, line)


def _findings(console: Console, diagnosis: Diagnosis, options: TerminalOptions) -> None:
    if not diagnosis.findings:
        if diagnosis.verdict.cls != "unusable":
            _heading(console, "Findings")
            _line(console, fmt.no_findings(diagnosis))
        return
    _heading(console, "Findings", labels.findings_order(diagnosis))
    window_ns = diagnosis.window.duration_ns
    if options.by_layer:
        for group in layers_rows.by_layer(diagnosis):
            _line(console, fmt.clean(layers_rows.heading(group, window_ns)).capitalize())
            _finding_list(console, group.findings, diagnosis, options)
    else:
        _finding_list(console, list(enumerate(diagnosis.findings, 1)), diagnosis, options)


def _finding_list(
    console: Console, findings: list[tuple[int, Finding]], diagnosis: Diagnosis, options: TerminalOptions
) -> None:
    for number, finding in findings:
        _finding_title(console, number, finding, diagnosis.window.duration_ns)
        if number <= options.full_findings:
            _finding_body(console, finding, _stacks(diagnosis), options)


def _finding_title(console: Console, number: int, finding: Finding, window_ns: int) -> None:
    from rich.text import Text

    cost = fmt.cost_text(finding.cost, window_ns)
    severity = finding.severity.upper()
    title = fmt.clean(finding.title)
    line = Text.assemble(
        f"{number}. ", (severity, _SEVERITY_STYLES.get(finding.severity, "bold")), "  ", (title, "bold")
    )
    room = console.width - line.cell_len - 2
    if len(cost) <= room:
        line.append(cost.rjust(room + 2))
        console.print(line)
    else:
        console.print(line)
        _field(console, "cost", [cost])


def _finding_body(console: Console, finding: Finding, stacks: list[str], options: TerminalOptions) -> None:
    evidence = fmt.evidence_texts(finding.evidence, 4, finding.cost)
    if evidence:
        _field(console, "evidence", [" · ".join(evidence)])
    if finding.confidence <= _DOUBTFUL and finding.doubts:
        doubt = f"{labels.confidence_words(finding.confidence)}: {fmt.plain_prose(finding.doubts[-1])}"
        _field(console, "doubt", [f"confidence {doubt}"])
    if finding.where:
        room = console.width - _LABEL - 4
        _field(console, "where", [_place(where, room) for where in finding.where[:3]])
    if finding.remedies:
        _field(console, "change", _changes(finding.remedies, finding.rule, stacks, options))
    # Where the bound comes from is for the longer reports, except that it must not look like a promise here.
    basis = fmt.clean(finding.gain.basis).partition(" Source: ")[0]
    if finding.cost.value != 0:
        _field(console, "gain", [f"{fmt.gain_text(finding.gain)}{f' ({basis})' if basis else ''}"])
    for command in finding.commands[:1]:
        _field(console, "look", [fmt.clean(command)])


def _place(where: Where, room: int) -> str:
    """A time range to paste and what is found there, on one line of ``room`` columns if the name can be cut to fit."""
    argument = f"--window {fmt.window_argument(where.start_ns, where.end_ns)}"
    without_name = fmt.where_place(replace(where, name=None))
    place = fmt.where_place(where, max(room - len(argument) - len(without_name) - 4, 12))
    return f"{argument}  {place}" if place else argument


def _stacks(diagnosis: Diagnosis) -> list[str]:
    return stack_of(diagnosis).names


def _changes(remedies: list[Remedy], rule: str | None, stacks: list[str], options: TerminalOptions) -> list[str]:
    """Two changes of the stack in use, the first of ``stacks``; else one of each. And where the others stand.

    With ``all_changes`` all of them, and what each costs.
    """
    lines: dict[str, list[str]] = {}
    for remedy in remedies:
        text = f"{fmt.clean(labels.STACKS.get(remedy.stack, remedy.stack))}: {fmt.plain_prose(remedy.change)}"
        if remedy.trade_off and options.all_changes:
            text += f" (trade-off: {fmt.plain_prose(remedy.trade_off)})"
        lines.setdefault(remedy.stack, []).append(text)
    if options.all_changes:
        return [line for stack in lines.values() for line in stack]
    own = lines.get(stacks[0], [])[:2] if stacks else []
    near = [stack[0] for name, stack in lines.items() if name in stacks]
    shown = own or near or [stack[0] for stack in lines.values()]
    left = sum(map(len, lines.values())) - len(shown)
    if rule and (left or any(remedy.trade_off for remedy in remedies)):
        shown.append(f"{f'{left} more, and the' if left else 'The'} trade-offs: infprof rules show {fmt.clean(rule)}")
    return shown


def _phases(console: Console, diagnosis: Diagnosis, options: TerminalOptions) -> None:
    rows = steps_rows.phase_rows(diagnosis, all_devices=False)
    if not rows:
        return
    alone = steps_rows.one_phase(diagnosis)
    how = steps_rows.how_found(diagnosis.steps or {})
    _heading(console, "Phases and steps" if alone is None else "Steps", f"by {how}" if how and alone is None else "")
    if alone is not None:
        _line(console, fmt.plain_prose(alone))
    else:
        _phase_table(console, rows)
    for line in steps_rows.slow_lines(diagnosis):
        _line(console, line)


def _phase_table(console: Console, rows: list[steps_rows.PhaseRow]) -> None:
    # In a narrow terminal the limit is worth more than one of three percentiles.
    wide = console.width >= _WIDE
    figures: _Columns = (("right", 6), ("right", 8), *((("right", 8),) * (3 if wide else 2)))
    name = min(max(len(row.name) for row in rows), 20)
    left = console.width - 2 - name - sum(width or 0 for _, width in figures) - 2 * (len(figures) + 1)
    table = _grid(("left", name), *figures, ("left", left))
    heads = ("", "count", "total", "p50", *(("p95",) if wide else ()), "p99", "limited by")
    table.add_row(*(_text(name, "dim") for name in heads))
    for row in rows:
        lengths = (row.p50_ns, *((row.p95_ns,) if wide else ()), row.p99_ns)
        limit = row.limit if len(row.limit) <= left else re.split("[:,]", row.limit)[0]
        cells = (
            fmt.count(row.count),
            *("" if ns is None else fmt.duration(ns) for ns in (row.total_ns, *lengths)),
            limit,
        )
        table.add_row(_text(fmt.shorten(row.name, name)), *map(_text, cells))
    _print_grid(console, table)


def _whatif(console: Console, diagnosis: Diagnosis, options: TerminalOptions) -> None:
    lines = fmt.whatif_lines(diagnosis)
    if lines:
        _heading(console, "What if", fmt.whatif_note(diagnosis))
        for line in lines:
            for part in textwrap.wrap(line, console.width - 2, subsequent_indent="   "):
                _line(console, part)


def _telemetry(console: Console, diagnosis: Diagnosis, options: TerminalOptions) -> None:
    areas = telemetry_lines(diagnosis)
    if not areas:
        return
    _heading(console, "Telemetry", "" if labels.without_timeline(diagnosis) else "of the same run")
    for area, texts in areas.items():
        _field(console, area, [" · ".join(texts)], indent=2)


def _missing(console: Console, diagnosis: Diagnosis, options: TerminalOptions) -> None:
    groups = fmt.rules_by_need(diagnosis.not_evaluated)
    if not groups:
        return
    _heading(console, "Not evaluated")
    for needs, rules in groups.items():
        more = f" and {len(rules) - 4} more" if len(rules) > 4 else ""
        _line(console, f"needs {needs}: {', '.join(rules[:4])}{more}")


def _problems(console: Console, diagnosis: Diagnosis, options: TerminalOptions) -> None:
    if not diagnosis.problems:
        return
    _heading(console, "Problems in the data")
    for problem in diagnosis.problems:
        _line(console, f"{fmt.clean(problem.code)}: {fmt.plain_prose(fmt.problem_text(problem))}")


def _window(console: Console, diagnosis: Diagnosis, options: TerminalOptions) -> None:
    window = diagnosis.window
    if window.duration_ns <= 0:
        return
    _heading(console, "Window")
    if not diagnosis.devices:
        _line(console, fmt.window_text(window))
        return
    argument = fmt.window_argument(window.start_ns, window.end_ns)
    _line(console, f"{argument} of the trace, {fmt.window_text(window)}")
    for item in window.left_out:
        _line(console, f"left out: {fmt.clean(item.what)}, {fmt.duration(item.ns)}")
    _line(console, fmt.plain_prose(fmt.WINDOW_HINT), style="dim")


def _kernels(console: Console, diagnosis: Diagnosis, options: TerminalOptions) -> None:
    rows = diagnosis.kernel_table[: options.kernels]
    if not rows:
        return
    left = len(diagnosis.kernel_table) - len(rows)
    _heading(console, "Top kernels", f"{left} more in the HTML and JSON reports" if left else "")
    name_width = console.width - 2 - 4 * (8 + 2)
    table = _grid(("left", name_width), ("right", 8), ("right", 8), ("right", 8), ("right", 8))
    table.add_row(*(_text(name, "dim") for name in ("kernel", "calls", "total", "mean", "share")))
    several = len(diagnosis.devices) > 1
    for row in rows:
        device = f" (GPU {row.device})" if several else ""
        name = fmt.shorten(fmt.short_kernel_name(row.name), name_width - len(device)) + device
        figures = (fmt.count(row.calls), fmt.duration(row.total_ns), fmt.duration(row.mean_ns), fmt.percent(row.share))
        table.add_row(_text(name), *figures)
    _print_grid(console, table)


def _work(console: Console, diagnosis: Diagnosis, options: TerminalOptions) -> None:
    shown = [row for row in fmt.class_rows(diagnosis) if row.share >= _SMALL_WORK]
    rows = [row for row in shown if row.calls]
    if not rows:
        return
    _heading(console, "Counted work", "by kernel class, from the shapes of operators")
    table = _grid(("left", console.width - 2 - 8 - 14 - 10 - 18 - 4 * 2), *_WORK_FIGURES)
    table.add_row(*(_text(name, "dim") for name in ("class", "share", "FLOP rate", "byte rate", "of the nearer roof")))
    several = len(diagnosis.devices) > 1
    for row in rows[: options.kernels + 3]:
        name = f"{fmt.clean(row.kind)} (GPU {row.device})" if several else fmt.clean(row.kind)
        figures = (fmt.percent(row.share), fmt.flop_rate(row.flop_per_s), fmt.byte_rate(row.bytes_per_s))
        table.add_row(_text(name), *figures, fmt.of_roof(row))
    _print_grid(console, table)
    for line in fmt.phase_lines(diagnosis):
        _line(console, line)
    for row in shown:
        if not row.calls:
            _line(console, f"not counted, {fmt.percent(row.share)}: {fmt.clean(row.reason)}", style="dim")


def _copies(console: Console, diagnosis: Diagnosis, options: TerminalOptions) -> None:
    rows = [(device, copy) for device in diagnosis.devices for copy in device.copies]
    if not rows:
        return
    _heading(console, "Copies")
    table = _grid(("left", 22), ("right", 9), ("right", 9), ("right", 9), ("right", 10), ("right", 9))
    table.add_row(*(_text(name, "dim") for name in ("", "count", "bytes", "total", "rate", "exposed")))
    several = len(diagnosis.devices) > 1
    for device, copy in rows:
        label = labels.COPY_KINDS.get(copy.kind, copy.kind) + (f" (GPU {device.id})" if several else "")
        table.add_row(
            _text(label),
            fmt.count(copy.count),
            fmt.size(copy.bytes),
            fmt.duration(copy.total_ns),
            "–" if copy.bytes_per_s is None else fmt.byte_rate(copy.bytes_per_s),
            fmt.duration(copy.exposed_ns),
        )
    _print_grid(console, table)
    pageable = sum(copy.pageable_bytes or 0 for _, copy in rows)
    if pageable:
        _line(console, f"{fmt.size(pageable)} of this from or to pageable memory.")


def _slice_label(row: fmt.SliceShare) -> tuple[Any, str]:
    style = labels.slice_style(row.kind, row.cause)
    label = f"{style.label} ({len(row.folded)} kinds)" if row.folded else style.label
    return _text(label), style.color


def _bar(ratio: float, width: int, color: str) -> Any:
    """A bar of eighths of a column, at least a sliver for anything above nothing."""
    eighths = max(round(ratio * width * 8), 1) if ratio > 0 else 0
    whole, rest = divmod(eighths, 8)
    return _text(_BAR * whole + (_EIGHTHS[rest] if rest else ""), color)


def _text(text: str, style: str = "") -> Any:
    """Text that is never read as markup, whatever a name in the trace holds."""
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _heading(console: Console, title: str, note: str = "") -> None:
    from rich.text import Text

    line = Text.assemble((title, "bold cyan"))
    if note:
        line.append(f"  {fmt.shorten(note, console.width - len(title) - 2)}", style="dim")
    console.print()
    console.print(line)


def _line(console: Console, text: str, style: str = "") -> None:
    """A paragraph, two columns in."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding(Text(text, style=style, overflow="fold"), (0, 0, 0, 2)))


def _field(console: Console, label: str, lines: Iterable[str], indent: int = 3) -> None:
    """A labelled block: the label once, its lines beside it, long ones wrapped under themselves."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL - 1)
    table.add_column(overflow="fold")
    for number, line in enumerate(lines):
        table.add_row(Text("" if number else label, style="dim"), Text(line, overflow="fold"))
    console.print(Padding(table, (0, 0, 0, indent)))


def _grid(*columns: tuple[Literal["left", "right"], int | None]) -> Any:
    """A table without lines."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    for justify, width in columns:
        table.add_column(justify=justify, width=width, no_wrap=True, overflow="ellipsis")
    return table


def _print_grid(console: Console, table: Any) -> None:
    from rich.padding import Padding

    console.print(Padding(table, (0, 0, 0, 2)))
