"""NVIDIA's libcupti and libcuda as this process has them, called by ctypes; nothing is initialised by looking."""

from __future__ import annotations

import ctypes
import glob
import os
import sys
import time

if False:  # for type checkers alone: Python 3.8 has another notion of these
    from collections.abc import Iterator
    from typing import Any

_MULTIPLE_SUBSCRIBERS = 39
_NO_PRIVILEGES = 35
# Beside torch, by the packages that bring it; then where a toolkit of CUDA has it.
_IN_PACKAGES = ("nvidia/cu1*/lib", "nvidia/cuda_cupti/lib")
_TOOLKIT = "/usr/local/cuda"
_IN_TOOLKIT = ("extras/CUPTI/lib64", "lib64", "targets/*/lib")
_ATTRIBUTES = {
    "smCount": 16,
    "clockRate": 13,
    "l2CacheSize": 38,
    "busWidth": 37,
    "memoryClock": 36,
    "computeMajor": 75,
    "computeMinor": 76,
    "pciBus": 33,
    "pciDevice": 34,
    "pciDomain": 50,
}


class CuptiError(Exception):
    """What CUPTI refused, as a part of a sentence."""


class Cupti:
    """The library at ``path``; every function raises CuptiError where the result is not 0."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise CuptiError(f"{os.path.basename(path)} cannot be loaded: {error}") from None

    def has(self, function: str) -> bool:
        return hasattr(self._library, function)

    def result(self, function: str, *arguments: Any) -> int:
        """Call it, and return what it returns."""
        if not self.has(function):
            raise CuptiError(f"{os.path.basename(self.path)} has no {function}")
        return int(getattr(self._library, function)(*arguments))

    def call(self, function: str, *arguments: Any) -> None:
        result = self.result(function, *arguments)
        if result:
            raise CuptiError(self._refusal(function, result))

    def _refusal(self, function: str, result: int) -> str:
        if result == _MULTIPLE_SUBSCRIBERS:
            return f"{_holder()} holds CUPTI, and one program can have only one such tool: leave one of the two out"
        text = ctypes.c_char_p()
        name = ""
        if self.has("cuptiGetResultString") and not self.result("cuptiGetResultString", result, ctypes.byref(text)):
            name = f" {(text.value or b'').decode('ascii', 'replace')}"
        hint = ""
        if result == _NO_PRIVILEGES:
            hint = ": the driver lets only administrators profile (NVreg_RestrictProfilingToAdminUsers)"
        return f"{function} of {os.path.basename(self.path)} returned {result}{name}{hint}"

    def version(self) -> int:
        number = ctypes.c_uint32()
        self.call("cuptiGetVersion", ctypes.byref(number))
        return number.value

    def clocks(self) -> dict[str, int]:
        """The same moment on three clocks, ns."""
        stamp = ctypes.c_uint64()
        self.call("cuptiGetTimestamp", ctypes.byref(stamp))
        return {"cupti_ns": stamp.value, "realtime_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}

    def call_names(self, domain: int) -> dict[int, str]:
        """The functions of a domain (1 driver, 2 runtime) by their number there."""
        names, text = {}, ctypes.c_char_p()
        for number in range(1, 1200):
            if not self.result("cuptiGetCallbackName", domain, number, ctypes.byref(text)) and text.value:
                names[number] = text.value.decode("ascii", "replace")
        return names


def _holder() -> str:
    """Who has subscribed to CUPTI already, as far as the environment says it."""
    if "NSYS_PROFILING_SESSION_ID" in os.environ:
        return "nsys, under which this program runs,"
    if os.environ.get("CUDA_INJECTION64_PATH"):
        return f"{os.path.basename(os.environ['CUDA_INJECTION64_PATH'])} (CUDA_INJECTION64_PATH)"
    return "another profiler in this program (PyTorch's, or a debugger)"


def find_cupti() -> str:
    """The libcupti to use: the one that the process has loaded, INFPROF_LIBCUPTI, torch's, or that of a toolkit.

    Raises CuptiError where there is none.
    """
    for path in _candidates():
        return path
    raise CuptiError(
        "there is no libcupti in this program, beside its packages or in CUDA_HOME: install nvidia-cuda-cupti, or name "
        "the file in INFPROF_LIBCUPTI"
    )


def _candidates() -> Iterator[str]:
    yield from _loaded()
    if os.environ.get("INFPROF_LIBCUPTI"):
        yield os.environ["INFPROF_LIBCUPTI"]
    roots = [os.path.join(path or ".", part) for path in sys.path for part in _IN_PACKAGES]
    for home in filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), _TOOLKIT)):
        roots += [os.path.join(home, part) for part in _IN_TOOLKIT]
    for root in roots:
        yield from sorted(glob.glob(os.path.join(root, "libcupti.so.*")), reverse=True)


def _loaded() -> Iterator[str]:
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(None, 5)[-1].rstrip("\n")
            if os.path.basename(path).startswith("libcupti.so") and os.path.exists(path):
                yield path


class Driver:
    """The CUDA driver that this process has loaded."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def in_use(self) -> bool:
        """Whether the program has initialised CUDA."""
        count = ctypes.c_int()
        return not self._library.cuDeviceGetCount(ctypes.byref(count)) and count.value > 0

    def current_context(self) -> int | None:
        """The context of the calling thread."""
        context = ctypes.c_void_p()
        failed = self._library.cuCtxGetCurrent(ctypes.byref(context))
        return None if failed else context.value

    def synchronize(self, context: int) -> None:
        """Wait until all work of a context is done."""
        if not self._library.cuCtxSetCurrent(ctypes.c_void_p(context)):
            self._library.cuCtxSynchronize()

    def devices(self) -> list[dict[str, Any]]:
        """What the driver says of each CUDA device, as numbered in this process; sizes in bytes, clocks in kHz."""
        count = ctypes.c_int()
        self._library.cuDeviceGetCount(ctypes.byref(count))
        return [self._device(number) for number in range(count.value)]

    def _device(self, number: int) -> dict[str, Any]:
        device, value = ctypes.c_int(), ctypes.c_int()
        if self._library.cuDeviceGet(ctypes.byref(device), number):
            return {"cuDevice": number}
        facts: dict[str, Any] = {"cuDevice": number}
        for name, attribute in _ATTRIBUTES.items():
            if not self._library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
                facts[name] = value.value
        text, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
        if not self._library.cuDeviceGetName(text, len(text), device):
            facts["name"] = text.value.decode("utf-8", "replace")
        if not self._library.cuDeviceTotalMem_v2(ctypes.byref(size), device):
            facts["totalMemory"] = size.value
        if not self._library.cuDeviceGetUuid(text, device):
            facts["uuid"] = text.raw[:16].hex()
        return facts


def loaded_driver() -> Driver | None:
    """The CUDA driver, where this process has loaded it; nothing is loaded by asking."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
    except OSError:
        return None
