"""The table of expert backends, the choice of a backend for a step, and the backends without an exchange of rows.

`replicated` computes experts on the ranks that hold them from all tokens: each rank multiplies its own slots, and the
ranks add up. Tokens are gathered over the data axis. The sums of the ranks are partial, so their last bits depend
on the placement: `auto` does not take it where experts may move. `local` is the same on a single device: nothing is
gathered and nothing is added up.
"""

# T tokens   D model width   K experts per token   W tokens of all data ranks   G chunks   Y columns of choices

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp

from rayserve_moe.experts import device_sums, low_latency
from rayserve_moe.experts.addition_order import experts_may_move
from rayserve_moe.experts.all_to_all import apply_all_to_all, exchange_sizes
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.slot_mapping import PlacedExperts, choose_slots
from rayserve_moe.experts.tokens import MIN_FUSED_CHUNK, SEND_BYTES, RoutedTokens, cut_into_chunks, take_part
from rayserve_moe.kernels.candidates import Candidate, Choice, choose
from rayserve_moe.kernels.reference.expert_products import LayerExperts, ProductConfig, widened
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.parallel.sharding import DATA, TENSOR

RESULT_BYTES = 4 * SEND_BYTES
"""Maximum size of results per assignment that a device holds at once if tokens are gathered."""


def apply_local(tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig) -> jax.Array:
    """Return the MoE sum of each token [T, D] if this device holds all slots; ValueError with more devices."""
    if config.plan.num_expert_ranks > 1:
        raise ValueError(
            f"expert backend local is for one device, and experts lie over {config.plan.num_expert_ranks}: choose auto"
        )
    return _sums_of_my_slots(tokens, experts, config).astype(tokens.hidden_TD.dtype)


def apply_replicated(tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig) -> jax.Array:
    """Return the MoE sum of each token [T, D], by a gather over data, then sums over all ranks.

    Over several slices each device of a tensor group gathers its part of the tokens, so that a token goes to another
    slice once and not once per device, nor does its sum.
    """
    plan, (num_tokens, width) = config.plan, tokens.hidden_TD.shape
    if plan.data_size == 1:
        out_TD = _sums_of_my_slots(tokens, experts, config)
        return _combine(out_TD, tokens, config)
    shared = _sharing_devices(config)
    axes = DATA if shared == 1 else (DATA, TENSOR)
    part = take_part(tokens, plan.tensor_rank(), num_parts=shared) if shared > 1 else tokens

    def run(chunk: RoutedTokens) -> jax.Array:
        with jax.named_scope("dispatch"):
            gathered = _gather(chunk, axes)
        out_WD = _sums_of_my_slots(gathered, experts, config)
        with jax.named_scope("combine"):
            return jax.lax.psum_scatter(out_WD, axes, scatter_dimension=0, tiled=True)

    chunk = gathered_chunk(num_tokens, width * tokens.hidden_TD.dtype.itemsize, config=config)
    out_GTD = jax.lax.map(run, cut_into_chunks(part, chunk))
    out_TD = out_GTD.reshape(-1, width)[: len(part.valid_T)]
    if shared == 1:
        return _combine(out_TD, tokens, config)
    with jax.named_scope("combine"):
        out_TD = jax.lax.all_gather(out_TD.astype(tokens.hidden_TD.dtype), TENSOR, axis=0, tiled=True)
    return out_TD[:num_tokens]


START_BYTES = 256 << 10
"""Bytes that a link moves while a collective starts: some 3 us at 90 GB/s."""
LOW_LATENCY, DEVICE_SUMS, ALL_TO_ALL = "low_latency_dispatch", "device_sums", "all_to_all"


def choose_backend(tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig) -> Choice[ExpertBackend]:
    """Return the choice of a backend for these tokens: by `config.backend`, or by `EXPERT_BACKENDS` if that is `auto`.

    All-to-all takes the calls that low-latency dispatch or device sums do not. Only shapes and dtypes count.
    Raises: KeyError for an unknown name.
    """
    if config.backend == "auto":
        return choose(EXPERT_BACKENDS, tokens, experts, config=config)
    named = {backend.name: backend for backend in EXPERT_BACKENDS}
    if config.backend == LOW_LATENCY:
        return choose((named[LOW_LATENCY], named[ALL_TO_ALL]), tokens, experts, config=config)
    if config.backend == DEVICE_SUMS:
        fast_or_not = replace(named[DEVICE_SUMS], unsupported_reason=device_sums.unsupported_here)
        return choose((fast_or_not, named[ALL_TO_ALL]), tokens, experts, config=config)
    return Choice(named[config.backend])


def several_devices(_: RoutedTokens, __: PlacedExperts, *, config: ExpertConfig) -> str:
    """Return the number of devices that experts lie on as the reason against `local`; empty for one device."""
    num_ranks = config.plan.num_expert_ranks
    return "" if num_ranks == 1 else f"experts lie on {num_ranks} devices"


def reason_against_gathering(tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig) -> str:
    """Return why tokens are not gathered: experts may move, or an exchange moves fewer bytes; empty if they are.

    CPU devices gather because their exchange moves every row to every device. Between slices of TPUs, a gathered token
    goes to each other slice once and a sum of two rows' bytes comes back; an exchanged token goes there and back for
    each of its experts there, (S - 1) / S of top_k. Within a slice, `replicated_bytes` and `all_to_all_bytes` count
    `START_BYTES` for each collective: few tokens or few ranks are gathered, others exchanged.
    """
    if experts_may_move(experts, config):
        return "experts may move, and sums of devices depend on where experts are"
    if config.plan.adds_in_order:
        return "a collective adds up in an order of its size"
    plan, (num_tokens, width) = config.plan, tokens.hidden_TD.shape
    top_k, row_bytes = config.router.top_k, width * tokens.hidden_TD.dtype.itemsize
    if platform_of(plan.mesh) == "cpu":
        return ""
    if plan.num_slices > 1:
        num_rows = 3 * plan.num_slices
        if num_rows <= 2 * top_k:
            return ""
        return f"gathering sends {num_rows} rows of a token between slices, an exchange {2 * top_k}"
    per_device = -(-num_tokens // plan.tensor_size)
    ep_size, tensor_size = plan.num_expert_ranks, plan.tensor_size
    gathered = replicated_bytes(per_device, ep_size=ep_size, tensor_size=tensor_size, row_bytes=row_bytes)
    exchanged = all_to_all_bytes(per_device, ep_size=ep_size, tensor_size=tensor_size, top_k=top_k, row_bytes=row_bytes)
    if gathered <= exchanged:
        return ""
    return f"gathering moves {gathered >> 10} KiB to a device, an exchange {exchanged >> 10} KiB"


def few_tokens(tokens: RoutedTokens, _: PlacedExperts, *, config: ExpertConfig) -> str:
    """Return why tokens are too few for two chunks; empty if they are enough."""
    per_device = -(-len(tokens.hidden_TD) // config.plan.tensor_size)
    if per_device >= 2 * MIN_FUSED_CHUNK:
        return ""
    return f"{per_device} tokens of a device are fewer than two chunks of {MIN_FUSED_CHUNK}"


ExpertBackend = Callable[..., jax.Array]
EXPERT_BACKENDS: tuple[Candidate[ExpertBackend], ...] = (
    Candidate("local", apply_local, several_devices),
    Candidate(LOW_LATENCY, low_latency.apply_low_latency, low_latency.unsupported_reason),
    Candidate("replicated", apply_replicated, reason_against_gathering),
    Candidate(DEVICE_SUMS, device_sums.apply_device_sums, device_sums.unsupported_reason),
    Candidate("fused", partial(apply_all_to_all, overlapped=True), few_tokens),
    Candidate(ALL_TO_ALL, apply_all_to_all),
)
"""In order of preference. Called inside a sharded step, each returns the MoE sum of each token [T, D]."""


def product_shapes(
    backend: str, tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig
) -> tuple[jax.Array, jax.Array, LayerExperts] | None:
    """Return the shapes of the arguments of the experts' product under a backend, by the shapes of a step.

    Returns: tokens, slots and experts, as for `ExpertKernels.results`; None if the backend's kernel multiplies.
    """
    (num_tokens, width), dtype, weights = tokens.hidden_TD.shape, tokens.hidden_TD.dtype, experts.weights
    top_k, plan = config.router.top_k, config.plan
    match backend:
        case "low_latency_dispatch" | "device_sums":
            return None
        case "all_to_all" | "fused":
            chunk, num_tokens = exchange_sizes(tokens.hidden_TD, config=config, overlapped=backend == "fused")
            top_k, is_whole = 1, chunk * plan.tensor_size >= tokens.hidden_TD.shape[0]
            if not is_whole and platform_of(plan.mesh) == "tpu":
                experts_of = LayerExperts(weights, 0, ProductConfig(config.num_local_slots, 1.0))
                weights = jax.eval_shape(partial(widened, dtype=dtype), experts_of).weights
        case "replicated" if plan.data_size > 1:
            chunk = gathered_chunk(num_tokens, width * dtype.itemsize, config=config)
            num_tokens = chunk * plan.data_size * _sharing_devices(config)
    product = config.product(1.0)
    return _shaped(num_tokens, width, dtype), _shaped(num_tokens, top_k, jnp.int32), LayerExperts(weights, 0, product)


def _shaped(rows: int, columns: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    return cast(jax.Array, jax.ShapeDtypeStruct((rows, columns), dtype))


def replicated_bytes(tokens_per_device: int, *, ep_size: int, tensor_size: int, row_bytes: int) -> int:
    """Return the bytes that reach a device if tokens are gathered, with starting costs.

    Rows of the other data ranks come in, float32 sums (two rows' bytes each) go back, and sums are added over tensor.
    """
    num_tokens, data_size = tokens_per_device * tensor_size, ep_size // tensor_size
    over_data = 3 * (data_size - 1) * num_tokens * row_bytes
    over_tensor = 2 * 2 * (tensor_size - 1) * tokens_per_device * row_bytes
    num_collectives = 2 * (data_size > 1) + (tensor_size > 1)
    return over_data + over_tensor + num_collectives * START_BYTES


def all_to_all_bytes(tokens_per_device: int, *, ep_size: int, tensor_size: int, top_k: int, row_bytes: int) -> int:
    """Return the bytes that reach a device if tokens are exchanged, evenly routed, with starting costs.

    A row per assignment is received and a result is sent back, but for the part that stays on its rank; then sums are
    shared over tensor. The counts that announce the rows are small.
    """
    num_moved = tokens_per_device * top_k * (ep_size - 1) // ep_size
    over_tensor = (tensor_size - 1) * tokens_per_device * row_bytes
    return 2 * num_moved * row_bytes + over_tensor + (3 + (tensor_size > 1)) * START_BYTES


def _sharing_devices(config: ExpertConfig) -> int:
    """Return the number of devices of a tensor group that gather a part of the tokens each; 1: each gathers all."""
    return config.plan.tensor_size if config.plan.num_slices > 1 else 1


def gathered_chunk(num_tokens: int, row_bytes: int, *, config: ExpertConfig) -> int:
    """Return the tokens of a data rank that a device gathers at once, with rows of `row_bytes`."""
    shared = _sharing_devices(config)
    max_tokens = max(1, RESULT_BYTES // (config.plan.data_size * shared * config.router.top_k * row_bytes))
    return min(-(-num_tokens // shared), max_tokens)


def _gather(tokens: RoutedTokens, axes: str | tuple[str, ...]) -> RoutedTokens:
    """Gather the tokens of all ranks of `axes`: hidden states, and in a second collective all else as integers."""
    hidden_TD, ids_TK, gates_TK, valid_T, adapter_T = tokens
    bits_TK, top_k = jax.lax.bitcast_convert_type(gates_TK, jnp.int32), ids_TK.shape[1]
    columns = [ids_TK, bits_TK, valid_T[:, None].astype(jnp.int32)]
    if adapter_T is not None:
        columns.append(adapter_T[:, None])
    choice_TY = jnp.concatenate(columns, axis=1)
    hidden_WD, choice_WY = (jax.lax.all_gather(array, axes, axis=0, tiled=True) for array in (hidden_TD, choice_TY))
    ids_WK, bits_WK, rest_WY = jnp.split(choice_WY, [top_k, 2 * top_k], axis=1)
    gates_WK, adapter_W = (
        jax.lax.bitcast_convert_type(bits_WK, jnp.float32),
        None if adapter_T is None else rest_WY[:, 1],
    )
    return RoutedTokens(hidden_WD, ids_WK, gates_WK, rest_WY[:, 0] > 0, adapter_W)


def _combine(out_TD: jax.Array, tokens: RoutedTokens, config: ExpertConfig) -> jax.Array:
    """Add up the sums of the devices of a tensor group, in the tokens' dtype."""
    with jax.named_scope("combine"):
        return config.plan.sum_over_tensor(out_TD).astype(tokens.hidden_TD.dtype)


def _sums_of_my_slots(tokens: RoutedTokens, experts: PlacedExperts, config: ExpertConfig) -> jax.Array:
    """Return the sum of this rank's slots for each token: float32 [T, D]. Every rank chooses the same slots."""
    hidden_TD, ids_TK, gates_TK, valid_T, adapter_T = tokens
    num_local = config.num_local_slots
    with jax.named_scope("dispatch"):
        home_T1 = _home_ranks(len(valid_T), config)
        slots_TK = choose_slots(ids_TK, valid_T, experts.maps, layer=experts.layer, rank=home_T1, config=config)
        local_TK = slots_TK - config.plan.expert_rank() * num_local
        is_here_TK = (local_TK >= 0) & (local_TK < num_local) & valid_T[:, None]
        local_TK = jnp.where(is_here_TK, local_TK, num_local)
    product = config.product(ids_TK.size / config.router.num_experts)
    with jax.named_scope("experts"):
        of_layer = experts.of_layer(product, adapter_T)
        return config.kernels.experts.sums(hidden_TD, local_TK, gates_TK, of_layer)


def _home_ranks(num_tokens: int, config: ExpertConfig) -> jax.Array:
    """Return the first rank of the data rank of each gathered token [T, 1]."""
    per_data_rank = num_tokens // config.plan.mesh.shape[DATA]
    return (jnp.arange(num_tokens, dtype=jnp.int32) // per_data_rank * config.plan.tensor_size)[:, None]
