"""A bundle: the folder that one ``infprof run`` leaves, and the manifest that says what is in it.

::

    manifest.json        what ran, when, which probes, what failed, how the clocks stood (versioned)
    trace/*.sqlite       the exported trace, one file per capture; beside it the raw report
    telemetry.sqlite     samples, facts and events of the probes
    load.json            what the load saw, where infprof made one
    diagnosis.json       the diagnosis, as ``infprof analyze BUNDLE --json`` prints it again
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infprof import __version__
from infprof.errors import InfprofError, UsageError

MANIFEST_VERSION = 1
MANIFEST, TELEMETRY, DIAGNOSIS, LOAD, TRACE_DIR = (
    "manifest.json",
    "telemetry.sqlite",
    "diagnosis.json",
    "load.json",
    "trace",
)

_SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_HIDDEN = "<redacted>"
# In a header or in a command for a shell: `Bearer x`, `--api-key x`, `HF_TOKEN=x`.
_INSIDE = re.compile(
    r"((?:Bearer|Basic)\s+|[\w-]*(?:key|token|secret|passw\w*|credential)[\w-]*(?:\s*[=:]\s*|\s+))\S+", re.I
)
_URL_USER = re.compile(r"(?<=://)[^/@\s]+@")
_URL_QUERY = re.compile(r"(?<=\?)\S+")


@dataclass
class Manifest:
    """What a run did. Times are Unix nanoseconds; ``state`` is running, complete or partial.

    ``target`` says how the program ended: ``ended`` (by itself, stopped by infprof, killed, kept running),
    ``exit_code``, and ``exit_code_of``: whose code ``infprof run`` returned (target or infprof).
    """

    command: list[str]
    started_unix_ns: int
    state: str = "running"
    manifest_version: int = MANIFEST_VERSION
    infprof_version: str = __version__
    ended_unix_ns: int | None = None
    backend: dict[str, Any] = field(default_factory=dict)
    probes: list[dict[str, Any]] = field(default_factory=list)
    phases: list[dict[str, Any]] = field(default_factory=list)
    target: dict[str, Any] = field(default_factory=dict)
    clocks: dict[str, int] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)

    def note(self, code: str, sentence: str, remedy: str | None = None) -> None:
        """Record, once, what went otherwise than wished: a stable code, one sentence, and what helps."""
        row = {"code": code, "sentence": sentence, "remedy": remedy}
        if row not in self.notes:
            self.notes.append(row)

    def phase(self, name: str) -> dict[str, Any] | None:
        """The last phase of a name."""
        return next((p for p in reversed(self.phases) if p["name"] == name), None)

    def to_json(self) -> str:
        """The manifest as a file holds it."""
        return json.dumps(asdict(self), indent=2) + "\n"


class Bundle:
    """The folder of one run. ``create`` makes it, ``open`` finds one."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._replaced: Path | None = None

    def undo(self) -> None:
        """Remove the folder again, and put back what it replaced: the run has not begun."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._replaced is not None:
            self._replaced.rename(self.folder)

    def keep(self) -> None:
        """The run has begun: what the folder replaced is no longer needed."""
        if self._replaced is not None:
            shutil.rmtree(self._replaced, ignore_errors=True)
            self._replaced = None

    @classmethod
    def create(cls, folder: Path, manifest: Manifest, force: bool = False) -> Bundle:
        """Make the folder and its first manifest.

        A bundle that is there is replaced with ``force``; nothing else ever is. Raises UsageError where the folder
        exists or cannot be written.
        """
        bundle = cls(folder, manifest)
        try:
            if folder.exists():
                bundle._replaced = _set_aside(folder, force)
            (folder / TRACE_DIR).mkdir(parents=True)
            bundle.save()
        except OSError as error:
            if bundle._replaced is not None:
                bundle.undo()
            raise UsageError(
                f"{folder} cannot be written: {error.strerror or error}. Name another folder with -o."
            ) from None
        return bundle

    @classmethod
    def open(cls, folder: Path) -> Bundle:
        """The bundle in a folder. Raises InfprofError where the manifest is missing, damaged or too new."""
        path = folder / MANIFEST
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InfprofError(f"{folder} is a folder without {MANIFEST}, so it is no bundle of infprof.") from None
        except (OSError, ValueError) as error:
            raise InfprofError(f"{path} cannot be read: {error}.") from None
        if not isinstance(data, dict) or "manifest_version" not in data:
            raise InfprofError(f"{path} is not a manifest of infprof.")
        if data["manifest_version"] != MANIFEST_VERSION:
            raise InfprofError(
                f"{path} is of manifest version {data['manifest_version']}, and this infprof reads {MANIFEST_VERSION}: "
                "use the infprof that made it, or a newer one."
            )
        known = {k: v for k, v in data.items() if k in Manifest.__dataclass_fields__}
        try:
            return cls(folder, Manifest(**known))
        except TypeError as error:
            raise InfprofError(f"{path} is incomplete: {error}.") from None

    def save(self) -> None:
        """Write the manifest, whole or not at all. Raises OSError."""
        from infprof.reports.files import replace_file

        replace_file(self.folder / MANIFEST, self.manifest.to_json().encode())

    @property
    def telemetry(self) -> Path:
        return self.folder / TELEMETRY

    def traces(self) -> list[Path]:
        """The exported traces, in the order of their captures."""
        return [self.folder / name for name in self.manifest.files.get("traces", [])]


def _set_aside(folder: Path, force: bool) -> Path | None:
    """Make way for a new bundle: an empty folder goes, a bundle is renamed with ``force``; gives its new name."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        return None
    if not _is_bundle(folder):
        raise UsageError(f"{folder} exists already and is no bundle of infprof. Name another folder with -o.")
    if not force:
        raise UsageError(f"{folder} exists already. Name another folder with -o, or replace the bundle with --force.")
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.replaced")
    folder.rename(aside)
    return aside


def _is_bundle(folder: Path) -> bool:
    """Whether the manifest there is infprof's: other programs have files of that name."""
    try:
        data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and {"manifest_version", "infprof_version"} <= data.keys()


def redact_command(command: Sequence[str]) -> list[str]:
    """A command line without what may be secret: values of options named like keys, tokens and passwords, parts of URLs.

    All words after such an option go until the next one, and what looks like a secret inside a word (a header, a
    command for a shell) goes as well.
    """
    out: list[str] = []
    hiding = False
    for word in command:
        if word.startswith("-"):
            hiding = "=" not in word and bool(_SECRET_NAME.search(word))
        elif hiding:
            out.append(_HIDDEN)
            continue
        out.append(_redact_word(word))
    return out


def _redact_word(word: str) -> str:
    name, equals, _ = word.partition("=")
    if equals and " " not in name and _SECRET_NAME.search(name):
        return f"{name}={_HIDDEN}"
    if "://" in word:
        word = _URL_QUERY.sub(_HIDDEN, _URL_USER.sub(f"{_HIDDEN}@", word))
    return _INSIDE.sub(lambda found: f"{found[1]}{_HIDDEN}", word)
