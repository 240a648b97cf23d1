"""The numbers that decide a verdict: ``rules/thresholds.yaml``, which a folder of the user's may override in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from infprof.errors import UsageError
from infprof.rules.expression import unknown

FILE_NAME = "thresholds.yaml"


@dataclass(frozen=True)
class Thresholds:
    """What each number means stands beside it in the file. Shares are 0-1, times are nanoseconds."""

    exposed_comm: float
    host_copy: float
    recoverable_idle: float
    no_demand: float
    winner_min: float
    compute_max: float
    unexplained_max: float
    low_confidence_rest: float
    near_miss: float
    close_call: float
    too_short_span_ns: int
    short_span_ns: int
    too_short_ops: int
    too_short_op_ns: int
    limiter_clear: float
    limiter_ahead: float
    strong_high: float
    strong_low: float
    latency_max: float
    work_covered: float
    capture_matched: float
    capture_same_names: float
    throttle_clock: float
    kernel_gap_ns: int
    startup_stall_ns: int
    first_launch_factor: float
    stdin_read_ns: int
    unknown_kernels: float
    capture_slows: float
    profiler_works: float
    small_kernel_ns: int
    small_copy_bytes: int
    straggler_share: float
    straggler_min: float
    straggler_last: float
    straggler_few: float
    straggler_explained: float
    straggler_collectives: int
    link_lost: float
    volume_bandwidth_share: float
    severity_warning: float
    severity_critical: float


THRESHOLD_NAMES = tuple(f.name for f in fields(Thresholds))
_WHOLE = frozenset(name for name in THRESHOLD_NAMES if name.endswith(("_ns", "_bytes", "_ops", "_collectives")))


def load_thresholds(dirs: Sequence[Path]) -> Thresholds:
    """Merge the thresholds files of ``dirs``, later ones over earlier ones; every number must be given somewhere."""
    values: dict[str, float] = {}
    for directory in dirs:
        path = Path(directory) / FILE_NAME
        if path.is_file():
            values.update(_read(path))
    missing = [name for name in THRESHOLD_NAMES if name not in values]
    if missing:
        raise UsageError(f"no {FILE_NAME} gives {', '.join(missing)}; the shipped one gives all of them")
    return Thresholds(**values)  # type: ignore[arg-type]  # _read made whole numbers of those that must be


def _read(path: Path) -> dict[str, float]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a YAML file: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(f"{path}: expected lines of the form `name: number`")
    return {str(name): _checked(path, str(name), value) for name, value in data.items()}


def _checked(path: Path, name: str, value: object) -> float:
    if name not in THRESHOLD_NAMES:
        raise UsageError(f"{path}: {unknown('threshold', name, THRESHOLD_NAMES)}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise UsageError(f"{path}: {name} must be a number of at least 0, not {value!r}")
    if name in _WHOLE:
        if value != int(value):
            raise UsageError(f"{path}: {name} must be a whole number, not {value!r}")
        return int(value)
    return float(value)
