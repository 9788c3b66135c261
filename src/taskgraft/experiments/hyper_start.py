"""What HyperFormer++ loses its first steps to: its norm and projector, its size at the start, embeddings that stay,
mixed batches, or its rate. And what the adapters that it is compared with lose to theirs.

Ours, not the paper's: its runs have fifty times as many steps as the default here.
"""

from __future__ import annotations

from typing import Any

from taskgraft.experiments import company
from taskgraft.experiments.data import GLUE
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, of_study
from taskgraft.experiments.study import ALL, Arm, Option, study
from taskgraft.experiments.task_map import first_maps, maps_section
from taskgraft.reports.experiments import differences_figure

TASKS = GLUE
# The better of two rates for HyperFormer++, a higher and a lower one; the better of two for Adapters (dagger) and a
# lower one.
WRITER_RATES = (1e-3, 3e-3, company.PAPER_RATE, 1e-3, company.PAPER_RATE)
ENCODER_RATES = (company.PAPER_RATE, 1e-3, 1e-4, 3e-5, 1e-5)
OWN_RATE = 3e-2  # of task embeddings
Changes = tuple[dict[str, Any], dict[str, Any]]  # of the method, and of the settings
LINES: dict[str, Changes] = {
    "no task projector": ({"projector": False}, {}),
    "no conditional norm either": ({"conditional_norm": False, "projector": False}, {}),
    "a tenth of the weights at the start": ({"init_std": 1e-3}, {}),
}
MOVED = "embeddings at a higher rate"  # where embeddings are all that is a task's own: heads would not bear it
SINGLE, MIXED = "one task in each batch, as in the paper", "mixed batches"  # the one that is not the default
FASTER, SLOWER, DAGGER_SLOWER = "a higher rate", "a lower rate", f"{company.DAGGER}, a lower rate"
PLAIN, PLAIN_RATE = "adapters together, no norm after them", 1e-3
OWN_NORM = "adapters together, own norms after them"  # where Adapters (dagger) bear only low rates: is it the norm?


def run(lab: Lab) -> Report:
    tasks = lab.chosen(TASKS)
    writes = lab.backbone.model.config.is_encoder_decoder
    rate, higher, lower, dagger_rate, dagger_lower = WRITER_RATES if writes else ENCODER_RATES
    batches = (MIXED, "mixed") if lab.setup.full else (SINGLE, "single")
    lines: dict[str, Changes] = {company.PLUS: ({}, {}), **LINES, batches[0]: ({}, {"batches": batches[1]})}
    if writes:
        lines[MOVED] = ({}, {"own_rate": OWN_RATE})
    methods = {name: company.hyperformer(lab, **changes) for name, (changes, _) in lines.items()}
    dagger = company.together(lab)[company.DAGGER]
    given = {
        **{name: Option(methods[name], rate, None, tuple(settings.items())) for name, (_, settings) in lines.items()},
        FASTER: Option(methods[company.PLUS], higher),
        SLOWER: Option(methods[company.PLUS], lower),
        company.DAGGER: Option(dagger, dagger_rate),
        DAGGER_SLOWER: Option(dagger, dagger_lower),
        PLAIN: Option(company.adapter(lab, None), PLAIN_RATE),
    }
    if not writes:
        given[OWN_NORM] = Option(company.adapter(lab, "own"), PLAIN_RATE)
    arms = [Arm(name, (option,), together=True) for name, option in given.items()]
    found = study(lab, tasks, arms, columns=True)
    against = found.against(company.PLUS)
    alone = {name: {ALL: gaps[ALL]} for name, gaps in against.items()}
    figure = differences_figure(alone, [], "points above HyperFormer++", f"Its first steps, {lab.backbone.name}")
    maps = first_maps(found)
    moved = f"; {MOVED}: {OWN_RATE:g}" if MOVED in lines else ""
    others = "; ".join(f"{name}: {option.rate:g}" for name, option in given.items() if option.rate != rate)
    sections = [
        f"At a rate of {rate:g}{moved}; {others}.\n",
        company.columns_table(lab, found, against, company.PLUS),
        maps_section(maps, tasks),
    ]
    return of_study(
        found, "What HyperFormer++ loses its first steps to", sections, {"hyper-start": figure}, against,
        maps={name: each.to_json() for name, each in maps.items()},
    )  # fmt: skip
