"""The native CPU kernels are built where that is possible; elsewhere the reason is said, and XLA computes."""

from __future__ import annotations

import logging
import shutil
import stat
from dataclasses import asdict, replace
from pathlib import Path

import jax
import numpy as np
import pytest

from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.synthetic import PRESETS, write_checkpoint
from rayserve_moe.config.settings import CacheSettings, CompileSettings, ExpertSettings, ModelSettings, SettingsError
from rayserve_moe.execution import native_kernels
from rayserve_moe.execution.native_kernels import CPU_FLAGS, NativeKernelsUnavailable, build, check_cpu, choose_kernels
from rayserve_moe.execution.weights import first_placement, load_weights, model_config
from rayserve_moe.kernels.cpu_native.calls import EXPERTS, MLPS, PROJECTIONS
from rayserve_moe.kernels.cpu_native.layout import pack, pack_columns
from rayserve_moe.kernels.registry import CPU, CPU_NATIVE, Kernels
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.parallel.mesh import plan_for
from tests.support.family_cases import FAMILY_CASES, config_of
from tests.support.native import need_native_kernels


def spec_with(**changes: object) -> ModelSpec:
    return spec_from_hf({**asdict(PRESETS["tiny"]), "dtype": "bfloat16", **changes})


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
    with pytest.raises(SettingsError, match="cpu_kernels native: they keep keys and values in bfloat16"):
        choose_kernels(spec_with(), plan, compiling=CompileSettings(cpu_kernels="native"), **settings)


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine without a compiler that has built nothing before."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(native_kernels, "default_cache_directory", lambda: tmp_path / "cache")
    monkeypatch.setattr(native_kernels, "check_cpu", lambda cpuinfo: None)
    monkeypatch.setattr(native_kernels, "register_native_kernels", native_kernels.register_native_kernels.__wrapped__)


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_xla_computes(caplog):
    with caplog.at_level(logging.INFO):
        assert chosen("auto") is CPU
    assert "no C++ compiler" in caplog.text
    with pytest.raises(SettingsError, match=r"cpu_kernels native: there is no C\+\+ compiler .*; take auto"):
        chosen("native")


def test_what_was_built_needs_no_compiler(monkeypatch, tmp_path):
    need_native_kernels()
    built = build(native_kernels.default_cache_directory() / "native")
    (tmp_path / "native").mkdir()
    shutil.copy(built, tmp_path / "native")
    monkeypatch.setenv("PATH", "")
    assert build(tmp_path / "native") == tmp_path / "native" / built.name


def fake_compiler(directory: Path, script: str) -> None:
    compiler = directory / "c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(monkeypatch, tmp_path):
    fake_compiler(tmp_path, "echo 'unknown option -mavx512bf16' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeKernelsUnavailable, match="fails: unknown option -mavx512bf16"):
        build(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_hangs_is_given_up(monkeypatch, tmp_path):
    fake_compiler(tmp_path, "exec /bin/sleep 60")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(native_kernels, "BUILD_TIMEOUT_S", 0.2)
    with pytest.raises(NativeKernelsUnavailable, match="takes longer"):
        build(tmp_path / "cache")


def test_a_directory_that_cannot_be_written_is_no_disaster(monkeypatch, tmp_path):
    fake_compiler(tmp_path, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(NativeKernelsUnavailable, match="cannot be written"):
        build(tmp_path / "cache")


def test_a_library_that_is_none_is_no_disaster(monkeypatch, tmp_path):
    (tmp_path / "broken.so").write_text("not a library")
    monkeypatch.setattr(native_kernels, "check_cpu", lambda cpuinfo: None)
    monkeypatch.setattr(native_kernels, "build", lambda directory: tmp_path / "broken.so")
    with pytest.raises(NativeKernelsUnavailable, match="cannot be loaded"):
        native_kernels.register_native_kernels.__wrapped__()


@pytest.mark.parametrize("missing", [*CPU_FLAGS, "all"])
def test_a_processor_without_the_instructions_is_refused(tmp_path, missing):
    cpuinfo = tmp_path / "cpuinfo"
    if missing != "all":
        cpuinfo.write_text("flags\t\t: " + " ".join(flag for flag in CPU_FLAGS if flag != missing) + "\n")
    with pytest.raises(NativeKernelsUnavailable, match=CPU_FLAGS[0] if missing == "all" else missing):
        check_cpu(cpuinfo)


def test_a_processor_with_the_instructions_passes(tmp_path):
    (tmp_path / "cpuinfo").write_text("model name: x\nflags\t\t: sse " + " ".join(CPU_FLAGS) + "\n")
    check_cpu(tmp_path / "cpuinfo")


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
        {"head_dim": 80}, {"qk_norm_after_rope": True},
    ],
)  # fmt: skip
def test_grouped_query_attention_is_computed_with_every_knob(knob):
    need_native_kernels()
    spec = spec_with()
    assert chosen("native", replace(spec, attention=replace(spec.attention, **knob))) is CPU_NATIVE


@pytest.mark.parametrize(
    ("of", "knob", "value"),
    [
        *(("router", knob, value) for knob, value in {
            "score": "sigmoid", "logit_bias": True, "selection_bias": True, "num_groups": 4, "groups_kept": 2,
            "group_score": "top2_sum", "renormalize_floor": 0.1, "scale": 2.5,
        }.items()),
        *(("experts", knob, value) for knob, value in {
            "bias": True, "activation": "clamped_swiglu", "shared": "plain",
        }.items()),
    ],
)  # fmt: skip
def test_every_router_and_expert_is_known(of, knob, value):
    groups = {"num_groups": 4, "groups_kept": 4} if knob in {"groups_kept", "num_groups"} else {}
    changed = replace(getattr(spec_with(), of), **{**groups, knob: value})
    spec = replace(spec_with(), **{of: changed})
    assert chosen("auto", spec) is chosen("native", spec) is CPU_NATIVE


@pytest.mark.parametrize(("could", "level"), [(True, logging.WARNING), (False, logging.INFO)])
def test_falling_back_is_a_warning_where_the_processor_could_do_better(monkeypatch, caplog, could, level):
    def check(cpuinfo: Path) -> None:
        if not could:
            raise NativeKernelsUnavailable("the processor does not have it")

    monkeypatch.setattr(native_kernels, "check_cpu", check)
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
    config = replace(PRESETS["tiny"], tie_word_embeddings=tied, mlp_only_layers=(1,), **widths)
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
