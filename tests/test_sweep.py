"""Sweeps: the grid and its names, what is chosen and by what, runs that are not repeated, and the pictures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

import taskgraft as tg
from taskgraft.names import check_task_name
from taskgraft.reports.sweeps import MOST_ROWS, Ranking, draw_sweep, markdown, rate_text, rich_table, sweep_figure
from taskgraft.training.grid import Grid, label_of, trials_of
from taskgraft.training.many import fit_many
from taskgraft.training.sweep import Point, Sweep, ranked

import tiny

FAST: dict[str, Any] = {"epochs": 1, "batch_size": 16, "progress": False}


def grid_of(*tasks: tg.Task, paper: bool = False, settings: tg.Settings | None = None, **axes: Any) -> list[Any]:
    return trials_of(tiny.backbone(), tasks or [tiny.task(count=48)], Grid.of(**axes), settings or tg.Settings(), paper)


def run_of(method: str = "adapter-8", rate: float = 1e-3, epochs: int = 3, seed: int = 0, validation: float = 0.8,
           test: float | None = 0.8, error: str | None = None, task: str = "mood") -> dict[str, Any]:  # fmt: skip
    """A record as a sweep keeps it."""
    size = int(method.split("-")[1]) if method.startswith(("adapter-", "paper-")) else None
    name = f"{task}.{method}.{rate_text(rate)}.{epochs}ep.seed{seed}"
    record = {"name": name, "task": task, "method": method, "size": size, "rate": rate, "epochs": epochs, "seed": seed}
    scores = {"validation": validation, "test": test, "trained": 1000 * (size or 1), "seconds": 2.0}
    return {**record, **(dict.fromkeys(scores) if error else scores), "error": error}


def best_of(*runs: dict[str, Any]) -> Point:
    return Sweep(("mood",), list(runs), {}).best()


# -- the grid


def test_every_combination_is_a_trial_with_a_name_that_says_which() -> None:
    trials = grid_of(sizes=(8, 64), rates=(3e-4, 0.002), epochs=(3, 20), seeds=2)
    assert len(trials) == 16 and len({trial.name for trial in trials}) == 16
    assert trials[0].name == "mood.adapter-8.3e-4.3ep.seed0" and trials[-1].name == "mood.adapter-64.2e-3.20ep.seed1"
    for trial in trials:
        check_task_name(trial.name)
        _, method, rate, epochs, seed = trial.name.split(".")
        assert trial.method == tg.Adapter(size=int(method.removeprefix("adapter-")))
        assert trial.settings.learning_rate == float(rate) and f"{trial.settings.epochs}ep" == epochs
        assert f"seed{trial.settings.seed}" == seed


def test_what_is_not_given_is_the_default_of_the_method_and_the_task() -> None:
    (trial,) = grid_of()
    resolved = tg.Settings().resolved(tg.Adapter(), "classification", 48)
    assert trial.name == "mood.adapter-64.2e-3.20ep.seed0"
    assert (trial.settings.learning_rate, trial.settings.epochs) == (resolved.learning_rate, resolved.epochs)
    (own,) = grid_of(settings=tg.Settings(learning_rate=1e-3, epochs=2, seed=7, batch_size=4))
    assert own.name == "mood.adapter-64.1e-3.2ep.seed7" and own.settings.batch_size == 4
    assert [trial.settings.seed for trial in grid_of(seeds=[5, 3])] == [5, 3]


def test_sizes_are_those_of_adapters_alone() -> None:
    trials = grid_of(methods=("adapter", "paper", "norms", "head-16"), sizes=(4, 8))
    labels = [label_of(trial.method) for trial in trials]
    assert labels == ["adapter-4", "adapter-8", "paper-4", "paper-8", "norms", "head-16"]
    assert trials[2].method == tg.Adapter.paper(4), "the backbone's dropout is on"


def test_methods_are_named_or_given_and_the_same_one_is_tried_once() -> None:
    odd = tg.Adapter(activation="relu")
    trials = grid_of(methods=["adapter", tg.Adapter(size=64), "adapter-64", odd, "norms@0.01"], rates=None)
    labels = [label_of(trial.method) for trial in trials]
    assert labels[0] == "adapter-64" and labels[1].startswith("adapter-64-") and labels[2:] == ["norms"]
    assert trials[1].method == dataclasses.replace(odd, size=64) and trials[2].settings.learning_rate == 0.01
    assert len(grid_of(methods=odd, sizes=(4, 8))) == 2
    assert len(grid_of(rates=(1e-3, 0.001, 0.0010), sizes=[8, 8])) == 1
    (reduced,) = grid_of(methods=tg.Adapter(reduction=4))
    assert reduced.method == tg.Adapter(reduction=4)


def test_names_stay_valid_and_apart_however_long_the_tasks_are() -> None:
    tasks = [tiny.task(count=24, name="é" * 63 + end) for end in ("a", "b")]
    names = [trial.name for trial in grid_of(*tasks, rates=1e-3, epochs=3)]
    assert len(set(names)) == 2
    for name in names:
        check_task_name(name)
        assert name.endswith(".adapter-64.1e-3.3ep.seed0")
    assert [rate_text(rate) for rate in (3e-5, 0.0003, 0.00025, 1, 1.5, 1e-3)] == [
        "3e-5", "3e-4", "2.5e-4", "1e0", "1.5e0", "1e-3",
    ]  # fmt: skip


def test_the_papers_grids() -> None:
    glue = grid_of(paper=True)
    assert len(glue) == 3 * 3 * 2 * 5 and all(trial.method.backbone_dropout for trial in glue)
    assert {trial.method for trial in glue} == {tg.Adapter.paper(m) for m in (8, 64, 256)}
    assert {trial.settings.learning_rate for trial in glue} == {3e-5, 3e-4, 3e-3}
    assert {trial.settings.epochs for trial in glue} == {3, 20}
    assert {trial.settings.seed for trial in glue} == set(range(5))
    assert glue[0].settings.batch_size == 32 and glue[0].settings.average == 0, "as published"
    spam = dataclasses.replace(tiny.task(count=48), source="classification/sms_spam from data")
    further = grid_of(spam, paper=True)
    assert len(further) == 6 * 4 * 3 * 5
    assert {trial.settings.learning_rate for trial in further} == {1e-5, 3e-5, 1e-4, 3e-3}
    assert {trial.settings.epochs for trial in further} == {20, 50, 100}
    assert {trial.method.size for trial in further} == {2, 4, 8, 16, 32, 64}
    assert len(grid_of(tiny.task("spans", 24), paper=True)) == 2 * 4 * 3 * 5
    less = grid_of(paper=True, sizes=8, seeds=1, settings=tg.Settings(batch_size=8))
    assert len(less) == 6 and less[0].settings.batch_size == 8, "what is said goes before the paper"


# -- choosing


def test_the_choice_is_by_the_mean_of_validation_and_never_by_test() -> None:
    chosen = best_of(
        run_of(rate=1e-3, seed=0, validation=0.80, test=0.99), run_of(rate=1e-3, seed=1, validation=0.82, test=0.97),
        run_of(rate=3e-3, seed=0, validation=0.79, test=0.70), run_of(rate=3e-3, seed=1, validation=0.85, test=0.60),
        run_of(rate=9e-3, seed=0, validation=0.90, test=0.50), run_of(rate=9e-3, seed=1, validation=0.60, test=0.50),
    )  # fmt: skip
    assert chosen.rate == 3e-3 and chosen.validation == pytest.approx(0.82)
    assert (chosen.lowest, chosen.highest) == (0.79, 0.85) and chosen.kept == "mood.adapter-8.3e-3.3ep.seed1"
    assert chosen.test == pytest.approx(0.65) and chosen.error == pytest.approx(0.05), "sd 0.0707 over the root of 2"


def test_ties_go_to_fewer_parameters_then_to_fewer_epochs() -> None:
    large, small = run_of("adapter-64", epochs=3), run_of("adapter-8", epochs=20)
    assert best_of(large, small).method == "adapter-8"
    assert best_of(small, run_of("adapter-8", epochs=3), large).epochs == 3
    pair = [run_of("adapter-64", seed=s, validation=v) for s, v in enumerate((0.85, 0.85))]
    wide = [run_of("adapter-8", seed=s, validation=v) for s, v in enumerate((0.8, 0.9))]
    assert best_of(*pair, *wide).method == "adapter-8", "a last bit of a mean is no reason"


def test_a_setting_with_a_failed_seed_stands_behind_those_without() -> None:
    nan = "the loss became nan"
    lucky = [run_of(rate=1e-1, seed=0, validation=0.99), run_of(rate=1e-1, seed=1, error=nan)]
    sound = [run_of(rate=1e-3, seed=s, validation=0.7) for s in (0, 1)]
    lost = [run_of(rate=1.0, seed=s, error=nan) for s in (0, 1)]
    order = ranked([*lost, *lucky, *sound])
    assert [point.rate for point in order] == [1e-3, 1e-1, 1.0]
    assert (order[1].seeds, order[1].failed, order[1].validation) == ((0,), (1,), 0.99)
    assert best_of(*lucky, *lost).rate == 1e-1
    with pytest.raises(tg.GraftError, match="no run of task 'mood' ended, so there is none to choose: the loss became"):
        best_of(*lost)


def test_one_seed_has_no_error_and_no_test_rows_no_test_score() -> None:
    chosen = best_of(run_of(test=None))
    assert (chosen.test, chosen.error) == (None, None) and best_of(run_of(test=0.5)).error is None


def test_a_task_is_named_where_there_are_several() -> None:
    both = Sweep(("mood", "tone"), [run_of(), run_of(task="tone")], {})
    assert both.best("tone").task == "tone"
    with pytest.raises(tg.GraftError, match="2 tasks: name one of mood, tone"):
        both.best()
    with pytest.raises(tg.GraftError, match="'moood' is not in this sweep: mood, tone are"):
        both.best("moood")


# -- running


def test_a_sweep_of_two_tasks_trains_each_run_as_if_alone_and_keeps_the_best(tmp_path: Path) -> None:
    backbone, tasks = tiny.backbone(), [tiny.task(count=48), tiny.task("regression", 48, "price")]
    found = tg.sweep(backbone, tasks, sizes=(2, 4), rates=(1e-3, 1e-2), run=tmp_path / "s", **FAST)
    assert found.tasks == ("mood", "price") and len(found.runs) == 8
    for task in tasks:
        best = found.best(task.name)
        rows = [run for run in found.runs if run["task"] == task.name]
        assert best.validation == max(run["validation"] for run in rows) and best.graft is not None
        alone = tg.fit(backbone, task, tg.Adapter(size=best.size), learning_rate=best.rate, **FAST)
        assert best.graft.name == task.name and best.trained == alone.trained == best.graft.parameters
        assert alone.graft is not None
        for name, value in alone.graft.tensors.items():
            assert (best.graft.tensors[name] - value).abs().max() < 1e-5
        run = next(run for run in rows if run["name"] == best.kept)
        assert run["test"] == pytest.approx(alone.score, abs=1e-3) and run["steps"] == alone.steps == 3
        assert run["epoch"] == run["epochs"] == 1 and run["seconds"] > 0 and run["error"] is None
        chosen = best.graft.training["sweep"]
        assert (chosen["runs"], chosen["chosen_by"], chosen["rate"]) == (4, "validation", best.rate)
    record = json.loads((tmp_path / "s" / "runs.json").read_text())
    assert record["runs"] and {run["name"] for run in record["runs"]} == {run["name"] for run in found.runs}
    assert record["best"]["mood"]["kept"] == found.best("mood").kept


def test_no_run_is_repeated_and_a_larger_grid_adds_to_what_is_there(tmp_path: Path) -> None:
    backbone, task, seen = tiny.backbone(), tiny.task(count=48), []

    def swept(*rates: float, **options: Any) -> tg.Sweep:
        seen.clear()
        return tg.sweep(backbone, task, sizes=2, rates=rates, run=tmp_path, on_run=seen.append, **{**FAST, **options})

    first = swept(1e-3, 1e-2)
    before = (tmp_path / "runs.json").read_bytes()
    again = swept(1e-3, 1e-2)
    assert again.runs == first.runs, "even their seconds are the same"
    assert (tmp_path / "runs.json").read_bytes() == before and len(seen) == 2
    more = swept(1e-2, 3e-2)
    assert more.runs[0] == first.runs[1] and len(more.runs) == 2
    assert len(json.loads((tmp_path / "runs.json").read_text())["runs"]) == 3, "what is paid for is kept"
    with pytest.raises(tg.GraftError, match="holds runs of other settings: use another folder"):
        swept(1e-3, batch_size=8)
    with pytest.raises(tg.GraftError, match="holds runs of another task 'mood'"):
        tg.sweep(backbone, tiny.task(count=48, seed=1), run=tmp_path, **FAST)
    other = tiny.backbone()
    other.model.embeddings.word_embeddings.weight.data += 1
    with pytest.raises(tg.GraftError, match="holds runs of another backbone"):
        tg.sweep(other, task, run=tmp_path, **FAST)
    (tmp_path / "runs.json").write_text("[1]")
    with pytest.raises(tg.GraftError, match="does not hold the runs of a sweep"):
        swept(1e-3)


def test_a_run_that_diverges_is_recorded_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, task = tiny.backbone(), tiny.task(count=48)
    wild: dict[str, Any] = {**FAST, "sizes": 2, "clip_norm": 1e30}
    found = tg.sweep(backbone, task, rates=(1e-3, 1e30), run=tmp_path, **wild)
    lost = found.runs[1]
    assert found.best().rate == 1e-3 and "became" in lost["error"] and lost["validation"] is None
    given: list[str] = []

    def watched(backbone: Any, trials: Any, **options: Any) -> Any:
        given.extend(trial.name for trial in trials)
        return fit_many(backbone, trials, **options)

    monkeypatch.setattr("taskgraft.training.sweep.fit_many", watched)
    assert tg.sweep(backbone, task, rates=(1e-3, 1e30), run=tmp_path, **wild).runs == found.runs
    assert given == ["mood.adapter-2.1e-3.1ep.seed0"]
    for _ in range(2):
        with pytest.raises(tg.GraftError, match=r"none of the 2 runs of the sweep ended; the first: .* became"):
            tg.sweep(backbone, task, rates=(1e29, 1e30), run=tmp_path / "lost", **wild)


def test_methods_that_disagree_on_dropout_are_swept_all_the_same() -> None:
    found = tg.sweep(tiny.backbone(), tiny.task(count=48), methods=["adapter-2", "paper-2", "norms", "head"], **FAST)
    assert [run["method"] for run in found.runs] == ["adapter-2", "paper-2", "norms", "head"]
    assert [run["size"] for run in found.runs] == [2, 2, None, None]


def without(split: str) -> tg.Task:
    task = tiny.task(count=24)
    return dataclasses.replace(task, splits={name: rows for name, rows in task.splits.items() if name != split})


@pytest.mark.parametrize(
    ("tasks", "options", "sentence"),
    [
        ([], {}, "there is no task to sweep"),
        ("mood.csv", {}, r"'mood.csv' is not a task: read one with tg.load_task"),
        (["mood.csv"], {}, r"'mood.csv' is not a task: read one with tg.load_task"),
        ([tiny.task(count=24)] * 2, {}, "two tasks are called 'mood'"),
        (without("validation"), {}, r"no validation rows to choose by: hold some out with validation=0\.1"),
        (without("train"), {}, "no train rows"),
        (None, {"methods": ["adptr"]}, "method 'adptr' is unknown"),
        (None, {"methods": [3]}, "3 is not a method"),
        (None, {"methods": []}, r"methods=\[\] leaves nothing to run"),
        (None, {"methods": "full"}, "'full' changes the backbone that the runs of a sweep share: measure it with"),
        (None, {"methods": tg.TopLayers(k=1)}, "'top-layers' changes the backbone"),
        (None, {"methods": "hyperformer"}, "'hyperformer' has weights that several tasks share"),
        (None, {"methods": "dagger"}, "'dagger' has weights that several tasks share"),
        (None, {"methods": "adapter-8", "sizes": 4}, "'adapter-8' has a size of its own, and sizes were given"),
        (None, {"methods": tg.Adapter(reduction=4), "sizes": 4}, "has a size of its own"),
        (None, {"methods": "norms", "sizes": 4}, "no method is one: leave them out, or add 'adapter'"),
        (None, {"methods": "norms@0.1", "rates": 0.2}, "'norms@0.1' has a rate of its own, and rates were given"),
        (None, {"sizes": (4, 0)}, "size=0 must be a whole number of at least 1"),
        (None, {"rates": (1e-3, -1.0)}, r"learning_rate=-1\.0 must be above 0"),
        (None, {"epochs": 0}, "epochs=0 must be a whole number"),
        (None, {"seeds": 0}, "leaves nothing to run"),
        (None, {"seeds": [-1]}, "seed=-1 must be a whole number"),
        (None, {"batchsize": 4}, "batchsize"),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(tasks: Any, options: Any, sentence: str, tmp_path: Path) -> None:
    task = tiny.task(count=24) if tasks is None else tasks
    with pytest.raises(tg.GraftError, match=sentence) as caught:
        tg.sweep(tiny.backbone(), task, run=tmp_path / "new", **{"epochs": 1, **options})
    assert "\n" not in str(caught.value) and not (tmp_path / "new").exists()


# -- the table and the figure


def made(task: str = "mood", sizes: tuple[int, ...] = (8, 64), rates: tuple[float, ...] = (1e-4, 1e-3, 1e-2),
         epochs: tuple[int, ...] = (3, 20), seeds: int = 2, more: Any = ()) -> Ranking:  # fmt: skip
    runs = [
        run_of(f"adapter-{m}", r, e, s, 0.8 + m / 1e3 - abs(r - 1e-3) + e / 1e3 + s / 1e2, 0.7, task=task)
        for m in sizes for r in rates for e in epochs for s in range(seeds)
    ]  # fmt: skip
    return Ranking(task, "accuracy", ranked([*runs, *more]))


def curves(figure: Figure, panel: int = 0) -> dict[str, list[float]]:
    """Of each line of a panel its heights, by colour; a ring is of no line."""
    lines = [line for line in figure.axes[panel].lines if line.get_label() != "chosen"]
    return {str(line.get_color()): [float(y) for y in line.get_ydata()] for line in lines}


def test_the_table_has_the_chosen_setting_first_and_says_what_failed() -> None:
    ranking = made(more=[run_of("norms", 1e-1, 3, seed, error="it became nan") for seed in (0, 1)])
    text = markdown([ranking, made("tone")], ["mood.norms: it became nan"])
    lines = text.splitlines()
    assert lines[0] == "## mood: accuracy" and lines[4].startswith("| **adapter-64** | 1e-3 |     20 |")
    assert "0.889 (0.884 to 0.894)" in lines[4] and "0.700 ± 0.000" in lines[4] and text.count("**") == 4
    assert "failed" in lines[16] and "0 of 2" in lines[16], "last: no seed ended"
    assert "## tone: accuracy" in lines and "- mood.norms: it became nan" in lines
    shown = rich_table(ranking)
    assert shown.row_count == MOST_ROWS and shown.caption == "and 1 more settings"
    assert str(next(iter(shown.columns[0].cells))) == "*"


def test_a_line_is_a_size_and_a_point_the_best_epochs_at_a_rate() -> None:
    figure = sweep_figure([made()], title="A title", subtitle="below")
    blue, orange = curves(figure).values()
    assert blue == pytest.approx([0.8 + 0.008 - d + 0.02 + 0.005 for d in (9e-4, 0, 9e-3)])
    assert max(orange) == pytest.approx(0.889)
    axes = figure.axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1e-4", "1e-3", "1e-2"]
    (ring,) = [line for line in axes.lines if line.get_label() == "chosen"]
    assert ring.get_ydata()[0] == pytest.approx(0.889) and ring.get_xdata()[0] == pytest.approx(1e-3, rel=0.1)
    whiskers = [segment[:, 1] for bars in axes.collections for segment in bars.get_segments()]  # type: ignore[attr-defined]
    assert len(whiskers) == 6 and all(top - bottom == pytest.approx(0.01) for bottom, top in whiskers)
    assert [text.get_text() for text in figure.texts] == ["A title", "below; each point the best of 3 and 20 epochs"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["adapter-8", "adapter-64", "chosen"]


def test_sizes_go_along_x_where_only_they_vary_and_then_epochs() -> None:
    norms = run_of("norms", 1e-3, 3, validation=0.95)
    figure = sweep_figure([made(rates=(1e-3,), epochs=(3,), more=[norms])], title="", subtitle="")
    axes = figure.axes[0]
    assert axes.get_xlabel() == "adapter size"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["8", "64"]
    assert [0.95, 0.95] in list(curves(figure).values()), "a method without a size is a level"
    assert [y for line in axes.lines if line.get_label() == "chosen" for y in line.get_ydata()] == [0.95]
    epochs = sweep_figure([made(sizes=(8,), rates=(1e-3,))], title="", subtitle="")
    assert epochs.axes[0].get_xlabel() == "epochs" and epochs.texts[1].get_text() == ""
    alone = sweep_figure([made(sizes=(8,), rates=(1e-3,), epochs=(3,))], title="", subtitle="")
    assert alone.axes[0].get_xlabel() == "learning rate"


def test_each_task_has_a_panel_and_nothing_hides_anything() -> None:
    names = ["mood", "crowdflower_economic_news_relevance", "price", "tone"]
    lost = Ranking("lost", "accuracy", ranked([run_of(task="lost", error="it became nan")]))
    figure = sweep_figure([*(made(name) for name in names), lost], title="5 tasks", subtitle="all")
    figure.draw_without_rendering()
    assert len(figure.axes) == 5 and [text.get_text() for text in figure.axes[4].texts] == ["no run ended"]
    titles = [axes.title if axes.get_title() else axes._left_title for axes in figure.axes]  # type: ignore[attr-defined]
    boxes = [title.get_window_extent() for title in titles]
    boxes += [figure.legends[0].get_window_extent(), *(text.get_window_extent() for text in figure.texts)]
    boxes += [label.get_window_extent() for axes in figure.axes for label in (axes.xaxis.label, axes.yaxis.label)]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
    for axes in figure.axes[:4]:
        ticks = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
        assert not any(a.overlaps(b) for i, a in enumerate(ticks) for b in ticks[:i])


def test_the_files_are_pictures(tmp_path: Path) -> None:
    for name in ("a.png", "a.svg"):
        draw_sweep([made()], tmp_path / name, title="A", subtitle="b")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and len((tmp_path / "a.png").read_bytes()) > 10_000
    assert "<svg" in (tmp_path / "a.svg").read_text()[:600]
    with pytest.raises(tg.GraftError, match=r"cannot be written as 'a\.pdf'"):
        draw_sweep([made()], tmp_path / "a.pdf", title="", subtitle="")
    with pytest.raises(tg.GraftError, match="does not exist"):
        draw_sweep([made()], tmp_path / "no" / "a.png", title="", subtitle="")
