"""The small language of rule conditions: measures, numbers, arithmetic, comparisons, and/or/not, abs/min/max."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from simpleeval import SimpleEval

_FUNCTIONS = {"abs": abs, "min": min, "max": max}

_ALLOWED = (
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.UnaryOp,
    ast.Not,
    ast.USub,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.Compare,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.Eq,
    ast.NotEq,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.Call,
)


class ExpressionError(ValueError):
    """The text is no expression of this language; the message says why, without saying where."""


@dataclass(frozen=True)
class Expression:
    """A checked expression. ``names`` are the measures and thresholds in it, in order of appearance."""

    text: str
    names: tuple[str, ...]
    _tree: ast.expr = field(repr=False, compare=False)

    def value(self, values: Mapping[str, float]) -> float:
        """The result; ``values`` must hold every name. Raises ZeroDivisionError on a division by zero."""
        result = SimpleEval(names=dict(values), functions=_FUNCTIONS).eval(self.text, previously_parsed=self._tree)
        return float(result)


def parse(text: str, known: Collection[str]) -> Expression:
    """Check ``text`` against the language and the ``known`` names; raises ExpressionError."""
    text = " ".join(text.split())
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ExpressionError(f"`{text}` is not an expression: {getattr(error, 'msg', error)}") from None
    functions = set()
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise ExpressionError(f"`{ast.unparse(node)}` is not allowed in an expression")
        if isinstance(node, ast.Constant) and (
            isinstance(node.value, bool) or not isinstance(node.value, (int, float))
        ):
            raise ExpressionError(f"`{ast.unparse(node)}` is not a number")
        if isinstance(node, ast.Call):
            functions.add(_checked_function(node))
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node not in functions]
    for name in names:
        if name.id not in known:
            raise ExpressionError(unknown("measure", name.id, known))
    ordered = sorted(names, key=lambda node: (node.lineno, node.col_offset))
    return Expression(text, tuple(dict.fromkeys(node.id for node in ordered)), tree)


def unknown(what: str, name: str, known: Collection[str]) -> str:
    """``no measure `idle_ration`. Did you mean `idle_ratio`?``"""
    close = difflib.get_close_matches(name, known, n=1)
    return f"no {what} `{name}`" + (f". Did you mean `{close[0]}`?" if close else "")


def _checked_function(node: ast.Call) -> ast.Name:
    if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS or node.keywords or not node.args:
        raise ExpressionError(f"`{ast.unparse(node)}` is not allowed: the functions are {', '.join(_FUNCTIONS)}")
    return node.func
