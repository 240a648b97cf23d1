"""PyTorch's profiler over a number of engine steps."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from infprof.errors import EXIT_COLLECTOR, InfprofError


class StepRecorder:
    """Records ``steps`` steps and no more: a trace of a long run would fill the memory.

    It sees the thread that starts it.
    """

    def __init__(self, device: str, steps: int) -> None:
        activities = [ProfilerActivity.CPU]
        if device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._left = steps

    def start(self) -> None:
        """Record from here on."""
        self._profile.start()

    def step(self) -> bool:
        """Count a step that was computed. Returns whether it was the last one recorded."""
        self._left -= 1
        if self._left == 0:
            self._profile.stop()
        return self._left == 0

    def stop(self) -> None:
        """Record no more; nothing where all steps have been seen."""
        if self._left > 0:
            self._left = 0
            self._profile.stop()

    def save(self, target: Path, force: bool = False) -> None:
        """Write the trace; whole or not at all. Raises InfprofError."""
        from infprof.reports.files import atomic_file

        try:
            with tempfile.TemporaryDirectory() as folder:
                # The extension decides whether it is compressed.
                written = Path(folder) / ("trace.json.gz" if target.name.endswith(".gz") else "trace.json")
                self._profile.export_chrome_trace(str(written))
                with written.open("rb") as source, atomic_file(target, force) as file:
                    shutil.copyfileobj(source, file)
        except OSError as error:
            message = f"The trace could not be written: {error.strerror or error}."
            raise InfprofError(message, EXIT_COLLECTOR) from None
