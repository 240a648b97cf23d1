"""Reports: one module each, ``render(diagnosis, options=None) -> str``, and the tuple that lists them.

A new report is one file and one line in ``REPORTS``. Modules are imported when they are used, and import their own
heavy libraries (rich, jinja2, plotly) inside functions, so that ``infprof --help`` stays fast.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infprof.errors import UsageError
from infprof.reports.files import write_atomic

if TYPE_CHECKING:
    from infprof.diagnosis import Detailed
    from infprof.results import Diagnosis

__all__ = [
    "REPORTS",
    "TIMELINE",
    "ReportInfo",
    "render",
    "report_by_name",
    "report_for_path",
    "write_atomic",
    "write_report",
]


@dataclass(frozen=True)
class ReportInfo:
    """A report by name, the file extensions that choose it, and the module that renders it."""

    name: str
    extensions: tuple[str, ...]
    module: str
    summary: str

    def render(self, diagnosis: Diagnosis, options: Any = None) -> str:
        """The report as text; ``options`` is the module's own options class, None for its defaults."""
        text: str = import_module(self.module).render(diagnosis, options)
        return text


REPORTS: tuple[ReportInfo, ...] = (
    ReportInfo("terminal", (".txt",), "infprof.reports.terminal", "text for the terminal, plain when piped"),
    ReportInfo("json", (".json",), "infprof.reports.json_report", "the whole diagnosis for programs"),
    ReportInfo("markdown", (".md", ".markdown"), "infprof.reports.markdown", "text to paste in an issue"),
    ReportInfo("html", (".html", ".htm"), "infprof.reports.html", "one self-contained page with charts"),
)

# Draws the trace itself, so it needs more than the diagnosis and writes its file in pieces: ``write_report`` only.
TIMELINE = ReportInfo(
    "perfetto", (".perfetto.json", ".perfetto.json.gz"), "infprof.reports.perfetto", "a timeline for ui.perfetto.dev"
)


def report_by_name(name: str) -> ReportInfo:
    """The report called ``name``. Raises UsageError with the nearest name when there is none."""
    for report in REPORTS:
        if report.name == name:
            return report
    names = [report.name for report in REPORTS]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(names)}."
    raise UsageError(f"There is no report called {name}. {hint}")


def report_for_path(path: str | Path) -> ReportInfo:
    """The report that the extension of ``path`` asks for. Raises UsageError when it asks for none."""
    name = Path(path).name.lower()
    # The timeline's extensions end like those of the JSON report.
    every = (*REPORTS, TIMELINE)
    for report in reversed(every):
        if name.endswith(report.extensions) and not name.startswith(report.extensions):
            return report
    known = ", ".join(extension for report in every for extension in report.extensions)
    raise UsageError(f"The extension of {path} does not say which report to write. Use one of {known}.")


def render(name: str, diagnosis: Diagnosis, options: Any = None) -> str:
    """The report called ``name`` of ``diagnosis`` as text."""
    return report_by_name(name).render(diagnosis, options)


def write_report(name: str, detailed: Detailed, path: Path, force: bool = False, options: Any = None) -> None:
    """Write the report called ``name`` to a file, whole or not at all; an existing one only with ``force``. ``options`` as ``render`` takes them.

    Raises UsageError where the file cannot be written.
    """
    if name == TIMELINE.name:
        from infprof.reports.perfetto import write_perfetto

        write_perfetto(path, detailed, force)
    else:
        write_atomic(path, render(name, detailed.diagnosis, options), force)
