"""Counted work of a trace (evidence rank B): which operator each kernel ran for, and what that operator had to do.

A kernel belongs to the innermost operator with a formula around its launch call, on the same thread. The work of a call
counts once, however many kernels it launched. Kernels of graph replays have no operator of their own: measures/capture
finds those they were captured from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from infprof.distinct import distinct, distinct_rows, distinct_values
from infprof.measures import calls
from infprof.measures import operations as op
from infprof.measures.operations import Prepared
from infprof.measures.work.attention import PAGED_NAMES, StepSums, paged_work
from infprof.measures.work.call import Call, Work
from infprof.measures.work.formulas import formula_of, operator_work
from infprof.measures.work.nesting import innermost_rows
from infprof.measures.work.steps import step_sums
from infprof.trace import BoolArray, FloatArray, IntArray, Table, Trace

# Why a kernel has no counted work, in this order of search.
NO_LAUNCH, IN_GRAPH, NO_FORMULA = (
    "its launch was not recorded",
    "it ran inside a replayed graph",
    "no operator with a formula",
)

# Kinds whose arithmetic runs on tensor cores where the device and the types allow it.
MATRIX_KINDS = frozenset({"gemm", "conv", "attention", "moe"})
# FP32 inputs whose kernels do not say whether TF32 was used.
FP32_OR_TF32 = "fp32 or tf32"
# None: the types do not say, or the work runs on the ordinary pipe.
PRECISIONS = (None, "fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8", FP32_OR_TF32)


@dataclass(frozen=True)
class CountedWork:
    """One entry for each call of an operator that kernels ran for, and for each operation which entry it belongs to.

    ``call`` has one value for each of ``Prepared.operations``: an index into the other columns, or -1; ``why`` then
    indexes ``whys``. ``flop`` and ``bytes`` are NaN where not known. ``group`` numbers the distinct works, which stand in
    ``works`` with the operator's name in ``names``. ``kernel_ns`` sums the durations of the call's kernels, ``precision``
    indexes PRECISIONS.
    """

    call: IntArray
    group: IntArray
    flop: FloatArray
    bytes: FloatArray
    kernel_ns: IntArray
    bounded: BoolArray
    precision: IntArray
    names: list[str]
    works: list[Work]
    why: IntArray
    whys: tuple[str, ...] = (NO_LAUNCH, IN_GRAPH, NO_FORMULA)


class OperatorCalls(NamedTuple):
    """The calls of operators whose work is known from their inputs: ``rows`` of the table, and which of ``works`` each
    has; ``names`` are the operators of ``works``."""

    rows: IntArray
    which: IntArray
    names: list[str]
    works: list[Work | None]


class Counted(NamedTuple):
    """Kernels and the calls that they ran for.

    ``rows`` of the operations with the ``call`` of each; per call which of ``works`` it has, and whether it encloses
    calls that did its work (``repeated``) or a part of it (``partly``).
    """

    rows: IntArray
    call: IntArray
    which: IntArray
    repeated: BoolArray
    partly: BoolArray
    names: list[str]
    works: list[Work | None]
    # Operations whose operators have no formula.
    without_formula: IntArray = np.empty(0, dtype=np.int64)


def count_work(prepared: Prepared, replayed: Sequence[Counted] = ()) -> CountedWork | None:
    """The counted work of a trace; None where it has no operators with recorded inputs.

    ``replayed`` holds kernels of replayed graphs with the operators they were captured from (measures/capture).
    """
    if prepared.trace.kernels is None:
        return None
    launched = _launched(prepared)
    if launched is None and not replayed:
        return None
    parts = [*([] if launched is None else [launched]), *replayed]
    ops = prepared.operations
    mine = np.flatnonzero((ops.kind == op.KERNEL) & ~ops.is_comm)
    why = np.full(len(ops), -1, dtype=np.int64)
    why[mine] = np.where(ops.launch[mine] < 0, 0, np.where(in_graphs(prepared, mine), 1, 2))
    call = np.full(len(ops), -1, dtype=np.int64)
    calls_before, works_before = 0, 0
    which = []
    for part in parts:
        call[part.rows] = part.call + calls_before
        why[part.without_formula] = 2
        which.append(part.which + works_before)
        calls_before += len(part.which)
        works_before += len(part.works)
    why[call >= 0] = -1
    return _counted(
        prepared,
        call,
        np.concatenate(which),
        (np.concatenate([p.repeated for p in parts]), np.concatenate([p.partly for p in parts])),
        [name for p in parts for name in p.names],
        [work for p in parts for work in p.works],
        why,
    )


def in_graphs(prepared: Prepared, rows: IntArray) -> BoolArray:
    """Which of these operations a graph launch started."""
    launch, api = prepared.operations.launch[rows], prepared.trace.api_calls
    if api is None or not len(api):
        return np.zeros(len(rows), dtype=np.bool_)
    graphs = calls.graph_launchers(prepared.trace.strings)
    return np.asarray(graphs[api["name"][np.maximum(launch, 0)]] & (launch >= 0), dtype=np.bool_)


def operator_calls(prepared: Prepared) -> OperatorCalls | None:
    """The calls that can be counted; None where there are no operators with recorded inputs, or no launch calls."""
    trace = prepared.trace
    table, api = trace.operators, trace.api_calls
    if table is None or api is None or not trace.inputs or not len(table) or not len(api):
        return None
    known = _with_formula(table, trace.strings)
    names, works, which = _works(prepared, table, known)
    usable = np.array([w is not None for w in works], dtype=np.bool_)[which] if len(known) else np.zeros(0, np.bool_)
    return OperatorCalls(known[usable], which[usable], names, works)


def calls_around(
    prepared: Prepared, found: OperatorCalls, times: IntArray, threads: IntArray
) -> tuple[IntArray, IntArray]:
    """For each time the innermost of the calls of the same thread around it, -1 where none; and each call's parent."""
    table = prepared.trace.operators
    assert table is not None, "calls are rows of the table"
    start, end, thread = (table[c][found.rows] for c in ("start", "end", "thread"))
    return innermost_rows(start, end, thread, times, threads)


def _launched(prepared: Prepared) -> Counted | None:
    """Kernels that were launched inside an operator, one by one."""
    found, ops, api = operator_calls(prepared), prepared.operations, prepared.trace.api_calls
    if found is None or api is None:
        return None
    mine = np.flatnonzero((ops.kind == op.KERNEL) & ~ops.is_comm)
    launch = ops.launch[mine]
    # Calls of threads that were not recorded lie in no operator.
    asked = (launch >= 0) & ~in_graphs(prepared, mine) & (api["thread"][np.maximum(launch, 0)] >= 0)
    row = np.full(len(mine), -1, dtype=np.int64)
    times, threads = api["start"][launch[asked]], api["thread"][launch[asked]]
    row[asked], parent = calls_around(prepared, found, times, threads)
    used, at = distinct(row[row >= 0])
    repeated, partly = repeats(used, parent, found)
    return Counted(mine[row >= 0], at, found.which[used], repeated, partly, found.names, found.works)


def _with_formula(table: Table, strings: list[str]) -> IntArray:
    """Rows of operators that have a formula and recorded inputs."""
    names = np.zeros(len(strings), dtype=np.bool_)
    for index in distinct(table["name"])[0].tolist():
        names[index] = formula_of(strings[index]) is not None
    return np.flatnonzero(names[table["name"]] & (table["inputs"] >= 0))


def _works(prepared: Prepared, table: Table, known: IntArray) -> tuple[list[str], list[Work | None], IntArray]:
    """The work of each distinct (operator, inputs, step sums), and which of them each known row has."""
    trace = prepared.trace
    step, sums = _steps(prepared, table, known)
    if not len(known):
        return [], [], known
    rows, which = distinct_rows(table["name"][known], table["inputs"][known], step)
    names, works = [], []
    for name, given, number in rows:
        names.append(trace.strings[name])
        if names[-1] in PAGED_NAMES:
            works.append(paged_work(Call(trace.inputs[given]), sums.get(number)))
        else:
            works.append(operator_work(names[-1], trace.inputs[given]))
    return names, works, which


def _steps(prepared: Prepared, table: Table, known: IntArray) -> tuple[IntArray, dict[int, StepSums]]:
    """For each known row of an attention over a paged cache the text of the step around it (-1 = none), and its sums."""
    trace = prepared.trace
    step = np.full(len(known), -1, dtype=np.int64)
    paged = np.array([name in PAGED_NAMES for name in trace.strings], dtype=np.bool_)
    asked = np.flatnonzero(paged[table["name"][known]])
    rows = known[asked]
    step[asked], sums = steps_around(trace, table["start"][rows], table["thread"][rows])
    return step, sums


def steps_around(trace: Trace, times: IntArray, threads: IntArray) -> tuple[IntArray, dict[int, StepSums]]:
    """The text of the step around each time of a thread (-1 = none with sums), and the sums of each text."""
    if trace.ranges is None or not len(times):
        return np.full(len(times), -1, dtype=np.int64), {}
    texts = [t for t in distinct(trace.ranges["text"])[0].tolist() if t >= 0]
    sums = {t: found for t in texts if (found := step_sums(trace.strings[t])) is not None}
    steps = trace.ranges.take(np.isin(trace.ranges["text"], list(sums)))
    if not len(steps):
        return np.full(len(times), -1, dtype=np.int64), sums
    inside, _ = innermost_rows(steps["start"], steps["end"], steps["thread"], times, threads)
    return np.where(inside >= 0, steps["text"][np.maximum(inside, 0)], -1), sums


def repeats(used: IntArray, parent: IntArray, found: OperatorCalls) -> tuple[BoolArray, BoolArray]:
    """Which used calls enclose another used call that did their work, wholly or in part.

    Of the same kind (linear → addmm): they are that work once more. Matrix work of another kind (attention → bmm): what
    is left for the outer call's own kernels is not known.
    """
    works, which = found.works, found.which
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(w.kind for w in works if w is not None))}
    kind = np.array([-1 if w is None else kinds[w.kind] for w in works], dtype=np.int64)[which]
    matrix = np.isin(kind, [i for k, i in kinds.items() if k in MATRIX_KINDS])
    repeated, partly = np.zeros(len(which), dtype=np.bool_), np.zeros(len(which), dtype=np.bool_)
    inner = used
    while len(inner):
        inner = inner[parent[inner] >= 0]
        outer = parent[inner]
        same = kind[outer] == kind[inner]
        other = matrix[outer] & matrix[inner] & ~same
        above = distinct_values(outer[same | other])
        inner = above[~(repeated | partly)[above]]
        repeated[outer[same]] = True
        partly[outer[other]] = True
    return repeated[used], partly[used]


def _counted(
    prepared: Prepared,
    call: IntArray,
    group: IntArray,
    repeats: tuple[BoolArray, BoolArray],
    names: list[str],
    works: list[Work | None],
    why: IntArray,
) -> CountedWork:
    ops = prepared.operations
    # Entries without a work belong to no call.
    present = [Work("", None, None) if w is None else w for w in works]
    flop, moved = (
        np.array([np.nan if v is None else v for v in column], dtype=np.float64)[group]
        for column in ([w.flop for w in present], [w.bytes for w in present])
    )
    repeated, partly = repeats
    flop[repeated], moved[repeated] = 0.0, 0.0
    flop[partly], moved[partly] = np.nan, np.nan
    bounded = np.array([w.flop_is_bound for w in present], dtype=np.bool_)[group]
    rows = np.flatnonzero(call >= 0)
    spent = np.bincount(call[rows], (ops.end - ops.start)[rows].astype(np.float64), len(group)).astype(np.int64)
    precision, transformed = _by_kernels(prepared, rows, call[rows], group, present)
    return CountedWork(call, group, flop, moved, spent, bounded | transformed, precision, names, present, why)


def _by_kernels(
    prepared: Prepared, rows: IntArray, call: IntArray, group: IntArray, works: list[Work]
) -> tuple[IntArray, BoolArray]:
    """Precision of each call, and whether its kernels do fewer multiplications than the definition (Winograd, FFT).

    FP32 inputs may be multiplied in TF32: only the kernel's name can tell.
    """
    strings, kernels = prepared.trace.strings, prepared.trace.kernels
    assert kernels is not None, "calls are found through kernels"
    tf32, plain, fewer = (np.zeros(len(strings), dtype=np.bool_) for _ in range(3))
    for index, kernel_class in prepared.kernel_classes.items():
        tf32[index] = kernel_class.precision == "tf32"
        plain[index] = kernel_class.kind in ("gemm", "conv", "gemv") and kernel_class.tensor_cores is False
        fewer[index] = any(word in strings[index].lower() for word in ("winograd", "fft"))
    name = kernels["name"][prepared.operations.row[rows]]

    def any_of(marks: BoolArray) -> BoolArray:
        return np.asarray(np.bincount(call[marks[name]], minlength=len(group)) > 0, dtype=np.bool_)

    matrix = np.array([w.kind in MATRIX_KINDS for w in works], dtype=np.bool_)[group]
    precision = np.array([PRECISIONS.index(w.precision) for w in works], dtype=np.int64)[group]
    single = matrix & (precision == PRECISIONS.index("fp32"))
    precision[single] = PRECISIONS.index(FP32_OR_TF32)
    precision[single & any_of(plain)] = PRECISIONS.index("fp32")
    precision[single & any_of(tf32)] = PRECISIONS.index("tf32")
    return precision, any_of(fewer)
