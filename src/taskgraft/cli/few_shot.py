"""`taskgraft train NEW --from STORE/NAME`: a new task from few examples and what others have learned."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taskgraft.cli.app import Output
from taskgraft.cli.backbone import backbone_for
from taskgraft.cli.options import FewShotOptions
from taskgraft.cli.reading import read_text
from taskgraft.cli.runs import RUNS, Announced, check_place, state_of_run
from taskgraft.cli.tasks import opened
from taskgraft.errors import GraftError
from taskgraft.training.progress import progress_for
from taskgraft.training.settings import Settings

if TYPE_CHECKING:
    from taskgraft.grafts.joint import Joint
    from taskgraft.tasks.task import Task
    from taskgraft.training.few_shot import FewShot


def add_from_few(
    output: Output, task: Task, few: FewShotOptions, settings: Settings, store: Path, backbone: str | None
) -> None:
    """Learn a task from few of its rows; its graft, if it has one, goes into the store."""
    from taskgraft.grafts.store import Store
    from taskgraft.training.few_shot import check, few_shot

    if few.from_ is None:
        raise GraftError(
            "--few-shot, --like, --tune and --seeds need tasks to start from: name them with --from STORE/NAME."
        )
    if few.seeds < 1:
        raise GraftError(f"--seeds {few.seeds} leaves nothing to run: give 1 or more.")
    joint, grafts = joint_at(few.from_), Store(store)
    rows = task.split("train").num_rows if few.few_shot is None else few.few_shot
    seeds = range(settings.seed, settings.seed + few.seeds)
    check_place(grafts, task.name, together=joint.method.trains_backbone)
    loaded = backbone_for(few.from_.name, joint.backbone, backbone)
    check(joint, task, rows, few.like, few.tune, seeds, loaded)
    output.say(read_text(task))
    with state_of_run(store / RUNS / task.name) as folder:
        bar = Announced(progress_for(None), output.say)
        found = few_shot(
            loaded, joint, task, rows, like=few.like, tune=few.tune, seeds=seeds, settings=settings,
            run=folder, progress=bar,
        )  # fmt: skip
        version = grafts.put(found.joint if found.first.graft is None else found.first.graft, task.name)
    report(output, task, found, few.from_, grafts.folder, version)


def joint_at(path: Path) -> Joint:
    """The tasks trained together that STORE/NAME names."""
    from taskgraft.grafts.graft import RECORD as GRAFT
    from taskgraft.grafts.store import is_joint

    store = opened(path.parent)
    folder = store.folder / path.name
    if not (folder / GRAFT).is_file() and not is_joint(folder):
        known = [entry.name for entry in store.list() if entry.together]
        has = f"{store.folder} has {', '.join(known)}" if known else f"{store.folder} has none"
        raise GraftError(f"no tasks that were trained together are at {path}: give STORE/NAME; {has}.")
    if not is_joint(folder):
        raise GraftError(
            f"{path} is one graft: --from takes tasks that were trained together (`taskgraft train A.csv B.csv`)."
        )
    return store.get_joint(path.name)


def report(output: Output, task: Task, found: FewShot, start: Path, store: Path, version: int) -> None:
    from taskgraft.reports.tables import count_text, score_text

    began = ", ".join(dict.fromkeys(like for like in found.like if like is not None))
    by_loss = {} if not found.losses[0] else dict(sorted(found.losses[0].items(), key=lambda pair: pair[1]))
    if by_loss:
        listed = ", ".join(f"{name} {loss:.3f}" for name, loss in by_loss.items())
        output.say(f"Loss of the trained tasks on the examples (seed {found.runs[0].settings.seed}): {listed}")
    output.say(f"Started from: {began or 'the fine-tuned backbone'} in {start}")
    if found.score is not None:
        spread = "" if found.deviation is None else f" ± {found.deviation:.3f} (standard deviation)"
        seeds = f"{len(found.runs)} seed{'' if len(found.runs) == 1 else 's'}"
        metrics = " and ".join(task.metrics)
        output.say(f"Score: {score_text(found.score)}{spread}, {metrics}, {found.rows} examples, {seeds}")
    output.say(f"Tuned: {count_text(found.first.trained)} parameters ({found.tune})")
    output.say(drift_text(found))
    where = "" if str(store) == "grafts" else f" --store {shlex.quote(str(store))}"
    pair = ' --pair "..."' if task.has_pairs else ""
    called = task.name
    if found.first.graft is None:
        called = f"{task.name}/{task.name}"
        output.say(f"Saved: {store / task.name}, version {version}: all tasks with the backbone as tuned here")
    else:
        output.say(f"Saved: {store / task.name}, version {version} (the first seed's)")
    output.say(f'\nNext: taskgraft predict {shlex.quote(called)} "..."{pair}{where}')
    record: dict[str, Any] = {
        "task": task.name,
        "from": str(start),
        "rows": found.rows,
        "tune": found.tune,
        "score": found.score,
        "deviation": found.deviation,
        "scores": [run.score for run in found.runs],
        "seeds": [run.settings.seed for run in found.runs],
        "like": found.like,
        "losses": found.losses,
        "drift": found.drift,
        "trained": found.first.trained,
        "version": version,
        "store": str(store),
    }
    output.finish(record)


def drift_text(found: FewShot) -> str:
    """What the tuning would do to the other tasks, if they went on with the weights that were tuned."""
    moved = {task: drift for task, drift in found.drift.items() if drift.get("changed") or drift.get("largest")}
    if not moved:
        return "The other tasks' outputs are the same to the bit before and after."
    listed = ", ".join(
        f"{task} {100 * drift['changed']:.0f} %" if "changed" in drift else f"{task} by up to {drift['largest']:.2g}"
        for task, drift in moved.items()
    )
    return (
        "The trained tasks are as they were. With the shared weights as tuned here, their answers to these examples "
        f"would change: {listed}."
    )
