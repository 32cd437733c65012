"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): configuration, parameters, state and computation.

Its sparse form, in which an index chooses the tokens that each token sees, is computed by `sparse_latent`.
"""

# T tokens   L layers of the kind   D model width   H query heads * their width   R query latent
# C latent, kept with the rotated key in kv_a

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax

from rayserve_moe.experts.router_spec import one_of
from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.candidates import Choice, choose
from rayserve_moe.kernels.latent_attention import LatentConfig
from rayserve_moe.kernels.operations import AttentionKernels, Kernels
from rayserve_moe.kernels.table import LATENT_ATTENTION
from rayserve_moe.kernels.tpu.packed_rows import latent_lanes
from rayserve_moe.model.layers.kinds import LayerInputs, Mixer
from rayserve_moe.model.layers.paged import AttentionStep, attend, prepare_attention, query_scales
from rayserve_moe.model.model_config import ModelConfig, Pools
from rayserve_moe.model.param_spec import FileForm, ParamSpec
from rayserve_moe.model.spec import ModelSpec, QueryScaleSpec, RopeSpec, ScoreShape, UnsupportedModelError
from rayserve_moe.state.kinds import ArraySpec, StateKind

DENSE, SPARSE, SHARED = "mla", "dsa", "dsa_shared"
"""Kinds of this mixer: every token sees all before it, those that the index of its layer chooses, or those of the index
of the last layer that has one."""
STATES = {DENSE: "latent_kv", SPARSE: "latent_kv", SHARED: "shared_latent_kv"}
"""State with the latents, by kind."""


@dataclass(frozen=True)
class TokenIndex:
    """Index of sparse attention (DeepSeek-V3.2, arXiv:2512.02556): each token sees the `top_k` best before it.

    The score of a token is a weighted sum over heads of relu(query * key); ties go to the lower position. The first
    elements of queries and keys rotate as those of the latent attention.
    """

    num_heads: int
    head_dim: int
    """Width of a query and of the key that all heads share."""
    top_k: int
    interleaved: bool = False
    """Pairs that rotate are (2i, 2i + 1) if True, else (i, i + half)."""
    norm_eps: float = 1e-6
    """Epsilon of the layer norm of keys."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention. Widths are in elements.

    A head's query and key consist of `nope_dim` elements without position and `rope_dim` rotated elements. All heads
    share the rotated key.
    """

    has_windows: ClassVar[bool] = False

    num_heads: int
    """Query heads."""
    q_lora_rank: int | None
    """Width of the queries' latent; None projects queries from the hidden state."""
    kv_lora_rank: int
    """Width of the latent of keys and values; the cache holds it per token with the rotated key."""
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeSpec | None
    """None: no element rotates; all heads still share the `rope_dim` elements of a key."""
    norm_eps: float = 1e-6
    """Epsilon of the latents' RMS norms."""
    bias: bool = False
    """Biases of the two down projections."""
    output_bias: bool = False
    """Bias of o."""
    score_scale: float | None = None
    """None stands for head_dim ** -0.5."""
    query_scale: QueryScaleSpec | None = None
    """Factor of queries by position, if any."""
    output_gate: str = one_of("none", "sigmoid")
    """Function of the gates that multiply the outputs of heads, in float32."""
    index: TokenIndex | None = None
    """Index of sparse attention; None for the kind `mla`."""
    kind: str = one_of(DENSE, SPARSE, SHARED)
    """`dsa` with an index in every layer, `dsa_shared` for layers that take the choice of the last layer with one."""

    @property
    def head_dim(self) -> int:
        """Return the width of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def row_width(self) -> int:
        """Return the number of cached elements per token."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def rotary_width(self) -> int:
        """Return the number of elements of a head that rotate."""
        return self.rope_dim if self.rope is None else self.rope.rotary_dim or self.rope_dim

    def unsupported_reason(self) -> str:
        """Return why the sizes do not fit each other; empty if they do."""
        assert (self.index is None) == (self.kind == DENSE), "sparse attention has an index"
        if self.index is not None and self.q_lora_rank is None:
            return "q_lora_rank is null, and the index of sparse attention reads the latents of queries"
        if self.index is not None and self.rotary_width > self.index.head_dim:
            return f"index_head_dim {self.index.head_dim} is less than the {self.rotary_width} elements that rotate"
        if self.rotary_width % 2 or self.rotary_width > self.head_dim:
            return f"rotary_dim {self.rotary_width} must be even and at most {self.head_dim}: see qk_rope_head_dim"
        return ""

    def divided_sizes(self, tensor_size: int) -> dict[str, int]:
        """Return the number of heads, which must be divisible by the tensor axis."""
        return {"num_attention_heads": self.num_heads}

    def summed_widths(self, tensor_size: int) -> dict[str, int]:
        """Return the widths that products on a device sum over."""
        num_heads = self.num_heads // tensor_size
        return {
            **({"index_head_dim": self.index.head_dim} if self.index else {}),
            "kv_lora_rank": self.kv_lora_rank,
            "q_lora_rank": self.q_lora_rank or 0,
            "qk_nope_head_dim": self.nope_dim,
            f"v_head_dim {self.value_dim} times {num_heads} heads of a device:": num_heads * self.value_dim,
        }

    def score_shape(self) -> ScoreShape:
        """Return the sizes of scores in the latent space, and of the latents as values."""
        return ScoreShape(self.num_heads, 1, self.row_width, self.kv_lora_rank, values_are_keys=True)


def parameters(
    own: LatentAttention,
    spec: ModelSpec,
    *,
    dtype: str,
    tensor_size: int,
) -> dict[str, ParamSpec]:
    """Return projections: those into latents are replicated, those out of latents are sharded by heads.

    A file holds the keys and values of a head adjacent in one tensor (role `kv_b`). We split them and keep the layout
    of the file, because XLA copies the right side of a product per head in every layer if heads are its last dimension.
    """
    layers, width, q_latent = spec.layers_with_mixer(own.kind), spec.hidden_size, own.q_lora_rank
    q_width, o_width = (own.num_heads * size for size in (own.head_dim, own.value_dim))

    def stack(role: str, shape: tuple[int, ...], axes: tuple[str | None, ...], initial: str = "normal") -> ParamSpec:
        axes, file = ("layers", *axes), FileForm(transposed=len(shape) > 1)
        return ParamSpec((len(layers), *shape), dtype, axes, role, layers, file=file, initial=initial)

    def of_latent(first: int, size: int) -> ParamSpec:
        both = stack("kv_b", (own.kv_lora_rank, own.num_heads * size), (None, "heads"))
        file = replace(both.file, repeat_width=size, period=own.nope_dim + own.value_dim, start=first)
        return replace(both, file=file).as_in_files()

    specs = {
        "kv_a_LDC": stack("kv_a", (width, own.row_width), ("model", None)),
        "kv_a_norm_LC": stack("kv_a_norm", (own.kv_lora_rank,), (None,), "ones"),
        "k_b_LHC": of_latent(0, own.nope_dim),
        "v_b_LHC": of_latent(own.nope_dim, own.value_dim),
        "o_LHD": stack("o", (o_width, width), ("heads", "model")),
    }
    if q_latent is None:
        specs["q_LDH"] = stack("q", (width, q_width), ("model", "heads"))
    else:
        specs["q_a_LDR"] = stack("q_a", (width, q_latent), ("model", None))
        specs["q_a_norm_LR"] = stack("q_a_norm", (q_latent,), (None,), "ones")
        specs["q_b_LRH"] = stack("q_b", (q_latent, q_width), (None, "heads"))
    if own.bias:
        specs["kv_a_bias_LC"] = stack("kv_a_bias", (own.row_width,), (None,))
        if q_latent is not None:
            specs["q_a_bias_LR"] = stack("q_a_bias", (q_latent,), (None,))
    if own.output_gate != "none":
        specs["gate_LDA"] = stack("output_gate", (width, own.num_heads), ("model", "heads"))
    if own.output_bias:
        specs["o_bias_LD"] = stack("o_bias", (width,), ("model",))
    return specs


def states(own: LatentAttention, *, kernels: Kernels, tensor_size: int) -> tuple[StateKind, ...]:
    """Return the row of a token: [1, latent and rotated key], the same on all devices of the tensor axis.

    The latent serves all heads, as key (with the rotated part) and as value. With packed rows
    (`kernels.tpu.packed_rows`) the row is one-dimensional.
    """
    return (StateKind(STATES[own.kind], "token", (row_of(own.row_width, kernels=kernels),)),)


def row_of(width: int, *, kernels: Kernels) -> ArraySpec:
    """Return the row of a token that all heads share, `width` elements."""
    if kernels.attention.has_packed_rows:
        return ArraySpec((latent_lanes(width),), (None,))
    return ArraySpec((1, width), (None, None))


def attention_choice(own: LatentAttention, kernels: Kernels, *, pool: PoolFormat) -> Choice[AttentionKernels]:
    """Return the choice of latent attention for a pool; UnsupportedModelError if the table has no candidates."""
    if kernels.name not in LATENT_ATTENTION:
        raise UnsupportedModelError(
            f"the {kernels.name} kernels have no multi-head latent attention (only {', '.join(LATENT_ATTENTION)})"
        )
    candidates = LATENT_ATTENTION[kernels.name]
    return choose(candidates, pool, row_width=own.row_width, latent_width=own.kv_lora_rank)


def prepare(own: LatentAttention, batch: TokenBatch, pools: Pools, *, config: ModelConfig) -> AttentionStep:
    """Return rotations, factors of queries and kernel descriptions of a step's tokens."""
    (pool,) = pools[STATES[own.kind]]
    step = prepare_attention(batch, pool, rope=own.rope, width=own.rotary_width, windows=(), config=config)
    return step if own.query_scale is None else step._replace(query_scale_T=query_scales(batch, own.query_scale))


def latent_config(own: LatentAttention) -> LatentConfig:
    """Return the static attention configuration of all layers."""
    scale = own.head_dim**-0.5 if own.score_scale is None else own.score_scale
    return LatentConfig(
        own.nope_dim, own.norm_eps, scale, own.rope is not None and own.rope.interleaved, own.output_gate
    )


def apply(
    own: LatentAttention,
    rows: tuple[jax.Array, Pools],
    inputs: LayerInputs,
    *,
    chosen_TK: jax.Array | None = None,
) -> tuple[jax.Array, Pools]:
    """Compute attention for the tokens of a step and write their latents; `chosen_TK` as in `AttentionInputs`."""
    state, attention = STATES[own.kind], latent_config(own)
    return attend(rows, inputs, mixer=own.kind, state=state, attention=attention, chosen_TK=chosen_TK)


MIXER = Mixer(
    parameters,
    states,
    attention_choice,
    prepare,
    apply,
    adapted=("q_LDH", "q_a_LDR", "q_b_LRH", "kv_a_LDC", "k_b_LHC", "v_b_LHC", "gate_LDA", "o_LHD"),
)
