"""Telemetry: what probes record comes back as it was, a probe that fails disturbs nothing, counters survive restarts."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infprof.errors import UsageError
from infprof.probes import PROBES, Probe, ProbeContext, Signal, Task, Unavailable, make_probe
from infprof.probes.recorder import Clock, Recorder, TelemetryFile
from infprof.probes.runner import GIVE_UP_AFTER, ProbeRunner
from infprof.telemetry import Series, read_telemetry

SIGNALS = {"heat_celsius": Signal("celsius", "gauge", "how hot"), "steps": Signal("count", "counter", "steps so far")}


class Scripted:
    """A probe that does what a test says; ``done`` is set at its last tick."""

    name = "scripted"
    signals: Mapping[str, Signal] = SIGNALS

    def __init__(self, tick: Callable[[Recorder], None], start: Callable[[], None] = lambda: None, until: int = 1):
        self._tick, self._start, self._left = tick, start, until
        self.done = threading.Event()
        self.stopped = False

    def start(self, context: ProbeContext, out: Recorder) -> Sequence[Task]:
        self._start()
        return [Task("tick", 0.001, self._run)]

    def stop(self, out: Recorder) -> None:
        self.stopped = True

    def _run(self, out: Recorder) -> None:
        self._left -= 1
        try:
            if self._left >= 0:
                self._tick(out)
        finally:
            if self._left <= 0:
                self.done.set()


def telemetry_file(tmp_path: Path) -> TelemetryFile:
    return TelemetryFile(tmp_path / "telemetry.sqlite", Clock())


def run_probes(file: TelemetryFile, *probes: Scripted) -> ProbeRunner:
    runner = ProbeRunner(probes, file, ProbeContext(1))
    runner.start()
    for probe in probes:
        if next(r for r in runner.reports if r.name == probe.name).state == "ok":
            assert probe.done.wait(30)
    runner.stop()
    return runner


def test_what_is_recorded_comes_back(tmp_path: Path) -> None:
    file = telemetry_file(tmp_path)
    out = file.recorder("p", SIGNALS)
    out.sample("heat_celsius", 40.5, "gpu/A", time_ns=20)
    out.sample("heat_celsius", 39.0, "gpu/A", time_ns=10)
    out.sample("steps", 1, labels={"kind": "x", "a": "b"}, time_ns=5)
    out.fact("name", {"gpu": "H100"}, "gpu/A")
    out.event("xid", "79: fell off the bus", "gpu/A", 79, time_ns=30)
    out.missing("steps", "not supported", "gpu/A", 3)
    out.missing("steps", "not supported", "gpu/A", 3)
    file.close()
    back = read_telemetry(file.path)
    heat, steps = back.all_series
    assert heat[:6] == ("p", "heat_celsius", "celsius", "gauge", "gpu/A", {})
    assert (heat.time.tolist(), heat.value.tolist()) == ([10, 20], [39.0, 40.5])
    assert steps.labels == {"a": "b", "kind": "x"} and steps.scope == ""
    assert back.facts("name") == {"gpu/A": {"gpu": "H100"}}
    assert [e[1:] for e in back.events("xid")] == [(30, "xid", "gpu/A", "79: fell off the bus", 79.0)]
    assert [m[1:] for m in back.missing] == [("steps", "gpu/A", 3, "not supported")]
    assert back.why_missing("steps", "gpu/A") == "not supported" and back.why_missing("steps", "gpu/B") is None
    assert back.span_ns() == (5, 20)
    assert back.shifted(-5).span_ns() == (0, 15)
    assert back.series("heat_celsius", "gpu") == back.series("heat_celsius") != back.series("heat_celsius", "gp")


def test_a_signal_nobody_declared_is_a_defect(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        telemetry_file(tmp_path).recorder("p", SIGNALS).sample("heat", 1.0)


def test_samples_of_many_threads_arrive_while_others_are_written(tmp_path: Path) -> None:
    file = telemetry_file(tmp_path)
    out = file.recorder("p", SIGNALS)

    def write(scope: str) -> None:
        for i in range(2000):
            out.sample("steps", i, scope, time_ns=i)

    threads = [threading.Thread(target=write, args=(f"thread/{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):
        file.flush()
    file.close()
    series = read_telemetry(file.path).series("steps")
    assert [s.value.tolist() for s in series] == [list(range(2000))] * 4


def test_samples_that_could_not_be_written_are_written_later(tmp_path: Path) -> None:
    file = telemetry_file(tmp_path)
    out = file.recorder("p", SIGNALS)
    out.sample("steps", 1, time_ns=1)
    blocker = sqlite3.connect(file.path, isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    file._connection.execute("PRAGMA busy_timeout = 1")
    with pytest.raises(sqlite3.OperationalError):
        file.flush()
    blocker.execute("ROLLBACK")
    blocker.close()
    file.close()
    assert read_telemetry(file.path).series("steps")[0].value.tolist() == [1.0]


def test_the_clock_does_not_follow_the_wall_clock() -> None:
    clock = Clock()
    first = clock.now_ns()
    assert first <= clock.now_ns()
    assert set(clock.offsets()) == {"unix_ns", "monotonic_ns", "wall_clock_step_ns"}


# --- the runner -------------------------------------------------------------------------------------------------------


def test_a_probe_that_cannot_work_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    def refuse() -> None:
        raise Unavailable("no such hardware: buy some.")

    file = telemetry_file(tmp_path)
    good, bad = Scripted(lambda out: out.sample("steps", 1)), Scripted(lambda out: None, refuse)
    bad.name = "bad"
    runner = run_probes(file, bad, good)
    file.close()
    assert [(r.name, r.state, r.reason) for r in runner.reports] == [
        ("bad", "unavailable", "no such hardware: buy some."),
        ("scripted", "ok", None),
    ]
    assert good.stopped and not bad.stopped
    assert len(read_telemetry(file.path).series("steps")) == 1


def test_a_task_that_keeps_failing_is_given_up(tmp_path: Path) -> None:
    def fail(out: Recorder) -> None:
        raise ValueError("odd answer")

    probe = Scripted(fail, until=GIVE_UP_AFTER)
    runner = run_probes(telemetry_file(tmp_path), probe)
    (report,) = runner.reports
    assert report.state == "failed" and report.reason == "tick failed 3 times: ValueError: odd answer"
    assert report.tasks["tick"]["ticks"] == report.tasks["tick"]["errors"] == GIVE_UP_AFTER


def test_one_failure_is_counted_and_forgiven(tmp_path: Path) -> None:
    answers = iter([ValueError("once"), None, None])

    def sometimes(out: Recorder) -> None:
        answer = next(answers)
        if answer is not None:
            raise answer

    runner = run_probes(telemetry_file(tmp_path), Scripted(sometimes, until=3))
    (report,) = runner.reports
    assert report.state == "ok" and report.tasks["tick"]["errors"] == 1


def test_a_defect_while_starting_or_stopping_ends_nothing(tmp_path: Path) -> None:
    def crash() -> None:
        raise RuntimeError("boom")

    runner = run_probes(telemetry_file(tmp_path), Scripted(lambda out: None, crash))
    assert (runner.reports[0].state, runner.reports[0].reason) == ("failed", "RuntimeError: boom")


@pytest.mark.parametrize("name", PROBES)
def test_every_probe_in_the_registry_fits(name: str) -> None:
    probe: Probe = make_probe(name)
    assert probe.name == name
    assert all(s.kind in ("gauge", "counter") and s.unit and s.meaning for s in probe.signals.values())


def test_an_unknown_probe_is_named() -> None:
    with pytest.raises(UsageError, match="no probe called gpu: choose from nvml"):
        make_probe("gpu")


# --- counters ---------------------------------------------------------------------------------------------------------


def counter(values: list[int]) -> Series:
    time = np.arange(len(values), dtype=np.int64)
    return Series("p", "steps", "count", "counter", "", {}, time, np.array(values, dtype=np.float64))


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=4))
def test_an_increase_is_what_was_counted_even_over_restarts(lives: list[list[int]]) -> None:
    """Each life of a program starts counting at 0; only what falls can be seen as a restart."""
    values: list[int] = []
    counted = 0
    for n, steps in enumerate(lives):
        total = 0
        for i, step in enumerate(steps):
            before = values[-1] if values else None
            total += step
            if before is not None:
                restart_unseen = i == 0 and n > 0 and total >= before
                counted += total - before if restart_unseen else step
            values.append(total)
    series = counter(values)
    if len(values) < 2:
        assert series.increase() is None
    else:
        assert series.increase() == counted


def test_an_increase_inside_a_window_takes_both_ends() -> None:
    series = counter([0, 10, 20, 40])
    assert series.increase(1, 2) == 10
    assert series.increase(1, 3) == 30
    assert series.increase(3, 9) is None
    assert series.between(1, 3).value.tolist() == [10, 20]
