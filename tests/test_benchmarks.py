"""The papers' tasks: each protocol on made-up files of the same layout, the Hub's order of classes, the real files."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from taskgraft.errors import GraftError
from taskgraft.names import check_task_name
from taskgraft.tasks.benchmarks import BENCHMARKS, WITHOUT_DATA, Benchmark, benchmark_named, load_benchmark
from taskgraft.tasks.metrics import check_metrics
from taskgraft.tasks.protocols import hold_out
from taskgraft.tasks.task import Task, schema_of


def write(folder: Path, name: str, **rows: int) -> None:
    """Files of a benchmark, of so many made-up rows each; as the real ones, with large strings and further columns."""
    benchmark = BENCHMARKS[name]
    for part, count in rows.items():
        columns: dict[str, Any] = {
            column: pa.array([f"{part} {column} {n}" for n in range(count)], pa.large_string())
            for column in benchmark.columns[:-1]
        }
        columns["idx"] = list(range(count))
        classes = len(benchmark.labels)
        columns["label"] = [n % classes if classes else n * 5 / count for n in range(count)]
        write_file(folder, name, part, columns)


def write_file(folder: Path, name: str, part: str, columns: dict[str, Any]) -> Path:
    path = folder / BENCHMARKS[name].folder / f"{part}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def sizes(task: Task) -> tuple[int, int, int]:
    return tuple(len(task.splits[split]) for split in ("train", "validation", "test"))  # type: ignore[return-value]


def texts(task: Task, split: str) -> set[frozenset[str]]:
    table = task.split(split)
    columns = [table[name].to_pylist() for name in ("text", "pair") if name in table.column_names]
    return {frozenset(row) for row in zip(*columns, strict=True)}


def are_apart(task: Task) -> bool:
    train, validation, test = (texts(task, split) for split in ("train", "validation", "test"))
    return not (train & validation or train & test or validation & test)


PROTOCOLS = [  # files and their rows; the splits' rows; where the test rows come from
    ("glue/cola", {"train": 50, "validation": 41}, (50, 20, 21), "validation"),
    ("glue/rte", {"train": 50, "validation": 40}, (50, 20, 20), "validation"),
    ("glue/stsb", {"train": 50, "validation": 40, "test": 30}, (50, 20, 20), "validation"),
    ("glue/qnli", {"train": 1_500, "validation": 40}, (500, 1_000, 40), "validation"),
    ("glue/mnli", {"train": 1_500, "validation_matched": 40}, (500, 1_000, 40), "validation_matched"),
    ("glue/mnli", {"train": 90, "validation_matched": 40, "validation_mismatched": 30}, (90, 30, 40),
     "validation_matched"),
    ("transfer/cb", {"train": 25, "validation": 8}, (25, 4, 4), "validation"),
    ("transfer/imdb", {"train": 1_500, "test": 40}, (500, 1_000, 40), "test"),
    ("transfer/trec", {"train": 600, "test": 40}, (540, 60, 40), "test"),
    ("transfer/paws", {"train": 70, "validation": 30, "test": 20}, (70, 30, 20), "test"),
    ("transfer/scitail", {"train": 70, "validation": 30, "test": 20}, (70, 30, 20), "test"),
    ("transfer/scitail", {"test": 200}, (160, 20, 20), "test"),
    ("classification/customer_complaints", {"train": 800, "test": 40}, (720, 80, 40), "test"),
    ("classification/sms_spam", {"all": 200}, (160, 20, 20), "all"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "files", "expected", "test_from"), PROTOCOLS)
def test_splits(tmp_path: Path, name: str, files: dict[str, int], expected: tuple[int, ...], test_from: str) -> None:
    write(tmp_path, name, **files)
    task = load_benchmark(name, tmp_path)
    assert sizes(task) == expected and are_apart(task)
    assert all(text.startswith(f"{test_from} ") for text in task.split("test")["text"].to_pylist())
    again = load_benchmark(name, tmp_path)
    assert all(task.splits[split].equals(again.splits[split]) for split in task.splits)
    assert task.labels == BENCHMARKS[name].labels and task.metrics == BENCHMARKS[name].metrics
    check_task_name(task.name)


def test_another_split_seed_draws_others(tmp_path: Path) -> None:
    write(tmp_path, "glue/cola", train=50, validation=200)
    first, other = load_benchmark("cola", tmp_path), load_benchmark("cola", tmp_path, seed=1)
    assert sizes(first) == sizes(other) and texts(first, "test") != texts(other, "test")


def test_the_table_keeps_its_drawn_rows() -> None:
    """The same rows on every machine and in every release: results of different days compare."""
    table = pa.table({"text": [f"row {n}" for n in range(20)], "label": [n % 2 for n in range(20)]})
    assert hold_out(table, 6, seed=0)[1]["text"].to_pylist() == [f"row {n}" for n in (1, 8, 10, 17, 18, 19)]


def test_held_out_rows_are_stratified(tmp_path: Path) -> None:
    labels = [0] * 700 + [1] * 200 + [2] * 100
    columns = {"text": [f"t{n}" for n in range(1_000)], "label": labels}
    write_file(tmp_path, "classification/crowdflower_airline", "all", columns)
    task = load_benchmark("crowdflower_airline", tmp_path)
    assert Counter(task.split("test")["label"].to_pylist()) == {0: 70, 1: 20, 2: 10}
    assert Counter(task.split("validation")["label"].to_pylist()) == {0: 70, 1: 20, 2: 10}
    write(tmp_path, "glue/stsb", train=50, validation=1_000)
    halves = [task.split(split)["label"].to_numpy() for task in [load_benchmark("sts-b", tmp_path)]
              for split in ("validation", "test")]  # fmt: skip
    assert [len(half) for half in halves] == [500, 500]
    for low in range(5):  # as many of each part of the range, to a few
        within = [((half >= low) & (half < low + 1)).sum() for half in halves]
        assert abs(within[0] - within[1]) < 40


def test_equal_texts_stay_on_one_side() -> None:
    table = pa.table({"text": [f"t{n // 4}" for n in range(400)], "label": [n % 2 for n in range(400)]})
    rest, held = hold_out(table, 40, seed=0)
    assert (len(rest), len(held)) == (360, 40)
    assert not set(rest["text"].to_pylist()) & set(held["text"].to_pylist())
    mixed = pa.table({"text": ["same"] * 50 + [f"t{n}" for n in range(50)], "label": [0] * 100})
    rest, held = hold_out(mixed, 20, seed=0)
    assert len(held) == 20 and "same" not in held["text"].to_pylist()
    pairs = pa.table({"text": [f"t{n // 2}" for n in range(100)], "label": [0] * 100})
    assert len(hold_out(pairs, 21, seed=0)[1]) == 20, "as near as whole texts come"
    swapped = pa.table({"text": ["a", "b"] * 50, "pair": ["b", "a"] * 50, "label": [0] * 100})
    assert len(hold_out(swapped, 20, seed=0)[1]) == 0, "a pair is the same in either order"


def test_what_is_in_two_files_is_left_out_of_training(tmp_path: Path) -> None:
    both = {"question1": ["a", "b", "c"], "question2": ["x", "y", "z"]}
    train = {key: values + [f"{key} {n}" for n in range(1_200)] for key, values in both.items()}
    dev = {"question1": ["a", "y", "other"], "question2": ["x", "b", "z"]}  # the second the other way round
    write_file(tmp_path, "glue/qqp", "train", {**train, "label": [0, 1] * 601 + [0]})
    write_file(tmp_path, "glue/qqp", "validation", {**dev, "label": [0, 1, 1]})
    task = load_benchmark("qqp", tmp_path)
    assert sizes(task) == (201, 1_000, 3) and are_apart(task)
    assert "2 rows of train whose text is in validation too were left out." in task.notes


def test_pairs_are_in_the_papers_order(tmp_path: Path) -> None:
    orders = {"glue/qnli": ("question", "sentence"), "glue/mnli": ("premise", "hypothesis"),
              "transfer/boolq": ("question", "passage"), "glue/mrpc": ("sentence1", "sentence2")}  # fmt: skip
    for name, (text, pair) in orders.items():
        part = "validation_matched" if name == "glue/mnli" else "validation"
        write(tmp_path, name, **{"train": 1_500, part: 10})
        row = load_benchmark(name, tmp_path).split("test").slice(0, 1).to_pylist()[0]
        assert f" {text} " in row["text"] and f" {pair} " in row["pair"]


def test_notes_tell_what_is_not_as_published(tmp_path: Path) -> None:
    write(tmp_path, "glue/qnli", train=1_500, validation=40)
    said = {
        "glue/qnli/train.parquet": {"deviations": "a subset"},
        "glue/qnli/validation.parquet": {"deviations": "none"},
    }
    (tmp_path / "MANIFEST.json").write_text(json.dumps(said))
    task = load_benchmark("qnli", tmp_path)
    assert task.notes == (
        "Of the files: a subset.",
        "train: 1,500 rows; the published set has 104,743.",
        "validation: 40 rows; the published set has 5,463.",
        "1,000 training rows are held out for validation; the published validation rows are the test split.",
    )
    assert task.source == f"glue/qnli from {tmp_path}" and task.columns["pair"] == "sentence"
    (tmp_path / "MANIFEST.json").write_text("[]")
    with pytest.raises(GraftError, match=r"MANIFEST.json is not a JSON object"):
        load_benchmark("qnli", tmp_path)


def squad_columns(part: str, rows: int) -> dict[str, Any]:
    answers = [{"text": ["blue", "the blue"][: n % 3], "answer_start": [4, 0][: n % 3]} for n in range(rows)]
    kind = pa.struct([("text", pa.list_(pa.string())), ("answer_start", pa.list_(pa.int32()))])
    return {
        "id": [f"{part}{n}" for n in range(rows)],
        "question": [f"{part} question {n}" for n in range(rows)],
        "context": ["the blue sky"] * rows,
        "answers": pa.array(answers, kind),
    }


def test_squads_answers(tmp_path: Path) -> None:
    for part, rows in (("train", 1_030), ("validation", 5)):
        write_file(tmp_path, "squad/squad", part, squad_columns(part, rows))
    task = load_benchmark("squad", tmp_path)
    nameless = {name: values for name, values in squad_columns("train", 5).items() if name != "id"}
    write_file(tmp_path, "squad/squad", "validation", nameless)
    with pytest.raises(GraftError, match="has no column 'id'"):
        load_benchmark("squad", tmp_path)
    assert sizes(task) == (30, 1_000, 5) and task.metrics == ("squad_f1",)
    for table in task.splits.values():
        for row in table.to_pylist():
            number = int(row["text"].split()[-1])
            assert row["id"].endswith(str(number)) and len(row["label"]) == number % 3
            assert all(row["pair"][a["start"] :].startswith(a["text"]) for a in row["label"])


def test_names() -> None:
    for name in ("glue/cola", "cola", "CoLA", "GLUE/cola"):
        assert benchmark_named(name) is BENCHMARKS["glue/cola"]
    assert benchmark_named("sst-2") is BENCHMARKS["glue/sst2"]
    assert benchmark_named("yelp-polarity") is BENCHMARKS["transfer/yelp_polarity"]
    assert benchmark_named("20-newsgroups") is BENCHMARKS["classification/20_newsgroups"]
    assert benchmark_named("squad") is BENCHMARKS["squad/squad"]
    assert benchmark_named("mystery") is None and benchmark_named("") is None


@pytest.mark.parametrize("benchmark", BENCHMARKS.values(), ids=BENCHMARKS)
def test_rows_of_the_table_are_sound(benchmark: Benchmark) -> None:
    assert benchmark_named(benchmark.name.split("/")[1]) is benchmark, "the last part of a name is unique"
    check_metrics(benchmark.kind, benchmark.metrics, benchmark.labels)
    assert len(set(benchmark.labels)) == len(benchmark.labels) != 1
    assert set(benchmark.published) <= set(benchmark.files) and set(benchmark.may_lack) < set(benchmark.files)
    if benchmark.hub is not None:
        assert len(benchmark.hub.columns or benchmark.columns) == len(benchmark.columns)
        assert len(benchmark.hub.classes or benchmark.labels) == len(benchmark.labels)
        assert benchmark.hub.id.count("/") == 1


def test_the_17_tasks_are_all_accounted_for() -> None:
    rows = [name for name in BENCHMARKS if name.startswith("classification/")]
    assert len(rows) + len(WITHOUT_DATA) == 17
    assert sum(name.startswith("glue/") for name in BENCHMARKS) == 9


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(GraftError, match=r"benchmark 'mystery' is unknown: use one of glue/cola, .*sms_spam\."):
        load_benchmark("mystery", tmp_path)
    with pytest.raises(GraftError, match="'crowdflower-progressive-stance' is not available: no public copy is known"):
        load_benchmark("crowdflower-progressive-stance")
    with pytest.raises(GraftError, match=r"'glue/cola' needs the file .*/glue/cola/train.parquet, and it is not there"):
        load_benchmark("cola", tmp_path)
    write(tmp_path, "glue/cola", train=10)
    with pytest.raises(GraftError, match=r"/glue/cola/validation.parquet, and it is not there"):
        load_benchmark("cola", tmp_path)
    good = {"sentence": ["a", "b", "c"], "label": [0, 1, 1]}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"text": ["a"], "label": [0]}, "has no column 'sentence': its columns are text, label"),
        (
            {**good, "label": [0, 2, -1]},
            r"label 2 in .*validation.parquet is no class of the task: it has unacceptable",
        ),
        ({**good, "label": ["acceptable", "fine", "fine"]}, "label 'fine' in "),
        ({**good, "label": [0, None, 1]}, "has rows without a label"),
        ({**good, "sentence": ["a", None, "c"]}, "has rows without a text"),
    ]
    for columns, sentence in bad:
        path = write_file(tmp_path, "glue/cola", "validation", columns)
        with pytest.raises(GraftError, match=sentence) as caught:
            load_benchmark("cola", tmp_path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    path.write_text("not Parquet")
    with pytest.raises(GraftError, match=r"validation.parquet could not be read as Parquet"):
        load_benchmark("cola", tmp_path)
    write_file(tmp_path, "glue/cola", "validation", {**good, "label": ["acceptable", "unacceptable", "acceptable"]})
    task = load_benchmark("cola", tmp_path)
    named = [*task.split("validation").to_pylist(), *task.split("test").to_pylist()]
    assert {row["text"]: row["label"] for row in named} == {"a": 1, "b": 0, "c": 1}
    write(tmp_path, "glue/qnli", train=900, validation=10)
    with pytest.raises(GraftError, match="1,000 rows cannot be held out of 900"):
        load_benchmark("qnli", tmp_path)


class FakeHub:
    """Stands for `datasets.load_dataset`: made-up sets by (id, config, split)."""

    def __init__(self, sets: dict[tuple[str, str | None, str], datasets.Dataset]) -> None:
        self.sets = sets

    def __call__(self, id: str, config: str | None = None, *, split: str) -> datasets.Dataset:
        if (id, config, split) not in self.sets:
            raise FileNotFoundError(f"Dataset '{id}' has no {config}, {split}\nand a second line")
        return self.sets[id, config, split]


def hub_set(columns: dict[str, Any], **classes: list[str]) -> datasets.Dataset:
    made = datasets.Dataset.from_dict(columns)
    for column, names in classes.items():
        made = made.cast_column(column, datasets.ClassLabel(names=names))
    return made


def test_the_hub_gives_mismatched_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["entailment", "neutral", "contradiction"]
    sets = {
        ("nyu-mll/glue", "mnli", part): hub_set(
            {"premise": [f"{part} {n}" for n in range(rows)], "hypothesis": ["h"] * rows,
             "label": [n % 3 for n in range(rows)]}, label=names)
        for part, rows in (("train", 30), ("validation_matched", 7), ("validation_mismatched", 8))
    }  # fmt: skip
    monkeypatch.setattr(datasets, "load_dataset", FakeHub(sets))
    task = load_benchmark("mnli")
    assert sizes(task) == (30, 8, 7)
    assert task.split("validation")["text"][0].as_py().startswith("validation_mismatched")
    assert task.source == "glue/mnli from nyu-mll/glue on the Hub"


def test_the_hubs_own_order_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 100
    words = [["neutral", "positive", "negative"][n % 3] for n in range(rows)]
    airline = {"text": [f"{word} {n}" for n, word in enumerate(words)], "label": [n % 3 for n in range(rows)]}
    news = {"text": [f"{['not sure', 'yes', 'no'][n % 3]} {n}" for n in range(90)], "label": [n % 3 for n in range(90)]}
    trec = {"text": [f"LOC {n}" for n in range(50)], "label_coarse_original": ["LOC"] * 50, "label": [1] * 50}
    large = hub_set(trec).cast_column("label_coarse_original", datasets.Value("large_string"))
    yelp = {"text": [f"good {n}" for n in range(1_100)], "label": [1] * 1_100}
    monkeypatch.setattr(datasets, "load_dataset", FakeHub({
        ("tasksource/crowdflower", "airline-sentiment", "train"):
            hub_set(airline, label=["neutral", "positive", "negative"]),
        ("tasksource/crowdflower", "economic-news", "train"): hub_set(news, label=["not sure", "yes", "no"]),
        ("SetFit/TREC-QC", None, "train"): large,
        ("SetFit/TREC-QC", None, "test"): hub_set({**trec, "text": [f"test {n}" for n in range(50)]}),
        ("fancyzhx/yelp_polarity", "plain_text", "train"): hub_set(yelp, label=["1", "2"]),
        ("fancyzhx/yelp_polarity", "plain_text", "test"):
            hub_set({"text": ["fine"], "label": [0]}, label=["1", "2"]),
    }))  # fmt: skip

    def names(task: Task, split: str) -> list[tuple[str, str]]:
        return [(row["text"].rsplit(" ", 1)[0], task.labels[row["label"]]) for row in task.split(split).to_pylist()]

    task = load_benchmark("crowdflower_airline")
    assert sizes(task) == (80, 10, 10)
    assert all(word == label for split in task.splits for word, label in names(task, split))
    task = load_benchmark("crowdflower_economic_news_relevance")
    assert sizes(task) == (48, 6, 6) and "30 rows of 'not sure' were left out." in task.notes
    assert all(word == label for split in task.splits for word, label in names(task, split))
    assert set(names(load_benchmark("trec"), "train")) == {("LOC", "LOC")}
    assert load_benchmark("trec").columns == {"text": "text", "label": "label_coarse_original"}
    task = load_benchmark("yelp_polarity")
    assert set(names(task, "train")) == {("good", "positive")} and names(task, "test") == [("fine", "negative")]


def test_squad_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = {("rajpurkar/squad", "plain_text", part): datasets.Dataset(pa.table(squad_columns(part, rows)))
            for part, rows in (("train", 1_030), ("validation", 5))}  # fmt: skip
    monkeypatch.setattr(datasets, "load_dataset", FakeHub(sets))
    task = load_benchmark("squad")
    assert sizes(task) == (30, 1_000, 5) and task.split("test").schema.equals(schema_of("spans", True))


def test_mistakes_with_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", FakeHub({}))
    with pytest.raises(GraftError, match=r"nyu-mll/glue \(cola, train\) could not be loaded .* has no cola, train$"):
        load_benchmark("cola")
    with pytest.raises(
        GraftError, match=r"no known copy on the Hub: give a data_dir with extra/news_aggregator/all.par"
    ):
        load_benchmark("news_aggregator")
    plain = hub_set({"sentence": ["a", "b"], "label": [0, 1]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: plain)
    with pytest.raises(GraftError, match=r"'label' of nyu-mll/glue \(cola, train\) no longer names its classes"):
        load_benchmark("cola")
    renamed = hub_set({"sentence": ["a", "b"], "acceptable": [0, 1]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: renamed)
    with pytest.raises(
        GraftError, match=r"\(cola, train\) has no column 'label': its columns are sentence, acceptable"
    ):
        load_benchmark("cola")
    hidden = hub_set({"sentence": ["a", "b"], "label": [-1, 1]}, label=["unacceptable", "acceptable"])
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: hidden)
    with pytest.raises(GraftError, match="rows without a label"):
        load_benchmark("cola")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(GraftError, match=r"pip install 'taskgraft\[hub\]'"):
        load_benchmark("cola")


REAL = {  # training, validation and test rows
    "glue/cola": (8_535, 521, 522), "glue/sst2": (66_349, 1_000, 872), "glue/mrpc": (3_668, 204, 204),
    "glue/stsb": (5_738, 750, 750), "glue/qqp": (29_848, 1_000, 7_600), "glue/mnli": (21_511, 1_000, 9_815),
    "glue/qnli": (10_803, 1_000, 5_463), "glue/rte": (2_490, 138, 139), "glue/wnli": (635, 35, 36),
    "squad/squad": (86_599, 1_000, 10_570), "transfer/scitail": (1_700, 213, 213), "transfer/cb": (250, 28, 28),
    "transfer/boolq": (9_427, 1_635, 1_635), "transfer/imdb": (4_994, 1_000, 6_000),
    "transfer/yelp_polarity": (3_018, 1_000, 1_594), "transfer/trec": (4_897, 544, 500),
    "classification/20_newsgroups": (10_314, 1_000, 7_532),
    "classification/crowdflower_airline": (11_712, 1_464, 1_464),
    "classification/crowdflower_corporate_messaging": (2_494, 312, 312),
    "classification/crowdflower_disasters": (8_688, 1_086, 1_086),
    "classification/crowdflower_emotion": (32_000, 4_000, 4_000),
    "classification/crowdflower_political_bias": (4_000, 500, 500),
    "classification/crowdflower_primary_emotions": (2_020, 252, 252),
    "classification/crowdflower_us_economic_performance": (4_011, 502, 502),
    "classification/customer_complaints": (9_000, 1_000, 3_000),
    "classification/news_aggregator": (5_092, 637, 637), "classification/sms_spam": (4_460, 557, 557),
}  # fmt: skip


@pytest.mark.skipif("TASKGRAFT_DATA" not in os.environ, reason="TASKGRAFT_DATA names no folder of data")
@pytest.mark.parametrize(("name", "expected"), REAL.items(), ids=REAL)
def test_the_real_files(name: str, expected: tuple[int, int, int]) -> None:
    folder = Path(os.environ["TASKGRAFT_DATA"])
    if not (folder / BENCHMARKS[name].folder).is_dir():
        pytest.skip(f"{name} is not there")
    task = load_benchmark(name, folder)
    assert sizes(task) == expected and are_apart(task)
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    said = next(entry for file, entry in manifest.items() if file.startswith(f"{BENCHMARKS[name].folder}/"))
    if task.kind == "classification":
        assert list(task.labels) == said["label_names"]
        for split in task.splits:
            assert set(task.split(split)["label"].unique().to_pylist()) == set(range(len(task.labels)))
