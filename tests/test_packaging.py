"""What travels: a wheel holds the rules and the sample traces, and an installed infprof finds them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from infprof import resources
from infprof.errors import InfprofError

REPOSITORY = Path(__file__).resolve().parent.parent


def _run(*command: str | Path, cwd: Path, **environ: str) -> str:
    env = {**os.environ, **environ}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, by the build backend that is there, else by pip, which fetches it."""
    folder = tmp_path_factory.mktemp("dist")
    if importlib.util.find_spec("hatchling") is not None:
        _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=REPOSITORY)
    else:
        _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, REPOSITORY, cwd=REPOSITORY)
    (built,) = folder.glob("infprof-*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def _files(folder: Path) -> set[str]:
    """Files below a folder as relative names, without what interpreters and tools leave behind."""
    relative = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {p.as_posix() for p in relative if not any(part.startswith((".", "__pycache__")) for part in p.parts)}


@pytest.mark.parametrize("name", ["rules", "sample_traces"])
def test_the_wheel_carries_every_rule_and_sample(names: set[str], name: str) -> None:
    expected = _files(REPOSITORY / name)
    assert expected
    prefix = f"infprof/_data/{name}/"
    assert {n.removeprefix(prefix) for n in names if n.startswith(prefix)} == expected


def test_the_wheel_carries_the_whole_package_and_nothing_else(names: set[str]) -> None:
    package = {n.removeprefix("infprof/") for n in names if n.startswith("infprof/")}
    assert {n for n in package if not n.startswith("_data/")} == _files(REPOSITORY / "src" / "infprof")
    assert {"py.typed", "doctor.py"} <= package
    assert {n.split("/")[0].split("-")[0] for n in names} == {"infprof"}


def test_the_wheel_carries_its_licence_and_command(wheel: Path, names: set[str]) -> None:
    (info,) = {n.split("/")[0] for n in names if ".dist-info/" in n}
    with zipfile.ZipFile(wheel) as archive:
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    assert licence == (REPOSITORY / "LICENSE").read_text()
    assert "infprof = infprof.cli:main" in scripts


def test_an_installed_wheel_finds_its_own_files(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    _run(
        sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target, wheel, cwd=tmp_path
    )
    code = (
        "import json; from infprof import resources; "
        "print(json.dumps([str(resources.rules_dir()), str(resources.sample_traces_dir())]))"
    )
    # PYTHONPATH goes before site-packages, where an editable install of this checkout may be.
    found = json.loads(_run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(target)))
    assert found == [str(target / "infprof" / "_data" / name) for name in ("rules", "sample_traces")]


def test_a_checkout_uses_its_top_level_folders() -> None:
    assert resources.rules_dir() == REPOSITORY / "rules"
    assert resources.sample_traces_dir() == REPOSITORY / "sample_traces"


def test_a_stray_folder_near_site_packages_is_not_taken_for_ours(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "infprof"
    package.mkdir(parents=True)
    (tmp_path / "rules").mkdir()
    with pytest.raises(InfprofError, match=r"rules folder is missing .* pip install"):
        resources._find("rules", package)
    (tmp_path / "pyproject.toml").touch()
    assert resources._find("rules", package) == tmp_path / "rules"
    (package / "_data" / "rules").mkdir(parents=True)
    assert resources._find("rules", package) == package / "_data" / "rules"
