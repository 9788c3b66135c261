"""More than one machine, by Ray: tasks, and the runs of a sweep, spread over workers; grafts come back to one store."""

from taskgraft.cluster.stream import Trained, train
from taskgraft.cluster.trials import fit_many, sweep

__all__ = ["Trained", "fit_many", "sweep", "train"]
