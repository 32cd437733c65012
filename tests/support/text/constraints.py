"""The vocabulary of synthetic checkpoints, for constraints without a model."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rayserve_moe.checkpoints.synthetic_tokenizer import EOS_ID, write_tokenizer
from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraints.compiler import ConstraintCompiler
from rayserve_moe.constraints.matchers import Vocabulary
from rayserve_moe.engine.guides import vocabulary_of
from rayserve_moe.requests.records import Constraint
from rayserve_moe.text.tokenizer import Tokenizer
from tests.support.models.core import CORE_CONFIG

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
"""A schema whose answers are short, whoever writes them."""


@cache
def synthetic_tokenizer() -> Tokenizer:
    """The tokenizer of the core model."""
    with TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), CORE_CONFIG.vocab_size)
        return Tokenizer(directory)


@cache
def vocabulary() -> Vocabulary:
    """What matchers for the core model are made for."""
    return vocabulary_of(synthetic_tokenizer(), CORE_CONFIG.vocab_size, eos_ids=(EOS_ID,))


@cache
def compiler() -> ConstraintCompiler:
    """A compiler for the core model, with one thread."""
    return ConstraintCompiler(vocabulary(), StructuredSettings(num_threads=1))


def schema_constraint(schema: Any, param: str = "json_schema") -> Constraint:
    """Return a constraint to a schema."""
    return Constraint("json_schema", json.dumps(schema), param)
