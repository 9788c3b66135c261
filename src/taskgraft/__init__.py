"""taskgraft: one frozen Transformer, any number of tasks, each a graft of a few percent of its weights."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names are imported when they are first used: `import taskgraft` does no work.
_HOMES = {
    "taskgraft.errors": ("GraftError",),
    "taskgraft.methods": (
        "Adapter",
        "FullFineTuning",
        "HeadOnly",
        "HyperFormer",
        "Method",
        "NormsOnly",
        "TopLayers",
        "method_from_json",
    ),
    "taskgraft.nn.heads": ("Head",),
    "taskgraft.nn.bottleneck": ("bottleneck",),
    "taskgraft.backbones.api": (
        "add_task",
        "graft",
        "remove_task",
        "rows",
        "task_ids",
        "tasks_of",
        "train_only",
        "trainable",
        "ungraft",
        "use_kernels",
    ),
    "taskgraft.backbones.count": ("count",),
    "taskgraft.backbones.describe": ("describe",),
    "taskgraft.backbones.forward": ("GraftOutput", "loss"),
    "taskgraft.backbones.graphs": ("Graphed",),
    "taskgraft.backbones.load": ("Backbone", "load_backbone"),
    "taskgraft.tasks.load": ("load_task",),
    "taskgraft.tasks.task": ("Task",),
    "taskgraft.training.automl": ("automl",),
    "taskgraft.training.compare": ("compare",),
    "taskgraft.reports.taskmap": ("TaskMap", "task_map"),
    "taskgraft.training.evaluate": ("evaluate", "predict"),
    "taskgraft.training.few_shot": ("FewShot", "few_shot"),
    "taskgraft.training.fit": ("Run", "fit", "train"),
    "taskgraft.training.joint": ("JointRun",),
    "taskgraft.training.many": ("Trial", "fit_many"),
    "taskgraft.training.optim": ("AdamW",),
    "taskgraft.training.settings": ("Settings",),
    "taskgraft.training.sweep": ("Sweep", "sweep"),
    "taskgraft.grafts.adapterhub.reading": ("import_adapterhub",),
    "taskgraft.grafts.adapterhub.writing": ("export_adapterhub",),
    "taskgraft.grafts.graft": ("Graft", "add_graft", "get_graft", "load_graft", "materialise"),
    "taskgraft.grafts.hub": ("pull", "push"),
    "taskgraft.grafts.joint": ("Joint", "add_joint", "get_joint", "load_joint"),
    "taskgraft.grafts.store": ("Store",),
    "taskgraft.serving.answers": ("Answer", "Question"),
    "taskgraft.serving.client": ("AsyncClient", "Client"),
    "taskgraft.serving.engine": ("Engine",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = ["__version__", *sorted(_HOME_OF)]

if TYPE_CHECKING:
    from taskgraft.backbones.api import add_task as add_task
    from taskgraft.backbones.api import graft as graft
    from taskgraft.backbones.api import remove_task as remove_task
    from taskgraft.backbones.api import rows as rows
    from taskgraft.backbones.api import task_ids as task_ids
    from taskgraft.backbones.api import tasks_of as tasks_of
    from taskgraft.backbones.api import train_only as train_only
    from taskgraft.backbones.api import trainable as trainable
    from taskgraft.backbones.api import ungraft as ungraft
    from taskgraft.backbones.api import use_kernels as use_kernels
    from taskgraft.backbones.count import count as count
    from taskgraft.backbones.describe import describe as describe
    from taskgraft.backbones.forward import GraftOutput as GraftOutput
    from taskgraft.backbones.forward import loss as loss
    from taskgraft.backbones.graphs import Graphed as Graphed
    from taskgraft.backbones.load import Backbone as Backbone
    from taskgraft.backbones.load import load_backbone as load_backbone
    from taskgraft.errors import GraftError as GraftError
    from taskgraft.grafts.adapterhub.reading import import_adapterhub as import_adapterhub
    from taskgraft.grafts.adapterhub.writing import export_adapterhub as export_adapterhub
    from taskgraft.grafts.graft import Graft as Graft
    from taskgraft.grafts.graft import add_graft as add_graft
    from taskgraft.grafts.graft import get_graft as get_graft
    from taskgraft.grafts.graft import load_graft as load_graft
    from taskgraft.grafts.graft import materialise as materialise
    from taskgraft.grafts.hub import pull as pull
    from taskgraft.grafts.hub import push as push
    from taskgraft.grafts.joint import Joint as Joint
    from taskgraft.grafts.joint import add_joint as add_joint
    from taskgraft.grafts.joint import get_joint as get_joint
    from taskgraft.grafts.joint import load_joint as load_joint
    from taskgraft.grafts.store import Store as Store
    from taskgraft.methods import Adapter as Adapter
    from taskgraft.methods import FullFineTuning as FullFineTuning
    from taskgraft.methods import HeadOnly as HeadOnly
    from taskgraft.methods import HyperFormer as HyperFormer
    from taskgraft.methods import Method as Method
    from taskgraft.methods import NormsOnly as NormsOnly
    from taskgraft.methods import TopLayers as TopLayers
    from taskgraft.methods import method_from_json as method_from_json
    from taskgraft.nn.bottleneck import bottleneck as bottleneck
    from taskgraft.nn.heads import Head as Head
    from taskgraft.reports.taskmap import TaskMap as TaskMap
    from taskgraft.reports.taskmap import task_map as task_map
    from taskgraft.serving.answers import Answer as Answer
    from taskgraft.serving.answers import Question as Question
    from taskgraft.serving.client import AsyncClient as AsyncClient
    from taskgraft.serving.client import Client as Client
    from taskgraft.serving.engine import Engine as Engine
    from taskgraft.tasks.load import load_task as load_task
    from taskgraft.tasks.task import Task as Task
    from taskgraft.training.automl import automl as automl
    from taskgraft.training.compare import compare as compare
    from taskgraft.training.evaluate import evaluate as evaluate
    from taskgraft.training.evaluate import predict as predict
    from taskgraft.training.few_shot import FewShot as FewShot
    from taskgraft.training.few_shot import few_shot as few_shot
    from taskgraft.training.fit import Run as Run
    from taskgraft.training.fit import fit as fit
    from taskgraft.training.fit import train as train
    from taskgraft.training.joint import JointRun as JointRun
    from taskgraft.training.many import Trial as Trial
    from taskgraft.training.many import fit_many as fit_many
    from taskgraft.training.optim import AdamW as AdamW
    from taskgraft.training.settings import Settings as Settings
    from taskgraft.training.sweep import Sweep as Sweep
    from taskgraft.training.sweep import sweep as sweep


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'taskgraft' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
