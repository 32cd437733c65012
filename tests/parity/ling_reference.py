"""Ling 2.0 in NumPy float64: transformers has no implementation of it.

Written from the published description of the model (the model card, the config keys, and the modelling file that comes
with the published checkpoints), independently of the code that serves it: grouped-query attention with RMS norms of
each head's query and key before a rotation of its first half; a sigmoid router whose scores, with a bias, choose four
of eight groups by the sum of their best two, and the best experts within them; weights without the bias, by their sum,
times a factor; and an expert that every token takes.
"""

# T tokens   D model width   H query heads   G KV heads   h head width   E experts   K experts per token

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rayserve_moe.checkpoints.synthetic_tokenizer import write_tokenizer
from tests.parity.scored import Scored
from tests.support.models.families import FamilyCase


class LingReference:
    """A random model of a case, with every norm and bias away from its initial value."""

    def __init__(self, case: FamilyCase) -> None:
        self.config = {"num_shared_experts": 1, **case.config}
        self.vocab_size: int = case.config["vocab_size"]
        self.tensors = _random_tensors(self.config, np.random.default_rng([case.variant, 5]))
        self._weights = {name: array.astype(np.float64) for name, array in self.tensors.items()}

    def save(self, directory: Path) -> Path:
        """Write the checkpoint in the published names, with a tokenizer."""
        config = {**self.config, "architectures": ["BailingMoeV2ForCausalLM"], "dtype": "float32"}
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(self.tensors, directory / "model.safetensors")
        write_tokenizer(directory, self.vocab_size)
        return directory

    def selection_bias(self) -> np.ndarray:
        """What is added to scores to choose, float32 [M, E]."""
        return np.stack([array for name, array in self.tensors.items() if name.endswith("expert_bias")])

    def greedy(self, prompt: Sequence[int], *, count: int) -> list[int]:
        """Continue `prompt` by `count` greedy tokens."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.score(ids).logits[-1].argmax()))
        return ids[len(prompt) :]

    def score(self, token_ids: Sequence[int]) -> Scored:
        """Run all positions of one sequence at once."""
        weights, eps = self._weights, self.config["rms_norm_eps"]
        hidden_TD = weights["model.word_embeddings.weight"][np.asarray(token_ids)]
        routed = []
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            normed_TD = _norm(hidden_TD, weights[name + "input_layernorm.weight"], eps)
            hidden_TD = hidden_TD + self._attend(name + "attention.", normed_TD)
            normed_TD = _norm(hidden_TD, weights[name + "post_attention_layernorm.weight"], eps)
            if layer < self.config["first_k_dense_replace"]:
                hidden_TD = hidden_TD + self._mlp(name + "mlp.", normed_TD)
                continue
            added_TD, *found = self._mix(name + "mlp.", normed_TD)
            hidden_TD = hidden_TD + added_TD
            routed.append(found)
        hidden_TD = _norm(hidden_TD, weights["model.norm.weight"], eps)
        tied = self.config.get("tie_word_embeddings", False)
        head_VD = weights["model.word_embeddings.weight" if tied else "lm_head.weight"]
        return Scored(hidden_TD @ head_VD.T, *(np.stack(of_layers, 1) for of_layers in zip(*routed, strict=True)))

    def own_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the logits of `score` [T, V]: this implementation has no float32."""
        return self.score(token_ids).logits

    def _attend(self, name: str, hidden_TD: np.ndarray) -> np.ndarray:
        config, weights = self.config, self._weights
        num_q, num_kv, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        fused = hidden_TD @ weights[name + "query_key_value.weight"].T
        fused = fused + weights.get(name + "query_key_value.bias", 0.0)
        heads = fused.reshape(len(hidden_TD), num_q + 2 * num_kv, width)
        q_THh, k_TGh, v_TGh = np.split(heads, [num_q, num_q + num_kv], axis=1)
        if config.get("use_qk_norm", True):
            q_THh = _norm(q_THh, weights[name + "query_layernorm.weight"], config["rms_norm_eps"])
            k_TGh = _norm(k_TGh, weights[name + "key_layernorm.weight"], config["rms_norm_eps"])
        rotated = int(width * config.get("partial_rotary_factor", 1.0))
        q_THh, k_TGh = (_rotate(part, rotated, config["rope_theta"]) for part in (q_THh, k_TGh))
        k_THh, v_THh = (np.repeat(part, num_q // num_kv, axis=1) for part in (k_TGh, v_TGh))
        scores_HTT = np.einsum("qhw,khw->hqk", q_THh, k_THh) / np.sqrt(width)
        scores_HTT = np.where(np.tri(len(hidden_TD), dtype=bool), scores_HTT, -np.inf)
        found = np.einsum("hqk,khw->qhw", _softmax(scores_HTT), v_THh).reshape(len(hidden_TD), -1)
        return found @ weights[name + "dense.weight"].T + weights.get(name + "dense.bias", 0.0)

    def _mix(self, name: str, hidden_TD: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the addend, router logits, chosen experts and their weights."""
        config, weights = self.config, self._weights
        logits_TE = hidden_TD @ weights[name + "gate.weight"].T
        scores_TE = 1 / (1 + np.exp(-logits_TE))
        biased_TE = scores_TE + weights[name + "gate.expert_bias"]
        groups = biased_TE.reshape(len(hidden_TD), config["n_group"], -1)
        best_two = np.sort(groups, axis=-1)[..., -2:].sum(-1)
        kept = np.argsort(-best_two, axis=-1)[:, : config["topk_group"]]
        is_kept = np.zeros(best_two.shape, bool)
        np.put_along_axis(is_kept, kept, True, axis=-1)
        allowed_TE = np.where(is_kept[..., None], groups, -np.inf).reshape(biased_TE.shape)
        ids_TK = np.argsort(-allowed_TE, axis=-1)[:, : config["num_experts_per_tok"]]
        weights_TK = np.take_along_axis(scores_TE, ids_TK, axis=-1)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdims=True) * config["routed_scaling_factor"]
        added_TD = self._mlp(name + "shared_experts.", hidden_TD) if config["num_shared_experts"] else 0.0
        for expert in range(config["num_experts"]):
            share_T = np.where(ids_TK == expert, weights_TK, 0.0).sum(-1)
            added_TD = added_TD + share_T[:, None] * self._mlp(f"{name}experts.{expert}.", hidden_TD)
        return np.asarray(added_TD), logits_TE, ids_TK, weights_TK

    def _mlp(self, name: str, hidden_TD: np.ndarray) -> np.ndarray:
        gate, up, down = (self._weights[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
        gated = hidden_TD @ gate.T
        return (gated / (1 + np.exp(-gated)) * (hidden_TD @ up.T)) @ down.T


def _norm(values: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return values / np.sqrt(np.mean(values**2, axis=-1, keepdims=True) + eps) * scale


def _softmax(values: np.ndarray) -> np.ndarray:
    exponents = np.exp(values - values.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


def _rotate(heads: np.ndarray, width: int, theta: float) -> np.ndarray:
    """Rotate pairs (i, i + width / 2) of the first `width` elements of each head [T, heads, h] by position."""
    angles = np.arange(len(heads))[:, None, None] * theta ** (-np.arange(0, width, 2) / width)
    first, second, rest = np.split(heads, [width // 2, width], axis=-1)
    turned = first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)
    return np.concatenate([*turned, rest], axis=-1)


def _random_tensors(config: dict[str, Any], generator: np.random.Generator) -> dict[str, np.ndarray]:
    width, head_dim = config["hidden_size"], config["head_dim"]
    num_q, num_kv = config["num_attention_heads"], config["num_key_value_heads"]

    def mlp(name: str, inner: int) -> dict[str, tuple[int, ...]]:
        shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        return {f"{name}{part}_proj.weight": shape for part, shape in shapes.items()}

    shapes: dict[str, tuple[int, ...]] = {"model.word_embeddings.weight": (config["vocab_size"], width)}
    shapes |= {"model.norm.weight": (width,)}
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        name, rows = f"model.layers.{layer}.", (num_q + 2 * num_kv) * head_dim
        shapes |= {name + "input_layernorm.weight": (width,), name + "post_attention_layernorm.weight": (width,)}
        shapes |= {name + "attention.query_key_value.weight": (rows, width)}
        shapes |= {name + "attention.dense.weight": (width, num_q * head_dim)}
        if config.get("use_qk_norm", True):
            shapes |= {f"{name}attention.{part}_layernorm.weight": (head_dim,) for part in ("query", "key")}
        if config.get("use_qkv_bias", False):
            shapes |= {name + "attention.query_key_value.bias": (rows,)}
        if config.get("use_bias", False):
            shapes |= {name + "attention.dense.bias": (width,)}
        if layer < config["first_k_dense_replace"]:
            shapes |= mlp(name + "mlp.", config["intermediate_size"])
            continue
        inner = config["moe_intermediate_size"]
        shapes |= {name + "mlp.gate.weight": (config["num_experts"], width)}
        shapes |= {name + "mlp.gate.expert_bias": (config["num_experts"],)}
        for expert in range(config["num_experts"]):
            shapes |= mlp(f"{name}mlp.experts.{expert}.", inner)
        if config["num_shared_experts"]:
            shapes |= mlp(name + "mlp.shared_experts.", inner * config["num_shared_experts"])
    return {name: _draw(name, shape, generator) for name, shape in shapes.items()}


def _draw(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    drawn = generator.standard_normal(shape)
    if "norm" in name:
        return (1 + 0.2 * drawn).astype(np.float32)
    return ((0.1 if name.endswith("expert_bias") else 0.3 if name.endswith("bias") else 0.12) * drawn).astype(
        np.float32
    )
