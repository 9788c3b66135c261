"""A Ray Serve application: replicas over a cluster, each an engine behind the same HTTP as `taskgraft serve`.

`serve run taskgraft.cluster.serve:application store=/shared/grafts replicas=2`, or `serve.run(application({...}))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taskgraft.backbones.load import load_backbone, source_of
from taskgraft.errors import GraftError
from taskgraft.grafts.store import Store

try:
    from fastapi import FastAPI
    from pydantic import BaseModel, ConfigDict, Field, ValidationError
    from ray import serve

    from taskgraft.serving.app import create_app
    from taskgraft.serving.engine import QUEUE, Engine
    from taskgraft.serving.guard import LOOPBACK, Tokens, tokens_from
except ImportError as error:
    raise GraftError("Ray Serve needs packages that are not here: pip install 'taskgraft[cluster,serve]'.") from error


class Serving(BaseModel):
    """What is served. The store, and a backbone that is a folder, must be where every replica can read them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: Path
    backbone: str | None = None  # the one that the store's tasks were made for
    replicas: int = Field(1, ge=1)
    cpus: int = Field(1, ge=1)  # of a replica, which runs as many batches beside one another
    gpus: float = Field(0.0, ge=0)
    memory: int | None = Field(None, ge=1)  # bytes that a replica's grafts may take
    token_file: Path | None = None  # and TASKGRAFT_TOKEN
    admin_token_file: Path | None = None  # and TASKGRAFT_ADMIN_TOKEN
    hosts: tuple[str, ...] = ()  # further names that it may be asked by


def application(args: Mapping[str, Any] | Serving) -> serve.Application:
    """What `serve.run` takes: the fields of `Serving`, by name. Without a token it answers to localhost alone."""
    try:
        wanted = args if isinstance(args, Serving) else Serving.model_validate(dict(args))
    except ValidationError as error:
        first = error.errors()[0]
        raise GraftError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}.") from error
    tokens = tokens_from(wanted.token_file, wanted.admin_token_file)
    if not wanted.store.is_dir():
        raise GraftError(f"there is no store at {wanted.store}: `taskgraft train` makes one.")
    wanted = wanted.model_copy(update={"store": wanted.store.resolve()})
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="taskgraft",
        num_replicas=wanted.replicas,
        max_ongoing_requests=QUEUE,  # the engine batches them, and says when there are too many
        ray_actor_options={"num_cpus": wanted.cpus, "num_gpus": wanted.gpus},
    )
    return deployment.bind(wanted, tokens)


class Replica:
    """One backbone with all tasks of the store, and the app around it."""

    def __init__(self, wanted: Serving, tokens: Tokens) -> None:
        import torch

        torch.set_num_threads(1)  # the engine's threads compute
        store = Store(wanted.store)
        found = store.made_for()
        source = wanted.backbone or (None if found is None else source_of(str(found[1]["name"])))
        self.tokens = tokens
        self.hosts = (*LOOPBACK, *wanted.hosts) if wanted.hosts or not tokens.predict else None
        self.engine = Engine(
            load_backbone(source),
            store,
            memory=wanted.memory,
            device=None if wanted.gpus else "cpu",
            threads=wanted.cpus,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self.engine, tokens=self.tokens, hosts=self.hosts)

    def __del__(self) -> None:
        if hasattr(self, "engine"):  # it has come to be
            self.engine.close()
