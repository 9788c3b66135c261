"""Tables and figures of what was measured.

To draw a file again: python benchmarks/plots.py benchmarks/results/gpu.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = Mapping[str, Any]
INK, FAINT, GRID = "#222222", "#6b6b6b", "#e4e4e4"
COLOURS = {"ours": "#0072B2", "adapters": "#D55E00", "peft": "#009E73"}  # Okabe and Ito's
NAMES = {"ours": "taskgraft", "adapters": "adapters", "peft": "peft"}
DPI = 160
UNITS = {"ms": "ms", "mib": "MiB"}
AXES = {"tasks": "tasks in the bank", "rows": "rows of a batch", "length": "tokens of a row", "size": "adapter size"}


# -- tables


def write_table(record: Record, path: Path) -> None:
    """The record as Markdown: where, with what, each section, what was asked and found, what was left out."""
    lines = [f"# {record['title']}", "", f"`{record['command']}`", ""]
    if record["smoke"]:
        lines += ["**A smoke run: its times mean nothing.**", ""]
    lines += [f"Machine: {listed(record['hardware'])}.", ""]
    lines += [f"Setting: {listed(record['setting'])}.", ""]
    lines += [f"- {NAMES[side]}: {listed(found)}" for side, found in record["sides"].items()]
    for name, section in record["sections"].items():
        lines += ["", f"## {name}", "", *section_table(section)]
    left_out = [(name, reason) for name, reason in record["skipped"].items()] + [
        (", ".join(filter(None, (name, skip["side"], skip["variant"]))), skip["reason"])
        for name, section in record["sections"].items()
        for skip in section["skipped"]
    ]
    if left_out:
        lines += ["", "## Not measured", "", *(f"- {name}: {reason}" for name, reason in left_out)]
    path.write_text("\n".join(lines) + "\n")


def listed(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)


def section_table(section: Record) -> list[str]:
    unit, baseline = section["unit"], section["baseline"]
    ratio = f" of {baseline} |" if baseline else ""
    lines = [f"| | | median {UNITS[unit]} | quartiles | min | repeats |{ratio}", "|---" * (7 if baseline else 6) + "|"]
    for found in section["variants"]:
        numbers = [number(found[f"{key}_{unit}"]) for key in ("median", "q1", "q3", "min")]
        line = f"| {NAMES[found['side']]} | {found['variant']} | {numbers[0]} | {numbers[1]} to {numbers[2]} "
        line += f"| {numbers[3]} | {found['rounds']:g} |"
        lines.append(line + (f" {found['ratio']:.3f} |" if "ratio" in found else " |" if baseline else ""))
    if section["targets"]:
        lines += ["", "| target | measured | met |", "|---|---|---|"]
    for target in section["targets"]:
        lines.append(f"| {target['words']} | {found_words(target)} | {verdict(target['met'])} |")
    return lines


def number(value: float) -> str:
    """Three figures or more; a thousand and above whole."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def found_words(target: Record) -> str:
    if target["measured"] is None:
        return "not measured"
    if target["limit"] <= 0.5:
        return f"{1 / target['measured']:.2f} times"
    return f"{target['measured']:.3f}"


def verdict(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "no"


# -- figures


def draw_bars(record: Record, path: Path) -> None:
    """A panel for each section: every variant over its side's own baseline, the targets as thin lines on our bars."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = {name: section for name, section in record["sections"].items() if bars_of(section)}
    columns = columns_of(panels)
    inch = 0.235  # of height for a bar; a panel has three more for its title and axis
    heights = [sum(len(bars_of(panels[name])) + 3.2 for name in column) * inch for column in columns]
    top = 1.0
    height = max(heights, default=1.0) + top
    figure = Figure(figsize=(11, height))
    for number_of_column, column in enumerate(columns):
        y = height - top
        for name in column:
            bars = len(bars_of(panels[name]))
            y -= (bars + 3.2) * inch
            left = 0.125 + 0.5 * number_of_column
            axes = figure.add_axes((left, (y + 1.6 * inch) / height, 0.34, bars * inch / height))
            draw_section(axes, name, panels[name])
    sides = [side for side in NAMES if side in record["sides"]]
    figure.text(0.012, 1 - 0.26 / height, record["title"], fontsize=13, fontweight="bold", color=INK, va="center")
    figure.text(0.012, 1 - 0.53 / height, subtitle(record), fontsize=9, color=FAINT, va="center")
    figure.legend(
        handles=[Patch(color=COLOURS[side], label=NAMES[side]) for side in sides],
        loc="center left", bbox_to_anchor=(0.004, 1 - 0.8 / height), frameon=False, ncols=3, fontsize=9.5,
        labelcolor=INK, handlelength=1.2, handleheight=0.9, columnspacing=1.6,
    )  # fmt: skip
    figure.savefig(path, dpi=DPI)


def bars_of(section: Record) -> list[Record]:
    """What is drawn: the variants that have a ratio, but for the baselines themselves."""
    return [v for v in section["variants"] if "ratio" in v and v["variant"] != section["baseline"]]


def columns_of(panels: Mapping[str, Record]) -> list[list[str]]:
    """Forwards on the left, training on the right; one column where there is one kind alone."""
    forwards = [name for name, section in panels.items() if section["kind"] in ("forward", "graphs")]
    others = [name for name in panels if name not in forwards]
    return [column for column in (forwards, others) if column]


def subtitle(record: Record) -> str:
    where = record["hardware"].get("gpu") or record["hardware"]["cpu"]
    setting = record["setting"]
    shape = setting["backbone"] or f"BERT of {setting['layers']} layers, hidden {setting['width']}, random weights"
    words = f"{where}; {shape}, {setting['dtype']}, {setting['length']} tokens, size {setting['size']}"
    note = "a smoke run: its times mean nothing" if record["smoke"] else "thin lines are targets"
    return f"{words}. Time or memory over each side's own baseline; {note}."


def draw_section(axes: Axes, name: str, section: Record) -> None:
    bars = bars_of(section)
    ratios = [bar["ratio"] for bar in bars]
    lines = {target["variant"]: target["bar"] for target in section["targets"] if target["bar"] is not None}
    for target in section["targets"]:  # of two targets of one bar the stricter counts
        if target["bar"] is not None:
            lines[target["variant"]] = min(lines[target["variant"]], target["bar"])
    widest = max([1.0, *ratios, *lines.values()])
    axes.barh(range(len(bars)), ratios, height=0.72, color=[COLOURS[bar["side"]] for bar in bars])
    for y, bar in enumerate(bars):
        end = bar["ratio"]
        line = lines.get(bar["variant"]) if bar["side"] == "ours" else None
        if line is not None:
            axes.plot([line, line], [y - 0.5, y + 0.5], color=INK, linewidth=1.1, solid_capstyle="butt")
            end = line if end < line < end + 0.1 * widest else end  # no line through the number
        axes.text(end + 0.012 * widest, y, f"{bar['ratio']:.2f}", va="center", fontsize=8.5, color=INK)
    axes.axvline(1.0, color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    axes.set_yticks(range(len(bars)), [bar["variant"] for bar in bars], fontsize=8.5, color=INK)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.14 * widest)
    axes.set_title(name, loc="left", fontsize=10, fontweight="bold", color=INK, pad=5)
    axes.set_xlabel(f"of {section['baseline']}", fontsize=8.5, color=FAINT, labelpad=2)
    finish(axes, "x")


def finish(axes: Axes, grid: str) -> None:
    axes.grid(axis=grid, color=GRID, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5, colors=INK, length=0)
    for side in ("top", "right", "left" if grid == "y" else "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom" if grid == "y" else "left"].set_color(FAINT)


def draw_scaling(record: Record, path: Path) -> None:
    """A panel for each axis of the series: time over the bare backbone's, the other three at the centre."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure, centre = Figure(figsize=(11, 3.9)), record["centre"]
    series = {name: series_of(record["points"], centre, name) for name in AXES}
    ratios = [ratio for points in series.values() for point in points for ratio in point["ratios"].values()]
    for place, (name, words) in enumerate(AXES.items()):
        axes = figure.add_axes((0.055 + 0.24 * place, 0.175, 0.205, 0.56))
        for way, style in record["ways"].items():
            points = [point for point in series[name] if way in point["ratios"]]
            axes.plot(
                [point[name] for point in points], [point["ratios"][way] for point in points], style, label=way,
                color=COLOURS["ours"], linewidth=1.7, markersize=5, markerfacecolor="white", markeredgewidth=1.4,
            )  # fmt: skip
        axes.axhline(1.0, color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        axes.set_xscale("log", base=10 if name == "tasks" else 2)
        values = sorted({point[name] for point in series[name]})
        axes.set_xticks(values, [f"{value:,}" for value in values])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
        axes.set_ylim(0, 1.08 * max([1.0, *ratios]))
        axes.set_title(words, loc="left", fontsize=10, fontweight="bold", color=INK, pad=6)
        finish(axes, "y")
        if len(values) > 6:
            axes.tick_params(axis="x", labelsize=7.5)
        if place:
            axes.set_yticklabels([])
    figure.text(0.012, 0.945, record["title"], fontsize=13, fontweight="bold", color=INK, va="center")
    where = record["hardware"].get("gpu") or record["hardware"]["cpu"]
    words = f"{where}. Forward over the bare backbone's; what does not vary is {point_words(centre)}."
    figure.text(0.012, 0.875, words, fontsize=9, color=FAINT, va="center")
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower left", bbox_to_anchor=(0.045, 0.0), frameon=False, ncols=2, fontsize=9)
    figure.savefig(path, dpi=DPI)


def point_words(point: Record) -> str:
    return f"{point['tasks']:,} tasks, {point['rows']:,} rows, {point['length']:,} tokens, size {point['size']}"


def series_of(points: Sequence[Record], centre: Mapping[str, int], name: str) -> list[Record]:
    """The points that differ from the centre in this axis alone, in its order."""
    alike = [p for p in points if all(p[other] == value for other, value in centre.items() if other != name)]
    return sorted(alike, key=lambda point: int(point[name]))


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("one file: python benchmarks/plots.py benchmarks/results/gpu.json")
    path = Path(sys.argv[1])
    record = json.loads(path.read_text())
    (draw_scaling if "points" in record else draw_bars)(record, path.with_suffix(".png"))
    print(f"drawn: {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
