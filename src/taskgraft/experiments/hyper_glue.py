"""GLUE, tasks alone and in company: full fine-tuning, adapters, HyperFormer (Karimi Mahabadi et al., Table 1)."""

from __future__ import annotations

from typing import Any

from taskgraft.experiments import company
from taskgraft.experiments.data import GLUE
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, of_study, parameters, signed
from taskgraft.experiments.study import Study, study
from taskgraft.methods import FullFineTuning
from taskgraft.reports.experiments import differences_figure

TASKS = GLUE


def run(lab: Lab) -> Report:
    tasks = lab.chosen(TASKS)
    singles = [
        company.alone(lab, company.SINGLE_FULL, FullFineTuning(pooling=lab.setup.pooling), tasks),
        company.alone(lab, company.SINGLE_ADAPTERS, company.adapter(lab, "own"), tasks),
    ]
    joint = [company.arm(lab, name, method) for name, method in company.together(lab).items()]
    found = study(lab, tasks, [*singles, *joint], columns=True)
    against = found.against(company.FULL)
    claim = claim_c(lab, found)
    sections = [company.columns_table(lab, found, against, company.FULL), f"## Claim C\n\n{claim['sentence']}\n"]
    figure = differences_figure(
        against, tasks, "points above multi-task full fine-tuning", f"GLUE together, {lab.backbone.name}"
    )
    return of_study(found, "GLUE, alone and together", sections, {"hyper-glue": figure}, against, claim_c=claim)


def claim_c(lab: Lab, found: Study) -> dict[str, Any]:
    """HyperFormer++ at or above both others on the average of all columns, with fewer trained parameters."""
    total = parameters(lab)
    own = found.trained(company.PLUS) or 0.0
    record: dict[str, Any] = {"trained": own}
    parts = []
    for other in (company.DAGGER, company.FULL):
        gap, theirs = found.difference(company.PLUS, other), found.trained(other) or 0.0
        verdict = {1: "above", -1: "below", 0: "not shown either way"}[gap.sign]
        record[other] = {**gap.to_json(), "verdict": verdict, "trained": theirs, "fewer": own < theirs}
        parts.append(f"{signed(gap)} against {other} ({verdict}; {100 * theirs / total:.2f} % trained per task)")
    holds = all(record[other]["mean"] >= 0 and record[other]["fewer"] for other in (company.DAGGER, company.FULL))
    record["holds"] = holds
    record["sentence"] = (
        f"HyperFormer++, {100 * own / total:.2f} % trained per task, on the average of columns: {'; '.join(parts)}. "
        f"At or above both with fewer trained parameters: {'yes, by the means' if holds else 'no'}."
    )
    return record
