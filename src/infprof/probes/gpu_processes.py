"""Whose device memory it is: process ids as the driver gives them, against the target's process tree.

The driver knows the process ids of the host only. In a container they name nothing, or another process.
"""

from __future__ import annotations

from collections.abc import Mapping

from infprof.probes import ProbeContext
from infprof.probes.recorder import Recorder

# The inode of the first pid namespace, fixed in the kernel's headers (PROC_PID_INIT_INO).
_HOST_NAMESPACE = "pid:[4026531836]"
NOT_ATTRIBUTABLE = "not attributable (pid namespace): the driver's process ids are not those that are seen here"


class ProcessTree:
    """Tells the target's processes from others. What was once the target's stays it: workers may outlive parents."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._known = {context.pid}
        self._on_host = self._namespace_is_the_hosts()

    def record(
        self, out: Recorder, scope: str, memory: Mapping[int, int | None], alone_since_start: bool = False
    ) -> None:
        """Record the device memory of processes by whose they are.

        ``memory``: process id → bytes (None: not told). ``alone_since_start``: no process held the device when the
        recording began.
        """
        mine = {pid: size for pid, size in memory.items() if self._is_targets(pid)}
        others = {pid: size for pid, size in memory.items() if pid not in mine}
        now = out.now_ns()
        for pid, size in mine.items():
            if size is not None:
                # One time for all, so that they can be added up.
                out.sample("process_memory_bytes", size, scope, {"pid": str(pid)}, now)
        if mine or self._on_host:
            self._record_sum(out, "other_process_memory_bytes", others, scope)
            return
        if others:
            out.missing("process_memory_bytes", NOT_ATTRIBUTABLE, scope)
            self._record_sum(out, "unattributed_process_memory_bytes", others, scope)
            if alone_since_start and len(others) == 1:
                hint = "one process holds the GPU, and none did when recording began: most likely the target (a hint)"
                out.fact("gpu_process_hint", hint, scope)

    def _record_sum(self, out: Recorder, signal: str, memory: Mapping[int, int | None], scope: str) -> None:
        known = [size for size in memory.values() if size is not None]
        if len(known) == len(memory):
            out.sample(signal, sum(known), scope)

    def _namespace_is_the_hosts(self) -> bool:
        try:
            return str(self._context.path("/proc/self/ns/pid").readlink()) == _HOST_NAMESPACE
        except OSError:
            return False

    def _is_targets(self, pid: int) -> bool:
        seen: list[int] = []
        here = pid
        while here > 1 and here not in seen:
            if here in self._known:
                self._known |= {pid}
                return True
            seen.append(here)
            parent, session = self._parent_and_session(here)
            if session == self._context.pid:
                self._known |= {pid}
                return True
            here = parent
        return False

    def _parent_and_session(self, pid: int) -> tuple[int, int]:
        """0 where the process is not there."""
        try:
            text = self._context.path(f"/proc/{pid}/stat").read_text(errors="replace")
            # The name in parentheses may hold anything, parentheses too.
            fields = text[text.rindex(")") + 1 :].split()
            return int(fields[1]), int(fields[3])
        except (OSError, ValueError, IndexError):
            return 0, 0
