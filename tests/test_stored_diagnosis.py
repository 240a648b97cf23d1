"""A stored diagnosis: every report comes out of its JSON as it came out of the profile, and a wrong file is explained."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from case_builders import infprof
from diagnosis_examples import EXAMPLES, launch_bound
from infprof.diagnosis import Options, analyze_file
from infprof.errors import InfprofError
from infprof.reports import REPORTS, render
from infprof.reports.json_report import schema
from infprof.resources import sample_traces_dir
from infprof.restoring import StructureError
from infprof.results import Diagnosis, Window
from infprof.stored import is_stored_diagnosis, read_stored_diagnosis

SAMPLES = sorted(sample_traces_dir().glob("*/trace.sqlite"))
LAUNCH_BOUND = sample_traces_dir() / "launch-bound-decode" / "trace.sqlite"


def stored(diagnosis: Diagnosis, folder: Path, name: str = "d.json") -> Path:
    path = folder / name
    path.write_text(render("json", diagnosis), encoding="utf-8")
    return path


def same_in_every_report(diagnosis: Diagnosis, folder: Path) -> None:
    again = read_stored_diagnosis(stored(diagnosis, folder))
    assert again == diagnosis
    for report in REPORTS:
        assert render(report.name, again) == render(report.name, diagnosis), report.name


def refused(*arguments: str | Path, code: int = 3) -> str:
    """What is said; one sentence, whatever was wrong."""
    done = infprof(*arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert re.fullmatch(r"infprof: (?!a defect of infprof)[^\n]+\n", done.stderr), done.stderr
    return done.stderr


# --- round trips --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_hand_made_diagnosis_comes_back_whole(name: str, tmp_path: Path) -> None:
    same_in_every_report(EXAMPLES[name](), tmp_path)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.parent.name)
def test_the_diagnosis_of_a_sample_comes_back_whole(path: Path, tmp_path: Path) -> None:
    same_in_every_report(analyze_file(path), tmp_path)


def test_a_window_with_holes_keeps_its_length(tmp_path: Path) -> None:
    diagnosis = analyze_file(LAUNCH_BOUND, Options(range_name="decode_step_*"))
    assert diagnosis.window.covered_ns is not None
    same_in_every_report(diagnosis, tmp_path)


def test_telemetry_is_known_of_new_and_of_old_files(tmp_path: Path) -> None:
    diagnosis = launch_bound()
    diagnosis.has_telemetry = True
    same_in_every_report(diagnosis, tmp_path)
    old = diagnosis.to_dict()
    del old["has_telemetry"]
    assert not Diagnosis.from_dict(copy.deepcopy(old)).has_telemetry
    old["measures"].append({**old["measures"][0], "name": "gpu_power_mean_watts", "source": "nvml telemetry"})
    assert Diagnosis.from_dict(old).has_telemetry


def test_the_contract_has_the_new_key() -> None:
    jsonschema.validate(launch_bound().to_dict(), schema())
    assert "has_telemetry" in schema()["properties"]


def test_keys_of_a_later_1_x_are_ignored(tmp_path: Path) -> None:
    data = launch_bound().to_dict()
    data["schema_version"] = "1.7"
    data["new"] = data["verdict"]["new"] = data["findings"][0]["where"][0]["new"] = {"a": 1}
    path = tmp_path / "later.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    again = read_stored_diagnosis(path)
    assert again.schema_version == "1.7"
    again.schema_version = "1.0"
    assert again == launch_bound()


@pytest.mark.parametrize("options", [{"sort_keys": True}, {"separators": (",", ":")}, {"indent": 8}])
def test_other_tools_may_have_rewritten_the_file(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text("\ufeff" + json.dumps(launch_bound().to_dict(), **options), encoding="utf-8")
    assert is_stored_diagnosis(path)
    assert read_stored_diagnosis(path) == launch_bound()


# --- what is none -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"schemaVersion": 1, "deviceProperties": [], "traceEvents": []}',
        '{"traceEvents": []}',
        '{"infprof": {}, "traceEvents": []}',
        '[{"ph": "X"}]',
        "{}",
        "",
        "SQLite format 3\0",
    ],
)
def test_other_files_are_left_to_the_readers(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    assert not is_stored_diagnosis(path)
    assert not is_stored_diagnosis(tmp_path) and not is_stored_diagnosis(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("verdict", "confidence"), "high", "verdict.confidence is text, not a number"),
        (("verdict", "class"), "slow", "verdict.class is 'slow', not one of compute-bound"),
        (("verdict", "cause"), 3, "verdict.cause is a whole number, not text or null"),
        (("window", "start_ns"), True, "window.start_ns is true or false, not a whole number"),
        (("window", "start_ns"), 1.5, "window.start_ns is a number, not a whole number"),
        (("window", "duration_ns"), None, "window.duration_ns is null, not a whole number"),
        (("findings", 0, "severity"), "fatal", "findings[0].severity is 'fatal'"),
        (("findings", 0, "where"), {}, "findings[0].where is an object, not a list"),
        (("findings", 0, "evidence", 0), [], "findings[0].evidence[0] is a list, not an object"),
        (("devices", 0, "slices", 1, "kind"), "busy", "devices[0].slices[1].kind is 'busy'"),
        (("devices", 0, "kernels"), None, "devices[0].kernels is null, not an object"),
        (("measures",), None, "measures is null, not a list"),
        (("timeline",), [], "timeline is a list, not an object or null"),
        (("provenance", "inputs", 0), 5, "provenance.inputs[0] is a whole number, not text"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_what_does_not_fit_is_named(place: tuple[Any, ...], value: Any, words: str) -> None:
    data: Any = launch_bound().to_dict()
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(StructureError, match=re.escape(words)):
        Diagnosis.from_dict(data)


@pytest.mark.parametrize("key", ["verdict", "window", "devices", "findings", "measures", "provenance"])
def test_a_missing_key_is_named(key: str) -> None:
    data = launch_bound().to_dict()
    del data[key]
    with pytest.raises(StructureError, match=f"{key} is missing"):
        Diagnosis.from_dict(data)
    with pytest.raises(StructureError, match="the whole is a list"):
        Diagnosis.from_dict([])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace('"1.0"', '"2.0"'), "schema version 2.0, and this infprof reads 1.x: update infprof"),
        (lambda text: text.replace('"1.0"', '"0.9"'), "schema version 0.9"),
        (lambda text: text.replace('"1.0"', "1"), "schema_version is missing or is no version"),
        (lambda text: text.replace('"schema_version": "1.0",', ""), "schema_version is missing"),
        (lambda text: text[: len(text) // 2], "damaged"),
        (lambda text: text.replace('"verdict"', '"verdikt"', 1), "verdict is missing"),
        (lambda text: '{"verdict":' * 50_000, "damaged"),
    ],
)
def test_a_wrong_file_ends_in_one_sentence(change: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(change(render("json", launch_bound())), encoding="utf-8")
    assert words in refused("report", path, "--html", tmp_path / "x.html")
    assert [p.name for p in tmp_path.iterdir()] == ["d.json"]


def test_bytes_that_are_no_text_end_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_bytes(render("json", launch_bound()).encode().replace(b"launch", b"\xff\xfe\xfd"))
    with pytest.raises(InfprofError, match="damaged"):
        read_stored_diagnosis(path)


# --- as a user ----------------------------------------------------------------------------------------------------------


def test_reports_of_a_stored_diagnosis_are_those_of_the_profile(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    names = {"--json": "r.json", "--html": "r.html", "--markdown": "r.md", "--text": "r.txt"}
    source: Path = LAUNCH_BOUND
    for folder in (first, second):
        folder.mkdir()
        files = [word for option, name in names.items() for word in (option, folder / name)]
        done = infprof("report", source, *files)
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr == "".join(
            f"infprof: wrote {folder / name}\n" for name in ("r.html", "r.json", "r.md", "r.txt")
        )
        source = first / "r.json"
    for name in names.values():
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_analyze_shows_a_stored_diagnosis_and_its_gate_works(tmp_path: Path) -> None:
    path = stored(analyze_file(LAUNCH_BOUND), tmp_path)
    assert infprof("analyze", path).stdout == infprof("analyze", LAUNCH_BOUND).stdout
    assert infprof("analyze", path, "--json").stdout == path.read_text(encoding="utf-8")
    assert infprof("analyze", path, "--fail-on", "idle_ratio > 0.3").returncode == 1
    assert infprof("analyze", path, "--fail-on", "idle_ratio > 0.9").returncode == 0


def test_an_unusable_stored_diagnosis_ends_as_its_profile_does(tmp_path: Path) -> None:
    path = stored(EXAMPLES["unusable"](), tmp_path)
    done = infprof("report", path, "-o", tmp_path / "r.md")
    assert done.returncode == 3
    assert (tmp_path / "r.md").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--html", "r.html", "--window", "full"], "--window needs the profile itself"),
        (["--html", "r.html", "--range", "step"], "--range needs the profile itself"),
        (["--html", "r.html", "--rules", "."], "--rules needs the profile itself"),
        (["--html", "r.html", "--scenario", "online"], "--scenario needs the profile itself"),
        (["--html", "r.html", "--perfetto", "t.json"], "--perfetto needs the profile itself"),
        (["-o", "t.perfetto.json"], "--perfetto needs the profile itself"),
        (["--json", "d.json", "--force"], "is the input itself"),
        (["-o", "./d.json", "--force"], "is the input itself"),
        (["--html", "r.html", "-o", "r.html"], "named for two reports"),
        (["--html", "r.html", "--markdown", "no/r.md"], "folder does not exist"),
        (["--perfetto", "t.html"], "--perfetto writes JSON"),
        ([], "name at least one file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_fit_together_is_refused_before_anything_is_written(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(launch_bound(), tmp_path)
    before = path.read_bytes()
    monkeypatch.chdir(tmp_path)
    assert words in refused("report", "d.json", *arguments, code=2)
    assert [p.name for p in tmp_path.iterdir()] == ["d.json"]
    assert path.read_bytes() == before


def test_an_existing_file_stops_all_reports_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "r.md").write_text("mine", encoding="utf-8")
    words = refused("report", LAUNCH_BOUND, "--html", tmp_path / "r.html", "--markdown", tmp_path / "r.md", code=2)
    assert "r.md exists already" in words and "--force" in words
    assert [p.name for p in tmp_path.iterdir()] == ["r.md"]


def test_a_diagnosis_names_no_window_of_its_own(tmp_path: Path) -> None:
    """A window whose length is its span has no holes, also after the round trip."""
    diagnosis = launch_bound()
    diagnosis.window = Window(0, 5, "full")
    assert Diagnosis.from_dict(diagnosis.to_dict()).window.covered_ns is None
