"""Several files as the ranks of one job: which files are meant, whose they are, what is said, and what nothing changes."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from case_builders import infprof, measure
from infprof.diagnosis import Options
from infprof.errors import InfprofError, UsageError
from infprof.ranks import analyze_inputs, expand
from infprof.ranks.inputs import identity, labels, natural_key
from infprof.ranks.workers import FileResult, analyze_one, over_processes
from infprof.reports import REPORTS, render
from infprof.reports.json_report import schema
from infprof.resources import sample_traces_dir
from infprof.results import Diagnosis
from rank_traces import MS, US, S, write_ranks

HEALTHY = sample_traces_dir() / "healthy" / "trace.sqlite"
TENSOR_PARALLEL = sample_traces_dir() / "communication-bound-tp" / "spec.yaml"


def late_rank_2(rank: int, step: int) -> int:
    return 400 * US if rank == 2 else (step * 31 + rank * 17) % 20 * US


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks, of which number 2 computes longer and is always last."""
    folder = tmp_path_factory.mktemp("job")
    write_ranks(folder, 4, late_rank_2)
    return folder


@pytest.fixture(scope="module")
def diagnosis(job: Path) -> Diagnosis:
    return analyze_inputs([job], jobs=1)


def codes(diagnosis: Diagnosis) -> set[str]:
    return {p.code for p in diagnosis.problems}


# --- which files ------------------------------------------------------------------------------------------------------


def test_a_folder_holds_its_profiles_by_content_in_natural_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("r10.sqlite", "r2.bin", "deep/r1.sqlite"):
        shutil.copy(HEALTHY, tmp_path / name)
    (tmp_path / "notes.txt").write_text("no profile")
    (tmp_path / "config.json").write_text('{"model": "x"}')
    assert [str(p.relative_to(tmp_path)) for p in expand([tmp_path])] == ["deep/r1.sqlite", "r2.bin", "r10.sqlite"]


def test_globs_files_and_folders_give_each_file_once(job: Path) -> None:
    both = expand([job, job / "rank1.sqlite", str(job / "rank[01].sqlite"), str(job / "*")])
    assert [p.name for p in both] == [f"rank{i}.sqlite" for i in range(4)]
    with pytest.raises(InfprofError, match="matches no file"):
        expand([str(job / "*.json")])


def test_a_damaged_file_with_a_profilers_name_is_an_input_too(tmp_path: Path) -> None:
    (tmp_path / "rank0.pt.trace.json.gz").write_bytes(b"")
    shutil.copy(HEALTHY, tmp_path / "rank1.sqlite")
    assert [p.name for p in expand([tmp_path])] == ["rank0.pt.trace.json.gz", "rank1.sqlite"]


def test_a_report_beside_its_own_export_is_not_counted_twice(tmp_path: Path) -> None:
    shutil.copy(HEALTHY, tmp_path / "a.sqlite")
    (tmp_path / "a.nsys-rep").write_bytes(b"report")
    (tmp_path / "b.nsys-rep").write_bytes(b"report")
    assert [p.name for p in expand([tmp_path])] == ["a.sqlite", "b.nsys-rep"]


def test_a_bundle_inside_a_folder_is_one_input(tmp_path: Path) -> None:
    (tmp_path / "run1").mkdir()
    (tmp_path / "run1" / "manifest.json").write_text("{}")
    shutil.copy(HEALTHY, tmp_path / "run1" / "trace.sqlite")
    shutil.copy(HEALTHY, tmp_path / "other.sqlite")
    assert [p.name for p in expand([tmp_path])] == ["other.sqlite", "run1"]


def test_names_are_as_short_as_they_can_be_told_apart() -> None:
    assert labels([Path("/x/node0/r.json"), Path("/x/node1/r.json")]) == ["node0/r.json", "node1/r.json"]
    assert labels([Path("/x/a.json"), Path("/y/b.json")]) == ["a.json", "b.json"]
    assert sorted(["r10", "r9", "r1"], key=natural_key) == ["r1", "r9", "r10"]


@pytest.mark.parametrize(
    ("name", "rank", "machine"),
    [
        ("dp0_pp0_tp3_dcp0_ep3_rank3.1700000001045326312.pt.trace.json.gz", 3, None),
        ("1718000000.123-TP-5.trace.json.gz", 5, None),
        ("1718000000.123-TP-5-DP-1.trace.json.gz", None, None),
        ("kineto-base-r1.json", 1, None),
        ("node1/rank_7.sqlite", 7, "1"),
        ("gpu-box_4711.1700000000000000000.pt.trace.json", None, "gpu-box"),
        ("trace.sqlite", None, None),
        ("rank1_of_rank2.sqlite", None, None),
    ],
)
def test_what_a_name_says(name: str, rank: int | None, machine: str | None) -> None:
    assert identity(Path(name)) == (rank, machine)


# --- what is said -----------------------------------------------------------------------------------------------------


def test_the_late_rank_is_named_with_what_it_costs_and_what_it_does(diagnosis: Diagnosis) -> None:
    job = diagnosis.job
    assert job is not None
    assert (job.stragglers.kind, job.stragglers.labels, job.stragglers.reason) == ("persistent", ["rank 2"], "compute")
    assert [(r.label, r.last_count) for r in job.ranks] == [("rank 0", 0), ("rank 1", 0), ("rank 2", 60), ("rank 3", 0)]
    late = job.ranks[2]
    assert (late.waited_ns, late.aligned) == (0, "wall-clock")
    assert 380 * US <= (late.lateness_p50_ns or 0) <= 400 * US
    # Each of the others spins from its own arrival to that of rank 2.
    expected = sum(400 * US - late_rank_2(0, step) for step in range(60))
    assert job.ranks[0].waited_ns == expected
    assert job.stragglers.sentence in diagnosis.verdict.sentence


def test_a_rank_that_waits_gets_the_finding_and_the_late_one_does_not(diagnosis: Diagnosis) -> None:
    """A single trace cannot tell volume from waiting: the other ranks do."""
    rules = [{f.rule: f.cost.value for f in rank.findings} for rank in diagnosis.ranks]
    assert diagnosis.job is not None
    for i in (0, 1, 3):
        assert rules[i]["straggler-rank"] == diagnosis.job.ranks[i].waited_ns
        assert "exposed-communication" not in rules[i]
        assert measure(diagnosis.ranks[i], "comm_spread_ns") == diagnosis.job.ranks[i].waited_ns
    assert "straggler-rank" not in rules[2]
    for rank in diagnosis.ranks:
        claimed = sum(f.cost.value or 0 for f in rank.findings if f.cost.unit == "ns")
        assert claimed <= rank.window.duration_ns
    assert not [n for n in diagnosis.not_evaluated if n.rule == "straggler-rank"]


def test_communication_that_waits_for_one_rank_gets_this_cause(tmp_path: Path) -> None:
    """1.2 ms of a 2 ms step is waiting for rank 1, whose host is late."""
    write_ranks(tmp_path, 2, lambda rank, step: 1_200 * US * rank, computes=False)
    found = analyze_inputs([tmp_path], jobs=1)
    assert (found.verdict.cls, found.verdict.cause) == ("communication-bound", "straggler")
    assert found.verdict.rule == "straggler-rank"
    assert found.job is not None
    assert (found.job.focus, found.job.stragglers.labels, found.job.stragglers.reason) == ("rank 0", ["rank 1"], "host")
    assert "rank 1: scheduling-bubble/host-work" in found.verdict.sentence


def test_the_joint_figures_are_those_of_one_rank_and_add_up(diagnosis: Diagnosis) -> None:
    assert len(diagnosis.ranks) == 4
    assert diagnosis.provenance.inputs == [f"rank{i}.sqlite" for i in range(4)]
    assert [r.provenance.inputs for r in diagnosis.ranks] == [[f"rank{i}.sqlite"] for i in range(4)]
    for one in (diagnosis, *diagnosis.ranks):
        for device in one.devices:
            assert sum(s.ns for s in device.slices) == one.window.duration_ns


def test_clocks_seconds_and_ppm_apart_give_the_same_answer(tmp_path: Path) -> None:
    def clock(rank: int, true_ns: int) -> int:
        return 10 * S + rank * 3 * S + true_ns + true_ns * rank * 30 // 1_000_000

    write_ranks(tmp_path, 4, late_rank_2, steps=200, clock=clock, wall_clock=False)
    job = analyze_inputs([tmp_path], jobs=1).job
    assert job is not None
    assert [r.aligned for r in job.ranks] == ["reference", "collectives", "collectives", "collectives"]
    assert (job.stragglers.kind, job.stragglers.labels) == ("persistent", ["rank 2"])
    assert [round(r.drift_ppm or 0) for r in job.ranks] == [0, 30, 60, 90]
    assert job.error_ns is not None and job.error_ns < 1 * US


def test_rotating_and_one_off_lateness(tmp_path: Path) -> None:
    write_ranks(tmp_path / "rotating", 3, lambda rank, step: 500 * US * (step % 3 == rank))
    write_ranks(tmp_path / "one-off", 3, lambda rank, step: 80 * MS * (rank == 1 and step == 59) + rank * US)
    kinds = [analyze_inputs([tmp_path / name], jobs=1).job for name in ("rotating", "one-off")]
    assert [job.stragglers.kind for job in kinds if job] == ["rotating", "one-off"]
    assert kinds[1] is not None and kinds[1].stragglers.labels == ["rank 1"]


def test_missing_and_doubled_ranks_are_said(tmp_path: Path, job: Path) -> None:
    for name in ("rank0", "rank1", "rank3"):
        shutil.copy(job / f"{name}.sqlite", tmp_path)
    shutil.copy(job / "rank1.sqlite", tmp_path / "again-rank1.sqlite")
    found = analyze_inputs([tmp_path], jobs=1)
    assert found.job is not None
    assert found.job.missing_ranks == [2]
    assert {"ranks-missing", "duplicate-ranks"} <= codes(found)
    assert [r.label for r in found.job.ranks if r.compared_collectives] == [
        "rank 0",
        "rank 1 (again-rank1.sqlite)",
        "rank 3",
    ]


def test_files_that_do_not_say_their_rank_are_numbered_and_that_is_said(tmp_path: Path) -> None:
    write_ranks(tmp_path, 2, lambda rank, step: 300 * US * rank, name="trace_{rank}x.sqlite")
    found = analyze_inputs([tmp_path], jobs=1)
    assert found.job is not None and [r.label for r in found.job.ranks] == ["rank 0", "rank 1"]
    assert "ranks-by-order" in codes(found)


def test_ranks_counted_per_machine_are_told_apart_by_their_machine(tmp_path: Path, job: Path) -> None:
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        for rank in (0, 1):
            shutil.copy(job / f"rank{2 * node + rank}.sqlite", tmp_path / f"node{node}" / f"rank{rank}.sqlite")
    found = analyze_inputs([tmp_path], jobs=1)
    assert found.job is not None
    assert [r.label for r in found.job.ranks] == ["node 0 rank 0", "node 1 rank 0", "node 0 rank 1", "node 1 rank 1"]
    assert found.job.stragglers.labels == ["node 1 rank 0"]
    assert not {"duplicate-ranks", "ranks-missing"} & codes(found)


def test_traces_that_share_nothing_are_not_compared(tmp_path: Path, job: Path) -> None:
    shutil.copy(job / "rank0.sqlite", tmp_path / "rank0.sqlite")
    shutil.copy(HEALTHY, tmp_path / "rank1.sqlite")
    found = analyze_inputs([tmp_path], jobs=1)
    assert found.job is not None
    assert [(r.aligned, r.waited_ns, r.lateness_p50_ns) for r in found.job.ranks] == [("no", None, None)] * 2
    assert (found.job.stragglers.kind, found.job.arrivals) == ("unknown", [])
    assert "clocks-not-aligned" in codes(found)


# --- what changes nothing ---------------------------------------------------------------------------------------------


def test_neither_order_nor_workers_change_a_byte(job: Path, diagnosis: Diagnosis) -> None:
    files = [str(p) for p in sorted(job.iterdir())]
    random.Random(4).shuffle(files)
    assert render("json", analyze_inputs(files, jobs=4)) == render("json", diagnosis)
    assert render("json", analyze_inputs(files[::-1], jobs=2)) == render("json", diagnosis)


def test_one_broken_file_does_not_stop_the_others(tmp_path: Path, job: Path) -> None:
    for rank in (0, 2, 3):
        shutil.copy(job / f"rank{rank}.sqlite", tmp_path)
    (tmp_path / "rank1.sqlite").write_bytes((job / "rank1.sqlite").read_bytes()[:3000])
    done = infprof("analyze", "--json", tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"infprof: left out: rank1\.sqlite [^\n]+\n", done.stderr)
    data = json.loads(done.stdout)
    assert [f["file"] for f in data["job"]["failures"]] == ["rank1.sqlite"]
    assert str(tmp_path) not in done.stdout
    assert data["job"]["missing_ranks"] == [1]
    assert data["job"]["stragglers"]["labels"] == ["rank 2"]


def test_only_where_no_file_can_be_used_it_is_an_error(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.sqlite").write_bytes(b"")
    done = infprof("analyze", tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert re.fullmatch(r"infprof: None of the 2 inputs can be used\. The first: rank0\.sqlite [^\n]+\n", done.stderr)


def _dies(path: Path, options: Options) -> FileResult:
    if path.name == "rank1.sqlite":
        os._exit(9)
    return analyze_one(path, options)


def test_a_worker_that_dies_costs_its_own_file_only(job: Path) -> None:
    results = over_processes(sorted(job.iterdir()), Options(), 2, _dies)
    assert [r.diagnosis is not None for r in results] == [True, False, True, True]
    assert "ended each time" in str(results[1].failure)


def test_inputs_are_left_as_they_are(job: Path) -> None:
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in job.iterdir()}
    analyze_inputs([job], jobs=2)
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in job.iterdir()} == before


# --- the command line and the reports ---------------------------------------------------------------------------------


def test_a_quoted_glob_and_a_window_reach_every_rank(job: Path) -> None:
    done = infprof("analyze", f"{job}/rank*.sqlite", "--window", "20ms:80ms", "--json", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [r["window"]["duration_ns"] for r in data["ranks"]] == [60 * MS] * 4
    assert {r["compared_collectives"] for r in data["job"]["ranks"]} == {30}


def test_a_folder_with_one_profile_is_that_profile(tmp_path: Path) -> None:
    shutil.copy(HEALTHY, tmp_path / "trace.sqlite")
    assert infprof("analyze", tmp_path).stdout == infprof("analyze", tmp_path / "trace.sqlite").stdout


def test_fail_on_looks_at_every_rank(job: Path) -> None:
    gate = "comm_spread_ratio < 0.01"  # only the late one
    assert infprof("analyze", job, "--fail-on", gate).returncode == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--jobs", "0"], "at least 1"),
        (["--jobs", "2", "--scheduler", "tcp://127.0.0.1:1"], "exclude each other"),
        (["--perfetto", "x.json"], "name a single input"),
        (["--window", "3:1"], "--window"),
    ],
)
def test_what_does_not_fit_several_files_is_refused(job: Path, arguments: list[str], says: str) -> None:
    done = infprof("analyze", job, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_report_takes_several_and_never_writes_over_one(job: Path, tmp_path: Path) -> None:
    done = infprof(
        "report", job, "--html", tmp_path / "r.html", "--markdown", tmp_path / "r.md", "--json", tmp_path / "r.json"
    )
    assert done.returncode == 0, done.stderr
    assert "rank 2" in (tmp_path / "r.html").read_text() and "### Ranks" in (tmp_path / "r.md").read_text()
    again = infprof("report", tmp_path / "r.json", "--json", tmp_path / "again.json")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again.json").read_text() == (tmp_path / "r.json").read_text()
    refused = infprof("report", job, "--json", job / "rank1.sqlite", "--force")
    assert refused.returncode == 2 and "never altered" in refused.stderr


@pytest.mark.parametrize("name", [r.name for r in REPORTS if r.name != "perfetto"])
def test_every_report_names_the_ranks_and_who_is_late(name: str, diagnosis: Diagnosis) -> None:
    text = render(name, diagnosis)
    for label in ("rank 0", "rank 1", "rank 2", "rank 3"):
        assert label in text
    assert "Persistent" in text
    if name == "terminal":
        assert max(map(len, text.splitlines())) <= 80


def test_of_many_ranks_the_terminal_shows_the_late_ones(diagnosis: Diagnosis) -> None:
    from dataclasses import replace

    from infprof.reports.ranks_rows import shown_ranks

    job = diagnosis.job
    assert job is not None
    many = replace(job, ranks=[replace(job.ranks[0], label=f"rank {i}") for i in range(128)])
    many.stragglers = replace(job.stragglers, labels=["rank 77"])
    rows = shown_ranks(many, 8)
    assert len(rows) == 8 and "rank 77" in [row[0].text for row in rows]


def test_the_joint_diagnosis_keeps_the_published_schema(diagnosis: Diagnosis) -> None:
    data = diagnosis.to_dict()
    jsonschema.Draft202012Validator(schema()).validate(data)
    assert json.dumps(Diagnosis.from_dict(json.loads(json.dumps(data))).to_dict()) == json.dumps(data)


def test_documented_keys(diagnosis: Diagnosis) -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "json.md").read_text()
    explained = set(re.findall(r"`(\w+)`", page))
    job = diagnosis.to_dict()["job"]
    parts: list[dict[str, Any]] = [job, job["ranks"][0], job["arrivals"][0], job["stragglers"]]
    assert [key for part in parts for key in part if key not in explained] == []


# --- PyTorch's profiler -----------------------------------------------------------------------------------------------


def test_base_times_of_two_files_are_not_lateness(data: Path) -> None:
    """Case R-16: 38 µs apart by the raw stamps, 2 µs by each file's own base."""
    job = analyze_inputs([data / "kineto-base-r0.json", data / "kineto-base-r1.json"], jobs=1).job
    assert job is not None
    assert [(a.name, a.count, a.spread_max_ns) for a in job.arrivals] == [("all-reduce", 1, 2_000)]
    assert job.stragglers.kind == "none"
    assert [r.rank for r in job.ranks] == [0, 1]


def test_simulated_tensor_parallel_ranks_are_in_step(tmp_path: Path) -> None:
    done = infprof("simulate", TENSOR_PARALLEL, "-o", tmp_path / "tp.json.gz")
    assert done.returncode == 0, done.stderr
    found = analyze_inputs([tmp_path], jobs=1)
    assert found.job is not None
    assert [r.label for r in found.job.ranks] == ["rank 0", "rank 1"]
    assert found.job.stragglers.kind == "none"
    assert found.verdict.cls == "communication-bound" and found.verdict.cause != "straggler"


def test_two_sampled_ranks_of_128_are_not_compared(shared_traces: Path) -> None:
    """Events were left out at random: no collective of one is surely the same as one of the other."""
    found = analyze_inputs([str(shared_traces / "kineto" / "dlrm_sampled_rank*.json.gz")], jobs=1)
    assert found.job is not None
    assert (found.job.world_size, len(found.job.missing_ranks)) == (128, 126)
    assert [(r.rank, r.aligned, r.last_count) for r in found.job.ranks] == [(0, "no", None), (1, "no", None)]
    assert {"ranks-missing", "clocks-not-aligned"} <= codes(found)


def test_usage_errors_of_the_library(job: Path) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        analyze_inputs([job], jobs=0)
    with pytest.raises(UsageError):
        analyze_inputs([job], Options(window="nonsense"))
