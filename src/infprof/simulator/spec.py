"""What a spec file says, checked: devices, kernels, graphs, processes and what their threads do.

Durations are text with a unit ("12us", "1.5 ms"), sizes likewise ("32 MB", "4KiB") or whole bytes, rates are plain
numbers per second (FLOP/s, bytes/s). In memory all are ns, bytes, and per second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from infprof.errors import UsageError
from infprof.simulator.fields import (
    Section,
    did_you_mean,
    duration_ns,
    flag,
    items,
    mapping,
    one_of,
    pair,
    positive,
    rate,
    share,
    shown,
    size_bytes,
    text_of,
    triple,
    whole,
)
from infprof.simulator.operators import Operator, parse_operator, work
from infprof.simulator.schema import VERSIONS

T = TypeVar("T")

COUNTERS = ("sm_active", "sm_issue", "tensor", "dram_read", "dram_write", "nvlink_rx", "nvlink_tx")
COPY_KINDS = ("h2d", "d2h", "d2d", "p2p")
HOST_MEMORY = ("pageable", "pinned")
COLLECTIVES = ("allreduce", "allgather", "reducescatter", "broadcast")


@dataclass(frozen=True)
class Device:
    """A GPU: its peaks (per second), what part of them kernels reach, and its fixed costs in ns."""

    name: str = "NVIDIA H100 80GB HBM3"
    chip: str = "GH100"
    compute: tuple[int, int] = (9, 0)
    sm_count: int = 132
    memory_bytes: int = 85_029_158_912
    clock_hz: int = 1_980_000_000
    flops: float = 989e12
    bandwidth: float = 3.352e12
    pcie: float = 55e9
    pcie_peak: float = 63e9
    pageable: float = 6e9
    nvlink: float = 450e9
    flops_reached: float = 0.75
    bandwidth_reached: float = 0.88
    collective_reached: float = 0.8
    kernel_floor_ns: int = 1_800
    copy_latency_ns: int = 1_400
    collective_latency_ns: int = 9_000
    dispatch_ns: int = 1_200
    kernel_gap_ns: int = 700
    graph_gap_ns: int = 500


@dataclass(frozen=True)
class Kernel:
    """A kernel: how long it runs (given, or from FLOPs and bytes on the device) and what counters show meanwhile.

    ``operators``: those of the framework that are open while it is launched, outermost first.
    """

    name: str
    time_ns: int | None = None
    flops: float = 0.0
    bytes: float = 0.0
    grid: tuple[int, int, int] = (132, 1, 1)
    block: tuple[int, int, int] = (256, 1, 1)
    counters: dict[str, float] = field(default_factory=dict)
    api: str = "cudaLaunchKernel_v7000"
    operators: tuple[Operator, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A CUDA graph: kernels and collectives in order, recorded per node or, without collectives, as one row per launch."""

    kernels: tuple[Kernel | Collective, ...]
    per_node: bool = True


@dataclass(frozen=True)
class Costs:
    """How long the host's calls take, in ns; ``between`` is Python's time between two calls."""

    launch_ns: int = 4_000
    graph_launch_ns: int = 9_000
    copy_ns: int = 5_000
    memset_ns: int = 3_500
    event_ns: int = 900
    sync_ns: int = 2_500
    collective_ns: int = 6_000
    malloc_ns: int = 150_000
    free_ns: int = 120_000
    between_ns: int = 500


@dataclass(frozen=True)
class Host:
    ns: int


@dataclass(frozen=True)
class Launch:
    kernel: Kernel
    count: int
    stream: int
    call_ns: int | None


@dataclass(frozen=True)
class GraphLaunch:
    graph: Graph
    graph_id: int
    stream: int
    call_ns: int | None


@dataclass(frozen=True)
class Copy:
    kind: str
    bytes: int
    memory: str
    blocking: bool
    stream: int


@dataclass(frozen=True)
class Memset:
    bytes: int
    stream: int


@dataclass(frozen=True)
class Sync:
    """``event`` None waits for ``stream``, both None for the device; ``ago`` picks an earlier record of the event."""

    stream: int | None
    event: str | None
    ago: int


@dataclass(frozen=True)
class Record:
    event: str
    stream: int


@dataclass(frozen=True)
class Wait:
    event: str
    stream: int


@dataclass(frozen=True)
class Collective:
    op: str
    bytes: int
    stream: int


@dataclass(frozen=True)
class Allocate:
    op: str
    bytes: int
    call_ns: int | None


@dataclass(frozen=True)
class LoadModule:
    ns: int


@dataclass(frozen=True)
class Block:
    """The thread is blocked in an OS call (epoll_wait, futex, read, …)."""

    call: str
    ns: int


@dataclass(frozen=True)
class Overhead:
    """The profiler stops the thread."""

    name: str
    ns: int


@dataclass(frozen=True)
class Step:
    """What a step computes: requests and tokens of prompts, requests that decode, and how many of them end with it."""

    number: int
    name: str
    kind: str
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    joined: int
    finished: int
    preempted: int


@dataclass(frozen=True)
class Repeat:
    """``do`` in order, ``times`` times, inside an NVTX range when ``range`` names one ("{i}" is the turn).

    ``step`` marks it as a step of the workload for the truth, also where no range is written.
    """

    do: tuple[Action, ...]
    times: int = 1
    range: str | None = None
    step: Step | None = None


Action = (
    Host
    | Launch
    | GraphLaunch
    | Copy
    | Memset
    | Sync
    | Record
    | Wait
    | Collective
    | Allocate
    | LoadModule
    | Block
    | Overhead
    | Repeat
)


@dataclass(frozen=True)
class ThreadSpec:
    name: str
    run: tuple[Action, ...]


@dataclass(frozen=True)
class ProcessSpec:
    pid: int
    name: str
    device: int
    threads: tuple[ThreadSpec, ...]


@dataclass(frozen=True)
class Spec:
    name: str
    description: str
    seed: int
    jitter: float
    nsys: str
    start_ns: int
    devices: tuple[Device, ...]
    costs: Costs
    processes: tuple[ProcessSpec, ...]
    counter_rate_hz: int | None
    expect: dict[str, Any]


def parse_spec(data: Any, source: str = "spec") -> Spec:
    """Check a spec given as a dict; ``source`` names it in errors. Raises UsageError."""
    return _Parser(source).spec(data)


def parse_device(data: Any, where: str, d: Device = Device()) -> Device:
    """A device from its keys; what they leave out is that of ``d``. Raises UsageError."""
    s = Section(data, where)
    device = Device(
        name=s.take("name", text_of, d.name),
        chip=s.take("chip", text_of, d.chip),
        compute=s.take("compute", pair, d.compute),
        sm_count=s.take("sm_count", positive, d.sm_count),
        memory_bytes=s.take("memory", size_bytes, d.memory_bytes),
        clock_hz=s.take("clock", positive, d.clock_hz),
        flops=s.take("flops", rate, d.flops),
        bandwidth=s.take("bandwidth", rate, d.bandwidth),
        pcie=s.take("pcie", rate, d.pcie),
        pcie_peak=s.take("pcie_peak", rate, d.pcie_peak),
        pageable=s.take("pageable", rate, d.pageable),
        nvlink=s.take("nvlink", rate, d.nvlink),
        flops_reached=s.take("flops_reached", share, d.flops_reached),
        bandwidth_reached=s.take("bandwidth_reached", share, d.bandwidth_reached),
        collective_reached=s.take("collective_reached", share, d.collective_reached),
        kernel_floor_ns=s.take("kernel_floor", duration_ns, d.kernel_floor_ns),
        copy_latency_ns=s.take("copy_latency", duration_ns, d.copy_latency_ns),
        collective_latency_ns=s.take("collective_latency", duration_ns, d.collective_latency_ns),
        dispatch_ns=s.take("dispatch", duration_ns, d.dispatch_ns),
        kernel_gap_ns=s.take("kernel_gap", duration_ns, d.kernel_gap_ns),
        graph_gap_ns=s.take("graph_gap", duration_ns, d.graph_gap_ns),
    )
    s.done()
    return device


def parse_costs(data: Any, where: str, c: Costs = Costs()) -> Costs:
    """What calls cost; the keys left out are those of ``c``. Raises UsageError."""
    s = Section(data, where)
    costs = Costs(
        launch_ns=s.take("launch", duration_ns, c.launch_ns),
        graph_launch_ns=s.take("graph_launch", duration_ns, c.graph_launch_ns),
        copy_ns=s.take("copy", duration_ns, c.copy_ns),
        memset_ns=s.take("memset", duration_ns, c.memset_ns),
        event_ns=s.take("event", duration_ns, c.event_ns),
        sync_ns=s.take("sync", duration_ns, c.sync_ns),
        collective_ns=s.take("collective", duration_ns, c.collective_ns),
        malloc_ns=s.take("malloc", duration_ns, c.malloc_ns),
        free_ns=s.take("free", duration_ns, c.free_ns),
        between_ns=s.take("between", duration_ns, c.between_ns),
    )
    s.done()
    return costs


def parse_counter_rate(data: Any, where: str) -> int:
    """Samples per second. Raises UsageError."""
    s = Section(data, where)
    rate = s.need("rate", positive)
    s.done()
    return rate


class _Parser:
    def __init__(self, source: str) -> None:
        self.source = source
        self.kernels: dict[str, Kernel] = {}
        self.graphs: dict[str, Graph] = {}
        self.sequences: dict[str, Any] = {}
        self._open_sequences: list[str] = []

    def spec(self, data: Any) -> Spec:
        top = Section(data, self.source)
        name = top.take("name", text_of, Path(self.source).stem)
        description = top.take("description", text_of, "")
        seed = top.take("seed", whole, 0)
        jitter = top.take("jitter", share, 0.0)
        nsys = top.take("nsys", one_of(VERSIONS), "2023.4")
        start = top.take("start", duration_ns, 1_000_000_000)
        devices: tuple[Device, ...] = top.take("devices", self._devices, (Device(),))
        costs = top.take("costs", parse_costs, Costs())
        rate = top.take("counters", parse_counter_rate, None)
        expect: dict[str, Any] = top.take("expect", mapping, {})
        self.kernels = top.take("kernels", self._kernels, {})
        self.graphs = top.take("graphs", self._graphs, {})
        self.sequences = top.take("sequences", mapping, {})
        processes = top.need("processes", self._processes)
        top.done()
        for process in processes:
            if process.device >= len(devices):
                raise UsageError(
                    f"{self.source}: process {process.pid} runs on device {process.device}, "
                    f"but there are {len(devices)} devices, counted from 0."
                )
        return Spec(
            name=name,
            description=description,
            seed=seed,
            jitter=jitter,
            nsys=nsys,
            start_ns=start,
            devices=devices,
            costs=costs,
            processes=processes,
            counter_rate_hz=rate,
            expect=expect,
        )

    def _devices(self, data: Any, where: str) -> tuple[Device, ...]:
        return tuple(parse_device(item, at) for item, at in items(data, where)) or (Device(),)

    def _kernels(self, data: Any, where: str) -> dict[str, Kernel]:
        return {key: self._kernel(item, f"{where}: {key}") for key, item in mapping(data, where).items()}

    def _kernel(self, data: Any, where: str) -> Kernel:
        s = Section(data, where)
        operators: tuple[Operator, ...] = s.take("op", _operators, ())
        time_ns = s.take("time", duration_ns, None)
        flops = s.take("flops", rate, 0.0)
        size = s.take("bytes", lambda value, at: float(size_bytes(value, at)), 0.0)
        if operators:
            flops, size = _work_of(operators[-1], time_ns, flops, size, where)
        kernel = Kernel(
            name=s.need("name", text_of),
            time_ns=time_ns,
            flops=flops,
            bytes=size,
            grid=s.take("grid", triple, (132, 1, 1)),
            block=s.take("block", triple, (256, 1, 1)),
            counters=s.take("counters", _counters, {}),
            api=s.take("api", text_of, "cudaLaunchKernel_v7000"),
            operators=operators,
        )
        s.done()
        if kernel.time_ns is None and not kernel.flops and not kernel.bytes:
            raise UsageError(
                f"{where}: give time, or flops and bytes, or op with shapes, so that its duration is known."
            )
        return kernel

    def _graphs(self, data: Any, where: str) -> dict[str, Graph]:
        return {key: self._graph(item, f"{where}: {key}") for key, item in mapping(data, where).items()}

    def _graph(self, data: Any, where: str) -> Graph:
        s = Section(data, where)
        graph = Graph(
            kernels=s.need("kernels", self._graph_kernels),
            per_node=s.take("trace", one_of(("node", "graph")), "node") == "node",
        )
        s.done()
        return graph

    def _graph_kernels(self, data: Any, where: str) -> tuple[Kernel, ...]:
        """A list of kernel keys, with ``{repeat: n, do: [...]}`` inside."""
        kernels: list[Kernel] = []
        for item, at in items(data, where):
            if isinstance(item, dict):
                s = Section(item, at)
                times = s.need("repeat", positive)
                kernels.extend(s.need("do", self._graph_kernels) * times)
                s.done()
            else:
                kernels.append(self._named(self.kernels, "kernel", item, at))
        return tuple(kernels)

    def _processes(self, data: Any, where: str) -> tuple[ProcessSpec, ...]:
        return tuple(self._process(item, at, number) for number, (item, at) in enumerate(items(data, where)))

    def _process(self, data: Any, where: str, number: int) -> ProcessSpec:
        s = Section(data, where)
        process = ProcessSpec(
            pid=s.take("pid", positive, 4200 + number),
            name=s.take("name", text_of, "python3"),
            device=s.take("device", whole, 0),
            threads=s.need("threads", self._threads),
        )
        s.done()
        return process

    def _threads(self, data: Any, where: str) -> tuple[ThreadSpec, ...]:
        threads = []
        for item, at in items(data, where):
            s = Section(item, at)
            threads.append(ThreadSpec(s.take("name", text_of, "python3"), s.need("run", self._actions)))
            s.done()
        return tuple(threads)

    def _actions(self, data: Any, where: str) -> tuple[Action, ...]:
        return tuple(action for item, at in items(data, where) for action in self._action(item, at))

    def _action(self, data: Any, where: str) -> tuple[Action, ...]:
        """One item of a ``run`` or ``do`` list: a mapping whose first key says what happens."""
        s = Section(data, where)
        verb = next(iter(data), None)
        makers: dict[str, Callable[[Section], tuple[Action, ...]]] = {
            "host": self._host,
            "launch": self._launch,
            "graph": self._graph_launch,
            "copy": self._copy,
            "memset": lambda s: (Memset(s.need("memset", size_bytes), _stream(s)),),
            "sync": self._sync,
            "record": lambda s: (Record(s.need("record", text_of), _stream(s)),),
            "wait": lambda s: (Wait(s.need("wait", text_of), _stream(s)),),
            "malloc": lambda s: (Allocate("malloc", s.need("malloc", size_bytes), s.take("call", duration_ns, None)),),
            "free": lambda s: (Allocate("free", s.need("free", size_bytes), s.take("call", duration_ns, None)),),
            "load_module": lambda s: (LoadModule(s.need("load_module", duration_ns)),),
            "block": lambda s: (Block(s.need("block", text_of), s.need("for", duration_ns)),),
            "overhead": lambda s: (Overhead(s.need("overhead", text_of), s.need("for", duration_ns)),),
            "repeat": self._repeat,
            "range": self._repeat,
            "use": self._use,
        } | {op: self._collective(op) for op in COLLECTIVES}
        if verb not in makers:
            raise UsageError(f"{where}: no action {verb!r}.{did_you_mean(str(verb), makers)}")
        actions = makers[verb](s)
        s.done()
        return actions

    def _host(self, s: Section) -> tuple[Action, ...]:
        action = Host(s.need("host", duration_ns))
        name = s.take("range", text_of, "")
        return (Repeat((action,), 1, name),) if name else (action,)

    def _launch(self, s: Section) -> tuple[Action, ...]:
        kernel = s.need("launch", lambda value, at: self._named(self.kernels, "kernel", value, at))
        return (Launch(kernel, s.take("count", positive, 1), _stream(s), s.take("call", duration_ns, None)),)

    def _graph_launch(self, s: Section) -> tuple[Action, ...]:
        name = s.need("graph", text_of)
        graph = self._named(self.graphs, "graph", name, s.where)
        number = list(self.graphs).index(name) + 1
        return (GraphLaunch(graph, number, _stream(s), s.take("call", duration_ns, None)),)

    def _copy(self, s: Section) -> tuple[Action, ...]:
        kind = s.need("copy", one_of(COPY_KINDS))
        size = s.need("size", size_bytes)
        memory = s.take("memory", one_of(HOST_MEMORY), "pinned")
        return (Copy(kind, size, memory, s.take("blocking", flag, False), _stream(s)),)

    def _sync(self, s: Section) -> tuple[Action, ...]:
        what = s.need("sync", one_of(("stream", "device", "event")))
        if what == "device":
            return (Sync(None, None, 0),)
        if what == "stream":
            return (Sync(_stream(s), None, 0),)
        return (Sync(None, s.need("event", text_of), s.take("ago", whole, 0)),)

    def _collective(self, op: str) -> Callable[[Section], tuple[Action, ...]]:
        return lambda s: (Collective(op, s.need(op, size_bytes), _stream(s)),)

    def _repeat(self, s: Section) -> tuple[Action, ...]:
        times = s.take("repeat", positive, 1)
        name = s.take("range", text_of, "")
        return (Repeat(s.need("do", self._actions), times, name or None),)

    def _use(self, s: Section) -> tuple[Action, ...]:
        name = s.need("use", text_of)
        if name in self._open_sequences:
            raise UsageError(f"{s.where}: the sequence {name!r} uses itself.")
        body = self._named(self.sequences, "sequence", name, s.where)
        self._open_sequences.append(name)
        actions = self._actions(body, f"{self.source}: sequences: {name}")
        self._open_sequences.pop()
        return actions

    def _named(self, table: dict[str, T], what: str, name: Any, where: str) -> T:
        if not isinstance(name, str) or name not in table:
            raise UsageError(f"{where}: no {what} {name!r}.{did_you_mean(str(name), table)}")
        return table[name]


def _operators(value: Any, where: str) -> tuple[Operator, ...]:
    """One operator, or a list of operators that are open at once, outermost first."""
    return tuple(parse_operator(item, where) for item in (value if isinstance(value, list) else [value]))


def _work_of(operator: Operator, time_ns: int | None, flops: float, size: float, where: str) -> tuple[float, float]:
    """FLOPs and bytes of a kernel: those given, which must be those of the operator's shapes, else those of the shapes.

    A kernel with a time of its own keeps what is given: counters follow from it, and a time may have other reasons.
    """
    try:
        counted, least = work(operator)
    except ValueError as error:
        raise UsageError(f"{where}: op: {error}.") from None
    if flops and counted and not 0.9 <= flops / counted <= 1.1:
        raise UsageError(f"{where}: flops is {flops:.3g}, but the shapes of {operator.name} need {counted:.3g}.")
    if time_ns is not None or flops or size:
        return flops, size
    return float(counted), float(least)


def _stream(s: Section) -> int:
    return s.take("stream", positive, 7)


def _counters(value: Any, where: str) -> dict[str, float]:
    """Counter name → per cent of peak while the kernel runs."""
    for name, percent in mapping(value, where).items():
        if name not in COUNTERS:
            raise UsageError(f"{where}: no counter {name!r}.{did_you_mean(str(name), COUNTERS)}")
        if isinstance(percent, bool) or not isinstance(percent, int | float) or not 0 <= percent <= 100:
            raise UsageError(f"{where}: {name}: expected per cent from 0 to 100, found {shown(percent)}.")
    return {name: float(percent) for name, percent in value.items()}
