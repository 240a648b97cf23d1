"""What records the timeline of a run: nsys, PyTorch's profiler, CUPTI, or nothing; which of them, and why.

A backend is one class that fits ``Backend``, and one branch in ``choose``.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from infprof.errors import EXIT_COLLECTOR, InfprofError, UsageError
from infprof.probes import Unavailable

if TYPE_CHECKING:
    from infprof.probes.nsys_command import CapturePlan
    from infprof.probes.nsys_messages import Note
    from infprof.probes.nsys_target import Stream

BackendName = Literal["auto", "nsys", "torch", "cupti", "none"]
BACKENDS: tuple[BackendName, ...] = ("auto", "nsys", "torch", "cupti", "none")
# Those that run inside the program's own Python.
_INJECTED = ("torch", "cupti")


class Backend(Protocol):
    """The recorder of one target, from ``launch`` to ``close``; ``notes`` grows with what was left out or went wrong.

    ``version`` may be empty. ``waits_for_children``: it waits for processes of its own that the run must not reap.
    """

    name: str
    why: str
    waits_for_children: bool
    version: tuple[int, ...]
    notes: list[Note]

    def launch(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> subprocess.Popen[bytes]: ...

    def target_pid(self) -> int | None: ...

    def target_exit_code(self) -> int | None: ...

    def start(self) -> None: ...

    def stop(self, timeout_s: float = 300) -> list[Path]: ...

    def finish(self, timeout_s: float) -> list[Path]: ...

    def watch_space(self) -> Note | None: ...

    def export(self, report: Path) -> Path: ...

    def ranked(self, traces: Sequence[Path]) -> list[Path]:
        """The exported traces, the one to be diagnosed last."""
        ...

    def details(self) -> dict[str, Any]:
        """What the manifest says of the backend beside its name; asked for once all is exported."""
        ...

    def why_no_trace(self) -> Note: ...

    def close(self) -> None: ...


class Choice(NamedTuple):
    """The backend taken, None for telemetry alone, and why it is that one.

    ``said``: what the user is told of it, in lines. ``is_fallback``: the first choice of ``auto`` could not be had.
    """

    backend: Backend | None
    why: str
    said: str | None
    is_fallback: bool = False


def check_options(name: str, capture: str, pid: int | None, nsys_options: bool) -> None:
    """Raises UsageError for options that the backend asked for cannot follow."""
    if pid is not None and name in ("nsys", *_INJECTED):
        raise UsageError(f"--pid: {name} cannot attach to a running process. Start it with `infprof run -- COMMAND`.")
    if name in _INJECTED and nsys_options:
        raise UsageError(f"--backend {name}: --nsys and --nsys-arg are for nsys. Leave them out, or choose nsys.")
    if capture != "session" and (name in ("none", *_INJECTED) or pid is not None):
        why = "--pid" if pid is not None else f"--backend {name}"
        raise UsageError(f"--capture {capture}: only nsys can do that, and {why} leaves it out.")


def choose(
    name: str, plan: CapturePlan, command: Sequence[str], environ: Mapping[str, str], nsys: Path | None
) -> Choice:
    """The backend for a command: the one asked for, or with ``auto`` nsys, else PyTorch's profiler, else none.

    CUPTI is never chosen: it is experimental.

    Raises InfprofError (exit 4) where the one asked for cannot work here.
    """
    if name == "none":
        return Choice(None, "--backend none", None)
    if name in _INJECTED:
        try:
            return _taken((_torch if name == "torch" else _cupti)(plan, command, environ), None)
        except Unavailable as error:
            raise InfprofError(str(error), EXIT_COLLECTOR) from None
    try:
        return _taken(_nsys(plan, environ, nsys), None, "--backend nsys" if name == "nsys" else None)
    except Unavailable as error:
        if name == "nsys" or nsys is not None:
            raise InfprofError(str(error), EXIT_COLLECTOR) from None
        without = str(error)
    return _without_nsys(without, plan, command, environ)


def _without_nsys(without: str, plan: CapturePlan, command: Sequence[str], environ: Mapping[str, str]) -> Choice:
    if plan.trigger != "session":
        return _telemetry_only(without)
    try:
        backend = _torch(plan, command, environ)
    except Unavailable as error:
        return _telemetry_only(f"{without} {error}")
    if not backend.is_python:
        hint = "If the program starts a Python that uses PyTorch, --backend torch records that."
        return _telemetry_only(f"{without} {hint}")
    return _taken(backend, without)


def _telemetry_only(why: str) -> Choice:
    return Choice(None, why, f"no timeline is recorded, only telemetry:\n{why}", is_fallback=True)


def _taken(backend: Backend, without: str | None, asked: str | None = None) -> Choice:
    """The choice of a backend: ``without`` says why it is not the first one, ``asked`` by which option it was named."""
    version = " ".join([backend.name, *filter(None, [".".join(map(str, backend.version))])])
    if backend.name == "cupti":
        return Choice(backend, f"--backend cupti, {backend.why}", f"recording with CUPTI: {backend.why}")
    what = version if backend.name == "nsys" else "the profiler of PyTorch"
    if without is not None:
        reason = f"{backend.why[0].upper()}{backend.why[1:]}."
        said = f"recording with {what}: {backend.why}.\nnot with nsys: {without[0].lower()}{without[1:]}"
        return Choice(backend, f"{without} {reason}", said, is_fallback=True)
    why = asked or (backend.why if backend.name == "nsys" else f"--backend {backend.name}")
    return Choice(backend, why, f"recording with {what} ({why})")


def _nsys(plan: CapturePlan, environ: Mapping[str, str], nsys: Path | None) -> Backend:
    from infprof.probes.nsys import NsysBackend

    return NsysBackend(plan, environ, nsys=nsys)


def _torch(plan: CapturePlan, command: Sequence[str], environ: Mapping[str, str]) -> Any:
    from infprof.probes.torch_backend import TorchBackend

    return TorchBackend(plan, command, environ)


def _cupti(plan: CapturePlan, command: Sequence[str], environ: Mapping[str, str]) -> Any:
    from infprof.probes.cupti_backend import CuptiBackend

    return CuptiBackend(plan, command, environ)
