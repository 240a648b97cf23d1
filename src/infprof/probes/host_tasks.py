"""The target's processes and threads: who belongs to it, and what each thread costs, read as cheaply as can be.

What a thread did is in three files. ``schedstat`` is short and tells whether the thread ran at all, so it is read at every
beat, through a descriptor that stays open; ``stat`` and ``status`` are read only of threads that ran a good deal, and of
the others now and then. All of them are running totals: reading later loses no time, only the moment.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from infprof.probes import procfs
from infprof.probes.recorder import Recorder

# More are visited in turn, so that the cost stays what it is.
THREADS_PER_BEAT = 512
PROCESSES_PER_BEAT = 64

# stat and status are read again after this much running, so many turns on a CPU, or this time.
_BUSY_RATIO = 0.01
_BUSY_TURNS_PER_S = 50
_AT_LEAST_EVERY_NS = 10_000_000_000

_SECOND_NS = 1_000_000_000


@dataclass
class Steps:
    """Running totals of one scope. A value is written when it moves, after the value before it: every step has both ends.

    A thread that sleeps for an hour thus costs two rows, and its series can still be cut at any moment.
    """

    scope: str
    unmoved_ns: int = 0  # until when all values are known to have stayed as they were read
    _held: dict[str, list[float]] = field(default_factory=dict)  # signal → [value, seen at, written at]

    def see(self, out: Recorder, signal: str, value: float, now_ns: int) -> None:
        """Take a new reading."""
        held = self._held.get(signal)
        if held is None:
            out.sample(signal, value, self.scope, time_ns=now_ns)
            self._held[signal] = [value, now_ns, now_ns]
            return
        if value != held[0]:
            self._write(out, signal, held)
            out.sample(signal, value, self.scope, time_ns=now_ns)
            held[0], held[2] = value, now_ns
        held[1] = now_ns

    def hold(self, signal: str, value: float, now_ns: int) -> None:
        """Take a first reading that is written only once the value moves."""
        self._held[signal] = [value, now_ns, -1]

    def knows(self, signal: str) -> bool:
        """Whether a first reading was taken."""
        return signal in self._held

    def close(self, out: Recorder) -> None:
        """Write where the values stood last, of those that were written before."""
        for signal, held in self._held.items():
            if held[2] >= 0:
                self._write(out, signal, held)

    def _write(self, out: Recorder, signal: str, held: list[float]) -> None:
        seen_ns = max(held[1], self.unmoved_ns)
        if seen_ns > held[2]:
            out.sample(signal, held[0], self.scope, time_ns=int(seen_ns))
            held[2] = seen_ns


@dataclass
class Thread:
    """One thread of the target: its open schedstat (None: open it each time) and what was read last."""

    process: int
    number: int
    folder: str
    steps: Steps
    descriptor: int | None = None
    raw: bytes = b""
    name: str = ""
    run_ns: int = 0
    turns: int = 0
    full_at_ns: int = 0
    full_run_ns: int = 0
    full_turns: int = 0

    def wants_full(self, now_ns: int) -> bool:
        """Whether it did enough since its last full reading to be read in full."""
        since = now_ns - self.full_at_ns
        if since >= _AT_LEAST_EVERY_NS:
            return True
        ran, turns = self.run_ns - self.full_run_ns, self.turns - self.full_turns
        return ran >= _BUSY_RATIO * since or turns * _SECOND_NS >= _BUSY_TURNS_PER_S * since


class ProcessTree:
    """The pids of the target: its root, all descendants, and what was left by them in their sessions and groups.

    /proc is listed at every beat, but only pids that are new in the list are read.
    """

    def __init__(self, proc: Path, pid: int) -> None:
        self._proc = proc
        self._root = pid
        self._names: set[str] = set()
        # Ended ones stay: the kernel gives their number to no other process while a group or session bears it.
        self._ever: set[int] = set()
        self.pids: set[int] = set()

    def update(self) -> set[int]:
        """The pids that belong to the target now. Raises OSError where /proc cannot be listed."""
        names, before = set(os.listdir(self._proc)), self._names
        self._names = names
        self.pids -= _numbers(before - names)
        unknown = {pid: stat for pid in _numbers(names - before) if (stat := self._stat(pid))}
        self._ever -= unknown.keys()
        if not before:
            self._ever.add(self._root)
            self.pids |= self._ever & _numbers(names)
        # A child may have a lower number than its parent, so look until nothing more is found.
        while found := {pid for pid, stat in unknown.items() if pid not in self.pids and self._belongs(stat)}:
            self._ever |= found
            self.pids |= found
        return self.pids

    def _belongs(self, stat: procfs.TaskStat) -> bool:
        return not self._ever.isdisjoint((stat.parent, stat.group, stat.session))

    def _stat(self, pid: int) -> procfs.TaskStat | None:
        data = procfs.read_or_none(f"{self._proc}/{pid}/stat")
        try:
            return None if data is None else procfs.task_stat(data)
        except ValueError:
            return None


def _numbers(names: set[str]) -> set[int]:
    return {int(name) for name in names if name.isdigit()}


class Threads:
    """All threads of the target. ``beat`` reads what is due and records it."""

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._threads: dict[tuple[int, int], Thread] = {}
        self._numbers: dict[int, set[int]] = {}
        self._tick_ns = _SECOND_NS // os.sysconf("SC_CLK_TCK")
        # A quarter of the descriptors that this process may open; the other threads' files are opened each time.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._descriptors = THREADS_PER_BEAT if limit == resource.RLIM_INFINITY else limit // 4
        self._next = 0
        self._has_waits: bool | None = None
        self._said_in_turn = 0

    def beat(self, out: Recorder, new: dict[int, bool], pids: set[int], everything: bool = False) -> None:
        """Find the threads of ``pids`` and read those whose turn it is.

        ``new[pid]`` says that a process came after the start: its threads count from 0. ``everything`` reads all in full.
        """
        now_ns = out.now_ns()
        for pid in pids:
            self._list(out, pid, new.get(pid, False), now_ns)
        for thread in self._in_turn(out, everything):
            try:
                if self._sleeps_on(thread):
                    thread.steps.unmoved_ns = now_ns
                else:
                    self._read(out, thread, everything)
            except PermissionError as error:
                for signal in ("thread_run_ns", "thread_user_ns"):
                    out.missing(signal, procfs.why(error, "a thread of the target"))
                self._forget(out, thread)
            except (OSError, ValueError):  # it ended since it was listed
                self._forget(out, thread)

    def close(self, out: Recorder) -> None:
        """Write the last values and close all files."""
        for thread in list(self._threads.values()):
            self._forget(out, thread)

    def drop(self, out: Recorder, pid: int) -> None:
        """A process is gone, and its threads with it."""
        for number in list(self._numbers.get(pid, ())):
            self._forget(out, self._threads[pid, number])
        self._numbers.pop(pid, None)

    def __len__(self) -> int:
        return len(self._threads)

    def _list(self, out: Recorder, pid: int, from_zero: bool, now_ns: int) -> None:
        try:
            numbers = {int(name) for name in os.listdir(f"{self._proc}/{pid}/task")}
        except OSError:
            return
        known = self._numbers.setdefault(pid, set())
        from_zero = from_zero or bool(known)
        for number in known - numbers:
            self._forget(out, self._threads[pid, number])
        for number in numbers - known:
            self._add(pid, number, from_zero, now_ns)

    def _add(self, pid: int, number: int, from_zero: bool, now_ns: int) -> None:
        folder = f"{self._proc}/{pid}/task/{number}"
        thread = Thread(pid, number, folder, Steps(f"thread/{pid}/{number}"))
        if from_zero:
            # It began within the last beat: what it did until now happened since then.
            for signal in ("thread_run_ns", "thread_wait_ns", *_FULL_SIGNALS):
                thread.steps.hold(signal, 0, now_ns - _SECOND_NS)
        if self._descriptors > 0 and self._has_waits is not False:
            try:
                thread.descriptor = os.open(f"{folder}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
                self._descriptors -= 1
            except OSError:
                thread.descriptor = None
        self._threads[pid, number] = thread
        self._numbers[pid].add(number)

    def _forget(self, out: Recorder, thread: Thread) -> None:
        thread.steps.close(out)
        if thread.descriptor is not None:
            os.close(thread.descriptor)
            self._descriptors += 1
        self._threads.pop((thread.process, thread.number), None)
        self._numbers[thread.process].discard(thread.number)

    def _in_turn(self, out: Recorder, everything: bool) -> Iterator[Thread]:
        threads = list(self._threads.values())
        if everything or len(threads) <= THREADS_PER_BEAT:
            return iter(threads)
        if len(threads) > 2 * self._said_in_turn:
            self._said_in_turn = len(threads)
            out.fact("threads_in_turn", {"threads": len(threads), "per_beat": THREADS_PER_BEAT})
        first, self._next = self._next % len(threads), self._next + THREADS_PER_BEAT
        return iter((threads + threads)[first : first + THREADS_PER_BEAT])

    @staticmethod
    def _sleeps_on(thread: Thread) -> bool:
        """Whether a thread has not run since it was read in full: the common case, so it takes one call of the kernel."""
        if thread.descriptor is None or not thread.turns or thread.turns != thread.full_turns:
            return False
        return os.pread(thread.descriptor, 128, 0) == thread.raw

    def _read(self, out: Recorder, thread: Thread, everything: bool) -> None:
        now_ns = out.now_ns()
        if self._has_waits is not False:
            raw = self._schedstat(out, thread)
            if raw == thread.raw and thread.turns and thread.turns == thread.full_turns:
                thread.steps.unmoved_ns = now_ns
                return
            if raw is not None:
                self._take_run(out, thread, raw, now_ns)
        if everything or thread.full_at_ns == 0 or thread.turns == 0 or thread.wants_full(now_ns):
            self._read_full(out, thread, now_ns)

    def _schedstat(self, out: Recorder, thread: Thread) -> bytes | None:
        try:
            if thread.descriptor is not None:
                return os.pread(thread.descriptor, 128, 0)
            return procfs.read(f"{thread.folder}/schedstat")
        except FileNotFoundError as error:
            if self._has_waits is None and os.path.exists(f"{thread.folder}/stat"):
                self._no_waits(out, procfs.why(error, "schedstat") + " (a kernel without CONFIG_SCHED_INFO)")
                return None
            raise

    def _no_waits(self, out: Recorder, reason: str) -> None:
        self._has_waits = False
        out.missing("thread_run_ns", reason)
        out.missing("thread_wait_ns", reason)

    def _take_run(self, out: Recorder, thread: Thread, raw: bytes, now_ns: int) -> None:
        run_ns, wait_ns, turns = map(int, raw.split())
        first = not thread.raw
        thread.raw, thread.run_ns, thread.turns = raw, run_ns, turns
        if turns:
            self._has_waits = True
        for signal, value in (("thread_run_ns", run_ns), ("thread_wait_ns", wait_ns)):
            _take(out, thread.steps, signal, value, now_ns, first)

    def _read_full(self, out: Recorder, thread: Thread, now_ns: int) -> None:
        stat = procfs.task_stat(procfs.read(f"{thread.folder}/stat"))
        first = thread.full_at_ns == 0
        values = {
            "thread_user_ns": stat.user_ticks * self._tick_ns,
            "thread_system_ns": stat.system_ticks * self._tick_ns,
            **self._switches(out, thread),
        }
        for signal, value in values.items():
            _take(out, thread.steps, signal, value, now_ns, first)
        if not first:
            out.sample("thread_cpu", stat.cpu, thread.steps.scope, time_ns=now_ns)
            if stat.name != thread.name:
                thread.name = stat.name
                out.fact("thread_name", stat.name, thread.steps.scope)
        if self._has_waits is None and stat.user_ticks + stat.system_ticks > 0:
            self._no_waits(out, "schedstat counts nothing here (a kernel with scheduler statistics turned off)")
        thread.full_at_ns, thread.full_run_ns, thread.full_turns = now_ns, thread.run_ns, thread.turns

    def _switches(self, out: Recorder, thread: Thread) -> dict[str, int]:
        status = procfs.read(f"{thread.folder}/status")
        found = {}
        for signal, name in _SWITCHES.items():
            value = procfs.field_after(status, name)
            if value is None:
                out.missing(signal, f"{name.decode()} is not in this machine's /proc/PID/task/TID/status")
            else:
                found[signal] = int(value)
        return found


_SWITCHES = {
    "thread_voluntary_switches": b"voluntary_ctxt_switches",
    "thread_involuntary_switches": b"nonvoluntary_ctxt_switches",
}
_FULL_SIGNALS = ("thread_user_ns", "thread_system_ns", *_SWITCHES)


def _take(out: Recorder, steps: Steps, signal: str, value: float, now_ns: int, first: bool) -> None:
    """A thread's first reading waits until it moves: most threads of a server never run again."""
    if first and not steps.knows(signal):
        steps.hold(signal, value, now_ns)
    else:
        steps.see(out, signal, value, now_ns)
