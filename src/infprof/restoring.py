"""Dataclasses from the plain dicts and lists of a JSON file, checked against their own type hints.

The reverse of ``results.plain``: keys are field names (``class`` for ``cls``), keys that no field has are ignored, and
a key that is absent takes the field's default. Everything else that does not fit is a StructureError that says where.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_KEYS = {"cls": "class"}
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}


class StructureError(ValueError):
    """Data that does not have the shape of a class; the message names the place and what was expected there."""


def restored(cls: type[_T], data: Any, place: str = "") -> _T:
    """An instance of the dataclass from a dict. Raises StructureError where the data does not fit the type hints."""
    if not isinstance(data, dict):
        raise StructureError(f"{place or 'the whole'} is {_kind(data)}, not an object")
    values = {}
    for field, hint in _typed_fields(cast("Hashable", cls)):
        key = _KEYS.get(field.name, field.name)
        where = f"{place}.{key}" if place else key
        if key in data:
            values[field.name] = _value(hint, data[key], where)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise StructureError(f"{where} is missing")
    return cls(**values)


@cache
def _typed_fields(cls: Any) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(cls)
    return [(field, hints[field.name]) for field in fields(cls)]


def _value(hint: Any, data: Any, place: str) -> Any:
    """The data as what the type hint says: a dataclass, a list, a dict, a union of these, or a plain value."""
    if hint is Any:
        return data
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _one_of(arguments, data, place)
    if is_dataclass(hint) and isinstance(hint, type):
        return restored(hint, data, place)
    if origin is list and isinstance(data, list):
        return [_value(arguments[0], item, f"{place}[{number}]") for number, item in enumerate(data)]
    if origin is dict and isinstance(data, dict):
        return {key: _value(arguments[1], item, f"{place}.{key}") for key, item in data.items()}
    if _is(hint, data):
        return data
    raise StructureError(f"{place} is {_kind(data)}, not {_expected(hint)}")


def _one_of(hints: tuple[Any, ...], data: Any, place: str) -> Any:
    """The data as one of several: None, plain values, or at most one that has parts."""
    if any(_is(hint, data) for hint in hints):
        return data
    parts = [hint for hint in hints if get_origin(hint) is not None or is_dataclass(hint)]
    if parts and isinstance(data, list if get_origin(parts[0]) is list else dict):
        return _value(parts[0], data, place)
    raise StructureError(f"{place} is {_kind(data)}, not {' or '.join(map(_expected, hints))}")


def _is(hint: Any, data: Any) -> bool:
    """Whether data is a plain value of the type; true is no number, and a whole number may stand for any number."""
    if hint not in _WORDS:
        return False
    if isinstance(data, bool):
        return hint is bool
    return isinstance(data, (int, float) if hint is float else hint)


def _expected(hint: Any) -> str:
    return _WORDS.get(hint, "a list" if get_origin(hint) is list else "an object")


def _kind(data: Any) -> str:
    return _WORDS.get(type(data), "a list" if isinstance(data, list) else "an object")
