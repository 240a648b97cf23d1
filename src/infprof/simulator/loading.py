"""Descriptions of runs: a spec, which says what threads do, or a workload, which says what an engine is asked to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infprof.simulator import spec
from infprof.simulator.fields import read_yaml
from infprof.simulator.spec import Spec


def load_spec(path: str | Path) -> Spec:
    """Read and check a description, and compile it where it is a workload.

    Raises UsageError, in one sentence, for what it cannot read or does not know.
    """
    return parse_spec(read_yaml(Path(path)), str(path))


def parse_spec(data: Any, source: str = "spec") -> Spec:
    """Check a description given as a dict; ``source`` names it in errors. Raises UsageError."""
    if not isinstance(data, dict) or "workload" not in data:
        return spec.parse_spec(data, source)
    from infprof.simulator.workload import compile_workload, parse_workload

    return compile_workload(parse_workload(data, source))


def workload_spec(preset: str, gpu: str, fault: str, ranks: int) -> Spec:
    """The spec of a workload with everything else left at its default. Raises UsageError for names that are not known."""
    workload = {"preset": preset, "gpu": gpu, "fault": fault, "tensor_parallel": ranks}
    return parse_spec({"name": f"{preset}-{fault}", "workload": workload}, "--workload")
