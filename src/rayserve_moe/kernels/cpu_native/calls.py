"""The native CPU kernels as functions of arrays: bfloat16 rows, packed bfloat16 weights (see `layout`).

`execution.native_kernels` registers the library. A row's result depends on that row alone, to the last bit.
"""

# T tokens   D model width   K depth, and experts per token   N columns   F expert width   X expert slots of all layers
# L layers   H query heads * h   G KV heads * h   h head width   A local query heads   C latent   r rotated width
# B blocks   P page-table width

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.adapters import LayerAdapters
from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.attention_layer import AttentionInputs
from rayserve_moe.kernels.cpu_native.adapters import adapter_arguments, expert_arguments, row_adapters
from rayserve_moe.kernels.cpu_native.layout import PANEL
from rayserve_moe.kernels.latent_attention import LatentConfig
from rayserve_moe.kernels.reference.activations import SILU, Activation
from rayserve_moe.kernels.reference.expert_products import ExpertWeights, LayerExperts, ProductConfig
from rayserve_moe.kernels.reference.layers import Rotation, WordMasses

PREFIX = "rayserve_moe_"
NAMES = (
    "Attention",
    "Latent",
    "Index",
    "Blocks",
    "Delta",
    "Mamba2",
    "Experts",
    "Int8Experts",
    "Fp8Experts",
    "Product",
    "Norm",
    "AddNorm",
    "Scores",
    "Rotation",
    "Masses",
    "Noise",
    "Choose",
    "Truncate",
    "KeptWords",
    "Pages",
    "Put",
)
TARGETS = {f"{PREFIX}{name.lower()}": f"RayserveMoe{name}" for name in NAMES}
"""Name of each kernel as programs call it, and its symbol in the library."""
KERNEL_OF = {"bfloat16": "experts", "int8": "int8experts", "float8_e4m3fn": "fp8experts"}
PROJECTIONS = ("q_LDH", "k_LDG", "v_LDG", "o_LHD")
GATES = ("gate_LDH", "gate_LDA")
"""Gates of each element of the queries, or of each head."""
DELTA = ("q_LDK", "k_LDK", "v_LDH", "z_LDH", "b_LDH", "a_LDH")
DELTA_IN_TWO = ("a_in_LDR", "z_in_LDR", "a_LRH", "z_LRH")
"""Decays and output gates as two products each."""
DELTA_VECTORS = ("q_taps_LJ1K", "k_taps_LJ1K", "v_taps_LJ1H")
MAMBA2 = ("c_LDN", "b_LDN", "x_LDI", "z_LDI", "step_LDH", "o_LID")
NORMS = (("q_norm_L", "H"), ("k_norm_L", "G"))
EXPERTS = ("gate_MPDF", "up_MPDF", "down_MPFD")
MLPS = ("gate_NDI", "up_NDI", "down_NID", "gate_MDS", "up_MDS", "down_MSD")
LATENT = ("q_a_LDR", "q_b_LRH", "kv_a_LDC", "k_b_LHC")
INDEX_MATRICES = ("index_q_LRi", "index_k_LDd")
BLOCK_MATRICES = ("index_q_LDi", "index_k_LDd")
INDEX_VECTORS = ("index_k_norm_Ld", "index_k_norm_bias_Ld", "index_weights_LDA")
LATENT_MATRICES = ("kv_a_LDC", "k_b_LHC", "v_b_LHC", "o_LHD")
LATENT_VECTORS = ("q_a_norm_LR", "kv_a_norm_LC", "q_a_bias_LR", "kv_a_bias_LC")
LAYOUT_OF = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *(*PROJECTIONS, *GATES, *DELTA, *DELTA_IN_TWO, *MAMBA2, *LATENT),
                *(*INDEX_MATRICES, *BLOCK_MATRICES, *EXPERTS, *MLPS),
            ),
            "packed",
        ),
        **dict.fromkeys(("head", "v_b_LHC"), "packed_columns"),
    }
)
"""Memory layout of the parameters that are right operands of a product (`layout.LAYOUTS`)."""
MULTIPLES = MappingProxyType(dict.fromkeys(("expert_inner", "dense_inner", "vocabulary"), PANEL))
"""Axes that are padded to whole panels. Zeros add nothing to gate, up and down, and their logits are cut off."""


def rms_norm(rows_TD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """Compute `layers.rms_norm` of bfloat16 rows."""
    assert rows_TD.shape[1:] == scale_D.shape, f"{scale_D.shape} scales for {rows_TD.shape}"
    shape = jax.ShapeDtypeStruct(rows_TD.shape, rows_TD.dtype)
    return jax.ffi.ffi_call(f"{PREFIX}norm", shape)(rows_TD, scale_D, eps=np.float32(eps))


def add_and_norm(
    hidden_TD: jax.Array, added_TD: jax.Array, scale_LD: jax.Array, *, layer: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of bfloat16 rows [T, D], and its `rms_norm` by the scales of `layer`."""
    assert hidden_TD.shape == added_TD.shape, f"{added_TD.shape} added to {hidden_TD.shape}"
    assert hidden_TD.shape[1:] == scale_LD.shape[1:], f"{scale_LD.shape} scales for {hidden_TD.shape}"
    shape = jax.ShapeDtypeStruct(hidden_TD.shape, hidden_TD.dtype)
    call = jax.ffi.ffi_call(f"{PREFIX}addnorm", (shape, shape), input_output_aliases={0: 0})
    total_TD, normed_TD = call(hidden_TD, added_TD, scale_LD, jnp.asarray(layer, jnp.int32), eps=np.float32(eps))
    return total_TD, normed_TD


def router_scores(
    hidden_TD: jax.Array, router_DE: jax.Array, *, bias_E: jax.Array | None = None, score: str = "softmax"
) -> jax.Array:
    """Compute `layers.router_scores` of bfloat16 rows."""
    assert hidden_TD.shape[1] == router_DE.shape[0], f"{hidden_TD.shape} times {router_DE.shape}"
    shape = jax.ShapeDtypeStruct((hidden_TD.shape[0], router_DE.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(f"{PREFIX}scores", shape)(hidden_TD, router_DE, _or_empty(bias_E, jnp.float32), score=score)


def rotation_of(positions_T: jax.Array, frequencies: np.ndarray, *, factor: float = 1.0) -> Rotation:
    """Return cosine and sine as `layers.rotation_of`, float32 [T, h / 2] each."""
    shape = jax.ShapeDtypeStruct((len(positions_T), len(frequencies)), jnp.float32)
    call = jax.ffi.ffi_call(f"{PREFIX}rotation", (shape, shape))
    return Rotation(*call(positions_T, frequencies, factor=np.float32(factor)))


def masses_of(logits_SV: jax.Array, temperature_S: jax.Array, num_words: jax.Array) -> WordMasses:
    """Compute `layers.masses_of`, added up in an order that does not depend on the number of rows."""
    numbers, places = (jax.ShapeDtypeStruct(temperature_S.shape, dtype) for dtype in (jnp.float32, jnp.int32))
    call = jax.ffi.ffi_call(f"{PREFIX}masses", (numbers, places, numbers, places, numbers))
    return WordMasses(*call(logits_SV, temperature_S, num_words))


def gumbel_noise(
    seed_S: jax.Array, choice_S: jax.Array, position_S: jax.Array, *, first: jax.Array, size: int
) -> jax.Array:
    """Draw `layers.gumbel_noise`: of the same bits, with logarithms that may differ in the last bit."""
    shape = jax.ShapeDtypeStruct((len(seed_S), size), jnp.float32)
    return jax.ffi.ffi_call(f"{PREFIX}noise", shape)(seed_S, choice_S, position_S, first)


def choose(
    logprobs_SV: jax.Array,
    largest_S: jax.Array,
    of_noise: tuple[jax.Array, jax.Array, jax.Array],
    last: tuple[jax.Array, jax.Array],
    *,
    first: jax.Array,
    num_places: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the best kept token (`truncation.is_kept`) of each row after `gumbel_noise` is added.

    `largest_S` are the largest log-probabilities of the whole vocabulary of `num_places`.

    Returns: its score, its id counted from `first` on (ties to the smaller), and its log-probability; minus infinity,
    NO_ID and 0 without such a token.
    """
    numbers, ids = (jax.ShapeDtypeStruct(largest_S.shape, dtype) for dtype in (jnp.float32, jnp.int32))
    call = jax.ffi.ffi_call(f"{PREFIX}choose", (numbers, ids, numbers))
    score_S, id_S, own_S = call(logprobs_SV, largest_S, *of_noise, *last, first, last_place=np.int64(num_places - 1))
    return score_S, id_S, own_S


def product(left_TK: jax.Array, right_KN: jax.Array) -> jax.Array:
    """Multiply rows by packed weights: float32 [T, N]."""
    assert left_TK.shape[1] == right_KN.shape[0], f"{left_TK.shape} times {right_KN.shape}"
    shape = jax.ShapeDtypeStruct((left_TK.shape[0], right_KN.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(f"{PREFIX}product", shape)(left_TK, right_KN)


def head_logits(hidden_TD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Compute float32 logits [T, V] by a table that `layout.pack_columns` laid out as a product's right side."""
    return product(hidden_TD, head_VD.reshape(head_VD.shape[::-1]))


def expert_sums(
    hidden_TD: jax.Array,
    slots_TK: jax.Array,
    gates_TK: jax.Array,
    experts: LayerExperts,
) -> jax.Array:
    """Compute `expert_products.sum_results`, a token's results added in the order of its slots: float32 [T, D].

    Weights, of bfloat16 or 8 bits, are packed; biases and scales are not. Inner rows and the result of each assignment
    are rounded to bfloat16.
    """
    weights, config = experts.weights, experts.config
    (num_tokens, width), (num_all_slots, _, inner) = hidden_TD.shape, weights.up_XDF.shape
    sizes = [(width, inner), (width, inner), (inner, width), (inner,), (inner,), (width,)]
    assert all(
        array is None or array.shape == (num_all_slots, *size) for array, size in zip(weights, sizes, strict=False)
    ), f"weights are no experts of tokens {hidden_TD.shape}"
    assert slots_TK.shape == gates_TK.shape and len(slots_TK) == num_tokens, f"slots {slots_TK.shape}"
    assert (weights.gate_XDF is None) == (config.activation.name == "relu2"), f"a gate of {config.activation}"
    kernel = KERNEL_OF[str(weights.up_XDF.dtype)]
    call = jax.ffi.ffi_call(f"{PREFIX}{kernel}", jax.ShapeDtypeStruct(hidden_TD.shape, jnp.float32))
    first = jnp.asarray(experts.first_slot, jnp.int32)
    # An absent gate has the type of the other matrices, absent biases have the type of the tokens.
    dtypes = (weights.up_XDF.dtype, *[hidden_TD.dtype] * 5)
    arrays = (_or_empty(array, dtype) for array, dtype in zip(weights[:6], dtypes, strict=True))
    scales = (_or_empty(array, jnp.float32) for array in weights[6:])
    return call(
        hidden_TD,
        slots_TK,
        gates_TK,
        *arrays,
        *scales,
        first,
        *expert_arguments(experts.adapters),
        num_slots=np.int64(config.num_slots),
        activation=config.activation.name,
        slope=np.float32(config.activation.slope),
        limit=np.float32(config.activation.limit),
    )


def _first(weights: Mapping[str, jax.Array], *names: str) -> str:
    """Return the first name that the weights have."""
    return next(name for name in names if name in weights)


def _or_empty(array: jax.Array | None, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return the array, or an empty array in the place of None."""
    return jnp.zeros(0, dtype) if array is None else array


def expert_results(hidden_TD: jax.Array, slots_TK: jax.Array, experts: LayerExperts) -> jax.Array:
    """Compute `expert_products.multiply_in_blocks` of packed weights: [T, K, D]."""
    num_tokens, top_k = slots_TK.shape
    rows_PD = jnp.repeat(hidden_TD.reshape(num_tokens, -1), top_k, axis=0)
    slots_P1 = slots_TK.reshape(-1, 1)
    ones_P1 = jnp.ones(slots_P1.shape, jnp.float32)
    if experts.adapters is not None:
        experts = experts.with_rows(jnp.repeat(experts.adapters.slot_T, top_k))
    results_PD = expert_sums(rows_PD, slots_P1, ones_P1, experts)
    return results_PD.astype(hidden_TD.dtype).reshape(num_tokens, top_k, *hidden_TD.shape[1:])


def gated_mlp(
    hidden_TD: jax.Array,
    weights: tuple[jax.Array | None, jax.Array, jax.Array],
    *,
    layer: jax.Array,
    activation: Activation = SILU,
    names: tuple[str, str, str] = ("", "", ""),
    adapters: LayerAdapters | None = None,
) -> jax.Array:
    """Compute `layers.gated_mlp` of packed weights: every token takes the only expert of its layer."""
    slots_T1 = jnp.zeros((len(hidden_TD), 1), jnp.int32)
    ones_T1 = jnp.ones(slots_T1.shape, jnp.float32)
    config = ProductConfig(num_slots=1, mean_rows=len(hidden_TD), activation=activation)
    experts = LayerExperts(ExpertWeights(*weights), layer, config, row_adapters(adapters, names))
    return expert_sums(hidden_TD, slots_T1, ones_T1, experts)


def attend_layer(
    normed_TD: jax.Array, kv_pages: jax.Array, inputs: AttentionInputs, *, config: AttentionConfig
) -> tuple[jax.Array, jax.Array]:
    """Attend as `attention_layer.attend_layer` with packed projections: float32 [T, D], and the pool, in place.

    It rounds at the same places. If the batch `stores_only`, no query is computed and the first output is undefined.
    """
    weights, batch, rotation, layer, _, _, _, chosen_TGK, adapters = inputs
    batch, first_page, num_pages = batch.of_layer(layer, kv_pages, len(weights["q_LDH"]))
    of_tokens = (*rotation, batch.kv_slots_T, batch.positions_T)
    assert all(len(array) == len(normed_TD) for array in of_tokens), "each token has a position, a slot and its angles"
    assert 2 * rotation.cos.shape[1] <= config.head_dim, "no such heads rotate"
    assert kv_pages.shape[3] == config.head_dim + config.value_width, "rows of other keys and values"
    assert weights["q_LDH"].shape[1] == weights["o_LHD"].shape[2] == normed_TD.shape[1], "weights of another width"
    nothing = jnp.zeros((0, 0), jnp.bfloat16)
    gate = "" if config.output_gate == "none" else _first(weights, *GATES)
    norms = (weights.get(f"{name}h", weights.get(f"{name}{whole}", nothing)) for name, whole in NORMS)
    call = jax.ffi.ffi_call(
        f"{PREFIX}attention",
        (
            jax.ShapeDtypeStruct(normed_TD.shape, jnp.float32),
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        ),
        input_output_aliases={23: 1},
    )
    out_TD, kv_pages = call(
        normed_TD,
        *({"v_LDG": weights["k_LDG"], **weights}[name] for name in PROJECTIONS),
        weights[gate] if gate else nothing[None],
        *norms,
        *(weights.get(name, nothing) for name in ("q_bias_LH", "k_bias_LG", "v_bias_LG", "sinks_LA")),
        _mean_squares(normed_TD, weights, layer, config),
        *of_tokens,
        batch.page_table_BP,
        jnp.asarray(layer, jnp.int32),
        jnp.asarray(first_page, jnp.int32),
        jnp.asarray(num_pages, jnp.int32),
        np.array(config.windows, np.int32),
        _or_empty(chosen_TGK, jnp.int32),
        kv_pages,
        *adapter_arguments(adapters, ("q_LDH", "k_LDG", _first(weights, "v_LDG", "k_LDG"), gate, "o_LHD")),
        chosen_size=np.int64(config.block_size),
        num_singles=np.int64(batch.num_singles),
        value_width=np.int64(config.value_width),
        eps=np.float32(config.eps),
        scale=np.float32(config.head_dim**-0.5 if config.score_scale is None else config.score_scale),
        clip=np.float32(config.clip or 0.0),
        value_scale=np.float32(config.value_scale),
        is_interleaved=config.interleaved_rotation,
        norms_after=config.norms_after_rotation,
        norms_values=config.norms_values,
        has_softplus=config.output_gate == "softplus",
        stores_only=batch.stores_only,
    )
    return out_TD, kv_pages


def attend_latent_layer(
    normed_TD: jax.Array, kv_pages: jax.Array, inputs: AttentionInputs, *, config: LatentConfig
) -> tuple[jax.Array, jax.Array]:
    """Attend as `latent_attention.attend_latent_layer` with packed weights: float32 [T, D], and the pool, in place.

    It rounds at the same places, and also rounds queries against latents: they are multiplied as bfloat16. If the batch
    `stores_only`, no query is computed and the first output is undefined.

    Prompts are attended in the latent space as single tokens are: keys expanded for prompts would give a token other
    bits in a block than alone, so that its outputs would depend on how its prompt is cut and on preemption. This costs
    time. By one thread with tile registers, from queries to values of 16 heads of DeepSeek-V3's widths, a prompt of 512
    tokens takes 23 ms against 14 ms expanded; 2,048 tokens in chunks of 512 take 253 against 198 ms. With the widths of
    `deepseek-v3-small` (8 heads) it is 2.9 against 2.6 ms, and 36 against 37 ms.
    """
    weights, batch, rotation, layer, _, _, query_scale_T, chosen_TK, adapters = inputs
    batch, first_page, num_pages = batch.of_layer(layer, kv_pages, len(weights["o_LHD"]))
    of_tokens = (*rotation, batch.kv_slots_T, batch.positions_T)
    assert all(len(array) == len(normed_TD) for array in of_tokens), "each token has a position, a slot and its angles"
    nothing, queries = jnp.zeros((0, 0), jnp.bfloat16), _first(weights, "q_b_LRH", "q_LDH")
    shapes = (jax.ShapeDtypeStruct(normed_TD.shape, jnp.float32), jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype))
    call = jax.ffi.ffi_call(f"{PREFIX}latent", shapes, input_output_aliases={22: 1})
    out_TD, kv_pages = call(
        normed_TD,
        weights.get("q_a_LDR", nothing),
        weights[queries],
        *(weights[name] for name in LATENT_MATRICES),
        *(weights.get(name, nothing) for name in LATENT_VECTORS),
        *of_tokens,
        batch.page_table_BP,
        jnp.asarray(layer, jnp.int32),
        jnp.asarray(first_page, jnp.int32),
        jnp.asarray(num_pages, jnp.int32),
        _or_empty(query_scale_T, jnp.float32),
        _or_empty(chosen_TK, jnp.int32),
        weights.get("gate_LDA", nothing[None]),
        kv_pages,
        *adapter_arguments(adapters, ("q_a_LDR", queries, *LATENT_MATRICES, "gate_LDA")),
        num_singles=np.int64(batch.num_singles),
        nope_dim=np.int64(config.nope_dim),
        norm_eps=np.float32(config.norm_eps),
        scale=np.float32(config.score_scale),
        is_interleaved=config.interleaved_rotation,
        stores_only=batch.stores_only,
    )
    return out_TD, kv_pages


def copy_pages(pool: jax.Array, sources_N: jax.Array, targets_N: jax.Array, count: jax.Array) -> jax.Array:
    """Do `kv_pool.copy_pages` in place; other pages are copied to themselves."""
    targets_N = jnp.where(jnp.arange(len(sources_N)) < count, targets_N, sources_N)
    call = jax.ffi.ffi_call(f"{PREFIX}pages", jax.ShapeDtypeStruct(pool.shape, pool.dtype), input_output_aliases={0: 0})
    return call(pool, sources_N, targets_N)


def put_pages(pool: jax.Array, pages_N: jax.Array, targets_N: jax.Array) -> jax.Array:
    """Do `kv_pool.put_pages` in place. XLA:CPU would convert the whole bfloat16 pool to float32 and back."""
    call = jax.ffi.ffi_call(f"{PREFIX}put", jax.ShapeDtypeStruct(pool.shape, pool.dtype), input_output_aliases={0: 0})
    return call(pool, pages_N, targets_N)


def _mean_squares(
    normed_TD: jax.Array, weights: Mapping[str, jax.Array], layer: jax.Array, config: AttentionConfig
) -> jax.Array:
    """Return mean squares [T, 2] of the queries and keys of all devices if a norm covers them; else an empty array.

    The kernel has the heads of a single device, so they are projected twice.
    """
    if config.plan is None or config.plan.tensor_size == 1 or "q_norm_LH" not in weights:
        return jnp.zeros((0, 0), jnp.float32)
    assert not config.norms_after_rotation, "norms over all heads come ahead of the rotation"
    sums = []
    for matrix, bias in (("q_LDH", "q_bias_LH"), ("k_LDG", "k_bias_LG")):
        heads = product(normed_TD, weights[matrix][layer]).astype(normed_TD.dtype)
        heads = heads + weights[bias][layer] if bias in weights else heads
        sums.append(jnp.mean(jnp.square(heads.astype(jnp.float32)), axis=-1))
    return config.plan.sum_over_tensor(jnp.stack(sums, axis=-1)) / config.plan.tensor_size
