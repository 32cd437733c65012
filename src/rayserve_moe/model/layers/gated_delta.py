"""Gated delta layers (Yang et al., arXiv:2412.06464): configuration, parameters, recurrent state and computation."""

# T tokens   B single tokens and blocks   L layers of the kind   D model width   K key heads   H value heads
# d key width   v value width   J taps of the convolution   W channels of a key head: q, k, and v of its value heads

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from rayserve_moe.experts.router_spec import one_of
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.reference.delta_gates import OUTPUT_GATES, GateRule, log_decays
from rayserve_moe.kernels.reference.gated_delta import (
    CHUNK,
    WINDOW_ROWS,
    DeltaPools,
    DeltaTokens,
    Pieces,
    RowEntries,
    cut_pieces,
)
from rayserve_moe.kernels.reference.layers import project, rms_norm
from rayserve_moe.kernels.reference.short_conv import History, find_history
from rayserve_moe.model.layers.kinds import LayerInputs, Mixer
from rayserve_moe.model.model_config import ModelConfig, Pools
from rayserve_moe.model.param_spec import TRANSPOSED, FileForm, ParamSpec
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.state.kinds import ArraySpec, StateKind

KIND = "gated_delta"
STATE = "delta"
EPS = 1e-6
"""Added to the sum of squares of a query or key."""


class StateSizes(Protocol):
    """Sizes that `states` and `prepare` need of a mixer."""

    @property
    def kind(self) -> str: ...

    @property
    def num_key_heads(self) -> int: ...

    @property
    def num_value_heads(self) -> int: ...

    @property
    def key_dim(self) -> int: ...

    @property
    def value_dim(self) -> int: ...

    @property
    def num_taps(self) -> int: ...

    @property
    def num_decays(self) -> int:
        """Return the number of decays of a head: 1, or one per element of a key."""


class DeltaSizes(StateSizes, Protocol):
    """Sizes and gates that `advance_layer` needs of a mixer."""

    @property
    def gates(self) -> GateRule: ...


@dataclass(frozen=True)
class GatedDelta:
    """Gated delta rule after a short convolution. Widths are in elements."""

    kind: ClassVar[str] = KIND
    has_windows: ClassVar[bool] = False
    num_decays: ClassVar[int] = 1
    gates: ClassVar[GateRule] = GateRule()

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    """Width of a query and of a key."""
    value_dim: int
    num_taps: int
    """Tokens that the convolution reads, including the newest."""
    fused: str = one_of("by_key_head", "by_part")
    """Form of projections in files: `q | k | v | z` and `b | a` of each key head in two tensors, or `q | k | v` of all
    heads in a tensor and z, b and a in three."""

    def unsupported_reason(self) -> str:
        """Return why the sizes do not fit each other; empty if they do."""
        if self.num_value_heads % self.num_key_heads:
            return (
                f"linear_num_value_heads = {self.num_value_heads} do not divide over linear_num_key_heads = "
                f"{self.num_key_heads}"
            )
        if not 2 <= self.num_taps <= WINDOW_ROWS // 2:
            return f"linear_conv_kernel_dim = {self.num_taps} is not from 2 to {WINDOW_ROWS // 2}"
        return ""

    def divided_sizes(self, tensor_size: int) -> dict[str, int]:
        """Return the numbers of heads that must be divisible by `tensor_size`."""
        key_heads = self.num_key_heads * key_repeats(self, tensor_size)
        return {"linear_num_value_heads": self.num_value_heads, "linear_num_key_heads": key_heads}

    def summed_widths(self, tensor_size: int) -> dict[str, int]:
        """Return the width of the output that products on a device sum over."""
        return {"linear_value_head_dim": self.num_value_heads * self.value_dim // tensor_size}

    def score_shape(self) -> None:
        """Return None: the mixer has no scores."""


def key_repeats(own: StateSizes, tensor_size: int) -> int:
    """Return the number of devices that hold each key head."""
    return max(1, tensor_size // own.num_key_heads)


def parameters(own: GatedDelta, spec: ModelSpec, *, dtype: str, tensor_size: int) -> dict[str, ParamSpec]:
    """Return projections, taps of the convolution, decays, and the norm of the output."""
    layers, width, repeats = spec.layers_with_mixer(KIND), spec.hidden_size, key_repeats(own, tensor_size)
    q_width, v_width = own.num_key_heads * own.key_dim, own.num_value_heads * own.value_dim
    per_key = own.num_value_heads // own.num_key_heads
    forms = _file_forms(own, per_key, repeats)

    def project_to(role: str, part: str, size: int, axis: str) -> ParamSpec:
        shape, axes = (len(layers), width, size), ("layers", "model", axis)
        return ParamSpec(shape, dtype, axes, role, layers, file=forms[part])

    def taps(part: str, start: int, size: int, axis: str) -> ParamSpec:
        key_heads = replace(forms[part], period=0, repeat_width=own.key_dim) if axis == "kv_heads" else TRANSPOSED
        form = replace(key_heads, start=start, num_columns=2 * q_width + v_width)
        shape, axes = (len(layers), own.num_taps, 1, size), ("layers", None, None, axis)
        return ParamSpec(shape, dtype, axes, "delta_conv", layers, file=form)

    def per_head(role: str, initial: str) -> ParamSpec:
        shape = (len(layers), own.num_value_heads)
        return ParamSpec(shape, "float32", ("layers", "heads"), role, layers, initial=initial)

    q_role, z_role, b_role, a_role = (
        ("delta_qkvz", "delta_qkvz", "delta_ba", "delta_ba")
        if own.fused == "by_key_head"
        else ("delta_qkv", "delta_z", "delta_b", "delta_a")
    )
    return {
        "q_LDK": project_to(q_role, "q", q_width * repeats, "kv_heads"),
        "k_LDK": project_to(q_role, "k", q_width * repeats, "kv_heads"),
        "v_LDH": project_to(q_role, "v", v_width, "heads"),
        "z_LDH": project_to(z_role, "z", v_width, "heads"),
        "b_LDH": project_to(b_role, "b", own.num_value_heads, "heads"),
        "a_LDH": project_to(a_role, "a", own.num_value_heads, "heads"),
        "q_taps_LJ1K": taps("q", 0, q_width * repeats, "kv_heads"),
        "k_taps_LJ1K": taps("k", q_width, q_width * repeats, "kv_heads"),
        "v_taps_LJ1H": taps("v", 2 * q_width, v_width, "heads"),
        "decay_LH": per_head("delta_decay", "log_decay"),
        "decay_bias_LH": per_head("delta_decay_bias", "ones"),
        "norm_Lv": ParamSpec(
            (len(layers), own.value_dim), "float32", ("layers", None), "delta_norm", layers, initial="ones"
        ),
        "o_LHD": ParamSpec(
            (len(layers), v_width, width), dtype, ("layers", "heads", "model"), "delta_out", layers, file=TRANSPOSED
        ),
    }


def _file_forms(own: GatedDelta, per_key: int, repeats: int) -> dict[str, FileForm]:
    """Return the file form of each part of the projections; each key head serves `per_key` value heads."""
    d, v = own.key_dim, per_key * own.value_dim
    q_width, v_width = own.num_key_heads * d, own.num_value_heads * own.value_dim
    if own.fused == "by_key_head":
        group = replace(TRANSPOSED, period=2 * (d + v))
        of_heads = replace(TRANSPOSED, period=2 * per_key, repeat_width=per_key)
        return {
            "q": replace(group, repeat_width=d, repeats=repeats),
            "k": replace(group, repeat_width=d, repeats=repeats, start=d),
            "v": replace(group, repeat_width=v, start=2 * d),
            "z": replace(group, repeat_width=v, start=2 * d + v),
            "b": of_heads,
            "a": replace(of_heads, start=per_key),
        }
    whole = replace(TRANSPOSED, num_columns=2 * q_width + v_width)
    return {
        "q": replace(whole, repeat_width=d, repeats=repeats),
        "k": replace(whole, repeat_width=d, repeats=repeats, start=q_width),
        "v": replace(whole, start=2 * q_width),
        "z": TRANSPOSED,
        "b": TRANSPOSED,
        "a": TRANSPOSED,
    }


def states(
    own: StateSizes,
    *,
    kernels: Kernels,
    tensor_size: int,
    heads_of_block: int = 1,
    input_rows: tuple[int, int] | None = None,
) -> tuple[StateKind, ...]:
    """Return the entry and the ring of a row (`DeltaPools`), float32 for every compute dtype.

    Values of `heads_of_block` heads lie side by side. Inputs of the convolution lie in `input_rows` (number, width) if
    given, otherwise in a row for each key head.
    """
    heads, key_heads = own.num_value_heads, own.num_key_heads * key_repeats(own, tensor_size)
    channels = 2 * own.key_dim + heads // key_heads * own.value_dim
    places = kernels.recurrence.decay_places if own.num_decays == 1 else 0

    def array(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> ArraySpec:
        return ArraySpec(shape, axes, "float32")

    blocks, block_width = heads // heads_of_block, heads_of_block * own.value_dim
    inputs = input_rows or (key_heads, channels)
    entry = (
        array((blocks, own.key_dim, block_width), ("heads", None, None)),
        array((own.num_taps - 1, *inputs), (None, "kv_heads", None)),
    )
    ring = (
        array((CHUNK, key_heads, own.key_dim), (None, "kv_heads", None)),
        array((CHUNK, blocks, block_width), (None, "heads", None)),
        array((heads, places), ("heads", None))
        if places
        else array((CHUNK, heads, own.num_decays), (None, "heads", None)),
        array((WINDOW_ROWS, *inputs), (None, "kv_heads", None)),
    )
    return (StateKind(STATE, "entry", entry, entry_tokens=CHUNK, ring=ring),)


class DeltaStep(NamedTuple):
    """Values derived from a step's tokens, common to all layers."""

    pieces: Pieces
    history: History
    num_entries: int
    """Entries per layer."""
    num_rows: int
    """Rows with a ring."""


def prepare(own: StateSizes, batch: TokenBatch, pools: Pools, *, config: ModelConfig) -> DeltaStep:
    """Split the tokens of a step into pieces, and find the earlier tokens that the convolution reads."""
    assert batch.entries_B3 is not None and batch.rows_B is not None, "rows know their entries"
    entries, num_blocks = RowEntries(*batch.entries_B3.T), batch.num_prefill_blocks
    block_tokens = (len(batch.positions_T) - batch.num_singles) // max(1, num_blocks)
    num_layers = len(config.spec.layers_with_mixer(own.kind))
    arrays = DeltaPools(*pools[STATE])
    with jax.named_scope("delta_pieces"):
        pieces = cut_pieces(
            batch.positions_T, batch.rows_B, entries, num_singles=batch.num_singles, block_tokens=block_tokens
        )
        history = find_history(
            batch.positions_T,
            batch.rows_B,
            entries,
            num_singles=batch.num_singles,
            block_tokens=block_tokens,
            num_taps=own.num_taps,
        )
    return DeltaStep(
        pieces, history, len(arrays.state_EHdv) // num_layers, num_rows=len(arrays.keys_RCKd) // num_layers
    )


class DeltaInputs(NamedTuple):
    """Projections of a step's tokens."""

    channels_TKW: jax.Array
    """Inputs of the convolution."""
    decay_THx: jax.Array
    """Logarithms of decays, float32."""
    beta_TH: jax.Array
    """Weights of the new values, float32 from 0 to 1."""
    gate_THv: jax.Array
    """Output gates before their function (`GateRule.output`)."""


def apply(own: GatedDelta, rows: tuple[jax.Array, Pools], inputs: LayerInputs) -> tuple[jax.Array, Pools]:
    """Advance the states of a step's rows; return the addend of the stream [T, D], and the pools."""
    return advance_layer(own, rows, inputs, project_rows=_projected)


@jax.named_scope("gated_delta")
def advance_layer(
    own: DeltaSizes,
    rows: tuple[jax.Array, Pools],
    inputs: LayerInputs,
    *,
    project_rows: Callable[..., DeltaInputs],
) -> tuple[jax.Array, Pools]:
    """Compute a layer with a delta rule like `apply`; `project_rows(own, normed_TD, weights)` projects the stream."""
    (normed_TD, pools), (weights, of_step, layer, config) = rows, inputs
    step, kernels, by_rows = of_step.prepared[own.kind], config.kernels.recurrence, config.kernels.by_rows
    if kernels.advance_layer is not None:
        arrays = DeltaPools(*pools[STATE])
        out_TD, arrays = kernels.advance_layer(
            normed_TD, weights, arrays, step.pieces, layer=layer, eps=config.spec.norm_eps, gates=own.gates
        )
        out_TD = config.plan.sum_over_tensor(out_TD).astype(normed_TD.dtype)
        return out_TD, {**pools, STATE: tuple(arrays)}
    of_layer = {name: stacked[layer] for name, stacked in weights.items()}
    place, arrays = (layer * step.num_entries, layer * step.num_rows), DeltaPools(*pools[STATE])
    with jax.named_scope("projections"):
        given = by_rows(lambda part_TD: project_rows(own, part_TD, of_layer), normed_TD)
    with jax.named_scope("convolution"):
        taps_JKW = by_key_head(*(of_layer[name][:, 0] for name in ("q_taps_LJ1K", "k_taps_LJ1K", "v_taps_LJ1H")), own)
        mixed_TKW = kernels.short_conv(given.channels_TKW, taps_JKW, arrays, step.history, layer=place)
        tokens = by_rows(lambda part: _tokens(own, *part), (mixed_TKW.astype(normed_TD.dtype), given))
    with jax.named_scope("recurrence"):
        out_THv, arrays = kernels.advance(tokens, arrays, step.pieces, layer=place)
    with jax.named_scope("output_product"):

        def multiply_out(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            out_THv, gate_THv, valid_T = part
            normed_THv = rms_norm(out_THv, of_layer["norm_Lv"], config.spec.norm_eps)
            gate_THv = OUTPUT_GATES[own.gates.output](gate_THv.astype(jnp.float32))
            gated_THv = (normed_THv * gate_THv).astype(normed_TD.dtype)
            gated_TH = jnp.where(valid_T[:, None, None], gated_THv, 0).reshape(len(out_THv), -1)
            return jnp.matmul(gated_TH, of_layer["o_LHD"], preferred_element_type=jnp.float32)

        out_TD = by_rows(multiply_out, (out_THv, given.gate_THv, of_step.valid_T))
        out_TD = config.plan.sum_over_tensor(out_TD).astype(normed_TD.dtype)
    return out_TD, {**pools, STATE: tuple(arrays)}


def _projected(own: GatedDelta, normed_TD: jax.Array, weights: dict[str, jax.Array]) -> DeltaInputs:
    """Project the stream [T, D] by a layer's weights."""
    q_TK, k_TK, v_TH, z_TH, b_TH, a_TH = (
        project(normed_TD, weights[name]) for name in ("q_LDK", "k_LDK", "v_LDH", "z_LDH", "b_LDH", "a_LDH")
    )
    wide_TH = a_TH.astype(jnp.float32) + weights["decay_bias_LH"]
    decay_TH = log_decays(wide_TH, weights["decay_LH"], own.gates, dtype=normed_TD.dtype)
    return DeltaInputs(
        by_key_head(q_TK, k_TK, v_TH, own),
        decay_TH[..., None],
        jax.nn.sigmoid(b_TH.astype(jnp.float32)),
        z_TH.reshape(len(z_TH), -1, own.value_dim),
    )


def by_key_head(q_NK: jax.Array, k_NK: jax.Array, v_NH: jax.Array, own: DeltaSizes) -> jax.Array:
    """Concatenate the channels of each key head: [N, K, W]."""
    q_NKd, k_NKd = (each.reshape(len(each), -1, own.key_dim) for each in (q_NK, k_NK))
    return jnp.concatenate([q_NKd, k_NKd, v_NH.reshape(len(v_NH), q_NKd.shape[1], -1)], axis=-1)


def _tokens(own: DeltaSizes, mixed_TKW: jax.Array, given: DeltaInputs) -> DeltaTokens:
    """Split mixed channels into queries, keys and values; queries and keys are normed in float32."""
    d = own.key_dim
    q_TKd, k_TKd, v_TKr = mixed_TKW[..., :d], mixed_TKW[..., d : 2 * d], mixed_TKW[..., 2 * d :]
    q_TKd = _unit(q_TKd) * d**-0.5
    return DeltaTokens(
        q_TKd.astype(mixed_TKW.dtype),
        _unit(k_TKd).astype(mixed_TKW.dtype),
        v_TKr.reshape(len(v_TKr), -1, own.value_dim),
        given.decay_THx,
        given.beta_TH,
        given.channels_TKW,
    )


def _unit(rows: jax.Array) -> jax.Array:
    """Divide by the norm over the last dimension, float32."""
    wide = rows.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + EPS)


MIXER = Mixer(parameters, states, None, prepare, apply)
