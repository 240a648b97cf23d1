"""The commands below ``infprof workload``: parse, call, print."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from infprof.errors import InfprofError

workload_app = typer.Typer(
    help="A small model that serves requests, with bottlenecks made on purpose.", no_args_is_help=True
)


@workload_app.command("list")
def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print presets and faults as JSON.")] = False,
) -> None:
    """Show the presets and faults: what each does, where it works, and what a right diagnosis says.

    Example: infprof workload list
    """
    from infprof.workload.faults import describe_faults
    from infprof.workload.presets import describe_presets
    from infprof.workload.texts import list_text

    if as_json:
        print(json.dumps({"presets": describe_presets(), "faults": describe_faults()}, indent=2))
    else:
        print(list_text(min(shutil.get_terminal_size().columns, 120)), end="")


@workload_app.command("run")
def run_command(
    preset: Annotated[str, typer.Option("--preset", metavar="NAME", help="Size: tiny, small, 1b, 3b or 7b.")] = "tiny",
    fault: Annotated[
        str, typer.Option("--fault", metavar="NAME", help="The bottleneck to create; `workload list` shows them.")
    ] = "none",
    requests: Annotated[int, typer.Option("--requests", metavar="N", min=1, help="How many requests.")] = 32,
    prompt: Annotated[
        int, typer.Option("--prompt", metavar="TOKENS", min=1, help="Prompt tokens, on average; each varies by a half.")
    ] = 128,
    output: Annotated[
        int, typer.Option("--output", metavar="TOKENS", min=1, help="Output tokens, on average; each varies by a half.")
    ] = 64,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Requests that run at once, at most.")] = 32,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="bfloat16, float16, float32 or float64. Default: bfloat16 on a GPU, float32 on the CPU.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of weights, lengths and prompts.")] = 0,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Record with PyTorch's profiler (.json or .json.gz)."),
    ] = None,
    trace_steps: Annotated[
        int, typer.Option("--trace-steps", metavar="N", min=1, help="Steps that the trace holds, at most.")
    ] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Serve random requests with random weights, and print throughput and latencies.

    Needs PyTorch: pip install 'infprof[torch]'.

    Example: infprof workload run --preset tiny --requests 8

    Example: infprof workload run --preset 3b --fault launch --trace launch.json.gz
    """
    from infprof.workload.runner import RunOptions, run_workload
    from infprof.workload.settings import RequestsSettings
    from infprof.workload.texts import result_text

    options = RunOptions(
        preset=preset,
        fault=fault,
        device=device,
        dtype=dtype,
        requests=RequestsSettings(requests, prompt, output, seed),
        max_batch=batch,
        trace=trace,
        trace_steps=trace_steps,
        force=force,
    )
    result = run_workload(options, lambda text: print(f"infprof: {text}", file=sys.stderr))
    figures = result.to_dict()
    print(json.dumps(figures, indent=2) if as_json else result_text(figures), end="\n" if as_json else "")
    if trace is not None:
        print(f"infprof: wrote {trace}", file=sys.stderr)
    lost = figures["request_count"] - figures["success_count"]
    if lost:
        raise InfprofError(f"{lost} requests failed: the device's memory was too small for their step.")
