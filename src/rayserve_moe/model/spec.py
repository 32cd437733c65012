"""A model as data: the knobs in which MoE families differ. No arrays live here.

The knobs cover the fourteen families that the project aims at. A value that no code computes yet is refused by name
when a spec is built, so that a family can be described before it is served, and never served wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from rayserve_moe.experts.router_spec import RouterSpec, one_of
from rayserve_moe.requests.records import RoutingLayout


class UnsupportedModelError(ValueError):
    """A checkpoint asks for something this build does not compute; the message names the key and its value."""


DENSE_DRAFTS = ("eagle", "eagle3")
"""Models that draft for others and have no experts themselves."""


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
    """Rotary embedding of the first `rotary_dim` elements of a head (None: all).

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


class ScoreShape(NamedTuple):
    """Sizes of the products of queries and keys that a mixer computes, for estimates."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    key_width: int
    value_width: int
    values_are_keys: bool
    """True if a value is the beginning of its key."""


class MixerSpec(Protocol):
    """Knobs of one kind of mixer; what computes it lies in the same file of `model.layers`."""

    @property
    def kind(self) -> str:
        """Return the key of `LayerSpec.mixer`, of the parameters and of `model.layers.table.MIXERS`."""

    @property
    def has_windows(self) -> bool:
        """Return True if layers with a window are computed."""

    def unsupported_reason(self) -> str:
        """Return why the sizes do not fit each other; empty if they do."""

    def divided_sizes(self, tensor_size: int) -> dict[str, int]:
        """Return the sizes that `tensor_size` devices have to divide, by their keys in `config.json`."""

    def summed_widths(self, tensor_size: int) -> dict[str, int]:
        """Return the widths that products on a device sum over, by their keys in `config.json`."""

    def score_shape(self) -> ScoreShape | None:
        """Return the sizes of what attends; None for a mixer that scores no keys."""


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: a mixer of tokens, then a feed-forward network."""

    mixer: str
    """Kind of the mixer."""
    ffn: Literal["moe", "dense"]
    """Kind of the feed-forward network."""
    window: int = 0
    """Number of positions that a token sees, its own included. 0: all."""

    @property
    def kind(self) -> LayerSpec:
        """Return the layer without its window: layers of one kind are computed by one program."""
        return replace(self, window=0)


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only MoE language model. Widths are in elements; layer ids count all hidden layers.

    Building one raises UnsupportedModelError for a knob whose value is not computed.
    """

    family: str
    """Name of the family, or of the kind of draft model."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    """All hidden layers, in order."""
    dense_intermediate_size: int
    """Width of the MLP of a layer without experts; 0 if every layer has experts."""
    mixers: tuple[MixerSpec, ...]
    """Knobs of the mixers, one of each kind that layers have."""
    router: RouterSpec
    experts: ExpertSpec
    norm_eps: float
    tie_embeddings: bool
    """True if the embedding's table is also the head."""
    max_position_embeddings: int
    checkpoint_dtype: str
    """Dtype of the weights in the files."""
    norm_offset: float = one_of(0.0, 1.0)
    """Added to the scales of norms as files hold them; 1 holds the sums in float32."""
    block_dtype: str = ""
    """The 8-bit dtype whose 128 x 128 blocks have scales in the files; empty: none has."""
    factors: FactorSpec = FactorSpec()

    def __post_init__(self) -> None:
        kinds = {layer.mixer for layer in self.layers}
        assert kinds == {mixer.kind for mixer in self.mixers}, f"layers have the mixers {kinds}"
        _refuse_what_is_not_computed(self.family, self)
        if not self.moe_layer_ids and self.family not in DENSE_DRAFTS:
            raise UnsupportedModelError(
                f"{self.family}: no layer has experts: all of num_hidden_layers = {self.num_layers} are dense by "
                "first_k_dense_replace, mlp_layer_types, mlp_only_layers, decoder_sparse_step or moe_layer_*"
            )
        if problem := self.router.problem():
            raise UnsupportedModelError(f"{self.family}: {problem}")
        for mixer in self.mixers:
            _refuse_what_is_not_computed(f"{self.family}.{mixer.kind}", mixer)
            if problem := mixer.unsupported_reason():
                raise UnsupportedModelError(f"{self.family}: {problem}")
        _refuse_unfit_windows(self)

    @property
    def num_layers(self) -> int:
        """Return the number of hidden layers, with or without experts."""
        return len(self.layers)

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """Return the layers with experts, ascending."""
        return self.layers_with_ffn("moe")

    @property
    def has_windows(self) -> bool:
        """Return True if a layer has a window."""
        return any(layer.window for layer in self.layers)

    def windows(self, mixer: str) -> tuple[int, ...]:
        """Return the window of every layer with a kind of mixer; empty if they all see all positions."""
        windows = tuple(layer.window for layer in self.layers if layer.mixer == mixer)
        return windows if any(windows) else ()

    def mixer(self, kind: str) -> MixerSpec:
        """Return the knobs of a kind of mixer."""
        return next(mixer for mixer in self.mixers if mixer.kind == kind)

    def layers_with_mixer(self, kind: str) -> tuple[int, ...]:
        """Return the ids of the layers with a kind of mixer, ascending."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.mixer == kind)

    def layers_with_ffn(self, ffn: str) -> tuple[int, ...]:
        """Return the ids of the layers whose feed-forward network is of a kind, ascending."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.ffn == ffn)

    @property
    def routing_layout(self) -> RoutingLayout:
        """How the routing rows of this model are shaped."""
        return RoutingLayout(self.num_layers, self.moe_layer_ids, self.router.num_experts, self.router.top_k)


def _refuse_unfit_windows(spec: ModelSpec) -> None:
    for layer in spec.layers:
        if layer.window and (layer.window < 0 or not spec.mixer(layer.mixer).has_windows):
            raise UnsupportedModelError(f"{spec.family}: a window of {layer.window} is not computed by {layer.mixer}")


def _refuse_what_is_not_computed(path: str, spec: Any) -> None:
    for knob in fields(spec):
        value, name = getattr(spec, knob.name), f"{path}.{knob.name}"
        if "computed" in knob.metadata and value not in knob.metadata["computed"]:
            computed = ", ".join(repr(v) for v in knob.metadata["computed"])
            raise UnsupportedModelError(f"{name} = {value!r} is not computed by this build (only {computed})")
        if is_dataclass(value):
            _refuse_what_is_not_computed(name, value)
