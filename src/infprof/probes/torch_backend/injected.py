"""What runs inside the target first: waits for PyTorch to be imported, and does nothing at all where it never is.

A copy of this file lies as ``sitecustomize.py`` in the control folder of a run, which stands first on the target's
PYTHONPATH, so that every Python that inherits the environment runs it at its start; beside it lie ``hooks.py`` and
``recorder.py``, which are loaded with torch. All need nothing but Python 3.8 and the process's own torch, and raise
nothing into the target.

Control is by files, which any number of processes can look at, whether started, spawned or forked, with no connection to
lose and no signal handler to take from the program: ``start`` opens the capture (its content: the settings; its time of
change: that infprof still lives), ``stop`` or the end of the folder closes it. Each process answers in a file of its
own. One thread per process owns the profiler; whoever needs it stopped asks that thread and waits.

What PyTorch 2.13 and 2.14 do, each seen by running it, and what is done about it here:

- a child forked by os.fork hangs at its end while the parent's profiler runs, is aborted there where it ran before, and
  hangs in a profiler of its own: the profiler is stopped before each fork, and such a child is not profiled and leaves
  without the destructors that abort it;
- only the thread that started the profiler is recorded, unless told otherwise: told otherwise;
- a second profiler takes the first one's place, and ending the first crashes then: the program's own goes first.

What the sources of PyTorch and Kineto say of GPUs, not seen by running it:

- a profiler that starts before CUDA is initialised initialises it, and no child forked later can use CUDA: a process
  that may use a GPU is profiled from its first use on;
- starting and stopping synchronise the device, which spoils a CUDA graph that any thread captures then: neither is done
  meanwhile;
- CUPTI that is torn down after a profile and set up for the next crashes with CUDA graphs: it is left in place.
"""

from __future__ import annotations

# ruff: noqa: SIM105 - contextlib would cost every start of a Python some milliseconds.
import importlib
import os
import sys

if False:  # for type checkers alone: typing costs a program's start some milliseconds
    from typing import Any

_PACKAGE = "infprof_inside"


class _Finder:
    """Sees the first import of one of some modules, and leaves it to those who do it."""

    def __init__(self, folder: str, names: list[str]) -> None:
        self._folder = folder
        self._names = frozenset(names)
        # The threads that look for torch at this moment, by way of this finder.
        self._looking: set[int] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._names:
            return None
        from _thread import get_ident
        from importlib.util import find_spec

        thread = get_ident()
        if thread in self._looking:
            return None
        self._looking.add(thread)
        try:
            spec = find_spec(name)
        finally:
            self._looking.discard(thread)
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


def _torch_is_there(folder: str) -> None:
    """The import of torch has ended: from here on there is a thread that waits for the capture."""
    # A package of the files that lie here, under a name that nobody else has.
    package: Any = type(sys)(_PACKAGE)
    package.__path__ = [folder]
    sys.modules[_PACKAGE] = package
    hooks: Any = importlib.import_module(f"{_PACKAGE}.hooks")
    hooks.look_after(folder)


def _enter() -> None:
    folder = os.path.dirname(__file__)
    # The program sees the path and the module it would have without us.
    sys.path[:] = [path for path in sys.path if path != folder]
    if not os.path.isdir(folder) or _is_helper():
        return
    with open(os.path.join(folder, "modules")) as file:
        names = file.read().split()
    if any(name in sys.modules for name in names):
        # A .pth file of its environment imports it before any sitecustomize.
        _torch_is_there(folder)
    else:
        finder: Any = _Finder(folder, names)
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
