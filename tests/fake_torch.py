"""A package that looks like PyTorch as far as its profiler is concerned, and keeps the rules that the real one has."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = {
    "__init__.py": """
        import multiprocessing.util
        from torch import autograd, cuda, profiler, version

        __version__ = "2.99.0+fake"

        def work():
            profiler.record()
    """,
    "version.py": "cuda = hip = None\n",
    "cuda.py": """
        capturing = []

        def is_initialized():
            return False

        class CUDAGraph:
            def capture_begin(self, pool=None):
                capturing.append(self)

            def capture_end(self):
                capturing.remove(self)
    """,
    "autograd/__init__.py": "from torch.autograd import profiler\n",
    "autograd/profiler.py": """
        import os

        active, used_by = [], []

        def _prepare_profiler():
            assert not active, "a profiler is active already"
            # The real one hangs here.
            assert all(pid == os.getpid() for pid in used_by), "used before the fork"
            used_by.append(os.getpid())

        def _enable_profiler():
            active.append([])

        def _disable_profiler():
            return active.pop()
    """,
    "profiler.py": """
        import enum, json, os, time
        from torch import cuda
        from torch.autograd import profiler as autograd_profiler

        class ProfilerActivity(enum.Enum):
            CPU = 0
            CUDA = 1

        class _ExperimentalConfig:
            def __init__(self, **options):
                if "FAKE_TORCH_IS_OLD" in os.environ:
                    raise TypeError("an unexpected keyword argument")
                assert options == {"profile_all_threads": True}

        def record():
            for events in autograd_profiler.active:
                events.append(time.time_ns())

        class profile:
            def __init__(self, **options):
                pass

            def start(self):
                # The real one synchronises the device, which ends the capture of a graph with an error.
                assert not cuda.capturing, "started while a graph was captured"
                autograd_profiler._prepare_profiler()
                autograd_profiler._enable_profiler()

            def stop(self):
                assert not cuda.capturing, "stopped while a graph was captured"
                self.events = autograd_profiler._disable_profiler()

            def export_chrome_trace(self, path):
                if os.path.exists(os.environ.get("FAKE_DISK_IS_FULL", "")):
                    raise OSError(28, "No space left on device")
                rows = [
                    dict(ph="X", cat="cpu_op", name="aten::mm", ts=t / 1000, dur=1, pid=os.getpid(), tid=1, args={})
                    for t in self.events
                ]
                with open(path, "w") as file:
                    json.dump(dict(schemaVersion=1, deviceProperties=[], traceEvents=rows, traceName=path), file)
    """,
}


def write_fake_torch(folder: Path) -> Path:
    """Write the package below ``folder``, which goes on PYTHONPATH then."""
    from textwrap import dedent

    for name, text in _PACKAGE.items():
        path = folder / "torch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"))
    return folder
