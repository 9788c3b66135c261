"""What earlier versions saved still loads, and says what it said then (`tests/write_golden.py` writes a version's)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import taskgraft as tg
from taskgraft.grafts.store import is_joint

from write_golden import GOLDEN, OUTPUTS, loaded, outputs

VERSIONS = sorted(path for path in GOLDEN.iterdir() if path.is_dir())
CASES = [(version, name) for version in VERSIONS for name in tg.Store(version / "grafts").names()]


@cache
def said(version: Path) -> dict[str, Tensor]:
    return load_file(version / OUTPUTS)


@pytest.mark.parametrize(("version", "name"), CASES, ids=lambda part: getattr(part, "name", part))
def test_it_loads_and_says_what_it_said(version: Path, name: str) -> None:
    folder = version / "grafts" / name
    if is_joint(folder):
        joint = tg.load_joint(folder)
        model = loaded(version, joint.backbone["name"])
        tg.add_joint(model, joint)
        expected = {task: said(version)[f"{name}/{task}"] for task in joint.tasks}
    else:
        graft = tg.load_graft(folder)
        model = loaded(version, graft.backbone["name"])
        tg.add_graft(model, graft)
        expected = {name: said(version)[name]}
    for task, then in expected.items():
        now = outputs(model, task)
        assert now.dtype == torch.float64 and then[then.isfinite()].std() > 1e-3
        torch.testing.assert_close(now, then, rtol=0, atol=1e-6)


def test_every_version_has_left_its_own() -> None:
    assert tg.__version__ in {version.name for version in VERSIONS}, "run tests/write_golden.py"
    for version in VERSIONS:
        entries = tg.Store(version / "grafts").list()
        assert {entry.method for entry in entries} >= {"adapter", "full", "head", "hyperformer", "norms"}
        assert not [entry.error for entry in entries if entry.error]
        answered = {key.partition("/")[0] for key in said(version)}
        assert answered == {entry.name for entry in entries}
        assert sum(path.stat().st_size for path in version.rglob("*") if path.is_file()) < 300_000
