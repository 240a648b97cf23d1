"""The profiler of one process and the thread that owns it."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time

if False:  # for type checkers alone: Python 3.8 has another notion of these
    from collections.abc import Callable
    from typing import Any

_POLL_S = 0.05
# The profiler keeps its events in memory: a part ends after the time, or when the process has grown by the bytes.
_PART_S = 30.0
_GROWTH_BYTES = 2 << 30
_FORKS_PER_PART = 5
_HEARTBEAT_S = 60.0
_WAIT_S = 120.0
# While a CUDA graph is captured the profiler stays as it is, but for a capture that never seems to end.
_HOLD_S = 60.0
_HELD_POLL_S = 0.005
_DEVICES = ("kfd", "dxg", "nvmap")


class Recorder:
    """The profiler of one process; ``folder`` is the control folder, the traces go to its parent."""

    def __init__(self, folder: str, forbidden: str | None = None) -> None:
        self.folder = folder
        self.pid = os.getpid()
        self.name = _free_name(folder, self.pid)
        self.thread: threading.Thread | None = None
        self.owner = 0
        self.state = "waiting"
        self.reason = forbidden
        self.forbidden = forbidden is not None
        self.used = False
        self.finishing = self.pausing = self.theirs = self.changing = False
        self._wake = threading.Event()
        self._settings: dict[str, float] = {}
        self._profile: Any = None
        self._pending: list[tuple[Any, float]] = []
        self._parts = self._forks = self._size = 0
        self._kept_s = self._began = 0.0
        # When the part ends, and when the next may begin.
        self._boundary = self._not_before = 0.0
        self._said: object = None
        # The graphs that threads of the program capture at this moment.
        self.captures: set[int] = set()
        self._held_since: float | None = None
        self._remarks: list[str] = []

    # --- asked by other threads ---------------------------------------------------------------------------------------

    def begin_watching(self) -> None:
        """Start the thread that owns the profiler."""
        self.pausing = False
        self._wake.clear()
        thread = threading.Thread(target=self._run, name="infprof", daemon=True)
        self.thread = thread
        thread.start()

    def finish(self) -> None:
        """Stop the profiler and have its trace written; for the end of the process."""
        self.finishing = True
        self._wait(lambda: self.state in ("done", "failed"))

    def pause(self) -> None:
        """Stop the profiler and end the thread, so that neither is there in the middle of a fork."""
        thread = self.thread
        if thread is None or not thread.is_alive() or self.owner == ident():
            return
        native = getattr(thread, "native_id", None)
        self._forks += self._profile is not None
        self.pausing = True
        self._wake.set()
        thread.join(_WAIT_S)
        # The thread of Python is gone before that of the system, and Python warns of forks with several of these.
        self._wait(lambda: not os.path.exists(f"/proc/self/task/{native}"), 0.1)

    def give_way(self) -> None:
        """The program starts a profiler of its own: ours ends before, because there can be only one."""
        self.theirs = self.used = True
        self._wait(lambda: self._profile is None and not self.changing)

    def hold(self, graph: int) -> None:
        """A graph is about to be captured: the profiler stays as it is until ``captures`` does without it."""
        self.captures.add(graph)
        if self.owner != ident():
            self._wait(lambda: not self.changing)

    def _wait(self, condition: Callable[[], bool], limit_s: float = _WAIT_S) -> None:
        end = time.monotonic() + limit_s
        while not condition() and time.monotonic() < end:
            if self.thread is None or not self.thread.is_alive():
                return
            time.sleep(0.002)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.owner = ident()
        try:
            while self._look():
                # An event, so that a fork does not wait. What may run in a signal handler only sets attributes: the lock
                # of an event may be held by the very code that the signal has interrupted.
                self._wake.wait(_POLL_S if self._held_since is None else _HELD_POLL_S)
        except BaseException as error:
            self._fail(error)

    def _look(self) -> bool:
        """One look around; False when the thread has nothing more to do."""
        if self.pausing:
            return not self._end_part()
        self._write()
        if self.finishing or self._closed():
            if not self._end_part():
                return True
            self._write()
            self._say("done", self.reason)
            return False
        if self.theirs:
            if self._end_part():
                self._say("waiting", "the program used the profiler of PyTorch itself")
        elif self._profile is None:
            self._begin_part()
        elif time.time() >= self._boundary:
            # The next one begins when this one is written: where writing takes longer than recording, memory would grow.
            self._end_part()
        elif self._has_grown() and self._end_part():
            self._remark("its memory grew too fast while it was recorded, so that a part ended early")
            self._not_before = self._boundary
        return True

    def _closed(self) -> bool:
        try:
            age = time.time() - os.stat(os.path.join(self.folder, "start")).st_mtime
            if age > _HEARTBEAT_S:
                self.reason = "infprof had ended"
                return True
        except OSError:
            if not os.path.isdir(self.folder):
                return True
        return os.path.exists(os.path.join(self.folder, "stop"))

    def _open(self) -> bool:
        if not self._settings:
            try:
                with open(os.path.join(self.folder, "start")) as file:
                    self._settings = json.load(file)
            except OSError:
                return False
        return True

    def _has_grown(self) -> bool:
        return _resident_bytes() - self._size > self._settings.get("growth_bytes", _GROWTH_BYTES)

    def _next_boundary(self) -> None:
        """Parts end at the same moments in all processes, so that the traces of several ranks can be compared."""
        part_s = self._settings.get("part_s", _PART_S)
        since = self._settings["start_unix_s"]
        boundary = since + (int(max(time.time() - since, 0.0) / part_s) + 1) * part_s
        if boundary > self._boundary:
            self._boundary, self._forks = boundary, 0

    def _begin_part(self) -> None:
        if self.forbidden or not self._open():
            self._say("waiting", self.reason)
            return
        if time.time() < self._not_before:
            return
        if self._forks >= _FORKS_PER_PART and time.time() < self._boundary:
            # A program that forks all the time would do little else than start and stop a profiler.
            self._not_before = self._boundary
            return
        torch = sys.modules["torch"]
        if not _may_profile(torch):
            self._say("waiting", "it has not used a GPU")
            return
        try:
            if self._may_change() and not self.theirs:
                self._next_boundary()
                self.used = True
                profile = self._make_profile(torch)
                self._size = _resident_bytes()
                _start_quietly(profile, torch)
                self._began = time.monotonic()
                self._profile = profile
                self.reason = None
                self._say("recording", None)
        finally:
            self.changing = False

    def _end_part(self) -> bool:
        """Stop the profiler where it runs; False where that has to wait until a graph has been captured."""
        profile = self._profile
        if profile is None:
            return True
        try:
            if not self._may_change():
                return False
            lasted = time.monotonic() - self._began
            _spare_objects(profile)
            profile.stop()
            self._profile = None
            self._pending.append((profile, lasted))
            return True
        finally:
            self.changing = False

    def _may_change(self) -> bool:
        """Whether the profiler may start or stop at this moment; sets ``changing`` then, before it looks."""
        self.changing = True
        if not self.captures:
            self._held_since = None
            return True
        now = time.monotonic()
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since > _HOLD_S:
            return True
        self.changing = False
        return False

    def _make_profile(self, torch: Any) -> Any:
        profiler = importlib.import_module("torch.profiler")
        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(profiler.ProfilerActivity.CUDA)
            _keep_cupti()
        more: dict[str, Any] = {}
        try:
            more["experimental_config"] = profiler._ExperimentalConfig(profile_all_threads=True)
        except Exception:
            self._remark("PyTorch before 2.4 cannot record the operators of all threads, only what the GPU did")
        return profiler.profile(activities=activities, record_shapes=True, **more)

    def _remark(self, remark: str) -> None:
        if remark not in self._remarks:
            self._remarks.append(remark)

    def _write(self) -> None:
        """Write what has ended; of several parts the last long one is kept, so that the disk is bounded as well."""
        while self._pending:
            profile, lasted = self._pending.pop(0)
            folder = os.path.dirname(self.folder)
            self._parts += 1
            # Under a name of its own until it is whole: what a crash leaves can be told from what it replaces.
            new = os.path.join(folder, f".{self.name}.{self._parts}.json")
            profile.export_chrome_trace(new)
            enough = 0.5 * self._settings.get("part_s", _PART_S)
            if lasted >= min(enough, self._kept_s):
                os.replace(new, os.path.join(folder, self.name + ".trace.json"))
                self._kept_s = lasted
            else:
                os.unlink(new)

    def _fail(self, error: BaseException) -> None:
        try:
            self._profile = None
            self._say("failed", f"{type(error).__name__}: {error}")
        except BaseException:
            self.state = "failed"

    def _say(self, state: str, reason: str | None) -> None:
        """Tell infprof what became of this process, where that has changed."""
        self.reason = reason
        now = (state, reason, self._parts, len(self._remarks), ident())
        if now != self._said and os.path.isdir(self.folder):
            torch = sys.modules.get("torch")
            row = {"pid": self.pid, "name": self.name, "state": state, "reason": reason, "parts": self._parts}
            row["command"] = _command()
            row["python"] = ".".join(map(str, sys.version_info[:3]))
            row["torch"] = str(getattr(torch, "__version__", ""))
            row["kept_s"] = round(self._kept_s, 3)
            row["remarks"] = self._remarks
            # That thread is gone when the process has become another program.
            row["thread"] = getattr(self.thread, "native_id", None)
            path = os.path.join(self.folder, self.name + ".json")
            with open(path + ".new", "w") as file:
                json.dump(row, file)
            os.replace(path + ".new", path)
            self._said = now
        # Last: whoever waits for it may end the process then.
        self.state = state


def ident() -> int:
    """The number by which Python knows the calling thread."""
    return threading.get_ident()


def _free_name(folder: str, pid: int) -> str:
    number, name = 1, f"process-{pid}"
    while os.path.exists(os.path.join(folder, name + ".json")):
        number += 1
        name = f"process-{pid}-{number}"
    return name


def _command() -> list[str]:
    try:
        with open("/proc/self/cmdline", "rb") as file:
            # What gives itself another title leaves the room of its command line behind it.
            return [word.decode("utf-8", "replace") for word in file.read().rstrip(b"\0").split(b"\0")]
    except OSError:
        return list(sys.argv)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _may_profile(torch: Any) -> bool:
    version = getattr(torch, "version", None)
    built_for_gpu = getattr(version, "cuda", None) or getattr(version, "hip", None)
    return bool(not (built_for_gpu and _gpu_is_there()) or torch.cuda.is_initialized())


def _gpu_is_there() -> bool:
    """Whether a device of a GPU can be seen; what controls the driver (nvidiactl) may be there without any."""
    try:
        names = os.listdir("/dev")
    except OSError:
        return True
    return any(name in _DEVICES or (name.startswith("nvidia") and name[6:].isdigit()) for name in names)


def _keep_cupti() -> None:
    """As PyTorch does by itself where it knows of CUDA graphs; Kineto reads it when a profile ends."""
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")


def _spare_objects(profile: Any) -> None:
    """Some versions make a Python object of each event when a profile ends: minutes, and gigabytes, for nothing here."""
    inner: Any = getattr(profile, "profiler", None)
    if hasattr(inner, "_parse_kineto_results"):
        inner._parse_kineto_results = lambda *_, **__: []


def _start_quietly(profile: Any, torch: Any) -> None:
    """Start a profile, and leave the program as it is but for that.

    The first start of a process reads how much Kineto says on the program's standard error.
    """
    profiler: Any = sys.modules[type(profile).__module__]
    level = "KINETO_LOG_LEVEL"
    quiet = level not in os.environ
    if quiet:
        os.environ[level] = "99"
    before = getattr(profiler, "torch", torch)
    profiler.torch = _WithoutCompiler(torch)
    try:
        profile.start()
    finally:
        profiler.torch = before
        if quiet:
            os.environ.pop(level, None)


class _WithoutCompiler:
    """PyTorch as its profiler sees it while it starts: it would import the whole compiler to ask for one setting.

    That takes a second, and the compiler's work at the end of the process can change how an interrupted Python ends.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        if name == "_inductor" and "torch._inductor" not in sys.modules:
            raise AttributeError(name)
        return getattr(self._torch, name)
