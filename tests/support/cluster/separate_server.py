"""A server by the start command, with its Ray cluster and token in folders of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.serve_process import ServeProcess
from tests.support.session.xla_flags import user_flags


@contextmanager
def own_server(settings: dict[str, Any]) -> Iterator[ServeProcess]:
    """Serve; commands that are started meanwhile find this server."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="f-", dir="/tmp") as folder:
        for name in list(os.environ):
            if name.startswith("RAY_"):
                patch.delenv(name)
        patch.setenv("XLA_FLAGS", user_flags())
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_AUTH_TOKEN_PATH", f"{folder}/token")
        with ServeProcess(settings) as server:
            yield server
