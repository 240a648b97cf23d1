"""A scrape's text to signals, fast enough to do every second.

An engine's text is some hundred lines, of which only the numbers change. prometheus_client reads what stands before a
number once; afterwards that part of the line is looked up. A line costs about half a microsecond then instead of ten.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
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


class Exposition:
    """Reads the texts of one endpoint."""

    def __init__(self) -> None:
        self._heads: dict[str, tuple[_Place, ...]] = {}
        self._info: dict[str, dict[str, str]] = {}

    def read(self, text: str) -> Scrape:
        """The signals of one text; lines that are no samples, and numbers that are NaN, are left out."""
        found: dict[Key, dict[tuple[int, int, str], dict[Labels, float]]] = {}
        repeated: set[str] = set()
        for line in text.split("\n"):
            if line.startswith("#"):
                continue
            head, number = _split(line)
            places = self._heads.get(head)
            if places is None:
                places = self._learn(head)
            if not places:
                continue
            value = _number(number)
            if value is None:
                continue
            for key, name, part, rank, group in places:
                groups = found.setdefault(key, {}).setdefault((part, rank, name), {})
                known = groups.get(group)
                if known is not None and key.signal != _START:
                    repeated.add(key.signal)
                groups[group] = value if known is None else max(known, value)
        return self._result(found, repeated)

    def _result(self, found: dict[Key, dict[tuple[int, int, str], dict[Labels, float]]], repeated: set[str]) -> Scrape:
        values, names = {}, {}
        for key, candidates in found.items():
            value, name = _combined(key.signal, candidates)
            values[key] = value
            names[key.signal] = name
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


def _combined(signal: str, candidates: Mapping[tuple[int, int, str], Mapping[Labels, float]]) -> tuple[float, str]:
    """The value of one series and the exposed name it has: best alternative of each part, parts added."""
    if len(candidates) == 1:
        ((only, groups),) = candidates.items()
        if len(groups) == 1:  # nearly all of them
            return next(iter(groups.values())), only[2]
    best: dict[int, tuple[int, int, str]] = {}
    for candidate in candidates:
        best[candidate[0]] = min(candidate, best.get(candidate[0], candidate))
    merge = max if SIGNALS.get(signal, _UNKNOWN).unit == "ratio" else math.fsum
    merged = [merge(candidates[candidate].values()) for _, candidate in sorted(best.items())]
    return math.fsum(merged), best[min(best)][2]


_UNKNOWN = SIGNALS["running_requests"]


def _config_info(head: str) -> tuple[str, dict[str, str]] | None:
    name, brace, _ = head.partition("{")
    if not brace or not name.endswith("_config_info"):
        return None
    _, labels = _labels(head)
    engine = next((labels[label] for label in ENGINE_LABELS if label in labels), "0")
    return engine, labels
