"""``--gpu-spec``: the peaks of a device that a user gives, on their own or over those of the table."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from infprof.errors import UsageError
from infprof.hardware import PRECISION_COLUMNS, Match, Peaks, by_sku, known_skus

_OPTION = "--gpu-spec"
_TEXT_KEYS = ("name", "like")
_WHOLE_KEYS = ("sm_count", "boost_mhz", "pcie_gen", "pcie_width")
# The keys are the columns of peaks.tsv, with what is still believed: more is a slip of the unit.
_HIGHEST: Mapping[str, float] = {
    **dict.fromkeys(PRECISION_COLUMNS.values(), 200_000),
    "dram_gb_per_s": 100_000,
    "memory_gb": 10_000,
    "cache_mb": 10_000,
    "nvlink_gb_per_s": 20_000,
    "pcie_gen": 6,
    "pcie_width": 32,
    "sm_count": 10_000,
    "boost_mhz": 10_000,
}
KEYS = (*_TEXT_KEYS, *_HIGHEST)


@dataclass(frozen=True)
class GpuSpec:
    """Peaks by the names of the table's columns: dense TFLOP/s, GB/s (links per direction), GB.

    ``name`` limits it to devices of that name (``*`` matches, case does not count); ``like`` is the row of the table
    that gives what ``values`` leaves open. ``text`` is what the user wrote.
    """

    text: str
    name: str | None = None
    like: str | None = None
    values: Mapping[str, float] = field(default_factory=dict)

    def applies_to(self, device_name: str | None) -> bool:
        """Whether the device is one that was meant."""
        return self.name is None or fnmatchcase((device_name or "").strip().casefold(), self.name.casefold())

    def over(self, found: Match) -> Match:
        """The peaks that apply: what was given, then the row ``like``, then what the table has for the device."""
        base = found.peaks if self.like is None else by_sku(self.like)
        given = {p: self.values[c] * 1e12 for p, c in PRECISION_COLUMNS.items() if c in self.values}
        bandwidth = self.values.get("dram_gb_per_s")
        if base is None:
            if bandwidth is None or not given:
                lacking = "dram_gb_per_s" if bandwidth is None else "a peak of arithmetic such as bf16_tflops"
                return Match(None, f"{found.reason}, and {_OPTION} gives no {lacking}")
            base = _nothing_known(bandwidth * 1e9)
            sku = _OPTION
        else:
            sku = f"{base.sku}, changed by {_OPTION}" if self.values else f"{base.sku} by {_OPTION}"
        changes: dict[str, Any] = {name: int(self.values[name]) for name in _WHOLE_KEYS if name in self.values}
        for name, column, scale in _SCALED:
            if column in self.values:
                changes[name] = self.values[column] * scale
        for name in ("memory_bytes", "cache_bytes"):
            if name in changes:
                changes[name] = int(changes[name])
        rates = {**base.flop_per_s, **given}
        return Match(replace(base, sku=sku, flop_per_s=rates, source=_OPTION, confidence="given", **changes), None)


# Field of Peaks, column, factor to base units. Sizes are GiB and MiB, as in device names.
_SCALED = (
    ("dram_bytes_per_s", "dram_gb_per_s", 1e9),
    ("memory_bytes", "memory_gb", 2**30),
    ("cache_bytes", "cache_mb", 2**20),
    ("nvlink_bytes_per_s", "nvlink_gb_per_s", 1e9),
)


def parse_gpu_spec(text: str) -> GpuSpec:
    """What ``--gpu-spec`` says: ``KEY=VALUE,…``, or a file (YAML or JSON) of the same keys.

    Raises UsageError, in one sentence, for a key or value that cannot be meant.
    """
    data = _pairs(text) if "=" in text and not Path(text).is_file() else _file(Path(text))
    place = "" if "=" in text and not Path(text).is_file() else f" {text}"
    where = f"{_OPTION}{place}"
    if not data:
        raise UsageError(
            f"{where}: nothing is given. Write KEY=VALUE pairs such as bf16_tflops=300,dram_gb_per_s=2000."
        )
    values: dict[str, float] = {}
    for key, value in data.items():
        if key not in KEYS:
            raise UsageError(f"{where}: there is no key {key}. {_hint(str(key), KEYS)}")
        if key not in _TEXT_KEYS:
            values[str(key)] = _number(where, str(key), value)
    name, like = (_text(where, key, data.get(key)) for key in _TEXT_KEYS)
    if like is not None and by_sku(like) is None:
        raise UsageError(f"{where}: the table has no {like}. {_hint(like, known_skus())}")
    if like is None and not values:
        raise UsageError(f"{where}: a name alone gives no peak. Add numbers such as bf16_tflops=300, or like=SKU.")
    return GpuSpec(" ".join(f"{key}={value}" for key, value in data.items()), name, like, values)


def _pairs(text: str) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not key or not equals or not value:
            raise UsageError(f"{_OPTION} {text}: write KEY=VALUE pairs with commas between, not `{part.strip()}`.")
        if key in data:
            raise UsageError(f"{_OPTION} {text}: {key} is given twice.")
        data[key] = value
    return data


def _file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{_OPTION} {path}: it is neither KEY=VALUE pairs nor a file that can be read ({error.strerror or error})."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{_OPTION} {path}: it is not YAML or JSON: {' '.join(str(error).split())}.") from None
    if data is not None and not isinstance(data, dict):
        raise UsageError(f"{_OPTION} {path}: expected lines of the form `key: value`.")
    return data or {}


def _number(where: str, key: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    highest = _HIGHEST[key]
    if not 0 < number <= highest:
        raise UsageError(f"{where}: {key} is a number above 0 and up to {highest:g}, not {value}.")
    if key in _WHOLE_KEYS and number != int(number):
        raise UsageError(f"{where}: {key} is a whole number, not {value}.")
    return number


def _text(where: str, key: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where}: {key} is a name, not {value}.")
    return value.strip()


def _hint(word: str, known: Collection[str]) -> str:
    # What comes behind is what is most easily forgotten: the unit of a key, the form of a card.
    longer = [name for name in known if name.casefold().startswith((f"{word.casefold()}_", f"{word.casefold()}-"))]
    near = longer or difflib.get_close_matches(word, known, 1)
    return f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(known)}."


def _nothing_known(dram_bytes_per_s: float) -> Peaks:
    return Peaks(
        sku=_OPTION,
        arch="",
        compute_capability=None,
        sm_count=None,
        boost_mhz=None,
        flop_per_s={},
        memory_bytes=None,
        dram_bytes_per_s=dram_bytes_per_s,
        cache_bytes=None,
        nvlink_bytes_per_s=None,
        pcie_gen=None,
        pcie_width=None,
        source=_OPTION,
        confidence="given",
        note="",
    )
