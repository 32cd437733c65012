"""Engine programs in tests: the fewest shapes, and those that another version of the package compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.config.settings import CompileSettings
from rayserve_moe.execution.programs import cache, compiled
from rayserve_moe.execution.programs.buckets import CPUS
from rayserve_moe.parallel.mesh import plan_for
from tests.support.engine.host_runners import new_runner
from tests.support.session.shared_programs import SharedPrograms
from tests.support.session.step_shapes import (
    compile_fewest_shapes,
    compiles_few,
    shapes_of_users,
    two_shapes_of_prompts,
)


def num_shapes(checkpoint: Path) -> int:
    sizes = {"max_step_tokens": 256, "precompile_bs_paddings": [1, 16], "max_model_len": 512}
    return len(new_runner(checkpoint, dtype="float32", cpu_kernels="off", **sizes).served.shapes)


def test_engines_compile_the_listed_shapes_and_one_of_prompts_or_two(core_checkpoint: Path) -> None:
    with shapes_of_users():
        assert not compiles_few() and (num_all := num_shapes(core_checkpoint)) > 4
        with two_shapes_of_prompts():
            assert num_shapes(core_checkpoint) == num_all
    with patch.dict(CPUS):
        compile_fewest_shapes()
        assert compiles_few() and num_shapes(core_checkpoint) == 3
        with two_shapes_of_prompts():
            assert num_shapes(core_checkpoint) == 4


@pytest.fixture
def own_cache_of_jax(tmp_path: Path) -> Iterator[None]:
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    cache.compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    cache.compilation_cache.reset_cache()


def scaled(x: jax.Array, *, factor: float) -> jax.Array:
    return jnp.sin(x) * factor


@pytest.mark.usefixtures("programs_as_for_users", "own_cache_of_jax")
def test_programs_that_jax_has_are_kept_as_those_that_were_compiled(tmp_path: Path) -> None:
    plan, shared = plan_for(jax.devices()[:1]), SharedPrograms()
    kept = cache.kept_programs(CompileSettings(str(tmp_path / "kept")), plan)
    assert kept is not None
    like = jax.ShapeDtypeStruct((3,), np.float32, sharding=plan.replicated())
    array = jax.device_put(np.ones(3, np.float32), plan.replicated())
    shared.start()
    try:
        for name in ("compiled", "found"):
            with compiled.without_cache_of_jax():
                kept.keep(name, compiled.optimized(jax.jit(partial(scaled, factor=3.0)).lower(like), plan))
            assert len(list((tmp_path / "jax").glob("jit_scaled-*"))) == 1
    finally:
        shared.stop()
    for name in ("compiled", "found"):
        program = kept.find(name)
        assert program is not None
        np.testing.assert_allclose(program(array), 3 * np.sin(1.0), rtol=1e-6)


@pytest.mark.usefixtures("programs_as_for_users", "own_cache_of_jax")
def test_a_program_that_is_loaded_is_found_as_it_is_while_it_is_held(tmp_path: Path) -> None:
    plan, shared = plan_for(jax.devices()[:1]), SharedPrograms()
    first, second, other = (
        cache.kept_programs(CompileSettings(str(tmp_path / name)), plan) for name in ("kept", "kept", "other")
    )
    assert first is not None and second is not None and other is not None
    like = jax.ShapeDtypeStruct((3,), np.float32, sharding=plan.replicated())
    shared.start()
    try:
        program = compiled.optimized(jax.jit(partial(scaled, factor=5.0)).lower(like), plan)
        first.keep("key", program)
        assert second.find("key") is program
        assert second.find("another key") is None and other.find("key") is None
        del program
        gc.collect(1)
        assert not shared._loaded
        program = second.find("key")
        assert program is not None and first.find("key") is program
    finally:
        shared.stop()
    assert first.find("key") is not program
