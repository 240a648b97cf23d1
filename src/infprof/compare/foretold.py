"""Whether the what-if of BASE foretold HEAD: which of its fixes were made, what they promised, and what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from infprof.compare.figures import focus_value
from infprof.compare.headline import signed_percent
from infprof.compare.limiter import limit_words, same_limit
from infprof.compare.model import MOVED, FixCheck, Foretold
from infprof.compare.runs import PhaseRun, Run
from infprof.measures.kernel_class import is_communication
from infprof.replay.setting import Setting
from infprof.replay.whatif import FIXES, WhatIf

# A fix was made where no more of its cost is left, and where what went was this share of a step.
LEFT, WORTH = 0.5, 0.02
# Predicted and measured changes are the same within this share of the step, or of what was predicted.
CLOSE, CLOSE_SHARE = 0.02, 0.1
# The least that a fix outside the chain must promise to count.
PROMISED = 0.01
# A window is the trace when it is this share of it.
WHOLE = 0.9
_SHORTER, _SHORTER_COPIES = "shorter copies", Setting("copies", 0.0)
_EVERY = (*FIXES, (_SHORTER_COPIES, "nothing is copied (less data, a faster link, pinned memory)"))


class _Cost(NamedTuple):
    """What a fix takes away, ns per step. ``sign`` tells the fix where that time alone does not, in ``unit``."""

    ns: float
    sign: float
    unit: str = "ns"


def foretold(
    base: Run,
    head: Run,
    pairs: Sequence[tuple[PhaseRun, PhaseRun]],
    same_program: bool = True,
    same_work: bool = False,
) -> Foretold:
    """Compare BASE's chain of fixes with what HEAD shows.

    ``pairs``: the phases with steps that are in both runs. Without any, windows are compared if they hold the
    ``same_work``.
    """
    if not same_program:
        return Foretold(
            "no-prediction", "These may be different programs, of which one foretells nothing of the other."
        )
    whatif = base.diagnosis.whatif
    if not whatif or whatif.get("off"):
        reason = (whatif or {}).get("off") or "there is none for this run"
        return Foretold("no-prediction", f"BASE has no what-if: {reason.rstrip('.')}.")
    measured, base_steps, head_steps = measured_ratio(pairs), base.step_count, head.step_count
    if same_work and not pairs:
        measured = head.diagnosis.window.duration_ns / base.diagnosis.window.duration_ns - 1
        base_steps = head_steps = 1.0
    if measured is None or base_steps is None or head_steps is None:
        return Foretold(
            "no-prediction",
            "Without a phase of steps in both runs there is no change per step to compare a prediction with.",
        )
    chain: list[dict[str, Any]] = whatif.get("chain") or []
    step_ns = base.diagnosis.window.duration_ns / base_steps
    fixes = _checks(_costs(base, base_steps), _costs(head, head_steps), chain, step_ns)
    for fix in fixes:
        fix.made = fix.made and _is_promised(fix, base)
    made = [fix for fix in fixes if fix.made]
    if made:
        result = _judged(base, head, fixes, made, chain, measured)
    else:
        result = Foretold("nothing-made", _nothing_made(fixes, chain), fixes, measured_ratio=measured)
    _add_kernels(result, base, made, _kernel_factor(pairs))
    return result


def _is_promised(fix: FixCheck, base: Run) -> bool:
    """Whether BASE's what-if has a gain for the fix: a cost that nobody waited for may go without having been fixed."""
    if fix.place is not None or base.whatif is None:
        return fix.place is not None
    return _window_ratio(base.whatif, [_setting(fix.fix)]) <= -PROMISED


def _kernel_factor(pairs: Sequence[tuple[PhaseRun, PhaseRun]]) -> float | None:
    """HEAD's kernel time per step over BASE's, without communication, with as many steps of each phase as BASE has."""
    sums = [0.0, 0.0]
    for pair in pairs:
        for i, phase in enumerate(pair):
            if phase.kernels is None:
                return None
            spent = sum(use.ns for name, use in phase.kernels.items() if not is_communication(name))
            sums[i] += float(pair[0].entry["count"]) * spent
    return sums[1] / sums[0] if sums[0] else None


def _add_kernels(result: Foretold, base: Run, made: list[FixCheck], factor: float | None) -> None:
    """What the what-if says where kernels take another time as well, in place: the chain has no such fix."""
    result.kernel_factor = factor
    if base.whatif is None or base.whatif.off or factor is None or abs(factor - 1) < CLOSE:
        return
    settings = [*(_as_made(fix) for fix in made), Setting("kernel", factor)]
    result.with_kernels_ratio = _window_ratio(base.whatif, settings)
    result.sentence += (
        f" With {'these and ' if made else ''}kernels at {100 * factor:.0f} % of their time, as in HEAD, it gives "
        f"{signed_percent(result.with_kernels_ratio)}; measured: {signed_percent(result.measured_ratio or 0.0)}."
    )


def measured_ratio(pairs: Sequence[tuple[PhaseRun, PhaseRun]]) -> float | None:
    """By how much HEAD's steps take longer than BASE's, with as many steps of each phase as BASE has."""
    known = [
        (base.steps["count"], base.mean_ns, head.mean_ns)
        for base, head in pairs
        if base.steps and base.mean_ns and head.mean_ns
    ]
    before = sum(count * mean for count, mean, _ in known)
    return None if not before else sum(count * mean for count, _, mean in known) / before - 1


def _costs(run: Run, steps: float) -> dict[str, _Cost]:
    """Cost of a fix → what it takes per step, where that is known."""
    sums = {
        "launch": focus_value(run, "launch_call_total_ns"),
        "allocator": focus_value(run, "allocator_call_ns"),
        "module-load": focus_value(run, "module_load_call_ns"),
        "comm": focus_value(run, "exposed_comm_ns"),
    }
    host = focus_value(run, "host_time_ns")
    if host is not None:
        in_calls = sum(sums[name] or 0.0 for name in ("launch", "allocator", "module-load"))
        sums["host"] = max(host - in_calls, 0.0)
    found = {name: _Cost(ns / steps, ns / steps) for name, ns in sums.items() if ns is not None}
    exposed = focus_value(run, "exposed_host_copy_ns")
    if exposed is not None:
        found["copies"] = _Cost(exposed / steps, exposed / steps)
        # Copies that are shorter or fewer are another fix than copies that are hidden.
        found[_SHORTER] = _Cost(exposed / steps, _copy_ns(run) / steps)
    waited, calls = focus_value(run, "idle_sync_ns"), focus_value(run, "sync_call_count")
    if waited is not None and calls is not None:
        # The time after a wait is the host's as well: that it waits less often is the fix.
        found["sync"] = _Cost(waited / steps, calls / steps, "count")
    return found


def _copy_ns(run: Run) -> float:
    """The time of copies between host and GPU, hidden or not, of the GPU whose steps are compared."""
    device = (run.diagnosis.steps or {}).get("device")
    rows = [row for d in run.diagnosis.devices if device in (None, d.id) for row in d.copies]
    return float(sum(row.total_ns for row in rows if row.kind in ("h2d", "d2h", "uvm")))


def _checks(
    base: dict[str, _Cost], head: dict[str, _Cost], chain: list[dict[str, Any]], step_ns: float
) -> list[FixCheck]:
    places = {step.get("fix"): place for place, step in enumerate(chain, 1)}
    found = []
    for setting, words in _EVERY:
        name = _SHORTER if setting == _SHORTER_COPIES else setting.cost
        before, after = base.get(name), head.get(name)
        if before is None or after is None:
            continue
        left = after.sign / before.sign if before.sign else None
        made = left is not None and left <= LEFT and before.ns - after.ns >= WORTH * step_ns
        check = FixCheck(
            setting.text, words, before.unit, before.sign, after.sign, left, made, places.get(setting.text)
        )
        found.append(check)
    made_shorter = any(fix.made and fix.fix == _SHORTER_COPIES.text for fix in found)
    for fix in found:
        fix.made = fix.made and not (made_shorter and fix.fix == "copies=overlapped")
    # Those of the chain first, in its order.
    return sorted(found, key=lambda fix: (fix.place is None, fix.place or 0))


def _nothing_made(fixes: list[FixCheck], chain: list[dict[str, Any]]) -> str:
    if not chain:
        return "BASE's what-if promised no gain from any fix outside the kernels, and none was made."
    left = {fix.fix: fix.left_ratio for fix in fixes if fix.place is not None}
    parts = []
    for step in chain:
        ratio = left.get(step.get("fix", ""))
        parts.append(
            f"{step.get('fix')} ({f'{100 * ratio:.0f} % of its cost is' if ratio is not None else 'its cost is'} left)"
        )
    return f"Nothing that BASE's what-if proposes was done in HEAD: {', '.join(parts)}."


def _judged(
    base: Run, head: Run, fixes: list[FixCheck], made: list[FixCheck], chain: list[dict[str, Any]], measured: float
) -> Foretold:
    names = [fix.fix for fix in made]
    result = Foretold("no-prediction", "", fixes, names, measured_ratio=measured)
    prefix = chain[: len(made)]
    is_prefix = {step.get("fix") for step in prefix} == set(names)
    if base.whatif is not None and base.whatif.off is None:
        settings = [_setting(fix.fix) for fix in made]
        result.bound_ratio = _window_ratio(base.whatif, settings)
        result.predicted_ratio = _window_ratio(base.whatif, [_as_made(fix) for fix in made])
        is_prefix = is_prefix and all((fix.left_ratio or 0.0) < CLOSE for fix in made)
        if not is_prefix:
            asked = base.whatif.ask([_as_made(fix) for fix in made])
            result.next_verdict, result.next_cause = asked.next_verdict, asked.next_cause
    elif is_prefix:
        recorded = (base.diagnosis.whatif or {}).get("recorded_span_ns")
        # Where the window is less than the trace, what is won in the rest is not told apart.
        if recorded and recorded * WHOLE <= base.diagnosis.window.duration_ns:
            result.bound_ratio = prefix[-1]["predicted_span_ns"] / recorded - 1
    if is_prefix:
        result.next_verdict, result.next_cause = prefix[-1].get("next_verdict"), prefix[-1].get("next_cause")
    verdict = head.diagnosis.verdict
    if result.next_verdict is not None:
        moved = same_limit(result.next_verdict, result.next_cause, verdict.cls, verdict.cause)
        result.limiter_foretold = moved != MOVED
    _say(result, made)
    return result


def _say(result: Foretold, made: list[FixCheck]) -> None:
    expected = result.bound_ratio if result.predicted_ratio is None else result.predicted_ratio
    left = ", ".join(f"{fix.fix} ({_left(fix)} left)" for fix in made)
    measured = result.measured_ratio
    assert measured is not None
    if expected is None or result.bound_ratio is None:
        result.sentence = (
            f"HEAD made {left}. What that promises is not in a stored diagnosis of BASE, which foretells fixes in the order of "
            "its chain, for a whole trace: compare with its profile."
        )
        return
    gap = measured - expected
    close = max(CLOSE, CLOSE_SHARE * abs(expected))
    result.status = "foretold" if abs(gap) <= close else "less" if gap > 0 else "more"
    promised = f"promised up to {signed_percent(result.bound_ratio)}"
    if result.predicted_ratio is not None and abs(result.predicted_ratio - result.bound_ratio) >= 0.005:
        promised += f" ({signed_percent(result.predicted_ratio)} with what is left of the cost)"
    came = f"{signed_percent(measured)} came of it"
    ending = {
        "foretold": "as foretold",
        "less": "less than foretold" if measured < 0 else "not what was foretold",
        "more": "more than foretold, so something else changed too",
    }[result.status]
    result.sentence = f"HEAD made {left}: BASE's what-if {promised}, and {came}, {ending}."
    if result.next_verdict is not None:
        then = limit_words(result.next_verdict, result.next_cause)
        was = "and that is so" if result.limiter_foretold else "which did not come true"
        result.sentence += f" The next limiter was to be {then}, {was}."


def _left(fix: FixCheck) -> str:
    ratio = fix.left_ratio or 0.0
    return "nothing" if ratio == 0 else f"{100 * ratio:.0f} %" if ratio >= 0.005 else "<1 %"


def _setting(text: str) -> Setting:
    return next(setting for setting, _ in _EVERY if setting.text == text)


def _as_made(fix: FixCheck) -> Setting:
    """The fix as far as HEAD made it. Waits are there or not, and copies overlap or do not."""
    setting = _setting(fix.fix)
    if setting.factor is None or setting.cost == "sync" or fix.left_ratio is None:
        return setting
    return Setting(setting.cost, min(fix.left_ratio, 1.0))


def _window_ratio(whatif: WhatIf, settings: Sequence[Setting]) -> float:
    """The predicted change of the time between the first and the last operation of the window."""
    ops = whatif.prepared.operations
    mine = np.flatnonzero((ops.end > whatif.window[0]) & (ops.start < whatif.window[1]))
    lengths = []
    for chosen in ([], list(settings)):
        played = whatif.predict(chosen)
        lengths.append(int(played.end[mine].max() - played.start[mine].min()))
    return lengths[1] / lengths[0] - 1
