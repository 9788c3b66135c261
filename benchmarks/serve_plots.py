"""What the serving benchmark found: its targets, its tables and its figure.

To draw a file again: python benchmarks/serve_plots.py benchmarks/results/serve.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alternatives import GROUPED, MODELS, SWAPPED
from plots import COLOURS, DPI, FAINT, INK, finish, listed, number, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = Mapping[str, Any]
MEBIBYTE = 1 << 20
STYLES = {  # of the ways to serve: colour, line, marker
    "taskgraft": (COLOURS["ours"], "-", "o"),
    SWAPPED: (COLOURS["adapters"], "-", "s"),
    GROUPED: (COLOURS["adapters"], "--", "s"),
    MODELS: (COLOURS["peft"], "-", "^"),
}
LOADS = {  # of the figure: a load's name, and where it stands in a record
    "closed loop": ("closed",),
    "closed loop, churn": ("churn", "closed"),
    "open loop": ("open",),
    "open loop, churn": ("churn", "open"),
}


def at(sections: Record, *path: str) -> Any:
    """What stands there, or None where it was not measured."""
    for key in path:
        sections = sections.get(key) or {}
    return sections or None


# -- targets


def targets(record: Record) -> Iterator[dict[str, Any]]:
    """The targets of what was measured: the section, what is asked, what was found, and whether that is enough."""
    sections, clients = record["sections"], record["setting"]["clients"]

    def target(section: str, words: str, measured: float | None, least: float = 0.0, most: float = float("inf")) -> Any:
        met = None if measured is None else least <= measured <= most
        return {"section": section, "words": words, "measured": measured, "met": met}

    for name, path in LOADS.items():
        load = at(sections, *path)
        if load is None:
            continue
        engine, single = load.get("engine"), load.get("single_ms")
        if name.startswith("closed"):
            rate, p99 = load["throughput"], load["p99_ms"]
            words = "throughput: at least 0.7 of the engine's own"
            yield target(name, words, rate / engine if engine else None, least=0.7)
            words = f"p99: at most 2 times {clients} / throughput"
            yield target(name, words, p99 / (1e3 * clients / rate) if p99 else None, most=2.0)
        else:
            words = "p99: at most 10 times a single row's latency (the server's, one client)"
            yield target(name, words, load["p99_ms"] / single if single and load["p99_ms"] else None, most=10.0)
        yield target(name, "requests lost, refused, answered twice or wrong: 0", mishaps(load), most=0)
        if "churn" in load:
            words = "changes that failed, and changed tasks that answered as before: 0"
            yield target(name, words, load["churn"]["failed"], most=0)
    ours = [one for one in at(sections, "alternatives", "trials") or () if one["way"] == "taskgraft"]
    if ours:
        words = "requests lost, refused, answered twice or wrong: 0"
        yield target("alternatives", words, sum(map(mishaps, ours)), most=0)
    many = at(sections, "many")
    if many is not None:
        name = f"{many['tasks']:,} grafts"
        yield target(name, "tasks without the right answer: 0", many["tasks"] - right(many), most=0)
        words = "resident bytes at any second: at most the budget"
        yield target(name, words, many["resident_bytes"] / many["budget_bytes"], most=1.0)


def mishaps(load: Record) -> int:
    return load["lost"] + load["duplicated"] + load["wrong"] + sum(load["errors"].values())  # type: ignore[no-any-return]


def right(load: Record) -> int:
    return load["answers"] - load["wrong"] - load["duplicated"]  # type: ignore[no-any-return]


# -- tables


def write_table(record: Record, path: Path) -> None:
    """The record as Markdown."""
    sections = record["sections"]
    lines = [f"# {record['title']}", "", f"`{record['command']}`", ""]
    if record["smoke"]:
        lines += ["**A smoke run: its times mean nothing.**", ""]
    lines += [f"Machine: {listed(record['hardware'])}; {listed(record['versions'])}.", ""]
    lines += [f"Setting: {listed(record['setting'])}.", "", "## Targets", ""]
    lines += ["| | target | measured | met |", "|---|---|---|---|"]
    for one in targets(record):
        measured = "not measured" if one["measured"] is None else f"{one['measured']:.3g}"
        lines.append(f"| {one['section']} | {one['words']} | {measured} | {verdict(one['met'])} |")
    lines += [
        *load_table(record),
        *open_words(sections),
        *churn_words(sections),
        *alternatives_table(sections),
        *many_table(sections),
    ]
    dates = [f"{name} {found['date']} (load before: {found['load_before']:g})" for name, found in sections.items()]
    lines += ["", f"Measured: {', '.join(dates)}.", *oddities(sections)]
    path.write_text("\n".join(lines) + "\n")


def load_table(record: Record) -> list[str]:
    sections = record["sections"]
    lines = ["", "## Loads", "", f"Latencies in ms; one text a request, {record['setting']['tasks']} tasks.", ""]
    lines += ["| | answers/s | p50 | p95 | p99 | max | answers | cores: server, client |", "|---" * 8 + "|"]
    if offline := at(sections, "offline"):
        lines.append(f"| the engine itself, all at once | {number(offline['throughput'])} | | | | | | |")
        rate, single = 1e3 / offline["single_ms"], number(offline["single_ms"])
        lines.append(f"| the engine itself, one at a time | {number(rate)} | {single} | | | | | |")
    rows = {"one client": at(sections, "open", "single")}
    for name, path in LOADS.items():
        load = at(sections, *path)
        at_rate = f", {load['rate']:.1f} requests/s" if load and "rate" in load else ""
        rows[name + at_rate] = load
    for name, load in rows.items():
        if load is not None:
            found = [number(load[f"{key}_ms"] or 0.0) for key in ("p50", "p95", "p99", "max")]
            cores = f"{load['server_cores']:.2f}, {load['client_cores']:.2f}"
            line = [name, number(load["throughput"]), *found, f"{load['answers']:,}", cores]
            lines.append(f"| {' | '.join(line)} |")
    return lines


def open_words(sections: Record) -> list[str]:
    """The open loop's p99 beside a single row's latency: over HTTP, and in the engine itself."""
    p99, served = at(sections, "open", "p99_ms"), at(sections, "open", "single_ms")
    engine = at(sections, "offline", "single_ms")
    if not (p99 and served and engine):
        return []
    words = f"{p99 / served:.1f} times a single row's latency over HTTP, {p99 / engine:.1f} times the engine's own"
    return ["", f"The open loop's p99 is {words}."]


def churn_words(sections: Record) -> list[str]:
    """How often tasks were changed, and what that cost."""
    lines = []
    for loop in ("closed", "open"):
        load = at(sections, "churn", loop)
        if load is None:
            continue
        churn = load["churn"]
        put, delete = (churn[method] for method in ("put", "delete"))
        lines += [
            "",
            f"Churn, {loop} loop: {churn['changes']} changes, one every {1e3 * churn['every_s']:g} ms; PUT "
            f"{number(put['p50_ms'] or 0.0)} ms (p99 {number(put['p99_ms'] or 0.0)}), DELETE "
            f"{number(delete['p50_ms'] or 0.0)} ms (p99 {number(delete['p99_ms'] or 0.0)}); {churn['asked']} times a "
            f"task was asked right after its change.",
        ]
    before, after = at(sections, "closed", "throughput"), at(sections, "churn", "closed", "throughput")
    if before and after:
        lines += ["", f"The closed loop's throughput under churn is {after / before:.2f} of what it is without."]
    return lines


def alternatives_table(sections: Record) -> list[str]:
    found = at(sections, "alternatives")
    if found is None:
        return []
    lines = ["", "## Alternatives", "", "Ours over HTTP from another process; the others within one process.", ""]
    lines += [
        "| tasks | | answers/s | of ours | memory MiB (RSS) | of ours | PSS MiB | rows a batch |",
        "|---" * 8 + "|",
    ]
    for one in found["trials"]:
        if "skipped" in one:
            lines.append(f"| {one['tasks']} | {one['way']} | skipped: {one['skipped']} | | | | | |")
            continue
        own = next(t for t in found["trials"] if t["tasks"] == one["tasks"] and t["way"] == "taskgraft")
        ratios = [f"{one[key] / own[key]:.2f}" if own[key] else "" for key in ("throughput", "rss_bytes")]
        sizes = [number(one[key] / MEBIBYTE) for key in ("rss_bytes", "pss_bytes")]
        rows = f"{one['batch_rows']:.1f}" if "batch_rows" in one else ""
        line = [
            str(one["tasks"]),
            one["way"],
            number(one["throughput"]),
            ratios[0],
            sizes[0],
            ratios[1],
            sizes[1],
            rows,
        ]
        lines.append(f"| {' | '.join(line)} |")
    return lines


def many_table(sections: Record) -> list[str]:
    many = at(sections, "many")
    if many is None:
        return []
    rows = {
        "tasks asked, each once; answered right": f"{many['tasks']:,}; {right(many):,}",
        "answers/s; p50, p99 ms": f"{number(many['throughput'])}; {number(many['p50_ms'])}, {number(many['p99_ms'])}",
        "grafts paged in, out": f"{many['grafts_paged_in_total']:,.0f}, {many['grafts_paged_out_total']:,.0f}",
        "most resident grafts": f"{many['resident_grafts']:,.0f}",
        "most resident MiB; budget": f"{many['resident_bytes'] / MEBIBYTE:.1f}; {many['budget_bytes'] / MEBIBYTE:.1f}",
        "memory of the process, MiB (RSS)": number(many["rss_bytes"] / MEBIBYTE),
    }
    title = f"## {many['tasks']:,} grafts on disk, room for {many['room']:,}"
    return ["", title, "", "| | |", "|---|---|", *(f"| {words} | {found} |" for words, found in rows.items())]


def oddities(sections: Record) -> list[str]:
    """Examples of what went wrong, if anything did."""
    loads = {name: at(sections, *path) for name, path in LOADS.items()} | {"many": at(sections, "many")}
    found = [(name, words) for name, load in loads.items() if load for words in load["examples"]]
    found += [
        (name, words) for name, load in loads.items() if load and "churn" in load for words in load["churn"]["examples"]
    ]
    return ["", "## What went wrong", "", *(f"- {name}: {words}" for name, words in found)] if found else []


# -- the figure


def draw(record: Record, path: Path) -> None:
    """Loads above, throughput and latency with their targets; the alternatives below, throughput and memory."""
    from matplotlib.figure import Figure

    figure, sections = Figure(figsize=(11, 7.0)), record["sections"]
    places = [figure.add_axes((left, bottom, 0.34, height)) for bottom, height in ((0.61, 0.24), (0.13, 0.34))
              for left in (0.14, 0.64)]  # fmt: skip
    draw_throughput(places[0], sections)
    draw_latency(places[1], record)
    draw_ways(places[2], sections, "throughput", 1.0, "answers a second, against tasks")
    draw_ways(places[3], sections, "rss_bytes", MEBIBYTE, "memory of the process, MiB, against tasks")
    note = "a smoke run: its times mean nothing" if record["smoke"] else "thin lines are targets"
    setting = record["setting"]
    words = f"{record['hardware']['cpu']}, {record['hardware']['cores']} cores; {record['backbone']}, adapters of size "
    words += f"{setting['size']}, one text a request, {setting['clients']} clients; {note}."
    figure.text(0.012, 0.965, record["title"], fontsize=13, fontweight="bold", color=INK, va="center")
    figure.text(0.012, 0.928, words, fontsize=9, color=FAINT, va="center")
    handles, names = places[2].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower left", bbox_to_anchor=(0.13, 0.015), frameon=False, ncols=4,
                  fontsize=9, handlelength=3.4)  # fmt: skip
    figure.savefig(path, dpi=DPI)


def draw_throughput(axes: Axes, sections: Record) -> None:
    bars = {"engine alone": at(sections, "offline", "throughput")}
    bars |= {name: at(sections, *path, "throughput") for name, path in LOADS.items()}
    drawn = {name: value for name, value in bars.items() if value is not None}
    colours = [FAINT if name == "engine alone" else COLOURS["ours"] for name in drawn]
    axes.barh(range(len(drawn)), list(drawn.values()), height=0.66, color=colours)
    widest = max(drawn.values(), default=1.0)
    for y, (name, value) in enumerate(drawn.items()):
        if name.startswith("closed") and bars["engine alone"]:
            line = 0.7 * bars["engine alone"]
            axes.plot([line, line], [y - 0.45, y + 0.45], color=INK, linewidth=1.1, solid_capstyle="butt")
        axes.text(value + 0.012 * widest, y, number(value), va="center", fontsize=8.5, color=INK)
    rows(axes, list(drawn), "answers a second", 1.14 * widest)


def draw_latency(axes: Axes, record: Record) -> None:
    """The p50 as a filled point, p95 and p99 as hollow ones, on a line of their own; in powers."""
    from matplotlib.ticker import LogLocator

    sections, clients = record["sections"], record["setting"]["clients"]
    loads = {"one client": at(sections, "open", "single")}
    loads |= {name: at(sections, *path) for name, path in LOADS.items()}
    drawn = {name: load for name, load in loads.items() if load is not None and load["p99_ms"]}
    farthest = 1.0
    for y, (name, load) in enumerate(drawn.items()):
        values = [load[f"{key}_ms"] for key in ("p50", "p95", "p99")]
        axes.plot(values, [y] * 3, color=COLOURS["ours"], linewidth=1.7, zorder=2)
        for value, style in zip(values, ("o", "d", "s"), strict=True):
            fill = COLOURS["ours"] if style == "o" else "white"
            axes.plot([value], [y], style, color=COLOURS["ours"], markersize=5.5, markerfacecolor=fill, zorder=3)
        single = load.get("single_ms")
        line = 2e3 * clients / load["throughput"] if name.startswith("closed") else 10 * single if single else None
        if line is not None and name != "one client":
            axes.plot([line, line], [y - 0.4, y + 0.4], color=INK, linewidth=1.1, solid_capstyle="butt")
        farthest = max(farthest, values[-1], line if line is not None and name != "one client" else 0.0)
    rows(axes, list(drawn), "latency, ms: p50 (filled), p95, p99", 1.2 * farthest)
    if drawn:
        axes.set_xscale("log")
        axes.set_xlim(0.6 * min(load["p50_ms"] for load in drawn.values()), 1.3 * farthest)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(lambda value, place: f"{value:,g}")
        axes.minorticks_off()


def rows(axes: Axes, names: list[str], words: str, widest: float) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8.5, color=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, widest)
    axes.set_title(words, loc="left", fontsize=10, fontweight="bold", color=INK, pad=6)
    finish(axes, "x")


def draw_ways(axes: Axes, sections: Record, key: str, unit: float, words: str) -> None:
    """One line for each way to serve; memory in powers, since a model per task takes so much more."""
    from matplotlib.ticker import LogLocator

    trials = [one for one in at(sections, "alternatives", "trials") or () if "skipped" not in one]
    for way, (colour, line, marker) in STYLES.items():
        points = [(one["tasks"], one[key] / unit) for one in trials if one["way"] == way]
        if points:
            axes.plot(
                *zip(*points, strict=True), color=colour, linestyle=line, marker=marker, label=way, linewidth=1.7,
                markersize=5.5, markerfacecolor="white", markeredgewidth=1.4,
            )  # fmt: skip
    if trials:
        values = [one[key] / unit for one in trials]
        axes.set_xscale("log")
        if key == "throughput":
            axes.set_ylim(0, 1.1 * max(values))
        else:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(lambda value, place: f"{value:,.0f}")
            axes.set_ylim(min(values) / 2, 1.5 * max(values))
        counts = sorted({one["tasks"] for one in trials})
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.minorticks_off()
    axes.set_title(words, loc="left", fontsize=10, fontweight="bold", color=INK, pad=6)
    finish(axes, "y")


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("one file: python benchmarks/serve_plots.py benchmarks/results/serve.json")
    path = Path(sys.argv[1])
    record = json.loads(path.read_text())
    write_table(record, path.with_suffix(".md"))
    draw(record, path.with_suffix(".png"))
    print(f"drawn: {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
