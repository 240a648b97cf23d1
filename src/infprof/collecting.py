"""How to record what a trace lacks, in the words of the tool that recorded it."""

from __future__ import annotations

from typing import NamedTuple

from infprof.trace import CUPTI_BACKEND, PYTORCH_PROFILER

_COUNTERS = (
    "no hardware counters in this trace: record again with `nsys profile --gpu-metrics-devices=all` "
    "(`--gpu-metrics-device=all` before 2024.1) to tell compute-bound from bandwidth-bound"
)

_COUNTERS_AMD = (
    "no hardware counters in this trace: profile its longest kernels with "
    "`rocprof-compute profile --name NAME --kernel KERNEL -- YOUR_COMMAND` to tell compute-bound from bandwidth-bound"
)


def counters(amd: bool) -> str:
    """How to get the hardware counters that the trace lacks, by whose GPU it is of; part of a sentence."""
    return _COUNTERS_AMD if amd else _COUNTERS


class Advice(NamedTuple):
    """``recorder``: the tool's short name; the others are parts of a sentence, without a full stop."""

    recorder: str
    gpu_work: str
    gpu_work_lost: str
    graph_nodes: str
    calls: str


_NSYS_CUDA = "record with `nsys profile --trace=cuda,nvtx,osrt` and make sure that the GPU process is the one profiled"
_NSYS = Advice(
    recorder="nsys",
    gpu_work=_NSYS_CUDA,
    gpu_work_lost=f"{_NSYS_CUDA}; a process that is killed or ends by os._exit loses it: stop the capture first",
    graph_nodes="record again with `--cuda-graph-trace=node` (it adds some overhead per kernel) to see the kernels inside CUDA graphs",
    calls="Record with `--trace=cuda`",
)
_TORCH = Advice(
    recorder="the PyTorch profiler",
    gpu_work="record with `torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])` in the process that uses the GPU",
    gpu_work_lost="the profiler dropped the device side: give it a warm-up step (`schedule(wait=1, warmup=1, active=N)`), widen "
    "the window, wait for the GPU (`torch.cuda.synchronize()`) before it stops, and let no other profiler hold CUPTI",
    graph_nodes="record with a newer PyTorch, or with `nsys profile --cuda-graph-trace=node`, to see the kernels inside CUDA graphs",
    calls="Record with `ProfilerActivity.CUDA` among the activities",
)

_CUPTI = Advice(
    recorder="infprof's CUPTI collector",
    gpu_work="record the process that uses the GPU, while it works",
    gpu_work_lost="the collector has no record of it: let the program end by itself or stop the capture first, and record with "
    "`--backend nsys` or torch where that does not help",
    graph_nodes="record again with `--graph-trace node` (it adds some overhead per kernel) to see the kernels inside CUDA graphs",
    calls="Record with `infprof run --backend nsys`",
)
_BY_TOOL = {PYTORCH_PROFILER: _TORCH, CUPTI_BACKEND: _CUPTI}


def advice(tool: str) -> Advice:
    """The advice for traces of a tool, as TraceProvenance.tool names it."""
    return _BY_TOOL.get(tool, _NSYS)
