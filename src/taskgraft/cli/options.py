"""The options that commands share, each declared once, and in groups that a command takes as one parameter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from taskgraft.errors import GraftError
from taskgraft.training.settings import Settings

DATA, SPLITS, TRAINING = "The data", "Kind and splits", "Training"
TOGETHER, FEW = "Several tasks together", "A new task from few examples"
CLUSTER = "A Ray cluster"

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A file (CSV, TSV, JSONL, Parquet), a benchmark such as glue/rte, or a data set on the Hub.",
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The task's name in the store.")]
TaskName = Annotated[
    str, typer.Argument(metavar="NAME", help="The task's name in the store; JOINT/TASK of tasks trained together.")
]
StoreFolder = Annotated[Path, typer.Option("--store", help="The folder of grafts.")]
BackboneName = Annotated[
    str | None,
    typer.Option("--backbone", help="A model on the Hub, or a folder.", show_default="the embedded all-MiniLM-L6-v2"),
]
OwnBackbone = Annotated[
    str | None, typer.Option("--backbone", help="The backbone to use.", show_default="the one it was trained on")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of stdout.")]


def option(panel: str, help: str, *names: str, default: str | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=default or True)


@dataclass(frozen=True)
class Columns:
    """Which columns of a file are what; those not named are found where that is clear."""

    text: Annotated[str | None, option(DATA, "The column of the text.")] = None
    pair: Annotated[str | None, option(DATA, "The column of a second text.")] = None
    label: Annotated[str | None, option(DATA, "The column of the label.")] = None


@dataclass(frozen=True)
class Reading:
    """How the source is read."""

    encoding: Annotated[str | None, option(DATA, "The file's encoding.", default="utf-8")] = None
    delimiter: Annotated[str | None, option(DATA, "What separates the fields of a CSV.", default="found")] = None
    skip_bad_rows: Annotated[bool, option(DATA, "Leave rows without text or label out.", "--skip-bad-rows")] = False
    data_dir: Annotated[Path | None, option(DATA, "A folder of benchmark files, to read offline.")] = None


@dataclass(frozen=True)
class Splits:
    """What the task is, and which rows are for what."""

    kind: Annotated[
        str | None,
        option(SPLITS, "classification, multilabel, regression, tokens, spans or text.", default="by the labels"),
    ] = None
    metric: Annotated[
        list[str] | None, option(SPLITS, "What is selected by and reported; may be repeated.", default="by the kind")
    ] = None
    split: Annotated[str | None, option(SPLITS, "The column that says train, validation or test.")] = None
    validation: Annotated[str, option(SPLITS, "A file of validation rows, or the share of the rows to hold out.")] = (
        "0.1"
    )
    test: Annotated[str, option(SPLITS, "A file of test rows, or the share of the rows to hold out.")] = "0.1"


@dataclass(frozen=True)
class Training:
    """The settings of a run, but for those that only one command has."""

    epochs: Annotated[int | None, option(TRAINING, "Passes over the rows, at most.", default="by rows and method")] = (
        Settings.epochs
    )
    learning_rate: Annotated[float | None, option(TRAINING, "The highest learning rate.", default="by the method")] = (
        Settings.learning_rate
    )
    batch_size: Annotated[int, option(TRAINING, "Texts in a batch.")] = Settings.batch_size
    accumulation: Annotated[
        int, option(TRAINING, "Batches in a step: with half the batch, twice that is the same.")
    ] = Settings.accumulation
    max_length: Annotated[
        int | None, option(TRAINING, "Tokens at which a text is cut.", default="128; 384 for spans")
    ] = Settings.max_length
    warmup: Annotated[float, option(TRAINING, "Share of the steps in which the rate rises.")] = Settings.warmup
    weight_decay: Annotated[float, option(TRAINING, "Decay of the matrices.")] = Settings.weight_decay
    clip_norm: Annotated[float, option(TRAINING, "The largest norm of a gradient.")] = Settings.clip_norm
    epsilon: Annotated[float | None, option(TRAINING, "AdamW's epsilon.", default="by the method")] = Settings.epsilon
    label_smoothing: Annotated[float, option(TRAINING, "Share of each label given to the others.")] = (
        Settings.label_smoothing
    )
    balance_classes: Annotated[
        bool, option(TRAINING, "Weigh rare classes as much as frequent ones.", "--balance-classes")
    ] = Settings.balance_classes
    average: Annotated[float, option(TRAINING, "Share of the steps that the mean of the weights reaches back.")] = (
        Settings.average
    )
    patience: Annotated[int, option(TRAINING, "Epochs without a better validation score that end a run.")] = (
        Settings.patience
    )
    precision: Annotated[str, option(TRAINING, "auto, fp32 or bf16.")] = Settings.precision
    decoding: Annotated[
        str, option(TRAINING, "How a model that writes answers: labels (the likeliest), greedy, or auto.")
    ] = Settings.decoding

    def settings(self) -> dict[str, Any]:
        """As fields of `Settings`, checked."""
        chosen = asdict(self)
        Settings(**chosen)
        return chosen


@dataclass(frozen=True)
class Together:
    """How several tasks take turns."""

    temperature: Annotated[
        float, option(TOGETHER, "1 draws tasks by their rows, more draws small ones more often, inf all alike.")
    ] = Settings.temperature
    batches: Annotated[str, option(TOGETHER, "mixed, or single: one task in each.")] = Settings.batches
    weighting: Annotated[str, option(TOGETHER, "Tasks count by being drawn (sampling) or weighted (loss).")] = (
        Settings.weighting
    )

    own_rate: Annotated[
        float | None, option(TOGETHER, "The rate of what is a task's own: embedding, head.", default="by the backbone")
    ] = Settings.own_rate
    epoch_steps: Annotated[
        int | None, option(TOGETHER, "Steps of what counts as an epoch.", default="as many as all rows make")
    ] = Settings.epoch_steps

    def settings(self) -> dict[str, Any]:
        """As fields of `Settings`, checked."""
        chosen = asdict(self)
        Settings(**chosen)
        return chosen


@dataclass(frozen=True)
class FewShotOptions:
    """From what, and from how many examples, a new task starts."""

    from_: Annotated[
        Path | None, option(FEW, "Tasks that were trained together, STORE/NAME.", "--from", default="from scratch")
    ] = None
    few_shot: Annotated[int | None, option(FEW, "How many training rows to learn from.", default="all")] = None
    like: Annotated[
        str | None, option(FEW, "The trained task to start from.", default="the one with the lowest loss")
    ] = None
    tune: Annotated[str, option(FEW, "all, or own: the new task's embedding or adapter alone.")] = "all"
    seeds: Annotated[int, option(FEW, "How often, each time with other examples; the first is kept.")] = 1


@dataclass(frozen=True)
class OnRay:
    """A Ray cluster, and what each of its workers takes."""

    ray: Annotated[
        str | None,
        option(CLUSTER, "Train on its workers: auto, HOST:PORT, or local, which starts one.", default="train here"),
    ] = None
    worker_cpus: Annotated[int | None, option(CLUSTER, "CPUs, and threads, of a worker.", default="1")] = None
    worker_gpus: Annotated[
        float | None, option(CLUSTER, "GPUs of a worker, or a part of one.", default="1 where there are any")
    ] = None

    def __post_init__(self) -> None:
        if self.ray is None and (self.worker_cpus, self.worker_gpus) != (None, None):
            raise GraftError("--worker-cpus and --worker-gpus are for a cluster: name it with --ray.")


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """For Typer, which takes options one by one: a parameter that is one of these groups becomes its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))
            continue
        group = groups[parameter.name]
        types = get_type_hints(group, include_extras=True)
        for field in fields(group):
            made = inspect.Parameter(
                field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
            )
            parameters.append(made)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        made = {name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        command(**values, **made)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
