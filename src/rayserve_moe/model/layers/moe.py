"""Mixture of experts after the mixer: routers, expert slots, shared experts; parameters and computation."""

# T tokens   M MoE layers   D model width   E experts   P expert slots   F expert width   S width of a shared expert
# X tokens in prefill blocks   K experts per token   Z blocks of rows that have scales of their own
# l latent width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from rayserve_moe.experts.layer import LayerRouting, apply_experts
from rayserve_moe.experts.routing import ForcedExperts, router_of_layer
from rayserve_moe.kernels.adapters import AdapterPair, ExpertAdapters, LayerAdapters, RowAdapters
from rayserve_moe.kernels.narrow_weights import SCALE_BLOCK, scale_rows
from rayserve_moe.kernels.reference.activations import Activation
from rayserve_moe.kernels.reference.expert_products import ExpertWeights
from rayserve_moe.kernels.reference.layers import project
from rayserve_moe.kernels.tpu.top_experts import StackedRouter
from rayserve_moe.model.layers.kinds import Ffn, FfnRows
from rayserve_moe.model.layers.mlp import matrices
from rayserve_moe.model.model_config import ModelConfig, Parameters, StepInputs, adapters_of
from rayserve_moe.model.param_spec import TRANSPOSED, FileForm, ParamSpec, norm_spec
from rayserve_moe.model.spec import LayerSpec, ModelSpec

EXPERT_MATRICES = ("gate_MPDF", "up_MPDF", "down_MPFD")
"""Names of the matrices of experts."""
EXPERT_ARRAYS = (
    *EXPERT_MATRICES,
    *("gate_bias_MPF", "up_bias_MPF", "down_bias_MPD"),
    *("gate_scale_MPZF", "up_scale_MPZF", "down_scale_MPZD"),
)
"""Names in the order of `ExpertWeights`."""
SHARED_MATRICES = ("gate_MDS", "up_MDS", "down_MSD")
"""Names of the matrices of a shared expert."""
QUANTIZED = {"int8": "int8", "fp8": "float8_e4m3fn"}
"""Quantised dtypes of expert weights by the values of the setting `expert_dtype`."""
SCALE_OF = {"gate_MPDF": "gate_scale_MPZF", "up_MPDF": "up_scale_MPZF", "down_MPFD": "down_scale_MPZD"}
"""Scale array of each 8-bit matrix: a scale per column, or per column and block of rows.

The number of blocks is padded to a multiple of eight, because TPUs lay out more than one row in groups of eight.
"""


def router_specs(spec: ModelSpec) -> dict[str, ParamSpec]:
    """Return routers in float32, including biases, because rounding would change the selected experts.

    The scales of a router's own norm are divided by the root of the width when they are read.
    """
    router, layers = spec.router, spec.moe_layer_ids

    def bias(role: str, *, is_row: bool = False) -> ParamSpec:
        shape = (len(layers), router.num_experts)
        return ParamSpec(shape, "float32", ("layers", None), role, layers, file=FileForm(is_row=is_row))

    shape, axes = (len(layers), spec.hidden_size, router.num_experts), ("layers", "model", None)
    specs = {"router_MDE": ParamSpec(shape, "float32", axes, "router", layers, file=TRANSPOSED)}
    if router.own_norm:
        norm, of_norm = shape[:2], axes[:2]
        file = FileForm(factor=spec.hidden_size**-0.5)
        specs["norm_MD"] = ParamSpec(norm, "float32", of_norm, "router_norm", layers, file=file, initial="ones")
    if router.expert_factors:
        specs["factors_ME"] = replace(bias("expert_factors"), initial="ones")
    if router.logit_bias:
        specs["router_bias_ME"] = bias("router_bias")
    if router.selection_bias:
        specs["selection_bias_ME"] = bias("selection_bias", is_row=router.selection_bias_in_row)
    return specs


def slot_specs(
    spec: ModelSpec, *, dtype: str = "float32", expert_dtype: str = "", num_redundant: int = 0
) -> dict[str, ParamSpec]:
    """Return the arrays with an entry per expert slot, which migrate with their experts.

    8-bit matrices have float32 scales per column, after them in the tree. If files hold that dtype in blocks of 128 x
    128 (`ModelSpec.block_dtype`), scales are per block of rows and column.
    """
    layers, num_experts = spec.moe_layer_ids, spec.router.num_experts
    width, inner, layout = spec.exchanged_width, spec.experts.intermediate_size, spec.experts.layout
    whole = FileForm(transposed=layout != "fused_in_out_interleaved", has_all_experts=layout != "per_expert")

    def stack(role: str, shape: tuple[int, ...], axes: tuple[str, ...], file: FileForm = whole) -> ParamSpec:
        return ParamSpec(
            (len(layers), num_experts + num_redundant, *shape),
            dtype,
            ("layers", "expert_slots", *axes),
            role,
            layers,
            num_experts,
            file=file if len(shape) > 1 else replace(file, transposed=False),
        )

    gate, up = _gate_and_up(whole, spec)
    specs = {
        "gate_MPDF": stack("expert_gate", (width, inner), ("model", "expert_inner"), gate),
        "up_MPDF": stack("expert_up", (width, inner), ("model", "expert_inner"), up),
        "down_MPFD": stack("expert_down", (inner, width), ("expert_inner", "model")),
    }
    if spec.experts.bias:
        specs["gate_bias_MPF"] = stack("expert_gate_bias", (inner,), ("expert_inner",), gate)
        specs["up_bias_MPF"] = stack("expert_up_bias", (inner,), ("expert_inner",), up)
        specs["down_bias_MPD"] = stack("expert_down_bias", (width,), ("model",))
    if not spec.experts.has_gate:
        specs = {name: found for name, found in specs.items() if not name.startswith("gate")}
    is_quantized = expert_dtype in QUANTIZED.values()
    return _quantized(specs, expert_dtype, in_blocks=spec.block_dtype == expert_dtype) if is_quantized else specs


def experts_in_files(
    tree: dict[str, dict[str, ParamSpec]], rules: Mapping[str, str], *, spec: ModelSpec
) -> dict[str, dict[str, ParamSpec]]:
    """Return the parameters of a model with its experts as in the files that `rules` name.

    A rule without an expert names a tensor of all experts; the files of a family may have either form.
    """
    layout = "per_expert" if "{expert}" in rules["expert_down"] else "fused_out_in"
    if {layout, spec.experts.layout} != {"per_expert", "fused_out_in"}:
        return tree
    stored = slot_specs(replace(spec, experts=replace(spec.experts, layout=layout)))
    forms = {param.role: param.file for param in stored.values()}
    experts = {
        name: replace(param, file=forms[param.role]) if param.num_experts else param
        for name, param in tree["experts"].items()
    }
    return tree | {"experts": experts}


def _quantized(specs: dict[str, ParamSpec], dtype: str, *, in_blocks: bool) -> dict[str, ParamSpec]:
    """Return the 8-bit matrices with their scales."""
    scales = {}
    for name, scale in ((name, scale) for name, scale in SCALE_OF.items() if name in specs):
        matrix = specs[name] = replace(specs[name], dtype=dtype, scale_block=SCALE_BLOCK * in_blocks)
        num_scales = scale_rows(matrix.shape[2]) if in_blocks else 1
        shape, axes = (*matrix.shape[:2], num_scales, matrix.shape[3]), (*matrix.axes[:2], None, matrix.axes[3])
        scales[scale] = replace(matrix, shape=shape, axes=axes, dtype="float32", is_scale=True)
    return specs | scales


def _gate_and_up(whole: FileForm, spec: ModelSpec) -> tuple[FileForm, FileForm]:
    """Return the file forms of gate and up, which may share a tensor."""
    inner = spec.experts.intermediate_size
    halves, turns = replace(whole, repeat_width=inner, period=2 * inner), replace(whole, period=2)
    return {
        "per_expert": (whole, whole),
        "stacked": (whole, whole),
        "fused_out_in": (halves, replace(halves, start=inner)),
        "fused_in_out_interleaved": (turns, replace(turns, start=1)),
    }[spec.experts.layout]


def shared_specs(spec: ModelSpec, dtype: str) -> dict[str, ParamSpec]:
    """Return the shared experts, sharded like a dense MLP."""
    layers, width, inner = spec.moe_layer_ids, spec.hidden_size, spec.experts.shared_size
    specs = matrices(SHARED_MATRICES, "shared", (width, inner), layers, spec=spec, dtype=dtype)
    if spec.experts.shared == "sigmoid_gated":
        shape, axes = (len(layers), width, 1), ("layers", "model", None)
        specs["out_gate_MD1"] = ParamSpec(shape, dtype, axes, "shared_expert_gate", layers, file=TRANSPOSED)
    return specs


def parameters(
    spec: ModelSpec, *, dtype: str, expert_dtype: str, num_redundant: int
) -> dict[str, dict[str, ParamSpec]]:
    """Return routers, expert slots and, if the model has them, shared experts."""
    slots = slot_specs(spec, dtype=dtype, expert_dtype=expert_dtype, num_redundant=num_redundant)
    groups = {"experts": router_specs(spec) | slots}
    if spec.experts.shared != "none":
        groups["shared"] = shared_specs(spec, dtype)
    if spec.experts.separate_norms:
        groups["expert_norms"] = _norm_specs(spec, dtype)
    if spec.experts.latent_size:
        groups["expert_latents"] = _latent_specs(spec, dtype)
    return groups


def _latent_specs(spec: ModelSpec, dtype: str) -> dict[str, ParamSpec]:
    """Return the projections of rows to the width of experts and back. Every device has all of them."""
    layers, sizes = spec.moe_layer_ids, (spec.hidden_size, spec.experts.latent_size)

    def project(role: str, shape: tuple[int, ...]) -> ParamSpec:
        return ParamSpec((len(layers), *shape), dtype, ("layers", "model", "model"), role, layers, file=TRANSPOSED)

    return {"in_MDl": project("latent_in", sizes), "out_MlD": project("latent_out", sizes[::-1])}


def _norm_specs(spec: ModelSpec, dtype: str) -> dict[str, ParamSpec]:
    """Return the norms before and after experts, and after the shared expert."""
    layers = spec.moe_layer_ids
    shape, axes = (len(layers), spec.hidden_size), ("layers", "model")
    roles = {
        "before_MD": "experts_norm",
        "after_MD": "post_experts_norm",
        "after_shared_MD": "post_shared_norm",
    }
    return {
        name: norm_spec(spec.norm_offset, shape, axes, role, dtype=spec.norm_dtype(dtype), layers=layers)
        for name, role in roles.items()
        if spec.experts.shared != "none" or role != "post_shared_norm"
    }


def divided_sizes(spec: ModelSpec) -> dict[str, int]:
    """Return the width of a shared expert, which must be divisible by the tensor axis."""
    key = "shared_expert_intermediate_size (or moe_intermediate_size times shared experts, or intermediate_size)"
    return {} if spec.experts.shared == "none" else {key: spec.experts.shared_size}


def apply(
    params: Parameters,
    rows: FfnRows,
    inputs: StepInputs,
    *,
    kind: LayerSpec,
    layer: jax.Array,
    config: ModelConfig,
) -> tuple[jax.Array, LayerRouting]:
    """Return the experts' output for every token [T, D], and the routing of the layer."""
    experts, normed_TD = params["experts"], rows.normed_TD
    activation = config.spec.experts.gating(kind.expert_limit)

    def normed(rows_TD: jax.Array, scale_MD: jax.Array) -> jax.Array:
        with jax.named_scope("norm"):
            return config.kernels.norm(rows_TD.astype(normed_TD.dtype), scale_MD[layer], config.spec.norm_eps)

    router, norms = router_of_layer(_stacked_router(experts, layer)), params.get("expert_norms", {})
    routed_TD, latents, by_rows = normed_TD, params.get("expert_latents", {}), config.kernels.by_rows
    if latents:
        with jax.named_scope("latent_in"):
            routed_TD = by_rows(lambda part: project(part, latents["in_MDl"][layer]), normed_TD)
        router = router._replace(rows_TD=normed_TD)
    if config.spec.router.own_norm:
        router = router._replace(rows_TD=normed(rows.hidden_TD, experts["norm_MD"]))
    if config.spec.router.expert_factors:
        router = router._replace(factors_E=experts["factors_ME"][layer])
    flat = ExpertWeights._make(_flatten(experts[name]) if name in experts else None for name in EXPERT_ARRAYS)
    out_TD, routing = apply_experts(
        normed(rows.hidden_TD, norms["before_MD"]) if norms else routed_TD,
        router,
        flat,
        layer=layer,
        valid_T=inputs.valid_T,
        config=replace(config.experts, activation=activation),
        maps=inputs.maps,
        forced=_forced_of_layer(inputs, layer),
        capacity=inputs.capacity,
        audits=inputs.sketch_DP is not None,
        adapters=_expert_adapters(inputs, layer),
    )
    if latents:
        with jax.named_scope("latent_out"):
            out_TD = by_rows(lambda part: project(part, latents["out_MlD"][layer]), out_TD.astype(normed_TD.dtype))
    out_TD = normed(out_TD, norms["after_MD"]) if norms else out_TD
    if config.spec.experts.shared != "none":
        activation = config.spec.experts.gating(kind.mlp_limit)
        adapters = adapters_of(inputs, "shared", layer)
        shared_TD = _shared_expert(params["shared"], normed_TD, layer, activation, config=config, adapters=adapters)
        shared_TD = normed(shared_TD, norms["after_shared_MD"]) if norms else shared_TD
        out_TD = out_TD.astype(jnp.float32) + shared_TD
    return out_TD.astype(normed_TD.dtype), routing


@jax.named_scope("shared_expert")
def _shared_expert(
    weights: dict[str, jax.Array],
    normed_TD: jax.Array,
    moe_layer: jax.Array,
    activation: Activation,
    *,
    config: ModelConfig,
    adapters: LayerAdapters | None,
) -> jax.Array:
    """Return the shared expert's output for every token, float32 [T, D], times its gate if it has one (Qwen2-MoE)."""
    made_TD = config.kernels.mlp(
        normed_TD,
        tuple(map(weights.get, SHARED_MATRICES)),
        layer=moe_layer,
        activation=activation,
        names=SHARED_MATRICES,
        adapters=adapters,
    )
    out_TD = config.plan.sum_over_tensor(made_TD)
    if config.spec.experts.shared != "sigmoid_gated":
        return out_TD
    gate_D1 = weights["out_gate_MD1"][moe_layer].astype(jnp.float32)
    return config.kernels.experts.router_scores(normed_TD, gate_D1, score="sigmoid") * out_TD


def _forced_of_layer(inputs: StepInputs, moe_layer: jax.Array) -> ForcedExperts | None:
    if inputs.forced is None or inputs.is_forced is None:
        return None
    ids_MXK, gates_MXK = inputs.forced
    gates_XK = None if gates_MXK is None else gates_MXK[moe_layer]
    return ForcedExperts(ids_MXK[moe_layer].astype(jnp.int32), inputs.is_forced, gates_XK)


def _stacked_router(experts: dict[str, jax.Array], layer: jax.Array) -> StackedRouter:
    return StackedRouter(experts["router_MDE"], experts.get("router_bias_ME"), experts.get("selection_bias_ME"), layer)


def _expert_adapters(inputs: StepInputs, layer: jax.Array) -> RowAdapters | None:
    """Return the resident adapters of experts for the step's tokens; None if no token has one."""
    of_layer = adapters_of(inputs, "experts", layer)
    if of_layer is None:
        return None
    found = (of_layer.pairs.get(name) for name in EXPERT_MATRICES)
    pairs = (None if pair is None else AdapterPair(*map(_flat_slots, pair)) for pair in found)
    return RowAdapters(ExpertAdapters._make(pairs), of_layer.tokens.slot_T)


def _flat_slots(stack: jax.Array) -> jax.Array:
    """Flatten layers and slots of a stack; a stack [L, S, R, ...] that experts share has no slots."""
    return _flatten(stack) if stack.ndim == 5 else stack


def _flatten(weights: jax.Array) -> jax.Array:
    """View [layers, slots, ...] as [layers * slots, ...]."""
    return weights.reshape(-1, *weights.shape[2:])


FFN = Ffn(parameters, apply, divided_sizes, {"shared": SHARED_MATRICES, "experts": EXPERT_MATRICES})
