"""What a scenario makes of a finding: ``rules/scenarios.yaml``, which a folder of the user's may override in part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from infprof.errors import UsageError
from infprof.rules.expression import unknown
from infprof.rules.model import AREAS, SCENARIOS

FILE_NAME = "scenarios.yaml"
# A factor further away would hide findings, not order them.
_LOWEST, _HIGHEST = 0.1, 10.0
_KEYS = ("elsewhere", "areas")


@dataclass(frozen=True)
class Scenario:
    """Factors by area, and ``elsewhere`` for findings whose rule does not name the scenario."""

    elsewhere: float = 1.0
    areas: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenarios:
    """The scenarios by name; without any, everything weighs 1."""

    by_name: Mapping[str, Scenario] = field(default_factory=dict)

    def weight(self, scenario: str | None, area: str, scenarios: Collection[str]) -> float:
        """The factor on the place of a finding of this area whose rule names these scenarios; 1 without a scenario."""
        chosen = self.by_name.get(scenario or "")
        if chosen is None:
            return 1.0
        return chosen.areas.get(area, 1.0) * (1.0 if scenario in scenarios else chosen.elsewhere)


def load_scenarios(dirs: Sequence[Path]) -> Scenarios:
    """Merge the scenario files of ``dirs``, factors of later ones over those of earlier ones.

    Raises UsageError for a file that is none, a name that does not exist, or a factor that is no factor.
    """
    found: dict[str, Scenario] = {}
    for directory in dirs:
        path = Path(directory) / FILE_NAME
        if path.is_file():
            for name, given in _read(path).items():
                found[name] = _scenario(path, name, given, found.get(name, Scenario()))
    return Scenarios(found)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a YAML file: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    return _mapping(path, "", data, SCENARIOS, "scenario")


def _scenario(path: Path, name: str, data: Any, before: Scenario) -> Scenario:
    given = _mapping(path, f" {name}:", data, _KEYS, "key")
    areas = _mapping(path, f" {name}, areas:", given.get("areas") or {}, AREAS, "area")
    return Scenario(
        _factor(path, f"{name}: elsewhere", given.get("elsewhere", before.elsewhere)),
        {**before.areas, **{area: _factor(path, f"{name}: {area}", value) for area, value in areas.items()}},
    )


def _mapping(path: Path, place: str, data: Any, known: Collection[str], what: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise UsageError(f"{path}:{place} expected lines of the form `{what}: …`")
    for key in data:
        if key not in known:
            raise UsageError(f"{path}:{place} {unknown(what, str(key), known)}")
    return data


def _factor(path: Path, place: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _LOWEST <= value <= _HIGHEST:
        raise UsageError(f"{path}: {place} must be a factor from {_LOWEST:g} to {_HIGHEST:g}, not {value!r}")
    return float(value)
