"""What runs inside the target: waits for PyTorch to be imported, and profiles the process while the capture is open.

A copy of this file lies as ``sitecustomize.py`` in the control folder of a run, which stands first on the target's
PYTHONPATH, so that every Python that inherits the environment runs it at its start. It needs nothing but Python 3.8 and
the process's own torch, raises nothing into the target, and does nothing at all in a process that never imports torch.

Control is by files, which any number of processes can look at, whether started, spawned or forked, with no connection to
lose and no signal handler to take from the program: ``start`` opens the capture (its content: the settings; its time of
change: that infprof still lives), ``stop`` or the end of the folder closes it. Each process answers in a file of its
own. One thread per process owns the profiler; whoever needs it stopped asks that thread and waits.

What PyTorch 2.13 does, each seen by running it, and what is done about it here:

- a child forked by os.fork hangs at its end while the parent's profiler runs, is aborted there where it ran before, and
  hangs in a profiler of its own: the profiler is stopped before each fork, and such a child is not profiled and leaves
  without the destructors that abort it;
- only the thread that started the profiler is recorded, unless told otherwise: told otherwise;
- a second profiler takes the first one's place, and ending the first crashes then: the program's own goes first;
- a profiler that starts before CUDA is initialised initialises it, and no child forked later can use CUDA: a process
  that may use a GPU is profiled from its first use on.
"""

from __future__ import annotations

# ruff: noqa: SIM105 - contextlib would cost every start of a Python some milliseconds.
import importlib
import os
import sys
import time

if False:  # for type checkers alone: typing costs a program's start some milliseconds
    import threading
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

_POLL_S = 0.05
# The profiler keeps its events in memory: a part ends after the time, or when the process has grown by the bytes.
_PART_S = 30.0
_GROWTH_BYTES = 2 << 30
_FORKS_PER_PART = 5
_HEARTBEAT_S = 60.0
_WAIT_S = 120.0


class Recorder:
    """The profiler of one process; ``folder`` is the control folder, the traces go to its parent."""

    def __init__(self, folder: str, forbidden: str | None = None) -> None:
        from threading import Event

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
        self._wake = Event()
        self._settings: dict[str, float] = {}
        self._profile: Any = None
        self._pending: list[tuple[Any, float]] = []
        self._parts = self._forks = self._size = 0
        self._kept_s = self._began = 0.0
        # When the part ends, and when the next may begin.
        self._boundary = self._not_before = 0.0
        self._said: object = None

    # --- asked by other threads ---------------------------------------------------------------------------------------

    def begin_watching(self) -> None:
        """Start the thread that owns the profiler."""
        from threading import Thread

        self.pausing = False
        self._wake.clear()
        thread = Thread(target=self._run, name="infprof", daemon=True)
        self.thread = thread
        thread.start()

    def finish(self) -> None:
        """Stop the profiler and have its trace written; for the end of the process."""
        self.finishing = True
        self._wait(lambda: self.state in ("done", "failed"))

    def pause(self) -> None:
        """Stop the profiler and end the thread, so that neither is there in the middle of a fork."""
        thread = self.thread
        if thread is None or not thread.is_alive() or self.owner == _ident():
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

    def _wait(self, condition: Callable[[], bool], limit_s: float = _WAIT_S) -> None:
        end = time.monotonic() + limit_s
        while not condition() and time.monotonic() < end:
            if self.thread is None or not self.thread.is_alive():
                return
            time.sleep(0.002)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.owner = _ident()
        try:
            while self._look():
                # An event, so that a fork does not wait. What may run in a signal handler only sets attributes: the lock
                # of an event may be held by the very code that the signal has interrupted.
                self._wake.wait(_POLL_S)
        except BaseException as error:
            self._fail(error)

    def _look(self) -> bool:
        """One look around; False when the thread has nothing more to do."""
        if self.pausing:
            self._end_part()
            return False
        self._write()
        if self.finishing or self._closed():
            self._end_part()
            self._write()
            self._say("done", self.reason)
            return False
        if self.theirs:
            self._end_part()
            self._say("waiting", "the program used the profiler of PyTorch itself")
        elif self._profile is None:
            self._begin_part()
        elif time.time() >= self._boundary:
            self._end_part()
            self._begin_part()
        elif _resident_bytes() - self._size > _GROWTH_BYTES:
            self._end_part()
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
            import json

            try:
                with open(os.path.join(self.folder, "start")) as file:
                    self._settings = json.load(file)
            except OSError:
                return False
        return True

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
        self.changing = True
        try:
            if not self.theirs:
                self._next_boundary()
                self.used = True
                profile = _make_profile(torch)
                self._size = _resident_bytes()
                _start_quietly(profile)
                self._began = time.monotonic()
                self._profile = profile
                self.reason = None
                self._say("recording", None)
        finally:
            self.changing = False

    def _end_part(self) -> None:
        profile = self._profile
        if profile is not None:
            lasted = time.monotonic() - self._began
            profile.stop()
            self._profile = None
            self._pending.append((profile, lasted))

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
        now = (state, reason, self._parts)
        if now != self._said and os.path.isdir(self.folder):
            import json

            torch = sys.modules.get("torch")
            row = {"pid": self.pid, "name": self.name, "state": state, "reason": reason, "parts": self._parts}
            row["command"] = _command()
            row["python"] = ".".join(map(str, sys.version_info[:3]))
            row["torch"] = str(getattr(torch, "__version__", ""))
            row["kept_s"] = round(self._kept_s, 3)
            path = os.path.join(self.folder, self.name + ".json")
            with open(path + ".new", "w") as file:
                json.dump(row, file)
            os.replace(path + ".new", path)
            self._said = now
        # Last: whoever waits for it may end the process then.
        self.state = state


def _ident() -> int:
    from threading import get_ident

    return get_ident()


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
    device_there = any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
    return bool(not (built_for_gpu and device_there) or torch.cuda.is_initialized())


def _make_profile(torch: Any) -> Any:
    profiler = importlib.import_module("torch.profiler")
    activities = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(profiler.ProfilerActivity.CUDA)
    more: dict[str, Any] = {}
    try:
        more["experimental_config"] = profiler._ExperimentalConfig(profile_all_threads=True)
    except Exception:
        # Before torch 2.4: the GPU's work is there all the same, the operators of other threads are not.
        pass
    return profiler.profile(activities=activities, record_shapes=True, **more)


def _start_quietly(profile: Any) -> None:
    """Start a profile; the first start of a process reads how much Kineto says on the program's standard error."""
    level = "KINETO_LOG_LEVEL"
    quiet = level not in os.environ
    if quiet:
        os.environ[level] = "99"
    try:
        profile.start()
    finally:
        if quiet:
            os.environ.pop(level, None)


# --- how it gets in ---------------------------------------------------------------------------------------------------


class _Process:
    """The recorder of this process; a forked child gets another."""

    recorder: Recorder


def _torch_is_there(folder: str) -> None:
    """The import of torch has ended: from here on there is a thread that waits for the capture."""
    import atexit

    _Process.recorder = Recorder(folder)
    _let_others_profile()
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
    atexit.register(_at_end)
    _follow_multiprocessing()
    _flush_on_term()
    _Process.recorder.begin_watching()


def _at_end() -> None:
    try:
        _Process.recorder.finish()
    except Exception:
        pass


def _before_fork() -> None:
    try:
        _Process.recorder.pause()
    except Exception:
        pass


def _after_fork() -> None:
    try:
        if _Process.recorder.state not in ("done", "failed"):
            _Process.recorder.begin_watching()
    except Exception:
        pass


def _in_child() -> None:
    try:
        before = _Process.recorder
        used = before.used or before.forbidden
        why = "it was forked from a process that had been profiled" if used else None
        _Process.recorder = Recorder(before.folder, why)
        if used:
            _leave_without_destructors()
        if os.path.isdir(before.folder):
            _Process.recorder.begin_watching()
    except Exception:
        pass


def _leave_without_destructors() -> None:
    """Kineto, once used, has a thread that a forked child lacks, and its destructor ends the child with SIGABRT.

    What was registered last with on_exit (glibc) runs first: after Python's own end, and before those destructors.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.on_exit(libc.fcloseall, None)


def _follow_multiprocessing() -> None:
    """Children of multiprocessing end by os._exit, without atexit, but call these finalizers."""
    _register_finalizer()
    # What was registered before such a child begins is dropped at its beginning.
    util: Any = importlib.import_module("multiprocessing.util")
    util.register_after_fork(_register_finalizer, lambda registered: registered())


def _register_finalizer() -> None:
    util: Any = importlib.import_module("multiprocessing.util")
    util.Finalize(None, _at_end, exitpriority=100)


def _flush_on_term() -> None:
    """SIGTERM ends a Python at once: where the program has no handler, the trace is written before."""
    import signal
    import threading

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_term)


def _on_term(number: int, frame: FrameType | None) -> None:
    import signal

    _at_end()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _let_others_profile() -> None:
    profiler = importlib.import_module("torch.autograd.profiler")

    def wrapped(original: Callable[..., Any], before: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder = _Process.recorder
            theirs = recorder.owner != _ident()
            if theirs and before:
                recorder.give_way()
            try:
                return original(*args, **kwargs)
            finally:
                if theirs and not before:
                    recorder.theirs = False

        return call

    for name, before in (("_prepare_profiler", True), ("_enable_profiler", True), ("_disable_profiler", False)):
        if hasattr(profiler, name):
            setattr(profiler, name, wrapped(getattr(profiler, name), before))


class _TorchFinder:
    """Sees the import of torch, and leaves it to those who do it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._looking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch" or self._looking:
            return None
        from importlib.util import find_spec

        self._looking = True
        try:
            spec = find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        original = loader.exec_module

        def exec_module(module: Any) -> None:
            original(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                try:
                    _torch_is_there(self._folder)
                except Exception:
                    pass

        try:
            loader.exec_module = exec_module
        except AttributeError:
            pass


def _enter() -> None:
    folder = os.path.dirname(__file__)
    # The program sees the path and the module it would have without us.
    sys.path[:] = [path for path in sys.path if path != folder]
    if os.path.isdir(folder) and not _is_helper():
        finder: Any = _TorchFinder(folder)
        sys.meta_path.insert(0, finder)


def _is_helper() -> bool:
    """Whether this is the process in which multiprocessing only keeps account of its resources."""
    return any("multiprocessing.resource_tracker" in word for word in getattr(sys, "orig_argv", ()))


def _enter_own_sitecustomize() -> None:
    """Run the sitecustomize that this one stands before, as Python would have."""
    ours = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = ours


if __name__ == "sitecustomize":
    try:
        _enter()
    except Exception:
        pass
    _enter_own_sitecustomize()
