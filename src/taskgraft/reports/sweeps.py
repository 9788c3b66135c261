"""A sweep for people: its settings as a table, the chosen one first, and the figure of score against learning rate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taskgraft.errors import GraftError
from taskgraft.reports.tables import count_text, markdown_table, score_text, seconds_text
from taskgraft.reports.tradeoff import DPI, FAINT, INK, SUFFIXES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from rich.table import Table

    from taskgraft.training.sweep import Point

MOST_ROWS = 12  # of a task in a terminal; table.md has all
MOST_COLUMNS = 3  # of panels
CHOSEN = "*"
AXES = {"rate": "learning rate", "size": "adapter size", "epochs": "epochs"}  # what may go along x, by preference
LEGEND_COLUMNS = 6
ASIDE = 0.016  # of the axis, between neighbouring lines
TICK_INCHES = 0.45  # what the name of a tick needs
LINE: dict[str, Any] = {"linewidth": 1.6, "markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.8,
                        "zorder": 3}  # fmt: skip
LEVEL: dict[str, Any] = {"linewidth": 1.5, "linestyle": (0, (5, 3))}
STYLES = (  # Okabe and Ito's colours, which the colour-blind tell apart, and a shape each
    ("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "v"), ("#E69F00", "p"), ("#56B4E9", "h"),
    ("#8C6D1F", "<"), ("#5B5EA6", ">"),
)  # fmt: skip


@dataclass(frozen=True)
class Ranking:
    """One task's settings, the chosen one first."""

    task: str
    metric: str
    points: Sequence[Point]


def rate_text(rate: float) -> str:
    """A learning rate in full and without a plus, as in a file's name: 3e-4."""
    return f"{Decimal(repr(float(rate))).normalize():e}".replace("+", "")


# -- tables


def cells(points: Sequence[Point]) -> tuple[list[str], list[list[str]]]:
    """Header and rows as text, of one task's settings by rank; the first is marked if there was one to choose."""
    spread = any(len(point.seeds) > 1 for point in points)
    header = ["", "method", "rate", "epochs", "validation" + (" (lowest to highest)" if spread else ""),
              "test" + (" ± standard error" if spread else ""), "seeds", "trained", "time"]  # fmt: skip
    rows = []
    for number, point in enumerate(points):
        seeds = len(point.seeds) + len(point.failed)
        rows.append([
            CHOSEN if number == 0 and point.seeds else "",
            point.method,
            rate_text(point.rate),
            str(point.epochs),
            validation_text(point),
            "-" if point.test is None else score_text(point.test, point.error),
            f"{len(point.seeds)} of {seeds}" if point.failed else str(seeds),
            count_text(point.trained),
            seconds_text(point.seconds) if point.seeds else "-",
        ])  # fmt: skip
    return header, rows


def validation_text(point: Point) -> str:
    if point.validation is None or point.lowest is None or point.highest is None:
        return "failed"
    spread = f" ({point.lowest:.3f} to {point.highest:.3f})" if len(point.seeds) > 1 else ""
    return score_text(point.validation) + spread


def markdown(rankings: Sequence[Ranking], failures: Sequence[str]) -> str:
    """A section for each task, and a line for each run that failed."""
    sections = []
    for ranking in rankings:
        header, rows = cells(ranking.points)
        found = markdown_table(header[1:], [[f"**{row[1]}**" if row[0] else row[1], *row[2:]] for row in rows])
        sections.append(f"## {ranking.task}: {ranking.metric}\n\n{found}")
    if failures:
        sections.append("## Failed\n\n" + "".join(f"- {sentence}\n" for sentence in failures))
    sections.append("Bold: chosen by the mean validation score over the seeds. Test scores chose nothing.\n")
    return "\n".join(sections)


def rich_table(ranking: Ranking) -> Table:
    """A task's best settings for a terminal, the chosen one in bold."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    header, rows = cells(ranking.points)
    left = len(rows) - MOST_ROWS
    caption = f"and {left} more settings" if left > 0 else None
    title = f"{ranking.task}: {ranking.metric}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption,
                  caption_justify="left")  # fmt: skip
    for i, name in enumerate(header):
        widest = max(len(row[i]) for row in rows)  # a header may wrap, a number must not
        table.add_column(name, justify="right" if i > 1 else "left", min_width=widest)
    for row in rows[:MOST_ROWS]:
        table.add_row(*map(Text, row), style="bold" if row[0] else None)
    return table


# -- the figure


def draw_sweep(rankings: Sequence[Ranking], path: str | PathLike[str], *, title: str, subtitle: str) -> None:
    """Write the figure as PNG or SVG, by the path's suffix."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise GraftError(f"a figure cannot be written as {target.name!r}: end its name in {' or '.join(SUFFIXES)}.")
    if not target.parent.is_dir():
        raise GraftError(f"the folder {str(target.parent)!r} does not exist: make it, or name another for the figure.")
    sweep_figure(rankings, title=title, subtitle=subtitle).savefig(target, dpi=DPI)


def sweep_figure(rankings: Sequence[Ranking], *, title: str, subtitle: str) -> Figure:
    """A panel for each task: the mean validation score, its range over the seeds, and a ring around the chosen setting.

    A line is a method of one size. Where epochs differ too, a point is the best of them, and the subtitle says so.
    """
    from matplotlib.figure import Figure

    points = [point for ranking in rankings for point in ranking.points]
    axis = axis_of(points)
    names = dict.fromkeys(series_of(point, axis) for point in sorted(points, key=lambda p: p.size or 0))
    styles = dict(zip(names, itertools.cycle(STYLES)))
    columns = min(MOST_COLUMNS, len(rankings))
    width, panel = (8.0, 4.1) if columns == 1 else (9.6, 3.0)
    legend_lines = math.ceil((len(styles) + 1) / LEGEND_COLUMNS)
    top = 0.72 + 0.22 * legend_lines
    height = top + panel * math.ceil(len(rankings) / columns)
    figure = Figure(figsize=(width, height))
    for number, ranking in enumerate(rankings):
        left, above = number % columns * width / columns + 0.7, top + number // columns * panel + 0.34
        across, down = width / columns - 0.88, panel - 0.92
        axes = figure.add_axes((left / width, 1 - (above + down) / height, across / width, down / height))
        draw_panel(axes, ranking, axis, styles)
        finish_panel(axes, ranking, axis, across, named=len(rankings) > 1)

    epochs = sorted({point.epochs for point in points})
    if axis != "epochs" and len(epochs) > 1:
        subtitle += f"; each point the best of {', '.join(map(str, epochs[:-1]))} and {epochs[-1]} epochs"
    figure.text(0.2 / width, 1 - 0.24 / height, title, fontsize=13, fontweight="bold", color=INK, va="center")
    figure.text(0.2 / width, 1 - 0.5 / height, subtitle, fontsize=9.5, color=FAINT, va="center")
    levels = {point.method for point in points if axis == "size" and point.size is None}
    handles = [handle(name, *style, level=name in levels) for name, style in styles.items()]
    figure.legend(handles=[*handles, ring([], [], 10)], loc="upper left", frameon=False,
                  bbox_to_anchor=(0.1 / width, 1 - 0.6 / height), ncols=math.ceil((len(styles) + 1) / legend_lines),
                  fontsize=9.5, labelcolor=INK, columnspacing=1.6, handlelength=1.9)  # fmt: skip
    return figure


def axis_of(points: Sequence[Point]) -> str:
    """What goes along x: the learning rate, unless a method has one alone; then sizes or epochs, if they differ."""

    def varies(axis: str) -> bool:
        found: dict[tuple[str, str], set[float]] = {}
        for point in points:
            found.setdefault((point.task, series_of(point, axis)), set()).add(getattr(point, axis) or 0)
        return any(len(values) > 1 for values in found.values())

    return next((axis for axis in AXES if varies(axis)), "rate")


def series_of(point: Point, axis: str) -> str:
    """The line that a point lies on: its method, and along sizes its method without the size."""
    if axis != "size" or point.size is None:
        return point.method
    return "-".join(part for part in point.method.split("-") if part != str(point.size))


def draw_panel(axes: Axes, ranking: Ranking, axis: str, styles: dict[str, tuple[str, str]]) -> None:
    """A task's lines, a little beside each other so that their whiskers are; a method without a size is a level."""
    best: dict[str, dict[float, Point]] = {name: {} for name in styles}
    for point in ranking.points:  # by rank: the first of its place is the best
        if point.seeds:
            best[series_of(point, axis)].setdefault(getattr(point, axis) or 0, point)
    places = places_of(ranking, axis)
    lines = [name for name, found in best.items() if any(found)]
    for name, found in best.items():
        colour, marker = styles[name]
        for point in found.values() if name not in lines else ():
            axes.axhline(point.validation or 0.0, color=colour, **LEVEL)
        beside = lines.index(name) - (len(lines) - 1) / 2 if name in lines else 0.0
        aside = 10 ** (span_of(places) * ASIDE * beside)
        line = [(place * aside or max(places, default=1.0), found[place]) for place in sorted(found)]
        for x, point in line if name in lines else ():
            axes.vlines(x, point.lowest or 0.0, point.highest or 0.0, color=colour, linewidth=1.3, alpha=0.45)
        if name in lines:
            axes.plot([x for x, _ in line], [p.validation or 0.0 for _, p in line], color=colour, marker=marker, **LINE)
        for x, point in line:
            if point is ranking.points[0]:
                axes.add_line(ring([x], [point.validation or 0.0], 13))


def places_of(ranking: Ranking, axis: str) -> list[float]:
    """The values along x at which something is drawn."""
    return sorted({getattr(point, axis) for point in ranking.points if point.seeds and getattr(point, axis)})


def span_of(places: Sequence[float]) -> float:
    """How many powers of ten they reach over."""
    return math.log10(places[-1] / places[0]) if len(places) > 1 else 1.0


def finish_panel(axes: Axes, ranking: Ranking, axis: str, inches: float, named: bool) -> None:
    """A logarithmic axis whose ticks are the values that were tried, and no more ink than needed."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    places = places_of(ranking, axis)
    span = span_of(places)
    axes.set_xscale("log")
    if places:
        axes.set_xlim(places[0] / 10 ** (0.1 * span), places[-1] * 10 ** (0.1 * span))
    if not any(point.seeds for point in ranking.points):
        axes.text(0.5, 0.5, "no run ended", transform=axes.transAxes, ha="center", color=FAINT)
    shown: list[float] = []
    for place in reversed(places):  # the highest is always named
        if not shown or math.log10(shown[-1] / place) / (1.2 * span) * inches >= TICK_INCHES:
            shown.append(place)
    text = rate_text if axis == "rate" else "{:.0f}".format
    axes.set_xticks(places, [text(place) if place in shown else "" for place in places])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.margins(y=0.12)
    if named:
        room = int(inches / 0.09)  # letters
        title = ranking.task if len(ranking.task) <= room else f"{ranking.task[: room - 1]}…"
        axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=7)
    axes.set_xlabel(AXES[axis], fontsize=9.5, color=INK, labelpad=4)
    axes.set_ylabel(ranking.metric, fontsize=9.5, color=INK, labelpad=5)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, colors=INK, length=3.5, color=FAINT)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def handle(name: str, colour: str, marker: str, level: bool) -> Line2D:
    """An entry of the legend."""
    from matplotlib.lines import Line2D

    if level:
        return Line2D([], [], label=name, color=colour, **LEVEL)
    return Line2D([], [], label=name, color=colour, marker=marker, **LINE)


def ring(x: list[float], y: list[float], size: float) -> Line2D:
    """What marks the chosen setting, at its place or in the legend."""
    from matplotlib.lines import Line2D

    return Line2D(x, y, label="chosen", color=INK, linestyle="none", marker="o", markerfacecolor="none",
                  markersize=size, markeredgewidth=1.5, zorder=4)  # fmt: skip
