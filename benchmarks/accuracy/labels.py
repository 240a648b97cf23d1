"""What a right answer is: verdicts that may be given, findings that must, may and must not be there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Causes of a class where each is right.
ANY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Label:
    """The right answer to a case.

    ``verdicts``: class → causes that are right with it (``ANY``: all, also none). ``must``: of each group at least one
    finding is there. ``may``: findings that are right and that nobody misses; the truth is near their threshold, or two
    rules may both claim it. Of the rules in ``judged`` every other finding is wrong; findings of further rules are not
    judged. ``doubtful``: verdicts that are right only with a confidence of at most 0.6. ``healthy``: nothing is wrong
    with the run, so no finding may be above info.
    """

    verdicts: Mapping[str, frozenset[str]]
    must: tuple[frozenset[str], ...] = ()
    may: frozenset[str] = frozenset()
    judged: frozenset[str] = frozenset()
    doubtful: Mapping[str, frozenset[str]] = field(default_factory=dict)
    healthy: bool = False

    @property
    def expected(self) -> str:
        """The class in a word for the table of confusions; several where each is right."""
        return "|".join(sorted(self.verdicts))


def either(labels: Iterable[Label]) -> Label:
    """The label where one of several is the truth: what all demand must be there, what any allows may."""
    all_of = list(labels)
    verdicts: dict[str, frozenset[str]] = {}
    doubtful: dict[str, frozenset[str]] = {}
    for label in all_of:
        for cls, causes in label.verdicts.items():
            known = verdicts.get(cls)
            verdicts[cls] = causes if known is None else ANY if not (known and causes) else known | causes
        doubtful.update(label.doubtful)
    must = tuple(group for group in all_of[0].must if all(group in label.must for label in all_of))
    allowed = frozenset().union(*(label.may.union(*label.must) for label in all_of))
    return Label(
        verdicts,
        must,
        allowed,
        frozenset.intersection(*(label.judged for label in all_of)),
        doubtful,
        all(label.healthy for label in all_of),
    )


@dataclass(frozen=True)
class Case:
    """A labelled trace. ``source``: which part of the corpus it is of; ``make`` writes its files into a folder (or names
    those that are there) and gives its label: they are made only when they are judged."""

    name: str
    source: str
    make: Callable[[Path], tuple[list[Path], Label]]
    window: str = "auto"
