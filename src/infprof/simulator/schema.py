"""The tables of an nsys SQLite export that the simulator can write, for three versions of nsys.

Column names, types, order and NOT NULL are those of real exports: 2022.4.2 (schema 3.0.0), 2023.4.4 (schema 3.7.2) and
2026.2.1 (schema 3.25.0), except that CUPTI_ACTIVITY_KIND_GRAPH_TRACE has not been seen in a real file. Tables that are
younger than a version are written all the same when they have rows, because a simulated trace may need them:
CUPTI_ACTIVITY_KIND_GRAPH_TRACE and DIAGNOSTIC_EVENT, and in 2022.4 also the GPU metrics.
"""

from __future__ import annotations

import sqlite3
from functools import cache
from importlib import resources
from typing import NamedTuple

VERSIONS = ("2022.4", "2023.4", "2026")

PRODUCT = {
    "2022.4": ("2022.4.2.1", "2022.4", "3.0.0", "4042420554 115894"),
    "2023.4": ("2023.4.4.54", "2023.4", "3.7.2", "2307844469 139029"),
    "2026": ("2026.2.1.210", "2026.2", "3.25.0", "306658267 182758"),
}
"""Per version: product version, product date, schema version, schema checksum."""

EXPORT_TABLE = {"2022.4": "EXPORT_META_DATA", "2023.4": "META_DATA_EXPORT", "2026": "META_DATA_EXPORT"}


class Column(NamedTuple):
    name: str
    type: str
    not_null: bool


_TYPES = {"T": "TEXT", "R": "REAL"}
_GPU_LIMITS = (
    "constantMemory maxIPC maxRegistersPerBlock maxShmemPerBlock maxShmemPerBlockOptin maxShmemPerSm maxRegistersPerSm "
    "threadsPerWarp asyncEngines maxWarpsPerSm maxBlocksPerSm maxThreadsPerBlock maxBlockDimX maxBlockDimY "
    "maxBlockDimZ maxGridDimX maxGridDimY maxGridDimZ computeMajor computeMinor smMajor smMinor"
)

# "name" is a nullable INTEGER, "name!" NOT NULL, ":T" TEXT, ":R" REAL. Order is the file's order.
_TABLES_2023 = {
    "StringIds": "id! value!:T",
    "PROCESSES": "globalPid pid name:T",
    "ThreadNames": "nameId! priority globalTid",
    "ANALYSIS_DETAILS": "globalVid! duration! startTime! stopTime!",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime:T localTime:T",
    "TARGET_INFO_SYSTEM_ENV": "globalVid devStateName!:T name!:T nameEnum! value!:T",
    "TARGET_INFO_GPU": (
        "vmId! id! name:T busLocation:T isDiscrete l2CacheSize totalMemory memoryBandwidth clockRate smCount pwGpuId "
        "uuid:T luid chipName:T cuDevice ctxswDevPath:T ctrlDevPath:T revision nodeMask " + _GPU_LIMITS
    ),
    "TARGET_INFO_CUDA_CONTEXT_INFO": (
        "nullStreamId! hwId! vmId! processId! deviceId! contextId! parentContextId isGreenContext"
    ),
    "TARGET_INFO_CUDA_STREAM": "streamId! hwId! vmId! processId! contextId! priority! flag!",
    "TARGET_INFO_GPU_METRICS": "typeId! sourceId! typeName!:T metricId! metricName!:T",
    "META_DATA_EXPORT": "name!:T value:T",
    "META_DATA_CAPTURE": "name!:T value:T",
    "ProcessStreams": "globalPid! filenameId! contentId!",
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid demangledName! shortName! "
        "mangledName launchType cacheConfig registersPerThread! gridX! gridY! gridZ! blockX! blockY! blockZ! "
        "staticSharedMemory! dynamicSharedMemory! localMemoryPerThread! localMemoryTotal! gridId! sharedMemoryExecuted "
        "graphNodeId sharedMemoryLimitConfig"
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid bytes! copyKind! "
        "deprecatedSrcId srcKind dstKind srcDeviceId srcContextId dstDeviceId dstContextId migrationCause graphNodeId "
        "virtualAddress"
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        "start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid value! bytes! "
        "graphNodeId memKind"
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start! end! eventClass! globalTid correlationId nameId! returnValue! callchainId",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (
        "start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid syncType! eventId!"
    ),
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "deviceId! contextId! greenContextId streamId! correlationId globalPid eventId!",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (
        "start end deviceId contextId greenContextId streamId correlationId globalPid graphId graphExecId"
    ),
    "CUDA_GRAPH_EVENTS": "start! end! eventClass! globalTid nameId! graphNodeId! originalGraphNodeId",
    "CUDA_GPU_MEMORY_USAGE_EVENTS": (
        "start! globalPid! deviceId! contextId! address! pc! bytes! memKind! memoryOperationType! name:T correlationId "
        "localMemoryPoolAddress localMemoryPoolReleaseThreshold localMemoryPoolSize localMemoryPoolUtilizedSize "
        "importedMemoryPoolAddress importedMemoryPoolProcessId"
    ),
    "CUDA_UM_CPU_PAGE_FAULT_EVENTS": (
        "start! globalPid! address! originalFaultPc CpuInstruction! module! unresolvedFaultPc"
    ),
    "CUDA_UM_GPU_PAGE_FAULT_EVENTS": "start! end! globalPid! deviceId! address! numberOfPageFaults! faultAccessType!",
    "NVTX_EVENTS": (
        "start! end eventType! rangeId category color text:T globalTid endGlobalTid textId domainId uint64Value "
        "int64Value doubleValue:R uint32Value int32Value floatValue:R jsonTextId jsonText:T"
    ),
    "OSRT_API": "start! end! eventClass! globalTid nameId! returnValue! nestingLevel callchainId!",
    "SCHED_EVENTS": "start! cpu! isSchedIn! globalTid",
    "COMPOSITE_EVENTS": "id! start! cpu threadState globalTid cpuCycles!",
    "SAMPLING_CALLCHAINS": (
        "id! symbol! module! kernelMode thumbCode unresolved specialEntry originalIP unwindMethod stackDepth!"
    ),
    "PROFILER_OVERHEAD": "start! end! globalTid nameId! returnValue!",
    "DIAGNOSTIC_EVENT": "timestamp! timestampType! source! severity! text!:T globalPid",
    "GPU_METRICS": "timestamp typeId! metricId! value!",
    "GENERIC_EVENT_SOURCES": "sourceId! data!:T",
    "GENERIC_EVENT_TYPES": "typeId! sourceId! data!:T",
    "GENERIC_EVENTS": "rawTimestamp! timestamp typeId! data!:T",
}

_TABLES_2026 = {
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime:T localTime:T systemClockNs",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId! pid! uuid:T numMultiprocessors",
    "TARGET_INFO_CUDA_CONTEXT_INFO": _TABLES_2023["TARGET_INFO_CUDA_CONTEXT_INFO"] + " numMultiprocessors",
    "CUPTI_ACTIVITY_KIND_KERNEL": _TABLES_2023["CUPTI_ACTIVITY_KIND_KERNEL"]
    + (
        " qmdBulkReleaseDone qmdPreexitDone qmdLastCtaDone graphId clusterX clusterY clusterZ clusterSchedulingPolicy "
        "maxPotentialClusterSize maxActiveClusters sharedMemoryRequestedPercentage tensorSizeMinusOneElements!:T"
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": _TABLES_2023["CUPTI_ACTIVITY_KIND_MEMCPY"] + " copyCount",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (
        "start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid deprecatedSyncType "
        "syncType! eventId! eventSyncId"
    ),
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": (
        "timestamp deviceId! contextId! greenContextId streamId! correlationId globalPid eventId! eventSyncId"
    ),
    "CUPTI_ACTIVITY_KIND_OVERHEAD": "start! end! eventClass! globalTid correlationId nameId overheadType!",
    "PROFILER_OVERHEAD": "start! end! globalTid nameId! overheadType!",
    "OSRT_API": _TABLES_2023["OSRT_API"] + " argumentsId!",
    "SCHED_EVENTS": _TABLES_2023["SCHED_EVENTS"] + " threadState threadBlock",
    "NVTX_EVENTS": _TABLES_2023["NVTX_EVENTS"] + " binaryData:T",
    "NVTX_PAYLOAD_SCHEMAS": "domainId schemaId name:T type flags numEntries payloadSize alignTo",
    "NVTX_PAYLOAD_SCHEMA_ENTRIES": (
        "domainId! schemaId! idx! flags type name:T description:T arrayOrUnionDetail offset"
    ),
}

# What schema 3.0.0 does not have; its null streams stand in a table of their own.
_NOT_IN_2022 = ("META_DATA_EXPORT", "META_DATA_CAPTURE", "TARGET_INFO_CUDA_CONTEXT_INFO")
_TABLES_2022 = {
    "EXPORT_META_DATA": "name!:T value:T",
    "TARGET_INFO_CUDA_NULL_STREAM": "streamId! hwId! vmId! processId! deviceId! contextId!",
    "TARGET_INFO_SYSTEM_ENV": "globalVid! devStateName!:T name!:T nameEnum! value!:T",
}

# A table with rows brings the labels that its columns refer to.
_ENUMS_OF = {
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "ENUM_CUDA_KERNEL_LAUNCH_TYPE",
        "ENUM_CUDA_FUNC_CACHE_CONFIG",
        "ENUM_CUDA_SHARED_MEM_LIMIT_CONFIG",
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("ENUM_CUDA_MEMCPY_OPER", "ENUM_CUDA_MEM_KIND", "ENUM_CUDA_UNIF_MEM_MIGRATION"),
    "CUPTI_ACTIVITY_KIND_MEMSET": ("ENUM_CUDA_MEM_KIND",),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("ENUM_NSYS_EVENT_CLASS",),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": ("ENUM_CUPTI_SYNC_TYPE",),
    "CUPTI_ACTIVITY_KIND_OVERHEAD": ("ENUM_CUPTI_OVERHEAD_TYPE",),
    "CUDA_GPU_MEMORY_USAGE_EVENTS": ("ENUM_CUDA_DEV_MEM_EVENT_OPER", "ENUM_CUDA_MEM_KIND"),
    "CUDA_UM_GPU_PAGE_FAULT_EVENTS": ("ENUM_CUDA_UNIF_MEM_ACCESS_TYPE",),
    "TARGET_INFO_CUDA_STREAM": ("ENUM_CUPTI_STREAM_TYPE",),
    "NVTX_EVENTS": ("ENUM_NSYS_EVENT_TYPE",),
    "COMPOSITE_EVENTS": ("ENUM_SAMPLING_THREAD_STATE",),
    "SAMPLING_CALLCHAINS": ("ENUM_STACK_UNWIND_METHOD",),
    "DIAGNOSTIC_EVENT": (
        "ENUM_DIAGNOSTIC_SEVERITY_LEVEL",
        "ENUM_DIAGNOSTIC_SOURCE_TYPE",
        "ENUM_DIAGNOSTIC_TIMESTAMP_SOURCE",
    ),
}


def _columns(text: str) -> tuple[Column, ...]:
    def column(word: str) -> Column:
        name, _, letter = word.partition(":")
        return Column(name.rstrip("!"), _TYPES.get(letter, "INTEGER"), name.endswith("!"))

    return tuple(column(word) for word in text.split())


@cache
def tables(version: str) -> dict[str, tuple[Column, ...]]:
    """Table name → columns in file order, for one of ``VERSIONS``."""
    texts = dict(_TABLES_2023)
    if version == "2026":
        texts |= _TABLES_2026
    elif version == "2022.4":
        texts = {
            name: text.replace(" greenContextId", "") for name, text in texts.items() if name not in _NOT_IN_2022
        } | _TABLES_2022
    return {name: _columns(text) for name, text in texts.items()}


@cache
def enum_rows() -> dict[str, list[tuple[int, str, str]]]:
    """Enum table → its rows (id, name, label)."""
    rows: dict[str, list[tuple[int, str, str]]] = {}
    text = resources.files(__package__).joinpath("enums.tsv").read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line.startswith("#"):
            table, number, name, label = line.split("\t")
            rows.setdefault(table, []).append((int(number), name, label))
    return rows


def create_table(db: sqlite3.Connection, name: str, columns: tuple[Column, ...]) -> None:
    """CREATE TABLE as nsys does it; ids of StringIds and of enum tables are primary keys, nothing else is indexed."""
    keyed = name == "StringIds" or name.startswith("ENUM_")
    lines = [
        f'    "{c.name}" {c.type}' + " NOT NULL" * c.not_null + " PRIMARY KEY" * (keyed and c.name == "id")
        for c in columns
    ]
    db.execute(f"CREATE TABLE {name} (\n" + ",\n".join(lines) + "\n)")


def write_enums(db: sqlite3.Connection, used_tables: list[str], version: str) -> None:
    """The ENUM_* tables that the tables in use refer to, with their rows."""
    wanted = {enum for table in used_tables for enum in _ENUMS_OF.get(table, ())}
    for enum in sorted(wanted):
        # schema 3.0.0 misspells this one
        name = enum.replace("KERNEL", "KRENEL") if version == "2022.4" else enum
        create_table(db, name, _columns("id! name:T label:T"))
        db.executemany(f"INSERT INTO {name} VALUES (?, ?, ?)", enum_rows()[enum])
