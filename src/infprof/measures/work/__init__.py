"""Counted work (evidence rank B): FLOP and bytes from the shapes that operators were called with.

A new operator is one formula in the module of its kind (matrix, attention, memory_ops) and one line in its table.
"""

from infprof.measures.work.advice import add_advice
from infprof.measures.work.counting import CountedWork, count_work
from infprof.measures.work.measuring import (
    NO_OPERATORS,
    NO_SHAPES,
    PHASE_MEASURES,
    RoofLimits,
    add_engine_work,
    add_work,
)
from infprof.measures.work.roofline import ScopeWork, scope_work, shares
from infprof.measures.work.table import work_table

__all__ = [
    "NO_OPERATORS",
    "NO_SHAPES",
    "PHASE_MEASURES",
    "CountedWork",
    "RoofLimits",
    "ScopeWork",
    "add_advice",
    "add_engine_work",
    "add_work",
    "count_work",
    "scope_work",
    "shares",
    "work_table",
]
