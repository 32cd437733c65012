"""User-defined logit processors, applied before sampling to the rows whose requests name them.

A processor is a pure function of arrays over all rows of a step; each device passes its shard of the vocabulary.
"""

# S sampled rows   V vocabulary (local share)   K tokens of a row   L numbers of an argument   X inputs of a row

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
    """Inputs of a processor besides the logits; rows that do not use it have its default arguments."""

    recent_SK: jax.Array
    """Last tokens of prompt and output, int32 [S, NUM_RECENT], in order; -1 in front if the row has fewer."""
    num_outputs_S: jax.Array
    """Number of outputs, int32 [S]."""
    arguments: Mapping[str, jax.Array]
    """Arguments by name, float32 or int32, [S], or [S, L] for lists."""


Apply = Callable[..., jax.Array]
"""Takes float32 logits [S, V], `ProcessedRows` and the vocabulary shard as `part`; returns logits."""


@dataclass(frozen=True)
class LogitProcessor:
    """A logit processor and its declared arguments; it applies to a row if the request sets any argument."""

    apply: Apply = field(repr=False)
    """Called for all rows of a step."""
    arguments: Any
    """Default by name when constructed, then a tuple of `ProcessorArgument`.

    A default is a number or a list of numbers; a list fixes the length. The dtype is float32 if a default is a float,
    otherwise int32.
    """
    digest: str = ""
    """Identifies the source of its module."""

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
    """Return the masked logits (`masked`), changed by the processors of each row in their order.

    `given_SX` int32 has, per row, `SampleRules.processed`, the number of outputs, and the last tokens. A row keeps its
    own logits if processors would leave no id to sample. Entries that were not finite before stay as they are.
    """
    plain_SV = masked(logits_SV, mask_SW, part=part)
    if given_SX is None or not processors:
        return plain_SV
    lowest = jnp.finfo(logits_SV.dtype).min

    def change() -> jax.Array:
        num_outputs_S, recent_SK = given_SX[:, -NUM_RECENT - 1], given_SX[:, -NUM_RECENT:]
        changed_SV, first = logits_SV, 0
        for processor in processors:
            is_requested_S, arguments = given_SX[:, first] > 0, {}
            first += 1
            for argument in processor.arguments:
                arguments[argument.name] = _values(given_SX[:, first : first + argument.size], argument)
                first += argument.size
            rows = ProcessedRows(recent_SK, num_outputs_S, arguments)
            next_SV = processor.apply(changed_SV, rows, part=part)
            changed_SV = jnp.where(is_requested_S[:, None], next_SV, changed_SV)
        changed_SV = jnp.where(jnp.isfinite(logits_SV), jnp.maximum(changed_SV, lowest), logits_SV)
        changed_SV = masked(changed_SV, mask_SW, part=part)
        (best_PS,) = part.gather(changed_SV.max(axis=-1))
        return jnp.where((best_PS.max(axis=0) <= lowest)[:, None], plain_SV, changed_SV)

    # All devices see the same inputs, so they take the same branch; only this branch has collectives.
    return jax.lax.cond(jnp.any(given_SX[:, -NUM_RECENT - 1] >= 0), change, lambda: plain_SV)


def processed_size(processors: Sequence[LogitProcessor]) -> int:
    """Return X of `given_SX`."""
    return row_size([processor.arguments for processor in processors]) + 1 + NUM_RECENT


def _values(bits_SL: jax.Array, argument: ProcessorArgument) -> jax.Array:
    values_SL = jax.lax.bitcast_convert_type(bits_SL, jnp.float32) if argument.is_float else bits_SL
    return values_SL if argument.is_list else values_SL[:, 0]
