"""Programs that are lowered in one MLIR context."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from tests.support.session.shared_contexts import MAX_PROGRAMS, SharedContexts


def lowered(factor: float) -> jax.stages.Lowered:
    return jax.jit(lambda x: x * factor).lower(np.ones(3, np.float32))


def context_of(program: jax.stages.Lowered) -> object:
    return program.compiler_ir().context


@pytest.fixture
def alone() -> Iterator[SharedContexts]:
    """Contexts of this test alone, shared by nothing until it starts them."""
    contexts = SharedContexts()
    yield contexts
    contexts.stop()


def test_programs_of_a_thread_are_lowered_in_one_context_and_compute_what_they_say(alone: SharedContexts) -> None:
    alone.start()
    programs = [lowered(factor) for factor in (2.0, 3.0)]
    assert context_of(programs[0]) == context_of(programs[1])
    with ThreadPoolExecutor(1) as pool:
        assert context_of(pool.submit(lowered, 4.0).result()) != context_of(programs[0])
    for program, factor in zip(programs, (2.0, 3.0), strict=True):
        assert np.array_equal(program.compile()(np.ones(3, np.float32)), np.full(3, factor))


def test_a_context_takes_so_many_programs(alone: SharedContexts) -> None:
    alone.start()
    contexts = [context_of(lowered(float(number))) for number in range(MAX_PROGRAMS + 1)]
    assert all(context == contexts[0] for context in contexts[:-1]) and contexts[-1] != contexts[0]


def test_programs_have_contexts_of_their_own_once_it_stops(alone: SharedContexts) -> None:
    alone.start()
    before = context_of(lowered(2.0))
    alone.stop()
    assert before != context_of(lowered(3.0))
