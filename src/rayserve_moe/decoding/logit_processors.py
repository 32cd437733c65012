"""Functions of an operator that change logits before they are sampled from, for the rows whose requests ask for it.

They are pure functions of arrays, computed for all rows of a step at once; each device has its part of the vocabulary.
"""

# S sampled rows   V vocabulary (local share)   K tokens of a row   L numbers of an argument   X of what a row is given

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.decoding.masks import masked
from rayserve_moe.parallel.vocabulary_part import VocabularyPart
from rayserve_moe.requests.processor_arguments import NUM_RECENT, ProcessorArgument, argument_of, row_size


class ProcessedRows(NamedTuple):
    """What a processor knows of rows: their last tokens int32 [S, NUM_RECENT], those of the prompt included, the last
    one last, -1 where there are fewer; how many outputs they have, int32 [S]; and the values of its arguments by name,
    float32 or int32 [S], [S, L] where they are lists. Rows that do not ask for it have its defaults."""

    recent_SK: jax.Array
    num_outputs_S: jax.Array
    arguments: Mapping[str, jax.Array]


Apply = Callable[..., jax.Array]
"""Takes float32 logits [S, V], `ProcessedRows` and the `part` of the vocabulary that a device has; returns logits."""


@dataclass(frozen=True)
class LogitProcessor:
    """A function with the arguments that a request can give it, which come by name with their defaults.

    A default is a number, or a list of numbers, whose length lists have then; float32 where one is a float, else int32.
    A request that gives any argument has its rows processed. `digest` tells the source of its module.
    """

    apply: Apply = field(repr=False)
    arguments: Any
    digest: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.arguments, Mapping):
            declared = tuple(argument_of(name, default) for name, default in self.arguments.items())
            object.__setattr__(self, "arguments", declared)


@jax.named_scope("logit_processors")
def allowed_logits(
    logits_SV: jax.Array,
    mask_SW: jax.Array,
    *,
    given_SX: jax.Array | None,
    processors: Sequence[LogitProcessor],
    part: VocabularyPart,
) -> jax.Array:
    """Logits of the words that a mask allows (`masked`), changed by the processors that rows ask for, in their order.

    `given_SX` int32 has of every row what `SampleRules.processed` says, then the number of its outputs and its last
    tokens. A row keeps its own logits where processors would leave it no word, or where these were not finite before.
    """
    plain_SV = masked(logits_SV, mask_SW, part=part)
    if given_SX is None or not processors:
        return plain_SV
    lowest = jnp.finfo(logits_SV.dtype).min

    def change() -> jax.Array:
        num_outputs_S, recent_SK = given_SX[:, -NUM_RECENT - 1], given_SX[:, -NUM_RECENT:]
        changed_SV, first = logits_SV, 0
        for processor in processors:
            is_asked_S, arguments = given_SX[:, first] > 0, {}
            first += 1
            for argument in processor.arguments:
                arguments[argument.name] = _values(given_SX[:, first : first + argument.size], argument)
                first += argument.size
            rows = ProcessedRows(recent_SK, num_outputs_S, arguments)
            next_SV = processor.apply(changed_SV, rows, part=part)
            changed_SV = jnp.where(is_asked_S[:, None], next_SV, changed_SV)
        changed_SV = jnp.where(jnp.isfinite(logits_SV), jnp.maximum(changed_SV, lowest), logits_SV)
        changed_SV = masked(changed_SV, mask_SW, part=part)
        (best_PS,) = part.gather(changed_SV.max(axis=-1))
        return jnp.where((best_PS.max(axis=0) <= lowest)[:, None], plain_SV, changed_SV)

    # Every device is given the same, and exchanges numbers only then.
    return jax.lax.cond(jnp.any(given_SX[:, -NUM_RECENT - 1] >= 0), change, lambda: plain_SV)


def processed_size(processors: Sequence[LogitProcessor]) -> int:
    """X of `given_SX`."""
    return row_size([processor.arguments for processor in processors]) + 1 + NUM_RECENT


def _values(bits_SL: jax.Array, argument: ProcessorArgument) -> jax.Array:
    values_SL = jax.lax.bitcast_convert_type(bits_SL, jnp.float32) if argument.is_float else bits_SL
    return values_SL if argument.is_list else values_SL[:, 0]
