"""Whether diagnoses of the workload say what they must: fault by fault, recorder by recorder, and as a table.

What must be said is the expectation that ``infprof workload list --json`` prints; what was said is a diagnosis as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["right", "wrong", "missed", "left out"]
# These classes claim nothing: where another is expected, it was missed and not mistaken.
_CLAIM_NOTHING = ("unusable", "gpu-busy")
_NO_GPU: Mapping[str, Any] = {"classes": ["unusable"], "codes": ["no-gpu-work"], "causes": [], "findings": []}


@dataclass(frozen=True)
class Check:
    """One fault under one recorder. ``why`` says what is not right, or why it was left out; None where all is."""

    fault: str
    backend: str
    outcome: Outcome
    said: str = ""
    expected: str = ""
    why: str | None = None
    rank: str | None = None
    confidence: float | None = None
    findings: Sequence[str] = ()
    seconds: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; ``seconds`` is how long it took to record and to diagnose."""
        return {**asdict(self), "findings": list(self.findings), "details": dict(self.details)}


def expectation_without_gpu() -> Mapping[str, Any]:
    """What every diagnosis must say where the workload ran on the CPU."""
    return _NO_GPU


def check(fault: str, backend: str, diagnosis: Mapping[str, Any] | None, expected: Mapping[str, Any]) -> Check:
    """Compare a diagnosis with what it must say: ``expected`` has classes, causes, findings, and where it matters codes.

    A diagnosis that names another limit is wrong; one that names none, or lacks the finding, has missed it. None for the
    diagnosis means that there is none, which misses everything.
    """
    wanted = expected_text(expected)
    if diagnosis is None:
        return Check(fault, backend, "missed", "no diagnosis", wanted, "nothing was diagnosed")
    verdict = diagnosis["verdict"]
    found = [row["rule"] for row in diagnosis.get("findings", [])]
    outcome, why = _outcome(verdict, found, expected)
    return Check(
        fault,
        backend,
        outcome,
        verdict_text(verdict),
        wanted,
        why,
        verdict.get("rank"),
        verdict.get("confidence"),
        tuple(found),
    )


def _outcome(
    verdict: Mapping[str, Any], found: Sequence[str], expected: Mapping[str, Any]
) -> tuple[Outcome, str | None]:
    name, cause, code = (verdict.get(key) for key in ("class", "cause", "code"))
    if name not in expected["classes"]:
        return ("missed" if name in _CLAIM_NOTHING else "wrong"), f"the class is {name}"
    if expected.get("codes") and code not in expected["codes"]:
        return "wrong", f"the code is {code}"
    if expected["causes"] and cause not in expected["causes"]:
        return ("missed" if cause in (None, "unknown") else "wrong"), f"the cause is {cause or 'not named'}"
    if expected["findings"] and not set(found) & set(expected["findings"]):
        return "missed", f"no finding {' or '.join(expected['findings'])}"
    return "right", None


def verdict_text(verdict: Mapping[str, Any]) -> str:
    """A verdict in a few characters: ``scheduling-bubble/sync``."""
    return "/".join(str(verdict[key]) for key in ("class", "cause", "code") if verdict.get(key))


def expected_text(expected: Mapping[str, Any]) -> str:
    """An expectation in one line: classes, causes, findings."""
    parts = [" or ".join(expected["classes"])]
    parts += [" or ".join(expected[key]) for key in ("causes", "codes") if expected.get(key)]
    if expected["findings"]:
        parts.append(f"with {' or '.join(expected['findings'])}")
    return "; ".join(parts)


def table_text(checks: Iterable[Check]) -> str:
    """The table fault × recorder, what is not right in full, where the recorders disagree, and what was left out."""
    rows = list(checks)
    tried = [row for row in rows if row.outcome != "left out"]
    lines = _grid(tried)
    bad = [row for row in tried if row.outcome != "right"]
    lines += ["", "Not right"] if bad else []
    for row in bad:
        lines.append(f"  {row.fault} under {row.backend}, {row.outcome}: {row.why}; expected {row.expected}")
    lines += _disagreements(tried)
    out = [row for row in rows if row.outcome == "left out"]
    if out:
        lines += ["", "Left out"]
        lines += [f"  {cells} ({reason})" for reason, cells in _by_reason(out).items()]
    counts = {name: sum(row.outcome == name for row in rows) for name in ("right", "wrong", "missed", "left out")}
    return "\n".join([*lines, "", ", ".join(f"{count} {name}" for name, count in counts.items())]) + "\n"


def _grid(rows: Sequence[Check]) -> list[str]:
    backends = list(dict.fromkeys(row.backend for row in rows))
    cells = {(row.fault, row.backend): f"{row.outcome}: {row.said}" for row in rows}
    widths = [max(len(b), *(len(text) for (_, of), text in cells.items() if of == b)) + 2 for b in backends]
    head = f"{'fault':<16}" + "".join(f"{b:<{w}}" for b, w in zip(backends, widths, strict=True))
    lines = [head.rstrip()]
    for fault in dict.fromkeys(row.fault for row in rows):
        texts = (f"{cells.get((fault, b), '-'):<{w}}" for b, w in zip(backends, widths, strict=True))
        lines.append(f"{fault:<16}{''.join(texts)}".rstrip())
    return lines


def _disagreements(rows: Sequence[Check]) -> list[str]:
    lines = []
    for fault in dict.fromkeys(row.fault for row in rows):
        said = {row.backend: row.said for row in rows if row.fault == fault and row.said != "no diagnosis"}
        if len(set(said.values())) > 1:
            lines.append(f"  {fault}: " + ", ".join(f"{text} under {backend}" for backend, text in said.items()))
    return ["", "The recorders disagree", *lines] if lines else []


def _by_reason(rows: Sequence[Check]) -> dict[str, str]:
    """The faults by recorder, for each reason why they were left out."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        reason = (row.why or "no reason").rstrip(".")
        reasons.setdefault(reason, {}).setdefault(row.backend, []).append(row.fault)
    return {
        reason: "; ".join(f"{backend}: {', '.join(faults)}" for backend, faults in cells.items())
        for reason, cells in reasons.items()
    }
