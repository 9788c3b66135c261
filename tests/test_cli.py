"""The command line and the package from outside: what a shell sees."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_the_demo_checks_its_promises() -> None:
    done = run("-m", "taskgraft.cli", "demo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("to the bit: yes") == 3 and "NO" not in done.stdout
    assert "sha256 of its weights checked" in done.stdout


def test_help_teaches_and_bad_usage_exits_with_2() -> None:
    done = run("-m", "taskgraft.cli", "--help")
    assert done.returncode == 0 and "demo" in done.stdout
    assert run("-m", "taskgraft.cli", "frobnicate").returncode == 2


@pytest.mark.parametrize("module", ["torch", "transformers", "typer"])
def test_importing_the_package_does_no_work(module: str) -> None:
    done = run("-c", f"import sys, taskgraft; print({module!r} in sys.modules)")
    assert done.stdout.strip() == "False"


def test_methods_do_not_need_torch() -> None:
    done = run("-c", "import sys, taskgraft as tg; tg.Adapter(size=8); print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr
