"""Every family reads what transformers writes for it, in either spelling of keys, and refuses what is not computed."""

from __future__ import annotations

import contextlib
import math
from dataclasses import fields, replace
from typing import Any

import pytest

from rayserve_moe.kernels.reference.activations import ACTIVATIONS
from rayserve_moe.kernels.reference.layers import SCORES
from rayserve_moe.model.draft_spec import prediction_spec
from rayserve_moe.model.family_table import FAMILIES, prediction_rules_of, rules_of, spec_from_config
from rayserve_moe.model.layers.attention import BlockIndex
from rayserve_moe.model.layers.kimi_delta import KimiDelta
from rayserve_moe.model.spec import ExpertSpec, ModelSpec, RopeSpec, RouterSpec, UnsupportedModelError
from tests.support.models.attention_specs import attention_of, latent_of, with_attention
from tests.support.models.families import FAMILY_CASES, FAMILY_CONFIGS, FamilyCase, config_of

TIED = ("ernie4_5_moe", "gemma4_text")
"""Families whose head is the embedding unless a config says otherwise."""


def spec_of(name: str, **changes: Any) -> ModelSpec:
    case = next(case for case in FAMILY_CASES if case.name == name)
    return spec_from_config(config_of(case, **changes))


def knob(spec: Any, path: str) -> Any:
    if path in ("windows", "dense"):
        windows = tuple(layer.window for layer in spec.layers) if spec.has_windows else ()
        return windows if path == "windows" else spec.layers_with_ffn("dense")
    if path == "indexed":
        return spec.layers_with_mixer("dsa")
    first, _, rest = path.partition(".")
    own = [mixer for mixer in spec.mixers if first in ("mixer", mixer.kind)]
    if own:
        (spec,), path = own, rest
    for part in path.split("."):
        spec = getattr(spec, part)
    return spec


def test_every_family_has_its_row():
    assert {module.__name__.rsplit(".", 1)[1] for module in FAMILIES.values()} == set(FAMILY_CONFIGS)


@pytest.mark.parametrize("case", FAMILY_CASES, ids=lambda case: case.name)
def test_sizes_are_those_of_the_config(case: FamilyCase):
    spec = spec_from_config(config_of(case))
    assert spec.family == case.family
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers) == (128, 64, case.config["num_hidden_layers"])
    assert spec.tie_embeddings == case.config.get("tie_word_embeddings", case.family in TIED)


KNOBS = {
    "qwen2_moe-0": {"mixer.bias": True, "mixer.output_bias": False, "experts.shared": "sigmoid_gated"},
    "qwen2_moe-1": {"dense": (0, 2), "mixer.bias": False},
    "qwen2_moe-2": {"windows": (12, 0, 12), "experts.shared_size": 32},
    "kimi_linear-0": {
        "dense": (0,),
        "mla.rope": None,
        "kimi_delta.rank": 16,
        "kimi_delta.gates.output": "sigmoid",
        "router.scale": 2.446,
        "experts.shared_size": 64,
    },
    "kimi_linear-1": {
        "kimi_delta.num_heads": 2,
        "kimi_delta.num_taps": 3,
        "mla.q_lora_rank": 20,
        "router.group_score": "top2_sum",
    },
    "kimi_linear-2": {"dense": (0, 2), "kimi_delta.head_dim": 8, "norm_eps": 1e-3, "mla.norm_eps": 1e-6},
    "bailing_hybrid-0": {
        "dense": (0,),
        "mla.rope.interleaved": True,
        "mla.output_gate": "sigmoid",
        "kimi_delta.gates.decay_floor": -0.5,
        "kimi_delta.gates.rounds_decays": True,
        "kimi_delta.rank": None,
    },
    "bailing_hybrid-1": {"dense": (), "kimi_delta.gates.decay_floor": 0.0, "mla.rope.yarn.factor": 4.0},
    "bailing_hybrid-2": {"dense": (1,), "kimi_delta.head_dim": 24, "kimi_delta.gates.decay_floor": -5.0},
    "mixtral-0": {"router.renormalize": True, "mixer.rope.theta": 1e6, "norm_eps": 1e-5, "windows": ()},
    "mixtral-1": {"windows": (12, 12, 12)},
    "mixtral-2": {"mixer.head_dim": 24},
    "olmoe-0": {"mixer.qk_norm": "full", "mixer.clip_qkv": 0.6, "router.renormalize": False},
    "deepseek_v2-0": {"router.num_groups": 4, "router.groups_kept": 2, "router.group_score": "max"},
    "deepseek_v2-1": {"mixer.q_lora_rank": None, "router.num_groups": 1, "dense": ()},
    "deepseek_v3-0": {"router.score": "sigmoid", "router.group_score": "top2_sum", "router.scale": 2.5},
    "deepseek_v3-1": {"mixer.q_lora_rank": None, "mixer.head_dim": 24},
    "deepseek_v3-2": {"mixer.rope.interleaved": False, "router.renormalize": False, "dense": (0, 1)},
    "glm4_moe-0": {"mixer.rope.rotary_dim": 8, "mixer.qk_norm": "head", "mixer.output_bias": False},
    "glm4_moe-1": {"mixer.qk_norm": "none", "experts.shared_size": 32},
    "glm4_moe_lite-1": {"dense": (1,), "router.scale": 1.8},
    "glm4_moe_lite-2": {"norm_eps": 1e-3, "mixer.norm_eps": 1e-6, "mixer.output_bias": True},
    "gpt_oss-0": {"windows": (12, 0, 12), "mixer.sinks": True, "mixer.rope.yarn.truncate": False},
    "gpt_oss-1": {"windows": (0, 20, 20), "mixer.bias": False, "mixer.rope.theta": 150000.0},
    "gpt_oss-2": {"mixer.rope.yarn.truncate": True, "mixer.rope.yarn.original_length": 64},
    "minimax_m2-0": {"mixer.rope.rotary_dim": 8, "mixer.qk_norm": "full", "mixer.rope.theta": 5e6},
    "minimax_m2-2": {"mixer.rope.rotary_dim": None},
    "ernie4_5_moe-0": {"mixer.rope.interleaved": True, "dense": (0,), "tie_embeddings": True},
    "ernie4_5_moe-1": {"dense": (0, 2), "experts.shared": "none"},
    "ernie4_5_moe-2": {"dense": (2,), "router.renormalize_floor": 0.6},
    "hunyuan_v1_moe-0": {"mixer.qk_norm_after_rope": True, "experts.shared_size": 32},
    "hunyuan_v1_moe-1": {"mixer.rope.theta": 1e4 * 1000 ** (32 / 30)},
    "hunyuan_v1_moe-2": {"router.top_k": 3},
    "granitemoe-0": {"factors.embedding_multiplier": 3.0, "factors.logits_divisor": 2.0, "mixer.score_scale": 0.1},
    "granitemoehybrid-0": {
        "gqa.rope": None,
        "mamba2.num_value_heads": 8,
        "mamba2.num_key_heads": 2,
        "mamba2.min_step": 0.0,
        "experts.shared_size": 48,
        "factors.residual_multiplier": 0.3,
    },
    "granitemoehybrid-1": {
        "gqa.rope.theta": 1e4,
        "gqa.bias": True,
        "mamba2.num_key_heads": 1,
        "mamba2.conv_bias": False,
        "mamba2.num_taps": 3,
    },
    "granitemoehybrid-2": {"mamba2.num_key_heads": 4, "mamba2.value_dim": 16, "factors.logits_divisor": 0.5},
    "hy_v3-0": {"dense": (0,), "mixer.qk_norm": "head", "mixer.rope.theta": 11158840.0, "router.scale": 2.826},
    "hy_v3-1": {"dense": (1,), "mixer.output_bias": True, "experts.shared_size": 64, "router.scale": 1.7},
    "dots1-0": {"dense": (0,), "mixer.qk_norm": "head", "router.renormalize": True, "windows": ()},
    "dots1-1": {"dense": (), "windows": (0, 12, 12), "router.renormalize": False, "router.groups_kept": 2},
    "dots1-2": {"windows": (20, 0, 20), "mixer.head_dim": 24},
    "solar_open-0": {"dense": (), "mixer.qk_norm": "none", "mixer.rope.theta": 1e6, "router.scale": 1.0},
    "solar_open-1": {"mixer.bias": True, "mixer.output_bias": False, "experts.shared_size": 64},
    "solar_open-2": {"mixer.rope.yarn.attention_factor": 1 + 0.1 * math.log(4)},
    "deepseek_v32-0": {"router.num_groups": 4, "dsa.index.top_k": 24, "dsa.index.interleaved": False},
    "deepseek_v32-2": {"dense": (0, 2), "mixer.norm_eps": 1e-6, "mixer.index.top_k": 512},
    "glm_moe_dsa-0": {"router.num_groups": 1, "norm_eps": 1e-3, "mixer.norm_eps": 1e-6, "router.scale": 2.5},
    "glm_moe_dsa-1": {"indexed": (0, 2), "dsa.index.interleaved": True, "dsa_shared.index.num_heads": 32},
    "glm_moe_dsa-2": {"indexed": (0, 2, 4), "dsa.index.top_k": 9},
    "mistral4-0": {"mixer.query_scale.beta": 0.1, "mixer.query_scale.length": 16, "mixer.rope.rotary_dim": None},
    "mistral4-1": {"mixer.q_lora_rank": None, "router.group_score": "top2_sum", "dense": (0,)},
    "mistral4-2": {"mixer.rope.interleaved": False, "mixer.output_bias": True, "experts.layout": "fused_out_in"},
    "minimax_m3_vl_text-0": {
        "dense": (0,),
        "gqa.rope.rotary_dim": 16,
        "block_gqa.rope.rotary_dim": 16,
        "block_gqa.index.top_k": 4,
        "norm_offset": 1.0,
        "experts.gate_limit": 7.0,
    },
    "minimax_m3_vl_text-1": {"dense": (1,), "experts.gate_slope": 1.3, "mixer.index.num_heads": 2, "router.scale": 1.7},
    "minimax_m3_vl_text-2": {"dense": (), "block_gqa.rope.rotary_dim": None, "block_gqa.index.block_size": 5},
    "afmoe-0": {
        "windows": (12, 0, 12),
        "dense": (0,),
        "gqa.rope": None,
        "swa.rope.theta": 1e4,
        "swa.output_gate": "sigmoid",
        "factors.embedding_multiplier": 8.0,
        "has_post_norms": True,
        "router.scale": 2.826,
    },
    "afmoe-1": {"windows": (0, 20, 20), "dense": (), "gqa.output_bias": True, "experts.shared_size": 64},
    "afmoe-2": {"windows": (12, 12, 12, 0), "dense": (0, 1), "swa.rope.yarn.factor": 4.0, "norm_eps": 1e-5},
    "laguna-0": {
        "windows": (0, 12, 12),
        "dense": (0,),
        "gqa.num_heads": 4,
        "swa.num_heads": 8,
        "gqa.rope.rotary_dim": 8,
        "swa.rope.rotary_dim": None,
        "gqa.rope.yarn.attention_factor": 1.1,
        "swa.rope.yarn": None,
        "swa.gate_form": "head",
        "swa.output_gate": "softplus",
        "router.scale": 2.5,
        "norm_eps": 1e-6,
    },
    "laguna-1": {"windows": (), "dense": (0, 1), "mixer.gate_form": "element", "experts.shared_size": 48},
    "laguna-2": {"windows": (20, 0, 20, 0), "dense": (1,), "swa.rope.rotary_dim": 8, "gqa.rope.theta": 5e5},
    "gemma4_text-0": {
        "windows": (12, 12, 0),
        "gqa.num_kv_heads": 1,
        "gqa.head_dim": 32,
        "gqa.values": "keys",
        "gqa.rope.turning_pairs": 4,
        "gqa.score_scale": 1.0,
        "swa.num_kv_heads": 2,
        "swa.head_dim": 16,
        "swa.values": "own",
        "swa.value_norm": True,
        "swa.rope.turning_pairs": None,
        "factors.embedding_multiplier": 8.0,
        "factors.logits_cap": 3.0,
        "experts.activation": "gelu_tanh",
        "experts.shared_size": 48,
        "has_scalars": True,
        "tie_embeddings": True,
    },
    "gemma4_text-1": {
        "windows": (0, 12, 0),
        "gqa.values": "own",
        "gqa.num_kv_heads": 4,
        "gqa.rope.turning_pairs": 4,
        "gqa.rope.theta": 1e4,
        "tie_embeddings": False,
    },
    "gemma4_text-2": {"windows": (20, 0, 20, 0), "gqa.num_kv_heads": 2, "swa.num_kv_heads": 1, "norm_eps": 1e-2},
    "mimo_v2_flash-0": {
        "windows": (0, 12, 12),
        "dense": (0,),
        "gqa.num_kv_heads": 2,
        "swa.num_kv_heads": 4,
        "gqa.value_dim": 16,
        "swa.value_scale": 0.707,
        "gqa.sinks": False,
        "swa.sinks": True,
        "gqa.rope.theta": 5e6,
        "swa.rope.theta": 1e4,
        "swa.rope.rotary_dim": 8,
        "router.scale": 1.0,
        "norm_eps": 1e-5,
    },
    "mimo_v2_flash-1": {
        "windows": (12, 0, 12),
        "swa.rope.rotary_dim": None,
        "gqa.bias": True,
        "gqa.output_bias": False,
    },
    "mimo_v2_flash-2": {"dense": (0,), "swa.value_scale": 1.0, "router.renormalize": False, "norm_eps": 1e-3},
    "step3p5-0": {
        "windows": (0, 12, 12),
        "dense": (0,),
        "gqa.num_heads": 4,
        "swa.num_heads": 8,
        "gqa.rope.llama3.factor": 4.0,
        "swa.rope.llama3": None,
        "gqa.gate_form": "head",
        "gqa.output_gate": "sigmoid",
        "experts.layout": "stacked",
        "router.scale": 3.0,
        "norm_offset": 1.0,
    },
    "step3p5-1": {"windows": (), "dense": (1,), "mixer.score_scale": 0.5, "mixer.output_bias": True},
    "step3p5-2": {"windows": (20, 0, 20, 0), "dense": (), "gqa.rope.yarn.factor": 4.0, "swa.rope.rotary_dim": 8},
    "nemotron_h-0": {
        "dense": (),
        "mamba2.min_step": 0.6,
        "gqa.rope": None,
        "experts.activation": "relu2",
        "experts.shared_size": 48,
        "experts.latent_size": 0,
        "moe_layer_ids": (1, 4, 6, 9),
        "router.scale": 2.5,
        "norm_eps": 1e-5,
    },
    "nemotron_h-1": {"dense": (1,), "moe_layer_ids": (4,), "exchanged_width": 24, "mamba2.num_taps": 3},
    "nemotron_h-2": {"mamba2.conv_bias": False, "mamba2.num_key_heads": 4, "mamba2.min_step": 0.001, "norm_eps": 1e-3},
    "granitemoe-2": {"mixer.score_scale": 1.0, "experts.layout": "fused_out_in"},
}


@pytest.mark.parametrize(("name", "wanted"), KNOBS.items(), ids=KNOBS.keys())
def test_knobs_are_those_of_the_config_and_of_the_class_where_it_is_silent(name: str, wanted: dict[str, Any]):
    spec = spec_of(name)
    for path, value in wanted.items():
        assert knob(spec, path) == (pytest.approx(value) if isinstance(value, float) else value), path


def test_a_pair_of_mscales_goes_into_the_rotation_and_into_the_scores():
    spec = spec_of("deepseek_v3-1")
    grown = [1 + 0.1 * weight * math.log(4) for weight in (0.7, 1.2)]
    own = latent_of(spec)
    assert own.rope.yarn is not None
    assert own.rope.yarn.attention_factor == pytest.approx(grown[0] / grown[1])
    assert own.score_scale == pytest.approx(24**-0.5 * grown[1] ** 2)


def test_published_spellings_are_those_of_today():
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64}
    old = {"rope_parameters": None, "rope_theta": 5e4, "rope_scaling": {"type": "yarn", **yarn}}
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, **yarn}}
    assert spec_of("deepseek_v3-0", **old) == spec_of("deepseek_v3-0", **new)
    assert spec_of("minimax_m2-0", rope_parameters=None, rope_theta=5e6, rotary_dim=8) == spec_of("minimax_m2-0")
    assert spec_of("deepseek_v3-0", model_type="kimi_k2") == spec_of("deepseek_v3-0"), "the architecture says it"
    assert spec_of("glm4_moe-0", rope_parameters=None, partial_rotary_factor=0.5) == spec_of("glm4_moe-0")
    assert spec_of("hunyuan_v1_moe-0", moe_topk=[3] * 3, num_shared_expert=[1] * 3) == spec_of("hunyuan_v1_moe-0")


def test_a_config_that_puts_windows_on_no_layer_has_none():
    windowed = {"use_sliding_window": True, "sliding_window": 12, "layer_types": None}
    assert spec_of("qwen2_moe-1", **windowed, max_window_layers=1).has_windows
    assert not spec_of("qwen2_moe-1", **windowed, max_window_layers=0).has_windows


def test_layers_of_glm_share_an_index_by_types_by_letters_or_at_an_interval():
    """GLM-5.2 as published: an interval of 4 from an offset of 3 on."""
    types = {"indexer_types": None}
    published = {
        **types,
        "mlp_layer_types": None,
        "num_hidden_layers": 12,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
    }
    assert spec_of("glm_moe_dsa-1", **published).layers_with_mixer("dsa") == (0, 1, 2, 6, 10)
    assert spec_of("glm_moe_dsa-1", **types).layers_with_mixer("dsa") == (0, 1, 2)
    assert spec_of("glm_moe_dsa-1", **types, index_topk_pattern="FSF") == spec_of("glm_moe_dsa-1")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"indexer_types": ["shared", "full", "full"]}, "indexer_types: the first layer"),
        ({"indexer_types": ["full", "whole", "full"]}, "indexer_types must give each layer one of"),
        ({"indexer_types": None, "index_topk_pattern": "FX"}, "index_topk_pattern must consist of F and S, found 'FX'"),
        ({"indexer_types": None, "index_topk_pattern": "FS"}, "index_topk_pattern must give each layer one of"),
        ({"q_lora_rank": None}, "q_lora_rank is null, and the index"),
        ({"index_head_dim": 4}, "index_head_dim 4 is less than the 8 elements that rotate"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
    ],
)
def test_an_index_that_is_not_computed_is_refused_by_its_key(changes: dict[str, Any], named: str):
    with pytest.raises(UnsupportedModelError, match=named):
        spec_of("glm_moe_dsa-1", **changes)


PUBLISHED_M3 = {
    **dict.fromkeys(("layer_types", "mlp_layer_types", "index_block_size", "index_topk_blocks")),
    "hidden_act": "swigluoai",
    "use_gemma_norm": True,
    "qk_norm_type": "per_head",
    "moe_layer_freq": [0, 1, 1],
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_attention_freq": [0, 1, 1],
        "sparse_disable_index_value": [0, 1, 1],
        "sparse_block_size": 8,
        "sparse_topk_blocks": 4,
    },
}


def test_both_spellings_of_minimax_m3_are_the_same_model():
    assert spec_of("minimax_m3_vl_text-0", **PUBLISHED_M3) == spec_of("minimax_m3_vl_text-0")


def test_the_index_of_blocks_is_read_from_published_keys():
    index = {
        **PUBLISHED_M3["sparse_attention_config"],
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 24,
        "sparse_block_size": 8,
        "sparse_topk_blocks": 5,
        "sparse_local_block": 2,
        "sparse_init_block": 1,
        "sparse_score_type": "max",
    }
    spec = spec_of("minimax_m3_vl_text-0", **PUBLISHED_M3 | {"sparse_attention_config": index})
    assert [layer.mixer for layer in spec.layers] == ["gqa", "block_gqa", "block_gqa"]
    assert spec.mixer("block_gqa").index == BlockIndex(2, 24, 8, 5, local_blocks=2, first_blocks=1)
    for change in ({"use_sparse_attention": False}, {"sparse_attention_freq": [0, 0, 0]}):
        whole = spec_of("minimax_m3_vl_text-0", **PUBLISHED_M3 | {"sparse_attention_config": index | change})
        assert [mixer.kind for mixer in whole.mixers] == ["gqa"]


def test_a_published_file_of_hy3_without_a_dtype_has_bfloat16():
    assert spec_of("hy_v3-0", dtype=None).checkpoint_dtype == "bfloat16"
    assert spec_of("dots1-0", dtype=None).checkpoint_dtype == "float32"


def test_hy3_honours_the_published_key_that_transformers_ignores():
    published = {"mlp_layer_types": None, "first_k_dense_replace": 2}
    assert spec_of("hy_v3-0", **published).moe_layer_ids == (2,)


def test_the_prediction_layer_of_hy3_has_its_own_name_for_the_last_norm():
    rules = prediction_rules_of(config_of(next(case for case in FAMILY_CASES if case.name == "hy_v3-0")))
    assert rules["draft_norm"] == "model.layers.3.final_layernorm.weight"
    assert rules["shared_up"] == "model.layers.3.mlp.shared_mlp.up_proj.weight"


def test_the_prediction_layer_of_ling_3_has_its_own_name_for_the_last_norm():
    rules = prediction_rules_of(config_of(next(case for case in FAMILY_CASES if case.name == "bailing_hybrid-0")))
    assert rules["draft_norm"] == "model.layers.4.final_layernorm.weight"
    assert rules["output_gate"] == "model.layers.4.attention.g_proj.weight"


def test_outputs_of_delta_layers_of_ling_3_have_their_published_name_or_that_of_attention():
    config = config_of(next(case for case in FAMILY_CASES if case.name == "bailing_hybrid-2"))
    published, written = rules_of(config), "model.layers.0.attention.dense.weight"
    assert published["kda_out"] == "model.layers.{layer}.attention.o_proj.weight"
    names = {published[role].format(layer=layer, expert=0) for role, layer in (("expert_down", 0), ("dense_down", 1))}
    assert rules_of(config, {*names, "model.layers.0.attention.o_proj.weight"}) == published
    assert rules_of(config, {*names, written})["kda_out"].format(layer=0) == written


PUBLISHED_LING_3 = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "gated_attention_proj_granularity_type": "head_wise",
    "no_kda_lora": True,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "scoring_func": "sigmoid",
    "expert_swiglu_limit_list": [4, 0, 0, 4],
    "share_expert_swiglu_limit_list": [0, 0, 5, 7],
}


def test_published_ling_3_rotates_all_shared_elements_and_limits_its_activations():
    """transformers ignores the limits. A prediction layer has none."""
    found, plain = spec_of("bailing_hybrid-0", **PUBLISHED_LING_3), spec_of("bailing_hybrid-0")
    assert [(layer.expert_limit, layer.mlp_limit) for layer in found.layers] == [(0, 0), (0, 0), (0, 5), (4, 7)]
    assert replace(found, layers=plain.layers) == plain
    assert prediction_spec(found) == prediction_spec(plain)


def test_a_pattern_of_letters_is_the_list_of_types_in_either_spelling():
    types = {"linear_attention": "mamba", "full_attention": "attention"}
    case = next(case for case in FAMILY_CASES if case.name == "nemotron_h-0")
    old = [types.get(each, each) for each in case.config["layers_block_type"]]
    letters = {"layers_block_type": None, "hybrid_override_pattern": "MEM*EMEM*E", "num_hidden_layers": 4}
    assert spec_of(case.name, layers_block_type=old) == spec_of(case.name, **letters) == spec_of(case.name)


def test_published_granite_4_is_read_by_its_own_keys():
    published = {
        "layers_block_type": None,
        "layer_types": ["mamba", "mamba", "attention"],
        "mamba_d_head": "auto",
        "position_embedding_type": "nope",
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    }
    assert spec_of("granitemoehybrid-0", **published) == spec_of("granitemoehybrid-0")


def test_a_single_layer_has_its_experts():
    """Also where the last layer with experts is the first one by default."""
    spec = spec_of("ernie4_5_moe-0", num_hidden_layers=1, moe_layer_start_index=0, moe_layer_end_index=None)
    assert spec.moe_layer_ids == (0,)


def test_trinity_honours_the_published_key_that_transformers_ignores():
    assert not spec_of("afmoe-0", route_norm=False).router.renormalize


def test_layers_that_differ_in_windows_alone_are_of_one_kind():
    """Neither is a kind without layers."""
    assert [mixer.kind for mixer in spec_of("afmoe-0", layer_types=["full_attention"] * 3).mixers] == ["gqa"]
    assert [mixer.kind for mixer in spec_of("afmoe-0", layer_types=["sliding_attention"] * 3).mixers] == ["swa"]
    assert [mixer.kind for mixer in spec_of("gpt_oss-0").mixers] == ["gqa"]


def test_laguna_honours_the_published_keys_that_transformers_ignores():
    """Layers with windows may be of no type: M.1 has a window of 0."""
    published = {"mlp_layer_types": None, "mlp_only_layers": [0, 1], "decoder_sparse_step": 1}
    assert spec_of("laguna-0", **published).moe_layer_ids == (2,)
    assert not spec_of("laguna-0", norm_topk_prob=False).router.renormalize
    assert spec_of("laguna-1", gating_types=["per_head"] * 3).mixers == spec_of("laguna-1", gating=True).mixers
    assert spec_of("laguna-1", sliding_window=0) == spec_of("laguna-1")


def test_laguna_without_rotations_has_those_of_its_class():
    full, windowed = spec_of("laguna-0", rope_parameters=None).mixers
    assert (full.rope, windowed.rope) == (RopeSpec(5e5, rotary_dim=8), RopeSpec(1e4))


GEMMA_PUBLISHED = {"per_layer_config": None, "global_head_dim": 32}
"""Published files have the heads of layers without a window beside the others."""


def test_both_spellings_of_gemma_are_the_same_model():
    for name, count in {"gemma4_text-0": 1, "gemma4_text-2": 2}.items():
        assert spec_of(name, **GEMMA_PUBLISHED, num_global_key_value_heads=count) == spec_of(name)


def test_heads_of_gemma_follow_from_its_class_where_files_leave_them_out():
    full, windowed = spec_of("gemma4_text-0", per_layer_config=None).mixers
    assert (full.head_dim, full.num_kv_heads, windowed.head_dim) == (512, 2, 16)
    full, _ = spec_of("gemma4_text-1", **GEMMA_PUBLISHED, num_global_key_value_heads=1).mixers
    assert (full.head_dim, full.num_kv_heads) == (32, 4), "layers with values of their own have as many heads as others"
    assert {mixer.rope.theta for mixer in spec_of("gemma4_text-0", rope_parameters=None).mixers} == {1e4, 1e6}
    assert spec_of("gemma4_text-0", rms_norm_eps=None).norm_eps == 1e-6


def test_the_last_layer_of_gemma_has_no_window():
    kinds = ["full_attention", *["sliding_attention"] * 2]
    heads = {str(layer): {"head_dim": 32, "num_key_value_heads": 1} for layer in (0, 2)}
    spec = spec_of("gemma4_text-0", layer_types=kinds, per_layer_config=heads)
    assert [layer.window for layer in spec.layers] == [0, 12, 0]
    spec = spec_of("gemma4_text-0", layer_types=None, num_hidden_layers=14, **GEMMA_PUBLISHED)
    assert [layer for layer, each in enumerate(spec.layers) if not each.window] == [5, 11, 13]


def test_gemma_without_windows_is_of_one_kind():
    heads = {str(layer): {"head_dim": 32, "num_key_value_heads": 1} for layer in range(3)}
    (own,) = spec_of("gemma4_text-0", layer_types=["full_attention"] * 3, per_layer_config=heads).mixers
    assert (own.kind, own.head_dim, own.values) == ("gqa", 32, "keys")


def test_the_language_model_of_a_multimodal_gemma_is_that_of_its_text_config():
    text = config_of(next(case for case in FAMILY_CASES if case.name == "gemma4_text-0"))
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {}, "text_config": text}
    assert spec_from_config(outer) == spec_of("gemma4_text-0")
    assert not spec_from_config({**outer, "tie_word_embeddings": False}).tie_embeddings


def test_a_model_of_the_line_that_leaves_keys_out_is_refused_by_their_defaults():
    config = config_of(next(case for case in FAMILY_CASES if case.name == "gemma4_text-0"))
    for key, value in {"hidden_size_per_layer_input": 256, "enable_moe_block": False}.items():
        with pytest.raises(UnsupportedModelError, match=f"{key} = {value} is not supported for gemma4_text"):
            spec_from_config({name: found for name, found in config.items() if name != key})


PUBLISHED_MIMO = {
    **dict.fromkeys(("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps", "sliding_window")),
    "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 1, 1],
    "sliding_window_size": 11,
    "layernorm_epsilon": 1e-5,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "routed_scaling_factor": None,
    "n_shared_experts": None,
}


def test_both_spellings_of_mimo_are_the_same_model():
    assert spec_of("mimo_v2_flash-0", **PUBLISHED_MIMO) == spec_of("mimo_v2_flash-0")


def test_mimo_honours_the_published_keys_that_transformers_ignores():
    other = {"swa_num_key_value_heads": 1, "swa_head_dim": 32, "swa_v_head_dim": 12, "swa_rope_theta": 100.0}
    _, windowed = spec_of("mimo_v2_flash-0", **PUBLISHED_MIMO | other).mixers
    assert (windowed.num_kv_heads, windowed.head_dim, windowed.value_dim) == (1, 32, 12)
    assert (windowed.rope.theta, windowed.rope.rotary_dim) == (100.0, 10)
    sinks = {"add_swa_attention_sink_bias": False, "add_full_attention_sink_bias": True}
    assert [own.sinks for own in spec_of("mimo_v2_flash-0", **sinks).mixers] == [True, False]
    flags = {"hybrid_layer_pattern": [1, 0, 1], "moe_layer_freq": [1, 0, 1]}
    spec = spec_of("mimo_v2_flash-0", **PUBLISHED_MIMO | flags)
    assert [layer.window for layer in spec.layers] == [12, 0, 12] and spec.moe_layer_ids == (0, 2)


PUBLISHED_STEP = {
    **dict.fromkeys(("mlp_layer_types", "rope_parameters", "num_sliding_attention_heads", "per_layer_config")),
    **dict.fromkeys(("num_key_value_heads", "n_routed_experts", "num_experts_per_tok", "query_pre_attn_scalar")),
    "num_attention_groups": 2,
    "moe_num_experts": 8,
    "moe_top_k": 3,
    "moe_layers_enum": "1,2,3",
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2, "head_dim": 16},
    "rope_theta": [5e2, 1e4, 1e4, 5e2],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
    "yarn_only_types": ["full_attention"],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 8.0,
    },
    "swiglu_limits": [0.0, 0.4, 0.0, 0.0],
    "swiglu_limits_shared": [0.5, 0.0, 0.3, 0.0],
    "num_nextn_predict_layers": 1,
}
"""Lists go on with a prediction layer."""


def test_both_spellings_of_step_are_the_same_model():
    plain = spec_of("step3p5-0")
    assert spec_of("step3p5-0", **PUBLISHED_STEP) == plain
    text = config_of(next(case for case in FAMILY_CASES if case.name == "step3p5-0"))
    whole = {"architectures": ["Step3p7ForConditionalGeneration"], "text_config": text}
    assert spec_from_config(whole) == plain
    assert spec_of("step3p5-0", **PUBLISHED_STEP | {"moe_layers_enum": [1, 2, 3]}) == plain
    assert spec_of("step3p5-0", **PUBLISHED_STEP | {"yarn_only_types": []}).mixers[0].rope.llama3 is None


def test_limits_of_activations_are_those_of_a_layer():
    """A dense layer has that of the shared expert."""
    layers = spec_of("step3p5-0").layers
    assert [(layer.expert_limit, layer.mlp_limit) for layer in layers] == [(0, 0.5), (0.4, 0), (0, 0.3)]


REFUSED = {
    "bidirectional attention": (
        "gemma4_text-0",
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention = 'all' is not supported for gemma4_text",
    ),
    "layers that share keys": ("gemma4_text-0", {"num_kv_shared_layers": 1}, "num_kv_shared_layers = 1"),
    "wide MLPs": ("gemma4_text-0", {"use_double_wide_mlp": True}, "use_double_wide_mlp = True"),
    "another activation": ("gemma4_text-0", {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
    "biases of Gemma": ("gemma4_text-0", {"attention_bias": True}, "attention_bias = True"),
    "heads of a layer with a window": (
        "gemma4_text-0",
        {"per_layer_config": {"0": {"head_dim": 32}, "2": {"head_dim": 32}}},
        "per_layer_config must give the layers of full_attention the same",
    ),
    "heads by layer": (
        "gemma4_text-2",
        {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}}},
        "per_layer_config must give .* found .*64",
    ),
    "windows by layer": ("gemma4_text-0", {"per_layer_config": {"2": {"sliding_window": 8}}}, "found .*sliding_window"),
    "scaled proportional rotation": (
        "gemma4_text-0",
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "factor": 2.0}}},
        "factor = 2.0 is not supported for gemma4_text",
    ),
    "more pairs than there are": (
        "gemma4_text-0",
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
        "partial_rotary_factor = 1.5 turns 24 of 16 pairs",
    ),
    "flags of MiMo": ("mimo_v2_flash-0", {"layer_types": None, "hybrid_layer_pattern": [0, 2, 1]}, "each layer 0 or 1"),
    "shared expert of MiMo": ("mimo_v2_flash-0", {"n_shared_experts": 1}, "n_shared_experts = 1 is not supported for"),
    "score of MiMo": ("mimo_v2_flash-0", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported for"),
    "KV heads of Step": (
        "step3p5-0",
        {"num_sliding_attention_heads": None, "attention_other_setting": {"num_attention_groups": 4}},
        "num_attention_groups = 4 of attention_other_setting is not supported",
    ),
    "limits of some layers": ("step3p5-0", {"swiglu_limits": [1.0]}, "swiglu_limits must give each layer a limit"),
    "thetas of some layers": (
        "step3p5-0",
        {"rope_parameters": None, "rope_theta": [1e4]},
        "rope_theta must give each layer a number, found",
    ),
    "names of layers": (
        "step3p5-0",
        {"mlp_layer_types": None, "moe_layers_enum": "1,a"},
        "moe_layers_enum must list layers, found '1,a'",
    ),
    "scaling by turns": (
        "step3p5-0",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 4},
                "sliding_attention": {"rope_theta": 1e4},
            }
        },
        r"factors \[2.0, 4.0, 4.0\] of a llama3 scaling",
    ),
    "sinks of Step": ("step3p5-0", {"sink": True}, "sink = True is not supported for step3p5"),
    "biased MLP of Step": ("step3p5-0", {"mlp_bias": True}, "mlp_bias = True is not supported for step3p5"),
    "heads of one type": (
        "laguna-0",
        {"num_attention_heads_per_layer": [4, 8, 4]},
        r"num_attention_heads_per_layer must .* found \[4, 8, 4\]",
    ),
    "gates by layer": ("laguna-0", {"gating_types": ["per_head", "per_element", "per_head"]}, "gating_types = .*elem"),
    "no gate": ("laguna-0", {"gating": False}, "gating = False is not supported for laguna"),
    "one rotation": ("laguna-0", {"rope_parameters": {"rope_theta": 1e4}}, "object for 'full_attention', found .*1000"),
    "scaling beside rotations": ("laguna-0", {"rope_scaling": {"type": "yarn"}}, "rope_scaling = .*yarn.* laguna"),
    "softcap": ("laguna-0", {"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping = 30.0"),
    "weights of inputs": ("laguna-0", {"moe_apply_router_weight_on_input": True}, "weight_on_input = True"),
    "sinks of windows": ("laguna-0", {"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled = True"),
    "score of Trinity": ("afmoe-0", {"score_func": "softmax"}, "score_func = 'softmax' is not supported for afmoe"),
    "groups of Trinity": ("afmoe-0", {"num_expert_groups": 2}, "num_expert_groups = 2 is not supported for afmoe"),
    "limited groups": ("afmoe-0", {"num_limited_groups": 2}, "num_limited_groups = 2 is not supported for afmoe"),
    "linear rope": ("mixtral-0", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
    "every rope that is read": ("mixtral-0", {"rope_scaling": {"type": "longrope"}}, "only 'default' or 'yarn'"),
    "rope per layer type": ("mixtral-0", {"rope_scaling": {"full_attention": {}}}, "per layer type .*full_attention"),
    "shrinking yarn": ("mixtral-0", {"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor = 0.5"),
    "yarn without a factor": ("mixtral-0", {"rope_scaling": {"type": "yarn"}}, "a yarn scaling has no factor"),
    "dtype": ("olmoe-0", {"dtype": "int7"}, "dtype = 'int7' is not a supported dtype"),
    "dtype in the old spelling": (
        "olmoe-0",
        {"dtype": None, "torch_dtype": 16},
        "torch_dtype = 16 is not a supported dtype",
    ),
    "odd rotation": ("glm4_moe-0", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "partial_rotary_factor = 0.2"),
    "dynamic rope": ("hunyuan_v1_moe-0", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
    "score": ("deepseek_v3-0", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    "method": ("deepseek_v2-0", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
    "renormalized": ("deepseek_v2-0", {"norm_topk_prob": True}, "norm_topk_prob = True"),
    "unequal groups": ("deepseek_v3-0", {"n_group": 3}, "n_group = 3 with topk_group = 2"),
    "few groups": ("deepseek_v3-0", {"n_group": 8, "topk_group": 1}, "n_group = 8 with topk_group = 1"),
    "layer types": ("glm4_moe_lite-1", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must give each layer"),
    "limit": ("gpt_oss-0", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0"),
    "biased MLP": ("ernie4_5_moe-0", {"use_bias": True}, "use_bias = True"),
    "experts per layer": ("hunyuan_v1_moe-0", {"moe_topk": [1, 2, 2]}, "moe_topk must be"),
    "unlike widths": ("hunyuan_v1_moe-0", {"moe_intermediate_size": [16] * 3}, "moe_intermediate_size = 16"),
    "no norms": ("minimax_m2-0", {"use_qk_norm": False}, "use_qk_norm = False"),
    "window of nothing": ("gpt_oss-0", {"sliding_window": 0}, "sliding_window must be a positive integer .* found 0"),
    "yarn by nothing": ("mixtral-0", {"rope_scaling": {"type": "yarn", "factor": 0}}, "factor must be a positive"),
    "scaled to nothing": ("deepseek_v3-0", {"routed_scaling_factor": 0.0}, "routed_scaling_factor must be a positive"),
    "no full attention": ("qwen3_next-0", {"layer_types": ["linear_attention"] * 4}, "has no full_attention"),
    "unknown layer": ("qwen3_5_moe_text-0", {"layer_types": ["mamba"] * 4}, "layer_types must give each layer"),
    "rotated Kimi": ("kimi_linear-0", {"mla_use_nope": False}, "mla_use_nope = False"),
    "tied Kimi": ("kimi_linear-0", {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
    "Kimi's convolution": (
        "kimi_linear-0",
        {"linear_conv_kernel_dim": 9},
        "linear_conv_kernel_dim, .* = 9 is not from 2",
    ),
    "layers of no list": (
        "kimi_linear-0",
        {"layer_types": None, "linear_attn_config": {"full_attn_layers": "4"}},
        "full_attn_layers must be a list of layers, found '4'",
    ),
    "layers of both kinds": (
        "kimi_linear-0",
        {"layer_types": None, "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3, 4]}},
        r"kda_layers = \[1, 2, 3, 4\] contradicts full_attn_layers = \[4\]",
    ),
    "growing states": ("bailing_hybrid-0", {"kda_lower_bound": 0.5}, "kda_lower_bound must be a negative number"),
    "rotated halves": ("bailing_hybrid-0", {"rope_interleave": False}, "rope_interleave = False"),
    "gates of elements": (
        "bailing_hybrid-0",
        {"gated_attention_proj_granularity_type": "element_wise"},
        "gated_attention_proj_granularity_type = 'element_wise' is not supported for bailing_hybrid",
    ),
    "decays in two products": ("bailing_hybrid-0", {"no_kda_lora": False}, "no_kda_lora = False is not supported"),
    "value heads": ("qwen3_next-0", {"linear_num_value_heads": 3}, "linear_num_value_heads = 3 do not divide"),
    "long convolution": ("qwen3_5_moe_text-0", {"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim = 9"),
    "layers of no letter": (
        "nemotron_h-0",
        {"layers_block_type": None, "hybrid_override_pattern": "MEX*"},
        "hybrid_override_pattern must give each layer one of M[*]E-, found 'MEX[*]'",
    ),
    "layers of no type": ("nemotron_h-0", {"layers_block_type": ["moe", 3]}, "layers_block_type must give each layer"),
    "no pattern": ("nemotron_h-0", {"layers_block_type": None}, "hybrid_override_pattern must give each layer"),
    "no attention": ("nemotron_h-0", {"layers_block_type": ["mamba", "moe"]}, "no layer with attention"),
    "heads of no group": ("nemotron_h-0", {"n_groups": 3}, "= 4 do not divide over n_groups, or mamba_n_groups, = 3"),
    "no attention of Granite": (
        "granitemoehybrid-0",
        {"layers_block_type": ["mamba"] * 3},
        "layer_types has no attention",
    ),
    "a step with a bound": ("granitemoehybrid-0", {"time_step_limit": [0.1, 1.0]}, r"time_step_limit = \[0.1, 1.0\]"),
    "taps of Mamba": ("nemotron_h-0", {"conv_kernel": 9}, "conv_kernel, or mamba_d_conv, = 9 is not from 2 to 8"),
    "gated experts": ("nemotron_h-0", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu' is not supported"),
    "biased projections": ("nemotron_h-0", {"use_bias": True}, "use_bias = True is not supported for nemotron_h"),
    "plain output": ("qwen3_5_moe_text-0", {"attn_output_gate": False}, "attn_output_gate = False"),
    "odd heads": ("gpt_oss-0", {"head_dim": 33}, "rotary_dim 33 must be even"),
    "odd latent heads": ("deepseek_v3-0", {"qk_rope_head_dim": 15}, "rotary_dim 15 must be even"),
    "yarn of one frequency": (
        "gpt_oss-0",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1, "factor": 2.0}},
        "rope_theta = 1",
    ),
    "theta below one": ("qwen3_moe-0", {"rope_parameters": {"rope_theta": 0.5}}, "rope_theta = 0.5 .* is less than 1"),
    "alpha of one pair": (
        "hunyuan_v1_moe-1",
        {"head_dim": 2},
        "rope_type = 'dynamic'",
    ),
    "rope of another kind": ("mixtral-0", {"rope_scaling": 0}, "rope_scaling must be an object"),
    "type of another kind": ("mixtral-0", {"rope_scaling": {"rope_type": 0, "factor": 2.0}}, "rope_type = 0"),
    "weight of another kind": (
        "deepseek_v3-1",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": False}},
        "mscale must be",
    ),
    "layers of another kind": ("qwen3_moe-0", {"mlp_only_layers": 0}, "mlp_only_layers must be a list"),
    "null where files are read as true": ("deepseek_v3-0", {"norm_topk_prob": None}, "norm_topk_prob must be true or"),
    "windows of null": ("gpt_oss-0", {"sliding_window": None}, "sliding_window is null"),
    "more than a head rotated": ("minimax_m2-0", {"rope_parameters": None, "rotary_dim": 32}, "rotary_dim rotates 32"),
    "number below any": ("mixtral-0", {"rms_norm_eps": 1e-300}, "rms_norm_eps must be a positive number from 1e-30"),
    "experts of no key": ("bailing_moe_v2-0", {"num_experts": None}, "num_experts must be a positive"),
    "more experts than there are": ("glm4_moe-0", {"num_experts_per_tok": 17}, "num_experts_per_tok .* 17 exceeds 16"),
    "dense Mistral": ("mistral4-0", {"model_type": "mistral"}, "model_type = .mistral."),
    "another part of a head": (
        "mistral4-0",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor rotates 12 elements of a head, not the qk_rope_head_dim = 8",
    ),
    "plain norms": ("minimax_m3_vl_text-0", {"use_gemma_norm": False}, "use_gemma_norm = False"),
    "gated output": ("minimax_m3_vl_text-0", {"attention_output_gate": True}, "attention_output_gate = True"),
    "norms of whole projections": (
        "minimax_m3_vl_text-0",
        {"qk_norm_type": "per_layer"},
        "qk_norm_type = .per_layer.",
    ),
    "two rotated widths": ("minimax_m3_vl_text-0", {"rotary_dim": 8}, "rotary_dim = 8, but .* rotates 16"),
    "layers of no flag": (
        "minimax_m3_vl_text-0",
        {"mlp_layer_types": None, "moe_layer_freq": [0, 1]},
        "moe_layer_freq must give each layer 0 or 1",
    ),
    "values of the index": (
        "minimax_m3_vl_text-0",
        {"sparse_attention_config": {"sparse_disable_index_value": [0, 1, 0]}},
        r"sparse_disable_index_value = \[0, 1, 0\] is not supported",
    ),
    "sums of products": (
        "minimax_m3_vl_text-0",
        {"sparse_attention_config": {"sparse_score_type": "sum"}},
        "sparse_score_type = .sum.",
    ),
    "more heads of an index than KV heads": (
        "minimax_m3_vl_text-0",
        {"index_n_heads": 4},
        r"num_key_value_heads = 2 do not divide over index_n_heads \(or sparse_num_index_heads\) = 4",
    ),
    "an index that rotates more than it has": ("minimax_m3_vl_text-0", {"index_head_dim": 8}, "index_head_dim .* 8 is"),
    "more local blocks than chosen": ("minimax_m3_vl_text-0", {"index_local_blocks": 5}, "index_topk_blocks .* 4 is"),
    "dense layers alone": ("glm4_moe-0", {"first_k_dense_replace": 3}, "no layer has experts: .*first_k_dense_replace"),
    "layers of two kinds": (
        "mimo_v2_flash-0",
        {"hybrid_layer_pattern": [0, 0, 0, 0]},
        r"layer_types = \[.*\] contradicts hybrid_layer_pattern = \[0, 0, 0, 0\]",
    ),
    "experts in two layers": (
        "mimo_v2_flash-0",
        {"mlp_layer_types": ["dense", *["sparse"] * 3], "moe_layer_freq": [1, 1, 1, 1]},
        r"mlp_layer_types = \[.*\] contradicts moe_layer_freq",
    ),
    "experts in other layers": (
        "minimax_m3_vl_text-0",
        {"moe_layer_freq": [1, 0, 1]},
        r"mlp_layer_types = \[.*\] contradicts moe_layer_freq",
    ),
    "experts in listed layers": (
        "step3p5-0",
        {"moe_layers_enum": "9"},
        r"mlp_layer_types = \[.*\] contradicts moe_layers_enum = '9'",
    ),
    "two counts of experts": ("step3p5-0", {"moe_num_experts": 3}, "n_routed_experts = .* contradicts moe_num_exp"),
    "groups of text": ("step3p5-0", {"num_attention_groups": "x"}, "num_attention_groups must be a positive"),
    "heads of windows": ("step3p5-0", {"num_sliding_attention_heads": "x"}, "num_sliding_attention_heads must be"),
    "scaled layers": ("step3p5-0", {"yarn_only_types": 5}, "yarn_only_types must list types of layers .* found 5"),
    "one scaled type": ("step3p5-0", {"yarn_only_types": "full_attention"}, "yarn_only_types must list types"),
    "no type of layers": ("step3p5-0", {"yarn_only_types": ["full"]}, "yarn_only_types must list types of layers"),
    "heads of layers": (
        "laguna-1",
        {"num_attention_heads_per_layer": ["x"] * 3},
        "num_attention_heads_per_layer must be a positive integer",
    ),
    "number of another script": ("gemma4_text-0", {"per_layer_config": {"²": {}}}, "per_layer_config must give"),
    "text for a flag": ("olmoe-0", {"norm_topk_prob": "false"}, "norm_topk_prob must be true or false"),
}


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_computed_is_refused_by_key_and_value(name: str, changes: dict[str, Any], message: str):
    with pytest.raises(UnsupportedModelError, match=message):
        spec_of(name, **changes)


CHOICES = ("router.score", "router.group_score", "experts.activation", "experts.shared")


@pytest.mark.parametrize("path", [*CHOICES, "experts.layout"])
def test_a_misspelled_value_is_refused_when_the_spec_is_built(path: str):
    spec, (group, name) = spec_of("deepseek_v3-0"), path.split(".")
    with pytest.raises(UnsupportedModelError, match=f"{path} = 'softmx' is not computed by this build"):
        replace(spec, **{group: replace(getattr(spec, group), **{name: "softmx"})})


def test_a_misspelled_value_of_a_mixer_is_refused_by_its_kind():
    with pytest.raises(UnsupportedModelError, match=r"olmoe\.gqa\.qk_norm = 'softmx' is not computed by this build"):
        with_attention(spec_of("olmoe-0"), qk_norm="softmx")


def test_every_score_and_activation_that_a_spec_may_name_is_computed():
    for spec, name, table in ((RouterSpec, "score", SCORES), (ExpertSpec, "activation", ACTIVATIONS)):
        (knob,) = (each for each in fields(spec) if each.name == name)
        assert set(knob.metadata["computed"]) <= set(table)


def test_a_factor_of_null_follows_from_the_lengths():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    given, derived = (spec_of("mixtral-0", rope_parameters={**rope, "factor": factor}) for factor in (8.0, None))
    assert derived == given


SHARED_KEYS = ("max_position_embeddings", "n_group", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok")
OTHER_KEYS = {
    "kimi_linear": ("linear_attn_config", *SHARED_KEYS),
    "bailing_hybrid": ("full_attention_interval", *SHARED_KEYS),
    "gemma4_text": ("per_layer_config", "global_head_dim"),
    "laguna": ("gating_types", "mlp_only_layers", "num_attention_heads_per_layer"),
    "mimo_v2_flash": ("hybrid_layer_pattern", "moe_layer_freq", "sliding_window_size", "swa_rope_theta"),
    "minimax_m3_vl_text": ("sparse_attention_config", "moe_layer_freq"),
    "nemotron_h": ("hybrid_override_pattern",),
    "granitemoehybrid": ("time_step_limit", "position_embedding_type"),
    "step3p5": (
        *("attention_other_setting", "moe_layers_enum", "num_attention_groups", "partial_rotary_factors"),
        *("rope_scaling", "rope_theta", "share_expert_dims", "yarn_only_types"),
    ),
}
"""Keys that published files have instead of those that transformers writes."""


def test_layers_of_published_kimi_linear_count_from_one():
    linear = {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 8, "num_heads": 2}
    linear["short_conv_kernel_size"] = 3
    spec = spec_of("kimi_linear-0", layer_types=None, linear_attn_config=linear)
    assert spec.layers_with_mixer("mla") == (1, 3)
    own = spec.mixer("kimi_delta")
    assert isinstance(own, KimiDelta)
    assert (own.head_dim, own.num_heads, own.num_taps) == (8, 2, 3)


def test_layers_of_kimi_linear_without_lists_are_those_of_its_class():
    spec = spec_of("kimi_linear-2", layer_types=None)
    assert spec.layers == spec_of("kimi_linear-2").layers


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_a_value_of_any_key_is_read_or_refused_by_a_key(family: str):
    junk = [None, "", "x", False, 0, -1, 1, 2, 7, 1e-300, [], {}, {"a": {}}, {"²": {}}, 10**30, math.nan, [{}] * 4]
    others = OTHER_KEYS.get(family, ())
    config = config_of(next(case for case in FAMILY_CASES if case.family == family))
    rope = {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0, "alpha": 2.0}
    changed = [{key: value} for key in (*config, *others) for value in junk]
    changed += [{"rope_parameters": {**rope, key: value}} for key in rope for value in junk]
    messages = []
    for change in changed:
        try:
            assert spec_from_config({**config, **change}).family == family
        except UnsupportedModelError as error:
            messages.append(str(error))
    keys = (*config, *others, *rope, "topk_group", "rope_theta", "num_experts")
    assert all(any(key in message for key in keys) for message in messages)
    longest = 150 + len(", ".join(FAMILIES))  # the message of another architecture
    assert all(message.isprintable() and len(message) < longest for message in messages)
    for missing in config:
        rest = {key: value for key, value in config.items() if key != missing}
        with contextlib.suppress(UnsupportedModelError):
            assert spec_from_config(rest).family == family


@pytest.mark.parametrize("name", ["deepseek_v2-0", "deepseek_v3-0", "glm4_moe-0", "glm4_moe_lite-0"])
def test_no_shared_experts_are_none(name: str):
    """In the spelling of files that have none, and of DeepSeek's own reader."""
    for number in (0, None):
        assert spec_of(name, n_shared_experts=number).experts.shared == "none"
    assert spec_of(name).experts.shared == "plain"


def test_a_rotated_width_is_taken_as_it_is_written():
    """Also where its share of a head, times the head, is rounded below it."""
    assert int(98 * (2 / 98)) == 1
    changes = {"rope_parameters": None, "head_dim": 98, "rotary_dim": 2}
    assert attention_of(spec_of("minimax_m2-0", **changes)).rope.rotary_dim == 2
