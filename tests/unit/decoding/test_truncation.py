"""Truncation by search keeps what the definition keeps, which sorts; a row's tokens depend on no other row."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.decoding.truncation import MASS_OF_ONE, Limits, is_kept, last_kept
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.parallel.vocabulary_part import vocabulary_part

Arrays = dict[str, np.ndarray]

ROWS = 1000
"""Rows of a batch."""


@cache
def on_parts(size: int, num_parts: int) -> Callable[[jax.Array, dict[str, jax.Array]], jax.Array]:
    """What finds which tokens are kept of a vocabulary that lies on several devices."""
    plan = plan_for(jax.devices()[:num_parts], data_size=max(1, num_parts // 2))
    part, whole = vocabulary_part(plan, num_words=size), plan.partition((None,))

    def on_device(logprobs: jax.Array, limits: dict[str, jax.Array]) -> jax.Array:
        of_rows = Limits(**{f"{name}_S": values for name, values in limits.items()})
        return is_kept(logprobs, last_kept(logprobs, of_rows, part=part), part=part)

    of_words = plan.partition((None, "vocabulary"))
    run = jax.shard_map(on_device, mesh=plan.mesh, in_specs=(of_words, whole), out_specs=of_words, check_vma=False)
    padding = [(0, 0), (0, part.width * part.num_parts - size)]

    def found(logprobs: jax.Array, limits: dict[str, jax.Array]) -> jax.Array:
        return run(jnp.pad(logprobs, padding, constant_values=-jnp.inf), limits)[:, :size]

    return jax.jit(found)


def found(logprobs: jax.Array, limits: Arrays, num_parts: int = 1) -> np.ndarray:
    return np.asarray(on_parts(logprobs.shape[1], num_parts)(logprobs, limits))


def defined(logprobs: np.ndarray, limits: Arrays) -> np.ndarray:
    """The definition: sort, take the first k, then by whole units of mass, then down to the last that is likely."""
    probs = np.asarray(jax.jit(jnp.exp)(logprobs))
    order = np.argsort(-logprobs, axis=1, kind="stable")
    falling = np.take_along_axis(probs, order, axis=1)
    top_k, top_p, min_p = (limits[name][:, None] for name in ("top_k", "top_p", "min_p"))
    ranks = np.arange(logprobs.shape[1])
    within_k = (ranks < top_k) | (top_k == 0)
    masses = np.where(within_k, np.round(falling * np.float32(MASS_OF_ONE)), 0).astype(np.int64)
    whole = masses.sum(1, keepdims=True)
    limit = np.maximum(np.ceil(top_p * whole.astype(np.float32)), 1)
    within_p = (np.cumsum(masses, axis=1) - masses < limit) | (top_p >= 1)
    is_likely = falling >= min_p * falling[:, :1]
    within_min_p = ranks <= ranks[-1] - np.argmax(is_likely[:, ::-1], axis=1)[:, None]
    kept = np.empty(order.shape, bool)
    np.put_along_axis(kept, order, within_k & within_p & within_min_p, axis=1)
    return kept


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(jax.nn.log_softmax)(logits.astype(np.float32)))


def random_rows(seed: int, *, size: int, num_rows: int = ROWS) -> np.ndarray:
    """Log-probabilities with ties, of flat to steep rows; some words are withheld, some rows have one value."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal((num_rows, size)) * 4
    step = random.choice([0.01, 0.25, 1.0, 4.0], (num_rows, 1))
    logits = np.round(logits / step) * step / random.choice([1e-4, 0.1, 0.7, 1.0, 2.0, 100.0], (num_rows, 1))
    withheld = random.random(logits.shape) < random.choice([0, 0, 0.1, 0.9], (num_rows, 1))
    withheld[:, random.integers(size)] = False
    logits = np.where(withheld, -np.inf, logits)
    return log_softmax(np.where(random.random((num_rows, 1)) < 0.02, 1.5, logits))


def random_limits(seed: int, num_rows: int = ROWS, **fixed: float) -> Arrays:
    random = np.random.default_rng((seed, 1))
    drawn = {
        "top_k": random.choice([0, 0, 1, 2, 5, 17, 64, 1000, 2**32 - 1], num_rows),
        "top_p": random.choice([1e-30, 1e-6, 0.1, 0.5, 0.9, 0.99, 1 - 2**-24, 1.0, 1.0], num_rows),
        "min_p": random.choice([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0], num_rows),
    } | {name: np.full(num_rows, value) for name, value in fixed.items()}
    kinds = {"top_k": np.uint32, "top_p": np.float32, "min_p": np.float32}
    return {name: values.astype(kinds[name]) for name, values in drawn.items()}


def check(logprobs: np.ndarray, limits: Arrays, num_parts: int = 1) -> np.ndarray:
    kept, expected = found(logprobs, limits, num_parts), defined(logprobs, limits)
    np.testing.assert_array_equal(kept, expected)
    assert expected[np.arange(len(logprobs)), logprobs.argmax(1)].all(), "the likeliest token is always kept"
    return expected


@pytest.mark.parametrize(("size", "num_parts"), [(2, 1), (70, 1), (70, 4), (29, 8)])
def test_what_is_kept_is_what_the_definition_keeps(size, num_parts):
    kept = check(random_rows(size, size=size), random_limits(size), num_parts)
    assert 0.1 < kept.mean() < 0.9, "some tokens are kept and some removed"


@pytest.mark.slow
@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("size", [5, 97, 256, 1000])
def test_what_is_kept_is_what_the_definition_keeps_in_a_hundred_thousand_rows(size, num_parts):
    for seed in range(25):
        check(random_rows(seed, size=size), random_limits(seed), num_parts)


@pytest.mark.slow
@pytest.mark.parametrize("num_parts", [1, 8])
def test_a_real_vocabulary_is_cut_as_defined(num_parts):
    check(random_rows(3, size=151_936, num_rows=24), random_limits(3, 24), num_parts)


@pytest.mark.parametrize(
    ("limits", "num_kept"),
    [({"top_k": 7}, 7), ({"top_p": 0.25}, 18), ({"min_p": 1.0}, 70), ({"top_k": 9, "top_p": 0.5}, 5)],
    ids=str,
)
def test_ties_are_kept_from_the_smaller_id_on(limits, num_kept):
    none = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    kept = check(log_softmax(np.zeros((ROWS, 70))), random_limits(0, **(none | limits)))
    np.testing.assert_array_equal(kept, np.broadcast_to(np.arange(70) < num_kept, kept.shape))


def test_a_row_is_cut_alike_alone_and_among_others():
    logprobs, limits = random_rows(5, size=70), random_limits(5)
    order = np.random.default_rng(6).permutation(ROWS)
    others = found(logprobs[order], {name: values[order] for name, values in limits.items()})
    together = found(logprobs, limits)
    np.testing.assert_array_equal(together[order], others)
    for row in range(8):
        alone = found(logprobs[row : row + 1], {name: values[row : row + 1] for name, values in limits.items()})
        np.testing.assert_array_equal(together[row], alone[0])


def test_masses_are_probabilities_to_half_a_unit_and_rounding():
    """So top-p is wrong by no more than what rounding the probabilities of a whole vocabulary amounts to."""
    logprobs = random_rows(8, size=2000, num_rows=200)
    logprobs = logprobs[np.isfinite(logprobs).all(1)]
    limits = random_limits(8, len(logprobs), top_k=0, min_p=0.0)
    kept = found(logprobs, limits)
    probs = np.exp(logprobs.astype(np.float64))
    probs /= probs.sum(1, keepdims=True)
    slack = 2000 / MASS_OF_ONE + 3e-7
    mass = np.where(kept, probs, 0).sum(1)
    least = np.where(kept, probs, np.inf).min(1)
    limited = limits["top_p"] < 1
    assert (mass >= limits["top_p"] - slack)[limited].all(), "enough is kept"
    assert (mass - least <= limits["top_p"] + slack)[limited].all(), "and no more than that"


def test_nothing_of_the_vocabulary_is_sorted_or_scattered():
    limits = random_limits(0, 4)
    text = str(jax.make_jaxpr(on_parts(64, 4))(random_rows(0, size=64, num_rows=4), limits))
    assert not any(f" {name}" in text for name in ("sort", "scatter", "cumsum", "gather", "all_to_all", "top_k["))
    assert "while" in text
