"""What a newcomer met on real traces and must not meet again: odd numbers, missing files, claims that do not fit."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from case_builders import evidence, finding, infprof, measure, rules
from infprof import progress
from infprof.diagnosis import analyze_file
from infprof.ranks import analyze_inputs, expand
from infprof.readers import read
from infprof.reports import format as fmt
from infprof.reports import render
from infprof.resources import sample_traces_dir
from infprof.results import Cost, Gain, Problem
from infprof.simulator import load_spec, simulate, write_kineto, write_nsys_sqlite
from kineto_builder import KinetoBuilder, steady
from test_stack import eager


def with_copies(*sizes: int | None) -> KinetoBuilder:
    builder = steady(400)
    for i, size in enumerate(sizes):
        corr = 9_000 + i
        builder.call(7_990.0 + 100 * i, 3, "hipMemcpyAsync", corr)
        known = {} if size is None else {"bytes": size}
        place = {"device": 0, "context": 1, "stream": 7, "correlation": corr}
        builder.add(
            "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 8_000.0 + 100 * i, 50, pid=0, tid=7, **place, **known
        )
    return builder


def test_sizes_that_were_not_recorded_are_not_known_and_never_negative(tmp_path: Path) -> None:
    diagnosis = analyze_file(with_copies(None, None).write(tmp_path / "trace.json"))
    (row,) = diagnosis.devices[0].copies
    assert (row.count, row.bytes, row.bytes_per_s) == (2, None, None)
    assert measure(diagnosis, "h2d_bytes") is None and measure(diagnosis, "host_copy_p50_bytes") is None
    assert measure(diagnosis, "small_copy_count") == 0
    for report in ("terminal", "markdown", "html"):
        assert "-2 B" not in render(report, diagnosis)


def test_rates_are_those_of_the_copies_whose_size_is_known(tmp_path: Path) -> None:
    diagnosis = analyze_file(with_copies(1_000_000, None).write(tmp_path / "trace.json"))
    (row,) = diagnosis.devices[0].copies
    assert row.bytes == 1_000_000 and row.bytes_per_s == pytest.approx(1_000_000 / 50e-6)
    assert measure(diagnosis, "h2d_bytes_per_s") == pytest.approx(20e9)


def test_a_folder_keeps_traces_whose_events_come_behind_long_settings(tmp_path: Path) -> None:
    builder = steady(100)
    settings = {"metadata": {"environment": [f"setting {i}" for i in range(2_000)]}}
    text = json.dumps({**settings, **builder.top, "traceEvents": builder.events})
    (tmp_path / "first.json").write_text(text)
    # The vocabulary of a tokeniser has any word as a key.
    vocabulary = {**{f"word {i}": i for i in range(1_000)}, "ph": 1_000, "traceEvents": 1_001}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert expand([tmp_path]) == [tmp_path / "first.json"]


def test_files_of_which_none_used_a_gpu_end_in_an_answer(tmp_path: Path) -> None:
    builder = KinetoBuilder(devices=[])
    for i in range(100):
        builder.add("cpu_op", "aten::mm", 20.0 * i, 6)
    builder.write(tmp_path / "rank0.json")
    builder.write(tmp_path / "rank1.json")
    diagnosis = analyze_inputs([tmp_path], jobs=1)
    assert (diagnosis.verdict.cls, diagnosis.verdict.code) == ("unusable", "no-gpu-work")
    assert "not k" not in render("terminal", diagnosis).partition("Ranks")[2].partition("What to change")[0]


def test_eager_code_is_told_from_work_between_steps(tmp_path: Path) -> None:
    """The same idle time: after every launch, or in one pause per hundred launches."""
    in_launches = analyze_file(eager().write(tmp_path / "eager.json"))
    assert rules(in_launches)[0] == "host-work-per-launch" and "host-work-between-steps" not in rules(in_launches)
    assert in_launches.verdict.rule == "host-work-per-launch"
    found = finding(in_launches, "host-work-per-launch")
    assert evidence(found)["launches_per_host_gap"] == pytest.approx(1, abs=0.1)
    assert "--enforce-eager" in next(r.change for r in found.remedies if r.stack == "vllm")

    steps = KinetoBuilder()
    for step in range(20):
        for i in range(100):
            at = step * 6_000 + 4.0 * i
            steps.launch(at, 3, step * 6_000 + 10 + 20 * i, 19.5)
    between = analyze_file(steps.write(tmp_path / "steps.json"))
    assert rules(between)[0] == "host-work-between-steps" and "host-work-per-launch" not in rules(between)
    assert between.verdict.rule == "host-work-between-steps"


@pytest.mark.parametrize("api", ["hipMemcpyWithStream", "cudaMemcpyAsync"])
def test_a_start_cut_off_behind_a_copy_that_blocks_is_left_out(tmp_path: Path, api: str) -> None:
    """The previous step was still running, its kernels are not in the file, and the host waits in a copy behind it."""
    builder = KinetoBuilder()
    builder.launch(0, 3, 5, 4)
    builder.launch(20, 3, 400_000, 10)
    builder.call(60, 400_020, api, 77)
    place = {"device": 0, "context": 1, "stream": 7, "correlation": 77, "bytes": 4_000}
    builder.add("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 400_040, 5, pid=0, tid=7, **place)
    for i in range(500):
        builder.launch(400_100 + 20.0 * i, 3, 400_108 + 20.0 * i, 17)
    diagnosis = analyze_file(builder.write(tmp_path / "trace.json"))
    assert diagnosis.window.duration_ns < 20_000_000
    assert [left.what for left in diagnosis.window.left_out] == ["cut at the start of the recording"]
    assert diagnosis.verdict.cls == "gpu-busy"


def test_shares_of_explained_time_are_called_that(shared_traces: Path) -> None:
    """Of the window 27.6 % is exposed communication, 40.1 % of what is left without unexplained idle time."""
    diagnosis = analyze_file(shared_traces / "kineto" / "dlrm_sampled_rank0_of128.json.gz")
    assert "40.1 % of the time that the trace explains" in diagnosis.verdict.sentence
    assert "of the time a" not in diagnosis.verdict.sentence


def test_launches_into_a_graph_are_named_where_nothing_else_ran(shared_traces: Path) -> None:
    diagnosis = analyze_file(shared_traces / "kineto" / "mi300x_sglang_capture.json.gz")
    assert "544 launches were captured into a graph" in diagnosis.verdict.sentence
    assert "2 GPU operations, 11 µs in all" in diagnosis.verdict.sentence


def test_short_captures_say_that_findings_are_withheld(tmp_path: Path) -> None:
    diagnosis = analyze_file(eager(60).write(tmp_path / "trace.json"))
    assert any(p.code == "too-short" for p in diagnosis.problems)
    # What explains the class is chosen as ever.
    assert diagnosis.verdict.rule == "host-work-per-launch"
    assert "Withheld" in render("terminal", diagnosis) and "no rule found" not in render("html", diagnosis)


def test_findings_of_low_confidence_say_so_on_the_first_screen(shared_traces: Path) -> None:
    diagnosis = analyze_file(shared_traces / "kineto" / "a100_vit_int8_graph.json.gz")
    found = finding(diagnosis, "device-dependency")
    assert found.confidence <= 0.5
    assert "confidence low (0.30): nothing in the trace explains" in render("terminal", diagnosis)


def test_numbers_that_say_nothing_are_put_in_words() -> None:
    assert fmt.gain_text(Gain(None, 0.0, "")) == "none by itself"
    assert fmt.cost_text(Cost(0, "ns"), 1_000) == "its time counts above"
    assert fmt.value_with_unit(6.17, "ratio") == "6.17 times"
    assert fmt.value_with_unit(1.2, "ratio") == "120.0 %"


@pytest.mark.parametrize(
    "message, count, shown",
    [
        ("9 copies have no length.", 9, "9 copies have no length."),
        ("1,200 events were left out.", 1_200, "1,200 events were left out."),
        ("nsys says: something.", 3, "nsys says: something. (3)"),
        ("nsys says: something.", 1, "nsys says: something."),
        ("Nothing counted.", None, "Nothing counted."),
    ],
)
def test_a_count_is_said_once(message: str, count: int | None, shown: str) -> None:
    assert fmt.problem_text(Problem("code", message, count)) == shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_read_shows_its_progress_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    monkeypatch.setattr(progress, "_READING_REDRAW_S", 0.0)
    monkeypatch.setattr("infprof.readers.json_events.PIECE_BYTES", 4_096)
    path = steady(300).write(tmp_path / f"{'a-long-name-' * 5}.trace.json")
    screen = Terminal()
    with progress.shown_reading(screen):
        read(path)
    lines = screen.getvalue().split("\r\033[K")
    shares = [int(line.split()[-2]) for line in lines if line.endswith("%")]
    assert shares == sorted(shares) and shares[0] < 30 and shares[-1] > 70
    assert all(len(line) < 80 for line in lines) and lines[-1] == ""


def test_a_read_shows_nothing_in_a_pipe_or_when_it_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = steady(300).write(tmp_path / "trace.json")
    screen = Terminal()
    with progress.shown_reading(screen):
        read(path)
    assert screen.getvalue() == ""
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    pipe = io.StringIO()
    with progress.shown_reading(pipe):
        read(path)
    assert pipe.getvalue() == ""
    assert infprof("analyze", path).stderr == ""


def test_products_of_amd_are_told_apart_by_their_tile() -> None:
    name = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_{}_MI16x16x1_SN_LDSB1_WS64_WG16_16_1"
    short = [fmt.short_kernel_name(name.format(tile)) for tile in ("MT128x192x64", "MT256x128x64")]
    assert short == ["Cijk_Alik_Bljk_BBS_MT128x192x64", "Cijk_Alik_Bljk_BBS_MT256x128x64"]


def test_messages_count_for_the_device_that_sent_them(tmp_path: Path) -> None:
    """Two ranks in one export move as much each as in a file of its own."""
    spec = load_spec(sample_traces_dir() / "communication-bound-tp" / "spec.yaml")
    joint = analyze_file(write_nsys_sqlite(simulate(spec), tmp_path / "joint.sqlite"))
    alone = [analyze_file(path) for path in write_kineto(simulate(spec), tmp_path / "rank.json")]
    for device, one in enumerate(alone):
        assert measure(joint, "comm_bytes", device) == measure(one, "comm_bytes")
        assert measure(joint, "comm_bytes_per_s", device) == pytest.approx(measure(one, "comm_bytes_per_s"), rel=0.01)


INTERRUPTED = """
import os, signal
import infprof.readers.json_events as reading
reading.report_read = lambda *_: os.kill(os.getpid(), signal.SIGINT)
from infprof.cli import main
main()
"""


def test_an_interrupt_while_reading_ends_in_silence_with_its_code(tmp_path: Path) -> None:
    path = steady(300).write(tmp_path / "trace.json")
    command = [sys.executable, "-c", INTERRUPTED, "analyze", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_files_that_name_no_rank_go_by_their_own_names(tmp_path: Path) -> None:
    steady(1000).write(tmp_path / "rank3.json")
    eager().write(tmp_path / "engine-in-production.pt.trace.json")
    diagnosis = analyze_inputs([tmp_path], jobs=1)
    assert diagnosis.job is not None
    assert {row.label for row in diagnosis.job.ranks} == {"rank 3", "engine-in-production.pt.trace.json"}
    text = render("terminal", diagnosis)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert re.search(r"^  engine-in-p…\S+ .* Scheduling bubble$", text, re.MULTILINE)
