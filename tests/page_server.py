"""A server of a store in a thread of this process, and Debian's Chromium to look at its page."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from taskgraft.serving.app import create_app
from taskgraft.serving.engine import Engine
from taskgraft.serving.serve import listen

CHROMIUM = shutil.which("chromium")


@contextmanager
def server_of(engine: Engine, port: int = 0, **options: Any) -> Iterator[str]:
    """Where the engine is served."""
    listening = listen("127.0.0.1", port)
    server = uvicorn.Server(uvicorn.Config(create_app(engine, **options), log_config=None, ws="none"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
