"""One tree states every parameter: it follows the spec, and repeats KV heads where devices outnumber them."""

from __future__ import annotations

import pytest

from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.layers.attention import kv_repeats
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.parallel.sharding import MESH_AXES_OF
from tests.support.models.attention_specs import attention_of, with_attention
from tests.support.models.core import CORE_CONFIG


def tree_with(tensor_size: int = 1, **changes: object) -> dict[str, dict[str, ParamSpec]]:
    spec = spec_from_hf(CORE_CONFIG.hf_config("float32") | changes)
    return parameter_specs(spec, dtype="bfloat16", tensor_size=tensor_size)


def test_every_dimension_has_an_axis_that_the_table_knows():
    for group in tree_with(attention_bias=True).values():
        for param in group.values():
            assert len(param.axes) == len(param.shape)
            assert set(param.axes) <= MESH_AXES_OF.keys()


def test_the_router_alone_stays_float32():
    dtypes = {name: param.dtype for group in tree_with().values() for name, param in group.items()}
    assert [name for name, dtype in dtypes.items() if dtype == "float32"] == ["router_MDE"]
    assert set(dtypes.values()) == {"float32", "bfloat16"}


def test_parts_that_a_model_lacks_are_not_stated():
    assert "dense" not in tree_with(mlp_only_layers=())
    assert "head_VD" not in tree_with(tie_word_embeddings=True)["embedding"]
    assert "q_bias_LH" not in tree_with()["gqa"]


@pytest.mark.parametrize(("tensor_size", "repeats"), [(1, 1), (2, 1), (4, 2), (8, 4)])
def test_kv_heads_are_repeated_until_every_device_has_one(tensor_size, repeats):
    spec = spec_from_hf(CORE_CONFIG.hf_config("float32"))
    assert kv_repeats(attention_of(spec), tensor_size) == repeats
    once, held = tree_with()["gqa"], tree_with(tensor_size)["gqa"]
    for name in ("k_LDG", "v_LDG"):
        assert held[name].shape[-1] == once[name].shape[-1] * repeats
        assert held[name].file_shape == once[name].file_shape, "files do not know how many devices there are"
    assert held["q_LDH"] == once["q_LDH"]


def test_norms_of_all_heads_and_sinks_lie_with_their_heads():
    spec = spec_from_hf(CORE_CONFIG.hf_config("float32"))
    spec = with_attention(spec, qk_norm="full", sinks=True)
    held = parameter_specs(spec, dtype="bfloat16", tensor_size=4)["gqa"]
    own = attention_of(spec)
    heads, kv_heads, width = own.num_heads, own.num_kv_heads, own.head_dim
    assert held["q_norm_LH"].shape[1] == heads * width and held["k_norm_LG"].shape[1] == 2 * kv_heads * width
    assert held["k_norm_LG"].file_shape == (kv_heads * width,)
    assert held["sinks_LA"].file_shape == (heads,)
    assert [held[name].axes[1] for name in ("q_norm_LH", "k_norm_LG", "sinks_LA")] == ["heads", "kv_heads", "heads"]
    assert "q_norm_Lh" not in held


def test_a_piece_lies_in_files_transposed():
    gate = tree_with()["experts"]["gate_MPDF"]
    assert gate.shape == (2, 8, 32, 16)
    assert gate.piece_shape == (32, 16) and gate.file_shape == (16, 32)


def test_redundant_slots_are_held_and_not_in_files():
    spec = spec_from_hf(CORE_CONFIG.hf_config("float32"))
    plain, held = (parameter_specs(spec, dtype="bfloat16", num_redundant=size)["experts"] for size in (0, 4))
    for name in ("gate_MPDF", "up_MPDF", "down_MPFD"):
        assert plain[name].shape[1] == 8 and held[name].shape[1] == 12
        assert plain[name].file_stack == held[name].file_stack == (2, 8)
        assert plain[name].file_shape == held[name].file_shape
    assert held["router_MDE"] == plain["router_MDE"], "routing is among experts, not slots"


@pytest.mark.parametrize(("num_devices", "size"), [(1, 510), (2, 510), (4, 512), (8, 512), (7, 511)])
def test_the_vocabulary_is_padded_until_it_divides(num_devices, size):
    spec = spec_from_hf(CORE_CONFIG.hf_config("float32") | {"vocab_size": 510})
    specs = parameter_specs(spec, dtype="bfloat16", num_devices=num_devices)["embedding"]
    assert specs["table_VD"].shape == (size, 32) and specs["head_VD"].shape == (size, 32)
    assert specs["table_VD"].file_shape == specs["head_VD"].file_shape == (510, 32)


def test_rows_of_a_table_are_padded_alone_where_it_is_not_the_head():
    multiple = CORE_CONFIG.hidden_size + 1
    plain, tied = tree_with()["embedding"], tree_with(tie_word_embeddings=True)["embedding"]
    assert plain["table_VD"].padded("table_row", multiple).shape == (CORE_CONFIG.vocab_size, multiple)
    for kept in (plain["head_VD"], tied["table_VD"]):
        assert kept.padded("table_row", multiple) == kept
