"""Tensor names that several families share, by role: parts of their CHECKPOINT_RULES."""

from __future__ import annotations

from collections.abc import Mapping

_LAYER = "model.layers.{layer}."
_ATTENTION = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."


def moved(rules: Mapping[str, str], old: str, new: str) -> dict[str, str]:
    """Return the rules with the prefix `new` for names that begin with `old`."""
    return {role: new + name.removeprefix(old) if name.startswith(old) else name for role, name in rules.items()}


def in_language_model(rules: Mapping[str, str]) -> dict[str, str]:
    """Return the rules for the language model of a multimodal model, whose head stands beside it."""
    return moved(rules, "model.", "model.language_model.")


def below_language_model(rules: Mapping[str, str]) -> dict[str, str]:
    """Return the rules for a multimodal model whose files have all of the language model below one prefix."""
    return {role: f"language_model.{name}" for role, name in rules.items()}


def _weights(prefix: str, **tensors: str) -> dict[str, str]:
    return {role: f"{prefix}{name}.weight" for role, name in tensors.items()}


DECODER = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    **_weights(_LAYER, attention_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
}
"""Embedding, norms and head."""

ATTENTION = {
    **_weights(_ATTENTION, q="q_proj", k="k_proj", v="v_proj", o="o_proj", q_norm="q_norm", k_norm="k_norm"),
    "q_bias": _ATTENTION + "q_proj.bias",
    "k_bias": _ATTENTION + "k_proj.bias",
    "v_bias": _ATTENTION + "v_proj.bias",
    "o_bias": _ATTENTION + "o_proj.bias",
}
"""Grouped-query attention."""

LATENT_ATTENTION = {
    **_weights(_ATTENTION, q="q_proj", q_a="q_a_proj", q_a_norm="q_a_layernorm", q_b="q_b_proj", o="o_proj"),
    **_weights(_ATTENTION, kv_a="kv_a_proj_with_mqa", kv_a_norm="kv_a_layernorm", kv_b="kv_b_proj"),
    "q_a_bias": _ATTENTION + "q_a_proj.bias",
    "kv_a_bias": _ATTENTION + "kv_a_proj_with_mqa.bias",
    "o_bias": _ATTENTION + "o_proj.bias",
}
"""Multi-head latent attention."""

TOKEN_INDEX = {
    **_weights(_ATTENTION + "indexer.", index_q="wq_b", index_k="wk", index_k_norm="k_norm"),
    "index_k_norm_bias": _ATTENTION + "indexer.k_norm.bias",
    "index_weights": _ATTENTION + "indexer.weights_proj.weight",
}
"""Index of sparse attention."""

BLOCK_INDEX = {
    **_weights(_ATTENTION, index_q="index_q_proj", index_k="index_k_proj"),
    **_weights(_ATTENTION, index_q_norm="index_q_norm", index_k_norm="index_k_norm"),
}
"""Index of block-sparse attention."""

FUSED_BLOCK_INDEX = {
    **_weights(_ATTENTION + "indexer.", index_q="q_proj", index_k="k_proj"),
    **_weights(_ATTENTION + "indexer.", index_q_norm="q_norm", index_k_norm="k_norm"),
}
"""The same in files that transformers writes for the language model alone."""

OUTPUT_GATE = _weights(_ATTENTION, output_gate="gate_proj")
"""Gates of the elements of attention's output."""

DENSE_MLP = _weights(_MLP, dense_gate="gate_proj", dense_up="up_proj", dense_down="down_proj")
"""MLP of a layer without experts."""

EXPERTS = {
    "router": _MLP + "gate.weight",
    **_weights(_MLP + "experts.{expert}.", expert_gate="gate_proj", expert_up="up_proj", expert_down="down_proj"),
}
"""Router, and a tensor per expert for each of gate, up and down."""

FUSED_EXPERTS = {
    **dict.fromkeys(("expert_gate", "expert_up"), _MLP + "experts.gate_up_proj"),
    "expert_down": _MLP + "experts.down_proj",
}
"""A single tensor for gate and up of all experts, and a single one for down: `fused_out_in`."""

SHARED_EXPERTS = _weights(
    _MLP + "shared_experts.", shared_gate="gate_proj", shared_up="up_proj", shared_down="down_proj"
)
"""Shared expert, which every token takes."""

GATED_SHARED_EXPERT = {
    **_weights(_MLP + "shared_expert.", shared_gate="gate_proj", shared_up="up_proj", shared_down="down_proj"),
    "shared_expert_gate": _MLP + "shared_expert_gate.weight",
}
"""Shared expert times the sigmoid of a product."""

GATED_DELTA = {
    "delta_conv": _LAYER + "linear_attn.conv1d.weight",
    "delta_decay": _LAYER + "linear_attn.A_log",
    "delta_decay_bias": _LAYER + "linear_attn.dt_bias",
    "delta_norm": _LAYER + "linear_attn.norm.weight",
    "delta_out": _LAYER + "linear_attn.out_proj.weight",
}
"""Gated delta layers, without their projections."""

KIMI_DELTA = {
    **_weights(_ATTENTION, kda_q="q_proj", kda_k="k_proj", kda_v="v_proj", kda_b="b_proj", kda_out="o_proj"),
    **_weights(_ATTENTION, kda_q_conv="q_conv1d", kda_k_conv="k_conv1d", kda_v_conv="v_conv1d", kda_norm="o_norm"),
    "kda_decay": _ATTENTION + "A_log",
    "kda_decay_bias": _ATTENTION + "dt_bias",
}
"""Kimi delta layers, without the projections of decays and output gates."""

MAMBA2 = {
    **_weights(_LAYER + "mamba.", mamba_in="in_proj", mamba_conv="conv1d", mamba_norm="norm", mamba_out="out_proj"),
    "mamba_conv_bias": _LAYER + "mamba.conv1d.bias",
    "mamba_decay": _LAYER + "mamba.A_log",
    "mamba_step_bias": _LAYER + "mamba.dt_bias",
    "mamba_skip": _LAYER + "mamba.D",
}
"""Mamba-2 layers."""

SELECTION_BIAS = {"selection_bias": _MLP + "gate.e_score_correction_bias"}
"""Bias of an expert's score that affects selection but not the weight."""

BLOCK_SPARSE_EXPERTS = {
    "router": _LAYER + "block_sparse_moe.gate.weight",
    **_weights(_LAYER + "block_sparse_moe.experts.{expert}.", expert_gate="w1", expert_up="w3", expert_down="w2"),
}
"""Router and experts under Mixtral's names."""

GRANITE_EXPERTS = {
    "router": _LAYER + "block_sparse_moe.router.layer.weight",
    **_weights(_LAYER + "block_sparse_moe.", expert_gate="input_linear", expert_up="input_linear"),
    "expert_down": _LAYER + "block_sparse_moe.output_linear.weight",
}
"""Router, and experts in two tensors, under Granite's names: `fused_out_in`."""

LATENT_MODEL = DECODER | LATENT_ATTENTION | DENSE_MLP | EXPERTS | SELECTION_BIAS | SHARED_EXPERTS
"""Latent attention, dense first layers, a router with a selection bias, and shared experts."""

_MTP = {
    **_weights("mtp.", embedding_norm="pre_fc_norm_embedding", hidden_norm="pre_fc_norm_hidden"),
    **_weights("mtp.", fc="fc", draft_norm="norm"),
    **moved(DECODER | ATTENTION | EXPERTS | GATED_SHARED_EXPERT, _LAYER, "mtp.layers.0."),
}
MTP_FORMS = (_MTP, _MTP | moved(FUSED_EXPERTS, _LAYER, "mtp.layers.0."))
"""A prediction layer outside of the decoder: full attention and experts, in both forms of experts."""
