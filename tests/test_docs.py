"""The documentation's examples work, its links lead somewhere, and its closed lists are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infprof import resources, results, rules
from infprof.rules.model import APPROACHES, AREAS, LAYERS, REMEDY_KINDS, SCENARIOS, STACKS, TABLES

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def _page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text(encoding="utf-8")


def _anchor(heading: str) -> str:
    """The anchor that code hosts give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M) if file.suffix == ".md" else []
        if not file.exists() or (anchor and anchor not in map(_anchor, headings)):
            wrong.append(target)
    assert wrong == []


def test_the_example_rule_loads_and_its_cases_hold(tmp_path: Path) -> None:
    example, thresholds = re.findall(r"```yaml\n(.*?)```", _page("rules.md"), re.S)
    (tmp_path / "tiny-copies.yaml").write_text(example, encoding="utf-8")
    (tmp_path / "thresholds.yaml").write_text(thresholds, encoding="utf-8")
    ruleset = rules.load([resources.rules_dir(), tmp_path])
    assert [str(broken) for broken in ruleset.broken if broken.path.parent == tmp_path] == []
    assert ruleset.thresholds.recoverable_idle == 0.10
    outcomes = [result for result in rules.test_rules(ruleset) if result.rule == "tiny-copies"]
    assert [(result.expected, result.ok) for result in outcomes] == [
        ("fires, warning", True),
        ("quiet", True),
        ("not evaluated", True),
    ]


def test_every_section_of_a_rule_is_explained() -> None:
    from infprof.rules import loading

    explained = set(re.findall(r"`(\w+)`", _page("rules.md")))
    assert {*loading._KEYS, *loading._FINDING_KEYS, *loading._OPTIONAL_KEYS} <= explained


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("rules.md", (*AREAS, *LAYERS, *SCENARIOS, *REMEDY_KINDS, *APPROACHES, *STACKS, *TABLES)),
        ("json.md", (*results.VERDICT_CLASSES, *results.IDLE_CAUSES, *results.COPY_CAUSES, *results.SLICE_KINDS)),
        ("json.md", (*results.UNUSABLE_CODES, *results.SEVERITIES, *AREAS, *LAYERS, *SCENARIOS, *REMEDY_KINDS)),
        ("verdicts.md", (*results.VERDICT_CLASSES, *results.IDLE_CAUSES, *results.UNUSABLE_CODES)),
    ],
)
def test_closed_lists_are_given_whole(page: str, words: tuple[str, ...]) -> None:
    named = set(re.findall(r"`([\w-]+)`", _page(page)))
    assert [word for word in words if word not in named] == []


def test_every_key_of_a_diagnosis_is_explained() -> None:
    verdict = results.Verdict("gpu-busy", None, None, "C", 0.5, "busy")
    provenance = results.Provenance("nsys", None, [], {}, [], "0")
    diagnosis = results.Diagnosis(verdict, results.Window(0, 1, "full"), [], [], [], [], [], provenance)
    data = diagnosis.to_dict()
    explained = set(re.findall(r"`(\w+)`", _page("json.md")))
    for part in (data, data["verdict"], data["window"], data["provenance"]):
        assert [key for key in part if key not in explained] == []
    finding_keys = results.Finding.__dataclass_fields__
    assert [key for key in finding_keys if key not in explained] == []


def test_ci_runs_the_readmes_test_command() -> None:
    commands = (REPOSITORY / "README.md").read_text(encoding="utf-8").split("```")[1].split("\n")
    assert [c for c in commands if c] == [
        "python3 -m venv .venv && .venv/bin/pip install -q -e '.[dev]' && .venv/bin/infprof demo",
        ".venv/bin/python -m pytest",
    ]
    assert commands[2] in (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8").splitlines()
