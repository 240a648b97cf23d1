"""Which formula an operator has: one table out of the modules that hold them."""

from __future__ import annotations

from infprof.measures.work import attention, matrix, memory_ops
from infprof.measures.work.call import Call, Formula, Work
from infprof.trace import OperatorInputs

# In order; a name stands in one of them only.
_MODULES = (matrix, attention, memory_ops)

FORMULAS: dict[str, Formula] = {name: formula for module in _MODULES for name, formula in module.FORMULAS.items()}


def formula_of(name: str) -> Formula | None:
    """The formula of an operator, None where it has none."""
    return FORMULAS.get(name) or memory_ops.compiled(name)


def operator_work(name: str, inputs: OperatorInputs) -> Work | None:
    """The counted work of one call, None where the operator has no formula or its inputs are not of the form it knows."""
    formula = formula_of(name)
    return None if formula is None else formula(Call(inputs))
