"""A stream of tasks, each trained alone: here, or on the workers of a Ray cluster, its graft put into one store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from taskgraft.backbones.load import Backbone
from taskgraft.cluster.board import Board
from taskgraft.cluster.connect import connected, share_of
from taskgraft.cluster.schedule import Job, Schedule
from taskgraft.cluster.worker import Lines, OneLine
from taskgraft.errors import GraftError, Stopped
from taskgraft.grafts.fingerprint import fingerprint
from taskgraft.grafts.graft import Graft
from taskgraft.grafts.store import Store
from taskgraft.methods import Adapter, HyperFormer, Method
from taskgraft.names import check_task_name
from taskgraft.tasks.task import Task
from taskgraft.training.compare import content_hash
from taskgraft.training.fit import Run, fit
from taskgraft.training.progress import Progress
from taskgraft.training.session import changed, device_of
from taskgraft.training.settings import Settings
from taskgraft.training.state import RunFolder

HERE = "here"
KEY = "stream"  # in a graft's training record: which call it came of


@dataclass(frozen=True, eq=False)
class Trained:
    """A task of a stream whose graft is in the store. `worker` is None where it was there before."""

    task: str
    version: int | None
    worker: str | None
    graft: Graft = field(repr=False)


def train(
    backbone: Backbone,
    tasks: Sequence[Task],
    store: Store | str | PathLike[str],
    method: Method | None = None,
    *,
    ray: str | None = None,
    worker_cpus: int | None = None,
    worker_gpus: float | None = None,
    settings: Settings | None = None,
    run: str | PathLike[str] | None = None,
    progress: Progress | bool | None = None,
    on_trained: Callable[[Trained], Any] | None = None,
    **changes: Any,
) -> dict[str, Trained]:
    """Train each task alone by a method (`tg.Adapter()`), and put its graft into the store as soon as it is there.

    `ray` is the address of a Ray cluster ("auto", "local" or HOST:PORT), whose workers have a CPU each, and a GPU where
    there are any; None trains here, one task after the other, with the state of a run in the folder `run`. The same
    call again trains only what is not in the store. A task that fails does not hold up the others: an error in the end
    names it. `changes` are settings.
    """
    if not isinstance(backbone, Backbone):
        raise GraftError(f"{backbone!r} is no backbone: load one with tg.load_backbone(...).")
    device_of()
    method, settings = Adapter() if method is None else method, changed(settings, changes)
    store = store if isinstance(store, Store) else Store(store)
    check(tasks, method, store)
    keys = {task.name: key_of(backbone, task, method, settings) for task in tasks}
    found = {task.name: there for task in tasks if (there := in_store(store, task.name, keys[task.name])) is not None}
    failures: dict[str, GraftError] = {}
    for there in found.values():
        tell(on_trained, there)

    def keep(task: Task, run: Run, worker: str) -> None:
        assert run.graft is not None
        graft = replace(run.graft, training={**run.graft.training, KEY: keys[task.name]})
        found[task.name] = Trained(task.name, store.put(graft), worker, graft)
        tell(on_trained, found[task.name])

    missing = [task for task in tasks if task.name not in found]
    try:
        if ray is None:
            for task in missing:
                here(backbone, task, method, settings, run, progress, keep, failures)
        elif missing:
            live = progress if isinstance(progress, bool) else None
            spread(backbone, missing, method, settings, ray, worker_cpus, worker_gpus, live, keep, failures)
    except (KeyboardInterrupt, Stopped):
        raise Stopped(
            f"stopped when {len(found)} of {len(tasks)} tasks were in the store {store.folder}: the same call trains "
            "the others."
        ) from None
    if failures:
        said = "; ".join(f"{name!r}: {str(error).rstrip('.')}" for name, error in failures.items())
        raise GraftError(f"{len(failures)} of {len(tasks)} tasks failed, the others are in the store: {said}.")
    return {task.name: found[task.name] for task in tasks}


def tell(listener: Callable[[Trained], Any] | None, trained: Trained) -> None:
    if listener is not None:
        listener(trained)


def check(tasks: Sequence[Task], method: Method, store: Store) -> None:
    """Refuse, before anything is trained, what could not be trained alone or stored afterwards."""
    if isinstance(tasks, Task | str) or not tasks:
        raise GraftError("there is no list of tasks to train: give one, with one or more tasks.")
    if not isinstance(method, Method):
        raise GraftError(f"{method!r} is no method: give one such as tg.Adapter(size=64).")
    if isinstance(method, HyperFormer):
        raise GraftError("HyperFormer shares what tasks learn, and each is trained alone here: train them together.")
    if method.trains_backbone:
        raise GraftError(f"method {method.name!r} changes the backbone itself, so there is no graft of it to keep.")
    for task in tasks:
        if not isinstance(task, Task):
            raise GraftError(f"{task!r} is not a task: read one with tg.load_task(...).")
        check_task_name(task.name)
        if [other.name for other in tasks if isinstance(other, Task)].count(task.name) > 1:
            raise GraftError(f"two tasks are called {task.name!r}: give each a name, or its file one, of its own.")
        task.split("train")
        store.check_place(task.name)


def key_of(backbone: Backbone, task: Task, method: Method, settings: Settings) -> str:
    """What a graft is made of: the rows, the method, the settings and the backbone."""
    chosen = {key: value for key, value in settings.to_json().items() if key != "checkpoint_seconds"}
    about = {
        "task": [task.name, task.kind, task.labels, task.metrics],
        "rows": {split: content_hash(table) for split, table in sorted(task.splits.items())},
        "method": method.to_json(),
        "settings": chosen,
        "backbone": fingerprint(backbone.model).sha256,
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def in_store(store: Store, name: str, key: str) -> Trained | None:
    """The graft of this name, if the same call has put it there before."""
    with suppress(GraftError):
        if name in store:
            graft = store.get(name)
            if graft.training.get(KEY) == key:
                return Trained(name, store.locate(name).version, None, graft)
    return None


def here(
    backbone: Backbone,
    task: Task,
    method: Method,
    settings: Settings,
    run: str | PathLike[str] | None,
    progress: Progress | bool | None,
    keep: Callable[[Task, Run, str], None],
    failures: dict[str, GraftError],
) -> None:
    """Train a task in this process; where it was stopped before, it goes on."""
    folder = None if run is None else Path(run) / task.name
    try:
        found = fit(backbone, task, method, settings=settings, run=folder, progress=progress)
    except Stopped:
        raise
    except GraftError as error:
        failures[task.name] = error
        return
    keep(task, found, HERE)
    if folder is not None:
        RunFolder(folder).tidy(ended=True)
        with suppress(OSError):
            folder.rmdir()
            folder.parent.rmdir()


def spread(
    backbone: Backbone,
    tasks: Sequence[Task],
    method: Method,
    settings: Settings,
    address: str,
    cpus: int | None,
    gpus: float | None,
    live: bool | None,
    keep: Callable[[Task, Run, str], None],
    failures: dict[str, GraftError],
) -> None:
    """Train tasks on the workers of a cluster, a task each at a time."""

    def done(job: Job, run: Run, worker: str) -> None:
        keep(job.tasks[0], run, worker)
        board.ended(job.names[0], worker, run.score)

    def failed(job: Job, error: GraftError) -> None:
        failures[job.names[0]] = error
        board.ended(job.names[0], "", None, "failed")

    work = partial(train_one, method=method, settings=settings)
    jobs = [Job((task.name,), (task,), work) for task in tasks]
    with connected(address) as ray, Board("task", [task.name for task in tasks], live) as board:
        Schedule(ray, backbone, share_of(ray, cpus, gpus), board, done, failed).run(jobs)


def train_one(backbone: Backbone, tasks: Sequence[Task], lines: Lines, *, method: Method, settings: Settings) -> Run:
    """On a worker: one task."""
    return fit(backbone, tasks[0], method, settings=settings, progress=OneLine(lines, tasks[0].name))
