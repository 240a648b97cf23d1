"""A scrape's text to signals, fast enough to do every second.

An engine's text is some hundred lines, of which only the numbers change. What stands before a number is read once, by
prometheus_client, and where each number goes is worked out once; afterwards it is only checked that every line begins as
it did, and the numbers are taken. Texts of another layout are worked out anew. A line costs under half a microsecond then
instead of ten.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from infprof.probes.serving.engines import (
    ENGINE_LABELS,
    ENGINE_OF_PREFIX,
    REPEATING_LABELS,
    SIGNALS,
    START_TIME,
    Source,
    sources_of,
    split_prefix,
)

Labels = tuple[tuple[str, str], ...]

# A server that keeps inventing label values must not fill the memory.
_HEADS_MAX = 50_000


class Key(NamedTuple):
    """One series: ``engine`` is the parallel engine's number as the server writes it."""

    signal: str
    engine: str
    labels: Labels


class _Place(NamedTuple):
    """Where a sample belongs: ``group`` tells label sets apart that are added up, within one of the alternatives."""

    key: Key
    name: str
    part: int
    rank: int
    group: Labels


class Scrape(NamedTuple):
    """``values`` by series, ``names`` the exposed name behind each signal, ``engines`` the engines by their prefixes.

    ``repeated`` are the signals that several processes reported, of which the largest was taken. ``start_time`` is
    the server's own, in Unix seconds, None where it does not say. ``info`` are the labels of ``…_config_info``.
    """

    values: dict[Key, float]
    names: dict[str, str]
    engines: tuple[str, ...]
    repeated: frozenset[str]
    start_time: float | None
    info: dict[str, dict[str, str]]


# part, rank and exposed name, so that the smallest of a part is the best one.
_Alternative = tuple[int, int, str]


class _Series(NamedTuple):
    """A series and what it is made of: alternative → groups → positions in what ``_Layout.numbers`` gives."""

    key: Key
    alternatives: dict[_Alternative, list[list[int]]]

    @property
    def only(self) -> tuple[int, str] | None:
        """Position and exposed name of nearly every series: those of one number alone."""
        if len(self.alternatives) != 1:
            return None
        (((_, _, name), groups),) = self.alternatives.items()
        return (groups[0][0], name) if len(groups) == 1 and len(groups[0]) == 1 else None


class _Layout:
    """How the lines of a text begin, and what becomes of their numbers."""

    def __init__(self, heads: Sequence[str], places: Sequence[Sequence[_Place]]) -> None:
        self._heads = heads
        self._used = [(index, len(head)) for index, head in enumerate(heads) if places[index]]
        self.single: list[tuple[Key, int, str]] = []
        self.made_up: list[_Series] = []
        for series in _series_of([places[index] for index, _ in self._used]):
            if series.only is None:
                self.made_up.append(series)
            else:
                self.single.append((series.key, *series.only))

    def numbers(self, lines: Sequence[str]) -> list[float | None] | None:
        """The numbers of the lines that count, None for NaN and infinity; None where the lines are others."""
        if len(lines) != len(self._heads) or not all(map(str.startswith, lines, self._heads)):
            return None
        try:
            values = [float(lines[index][start:]) for index, start in self._used]
        except ValueError:
            return None
        return [value if math.isfinite(value) else None for value in values]


def _series_of(places: Sequence[Sequence[_Place]]) -> list[_Series]:
    found: dict[Key, dict[_Alternative, dict[Labels, list[int]]]] = {}
    for position, of_line in enumerate(places):
        for key, name, part, rank, group in of_line:
            found.setdefault(key, {}).setdefault((part, rank, name), {}).setdefault(group, []).append(position)
    return [
        _Series(key, {alternative: list(groups.values()) for alternative, groups in alternatives.items()})
        for key, alternatives in found.items()
    ]


class Exposition:
    """Reads the texts of one endpoint."""

    def __init__(self) -> None:
        self._heads: dict[str, tuple[_Place, ...]] = {}
        self._info: dict[str, dict[str, str]] = {}
        self._layout = _Layout((), ())

    def read(self, text: str) -> Scrape:
        """The signals of one text; lines that are no samples, and numbers that are NaN, are left out."""
        lines = [line for line in text.split("\n") if line and line[0] != "#"]
        numbers = self._layout.numbers(lines)
        if numbers is None:
            numbers = self._lay_out(lines)
        return self._result(numbers)

    def _lay_out(self, lines: Sequence[str]) -> list[float | None]:
        """Take the layout from these lines; their numbers, as ``_Layout.numbers`` gives them."""
        heads, all_places, numbers = [], [], []
        for line in lines:
            head, number = _split(line)
            places = self._heads.get(head)
            if places is None:
                places = self._learn(head)
            heads.append(f"{head} " if head else line)
            all_places.append(places)
            if places:
                numbers.append(_number(number))
        self._layout = _Layout(heads, all_places)
        return numbers

    def _result(self, numbers: Sequence[float | None]) -> Scrape:
        values, names, repeated = {}, {}, set()
        for key, position, name in self._layout.single:
            value = numbers[position]
            if value is not None:
                values[key], names[key.signal] = value, name
        for key, alternatives in self._layout.made_up:
            found, several = _present(alternatives, numbers)
            if found:
                values[key], names[key.signal] = _combined(key.signal, found)
            if several and key.signal != _START:
                repeated.add(key.signal)
        start = next((values.pop(key) for key in list(values) if key.signal == _START), None)
        names.pop(_START, None)
        engines = dict.fromkeys(ENGINE_OF_PREFIX.get(split_prefix(name)[0], "") for name in names.values())
        return Scrape(values, names, tuple(e for e in engines if e), frozenset(repeated), start, self._info)

    def _learn(self, head: str) -> tuple[_Place, ...]:
        if len(self._heads) >= _HEADS_MAX:
            self._heads.clear()
        places = self._heads[head] = tuple(_places(head))
        info = _config_info(head)
        if info is not None:
            self._info.setdefault(info[0], {}).update(info[1])
        return places


_START = "start_time"
_LINE = re.compile(r"([^#\s{][^\s{]*(?:\{.*\})?)\s+(\S+)")


def _split(line: str) -> tuple[str, str]:
    """The part before the number, and the number; a timestamp behind it is left out."""
    head, _, number = line.rpartition(" ")
    # The common form first: "name{labels} number". Everything else takes the careful way.
    if head.endswith("}") or (head and " " not in head and "{" not in head):
        return head, number
    match = _LINE.match(line)
    return (match.group(1), match.group(2)) if match else ("", "")


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _labels(head: str) -> tuple[str, dict[str, str]]:
    """Name and labels of a sample; an empty name where the line is not in the format."""
    try:
        for family in text_string_to_metric_families(f"{head} 0\n"):
            for sample in family.samples:
                return sample.name, dict(sample.labels)
    except (ValueError, KeyError, IndexError):
        pass
    return "", {}


def _places(head: str) -> list[_Place]:
    name = head.partition("{")[0]
    if name == START_TIME:
        return [_Place(Key(_START, "0", ()), name, 0, 0, ())]
    sources = sources_of(name)
    if not sources:
        return []
    parsed, labels = _labels(head)
    if parsed != name:
        return []
    return [place for source in sources if (place := _place(source, name, labels)) is not None]


def _place(source: Source, name: str, labels: Mapping[str, str]) -> _Place | None:
    for label, starts in source.only.items():
        if not labels.get(label, "").startswith(starts):
            return None
    # With priorities a queue gauge has one series for each of them, and one without for the total.
    if labels.get("priority") and not source.is_counter:
        return None
    engine = next((labels[label] for label in ENGINE_LABELS if label in labels), "0")
    kept = tuple(sorted((to, labels.get(label, "")) for label, to in source.keep.items()))
    other = {k: v for k, v in labels.items() if k not in source.keep and k not in REPEATING_LABELS}
    group = tuple(sorted((k, v) for k, v in other.items() if k not in ENGINE_LABELS))
    return _Place(Key(source.signal, engine, kept), name, source.part, source.rank, group)


def _present(
    alternatives: Mapping[_Alternative, Sequence[Sequence[int]]], numbers: Sequence[float | None]
) -> tuple[dict[_Alternative, list[float]], bool]:
    """The values of each alternative's groups, the largest where several processes report the same; whether any do."""
    found: dict[_Alternative, list[float]] = {}
    several = False
    for alternative, groups in alternatives.items():
        known = [[n for position in group if (n := numbers[position]) is not None] for group in groups]
        if values := [max(group) for group in known if group]:
            found[alternative] = values
        several = several or any(len(group) > 1 for group in known)
    return found, several


def _combined(signal: str, candidates: Mapping[_Alternative, Sequence[float]]) -> tuple[float, str]:
    """The value of one series and the exposed name it has: best alternative of each part, parts added."""
    best: dict[int, _Alternative] = {}
    for candidate in candidates:
        best[candidate[0]] = min(candidate, best.get(candidate[0], candidate))
    merge = max if SIGNALS.get(signal, _UNKNOWN).unit == "ratio" else math.fsum
    merged = [merge(candidates[candidate]) for _, candidate in sorted(best.items())]
    return math.fsum(merged), best[min(best)][2]


_UNKNOWN = SIGNALS["running_requests"]


def _config_info(head: str) -> tuple[str, dict[str, str]] | None:
    name, brace, _ = head.partition("{")
    if not brace or not name.endswith("_config_info"):
        return None
    _, labels = _labels(head)
    engine = next((labels[label] for label in ENGINE_LABELS if label in labels), "0")
    return engine, labels
