"""The diagnosis as JSON, and the JSON Schema (draft 2020-12) that it keeps."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from infprof.results import Diagnosis


def render(diagnosis: Diagnosis, options: None = None) -> str:
    """The contract as indented JSON with a final newline; keys keep the order of the contract.

    Pure ASCII: names from a trace may hold broken surrogates, which no encoding of a terminal or file would take.
    """
    return json.dumps(diagnosis.to_dict(), indent=2, allow_nan=False) + "\n"


def schema() -> dict[str, Any]:
    """The published JSON Schema of ``schema_version`` 1.x."""
    text = files("infprof.reports").joinpath("schema/diagnosis-1.0.json").read_text(encoding="utf-8")
    return cast("dict[str, Any]", json.loads(text))
