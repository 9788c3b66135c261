"""`taskgraft params`: what each method trains, counted from the backbone's configuration alone."""

from __future__ import annotations

from typing import Annotated

import typer

from taskgraft.cli.app import Output, app
from taskgraft.cli.backbone import config_named
from taskgraft.cli.compare import METHODS, Methods
from taskgraft.cli.options import BackboneName, Json
from taskgraft.methods import FullFineTuning, method_named


@app.command(
    epilog="""Examples:
  taskgraft params adapter-8 adapter-64 norms head
  taskgraft params paper-64 top-2 full --backbone bert-base-uncased --labels 3
  taskgraft params dagger hyperformer hyperformer++ --backbone t5-base --tasks 8

The counts are exact, and only the configuration of the backbone is read."""
)
def params(
    methods: Methods = None,
    backbone: BackboneName = None,
    labels: Annotated[int, typer.Option(help="Classes of the task; 1 for a number.", min=1)] = 2,
    tasks: Annotated[int, typer.Option(help="How many tasks, which may share weights.", min=1)] = 1,
    json: Json = False,
) -> None:
    """Count the parameters that methods train, without loading or training anything."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from taskgraft.backbones.count import count
    from taskgraft.backbones.load import EMBEDDED_NAME
    from taskgraft.reports.tables import count_text, share_text

    output = Output(json)
    wanted = {name: method_named(name)[0] for name in methods or METHODS}
    config = config_named(backbone)
    total = count(FullFineTuning(), config)
    writes = bool(config.is_encoder_decoder)  # its tasks have no heads
    trained = {n: count(method, config, tasks, None if writes else labels) for n, method in wanted.items()}
    called = f"{backbone or EMBEDDED_NAME}, {tasks} task{'' if tasks == 1 else 's'}"
    heads = "no heads" if writes else f"a head of {labels} class{'' if labels == 1 else 'es'} included"
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("method", "trained", f"of the backbone's {count_text(total)}"):
        table.add_column(title, justify="left" if title == "method" else "right")
    for name, number in trained.items():
        table.add_row(name, count_text(number), share_text(number / total))
    output.say(f"{called}, {heads}")
    output.say(table)
    counts = [{"method": name, "trained": number, "share": number / total} for name, number in trained.items()]
    output.finish(
        {"backbone": backbone or EMBEDDED_NAME, "total": total, "labels": labels, "tasks": tasks, "methods": counts}
    )
