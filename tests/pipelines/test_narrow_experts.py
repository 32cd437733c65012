"""Experts in 8 bits: as independent of scheduling, placements and updates as wider ones, and what they stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from rayserve_moe.balancing.migration import Migration
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.engine.eplb.steps import EplbSteps
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.model.layers.moe import slot_specs
from tests.support.engine.host_runners import TWO_SHAPES, WAY, card_of, loaded_runner, new_runner, prepared_runner
from tests.support.engine.outputs import Outcomes, assert_all_same, assert_identical
from tests.support.engine.run_requests import Way, run_alone, run_together
from tests.support.engine.workload import mixed_workload
from tests.support.experts.placements import random_placement
from tests.support.experts.quantized_experts import dequantized, stored_in_blocks

MOVING = {"enable_eplb": True, "num_redundant_experts": 4, "eplb_slots_per_step": 1}


FLOAT32 = pytest.mark.float32("what is compared is of float32")


def runner_with(path: Path, **settings) -> HostRunner:
    return prepared_runner(path, **TWO_SHAPES, enable_return_routed_experts=True, **settings)


FORMS = ["int8", *(pytest.param(form, marks=pytest.mark.slow) for form in ("fp8", "fp8 in blocks"))]
"""What `expert_dtype` is; in blocks: of a checkpoint whose experts are stored so."""


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(form: str, core_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    in_blocks = "blocks" in form
    return (
        stored_in_blocks(core_checkpoint, tmp_path_factory.mktemp("core") / "blocks") if in_blocks else core_checkpoint
    )


@pytest.fixture(scope="module")
def settings(form: str, kernel_settings: dict[str, str]) -> dict[str, str]:
    return {"expert_dtype": form.split()[0], **kernel_settings}


@pytest.fixture(scope="module")
def loaded(checkpoint: Path, settings: dict[str, str]) -> HostRunner:
    """A runner that has its weights, and no program yet."""
    return loaded_runner(checkpoint, **TWO_SHAPES, enable_return_routed_experts=True, **settings)


@pytest.fixture(scope="module")
def narrow(loaded: HostRunner) -> HostRunner:
    loaded.prepare(TWO_SHAPES["num_pages"])
    return loaded


@pytest.fixture(scope="module")
def expected(narrow: HostRunner, checkpoint: Path) -> Outcomes:
    return run_alone(narrow, card_of(checkpoint), mixed_workload(), way=WAY)


def slot_arrays(runner: HostRunner) -> dict[str, np.ndarray]:
    config = runner.config
    names = slot_specs(config.spec, expert_dtype=config.experts.weight_dtype)
    assert sum("scale" in name for name in names) == 3
    return {name: np.asarray(runner.weights.params["experts"][name]) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("way", [Way(16, 32, 7), Way(3, 32, 32, caches_prefixes=False)], ids=str)
def test_outputs_do_not_depend_on_chunks_and_batches(way, narrow, expected, checkpoint):
    assert_all_same(run_together(narrow, card_of(checkpoint), mixed_workload(), way=way), expected)


@pytest.mark.slow
@FLOAT32
def test_they_are_an_unquantised_model_of_the_numbers_that_they_stand_for(
    form, narrow, expected, core_checkpoint, checkpoint, tmp_path
):
    """In float32 a product times its scale and a product with scaled numbers differ by rounding alone."""
    in_blocks = "blocks" in form
    plain = runner_with(checkpoint if in_blocks else dequantized(checkpoint, tmp_path / "model", form))
    of_plain = run_alone(plain, card_of(checkpoint), mixed_workload(), way=WAY)
    (assert_identical if in_blocks else assert_all_same)(of_plain, expected)
    rounded = runner_with(core_checkpoint)
    other = run_alone(rounded, card_of(core_checkpoint), mixed_workload(), way=WAY)
    assert any(other[key].logprobs != outcome.logprobs for key, outcome in expected.items()), "quantising shows"


@pytest.mark.slow
def test_blocks_have_the_bits_of_what_native_kernels_hold_in_bfloat16(form, narrow, expected, checkpoint, settings):
    if "blocks" not in form or narrow.config.kernels.name != "cpu_native":
        pytest.skip("blocks by native kernels alone")
    plain = runner_with(checkpoint, **{**settings, "expert_dtype": "auto"})
    assert_identical(run_alone(plain, card_of(checkpoint), mixed_workload(), way=WAY), expected)


@FLOAT32
def test_they_take_a_quarter_of_float32_and_the_pool_gets_the_rest(checkpoint, loaded):
    """Weights per device, as staging counts them, and what waits for a swap."""
    wide = new_runner(checkpoint, **TWO_SHAPES)
    arrays = slot_arrays(loaded)
    num_scales = sum(array.size for array in arrays.values() if array.dtype == np.float32)
    num_weights = sum(array.size for array in arrays.values() if array.dtype.itemsize == 1)
    freed = wide.staged.bytes_per_device - loaded.staged.bytes_per_device
    assert freed == 3 * num_weights - 4 * num_scales > 0
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.weights.params)) == loaded.staged.bytes_per_device


@pytest.mark.parametrize("spare", [1 << 60, 0])
def test_an_update_to_the_same_weights_leaves_every_bit(loaded, checkpoint, other_checkpoint, spare):
    """After one to others, which are quantised as those are that are served."""
    before = slot_arrays(loaded)
    for path, is_same in ((other_checkpoint, False), (checkpoint, True)):
        loaded.staged.read(str(path), spare=spare)
        loaded.weights = loaded.staged.take(loaded.weights)
        after = slot_arrays(loaded)
        assert all((after[name] == array).all() == is_same for name, array in before.items())
        assert {name: array.dtype for name, array in after.items()} == {k: v.dtype for k, v in before.items()}


@pytest.mark.parametrize(
    ("mesh", "backend"),
    [
        pytest.param((2, 2), "all_to_all", marks=pytest.mark.slow),
        *(
            pytest.param(mesh, backend, marks=pytest.mark.slow)
            for mesh in [(2, 2), (4, 1), (1, 4)]
            for backend in ("replicated", "fused")
        ),
    ],
)
def test_scales_move_with_their_slots_and_no_answer_changes(
    mesh, backend, narrow, expected, checkpoint, settings, kernel_settings
):
    """Over devices answers are those of one device; while experts move they are the same bits, but for those that ranks
    add up of partial sums (`experts.replicated`)."""
    moving = {"expert_backend": backend, **settings, **MOVING}
    runner = runner_with(checkpoint, mesh=mesh, **moving)
    card, by_expert = card_of(checkpoint), slot_arrays(narrow)
    before = run_together(runner, card, mixed_workload(), way=WAY)
    if not kernel_settings:  # float32: devices add up parts of sums
        assert_all_same(before, expected)
    migration = Migration(runner.placement, hosts=1, slots_per_step=1)
    migration.begin(random_placement(runner.placement, seed=3))
    eplb = EplbSteps(migration, counts_every=7)
    moved = run_together(runner, card, mixed_workload(), way=replace(WAY, eplb=eplb))
    if backend != "replicated":
        assert_identical(moved, before)
    elif not kernel_settings:
        assert_all_same(moved, before)
    while (piece := migration.next_piece()) is not None:
        runner.move_experts(piece)
    assert (migration.placement.expert_of_slot != runner.placement.expert_of_slot).any()
    layers = np.arange(migration.placement.num_layers)[:, None]
    for name, held in slot_arrays(runner).items():
        np.testing.assert_array_equal(held, by_expert[name][layers, migration.placement.expert_of_slot], name)


@FLOAT32
@pytest.mark.slow
def test_rows_in_8_bits_are_a_rounded_model_that_does_not_depend_on_the_batch(core_checkpoint, tmp_path):
    """Scales by column and by block move log-probs, by less than two nats a token."""
    for path in (core_checkpoint, stored_in_blocks(core_checkpoint, tmp_path / "blocks")):
        plain, rounded = (
            runner_with(path, expert_dtype="fp8", expert_products=products) for products in ("auto", "fp8")
        )
        alone, others = (run_alone(each, card_of(path), mixed_workload(), way=WAY) for each in (rounded, plain))
        together = run_together(rounded, card_of(path), mixed_workload(), way=Way(16, 32, 7))
        assert_all_same(together, alone)
        pairs = [(alone[key], other) for key, other in others.items() if other.logprobs]
        moved = [abs(one.logprobs[0] - other.logprobs[0]) for one, other in pairs if one.ids[0] == other.ids[0]]
        assert moved and 0 < max(moved) < 2


@FLOAT32
def test_products_of_8_bits_are_refused_where_they_are_not_computed(core_checkpoint):
    with pytest.raises(SettingsError, match="expert_products fp8 needs expert_dtype fp8, not int8"):
        new_runner(core_checkpoint, **TWO_SHAPES, expert_dtype="int8", expert_products="fp8")
    with pytest.raises(SettingsError, match=r"expert_products.*int8"):
        new_runner(core_checkpoint, **TWO_SHAPES, expert_dtype="fp8", expert_products="int8")


@FLOAT32
def test_settings_that_are_not_held_are_refused(core_checkpoint):
    with pytest.raises(SettingsError, match="expert_dtype bfloat16: the model is computed in float32"):
        new_runner(core_checkpoint, **TWO_SHAPES, expert_dtype="bfloat16")
    with pytest.raises(SettingsError, match=r"expert_dtype.*int4"):
        new_runner(core_checkpoint, **TWO_SHAPES, expert_dtype="int4")
