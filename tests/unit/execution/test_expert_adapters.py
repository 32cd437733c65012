"""Adapters of experts lie in the slots of their experts, after loads, moves, reloads and other weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from rayserve_moe.balancing.migration import Migration
from rayserve_moe.checkpoints.adapters.directory import adapter_body
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.weights.adapters import EXPERTS, AdapterPrograms, HostAdapters, put_adapter, put_layer
from rayserve_moe.execution.weights.migration import vectors_of
from rayserve_moe.experts.slot_mapping import placement_arrays
from rayserve_moe.kernels.adapters import AdapterPair
from tests.support.checkpoints.adapters import make_adapter_beside
from tests.support.engine.host_runners import loaded_runner
from tests.support.experts.placements import random_placement
from tests.support.models.core import CORE_CONFIG

MOVING = {"enable_eplb": True, "num_redundant_experts": 4, "eplb_slots_per_step": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("adapted") / "model", CORE_CONFIG, seed=0, dtype="float32")


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["each", "shared"])
def runner(checkpoint: Path, request: pytest.FixtureRequest) -> HostRunner:
    """Runner whose experts have all matrices of adapters, or share some."""
    beside = {"max_loras": 2, "max_lora_rank": 4, "lora_experts": True, "num_pages": 16}
    return loaded_runner(checkpoint, mesh=(2, 2), **MOVING, **beside, lora_shared_outer=request.param)


def held_adapters(runner: HostRunner, checkpoint: Path, directory: Path) -> HostAdapters:
    """Return the runner's adapters with three in host memory, in the layouts that it takes."""
    assert runner.adapters is not None
    runner.adapters.allocate(runner.weights.maps)
    others = ("shared_outer",) * 2 if runner.config.shares_outer else ("fused", "per_expert")
    for seed, layout in enumerate(("shared_outer", *others)):
        made = make_adapter_beside(checkpoint, seed=seed, experts=layout).write(directory / f"{seed}")
        runner.adapters.add(f"a{seed}", np.frombuffer(adapter_body(str(made)), np.uint8))
    return runner.adapters


def experts_of(adapters: HostAdapters) -> dict[str, AdapterPair]:
    """Return the stacks of experts in host memory, [layers, slots, resident, rank, ...], shared ones without slots."""
    return jax.tree.map(np.asarray, adapters.stacks[EXPERTS])


def test_adapters_lie_in_the_slots_of_their_experts(runner: HostRunner, checkpoint: Path, tmp_path: Path):
    adapters, config, first = held_adapters(runner, checkpoint, tmp_path), runner.config, runner.placement
    programs = AdapterPrograms(*(jax.jit(partial(put, config=config)) for put in (put_adapter, put_layer)))
    in_order = np.arange(first.num_layers)[:, None], np.argmax(first.expert_of_slot[:, :, None] == np.arange(8), axis=1)
    by_expert = {}
    for key in ("a0", "a1", "a2"):
        adapters.put([(0, key)], programs=programs)
        by_expert[key] = {
            name: AdapterPair(*(stack[:, 0] if stack.ndim == 4 else stack[:, :, 0][in_order] for stack in pair))
            for name, pair in experts_of(adapters).items()
        }
        assert all(stack.any() for pair in by_expert[key].values() for stack in pair)

    def assert_placed(expert_of_slot: np.ndarray, keys: tuple[str, str]) -> None:
        layers = np.arange(len(expert_of_slot))[:, None]
        for name, pair in experts_of(adapters).items():
            for part, stack in enumerate(pair):
                for slot, key in enumerate(keys):
                    wanted, is_shared = by_expert[key][name][part], stack.ndim == 4
                    wanted = wanted if is_shared else wanted[layers, expert_of_slot]
                    np.testing.assert_array_equal(stack[..., slot, :, :], wanted, err_msg=f"{name} {key}")

    adapters.put([(0, "a0"), (1, "a1")], programs=programs)
    assert_placed(first.expert_of_slot, ("a0", "a1"))
    migration, target = Migration(first, hosts=1, slots_per_step=2), random_placement(first, seed=4)
    migration.begin(target)
    swaps = [swap for piece in iter(migration.next_piece, None) if (swap := vectors_of(piece).swap) is not None]
    adapters.follow(swaps[0], programs=programs)
    adapters.put([(1, "a2")], programs=programs)  # an adapter that arrives between two swaps
    for swap in swaps[1:]:
        adapters.follow(swap, programs=programs)
    assert_placed(target.expert_of_slot, ("a0", "a2"))
    assert (target.expert_of_slot != first.expert_of_slot).any()
    adapters.replace_weights(placement_arrays(first), programs=programs)
    assert_placed(first.expert_of_slot, ("a0", "a2"))
    adapters.remove("a2")
    adapters.follow(np.full_like(swaps[0], -1), programs=programs)
    adapters.follow(swaps[0], programs=programs)
    assert adapters.stacks[EXPERTS]
