"""A checkpoint in plain numpy, float64, from its files: what its routers choose, and how likely it finds tokens.

No jax, no cache, no batch. And the law that all routing is held to: a row is the reference's, or reported missing, or
decides a tie.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from rayserve_moe.requests.records import RoutedExperts

TIE_GAP = 1e-5
MAX_TIED_PART = 1e-3


@dataclass
class Tally:
    """Rows (of one token in one layer) that were compared, and those of them that differ where ranks tie."""

    compared: int = 0
    tied: int = 0

    def check(self) -> None:
        """Assert that ties excuse hardly anything."""
        assert self.compared, "nothing was compared"
        assert self.tied <= MAX_TIED_PART * self.compared, f"{self.tied} of {self.compared} rows are excused as ties"


class RouterReference:
    """Rows [T, M, k] of any token ids, with the smallest gap of probability between neighbouring ranks [T, M]."""

    def __init__(self, checkpoint: Path) -> None:
        self._config = json.loads((checkpoint / "config.json").read_bytes())
        weights = load_file(checkpoint / "model.safetensors")
        self._weights = {name: array.astype(np.float64) for name, array in weights.items()}
        self._known: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def rows(self, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Run the model over `token_ids`, every one of them fed."""
        rows, gaps, _ = self._all(token_ids)
        return rows, gaps

    def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-probs [T - 1] of every token but the first, given those before it."""
        return self.all_logprobs(token_ids)[np.arange(len(token_ids) - 1), list(token_ids[1:])]

    def all_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-probs [T - 1, V] of every token of the vocabulary after each but the last."""
        head = "model.embed_tokens" if self._config["tie_word_embeddings"] else "lm_head"
        return np.log(_softmax(self._project(self.states(token_ids)[:-1], head)))

    def states(self, token_ids: Sequence[int]) -> np.ndarray:
        """Hidden states [T, D] after the last layer and its norm."""
        return self._norm(self._all(token_ids)[2], "model.norm")

    def check(self, token_ids: Sequence[int], routing: RoutedExperts, tally: Tally) -> None:
        """Assert that every row of `routing`, of the sequence `token_ids`, is right or reported missing."""
        end = routing.start + len(routing.rows)
        rows, gaps = (each[routing.start : end] for each in self.rows(token_ids[:end]))
        is_known = np.ones(len(routing.rows), bool)
        for first, last in routing.missing:
            is_known[first - routing.start : last - routing.start] = False
        differs = (routing.rows != rows).any(axis=-1) & is_known[:, None]
        assert not (differs & (gaps >= TIE_GAP)).any(), f"wrong rows at {np.flatnonzero(differs.any(-1))}"
        tally.compared += int(is_known.sum()) * rows.shape[1]
        tally.tied += int(differs.sum())

    def _all(self, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        key = tuple(token_ids)
        if key not in self._known:
            self._known[key] = self._run(np.asarray(token_ids))
        return self._known[key]

    def _run(self, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        hidden = self._weights["model.embed_tokens.weight"][token_ids]
        rows, gaps = [], []
        for layer in range(self._config["num_hidden_layers"]):
            hidden, chosen, gap = self._layer(hidden, f"model.layers.{layer}")
            if chosen is not None:
                rows.append(chosen)
                gaps.append(gap)
        return np.stack(rows, axis=1), np.stack(gaps, axis=1), hidden

    def _layer(self, hidden: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        hidden = hidden + self._attend(self._norm(hidden, f"{name}.input_layernorm"), f"{name}.self_attn")
        normed = self._norm(hidden, f"{name}.post_attention_layernorm")
        if f"{name}.mlp.gate.weight" not in self._weights:
            return hidden + self._mlp(normed, f"{name}.mlp"), None, None
        out, chosen, gap = self._experts(normed, f"{name}.mlp")
        return hidden + out, chosen, gap

    def _norm(self, values: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((values**2).mean(axis=-1, keepdims=True) + self._config["rms_norm_eps"])
        return values / scale * self._weights[f"{name}.weight"]

    def _project(self, values: np.ndarray, name: str) -> np.ndarray:
        return values @ self._weights[f"{name}.weight"].T

    def _attend(self, hidden: np.ndarray, name: str) -> np.ndarray:
        num_tokens, width = len(hidden), self._config["head_dim"]
        query, key, value = (
            self._project(hidden, f"{name}.{part}_proj").reshape(num_tokens, -1, width) for part in "qkv"
        )
        query, key = (
            self._rotate(self._norm(heads, f"{name}.{part}_norm")) for part, heads in (("q", query), ("k", key))
        )
        shared_by = query.shape[1] // key.shape[1]
        key, value = (np.repeat(heads, shared_by, axis=1) for heads in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(width)
        scores = np.where(np.tri(num_tokens, dtype=bool), scores, -np.inf)
        return self._project(
            np.einsum("hqk,khd->qhd", _softmax(scores), value).reshape(num_tokens, -1), f"{name}.o_proj"
        )

    def _rotate(self, heads: np.ndarray) -> np.ndarray:
        half = heads.shape[-1] // 2
        angles = np.arange(len(heads))[:, None] * self._config["rope_theta"] ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = heads[..., :half], heads[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _mlp(self, hidden: np.ndarray, name: str) -> np.ndarray:
        gate = self._project(hidden, f"{name}.gate_proj")
        return self._project(gate / (1 + np.exp(-gate)) * self._project(hidden, f"{name}.up_proj"), f"{name}.down_proj")

    def _experts(self, hidden: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        top_k = self._config["num_experts_per_tok"]
        probabilities = _softmax(self._project(hidden, f"{name}.gate"))
        order = np.argsort(-probabilities, axis=-1, kind="stable")[:, : top_k + 1]
        ranked = np.take_along_axis(probabilities, order, axis=-1)
        chosen, weights = order[:, :top_k], ranked[:, :top_k]
        if self._config["norm_topk_prob"]:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        out = np.zeros_like(hidden)
        for expert in range(self._config["num_experts"]):
            tokens, picks = np.nonzero(chosen == expert)
            out[tokens] += weights[tokens, picks, None] * self._mlp(hidden[tokens], f"{name}.experts.{expert}")
        return out, chosen, -np.diff(ranked, axis=-1).max(axis=-1)


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)
