"""``infprof whatif``: parse, ask, print."""

from __future__ import annotations

import json as json_module
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infprof.errors import InfprofError, UsageError

if TYPE_CHECKING:
    from infprof.hardware.gpu_spec import GpuSpec
    from infprof.replay.setting import Setting
    from infprof.replay.whatif import Result


def whatif_command(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", readable=False, help="One profile: what analyze takes, but no stored diagnosis."
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="COST=FACTOR",
            help="A factor on the time of launch, host, sync, allocator, module-load, calls, waits, copies[:KIND], memsets, "
            "comm, kernel[:CLASS_OR_NAME] or gaps; copies=overlapped. Several apply together. Without one: the chain of "
            "fixes that gain most.",
        ),
    ] = None,
    window: Annotated[
        str, typer.Option("--window", metavar="WINDOW", help="Where to judge what limits then: auto, full, or A:B.")
    ] = "auto",
    rules: Annotated[
        list[Path] | None, typer.Option("--rules", metavar="DIR", help="A folder with further rules; repeatable.")
    ] = None,
    gpu_spec: Annotated[
        str | None,
        typer.Option(
            "--gpu-spec", metavar="SPEC", help="Peaks of the GPU: a file or KEY=VALUE,… as analyze takes them."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Replay a trace with costs taken away or scaled: what that would gain, and what would limit it then.

    Gains are bounds: what kernels, clocks and schedulers would do otherwise is not in a trace.

    Example: infprof whatif report.sqlite --set launch=0

    Example: infprof whatif trace.json.gz --set kernel:attention=0.5 --set copies=overlapped
    """
    from infprof.hardware.gpu_spec import parse_gpu_spec
    from infprof.replay.setting import parse_setting

    wanted = [parse_setting(text) for text in settings or []]
    given = None if gpu_spec is None else parse_gpu_spec(gpu_spec)
    result = _ask(trace, wanted, window, rules or [], given)
    if json:
        print(json_module.dumps(result.to_dict(), indent=2))
    else:
        import shutil

        print(text_of(result, min(shutil.get_terminal_size((80, 24)).columns, 100)))
    if result.off is not None:
        raise InfprofError(f"what-if is off for {trace}: {result.off}")


def _ask(
    path: Path, wanted: list[Setting], window: str, rule_dirs: list[Path], gpu_spec: GpuSpec | None = None
) -> Result:
    from infprof.diagnosis import Options, analyze_in_detail, what_if
    from infprof.readers import read
    from infprof.resources import rules_dir
    from infprof.rules import load
    from infprof.stored import is_stored_diagnosis

    if is_stored_diagnosis(path):
        raise UsageError(f"whatif needs the profile itself: {path} is a diagnosis that is finished.")
    rules = load([rules_dir(), *rule_dirs])
    detailed = analyze_in_detail(read(path), rules, Options(window=window, whatif=False, gpu_spec=gpu_spec))
    assert detailed.prepared is not None
    asked = what_if(detailed.prepared, detailed.diagnosis, rules)
    return asked.ask(wanted) if wanted else asked.chain()


def text_of(result: Result, width: int) -> str:
    """The answer in words, at most ``width`` columns."""
    from infprof.reports.format import duration, percent

    lines = [f"Recorded  {duration(result.recorded_span_ns)} from the first GPU operation to the last"]
    check = f"Replayed  {duration(result.replayed_span_ns)} with nothing changed"
    lines.append(check + ("" if result.replay_error_ratio else ", the same to the nanosecond"))
    if result.off is not None:
        return "\n".join(lines)
    if result.chain:
        lines += ["", "Fixes, each on top of the ones before"]
        for number, step in enumerate(result.chain, 1):
            lines.append(
                f"{number}. {step.fix}: {duration(step.predicted_span_ns)}, up to {percent(step.gain_ratio)} won"
            )
            lines += _wrapped(step.words, width)
            lines += _wrapped(_then(step.next_verdict, step.next_cause, step.next_sentence), width)
    elif not result.settings:
        lines += ["", *textwrap.wrap(nothing_gains(), width)]
    else:
        gain = result.gain_ratio or 0.0
        won = f"up to {percent(gain)} won" if gain >= 0 else f"{percent(-gain)} longer"
        lines += ["", f"With {' '.join(result.settings)}: {duration(result.predicted_span_ns)}, {won}"]
        lines += _wrapped(_then(result.next_verdict, result.next_cause, result.next_sentence), width)
    for note in result.notes:
        lines += ["", *textwrap.wrap(note, width)]
    return "\n".join(lines)


def nothing_gains() -> str:
    """What an empty chain says."""
    from infprof.replay.whatif import LEAST_GAIN

    return (
        f"No fix of launches, host work, waits, communication, overlap or allocation gains more than {100 * LEAST_GAIN:.0f} %: "
        "only less time in kernels and copies does. Ask for it with --set kernel:CLASS=FACTOR or --set copies=FACTOR."
    )


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="   ", subsequent_indent="   ")


def _then(verdict: str | None, cause: str | None, sentence: str | None) -> str:
    if verdict is None:
        return "then: too little is left of the trace to tell what limits it"
    return f"then {verdict}{f' ({cause})' if cause else ''}: {sentence}"
