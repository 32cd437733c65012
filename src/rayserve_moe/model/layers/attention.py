"""Grouped-query attention: configuration, parameters, state and computation."""

# T tokens   L layers of the kind   D model width   H query heads   G KV heads   h head width   v value width

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax

from rayserve_moe.experts.router_spec import one_of
from rayserve_moe.kernels.attention_config import AttentionConfig, PoolFormat
from rayserve_moe.kernels.attention_heads import StackedWeights
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.candidates import Candidate, Choice, choose
from rayserve_moe.kernels.operations import AttentionKernels, Kernels
from rayserve_moe.kernels.reference.layers import Rotation
from rayserve_moe.kernels.table import GROUPED_ATTENTION
from rayserve_moe.kernels.tpu.packed_rows import packed_width
from rayserve_moe.model.layers.kinds import LayerInputs, Mixer
from rayserve_moe.model.layers.paged import AttentionStep, attend, prepare_attention
from rayserve_moe.model.model_config import ModelConfig, Pools
from rayserve_moe.model.param_spec import TRANSPOSED, FileForm, ParamSpec, norm_spec
from rayserve_moe.model.spec import ModelSpec, RopeSpec, ScoreShape
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.state.kinds import ArraySpec, StateKind

BLOCKS = "block_gqa"
"""Kind of this mixer whose tokens see the blocks of keys that an index chooses."""
STATES = {"gqa": "kv", "swa": "window_kv", BLOCKS: "block_kv"}
"""State of each kind of this mixer. Kinds differ in heads, rotation and rows, and each has a pool."""


@dataclass(frozen=True)
class BlockIndex:
    """Index of block-sparse attention (MiniMax-M3): each token sees the `top_k` best blocks of keys up to its own.

    The score of a block is the largest product of a query with a key in it; ties go to the lower block. Queries and
    keys are normed by head, and rotate as those of the attention.
    """

    num_heads: int
    """Heads of queries, each for equally many KV heads."""
    head_dim: int
    """Width of a query and of the key that all heads share."""
    block_size: int
    """Positions of a block; blocks begin at multiples of it."""
    top_k: int
    """Maximum number of blocks that a token sees."""
    local_blocks: int = 1
    """Blocks up to its own that a token always sees."""
    first_blocks: int = 0
    """Blocks at the begin of a sequence that every token sees."""
    score: str = one_of("max")
    """Function of the products of a block."""


@dataclass(frozen=True)
class GroupedAttention:
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245). Widths are in elements."""

    has_windows: ClassVar[bool] = True

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    """None: queries and keys do not rotate."""
    bias: bool = False
    """Biases of q, k and v."""
    output_bias: bool = False
    """Bias of o."""
    qk_norm: str = one_of("none", "head", "full")
    """RMS norm of queries and keys: of each head, or of the whole projection."""
    qk_norm_after_rope: bool = False
    clip_qkv: float | None = None
    """Bound of q, k and v after the norm."""
    sinks: bool = False
    """True if each query head has a logit that enters only the denominator of the softmax."""
    score_scale: float | None = None
    """None stands for head_dim ** -0.5."""
    output_gate: str = one_of("none", "sigmoid", "softplus")
    """Function of the gates that multiply outputs, in float32."""
    gate_form: str = one_of("element", "head", "in_query")
    """Gates in files: of each `element` of the queries, of each `head`, or of each element after the query of its head
    (`in_query`)."""
    values: str = one_of("own", "keys")
    """`keys`: a value is its key ahead of the norm and the rotation of keys."""
    value_norm: bool = False
    """True for an RMS norm of each value without a scale."""
    fused_qkv: bool = one_of(False, True)
    """True if files hold q, k and v of a layer as rows of a single tensor, in this order."""
    kind: str = one_of(*STATES)
    """`swa` for layers with windows if their heads or their rotation differ from the other layers of the model."""
    value_dim: int | None = None
    """Elements of a value; None stands for head_dim."""
    value_scale: float = 1.0
    """Factor of values after their projection."""
    index: BlockIndex | None = None
    """Index of block-sparse attention; None for other kinds than `block_gqa`."""

    @property
    def value_width(self) -> int:
        """Return the number of elements of a value."""
        return self.value_dim or self.head_dim

    @property
    def rotary_width(self) -> int:
        """Return the number of elements of a head that rotate, or turn by zero without a rotation."""
        return self.head_dim if self.rope is None else self.rope.rotary_dim or self.head_dim

    def unsupported_reason(self) -> str:
        """Return why the sizes do not fit each other; empty if they do."""
        assert (self.index is not None) == (self.kind == BLOCKS), "block-sparse attention has an index"
        if self.index is not None and (reason := self._index_reason(self.index)):
            return reason
        if self.num_heads % self.num_kv_heads:
            return (
                f"num_attention_heads = {self.num_heads} do not divide over num_key_value_heads = {self.num_kv_heads}"
            )
        if self.rotary_width % 2 or self.rotary_width > self.head_dim:
            return (
                f"rotary_dim {self.rotary_width} must be even and at most {self.head_dim}: see head_dim (or "
                "hidden_size / num_attention_heads)"
            )
        if self.values == "keys" and (self.value_width != self.head_dim or self.bias):
            return "values that are keys have no width and no bias of their own"
        return ""

    def _index_reason(self, index: BlockIndex) -> str:
        if self.num_kv_heads % index.num_heads:
            return (
                f"num_key_value_heads = {self.num_kv_heads} do not divide over index_n_heads "
                f"(or sparse_num_index_heads) = {index.num_heads}"
            )
        if self.rotary_width > index.head_dim:
            return (
                f"index_head_dim (or sparse_index_dim) {index.head_dim} is less than the {self.rotary_width} "
                "elements that rotate"
            )
        if index.first_blocks + index.local_blocks > index.top_k:
            return (
                f"index_topk_blocks (or sparse_topk_blocks) {index.top_k} is less than {index.first_blocks} first "
                f"and {index.local_blocks} local blocks"
            )
        return ""

    def divided_sizes(self, tensor_size: int) -> dict[str, int]:
        """Return the numbers of heads that must be divisible by `tensor_size`."""
        kv_heads = self.num_kv_heads * kv_repeats(self, tensor_size)
        return {"num_attention_heads": self.num_heads, "num_key_value_heads": kv_heads}

    def summed_widths(self, tensor_size: int) -> dict[str, int]:
        """Return the widths that products on a device sum over."""
        widths = {"head_dim": self.head_dim} | ({"v_head_dim": self.value_dim} if self.value_dim else {})
        return widths | ({"index_head_dim": self.index.head_dim} if self.index else {})

    def score_shape(self) -> ScoreShape:
        """Return the sizes of scores and values."""
        return ScoreShape(self.num_heads, self.num_kv_heads, self.head_dim, self.value_width, values_are_keys=False)


def kv_repeats(own: GroupedAttention, tensor_size: int) -> int:
    """Return the number of copies of each KV head, so that every device of the tensor axis has a KV head."""
    return max(1, tensor_size // own.num_kv_heads)


def parameters(own: GroupedAttention, spec: ModelSpec, *, dtype: str, tensor_size: int) -> dict[str, ParamSpec]:
    """Return projections, and the configured norms, biases and sinks."""
    layers, width, q_width = spec.layers_with_mixer(own.kind), spec.hidden_size, own.num_heads * own.head_dim
    repeats, out_width = kv_repeats(own, tensor_size), own.num_heads * own.value_width
    k_width, v_width = (own.num_kv_heads * size * repeats for size in (own.head_dim, own.value_width))

    def project(role: str, shape: tuple[int, int], axes: tuple[str, str]) -> ParamSpec:
        return ParamSpec((len(layers), *shape), dtype, ("layers", *axes), role, layers, file=TRANSPOSED)

    def of_kv_heads(spec: ParamSpec) -> ParamSpec:
        head_width = own.value_width if spec.role.startswith("v") else own.head_dim
        return replace(spec, file=replace(spec.file, repeats=repeats, repeat_width=head_width))

    def per_layer(role: str, size: int, axis: str, initial: str) -> ParamSpec:
        return ParamSpec((len(layers), size), dtype, ("layers", axis), role, layers, initial=initial)

    specs = {
        "q_LDH": project("q", (width, q_width), ("model", "heads")),
        "k_LDG": of_kv_heads(project("k", (width, k_width), ("model", "kv_heads"))),
        "v_LDG": of_kv_heads(project("v", (width, v_width), ("model", "kv_heads"))),
        "o_LHD": project("o", (out_width, width), ("heads", "model")),
    }
    if own.values == "keys":
        del specs["v_LDG"]
    if own.output_gate != "none":
        specs |= _gates(specs["q_LDH"], own)
    specs |= _norms(own, spec, dtype=dtype, kv_form=specs["k_LDG"].file)
    if own.sinks:
        specs["sinks_LA"] = per_layer("sinks", own.num_heads, "heads", "normal")
    if own.bias:
        specs["q_bias_LH"] = per_layer("q_bias", q_width, "heads", "normal")
        specs["k_bias_LG"] = of_kv_heads(per_layer("k_bias", k_width, "kv_heads", "normal"))
        specs["v_bias_LG"] = of_kv_heads(per_layer("v_bias", v_width, "kv_heads", "normal"))
    if own.output_bias:
        specs["o_bias_LD"] = per_layer("o_bias", width, "model", "normal")
    return specs | (_cut_out_of_one(specs, own) if own.fused_qkv else {})


def _gates(queries: ParamSpec, own: GroupedAttention) -> dict[str, ParamSpec]:
    """Return the gates, and the queries if files hold both in a tensor."""
    if own.gate_form == "in_query":
        pair = replace(TRANSPOSED, period=2 * own.head_dim, repeat_width=own.head_dim)
        gates = replace(queries, file=replace(pair, start=own.head_dim))
        return {"gate_LDH": gates, "q_LDH": replace(queries, file=pair)}
    gates = replace(queries, role="output_gate", shape=(*queries.shape[:2], own.num_heads * own.value_width))
    if own.gate_form == "head":
        return {"gate_LDA": replace(gates, shape=(*gates.shape[:2], own.num_heads))}
    return {"gate_LDH": gates}


def _norms(own: GroupedAttention, spec: ModelSpec, *, dtype: str, kv_form: FileForm) -> dict[str, ParamSpec]:
    """Return the norms of queries and keys; `kv_form` has the copies of KV heads."""
    layers = spec.layers_with_mixer(own.kind)

    def norm(role: str, size: int, axis: str) -> ParamSpec:
        shape, axes = (len(layers), size), ("layers", axis)
        return norm_spec(spec.norm_offset, shape, axes, role, dtype=spec.norm_dtype(dtype), layers=layers)

    if own.qk_norm == "head":
        return {
            "q_norm_Lh": norm("q_norm", own.head_dim, "head_dim"),
            "k_norm_Lh": norm("k_norm", own.head_dim, "head_dim"),
        }
    if own.qk_norm == "full":
        of_keys = norm("k_norm", own.num_kv_heads * own.head_dim * kv_form.repeats, "kv_heads")
        held = replace(of_keys.file, repeats=kv_form.repeats, repeat_width=kv_form.repeat_width)
        of_queries = norm("q_norm", own.num_heads * own.head_dim, "heads")
        return {"q_norm_LH": of_queries, "k_norm_LG": replace(of_keys, file=held)}
    return {}


def _cut_out_of_one(specs: dict[str, ParamSpec], own: GroupedAttention) -> dict[str, ParamSpec]:
    """Return q, k and v parameters as consecutive column ranges of a fused tensor."""
    q_width, k_width = (count * own.head_dim for count in (own.num_heads, own.num_kv_heads))
    starts, v_width = {"q_": 0, "k_": q_width, "v_": q_width + k_width}, own.num_kv_heads * own.value_width
    return {
        name: replace(found, file=replace(found.file, start=starts[name[:2]], num_columns=q_width + k_width + v_width))
        for name, found in specs.items()
        if name[:2] in starts and "norm" not in name
    }


def states(own: GroupedAttention, *, kernels: Kernels, tensor_size: int) -> tuple[StateKind, ...]:
    """Return the row of a token: [KV heads, h + v] with the value of a head behind its key, sharded by heads.

    With packed rows (`kernels.tpu.packed_rows`) it is one-dimensional.
    """
    num_heads = own.num_kv_heads * kv_repeats(own, tensor_size)
    if kernels.attention.has_packed_rows:
        width = tensor_size * packed_width(num_heads // tensor_size, own.head_dim, own.value_width)
        row = ArraySpec((width,), ("kv_heads",))
    else:
        row = ArraySpec((num_heads, own.head_dim + own.value_width), ("kv_heads", None))
    return (StateKind(STATES[own.kind], "token", (row,)),)


def attention_choice(own: GroupedAttention, kernels: Kernels, *, pool: PoolFormat) -> Choice[AttentionKernels]:
    """Return the choice of attention for these heads and a pool."""
    candidates = GROUPED_ATTENTION.get(kernels.name, (Candidate(kernels.name, kernels.attention),))
    return choose(candidates, pool, head_dim=own.head_dim, value_dim=own.value_width)


def prepare(own: GroupedAttention, batch: TokenBatch, pools: Pools, *, config: ModelConfig) -> AttentionStep:
    """Return rotations and kernel descriptions of a step's tokens."""
    (pool,) = pools[STATES[own.kind]]
    windows = config.spec.windows(own.kind)
    return prepare_attention(batch, pool, rope=own.rope, width=own.rotary_width, windows=windows, config=config)


def attention_config(own: GroupedAttention, spec: ModelSpec, plan: ParallelPlan | None = None) -> AttentionConfig:
    """Return the static attention configuration of all layers; `plan` None places all heads on a single device."""
    return AttentionConfig(
        head_dim=own.head_dim,
        eps=spec.norm_eps,
        plan=plan,
        interleaved_rotation=own.rope is not None and own.rope.interleaved,
        norms_after_rotation=own.qk_norm_after_rope,
        clip=own.clip_qkv,
        score_scale=own.score_scale,
        windows=spec.windows(own.kind),
        output_gate=own.output_gate,
        norms_values=own.value_norm,
        value_dim=own.value_dim or 0,
        value_scale=own.value_scale,
        block_size=own.index.block_size if own.index else 0,
    )


def begin_choice(
    own: GroupedAttention,
    weights: dict[str, jax.Array],
    stream: tuple[jax.Array, jax.Array],
    *,
    rotation: Rotation,
    layer: jax.Array,
    config: ModelConfig,
) -> Choice[Callable[..., Any]]:
    """Return the choice of a kernel that adds, norms and projects at once; arguments as for `begin`."""
    at_once = config.kernels.attention.norm_and_project
    has_gate = own.output_gate != "none"
    reason = "attention has an output gate" if has_gate else "scales of norms are float32"
    if has_gate or config.spec.norm_offset or config.spec.float32_norms:
        return Choice(None, {candidate.name: reason for candidate in at_once.candidates})
    attention, stacked = attention_config(own, config.spec, config.plan), StackedWeights(weights, layer)
    return at_once.choose(*stream, stacked, rotation=rotation, config=attention)


def begin(
    own: GroupedAttention, stream: tuple[jax.Array, jax.Array], inputs: LayerInputs
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]] | None:
    """Add, norm and project in a fused kernel; `stream` is the residual stream and its addend, both [T, D].

    Returns None if no such kernel exists for these sizes, or if tokens have adapters.
    """
    weights, step, layer, config = inputs
    rotation = step.prepared[own.kind].rotation
    choice = begin_choice(own, weights, stream, rotation=rotation, layer=layer, config=config)
    if choice.candidate is None or step.adapters is not None:
        return None
    attention, stacked = attention_config(own, config.spec, config.plan), StackedWeights(weights, layer)
    with jax.named_scope("attention/projections"):
        hidden_TD, *projected = choice.candidate.run(*stream, stacked, rotation=rotation, config=attention)
    return hidden_TD, tuple(projected)


def apply(
    own: GroupedAttention,
    rows: tuple[jax.Array, Pools],
    inputs: LayerInputs,
    *,
    made: tuple[jax.Array, jax.Array] | None = None,
    chosen_TGK: jax.Array | None = None,
) -> tuple[jax.Array, Pools]:
    """Compute attention for the tokens of a step and write their rows; `chosen_TGK` as in `AttentionInputs`."""
    state, attention = STATES[own.kind], attention_config(own, inputs.config.spec, inputs.config.plan)
    return attend(rows, inputs, mixer=own.kind, state=state, attention=attention, made=made, chosen_TK=chosen_TGK)


MIXER = Mixer(
    parameters,
    states,
    attention_choice,
    prepare,
    apply,
    begin,
    adapted=("q_LDH", "k_LDG", "v_LDG", "gate_LDH", "gate_LDA", "o_LHD"),
)
