"""Rule files to rules: every file is checked when it is read, and a broken one does not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from infprof.errors import UsageError
from infprof.measures.names import MEASURES
from infprof.replay.setting import Setting, parse_setting
from infprof.results import SEVERITIES, VERDICT_CLASSES, Remedy
from infprof.rules import model, scenarios, thresholds
from infprof.rules.expression import Expression, ExpressionError, parse, unknown

T = TypeVar("T")

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NO_RULES = (thresholds.FILE_NAME, scenarios.FILE_NAME)

# Thresholds may stand in conditions too, so that a number of the verdict is not written twice.
_NAMES = (*MEASURES, *thresholds.THRESHOLD_NAMES)

# Of every rule; finding rules also need those of _FINDING_KEYS, except for a gain where no time is claimed.
_KEYS = (
    "id",
    "title",
    "area",
    "layer",
    "scenarios",
    "remedy_kind",
    "needs",
    "when",
    "why",
    "evidence",
    "remedies",
    "quiet_when",
    "references",
    "cases",
)
_FINDING_KEYS = ("cost", "where", "gain")
_OPTIONAL_KEYS = (
    "defaults",
    "pool",
    "severity",
    "confidence",
    "rank",
    "confirmed",
    "approach",
    "ncu",
    "replay",
    "states",
    "class",
    "cause",
    "notes",
)


@dataclass(frozen=True)
class Broken:
    """A rule file that cannot be used: where and why."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}"


@dataclass(frozen=True)
class RuleSet:
    """The rules in use, in order of their files, the broken files, the thresholds that conditions may name, and what
    scenarios make of findings."""

    rules: tuple[model.Rule, ...]
    broken: tuple[Broken, ...]
    thresholds: thresholds.Thresholds
    scenarios: scenarios.Scenarios = field(default_factory=scenarios.Scenarios)

    def get(self, rule_id: str) -> model.Rule:
        """The rule called ``rule_id``; raises UsageError with the nearest name when there is none."""
        for rule in self.rules:
            if rule.id == rule_id:
                return rule
        for broken in self.broken:
            if broken.path.stem == rule_id:
                raise UsageError(f"rule {rule_id} is broken: {broken}")
        raise UsageError(unknown("rule", rule_id, [rule.id for rule in self.rules]))

    def stating(self, cls: str, cause: str | None = None, fired: Sequence[str] = ()) -> model.Rule | None:
        """The rule that explains the verdict ``cls`` with this cause, else one that explains the class as such.

        Of several, one among ``fired`` (ids): the rules that made a finding, the first first. Where none of them did, one of
        the class that did knows more of this trace.
        """
        of_class = [rule for rule in self.rules if rule.cls == cls]
        exact = [rule for rule in of_class if rule.cause == cause]
        exact.sort(key=lambda rule: rule.id not in fired)
        if exact and exact[0].id not in fired:
            caused = {rule.id: rule for rule in of_class if rule.cause is not None}
            exact = [caused[rule] for rule in fired if rule in caused] + exact
        general = [rule for rule in of_class if rule.cause is None]
        return next(iter(exact + general), None)


class _Bad(Exception):
    """Something is wrong at a place in the file: a path of keys, () for the whole."""

    def __init__(self, place: tuple[str | int, ...], reason: str) -> None:
        super().__init__(reason)
        self.place = place
        self.reason = reason


def load(dirs: Sequence[Path]) -> RuleSet:
    """Read all rule files below ``dirs``, in order; the first file of an id keeps it."""
    rules: dict[str, model.Rule] = {}
    broken: list[Broken] = []
    for path in _files(dirs):
        lines: dict[tuple[str | int, ...], int] = {}
        try:
            rule = _read(path, lines)
            if rule.id in rules:
                raise _Bad(("id",), f"the id `{rule.id}` is already that of {rules[rule.id].path}")
            rules[rule.id] = rule
        except _Bad as bad:
            broken.append(Broken(path, _line(lines, bad.place), bad.reason))
    return RuleSet(
        tuple(rules.values()), tuple(broken), thresholds.load_thresholds(dirs), scenarios.load_scenarios(dirs)
    )


def _files(dirs: Sequence[Path]) -> Iterator[Path]:
    for directory in dirs:
        if not Path(directory).is_dir():
            raise UsageError(f"{directory} is not a folder of rules")
        for path in sorted(Path(directory).rglob("*")):
            if path.suffix in (".yaml", ".yml") and path.name not in _NO_RULES and path.is_file():
                yield path


def _read(path: Path, lines: dict[tuple[str | int, ...], int]) -> model.Rule:
    data = _parse_yaml(path, lines)
    for key in data:
        if key not in _KEYS and key not in _FINDING_KEYS and key not in _OPTIONAL_KEYS:
            raise _Bad((key,), unknown("key", key, (*_KEYS, *_FINDING_KEYS, *_OPTIONAL_KEYS)))
    states = "states" in data
    for key in (*_KEYS, *(() if states else _FINDING_KEYS)):
        if key not in data and not (key == "gain" and data["cost"] == "none"):
            raise _Bad((), f"the section `{key}` is missing")
    if states and (extra := [key for key in (*_FINDING_KEYS, "pool", "severity", "class") if key in data]):
        raise _Bad((extra[0],), f"a rule with `states` makes no finding: `{extra[0]}` has no use in it")
    return _Fields(path, data).rule()


def _parse_yaml(path: Path, lines: dict[tuple[str | int, ...], int]) -> dict[str, Any]:
    """The file as plain data; fills ``lines`` with the line of every key and item."""
    loader = None
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise _Bad((), "expected a rule: lines of the form `key: value`")
        data: dict[str, Any] = _plain(loader, node, (), lines)
        return data
    except yaml.MarkedYAMLError as error:
        # A quote that is never closed is noticed at the end of the file, and meant where it begins.
        mark = error.context_mark if "quoted" in str(error.context) else error.problem_mark
        lines[()] = mark.line + 1 if mark else 1
        raise _Bad((), f"not YAML: {error.problem}") from None
    except RecursionError:
        raise _Bad((), "an alias in it refers to itself") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise _Bad((), f"cannot be read: {' '.join(str(error).split())}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _plain(loader: Any, node: yaml.Node, place: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int]) -> Any:
    """A node as plain data, its line and those below it noted on the way: one walk instead of PyYAML's own and ours."""
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        data = {}
        for key, value in node.value:
            here = (*place, str(key.value))
            twice = here in lines
            lines[here] = key.start_mark.line + 1
            if twice:
                raise _Bad(here, f"`{key.value}` is given twice")
            if not isinstance(key, yaml.ScalarNode):
                raise _Bad(here, "a key must be a word")
            data[_scalar(loader, key)] = _plain(loader, value, here, lines)
        return data
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, (*place, number), lines) for number, item in enumerate(node.value)]
    return _scalar(loader, node)


def _scalar(loader: Any, node: yaml.Node) -> Any:
    return node.value if node.tag == "tag:yaml.org,2002:str" else loader.construct_object(node)


def _line(lines: Mapping[tuple[str | int, ...], int], place: tuple[str | int, ...]) -> int:
    while place and place not in lines:
        place = place[:-1]
    return lines.get(place, 1)


class _Fields:
    """The checked reading of one file's fields; every check names the place that is wrong."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self._path = path
        self._data = data

    def rule(self) -> model.Rule:
        cls, cause = self._verdict()
        cost, unit = self._cost()
        fixed, levels = self._severity()
        confidence, doubts = self._confidence()
        return model.Rule(
            id=self._id(),
            title=self._text("title"),
            area=self._choice("area", model.AREAS),
            layer=self._choice("layer", model.LAYERS),
            scenarios=self._choices("scenarios", model.SCENARIOS),
            remedy_kind=self._choice("remedy_kind", model.REMEDY_KINDS),
            approach=self._approach(),
            states="states" in self._data,
            cls=cls,
            cause=cause,
            needs=self._choices("needs", model.TABLES),
            when=self._expression(("when",), self._data["when"]),
            defaults=self._defaults(),
            cost=cost,
            cost_unit=unit,
            pool=self._pool(cost),
            levels=levels,
            fixed_severity=fixed,
            confidence=confidence,
            doubts=doubts,
            notes=self._items("notes", self._note) if "notes" in self._data else (),
            rank=self._choice("rank", tuple(model.RANKS)) if "rank" in self._data else None,
            confirmed=self._expression(("confirmed",), self._data["confirmed"]) if "confirmed" in self._data else None,
            why=self._text("why"),
            evidence=self._choices("evidence", tuple(MEASURES), what="measure"),
            where=self._selector("where"),
            ncu=self._selector("ncu") if "ncu" in self._data else None,
            replay=self._replay(),
            remedies=self._remedies(),
            gain=self._gain(),
            quiet_when=self._text("quiet_when"),
            references=self._items("references", self._string),
            cases=self._items("cases", self._case),
            path=self._path,
        )

    def _approach(self) -> str:
        """What kind of change it takes; a rule that does not say it is taken at its remedies."""
        if "approach" in self._data:
            return self._choice("approach", model.APPROACHES)
        return "hardware" if self._data["remedy_kind"] == "hardware" else "system"

    def _replay(self) -> Setting | None:
        """What a replay takes away to see what the finding costs."""
        if "replay" not in self._data:
            return None
        try:
            return parse_setting(self._text("replay"))
        except UsageError as error:
            raise _Bad(("replay",), str(error).removeprefix("--set ")) from None

    def _id(self) -> str:
        rule_id = self._text("id")
        if rule_id != self._path.stem:
            raise _Bad(("id",), f"the id `{rule_id}` must be the file's name, `{self._path.stem}`")
        return rule_id

    def _verdict(self) -> tuple[str | None, str | None]:
        key = "states" if "states" in self._data else "class"
        cls = self._choice(key, VERDICT_CLASSES) if key in self._data else None
        cause = self._text("cause") if "cause" in self._data else None
        if cause is not None and cls is None:
            raise _Bad(("cause",), "a `cause` needs the `class` that it belongs to")
        return cls, cause

    def _cost(self) -> tuple[Expression | None, str]:
        if self._data.get("cost", "none") == "none":
            return None, "ns"
        cost = self._expression(("cost",), self._data["cost"])
        units = {MEASURES[name].unit for name in cost.names if name in MEASURES} & {"ns", "bytes", "bytes_per_s"}
        if units not in ({"ns"}, {"bytes"}):
            raise _Bad(("cost",), "the cost must come out in nanoseconds or in bytes")
        return cost, units.pop()

    def _pool(self, cost: Expression | None) -> str | None:
        if "pool" not in self._data:
            return None
        pool = self._choice("pool", tuple(MEASURES), what="measure")
        if cost is None or MEASURES[pool].unit != "ns":
            raise _Bad(("pool",), "a pool is a measure in nanoseconds, for a rule that has a cost")
        return pool

    def _severity(self) -> tuple[str | None, tuple[model.Level, ...]]:
        given = self._data.get("severity")
        if given is None:
            return None, ()
        if isinstance(given, str):
            return self._choice("severity", SEVERITIES), ()
        if not isinstance(given, dict) or not set(given) <= {"warning", "critical"}:
            raise _Bad(
                ("severity",),
                "expected one of info, warning, critical, or `warning:` and `critical:` with a limit each",
            )
        levels = [self._level(severity, given[severity]) for severity in ("critical", "warning") if severity in given]
        return None, tuple(levels)

    def _level(self, severity: str, limit: Any) -> model.Level:
        place = ("severity", severity)
        if isinstance(limit, str):
            return model.Level(severity, None, self._expression(place, limit))
        return model.Level(severity, self._share(place, limit), None)

    def _confidence(self) -> tuple[float, tuple[model.Doubt, ...]]:
        given = self._data.get("confidence", 0.9)
        if not isinstance(given, dict):
            return self._share(("confidence",), given), ()
        self._only(("confidence",), given, ("base",), ("lower",))
        doubts = tuple(self._doubt(("confidence", "lower", n), item) for n, item in enumerate(given.get("lower") or []))
        return self._share(("confidence", "base"), given["base"]), doubts

    def _doubt(self, place: tuple[str | int, ...], given: Any) -> model.Doubt:
        self._only(place, given, ("when", "to", "because"))
        return model.Doubt(
            self._expression((*place, "when"), given["when"]),
            self._share((*place, "to"), given["to"]),
            self._string((*place, "because"), given["because"]),
        )

    def _note(self, place: tuple[str | int, ...], given: Any) -> model.Note:
        self._only(place, given, ("when", "text"))
        condition = self._expression((*place, "when"), given["when"])
        return model.Note(condition, self._string((*place, "text"), given["text"]))

    def _remedies(self) -> tuple[Remedy, ...]:
        given = self._data["remedies"]
        if not isinstance(given, dict) or not given:
            raise _Bad(("remedies",), f"expected a list of changes per stack ({', '.join(model.STACKS)})")
        remedies: list[Remedy] = []
        for stack, changes in given.items():
            if stack not in model.STACKS:
                raise _Bad(("remedies", stack), unknown("stack", str(stack), model.STACKS))
            remedies += self._list(("remedies", stack), changes, partial(self._remedy, str(stack)))
        return tuple(remedies)

    def _remedy(self, stack: str, place: tuple[str | int, ...], given: Any) -> Remedy:
        self._only(place, given, ("change",), ("trade_off",))
        trade_off = given.get("trade_off")
        return Remedy(
            stack,
            self._string((*place, "change"), given["change"]),
            None if trade_off is None else self._string((*place, "trade_off"), trade_off),
        )

    def _gain(self) -> model.GainBounds | None:
        if "gain" not in self._data:
            return None
        given = self._data["gain"]
        self._only(("gain",), given, ("low", "high", "basis", "source"))
        low, high = (self._factor(("gain", key), given[key]) for key in ("low", "high"))
        basis, source = (self._string(("gain", key), given[key]) for key in ("basis", "source"))
        return model.GainBounds(low, high, basis, source)

    def _factor(self, place: tuple[str | int, ...], given: Any) -> Expression:
        return self._expression(place, given if isinstance(given, str) else str(self._share(place, given)))

    def _defaults(self) -> dict[str, float]:
        given = self._data.get("defaults") or {}
        if not isinstance(given, dict):
            raise _Bad(("defaults",), "expected lines of the form `measure: number`")
        return {self._measure(("defaults", key), key): self._number(("defaults", key), given[key]) for key in given}

    def _case(self, place: tuple[str | int, ...], given: Any) -> model.Case:
        if not isinstance(given, dict) or not {"name", "expect"} <= set(given):
            raise _Bad(place, "a case needs a `name`, measures, and what to `expect`")
        expect = given["expect"]
        if expect not in model.EXPECTATIONS:
            raise _Bad((*place, "expect"), f"expected one of {', '.join(model.EXPECTATIONS)}, not `{expect}`")
        severity = given.get("severity")
        if severity is not None and severity not in SEVERITIES:
            raise _Bad((*place, "severity"), f"expected one of {', '.join(SEVERITIES)}, not `{severity}`")
        names = [name for name in given if name not in ("name", "expect", "severity")]
        measures = {self._measure((*place, name), name): self._value((*place, name), given[name]) for name in names}
        return model.Case(self._string((*place, "name"), given["name"]), measures, expect, severity)

    def _selector(self, key: str) -> str:
        selector = self._string((key,), self._data.get(key, "none"))
        problem = model.selector_problem(selector)
        if problem is None and key == "ncu" and not selector.startswith("kernels:"):
            problem = "Nsight Compute looks at kernels: expected `kernels:…`"
        if problem is not None:
            raise _Bad((key,), problem)
        return selector

    def _expression(self, place: tuple[str | int, ...], given: Any) -> Expression:
        try:
            return parse(self._string(place, given), _NAMES)
        except ExpressionError as error:
            raise _Bad(place, str(error)) from None

    def _items(self, key: str, read: Callable[[tuple[str | int, ...], Any], T]) -> tuple[T, ...]:
        return tuple(self._list((key,), self._data[key], read))

    def _list(
        self, place: tuple[str | int, ...], given: Any, read: Callable[[tuple[str | int, ...], Any], T]
    ) -> list[T]:
        if not isinstance(given, list) or not given:
            raise _Bad(place, "expected a list with at least one item")
        return [read((*place, number), item) for number, item in enumerate(given)]

    def _choices(self, key: str, allowed: Collection[str], what: str | None = None) -> tuple[str, ...]:
        return self._items(key, lambda place, item: self._one_of(place, item, allowed, what or key))

    def _choice(self, key: str, allowed: Collection[str], what: str | None = None) -> str:
        return self._one_of((key,), self._data[key], allowed, what or key)

    def _one_of(self, place: tuple[str | int, ...], given: Any, allowed: Collection[str], what: str) -> str:
        if given in allowed:
            return str(given)
        reason = unknown(what, str(given), allowed)
        if len(allowed) <= len(model.TABLES):
            reason = f"{reason}{'' if reason.endswith('?') else '.'} One of {', '.join(allowed)}"
        raise _Bad(place, reason)

    def _measure(self, place: tuple[str | int, ...], given: Any) -> str:
        return self._one_of(place, given, tuple(MEASURES), "measure")

    def _text(self, key: str) -> str:
        return self._string((key,), self._data[key])

    def _string(self, place: tuple[str | int, ...], given: Any) -> str:
        if not isinstance(given, str) or not given.strip():
            raise _Bad(place, f"`{place[-1]}` must be text")
        return " ".join(given.split())

    def _value(self, place: tuple[str | int, ...], given: Any) -> float | None:
        return None if given is None else self._number(place, given)

    def _number(self, place: tuple[str | int, ...], given: Any) -> float:
        if isinstance(given, bool) or not isinstance(given, (int, float)):
            raise _Bad(place, f"`{place[-1]}` must be a number, not `{given}`")
        return given

    def _share(self, place: tuple[str | int, ...], given: Any) -> float:
        number = self._number(place, given)
        if not 0 <= number <= 1:
            raise _Bad(place, f"`{place[-1]}` must lie between 0 and 1, not be {given}: shares are 0-1, never per cent")
        return float(number)

    def _only(
        self, place: tuple[str | int, ...], given: Any, required: Sequence[str], optional: Sequence[str] = ()
    ) -> None:
        if not isinstance(given, dict):
            raise _Bad(place, f"expected the keys {', '.join((*required, *optional))}")
        for key in given:
            if key not in required and key not in optional:
                raise _Bad((*place, key), unknown("key", str(key), (*required, *optional)))
        for key in required:
            if key not in given:
                raise _Bad(place, f"`{key}` is missing")
