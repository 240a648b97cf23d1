"""Whether a command is a Python program, and whether that Python lets itself be reached by PYTHONPATH."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_PYTHON = re.compile(r"^(?:python|pypy)[\d.]*[a-z]?$")
# pip writes this for interpreters whose path is too long for a first line.
_LONG_SHEBANG = re.compile(r"^'''exec' (\S+)")
_HEAD_BYTES = 1024
# -I, -E: PYTHONPATH is not looked at; -S: no sitecustomize is imported.
_ISOLATING = "IES"
_WITH_VALUE = "WX"


class Interpreter(NamedTuple):
    """How a command runs Python. ``isolating``: its option that keeps others out (``-I``), None where there is none."""

    words: tuple[str, ...]
    isolating: str | None


def interpreter_of(command: Sequence[str], environ: Mapping[str, str]) -> Interpreter | None:
    """The Python that a command starts: itself, behind ``env``, ``numactl`` and the like, or by the first line of a script.

    None where the command is another program; it may start a Python all the same.
    """
    for index, word in enumerate(command):
        if _PYTHON.match(Path(word).name):
            return _interpreter(command[index:])
    script = shutil.which(command[0], path=environ.get("PATH"))
    return None if script is None else _of_script(Path(script))


def _of_script(path: Path) -> Interpreter | None:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    if not head.startswith(b"#!"):
        return None
    lines = head.decode("utf-8", "replace").splitlines()
    long = _LONG_SHEBANG.match(lines[1]) if len(lines) > 1 else None
    words = [long[1].strip('"')] if long else lines[0][2:].split()
    for index, word in enumerate(words):
        if _PYTHON.match(Path(word).name):
            return _interpreter(words[index:])
    return None


def _interpreter(words: Sequence[str]) -> Interpreter:
    return Interpreter(tuple(words), _isolating(words[1:]))


def _isolating(options: Sequence[str]) -> str | None:
    """The first option of the interpreter's own that keeps us out; what follows the script or -c, -m is the program's."""
    skip = False
    for word in options:
        if skip:
            skip = False
        elif not word.startswith("-") or word == "-":
            return None
        elif word.startswith("--"):
            skip = word == "--check-hash-based-pycs"
        else:
            for place, letter in enumerate(word[1:], 1):
                if letter in _ISOLATING:
                    return f"-{letter}"
                if letter in "cm":
                    return None
                if letter in _WITH_VALUE:
                    skip = place == len(word) - 1
                    break
    return None
