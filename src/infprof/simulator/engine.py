"""Plays a spec: host threads issue work, streams run it in order, and everything that happens gets its time.

The rules are few. A call takes host time. A GPU operation starts when its call is through and dispatched, what came
before it on its stream is done, and the events its stream waits for are recorded and reached. A rank's communication
kernel starts when its own stream lets it, and all of them end together once the last has arrived. Whoever is blocked
wakes when the operation it waits for ends. Kernels on different streams overlap freely and do not slow each other down.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from infprof.errors import UsageError
from infprof.simulator.counters import Sample, mean_levels, samples
from infprof.simulator.operators import TYPES, work
from infprof.simulator.spec import (
    Action,
    Allocate,
    Block,
    Collective,
    Copy,
    Device,
    GraphLaunch,
    Host,
    Kernel,
    Launch,
    LoadModule,
    Memset,
    Overhead,
    ProcessSpec,
    Record,
    Repeat,
    Spec,
    Step,
    Sync,
    Wait,
)

T = TypeVar("T")

_COLLECTIVE_NAMES = {
    "allreduce": (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_{p}(ncclDevKernelArgsStorage<(unsigned long)4096>)",
        "AllReduce",
    ),
    "allgather": ("ncclDevKernel_AllGather_RING_{p}(ncclDevKernelArgsStorage<(unsigned long)4096>)", "AllGather"),
    "reducescatter": (
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_{p}(ncclDevKernelArgsStorage<(unsigned long)4096>)",
        "ReduceScatter",
    ),
    "broadcast": ("ncclDevKernel_Broadcast_RING_{p}(ncclDevKernelArgsStorage<(unsigned long)4096>)", "Broadcast"),
}
_LL_LIMIT_BYTES = 1 << 20  # NCCL takes its low-latency protocol for small messages
_D2D_SHARE = 0.45  # a copy inside the device reads and writes
_FP8_SPEED = 2  # FP8 over 16-bit tensor cores; a device's ``flops`` are of the latter
_FP8 = {TYPES["fp8"][0]}


@dataclass(eq=False)
class GpuOp:
    """An operation on a stream. ``kind``: kernel, graph, comm, copy or memset; times are None until they are known."""

    kind: str
    name: str
    device: int
    process: int
    stream: int
    correlation: int
    ready_ns: int
    duration_ns: int
    gap_ns: int = 0
    deps: list[GpuOp] = field(default_factory=list)
    dependents: list[GpuOp] = field(default_factory=list)
    kernel: Kernel | None = None
    graph_id: int | None = None
    graph_node: int | None = None
    bytes: int = 0
    copy_kind: str = ""
    memory: str = ""
    collective: int | None = None
    start_ns: int | None = None
    end_ns: int | None = None

    @property
    def span(self) -> tuple[int, int]:
        """Start and end in ns, of an operation that has run."""
        assert self.start_ns is not None and self.end_ns is not None
        return self.start_ns, self.end_ns


@dataclass(frozen=True)
class Call:
    """A CUDA call on a thread; ``sync`` says what it waited for (stream, event, context), with the stream and event, or
    what it made its stream wait for (stream-wait-event).

    ``record``: correlation id and stream of the record of that event, where it was recorded.
    """

    process: int
    thread: int
    start_ns: int
    end_ns: int
    name: str
    correlation: int
    sync: str | None = None
    stream: int | None = None
    event: int | None = None
    record: tuple[int, int] | None = None


@dataclass(frozen=True)
class Range:
    """An NVTX range; ``nccl`` ranges stand in NCCL's own domain and carry the message size in bytes."""

    process: int
    thread: int
    start_ns: int
    end_ns: int
    text: str
    bytes: int | None = None
    nccl: bool = False


@dataclass(frozen=True)
class StepRun:
    """A step of the workload on a thread, from the first to the last of what the host does for it."""

    process: int
    thread: int
    start_ns: int
    end_ns: int
    step: Step


@dataclass(frozen=True)
class Stretch:
    """Time of a thread in an OS call, or stopped by the profiler."""

    process: int
    thread: int
    start_ns: int
    end_ns: int
    name: str


@dataclass(frozen=True)
class MemoryEvent:
    process: int
    time_ns: int
    op: str
    bytes: int
    address: int
    correlation: int


@dataclass(frozen=True)
class EventRecord:
    process: int
    stream: int
    correlation: int
    event: int


@dataclass
class SimulatedTrace:
    """All that happened, in order of issue; times in ns from the start of the session."""

    spec: Spec
    ops: list[GpuOp] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    os_calls: list[Stretch] = field(default_factory=list)
    overheads: list[Stretch] = field(default_factory=list)
    memory: list[MemoryEvent] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    steps: list[StepRun] = field(default_factory=list)


def simulate(spec: Spec) -> SimulatedTrace:
    """Play ``spec``. Same spec, same trace. Raises UsageError when its threads wait for each other for ever."""
    trace = _Engine(spec).run()
    trace.samples = samples(spec, [(op.device, *op.span, op) for op in trace.ops]) if spec.counter_rate_hz else []
    return trace


def kernel_time_ns(kernel: Kernel, device: Device) -> int:
    """The kernel's own duration if given, else the roofline: the slower of its FLOPs and its bytes, plus a floor.

    Raises UsageError where the shapes of its operator ask for more FLOPs in that time than the device can do.
    """
    if kernel.time_ns is None:
        seconds = max(
            kernel.flops / (device.flops * device.flops_reached),
            kernel.bytes / (device.bandwidth * device.bandwidth_reached),
        )
        return device.kernel_floor_ns + round(seconds * 1e9)
    if kernel.operators:
        rate = work(kernel.operators[-1])[0] / max(kernel.time_ns, 1) * 1e9
        peak = device.flops * _FP8_SPEED if any(t.type in _FP8 for t in kernel.operators[-1].tensors) else device.flops
        if rate > peak:
            raise UsageError(
                f"{kernel.name}: {kernel.operators[-1].name} with these shapes in {kernel.time_ns} ns needs "
                f"{rate:.3g} FLOP/s, more than the {peak:.3g} of {device.name}: give it more time."
            )
    return kernel.time_ns


def collective_time_ns(action: Collective, device: Device, ranks: int) -> int:
    """A collective once all ranks are there: each sends its share around the ring, an all-reduce twice."""
    passes = (2 if action.op == "allreduce" else 1) * (ranks - 1) / ranks
    seconds = action.bytes * passes / (device.nvlink * device.collective_reached)
    return device.collective_latency_ns + round(seconds * 1e9)


@dataclass(eq=False)
class _Thread:
    process: int
    index: int
    clock_ns: int


class _Process:
    """Per-process state: correlation ids, streams, events."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.correlation = 0
        self.tails: dict[int, GpuOp] = {}
        self.waits: dict[int, list[GpuOp]] = {}
        self.records: dict[str, list[GpuOp | None]] = {}
        self.record_calls: dict[str, list[tuple[int, int]]] = {}
        self.event_ids: dict[tuple[str, int], int] = {}
        self.engines: dict[str, GpuOp] = {}
        self.live: list[tuple[int, int]] = []
        self.next_address = 0x7F0000000000
        self.collectives = 0

    def event_of(self, name: str, ago: int) -> int | None:
        """The id of a record of an event, ``ago`` records back: programs that wait for the one before take turns with two."""
        number = len(self.record_calls.get(name, ())) - ago
        return self.event_ids.setdefault((name, number % 2), len(self.event_ids) + 1) if number > 0 else None


def _communicates(actions: tuple[Action, ...]) -> bool:
    return any(isinstance(a, Collective) or (isinstance(a, Repeat) and _communicates(a.do)) for a in actions)


def _before_last(items: list[T], ago: int) -> T | None:
    return items[-1 - ago] if len(items) > ago else None


class _Engine:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.random = random.Random(spec.seed)
        self.trace = SimulatedTrace(spec)
        self.processes = [_Process(process) for process in spec.processes]
        self.groups: dict[int, list[GpuOp]] = {}
        self.ranks = sum(any(_communicates(t.run) for t in process.threads) for process in spec.processes)

    def run(self) -> SimulatedTrace:
        """Always let the thread that is furthest behind act next; the others wait in a heap or for an operation."""
        ready: list[tuple[int, int]] = []
        parked: list[tuple[GpuOp, int]] = []
        threads: list[tuple[_Thread, Iterator[GpuOp | None]]] = []
        for number, process in enumerate(self.spec.processes):
            for index, thread_spec in enumerate(process.threads):
                thread = _Thread(number, index, self.spec.start_ns)
                ready.append((thread.clock_ns, len(threads)))
                threads.append((thread, self._play(thread, thread_spec.run)))
        while ready or parked:
            for item in [item for item in parked if item[0].end_ns is not None]:
                parked.remove(item)
                heapq.heappush(ready, (threads[item[1]][0].clock_ns, item[1]))
            if not ready:
                raise UsageError(
                    f"{self.spec.name}: a thread waits for {parked[0][0].name}, which some ranks never reach: "
                    "give every process the same collectives in the same order."
                )
            number = heapq.heappop(ready)[1]
            thread, steps = threads[number]
            try:
                awaited = next(steps)
            except StopIteration:
                continue
            if awaited is None:
                heapq.heappush(ready, (thread.clock_ns, number))
            else:
                parked.append((awaited, number))
        if stuck := next((op for op in self.trace.ops if op.end_ns is None), None):
            raise UsageError(
                f"{self.spec.name}: {stuck.name} never starts, because some ranks never reach it: "
                "give every process the same collectives in the same order."
            )
        return self.trace

    def _play(self, thread: _Thread, actions: tuple[Action, ...]) -> Iterator[GpuOp | None]:
        """Steps of one thread; yields None to let others act, or the operation it has to wait for."""
        for action in actions:
            if isinstance(action, Repeat):
                for turn in range(action.times):
                    start = thread.clock_ns
                    yield from self._play(thread, action.do)
                    if action.range is not None:
                        text = action.range.replace("{i}", str(turn))
                        self.trace.ranges.append(Range(thread.process, thread.index, start, thread.clock_ns, text))
                    if action.step is not None:
                        run = StepRun(thread.process, thread.index, start, thread.clock_ns, action.step)
                        self.trace.steps.append(run)
            elif isinstance(action, Launch):
                for _ in range(action.count):
                    self._launch(thread, action)
                    yield None
            else:
                yield from self._act(thread, action)
                yield None

    def _act(self, thread: _Thread, action: Action) -> Iterator[GpuOp | None]:
        costs = self.spec.costs
        match action:
            case Host():
                thread.clock_ns += self._jittered(action.ns)
            case Block():
                end = thread.clock_ns + self._jittered(action.ns)
                self.trace.os_calls.append(Stretch(thread.process, thread.index, thread.clock_ns, end, action.call))
                thread.clock_ns = end
            case Overhead():
                end = thread.clock_ns + self._jittered(action.ns)
                self.trace.overheads.append(Stretch(thread.process, thread.index, thread.clock_ns, end, action.name))
                thread.clock_ns = end
            case LoadModule():
                self._call(thread, "cuModuleLoadData", action.ns)
            case Allocate():
                self._allocate(thread, action)
            case GraphLaunch():
                self._graph_launch(thread, action)
            case Memset():
                correlation, ready = self._call(thread, "cudaMemsetAsync_v3020", costs.memset_ns)
                device = self._device(thread)
                ns = device.copy_latency_ns + round(action.bytes / (device.bandwidth * device.bandwidth_reached) * 1e9)
                op = self._op(thread, "memset", "memset", action.stream, correlation, ready, ns)
                op.bytes = action.bytes
                self._submit(op)
            case Record():
                correlation, _ = self._call(thread, "cudaEventRecord_v3020", costs.event_ns)
                self._record(thread, action, correlation)
            case Wait():
                self._call(thread, "cudaStreamWaitEvent_v3020", costs.event_ns)
                self._note_wait(thread, action)
                op_or_none = self._recorded(thread, action.event, 0)
                if op_or_none:
                    self.processes[thread.process].waits.setdefault(action.stream, []).append(op_or_none)
            case Collective():
                self._collective(thread, action)
            case Copy():
                yield from self._copy(thread, action)
            case Sync():
                yield from self._sync(thread, action)
            case _:  # Launch and Repeat are played by _play
                raise AssertionError(action)

    def _launch(self, thread: _Thread, action: Launch) -> None:
        cost = self.spec.costs.launch_ns if action.call_ns is None else action.call_ns
        correlation, ready = self._call(thread, action.kernel.api, cost)
        self._submit(self._kernel_op(thread, action.kernel, action.stream, correlation, ready))

    def _graph_launch(self, thread: _Thread, action: GraphLaunch) -> None:
        cost = self.spec.costs.graph_launch_ns if action.call_ns is None else action.call_ns
        correlation, ready = self._call(thread, "cudaGraphLaunch_v10000", cost)
        device = self._device(thread)
        if not action.graph.per_node:
            alone = [self._jittered(self._alone_ns(item, device)) for item in action.graph.kernels]
            total = sum(alone) + len(alone) * device.graph_gap_ns
            op = self._op(thread, "graph", "graph", action.stream, correlation, ready, total)
            op.graph_id = action.graph_id
            parts = [(k, ns) for k, ns in zip(action.graph.kernels, alone, strict=True) if isinstance(k, Kernel)]
            # What counters show of it: all of its kernels, seen as one.
            op.kernel = Kernel("graph", counters=mean_levels(parts, device, total))
            self._submit(op)
            return
        for node, item in enumerate(action.graph.kernels, 1):
            if isinstance(item, Collective):
                op = self._comm_op(thread, item, action.stream, correlation, ready)
            else:
                op = self._kernel_op(thread, item, action.stream, correlation, ready)
            op.graph_id, op.graph_node = action.graph_id, (action.graph_id << 16) + node
            op.gap_ns = device.graph_gap_ns
            self._submit(op)

    def _alone_ns(self, item: Kernel | Collective, device: Device) -> int:
        """How long a part of a graph takes that is recorded as a whole."""
        if isinstance(item, Collective):
            raise UsageError(
                f"{self.spec.name}: a graph with collectives in it cannot be recorded as a whole, because ranks wait for "
                "each other inside: set trace: node."
            )
        return kernel_time_ns(item, device)

    def _collective(self, thread: _Thread, action: Collective) -> None:
        """A collective that is launched by itself, inside NCCL's own range."""
        start = thread.clock_ns
        correlation, ready = self._call(thread, "cudaLaunchKernelExC_v11060", self.spec.costs.collective_ns)
        end = self.trace.calls[-1].end_ns
        name = f"nccl{_COLLECTIVE_NAMES[action.op][1]}"
        self.trace.ranges.append(Range(thread.process, thread.index, start, end, name, action.bytes, nccl=True))
        self._submit(self._comm_op(thread, action, action.stream, correlation, ready))

    def _comm_op(self, thread: _Thread, action: Collective, stream: int, correlation: int, ready: int) -> GpuOp:
        """All ranks' kernels of the process's n-th collective form a group, which ends together."""
        name = _COLLECTIVE_NAMES[action.op][0].format(p="LL" if action.bytes < _LL_LIMIT_BYTES else "SIMPLE")
        ns = self._jittered(collective_time_ns(action, self._device(thread), self.ranks))
        op = self._op(thread, "comm", name, stream, correlation, ready, ns)
        op.bytes = action.bytes
        process = self.processes[thread.process]
        op.collective = process.collectives
        self.groups.setdefault(op.collective, []).append(op)
        process.collectives += 1
        return op

    def _copy(self, thread: _Thread, action: Copy) -> Iterator[GpuOp | None]:
        """Pinned copies run behind the host's back; pageable ones are staged, and their call lasts as long."""
        start, costs = thread.clock_ns, self.spec.costs
        process = self.processes[thread.process]
        device = self._device(thread)
        on_host = action.kind in ("h2d", "d2h")
        waits = action.blocking or (on_host and action.memory == "pageable")
        rate = {
            "h2d": device.pcie if action.memory == "pinned" else device.pageable,
            "d2h": device.pcie if action.memory == "pinned" else device.pageable,
            "d2d": device.bandwidth * _D2D_SHARE,
            "p2p": device.nvlink * device.collective_reached,
        }[action.kind]
        process.correlation += 1
        submitted = start + self._jittered(costs.copy_ns)
        ns = self._jittered(device.copy_latency_ns + round(action.bytes / rate * 1e9))
        op = self._op(
            thread, "copy", action.kind, action.stream, process.correlation, submitted + device.dispatch_ns, ns
        )
        op.bytes, op.copy_kind, op.memory = action.bytes, action.kind, action.memory if on_host else "device"
        if engine := process.engines.get(action.kind):
            op.deps.append(engine)
        process.engines[action.kind] = op
        self._submit(op)
        end = submitted
        if waits:
            if op.end_ns is None:
                yield op
            end = max(submitted, op.span[1] + costs.sync_ns)
        name = "cudaMemcpy_v3020" if action.blocking else "cudaMemcpyAsync_v3020"
        self.trace.calls.append(Call(thread.process, thread.index, start, end, name, op.correlation))
        thread.clock_ns = end + self._jittered(costs.between_ns)

    def _sync(self, thread: _Thread, action: Sync) -> Iterator[GpuOp | None]:
        process, start = self.processes[thread.process], thread.clock_ns
        process.correlation += 1
        correlation, event, record = process.correlation, None, None
        if action.event is not None:
            record = _before_last(process.record_calls.get(action.event, []), action.ago)
            awaited = [op for op in [self._recorded(thread, action.event, action.ago)] if op]
            name, what, event = "cudaEventSynchronize_v3020", "event", process.event_of(action.event, action.ago)
        elif action.stream is not None:
            awaited = [process.tails[action.stream]] if action.stream in process.tails else []
            name, what = "cudaStreamSynchronize_v3020", "stream"
        else:
            awaited, name, what = list(process.tails.values()), "cudaDeviceSynchronize_v3020", "context"
        for op in awaited:
            if op.end_ns is None:
                yield op
        end = max([start, *(op.span[1] for op in awaited)]) + self._jittered(self.spec.costs.sync_ns)
        self.trace.calls.append(
            Call(thread.process, thread.index, start, end, name, correlation, what, action.stream or 7, event, record)
        )
        thread.clock_ns = end + self._jittered(self.spec.costs.between_ns)

    def _allocate(self, thread: _Thread, action: Allocate) -> None:
        process = self.processes[thread.process]
        default = self.spec.costs.malloc_ns if action.op == "malloc" else self.spec.costs.free_ns
        name = "cudaMalloc_v3020" if action.op == "malloc" else "cudaFree_v3020"
        correlation, _ = self._call(thread, name, default if action.call_ns is None else action.call_ns)
        if action.op == "malloc":
            address, size = process.next_address, action.bytes
            process.next_address += (size + (1 << 21)) >> 21 << 21
            process.live.append((address, size))
        elif process.live:
            address, size = process.live.pop()
        else:
            return
        op = "alloc" if action.op == "malloc" else "free"
        self.trace.memory.append(MemoryEvent(thread.process, thread.clock_ns, op, size, address, correlation))

    def _record(self, thread: _Thread, action: Record, correlation: int) -> None:
        process = self.processes[thread.process]
        process.records.setdefault(action.event, []).append(process.tails.get(action.stream))
        process.record_calls.setdefault(action.event, []).append((correlation, action.stream))
        event = process.event_of(action.event, 0)
        assert event is not None, "it was recorded just now"
        self.trace.events.append(EventRecord(thread.process, action.stream, correlation, event))

    def _note_wait(self, thread: _Thread, action: Wait) -> None:
        """What the profiler writes of a stream's wait for an event: the stream, and the record that it waits for."""
        process = self.processes[thread.process]
        record = _before_last(process.record_calls.get(action.event, []), 0)
        if record is not None:
            call = self.trace.calls[-1]
            event = process.event_of(action.event, 0)
            self.trace.calls[-1] = replace(
                call, sync="stream-wait-event", stream=action.stream, event=event, record=record
            )

    def _recorded(self, thread: _Thread, event: str, ago: int) -> GpuOp | None:
        """The operation that the event's record, ``ago`` records back, stands behind; None before the first one."""
        return _before_last(self.processes[thread.process].records.get(event, []), ago)

    def _call(self, thread: _Thread, name: str, cost_ns: int) -> tuple[int, int]:
        """A call that returns by itself; gives its correlation id and when its work reaches the GPU."""
        process = self.processes[thread.process]
        process.correlation += 1
        start = thread.clock_ns
        end = start + self._jittered(cost_ns)
        self.trace.calls.append(Call(thread.process, thread.index, start, end, name, process.correlation))
        thread.clock_ns = end + self._jittered(self.spec.costs.between_ns)
        return process.correlation, end + self._jittered(self._device(thread).dispatch_ns)

    def _kernel_op(self, thread: _Thread, kernel: Kernel, stream: int, correlation: int, ready: int) -> GpuOp:
        ns = self._jittered(kernel_time_ns(kernel, self._device(thread)))
        op = self._op(thread, "kernel", kernel.name, stream, correlation, ready, ns)
        op.kernel = kernel
        return op

    def _op(
        self, thread: _Thread, kind: str, name: str, stream: int, correlation: int, ready: int, duration: int
    ) -> GpuOp:
        device = self.processes[thread.process].spec.device
        gap = self.spec.devices[device].kernel_gap_ns
        return GpuOp(kind, name, device, thread.process, stream, correlation, ready, duration, gap)

    def _submit(self, op: GpuOp) -> None:
        """Put ``op`` at the end of its stream and start whatever can start now."""
        process = self.processes[op.process]
        op.deps += process.waits.pop(op.stream, [])
        if op.stream in process.tails:
            op.deps.append(process.tails[op.stream])
        process.tails[op.stream] = op
        for dep in op.deps:
            dep.dependents.append(op)
        self.trace.ops.append(op)
        self._start(op)

    def _start(self, op: GpuOp) -> None:
        """Give ``op`` its times if all it depends on has ended, then those that waited for it."""
        todo = [op]
        while todo:
            op = todo.pop()
            if op.end_ns is not None or any(dep.end_ns is None for dep in op.deps):
                continue
            group = None if op.collective is None else self.groups[op.collective]
            op.start_ns = max([op.ready_ns, *(dep.span[1] + op.gap_ns for dep in op.deps)])
            if group is None:
                op.end_ns = op.start_ns + op.duration_ns
                todo += op.dependents
            elif len(group) == self.ranks and all(member.start_ns is not None for member in group):
                end = max(member.start_ns or 0 for member in group) + max(member.duration_ns for member in group)
                for member in group:
                    member.end_ns = end
                    todo += member.dependents

    def _device(self, thread: _Thread) -> Device:
        return self.spec.devices[self.processes[thread.process].spec.device]

    def _jittered(self, ns: int) -> int:
        return round(ns * (1 + self.spec.jitter * (2 * self.random.random() - 1)))
