"""Shapes that are compiled beside the steps change no result, and are not missed where they do not compile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.execution.programs import compiled
from tests.support.engine.host_runners import new_runner
from tests.support.engine.workload import draw_prompt
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.core import NATIVE_CORE_CONFIG
from tests.support.session.step_shapes import shapes_of_users

ASKED = {"return_logprob": True, "return_routed_experts": True, "max_new_tokens": 12, "ignore_eos": True}
NUM_PROMPTS = 5
"""Neither the smallest nor the largest decode shape."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_native_kernels()
    return write_checkpoint(tmp_path_factory.mktemp("later") / "model", NATIVE_CORE_CONFIG, seed=3)


@contextmanager
def started(checkpoint: Path, **settings: Any) -> Iterator[Engine]:
    """An engine whose programs only those of this file share, and a few shapes that it may begin without."""
    native = {
        "cpu_kernels": "native",
        "enable_return_routed_experts": True,
        "num_pages": 64,
        "structured_output": False,
    }
    sizes = {"max_running_requests": 16, "precompile_bs_paddings": [1, 8, 16], "max_step_tokens": 64}
    kept = {"compile_cache": str(checkpoint.parent / "programs")}
    with shapes_of_users(), Engine(str(checkpoint), max_model_len=512, **sizes, **native, **kept, **settings) as engine:
        yield engine


def answers_of(engine: Engine) -> list[tuple[Any, ...]]:
    """Ids, log-probs and rows of prompts that run together, with nothing cached."""
    engine.loop.flush()
    generator = np.random.default_rng(5)
    prompts = [draw_prompt(generator, int(length)) for length in generator.integers(3, 120, NUM_PROMPTS)]
    answers = engine.generate(input_ids=[list(map(int, prompt)) for prompt in prompts], temperature=0, **ASKED)
    return [
        (
            answer["output_ids"],
            [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]],
            answer["meta_info"]["routed_experts"],
        )
        for answer in answers
    ]


@pytest.mark.slow
def test_results_are_the_same_before_and_after_a_shape_is_there(monkeypatch, checkpoint):
    compile_shape, gate = compiled.compile_shape, threading.Event()

    def held(*given: Any, **named: Any) -> Any:
        gate.wait()
        return compile_shape(*given, **named)

    monkeypatch.setattr(compiled, "compile_shape", held)
    with started(checkpoint) as engine:
        runner, later = engine.runner, engine.runner.later
        assert later is not None
        first = compiled.first_shapes(runner.served)
        assert 2 <= len(first) < len(runner.served.shapes)
        before = answers_of(engine)
        assert set(runner.programs.steps) == set(first)
        gate.set()
        during = answers_of(engine)
        later.wait()
        assert set(runner.programs.steps) == set(runner.served.shapes)
        assert before == during == answers_of(engine)
        assert runner.num_compilations_since_start == 0


@pytest.mark.slow
def test_a_shape_that_does_not_compile_is_replaced_by_a_larger_one(monkeypatch, checkpoint, caplog):
    def fail(*given: Any, **named: Any) -> Any:
        raise jax.errors.JaxRuntimeError("no such instruction")

    monkeypatch.setattr(compiled, "compile_shape", fail)
    with started(checkpoint) as engine:
        assert engine.runner.later is not None
        engine.runner.later.wait()
        assert len(answers_of(engine)) == NUM_PROMPTS
    assert "using a larger shape: no such instruction" in caplog.text


def test_an_engine_that_ends_compiles_nothing_more(monkeypatch, checkpoint):
    begun_shapes, begun, ends = [], threading.Event(), threading.Event()
    stop = compiled.LaterShapes.stop

    def hold(shape: Any, *given: Any, **named: Any) -> Any:
        begun_shapes.append(shape)
        begun.set()
        ends.wait()
        raise jax.errors.JaxRuntimeError("stopped")

    def stop_while_compiling(later: compiled.LaterShapes) -> None:
        later._stops.set()
        ends.set()
        stop(later)

    monkeypatch.setattr(compiled, "compile_shape", hold)
    monkeypatch.setattr(compiled.LaterShapes, "stop", stop_while_compiling)
    with started(checkpoint):
        begun.wait()
    assert len(begun_shapes) == 1


@pytest.mark.float32("XLA's own kernels")
def test_xla_compiles_all_shapes_ahead(core_checkpoint):
    served = new_runner(core_checkpoint, dtype="float32", cpu_kernels="off", max_model_len=512).served
    assert compiled.first_shapes(served) == served.shapes
