"""The target with PyTorch's profiler in each of its processes that use torch, from ``launch`` to ``close``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from infprof.errors import EXIT_COLLECTOR, InfprofError
from infprof.probes.nsys_messages import Note
from infprof.probes.torch_backend import gathering
from infprof.probes.torch_backend.gathering import Answer
from infprof.probes.torch_backend.injection import InjectedBackend, still_at_work

# The longest part of a capture that is kept of a process; what is longer is the last one of these.
PART_S = 30.0
# A process that grows by as much while it is recorded is not recorded on until the next part.
GROWTH_BYTES = 2 << 30


class TorchBackend(InjectedBackend):
    """One target under PyTorch's profiler. ``notes`` grows with what was left out or went wrong."""

    name = "torch"
    why = "the program is Python, and PyTorch brings a profiler of its own"
    recorder = "PyTorch's profiler"
    modules = ("torch",)
    injected: ClassVar[Mapping[str, Path]] = {
        "sitecustomize.py": Path(__file__).with_name("injected.py"),
        "hooks.py": Path(__file__).with_name("hooks.py"),
        "recorder.py": Path(__file__).with_name("recorder.py"),
    }

    def _settings(self) -> dict[str, Any]:
        return {"part_s": PART_S, "growth_bytes": GROWTH_BYTES}

    def _gather(self) -> list[Path]:
        self._answers = gathering.answers(self._control)
        if not any(still_at_work(answer) for answer in self._answers):
            for path in gathering.rescue_unfinished(self.plan.folder):
                self._note("trace-cut", f"{path.name} is cut short: its process ended while it wrote the trace.")
        self._raw = gathering.traces(self.plan.folder)
        return list(self._raw)

    def export(self, report: Path) -> Path:
        """A process's trace as the bundle keeps it. Raises InfprofError (exit 4); the trace stays as it was then."""
        try:
            trace, gpu_work = gathering.compress(report)
        except OSError as error:
            raise InfprofError(
                f"{report.name} could not be compressed: {error.strerror or error}. It can be analysed as it is.",
                EXIT_COLLECTOR,
            ) from None
        name = report.name[: -len(gathering.TRACE)]
        self._found[name] = {"trace": trace.name, "gpu_work": gpu_work, "size": trace.stat().st_size}
        return trace

    def why_no_trace(self) -> Note:
        """Why no process left a trace."""
        if not self._answers:
            return Note(
                "no-torch",
                "No process of the program imported torch where PyTorch's profiler could get in, so no timeline was recorded.",
                "Is it a PyTorch program? If not, record with nsys; `python -I`, -E and -S keep the profiler out.",
            )
        return self._no_report()

    def _note_recorded(self, what: str, answer: Answer) -> None:
        if answer.parts > 1:
            self._note(
                "recorded-in-parts",
                f"{what} was recorded in {answer.parts} parts, of which one of {answer.kept_s:.1f} s is kept.",
                f"Capture {PART_S:.0f} s at most (--duration), from a moment at which all processes run.",
            )
        super()._note_recorded(what, answer)
