"""The parts of the corpus that the command and the tests can choose from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from benchmarks.accuracy import cases, injected, public, sweep
from benchmarks.accuracy.labels import Case

PARTS = ("whole", "ci", "held-out")
_SIZES = (0.0, 0.2, 0.35, 0.5, 0.75, 1.0)


def corpus(part: str, count: int | None = None) -> Iterator[Case]:
    """The cases of a part. ``count``: workloads drawn for it; each gives up to two cases.

    ``whole`` is everything but ``held-out``, whose seeds, devices and sizes no mending has ever looked at. ``ci`` is a
    small piece of ``whole``.
    """
    if part == "held-out":
        return chain(
            sweep.cases(sweep.HELD_OUT, "held-out", 78, 120 if count is None else count),
            injected.cases("held-out", 5_000, (0.1, 0.3, 0.45, 0.6, 0.9)),
        )
    if part == "ci":
        drawn = sweep.cases(sweep.TUNED, "sweep", 1, 12 if count is None else count)
        samples = (case for case in public.cases() if case.source == "samples")
        return chain(drawn, injected.cases("injected", 1, (0.1, 0.75)), samples, cases.cases())
    drawn = sweep.cases(sweep.TUNED, "sweep", 1, 160 if count is None else count)
    return chain(drawn, injected.cases("injected", 1, _SIZES), public.cases(), cases.cases())
