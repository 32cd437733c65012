"""Masks of bits over logits, whole and in parts of several devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.decoding.masks import mask_words, masked
from rayserve_moe.parallel.vocabulary_part import VocabularyPart


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_words", [1, 31, 32, 33, 100, 512])
def test_a_masked_word_has_the_lowest_logit_and_others_keep_theirs(num_words):
    generator = np.random.default_rng(num_words)
    bits = generator.integers(0, 2, (3, mask_words(num_words) * 32)).astype(np.uint8)
    mask_SW = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    logits_SV = generator.normal(size=(3, num_words)).astype(np.float32)
    found = np.asarray(masked(jnp.asarray(logits_SV), jnp.asarray(mask_SW), part=VocabularyPart(num_words, num_words)))
    expected = np.where(bits[:, :num_words] > 0, logits_SV, np.finfo(np.float32).min)
    np.testing.assert_array_equal(found, expected)


def test_what_is_not_finite_stays():
    logits_SV = jnp.array([[jnp.nan, jnp.inf, 1.0, -jnp.inf]])
    found = np.asarray(masked(logits_SV, jnp.zeros((1, 1), jnp.int32), part=VocabularyPart(4, 4)))
    np.testing.assert_array_equal(found[0, [0, 1, 3]], [np.nan, np.inf, -np.inf])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_words", [70, 129])
def test_parts_of_a_vocabulary_have_their_own_bits(num_words):
    num_parts, width = 4, -(-num_words // 4)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:num_parts]), ("x",))
    part = VocabularyPart(num_words, width, ("x",), num_parts)
    bits = np.random.default_rng(1).integers(0, 2, (2, mask_words(num_words) * 32)).astype(np.uint8)
    mask_SW = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    logits_SV = np.ones((2, num_parts * width), np.float32)
    whole, parts = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(None, "x")
    run = jax.shard_map(
        lambda logits, mask: masked(logits, mask, part=part), mesh=mesh, in_specs=(parts, whole), out_specs=parts
    )
    found = np.asarray(jax.jit(run)(logits_SV, mask_SW))[:, :num_words]
    np.testing.assert_array_equal(found > 0, bits[:, :num_words] > 0)
