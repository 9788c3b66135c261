"""What a sweep tries: methods, sizes, learning rates, epochs and seeds; each combination is a trial with a name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from taskgraft.backbones.load import Backbone
from taskgraft.errors import GraftError
from taskgraft.methods import DEFAULT_SIZE, Adapter, HeadOnly, HyperFormer, Method, method_named
from taskgraft.names import check_task_name
from taskgraft.reports.sweeps import rate_text
from taskgraft.tasks.benchmarks import BENCHMARKS
from taskgraft.tasks.task import Task
from taskgraft.training.many import Trial
from taskgraft.training.settings import Settings

LONGEST_NAME = 128  # bytes: what `check_task_name` allows


@dataclass(frozen=True)
class Grid:
    """The axes of a sweep. None leaves an axis to the default of the method and the task."""

    methods: tuple[str | Method, ...] | None = None
    sizes: tuple[int, ...] | None = None
    rates: tuple[float, ...] | None = None
    epochs: tuple[int, ...] | None = None
    seeds: tuple[int, ...] | None = None

    @classmethod
    def of(cls, **axes: Any) -> Grid:
        """From one value or several on each axis, each value once; a number of `seeds` counts them from 0."""
        if isinstance(axes.get("seeds"), int):
            axes["seeds"] = range(axes["seeds"])
        found: dict[str, tuple[Any, ...] | None] = {}
        for axis, values in axes.items():
            several = isinstance(values, Iterable) and not isinstance(values, str)
            found[axis] = None if values is None else tuple(dict.fromkeys(values if several else (values,)))
            if found[axis] == ():
                raise GraftError(f"{axis}={values!r} leaves nothing to run: name at least one, or leave it out.")
        return cls(**found)

    def over(self, other: Grid) -> Grid:
        """These axes, and where one is left open the other grid's."""
        own = {axis: values for axis, values in vars(self).items() if values is not None}
        return dataclasses.replace(other, **own)

    def candidates(self) -> list[tuple[Method, float | None]]:
        """The methods, one of each size, each with the rate that its name may hold."""
        found: list[tuple[Method, float | None]] = []
        sized = False
        for given in self.methods or ("adapter",):
            if not isinstance(given, (str, Method)):
                raise GraftError(
                    f"{given!r} is not a method: give a name such as 'adapter-64', or tg.Adapter(size=64)."
                )
            method, rate = method_named(given) if isinstance(given, str) else (given, None)
            check_method(given, method)
            if rate is not None and self.rates is not None:
                raise GraftError(
                    f"method {given!r} has a rate of its own, and rates were given: leave one of them out."
                )
            if not isinstance(method, Adapter):
                found.append((method, rate))
                continue
            named_alone = isinstance(given, str) and given.partition("@")[0] in ("adapter", "paper")
            open_size = named_alone or (method.size is None and method.reduction is None)
            if self.sizes is not None and not open_size:
                raise GraftError(
                    f"method {given!r} has a size of its own, and sizes were given: leave one of them out."
                )
            sized = True
            if method.reduction is not None:
                found.append((method, rate))
                continue
            sizes = self.sizes or (method.size or DEFAULT_SIZE,)
            found += [(dataclasses.replace(method, size=size), rate) for size in sizes]
        if self.sizes is not None and not sized:
            raise GraftError("sizes are those of adapters, and no method is one: leave them out, or add 'adapter'.")
        return list(dict.fromkeys(found))


# Houlsby et al., sections 3.2 to 3.5. GLUE's is also for tasks that the paper does not have.
GLUE = Grid(("paper",), (8, 64, 256), (3e-5, 3e-4, 3e-3), (3, 20), tuple(range(5)))
CLASSIFICATION = Grid(("paper",), (2, 4, 8, 16, 32, 64), (1e-5, 3e-5, 1e-4, 3e-3), (20, 50, 100), tuple(range(5)))
SQUAD = Grid(("paper",), (2, 64), (3e-5, 1e-4, 3e-4, 1e-3), (3, 10, 20), tuple(range(5)))
PAPER_SETTINGS: dict[str, Any] = {"batch_size": 32, "average": 0.0, "patience": 100}  # no running mean, no early end


def paper_grid(task: Task) -> Grid:
    """The paper's grid for a task: that of the 17 classification tasks for one of them, GLUE's for all others."""
    benchmark = BENCHMARKS.get(task.source.partition(" from ")[0])
    if benchmark is not None and benchmark.group == "classification":
        return CLASSIFICATION
    return SQUAD if task.kind == "spans" else GLUE


def paper_settings(settings: Settings) -> Settings:
    """The paper's batches, weights as they are and no early end, wherever a setting is at its default."""
    default = Settings()
    left = {key: value for key, value in PAPER_SETTINGS.items() if getattr(settings, key) == getattr(default, key)}
    return dataclasses.replace(settings, **left)


def trials_of(
    backbone: Backbone, tasks: Sequence[Task], grid: Grid, settings: Settings, paper: bool = False
) -> list[Trial]:
    """Every run of a sweep, by task, method, rate, epochs and seed, or a sentence that says what is wrong with it."""
    check_tasks(tasks)
    has_heads = not backbone.model.config.is_encoder_decoder
    settings = paper_settings(settings) if paper else settings
    trials: dict[str, Trial] = {}
    for task in tasks:
        axes = grid.over(paper_grid(task)) if paper else grid
        rows = task.split("train").num_rows
        for method, own_rate in axes.candidates():
            rates = axes.rates or (own_rate or settings.learning_rate,)
            for rate, epochs, seed in product(rates, axes.epochs or (settings.epochs,), axes.seeds or (settings.seed,)):
                chosen = dataclasses.replace(settings, learning_rate=rate, epochs=epochs, seed=seed)
                known = chosen.resolved(method, task.kind, rows, has_heads=has_heads)
                chosen = dataclasses.replace(chosen, learning_rate=known.learning_rate, epochs=known.epochs)
                name = name_of(task.name, method, chosen)
                trials[name] = Trial(name, task, method, chosen)
    return list(trials.values())


def check_tasks(tasks: Sequence[Task]) -> None:
    if not tasks:
        raise GraftError("there is no task to sweep: give at least one.")
    for task in tasks:
        if not isinstance(task, Task):
            raise GraftError(f"{task!r} is not a task: read one with tg.load_task(...).")
        check_task_name(task.name)
        if [other.name for other in tasks if isinstance(other, Task)].count(task.name) > 1:
            raise GraftError(f"two tasks are called {task.name!r}: give each a name of its own.")
        task.split("train")
        if not task.splits.get("validation"):
            raise GraftError(
                f"task {task.name!r} has no validation rows to choose by: hold some out with validation=0.1 "
                "(--validation 0.1), or give a file of them."
            )


def check_method(given: str | Method, method: Method) -> None:
    """Refuse a method whose runs cannot go side by side over one frozen backbone."""
    called = given if isinstance(given, str) else method.name
    if method.trains_backbone:
        raise GraftError(
            f"method {called!r} changes the backbone that the runs of a sweep share: measure it with tg.compare "
            "(`taskgraft compare`)."
        )
    shares = isinstance(method, HyperFormer) or method.trained_norms == "shared"
    if shares or (isinstance(method, Adapter) and method.norm_after == "shared"):
        raise GraftError(
            f"method {called!r} has weights that several tasks share: a sweep is of methods of one task, "
            "such as adapter, paper, norms or head."
        )


def label_of(method: Method) -> str:
    """The short name of a method, as `method_named` reads it; one that has none gets a few digits of its content."""
    size = f"-{method.size}" if isinstance(method, Adapter) and method.size else ""
    hidden = f"-{method.hidden}" if isinstance(method, HeadOnly) and method.hidden else ""
    for name in (f"adapter{size}", f"paper{size}", f"head{hidden}", "norms"):
        if method_named(name)[0] == method:
            return name
    others = {key: value for key, value in method.to_json().items() if key not in ("size", "hidden")}
    content = json.dumps(others, sort_keys=True).encode()
    return f"{method.name}{size}{hidden}-{hashlib.sha256(content).hexdigest()[:6]}"


def name_of(task: str, method: Method, settings: Settings) -> str:
    """A trial's name, which is also its folder's: `rte.adapter-64.3e-4.20ep.seed0`."""
    assert settings.learning_rate is not None
    ending = f".{label_of(method)}.{rate_text(settings.learning_rate)}.{settings.epochs}ep.seed{settings.seed}"
    room = LONGEST_NAME - len(ending.encode())
    if len(task.encode()) > room:
        told_apart = hashlib.sha256(task.encode()).hexdigest()[:8]
        task = f"{task.encode()[: room - 9].decode(errors='ignore')}-{told_apart}"
    return f"{task}{ending}"
