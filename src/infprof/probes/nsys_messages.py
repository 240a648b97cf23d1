"""What nsys says, put into one sentence and a remedy; and which files it says that it wrote.

The exit code of nsys says nothing about the report, so its words and the files themselves are what counts. The texts are
those of nsys 2022.4 and 2023.4, found by running them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LINES_SHOWN = 3


class Note(NamedTuple):
    """Something left out, guessed, or gone wrong: a code for programs, a sentence and a remedy (or None) for people."""

    code: str
    sentence: str
    remedy: str | None


class _Known(NamedTuple):
    pattern: str
    code: str
    sentence: str
    remedy: str | None


# The first that matches counts; {0} is the pattern's first group.
_FAILURES = (
    _Known(
        r"ERR_NVGPUCTRPERM|INSUFFICIENT_PRIVILEGES|[Ii]nsufficient privilege",
        "gpu-metrics-not-permitted",
        "The driver does not let this user read the GPU's hardware counters.",
        "Set NVreg_RestrictProfilingToAdminUsers=0 on the host, or give the container --cap-add=SYS_ADMIN.",
    ),
    _Known(
        r"(?i)(?:metrics|counters|profiling)[^\n]*(?:in use|busy|another (?:tool|process|profiler))",
        "gpu-metrics-in-use",
        "Another program holds the GPU's hardware counters.",
        "Pause it while recording; DCGM: dcgmi profmon --pause, afterwards dcgmi profmon --resume.",
    ),
    _Known(
        r"None of the installed GPUs are supported|NVIDIA GPUs not found",
        "gpu-metrics-no-gpu",
        "nsys finds no GPU here whose metrics it can sample.",
        "Record without GPU metrics.",
    ),
    _Known(
        r"(?i)no space left on device|disk is full|disk full",
        "disk-full",
        "The disk was full while nsys wrote.",
        "Free space, set TMPDIR to a larger disk, or record for a shorter time.",
    ),
    _Known(
        r"Failed to create '[^']*': File exists",
        "report-exists",
        "A report of that name was there already.",
        "Take another folder.",
    ),
    _Known(
        r"Permission denied",
        "folder-not-permitted",
        "nsys may not write into the folder of the report.",
        "Take a folder that this user may write to.",
    ),
    _Known(
        r"Executable not found|Program not found|No such file or directory",
        "program-not-found",
        "nsys did not find the program to start, or the folder to write to.",
        "Check both paths.",
    ),
    _Known(
        r"unrecogni[sz]ed option '?(-{1,2}[\w-]+)",
        "option-unknown",
        "This nsys has no option {0}.",
        "See `nsys start --help` and `nsys launch --help` for what it has.",
    ),
    _Known(
        r"Illegal (-{1,2}[\w-]+) argument",
        "option-value",
        "This nsys does not take the value given to {0}.",
        "See `nsys start --help` and `nsys launch --help` for the values it takes.",
    ),
    _Known(
        r"(?i)importer[^\n]*(?:not found|could not|cannot|failed)",
        "importer-missing",
        "nsys recorded, but the program that makes the report (QdstrmImporter) is missing or failed.",
        "Install the host part of Nsight Systems beside its target part.",
    ),
    _Known(
        r"Connection to (?:the )?Agent lost",
        "agent-lost",
        "nsys lost its recording process (killed, perhaps for memory); what it had recorded is gone.",
        "Record for a shorter time.",
    ),
    _Known(
        r"Section Table Reference magic number mismatch|Cannot read from stream",
        "report-broken",
        "The report is cut off, or is no report.",
        "Record again, and let nsys finish writing.",
    ),
    _Known(r"File not found", "report-missing", "The report is not there.", "Check its path."),
    _Known(
        r"no active sessions|[Ss]ession [^\n]*(?:not found|does not exist|not valid)|not a valid session",
        "session-gone",
        "The nsys session has ended already.",
        None,
    ),
    _Known(
        r"not (?:allowed|applicable) in this state",
        "session-state",
        "nsys was not collecting at that time.",
        None,
    ),
)

_WARNINGS = (
    _Known(
        r"CPU sampling disabled|CPU IP/backtrace sampling not supported",
        "sampling-refused",
        "The kernel allowed no CPU samples, so nsys recorded without them.",
        "sudo sysctl -w kernel.perf_event_paranoid=2",
    ),
    _Known(
        r"GPU context switch tracing is not available",
        "gpu-context-switches-missing",
        "GPU context switches cannot be recorded on this machine.",
        "Leave --gpuctxsw out.",
    ),
)


def explain(text: str) -> Note:
    """What a failed nsys call means; for an unknown text its last lines, without paths."""
    for known in _FAILURES:
        match = re.search(known.pattern, text)
        if match:
            return _note(known, match)
    words = "; ".join(_telling_lines(text)[-_LINES_SHOWN:])
    return Note("nsys-failed", f"nsys failed: {words}" if words else "nsys failed without a word.", None)


def warnings(text: str) -> list[Note]:
    """What nsys left out by itself and went on."""
    found = ((known, re.search(known.pattern, text)) for known in _WARNINGS)
    return [_note(known, match) for known, match in found if match]


def lost_agent(text: str) -> bool:
    """Whether nsys lost its agent: ``nsys launch`` ends then while the target lives on, and its code means nothing."""
    return re.search(r"Connection to (?:the )?Agent lost", text) is not None


def _note(known: _Known, match: re.Match[str]) -> Note:
    return Note(known.code, known.sentence.format(*match.groups()), known.remedy)


def redact(text: str) -> str:
    """The text without paths: they name users and projects."""
    return re.sub(r"(?:file://)?(?<![\w<])/[^\s'\"]*", "<path>", text)


def lines(text: str) -> list[str]:
    """The lines of nsys's output; its progress bars overwrite themselves with carriage returns."""
    return text.replace("\r", "\n").split("\n")


def _telling_lines(text: str) -> list[str]:
    """The lines that say something: no progress bars, no usage text."""
    kept = (redact(line.strip()) for line in lines(text))
    return [line for line in kept if line and not line.startswith(("[", "usage:", "Try '", "WARNING:"))]


def generated_paths(text: str) -> list[Path]:
    """The reports that nsys lists under ``Generated:``, in its order; versions up to 2021 name theirs in a sentence."""
    return list(dict.fromkeys(_listed(text)))


def _listed(text: str) -> Iterator[Path]:
    listing = False
    for line in lines(text):
        if line.startswith("Generated:"):
            listing = True
        elif listing and re.match(r"\s+/", line):
            yield Path(line.strip())
        elif moved := re.match(r'Report file moved to "(/[^"]+)"', line):
            yield Path(moved[1])
        else:
            listing = listing and not line.strip()


def stream_paths(text: str) -> list[Path]:
    """The intermediate .qdstrm files that nsys says it makes a report of; normally gone when the report is there."""
    return [Path(found) for found in dict.fromkeys(re.findall(r"Generating '([^'\n]+\.qdstrm)'", text))]


def is_whole_report(path: Path) -> bool:
    """Whether a file begins and ends as the reports of nsys 2022.4 and 2023.4 do; one cut off does not."""
    try:
        with path.open("rb") as file:
            head = file.read(16)
            file.seek(-5, 2)
            return head.startswith(b"NVIDIA ") and file.read() == b"[END]"
    except OSError:
        return False
