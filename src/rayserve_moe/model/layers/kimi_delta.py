"""Kimi delta attention (arXiv:2510.26692): the gated delta rule with a decay for each element of a key.

`gated_delta` provides states, pieces and the convolution.
"""

# T tokens   L layers of the kind   D model width   K, H heads * their width, or heads   A heads   d head width
# R width between two products   J taps of the convolution

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.reference.delta_gates import GateRule, log_decays
from rayserve_moe.kernels.reference.gated_delta import WINDOW_ROWS
from rayserve_moe.kernels.reference.layers import project
from rayserve_moe.model.layers.gated_delta import DeltaInputs, advance_layer, by_key_head, prepare, states
from rayserve_moe.model.layers.kinds import LayerInputs, Mixer
from rayserve_moe.model.model_config import Pools
from rayserve_moe.model.param_spec import TRANSPOSED, FileForm, ParamSpec
from rayserve_moe.model.spec import ModelSpec

KIND = "kimi_delta"


@dataclass(frozen=True)
class KimiDelta:
    """Delta rule with a decay per element of a key. Widths are in elements."""

    kind: ClassVar[str] = KIND
    has_windows: ClassVar[bool] = False

    num_heads: int
    head_dim: int
    """Width of a query, a key and a value."""
    num_taps: int
    """Tokens that the convolution reads, including the newest."""
    gates: GateRule
    rank: int | None = None
    """Width between the two products of decays, and of output gates; None: each is one product."""
    decay_rates_in_block: bool = False
    """True if files hold the logarithms of decay rates as [1, 1, heads, 1], else as [heads]."""

    @property
    def num_key_heads(self) -> int:
        return self.num_heads

    @property
    def num_value_heads(self) -> int:
        return self.num_heads

    @property
    def key_dim(self) -> int:
        return self.head_dim

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def num_decays(self) -> int:
        """Return the number of decays of a head."""
        return self.head_dim

    def unsupported_reason(self) -> str:
        """Return why the sizes do not fit each other; empty if they do."""
        if not 2 <= self.num_taps <= WINDOW_ROWS // 2:
            most = WINDOW_ROWS // 2
            return f"linear_conv_kernel_dim, or short_conv_kernel_size, = {self.num_taps} is not from 2 to {most}"
        return ""

    def divided_sizes(self, tensor_size: int) -> dict[str, int]:
        """Return the number of heads, which must be divisible by `tensor_size`."""
        return {"linear_num_heads": self.num_heads}

    def summed_widths(self, tensor_size: int) -> dict[str, int]:
        """Return the widths that products on a device sum over."""
        return {"linear_head_dim": self.num_heads * self.head_dim // tensor_size}

    def score_shape(self) -> None:
        """Return None: the mixer has no scores."""


def parameters(own: KimiDelta, spec: ModelSpec, *, dtype: str, tensor_size: int) -> dict[str, ParamSpec]:
    """Return projections, taps of the convolution, decays, and the norm of the output."""
    layers, width, inner = spec.layers_with_mixer(KIND), spec.hidden_size, own.num_heads * own.head_dim

    def stack(role: str, shape: tuple[int, ...], axes: tuple[str | None, ...], initial: str = "normal") -> ParamSpec:
        form = TRANSPOSED if len(shape) > 1 else FileForm()
        kept = dtype if initial == "normal" else "float32"
        return ParamSpec((len(layers), *shape), kept, ("layers", *axes), role, layers, file=form, initial=initial)

    def matrix(role: str, size: int) -> ParamSpec:
        return stack(role, (width, size), ("model", "heads"))

    def taps(role: str) -> ParamSpec:
        return stack(role, (own.num_taps, 1, inner), (None, None, "heads"))

    specs = {
        "q_LDK": matrix("kda_q", inner),
        "k_LDK": matrix("kda_k", inner),
        "v_LDH": matrix("kda_v", inner),
        "b_LDH": matrix("kda_b", own.num_heads),
        "q_taps_LJ1K": taps("kda_q_conv"),
        "k_taps_LJ1K": taps("kda_k_conv"),
        "v_taps_LJ1H": taps("kda_v_conv"),
        "decay_bias_LH": stack("kda_decay_bias", (inner,), ("heads",), "zeros"),
        "norm_Lv": stack("kda_norm", (own.head_dim,), (None,), "ones"),
        "o_LHD": stack("kda_out", (inner, width), ("heads", "model")),
    }
    if own.decay_rates_in_block:
        rates = stack("kda_decay", (1, own.num_heads, 1, 1), (None, "heads", None, None), "log_decay")
        specs["decay_L1H11"] = rates
    else:
        specs["decay_LH"] = stack("kda_decay", (own.num_heads,), ("heads",), "log_decay")
    if own.rank is None:
        return specs | {"a_LDH": matrix("kda_a", inner), "z_LDH": matrix("kda_z", inner)}
    for part in ("a", "z"):
        specs[f"{part}_in_LDR"] = stack(f"kda_{part}_in", (width, own.rank), ("model", None))
        specs[f"{part}_LRH"] = stack(f"kda_{part}", (own.rank, inner), (None, "heads"))
    return specs


def decay_rates(weights: dict[str, jax.Array]) -> jax.Array:
    """Return the logarithms of decay rates, one per head along the last dimension."""
    return weights["decay_LH"] if "decay_LH" in weights else weights["decay_L1H11"][..., 0, :, 0, 0]


def apply(own: KimiDelta, rows: tuple[jax.Array, Pools], inputs: LayerInputs) -> tuple[jax.Array, Pools]:
    """Advance the states of a step's rows; return the addend of the stream [T, D], and the pools."""
    return advance_layer(own, rows, inputs, project_rows=_projected)


def _projected(own: KimiDelta, normed_TD: jax.Array, weights: dict[str, jax.Array]) -> DeltaInputs:
    """Project the stream [T, D] by a layer's weights."""
    q_TH, k_TH, v_TH, b_TA = (project(normed_TD, weights[name]) for name in ("q_LDK", "k_LDK", "v_LDH", "b_LDH"))
    a_TH, z_TH = (_in_two_products(normed_TD, weights, part) for part in ("a", "z"))
    wide_TH = a_TH.astype(jnp.float32) + weights["decay_bias_LH"]
    wide_TAd, gate_TAd = (each.reshape(len(each), -1, own.head_dim) for each in (wide_TH, z_TH))
    decay_TAd = log_decays(wide_TAd, decay_rates(weights)[:, None], own.gates, dtype=normed_TD.dtype)
    beta_TA = jax.nn.sigmoid(b_TA.astype(jnp.float32))
    return DeltaInputs(by_key_head(q_TH, k_TH, v_TH, own), decay_TAd, beta_TA, gate_TAd)


def _in_two_products(normed_TD: jax.Array, weights: dict[str, jax.Array], part: str) -> jax.Array:
    """Project the stream by one matrix, or by two matrices with a low rank."""
    if f"{part}_LDH" in weights:
        return project(normed_TD, weights[f"{part}_LDH"])
    return project(project(normed_TD, weights[f"{part}_in_LDR"]), weights[f"{part}_LRH"])


MIXER = Mixer(parameters, states, None, prepare, apply)
