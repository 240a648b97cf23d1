"""What a host call is: CUDA calls and operating-system calls by name, and the outermost calls of each thread."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infprof.distinct import groups
from infprof.measures import intervals as iv
from infprof.trace import BoolArray, IntArray, Table, is_constant

# What a CUDA call does. COPY calls are launches until their own copy starts and waits afterwards.
LAUNCH, SYNC, COPY, ALLOCATOR, MODULE, OTHER_CUDA = range(6)

# What an operating-system call waits for. TERMINAL is stdio reading, which may be a person at a keyboard; PAUSE is a
# thread that gives up its CPU to look again later.
LOCK, IO, POLL, TERMINAL, PAUSE, OTHER_OS = range(6)

# First match wins. Names come without version suffix; `hip` and `mc` prefixes are other vendors' copies of the API.
_CUDA_KINDS = (
    # cuModuleLoadData loads, hipModuleLaunchKernel launches.
    (
        MODULE,
        r"(Module(?!Launch)|Library|Link|Kernel(GetFunction|GetName))|^(nv|hip)rtc|RegisterFatBinary|^cuFuncLoad|FuncGetModule",
    ),
    (SYNC, r"Synchronize$|Synchronize_ptsz$|Synchronize_ptds$"),
    (COPY, r"Memcpy|MemPrefetch"),
    (LAUNCH, r"Launch(?!Attribute)|Memset|EventRecord|StreamWaitEvent"),
    (
        ALLOCATOR,
        r"Malloc|Free|HostAlloc|HostRegister|HostUnregister"
        r"|^cuMem(Alloc|Create|Release|Map|Unmap|SetAccess|Address|Pool|Host|Export|Import)|MemPool",
    ),
)
_LAUNCHERS = r"Launch(?!Attribute)"
_GRAPH_LAUNCHERS = r"GraphLaunch"
_PINNED_ALLOCATORS = r"HostAlloc|HostMalloc|MallocHost|HostRegister|MemAllocHost"

_OS_KINDS = (
    (PAUSE, r"^(clock_)?nanosleep$|^u?sleep$|^sched_yield$|^pthread_yield$"),
    (TERMINAL, r"^_?(IO_)?(f?getc|getchar|fgets|gets|getline|getdelim|v?f?scanf|readline)(_unlocked)?$"),
    (POLL, r"^(__)?(p?poll|ppoll|epoll_p?wait2?|p?select|accept4?|sigwait(info)?|sigtimedwait|pause)(_chk)?$"),
    (
        LOCK,
        r"futex|^pthread_(mutex|cond|rwlock|spin|barrier|join|timedjoin|once)|^sem_(wait|timedwait|clockwait)|^PyGIL",
    ),
    (
        IO,
        r"^(p?readv?2?|p?writev?2?|f?(read|write)|recv\w*|send\w*|fsync|fdatasync|msync|sync|open\w*|f?open\w*|f?close\w*"
        r"|fflush|f?puts|fputc|putc|f?printf|vf?printf|ioctl|mmap\w*|munmap|mremap|f?l?stat\w*|l?seek\w*|fseek\w*|fcntl"
        r"|io_\w+|copy_file_range|readlink\w*|getdents\w*|opendir|readdir\w*|connect|socket|bind|listen|pipe2?|unlink\w*"
        r"|mkdir\w*|fallocate\w*|posix_fallocate|f?truncate\w*|dup[23]?|shutdown)(_chk|64|_unlocked)*$",
    ),
)


def _match_kinds(names: Sequence[str], kinds: tuple[tuple[int, str], ...], default: int) -> IntArray:
    compiled = [(kind, re.compile(pattern)) for kind, pattern in kinds]
    return np.array([next((kind for kind, p in compiled if p.search(name)), default) for name in names], dtype=np.int64)


def cuda_kinds(names: Sequence[str]) -> IntArray:
    """The kind (LAUNCH … OTHER_CUDA) of each CUDA call name."""
    return _match_kinds(names, _CUDA_KINDS, OTHER_CUDA)


def os_kinds(names: Sequence[str]) -> IntArray:
    """The kind (LOCK … OTHER_OS) of each operating-system call name."""
    return _match_kinds(names, _OS_KINDS, OTHER_OS)


def matching(names: Sequence[str], pattern: str) -> BoolArray:
    compiled = re.compile(pattern)
    return np.array([bool(compiled.search(n)) for n in names], dtype=np.bool_)


def kernel_launchers(names: Sequence[str]) -> BoolArray:
    """Which names launch kernels or graphs (cudaLaunchKernel, cuLaunchKernelEx, cudaGraphLaunch, …)."""
    return matching(names, _LAUNCHERS)


def graph_launchers(names: Sequence[str]) -> BoolArray:
    return matching(names, _GRAPH_LAUNCHERS)


def pinned_allocators(names: Sequence[str]) -> BoolArray:
    return matching(names, _PINNED_ALLOCATORS)


class ThreadCalls:
    """The calls of each thread in order, outermost ones only: runtime calls hold the driver calls they make.

    Rows are indexes into the table; ``outer`` gives for every row the row of the outermost call around it.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self.outer: IntArray = np.arange(len(table), dtype=np.int64)
        self.rows: dict[int, IntArray] = {}
        if not len(table):
            return
        thread = table["thread"]
        if is_constant(thread) and _ascends(table["start"]) and _ascends(table["end"]):
            # The calls of one thread, one after the other: each is an outermost one.
            self.rows[int(thread[0])] = self.outer
            return
        for number, rows in groups(thread):
            start, end = table["start"][rows], table["end"][rows]
            unsorted = start[1:] < start[:-1]
            unsorted |= (start[1:] == start[:-1]) & (end[1:] > end[:-1])
            if unsorted.any():
                order = np.lexsort((-end, start))
                rows, start, end = rows[order], start[order], end[order]
            mask = iv.outermost(start, end)
            tops = rows[mask]
            self.outer[rows] = tops[np.cumsum(mask) - 1]
            self.rows[number] = tops

    def column(self, thread: int, name: str) -> IntArray:
        """A column of the table for the thread's outermost calls."""
        return self.of_rows(thread, self._table[name])

    def of_rows(self, thread: int, column: NDArray[Any]) -> NDArray[Any]:
        """The values of the thread's outermost calls, of a column with one value for each row of the table."""
        rows = self.rows[thread]
        return column if rows is self.outer else column[rows]

    def times(self, thread: int) -> tuple[IntArray, IntArray]:
        """Start and end of the thread's outermost calls. They do not overlap; where clocks say so, the later gives way."""
        starts, ends = self.column(thread, "start"), self.column(thread, "end")
        if (starts[1:] < ends[:-1]).any():
            starts = np.maximum(starts, np.concatenate([starts[:1], np.maximum.accumulate(ends)[:-1]]))
        return starts, ends


def _ascends(values: IntArray) -> bool:
    """Whether each value is larger than the one before."""
    return bool((values[1:] > values[:-1]).all())
