"""A config in either spelling becomes one spec; what this build does not compute is refused by key and value."""

from __future__ import annotations

import pytest

from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.spec import UnsupportedModelError
from tests.support.models.attention_specs import attention_of
from tests.support.models.core import CORE_CONFIG

CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], **CORE_CONFIG.hf_config("float32")}


def spec_with(**changes: object):
    return spec_from_config({**CONFIG, **changes})


def spec_without(key: str, **changes: object):
    return spec_from_config({name: value for name, value in CONFIG.items() if name != key} | changes)


def test_both_spellings_give_one_spec():
    spec = spec_with(rope_theta=5e5)
    assert attention_of(spec).rope.theta == 5e5
    assert spec_without("num_experts", num_local_experts=8, rope_theta=5e5) == spec
    assert spec_without("rope_theta", rope_parameters={"rope_type": "default", "rope_theta": 5e5}) == spec
    assert spec_without("rope_theta", rope_parameters={"rope_theta": 5e5}, rope_scaling=None) == spec


@pytest.mark.parametrize(
    ("every", "listed", "dense"),
    [(1, (), ()), (1, (0,), (0,)), (2, (), (0, 2)), (2, (0,), (0, 2)), (3, (), (0, 1)), (1, (7,), ())],
)
def test_dense_layers_are_those_listed_and_those_between(every, listed, dense):
    spec = spec_with(num_hidden_layers=3, decoder_sparse_step=every, mlp_only_layers=list(listed))
    assert spec.layers_with_ffn("dense") == dense
    assert sorted(spec.layers_with_ffn("dense") + spec.moe_layer_ids) == [0, 1, 2]


def test_head_dim_is_given_or_follows():
    assert attention_of(spec_with(head_dim=24)).head_dim == 24
    assert attention_of(spec_without("head_dim")).head_dim == CORE_CONFIG.hidden_size // CORE_CONFIG.num_attention_heads


def test_the_routing_layout_is_that_of_the_moe_layers():
    layout = spec_with(num_experts=300, num_experts_per_tok=3).routing_layout
    assert layout.layer_ids == (1, 2) and layout.num_hidden_layers == 3
    assert layout.row_shape == (2, 3) and layout.dtype.name == "uint16"


REFUSED = {
    "architecture": (
        {"architectures": ["LlamaForCausalLM"]},
        "architectures = .*LlamaForCausalLM.*Qwen3MoeForCausalLM",
    ),
    "no architecture": ({"architectures": None}, r"architectures = \[\]"),
    "rope": ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "rope_type = 'longrope'"),
    "llama3 without turns": ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor must be"),
    "old rope": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
    "partial rope": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "window": ({"use_sliding_window": True}, "use_sliding_window = True"),
    "no experts": ({"mlp_only_layers": [0, 1, 2]}, "no layer has experts"),
    "missing size": ({"vocab_size": None}, "vocab_size must be a positive integer up to 4194304, found None"),
    "size of zero": (
        {"moe_intermediate_size": 0},
        "moe_intermediate_size must be a positive integer up to 1048576, found 0",
    ),
    "size in text": (
        {"num_experts_per_tok": "2"},
        "num_experts_per_tok must be a positive integer up to 256, found '2'",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_computed_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        spec_with(**changes)
