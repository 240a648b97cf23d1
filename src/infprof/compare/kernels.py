"""Kernels of two runs: which are the same, and which of them got faster, were called more often, came or went."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from infprof.compare.model import KernelChange
from infprof.compare.runs import KernelUse, kernel_kind
from infprof.measures.kernel_class import short_name

# A kernel whose time per step changes by less than this share of the step is not worth a word.
SMALL_SHARE = 0.001
# Where only sums are known, nothing says how a kernel's time varies with the requests of a run.
UNMEASURED = 0.1
# A kernel of fewer steps may only have been needed by other requests.
OFTEN = 0.9
# Of a two-sided interval of 99.9 %: many kernels are compared at once.
Z = 3.291

_Pair = tuple[str, str | None, KernelUse | None, KernelUse | None]


def kernel_changes(
    base: Mapping[str, KernelUse],
    head: Mapping[str, KernelUse],
    phase: str | None,
    step_ns: float,
    tolerance: float,
    weight: float = 1.0,
    same_work: bool = True,
) -> list[KernelChange]:
    """Every kernel of either run, the largest change first.

    ``step_ns``: how long a step (or the window) of BASE takes; ``weight``: how many there are, to rank phases by.
    ``same_work`` False: steps of the two hold another mix, so that only times per call can be compared.
    """
    found = []
    for name, matched, before, after in matched_kernels(base, head):
        row = _row(name, matched, before, after, phase)
        row.what = _what(row, before, after, SMALL_SHARE * step_ns, tolerance, same_work)
        row.weight_ns = abs(row.delta_ns) * weight
        found.append(row)
    return sorted(found, key=lambda row: (-row.weight_ns, row.name))


def matched_kernels(base: Mapping[str, KernelUse], head: Mapping[str, KernelUse]) -> list[_Pair]:
    """Pairs by name; what is left, by short name and class: template arguments may differ from version to version."""
    pairs: list[_Pair] = [(name, "name", base[name], head[name]) for name in base if name in head]
    rest = [_by_short_name(side, other) for side, other in ((base, head), (head, base))]
    for key in {**rest[0], **rest[1]}:
        before, after = rest[0].get(key), rest[1].get(key)
        if before and after:
            pairs.append((key[0], "short-name", _together(before.values()), _together(after.values())))
        else:
            pairs += [(name, None, use, None) for name, use in (before or {}).items()]
            pairs += [(name, None, None, use) for name, use in (after or {}).items()]
    return pairs


def _by_short_name(
    side: Mapping[str, KernelUse], other: Mapping[str, KernelUse]
) -> dict[tuple[str, str], dict[str, KernelUse]]:
    groups: dict[tuple[str, str], dict[str, KernelUse]] = {}
    for name, use in side.items():
        if name not in other:
            groups.setdefault((short_name(name, width=max(len(name), 1)), kernel_kind(name)), {})[name] = use
    return groups


def _together(uses: Collection[KernelUse]) -> KernelUse:
    errors = [use.error_ns for use in uses if use.error_ns is not None]
    shares = [use.share for use in uses if use.share is not None]
    return KernelUse(
        sum(use.calls for use in uses),
        sum(use.ns for use in uses),
        math.hypot(*errors) if len(errors) == len(uses) else None,
        min(use.blocks for use in uses),
        max(shares) if shares else None,
    )


def _row(
    name: str, matched: str | None, before: KernelUse | None, after: KernelUse | None, phase: str | None
) -> KernelChange:
    b_ns, h_ns = (None if use is None else use.ns for use in (before, after))
    return KernelChange(
        name=name,
        kernel_class=kernel_kind(name),
        phase=phase,
        matched=matched,
        what="same",
        base_calls=None if before is None else before.calls,
        head_calls=None if after is None else after.calls,
        base_ns=b_ns,
        head_ns=h_ns,
        delta_ns=(h_ns or 0.0) - (b_ns or 0.0),
        base_call_ns=_per_call(before),
        head_call_ns=_per_call(after),
    )


def _per_call(use: KernelUse | None) -> float | None:
    return None if use is None or not use.calls else use.ns / use.calls


def _what(
    row: KernelChange,
    before: KernelUse | None,
    after: KernelUse | None,
    small_ns: float,
    tolerance: float,
    same_work: bool,
) -> str:
    if before is None or after is None:
        only = after if before is None else before
        assert only is not None
        rare = only.share is not None and (not only.blocks or only.share < OFTEN)
        return "unknown" if rare or not same_work else "came" if before is None else "went"
    if abs(row.delta_ns) < small_ns and same_work:
        return "same"
    measured = before.share is not None and after.share is not None
    if measured and abs(row.delta_ns) >= tolerance * min(before.ns, after.ns):
        if before.error_ns is None or after.error_ns is None:
            return "unknown"
        chance = _student(min(before.blocks, after.blocks) - 1) * math.hypot(before.error_ns, after.error_ns)
        return _how(row, before, after, 0.0) if abs(row.delta_ns) > chance else "same"
    return "same" if measured else _how(row, before, after, UNMEASURED, same_work)


def _how(row: KernelChange, before: KernelUse, after: KernelUse, least: float, same_work: bool = True) -> str:
    """What makes the difference: the time of a call or the number of calls; shares under ``least`` do not count."""
    was, now = row.base_call_ns or 0.0, row.head_call_ns or 0.0
    by_call = (now - was) * min(before.calls, after.calls)
    by_count = (after.calls - before.calls) * min(was, now)
    if abs(now - was) < least * min(was, now):
        by_call = 0.0
    if not same_work or abs(after.calls - before.calls) < least * min(before.calls, after.calls):
        by_count = 0.0
    if not (by_call or by_count):
        return "same"
    if abs(by_call) >= abs(by_count):
        return "faster" if by_call < 0 else "slower"
    return "fewer-calls" if by_count < 0 else "more-calls"


def _student(freedom: int) -> float:
    """The quantile of Student's distribution to Z of the normal one (Cornish-Fisher; within 3 % from 5 degrees on)."""
    z, v = Z, float(max(freedom, 1))
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
