"""A layer for multi-token prediction behind the calculator's last one (arXiv:2412.19437, 2.2), under the key names of
DeepSeek-V3 and GLM-4.5: `model.layers.4.{enorm,hnorm,eh_proj,shared_head.norm}`, and those of a layer of Qwen3-MoE."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from examples.calculator.drafting import Form, drawn
from examples.calculator.export import CONFIG
from examples.calculator.network import Scores, Weights, apply_experts
from rayserve_moe.kernels.reference.layers import rms_norm
from rayserve_moe.model.draft_spec import prediction_rules, prediction_spec
from rayserve_moe.model.families.qwen3_moe import CHECKPOINT_RULES
from rayserve_moe.model.spec import ModelSpec

WITH_LAYER = {**CONFIG, "num_nextn_predict_layers": 1}
OF_LAYER = ("gqa", "mlp_norm", "experts")
NEXT_SHARE = 0.1
"""How much of the embedding of the next token there is in the first stream, beside the target's feature."""


class Prediction(Form):
    """The layer; embedding and head are the target's."""

    words, config = tuple(range(CONFIG["vocab_size"])), WITH_LAYER
    rules = prediction_rules(CHECKPOINT_RULES, CONFIG["num_hidden_layers"])

    def __init__(self, target: ModelSpec) -> None:
        super().__init__(target, prediction_spec(target))

    def initial(self, target: Weights, *, seed: int) -> Weights:
        """The target's last layer, after little of the next token beside the feature."""
        head, width = drawn(self.spec, seed=seed), self.target.hidden_size
        own = head["draft"]
        own["fc_AD"] = jnp.concatenate([NEXT_SHARE * own["fc_AD"][:width], jnp.eye(width)])
        last = {group: {name: values[-1:] for name, values in target[group].items()} for group in OF_LAYER}
        return {**last, "draft": own}

    def first_features(self, head: Weights, target: Weights, scores: Scores) -> jax.Array:
        """What the target's head reads."""
        return rms_norm(scores.entering[-1], target["embedding"]["final_norm_D"], self.target.norm_eps)

    def inputs(self, head: Weights, features: jax.Array, embedded: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Both normed and projected, and that normed for the attention."""
        own, eps = head["draft"], self.target.norm_eps
        joined = [rms_norm(embedded, own["embedding_norm_D"], eps), rms_norm(features, own["hidden_norm_D"], eps)]
        stream = jnp.concatenate(joined, axis=-1) @ own["fc_AD"]
        return stream, rms_norm(stream, head["gqa"]["norm_LD"][0], eps)

    def after_attention(self, head: Weights, hidden: jax.Array) -> jax.Array:
        """Experts, and the norm ahead of the head."""
        rows, width, _ = hidden.shape
        normed = rms_norm(hidden, head["mlp_norm"]["scale"][0], self.target.norm_eps).reshape(rows * width, -1)
        experts = {name: values[0] for name, values in head["experts"].items()}
        chosen = jnp.ones(rows * width, bool)
        out, _ = apply_experts(normed, experts, chosen, spec=self.target, places=int(self.capacity * rows * width))
        return rms_norm(hidden + out.reshape(hidden.shape), head["draft"]["norm_D"], self.target.norm_eps)

    def logits(self, head: Weights, target: Weights, features: jax.Array) -> jax.Array:
        """The target's head."""
        return features @ target["embedding"]["head_VD"].T
