"""Puts the server together: options, engine, policies and the web server, from start to graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infprof.errors import EXIT_COLLECTOR, InfprofError, UsageError
from infprof.workload.faults import find_fault
from infprof.workload.presets import ModelShape, Preset
from infprof.workload.runner import check_model, choose_device
from infprof.workload.server.admission import MEMORY_POLICIES, BatchWindow, KvAdmission
from infprof.workload.server.engine_thread import EngineThread, Policies, first_line
from infprof.workload.server.generation import Events, by_inbox
from infprof.workload.server.waiting_line import POLICIES, Aging
from infprof.workload.settings import EngineSettings, RequestsSettings

if TYPE_CHECKING:
    import uvicorn

    from infprof.workload.engine import Engine
    from infprof.workload.server.app import Service

_NS = 1_000_000_000
# What a request may have in all, unless --max-model-len says otherwise.
_USUAL_CONTEXT = 2048
# Once all answers have ended, for the last bytes to leave.
_LAST_BYTES_S = 5
_BACKLOG = 2048


@dataclass(frozen=True)
class PolicyOptions:
    """The practices of a good server, each with the value that switches it off: ``rate_limit_per_s`` None, ``aging_s``
    0, ``overcommit`` None, ``queue_timeout_s`` 0, ``batch_wait_s`` 0."""

    max_batch: int = 32
    batch_wait_s: float = 0.0
    scheduling: str = "priority"
    aging_s: float = 1.0
    overcommit: float | None = 1.0
    memory_short: str = "wait"
    max_queue: int = 256
    queue_timeout_s: float = 60.0
    rate_limit_per_s: float | None = None
    rate_burst: int | None = None


@dataclass(frozen=True)
class ServeOptions:
    """What the command line asks for. ``context`` None = 2048, or what the preset has; ``kv_blocks`` None = enough for
    ``max_batch`` requests of that length, within the memory. ``grace_s``: how long answers may take to end at the end.
    """

    preset: str = "tiny"
    fault: str = "none"
    device: str = "auto"
    dtype: str | None = None
    seed: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    context: int | None = None
    kv_blocks: int | None = None
    step_tokens: int = 2048
    policies: PolicyOptions = field(default_factory=PolicyOptions)
    profiler: str = "none"
    profile_dir: Path | None = None
    profile_steps: int = 1000
    grace_s: float = 20.0


def serve_workload(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, and end gracefully. ``say`` gets what happens, in words.

    Raises UsageError for what cannot be asked or where an extra is missing, InfprofError where the memory is too small or
    the engine fails.
    """
    preset = _check(options)
    _check_installed()
    if options.profile_dir is not None:
        _make_folder(options.profile_dir)
    # Taken before the model is built, and before PyTorch is loaded: who finds the port in use wants to know now.
    with listening(options.host, options.port) as listener:
        device = choose_device(options.device, options.fault)
        if options.profiler == "cuda" and device != "cuda":
            raise UsageError("--profiler cuda needs a GPU: use --profiler torch here.")
        from infprof.workload.engine import Engine

        settings, repeat_prompt = engine_settings(options, preset.shape, device)
        say(f"building {options.preset} ({preset.shape.parameters / 1e6:,.1f} M parameters) on {device}")
        engine = Engine(preset.shape, settings)
        say("warming up")
        engine.warm_up()
        asyncio.run(_until_signal(WorkloadServer(options, engine, repeat_prompt, say), listener))


async def _until_signal(server: WorkloadServer, listener: socket.socket) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    await server.run(listener)


def _check(options: ServeOptions) -> Preset:
    preset = check_model(options.preset, options.fault, options.dtype, options.device)
    policies = options.policies
    if policies.scheduling not in POLICIES:
        raise UsageError(f"--scheduling-policy {policies.scheduling}: choose {' or '.join(POLICIES)}.")
    if policies.memory_short not in MEMORY_POLICIES:
        raise UsageError(f"--when-memory-short {policies.memory_short}: choose {', '.join(MEMORY_POLICIES)}.")
    if policies.overcommit is not None and not 1 <= policies.overcommit < float("inf"):
        raise UsageError(f"--kv-overcommit {policies.overcommit:g}: choose a number of 1 or more, or --no-admission.")
    if policies.rate_limit_per_s is not None and not 0 < policies.rate_limit_per_s < float("inf"):
        raise UsageError(f"--rate-limit {policies.rate_limit_per_s:g}: choose a number above 0.")
    if policies.rate_burst is not None and policies.rate_limit_per_s is None:
        raise UsageError("--rate-burst goes with --rate-limit.")
    if options.profiler not in ("none", "torch", "cuda"):
        raise UsageError(f"--profiler {options.profiler}: choose none, torch or cuda.")
    if (options.profiler == "torch") != (options.profile_dir is not None):
        raise UsageError("--profiler torch and --profile-dir DIR go together: the folder gets the traces.")
    if options.fault == "kv-pressure" and options.kv_blocks is not None:
        raise UsageError("--fault kv-pressure sets the KV cache's size: leave --num-gpu-blocks-override away.")
    context = options.context or 0
    if context > preset.shape.context:
        raise UsageError(f"--max-model-len {context}: preset {options.preset} has a context of {preset.shape.context}.")
    if options.step_tokens < policies.max_batch:
        raise UsageError(
            f"--max-num-batched-tokens {options.step_tokens} must leave each of --max-num-seqs {policies.max_batch} a token."
        )
    return preset


def _check_installed() -> None:
    try:
        import starlette
        import uvicorn  # noqa: F401
    except ImportError:
        raise UsageError("The server needs Starlette and uvicorn: pip install 'infprof[serve]'.") from None
    del starlette


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--profile-dir {folder} cannot be made: {error.strerror}.") from None


def engine_settings(options: ServeOptions, shape: ModelShape, device: str) -> tuple[EngineSettings, int]:
    """The engine's settings with the fault in them, and how often each prompt is put before the model.

    A fault that changes the requests of ``workload run`` changes here what clients send: longer prompts are the client's
    own, repeated. Faults that depend on requests take those that ``workload run`` has by default.
    """
    policies = options.policies
    settings = EngineSettings(
        device=device,
        dtype=options.dtype,
        seed=options.seed,
        kv_blocks=None if options.kv_blocks is None else options.kv_blocks + 1,
        max_batch=policies.max_batch,
        step_tokens=options.step_tokens,
        context=options.context or min(_USUAL_CONTEXT, shape.context),
    )
    usual = RequestsSettings(count=policies.max_batch)
    settings, changed = find_fault(options.fault).apply(settings, usual)
    repeat_prompt = changed.prompt_tokens // usual.prompt_tokens
    return replace(settings, context=min(settings.context, shape.context)), repeat_prompt


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket, which does not listen yet. Raises UsageError where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host {host} is no address of this machine: {error.strerror}.") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise UsageError(f"{host} port {port} cannot be used: {error.strerror}. Choose another --port.") from None
        yield listener


def build_service(
    options: ServeOptions,
    engine: Engine,
    repeat_prompt: int,
    deliver: Callable[[Events], None],
    on_death: Callable[[BaseException], None],
    say: Callable[[str], None],
) -> Service:
    """The engine's thread with its policies, metrics and limits; nothing is started yet."""
    from infprof.workload.server.app import Service
    from infprof.workload.server.metrics import ServerMetrics
    from infprof.workload.server.profiling import Profiling
    from infprof.workload.server.protocol import ServedModel
    from infprof.workload.server.rate_limit import TokenBuckets

    asked, settings = options.policies, engine.settings
    blocks = engine.stats().kv_blocks
    # Else nothing would ever be thrown out, and the fault would be none.
    overcommit = None if options.fault == "kv-pressure" else asked.overcommit
    policies = Policies(
        admission=KvAdmission(blocks, settings.block_size, overcommit),
        window=BatchWindow(int(asked.batch_wait_s * _NS), settings.max_batch),
        aging=Aging(asked.scheduling, int(asked.aging_s * _NS) or None),
        memory_short=asked.memory_short,
        most_waiting=asked.max_queue,
        queue_timeout_ns=int(asked.queue_timeout_s * _NS) or None,
    )
    model = ServedModel(
        name=f"infprof-{options.preset}",
        vocabulary=engine.shape.vocabulary,
        context=min(settings.context, blocks * settings.block_size),
        repeat_prompt=repeat_prompt,
    )
    clock = time.perf_counter_ns
    facts = {
        "block_size": settings.block_size,
        "kv_cache_size_tokens": blocks * settings.block_size,
        "cache_dtype": engine.dtype,
        "enable_prefix_caching": False,
        # vLLM says it in its log alone.
        "max_running_requests": settings.max_batch,
    }
    metrics = ServerMetrics(model.name, facts, lambda: thread.snapshot())
    profiling = None
    if options.profiler != "none":
        profiling = Profiling(options.profile_dir, settings.device, options.profile_steps, say)
    thread = EngineThread(
        engine,
        policies,
        metrics,
        deliver,
        clock,
        after_step=profiling.after_step if profiling is not None else lambda: None,
        at_end=profiling.close if profiling is not None else lambda: None,
        on_death=on_death,
    )
    rate = asked.rate_limit_per_s
    buckets = None if rate is None else TokenBuckets(rate, asked.rate_burst or max(1, round(rate)))
    return Service(model, thread, metrics, clock, buckets, profiling)


class WorkloadServer:
    """The server over an engine that is warm: ``run`` it in an event loop, ``stop`` it in the same."""

    def __init__(self, options: ServeOptions, engine: Engine, repeat_prompt: int, say: Callable[[str], None]) -> None:
        from infprof.workload.server.app import build_app

        self._options, self._engine, self._say = options, engine, say
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: BaseException | None = None
        self.service = build_service(options, engine, repeat_prompt, self._deliver, self._died, say)
        self._web = _web_server(build_app(self.service), options.grace_s)

    async def run(self, listener: socket.socket) -> None:
        """Serve on a bound socket until ``stop`` is called, and end gracefully. Raises InfprofError where the engine
        failed."""
        self._loop = asyncio.get_running_loop()
        listener.listen(_BACKLOG)
        self.service.engine.start()
        self._say_ready(listener)
        try:
            await self._web.serve(sockets=[listener])
        finally:
            self.service.engine.drain(0)
            await asyncio.to_thread(self.service.engine.join)
        if self._death is not None:
            why = first_line(self._death)
            raise InfprofError(f"The engine failed, and the server ended: {why}.", EXIT_COLLECTOR) from self._death
        self._say("ended")

    def stop(self) -> None:
        """Take no more requests and let the others end within the time of grace; called again, end them at once."""
        again = self._web.should_exit
        self._web.should_exit = True
        self.service.engine.drain(0 if again else self._options.grace_s)
        if not again and self._death is None:
            self._say(f"shutting down: answers have {self._options.grace_s:g} s to end")

    def _deliver(self, events: Events) -> None:
        if events:
            self._in_loop(by_inbox, events)

    def _died(self, error: BaseException) -> None:
        self._death = error
        self._in_loop(self.stop)

    def _in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        # A loop that has ended has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _say_ready(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        stats, settings = self._engine.stats(), self._engine.settings
        self._say(
            f"{stats.kv_blocks} blocks of {settings.block_size} tokens in the KV cache, max_num_seqs={settings.max_batch}, "
            f"context {self.service.model.context}"
        )
        place = f"[{host}]" if ":" in host else host
        self._say(f"serving {self.service.model.name}, fault {self._options.fault}, on http://{place}:{port}")


def _web_server(app: Any, grace_s: float) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn's own handlers would end the process by the signal; ours let it end with 0."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    # Answers end by the engine's own limit; this one is for connections that do not close.
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(grace_s) + _LAST_BYTES_S,
        timeout_keep_alive=30,
    )
    return Server(config)
