"""The events of one process in a Kineto trace: operators, annotations, calls, GPU work, in Kineto's order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from infprof.simulator.engine import Call, GpuOp, Range, SimulatedTrace, Stretch
from infprof.simulator.kineto_gpu import GpuEvents, is_module_load
from infprof.simulator.kineto_text import Writer
from infprof.simulator.operators import Operator, Tensor, input_type, tensor

_OVERHEADS = (
    "Activity Buffer Request",
    "Buffer Flush",
    "Instrumentation",
    "Resource",
    "Lazy Function Loading",
    "Runtime Triggered Module Loading",
    "Command Buffer Full",
    "Driver Compiler",
)
# NCCL's function → (what torch calls the collective, its annotation, ranks' shares of the message: in, out)
_COLLECTIVES = {
    "ncclAllReduce": ("allreduce", "nccl:all_reduce", False, False),
    "ncclAllGather": ("_allgather_base", "nccl:_all_gather_base", True, False),
    "ncclReduceScatter": ("_reduce_scatter_base", "nccl:_reduce_scatter_base", False, True),
    "ncclBroadcast": ("broadcast", "nccl:broadcast", False, False),
}
# The Python call that ends in an operating-system call.
_BUILTINS = {
    "epoll_wait": "<built-in method poll of select.epoll object at 0x7f0000000010>",
    "poll": "<built-in method poll of select.poll object at 0x7f0000000020>",
    "select": "<built-in function select>",
    "futex": "<built-in method acquire of _thread.lock object at 0x7f0000000030>",
    "pthread_cond_wait": "<built-in method acquire of _thread.lock object at 0x7f0000000030>",
    "pthread_cond_timedwait": "<built-in method acquire of _thread.lock object at 0x7f0000000030>",
    "recv": "<method 'recv' of '_socket.socket' objects>",
    "nanosleep": "<built-in function sleep>",
    "clock_nanosleep": "<built-in function sleep>",
    "fsync": "<built-in function fsync>",
}
_ENGINE_STEPS = ("execute_", "step[", "[Executor] _forward_step")
_OPERATOR_LEAD_NS, _OPERATOR_TAIL_NS = 2_000, 800  # an operator's own host time around its call, where there is room


@dataclass(frozen=True)
class Options:
    """Which process is written, and how; ``world_size`` is None without collectives."""

    process: int
    rank: int
    world_size: int | None
    stack: bool
    sync_events: bool


@dataclass
class HostEvent:
    """An operator or annotation; ``call``: the correlation of the call that it encloses, -1 = none."""

    category: str
    name: str
    thread: int
    span: tuple[int, int]
    depth: int
    args: dict[str, Any] = field(default_factory=dict)
    call: int = -1
    id: int = 0


class ProcessEvents:
    """Collects what one process of ``trace`` did."""

    def __init__(self, trace: SimulatedTrace, writer: Writer, options: Options) -> None:
        self.trace, self.writer, self.options = trace, writer, options
        self.process = trace.spec.processes[options.process]
        self.calls = [call for call in trace.calls if call.process == options.process]
        self.ops = sorted((op for op in trace.ops if op.process == options.process), key=lambda op: op.span)
        self.calls_by_id = {call.correlation: call for call in self.calls}
        self.launched: dict[int, list[GpuOp]] = defaultdict(list)
        for op in self.ops:
            self.launched[op.correlation].append(op)
        self.messages = {
            (range_.thread, range_.start_ns): range_
            for range_ in trace.ranges
            if range_.nccl and range_.process == options.process
        }
        self.ranges = [r for r in trace.ranges if not r.nccl and r.process == options.process]
        self.blocked = [s for s in trace.os_calls if s.process == options.process]
        self.stopped = [s for s in trace.overheads if s.process == options.process]
        self.external_ids: dict[int, int] = {}

    def streams(self) -> list[int]:
        return sorted({op.stream for op in self.ops})

    def span(self) -> tuple[int, int]:
        """From just before the process's first event to just after its last one."""
        things: list[Call | Range | Stretch] = [*self.calls, *self.ranges, *self.blocked, *self.stopped]
        starts = [thing.start_ns for thing in things] + [op.span[0] for op in self.ops]
        ends = [thing.end_ns for thing in things] + [op.span[1] for op in self.ops]
        return min(starts) - 100_000, max(ends) + 100_000

    def events(self) -> list[str]:
        """All events but metadata and the closing ones, in Kineto's order: host, frames, overhead, calls and GPU."""
        host = self._host_events()
        index = len(host)
        for number, event in enumerate(host):
            # an operator's External id is its number, counted from 1
            event.id = number + 1
            if event.call >= 0 and event.category == "cpu_op":
                self.external_ids[event.call] = event.id
        memory = self._memory_events(index)
        gpu = GpuEvents(self)
        frames = self._frames(index + len(memory)) if self.options.stack else []
        return [
            *(self._host_text(event) for event in host),
            *memory,
            *frames,
            *self._overheads(),
            *gpu.activities(),
            *(gpu.annotations(host) if self.writer.dialect.annotations_on_gpu else []),
        ]

    # Host

    def _host_events(self) -> list[HostEvent]:
        events = [HostEvent("user_annotation", r.text, r.thread, (r.start_ns, r.end_ns), depth=1) for r in self.ranges]
        events += self._profiler_steps()
        edges = self._edges()
        for call in self.calls:
            events += self._operators_of(call, edges[call.thread])
        return sorted(events, key=lambda e: (e.span[0], -e.span[1], e.depth))

    def _profiler_steps(self) -> list[HostEvent]:
        """``ProfilerStep#N`` around each outermost range of the thread that launches, as ``prof.step()`` gives.

        Serving engines do not call it: where ranges have an engine's step names there is none.
        """
        if not self.calls or any(r.text.startswith(_ENGINE_STEPS) for r in self.ranges):
            return []
        thread = self.calls[0].thread
        outermost: list[Range] = []
        for range_ in sorted(self.ranges, key=lambda r: (r.start_ns, -r.end_ns)):
            if range_.thread == thread and (not outermost or range_.start_ns >= outermost[-1].end_ns):
                outermost.append(range_)
        return [
            HostEvent("user_annotation", f"ProfilerStep#{n}", thread, (r.start_ns, r.end_ns), depth=0)
            for n, r in enumerate(outermost)
        ]

    def _edges(self) -> dict[int, list[int]]:
        """Per thread, the sorted times at which a call, range or blocking call starts or ends."""
        edges: dict[int, list[int]] = defaultdict(list)
        things: list[Call | Range | Stretch] = [*self.calls, *self.ranges, *self.blocked, *self.stopped]
        for thing in things:
            edges[thing.thread] += [thing.start_ns, thing.end_ns]
        return {thread: sorted(times) for thread, times in edges.items()}

    def _operators_of(self, call: Call, edges: list[int]) -> list[HostEvent]:
        """The operators around a call, outermost first. They reach into the idle time around it, never over an edge."""
        ops = self.launched.get(call.correlation, [])
        if not ops or ops[0].graph_node is not None:
            return []
        before, after = bisect_left(edges, call.start_ns), bisect_right(edges, call.end_ns)
        lead = min(_OPERATOR_LEAD_NS, (call.start_ns - edges[before - 1]) // 2) if before else _OPERATOR_LEAD_NS
        tail = min(_OPERATOR_TAIL_NS, (edges[after] - call.end_ns) // 2) if after < len(edges) else _OPERATOR_TAIL_NS
        # a touching edge that is the call's own or a range's
        if edges[before : before + 2].count(call.start_ns) > 1:
            lead = 0
        if edges[max(0, after - 2) : after].count(call.end_ns) > 1:
            tail = 0
        entries = (
            self._comm_entries(call)
            if ops[0].kind == "comm"
            else [("cpu_op", operator.name, self._inputs(operator)) for operator in _operators(ops[0])]
        )
        count = max(1, len(entries))
        return [
            HostEvent(
                category,
                name,
                call.thread,
                (call.start_ns - lead * (count - n) // count, call.end_ns + tail * (count - n) // count),
                depth=2 + n,
                args=args,
                call=call.correlation,
            )
            for n, (category, name, args) in enumerate(entries)
        ]

    def _inputs(self, operator: Operator) -> dict[str, Any]:
        dialect, inputs = self.writer.dialect, operator.inputs
        args: dict[str, Any] = {}
        if dialect.concrete_inputs:
            args["Concrete Inputs"] = ["" if isinstance(i, Tensor) else i for i in inputs]
        args["Input type"] = [input_type(i) for i in inputs]
        if dialect.input_strides:
            args["Input Strides"] = [list(i.strides) if isinstance(i, Tensor) else [] for i in inputs]
        return args | {"Input Dims": [list(i.shape) if isinstance(i, Tensor) else [] for i in inputs]}

    def _comm_entries(self, call: Call) -> list[tuple[str, str, dict[str, Any]]]:
        function = self.messages[call.thread, call.start_ns].text
        meta = self.message(call)
        inputs = self._inputs(Operator("", (tensor("bf16", meta["In msg nelems"]),)))
        return [
            ("cpu_op", "record_param_comms", {**meta, "Rank": self.options.rank, **inputs}),
            ("user_annotation", _COLLECTIVES[function][1], {}),
        ]

    def message(self, call: Call) -> dict[str, Any]:
        """What torch says of a collective, on its operator and on its kernel. Messages are BF16."""
        range_, world = self.messages[call.thread, call.start_ns], self.options.world_size or 1
        name, _, in_is_share, out_is_share = _COLLECTIVES[range_.text]
        elements = (range_.bytes or 0) // 2
        return {
            "Collective name": name,
            "In msg nelems": elements // (world if in_is_share else 1),
            "Out msg nelems": elements // (world if out_is_share else 1),
            "Group size": world,
            "dtype": "BFloat16",
            "In split size": "[]",
            "Out split size": "[]",
            "Process Group Name": "0",
            "Process Group Description": "default_pg",
            "Process Group Ranks": str(list(range(world))),
            "Seq": self.launched[call.correlation][0].collective,
        }

    def _host_text(self, event: HostEvent) -> str:
        dialect = self.writer.dialect
        args = {"External id": event.id, "Record function id": 0, **event.args, dialect.event_index: event.id - 1}
        if dialect.event_index != "Ev Idx":
            args |= {"Trace name": "PyTorch Profiler", "Trace iteration": 0}
        pid = self.process.pid
        return self.writer.complete(event.category, event.name, pid, pid + event.thread, event.span, args)

    def _memory_events(self, index: int) -> list[str]:
        texts: list[str] = []
        total, pid = 0, self.process.pid
        for event in (e for e in self.trace.memory if e.process == self.options.process):
            change = event.bytes if event.op == "alloc" else -event.bytes
            total += change
            args = {
                "Total Reserved": total,
                "Total Allocated": total,
                "Bytes": change,
                "Addr": event.address,
                "Device Id": self.process.device,
                "Device Type": 1,
                self.writer.dialect.event_index: index + len(texts),
            }
            texts.append(self.writer.instant("[memory]", pid, pid, event.time_ns, args))
        return texts

    def _frames(self, index: int) -> list[str]:
        """Python frames: the thread's entry, one per range, and the built-in that blocks in the operating system."""
        texts: list[str] = []
        pid = self.process.pid
        for thread in range(len(self.process.threads)):
            frames = [(r.start_ns, r.end_ns, f"engine.py({10 + len(r.text)}): {r.text}") for r in self._of(thread)]
            frames += [
                (s.start_ns, s.end_ns, _BUILTINS.get(s.name, f"<built-in function {s.name}>"))
                for s in self.blocked
                if s.thread == thread
            ]
            start, end = self.span()
            open_frames: list[tuple[int, int]] = []
            for first, last, name in [(start, end, "engine.py(1): <module>"), *sorted(frames, key=_outer_first)]:
                while open_frames and open_frames[-1][0] < last:
                    open_frames.pop()
                number = len(texts) + 1
                parent = open_frames[-1][1] if open_frames else None
                args = {"Python parent id": parent, "Python id": number, "Python thread": thread}
                args[self.writer.dialect.event_index] = index + len(texts)
                texts.append(self.writer.complete("python_function", name, pid, pid + thread, (first, last), args))
                open_frames.append((last, number))
        return texts

    def _of(self, thread: int) -> list[Range]:
        return [range_ for range_ in self.ranges if range_.thread == thread]

    def _overheads(self) -> list[str]:
        """What stopped the threads, and module loads: driver calls other than launches are not recorded."""
        rows: list[tuple[int, int, str]] = [(s.start_ns, s.end_ns, _overhead_name(s)) for s in self.stopped]
        rows += [(c.start_ns, c.end_ns, "Runtime Triggered Module Loading") for c in self.calls if is_module_load(c)]
        return [self.writer.complete("overhead", name, -1, 0, (start, end)) for start, end, name in sorted(rows)]


def _operators(op: GpuOp) -> tuple[Operator, ...]:
    """Those of the spec for a kernel; copies and memsets have PyTorch's own."""
    if op.kind == "copy":
        whole = tensor(*_as_elements(op.bytes))
        return (Operator("aten::copy_", (whole, whole, "False" if op.memory == "pageable" else "True")),)
    if op.kind == "memset":
        return (Operator("aten::zero_", (tensor(*_as_elements(op.bytes)),)),)
    return op.kernel.operators if op.kernel else ()


def _as_elements(size: int) -> tuple[str, int]:
    return ("i64", size // 8) if size % 8 == 0 else ("u8", size)


def _overhead_name(stretch: Stretch) -> str:
    if stretch.name in _OVERHEADS:
        return stretch.name
    return "Buffer Flush" if "flush" in stretch.name.lower() else "Instrumentation"


def _outer_first(frame: tuple[int, int, str]) -> tuple[int, int]:
    return frame[0], -frame[1]
