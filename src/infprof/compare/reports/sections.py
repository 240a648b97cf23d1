"""A section of a report: sentences and a table, as text and Markdown show them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Table:
    """The first ``names`` columns are text, the others figures; column ``gives`` gives way where a line is too long."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    names: int = 1
    gives: int = 0


@dataclass
class Section:
    title: str
    lines: list[str] = field(default_factory=list)
    table: Table | None = None
