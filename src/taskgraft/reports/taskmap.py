"""The task map: learned task embeddings in two dimensions, so that one sees which tasks lie together.

PCA keeps the distances as far as two axes can; t-SNE (van der Maaten and Hinton, 2008) keeps who is near whom.
What is stated in numbers (neighbours, separation) is measured between the embeddings themselves, not on the map.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from taskgraft.errors import GraftError
from taskgraft.reports.tradeoff import DPI, FAINT, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Floats = npt.NDArray[np.float64]

METHODS = {"pca": "PCA", "tsne": "t-SNE"}
MANY_TASKS = 20  # from here on "auto" is t-SNE; fewer have no neighbourhoods to keep
UNGROUPED = "no group"

SIDE_IN, LEFT_IN, BOTTOM_IN, TITLE_IN = 6.0, 0.75, 0.65, 0.8  # the square of the map, and what is around it
WIDTH_IN, LEGEND_GAP_IN = LEFT_IN + SIDE_IN + 0.25, 0.12
MARGIN = 0.1  # of the square, between its edge and the outermost points
LONGEST_LABEL = 32  # characters: less than half the square, so that there is room on one side of any point
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D1F", "#5B5EA6")  # Okabe and Ito's
MARKERS = ("o", "s", "^", "D", "v", "p", "<", ">")
MARKER_PT, CLEAR_PT = 7.5, 9.5  # across a marker, and across what labels leave free around it
SIDES = np.array([(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)], dtype=float)  # best first
REACHES_PT = (6.0, 15.0, 26.0, 39.0, 54.0, 72.0, 92.0)  # from a point to its label; beyond the first a line joins them
DESCENT = 0.1  # of a text's height: what hangs below its letters, so that these are level with the point
ROUNDS = 30  # of moving labels about


@dataclass(frozen=True)
class TaskMap:
    """Where each task lies on the map, and which tasks lie near it in truth."""

    method: str  # what was used: "pca" or "tsne"
    points: dict[str, tuple[float, float]]
    explained: tuple[float, float] | None  # PCA: each axis' share of the variance
    neighbours: dict[str, list[str]]  # of each task all the others, nearest embedding first
    groups: dict[str, str]
    separation: float | None  # mean distance between groups over that within them; above 1, related tasks lie together

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "points": {name: list(point) for name, point in self.points.items()},
            "explained": None if self.explained is None else list(self.explained),
            "neighbours": self.neighbours,
            "groups": self.groups,
            "separation": self.separation,
        }

    def save(self, folder: str | PathLike[str]) -> list[Path]:
        """Write task_map.json, .png and .svg; a reader sees the old file or the new one, whole."""
        paths = [Path(folder) / f"task_map.{suffix}" for suffix in ("json", "png", "svg")]
        figure = task_map_figure(self)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for path in paths:
                draft = path.with_name(f"{path.name}.draft")
                if path.suffix == ".json":
                    draft.write_text(json.dumps(self.to_json(), indent=1, ensure_ascii=False), encoding="utf-8")
                else:
                    figure.savefig(draft, dpi=DPI, format=path.suffix[1:])
                draft.replace(path)
        except OSError as error:
            raise GraftError(f"the task map cannot be written to {str(folder)!r} ({error}): name another.") from error
        return paths


def task_map(
    embeddings: Mapping[str, Sequence[float] | npt.NDArray[Any]],
    *,
    method: str = "auto",
    groups: Mapping[str, str] | None = None,
    seed: int = 0,
) -> TaskMap:
    """Lay out tasks by their embeddings: names -> vectors of one length. The same input gives the same map.

    Two tasks, or any number with one embedding, have nothing that t-SNE could show: their map is always PCA's.
    """
    from scipy.spatial.distance import cdist

    names, groups = list(embeddings), dict(groups or {})
    if method not in ("auto", *METHODS):
        raise GraftError(f"there is no task map by {method!r}: choose 'auto', 'pca' or 'tsne'.")
    vectors = stacked(embeddings)
    unknown = [name for name in groups if name not in embeddings]
    if unknown:
        raise GraftError(f"groups name {unknown[0]!r}, which is not on the map: it has {', '.join(names)}.")

    points, explained = pca(vectors)
    by_tsne = method == "tsne" or (method == "auto" and len(names) >= MANY_TASKS)
    by_tsne = by_tsne and len(names) > 2 and bool(points.any())
    if by_tsne:
        points = tsne(vectors, points, seed)
    distances = cdist(vectors, vectors)
    np.fill_diagonal(distances, -1.0)  # a task is before any other that has the same embedding
    nearest = distances.argsort(axis=1, kind="stable")[:, 1:]
    return TaskMap(
        method="tsne" if by_tsne else "pca",
        points={name: (float(x), float(y)) for name, (x, y) in zip(names, points, strict=True)},
        explained=None if by_tsne else explained,
        neighbours={name: [names[i] for i in row] for name, row in zip(names, nearest, strict=True)},
        groups=groups,
        separation=separation_of(distances, [groups.get(name) for name in names]),
    )


def stacked(embeddings: Mapping[str, Sequence[float] | npt.NDArray[Any]]) -> Floats:
    """The vectors as one array [tasks, numbers], checked."""
    if len(embeddings) < 2:
        raise GraftError(f"a task map needs at least two tasks, and got {len(embeddings)}: give it more.")
    first, vectors = next(iter(embeddings)), dict[str, Floats]()
    for name, given in embeddings.items():
        try:
            vector = np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise GraftError(f"the embedding of {name!r} is not a list of numbers: {error}.") from error
        if vector.ndim != 1 or not len(vector):
            raise GraftError(f"the embedding of {name!r} has the shape {list(vector.shape)}: give one list of numbers.")
        if not np.isfinite(vector).all():
            bad = int(np.argmin(np.isfinite(vector)))
            raise GraftError(f"the embedding of {name!r} has {vector[bad]} at place {bad}: leave out this task.")
        vectors[name] = vector
        if len(vector) != len(vectors[first]):
            raise GraftError(f"the embedding of {name!r} has {len(vector)} numbers and that of {first!r} "
                             f"{len(vectors[first])}: give embeddings of one model.")  # fmt: skip
    return np.stack(list(vectors.values()))


def pca(vectors: Floats) -> tuple[Floats, tuple[float, float]]:
    """The first two principal components [tasks, 2] and their shares of the variance."""
    left, sizes, axes = np.linalg.svd(vectors - vectors.mean(axis=0), full_matrices=False)
    sizes[sizes <= np.finfo(float).eps * max(vectors.shape) * np.linalg.norm(vectors)] = 0  # only rounding is left
    shares = sizes**2 / max(float((sizes**2).sum()), np.finfo(float).tiny)
    points = np.zeros((len(vectors), 2))
    for axis in range(min(2, len(sizes))):
        loads = np.abs(axes[axis])
        leading = axes[axis][np.argmax(loads > loads.max() * (1 - 1e-6))]  # of equal ones the first: rounding is no tie
        points[:, axis] = left[:, axis] * sizes[axis] * np.sign(leading) + 0.0  # a direction has no sign of its own
    first, second = [*shares.tolist(), 0.0][:2]
    return points, (first, second)


def tsne(vectors: Floats, start: Floats, seed: int) -> Floats:
    """t-SNE from the PCA's points, as is advised, a little apart: where these coincide nothing would part them."""
    from sklearn.manifold import TSNE

    noise = np.random.default_rng(seed).normal(size=start.shape)
    start = 1e-4 * (start / max(float(start.std()), np.finfo(float).tiny) + 0.01 * noise)
    perplexity = max(1.0, min(30.0, (len(vectors) - 1) / 3))  # how many neighbours a task is to have
    model = TSNE(perplexity=perplexity, init=start.astype(np.float32), method="exact", random_state=seed)
    return np.asarray(model.fit_transform(vectors - vectors.mean(axis=0)), dtype=np.float64)


def separation_of(distances: Floats, groups: Sequence[str | None]) -> float | None:
    """Over pairs of tasks that have a group; None where there are no pairs of either sort, or all within coincide."""
    pairs = itertools.combinations([i for i, group in enumerate(groups) if group is not None], 2)
    apart = [(groups[i] == groups[j], float(distances[i, j])) for i, j in pairs]
    within = [distance for together, distance in apart if together]
    across = [distance for together, distance in apart if not together]
    return float(np.mean(across) / np.mean(within)) if across and any(within) else None


def task_map_figure(placed: TaskMap) -> Figure:
    """The map on a square, one scale both ways, each task's name beside its point, the groups in a legend above."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, BOTTOM_IN + SIDE_IN + TITLE_IN), dpi=DPI)  # texts are measured as written
    axes = figure.add_axes((0, 0, 1, 1))
    handles = draw_points(axes, placed)
    if placed.groups:
        draw_legend(figure, handles)
    height = figure.get_figheight()
    axes.set_position((LEFT_IN / WIDTH_IN, BOTTOM_IN / height, SIDE_IN / WIDTH_IN, SIDE_IN / height))
    finish_axes(axes, placed)
    label_points(axes, placed)

    words = f"{len(placed.points)} tasks, by {METHODS[placed.method]} of their embeddings"
    if placed.separation is not None:
        words += f"; {placed.separation:.2f} times as far apart between groups as within"
    figure.text(0.025, 1 - 0.3 / height, "Task map", fontsize=13, fontweight="bold", color=INK, va="center")
    figure.text(0.025, 1 - 0.57 / height, words, fontsize=9.5, color=FAINT, va="center")
    return figure


def draw_points(axes: Axes, placed: TaskMap) -> list[tuple[str, Line2D]]:
    """Each group with a colour and a marker, which are both its own up to the eighth; tasks without a group grey."""
    groups = list(dict.fromkeys(placed.groups.values()))
    handles = []
    for i, group in enumerate([*groups, None]):
        points = [point for name, point in placed.points.items() if placed.groups.get(name) == group]
        if points:
            grey = bool(groups) and group is None
            (drawn,) = axes.plot(*zip(*points, strict=True), color=FAINT if grey else COLOURS[i % 8],
                                 marker="o" if grey else MARKERS[(i + i // 8) % 8], markersize=MARKER_PT,
                                 markeredgecolor="white", markeredgewidth=0.8, linestyle="none", zorder=3)  # fmt: skip
            handles.append((UNGROUPED if group is None else group, drawn))
    return handles


def draw_legend(figure: Figure, handles: Sequence[tuple[str, Line2D]]) -> None:
    """Under the title, in as many columns as there is room for; the figure grows by its height."""
    for columns in range(min(6, len(handles)), 0, -1):
        legend = figure.legend([drawn for _, drawn in handles], [" "] * len(handles), loc="upper left", frameon=False,
                               ncols=columns, fontsize=9.5, labelcolor=INK, handletextpad=0.2, borderpad=0.1,
                               borderaxespad=0)  # fmt: skip
        for text, (group, _) in zip(legend.get_texts(), handles, strict=True):
            text.set(text=shortened(group), parse_math=False)
        box = legend.get_window_extent()
        if box.width < 0.95 * figure.bbox.width or columns == 1:
            break
        legend.remove()
    height = figure.get_figheight() + box.height / figure.dpi + LEGEND_GAP_IN
    figure.set_figheight(height)
    legend.set_bbox_to_anchor((0.01, 1 - TITLE_IN / height), figure.transFigure)


def finish_axes(axes: Axes, placed: TaskMap) -> None:
    """Limits that hold every point and its label; t-SNE's units mean nothing, so they are not shown."""
    points = np.array(list(placed.points.values()))
    low, high = points.min(axis=0), points.max(axis=0)
    half = float((high - low).max()) / (2 - 4 * MARGIN) or 0.9
    (x, y), name = (low + high) / 2, METHODS[placed.method]
    axes.set(xlim=(x - half, x + half), ylim=(y - half, y + half))
    shares = ["", ""] if placed.explained is None else [f" ({100 * s:.0f} % of the variance)" for s in placed.explained]
    axes.set_xlabel(f"{name} 1{shares[0]}", fontsize=10.5, color=INK)
    axes.set_ylabel(f"{name} 2{shares[1]}", fontsize=10.5, color=INK)
    axes.tick_params(labelsize=9, colors=INK, length=0)
    if placed.explained is None:
        axes.set(xticks=[], yticks=[])
    axes.grid(color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_color("#c8c8c8")


def label_points(axes: Axes, placed: TaskMap) -> None:
    """Each task's name beside its point; a thin line leads to a name that found no room there."""
    from matplotlib.patheffects import withStroke

    size = 10 if len(placed.points) <= 12 else 8.5 if len(placed.points) <= 30 else 7.5
    labels = [
        axes.annotate(shortened(name), point, textcoords="offset points", xytext=(0, 0), fontsize=size, color=INK,
                      parse_math=False, path_effects=[withStroke(linewidth=2, foreground="white")], zorder=4)
        for name, point in placed.points.items()
    ]  # fmt: skip
    origin, pixels = axes.get_window_extent().p0, DPI / 72
    sizes = np.array([label.get_window_extent().size for label in labels]) / pixels
    points = (axes.transData.transform(list(placed.points.values())) - origin) / pixels
    for label, point, corner, extent in zip(labels, points, label_corners(points, sizes), sizes, strict=True):
        label.set_position(tuple(corner - point))
        near = np.clip(point, corner, corner + extent)
        if np.hypot(*(near - point)) > 1.5 * REACHES_PT[0]:
            ends = axes.transData.inverted().transform(np.stack([point, near]) * pixels + origin)
            axes.plot(*ends.T, color=FAINT, linewidth=0.6, zorder=1)


def label_corners(points: Floats, sizes: Floats) -> Floats:
    """The lower left corner of each label [tasks, 2], all in typographic points from the corner of the square.

    Every label in turn takes the free place nearest to its point, given where the others are, until none moves.
    """
    sides = np.tile(SIDES, (len(REACHES_PT), 1))
    reaches = np.repeat(REACHES_PT, len(SIDES))
    steps = sides / np.linalg.norm(sides, axis=1, keepdims=True) * reaches[:, None]
    dislike = reaches + 0.5 * np.arange(len(sides))
    square = np.full((1, 2), SIDE_IN * 72)
    corners = np.full_like(points, -1e6)  # out of everyone's way until placed
    for _ in range(ROUNDS):
        before = corners.copy()
        for i, (point, size) in enumerate(zip(points, sizes, strict=True)):
            places = point + steps + (sides - 1) * size / 2 + (0, DESCENT * size[1])
            others = np.arange(len(points)) != i
            markers = points[others] - CLEAR_PT / 2
            hidden = overlap(places, size, corners[others], sizes[others]).sum(axis=1)
            hidden += overlap(places, size, markers, np.full_like(markers, CLEAR_PT)).sum(axis=1)
            near = np.clip(point, places, places + size)
            for share in (0.2, 0.4, 0.6, 0.8):  # along the line to a far label
                on_line = point + share * (near - point) - 1
                hidden += overlap(on_line, np.full(2, 2.0), corners[others], sizes[others]).sum(axis=1)
            outside = size.prod() - overlap(places, size, np.zeros((1, 2)), square)[:, 0]
            corners[i] = places[np.argmin(dislike + 5 * hidden + 50 * outside)]
        if np.array_equal(before, corners):
            break
    return corners


def overlap(places: Floats, size: Floats, corners: Floats, sizes: Floats) -> Floats:
    """The area that boxes of one size at these places share with other boxes, [places, others]."""
    low = np.maximum(places[:, None], corners)
    high = np.minimum(places[:, None] + size, corners + sizes)
    area: Floats = np.clip(high - low, 0, None).prod(axis=-1)
    return area


def shortened(name: str) -> str:
    """A long name's beginning and end."""
    half = LONGEST_LABEL // 2
    return name if len(name) <= LONGEST_LABEL else f"{name[: half - 1]}…{name[-half:]}"
