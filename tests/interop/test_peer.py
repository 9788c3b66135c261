"""Side by side with `adapters` 1.3.0, in its own process: every configuration on every family it shares with us.

`make interop` makes that environment and runs this; elsewhere TASKGRAFT_PEER names a Python that has the package.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import taskgraft as tg

from hub_files import backbone_of, difference, expected_of, logits_of

PEER = os.environ.get("TASKGRAFT_PEER")
pytestmark = pytest.mark.skipif(not PEER, reason="TASKGRAFT_PEER names no Python with adapters 1.3.0: make interop")


def peer(action: str, folder: Path) -> str:
    script = Path(__file__).parent / "peer.py"
    command = [str(PEER), "-W", "ignore", str(script), action, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_what_each_saves_answers_the_same_in_the_other(tmp_path: Path) -> None:
    peer("save", tmp_path / "theirs")
    largest: dict[str, float] = {}
    for home in sorted((tmp_path / "theirs").iterdir()):
        ours = tmp_path / "ours" / home.name
        ours.mkdir(parents=True)
        shutil.copytree(home / "backbone", ours / "backbone")
        shutil.copy(home / "expected.safetensors", ours)
        inputs, expected = expected_of(home)
        model = backbone_of(home)
        for case, logits in expected.items():
            name = tg.import_adapterhub(model, home / case)
            found = logits_of(model, [name] * 3, inputs)
            largest[f"{home.name}/{case}"] = difference(found, logits, inputs["attention_mask"])
            tg.export_adapterhub(model, name, ours / case)
    assert len(largest) > 180
    for case, gap in largest.items():  # an mT5 whose residuals are left out has logits of 30
        assert gap < (2e-5 if case.startswith("mt5/") else 1e-5), case
    back = json.loads(peer("check", tmp_path / "ours").splitlines()[-1])
    assert set(back) == set(largest)
    assert max(back.values()) < 1e-5, {case: gap for case, gap in back.items() if gap >= 1e-5}
    print(f"{len(largest)} adapters: here {max(largest.values()):.1e}, there {max(back.values()):.1e}")
