"""A model as data: the knobs in which MoE families differ. No arrays live here.

The knobs cover the twelve families that the project aims at. A value that no code computes yet is refused by name when
a spec is built, so that a family can be described before it is served, and never served wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from rayserve_moe.requests import RoutingLayout


class UnsupportedModelError(ValueError):
    """A checkpoint asks for something this build does not compute; the message names the key and its value."""


def _only(default: Any, *others: Any) -> Any:
    """A knob of which only `default` and `others` are computed."""
    return field(default=default, metadata={"computed": (default, *others)})


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of every layer. `kind`: `gqa` or `mla`; `qk_norm`: `none`, `head` (per head) or `full`.

    `bias` is that of q, k, v and o together. `windows` gives a window per layer (empty: full attention everywhere),
    `score_scale` None stands for head_dim ** -0.5.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kind: str = _only("gqa")
    bias: bool = False
    qk_norm: str = _only("none", "head")
    qk_norm_after_rope: bool = _only(False)
    clip_qkv: float | None = _only(None)
    sinks: bool = _only(False)
    windows: tuple[int, ...] = _only(())
    score_scale: float | None = _only(None)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding. `rotary_dim` None rotates the whole head; `scaling`: `default`, `yarn` or `ntk_alpha`."""

    theta: float
    rotary_dim: int | None = _only(None)
    interleaved: bool = _only(False)
    scaling: str = _only("default")


@dataclass(frozen=True)
class RouterSpec:
    """From logits (always float32) to experts and weights.

    `score`: `softmax`, `sigmoid` or `topk_softmax`; then top-k (within `num_groups` groups of which `groups_kept` are
    kept by `group_score`), then `renormalize`, then times `scale`.
    """

    num_experts: int
    top_k: int
    renormalize: bool
    score: str = _only("softmax")
    logit_bias: bool = _only(False)
    selection_bias: bool = _only(False)
    num_groups: int = _only(1)
    groups_kept: int = _only(1)
    group_score: str = _only("max")
    renormalize_floor: float = _only(0.0)
    scale: float = _only(1.0)


@dataclass(frozen=True)
class ExpertSpec:
    """The experts' MLPs. `layout`: `per_expert`, `fused_out_in` or `fused_in_out_interleaved`;
    `activation`: `silu` or `clamped_silu`; `shared`: `none`, `plain` or `sigmoid_gated` of width `shared_size`."""

    intermediate_size: int
    layout: str = _only("per_expert")
    bias: bool = _only(False)
    activation: str = _only("silu")
    shared: str = _only("none")
    shared_size: int = _only(0)


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only MoE language model. Widths are in elements; layer ids count all hidden layers.

    Building one raises UnsupportedModelError for a knob whose value is not computed.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    dense_layer_ids: tuple[int, ...]
    dense_intermediate_size: int
    attention: AttentionSpec
    rope: RopeSpec
    router: RouterSpec
    experts: ExpertSpec
    norm_eps: float
    tie_embeddings: bool
    max_position_embeddings: int
    checkpoint_dtype: str
    embedding_multiplier: float = _only(1.0)
    residual_multiplier: float = _only(1.0)
    logits_divisor: float = _only(1.0)

    def __post_init__(self) -> None:
        _refuse_what_is_not_computed(self.family, self)
        if not self.moe_layer_ids:
            raise UnsupportedModelError(f"{self.family}: no layer has experts")
        if self.router.top_k > self.router.num_experts:
            raise UnsupportedModelError(
                f"{self.family}: top_k {self.router.top_k} exceeds {self.router.num_experts} experts"
            )
        if self.attention.num_heads % self.attention.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.family}: {self.attention.num_heads} heads do not divide over "
                f"{self.attention.num_kv_heads} KV heads"
            )

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """Layers with experts, ascending."""
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layer_ids)

    @property
    def routing_layout(self) -> RoutingLayout:
        """How the routing rows of this model are shaped."""
        return RoutingLayout(self.num_layers, self.moe_layer_ids, self.router.num_experts, self.router.top_k)


def _refuse_what_is_not_computed(path: str, spec: Any) -> None:
    for knob in fields(spec):
        value, name = getattr(spec, knob.name), f"{path}.{knob.name}"
        if is_dataclass(value):
            _refuse_what_is_not_computed(name, value)
        elif "computed" in knob.metadata and value not in knob.metadata["computed"]:
            computed = ", ".join(repr(v) for v in knob.metadata["computed"])
            raise UnsupportedModelError(f"{name} = {value!r} is not computed by this build (only {computed})")
