"""The gates as JUnit XML, which every CI system shows: a test case for each ``--fail-on``."""

from __future__ import annotations

from xml.etree import ElementTree

from infprof.compare.model import Comparison, GateResult
from infprof.reports import format as fmt

_CLASS = "infprof.compare"


def render(comparison: Comparison) -> str:
    """One suite. A gate that holds is a failure, one that could not be judged an error; without gates the comparison is a
    single test, which passes if the runs are comparable."""
    gates = comparison.gates or [_of_itself(comparison)]
    numbers = {
        "tests": str(len(gates)),
        "failures": str(sum(gate.holds is True for gate in gates)),
        "errors": str(sum(gate.holds is None for gate in gates)),
        "skipped": "0",
        "time": "0",
    }
    root = ElementTree.Element("testsuites", {"name": "infprof compare", **numbers})
    suite = ElementTree.SubElement(root, "testsuite", {"name": _suite_name(comparison), **numbers})
    for gate in gates:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": _CLASS, "name": fmt.clean(gate.text), "time": "0"}
        )
        if gate.holds is not False:
            kind, word = ("error", "NotJudged") if gate.holds is None else ("failure", "GateHolds")
            found = ElementTree.SubElement(case, kind, {"message": fmt.clean(gate.detail), "type": word})
            found.text = fmt.clean(f"{gate.text}: {gate.detail}")
    ElementTree.SubElement(suite, "system-out").text = fmt.clean(comparison.headline)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _of_itself(comparison: Comparison) -> GateResult:
    """The test that the comparison is without any condition: that there is one."""
    return GateResult("compare", None if comparison.not_comparable else False, comparison.headline)


def _suite_name(comparison: Comparison) -> str:
    return fmt.clean(f"{comparison.base.name} against {comparison.head.name}")
