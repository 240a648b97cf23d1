"""Activity records as columns: raw bytes in the order in which CUPTI filled its buffers, to one array per kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infprof.probes.cupti_backend.layout import KINDS, record_dtype
from infprof.trace import IntArray

_WORD = 8
# Few enough words that the tables of one piece stay in the processor's cache.
_PIECE_WORDS = 1 << 15
_LONG_ROW = 256


class Decoded(NamedTuple):
    """Records by kind, with the place of each in the bytes (``offset``), and how many bytes could not be walked."""

    records: dict[int, NDArray[Any]]
    offsets: dict[int, IntArray]
    lost_bytes: int


def decode(data: bytes | memoryview | NDArray[np.uint8], strides: Mapping[int, int]) -> Decoded:
    """The records of one buffer.

    ``strides``: activity kind → bytes of one record, as the library that wrote it says. Kinds without one end the walk:
    what follows is counted as lost. Kinds that ``layout`` does not know are passed over.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    offsets, lost = record_offsets(raw, strides)
    if not len(offsets):
        return Decoded({}, {}, lost)
    kind = raw[: len(raw) // _WORD * _WORD].view("<u4")[::2][offsets // _WORD]
    records, places = {}, {}
    for number in KINDS:
        if number in strides and len(mine := offsets[kind == number]):
            records[number] = _gathered(raw, mine, record_dtype(number, strides[number]))
            places[number] = mine
    return Decoded(records, places, lost)


def record_offsets(raw: NDArray[np.uint8], strides: Mapping[int, int]) -> tuple[IntArray, int]:
    """Where each record of a buffer begins, bytes; and how many bytes at its end hold no whole known record.

    Each record says by its kind where the next one begins: a chain of as many links as there are records. It is not
    followed link by link: a row of records of one length is taken as a whole, and else in a piece of the buffer the place
    that 1, 2, 4, … links lead to is computed for all words at once. These jumps, from the longest to the shortest, double
    the part of the chain that is known.
    """
    kinds = raw[: len(raw) // _WORD * _WORD].view("<u4")[::2]
    lookup = _strides_in_words(strides)
    found: list[IntArray] = []
    position, whole = 0, True
    while whole and position < len(kinds):
        row = _row(kinds[position:], lookup)
        if len(row) >= _LONG_ROW:
            chain, behind = row, int(row[-1] + row[1])
            whole = position + behind <= len(kinds)
        else:
            chain, behind, whole = _chain(kinds[position : position + _PIECE_WORDS], lookup)
        found.append(chain + position)
        position += behind
    words = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
    if len(words) and position > len(kinds):
        # The last one is cut.
        words = words[:-1]
        position = int(words[-1] + lookup[kinds[words[-1]]]) if len(words) else 0
    return words * _WORD, len(raw) - position * _WORD


def _strides_in_words(strides: Mapping[int, int]) -> NDArray[np.int32]:
    table = np.zeros(max(strides, default=0) + 2, dtype=np.int32)
    for kind, stride in strides.items():
        if stride <= 0 or stride % _WORD:
            raise ValueError(f"records of activity kind {kind} cannot have {stride} bytes")
        table[kind] = stride // _WORD
    return table


def _row(kinds: NDArray[Any], lookup: NDArray[np.int32]) -> IntArray:
    """The first records as far as all have the length of the first one, in words."""
    words = int(_steps(kinds[:1], lookup)[0])
    if not words:
        return np.empty(0, dtype=np.int64)
    looked_at, count = _LONG_ROW // 2, 0
    # Twice as far each time, so that the effort is that of the row, not that of the buffer.
    while True:
        looked_at *= 2
        same = _steps(kinds[: looked_at * words : words], lookup) == words
        count = len(same) if same.all() else int(np.argmin(same))
        if count < looked_at:
            break
    return np.arange(count, dtype=np.int64) * words


def _steps(kinds: NDArray[Any], lookup: NDArray[np.int32]) -> NDArray[np.int32]:
    """The length of a record of each kind, in words; 0 where there is none."""
    steps: NDArray[np.int32] = lookup[np.minimum(kinds, len(lookup) - 1)]
    return steps


def _chain(piece: NDArray[Any], lookup: NDArray[np.int32]) -> tuple[IntArray, int, bool]:
    """The records that begin in a piece, in words, where the one behind them begins, and whether it can be one."""
    count = len(piece)
    here = np.arange(count, dtype=np.int32)
    step = _steps(piece, lookup)
    jump = here + step
    # Where no record begins, and behind the piece, each chain ends.
    dead = step == 0
    jump[dead] = count
    np.minimum(jump, count, out=jump)
    if dead[0]:
        return np.empty(0, dtype=np.int64), 0, False
    jumps = [np.append(jump, np.int32(count))]
    while jumps[-1][0] < count:
        jumps.append(jumps[-1][jumps[-1]])
    known = np.zeros(1, dtype=np.int32)
    for table in reversed(jumps):
        onward = table[known]
        known = np.concatenate((known, onward[onward < count]))
    known = np.unique(known)
    known = known[~dead[known]].astype(np.int64)
    behind = int(known[-1] + step[known[-1]])
    return known, behind, behind >= count


def _gathered(raw: NDArray[np.uint8], offsets: IntArray, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The records at ``offsets``, one after the other."""
    size = dtype.itemsize
    if int(offsets[-1]) - int(offsets[0]) == (len(offsets) - 1) * size:
        # Nothing lies between them.
        return raw[int(offsets[0]) : int(offsets[-1]) + size].view(dtype)
    words = raw[: len(raw) // _WORD * _WORD].view("<u8")
    return np.lib.stride_tricks.sliding_window_view(words, size // _WORD)[offsets // _WORD].reshape(-1).view(dtype)
