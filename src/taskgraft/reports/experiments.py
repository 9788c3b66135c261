"""The figures of the experiments: differences with intervals, percentiles over tasks, heat maps, curves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from taskgraft.reports.bootstrap import Interval
from taskgraft.reports.sweeps import STYLES
from taskgraft.reports.tradeoff import FAINT, INK, short_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 0.8  # of a task's line, shared by the arms
NAME, LEGEND_LINE = 1.95, 0.25  # inches that a name in a legend has at least, across and down
MARK, NAME_LETTER = 0.55, 0.074  # inches of its line and of a letter
LETTER, TITLE_LETTER = 0.085, 0.105  # inches of a letter beside an axis and in a title


def differences_figure(
    against: Mapping[str, Mapping[str, Interval]], tasks: Sequence[str], axis: str, title: str
) -> Figure:
    """A line for the average and for each task, on it a mark for each arm with its 95 % interval; zero is a line.

    Without tasks each arm has a line of its own, for the average.
    """
    apart = not tasks
    lines = list(against) if apart else ["average", *tasks]
    left = 0.4 + LETTER * max(map(len, lines))
    height = 1.7 + len(lines) * (0.3 if apart else 0.16 + 0.17 * len(against))
    figure, axes = plain(title, left + 6.4, height, names=() if apart else list(against), left=left)
    for number, (arm, row) in enumerate(against.items()):
        colour, marker = STYLES[0 if apart else number % len(STYLES)]
        found = [row[task] for task in (["all"] if apart else ["all", *tasks])]
        aside = 0.0 if apart else WIDTH * ((number + 0.5) / len(against) - 0.5)
        y = [number] if apart else [line + aside for line in range(len(lines))]
        spread = [[100 * (gap.mean - gap.low) for gap in found], [100 * (gap.high - gap.mean) for gap in found]]
        axes.errorbar([100 * gap.mean for gap in found], y, xerr=spread, fmt=marker, color=colour, label=arm,
                      markersize=6, elinewidth=1.3, markeredgewidth=0.7, markeredgecolor="white")  # fmt: skip
    axes.axvline(0, color=INK, linewidth=1)
    if not apart:
        axes.axhline(0.5, color="#d0d0d0", linewidth=0.8)
    axes.set_yticks(range(len(lines)), lines)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_xlabel(axis, color=INK)
    if not apart:
        legend(figure, axes)
    return figure


@dataclass(frozen=True)
class Family:
    """Points of one kind: (trained parameters, low, middle, high), and what stands beside each."""

    name: str
    points: Sequence[tuple[float, float, float, float]]
    labels: Sequence[str]


def percentiles_figure(families: Sequence[Family], axis: str, title: str) -> Figure:
    """A line through the middles and a band from low to high, by trained parameters; one point has a whisker."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure, axes = plain(title, 8, 5.2)
    for family, (colour, marker) in zip(families, STYLES, strict=False):
        x, low, middle, high = ([point[i] for point in family.points] for i in range(4))
        if len(x) > 1:
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        else:
            spread = [[middle[0] - low[0]], [high[0] - middle[0]]]
            axes.errorbar(x, middle, spread, fmt="none", ecolor=colour, elinewidth=1.3, alpha=0.5)
        axes.plot(x, middle, marker=marker, color=colour, label=family.name, linewidth=1.8, markersize=6.5,
                  markeredgecolor="white", markeredgewidth=0.8, linestyle="-" if len(x) > 1 else "none")  # fmt: skip
        for place, height, label in zip(x, middle, family.labels, strict=False):
            axes.annotate(label, (place, height), xytext=(0, 5), textcoords="offset points", ha="center", va="bottom",
                          fontsize=8.5, color=colour)  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    axes.set_xlabel("trained parameters per task", color=INK)
    axes.set_ylabel(axis, color=INK)
    legend(figure, axes)
    return figure


def curves_figure(
    curves: Mapping[str, Sequence[tuple[float, float, float]]], across: str, axis: str, title: str
) -> Figure:
    """(x, score, standard error) of each task, in a panel of its own, since tasks differ in their scale."""
    figure, panels = plain(title, 1 + 4.2 * len(curves), 4.4, len(curves))
    for number, (axes, (name, curve)) in enumerate(zip(panels if len(curves) > 1 else [panels], curves.items(),
                                                       strict=True)):  # fmt: skip
        colour, marker = STYLES[number % len(STYLES)]
        x, y, error = ([point[i] for point in curve] for i in range(3))
        axes.errorbar(x, y, error, color=colour, marker=marker, linewidth=1.8, markersize=6, elinewidth=1.3,
                      markeredgecolor="white", markeredgewidth=0.7)  # fmt: skip
        axes.set_xscale("log")
        axes.set_title(name, fontsize=11, color=INK)
        axes.set_xlabel(across, color=INK)
        axes.set_ylabel(axis, color=INK)
    return figure


def sizes_figure(
    curves: Mapping[str, Sequence[tuple[int, float, float]]],
    across: str,
    axis: str,
    title: str,
    dashed: Collection[str] = (),
) -> Figure:
    """(x, score of 0 to 1, deviation) of each method, in one panel, with a band a deviation to each side.

    A line that is dashed looks otherwise like the next one that is not.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure, axes = plain(title, 8, 5.2, names=list(curves))
    styles = itertools.cycle(STYLES)
    colour, marker = next(styles)
    for name, curve in curves.items():
        x, middle, spread = ([point[i] for point in curve] for i in range(3))
        low, high = ([100 * (m + sign * s) for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.plot(x, [100 * m for m in middle], color=colour, marker=marker, label=name, linewidth=1.8, markersize=6.5,
                  linestyle="--" if name in dashed else "-", markeredgecolor="white", markeredgewidth=0.8)  # fmt: skip
        if name not in dashed:
            colour, marker = next(styles)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([point[0] for point in next(iter(curves.values()))]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel(across, color=INK)
    axes.set_ylabel(axis, color=INK)
    legend(figure, axes)
    return figure


def heat_figure(matrix: npt.NDArray[np.float64], branches: Sequence[Sequence[float]], title: str) -> Figure:
    """The loss in percent for each first (down) and last (across) layer, and the size of each layer's branches."""
    layers = len(branches)
    figure, (axes, beside) = plain(title, 4.6 + 0.62 * layers, 2.2 + 0.45 * layers, 2)
    axes.grid(visible=False)
    axes.imshow(matrix, cmap="YlGnBu_r", vmin=min(-10.0, float(np.nanmin(matrix))), vmax=0, aspect="auto")
    middle = float(np.nanmin(matrix)) / 2
    for i, j in itertools.product(range(layers), repeat=2):
        if j >= i:
            colour = "white" if matrix[i, j] < middle else INK
            axes.text(j, i, str(round(matrix[i, j])), ha="center", va="center", fontsize=8.5, color=colour)
    axes.set_xticks(range(layers))
    axes.set_yticks(range(layers))
    axes.set_xlabel("last layer removed", color=INK)
    axes.set_ylabel("first layer removed", color=INK)
    axes.set_title("change of the score in %", fontsize=10.5, color=INK)
    for number, site in enumerate(("attention", "feed-forward")):
        colour, _ = STYLES[number]
        heights = [place - 0.2 + 0.4 * number for place in range(layers)]
        beside.barh(heights, [row[number] for row in branches], height=0.38, color=colour, label=site)
    beside.invert_yaxis()
    beside.set_ylim(layers - 0.5, -0.5)
    beside.set_yticks(range(layers))
    beside.grid(visible=False, axis="y")
    beside.set_xlabel("length added over length of the input", color=INK)
    beside.set_title("each layer's branches", fontsize=10.5, color=INK)
    beside.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.06), ncols=2, frameon=False, fontsize=9, labelcolor=INK)
    return figure


def growth_figure(tasks: Sequence[str], sizes: Sequence[float], title: str) -> Figure:
    """Parameters of all tasks so far, as multiples of one backbone, and those of a copy for each."""
    below = 0.4 + 0.6 * LETTER * max(map(len, tasks))  # the names are slanted
    figure, axes = plain(title, max(7.0, 2 + 0.42 * len(tasks)), 4.2 + below, bottom=below)
    places = range(len(tasks))
    lines: dict[str, list[float]] = {
        "grafts on one backbone": list(sizes),
        "a full copy for each": [n + 1 for n in places],
    }
    for number, (name, heights) in enumerate(lines.items()):
        colour, marker = STYLES[number]
        axes.plot(places, heights, color=colour, marker=marker, label=name, linewidth=1.8, markeredgecolor="white")
        axes.annotate(f"{heights[-1]:.2f}x" if number == 0 else f"{heights[-1]}x", (len(tasks) - 1, heights[-1]),
                      xytext=(0, 7), textcoords="offset points", ha="center", color=colour, fontsize=9.5)  # fmt: skip
    axes.set_xticks(places, tasks, rotation=40, ha="right", fontsize=8.5)
    axes.set_ylim(0, None)
    axes.set_ylabel("backbones' worth of parameters", color=INK)
    legend(figure, axes)
    return figure


# -- what all have in common


def plain(
    title: str,
    width: float,
    height: float,
    panels: int = 1,
    names: Sequence[str] = ("one line",),
    left: float = 0.8,
    bottom: float = 0.65,
) -> tuple[Figure, Any]:
    """A figure with little ink: title on the left, room for a legend of these names under it, a grid across.

    `left` and `bottom` are inches beside the axes.
    """
    from matplotlib.figure import Figure

    width = max(width, 0.4 + TITLE_LETTER * len(title))
    above = 0.75 + LEGEND_LINE * math.ceil(len(names) / columns_of(width, names))
    height += above - 1.0
    figure = Figure(figsize=(width, height))
    found = figure.subplots(1, panels, squeeze=False)[0]
    figure.subplots_adjust(left=left / width, right=1 - 0.2 / width, bottom=bottom / height, top=1 - above / height,
                           wspace=0.22)  # fmt: skip
    figure.text(0.2 / width, 1 - 0.3 / height, title, fontsize=12.5, fontweight="bold", color=INK, va="center")
    for axes in found:
        tidy(axes)
    return figure, found[0] if panels == 1 else list(found)


def columns_of(width: float, names: Sequence[str]) -> int:
    """Of a legend in a figure of so many inches."""
    longest = max(map(len, names), default=0)
    return max(1, int(width / max(NAME, MARK + NAME_LETTER * longest)))


def tidy(axes: Axes) -> None:
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9.5, colors=INK, length=3, color=FAINT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def legend(figure: Figure, axes: Axes) -> None:
    """Under the title, in as few lines as there is room for."""
    height, width = figure.get_figheight(), figure.get_figwidth()
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="upper left", bbox_to_anchor=(0.12 / width, 1 - 0.5 / height), frameon=False,
                  ncols=min(len(names), columns_of(width, names)), fontsize=9.5, labelcolor=INK, columnspacing=1.6,
                  handletextpad=0.5)  # fmt: skip
