"""`load_task` from end to end: a path and nothing else, names that are no files, and a million rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from taskgraft.errors import GraftError
from taskgraft.tasks.load import load_task
from taskgraft.tasks.task import Task, schema_of


def write(path: Path, labels: list[str]) -> Path:
    rows = [f'"Text, number {i}","{labels[i % len(labels)]}",{"test" if i % 5 == 4 else "train"}' for i in range(200)]
    path.write_text("\n".join(["text,label,split", *rows]))
    return path


@pytest.mark.parametrize(
    ("labels", "kind", "classes", "metrics"),
    [
        (["positive", "negative", "positive"], "classification", ("negative", "positive"), ("accuracy",)),
        (["1.80", "-0.3", "2.10"], "regression", (), ("pearson",)),
        (["debt"] * 9 + ["loan", "card"], "classification", ("card", "debt", "loan"), ("macro_f1",)),
    ],
)
def test_a_path_is_enough(
    tmp_path: Path, labels: list[str], kind: str, classes: tuple[str, ...], metrics: tuple[str, ...]
) -> None:
    path = write(tmp_path / "tweet mood (2).csv", labels)
    task = load_task(path)
    assert (task.name, task.kind, task.labels, task.metrics) == ("tweet mood -2-", kind, classes, metrics)
    assert {split: len(table) for split, table in task.splits.items()} == {"train": 144, "validation": 16, "test": 40}
    assert all(table.schema.equals(schema_of(kind, False)) for table in task.splits.values())
    assert (task.source, task.columns) == (str(path), {"text": "text", "label": "label"})
    assert load_task(str(path), name="mood").name == "mood"
    assert json.loads(json.dumps(task.to_json()))["rows"] == {"train": 144, "validation": 16, "test": 40}


def test_metrics_that_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", ["a", "b"])
    assert load_task(path, metrics=["macro_f1", "accuracy"]).metrics == ("macro_f1", "accuracy")
    with pytest.raises(GraftError, match="'pearson' does not fit"):
        load_task(path, metrics=["pearson"])


def test_a_file_comes_before_a_benchmark_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "cola.csv", ["a", "b"])
    assert load_task("cola.csv").name == "cola"
    with pytest.raises(GraftError, match=r"there is no file squad.csv: check the path"):
        load_task("squad.csv")
    (tmp_path / "notes").write_text("text,label\n")
    with pytest.raises(GraftError, match=r"notes is not of a known format: name it .csv"):
        load_task("notes")


def test_benchmarks_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from taskgraft.tasks import benchmarks

    table = schema_of("classification", False).empty_table()
    rows = table.from_pylist([{"text": "a", "label": 0}], schema=table.schema)
    asked = []

    def load_benchmark(name: str, data_dir: object, seed: int) -> Task:
        asked.append((name, data_dir, seed))
        return Task("cola", "classification", ("0", "1"), ("matthews",), {"train": rows, "test": rows})

    monkeypatch.setattr(benchmarks, "load_benchmark", load_benchmark)
    assert load_task("glue/cola", data_dir="x", seed=3).name == "cola"
    task = load_task("cola", name="mine", only="test", metrics=["accuracy"])
    assert (task.name, list(task.splits), task.metrics) == ("mine", ["test"], ("accuracy",))
    assert asked == [("glue/cola", "x", 3), ("cola", None, 0)]
    with pytest.raises(GraftError, match="cola is a benchmark: its columns and splits are fixed; leave out text, kind"):
        load_task("cola", text="sentence", kind="classification")
    with pytest.raises(GraftError, match="has no validation rows: its splits are train, test"):
        load_task("cola", only="dev")


BIG = """
import sys
from taskgraft.tasks.load import load_task

def peak_mb():  # not getrusage: that counts the process which started this one
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

load_task(sys.argv[2])  # what the first use of the libraries takes
before = peak_mb()
task = load_task(sys.argv[1])
print(peak_mb() - before, *(task.splits[split].num_rows for split in ("train", "validation", "test")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from Linux's /proc")
def test_a_million_rows_take_a_few_times_their_text(tmp_path: Path) -> None:
    path, rows = tmp_path / "big.csv", 1_000_000
    with path.open("w") as file:
        file.write("text,label\n")
        file.writelines(f"a message of the usual kind with number {i},{'abc'[i % 3]}\n" for i in range(rows))
    small = write(tmp_path / "small.csv", ["a", "b"])
    out = subprocess.run(
        [sys.executable, "-c", BIG, str(path), str(small)], capture_output=True, text=True, check=True
    ).stdout
    grown_mb, *sizes = (float(value) for value in out.split())
    assert sizes == [800_000, 100_000, 100_000]
    text_mb = path.stat().st_size / 2**20
    # About 6 at its peak, 1.3 once loaded; an object for each row, or a second copy in a hash table, is more than 9.
    assert grown_mb < 7.5 * text_mb, (grown_mb, text_mb)
