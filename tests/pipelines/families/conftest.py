"""A model of a family stands in for the core model, so that laws of this folder's parent are held over it too.

Its programs are compiled quickly in any session: `make parity-all` compares those that users get.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import pytest

from rayserve_moe import Engine
from rayserve_moe.config.settings import CompileSettings, ModelSettings, SettingsError
from rayserve_moe.execution.native_kernels import choose_kernels
from rayserve_moe.kernels.ragged_exchange import COMPILER_OPTIONS_OF_PLATFORM
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.parallel.mesh import plan_for
from tests.pipelines import conftest as core
from tests.pipelines.conftest import EngineStore, ReferenceFactory
from tests.support.engine.shared_settings import CORE, ONE_BUCKET
from tests.support.kernels.native_kernels import IdleReference, need_native_kernels
from tests.support.models.families import FAMILY_CASES, FamilyCase, config_of, write_family
from tests.support.session.xla_flags import QUICK

# Their own, or they would still be those of the core model when a family's turn comes.
engine_with, alone = core.engine_with, core.alone
NATIVE = CompileSettings(cpu_kernels="native")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    with patch.dict(COMPILER_OPTIONS_OF_PLATFORM, cpu=QUICK):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    with patch.dict(COMPILER_OPTIONS_OF_PLATFORM, cpu=QUICK):
        return (yield)


def families(*sampled: str, variants: int = 1) -> pytest.MarkDecorator:
    """The axis of families: so many checkpoints of each; all are slow but those that are named."""
    cases = [case for case in FAMILY_CASES if case.variant < variants]
    params = [
        pytest.param(case, id=case.name, marks=() if case.name in sampled else pytest.mark.slow) for case in cases
    ]
    return pytest.mark.parametrize("case", params, indirect=True, scope="session")


@pytest.fixture(scope="session")
def case(request: pytest.FixtureRequest) -> FamilyCase:
    return request.param


@pytest.fixture(scope="session")
def core_settings(core_settings: dict[str, Any], case: FamilyCase) -> dict[str, Any]:
    """What is set for every engine of the core model, and the capture of an index where there is one."""
    return {**core_settings, "enable_return_indexer_topk": case.has_index}


@pytest.fixture(scope="session")
def two_ranks(engine_with: EngineStore, is_native: bool) -> Engine:
    """Two data ranks of one device each, which are driven `ON_TWO_RANKS`.

    In bfloat16 they exchange results: sums of more than two experts that are added up rank by rank round otherwise.
    Exchanged results are added up in the order of one device, but each product is rounded before.
    """
    exchange = {"expert_backend": "all_to_all"} if is_native else {}
    return engine_with.pinned(**ONE_BUCKET, devices_per_host=2, data_parallel_size=2, **exchange)


@pytest.fixture(scope="session")
def dtype(case: FamilyCase, is_native: bool) -> str:
    """What files hold: float32, or bfloat16 for the native kernels, where these compute the model."""
    if not is_native:
        return "float32"
    need_native_kernels()
    spec = spec_from_config(config_of(case, dtype="bfloat16"))
    try:
        choose_kernels(spec, plan_for(jax.devices()[:1]), model=ModelSettings(), compiling=NATIVE)
    except SettingsError as error:
        pytest.skip(str(error))
    return "bfloat16"


@pytest.fixture(scope="session")
def core_checkpoint(case: FamilyCase, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(case, tmp_path_factory.mktemp(case.name) / "model", seed=5, dtype=dtype)


@pytest.fixture(scope="session")
def started(core_checkpoint: Path) -> list[Engine]:
    """Every engine that has been started over this model."""
    return []


@pytest.fixture(scope="session")
def other_checkpoint(case: FamilyCase, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(case, tmp_path_factory.mktemp(case.name) / "other", seed=6, dtype=dtype)


@pytest.fixture(scope="session")
def engine(engine_with: EngineStore) -> Engine:
    """One device, one size of decode steps, compiled as the other engines of this folder are."""
    return engine_with.pinned(max_step_tokens=256, precompile_bs_paddings=[16])


@pytest.fixture(scope="session")
def reference_for(kernel_settings: dict[str, str]) -> Iterator[ReferenceFactory]:
    """What a checkpoint comes to in an engine that is idle; `make parity` holds such engines to transformers."""
    with ExitStack() as running:
        settings = {**CORE, **kernel_settings}
        yield cache(lambda checkpoint: IdleReference(running.enter_context(Engine(str(checkpoint), **settings))))
