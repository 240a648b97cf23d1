"""Findings by what a replay without their cost would win: an exclusive slice of time is not always time to be won."""

from __future__ import annotations

from collections.abc import Sequence

from infprof.replay.setting import Setting
from infprof.replay.whatif import WhatIf
from infprof.reports.format import percent
from infprof.results import SEVERITIES, Diagnosis, Finding
from infprof.rules import RuleSet
from infprof.rules.evaluating import claims_time, severity_of_share
from infprof.rules.model import Rule


def rank_findings(
    diagnosis: Diagnosis, rules: RuleSet, whatif: WhatIf, chain: Sequence[Setting], scenario: str | None = None
) -> None:
    """Bound the gains of findings whose rule names a replay, and put the findings that win most first, in place.

    ``chain``: the fixes that gain most together; a finding may gain more once those are made. ``scenario`` weighs the order.
    """
    # Of a part of the window nothing follows for a cost that lies in the rest of it.
    whole = whatif.part_of is None
    by_id = {rule.id: rule for rule in rules.rules}
    settings = {rule.id: rule.replay for rule in rules.rules if rule.replay is not None and whole}
    window = diagnosis.window.duration_ns
    if (
        whatif.off is not None
        or window <= 0
        or whatif.window_ns <= 0
        or not any(f.rule in settings for f in diagnosis.findings)
    ):
        return
    won: dict[Setting, float] = {}
    order: dict[int, float] = {}
    for finding in diagnosis.findings:
        if finding.cost.value is None or not claims_time(finding):
            continue
        setting = settings.get(finding.rule)
        if setting is not None and finding.gain.high is not None:
            if setting not in won:
                won[setting] = min(max(whatif.gain_in_window_ns(setting, chain) / whatif.window_ns, 0.0), 1.0)
            _bound(finding, setting, won[setting], by_id[finding.rule], rules)
        share = finding.cost.value / window
        weight = rules.scenarios.weight(scenario, finding.area, finding.scenarios)
        # What a replay without the cost wins counts, even where the one remedy that the gain speaks of wins less.
        bound = finding.gain.high if setting is None else won.get(setting, finding.gain.high)
        order[id(finding)] = weight * (share if bound is None else min(bound, share))
    timed = sorted((f for f in diagnosis.findings if id(f) in order), key=lambda f: -order[id(f)])
    diagnosis.findings[:] = timed + [f for f in diagnosis.findings if id(f) not in order]


def _bound(finding: Finding, setting: Setting, share: float, rule: Rule, rules: RuleSet) -> None:
    gain = finding.gain
    if gain.high is not None and share < gain.high:
        gain.high = share
        gain.low = None if gain.low is None else min(gain.low, share)
        gain.basis = f"Replayed with {setting.text}: up to {percent(share)} of the window. {gain.basis}"
        # Nor does it shout for more than that.
        lesser = severity_of_share(rule, share, rules.thresholds)
        if SEVERITIES.index(lesser) < SEVERITIES.index(finding.severity):
            finding.severity = lesser
