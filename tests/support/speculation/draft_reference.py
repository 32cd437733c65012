"""Draft models in plain numpy, float64, from their files and the published descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.support.routing.router_reference import RouterReference

AUX_KEY, UP = "eagle_aux_hidden_state_layer_ids", ".mlp.up_proj.weight"


class DraftReference:
    """What a draft model says after the tokens of a sequence, greedily and with nothing cached.

    `head` is that of EAGLE or EAGLE3 (arXiv:2401.15077, 2503.01840); without one, the target's own prediction layer
    (DeepSeek-V3, arXiv:2412.19437, 2.2).
    """

    def __init__(self, target: Path, head: Path | None = None) -> None:
        self._target = _Layers(target)
        self._head = _Layers(head) if head else self._target
        self._has_head = head is not None
        config = self._head.config
        self._aux = [1 + i for i in config.get("eagle_config", {}).get(AUX_KEY, ())] or config.get(AUX_KEY, ())

    def ahead(self, token_ids: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Of `count` drafts: the features [count, D] and logits [count, V] that they are made of, and their ids."""
        known, made = list(token_ids[1:]), self._features_of(token_ids[:-1])
        features, logits, drafts = [], [], []
        for _ in range(count):
            out = self._step(np.asarray(known), made)
            features.append(out[-1])
            logits.append(self._logits(out[-1:])[0])
            drafts.append(self._word(int(logits[-1].argmax())))
            known.append(drafts[-1])
            made = np.concatenate([made, out[-1:]])
        return np.stack(features), np.stack(logits), drafts

    def _features_of(self, token_ids: Sequence[int]) -> np.ndarray:
        entering = self._target.entering(np.asarray(token_ids))
        if self._aux:
            return self._head.project(np.concatenate([entering[layer] for layer in self._aux], axis=1), "fc")
        return self._target.norm(entering[-1], "model.norm")

    def _step(self, token_ids: np.ndarray, features: np.ndarray) -> np.ndarray:
        embedded = self._target.weights["model.embed_tokens.weight"][token_ids]
        if not self._has_head:
            return self._predicted(embedded, features)
        head = self._head
        (layer,) = (name.removesuffix(UP) for name in head.weights if name.endswith(UP))
        if self._aux:
            joined = [head.norm(embedded, f"{layer}.input_layernorm"), head.norm(features, f"{layer}.hidden_norm")]
            stream = joined[1] if head.config.get("norm_before_residual") else features
            read = np.concatenate(joined, axis=1)
        else:
            stream = head.project(np.concatenate([embedded, features], axis=1), "fc") + head.weights["fc.bias"]
            read = stream
        hidden = stream + head.attend(read, f"{layer}.self_attn")
        return hidden + head.mlp(head.norm(hidden, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")

    def _predicted(self, embedded: np.ndarray, features: np.ndarray) -> np.ndarray:
        target = self._target
        name = f"model.layers.{target.config['num_hidden_layers']}"
        joined = [target.norm(embedded, f"{name}.enorm"), target.norm(features, f"{name}.hnorm")]
        hidden = target.layer(target.project(np.concatenate(joined, axis=1), f"{name}.eh_proj"), name)
        return target.norm(hidden, f"{name}.shared_head.norm")

    def _logits(self, features: np.ndarray) -> np.ndarray:
        if self._aux:
            return self._head.project(self._head.norm(features, "norm"), "lm_head")
        return self._target.project(features, "lm_head")

    def _word(self, draft: int) -> int:
        return draft + int(self._head.weights["d2t"][draft]) if "d2t" in self._head.weights else draft


class _Layers(RouterReference):
    """The parts of a checkpoint; norms that it does not have change nothing."""

    @property
    def config(self) -> dict:
        return self._config

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return self._weights

    def entering(self, token_ids: np.ndarray) -> list[np.ndarray]:
        """What enters each layer, and what leaves the last."""
        entering = [self._weights["model.embed_tokens.weight"][token_ids]]
        for layer in range(self._config["num_hidden_layers"]):
            entering.append(self._layer(entering[-1], f"model.layers.{layer}")[0])
        return entering

    def layer(self, hidden: np.ndarray, name: str) -> np.ndarray:
        return self._layer(hidden, name)[0]

    def norm(self, values: np.ndarray, name: str) -> np.ndarray:
        return self._norm(values, name)

    def project(self, values: np.ndarray, name: str) -> np.ndarray:
        return self._project(values, name)

    def attend(self, hidden: np.ndarray, name: str) -> np.ndarray:
        return self._attend(hidden, name)

    def mlp(self, hidden: np.ndarray, name: str) -> np.ndarray:
        return self._mlp(hidden, name)

    def _norm(self, values: np.ndarray, name: str) -> np.ndarray:
        return super()._norm(values, name) if f"{name}.weight" in self._weights else values
