"""A Ray cluster, found or started, that keeps its own words out of the terminal."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from taskgraft.errors import GraftError

CONNECT_S = 10
NEEDED = "a cluster needs Ray, which is not here: pip install 'taskgraft[cluster]'."


@dataclass(frozen=True)
class Share:
    """What a worker takes of a machine: CPUs, as many threads as that, and GPUs or a part of one."""

    cpus: int = 1
    gpus: float = 0.0

    def fits(self, resources: dict[str, float]) -> int:
        """How many workers a machine with these resources holds."""
        by_cpu, gpus = int(resources.get("CPU", 0.0) // self.cpus), int(resources.get("GPU", 0.0))
        if not self.gpus:
            return by_cpu
        return min(by_cpu, int(gpus // self.gpus) if self.gpus > 1 else gpus * int(1 / self.gpus + 1e-9))


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray's module, connected to the cluster at `address`: "auto", HOST:PORT, or "local", which starts one here.

    A connection that was there before is used, whatever the address, and stays.
    """
    try:
        import ray
        from ray._private import worker
    except ImportError as error:
        raise GraftError(NEEDED) from error
    own = not ray.is_initialized()
    if own:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of it on every start
        here: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        try:
            check_listening(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **here)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise GraftError(
                f"there is no Ray cluster at {address!r} ({reason}): start one with `ray start --head`, name its "
                "HOST:PORT (with RAY_AUTH_MODE=token where it asks for Ray's token), or use `local`."
            ) from error
    said = worker._worker_logs_enabled
    worker._worker_logs_enabled = False  # nodes that die are told of on stdout, and there is no other switch
    try:
        yield ray
    finally:
        if own:
            ray.shutdown()
        worker._worker_logs_enabled = said


def check_listening(address: str) -> None:
    """Find out in seconds that nobody listens at HOST:PORT, which Ray itself tries for minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


def machines(ray: Any) -> dict[str, dict[str, float]]:
    """What each machine that is alive has, by its id."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def share_of(ray: Any, cpus: int | None, gpus: float | None) -> Share:
    """What each worker takes: one CPU, and a GPU where the cluster has any; refused where no machine has so much."""
    if cpus is not None and (not isinstance(cpus, int) or cpus < 1):
        raise GraftError(f"worker_cpus={cpus!r} must be a whole number of at least 1.")
    if gpus is not None and not (gpus >= 0 and (gpus <= 1 or gpus == int(gpus))):
        raise GraftError(f"worker_gpus={gpus!r} must be 0, a part of one GPU, or a whole number of them.")
    here = machines(ray)
    if gpus is None:
        gpus = 1.0 if any(resources.get("GPU", 0.0) >= 1 for resources in here.values()) else 0.0
    share = Share(cpus or 1, gpus)
    if not any(share.fits(resources) for resources in here.values()):
        have = "; ".join(f"{one.get('CPU', 0):g} CPUs and {one.get('GPU', 0):g} GPUs" for one in here.values())
        raise GraftError(
            f"no machine of the cluster has the {share.cpus} CPUs and {share.gpus:g} GPUs that a worker takes "
            f"(they have {have}): add one, or ask for less."
        )
    return share
