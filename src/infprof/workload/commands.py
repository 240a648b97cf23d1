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


@workload_app.command("serve")
def serve_command(
    preset: Annotated[str, typer.Option("--preset", metavar="NAME", help="Size: tiny, small, 1b, 3b or 7b.")] = "tiny",
    fault: Annotated[
        str, typer.Option("--fault", metavar="NAME", help="The bottleneck to create; `workload list` shows them.")
    ] = "none",
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8000,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", "--batch", metavar="N", min=1, help="Requests that run at once, at most.")
    ] = 32,
    batch_wait: Annotated[
        str, typer.Option("--batch-wait", metavar="TIME", help="How long an idle engine gathers a batch, at most.")
    ] = "0",
    max_model_len: Annotated[
        int | None,
        typer.Option("--max-model-len", metavar="TOKENS", min=2, help="Of a request in all. Default: 2048."),
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(
            "--num-gpu-blocks-override",
            metavar="N",
            min=1,
            help="Blocks of 16 tokens in the KV cache. Default: enough for every request, within the memory.",
        ),
    ] = None,
    batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", metavar="N", min=1, help="Tokens of a step, at most.")
    ] = 2048,
    scheduling: Annotated[
        str, typer.Option("--scheduling-policy", metavar="NAME", help="priority (lower goes first) or fcfs.")
    ] = "priority",
    aging: Annotated[
        str, typer.Option("--aging", metavar="TIME", help="Waiting this long counts as one priority; 0 as none.")
    ] = "1s",
    admission: Annotated[
        bool, typer.Option("--admission/--no-admission", help="Start requests only when the KV cache has room.")
    ] = True,
    overcommit: Annotated[
        float,
        typer.Option("--kv-overcommit", metavar="FACTOR", min=1, help="How far above its size the cache is promised."),
    ] = 1.0,
    memory_short: Annotated[
        str,
        typer.Option("--when-memory-short", metavar="NAME", help="wait, shorten (the output) or refuse (with 503)."),
    ] = "wait",
    max_queue: Annotated[
        int, typer.Option("--max-queue", metavar="N", min=1, help="Requests that wait; more get 429.")
    ] = 256,
    queue_timeout: Annotated[
        str, typer.Option("--queue-timeout", metavar="TIME", help="Who waits longer gets 503; 0 waits for ever.")
    ] = "60s",
    rate_limit: Annotated[
        float | None,
        typer.Option("--rate-limit", metavar="PER_SECOND", help="Requests of each client; more get 429. Default: any."),
    ] = None,
    rate_burst: Annotated[
        int | None,
        typer.Option("--rate-burst", metavar="N", min=1, help="Requests at once before that. Default: a second's."),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", help="bfloat16, float16, float32 or float64.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of the weights.")] = 0,
    profiler: Annotated[
        str,
        typer.Option("--profiler", metavar="NAME", help="none, torch or cuda: what /start_profile starts."),
    ] = "none",
    profile_dir: Annotated[
        Path | None, typer.Option("--profile-dir", metavar="DIR", help="Where --profiler torch writes its traces.")
    ] = None,
    profile_steps: Annotated[
        int, typer.Option("--profile-steps", metavar="N", min=1, help="Steps that a trace holds, at most.")
    ] = 1000,
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="How long answers may take to end after SIGTERM.")
    ] = "20s",
) -> None:
    """Serve the model behind OpenAI's API, until SIGTERM or Ctrl-C.

    Needs PyTorch, Starlette and uvicorn: pip install 'infprof[serve]'.

    Example: infprof workload serve --preset tiny --port 8000

    Example: infprof run --load users=8,time=20s -- infprof workload serve --fault sync
    """
    from infprof.durations import parse_seconds
    from infprof.workload.server.serving import PolicyOptions, ServeOptions, serve_workload

    def seconds(option: str, text: str) -> float:
        return 0.0 if text.strip().rstrip("msinh") in ("0", "0.0") else parse_seconds(option, text) or 0.0

    policies = PolicyOptions(
        max_batch=max_num_seqs,
        batch_wait_s=seconds("--batch-wait", batch_wait),
        scheduling=scheduling,
        aging_s=seconds("--aging", aging),
        overcommit=overcommit if admission else None,
        memory_short=memory_short,
        max_queue=max_queue,
        queue_timeout_s=seconds("--queue-timeout", queue_timeout),
        rate_limit_per_s=rate_limit,
        rate_burst=rate_burst,
    )
    options = ServeOptions(
        preset=preset,
        fault=fault,
        device=device,
        dtype=dtype,
        seed=seed,
        host=host,
        port=port,
        context=max_model_len,
        kv_blocks=blocks,
        step_tokens=batched_tokens,
        policies=policies,
        profiler=profiler,
        profile_dir=profile_dir,
        profile_steps=profile_steps,
        grace_s=seconds("--grace", grace),
    )
    serve_workload(options, lambda text: print(f"infprof: {text}", file=sys.stderr, flush=True))
