"""Random tiny models of every family: widths, counts and knobs that no case of `family_cases` has."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from rayserve_moe.model import families

Draw = random.Random
Config = dict[str, Any]


def random_config(family: str, seed: int) -> Config:
    """Return a `config.json` in widths that the native kernels take, small enough to run in a second."""
    draw = random.Random(f"{family} {seed}")
    heads = draw.choice([1, 2, 3, 4, 6, 8])
    config: Config = {
        "architectures": [getattr(families, family).ARCHITECTURE],
        "vocab_size": draw.choice([512, 513, 600]),
        "hidden_size": draw.choice([32, 64, 96]),
        "num_hidden_layers": draw.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([number for number in range(1, heads + 1) if heads % number == 0]),
        "head_dim": draw.choice([4, 8, 16, 24, 32, 64]),
        "max_position_embeddings": draw.choice([256, 300, 512]),
        "rms_norm_eps": draw.choice([1e-6, 1e-2]),
        "rope_theta": draw.choice([1.5, 1e4, 1e6]),
        "tie_word_embeddings": draw.random() < 0.3,
    }
    if draw.random() < 0.3:
        yarn = {"rope_type": "yarn", "factor": draw.choice([1.0, 1.5, 40.0]), "truncate": draw.random() < 0.5}
        config["rope_scaling"] = {**yarn, "original_max_position_embeddings": draw.choice([16, 64])}
    _KNOBS[family](config, draw)
    return config


def _experts(config: Config, draw: Draw, *, count: str, chosen: str = "num_experts_per_tok") -> None:
    """How many there are, how many a token takes, and their width."""
    config[count] = draw.choice([2, 3, 4, 5, 8, 12, 16])
    config[chosen] = draw.randint(1, min(8, config[count]))
    config["moe_intermediate_size"] = draw.choice([1, 7, 16, 33, 64])
    config["intermediate_size"] = draw.choice([1, 40, 96])


def _groups(config: Config, draw: Draw, *, count: str) -> None:
    number, top_k = config[count], config["num_experts_per_tok"]
    sizes = [size for size in range(2, number + 1) if number % size == 0]
    size = draw.choice(sizes)
    kept = draw.randint(-(-top_k // size), number // size)
    config.update(n_group=number // size, topk_group=kept, routed_scaling_factor=draw.choice([1.0, 2.5]))


def _dense_first(config: Config, draw: Draw) -> int:
    return draw.randint(0, config["num_hidden_layers"] - 1)


def _window(draw: Draw) -> int:
    return draw.choice([1, 2, 5, 16, 20, 100, 1000])


def _qwen3(config: Config, draw: Draw) -> None:
    _experts(config, draw, count="num_experts")
    layers = draw.sample(range(config["num_hidden_layers"]), _dense_first(config, draw))
    config.update(norm_topk_prob=draw.random() < 0.5, mlp_only_layers=layers, attention_bias=draw.random() < 0.5)


def _qwen2(config: Config, draw: Draw) -> None:
    _qwen3(config, draw)
    config.update(use_sliding_window=draw.random() < 0.6, sliding_window=_window(draw), qkv_bias=draw.random() < 0.5)
    config.update(shared_expert_intermediate_size=draw.choice([1, 33, 48]))
    config["max_window_layers"] = draw.randint(0, config["num_hidden_layers"])


def _local(config: Config, draw: Draw) -> None:
    _experts(config, draw, count="num_local_experts")
    config.update(intermediate_size=config.pop("moe_intermediate_size"), attention_bias=draw.random() < 0.5)


def _mixtral(config: Config, draw: Draw) -> None:
    _local(config, draw)
    config["sliding_window"] = draw.choice([None, _window(draw)])


def _gpt_oss(config: Config, draw: Draw) -> None:
    _local(config, draw)
    kinds = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(config["num_hidden_layers"])]
    config.update(sliding_window=_window(draw), layer_types=draw.choice([None, kinds]))


def _olmoe(config: Config, draw: Draw) -> None:
    _local(config, draw)
    config.update(num_experts=config.pop("num_local_experts"), norm_topk_prob=draw.random() < 0.5)
    config["clip_qkv"] = draw.choice([None, 0.6])


def _hunyuan(config: Config, draw: Draw) -> None:
    _local(config, draw)
    config.update(num_experts=config.pop("num_local_experts"), moe_topk=config.pop("num_experts_per_tok"))
    if draw.random() < 0.5:
        config["rope_scaling"] = {"type": "dynamic", "alpha": 1000.0}


def _granite(config: Config, draw: Draw) -> None:
    _local(config, draw)
    del config["head_dim"]
    config["hidden_size"] = 32 * config["num_attention_heads"]
    config.update(embedding_multiplier=draw.choice([1.0, 3.0]), residual_multiplier=draw.choice([1.0, 0.3]))
    config.update(attention_multiplier=draw.choice([0.1, 0.5]), logits_scaling=draw.choice([1.0, 8.0]))


def _granite_hybrid(config: Config, draw: Draw) -> None:
    _granite(config, draw)
    kinds = [draw.choice(["mamba", "attention"]) for _ in range(config["num_hidden_layers"] - 1)]
    head_dim, groups = draw.choice([4, 8, 16]), draw.choice([1, 2, 4])
    num_heads = 2 * config["hidden_size"] // head_dim
    config.update(layer_types=[*kinds, "attention"], mamba_n_heads=num_heads, mamba_d_head=head_dim)
    config.update(mamba_n_groups=groups, mamba_d_state=draw.choice([4, 8, 16]), mamba_d_conv=draw.choice([2, 3, 4]))
    config.update(mamba_conv_bias=draw.random() < 0.7, shared_intermediate_size=draw.choice([1, 33, 48]))
    config["position_embedding_type"] = draw.choice([None, "nope", "rope"])


def _minimax(config: Config, draw: Draw) -> None:
    _local(config, draw)
    config["rotary_dim"] = draw.choice(range(2, config["head_dim"] + 1, 2))


def _minimax_m3(config: Config, draw: Draw) -> None:
    _local(config, draw)
    del config["attention_bias"]
    layers, num_dense = config["num_hidden_layers"], _dense_first(config, draw)
    config.update(moe_layer_freq=[0] * num_dense + [1] * (layers - num_dense), swiglu_alpha=draw.choice([0.5, 1.702]))
    config.update(dense_intermediate_size=draw.choice([1, 40]), shared_intermediate_size=draw.choice([1, 33, 48]))
    config.update(swiglu_limit=draw.choice([0.3, 7.0]), rotary_dim=draw.choice(range(2, config["head_dim"] + 1, 2)))
    kinds = ["minimax_m3_sparse", *draw.choices(["minimax_m3_sparse", "full_attention"], k=layers - 1)]
    draw.shuffle(kinds)
    kv_heads = config["num_key_value_heads"]
    config.update(layer_types=kinds, index_n_heads=draw.choice([n for n in (1, 2, 3, 4) if kv_heads % n == 0]))
    config.update(index_head_dim=config["rotary_dim"] + 2 * draw.randrange(9), index_block_size=draw.randrange(1, 20))
    config.update(index_topk_blocks=draw.randrange(2, 6), index_local_blocks=draw.randrange(3))


def _ernie(config: Config, draw: Draw) -> None:
    _experts(config, draw, count="moe_num_experts", chosen="moe_k")
    del config["head_dim"]
    config["hidden_size"] = 32 * config["num_attention_heads"]
    config.update(moe_num_shared_experts=draw.choice([0, 1, 2]), moe_layer_start_index=_dense_first(config, draw))
    config["moe_norm_min"] = draw.choice([1e-12, 0.6])


def _routed(config: Config, draw: Draw) -> None:
    _experts(config, draw, count="n_routed_experts")
    config.update(n_shared_experts=draw.choice([0, 1, 2]), first_k_dense_replace=_dense_first(config, draw))
    config.update(attention_bias=draw.random() < 0.5)


def _glm4(config: Config, draw: Draw) -> None:
    _routed(config, draw)
    _groups(config, draw, count="n_routed_experts")
    config.update(use_qk_norm=draw.random() < 0.5, norm_topk_prob=draw.random() < 0.7)
    config["partial_rotary_factor"] = draw.choice([0.5, 1.0])


def _latent(config: Config, draw: Draw) -> None:
    _routed(config, draw)
    del config["head_dim"]
    config.update(kv_lora_rank=draw.choice([2, 6, 24, 40, 160]), q_lora_rank=draw.choice([None, 2, 10, 50]))
    config.update(qk_nope_head_dim=draw.choice([2, 6, 34]), qk_rope_head_dim=draw.choice([2, 4, 18]))
    config["v_head_dim"] = draw.choice([2, 12, 46] if config["num_attention_heads"] % 2 else [2, 3, 5, 46])


def _deepseek_v2(config: Config, draw: Draw) -> None:
    _latent(config, draw)
    if draw.random() < 0.5:
        _groups(config, draw, count="n_routed_experts")
        config["topk_method"] = "group_limited_greedy"


def _deepseek_v3(config: Config, draw: Draw) -> None:
    _latent(config, draw)
    _groups(config, draw, count="n_routed_experts")
    config.update(norm_topk_prob=draw.random() < 0.7, rope_interleave=draw.random() < 0.5)


def _mistral4(config: Config, draw: Draw) -> None:
    _deepseek_v3(config, draw)
    scaled = {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": draw.choice([0.1, 0.5])}
    config["rope_scaling"] = {**scaled, "original_max_position_embeddings": draw.choice([1, 7, 64])}


def _bailing(config: Config, draw: Draw) -> None:
    _experts(config, draw, count="num_experts")
    _groups(config, draw, count="num_experts")
    config.update(num_shared_experts=draw.choice([0, 1, 2]), first_k_dense_replace=_dense_first(config, draw))
    config.update(use_qkv_bias=draw.random() < 0.5, use_bias=draw.random() < 0.5, use_qk_norm=draw.random() < 0.5)
    config["partial_rotary_factor"] = draw.choice([0.5, 1.0])


def _hybrid(config: Config, draw: Draw) -> None:
    _experts(config, draw, count="num_experts")
    key_heads, layers = draw.choice([1, 2, 4]), config["num_hidden_layers"]
    kinds = [draw.choice(["linear_attention", "full_attention"]) for _ in range(layers - 1)]
    config.update(
        layer_types=[*kinds, "full_attention"],
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * draw.choice([1, 2, 3]),
        linear_key_head_dim=draw.choice([4, 8, 16]),
        linear_value_head_dim=draw.choice([4, 8, 16]),
        linear_conv_kernel_dim=draw.choice([2, 3, 4]),
        shared_expert_intermediate_size=draw.choice([1, 33, 48]),
        partial_rotary_factor=draw.choice([0.5, 1.0]),
    )


def _nemotron(config: Config, draw: Draw) -> None:
    _routed(config, draw)
    _groups(config, draw, count="n_routed_experts")
    groups, pattern = draw.choice([1, 2, 4]), ["*", "E", *draw.choices("M*E-", k=config["num_hidden_layers"])]
    draw.shuffle(pattern)
    for key in ("first_k_dense_replace", "n_shared_experts", "attention_bias", "rope_theta", "rms_norm_eps"):
        del config[key]
    config.pop("rope_scaling", None)
    config.update(hybrid_override_pattern="".join(pattern), num_hidden_layers=len(pattern), tie_word_embeddings=False)
    config.update(
        n_groups=groups,
        mamba_num_heads=groups * draw.choice([1, 2, 3]),
        mamba_head_dim=draw.choice([4, 8, 16]),
        ssm_state_size=draw.choice([4, 8, 16]),
        conv_kernel=draw.choice([2, 3, 4]),
        use_conv_bias=draw.random() < 0.7,
        time_step_min=draw.choice([1e-3, 0.6]),
        layer_norm_epsilon=draw.choice([1e-5, 1e-2]),
        moe_latent_size=draw.choice([None, 16, 40]),
        moe_shared_expert_intermediate_size=draw.choice([1, 33, 48]),
        norm_topk_prob=draw.random() < 0.7,
    )


def _kimi_linear(config: Config, draw: Draw) -> None:
    _deepseek_v3(config, draw)
    config["num_experts"] = config.pop("n_routed_experts")
    kinds = [draw.choice(["linear_attention", "full_attention"]) for _ in range(config["num_hidden_layers"] - 1)]
    config.update(
        layer_types=[*kinds, "full_attention"],
        tie_word_embeddings=False,
        linear_num_heads=draw.choice([1, 2, 3, 4]),
        linear_head_dim=draw.choice([4, 8, 16]),
        linear_conv_kernel_dim=draw.choice([2, 3, 4]),
    )


def _bailing_hybrid(config: Config, draw: Draw) -> None:
    _kimi_linear(config, draw)
    config.update(rope_interleave=True, kda_safe_gate=draw.random() < 0.7, kda_lower_bound=draw.choice([-5.0, -0.3]))


def _hy_v3(config: Config, draw: Draw) -> None:
    _experts(config, draw, count="num_experts")
    config.update(num_shared_experts=draw.choice([0, 1, 2]), first_k_dense_replace=_dense_first(config, draw))
    config.update(attention_bias=draw.random() < 0.5, router_scaling_factor=draw.choice([1.0, 2.826]))


def _dots1(config: Config, draw: Draw) -> None:
    _routed(config, draw)
    _groups(config, draw, count="n_routed_experts")
    config.update(norm_topk_prob=draw.random() < 0.7, sliding_window=draw.choice([None, _window(draw)]))
    config["max_window_layers"] = draw.randint(0, config["num_hidden_layers"])


def _solar_open(config: Config, draw: Draw) -> None:
    _routed(config, draw)
    _groups(config, draw, count="n_routed_experts")
    config.update(first_k_dense_replace=0, norm_topk_prob=draw.random() < 0.7)


def _indexed(config: Config, draw: Draw) -> None:
    _deepseek_v3(config, draw)
    config.update(rope_interleave=True, q_lora_rank=draw.choice([2, 10, 50]))
    config.update(index_n_heads=draw.choice([1, 3, 32]), index_head_dim=draw.choice([16, 50, 128]))
    config["index_topk"] = draw.choice([1, 7, 40, 2048])


def _afmoe(config: Config, draw: Draw) -> None:
    _experts(config, draw, count="num_experts")
    kinds = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(config["num_hidden_layers"])]
    config.update(sliding_window=_window(draw), layer_types=draw.choice([None, kinds]))
    config.update(global_attn_every_n_layers=draw.choice([1, 2, 4]), num_dense_layers=_dense_first(config, draw))
    config.update(num_shared_experts=draw.choice([0, 1, 2]), route_scale=draw.choice([1.0, 2.826]))
    config.update(attention_bias=draw.random() < 0.5, mup_enabled=draw.random() < 0.7)


def _laguna(config: Config, draw: Draw) -> None:
    _experts(config, draw, count="num_experts")
    kinds = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(config["num_hidden_layers"])]
    heads = {kind: config["num_attention_heads"] * draw.choice([1, 2]) for kind in sorted(set(kinds))}
    ropes = {kind: {"rope_theta": draw.choice([1e4, 5e5])} for kind in heads}
    ropes[kinds[0]] |= config.pop("rope_scaling", {}) | {"rope_theta": config.pop("rope_theta")}
    for rope in ropes.values():
        rope["partial_rotary_factor"] = draw.choice([0.5, 1.0])
    config.update(layer_types=kinds, rope_parameters=ropes, sliding_window=_window(draw))
    config.update(num_attention_heads_per_layer=[heads[kind] for kind in kinds], attention_bias=draw.random() < 0.5)
    config.update(
        gating=draw.choice([True, "per-head", "per-element"]), moe_routed_scaling_factor=draw.choice([1.0, 2.5])
    )
    config["shared_expert_intermediate_size"] = draw.choice([1, 33, 48])
    config["mlp_only_layers"] = draw.sample(range(config["num_hidden_layers"]), _dense_first(config, draw))


def _gemma4(config: Config, draw: Draw) -> None:
    _experts(config, draw, count="num_experts", chosen="top_k_experts")
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    divisors = [number for number in range(1, heads + 1) if heads % number == 0]
    kinds = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    share = {"rope_type": "proportional", "partial_rotary_factor": draw.choice([0.5, 1.0])}
    ropes = {"full_attention": share, "sliding_attention": {}}
    for rope in ropes.values():
        rope["rope_theta"] = draw.choice([1e4, 1e6])
    config.pop("rope_scaling", None)
    config.update(rope_parameters=draw.choice([None, ropes]), sliding_window=_window(draw), layer_types=kinds)
    config.update(global_head_dim=draw.choice([8, 16, 48, 64]), num_global_key_value_heads=draw.choice(divisors))
    config.update(attention_k_eq_v=draw.random() < 0.7, final_logit_softcapping=draw.choice([None, 0.5, 30.0]))
    config.update(hidden_size_per_layer_input=0, enable_moe_block=True)


def _mimo(config: Config, draw: Draw) -> None:
    _experts(config, draw, count="n_routed_experts")
    config.pop("rope_scaling", None)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    flags = [draw.choice([0, 1]) for _ in range(layers)]
    config.update(hybrid_layer_pattern=flags, sliding_window_size=_window(draw), layernorm_epsilon=1e-5)
    config.update(swa_num_key_value_heads=draw.choice([n for n in range(1, heads + 1) if heads % n == 0]))
    config.update(v_head_dim=draw.choice([2, 12, 40]), swa_v_head_dim=draw.choice([6, 24]))
    config.update(swa_head_dim=draw.choice([8, 40]), swa_rope_theta=draw.choice([100.0, 1e4]))
    config.update(partial_rotary_factor=draw.choice([0.5, 1.0]), attention_value_scale=draw.choice([None, 0.707, 2.0]))
    config.update(add_full_attention_sink_bias=draw.random() < 0.5, add_swa_attention_sink_bias=draw.random() < 0.7)
    num_dense = _dense_first(config, draw)
    config.update(moe_layer_freq=[0] * num_dense + [1] * (layers - num_dense), attention_bias=draw.random() < 0.5)


def _step(config: Config, draw: Draw) -> None:
    _experts(config, draw, count="moe_num_experts", chosen="moe_top_k")
    layers = config["num_hidden_layers"]
    kinds = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    thetas = {"full_attention": draw.choice([1e4, 5e6]), "sliding_attention": 1e4}
    parts = {"full_attention": 0.5, "sliding_attention": draw.choice([0.5, 1.0])}
    heads = config["num_attention_heads"] * draw.choice([1, 2])
    scaling = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0}
    config["rope_scaling"] = scaling | {"original_max_position_embeddings": draw.choice([16, 256])}
    config.update(layer_types=kinds, sliding_window=_window(draw), yarn_only_types=["full_attention"])
    config.update(rope_theta=[thetas[kind] for kind in kinds], partial_rotary_factors=[parts[kind] for kind in kinds])
    config.update(attention_other_setting={"num_attention_heads": heads}, share_expert_dim=draw.choice([1, 33, 48]))
    config.update(moe_layers_enum=",".join(map(str, range(_dense_first(config, draw), layers))))
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        config[key] = [draw.choice([None, 0.0, 0.5, 7]) for _ in range(layers)]
    config["moe_router_scaling_factor"] = draw.choice([1.0, 3.0])


_KNOBS: dict[str, Callable[[Config, Draw], None]] = {
    "qwen3_moe": _qwen3,
    "qwen2_moe": _qwen2,
    "nemotron_h": _nemotron,
    "qwen3_next": _hybrid,
    "qwen3_5_moe_text": _hybrid,
    "kimi_linear": _kimi_linear,
    "bailing_hybrid": _bailing_hybrid,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4,
    "glm4_moe_lite": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "minimax_m2": _minimax,
    "minimax_m3_vl_text": _minimax_m3,
    "ernie4_5_moe": _ernie,
    "hunyuan_v1_moe": _hunyuan,
    "granitemoe": _granite,
    "granitemoehybrid": _granite_hybrid,
    "mistral4": _mistral4,
    "bailing_moe_v2": _bailing,
    "hy_v3": _hy_v3,
    "dots1": _dots1,
    "solar_open": _solar_open,
    "deepseek_v32": _indexed,
    "glm_moe_dsa": _indexed,
    "afmoe": _afmoe,
    "laguna": _laguna,
    "gemma4_text": _gemma4,
    "mimo_v2_flash": _mimo,
    "step3p5": _step,
}
