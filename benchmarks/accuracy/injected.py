"""Runs with one fault each, its size a knob: what workloads cannot show (locks, files, modules, round trips, …) and,
with the knob at the rule's own level, the place where a finding begins.

Each entry of ``INJECTIONS`` is a description for the simulator as a function of the knob, a time in µs or a count that
the finding's share grows with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.accuracy.labels import Case, Label
from benchmarks.accuracy.sweep import written
from benchmarks.accuracy.truth import HOST_WORK, LEVELS, Format, label_of, share_of

from infprof.simulator import SimulatedTrace, parse_spec, simulate

H100 = "NVIDIA H100 80GB HBM3"
LONG = "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<(int)128, (int)128, (int)64, (int)4>>(flash::Flash_fwd_params)"
GEMM = "nvjet_tst_128x64_64x10_2x1_v_bz_coopA_TNT"
SGEMM = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas"
KERNELS: dict[str, Any] = {
    "long": {"name": LONG, "time": "90us"},
    "mid": {"name": LONG, "time": "20us"},
    "tiny": {"name": "void vllm::rms_norm_kernel<c10::BFloat16>(T1 *, const T1 *, float, int, int)", "time": "3us"},
    "narrow": {"name": LONG, "time": "90us", "grid": [16, 1, 1]},
}


@dataclass(frozen=True)
class Injection:
    """A fault of known kind. ``run``: knob → what stands in the description beside kernels and name. ``low`` and ``high``:
    knobs at which the finding's share is surely under and over its level. ``formats``: which recordings show it."""

    run: Callable[[float], dict[str, Any]]
    low: float
    high: float
    formats: tuple[str, ...] = ("nsys", "kineto")


def loop(*step: dict[str, Any], repeat: int = 60, before: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """One process, one thread, that does the same over and over."""
    run = [*before, {"repeat": repeat, "range": "step_{i}", "do": list(step)}]
    return {"processes": [{"pid": 900, "name": "VLLM::Worker", "threads": [{"run": run}]}]}


def us(value: float) -> str:
    return f"{value:.3f}us"


def ahead(*step: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A loop whose host is a step ahead, so that it costs nothing by itself."""
    return loop(*step, {"record": "done"}, {"sync": "event", "event": "done", "ago": 1}, **more)


BUSY = {"launch": "long", "count": 8}
DRAINED = ({"launch": "long", "count": 8}, {"sync": "device"})


def _ranks(speeds: tuple[float, ...], size: str, nvlink: float) -> dict[str, Any]:
    def rank(number: int, speed: float) -> dict[str, Any]:
        run = [{"repeat": 40, "do": [{"launch": f"of{number}", "count": 2}, {"allreduce": size}]}]
        return {"pid": 900 + number, "device": number, "threads": [{"run": run}]}

    kernels = {f"of{number}": {"name": LONG, "time": us(600 * speed)} for number, speed in enumerate(speeds)}
    return {
        "kernels": KERNELS | kernels,
        "devices": [{"name": H100, "nvlink": nvlink}] * len(speeds),
        "processes": [rank(number, speed) for number, speed in enumerate(speeds)],
    }


def _product(knob: float) -> dict[str, Any]:
    """Products that take six times as long as their bytes need, among kernels that take less time the larger the knob."""
    product = {"name": GEMM, "op": "aten::mm(bf16[64, 4096], bf16[4096, 4096].t)", "time": "60us"}
    norm = "_C::fused_add_rms_norm(bf16[64, 4096], bf16[64, 4096], bf16[4096], 1e-05)"
    other = {"name": "void vllm::fused_add_rms_norm_kernel<c10::BFloat16>(T1 *)", "op": norm, "time": us(10_000 / knob)}
    return {"kernels": {"product": product, "other": other}} | ahead(
        {"launch": "product", "count": 2}, {"launch": "other"}
    )


def _fp32(time_us: float) -> dict[str, Any]:
    op = "aten::mm(f32[128, 1024], f32[1024, 1024].t)"
    return {"kernels": KERNELS | {"product": {"name": SGEMM, "op": op, "time": us(time_us)}}} | ahead(
        BUSY, {"launch": "product"}
    )


PROMPT: dict[str, Any] = {"devices": [{"name": H100, "dispatch": "50ns", "kernel_gap": "50ns"}]}

INJECTIONS: dict[str, Injection] = {
    # Without latency, so that only the calls themselves are what the device waits for.
    "launch-bound": Injection(lambda x: PROMPT | loop({"launch": "mid", "count": 40, "call": us(x)}), 18, 40),
    "host-work-between-steps": Injection(lambda x: loop(BUSY, {"host": us(600 + x)}), 20, 2_000),
    "host-work-per-launch": Injection(
        lambda x: loop({"repeat": 40, "do": [{"launch": "mid"}, {"host": us(x)}]}, repeat=10), 10, 60
    ),
    "sync-per-step": Injection(lambda x: loop(*DRAINED, {"host": us(x)}), 1, 300),
    "allocator-churn": Injection(lambda x: loop(BUSY, {"malloc": "8MiB", "call": us(600 + x)}), 20, 2_000),
    "module-load-in-window": Injection(
        # Loads of a millisecond and more at the front would be start-up.
        lambda x: loop(*DRAINED, {"load_module": us(x)}),
        5,
        900,
    ),
    "lock-contention": Injection(lambda x: loop(*DRAINED, {"block": "futex", "for": us(x)}), 5, 900, ("nsys",)),
    "io-wait": Injection(lambda x: loop(*DRAINED, {"block": "read", "for": us(x)}), 5, 900, ("nsys",)),
    "waiting-for-requests": Injection(
        lambda x: loop(*DRAINED, {"block": "epoll_wait", "for": us(x)}), 5, 900, ("nsys",)
    ),
    "profiler-overhead": Injection(
        lambda x: loop(*DRAINED, {"overhead": "CUDA profiling data flush", "for": us(x)}), 5, 900
    ),
    "exposed-copies": Injection(lambda x: ahead(BUSY, {"copy": "h2d", "size": f"{x:.0f}kB"}), 300, 60_000),
    "pageable-copies": Injection(
        lambda x: loop(BUSY, {"copy": "d2h", "size": f"{x:.0f}kB", "memory": "pageable"}), 30, 9_000
    ),
    "small-copies": Injection(
        lambda x: ahead(BUSY, {"repeat": 20, "do": [{"copy": "h2d", "size": f"{x:.2f}kB"}]}, repeat=40), 1, 63
    ),
    "needless-copies": Injection(
        lambda x: ahead(BUSY, {"copy": "d2h", "size": f"{x:.0f}kB"}, {"copy": "h2d", "size": f"{x:.0f}kB"}, repeat=80),
        200,
        30_000,
    ),
    "device-copies": Injection(lambda x: ahead(BUSY, {"copy": "d2d", "size": f"{x:.0f}MB"}), 5, 900),
    "exposed-communication": Injection(lambda x: _ranks((1.0, 1.0), f"{x:.0f}kB", 450e9), 10, 60_000),
    "straggler-rank": Injection(lambda x: _ranks((1.0, 1.0 + x, 1.0), "64kB", 450e9), 0.012, 1.5),
    "fp32-gemm": Injection(_fp32, 20, 400),
    "few-sm-kernels": Injection(
        lambda x: (
            {"kernels": KERNELS | {"narrow": {"name": LONG, "time": us(x), "grid": [16, 1, 1]}}}
            | ahead(BUSY, {"launch": "narrow"})
        ),
        20,
        400,
    ),
    "many-small-kernels": Injection(
        lambda x: (
            {
                "kernels": KERNELS | {"other": {"name": LONG, "time": us(900 / x)}},
                "graphs": {"step": {"kernels": ["other", "tiny", "tiny", "tiny"]}},
            }
            | ahead({"repeat": 6, "do": [{"graph": "step"}]}, repeat=100)
        ),
        2,
        30,
    ),
    "gemm-far-from-roof": Injection(_product, 5, 100, ("kineto",)),
}
FORMATS = {"nsys": Format(True, False, False), "kineto": Format(False, False, True)}


def described(rule: str, knob: float, seed: int = 0) -> dict[str, Any]:
    given = INJECTIONS[rule].run(knob)
    return {"name": rule, "seed": seed, "jitter": 0.02, "kernels": KERNELS, **given}


def played(rule: str, knob: float, seed: int = 0) -> SimulatedTrace:
    return simulate(parse_spec(described(rule, knob, seed)))


def knob_at(rule: str, factor: float, form: Format, seed: int = 0) -> tuple[float, SimulatedTrace]:
    """The knob, and the run, whose true share is ``factor`` of the rule's level, to a hundredth of it."""
    injection = INJECTIONS[rule]
    low, high = injection.low, injection.high
    wanted = factor * level_of(rule)
    for _ in range(40):
        knob = (low + high) / 2
        trace = played(rule, knob, seed)
        share = share_of(trace, form, rule)
        if abs(share - wanted) <= 0.01 * level_of(rule):
            return knob, trace
        low, high = (knob, high) if share < wanted else (low, knob)
    raise AssertionError(f"{rule}: no knob gives {wanted}; the last was {knob} with {share}")


def level_of(rule: str) -> float:
    return LEVELS.get(rule, HOST_WORK)


def cases(source: str, seed: int, sizes: tuple[float, ...]) -> Iterator[Case]:
    """Every injection at knobs spread between its ends (shares of the way, 0 to 1), in every format that shows it."""
    for rule, injection in INJECTIONS.items():
        for number, size in enumerate(sizes):
            # Most of the way lies far above the level: spread evenly in the logarithm.
            knob = injection.low * (injection.high / injection.low) ** size
            for form in injection.formats:
                name = f"{source}-{seed}-{rule}-{size:g}-{form}"
                yield Case(name, source, partial(_make, rule, knob, seed + number, FORMATS[form]))


def _make(rule: str, knob: float, seed: int, form: Format, folder: Path) -> tuple[list[Path], Label]:
    trace = played(rule, knob, seed)
    return written(trace, form, folder), label_of(trace, form)
