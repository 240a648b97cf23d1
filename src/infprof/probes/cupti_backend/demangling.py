"""C++ names as people read them, by the demangler of the system's C++ library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any


def demangled(names: Sequence[str]) -> list[str]:
    """The names, in the same order; one that is no mangled name stays as it is, and all do without a C++ library."""
    libraries = _libraries()
    if libraries is None:
        return list(names)
    return [_demangled(name, *libraries) for name in names]


@cache
def _libraries() -> tuple[Any, Any] | None:
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
        free = ctypes.CDLL(None).free
    except (OSError, AttributeError):
        return None
    demangle.restype = ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p]
    return demangle, free


def _demangled(name: str, demangle: Any, free: Any) -> str:
    # Anything else it would take for a type: "i" for int.
    if not name.startswith("_Z"):
        return name
    status = ctypes.c_int()
    address = demangle(name.encode(), None, None, ctypes.byref(status))
    if not address:
        return name
    try:
        return ctypes.string_at(address).decode("utf-8", "replace")
    finally:
        free(address)
