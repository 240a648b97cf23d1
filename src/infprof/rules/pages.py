"""Rules as Markdown: a page for each, and an index by area. The files say all; the pages only lay it out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from infprof.measures.names import MEASURES
from infprof.rules.describing import facts, judgement
from infprof.rules.loading import RuleSet
from infprof.rules.model import AREAS, Case, Rule

INDEX = "README.md"
_GENERATED = "<!-- Generated from the rule files by `infprof rules docs`: change those. -->"
_STACKS = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tensorrt-llm": "TensorRT-LLM",
    "pytorch": "PyTorch",
    "cuda": "CUDA",
    "rocm": "ROCm",
}
_MARKUP = re.compile(r"([\\`*_\[\]<>|#~$])")
# What looks like something to type: a condition's names, an option, a call.
_CODE = re.compile(
    r"(?<![\w`])(--[a-z][\w-]*(?:\.\w+)*(?: '[^']*')?|\w+(?:\.\w+)+\(\)|[a-z][a-z0-9]*(?:_[a-z0-9]+)+"
    r"|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)"
)


def pages(ruleset: RuleSet) -> dict[str, str]:
    """The text of every page by file name: ``ID.md`` of each rule, and the index ``README.md``."""
    return {INDEX: _index(ruleset), **{f"{rule.id}.md": page(rule) for rule in ruleset.rules}}


def page(rule: Rule) -> str:
    """All that a rule says as a Markdown page."""
    blocks = [
        _GENERATED,
        f"# {_text(rule.title)}",
        f"`{rule.id}`: {'; '.join(map(_text, facts(rule)))}.",
        _text(rule.why),
        "## Fires when",
        f"```\n{rule.when.text}\n```",
        "## What to change",
        *_remedies(rule),
        "## Keeps quiet when",
        _text(rule.quiet_when),
        "## Evidence",
        _table(
            ("measure", "unit", "is"), ((f"`{n}`", MEASURES[n].unit, _text(MEASURES[n].meaning)) for n in rule.evidence)
        ),
        "## How it is judged",
        _list(judgement(rule)),
        "## Cases",
        _table(("case", "measures", "expected"), map(_case, rule.cases)),
        "## References",
        _list(rule.references),
        f"[All rules]({INDEX})",
    ]
    return "\n\n".join(blocks) + "\n"


def _index(ruleset: RuleSet) -> str:
    blocks = [
        _GENERATED,
        "# The rules",
        "Each turns measures into a finding, or explains a verdict. infprof's documentation says how rules are written "
        "(rules.md) and how a verdict is reached (verdicts.md).",
    ]
    for area in AREAS:
        rules = sorted((rule for rule in ruleset.rules if rule.area == area), key=lambda rule: rule.id)
        if rules:
            rows = ((f"[{rule.id}]({rule.id}.md)", _title(rule), rule.layer, rule.approach) for rule in rules)
            blocks += [f"## {area.capitalize()}", _table(("rule", "says", "layer", "change of"), rows)]
    return "\n\n".join(blocks) + "\n"


def _title(rule: Rule) -> str:
    return f"verdict: {_text(rule.title)}" if rule.states else _text(rule.title)


def _remedies(rule: Rule) -> list[str]:
    blocks = []
    for stack, remedies in groupby(rule.remedies, key=lambda remedy: remedy.stack):
        lines = [
            remedy.change if remedy.trade_off is None else f"{remedy.change} Trade-off: {remedy.trade_off}"
            for remedy in remedies
        ]
        blocks += [f"**{_STACKS.get(stack, stack)}**", _list(lines)]
    return blocks


def _case(case: Case) -> tuple[str, str, str]:
    given = [f"`{name}` {'absent' if value is None else f'{value:,}'}" for name, value in case.measures.items()]
    expected = case.expect if case.severity is None else f"{case.expect}, {case.severity}"
    return _text(case.name), ", ".join(given) or "nothing measured", expected


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {_text(item)}" for item in items)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _text(words: str) -> str:
    """Prose with what can be typed as code; the rest without any markup."""
    pieces = _CODE.split(words)
    return "".join(f"`{piece}`" if number % 2 else _MARKUP.sub(r"\\\1", piece) for number, piece in enumerate(pieces))
