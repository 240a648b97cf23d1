"""``infprof simulate``: from a description, or a choice of workload, fault and GPU, to files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infprof.errors import UsageError
from infprof.reports.files import check_target, write_atomic
from infprof.simulator.answer import answer
from infprof.simulator.engine import simulate
from infprof.simulator.export import write_nsys_sqlite
from infprof.simulator.kineto import write_kineto
from infprof.simulator.loading import load_spec, workload_spec
from infprof.simulator.spec import Spec


def simulate_files(
    path: Path | None,
    chosen: Mapping[str, Any],
    output: Path,
    truth: Path | None,
    kineto: Mapping[str, Any],
    force: bool,
) -> list[Path]:
    """Write the trace, and the truth where asked for; returns the files written.

    ``chosen`` has the options that stand in for a description, by their names on the command line, None where not given;
    ``kineto`` those of ``write_kineto``. Raises UsageError for what does not go together or stands in the way.
    """
    spec = _spec(path, chosen)
    is_json = output.name.endswith((".json", ".json.gz"))
    if not is_json and any(kineto.values()):
        raise UsageError(f"{output} is an nsys export: --dialect, --stack and --sync-events go with .json or .json.gz.")
    if truth is not None:
        if truth == output:
            raise UsageError(f"{truth} cannot hold both the trace and the truth: name two files.")
        check_target(truth, force)
    trace = simulate(spec)
    if is_json:
        options = {**kineto, "dialect": kineto["dialect"] or "2.13"}
        written = write_kineto(trace, output, force=force, **options)
    else:
        check_target(output, force)
        written = [write_nsys_sqlite(trace, output)]
    if truth is not None:
        write_atomic(truth, json.dumps(answer(trace), indent=1) + "\n", force)
        written.append(truth)
    return written


def _spec(path: Path | None, chosen: Mapping[str, Any]) -> Spec:
    given = [name for name, value in chosen.items() if value is not None]
    if path is not None:
        if given:
            raise UsageError(f"{path} describes all that runs: leave {given[0]} away, or write it there.")
        return load_spec(path)
    if chosen["--workload"] is None:
        raise UsageError("Give a SPEC, or --workload with a preset such as 3b.")
    from infprof.simulator.workload import DEFAULT_GPU

    return workload_spec(
        chosen["--workload"],
        gpu=chosen["--gpu"] or DEFAULT_GPU,
        fault=chosen["--fault"] or "none",
        ranks=chosen["--ranks"] or 1,
    )
