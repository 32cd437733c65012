"""Model architecture as data: the configuration in which MoE families differ. It holds no arrays.

A value that the build cannot compute raises an error that names the field when a spec is built.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from rayserve_moe.experts.router_spec import RouterSpec, one_of
from rayserve_moe.kernels.reference.activations import Activation
from rayserve_moe.requests.records import RoutingLayout


class UnsupportedModelError(ValueError):
    """Error for a checkpoint that this build cannot compute; the message names the key and its value."""


DENSE_DRAFTS = ("eagle", "eagle3")
"""Draft models without experts."""


@dataclass(frozen=True)
class YarnSpec:
    """YaRN scaling (arXiv:2309.00071): interpolation between scaled and unscaled frequencies."""

    factor: float
    """Divisor of slow frequencies."""
    original_length: int
    """Positions over which turns are counted."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Round the ends of the ramp to whole dimensions."""
    attention_factor: float = 1.0
    """Factor of cosine and sine."""


@dataclass(frozen=True)
class Llama3Spec:
    """Scaling of slow frequencies by their wavelength (Llama 3.1): interpolated between two numbers of turns."""

    factor: float
    """Divisor of frequencies with fewer than `low_turns` turns in the original length."""
    original_length: int
    """Positions over which turns are counted."""
    low_turns: float = 1.0
    high_turns: float = 4.0
    """Frequencies with more turns stay."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding. A static NTK scaling is a larger `theta`."""

    theta: float
    rotary_dim: int | None = None
    """Number of first elements of a head that rotate; None for all."""
    interleaved: bool = False
    """Pairs are (2i, 2i + 1) if True, else (i, i + half)."""
    yarn: YarnSpec | None = None
    turning_pairs: int | None = None
    """Number of first pairs that turn; the frequency of the other pairs is zero. None for all."""
    llama3: Llama3Spec | None = None


@dataclass(frozen=True)
class QueryScaleSpec:
    """Factor of a query by its position p: 1 + beta ln(1 + floor(p / length)), after the rotation (Llama 4)."""

    beta: float
    length: int
    """Number of first positions with the factor 1."""


@dataclass(frozen=True)
class ExpertSpec:
    """MLPs of the experts, and the shared expert of every MoE layer; dense MLPs have their activation."""

    intermediate_size: int
    layout: str = one_of("per_expert", "stacked", "fused_out_in", "fused_in_out_interleaved")
    """Form in files: `per_expert` tensors, `stacked` (all experts in a tensor, for each of gate, up and down),
    `fused_out_in` (all experts in a tensor, gate and up in halves) or `fused_in_out_interleaved` (gate and up
    alternate, not transposed)."""
    bias: bool = False
    """True if gate, up and down have biases."""
    activation: str = one_of("silu", "gelu_tanh", "clamped_swiglu", "relu2")
    """Activation of every MLP of the model: `silu`, `gelu_tanh` (GELU by its tanh approximation), `clamped_swiglu`
    (gate * sigmoid(slope * gate) * (up + 1), with gate at most the limit and up within it), or `relu2` (the square of
    up where it is positive, without a gate)."""
    gate_slope: float = 1.702
    """Slope of `clamped_swiglu`."""
    gate_limit: float = 7.0
    """Limit of `clamped_swiglu`."""
    shared: str = one_of("none", "plain", "sigmoid_gated")
    """`none`, `plain` or `sigmoid_gated`."""
    shared_size: int = 0
    """Width of the shared expert."""
    separate_norms: bool = False
    """True if experts read the stream by a norm of their own, and the outputs of experts and of the shared expert are
    normed before their sum."""

    latent_size: int = 0
    """If positive, experts read and write rows of this width: a projection of their input, and another one after their
    sum. The shared expert has the width of the model."""

    @property
    def has_gate(self) -> bool:
        """Return True if MLPs have a gate."""
        return self.activation != "relu2"

    def gating(self, limit: float = 0.0) -> Activation:
        """Return the activation with its constants; `limit` is one of a `LayerSpec`."""
        if limit:
            return Activation("clipped_silu", limit=limit)
        return Activation(self.activation, self.gate_slope, self.gate_limit)


@dataclass(frozen=True)
class FactorSpec:
    """Constant factors of the residual stream and of the logits (Granite), and the bound of logits (Gemma)."""

    embedding_multiplier: float = 1.0
    """Factor of the embedding."""
    rounded_embedding_multiplier: bool = False
    """True if that factor is rounded to the dtype of the embedding."""
    residual_multiplier: float = 1.0
    """Factor of a layer's output."""
    logits_divisor: float = 1.0
    """Divisor of logits."""
    logits_cap: float = 0.0
    """If positive, a logit y becomes cap * tanh(y / cap), after the divisor."""


class ScoreShape(NamedTuple):
    """Sizes of a mixer's products of queries and keys, for estimates."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    key_width: int
    value_width: int
    values_are_keys: bool
    """True if a value is a prefix of its key."""


class MixerSpec(Protocol):
    """Configuration of a kind of mixer; its computation is in the same file of `model.layers`."""

    @property
    def kind(self) -> str:
        """Return the key in `LayerSpec.mixer`, the parameters and `model.layers.table.MIXERS`."""

    @property
    def has_windows(self) -> bool:
        """Return True if the mixer supports windows."""

    def unsupported_reason(self) -> str:
        """Return the reason why the sizes do not fit each other; empty if they do."""

    def divided_sizes(self, tensor_size: int) -> dict[str, int]:
        """Return the sizes that must be divisible by `tensor_size`, by their keys in `config.json`."""

    def summed_widths(self, tensor_size: int) -> dict[str, int]:
        """Return the widths that products on a device sum over, by their keys in `config.json`."""

    def score_shape(self) -> ScoreShape | None:
        """Return the sizes of scores, or None for a mixer without scores."""


NO_PART = "none"
"""Kind of a mixer or feed-forward network that a layer does not have."""


@dataclass(frozen=True)
class LayerSpec:
    """Decoder layer: a mixer of tokens, then a feed-forward network; or one of them."""

    mixer: str
    """Kind of the mixer, or NO_PART."""
    ffn: Literal["moe", "dense", "none"]
    """Kind of the feed-forward network, or NO_PART."""
    window: int = 0
    """Number of positions that a token sees, including its own; 0 for all."""
    post_norms: bool = False
    """True if the outputs of the mixer and of the feed-forward network are normed before they are added."""
    has_scalar: bool = False
    """True if the stream after the layer is multiplied by a number of the layer."""
    expert_limit: float = 0.0
    """Limit of `clipped_silu`, the activation of experts in place of the model's; 0 for none."""
    mlp_limit: float = 0.0
    """The same for the shared expert, or for the MLP of a dense layer."""

    @property
    def kind(self) -> LayerSpec:
        """Return the layer without its window; layers of the same kind share a program."""
        return replace(self, window=0)


@dataclass(frozen=True)
class ModelSpec:
    """Decoder-only MoE language model. Widths are in elements; layer ids count all hidden layers.

    Raises: UnsupportedModelError from the constructor for an unsupported value.
    """

    family: str
    """Name of the family, or of the kind of draft model."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    """All hidden layers, in order."""
    dense_intermediate_size: int
    """Width of a dense layer's MLP; 0 if every layer has experts."""
    mixers: tuple[MixerSpec, ...]
    """Configuration of each kind of mixer."""
    router: RouterSpec
    experts: ExpertSpec
    norm_eps: float
    tie_embeddings: bool
    """True if the embedding table is also the head."""
    max_position_embeddings: int
    """Maximum number of tokens of a sequence."""
    checkpoint_dtype: str
    """Dtype of the weights in the files."""
    norm_offset: float = one_of(0.0, 1.0)
    """Added to the scales of norms in files; with 1 the sums are stored in float32."""
    float32_norms: bool = False
    """True if the scales of norms are stored in float32 also without an offset, so that a normed row is rounded once.
    """
    block_dtype: str = ""
    """8-bit dtype of weights with scales per 128 x 128 block in the files; empty if none."""
    factors: FactorSpec = FactorSpec()

    def __post_init__(self) -> None:
        kinds = {layer.mixer for layer in self.layers} - {NO_PART}
        assert kinds == {mixer.kind for mixer in self.mixers}, f"layers have the mixers {kinds}"
        assert len({layer.post_norms for layer in self.layers}) == 1, "all layers norm their outputs, or none"
        assert len({layer.has_scalar for layer in self.layers}) == 1, "all layers have a scalar, or none"
        _refuse_unsupported_values(self.family, self)
        if not self.moe_layer_ids and self.family not in DENSE_DRAFTS:
            raise UnsupportedModelError(
                f"{self.family}: no layer has experts: all of num_hidden_layers = {self.num_layers} are dense by "
                "first_k_dense_replace, mlp_layer_types, mlp_only_layers, decoder_sparse_step or moe_layer_*"
            )
        if problem := self.router.problem():
            raise UnsupportedModelError(f"{self.family}: {problem}")
        for mixer in self.mixers:
            _refuse_unsupported_values(f"{self.family}.{mixer.kind}", mixer)
            if problem := mixer.unsupported_reason():
                raise UnsupportedModelError(f"{self.family}: {problem}")
        _refuse_unfit_windows(self)

    def norm_dtype(self, dtype: str) -> str:
        """Return the dtype of the scales of norms of a model that computes in `dtype`."""
        return "float32" if self.float32_norms else dtype

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
        """Return True if any layer has a window."""
        return any(layer.window for layer in self.layers)

    @property
    def has_post_norms(self) -> bool:
        """Return True if layers norm their outputs; all layers of a model do, or none."""
        return any(layer.post_norms for layer in self.layers)

    @property
    def has_scalars(self) -> bool:
        """Return True if layers multiply the stream by a number; all layers of a model do, or none."""
        return any(layer.has_scalar for layer in self.layers)

    @property
    def exchanged_width(self) -> int:
        """Return the width of the rows that experts read and write."""
        return self.experts.latent_size or self.hidden_size

    def windows(self, mixer: str) -> tuple[int, ...]:
        """Return the window of every layer with a kind of mixer; empty if all have full attention."""
        windows = tuple(layer.window for layer in self.layers if layer.mixer == mixer)
        return windows if any(windows) else ()

    def mixer(self, kind: str) -> MixerSpec:
        """Return the configuration of a kind of mixer."""
        return next(mixer for mixer in self.mixers if mixer.kind == kind)

    def layers_with_mixer(self, kind: str) -> tuple[int, ...]:
        """Return the ids of the layers with a kind of mixer, ascending."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.mixer == kind)

    def layers_with_ffn(self, ffn: str = "") -> tuple[int, ...]:
        """Return the ids of the layers with a kind of feed-forward network, or with any, ascending."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.ffn == ffn or (layer.ffn != NO_PART and not ffn))

    @property
    def routing_layout(self) -> RoutingLayout:
        """Return the layout of the model's routing rows."""
        return RoutingLayout(self.num_layers, self.moe_layer_ids, self.router.num_experts, self.router.top_k)


def _refuse_unfit_windows(spec: ModelSpec) -> None:
    for layer in spec.layers:
        if layer.window and (layer.window < 0 or not spec.mixer(layer.mixer).has_windows):
            raise UnsupportedModelError(f"{spec.family}: a window of {layer.window} is not computed by {layer.mixer}")


def _refuse_unsupported_values(path: str, spec: Any) -> None:
    for spec_field in fields(spec):
        value, name = getattr(spec, spec_field.name), f"{path}.{spec_field.name}"
        if "computed" in spec_field.metadata and value not in spec_field.metadata["computed"]:
            computed = ", ".join(repr(v) for v in spec_field.metadata["computed"])
            raise UnsupportedModelError(f"{name} = {value!r} is not computed by this build (only {computed})")
        if is_dataclass(value):
            _refuse_unsupported_values(name, value)
