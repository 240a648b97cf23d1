"""PyTorch's profiler as the recorder of a run: for Python targets, on machines without nsys.

``TorchBackend`` drives it from infprof; ``injected`` is the file that runs inside the target; ``interpreter`` says whether
a command is a Python that can be reached; ``gathering`` makes traces of what the processes left.
"""

from infprof.probes.torch_backend.backend import TorchBackend

__all__ = ["TorchBackend"]
