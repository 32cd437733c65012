"""A model as data: the knobs in which MoE families differ. No arrays live here.

The knobs cover the fourteen families that the project aims at. A value that no code computes yet is refused by name
when a spec is built, so that a family can be described before it is served, and never served wrongly.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from rayserve_moe.experts.router_spec import RouterSpec, one_of
from rayserve_moe.requests.records import RoutingLayout


class UnsupportedModelError(ValueError):
    """A checkpoint asks for something this build does not compute; the message names the key and its value."""


DENSE_DRAFTS = ("eagle", "eagle3")
"""Models that draft for others and have no experts themselves."""
BESIDE_LATENT = ("latent", "bias", "output_bias", "score_scale")
"""Knobs of attention that latent attention has; the others stay at their defaults."""


@dataclass(frozen=True)
class LatentSpec:
    """Widths of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), in elements.

    `q_lora_rank` None projects queries from the hidden state directly. A head's query and key have `nope_dim` elements
    without position and then `rope_dim` rotated ones; the rotated key is shared by all heads. The cache holds
    `kv_lora_rank + rope_dim` elements per token. `norm_eps` is that of the latents' RMS norms.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of every layer: grouped-query, or multi-head latent where `latent` is given.

    With `latent`, `num_kv_heads` is 1 (the latent) and `head_dim` is `nope_dim + rope_dim`. `bias` is that of q, k and
    v (of the two down projections with `latent`), `output_bias` that of o. `qk_norm`: `none`, `head` (per head) or
    `full` (the whole projection). `clip_qkv` bounds q, k and v after the norm. `sinks`: one logit per query head, in
    the denominator of the softmax alone. `windows` gives the number of positions that each layer sees, its own
    included, 0 for all of them (empty: all everywhere). `score_scale` None stands for head_dim ** -0.5. `fused_qkv`:
    files hold q, k and v of a layer as rows of one tensor, in this order.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent: LatentSpec | None = None
    bias: bool = False
    output_bias: bool = False
    qk_norm: str = one_of("none", "head", "full")
    qk_norm_after_rope: bool = False
    clip_qkv: float | None = None
    sinks: bool = False
    windows: tuple[int, ...] = ()
    score_scale: float | None = None
    fused_qkv: bool = one_of(False, True)


@dataclass(frozen=True)
class YarnSpec:
    """YaRN (arXiv:2309.00071): frequencies between those of `factor` and of none, by their turns in `original_length`.

    `attention_factor` multiplies cosine and sine. `truncate` rounds the ends of the ramp to whole dimensions.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_dim` elements of a head (None: all; with latent attention its `rope_dim`).

    Pairs are (i, i + half), or (2i, 2i + 1) where `interleaved`. A static NTK scaling is a larger `theta`.
    """

    theta: float
    rotary_dim: int | None = None
    interleaved: bool = False
    yarn: YarnSpec | None = None


@dataclass(frozen=True)
class ExpertSpec:
    """The experts' gated MLPs, and the shared expert of every MoE layer.

    `layout` says how files hold them: `per_expert` tensors, `fused_out_in` (all experts in one tensor, gate and up in
    halves) or `fused_in_out_interleaved` (gate and up in turns, not transposed). `bias`: gate, up and down have one.
    `activation`: `silu`, or `clamped_swiglu` (gpt-oss: gate <= 7, up within 7, gate * sigmoid(1.702 gate) * (up + 1)).
    `shared`: `none`, `plain` or `sigmoid_gated`, of width `shared_size`.
    """

    intermediate_size: int
    layout: str = one_of("per_expert", "fused_out_in", "fused_in_out_interleaved")
    bias: bool = False
    activation: str = one_of("silu", "clamped_swiglu")
    shared: str = one_of("none", "plain", "sigmoid_gated")
    shared_size: int = 0


@dataclass(frozen=True)
class FactorSpec:
    """Constant factors of the residual stream and of the logits (Granite)."""

    embedding_multiplier: float = 1.0
    """Factor of the embedding."""
    residual_multiplier: float = 1.0
    """Factor of what a layer adds to the hidden state."""
    logits_divisor: float = 1.0
    """Logits are divided by it."""


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only MoE language model. Widths are in elements; layer ids count all hidden layers.

    Building one raises UnsupportedModelError for a knob whose value is not computed.
    """

    family: str
    """Name of the family, or of the kind of draft model."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    """Number of hidden layers, with or without experts."""
    dense_layer_ids: tuple[int, ...]
    """Layers without experts, ascending."""
    dense_intermediate_size: int
    """Width of the MLP of a layer without experts; 0 if every layer has experts."""
    attention: AttentionSpec
    rope: RopeSpec
    router: RouterSpec
    experts: ExpertSpec
    norm_eps: float
    tie_embeddings: bool
    """True if the embedding's table is also the head."""
    max_position_embeddings: int
    checkpoint_dtype: str
    """Dtype of the weights in the files."""
    block_dtype: str = ""
    """The 8-bit dtype whose 128 x 128 blocks have scales in the files; empty: none has."""
    factors: FactorSpec = FactorSpec()

    def __post_init__(self) -> None:
        _refuse_what_is_not_computed(self.family, self)
        if not self.moe_layer_ids and self.family not in DENSE_DRAFTS:
            raise UnsupportedModelError(
                f"{self.family}: no layer has experts: all of num_hidden_layers = {self.num_layers} are dense by "
                "first_k_dense_replace, mlp_layer_types, mlp_only_layers, decoder_sparse_step or moe_layer_*"
            )
        if problem := self.router.problem():
            raise UnsupportedModelError(f"{self.family}: {problem}")
        _refuse_beside_latent(self.family, self.attention)
        if self.attention.num_heads % self.attention.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.family}: num_attention_heads = {self.attention.num_heads} do not divide over "
                f"num_key_value_heads = {self.attention.num_kv_heads}"
            )
        _refuse_unfit_positions(self)

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """Layers with experts, ascending."""
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layer_ids)

    @property
    def routing_layout(self) -> RoutingLayout:
        """How the routing rows of this model are shaped."""
        return RoutingLayout(self.num_layers, self.moe_layer_ids, self.router.num_experts, self.router.top_k)


def _refuse_beside_latent(family: str, attention: AttentionSpec) -> None:
    """Latent attention knows biases and a scale of scores, and none of the other knobs of attention."""
    for knob in fields(attention) if attention.latent else ():
        value, path = getattr(attention, knob.name), f"{family}.attention.{knob.name}"
        if knob.name not in BESIDE_LATENT and knob.default not in (MISSING, value):
            raise UnsupportedModelError(f"{path} = {value!r} is not computed beside latent attention")


def _refuse_unfit_positions(spec: ModelSpec) -> None:
    latent, head_dim, windows = spec.attention.latent, spec.attention.head_dim, spec.attention.windows
    rotated = spec.rope.rotary_dim or (latent.rope_dim if latent else head_dim)
    if rotated % 2 or rotated > head_dim:
        key = "qk_rope_head_dim" if latent else "head_dim (or hidden_size / num_attention_heads)"
        raise UnsupportedModelError(
            f"{spec.family}: rotary_dim {rotated} is no even part of heads of {head_dim}: see {key}"
        )
    if windows and (len(windows) != spec.num_layers or min(windows) < 0):
        raise UnsupportedModelError(f"{spec.family}: windows {windows} are no positions for {spec.num_layers} layers")


def _refuse_what_is_not_computed(path: str, spec: Any) -> None:
    for knob in fields(spec):
        value, name = getattr(spec, knob.name), f"{path}.{knob.name}"
        if "computed" in knob.metadata and value not in knob.metadata["computed"]:
            computed = ", ".join(repr(v) for v in knob.metadata["computed"])
            raise UnsupportedModelError(f"{name} = {value!r} is not computed by this build (only {computed})")
        if is_dataclass(value):
            _refuse_what_is_not_computed(name, value)
