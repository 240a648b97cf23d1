"""Where the fields of CUPTI's activity records lie: CUDA 12 and 13, whose newer records begin with the older ones.

Offsets are those of ``cupti_activity.h``, checked against NVIDIA's cupti-python in the tests. How long a record is says
the library that wrote it, never this file: it is longer in newer versions, and what is behind the fields is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

MEMCPY, MEMSET, DRIVER, RUNTIME, CONTEXT, CONCURRENT_KERNEL = 1, 2, 4, 5, 9, 10
MARKER, OVERHEAD, MEMCPY_P2P, STREAM, SYNCHRONIZATION = 12, 17, 22, 37, 38
CUDA_EVENT, INTERNAL_LAUNCH, MEMORY, GRAPH_TRACE = 36, 48, 49, 51
"""Numbers of CUpti_ActivityKind."""

_API = "cbid:u4@4 start:u8@8 end:u8@16 process:u4@24 thread:u4@28 correlation:u4@32 return_value:u4@36"
_RECORDS = {
    MEMCPY: (
        "copy_kind:u1@4 src_kind:u1@5 dst_kind:u1@6 bytes:u8@8 start:u8@16 end:u8@24 device:u4@32 context:u4@36 "
        "stream:u4@40 correlation:u4@44 graph_node:u8@64 graph:u4@72",
        88,
    ),
    MEMCPY_P2P: (
        "copy_kind:u1@4 src_kind:u1@5 dst_kind:u1@6 bytes:u8@8 start:u8@16 end:u8@24 device:u4@32 context:u4@36 "
        "stream:u4@40 src_device:u4@44 src_context:u4@48 dst_device:u4@52 dst_context:u4@56 correlation:u4@60 "
        "graph_node:u8@72 graph:u4@80",
        88,
    ),
    MEMSET: (
        "value:u4@4 bytes:u8@8 start:u8@16 end:u8@24 device:u4@32 context:u4@36 stream:u4@40 correlation:u4@44 "
        "memory_kind:u2@50 graph_node:u8@64 graph:u4@72",
        80,
    ),
    DRIVER: (_API, 40),
    RUNTIME: (_API, 40),
    INTERNAL_LAUNCH: (_API, 40),
    CONTEXT: ("context:u4@4 device:u4@8 null_stream:u2@14", 16),
    CONCURRENT_KERNEL: (
        "cache_config:u1@4 registers:u2@6 start:u8@16 end:u8@24 device:u4@40 context:u4@44 stream:u4@48 "
        "grid_x:i4@52 grid_y:i4@56 grid_z:i4@60 block_x:i4@64 block_y:i4@68 block_z:i4@72 static_shared:i4@76 "
        "dynamic_shared:i4@80 local_per_thread:u4@84 correlation:u4@92 grid:i8@96 name:u8@104 launch_type:u1@136 "
        "shared_executed:u4@140 graph_node:u8@144 shared_limit:u4@152 graph:u4@156 local_total:u8@192",
        200,
    ),
    MARKER: (
        "flags:u4@4 time:u8@8 id:u4@16 object_kind:u4@20 process:u4@24 thread:u4@28 name:u8@40 domain:u8@48",
        56,
    ),
    OVERHEAD: ("overhead_kind:u4@4 object_kind:u4@8 process:u4@12 thread:u4@16 start:u8@24 end:u8@32", 40),
    CUDA_EVENT: ("correlation:u4@4 context:u4@8 stream:u4@12 event:u4@16", 24),
    STREAM: ("context:u4@4 stream:u4@8 priority:u4@12 flag:u4@16", 20),
    SYNCHRONIZATION: (
        "type:u4@4 start:u8@8 end:u8@16 correlation:u4@24 context:u4@28 stream:u4@32 event:u4@36",
        40,
    ),
    MEMORY: (
        "operation:u4@4 memory_kind:u4@8 correlation:u4@12 address:u8@16 bytes:u8@24 time:u8@32 pc:u8@40 "
        "process:u4@48 device:u4@52 context:u4@56",
        64,
    ),
    GRAPH_TRACE: ("correlation:u4@4 start:u8@8 end:u8@16 device:u4@24 graph:u4@28 context:u4@32 stream:u4@36", 40),
}
POINTERS: Mapping[int, tuple[int, ...]] = {CONCURRENT_KERNEL: (104,), MARKER: (40, 48)}
"""Kind → where in its records addresses of texts stand, which only the process that was recorded can read."""

KINDS = tuple(sorted(_RECORDS))


def record_dtype(kind: int, stride: int) -> np.dtype[Any]:
    """The fields of one kind of record, as a NumPy type ``stride`` bytes long; integers, times in ns.

    Raises ValueError for a kind that is not known here, and for records that are too short to hold the fields.
    """
    if kind not in _RECORDS:
        raise ValueError(f"activity kind {kind} is not known")
    text, least = _RECORDS[kind]
    if stride < least:
        raise ValueError(f"records of activity kind {kind} have {stride} bytes and {least} are needed: CUDA before 12?")
    names, formats, offsets = ["kind"], ["<u4"], [0]
    for word in text.split():
        name, rest = word.split(":")
        kind_of, offset = rest.split("@")
        names.append(name)
        formats.append(f"<{kind_of}")
        offsets.append(int(offset))
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": stride})
