"""How a model is spread over devices does not show: each data rank gets what one device computes of its batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError, identity_placement, placement_from
from rayserve_moe.checkpoints.files import CheckpointFiles, open_checkpoint
from rayserve_moe.checkpoints.loader import WeightSource, load_parameters
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.slot_mapping import placement_arrays
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.table import CPU
from rayserve_moe.model.families.qwen3_moe import CHECKPOINT_RULES
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.states import PoolCounts, pool_partitions, pool_shapes
from rayserve_moe.model.transformer import ModelConfig, forward, logits_of
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.parallel.sharding import VOCABULARY_AXES, ParallelPlan
from tests.support.experts.placements import SIZES, Spread
from tests.support.models.core import CORE_CONFIG

# A vocabulary that no number of devices divides, and heads for eight of them.
CONFIG = replace(CORE_CONFIG, vocab_size=509, num_attention_heads=8)
NUM_LAYERS, NUM_MOE_LAYERS, NUM_EXPERTS = 3, 2, 8
NUM_SINGLES, NUM_BLOCKS, BLOCK, PAGE, PAGES_PER_ROW = 2, 2, 8, 4, 3
NUM_TOKENS = NUM_SINGLES + NUM_BLOCKS * BLOCK
NUM_PAGES = 1 + (NUM_SINGLES + NUM_BLOCKS) * PAGES_PER_ROW


class RankResult(NamedTuple):
    """What one step brings to one data rank: logits of all tokens, routing, counts, and its pool."""

    logits_TV: np.ndarray
    ids_MTK: np.ndarray
    counts_ME: np.ndarray
    kv_pages: np.ndarray


def placement_of(spread: Spread) -> ExpertPlacement:
    sizes = {"ep_size": spread.num_devices, "num_redundant": spread.num_redundant}
    return shuffled_placement(**sizes) if spread.shuffled else identity_placement(NUM_MOE_LAYERS, NUM_EXPERTS, **sizes)


def shuffled_placement(ep_size: int, num_redundant: int) -> ExpertPlacement:
    """Experts in any order, any of them with replicas: the first drawing that is a placement."""
    generator = np.random.default_rng([ep_size, num_redundant])
    extra = np.zeros((NUM_MOE_LAYERS, num_redundant), int)
    while True:
        extra = generator.integers(0, NUM_EXPERTS, extra.shape)
        everyone = np.broadcast_to(np.arange(NUM_EXPERTS), (NUM_MOE_LAYERS, NUM_EXPERTS))
        drawn = generator.permuted(np.concatenate([everyone, extra], axis=1), axis=1)
        try:
            return placement_from(drawn, None, num_experts=NUM_EXPERTS, ep_size=ep_size)
        except PlacementError:
            continue


class Model:
    """The model of one checkpoint, laid out in one way and compiled for one shape."""

    def __init__(self, files: CheckpointFiles, spread: Spread) -> None:
        spec = spec_from_config(files.config)
        self.plan = plan = plan_for(jax.devices()[: spread.num_devices], data_size=spread.data)
        self.config = ModelConfig(spec, ExpertConfig(spec.router, CPU, plan, spread.num_redundant, spread.backend))
        tree = parameter_specs(
            spec,
            dtype="float32",
            tensor_size=plan.tensor_size,
            num_devices=spread.num_devices,
            num_redundant=spread.num_redundant,
        )
        self.params = load_parameters(
            WeightSource(files, CHECKPOINT_RULES, placement_of(spread).expert_of_slot),
            tree,
            sharding_of=lambda param: plan.sharding(param.axes),
        )
        plain = spread.num_redundant == 0 and not spread.shuffled
        self._maps = None if plain else placement_arrays(placement_of(spread))
        pools = pool_shapes(self.config, PoolCounts(NUM_PAGES), page_size=PAGE, dtype="float32")
        self.empty_pools = jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype, device=of.sharding), pools)
        self._step = compiled(self.config, {
            group: {name: plan.partition(param.axes) for name, param in params.items()}
            for group, params in tree.items()
        })  # fmt: skip

    def run(self, *steps: list[TokenBatch]) -> list[list[RankResult]]:
        """Run steps one after the other, each a batch for every data rank; results by step and rank."""
        pools, results = self.empty_pools, []
        for batches in steps:
            joined = jax.tree.map(lambda *arrays: np.concatenate(arrays), *batches)
            logits_WV, *found, pools = self._step(self.params, pools, joined, self._maps)
            arrays = zip(
                (logits_WV[:, : CONFIG.vocab_size], *found, *jax.tree.leaves(pools)), (0, 1, 0, 0), strict=True
            )
            parts = [np.split(np.asarray(array), len(batches), dim) for array, dim in arrays]
            results.append([RankResult(*of_rank) for of_rank in zip(*parts, strict=True)])
        return results


def compiled(config: ModelConfig, parameter_parts: dict) -> Callable:
    """The step over the whole mesh: forward, then logits of every token."""

    def on_device(params, pools, batch, maps):
        out = forward(params, pools, batch, config=config, maps=maps)
        logits_WV = logits_of(params, out.hidden_TD, config=config)
        return logits_WV, out.topk_ids_MTK, out.expert_counts_ME, out.pools

    by_rank, pools = PartitionSpec("data"), pool_partitions(config)
    batch = TokenBatch(*[by_rank] * 4, num_singles=NUM_SINGLES)
    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=config.plan.mesh,
            in_specs=(parameter_parts, pools, batch, PartitionSpec()),
            out_specs=(PartitionSpec(None, VOCABULARY_AXES), PartitionSpec(None, "data"), by_rank, pools),
            check_vma=False,
        )
    )


def first_step(seed: int) -> TokenBatch:
    """Two prompts, one of them shorter than its block, and no single tokens."""
    generator = np.random.default_rng([1, seed])
    lengths = BLOCK, int(generator.integers(1, BLOCK))
    return batch_of(seed, single_positions=(-1, -1), block_lengths=lengths, block_rows=(0, 1))


def second_step(seed: int) -> TokenBatch:
    """The next token of both, and another prompt."""
    second = first_step(seed).positions_T[NUM_SINGLES + BLOCK :].max() + 1
    return batch_of(seed + 100, single_positions=(BLOCK, second), block_lengths=(5, 0), block_rows=(2, 3))


def idle_step() -> TokenBatch:
    """Nothing but padding."""
    return batch_of(0, single_positions=(-1, -1), block_lengths=(0, 0), block_rows=(0, 0))


def batch_of(
    seed: int, *, single_positions: tuple[int, ...], block_lengths: tuple[int, ...], block_rows: tuple[int, ...]
) -> TokenBatch:
    offsets = np.arange(BLOCK)
    blocks = [np.where(offsets < length, offsets, -1) for length in block_lengths]
    positions = np.concatenate([single_positions, *blocks]).astype(np.int32)
    rows = np.array([*range(NUM_SINGLES), *block_rows])
    pages = 1 + rows[:, None] * PAGES_PER_ROW + np.arange(PAGES_PER_ROW)
    page_table = pages.astype(np.int32)
    block_of_token = np.array([*range(NUM_SINGLES), *np.repeat(NUM_SINGLES + np.arange(NUM_BLOCKS), BLOCK)])
    slots = page_table[block_of_token, positions // PAGE] * PAGE + positions % PAGE
    ids = np.random.default_rng([2, seed]).integers(0, CONFIG.vocab_size, NUM_TOKENS)
    is_real = positions >= 0
    arrays = np.where(is_real, ids, 0).astype(np.int32), positions, np.where(is_real, slots, 0).astype(np.int32)
    return TokenBatch(*arrays, page_table, num_singles=NUM_SINGLES)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Callable[[Spread], Model]:
    path: Path = write_checkpoint(tmp_path_factory.mktemp("spread") / "model", CONFIG, seed=5, dtype="float32")
    return cache(lambda spread: Model(open_checkpoint(path), spread))


@pytest.fixture(scope="module")
def alone(model) -> Callable[[int], list[RankResult]]:
    """Both steps of one rank's batch on one device."""

    @cache
    def run(seed: int) -> list[RankResult]:
        steps = model(Spread(1, 1)).run([first_step(seed)], [second_step(seed)])
        return [of_step for (of_step,) in steps]

    return run


def assert_same(found: RankResult, expected: RankResult, batch: TokenBatch) -> None:
    """Logits to 1e-5, routing exactly, for tokens that are no padding; counts exactly."""
    is_real = batch.positions_T >= 0
    np.testing.assert_array_equal(found.ids_MTK[:, is_real], expected.ids_MTK[:, is_real])
    np.testing.assert_allclose(found.logits_TV[is_real], expected.logits_TV[is_real], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found.counts_ME, expected.counts_ME)


BACKENDS = ["replicated", "all_to_all", "fused"]
SAMPLE = [
    Spread(1, 8),
    Spread(2, 2, "all_to_all", num_redundant=4, shuffled=True),
    Spread(8, 1, "replicated", shuffled=True),
]
MATRIX = [
    Spread(*layout, backend, num_redundant, shuffled)
    for layout in SIZES
    for backend in BACKENDS
    for num_redundant, shuffled in ((0, False), (0, True), (layout[0] * layout[1], True))
]
RUNS = [*SAMPLE, *(pytest.param(spread, marks=pytest.mark.slow) for spread in MATRIX)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("spread", RUNS, ids=str)
def test_every_data_rank_gets_what_one_device_computes(model, alone, spread):
    seeds = range(spread.data)
    steps = [first_step(seed) for seed in seeds], [second_step(seed) for seed in seeds]
    results = model(spread).run(*steps)
    for step, (batches, by_rank) in enumerate(zip(steps, results, strict=True)):
        for seed, batch, found in zip(seeds, batches, by_rank, strict=True):
            assert found.logits_TV.shape == (NUM_TOKENS, CONFIG.vocab_size)
            assert_same(found, alone(seed)[step], batch)


@pytest.mark.parametrize(
    ("backend", "num_redundant"),
    [("all_to_all", 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("replicated", 0), ("fused", 4)))],
)
def test_data_ranks_do_not_influence_each_other(model, backend, num_redundant):
    """Whatever comes to rank 1: what rank 0 gets, and its pool, are the same to the last bit.

    Where tokens are gathered and experts have replicas, rank 1 has a say in which of them takes a token of rank 0, and
    partial sums then round otherwise: that is left to the tolerance of the law above.
    """
    spread = Spread(2, 2, backend, num_redundant, shuffled=True)
    (with_one,), (with_other,), (with_idle,) = (
        model(spread).run([first_step(0), other]) for other in (first_step(1), first_step(2), idle_step())
    )
    for found in (with_other, with_idle):
        for ours, theirs in zip(found[0], with_one[0], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert (with_other[1].logits_TV != with_one[1].logits_TV).any()


def test_an_idle_rank_counts_nothing_and_keeps_its_pool(model, alone):
    spread = Spread(2, 2, "all_to_all", num_redundant=4, shuffled=True)
    (_, (busy, idle)) = model(spread).run([first_step(0), first_step(1)], [second_step(0), idle_step()])
    assert_same(busy, alone(0)[1], second_step(0))
    assert not idle.counts_ME.any()
    ((_, before),) = model(spread).run([first_step(0), first_step(1)])
    by_layer = (NUM_LAYERS, NUM_PAGES, *before.kv_pages.shape[1:])
    np.testing.assert_array_equal(idle.kv_pages.reshape(by_layer)[:, 1:], before.kv_pages.reshape(by_layer)[:, 1:])


def test_counts_are_of_tokens_that_are_no_padding(model):
    spread = Spread(2, 2, "all_to_all", num_redundant=4, shuffled=True)
    batches = [first_step(0), first_step(1)]
    (by_rank,) = model(spread).run(batches)
    for batch, found in zip(batches, by_rank, strict=True):
        ids_MTK = found.ids_MTK[:, batch.positions_T >= 0]
        expected = [np.bincount(layer.reshape(-1), minlength=NUM_EXPERTS) for layer in ids_MTK]
        np.testing.assert_array_equal(found.counts_ME, expected)


def test_a_plan_says_which_rank_it_is_on():
    plan: ParallelPlan = plan_for(jax.devices()[:8], data_size=4)

    def ranks():
        return jnp.stack([plan.data_rank(), plan.tensor_rank(), plan.expert_rank()])[None]

    whole = PartitionSpec(("data", "tensor"))
    found = jax.jit(jax.shard_map(ranks, mesh=plan.mesh, in_specs=(), out_specs=whole, check_vma=False))()
    np.testing.assert_array_equal(found, [[i // 2, i % 2, i] for i in range(8)])
