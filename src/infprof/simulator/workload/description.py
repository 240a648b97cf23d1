"""What a description of a simulated workload says, checked.

The keys below ``workload``, all optional, beside ``name``, ``description``, ``seed``, ``jitter``, ``nsys``, ``start``,
``counters`` and ``costs``, which are those of a spec::

    workload:
      preset: 7b                      # as of `infprof workload list`; layers: 8 takes only some of its layers
      fault: sync                     # as of the same list, or one of the simulator's own (see simulated_faults)
      gpu: NVIDIA H100 80GB HBM3      # a name from the table of device peaks, or {name: …, flops: …, bandwidth: …}
      dtype: bfloat16                 # float16, float32
      tensor_parallel: 2              # ranks, one GPU each, that share every layer
      replicas: 2                     # engines that share one GPU, each with its part of the requests
      requests: {count: 32, prompt: 128, output: 64, rate: 50}    # rate: arrivals per second; all at the start without
      engine: {max_batch: 16, step_tokens: 512, cuda_graphs: true, kv_blocks: 900}     # and the faults' switches
      prefetch: true                  # offloaded weights come on a stream of their own
      graph_trace: node               # or graph: a row per launch
      annotate: false                 # without any range
      steps: 100                      # the trace ends there
      host: {schedule: 60us, process: 30us}      # what the engine does outside CUDA (HostCosts)
      kernels: {attention: 2.0}       # factors on the times of a class of kernels
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from infprof.errors import UsageError
from infprof.simulator.fields import (
    Section,
    did_you_mean,
    duration_ns,
    flag,
    mapping,
    one_of,
    positive,
    rate,
    share,
    text_of,
    whole,
)
from infprof.simulator.schema import VERSIONS
from infprof.simulator.spec import Costs, parse_costs, parse_counter_rate
from infprof.simulator.workload.gpus import DEFAULT, Gpu, gpu, parse_gpu
from infprof.simulator.workload.kernels import ELEMENT_BYTES, KERNEL_CLASSES
from infprof.workload.presets import PRESETS, ModelShape
from infprof.workload.settings import EngineSettings, RequestsSettings

# Fields of the real engine's settings that mean something here.
_ENGINE_FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "block_size": positive,
    "kv_blocks": positive,
    "max_batch": positive,
    "step_tokens": positive,
    "context": positive,
    "cuda_graphs": flag,
    "static_decode": flag,
    "pieces": positive,
    "check_layers": flag,
    "offload_every": whole,
    "offload_pinned": flag,
    "host_sampling": flag,
    "empty_cache": flag,
}


@dataclass(frozen=True)
class HostCosts:
    """What the engine's thread does outside CUDA, in ns.

    Per step, and for each request or token in it: deciding what it computes (``schedule``), packing its numbers
    (``prepare``), handing out its tokens (``process``), making text of them (``detokenise``). ``check``: after each
    answer of the device about a layer; ``logit``: per logit where Python looks for the largest.
    """

    schedule_ns: int = 60_000
    schedule_request_ns: int = 1_500
    prepare_ns: int = 50_000
    prepare_token_ns: int = 250
    process_ns: int = 30_000
    process_token_ns: int = 1_500
    detokenise_token_ns: int = 0
    check_ns: int = 35_000
    logit_ns: int = 45


@dataclass(frozen=True)
class Workload:
    """A described run. ``engine`` holds the fields of the real engine's settings that are not left at their defaults.

    ``slow_rank`` is the speed of the last rank's GPU, of the others'; ``peers`` the bytes per second between ranks where
    the GPU's own link is not what they use.
    """

    name: str = "workload"
    description: str = ""
    seed: int = 0
    jitter: float = 0.03
    nsys: str = "2023.4"
    start_ns: int = 1_000_000_000
    counter_rate_hz: int | None = None
    costs: Costs = field(default_factory=lambda: Costs(launch_ns=4_500, between_ns=3_000))
    preset: str = "3b"
    layers: int | None = None
    fault: str = "none"
    gpu: Gpu = field(default_factory=lambda: gpu(DEFAULT))
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    replicas: int = 1
    requests: RequestsSettings = field(default_factory=RequestsSettings)
    rate_per_s: float | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    prefetch: bool = False
    graph_trace: str = "node"
    annotate: bool = True
    steps: int = 200
    host: HostCosts = field(default_factory=HostCosts)
    kernels: dict[str, float] = field(default_factory=dict)
    slow_rank: float = 1.0
    peers: float | None = None
    expect: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> ModelShape:
        shape = PRESETS[self.preset].shape
        return replace(shape, layers=min(self.layers, shape.layers)) if self.layers else shape


def parse_workload(data: Any, source: str = "workload") -> Workload:
    """Check a description given as a dict; ``source`` names it in errors. Raises UsageError."""
    top = Section(data, source)
    d = Workload()
    common: dict[str, Any] = {
        "name": top.take("name", text_of, Path(source).stem),
        "description": top.take("description", text_of, d.description),
        "seed": top.take("seed", whole, d.seed),
        "jitter": top.take("jitter", share, d.jitter),
        "nsys": top.take("nsys", one_of(VERSIONS), d.nsys),
        "start_ns": top.take("start", duration_ns, d.start_ns),
        "counter_rate_hz": top.take("counters", parse_counter_rate, None),
        "costs": top.take("costs", _costs, d.costs),
        "expect": top.take("expect", mapping, {}),
    }
    inner: dict[str, Any] = top.need("workload", lambda value, at: _workload(value, at, common["seed"]))
    top.done()
    return checked(Workload(**common, **inner), source)


def _workload(data: Any, where: str, seed: int) -> dict[str, Any]:
    # `workload:` with nothing below it is the default one.
    s = Section({} if data is None else data, where)
    d = Workload()
    requests, arrivals = s.take("requests", lambda value, at: _requests(value, at, seed), (_default(seed), None))
    device = s.take("gpu", parse_gpu, None) or gpu(DEFAULT)
    # What the GPU computes in by itself: Volta and Turing have no bfloat16.
    usual = "bfloat16" if "bfloat16" in device.flops else "float16"
    found: dict[str, Any] = {
        "gpu": device,
        "preset": s.take("preset", _choice(tuple(PRESETS)), d.preset),
        "layers": s.take("layers", positive, None),
        "fault": s.take("fault", text_of, d.fault),
        "dtype": s.take("dtype", _choice(tuple(ELEMENT_BYTES)), usual),
        "tensor_parallel": s.take("tensor_parallel", positive, d.tensor_parallel),
        "replicas": s.take("replicas", positive, d.replicas),
        "requests": requests,
        "rate_per_s": arrivals,
        "engine": s.take("engine", _engine, {}),
        "prefetch": s.take("prefetch", flag, d.prefetch),
        "graph_trace": s.take("graph_trace", one_of(("node", "graph")), d.graph_trace),
        "annotate": s.take("annotate", flag, d.annotate),
        "steps": s.take("steps", positive, d.steps),
        "host": s.take("host", _host, d.host),
        "kernels": s.take("kernels", _factors, {}),
        "slow_rank": s.take("slow_rank", share, d.slow_rank),
        "peers": s.take("peers", rate, None),
    }
    s.done()
    return found


def checked(workload: Workload, source: str = "workload") -> Workload:
    """The workload, if its parts go together. Raises UsageError."""
    shape, ranks = workload.shape, workload.tensor_parallel
    if workload.dtype not in workload.gpu.flops:
        raise UsageError(f"{source}: {workload.gpu.device.name} does not compute in {workload.dtype}.")
    if shape.heads % ranks or shape.intermediate % ranks or shape.vocabulary % ranks:
        raise UsageError(
            f"{source}: {shape.heads} heads of preset {workload.preset} do not divide among {ranks} ranks."
        )
    if ranks > 1 and workload.replicas > 1:
        raise UsageError(f"{source}: give tensor_parallel or replicas, not both.")
    if workload.replicas > workload.requests.count:
        raise UsageError(
            f"{source}: {workload.replicas} replicas share {workload.requests.count} requests: some get none."
        )
    if workload.slow_rank <= 0:
        raise UsageError(f"{source}: slow_rank: expected a speed over 0, of that of the other ranks.")
    if workload.graph_trace == "graph" and ranks > 1:
        raise UsageError(f"{source}: graphs with collectives cannot be recorded as a whole: set graph_trace: node.")
    return workload


def _default(seed: int) -> RequestsSettings:
    return RequestsSettings(seed=seed)


def _requests(data: Any, where: str, seed: int) -> tuple[RequestsSettings, float | None]:
    s, d = Section(data, where), RequestsSettings()
    found = RequestsSettings(
        count=s.take("count", positive, d.count),
        prompt_tokens=s.take("prompt", positive, d.prompt_tokens),
        output_tokens=s.take("output", positive, d.output_tokens),
        seed=seed,
    )
    arrivals = s.take("rate", rate, None)
    s.done()
    return found, arrivals


def _engine(data: Any, where: str) -> dict[str, Any]:
    s = Section(data, where)
    given = {name: s.need(name, parse) for name, parse in _ENGINE_FIELDS.items() if s.has(name)}
    for key in [key for key in mapping(data, where) if key not in _ENGINE_FIELDS]:
        raise UsageError(f"{where}: no key {key!r} here.{did_you_mean(str(key), _ENGINE_FIELDS)}")
    try:
        EngineSettings(**given)
    except ValueError as error:
        raise UsageError(f"{where}: {error}.") from None
    return given


def _costs(data: Any, where: str) -> Costs:
    # An engine in Python takes longer for its calls, and between them, than a spec's plain loop.
    return parse_costs(data, where, Workload().costs)


def _host(data: Any, where: str) -> HostCosts:
    s, d = Section(data, where), HostCosts()
    names = [f.name for f in fields(HostCosts)]
    found = HostCosts(**{n: s.take(n.removesuffix("_ns"), duration_ns, getattr(d, n)) for n in names})
    s.done()
    return found


def _factors(data: Any, where: str) -> dict[str, float]:
    s = Section(data, where)
    found = {name: s.take(name, rate, 1.0) for name in KERNEL_CLASSES}
    s.done()
    return found


def _choice(names: tuple[str, ...]) -> Callable[[Any, str], str]:
    def parse(value: Any, where: str) -> str:
        if value not in names:
            raise UsageError(f"{where}: there is no {value}.{did_you_mean(str(value), names)}")
        return str(value)

    return parse
