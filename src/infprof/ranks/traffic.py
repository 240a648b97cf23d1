"""What process groups move, where their collectives say it: bytes by group, and between two ranks where certain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from infprof.ranks.alignment import Participant
from infprof.results import GroupTraffic

# Bytes that each of n ranks must send per byte of payload (the larger side of a gather or scatter), whatever the
# algorithm (NCCL's "bus" bytes).
# Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
_BUS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
}


def group_traffic(participants: Sequence[Participant], labels: Sequence[str]) -> list[GroupTraffic]:
    """Count and payload of one rank by process group and operation, in the windows; most bytes first.

    Of several ranks the one with the most counts. ``ranks`` names those of which there is a trace. Without recorded
    groups the list is empty.
    """
    rows: dict[tuple[str, str], GroupTraffic] = {}
    for participant, label in zip(participants, labels, strict=True):
        c = participant.collectives
        inside = c.in_window & (c.group >= 0)
        pairs, where = np.unique(np.stack([c.group[inside], c.operation[inside]]), axis=1, return_inverse=True)
        for number, (group, operation) in enumerate(pairs.T.tolist()):
            mine = np.flatnonzero(inside)[where.reshape(-1) == number]
            known = (c.bytes[mine] >= 0).all()
            payload = int(c.bytes[mine].sum()) if known else None
            key = (c.names[group], c.names[operation])
            row = rows.setdefault(key, GroupTraffic(key[0], [], key[1], 0, None, None))
            row.ranks.append(label)
            size = int(c.group_size[mine].max())
            if len(mine) > row.count:
                row.count, row.bytes = len(mine), payload
                row.bus_bytes = _bus_bytes(key[1], payload, size)
    return sorted(rows.values(), key=lambda r: (-(r.bytes or 0), r.group, r.name))


def _bus_bytes(operation: str, payload: int | None, size: int) -> int | None:
    factor = _BUS.get(operation)
    return None if factor is None or payload is None or size < 2 else round(factor(size) * payload)


def matrix(traffic: Sequence[GroupTraffic], participants: Sequence[Participant]) -> list[dict[str, Any]]:
    """Bytes from rank to rank: only of groups of two, of which both are here. In larger ones the algorithm decides."""
    sizes: dict[str, int] = {}
    for participant in participants:
        c = participant.collectives
        for group in np.unique(c.group[c.group >= 0]).tolist():
            sizes[c.names[group]] = int(c.group_size[c.group == group].max())
    sent: dict[tuple[str, str], int] = {}
    for row in traffic:
        if sizes.get(row.group) == 2 and len(row.ranks) == 2 and row.bus_bytes is not None:
            for pair in (tuple(row.ranks), tuple(reversed(row.ranks))):
                sent[pair] = sent.get(pair, 0) + row.bus_bytes  # type: ignore[index,arg-type]  # two of them
    return [{"from": source, "to": target, "bytes": count} for (source, target), count in sorted(sent.items())]
