"""Engines over the core model, each compiled once; after every test all their pages must be free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.kernels.table import CPU_NATIVE
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.host_runners import shared_by_many
from tests.support.engine.outputs import Outcomes
from tests.support.engine.run_requests import Way, run_alone
from tests.support.engine.shared_settings import CORE, ONE_BUCKET
from tests.support.engine.workload import mixed_workload
from tests.support.kernels.native_kernels import IdleReference
from tests.support.models.core import NUM_PAGES, PAGE_SIZE
from tests.support.routing.router_reference import RouterReference
from tests.support.session.step_shapes import compiles_few, two_shapes_of_prompts

STATES: dict[str, Any] = {
    "enable_return_hidden_states": True,
    "enable_audit": True,
    "hidden_state_layers": [0, 2, 3],
}
SHOWN: dict[str, Any] = {**STATES, "logit_processors": "examples.logit_processors"}
ON_TWO_RANKS = Way(step_tokens=64, chunk_tokens=64)

ReferenceFactory = Callable[[Path], RouterReference]


@pytest.fixture(scope="session")
def started() -> list[Engine]:
    """Every engine that has been started so far."""
    return []


@pytest.fixture(scope="session")
def core_settings(kernel_settings: dict[str, str]) -> dict[str, Any]:
    """What is set for every engine that `engine_with` starts.

    They hold no samples, which needs more programs, unless `structured_output` asks for that.
    """
    pages = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE}
    return {"enable_return_routed_experts": True, "structured_output": False, **pages, **kernel_settings}


@pytest.fixture(scope="session")
def engine_with(
    core_checkpoint: Path, started: list[Engine], kernel_settings: dict[str, str], core_settings: dict[str, Any]
) -> Iterator[EngineStore]:
    """Start an engine with the given settings, or return the one that was started with them."""

    def start(**settings: Any) -> Engine:
        engine = Engine(str(core_checkpoint), **{**core_settings, **settings})
        assert (engine.runner.config.kernels.name == CPU_NATIVE.name) == bool(kernel_settings)
        return engine

    store = EngineStore(start, started)
    yield store
    store.close()


@pytest.fixture(scope="session")
def reference_for(kernel_settings: dict[str, str]) -> Iterator[ReferenceFactory]:
    """What a checkpoint comes to on its own: in numpy, or where kernels are native in an engine that is idle."""
    with ExitStack() as running:

        @cache
        def of(checkpoint: Path) -> RouterReference:
            if not kernel_settings:
                return RouterReference(checkpoint)
            return IdleReference(running.enter_context(Engine(str(checkpoint), **CORE, **kernel_settings)))

        yield of


@pytest.fixture(scope="session")
def engine(engine_with: EngineStore) -> Engine:
    """Reference engine: one device, two prefill buckets, and one decode bucket unless all shapes are compiled."""
    paddings = [16] if compiles_few() else [1, 16]
    with two_shapes_of_prompts(), shared_by_many():
        return engine_with.pinned(max_step_tokens=256, precompile_bs_paddings=paddings, structured_output=True)


@pytest.fixture(scope="session")
def two_ranks(engine_with: EngineStore) -> Engine:
    """Two data ranks of one device each, which are driven `ON_TWO_RANKS`."""
    wide = {"devices_per_host": 2, "data_parallel_size": 2}
    with shared_by_many():
        return engine_with.pinned(**ONE_BUCKET, **wide, structured_output=True, **SHOWN)


@pytest.fixture(scope="session")
def alone(engine: Engine) -> Outcomes:
    """The mixed workload, each request alone, prompts whole: what every other way to run it must come to."""
    return run_alone(engine.runner, engine.card, mixed_workload())


@pytest.fixture
def assert_alike(is_native: bool) -> Callable[[Any, Any], None]:
    """Compare answers: equal to the bit by native kernels; by XLA a log-prob's last bit depends on the batch."""

    def compare(ours: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
        if is_native:
            assert ours == wanted
            return
        assert (ours[0], ours[2]) == (wanted[0], wanted[2])
        np.testing.assert_allclose(ours[1], wanted[1], atol=1e-5, rtol=0)

    return compare


@pytest.fixture(autouse=True)
def no_page_is_lost(started: list[Engine]) -> Iterator[None]:
    """Once idle, every page of every engine is free or cached, and the books agree with an independent count.

    What is cached is flushed: the next test may drive the steps of the same runner itself, over the same pages.
    """
    yield
    for engine in started:
        engine.loop.check_integrity()
        statistics = engine.loop.statistics()
        assert statistics["requests_live"] == 0
        assert statistics["pages_free"] == statistics["pages_total"]
        engine.loop.flush()
        engine.loop.check_integrity()
        assert engine.loop.statistics()["pages_cached"] == 0
