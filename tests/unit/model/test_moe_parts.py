"""Biased and grouped routers, expert biases, shared experts: a mesh computes what one device does, and each shows."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rayserve_moe.balancing.placement import ExpertPlacement, identity_placement
from rayserve_moe.config.settings import ExpertSettings, SettingsError
from rayserve_moe.execution.weights.placing import model_config, parameter_tree
from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.experts.slot_mapping import placement_arrays
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.spec import ExpertSpec, ModelSpec, UnsupportedModelError
from rayserve_moe.model.transformer import forward, logits_of
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.parallel.sharding import VOCABULARY_AXES
from tests.support.experts.moe_layer import shuffled
from tests.support.models.attention_specs import with_attention
from tests.support.models.core import CORE_CONFIG

NUM_TOKENS, PAGE = 8, 4
ROUTER = RouterSpec(
    num_experts=8,
    top_k=3,
    renormalize=True,
    score="sigmoid",
    logit_bias=True,
    scale=2.5,
    selection_bias=True,
    num_groups=4,
    groups_kept=2,
    group_score="top2_sum",
    own_norm=True,
    expert_factors=True,
)
EXPERTS = ExpertSpec(
    16, bias=True, activation="clamped_swiglu", shared="sigmoid_gated", shared_size=24, separate_norms=True
)


def spec_with(**changes: object) -> ModelSpec:
    """A model with all of it, but for `changes` to its router and its experts."""
    router = {name: value for name, value in changes.items() if hasattr(ROUTER, name)}
    experts = {name: value for name, value in changes.items() if hasattr(EXPERTS, name)}
    plain = spec_from_hf(CORE_CONFIG.hf_config("float32") | {"dtype": "float32"})
    return replace(plain, router=replace(ROUTER, **router), experts=replace(EXPERTS, **experts))


def drawn(name: str, param: ParamSpec, placement: ExpertPlacement) -> np.ndarray:
    """A parameter from its name alone, large enough to show; experts in the slots of the placement."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    num_slots = param.shape[1] if param.num_experts else 0
    shape = (param.shape[0], param.num_experts, *param.shape[2:]) if num_slots else param.shape
    values = generator.standard_normal(shape) * (shape[-2] ** -0.5 if len(shape) > 2 else 0.5)
    values = values + (param.initial == "ones")
    values = values[np.arange(shape[0])[:, None], placement.expert_of_slot] if num_slots else values
    return values.astype(param.dtype)


@cache
def outputs(spec: ModelSpec, mesh: tuple[int, int] = (1, 1), backend: str = "auto", num_redundant: int = 0):
    """Logits [2, T, V] of two prompts and their routing [M, 2 * T, K]; with redundant slots experts lie anywhere."""
    plan = plan_for(jax.devices()[: mesh[0] * mesh[1]], data_size=mesh[0])
    config = model_config(spec, plan, experts=ExpertSettings(backend, num_redundant=num_redundant))
    placement = identity_placement(2, 8, ep_size=plan.num_expert_ranks, num_redundant=num_redundant)
    placement = shuffled(placement, 1) if num_redundant else placement
    tree = parameter_tree(config, dtype="float32")
    params = {g: {n: drawn(n, param, placement) for n, param in of.items()} for g, of in tree.items()}
    parts = {g: {n: plan.partition(param.axes) for n, param in of.items()} for g, of in tree.items()}
    maps = placement_arrays(placement) if num_redundant else None

    def on_device(params, ids_PT):
        per_rank, page_rows = len(ids_PT), 1 + np.arange(2 * len(ids_PT)).reshape(-1, 2)
        positions = np.tile(np.arange(NUM_TOKENS), per_rank)
        slots = (page_rows * PAGE)[:, :, None] + np.arange(PAGE)
        arrays = ids_PT.reshape(-1), positions, slots.reshape(-1), page_rows
        batch = TokenBatch(*(jnp.asarray(array, jnp.int32) for array in arrays), num_singles=0)
        heads = CORE_CONFIG.num_key_value_heads // mesh[1]
        pool = jnp.zeros((3 * (1 + 2 * per_rank), PAGE, heads, 2 * CORE_CONFIG.head_dim))
        out = forward(params, {"kv": (pool,)}, batch, config=config, maps=maps)
        logits = logits_of(params, out.hidden_TD, config=config)
        return logits.reshape(2, NUM_TOKENS, -1), out.topk_ids_MTK

    whole = jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(parts, PartitionSpec("data")),
        out_specs=(PartitionSpec(None, None, VOCABULARY_AXES), PartitionSpec(None, "data")),
        check_vma=False,
    )
    ids = np.random.default_rng(1).integers(0, CORE_CONFIG.vocab_size, (2, NUM_TOKENS))
    logits, topk_ids = jax.jit(whole)(params, ids)
    return np.asarray(logits)[..., : CORE_CONFIG.vocab_size], np.asarray(topk_ids)


@pytest.mark.parametrize(
    ("backend", "shared"),
    [("replicated", "sigmoid_gated"), pytest.param("all_to_all", "plain", marks=pytest.mark.slow)],
)
def test_four_devices_compute_what_one_does(backend, shared):
    """With experts anywhere, some of them twice."""
    spec = spec_with(shared=shared)
    (alone, alone_ids), (found, ids) = outputs(spec), outputs(spec, (2, 2), backend, 4)
    np.testing.assert_array_equal(ids, alone_ids)
    np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5 * np.abs(alone).max())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "change",
    [
        {"selection_bias": False},
        {"activation": "silu"},
        {"shared": "plain"},
        {"own_norm": False},
        {"expert_factors": False},
        {"separate_norms": False},
        *(
            pytest.param(change, marks=pytest.mark.slow)
            for change in (
                {"activation": "gelu_tanh"},
                {"gate_slope": 0.4},
                {"gate_limit": 0.1},
                {"score": "softmax"},
                {"logit_bias": False},
                {"groups_kept": 3},
                {"group_score": "max"},
                {"scale": 1.0, "separate_norms": False},
                {"renormalize": False, "separate_norms": False},
                {"bias": False},
                {"shared": "none"},
            )
        ),
    ],
    ids=str,
)
def test_every_part_moves_the_logits(change):
    """Factors of the expert sum are tested without a norm of the sum, which would cancel them."""
    own = {"separate_norms": False} if len(change) > 1 else {}
    before, after = outputs(spec_with(**own))[0], outputs(spec_with(**change))[0]
    assert np.abs(before - after).max() > 1e-4


def test_a_shared_expert_that_does_not_divide_is_refused():
    plan = plan_for(jax.devices()[:4], data_size=1)
    wide = with_attention(spec_with(shared_size=30), num_heads=8)
    with pytest.raises(SettingsError, match=r"shared_expert_intermediate_size .* 30 does not divide over 4"):
        model_config(wide, plan, experts=ExpertSettings())


def test_groups_that_cannot_be_are_refused():
    with pytest.raises(UnsupportedModelError, match="qwen3_moe: 2 of 3 groups of 8 experts cannot be kept"):
        spec_with(num_groups=3)


@pytest.mark.parametrize(
    ("layout", "gate", "bias", "down"),
    [
        ("per_expert", (2, 8, (16, 32)), (2, 8, (16,)), (32, 16)),
        ("stacked", (2, 0, (8, 16, 32)), (2, 0, (8, 16)), (8, 32, 16)),
        ("fused_out_in", (2, 0, (8, 32, 32)), (2, 0, (8, 32)), (8, 32, 16)),
        ("fused_in_out_interleaved", (2, 0, (8, 32, 32)), (2, 0, (8, 32)), (8, 16, 32)),
    ],
)
def test_files_hold_experts_and_their_biases_in_the_layout_of_the_family(layout, gate, bias, down):
    specs = parameter_specs(spec_with(layout=layout), dtype="bfloat16")["experts"]
    for name, (num_layers, num_experts, shape) in {"gate_MPDF": gate, "up_bias_MPF": bias}.items():
        stack = (num_layers, num_experts) if num_experts else (num_layers,)
        assert (specs[name].file_stack, specs[name].file_shape) == (stack, shape)
    assert specs["down_MPFD"].file_shape == down
    columns = {"per_expert": [0, 1], "stacked": [0, 1], "fused_out_in": [16, 17], "fused_in_out_interleaved": [1, 3]}[
        layout
    ]
    for name in ("up_MPDF", "up_bias_MPF"):
        np.testing.assert_array_equal(specs[name].columns_in_file(0, 2), columns)


def test_router_biases_stay_float32_and_may_lie_in_a_row():
    specs = parameter_specs(spec_with(selection_bias_in_row=True), dtype="bfloat16")["experts"]
    assert {specs[name].dtype for name in ("router_MDE", "router_bias_ME", "selection_bias_ME")} == {"float32"}
    assert specs["selection_bias_ME"].file_shape == (1, 8) and specs["router_bias_ME"].file_shape == (8,)
