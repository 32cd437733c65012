"""An EAGLE3 head for the calculator: it reads what enters three layers, and has words of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.calculator.drafting import Form, drawn
from examples.calculator.network import Scores, Weights
from rayserve_moe.kernels.reference.layers import rms_norm
from rayserve_moe.model.draft_spec import EAGLE_TENSORS, MAP, eagle_rules, eagle_spec
from rayserve_moe.model.spec import ModelSpec

WORDS = tuple(sorted(b"\n#*+-0123456789="))
"""The bytes that problems and answers are made of: the head's vocabulary."""
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "vocab_size": 256,
    "draft_vocab_size": len(WORDS),
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "norm_output": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}
LAYER = "midlayer."
TOP = ("fc", "head", "draft_norm")
NAMES = [MAP, *(end if role in TOP else LAYER + end for role, end in EAGLE_TENSORS.items() if "bias" not in role)]


class Eagle3(Form):
    """The head, with published key names."""

    words, config, rules = WORDS, CONFIG, eagle_rules(NAMES)

    def __init__(self, target: ModelSpec) -> None:
        super().__init__(target, eagle_spec(CONFIG, target, algorithm="EAGLE3", names=NAMES))

    def initial(self, target: Weights, *, seed: int) -> Weights:
        """All of it drawn."""
        return drawn(self.spec, seed=seed)

    def first_features(self, head: Weights, target: Weights, scores: Scores) -> jax.Array:
        """What enters its layers, joined."""
        joined = jnp.concatenate([scores.entering[layer] for layer in self.spec.aux_layers], axis=-1)
        return joined @ head["draft"]["fc_AD"]

    def inputs(self, head: Weights, features: jax.Array, embedded: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The features, and both normed side by side."""
        eps = self.spec.layer.norm_eps
        norms = head["gqa"]["norm_LD"][0], head["draft"]["hidden_norm_D"]
        joined = [rms_norm(embedded, norms[0], eps), rms_norm(features, norms[1], eps)]
        return features, jnp.concatenate(joined, axis=-1)

    def after_attention(self, head: Weights, hidden: jax.Array) -> jax.Array:
        """A dense MLP."""
        dense = {name: matrix[0] for name, matrix in head["dense"].items()}
        normed = rms_norm(hidden, head["mlp_norm"]["scale"][0], self.spec.layer.norm_eps)
        return hidden + jax.nn.silu(normed @ dense["gate_NDI"]) * (normed @ dense["up_NDI"]) @ dense["down_NID"]

    def logits(self, head: Weights, target: Weights, features: jax.Array) -> jax.Array:
        """A norm and a head of its own."""
        return rms_norm(features, head["draft"]["norm_D"], self.spec.layer.norm_eps) @ head["draft"]["head_VD"].T

    def extra_tensors(self) -> dict[str, np.ndarray]:
        """Which words of the target its words are."""
        offsets = np.array(WORDS, np.int64) - np.arange(len(WORDS))
        return {MAP: offsets, "t2d": np.isin(np.arange(self.target.vocab_size), WORDS)}
