"""Specs of the simulator with one cost changed: the truth that a what-if must foretell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from infprof.simulator.engine import kernel_time_ns
from infprof.simulator.spec import (
    Action,
    Allocate,
    Copy,
    GraphLaunch,
    Host,
    Kernel,
    Launch,
    Repeat,
    Spec,
    Sync,
)

_LAUNCHES = ("launch_ns", "graph_launch_ns", "copy_ns", "memset_ns", "event_ns", "collective_ns")


def with_change(spec: Spec, cost: str, factor: float) -> Spec:
    """The spec with a factor on all that one cost of ``infprof whatif --set`` is about."""
    return _CHANGES[cost](spec, factor)


def _scaled(ns: int | None, factor: float) -> int | None:
    return None if ns is None else round(ns * factor)


def _each(spec: Spec, change: Callable[[Action], Action | None]) -> Spec:
    def walk(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        out = []
        for action in actions:
            if isinstance(action, Repeat):
                action = replace(action, do=walk(action.do))
            changed = change(action)
            out += [] if changed is None else [changed]
        return tuple(out)

    processes = tuple(
        replace(process, threads=tuple(replace(thread, run=walk(thread.run)) for thread in process.threads))
        for process in spec.processes
    )
    return replace(spec, processes=processes)


def _costs(spec: Spec, names: tuple[str, ...], factor: float) -> Spec:
    changed: dict[str, Any] = {name: _scaled(getattr(spec.costs, name), factor) for name in names}
    return replace(spec, costs=replace(spec.costs, **changed))


def _launch(spec: Spec, factor: float) -> Spec:
    def change(action: Action) -> Action:
        if isinstance(action, (Launch, GraphLaunch)):
            return replace(action, call_ns=_scaled(action.call_ns, factor))
        return action

    return _each(_costs(spec, _LAUNCHES, factor), change)


def _host(spec: Spec, factor: float) -> Spec:
    return _each(
        _costs(spec, ("between_ns",), factor),
        lambda a: replace(a, ns=round(a.ns * factor)) if isinstance(a, Host) else a,
    )


def _allocator(spec: Spec, factor: float) -> Spec:
    return _each(
        _costs(spec, ("malloc_ns", "free_ns"), factor),
        lambda a: replace(a, call_ns=_scaled(a.call_ns, factor)) if isinstance(a, Allocate) else a,
    )


def _copies(spec: Spec, factor: float) -> Spec:
    fast = max(factor, 1e-9)
    devices = tuple(
        replace(d, pcie=d.pcie / fast, pageable=d.pageable / fast, copy_latency_ns=round(d.copy_latency_ns * factor))
        for d in spec.devices
    )
    return replace(spec, devices=devices)


def _comm(spec: Spec, factor: float) -> Spec:
    fast = max(factor, 1e-9)
    devices = tuple(
        replace(d, nvlink=d.nvlink / fast, collective_latency_ns=round(d.collective_latency_ns * factor))
        for d in spec.devices
    )
    return replace(spec, devices=devices)


def _kernels(spec: Spec, factor: float) -> Spec:
    def faster(kernel: Any) -> Any:
        if not isinstance(kernel, Kernel):
            return kernel
        return replace(kernel, time_ns=round(kernel_time_ns(kernel, spec.devices[0]) * factor), operators=())

    def change(action: Action) -> Action:
        if isinstance(action, Launch):
            return replace(action, kernel=faster(action.kernel))
        if isinstance(action, GraphLaunch):
            kernels = tuple(faster(kernel) for kernel in action.graph.kernels)
            return replace(action, graph=replace(action.graph, kernels=kernels))
        return action

    return _each(spec, change)


def _sync(spec: Spec, factor: float) -> Spec:
    """Without the waits; copies that hold their call still do."""
    assert factor == 0
    return _each(spec, lambda a: None if isinstance(a, Sync) else a)


_CHANGES: dict[str, Callable[[Spec, float], Spec]] = {
    "launch": _launch,
    "host": _host,
    "allocator": _allocator,
    "copies": _copies,
    "comm": _comm,
    "kernel": _kernels,
    "sync": _sync,
}


def holds_its_calls(spec: Spec) -> bool:
    """Whether copies wait in their calls: then waits cannot be taken away by taking away synchronising calls."""
    found = False

    def look(action: Action) -> Action:
        nonlocal found
        found |= isinstance(action, Copy) and (action.blocking or action.memory == "pageable")
        return action

    _each(spec, look)
    return found
