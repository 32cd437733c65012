"""Constraints compiled by the real engine, in threads beside the processes that try them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rayserve_moe.checkpoints
from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraints.compiler import ConstraintCompiler
from rayserve_moe.engine.guides import vocabulary_of
from rayserve_moe.requests.records import Constraint, SamplingParams
from rayserve_moe.text.tokenizer import Tokenizer

CALCULATOR = Path(rayserve_moe.checkpoints.__file__).parent / "calculator"


@pytest.fixture
def compiler() -> Iterator[ConstraintCompiler]:
    settings = StructuredSettings(max_mask_ms=10_000.0, timeout_s=600.0)
    compiler = ConstraintCompiler(vocabulary_of(Tokenizer(CALCULATOR), 256, eos_ids=(0,)), settings)
    yield compiler
    compiler.close()


def test_the_first_mask_of_a_guide_was_found_while_its_constraint_was_compiled(compiler: ConstraintCompiler) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}
    compiled = compiler.submit(Constraint("json_schema", json.dumps(schema), "json_schema")).result()
    guide = compiled.guide(SamplingParams(max_new_tokens=4))
    assert isinstance(guide.next_mask(np.zeros(0, np.int32)), np.ndarray)
    assert guide.last_ms < compiled.first_ms / 4, "the engine's thread has looked for it again"
