"""Grafts of every family, saved here and loaded in another process, under another name, with equal output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import taskgraft as tg

from families import FAMILY_NAMES, SAMPLES, batch, build, perturb, result

CHILD = """
import sys
from pathlib import Path

import torch
from families import FAMILY_NAMES, batch, build, result
from safetensors.torch import save_file

import taskgraft as tg

torch.set_num_threads(1)
folder = Path(sys.argv[1])
found = {}
for name in FAMILY_NAMES:
    model = build(name)
    for task in ("first", "second"):
        tg.add_graft(model, folder / name / task, name=f"{task} again")
    with torch.no_grad(), tg.rows(model, ["second again", None, "first again"]):
        found[name] = result(model, batch(model, rows=3)).contiguous()
save_file(found, folder / "found.safetensors")
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What each family gives here, and what it gives in a process that has only the files."""
    folder = tmp_path_factory.mktemp("grafts")
    torch.set_num_threads(1)
    here = {}
    for name in FAMILY_NAMES:
        model = build(name)
        heads = (None, None) if SAMPLES[name].writes else (2, 5)
        tg.graft(model, tg.Adapter(size=8), {"first": heads[0]})
        tg.add_task(model, "second", tg.Adapter(size=3, activation="sigmoid", parallel=True), heads[1])
        perturb(model, seed=1, only=lambda path: ".bank." in path or path.startswith("taskgraft_heads."))
        for task in ("first", "second"):
            tg.get_graft(model, task).save(folder / name / task)
        tg.train_only(model, [])
        with torch.no_grad(), tg.rows(model, ["second", None, "first"]):
            here[name] = result(model, batch(model, rows=3)).contiguous()
    subprocess.run(
        [sys.executable, "-c", CHILD, str(folder)], check=True, cwd=Path(__file__).parent, capture_output=True
    )
    save_file(here, folder / "here.safetensors")
    return load_file(folder / "here.safetensors"), load_file(folder / "found.safetensors")


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_another_process_gives_the_same_output(name: str, outputs: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    here, there = outputs
    assert torch.equal(here[name], there[name])
    assert torch.isfinite(here[name][0]).any()
