"""What records the CUDA work of one process: CUPTI's activity records, from the moment at which the process uses CUDA."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import time

from . import buffers, library

if False:  # for type checkers alone: beside this file lies the recorder of the torch backend
    from typing import Any

    from infprof.probes.torch_backend.recorder import Recorder
else:
    Recorder = importlib.import_module(f"{__package__}.recorder").Recorder  # type: ignore[misc]

_FLUSH_S = 0.5
_SYSTEM_THREAD_IDS = 1
_FORCED = 1
_DRIVER, _RUNTIME = 1, 2
# Enabled in this order: overheads, contexts and streams (those that are there as well), launches that no call shows,
# kernels, copies (between GPUs apart), memsets, waits, events, allocations, ranges.
_KINDS = (17, 9, 37, 48, 10, 1, 22, 2, 38, 36, 49, 12)
_WITH_PAST = (9, 37)
_KERNELS, _GRAPHS = 10, 51
_API_KINDS = {_RUNTIME: 5, _DRIVER: 4}
_ONE_BY_ONE = {_RUNTIME: "cuptiActivityEnableRuntimeApi", _DRIVER: "cuptiActivityEnableDriverApi"}
# The calls that explain what the GPU did, or did not: all others cost more than they say.
_TELLING = re.compile(
    r"cu(?:da)?(?:Launch|Graph(?:Launch|Upload|Instantiate|Exec)|Memcpy|Memset|MemPrefetch|Malloc|Free|Mem(?:Alloc|Free|"
    r"Pool|Create|Map|Unmap|Release|SetAccess|Host|Address)|Host|Event(?:Record|Synchronize)|Module|Library|Link|"
    r"Stream(?:Synchronize|Wait|BeginCapture|EndCapture|WriteValue)|(?:Ctx|Device)Synchronize|Profiler|CtxCreate|"
    r"DevicePrimaryCtx|DeviceReset)"
)
# A function of C that takes what it is given and does nothing.
_HARMLESS = "getpid"


class Collector(Recorder):
    """The recorder of one process, with CUPTI instead of PyTorch's profiler."""

    def __init__(self, folder: str, forbidden: str | None = None) -> None:
        super().__init__(folder, forbidden)
        self._cupti: library.Cupti | None = None
        self._driver: library.Driver | None = None
        self._subscriber = ctypes.c_void_p()
        self._enabled: list[int] = []
        self._threads: dict[int, str] = {}
        self._context: int | None = None
        self._next_flush = 0.0

    def finish(self) -> None:
        """Stop recording and have everything written; for the end of the process, in a thread that used CUDA."""
        driver = self._driver
        if driver is not None and self._cupti is not None:
            self._context = driver.current_context()
        super().finish()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        if self.pausing:
            # Buffers fill on while the process forks; there is a thread again right after it.
            return False
        if self.finishing or self._closed():
            self._end()
            self._say("done", self.reason)
            return False
        if self._cupti is not None:
            self._collect()
        elif self._may_begin():
            self._begin()
        return True

    def _may_begin(self) -> bool:
        if self.forbidden or not self._open():
            self._say("waiting", self.reason)
            return False
        self._driver = self._driver or library.loaded_driver()
        if self._driver is None or not self._driver.in_use():
            self._say("waiting", "it has not used CUDA")
            return False
        return True

    def _begin(self) -> None:
        cupti = library.Cupti(library.find_cupti())
        self.used = True
        cupti.call("cuptiSubscribe", ctypes.byref(self._subscriber), _NO_CALLBACK, None)
        try:
            self._record(cupti)
        except BaseException:
            self._let_go(cupti)
            raise
        self._cupti = cupti
        self._began = time.monotonic()
        self._parts = 1
        self._say("recording", None)

    def _record(self, cupti: library.Cupti) -> None:
        self._file = buffers.ChunkFile(self._path())
        pointers = {int(kind): tuple(offsets) for kind, offsets in self._setting("pointers").items()}
        self._buffers = buffers.Buffers(cupti, self._file, pointers)
        if cupti.result("cuptiSetThreadIdType", _SYSTEM_THREAD_IDS):
            self._remark("CUPTI does not tell the numbers of threads as the system knows them")
        cupti.call("cuptiActivityRegisterCallbacks", *self._buffers.callbacks)
        names = {domain: cupti.call_names(domain) for domain in _API_KINDS}
        self._file.say(
            pid=self.pid,
            command=os.path.basename(_command_name()),
            cupti_version=cupti.version(),
            start=cupti.clocks(),
            driver_calls=names[_DRIVER],
            runtime_calls=names[_RUNTIME],
            devices=self._driver.devices() if self._driver is not None else [],
            graphs=self._setting("graph_trace"),
        )
        try:
            self._enable(cupti, names)
        except library.CuptiError:
            os.unlink(self._path())
            raise

    def _path(self) -> str:
        return os.path.join(os.path.dirname(self.folder), self.name + ".cupti")

    def _setting(self, name: str) -> Any:
        settings: dict[str, Any] = dict(self._settings)
        return settings[name]

    def _enable(self, cupti: library.Cupti, names: dict[int, dict[int, str]]) -> None:
        missing = []
        for kind in (*_KINDS, *((_GRAPHS,) if self._setting("graph_trace") == "graph" else ())):
            function = "cuptiActivityEnableAndDump" if kind in _WITH_PAST else "cuptiActivityEnable"
            if not cupti.has(function):
                function = "cuptiActivityEnable"
            if kind == _KERNELS:
                cupti.call(function, kind)
            elif cupti.result(function, kind):
                missing.append(kind)
                continue
            self._enabled.append(kind)
        for domain, kind in _API_KINDS.items():
            if not self._enable_calls(cupti, domain, names[domain]):
                if cupti.result("cuptiActivityEnable", kind):
                    missing.append(kind)
                else:
                    self._enabled.append(kind)
        if missing:
            self._remark(f"CUPTI does not record activity kinds {', '.join(map(str, sorted(missing)))} here")

    def _enable_calls(self, cupti: library.Cupti, domain: int, names: dict[int, str]) -> bool:
        """Have only the telling calls of a domain recorded; False where this CUPTI records all or none."""
        function = _ONE_BY_ONE[domain]
        telling = [number for number, name in names.items() if _TELLING.match(name)]
        if not telling or not cupti.has(function) or cupti.result(function, telling[0], 1):
            return False
        for number in telling[1:]:
            cupti.result(function, number, 1)
        return True

    def _collect(self) -> None:
        now = time.monotonic()
        if now >= self._next_flush and self._cupti is not None:
            self._next_flush = now + _FLUSH_S
            self._cupti.result("cuptiActivityFlushAll", 0)
            self._name_threads()
        self._buffers.drain()
        self._kept_s = now - self._began

    def _name_threads(self) -> None:
        new = {}
        for word in os.listdir("/proc/self/task"):
            if int(word) not in self._threads:
                try:
                    with open(f"/proc/self/task/{word}/comm") as file:
                        new[int(word)] = file.read().rstrip("\n")
                except OSError:
                    continue
        if new:
            self._threads.update(new)
            self._file.say(threads=new)

    def _end(self) -> None:
        cupti = self._cupti
        if cupti is None:
            return
        if self._context is not None and self._driver is not None:
            self._driver.synchronize(self._context)
        self._disable(cupti)
        cupti.result("cuptiActivityFlushAll", 0)
        cupti.result("cuptiActivityFlushAll", _FORCED)
        self._collect()
        dropped = ctypes.c_size_t()
        cupti.result("cuptiActivityGetNumDroppedRecords", None, 0, ctypes.byref(dropped))
        self._let_go(cupti)
        self._file.say(
            end=cupti.clocks(),
            dropped=dropped.value,
            refused_buffers=self._buffers.refused,
            lost_bytes=self._buffers.lost_bytes,
        )
        self._file.close()
        self._cupti = None

    def _disable(self, cupti: library.Cupti) -> None:
        # What was enabled call by call ends with its kind.
        for kind in (*reversed(self._enabled), *_API_KINDS.values()):
            cupti.result("cuptiActivityDisable", kind)
        self._enabled = []

    def _let_go(self, cupti: library.Cupti) -> None:
        """Leave CUPTI as if we had never been there: it outlives the interpreter, and may not call any Python then."""
        self._disable(cupti)
        harmless = ctypes.cast(getattr(ctypes.CDLL(None), _HARMLESS), ctypes.c_void_p)
        cupti.result("cuptiActivityRegisterCallbacks", harmless, harmless)
        cupti.result("cuptiUnsubscribe", self._subscriber)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, library.CuptiError):
            try:
                self._say("failed", str(error))
            except OSError:
                self.state = "failed"
        else:
            super()._fail(error)


def _no_callback(*arguments: Any) -> None:
    """CUPTI wants a function to call; without an enabled callback it never does."""


_NO_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)(_no_callback)


def _command_name() -> str:
    with open("/proc/self/comm") as file:
        return file.read().rstrip("\n")
