"""Serving an application over real HTTP for a test: uvicorn in a thread, a free port."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

KEY = "only for us"
"""What a server asks of its clients, where a test has it ask for one."""


@contextlib.contextmanager
def running(app: ASGIApp) -> Iterator[str]:
    """Serve an application; yields its address."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
