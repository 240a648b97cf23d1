"""``infprof compare``: parse, compare, print."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from infprof.errors import EXIT_FINDINGS, InfprofError, UsageError


def compare_command(
    base: Annotated[
        Path,
        typer.Argument(
            metavar="BASE", readable=False, help="The run before: a profile, a bundle, or a stored diagnosis (.json)."
        ),
    ],
    head: Annotated[Path, typer.Argument(metavar="HEAD", readable=False, help="The run after, of any of these kinds.")],
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            metavar="CONDITION",
            help='Exit with 1 when a measure of HEAD differs from BASE\'s by this: "step_p50_ns[phase=decode] > +5%", '
            '"step_p99_ns > 2ms", "mbu_ratio < -10%". Repeatable; one is enough.',
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the comparison as Markdown.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Write here; the extension (.txt .md .json .xml .sarif) says what."
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="The conditions as JUnit XML, for CI.")
    ] = None,
    sarif: Annotated[
        Path | None, typer.Option("--sarif", metavar="FILE", help="What got worse as SARIF 2.1.0, for CI.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance", metavar="PERCENT", help="Differences below this are what two runs of one program differ by."
        ),
    ] = 1.0,
    window: Annotated[
        str, typer.Option("--window", metavar="WINDOW", help="For both: auto (steady part), full, or A:B.")
    ] = "auto",
    step_range: Annotated[
        str | None,
        typer.Option("--step-range", metavar="NAME", help="A step is what runs for a range of this name, in both."),
    ] = None,
    rules: Annotated[
        list[Path] | None, typer.Option("--rules", metavar="DIR", help="A folder with further rules; repeatable.")
    ] = None,
) -> None:
    """Compare two runs: what got faster, what slower, whether the limiter moved, and whether BASE's what-if foretold it.

    Example: infprof compare before.sqlite after.sqlite

    Example: infprof compare main.json branch.sqlite --fail-on "step_p50_ns[phase=decode] > +5%" --junit out.xml
    """
    from infprof.compare.comparing import compare
    from infprof.compare.gates import judge, parse_gate
    from infprof.compare.reports import render
    from infprof.compare.runs import load_run
    from infprof.diagnosis import Options
    from infprof.progress import shown_reading
    from infprof.reports.files import write_atomic

    if json and markdown:
        raise UsageError("--json and --markdown both want the output: choose one, or write the other with -o FILE.")
    if not 0 <= tolerance < 100:
        raise UsageError(f"--tolerance {tolerance:g}: write per cent from 0 to 100.")
    gates = [parse_gate(text) for text in fail_on or ()]
    files = _files({"junit": junit, "sarif": sarif}, output, (base, head), force)
    for folder in rules or ():
        if not folder.is_dir():
            raise UsageError(f"--rules {folder}: there is no such folder.")
    options = Options(window=window, step_range=step_range, rule_dirs=tuple(rules or ()))
    with shown_reading():
        before = load_run(base, options, with_whatif=True)
    with shown_reading():
        after = load_run(head, options)
    result = compare(before, after, tolerance / 100)
    result.gates = judge(gates, result, before, after)
    for name, target in files:
        write_atomic(target, render(name, result), force)
        print(f"infprof: wrote {target}", file=sys.stderr)
    sys.stdout.write(render("json" if json else "markdown" if markdown else "text", result))
    sys.stdout.flush()
    if any(gate.holds for gate in result.gates):
        raise typer.Exit(EXIT_FINDINGS)
    open_gates = [gate for gate in result.gates if gate.holds is None]
    if open_gates:
        raise InfprofError(f"--fail-on {open_gates[0].text} could not be judged: {open_gates[0].detail}.")


def _files(
    wanted: dict[str, Path | None], output: Path | None, inputs: tuple[Path, ...], force: bool
) -> list[tuple[str, Path]]:
    """The reports to write. Raises UsageError, before any work, for a file that cannot be written."""
    from infprof.compare.reports import report_for_path
    from infprof.reports.files import check_target

    files = [(name, target) for name, target in wanted.items() if target is not None]
    if output is not None:
        files.append((report_for_path(output), output))
    seen = {os.path.realpath(path) for path in inputs}
    for _, target in files:
        if os.path.realpath(target) in seen and (target.is_file() or not target.exists()):
            raise UsageError(f"{target} is an input, or named for two reports. Give each a file of its own.")
        seen.add(os.path.realpath(target))
        check_target(target, force)
    return files
