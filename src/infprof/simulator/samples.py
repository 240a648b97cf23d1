"""Regenerates the sample traces from their specs: ``python -m infprof.simulator.samples``.

Each folder of sample_traces/ holds ``spec.yaml``, and, made from it, ``trace.sqlite`` and ``truth.yaml``: the verdict
that the trace must get (the spec's ``expect``), what of the run PyTorch's profiler has no rows for, and the figures that
the analysis must reach to the nanosecond. The verdict and the figures hold for a Kineto trace of the run as well, as far
as they do not rest on what it lacks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import yaml

from infprof.errors import InfprofError
from infprof.resources import sample_traces_dir
from infprof.simulator.engine import simulate
from infprof.simulator.export import write_nsys_sqlite
from infprof.simulator.kineto import not_in_kineto
from infprof.simulator.loading import load_spec
from infprof.simulator.truth import truth


def sample_dirs() -> list[Path]:
    """The folders of the sample traces that have a spec, by name."""
    return sorted(path.parent for path in sample_traces_dir().glob("*/spec.yaml"))


def build(folder: Path) -> None:
    """Write trace.sqlite and truth.yaml of the sample in ``folder``."""
    spec = load_spec(folder / "spec.yaml")
    trace = simulate(spec)
    write_nsys_sqlite(trace, folder / "trace.sqlite")
    answer: dict[str, Any] = {
        "description": spec.description.strip(),
        **spec.expect,
        "not_in_kineto": not_in_kineto(trace),
        "key_figures": truth(trace),
    }
    text = "# Written from spec.yaml by python -m infprof.simulator.samples\n"
    text += yaml.safe_dump(answer, sort_keys=False, allow_unicode=True, width=100)
    temporary = folder / ".truth.yaml.tmp"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, folder / "truth.yaml")


def main() -> int:
    try:
        for folder in sample_dirs():
            build(folder)
            print(f"{folder.name}: {(folder / 'trace.sqlite').stat().st_size / 1000:.0f} kB")
    except InfprofError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
