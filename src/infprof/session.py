"""`infprof run`: start the program, drive the probes, capture a window of it, and leave a bundle with a diagnosis."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import psutil

from infprof import bundle as bundles
from infprof import readiness
from infprof.bundle import Bundle, Manifest, redact_command
from infprof.errors import EXIT_COLLECTOR, EXIT_DONE, InfprofError, UsageError
from infprof.probes import PROBES, Probe, ProbeContext, backends, make_probe
from infprof.probes.backends import Backend, BackendName
from infprof.probes.recorder import Clock, TelemetryFile
from infprof.probes.runner import ProbeReport, ProbeRunner
from infprof.progress import Progress
from infprof.target import (
    OutputTee,
    Target,
    adopt_orphans,
    end_processes,
    exit_code_of,
    launch,
    missing_program,
    own_leftovers,
    program_name,
    reap_orphans,
    signal_name,
)

if TYPE_CHECKING:
    from infprof.load import LoadResult, LoadSpec

_TICK_S = 0.2
_FLUSH_S = 1.0
# How long a program may take to end after it was asked to: servers finish requests first.
END_PATIENCE_S = 20.0
# Starting or stopping a profiler may take an engine that long.
_PROFILE_TIMEOUT_S = 60.0
# How long nsys may take to write a report, and after the user has given it up.
_REPORT_LIMIT_S = 300.0
_ABANDONED_LIMIT_S = 5.0
_DEFAULT_WARMUP_S = 5.0
_GPU_PROBES = ("nvml", "amd")
_STEPS = {"start-up": "waiting until the program is ready", "warm-up": "warming up", "capture": "capturing"}
# Under this the telemetry alone may fill the disk during a run.
_LEAST_FREE_BYTES = 64 << 20


@dataclass(frozen=True)
class RunOptions:
    """What `infprof run` was asked for; times in seconds, None = not asked for."""

    command: Sequence[str] = ()
    pid: int | None = None
    output: Path | None = None
    force: bool = False
    backend: BackendName = "auto"
    probes: Sequence[str] | None = None
    warmup_s: float | None = None
    duration_s: float | None = None
    ready_url: str | None = None
    ready_port: int | None = None
    ready_log: str | None = None
    ready_timeout_s: float = 900.0
    url: str | None = None
    metrics_url: str | None = None
    load: str | None = None
    capture: str = "session"
    graph_trace: Literal["node", "graph"] = "node"
    gpu_metrics: bool = True
    sampling: bool = False
    nsys: Path | None = None
    nsys_args: tuple[str, ...] = ()
    keep: bool = False
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def waits(self) -> bool:
        """Whether the capture begins later than the program."""
        asked = (self.warmup_s, self.duration_s, self.ready_url, self.ready_port, self.ready_log, self.load)
        return any(x is not None for x in asked)


@dataclass
class RunResult:
    """Where the bundle is, and what `infprof run` ends with."""

    bundle: Bundle
    exit_code: int


class _Abandoned(BaseException):
    """Raised out of whatever waits, when a second signal says that nothing is worth waiting for."""


class _Interrupts:
    """Ctrl-C and its relatives: the first ends the capture and keeps everything, the second kills."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.on_second: Callable[[], None] = lambda: None

    @property
    def asked(self) -> bool:
        return bool(self.received)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Handle the signals while the block runs, and give them back after it."""
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # What nohup or a shell's background job ignores stays ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, self._handle)
        # A reader of our lines that goes away must not end the run, nor the program.
        before[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Nothing is written here: the signal may have come in the middle of a write to the same stream.
        self.received.append(number)
        if len(self.received) > 1:
            self.on_second()


class Session:
    """One run. ``run`` is the whole of it; the steps are methods in their order."""

    def __init__(self, options: RunOptions, progress: Progress | None = None) -> None:
        self.options = options
        self.progress = progress or Progress()
        self.interrupts = _Interrupts()
        self.manifest = Manifest(redact_command(options.command), time.time_ns())
        self._clock = Clock()
        self._recorder: Backend | None = None
        self._tee: OutputTee | None = None
        self._base_url: str | None = None
        self._load_stop = threading.Event()
        self._load_thread: threading.Thread | None = None
        self._load_result: LoadResult | None = None
        self._load_error: str | None = None
        self._reports: list[Path] = []
        self._report_limit_s = _REPORT_LIMIT_S
        self._trace_lost = False
        self._disk_full = False
        self._ended_by_itself = False
        self._killed = False
        self._last_flush = 0.0
        self._ending = False

    # --- the whole ---------------------------------------------------------------------------------------------------

    def run(self) -> RunResult:
        """Profile the program. Raises UsageError and InfprofError for what can be known before it is started."""
        load = self._check_options()
        probes = self._probes()
        folder = self.options.output or Path(_default_name(self.options))
        self.bundle = Bundle.create(folder, self.manifest, self.options.force)
        try:
            self._check_space()
            self._recorder = self._choose_backend()
            self._file = TelemetryFile(self.bundle.telemetry, self._clock)
        except BaseException:
            # Nothing has run: an empty folder would only be in the way of the next try.
            self.bundle.undo()
            raise
        adopt_orphans()
        self._children_before = [p.pid for p in psutil.Process().children()]
        with self.interrupts.watching():
            try:
                self.target = self._start_target()
                self._runner = self._probe_runner(probes)
            except BaseException:
                self._file.close()
                if self._recorder is not None:
                    self._recorder.close()
                self.bundle.undo()
                raise
            self.bundle.keep()
            try:
                self._observe(load)
            finally:
                # From here on it takes a moment, and must not be left half done.
                self.interrupts.on_second = lambda: None
                try:
                    self._clean_up()
                finally:
                    self._write_manifest()
        self.progress.done()
        return RunResult(self.bundle, self._exit_code())

    def _probe_runner(self, probes: list[Probe]) -> ProbeRunner:
        context = ProbeContext(
            self.target.root_pid,
            self.options.command,
            self.options.environ,
            metrics_url=self.options.metrics_url,
            log_lines=self._tee.lines if self._tee else None,
        )
        return ProbeRunner(probes, self._file, context)

    def _left_out(self) -> list[ProbeReport]:
        """Probes that do not work, for the user: of GPUs only where none does, unless they were asked for by name."""
        reports = self._runner.reports
        if self.options.probes is None and any(r.name in _GPU_PROBES and r.state == "ok" for r in reports):
            reports = [r for r in reports if r.name not in _GPU_PROBES or r.state == "failed"]
        return [r for r in reports if r.state != "ok"]

    def _observe(self, load: LoadSpec | None) -> None:
        self.interrupts.on_second = self._kill_now
        self._runner.start()
        for report in self._left_out():
            self.progress.say(f"probe {report.name} is left out: {report.reason}")
        try:
            self._capture(load)
        finally:
            try:
                self._ending = True
                self._stop_load()
                self._stop_capture()
                self._runner.stop()
                self._end_target()
                self._collect_reports()
            except _Abandoned:
                self._trace_lost = self._recorder is not None
                self.manifest.note("abandoned", "Interrupted a second time: what was not yet written is lost.")
                self._report_limit_s = _ABANDONED_LIMIT_S
                self._runner.stop()
                self._end_target()

    # --- before ------------------------------------------------------------------------------------------------------

    def _check_options(self) -> LoadSpec | None:
        o = self.options
        if bool(o.command) == (o.pid is not None):
            raise UsageError("run: give either a command after --, or --pid.")
        if o.pid is not None and o.ready_log is not None:
            raise UsageError("--ready-log: the output of a process that runs already cannot be read; use --ready-url.")
        if o.ready_log is not None:
            readiness.log_matcher(o.ready_log)
            if o.keep:
                raise UsageError(
                    "--keep and --ready-log: the program writes to a pipe of infprof then, which ends with it. "
                    "Use --ready-url or --ready-port."
                )
        for option, url in (("--ready-url", o.ready_url), ("--url", o.url), ("--metrics-url", o.metrics_url)):
            if url is not None:
                readiness.check_url(option, url)
        if o.url is not None:
            self._base_url = o.url.rstrip("/")
        if o.capture not in ("session", "cuda-profiler-api") and not o.capture.startswith("nvtx:"):
            raise UsageError(f"--capture {o.capture}: choose session, cuda-profiler-api or nvtx:RANGE.")
        backends.check_options(o.backend, o.capture, o.pid, o.nsys is not None or bool(o.nsys_args))
        if o.command and not _program_exists(o.command[0], o.environ):
            raise UsageError(missing_program(o.command[0]))
        if o.load is None:
            return None
        from infprof.load import parse_load

        return parse_load(o.load)

    def _probes(self) -> list[Probe]:
        if self.options.probes is None:
            # An AMD machine has no NVML and the other way round; each says so by itself.
            return [make_probe(name) for name in PROBES]
        return [make_probe(name) for name in dict.fromkeys(self.options.probes)]

    def _check_space(self) -> None:
        free = shutil.disk_usage(self.bundle.folder).free
        if free < _LEAST_FREE_BYTES:
            raise InfprofError(
                f"{self.bundle.folder} has {free >> 20} MB free and a run needs at least {_LEAST_FREE_BYTES >> 20} MB: "
                "make room, or name another place with -o.",
                EXIT_COLLECTOR,
            )

    def _choose_backend(self) -> Backend | None:
        o = self.options
        if o.pid is not None:
            self.manifest.backend = {"name": "none", "why": "a running process can only be observed"}
            return None
        from infprof.probes.nsys_command import CapturePlan

        trigger: Literal["session", "cuda-profiler-api", "nvtx"] = "session"
        if o.capture.startswith("nvtx:"):
            trigger = "nvtx"
        elif o.capture == "cuda-profiler-api":
            trigger = "cuda-profiler-api"
        plan = CapturePlan(
            folder=(self.bundle.folder / bundles.TRACE_DIR).resolve(),
            whole=not o.waits(),
            trigger=trigger,
            nvtx_range=o.capture.partition(":")[2] or None,
            graph_trace=o.graph_trace,
            gpu_metrics=o.gpu_metrics,
            sampling=o.sampling,
            extra_args=o.nsys_args,
        )
        choice = backends.choose(o.backend, plan, o.command, o.environ, o.nsys)
        backend = choice.backend
        self.manifest.backend = {"name": "none" if backend is None else backend.name, "why": choice.why}
        if backend is not None and backend.version:
            self.manifest.backend["version"] = ".".join(map(str, backend.version))
        if choice.is_fallback:
            what = "telemetry alone" if backend is None else "the profiler of PyTorch"
            self.manifest.note("not-with-nsys", f"--backend auto took {what}. {choice.why}")
        for line in (choice.said or "").splitlines():
            self.progress.say(line)
        return backend

    # --- the target --------------------------------------------------------------------------------------------------

    def _start_target(self) -> Target:
        o = self.options
        if o.pid is not None:
            return Target.attach(o.pid)
        pipe = subprocess.PIPE if o.ready_log is not None else None
        recorder = self._recorder

        def start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
            if recorder is not None:
                return recorder.launch(command, environ, stdout=pipe, stderr=pipe)
            return subprocess.Popen(list(command), env=dict(environ), start_new_session=True, stdout=pipe, stderr=pipe)

        process = launch(o.command, o.environ, start)
        if pipe is not None:
            self._tee = OutputTee()
            self._tee.pump(process.stdout, 1)
            self._tee.pump(process.stderr, 2)
        if recorder is None:
            return Target(process.pid, process, lambda: exit_code_of(process))
        pid = recorder.target_pid()
        return Target(process.pid if pid is None else pid, process, recorder.target_exit_code)

    def _kill_now(self) -> None:
        self._load_stop.set()
        # A program that somebody else started is not ours to kill.
        if self.options.pid is None:
            self._killed = True
            self.target.kill_all()
        if self._ending:
            raise _Abandoned

    def _end_target(self) -> None:
        target, o = self.target, self.options
        if self._killed:
            self.progress.say("killing the program.")
            target.wait(5)
            how = "by infprof (SIGKILL)"
        elif self._ended_by_itself or not target.alive():
            # A program that ends in the moment in which the capture ends has ended by itself.
            self._ended_by_itself = True
            how = "by itself"
        elif o.keep or o.pid is not None:
            self.manifest.target = {"ended": "still running", "pid": target.root_pid, "exit_code": None}
            self.progress.say(f"the program goes on (pid {target.root_pid}).")
            return
        else:
            first = self.interrupts.received[0] if self.interrupts.asked else signal.SIGTERM
            self.progress.say("ending the program.")
            took = target.end(first, END_PATIENCE_S)
            how = f"by infprof ({took})"
            if target.alive():
                self.manifest.note("not-ended", "The program could not be ended: it belongs to another user.")
        self._finish_recorder()
        self.manifest.target = {"ended": how, "pid": target.root_pid, "exit_code": target.exit_code()}
        if self._tee is not None:
            self._tee.join(2.0)

    # --- the capture -------------------------------------------------------------------------------------------------

    def _capture(self, load: LoadSpec | None) -> None:
        """Ready, warm-up, window: each a phase, each ended early by the program's end or by Ctrl-C."""
        o = self.options
        if o.waits():
            ready = self._phase("start-up", o.ready_timeout_s, until=self._ready(load is not None))
            if not ready:
                return
            if load is not None and not self._start_load(load):
                return
            warmup = o.warmup_s if o.warmup_s is not None else _DEFAULT_WARMUP_S if load is not None else 0.0
            if warmup and not self._phase("warm-up", warmup):
                return
        self._start_capture()
        ends = self._load_ended if load is not None and o.duration_s is None else None
        self._phase("capture", o.duration_s, until=ends)

    def _ready(self, needs_url: bool) -> Callable[[], bool]:
        """What says that the program is ready; where nothing was asked for, it is at once."""
        o = self.options
        checks: list[Callable[[], bool]] = []
        client = readiness.http_client() if o.ready_url or needs_url else None
        if o.ready_url is not None and client is not None:
            url = o.ready_url
            self._base_url = self._base_url or readiness.origin(url)
            checks.append(lambda: readiness.url_answers(client, url))
        if o.ready_port is not None:
            port = o.ready_port
            checks.append(lambda: readiness.port_listens("127.0.0.1", port))
            self._base_url = self._base_url or f"http://127.0.0.1:{port}"
        if o.ready_log is not None and self._tee is not None:
            pattern, lines = readiness.log_matcher(o.ready_log), self._tee.lines
            checks.append(lambda: readiness.seen_in(pattern, lines))
        if needs_url and client is not None:
            checks.append(lambda: self._find_server(client))
        return lambda: all(check() for check in checks)

    def _find_server(self, client: Any) -> bool:
        if self._base_url is not None:
            return readiness.url_answers(client, f"{self._base_url}/v1/models")
        self._base_url = readiness.find_openai_server(client, self.target.root_pid)
        return self._base_url is not None

    def _phase(self, name: str, limit_s: float | None, until: Callable[[], bool] | None = None) -> bool:
        """Let a phase pass: True when its time is over or ``until`` holds, False when the run must end."""
        began_ns, began = self._clock.now_ns(), time.monotonic()
        phase = {"name": name, "start_unix_ns": began_ns, "end_unix_ns": None, "ended_by": None}
        # Without a limit the capture is the whole program, which says enough by itself.
        if limit_s is not None:
            until_words = "at most " if until is not None else ""
            self.progress.step(f"{_STEPS[name]}, {until_words}{limit_s:g} s.")
        elif until is not None:
            self.progress.step(f"{_STEPS[name]} until the load ends.")
        self.manifest.phases.append(phase)
        with suppress(OSError):
            self.bundle.save()
        ended_by, next_look = None, 0.0
        while ended_by is None:
            spent = time.monotonic() - began
            if self.interrupts.asked:
                ended_by = signal_name(self.interrupts.received[0])
                self.progress.say(
                    f"{ended_by}: ending the capture and keeping what was collected (once more gives up)."
                )
            elif not self.target.alive():
                ended_by, self._ended_by_itself = "the end of the program", not self._killed
            elif self._disk_full:
                ended_by = "a full disk"
            elif limit_s is not None and spent >= limit_s:
                ended_by = "time"
            elif until is not None and time.monotonic() >= next_look:
                if until():
                    ended_by = "condition"
                # Asking a server that loads a model ten times a second would only be in its way.
                next_look = time.monotonic() + (0.5 if name == "start-up" else 0)
            if ended_by is None:
                self._tick(name, spent, limit_s)
        phase |= {"end_unix_ns": self._clock.now_ns(), "ended_by": ended_by}
        return self._phase_went_on(name, ended_by, time.monotonic() - began)

    def _phase_went_on(self, name: str, ended_by: str, spent: float) -> bool:
        if name == "start-up":
            if ended_by == "time":
                self._lose_trace(
                    "never-ready",
                    f"The program was not ready after {spent:.0f} s, so nothing was captured.",
                    "Check --ready-url, --ready-port or --ready-log, or allow more with --ready-timeout.",
                )
                return False
            if ended_by == "condition" and spent >= 1:
                self.progress.say(f"ready after {spent:.0f} s.")
        return ended_by in ("time", "condition")

    def _tick(self, name: str, spent: float, limit_s: float | None) -> None:
        of = "" if limit_s is None or name == "start-up" else f" of {limit_s:.0f}"
        self.progress.status(f"{name}, {spent:.0f}{of} s")
        if time.monotonic() - self._last_flush >= _FLUSH_S:
            self._flush()
            if self._recorder is None or not self._recorder.waits_for_children:
                self._reap()
        time.sleep(_TICK_S)

    def _reap(self) -> None:
        started = self.target.process
        reap_orphans({*self._children_before, *([started.pid] if started is not None else [])})

    def _flush(self) -> None:
        self._last_flush = time.monotonic()
        self._watch_space()
        try:
            self._file.flush()
        except sqlite3.Error as error:
            self._note_full_disk(str(error))

    def _watch_space(self) -> None:
        note = self._recorder.watch_space() if self._recorder is not None else None
        if note is not None:
            self._disk_full = True
            self._note(*note)

    def _note_full_disk(self, why: str) -> None:
        self._disk_full = True
        self._note(
            "disk-full",
            f"The telemetry could not be written to {bundles.TELEMETRY} ({why}): the capture was ended early.",
            "Make room, or name another place with -o.",
        )

    def _note(self, code: str, sentence: str, remedy: str | None = None) -> None:
        """Say it now, and keep it for the diagnosis."""
        self.manifest.note(code, sentence, remedy)
        self.progress.say(sentence)

    def _start_capture(self) -> None:
        o = self.options
        if self._recorder is not None and o.capture == "cuda-profiler-api" and self._base_url is not None:
            self._ask_engine("start_profile")
        if self._recorder is None or not o.waits() or o.capture != "session":
            return
        try:
            self._recorder.start()
        except InfprofError as error:
            self._lose_trace("capture-not-started", str(error))

    def _ask_engine(self, what: str) -> None:
        """Ask the engine to call cudaProfilerStart or -Stop; a program that does so by itself has no such endpoint."""
        import httpx

        try:
            with readiness.http_client(_PROFILE_TIMEOUT_S) as client:
                status = client.post(f"{self._base_url}/{what}").status_code
        except httpx.HTTPError as error:
            status = 0
            self.manifest.note("profile-endpoint", f"POST /{what} got no answer: {type(error).__name__}.")
        if status in (404, 405):
            self.manifest.note(
                "profile-endpoint",
                f"The server has no /{what}: the capture waits for the program's own cudaProfilerStart.",
                'vLLM 0.13 and later: --profiler-config \'{"profiler": "cuda"}\'; SGLang: activities ["CUDA_PROFILER"].',
            )

    def _stop_capture(self) -> None:
        if self._recorder is None or self._ended_by_itself:
            return
        if self.options.capture == "cuda-profiler-api" and self._base_url is not None:
            self._ask_engine("stop_profile")
        self.progress.status(f"waiting until {self._recorder.name} has written what it recorded")
        try:
            self._reports = self._recorder.stop(self._report_limit_s)
        except InfprofError as error:
            self._lose_trace("capture-not-stopped", str(error))

    # --- load --------------------------------------------------------------------------------------------------------

    def _start_load(self, spec: LoadSpec) -> bool:
        from infprof.load import run_load

        base = self._base_url
        if base is None:
            return False

        def play() -> None:
            try:
                self._load_result = run_load(spec, base, self._load_stop)
            except InfprofError as error:
                self._load_error = str(error)

        self._load_thread = threading.Thread(target=play, name="infprof-load", daemon=True)
        self._load_thread.start()
        self.progress.say(f"load on {base}: {self.options.load}")
        return True

    def _load_ended(self) -> bool:
        return self._load_thread is not None and not self._load_thread.is_alive()

    def _stop_load(self) -> None:
        if self._load_thread is None:
            return
        self._load_stop.set()
        self._load_thread.join(10.0)
        if self._load_error is not None:
            self._note("load-failed", self._load_error)
        if self._load_result is not None:
            import json

            from infprof.reports.files import replace_file

            data = json.dumps(self._load_result.to_dict(), indent=2) + "\n"
            try:
                replace_file(self.bundle.folder / bundles.LOAD, data.encode())
                self.manifest.files["load"] = bundles.LOAD
            except OSError as error:
                self._note_full_disk(error.strerror or str(error))

    # --- after -------------------------------------------------------------------------------------------------------

    def _finish_recorder(self) -> None:
        """Wait until the report of an ended program is written; only then nsys knows the program's exit code."""
        if self._recorder is None:
            return
        self.progress.status(f"waiting until {self._recorder.name} has written what it recorded")
        try:
            self._reports = self._recorder.finish(self._report_limit_s)
        except InfprofError as error:
            self._lose_trace("trace-lost", str(error))

    def _collect_reports(self) -> None:
        if self._recorder is not None:
            self._export(self._recorder, self._reports)

    def _lose_trace(self, code: str, sentence: str, remedy: str | None = None) -> None:
        self._trace_lost = True
        self._note(code, sentence, remedy)

    def _export(self, recorder: Backend, reports: list[Path]) -> None:
        traces = []
        for report in reports:
            self.progress.status(f"exporting {report.name}")
            try:
                traces.append(recorder.export(report))
            except InfprofError as error:
                self._lose_trace("export-failed", str(error))
        self.manifest.files["reports"] = [self._inside(p) for p in reports if p.exists()]
        self.manifest.files["traces"] = [self._inside(p) for p in recorder.ranked(traces)]
        self.manifest.backend |= recorder.details()
        if not reports and not self._trace_lost:
            # A program of Python need not be one of PyTorch: a loss is what was asked for, or could be expected.
            guessed = self.options.backend == "auto" and recorder.name == "torch"
            (self._note if guessed else self._lose_trace)(*recorder.why_no_trace())

    def _inside(self, path: Path) -> str:
        folder = self.bundle.folder.resolve()
        return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)

    def _clean_up(self) -> None:
        """Nothing is left running, whatever happened."""
        recorder = self._recorder
        if recorder is not None:
            # Where the program goes on, nsys has to stay with it.
            if not (self._kept() and recorder.waits_for_children):
                recorder.close()
            for note in recorder.notes:
                self.manifest.note(*note)
        if self.options.pid is None and not self._kept():
            rest = {p.pid: p for p in (*self.target.leftovers(), *own_leftovers(self._children_before))}
            count = end_processes(rest.values(), 3.0)
            if count:
                self.manifest.note(
                    "left-running",
                    f"{count} process{'es' if count > 1 else ''} that the program had started outlived it and "
                    f"{'were' if count > 1 else 'was'} ended.",
                    "--keep leaves the program and what it started running.",
                )
        self._reap()
        try:
            self._file.close()
            self.manifest.files["telemetry"] = bundles.TELEMETRY
        except sqlite3.Error as error:
            self._note_full_disk(str(error))

    def _kept(self) -> bool:
        return self.manifest.target.get("ended") == "still running"

    def _write_manifest(self) -> None:
        m = self.manifest
        m.ended_unix_ns = self._clock.now_ns()
        m.clocks = self._clock.offsets()
        m.probes = [asdict(report) for report in self._runner.reports]
        if m.phase("capture") is None and not any(n["code"] == "never-ready" for n in m.notes):
            m.note("no-capture", "The program ended, or was not ready, before the capture began: nothing was captured.")
            self._trace_lost = True
        m.state = "partial" if self._trace_lost or self._disk_full or self.interrupts.asked else "complete"
        code = self._exit_code()
        m.target["exit_code_of"] = (
            "target" if code == m.target.get("exit_code") and self._ended_by_itself else "infprof"
        )
        m.target["infprof_exit_code"] = code
        try:
            self.bundle.save()
        except OSError as error:
            self.progress.say(f"the manifest cannot be written: {error.strerror or error}.")
            self._disk_full = True

    def _exit_code(self) -> int:
        """The target's own code when it ended by itself, 130 after Ctrl-C, 4 where a trace was wanted and lost, else 0."""
        if self.interrupts.asked:
            return 128 + self.interrupts.received[0]
        own = self.manifest.target.get("exit_code") if self._ended_by_itself else None
        if own:
            return int(own)
        return EXIT_COLLECTOR if self._trace_lost or self._disk_full else EXIT_DONE


def _default_name(options: RunOptions) -> str:
    what = f"pid-{options.pid}" if options.pid is not None else program_name(options.command)
    return f"infprof-{what}-{time.strftime('%Y%m%d-%H%M%S')}"


def _program_exists(name: str, environ: Mapping[str, str]) -> bool:
    return shutil.which(name, path=environ.get("PATH", os.defpath)) is not None
