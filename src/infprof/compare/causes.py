"""What probably made a difference: options of the command line that differ, and parts of the model that moved to the host.

A new explanation of an option is one entry of ``EFFECTS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from infprof.compare.figures import focus_value
from infprof.compare.headline import family_words, signed
from infprof.compare.model import Cause, Comparison, FlagChange, PhaseChange
from infprof.compare.runs import Run
from infprof.flags import speed_flags
from infprof.reports import format as fmt
from infprof.reports import labels

# A change of this share of a step is worth a cause.
WORTH = 0.02
# Kernels per launch that differ by this factor are another way to launch.
OTHER_LAUNCHES = 1.5
_GRAPHS_OFF = ("--enforce-eager", "--disable-cuda-graph", "--disable-decode-cuda-graph", "--disable-prefill-cuda-graph")
# Trips to the host that (nearly) every step makes, of which the other run has less than half; and the least wait for one.
EACH_STEP, WORTH_WAIT = 0.5, 50_000
_PLACEMENT = (
    "check where the layers are placed: the engine's log says how many are on the GPU; raise --n-gpu-layers (num_gpu) to all "
    "of them",
    "free memory for them, for the estimate of memory moves layers to the host: a smaller context (--ctx-size, num_ctx), "
    "fewer parallel sequences, a smaller KV cache type",
)


class Effect(NamedTuple):
    """What an option decides. It may be the cause of kernels of the ``classes`` that gave way to others, of ``slices``
    ((kind, cause) as in the contract) that changed, and, with ``launches``, of another number of kernels per launch.

    ``remedy`` fits any value, ``by_value`` those that are named. It is for the run that has the option and is slower.
    """

    options: tuple[str, ...]
    decides: str
    remedy: str
    classes: tuple[str, ...] = ()
    slices: tuple[tuple[str, str | None], ...] = ()
    launches: bool = False
    by_value: tuple[tuple[str, str], ...] = ()


_PRODUCTS = ("gemm", "gemv", "moe")
EFFECTS = (
    Effect(
        ("--quantization",),
        "selects the kernels of matrix products",
        "drop --quantization: the engine then takes what the checkpoint says and the fastest kernel for it",
        classes=(*_PRODUCTS, "quantise"),
        by_value=(
            ("awq", "drop --quantization awq (the engine then converts to Marlin by itself), or give awq_marlin"),
            ("gptq", "drop --quantization gptq (the engine then converts to Marlin by itself), or give gptq_marlin"),
        ),
    ),
    Effect(
        ("--dtype",),
        "selects the precision of the kernels",
        "--dtype auto or bfloat16, as the checkpoint has it",
        classes=(*_PRODUCTS, "attention"),
    ),
    Effect(
        ("--attention-backend",),
        "selects the attention kernels",
        "drop --attention-backend: the engine chooses by the GPU",
        classes=("attention", "kv-cache"),
    ),
    Effect(
        ("--kv-cache-dtype",),
        "selects the attention kernels, which read the KV cache",
        "--kv-cache-dtype auto, unless long contexts gain from fewer bytes",
        classes=("attention", "kv-cache"),
    ),
    Effect(
        _GRAPHS_OFF,
        "switches CUDA graphs off, so that each kernel is launched by itself",
        "drop {option}, so that decode steps are launched as graphs",
        slices=(("idle", "launch"), ("idle", "host-work")),
        launches=True,
    ),
    Effect(
        ("--disable-custom-all-reduce",),
        "leaves all-reduce to NCCL",
        "drop --disable-custom-all-reduce where GPUs reach each other's memory",
        classes=("communication",),
        slices=(("exposed_communication", None),),
    ),
    Effect(
        ("--no-async-scheduling", "--disable-overlap-schedule"),
        "makes the GPU wait while the host schedules",
        "drop {option}, so that the next step is scheduled while this one runs",
        slices=(("idle", "host-work"), ("idle", "sync")),
    ),
    Effect(
        ("--cpu-offload-gb", "--n-gpu-layers"),
        "keeps a part of the model off the GPU",
        "less offload, or more layers on the GPU, as far as its memory allows",
        slices=(("exposed_copy", "h2d"), ("exposed_copy", "d2h"), ("idle", "host-work"), ("idle", "sync")),
    ),
    Effect(
        ("--tensor-parallel-size", "--tp-size", "--pipeline-parallel-size"),
        "divides the model over another number of GPUs",
        "compare runs with the same number of GPUs",
        classes=(*_PRODUCTS, "communication"),
        slices=(("exposed_communication", None),),
    ),
)


def flag_changes(base: Run, head: Run) -> list[FlagChange]:
    """Options that differ, in BASE's order first. Of the stored text only what ``flags`` lets through is read."""
    before, after = _options(base), _options(head)
    known = before is not None and after is not None
    before, after = before or {}, after or {}
    return [
        FlagChange(option, before.get(option), after.get(option), known)
        for option in {**before, **after}
        if before.get(option) != after.get(option)
    ]


def _options(run: Run) -> dict[str, str] | None:
    """Option → as it was given; None where the command line is not known."""
    stored = run.diagnosis.provenance.capture.get("flags")
    if not isinstance(stored, list):
        return None
    flags = speed_flags([word for flag in stored for word in str(flag).split()])
    return {flag.partition(" ")[0]: flag for flag in flags}


def flag_words(change: FlagChange) -> str:
    """``--quantization awq (HEAD only)``."""
    if change.base is not None and change.head is not None:
        return f"{change.base} (BASE), {change.head.partition(' ')[2]} (HEAD)"
    side, other = ("HEAD", "BASE") if change.base is None else ("BASE", "HEAD")
    unknown = "" if change.known else f"; of {other} the command line is not known"
    return f"{change.head or change.base} ({side} only{unknown})"


def causes_of(result: Comparison, base: Run, head: Run, phases: Sequence[PhaseChange]) -> list[Cause]:
    """What probably made the difference in the ``phases`` that both runs have, the surest first."""
    moved = _model_on_host(base, head)
    return [*([moved] if moved else []), *_flag_causes(result, phases)]


class _Trips(NamedTuple):
    """A step's trips of data to the host in its middle: how many, the idle time of one, its bytes."""

    per_step: float
    idle_ns: float
    size: float | None


def _model_on_host(base: Run, head: Run) -> Cause | None:
    """That a part of the model runs on the host in one run and not in the other."""
    before, after = _trips(base), _trips(head)
    if before is None or after is None:
        return None
    sides = (("HEAD", "BASE", after, before), ("BASE", "HEAD", before, after))
    for side, other, here, there in sides:
        if here.per_step >= EACH_STEP and there.per_step < EACH_STEP * here.per_step and here.idle_ns >= WORTH_WAIT:
            words = (
                f"in {side} a step copies {fmt.size(here.size)} to the host and back {fmt.count(round(here.per_step, 1))} "
                f"time{'s' * (round(here.per_step, 1) != 1)} in its middle, and the GPU waits {fmt.duration(here.idle_ns)} for "
                f"the host's work between; {other} has {'less' if there.per_step else 'none'} of that"
            )
            remedies = list(_PLACEMENT) if side == "HEAD" else []
            return Cause("model-on-host", f"part of the model runs on the host in {side}", words, remedies)
    return None


def _trips(run: Run) -> _Trips | None:
    count, idle = focus_value(run, "model_on_host_count"), focus_value(run, "model_on_host_idle_ns")
    if count is None or idle is None or not run.step_count:
        return None
    return _Trips(count / run.step_count, idle / count if count else 0.0, focus_value(run, "model_on_host_bytes"))


def _flag_causes(result: Comparison, phases: Sequence[PhaseChange]) -> list[Cause]:
    """Options that differ and decide something of what changed."""
    slower = bool(phases) and (phases[0].mean_ns.delta or 0.0) > 0
    found = []
    for effect in EFFECTS:
        changes = [change for change in result.flags if change.option in effect.options and change.known]
        signs = _signs(effect, result, phases) if changes else []
        if signs:
            words = ", ".join(map(flag_words, changes))
            remedies = dict.fromkeys(_remedy(effect, change) for change in changes if slower)
            found.append(Cause("flag", words, f"{effect.decides}: {', '.join(signs)}", list(remedies)))
    return found


def _remedy(effect: Effect, change: FlagChange) -> str:
    if change.head is None:
        return f"give {change.base} again, as in BASE"
    return dict(effect.by_value).get(change.head.partition(" ")[2], effect.remedy).format(option=change.option)


def _signs(effect: Effect, result: Comparison, phases: Sequence[PhaseChange]) -> list[str]:
    """What changed of that which the option decides."""
    step = {phase.name: max(phase.mean_ns.base or 0.0, phase.mean_ns.head or 0.0) for phase in phases}
    longest = max(step.values(), default=0.0)
    signs = []
    for row in result.replaced:
        least = WORTH * step.get(row.phase or "", longest)
        if row.kernel_class in effect.classes and max(row.base_ns, row.head_ns) >= least:
            signs.append(f"{row.kernel_class} kernels changed ({family_words(row)}, {signed(row.delta_ns)} a step)")
    for phase in phases[:1]:
        for item in phase.slices:
            if (item.kind, item.cause) in effect.slices and abs(item.delta_ns) >= WORTH * step[phase.name]:
                signs.append(f"{labels.slice_style(item.kind, item.cause).label} {signed(item.delta_ns)} a step")
        if effect.launches and _launched_otherwise(phase):
            was, now = (fmt.count(value) for value in (phase.launches_per_step.base, phase.launches_per_step.head))
            signs.append(f"{was} → {now} launches a step")
    return list(dict.fromkeys(signs))


def _launched_otherwise(phase: PhaseChange) -> bool:
    """Whether a launch is of many kernels in one run (a graph) and of few in the other."""
    kernels, launches = phase.kernels_per_step, phase.launches_per_step
    if not (kernels.base and kernels.head and launches.base and launches.head):
        return False
    ratio = (kernels.base / launches.base) / (kernels.head / launches.head)
    return max(ratio, 1 / ratio) >= OTHER_LAUNCHES
