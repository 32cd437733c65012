"""The words that one device has of a vocabulary that all devices share, and small exchanges between the parts."""

# S rows   V words of a part   P parts

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rayserve_moe.parallel.sharding import DATA, TENSOR, VOCABULARY_AXES, ParallelPlan


@dataclass(frozen=True)
class VocabularyPart:
    """A vocabulary of `num_words`, of which every device has `width`; words beyond the last are padding.

    `axes` are the mesh axes that it lies over. Without any this is the whole vocabulary, and exchanges return what
    they are given and leave no trace in the program. All but sizes is only for inside a sharded function.
    """

    num_words: int
    width: int
    axes: tuple[str, ...] = ()
    num_parts: int = 1

    @property
    def is_padded(self) -> bool:
        return self.width * self.num_parts > self.num_words

    @property
    def first(self) -> jax.Array:
        """Id of this device's first word, int32."""
        return (jax.lax.axis_index(self.axes) if self.axes else jnp.int32(0)) * self.width

    def ids(self) -> jax.Array:
        """Ids of this device's words, int32 [V]."""
        return self.first + jnp.arange(self.width, dtype=jnp.int32)

    def places(self, ids: jax.Array) -> jax.Array:
        """Where words lie on this device; `width` for those that lie on another, or nowhere."""
        local = ids - self.first
        return jnp.where((local >= 0) & (local < self.width) & (ids < self.num_words), local, self.width)

    def without_padding(self, values_SV: jax.Array) -> jax.Array:
        """Minus infinity for words that are none."""
        return jnp.where(self.ids() < self.num_words, values_SV, -jnp.inf) if self.is_padded else values_SV

    def sum(self, partial_sum: jax.Array) -> jax.Array:
        """Add up what each device computed for its words."""
        return jax.lax.psum(partial_sum, self.axes) if self.axes else partial_sum

    def gather(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """What every device has of each array, [P, ...], by one exchange: arrays of 32 bits and of one shape."""
        if not self.axes:
            return tuple(array[None] for array in arrays)
        bits = jnp.stack([jax.lax.bitcast_convert_type(array, jnp.int32) for array in arrays])
        of_all = jax.lax.all_gather(bits, self.axes, axis=1)
        return tuple(jax.lax.bitcast_convert_type(b, array.dtype) for b, array in zip(of_all, arrays, strict=True))


def vocabulary_part(plan: ParallelPlan, *, num_words: int, multiple: int = 1) -> VocabularyPart:
    """How a vocabulary lies on a mesh: in parts of one width, a multiple of `multiple` where there are several."""
    num_parts = plan.mesh.size
    if num_parts == 1:
        return VocabularyPart(num_words, num_words)
    sizes = {TENSOR: plan.tensor_size, DATA: plan.data_size}
    axes = tuple(axis for axis in VOCABULARY_AXES if sizes[axis] > 1)
    width = -(-num_words // (num_parts * multiple)) * multiple
    return VocabularyPart(num_words, width, axes, num_parts)
