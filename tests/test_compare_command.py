"""``infprof compare`` as a user or a CI job meets it: the first screen, conditions and exit codes, JUnit and SARIF."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from case_builders import infprof
from fixed_specs import with_change
from infprof import __version__
from infprof.compare.gates import parse_gate
from infprof.errors import UsageError
from infprof.resources import sample_traces_dir
from infprof.simulator import load_spec, parse_spec, simulate, write_nsys_sqlite

SPEC = sample_traces_dir() / "launch-bound-decode" / "spec.yaml"
FASTER = "step_p50_ns[phase=decode] < -10%"
SLOWER = "step_p50_ns[phase=decode] > +5%"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base.sqlite, and fixed.sqlite, the same run with launches that cost nothing; base.json, its diagnosis."""
    folder = tmp_path_factory.mktemp("runs")
    spec = load_spec(SPEC)
    write_nsys_sqlite(simulate(spec), folder / "base.sqlite")
    write_nsys_sqlite(simulate(with_change(spec, "launch", 0.0)), folder / "fixed.sqlite")
    (folder / "base.json").write_text(infprof("analyze", folder / "base.sqlite", "--json").stdout, encoding="utf-8")
    return folder


def refused(*arguments: str | Path, code: int = 2) -> str:
    done = infprof("compare", *arguments)
    assert done.returncode == code, done.stderr
    assert re.fullmatch(r"infprof: (?!a defect of infprof)[^\n]+[.?]\n", done.stderr), done.stderr
    return done.stderr


# --- what is shown -----------------------------------------------------------------------------------------------------


def test_the_first_line_says_what_happened_and_no_line_is_too_long(runs: Path) -> None:
    done = infprof("compare", runs / "base.sqlite", runs / "fixed.sqlite")
    assert (done.returncode, done.stderr) == (0, "")
    first = " ".join(done.stdout.split("\n\n")[0].split())
    assert re.fullmatch(
        r"decode steps are 1\.\d\d ms faster \(−56 %; p50 2\.\d\d → 1\.\d\d ms\); "
        r"the limiter moved from launch calls to the GPU's kernels; one run each: cannot tell a regression from run-to-run "
        r"spread\.",
        first,
    )
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "HEAD made launch=0 (nothing left): BASE's what-if promised up to −56.0 %" in " ".join(done.stdout.split())
    assert re.search(r"idle: launch calls +1\.17 ms", done.stdout)


def test_the_same_input_gives_the_same_bytes(runs: Path) -> None:
    arguments = ("compare", runs / "base.sqlite", runs / "fixed.sqlite", "--json")
    assert infprof(*arguments).stdout == infprof(*arguments).stdout


def test_markdown_keeps_names_from_being_markup(tmp_path: Path) -> None:
    data = yaml.safe_load(SPEC.read_text(encoding="utf-8"))
    write_nsys_sqlite(simulate(parse_spec(data)), tmp_path / "base.sqlite")
    data["kernels"]["act"].update(name="evil|<img>_*kernel*")
    data["kernels"]["act"].pop("op", None)
    write_nsys_sqlite(simulate(parse_spec(data)), tmp_path / "head.sqlite")
    done = infprof("compare", tmp_path / "base.sqlite", tmp_path / "head.sqlite", "--markdown")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("**no difference")
    assert "evil\\|" in done.stdout and "<img>" not in done.stdout
    for table in re.findall(r"(?:^\|.*\|\n)+", done.stdout, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table


def test_json_has_a_version_and_every_part(runs: Path) -> None:
    data = json.loads(infprof("compare", runs / "base.json", runs / "fixed.sqlite", "--json").stdout)
    assert data["schema_version"] == "1.1" and next(iter(data)) == "schema_version"
    assert data["base"]["stored"] and not data["head"]["stored"]
    assert data["limiter"]["status"] == "moved" and data["limiter"]["head_class"] == "gpu-busy"
    (decode,) = (phase for phase in data["phases"] if phase["name"] == "decode")
    change = decode["p50_ns"]
    assert change["direction"] == "lower" and change["low"] < change["delta"] < change["high"] < 0
    launch = next(s for s in decode["slices"] if s["cause"] == "launch")
    assert launch["delta_ns"] == pytest.approx(launch["head_ns"] - launch["base_ns"])
    assert sum(s["base_ns"] for s in decode["slices"]) == pytest.approx(decode["mean_ns"]["base"], rel=1e-6)
    assert {"idle_launch_ratio", "step_p50_ns"} <= {row["name"] for row in data["measures"]}


# --- conditions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "code"),
    [
        (FASTER, 1),
        (SLOWER, 0),
        ("step_p50_ns < -1ms", 1),
        ("step_p50_ns < -2ms", 0),
        ("step_p50_ns[phase=decode, device=0] <= -1000us", 1),
        ("step_p50_ns > -2000000", 1),
        ("idle_launch_ratio[phase=decode] < -0.3", 1),
        ("idle_launch_ratio < -50%", 1),
        ("kernel_count >= 0", 1),
        ("kernel_count > 0", 0),
    ],
)
def test_a_condition_decides_the_exit_code(condition: str, code: int, runs: Path) -> None:
    done = infprof("compare", runs / "base.sqlite", runs / "fixed.sqlite", "--fail-on", condition)
    assert (done.returncode, done.stderr) == (code, ""), done.stdout
    assert f"{'FAILS' if code else 'passes'}: {condition.strip()}" in " ".join(done.stdout.split())


def test_one_of_several_conditions_is_enough(runs: Path) -> None:
    done = infprof("compare", runs / "base.sqlite", runs / "fixed.sqlite", "--fail-on", SLOWER, "--fail-on", FASTER)
    assert done.returncode == 1
    assert (done.stdout.count("passes: "), done.stdout.count("FAILS: ")) == (1, 1)


def test_head_is_compared_with_base_and_not_the_other_way_round(runs: Path) -> None:
    assert infprof("compare", runs / "fixed.sqlite", runs / "base.sqlite", "--fail-on", SLOWER).returncode == 1
    assert infprof("compare", runs / "fixed.sqlite", runs / "base.sqlite", "--fail-on", FASTER).returncode == 0


def test_a_condition_that_cannot_be_judged_does_not_pass_in_silence(runs: Path, tmp_path: Path) -> None:
    """A job whose measure is gone would be green for ever."""
    arguments = ("compare", runs / "base.sqlite", runs / "fixed.sqlite", "--fail-on", "dram_read_ratio < -10%")
    done = infprof(*arguments, "--junit", tmp_path / "out.xml")
    assert done.returncode == 3
    assert "could not be judged: BASE and HEAD have no dram_read_ratio" in done.stderr
    assert "NOT JUDGED" in done.stdout
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()[0]
    assert suite.get("errors") == "1" and suite.find("testcase/error") is not None
    assert infprof(*arguments, "--fail-on", FASTER).returncode == 1


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("step_p50 > +5%", "no measure `step_p50`. Did you mean `step_p50_ns`?"),
        ("step_p50_ns[phase=decod] > +5%", "no phase `decod`. Did you mean `decode`?"),
        ("step_p50_ns[phase=zzz] > +5%", "no phase `zzz`; there are: decode."),
        ("step_p50_ns[rank=1] > +5%", "in brackets write phase=NAME or device=N, not rank=1"),
        ("step_p50_ns", "write NAME > +5%"),
        ("step_p50_ns == 5%", "write NAME > +5%"),
        ("step_p50_ns > 5MB", "step_p50_ns has no unit MB; write %, ns, us, µs, ms, s, or a number in ns"),
        ("idle_ratio > 5ms", "idle_ratio has no unit ms; write %, or a number in ratio"),
        ("__import__('os') > 1", "write NAME > +5%"),
    ],
)
def test_a_wrong_condition_is_explained(condition: str, said: str, runs: Path) -> None:
    assert said in refused(runs / "base.sqlite", runs / "fixed.sqlite", "--fail-on", condition)


def test_units_are_worth_what_they_say() -> None:
    assert [parse_gate(f"step_p50_ns > {text}").limit for text in ("1s", "2.5ms", "3us", "3µs", "4")] == [
        1e9, 2.5e6, 3e3, 3e3, 4.0,
    ]  # fmt: skip
    assert parse_gate("h2d_bytes > 2MB").limit == 2e6
    percent = parse_gate("idle_ratio > -5%")
    assert (percent.relative, percent.limit) == (True, -0.05)
    with pytest.raises(UsageError):
        parse_gate("idle_ratio > five")


# --- files ----------------------------------------------------------------------------------------------------------------


def test_junit_has_a_case_for_each_condition(runs: Path, tmp_path: Path) -> None:
    done = infprof(
        "compare", runs / "base.sqlite", runs / "fixed.sqlite", "--fail-on", FASTER, "--fail-on", SLOWER,
        "--junit", tmp_path / "out.xml",
    )  # fmt: skip
    assert done.returncode == 1 and "wrote" in done.stderr
    root = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert root.tag == "testsuites"
    (suite,) = root
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == [FASTER, SLOWER]
    assert [case.find("failure") is not None for case in cases] == [True, False]
    assert "2.32 → 1.02 ms, −55.9 %" in str(cases[0].find("failure").get("message"))


def test_junit_without_conditions_is_one_test_that_passes(runs: Path, tmp_path: Path) -> None:
    assert infprof("compare", runs / "base.sqlite", runs / "fixed.sqlite", "-o", tmp_path / "out.xml").returncode == 0
    (suite,) = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("1", "0")
    assert "ms faster (−56 %; p50" in str(suite.findtext("system-out"))


def check_sarif(log: object) -> list[dict[str, object]]:
    """The parts that the schema of SARIF 2.1.0 requires, and that code-scanning views rely on; returns the results."""
    assert isinstance(log, dict) and log["version"] == "2.1.0" and "sarif-2.1.0" in log["$schema"]
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] and driver["version"] == __version__
    rules = [rule["id"] for rule in driver["rules"]]
    assert len(set(rules)) == len(rules) and all(rule["shortDescription"]["text"] for rule in driver["rules"])
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"]
        (location,) = result["locations"]
        uri = location["physicalLocation"]["artifactLocation"]["uri"]
        assert re.fullmatch(r"[\w.~%-]+", uri), "a name without folders, encoded"
    return list(run["results"])


def test_sarif_says_what_got_worse(runs: Path, tmp_path: Path) -> None:
    arguments = (runs / "fixed.sqlite", runs / "base.sqlite", "--fail-on", SLOWER, "--sarif", tmp_path / "out.sarif")
    assert infprof("compare", *arguments).returncode == 1
    results = check_sarif(json.loads((tmp_path / "out.sarif").read_text(encoding="utf-8")))
    assert [result["ruleId"] for result in results] == ["gate", "steps-slower", "limiter-moved"]
    assert [result["level"] for result in results] == ["error", "warning", "note"]
    better = (runs / "base.sqlite", runs / "fixed.sqlite", "-o", tmp_path / "better.sarif")
    assert infprof("compare", *better).returncode == 0
    results = check_sarif(json.loads((tmp_path / "better.sarif").read_text(encoding="utf-8")))
    assert [result["ruleId"] for result in results] == ["limiter-moved"]


def test_sarif_encodes_the_name_of_a_file(runs: Path, tmp_path: Path) -> None:
    shutil.copy(runs / "base.sqlite", tmp_path / "a b#c.sqlite")
    arguments = (runs / "fixed.sqlite", tmp_path / "a b#c.sqlite", "--sarif", tmp_path / "out.sarif")
    assert infprof("compare", *arguments).returncode == 0
    assert check_sarif(json.loads((tmp_path / "out.sarif").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", ("out.txt", "out.md", "out.json", "out.xml", "out.sarif", "out.sarif.json"))
def test_the_extension_chooses_the_report(name: str, runs: Path, tmp_path: Path) -> None:
    assert infprof("compare", runs / "base.json", runs / "base.json", "-o", tmp_path / name).returncode == 0
    text = (tmp_path / name).read_text(encoding="utf-8")
    start = {"txt": "no change", "md": "**no change", "json": "{", "xml": "<?xml", "sarif": "{"}
    assert text.startswith(start[name.split(".")[1]]) and text.endswith("\n")
    assert ("$schema" in text) == ("sarif" in name)


def test_files_are_not_replaced_and_inputs_never(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("mine", encoding="utf-8")
    both = (runs / "base.sqlite", runs / "fixed.sqlite")
    assert "exists already" in refused(*both, "-o", tmp_path / "there.json")
    assert infprof("compare", *both, "-o", tmp_path / "there.json", "--force").returncode == 0
    shutil.copy(runs / "base.json", tmp_path / "base.json")
    before = (tmp_path / "base.json").read_bytes()
    assert "is an input" in refused(
        tmp_path / "base.json", runs / "fixed.sqlite", "-o", tmp_path / "base.json", "--force"
    )
    assert (tmp_path / "base.json").read_bytes() == before
    assert "does not say which report" in refused(*both, "-o", tmp_path / "out.pdf")
    assert "two reports" in refused(*both, "--junit", tmp_path / "x.xml", "-o", tmp_path / "x.xml")


def test_what_does_not_go_together_is_refused(runs: Path, tmp_path: Path) -> None:
    both = (runs / "base.sqlite", runs / "fixed.sqlite")
    assert "choose one" in refused(*both, "--json", "--markdown")
    assert "does not exist" in refused(runs / "base.sqlite", tmp_path / "nothing.sqlite", code=3)
    assert "--window needs the profile itself" in refused(runs / "base.json", runs / "fixed.sqlite", "--window", "full")
    assert "from 0 to 100" in refused(*both, "--tolerance", "-1")
    assert "no such folder" in refused(*both, "--rules", tmp_path / "rules")


def test_the_diagnosis_of_several_ranks_is_no_single_run(runs: Path, tmp_path: Path) -> None:
    data = json.loads((runs / "base.json").read_text(encoding="utf-8"))
    (tmp_path / "job.json").write_text(json.dumps({**data, "ranks": [data, data]}), encoding="utf-8")
    assert "is the diagnosis of 2 ranks: compare takes one run on each side" in refused(
        tmp_path / "job.json", runs / "base.json"
    )


def test_a_larger_tolerance_claims_less(runs: Path, tmp_path: Path) -> None:
    write_nsys_sqlite(simulate(with_change(load_spec(SPEC), "kernel", 0.5)), tmp_path / "head.sqlite")
    both = ("compare", runs / "base.sqlite", tmp_path / "head.sqlite")
    assert infprof(*both).stdout.startswith("decode steps are 51.2 µs faster (−2.2 %; p50")
    assert infprof(*both, "--tolerance", "5").stdout.startswith("no difference of 5 % or more (decode p50")
