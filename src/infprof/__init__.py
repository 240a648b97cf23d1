"""infprof says why inference on GPUs is slow and what to change."""

__version__ = "0.1.0"
