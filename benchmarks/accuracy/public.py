"""Recorded traces with a known answer: the public ones beside this repository, and the shipped sample traces.

``expected.tsv`` of the public traces names the verdicts that are right; of the samples ``truth.yaml`` does, with the
findings that must be there. What else may be found in them nobody counted, so that no other finding is judged.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import yaml
from benchmarks.accuracy.labels import ANY, Case, Label

from infprof.simulator.samples import sample_dirs

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"


def cases() -> Iterator[Case]:
    """The sample traces, and the public ones where they are there."""
    for folder in sample_dirs():
        yield Case(f"sample-{folder.name}", "samples", partial(_sample, folder))
    for row in _rows():
        name = f"public-{Path(row['file']).name.split('.')[0]}-{row['window']}"
        yield Case(name, "public", partial(_public, row), row["window"])


def _rows() -> list[dict[str, str]]:
    if not (TRACES / "expected.tsv").is_file():
        return []
    with (TRACES / "expected.tsv").open(encoding="utf-8") as table:
        rows = list(csv.DictReader(table, delimiter="\t"))
    of_steady_part = {row["file"] for row in rows if row["window"] == "auto"}
    for row in [row for row in rows if row["window"] == "full" and row["file"] not in of_steady_part]:
        # A file without a row for the steady part: the row of the whole holds, but what is too short may be start-up.
        code = row["code"] + ("|only-startup" if row["code"] == "too-short" else "")
        rows.append({**row, "window": "auto", "code": code})
    return rows


def _public(row: dict[str, str], folder: Path) -> tuple[list[Path], Label]:
    causes = ANY if row["cause"] == "-" else frozenset(row["cause"].split("|"))
    codes = frozenset() if row["code"] == "-" else frozenset(row["code"].split("|"))
    bottlenecks = ("scheduling-bubble", "pcie-limited", "communication-bound")
    verdicts = {
        cls: codes if cls == "unusable" else causes if cls in bottlenecks else ANY for cls in row["class"].split("|")
    }
    return [TRACES / row["file"]], Label(verdicts)


def _sample(source: Path, folder: Path) -> tuple[list[Path], Label]:
    truth = yaml.safe_load((source / "truth.yaml").read_text(encoding="utf-8"))
    verdict, findings = truth["verdict"], truth["findings"]
    causes = ANY if verdict["cause"] is None else frozenset({verdict["cause"]})
    must = frozenset(findings["must"])
    return [source / "trace.sqlite"], Label(
        {verdict["class"]: causes},
        must=tuple(frozenset({rule}) for rule in sorted(must)),
        judged=must,
        healthy=bool(findings["not_above_info"]),
    )
