"""A server that a test deploys on the Ray cluster of its process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from ray import serve

from rayserve_moe.serving.app import build


@contextmanager
def deployed(model_path: Path, settings: dict[str, Any], *, port: int, name: str = "moe") -> Iterator[httpx.Client]:
    """Serve a checkpoint as `tiny`; yields a client of the server's proxy."""
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build({"model_path": str(model_path), "served_model_name": "tiny", **settings}), name=name)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
        yield client
    serve.shutdown()
