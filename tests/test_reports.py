"""What every report promises, over all reports and all examples, and what each promises by itself."""

from __future__ import annotations

import base64
import copy
import gzip
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from diagnosis_examples import ALL_REDUCE, CUTLASS, ELEMENTWISE, EXAMPLES, FLASH, GEMM, HOSTILE, MS, launch_bound
from infprof import results
from infprof.errors import UsageError
from infprof.measures.names import MEASURES
from infprof.reports import REPORTS, format, labels, render, report_by_name, report_for_path, write_atomic
from infprof.reports.html import HtmlOptions
from infprof.reports.json_report import schema
from infprof.reports.markdown import MarkdownOptions, code, escape
from infprof.reports.terminal import TerminalOptions
from infprof.results import Cost, Diagnosis, Evidence, Finding, Gain, Slice, Where

NAMES = [report.name for report in REPORTS]


@pytest.fixture(params=EXAMPLES.values(), ids=EXAMPLES.keys())
def diagnosis(request: pytest.FixtureRequest) -> Diagnosis:
    build: Callable[[], Diagnosis] = request.param
    return build()


# All reports


def test_examples_account_for_all_time(diagnosis: Diagnosis) -> None:
    for device in diagnosis.devices:
        assert sum(item.ns for item in device.slices) == diagnosis.window.duration_ns


@pytest.mark.parametrize("name", NAMES)
def test_same_input_gives_same_bytes_and_ends_with_a_newline(name: str, diagnosis: Diagnosis) -> None:
    text = render(name, diagnosis)
    assert text == render(name, copy.deepcopy(diagnosis))
    assert text.endswith("\n") and not text.endswith("\n\n")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "json"])
def test_every_report_says_the_answer(name: str, diagnosis: Diagnosis) -> None:
    text = " ".join(_visible(name, render(name, diagnosis)).split())
    assert labels.verdict_title(diagnosis.verdict) in text
    assert format.plain_prose(diagnosis.verdict.sentence) in text
    assert labels.RANKS[diagnosis.verdict.rank] in text
    for finding in diagnosis.findings:
        assert finding.title in text
    if diagnosis.verdict.second:
        assert labels.second_title(diagnosis.verdict.second) in text


@pytest.mark.parametrize("name", NAMES)
def test_no_report_lets_control_characters_of_a_name_through(name: str) -> None:
    diagnosis = launch_bound()
    diagnosis.kernel_table = diagnosis.kernel_table[-1:]
    text = render(name, diagnosis)
    assert "alert(1)" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", text)


def _visible(name: str, text: str) -> str:
    """What a reader sees of a report: without HTML elements or Markdown escapes and code marks."""
    if name == "html":
        page = _Page()
        page.feed(text)
        return page.text
    return re.sub(r"\\(.)", r"\1", text).replace("`", "") if name == "markdown" else text


# Registry


def test_registry_names_and_extensions_are_unique() -> None:
    extensions = [extension for report in REPORTS for extension in report.extensions]
    assert len(set(NAMES)) == len(NAMES)
    assert len(set(extensions)) == len(extensions)


def test_extension_chooses_the_report() -> None:
    assert report_for_path("out/x.HTML").name == "html"
    assert report_for_path(Path("x.md")).name == "markdown"
    assert report_by_name("json").name == "json"


def test_unknown_report_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean markdown"):
        report_by_name("markdwon")
    with pytest.raises(UsageError, match=r"\.json"):
        report_for_path("x.pdf")


def test_importing_reports_loads_nothing_heavy() -> None:
    modules = ", ".join(report.module for report in REPORTS)
    check = f"import sys, {modules}; print(sorted({{'rich', 'jinja2', 'plotly'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# Files


def test_write_refuses_to_overwrite_and_force_replaces(tmp_path: Path) -> None:
    target = tmp_path / "report.md"
    write_atomic(target, "one\n")
    with pytest.raises(UsageError, match="--force"):
        write_atomic(target, "two\n")
    assert target.read_text() == "one\n"
    write_atomic(target, "µ two\n", force=True)
    assert target.read_text(encoding="utf-8") == "µ two\n"
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


def test_write_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    real = tmp_path / "real.txt"
    real.write_text("old")
    link = tmp_path / "link.txt"
    link.symlink_to(real)
    write_atomic(link, "new", force=True)
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_write_says_what_is_wrong_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        write_atomic(tmp_path, "x")
    with pytest.raises(UsageError, match="folder does not exist"):
        write_atomic(tmp_path / "none" / "x.json", "x")


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.md"
    write_atomic(target, "one\n")

    def refuse(source: object, destination: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("infprof.reports.files.os.replace", refuse)
    with pytest.raises(UsageError, match="Permission denied"):
        write_atomic(target, "two\n", force=True)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["one\n"]


def test_write_to_a_device_needs_no_force() -> None:
    write_atomic("/dev/null", "x")
    assert not Path("/dev/null").is_file()


# Terminal


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_terminal_is_plain_and_keeps_the_width(width: int, diagnosis: Diagnosis) -> None:
    text = render("terminal", diagnosis, TerminalOptions(width=width))
    assert "\x1b" not in text
    assert not re.search(r"[│┃─━┌╭+]{2}", text)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert lines == [line.rstrip() for line in lines]


def test_terminal_first_screen_holds_the_answer(diagnosis: Diagnosis) -> None:
    first = render("terminal", diagnosis).splitlines()[:24]
    assert first[0] == labels.verdict_title(diagnosis.verdict)
    screen = "\n".join(first)
    if diagnosis.devices:
        assert "Where the time went" in screen
        assert "compute " in screen
    for finding in diagnosis.findings[:1]:
        assert finding.title in screen
        assert "evidence" in screen
        assert f"{labels.STACKS[finding.remedies[0].stack]}: " in screen


def test_terminal_colour_says_nothing_that_plain_text_does_not(diagnosis: Diagnosis) -> None:
    plain = render("terminal", diagnosis)
    for color in ("standard", "256", "truecolor"):
        colored = render("terminal", diagnosis, TerminalOptions(color=color))
        assert "\x1b[" in colored
        bare = re.sub(r"\x1b\[[0-9;]*m", "", colored)
        assert [line.rstrip() for line in bare.splitlines()] == plain.splitlines()


def test_terminal_time_rows_hold_share_time_and_bar() -> None:
    lines = render("terminal", launch_bound()).splitlines()
    row = next(line for line in lines if "idle: launch calls" in line)
    assert re.search(r"31\.0 % +310 ms +█{5,}", row)
    shares = [float(found) for line in lines[6:14] for found in re.findall(r"([\d.]+) % ", line)]
    assert sum(shares) == pytest.approx(100, abs=0.2)


@pytest.mark.parametrize("width", [60, 72, 80])
def test_terminal_cuts_no_figure_of_two_devices(width: int) -> None:
    text = render("terminal", EXAMPLES["two-devices"](), TerminalOptions(width=width))
    rows = [line for line in text.splitlines() if re.match(r"  (compute|exposed|idle)", line)]
    assert [len(re.findall(r"\d %", row)) for row in rows] == [2, 2, 2, 2]
    assert not re.search(r"[\d.]…", "".join(rows))


def test_terminal_lists_the_devices_that_lose_most() -> None:
    text = render("terminal", EXAMPLES["eight-devices"]())
    assert "GPU 0   62.0 %   33.0 %    0.0 %    5.0 %" in text
    assert "2 more devices lose less time than these." in text


def test_terminal_shows_ready_window_arguments_and_remedies() -> None:
    text = render("terminal", launch_bound())
    assert "--window 412ms:455ms  vectorized_" in text
    assert "990ms" not in text  # the fourth place: three are enough
    assert "drop --enforce-eager" in text
    assert "20.0 to 31.0 % of the window" in text
    assert "up to 5.6 % of the window" in text


def test_terminal_shows_one_change_per_stack_unless_asked() -> None:
    diagnosis = launch_bound()
    diagnosis.findings[0].remedies.append(results.Remedy("vllm", "raise --max-cudagraph-capture-size"))
    text = " ".join(render("terminal", diagnosis).split())
    assert "capture-size" not in text and "shapes must be static" not in text
    assert "1 more, and the trade-offs: infprof rules show launch-bound" in text
    text = " ".join(render("terminal", diagnosis, TerminalOptions(all_changes=True)).split())
    assert "vLLM: raise --max-cudagraph-capture-size" in text
    assert "(trade-off: shapes must be static)" in text


def test_terminal_later_findings_are_one_line() -> None:
    text = render("terminal", launch_bound(), TerminalOptions(full_findings=1))
    assert "Copies use pageable memory" in text
    assert "pin_memory" not in text


class _Screen(StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_options_follow_the_stream() -> None:
    xterm = {"TERM": "xterm-256color", "COLUMNS": "100"}
    assert TerminalOptions.for_stream(StringIO(), xterm) == TerminalOptions()
    assert TerminalOptions.for_stream(_Screen(), xterm).color == "256"
    assert TerminalOptions.for_stream(_Screen(), xterm).width == 100
    assert TerminalOptions.for_stream(_Screen(), {**xterm, "NO_COLOR": "1"}).color is None
    assert TerminalOptions.for_stream(_Screen(), {"TERM": "dumb"}).color is None


# JSON


def test_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


def test_json_is_the_contract_and_keeps_the_schema(diagnosis: Diagnosis) -> None:
    text = render("json", diagnosis)
    assert json.loads(text) == diagnosis.to_dict()
    assert list(json.loads(text)) == list(diagnosis.to_dict())
    assert text.startswith('{\n  "schema_version": "1.0",\n')
    jsonschema.Draft202012Validator(schema()).validate(json.loads(text))


def test_json_takes_broken_surrogates() -> None:
    diagnosis = launch_bound()
    diagnosis.kernel_table[0].name = "kernel_\udcff"
    render("json", diagnosis).encode("utf-8")


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        *parents, last = path.split(".")
        for part in parents:
            data = data[int(part) if part.isdigit() else part]
        data[int(last) if last.isdigit() else last] = value

    return change


BROKEN = {
    "no verdict": lambda data: data.pop("verdict"),
    "no duration": lambda data: data["window"].pop("duration_ns"),
    "unknown class": _set("verdict.class", "slow"),
    "cls for class": lambda data: data["verdict"].update(cls=data["verdict"].pop("class")),
    "code without unusable": _set("verdict.code", "damaged"),
    "cause of another class": _set("verdict.cause", "pageable"),
    "gpu-busy without why_not": lambda data: data["verdict"].update({"class": "gpu-busy", "cause": None}),
    "unusable without code": lambda data: data["verdict"].update({"class": "unusable", "why_not": "x"}),
    "second of no class": _set("verdict.second", "slow/launch"),
    "confidence in per cent": _set("verdict.confidence", 92),
    "no such rank": _set("verdict.rank", "F"),
    "time as float": _set("devices.0.slices.0.ns", 0.5),
    "negative slice": _set("devices.0.slices.0.ns", -1),
    "idle without cause": _set("devices.0.slices.4.cause", None),
    "compute with cause": _set("devices.0.slices.0.cause", "launch"),
    "no such slice": _set("devices.0.slices.0.kind", "busy"),
    "severity in capitals": _set("findings.0.severity", "CRITICAL"),
    "gain over 1": _set("findings.0.gain.high", 31),
    "cost in ms": _set("findings.0.cost.unit", "ms"),
    "no such area": _set("findings.0.area", "network"),
    "unit with prefix": _set("measures.0.unit", "ms"),
    "measure as text": _set("measures.0.value", "1"),
    "other major version": _set("schema_version", "2.0"),
    "timeline without devices": lambda data: data["timeline"].pop("devices"),
    "timeline share over 1": _set("timeline.devices.0.series.0.share.0", 48),
}


@pytest.mark.parametrize("name", BROKEN)
def test_schema_refuses_broken_documents(name: str) -> None:
    data = launch_bound().to_dict()
    BROKEN[name](data)
    assert not jsonschema.Draft202012Validator(schema()).is_valid(data)


def test_schema_allows_additions() -> None:
    data = launch_bound().to_dict()
    data["ranks"] = []
    data["verdict"]["more"] = 1
    data["measures"][0]["scope"]["more"] = None
    jsonschema.Draft202012Validator(schema()).validate(data)


def test_schema_lists_are_those_of_the_code() -> None:
    definitions = schema()["$defs"]
    assert tuple(definitions["verdict_class"]["enum"]) == results.VERDICT_CLASSES
    assert tuple(definitions["idle_cause"]["enum"]) == results.IDLE_CAUSES
    assert tuple(definitions["copy_cause"]["enum"]) == results.COPY_CAUSES
    assert tuple(definitions["slice"]["properties"]["kind"]["enum"]) == results.SLICE_KINDS
    assert tuple(definitions["verdict"]["properties"]["code"]["enum"]) == (*results.UNUSABLE_CODES, None)
    assert tuple(definitions["finding"]["properties"]["severity"]["enum"]) == results.SEVERITIES
    assert {info.unit for info in MEASURES.values()} <= set(definitions["unit"]["enum"])


@pytest.mark.parametrize(
    ("definition", "kind"),
    [
        ("verdict", results.Verdict),
        ("device", results.DeviceResult),
        ("copy", results.CopyRow),
        ("slice", results.Slice),
        ("finding", results.Finding),
        ("remedy", results.Remedy),
        ("evidence", results.Evidence),
        ("place", results.Where),
        ("measure", results.Measure),
        ("scope", results.Scope),
        ("provenance", results.Provenance),
        ("kernel_row", results.KernelRow),
        ("work_row", results.WorkRow),
        ("range_row", results.RangeRow),
        ("nccl_row", results.NcclRow),
        ("api_row", results.ApiRow),
    ],
)
def test_schema_requires_every_field(definition: str, kind: type) -> None:
    names = {"class" if item.name == "cls" else item.name for item in fields(kind)}
    assert set(schema()["$defs"][definition]["required"]) == names


# Markdown


def test_markdown_tables_keep_their_columns(diagnosis: Diagnosis) -> None:
    for block in render("markdown", diagnosis).split("\n\n"):
        if block.startswith("|"):
            columns = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(columns) == 1


def test_markdown_names_cannot_break_out() -> None:
    assert escape(HOSTILE) == "\\<script\\>alert(1)\\</script\\> \\| \\`x\\` \\</script\\>  red \\[bold\\]"
    assert code(HOSTILE) == "`` <script>alert(1)</script> \\| `x` </script>  red [bold] ``"
    assert escape("1. x") == "1\\. x"
    assert escape("20.0 to 31") == "20.0 to 31"
    assert escape("h2d_bytes of _x_") == "h2d_bytes of \\_x\\_"
    assert "@team" not in escape("@team")
    # A product of Python notifies nobody, and can be pasted.
    assert escape("q @ k.T") == "q @ k.T"
    assert escape("a &lt; b") == "a &amp;lt; b"


def test_markdown_cuts_long_tables() -> None:
    text = render("markdown", launch_bound(), MarkdownOptions(kernels=1, problems=1))
    assert "vectorized_elementwise_kernel" in text.split("### Top kernels")[1]
    assert GEMM not in text.split("### Top kernels")[1]
    assert "1 more in the JSON report" in text


# HTML

_VOID = {"meta", "br", "input", "link", "img", "hr"}
_HIDDEN = {"script", "style"}


class _Page(HTMLParser):
    """Collects what a page holds: attributes that load something, scripts, text, and whether elements are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.handlers: list[str] = []
        self.policy = ""
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((values, ""))
        self.links += [str(values[name]) for name in ("src", "href", "srcset", "action", "poster") if name in values]
        self.ids += [str(values["id"])] if "id" in values else []
        self.handlers += [name for name in values if name.startswith("on")]
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(values["content"])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            values, text = self.scripts[-1]
            self.scripts[-1] = (values, text + data)
        if not (self.open and self.open[-1] in _HIDDEN):
            self.text += data


def _page(diagnosis: Diagnosis, options: HtmlOptions | None = None) -> _Page:
    page = _Page()
    page.feed(render("html", diagnosis, options))
    page.close()
    return page


def test_html_is_closed_and_asks_for_nothing(diagnosis: Diagnosis) -> None:
    page = _page(diagnosis)
    assert page.open == []
    assert page.handlers == []
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    assert page.policy.startswith("default-src 'none';")
    assert not re.search(r"url\(|@import", render("html", diagnosis, HtmlOptions(charts=False)))


def test_html_policy_allows_only_the_two_scripts() -> None:
    page = _page(launch_bound())
    by_kind = {values.get("type") or "code": text for values, text in page.scripts}
    assert set(by_kind) == {"application/json", "text/plain", "code"}
    plotly = gzip.decompress(base64.b64decode(by_kind["text/plain"])).decode("utf-8")
    assert "plotly.js" in plotly[:200]
    hashes = [base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in (by_kind["code"], plotly)]
    assert re.findall(r"'sha256-([^']+)'", page.policy) == hashes
    assert "unsafe-inline" not in page.policy.split("style-src")[0]


def test_html_size() -> None:
    assert len(render("html", launch_bound()).encode()) < 3_000_000
    assert len(render("html", launch_bound(), HtmlOptions(charts=False)).encode()) < 100_000


def test_html_shows_hostile_names_as_text() -> None:
    page = _page(launch_bound(), HtmlOptions(charts=False))
    assert page.text.count("<script>alert(1)</script>") >= 2
    assert len(page.scripts) == 2


def test_html_embeds_the_diagnosis_while_it_is_small() -> None:
    diagnosis = launch_bound()
    data = json.loads(_page(diagnosis).scripts[0][1])
    assert data["diagnosis"] == diagnosis.to_dict()
    assert data["timeline"] is None
    diagnosis.measures = diagnosis.measures * 2_000
    data = json.loads(_page(diagnosis).scripts[0][1])
    assert data["diagnosis"] is None
    assert diagnosis.timeline is not None
    shown, whole = data["timeline"], diagnosis.timeline
    assert shown["start_ns"] == whole["start_ns"]
    assert shown["devices"][0]["series"][1]["share"] == pytest.approx(
        whole["devices"][0]["series"][1]["share"], abs=1e-3
    )


def test_html_order_and_colours_serve_bar_and_timeline() -> None:
    text = render("html", launch_bound(), HtmlOptions(charts=True))
    data = json.loads(_page(launch_bound()).scripts[0][1])
    assert data["order"][:2] == ["compute", "idle-launch"]
    assert set(data["order"]) <= set(data["slices"])
    for key in data["order"]:
        assert f".s-{key} {{ --slice: {data['slices'][key]['color']}; }}" in text
    widths = [float(width) for width in re.findall(r'style="width:([\d.]+)%"', text)]
    assert sum(widths) == pytest.approx(100)


def test_html_leaves_out_what_is_empty() -> None:
    ids = _page(EXAMPLES["unusable"]()).ids
    assert "findings" in ids and "data" in ids
    assert not {"time", "timeline", "kernels", "copies", "measures"} & set(ids)


def test_example_timelines_add_up(diagnosis: Diagnosis) -> None:
    for device in (diagnosis.timeline or {"devices": []})["devices"]:
        for column in zip(*(series["share"] for series in device["series"]), strict=True):
            assert sum(column) == pytest.approx(1, abs=1e-3)


# Words for the closed lists


def test_every_closed_list_has_words() -> None:
    assert set(labels.CLASSES) == set(results.VERDICT_CLASSES)
    assert set(results.IDLE_CAUSES) <= set(labels.CAUSES)
    assert set(labels.CODES) == set(results.UNUSABLE_CODES)
    assert set(labels.SEVERITY_COLORS) == set(results.SEVERITIES)
    assert {cause for kind, cause in labels.SLICES if kind == "idle"} == set(results.IDLE_CAUSES)
    assert {cause for kind, cause in labels.SLICES if kind == "exposed_copy"} == set(results.COPY_CAUSES)
    assert {kind for kind, _ in labels.SLICES} == {*results.SLICE_KINDS, "other"}


def test_words_are_of_measures_that_exist_and_say_more_than_the_names() -> None:
    assert set(labels.MEASURE_WORDS) <= set(MEASURES)
    assert format.measure_label("host_to_gpu_ratio") == "host time over GPU time"
    # Of one kernel at a time "100 %" would say that all of them run at once.
    assert format.value_with_unit(1.0, MEASURES["kernel_concurrency"].unit) == "1"


def test_a_replay_of_more_or_less_than_the_window_says_so() -> None:
    d = launch_bound()
    window = d.window.duration_ns
    d.whatif = {"recorded_span_ns": window, "chain": [{"fix": "launch=0"}]}
    assert "recorded" not in format.whatif_note(d)
    d.whatif["recorded_span_ns"] = 3 * window
    assert format.whatif_note(d).startswith(f"of all {format.duration(3 * window)} recorded")
    assert f"all {format.duration(3 * window)} recorded" in render("terminal", d)
    d.whatif["recorded_span_ns"] = window // 2
    assert "in the middle" in format.whatif_note(d)


def test_slices_have_labels_and_colours_of_their_own() -> None:
    assert len({style.label for style in labels.SLICES.values()}) == len(labels.SLICES)
    assert len({style.color for style in labels.SLICES.values()}) == len(labels.SLICES)


# Numbers and names


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "not known"),
        (0, "0 ns"),
        (1, "1 ns"),
        (999, "999 ns"),
        (999.9, "1.00 µs"),
        (4_200, "4.20 µs"),
        (12_345, "12.3 µs"),
        (999_960, "1.00 ms"),
        (310 * MS, "310 ms"),
        (1_234_567_890, "1.23 s"),
        (98_765_432_100, "98.8 s"),
        (3_600_000_000_000, "3,600 s"),
        (-4_200, "-4.20 µs"),
    ],
)
def test_duration(ns: float | None, text: str) -> None:
    assert format.duration(ns) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "ratio", "not known"),
        (0, "ratio", "0.0 %"),
        (80, "bytes", "80 B"),
        (1.0, "count", "1"),
        (0.0001, "ratio", "<0.1 %"),
        (0.3114, "ratio", "31.1 %"),
        (65_536, "bytes", "65.5 kB"),
        (9_600_000, "bytes", "9.60 MB"),
        (12.7e9, "bytes_per_s", "12.7 GB/s"),
        (61_000, "per_s", "61,000/s"),
        (1234.5, "tokens_per_s", "1,234 tokens/s"),
        (0.5, "count", "0.5"),
        (1_200, "count", "1,200"),
        (700, "watts", "700 W"),
        ("pageable", "text", "pageable"),
    ],
)
def test_value_with_unit(value: float | str | None, unit: str, text: str) -> None:
    assert format.value_with_unit(value, unit) == text


@pytest.mark.parametrize(
    ("start", "end", "text"),
    [
        (0, 2_000 * MS, "0s:2s"),
        (412 * MS, 455 * MS, "412ms:455ms"),
        (1_203_456_789, 1_247_600_123, "1.2034s:1.2477s"),
        (900_000_100, 900_004_321, "900.0001ms:900.00433ms"),
        (5, 5, "0.000005ms:0.000005ms"),
        (-5 * MS, 5 * MS, "-5ms:5ms"),
    ],
)
def test_window_argument_covers_the_range(start: int, end: int, text: str) -> None:
    assert format.window_argument(start, end) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (ELEMENTWISE, "vectorized_elementwise_kernel<CUDAFunctor_add>"),
        (FLASH, "flash_fwd_splitkv_kernel"),
        (CUTLASS, "GemmUniversal"),
        (ALL_REDUCE, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
        (GEMM, GEMM),
        ("void (anonymous namespace)::softmax_warp_forward<float, 8, (bool)0>(float*)", "softmax_warp_forward"),
        ("_ZN2at6native29vectorized_elementwise_kernelILi4EEEvv", "vectorized_elementwise_kernel"),
        ("void f<(1 > 0)>(int)", "void f<(1 > 0)>(int)"),
        ("<html> | (x)", "<html> | (x)"),
        ("fused add norm", "fused add norm"),
        ("", ""),
    ],
)
def test_short_kernel_name(name: str, text: str) -> None:
    assert format.short_kernel_name(name) == text


def test_shorten_keeps_both_ends() -> None:
    assert format.shorten("abcdefghij", 10) == "abcdefghij"
    assert format.shorten("abcdefghij", 7) == "abcd…ij"


def test_folded_slices_keep_the_sum() -> None:
    slices = [Slice("idle", "lock", 1), Slice("idle", "io", 2), Slice("compute", None, 3), Slice("idle", "sync", 4)]
    rows = format.slice_shares(slices, 10, keep=3)
    assert [(row.kind, row.cause, row.ns) for row in rows] == [
        ("compute", None, 3),
        ("idle", "sync", 4),
        ("other", None, 3),
    ]
    assert rows[-1].folded == (("idle", "io"), ("idle", "lock"))


def test_slices_too_small_to_show_are_folded_only_together() -> None:
    slices = [Slice("compute", None, 99_990), Slice("idle", "io", 7)]
    assert [row.kind for row in format.slice_shares(slices, 100_000, keep=5)] == ["compute", "idle"]
    slices.append(Slice("idle", "lock", 3))
    assert [(row.kind, row.ns) for row in format.slice_shares(slices, 100_000, keep=5)] == [
        ("compute", 99_990),
        ("other", 10),
    ]


def test_remedies_of_the_verdict_are_shown_once() -> None:
    diagnosis = launch_bound()
    diagnosis.verdict.remedies = list(diagnosis.findings[0].remedies)
    for name in ("terminal", "markdown", "html"):
        assert _visible(name, render(name, diagnosis)).count("so that decode runs in CUDA graphs") == 1
    assert "finding 1" in _page(diagnosis).text
    diagnosis.findings = []
    for name in ("terminal", "markdown", "html"):
        assert _visible(name, render(name, diagnosis)).count("so that decode runs in CUDA graphs") == 1


def test_evidence_prefers_known_values() -> None:
    items = [Evidence("a_ns", None, "ns"), Evidence("b_ratio", 0.5, "ratio"), Evidence("c_count", 3, "count")]
    assert format.evidence_texts(items, 2, Cost(9)) == ["b 50.0 %", "c count 3"]
    assert format.evidence_texts(items, 3, Cost(9)) == ["a not known", "b 50.0 %", "c count 3"]
    assert format.evidence_texts([Evidence("a_ns", 9, "ns"), *items], 3, Cost(9))[0] == "a not known"


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (Gain(None, None, ""), "not known"),
        (Gain(0.1, None, ""), "at least 10.0 % of the window"),
        (Gain(0.0, 0.154, ""), "up to 15.4 % of the window"),
        (Gain(None, 0.3, ""), "up to 30.0 % of the window"),
        (Gain(0.2, 0.2, ""), "20.0 % of the window"),
    ],
)
def test_gain_text(gain: Gain, text: str) -> None:
    assert format.gain_text(gain) == text


def test_cost_text() -> None:
    assert format.cost_text(Cost(250 * MS), 1_000 * MS) == "250 ms, 25.0 % of window"
    assert format.cost_text(Cost(9_600_000, "bytes"), 1_000 * MS) == "9.60 MB"
    assert format.cost_text(Cost(None), 1_000 * MS) == "cost not known"


def test_prose_sets_flags_and_quotes_apart() -> None:
    assert [
        piece
        for piece, is_code in format.prose("drop --a-b so `x y` runs; --m 64 or --t=a,b. --c '{1 2}' ok")
        if is_code
    ] == [
        "--a-b",
        "x y",
        "--m 64",
        "--t=a,b",
        "--c '{1 2}'",
    ]


def test_place_without_name_device_or_stream_is_empty() -> None:
    assert format.where_place(Where(0, 1)) == ""


def test_terminal_cost_gets_its_own_line_when_the_title_is_long() -> None:
    diagnosis = launch_bound()
    finding: Finding = diagnosis.findings[0]
    finding.title = "A title that leaves no room on its line for what the finding costs"
    assert re.search(r"^   cost +310 ms, 31.0 % of window$", render("terminal", diagnosis), re.MULTILINE)
