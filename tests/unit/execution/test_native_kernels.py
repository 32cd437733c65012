"""Native CPU kernels are chosen for models that they can compute; XLA computes the others, and the reason is said."""

from __future__ import annotations

import logging
from dataclasses import replace

import jax
import numpy as np
import pytest

from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.synthetic import PRESETS, DenseLayers, write_checkpoint
from rayserve_moe.config.settings import CacheSettings, CompileSettings, ExpertSettings, ModelSettings, SettingsError
from rayserve_moe.execution import native_kernels
from rayserve_moe.execution.native_kernels import choose_kernels
from rayserve_moe.execution.native_levels import NativeKernelsUnavailable
from rayserve_moe.execution.weights.placing import first_placement, load_weights, model_config, parameter_tree
from rayserve_moe.kernels.cpu_native.calls import EXPERTS, MLPS, PROJECTIONS
from rayserve_moe.kernels.cpu_native.layout import pack, pack_columns
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.table import CPU, CPU_INVARIANT, CPU_NATIVE, TPU, TPU_INVARIANT
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.transformer import words_of
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.tools.presets import read_config
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.attention_specs import with_attention
from tests.support.models.families import FAMILY_CASES, config_of


def spec_with(**changes: object) -> ModelSpec:
    return spec_from_hf({**PRESETS["tiny"].hf_config("float32"), "dtype": "bfloat16", **changes})


def chosen(setting: str, spec: ModelSpec | None = None, *, dtype: str = "auto", num_devices: int = 1) -> Kernels:
    plan = plan_for(jax.devices()[:num_devices])
    settings = {"model": ModelSettings(dtype=dtype), "compiling": CompileSettings(cpu_kernels=setting)}
    return choose_kernels(spec or spec_with(), plan, **settings)


def family_spec(name: str, **changes: object) -> ModelSpec:
    case = next(case for case in FAMILY_CASES if case.name == name)
    return spec_from_config(config_of(case, dtype="bfloat16", **changes))


def test_kernels_that_keep_bfloat16_alone_are_not_taken_for_fp8(caplog):
    settings = {"model": ModelSettings(), "cache": CacheSettings(kv_dtype="fp8")}
    plan = plan_for(jax.devices()[:1])
    with caplog.at_level(logging.INFO):
        assert choose_kernels(spec_with(), plan, compiling=CompileSettings(), **settings) is CPU
    assert "kv_cache_dtype is fp8" in caplog.text
    with pytest.raises(SettingsError, match="cpu_kernels native: they store keys and values in bfloat16"):
        choose_kernels(spec_with(), plan, compiling=CompileSettings(cpu_kernels="native"), **settings)


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch):
    """A machine that cannot have the library."""

    def refuse(requested: str = "auto") -> None:
        raise NativeKernelsUnavailable("there is no C++ compiler")

    monkeypatch.setattr(native_kernels, "register_native_kernels", refuse)


@pytest.mark.usefixtures("without_library")
def test_without_the_library_xla_computes(caplog):
    with caplog.at_level(logging.INFO):
        assert chosen("auto") is CPU
    assert "no C++ compiler" in caplog.text
    with pytest.raises(SettingsError, match=r"cpu_kernels native: there is no C\+\+ compiler; set auto"):
        chosen("native")


def test_a_level_that_the_processor_lacks_is_refused(monkeypatch):
    def lack(requested: str) -> None:
        raise NativeKernelsUnavailable("the processor does not have avx512f")

    monkeypatch.setattr(native_kernels, "choose_level", lack)
    plan = plan_for(jax.devices()[:1])
    for kernels in ("auto", "native"):
        compiling = CompileSettings(cpu_kernels=kernels, cpu_level="avx512")
        with pytest.raises(SettingsError, match="cpu_level avx512: the processor does not have avx512f"):
            choose_kernels(spec_with(), plan, model=ModelSettings(), compiling=compiling)
    off = CompileSettings(cpu_kernels="off", cpu_level="avx512")
    assert choose_kernels(spec_with(), plan, model=ModelSettings(), compiling=off) is CPU


def test_invariant_products_have_a_table_on_every_platform(monkeypatch: pytest.MonkeyPatch):
    plan, on = plan_for(jax.devices()[:1]), CompileSettings(cpu_kernels="off", invariant_products="on")
    assert choose_kernels(spec_with(), plan, model=ModelSettings(), compiling=on) is CPU_INVARIANT
    monkeypatch.setattr(native_kernels, "platform_of", lambda _: "tpu")
    assert choose_kernels(spec_with(), plan, model=ModelSettings(), compiling=on) is TPU_INVARIANT


def test_they_are_chosen_where_they_help():
    need_native_kernels()
    assert chosen("auto") is chosen("native") is CPU_NATIVE
    assert chosen("off") is CPU
    assert chosen("auto", num_devices=2) is CPU, "all hosts of a group have to agree"
    assert chosen("native", num_devices=2) is CPU_NATIVE


@pytest.mark.parametrize(
    ("spec", "dtype", "reason"),
    [
        (spec_with(), "float32", "in bfloat16, and the model in float32"),
        (spec_with(hidden_size=145), "auto", "hidden_size 145 is odd"),
        (family_spec("glm4_moe-0", head_dim=33), "auto", "head_dim 33 is odd"),
        (family_spec("deepseek_v3-0", kv_lora_rank=23), "auto", "kv_lora_rank 23 is odd"),
        (family_spec("deepseek_v2-0", q_lora_rank=21), "auto", "q_lora_rank 21 is odd"),
        (family_spec("glm4_moe_lite-0", qk_nope_head_dim=15), "auto", "qk_nope_head_dim 15 is odd"),
        (family_spec("deepseek_v3-0", v_head_dim=7, num_attention_heads=3), "auto", "v_head_dim 7 times 3 heads"),
    ],
)
def test_models_they_cannot_do_are_left_to_xla(spec, dtype, reason, caplog):
    with caplog.at_level(logging.INFO):
        assert chosen("auto", spec, dtype=dtype) is CPU
    assert reason in caplog.text
    with pytest.raises(SettingsError, match=reason):
        chosen("native", spec, dtype=dtype)


def test_heads_of_a_device_are_judged_as_they_lie_there():
    need_native_kernels()
    spec = family_spec("deepseek_v3-0", v_head_dim=7, num_attention_heads=6)
    assert chosen("native", spec) is CPU_NATIVE
    with pytest.raises(SettingsError, match="v_head_dim 7 times 3 heads of a device: 21 is odd"):
        chosen("native", spec, num_devices=2)


@pytest.mark.parametrize(
    "knob",
    [
        {"windows": (128, 0, 128, 0)}, {"sinks": True}, {"qk_norm": "full"}, {"clip_qkv": 8.0}, {"score_scale": 0.5},
        {"head_dim": 80}, {"qk_norm_after_rope": True}, {"value_norm": True}, {"values": "keys"},
    ],
)  # fmt: skip
def test_grouped_query_attention_is_computed_with_every_knob(knob):
    need_native_kernels()
    spec = spec_with()
    assert chosen("native", with_attention(spec, **knob)) is CPU_NATIVE


@pytest.mark.parametrize(
    ("of", "knob", "value"),
    [
        *(("router", knob, value) for knob, value in {
            "score": "sigmoid", "logit_bias": True, "selection_bias": True, "num_groups": 4, "groups_kept": 2,
            "group_score": "top2_sum", "renormalize_floor": 0.1, "scale": 2.5, "own_norm": True, "expert_factors": True,
        }.items()),
        *(("experts", knob, value) for knob, value in {
            "bias": True, "activation": "clamped_swiglu", "gate_slope": 1.2, "gate_limit": 3.0, "shared": "plain",
            "separate_norms": True,
        }.items()),
    ],
)  # fmt: skip
def test_every_router_and_expert_is_known(of, knob, value):
    need_native_kernels()
    groups = {"num_groups": 4, "groups_kept": 4} if knob in {"groups_kept", "num_groups"} else {}
    changed = replace(getattr(spec_with(), of), **{**groups, knob: value})
    spec = replace(spec_with(), **{of: changed})
    assert chosen("auto", spec) is chosen("native", spec) is CPU_NATIVE


@pytest.mark.parametrize(("could", "level"), [(True, logging.WARNING), (False, logging.INFO)])
def test_falling_back_is_a_warning_where_the_processor_could_do_better(monkeypatch, caplog, could, level):
    def choose(requested: str) -> None:
        if not could:
            raise NativeKernelsUnavailable("the processor does not have it")

    monkeypatch.setattr(native_kernels, "choose_level", choose)
    monkeypatch.delenv("RAYSERVE_MOE_CPU_LEVEL", raising=False)
    with caplog.at_level(logging.INFO):
        assert chosen("auto", spec_with(hidden_size=145)) is CPU
        assert [record.levelno for record in caplog.records] == [level]
        assert "hidden_size 145" in caplog.text
        chosen("auto", dtype="float32")
    assert caplog.records[-1].levelno == logging.INFO, "none asked for bfloat16"


def test_a_float32_checkpoint_stays_float32_unless_asked():
    assert chosen("auto", spec_with(dtype="float32")) is CPU


ODD_WIDTHS = {"vocab_size": 500, "intermediate_size": 200, "moe_intermediate_size": 48}


@pytest.mark.parametrize("widths", [{}, ODD_WIDTHS], ids=["whole panels", "padded"])
@pytest.mark.parametrize("tied", [False, True])
def test_loaded_weights_lie_as_the_kernels_want_them_on_every_device(tmp_path, tied, widths):
    config = replace(PRESETS["tiny"], tie_word_embeddings=tied, dense=DenseLayers(mlp_only_layers=(1,)), **widths)
    files = open_checkpoint(write_checkpoint(tmp_path / "model", config, seed=1))
    plan, spec = plan_for(jax.devices()[:2]), spec_from_config(files.config)
    plain, packed = (
        load_weights(
            files,
            config := model_config(spec, plan, experts=ExpertSettings(), kernels=kernels),
            dtype="bfloat16",
            placement=first_placement(config),
        ).params
        for kernels in (CPU, CPU_NATIVE)
    )
    layouts = {**dict.fromkeys((*PROJECTIONS, *EXPERTS, *MLPS), pack), "table_VD" if tied else "head_VD": pack_columns}
    for group, arrays in plain.items():
        for name, array in arrays.items():
            lay_out, held = layouts.get(name, lambda values: values), packed[group][name]
            padding = [(0, ours - theirs) for ours, theirs in zip(held.shape, array.shape, strict=True)]
            assert widths or not any(size for _, size in padding)
            whole = np.pad(np.asarray(array), padding)
            for shard in held.addressable_shards:
                np.testing.assert_array_equal(shard.data, lay_out(whole[shard.index]), err_msg=name)


@pytest.mark.parametrize(
    ("model", "inner"), [("gemma-4-26b-a4b", 768), ("qwen3-30b-a3b", 768), ("gpt-oss-20b", 2880)], ids=str
)
def test_experts_of_tpus_are_padded_where_both_widths_become_whole_lanes(model, inner):
    """Those of Gemma 4 are 704 wide; the model's width of gpt-oss is not whole lanes either."""
    spec, plan = spec_from_config(read_config(model)), plan_for(jax.devices()[:2])
    tree = parameter_tree(model_config(spec, plan, experts=ExpertSettings(), kernels=TPU), dtype="bfloat16")
    shapes = {name: spec.shape[2:] for name, spec in tree["experts"].items() if spec.num_experts}
    assert shapes["gate_MPDF"] == shapes["up_MPDF"] == (spec.hidden_size, inner)
    assert shapes["down_MPFD"] == (inner, spec.hidden_size)
    assert tree["embedding"]["table_VD"].shape[1] % 128 == 0


@pytest.mark.parametrize("num_devices", [1, 8])
def test_shares_of_the_vocabulary_on_tpus_are_whole_lanes(num_devices):
    """XLA then lays out logits and histories by rows. The tables have the rows of all shares."""
    spec, plan = spec_from_config(read_config("qwen3-30b-a3b")), plan_for(jax.devices()[:num_devices])
    config = model_config(spec, plan, experts=ExpertSettings(), kernels=TPU)
    tables, part = parameter_tree(config, dtype="bfloat16")["embedding"], words_of(config)
    assert part.width % 128 == 0 and part.width * part.num_parts >= spec.vocab_size
    assert tables["table_VD"].shape[0] == tables["head_VD"].shape[0] == part.width * part.num_parts
