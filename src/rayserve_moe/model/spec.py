"""A model as data: the knobs that tell one MoE family from another. No arrays and no code live here."""

from __future__ import annotations

from dataclasses import dataclass

from rayserve_moe.requests import RoutingLayout


class UnsupportedModelError(ValueError):
    """A checkpoint asks for something this build does not compute; the message names the key and its value."""


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention. `qk_norm`: `none` or `head` (per head, before rope)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    qk_norm: str = "none"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding over the whole head in half-split pairs."""

    theta: float


@dataclass(frozen=True)
class RouterSpec:
    """Softmax over the experts, then top-k, then renormalised where `renormalize`. Always float32."""

    num_experts: int
    top_k: int
    renormalize: bool


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only MoE language model. Widths are in elements; layer ids count all hidden layers."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    dense_layer_ids: tuple[int, ...]
    dense_intermediate_size: int
    expert_intermediate_size: int
    attention: AttentionSpec
    rope: RopeSpec
    router: RouterSpec
    norm_eps: float
    tie_embeddings: bool
    max_position_embeddings: int
    checkpoint_dtype: str

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """Layers with experts, ascending."""
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layer_ids)

    @property
    def routing_layout(self) -> RoutingLayout:
        """How the routing rows of this model are shaped."""
        return RoutingLayout(self.num_layers, self.moe_layer_ids, self.router.num_experts, self.router.top_k)
