"""The trade-off figure: its artists carry the runs' numbers, nothing hides anything, its files are pictures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

import taskgraft as tg
from taskgraft.reports.tables import summarise
from taskgraft.reports.tradeoff import draw_tradeoff, series_of, short_count, tradeoff_figure, variant_and_size

WORDS = {"metric": "accuracy, test", "title": "A title", "subtitle": "and what is below it"}


def runs_of(method: str, family: str, trained: int | None, *scores: float) -> list[dict[str, Any]]:
    total = None if trained is None else 22_713_216
    return [{"method": method, "family": family, "seed": seed, "score": score, "trained": trained, "total": total}
            for seed, score in enumerate(scores)]  # fmt: skip


ADAPTERS = [run for m in (2, 8, 64) for run in runs_of(f"adapter {m}", "adapter", 9_000 * m, 0.80 + m / 1e3, 0.84)]
TOP = [run for k in (1, 2, 6) for run in runs_of(f"top {k}", "top-layers", 1_775_000 * k, 0.7 + k / 50)]
OTHERS = [
    *runs_of("norms", "norms", 10_754, 0.75),
    *runs_of("head", "head", 770, 0.7),
    *runs_of("full", "full", 22_713_986, 0.9, 0.92),
    *runs_of("automl", "automl", None, 0.72, 0.74),
]


def drawn() -> Figure:
    return tradeoff_figure([*ADAPTERS[::-1], *TOP, *OTHERS], **WORDS)


def curves(figure: Figure) -> dict[str, tuple[list[float], list[float]]]:
    """Of each labelled line its points."""
    lines = [line for line in figure.axes[0].lines if not str(line.get_label()).startswith("_")]
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


def test_the_lines_carry_the_means_in_the_order_of_their_parameters() -> None:
    found = curves(drawn())
    assert found["adapters, by size"][0] == [18_000, 72_000, 576_000]
    assert found["adapters, by size"][1] == pytest.approx([0.821, 0.824, 0.852])
    assert found["top k layers, by k"][0] == [1_775_000, 3_550_000, 10_650_000]
    assert found["full fine-tuning"] == ([22_713_986], pytest.approx([0.91]))
    assert found["norms only"][0] == [10_754] and found["head only"][0] == [770]


def test_automl_is_a_dashed_level_with_its_interval() -> None:
    figure = drawn()
    (level,) = [line for line in figure.axes[0].lines if line.get_label() == "AutoML without a backbone"]
    assert list(level.get_ydata()) == pytest.approx([0.73, 0.73]) and level.is_dashed()
    half = summarise(OTHERS)[-1].interval
    assert half is not None
    (band,) = figure.axes[0].patches
    assert [band.get_y(), band.get_height()] == pytest.approx([0.73 - half, 2 * half])


def test_whiskers_span_the_95_percent_interval() -> None:
    line = summarise(runs_of("full", "full", 22_713_986, 0.9, 0.92))[0]
    figure = tradeoff_figure(OTHERS, **WORDS)
    spans = [tuple(s[:, 1]) for bar in figure.axes[0].collections for s in bar.get_segments() if s[0, 0] == 22_713_986]
    assert line.interval is not None
    assert spans == [pytest.approx((0.91 - line.interval, 0.91 + line.interval))]


def test_words_and_axes() -> None:
    figure = drawn()
    axes = figure.axes[0]
    assert axes.get_xscale() == "log" and axes.get_ylabel() == "accuracy, test"
    assert "the backbone has 22,713,216" in axes.get_xlabel(), "a share's denominator is stated"
    assert [text.get_text() for text in figure.texts] == ["A title", "and what is below it"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "adapters, by size", "top k layers, by k", "norms only", "head only", "full fine-tuning",
        "AutoML without a backbone",
    ]  # fmt: skip
    assert [text.get_text() for text in axes.texts] == ["2", "8", "64", "1", "2", "6"]


def test_nothing_hides_anything() -> None:
    figure = drawn()
    figure.draw_without_rendering()
    axes = figure.axes[0].get_window_extent()
    legend = figure.legends[0].get_window_extent()
    assert legend.y0 > axes.y1 and legend.x1 < figure.bbox.x1, "the legend is above the data"
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(figure.bbox.x0 < box.x0 and box.x1 < figure.bbox.x1 for box in boxes)


def test_labels_that_have_no_room_are_left_out_but_the_ends_stay() -> None:
    many = [run for k in range(1, 25) for run in runs_of(f"top {k}", "top-layers", 7_000_000 * k, 0.7 + k / 100)]
    figure = tradeoff_figure([*many, *OTHERS], **WORDS)
    figure.draw_without_rendering()
    labels = [text.get_text() for text in figure.axes[0].texts]
    assert labels[0] == "1" and labels[-1] == "24" and 5 < len(labels) < 24
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_variants_of_a_family_are_lines_of_their_own() -> None:
    paper = [run for m in (8, 64) for run in runs_of(f"paper-{m}", "adapter", 9_000 * m, 0.8)]
    rate = runs_of("adapter-64@1e-4", "adapter", 576_000, 0.7)
    hyper = runs_of("hyperformer", "hyperformer", 5_000, 0.9)
    found = curves(tradeoff_figure([*ADAPTERS, *paper, *rate, *hyper], **WORDS))
    assert set(found) == {"adapter", "paper", "adapter@1e-4", "hyperformer"}
    styles = [style for style, _ in series_of(summarise([*ADAPTERS, *paper, *rate, *hyper]))]
    assert len({style.colour for style in styles}) == len({style.marker for style in styles}) == 4


def test_what_a_methods_name_says() -> None:
    names = {"adapter 64": ("adapter", "64"), "top-2@1e-4": ("top@1e-4", "2"), "full@3e-5": ("full@3e-5", ""),
             "top 3 layers": ("top layers", "3"), "norms": ("norms", "")}  # fmt: skip
    assert {name: variant_and_size(name) for name in names} == names
    assert [short_count(n) for n in (1, 100, 1e3, 1e5, 1e7, 1e9)] == ["1", "100", "1k", "100k", "10M", "1B"]


def test_the_files_are_pictures(tmp_path: Path) -> None:
    from matplotlib.image import imread

    draw_tradeoff([*ADAPTERS, *TOP, *OTHERS], tmp_path / "a.png", **WORDS)
    draw_tradeoff([*ADAPTERS, *TOP, *OTHERS], tmp_path / "a.SVG", **WORDS)
    picture = imread(tmp_path / "a.png")
    assert picture.shape == (864, 1280, 4)
    blue = np.abs(picture[..., :3] - np.array([0x00, 0x72, 0xB2]) / 255).max(-1) < 0.02
    assert blue.sum() > 500, "the adapters' line is there"
    svg = (tmp_path / "a.SVG").read_text()
    assert svg.startswith("<?xml") and svg.rstrip().endswith("</svg>") and "#0072b2" in svg.lower()


def test_no_global_state_of_pyplot(tmp_path: Path) -> None:
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    draw_tradeoff(OTHERS, tmp_path / "a.png", **WORDS)
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


BAD = [
    (OTHERS, "a.pdf", r"cannot be written as 'a.pdf': end its name in .png or .svg"),
    (OTHERS, "a", "cannot be written as 'a'"),
    (OTHERS, "missing/a.png", "missing' does not exist"),
    ([], "a.png", "there are no runs"),
    (runs_of("automl", "automl", None, 0.7), "a.png", "needs a method with trained parameters"),
    (runs_of("adapter 8", "adapter", None, 0.7), "a.png", "'adapter 8' has no trained parameters"),
]


@pytest.mark.parametrize(("runs", "name", "says"), BAD)
def test_bad_input_gets_one_sentence_and_no_file(runs: Any, name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(tg.GraftError, match=says) as caught:
        draw_tradeoff(runs, tmp_path / name, **WORDS)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []
