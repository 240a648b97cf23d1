"""The target with CUPTI's activity records kept in each of its processes that use CUDA, from ``launch`` to ``close``."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from infprof.errors import EXIT_COLLECTOR, InfprofError
from infprof.probes import torch_backend
from infprof.probes.cupti_backend.layout import POINTERS
from infprof.probes.cupti_backend.recording import read_recording
from infprof.probes.cupti_backend.writing import write_sqlite
from infprof.probes.nsys_messages import Note
from infprof.probes.torch_backend import gathering
from infprof.probes.torch_backend.injection import InjectedBackend

_SUFFIX = ".cupti"
_INSIDE = Path(__file__).with_name("inside")
_SHARED = Path(torch_backend.__file__).parent
# What a program imports before it uses CUDA; which of them do, the process itself shows.
_USERS_OF_CUDA = (
    "torch cupy cuda jaxlib tensorflow numba pycuda tensorrt tensorrt_llm onnxruntime paddle triton mxnet llama_cpp "
    "ctranslate2 rmm cudf warp nvtx ctypes"
)


class CuptiBackend(InjectedBackend):
    """One target under CUPTI. ``notes`` grows with what was left out or went wrong."""

    name = "cupti"
    why = "it was asked for; experimental, not yet run on a GPU"
    recorder = "the CUPTI collector"
    modules = tuple(_USERS_OF_CUDA.split())
    injected: ClassVar[Mapping[str, Path]] = {
        "sitecustomize.py": _SHARED / "injected.py",
        "following.py": _SHARED / "hooks.py",
        "recorder.py": _SHARED / "recorder.py",
        **{name: _INSIDE / name for name in ("hooks.py", "collector.py", "buffers.py", "library.py")},
    }

    def _settings(self) -> dict[str, Any]:
        return {"graph_trace": self.plan.graph_trace, "pointers": POINTERS}

    def _gather(self) -> list[Path]:
        self._answers = gathering.answers(self._control)
        self._raw = sorted(self.plan.folder.glob(f"process-*{_SUFFIX}"))
        return list(self._raw)

    def export(self, report: Path) -> Path:
        """A process's records as an SQLite file of nsys's form, beside them; they are removed then.

        Raises InfprofError (exit 4); the records stay where they are then.
        """
        trace = report.with_suffix(".sqlite")
        try:
            recording = read_recording(report)
            if not recording.about:
                raise InfprofError(f"{report.name} holds no record: its process ended too early.", EXIT_COLLECTOR)
            written = write_sqlite(recording, trace)
            report.unlink()
        except (OSError, sqlite3.Error) as error:
            why = getattr(error, "strerror", None) or error
            raise InfprofError(f"{report.name} could not be made a trace: {why}.", EXIT_COLLECTOR) from None
        name = report.name[: -len(_SUFFIX)]
        self._found[name] = {
            "trace": trace.name,
            "gpu_work": written.gpu_operations,
            "size": written.rows,
        }
        return trace

    def why_no_trace(self) -> Note:
        """Why no process left a trace."""
        if not self._answers:
            return Note(
                "no-cuda",
                "No process of the program imported anything that uses CUDA, so no timeline was recorded.",
                "Is it a Python program that uses an NVIDIA GPU? `python -I`, -E and -S keep the collector out.",
            )
        return self._no_report()
