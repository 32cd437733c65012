"""The kernels that a served model's steps are built from: the choice for every operation, and the reasons.

Steps choose while they are traced, by the shapes of their arrays. The report asks the same tables with the same shapes.
"""

# T tokens   D model width   K experts per token

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.execution.step.pytrees import StepShape
from rayserve_moe.execution.weights.placing import parameter_tree
from rayserve_moe.experts.backends import choose_backend, product_shapes
from rayserve_moe.experts.layer import router_choice
from rayserve_moe.experts.slot_mapping import PlacedExperts
from rayserve_moe.experts.tokens import RoutedTokens
from rayserve_moe.kernels.attention_config import AttentionConfig, PoolFormat
from rayserve_moe.kernels.attention_heads import StackedWeights
from rayserve_moe.kernels.attention_layer import ProjectedRows
from rayserve_moe.kernels.candidates import Choice
from rayserve_moe.kernels.operations import AttentionKernels
from rayserve_moe.kernels.reference.expert_products import ExpertWeights
from rayserve_moe.kernels.reference.gated_delta import PIECE, DeltaPools, DeltaTokens, Pieces, RowEntries
from rayserve_moe.kernels.reference.layers import Rotation
from rayserve_moe.kernels.table import KERNELS
from rayserve_moe.kernels.tpu.top_experts import StackedRouter
from rayserve_moe.model.layers.attention import GroupedAttention, attention_config, begin_choice
from rayserve_moe.model.layers.choice import attention_choices
from rayserve_moe.model.layers.gated_delta import GatedDelta
from rayserve_moe.model.layers.kimi_delta import KimiDelta
from rayserve_moe.model.layers.latent import LatentAttention, latent_config
from rayserve_moe.model.layers.mamba2 import Mamba2
from rayserve_moe.model.layers.moe import EXPERT_ARRAYS
from rayserve_moe.model.layers.table import MIXERS
from rayserve_moe.model.model_config import ModelConfig

Shapes = dict[str, dict[str, jax.Array]]
"""Shapes of parameters on a device, by group and name."""
ChoiceOf = Callable[[StepShape], Choice[Any] | None]
"""Returns the choice for a step shape; None if a step of that shape does not use the operation."""


LAYER = cast(jax.Array, 0)
"""Any layer: the choice does not depend on it."""


def shaped(*shape: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return a shape and a dtype in place of an array."""
    return cast(jax.Array, jax.ShapeDtypeStruct(shape, dtype))


def kernel_report(served: ServedModel) -> dict[str, str]:
    """Return for each operation of a model the chosen candidate, with the reasons against the ones before it.

    If the choice depends on the number of tokens, it is given for each range of step shapes, with the reasons at the
    smallest of them. Shapes that do not use an operation are left out. Operations without candidates are not listed.
    """
    with jax.set_mesh(served.config.plan.mesh):  # kernels ask the current mesh which chip they are for
        return {
            operation: text
            for operation, choice_of in _operations(served)
            if (text := _by_tokens(choice_of, served.shapes))
        }


def _by_tokens(choice_of: ChoiceOf, shapes: tuple[StepShape, ...]) -> str:
    """Return the choices of ascending step shapes; shapes with the same choice are one range."""
    ranges: list[tuple[int, int, Choice[Any]]] = []
    for shape in sorted(shapes, key=lambda shape: shape.num_tokens):
        choice, tokens = choice_of(shape), shape.num_tokens
        if choice is None:
            continue
        if ranges and ranges[-1][2].name == choice.name:
            ranges[-1] = ranges[-1][0], tokens, ranges[-1][2]
        else:
            ranges.append((tokens, tokens, choice))
    if len(ranges) == 1:
        return str(ranges[0][2])
    return ", ".join(f"{_range(first, last)} tokens: {choice}" for first, last, choice in ranges)


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _operations(served: ServedModel) -> Iterator[tuple[str, ChoiceOf]]:
    """Yield the operations of a model's layers in the order of a step, with their choice by step shape."""
    config, kernels, params = served.config, served.config.kernels, device_shapes(served.config, dtype=served.dtype)
    pool = served.settings.pool_format

    def hidden_of(shape: StepShape) -> jax.Array:
        return shaped(shape.num_tokens, config.spec.hidden_size, dtype=served.dtype)

    def add_norm(shape: StepShape) -> Choice[Any]:
        hidden_TD, scales = hidden_of(shape), params["mlp_norm"]["scale"]
        return kernels.add_norm.choose(hidden_TD, hidden_TD, scales, layer=LAYER, eps=config.spec.norm_eps)

    yield "add_norm", add_norm
    grouped = [own for own in config.spec.mixers if isinstance(own, GroupedAttention)]
    for own in grouped:
        for name, choice_of in _grouped_attention(own, config, params[own.kind], hidden_of):
            yield name if len(grouped) == 1 else f"{name} {own.kind}", choice_of
    yield from _attention(config, params, pool=pool, dtype=served.dtype)
    recurrence = kernels.recurrence
    for own in config.spec.mixers:
        if isinstance(own, GatedDelta | KimiDelta) and recurrence.advance_layer is None:
            yield "recurrence", partial(_recurrence, own, config, params[own.kind]["q_LDK"], served.dtype)
        if isinstance(own, Mamba2) and recurrence.advance_mamba2_layer is None:
            yield "recurrence", partial(_recurrence, own, config, params[own.kind]["c_LDN"], served.dtype)
    if "experts" in params:
        yield from _experts(config, params["experts"], hidden_of)


def device_shapes(config: ModelConfig, *, dtype: str) -> Shapes:
    """Return the shapes of all parameters on a device."""
    return {
        group: {
            name: shaped(*config.plan.sharding(spec.axes).shard_shape(spec.shape), dtype=spec.dtype)
            for name, spec in specs.items()
        }
        for group, specs in parameter_tree(config, dtype=dtype).items()
    }


def _grouped_attention(
    own: GroupedAttention,
    config: ModelConfig,
    weights: dict[str, jax.Array],
    hidden_of: Callable[[StepShape], jax.Array],
) -> Iterator[tuple[str, ChoiceOf]]:
    """Yield the projections of grouped-query attention."""
    kernels, attention = config.kernels.attention, attention_config(own, config.spec, config.plan)
    of_layer = {name: shaped(*array.shape[1:], dtype=array.dtype) for name, array in weights.items()}

    def rotation_of(shape: StepShape) -> Rotation:
        angles = shaped(shape.num_tokens, own.rotary_width // 2, dtype=jnp.float32)
        return Rotation(angles, angles)

    def norm_and_project(shape: StepShape) -> Choice[Any]:
        stream, rotation = (hidden_of(shape), hidden_of(shape)), rotation_of(shape)
        return begin_choice(own, weights, stream, rotation=rotation, layer=LAYER, config=config)

    def project(shape: StepShape) -> Choice[Any] | None:
        if norm_and_project(shape).candidate is not None:
            return None
        rotation, stacked = rotation_of(shape), StackedWeights(weights, LAYER)
        return kernels.project.choose(hidden_of(shape), of_layer, rotation=rotation, config=attention, stacked=stacked)

    if kernels.project_and_write.candidates:
        yield from _fused_heads(kernels, attention, weights, hidden_of=hidden_of, rotation_of=rotation_of)
    if kernels.norm_and_project.candidates:
        yield "norm_and_project", norm_and_project
    if kernels.project.candidates:
        yield "project", project


def _fused_heads(
    kernels: AttentionKernels,
    attention: AttentionConfig,
    weights: dict[str, jax.Array],
    *,
    hidden_of: Callable[[StepShape], jax.Array],
    rotation_of: Callable[[StepShape], Rotation],
) -> Iterator[tuple[str, ChoiceOf]]:
    """Yield the kernel between products and attention, and the products."""
    of_layer = {name: shaped(*array.shape[1:], dtype=array.dtype) for name, array in weights.items()}

    def project_and_write(shape: StepShape) -> Choice[Any]:
        pool = shaped(1, 1, 1, 1, dtype=hidden_of(shape).dtype)
        return kernels.project_and_write.choose(
            hidden_of(shape), of_layer, pool, rotation=rotation_of(shape), config=attention
        )

    def products(shape: StepShape) -> Choice[Any] | None:
        if project_and_write(shape).candidate is None:
            return None
        matrices = [weights[name] for name in ("q_LDH", "k_LDG", "v_LDG")]
        return kernels.products.choose(hidden_of(shape), matrices, LAYER)

    yield "project_and_write", project_and_write
    yield "products", products


def _attention(config: ModelConfig, params: Shapes, *, pool: PoolFormat, dtype: str) -> Iterator[tuple[str, ChoiceOf]]:
    """Yield the attention of each mixer, and the products per head of latent attention."""
    for mixer, choice in attention_choices(config.spec, KERNELS[config.kernels.name], pool=pool).items():
        yield f"attention {mixer}", lambda _, choice=choice: choice
        own = next(own for own in config.spec.mixers if own.kind == mixer)
        if isinstance(own, LatentAttention) and choice.candidate is not None:
            for name, choice_of in _products_of_heads(own, choice.candidate.run, params[mixer], dtype):
                yield f"{name} {mixer}", choice_of


def _products_of_heads(
    own: LatentAttention, kernels: AttentionKernels, weights: dict[str, jax.Array], dtype: str
) -> Iterator[tuple[str, ChoiceOf]]:
    """Yield the products per head of latent attention, if the kernels have candidates for them."""
    config, stacked = latent_config(own), StackedWeights(weights, LAYER)
    num_heads = weights["k_b_LHC"].shape[1] // own.nope_dim

    def part_of(shape: StepShape) -> ProjectedRows:
        angles = shaped(shape.num_tokens, own.rotary_width // 2, dtype=jnp.float32)
        return ProjectedRows(shaped(shape.num_tokens, 1, dtype=dtype), Rotation(angles, angles), None)

    def absorb(shape: StepShape) -> Choice[Any]:
        queries_TH = shaped(shape.num_tokens, num_heads * own.head_dim, dtype=dtype)
        scale_T = None if own.query_scale is None else shaped(shape.num_tokens, dtype=jnp.float32)
        return kernels.absorb.choose(queries_TH, part_of(shape), stacked, config=config, query_scale_T=scale_T)

    def expand(shape: StepShape) -> Choice[Any]:
        attended_TAC = shaped(shape.num_tokens, num_heads, own.kv_lora_rank, dtype=dtype)
        return kernels.expand.choose(attended_TAC, part_of(shape), stacked)

    if kernels.absorb.candidates:
        yield "absorb", absorb
        yield "expand", expand


def _recurrence(
    own: GatedDelta | KimiDelta | Mamba2, config: ModelConfig, queries_LDK: jax.Array, dtype: str, shape: StepShape
) -> Choice[Any]:
    """Return the choice for a mixer's recurrence; `queries_LDK` are a device's matrices of queries."""
    kernels, key_heads = config.kernels, queries_LDK.shape[2] // own.key_dim
    heads = own.num_value_heads // config.plan.tensor_size
    pieces_of_block = shape.block_tokens // PIECE + 1
    of_piece = shaped(shape.num_singles + shape.num_blocks * pieces_of_block, dtype=jnp.int32)
    keys, values = (key_heads, own.key_dim), (heads, own.value_dim)
    wide, narrow = partial(shaped, shape.num_tokens, dtype=jnp.float32), partial(shaped, shape.num_tokens, dtype=dtype)
    channels = 2 * own.key_dim + heads // key_heads * own.value_dim
    tokens = DeltaTokens(
        narrow(*keys),
        narrow(*keys),
        narrow(*values),
        wide(heads, own.num_decays),
        wide(heads),
        narrow(key_heads, channels),
    )
    (state,) = MIXERS[own.kind].states(own, kernels=kernels, tensor_size=config.plan.tensor_size)
    arrays = (
        shaped(1, *config.plan.sharding(array.axes).shard_shape(array.shape), dtype=jnp.float32)
        for array in (*state.entry, *state.ring)
    )
    pieces = Pieces(*[of_piece] * 5, RowEntries(*[of_piece] * 3))
    return kernels.recurrence.advance.choose(
        tokens, DeltaPools(*arrays), pieces, layer=(LAYER, LAYER), delta=not isinstance(own, Mamba2)
    )


def _experts(
    config: ModelConfig,
    params: dict[str, jax.Array],
    hidden_of: Callable[[StepShape], jax.Array],
) -> Iterator[tuple[str, ChoiceOf]]:
    """Yield the router, the expert backend, and the product of experts."""
    experts = config.experts
    router = StackedRouter(params["router_MDE"], params.get("router_bias_ME"), params.get("selection_bias_ME"), LAYER)

    def choose(shape: StepShape) -> Choice[Any]:
        is_forced = shape.num_blocks > 0 and experts.selection != "balanced"
        return router_choice(hidden_of(shape), router, experts, is_forced=is_forced)

    def routed(shape: StepShape) -> tuple[RoutedTokens, PlacedExperts]:
        rows_TD = shaped(shape.num_tokens, config.spec.exchanged_width, dtype=hidden_of(shape).dtype)
        return expert_shapes(rows_TD, params, config=config)

    def backend(shape: StepShape) -> Choice[Any]:
        return choose_backend(*routed(shape), config=experts)

    def product(shape: StepShape) -> Choice[Any] | None:
        call = product_shapes(backend(shape).name, *routed(shape), config=experts)
        return call and experts.kernels.experts.results.choose(*call)

    if experts.kernels.experts.choose.candidates and not experts.limits_capacity:
        yield "router", choose
    yield "experts", backend
    yield "expert_product", product


def expert_shapes(
    hidden_TD: jax.Array, params: dict[str, jax.Array], *, config: ModelConfig
) -> tuple[RoutedTokens, PlacedExperts]:
    """Return the shapes of the arguments of an expert backend, with the `experts` parameters of a device.

    `hidden_TD` has the width of the rows of experts (`exchanged_width`).
    """
    num_tokens, top_k = hidden_TD.shape[0], config.experts.router.top_k
    ids_TK, gates_TK = (shaped(num_tokens, top_k, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
    tokens = RoutedTokens(hidden_TD, ids_TK, gates_TK, shaped(num_tokens, dtype=jnp.bool))
    found = (params.get(name) for name in EXPERT_ARRAYS)
    flat = (array and shaped(math.prod(array.shape[:2]), *array.shape[2:], dtype=array.dtype) for array in found)
    return tokens, PlacedExperts(ExpertWeights._make(flat), LAYER, None)
