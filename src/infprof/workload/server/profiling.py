"""/start_profile and /stop_profile: PyTorch's profiler, or the CUDA profiler's window, around steps of the engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from infprof.errors import InfprofError
from infprof.workload.recording import StepRecorder
from infprof.workload.server.errors import ApiError

PROFILERS = ("none", "torch", "cuda")


class Profiling:
    """All methods are for the engine's thread: PyTorch's profiler sees the thread that starts it.

    ``folder`` gets a trace per pair of start and stop; None opens and closes the CUDA profiler's window instead, which is
    what ``nsys --capture-range=cudaProfilerApi`` waits for. A trace ends after ``most_steps`` steps, or a forgotten stop
    would fill the memory. ``say`` gets what happens, in words.
    """

    def __init__(self, folder: Path | None, device: str, most_steps: int, say: Callable[[str], None]) -> None:
        self._folder, self._device, self._most_steps, self._say = folder, device, most_steps, say
        self._recorder: StepRecorder | None = None
        self._is_on = False

    def start(self) -> None:
        """Raises ApiError where it runs already."""
        if self._is_on:
            raise ApiError(409, "profile_active", "A profile is being recorded already: stop it first.")
        self._is_on = True
        if self._folder is None:
            torch.cuda.profiler.start()
        else:
            self._recorder = StepRecorder(self._device, self._most_steps)
            self._recorder.start()

    def after_step(self) -> None:
        """Count a step; to be called after each."""
        if self._recorder is not None and self._recorder.step():
            self._say(f"the profile has its {self._most_steps} steps and is complete; /stop_profile writes it")

    def stop(self) -> Path | None:
        """End the profile and write it. Returns the trace's path. Raises ApiError where none runs."""
        if not self._is_on:
            raise ApiError(409, "profile_not_active", "No profile is being recorded: start one first.")
        self._is_on = False
        if self._recorder is None:
            torch.cuda.profiler.stop()
            return None
        recorder, self._recorder = self._recorder, None
        recorder.stop()
        assert self._folder is not None
        path = self._folder / f"infprof-{os.getpid()}.{time.time_ns()}.pt.trace.json.gz"
        recorder.save(path)
        self._say(f"wrote {path}")
        return path

    def close(self) -> None:
        """Write what is being recorded, if anything; what cannot be written is said."""
        if self._is_on:
            try:
                self.stop()
            except InfprofError as error:
                self._say(str(error))
