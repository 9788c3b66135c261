"""The task map: it keeps distances, its numbers are the embeddings' own, and every task can be read off the picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.figure import Figure
from sklearn.decomposition import PCA

import taskgraft as tg
from taskgraft.reports.taskmap import TaskMap, task_map, task_map_figure

GROUPS = {
    "cola": "single sentence", "sst2": "single sentence", "mrpc": "similarity", "qqp": "similarity",
    "stsb": "similarity", "mnli": "inference", "qnli": "inference", "rte": "inference",
}  # fmt: skip
Embeddings = dict[str, npt.NDArray[np.float64]]


def clustered(groups: dict[str, str], spread: float = 0.6, seed: int = 0) -> Embeddings:
    """Embeddings of 64 numbers, each near the centre of its group."""
    random = np.random.default_rng(seed)
    centres = {group: random.normal(size=64) for group in dict.fromkeys(groups.values())}
    return {task: centres[group] + spread * random.normal(size=64) for task, group in groups.items()}


MANY = {f"task_{i}": f"group {i % 4}" for i in range(24)}


def test_pca_agrees_with_scikit_learn() -> None:
    embeddings = clustered(GROUPS)
    found, reference = task_map(embeddings), PCA(n_components=2)
    expected = reference.fit_transform(np.stack(list(embeddings.values())))
    assert found.method == "pca" and list(found.points) == list(GROUPS)
    assert np.abs(list(found.points.values())) == pytest.approx(np.abs(expected))
    assert found.explained == pytest.approx(tuple(reference.explained_variance_ratio_))


def test_signs_do_not_depend_on_the_order_of_the_tasks() -> None:
    embeddings = clustered(GROUPS)
    turned = task_map(dict(reversed(embeddings.items())))
    for task, point in task_map(embeddings).points.items():
        assert turned.points[task] == pytest.approx(point)


def test_tsne_from_twenty_tasks_on_keeps_neighbours_and_repeats() -> None:
    embeddings = clustered(MANY, spread=0.3)
    found = task_map(embeddings, groups=MANY)
    assert found.method == "tsne" and found.explained is None
    assert found == task_map(embeddings, groups=MANY) and found != task_map(embeddings, groups=MANY, seed=1)
    assert task_map(dict(list(embeddings.items())[:19])).method == "pca"
    assert task_map(embeddings, method="pca").method == "pca"
    points = {task: np.array(point) for task, point in found.points.items()}
    for task in MANY:
        nearest = min((other for other in MANY if other != task), key=lambda o: np.hypot(*(points[o] - points[task])))
        assert MANY[nearest] == MANY[task]


def test_neighbours_and_separation_are_those_of_the_embeddings() -> None:
    line = {"a": [0.0, 0.0], "b": [1.0, 0.0], "c": [10.0, 0.0], "d": [13.0, 0.0]}
    found = task_map(line, groups={"a": "x", "b": "x", "c": "y", "d": "y"})
    assert found.neighbours == {"a": ["b", "c", "d"], "b": ["a", "c", "d"], "c": ["d", "b", "a"], "d": ["c", "b", "a"]}
    assert found.separation == pytest.approx(((10 + 13 + 9 + 12) / 4) / ((1 + 3) / 2))
    part = task_map(line, groups={"a": "x", "b": "x", "c": "y"})
    assert part.separation == pytest.approx((10 + 9) / 2), "a task without a group is in no pair"


@pytest.mark.parametrize("groups", [None, {}, {"cola": "x", "sst2": "y"}, dict.fromkeys(GROUPS, "all")])
def test_no_separation_where_there_is_nothing_to_compare(groups: dict[str, str] | None) -> None:
    assert task_map(clustered(GROUPS), groups=groups).separation is None


@pytest.mark.parametrize("method", ["auto", "pca", "tsne"])
def test_two_tasks_lie_on_a_line(method: Any) -> None:
    found = task_map({"a": [1.0, 0.0, 5.0], "b": [0.0, 1.0, 5.0]}, method=method)
    (x, y), (u, v) = found.points.values()
    assert abs(x - u) == pytest.approx(2**0.5) and y == v == 0
    assert found.method == "pca" and found.explained == (1, 0)


@pytest.mark.parametrize("tasks", [2, 3, 20])
@pytest.mark.parametrize("method", ["auto", "tsne"])
def test_identical_embeddings_are_one_point(tasks: int, method: Any, tmp_path: Path) -> None:
    names = [f"t{i}" for i in range(tasks)]
    found = task_map({name: [0.1, 0.2, 0.3] for name in names}, method=method, groups={"t0": "x", "t1": "x"})
    assert set(found.points.values()) == {(0, 0)} and found.explained == (0, 0) and found.separation is None
    assert all(found.neighbours[name] == [other for other in names if other != name] for name in names)
    assert len(found.save(tmp_path)) == 3


@pytest.mark.parametrize("tasks", [3, 4, 25])
def test_tsne_of_few_numbers_or_tasks_and_of_duplicates(tasks: int) -> None:
    found = task_map({f"t{i}": [float(i // 2)] for i in range(tasks)}, method="tsne")
    assert found.method == "tsne" and np.isfinite(list(found.points.values())).all()
    assert task_map({f"t{i}": [float(i)] for i in range(tasks)}, method="pca").explained == (1, 0)


def boxes(figure: Figure) -> list[Any]:
    figure.draw_without_rendering()
    return [text.get_window_extent() for text in figure.axes[0].texts]


def assert_readable(figure: Figure, names: list[str]) -> None:
    """Each name once, inside the square, and none over another."""
    labels, square = boxes(figure), figure.axes[0].get_window_extent()
    assert [text.get_text() for text in figure.axes[0].texts] == names
    assert not any(a.overlaps(b) for i, a in enumerate(labels) for b in labels[:i])
    for box in labels:
        assert square.x0 < box.x0 < box.x1 < square.x1 and square.y0 < box.y0 < box.y1 < square.y1


@pytest.mark.parametrize("spread", [0.1, 0.6, 2.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_labels_are_readable(spread: float, seed: int) -> None:
    embeddings = clustered(GROUPS, spread, seed)
    assert_readable(task_map_figure(task_map(embeddings, groups=GROUPS)), list(GROUPS))
    almost = {**embeddings, "mrpc": embeddings["qqp"] + 1e-7}
    assert_readable(task_map_figure(task_map(almost)), list(GROUPS))


def test_labels_of_many_tasks_and_of_long_names_are_readable() -> None:
    forty = {f"{('task', 'super_glue', 'translation')[i % 3]}_{i}": f"group {i % 10}" for i in range(40)}
    for placed in (task_map(clustered(forty), groups=forty), task_map(clustered(forty), groups=forty, method="pca")):
        assert_readable(task_map_figure(placed), list(forty))
    long = {f"{'a-long-name-' * 4}{i}": "x" for i in range(6)}
    shown = [f"a-long-name-a-l…{name[-16:]}" for name in long]
    assert_readable(task_map_figure(task_map(clustered(long))), shown)


def test_points_words_and_legend() -> None:
    partly = {task: group for task, group in GROUPS.items() if task != "rte"} | {"cola": "_$x_1$"}
    placed = task_map(clustered(GROUPS), groups=partly)
    figure = task_map_figure(placed)
    axes, (legend,) = figure.axes[0], figure.legends
    assert axes.get_xlabel() == f"PCA 1 ({100 * (placed.explained or (0, 0))[0]:.0f} % of the variance)"
    assert [text.get_text() for text in legend.get_texts()] == [
        "_$x_1$", "single sentence", "similarity", "inference", "no group",
    ]  # fmt: skip
    figure.draw_without_rendering()
    square, box = axes.get_window_extent(), legend.get_window_extent()
    assert box.y0 > square.y1 and box.x1 < figure.bbox.x1 and square.width == pytest.approx(square.height)
    assert np.ptp(axes.get_xlim()) == pytest.approx(np.ptp(axes.get_ylim())), "one scale both ways"
    drawn = {(x, y) for line in axes.lines[:5] for x, y in np.asarray(line.get_xydata()).tolist()}
    assert drawn == set(placed.points.values())
    looks = {(line.get_color(), line.get_marker()) for line in axes.lines[:5]}
    assert len(looks) == 5
    assert f"{placed.separation:.2f} times" in figure.texts[1].get_text()
    assert not task_map_figure(task_map(clustered(GROUPS))).legends


def test_twenty_groups_are_told_apart_and_their_legend_fits() -> None:
    groups = {f"task {i}": f"the {i}th group of tasks" for i in range(20)}
    figure = task_map_figure(task_map(clustered(groups), groups=groups))
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x1 < figure.bbox.x1 and box.y0 > figure.axes[0].get_window_extent().y1
    assert len({(line.get_color(), line.get_marker()) for line in figure.axes[0].lines[:20]}) == 20


def test_files(tmp_path: Path) -> None:
    from matplotlib.image import imread

    placed = task_map(clustered(GROUPS), groups=GROUPS)
    folder = tmp_path / "new" / "folder"
    paths = placed.save(str(folder))
    assert paths == [folder / f"task_map.{suffix}" for suffix in ("json", "png", "svg")]
    assert sorted(folder.iterdir()) == paths, "no drafts are left"
    record = json.loads(paths[0].read_text(encoding="utf-8"))
    assert record == placed.to_json() and record["points"]["cola"] == list(placed.points["cola"])
    back = {**record, "points": {k: tuple(v) for k, v in record["points"].items()}}
    assert TaskMap(**{**back, "explained": tuple(record["explained"])}) == placed
    picture = imread(paths[1])
    assert picture.shape[1] == 1120 and picture[..., :3].mean() > 0.9
    assert "</svg>" in paths[2].read_text(encoding="utf-8")
    before = paths[1].read_bytes()
    assert placed.save(folder) == paths and paths[1].read_bytes() == before


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(tg.GraftError, match=r"cannot be written to .*file'.*: name another"):
        task_map(clustered(GROUPS)).save(tmp_path / "file")


GOOD = {"a": [0.0, 1.0], "b": [1.0, 0.0]}
BAD: list[tuple[Any, dict[str, Any], str]] = [
    ({}, {}, "at least two tasks, and got 0"),
    ({"a": [1.0]}, {}, "at least two tasks, and got 1"),
    ({**GOOD, "c": [1.0, float("nan")]}, {}, "'c' has nan at place 1"),
    ({**GOOD, "c": [float("-inf"), 1.0]}, {}, "'c' has -inf at place 0"),
    ({**GOOD, "c": [1.0, 2.0, 3.0]}, {}, "'c' has 3 numbers and that of 'a' 2"),
    ({**GOOD, "c": [[1.0, 2.0]]}, {}, r"'c' has the shape \[1, 2\]"),
    ({**GOOD, "c": 1.0}, {}, r"'c' has the shape \[\]"),
    ({"a": [], "b": []}, {}, r"'a' has the shape \[0\]"),
    ({**GOOD, "c": ["x", "y"]}, {}, "'c' is not a list of numbers"),
    (GOOD, {"method": "umap"}, "no task map by 'umap': choose 'auto', 'pca' or 'tsne'"),
    (GOOD, {"groups": {"z": "x"}}, "groups name 'z', which is not on the map: it has a, b"),
]


@pytest.mark.parametrize(("embeddings", "words", "says"), BAD)
def test_bad_input_gets_one_sentence(embeddings: Any, words: dict[str, Any], says: str) -> None:
    with pytest.raises(tg.GraftError, match=says) as caught:
        task_map(embeddings, **words)
    assert "\n" not in str(caught.value)


def test_neither_scikit_learn_nor_matplotlib_is_imported_before_it_is_needed() -> None:
    code = "import sys, taskgraft.reports.taskmap; print('sklearn' in sys.modules, 'matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
