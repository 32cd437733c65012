"""A model with latent attention: its parameters, its cache, and the kernels that have its attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from rayserve_moe.config.settings import CompileSettings, ExpertSettings, ModelSettings
from rayserve_moe.execution.memory import page_bytes
from rayserve_moe.execution.native_kernels import choose_kernels
from rayserve_moe.execution.step.device_state import allocate, state_shapes
from rayserve_moe.execution.weights.placing import model_config
from rayserve_moe.kernels.table import CPU, CPU_NATIVE, LATENT_ATTENTION, TPU
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.layers.latent import LatentAttention
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.spec import LayerSpec, ModelSpec, RopeSpec, UnsupportedModelError
from rayserve_moe.model.states import states_of
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.parallel.sharding import MESH_AXES_OF
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.core import CORE_CONFIG

ATTENTION = LatentAttention(
    num_heads=4, q_lora_rank=20, kv_lora_rank=16, nope_dim=8, rope_dim=4, value_dim=10, rope=RopeSpec(1e4)
)


def spec_with(**changes: Any) -> ModelSpec:
    spec = spec_from_hf(CORE_CONFIG.hf_config("float32"))
    layers = tuple(replace(layer, mixer="mla") for layer in spec.layers)
    return replace(spec, layers=layers, mixers=(replace(ATTENTION, **changes),))


def parameters_with(*, tensor_size: int = 1, **changes: Any) -> dict[str, ParamSpec]:
    return parameter_specs(spec_with(**changes), dtype="float32", tensor_size=tensor_size)["mla"]


def test_keys_and_values_of_a_head_stand_next_to_each_other_in_one_tensor_of_the_file():
    found = parameters_with()
    keys, values = found["k_b_LHC"], found["v_b_LHC"]
    assert keys.role == values.role == "kv_b" and keys.file_shape == values.file_shape == (4 * 18, 16)
    of_heads = np.arange(4 * 18).reshape(4, 18)
    np.testing.assert_array_equal(keys.columns_in_file(0, 32), of_heads[:, :8].ravel())
    np.testing.assert_array_equal(values.columns_in_file(0, 40), of_heads[:, 8:].ravel())


def test_queries_have_a_latent_of_their_own_or_come_from_the_hidden_state():
    of_latent, direct = parameters_with(bias=True), parameters_with(bias=True, q_lora_rank=None)
    assert of_latent["q_a_LDR"].file_shape == (20, 32) and of_latent["q_b_LRH"].file_shape == (48, 20)
    assert direct["q_LDH"].file_shape == (48, 32)
    only = {"q_a_LDR", "q_a_norm_LR", "q_a_bias_LR", "q_b_LRH"}
    assert of_latent.keys() - direct.keys() == only and direct.keys() - of_latent.keys() == {"q_LDH"}
    assert {"kv_a_bias_LC", "o_bias_LD"} & parameters_with(output_bias=True).keys() == {"o_bias_LD"}


def test_latents_are_whole_on_every_device_and_heads_are_spread():
    found = parameters_with(tensor_size=2, bias=True, output_bias=True)
    assert found == parameters_with(bias=True, output_bias=True), "nothing is repeated"
    spread = {name for name, p in found.items() if any(MESH_AXES_OF[axis] for axis in p.axes)}
    assert spread == {"q_b_LRH", "k_b_LHC", "v_b_LHC", "o_LHD"}
    assert all(len(p.axes) == len(p.shape) for p in found.values())


@pytest.mark.parametrize(("data_size", "tensor_size"), [(1, 1), (1, 4), (2, 2)])
def test_a_token_takes_one_latent_and_one_rotated_key_on_each_device(data_size, tensor_size):
    plan, spec = plan_for(jax.devices()[: data_size * tensor_size], data_size=data_size), spec_with()
    config = model_config(spec, plan, experts=ExpertSettings())
    of_page = page_bytes(states_of(config), page_size=16, dtype="bfloat16", plan=plan)
    assert of_page == spec.num_layers * 16 * (16 + 4) * 2
    state = allocate(state_shapes(config, num_pages=3, page_size=16, dtype="bfloat16", num_rows=2, pages_per_row=2))
    (pool,) = state.pools["latent_kv"]
    assert pool.shape == (data_size * spec.num_layers * 3, 16, 1, 20)
    assert {shard.data.nbytes for shard in pool.addressable_shards} == {3 * of_page}


def test_every_table_has_latent_attention_and_one_without_refuses_it_by_name():
    plan = plan_for(jax.devices()[:1])
    with pytest.raises(UnsupportedModelError, match="qwen3_moe: the other kernels have no multi-head latent attention"):
        model_config(spec_with(), plan, experts=ExpertSettings(), kernels=replace(CPU, name="other"))
    for kernels in (CPU, CPU_NATIVE, TPU):
        config = model_config(spec_with(), plan, experts=ExpertSettings(), kernels=kernels)
        found, (state,) = config.kernels, states_of(config)
        assert found.name == kernels.name and found.attention is LATENT_ATTENTION[kernels.name][0].run
        assert state.kind.entry[0].shape == ((128,) if kernels is TPU else (1, 20)), "whole registers of a TPU"


def test_native_kernels_have_it():
    need_native_kernels()
    model, plan = ModelSettings(dtype="bfloat16"), plan_for(jax.devices()[:1])
    for wanted in ("auto", "native"):
        compiling = CompileSettings(cpu_kernels=wanted)
        assert choose_kernels(spec_with(), plan, model=model, compiling=compiling) is CPU_NATIVE


def test_windows_are_refused():
    layers = (LayerSpec("mla", "moe", window=8), LayerSpec("mla", "moe"))
    with pytest.raises(UnsupportedModelError, match="a window of 8 is not computed by mla"):
        replace(spec_with(), layers=layers)
