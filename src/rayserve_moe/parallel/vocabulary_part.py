"""A device's shard of the vocabulary, and small exchanges between the shards."""

# S rows   V ids of a shard   P shards

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rayserve_moe.parallel.sharding import DATA, TENSOR, VOCABULARY_AXES, ParallelPlan


@dataclass(frozen=True)
class VocabularyPart:
    """A device's shard of the vocabulary.

    Without `axes` it is the whole vocabulary, and exchanges return their arguments and add nothing to the program. All
    members except sizes are only for use inside a sharded function.
    """

    num_words: int
    """Ids of the whole vocabulary."""
    width: int
    """Ids of each shard; ids beyond `num_words` are padding."""
    axes: tuple[str, ...] = ()
    """Mesh axes that divide the vocabulary."""
    num_parts: int = 1
    """Number of shards."""

    @property
    def is_padded(self) -> bool:
        return self.width * self.num_parts > self.num_words

    @property
    def first(self) -> jax.Array:
        """Return the first id of this shard, int32."""
        return (jax.lax.axis_index(self.axes) if self.axes else jnp.int32(0)) * self.width

    def ids(self) -> jax.Array:
        """Return the ids of this shard, int32 [V]."""
        return self.first + jnp.arange(self.width, dtype=jnp.int32)

    def places(self, ids: jax.Array) -> jax.Array:
        """Return the indices of ids in this shard; `width` for ids outside of it."""
        local = ids - self.first
        return jnp.where((local >= 0) & (local < self.width) & (ids < self.num_words), local, self.width)

    def without_padding(self, values_SV: jax.Array) -> jax.Array:
        """Return the values with minus infinity at padding."""
        return jnp.where(self.ids() < self.num_words, values_SV, -jnp.inf) if self.is_padded else values_SV

    def sum(self, partial_sum: jax.Array) -> jax.Array:
        """Add up the partial sums of the shards."""
        return jax.lax.psum(partial_sum, self.axes) if self.axes else partial_sum

    def gather(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Gather the shards' arrays, [P, ...] each, by a single exchange: arrays of 32 bits and of the same shape."""
        if not self.axes:
            return tuple(array[None] for array in arrays)
        bits = jnp.stack([jax.lax.bitcast_convert_type(array, jnp.int32) for array in arrays])
        of_all = jax.lax.all_gather(bits, self.axes, axis=1)
        return tuple(jax.lax.bitcast_convert_type(b, array.dtype) for b, array in zip(of_all, arrays, strict=True))


def vocabulary_part(plan: ParallelPlan, *, num_words: int, multiple: int = 1) -> VocabularyPart:
    """Return the sharding of a vocabulary on a mesh: shards of equal width, a multiple of `multiple` if several."""
    num_parts = plan.mesh.size
    if num_parts == 1:
        return VocabularyPart(num_words, num_words)
    sizes = {TENSOR: plan.tensor_size, DATA: plan.data_size}
    axes = tuple(axis for axis in VOCABULARY_AXES if sizes[axis] > 1)
    width = -(-num_words // (num_parts * multiple)) * multiple
    return VocabularyPart(num_words, width, axes, num_parts)
