"""Plays a described inference workload on described GPUs and writes what nsys, or PyTorch's profiler, would have recorded.

A spec is a YAML file (or the same as a dict)::

    name: one decode step after another
    seed: 1
    jitter: 0.05                 # every duration varies by up to ±5 %
    devices:                     # all keys optional: an H100 stands behind them
      - {name: NVIDIA H100 80GB HBM3, flops: 989e12, bandwidth: 3352e9, pcie: 55e9, dispatch: 1us}
    counters: {rate: 10000}      # GPU metrics at 10 kHz; leave out for none
    costs: {launch: 5us, between: 1us}
    kernels:
      norm: {name: "void vllm::fused_add_rms_norm_kernel<c10::BFloat16>(T1 *)", time: 2.5us}
      gemm: {name: nvjet_tst_64x8_64x16_4x1_v_bz_TNT, flops: 1.3e9, bytes: 50MB, counters: {sm_issue: 20}}
      out: {name: nvjet_tst_64x8_64x16_2x1_v_bz_TNT, op: "aten::mm(bf16[8, 4096], bf16[4096, 4096].t)"}
    graphs:
      decode: {kernels: [norm, {repeat: 4, do: [gemm, norm]}], trace: node}   # or graph: one row per launch
    sequences:
      sample: [{launch: norm}, {copy: d2h, size: 32, memory: pageable}, {sync: stream}]
    processes:
      - pid: 4242
        name: VLLM::Worker
        device: 0
        threads:
          - run:
              - repeat: 20
                range: "execute_{i}"          # an NVTX range around each turn
                do:
                  - {graph: decode}
                  - {use: sample}
                  - {host: 1.2ms, range: schedule}

Actions, one per list item, named by its first key; ``stream`` (a number, 7 unless given) goes with all that need one:

- ``host: TIME`` outside CUDA; ``block: CALL`` with ``for: TIME`` in an OS call (epoll_wait, futex, read, …);
  ``overhead: NAME`` with ``for`` stopped by the profiler
- ``launch: KERNEL`` (``count``, ``call: TIME``), ``graph: GRAPH`` (``call``)
- ``copy: h2d|d2h|d2d|p2p`` with ``size`` (``memory: pinned|pageable``, ``blocking``), ``memset: SIZE``
- ``sync: stream|device``; ``sync: event`` with ``event: NAME`` (``ago: 1`` waits for the record before the last)
- ``record: EVENT``, ``wait: EVENT``
- ``allreduce|allgather|reducescatter|broadcast: SIZE`` among all processes, in the order of each process
- ``malloc: SIZE``, ``free: SIZE`` (``call``), ``load_module: TIME``
- ``repeat: N`` and/or ``range: NAME`` with ``do: [...]``, ``use: SEQUENCE``

A kernel lasts its ``time``; else the roofline of its ``flops`` and ``bytes``; else that of the shapes of its ``op``, the
framework's operator that launches it (a list: the open ones, outermost first; see operators.py). What is given must fit
together: ``flops`` those of the shapes, ``time`` no shorter than the device's peak allows for them. Operators stand in
the trace of PyTorch's profiler only, and not for kernels of a CUDA graph, whose replay calls none.

``expect`` may hold the verdict that a sample trace must get; the simulator does not read it.

A description may have ``workload`` in place of ``kernels`` … ``processes``: see infprof.simulator.workload.description.
"""

from infprof.simulator.answer import answer
from infprof.simulator.builder import Process, Thread, TraceBuilder
from infprof.simulator.engine import SimulatedTrace, simulate
from infprof.simulator.export import write_nsys_sqlite
from infprof.simulator.kineto import not_in_kineto, write_kineto
from infprof.simulator.loading import load_spec, parse_spec, workload_spec
from infprof.simulator.spec import Spec
from infprof.simulator.truth import truth

__all__ = [
    "Process",
    "SimulatedTrace",
    "Spec",
    "Thread",
    "TraceBuilder",
    "answer",
    "load_spec",
    "not_in_kineto",
    "parse_spec",
    "simulate",
    "truth",
    "workload_spec",
    "write_kineto",
    "write_nsys_sqlite",
]
