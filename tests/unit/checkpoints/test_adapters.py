"""Every layout of an adapter lands where a trainer means it to, or the adapter is rejected with a tensor's name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rayserve_moe.checkpoints.adapters.additions import MergedTensors
from rayserve_moe.checkpoints.adapters.config import adapter_config_of
from rayserve_moe.checkpoints.adapters.placing import merged_tensors
from rayserve_moe.checkpoints.files import CheckpointError, CheckpointFiles, open_checkpoint
from rayserve_moe.model.family_table import rules_of, spec_from_config
from rayserve_moe.model.parameters import parameter_specs, parameters_in_files
from tests.support.checkpoints.adapters import LAYOUTS, PREFIX, make_adapter

RECORDED = json.loads((Path(__file__).parent / "peft_names.json").read_text(encoding="utf-8"))["adapters"]
"""Names and shapes that PEFT 0.21.2 wrote on transformers 5.24, with its configs."""
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 48, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "norm_topk_prob": True, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
"""The model of the recorded names."""
LAYER = "model.layers.0."
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def placed(config, tensors, model=QWEN, *, expert_dtype: str = "", names: tuple[str, ...] = ()) -> MergedTensors:
    spec, rules = spec_from_config(model), rules_of(model, names)
    tree = parameters_in_files(parameter_specs(spec, dtype="float32", expert_dtype=expert_dtype), rules, spec=spec)
    return merged_tensors(adapter_config_of(config), tensors, tree=tree, rules=rules)


def drawn(shapes, seed=0):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def delta(merged: MergedTensors, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return what is added to a tensor."""
    return merged.merged(name, np.zeros(shape, np.float32), index=[(0, size) for size in shape])


def expert(role, e):
    return f"{LAYER}mlp.experts.{e}.{role}_proj.weight"


@pytest.mark.parametrize("case", RECORDED)
def test_what_peft_writes_adds_to_the_matrices_that_it_means(case):
    """Experts are outermost in the rows of A and ranks in the columns of B; ranks and alphas are the patterns'."""
    config, tensors = RECORDED[case]["config"], drawn(RECORDED[case]["names"])
    merged = placed(config, tensors)
    for key, a in tensors.items():
        if "lora_A" not in key:
            continue
        b, module = tensors[key.replace("lora_A", "lora_B")], key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        if "experts" not in module:
            scale = 8 / 2 if config["use_rslora"] else 8 / 4
            np.testing.assert_allclose(
                delta(merged, f"{module}.weight", (len(b), a.shape[1])), scale * b @ a, rtol=1e-5, atol=1e-5
            )
            continue
        rank = len(a) // 8
        scale = (16 if rank == 8 else 8) / rank
        for e in range(8):
            found = scale * b[:, e::8] @ a[e * rank : (e + 1) * rank]
            is_down = a.shape[1] == 16
            for role, part in {"down": found}.items() if is_down else {"gate": found[:16], "up": found[16:]}.items():
                np.testing.assert_allclose(delta(merged, expert(role, e), part.shape), part, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_merges_as_numpy_does_it_and_other_tensors_keep_their_bits(single, layout):
    made, files = make_adapter(single, layout), open_checkpoint(single)
    merging = with_adapter(files, made.config, made.tensors)
    for name in files.tensors:
        wanted = made.merged[name].astype(np.float32) if name in made.merged else files.read(name)
        np.testing.assert_array_equal(merging.read(name), wanted, err_msg=name)
        part = (slice(1, 3), slice(1, 2))[: files.read(name).ndim]
        np.testing.assert_array_equal(merging.read(name, part), wanted[part], err_msg=name)
    assert merging.adapter is not None and 0 < merging.adapter.max_rounding < 1e-7


def with_adapter(files: CheckpointFiles, config, tensors, *, dtype: str = "float32") -> CheckpointFiles:
    spec, rules = spec_from_config(files.config), rules_of(files.config, files.tensors)
    tree = parameters_in_files(parameter_specs(spec, dtype=dtype), rules, spec=spec)
    return replace(files, adapter=merged_tensors(adapter_config_of(config), tensors, tree=tree, rules=rules))


def test_the_error_of_rounding_is_that_of_the_served_dtype(single):
    made, files = make_adapter(single, others=False), open_checkpoint(single)
    merging = with_adapter(files, made.config, made.tensors, dtype="bfloat16")
    for name in made.merged:
        merging.read(name)
    errors = [
        np.abs(value.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64) - value).max()
        for value in made.merged.values()
    ]
    assert merging.adapter is not None
    assert merging.adapter.max_rounding == pytest.approx(max(errors), rel=1e-6)


def test_files_with_all_experts_take_the_adapters_of_each():
    """gpt-oss holds [in, out] with gate and up in turns; granite has names of its own."""
    oss = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16, "max_position_embeddings": 64,
        "sliding_window": 16, "layer_types": ["full_attention"], "hidden_act": "silu",
    }  # fmt: skip
    both, down = f"{LAYER}mlp.experts.gate_up_proj", f"{LAYER}mlp.experts.down_proj"
    fused = {
        f"{PREFIX}{LAYER}mlp.experts.base_layer.lora_A.weight": (16, 32),
        f"{PREFIX}{LAYER}mlp.experts.base_layer.lora_B.weight": (32, 16),
        f"{PREFIX}{LAYER}mlp.experts.lora_A.weight": (16, 16),
        f"{PREFIX}{LAYER}mlp.experts.lora_B.weight": (32, 16),
    }
    tensors = drawn(fused)
    merged, (a, b, c, d) = placed(CONFIG, tensors, oss), tensors.values()
    for e in range(4):
        wanted = 2 * (b[:, e::4] @ a[4 * e : 4 * e + 4]).T
        np.testing.assert_allclose(delta(merged, both, (4, 32, 32))[e], wanted, rtol=1e-5, atol=1e-5)
        wanted = 2 * (d[:, e::4] @ c[4 * e : 4 * e + 4]).T
        np.testing.assert_allclose(delta(merged, down, (4, 16, 32))[e], wanted, rtol=1e-5, atol=1e-5)
    one = drawn({f"{LAYER}mlp.experts.3.up_proj.lora_{side}.weight": shape for side, shape in AB_UP.items()})
    found = delta(placed(CONFIG, one, oss), both, (4, 32, 32))
    np.testing.assert_allclose(found[3, :, 1::2], 2 * (one[UP_B] @ one[UP_A]).T, rtol=1e-5, atol=1e-5)
    assert not found[:3].any() and not found[3, :, ::2].any()


def test_modules_of_a_single_parameter_take_the_adapters_of_that_parameter():
    """As PEFT wraps the modules of granite, whose `weight` holds all experts; ranks and alphas are the parameter's."""
    granite = {
        "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "vocab_size": 64, "hidden_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
        "num_experts_per_tok": 2, "intermediate_size": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    module = f"{LAYER}block_sparse_moe.input_linear"
    tensors = drawn({f"{module}.lora_A.weight": (8, 32), f"{module}.lora_B.weight": (32, 8)})
    patterns = {"rank_pattern": {"input_linear.weight": 2}, "alpha_pattern": {"input_linear.weight": 6}}
    config = CONFIG | patterns | {"target_parameters": ["block_sparse_moe.input_linear.weight"]}
    found = delta(placed(config, tensors, granite), f"{module}.weight", (4, 32, 32))
    a, b = tensors.values()
    for e in range(4):
        np.testing.assert_allclose(found[e], 3 * b[:, e::4] @ a[2 * e : 2 * e + 2], rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match="not of a known layout"):
        placed(CONFIG | {"rank_pattern": {"input_linear": 2}}, tensors, granite)


def test_an_untied_head_takes_an_adapter():
    tensors = drawn({f"{PREFIX}lm_head.lora_A.weight": (4, 32), f"{PREFIX}lm_head.lora_B.weight": (64, 4)})
    found = delta(placed(CONFIG, tensors, QWEN | {"tie_word_embeddings": False}), "lm_head.weight", (64, 32))
    a, b = tensors.values()
    np.testing.assert_allclose(found, 2 * b @ a, rtol=1e-5, atol=1e-5)


AB_UP = {"A": (4, 32), "B": (16, 4)}
UP_A, UP_B = (f"{LAYER}mlp.experts.3.up_proj.lora_{side}.weight" for side in "AB")
Q = f"{PREFIX}{LAYER}self_attn.q_proj"
FUSED = f"{PREFIX}{LAYER}mlp.experts"


def q(**names):
    return drawn({f"{Q}.lora_A.weight": (4, 32), f"{Q}.lora_B.weight": (32, 4)} | names)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"peft_type": "IA3"}, "adapter_config.json: peft_type: 'IA3'"),
        ({"use_dora": True}, "use_dora: DoRA"),
        ({"bias": "lora_only"}, "bias: biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: 'pissa_niter_4' changes the base"),
        ({"r": 0}, "r: 0 is no rank"),
        ({"r": None}, "r: None"),
        ({"r": 2**31}, "r: 2147483648 is no rank"),
        ({"lora_alpha": "8"}, "lora_alpha: '8'"),
        ({"lora_alpha": 10**400}, "lora_alpha: 10+ is no number"),
        ({"alpha_pattern": {"q_proj": -(10**400)}}, "alpha_pattern: -10+ is no number"),
        ({"use_rslora": "no"}, "use_rslora: 'no' is neither true nor false"),
        ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern: 1.5"),
        ({"alpha_pattern": {"([a-z_.0-9]+)+!": 1}}, "alpha_pattern: .* repeats a group"),
        ({"alpha_pattern": {".*" * 20 + "!": 1}}, "alpha_pattern: .* more than 3 repetitions"),
        ({"rank_pattern": {r"a?.{0,9}?b+[cd]*": 1}}, "rank_pattern: .* more than 3 repetitions"),
        ({"rank_pattern": {"(": 1}}, "rank_pattern: '\\(' is no regular expression"),
        ({"alpha_pattern": [1]}, "alpha_pattern: should map"),
        ({"target_parameters": "x"}, "target_parameters: should be a list"),
        ({"rank_pattern": {"q_proj": 8}}, "rank 8 by the adapter's config"),
    ],
)
def test_configs_that_more_than_a_low_rank_sum_describes_are_rejected_by_field(changes, fault):
    with pytest.raises(CheckpointError, match=fault):
        placed(CONFIG | changes, q())


@pytest.mark.parametrize(
    ("shapes", "fault"),
    [
        ({f"{Q}.lora_magnitude_vector": (32,)}, "q_proj.lora_magnitude_vector: DoRA"),
        ({f"{PREFIX}model.embed_tokens.lora_embedding_A": (4, 64)}, "lora_embedding_A: adapters of embeddings"),
        ({f"{PREFIX}model.embed_tokens.lora_A.weight": (4, 64)}, "embed_tokens.lora_A.weight: adapters of embeddings"),
        ({f"{Q}.lora_B.bias": (32,)}, "q_proj.lora_B.bias: biases"),
        ({f"{PREFIX}{LAYER}input_layernorm.weight": (32,)}, "input_layernorm.weight: not a lora_A or lora_B"),
        ({f"{PREFIX}{LAYER}self_attn.k_proj.lora_A.weight": (4, 32)}, "k_proj comes without its lora_B"),
        ({f"{Q}.lora_A.default.weight": (4, 32)}, "is of the same module"),
        ({f"{PREFIX}lm_head.lora_{side}.weight": shape for side, shape in {"A": (4, 32), "B": (64, 4)}.items()},
         "no matrix lm_head: the head of this model is its embedding"),
        ({f"{PREFIX}model.layers.7.mlp.up_proj.lora_{side}.weight": shape for side, shape in AB_UP.items()},
         "the model has no matrix model.layers.7"),
        ({f"{PREFIX}model.vision_tower.layers.0.self_attn.q_proj.lora_{side}.weight": shape
          for side, shape in {"A": (4, 32), "B": (32, 4)}.items()}, "no matrix model.vision_tower.layers.0"),
        ({f"{FUSED}.8.up_proj.lora_{side}.weight": shape for side, shape in AB_UP.items()}, "the model has 8 experts"),
        ({f"{FUSED}.{'9' * 5000}.up_proj.lora_{side}.weight": shape for side, shape in AB_UP.items()}, "no matrix mlp"),
        ({f"{PREFIX}model.layers.{'9' * 5000}.mlp.up_proj.lora_{side}.weight": shape for side, shape in AB_UP.items()},
         "the model has no matrix model.layers.9"),
        ({f"{FUSED}.0.w9.lora_{side}.weight": shape for side, shape in AB_UP.items()}, "no matrix mlp.experts.0.w9"),
        ({f"{FUSED}.w3.lora_{side}.weight": shape for side, shape in AB_UP.items()}, "not of a known layout"),
        ({f"{FUSED}.lora_A.weight": (32, 16), f"{FUSED}.lora_B.weight": (16, 32)}, "inputs and outputs are"),
        ({f"{FUSED}.lora_A.weight": (16, 16), f"{FUSED}.lora_B.weight": (32, 16)}, "rank 4 by the config"),
        ({f"{FUSED}.lora_A.weight": (31, 16), f"{FUSED}.lora_B.weight": (32, 31)}, "are not \\[experts x rank, in\\]"),
        ({f"{FUSED}.base_layer.lora_A.weight": (32, 16), f"{FUSED}.base_layer.lora_B.weight": (32, 32),
          f"{FUSED}.lora_A.weight": (32, 16), f"{FUSED}.lora_B.weight": (32, 32)}, "adapts the same matrix"),
        ({f"{FUSED}.w1.lora_A.weight": (2, 4, 32), f"{FUSED}.w1.lora_B.weight": (8, 16, 4)}, "\\[8 or 1, 4, 32\\]"),
    ],
)  # fmt: skip
def test_a_tensor_without_a_place_is_rejected_by_name(shapes, fault):
    with pytest.raises(CheckpointError, match=fault):
        placed(CONFIG, q(**shapes))


def test_shapes_and_named_parameters_must_agree():
    """A matrix of all experts whose name says nothing is never guessed."""
    tensors = drawn({f"{FUSED}.lora_A.weight": (32, 16), f"{FUSED}.lora_B.weight": (32, 32)})
    placed(CONFIG | {"target_parameters": ["mlp.experts.down_proj"]}, tensors)
    with pytest.raises(CheckpointError, match=r"shapes are of down_proj, which target_parameters .* lacks"):
        placed(CONFIG | {"target_parameters": ["mlp.experts.gate_up_proj"]}, tensors)


def test_experts_in_8_bits_are_refused_and_other_matrices_are_not():
    placed(CONFIG, q(), expert_dtype="int8")
    with pytest.raises(CheckpointError, match=r"up_proj.lora_A.weight: .* is served in int8"):
        placed(CONFIG, drawn({UP_A: AB_UP["A"], UP_B: AB_UP["B"]}), expert_dtype="int8")
