"""Other weights come to lie as those that serve, whether they wait on the devices or in host memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.checkpoints.synthetic import SyntheticModel, write_checkpoint
from rayserve_moe.config.settings import (
    CacheSettings,
    CompileSettings,
    ExpertSettings,
    ModelSettings,
    ReplaySettings,
    SchedulerSettings,
    SpeculationSettings,
    UpdateSettings,
)
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.served_model import RunnerSettings
from rayserve_moe.execution.weights.placing import load_weights, parameter_tree, read_parameters
from rayserve_moe.model import families
from rayserve_moe.model.family_table import FAMILIES
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.requests.records import WeightsRefusedError
from tests.support.checkpoints.broken_checkpoints import WAYS, broken_copy
from tests.support.checkpoints.fused_experts import LAYOUTS, fused, fused_family
from tests.support.experts.placements import random_placement
from tests.support.models.core import CORE_CONFIG
from tests.support.models.families import FAMILY_CASES, write_family

PLENTY, NOTHING = 1 << 60, 0


def loaded(
    path: Path,
    *,
    mesh: tuple[int, int] = (1, 1),
    weight_roots: tuple[str, ...] = (),
    dtype: str = "auto",
    drafts_by: str = "off",
    compiling: CompileSettings | None = None,
    **experts: Any,
) -> HostRunner:
    """A runner with weights and nothing compiled."""
    settings = RunnerSettings(
        ModelSettings(path=str(path), dtype=dtype),
        SchedulerSettings(max_running_requests=2),
        CacheSettings(num_pages=16),
        ReplaySettings(),
        ExpertSettings(**experts),
        compile=compiling or CompileSettings(),
        speculation=SpeculationSettings(algorithm=drafts_by),
        updates=UpdateSettings(weight_roots=weight_roots),
    )
    runner = HostRunner(settings, plan_for(jax.devices()[: mesh[0] * mesh[1]], data_size=mesh[0]))
    runner.load()
    return runner


def assert_weights(runner: HostRunner, path: Path, placement: ExpertPlacement) -> None:
    """Bit for bit, and on the same devices, what loading the checkpoint brings."""
    fresh = loaded(path, mesh=(runner.config.plan.data_size, runner.config.plan.tensor_size))
    wanted = load_weights(fresh._files, runner.config, dtype=runner.served.dtype, placement=placement)
    for held, expected in zip(*(jax.tree.leaves(weights.params) for weights in (runner.weights, wanted)), strict=True):
        assert (held.shape, held.dtype, held.sharding) == (expected.shape, expected.dtype, expected.sharding)
        np.testing.assert_array_equal(np.asarray(held), np.asarray(expected))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spare", [PLENTY, NOTHING])
@pytest.mark.parametrize(("mesh", "num_redundant"), [((1, 1), 0), ((2, 2), 4)])
def test_staged_weights_lie_as_loaded_ones(core_checkpoint, other_checkpoint, mesh, num_redundant, spare):
    runner = loaded(core_checkpoint, mesh=mesh, num_redundant=num_redundant)
    before = jax.tree.leaves(runner.weights.params)
    placement = random_placement(runner.placement, seed=1) if num_redundant else runner.placement
    maps = runner.weights.maps
    runner.staged.read(str(other_checkpoint), placement.expert_of_slot, spare=spare)
    assert_weights(runner, core_checkpoint, runner.placement)
    runner.weights = runner.staged.take(runner.weights)
    assert_weights(runner, other_checkpoint, placement)
    assert runner.weights.maps is maps
    assert all(array.is_deleted() for array in before) == (spare == NOTHING), "both are never on a full device"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_in_one_tensor_are_staged_into_the_slots_of_a_placement(
    core_checkpoint, other_checkpoint, tmp_path, monkeypatch, layout
):
    """And lie as those of a checkpoint with a tensor per expert do."""
    monkeypatch.setitem(FAMILIES, layout, fused_family(layout))
    served, other = (fused(path, tmp_path / path.name, layout) for path in (core_checkpoint, other_checkpoint))
    runner = loaded(served, mesh=(2, 2), num_redundant=4)
    placement = random_placement(runner.placement, seed=1)
    runner.staged.read(str(other), placement.expert_of_slot)
    runner.weights = runner.staged.take(runner.weights)
    plain = loaded(other_checkpoint, mesh=(2, 2), num_redundant=4)
    wanted = load_weights(plain._files, plain.config, dtype=runner.served.dtype, placement=placement)
    jax.tree.map(np.testing.assert_array_equal, runner.weights.params, wanted.params)
    with pytest.raises(WeightsRefusedError, match="experts differ"):
        runner.staged.read(str(other_checkpoint))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_in_one_tensor_are_padded_with_zeros(core_checkpoint, tmp_path, monkeypatch, layout):
    monkeypatch.setitem(FAMILIES, layout, fused_family(layout))
    runner = loaded(fused(core_checkpoint, tmp_path / "model", layout))
    tree = parameter_tree(runner.config, dtype=runner.served.dtype)
    tree["experts"] = {name: spec.padded("expert_inner", 100) for name, spec in tree["experts"].items()}
    slots, plan = runner.placement.expert_of_slot, runner.config.plan
    held = read_parameters(runner._files, tree, plan=plan, expert_of_slot=slots)
    for name, array in runner.weights.params["experts"].items():
        found = held["experts"][name]
        padding = [(0, ours - theirs) for ours, theirs in zip(found.shape, array.shape, strict=True)]
        np.testing.assert_array_equal(np.asarray(found), np.pad(np.asarray(array), padding), err_msg=name)
    assert held["experts"]["down_MPFD"].shape[2] == 100


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", [case for case in FAMILY_CASES if not case.variant], ids=lambda case: case.name)
def test_weights_of_every_family_are_staged_into_the_slots_of_a_placement(tmp_path, case):
    config = {**case.config, "architectures": [getattr(families, case.family).ARCHITECTURE], "vocab_size": 264}
    first, second = (
        write_checkpoint(tmp_path / str(seed), SyntheticModel(config), seed=seed, dtype="float32") for seed in (1, 2)
    )
    runner = loaded(first, mesh=(2, 2), num_redundant=4)
    placement = random_placement(runner.placement, seed=1)
    runner.staged.read(str(second), placement.expert_of_slot)
    runner.weights = runner.staged.take(runner.weights)
    assert_weights(runner, second, placement)
    held = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(runner.weights.params))
    assert runner.staged.bytes_per_device == held


def test_a_kind_of_attention_that_differs_is_named(tmp_path):
    """Also if a later kind has the served value of the same knob."""
    case = next(case for case in FAMILY_CASES if case.name == "laguna-0")
    served = write_family(case, tmp_path / "served", seed=1)
    ropes = case.config["rope_parameters"]
    other = {**ropes, "full_attention": {**ropes["full_attention"], "rope_theta": 7.0}}
    with pytest.raises(WeightsRefusedError, match=r"of another model: gqa\.rope differ$"):
        loaded(served).staged.read(str(write_family(case, tmp_path / "other", seed=1, rope_parameters=other)))


def test_the_capacity_of_slots_is_none_of_the_weights(core_checkpoint, other_checkpoint):
    runner = loaded(core_checkpoint, selection="balanced", capacity_factor=1.5)
    runner.staged.read(str(other_checkpoint))
    runner.weights = runner.staged.take(runner.weights)
    assert float(runner.weights.capacity_factor) == 1.5


def test_the_weights_of_a_device_are_weighed(core_checkpoint):
    for mesh in ((1, 1), (2, 2)):
        runner = loaded(core_checkpoint, mesh=mesh)
        held = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(runner.weights.params))
        assert runner.staged.bytes_per_device == held


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_that_does_not_fit_is_refused_and_what_was_staged_is_gone(
    core_checkpoint, other_checkpoint, tmp_path, way
):
    runner = loaded(core_checkpoint)
    runner.staged.read(str(other_checkpoint))
    place = tmp_path / "pla\tce"
    broken_copy(core_checkpoint, way, place)
    with pytest.raises(WeightsRefusedError) as refusal:
        runner.staged.read(str(place))
    assert WAYS[way][1] in str(refusal.value)
    assert "pla" not in str(refusal.value) and str(tmp_path) not in str(refusal.value)
    with pytest.raises(AssertionError, match="nothing is staged"):
        runner.staged.take(runner.weights)
    assert_weights(runner, core_checkpoint, runner.placement)


def test_weights_outside_of_the_roots_are_refused(core_checkpoint, other_checkpoint):
    runner = loaded(core_checkpoint, weight_roots=(str(other_checkpoint.parent),))
    runner.staged.read(str(other_checkpoint))
    with pytest.raises(WeightsRefusedError, match=r"^the checkpoint: lies outside of weight_roots$"):
        runner.staged.read(str(core_checkpoint))


def test_a_fault_that_nobody_thought_of_is_a_refusal(core_checkpoint, other_checkpoint, monkeypatch):
    """Whatever reading runs into."""
    runner = loaded(core_checkpoint)
    for fault in (OverflowError("much"), RecursionError(), MemoryError(), AssertionError(), OSError(5, "broken")):

        def fail(*_: object, fault: Exception = fault) -> int:
            raise fault

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(WeightsRefusedError):
            runner.staged.read(str(other_checkpoint))
    monkeypatch.undo()
    runner.staged.read(str(other_checkpoint))


def test_a_file_that_cannot_be_read_is_not_named(core_checkpoint, tmp_path):
    with pytest.raises(WeightsRefusedError) as refusal:
        loaded(core_checkpoint).staged.read(str(tmp_path / ("long\t" * 80)))
    assert "long" not in str(refusal.value).replace("too long", "")


def test_weights_of_another_dtype_are_converted(core_checkpoint, tmp_path):
    other = write_checkpoint(tmp_path / "half", CORE_CONFIG, seed=4, dtype="bfloat16")
    runner = loaded(core_checkpoint)
    runner.staged.read(str(other))
    runner.weights = runner.staged.take(runner.weights)
    assert {array.dtype for array in jax.tree.leaves(runner.weights.params)} == {np.dtype(np.float32)}
    assert_weights(runner, other, runner.placement)
