"""The figures that a change may not fall under, in floor.json, and what falls under them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.accuracy.scoring import Score

FLOOR = Path(__file__).with_name("floor.json")


def recorded() -> dict[str, Any]:
    floor: dict[str, Any] = json.loads(FLOOR.read_text(encoding="utf-8"))
    return floor


def under_floor(result: Score, floor: dict[str, Any]) -> list[str]:
    """What of a result is under the floor, in sentences; empty where nothing is."""
    found = [
        f"{name} is {value:.1%}, under {floor[name]:.1%}"
        for name, value in (("class_accuracy", result.class_accuracy), ("cause_accuracy", result.cause_accuracy))
        if value < floor[name]
    ]
    for rule, score in result.rules.items():
        for name, value in (("precision", score.precision), ("recall", score.recall)):
            if value is not None and value < floor[name]:
                found.append(f"{name} of {rule} is {value:.1%}, under {floor[name]:.1%}")
    if result.healthy_with_serious > floor["healthy_with_serious"]:
        found.append(f"{result.healthy_with_serious} healthy runs have a finding above info")
    return found
