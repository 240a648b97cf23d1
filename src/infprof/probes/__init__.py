"""Probes: what collects evidence while a program runs. The registry is ``PROBES`` below.

A probe is one module with a class that fits ``Probe`` and one line in ``PROBES``. It declares its signals, says with
``Unavailable`` why it cannot work here, and hands the session the functions to call and how often. It never raises for
a value that a machine does not have: ``Recorder.missing`` records that once, with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from infprof.errors import UsageError
from infprof.probes.recorder import Recorder

Kind = Literal["gauge", "counter"]


class Signal(NamedTuple):
    """What a series means: a ``counter`` only grows (its increase counts, a fall is a restart), a ``gauge`` does not."""

    unit: str
    kind: Kind
    meaning: str


class Task(NamedTuple):
    """A function to call every ``period_s`` seconds, in a thread of its own; ``at_end``: once more when the run stops."""

    name: str
    period_s: float
    run: Callable[[Recorder], None]
    at_end: bool = False


class Unavailable(Exception):
    """The probe cannot work here: one sentence that says why and what would help."""


@dataclass(frozen=True)
class ProbeContext:
    """What a probe may know of the target.

    ``pid`` is the root of the target's process tree, ``environ`` and ``command`` are the target's, ``root`` is where
    /proc and /sys are found (tests put a folder there), ``metrics_url`` is what the user named (None: look for it),
    ``log_lines`` gives the lines the target has printed so far, where its output is read at all.
    """

    pid: int
    command: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path("/")
    metrics_url: str | None = None
    log_lines: Callable[[], Sequence[str]] | None = None

    def path(self, absolute: str) -> Path:
        """An absolute path of the machine, below ``root``."""
        return self.root / absolute.lstrip("/")


class Probe(Protocol):
    """A source of samples. One object serves one run: ``start``, then its tasks, then ``stop``."""

    name: str
    signals: Mapping[str, Signal]

    def start(self, context: ProbeContext, out: Recorder) -> Sequence[Task]:
        """Open what is needed, record the facts that do not change, and give the tasks.

        Raises Unavailable where nothing can be collected.
        """
        ...

    def stop(self, out: Recorder) -> None:
        """Record what only the end knows and let everything go; never raises."""
        ...


# name → "module:class", imported when used.
PROBES: dict[str, str] = {
    "nvml": "infprof.probes.nvml:NvmlProbe",
    "amd": "infprof.probes.amd:AmdProbe",
    "host": "infprof.probes.host:HostProbe",
    "network": "infprof.probes.network:NetworkProbe",
    "serving": "infprof.probes.serving:ServingProbe",
}


def make_probe(name: str) -> Probe:
    """A fresh probe by name. Raises UsageError for an unknown one."""
    if name not in PROBES:
        raise UsageError(f"There is no probe called {name}: choose from {', '.join(PROBES)}.")
    module, _, cls = PROBES[name].partition(":")
    made: Probe = getattr(importlib.import_module(module), cls)()
    return made
