"""What is declared is imported, what is imported is declared, and an extra is missed by no one who does not use it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "taskgraft"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CALLED = {"pyyaml": "yaml", "scikit-learn": "sklearn"}
EXTRAS = ("cluster", "gpu", "hub", "serve", "track")
ENGINE = ("answers", "asked", "engine", "library", "passes", "residents", "turns")  # serving without HTTP


def modules(requirements: Iterable[str]) -> set[str]:
    names = [Requirement(text).name for text in requirements]
    return {CALLED.get(name, name.replace("-", "_")) for name in names}


CORE = modules(PROJECT["dependencies"])
OPTIONAL = {extra: modules(PROJECT["optional-dependencies"][extra]) for extra in EXTRAS}


def imports_of(path: Path) -> set[str]:
    """The packages of others that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) - {"taskgraft"}


def allowed(path: Path) -> set[str]:
    """What a file may import: the core's, and those of the extra whose feature it is."""
    place = path.relative_to(SOURCE)
    if place.parts[0] == "serving" or place == Path("cli/serve.py"):
        return CORE | OPTIONAL["serve"]
    if place.parts[0] == "cluster":
        return CORE | OPTIONAL["cluster"] | OPTIONAL["serve"]
    if place in (Path("tasks/hub.py"), Path("tasks/published.py")):
        return CORE | OPTIONAL["hub"]
    if place.parts[0] == "nn" and place.stem.endswith("kernels"):
        return CORE | OPTIONAL["gpu"]
    return CORE


def test_what_is_imported_is_declared() -> None:
    assert {str(path): missing for path in SOURCE.rglob("*.py") if (missing := imports_of(path) - allowed(path))} == {}


RUNS_CODE = {"dill", "joblib", "marshal", "pickle", "shelve"}
RUNS_TEXT = {"eval", "exec", "compile", "__import__", "yaml.load", "os.system", "np.load"}


def test_no_file_that_is_read_can_run_code() -> None:
    for path in SOURCE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        called = {ast.unparse(node.func) for node in calls}
        options = {word.arg for node in calls for word in node.keywords}
        for loads in (node for node in calls if ast.unparse(node.func) == "torch.load"):
            assert "weights_only=True" in ast.unparse(loads), path
        assert not imported & RUNS_CODE and not called & RUNS_TEXT and "trust_remote_code" not in options, path


def test_what_is_declared_is_imported() -> None:
    found = set().union(*(imports_of(path) for path in SOURCE.rglob("*.py")))
    assert found >= CORE
    assert OPTIONAL["serve"] - found == {"httptools", "uvloop"}, "which uvicorn takes where they are"


def test_an_extras_packages_are_those_of_dev() -> None:
    """Else the tests would be silent about what is not installed."""
    optional = PROJECT["optional-dependencies"]
    for extra in EXTRAS:
        assert set(optional[extra]) <= set(optional["dev"])


def python(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_package_imports_nothing_of_others() -> None:
    code = """
import json, sys
before = set(sys.modules)
import taskgraft
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(new - set(sys.stdlib_module_names))))
"""
    assert python(code) == ["taskgraft"]


def test_without_the_extras_all_but_the_server_imports() -> None:
    blocked = sorted(set().union(*OPTIONAL.values()))
    code = f"""
import importlib, json, pkgutil, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import taskgraft
failed = []
for module in pkgutil.walk_packages(taskgraft.__path__, "taskgraft."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except (ImportError, taskgraft.GraftError):
        failed.append(module.name)
print(json.dumps(sorted(failed)))
"""
    failed = set(python(code))
    kernels = {f"taskgraft.nn.{name}" for name in ("adamw_kernels", "kernels", "norm_kernels")}
    assert kernels <= failed, "nothing was blocked"
    server = {name for name in failed - kernels if name.startswith("taskgraft.serving.")} | {"taskgraft.cluster.serve"}
    assert failed == kernels | server and not server & {f"taskgraft.serving.{name}" for name in ENGINE}
