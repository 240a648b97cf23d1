"""The comparison for a terminal: plain text of at most 80 columns, the headline first."""

from __future__ import annotations

import textwrap

from infprof.compare.model import Comparison
from infprof.compare.reports.document import sections
from infprof.compare.reports.sections import Table
from infprof.reports import format as fmt

WIDTH = 80
_GAP = 2
_NARROWEST = 9


def render(comparison: Comparison) -> str:
    """Text with a final newline; names give way where a line would be too long."""
    lines = textwrap.wrap(fmt.clean(comparison.headline), WIDTH, break_on_hyphens=False)
    for section in sections(comparison):
        lines += ["", section.title]
        if section.table is not None and section.table.rows:
            lines += _table(section.table)
        for text in section.lines:
            lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _table(table: Table) -> list[str]:
    rows = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    excess = 2 + sum(widths) + _GAP * (len(widths) - 1) - WIDTH
    others = (i for i in reversed(range(table.names)) if i != table.gives)
    for give in (table.gives, *others):
        less = min(max(excess, 0), max(widths[give] - _NARROWEST, 0))
        widths[give] -= less
        excess -= less
    while excess > 0:
        # Factors of billions: the widest column gives the rest.
        widest = max(range(len(widths)), key=lambda i: widths[i])
        widths[widest], excess = widths[widest] - 1, excess - 1
    out = []
    for row in rows:
        cells = [fmt.shorten(row[i], widths[i]) for i in range(len(row))]
        padded = [
            cell.ljust(w) if i < table.names else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        out.append("  " + (" " * _GAP).join(padded))
    return out
