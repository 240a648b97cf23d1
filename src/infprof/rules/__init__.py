"""The rule engine. The rules themselves are data: one YAML file each, under ``rules/`` or in a folder of the user's.

``load`` reads them, ``evaluate`` turns measures into ranked findings, ``test_rules`` runs the small cases every rule
carries, ``describe`` and ``list_rules`` show them.
"""

from __future__ import annotations

from infprof.rules.cases import CaseResult, test_rules
from infprof.rules.describing import describe, list_rules
from infprof.rules.evaluating import Context, Evaluation, evaluate, place
from infprof.rules.loading import Broken, RuleSet, load
from infprof.rules.model import Rule
from infprof.rules.pages import pages
from infprof.rules.scenarios import Scenarios, load_scenarios
from infprof.rules.thresholds import Thresholds, load_thresholds

__all__ = [
    "Broken",
    "CaseResult",
    "Context",
    "Evaluation",
    "Rule",
    "RuleSet",
    "Scenarios",
    "Thresholds",
    "describe",
    "evaluate",
    "list_rules",
    "load",
    "load_scenarios",
    "load_thresholds",
    "pages",
    "place",
    "test_rules",
]
