"""`taskgraft serve`: all tasks of a store over HTTP, from one backbone."""

from __future__ import annotations

import ipaddress
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from taskgraft.cli.app import Output, app
from taskgraft.cli.backbone import backbone_for, backbone_named
from taskgraft.cli.options import Json, OwnBackbone, StoreFolder
from taskgraft.cli.tasks import opened
from taskgraft.errors import GraftError

if TYPE_CHECKING:
    from taskgraft.backbones.load import Backbone
    from taskgraft.grafts.store import Store

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
DTYPES = ("float32", "bfloat16", "float16")
NEEDED = "serving needs packages that are not here: pip install 'taskgraft[serve]'."


@app.command(
    epilog="""Examples:
  taskgraft serve --store grafts
  TASKGRAFT_TOKEN=$(openssl rand -hex 32) taskgraft serve --host 0.0.0.0
  curl localhost:8000/v1/tasks/warming/predict --json '{"text": "it is hot"}'

The page is at /, the description at /openapi.json, metrics at /metrics.
Tokens come from TASKGRAFT_TOKEN and TASKGRAFT_ADMIN_TOKEN, or from files
with one a line. Without a token for asking, it serves this machine alone;
without an admin token, tasks are changed in the store and not over HTTP.
SIGTERM and Ctrl-C end it, once all it has taken is answered."""
)
def serve(
    store: StoreFolder = Path("grafts"),
    backbone: OwnBackbone = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes one that is free.", min=0, max=65535)] = 8000,
    memory: Annotated[
        str | None, typer.Option(help="What grafts may take on the device, such as 2GB.", show_default="by the device")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="Tokens that may ask, one a line.")] = None,
    admin_token_file: Annotated[Path | None, typer.Option(help="Tokens that may change tasks, one a line.")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="A name the server goes by; may be repeated.")] = None,
    queue: Annotated[int, typer.Option(help="Questions that may wait.", min=1)] = 1024,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a batch, at most.", min=1, show_default="by the device")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"The backbone's numbers: {', '.join(DTYPES)}.")] = "float32",
    json: Json = False,
) -> None:
    """Serve all tasks of a store over HTTP. Tasks may come, change and leave while it does."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise GraftError(NEEDED) from error
    threads = only_the_engine_computes()
    from taskgraft.serving import serve as serving
    from taskgraft.serving.app import create_app
    from taskgraft.serving.engine import Engine
    from taskgraft.serving.guard import LOOPBACK, tokens_from

    output = Output(json)
    budget = None if memory is None else bytes_of(memory)
    if dtype not in DTYPES:
        raise GraftError(f"--dtype {dtype} is none of {', '.join(DTYPES)}.")
    tokens = tokens_from(token_file, admin_token_file)
    local = is_loopback(host)
    if not local and not tokens.predict:
        raise GraftError(
            f"--host {host} would let anyone ask: set TASKGRAFT_TOKEN, or name a --token-file; "
            "without a token it serves 127.0.0.1 alone."
        )
    if not store.exists() and not tokens.admin:
        raise GraftError(f"there is no store at {store}: `taskgraft train` makes one; or name another with --store.")
    grafts = opened(store.resolve())  # messages that leave the machine can then do without it
    listening = serving.listen(host, port)
    loaded = backbone_of(grafts, backbone)
    if dtype != DTYPES[0]:
        import torch

        loaded.model.to(getattr(torch, dtype))
    serving.log_to_stderr()
    names = (*LOOPBACK, *(allow_host or ()))
    precise = dtype == DTYPES[0]
    with Engine(
        loaded,
        grafts,
        memory=budget,
        tokens=batch_tokens,
        waiting=queue,
        threads=threads,
        other_precision=not precise,
    ) as engine:
        made = create_app(engine, tokens=tokens, hosts=names if local or allow_host else None)
        place = f"[{host}]" if ":" in host else host
        url = f"http://{place}:{listening.getsockname()[1]}"

        def announce() -> None:
            count = len(made.state.served.listing.names())
            if not tokens.predict:
                typer.echo("There is no token, so this machine alone is served: TASKGRAFT_TOKEN sets one.", err=True)
            output.say(f"Serving {count} task{'' if count == 1 else 's'} on {url}")
            output.finish({"url": url, "tasks": count})
            sys.stdout.flush()

        serving.serve(made, listening, announce)


def only_the_engine_computes() -> int:
    """Let this thread compute without helpers from now on. How many there are to run batches."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return threads


def backbone_of(store: Store, name: str | None) -> Backbone:
    """The backbone that was named, or that of the first graft that can be read; the embedded one, if there is none."""
    found = None if name is not None else store.made_for()
    return backbone_named(name) if found is None else backbone_for(*found, None)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def bytes_of(size: str) -> int:
    """A number of bytes, such as 500MB or 2GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)i?B?", size.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise GraftError(f"--memory {size} is no size: write one such as 500MB or 2GB.")
    return int(float(match[1]) * UNITS[match[2].upper()])
