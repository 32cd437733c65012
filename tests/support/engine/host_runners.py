"""Host runners of this process over any mesh, from settings as a file has them, and how tests schedule over them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax

from rayserve_moe.checkpoints.files import read_config
from rayserve_moe.config.load import settings_from
from rayserve_moe.execution.card import model_card
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.served_model import runner_settings
from rayserve_moe.kernels.ragged_exchange import COMPILER_OPTIONS_OF_PLATFORM
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.requests.records import ModelCard
from tests.support.engine.run_requests import Way
from tests.support.models.core import NUM_PAGES, PAGE_SIZE
from tests.support.session.xla_flags import OPTIMIZED, QUICK_FLAGS, SHARED

TWO_SHAPES: dict[str, Any] = {
    "max_running_requests": 16,
    "max_step_tokens": 32,
    "precompile_bs_paddings": [16],
    "page_size": PAGE_SIZE,
    "num_pages": NUM_PAGES,
    "structured_output": False,
}
"""The least that runs many requests: a shape for decoding and one for prompts."""
WAY = Way(num_rows=16, step_tokens=32, chunk_tokens=32)
"""As they schedule."""


@contextmanager
def optimized() -> Iterator[None]:
    """Compile what starts inside as for users. It may not share a folder of programs with what is compiled quickly."""
    with patch.dict(COMPILER_OPTIONS_OF_PLATFORM, cpu=OPTIMIZED):
        yield


@contextmanager
def shared_by_many() -> Iterator[None]:
    """Compile engines that start inside with the options `SHARED`, unless they compile as for users."""
    if QUICK_FLAGS not in os.environ["XLA_FLAGS"]:
        yield
        return
    with patch.dict(COMPILER_OPTIONS_OF_PLATFORM, cpu=SHARED):
        yield


def new_runner(path: Path, *, mesh: tuple[int, int] = (1, 1), **values: Any) -> HostRunner:
    """Return a runner over `mesh`, data ranks by devices of each; nothing is loaded."""
    found = settings_from({"model_path": path, **values})
    return HostRunner(
        runner_settings(found, found.model), plan_for(jax.devices()[: mesh[0] * mesh[1]], data_size=mesh[0])
    )


def loaded_runner(path: Path, *, mesh: tuple[int, int] = (1, 1), **values: Any) -> HostRunner:
    """Return a runner that has its weights, and no program yet."""
    runner = new_runner(path, mesh=mesh, **values)
    runner.load()
    return runner


def prepared_runner(path: Path, *, mesh: tuple[int, int] = (1, 1), **values: Any) -> HostRunner:
    """Return a runner that is loaded and compiled."""
    runner = new_runner(path, mesh=mesh, **values)
    runner.prepare(runner.load())
    return runner


def card_of(path: Path, **values: Any) -> ModelCard:
    """Return the card of a checkpoint whose engine captures routing."""
    found = settings_from({"model_path": path, "enable_return_routed_experts": True, **values})
    spec = spec_from_config(read_config(path))
    return model_card(spec, model=found.model, replay=found.replay, name=path.name, eos_token_ids=(2,))
