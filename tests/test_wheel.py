"""What is published: a source distribution, and the wheel that is built from it as pip would."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import taskgraft as tg

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "taskgraft"


def build(target: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", next(folder.iterdir()), tmp_path_factory.mktemp("wheel"))


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"taskgraft-{tg.__version__}.dist-info/METADATA"))


def test_the_source_distribution_is_the_repository(sdist: Path) -> None:
    assert sdist.name == f"taskgraft-{tg.__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "Makefile"} <= set(names)
    assert "tests/test_wheel.py" in names and "src/taskgraft/__init__.py" in names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", ".git/", "grafts"))]


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"taskgraft-{tg.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 3_000_000
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        about = {name.rpartition("/")[2] for name in archive.namelist() if ".dist-info/" in name}
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert held == {f"taskgraft/{path.relative_to(PACKAGE)}" for path in files}
    page = {f"taskgraft/serving/page/{path.name}" for path in (PACKAGE / "serving/page").iterdir() if path.is_file()}
    assert {"taskgraft/py.typed", "taskgraft/data/review_sentiment.csv", *page} <= held and page
    assert {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "LICENSE"} == about


def test_what_the_wheel_says_of_itself(wheel: Path) -> None:
    found, project = metadata(wheel), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found["Name"] == "taskgraft" and found["Version"] == tg.__version__
    assert found["License-Expression"] == "Apache-2.0" and found["Requires-Python"] == project["requires-python"]
    core = [line for line in found.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert set(map(Requirement, core)) == set(map(Requirement, project["dependencies"]))
    assert set(found.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    assert str(found.get_payload()).startswith("# taskgraft")
