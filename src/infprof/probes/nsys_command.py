"""Calling nsys: which options this one has (by its own help), the command lines, and calls with a time limit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from infprof.errors import UsageError
from infprof.probes.nsys_messages import Note

_HELP_LIMIT_S = 20.0
_HEADING = re.compile(r"^\s+(\(Deprecated\) )?(?:(-\w), )?(--[a-z][\w-]*)", re.M)
_THROWN = re.compile(r"Dynamic exception type|std::exception::what|disk is full")
_OURS_ALONE = ("--output", "--session", "--session-new")


@dataclass(frozen=True)
class CapturePlan:
    """What to record and where to.

    ``folder`` exists and may be written to. ``whole``: from the program's first instruction; else when ``start()`` is
    called. ``trigger``: what opens and closes the capture once it is armed: the session itself, cudaProfilerStart/Stop
    in the program, or the NVTX range ``nvtx_range`` ("name@domain", "name@*"); each range gives a report of its own.
    ``graph_trace`` "node" shows the kernels inside CUDA graphs and costs more than "graph". ``gpu_metrics`` and
    ``sampling`` (CPU samples and context switches) are wishes. ``extra_args`` are options for nsys that win over ours.
    """

    folder: Path
    whole: bool = True
    trigger: Literal["session", "cuda-profiler-api", "nvtx"] = "session"
    nvtx_range: str | None = None
    graph_trace: Literal["node", "graph"] = "node"
    gpu_metrics: bool = True
    sampling: bool = False
    extra_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.trigger == "nvtx") != (self.nvtx_range is not None):
            raise UsageError("An NVTX range goes with the nvtx trigger: give both or neither.")


class Answer(NamedTuple):
    """How a call ended; code None = it ran into its time limit and was killed."""

    code: int | None
    text: str


def call(arguments: Sequence[str | Path], timeout_s: float, environ: Mapping[str, str]) -> Answer:
    """Run nsys to its end or to the time limit. Its output goes to a file: an agent would hold a pipe open for ever."""
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                [str(part) for part in arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,
            )
        except OSError as error:
            return Answer(126, f"nsys cannot be started: {error.strerror}")
        code = _wait(process, timeout_s)
        output.seek(0)
        return Answer(code, output.read().decode(errors="replace"))


def export_sqlite(nsys: Path, report: Path, output: Path, timeout_s: float, environ: Mapping[str, str]) -> Answer:
    """Export a report as SQLite to ``output``, which ends in .sqlite: old versions append that to any other name."""
    arguments = ("--type=sqlite", "--force-overwrite=true", f"--output={output}", str(report))
    answer = call([nsys, "export", *arguments], timeout_s, environ)
    # Where the disk runs full, nsys throws, leaves an empty file, and ends with 0 (2022.4 and 2023.4).
    return Answer(1, answer.text) if answer.code == 0 and _THROWN.search(answer.text) else answer


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(max(timeout_s, 0.0))
    except BaseException as error:  # an interrupt, too, must not leave the call behind
        kill_group(process)
        if isinstance(error, subprocess.TimeoutExpired):
            return None
        raise


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads its own group, with the group, and collect its exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class NsysHelp:
    """The options that an nsys has, as its help says: they differ between versions."""

    def __init__(self, nsys: Path, environ: Mapping[str, str]) -> None:
        self._nsys, self._environ = nsys, environ
        self._sections: dict[str, dict[str, str]] = {}
        self._short: dict[tuple[str, str], str] = {}

    def sections(self, command: str) -> Mapping[str, str]:
        """Long option → its help text; options that the help calls deprecated are left out."""
        if command not in self._sections:
            text = call([self._nsys, command, "--help"], _HELP_LIMIT_S, self._environ).text
            headings = list(_HEADING.finditer(text))
            ends = [*(heading.start() for heading in headings), len(text)][1:]
            self._sections[command] = {
                heading[3]: text[heading.end() : end]
                for heading, end in zip(headings, ends, strict=True)
                if not heading[1]
            }
            self._short.update({(command, heading[2]): heading[3] for heading in headings if heading[2]})
        return self._sections[command]

    def has(self, command: str, option: str, value: str = "") -> bool:
        """Whether the command has the option, and its help mentions the value."""
        section = self.sections(command).get(option)
        return section is not None and value in section

    def spelled(self, command: str, *spellings: str) -> str | None:
        """The first of several spellings of an option that the command has."""
        return next((option for option in spellings if self.has(command, option)), None)

    def long_name(self, command: str, argument: str) -> str | None:
        """The long name of an option that the command has, given as "-t", "-tcuda", "--trace" or "--trace=cuda"."""
        sections = self.sections(command)
        if not argument.startswith("--"):
            return self._short.get((command, argument[:2]))
        name = argument.partition("=")[0]
        # "--nvtx-domain-[include|exclude]" stands for two options.
        known = name in sections or any(option.endswith("-") and name.startswith(option) for option in sections)
        return name if known else None


@dataclass
class CommandLines:
    """The options of ``nsys start`` and ``nsys launch`` for a plan; ``notes`` says what this nsys cannot do."""

    help: NsysHelp
    plan: CapturePlan
    gpu_metrics: bool
    sampling: bool
    notes: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._extra: dict[str, list[str]] = {"start": [], "launch": []}
        self._overridden: set[tuple[str, str]] = set()
        for group in _groups(self.plan.extra_args):
            self._route(group)

    def _route(self, group: list[str]) -> None:
        """Hand a user's option to the command that has it; one that neither has goes to start, which then says so."""
        for command in ("start", "launch"):
            name = self.help.long_name(command, group[0])
            if name in _OURS_ALONE:
                raise UsageError(f"infprof chooses nsys's {name} itself: leave it out.")
            if name is not None:
                self._extra[command] += group
                self._overridden.add((command, name))
                return
        self._extra["start"] += group

    def start(self, output: Path) -> list[str]:
        """Options for ``nsys start``, which says what the agent collects and where the report goes."""
        ours = [f"--output={str(output).replace('%', '%%')}", *self._host_sampling(), *self._gpu_metrics()]
        return self._with_extra("start", [*ours, *self._trigger()])

    def launch(self) -> list[str]:
        """Options for ``nsys launch``, which says what is traced inside the program."""
        ours = ["--trace=cuda,nvtx,osrt"]
        for option, value, why in (
            ("--cuda-graph-trace", self.plan.graph_trace, "kernels inside CUDA graphs may be hidden"),
            ("--cuda-memory-usage", "true", "GPU memory in use is not recorded"),
            ("--trace-fork-before-exec", "true", "worker processes that fork without exec are not recorded"),
        ):
            ours += self._if_known("launch", option, value, why)
        # The launch call then ends with the program, not with the last daemon that the program left behind.
        if self.help.has("launch", "--wait", "primary"):
            ours.append("--wait=primary")
        if self.plan.nvtx_range is not None:
            ours.append(f"--nvtx-capture={self.plan.nvtx_range}")
        return self._with_extra("launch", ours)

    def _host_sampling(self) -> list[str]:
        # Both always said: what is left out of them is switched on by nsys, and hangs 2022.4 on new kernels.
        value = "process-tree" if self.sampling else "none"
        return [f"{o}={value}" for o in ("--sample", "--cpuctxsw") if self.help.has("start", o)]

    def _gpu_metrics(self) -> list[str]:
        option = self.help.spelled("start", "--gpu-metrics-devices", "--gpu-metrics-device")
        if not self.gpu_metrics:
            return []
        if option is None:
            self._missing("start", "--gpu-metrics-devices", "GPU metrics are not recorded")
            return []
        return [f"{option}=all"]

    def _trigger(self) -> list[str]:
        if self.plan.trigger == "session":
            return []
        kind = "cudaProfilerApi" if self.plan.trigger == "cuda-profiler-api" else "nvtx"
        # Never a value that ends the program together with the first range.
        end = "repeat" if self.help.has("start", "--capture-range-end", "repeat") else "stop"
        return [f"--capture-range={kind}", f"--capture-range-end={end}"]

    def _if_known(self, command: str, option: str, value: str, why: str) -> list[str]:
        if self.help.has(command, option):
            return [f"{option}={value}"]
        self._missing(command, option, why)
        return []

    def _missing(self, command: str, option: str, why: str) -> None:
        note = Note("option-missing", f"This nsys has no `{command} {option}`: {why}.", "Install a newer nsys.")
        if note not in self.notes:
            self.notes.append(note)

    def _with_extra(self, command: str, ours: Iterable[str]) -> list[str]:
        kept = [argument for argument in ours if (command, argument.partition("=")[0]) not in self._overridden]
        return [*kept, *self._extra[command]]


def _groups(arguments: Iterable[str]) -> list[list[str]]:
    """Each option with the values that follow it. Raises UsageError where a value comes first."""
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("-"):
            groups.append([argument])
        elif groups:
            groups[-1].append(argument)
        else:
            raise UsageError(f"{argument} is no option of nsys: an option begins with a dash.")
    return groups
