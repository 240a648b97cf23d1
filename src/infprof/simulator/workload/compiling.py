"""Turns a described workload into a spec: every step of the engine as the calls, copies and waits that it makes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from infprof.errors import UsageError
from infprof.simulator.engine import collective_time_ns
from infprof.simulator.spec import (
    Action,
    Allocate,
    Block,
    Collective,
    Copy,
    Costs,
    Device,
    Graph,
    GraphLaunch,
    Host,
    Kernel,
    Launch,
    ProcessSpec,
    Record,
    Repeat,
    Spec,
    Sync,
    ThreadSpec,
    Wait,
)
from infprof.simulator.workload.batching import Arrival, PlannedStep, plan_steps
from infprof.simulator.workload.description import HostCosts, Workload, checked
from infprof.simulator.workload.gpus import Gpu
from infprof.simulator.workload.kernels import COMPUTE_STREAM, COPY_STREAM, ModelKernels
from infprof.simulator.workload.simulated_faults import SimulatedFault, find
from infprof.workload.faults import FAULTS
from infprof.workload.planning import plan_requests, plan_settings
from infprof.workload.settings import EngineSettings, RequestsSettings

_FIRST_PID = 4200
# Of the memory that the weights leave, as in the real engine.
_KV_MEMORY_RATIO = 0.8
# A pool's segment that goes back to the driver and is asked for again.
_SEGMENT_BYTES, _SEGMENTS = 20 * 2**20, 2
_INDEX_BYTES = 8


def compile_workload(workload: Workload) -> Spec:
    """The spec that plays ``workload``, its fault included. Raises UsageError for one that cannot run on its GPU."""
    found = find(workload.fault)
    if isinstance(found, SimulatedFault):
        workload = checked(found.change(workload))
    fault = FAULTS["none"] if isinstance(found, SimulatedFault) else found
    devices = _devices(workload)
    spec = Spec(
        name=workload.name,
        description=workload.description,
        seed=workload.seed,
        jitter=workload.jitter,
        nsys=workload.nsys,
        start_ns=workload.start_ns,
        devices=tuple(gpu.device for gpu in devices),
        costs=workload.costs,
        processes=(),
        counter_rate_hz=workload.counter_rate_hz,
        expect={
            "workload": _facts(workload),
            "fault": {"name": workload.fault, "summary": found.summary, **asdict(found.expected)},
            **workload.expect,
        },
    )
    processes: list[ProcessSpec] = []
    for replica in range(workload.replicas):
        count = workload.requests.count
        share = count * (replica + 1) // workload.replicas - count * replica // workload.replicas
        requests = replace(workload.requests, count=share, seed=workload.seed + replica)
        engine, requests = plan_settings(
            workload.shape, workload.preset, fault, requests, {"dtype": workload.dtype, **workload.engine}
        )
        if engine.dtype not in workload.gpu.flops:
            raise UsageError(f"{workload.name}: {workload.gpu.device.name} does not compute in {engine.dtype}.")
        steps = _steps(workload, devices, engine, requests)
        for rank in range(workload.tensor_parallel):
            compiler = _Rank(workload, engine, devices[rank])
            name = f"Worker_TP{rank}" if workload.tensor_parallel > 1 else "python3"
            run = tuple(action for step in steps for action in compiler.step(step))
            processes.append(ProcessSpec(_FIRST_PID + len(processes), name, rank, (ThreadSpec(name, run),)))
    return replace(spec, processes=tuple(processes))


def _facts(workload: Workload) -> dict[str, Any]:
    """What of the description an answer repeats."""
    return {
        "preset": workload.preset,
        "layers": workload.shape.layers,
        "gpu": workload.gpu.device.name,
        "dtype": workload.dtype,
        "tensor_parallel": workload.tensor_parallel,
        "replicas": workload.replicas,
        "requests": asdict(workload.requests),
        "annotated": workload.annotate,
    }


def _devices(workload: Workload) -> list[Gpu]:
    """One per rank, the last one slower where the workload says so."""
    gpu = workload.gpu
    if workload.peers is not None:
        gpu = replace(gpu, device=replace(gpu.device, nvlink=workload.peers))
    gpus = [gpu] * workload.tensor_parallel
    if workload.slow_rank != 1.0:
        gpus[-1] = _slowed(gpu, workload.slow_rank)
    return gpus


def _slowed(gpu: Gpu, speed: float) -> Gpu:
    device = gpu.device
    slow = replace(device, flops=device.flops * speed, bandwidth=device.bandwidth * speed)
    return replace(gpu, device=slow, flops={dtype: rate * speed for dtype, rate in gpu.flops.items()})


def _steps(
    workload: Workload, devices: Sequence[Gpu], engine: EngineSettings, requests: RequestsSettings
) -> list[PlannedStep]:
    plans = plan_requests(requests, workload.shape.vocabulary)
    clock = random.Random(requests.seed)
    at, arrivals = 0.0, []
    for prompt, sampling in plans:
        arrivals.append(Arrival(round(at), prompt, sampling))
        if workload.rate_per_s is not None:
            at += clock.expovariate(workload.rate_per_s) * 1e9
    slowest = _Rank(workload, engine, devices[-1])
    blocks = engine.kv_blocks or _affordable_blocks(workload, engine)
    return plan_steps(arrivals, engine, blocks, workload.steps, slowest.about_ns)


def _affordable_blocks(workload: Workload, engine: EngineSettings) -> int:
    """As many as the batch can need, within the memory that the weights leave. Raises UsageError for too little."""
    model = ModelKernels(workload.shape, workload.gpu, engine.dtype or workload.dtype, workload.tensor_parallel)
    shape, ranks = workload.shape, workload.tensor_parallel
    resident = shape.layers - (len(range(0, shape.layers, engine.offload_every)) if engine.offload_every else 0)
    outside = 2 * shape.vocabulary * shape.hidden * model.element // ranks
    free = workload.gpu.device.memory_bytes // workload.replicas - resident * model.layer_bytes - outside
    per_request = -(-engine.context // engine.block_size)
    block = shape.kv_bytes_per_token(model.element) * engine.block_size // ranks
    affordable = int(max(free, 0) * _KV_MEMORY_RATIO) // block
    if affordable <= per_request:
        raise UsageError(
            f"{workload.name}: {workload.gpu.device.name} does not hold preset {workload.preset} in {engine.dtype} and a KV "
            "cache for one request: choose a smaller preset, more ranks, or a larger GPU."
        )
    return min(engine.max_batch * per_request + 1, affordable)


class _Rank:
    """What the thread of one rank does, step by step."""

    def __init__(self, workload: Workload, engine: EngineSettings, gpu: Gpu) -> None:
        self.workload, self.engine, self.device = workload, engine, gpu.device
        self.model = ModelKernels(
            shape=workload.shape,
            gpu=gpu,
            dtype=engine.dtype or workload.dtype,
            ranks=workload.tensor_parallel,
            pieces=engine.pieces,
            factors=workload.kernels,
        )
        self.graph_ids: dict[tuple[int, int], int] = {}

    @property
    def host(self) -> HostCosts:
        return self.workload.host

    @property
    def costs(self) -> Costs:
        return self.workload.costs

    def step(self, planned: PlannedStep) -> list[Action]:
        """All that belongs to a step, in order, marked with it."""
        step, batch, host = planned.step, planned.batch, self.host
        requests = step.prefill_requests + step.decode_requests
        tokens = step.prefill_tokens + step.decode_requests
        inside = [self._range(f"workload: {step.kind}", self._forward(planned))]
        if batch.sampled:
            inside.append(self._range("workload: sample", self._sample(batch.sampled)))
        process = host.process_ns + requests * host.process_token_ns
        inside.append(self._range("workload: process", [Host(process)]))
        whole: list[Action] = [
            self._range("workload: schedule", [Host(host.schedule_ns + requests * host.schedule_request_ns)]),
            self._range("workload: prepare", [Host(host.prepare_ns + tokens * host.prepare_token_ns)]),
            Repeat(tuple(inside), range=step.name if self.workload.annotate else None, step=step),
        ]
        if host.detokenise_token_ns and batch.sampled:
            whole.append(self._range("detokenise", [Host(batch.sampled * host.detokenise_token_ns)]))
        return [Block("epoll_wait", planned.wait_ns), *whole] if planned.wait_ns else whole

    def _range(self, name: str, do: Sequence[Action]) -> Action:
        return Repeat(tuple(do), range=name if self.workload.annotate else None)

    def _forward(self, planned: PlannedStep) -> list[Action]:
        batch = planned.batch
        decoding = sum(-(-context // self.engine.block_size) for context in batch.contexts)
        numbers = 3 * batch.rows + len(batch.contexts) + decoding
        inputs = Copy("h2d", _INDEX_BYTES * numbers, "pinned", False, COMPUTE_STREAM)
        if planned.shape is not None and self.engine.cuda_graphs and not self._needs_host:
            number = self.graph_ids.setdefault(planned.shape, len(self.graph_ids) + 1)
            layer = self.model.layer(batch)
            kernels = (*self.model.before(batch), *layer * self.model.shape.layers, *self.model.after(batch))
            per_node = self.workload.graph_trace == "node"
            return [inputs, GraphLaunch(Graph(kernels, per_node), number, COMPUTE_STREAM, None)]
        layers = self._layers(planned)
        return [inputs, *self._launches(self.model.before(batch)), *layers, *self._launches(self.model.after(batch))]

    @property
    def _needs_host(self) -> bool:
        """Whether something between two layers takes the host, so that no graph can hold them."""
        e = self.engine
        return e.check_layers or e.empty_cache or bool(e.offload_every)

    def _layers(self, planned: PlannedStep) -> list[Action]:
        layer = self._launches(self.model.layer(planned.batch))
        if self.engine.check_layers:
            layer += self._launches(self.model.check(planned.batch.rows))
            layer += [*self._read_back(1, "pinned"), Host(self.host.check_ns)]
        if self.engine.empty_cache:
            taken = [Allocate("malloc", _SEGMENT_BYTES, None)] * _SEGMENTS
            layer = [*taken, *layer, *[Allocate("free", _SEGMENT_BYTES, None)] * _SEGMENTS]
        every, count = self.engine.offload_every, self.model.shape.layers
        if not every:
            return [Repeat(tuple(layer), count)]
        return [action for n in range(count) for action in ([*self._fetch(), *layer] if n % every == 0 else layer)]

    def _fetch(self) -> list[Action]:
        """An offloaded layer's weights; prefetched ones come on a stream of their own, as early as the host gets there."""
        if not self.workload.prefetch:
            return [self.model.weights(self.engine.offload_pinned, COMPUTE_STREAM)]
        copy = self.model.weights(self.engine.offload_pinned, COPY_STREAM)
        return [copy, Record("weights", COPY_STREAM), Wait("weights", COMPUTE_STREAM)]

    def _sample(self, rows: int) -> list[Action]:
        vocabulary, element = self.model.shape.vocabulary, self.model.element
        if self.engine.host_sampling:
            search = Host(vocabulary * self.host.logit_ns)
            return [action for _ in range(rows) for action in (*self._read_back(vocabulary * element), search)]
        return [*self._launches(self.model.sampling(rows)), *self._read_back(_INDEX_BYTES * rows)]

    def _read_back(self, size: int, memory: str = "pageable") -> list[Action]:
        """What `tensor.tolist()` does: a copy to ordinary memory, and a wait for it; `bool(tensor)` has a pinned buffer."""
        return [Copy("d2h", size, memory, False, COMPUTE_STREAM), Sync(COMPUTE_STREAM, None, 0)]

    def _launches(self, items: Sequence[Kernel | Collective]) -> list[Action]:
        return [item if isinstance(item, Collective) else Launch(item, 1, COMPUTE_STREAM, None) for item in items]

    def about_ns(self, planned: PlannedStep) -> int:
        """How long a step takes, roughly: its host work and the longer of its calls and its GPU work."""
        outside = calls = busy = 0
        todo: list[tuple[Action, int]] = [(action, 1) for action in self.step(replace(planned, wait_ns=0))]
        costs, device = self.costs, self.device
        while todo:
            action, times = todo.pop()
            match action:
                case Repeat():
                    todo += [(inner, times * action.times) for inner in action.do]
                case Host():
                    outside += times * action.ns
                case Launch():
                    calls += times * (costs.launch_ns + costs.between_ns)
                    busy += times * (action.kernel.time_ns or 0)
                case GraphLaunch():
                    calls += costs.graph_launch_ns
                    busy += sum(self._part_ns(item, device) + device.graph_gap_ns for item in action.graph.kernels)
                case Copy():
                    calls += times * costs.copy_ns
                    busy += times * round(action.bytes / self._copy_rate(action, device) * 1e9)
                case Collective():
                    calls += times * costs.collective_ns
                    busy += times * self._part_ns(action, device)
                case Allocate():
                    calls += times * (costs.malloc_ns if action.op == "malloc" else costs.free_ns)
        return outside + max(calls, busy)

    def _part_ns(self, item: Kernel | Collective, device: Device) -> int:
        if isinstance(item, Collective):
            return collective_time_ns(item, device, self.workload.tensor_parallel)
        return item.time_ns or 0

    @staticmethod
    def _copy_rate(copy: Copy, device: Device) -> float:
        return device.pcie if copy.memory == "pinned" else device.pageable
