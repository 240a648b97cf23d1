"""Cases that people met, as the tests build them, with the answer that each case's text states.

Only what the text rules in or out is judged. The builders stand with the tests of the cases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

from benchmarks.accuracy.labels import ANY, Case, Label

from infprof.results import VERDICT_CLASSES
from infprof.simulator.builder import TraceBuilder

_TESTS = Path(__file__).resolve().parents[2] / "tests"
HOST = frozenset(
    {
        "host-work-between-steps",
        "host-work-per-launch",
        "sync-per-step",
        "launch-bound",
        "cpu-contention",
        "lock-contention",
        "io-wait",
    }
)
COPIES = frozenset({"pageable-copies", "exposed-copies", "small-copies", "needless-copies"})


@dataclass(frozen=True)
class Known:
    """``builder`` of a test module of cases (``module``) with its arguments; ``must`` findings, and ``never``."""

    id: str
    builder: str
    arguments: tuple[object, ...]
    verdicts: dict[str, frozenset[str]]
    must: tuple[str, ...] = ()
    never: frozenset[str] = frozenset()
    window: str = "auto"
    module: str = "test_cases_diagnosis"


def _any() -> dict[str, frozenset[str]]:
    """Only findings are judged: the case says nothing of the class of the whole."""
    return dict.fromkeys(VERDICT_CLASSES, ANY)


def _one(cls: str, *causes: str) -> dict[str, frozenset[str]]:
    return {cls: frozenset(causes) if causes else ANY}


KNOWN = (
    Known("D-01", "sampler_loop", (100, "sync"), _one("scheduling-bubble", "host-work"), ("host-work-between-steps",), COPIES),
    Known("D-01", "sampler_loop", (30, "copy"), _one("scheduling-bubble", "host-work"), ("host-work-between-steps",), COPIES),
    Known("D-06", "spinning_in_sync", (3,), _one("gpu-busy"), (), HOST),
    Known("D-06", "polling_without_requests", ("poll", 100_000, 5_000), _one("no-demand"), (), HOST),
    Known("D-06", "polling_without_requests", ("epoll_wait", 100_000, 5_000), _one("no-demand"), (), HOST),
    Known("D-11", "collectives", (0.0, (1.0,)), _one("communication-bound")),
    Known("D-11", "collectives", (0.4, (1.0, 5.3)), _one("communication-bound")),
    Known("D-18", "allocation_retries", ("cudaStreamSynchronize_v3020",), _one("gpu-busy"), ("allocator-churn",), frozenset({"sync-per-step"})),
    Known("D-26", "pinned_per_step", (100, True), _one("scheduling-bubble", "allocator"), ("allocator-churn", "exposed-copies")),
    Known("D-26", "pinned_per_step", (40, False), _one("scheduling-bubble", "allocator"), ("allocator-churn", "exposed-copies")),
    Known("D-20", "first_request_compiles", ("cuModuleLoadData",), _one("gpu-busy"), (), HOST | {"module-load-in-window"}),
    Known("D-20", "first_request_compiles", ("cuLibraryLoadData",), _one("scheduling-bubble", "module-load"), ("module-load-in-window",), frozenset(), "full"),
    Known("D-22", "pageable_copies", (False, False), _one("scheduling-bubble", "host-work"), ("host-work-between-steps",), COPIES),
    Known("D-22", "pageable_copies", (False, True), _one("scheduling-bubble", "host-work"), ("host-work-between-steps",), COPIES),
    Known("D-33", "host_resident_kv", (32, "NVIDIA A100-SXM4-80GB"), _one("pcie-limited", "volume"), ("exposed-copies",), COPIES - {"exposed-copies"}),
    Known("D-10", "copies_between_kernels", (100,), {"gpu-busy": ANY, "pcie-limited": ANY}, ("exposed-copies",)),
    Known("D-23", "waits_in_mixed_steps", (2_000_000, "cudaStreamSynchronize_v3020"), {"gpu-busy": ANY, "scheduling-bubble": frozenset({"sync"})}, ("sync-per-step",), frozenset({"small-copies"})),
    Known("D-27", "whole_graphs", ("2023.4",), _one("gpu-busy"), (), frozenset({"many-small-kernels", "few-sm-kernels", "launch-bound"})),
    Known("D-41", "one_block_kernels", (False, 50), _one("gpu-busy"), ("few-sm-kernels",)),
    *(replace(known, module="test_cases_host") for known in (
        Known("D-02", "encrypted_copies", (0,), _one("scheduling-bubble", "sync"), ("blocking-async-copies",), COPIES | {"launch-bound"}),
        Known("D-02", "encrypted_copies", (0, "pinned", 5_000), _any(), (), frozenset({"blocking-async-copies"})),
        Known("D-14", "engine_behind_a_lock", (), _one("scheduling-bubble", "lock"), ("lock-contention",), HOST - {"lock-contention", "sync-per-step"} | {"waiting-for-requests"}),
        Known("D-40", "starved", (), _one("scheduling-bubble", "cpu-contention"), ("cpu-contention",), frozenset({"launch-bound"})),
        Known("D-03", "throttled_pod", (), _one("scheduling-bubble", "cpu-contention"), ("cpu-contention",), frozenset({"launch-bound", "lock-contention"})),
        Known("D-31", "collecting_worker", (3,), _one("communication-bound", "straggler"), ("peer-pauses", "straggler-rank"), frozenset({"exposed-communication"})),
        Known("D-31", "collecting_worker", (3, False, ()), _any(), (), frozenset({"host-pauses", "peer-pauses"})),
        Known("D-35", "penalties", (38_000_000,), _one("scheduling-bubble", "host-work"), ("host-sampling",), frozenset({"pageable-copies", "host-work-between-steps"})),
        Known("D-35", "penalties", (1_100_000,), _one("gpu-busy"), (), frozenset({"host-sampling"})),
        Known("D-39", "eager_decode", (60,), _one("scheduling-bubble", "launch"), ("launch-bound",)),
        Known("D-39", "graph_decode", (300,), _one("gpu-busy"), (), HOST - {"sync-per-step"}),
        Known("D-30", "flushed", (), _one("scheduling-bubble", "launch"), ("profiler-overhead", "launch-bound")),
    )),
    *(replace(known, module="test_cases_load") for known in (
        Known("D-07", "tensor_parallel", (45_000, 2), _one("communication-bound", "volume", "unknown"), ("exposed-communication",), frozenset({"straggler-rank"})),
        Known("D-19", "rested", (3.0,), _one("no-demand"), ("clock-ramp",), frozenset({"module-load-in-window"})),
        Known("D-19", "rested", (1.0, 4), _one("no-demand"), (), frozenset({"clock-ramp"})),
        Known("D-21", "late_compiles", (), _one("gpu-busy"), ("module-load-in-window",), frozenset({"host-pauses", "host-work-between-steps"})),
        Known("D-21", "late_compiles", (300, ()), _any(), (), frozenset({"module-load-in-window", "host-pauses"})),
        Known("D-37", "with_adapters", (True,), _any(), ("launch-bound",)),
        Known("D-37", "with_adapters", (False,), _any(), (), frozenset({"launch-bound"})),
    )),
)  # fmt: skip


def cases() -> Iterator[Case]:
    for number, known in enumerate(KNOWN):
        yield Case(f"case-{known.id}-{number}", "cases", partial(_make, known), known.window)


def _make(known: Known, folder: Path) -> tuple[list[Path], Label]:
    builder = _builder(known)(*known.arguments)
    must = frozenset(known.must)
    label = Label(known.verdicts, tuple(frozenset({rule}) for rule in known.must), judged=must | known.never)
    return [builder.write(folder / "trace.sqlite")], label


def _builder(known: Known) -> Callable[..., TraceBuilder]:
    if str(_TESTS) not in sys.path:
        sys.path.insert(0, str(_TESTS))
    found: Callable[..., TraceBuilder] = getattr(import_module(known.module), known.builder)
    return found
