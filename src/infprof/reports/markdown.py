"""The diagnosis as GitHub-flavoured Markdown, to paste in an issue: tables, and names that cannot break out of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infprof.reports import format as fmt
from infprof.reports import labels, layers_rows, ranks_rows, steps_rows
from infprof.reports.telemetry_lines import telemetry_lines

if TYPE_CHECKING:
    from infprof.results import Diagnosis, Finding

# What starts something in Markdown or HTML in the middle of a line; a backslash before it makes it plain text. "@" is
# not among what a backslash protects, so a name like "@team" gets a zero-width joiner instead and notifies nobody.
_SPECIAL = re.compile(r"([\\`*\[\]<>#|~$]|(?<![^\W_])_|_(?![^\W_]))")
_MENTION = re.compile(r"@(?=\w)")
_LINE_START = re.compile(r"^([-+=]|\d+[.)](?=\s|$))")

_MOST_INPUTS = 8


@dataclass(frozen=True)
class MarkdownOptions:
    """How much of the long tables is shown, so that the text still fits in an issue."""

    kernels: int = 10
    problems: int = 20
    ranks: int = 16
    by_layer: bool = False


def render(diagnosis: Diagnosis, options: MarkdownOptions | None = None) -> str:
    """The report as Markdown with a final newline."""
    options = options or MarkdownOptions()
    blocks = [
        *_verdict(diagnosis),
        *_time(diagnosis),
        *_job(diagnosis, options),
        *(_telemetry(diagnosis) if labels.without_timeline(diagnosis) else []),
        *_findings(diagnosis, options),
        *_phases(diagnosis),
        *([] if labels.without_timeline(diagnosis) else _telemetry(diagnosis)),
        *_missing(diagnosis),
        *_problems(diagnosis, options),
        *_window(diagnosis),
        *_kernels(diagnosis, options),
        *_work(diagnosis),
        *_copies(diagnosis),
        *_provenance(diagnosis),
    ]
    return "\n\n".join(blocks) + "\n"


def escape(text: object) -> str:
    """``text`` as plain text in a paragraph or a table cell: no markup, no HTML, no mention of anyone."""
    plain = _MENTION.sub("@\u200d", _SPECIAL.sub(r"\\\1", fmt.clean(text)).replace("&", "&amp;"))
    return _LINE_START.sub(lambda found: f"{found.group()[:-1]}\\{found.group()[-1]}", plain)


def code(text: object) -> str:
    """``text`` as a code span, fenced by more backticks than it holds; ``|`` is escaped, as tables ask for."""
    plain = fmt.clean(text).replace("|", "\\|")
    longest = max((len(run) for run in re.findall(r"`+", plain)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if longest else ""
    return f"{fence}{pad}{plain}{pad}{fence}"


def prose(text: object) -> str:
    """Text that a person wrote: escaped, with its flags and `quoted` parts as code spans."""
    return "".join(code(piece) if is_code else _keep_spaces(piece) for piece, is_code in fmt.prose(text))


def _keep_spaces(piece: str) -> str:
    return f"{' ' * (piece[:1] == ' ')}{escape(piece)}{' ' * (piece[-1:] == ' ' and bool(piece.strip()))}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], right_from: int = 1) -> str:
    """A table; columns from ``right_from`` on hold numbers and are right-aligned."""
    rule = ["---:" if number >= right_from else "---" for number in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def _verdict(diagnosis: Diagnosis) -> list[str]:
    verdict = diagnosis.verdict
    confidence = labels.confidence_words(verdict.confidence)
    blocks = [f"## {escape(labels.diagnosis_title(diagnosis))}", prose(verdict.sentence)]
    if verdict.second:
        blocks.append(f"The rest of the time: {escape(labels.second_title(verdict.second))}.")
    blocks.append(
        f"Confidence {confidence}; evidence: {escape(labels.rank_words(verdict.rank, labels.without_timeline(diagnosis)))}."
    )
    if verdict.why_not:
        blocks.append(f"**Missing:** {prose(verdict.why_not)}")
    remedies = fmt.verdict_remedies(diagnosis)
    if remedies:
        blocks.append("\n".join(_remedy(r.stack, r.change, r.trade_off) for r in remedies))
    return blocks


def _time(diagnosis: Diagnosis) -> list[str]:
    """One row per slice and two columns per device."""
    devices = [device for device in diagnosis.devices if device.slices]
    window_ns = diagnosis.window.duration_ns
    if not devices or window_ns <= 0:
        return []
    shares = [{(row.kind, row.cause): row for row in fmt.slice_shares(d.slices, window_ns)} for d in devices]
    order = fmt.slice_order(devices)
    header = ["slice", *(cell for d in devices for cell in (escape(fmt.device_label(d)), "time"))]
    rows = []
    for key in order:
        cells = [escape(labels.slice_style(*key).label)]
        for share in shares:
            row = share.get(key)
            cells += [fmt.percent(row.ratio if row else 0.0), fmt.duration(row.ns if row else 0)]
        rows.append(cells)
    blocks = ["### Where the time went", _table(header, rows)]
    titles = [labels.verdict_title(device.verdict) for device in devices]
    if len(set(titles)) > 1:
        lines = (f"- GPU {d.id}: {escape(title)}" for d, title in zip(devices, titles, strict=True))
        blocks.append("\n".join(lines))
    return blocks


def _job(diagnosis: Diagnosis, options: MarkdownOptions) -> list[str]:
    """The ranks of a job beside each other, and how far apart they arrive."""
    job = diagnosis.job
    if job is None:
        return []
    rows = ranks_rows.shown_ranks(job, options.ranks)
    cells = [[escape(value.text) for value in row] for row in rows]
    more = len(job.ranks) - len(rows)
    blocks = [
        "### Ranks",
        f"{escape(ranks_rows.job_note(job))}." + (f" {more} more ranks are in the JSON report." if more else ""),
        _table(ranks_rows.RANK_COLUMNS, cells),
        "\n".join(f"- {prose(line)}" for line in (*ranks_rows.job_lines(job), ranks_rows.RANK_NOTE)),
    ]
    for columns, values in (
        (ranks_rows.ARRIVAL_COLUMNS, ranks_rows.arrival_values(job)),
        (ranks_rows.TRAFFIC_COLUMNS, ranks_rows.traffic_values(job)),
    ):
        if values:
            blocks.append(_table(columns, [[escape(value.text) for value in row] for row in values[: options.kernels]]))
    return blocks


def _findings(diagnosis: Diagnosis, options: MarkdownOptions) -> list[str]:
    if not diagnosis.findings:
        return []
    window_ns = diagnosis.window.duration_ns
    blocks = ["### Findings" if diagnosis.scenario is None else f"### Findings, {labels.findings_order(diagnosis)}"]
    if options.by_layer:
        for group in layers_rows.by_layer(diagnosis):
            blocks.append(f"#### {escape(layers_rows.heading(group, window_ns)).capitalize()}")
            for number, finding in group.findings:
                blocks += _finding(number, finding, window_ns)
        return blocks
    for number, finding in enumerate(diagnosis.findings, 1):
        blocks += _finding(number, finding, window_ns)
    return blocks


def _finding(number: int, finding: Finding, window_ns: int) -> list[str]:
    cost = fmt.cost_text(finding.cost, window_ns)
    facts = f"{escape(finding.severity)}, {cost}, {escape(finding.layer)} layer, rule {code(finding.rule)}"
    blocks = [f"**{number}. {escape(finding.title)}** ({facts})"]
    if finding.why:
        blocks.append(prose(finding.why))
    lines = []
    evidence = fmt.evidence_texts(finding.evidence, 4, finding.cost)
    if evidence:
        lines.append(f"- evidence: {escape('; '.join(evidence))}")
    for where in finding.where[:3]:
        place = fmt.where_place(where)
        argument = code(f"--window {fmt.window_argument(where.start_ns, where.end_ns)}")
        lines.append(f"- where: {argument}{f' {code(place)}' if place else ''}")
    lines += [_remedy(r.stack, r.change, r.trade_off) for r in finding.remedies]
    basis = f" ({prose(finding.gain.basis)})" if finding.gain.basis else ""
    lines.append(f"- gain: {escape(fmt.gain_text(finding.gain))}{basis}")
    lines += [f"- look closer: {code(command)}" for command in finding.commands]
    lines += [f"- note: {prose(note)}" for note in finding.notes]
    return [*blocks, "\n".join(lines)]


def _remedy(stack: str, change: str, trade_off: str | None) -> str:
    but = f" (trade-off: {prose(trade_off)})" if trade_off else ""
    return f"- change, {escape(labels.STACKS.get(stack, stack))}: {prose(change)}{but}"


def _phases(diagnosis: Diagnosis) -> list[str]:
    blocks = []
    rows = steps_rows.phase_rows(diagnosis)
    alone = steps_rows.one_phase(diagnosis)
    if alone is not None:
        blocks += ["### Steps", prose(alone)]
    elif rows:
        cells = [
            [
                escape(r.name),
                escape(r.limit),
                fmt.count(r.count),
                *("" if ns is None else fmt.duration(ns) for ns in (r.total_ns, r.p50_ns, r.p95_ns, r.p99_ns)),
            ]
            for r in rows
        ]
        head = ("phase", "limited by", "count", "total", "p50", "p95", "p99")
        blocks += ["### Phases and steps", _table(head, cells, right_from=2)]
    slow = "\n".join(f"- {prose(line)}" for line in steps_rows.slow_lines(diagnosis))
    blocks += [slow] if slow else []
    lines = fmt.whatif_lines(diagnosis)
    if lines:
        # The lines carry their own numbers, which make a list of them.
        blocks += [
            "### What if",
            f"{fmt.whatif_note(diagnosis).capitalize()}.",
            "\n".join(f"{line.split(' ', 1)[0]} {escape(line.split(' ', 1)[1])}" for line in lines),
        ]
    return blocks


def _telemetry(diagnosis: Diagnosis) -> list[str]:
    areas = telemetry_lines(diagnosis)
    if not areas:
        return []
    return ["### Telemetry", "\n".join(f"- **{area}**: {escape(' · '.join(texts))}" for area, texts in areas.items())]


def _missing(diagnosis: Diagnosis) -> list[str]:
    groups = fmt.rules_by_need(diagnosis.not_evaluated)
    if not groups:
        return []
    lines = (f"- needs {escape(needs)}: {', '.join(code(rule) for rule in rules)}" for needs, rules in groups.items())
    return ["### Not evaluated", "\n".join(lines)]


def _problems(diagnosis: Diagnosis, options: MarkdownOptions) -> list[str]:
    if not diagnosis.problems:
        return []
    lines = []
    for problem in diagnosis.problems[: options.problems]:
        lines.append(f"- {code(problem.code)} {prose(fmt.problem_text(problem))}")
    left = len(diagnosis.problems) - options.problems
    if left > 0:
        lines.append(f"- {left} more in the JSON report")
    return ["### Problems in the data", "\n".join(lines)]


def _window(diagnosis: Diagnosis) -> list[str]:
    window = diagnosis.window
    if window.duration_ns <= 0:
        return []
    if not diagnosis.devices:
        return ["### Window", escape(fmt.window_text(window))]
    argument = code(fmt.window_argument(window.start_ns, window.end_ns))
    text = f"{argument} of the trace, {escape(fmt.window_text(window))}."
    left_out = "; ".join(f"{escape(item.what)}, {fmt.duration(item.ns)}" for item in window.left_out)
    return ["### Window", f"{text} Left out: {left_out}." if left_out else text]


def _kernels(diagnosis: Diagnosis, options: MarkdownOptions) -> list[str]:
    rows = [
        [
            code(fmt.shorten(fmt.short_kernel_name(row.name), 80)),
            str(row.device),
            fmt.count(row.calls),
            fmt.duration(row.total_ns),
            fmt.duration(row.mean_ns),
            fmt.percent(row.share),
        ]
        for row in diagnosis.kernel_table[: options.kernels]
    ]
    if not rows:
        return []
    return ["### Top kernels", _table(("kernel", "GPU", "calls", "total", "mean", "share"), rows)]


def _work(diagnosis: Diagnosis) -> list[str]:
    rows = [
        [
            escape(fmt.clean(f"{row.kind}: {row.reason}" if not row.calls else row.kind)),
            str(row.device),
            fmt.precision(row),
            fmt.percent(row.share),
            fmt.flop_rate(row.flop_per_s),
            fmt.byte_rate(row.bytes_per_s),
            fmt.of_roof(row),
        ]
        for row in fmt.class_rows(diagnosis)
    ]
    if not any(row.calls for row in fmt.class_rows(diagnosis)):
        return []
    head = ("class", "GPU", "precision", "share", "FLOP rate", "byte rate", "of the nearer roof")
    phases = "\n".join(f"- {escape(line)}" for line in fmt.phase_lines(diagnosis))
    return ["### Counted work", _table(head, rows), *([phases] if phases else [])]


def _copies(diagnosis: Diagnosis) -> list[str]:
    rows = [
        [
            escape(labels.COPY_KINDS.get(copy.kind, copy.kind)),
            str(device.id),
            fmt.count(copy.count),
            fmt.size(copy.bytes),
            fmt.duration(copy.total_ns),
            fmt.byte_rate(copy.bytes_per_s),
            fmt.duration(copy.exposed_ns),
            fmt.size(copy.pageable_bytes),
        ]
        for device in diagnosis.devices
        for copy in device.copies
    ]
    if not rows:
        return []
    return ["### Copies", _table(("copy", "GPU", "count", "bytes", "total", "rate", "exposed", "pageable"), rows)]


def _provenance(diagnosis: Diagnosis) -> list[str]:
    source = diagnosis.provenance
    tool = " ".join(part for part in (source.tool, source.tool_version) if part)
    inputs = ", ".join(code(name) for name in source.inputs[:_MOST_INPUTS])
    inputs += f" and {len(source.inputs) - _MOST_INPUTS} more" if len(source.inputs) > _MOST_INPUTS else ""
    return [f"infprof {escape(source.infprof_version)}, from {escape(tool)}{f': {inputs}' if inputs else ''}"]
