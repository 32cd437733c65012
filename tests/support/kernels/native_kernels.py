"""Tests of the native CPU kernels run where the machine can build and run them, and say why where it cannot."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.execution.native_levels import Level, NativeKernelsUnavailable, choose_level
from rayserve_moe.execution.native_library import SOURCES, find_compilers, register_native_kernels, requested_level
from rayserve_moe.kernels.cpu_native.layout import DEFINITIONS, pack
from rayserve_moe.rollouts.alignment import decode_answer
from tests.support.routing.router_reference import RouterReference


def need_native_kernels() -> None:
    """Skip, with the reason, on a machine without the kernels."""
    try:
        register_native_kernels()
    except NativeKernelsUnavailable as error:
        pytest.skip(f"no native CPU kernels: {error}")


def build_program(
    source: Path, *options: str, directory: Path, level: Level | None = None, compiler: str | None = None
) -> Path:
    """Build a program over the sources of the kernels, for the level that the tests run at unless another is named.

    Skips the test on a machine without a compiler, or whose processor has no level.
    """
    compiler = compiler or next(iter(find_compilers()), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    try:
        level = level or choose_level(requested_level())
    except NativeKernelsUnavailable as error:
        pytest.skip(str(error))
    program = directory / source.stem
    always = ("-std=c++17", "-pthread", "-fwrapv", "-ffp-contract=off", "-w", *DEFINITIONS, f"-I{SOURCES}")
    subprocess.run([compiler, *always, *level.options, *options, str(source), "-o", str(program)], check=True)
    return program


def laid_out(weights_KN: jax.Array) -> jax.Array:
    """Return weights as `pack` lays them out, by numpy: jax would compile a program for each operation and shape."""
    return jnp.asarray(pack(np.asarray(weights_KN)))


class IdleReference(RouterReference):
    """A model as an engine computes it, each sequence as one prompt, alone, with nothing cached: no row ties.

    The engine is the caller's, and serves nothing else.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._answers: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}

    def rows(self, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of every token, which are right or wrong."""
        rows, _ = self._answer(tuple(token_ids))
        return rows, np.full(rows.shape[:2], np.inf)

    def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-probs as the scores of a prompt."""
        return self._answer(tuple(token_ids))[1]

    def _answer(self, token_ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        if token_ids not in self._answers:
            self._engine.loop.flush()
            asked = {"return_logprob": True, "logprob_start_len": 0, "return_routed_experts": True}
            answer = self._engine.generate(input_ids=list(token_ids), max_new_tokens=0, **asked)
            scores = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
            routing = decode_answer(answer, self._engine.card.routing)
            assert routing.missing == () and len(routing.rows) == len(token_ids) == len(scores) + 1
            self._answers[token_ids] = routing.rows, np.array(scores)
        return self._answers[token_ids]
