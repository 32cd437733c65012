"""Gated MLP of a layer without experts: parameters and computation."""

# T tokens   N dense layers   D model width   I dense width

from __future__ import annotations

import jax

from rayserve_moe.model.layers.kinds import Ffn
from rayserve_moe.model.model_config import ModelConfig, Parameters, StepInputs
from rayserve_moe.model.param_spec import TRANSPOSED, ParamSpec
from rayserve_moe.model.spec import ModelSpec


def parameters(
    spec: ModelSpec,
    *,
    dtype: str,
    expert_dtype: str,
    num_redundant: int,
) -> dict[str, dict[str, ParamSpec]]:
    """Return the matrices of the MLPs."""
    layers, width, inner = spec.layers_with_ffn("dense"), spec.hidden_size, spec.dense_intermediate_size
    return {
        "dense": {
            "gate_NDI": product("dense_gate", (width, inner), layers, dtype),
            "up_NDI": product("dense_up", (width, inner), layers, dtype),
            "down_NID": product("dense_down", (inner, width), layers, dtype),
        }
    }


def divided_sizes(spec: ModelSpec) -> dict[str, int]:
    """Return the width of the MLP, which must be divisible by the tensor axis."""
    return {"intermediate_size": spec.dense_intermediate_size}


@jax.named_scope("dense_mlp")
def apply(
    params: Parameters,
    normed_TD: jax.Array,
    inputs: StepInputs,
    *,
    layer: jax.Array,
    config: ModelConfig,
) -> tuple[jax.Array, None]:
    """Return the MLP's output for every token [T, D], without routing."""
    weights = params["dense"]
    matrices = weights["gate_NDI"], weights["up_NDI"], weights["down_NID"]
    out_TD = config.plan.sum_over_tensor(config.kernels.mlp(normed_TD, matrices, layer=layer))
    return out_TD.astype(normed_TD.dtype), None


def product(role: str, shape: tuple[int, int], layers: tuple[int, ...], dtype: str) -> ParamSpec:
    """Return a matrix of a gated MLP, sharded over the tensor axis on its inner dimension."""
    axes = ("dense_inner", "model") if role.endswith("_down") else ("model", "dense_inner")
    return ParamSpec((len(layers), *shape), dtype, ("layers", *axes), role, layers, file=TRANSPOSED)


FFN = Ffn(parameters, apply, divided_sizes)
