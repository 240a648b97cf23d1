"""Asks infprof about a case, as a user would, and keeps of the diagnosis what is scored."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.labels import Case, Label

from infprof.diagnosis import Options, analyze_file
from infprof.ranks import analyze_inputs

# The most that a verdict may be sure of where the recording cannot prove it.
DOUBT = 0.6


@dataclass(frozen=True)
class Answer:
    """What infprof said of a case; ``findings``: rule → severity."""

    case: str
    source: str
    label: Label
    cls: str
    cause: str | None
    code: str | None
    confidence: float
    findings: Mapping[str, str]

    @property
    def class_is_right(self) -> bool:
        return self._is(cause_counts=False)

    @property
    def cause_is_right(self) -> bool:
        """Class and cause."""
        return self._is(cause_counts=True)

    def _is(self, cause_counts: bool) -> bool:
        allowed = [self.label.verdicts, *([self.label.doubtful] if self.confidence <= DOUBT else [])]
        told = self.code if self.cls == "unusable" else self.cause
        return any(
            self.cls in verdicts and (not cause_counts or not verdicts[self.cls] or told in verdicts[self.cls])
            for verdicts in allowed
        )

    @property
    def false_findings(self) -> list[str]:
        allowed = self.label.may.union(*self.label.must)
        return sorted(rule for rule in self.findings if rule in self.label.judged and rule not in allowed)

    @property
    def true_findings(self) -> list[str]:
        """Those that are demanded or allowed."""
        allowed = self.label.may.union(*self.label.must)
        return sorted(rule for rule in self.findings if rule in self.label.judged and rule in allowed)

    @property
    def missed(self) -> list[frozenset[str]]:
        return [group for group in self.label.must if not group & set(self.findings)]

    @property
    def serious_on_healthy(self) -> list[str]:
        return sorted(r for r, severity in self.findings.items() if severity != "info") if self.label.healthy else []


def judge(case: Case) -> Answer:
    """Diagnose a case. What-if and steps change neither verdict nor findings, and are left out."""
    with tempfile.TemporaryDirectory() as folder:
        paths, label = case.make(Path(folder))
        options = Options(window=case.window, whatif=False, steps=False)
        diagnosis = analyze_file(paths[0], options) if len(paths) == 1 else analyze_inputs(paths, options, jobs=1)
    verdict = diagnosis.verdict
    return Answer(
        case=case.name,
        source=case.source,
        label=label,
        cls=verdict.cls,
        cause=verdict.cause,
        code=verdict.code,
        confidence=verdict.confidence,
        findings={finding.rule: finding.severity for finding in diagnosis.findings},
    )
