"""A stored diagnosis: what ``--json`` printed, or the diagnosis.json of a bundle, back as a Diagnosis.

Known by its content: one JSON object that begins with a key of the contract. Nothing is computed anew.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from infprof.errors import InfprofError
from infprof.restoring import StructureError
from infprof.results import SCHEMA_VERSION, Diagnosis

_HEAD_BYTES = 4096
# Any order of keys: tools that sort them put another one first. No profile's JSON begins with one of these.
_BEGINNING = re.compile(
    rb'(?:\xef\xbb\xbf)?\s*\{\s*"(?:%s)"\s*:' % b"|".join(f.name.encode() for f in fields(Diagnosis))
)


def is_stored_diagnosis(path: Path) -> bool:
    """Whether the file is one, by its first bytes; False for what cannot be read, which a reader then explains."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return _BEGINNING.match(file.read(_HEAD_BYTES)) is not None
    except OSError:
        return False


def read_stored_diagnosis(path: Path) -> Diagnosis:
    """The diagnosis in the file.

    Raises InfprofError with one sentence for a file that is cut off, no diagnosis, or of a newer major version.
    """
    try:
        data = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise InfprofError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        what = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else "not UTF-8 JSON"
        raise InfprofError(
            f"{path} begins like a stored diagnosis and is damaged ({what}): write it again with infprof analyze --json."
        ) from None
    _check_version(path, data)
    try:
        return Diagnosis.from_dict(data)
    except StructureError as error:
        raise InfprofError(
            f"{path} is not a diagnosis as infprof stores it: {error}. Write it again with infprof analyze --json."
        ) from None


def _check_version(path: Path, data: Any) -> None:
    """Raises InfprofError for a version whose keys may mean something else."""
    version = data.get("schema_version")
    mine = int(SCHEMA_VERSION.split(".")[0])
    match = re.fullmatch(r"(\d{1,9})\.\d{1,9}", version) if isinstance(version, str) else None
    if match is None:
        raise InfprofError(
            f"{path} is not a diagnosis as infprof stores it: schema_version is missing or is no version. "
            "Write it again with infprof analyze --json."
        )
    if int(match[1]) != mine:
        hint = "update infprof" if int(match[1]) > mine else "write it again with infprof analyze --json"
        raise InfprofError(f"{path} has schema version {version}, and this infprof reads {mine}.x: {hint}.")
