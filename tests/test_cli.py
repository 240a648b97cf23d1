"""The command line as a user or a pipeline meets it: exit codes, streams, files, and the answers of the samples."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from case_builders import MS, US, infprof
from infprof import __version__
from infprof.diagnosis import Options, analyze_file
from infprof.reports.json_report import schema
from infprof.resources import sample_traces_dir
from infprof.simulator.builder import TraceBuilder

SAMPLES = sorted(p.parent for p in sample_traces_dir().glob("*/trace.sqlite"))
LAUNCH_BOUND = sample_traces_dir() / "launch-bound-decode" / "trace.sqlite"
HEALTHY = sample_traces_dir() / "healthy" / "trace.sqlite"
ESCAPE = "\x1b"


def one_line(text: str) -> bool:
    """One sentence, which may end with a question: did you mean …?"""
    return re.fullmatch(r"infprof: (?!a defect of infprof)[^\n]+[.?]\n", text) is not None


def refused(*arguments: str | Path) -> str:
    """What is said of a wrong command line; nothing stands on stdout."""
    done = infprof(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert one_line(done.stderr), done.stderr
    return done.stderr


def environment(**changes: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")} | changes


# --- exit codes -------------------------------------------------------------------------------------------------------


def test_a_diagnosis_ends_with_0_whatever_it_says() -> None:
    for trace in (LAUNCH_BOUND, HEALTHY):
        done = infprof("analyze", trace)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("\n")


@pytest.mark.parametrize(
    ("trace", "gate", "code"),
    [
        (LAUNCH_BOUND, "critical", 1),
        (LAUNCH_BOUND, "warning", 1),
        (HEALTHY, "warning", 0),
        (LAUNCH_BOUND, "idle_ratio > 0.1", 1),
        (LAUNCH_BOUND, "idle_ratio > 0.1 and not kernel_count < 10", 1),
        (LAUNCH_BOUND, "idle_ratio > 0.99", 0),
        (HEALTHY, "idle_ratio > 0.1", 0),
        # What cannot be computed does not hold.
        (HEALTHY, "idle_ratio / (idle_ratio - idle_ratio) > 1", 0),
    ],
)
def test_fail_on_ends_with_1_after_the_report(trace: Path, gate: str, code: int) -> None:
    done = infprof("analyze", trace, "--fail-on", gate)
    assert done.returncode == code, done.stderr
    assert done.stdout == infprof("analyze", trace).stdout
    assert "defect" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nope"], "No such option"),
        (["--fail-on", "warn"], "warn"),
        (["--fail-on", "idle_ration > 0.1"], "idle_ratio"),
        (["--fail-on", "idle_ratio >"], "idle_ratio >"),
        (["--fail-on", "__import__('os')"], "--fail-on"),
        (["--fail-on", ""], "--fail-on"),
        (["--window", "yesterday"], "--window yesterday"),
        (["--window", "2s:1s"], "ends before it starts"),
        (["--window", "1:2"], "no time with a unit"),
        (["--window", "10s:20s"], "holds no GPU operation"),
        (["--window", "0s:99999999999s"], "--window"),
        (["--range", "decode_stop_7"], "Did you mean"),
        (["--range", "decode_step_7", "--window", "0s:2s"], "exclude each other"),
        (["--scenario", "offline"], "online, batch or mixed"),
        (["--rules", "/no/such/folder"], "no such folder"),
        (["--json", "--markdown"], "choose one"),
        (["-o", "report.pdf"], "extension"),
        (["-o", "/no/such/folder/report.json"], "folder does not exist"),
        (["second.sqlite"], "second.sqlite"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_end_with_2_and_one_sentence(arguments: list[str], words: str) -> None:
    assert words in refused("analyze", LAUNCH_BOUND, *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["analyze"], "INPUT"),
        (["analyse", "trace.sqlite"], "No such command"),
        (["demo", "helthy"], "Did you mean healthy?"),
        (["rules", "show", "launch-bond"], "launch-bound"),
        (["report", str(HEALTHY)], "name at least one file"),
        (["simulate", str(HEALTHY.with_name("spec.yaml"))], "--output"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_wrong_commands_end_with_2_and_one_sentence(arguments: list[str], words: str) -> None:
    assert words in refused(*arguments)


def test_the_range_hint_can_be_used() -> None:
    near = re.search(r"Did you mean '([^']+)'", refused("analyze", LAUNCH_BOUND, "--range", "decode_stop_7"))
    assert near
    assert infprof("analyze", LAUNCH_BOUND, "--range", near[1]).returncode == 0


@pytest.mark.parametrize("output", [[], ["--json"], ["--markdown"]])
def test_an_unusable_trace_ends_with_3_and_a_diagnosis(output: list[str], tmp_path: Path) -> None:
    builder = TraceBuilder()
    for i in range(20):
        builder.osrt(i * MS, i * MS + 100 * US, "poll")
    path = builder.write(tmp_path / "cpu.sqlite")
    done = infprof("analyze", path, *output, "--fail-on", "info")
    assert done.returncode == 3
    assert one_line(done.stderr)
    if output == ["--json"]:
        assert json.loads(done.stdout)["verdict"]["code"] == "no-gpu-work"
    else:
        assert "no GPU work" in done.stdout


# --- streams and formats ----------------------------------------------------------------------------------------------


def test_version() -> None:
    done = infprof("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"infprof {__version__}\n", "")


@pytest.mark.parametrize("command", ["", "analyze", "report", "demo", "simulate", "doctor", "rules", "rules test"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = infprof(*command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage:" in done.stdout
    assert "Example:" in done.stdout or command == "rules"


@pytest.mark.parametrize("command", [[], ["rules"]])
def test_without_arguments_the_help_is_shown(command: list[str]) -> None:
    done = infprof(*command)
    shown = done.stdout + done.stderr
    assert done.returncode in (0, 2)
    assert shown.lstrip().startswith("Usage:")
    assert "See `infprof --help`" not in shown


def test_piped_output_is_plain_and_80_columns_wide() -> None:
    for sample in SAMPLES[:3]:
        command = [sys.executable, "-m", "infprof", "analyze", str(sample / "trace.sqlite")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment())
        assert ESCAPE not in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80


def test_what_speeds_infprof_up_is_not_handed_on(tmp_path: Path) -> None:
    """Programs that infprof starts see the environment that it was started with."""
    code = (
        "import os, sys; from infprof.cli import main; before = dict(os.environ)\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('same' if dict(os.environ) == before else 'changed')"
    )
    command = [sys.executable, "-c", code, "analyze", str(SAMPLES[0] / "trace.sqlite")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment())
    assert done.stdout.splitlines()[-1] == "same"


def in_a_terminal(*arguments: str | Path, **variables: str) -> str:
    """The output with a pseudo-terminal of 100 columns as stdout."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    command = [sys.executable, "-m", "infprof.cli", *map(str, arguments)]
    env = environment(TERM="xterm-256color", **variables)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, env=env) as process:
        os.close(theirs)
        pieces = []
        try:
            while piece := os.read(ours, 65536):
                pieces.append(piece)
        except OSError:
            pass  # Linux reports the end of a pseudo-terminal as an error
        finally:
            os.close(ours)
    assert process.returncode == 0
    return b"".join(pieces).decode().replace("\r\n", "\n")


def test_colour_is_for_terminals_without_no_color() -> None:
    plain = in_a_terminal("analyze", LAUNCH_BOUND, NO_COLOR="1")
    coloured = in_a_terminal("analyze", LAUNCH_BOUND)
    assert ESCAPE not in plain
    assert ESCAPE in coloured
    without = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()]
    assert without == [line.rstrip() for line in plain.splitlines()]
    assert 80 < max(map(len, plain.splitlines())) <= 100


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda p: p.name)
def test_json_keeps_its_schema(sample: Path) -> None:
    done = infprof("analyze", sample / "trace.sqlite", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    jsonschema.Draft202012Validator(schema()).validate(json.loads(done.stdout))


@pytest.mark.parametrize("output", [["--json"], ["--markdown"], []])
def test_the_same_input_gives_the_same_bytes(output: list[str], tmp_path: Path) -> None:
    """Also under another seed of Python's hashes and at another place."""
    copy = tmp_path / "trace.sqlite"
    shutil.copyfile(LAUNCH_BOUND, copy)
    outputs = {
        subprocess.run(
            [sys.executable, "-m", "infprof.cli", "analyze", str(path), *output],
            capture_output=True,
            timeout=60,
            check=True,
            env=environment(PYTHONHASHSEED=seed),
        ).stdout
        for seed, path in (("1", LAUNCH_BOUND), ("2", LAUNCH_BOUND), ("3", copy))
    }
    assert len(outputs) == 1


def test_html_is_the_same_twice_and_not_overwritten(tmp_path: Path) -> None:
    first, second = tmp_path / "a.html", tmp_path / "b.html"
    done = infprof("analyze", LAUNCH_BOUND, "--html", first)
    assert done.returncode == 0
    assert done.stderr == f"infprof: wrote {first}\n"
    assert infprof("report", LAUNCH_BOUND, "--html", second).returncode == 0
    assert first.read_bytes() == second.read_bytes()
    first.write_text("mine", encoding="utf-8")
    assert "--force" in refused("analyze", LAUNCH_BOUND, "--html", first)
    assert first.read_text(encoding="utf-8") == "mine"
    assert infprof("analyze", LAUNCH_BOUND, "--html", first, "--force").returncode == 0
    assert first.read_bytes() == second.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_the_extension_says_what_is_written(tmp_path: Path) -> None:
    for name, option in (("r.json", "--json"), ("r.md", "--markdown")):
        target = tmp_path / name
        done = infprof("report", LAUNCH_BOUND, "-o", target)
        assert (done.returncode, done.stdout) == (0, "")
        assert target.read_text(encoding="utf-8") == infprof("analyze", LAUNCH_BOUND, option).stdout
    done = infprof("analyze", LAUNCH_BOUND, "-o", tmp_path / "r.HTML")
    assert done.returncode == 0
    assert (tmp_path / "r.HTML").read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    # The report is shown all the same.
    assert done.stdout.startswith("Scheduling bubble")


@pytest.mark.parametrize(
    "arguments", ["analyze TRACE", "analyze TRACE --json", "demo", "rules list", "rules test", "doctor"]
)
def test_a_reader_that_went_away_is_no_error(arguments: str) -> None:
    """As with `| head`: nothing to say, and above all not the exit code of a finding."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "infprof.cli", *arguments.replace("TRACE", str(LAUNCH_BOUND)).split(" ")]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writing)
    assert done.returncode in (0, -signal.SIGPIPE), done.stderr
    assert "Traceback" not in done.stderr and "Broken pipe" not in done.stderr and "Exception" not in done.stderr


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "infprof.cli", "analyze", str(LAUNCH_BOUND)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert one_line(done.stderr) and "No space left" in done.stderr, done.stderr


# --- demo, simulate, doctor -------------------------------------------------------------------------------------------


def test_demo_needs_no_arguments() -> None:
    done = infprof("demo")
    assert done.returncode == 0
    assert done.stdout == infprof("analyze", LAUNCH_BOUND).stdout
    assert done.stderr.startswith("infprof: diagnosing the sample launch-bound-decode")


def test_demo_lists_and_takes_every_sample(tmp_path: Path) -> None:
    done = infprof("demo", "--list")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [p.name for p in SAMPLES]
    page = tmp_path / "demo.html"
    done = infprof("demo", "pcie-limited-offload", "--html", page)
    assert done.returncode == 0 and page.stat().st_size > 1000
    assert "PCIe" in done.stdout.splitlines()[0]


def test_simulate_writes_what_analyze_diagnoses(tmp_path: Path) -> None:
    target = tmp_path / "new.sqlite"
    spec = sample_traces_dir() / "sync-per-token" / "spec.yaml"
    done = infprof("simulate", spec, "-o", target)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"infprof: wrote {target}\n")
    found = json.loads(infprof("analyze", target, "--json").stdout)
    assert (found["verdict"]["class"], found["verdict"]["cause"]) == ("scheduling-bubble", "sync")
    written = target.read_bytes()
    assert "--force" in refused("simulate", spec, "-o", target)
    assert target.read_bytes() == written
    assert infprof("simulate", spec, "-o", target, "--force").returncode == 0
    assert target.read_bytes() == written


def test_simulate_names_what_is_wrong_with_a_description(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("devices: 3\n", encoding="utf-8")
    done = infprof("simulate", tmp_path / "spec.yaml", "-o", tmp_path / "new.sqlite")
    assert done.returncode == 2
    assert one_line(done.stderr) and "spec.yaml" in done.stderr, done.stderr
    assert not (tmp_path / "new.sqlite").exists()


def test_doctor_always_ends_with_0() -> None:
    done = infprof("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert ESCAPE not in done.stdout
    assert json.loads(infprof("doctor", "--json").stdout)


# --- rules ------------------------------------------------------------------------------------------------------------

RULE = """\
id: few-kernels
title: Only a few kernels ran
area: scheduling
layer: framework
scenarios: [online, batch, mixed]
remedy_kind: configuration
needs: [kernels]
when: kernel_count >= 10
cost: idle_launch_ns
severity: warning
confidence: 0.9
why: The test says so.
evidence: [kernel_count, idle_launch_ns]
where: idle:launch
remedies:
  vllm:
    - change: Do something else.
gain:
  low: 0.1
  high: 0.2
  basis: None at all.
  source: made up
quiet_when: Never.
references: ["a test"]
cases:
  - {name: many, kernel_count: 100, idle_launch_ns: 5, window_ns: 1000, expect: fires, severity: warning}
  - {name: few, kernel_count: 1, idle_launch_ns: 0, expect: quiet}
  - {name: no kernels, kernel_count: null, expect: not evaluated}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "few-kernels.yaml").write_text(RULE, encoding="utf-8")
    return tmp_path


def test_the_rules_that_ship_hold() -> None:
    done = infprof("rules", "test")
    assert (done.returncode, done.stderr) == (0, "")
    count = re.fullmatch(r"(\d+) of (\d+) cases of (\d+) rules hold\.\n", done.stdout)
    assert count and count[1] == count[2] and int(count[3]) > 20
    listed = infprof("rules", "list")
    assert listed.returncode == 0
    assert "launch-bound" in listed.stdout and max(map(len, listed.stdout.splitlines())) <= 80
    shown = infprof("rules", "show", "launch-bound")
    assert shown.returncode == 0
    assert "idle_launch_ratio" in shown.stdout and "--enforce-eager" in shown.stdout


def test_a_users_rule_fires_is_listed_and_tested(folder: Path) -> None:
    before = rule_ids("analyze", LAUNCH_BOUND)
    assert rule_ids("analyze", LAUNCH_BOUND, "--rules", folder) - before == {"few-kernels"}
    assert "few-kernels" in infprof("rules", "list", "--rules", folder).stdout
    assert "The test says so." in infprof("rules", "show", "few-kernels", "--rules", folder).stdout
    done = infprof("rules", "test", "--rules", folder)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def rule_ids(*arguments: str | Path) -> set[str]:
    done = infprof(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return {f["rule"] for f in json.loads(done.stdout)["findings"]}


def test_a_broken_rule_is_named_and_the_others_run(folder: Path) -> None:
    broken = RULE.replace("id: few-kernels", "id: broken").replace("kernel_count >= 10", "kernel_cont >= 10")
    (folder / "broken.yaml").write_text(broken, encoding="utf-8")
    line = 1 + RULE[: RULE.index("when:")].count("\n")
    named = f"{folder / 'broken.yaml'}, line {line}: "
    done = infprof("analyze", LAUNCH_BOUND, "--rules", folder, "--json")
    assert done.returncode == 0
    assert one_line(done.stderr)
    assert done.stderr.startswith(f"infprof: {named}") and "kernel_count" in done.stderr
    found = json.loads(done.stdout)
    assert {"few-kernels", "launch-bound"} <= {f["rule"] for f in found["findings"]}
    assert any(p["code"] == "broken-rule" and named in p["message"] for p in found["problems"])
    for command in ("list", "test"):
        done = infprof("rules", command, "--rules", folder)
        assert done.returncode == 1
        assert named in done.stderr
    assert named in refused("rules", "show", "broken", "--rules", folder)


def test_a_case_that_does_not_hold_ends_with_1(folder: Path) -> None:
    rule = folder / "few-kernels.yaml"
    rule.write_text(RULE.replace("kernel_count: 100, ", "kernel_count: 3, "), encoding="utf-8")
    done = infprof("rules", "test", "--rules", folder)
    assert done.returncode == 1
    assert done.stdout.startswith("few-kernels: case 'many': expected fires")


# --- the samples ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda p: p.name)
def test_samples_get_the_answer_they_are_made_for(sample: Path) -> None:
    truth: dict[str, Any] = yaml.safe_load((sample / "truth.yaml").read_text(encoding="utf-8"))
    diagnosis = analyze_file(sample / "trace.sqlite")
    assert diagnosis.verdict.cls == truth["verdict"]["class"], diagnosis.verdict.sentence
    assert diagnosis.verdict.cause == truth["verdict"]["cause"], diagnosis.verdict.sentence
    assert {f.rule for f in diagnosis.findings} >= set(truth["findings"]["must"])
    if truth["findings"]["not_above_info"]:
        assert [f.rule for f in diagnosis.findings if f.severity != "info"] == []
    else:
        assert diagnosis.findings[0].rule in truth["findings"]["must"]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda p: p.name)
def test_samples_get_their_key_figures(sample: Path) -> None:
    figures = yaml.safe_load((sample / "truth.yaml").read_text(encoding="utf-8"))["key_figures"]
    diagnosis = analyze_file(sample / "trace.sqlite", Options(window="full"))
    assert diagnosis.window.duration_ns == figures["window_ns"]
    for truth, device in zip(figures["devices"], diagnosis.devices, strict=True):
        total = dict.fromkeys(("compute", "exposed_communication", "exposed_copy", "idle"), 0)
        for one in device.slices:
            total[one.kind] += one.ns
        assert {f"{kind}_ns": ns for kind, ns in total.items()} == {f"{kind}_ns": truth[f"{kind}_ns"] for kind in total}
        assert (device.id, device.name) == (truth["id"], truth["name"])
        assert (device.kernels.count, device.kernels.total_ns) == (truth["kernel_count"], truth["kernel_total_ns"])
        assert {c.kind: c.bytes for c in device.copies if c.kind in truth["copy_bytes"]} == truth["copy_bytes"]


def test_a_range_is_a_window_of_its_occurrences() -> None:
    whole = json.loads(infprof("analyze", LAUNCH_BOUND, "--window", "full", "--json").stdout)
    one = json.loads(infprof("analyze", LAUNCH_BOUND, "--range", "decode_step_5", "--json").stdout)
    every = json.loads(infprof("analyze", LAUNCH_BOUND, "--range", "decode_step_*", "--json").stdout)
    assert "1 occurrences" in one["window"]["how"] or "1 occurrence " in one["window"]["how"]
    lengths = [found["window"]["duration_ns"] for found in (one, every, whole)]
    assert 0 < lengths[0] < lengths[1] <= lengths[2]
    for found in (one, every):
        # What happens between the steps is left out, and the step itself is still limited by its launches.
        assert sum(s["ns"] for s in found["devices"][0]["slices"]) == found["window"]["duration_ns"]
        assert (found["verdict"]["class"], found["verdict"]["cause"]) == ("scheduling-bubble", "launch")
    names = {row["name"]: row for row in every["range_table"]}
    assert names["decode_step_5"]["count"] == 1
    assert names["decode_step_5"]["gpu_span_ns"] == one["window"]["duration_ns"]


def test_windows_are_counted_from_the_start_of_the_trace() -> None:
    whole = json.loads(infprof("analyze", LAUNCH_BOUND, "--window", "full", "--json").stdout)["window"]
    middle = (whole["start_ns"] + whole["end_ns"]) // 2
    for spec, expected in (
        (f"{middle}ns:", (middle, whole["end_ns"])),
        (f":{middle / 1000:.3f}us", (whole["start_ns"], middle)),
        (f"{middle / 1e9:.9f}s:{(middle + MS) / 1e6:.6f}ms", (middle, middle + MS)),
    ):
        window = json.loads(infprof("analyze", LAUNCH_BOUND, "--window", spec, "--json").stdout)["window"]
        assert (window["start_ns"], window["end_ns"]) == expected
        assert window["duration_ns"] + sum(part["ns"] for part in window["left_out"]) == whole["duration_ns"]
