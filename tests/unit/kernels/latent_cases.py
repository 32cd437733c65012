"""Multi-head latent attention by its definition: float64, keys and values of every head expanded, no cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class LatentModel:
    """Widths of one layer, and how its weights are drawn."""

    hidden: int = 24
    heads: int = 4
    q_lora: int | None = 20
    kv_lora: int = 16
    nope: int = 8
    rope: int = 4
    value: int = 12
    bias: bool = False
    score_scale: float | None = None
    interleaved: bool = False
    query_scale: tuple[float, int] | None = None
    """beta and length of `spec.QueryScaleSpec`."""
    num_layers: int = 2
    norm_eps: float = 0.1
    seed: int = field(default=5, repr=False)

    @property
    def scale(self) -> float:
        return (self.nope + self.rope) ** -0.5 if self.score_scale is None else self.score_scale

    def weights(self) -> Weights:
        """Parameters of all layers, under the names of `model.parameters`."""
        shapes = {
            "kv_a_LDC": (self.hidden, self.kv_lora + self.rope),
            "kv_a_norm_LC": (self.kv_lora,),
            "k_b_LHC": (self.heads * self.nope, self.kv_lora),
            "v_b_LHC": (self.heads * self.value, self.kv_lora),
            "o_LHD": (self.heads * self.value, self.hidden),
        }
        queries = self.heads * (self.nope + self.rope)
        if self.q_lora is None:
            shapes |= {"q_LDH": (self.hidden, queries)}
        else:
            shapes |= {"q_a_LDR": (self.hidden, self.q_lora), "q_a_norm_LR": (self.q_lora,)}
            shapes |= {"q_b_LRH": (self.q_lora, queries)}
        if self.bias:
            shapes |= {"kv_a_bias_LC": (self.kv_lora + self.rope,)}
            shapes |= {"q_a_bias_LR": (self.q_lora,)} if self.q_lora else {}
        generator = np.random.default_rng(self.seed)
        return {
            name: (generator.standard_normal((self.num_layers, *shape)) * 0.3 + ("norm" in name)).astype(np.float32)
            for name, shape in shapes.items()
        }

    def dense(self, hidden_TD: np.ndarray, weights: Weights, *, layer: int, theta: float) -> np.ndarray:
        """Output products [T, D] of the tokens of one sequence, from its first one on."""
        w = {name: array[layer].astype(np.float64) for name, array in weights.items()}
        x, num_tokens = hidden_TD.astype(np.float64), len(hidden_TD)
        if self.q_lora is None:
            queries = x @ w["q_LDH"]
        else:
            queries = self._norm(x @ w["q_a_LDR"] + w.get("q_a_bias_LR", 0), w["q_a_norm_LR"]) @ w["q_b_LRH"]
        queries = queries.reshape(num_tokens, self.heads, -1)
        latents, shared = np.split(self.cached(hidden_TD, weights, layer=layer, theta=theta), [self.kv_lora], axis=1)
        plain = (latents @ w["k_b_LHC"].T).reshape(num_tokens, self.heads, self.nope)
        values = (latents @ w["v_b_LHC"].T).reshape(num_tokens, self.heads, self.value)
        keys = np.concatenate([plain, np.repeat(shared[:, None], self.heads, axis=1)], axis=-1)
        queries = np.concatenate(
            [queries[..., : self.nope], turned(queries[..., self.nope :], theta=theta, interleaved=self.interleaved)],
            axis=-1,
        )
        if self.query_scale is not None:
            beta, length = self.query_scale
            queries = queries * (1 + beta * np.log(1 + np.arange(num_tokens) // length))[:, None, None]
        scores = np.einsum("thd,shd->hts", queries, keys) * self.scale
        scores[:, np.triu(np.ones((num_tokens, num_tokens), bool), 1)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return np.einsum("hts,shv->thv", shares, values).reshape(num_tokens, -1) @ w["o_LHD"]

    def cached(self, hidden_TD: np.ndarray, weights: Weights, *, layer: int, theta: float) -> np.ndarray:
        """Normed latents and rotated keys [T, C + r]."""
        w = {name: array[layer].astype(np.float64) for name, array in weights.items()}
        compressed = hidden_TD.astype(np.float64) @ w["kv_a_LDC"] + w.get("kv_a_bias_LC", 0)
        latents = self._norm(compressed[:, : self.kv_lora], w["kv_a_norm_LC"])
        keys = turned(compressed[:, None, self.kv_lora :], theta=theta, interleaved=self.interleaved)[:, 0]
        return np.concatenate([latents, keys], axis=1)

    def _norm(self, rows: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return rows / np.sqrt((rows * rows).mean(-1, keepdims=True) + self.norm_eps) * scale


def turned(heads: np.ndarray, *, theta: float, interleaved: bool) -> np.ndarray:
    """Each pair of elements [T, heads, r] is a complex number, turned by position times its frequency."""
    width = heads.shape[-1]
    pairs = heads.reshape(*heads.shape[:-1], -1, 2) if interleaved else np.stack(np.split(heads, 2, -1), -1)
    angles = np.arange(len(heads))[:, None, None] * theta ** (-np.arange(0, width, 2) / width)
    product = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    parts = (product.real, product.imag)
    return np.stack(parts, -1).reshape(heads.shape) if interleaved else np.concatenate(parts, -1)
