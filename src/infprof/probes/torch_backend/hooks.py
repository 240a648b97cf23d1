"""Where a process with torch is looked after: forks, ends, the program's own profilers, graphs being captured."""

from __future__ import annotations

# ruff: noqa: SIM105 - nothing is imported here that the program may not have.
import functools
import importlib
import os
import sys

from .recorder import Recorder, ident

if False:  # for type checkers alone
    from collections.abc import Callable
    from types import FrameType
    from typing import Any


class _Process:
    """The recorder of this process; a forked child gets another."""

    recorder: Recorder


def look_after(folder: str) -> None:
    """Start the recorder of this process, and see to it that it is asked whenever it has to be."""
    _Process.recorder = recorder = Recorder(folder)
    _let_others_profile()
    _let_graphs_be_captured()
    follow(recorder)


def follow(recorder: Recorder) -> None:
    """Make it the recorder of this process, from now to its end, in forks and at signals."""
    import atexit

    _Process.recorder = recorder
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
    atexit.register(_at_end)
    _follow_multiprocessing()
    _flush_on_term()
    recorder.begin_watching()


# --- forks ------------------------------------------------------------------------------------------------------------


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
        _Process.recorder = type(before)(before.folder, why)
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


# --- ends -------------------------------------------------------------------------------------------------------------


def _at_end() -> None:
    try:
        _Process.recorder.finish()
    except Exception:
        pass


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


# --- what the program does with PyTorch itself ------------------------------------------------------------------------


def _let_others_profile() -> None:
    """Ours ends before a profiler of the program's own begins, and may come back after it."""
    profiler = importlib.import_module("torch.autograd.profiler")

    def wrapped(original: Callable[..., Any], before: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder = _Process.recorder
            theirs = recorder.owner != ident()
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


def _let_graphs_be_captured() -> None:
    """While a CUDA graph is captured, in any thread, the profiler neither starts nor stops."""
    graph: Any = getattr(sys.modules["torch"].cuda, "CUDAGraph", None)
    begin, end = getattr(graph, "capture_begin", None), getattr(graph, "capture_end", None)
    if begin is None or end is None:
        return

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _Process.recorder.hold(id(self))
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            _Process.recorder.captures.discard(id(self))
            raise

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            _Process.recorder.captures.discard(id(self))

    graph.capture_begin, graph.capture_end = capture_begin, capture_end
