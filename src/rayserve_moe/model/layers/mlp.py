"""MLP of a layer without experts: parameters and computation."""

# T tokens   N dense layers   D model width   I dense width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax

from rayserve_moe.model.layers.kinds import Ffn, FfnRows
from rayserve_moe.model.model_config import ModelConfig, Parameters, StepInputs, adapters_of
from rayserve_moe.model.param_spec import TRANSPOSED, ParamSpec
from rayserve_moe.model.spec import LayerSpec, ModelSpec

PAIRS = (("dense_gate", "dense_up"), ("shared_gate", "shared_up"))
"""Roles of gate and up, which may share a tensor of the files."""

MATRICES = ("gate_NDI", "up_NDI", "down_NID")
"""Names of the matrices of a dense layer."""


def parameters(
    spec: ModelSpec,
    *,
    dtype: str,
    expert_dtype: str,
    num_redundant: int,
) -> dict[str, dict[str, ParamSpec]]:
    """Return the matrices of the MLPs."""
    sizes = spec.hidden_size, spec.dense_intermediate_size
    return {"dense": matrices(MATRICES, "dense", sizes, spec.layers_with_ffn("dense"), spec=spec, dtype=dtype)}


def divided_sizes(spec: ModelSpec) -> dict[str, int]:
    """Return the width of the MLP, which must be divisible by the tensor axis."""
    return {"intermediate_size": spec.dense_intermediate_size}


@jax.named_scope("dense_mlp")
def apply(
    params: Parameters,
    rows: FfnRows,
    inputs: StepInputs,
    *,
    kind: LayerSpec,
    layer: jax.Array,
    config: ModelConfig,
) -> tuple[jax.Array, None]:
    """Return the MLP's output for every token [T, D], without routing."""
    weights, normed_TD = params["dense"], rows.normed_TD
    activation = config.spec.experts.gating(kind.mlp_limit)
    made_TD = config.kernels.mlp(
        normed_TD,
        tuple(map(weights.get, MATRICES)),
        layer=layer,
        activation=activation,
        names=MATRICES,
        adapters=adapters_of(inputs, "dense", layer),
    )
    out_TD = config.plan.sum_over_tensor(made_TD)
    return out_TD.astype(normed_TD.dtype), None


def matrices(
    names: tuple[str, str, str],
    group: str,
    sizes: tuple[int, int],
    layers: tuple[int, ...],
    *,
    spec: ModelSpec,
    dtype: str,
) -> dict[str, ParamSpec]:
    """Return gate, up and down of an MLP of `sizes` (width, inner width), without a gate if the model has none."""
    parts = dict(zip(names, ("gate", "up", "down"), strict=True))
    return {
        name: _product(f"{group}_{part}", sizes[::-1] if part == "down" else sizes, layers, dtype)
        for name, part in parts.items()
        if part != "gate" or spec.experts.has_gate
    }


def _product(role: str, shape: tuple[int, int], layers: tuple[int, ...], dtype: str) -> ParamSpec:
    """Return a matrix of an MLP, sharded over the tensor axis on its inner dimension."""
    axes = ("dense_inner", "model") if role.endswith("_down") else ("model", "dense_inner")
    return ParamSpec((len(layers), *shape), dtype, ("layers", *axes), role, layers, file=TRANSPOSED)


def halves_in_files(params: Mapping[str, ParamSpec], rules: Mapping[str, str]) -> dict[str, ParamSpec]:
    """Return the parameters of a group as in the files that `rules` name.

    If gate and up of a gated MLP have the same name, they are the first and the second half of that tensor.
    """
    return {name: _half(param) if _is_half(param.role, rules) else param for name, param in params.items()}


def _is_half(role: str, rules: Mapping[str, str]) -> bool:
    return any(role in pair and rules.get(pair[0]) == rules[pair[1]] for pair in PAIRS)


def _half(param: ParamSpec) -> ParamSpec:
    width = param.filled_shape[param.column_dim]
    start = width if param.role.endswith("_up") else 0
    return replace(param, file=replace(param.file, repeat_width=width, period=2 * width, start=start))


FFN = Ffn(parameters, apply, divided_sizes, {"dense": MATRICES})
