"""The phase of each step: prefill, decode, mixed, or other, how sure that is, and what says so.

By the name of the step's range, else by the attention kernels that name their phase, else (rank D, a hint) by whether
its matrix kernels are made for few rows or for many.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infprof.distinct import distinct_values
from infprof.measures import operations as op
from infprof.measures.kernel_class import classify
from infprof.measures.operations import Prepared
from infprof.quantiles import median
from infprof.steps.finding import LaneSteps
from infprof.steps.names import DECODE, MIXED, OTHER, PREFILL, phase_by_word, phase_of
from infprof.trace import BoolArray, FloatArray, IntArray

PHASES = (PREFILL, DECODE, MIXED, OTHER)

# How sure each kind of evidence makes.
BY_ENGINE, BY_WORD, BY_ATTENTION, BY_PAIR, BY_ROWS, BY_MATRIX = 0.95, 0.85, 0.75, 0.65, 0.6, 0.5
# A step whose matrix products have at most, or at least, so many rows (tokens).
FEW_TOKENS, MANY_TOKENS = 64, 1024
_PRODUCTS = re.compile(r"^aten::(?:mm|addmm|linear|_scaled_mm)$")
# Kernels for few rows (or for many) take this share of the matrix time whose kernels tell, for it to tell the phase.
CLEAR_SHARE = 0.8

# ../kernel_patterns.tsv tells attention; these tell which. Names that serve both phases are in neither.
_DECODE_ATTENTION = re.compile(
    r"batchdecode|forgen|masked_multihead|kernel_mha|xqa|unified_attention_3d|reduce_segments|paged_attention"
    r"|_fwd_grouped_kernel_stage|_fwd_kernel_stage|splitkv_combine|fwdcombine|splitkv_mla|mla_dec|flash_attn_(?:ext_)?vec|(?<!en)decode",
    re.IGNORECASE,
)
_PREFILL_ATTENTION = re.compile(
    r"flash_fwd_kernel\b|fmha_v2|fmhasm\w*context|raggedkvcache|fmha_fwd|(?<![a-z])attn_fwd|prefill|context_attention|(?:attn|attention)_prompt",
    re.IGNORECASE,
)
# Attention that divides the keys of one query among blocks: for few queries, which pictures may have as well.
_SPLIT_KEYS = re.compile(r"split_?kv", re.IGNORECASE)
# Beside steps with attention for decoding, those with another one are prompts where they take so many times as long.
LONGER = 3
_TILE = re.compile(r"(?:nvjet_\w*?|gemm_\w*?|tilesize|_MT)(\d+)x(\d+)", re.IGNORECASE)
_FEW_ROWS = re.compile(r"gemv|gemmk1|wvsplitk|llgemm|gemvx", re.IGNORECASE)
SMALL_TILE, LARGE_TILE = 32, 128


@dataclass
class Labels:
    """Per stretch: an index into PHASES, the confidence, and an index into ``evidence`` (words)."""

    phase: IntArray
    confidence: FloatArray
    why: IntArray
    evidence: tuple[str, ...]


_EVIDENCE = (
    "nothing in the trace tells prefill from decode",
    "the names of the engine's ranges",
    "the names of ranges",
    "attention kernels that name their phase",
    "which of the model's attention kernels ran",
    "the rows of matrix products (many of them may be a mixed step, too)",
    "matrix kernels made for few rows or for many (a hint)",
)


def label(prepared: Prepared, steps: LaneSteps) -> Labels:
    """The phase of every stretch of a lane."""
    count = len(steps)
    out = Labels(
        np.full(count, PHASES.index(OTHER), dtype=np.int64), np.zeros(count), np.zeros(count, dtype=np.int64), _EVIDENCE
    )
    if not count:
        return out
    _by_names(prepared, steps, out)
    left = steps.is_step & (out.why == 0)
    if left.any():
        _by_kernels(prepared, steps, left, out)
    return out


def _put(out: Labels, rows: BoolArray, phase: str, confidence: float, why: int) -> None:
    out.phase[rows], out.confidence[rows], out.why[rows] = PHASES.index(phase), confidence, why


def _by_names(prepared: Prepared, steps: LaneSteps, out: Labels) -> None:
    for text in distinct_values(steps.text).tolist():
        if text < 0:
            continue
        name = prepared.trace.strings[text]
        for phase, confidence, why in ((phase_of(name), BY_ENGINE, 1), (phase_by_word(name), BY_WORD, 2)):
            if phase is not None:
                _put(out, steps.text == text, phase, confidence, why)
                break


def _by_kernels(prepared: Prepared, steps: LaneSteps, left: BoolArray, out: Labels) -> None:
    kernels, ops = prepared.trace.kernels, prepared.operations
    if kernels is None:
        return
    rows = steps.lane.rows
    is_kernel = ops.kind[rows] == op.KERNEL
    used = list(prepared.kernel_classes)
    flags = _flags([prepared.trace.strings[i] for i in used])
    by_name = np.zeros((len(flags), len(prepared.trace.strings)), dtype=np.bool_)
    by_name[:, used] = flags
    name = np.where(is_kernel, kernels["name"][np.where(is_kernel, ops.row[rows], 0)], 0)
    spent = np.where(is_kernel, ops.end[rows] - ops.start[rows], 0)
    sums = [np.add.reduceat(np.where(flag[name], spent, 0), steps.first) for flag in by_name]
    prefill, decode, few, many, either, split = sums
    # A picture's attention is no prefill: phases are those of a model that generates. It has the one kernel in some steps
    # and the other in the rest; a picture has both in each.
    pair = (prefill[left] > 0).any() and (split[left] > 0).any() and not ((prefill > 0) & (split > 0) & left).any()
    left = left & (_generates(prepared, steps, name, is_kernel) | pair)
    both = left & (prefill > 0) & (decode > 0)
    _put(out, left & (prefill > 0) & (decode == 0), PREFILL, BY_ATTENTION, 3)
    _put(out, left & (decode > 0) & (prefill == 0), DECODE, BY_ATTENTION, 3)
    _put(out, both, MIXED, BY_ATTENTION, 3)
    if (prefill[left] > 0).any() and not (decode[left] > 0).any():
        # Who has a kernel for prefill uses the other one for the rest.
        _put(out, left & (either > 0) & (prefill > 0), MIXED, BY_PAIR, 4)
        _put(out, left & (either > 0) & (prefill == 0), DECODE, BY_PAIR, 4)
    decoding = left & (decode > 0)
    if decoding.any() and not (prefill[left] > 0).any():
        whole = np.add.reduceat(spent, steps.first)
        other = left & (either > 0) & (decode == 0)
        _put(out, other & (whole >= LONGER * float(median(whole[decoding]))), PREFILL, BY_PAIR, 4)
    rows_of = _product_rows(prepared, steps)
    if rows_of is not None:
        rest = left & (out.why == 0) & (rows_of > 0)
        _put(out, rest & (rows_of <= FEW_TOKENS), DECODE, BY_ROWS, 5)
        _put(out, rest & (rows_of >= MANY_TOKENS), PREFILL, BY_MATRIX, 5)
    rest = left & (out.why == 0)
    _put(out, rest & (few > CLEAR_SHARE * (few + many)), DECODE, BY_MATRIX, 6)
    _put(out, rest & (many > CLEAR_SHARE * (few + many)), PREFILL, BY_MATRIX, 6)


def _product_rows(prepared: Prepared, steps: LaneSteps) -> IntArray | None:
    """The rows of the largest matrix product of each stretch by the shapes of its operators, 0 where there is none."""
    trace, lane = prepared.trace, steps.lane
    operators, table = trace.operators, trace.api_calls
    if operators is None or table is None or not trace.inputs:
        return None
    is_product = np.array([_PRODUCTS.match(text) is not None for text in trace.strings], dtype=np.bool_)
    of_process = np.array([thread.process == lane.process for thread in trace.threads], dtype=np.bool_)
    mine = is_product[operators["name"]] & of_process[operators["thread"]] & (operators["inputs"] >= 0)
    chosen = np.flatnonzero(mine)
    if not len(chosen):
        return None
    rows = np.array([_rows(given.shapes) for given in trace.inputs], dtype=np.int64)[operators["inputs"][chosen]]
    units = np.searchsorted(lane.first, steps.first)
    called = np.maximum.accumulate(np.where(lane.launch >= 0, table["start"][np.maximum(lane.launch, 0)], 0))[units]
    # An operator begins before what it launches: its middle lies among its step's launches.
    middle = (operators["start"][chosen] + operators["end"][chosen]) // 2
    owner = np.searchsorted(called, middle, side="right") - 1
    out = np.zeros(len(steps), dtype=np.int64)
    np.maximum.at(out, owner[owner >= 0], rows[owner >= 0])
    return out


def _rows(shapes: tuple[tuple[Any, ...], ...]) -> int:
    """The rows of the first matrix among an operator's inputs."""
    for shape in shapes:
        if len(shape) >= 2 and all(isinstance(size, int) for size in shape):
            return int(np.prod(shape[:-1]))
    return 0


def _generates(prepared: Prepared, steps: LaneSteps, name: IntArray, is_kernel: BoolArray) -> BoolArray:
    """The steps of a model that generates text: where the lane keeps a KV cache or has attention made for decoding."""
    strings = prepared.trace.strings
    telling = [
        i
        for i, c in prepared.kernel_classes.items()
        if c.kind == "kv-cache" or (c.kind == "attention" and _DECODE_ATTENTION.search(strings[i]))
    ]
    of_model = np.zeros(len(strings), dtype=np.bool_)
    of_model[telling] = True
    return np.full(len(steps), bool((of_model[name] & is_kernel).any()))


def _flags(names: Sequence[str]) -> BoolArray:
    """Which names are attention for prefill, attention for decode, matrix kernels for few rows, for many, attention that
    may be for either, and of the last the one that divides keys."""
    out = np.zeros((6, len(names)), dtype=np.bool_)
    for i, (name, kernel) in enumerate(zip(names, classify(names), strict=True)):
        if kernel.kind == "attention":
            out[1, i] = _DECODE_ATTENTION.search(name) is not None
            out[0, i] = not out[1, i] and _PREFILL_ATTENTION.search(name) is not None
            out[4, i] = not (out[0, i] or out[1, i])
            out[5, i] = out[4, i] and _SPLIT_KEYS.search(name) is not None
        elif kernel.kind == "gemv" or _FEW_ROWS.search(name):
            out[2, i] = True
        elif kernel.kind == "gemm":
            tile = _TILE.search(name)
            if tile is not None:
                smaller = min(int(tile[1]), int(tile[2]))
                out[2, i], out[3, i] = smaller <= SMALL_TILE, smaller >= LARGE_TILE
    return out
