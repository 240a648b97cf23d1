"""The command line: parse, call, print. Heavy imports wait inside the commands, so that ``--help`` is fast."""

from __future__ import annotations

import gc
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TextIO

import typer

from infprof import __version__
from infprof.compare.command import compare_command
from infprof.errors import EXIT_FINDINGS, EXIT_UNUSABLE, EXIT_USAGE, InfprofError, UsageError
from infprof.replay.command import whatif_command
from infprof.workload.commands import workload_app

if TYPE_CHECKING:
    from infprof.diagnosis import Detailed, Options
    from infprof.reports.markdown import MarkdownOptions
    from infprof.reports.terminal import TerminalOptions
    from infprof.results import Diagnosis
    from infprof.rules import RuleSet

app = typer.Typer(
    name="infprof",
    help="Say why inference on GPUs is slow and what to change.\n\nExample: infprof analyze report.sqlite",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
rules_app = typer.Typer(help="List, show and test the rules behind the findings.", no_args_is_help=True)
app.add_typer(rules_app, name="rules", rich_help_panel=None)
app.add_typer(workload_app, name="workload", rich_help_panel=None)

InputsArgument = Annotated[
    list[Path],
    # readable=False: the reader says what is wrong with a file, not the parser of the command line.
    typer.Argument(
        metavar="INPUT",
        readable=False,
        help="Profiles (.nsys-rep, any nsys export of tables, .json or .json.gz of PyTorch), bundles of infprof run, "
        "folders of them, or globs (quoted ones too). Several are the ranks of one job, a file each.",
    ),
]
CaptureOption = Annotated[
    Path | None,
    typer.Option(
        "--capture",
        metavar="TRACE",
        help="A PyTorch trace of the same model, eager or of the graphs' capture: its operators explain the kernels of "
        "replayed CUDA graphs.",
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", metavar="N", help="Processes for several files. Default: one per file and core."),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="ADDRESS",
        help="Have the workers of this dask scheduler (tcp://HOST:8786) read the files, which they must see under the "
        "same paths.",
    ),
]
WindowOption = Annotated[
    str,
    typer.Option("--window", metavar="WINDOW", help="auto (steady part), full, or A:B with units, such as 1.5s:4s."),
]
RangeOption = Annotated[
    str | None,
    typer.Option("--range", metavar="NAME", help="Only the GPU time of this NVTX range (all occurrences; * matches)."),
]
StepRangeOption = Annotated[
    str | None,
    typer.Option(
        "--step-range", metavar="NAME", help="A step is what runs for an NVTX range of this name (* matches)."
    ),
]
GpuSpecOption = Annotated[
    str | None,
    typer.Option(
        "--gpu-spec",
        metavar="SPEC",
        help="Peaks of the GPU, where the table lacks them: a YAML file, or KEY=VALUE,… such as "
        "bf16_tflops=300,dram_gb_per_s=2000 or like=H100-PCIe. Dense TFLOP/s; links per direction.",
    ),
]
ByLayerOption = Annotated[
    bool, typer.Option("--by-layer", help="Group the findings of text and Markdown by the layer that must act.")
]
RulesOption = Annotated[
    list[Path] | None,
    typer.Option("--rules", metavar="DIR", help="A folder with further rules; may be given several times."),
]
ScenarioOption = Annotated[
    str | None,
    typer.Option("--scenario", metavar="NAME", help="Order the findings for online, batch or mixed serving."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Write here; the extension (.html .json .md .txt .perfetto.json .perfetto.json.gz) says what.",
    ),
]
PerfettoOption = Annotated[
    Path | None,
    typer.Option(
        "--perfetto",
        metavar="FILE",
        help="The timeline of the window, with the findings, for ui.perfetto.dev (.json or .json.gz). "
        "With --window full all of it.",
    ),
]


# Numbers of <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def main() -> NoReturn:
    """Entry point: errors end in one sentence on stderr and their exit code, never in a traceback."""
    # A reader that goes away (infprof … | head) ends the program in silence, as it ends every other tool.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        # typer returns the code of typer.Exit instead of raising it; commands themselves return nothing.
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except InfprofError as error:
        _fail(str(error), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except OSError as error:
        # What is left in the buffer cannot be written either: it must not be tried again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"the output cannot be written: {error.strerror or error}.", EXIT_USAGE)
    except Exception as error:
        _handle_other(error)


def _handle_other(error: Exception) -> NoReturn:
    # typer carries its own copy of click or uses the installed one; both have these attributes on usage errors.
    exit_code = getattr(error, "exit_code", None)
    format_message = getattr(error, "format_message", None)
    if exit_code is not None and format_message is not None:
        message = str(format_message())
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message, file=sys.stderr)
            sys.exit(int(exit_code))
        end = "" if message.endswith("?") else "."
        _fail(f"{message.rstrip('.')}{end} See `infprof --help`.", int(exit_code))
    if os.environ.get("INFPROF_DEBUG"):
        raise error
    _fail(
        f"a defect of infprof, not of the input: {type(error).__name__}: {error}. "
        "Run again with INFPROF_DEBUG=1 for the details and report them.",
        EXIT_UNUSABLE,
    )


def _fail(message: str, code: int) -> NoReturn:
    print(f"infprof: {message}", file=sys.stderr)
    sys.exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"infprof {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def analyze(
    inputs: InputsArgument,
    window: WindowOption = "auto",
    range_name: RangeOption = None,
    step_range: StepRangeOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON (stable, has a schema).")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the diagnosis as Markdown.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained HTML page.")
    ] = None,
    perfetto: PerfettoOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    rules: RulesOption = None,
    scenario: ScenarioOption = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            metavar="WHAT",
            help="Exit with 1 on findings of this severity (info, warning, critical) or above, or when an expression "
            'over measures holds, such as "idle_ratio > 0.3".',
        ),
    ] = None,
    jobs: JobsOption = None,
    scheduler: SchedulerOption = None,
    capture: CaptureOption = None,
    gpu_spec: GpuSpecOption = None,
    by_layer: ByLayerOption = False,
) -> None:
    """Diagnose a profile: where the time went, what limits it, what to change.

    Of several files, one per rank, each is diagnosed and all are compared: who is late, and what that costs. A file
    that cannot be read does not stop the others; the exit code is 3 only where none can be used.

    Example: infprof analyze report.sqlite --html report.html

    Example: infprof analyze 'traces/rank*.pt.trace.json.gz'
    """
    if json and markdown:
        raise UsageError("--json and --markdown both want the output: choose one, or write the other with -o FILE.")
    gate = _gate(fail_on)
    paths = _paths(inputs)
    files = _files({"html": html, "perfetto": perfetto}, output, paths, force)
    detailed = _diagnose_all(paths, window, range_name, rules, scenario, jobs, scheduler, capture, step_range, gpu_spec)
    _write_files(detailed, files, force, by_layer)
    diagnosis = detailed.diagnosis
    _print(diagnosis, "json" if json else "markdown" if markdown else "terminal", by_layer)
    _finish(diagnosis, gate)


app.command("whatif")(whatif_command)
app.command("compare")(compare_command)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="The program to profile, with its arguments.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="The bundle to make (a new folder).")
    ] = None,
    warmup: Annotated[
        str | None, typer.Option("--warmup", metavar="TIME", help="Wait this long once it is ready, such as 10s.")
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option(
            "--duration", metavar="TIME", help="Capture this long, then end the program. Default: to its end."
        ),
    ] = None,
    load: Annotated[
        str | None,
        typer.Option(
            "--load", metavar="SPEC", help="Send requests meanwhile, such as users=8,prompt=512,output=64,time=30s."
        ),
    ] = None,
    ready_url: Annotated[
        str | None, typer.Option("--ready-url", metavar="URL", help="Ready when this URL answers.")
    ] = None,
    ready_port: Annotated[
        int | None, typer.Option("--ready-port", metavar="PORT", help="Ready when this port accepts connections.")
    ] = None,
    ready_log: Annotated[
        str | None, typer.Option("--ready-log", metavar="REGEX", help="Ready when a line of its output matches.")
    ] = None,
    ready_timeout: Annotated[
        str, typer.Option("--ready-timeout", metavar="TIME", help="Give up when it is not ready by then.")
    ] = "15m",
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="What records the timeline: auto, nsys, torch, cupti (experimental) or none.",
        ),
    ] = "auto",
    probes: Annotated[
        str | None,
        typer.Option("--probes", metavar="LIST", help="Of nvml,amd,host,network,serving. Default: all that work here."),
    ] = None,
    capture: Annotated[
        str,
        typer.Option("--capture", metavar="HOW", help="session, cuda-profiler-api (its own start/stop) or nvtx:RANGE."),
    ] = "session",
    graph_trace: Annotated[
        str,
        typer.Option("--graph-trace", metavar="LEVEL", help="CUDA graphs by node (kernels seen) or graph (cheaper)."),
    ] = "node",
    gpu_metrics: Annotated[
        bool, typer.Option("--gpu-metrics/--no-gpu-metrics", help="Hardware counters, where they are permitted.")
    ] = True,
    sampling: Annotated[
        bool, typer.Option("--sampling", help="CPU samples and context switches as well (more overhead).")
    ] = False,
    nsys: Annotated[Path | None, typer.Option("--nsys", metavar="FILE", help="The nsys to use.")] = None,
    nsys_arg: Annotated[
        list[str] | None, typer.Option("--nsys-arg", metavar="ARG", help="One more argument for nsys; repeatable.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="The server's base URL. Default: found by itself.")
    ] = None,
    metrics_url: Annotated[
        str | None, typer.Option("--metrics-url", metavar="URL", help="Its metrics endpoint. Default: found by itself.")
    ] = None,
    pid: Annotated[
        int | None, typer.Option("--pid", metavar="PID", help="Observe a process that runs already (no timeline).")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the program running at the end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained HTML page.")
    ] = None,
    force: ForceOption = False,
    rules: RulesOption = None,
) -> None:
    """Profile a program: timeline, GPU, host, network, serving metrics; then say what limits it.

    Example: infprof run --duration 30s -- python server.py
    """
    from infprof.durations import parse_seconds
    from infprof.probes.backends import BACKENDS
    from infprof.session import RunOptions, Session

    _check_rule_dirs(rules)
    _choose("--backend", backend, BACKENDS)
    _choose("--graph-trace", graph_trace, ("node", "graph"))
    if html is not None and html.exists() and not force:
        raise UsageError(f"{html} exists already. Choose another name, or replace it with --force.")
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise UsageError(f"{html} cannot be written: its folder does not exist, or it is a folder itself.")
    options = RunOptions(
        command=tuple(command or ()),
        pid=pid,
        output=output,
        force=force,
        backend=backend,  # type: ignore[arg-type]
        probes=None if probes is None else tuple(p.strip() for p in probes.split(",") if p.strip()),
        warmup_s=parse_seconds("--warmup", warmup),
        duration_s=parse_seconds("--duration", duration),
        ready_url=ready_url,
        ready_port=ready_port,
        ready_log=ready_log,
        ready_timeout_s=parse_seconds("--ready-timeout", ready_timeout) or 0.0,
        url=url,
        metrics_url=metrics_url,
        load=load,
        capture=capture,
        graph_trace=graph_trace,  # type: ignore[arg-type]
        gpu_metrics=gpu_metrics,
        sampling=sampling,
        nsys=nsys,
        nsys_args=tuple(nsys_arg or ()),
        keep=keep,
    )
    result = Session(options).run()
    _diagnose_run(result.bundle.folder, rules, json, html, force)
    raise typer.Exit(result.exit_code)


@app.command()
def report(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT",
            readable=False,
            help="What analyze takes, or one stored diagnosis (.json, from --json or a bundle).",
        ),
    ],
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="One self-contained HTML page.")] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="The diagnosis as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Markdown, to paste.")] = None,
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE", help="What the terminal shows.")] = None,
    perfetto: PerfettoOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    window: WindowOption = "auto",
    range_name: RangeOption = None,
    step_range: StepRangeOption = None,
    rules: RulesOption = None,
    scenario: ScenarioOption = None,
    jobs: JobsOption = None,
    scheduler: SchedulerOption = None,
    capture: CaptureOption = None,
    gpu_spec: GpuSpecOption = None,
    by_layer: ByLayerOption = False,
) -> None:
    """Write the diagnosis of a profile, or of the ranks of a job, to files to share; several at once.

    Example: infprof report report.sqlite --html report.html --perfetto report.json.gz
    """
    wanted = {"html": html, "json": json, "markdown": markdown, "terminal": text, "perfetto": perfetto}
    paths = _paths(inputs)
    files = _files(wanted, output, paths, force)
    if not files:
        raise UsageError("report: name at least one file, such as --html report.html or -o report.md.")
    detailed = _diagnose_all(paths, window, range_name, rules, scenario, jobs, scheduler, capture, step_range, gpu_spec)
    _write_files(detailed, files, force, by_layer)
    _finish(detailed.diagnosis, None)


@app.command()
def demo(
    name: Annotated[
        str, typer.Argument(metavar="SAMPLE", help="Which sample; --list shows them.")
    ] = "launch-bound-decode",
    listing: Annotated[bool, typer.Option("--list", help="List the samples.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one HTML page, too.")] = None,
    force: ForceOption = False,
) -> None:
    """Diagnose a sample trace that comes with infprof.

    Example: infprof demo pcie-limited-offload
    """
    import difflib

    from infprof.resources import sample_traces_dir

    samples = sorted(p.parent.name for p in sample_traces_dir().glob("*/trace.sqlite"))
    if listing:
        print("\n".join(samples))
        return
    if name not in samples:
        near = difflib.get_close_matches(name, samples, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(samples)}."
        raise UsageError(f"There is no sample called {name}. {hint}")
    path = sample_traces_dir() / name / "trace.sqlite"
    print(f"infprof: diagnosing the sample {name} (others: infprof demo --list)", file=sys.stderr)
    files = _files({"html": html}, None, [path], force)
    detailed = _diagnose(path, "auto", None, None, None)
    _write_files(detailed, files, force)
    _print(detailed.diagnosis, "terminal")


@app.command()
def simulate(
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="The file to write: .json or .json.gz as of PyTorch's profiler, anything else an nsys .sqlite export.",
        ),
    ],
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC", help="A YAML file that describes what runs.", show_default=False)
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option("--workload", metavar="PRESET", help="Instead of SPEC: the workload, as small, 1b, 3b or 7b."),
    ] = None,
    fault: Annotated[
        str | None,
        typer.Option("--fault", metavar="NAME", help="Its bottleneck, of `infprof workload list` or docs/simulate.md."),
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="Its GPU. Default: an H100.")] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", metavar="N", min=1, help="GPUs that share the model.")] = None,
    truth: Annotated[
        Path | None,
        typer.Option("--truth", metavar="FILE", help="Also write what a diagnosis must find, and every step, as JSON."),
    ] = None,
    dialect: Annotated[
        str | None,
        typer.Option("--dialect", metavar="TORCH", help="The JSON of torch 1.12, 2.2, 2.4 or 2.13 (default)."),
    ] = None,
    stack: Annotated[bool, typer.Option("--stack", help="With Python frames (JSON only).")] = False,
    sync_events: Annotated[bool, typer.Option("--sync-events", help="With cuda_sync rows (JSON only).")] = False,
    force: ForceOption = False,
) -> None:
    """Write a trace of a described workload, with a bottleneck that is known.

    Several processes that use CUDA become one JSON file each, named by rank.

    Example: infprof simulate sample_traces/healthy/spec.yaml -o healthy.sqlite

    Example: infprof simulate --workload 3b --fault offload -o offload.sqlite --truth offload.truth.json
    """
    from infprof.simulator.commands import simulate_files

    chosen = {"--workload": workload, "--fault": fault, "--gpu": gpu, "--ranks": ranks}
    options = {"dialect": dialect, "stack": stack, "sync_events": sync_events}
    for path in simulate_files(spec, chosen, output, truth, options, force):
        print(f"infprof: wrote {path}", file=sys.stderr)


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Say what this machine can record, and what to do for each thing missing.

    Example: infprof doctor
    """
    import shutil

    from infprof import doctor as checks_of

    checks = checks_of.run()
    if json:
        sys.stdout.write(checks_of.to_json(checks))
        return
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    sys.stdout.write(checks_of.render(checks, min(shutil.get_terminal_size().columns, 120), color))


@rules_app.command("list")
def rules_list(rules: RulesOption = None) -> None:
    """List all rules by area.

    Example: infprof rules list
    """
    from infprof.rules import list_rules

    ruleset = _load_rules(rules)
    print(list_rules(ruleset, _text_width()))
    _end_rules(ruleset)


@rules_app.command("show")
def rules_show(
    rule_id: Annotated[str, typer.Argument(metavar="ID", help="The rule's id.")], rules: RulesOption = None
) -> None:
    """Show all that a rule says: when it fires, why, what to change, when it keeps quiet.

    Example: infprof rules show launch-bound
    """
    from infprof.rules import describe

    print(describe(_load_rules(rules).get(rule_id), _text_width()))


@rules_app.command("test")
def rules_test(rules: RulesOption = None) -> None:
    """Run the cases that each rule file carries; exit with 1 if one fails or a file is broken.

    Example: infprof rules test --rules my-rules
    """
    from infprof.rules import test_rules

    ruleset = _load_rules(rules)
    results = test_rules(ruleset)
    failed = [r for r in results if not r.ok]
    for result in failed:
        print(f"{result.rule}: case {result.case!r}: expected {result.expected}, got {result.got}")
    print(f"{len(results) - len(failed)} of {len(results)} cases of {len(ruleset.rules)} rules hold.")
    _end_rules(ruleset)
    if failed:
        raise typer.Exit(EXIT_FINDINGS)


@rules_app.command("docs")
def rules_docs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; made where it does not exist.")],
    rules: RulesOption = None,
    force: ForceOption = False,
) -> None:
    """Write a Markdown page for each rule, and an index of all.

    Example: infprof rules docs rule-pages
    """
    from infprof.reports.files import check_target, write_atomic
    from infprof.rules import pages

    ruleset = _load_rules(rules)
    texts = pages(ruleset)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{directory} cannot be made: {error.strerror or error}.") from None
    for name in texts:
        check_target(directory / name, force)
    for name, text in texts.items():
        write_atomic(directory / name, text, force)
    print(f"infprof: wrote {len(texts)} pages to {directory}", file=sys.stderr)
    _end_rules(ruleset)


# --- helpers ---------------------------------------------------------------------------------------------------------


def _paths(inputs: list[Path]) -> list[Path]:
    """The files that are meant: globs and folders expanded."""
    if len(inputs) == 1 and os.path.isfile(inputs[0]):
        return inputs
    _prepare_for_arrays()
    from infprof.ranks.inputs import expand

    return expand(inputs)


def _diagnose_all(
    paths: list[Path],
    window: str,
    range_name: str | None,
    rules: list[Path] | None,
    scenario: str | None,
    jobs: int | None,
    scheduler: str | None,
    capture: Path | None,
    step_range: str | None,
    gpu_spec: str | None,
) -> Detailed:
    """One file as ever; several as the ranks of a job, in which those that fail are named on stderr."""
    if len(paths) == 1 and scheduler is None:
        return _diagnose(paths[0], window, range_name, rules, scenario, capture, step_range, gpu_spec)
    if capture is not None:
        raise UsageError(
            "--capture explains the graphs of one file, read here: name a single input, without --scheduler."
        )
    _prepare_for_arrays()
    from infprof.diagnosis import Detailed
    from infprof.ranks import analyze_inputs

    options = _options(window, range_name, rules, scenario, None, step_range, gpu_spec)
    diagnosis = analyze_inputs(paths, options, jobs, scheduler)
    _say_broken_rules(diagnosis)
    for failure in diagnosis.job.failures if diagnosis.job is not None else ():
        print(f"infprof: left out: {failure.reason}", file=sys.stderr)
    return Detailed(diagnosis, None, [])


def _options(
    window: str,
    range_name: str | None,
    rules: list[Path] | None,
    scenario: str | None,
    capture: Path | None = None,
    step_range: str | None = None,
    gpu_spec: str | None = None,
) -> Options:
    from infprof.diagnosis import Options
    from infprof.hardware.gpu_spec import parse_gpu_spec

    _check_rule_dirs(rules)
    if scenario is not None and scenario not in ("online", "batch", "mixed"):
        raise UsageError(f"--scenario {scenario}: choose online, batch or mixed.")
    given = None if gpu_spec is None else parse_gpu_spec(gpu_spec)
    return Options(window, range_name, scenario, tuple(rules or ()), capture, step_range=step_range, gpu_spec=given)


def _say_broken_rules(diagnosis: Diagnosis) -> None:
    for problem in diagnosis.problems:
        if problem.code == "broken-rule":
            print(f"infprof: {problem.message}", file=sys.stderr)


def _diagnose(
    path: Path,
    window: str,
    range_name: str | None,
    rules: list[Path] | None,
    scenario: str | None,
    capture: Path | None = None,
    step_range: str | None = None,
    gpu_spec: str | None = None,
) -> Detailed:
    """The diagnosis of a profile with what it was made of, or one that was stored."""
    from infprof.stored import is_stored_diagnosis, read_stored_diagnosis

    if is_stored_diagnosis(path):
        chosen = {
            "--window": window != "auto",
            "--range": range_name,
            "--step-range": step_range,
            "--rules": rules,
            "--scenario": scenario,
            "--capture": capture,
            "--gpu-spec": gpu_spec,
        }
        given = [name for name, value in chosen.items() if value]
        if given:
            raise UsageError(f"{given[0]} needs the profile itself: {path} is a diagnosis that is finished.")
        from infprof.diagnosis import Detailed

        return Detailed(read_stored_diagnosis(path), None, [])
    _prepare_for_arrays()
    from infprof.diagnosis import analyze_file_in_detail
    from infprof.progress import shown_reading

    options = _options(window, range_name, rules, scenario, capture, step_range, gpu_spec)
    with shown_reading():
        detailed = analyze_file_in_detail(path, options)
    _say_broken_rules(detailed.diagnosis)
    return detailed


def _prepare_for_arrays() -> None:
    """Settings of this process for one analysis: call it before the first import of NumPy."""
    import ctypes

    # Reference counts free the arrays, and there is little other garbage in one short run.
    gc.disable()
    # NumPy's threads for linear algebra would only wait. It looks when it is imported; what infprof starts never does.
    name = "OPENBLAS_NUM_THREADS"
    if name not in os.environ:
        os.environ[name] = "1"
        import numpy  # noqa: F401

        del os.environ[name]
    # glibc shall reuse the memory of large arrays: asking the kernel for each anew costs a tenth of a long analysis.
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return  # another C library
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    mallopt(_M_TRIM_THRESHOLD, 512 << 20)
    # In large steps, so that arrays lie in whole huge pages.
    mallopt(_M_TOP_PAD, 64 << 20)


def _print(diagnosis: Diagnosis, name: str, by_layer: bool = False) -> None:
    from infprof.reports import render

    sys.stdout.write(render(name, diagnosis, _report_options(name, by_layer, sys.stdout)))
    sys.stdout.flush()


def _report_options(
    name: str, by_layer: bool, stream: TextIO | None = None
) -> TerminalOptions | MarkdownOptions | None:
    """What a report is to show, where that is not its default; ``stream``: the terminal that it must fit."""
    from infprof.reports.markdown import MarkdownOptions
    from infprof.reports.terminal import TerminalOptions

    if name == "terminal":
        options = TerminalOptions() if stream is None else TerminalOptions.for_stream(stream)
        return replace(options, by_layer=by_layer)
    return MarkdownOptions(by_layer=by_layer) if name == "markdown" else None


def _files(
    wanted: dict[str, Path | None], output: Path | None, sources: list[Path], force: bool
) -> list[tuple[str, Path]]:
    """The reports to write, as (name, file). Raises UsageError, before any work, for a file that cannot be written."""
    from infprof.reports import report_for_path
    from infprof.reports.files import check_target

    files = [(name, target) for name, target in wanted.items() if target is not None]
    if output is not None:
        files.append((report_for_path(output).name, output))
    seen: set[str] = set()
    inputs = {os.path.realpath(source) for source in sources}
    for name, target in files:
        resolved = os.path.realpath(target)
        if resolved in inputs:
            raise UsageError(f"{target} is the input itself, which is never altered. Choose another name.")
        if resolved in seen and (target.is_file() or not target.exists()):
            raise UsageError(f"{target} is named for two reports. Give each a file of its own.")
        if name == "perfetto" and len(sources) > 1:
            raise UsageError("--perfetto draws the timeline of one file: name a single input.")
        if name == "perfetto" and target.suffix.lower() not in ("", ".json", ".gz"):
            raise UsageError(f"--perfetto writes JSON: name {target} .json or .json.gz.")
        seen.add(resolved)
        check_target(target, force)
    return files


def _write_files(detailed: Detailed, files: list[tuple[str, Path]], force: bool, by_layer: bool = False) -> None:
    from infprof.reports import TIMELINE, write_report

    if detailed.prepared is None and TIMELINE.name in dict(files):
        raise UsageError(
            "--perfetto needs the profile itself, read here: a stored diagnosis and --scheduler hold no events."
        )
    for name, target in files:
        write_report(name, detailed, target, force, _report_options(name, by_layer))
        print(f"infprof: wrote {target}", file=sys.stderr)


class _Gate:
    """What ``--fail-on`` asks: a severity, or an expression over the measures."""

    def __init__(self, text: str) -> None:
        from infprof.measures.names import MEASURES
        from infprof.results import SEVERITIES
        from infprof.rules.expression import ExpressionError, parse

        self.text = text
        self.severities = SEVERITIES[SEVERITIES.index(text) :] if text in SEVERITIES else ()
        try:
            self.expression = None if self.severities else parse(text, MEASURES)
        except ExpressionError as error:
            raise UsageError(
                f"--fail-on {text}: choose info, warning, critical or an expression over measures ({error})."
            ) from None

    def fails(self, diagnosis: Diagnosis) -> bool:
        if self.expression is None:
            return any(f.severity in self.severities for one in (diagnosis, *diagnosis.ranks) for f in one.findings)
        for values in (v for one in (diagnosis, *diagnosis.ranks) for v in _measures_by_scope(one)):
            known = {n: v for n, v in values.items() if v is not None}
            if not all(n in known for n in self.expression.names):
                continue
            try:
                if self.expression.value(known):
                    return True
            except ZeroDivisionError:
                continue  # no value, so it does not hold
        return False


def _measures_by_scope(diagnosis: Diagnosis) -> list[dict[str, float | int | None]]:
    scopes: dict[tuple[str, str | None], dict[str, float | int | None]] = {}
    for measure in diagnosis.measures:
        scopes.setdefault((measure.scope.kind, measure.scope.id), {})[measure.name] = measure.value
    return list(scopes.values())


def _gate(text: str | None) -> _Gate | None:
    return None if text is None else _Gate(text)


def _finish(diagnosis: Diagnosis, gate: _Gate | None) -> None:
    """End with the exit code that the diagnosis asks for."""
    if diagnosis.verdict.cls == "unusable" and not diagnosis.has_telemetry:
        # The diagnosis is on stdout; whoever only looks at stderr and the code still learns why.
        print(f"infprof: {diagnosis.verdict.sentence}", file=sys.stderr)
        raise typer.Exit(EXIT_UNUSABLE)
    if gate is not None and gate.fails(diagnosis):
        raise typer.Exit(EXIT_FINDINGS)


def _diagnose_run(folder: Path, rules: list[Path] | None, json: bool, html: Path | None, force: bool) -> None:
    """Print the diagnosis of a fresh bundle and keep it there; a bundle that holds nothing has been explained already."""
    from infprof.bundle import DIAGNOSIS
    from infprof.reports import render
    from infprof.reports.files import replace_file

    try:
        detailed = _diagnose(folder, "auto", None, rules, None)
    except UsageError:
        raise
    except InfprofError as error:
        print(f"infprof: {error}", file=sys.stderr)
        return
    except Exception:
        print(f"infprof: what was collected is kept in {folder}, which could not be diagnosed.", file=sys.stderr)
        raise
    diagnosis = detailed.diagnosis
    try:
        replace_file(folder / DIAGNOSIS, render("json", diagnosis).encode())
    except OSError as error:
        print(f"infprof: {folder / DIAGNOSIS} cannot be written: {error.strerror or error}.", file=sys.stderr)
    _print(diagnosis, "json" if json else "terminal")
    try:
        _write_files(detailed, [("html", html)] if html else [], force)
    except UsageError as error:
        # The run is over and its exit code stands.
        print(f"infprof: {error}", file=sys.stderr)
    print(f"infprof: the bundle is {folder} (infprof analyze {folder} shows this again)", file=sys.stderr)


def _choose(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{option} {value}: choose {', '.join(allowed[:-1])} or {allowed[-1]}.")


def _check_rule_dirs(rules: list[Path] | None) -> None:
    for directory in rules or ():
        if not directory.is_dir():
            raise UsageError(f"--rules {directory}: there is no such folder.")


def _load_rules(rules: list[Path] | None) -> RuleSet:
    from infprof.resources import rules_dir
    from infprof.rules import load

    _check_rule_dirs(rules)
    return load([rules_dir(), *(rules or ())])


def _end_rules(ruleset: RuleSet) -> None:
    for broken in ruleset.broken:
        print(f"infprof: {broken}", file=sys.stderr)
    if ruleset.broken:
        raise typer.Exit(EXIT_FINDINGS)


def _text_width() -> int:
    import shutil

    return min(shutil.get_terminal_size().columns, 120)


if __name__ == "__main__":
    main()
