"""The experiments from a shell, small: made-up files in the layout of the real ones, a tiny backbone, one epoch."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import taskgraft as tg
from taskgraft.errors import Diverged, GraftError
from taskgraft.experiments import (
    arms,
    company,
    few_shot,
    few_shot_steps,
    glue,
    hyper_start,
    hyper_steps,
    lab,
    shots,
    span_ablation,
    study,
    task_map,
)
from taskgraft.experiments.data import CLASSIFICATION, GLUE, capped, load
from taskgraft.experiments.lab import Job, Lab, Setup
from taskgraft.experiments.names import EXPERIMENTS
from taskgraft.experiments.pool import Pool
from taskgraft.experiments.study import Arm, Option
from taskgraft.tasks.benchmarks import BENCHMARKS, benchmark_named

import tiny
from test_cli import Done, taskgraft, well

SMALL = ["--rows", "40", "--seeds", "2", "--trials", "1", "--epochs", "1", "--configurations", "3", "--steps", "2"]
TASKS = {
    "glue": "cola,stsb,qqp",
    "tradeoff": "cola,rte",
    "dropout": "cola,rte",
    "stream": "rte,sms_spam",
    "classification": "sms_spam,crowdflower_airline",
    "variants": "rte",
    "hyper-glue": "cola,mrpc",
    "hyper-ablation": "cola,mrpc",
    "few-shot": "cola,mrpc,trec,scitail",
    "low-resource": "mrpc,qqp",
    "task-map": "cola,mrpc,rte",
    "hyper-start": "cola,mrpc,rte",
    "hyper-steps": "cola,mrpc",
    "few-shot-steps": "cola,mrpc,trec,scitail",
}


def write_set(folder: Path, name: str, rows: dict[str, int]) -> None:
    """A benchmark's files, of texts whose label can be read off a word or two."""
    benchmark = benchmark_named(name)
    assert benchmark is not None
    draw = random.Random(name)
    for part, count in rows.items():
        columns: dict[str, list[Any]] = {column: [] for column in benchmark.columns}
        for n in range(count):
            label: Any = draw.randrange(len(benchmark.labels)) if benchmark.labels else draw.random() * 5
            word = tiny.NUMBERS[int(label) % 10]
            for column in benchmark.columns[:-1]:
                columns[column].append(f"{tiny.sentence(draw, [word])} {part} {n}")
            columns["label"].append(label)
        path = folder / benchmark.folder / f"{part}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)


def write_squad(folder: Path) -> None:
    draw = random.Random(0)
    for part, count in (("train", 1_100), ("validation", 30)):
        rows = []
        for n in range(count):
            before, word = tiny.sentence(draw, []), draw.choice(tiny.GOOD)
            context = f"{before} {word} {tiny.sentence(draw, [])}"
            answers = {"text": [word], "answer_start": [len(before) + 1]}
            rows.append({"id": f"{part}{n}", "question": "what was it", "context": context, "answers": answers})
        path = folder / BENCHMARKS["squad/squad"].folder / f"{part}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in GLUE:
        benchmark = benchmark_named(name)
        assert benchmark is not None
        dev = "validation_matched" if name == "mnli" else "validation"
        write_set(folder, name, {"train": 1_200 if benchmark.published["train"] >= 10_000 else 80, dev: 30})
    for name in CLASSIFICATION:
        benchmark = benchmark_named(name)
        assert benchmark is not None
        published = {"train": 80, "test": 30} if benchmark.protocol == "test" else {"all": 100}
        write_set(folder, name, published)
    for name in ("trec", "scitail"):
        write_set(folder, name, {"train": 80, "validation": 30, "test": 30})
    write_squad(folder)
    return folder


@pytest.fixture(scope="module")
def setup(data: Path, backbone: str, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    runs = tmp_path_factory.mktemp("runs")
    return Setup(runs, backbone, data, rows=40, seeds=2, epochs=1, trials=2, pooling="mean")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_experiment_from_its_data_to_its_table(name: str, data: Path, backbone: str, results: Path) -> None:
    words = ["reproduce", name, "--data-dir", str(data), "--backbone", backbone, "--out", str(results), *SMALL]
    rows = 100 if name == "low-resource" else 40  # its fewest
    words += ["--rows", str(rows)]
    done = well(*words, "--json", *(["--tasks", TASKS[name]] if name in TASKS else []))
    record = json.loads(done.out.splitlines()[-1])
    folder = results / name
    files = {path.name for path in folder.iterdir()}
    assert {"results.json", "table.md", "environment.json"} < files
    assert any(file.endswith(".png") for file in files)
    assert record["experiment"] == name and set(record["files"].values()) == {str(folder / file) for file in files}
    table, found = (folder / "table.md").read_text(), json.loads((folder / "results.json").read_text())
    assert "Not the paper's models or data" in table and "## The data" in table and f"{rows} of " in table
    runs = [run["name"] for run in found["runs"]]
    assert name != "few-shot" or ("published" in found and "remapped" not in found)  # a control of models that write
    assert runs and len(set(runs)) == len(runs) and '"answers"' not in json.dumps(found["runs"])
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["backbone"]["name"] == backbone and environment["setup"]["rows"] == rows
    if "answers.json.gz" in files:
        answers = json.loads(gzip.decompress((folder / "answers.json.gz").read_bytes()))
        assert {name.split("/")[0] for name in answers} <= set(runs)
        if "cells" in found:
            each = [tuple(cell["runs"]) for cell in found["cells"]]
            assert len(set(each)) == len(each) and {name for names in each for name in names} == set(answers)
        assert all(given for name, given in answers.items() if "automl" not in name)


def test_the_same_command_again_repeats_no_run(data: Path, backbone: str, results: Path) -> None:
    words = ["reproduce", "dropout", "--data-dir", str(data), "--backbone", backbone, "--out", str(results), *SMALL]
    well(*words)
    before = {path: path.stat().st_mtime_ns for path in (results / "runs").glob("*.json")}
    done = well(*words)
    assert before == {path: path.stat().st_mtime_ns for path in (results / "runs").glob("*.json")}
    assert ", 0 of them to do" in done.err


def test_several_at_once_share_their_runs_and_load_in_turn(
    data: Path, backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, own = [], lab.load_backbone

    def load(*args: Any, **kwargs: Any) -> tg.Backbone:
        threads.append(threading.current_thread())
        return own(*args, **kwargs)

    monkeypatch.setattr(lab, "load_backbone", load)
    words = [
        "reproduce",
        "hyper-glue,task-map",
        "--data-dir",
        str(data),
        "--backbone",
        backbone,
        "--out",
        str(tmp_path),
    ]
    words += [*SMALL, "--tasks", "cola,mrpc,rte"]
    record = json.loads(well(*words, "--workers", "2", "--json").out.splitlines()[-1])
    assert threads == 2 * [threading.main_thread()], "each has its own, which are loaded one after the other"
    assert [each["experiment"] for each in record["experiments"]] == ["hyper-glue", "task-map"]
    found = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("hyper-glue", "task-map")]
    runs, shared = ({run["name"] for run in each["runs"]} for each in found)
    assert shared < runs and len(list((tmp_path / "runs").glob("*.json"))) == len(runs)
    assert ", 0 of them to do" in well(*words).err, "the same as one after the other"


def test_of_several_at_once_one_that_fails_ends_all(data: Path, backbone: str, tmp_path: Path) -> None:
    words = ["reproduce", "task-map,low-resource", "--data-dir", str(data), "--backbone", backbone]
    words += ["--out", str(tmp_path), *SMALL, "--tasks", "cola,mrpc,rte", "--workers", "2", "--rows", "40"]
    done = taskgraft(*words)
    assert done.code == 2 and "--rows 40 is below the fewest rows of this experiment: 100" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "the experiment 'nothing' is unknown: use one of glue"),
        (["glue", "--tasks", "cola,poetry"], "task 'poetry' is not in this experiment"),
        (["glue", "--rows", "-1"], "Invalid value for '--rows'"),
        (["glue", "--pooling", "sum"], "--pooling sum is unknown"),
    ],
)
def test_what_is_refused(words: list[str], said: str, data: Path, backbone: str, tmp_path: Path) -> None:
    done: Done = taskgraft("reproduce", *words, "--data-dir", str(data), "--backbone", backbone, "--out", str(tmp_path))
    assert done.code == 2 and said in done.err


def test_data_that_is_not_there(backbone: str, tmp_path: Path) -> None:
    done = taskgraft("reproduce", "glue", "--data-dir", str(tmp_path), "--backbone", backbone, "--out", str(tmp_path))
    assert done.code == 2 and "none of the tasks" in done.err and "cola" in done.err


def test_tasks_whose_rows_are_not_at_hand_are_left_out_and_named(data: Path, backbone: str, tmp_path: Path) -> None:
    for kept in ("sms_spam", "crowdflower_airline"):
        shutil.copytree(data / "extra" / kept, tmp_path / "extra" / kept)
    words = ["reproduce", "classification", "--data-dir", str(tmp_path), "--backbone", backbone]
    done = well(*words, "--out", str(tmp_path / "out"), *SMALL)
    assert "Not at hand, and left out: 20_newsgroups, crowdflower_corporate_messaging" in done.out + done.err
    table = (tmp_path / "out/classification/table.md").read_text()
    assert "Left out, since their rows were not at hand: 20_newsgroups, " in table
    assert "| news_aggregator |" not in table
    asked = taskgraft(*words, "--tasks", "news_aggregator", "--out", str(tmp_path / "out"))
    assert asked.code == 2 and "needs the file" in asked.err


# -- data


def test_validation_is_held_out_of_train_and_the_published_validation_rows_are_reported(data: Path) -> None:
    task = load("rte", data, None)
    rows = pq.read_table(data / "glue/rte/validation.parquet")
    assert set(task.split("test")["text"].to_pylist()) == set(rows["sentence1"].to_pylist())
    assert (len(task.split("train")), len(task.split("validation"))) == (72, 8)
    assert load("mrpc", data, None).metrics == ("f1",) and load("stsb", data, None).metrics == ("spearman",)


def test_rows_are_capped_always_to_the_same(data: Path) -> None:
    task = load("cola", data, None)
    some = capped(task, 20)
    assert some.split("train").equals(capped(task, 20).split("train")) and len(some.split("train")) == 20
    assert some.split("test") is task.split("test") and some.notes[-1].startswith("20 of 72 training rows")
    assert capped(task, 72) is task


# -- the lab


def job(made: Lab, task: str = "rte", method: tg.Method | None = None, seed: int = 0, **changes: Any) -> Job:
    return Job(task, method or arms.adapter(made, 4), made.settings(task, 1e-3, 1, seed, **changes))


def test_a_run_is_known_by_all_that_decides_it(setup: Setup) -> None:
    made = Lab(setup)
    paths = {
        made.path(job(made)),
        made.path(job(made, seed=1)),
        made.path(job(made, label_smoothing=0.1)),
        made.path(job(made, method=arms.adapter(made, 4, dropout=0.1))),
        made.path(job(made, task="cola")),
        Lab(replace(setup, rows=30)).path(job(made)),
        made.path(Job("rte", None, made.settings("rte", None, None, 0))),
        Lab(replace(setup, configurations=7)).path(Job("rte", None, made.settings("rte", None, None, 0))),
    }
    assert len(paths) == 8
    assert Lab(setup).path(job(made)) == made.path(job(made, checkpoint_seconds=5.0)) == made.path(job(made))


def test_a_run_in_company_is_what_it_is_alone(setup: Setup, tmp_path: Path) -> None:
    """Without dropout, which draws by the company."""
    still = {"backbone_dropout": False, "head_dropout": 0.0}
    here, there = Lab(setup), Lab(replace(setup, runs=tmp_path))
    one = job(here, method=arms.adapter(here, 4, **still))
    other = job(here, task="cola", method=arms.adapter(here, 8, **still), seed=3)
    together, alone = here.run([one, other])[one], there.run([one])[one]
    assert (together["passes"]["runs"], alone["passes"]["runs"]) == (2, 1)
    assert together["answers"] == alone["answers"] and together["test"] == alone["test"]


def test_workers_do_what_one_process_does(setup: Setup, tmp_path: Path) -> None:
    full = tg.FullFineTuning(pooling="mean", backbone_dropout=False, head_dropout=0.0)
    here = Lab(replace(setup, runs=tmp_path / "a"))
    jobs = [job(here, method=full, seed=seed) for seed in range(2)]
    with Pool(2) as pool:
        one, two = here.run(jobs), Lab(replace(setup, runs=tmp_path / "b"), pool).run(jobs)
    assert [one[each]["answers"] for each in jobs] == [two[each]["answers"] for each in jobs]


def test_what_another_command_has_run_meanwhile_is_not_run_again(setup: Setup, tmp_path: Path) -> None:
    made = Lab(replace(setup, runs=tmp_path))
    known, new = job(made, method=arms.adapter(made, 4)), job(made, method=arms.adapter(made, 4), seed=1)
    made.keep(known, {"mark": "theirs"})
    lab.do(made, [known, new])
    assert (made.known(known) or {})["mark"] == "theirs"
    ran = made.known(new)
    assert ran is not None and ran["passes"]["runs"] == 1 and ran["settings"]["seed"] == 1
    lab.do(made, [known, new])
    assert made.known(new) == ran


def test_a_broken_record_is_told_of(setup: Setup) -> None:
    made = Lab(setup)
    broken = job(made, seed=99)
    made.path(broken).write_text("{")
    with pytest.raises(GraftError, match="delete it to do the run again"):
        made.run([broken])


def test_a_failed_run_is_a_record_and_is_not_chosen(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    made, fit = Lab(setup), lab.fit

    def broken(backbone: Any, task: Any, method: Any, **options: Any) -> Any:
        if options["settings"].learning_rate == 0.5:
            raise Diverged("the loss is no longer a number.")
        return fit(backbone, task, method, **options)

    monkeypatch.setattr(lab, "fit", broken)
    full = tg.FullFineTuning(pooling="mean")
    found = study.study(made, ["rte"], [Arm("full", (Option(full, 0.5, 1), Option(full, 1e-4, 1)))])
    cell = found.cell("full", "rte")
    assert cell.option.rate == 1e-4 and "no longer a number" in cell.tried[0]["error"]
    with pytest.raises(GraftError, match="no run of 'full' on 'rte' ended"):
        study.study(made, ["rte"], [Arm("full", (Option(full, 0.5, 1),))])


def test_large_tasks_have_fewer_passes(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Lab(replace(setup, epochs=None))
    assert made.settings("rte", 1e-3, 15, 0).epochs == 15
    monkeypatch.setattr(lab, "MOST_STEPS", 4)  # 40 rows, batches of 32
    assert made.settings("rte", 1e-3, 15, 0).epochs == 3 and made.settings("rte", 1e-3, 2, 0).epochs == 2
    assert Lab(replace(setup, epochs=None, full=True)).settings("rte", 1e-3, 15, 0).epochs == 15


# -- studies


@pytest.fixture
def told(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> tuple[Lab, list[Job]]:
    """A lab whose runs come to what their names say: nothing is trained."""
    made, asked = Lab(setup), list[Job]()

    def run(jobs: Any) -> dict[Job, dict[str, Any]]:
        found = {}
        for each in jobs:
            asked.append(each)
            rate = each.settings.learning_rate or 0.0
            right = made.task(each.task).split("test")["label"].to_pylist()
            found[each] = {
                "name": each.label, "validation": rate, "test": 1 - rate + each.settings.seed / 100, "error": None,
                "trained": 10, "answers": right, "passes": {"runs": 1, "seconds": 1.0, "first": each.label},
            }  # fmt: skip
        return found

    monkeypatch.setattr(made, "run", run)
    return made, asked


def test_validation_chooses_and_the_further_seeds_are_of_the_winner(told: tuple[Lab, list[Job]]) -> None:
    made, asked = told
    method = arms.adapter(made, 4)
    found = study.study(made, ["rte"], [Arm("a", (Option(method, 0.1, 1), Option(method, 0.3, 1)))])
    cell = found.cell("a", "rte")
    assert cell.option.rate == 0.3  # although its test score is the lower one
    assert cell.score == pytest.approx(0.705) and cell.error == pytest.approx(0.005)
    assert [(each.settings.learning_rate, each.settings.seed) for each in asked] == [
        (0.1, 0),
        (0.3, 0),
        (0.3, 0),
        (0.3, 1),
    ]


def test_the_best_seed_is_the_one_that_validation_picks(told: tuple[Lab, list[Job]]) -> None:
    made, _ = told
    found = study.study(made, ["rte"], [Arm("a", (Option(arms.adapter(made, 4), 0.1, 1),))])
    first, second = found.cell("a", "rte").runs
    first["validation"] = second["validation"] + 0.1  # although its test score is the lower one
    assert first["test"] < second["test"] and found.best_seeds().cell("a", "rte").runs == [first]
    assert found.cell("a", "rte").runs == [first, second]


def test_no_more_trials_than_asked_for(told: tuple[Lab, list[Job]]) -> None:
    made, asked = told
    study.study(made, ["rte"], [arms.full(made), arms.adapters(made)])
    settings = [(each.method, each.settings.learning_rate) for each in asked[:4]]  # two of each, on the first seed
    assert (
        len(asked) == 4 + 2 * made.setup.seeds
        and [m for m, _ in settings] == [settings[0][0]] * 2 + [settings[2][0]] * 2
    )


def test_full_fine_tuning_has_as_many_trials_as_the_others(setup: Setup) -> None:
    made = Lab(setup)
    arms_ = [arms.full(made), arms.adapters(made), arms.adapters_of(made, 64, "64"), arms.norms(made), arms.head(made)]
    assert {len(arm.options) for arm in arms_} == {6}


def test_the_papers_grid(setup: Setup) -> None:
    made = Lab(replace(setup, full=True))
    assert len(arms.adapters(made).options) == 18
    sizes = {option.method.size for option in arms.adapters(made).options if isinstance(option.method, tg.Adapter)}
    assert sizes == {8, 64, 256} and {option.rate for option in arms.adapters(made).options} == {3e-5, 3e-4, 3e-3}


def test_claim_a_needs_both_the_score_and_the_size(told: tuple[Lab, list[Job]]) -> None:
    made, _ = told
    found = study.study(made, ["rte"], [Arm(arms.FULL, (Option(tg.FullFineTuning(), 0.1, 1),)),
                                        Arm(arms.ADAPTERS, (Option(arms.adapter(made, 4), 0.1, 1),))])  # fmt: skip
    close, far = found.difference(arms.ADAPTERS, arms.FULL), replace(found.difference(arms.FULL, arms.FULL), mean=-0.01)
    assert close.mean == 0.0
    assert glue.claim_a(made, found, close)["holds"] and not glue.claim_a(made, found, far)["holds"]
    for cell in found.cells.values():
        for run in cell.runs:
            run["trained"] = 10**9
    assert not glue.claim_a(made, found, close)["holds"]


# -- tasks in company


def test_tasks_in_company_are_learned_in_one_run_and_count_by_their_metrics(setup: Setup) -> None:
    made = Lab(replace(setup, protocol="hyperformer", steps=2, trials=1))
    tasks = ["rte", "mrpc"]
    found = study.study(made, tasks, [company.arm(made, "a", company.hyperformer(made))], columns=True)
    assert len(found.records) == 2  # one a seed
    for task in tasks:
        runs = found.cell("a", task).runs
        assert [len(run["answers"]) for run in runs] == [made.task(task).split("test").num_rows] * 2
        assert runs[0]["trained"] == found.records[0]["trained"] // 2
        assert max(runs[0]["curve"]) == found.records[0]["validation"]
    columns = [company.mean_of(found, "a", *column) for column in company.columns_of(made, tasks)]
    assert len(columns) == 3 and found.average("a") == pytest.approx(sum(columns) / 3)
    assert found.average("a") == pytest.approx(sum(run["test"] for run in found.records) / 2)


@pytest.mark.parametrize("changes", [{}, {"projector": False}, {"conditional_norm": False}])
def test_how_far_task_embeddings_have_moved(changes: dict[str, Any], setup: Setup) -> None:
    made = Lab(replace(setup, protocol="hyperformer", steps=2, trials=1))
    tasks, method = ["cola", "mrpc", "rte"], company.hyperformer(made, **changes)
    found = {}
    for rate in (1e-12, 1e-2):
        settings = made.settings_together(rate, None, 1, own_rate=rate)
        run = made.run([Job(study.TOGETHER, method, settings, tuple(tasks))])
        found[rate] = task_map.learned_map(made, method, next(iter(run.values())), tasks)
    assert found[1e-12].moved < 1e-6 < 1e-3 < found[1e-2].moved
    assert found[1e-12].start == pytest.approx(found[1e-12].map.separation) == found[1e-2].start


def test_what_training_added_to_embeddings_is_told_apart_from_where_they_began(setup: Setup) -> None:
    made = Lab(replace(setup, protocol="hyperformer"))
    tasks, method = ["mrpc", "qqp", "rte"], company.hyperformer(made)
    first = task_map.first_embeddings(made, method, tasks, 3)
    added = {"mrpc": (3.0, 0.0), "qqp": (3.0, 1.0), "rte": (0.0, 0.0)}  # two of one group side by side, one of another
    last = {name: [first[name][0] + x, first[name][1] + y, *first[name][2:]] for name, (x, y) in added.items()}
    found = task_map.learned_map(made, method, {"seed": 3, "embeddings": last}, tasks)
    assert found.added == pytest.approx((3 + 10**0.5) / 2)
    assert found.start == task_map.learned_map(made, method, {"seed": 3, "embeddings": first}, tasks).map.separation
    lengths = [sum(value**2 for value in first[name]) ** 0.5 for name in tasks]
    assert found.moved == pytest.approx((3 / lengths[0] + 10**0.5 / lengths[1]) / 3)


def test_of_all_groupings_so_many_lie_as_far_apart() -> None:
    groups = {"a": "x", "b": "x", "c": "y", "d": "y"}
    apart = {"a": [0.0, 0.0], "b": [0.1, 0.0], "c": [5.0, 0.0], "d": [5.1, 0.0]}
    assert task_map.chance(apart, groups) == pytest.approx(1 / 3)  # of three ways to make two pairs
    mixed = {"a": apart["a"], "c": apart["b"], "b": apart["c"], "d": apart["d"]}
    assert task_map.chance(mixed, groups) == 1.0


def test_on_a_model_that_writes_a_new_task_is_also_learned_under_other_numbers_and_for_longer(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = [way if way.name != "longer" else replace(way, sizes=(16,)) for way in few_shot.WAYS]
    monkeypatch.setattr(few_shot, "WAYS", tuple(ways))
    tasks = ("cola", "mrpc", "trec")
    made = Lab(Setup(tmp_path, "made", data, rows=20, seeds=1, epochs=1, trials=1, steps=2, tasks=tasks,
                     protocol="hyperformer"))  # fmt: skip
    made.__dict__["backbone"] = tiny.writer()
    report = few_shot.run(made)
    assert set(report.found) == {"published", "remapped", "longer"}
    steps = {run["name"].rpartition(".")[0]: run["steps"] for run in report.runs}  # less its key
    for ending, times in (("remapped", 1), ("longer", 5)):
        ended = {name.removesuffix(f".{ending}"): count for name, count in steps.items() if name.endswith(ending)}
        assert len(ended) == 3 and all(count == times * steps[name] for name, count in ended.items())
    assert len(steps) == 3 * (2 + 1 + 1)  # methods, sizes
    assert len(list((tmp_path / "joints").glob("together.*"))) == 3
    shutil.rmtree(tmp_path / "joints")
    again = Lab(made.setup)
    again.__dict__["backbone"] = made.backbone
    assert few_shot.run(again).found == report.found
    assert not (tmp_path / "joints").exists()  # weights are for what is left to do


def test_a_new_task_begins_after_short_and_after_long_runs_in_company_at_the_rate_of_the_short_ones(
    setup: Setup, tmp_path: Path
) -> None:
    tasks = ("cola", "mrpc", "trec")
    made = Lab(replace(setup, runs=tmp_path, rows=16, seeds=2, steps=8, tasks=tasks, protocol="hyperformer"))
    report = few_shot_steps.run(made)
    assert list(report.found) == ["2", "8"] and len({run["name"] for run in report.runs}) == len(report.runs)
    assert len(report.runs) == 2 * 3 * 2 * 2  # lengths, methods, sizes, seeds
    kept = [json.loads(path.read_bytes()) for path in tmp_path.glob("together.*.json")]
    assert sorted(run["steps"] for run in kept) == [2] * 6 + [8] * 3  # two rates were tried on short runs alone
    for length in (2, 8):
        scores = {arm: report.found[str(length)]["means"][arm] for arm in shots.METHODS}
        assert all(len(each) == 2 and all(0 <= score <= 1 for score in each) for each in scores.values())
        gaps = [100 * (a - b) for a, b in zip(scores[company.PLUS], scores[company.DAGGER], strict=True)]
        mean, off = sum(gaps) / 2, 12.7062 * abs(gaps[0] - gaps[1]) / 2  # Student's 97.5 % for two seeds
        said = f"{mean:+.1f} ({mean - off:+.1f} to {mean + off:+.1f})"
        assert f"{said} against {company.DAGGER}" in report.found[str(length)]["sentence"]
        above = sum(
            own > max(others) for own, *others in zip(*(scores[arm] for arm in reversed(shots.METHODS)), strict=True)
        )
        title = next(n for n, part in enumerate(report.sections) if f"After {length} steps" in part)
        assert re.search(rf"\| trec .*\| *{re.escape(said)} \| *{above} of 2 \|", report.sections[title + 2])
    summary = next(section for section in report.sections if section.startswith("## By steps in company"))
    short, long = (report.found[name]["means"] for name in ("2", "8"))
    for arm in shots.METHODS:
        changes = [100 * (b - a) for a, b in zip(short[arm], long[arm], strict=True)]
        assert re.search(rf"\| {re.escape(arm)} .*{re.escape(f'{sum(changes) / 2:+.1f} (')}", summary)
    drawing = report.figures["few-shot-steps"]
    drawing.draw_without_rendering()
    assert drawing.legends[0].get_window_extent().x1 < drawing.bbox.x1  # six long names
    looks = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in drawing.axes[0].lines}
    for arm in shots.METHODS:
        (colour, one), (same, other) = looks[f"{arm}, 2 steps"], looks[f"{arm}, 8 steps"]
        assert colour == same and (one, other) == ("--", "-")
    assert len({colour for colour, _ in looks.values()}) == 3
    fuller = few_shot.run(Lab(replace(made.setup, steps=2)))
    assert {run["name"] for run in fuller.runs} < {run["name"] for run in report.runs}  # what is short is shared


def test_short_and_long_runs_are_compared_on_all_tasks_and_without_the_one_that_is_learned_last(setup: Setup) -> None:
    tasks = ("cola", "mrpc")
    report = hyper_steps.run(Lab(replace(setup, protocol="hyperformer", steps=8, tasks=tasks)))
    found = report.found
    assert re.search(
        r"multi-task, full, 8 steps *\| *1\.0[0-9]x", "\n".join(report.sections)
    )  # not 2: nothing is frozen
    with_embeddings = [hyper_steps.named(name, n) for name in (company.HYPER, company.PLUS) for n in (2, 8)]
    assert list(found["maps"]) == with_embeddings
    assert all(curve[-1][2] > 0 for curve in found["curves"].values())  # a deviation, over two seeds
    scores = {name: {steps: mean for steps, mean, _ in curve} for name, curve in found["curves"].items()}
    assert all(list(curve) == [2, 8] for curve in scores.values())
    others = [name for name in scores if name != company.PLUS]
    assert len(others) == 3 and len(found["gaps"]) == 2 * len(others)
    for other in others:
        whole, without = (found["gaps"][f"HyperFormer++ less {other}{end}"] for end in ("", ", without cola"))
        for steps in (2, 8):
            difference = scores[company.PLUS][steps] - scores[other][steps]
            assert whole[str(steps)]["mean"] == pytest.approx(difference)
            cells = {(cell["arm"], cell["task"]): cell["score"] for cell in found["cells"]}
            on_mrpc = [cells[hyper_steps.named(name, steps), "mrpc"] for name in (company.PLUS, other)]
            assert without[str(steps)]["mean"] == pytest.approx(on_mrpc[0] - on_mrpc[1])
        for each in (whole, without):
            assert each["change"]["mean"] == pytest.approx(each["8"]["mean"] - each["2"]["mean"])
            assert each["change"]["low"] < each["change"]["mean"] < each["change"]["high"]
    for name, gain in found["gains"].items():
        assert gain["mean"] == pytest.approx(scores[name][8] - scores[name][2])


def test_the_papers_steps_and_warm_up(setup: Setup) -> None:
    settings = Lab(replace(setup, full=True, steps=2**18, epochs=None)).settings_together(3e-4, None, 0)
    assert (settings.epochs or 0) * (settings.epoch_steps or 0) == 2**18 and settings.batch_size == 32
    assert settings.warmup * 2**18 == 500 and settings.weight_decay == 0
    assert settings.batches == "single" and settings.epsilon == 1e-8
    made = Lab(replace(setup, full=True, protocol="hyperformer"))
    single = company.alone(made, "alone", company.adapter(made, "own"), ["cola", "rte"])
    assert dict(single.options[0].changes)["epsilon"] == 1e-8


@pytest.mark.parametrize("full", [False, True])
def test_no_two_lines_are_the_same_run(full: bool, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Lab(replace(setup, full=full, protocol="hyperformer", tasks=("cola", "mrpc")))

    def listed(made: Lab, tasks: Any, lines: Any, columns: bool) -> Any:
        options = [option for line in lines for option in line.options]
        jobs = [(o.method, made.settings_together(o.rate, o.epochs, 0, **dict(o.changes))) for o in options]
        assert len(jobs) > 5 and all(jobs.count(each) == 1 for each in jobs)
        raise InterruptedError

    monkeypatch.setattr(hyper_start, "study", listed)
    with pytest.raises(InterruptedError):
        hyper_start.run(made)


def test_re_mapped_classes_are_the_same_rows_under_other_numbers(data: Path) -> None:
    task = load("trec", data, None, "hyperformer")
    other = shots.remapped(task)
    assert set(other.labels) == set(task.labels) and all(a != b for a, b in zip(task.labels, other.labels, strict=True))
    for split, table in task.splits.items():
        before = [task.labels[number] for number in table["label"].to_pylist()]
        assert before == [other.labels[number] for number in other.split(split)["label"].to_pylist()]


def test_other_draws_are_other_rows_of_the_same_task(setup: Setup) -> None:
    made = Lab(setup)
    one, other = (made.at(40, draw, 12).task("qqp") for draw in (0, 1))
    assert one.split("train") != other.split("train") and one.split("train").num_rows == other.split("train").num_rows
    assert one.split("test") == other.split("test") and one.split("validation") == other.split("validation")
    assert one.split("test").num_rows == 12 < made.task("qqp").split("test").num_rows


# -- spans


def test_a_span_without_its_adapters_is_the_model_without_them(setup: Setup) -> None:
    made = Lab(setup)
    task = made.task("rte")
    graft = tg.train(made.backbone, task, arms.adapter(made, 4), epochs=1)
    for value in graft.tensors.values():
        torch.nn.init.normal_(value, std=0.1)
    layers = arms.layers(made)
    bare = span_ablation.without(graft, 0, layers - 1)
    texts, pairs = task.split("test")["text"].to_pylist(), task.split("test")["pair"].to_pylist()

    def said(what: tg.Graft) -> np.ndarray[Any, Any]:
        return np.array(
            [list((row.probabilities or {}).values()) for row in tg.predict(made.backbone, what, texts, pairs)]
        )

    kept = {name: value for name, value in graft.tensors.items() if not name.startswith("encoder.")}
    norms = replace(graft, method=tg.NormsOnly(pooling="mean"), tensors=kept)
    assert np.allclose(said(bare), said(norms), atol=1e-6)
    one = span_ablation.without(graft, 1, 1)
    assert not np.allclose(said(one), said(graft), atol=1e-3) and not np.allclose(said(one), said(bare), atol=1e-3)


def test_the_size_of_a_branch_is_what_it_adds(setup: Setup) -> None:
    made = Lab(setup)
    task = made.task("rte")
    graft = tg.train(made.backbone, task, arms.adapter(made, 4), epochs=1)
    nothing = span_ablation.without(graft, 0, arms.layers(made) - 1)
    assert np.allclose(span_ablation.branch_sizes(made, nothing, task), 0)
    first = {f"encoder.0.attention.{weight}" for weight in ("up", "up_bias")}
    tensors = {name: 2 * value if name in first else value for name, value in graft.tensors.items()}
    doubled = replace(graft, tensors=tensors)
    before, after = (span_ablation.branch_sizes(made, each, task) for each in (graft, doubled))
    assert after[0][0] == pytest.approx(2 * before[0][0], rel=1e-4) and before[0][0] > 0
