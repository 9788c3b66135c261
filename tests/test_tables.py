"""Tables of runs: means, intervals and numbers for people, by hand."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

import taskgraft as tg
from taskgraft.reports.tables import (
    bytes_text,
    confidence_interval,
    markdown,
    markdown_table,
    rich_table,
    score_text,
    seconds_text,
    share_text,
    summarise,
)


def run(method: str, seed: int, score: float, **more: Any) -> dict[str, Any]:
    usual = {"family": "adapter", "trained": 605_186, "total": 22_713_216, "seconds": 41.2, "bytes": 2_430_000}
    return {"method": method, "seed": seed, "score": score, "metrics": {}, "validation": {}, **usual, **more}


ADAPTER = [run("adapter 64", seed, score) for seed, score in enumerate((0.90, 0.92, 0.94))]
FULL = run("full", 0, 0.93, family="full", trained=22_713_986, seconds=95, bytes=None)
AUTOML = run("automl", 0, 0.8, family="automl", trained=None, total=None, bytes=None)


def test_means_and_intervals_by_hand() -> None:
    line, full, automl = summarise([ADAPTER[0], FULL, AUTOML, *ADAPTER[1:]])
    assert [line.method, full.method, automl.method] == ["adapter 64", "full", "automl"]
    assert line.score == pytest.approx(0.92) and line.seeds == 3
    assert line.interval == pytest.approx(4.302653 * 0.02 / 3**0.5, rel=1e-6)  # t of 2 degrees of freedom
    assert line.share == pytest.approx(0.0266447, abs=1e-7) and line.seconds == pytest.approx(41.2)
    assert full.interval is None and full.seeds == 1
    assert automl.trained is None and automl.share is None and automl.total is None


def test_an_interval_needs_two_values() -> None:
    assert confidence_interval([0.5]) is None
    assert confidence_interval([0.5, 0.5]) == 0
    assert confidence_interval([0.0, 1.0]) == pytest.approx(12.7062 / 2, rel=1e-5)


def test_numbers_for_people() -> None:
    assert score_text(0.9149) == "0.915" and score_text(0.9, 0.0123) == "0.900 ± 0.012"
    assert [share_text(s) for s in (0.0266447, 1.00003, 0.0000339, None)] == ["2.66 %", "100 %", "0.00339 %", "-"]
    sizes = {0: "0 B", 999: "999 B", 2_430_000: "2.4 MB", 999_960: "1.0 MB", 135_272: "135 kB", 90_900_000: "90.9 MB"}
    assert {size: bytes_text(size) for size in sizes} == sizes and bytes_text(None) == "-"
    times = {0.42: "0.4 s", 9.96: "10 s", 41.2: "41 s", 59.7: "1 min 0 s", 125: "2 min 5 s", 3_725: "1 h 2 min"}
    assert {time: seconds_text(time) for time in times} == times and seconds_text(None) == "-"


def test_markdown_states_the_denominator_once() -> None:
    table = markdown(summarise([*ADAPTER, FULL, AUTOML]), "accuracy, test")
    header, ruler, first, full, automl = table.splitlines()
    assert [c.strip() for c in header.strip("|").split("|")] == [
        "method", "accuracy, test ± 95 % interval", "seeds", "trained", "of the backbone's 22,713,216", "time", "size",
    ]  # fmt: skip
    assert set(ruler) == set("|-:") and len({len(line) for line in table.splitlines()}) == 1
    assert [c.strip() for c in first.strip("|").split("|")] == [
        "adapter 64", "0.920 ± 0.050", "3", "605,186", "2.66 %", "41 s", "2.4 MB",
    ]  # fmt: skip
    assert [c.strip() for c in full.strip("|").split("|")] == [
        "full", "0.930", "1", "22,713,986", "100 %", "1 min 35 s", "-",
    ]  # fmt: skip
    assert automl.count(" - ") == 3


def test_two_backbones_state_theirs_in_each_cell() -> None:
    other = run("adapter 64 on BERT", 0, 0.9, trained=2_419_202, total=109_482_240)
    table = markdown(summarise([ADAPTER[0], other]), "accuracy")
    assert "2.66 % of 22,713,216" in table and "2.21 % of 109,482,240" in table
    assert "of the backbone |" in table and "interval" not in table, "one seed has no interval"


def test_a_table_of_anything() -> None:
    table = markdown_table(["task", "n"], [["a|b", "1"], [r"c\|d", "12"], ["two\nlines", "3"]])
    assert table == (
        "| task      |   n |\n|-----------|----:|\n| a\\|b      |   1 |\n| c\\|d      |  12 |\n| two lines |   3 |\n"
    )
    with pytest.raises(tg.GraftError, match="has 1 cells, and its header 2"):
        markdown_table(["a", "b"], [["1"]])


def test_a_terminal_of_80_columns_holds_the_numbers_whole() -> None:
    console = Console(width=80, record=True, force_terminal=True, file=io.StringIO())
    console.print(rich_table(summarise([*ADAPTER, FULL, AUTOML]), "accuracy, test", "Spam [by SMS]"))
    text = console.export_text(clear=False)
    assert "Spam" in text
    for cell in ("adapter 64", "0.920 ± 0.050", "605,186", "2.66 %", "41 s", "2.4 MB", "22,713,986", "1 min 35 s"):
        assert cell in text
    assert "\x1b[1m" in next(line for line in console.export_text(styles=True).splitlines() if "0.930" in line)


BAD = [
    ([], "there are no runs"),
    ([{"method": "a", "seed": 0}], "run 1 of 1 has no score: it has method, seed"),
    ([run("a", 0, float("nan"))], r"run 1 \(a\) has a score of nan"),
    ([run("a", 0, 0.5), run("a", 0, 0.6)], "method 'a' has two runs with seed 0"),
    ([run("a", 0, 0.5), run("a", 1, 0.6, total=7)], "method 'a' has runs on backbones of 22713216 and 7 parameters"),
]


@pytest.mark.parametrize(("runs", "says"), BAD)
def test_bad_runs_get_one_sentence(runs: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(tg.GraftError, match=says) as caught:
        summarise(runs)
    assert "\n" not in str(caught.value)
