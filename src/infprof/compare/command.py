"""``infprof compare``: parse, compare, print."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infprof.errors import EXIT_FINDINGS, InfprofError, UsageError

if TYPE_CHECKING:
    from infprof.compare.model import Comparison
    from infprof.compare.runs import Run
    from infprof.compare.several import Sides
    from infprof.diagnosis import Options


def compare_command(
    base: Annotated[
        Path,
        typer.Argument(
            metavar="BASE", readable=False, help="The run before: a profile, a bundle, or a stored diagnosis (.json)."
        ),
    ],
    head: Annotated[Path, typer.Argument(metavar="HEAD", readable=False, help="The run after, of any of these kinds.")],
    base_run: Annotated[
        list[Path] | None,
        typer.Option("--base-run", metavar="FILE", help="A further run of BASE; repeatable. 4 of each side can tell."),
    ] = None,
    head_run: Annotated[
        list[Path] | None, typer.Option("--head-run", metavar="FILE", help="A further run of HEAD; repeatable.")
    ] = None,
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
    different_programs: Annotated[
        bool,
        typer.Option(
            "--different-programs",
            help="BASE and HEAD are meant to be different programs (engines, vendors): compare them all the same.",
        ),
    ] = False,
    rules: Annotated[
        list[Path] | None, typer.Option("--rules", metavar="DIR", help="A folder with further rules; repeatable.")
    ] = None,
) -> None:
    """Compare two runs: what got faster, what slower, whether the limiter moved, and whether BASE's what-if foretold it.

    Example: infprof compare before.sqlite after.sqlite

    Example: infprof compare main.json branch.sqlite --fail-on "step_p50_ns[phase=decode] > +5%" --junit out.xml

    Example: infprof compare a1.json b1.json --base-run a2.json --base-run a3.json --base-run a4.json --head-run b2.json …
    """
    from infprof.compare.gates import judge, parse_gate
    from infprof.compare.reports import render
    from infprof.compare.reports.document import gate_lines
    from infprof.compare.several import compare_sides
    from infprof.diagnosis import Options
    from infprof.reports import format as fmt
    from infprof.reports.files import write_atomic

    if json and markdown:
        raise UsageError("--json and --markdown both want the output: choose one, or write the other with -o FILE.")
    if not 0 <= tolerance < 100:
        raise UsageError(f"--tolerance {tolerance:g}: write per cent from 0 to 100.")
    gates = [parse_gate(text) for text in fail_on or ()]
    inputs = _inputs("BASE", [base, *(base_run or ())]), _inputs("HEAD", [head, *(head_run or ())])
    files = _files({"junit": junit, "sarif": sarif}, output, (*inputs[0], *inputs[1]), force)
    for folder in rules or ():
        if not folder.is_dir():
            raise UsageError(f"--rules {folder}: there is no such folder.")
    options = Options(window=window, step_range=step_range, rule_dirs=tuple(rules or ()))
    sides = _load(inputs, options)
    result = compare_sides(sides, tolerance / 100, different_programs)
    if base.exists() and head.exists() and base.samefile(head):
        result.notes.insert(0, "BASE and HEAD are the same file.")
    result.gates = judge(gates, result, sides.base, sides.head)
    for name, target in files:
        write_atomic(target, render(name, result), force)
        print(f"infprof: wrote {target}", file=sys.stderr)
    sys.stdout.write(render("json" if json else "markdown" if markdown else "text", result))
    sys.stdout.flush()
    if json:
        # Who reads the output by machine sees in the log what was judged.
        for line in gate_lines(result):
            print(f"infprof: {fmt.clean(line)}", file=sys.stderr)
    _end(result)


def _inputs(side: str, paths: list[Path]) -> list[Path]:
    """Raises UsageError for a run that is given twice: it would count as two."""
    for i, path in enumerate(paths):
        if os.path.realpath(path) in map(os.path.realpath, paths[:i]):
            raise UsageError(f"{path} is given twice for {side}: each run counts once.")
    return paths


def _load(inputs: tuple[list[Path], list[Path]], options: Options) -> Sides:
    """All runs; the one of BASE whose what-if is asked is ready to be replayed."""
    from infprof.compare.runs import load_run
    from infprof.compare.several import sides_of
    from infprof.progress import shown_reading

    def load(path: Path, side: str, with_whatif: bool = False) -> Run:
        with shown_reading():
            return load_run(path, options, with_whatif, side)

    alone = len(inputs[0]) == 1
    base = [load(path, "BASE", with_whatif=alone) for path in inputs[0]]
    sides = sides_of(base, [load(path, "HEAD") for path in inputs[1]])
    if not alone:
        # Which one it is shows only now, and what a replay needs of all of them might not fit into memory.
        chosen = sides.chosen[0]
        sides.base[chosen] = load(inputs[0][chosen], "BASE", with_whatif=True)
    return sides


def _end(result: Comparison) -> None:
    """The exit code: raises what the command line ends with."""
    if result.not_comparable is not None:
        raise InfprofError(f"not comparable: {result.not_comparable.sentence}.")
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
