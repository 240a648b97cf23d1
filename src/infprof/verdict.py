"""From measures to a class: which limiter wins, with its cause, rank and confidence (docs/verdicts.md).

Every number comes from rules/thresholds.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass

from infprof import collecting
from infprof.durations import in_words
from infprof.measures.device import DeviceAnalysis
from infprof.results import Measures, Problem, Verdict
from infprof.rules import Thresholds
from infprof.stack import is_amd

# Confidence of a verdict made from complete evidence, and of one with a known weakness.
SURE, FAIR, LOW = 0.9, 0.7, 0.4
# So small a difference does not show in a share.
_NEARLY_ALL = 0.002

_CAUSE_WORDS = {
    "launch": "in launch calls",
    "host-work": "working outside CUDA",
    "sync": "held back by a synchronising call",
    "lock": "waiting for a lock or another thread",
    "allocator": "allocating or freeing memory",
    "module-load": "loading modules or compiling kernels",
    "io": "waiting for files or peers",
    "cpu-contention": "runnable but not running",
    "dependency": "with work queued that waits for something the trace does not explain",
    "unknown": "for reasons that the trace does not show",
}


@dataclass(frozen=True)
class TraceFacts:
    """What decides whether a trace can be judged at all; for the whole trace, whatever the window."""

    operations: int = 0
    kernels: int = 0
    graphs: int = 0
    copies: int = 0
    operation_ns: int = 0
    span_ns: int = 0
    dropped: int = 0
    launches: int = 0
    graph_launches: int = 0
    silent_graph_launches: int = 0
    only_startup: bool = False
    idle_ratio: float = 0.0
    # Launches in the middle of the recording that left nothing on the GPU.
    lost: int = 0
    # Launches into a graph under capture.
    captured: int = 0
    accelerator_events: int = 0
    tool: str = ""
    # The end of the file, or of a table, is missing.
    cut: bool = False


def trace_verdict(facts: TraceFacts, thresholds: Thresholds, diagnostics: list[tuple[str, str]]) -> Verdict | None:
    """The ``unusable`` verdict of a trace that allows no conclusion, else None."""
    ran = facts.kernels + facts.graphs
    how = collecting.advice(facts.tool)
    if facts.accelerator_events and not ran:
        return _unusable(
            "unsupported-device",
            f"The trace is of an accelerator that infprof does not know: {facts.accelerator_events} events of its own kind, "
            "and no kernel of a GPU.",
            "only GPUs of NVIDIA and AMD (and kernels of others, where they are recorded as such) can be judged.",
        )
    if facts.cut and not ran and facts.copies == 0:
        return _unusable(
            "damaged",
            "The file is cut short or damaged, and nothing that ran on a GPU could be read: what is missing outweighs what "
            "is there.",
            "the whole file: copy or export it again.",
        )
    if facts.dropped > facts.operations:
        return _unusable(
            "damaged",
            f"{facts.dropped} of {facts.dropped + facts.operations} GPU operations have no usable times: "
            "what is missing outweighs what is there.",
            "record again with a larger buffer or a shorter capture.",
        )
    if facts.launches and not ran and facts.copies == 0:
        return _unusable(
            "gpu-not-recorded",
            f"{facts.launches} launches were recorded but nothing that ran on the GPU: cannot tell how busy it was.",
            f"GPU activity is missing: {how.graph_nodes if facts.graph_launches else how.gpu_work_lost}.",
        )
    if not ran and facts.copies == 0:
        said = next((text for _, text in diagnostics if "cuda" in text.lower()), None)
        found = "no operation ran on a GPU" if not facts.operations else "only stray memsets ran on a GPU"
        why = f"{how.recorder} says: {said}" if said else how.gpu_work + "."
        return _unusable("no-gpu-work", f"Nothing to diagnose: {found} in this trace.", why)
    if facts.lost > facts.kernels:
        return _unusable(
            "damaged",
            f"{facts.lost} launches left no record on the GPU and only {facts.kernels} kernels are there: what is missing "
            "outweighs what is there.",
            f"{how.recorder} lost GPU records: record a shorter window.",
        )
    if facts.span_ns < thresholds.too_short_span_ns or (
        facts.operations < thresholds.too_short_ops and facts.operation_ns < thresholds.too_short_op_ns
    ):
        captured = (
            f" {facts.captured} launches were captured into a graph, which does not run them." if facts.captured else ""
        )
        return _unusable(
            "too-short",
            f"The trace is too short to judge: {facts.operations} GPU operation{'s' * (facts.operations != 1)}, "
            f"{in_words(facts.operation_ns)} in all, within {in_words(facts.span_ns)}.{captured}",
            "record some seconds of steady work (a hundred steps or more).",
        )
    silent = facts.silent_graph_launches
    if silent and silent >= max(facts.graph_launches // 2, 1):
        return _unusable(
            "gpu-not-recorded",
            f"{silent} of {facts.graph_launches} CUDA-graph launches left no GPU record: what looks idle may be busy.",
            f"GPU activity inside graphs was not recorded: {how.graph_nodes}.",
        )
    if facts.only_startup or (not ran and facts.idle_ratio > 0.5):
        return _unusable(
            "only-startup",
            "The trace holds only start-up (loading, compiling, allocating): there is no steady part to judge.",
            "record after warm-up, for example with `--delay`, or look at start-up itself with `--window full`.",
        )
    return None


def telemetry_verdict(
    measures: Measures, thresholds: Thresholds, no_trace: bool, captured: bool = True
) -> Verdict | None:
    """The class that telemetry alone allows, None where it allows none.

    Without a timeline nobody knows why a GPU was idle. What can be said: that nothing was asked of the server, or what
    limits a GPU that is busy, by its own hardware counters (rank A).
    """
    nothing = _no_timeline() if no_trace else None
    if not captured:
        # What was seen is start-up or warm-up: an idle engine there says nothing.
        return _never_captured() if no_trace else None
    # Time without an answer of the engine is not counted as time without requests.
    silent = _value(measures, "zero_running_ratio") * _value(measures, "engine_known_ratio")
    if silent >= thresholds.no_demand:
        return Verdict(
            "no-demand",
            None,
            None,
            "C",
            FAIR,
            f"No demand: for {_pct(silent)} of the capture the serving engine had no request running and none waiting.",
        )
    # Counters are the GPU's, whoever uses it: without memory of the program on it they prove nothing of the program.
    if not no_trace or _value(measures, "target_memory_peak_bytes") <= 0:
        return nothing
    # Only a GPU that hardly ever rests has a limiter that matters; why one rests only a timeline can tell.
    active = measures.value("gpm_graphics_active_ratio")
    if _value(measures, "gpu_load_ratio") >= thresholds.compute_max or (active or 0) >= thresholds.compute_max:
        verdict = _throttled(measures, thresholds)
        if verdict is None and active is not None and active >= thresholds.compute_max:
            verdict = _limiter(measures, active, thresholds)
        if verdict is not None:
            verdict.confidence = min(verdict.confidence, FAIR)
            return verdict
    return nothing


def no_gpu_seen() -> Verdict:
    """The verdict of a run that recorded a timeline where neither the recorder nor a probe saw a GPU."""
    return _unusable(
        "no-gpu-work",
        "No operation ran on a GPU, and neither the recorder nor a probe saw one; what telemetry shows is below.",
        "a GPU that can be used from here (infprof doctor says what is missing).",
    )


def _never_captured() -> Verdict:
    return _unusable(
        "no-gpu-work",
        "The capture never began, so nothing can be told of it; what telemetry saw until the end is below.",
        "a program that is ready before it ends or the time is up: the problems below say what this one lacked.",
    )


def _no_timeline() -> Verdict:
    return _unusable(
        "no-gpu-work",
        "No timeline was recorded, so where the GPU's time went cannot be told; what telemetry shows is below.",
        "run under nsys for a timeline (infprof doctor says what is missing).",
    )


def device_verdict(analysis: DeviceAnalysis, thresholds: Thresholds) -> Verdict:
    """The class of one device in one scope, from its measures."""
    m = analysis.measures
    no_demand, profiler = _value(m, "no_demand_ratio"), _value(m, "profiler_ratio")
    rest = 1 - no_demand - profiler
    if no_demand >= thresholds.no_demand:
        second = _class_of_rest(analysis, thresholds)
        words = f"{second.cls}/{second.cause}" if second.cause else second.cls
        doubtful = rest < thresholds.low_confidence_rest
        return Verdict(
            cls="no-demand",
            cause=None,
            code=None,
            rank="C",
            confidence=SURE - 0.1,
            sentence=f"No demand: for {_pct(no_demand)} of the window the program waited for requests or input. "
            f"The rest is {words}" + (", judged from little time." if doubtful else "."),
            second=words,
        )
    verdict = _class_of_rest(analysis, thresholds)
    if rest < thresholds.low_confidence_rest:
        verdict.confidence = min(verdict.confidence, LOW)
    return verdict


def _class_of_rest(analysis: DeviceAnalysis, thresholds: Thresholds) -> Verdict:
    m = analysis.measures
    if _value(m, "demand_ns") <= 0:
        return _busy(analysis, thresholds)
    shares = {
        "communication-bound": (_value(m, "exposed_comm_ratio"), thresholds.exposed_comm),
        "pcie-limited": (_value(m, "exposed_host_copy_ratio"), thresholds.host_copy),
        "scheduling-bubble": (_value(m, "recoverable_idle_ratio"), thresholds.recoverable_idle),
    }
    if analysis.counters is not None and analysis.counters.shared_gpu:
        # Another process works while this trace shows the device idle: idle time here proves nothing.
        shares["scheduling-bubble"] = (0.0, thresholds.recoverable_idle)
    passing = {cls: share for cls, (share, limit) in shares.items() if share >= limit}
    if not passing:
        return _busy(analysis, thresholds)
    # Once one passes, a larger one that misses its own limit by a hair is the class all the same.
    passing = {c: share for c, (share, limit) in shares.items() if share >= limit - thresholds.near_miss}
    cls = max(passing, key=lambda c: passing[c])
    share = passing[cls]
    if share < thresholds.winner_min and _value(m, "compute_ratio") > thresholds.compute_max:
        return _busy(analysis, thresholds)
    confidence, doubts = _confidence(analysis)
    rivals = [c for c in passing if c != cls and share - passing[c] < thresholds.close_call]
    if rivals:
        confidence = min(confidence, 0.6)
        doubts.append(f"{rivals[0]} is nearly as large ({_pct(passing[rivals[0]])})")
    if cls == "communication-bound":
        verdict = communication_verdict(m, share, thresholds)
    elif cls == "pcie-limited":
        verdict = _pcie(m, share, thresholds)
    else:
        verdict = _bubble(analysis, share, thresholds)
    verdict.confidence = round(min(verdict.confidence, confidence), 2)
    if doubts:
        verdict.sentence += " Caution: " + "; ".join(doubts) + "."
    return verdict


def communication_verdict(m: Measures, share: float, thresholds: Thresholds) -> Verdict:
    """Communication-bound, with its cause: late arrival, volume, or unknown. ``share``: exposed communication, of D."""
    spread, rate = m.value("comm_spread_ratio"), m.value("comm_bytes_per_s")
    peak = m.value("nvlink_peak_bytes_per_s") or m.value("link_peak_bytes_per_s")
    cause, why = "unknown", "how much moves is not known, and nobody arrives late"
    if spread is not None and spread >= thresholds.straggler_share:
        cause, why = "straggler", f"{_pct(float(spread))} of it waits for the last device to arrive"
    elif rate is not None and peak and rate >= thresholds.volume_bandwidth_share * peak:
        cause, why = "volume", f"messages move at {rate / 1e9:.1f} GB/s, over half of what the link gives"
    elif spread is None:
        moved = "" if rate is None else f"messages move at {rate / 1e9:.1f} GB/s, which no link explains; "
        why = f"{moved}whether a rank is late only the traces of all ranks together can tell"
        outliers = _value(m, "comm_outlier_ns") / max(_value(m, "comm_total_ns"), 1)
        if outliers >= 0.2:
            count = round(_value(m, "comm_outlier_count"))
            why = (
                f"{_pct(outliers)} of it are {count} collectives that take ten times as long as usual, which is waiting for "
                f"another rank; {why}"
            )
    elif rate is not None:
        why = f"messages move at {rate / 1e9:.1f} GB/s, which no link explains"
    return Verdict(
        "communication-bound",
        cause,
        None,
        "C",
        SURE if cause != "unknown" else FAIR,
        f"Communication limits this device: for {_pct(share)} of {_the_time(m)} a collective runs and nothing hides it; {why}.",
    )


def _pcie(m: Measures, share: float, thresholds: Thresholds) -> Verdict:
    exposed = _value(m, "exposed_host_copy_ns")
    pageable = _value(m, "exposed_pageable_copy_ns")
    slower = m.value("pcie_link_lost_ratio")
    median = m.value("host_copy_exposed_p50_bytes")
    h2d, d2h = m.value("h2d_bytes_per_s"), m.value("d2h_bytes_per_s")
    mostly_d2h = _value(m, "exposed_copy_d2h_ns") > _value(m, "exposed_copy_h2d_ns")
    direction, rate = ("device to host", d2h) if mostly_d2h else ("host to device", h2d)
    at = f" at {rate / 1e9:.1f} GB/s" if rate else ""
    if pageable >= exposed / 2:
        cause, why = "pageable", f"mostly {direction}{at} from or to pageable memory, which blocks and is slow"
    elif slower is not None and slower >= thresholds.link_lost:
        cause = "link-downgrade"
        why = f"mostly {direction}{at}, over a PCIe link that runs {_pct(slower)} below what both sides support"
    elif median is not None and median < thresholds.small_copy_bytes:
        cause, why = "small-copies", f"half of it in copies of {median} bytes or less, where the fixed cost rules"
    else:
        cause, why = "volume", f"mostly {direction}{at}, {_beside_kernels(m, exposed)}"
    confidence = SURE
    if cause == "volume" and m.value("pageable_count") is None:
        confidence = FAIR
        why += "; whether from or to pageable memory was not recorded"
    return Verdict(
        "pcie-limited",
        cause,
        None,
        "C",
        confidence,
        f"Copies between host and device limit this run: for {_pct(share)} of {_the_time(m)} one runs and no kernel does; {why}.",
    )


def _beside_kernels(m: Measures, exposed: float) -> str:
    """Where the kernels are while copies run: a program that overlaps them already must not be told that it does not."""
    copying, computing = _value(m, "host_copy_ns"), _value(m, "compute_ns")
    if not computing:
        return "and there is nothing to hide it under"
    hidden = copying - exposed >= min(copying, computing) / 2
    return "beside the kernels, which take less time" if hidden else "in series with the kernels"


def bubble_causes(m: Measures) -> dict[str, int]:
    """Recoverable idle time by cause, ns, after deciding whether waits or the host's own work make the loop long."""
    names = ("launch", "lock", "allocator", "module-load", "io", "cpu-contention")
    causes = {c: int(_value(m, f"idle_{c.replace('-', '_')}_ns")) for c in names}
    loop, loss = int(_value(m, "idle_host_loop_ns")), int(_value(m, "idle_sync_loss_ns"))
    # What the host does before sampling is its work, whoever waited before.
    sampling = int(_value(m, "idle_sampling_loss_ns"))
    causes["host-work"], causes["sync"] = loop + sampling, loss - sampling
    named = sum(causes.values())
    # What is left of recoverable idle is unexplained, unless it was large enough to be taken out of D.
    rest = int(_value(m, "recoverable_idle_ns")) - named
    if rest > 0:
        dependency, unknown = _value(m, "idle_dependency_ns"), _value(m, "idle_unknown_ns")
        causes["dependency" if dependency >= unknown else "unknown"] = rest
    return causes


def _bubble(analysis: DeviceAnalysis, share: float, thresholds: Thresholds) -> Verdict:
    m = analysis.measures
    words = dict(_CAUSE_WORDS)
    causes = bubble_causes(m)
    if analysis.trace.os_calls is None:
        words["host-work"] = "outside CUDA"
    elif _value(m, "idle_peer_work_ns") >= causes["host-work"] / 2 > 0:
        words["host-work"] = "waiting for another thread or process that works"
    demand = max(_value(m, "demand_ns"), 1)
    ordered = sorted(causes, key=lambda c: (-causes[c], c))
    cause = ordered[0]
    if _value(m, "blocked_copy_idle_ns") >= causes["sync"] / 2 > 0:
        words["sync"] = "held back by asynchronous copy calls that do not return"
    # What nothing explains is idle time, but not proven to be the host's.
    known = cause not in ("dependency", "unknown")
    who = "waits for the host" if known else "is idle"
    during = f"while the launching thread is {words[cause]}" if known else words[cause]
    sentence = f"The GPU {who} for {_pct(share)} of {_the_time(m)}, mostly {during}"
    confidence = SURE if known else LOW
    second = ordered[1]
    if causes[cause] - causes[second] < thresholds.close_call * demand:
        confidence = min(confidence, 0.6)
        sentence += f" ({_pct(causes[cause] / demand)}) or {words[second]} ({_pct(causes[second] / demand)})"
    else:
        sentence += f" ({_pct(causes[cause] / demand)})"
    sentence += "."
    if cause == "host-work" and _value(m, "unproven_host_work_ratio") >= 0.5:
        # No system call was recorded: a server without requests looks the same.
        confidence = min(confidence, 0.6)
        sentence += (
            " Most of it are gaps of 10 ms and more, and whether the host worked in them or waited (for requests, for "
            "another process) was not recorded."
        )
        if _value(m, "idle_before_new_kernel_ns") >= _value(m, "idle_host_loop_ns") / 2:
            sentence += " Most of it ends with the first launch of a kernel: compiling or loading it is a candidate."
    elif (cause == "host-work" or words[cause] == _CAUSE_WORDS["sync"]) and analysis.trace.os_calls is None:
        # A lock, a peer, or no CPU look the same from here.
        confidence = min(confidence, FAIR)
        sentence += " System calls were not recorded: part of it may be waits in them."
    elif cause == "lock" and _value(m, "lock_peer_working_ratio") < 0.5:
        confidence = min(confidence, 0.6)
        sentence += (
            " No other thread of the process was seen to work for half of that: it may have waited for work to be handed over, or "
            "for requests."
        )
    return Verdict("scheduling-bubble", cause, None, "C", confidence, sentence)


def _busy(analysis: DeviceAnalysis, thresholds: Thresholds) -> Verdict:
    """The GPU is busy: held-down clocks come first, then what its counters (rank A) say; else the limiter is unknown."""
    m = analysis.measures
    busy = _value(m, "busy_ratio")
    if analysis.unexplained_excluded:
        busy = _value(m, "busy_ns") / max(_value(m, "demand_ns"), 1)
    confidence, doubts = _confidence(analysis)
    caution = " Caution: " + "; ".join(doubts) + "." if doubts else ""
    verdict = _throttled(m, thresholds) or _limiter(m, busy, thresholds) or counted_limiter(m, thresholds)
    if verdict is None:
        which = "no sample lies in compute time" if analysis.counters is not None else None
        the_time = _the_time(m) if analysis.unexplained_excluded else "the time"
        missing = f"{_counted_in_words(m, thresholds)}{collecting.counters(is_amd(analysis.trace))}."
        return Verdict(
            "gpu-busy",
            None,
            None,
            "C",
            round(confidence, 2),
            f"The GPU is busy {_pct(busy)} of {the_time}; what limits its kernels cannot be told from this trace.{caution}",
            why_not=f"GPU metrics are there but {which}: record longer." if which else missing,
        )
    verdict.confidence = round(min(verdict.confidence, confidence), 2)
    verdict.sentence += caution
    return verdict


_THROTTLE_WORDS = {
    "thermal": "because the GPU or its memory is too hot",
    "power": "because the board would draw more power than it may",
    "other": "for a reason that the driver does not name",
}


def _throttled(m: Measures, thresholds: Thresholds) -> Verdict | None:
    """Held-down clocks, from NVML: SM clock under load far below its maximum, with a reason for at least half of the load."""
    lost, load = m.value("sm_clock_lost_ratio"), m.value("gpu_load_ratio")
    if lost is None or not load or lost <= 1 - thresholds.throttle_clock:
        return None
    for cause, words in _THROTTLE_WORDS.items():
        if _value(m, f"clock_limited_{cause}_ratio") >= 0.5 * load:
            clock, top = m.value("sm_clock_load_mhz"), m.value("sm_clock_max_mhz")
            figures = f" ({clock:.0f} of {top:.0f} MHz under load)" if clock and top else ""
            sentence = f"The clocks are held down by {_pct(lost)}{figures}, {words}."
            return Verdict("throttled", cause, None, "C", FAIR if cause == "other" else SURE, sentence)
    return None


def _limiter(m: Measures, busy: float, thresholds: Thresholds) -> Verdict | None:
    """What limits the kernels of a busy GPU, by hardware counters: those of the trace, else GPM's; None without any."""
    c, dram = m.value("sm_throughput_ratio"), m.value("dram_ratio")
    what_is_c, when = "SM issue or tensor pipe", "while kernels run"
    if c is None or dram is None or not m.value("counter_sample_count"):
        c, dram = m.value("gpm_compute_ratio"), m.value("gpm_dram_ratio")
        # GPM does not count issue slots: the busiest pipe stands for them, and the measure's source names it.
        named = m.get("gpm_compute_ratio")
        pipe = named.source.removeprefix("largest pipe: ") if named is not None else "unknown"
        what_is_c, when = f"busiest pipe by GPM ({pipe})", "while the GPU is active"
    if c is None or dram is None:
        return None
    figures = f"{what_is_c} {_pct(c)}, DRAM {_pct(dram)} of peak {when}"
    high, low = max(c, dram), min(c, dram)
    confidence = SURE
    if high >= thresholds.limiter_clear and high - low >= thresholds.limiter_ahead:
        strong = high > thresholds.strong_high and low < thresholds.strong_low
        cls, what = ("compute-bound", "Arithmetic") if c >= dram else ("bandwidth-bound", "Memory bandwidth")
        sentence = f"{what} limits the kernels: {figures}"
        confidence = SURE if strong else FAIR
    elif c < thresholds.latency_max and dram < thresholds.latency_max:
        cls = "latency-bound"
        sentence = f"Kernels run but use little of the GPU ({figures}): too little parallel work per kernel"
    else:
        cls = "balanced"
        sentence = f"The GPU is busy {_pct(busy)} of the time and no single resource limits it: {figures}"
    return Verdict(cls, None, None, "A", confidence, f"{sentence}.")


def counted_limiter(m: Measures, thresholds: Thresholds) -> Verdict | None:
    """What limits the kernels by counted work (rank B); None where the answer depends on what was not counted.

    Counted bytes are the least that must move and counted FLOP may include skipped work, so a class is named only where
    it holds with everything unknown counted against it. Nothing here can show that kernels wait for latency.
    """
    covered = m.value("work_covered_ratio")
    low = {"compute": m.value("work_compute_min_ratio"), "dram": m.value("work_dram_min_ratio")}
    compute, dram = low["compute"], low["dram"]
    if covered is None or covered < thresholds.work_covered or compute is None or dram is None:
        return None
    of_covered = {what: _value(m, f"work_{what}_covered_ratio") for what in low}
    if of_covered["compute"] > 1:
        return None
    ahead = {
        "compute": compute - _value(m, "work_dram_max_ratio"),
        "dram": dram - _value(m, "work_compute_max_ratio"),
    }
    figures = (
        f"counted from shapes, kernels reach at least {_pct(of_covered['compute'])} of the arithmetic peak and "
        f"{_pct(of_covered['dram'])} of the DRAM bandwidth in the {_pct(covered)} of kernel time that could be counted"
    )
    for what, cls, words in (
        ("compute", "compute-bound", "Arithmetic limits the kernels"),
        ("dram", "bandwidth-bound", "Memory bandwidth limits the kernels"),
    ):
        if of_covered[what] >= thresholds.limiter_clear and ahead[what] >= thresholds.limiter_ahead:
            confidence = FAIR if of_covered[what] <= thresholds.strong_high else SURE - 0.1
            return Verdict(cls, None, None, "B", confidence, f"{words}: {figures}.")
    if min(compute, dram) >= thresholds.latency_max:
        return Verdict("balanced", None, None, "B", FAIR, f"No single resource limits the kernels: {figures}.")
    return None


def _counted_in_words(m: Measures, thresholds: Thresholds) -> str:
    """What counted work says where it names no limiter, as the start of a sentence; empty where there is none."""
    covered = m.get("work_covered_ratio")
    if covered is None or not covered.value:
        asked = covered is not None and "record_shapes" in covered.source
        return f"{covered.source}; " if covered is not None and asked else ""
    compute, dram = m.get("work_compute_covered_ratio"), m.value("work_dram_covered_ratio")
    if compute is None or compute.value is None or dram is None:
        return f"work was counted from shapes, but {compute.source if compute else 'no peak is known'}; "
    if compute.value > 1:
        return (
            f"work counted from shapes exceeds what this device can compute {compute.value:.2f} times, so shapes or device are "
            "not what they seem; "
        )
    if covered.value < thresholds.work_covered:
        return f"work could be counted for {_pct(covered.value)} of kernel time only ({covered.source}); "
    return (
        f"counted from shapes, kernels reach at least {_pct(compute.value)} of the arithmetic peak and {_pct(dram)} of the "
        f"DRAM bandwidth in {_pct(covered.value)} of kernel time: no clear limit; "
    )


def _confidence(analysis: DeviceAnalysis) -> tuple[float, list[str]]:
    """Confidence that the data allows, with what lowers it in words."""
    m = analysis.measures
    confidence, doubts = SURE, []
    if analysis.unexplained_excluded:
        confidence = LOW
        doubts.append(f"{_pct(_value(m, 'unexplained_ratio'))} of the window is idle time that nothing explains")
    unlaunched = m.value("unlaunched_kernel_ratio")
    if unlaunched is not None and unlaunched > 0.5:
        confidence = min(confidence, FAIR)
    return confidence, doubts


def doubt_recording(verdict: Verdict, m: Measures, thresholds: Thresholds) -> None:
    """Say of a bubble that the profiler may have made it, where it slowed the program or worked in the window; in place."""
    if verdict.cls != "scheduling-bubble":
        return
    slower, own = m.value("capture_slowdown_ratio"), _value(m, "profiler_ratio")
    if slower is not None and slower >= thresholds.capture_slows:
        verdict.confidence = min(verdict.confidence, LOW)
        verdict.sentence += f" It may be made by the profiler: the program ran {slower:.2f} times slower while it was recorded than without."
    elif slower is None and own >= thresholds.profiler_works:
        verdict.confidence = min(verdict.confidence, 0.6)
        verdict.sentence += (
            f" Part of it may be made by the profiler, which worked for {_pct(own)} of the window; how much it slowed the "
            "program is not known."
        )


def problems_of(analysis: DeviceAnalysis, tool: str) -> list[Problem]:
    """What the reader of this device's figures must know."""
    m, out = analysis.measures, []
    if analysis.unexplained_excluded:
        out.append(
            Problem(
                "operations-missing",
                f"The trace seems to lack operations: {_pct(_value(m, 'unexplained_ratio'))} of the window is idle and "
                "nothing recorded explains it. It is left out of the shares.",
            )
        )
    if analysis.counters is not None and analysis.counters.shared_gpu:
        out.append(
            Problem(
                "shared-gpu",
                "The hardware counters are busy while this trace shows the GPU idle: another process uses it, so idle "
                "time here is not proven idle.",
            )
        )
    skewed = m.value("negative_delay_count")
    if skewed:
        out.append(
            Problem(
                "clock-skew",
                f"{skewed} kernels seem to start before their launch call, by up to {_value(m, 'clock_skew_ns') / 1000:.1f} µs "
                "(95th percentile): host and GPU clocks are matched no better, so launch delays are precise to that only.",
                int(skewed),
            )
        )
    if m.value("idle_ns") and m.value("launch_count") is None:
        out.append(
            Problem(
                "no-cuda-calls",
                f"CUDA calls were not collected: idle time has no cause. {collecting.advice(tool).calls}.",
            )
        )
    return out


def _unusable(code: str, sentence: str, why_not: str) -> Verdict:
    return Verdict("unusable", None, code, "C", SURE, sentence, why_not=why_not[0].upper() + why_not[1:])


def _value(m: Measures, name: str) -> float:
    """A measure as a number, 0 where it is not known: for comparisons with a threshold only."""
    return float(m.value(name) or 0)


def _the_time(m: Measures) -> str:
    """What shares of D are shares of: all the time of the window, or what is left of it and why."""
    window = _value(m, "window_ns")
    left_out = window - _value(m, "demand_ns")
    if left_out <= _NEARLY_ALL * window:
        return "the time"
    nothing_to_do = (_value(m, "no_demand_ratio") + _value(m, "profiler_ratio")) * window
    unexplained = left_out - nothing_to_do > _NEARLY_ALL * window
    return "the time that the trace explains" if unexplained else "the time with demand"


def _pct(share: float) -> str:
    return f"{100 * share:.1f} %"
