"""The diagnosis as one HTML file that opens offline: the answer as plain HTML, charts and tables below it.

The page makes no request at all. Plotly travels inside it (gzip, base64; about 2 MB) and is inflated by the browser
after the page has loaded; without a timeline, or with ``charts=False``, it is left out and the file is small. A content
security policy names the hashes of the two scripts, so text from a trace could not run even if it escaped its quoting.

The timeline that ``Diagnosis.timeline`` holds, and the chart shows::

    {
      "start_ns": int, "end_ns": int,      # what the columns cover, on the trace's clock; the window or more
      "columns": N,                        # of equal length (end_ns - start_ns) / N; a few hundred
      "devices": [{
        "id": int,                         # as in Diagnosis.devices
        "series": [{"kind": str, "cause": str | None, "share": [N numbers from 0 to 1]}]
      }],                                  # kind and cause as in slices; the shares of a column add up to 1,
                                           # less what of the column lies outside the window
      "counters": [{"device": int, "name": str, "unit": str, "values": [N numbers or None]}]
    }

Series without any time may be left out. A counter column is the mean of its samples, None where there is none.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from infprof.measures.names import MEASURES
from infprof.reports import format as fmt
from infprof.reports import labels, layers_rows, ranks_rows, steps_rows
from infprof.reports.telemetry_lines import telemetry_lines
from infprof.reports.waterfall import waterfall

if TYPE_CHECKING:
    from infprof.results import DeviceResult, Diagnosis, Finding, Measure, Remedy, Where

_TABLE_ROWS = 50
_MEASURE_ROWS = 1_000
_PLACES = 10
# The whole diagnosis is offered for download from inside the page up to this size.
_EMBED_BYTES = 400_000


@dataclass(frozen=True)
class HtmlOptions:
    """``charts=False`` leaves Plotly and the timeline out (a file of some 50 kB)."""

    charts: bool = True


@dataclass(frozen=True)
class Column:
    """A column of a table; numbers are right-aligned and sorted as numbers."""

    label: str
    number: bool = True


@dataclass(frozen=True)
class Cell:
    """A cell: what is shown, what it is sorted by, and the full text where ``text`` is a short form of it."""

    text: str
    sort: float | str | None = None
    full: str | None = None
    code: bool = False


@dataclass(frozen=True)
class Table:
    """A section that is one table."""

    id: str
    title: str
    columns: Sequence[Column]
    rows: list[list[Cell]]
    note: str = ""
    search: str = ""


@dataclass(frozen=True)
class Segment:
    """One slice of one device: its share and time as text, and its width in the bar."""

    key: str
    label: str
    meaning: str
    percent: str
    time: str
    width: str


@dataclass
class DeviceBar:
    """The time of one device: the segments that hold time, and every row of the table by slice key."""

    label: str
    name: str
    verdict: str
    segments: list[Segment]
    by_key: dict[str, Segment] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The bar for those who cannot see it."""
        return ", ".join(f"{segment.label} {segment.percent}" for segment in self.segments)


def render(diagnosis: Diagnosis, options: HtmlOptions | None = None) -> str:
    """The report as one HTML document."""
    import jinja2

    options = options or HtmlOptions()
    charts = options.charts and bool(diagnosis.timeline and diagnosis.timeline.get("devices"))
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(clean=fmt.clean, prose=_prose, duration=fmt.duration, count=fmt.count)
    environment.filters.update(no_findings=fmt.no_findings, problem_text=fmt.problem_text)
    script = _resource("html.js")
    plotly, plotly_hash = _plotly() if charts else ("", "")
    page = environment.get_template("html.j2").render(
        d=diagnosis,
        title=labels.diagnosis_title(diagnosis),
        charts=charts,
        plotly=plotly,
        style=_resource("html.css"),
        script=script,
        script_hashes=[digest for digest in (_csp_hash(script), plotly_hash) if digest],
        data=_data(diagnosis, charts),
        slice_colors={_slice_key(kind, cause): style.color for (kind, cause), style in labels.SLICES.items()},
        **_answer(diagnosis),
        findings_order=labels.findings_order(diagnosis),
        layers=layers_rows.values(diagnosis) if len(layers_rows.by_layer(diagnosis)) > 1 else [],
        layer_columns=layers_rows.COLUMNS,
        findings=[_finding(n, f, diagnosis) for n, f in enumerate(diagnosis.findings, 1)],
        job=[*ranks_rows.job_lines(diagnosis.job), ranks_rows.RANK_NOTE] if diagnosis.job is not None else [],
        job_table=_rank_table(diagnosis),
        tables=[table for table in _tables(diagnosis) if table.rows],
        waterfall=waterfall(diagnosis),
        telemetry=telemetry_lines(diagnosis),
        telemetry_first=labels.without_timeline(diagnosis),
        not_evaluated=fmt.rules_by_need(diagnosis.not_evaluated),
        facts=_facts(diagnosis),
        window_text=fmt.window_text(diagnosis.window),
        window_hint=fmt.WINDOW_HINT,
    )
    return page + "\n"


def _resource(name: str) -> str:
    return files("infprof.reports").joinpath(name).read_text(encoding="utf-8")


def _csp_hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


@lru_cache(maxsize=1)
def _plotly() -> tuple[str, str]:
    """Plotly's script as base64 of gzip (no time in it, so the same bytes every time), and its hash for the policy."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    packed = gzip.compress(script.encode("utf-8"), compresslevel=9, mtime=0)
    return base64.b64encode(packed).decode("ascii"), _csp_hash(script)


def _data(diagnosis: Diagnosis, charts: bool) -> Any:
    """What the page's script reads, as JSON that cannot end a script element: timeline, and if small the diagnosis."""
    from jinja2.utils import htmlsafe_json_dumps

    whole = diagnosis.to_dict()
    text = json.dumps(whole, separators=(",", ":"), allow_nan=False)
    styles = {
        _slice_key(kind, cause): {"label": s.label, "color": s.color} for (kind, cause), s in labels.SLICES.items()
    }
    data = {
        "diagnosis": whole if len(text) <= _EMBED_BYTES else None,
        "timeline": _rounded(whole["timeline"]) if charts and len(text) > _EMBED_BYTES else None,
        "charts": charts,
        "slices": styles,
        "order": [_slice_key(*key) for key in fmt.slice_order(diagnosis.devices)],
        "counters": {c.get("name", ""): fmt.measure_label(c.get("name", "")) for c in _counters(diagnosis)},
    }
    return htmlsafe_json_dumps(data, separators=(",", ":"))


def _rounded(value: Any) -> Any:
    """Numbers to three digits, more than a chart can show, in half the bytes."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _counters(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    return list((diagnosis.timeline or {}).get("counters") or [])


def _slice_key(kind: str, cause: str | None) -> str:
    """A slice as part of a CSS class and as a key in the page's data."""
    return re.sub(r"[^a-z0-9]+", "-", f"{kind}-{cause}" if cause else kind)


def _prose(text: object) -> Any:
    """Escaped text with its code set as code."""
    from markupsafe import Markup, escape

    pieces = (Markup("<code>{}</code>").format(piece) if code else escape(piece) for piece, code in fmt.prose(text))
    return Markup("").join(pieces)


def _answer(diagnosis: Diagnosis) -> dict[str, Any]:
    """The first screen: the verdict and the time accounting."""
    verdict = diagnosis.verdict
    window_ns = diagnosis.window.duration_ns
    devices = [device for device in diagnosis.devices if device.slices and window_ns > 0]
    order = fmt.slice_order(devices)
    bars = [_device_bar(device, order, window_ns) for device in devices]
    legend = {segment.key: segment for bar in bars for segment in bar.segments}
    return {
        "confidence": labels.confidence_words(verdict.confidence),
        "evidence": labels.rank_words(verdict.rank, labels.without_timeline(diagnosis)),
        "verdict_remedies": _by_stack(fmt.verdict_remedies(diagnosis)),
        "repeated_in": _repeating_finding(diagnosis),
        "second": labels.second_title(verdict.second) if verdict.second else None,
        "bars": bars,
        "legend": [legend[_slice_key(*key)] for key in order],
        "devices_differ": len({bar.verdict for bar in bars}) > 1,
        "window_argument": fmt.window_argument(diagnosis.window.start_ns, diagnosis.window.end_ns),
    }


def _repeating_finding(diagnosis: Diagnosis) -> int | None:
    """The number of the first finding that has remedies of the verdict: the first screen points to it."""
    of_verdict = {(r.stack, r.change) for r in diagnosis.verdict.remedies}
    numbers = (n for n, f in enumerate(diagnosis.findings, 1) if of_verdict & {(r.stack, r.change) for r in f.remedies})
    return next(numbers, None)


def _device_bar(device: DeviceResult, order: list[fmt.SliceKey], window_ns: int) -> DeviceBar:
    """The bar of one device, its slices in the ``order`` of all devices so that bars can be compared."""
    segments = []
    rows = {(row.kind, row.cause): row for row in fmt.slice_shares(device.slices, window_ns)}
    for row in (rows[slice_key] for slice_key in order if slice_key in rows):
        style = labels.slice_style(row.kind, row.cause)
        key = _slice_key(row.kind, row.cause)
        percent, time = fmt.percent(row.ratio), fmt.duration(row.ns)
        segments.append(Segment(key, style.label, style.meaning, percent, time, f"{100 * row.ratio:.4f}"))
    bar = DeviceBar(f"GPU {device.id}", fmt.clean(device.name or ""), labels.verdict_title(device.verdict), segments)
    bar.by_key = {segment.key: segment for segment in segments}
    return bar


def _finding(number: int, finding: Finding, diagnosis: Diagnosis) -> dict[str, Any]:
    """A finding as the template shows it."""
    window_ns = diagnosis.window.duration_ns
    is_time = finding.cost.unit == "ns" and finding.cost.value is not None
    return {
        "number": number,
        "f": finding,
        "severity": finding.severity if finding.severity in labels.SEVERITY_COLORS else "info",
        "cost": fmt.duration(finding.cost.value) if is_time else fmt.cost_text(finding.cost, window_ns),
        "cost_share": f"{fmt.share(finding.cost.value, window_ns)} of the window" if is_time else "",
        "evidence": [
            (fmt.measure_label(e.measure), e.measure, fmt.value_with_unit(e.value, e.unit), _meaning(e.measure))
            for e in finding.evidence
        ],
        "where": [_where(where) for where in finding.where[:_PLACES]],
        "remedies": _by_stack(finding.remedies),
        "gain": fmt.gain_text(finding.gain),
        "approach": labels.APPROACHES.get(finding.approach or "", ""),
        "rank": labels.rank_words(finding.rank, labels.without_timeline(diagnosis)),
        "confidence": labels.confidence_words(finding.confidence),
    }


def _by_stack(remedies: Iterable[Remedy]) -> dict[str, list[Remedy]]:
    stacks: dict[str, list[Remedy]] = {}
    for remedy in remedies:
        stacks.setdefault(fmt.clean(labels.STACKS.get(remedy.stack, remedy.stack)), []).append(remedy)
    return stacks


def _where(where: Where) -> dict[str, Any]:
    return {
        "argument": f"--window {fmt.window_argument(where.start_ns, where.end_ns)}",
        "place": fmt.where_place(where),
        "start": where.start_ns,
        "end": where.end_ns,
    }


def _meaning(measure: str) -> str:
    return MEASURES[measure].meaning if measure in MEASURES else ""


def _tables(diagnosis: Diagnosis) -> list[Table]:
    """Every table of the lower page, in order; those without rows are not shown."""
    return [
        *_job_tables(diagnosis),
        _phase_table(diagnosis),
        _slow_table(diagnosis),
        _kernel_table(diagnosis),
        _work_table(diagnosis),
        _copy_table(diagnosis),
        _range_table(diagnosis),
        _nccl_table(diagnosis),
        _api_table(diagnosis),
        _measure_table(diagnosis),
    ]


def _rank_table(diagnosis: Diagnosis) -> Table | None:
    job = diagnosis.job
    if job is None:
        return None
    return _of_values("ranks", "Ranks", ranks_rows.RANK_COLUMNS, ranks_rows.rank_rows(job), ranks_rows.job_note(job))


def _job_tables(diagnosis: Diagnosis) -> list[Table]:
    """How far apart ranks arrive and what they send, as far as it is known."""
    job = diagnosis.job
    if job is None:
        return []
    arrivals = ranks_rows.arrival_values(job)
    note = "Spread: from the first rank that arrives at a collective to the last."
    traffic, matrix = ranks_rows.traffic_values(job), ranks_rows.matrix_values(job)
    return [
        _of_values("arrivals", "Arrivals at collectives", ranks_rows.ARRIVAL_COLUMNS, arrivals[:_TABLE_ROWS], note),
        _of_values(
            "traffic", "What groups move", ranks_rows.TRAFFIC_COLUMNS, traffic[:_TABLE_ROWS], _cut(len(traffic))
        ),
        _of_values("matrix", "Bytes between ranks", ranks_rows.MATRIX_COLUMNS, matrix[:_TABLE_ROWS], _cut(len(matrix))),
    ]


def _of_values(
    id: str, title: str, columns: Sequence[str], rows: list[list[ranks_rows.Value]], note: str = ""
) -> Table:
    """A table of ready texts; a column is one of numbers where any of its cells has one."""
    numbers = [any(row[i].sort is not None for row in rows) for i in range(len(columns))]
    cells = [
        [Cell(v.text, v.sort if number else v.text.lower()) for v, number in zip(row, numbers, strict=True)]
        for row in rows
    ]
    return Table(id, title, [Column(c, n) for c, n in zip(columns, numbers, strict=True)], cells, note)


def _ns(value: float | None) -> Cell:
    return Cell(fmt.duration(value), value)


def _number(value: float | None) -> Cell:
    return Cell(fmt.count(value), value)


def _bytes(value: float | None) -> Cell:
    return Cell(fmt.size(value), value)


def _words(text: str | None) -> Cell:
    words = fmt.clean(text) if text else "–"
    return Cell(words, words.lower())


def _name(name: str) -> Cell:
    """A range, call or collective name: long ones are cut and can be opened."""
    full = fmt.clean(name)
    text = fmt.shorten(full, 80)
    return Cell(text, full.lower(), full if text != full else None, code=True)


def _kernel_name(name: str) -> Cell:
    full = fmt.clean(name)
    text = fmt.shorten(fmt.short_kernel_name(name), 80)
    return Cell(text, text.lower(), full if text != full else None, code=True)


def _launch_shape(blocks: int | None, threads: int | None) -> Cell:
    if blocks is None and threads is None:
        return Cell(fmt.NOT_KNOWN)
    return Cell(f"{fmt.count(blocks)} × {fmt.count(threads)}", blocks)


def _cut(held: int, shown: int = _TABLE_ROWS, total: int | None = None) -> str:
    """What of a table is shown: of the rows that the diagnosis holds, and of all there are where it holds not all."""
    total = held if total is None else total
    if total <= shown:
        return ""
    rest = "all are" if total <= held else f"the first {held:,} are"
    return f"The first {shown} of {total:,}; {rest} in the JSON report."


def _phase_table(diagnosis: Diagnosis) -> Table:
    figures = map(Column, ("count", "total", "p50", "p95", "p99"))
    columns = [Column("phase", False), *figures, Column("limited by", False), Column("told by", False)]
    rows = [
        [
            _words(r.name),
            _number(r.count),
            *(_ns(ns) for ns in (r.total_ns, r.p50_ns, r.p95_ns, r.p99_ns)),
            _words(r.limit),
            _words(r.told_by),
        ]
        for r in steps_rows.phase_rows(diagnosis)
    ]
    steps = diagnosis.steps or {}
    how = fmt.clean(steps.get("how_found") or "")
    found = f"Steps were found by {how}; {steps_rows.each_step(steps)}." if how else ""
    return Table("phases", "Phases and steps", columns, rows, found)


def _slow_table(diagnosis: Diagnosis) -> Table:
    columns = [Column(name, False) for name in steps_rows.SLOW_COLUMNS]
    rows = [[_words(text) for text in values] for values in steps_rows.slow_values(diagnosis)]
    note = "Each against the median step of its phase; a step lasts from the end of the one before it."
    return Table("slow-steps", "Slowest steps", columns, rows[:_TABLE_ROWS], note)


def _kernel_table(diagnosis: Diagnosis) -> Table:
    columns = [
        Column("kernel", False),
        Column("class", False),
        Column("precision", False),
        Column("library", False),
        *map(Column, ("GPU", "calls", "total", "share", "mean", "p50", "p95", "grid × block")),
    ]
    rows = [
        [
            _kernel_name(k.name),
            _words(k.kernel_class),
            _words(k.precision),
            _words(k.library),
            Cell(str(k.device), k.device),
            _number(k.calls),
            _ns(k.total_ns),
            Cell(fmt.percent(k.share), k.share),
            _ns(k.mean_ns),
            _ns(k.p50_ns),
            _ns(k.p95_ns),
            _launch_shape(k.grid_blocks, k.block_threads),
        ]
        for k in diagnosis.kernel_table[:_TABLE_ROWS]
    ]
    distinct = sum(device.kernels.distinct for device in diagnosis.devices) if diagnosis.kernel_table else 0
    note = (
        _cut(len(diagnosis.kernel_table), total=distinct)
        or "Share is of the summed kernel time. A name opens to its full form."
    )
    return Table("kernels", "Kernels", columns, rows, note)


def _work_table(diagnosis: Diagnosis) -> Table:
    columns = [
        Column("class", False),
        Column("operator", False),
        Column("precision", False),
        *map(Column, ("GPU", "calls", "total", "share", "FLOP rate", "byte rate", "FLOP per byte", "ridge", "reached")),
        Column("missing", False),
    ]
    rows = [
        [
            _words(w.kind),
            _words(w.operator or "all"),
            _words(w.precision),
            Cell(str(w.device), w.device),
            _number(w.calls),
            _ns(w.total_ns),
            Cell(fmt.percent(w.share), w.share),
            Cell(fmt.flop_rate(w.flop_per_s), w.flop_per_s),
            Cell(fmt.byte_rate(w.bytes_per_s), w.bytes_per_s),
            _digits(w.flop_per_byte),
            _digits(w.ridge_flop_per_byte),
            Cell(fmt.of_roof(w), max(w.compute_ratio or 0, w.dram_ratio or 0)),
            _words(w.reason),
        ]
        for w in diagnosis.work_table[:_TABLE_ROWS]
    ]
    note = "Counted from the shapes of operators; bytes are each operand once. Share is of the kernel time."
    note = " ".join([note, *(f"{line[0].upper()}{line[1:]}." for line in fmt.phase_lines(diagnosis))])
    return Table("work", "Counted work", columns, rows, note)


def _digits(value: float | None) -> Cell:
    return Cell(fmt.NOT_KNOWN if value is None else fmt.three_digits(value), value)


def _copy_table(diagnosis: Diagnosis) -> Table:
    columns = [Column("copy", False), *map(Column, ("GPU", "count", "bytes", "total", "rate", "exposed", "pageable"))]
    rows = [
        [
            _words(labels.COPY_KINDS.get(c.kind, c.kind)),
            Cell(str(device.id), device.id),
            _number(c.count),
            _bytes(c.bytes),
            _ns(c.total_ns),
            Cell(fmt.byte_rate(c.bytes_per_s), c.bytes_per_s),
            _ns(c.exposed_ns),
            _bytes(c.pageable_bytes),
        ]
        for device in diagnosis.devices
        for c in device.copies
    ]
    return Table("copies", "Copies", columns, rows, "Exposed: the copy runs and no kernel does.")


def _range_table(diagnosis: Diagnosis) -> Table:
    columns = [Column("range", False), *map(Column, ("count", "on the host", "GPU span", "GPU busy", "kernels"))]
    rows = [
        [_name(r.name), _number(r.count), _ns(r.host_ns), _ns(r.gpu_span_ns), _ns(r.gpu_busy_ns), _number(r.kernels)]
        for r in diagnosis.range_table[:_TABLE_ROWS]
    ]
    return Table("ranges", "NVTX and annotation ranges", columns, rows, _cut(len(diagnosis.range_table)))


def _nccl_table(diagnosis: Diagnosis) -> Table:
    columns = [Column("collective", False), *map(Column, ("count", "message", "total", "rate"))]
    rows = [
        [
            _name(n.name),
            _number(n.count),
            _bytes(n.bytes),
            _ns(n.total_ns),
            Cell(fmt.byte_rate(n.bytes_per_s), n.bytes_per_s),
        ]
        for n in diagnosis.nccl_table[:_TABLE_ROWS]
    ]
    return Table("communication", "Communication", columns, rows, _cut(len(diagnosis.nccl_table)))


def _api_table(diagnosis: Diagnosis) -> Table:
    columns = [Column("call", False), *map(Column, ("calls", "total", "mean", "failed"))]
    rows = [
        [
            _name(a.name),
            _number(a.calls),
            _ns(a.total_ns),
            _ns(a.total_ns / a.calls if a.calls else None),
            _number(a.failed),
        ]
        for a in diagnosis.api_table[:_TABLE_ROWS]
    ]
    return Table("calls", "CUDA calls", columns, rows, _cut(len(diagnosis.api_table)))


def _measure_table(diagnosis: Diagnosis) -> Table:
    columns = [
        Column("measure", False),
        Column("value"),
        Column("scope", False),
        Column("rank", False),
        Column("source", False),
        Column("meaning", False),
    ]
    rows = [_measure_row(m) for m in diagnosis.measures[:_MEASURE_ROWS]]
    note = _cut(len(diagnosis.measures), _MEASURE_ROWS)
    return Table("measures", "Measures", columns, rows, note, search="Filter measures")


def _measure_row(m: Measure) -> list[Cell]:
    scope = m.scope.kind if m.scope.id is None else f"{m.scope.kind} {m.scope.id}"
    value = Cell(fmt.value_with_unit(m.value, m.unit), m.value)
    name = Cell(fmt.clean(m.name), m.name, code=True)
    return [name, value, _words(scope), _words(m.rank), _words(m.source), _words(_meaning(m.name))]


def _facts(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Where the figures come from, as (what, value) lines."""
    source = diagnosis.provenance
    tool = " ".join(part for part in (source.tool, source.tool_version) if part)
    facts = [("profiler", tool), *(("input", name) for name in source.inputs)]
    facts += [(f"capture: {key.replace('_', ' ')}", _plain(value)) for key, value in source.capture.items()]
    for number, gpu in enumerate(source.gpus):
        details = ", ".join(_detail(key, value) for key, value in gpu.items() if key not in ("id", "name"))
        name = str(gpu.get("name") or fmt.NOT_KNOWN)
        facts.append((f"GPU {gpu.get('id', number)}", f"{name} ({details})" if details else name))
    facts += [("infprof", source.infprof_version), ("schema", diagnosis.schema_version)]
    return [(fmt.clean(what), fmt.clean(value)) for what, value in facts]


def _detail(key: str, value: Any) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (
        f"{fmt.measure_label(key)} {fmt.value_with_unit(value, fmt.unit_by_name(key)) if is_number else _plain(value)}"
    )


def _plain(value: Any) -> str:
    """A value of the provenance, which is free in form."""
    if value is None:
        return fmt.NOT_KNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, default=str)
