"""Grouped-query attention: its knobs, parameters and state, and how a layer computes it."""

# T tokens   L layers of the kind   D model width   H query heads   G KV heads   h head width

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax

from rayserve_moe.experts.router_spec import one_of
from rayserve_moe.kernels.attention_config import AttentionConfig, PoolFormat
from rayserve_moe.kernels.attention_heads import StackedWeights
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.candidates import Candidate, Choice, choose
from rayserve_moe.kernels.table import GROUPED_ATTENTION, AttentionKernels, Kernels
from rayserve_moe.kernels.tpu.packed_rows import packed_width
from rayserve_moe.model.layers.kinds import Mixer
from rayserve_moe.model.layers.paged import AttentionStep, attend, prepare_attention
from rayserve_moe.model.model_config import ModelConfig, Pools, StepInputs
from rayserve_moe.model.param_spec import TRANSPOSED, ParamSpec
from rayserve_moe.model.spec import ModelSpec, RopeSpec, ScoreShape
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.state.kinds import ArraySpec, StateKind

KIND = "gqa"
STATE = "kv"


@dataclass(frozen=True)
class GroupedAttention:
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245). Widths are in elements."""

    kind: ClassVar[str] = KIND
    has_windows: ClassVar[bool] = True

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
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
    """One logit per query head, in the denominator of the softmax alone."""
    score_scale: float | None = None
    """None stands for head_dim ** -0.5."""
    fused_qkv: bool = one_of(False, True)
    """Files hold q, k and v of a layer as rows of one tensor, in this order."""

    @property
    def rotary_width(self) -> int:
        """Return the number of elements of a head that rotate."""
        return self.rope.rotary_dim or self.head_dim

    def unsupported_reason(self) -> str:
        """Return why the sizes do not fit each other; empty if they do."""
        if self.num_heads % self.num_kv_heads:
            return (
                f"num_attention_heads = {self.num_heads} do not divide over num_key_value_heads = {self.num_kv_heads}"
            )
        if self.rotary_width % 2 or self.rotary_width > self.head_dim:
            return (
                f"rotary_dim {self.rotary_width} is no even part of heads of {self.head_dim}: see head_dim (or "
                "hidden_size / num_attention_heads)"
            )
        return ""

    def divided_sizes(self, tensor_size: int) -> dict[str, int]:
        """Return the numbers of heads that `tensor_size` devices have to divide."""
        kv_heads = self.num_kv_heads * kv_repeats(self, tensor_size)
        return {"num_attention_heads": self.num_heads, "num_key_value_heads": kv_heads}

    def summed_widths(self, tensor_size: int) -> dict[str, int]:
        """Return the width that products on a device sum over."""
        return {"head_dim": self.head_dim}

    def score_shape(self) -> ScoreShape:
        """Return the sizes of scores and of what is gathered by them."""
        return ScoreShape(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim, values_are_keys=False)


def kv_repeats(own: GroupedAttention, tensor_size: int) -> int:
    """Return how often each KV head is held, so that every device of the tensor axis has one."""
    return max(1, tensor_size // own.num_kv_heads)


def parameters(own: GroupedAttention, spec: ModelSpec, *, dtype: str, tensor_size: int) -> dict[str, ParamSpec]:
    """Return projections, and norms, biases and sinks as the knobs say."""
    layers, width, q_width = spec.layers_with_mixer(KIND), spec.hidden_size, own.num_heads * own.head_dim
    repeats = kv_repeats(own, tensor_size)
    kv_width = own.num_kv_heads * own.head_dim * repeats

    def project(role: str, shape: tuple[int, int], axes: tuple[str, str]) -> ParamSpec:
        return ParamSpec((len(layers), *shape), dtype, ("layers", *axes), role, layers, file=TRANSPOSED)

    def of_kv_heads(spec: ParamSpec) -> ParamSpec:
        return replace(spec, file=replace(spec.file, repeats=repeats, repeat_width=own.head_dim))

    def per_layer(role: str, size: int, axis: str, initial: str) -> ParamSpec:
        return ParamSpec((len(layers), size), dtype, ("layers", axis), role, layers, initial=initial)

    specs = {
        "q_LDH": project("q", (width, q_width), ("model", "heads")),
        "k_LDG": of_kv_heads(project("k", (width, kv_width), ("model", "kv_heads"))),
        "v_LDG": of_kv_heads(project("v", (width, kv_width), ("model", "kv_heads"))),
        "o_LHD": project("o", (q_width, width), ("heads", "model")),
    }
    if own.qk_norm == "head":
        specs["q_norm_Lh"] = per_layer("q_norm", own.head_dim, "head_dim", "ones")
        specs["k_norm_Lh"] = per_layer("k_norm", own.head_dim, "head_dim", "ones")
    if own.qk_norm == "full":
        specs["q_norm_LH"] = per_layer("q_norm", q_width, "heads", "ones")
        specs["k_norm_LG"] = of_kv_heads(per_layer("k_norm", kv_width, "kv_heads", "ones"))
    if own.sinks:
        specs["sinks_LA"] = per_layer("sinks", own.num_heads, "heads", "normal")
    if own.bias:
        specs["q_bias_LH"] = per_layer("q_bias", q_width, "heads", "normal")
        specs["k_bias_LG"] = of_kv_heads(per_layer("k_bias", kv_width, "kv_heads", "normal"))
        specs["v_bias_LG"] = of_kv_heads(per_layer("v_bias", kv_width, "kv_heads", "normal"))
    if own.output_bias:
        specs["o_bias_LD"] = per_layer("o_bias", width, "model", "normal")
    return specs | (_cut_out_of_one(specs, own) if own.fused_qkv else {})


def _cut_out_of_one(specs: dict[str, ParamSpec], own: GroupedAttention) -> dict[str, ParamSpec]:
    """Return the parameters of q, k and v whose columns follow each other in one tensor of the file."""
    q_width, kv_width = (count * own.head_dim for count in (own.num_heads, own.num_kv_heads))
    starts = {"q_": 0, "k_": q_width, "v_": q_width + kv_width}
    return {
        name: replace(found, file=replace(found.file, start=starts[name[:2]], num_columns=q_width + 2 * kv_width))
        for name, found in specs.items()
        if name[:2] in starts and "norm" not in name
    }


def states(own: GroupedAttention, *, kernels: Kernels, tensor_size: int) -> tuple[StateKind, ...]:
    """Return the row of a token: [2 * KV heads, h], K and V of a head next to each other, spread with the heads.

    Where the kernels have packed rows, it has one dimension (`kernels.tpu.packed_rows`).
    """
    num_heads = own.num_kv_heads * kv_repeats(own, tensor_size)
    if kernels.attention.has_packed_rows:
        width = tensor_size * packed_width(num_heads // tensor_size, own.head_dim)
        return (StateKind(STATE, "token", (ArraySpec((width,), ("kv_heads",)),)),)
    return (StateKind(STATE, "token", (ArraySpec((2 * num_heads, own.head_dim), ("kv_heads", None)),)),)


def attention_choice(_: GroupedAttention, kernels: Kernels, *, pool: PoolFormat) -> Choice[AttentionKernels]:
    """Return the choice of attention for these heads and a pool."""
    candidates = GROUPED_ATTENTION.get(kernels.name, (Candidate(kernels.name, kernels.attention),))
    return choose(candidates, pool)


def prepare(own: GroupedAttention, batch: TokenBatch, pools: Pools, *, config: ModelConfig) -> AttentionStep:
    """Rotate and describe the tokens of a step."""
    (pool,) = pools[STATE]
    windows = config.spec.windows(KIND)
    return prepare_attention(batch, pool, rope=own.rope, width=own.rotary_width, windows=windows, config=config)


def attention_config(own: GroupedAttention, spec: ModelSpec, plan: ParallelPlan | None = None) -> AttentionConfig:
    """Return what is fixed about all layers; `plan` says how heads lie over devices, None: all on one."""
    return AttentionConfig(
        head_dim=own.head_dim,
        eps=spec.norm_eps,
        plan=plan,
        interleaved_rotation=own.rope.interleaved,
        norms_after_rotation=own.qk_norm_after_rope,
        clip=own.clip_qkv,
        score_scale=own.score_scale,
        windows=spec.windows(KIND),
    )


def begin(
    own: GroupedAttention,
    weights: dict[str, jax.Array],
    stream: tuple[jax.Array, jax.Array],
    inputs: StepInputs,
    *,
    layer: jax.Array,
    config: ModelConfig,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]] | None:
    """Add, norm and project by a fused kernel; None without one for these sizes. `stream`: hidden and added, [T, D]."""
    at_once, step = config.kernels.attention.norm_and_project, inputs.prepared[KIND]
    attention, stacked = attention_config(own, config.spec, config.plan), StackedWeights(weights, layer)
    choice = at_once.choose(*stream, stacked, rotation=step.rotation, config=attention)
    if choice.candidate is None:
        return None
    with jax.named_scope("attention/projections"):
        hidden_TD, *projected = choice.candidate.run(*stream, stacked, rotation=step.rotation, config=attention)
    return hidden_TD, tuple(projected)


def apply(  # noqa: PLR0913 (the interface of `Mixer`)
    own: GroupedAttention,
    weights: dict[str, jax.Array],
    rows: tuple[jax.Array, Pools],
    inputs: StepInputs,
    *,
    layer: jax.Array,
    config: ModelConfig,
    made: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, Pools]:
    """Attend the tokens of a step, and keep their rows."""
    attention = attention_config(own, config.spec, config.plan)
    return attend(
        weights,
        rows,
        inputs,
        mixer=KIND,
        state=STATE,
        layer=layer,
        attention=attention,
        config=config,
        made=made,
    )


MIXER = Mixer(parameters, states, attention_choice, prepare, apply, begin)
