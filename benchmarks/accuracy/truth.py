"""The label of a simulated run, counted event by event from what its threads and streams did.

The answer of the simulator (``infprof.simulator.answer``) gives idle time by cause, communication and the limiter; what
else the rules claim is counted here. Levels are those that the rules promise, in ``LEVELS``: a share that is a tenth
over one demands the finding, a tenth under it forbids it, between the two it may stand. No code of the analysis is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from benchmarks.accuracy.labels import ANY, Label, either

from infprof.simulator import SimulatedTrace, answer
from infprof.simulator.engine import GpuOp
from infprof.simulator.operators import work
from infprof.simulator.workload import gpu

MARGIN = 0.10
SMALL_KERNEL_NS, SMALL_COPY_BYTES, ROUND_TRIP_BYTES = 5_000, 65_536, 4_096

# Share of the demand, of the window (profiler, no demand, unknown), or of compute (fp32, few SMs), from which on.
LEVELS = {
    "launch-bound": 0.05,
    "allocator-churn": 0.05,
    "lock-contention": 0.05,
    "io-wait": 0.05,
    "module-load-in-window": 0.05,
    "device-dependency": 0.05,
    "sync-per-step": 0.05,
    "exposed-communication": 0.05,
    "straggler-rank": 0.05,
    "exposed-copies": 0.05,
    "pageable-copies": 0.05,
    "small-copies": 0.05,
    "needless-copies": 0.05,
    "device-copies": 0.05,
    "waiting-for-requests": 0.05,
    "profiler-overhead": 0.05,
    "unexplained-idle": 0.05,
    "fp32-gemm": 0.10,
    "few-sm-kernels": 0.10,
    "many-small-kernels": 0.05,
    "gemm-far-from-roof": 0.10,
}
HOST_WORK, HOST_RULES = 0.05, frozenset({"host-work-between-steps", "host-work-per-launch"})
JUDGED = frozenset(LEVELS) | HOST_RULES
_IDLE_RULES = {
    "launch-bound": "launch",
    "allocator-churn": "allocator",
    "lock-contention": "lock",
    "io-wait": "io",
    "module-load-in-window": "module-load",
    "device-dependency": "dependency",
}
# A wait per step whose gaps are a millisecond and more counts from this share on.
_LONG_WAITS = 0.01
_BUSY = ("kernel", "graph", "comm")
# Windows under this are too short for findings.
_SHORT_NS = 5_000_000
_CLASS_LEVELS = {"communication-bound": 0.10, "pcie-limited": 0.10, "scheduling-bubble": 0.20}
_WINNER_MIN, _BUSY_FROM, _NO_DEMAND = 0.20, 0.80, 0.50
_CLEAR, _AHEAD, _LATENCY = 0.60, 0.15, 0.40
# Of the window: what a healthy run may lose to each kind of loss, and to idle time of all kinds.
_HEALTHY_LOSS, _HEALTHY_IDLE = 0.045, 0.09
# Of both roofs, under which a product is far from them; of the nearer one, what large products reach; of kernel time with
# shapes, what must be there to tell.
_FAR, _REACHED, _COUNTED = 0.40, 0.60, 0.30


@dataclass(frozen=True)
class Format:
    """What a recording holds. ``os_calls``: the calls of the operating system; ``counters``; ``shapes`` of operators."""

    os_calls: bool
    counters: bool
    shapes: bool


def label_of(trace: SimulatedTrace, form: Format, without_fault: bool = False) -> Label:
    """The label of a run as recorded in ``form``. ``without_fault``: nothing was put into it, so that it may be healthy."""
    if not form.os_calls and trace.os_calls:
        shown = label_of(replace(trace, os_calls=[]), form, without_fault)
        return _unproven(label_of(trace, replace(form, os_calls=True), without_fault), shown)
    truth = answer(trace)
    devices = [Facts(trace, truth, number, form) for number, d in enumerate(truth["devices"]) if d["verdict"]]
    most = max(device.recoverable_ns for device in devices)
    # The verdict is that of the device which loses most; where several lose as much, of any of them.
    return either(device.label(without_fault) for device in devices if device.recoverable_ns >= (1 - MARGIN) * most)


def share_of(trace: SimulatedTrace, form: Format, rule: str) -> float:
    """What a rule's level is about, in the device that loses most: a share of the demand, window or compute time."""
    trace = trace if form.os_calls else replace(trace, os_calls=[])
    truth = answer(trace)
    devices = [Facts(trace, truth, number, form) for number, d in enumerate(truth["devices"]) if d["verdict"]]
    return max(devices, key=lambda device: device.recoverable_ns).share(rule)


def _unproven(true: Label, shown: Label) -> Label:
    """The label of a recording that does not show what the host was blocked in: what it shows instead is right only where
    it is said with doubt, and no finding on the host's time is demanded of it."""
    causes = frozenset({"lock-contention", "io-wait", "waiting-for-requests"}) | HOST_RULES | {"sync-per-step"}
    must = tuple(group for group in shown.must if not group & causes)
    doubtful = {cls: c for cls, c in shown.verdicts.items() if true.verdicts.get(cls) != c}
    return replace(shown, verdicts=true.verdicts, doubtful=doubtful, must=must, may=shown.may | causes)


class Facts:
    """What is known of one device of a run."""

    def __init__(self, trace: SimulatedTrace, truth: dict[str, Any], number: int, form: Format) -> None:
        self.trace, self.form = trace, form
        self.device = trace.spec.devices[number]
        self.peaks = gpu(self.device.name).flops
        self.figures: dict[str, Any] = truth["figures"]["devices"][number]
        self.told: dict[str, Any] = truth["devices"][number]
        self.window: int = truth["figures"]["window_ns"]
        self.ops = sorted((op for op in trace.ops if op.device == number), key=lambda op: op.span)
        self.idle: Counter[str] = Counter(self.told["idle_ns"])
        self.demand: int = max(self.window - self.idle["no-demand"] - self.idle["profiler"], 1)

    # --- times --------------------------------------------------------------------------------------------------------

    def exposed_ns(self, chosen: Callable[[GpuOp], bool]) -> int:
        """How long one of the chosen operations runs and no kernel does."""
        edges = []
        for op in self.ops:
            kind = "busy" if op.kind in _BUSY else "chosen" if chosen(op) else ""
            if kind:
                edges += [(op.span[0], 1, kind), (op.span[1], -1, kind)]
        running: Counter[str] = Counter()
        total, before = 0, 0
        for time, change, kind in sorted(edges):
            if running["chosen"] and not running["busy"]:
                total += time - before
            running[kind] += change
            before = time
        return total

    @cached_property
    def copies(self) -> dict[str, int]:
        """Exposed time of copies, by what is wrong with them."""
        host = ("h2d", "d2h")
        returning = self._round_trips()
        return {
            "host": self.exposed_ns(lambda op: op.copy_kind in host),
            "pageable": self.exposed_ns(lambda op: op.copy_kind in host and op.memory == "pageable"),
            "small": self.exposed_ns(lambda op: op.copy_kind in host and op.bytes < SMALL_COPY_BYTES),
            "returning": self.exposed_ns(lambda op: id(op) in returning),
            "d2d": self.exposed_ns(lambda op: op.copy_kind == "d2d"),
        }

    def _round_trips(self) -> set[int]:
        """Copies to the host that come back as the process's next copy, and those copies back."""
        found: set[int] = set()
        last: dict[int, GpuOp] = {}
        for op in self.ops:
            if op.copy_kind not in ("h2d", "d2h"):
                continue
            before = last.get(op.process)
            back = before is not None and (before.copy_kind, op.copy_kind) == ("d2h", "h2d")
            if before is not None and back and before.bytes == op.bytes >= ROUND_TRIP_BYTES:
                found |= {id(before), id(op)}
            last[op.process] = op
        return found

    @property
    def recoverable_ns(self) -> int:
        return self.idle_ns + int(self.figures["exposed_communication_ns"]) + self.copies["host"]

    @property
    def idle_ns(self) -> int:
        """Idle time that could be won back."""
        return self.idle.total() - sum(self.idle[cause] for cause in ("kernel-gap", "no-demand", "profiler"))

    @cached_property
    def latency_ns(self) -> int:
        """How long the device waits for launches that came too late after their calls were through.

        Docs and case D-39 may be read both ways: the latency of a late launch is the hardware's turn-around, or belongs to
        what made the launch late. Either is right.
        """
        ends = {(call.process, call.correlation): call.end_ns for call in self.trace.calls}
        total, free_at = 0, self.ops[0].span[0]
        for op in self.ops:
            begin, end = op.span
            if begin > free_at and op.ready_ns > free_at:
                total += begin - min(max(ends[op.process, op.correlation], free_at), begin)
            free_at = max(free_at, end)
        return total

    def host_is_longer(self) -> set[bool]:
        """Whether the host's part of the loop is longer than the GPU's; both where they are about as long.

        A copy call that waits for earlier work may count as the host's time, which it takes, or as a wait, which ends where
        nobody asks for the data so early: where that decides, both are right.
        """
        answers: set[bool] = set()
        for host in (self.told["host_ns"], self.told["host_ns"] - self._held_in_copies_ns):
            ratio = host / max(self.told["busy_ns"], 1)
            answers |= {ratio >= 1} if abs(ratio - 1) > MARGIN / 2 else {True, False}
        return answers

    @cached_property
    def _held_in_copies_ns(self) -> int:
        """How long copy calls waited for the device's earlier work, before their own copy began."""
        begun = {(call.process, call.correlation): (call.start_ns, call.end_ns) for call in self.trace.calls}
        held = 0
        for op in self.ops:
            if op.kind == "copy" and op.memory != "pinned":
                start, end = begun[op.process, op.correlation]
                held += max(min(op.span[0], end) - start, 0)
        return held

    # --- the label ----------------------------------------------------------------------------------------------------

    def label(self, without_fault: bool) -> Label:
        lengths = self.host_is_longer()
        label = either(self._label(longer) for longer in lengths)
        if len(lengths) > 1 and self.idle["sync"] >= HOST_WORK * (1 + MARGIN) * self.demand:
            # Whichever it is, it must be found.
            label = replace(label, must=(*label.must, HOST_RULES | {"sync-per-step"}))
        if self.window < _SHORT_NS:
            # Of so short a capture nothing is found, which is no reason to find what is not there.
            label = replace(label, must=(), may=label.may.union(*label.must))
        return replace(label, healthy=without_fault and self._is_healthy())

    def _label(self, host_is_longer: bool) -> Label:
        shares = self._shares(host_is_longer)
        must, may = [], set()
        for rule, level in LEVELS.items():
            share = shares.get(rule)
            late = self.latency_ns / self.demand if rule == "launch-bound" else 0.0
            if share is None:
                may.add(rule)
            elif share >= level * (1 + MARGIN):
                must.append(frozenset({rule}))
            elif share + late >= level * (1 - MARGIN):
                may.add(rule)
        if (shares["sync-per-step"] or 0.0) >= _LONG_WAITS * (1 - MARGIN):
            may.add("sync-per-step")
        host = self._host_ns(host_is_longer)
        if host >= HOST_WORK * (1 + MARGIN) * self.demand:
            must.append(HOST_RULES)
        elif host + self.latency_ns >= HOST_WORK * (1 - MARGIN) * self.demand:
            may |= HOST_RULES
        return Label(self._verdict(host_is_longer), tuple(must), frozenset(may), JUDGED)

    def share(self, rule: str) -> float:
        """Of the rule's level; host work counts as one, whichever rule claims it."""
        longer = bool(self.told["host_ns"] >= self.told["busy_ns"])
        if rule in HOST_RULES:
            return self._host_ns(longer) / self.demand
        share = self._shares(longer)[rule]
        assert share is not None, f"{rule}: only the recording can tell"
        return share

    def _host_ns(self, host_is_longer: bool) -> int:
        return self.idle["host-work"] + (self.idle["sync"] if host_is_longer else 0)

    def _shares(self, host_is_longer: bool) -> dict[str, float | None]:
        """By rule, what its level is about; None where only the recording could tell."""
        demand, copies = self.demand, self.copies
        found: dict[str, float | None] = {rule: self.idle[cause] / demand for rule, cause in _IDLE_RULES.items()}
        found["sync-per-step"] = 0.0 if host_is_longer else self.idle["sync"] / demand
        found |= self._communication()
        host, many = copies["host"] / demand, sum(self._is_small_copy(op) for op in self.ops)
        found["pageable-copies"] = copies["pageable"] / demand
        found["exposed-copies"] = host - copies["pageable"] / demand
        found["small-copies"] = copies["small"] / demand if many >= 100 else 0.0
        found["needless-copies"] = copies["returning"] / demand if len(self._round_trips()) >= 20 else 0.0
        found["device-copies"] = copies["d2d"] / demand
        found["waiting-for-requests"] = self.idle["no-demand"] / self.window
        found["profiler-overhead"] = self.idle["profiler"] / self.window
        # Only where the recording holds several devices does one of them wait for the others' end.
        found["unexplained-idle"] = self.idle["unknown"] / self.window
        return found | self._kernels()

    def _is_small_copy(self, op: GpuOp) -> bool:
        return op.copy_kind in ("h2d", "d2h") and op.bytes < SMALL_COPY_BYTES

    def _communication(self) -> dict[str, float | None]:
        exposed = self.figures["exposed_communication_ns"] / self.demand
        told = self.told["communication"]
        if told is None:
            return {"exposed-communication": 0.0, "straggler-rank": 0.0}
        waited = told["waited_ns"] / max(told["total_ns"], 1)
        if abs(waited - 0.5) < MARGIN / 2:
            near = None if exposed >= 0.04 else 0.0
            return {"exposed-communication": near, "straggler-rank": near}
        late = waited >= 0.5
        return {"exposed-communication": 0.0 if late else exposed, "straggler-rank": exposed if late else 0.0}

    def _kernels(self) -> dict[str, float | None]:
        """Shares of compute time; None where CUDA graphs recorded as one row hide the kernels."""
        kernels = [(op, op.span[1] - op.span[0]) for op in self.ops if op.kind == "kernel" and op.kernel is not None]
        if any(op.kind == "graph" for op in self.ops) or not kernels:
            return dict.fromkeys(("fp32-gemm", "few-sm-kernels", "many-small-kernels", "gemm-far-from-roof"), 0.0)
        total = sum(ns for _, ns in kernels)
        compute = max(self.figures["compute_ns"], 1)
        few = sum(ns for op, ns in kernels if 2 * _blocks(op) < self.device.sm_count)
        fp32 = sum(ns for op, ns in kernels if _is_product(op) and _is_fp32(op))
        # Collectives are kernels too, and some of them are short.
        every = [op.span[1] - op.span[0] for op in self.ops if op.kind in ("kernel", "comm")]
        small = [ns for ns in every if ns < SMALL_KERNEL_NS]
        spent: float | None = sum(small) / sum(every)
        limits = [_around(len(small) / len(every), 0.5), _around(len(small), 1000)]
        if any(is_under for _, is_under in limits):
            spent = 0.0
        elif any(is_near for is_near, _ in limits):
            spent = None
        return {
            "fp32-gemm": fp32 / compute,
            "few-sm-kernels": few / compute,
            "many-small-kernels": spent,
            "gemm-far-from-roof": self._far_from_roof(kernels, total) if self.form.shapes else 0.0,
        }

    def _far_from_roof(self, kernels: list[tuple[GpuOp, int]], total: int) -> float | None:
        """What matrix products lose that reach little of both roofs, of all kernel time; of those that show their shapes."""
        counted, lost = 0, 0.0
        for op, ns in kernels:
            if op.graph_id is not None or op.kernel is None or not op.kernel.operators:
                continue
            counted += ns
            if not _is_product(op) or ns < SMALL_KERNEL_NS:
                continue
            peak = self.peaks["float32"] if _is_fp32(op) else self.device.flops
            flop, size = work(op.kernel.operators[-1])
            reached = max(flop / peak, size / self.device.bandwidth) * 1e9 / ns
            lost += ns * (1 - reached / _REACHED) if reached < _FAR else 0.0
        if counted < _COUNTED * (1 - MARGIN) * total:
            return 0.0
        # Attention's work is not always counted, so that the covered share is known as an upper bound only.
        sure = counted >= 2 * _COUNTED * total
        return lost / total if sure or lost < 0.09 * total else None

    # --- the verdict --------------------------------------------------------------------------------------------------

    def _verdict(self, host_is_longer: bool) -> dict[str, frozenset[str]]:
        """Classes that are right, with their causes: those of docs/verdicts.md, with every level a tenth lower and higher."""
        found: dict[str, frozenset[str]] = {}
        for slack, late in product((1 - MARGIN, 1.0, 1 + MARGIN), (0, self.latency_ns)):
            for cls in self._classes(slack, late):
                found[cls] = self._causes(cls, host_is_longer)
        return found

    def _classes(self, slack: float, late_ns: int) -> Iterable[str]:
        if self.idle["no-demand"] >= slack * _NO_DEMAND * self.window:
            return ["no-demand"]
        shares = {
            "communication-bound": self.figures["exposed_communication_ns"] / self.demand,
            "pcie-limited": self.copies["host"] / self.demand,
            "scheduling-bubble": (self.idle_ns + late_ns) / self.demand,
        }
        passing = {cls: share for cls, share in shares.items() if share >= slack * _CLASS_LEVELS[cls]}
        most = max(passing.values(), default=0.0)
        busy = most < slack * _WINNER_MIN and self.figures["compute_ns"] > _BUSY_FROM / slack * self.demand
        if not passing or busy:
            return self._limiters()
        return [cls for cls, share in passing.items() if share >= (1 - MARGIN) * most]

    def _limiters(self) -> set[str]:
        """What a recording can name: without counters none surely; shapes may tell, and graphs have none."""
        c, m = self.told["limiter"]["compute_ratio"], self.told["limiter"]["dram_ratio"]
        if c is None or not (self.form.counters or self.form.shapes):
            return {"gpu-busy"}
        named = {_limiter(c, m, slack) for slack in (1 - MARGIN, 1.0, 1 + MARGIN)}
        # Work counted from shapes is a lower bound, which cannot show that a GPU reaches little.
        return named if self.form.counters else (named - {"latency-bound"}) | {"gpu-busy"}

    def _causes(self, cls: str, host_is_longer: bool) -> frozenset[str]:
        if cls == "communication-bound":
            told = self.told["communication"]
            waited = told["waited_ns"] / max(told["total_ns"], 1)
            either_way = abs(waited - 0.5) < MARGIN / 2
            return frozenset({"straggler"} if waited >= 0.5 else ()) | (
                frozenset({"volume", "unknown", *(["straggler"] if either_way else [])})
                if waited < 0.5 or either_way
                else ANY
            )
        if cls == "pcie-limited":
            return self._copy_causes()
        if cls != "scheduling-bubble":
            return ANY
        causes = Counter({c: ns for c, ns in self.idle.items() if c not in ("kernel-gap", "no-demand", "profiler")})
        if host_is_longer:
            causes["host-work"] += causes.pop("sync", 0)
        most = max(causes.values(), default=0)
        with_late = {cause: ns + self.latency_ns for cause, ns in causes.items() if cause in ("launch", "host-work")}
        return frozenset(c for c, ns in causes.items() if max(ns, with_late.get(c, 0)) >= (1 - MARGIN) * most)

    def _copy_causes(self) -> frozenset[str]:
        host = max(self.copies["host"], 1)
        pageable = self.copies["pageable"] / host
        found = {"pageable"} if pageable >= 0.5 * (1 - MARGIN) else set()
        if pageable <= 0.5 * (1 + MARGIN):
            small = self.copies["small"] / host
            found |= {"small-copies"} if small >= 0.5 * (1 - MARGIN) else set()
            found |= {"volume"} if small <= 0.5 * (1 + MARGIN) else set()
        return frozenset(found)

    def _is_healthy(self) -> bool:
        """Whether nothing costs as much as anyone would change something for, neither alone nor all idle time together."""
        lost = [*(ns for cause, ns in self.idle.items() if cause != "kernel-gap"), *self.copies.values()]
        lost.append(self.figures["exposed_communication_ns"])
        return max(lost) < _HEALTHY_LOSS * self.window and self.idle_ns < _HEALTHY_IDLE * self.window


def _around(value: float, level: float) -> tuple[bool, bool]:
    """Whether a value is near a level, and whether it is surely under it."""
    return abs(value - level) <= MARGIN * level, value < level * (1 - MARGIN)


def _blocks(op: GpuOp) -> int:
    assert op.kernel is not None
    x, y, z = op.kernel.grid
    return x * y * z


def _is_product(op: GpuOp) -> bool:
    assert op.kernel is not None
    return any(operator.name in ("aten::mm", "aten::addmm", "aten::bmm") for operator in op.kernel.operators)


def _is_fp32(op: GpuOp) -> bool:
    assert op.kernel is not None
    return all(tensor.type == "float" for operator in op.kernel.operators for tensor in operator.tensors)


def _limiter(c: float, m: float, slack: float) -> str:
    if max(c, m) >= slack * _CLEAR and abs(c - m) >= slack * _AHEAD:
        return "compute-bound" if c > m else "bandwidth-bound"
    return "latency-bound" if max(c, m) < _LATENCY * slack else "balanced"
