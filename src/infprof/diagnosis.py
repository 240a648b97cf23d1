"""The library's one entry point: a trace in, a Diagnosis out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from infprof import __version__, collecting
from infprof.distinct import distinct_values
from infprof.durations import in_words
from infprof.errors import UsageError
from infprof.hardware.gpu_spec import GpuSpec
from infprof.measures import calls
from infprof.measures import intervals as iv
from infprof.measures import operations as op
from infprof.measures.attention import add_score_bytes
from infprof.measures.copies import copy_rows
from infprof.measures.coverage import coverage_problems
from infprof.measures.device import DeviceAnalysis, MeasureLimits, analyze_device, recoverable_ns
from infprof.measures.fitness import captured_launches, doubts, launches_without_records
from infprof.measures.host import HostLimits
from infprof.measures.host_calls import api_table
from infprof.measures.host_parts import add_peer_pauses
from infprof.measures.idle import IdleLimits, IdleModel
from infprof.measures.kernels import graphs_hide_kernels, kernel_table, unknown_kernels_problem
from infprof.measures.operations import Prepared
from infprof.measures.places import Places
from infprof.measures.ranges import nccl_table, range_table
from infprof.measures.slices import DeviceTime
from infprof.measures.timeline import timeline
from infprof.measures.window import Scope, SteadyPart, named_scope, parse_window, range_scope, span, steady_part
from infprof.readers import read
from infprof.resources import rules_dir
from infprof.results import (
    DeviceResult,
    Diagnosis,
    Finding,
    KernelRow,
    KernelTotals,
    Measure,
    Measures,
    NotEvaluated,
    Problem,
    Provenance,
    Verdict,
    Window,
    WorkRow,
)
from infprof.results import Scope as MeasureScope
from infprof.rules import RuleSet, Thresholds, evaluate, load
from infprof.stack import ENGINE_KEY, engine_of, fit_remedies
from infprof.steps.attention import add_attention_growth
from infprof.steps.differing import tell_differing_phases
from infprof.steps.finding import LaneSteps, find_steps
from infprof.steps.model_on_host import add_model_on_host
from infprof.steps.summary import Device as SteppedDevice
from infprof.steps.summary import Judge, Judged, StepReport, describe, why_no_steps
from infprof.trace import IntArray, Trace
from infprof.verdict import (
    LOW,
    TraceFacts,
    counted_limiter,
    device_verdict,
    doubt_recording,
    no_gpu_seen,
    problems_of,
    telemetry_verdict,
    trace_verdict,
)

if TYPE_CHECKING:
    from infprof.measures.capture import CaptureLimits, GraphOperators
    from infprof.measures.work import CountedWork
    from infprof.replay.whatif import WhatIf

MAX_KERNEL_ROWS = 1000
NEEDS_RUN = "telemetry of the same run: record with `infprof run`"
# A steady part of few operations must be this share of the trace to be one.
MIN_STEADY_SHARE = 0.1
# Nobody knows how much of a file was behind its cut.
CUT_SHORT_AT_MOST = 0.5


@dataclass(frozen=True)
class Options:
    """What to analyze. ``window`` is auto, full or A:B with units; ``range_name`` replaces it by an NVTX range."""

    window: str = "auto"
    range_name: str | None = None
    scenario: str | None = None
    rule_dirs: Sequence[Path] = field(default_factory=tuple)
    # A second trace, whose operators explain the kernels of replayed graphs.
    capture: Path | None = None
    # Whether to replay the trace with costs taken away.
    whatif: bool = True
    # The range that is a step (a name or a pattern), and whether to look for steps at all.
    step_range: str | None = None
    steps: bool = True
    # Peaks of the devices, for those that the table does not have or has wrong.
    gpu_spec: GpuSpec | None = None


def analyze_file(path: Path, options: Options | None = None) -> Diagnosis:
    """Read and diagnose one file. Raises InfprofError (nothing to analyse) or UsageError (options that do not fit)."""
    options = options or Options()
    return analyze(read(path), load([rules_dir(), *options.rule_dirs]), options)


def analyze_file_in_detail(path: Path, options: Options | None = None) -> Detailed:
    """As ``analyze_file``, with what the diagnosis was made of."""
    options = options or Options()
    return analyze_in_detail(read(path), load([rules_dir(), *options.rule_dirs]), options)


def analyze(trace: Trace, rules: RuleSet, options: Options | None = None) -> Diagnosis:
    """Diagnose a trace.

    An ``unusable`` verdict is a diagnosis too: slices are given wherever GPU operations exist. Raises UsageError where
    the window or range does not fit the trace.
    """
    return analyze_in_detail(trace, rules, options).diagnosis


def analyze_in_detail(trace: Trace, rules: RuleSet, options: Options | None = None) -> Detailed:
    """As ``analyze``, with what the diagnosis was made of."""
    options = options or Options()
    if options.range_name is None and options.window not in ("auto", "full"):
        # Wrong syntax is the user's error even where the trace is empty.
        parse_window(options.window)
    analysis = _Analysis(trace, rules, options)
    diagnosis = analysis.diagnosis()
    fit_remedies(diagnosis)
    diagnosis.scenario = options.scenario
    recorded = len(analysis.prepared.operations) > 0
    # Of a run that waits for requests no fix makes the time shorter.
    if options.whatif and recorded and diagnosis.verdict.cls not in ("unusable", "no-demand"):
        from infprof.replay.ranking import rank_findings
        from infprof.replay.setting import parse_setting
        from infprof.replay.whatif import REPORTED_OPERATIONS

        replayer = what_if(analysis.prepared, diagnosis, rules, REPORTED_OPERATIONS)
        result = replayer.chain()
        diagnosis.whatif = result.to_dict()
        rank_findings(diagnosis, rules, replayer, [parse_setting(text) for text in result.settings], options.scenario)
    return Detailed(diagnosis, analysis.prepared, analysis.times)


def what_if(prepared: Prepared, diagnosis: Diagnosis, rules: RuleSet, most: int | None = None) -> WhatIf:
    """Replays of a diagnosed trace; ``most``: of that many operations from the middle of its window.

    Raises InfprofError where nothing ran on a GPU.
    """
    from infprof.replay.whatif import WhatIf

    recorded = Measures([m for m in diagnosis.measures if m.scope.kind == "window"])

    def judge(trace: Trace, window: tuple[int, int], same_kernels: bool) -> Verdict:
        options = Options(window=f"{window[0]}ns:{window[1]}ns", whatif=False, steps=False, gpu_spec=prepared.gpu_spec)
        verdict = analyze(trace, rules, options).verdict
        if verdict.cls != "gpu-busy" or not same_kernels:
            return verdict
        # Which operator launched what is not known of times that nobody recorded; of the same kernels it was counted.
        return counted_limiter(recorded, rules.thresholds) or verdict

    window = diagnosis.window.start_ns, diagnosis.window.end_ns
    return WhatIf(prepared, window, judge) if most is None else WhatIf.of_the_middle(prepared, window, judge, most)


class Detailed(NamedTuple):
    """A diagnosis, the trace with its launches, and the time accounting of each device: for reports that draw them.

    Of a diagnosis that was stored there is no more than itself: ``prepared`` is None."""

    diagnosis: Diagnosis
    prepared: Prepared | None
    times: list[DeviceTime]


class _Analysis:
    """One run over one trace; the steps in order are in ``diagnosis``."""

    def __init__(self, trace: Trace, rules: RuleSet, options: Options) -> None:
        self.trace = trace
        self.rules = rules
        self.thresholds: Thresholds = rules.thresholds
        self.options = options
        self.prepared = Prepared(trace, options.gpu_spec)
        self.how = collecting.advice(trace.provenance.tool)
        self.times: list[DeviceTime] = []
        # (device, phase, measure)
        self.phase_work: list[tuple[int, str, Measure]] = []
        self.work_rows: list[WorkRow] = []
        self.step_report = StepReport()
        # The confidence that doubts about the trace leave, each.
        self.at_most: list[float] = []
        self.problems = list(trace.problems)
        for broken in rules.broken:
            self.problems.append(Problem("broken-rule", str(broken)))

    def diagnosis(self) -> Diagnosis:
        if not len(self.prepared.operations):
            if self.options.range_name is not None:
                raise UsageError("--range: no GPU operation was recorded, so no range can be projected to the GPU.")
            return self._empty()
        t = self.thresholds
        host_limits = HostLimits(t.first_launch_factor, t.startup_stall_ns, t.stdin_read_ns)
        first_look = IdleModel(self.prepared, IdleLimits(t.kernel_gap_ns, host_limits), None)
        steady = self._steady_part(first_look)
        scope = self._scope(steady)
        model = first_look.after_startup(steady.start_ns)
        limits = MeasureLimits(t.unexplained_max, t.small_kernel_ns, t.small_copy_bytes)
        # A device of which no operation had usable times says nothing.
        used = distinct_values(self.prepared.operations.device).tolist()
        devices = sorted(used, key=lambda d: self.trace.devices[d].id)
        analyses = [
            analyze_device(self.prepared, model, d, scope.intervals, limits, step_starts=self._step_starts(d))
            for d in devices
        ]
        self.times = [analysis.time for analysis in analyses]
        for analysis in analyses:
            self._add_telemetry(analysis)
            self._add_work(analysis)
        ids = [self.trace.devices[a.device].id for a in analyses]
        self.problems += add_peer_pauses([a.measures for a in analyses], ids)
        self._note_capture()
        unusable = self._unusable(steady, scope, analyses)
        verdicts = [unusable or device_verdict(a, self.thresholds) for a in analyses]
        if unusable is None:
            self._weigh(verdicts)
            for analysis, verdict in zip(analyses, verdicts, strict=True):
                doubt_recording(verdict, analysis.measures, t)
        focus = self._focus(analyses)
        if unusable is None and self.options.steps:
            self.step_report = self._phases_and_steps(model, limits, analyses, verdicts, focus, steady)
            for analysis, verdict in zip(analyses, verdicts, strict=True):
                number = self.trace.devices[analysis.device].id
                tell_differing_phases(verdict, self.step_report.phases, number, analysis.time.window_ns)
        for analysis in analyses if unusable is None else []:
            lanes = [lane for lane in self.lanes if lane.device == analysis.device]
            add_attention_growth(analysis.measures, self.prepared, lanes, analysis.time.scope)
            add_model_on_host(analysis.measures, self.prepared, lanes, analysis.time)
        self._note_problems(analyses, scope)
        if len(analyses) > 1 and len({(v.cls, v.cause) for v in verdicts}) > 1:
            verdicts[focus].sentence += self._other_devices(analyses, verdicts, focus)
        return self._assemble(scope, analyses, verdicts, focus, unusable)

    # --- what to look at -------------------------------------------------------------------------------------------

    def _steady_part(self, first_look: IdleModel) -> SteadyPart:
        steady = steady_part(self.prepared, first_look, self.thresholds.startup_stall_ns)
        low, _ = span(self.prepared)
        if steady.start_ns > low and self.options.window == "auto" and self.options.range_name is None:
            self._note_startup(first_look, iv.single(low, steady.start_ns))
        return steady

    def _note_startup(self, model: IdleModel, scope: iv.Intervals) -> None:
        """Say what loading and compiling cost in the part that is left out: users feel it in the first requests."""
        stalls, spent = 0, 0
        for device in range(len(self.trace.devices)):
            gaps = model.gaps(device, scope, shortest_ns=self.thresholds.startup_stall_ns)
            stalls += int(gaps.new_kernel.sum())
            spent += gaps.cause_ns("module-load")
        if stalls:
            self.problems.append(
                Problem(
                    "start-up-compiles",
                    f"Start-up loaded or compiled {stalls} kernel{'s' * (stalls != 1)} in {in_words(spent)} while "
                    "the GPU waited. Where that happens to users: send warm-up requests before traffic, extend the "
                    "warm-up, or keep a persistent compile cache. `--window full` shows it.",
                    stalls,
                )
            )

    def _scope(self, steady: SteadyPart) -> Scope:
        if self.options.range_name is not None:
            if self.options.window not in ("auto", "full"):
                raise UsageError("--range and --window A:B exclude each other: a range is a window already.")
            return range_scope(self.prepared, self.options.range_name)
        if self.options.window == "auto" and not self._enough_after(steady):
            # Nothing steady is left: show where the time of the whole went.
            low, high = span(self.prepared)
            return Scope(iv.single(low, high), "full (no steady part was found)", [])
        return named_scope(self.prepared, self.options.window, steady)

    def _add_telemetry(self, analysis: DeviceAnalysis) -> None:
        """What the probes saw in the window, joined to the device by what surely names it."""
        telemetry = self.trace.telemetry
        if telemetry is None:
            return
        from infprof.measures.demand import add_demand, ramp_problems
        from infprof.measures.gpu_telemetry import join_gpu
        from infprof.measures.telemetry import TelemetryScope, add_telemetry

        device = self.trace.devices[analysis.device]
        names = [d.name for d in self.trace.devices]
        gpu = join_gpu(telemetry, device.name, device.uuid, device.bus_id, names)
        low, high = int(analysis.time.scope.starts[0]), int(analysis.time.scope.ends[-1])
        if self.trace.clock_start_unix_ns is None and self.trace.telemetry_window is not None:
            low, high = self.trace.telemetry_window
        else:
            add_demand(analysis.measures, telemetry, analysis.time)
            self.problems += ramp_problems(analysis.measures, telemetry, analysis.time)
        add_telemetry(analysis.measures, telemetry, TelemetryScope(low, high, gpu))
        if self.trace.telemetry_window is not None:
            from infprof.measures.recording_cost import add_recording_cost

            add_recording_cost(analysis.measures, telemetry, self.trace.telemetry_window)
        self._add_client_side(analysis.measures)

    def _add_work(self, analysis: DeviceAnalysis, of_phase: bool = False) -> None:
        """FLOP and bytes: counted from the shapes of operators, else as the serving engine counts them.

        ``of_phase``: for a part of the window, of which there is no table.
        """
        from infprof.measures.capture import add_capture, work_source
        from infprof.measures.work import (
            NO_OPERATORS,
            NO_SHAPES,
            PHASE_MEASURES,
            RoofLimits,
            add_advice,
            add_engine_work,
            add_work,
            scope_work,
            work_table,
        )
        from infprof.steps.scopes import phase_scopes

        device = self.trace.devices[analysis.device]
        match = self.prepared.peaks_of(analysis.device)
        work = None
        if self.counted is not None:
            work = scope_work(self.prepared, self.counted, analysis.rows, analysis.time.scope, match.peaks)
        why_none = NO_SHAPES if self.trace.operators is not None else NO_OPERATORS
        t = self.thresholds
        limits = RoofLimits(t.limiter_clear, t.latency_max, t.small_kernel_ns)
        add_capture(analysis.measures, self.prepared, analysis.rows, self.graph_operators)
        source = work_source(self.graph_operators)
        add_work(analysis.measures, work, match, limits, why_none, source)
        why_no_peak = f"peak unknown: {match.reason}" if match.reason else "no kernel time in the window"
        add_advice(analysis.measures, work, limits, why_none if work is None else why_no_peak)
        add_score_bytes(analysis.measures, self.prepared, analysis.rows, self.counted, match)
        if self.counted is not None and not of_phase:
            lanes = [lane for lane in self.lanes if lane.device == analysis.device]
            for phase, (rows, steps) in phase_scopes(self.prepared, lanes, analysis.rows, analysis.time.scope).items():
                found = Measures()
                done = scope_work(self.prepared, self.counted, rows, steps, match.peaks)
                add_work(found, done, match, limits, why_none, source)
                self.phase_work += [(analysis.device, phase, m) for m in found if m.name in PHASE_MEASURES]
        add_engine_work(analysis.measures, match.peaks)
        if not of_phase:
            self.work_rows += work_table(work, device.id, self.thresholds.limiter_clear)

    @cached_property
    def counted(self) -> CountedWork | None:
        from infprof.measures.capture import replayed_work
        from infprof.measures.work import count_work

        replayed = [] if self.graph_operators is None else replayed_work(self.graph_operators)
        return count_work(self.prepared, replayed)

    @cached_property
    def graph_operators(self) -> GraphOperators | None:
        """Operators of the kernels of replayed graphs. Raises UsageError where --capture names what cannot tell any."""
        from infprof.measures.capture import graph_operators

        capture = None if self.options.capture is None else Prepared(read(self.options.capture))
        return graph_operators(self.prepared, capture, self._capture_limits)

    @cached_property
    def _capture_limits(self) -> CaptureLimits:
        from infprof.measures.capture import CaptureLimits

        return CaptureLimits(self.thresholds.capture_matched, self.thresholds.capture_same_names)

    def _note_capture(self) -> None:
        from infprof.measures.capture import capture_problems

        given = None if self.options.capture is None else self.options.capture.name
        self.problems += capture_problems(self.graph_operators, given, self._capture_limits)

    @cached_property
    def lanes(self) -> list[LaneSteps]:
        """The steps of each process on each device. Raises UsageError where --step-range names no range."""
        return find_steps(self.prepared, self.options.step_range) if self.options.steps else []

    def _step_starts(self, device: int) -> IntArray:
        """When the steps of a device begin, those of all its processes in order."""
        return np.sort(
            np.concatenate(
                [np.empty(0, np.int64), *(lane.start[lane.is_step] for lane in self.lanes if lane.device == device)]
            )
        )

    def _phases_and_steps(
        self,
        model: IdleModel,
        limits: MeasureLimits,
        analyses: list[DeviceAnalysis],
        verdicts: list[Verdict],
        focus: int,
        steady: SteadyPart,
    ) -> StepReport:
        devices = [
            SteppedDevice(analysis.time, verdict, self._judge_of(model, limits))
            for analysis, verdict in zip(analyses, verdicts, strict=True)
        ]
        # Only where start-up was left out is what came before something else than the window.
        left_out = int(analyses[0].time.scope.starts[0]) >= steady.start_ns and self.options.window == "auto"
        steady_ns = steady.start_ns if left_out and self.options.range_name is None else None
        report = describe(self.prepared, model, self.lanes, devices, focus, steady_ns)
        why = why_no_steps(self.lanes)
        if why is not None:
            self.problems.append(Problem("no-steps", why))
        return report

    def _judge_of(self, model: IdleModel, limits: MeasureLimits) -> Judge:
        t = self.thresholds

        def judge(spent: DeviceTime) -> Judged | None:
            analysis = analyze_device(
                self.prepared, model, spent.device, spent.scope, limits, spent, self._step_starts(spent.device)
            )
            ops = self.prepared.operations
            too_few = int(analysis.rows.sum()) < t.too_short_ops
            if spent.window_ns < t.too_short_span_ns or (
                too_few and int((ops.end - ops.start)[analysis.rows].sum()) < t.too_short_op_ns
            ):
                return None
            own = Measures(list(analysis.measures))
            self._add_telemetry(analysis)
            self._add_work(analysis, of_phase=True)
            verdict = device_verdict(analysis, t)
            verdict.confidence = min([verdict.confidence, *self.at_most])
            return Judged(verdict, own)

        return judge

    def _add_client_side(self, measures: Measures) -> None:
        if self.trace.load is not None:
            from infprof.measures.serving_telemetry import add_client_latencies

            add_client_latencies(measures, self.trace.load)

    def _enough_after(self, steady: SteadyPart) -> bool:
        """Whether the steady part holds enough work to be judged."""
        ops = self.prepared.operations
        if steady.end_ns <= steady.start_ns:
            return False
        mine = (ops.start >= steady.start_ns) & (ops.start < steady.end_ns)
        spent = int((ops.end - ops.start)[mine].sum())
        t = self.thresholds
        if int(mine.sum()) >= t.too_short_ops:
            return True
        # A few long operations are enough by themselves, but not as the last moments of a start-up.
        low, high = span(self.prepared)
        return spent >= t.too_short_op_ns and steady.end_ns - steady.start_ns >= MIN_STEADY_SHARE * (high - low)

    def _unusable(self, steady: SteadyPart, scope: Scope, analyses: list[DeviceAnalysis]) -> Verdict | None:
        ops = self.prepared.operations
        low, high = span(self.prepared)
        dropped_start_up = steady.start_ns > low
        auto = self.options.window == "auto" and self.options.range_name is None
        kernels, graphs, copies = (int((ops.kind == kind).sum()) for kind in (op.KERNEL, op.GRAPH, op.COPY))
        launches, graph_launches, silent = self._launch_calls()
        idle = max(float(a.measures.value("idle_ratio") or 0) for a in analyses)
        claims_idle = any(
            (a.measures.value("recoverable_idle_ratio") or 0) >= self.thresholds.recoverable_idle for a in analyses
        )
        facts = TraceFacts(
            operations=len(ops),
            kernels=kernels,
            graphs=graphs,
            copies=copies,
            operation_ns=int((ops.end - ops.start).sum()),
            span_ns=high - low,
            dropped=self.trace.dropped_operations,
            lost=self._lost_launches[0],
            captured=captured_launches(self.prepared),
            launches=launches,
            graph_launches=graph_launches,
            # Where the GPU shows no idle time worth a claim, unseen graphs change nothing.
            silent_graph_launches=silent if claims_idle else 0,
            only_startup=auto and dropped_start_up and not self._enough_after(steady),
            idle_ratio=idle,
            accelerator_events=self.trace.accelerator_events,
            tool=self.trace.provenance.tool,
            cut=self._is_cut,
        )
        if silent:
            self.problems.append(
                Problem(
                    "graphs-not-recorded",
                    f"{silent} of {graph_launches} CUDA-graph launches have no record of what ran on the GPU: {self.how.graph_nodes}.",
                    silent,
                )
            )
        return trace_verdict(facts, self.thresholds, self.trace.diagnostics)

    def _weigh(self, verdicts: list[Verdict]) -> None:
        """Lower the confidence of what was concluded from a trace that is less than fit, and say why."""
        for doubt in doubts(self.prepared, *self._lost_launches):
            self.problems.append(doubt.problem)
            self.at_most.append(doubt.at_most)
        if self._is_cut:
            self.at_most.append(CUT_SHORT_AT_MOST)
        for verdict in verdicts:
            verdict.confidence = min([verdict.confidence, *self.at_most])

    @property
    def _is_cut(self) -> bool:
        """Whether the reader found the end of the file, or of a table, missing."""
        return any(p.code in ("cut-short", "damaged-table") for p in self.trace.problems)

    @cached_property
    def _lost_launches(self) -> tuple[int, int]:
        return launches_without_records(self.prepared)

    def _launch_calls(self) -> tuple[int, int, int]:
        """Kernel or graph launch calls, graph launch calls, and graph launches without anything on the GPU."""
        table = self.trace.api_calls
        if table is None or not len(table) or self.prepared.thread_calls is None:
            return 0, 0, 0
        strings, nested = self.trace.strings, self.prepared.thread_calls
        # By name first: most traces launch no graph.
        is_launch, is_graph = calls.kernel_launchers(strings), calls.graph_launchers(strings)
        launches = np.flatnonzero((is_launch | is_graph).take(table["name"]))
        launches = launches[nested.outer[launches] == launches]
        graphs = launches[is_graph[table["name"][launches]]] if is_graph.any() else launches[:0]
        count = int(is_launch[table["name"][launches]].sum())
        if not len(graphs):
            return count, 0, 0
        served = self.prepared.first_operations >= 0
        # A runtime graph launch may own its kernels through the driver call inside it.
        served[nested.outer[np.flatnonzero(served)]] = True
        silent = ~served[graphs] & (table["return_value"][graphs] <= 0)
        return count, len(graphs), int(silent.sum())

    def _focus(self, analyses: list[DeviceAnalysis]) -> int:
        """The device with the largest recoverable time, whose class is the trace's."""
        return max(
            range(len(analyses)),
            key=lambda i: (
                recoverable_ns(analyses[i].measures),
                -self.trace.devices[analyses[i].device].id,
            ),
        )

    def _other_devices(self, analyses: list[DeviceAnalysis], verdicts: list[Verdict], focus: int) -> str:
        ids = [self.trace.devices[a.device].id for a in analyses]
        others = [
            f"device {ids[i]} is {v.cls}" for i, v in enumerate(verdicts) if i != focus and v.cls != verdicts[focus].cls
        ]
        text = f" This is device {ids[focus]}"
        return text + ("; " + ", ".join(others) + "." if others else "; the others differ in cause only.")

    # --- putting it together ---------------------------------------------------------------------------------------

    def _assemble(
        self,
        scope: Scope,
        analyses: list[DeviceAnalysis],
        verdicts: list[Verdict],
        focus: int,
        unusable: Verdict | None,
    ) -> Diagnosis:
        tables = {a.device: kernel_table(self.prepared, a.rows, a.device) for a in analyses}
        findings, not_evaluated = [], []
        verdict = verdicts[focus]
        short = unusable is None and self._is_short(verdicts)
        fired: list[str] = []
        if unusable is None:
            context = _Context(self.prepared, analyses[focus], tables[analyses[focus].device], self.thresholds)
            evaluation = evaluate(self.rules, context, self.options.scenario)
            fired = [finding.rule for finding in evaluation.findings]
        if unusable is None and not short:
            findings, not_evaluated = evaluation.findings, evaluation.not_evaluated
        elif self.trace.telemetry is not None:
            findings, not_evaluated = self._from_telemetry_alone(self._telemetry_alone())
        else:
            not_evaluated = [
                NotEvaluated(r.id, "a longer trace" if short else "a trace that can be judged")
                for r in self.rules.rules
                if not r.states
            ]
        for one in {id(v): v for v in verdicts}.values():
            stating = self.rules.stating(one.cls, one.cause, fired)
            if stating is not None:
                one.rule, one.remedies = stating.id, list(stating.remedies)
        single = len(analyses) == 1
        measures: list[Measure] = []
        for analysis in analyses:
            place = MeasureScope() if single else MeasureScope("device", str(self.trace.devices[analysis.device].id))
            measures += [Measure(m.name, m.value, m.unit, m.rank, m.source, place) for m in analysis.measures]
        for number, phase, m in self.phase_work:
            name = phase if single else f"{phase}, GPU {self.trace.devices[number].id}"
            measures.append(Measure(m.name, m.value, m.unit, m.rank, m.source, MeasureScope("phase", name)))
        measures += self.step_report.measures
        window = Window(
            int(scope.intervals.starts[0]),
            int(scope.intervals.ends[-1]),
            scope.how,
            scope.left_out,
            covered_ns=scope.intervals.total() if scope.intervals.count > 1 else None,
        )
        return Diagnosis(
            verdict=verdict,
            window=window,
            devices=[self._device_result(a, v) for a, v in zip(analyses, verdicts, strict=True)],
            findings=findings,
            measures=measures,
            not_evaluated=self._reasons(not_evaluated, analyses[focus].measures),
            problems=self._unique_problems(),
            provenance=self._provenance(),
            phases=self.step_report.phases,
            steps=self.step_report.steps,
            kernel_table=_largest([row for a in analyses for row in tables[a.device]]),
            work_table=self.work_rows,
            range_table=range_table(self.prepared, scope.intervals),
            nccl_table=nccl_table(self.prepared, scope.intervals),
            api_table=api_table(self.prepared, scope.intervals),
            timeline=timeline(self.trace, analyses),
            has_telemetry=self.trace.telemetry is not None,
        )

    def _reasons(self, rows: list[NotEvaluated], measures: Measures) -> list[NotEvaluated]:
        """Why rules over telemetry could not be judged: that there is none, or what the probe itself said."""
        over_samples = {rule.id: rule for rule in self.rules.rules if "samples" in rule.needs}
        out = []
        for row in rows:
            rule = over_samples.get(row.rule)
            if rule is not None and self.trace.telemetry is None:
                row = NotEvaluated(row.rule, NEEDS_RUN)
            elif rule is not None:
                absent = [m for m in map(measures.get, rule.when.names) if m is not None and m.value is None]
                row = NotEvaluated(row.rule, f"telemetry ({absent[0].source})") if absent else row
            else:
                row = self._with_source(row, measures)
            out.append(row)
        return out

    def _with_source(self, row: NotEvaluated, measures: Measures) -> NotEvaluated:
        """The same with what the measures that are missing say of themselves, where they say something."""
        names, _, rest = row.needs.partition(" (from ")
        absent = [measures.get(name) for name in names.split(", ")] if rest else []
        reasons = dict.fromkeys(m.source for m in absent if m is not None and m.source != "timeline")
        return NotEvaluated(row.rule, f"{names} ({'; '.join(reasons)})") if reasons else row

    def _is_short(self, verdicts: list[Verdict]) -> bool:
        """Whether so little was recorded that a class is a guess and findings would promise too much; says so."""
        low, high = span(self.prepared)
        if high - low >= self.thresholds.short_span_ns:
            return False
        text = f"The capture is too short to generalise: {(high - low) / 1e6:.3g} ms, perhaps one step. Findings are withheld."
        self.problems.append(Problem("too-short", text))
        for verdict in verdicts:
            verdict.confidence = min(verdict.confidence, LOW)
        return True

    def _device_result(self, analysis: DeviceAnalysis, verdict: Verdict) -> DeviceResult:
        device = self.trace.devices[analysis.device]
        ops = self.prepared.operations
        kernels = analysis.rows & (ops.kind == op.KERNEL)
        table = self.trace.kernels
        names = table["name"][ops.row[kernels]] if table is not None else np.empty(0, dtype=np.int64)
        pids = [self.trace.processes[p].pid for p in analysis.processes.tolist() if p >= 0]
        return DeviceResult(
            id=device.id,
            name=device.name,
            process_ids=sorted(p for p in pids if p is not None),
            verdict=verdict,
            kernels=KernelTotals(
                int(kernels.sum()), int((ops.end - ops.start)[kernels].sum()), len(distinct_values(names))
            ),
            copies=copy_rows(analysis.copies, analysis.rows & (ops.kind == op.MEMSET)),
            slices=analysis.time.slices(),
        )

    def _empty(self) -> Diagnosis:
        """No GPU operation at all: no device, and a verdict that says so, or that telemetry allows."""
        launches, graph_launches, silent = self._launch_calls()
        facts = TraceFacts(
            dropped=self.trace.dropped_operations,
            launches=launches,
            graph_launches=graph_launches,
            silent_graph_launches=silent,
            accelerator_events=self.trace.accelerator_events,
            tool=self.trace.provenance.tool,
            cut=self._is_cut,
        )
        verdict = trace_verdict(facts, self.thresholds, [(s, redact(x)) for s, x in self.trace.diagnostics])
        assert verdict is not None, "a trace without GPU operations is unusable"
        window = Window(0, 0, "none: no GPU operation was recorded")
        measures = Measures()
        without_gpu = False
        findings: list[Finding] = []
        not_evaluated = [NotEvaluated(r.id, "GPU operations") for r in self.rules.rules if not r.states]
        if self.trace.telemetry is not None:
            measures = self._telemetry_alone()
            captured = not any(p.code in ("no-capture", "never-ready") for p in self.trace.problems)
            alone = self.trace.provenance.tool == "infprof"
            without_gpu = not (self.trace.machine_gpus or self.trace.devices or self.trace.telemetry.facts("gpu_name"))
            if without_gpu and verdict.code == "no-gpu-work":
                verdict = no_gpu_seen()
            verdict = telemetry_verdict(measures, self.thresholds, alone, captured) or verdict
            findings, not_evaluated = self._from_telemetry_alone(measures)
            low, high = self.trace.telemetry_window or (0, 0)
            window = Window(low, high, "the capture, by telemetry")
        stating = self.rules.stating(verdict.cls, verdict.cause)
        # Who chose to record no timeline need not be told how to record one.
        chosen = verdict.cls == "unusable" and self.trace.provenance.tool == "infprof"
        if stating is not None and not (chosen or (without_gpu and verdict.code == "no-gpu-work")):
            verdict.rule, verdict.remedies = stating.id, list(stating.remedies)
        self._note_problems([], None)
        return Diagnosis(
            verdict=verdict,
            window=window,
            devices=[],
            findings=findings,
            measures=list(measures),
            not_evaluated=self._reasons(not_evaluated, measures),
            problems=self._unique_problems(),
            provenance=self._provenance(),
            has_telemetry=self.trace.telemetry is not None,
        )

    def _telemetry_alone(self) -> Measures:
        """What the probes saw in the capture, without any timeline."""
        from infprof.measures.gpu_telemetry import target_gpus
        from infprof.measures.telemetry import TelemetryScope, add_telemetry

        telemetry, measures = self.trace.telemetry, Measures()
        assert telemetry is not None and self.trace.telemetry_window is not None
        low, high = self.trace.telemetry_window
        gpus = target_gpus(telemetry)
        if len(gpus) > 1:
            name = telemetry.facts("gpu_name").get(gpus[0], "GPU")
            index = telemetry.facts("gpu_index").get(gpus[0])
            self.problems.append(
                Problem(
                    "one-of-several-gpus",
                    f"{len(gpus)} GPUs were watched; figures are those of number {index} ({name}).",
                    len(gpus),
                )
            )
        add_telemetry(measures, telemetry, TelemetryScope(low, high, gpus[0] if gpus else None))
        self._add_client_side(measures)
        return measures

    def _from_telemetry_alone(self, measures: Measures) -> tuple[list[Finding], list[NotEvaluated]]:
        low, high = self.trace.telemetry_window or (0, 0)
        evaluation = evaluate(self.rules, _TelemetryContext(measures, max(high - low, 0)), self.options.scenario)
        over_samples = {rule.id for rule in self.rules.rules if "samples" in rule.needs}
        rest = [
            row if row.rule in over_samples else NotEvaluated(row.rule, "GPU operations")
            for row in evaluation.not_evaluated
        ]
        return evaluation.findings, rest

    def _note_problems(self, analyses: list[DeviceAnalysis], scope: Scope | None) -> None:
        for analysis in analyses:
            self.problems += problems_of(analysis, self.trace.provenance.tool)
        trace, prepared = self.trace, self.prepared
        unknown = {a.device: a.measures.value("kernel_class_unknown_ratio") or 0.0 for a in analyses}
        least_known = max(analyses, key=lambda a: unknown[a.device], default=None)
        if least_known is not None and unknown[least_known.device] >= self.thresholds.unknown_kernels:
            share = unknown[least_known.device]
            self.problems.append(unknown_kernels_problem(prepared, least_known.rows, share))
        self.problems += coverage_problems(prepared)
        dropped, kept = trace.dropped_operations, len(prepared.operations)
        if dropped:
            self.problems.append(
                Problem(
                    "coverage",
                    f"Coverage is {100 * kept / (kept + dropped):.1f} %: {dropped} of {kept + dropped} GPU operations had no "
                    "usable times. Gaps that a missing operation may fill count as unknown.",
                    dropped,
                )
            )
        # Of a run without a timeline nobody expects any.
        if trace.ranges is None and trace.provenance.tool != "infprof":
            absent = "no annotations" if self.how.recorder != "nsys" else "no NVTX"
            self.problems.append(
                Problem(
                    "no-ranges", f"Ranges were not collected ({absent}): steps and phases are told by kernels alone."
                )
            )
        given = self.options.gpu_spec
        if given is not None and not any(given.applies_to(d.name) for d in trace.devices):
            names = ", ".join(sorted({d.name or "one without a name" for d in trace.devices})) or "none"
            self.problems.append(
                Problem("gpu-spec-unused", f"--gpu-spec is for {given.name}, and the GPUs here are: {names}.")
            )
        if analyses and any(graphs_hide_kernels(prepared, a.rows) for a in analyses):
            self.problems.append(
                Problem(
                    "graphs-traced-whole",
                    f"CUDA graphs were traced whole: they count as compute, kernel figures are not available. "
                    f"{self.how.graph_nodes[0].upper()}{self.how.graph_nodes[1:]}.",
                )
            )
        if trace.provenance.capture.get("some_api_calls_skipped"):
            self.problems.append(
                Problem(
                    "api-calls-skipped",
                    "nsys left out some CUDA calls (CUDA_SKIP_SOME_API_CALLS): the call table is not complete.",
                )
            )
        said: dict[str, int] = {}
        for severity, text in trace.diagnostics:
            if severity in ("warning", "error"):
                said[redact(text)] = said.get(redact(text), 0) + 1
        self.problems += [
            Problem("recorder", f"{self.how.recorder} says: {text}", count) for text, count in said.items()
        ]

    def _unique_problems(self) -> list[Problem]:
        """Each problem once: several devices share most of them."""
        return list({(p.code, p.message): p for p in self.problems}.values())

    def _provenance(self) -> Provenance:
        source = self.trace.provenance
        capture: dict[str, Any] = dict(source.capture)
        engine = engine_of(self.trace)
        if engine is not None:
            capture.setdefault(ENGINE_KEY, engine)
        matches = [self.prepared.peaks_of(i) for i in range(len(self.trace.devices))]
        given = self.options.gpu_spec
        if given is not None:
            capture["gpu_spec"] = given.text
        gpus = [
            {
                "id": d.id,
                "name": d.name,
                "sm_count": d.sm_count,
                "memory_bytes": d.memory_bytes,
                "compute_capability": ".".join(map(str, d.compute_capability)) if d.compute_capability else None,
                "peaks": match.peaks.sku if match.peaks is not None else f"unknown: {match.reason}",
            }
            for d, match in sorted(zip(self.trace.devices, matches, strict=True), key=lambda pair: pair[0].id)
        ]
        return Provenance(source.tool, source.tool_version, list(source.inputs), capture, gpus, __version__)


class _Context:
    """What the rules see: the focus device's measures and where things are."""

    def __init__(
        self, prepared: Prepared, analysis: DeviceAnalysis, table: list[KernelRow], thresholds: Thresholds
    ) -> None:
        self._places = Places(prepared, analysis, table, thresholds.small_kernel_ns, thresholds.small_copy_bytes)
        self.measures = analysis.measures
        self.window_ns = analysis.time.window_ns

    def where(self, selector: str, limit: int) -> list[Any]:
        return self._places.where(selector, limit)

    def kernels(self, selector: str, limit: int) -> list[KernelRow]:
        return self._places.kernels(selector, limit)


class _TelemetryContext:
    """What the rules see where there is no timeline: measures, and no places."""

    def __init__(self, measures: Measures, window_ns: int) -> None:
        self.measures = measures
        self.window_ns = window_ns

    def where(self, selector: str, limit: int) -> list[Any]:
        return []

    def kernels(self, selector: str, limit: int) -> list[KernelRow]:
        return []


def _largest(rows: list[KernelRow]) -> list[KernelRow]:
    return sorted(rows, key=lambda r: (-r.total_ns, r.device, r.name))[:MAX_KERNEL_ROWS]


def redact(text: str) -> str:
    """A recorder's message without paths, which name users and machines."""
    return re.sub(r"(?<![\w.])/(?:[\w.@+-]+/)*[\w.@+-]+", "<path>", text.strip())
