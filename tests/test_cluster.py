"""A Ray cluster: tasks and sweeps over workers that die, one store, and Ray Serve around the engine."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from ray import exceptions
from typer.testing import CliRunner

import taskgraft as tg
from taskgraft import cluster
from taskgraft.cli import app
from taskgraft.cluster import schedule
from taskgraft.cluster.board import Board
from taskgraft.cluster.connect import Share, connected, share_of
from taskgraft.cluster.schedule import Job, Schedule
from taskgraft.cluster.stream import Trained
from taskgraft.cluster.worker import Line, Place
from taskgraft.errors import Stopped

import cluster_tasks
import tiny
from test_docs import write_messages

TESTS = Path(__file__).parent
MACHINES = 3
FAST: dict[str, Any] = {"epochs": 2, "learning_rate": 1e-2, "batch_size": 8}


def largest_difference(one: tg.Graft, other: tg.Graft) -> float:
    assert one.tensors.keys() == other.tensors.keys()
    return max(float((value - other.tensors[name]).abs().max()) for name, value in one.tensors.items())


# -- three machines, each a process of Ray's here with one CPU


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        made.add_node(num_cpus=1, wait=False)
        made.add_node(num_cpus=1)
        made.wait_for_nodes()
        assert made.address.startswith("127.0.0.1:")
        yield made
        logging.disable(logging.CRITICAL)
        made.shutdown()
        logging.disable(logging.NOTSET)


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


class Murderer:
    """Kills a worker's process, and then a whole machine, each while it is training; hears which tasks were lost."""

    def __init__(self, machines: Any, gate: Path) -> None:
        self.machines, self.gate, self.lost = machines, gate, list[str]()
        self.workers: set[str] = set()
        self.seen: set[int] = set()
        self.killed: list[str] = []

    def working(self, board: Board, names: Sequence[str], worker: str, lines: Any) -> None:
        """Let all begin once each machine has its worker."""
        self.workers.add(worker)
        if len(self.workers) == MACHINES:
            self.gate.touch()

    def trained(self, trained: Trained) -> None:
        """One worker has just put a task down; whoever else has trained before is in the middle of another."""
        assert trained.worker is not None
        finished = int(trained.worker.rpartition("/")[2])
        self.seen.add(finished)
        busy = [pid for pid in self.seen if pid != finished and psutil.pid_exists(pid)]
        if not busy:
            return
        if "process" not in self.killed:
            self.killed.append("process")
            self.seen.remove(busy[0])
            os.kill(busy[0], signal.SIGKILL)
        elif "machine" not in self.killed:
            parents = {psutil.Process(pid).ppid() for pid in busy}
            for node in list(self.machines.worker_nodes):
                if raylet_of(node) in parents and "machine" not in self.killed:
                    self.killed.append("machine")
                    self.machines.remove_node(node, allow_graceful=False)


@pytest.mark.slow
def test_twelve_tasks_survive_the_death_of_a_worker_and_of_a_machine(
    machines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    backbone, tasks, store = tiny.backbone(), cluster_tasks.tasks(12), tg.Store(tmp_path / "grafts")
    murderer = Murderer(machines, tmp_path / "gate")
    monkeypatch.setattr(Board, "lost", lambda self, names, worker: murderer.lost.extend(names))
    monkeypatch.setattr(Board, "working", lambda *told: murderer.working(*told))
    found = cluster.train(
        backbone,
        [cluster_tasks.slow(task, tmp_path / "gate") for task in tasks],
        store,
        tg.Adapter(size=4),
        ray=machines.address,
        on_trained=murderer.trained,
        **FAST,
    )
    assert murderer.killed == ["process", "machine"] and len(murderer.lost) >= 2
    assert list(found) == store.names() == [task.name for task in tasks]
    for task in tasks:
        assert store.versions(task.name) == [1], "counted once"
        alone = tg.train(backbone, task, tg.Adapter(size=4), progress=False, **FAST)
        assert largest_difference(store.get(task.name), alone) < 1e-5
        assert store.get(task.name).metrics == alone.metrics
    assert capfd.readouterr() == ("", ""), "Ray keeps quiet"
    again = cluster.train(backbone, tasks, store, tg.Adapter(size=4), ray="nobody:1", **FAST)
    assert all(trained.worker is None for trained in again.values()), "the same call trains nothing twice"


@pytest.mark.slow
def test_a_sweep_over_the_cluster_is_the_sweep_here(
    machines: Any, backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mood.csv", 60)
    words = ["mood.csv", "--backbone", backbone, "--sizes", "2,4", "--rates", "1e-3,1e-2", "--epochs", "2"]
    records = {}
    for where, more in (("there", ["--ray", machines.address]), ("here", [])):
        done = CliRunner().invoke(app, ["sweep", *words, "--out", where, "--store", f"{where}/grafts", "--json", *more])
        assert done.exit_code == 0, done.output
        records[where] = json.loads(Path(where, "runs.json").read_text())
    different = {"seconds", "kept"}
    runs = [{run["name"]: run for run in records[where]["runs"]} for where in ("there", "here")]
    assert runs[0].keys() == runs[1].keys()
    for there, here in ((runs[0][name], runs[1][name]) for name in runs[0]):
        assert there["metrics"] == here["metrics"] and there["epoch"] == here["epoch"]
    best = [{k: v for k, v in records[w]["best"]["mood"].items() if k not in different} for w in ("there", "here")]
    assert best[0] == best[1] and len(records["there"]["runs"]) == 4
    assert largest_difference(tg.load_graft("there/grafts/mood"), tg.load_graft("here/grafts/mood")) < 1e-5
    before = {path: path.stat().st_mtime_ns for path in Path("there/runs").rglob("run.json")}
    assert len(before) == 4
    done = CliRunner().invoke(app, ["sweep", *words, "--out", "there", "--no-store"])
    assert done.exit_code == 0 and before == {path: path.stat().st_mtime_ns for path in before}, "nothing is repeated"


@pytest.mark.slow
def test_ray_serve_answers_as_predict_does(machines: Any, backbone: str, tmp_path: Path) -> None:
    from ray import serve

    from taskgraft.cluster.serve import application

    loaded, store = tg.load_backbone(backbone), tg.Store(tmp_path / "grafts")
    moods = {name: tg.train(loaded, tiny.task(count=40, name=name, seed=n), **FAST) for n, name in enumerate("ab")}
    for graft in moods.values():
        store.put(graft)
    texts = ["a good film", "the phone was awful"]
    with connected(machines.address):
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
        try:
            serve.run(application({"store": str(store.folder), "replicas": "1"}), name="tasks")
            with tg.Client(f"http://127.0.0.1:{port}") as client:
                answers = client.predict_many([(name, text) for name in moods for text in texts])
            assert httpx.get(f"http://127.0.0.1:{port}/", headers={"Host": "elsewhere"}).status_code == 403
        finally:
            serve.shutdown()
    expected = [one for graft in moods.values() for one in tg.predict(loaded, graft, texts)]
    for answer, one in zip(answers, expected, strict=True):
        assert answer.probabilities == pytest.approx(one.probabilities, abs=1e-5)


# -- what a cluster may do to jobs, on a made one


class Ref:
    """Something that a made cluster has been asked."""

    def __init__(self, value: Any = None, error: Exception | None = None, ready: Callable[[], bool] = lambda: True):
        self.value, self.error, self.ready = value, error, ready


class Call:
    def __init__(self, answer: Callable[..., Ref]) -> None:
        self.remote = answer


class Actor:
    """A worker whose fate is known: "good", "unborn", "old" (of another version), "dies" or "silent"."""

    def __init__(self, ray: MadeRay, fate: str, machine: str) -> None:
        self.ray, self.fate, self.machine, self.alive = ray, fate, machine, True
        self.place, self.work, self.progress = Call(self._place), Call(self._work), Call(self._progress)

    def _place(self) -> Ref:
        if self.fate == "unborn":
            return Ref(error=exceptions.WorkerCrashedError())
        version = "0.0.1" if self.fate == "old" else tg.__version__
        return Ref(Place(self.machine, "made", len(self.ray.actors), version))

    def _work(self, work: Any, tasks: Sequence[Any]) -> Ref:
        if self.fate == "dies":
            return Ref(error=exceptions.WorkerCrashedError())
        begun = self.ray.now
        value = work(None, [ref.value for ref in tasks], {})
        return Ref(value, ready=lambda: self.alive and self.fate != "silent" and self.ray.now > begun + 2)

    def _progress(self) -> Ref:
        return Ref({"a": Line(1, 2, 0.5)}, ready=lambda: self.fate != "silent")


class MadeRay:
    """As much of Ray as a schedule asks of it, on one clock, with machines and workers whose fate is written."""

    def __init__(self, fates: Sequence[str], machines: int = 1) -> None:
        self.fates, self.now = list(fates), 0.0
        self.machines = {f"m{number}": {"CPU": 1.0} for number in range(machines)}
        self.actors: list[Actor] = []
        self.put, self.get = Ref, self._get

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "Alive": True, "Resources": has} for name, has in self.machines.items()]

    def _get(self, ref: Ref) -> Any:
        if ref.error is not None:
            raise ref.error
        return ref.value

    def wait(self, refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        self.now += timeout
        return [ref for ref in refs if ref.ready()], []

    def kill(self, actor: Actor, no_restart: bool) -> None:
        actor.alive = False

    def remote(self, kind: Any) -> Any:
        def start(*_: Any) -> Actor:
            used = [actor.machine for actor in self.actors if actor.alive]
            free = [name for name in self.machines if name not in used]
            self.actors.append(Actor(self, self.fates.pop(0), free[0]))
            return self.actors[-1]

        return type("Made", (), {"options": lambda self, **_: Call(start)})()


class Clock:
    def __init__(self, ray: MadeRay) -> None:
        self.ray = ray

    def monotonic(self) -> float:
        return self.ray.now

    def sleep(self, seconds: float) -> None:
        self.ray.now += seconds


def scheduled(ray: MadeRay, count: int, monkeypatch: pytest.MonkeyPatch, work: Any = None) -> tuple[Any, Any, Board]:
    """What was done and what failed, of jobs a, b, c, ... on a made cluster."""
    monkeypatch.setattr(schedule, "time", Clock(ray))
    names = "abcdefgh"[:count]
    done: dict[str, str] = {}
    failed: dict[str, str] = {}
    task = tiny.task(count=8)
    jobs = [Job((name,), (task,), work or (lambda *_, name=name: name.upper())) for name in names]
    board = Board("task", names, live=False)

    def ended(job: Job, value: str, worker: str) -> None:
        assert job.names[0] not in done, "twice"
        done[job.names[0]] = value
        board.ended(job.names[0], worker, 1.0)

    def gave_up(job: Job, error: tg.GraftError) -> None:
        failed[job.names[0]] = str(error)
        board.ended(job.names[0], "", None, "failed")

    Schedule(ray, tiny.backbone(), Share(), board, ended, gave_up).run(jobs)
    assert not any(actor.alive for actor in ray.actors), "no worker is left behind"
    return done, failed, board


def test_jobs_go_to_others_when_workers_die_fall_silent_or_do_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = MadeRay(["dies", "silent", "unborn", "good", "good", "good"], machines=3)
    done, failed, board = scheduled(ray, 5, monkeypatch)
    assert done == {name: name.upper() for name in "abcde"} and not failed
    assert schedule.SILENT_S < ray.now < 2 * schedule.SILENT_S
    assert board.footer() == "5 of 5 done, 0 training, 0 waiting"


def test_a_job_that_takes_its_workers_with_it_is_given_up_and_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done, failed, board = scheduled(MadeRay(["dies", "dies", "dies", "good"]), 2, monkeypatch)
    assert done == {"b": "B"} and board.footer() == "1 of 2 done, 0 training, 0 waiting, 1 failed"
    assert "it was lost with its worker 3 times, the last time made/" in failed["a"]


def test_a_mistake_in_a_job_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = MadeRay(["good"])
    done, failed, _ = scheduled(ray, 1, monkeypatch, work=lambda *_: tg.GraftError("no such column."))
    assert not done and failed == {"a": "no such column."} and len(ray.actors) == 1


def test_workers_that_never_come_up_and_other_versions_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tg.GraftError, match="workers do not start"):
        scheduled(MadeRay(["unborn"] * 3), 1, monkeypatch)
    with pytest.raises(tg.GraftError, match=r"made has taskgraft 0\.0\.1, and .* is here: install the same"):
        scheduled(MadeRay(["old"]), 1, monkeypatch)


def test_machines_that_leave_and_come(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = MadeRay(["silent", "good"], machines=1)
    nodes = ray.nodes

    def leaving() -> list[dict[str, Any]]:
        if 5 < ray.now < 20:
            return []
        if ray.now >= 20:
            ray.machines = {"new": {"CPU": 1.0}}
        return nodes()

    monkeypatch.setattr(ray, "nodes", leaving)
    done, _, _ = scheduled(ray, 2, monkeypatch)
    assert done == {"a": "A", "b": "B"} and ray.now < schedule.SILENT_S
    monkeypatch.setattr(ray, "nodes", list)
    with pytest.raises(tg.GraftError, match="the cluster has had no machine for a worker for 300 seconds"):
        scheduled(ray, 1, monkeypatch)


def test_ctrl_c_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    ray = MadeRay(["good"])
    with pytest.raises(KeyboardInterrupt):
        scheduled(ray, 1, monkeypatch, work=interrupt)
    assert not ray.actors[0].alive


def test_the_table_says_who_does_what() -> None:
    from rich.console import Console

    board = Board("task", ["a", "b", "c", "d", "e"], live=False)
    board.working(["a", "b"], "host/1", {"a": Line(30, 60, 0.875)})
    board.ended("c", "host/2", 0.5)
    board.lost(["d"], "host/3")
    with (console := Console(width=100)).capture() as shown:
        console.print(board.table())
    lines = [line.split() for line in shown.get().splitlines() if line.strip()]
    assert lines[0] == ["task", "worker", "state", "score"]
    assert lines[1:5] == [
        ["a", "host/1", "training,", "50%", "0.875"],
        ["b", "host/1", "training", "-"],
        ["d", "host/3", "lost,", "begins", "again", "-"],
        ["c", "host/2", "done", "0.500"],
    ]
    assert " ".join(lines[5]) == "1 of 5 done, 2 training, 2 waiting"


def test_what_a_worker_takes_of_a_machine() -> None:
    four: dict[str, float] = {"CPU": 8.0, "GPU": 4.0}
    assert [Share(cpus, gpus).fits(four) for cpus, gpus in ((1, 0), (3, 0), (1, 1), (1, 2), (1, 0.4))] == [
        8,
        2,
        4,
        2,
        8,
    ]
    ray = MadeRay([])
    ray.machines = {"a": four, "b": {"CPU": 1.0}}
    assert share_of(ray, None, None) == Share(1, 1.0) and share_of(ray, 2, 0.5) == Share(2, 0.5)
    for cpus, gpus, said in (
        (9, None, "no machine of the cluster has the 9 CPUs"),
        (0, None, "whole"),
        (1, 1.5, "part"),
    ):
        with pytest.raises(tg.GraftError, match=said):
            share_of(ray, cpus, gpus)


# -- without a cluster


def write(path: Path, count: int, seed: int = 0) -> None:
    rows, labels = tiny.rows("classification", count, seed)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([row["text"], labels[row["label"]]] for row in rows)


def test_each_of_several_files_is_trained_alone_and_once(
    backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate("ab"):
        write(tmp_path / f"{name}.csv", 40, number)
    words = ["train", "a.csv", "b.csv", "--each", "--backbone", backbone, "--method", "adapter-4", "--epochs", "2"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout.splitlines()[-1])
    assert {name: one["worker"] for name, one in record["tasks"].items()} == {"a": "here", "b": "here"}
    loaded, settings = tg.load_backbone(backbone), {"epochs": 2, "progress": False}
    for name in "ab":
        alone = tg.train(loaded, tg.load_task(f"{name}.csv"), tg.Adapter(size=4), **settings)
        assert all(
            torch.equal(tg.load_graft(f"grafts/{name}").tensors[key], value) for key, value in alone.tensors.items()
        )
    assert not Path("grafts/.runs").exists()
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0 and again.output.count("in the store before") == 4
    assert tg.Store("grafts").versions("a") == [1]
    other = CliRunner().invoke(app, [*words, "--seed", "1"])
    assert other.exit_code == 0 and tg.Store("grafts").versions("a") == [1, 2]


class Stopping:
    """Presses Ctrl-C once a task is in the store."""

    def __call__(self, trained: Trained) -> None:
        raise Stopped("stopped")


def test_a_stream_that_is_stopped_or_has_a_bad_task_keeps_the_others(tmp_path: Path) -> None:
    backbone, tasks = tiny.backbone(), cluster_tasks.tasks(3)
    with pytest.raises(
        Stopped, match=r"stopped when 1 of 3 tasks were in the store .*: the same call trains the others"
    ):
        cluster.train(backbone, tasks, tmp_path / "grafts", tg.Adapter(size=4), on_trained=Stopping(), **FAST)
    seen: list[tuple[str, str | None]] = []
    tasks[1] = tiny.task("regression", 20, "task01")  # which has no classes to balance
    with pytest.raises(
        tg.GraftError, match="1 of 3 tasks failed, the others are in the store: 'task01': balance_classes"
    ):
        cluster.train(
            backbone,
            tasks,
            tmp_path / "grafts",
            tg.Adapter(size=4),
            balance_classes=True,
            on_trained=lambda trained: seen.append((trained.task, trained.worker)),
            **FAST,
        )
    assert seen == [("task00", "here"), ("task02", "here")]
    assert tg.Store(tmp_path / "grafts").names() == ["task00", "task02"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.csv", "b.csv", "--ray", "auto"], "add --each, and each is trained alone"),
        (["a.csv", "b.csv", "--each", "--name", "x"], "--name x would be every task's"),
        (["a.csv", "b.csv", "--each", "--test", "b.csv"], "--test b.csv would be every task's"),
        (["a.csv", "b.csv", "--each", "--track", "tensorboard"], "--track follows one run"),
        (["a.csv", "b.csv", "--each", "--temperature", "2"], "--temperature is for several tasks"),
        (["a.csv", "--each", "--method", "full"], "method 'full' changes the backbone itself"),
        (["a.csv", "--worker-cpus", "2"], "name it with --ray"),
        (
            ["a.csv", "--ray", "auto", "--from", "grafts/x"],
            "--from starts one new task",
        ),
        (["a.csv", "--ray", "127.0.0.1:9"], "there is no Ray cluster at '127.0.0.1:9'"),
        (["a.csv", "a.csv", "--each"], "two tasks are called 'a'"),
    ],
)
def test_what_cannot_be_is_a_sentence(
    words: list[str], said: str, backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write(tmp_path / f"{name}.csv", 20)
    done = CliRunner().invoke(app, ["train", *words, "--backbone", backbone])
    assert done.exit_code == 2 and said in done.stderr, done.output
    assert not Path("grafts").exists()


def test_without_ray_a_sentence_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(tg.GraftError, match=r"pip install 'taskgraft\[cluster\]'"):
        cluster.train(tiny.backbone(), [tiny.task(count=20)], tmp_path, ray="auto")


def test_serving_says_what_is_wrong(tmp_path: Path) -> None:
    from taskgraft.cluster.serve import application

    with pytest.raises(tg.GraftError, match="there is no store at"):
        application({"store": str(tmp_path / "none")})
    with pytest.raises(tg.GraftError, match="replicas: Input should be greater than or equal to 1"):
        application({"store": str(tmp_path), "replicas": "0"})


def test_the_guides_commands_and_names_exist() -> None:
    from typer.main import get_command

    guide = (TESTS.parent / "docs" / "cluster.md").read_text()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", guide, re.DOTALL) for line in block.splitlines()]
    commands = [
        re.split(r"(?:-m taskgraft\.cli|^taskgraft) ", line)[-1].split() for line in lines if "serve run" not in line
    ]
    assert [command[0] for command in commands] == ["train"] * 4 + ["sweep"]
    for command in commands:
        known = {word for option in get_command(app).commands[command[0]].params for word in option.opts}  # type: ignore[attr-defined]
        assert {word for word in command if word.startswith("--")} <= known
    called = set(re.findall(r"cluster\.(\w+)\(", guide)) - {"py"}
    assert called == {"train", "sweep"} and called < set(cluster.__all__)


@pytest.mark.slow
def test_the_guides_python_runs(machines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tg, "load_backbone", tiny.backbone)
    write_messages(tmp_path / "sms.csv", "message", "label")
    for name in ("reviews.csv", "tweets.csv", "complaints.csv"):
        write_messages(tmp_path / name, "text", "label")
    guide = (TESTS.parent / "docs" / "cluster.md").read_text()
    scope: dict[str, Any] = {"__name__": "guide"}
    for snippet in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        exec(compile(snippet.replace('"auto"', repr(machines.address)), "cluster.md", "exec"), scope)
    assert tg.Store("grafts").names() == ["complaints", "reviews", "spam", "tweets"]
    assert scope["trained"]["reviews"].worker and set(scope["found"].tasks) == {"reviews", "tweets", "complaints"}


def test_wrong_arguments_are_sentences(tmp_path: Path) -> None:
    backbone, task = tiny.backbone(), tiny.task(count=20)
    for given, said in (
        ((None, [task]), "is no backbone"),
        ((backbone, task), "no list of tasks"),
        ((backbone, []), "no list of tasks"),
        ((backbone, [task], "adapter-64"), "'adapter-64' is no method"),
        ((backbone, [task], tg.HyperFormer()), "train them together"),
    ):
        with pytest.raises(tg.GraftError, match=said):
            cluster.train(given[0], given[1], tmp_path, *given[2:])  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
