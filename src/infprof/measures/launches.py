"""Launch health: how far ahead of the GPU the host was, counted once per launch call."""

from __future__ import annotations

import numpy as np

from infprof.distinct import first_of_each
from infprof.measures import calls
from infprof.measures import operations as op
from infprof.measures.operations import Prepared
from infprof.quantiles import median
from infprof.results import Measures
from infprof.trace import BoolArray, picked


def add_launches(measures: Measures, prepared: Prepared, rows: BoolArray) -> None:
    """Launch measures of the operations chosen by ``rows``.

    Queue delay = start of the first operation of a launch less the end of its call, negatives (clock skew between host
    and device) as 0; a graph launch counts once, whatever number of kernels it owns.
    """
    ops, table = prepared.operations, prepared.trace.api_calls
    by_graph = calls.graph_launchers(prepared.trace.strings)
    kernels = rows & ((ops.kind == op.KERNEL) | (ops.kind == op.GRAPH))
    total = int(kernels.sum())
    if table is None:
        for name, unit in (
            ("launch_count", "count"),
            ("graph_launch_count", "count"),
            ("launch_call_p50_ns", "ns"),
            ("launch_call_total_ns", "ns"),
            ("queue_delay_p50_ns", "ns"),
            ("queue_delay_p95_ns", "ns"),
            ("negative_delay_count", "count"),
            ("clock_skew_ns", "ns"),
            ("unlaunched_kernel_ratio", "ratio"),
            ("kernels_per_launch", "count"),
        ):
            measures.add(name, None, unit, source="CUDA calls were not collected")
    else:
        known = kernels & (ops.launch >= 0)
        # Operations are sorted by start: the first of each launch comes first.
        launch, first = first_of_each(picked(ops.launch, known))
        start = picked(ops.start, known)[first]
        call_start, call_end = table["start"][launch], table["end"][launch]
        delay = np.maximum(start - call_end, 0)
        early = call_start - start
        skewed = early > 0
        graph_launches = int(by_graph[table["name"][launch]].sum()) if by_graph.any() else 0
        length = call_end - call_start
        measures.add("launch_count", len(launch), "count")
        measures.add("graph_launch_count", graph_launches, "count")
        measures.add("launch_call_p50_ns", _median(length), "ns")
        measures.add("launch_call_total_ns", int(length.sum()), "ns")
        measures.add("queue_delay_p50_ns", _median(delay), "ns")
        measures.add("queue_delay_p95_ns", int(np.percentile(delay, 95)) if len(delay) else None, "ns")
        measures.add("negative_delay_count", int(skewed.sum()), "count")
        measures.add("clock_skew_ns", int(np.percentile(early[skewed], 95)) if skewed.any() else 0, "ns")
        measures.add("unlaunched_kernel_ratio", 1 - int(known.sum()) / total if total else None, "ratio")
        measures.add("kernels_per_launch", int(known.sum()) / len(launch) if len(launch) else None, "count")
    table_kernels = prepared.trace.kernels
    in_graph = np.zeros(len(ops), dtype=np.bool_)
    plain = rows & (ops.kind == op.KERNEL)
    if table_kernels is not None and (table_kernels["graph_node"] >= 0).any():
        in_graph[plain] = table_kernels["graph_node"][ops.row[plain]] >= 0
    if table is not None and by_graph.any():
        launched = plain & (ops.launch >= 0)
        in_graph[launched] |= by_graph[table["name"][ops.launch[launched]]]
    in_graph |= rows & (ops.kind == op.GRAPH)
    length = ops.end - ops.start
    all_ns = int(picked(length, kernels).sum())
    measures.add("graph_kernel_ratio", int(length[in_graph].sum()) / all_ns if all_ns else None, "ratio")


def _median(values: np.ndarray) -> int | None:
    return int(median(values)) if len(values) else None
