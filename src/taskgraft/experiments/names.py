"""The experiments by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Protocol = Literal["houlsby", "hyperformer"]  # whose splits and metrics


@dataclass(frozen=True)
class Experiment:
    """One table or figure: the module that makes it has TASKS and `run(lab)`."""

    name: str
    says: str
    module: str
    rows: int  # of training, of each task, at most, unless it is told otherwise
    paper_backbone: str  # what the paper's own has, for `--full`
    protocol: Protocol = "houlsby"
    seeds: int = 3


def _row(name: str, says: str, rows: int = 16_000, paper_backbone: str = "bert-base-uncased") -> Experiment:
    return Experiment(name, says, f"taskgraft.experiments.{name.replace('-', '_')}", rows, paper_backbone)


def _hyper(name: str, says: str, rows: int = 16_000, paper_backbone: str = "t5-small", seeds: int = 3) -> Experiment:
    return replace(_row(name, says, rows, paper_backbone), protocol="hyperformer", seeds=seeds)


EXPERIMENTS: Mapping[str, Experiment] = {
    row.name: row
    for row in (
        _row("glue", "Full fine-tuning, adapters, norms and heads (Table 1).", paper_backbone="bert-large-uncased"),
        _row("classification", "Further tasks, with a search without a backbone (Table 2).", rows=2_000),
        _row("tradeoff", "Scores against trained parameters (Figures 1, 3, 4).", rows=4_000),
        _row("squad", "Question answering, by size (Figure 5).", rows=8_000),
        _row("span-ablation", "Adapters of some layers taken out again (Figure 6)."),
        _row("init-ablation", "Wider and wider initial weights (Figure 6).", rows=4_000),
        _row("variants", "The designs that the authors tried.", rows=2_000),
        _row("stream", "One task after another on one backbone.", rows=4_000),
        _row("dropout", "The frozen backbone's dropout, on and off.", rows=2_000),
        _hyper("hyper-glue", "Tasks alone and together, HyperFormer (Table 1).", paper_backbone="t5-base"),
        _hyper("few-shot", "A new task from few examples (section 3.4).", paper_backbone="t5-base", seeds=5),
        _hyper("hyper-ablation", "HyperFormer without its parts (Table 4)."),
        _hyper("low-resource", "Few rows of every task (Figure 2).", rows=4_000, paper_backbone="t5-base"),
        _hyper("task-map", "Which tasks' embeddings lie together (Figure 3)."),
        _hyper("hyper-steps", "Short and long runs of tasks together.", seeds=1),
        _hyper("few-shot-steps", "New tasks after short and long runs together.", paper_backbone="t5-base", seeds=5),
        _hyper("hyper-start", "What HyperFormer++ loses its first steps to.", seeds=1),
    )
}
