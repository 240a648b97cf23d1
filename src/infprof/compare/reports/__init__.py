"""Reports of a comparison: one module each, ``render(comparison) -> str``, and the tuple that lists them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from infprof.compare.model import Comparison
from infprof.errors import UsageError


@dataclass(frozen=True)
class CompareReport:
    """A report by name, the extensions that choose it, and the module that renders it."""

    name: str
    extensions: tuple[str, ...]
    module: str


COMPARE_REPORTS = (
    CompareReport("text", (".txt",), "infprof.compare.reports.text"),
    CompareReport("sarif", (".sarif", ".sarif.json"), "infprof.compare.reports.sarif"),
    CompareReport("json", (".json",), "infprof.compare.reports.json_report"),
    CompareReport("markdown", (".md", ".markdown"), "infprof.compare.reports.markdown"),
    CompareReport("junit", (".xml",), "infprof.compare.reports.junit"),
)


def render(name: str, comparison: Comparison) -> str:
    """The report of this name as text with a final newline."""
    report = next(report for report in COMPARE_REPORTS if report.name == name)
    text: str = import_module(report.module).render(comparison)
    return text


def report_for_path(path: Path) -> str:
    """The name of the report that the extension asks for. Raises UsageError where it asks for none."""
    for report in COMPARE_REPORTS:
        if path.name.lower().endswith(report.extensions):
            return report.name
    known = ", ".join(extension for report in COMPARE_REPORTS for extension in report.extensions)
    raise UsageError(f"The extension of {path} does not say which report to write. Use one of {known}.")
