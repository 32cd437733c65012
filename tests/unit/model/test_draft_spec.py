"""A head names layers of its target as its exporter does, and is refused by key where it is not of this target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rayserve_moe.checkpoints.names import tensor_places
from rayserve_moe.model.draft_spec import (
    AUX_KEY,
    DraftSpec,
    draft_parameters,
    eagle_spec,
    prediction_rules,
    prediction_spec,
)
from rayserve_moe.model.family_table import prediction_rules_of, spec_from_config
from rayserve_moe.model.spec import UnsupportedModelError
from tests.support.models.core import CORE_CONFIG
from tests.support.models.families import FAMILY_CASES, config_of

TARGET = spec_from_config({"architectures": ["Qwen3MoeForCausalLM"], **CORE_CONFIG.hf_config("float32")})
DEEP = replace(TARGET, layers=TARGET.layers[-1:] * 48)
HEAD: dict[str, Any] = {
    "hidden_size": TARGET.hidden_size,
    "vocab_size": TARGET.vocab_size,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}


def head_of(names: tuple[str, ...] = ("lm_head.weight",), **config: Any) -> DraftSpec:
    return eagle_spec({**HEAD, **config}, DEEP, algorithm="EAGLE3", names=names)


def test_layers_are_named_by_what_leaves_or_by_what_enters_them():
    assert head_of().aux_layers == (2, 24, 45)
    assert head_of(eagle_config={AUX_KEY: [1, 23, 44]}) == head_of(**{AUX_KEY: [2, 24, 45]}) == head_of()
    assert head_of(eagle_config={AUX_KEY: [47, -1, 3]}).aux_layers == (48, 0, 4)


def test_words_are_the_target_s_unless_files_map_them():
    assert not head_of(()).has_head and not head_of().maps_words
    few = head_of(("lm_head.weight", "d2t"), draft_vocab_size=100)
    assert few.maps_words and few.has_head and few.layer.vocab_size == 100


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"eagle_config": {AUX_KEY: [1, 23, 48]}}, f"{AUX_KEY} must list layers from -1 to 47"),
        ({AUX_KEY: [1, 23, 49]}, f"{AUX_KEY} must list layers from 0 to 48"),
        ({AUX_KEY: [1, 1, 2]}, "each layer once"),
        ({"draft_vocab_size": 100}, "needs a tensor d2t"),
        ({"hidden_size": 64}, "hidden_size must be the target's"),
        ({"vocab_size": 64}, "vocab_size must be the target's"),
        ({"fc_norm": True}, "fc_norm"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    ],
)
def test_other_heads_are_refused_by_name(config: dict[str, Any], named: str):
    with pytest.raises(UnsupportedModelError, match=named):
        head_of(**config)


def test_a_prediction_layer_under_other_names_is_refused():
    with pytest.raises(UnsupportedModelError, match="prediction layer of this family is not read"):
        prediction_rules({"attention_norm": "backbone.layers.{layer}.norm.weight"}, 3)


def test_attention_and_experts_of_a_prediction_layer_have_a_layer_each_in_files_of_nemotron():
    config = config_of(next(case for case in FAMILY_CASES if case.name == "nemotron_h-1"))
    rules, spec = prediction_rules_of(config), spec_from_config(config)
    names = tensor_places(draft_parameters(prediction_spec(spec), dtype="bfloat16"), rules)
    attention = {f"mixer.{part}_proj" for part in "qkvo"} | {"norm", "enorm", "hnorm", "eh_proj"}
    latent = {"mixer.fc1_latent_proj", "mixer.fc2_latent_proj", "mixer.gate"}
    ffns = ("shared_experts", *(f"experts.{expert}" for expert in range(spec.router.num_experts)))
    experts = {f"mixer.{own}.{part}_proj" for own in ffns for part in ("up", "down")}
    assert {*names} == {
        *(f"mtp.layers.0.{name}.weight" for name in attention),
        *(f"mtp.layers.1.{name}.weight" for name in {"norm", "final_layernorm", *latent, *experts}),
        "mtp.layers.1.mixer.gate.e_score_correction_bias",
    }


@pytest.mark.parametrize("name", ["qwen3_next-0", "qwen3_next-1", "qwen3_5_moe_text-1"])
def test_a_prediction_layer_of_a_hybrid_has_attention_and_experts_and_no_recurrence(name: str):
    """Also where the last layer is recurrent, or has no experts; its norms are held as the target's."""
    target = spec_from_config(config_of(next(case for case in FAMILY_CASES if case.name == name)))
    draft = prediction_spec(target)
    assert [(layer.mixer, layer.ffn) for layer in draft.layer.layers] == [("gqa", "moe")]
    assert draft.layer.mixers == (target.mixer("gqa"),) and draft.layer.experts == target.experts
    own = draft_parameters(draft, dtype="bfloat16")["draft"]
    for norm in ("embedding_norm_D", "hidden_norm_D", "norm_D"):
        assert (own[norm].dtype, own[norm].file.offset) == ("float32", 1.0)
    assert own["fc_AD"].dtype == "bfloat16"


def test_a_dense_head_has_its_own_activation():
    target = replace(DEEP, experts=replace(DEEP.experts, activation="clamped_swiglu", gate_limit=1.0))
    assert eagle_spec(HEAD, target, algorithm="EAGLE3", names=()).layer.experts.activation == "silu"
