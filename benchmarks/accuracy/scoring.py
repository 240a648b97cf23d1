"""Figures of a set of answers: accuracy of verdicts, precision and recall of each rule, and what is taken for what."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.accuracy.judging import Answer


@dataclass(frozen=True)
class RuleScore:
    """``fired`` where judged, ``right`` of them; ``wanted``: demanded of it, ``found`` of them. None without any."""

    fired: int
    right: int
    wanted: int
    found: int

    @property
    def precision(self) -> float | None:
        return self.right / self.fired if self.fired else None

    @property
    def recall(self) -> float | None:
        return self.found / self.wanted if self.wanted else None


@dataclass(frozen=True)
class Score:
    """``not_judged``: findings of rules that no label speaks of, by rule. ``mistakes`` are sentences."""

    cases: int
    class_right: int
    cause_right: int
    sources: dict[str, tuple[int, int, int]]
    rules: dict[str, RuleScore]
    confusions: dict[str, dict[str, int]]
    healthy: int
    healthy_with_serious: int
    not_judged: dict[str, int]
    mistakes: list[str]

    @property
    def class_accuracy(self) -> float:
        return self.class_right / self.cases

    @property
    def cause_accuracy(self) -> float:
        return self.cause_right / self.cases

    def to_dict(self) -> dict[str, Any]:
        rules = {
            rule: {**asdict(score), "precision": score.precision, "recall": score.recall}
            for rule, score in self.rules.items()
        }
        figures = {"class_accuracy": self.class_accuracy, "cause_accuracy": self.cause_accuracy}
        return {**asdict(self), "rules": rules, **figures}


def score(answers: Sequence[Answer]) -> Score:
    """Count. Raises ValueError for no answer at all."""
    if not answers:
        raise ValueError("there is no answer to score")
    by_source: dict[str, list[Answer]] = defaultdict(list)
    confusions: dict[str, Counter[str]] = defaultdict(Counter)
    not_judged: Counter[str] = Counter()
    for answer in answers:
        by_source[answer.source].append(answer)
        confusions[answer.label.expected][answer.cls] += 1
        not_judged.update(set(answer.findings) - answer.label.judged)
    return Score(
        cases=len(answers),
        class_right=sum(a.class_is_right for a in answers),
        cause_right=sum(a.cause_is_right for a in answers),
        sources={
            source: (len(some), sum(a.class_is_right for a in some), sum(a.cause_is_right for a in some))
            for source, some in sorted(by_source.items())
        },
        rules=_rules(answers),
        confusions={expected: dict(sorted(row.items())) for expected, row in sorted(confusions.items())},
        healthy=sum(a.label.healthy for a in answers),
        healthy_with_serious=sum(bool(a.serious_on_healthy) for a in answers),
        not_judged=dict(sorted(not_judged.items())),
        mistakes=[sentence for a in answers for sentence in _mistakes(a)],
    )


def _rules(answers: Iterable[Answer]) -> dict[str, RuleScore]:
    right, wrong, wanted, found = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for answer in answers:
        right.update(answer.true_findings)
        wrong.update(answer.false_findings)
        for group in answer.label.must:
            # Where one of several is demanded, each that came has met it; where none came, each has missed it.
            met = group & set(answer.findings)
            wanted.update(met or group)
            found.update(met)
    names = sorted({*right, *wrong, *wanted})
    return {name: RuleScore(right[name] + wrong[name], right[name], wanted[name], found[name]) for name in names}


def _mistakes(answer: Answer) -> Iterable[str]:
    if not answer.cause_is_right:
        said = "/".join(filter(None, (answer.cls, answer.cause or answer.code)))
        wanted = ", ".join(f"{c}/{'|'.join(sorted(causes)) or '*'}" for c, causes in answer.label.verdicts.items())
        yield f"{answer.case}: {said} (confidence {answer.confidence:g}), wanted {wanted}"
    for rule in answer.false_findings:
        yield f"{answer.case}: {rule} ({answer.findings[rule]}) without reason"
    for group in answer.missed:
        yield f"{answer.case}: {' or '.join(sorted(group))} is missing"
    for rule in answer.serious_on_healthy:
        yield f"{answer.case}: healthy, but {rule} is {answer.findings[rule]}"


def as_text(result: Score) -> str:
    lines = [
        f"{result.cases} cases: class right in {result.class_accuracy:.1%}, class and cause in {result.cause_accuracy:.1%}; "
        f"{result.healthy} healthy runs, {result.healthy_with_serious} of them with a finding above info",
        "",
        f"{'part':<12} {'cases':>6} {'class':>7} {'cause':>7}",
    ]
    for source, (count, cls, cause) in result.sources.items():
        lines.append(f"{source:<12} {count:>6} {cls / count:>7.1%} {cause / count:>7.1%}")
    lines += ["", f"{'rule':<28} {'fired':>6} {'precision':>10} {'wanted':>7} {'recall':>7}"]
    for rule, s in result.rules.items():
        lines.append(f"{rule:<28} {s.fired:>6} {_share(s.precision):>10} {s.wanted:>7} {_share(s.recall):>7}")
    lines += ["", "right answer → what was said"]
    for expected, row in result.confusions.items():
        lines.append(f"  {expected}: " + ", ".join(f"{cls} {count}" for cls, count in row.items()))
    if result.not_judged:
        lines += ["", "not judged: " + ", ".join(f"{rule} {count}" for rule, count in result.not_judged.items())]
    if result.mistakes:
        lines += ["", "mistakes", *(f"  {sentence}" for sentence in result.mistakes)]
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
