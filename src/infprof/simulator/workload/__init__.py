"""The workload's engine on described GPUs: the same batching, faults and ranges as ``infprof workload run``, no PyTorch.

``description`` says what can be asked for; ``compiling`` turns it into a spec, which the simulator plays like any other.
Kernels are those of a serving engine, one per operation, where the real workload runs PyTorch's many elementwise ones.
"""

from infprof.simulator.workload.compiling import compile_workload
from infprof.simulator.workload.description import HostCosts, Workload, parse_workload
from infprof.simulator.workload.gpus import DEFAULT as DEFAULT_GPU
from infprof.simulator.workload.gpus import Gpu, gpu
from infprof.simulator.workload.simulated_faults import SIMULATED_FAULTS

__all__ = [
    "DEFAULT_GPU",
    "SIMULATED_FAULTS",
    "Gpu",
    "HostCosts",
    "Workload",
    "compile_workload",
    "gpu",
    "parse_workload",
]
