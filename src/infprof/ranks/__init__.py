"""Several files of one job: each diagnosed by itself, over processes or machines, then compared rank by rank.

``analyze_inputs`` is the entry point. Clocks are aligned on collectives (``alignment``), arrivals compared
(``arrivals``), and what one trace could not tell is judged again (``judging``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infprof.diagnosis import Options
from infprof.errors import UsageError
from infprof.measures.window import parse_window
from infprof.ranks.inputs import expand, labels
from infprof.ranks.joint import joint_diagnosis
from infprof.ranks.workers import over_dask, over_processes
from infprof.resources import rules_dir
from infprof.results import Diagnosis
from infprof.rules import load

__all__ = ["analyze_inputs", "expand"]


def analyze_inputs(
    inputs: Sequence[str | Path],
    options: Options | None = None,
    jobs: int | None = None,
    scheduler: str | None = None,
) -> Diagnosis:
    """Diagnose several files, one per rank, as one job.

    ``inputs`` may be files, folders and globs. ``jobs`` limits the processes (default: one per file and core); with
    ``scheduler`` the workers of that dask cluster do the work instead and must see the same paths. The result does not
    depend on the order of the inputs or on the number of workers. A file that fails is listed in ``job.failures``.

    Processes are spawned: call this from a program with an ``if __name__ == "__main__"`` guard. Raises InfprofError
    where no file can be read, UsageError for options that do not fit.
    """
    options = options or Options()
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs {jobs}: choose a number of at least 1.")
    if jobs is not None and scheduler is not None:
        raise UsageError("--jobs and --scheduler exclude each other: the cluster has its own number of workers.")
    if options.range_name is None and options.window not in ("auto", "full"):
        parse_window(options.window)
    paths = expand(inputs)
    rules = load([rules_dir(), *options.rule_dirs])
    results = over_processes(paths, options, jobs) if scheduler is None else over_dask(paths, options, scheduler)
    return joint_diagnosis(paths, labels(paths), results, rules, options)
