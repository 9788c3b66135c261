"""The trade-off figure of Houlsby et al.: the score against the trained parameters, a line for each family."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from taskgraft.errors import GraftError
from taskgraft.reports.tables import Line, Run, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

SUFFIXES = (".png", ".svg")
DPI = 160
INK, FAINT = "#222222", "#6b6b6b"
LABEL_SIZE = 8.5  # typographic points


@dataclass(frozen=True)
class Style:
    """How a family is drawn, and where its points' labels would stand if they could: left or right, above or below."""

    name: str
    colour: str
    marker: str
    corner: tuple[int, int] = (-1, 1)


FAMILIES = {  # the colours are Okabe and Ito's, which the colour-blind tell apart
    "adapter": Style("adapters, by size", "#0072B2", "o"),
    "top-layers": Style("top k layers, by k", "#D55E00", "s", (1, -1)),
    "norms": Style("norms only", "#009E73", "^"),
    "head": Style("head only", "#CC79A7", "v"),
    "full": Style("full fine-tuning", INK, "D"),
    "automl": Style("AutoML without a backbone", FAINT, ""),  # no marker: a level across
}
FURTHER = (("#E69F00", "p"), ("#56B4E9", "h"), ("#8C6D1F", "<"), ("#5B5EA6", ">"))  # other families, and variants


def draw_tradeoff(runs: Sequence[Run], path: str | PathLike[str], *, metric: str, title: str, subtitle: str) -> None:
    """Write the figure as PNG or SVG, by the path's suffix."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise GraftError(f"a figure cannot be written as {target.name!r}: end its name in {' or '.join(SUFFIXES)}.")
    if not target.parent.is_dir():
        raise GraftError(f"the folder {str(target.parent)!r} does not exist: make it, or name another for the figure.")
    tradeoff_figure(runs, metric=metric, title=title, subtitle=subtitle).savefig(target, dpi=DPI)


def tradeoff_figure(runs: Sequence[Run], *, metric: str, title: str, subtitle: str) -> Figure:
    """Means over seeds with their 95 % intervals. AutoML trains none of these parameters: a dashed line across."""
    from matplotlib.figure import Figure

    series = series_of(summarise(runs))
    figure = Figure(figsize=(8, 5.4))
    axes = figure.add_axes((0.09, 0.115, 0.885, 0.655))
    handles = [(draw_series if style.marker else draw_level)(axes, lines, style) for style, lines in series]
    finish_axes(axes, metric, {line.total for _, lines in series for line in lines if line.total})
    for style, lines in series:
        if style.marker and len(lines) > 1:
            label_points(axes, lines, style, 72 / figure.dpi)

    figure.text(0.025, 0.955, title, fontsize=13, fontweight="bold", color=INK, va="center")
    figure.text(0.025, 0.908, subtitle, fontsize=9.5, color=FAINT, va="center")
    figure.legend(handles=handles, loc="center left", bbox_to_anchor=(0.016, 0.832), frameon=False,
                  ncols=(len(handles) + 1) // 2, fontsize=9.5, labelcolor=INK, columnspacing=2,
                  handlelength=2.2)  # fmt: skip
    return figure


def series_of(lines: Sequence[Line]) -> list[tuple[Style, list[Line]]]:
    """What is drawn together, by trained parameters: a family, or each variant of it (a recipe, a learning rate)."""
    series: dict[tuple[str, str], list[Line]] = {}
    for line in sorted(lines, key=lambda line: line.trained or 0):
        if line.family != "automl" and not line.trained:
            raise GraftError(f"method {line.method!r} has no trained parameters, and so no place on the axis: give its "
                             "runs `trained`, or leave them out.")  # fmt: skip
        series.setdefault((line.family, variant_and_size(line.method)[0]), []).append(line)
    families = [family for family, _ in series]
    if set(families) == {"automl"}:
        raise GraftError("the trade-off figure needs a method with trained parameters, and the runs are all AutoML's.")
    further = itertools.cycle(FURTHER)
    styled = []
    for family in [*FAMILIES, *dict.fromkeys(f for f in families if f not in FAMILIES)]:
        style = FAMILIES.get(family)
        for variant in (variant for name, variant in series if name == family):
            style = style or Style(variant, *next(further))
            named = style if families.count(family) == 1 and family in FAMILIES else replace(style, name=variant)
            styled.append((named, series[family, variant]))
            style = FAMILIES[family] if family == "automl" else None
    return styled


def variant_and_size(method: str) -> tuple[str, str]:
    """What a method's name says: ("adapter", "64") for "adapter 64", ("top@1e-4", "2") for "top-2@1e-4"."""
    name, at, rate = method.partition("@")
    numbers = list(re.finditer(r"[\s-]*(\d+)", name))
    if not numbers:
        return method, ""
    last = numbers[-1]
    return name[: last.start()] + name[last.end() :] + at + rate, last[1]


def draw_series(axes: Axes, lines: list[Line], style: Style) -> Line2D:
    """A line through the means, or one mark, with a whisker for each interval."""
    x, y = [line.trained or 0 for line in lines], [line.score for line in lines]
    axes.errorbar(x, y, [line.interval or 0.0 for line in lines], fmt="none", elinewidth=1.3, alpha=0.45,
                  ecolor=style.colour)  # fmt: skip
    (drawn,) = axes.plot(
        x,
        y,
        label=style.name,
        color=style.colour,
        linewidth=1.8,
        linestyle="-" if len(lines) > 1 else "none",
        marker=style.marker,
        markersize=6.5 if len(lines) > 1 else 7.5,
        markeredgecolor="white",
        markeredgewidth=0.8,
        zorder=3,
    )
    return drawn


def draw_level(axes: Axes, lines: list[Line], style: Style) -> Line2D:
    """The best of them as a level to compare with; its interval as a band."""
    best = max(lines, key=lambda line: line.score)
    if best.interval:
        axes.axhspan(best.score - best.interval, best.score + best.interval, color=style.colour, alpha=0.1, linewidth=0)
    return axes.axhline(best.score, label=style.name, color=style.colour, linestyle=(0, (5, 3)), linewidth=1.5)


def finish_axes(axes: Axes, metric: str, totals: set[int]) -> None:
    """A logarithmic axis in powers of ten that states the backbone's size, and no more ink than needed."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.margins(x=0.05, y=0.09)
    axes.autoscale_view()
    axes.xaxis.set_major_locator(LogLocator(base=10))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    whole = f" (the backbone has {' or '.join(f'{total:,}' for total in sorted(totals))})" if totals else ""
    axes.set_xlabel(f"trained parameters per task{whole}", fontsize=10.5, color=INK, labelpad=7)
    axes.set_ylabel(metric, fontsize=10.5, color=INK, labelpad=7)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9.5, colors=INK, length=3.5, color=FAINT)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def short_count(value: float) -> str:
    """1000 as 1k, 10,000,000 as 10M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def label_points(axes: Axes, lines: list[Line], style: Style, points_per_pixel: float) -> None:
    """The size or k in a method's name, beside its point: off the family's own line, and only where there is room."""
    from matplotlib.patheffects import withStroke

    kept: list[tuple[float, int]] = []
    texts = [variant_and_size(line.method)[1] for line in lines]
    for i, line in enumerate(lines):
        place = float(axes.transData.transform((line.trained or 1, line.score))[0]) * points_per_pixel
        if kept and place - kept[-1][0] < LABEL_SIZE * (0.6 * len(texts[i]) + 0.3):
            if i < len(lines) - 1:
                continue
            kept.pop()  # the last point's label matters more
        kept.append((place, i))
    for _, i in kept:
        side, height = free_corner(lines, i, style.corner)
        axes.annotate(
            texts[i],
            (lines[i].trained or 1, lines[i].score),
            xytext=(3.5 * side, 3.5 * height),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="bottom" if height > 0 else "top",
            fontsize=LABEL_SIZE,
            color=style.colour,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
            zorder=4,
        )


def free_corner(lines: list[Line], i: int, wanted: tuple[int, int]) -> tuple[int, int]:
    """Left or right of a point, above or below it: the first corner that its family's line does not run through."""
    side, height = wanted
    for corner in ((side, height), (-side, -height), (-side, height), (side, -height)):
        neighbour = i + corner[0]
        if not 0 <= neighbour < len(lines) or (lines[neighbour].score - lines[i].score) * corner[1] <= 0:
            return corner
    return wanted
