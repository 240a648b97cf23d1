"""The comparison as JSON: see docs/compare.md."""

from __future__ import annotations

import json

from infprof.compare.model import Comparison


def render(comparison: Comparison) -> str:
    """Indented JSON in ASCII with a final newline."""
    return json.dumps(comparison.to_dict(), indent=2, allow_nan=False) + "\n"
