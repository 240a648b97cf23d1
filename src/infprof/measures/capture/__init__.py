"""Kernels of replayed CUDA graphs get the operators that they were captured from.

A replay launches a graph as a whole, so its kernels lie in no operator. The trace may hold the capture itself, or a
second trace (``--capture``) an eager run or the capture of the same model: the sequence of kernel names is found there.
"""

from infprof.measures.capture.claims import GraphOperators, graph_operators, replayed_work
from infprof.measures.capture.matching import CaptureLimits
from infprof.measures.capture.measuring import add_capture, capture_problems, work_source

__all__ = [
    "CaptureLimits",
    "GraphOperators",
    "add_capture",
    "capture_problems",
    "graph_operators",
    "replayed_work",
    "work_source",
]
