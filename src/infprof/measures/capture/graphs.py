"""The replayed CUDA graphs of a trace: which launches replayed the same graph, and the kernels of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infprof.distinct import groups
from infprof.measures import operations as op
from infprof.measures.capture.aligning import mixed, powers
from infprof.measures.capture.tokens import tokens_around
from infprof.measures.operations import Prepared
from infprof.measures.work.counting import in_graphs
from infprof.trace import IntArray


@dataclass(frozen=True)
class ReplayedGraph:
    """Launches of one graph: equal kernels with equal grids, in steps of equally many tokens (-1 = not known).

    ``rows`` of the operations: one line for each launch, one column for each kernel, in the order in which the kernels
    of the first launch began. ``name`` is the kernels' in the trace's strings; ``ns`` their time over all launches.
    """

    rows: IntArray
    launch: IntArray
    name: IntArray
    grid: IntArray
    block: IntArray
    ns: IntArray
    tokens: int
    first_launch_ns: int

    def __len__(self) -> int:
        return len(self.name)

    @property
    def total_ns(self) -> int:
        return int(self.ns.sum())


def replayed_graphs(prepared: Prepared) -> list[ReplayedGraph]:
    """All graphs whose kernels were recorded with their launch, in the order of their first launch."""
    kernels, api, ops = prepared.trace.kernels, prepared.trace.api_calls, prepared.operations
    if kernels is None or api is None or not len(api):
        return []
    rows = np.flatnonzero((ops.kind == op.KERNEL) & (ops.launch >= 0))
    rows = rows[in_graphs(prepared, rows)]
    if not len(rows):
        return []
    values = np.zeros(len(rows), dtype=np.uint64)
    for column in ("name", "grid_blocks", "block_threads"):
        values = mixed((values ^ kernels[column][ops.row[rows]].astype(np.uint64)).view(np.int64))
    # Branches start their kernels in another order in each launch. Nodes have one number in all launches of a graph;
    # without numbers, equal kernels are taken to keep their order.
    node = kernels["graph_node"][ops.row[rows]]
    order = np.lexsort((node if (node >= 0).all() else values.view(np.int64), ops.launch[rows]))
    rows, values = rows[order], values[order]
    launches, first, counts = np.unique(ops.launch[rows], return_index=True, return_counts=True)
    within = np.arange(len(rows)) - np.repeat(first, counts)
    hashes = np.add.reduceat(values * powers(int(counts.max()))[within], first)
    tokens, _ = tokens_around(prepared.trace, api["start"][launches], api["thread"][launches])
    keys = mixed((hashes ^ mixed(counts * (int(tokens.max()) + 2) + tokens)).view(np.int64))
    _, which = np.unique(keys, return_inverse=True)
    found = []
    for _, same in groups(which):
        matrix = rows[first[same][:, None] + np.arange(counts[same[0]])]
        found.append(_graph(prepared, matrix, launches[same], int(tokens[same[0]])))
    return sorted(found, key=lambda graph: graph.first_launch_ns)


def _graph(prepared: Prepared, rows: IntArray, launch: IntArray, tokens: int) -> ReplayedGraph:
    kernels, api, ops = prepared.trace.kernels, prepared.trace.api_calls, prepared.operations
    assert kernels is not None and api is not None
    rows = rows[:, np.argsort(rows[0], kind="stable")]
    name, grid, block = (kernels[c][ops.row[rows[0]]] for c in ("name", "grid_blocks", "block_threads"))
    spent = (ops.end - ops.start)[rows].sum(axis=0)
    return ReplayedGraph(rows, launch, name, grid, block, spent, tokens, int(api["start"][launch].min()))
