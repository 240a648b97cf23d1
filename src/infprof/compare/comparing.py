"""``compare``: two runs in, one Comparison out."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from infprof.compare import spread
from infprof.compare.causes import causes_of, flag_changes
from infprof.compare.comparability import (
    COMMON,
    different_programs,
    graphs_traced_whole,
    little_work,
    nothing_foretold,
    share_in_common,
    withhold,
)
from infprof.compare.families import replaced_families
from infprof.compare.figures import measure_changes, measures_of_all
from infprof.compare.foretold import foretold
from infprof.compare.headline import headline
from infprof.compare.headline import stepped as compared_phases
from infprof.compare.kernels import kernel_changes
from infprof.compare.limiter import compare_limiters, limit_words
from infprof.compare.model import (
    HIGHER,
    LOWER,
    SAME,
    Change,
    Comparison,
    CopyChange,
    KernelChange,
    PhaseChange,
    RunSummary,
    SliceChange,
)
from infprof.compare.runs import CopyUse, PhaseKey, PhaseRun, Run
from infprof.compare.spread import TOLERANCE, plain_change
from infprof.results import plain

# Without steps two windows are of the same work when they hold as many kernels, within this share.
SAME_WORK = 0.01
# One window of each run shows no spread: only a difference of this share is called one.
CLEAR_WINDOW = 0.1
# Shares of the phases may differ by so much for steps to be of the same mix.
SAME_MIX = 0.02
# The kernel table of a diagnosis ends after so many rows.
_TABLE_ROWS = 1000
_UNNAMED = "steps"


class _Pair(NamedTuple):
    base: PhaseRun | None
    head: PhaseRun | None


def compare(base: Run, head: Run, tolerance: float = TOLERANCE, other_program: bool = False) -> Comparison:
    """What is different in HEAD.

    ``tolerance``: shares below it are what two runs of one program differ by. ``other_program``: HEAD may be another program
    (engine, vendor) than BASE. With the runs exchanged every difference has the other sign.
    """
    notes = _notes(base, head)
    pairs = _pairs(base, head, notes)
    phases = [_phase_change(pair, tolerance) for pair in pairs]
    stepped = [(p.base, p.head) for p in pairs if p.base and p.head and p.base.steps and p.head.steps]
    both = base.steps is not None and head.steps is not None
    steps = _phase_change(_Pair(base.steps, head.steps), tolerance) if both else None
    little = little_work(base, head)
    off = _kernels_off(base, head) or (f"{little.sentence}." if little else None)
    kernels = [] if off else _kernels(base, head, stepped, tolerance, notes)
    shared = share_in_common(
        [((row.base_calls or 0.0) + (row.head_calls or 0.0), row.matched is not None) for row in kernels]
    )
    why = little or (None if other_program else different_programs(shared))
    same_program = why is None and _same_program(shared, notes)
    limiter = compare_limiters(plain(base.diagnosis.verdict), plain(head.diagnosis.verdict))
    if steps is not None:
        steps.limiter = limiter
    told = nothing_foretold()
    if why is None:
        told = foretold(base, head, stepped, same_program, same_work=not stepped and same_work(base, head))
    result = Comparison(
        headline="",
        base=_summary(base),
        head=_summary(head),
        limiter=limiter,
        window_ns=plain_change(base.diagnosis.window.duration_ns, head.diagnosis.window.duration_ns),
        span_ns=plain_change(base.span_ns, head.span_ns),
        phases=phases,
        steps=steps,
        kernels=kernels,
        kernels_off=off,
        measures=measure_changes(measures_of_all([base]), measures_of_all([head])),
        foretold=told,
        tolerance_ratio=tolerance,
        notes=notes,
        replaced=replaced_families(kernels),
        flags=flag_changes(base, head),
    )
    if not stepped:
        _judge_windows(result, base, head)
    result.causes = causes_of(result, base, head, compared_phases(result))
    result.headline = headline(result)
    if why is not None:
        withhold(result, why)
    return result


# --- what can be compared ----------------------------------------------------------------------------------------------------


def _notes(base: Run, head: Run) -> list[str]:
    """What a reader must know before believing a difference."""
    notes = []
    b, h = base.diagnosis, head.diagnosis
    for what, before, after in (
        ("the profile is of", b.provenance.tool, h.provenance.tool),
        ("the GPU is", _gpus(base), _gpus(head)),
        ("the window is", b.window.how, h.window.how),
        ("steps were found by", _how(base), _how(head)),
        ("the engine is", b.provenance.capture.get("engine"), h.provenance.capture.get("engine")),
    ):
        if before != after and before and after:
            notes.append(f"Not alike: {what} {_words(before)} in BASE and {_words(after)} in HEAD.")
    for side, run in (("BASE", base), ("HEAD", head)):
        if run.steps is None:
            said = next((p.message for p in run.diagnosis.problems if p.code == "no-steps"), None)
            notes.append(f"{side} has no steps. {said or ''}".strip())
    if base.stored or head.stored:
        which = " and ".join(side for side, run in (("BASE", base), ("HEAD", head)) if run.stored)
        notes.append(
            f"{which}: a stored diagnosis, without the length of each step. The spread of its median is estimated from its "
            "quantiles, and kernels are compared per step of all phases together."
        )
    return notes


def _same_program(shared: float | None, notes: list[str]) -> bool:
    """Whether the runs can be of one program, by the share of calls of kernels that both have; notes where not."""
    if shared is None or shared >= COMMON:
        return True
    notes.append(f"Kernels of the same name are {100 * shared:.0f} % of all calls: these may be different programs.")
    return False


def _words(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def _gpus(run: Run) -> list[str]:
    return [str(gpu.get("name")) for gpu in run.diagnosis.provenance.gpus if gpu.get("name")]


def _how(run: Run) -> str | None:
    how = None if run.steps is None else (run.steps.steps or {}).get("how_found")
    return str(how).partition(" (")[0] if how else None


def _pairs(base: Run, head: Run, notes: list[str]) -> list[_Pair]:
    """The phases of both, matched; those of BASE in its order first."""
    before = {phase.key: phase for phase in base.phases}
    after = {phase.key: phase for phase in head.phases}
    only = [
        [k for k, p in one.items() if p.steps and k not in other] for one, other in ((before, after), (after, before))
    ]
    renamed = _renamed(*only)
    pairs = [_Pair(phase, after.pop(renamed.get(key, key), None)) for key, phase in before.items()]
    for key, other in renamed.items():
        notes.append(
            f"The steps that count as {key.name} in BASE and as {other.name} in HEAD are taken for the same phase: one trace "
            "does not tell."
        )
    return pairs + [_Pair(None, phase) for phase in after.values()]


def _renamed(base: list[PhaseKey], head: list[PhaseKey]) -> dict[PhaseKey, PhaseKey]:
    """Phases of which one trace does not tell the name: a single one on each side."""
    if len(base) == 1 and len(head) == 1 and _UNNAMED in (base[0].name, head[0].name):
        return {base[0]: head[0]}
    return {}


def _kernels_off(base: Run, head: Run) -> str | None:
    """Why kernels cannot be compared; None where they can."""
    whole = [graphs_traced_whole(run) for run in (base, head)]
    if any(whole):
        side = "both runs" if all(whole) else "BASE" if whole[0] else "HEAD"
        return f"CUDA graphs were traced whole in {side}, which hides their kernels."
    return None


# --- phases ----------------------------------------------------------------------------------------------------------------


def _phase_change(pair: _Pair, tolerance: float) -> PhaseChange:
    base, head = pair
    shown = base or head
    assert shown is not None
    quantiles = [_quantile(base, head, name, tolerance) for name in ("p50", "p95", "p99")]
    steps = [None if side is None else side.steps or {} for side in pair]

    def both(key: str) -> Change:
        values = [None if side is None else side.get(key) for side in steps]
        return plain_change(values[0], values[1])

    entries = [{} if side is None else side.entry for side in pair]
    count, total = (plain_change(entries[0].get(key), entries[1].get(key)) for key in ("count", "total_ns"))
    verdicts = [entry.get("verdict") for entry in entries]
    return PhaseChange(
        name=phase_label(shown.key),
        kind=str(shown.entry.get("kind", "")),
        in_base=base is not None,
        in_head=head is not None,
        steps=shown.steps is not None,
        count=count,
        p50_ns=quantiles[0],
        p95_ns=quantiles[1],
        p99_ns=quantiles[2],
        mean_ns=plain_change(base.mean_ns if base else None, head.mean_ns if head else None),
        total_ns=total,
        kernels_per_step=both("kernels_per_step"),
        launches_per_step=both("launches_per_step"),
        syncs_per_step=both("syncs_per_step"),
        slices=_slices(base, head),
        limiter=compare_limiters(verdicts[0], verdicts[1]) if any(verdicts) else None,
        copies=_copies(base, head),
    )


def _copies(base: PhaseRun | None, head: PhaseRun | None) -> list[CopyChange] | None:
    """Copies per step by kind, of phases that both have; None where that is not known of both."""
    if base is None or head is None or base.copies is None or head.copies is None:
        return None
    none = CopyUse(0.0, 0.0)
    pairs = {
        kind: (base.copies.get(kind, none), head.copies.get(kind, none)) for kind in {**base.copies, **head.copies}
    }
    return [
        CopyChange(kind, was.calls, now.calls, was.moved_bytes, now.moved_bytes)
        for kind, (was, now) in sorted(pairs.items())
    ]


def phase_label(key: PhaseKey) -> str:
    """The name of a phase, with its GPU and process where they are not the first."""
    place = (f", GPU {key.device}" if key.device else "") + (f", process {key.process}" if key.process else "")
    return key.name + place


def _quantile(base: PhaseRun | None, head: PhaseRun | None, name: str, tolerance: float) -> Change:
    if base is None or head is None:
        values = [None if side is None else side.quantile(name).value for side in (base, head)]
        return plain_change(values[0], values[1])
    return spread.difference(base.quantile(name), head.quantile(name), tolerance)


def _slices(base: PhaseRun | None, head: PhaseRun | None) -> list[SliceChange]:
    """Slices per step, the largest change first; empty where the phase is in one run only."""
    if base is None or head is None:
        return []
    before, after = _per_step(base), _per_step(head)
    rows = []
    for kind, cause in {**before, **after}:
        was, now = before.get((kind, cause), 0.0), after.get((kind, cause), 0.0)
        if was or now:
            rows.append(SliceChange(kind, cause, was, now, now - was))
    return sorted(rows, key=lambda row: (-abs(row.delta_ns), row.kind, row.cause or ""))


def _per_step(phase: PhaseRun) -> dict[tuple[str, str | None], float]:
    """ns of each slice per step: its share of the phase, of the mean length of a whole step."""
    slices = phase.entry.get("slices") or []
    total = sum(item["ns"] for item in slices)
    each = phase.mean_ns if phase.steps else None
    scale = each / total if each and total else 1.0
    return {(item["kind"], item["cause"]): item["ns"] * scale for item in slices}


# --- kernels ---------------------------------------------------------------------------------------------------------------


def _kernels(
    base: Run, head: Run, stepped: list[tuple[PhaseRun, PhaseRun]], tolerance: float, notes: list[str]
) -> list[KernelChange]:
    whole = [(b, h) for b, h in stepped if b.kernels is not None and h.kernels is not None]
    if stepped and len(whole) == len(stepped):
        rows = []
        for b, h in whole:
            count = math.sqrt(float(b.entry["count"]) * float(h.entry["count"]))
            step = min(b.mean_ns or 0.0, h.mean_ns or 0.0)
            rows += kernel_changes(b.kernels or {}, h.kernels or {}, phase_label(b.key), step, tolerance, count)
        return sorted(rows, key=lambda row: (-row.weight_ns, row.name, row.phase or ""))
    per_step = bool(stepped)
    same = _same_mix(base, head) if per_step else same_work(base, head)
    if not same:
        what = "The phases' shares of the steps differ" if per_step else "The windows do not hold the same work"
        notes.append(f"{what}: of kernels only the time of a call is compared.")
    if max(len(run.diagnosis.kernel_table) for run in (base, head)) >= _TABLE_ROWS:
        same = False
        notes.append(f"A stored diagnosis keeps {_TABLE_ROWS} kernels: which of the others came or went is not known.")
    step = min(
        run.diagnosis.window.duration_ns / ((run.step_count or 1.0) if per_step else 1.0) for run in (base, head)
    )
    used = [_table(run, per_step) for run in (base, head)]
    return kernel_changes(used[0], used[1], None, step, tolerance, same_work=same)


def _table(run: Run, per_step: bool) -> Any:
    steps = run.step_count or 1.0
    if per_step or steps == 1.0:
        return run.kernels
    return {name: use._replace(calls=use.calls * steps, ns=use.ns * steps) for name, use in run.kernels.items()}


def _same_mix(base: Run, head: Run) -> bool:
    shares = []
    for run in (base, head):
        counts = {phase.key: float(phase.entry["count"]) for phase in run.phases if phase.steps}
        every = sum(counts.values()) or 1.0
        shares.append({key: count / every for key, count in counts.items()})
    return all(abs(shares[0].get(k, 0.0) - shares[1].get(k, 0.0)) <= SAME_MIX for k in {**shares[0], **shares[1]})


def same_work(base: Run, head: Run) -> bool:
    """Whether two windows hold as many kernels, nearly."""
    counts = [sum(device.kernels.count for device in run.diagnosis.devices) for run in (base, head)]
    return min(counts) > 0 and abs(counts[0] - counts[1]) <= SAME_WORK * max(counts)


def _judge_windows(result: Comparison, base: Run, head: Run) -> None:
    """Without steps the windows are compared where they hold the same work."""
    change = result.window_ns
    if not same_work(base, head):
        change.reason = "without steps, and with another number of kernels, the windows need not hold the same work"
        return
    assert change.delta is not None and change.base is not None and change.head is not None
    shorter = min(change.base, change.head)
    if abs(change.delta) < result.tolerance_ratio * shorter:
        change.direction = SAME
    elif abs(change.delta) >= CLEAR_WINDOW * shorter:
        change.direction = LOWER if change.delta < 0 else HIGHER
    else:
        change.reason = "nothing says how much two windows differ by chance"


# --- the rest --------------------------------------------------------------------------------------------------------------


def _summary(run: Run) -> RunSummary:
    d = run.diagnosis
    steps = None if run.steps is None else run.steps.steps
    return RunSummary(
        name=run.name,
        tool=d.provenance.tool,
        gpus=_gpus(run),
        window_ns=d.window.duration_ns,
        window_how=d.window.how,
        span_ns=run.span_ns,
        steps=None if not steps else int(steps["count"]),
        how_found=_how(run),
        verdict=limit_words(d.verdict.cls, d.verdict.cause) or d.verdict.cls,
        verdict_class=d.verdict.cls,
        verdict_cause=d.verdict.cause,
        sentence=d.verdict.sentence,
        confidence=d.verdict.confidence,
        stored=run.stored,
    )
