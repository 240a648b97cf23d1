"""The fields of a description, checked one by one: what is missing, misspelt or misplaced is said in one sentence.

Durations are text with a unit ("12us", "1.5 ms"), sizes likewise ("32 MB", "4KiB") or whole bytes, rates are plain
numbers per second (FLOP/s, bytes/s). In memory all are ns, bytes, and per second.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from infprof.errors import UsageError

T = TypeVar("T")
U = TypeVar("U")

_TIME_UNITS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_SIZE_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def read_yaml(path: Path) -> Any:
    """What a description file says. Raises UsageError, in one sentence, for what cannot be read."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}. Give the path of a spec file.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text. Give the path of a spec file in YAML.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}.") from None


class Section:
    """One mapping of the file, whose keys are taken one by one; what is left over is a mistake."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise UsageError(f"{where}: expected keys with values, found {shown(data)}.")
        self.where = where
        self._left = dict(data)
        self._known: list[str] = []

    def take(self, key: str, parse: Callable[[Any, str], T], default: U) -> T | U:
        self._known.append(key)
        return parse(self._left.pop(key), f"{self.where}: {key}") if key in self._left else default

    def need(self, key: str, parse: Callable[[Any, str], T]) -> T:
        if key not in self._left:
            raise UsageError(f"{self.where}: {key} is missing.")
        self._known.append(key)
        return parse(self._left.pop(key), f"{self.where}: {key}")

    def has(self, key: str) -> bool:
        return key in self._left

    def done(self) -> None:
        for key in self._left:
            raise UsageError(f"{self.where}: no key {key!r} here.{did_you_mean(key, self._known)}")


def duration_ns(value: Any, where: str) -> int:
    """ "12us", "1.5 ms", 0 → whole ns. Raises UsageError."""
    return quantity(value, where, _TIME_UNITS, "a duration with its unit, such as 12us or 1.5ms")


def size_bytes(value: Any, where: str) -> int:
    """ "32 MB", "4KiB", 512 → bytes. Raises UsageError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return quantity(value, where, _SIZE_UNITS, "a size, such as 4096, 64KiB or 32MB")


def quantity(value: Any, where: str, units: dict[str, int], what: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zµ]+)\s*", str(value).lower())
    if value == 0 and not isinstance(value, bool):
        return 0
    if not match or match[2] not in units:
        raise UsageError(f"{where}: expected {what}, found {shown(value)}.")
    return round(float(match[1]) * units[match[2]])


def items(data: Any, where: str) -> list[tuple[Any, str]]:
    if not isinstance(data, list):
        raise UsageError(f"{where}: expected a list, found {shown(data)}.")
    return [(item, f"{where}[{number}]") for number, item in enumerate(data)]


def mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected keys with values, found {shown(value)}.")
    return value


def text_of(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: expected text, found {shown(value)}.")
    return value


def flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{where}: expected true or false, found {shown(value)}.")
    return value


def whole(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"{where}: expected a whole number, found {shown(value)}.")
    return value


def positive(value: Any, where: str) -> int:
    if whole(value, where) == 0:
        raise UsageError(f"{where}: expected a whole number over 0, found 0.")
    return int(value)


def rate(value: Any, where: str) -> float:
    """A number over 0. YAML reads 989e12 as text (it wants 989.0e+12), so text that is a number will do."""
    try:
        number = float(value) if not isinstance(value, bool) else 0.0
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise UsageError(f"{where}: expected a number over 0, found {shown(value)}.")
    return number


def share(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UsageError(f"{where}: expected a number from 0 to 1, found {shown(value)}.")
    return float(value)


def pair(value: Any, where: str) -> tuple[int, int]:
    first, second = numbers(value, where, 2)
    return first, second


def triple(value: Any, where: str) -> tuple[int, int, int]:
    first, second, third = numbers(value, where, 3)
    return first, second, third


def numbers(value: Any, where: str, count: int) -> list[int]:
    if not isinstance(value, list) or len(value) != count:
        raise UsageError(f"{where}: expected a list of {count} whole numbers, found {shown(value)}.")
    return [whole(item, where) for item in value]


def one_of(choices: tuple[str, ...]) -> Callable[[Any, str], str]:
    def parse(value: Any, where: str) -> str:
        if value not in choices:
            raise UsageError(f"{where}: expected one of {', '.join(choices)}, found {shown(value)}.")
        return str(value)

    return parse


def did_you_mean(name: str, known: Iterable[str]) -> str:
    known = sorted(map(str, known))
    close = difflib.get_close_matches(str(name), known, 1)
    return f" Did you mean {close[0]!r}?" if close else f" There are: {', '.join(known) or 'none'}."


def shown(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
