"""A real engine behind a real server, for what is asked of one from outside."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rayserve_moe.inprocess.engine import Engine
from tests.deploy import crds
from tests.http.conftest import served


@pytest.fixture(scope="session")
def engine(quick_checkpoint):
    with Engine(
        model_path=str(quick_checkpoint),
        max_running_requests=1,
        precompile_bs_paddings=[1],
        max_step_tokens=32,
        max_model_len=288,
        num_pages=32,
        enable_eplb=True,
        speculative_algorithm="NGRAM",
        speculative_num_steps=1,
    ) as engine:
        yield engine


@pytest.fixture(scope="session")
def url(engine):
    with served(engine) as url:
        yield url


@pytest.fixture(scope="session")
def schemas() -> dict[str, Any]:
    """Schemas of KubeRay's definitions by kind."""
    folder = os.environ.get("RAYSERVE_MOE_KUBERAY_CRDS", "")
    if not folder:
        pytest.skip("RAYSERVE_MOE_KUBERAY_CRDS names no folder with KubeRay's definitions")
    return {kind: crds.read_schema(Path(folder), kind) for kind in crds.DEFINITIONS}
