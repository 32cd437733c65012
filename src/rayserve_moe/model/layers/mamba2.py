"""Mamba-2 layers (Dao and Gu, arXiv:2405.21060): configuration, parameters and computation.

A head's state is a gated linear recurrence without the delta rule (`kernels.reference.gated_delta`), with the entries
and rings of gated delta layers. Keys are the paper's B and queries its C, which the heads of a group share; values are
x, and `beta` is the step dt.
"""

# T tokens   L layers of the kind   D model width   K groups   H heads   d state width   v head width   J taps
# R rows and l lanes of a pool's inputs
# I inner width: heads * v   N width of B and of C: groups * d   W channels of a group: C, B, and x of its heads

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.reference.gated_delta import WINDOW_ROWS, DeltaPools, DeltaTokens
from rayserve_moe.kernels.reference.layers import project, rms_norm
from rayserve_moe.model.layers import gated_delta
from rayserve_moe.model.layers.gated_delta import STATE
from rayserve_moe.model.layers.kinds import LayerInputs, Mixer
from rayserve_moe.model.model_config import Pools
from rayserve_moe.model.param_spec import TRANSPOSED, FileForm, ParamSpec
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.state.kinds import StateKind

KIND = "mamba2"


@dataclass(frozen=True)
class Mamba2:
    """State space layer after a short convolution. Widths are in elements."""

    kind: ClassVar[str] = KIND
    has_windows: ClassVar[bool] = False
    num_decays: ClassVar[int] = 1

    num_value_heads: int
    value_dim: int
    """Width of a head."""
    num_key_heads: int
    """Groups: the heads of a group share B and C, and the norm of their output."""
    key_dim: int
    """Width of the state, of B and of C."""
    num_taps: int
    """Tokens that the convolution reads, including the newest."""
    min_step: float
    """Lower bound of a token's step."""
    conv_bias: bool = False
    """True if the convolution has a bias."""

    def unsupported_reason(self) -> str:
        """Return why the sizes do not fit each other; empty if they do."""
        if self.num_value_heads % self.num_key_heads:
            heads = f"mamba_num_heads, or mamba_n_heads, = {self.num_value_heads}"
            return f"{heads} do not divide over n_groups, or mamba_n_groups, = {self.num_key_heads}"
        if not 2 <= self.num_taps <= WINDOW_ROWS // 2:
            return f"conv_kernel, or mamba_d_conv, = {self.num_taps} is not from 2 to {WINDOW_ROWS // 2}"
        return ""

    def divided_sizes(self, tensor_size: int) -> dict[str, int]:
        """Return the number of groups, which must be divisible by `tensor_size`: a norm covers a group."""
        del tensor_size
        return {"n_groups": self.num_key_heads}

    def summed_widths(self, tensor_size: int) -> dict[str, int]:
        """Return the width of the output that products on a device sum over."""
        return {"mamba_head_dim": self.num_value_heads * self.value_dim // tensor_size}

    def score_shape(self) -> None:
        """Return None: the mixer has no scores."""


def parameters(own: Mamba2, spec: ModelSpec, *, dtype: str, tensor_size: int) -> dict[str, ParamSpec]:
    """Return projections, the convolution, decays, the weight of inputs, and the norm of the output."""
    del tensor_size
    layers, width = spec.layers_with_mixer(KIND), spec.hidden_size
    inner, keys, heads = own.num_value_heads * own.value_dim, own.num_key_heads * own.key_dim, own.num_value_heads
    num_columns, num_channels = 2 * inner + 2 * keys + heads, inner + 2 * keys

    def project_to(start: int, size: int, axis: str) -> ParamSpec:
        form = replace(TRANSPOSED, start=start, num_columns=num_columns)
        shape, axes = (len(layers), width, size), ("layers", "model", axis)
        return ParamSpec(shape, dtype, axes, "mamba_in", layers, file=form)

    def taps(start: int, size: int, axis: str) -> ParamSpec:
        form = replace(TRANSPOSED, start=start, num_columns=num_channels)
        shape, axes = (len(layers), own.num_taps, 1, size), ("layers", None, None, axis)
        return ParamSpec(shape, dtype, axes, "mamba_conv", layers, file=form)

    def bias(start: int, size: int, axis: str) -> ParamSpec:
        form = FileForm(start=start, num_columns=num_channels)
        return ParamSpec((len(layers), size), dtype, ("layers", axis), "mamba_conv_bias", layers, file=form)

    def vector(role: str, size: int, initial: str) -> ParamSpec:
        return ParamSpec((len(layers), size), "float32", ("layers", "heads"), role, layers, initial=initial)

    specs = {
        "z_LDI": project_to(0, inner, "heads"),
        "x_LDI": project_to(inner, inner, "heads"),
        "b_LDN": project_to(2 * inner, keys, "kv_heads"),
        "c_LDN": project_to(2 * inner + keys, keys, "kv_heads"),
        "step_LDH": project_to(2 * inner + 2 * keys, heads, "heads"),
        "x_taps_LJ1I": taps(0, inner, "heads"),
        "b_taps_LJ1N": taps(inner, keys, "kv_heads"),
        "c_taps_LJ1N": taps(inner + keys, keys, "kv_heads"),
        "decay_LH": vector("mamba_decay", heads, "log_decay"),
        "step_bias_LH": vector("mamba_step_bias", heads, "ones"),
        "skip_LH": vector("mamba_skip", heads, "ones"),
        "norm_LI": vector("mamba_norm", inner, "ones"),
        "o_LID": ParamSpec(
            (len(layers), inner, width), dtype, ("layers", "heads", "model"), "mamba_out", layers, file=TRANSPOSED
        ),
    }
    if own.conv_bias:
        specs["x_bias_LI"] = bias(0, inner, "heads")
        specs["b_bias_LN"] = bias(inner, keys, "kv_heads")
        specs["c_bias_LN"] = bias(inner + keys, keys, "kv_heads")
    return specs


@jax.named_scope("mamba2")
def apply(own: Mamba2, rows: tuple[jax.Array, Pools], inputs: LayerInputs) -> tuple[jax.Array, Pools]:
    """Advance the states of a step's rows; return the addend of the stream [T, D], and the pools."""
    (normed_TD, pools), (weights, of_step, layer, config) = rows, inputs
    step, kernels, by_rows = of_step.prepared[KIND], config.kernels.recurrence, config.kernels.by_rows
    if kernels.advance_mamba2_layer is not None:
        out_TD, arrays = kernels.advance_mamba2_layer(
            normed_TD,
            weights,
            DeltaPools(*pools[STATE]),
            step.pieces,
            layer=layer,
            eps=config.spec.norm_eps,
            min_step=own.min_step,
        )
        out_TD = config.plan.sum_over_tensor(out_TD).astype(normed_TD.dtype)
        return out_TD, {**pools, STATE: tuple(arrays)}
    of_layer = {name: stacked[layer] for name, stacked in weights.items()}
    place, arrays = (layer * step.num_entries, layer * step.num_rows), DeltaPools(*pools[STATE])
    with jax.named_scope("projections"):
        z_TI, channels_TKW, step_TH = by_rows(lambda part_TD: _projected(own, part_TD, of_layer), normed_TD)
        row_shape, group_shape = arrays.inputs_RJKW.shape[2:], channels_TKW.shape
        channels_TRl = _in_rows(channels_TKW, row_shape)
    with jax.named_scope("convolution"):
        taps = (of_layer[name][:, 0] for name in ("c_taps_LJ1N", "b_taps_LJ1N", "x_taps_LJ1I"))
        biases = [of_layer[name][None] for name in ("c_bias_LN", "b_bias_LN", "x_bias_LI") if own.conv_bias]
        bias_Rl = _in_rows(_by_group(*biases, own), row_shape)[0] if biases else None
        taps_JRl = _in_rows(_by_group(*taps, own), row_shape)
        mixed_TRl = kernels.short_conv(channels_TRl, taps_JRl, arrays, step.history, layer=place, bias_KW=bias_Rl)
        mixed_TKW = _from_rows(mixed_TRl.astype(normed_TD.dtype), group_shape)
    with jax.named_scope("recurrence"):
        decay_TH = -jnp.exp(of_layer["decay_LH"]) * step_TH
        tokens = DeltaTokens(*_split(mixed_TKW, own), decay_TH[..., None], step_TH, channels_TRl)
        out_THv, arrays = kernels.advance(tokens, arrays, step.pieces, layer=place, delta=False)
        out_THv = out_THv + of_layer["skip_LH"][:, None] * tokens.values_THv.astype(jnp.float32)
    with jax.named_scope("output_product"):
        multiply = partial(_output_product, of_layer=of_layer, num_groups=group_shape[1], eps=config.spec.norm_eps)
        out_TD = by_rows(multiply, (out_THv, z_TI, of_step.valid_T))
        out_TD = config.plan.sum_over_tensor(out_TD).astype(normed_TD.dtype)
    return out_TD, {**pools, STATE: tuple(arrays)}


def _projected(
    own: Mamba2, normed_TD: jax.Array, of_layer: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Project the stream: gates of the output [T, I], inputs of the convolution [T, K, W], and steps [T, H]."""
    z_TI, x_TI, b_TN, c_TN, step_TH = (
        project(normed_TD, of_layer[name]) for name in ("z_LDI", "x_LDI", "b_LDN", "c_LDN", "step_LDH")
    )
    step_TH = jax.nn.softplus(step_TH.astype(jnp.float32) + of_layer["step_bias_LH"])
    return z_TI, _by_group(c_TN, b_TN, x_TI, own), jnp.maximum(step_TH, own.min_step)


def _split(mixed_TKW: jax.Array, own: Mamba2) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split mixed channels into C and B [T, K, d], and x [T, H, v]."""
    c_TKd, b_TKd, x_TKr = jnp.split(mixed_TKW, [own.key_dim, 2 * own.key_dim], axis=-1)
    return c_TKd, b_TKd, x_TKr.reshape(len(x_TKr), -1, own.value_dim)


def _output_product(
    rows: tuple[jax.Array, jax.Array, jax.Array], *, of_layer: Mapping[str, jax.Array], num_groups: int, eps: float
) -> jax.Array:
    """Gate and norm the outputs [T, H, v] of valid tokens and multiply them: float32 [T, D]."""
    out_THv, z_TI, valid_T = rows
    gated_TI = out_THv.reshape(z_TI.shape) * jax.nn.silu(z_TI.astype(jnp.float32))
    scale_Kv = of_layer["norm_LI"].reshape(num_groups, -1)
    normed_TKv = rms_norm(gated_TI.reshape(len(z_TI), num_groups, -1), scale_Kv, eps)
    inner_TI = normed_TKv.reshape(z_TI.shape).astype(z_TI.dtype)
    inner_TI = jnp.where(valid_T[:, None], inner_TI, 0)
    return jnp.matmul(inner_TI, of_layer["o_LID"], preferred_element_type=jnp.float32)


def _by_group(c_JN: jax.Array, b_JN: jax.Array, x_JI: jax.Array, own: Mamba2) -> jax.Array:
    """Concatenate the channels of each group: [J, K, W]."""
    c_JKd, b_JKd = (each.reshape(len(each), -1, own.key_dim) for each in (c_JN, b_JN))
    return jnp.concatenate([c_JKd, b_JKd, x_JI.reshape(len(x_JI), c_JKd.shape[1], -1)], axis=-1)


def _in_rows(channels_TKW: jax.Array, row_shape: tuple[int, ...]) -> jax.Array:
    """Flatten channels and zero-pad them to the row shape of a pool: [T, *row_shape]."""
    flat = channels_TKW.reshape(len(channels_TKW), -1)
    flat = jnp.pad(flat, ((0, 0), (0, math.prod(row_shape) - flat.shape[1])))
    return flat.reshape(-1, *row_shape)


def _from_rows(channels_TRl: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undo `_in_rows`: drop the padding and restore `shape`."""
    return channels_TRl.reshape(len(channels_TRl), -1)[:, : math.prod(shape[1:])].reshape(shape)


def states(own: Mamba2, *, kernels: Kernels, tensor_size: int) -> tuple[StateKind, ...]:
    """Return the entry and the ring of a row; they fill the tiles of the kernels.

    XLA on TPUs copies other pools between layouts: those with values of 64, or with inputs of one group on a device.
    """
    if kernels.recurrence.tile is None:
        return gated_delta.states(own, kernels=kernels, tensor_size=tensor_size)
    (num_rows, width), heads_of_group = kernels.recurrence.tile, own.num_value_heads // own.num_key_heads
    heads_of_block = max(1, width // own.value_dim)
    fills_rows = width % own.value_dim == 0 and heads_of_group % heads_of_block == 0
    channels = own.num_key_heads * (2 * own.key_dim + heads_of_group * own.value_dim) // tensor_size
    rows_of_device = math.ceil(channels / (width * num_rows)) * num_rows
    return gated_delta.states(
        own,
        kernels=kernels,
        tensor_size=tensor_size,
        heads_of_block=heads_of_block if fills_rows else 1,
        input_rows=(rows_of_device * tensor_size, width),
    )


MIXER = Mixer(parameters, states, None, gated_delta.prepare, apply)
