"""What a fix would gain, and what would limit the run then: the chain of fixes until none gains much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from infprof.errors import InfprofError
from infprof.measures import operations as op
from infprof.measures.operations import Prepared
from infprof.replay.applying import apply
from infprof.replay.engine import Replay, Replayed
from infprof.replay.overlap import with_overlapped_copies
from infprof.replay.recorder import record
from infprof.replay.recording import ALLOCATOR, LAUNCH, MODULE, Recording
from infprof.replay.retime import excerpt, retimed
from infprof.replay.setting import Setting
from infprof.results import Verdict
from infprof.trace import D2H, H2D, IntArray, Trace

# An unchanged replay must give the recorded span within this share.
SELF_CHECK = 0.005
# The chain ends where no fix gains more than this share of the time that is left.
LEAST_GAIN = 0.05
LONGEST_CHAIN = 6
# The next verdict is made from this many operations at most: a verdict on all of a long trace takes as long as its analysis.
JUDGED_OPERATIONS = 30_000
# A report's own chain is made from this many operations of the window, the middle ones: its replays would else take
# longer than all the rest.
REPORTED_OPERATIONS = 30_000
# Where more of them have no launch record, the host's part in the trace is not known.
MOST_WITHOUT_LAUNCH = 0.5

# What can be taken away, with what does it; kernels stay as they are.
FIXES: tuple[tuple[Setting, str], ...] = (
    (Setting("launch", 0.0), "launch calls cost nothing (CUDA graphs, fewer kernels)"),
    (Setting("host", 0.0), "no host work between CUDA calls (asynchronous scheduling, less Python)"),
    (Setting("sync", 0.0), "the host never waits for the GPU"),
    (Setting("copies", None), "host copies overlap with everything (pinned memory, a stream of their own)"),
    (Setting("comm", 0.0), "communication is hidden"),
    (Setting("allocator", 0.0), "memory is allocated beforehand"),
    (Setting("module-load", 0.0), "nothing is loaded or compiled (warm-up, caches)"),
)
# A host that is never what is waited for.
_PROMPT_HOST = (Setting("launch", 0.0), Setting("host", 0.0), Setting("sync", 0.0))
_UNKNOWABLE = (
    "A gain is a bound: kernels that slow each other down when they run together, clocks that fall as power rises, and "
    "batches that a scheduler would form otherwise are not in a trace."
)

Judge = Callable[[Trace, tuple[int, int], bool], Verdict]


@dataclass
class Step:
    """One fix of the chain, on top of those before it. ``gain_ratio`` is its own, of the recorded span.

    ``next_verdict`` is the class of what would limit the run then, None where too little is left to tell.
    """

    fix: str
    words: str
    predicted_span_ns: int
    gain_ratio: float
    next_verdict: str | None
    next_cause: str | None
    next_sentence: str | None


@dataclass
class Result:
    """A what-if. ``off`` says why there is none; the predicted figures are None then.

    ``gain_ratio`` is the share of the recorded span that is won, ``unlaunched_ratio`` that of operations without a launch
    record, ``replay_error_ratio`` how far the unchanged replay is off.
    """

    recorded_span_ns: int
    replayed_span_ns: int
    replay_error_ratio: float
    unlaunched_ratio: float
    settings: list[str] = field(default_factory=list)
    predicted_span_ns: int | None = None
    gain_ratio: float | None = None
    next_verdict: str | None = None
    next_cause: str | None = None
    next_sentence: str | None = None
    chain: list[Step] = field(default_factory=list)
    off: str | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def _inside(prepared: Prepared, window: tuple[int, int]) -> IntArray:
    """The operations of a window, as rows."""
    ops = prepared.operations
    return np.flatnonzero((ops.end > window[0]) & (ops.start < window[1]))


class WhatIf:
    """Replays one trace with any costs.

    ``judge`` says what limits a trace in a window (start and end, ns), told whether its kernels are those recorded.
    Raises InfprofError where nothing ran on a GPU.
    """

    def __init__(
        self, prepared: Prepared, window: tuple[int, int], judge: Judge | None = None, part_of: int | None = None
    ) -> None:
        if not len(prepared.operations):
            raise InfprofError("what-if: no GPU operation was recorded, so there is nothing to replay.")
        self.prepared = prepared
        self.window = window
        self._judge = judge
        # How many operations the window has, where only some of them are here.
        self.part_of = part_of
        self._windows: dict[tuple[Setting, ...], int] = {}

    @classmethod
    def of_the_middle(cls, prepared: Prepared, window: tuple[int, int], judge: Judge, most: int) -> WhatIf:
        """Replays of the whole trace, or where its window has more operations than ``most``, of that many in its middle."""
        ops, mine = prepared.operations, _inside(prepared, window)
        if len(mine) <= most:
            return cls(prepared, window, judge)
        rows = mine[(len(mine) - most) // 2 :][:most]
        part = int(ops.start[rows[0]]), int(ops.end[rows].max())
        return cls(Prepared(excerpt(prepared, rows)), part, judge, len(mine))

    @cached_property
    def recorded_span_ns(self) -> int:
        ops = self.prepared.operations
        return int(ops.end.max() - ops.start.min())

    @cached_property
    def off(self) -> str | None:
        """Why this trace cannot be replayed; None where it can."""
        if self.recorded_span_ns <= 0:
            return "the trace has no length."
        try:
            error = self.replay_error_ratio
        except InfprofError as circle:
            return str(circle)
        if abs(error) > SELF_CHECK:
            return (
                f"played again without any change, the trace takes {abs(error):.1%} {'more' if error > 0 else 'less'} time than "
                "it did: what depends on what is not fully recorded."
            )
        if self.unlaunched_ratio > MOST_WITHOUT_LAUNCH:
            return f"{self.unlaunched_ratio:.0%} of the GPU operations have no record of their launch."
        return None

    @property
    def replay_error_ratio(self) -> float:
        return (self._unchanged_span_ns - self.recorded_span_ns) / self.recorded_span_ns

    @cached_property
    def _unchanged_span_ns(self) -> int:
        return self.predict([]).span_ns

    @property
    def unlaunched_ratio(self) -> float:
        return self._recording.without_launch / max(len(self.prepared.operations), 1)

    def predict(self, settings: Sequence[Setting]) -> Replayed:
        """All times with these settings. Raises UsageError for what the trace does not have."""
        recording, replay = self._play_of(settings)
        return replay.run(apply(settings, recording))

    def ask(self, settings: Sequence[Setting]) -> Result:
        """What these settings together would give."""
        result = self._result()
        result.settings = [setting.text for setting in settings]
        if result.off is None:
            replayed = self.predict(settings)
            result.predicted_span_ns = replayed.span_ns
            result.gain_ratio = 1 - replayed.span_ns / self.recorded_span_ns
            result.next_verdict, result.next_cause, result.next_sentence = self._then(settings, replayed)
        return result

    def chain(self) -> Result:
        """The fix that gains most, then the next one on top of it, until none gains much."""
        result = self._result()
        if result.off is not None:
            return result
        taken: list[Setting] = []
        left = [
            (setting, words) for setting, words in FIXES if self._bound(setting) > LEAST_GAIN * self.recorded_span_ns
        ]
        span = self.recorded_span_ns
        while left and len(taken) < LONGEST_CHAIN and span > 0:
            spans = [self.predict([*taken, setting]).span_ns for setting, _ in left]
            best = min(range(len(left)), key=lambda i: spans[i])
            gain = span - spans[best]
            if gain <= LEAST_GAIN * span:
                break
            setting, words = left.pop(best)
            taken.append(setting)
            span = spans[best]
            then = self._then(taken, self.predict(taken))
            result.chain.append(Step(setting.text, words, span, gain / self.recorded_span_ns, *then))
        result.predicted_span_ns = span
        result.gain_ratio = 1 - span / self.recorded_span_ns
        if result.chain:
            last = result.chain[-1]
            result.next_verdict, result.next_cause, result.next_sentence = (
                last.next_verdict,
                last.next_cause,
                last.next_sentence,
            )
        result.settings = [setting.text for setting in taken]
        return result

    def verdict_after(self, settings: Sequence[Setting], replayed: Replayed) -> Verdict | None:
        """What limits the trace as it would be; None without a judge, or where nothing is left of it."""
        if self._judge is None or replayed.span_ns <= 0:
            return None
        recording, _ = self._play_of(settings)
        ops, origin = self.prepared.operations, recording.origin_ns
        mine = _inside(self.prepared, self.window)
        mine = mine[:JUDGED_OPERATIONS] if len(mine) else np.arange(min(len(ops), JUDGED_OPERATIONS))
        low, high = int(replayed.start[mine].min()) + origin, int(replayed.end[mine].max()) + origin
        trace = retimed(recording, replayed, mine if len(mine) < len(ops) else None)
        same_kernels = not any(setting.cost in ("kernel", "comm") for setting in settings)
        return self._judge(trace, (low, high), same_kernels) if high > low else None

    def _then(self, settings: Sequence[Setting], replayed: Replayed) -> tuple[str | None, str | None, str | None]:
        """Class, cause and sentence of what limits then; no class where the rest cannot be judged."""
        verdict = self.verdict_after(settings, replayed)
        if verdict is None:
            return None, None, None
        return None if verdict.cls == "unusable" else verdict.cls, verdict.cause, verdict.sentence

    def gain_in_window_ns(self, setting: Setting, others: Sequence[Setting] = ()) -> int:
        """What a setting wins at most between the first and the last operation of the window, ns: alone, once the
        ``others`` are at work too, or with a host that is never late, whichever is most.

        What is hidden behind one limit shows when that is gone; and a host that keeps pace with the GPU may wait for it
        in ways that are not recorded.
        """
        if self.off is not None or self._bound(setting) <= 0:
            return 0
        most = 0
        for base in ((), tuple(others), _PROMPT_HOST):
            rest = tuple(other for other in base if other.cost != setting.cost)
            most = max(most, self._in_window_ns(rest) - self._in_window_ns((*rest, setting)))
        return most

    @property
    def window_ns(self) -> int:
        """From the first to the last operation of the window, as recorded."""
        return self._in_window_ns(())

    def _in_window_ns(self, settings: tuple[Setting, ...]) -> int:
        """How long the window's operations take with these settings."""
        if settings not in self._windows:
            mine = _inside(self.prepared, self.window)
            played = self.predict(settings)
            length = int(played.end[mine].max() - played.start[mine].min()) if len(mine) else 0
            self._windows[settings] = length
        return self._windows[settings]

    # --- parts -----------------------------------------------------------------------------------------------------------

    @cached_property
    def _recording(self) -> Recording:
        return record(self.prepared)

    @cached_property
    def _plain_replay(self) -> Replay:
        return Replay(self._recording)

    @cached_property
    def _overlapped(self) -> tuple[Recording, Replay]:
        recording = with_overlapped_copies(self._recording)
        return recording, Replay(recording)

    def _play_of(self, settings: Sequence[Setting]) -> tuple[Recording, Replay]:
        if any(setting.factor is None for setting in settings):
            return self._overlapped
        return self._recording, self._plain_replay

    def _result(self) -> Result:
        off = self.off
        span = self.recorded_span_ns
        try:
            replayed = self._unchanged_span_ns
        except InfprofError:
            replayed = 0
        notes = [] if off is not None else [_UNKNOWABLE]
        if off is None and self._recording.without_launch:
            share = self.unlaunched_ratio
            notes.append(f"{share:.1%} of the operations have no launch record: they follow their stream.")
        if self.part_of is not None:
            notes.append(
                f"Of the {self.part_of:,} operations of the window the {len(self.prepared.operations):,} in its middle were "
                "replayed; `infprof whatif` replays all of them."
            )
        if off is None and self.prepared.trace.os_calls is None:
            notes.append(
                "System calls were not recorded, so the host's time between CUDA calls counts as work: where it waited, "
                "everything but host=0 gains more than is shown."
            )
        error = (replayed - span) / span if span else 0.0
        return Result(span, replayed, error, self.unlaunched_ratio, off=off, notes=notes)

    def _bound(self, setting: Setting) -> int:
        """All the recorded time of a cost: no fix of it can gain more."""
        calls, ops = self._recording.calls, self.prepared.operations
        length = ops.end - ops.start
        if setting.cost == "launch":
            return int(calls.own[calls.cost == LAUNCH].sum())
        if setting.cost == "allocator":
            return int(calls.own[calls.cost == ALLOCATOR].sum())
        if setting.cost == "module-load":
            return int(calls.own[calls.cost == MODULE].sum())
        if setting.cost == "comm":
            return int(length[ops.is_comm].sum())
        if setting.cost == "copies":
            copies = self.prepared.trace.copies
            mine = np.flatnonzero(ops.kind == op.COPY)
            kind = copies["kind"][ops.row[mine]] if copies is not None else mine
            return int(length[mine[(kind == H2D) | (kind == D2H)]].sum())
        # Waits and the host's own work may take any part of the run.
        return self.recorded_span_ns
