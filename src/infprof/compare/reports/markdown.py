"""The comparison as Markdown, to paste into an issue or a pull request."""

from __future__ import annotations

import re

from infprof.compare.model import Comparison
from infprof.compare.reports.document import sections
from infprof.compare.reports.sections import Table
from infprof.reports import format as fmt

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def render(comparison: Comparison) -> str:
    """GitHub's Markdown with a final newline; names from a trace cannot become markup."""
    parts = [f"**{_text(comparison.headline)}**"]
    for section in sections(comparison):
        parts.append(f"### {_text(section.title)}")
        if section.table is not None and section.table.rows:
            parts.append(_table(section.table))
        if section.lines:
            parts.append("\n".join(f"- {_text(line)}" for line in section.lines))
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    aligned = [":--" if i < table.names else "--:" for i in range(len(table.columns))]
    rows = [table.columns, tuple(aligned), *table.rows]
    return "\n".join(f"| {' | '.join(row if row is rows[1] else map(_text, row))} |" for row in rows)


def _text(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", fmt.clean(text))
