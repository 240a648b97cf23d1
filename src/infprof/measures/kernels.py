"""The kernel table, small kernels, and compute time by what the kernels are."""

from __future__ import annotations

import numpy as np

from infprof.distinct import distinct
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.intervals import Intervals
from infprof.measures.kernel_class import short_name
from infprof.measures.operations import Prepared
from infprof.quantiles import median
from infprof.results import KernelRow, Measures, Problem
from infprof.trace import BoolArray, IntArray, picked

# So many names of no class are named in the problem.
_UNKNOWN_SHOWN = 3


def kernel_table(prepared: Prepared, rows: BoolArray, device: int) -> list[KernelRow]:
    """One line per kernel name of a device, most time first.

    p50 and p95 are nearest-rank percentiles of the durations; grid and block are those of the longest run.
    """
    ops, table = prepared.operations, prepared.trace.kernels
    chosen = np.flatnonzero(rows & (ops.kind == op.KERNEL))
    # Where graphs were traced whole, a table of the few kernels outside would name the wrong ones.
    if table is None or not len(chosen) or graphs_hide_kernels(prepared, rows):
        return []
    at = ops.row[chosen]
    name, length = table["name"][at], (ops.end - ops.start)[chosen]
    names, which = distinct(name)
    counts = np.bincount(which, minlength=len(names))
    last = np.cumsum(counts)
    first = last - counts
    sorted_length = _sorted_within(which, length, len(names))
    totals = np.add.reduceat(sorted_length, first)
    # Nearest rank: the smallest value that at least q of all values do not exceed.
    p50 = sorted_length[first + np.maximum(-(-counts * 50 // 100), 1) - 1]
    p95 = sorted_length[first + np.maximum(-(-counts * 95 // 100), 1) - 1]
    longest = np.empty(len(names), dtype=np.int64)
    candidates = np.flatnonzero(length == sorted_length[last - 1][which])
    longest[which[candidates]] = at[candidates]
    everything = int(totals.sum())
    strings, classes = prepared.trace.strings, prepared.kernel_classes

    def known(value: int) -> int | None:
        return value if value >= 0 else None

    lines = [
        KernelRow(
            name=strings[n],
            device=prepared.trace.devices[device].id,
            calls=int(counts[i]),
            total_ns=int(totals[i]),
            mean_ns=float(totals[i] / counts[i]),
            p50_ns=int(p50[i]),
            p95_ns=int(p95[i]),
            share=float(totals[i] / everything) if everything else 0.0,
            kernel_class=classes[n].kind,
            precision=classes[n].precision,
            library=classes[n].library,
            grid_blocks=known(int(table["grid_blocks"][longest[i]])),
            block_threads=known(int(table["block_threads"][longest[i]])),
        )
        for i, n in enumerate(names.tolist())
    ]
    return sorted(lines, key=lambda line: (-line.total_ns, line.name))


def _sorted_within(which: IntArray, length: IntArray, count: int) -> IntArray:
    """The lengths in ascending order within each of the groups ``which`` (0 … count - 1), group after group."""
    span = int(length.max()) + 1
    if count * span < 2**63:
        return np.sort(which * span + length) % span
    return length[np.lexsort((length, which))]


def few_sm_rows(prepared: Prepared, rows: BoolArray, sm_count: int | None) -> BoolArray:
    """Kernels whose grid has fewer blocks than half of the SMs: most of the device is empty while they run."""
    ops, table = prepared.operations, prepared.trace.kernels
    if table is None or sm_count is None or not len(table):
        return np.zeros(len(ops), dtype=np.bool_)
    few: BoolArray = (table["grid_blocks"] >= 0) & (2 * table["grid_blocks"] < sm_count)
    return rows & ~ops.is_comm & _of_kernels(prepared, few)


def class_rows(prepared: Prepared, rows: BoolArray, test: str) -> BoolArray:
    """Kernels by class: ``gemm``, ``attention``, ``unknown`` or ``fp32_gemm``."""
    ops, table = prepared.operations, prepared.trace.kernels
    names = _names_of_class(prepared, test)
    if table is None or not names:
        return np.zeros(len(ops), dtype=np.bool_)
    wanted = np.zeros(len(prepared.trace.strings), dtype=np.bool_)
    wanted[names] = True
    return rows & _of_kernels(prepared, wanted.take(table["name"]))


def _of_kernels(prepared: Prepared, said: BoolArray) -> BoolArray:
    """Operations that are kernels of which ``said``, one value for each row of the kernel table, is true."""
    ops = prepared.operations
    # Other operations have rows of other tables.
    return np.asarray((ops.kind == op.KERNEL) & said.take(ops.row, mode="clip"), dtype=np.bool_)


def _names_of_class(prepared: Prepared, test: str) -> list[int]:
    """Kernel names (indexes of strings) of a class, see ``class_rows``."""
    classes = prepared.kernel_classes.items()
    if test == "fp32_gemm":
        return [index for index, kernel_class in classes if kernel_class.fp32_gemm]
    kinds = ("other", "unknown") if test == "unknown" else (test,)
    return [index for index, kernel_class in classes if kernel_class.kind in kinds]


def unknown_kernels_problem(prepared: Prepared, rows: BoolArray, share: float) -> Problem:
    """Says which kernels have no class, where their ``share`` of the kernel time is large."""
    table = prepared.trace.kernels
    assert table is not None, "kernels of no class need a table of kernels"
    ops, strings = prepared.operations, prepared.trace.strings
    mine = rows & (ops.kind == op.KERNEL)
    by_name_ns = np.bincount(
        table["name"][picked(ops.row, mine)], (ops.end - ops.start)[mine].astype(np.float64), len(strings)
    )
    names = sorted(_names_of_class(prepared, "unknown"), key=lambda i: (-by_name_ns[i], strings[i]))
    shown = ", ".join(dict.fromkeys(short_name(strings[i]) for i in names[:_UNKNOWN_SHOWN] if by_name_ns[i] > 0))
    return Problem(
        "unknown-kernels",
        f"{100 * share:.0f} % of the kernel time is in kernels whose names tell no class ({shown}): what is said of GEMM, attention "
        "and other classes is said of the rest.",
        int((by_name_ns[names] > 0).sum()),
    )


def small_rows(prepared: Prepared, rows: BoolArray, small_kernel_ns: int) -> BoolArray:
    ops = prepared.operations
    return np.asarray(rows & (ops.kind == op.KERNEL) & (ops.end - ops.start < small_kernel_ns), dtype=np.bool_)


def add_kernels(
    measures: Measures,
    prepared: Prepared,
    rows: BoolArray,
    compute: Intervals,
    few_sm: Intervals,
    scope: Intervals,
    device: int,
    small_kernel_ns: int,
) -> None:
    """Kernel measures of the operations chosen by ``rows``; times of classes are unions inside compute time.

    ``few_sm``: the compute time of kernels that leave most SMs empty.
    """
    ops, trace = prepared.operations, prepared.trace
    sm_count = trace.devices[device].sm_count
    measures.add("sm_count", sm_count, "count", source="device description")
    names = (
        ("kernel_count", "count"),
        ("kernel_total_ns", "ns"),
        ("kernel_mean_ns", "ns"),
        ("kernel_p50_ns", "ns"),
        ("kernel_concurrency", "count"),
        ("small_kernel_count", "count"),
        ("small_kernel_ratio", "ratio"),
        ("small_kernel_time_ratio", "ratio"),
        ("small_kernel_per_s", "per_s"),
        ("top_kernel_ratio", "ratio"),
    )
    by_name = (
        ("gemm_ns", "ns"),
        ("attention_ns", "ns"),
        ("attention_ratio", "ratio"),
        ("fp32_gemm_ns", "ns"),
        ("fp32_gemm_ratio", "ratio"),
        ("kernel_class_unknown_ratio", "ratio"),
        ("few_sm_kernel_ns", "ns"),
        ("few_sm_kernel_ratio", "ratio"),
        ("single_block_kernel_ns", "ns"),
    )
    table = trace.kernels
    if table is None or graphs_hide_kernels(prepared, rows):
        reason = "CUDA graphs were traced whole" if trace.graphs is not None else "kernels were not collected"
        for name, unit in (*names, *by_name):
            measures.add(name, None, unit, source=reason)
        return
    mine = rows & (ops.kind == op.KERNEL)
    length = picked(ops.end - ops.start, mine)
    count, total = len(length), int(length.sum())
    covered = iv.union(picked(ops.start, mine), picked(ops.end, mine)).total()
    small = length < small_kernel_ns
    window = scope.total()
    measures.add("kernel_count", count, "count")
    measures.add("kernel_total_ns", total, "ns")
    measures.add("kernel_mean_ns", total / count if count else None, "ns")
    measures.add("kernel_p50_ns", int(median(length)) if count else None, "ns")
    measures.add("kernel_concurrency", total / covered if covered else None, "count")
    measures.add("small_kernel_count", int(small.sum()), "count")
    measures.add("small_kernel_ratio", int(small.sum()) / count if count else None, "ratio")
    measures.add("small_kernel_time_ratio", int(length[small].sum()) / total if total else None, "ratio")
    measures.add("small_kernel_per_s", int(small.sum()) * 1e9 / window if window else None, "per_s")
    # Sums of float64 are exact below 2**53 ns, which is 104 days.
    names_run = table["name"][picked(ops.row, mine)]
    by_name_ns = np.bincount(names_run, length.astype(np.float64), len(trace.strings))
    measures.add("top_kernel_ratio", float(by_name_ns.max()) / total if total else None, "ratio")
    compute_ns = compute.total()

    def time_of(chosen: BoolArray) -> int:
        # Kernels that do not communicate: what of their time lies in the scope is compute time.
        return iv.intersect(iv.union(ops.start[chosen], ops.end[chosen]), scope).total()

    def sum_of(test: str) -> int:
        return int(by_name_ns[_names_of_class(prepared, test)].sum())

    fp32 = time_of(class_rows(prepared, rows, "fp32_gemm"))
    rank, source = "D", "kernel names"
    measures.add("gemm_ns", sum_of("gemm"), "ns", rank, source)
    attention = sum_of("attention")
    measures.add("attention_ns", attention, "ns", rank, source)
    measures.add("attention_ratio", attention / total if total else None, "ratio", rank, source)
    measures.add("fp32_gemm_ns", fp32, "ns", rank, source)
    measures.add("fp32_gemm_ratio", fp32 / compute_ns if compute_ns else None, "ratio", rank, source)
    measures.add(
        "kernel_class_unknown_ratio",
        sum_of("unknown") / total if total else None,
        "ratio",
        rank,
        source,
    )
    source = "launch geometry"
    few = few_sm.total() if sm_count else None
    measures.add("few_sm_kernel_ns", few, "ns", rank, source)
    measures.add(
        "few_sm_kernel_ratio", few / compute_ns if few is not None and compute_ns else None, "ratio", rank, source
    )
    one_block = np.zeros(len(ops), dtype=np.bool_)
    plain = mine & ~ops.is_comm
    if (table["grid_blocks"] == 1).any():
        one_block[plain] = table["grid_blocks"][ops.row[plain]] == 1
    measures.add("single_block_kernel_ns", time_of(one_block), "ns", rank, source)


def graphs_hide_kernels(prepared: Prepared, rows: BoolArray) -> bool:
    """Whether most kernel time ran in graphs that were traced whole, so that kernel figures would cover the rest only."""
    ops = prepared.operations
    length = ops.end - ops.start
    whole = _sum(length, rows & (ops.kind == op.GRAPH))
    return whole > _sum(length, rows & (ops.kind == op.KERNEL))


def _sum(values: IntArray, chosen: BoolArray) -> int:
    return int(values[chosen].sum())
