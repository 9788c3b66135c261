"""Tables of runs: the mean of each method over its seeds, what it trained, how long it took and what it weighs on disk.

A run is a dict: method, family, seed, score, trained, total (the backbone's parameters), seconds, bytes.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taskgraft.errors import GraftError

if TYPE_CHECKING:
    from rich.table import Table

Run = Mapping[str, Any]
NEEDED = ("method", "score")
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Line:
    """One method's runs. What a method does not have (AutoML no backbone, one seed no interval) is None."""

    method: str
    family: str
    score: float  # mean over seeds
    interval: float | None  # half of the 95 % confidence interval
    seeds: int
    trained: int | None
    total: int | None  # the backbone's parameters: what the share is a share of
    seconds: float | None
    bytes: int | None

    @property
    def share(self) -> float | None:
        return None if self.trained is None or not self.total else self.trained / self.total


def summarise(runs: Sequence[Run]) -> list[Line]:
    """A line for each method, in the order in which they first appear."""
    if not runs:
        raise GraftError("there are no runs to summarise: give at least one.")
    methods: dict[str, list[Run]] = {}
    for number, run in enumerate(runs, start=1):
        missing = [key for key in NEEDED if run.get(key) is None]
        if missing:
            raise GraftError(f"run {number} of {len(runs)} has no {' and no '.join(missing)}: it has {', '.join(run)}.")
        if not math.isfinite(run["score"]):
            raise GraftError(
                f"run {number} ({run['method']}) has a score of {run['score']}: leave it out or run it again."
            )
        methods.setdefault(run["method"], []).append(run)
    return [_line(method, group) for method, group in methods.items()]


def _line(method: str, group: list[Run]) -> Line:
    seeds = [run.get("seed", number) for number, run in enumerate(group)]
    if len(set(seeds)) < len(seeds):
        raise GraftError(f"method {method!r} has two runs with seed {statistics.mode(seeds)}: an interval over seeds "
                         "needs one run of each.")  # fmt: skip
    if len(totals := {run.get("total") for run in group}) > 1:
        raise GraftError(f"method {method!r} has runs on backbones of {' and '.join(sorted(map(str, totals)))} "
                         "parameters: compare runs on one.")  # fmt: skip
    scores = [float(run["score"]) for run in group]
    trained, size = _mean(group, "trained"), _mean(group, "bytes")
    return Line(
        method=method,
        family=group[0].get("family", method),
        score=statistics.fmean(scores),
        interval=confidence_interval(scores),
        seeds=len(group),
        trained=None if trained is None else round(trained),
        total=totals.pop(),
        seconds=_mean(group, "seconds"),
        bytes=None if size is None else round(size),
    )


def _mean(group: Sequence[Run], key: str) -> float | None:
    values = [run.get(key) for run in group]
    known = [float(value) for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def confidence_interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of their mean, by Student's t; one value has none."""
    from scipy.stats import t

    if len(values) < 2:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * error)


# -- numbers for people; what is not known is a dash


def count_text(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def share_text(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3g} %"


def score_text(score: float, interval: float | None = None) -> str:
    return f"{score:.3f}" if interval is None else f"{score:.3f} ± {interval:.3f}"


def bytes_text(size: int | None) -> str:
    if size is None:
        return "-"
    amount, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 99.5 else f"{amount:.1f} {unit}"


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# -- tables


def cells(lines: Sequence[Line], metric: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows as text. The share's column names its denominator; where lines differ in it, each cell does."""
    totals = {line.total for line in lines if line.total}
    common = totals.pop() if len(totals) == 1 else None
    interval = " ± 95 % interval" if any(line.interval is not None for line in lines) else ""
    header = ["method", f"{metric}{interval}", "seeds", "trained",
              f"of the backbone's {common:,}" if common else "of the backbone", "time", "size"]  # fmt: skip
    rows = []
    for line in lines:
        share = share_text(line.share)
        if line.share is not None and not common:
            share += f" of {line.total:,}"
        rows.append([line.method, score_text(line.score, line.interval), str(line.seeds), count_text(line.trained),
                     share, seconds_text(line.seconds), bytes_text(line.bytes)])  # fmt: skip
    return header, rows


def markdown(lines: Sequence[Line], metric: str) -> str:
    """The lines as a Markdown table; `metric` is what the score is, and on which split, in words."""
    return markdown_table(*cells(lines, metric))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Any small table: the first column to the left, the others to the right, padded so that it reads as text too."""
    if wrong := [row for row in rows if len(row) != len(header)]:
        raise GraftError(f"a row of the table has {len(wrong[0])} cells, and its header {len(header)}: {wrong[0]}.")
    table = [[re.sub(r"(?<!\\)\|", r"\|", " ".join(cell.split())) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in table)) for i in range(len(header))]
    text = [
        "| "
        + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        + " |"
        for row in table
    ]
    ruler = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([text[0], ruler, *text[1:]]) + "\n"


def rich_table(lines: Sequence[Line], metric: str, title: str) -> Table:
    """The lines for a terminal, the best mean in bold."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    header, rows = cells(lines, metric)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, name in enumerate(header):
        widest = max((len(row[i]) for row in rows), default=0)  # a header may wrap, a number must not
        table.add_column(name, justify="right" if i else "left", min_width=widest if i else None)
    best = max((line.score for line in lines), default=None)
    for line, row in zip(lines, rows, strict=True):
        table.add_row(*map(Text, row), style="bold" if line.score == best else None)
    return table
