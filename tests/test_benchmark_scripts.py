"""The benchmarks run, count and judge as they say; at tiny sizes on the CPU, where their times mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import taskgraft as tg

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu  # noqa: E402
import ours  # noqa: E402
import plots  # noqa: E402
import roofline  # noqa: E402
import scaling  # noqa: E402
from side_by_side import SMOKE, Section, Target, recorded  # noqa: E402
from stock import Setting, Variant, check_rows, drawn_rows  # noqa: E402
from timing import interleaved, measure, summary  # noqa: E402
from worker import Bench, Order, Worker, WorkerError  # noqa: E402


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / name), "--smoke", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def is_picture(path: Path) -> bool:
    return path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000


# -- the commands


@pytest.mark.slow
def test_the_gpu_command_writes_its_results_and_says_what_it_left_out(tmp_path: Path) -> None:
    done = run_script("gpu.py", "--peer-python", sys.executable, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert list(record["sections"]) == [section.name for section in gpu.sections(SMOKE)]
    assert "No module named 'adapters'" in record["skipped"]["adapters"] and set(record["sides"]) == {"ours"}
    forward = {found["variant"]: found for found in record["sections"]["forward, 256 rows"]["variants"]}
    assert list(forward) == ["bare backbone", "1 task", "2 tasks", "4 tasks"]
    assert forward["bare backbone"]["ratio"] == 1 and all(found["rounds"] == 4 for found in forward.values())
    assert record["sections"]["adding a task"]["targets"][0]["measured"] > 0
    memory = record["sections"]["peak memory of training, 256 rows"]["skipped"]
    assert {skip["reason"] for skip in memory} == {"peak memory is read on a CUDA device only."}
    table = (tmp_path / "gpu.md").read_text()
    assert "| taskgraft | in one pass |" in table and "- adapters: ModuleNotFoundError" in table
    assert is_picture(tmp_path / "gpu.png")
    assert record["hardware"]["cpu"] and record["sides"]["ours"]["torch"] == torch.__version__


@pytest.mark.slow
def test_the_company_command_counts_steps_of_runs_alone_and_at_once(tmp_path: Path) -> None:
    arguments = ["--steps", "16", "--methods", "dagger", "--processes", "2", "--out", str(tmp_path)]
    done = run_script("company.py", *arguments)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "company.json").read_text())
    assert [run["method"] for run in record["alone"]] == ["dagger"] and record["alone"][0]["ms"] > 0
    assert record["at_once"][0]["processes"] == 2 and "ms a step" in done.stdout


def test_the_cpu_command_without_peers_names_the_fix(tmp_path: Path) -> None:
    done = run_script("cpu.py", "--out", str(tmp_path), "--only", "forward")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "cpu.json").read_text())
    assert list(record["sections"]) == ["forward, 32 rows"]
    assert "give --peer-python" in record["skipped"]["peft"] and is_picture(tmp_path / "cpu.png")


def test_ours_and_the_peers_side_by_side(tmp_path: Path) -> None:
    python = os.environ.get("TASKGRAFT_PEER_PYTHON")
    if python is None:
        pytest.skip("needs TASKGRAFT_PEER_PYTHON, an interpreter that has adapters 1.3.0 and peft 0.21.2")
    done = run_script("cpu.py", "--peer-python", python, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "cpu.json").read_text())
    assert record["sides"]["adapters"]["transformers"].startswith("4.57") and not record["skipped"]
    forward, training = (record["sections"][name] for name in ("forward, 32 rows", "training step, 32 rows"))
    names = [(found["side"], found["variant"]) for found in forward["variants"] + training["variants"]]
    for peer, trained in (("adapters", "adapter"), ("peft", "LoRA")):
        assert {(peer, "bare backbone"), (peer, "1 task"), (peer, "2 tasks"), (peer, trained)} <= set(names)
    assert not forward["skipped"] and not training["skipped"]


def test_the_scaling_series_lists_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["scaling.py", "--smoke", "--out", str(tmp_path), "--memory-gib", "0.00011"]
    monkeypatch.setattr(sys, "argv", arguments)
    scaling.main()
    record = json.loads((tmp_path / "scaling.json").read_text())
    points = [*record["points"], *record["skipped"]]
    assert len(points) == len(scaling.TINY.points())
    assert all(point["tasks"] == 8 or point["size"] == 8 for point in record["skipped"]) and record["skipped"]
    assert all("over the memory" in point["skipped"] for point in record["skipped"])
    assert all(point["ratios"]["launched as usual"] > 0 for point in record["points"])
    assert "## Skipped" in (tmp_path / "scaling.md").read_text() and is_picture(tmp_path / "scaling.png")


def test_the_scaling_series_ends_in_time() -> None:
    found = list(scaling.run(scaling.TINY, SMOKE, 1, 1 << 40, until=time.monotonic() - 1))
    assert all("time was over" in point["skipped"] for point in found)


def test_the_roofline_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["roofline.py", "--smoke", "--out", str(tmp_path)])
    roofline.main()
    note = (tmp_path / "roofline.md").read_text()
    assert "TFLOP/s" in note and "| bottleneck, backward, 4 tasks in the batch |" in note


# -- measuring


def test_variants_take_turns_and_their_own_ratios_are_given() -> None:
    calls: list[str] = []
    variants = {name: Variant(lambda name=name: calls.append(name)) for name in "abc"}  # type: ignore[misc]
    values = interleaved(variants, repeats=6, warmups=2)
    assert {name: len(found) for name, found in values.items()} == {"a": 6, "b": 6, "c": 6}
    turns = [tuple(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(turns) == 8 and all(sorted(turn) == ["a", "b", "c"] for turn in turns) and len(set(turns)) > 1
    drifting = {"base": [1.0, 10.0, 2.0], "own": [3.0, 30.0, 2.0]}  # not the ratio of the medians, which is 1.5
    assert summary(drifting, "base")["own"]["ratio"] == 3.0
    assert summary(drifting, "base")["own"]["median_ms"] == 3.0
    assert "ratio" not in summary(drifting, None)["own"]
    assert measure({"a": lambda: None, "b": lambda: None}, 3, 1)["a"]["ratio"] == 1.0


def test_time_over_ends_after_a_whole_turn_and_what_is_before_is_not_timed() -> None:
    slow = Variant(lambda: None, before=lambda: time.sleep(0.05))
    values = interleaved({"a": slow, "b": slow}, repeats=50, warmups=0, until=time.monotonic() + 0.12)
    assert 1 <= len(values["a"]) == len(values["b"]) < 10
    assert max(values["a"]) < 40


def test_a_variant_that_cannot_be_built_costs_no_other() -> None:
    def fails() -> Variant:
        raise RuntimeError("no such thing\nand more")

    kinds = {"forward": lambda setting, rows: {"good": lambda: Variant(lambda: None), "bad": fails}}
    bench = Bench(SMOKE, kinds, None)
    answer = bench.answer(Order("x", "forward", 4, "time", 3, 1, 60))
    assert list(answer["values"]) == ["good"] and len(answer["values"]["good"]) == 3
    assert answer["skipped"] == {"bad": "RuntimeError: no such thing"}


def test_a_worker_that_dies_or_hangs_is_reported_and_started_again() -> None:
    order = Order("x", "forward", 4, "time", 1, 1, 1)
    hello = "print('{}', flush=True); "
    dies = Worker([sys.executable, "-c", hello + "input(); raise SystemExit(3)"], SMOKE, None)
    for _ in range(2):
        with pytest.raises(WorkerError, match="ended with code 3"):
            dies.ask(order, 30)
    hangs = Worker([sys.executable, "-c", hello + "import time; time.sleep(60)"], SMOKE, None)
    hangs.hello(30)
    start = time.monotonic()
    with pytest.raises(WorkerError, match="did not answer within"):
        hangs.ask(order, 0.3)
    assert hangs.process is None and time.monotonic() - start < 30
    with pytest.raises(WorkerError, match="could not be started"):
        Worker(["/no/such/python"], SMOKE, None).start()


# -- judging


def test_targets_are_judged_within_a_side_and_between_two() -> None:
    section = Section(
        "many", "many", 32, "full", 10,
        targets=(
            Target("one pass", 0.5, ("adapters", "single")),
            Target("single", 0.72, ("ours", "full")),
            Target("one pass", 5.0, None),
            Target("graphs", 0.5, ("ours", "full")),
        ),
    )  # fmt: skip
    values = {
        "ours": {"full": [10.0, 10.0], "single": [8.0, 8.0], "one pass": [4.0, 4.0]},
        "adapters": {"full": [20.0, 20.0], "single": [16.0, 16.0]},
    }
    found = recorded(section, values, {("ours", "graphs"): "no GPU"}, 1.0)
    ratios = {(v["side"], v["variant"]): v["ratio"] for v in found["variants"]}
    assert ratios["adapters", "single"] == 0.8 and ratios["ours", "one pass"] == 0.4
    between, within, absolute, missing = found["targets"]
    assert (between["measured"], between["met"], between["bar"]) == (0.25, True, 0.8)
    assert (within["measured"], within["met"], within["bar"]) == (0.8, False, 0.72)
    assert (absolute["measured"], absolute["met"]) == (4.0, True)
    assert missing["measured"] is None and missing["met"] is None
    assert between["words"] == "one pass: at least 2 times faster than adapters, single"
    lines = plots.section_table(found)
    assert "| one pass: at least 2 times faster than adapters, single | 4.00 times | yes |" in lines
    assert "| single: at most 0.72 of full | 0.800 | no |" in lines


def test_rows_that_went_astray_are_noticed() -> None:
    alone, others = torch.randn(4, 8), torch.randn(4, 8)
    check_rows(torch.cat([alone[:2], others[2:]]), alone, first=2)
    for wrong in (alone, others, torch.cat([others[:2], alone[2:]])):
        with pytest.raises(RuntimeError, match="did not go through their own tasks"):
            check_rows(wrong, alone, first=2)


def test_rows_are_drawn_anew_and_differ_where_they_can() -> None:
    many, few = drawn_rows(1000, 256), drawn_rows(3, 8)
    first, second = next(many), next(many)
    assert first != second and len(set(first)) == 256
    drawn = next(few)
    assert len(drawn) == 8 and set(drawn) == {"t0", "t1", "t2"} and max(map(drawn.count, drawn)) <= 3


@pytest.mark.parametrize("graphed", [False, True])
def test_a_step_in_one_pass_trains_every_run(graphed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(ours, "trained", lambda *a, made=ours.trained, **k: kept.append(made(*a, **k)) or kept[-1])
    step = ours.one_pass(SMOKE, 4, graphed)
    before = {name: kept[0].taskgraft.read(name) for name in ("t0", "t1")}
    step.run()
    for name, old in before.items():
        new = kept[0].taskgraft.read(name)
        assert all(not torch.equal(new[key], old[key]) for key in old if key.endswith((".down", ".up")))
    ours.adapter_step(SMOKE, 4, graphed).run()


# -- counting


def test_the_plan_of_the_scaling_series() -> None:
    points = scaling.FULL.points()
    assert len(points) == len(set(points))
    for axis in ("tasks", "rows", "length", "size"):
        series = plots.series_of([asdict(point) for point in points], asdict(scaling.FULL.centre), axis)
        assert tuple(point[axis] for point in series) == getattr(scaling.FULL, axis)
    config, h200 = BertConfig(), 0.9 * 139 * 2**30
    fits = {p: scaling.bytes_needed(p, Setting(), config) < h200 for p in points}
    assert fits[scaling.Point(10_000, 256, 128, 64)] and not fits[scaling.Point(10_000, 8, 32, 256)]
    assert sum(not fit for fit in fits.values()) == 4


def test_what_the_roofline_counts() -> None:
    shape = roofline.Shape(rows=256, length=128, d=768, f=3072, layers=12, m=64, tasks=32, width=2)
    down, up = 2 * 256 * 128 * 768 * 64, 2 * 256 * 128 * 64 * 768
    weights = 2 * 32 * (768 * 64 + 64 + 64 * 768 + 768)
    x = 2 * 256 * 128 * 768
    assert roofline.bottleneck_forward(shape) == roofline.Work(down + up, 2 * x + weights)
    assert roofline.bottleneck_backward(shape) == roofline.Work(5 * down, 3 * x + 2 * weights)
    matrices = sum(p.numel() for p in bert_matrices())  # each token goes through each of them once
    operations = sum(work.operations for work in roofline.forward(shape, adapters=False))
    assert operations == 2 * 256 * 128 * matrices + 12 * 4 * 256 * 128 * 128 * 768
    ceilings = roofline.Ceilings(operations=1e12, bytes=1e9)
    works = [roofline.Work(1e9, 0), roofline.Work(0, 1e6), roofline.Work(1e9, 5e6)]
    assert ceilings.floor_ms(works) == pytest.approx(1 + 1 + 5)


def bert_matrices() -> list[torch.nn.Parameter]:
    with torch.device("meta"):
        layers = BertModel(BertConfig()).encoder.layer
    return [p for p in layers.parameters() if p.dim() == 2]


def test_the_readme_counts_what_lora_and_the_bottlenecks_train() -> None:
    bottlenecks = tg.count(tg.Adapter(size=64, norms="none"), BertConfig(), labels=0)
    lora = 12 * 2 * (64 * 768 + 768 * 64)  # on query and value
    assert f"{lora:,} and {bottlenecks:,}" in (BENCHMARKS / "README.md").read_text()
