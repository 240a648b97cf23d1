"""Where the files that travel with infprof are: its rules and its sample traces.

In a checkout both lie at the top level, where people look for them. A wheel carries copies inside the package,
under ``_data`` (see ``force-include`` in pyproject.toml). The same call finds either.
"""

from __future__ import annotations

from pathlib import Path

from infprof.errors import InfprofError

_PACKAGE = Path(__file__).resolve().parent


def rules_dir() -> Path:
    """The folder of the rules that ship with infprof."""
    return _find("rules")


def sample_traces_dir() -> Path:
    """The folder of the sample traces that ship with infprof, each with the answer that it must give."""
    return _find("sample_traces")


def _find(name: str, package: Path = _PACKAGE) -> Path:
    """``name`` inside an installed wheel, else at the top of the checkout that ``package`` (…/src/infprof) is part of.

    A checkout is known by its pyproject.toml: without that test, a stray folder called "rules" two levels above
    site-packages would be taken for ours. Raises InfprofError when the installation holds neither.
    """
    packaged = package / "_data" / name
    if packaged.is_dir():
        return packaged
    checkout = package.parent.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / name).is_dir():
        return checkout / name
    raise InfprofError(
        f"infprof's own {name} folder is missing from {package}: the installation is incomplete. "
        "Install it again: pip install --force-reinstall infprof"
    )
