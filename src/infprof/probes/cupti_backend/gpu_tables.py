"""What the GPU did, and what it did that in, as rows of an nsys export.

The mapping is that of NVIDIA's ``cupti_activity.h`` to the exports of nsys 2023.4, whose numbers differ: nsys counts
memory kinds and operations from 0 and launch types from 1. A column that is missing here is NULL in the file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from infprof.probes.cupti_backend import layout
from infprof.probes.cupti_backend.columns import Columns, Source, ints, memory_kind, or_null, stacked
from infprof.probes.cupti_backend.demangling import demangled
from infprof.simulator.builder import short_name
from infprof.trace import IntArray


class GpuTables:
    """The tables on the GPU of one recording."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def all(self) -> dict[str, Columns | None]:
        """Table name → its columns, None where there is nothing."""
        return {
            "CUPTI_ACTIVITY_KIND_KERNEL": self._kernels(),
            "CUPTI_ACTIVITY_KIND_MEMCPY": self._copies(),
            "CUPTI_ACTIVITY_KIND_MEMSET": self._memsets(),
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": self._syncs(),
            "CUPTI_ACTIVITY_KIND_CUDA_EVENT": self._events(),
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": self._graphs(),
            "CUDA_GPU_MEMORY_USAGE_EVENTS": self._memory(),
            "TARGET_INFO_CUDA_CONTEXT_INFO": self._contexts(),
            "TARGET_INFO_CUDA_STREAM": self._streams(),
        }

    # --- work ---------------------------------------------------------------------------------------------------------

    def _kernels(self) -> Columns | None:
        records = self._source.recording.of(layout.CONCURRENT_KERNEL)
        if records is None:
            return None
        texts, which = self._source.distinct(
            self._source.recording.text_columns[layout.CONCURRENT_KERNEL, "name"], "[unnamed kernel]"
        )
        plain = demangled(texts)
        cache = ints(records["cache_config"])
        return {
            **self._place(records),
            "demangledName": self._source.strings(plain, which),
            "shortName": self._source.strings([short_name(name) for name in plain], which),
            "mangledName": self._source.strings(texts, which),
            "launchType": ints(records["launch_type"]) + 1,
            "cacheConfig": cache & 0xF,
            "registersPerThread": ints(records["registers"]),
            **{
                f"{place}{axis.upper()}": ints(records[f"{place}_{axis}"])
                for place in ("grid", "block")
                for axis in "xyz"
            },
            "staticSharedMemory": ints(records["static_shared"]),
            "dynamicSharedMemory": ints(records["dynamic_shared"]),
            "localMemoryPerThread": ints(records["local_per_thread"]),
            "localMemoryTotal": ints(records["local_total"]),
            "gridId": ints(records["grid"]),
            "sharedMemoryExecuted": ints(records["shared_executed"]),
            "graphNodeId": or_null(records["graph_node"]),
            "sharedMemoryLimitConfig": ints(records["shared_limit"]),
            "graphId": or_null(records["graph"]),
        }

    def _copies(self) -> Columns | None:
        parts = []
        for kind in (layout.MEMCPY, layout.MEMCPY_P2P):
            records = self._source.recording.of(kind)
            if records is None:
                continue
            other_end: Columns = {
                f"{end}{what}Id": ints(records[f"{end}_{what.lower()}"]) if kind == layout.MEMCPY_P2P else None
                for end in ("src", "dst")
                for what in ("Device", "Context")
            }
            parts.append(
                self._place(records)
                | {
                    "bytes": ints(records["bytes"]),
                    "copyKind": ints(records["copy_kind"]),
                    "srcKind": memory_kind(records["src_kind"]),
                    "dstKind": memory_kind(records["dst_kind"]),
                    "graphNodeId": or_null(records["graph_node"]),
                }
                | other_end
            )
        return stacked(parts)

    def _memsets(self) -> Columns | None:
        records = self._source.recording.of(layout.MEMSET)
        if records is None:
            return None
        return {
            **self._place(records),
            "value": ints(records["value"]),
            "bytes": ints(records["bytes"]),
            "graphNodeId": or_null(records["graph_node"]),
            "memKind": memory_kind(records["memory_kind"]),
        }

    def _graphs(self) -> Columns | None:
        records = self._source.recording.of(layout.GRAPH_TRACE)
        return None if records is None else {**self._place(records), "graphId": ints(records["graph"])}

    def _place(self, records: NDArray[Any]) -> Columns:
        """What all work on a GPU has: when and where it ran, and which call it is of."""
        return {
            "start": self._source.times(records["start"]),
            "end": self._source.times(records["end"]),
            "deviceId": ints(records["device"]),
            "contextId": ints(records["context"]),
            "streamId": ints(records["stream"]),
            "correlationId": ints(records["correlation"]),
            "globalPid": self._source.global_pid,
        }

    def _memory(self) -> Columns | None:
        records = self._source.recording.of(layout.MEMORY)
        if records is None:
            return None
        records = records[np.isin(records["operation"], (1, 2))]
        return {
            "start": self._source.times(records["time"]),
            "globalPid": self._source.global_pid,
            "deviceId": ints(records["device"]),
            "contextId": ints(records["context"]),
            "address": ints(records["address"]),
            "pc": ints(records["pc"]),
            "bytes": ints(records["bytes"]),
            "memKind": memory_kind(records["memory_kind"]),
            "memoryOperationType": ints(records["operation"]) - 1,
            "correlationId": ints(records["correlation"]),
        }

    # --- waits and events --------------------------------------------------------------------------------------------

    def _syncs(self) -> Columns | None:
        records = self._source.recording.of(layout.SYNCHRONIZATION)
        if records is None:
            return None
        return {
            "start": self._source.times(records["start"]),
            "end": self._source.times(records["end"]),
            "deviceId": self._device_of(records["context"]),
            "contextId": ints(records["context"]),
            "streamId": ints(records["stream"]),
            "correlationId": ints(records["correlation"]),
            "globalPid": self._source.global_pid,
            "syncType": ints(records["type"]),
            "eventId": ints(records["event"]),
        }

    def _events(self) -> Columns | None:
        records = self._source.recording.of(layout.CUDA_EVENT)
        if records is None:
            return None
        return {
            "deviceId": self._device_of(records["context"]),
            "contextId": ints(records["context"]),
            "streamId": ints(records["stream"]),
            "correlationId": ints(records["correlation"]),
            "globalPid": self._source.global_pid,
            "eventId": ints(records["event"]),
        }

    def _device_of(self, contexts: NDArray[Any]) -> IntArray:
        """The device of each context, by the records that name both."""
        device_of: dict[int, int] = {}
        for records in self._source.recording.records.values():
            if {"context", "device"} <= set(records.dtype.names or ()):
                pairs = np.unique(np.stack((records["context"], records["device"])), axis=1)
                device_of |= dict(zip(*pairs.tolist(), strict=True))
        distinct, which = np.unique(contexts, return_inverse=True)
        return np.array([device_of.get(context, 0) for context in distinct.tolist()], dtype=np.int64)[which]

    # --- what they ran in ---------------------------------------------------------------------------------------------

    def _contexts(self) -> Columns | None:
        records = self._source.recording.of(layout.CONTEXT)
        if records is None:
            return None
        records = records[np.unique(records["context"], return_index=True)[1]]
        return {
            "nullStreamId": ints(records["null_stream"]),
            "hwId": 0,
            "vmId": 1,
            "processId": self._source.pid,
            "deviceId": ints(records["device"]),
            "contextId": ints(records["context"]),
        }

    def _streams(self) -> Columns | None:
        records = self._source.recording.of(layout.STREAM)
        if records is None:
            return None
        ids = np.stack((records["context"], records["stream"]))
        records = records[np.unique(ids, axis=1, return_index=True)[1]]
        return {
            "streamId": ints(records["stream"]),
            "hwId": 0,
            "vmId": 1,
            "processId": self._source.pid,
            "contextId": ints(records["context"]),
            "priority": records["priority"].astype(np.int32).astype(np.int64),
            "flag": ints(records["flag"]),
        }
