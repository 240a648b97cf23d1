"""The pages of the rules: those in docs/rules are what the rule files say, and all of it is on them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from infprof import rules
from infprof.resources import rules_dir

PAGES = Path(__file__).resolve().parent.parent / "docs" / "rules"
SHIPPED = rules.load([rules_dir()])
MAKE = "infprof rules docs docs/rules --force"


def test_the_pages_in_the_documentation_are_current() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in PAGES.iterdir()}
    texts = rules.pages(SHIPPED)
    assert sorted(written) == sorted(texts), f"a rule came or went: {MAKE}"
    assert [name for name, text in texts.items() if written[name] != text] == [], f"make them anew: {MAKE}"


@pytest.mark.parametrize("rule", SHIPPED.rules, ids=lambda rule: rule.id)
def test_a_page_says_all_that_its_rule_says(rule: rules.Rule) -> None:
    page = rules.pages(SHIPPED)[f"{rule.id}.md"]
    assert f"```\n{rule.when.text}\n```" in page
    plain = re.sub(r"[\\`]", "", page)
    said = [rule.title, rule.why, rule.quiet_when, *rule.references, *(case.name for case in rule.cases)]
    said += [text for r in rule.remedies for text in (r.change, r.trade_off) if text]
    said += [rule.gain.basis, rule.gain.source] if rule.gain is not None else []
    said += [text.because for text in rule.doubts] + [note.text for note in rule.notes]
    assert [text for text in said if re.sub(r"[\\`]", "", text) not in plain] == []
    assert str(rule.path.parent) not in page


def test_nothing_in_a_rule_becomes_markup() -> None:
    text = "".join(rules.pages(SHIPPED).values())
    without_code = re.sub(r"```.*?```|`[^`\n]*`", "", text.replace("<!-- ", "").replace(" -->", ""), flags=re.S)
    assert re.findall(r"(?<!\\)[<~]|(?<!\\)\*(?!\*)(?<!\*\*)", without_code) == []
    assert text.count("`") % 2 == 0


def test_the_index_leads_to_every_page() -> None:
    linked = re.findall(r"\]\(([\w-]+)\.md\)", rules.pages(SHIPPED)["README.md"])
    assert sorted(linked) == sorted(rule.id for rule in SHIPPED.rules)


def infprof(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infprof.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_writes_pages_of_ones_own_rules_too_and_replaces_none_by_accident(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    shipped = next(rule for rule in SHIPPED.rules if rule.id == "launch-bound")
    text = shipped.path.read_text(encoding="utf-8")
    (mine / "my-own.yaml").write_text(text.replace("id: launch-bound", "id: my-own"), encoding="utf-8")
    target = tmp_path / "new" / "pages"
    first = infprof("rules", "docs", target, "--rules", mine)
    assert first.returncode == 0, first.stderr
    assert {path.stem for path in target.iterdir()} == {"README", "my-own", *(rule.id for rule in SHIPPED.rules)}
    again = infprof("rules", "docs", target)
    assert again.returncode == 2 and "exists already" in again.stderr
    assert infprof("rules", "docs", target, "--force").returncode == 0
