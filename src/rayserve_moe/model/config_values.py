"""Typed values from a `config.json`, with upper bounds far above any published model."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.spec import UnsupportedModelError

MAX_INTEGERS = {
    "num_hidden_layers": 512,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 4096,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "num_experts": 2048,
    "num_local_experts": 2048,
    "num_experts_per_tok": 256,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 24,
    "decoder_sparse_step": 512,
    "first_k_dense_replace": 512,
    "sliding_window": 1 << 24,
    "n_routed_experts": 2048,
    "n_shared_experts": 256,
    "num_shared_experts": 256,
    "shared_expert_intermediate_size": 1 << 20,
    "n_group": 2048,
    "topk_group": 2048,
    "q_lora_rank": 1 << 17,
    "kv_lora_rank": 1 << 17,
    "qk_nope_head_dim": 4096,
    "qk_rope_head_dim": 4096,
    "v_head_dim": 4096,
    "moe_num_experts": 2048,
    "moe_num_shared_experts": 256,
    "moe_k": 256,
    "moe_layer_interval": 512,
    "moe_layer_start_index": 512,
    "moe_topk": 256,
    "max_window_layers": 512,
    "rotary_dim": 4096,
    "moe_layer_end_index": 512,
    "original_max_position_embeddings": 1 << 24,
    "draft_vocab_size": 1 << 22,
    "target_hidden_size": 1 << 17,
    "linear_num_key_heads": 1024,
    "linear_num_value_heads": 1024,
    "linear_key_head_dim": 4096,
    "linear_value_head_dim": 4096,
    "linear_conv_kernel_dim": 64,
    "full_attention_interval": 512,
    "mamba_num_heads": 1024,
    "mamba_expand": 64,
    "mamba_n_heads": 1024,
    "mamba_n_groups": 1024,
    "mamba_d_head": 4096,
    "mamba_d_state": 4096,
    "mamba_d_conv": 64,
    "mamba_head_dim": 4096,
    "ssm_state_size": 4096,
    "n_groups": 1024,
    "conv_kernel": 64,
    "moe_latent_size": 1 << 17,
    "moe_shared_expert_intermediate_size": 1 << 20,
    "linear_num_heads": 1024,
    "linear_head_dim": 4096,
    "index_topk": 1 << 24,
    "index_n_heads": 1024,
    "index_head_dim": 4096,
    "index_topk_freq": 512,
    "index_skip_topk_offset": 512,
    "index_topk_blocks": 1 << 20,
    "index_block_size": 1 << 20,
    "index_local_blocks": 1 << 20,
    "sparse_num_index_heads": 1024,
    "sparse_index_dim": 4096,
    "sparse_local_block": 1 << 20,
    "sparse_init_block": 1 << 20,
    "sparse_topk_blocks": 1 << 20,
    "sparse_block_size": 1 << 20,
    "dense_intermediate_size": 1 << 20,
    "shared_intermediate_size": 1 << 20,
    "num_dense_layers": 512,
    "global_attn_every_n_layers": 512,
    "global_head_dim": 4096,
    "num_global_key_value_heads": 1024,
    "top_k_experts": 256,
    "sliding_window_size": 1 << 24,
    "swa_num_attention_heads": 1024,
    "swa_num_key_value_heads": 1024,
    "swa_head_dim": 4096,
    "swa_v_head_dim": 4096,
    "share_expert_dim": 1 << 20,
    "share_expert_dims": 1 << 20,
    "num_attention_groups": 1024,
    "num_attention_heads_per_layer": 1024,
    "num_sliding_attention_heads": 1024,
    "moe_top_k": 256,
}
"""Maximum value of each integer: several times the value of published models."""
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e12
"""Bounds of numbers that are not integers: products with them stay within float32."""


def integer_of(config: Mapping[str, Any], key: str, default: int = 0) -> int:
    """Return the positive integer at `key`, or `default` if it is missing or null.

    Raises: UnsupportedModelError for any other value.
    """
    value = default if config.get(key) is None else config[key]
    if type(value) is not int or not 1 <= value <= MAX_INTEGERS[key]:
        raise UnsupportedModelError(
            f"config.json: {key} must be a positive integer up to {MAX_INTEGERS[key]}, "
            f"found {reprlib.repr(config.get(key))}"
        )
    return value


def number_of(config: Mapping[str, Any], key: str, default: float) -> float:
    """Return the positive number at `key`, or `default` if it is missing or null.

    Raises: UnsupportedModelError for any other value.
    """
    value = default if config.get(key) is None else config[key]
    if type(value) not in (int, float) or not MIN_NUMBER <= value <= MAX_NUMBER:
        raise UnsupportedModelError(
            f"config.json: {key} must be a positive number from {MIN_NUMBER:g} to {MAX_NUMBER:g}, "
            f"found {reprlib.repr(value)}"
        )
    return float(value)


def amount_of(config: Mapping[str, Any], key: str) -> float:
    """Return the nonnegative number at `key`, or 0 if it is missing or null.

    Raises: UnsupportedModelError for any other value.
    """
    value = config.get(key)
    is_nothing = value is None or (type(value) in (int, float) and value == 0)
    return 0.0 if is_nothing else number_of(config, key, 0.0)


def count_of(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return the nonnegative integer at `key`, or `default` if it is missing or null.

    Raises: UnsupportedModelError for any other value.
    """
    value = default if config.get(key) is None else config[key]
    return 0 if type(value) is int and value == 0 else integer_of(config, key, default)


def flag_of(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Return the bool at `key`, or `default` if it is missing.

    Null means False, but is rejected if the default is True, because implementations differ.

    Raises: UnsupportedModelError for any other value.
    """
    value = config.get(key)
    if value not in (None, True, False) or (value is None and default and key in config):
        raise UnsupportedModelError(f"config.json: {key} must be true or false, found {reprlib.repr(value)}")
    return default if value is None else bool(value)


def refuse_other_values(config: Mapping[str, Any], family: str, **supported: tuple[Any, ...]) -> None:
    """Raise UnsupportedModelError if a key has an unsupported value; a missing key passes."""
    for key, values in supported.items():
        value = config.get(key)
        if value is not None and value not in values:
            only = " or ".join(map(repr, values))
            raise UnsupportedModelError(
                f"config.json: {key} = {reprlib.repr(value)} is not supported for {family} (only {only})"
            )


def refuse_contradiction(config: Mapping[str, Any], key: str, other: str, expected: Any) -> None:
    """Raise UnsupportedModelError if the value at `key` is not the one that follows from the key `other`.

    A missing key passes, and so does a list that goes on after the expected values.
    """
    found = config.get(key)
    known = found[: len(expected)] if isinstance(found, list) and isinstance(expected, list) else found
    if known is not None and known != expected:
        raise UnsupportedModelError(
            f"config.json: {key} = {reprlib.repr(found)} contradicts {other} = {reprlib.repr(config.get(other))}"
        )


def object_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object at `key`, or an empty object if it is missing or null.

    Raises: UnsupportedModelError for any other value.
    """
    value = {} if config.get(key) is None else config[key]
    if not isinstance(value, Mapping):
        raise UnsupportedModelError(f"config.json: {key} must be an object, found {reprlib.repr(value)}")
    return value


KIMI_KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Shared key of each key that Kimi-Linear and Ling 3.0 spell differently."""


def with_shared_keys(config: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the config with values also under shared keys; `names` maps keys of the family to shared keys."""
    return {**config, **{shared: config[own] for own, shared in names.items() if config.get(own) is not None}}


def text_config_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model: `text_config` of a multimodal config, else the config itself.

    Outside of `text_config`, a multimodal config has the tying of the head and, if any, the quantization and the dtype.

    Raises: UnsupportedModelError if `text_config` is not an object.
    """
    if config.get("text_config") is None:
        return config
    outer = {"tie_word_embeddings": config.get("tie_word_embeddings")}
    outer |= {
        key: config[key] for key in ("quantization_config", "dtype", "torch_dtype") if config.get(key) is not None
    }
    return {**object_of(config, "text_config"), **outer}
