"""Which files are meant: names, globs (quoted ones too) and folders, as one list of inputs in natural order."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from infprof.errors import InfprofError, UsageError

# What profilers call their files: such a file of a folder is an input even where its content is damaged.
_TRACE_NAMES = re.compile(r"\.(?:sqlite|nsys-rep|qdrep|trace\.json)(?:\.gz)?$", re.IGNORECASE)
_REPORTS = re.compile(r"\.(?:nsys-rep|qdrep)$", re.IGNORECASE)
_RANK = (
    # vLLM since parallel configuration is in its names, and SGLang: the first number after the word.
    re.compile(r"(?<![a-z])rank[-_.]?(\d+)", re.IGNORECASE),
    re.compile(r"(?<![a-z])r(\d+)(?![a-z0-9])", re.IGNORECASE),
    re.compile(r"(?<=[-_.])TP-?(\d+)(?![a-z0-9])", re.IGNORECASE),
)
# Beside a TP number these must be 0, or the TP number alone is not the rank.
_OTHER_AXES = re.compile(r"(?<![a-z])(?:dp|pp|ep)-?([1-9]\d*)(?![a-z0-9])", re.IGNORECASE)
_NODE = re.compile(r"(?<![a-z])(?:node|host)[-_.]?(\d+)(?!\d)", re.IGNORECASE)
# torch.profiler.tensorboard_trace_handler: HOST_PID.TIME.pt.trace.json
_TENSORBOARD = re.compile(r"^(?P<host>.+)_\d+\.\d+\.pt\.trace\.json(?:\.gz)?$")


class FileIdentity(NamedTuple):
    """What a name says; None where it says nothing. ``machine`` tells machines apart and is not shown."""

    rank: int | None
    machine: str | None


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Numbers in a name count as numbers: rank2 before rank10."""
    parts = re.split(r"(\d+)", text)
    return tuple((0, int(part), part) if part.isdigit() else (1, 0, part) for part in parts)


def expand(inputs: Sequence[str | Path]) -> list[Path]:
    """The inputs that are meant, each once, in natural order of their paths.

    A glob that names no existing file is expanded here; of a folder, the profiles in it and below are taken (a bundle
    and a directory export of nsys are one input each). A report of nsys is left out where its export lies beside it.
    Raises InfprofError where a glob matches nothing, UsageError where one of several names does not exist.
    """
    paths: list[Path] = []
    for text in map(str, inputs):
        path = Path(text)
        if glob.has_magic(text) and not os.path.lexists(path):
            found = [Path(name) for name in glob.glob(text, recursive=True)]
            if not found:
                raise InfprofError(f"{text} matches no file.")
            paths += [inner for one in found for inner in (_inside(one) if one.is_dir() else [one])]
        elif os.path.isdir(path) and not _is_one_input(path):
            # Of a folder without a profile the reader says what is wrong.
            paths += _inside(path) or [path]
        elif len(inputs) > 1 and not os.path.lexists(path):
            raise UsageError(f"{path} does not exist.")
        else:
            paths.append(path)
    unique = {os.path.realpath(path): path for path in paths}
    # With one input nothing is left out: it is the only answer.
    kept = _without_exported(list(unique.values()))
    return sorted(kept, key=lambda path: natural_key(str(path)))


def labels(paths: Sequence[Path]) -> list[str]:
    """Names short enough to read and long enough to tell the files apart: the last parts of each path."""
    for depth in range(1, max((len(p.parts) for p in paths), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def identity(path: Path) -> FileIdentity:
    """What the file's name, and for the machine its folder, say: ``rank3`` (PyTorch, vLLM), ``TP-3`` (SGLang), …"""
    name = path.name
    rank = None
    for pattern in _RANK:
        numbers = set(pattern.findall(name))
        if len(numbers) == 1 and not ("TP" in pattern.pattern and _OTHER_AXES.search(name)):
            rank = int(numbers.pop())
            break
    node = _NODE.search(name) or _NODE.search(path.parent.name)
    by_handler = _TENSORBOARD.match(name)
    machine = node.group(1) if node else by_handler.group("host") if by_handler else None
    return FileIdentity(rank, machine)


def _is_one_input(folder: Path) -> bool:
    from infprof.readers import is_profile_folder

    return is_profile_folder(folder)


def _inside(folder: Path) -> list[Path]:
    from infprof.readers import is_profile

    if _is_one_input(folder):
        return [folder]
    found: list[Path] = []
    for here, folders, files in os.walk(folder):
        whole = [name for name in folders if _is_one_input(Path(here) / name)]
        found += [Path(here) / name for name in whole]
        folders[:] = sorted(name for name in folders if name not in whole and not name.startswith("."))
        for name in files:
            path = Path(here) / name
            if not name.startswith(".") and (_TRACE_NAMES.search(name) or is_profile(path)):
                found.append(path)
    return found


def _without_exported(paths: list[Path]) -> list[Path]:
    stems = {re.sub(r"\.sqlite(?:\.gz)?$", "", str(p)) for p in paths if ".sqlite" in p.name}
    return [p for p in paths if not (_REPORTS.search(p.name) and _REPORTS.sub("", str(p)) in stems)]
